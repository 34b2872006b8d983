"""`dither plan` as a user has it: files, tables, JSON, exit codes."""

import json
import sys

import pytest

from dither import cli
from dither.experiment.plan import planner
from dither.spec import Spec

SMALL = [
    "plan", "cpfed", "--epsilon", "8", "--clients", "4", "--model", "logistic", "--proxy", "breast-cancer",
    "--public-fraction", "0.5", "--set", "data.features=all", "--set", "batch_size=56", "--set", "local_steps=1",
    "--set", "cohort_size=4", "--set", "client_lr=0.5", "--set", "privacy.clip_norm=1",
    "--grid", "num_rounds=5,20", "--seeds", "2", "--quick",
]  # fmt: skip


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dither", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code or 0


@pytest.mark.slow
def test_a_plan_leaves_a_spec_and_a_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(planner, "OTHER_BUDGETS", (4.0,))  # each costs time, one shows that it works
    files = ["--out", tmp_path / "plan.toml", "--picture", tmp_path / "plan.png"]
    assert call(monkeypatch, *SMALL, *files, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    spec = Spec.from_any(tmp_path / "plan.toml")
    assert (spec.data.name, spec.data.part, spec.data.public_fraction) == ("breast-cancer", "private", 0.5)
    assert (spec.privacy.noise, spec.privacy.epsilon, spec.batch_size) == ("proven", 8.0, 56)
    assert spec.num_rounds in (5, 20)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert report["choice"]["num_rounds"] == spec.num_rounds
    assert report["proven_epsilon"] <= 8.0
    assert report["pareto"]
    assert report["spec"] == spec.to_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "cohort_size=40"], "nearest feasible: cohort_size=4"),
        (["--grid", "batch_size=500"], "nearest feasible: batch_size=56"),
        (["--grid", "num_rounds"], "not of the form key=number"),
        (["--constant", "smoothness"], "not of the form name=number"),
        (["--public-fraction", "0"], "give --records"),
        (["--out", "no/such/folder/plan.toml"], "does not exist"),
    ],
)
def test_what_cannot_be_had_ends_with_code_2(monkeypatch, capsys, arguments, words):
    asked = [*SMALL[:14], "--mode", "empirical", "--quick", *arguments]
    assert call(monkeypatch, *asked) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
