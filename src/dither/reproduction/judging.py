"""Criteria as statistics: what the seeds say about an order, a gain, an optimum.

Runs that share a seed share partition, initial model, cohorts and noise directions, so two settings are compared
seed by seed. A difference is the mean of the paired differences. It is significant when it exceeds two standard
errors of that mean by Student's t. A criterion that is undecided gets more seeds and is looked at again, at most
four times (`LOOKS`), so each look is at Pocock's level for four looks, 1.8%: 3.9 standard errors for 5 seeds, 2.5
for 30. The chance of a false alarm in any of them is then 5.7%, or 7.1% where the first look is after 3 seeds
(tests/reproduction/test_judging.py). Every judge answers

    holds          the seeds show it
    fails          the seeds show the opposite
    inconclusive   they show neither
    not judged     fewer than `FEWEST` seeds, or the scale leaves out what is needed

with the numbers it looked at. A criterion may rest on many comparisons: the numbers are always shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

HOLDS, FAILS, INCONCLUSIVE, NOT_JUDGED = "holds", "fails", "inconclusive", "not judged"
NOT_COMPUTED = "not computed"
FEWEST = 3
LOOKS = (5, 10, 20, 30)  # seeds after which an undecided criterion is judged again
LEVEL = 0.0182  # of each look, two-sided


@dataclass(frozen=True)
class Verdict:
    """The answer to a criterion, with its numbers in words and as rows of a table."""

    status: str
    text: str
    numbers: tuple[dict[str, Any], ...] = ()

    @property
    def seeds(self) -> int:
        """How many seeds it rests on; 0 for a formula."""
        return max((row.get("seeds", 0) for row in self.numbers), default=0)


@dataclass(frozen=True)
class Robustness:
    """The verdicts of one finding in several settings: the reference first; none if no open setting enters."""

    scale: str
    verdicts: tuple[dict[str, Any], ...]  # "setting", "changes" (names of open settings), "verdict", "seeds"

    @property
    def within(self) -> list[dict[str, Any]]:
        """The settings that the paper leaves open; not those that it gives and that are changed to look beyond."""
        return [row for row in self.verdicts if not row.get("beyond")]

    @property
    def computed(self) -> list[dict[str, Any]]:
        """The open settings that were computed and judged."""
        return [row for row in self.within if row["verdict"] not in (NOT_COMPUTED, NOT_JUDGED)]

    def deciding(self, printed: str = "") -> list[str]:
        """The open settings on which the verdict depends: with another value it is the opposite. Where the
        reference is undecided here, its verdict as printed counts; without any, what decides it in both ways."""
        reference, *others = (row["verdict"] for row in self.within)
        opposite = {HOLDS: {FAILS}, FAILS: {HOLDS}}
        against = opposite.get(reference) or opposite.get(printed, {HOLDS, FAILS})
        if not against <= set(others):
            return []
        decisive = [row["changes"] for row in self.within[1:] if row["verdict"] in against]
        single = [changes for changes in decisive if ", " not in changes]
        return list(dict.fromkeys(single or decisive))

    def describe(self, printed: str = "") -> str:
        """ "holds in 11 of 14 settings, fails in 1, undecided in 2; rate decides"."""
        tally = Counter(row["verdict"] for row in self.computed)
        beyond = Counter(row["verdict"] for row in self.verdicts if row.get("beyond"))
        missing = sum(row["verdict"] == NOT_COMPUTED for row in self.within)
        if not self.verdicts:
            return "no open setting enters"
        if not self.computed:
            return f"not judged at scale {self.scale}"
        others = {"fails": tally[FAILS], "undecided": tally[INCONCLUSIVE]}
        counts = [f"holds in {tally[HOLDS]} of {counted(len(self.computed), 'setting')}"]
        parts = [", ".join(counts + [f"{status} in {number}" for status, number in others.items() if number])]
        if tally[INCONCLUSIVE] == len(self.computed):
            parts = [f"undecided in all {counted(len(self.computed), 'setting')}"]
        elif (reference := self.verdicts[0]["verdict"]) == INCONCLUSIVE:
            parts[0] += " (the reference too)"
        elif printed and reference != printed and reference in (HOLDS, FAILS):
            parts[0] += f" (the reference {reference} at this scale)"
        names = [name.replace(", ", " with ") for name in self.deciding(printed)]
        if names:
            listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            parts.append(f"{listed} {'decides' if len(names) == 1 else 'decide'}")
        parts += [f"{status} in {number} beyond the paper" for status, number in beyond.items()]
        return "; ".join(parts + ([f"{missing} not computed"] if missing else []))


@dataclass(frozen=True)
class JudgedCriterion:
    """A criterion with its verdicts: as printed and, where it is judged so too, as deployed and at equal proven ε;
    and how it fares where an open setting is changed."""

    id: str
    variant: str
    claim: str
    errata: tuple[str, ...]
    note: str
    printed: Verdict
    deployed: Verdict | None = None  # None: what Dither deploys is what is printed
    proven: Verdict | None = None
    robustness: Robustness | None = None

    @property
    def name(self) -> str:
        """Its id, and its variant where it has one."""
        return f"{self.id} ({self.variant})" if self.variant else self.id

    def status(self, view: str) -> str:
        """The status in a view, or a dash."""
        verdict = getattr(self, view)
        return verdict.status if verdict else "–"

    @property
    def text(self) -> str:
        """Its verdicts in one line."""
        line = (
            f"{self.printed.status}; deployed: {self.status('deployed')}; equal proven ε: {self.status('proven')}"
        )
        return f"{line}; {self.robust_text}" if self.robustness else line

    @property
    def robust_text(self) -> str:
        """How it fares where open settings are changed; "" where that was not asked."""
        return self.robustness.describe(self.printed.status) if self.robustness else ""


def counted(number: int, thing: str) -> str:
    """ "1 figure", "2 figures"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class Difference(NamedTuple):
    """A paired difference over seeds."""

    mean: float
    error: float  # standard error of the mean
    seeds: int

    @property
    def sign(self) -> int:
        """1 significantly above 0, -1 significantly below, 0 neither."""
        if abs(self.mean) <= threshold(self.seeds) * self.error or self.mean == 0:
            return 0
        return 1 if self.mean > 0 else -1

    def __str__(self) -> str:
        return f"{self.mean:+.4g} ± {self.error:.2g}"


