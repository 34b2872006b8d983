"""The measured mode: successive halving on public records, whole rungs as a few compiled programs.

All candidates start with one seed and the neighbours of the best join them; the better part goes on with more
seeds, and the last few are decided by the mean over all of theirs. The seeds of a search are never those of a
final run (0, 1, 2, ...), so that no plan is chosen for its luck. Each candidate's noise is the accountant's for
the full budget: nothing is shortened, only the number of seeds differs between rungs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dither.data import Dataset
from dither.errors import NoProof
from dither.experiment.partial import Unfinished
from dither.experiment.plan.knobs import Point, neighbours, shape
from dither.experiment.plan.pricing import Price, price
from dither.experiment.plan.shapes import Material, rehearsal
from dither.experiment.sweep.batches import train_specs
from dither.spec import Spec

FIRST_SEED = 1_000_000  # no final run has these
KEEP = 6  # one in so many survives a rung
LEAST = 4  # and never fewer than these
REFINEMENTS = 1
BATCHES = (3, 9)  # runs that are compiled together

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """A point and what was measured of it, one entry a seed."""

    price: Price
    epsilon: float
    accuracy: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()

    @property
    def mean_accuracy(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.accuracy))

    @property
    def mean_loss(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.loss))

    @property
    def standard_error(self) -> float:
        """Of the mean accuracy; nan with one seed."""
        count = len(self.accuracy)
        return float(np.std(self.accuracy, ddof=1) / math.sqrt(count)) if count > 1 else math.nan

    def score(self, metric: str) -> float:
        """Larger is better."""
        value = self.mean_accuracy if metric == "accuracy" else -self.mean_loss
        return value if math.isfinite(value) else -math.inf


@dataclass(frozen=True)
class Search:
    """All trials, best first among those with most seeds; how many runs were made, in how long."""

    trials: list[Trial]
    runs: int
    seconds: float

    @property
    def best(self) -> Trial:
        """The choice."""
        return self.trials[0]


def run_trials(
    base: Spec,
    trials: Sequence[Trial],
    material: Material,
    seeds: Sequence[int],
    progress: Progress | None = None,
    kept: Unfinished | None = None,
) -> list[Trial]:
    """Every trial with these further seeds, in as few programs as shapes allow; `kept` has those made before."""
    specs = []
    for trial in trials:
        spec = rehearsal(base).with_values({**trial.price.point, "privacy.epsilon": trial.epsilon})
        spec = spec.with_values({"eval_every": spec.num_rounds, "compare": False})
        specs += [spec.with_values({"seed": seed}) for seed in seeds]
    if progress:
        progress(f"{len(trials)} candidates, {len(seeds)} seed{'s' * (len(seeds) > 1)} each: {len(specs)} runs")
    kept = kept or Unfinished(None, "trials", None)
    rows = _measured(specs, [shape(trial.price.point) for trial in trials for _ in seeds], material, kept)
    measured = []
    for number, trial in enumerate(trials):
        mine = rows[number * len(seeds) : (number + 1) * len(seeds)]
        measured.append(
            replace(
                trial,
                accuracy=(*trial.accuracy, *(row["test_accuracy"] for row in mine)),
                loss=(*trial.loss, *(row["loss"] for row in mine)),
            )
        )
    return measured


def _measured(
    specs: Sequence[Spec], shapes: Sequence[Any], material: Material, kept: Unfinished
) -> list[dict[str, float]]:
    """What each spec came to. Specs of one shape go together, in batches of few sizes: a batch that is not full
    repeats its last run, which costs less than to compile the same program for another number of runs. A batch is
    made whole or taken whole from `kept`: so an interrupted search finds what it would have found."""
    groups: dict[Any, list[int]] = {}
    for number, one in enumerate(shapes):
        groups.setdefault(one, []).append(number)
    found: dict[int, dict[str, float]] = {}
    for members in groups.values():
        left = members
        while left:
            width = next((size for size in BATCHES if size >= len(left)), BATCHES[-1])
            batch, left = left[:width], left[width:]
            key = " ".join([str(width), *(specs[number].digest() for number in batch)])
            rows = kept.get(key)
            if rows is None:
                filled = [*batch, *[batch[-1]] * (width - len(batch))]
                outcomes = train_specs([specs[number] for number in filled], dataset=material.dataset)[
                    : len(batch)
                ]
                last = [outcome.metrics[-1] for outcome in outcomes]
                rows = [{name: row[name] for name in ("test_accuracy", "loss")} for row in last]
                kept.put(key, rows)
            found.update(zip(batch, rows, strict=True))
    return [found[number] for number in range(len(specs))]


def search(
    base: Spec,
    prices: Sequence[Price],
    material: Material,
    *,
    counts: Dataset,
    smallest: int,
    fixed: Sequence[str] = (),
    metric: str = "accuracy",
    seeds: int = 5,
    progress: Progress | None = None,
    kept: Unfinished | None = None,
) -> Search:
    """Successive halving over the priced points; the last candidates have `seeds` seeds."""
    began, runs = time.perf_counter(), 0
    epsilon = base.privacy.epsilon

    def ranked(trials: list[Trial]) -> list[Trial]:
        return sorted(trials, key=lambda trial: trial.score(metric), reverse=True)

    def more(trials: list[Trial], first: int, last: int) -> list[Trial]:
        nonlocal runs
        last = min(last, seeds)
        if not trials or first >= last:
            return trials
        runs += len(trials) * (last - first)
        return run_trials(base, trials, material, range(FIRST_SEED + first, FIRST_SEED + last), progress, kept)

    done: list[Trial] = []
    rung = ranked(more([Trial(one, epsilon) for one in prices], 0, 1))
    # The best leads to its neighbours, which the grid may have left out.
    for _ in range(REFINEMENTS):
        known = [trial.price.point for trial in rung]
        fresh = [point for point in neighbours(base, rung[0].price.point, smallest, fixed) if point not in known]
        joined = more([Trial(one, epsilon) for one in _affordable(base, fresh, counts)], 0, 1)
        rung = ranked([*rung, *joined])
    for first, last in ((1, 2), (2, seeds)):
        keep = max(LEAST, math.ceil(len(rung) / KEEP))
        done += rung[keep:]
        rung = ranked(more(rung[:keep], first, last))
    return Search([*rung, *ranked(done)], runs, time.perf_counter() - began)


def _affordable(base: Spec, points: Sequence[Point], counts: Dataset) -> list[Price]:
    found = []
    for point in points:
        try:
            found.append(price(base, point, counts))
        except NoProof:
            continue
    return found


def frontier(
    base: Spec,
    chosen: Sequence[Trial],
    material: Material,
    epsilons: Sequence[float],
    counts: Dataset,
    *,
    seeds: int = 2,
    progress: Progress | None = None,
    kept: Unfinished | None = None,
) -> list[Trial]:
    """The chosen points at other budgets, each with the noise of that budget."""
    trials = [
        Trial(one, epsilon)
        for epsilon in epsilons
        for one in _affordable(
            base.with_values({"privacy.epsilon": epsilon}), [trial.price.point for trial in chosen], counts
        )
    ]
    return run_trials(base, trials, material, range(FIRST_SEED, FIRST_SEED + seeds), progress, kept)
