"""Finished runs and proven ε on disk, one small file each, so that an interrupted reproduction continues.

A run is named by its spec's fingerprint and by `NUMERICS`, so a figure that changes computes only what changed.
Files are written whole or not at all: a kill loses only the batch that was under way.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dither.experiment import build
from dither.experiment.folder import cache_folder, to_json, write_bytes
from dither.reproduction.figure import FinishedRun
from dither.spec import Spec

NUMERICS = 3  # raise it when the same spec trains to other numbers (tests/reproduction/test_cache.py notices)
ACCOUNTING = 1  # raise it when the same spec is accounted to another ε


class Cache(Mapping[str, FinishedRun]):
    """Finished runs by `run_key`, read from disk when first asked for."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder("reproduce")
        self._seen: dict[str, FinishedRun] = {}

    def path(self, key: str) -> Path:
        """Where a run is kept."""
        return self.folder / f"runs-{NUMERICS}" / key[:2] / f"{key}.json.gz"

    def __getitem__(self, key: str) -> FinishedRun:
        if key not in self._seen:
            fields = _read(self.path(key))
            if fields is None:
                raise KeyError(key)
            self._seen[key] = FinishedRun(**{name: fields[name] for name in FinishedRun._fields})
        return self._seen[key]

    def __iter__(self) -> Iterator[str]:
        return (path.name.removesuffix(".json.gz") for path in self.folder.glob(f"runs-{NUMERICS}/*/*.json.gz"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def put(self, key: str, run: FinishedRun) -> None:
        """Keep a finished run."""
        _write(self.path(key), run._asdict())
        self._seen[key] = run

    def kept(self, kind: str, key: str, compute: Callable[[], Any]) -> Any:
        """A small answer of the accountant, computed once."""
        path = self.folder / f"{kind}-{NUMERICS}.{ACCOUNTING}" / key[:2] / f"{key}.json.gz"
        stored = _read(path)
        if stored is None:
            stored = {"answer": compute()}
            _write(path, stored)
        return stored["answer"]


class Accounts:
    """Proven ε of specs and estimates from their data, each computed once and then read from the cache."""

    def __init__(self, cache: Cache, data_dir: str | Path | None = None) -> None:
        self._cache, self._data_dir = cache, data_dir
        self._loaded: tuple[Any, Any, Any] | None = None

    def proven_epsilon(self, spec: Spec, unit: str = "run") -> float:
        """Proven ε of the whole run, or of one message, for the spec's view and adjacency."""
        return float(self._kept("proven", spec, unit, lambda run: run.accountant(missing=0).epsilon(unit=unit)))

    def proven_stop(self, spec: Spec, budget: float) -> int:
        """The last round up to which the proven ε is within the budget."""

        def last(run: build.Experiment) -> int:
            return bisect_right(range(1, len(run.cohorts) + 1), budget * (1 + 1e-9), key=run.proven_epsilon)

        return int(self._kept("stops", spec, f"{budget:.8g}", last))

    def estimated(self, name: str, spec: Spec, estimate: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """`estimate(experiment)`, kept under a name."""
        return dict(self._kept(name, spec, name, lambda run: dict(estimate(run))))

    def _kept(self, kind: str, spec: Spec, detail: str, compute: Callable[[build.Experiment], Any]) -> Any:
        key = f"{spec.fingerprint()}-{detail}"
        return self._cache.kept(kind, key, lambda: compute(self._experiment(spec)))

    def _experiment(self, spec: Spec) -> build.Experiment:
        """The experiment of a spec; the data set of the last one is held."""
        if self._loaded is None or self._loaded[0] != spec.data:
            dataset = build.load_data(replace(spec, seed=0), data_dir=self._data_dir)
            self._loaded = (spec.data, dataset, build.pooled(dataset))
        return build.build_experiment(spec, dataset=self._loaded[1], arrays=self._loaded[2])


def _read(path: Path) -> Any:
    """What a file holds; None where it is missing or damaged, so that it is computed again."""
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    # mtime=0: the same run is the same file
    write_bytes(path, gzip.compress(to_json(value).encode(), mtime=0))