@cache
def threshold(seeds: int) -> float:
    """How many standard errors are significant: Student's t at the two-sided `LEVEL`."""
    from scipy.special import stdtrit

    return float(stdtrit(seeds - 1, 1 - LEVEL / 2)) if seeds > 1 else float("inf")


def mean_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over seeds and its standard error (∞ for a single seed)."""
    values = np.asarray(values, float)
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("inf")
    return float(np.mean(values)), error


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """a - b, seed by seed."""
    return Difference(*mean_error(np.asarray(a, float) - np.asarray(b, float)), len(a))


def summary(name: Any, values: np.ndarray) -> dict[str, Any]:
    """One row of a verdict's numbers."""
    mean, error = mean_error(values)
    return {"setting": str(name), "mean": mean, "standard error": error, "seeds": len(values)}


def too_few(*groups: np.ndarray) -> Verdict | None:
    """The verdict where there are not enough seeds, or runs that diverged."""
    seeds = min(len(group) for group in groups)
    if seeds < FEWEST:
        return Verdict(NOT_JUDGED, f"{counted(seeds, 'seed')}: fewer than {FEWEST} show no spread")
    if not all(np.all(np.isfinite(group)) for group in groups):
        return Verdict(INCONCLUSIVE, "some runs diverged: no finite value to compare")
    return None


def fact(holds: bool, text: str, numbers: Sequence[dict[str, Any]] = ()) -> Verdict:
    """A statement without chance in it (a formula): it holds or it does not."""
    return Verdict(HOLDS if holds else FAILS, text, tuple(numbers))


def _judged(
    groups: Sequence[np.ndarray],
    names: Sequence[Any],
    what: str,
    decide: Callable[[], tuple[bool, bool, str]],
    fewest: tuple[int, str] = (1, ""),
) -> Verdict:
    """What all judges share: the numbers, and no judgement of too few values or seeds. `decide` then says whether
    the criterion fails, else whether it holds, and why."""
    about = f"{what}: " if what else ""
    numbers = tuple(summary(f"{about}{name}", group) for name, group in zip(names, groups, strict=True))
    if len(groups) < fewest[0]:
        return Verdict(NOT_JUDGED, fewest[1], numbers)
    few = too_few(*groups)
    if few:
        return replace(few, numbers=numbers)
    fails, holds, text = decide()
    status = FAILS if fails else HOLDS if holds else INCONCLUSIVE
    return Verdict(status, f"{about}{text}", numbers)


def greater_by(a: np.ndarray, b: np.ndarray, names: tuple[str, str], *, what: str = "") -> Verdict:
    """a exceeds b."""

    def decide() -> tuple[bool, bool, str]:
        gap = difference(a, b)
        return gap.sign < 0, gap.sign > 0, f"{names[0]} − {names[1]} = {gap}"

    return _judged((a, b), names, what, decide)


