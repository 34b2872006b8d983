"""Dither's rounds and the hand-written loop by turns in one process, in processor time: for a shared machine.

    python benchmarks/against_loop.py [B1 B2 C] [--repeats 12]

Each turn is 5 rounds and an evaluation of all records, of Dither and of the loop (benchmarks/peers/yardstick.py),
on the same devices: medians in milliseconds, and Dither's over the loop's. Start-up, ledger, metrics and
checkpoints are not in it; `benchmarks/bench.py` has those, on the clock. To compile the loop as Dither compiles
its large networks, set XLA_FLAGS=--xla_cpu_prefer_vector_width=512.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import dither_run  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import workloads  # noqa: E402
import yardstick  # noqa: E402

from dither.experiment import build  # noqa: E402
from dither.simulation import engine  # noqa: E402
from dither.spec import Spec  # noqa: E402

ROUNDS = yardstick.EVERY


def turns(name: str) -> dict[str, Callable[[], None]]:
    """What is timed, by name."""
    workload = workloads.WORKLOADS[name]
    dither_run.prepare([workload])
    spec = Spec.from_any(HERE / "specs" / f"{name}.toml")
    spec = spec.with_values({"data.path": str(HERE.parent / spec.data.path)})
    simulation, _, inputs = build.compiled(build.build_experiment(spec))
    x, y = workloads.data(workload)
    advance, start, _ = yardstick.deep(workload, x, y)
    evaluate = yardstick.evaluation(workload, x, y)
    states = {"dither": simulation.start(inputs), "loop": start}

    def rounds() -> None:
        states["dither"] = jax.block_until_ready(simulation.advance(states["dither"], inputs, 0, ROUNDS))

    def scores() -> None:
        simulation.evaluate(states["dither"], inputs)
        states["dither"] = engine.reset_metrics(states["dither"])

    def loop_rounds() -> None:
        states["loop"] = jax.block_until_ready(advance(states["loop"], np.int32(0), np.int32(ROUNDS)))

    def loop_scores() -> None:
        evaluate(states["loop"])

    return {"rounds": rounds, "scores": scores, "loop rounds": loop_rounds, "loop scores": loop_scores}


def measured(name: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of processor time."""
    todo, spent = turns(name), {}
    for repeat in range(-2, repeats):  # the first two compile
        for what, turn in todo.items():
            began = time.process_time()
            turn()
            if repeat >= 0:
                spent.setdefault(what, []).append(1e3 * (time.process_time() - began))
    return {what: statistics.median(values) for what, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=["B2"])
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    for name in arguments.workloads:
        found = measured(name, arguments.repeats)
        print(name, {what: round(value) for what, value in found.items()}, "ms")
        whole, loop = found["rounds"] + found["scores"], found["loop rounds"]
        print(f"  rounds over the loop's: {found['rounds'] / loop:.2f}")
        print(f"  with evaluations over the loop without: {whole / loop:.2f}")
        print(f"  with evaluations over the loop with: {whole / (loop + found['loop scores']):.2f}", flush=True)


if __name__ == "__main__":
    main()
