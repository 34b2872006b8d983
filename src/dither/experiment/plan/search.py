"""Planning by measurement: successive halving on public records.

All candidates start with one seed, and the neighbours of the best one join them. The better part goes on with more
seeds, and the mean over all seeds decides between the last few. Seeds of a search are never those of a final run
(0, 1, 2, ...), so that no plan is chosen for its luck. Every candidate is trained in full with the noise for the
whole budget: rungs differ in the number of seeds only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dither.data import Dataset
from dither.experiment.partial import Unfinished
from dither.experiment.plan.candidates import Candidate, Point, proxy_spec, shape
from dither.experiment.sweep.batches import Simulations, train_specs
from dither.spec import Spec

FIRST_SEED = 1_000_000  # no final run has these seeds
KEEP = 6  # one in so many survives a rung
FEWEST = 4  # but never fewer than these
BATCHES = (3, 9)  # numbers of runs that are compiled together


@dataclass(frozen=True)
class Trial:
    """A candidate and its measurements, one entry per seed."""

    candidate: Candidate
    accuracy: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()

    @property
    def epsilon(self) -> float:
        """The proven budget of the candidate."""
        return self.candidate.spec.privacy.epsilon

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
    """All trials, the best first; the number of runs and their time; accuracy of the most frequent class alone."""

    trials: list[Trial]
    runs: int
    seconds: float
    trivial: float

    @property
    def best(self) -> Trial:
        """The choice."""
        return self.trials[0]


@dataclass(frozen=True)
class Trainer:
    """Trains candidates on public records. `partial` keeps finished batches until the plan is complete."""

    dataset: Dataset
    partial: Unfinished
    say: Callable[[str], None] = lambda line: None
    simulations: Simulations = field(default_factory=dict)  # a program is compiled once for the whole search

    def run(self, trials: Sequence[Trial], seeds: Sequence[int]) -> list[Trial]:
        """Every trial with further seeds, counted from `FIRST_SEED`."""
        specs = [_trial_spec(trial.candidate, FIRST_SEED + seed) for trial in trials for seed in seeds]
        each = f"{len(seeds)} seed{'s' * (len(seeds) > 1)} each"
        self.say(f"{len(trials)} candidates, {each}: {len(specs)} runs")
        rows = self.measure(specs, [shape(trial.candidate.point) for trial in trials for _ in seeds])
        by_trial = [rows[at : at + len(seeds)] for at in range(0, len(rows), len(seeds))]
        return [
            replace(
                trial,
                accuracy=(*trial.accuracy, *(row["test_accuracy"] for row in new)),
                loss=(*trial.loss, *(row["loss"] for row in new)),
            )
            for trial, new in zip(trials, by_trial, strict=True)
        ]

    def measure(self, specs: Sequence[Spec], shapes: Sequence[Any]) -> list[dict[str, float]]:
        """Final accuracy and loss of each spec.

        Specs of one shape train together, in batches of few sizes: a batch that is not full repeats its last run,
        which costs less than compiling the program for another size. A batch is computed whole or taken whole from
        `partial`, so an interrupted search ends with the same numbers."""
        groups: dict[Any, list[int]] = {}
        for number, group in enumerate(shapes):
            groups.setdefault(group, []).append(number)
        results: dict[int, dict[str, float]] = {}
        for remaining in groups.values():
            while remaining:
                width = next((size for size in BATCHES if size >= len(remaining)), BATCHES[-1])
                batch, remaining = remaining[:width], remaining[width:]
                key = " ".join([str(width), *(specs[number].digest() for number in batch)])
                rows = self.partial.get(key)
                if rows is None:
                    filled = [specs[number] for number in [*batch, *batch[-1:] * (width - len(batch))]]
                    outcomes = train_specs(filled, dataset=self.dataset, simulations=self.simulations)
                    last = [outcome.metrics[-1] for outcome in outcomes[: len(batch)]]
                    rows = [{name: row[name] for name in ("test_accuracy", "loss")} for row in last]
                    self.partial.put(key, rows)
                results.update(zip(batch, rows, strict=True))
        return [results[number] for number in range(len(specs))]


def _trial_spec(candidate: Candidate, seed: int) -> Spec:
    spec = proxy_spec(candidate.spec)
    return spec.with_values({"eval_every": spec.num_rounds, "compare": False, "seed": seed})


def search(
    trainer: Trainer,
    candidates: Sequence[Candidate],
    neighbours: Callable[[Point], list[Candidate]],
    *,
    metric: str = "accuracy",
    seeds: int = 5,
) -> Search:
    """Successive halving; the last candidates have `seeds` seeds."""
    started, runs = time.perf_counter(), 0

    def ranked(trials: Sequence[Trial]) -> list[Trial]:
        return sorted(trials, key=lambda trial: trial.score(metric), reverse=True)

    def more(trials: Sequence[Trial], first: int, last: int) -> Sequence[Trial]:
        nonlocal runs
        new = range(first, min(last, seeds))
        if not trials or not new:
            return trials
        runs += len(trials) * len(new)
        return trainer.run(trials, new)

    rung = ranked(more([Trial(candidate) for candidate in candidates], 0, 1))
    tried = [trial.candidate.point for trial in rung]
    near = [Trial(candidate) for candidate in neighbours(tried[0]) if candidate.point not in tried]
    rung = ranked([*rung, *more(near, 0, 1)])
    dropped: list[Trial] = []
    for first, last in ((1, 2), (2, seeds)):
        keep = max(FEWEST, math.ceil(len(rung) / KEEP))
        dropped += rung[keep:]
        rung = ranked(more(rung[:keep], first, last))
    labels = trainer.dataset.y_test[trainer.dataset.y_test >= 0]  # without blanks
    trivial = float(np.bincount(labels, minlength=1).max() / max(1, len(labels)))
    return Search([*rung, *ranked(dropped)], runs, time.perf_counter() - started, trivial)
