"""Claims as statistics: what seeds say about an order, a gain, an optimum.

Runs that share a seed share partition, initial model, cohorts and noise directions, so two settings are compared
seed by seed: a difference is the mean of the paired differences, and sure when it exceeds two standard errors of
that mean, and more for few seeds: Student's t at 95%, 2.8 standard errors for 5 seeds, 4.3 for 3. Every helper
answers

    holds          the seeds show it
    fails          the seeds show the opposite
    inconclusive   they show neither
    not judged     fewer than `FEWEST` seeds, or the scale leaves out what is needed

with the numbers it looked at. Of twenty comparisons without any effect one would still be called sure, and a claim
may rest on many: the numbers are always shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

HOLDS, FAILS, INCONCLUSIVE, NOT_JUDGED = "holds", "fails", "inconclusive", "not judged"
FEWEST = 3


class Verdict(NamedTuple):
    """The answer to a claim, its numbers in words, and the numbers themselves."""

    status: str
    text: str
    numbers: tuple[dict[str, Any], ...] = ()


class Difference(NamedTuple):
    """A paired difference over seeds."""

    mean: float
    error: float  # standard error of the mean
    seeds: int

    @property
    def sign(self) -> int:
        """1 surely above 0, -1 surely below, 0 neither."""
        if abs(self.mean) <= sure(self.seeds) * self.error or self.mean == 0:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.4g} ± {self.error:.2g}"


@cache
def sure(seeds: int) -> float:
    """How many standard errors make a difference sure: Student's t, two-sided 95%, and never less than 2."""
    from scipy.special import stdtrit

    return max(2.0, float(stdtrit(seeds - 1, 0.975))) if seeds > 1 else float("inf")


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """a - b, seed by seed."""
    d = np.asarray(a, float) - np.asarray(b, float)
    error = float(np.std(d, ddof=1) / np.sqrt(len(d))) if len(d) > 1 else float("inf")
    return Difference(float(np.mean(d)), error, len(d))


def mean_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over seeds and its standard error (∞ for a single seed)."""
    values = np.asarray(values, float)
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
    return float(np.mean(values)), error


def summary(name: Any, values: np.ndarray) -> dict[str, Any]:
    """One row of a claim's numbers."""
    mean, error = mean_error(values)
    return {"setting": str(name), "mean": mean, "standard error": error, "seeds": len(values)}


def too_few(*groups: np.ndarray) -> Verdict | None:
    """The verdict where there are not enough seeds, or runs that diverged."""
    seeds = min(len(group) for group in groups)
    if seeds < FEWEST:
        plural = "s" if seeds != 1 else ""
        return Verdict(NOT_JUDGED, f"{seeds} seed{plural}: fewer than {FEWEST} show no spread")
    if not all(np.all(np.isfinite(group)) for group in groups):
        return Verdict(INCONCLUSIVE, "some runs diverged: no finite value to compare")
    return None


def needs_seeds(seeds: Sequence[int]) -> Verdict | None:
    """The verdict of a claim about means and settings that one or two seeds cannot carry."""
    return too_few(np.zeros(len(seeds)))


def not_judged(reason: str) -> Verdict:
    """A claim that this scale cannot speak about."""
    return Verdict(NOT_JUDGED, reason)


def fact(holds: bool, text: str, numbers: Sequence[dict[str, Any]] = ()) -> Verdict:
    """A statement without chance in it (a formula): it holds or it does not."""
    return Verdict(HOLDS if holds else FAILS, text, tuple(numbers))


def greater_by(
    a: np.ndarray, b: np.ndarray, names: tuple[str, str], *, what: str = "", margin: float = 0.0
) -> Verdict:
    """a exceeds b (by more than `margin`)."""
    few = too_few(a, b)
    numbers = (summary(names[0], a), summary(names[1], b))
    if few:
        return few._replace(numbers=numbers)
    gap = difference(a, b)._replace(mean=difference(a, b).mean - margin)
    status = {1: HOLDS, -1: FAILS, 0: INCONCLUSIVE}[gap.sign]
    beyond = f" beyond the margin {margin:g}" if margin else ""
    return Verdict(status, f"{_with(what)}{names[0]} − {names[1]} = {gap}{beyond}", numbers)


def never_below(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], at: Sequence[Any], names: tuple[str, str], *, what: str = ""
) -> Verdict:
    """a is at no place surely below b, and at some place surely above it."""
    numbers = tuple(
        summary(f"{name} at {place}", group)
        for place, first, second in zip(at, a, b, strict=True)
        for name, group in zip(names, (first, second), strict=True)
    )
    few = too_few(*a, *b)
    if few:
        return few._replace(numbers=numbers)
    gaps = [difference(first, second) for first, second in zip(a, b, strict=True)]
    words = ", ".join(f"{gap} at {place}" for gap, place in zip(gaps, at, strict=True))
    text = f"{_with(what)}{names[0]} − {names[1]} = {words}"
    if any(gap.sign < 0 for gap in gaps):
        return Verdict(FAILS, text, numbers)
    return Verdict(HOLDS if any(gap.sign > 0 for gap in gaps) else INCONCLUSIVE, text, numbers)


