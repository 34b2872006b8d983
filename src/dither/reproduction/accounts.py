"""What the accountant says about a figure's settings, computed once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dither.accounting import accountant
from dither.experiment import build
from dither.reproduction.cache import Cache
from dither.spec import Spec


class Accounts:
    """Answers about ε, each computed once."""

    def __init__(self, cache: Cache, data_dir: str | Path | None = None) -> None:
        self._cache = cache
        self._data_dir = data_dir
        self._loaded: tuple[Any, Any, Any] | None = None

    def proven_epsilon(self, spec: Spec, unit: str = "run") -> float:
        """Proven ε of a run for its own view and adjacency, for the whole run or one message."""

        def compute() -> float:
            experiment = self._task(spec)
            privacy = spec.privacy
            return accountant.worst(
                build.classes(experiment, None),
                privacy.delta,
                build.circumstances(experiment),
                view=privacy.view,
                adjacency=spec.adjacency,
                unit=unit,
            )

        return float(self._cache.kept("proven", f"{spec.fingerprint()}-{unit}", compute))

    def proven_stop(self, spec: Spec, budget: float) -> int:
        """The last round of a run whose proven ε is within the budget."""

        def compute() -> int:
            experiment = self._task(spec)
            low, high = 0, len(experiment.cohorts)
            while low < high:
                middle = (low + high + 1) // 2
                inside = build.proven_so_far(experiment, middle) <= budget * (1 + 1e-9)
                low, high = (middle, high) if inside else (low, middle - 1)
            return low

        return int(self._cache.kept("stops", f"{spec.fingerprint()}-{budget:.8g}", compute))

    def estimated(self, name: str, spec: Spec, estimate: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `estimate(experiment)` finds in the data, kept under a name."""
        key = hashlib.sha256(f"{name} {spec.fingerprint()}".encode()).hexdigest()
        found: Mapping[str, Any] = self._cache.kept(name, key, lambda: dict(estimate(self._task(spec))))
        return found

    def _task(self, spec: Spec) -> build.Experiment:
        """The spec brought to life; the data set of the last one is held."""
        if self._loaded is None or self._loaded[0] != spec.data:
            dataset = build.load_data(replace(spec, seed=0), data_dir=self._data_dir)
            self._loaded = (spec.data, dataset, build.pooled(dataset))
        return build.build_experiment(spec, dataset=self._loaded[1], arrays=self._loaded[2])
