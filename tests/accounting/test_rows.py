"""Tests of `dither.accounting.views`: rows of the table of proven ε."""

import json
import math

import pytest

from dither.accounting import ClientRange, ProvenRow
from dither.experiment import folder
from dither.experiment.report import decode

ROW = ProvenRow("sum", "zero-out", 1.25, 1e-5, "run", "R6", not_covered=("rounding (G8)",), detail="5 rounds")


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ProvenRow("upload", "add/remove", math.inf, 1e-5, "message", "no proof", assumed=True),
        ProvenRow(
            "sum", "zero-out", 1.0, 0.0, "run", "R1", clients=ClientRange(0.5, 0.75, math.inf), no_credit="why"
        ),
    ],
)
def test_a_row_comes_back_from_json_as_it_was(row):
    assert decode(ProvenRow, json.loads(folder.to_json(row))) == row
    assert decode(ProvenRow, row.to_json()) == row


def test_optional_entries_are_left_out_of_json():
    assert "clients" not in ROW.to_json()
    assert "no_credit" not in ROW.to_json()


@pytest.mark.parametrize("broken", [{}, {**ROW.to_json(), "value": "large"}, {**ROW.to_json(), "not_covered": 3}])
def test_what_is_no_row_is_refused(broken):
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(ProvenRow, broken)
