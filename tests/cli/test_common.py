"""Tests of `dither.cli.common`: what a command line names becomes a spec."""

import warnings

import numpy as np
import pytest

from dither.__main__ import main
from dither.cli import common, runs
from dither.errors import SpecError
from dither.experiment import evaluation


def test_a_table_can_be_given_a_method():
    spec = common.source_from("a.csv", None, ["data.label=sick", "method=dp-scaffold"], 3)
    assert (spec.data.path, spec.data.label, spec.method, spec.seed) == ("a.csv", "sick", "dp-scaffold", 3)
    assert common.source_from("a.csv", None, ["data.label=sick"], None)["data.path"] == "a.csv"  # Dither chooses


def test_an_empty_name_is_no_preset():
    with pytest.raises(SpecError, match="is empty"):
        runs.run(None, [""])


def test_a_narrow_table_folds_what_does_not_fit(capsys, monkeypatch):
    """ "replac…" and "zero-o…" were all that 60 columns left of two neighbour relations."""
    monkeypatch.setenv("COLUMNS", "40")
    rows = [
        {"method": "dp-scaffold", "adversary": "server", "neighbouring data": "replace-one", "source": "R3"}
    ] * 2
    common.print_table(rows)
    common.print_lines("run", [("run folder", "a/very/long/path/to/a/folder/that/does/not/fit")])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 40


def test_no_warning_of_a_library_ends_a_command(monkeypatch):
    """Under -W error one record whose scores overflow gave `dither evaluate --epsilon` another exit code."""

    def command():
        odds = evaluation.score_columns(np.array([[np.inf, np.inf], [0.0, 1.0]]), np.array([0, 1]), "", 2)["score"]
        seen.append(odds.tolist())

    seen = []
    monkeypatch.setattr("dither.cli.main", command)
    monkeypatch.setattr("gc.set_threshold", lambda count: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main()
    assert seen == [[pytest.approx(np.nan, nan_ok=True), 1.0]]
