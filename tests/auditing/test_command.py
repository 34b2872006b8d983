"""`dither audit`: the table, the files, and the exit code that a violation has."""

import json
import re

import pytest
from typer.testing import CliRunner

import dither
from dither.cli import app

BUGGY = """
from dither.methods import cpfed

OPTIONS = cpfed.OPTIONS


def prepare(model, setting):
    \"\"\"CPFed with half the noise it accounts for.\"\"\"
    made = cpfed.prepare(model, setting)

    def build(hyper):
        quiet = made.build({**hyper, "noise_std": hyper["noise_std"] / 2})
        return quiet._replace(releases=made.build(hyper).releases)

    return made._replace(build=build)
"""

SPEC = """
method = "{method}"
num_clients = 4
cohort_size = 4
num_rounds = 1
local_steps = 1
batch_sampling = "full"

[data]
name = "breast-cancer"

[privacy]
epsilon = 2.0
noise = "proven"
"""


def invoke(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_a_method_with_half_its_noise_ends_with_the_exit_code_of_a_violation(tmp_path):
    (tmp_path / "halved.py").write_text(BUGGY)
    (tmp_path / "spec.toml").write_text(SPEC.format(method=tmp_path / "halved.py"))
    result = invoke(tmp_path / "spec.toml", "--view", "upload", "--trials", 2000, "--out", tmp_path / "found")
    assert result.exit_code == 5, result.output
    assert "VIOLATION" in result.output
    saved = json.loads((tmp_path / "found" / "audit.json").read_text())
    assert saved["rows"][0]["verdict"] == "VIOLATION"
    assert saved["rows"][0]["attacked"]["confidence"] == pytest.approx(0.95)
    assert (tmp_path / "found" / "audit-roc.png").is_file()
    assert (tmp_path / "found" / "audit-trials.png").is_file()
    for bound in saved["rows"][0]["bounds"]:  # each is a lower bound: rounded down
        printed = re.search(rf"([\d.e+]+) by {re.escape(bound['form'])}", result.output)
        assert float(printed[1]) <= bound["value"]


def test_a_run_keeps_what_its_audit_found(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC.format(method="cpfed"))
    folder = tmp_path / "run"
    dither.run(tmp_path / "spec.toml", out=folder)
    result = invoke(folder, "--view", "upload", "--trials", 2000, "--canaries", 20)
    assert result.exit_code == 0, result.output
    rows = json.loads((folder / "audit.json").read_text())["rows"]
    assert [row["unit"] for row in rows] == ["run", "one run"]
    shown = CliRunner().invoke(app, ["account", str(folder)])
    assert "attacked" in shown.output


def test_what_is_found_in_own_records_is_not_put_into_a_copy_of_what_is_released(tmp_path):
    """Other users of the machine could read it there, and the copy was then a damaged run."""
    spec = dither.Spec.from_toml(SPEC.format(method="cpfed")).with_values({"data.name": "", "data.path": "x.npz"})
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "spec.toml").write_text(spec.to_toml())
    result = invoke(tmp_path / "copy")
    assert "is a copy without local/" in str(result.exception)
    assert not (tmp_path / "copy" / "local").exists()


def test_one_function_audits():
    from dither import auditing

    assert dither.audit is dither.audit is auditing.audit


def test_wrong_values_are_named():
    for arguments, words in (
        (("cpfed", "--view", "uploads"), "view='uploads'"),
        (("cpfed", "--trials", "5"), "trials=5"),
        (("cpfed", "--confidence", "1.5"), "confidence=1.5"),
    ):
        result = invoke(*arguments)
        assert result.exit_code != 0
        assert words in str(result.exception)
