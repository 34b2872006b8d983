"""Proven ε of many alike runs: each question is put to the accountant once.

Runs that differ in seed alone draw other cohorts. What the accountant is asked about such a run is the envelope
of its clients' participations (`accountant.classes`): most often how often the busiest client took part. Two runs
with the same envelope, facts and δ have the same answer, so it is kept by the whole question, not by the spec.
"""

from __future__ import annotations

from typing import Any

from dither.experiment import build


def proven(experiment: build.Experiment) -> dict[str, Any]:
    """Proven ε of a whole run for its spec's view and adjacency, the largest over clients. Where clients may be
    lost it counts on as few as the spec tolerates, as `dither account` does."""
    accountant = experiment.accountant()
    row = accountant.row(accountant.proven()).to_json()
    row.pop("detail")
    return row
