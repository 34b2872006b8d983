"""Explanations: every erratum that a method names is explained, and numbers are not prettified."""

import re
from dataclasses import replace
from pathlib import Path

from dither.accounting import ProvenRow
from dither.methods import method
from dither.spec import METHODS
from dither.web import run_page

ROOT = Path(__file__).parents[2]


def test_every_erratum_of_a_method_is_explained():
    for name in METHODS:
        ids = set(re.findall(r"\b[GENSCD]\d\b", method(name).why))
        assert ids <= set(run_page.ERRATA), name


def test_every_erratum_that_is_explained_is_documented():
    documented = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    for name in run_page.ERRATA:
        assert f"**{name}**" in documented, name


def test_odds():
    assert run_page.odds(0.1) == "changes an adversary's odds by at most 11%"
    assert "factor of at most 2.72" in run_page.odds(1.0)
    assert "10¹⁶" in run_page.odds(35.0)  # 1.6e15 is more than 10¹⁵
    assert "no bound" in run_page.odds(float("inf"))
    assert run_page.odds(None) == ""


def test_what_has_no_proof_is_said_plainly():
    row = ProvenRow("upload", "zero-out", float("inf"), 1e-5, "run", "no proof")
    assert "no theorem bounds what can be learned if one record is blanked" in run_page.explain(row)
    assert "factor of at most 2.72" in run_page.explain(replace(row, value=1.0))
