"""What an attack found of one view, its exhibited pair, and the line of the report."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from dither.accounting import ProvenRow
from dither.auditing import bounds, scores
from dither.experiment.build import Experiment
from dither.privacy import sampling
from dither.types import Release

_TWO_POINTS = 0.05  # noise stds within which noiseless outputs count as one point


class Row(NamedTuple):
    """One line of the report before it is made plain: what was attacked and what was found."""

    view: str
    unit: str
    design: str
    rounds: int
    bounds: list[bounds.LowerBound]
    scores_in: np.ndarray
    scores_out: np.ndarray
    cuts: list[bounds.Cut]
    mu_cuts: list[bounds.Cut]  # empty where the trade-off is not a Gaussian's


def round_rate(release: tuple[Release, ...], local_steps: int) -> float:
    """Probability that one record is used in one participation."""
    if not release:
        return 1.0
    one = release[0].sampling
    if one.kind.endswith("-round"):
        return max(one.rate, 1e-9)
    return max(sampling.used_in_round(one, local_steps), 1e-9)


def is_plain(release: tuple[Release, ...]) -> bool:
    """No sampling: the trade-off of each view is a Gaussian's."""
    return bool(release) and all(r.sampling.kind in ("full", "full-round") for r in release)


def exhibit(pilot: scores.Pilot, score: scores.Score, release: tuple[Release, ...]) -> bounds.Exhibit | None:
    """The pilot as an exhibited pair, where its noiseless outputs are two points: one with the record used, one
    without. None where they are not, where rounds differ by more than 2%, or where one round's use tells of
    another's.
    """
    if not release or np.any(score.helper) or np.any(score.before):
        return None
    inside, outside = pilot.plain_in.target, pilot.plain_out.target
    base = outside[0]
    grain = _TWO_POINTS * score.noise_std
    moved = np.abs(inside - base) > grain
    if np.any(np.abs(outside - base) > grain) or not np.any(moved):
        return None
    rounds = inside.shape[1]
    if rounds > 1 and release[0].sampling.kind.startswith("shuffled"):
        return None
    if not np.all(np.any(moved, axis=0)):
        return None
    shift = np.where(moved, inside - base, 0.0)
    distance = shift.sum(axis=0) / moved.sum(axis=0)
    if np.any(np.abs(np.where(moved, inside - base - distance, 0.0)) > grain):
        return None
    residual = np.concatenate(
        [pilot.seen_in.target - pilot.plain_in.target, pilot.seen_out.target - pilot.plain_out.target]
    )
    ratio = residual.std(axis=0) / np.abs(distance)
    if (
        rounds > 1
        and not is_plain(release)
        and ratio.max() > 1.02 * ratio.min() + 6 * ratio.mean() / math.sqrt(len(residual))
    ):
        return None
    # Always, where the method says so and the pilot saw nothing else.
    used = None if is_plain(release) and np.all(moved) else int(moved.sum())
    if rounds == 1:
        nearest = np.abs(shift[moved]).min()
        return bounds.Exhibit(float(nearest), residual.ravel(), used, moved.size)
    # In units of each round's distance; unequal rounds without sampling: the mean of σ² is cautious (Jensen).
    nearest = np.abs(np.where(moved, inside - base, distance)).min(axis=0) / np.abs(distance)
    return bounds.Exhibit(
        float(nearest.min()),
        (residual / np.abs(distance)).ravel(),
        used,
        moved.size,
        rounds,
    )


def plain_row(
    row: Row,
    experiment: Experiment,
    table: list[ProvenRow],
    claim: dict[str, Any],
    confidence: float,
    reached: list[dict[str, Any]],
) -> dict[str, Any]:
    """A row as plain values, with what is proved for the same view, and the verdict."""
    adjacency = experiment.spec.adjacency
    unit = "run" if row.unit == "one run" else row.unit
    match = next(
        r
        for r in table
        if r["view"] == row.view and r["adjacency"] == adjacency and r["unit"].split(",")[0] == unit
    )
    best = max(row.bounds, key=lambda b: b.value)
    spoken_of = claim["unit"] == unit and claim["adjacency"] == adjacency and _claim_covers(row, experiment)
    claim_here = claim["value"] if spoken_of else None
    violated = not match["assumed"] and best.value > match["value"] * (1 + 1e-6)
    return {
        "view": row.view,
        "unit": row.unit,
        "adjacency": adjacency,
        "delta": experiment.spec.privacy.delta,
        "claimed": claim_here,
        "proven": match["value"],
        "recipe": match["recipe"],
        "assumed": match["assumed"],
        "not_covered": match["not_covered"],
        "attacked": {
            "value": best.value,
            "form": best.form,
            "confidence": confidence,
            "trials": best.trials,
            "detail": best.detail,
        },
        "bounds": [b._asdict() for b in row.bounds],
        "design": row.design,
        "rounds": row.rounds,
        "refutes_claim": claim_here is not None and best.value > claim_here,
        "verdict": "VIOLATION" if violated else "within the proof",
        "reached": reached,
    }


def _claim_covers(row: Row, experiment: Experiment) -> bool:
    """Whether the paper's ε is meant for this adversary: claims that credit the others' noise are for sums,
    NbAFL's is for an outsider who sees L uploads."""
    credited = experiment.spec.method_options.get("aggregation_credit") or experiment.spec.method_options.get(
        "equal_credit"
    )
    if credited or "credited_clients" in experiment.spec.method_options:
        return row.view != "upload"
    exposures = experiment.plan.exposures
    return not exposures or row.view in ("broadcast", "final") or row.rounds <= exposures
