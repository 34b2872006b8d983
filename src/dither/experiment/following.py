"""The other processes of a simulation that several share: they make the engine's calls that process 0 orders.

    following.connect("10.0.0.1:7000", count=2, number=1)
    following.follow()            # while process 0, connected likewise, calls dither.run or dither.sweep

The processes meet for one run or sweep, and part when its rounds are made: process 0 finishes it by itself.
The spec is process 0's. Each process loads the records by itself, and all refuse to go on where they differ.
Nothing is written here, charged or printed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dither.errors import SpecError
from dither.experiment import train
from dither.experiment.build import build_experiment
from dither.experiment.compiled import check, compiled, facts
from dither.experiment.sweep import batches
from dither.experiment.sweep.run import fingerprints, plan_sweep
from dither.simulation import devices, distributed, engine
from dither.spec import Spec


def connect(coordinator: str, *, count: int, number: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Meet the other processes at `coordinator` (HOST:PORT, where process 0 listens), before JAX computes
    anything. `on_wait` is called now and then meanwhile."""
    devices.set_up()
    distributed.connect(coordinator, count=count, number=number, local_devices=devices.own, on_wait=on_wait)


def follow(*, data_dir: str | Path | None = None) -> int:
    """Compute what process 0 asks for, until it needs nobody any more; returns the exit code it has by then."""
    with distributed.together(), train.Interrupt() as interrupt:
        order = distributed.hear()
        if order["do"] == "run":
            order = _run(order, interrupt, data_dir)
        elif order["do"] == "sweep":
            order = _sweep(order, interrupt, data_dir)
        distributed.disconnect()
        return int(order.get("exit_code", 0))


def _run(order: dict[str, Any], interrupt: train.Interrupt, data_dir: str | Path | None) -> dict[str, Any]:
    experiment = build_experiment(Spec.from_toml(order["spec"], where="process 0's spec"), data_dir=data_dir)
    check(experiment)
    distributed.compare(facts(experiment))
    simulation, _, inputs = compiled(experiment)
    state = simulation.start(inputs)
    while True:
        order = distributed.hear(interrupt.asked)
        if order["do"] == "restore":
            state = train.handed_out(state, simulation)
        elif order["do"] == "rounds":
            state = jax.block_until_ready(simulation.advance(state, inputs, order["start"], order["stop"]))
            simulation.evaluate(state, inputs)
            state = engine.reset_metrics(state)
        elif order["do"] == "params":
            jax.block_until_ready(simulation.params(state, inputs))
        elif order["do"] == "end":
            return order
        else:
            raise SpecError(f"process 0 orders {order['do']!r}, which is unknown here: use one version of Dither")
        distributed.reached()


def _sweep(order: dict[str, Any], interrupt: train.Interrupt, data_dir: str | Path | None) -> dict[str, Any]:
    specs = [Spec.from_toml(text, where="a spec of process 0") for text in order["specs"]]
    planned = plan_sweep(specs, order["limit"], data_dir=data_dir)
    distributed.compare(fingerprints(planned))

    def go_on(*_: object) -> None:
        distributed.reached()
        distributed.hear(interrupt.asked)

    go_on()
    batches.train_batches(planned, done=order["done"], on_evaluation=go_on, on_batch=go_on)
    distributed.reached()
    return distributed.hear()
