"""Where a run's time goes: the compiled rounds by part, evaluation, ledger and Python.

    python benchmarks/profiling.py A1 A32 B1 B2 C [--rounds N] [--json FILE]

Each workload (benchmarks/specs) is trained twice. First through `dither.run`, ledger and metrics on, with the
calls that make up a run timed from outside: rounds, evaluations, ledger; the rest is Python. Then some of its
rounds alone under JAX's profiler, on one device, whose events name the compiled operations. An operation belongs
to the scope that its metadata names (noise, gather, sampling, cohort, close), else it is local arithmetic. A fused
operation counts where its result does: noise that is added to an update in one pass includes the addition.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

import dither
from dither.accounting.ledger.runs import Spending
from dither.experiment import build
from dither.simulation import devices, engine
from dither.simulation.arrays import ONE_DEVICE
from dither.spec import Spec

HERE = Path(__file__).resolve().parent
SCOPES = ("noise", "gather", "sampling", "cohort", "close")
NESTING = ("while", "call", "conditional", "ThunkExecutor")  # events that contain others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=["A1", "A32", "B1", "B2", "C"])
    parser.add_argument("--rounds", type=int, default=0, help="rounds under the profiler (default: by workload)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("DITHER_LEDGER", str(Path(tempfile.mkdtemp()) / "ledger"))
    os.environ.setdefault("DITHER_STATE", tempfile.mkdtemp())
    devices.set_up()
    rows = []
    for name in arguments.workloads:
        rows.append(measured(name, arguments.rounds or (50 if name.startswith("A") else 2)))
        print(line(rows[-1]), flush=True)
    print("\n" + table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def measured(name: str, rounds: int) -> dict:
    spec = Spec.from_any(HERE / "specs" / f"{name}.toml")
    spec = spec.with_values({"data.path": str(HERE.parent / spec.data.path)})
    outside = from_outside(spec)
    parts = inside(spec, rounds)
    share = outside["rounds"] / sum(parts.values())
    return {
        "workload": name,
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        "seconds": outside,
        "share": {
            **{part: share * value / sum(outside.values()) for part, value in parts.items()},
            **{part: outside[part] / sum(outside.values()) for part in ("evaluation", "ledger", "python")},
        },
    }


# From outside: a whole run


def from_outside(spec: Spec) -> dict[str, float]:
    """Seconds of a run between its first evaluation and its last."""
    spent: Counter[str] = Counter()
    marks: list[tuple[float, dict[str, float]]] = []

    def timed(owner: type, method: str, part: str) -> None:
        plain = getattr(owner, method)

        def wrapped(*values, **named):
            began = time.perf_counter()
            result = jax.block_until_ready(plain(*values, **named))
            spent[part] += time.perf_counter() - began
            return result

        setattr(owner, method, wrapped)
        undo.append(lambda: setattr(owner, method, plain))

    undo: list = []
    timed(engine.Simulation, "advance", "rounds")
    timed(engine.Simulation, "evaluate", "evaluation")
    timed(Spending, "pay", "ledger")
    try:
        with tempfile.TemporaryDirectory() as folder:
            dither.run(
                spec,
                out=Path(folder) / "run",
                on_evaluation=lambda row: marks.append((time.perf_counter(), dict(spent))),
            )
    finally:
        for each in undo:
            each()
    (began, first), (ended, last) = marks[0], marks[-1]
    found = {part: last[part] - first[part] for part in ("rounds", "evaluation", "ledger")}
    return {**found, "python": ended - began - sum(found.values())}


# Inside: the compiled rounds


def inside(spec: Spec, rounds: int) -> dict[str, float]:
    """Seconds of the operations of some rounds, by scope."""
    experiment = build.build_experiment(spec)
    simulation, _, inputs = build.compiled(experiment, shards=ONE_DEVICE)
    state = simulation.advance(simulation.start(inputs), inputs, 1, 2)
    size = experiment.prepared.cohort_size_at(2)
    program = simulation._advance.lower(state, *inputs, np.int32(2), np.int32(3), cohort_size=size).compile()
    scopes = scopes_of(program.as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(simulation.advance(state, inputs, 2, 2 + rounds))
        (trace,) = Path(folder).glob("**/*.xplane.pb")
        return seconds_by_scope(jax.profiler.ProfileData.from_file(str(trace)), scopes)


def scopes_of(program: str) -> dict[str, str]:
    """The scope of each operation of a compiled program, from its metadata."""
    found = {}
    for operation, path in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.M):
        inner = [part for part in re.split(r"[/()]", path) if part in SCOPES]
        found[operation] = inner[-1] if inner else "local steps"
    return found


def seconds_by_scope(profile: jax.profiler.ProfileData, scopes: dict[str, str]) -> dict[str, float]:
    total: Counter[str] = Counter(dict.fromkeys(("local steps", *SCOPES), 0.0))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation and not str(operation).startswith(NESTING) and event.name != "end: ":
                    total[scopes.get(str(operation), "local steps")] += event.duration_ns / 1e9
    return dict(total)


# Words


def line(row: dict) -> str:
    shares = ", ".join(f"{part} {value:.0%}" for part, value in row["share"].items())
    return f"{row['workload']} on {row['device']}: {shares}"


def table(rows: list[dict]) -> str:
    parts = list(rows[0]["share"])
    lines = [
        "| share of the time | " + " | ".join(row["workload"] for row in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    lines += [f"| {part} | " + " | ".join(f"{row['share'][part]:.1%}" for row in rows) + " |" for part in parts]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
