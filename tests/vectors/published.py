"""The published numbers of vectors.json, and how a test claims to cover them.

A test file holds a dispatch from id patterns to functions of the entry's inputs, and `vectors` makes tests of it.
Every entry of kind "paper" or "check" with the file's prefix must have a function; "verified" entries are covered
where a formula of the papers gives them, the rest belongs to the accountant's tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dither.methods.secure_fedavg import SecureFedavgTraining

Entry = dict[str, Any]
Dispatch = Mapping[str, Callable[[dict[str, Any]], Any]]

ENTRIES: list[Entry] = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))["values"]


def entries(prefix: str) -> list[Entry]:
    """All entries whose id starts with `prefix` and a dot."""
    return [entry for entry in ENTRIES if entry["id"].split(".")[0] == prefix]


def lookup(dispatch: Dispatch, entry: Entry) -> Callable[[dict[str, Any]], Any] | None:
    """The function for an entry: the longest pattern that fits its id."""
    fits = [pattern for pattern in dispatch if fnmatchcase(entry["id"], pattern)]
    return dispatch[max(fits, key=len)] if fits else None


def check(dispatch: Dispatch, entry: Entry) -> None:
    """Evaluate an entry and compare; null stands for a value that does not exist (NaN)."""
    function = lookup(dispatch, entry)
    assert function is not None
    actual, expected = function(entry["inputs"]), entry["value"]
    if expected is None:
        assert math.isnan(actual), f"{entry['id']}: expected no value, got {actual}"
    else:
        np.testing.assert_allclose(actual, expected, rtol=entry["rtol"], atol=0, err_msg=entry["id"])


def vectors(dispatch: Dispatch, prefix: str) -> tuple[Callable[..., None], Callable[[], None]]:
    """Two tests: each entry of `prefix` that the dispatch evaluates, and that it forgets none and has no idle
    pattern."""
    all_entries = entries(prefix)

    @pytest.mark.parametrize("entry", [e for e in all_entries if lookup(dispatch, e)], ids=lambda e: e["id"])
    def value(entry: Entry) -> None:
        check(dispatch, entry)

    def coverage() -> None:
        forgotten = [e["id"] for e in all_entries if e["kind"] != "verified" and not lookup(dispatch, e)]
        idle = [p for p in dispatch if not any(fnmatchcase(e["id"], p) for e in all_entries)]
        assert forgotten + idle == [], f"forgotten: {forgotten}; fits nothing: {idle}"

    return value, coverage


def periodic(v: dict[str, Any]) -> dict[str, Any]:
    """What the bounds of CPFed and Concentrated have in common, from their letters."""
    return {
        "client_lr": v["eta"],
        "smoothness": v["L"],
        "local_steps": v["tau"],
        "num_rounds": v["K"] / v["tau"],
        "num_params": v["d"],
        "noise_std": v["sigma"],
        "initial_gap": v["gap"],
        "strong_convexity": v.get("lam", 0.0),
    }


PERIODIC = periodic({"eta": 0.01, "L": 1.0, "tau": 10, "K": 200, "d": 100, "sigma": 0.05, "gap": 0.7, "lam": 0.1})
SECURE_FEDAVG = SecureFedavgTraining(
    smoothness=1.0,
    local_steps=5,
    batch_size=10,
    clip_norm=2.0,
    num_params=105,
    num_records=32561,
    epsilon=0.5,
    delta=1e-4,
    cohort_size=50,
    weighted_variance=0.01,
    heterogeneity=0.1,
    num_clients=100,
)


def noise_falls_and_inverts(method, params):
    """The noise falls as ε grows, and `epsilon_of_noise` gives that ε back."""
    epsilon = np.linspace(0.1, 20, 50)
    std = method.noise_std(params, epsilon=epsilon, delta=1e-4)
    assert np.all(np.diff(std) < 0)
    np.testing.assert_allclose(method.epsilon_of_noise(params, noise_std=std, delta=1e-4), epsilon, rtol=1e-12)


def bounds_fall_with_epsilon(method, params, training):
    """Over a grid of τ and ε, in one call."""
    tau, epsilon = np.meshgrid(np.arange(1, 201), np.linspace(0.1, 10, 200))
    std = method.noise_std(params._replace(local_steps=tau), epsilon=epsilon, delta=1e-4)
    grid = training._replace(local_steps=tau, noise_std=std)
    for bound in (method.convergence_convex(grid), method.convergence_nonconvex(grid)):
        assert bound.total.shape == (200, 200)
        assert np.all(np.diff(bound.total, axis=0) < 0)
