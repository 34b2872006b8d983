"""When do control variates help? SCAFFOLD against plain averaging on one-class clients, without and with noise.

    python benchmarks/drift_control.py [--data digits] [--rounds 60] [--seeds 5] [--out FOLDER] [--json]

Both methods take the same noisy, clipped gradients (DP-SCAFFOLD's, per step); only the drift control differs.
Prints rounds to a stated accuracy without noise, the final accuracy of both against the noise std with two
standard errors, and where the advantage is no longer larger than them; saves a picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import dither
from dither.experiment import plots
from dither.spec import Spec

LEVELS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def specs(args: argparse.Namespace) -> list[Spec]:
    base = Spec().with_values(
        {
            "num_clients": args.clients,
            "cohort_size": args.cohort,
            "num_rounds": args.rounds,
            "local_steps": args.local_steps,
            "batch_size": args.batch,
            "batch_sampling": "fixed",
            "client_lr": args.lr,
            "eval_every": 2,
            "data.name": args.data,
            "data.partition": args.partition,
            "data.records_per_client": args.records,
            "model.name": "softmax",
            "privacy.epsilon": 1e9,
            "privacy.clip": "example",
            "privacy.clip_norm": args.clip,
        }
    )
    made = []
    for method in ("cpfed", "dp-scaffold"):
        for level in args.levels:
            noise = {"privacy.noise": "given", "privacy.noise_std": level} if level else {"privacy.noise": "none"}
            made += [base.with_values({"method": method, "seed": seed, **noise}) for seed in range(args.seeds)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--partition", default="one-class")
    parser.add_argument("--records", type=int, default=0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS)
    parser.add_argument("--target", type=float, default=0.85, help="accuracy that is counted to")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    outcomes = dither.sweep(specs(args))
    curves = np.array([[row["test_accuracy"] for row in outcome.metrics] for outcome in outcomes])
    curves = curves.reshape(2, len(args.levels), args.seeds, -1)
    rounds = [row["round"] for row in outcomes[0].metrics]

    def rounds_to(curve: np.ndarray) -> float:
        reached = np.flatnonzero(curve >= args.target)
        return rounds[reached[0]] if len(reached) else float("inf")

    needed = [[rounds_to(curve) for curve in curves[m, 0]] for m in (0, 1)] if args.levels[0] == 0 else None
    final = curves[..., -3:].mean(-1)  # the last three evaluations, so that one lucky round counts less
    gain = final[1] - final[0]
    mean, error = gain.mean(1), 2 * gain.std(1, ddof=1) / np.sqrt(args.seeds)
    result = {
        "data": args.data,
        "noise_std": list(args.levels),
        "averaging": final[0].mean(1).tolist(),
        "scaffold": final[1].mean(1).tolist(),
        "advantage": mean.tolist(),
        "two_standard_errors": error.tolist(),
        "vanishes_at": next((s for s, m, e in zip(args.levels, mean, error, strict=True) if m <= e), None),
        "rounds_to_target_without_noise": needed,
        "target": args.target,
    }
    draw(args, curves, rounds, result)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    if needed:
        print(f"rounds to {args.target} without noise: averaging {needed[0]}, SCAFFOLD {needed[1]}")
    print("noise std   averaging   SCAFFOLD   advantage (± 2 standard errors)")
    for i, level in enumerate(args.levels):
        a, b = result["averaging"][i], result["scaffold"][i]
        print(f"{level:9g}   {a:9.4f}   {b:8.4f}   {mean[i]:+.4f} ± {error[i]:.4f}")
    print(f"advantage not above its error first at noise std {result['vanishes_at']}")


def draw(args: argparse.Namespace, curves: np.ndarray, rounds: list[int], result: dict) -> None:
    figure, axes = plots.new_figure(1, 2, width=9, height=3.6)
    left, right = axes[0]
    for number, (name, colour) in enumerate((("averaging", plots.VERMILION), ("SCAFFOLD", plots.BLUE))):
        mean, spread = curves[number, 0].mean(0), curves[number, 0].std(0)
        left.plot(rounds, mean, color=colour, label=name)
        left.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    left.set(xlabel="communication round", ylabel="test accuracy", title="without noise")
    left.legend(frameon=False)
    positions = np.arange(len(args.levels))
    right.errorbar(
        positions, result["advantage"], yerr=result["two_standard_errors"], color=plots.BLUE, marker="o", capsize=3
    )
    right.axhline(0, color=plots.GREY, linewidth=1)
    right.set_xticks(positions, [f"{level:g}" for level in args.levels])
    right.set(xlabel="noise std on the mean gradient", ylabel="accuracy gained by control variates")
    right.set_title(f"{args.seeds} seeds, two standard errors")
    figure.suptitle(
        f"Drift control on {args.data}, {args.partition} clients", x=0.02, ha="left", fontweight="bold"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plots.save(figure, args.out / f"drift-control-{args.data}.png")


if __name__ == "__main__":
    main()
