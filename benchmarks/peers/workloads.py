"""The workloads that every library here is timed on: shapes, seeds, data, and how a result is reported.

Nothing but NumPy and the standard library: each peer runs in an environment of its own, without Dither.

One round of any of them: `cohort` of `clients` are drawn. Each starts from the server's model and makes
`local_steps` steps of SGD with rate `lr` on batches of `batch` of its own `records` (drawn anew each round without
repetition: within a step for A and C, within the round for B, whose 8 x 64 are one epoch of 512). Then the server
takes the mean over the cohort. Where noise and clip come in:

A1, A32  logistic regression: each example's gradient clipped to `clip`; N(0, upload_noise²) on what is uploaded
B1       784-256-10 ReLU network: each example's gradient clipped to `clip`, N(0, step_noise²) on every step's mean
B2       the same without clipping gradients; the local model clipped to `param_clip`, N(0, upload_noise²) on it
C        softmax regression 784-47 with SCAFFOLD's control variates; clip and noise at every step as in B1

Everyone starts from `initial(workload)`. The loss over all records after `check_rounds` rounds is printed beside
each time: same work, same loss, up to the draw of batches and noise.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Workload:
    name: str
    features: int
    classes: int
    hidden: int  # 0: a linear model
    clients: int
    records: int  # of each client
    cohort: int
    local_steps: int
    batch: int
    lr: float
    clip: float = 0.0  # of each example's gradient; 0: none
    step_noise: float = 0.0  # std, on the mean gradient of every step
    param_clip: float = 0.0  # of the local model before its noise; 0: none
    upload_noise: float = 0.0  # std, on the local model
    control: bool = False  # SCAFFOLD's control variates
    check_rounds: int = 100

    @property
    def outputs(self) -> int:
        """A binary model has one score."""
        return 1 if self.classes == 2 else self.classes

    @property
    def epoch(self) -> bool:
        """A round's batches are one pass over the records."""
        return self.batch * self.local_steps == self.records

    @property
    def widths(self) -> list[int]:
        return [self.features, *([self.hidden] if self.hidden else []), self.outputs]

    @property
    def num_params(self) -> int:
        return sum((a + 1) * b for a, b in zip(self.widths[:-1], self.widths[1:], strict=True))


_ADULT = {"features": 113, "classes": 2, "hidden": 0, "clients": 100, "records": 325, "cohort": 50}
_MNIST = {"features": 784, "classes": 10, "hidden": 256, "clients": 50, "records": 512, "cohort": 50}
_MNIST |= {"local_steps": 8, "batch": 64, "lr": 0.1, "check_rounds": 3}

WORKLOADS = {
    w.name: w
    for w in (
        Workload("A1", **_ADULT, local_steps=10, batch=1, lr=0.1, clip=1.0, upload_noise=0.05),
        Workload("A32", **_ADULT, local_steps=10, batch=32, lr=0.1, clip=1.0, upload_noise=0.05),
        Workload("B1", **_MNIST, clip=1.0, step_noise=1 / 64),
        Workload("B2", **_MNIST, param_clip=8.0, upload_noise=0.01),
        Workload(
            "C", 784, 47, 0, 40, 2500, 8, 50, 500, 0.05, clip=1.0, step_noise=1 / 500, control=True, check_rounds=3
        ),
    )
}

if os.environ.get("BENCH_SMALL"):  # to see that a peer works and agrees with the others, not to time it
    WORKLOADS = {
        name: replace(w, clients=4, cohort=2 if w.cohort < w.clients else 4, check_rounds=3)
        for name, w in WORKLOADS.items()
    }


