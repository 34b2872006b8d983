"""What protection costs: the time of protected rounds over that of seeded ones, both in one run.

    python benchmarks/protected.py                   # A1 A32 B1 B2 C
    python benchmarks/protected.py A1 B1 --blocks 9

Protected rounds (`randomness = "os"`) add discrete Gaussian noise on a lattice, from words of a cipher keyed by
the operating system; seeded ones add float32 noise from a seed. Both make the rounds of `dither run` on
benchmarks/specs, compiled beforehand, in blocks of equal length that alternate: a machine whose speed drifts
does so for both. Of each, the quickest block counts. Results go to benchmarks/results/protected.json, by the
kind of device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import dither_run  # noqa: E402
import jax  # noqa: E402
import workloads  # noqa: E402

from dither.experiment import build  # noqa: E402
from dither.simulation import devices  # noqa: E402
from dither.spec import Spec  # noqa: E402

STORED = HERE / "results" / "protected.json"


class Rounds:
    """A workload's rounds with one source of randomness, a block at a time."""

    def __init__(self, name: str, randomness: str) -> None:
        spec = Spec.from_any(HERE / "specs" / f"{name}.toml")
        data = str(dither_run.CACHE / "data" / f"{name}.npz")
        experiment = build.build_experiment(spec.with_values({"randomness": randomness, "data.path": data}))
        self.compiled = build.compiled(experiment)
        self.state: Any = self.compiled.rounds.start(self.compiled.inputs)
        self.block, self.done = spec.eval_every, 0  # as between two evaluations of `dither run`
        self.devices = self.compiled.simulation.shards.devices
        self.seconds()  # compiles

    def seconds(self) -> float:
        """Seconds of a round, over one more block."""
        began = time.perf_counter()
        rounds, stop = self.compiled.rounds, self.done + self.block
        self.state = jax.block_until_ready(rounds.advance(self.state, self.compiled.inputs, self.done, stop))
        self.done = stop
        return (time.perf_counter() - began) / self.block


def compare(name: str, blocks: int) -> dict[str, Any]:
    """One workload: seconds of 100 rounds with either source, and their ratio."""
    dither_run.prepare([workloads.WORKLOADS[name]])
    sources = {randomness: Rounds(name, randomness) for randomness in ("seeded", "os")}
    best = dict.fromkeys(sources, float("inf"))
    for _ in range(blocks):
        for randomness, rounds in sources.items():
            best[randomness] = min(best[randomness], rounds.seconds())
    return {
        "workload": name,
        "device": devices.device() if devices.device_kind() == "gpu" else f"cpu, {devices.cores()} cores",
        "devices": sources["os"].devices,
        "seeded_s_per_100": 100 * best["seeded"],
        "protected_s_per_100": 100 * best["os"],
        "ratio": best["os"] / best["seeded"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(workloads.WORKLOADS), help="A1 A32 B1 B2 C")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of rounds of each source (default: 7)")
    parser.add_argument("--stored", type=Path, default=STORED, help="where the results go")
    args = parser.parse_args()
    stored = json.loads(args.stored.read_text()) if args.stored.exists() else {}
    print("| workload | seeded, s / 100 rounds | protected | ratio | devices |\n| --- | --- | --- | --- | --- |")
    for name in args.workloads:
        row = compare(name, args.blocks)
        seeded, protected = (f"{row[f'{source}_s_per_100']:.3g}" for source in ("seeded", "protected"))
        print(f"| {name} | {seeded} | {protected} | {row['ratio']:.2f}x | {row['devices']} |", flush=True)
        stored.setdefault(row["device"], {})[name] = {
            key: value for key, value in row.items() if key not in ("workload", "device")
        }
    args.stored.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
