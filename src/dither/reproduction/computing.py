"""From figures to finished runs: what is missing, how much it costs, and computing it in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dither import data
from dither.errors import DataError
from dither.experiment import build
from dither.experiment.sweep import Outcome, batches
from dither.experiment.sweep.batches import estimated_seconds
from dither.reproduction.cache import Cache
from dither.reproduction.figure import Figure, Record, point_key
from dither.simulation.devices import device, device_kind, versions
from dither.spec import Spec

_DIGITS = 7  # training is in float32


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
        groups.setdefault((records, batches.program(spec), point.gradient_norm), []).append(point)
    kind = device_kind()
    total, done = sum(estimated_seconds(point.spec, kind) for point in wanted), 0.0
    loaded: tuple[Any, data.Dataset] | None = None
    for (which, _, gradient_norm), members in groups.items():
        if which.name in refused:
            continue
        if loaded is None or loaded[0] != which:
            loaded = None  # one data set in memory at a time
            try:
                loaded = (which, build.load_data(members[0].spec, data_dir=data_dir))
            except DataError as error:
                refused[which.name] = f"{which.name} is not available here: {error}"
                continue
        share = sum(estimated_seconds(member.spec, kind) for member in members)
        keeper = _Batches(members, cache)

        def advance(
            rounds: int, of: int, base: float = done, share: float = share, figure: str = members[0].figure
        ) -> None:
            if on_progress:
                on_progress(Progress(base + share * rounds / max(of, 1), total, figure))

        advance(0, 1)
        batches.train_specs(
            [member.spec for member in members],
            dataset=loaded[1],
            on_evaluation=advance,
            on_batch=keeper.keep,
            max_runs=lambda experiment: batches.runs_at_once(experiment, kind),
            gradient_norm=gradient_norm,
        )
        done += share
    return refused


class _Batches:
    """Keeps each batch of a program as it is done, with its share of the time."""

    def __init__(self, members: list[Point], cache: Cache) -> None:
        self._members, self._cache = members, cache
        self._since = time.perf_counter()

    def keep(self, batch: dict[int, Outcome]) -> None:
        now = time.perf_counter()
        each, self._since = (now - self._since) / len(batch), now
        for number, outcome in batch.items():
            self._cache.put(self._members[number].key, record(outcome, each))


def record(outcome: Outcome, seconds: float) -> Record:
    """A finished run as the cache keeps it."""
    names = outcome.metrics[0].keys()
    columns: dict[str, list[float]] = {
        name: [_rounded(row[name]) for row in outcome.metrics] for name in names if name != "clipped"
    }
    return Record(columns, build.claimed(outcome.claim), round(seconds, 3), device(), versions())


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