def data(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """x [clients, records, features] in [0, 1], y [clients, records]: noisy prototypes, some labels wrong."""
    rng = np.random.default_rng(7)
    prototypes = (rng.random((w.classes, w.features)) < 0.2).astype(np.float32)
    y = rng.integers(w.classes, size=(w.clients, w.records), dtype=np.int32)
    x = rng.random((w.clients, w.records, w.features), dtype=np.float32)
    x *= 0.2 + 0.4 * prototypes[y]
    wrong = rng.random(y.shape) < 0.1
    return x, np.where(wrong, rng.integers(w.classes, size=y.shape, dtype=np.int32), y)


def initial(w: Workload) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weight [in, out], bias [out]) of each layer: 0 for linear models, uniform in ±1/√in for the network."""
    rng = np.random.default_rng(8)
    layers = []
    for a, b in zip(w.widths[:-1], w.widths[1:], strict=True):
        reach = a**-0.5 if w.hidden else 0.0
        pair = rng.uniform(-reach, reach, (a, b)), rng.uniform(-reach, reach, b)
        layers.append(tuple(array.astype(np.float32) for array in pair))
    return layers


def loss(w: Workload, layers: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, y: np.ndarray) -> float:
    """Mean cross-entropy over all records."""
    value = x.reshape(-1, w.features)
    for i, (weight, bias) in enumerate(layers):
        value = value @ np.asarray(weight) + np.asarray(bias)
        if i < len(layers) - 1:
            value = np.maximum(value, 0)
    flat = y.reshape(-1)
    if w.outputs == 1:
        value = np.concatenate([np.zeros_like(value), value], 1)
    value = value.astype(np.float64)
    top = value.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(value - top).sum(1)) + top[:, 0] - value[np.arange(len(flat)), flat]))


def measure(
    w: Workload,
    peer: str,
    versions: dict[str, str],
    rounds: Callable[[int], object],
    layers: Callable[[], list[tuple[np.ndarray, np.ndarray]]],
    *,
    seconds: float,
    repeats: int = 5,
    agree: Callable[[int], int] = int,
    silent: bool = False,
    **extra: object,
) -> None:
    """Time `rounds(count)`, which makes that many more rounds, and print one line of JSON.

    The first round is timed by itself (it compiles, or warms caches and workers). The rounds up to `check_rounds`
    follow, timed as one block for those too slow to be timed at leisure. Then `repeats` blocks, each of as many
    rounds as fill a share of `seconds`. Where several processes run this together, `agree` gives all of them the
    first one's number, and the others are `silent`.
    """
    x, y = data(w)
    began = time.perf_counter()
    rounds(1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    rounds(w.check_rounds - 1)
    per_round = (time.perf_counter() - began) / (w.check_rounds - 1)
    check = loss(w, layers(), x, y)
    block, times = w.check_rounds - 1, [per_round]
    fitting = agree(int(seconds / repeats / per_round))
    if fitting:
        block = fitting
        rounds(block)  # a new block length may compile anew: not timed
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            rounds(block)
            times.append((time.perf_counter() - began) / block)
    row = {
        "peer": peer,
        "workload": w.name,
        "first_round_s": first,
        "seconds_per_100": 100 * statistics.median(times),
        "spread": [100 * min(times), 100 * max(times)],
        "rounds_timed": block * len(times),
        "peak_rss_mb": peak_rss_mb(),
        "check_loss": check,
        "versions": versions,
        **extra,
    }
    if not silent:
        print("RESULT " + json.dumps(row), flush=True)


def peak_rss_mb() -> float:
    """The most memory this process held; what its children hold is added by whoever watches them (bench.py)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def each(timed: Callable[[Workload, float], object]) -> None:
    """Call `timed(workload, seconds)` for the workloads on the command line; --seconds S to spend on each."""
    arguments, seconds = sys.argv[1:], 10.0
    if "--seconds" in arguments:
        at = arguments.index("--seconds")
        seconds = float(arguments[at + 1])
        del arguments[at : at + 2]
    for name in arguments:
        timed(WORKLOADS[name], seconds)


def flag(name: str) -> bool:
    """Whether an option is on the command line; it is taken off."""
    given = name in sys.argv
    if given:
        sys.argv.remove(name)
    return given


def write(w: Workload, path: str) -> None:
    """The same records as a .npz file, for `dither run`; every tenth record also serves as test record."""
    x, y = data(w)
    x, y = x.reshape(-1, w.features), y.reshape(-1)
    names = np.array([str(i) for i in range(w.classes)])
    np.savez(path, x_train=x, y_train=y, x_test=x[::10], y_test=y[::10], classes=names)
