"""Tests of `dither.cli.common`: what a command line names becomes a spec."""

import pytest

from dither.cli import common, runs
from dither.errors import SpecError


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
