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