def ordered_within_noise(
    groups: Sequence[np.ndarray], names: Sequence[Any], *, rising: bool = True, what: str = ""
) -> Verdict:
    """The means follow the order of `groups`: the last surely beats the first, and no step goes surely back."""
    numbers = tuple(summary(name, group) for name, group in zip(names, groups, strict=True))
    if len(groups) < 2:
        return Verdict(NOT_JUDGED, "a single value has no order", numbers)
    few = too_few(*groups)
    if few:
        return few._replace(numbers=numbers)
    turn = 1 if rising else -1
    ends = difference(groups[-1], groups[0])
    steps = [difference(b, a) for a, b in pairwise(groups)]
    back = [i for i, step in enumerate(steps) if step.sign * turn < 0]
    text = f"{_with(what)}{names[-1]} − {names[0]} = {ends}"
    if back:
        i = back[0]
        if len(groups) > 2:
            text += f"; but {names[i + 1]} − {names[i]} = {steps[i]}"
        return Verdict(FAILS, text, numbers)
    if ends.sign * turn < 0:
        return Verdict(FAILS, text, numbers)
    if ends.sign == 0:
        return Verdict(INCONCLUSIVE, text, numbers)
    return Verdict(HOLDS, text + "; no step surely goes back", numbers)


def not_monotone(groups: Sequence[np.ndarray], names: Sequence[Any], *, what: str = "") -> Verdict:
    """Some pair surely rises and some pair surely falls; fails where a monotone order is shown."""
    numbers = tuple(summary(name, group) for name, group in zip(names, groups, strict=True))
    if len(groups) < 3:
        return Verdict(NOT_JUDGED, "fewer than three values", numbers)
    few = too_few(*groups)
    if few:
        return few._replace(numbers=numbers)
    pairs = [
        (i, j, difference(groups[j], groups[i])) for i in range(len(groups)) for j in range(i + 1, len(groups))
    ]
    up = max(pairs, key=lambda pair: pair[2].mean)
    down = min(pairs, key=lambda pair: pair[2].mean)
    shown = [f"{names[j]} − {names[i]} = {gap}" for i, j, gap in (up, down)]
    text = _with(what) + " and ".join(dict.fromkeys(shown))
    signs = {gap.sign for _, _, gap in pairs}
    if {1, -1} <= signs:
        return Verdict(HOLDS, text, numbers)
    shown_order = any(ordered_within_noise(groups, names, rising=way).status == HOLDS for way in (True, False))
    return Verdict(FAILS if shown_order else INCONCLUSIVE, text + " (monotone within noise)", numbers)


def interior_optimum(
    groups: Sequence[np.ndarray], names: Sequence[Any], *, lowest: bool = True, what: str = ""
) -> Verdict:
    """A value inside the grid surely beats both its ends.

    The best inside is chosen by its mean, which flatters it a little: the two comparisons are what is judged."""
    numbers = tuple(summary(name, group) for name, group in zip(names, groups, strict=True))
    if len(groups) < 3:
        return Verdict(NOT_JUDGED, "fewer than three values: no interior", numbers)
    few = too_few(*groups)
    if few:
        return few._replace(numbers=numbers)
    turn = -1.0 if lowest else 1.0
    means = [turn * float(np.mean(group)) for group in groups]
    best = 1 + int(np.argmax(means[1:-1]))
    left, right = (difference(turn * groups[best], turn * groups[end]) for end in (0, -1))
    text = f"{_with(what)}best inside {names[best]}; it beats {names[0]} by {left} and {names[-1]} by {right}"
    if left.sign > 0 and right.sign > 0:
        return Verdict(HOLDS, text, numbers)
    return Verdict(FAILS if left.sign < 0 or right.sign < 0 else INCONCLUSIVE, text, numbers)


def convex(groups: Sequence[np.ndarray], x: Sequence[float], *, what: str = "") -> Verdict:
    """Slopes grow along x: none surely shrinks, and at least one change of slope is surely positive."""
    numbers = tuple(summary(f"{at:g}", group) for at, group in zip(x, groups, strict=True))
    if len(groups) < 3:
        return Verdict(NOT_JUDGED, "fewer than three values have no curvature", numbers)
    few = too_few(*groups)
    if few:
        return few._replace(numbers=numbers)
    slopes = [(b - a) / (v - u) for a, b, u, v in zip(groups, groups[1:], x, x[1:], strict=False)]
    bends = [difference(later, earlier) for earlier, later in pairwise(slopes)]
    words = ", ".join(f"at {at:g}: {bend}" for at, bend in zip(x[1:-1], bends, strict=True))
    text = f"{_with(what)}change of slope {words}"
    if any(bend.sign < 0 for bend in bends):
        return Verdict(FAILS, text, numbers)
    return Verdict(HOLDS if any(bend.sign > 0 for bend in bends) else INCONCLUSIVE, text, numbers)


def all_of(*verdicts: Verdict) -> Verdict:
    """All must hold; one that fails makes the whole fail."""
    for status in (FAILS, NOT_JUDGED, INCONCLUSIVE):
        if any(verdict.status == status for verdict in verdicts):
            break
    else:
        status = HOLDS
    text = "; ".join(f"{verdict.text} ({verdict.status})" for verdict in verdicts)
    return Verdict(status, text, tuple(row for verdict in verdicts for row in verdict.numbers))


def _with(what: str) -> str:
    return f"{what}: " if what else ""
