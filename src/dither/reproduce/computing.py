"""From figures to finished runs: what is missing, how much it costs, and computing it in batches."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dither
from dither import data, sweeps, tasks
from dither.engines import devices
from dither.errors import DataError
from dither.reproduce.cache import Cache
from dither.reproduce.figure import Figure, Record, point_key
from dither.spec import Spec

_DIGITS = 7  # training is in float32
_BATCH_SECONDS = 40.0  # on a CPU a batch is kept about this short: a kill loses no more
_BATCH_BYTES = {"cpu": 1.0e9, "gpu": 3.0e10}
_MOST_RUNS = {"cpu": 40, "gpu": 80}


class Point(NamedTuple):
    """One run to make, and the figure that first asks for it."""

    key: str
    spec: Spec
    gradient_norm: bool
    figure: str


class Progress(NamedTuple):
    """What a caller hears while runs are made: seconds of estimated work done, of how much, and for what."""

    done: float
    total: float
    figure: str


def points(figures: Iterable[Figure], scale: str) -> list[Point]:
    """Every run that figures need at a scale, each once."""
    found: dict[str, Point] = {}
    for figure in figures:
        for view in figure.views(scale):
            for spec in view.specs():
                key = point_key(spec, figure.gradient_norm)
                found.setdefault(key, Point(key, spec, figure.gradient_norm, figure.id))
    return list(found.values())


def missing(wanted: Iterable[Point], cache: Cache) -> list[Point]:
    """Those that the cache does not hold."""
    return [point for point in wanted if point.key not in cache]


def compute(
    wanted: Sequence[Point],
    cache: Cache,
    *,
    data_dir: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, str]:
    """Make the missing runs, program by program, and keep each batch as it is done.

    Returns, by name, the data sets that could not be had and why: their runs are left out."""
    refused: dict[str, str] = {}
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in wanted:
        spec = point.spec
        records = replace(spec.data, partition="iid", similarity=0.0)  # what is loaded does not depend on these
        groups.setdefault((records, sweeps.program(spec), point.gradient_norm), []).append(point)
    kind = device_kind()
    total, done = sum(seconds(point.spec, kind) for point in wanted), 0.0
    loaded: tuple[Any, data.Dataset] | None = None
    for (which, _, gradient_norm), members in groups.items():
        if which.name in refused:
            continue
        if loaded is None or loaded[0] != which:
            loaded = None  # one data set in memory at a time
            try:
                loaded = (which, tasks.load_data(members[0].spec, data_dir=data_dir))
            except DataError as error:
                refused[which.name] = f"{which.name} is not available here: {error}"
                continue
        share = sum(seconds(member.spec, kind) for member in members)
        batches = _Batches(members, cache)

        def advance(
            rounds: int, of: int, base: float = done, share: float = share, figure: str = members[0].figure
        ) -> None:
            if on_progress:
                on_progress(Progress(base + share * rounds / max(of, 1), total, figure))

        advance(0, 1)
        sweeps.sweep(
            [member.spec for member in members],
            dataset=loaded[1],
            on_evaluation=advance,
            on_batch=batches.keep,
            max_runs=lambda task: runs_at_once(task, kind),
            gradient_norm=gradient_norm,
        )
        done += share
    return refused


class _Batches:
    """Keeps each batch of a program as it is done, with its share of the time."""

    def __init__(self, members: list[Point], cache: Cache) -> None:
        self._members, self._cache = members, cache
        self._since = time.perf_counter()

    def keep(self, batch: dict[int, sweeps.Outcome]) -> None:
        now = time.perf_counter()
        each, self._since = (now - self._since) / len(batch), now
        for number, outcome in batch.items():
            self._cache.put(self._members[number].key, record(outcome, each))


def record(outcome: sweeps.Outcome, seconds: float) -> Record:
    """A finished run as the cache keeps it."""
    names = outcome.metrics[0].keys()
    columns: dict[str, list[float]] = {
        name: [_rounded(row[name]) for row in outcome.metrics] for name in names if name != "clipped"
    }
    return Record(columns, tasks.claimed(outcome.claim), round(seconds, 3), device(), versions())


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


# Cost


def runs_at_once(task: tasks.Task, kind: str) -> int:
    """How many runs like this one train side by side: bounded by memory, and on a CPU by time."""
    spec, params = task.spec, task.num_params
    sizes = task.federation.size
    side_by_side = 1 if kind == "cpu" and params > devices.LARGE else spec.cohort_size
    records = int(sizes.max()) if spec.batch_sampling == "full" else spec.batch_size
    features = task.problem.x.shape[1]
    # Model, gradient, optimiser, noise and upload of each client at work, its batch, and everybody's state.
    each = 4.0 * (12 * params * side_by_side + 4 * records * features * side_by_side + 2 * params * len(sizes))
    each += 4.0 * 2 * int(sizes.sum())
    most = int(min(_MOST_RUNS[kind], _BATCH_BYTES[kind] / each))
    if kind == "cpu":
        # A model that fills a core's caches by itself is no faster in company there.
        wanted = devices.cores() if params > devices.LARGE else math.ceil(_BATCH_SECONDS / seconds(spec, kind))
        most = min(most, wanted)
    return max(1, most)


def seconds(spec: Spec, kind: str) -> float:
    """A rough estimate of one run's time among others like it, for the bar and for choosing figures.

    Fitted to a machine with two CPU cores and to an NVIDIA H200; only the ratios matter for the bar."""
    features, classes, records = _SHAPES.get(spec.data.name, (100, 2, 50_000))
    widths = [features, *spec.model.hidden, classes if spec.model.name != "logistic" else 1]
    params = float(sum(a * b for a, b in pairwise(widths)))
    own = spec.data.records_per_client or records // max(spec.num_clients, 1)
    batch = own if spec.batch_sampling == "full" else spec.batch_size
    steps = float(spec.num_rounds * spec.local_steps)
    flops = 6.0 * params * batch * steps * spec.cohort_size
    evaluations = spec.num_rounds / spec.eval_every
    scored = 2.0 * params * evaluations * (own * spec.num_clients + records / 6)
    if kind == "cpu":
        return 0.02 + flops / 1.1e11 + scored / 1e11 + 1.5e-5 * steps * spec.cohort_size + 2e-3 * evaluations
    return 0.02 + flops / 8e12 + scored / 2e12 + 4e-6 * steps + 1e-3 * evaluations


_SHAPES = {
    "adult": (103, 2, 48_842),
    "mnist": (784, 10, 60_000),
    "emnist-bymerge": (784, 47, 100_000),
    "digits": (64, 10, 1_438),
    "breast-cancer": (30, 2, 569),
}


# Where it was made


def device_kind() -> str:
    """ "cpu" or "gpu" (anything faster)."""
    import jax

    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def device() -> str:
    """The machine's accelerator in words."""
    import jax

    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"


def versions() -> dict[str, str]:
    """What made a run."""
    import jax

    return {
        "dither": dither.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
