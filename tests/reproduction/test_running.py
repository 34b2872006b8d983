"""`dither reproduce all --scale smoke`: every figure trained (on stand-in data), judged, drawn and reported."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from dither.cli import app
from dither.reproduction import drawing, reproduce
from dither.reproduction.cache import Cache
from dither.reproduction.figure import load, select

# Final training loss of nbafl/fig2 at the smallest scale, ε = ∞, seed 0.
NUMBERS_OF_VERSION_1 = 2.286355


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(["secure-fedavg/fig1", "dp-scaffold/fig3"], marks=pytest.mark.slow),
        ["nbafl/fig2"],  # proven noise
        pytest.param(["nbafl/fig8", "nbafl/fig10"], marks=pytest.mark.slow),  # constants, a corrected lemma
        pytest.param(["cpfed/fig6"], marks=pytest.mark.slow),  # tuned lines
        pytest.param(["all"], marks=pytest.mark.slow),  # its 15 programs take a minute to compile
    ],
)
def test_the_smallest_scale(what, tmp_path):
    result = reproduce(what, scale="smoke", cache=tmp_path / "cache", out=tmp_path / "out")
    wanted = [figure.id for figure in select(what)]
    assert [figure.id for figure in result.figures] == wanted
    for figure in result.figures:
        stem = figure.id.replace("/", "-")
        pictures = [name for name in figure.files if name.endswith(".png")]
        assert f"{stem}-printed.png" in pictures
        for name in pictures:
            drawn = (tmp_path / "out" / name).read_bytes()
            assert drawn.startswith(b"\x89PNG")
            assert int.from_bytes(drawn[16:20], "big") == round(drawing.WIDTH * drawing.DPI)
            assert "<svg" in (tmp_path / "out" / name).with_suffix(".svg").read_text()
        with (tmp_path / "out" / f"{stem}.csv").open() as file:
            values = [float(row["value"]) for row in csv.DictReader(file)]
        assert values
        assert np.all(np.isfinite(values))
        assert figure.runs > 0 or figure.id == "dp-scaffold/fig3"
        assert all(claim.printed.text for claim in figure.claims)
    page = result.report.read_text()
    assert page.count('<img alt="') == sum(name.endswith(".png") for each in result.figures for name in each.files)
    assert not re.search(r'(src|href)="(https?:)?//', page), "the page must be self-contained"
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["id"] for entry in saved["figures"]] == wanted
    if "nbafl/fig2" in what:
        view = load("nbafl/fig2").views("smoke", Cache(tmp_path / "cache"))[0]
        loss = view.final({"privacy.epsilon": float("inf")}, "train_loss")[0]
        message = "training gives other numbers: raise reproduction.cache.NUMERICS and put the new one here"
        assert loss == pytest.approx(NUMBERS_OF_VERSION_1, rel=1e-3), message


@pytest.mark.slow
def test_processes_give_what_one_process_gives(tmp_path):
    what, drawn = ["cpfed/fig8", "dp-scaffold/fig3"], []
    alone = reproduce(what, scale="smoke", cache=tmp_path / "alone")
    shared = reproduce(
        what, scale="smoke", cache=tmp_path / "cache", out=tmp_path / "out", jobs=2, on_figure=drawn.append
    )
    assert [figure.id for figure in shared.figures] == [figure.id for figure in alone.figures]
    assert [claim.text for claim in shared.claims] == [claim.text for claim in alone.claims]
    assert {figure.id for figure in drawn} == set(what)
    assert shared.provenance["computed"] == alone.provenance["computed"] > 0
    assert shared.provenance["missing"] == 0
    assert (tmp_path / "out" / "cpfed-fig8-printed.png").is_file()


@pytest.mark.slow
def test_robustness_at_the_smallest_scale(tmp_path):
    result = reproduce("cpfed/fig8", scale="smoke", robust="smoke", cache=tmp_path / "cache", out=tmp_path / "out")
    (claim,) = result.claims
    verdicts = [row["verdict"] for row in claim.robustness.verdicts]
    assert verdicts == ["not judged"] * (1 + len(load("cpfed/fig8").changes()))  # one seed; but every run is there
    assert claim.robust_text in result.report.read_text()


def test_every_finding_says_how_it_fares_with_open_settings_changed(tmp_path):
    result = reproduce("dp-scaffold/fig3", scale="quick", robust="robust", cache=tmp_path, out=tmp_path / "out")
    said = {claim.id: claim.robust_text for claim in result.claims}
    assert said == {"SC-A3": "holds in 3 of 3 settings", "SC-A4": "no open setting enters"}
    assert result.report.read_text().count("no open setting enters") == 2  # in the table, and with the figure


def test_the_command_line(tmp_path):
    """Formulas only, so that nothing is trained."""
    runner = CliRunner()
    listed = runner.invoke(app, ["reproduce", "--list", "--json"])
    assert len(json.loads(listed.stdout)) == 27
    where = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    drawn = runner.invoke(app, ["reproduce", "dp-scaffold/fig3", "--scale", "quick", *where])
    assert drawn.exit_code == 0, drawn.output
    assert "SC-A3" in drawn.output
    assert (tmp_path / "out" / "report.html").is_file()
    against = str(tmp_path / "out" / "report.json")
    again = runner.invoke(app, ["reproduce", "dp-scaffold/fig3", *where, "--against", against, "--json"])
    assert json.loads(again.stdout)["disagreements"] == []
    unknown = runner.invoke(app, ["reproduce", "nbafl/fig1"])
    assert unknown.exit_code != 0


def test_computing_needs_no_package_of_the_command_line(tmp_path):
    """A machine that only computes has neither typer nor cryptography nor what pydantic brings."""
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('typer', 'click', 'cryptography', 'pydantic', 'jax_privacy'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "from dither.reproduction.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["dp-scaffold/fig3", "--scale", "full", "--only-compute", "--cache", str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def test_data_that_cannot_be_had_is_said_and_the_rest_goes_on(tmp_path, monkeypatch):
    from dither.errors import DataError
    from dither.experiment import build

    def unreachable(spec, data_dir=None):
        raise DataError("no copy and no way to fetch one")

    monkeypatch.setattr(build, "load_data", unreachable)
    wanted = ["dp-scaffold/fig3", "cpfed/fig6"]
    result = reproduce(wanted, scale="smoke", cache=tmp_path / "cache", out=tmp_path / "out")
    theory, runs = result.figures
    assert theory.refused == ""
    assert "no copy" in runs.refused
    assert all(claim.printed.status == "not judged" for claim in runs.claims)
