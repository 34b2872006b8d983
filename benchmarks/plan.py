"""Does a plan beat the paper's own setting? Five methods on Adult, half of it declared public, at one proven ε.

    python benchmarks/plan.py [--methods cpfed ...] [--epsilon 1 3] [--seeds 5] [--quick] [--out FOLDER]

For each method and ε: `dither plan` chooses on the public half of Adult's training records; then the plan and the
paper's default (the preset of the method) are run on the private half by the same engine, at the same proven ε
(every upload seen, replace-one neighbours, δ = 1e-5), with the same clients and model, and scored on Adult's own
test set. The noise of both is set by the accountant. Nothing of the private half or of the test set reaches the
planner; the public half is not charged. Results are added to FOLDER/plan.json; the table is printed from it.

What the presets leave open on this data: NbAFL and DP-SCAFFOLD are published on images; here they train a logistic
model on i.i.d. clients, and DP-SCAFFOLD's batch of 500 of 2,500 records is a fifth of a client's records.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

import dither
from dither.experiment import build
from dither.experiment.folder import write_text
from dither.spec import Spec

METHODS = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated")
DELTA, FRACTION = 1e-5, 0.5


def default(method: str, epsilon: float) -> Spec:
    """The paper's setting on the private half, its noise set for the proven ε."""
    values: dict[str, Any] = {
        "data.name": "adult",
        "data.split": "given",
        "data.public_fraction": FRACTION,
        "data.part": "private",
        "data.records_per_client": 0,
        "data.partition": "iid",
        "privacy.epsilon": epsilon,
        "privacy.delta": DELTA,
        "privacy.unit": "run",
        "privacy.noise": "proven",
        "privacy.view": "upload",
        "privacy.adjacency": "replace-one",
    }
    if method in ("nbafl", "dp-scaffold"):
        values |= {"model.name": "logistic", "model.hidden": []}
    preset = Spec.from_preset(method)
    if method == "dp-scaffold":
        records = 16_280 // preset.num_clients
        values["batch_size"] = records * preset.batch_size // 2500
    return preset.with_values(values)


def scored(spec: Spec, seeds: int) -> dict[str, Any]:
    """Test accuracy of final runs on the private half, and the largest proven ε among them."""
    specs = [spec.with_values({"seed": seed, "eval_every": spec.num_rounds}) for seed in range(seeds)]
    outcomes = dither.sweep(specs)
    accuracy = [outcome.metrics[-1]["test_accuracy"] for outcome in outcomes]
    experiment = build.build_experiment(specs[0])
    return {
        "accuracy": accuracy,
        "loss": [outcome.metrics[-1]["loss"] for outcome in outcomes],
        "proven_epsilon": experiment.proven_epsilon(),
        "claimed_epsilon": experiment.prepared.claim.value,
        "knobs": knobs(spec),
    }


def knobs(spec: Spec) -> dict[str, Any]:
    clip = spec.method_options.get("param_clip", spec.privacy.clip_norm)
    names = ("num_rounds", "cohort_size", "local_steps", "batch_size", "client_lr")
    return {**{name: getattr(spec, name) for name in names}, "clip": clip}


def compare(method: str, epsilon: float, args: argparse.Namespace) -> dict[str, Any]:
    base = default(method, epsilon)
    began = time.perf_counter()
    planned = dither.plan(
        base.with_values({"data.part": "all", "data.public_fraction": 0.0}),
        epsilon=epsilon,
        delta=DELTA,
        proxy="adult",
        public_fraction=FRACTION,
        mode="empirical",
        effort="quick" if args.quick else "search",
        seeds=2 if args.quick else 5,
        anyway=True,
        extras=False,
        progress=lambda line: print(f"  {time.strftime('%X')} {line}", flush=True),
    )
    seconds = time.perf_counter() - began
    signal = max(trial.candidate.signal_to_noise for trial in planned.search.trials)
    return {
        "method": method,
        "epsilon": epsilon,
        "plan": scored(planned.spec, args.seeds),
        "default": scored(base, args.seeds),
        "proxy_accuracy": planned.score,
        "planning_seconds": seconds,
        "planning_runs": planned.search.runs,
        "signal_to_noise": signal,
        "quick": args.quick,
    }


def row(result: dict[str, Any]) -> str:
    def cell(which: str) -> str:
        values = np.array(result[which]["accuracy"])
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return f"{values.mean():.4f} ± {error:.4f}"

    def setting(which: str) -> str:
        k = result[which]["knobs"]
        rounds = f"{k['num_rounds']}, {k['cohort_size']}, {k['local_steps']}, {k['batch_size']}"
        return f"{rounds}, {k['clip']:g}, {k['client_lr']:.3g}"

    a, b = (np.array(result[which]["accuracy"]) for which in ("plan", "default"))
    gain = a.mean() - b.mean()
    error = math.sqrt(sum(x.var(ddof=1) / len(x) for x in (a, b))) if len(a) > 1 else math.nan
    verdict = "plan" if gain > 2 * error else "default" if gain < -2 * error else "neither"
    proven = max(result[which]["proven_epsilon"] for which in ("plan", "default"))
    return (
        f"| {result['method']} | {result['epsilon']:g} | {cell('default')} | {cell('plan')} | "
        f"{gain:+.4f} ± {error:.4f} | {verdict} | {setting('default')} | {setting('plan')} | {proven:.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--epsilon", type=float, nargs="+", default=(1.0, 3.0))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small grid and few seeds, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    file = args.out / "plan.json"
    results = {f"{r['method']} {r['epsilon']:g}": r for r in json.loads(file.read_text())} if file.exists() else {}
    for epsilon in args.epsilon:
        for method in args.methods:
            print(f"{method}, proven ε = {epsilon:g}", flush=True)
            results[f"{method} {epsilon:g}"] = compare(method, epsilon, args)
            args.out.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(list(results.values()), indent=1))
    print(
        "| method | ε | paper's default | plan | gain | better by 2 standard errors | T, K, Q, b, C, η of the ",
        end="",
    )
    print("default | of the plan | proven ε, at most |\n|---|---|---|---|---|---|---|---|---|")
    for epsilon in sorted({r["epsilon"] for r in results.values()}):
        for method in METHODS:
            if f"{method} {epsilon:g}" in results:
                print(row(results[f"{method} {epsilon:g}"]))


if __name__ == "__main__":
    main()
