"""What runs that train side by side take in memory, against the estimate that `--max-memory` splits a sweep by.

    python benchmarks/sweep_memory.py            # about two minutes on two cores

Each setting is trained twice in a process of its own, with few and many runs in a batch. What training adds to the
peak resident memory, less with few runs, divided by the further runs, is what a run takes: the compiler's own
memory cancels. A whole batch contains it (some 150 MB), which the estimate does not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys

SETTINGS = {
    "cpfed, adult, logistic": ("adult", {}),
    "secure-fedavg, adult, logistic, 50 clients at work": (
        "secure-fedavg",
        {"privacy.noise": "paper", "privacy.epsilon": 1.0},
    ),
    "dp-scaffold, digits, MLP of 19,210": (
        "dp-scaffold",
        {"data.name": "digits", "model.name": "mlp", "model.hidden": [256], "num_clients": 40, "cohort_size": 20},
    ),
    "dp-scaffold, digits, MLP of 76,810 (one client at a time)": (
        "dp-scaffold",
        {"data.name": "digits", "model.name": "mlp", "model.hidden": [1024], "num_clients": 40, "cohort_size": 20},
    ),
}
FIXED = {"num_rounds": 3, "eval_every": 3, "privacy.noise": "given", "privacy.noise_std": 1.0}
FIXED |= {"privacy.noise_decay_start": 0, "privacy.epsilon": 1e9}
SMALL = {"data.split": "given", "data.partition": "iid", "data.records_per_client": 0, "batch_size": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, metavar=("SETTING", "RUNS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child[0], int(args.child[1]))))
        return
    print(f"{'':60}{'measured':>12}{'estimate':>12}{'ratio':>8}   MB a run; whole batch: measured, estimate")
    for name in SETTINGS:
        few, many = (8, 40) if "MLP" in name else (20, 200)  # small runs are lost in the noise of the allocator
        low, high = (child(name, runs) for runs in (few, many))
        whole = high["peak"] - high["before"]
        each = (whole - (low["peak"] - low["before"])) / (many - few)
        print(
            f"{name:60}{each / 1e6:12.2f}{high['each'] / 1e6:12.2f}{high['each'] / each:8.2f}   "
            f"{whole / 1e6:.0f}, {(high['shared'] + many * high['each']) / 1e6:.0f}"
        )


def child(name: str, runs: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, str(runs)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure(name: str, runs: int) -> dict[str, float]:
    """Peak memory before training and after it, in bytes, and the estimates."""
    from dither.experiment.sweep import batches
    from dither.simulation import devices
    from dither.spec import Spec

    preset, values = SETTINGS[name]
    small = SMALL if values.get("data.name") == "digits" else {}
    base = Spec.from_preset(preset).with_values({**FIXED, **small, **values})
    planned = batches.plan_batches([base.with_values({"seed": seed}) for seed in range(runs)])
    before = peak()
    batches.train_batches(planned)
    experiment, kind = planned.experiments[0], devices.device_kind()
    return {
        "before": before,
        "peak": peak(),
        **batches.batch_memory(experiment, kind)._asdict(),
        "params": experiment.num_params,
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