def never_below(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    at: Sequence[Any],
    names: tuple[str, str],
    *,
    above: bool = True,
) -> Verdict:
    """a is nowhere significantly below b and, with `above`, somewhere significantly above it."""

    def decide() -> tuple[bool, bool, str]:
        gaps = [difference(first, second) for first, second in zip(a, b, strict=True)]
        listed = ", ".join(f"{gap} at {place}" for gap, place in zip(gaps, at, strict=True))
        signs = {gap.sign for gap in gaps}
        same = all(gap.mean == gap.error == 0 for gap in gaps)  # no number of seeds would tell them apart
        fails, holds = -1 in signs or (above and same), 1 in signs or not above
        return fails, holds, f"{names[0]} − {names[1]} = {listed}"

    groups = [group for pair in zip(a, b, strict=True) for group in pair]
    return _judged(groups, [f"{name} at {place}" for place in at for name in names], "", decide)


def ordered_within_noise(
    groups: Sequence[np.ndarray], names: Sequence[Any], *, rising: bool = True, what: str = ""
) -> Verdict:
    """The means follow the order of `groups`: the last significantly beats the first, and no step significantly
    goes back."""

    def decide() -> tuple[bool, bool, str]:
        direction = 1 if rising else -1
        ends = difference(groups[-1], groups[0])
        steps = [difference(b, a) for a, b in pairwise(groups)]
        back = [i for i, step in enumerate(steps) if step.sign * direction < 0]
        text = f"{names[-1]} − {names[0]} = {ends}"
        if back and len(groups) > 2:
            text += f"; but {names[back[0] + 1]} − {names[back[0]]} = {steps[back[0]]}"
        fails, holds = bool(back) or ends.sign * direction < 0, ends.sign != 0
        return fails, holds, text if fails or not holds else f"{text}; no step significantly goes back"

    return _judged(groups, names, what, decide, (2, "a single value has no order"))


def order_is_broken(
    groups: Sequence[np.ndarray], names: Sequence[Any], *, rising: bool = True, what: str = ""
) -> Verdict:
    """Some pair significantly goes against the order; fails where the order is shown."""

    def decide() -> tuple[bool, bool, str]:
        direction = 1 if rising else -1
        pairs = [(i, j, difference(groups[j], groups[i])) for i, j in combinations(range(len(groups)), 2)]
        i, j, gap = min(pairs, key=lambda pair: direction * pair[2].mean)
        broken = gap.sign * direction < 0
        shown = ordered_within_noise(groups, names, rising=rising).status == HOLDS
        said = "against the order" if broken else "no pair is against the order; nearest to it"
        return shown and not broken, broken, f"{said}: {names[j]} − {names[i]} = {gap}"

    return _judged(groups, names, what, decide, (2, "a single value has no order"))


def interior_optimum(
    groups: Sequence[np.ndarray], names: Sequence[Any], *, lowest: bool = True, what: str = ""
) -> Verdict:
    """A value inside the grid significantly beats both its ends.

    The best inside is chosen by its mean, which flatters it a little: the two comparisons are what is judged."""

    def decide() -> tuple[bool, bool, str]:
        direction = -1.0 if lowest else 1.0
        means = [direction * float(np.mean(group)) for group in groups]
        best = 1 + int(np.argmax(means[1:-1]))
        left, right = (difference(direction * groups[best], direction * groups[end]) for end in (0, -1))
        text = f"best inside {names[best]}; it beats {names[0]} by {left} and {names[-1]} by {right}"
        return min(left.sign, right.sign) < 0, min(left.sign, right.sign) > 0, text

    return _judged(groups, names, what, decide, (3, "fewer than three values: no interior"))


def convex(groups: Sequence[np.ndarray], x: Sequence[float], *, what: str = "") -> Verdict:
    """Slopes grow along x: none significantly shrinks, and at least one significantly grows."""

    def decide() -> tuple[bool, bool, str]:
        slopes = [(b - a) / (v - u) for (a, b), (u, v) in zip(pairwise(groups), pairwise(x), strict=True)]
        bends = [difference(later, earlier) for earlier, later in pairwise(slopes)]
        listed = ", ".join(f"at {at:g}: {bend}" for at, bend in zip(x[1:-1], bends, strict=True))
        signs = {bend.sign for bend in bends}
        return -1 in signs, 1 in signs, f"change of slope {listed}"

    names = [f"{at:g}" for at in x]
    return _judged(groups, names, what, decide, (3, "fewer than three values have no curvature"))


def all_of(*verdicts: Verdict) -> Verdict:
    """All must hold; one that fails makes the whole fail."""
    statuses = {verdict.status for verdict in verdicts}
    status = next((each for each in (FAILS, NOT_JUDGED, INCONCLUSIVE) if each in statuses), HOLDS)
    text = "; ".join(dict.fromkeys(f"{verdict.text} ({verdict.status})" for verdict in verdicts))
    return Verdict(status, text, tuple(row for verdict in verdicts for row in verdict.numbers))
