"""How close the compiled rounds come to the machine: counted work over measured peaks, for B1, B2, C and A.

    python benchmarks/limits.py [B1 B2 C A1 A32] [--runs N] [--json FILE]

Peaks are measured here and now: matrix products in full float32 and at the backend's default precision, copies of
memory, normals a second (Threefry, erfinv and an addition, as in `privacy.noise`). A round's work is counted from
the shapes. Its limit is the sum of products, normals and bytes at those peaks, as if nothing overlapped. Records
are made up (the time does not depend on them).
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither import data
from dither.experiment import build
from dither.privacy import noise
from dither.simulation import devices
from dither.simulation.arrays import ONE_DEVICE
from dither.spec import Spec

ADULT = {"preset": "secure-fedavg", "num_clients": 100, "cohort_size": 50, "local_steps": 10, "client_lr": 0.1}
ADULT |= {"model.name": "logistic", "privacy.clip": "example", "method_options.first_round": "cohort"}
ADULT |= {"privacy.epsilon": 17.0, "privacy.delta": 1e-4, "privacy.unit": "message", "privacy.noise": "paper"}
MNIST = {"num_clients": 50, "cohort_size": 50, "local_steps": 8, "batch_size": 64, "batch_sampling": "disjoint"}
MNIST |= {"model.name": "mlp", "model.hidden": [256], "client_lr": 0.1, "secagg.mode": "off"}
PLAIN = {"method_options.param_clip": 8.0, "method_options.proximal": 0.0, "method_options.optimizer": "sgd"}
GIVEN = {
    "data.split": "given",
    "privacy.noise": "given",
    "privacy.noise_std": 0.01,
    "privacy.clip": "example",
    "privacy.delta": 1e-5,
}

WORKLOADS = {  # spec, then (features, classes, records a client)
    "A1": ({**ADULT, "batch_size": 1}, (113, 2, 325)),
    "A32": ({**ADULT, "batch_size": 32}, (113, 2, 325)),
    "B1": ({**MNIST, **GIVEN, "preset": "cpfed"}, (784, 10, 512)),
    "B2": ({**MNIST, **PLAIN, "preset": "nbafl"}, (784, 10, 512)),
    "C": ({"preset": "dp-scaffold"}, (784, 47, 2500)),
}


class Work(NamedTuple):
    """Of a round: operations of matrix products in full float32 and at the default precision, normals, bytes."""

    exact: float
    plain: float
    normals: float
    bytes: float


class Peaks(NamedTuple):
    """Per second."""

    exact: float
    plain: float
    normals: float
    bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=1, help="runs side by side, as in a sweep")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    devices.set_up()
    peaks = measured_peaks()
    device = f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}"
    print(
        f"{device}: {peaks.exact / 1e9:,.0f} GFlop/s in float32, {peaks.plain / 1e9:,.0f} at the default "
        f"precision, {peaks.normals / 1e9:.2f} G normals/s, {peaks.bytes / 1e9:,.0f} GB/s"
    )
    rows = []
    for name in arguments.workloads:
        seconds, work, first = timed(name, arguments.runs)
        parts = {part: 100 * getattr(work, part) / getattr(peaks, part) for part in Work._fields}
        limit = sum(parts.values())
        rows.append(
            {
                "workload": name,
                "runs": arguments.runs,
                "device": device,
                "first_round_s": first,
                "seconds_per_100": seconds,
                "limit_per_100": limit,
                "fraction": limit / seconds,
                "limits": parts,
                "work": work._asdict(),
            }
        )
        print(
            f"{name} x {arguments.runs}: {seconds:.4f} s for 100 rounds, limit {limit:.4f}: {limit / seconds:.0%} "
            f"(products {parts['exact'] + parts['plain']:.4f}, normals {parts['normals']:.4f}, "
            f"bytes {parts['bytes']:.4f}); first round {first:.1f} s",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"peaks": peaks._asdict(), "rows": rows}, indent=2) + "\n")


# The machine


def measured_peaks() -> Peaks:
    gpu = jax.default_backend() != "cpu"
    size = 8192 if gpu else 1536
    a = jnp.ones((size, size), jnp.float32)
    count = 10**8 if gpu else 10**7
    x = jnp.zeros(count, jnp.float32)
    key = noise.key(0)

    def product(precision: jax.lax.Precision | None) -> float:
        return 2 * size**3 / best(jax.jit(lambda a: jnp.matmul(a, a, precision=precision)), a)

    return Peaks(
        exact=product(jax.lax.Precision.HIGHEST),
        plain=product(None),
        normals=count / best(jax.jit(lambda key, x: noise.gaussian(key, x, noise_std=2.0)), key, x),
        bytes=2 * x.nbytes / best(jax.jit(lambda x: x + 1), x),
    )


def best(function, *values, repeats: int = 7) -> float:
    jax.block_until_ready(function(*values))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*values))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


# The work


def counted(experiment: build.Experiment) -> Work:
    """Of one round of one run."""
    spec, sizes = experiment.spec, experiment.partition.size
    batch = int(sizes.max()) if spec.batch_sampling == "full" else spec.batch_size
    features = int(np.prod(experiment.problem.x.shape[1:]))
    widths = [
        features,
        *spec.model.hidden,
        1 if spec.model.name == "logistic" else len(experiment.dataset.classes),
    ]
    weights = sum(a * b for a, b in pairwise(widths))
    steps = spec.cohort_size * spec.local_steps
    once = 2.0 * weights * batch * steps  # one pass over the weights
    back = 2.0 * (weights - widths[0] * widths[1]) * batch * steps  # no derivative in the records themselves
    exact, plain = (once, once + back) if spec.privacy.clip == "example" else (0.0, 2 * once + back)
    every_step = spec.method in ("cpfed", "concentrated", "dp-scaffold")
    draws = steps if every_step else spec.cohort_size
    # At the least: a step reads its batch and reads and writes the model.
    traffic = 4.0 * steps * (batch * features + 2 * experiment.num_params)
    return Work(exact, plain, float(draws * experiment.num_params), traffic)


def timed(name: str, runs: int) -> tuple[float, Work, float]:
    """Seconds for 100 rounds once compiled, one run's counted work times the runs, seconds of the first round."""
    values, (features, classes, records) = WORKLOADS[name]
    spec = Spec.from_any(values["preset"]).with_values({k: v for k, v in values.items() if k != "preset"})
    made = made_up(features, classes, records * spec.num_clients)
    experiment = build.build_experiment(spec.with_values({"data.records_per_client": records}), dataset=made)
    how = build.sharing(experiment, runs) if jax.default_backend() == "cpu" else {"shards": ONE_DEVICE}
    simulation = build.make_simulation(experiment, **how)
    inputs = simulation.inputs(
        experiment.problem,
        seeds=list(range(runs)),
        hyper=build.hypers([experiment] * runs),
        cohorts=build.designs([experiment] * runs),
    )
    state = jax.block_until_ready(simulation.start(inputs))
    began = time.perf_counter()
    state = jax.block_until_ready(simulation.advance(state, inputs, 1, 2))
    first = time.perf_counter() - began
    rounds, seconds = 1, []
    while len(seconds) < 5:
        began = time.perf_counter()
        state = jax.block_until_ready(simulation.advance(state, inputs, 2, 2 + rounds))
        spent = time.perf_counter() - began
        if spent < 0.5 and not seconds:
            rounds *= 4
            continue
        seconds.append(100 * spent / rounds)
    work = Work(*(runs * value for value in counted(experiment)))
    return float(np.median(seconds)), work, first


def made_up(features: int, classes: int, count: int) -> data.Dataset:
    """Records of the right shape."""
    draw = np.random.default_rng(0)
    x = draw.random((count + 100, features), np.float32) / np.sqrt(features)
    y = draw.integers(0, classes, count + 100).astype(np.int32)
    names = tuple(str(number) for number in range(classes))
    columns = tuple(f"x{number}" for number in range(features))
    parts = (x[:count], y[:count], x[count:], y[count:])
    return data.Dataset("made up", *parts, names, columns, (), None, None, None, (), True)


if __name__ == "__main__":
    main()
