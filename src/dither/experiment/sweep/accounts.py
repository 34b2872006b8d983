"""Proven ε of many alike runs: each question is put to the accountant once.

Runs that differ in seed alone draw other cohorts. What the accountant is asked about such a run is the envelope
of its clients' participations (`accountant.classes`): most often how often the busiest client took part. Two runs
with the same envelope, facts and δ have the same answer, so it is kept by the whole question, not by the spec.
"""

from __future__ import annotations

from typing import Any

from dither import accounting
from dither.accounting import accountant
from dither.experiment import build


class Book:
    """Answers of the accountant, by the whole question."""

    def __init__(self) -> None:
        self._answers: dict[Any, accounting.Proven] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def proven(self, experiment: build.Experiment) -> dict[str, Any]:
        """Proven ε of a whole run for its spec's view and adjacency, the largest over clients. Where clients may
        be lost it counts on as few as the spec tolerates, as `dither account` does."""
        judged = build.with_missing(experiment, build.tolerated(experiment.spec))
        circumstances = build.circumstances(judged)
        facts, privacy = accountant.facts(circumstances), experiment.spec.privacy
        most = (group.most for group in build.classes(judged, None))
        asked, facts = accountant.question_of(most, facts, privacy.view)
        found = [self._ask(each, privacy.delta, facts, privacy.view, experiment.spec.adjacency) for each in asked]
        worst = max(found, key=lambda answer: answer.value)
        return {
            "value": worst.value,
            "unit": worst.unit,
            "delta": worst.delta,
            "view": worst.view,
            "adjacency": worst.adjacency,
            "recipe": worst.recipe,
            "assumed": worst.assumed or circumstances.assumed,
            "not_covered": list(worst.not_covered),
            "against": accountant.against(worst, circumstances),
        }

    def _ask(
        self, releases: tuple[Any, ...], delta: float, facts: accounting.Facts, view: str, adjacency: str
    ) -> accounting.Proven:
        question = (releases, delta, facts, view, adjacency)
        if question not in self._answers:
            self._answers[question] = accounting.proven(
                list(releases), delta, facts, view=view, adjacency=adjacency
            )
        return self._answers[question]
