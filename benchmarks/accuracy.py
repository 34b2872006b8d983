"""Methods at equal proven ε: accuracy on Adult and MNIST, by what the server sees.

    python benchmarks/accuracy.py run                       # all cells that are missing, one after the other
    python benchmarks/accuracy.py run --data adult --epsilon 0.1 0.3 --method dp-sgd
    python benchmarks/accuracy.py table                     # results/accuracy.{json,png,tex} from the cells

A cell is a data set, a method, an ε and a view: "uploads" (the server sees every upload), "sums" (secure
aggregation, nobody colludes) or "sums, a third colludes". All ε are proven for the whole run, zero-out neighbours,
δ = 1e-5. Every method makes as many gradient steps and is tuned with the same effort: the same candidates of step
size and clip, each trained on two folds of proxy records. Those are a tenth of the training records, declared
public by row number alone and repeated up to the count of the others; a fold is scored on the proxy records that
it leaves out. The chosen candidate is then trained with five seeds on the other nine tenths, and only those five
models see the test records. Intervals are t intervals over the seeds, and of paired differences where methods are
compared. The floor predicts the most frequent class; the ceiling is the first method without noise.

Seeded runs: their proof is for real numbers. A protected run (randomness = "os") adds the same noise on integers
and has the same ε for what the computer does.

Cells are kept in results/accuracy/ as they are made, so that the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from dither import data
from dither.data.scattering import scattering
from dither.errors import NoProof, SpecError
from dither.experiment import build
from dither.experiment.sweep.batches import joined_problem, program
from dither.simulation import engine
from dither.spec import Spec

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "accuracy"
SEEDS, FOLDS = 5, 2
PROXY = 0.1  # share of the training records that is declared public
EPSILONS = (0.1, 0.3, 1.0, 3.0)
STEPS = 400  # gradient steps of a client in a run, however many a round has

COMMON = {
    "batch_sampling": "poisson",
    "sampling_rate": 0.0625,
    "eval_every": STEPS,
    "randomness": "seeded",
    "compare": False,
    "privacy.noise": "proven",
    "privacy.unit": "run",
    "privacy.clip": "example",
    "privacy.adjacency": "zero-out",
    "privacy.delta": 1e-5,
}
DATA: dict[str, dict[str, Any]] = {
    "adult": {
        "data.name": "adult",
        "data.encoding": "standard",
        "model.name": "logistic",
        "num_clients": 16,
        "cohort_size": 16,
        "batch_size": 137,
    },
    # Public features, which no data has shaped; their root brings large and small channels together.
    "mnist": {
        "data.name": "mnist",
        "model.name": "softmax",
        "num_clients": 10,
        "cohort_size": 10,
        "batch_size": 337,
    },
}
FEATURES = {"mnist": lambda x: np.sqrt(np.maximum(scattering(x.reshape(-1, 28, 28)), 0))}
VIEWS = {
    "uploads": lambda clients: {"privacy.view": "upload", "secagg.mode": "off"},
    "sums": lambda clients: {"privacy.view": "sum", "secagg.mode": "ideal", "privacy.colluders": 0},
    "sums, a third colludes": lambda clients: {
        "privacy.view": "sum",
        "secagg.mode": "ideal",
        "privacy.colluders": clients // 3,
    },
}
# A method is one line: the values it sets, and the key that takes the place of the clip's candidates, if any.
FREE = {"server_optimizer": "momentum", "server_average": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"method": "dp-sgd", "local_steps": 1},
    "dp-sgd, averaged": {"method": "dp-sgd", "local_steps": 1, "server_average": 0.5},
    "dp-sgd, momentum, averaged": {"method": "dp-sgd", "local_steps": 1, "rate_factor": 0.1, **FREE},
    "cpfed, 4 steps": {"method": "cpfed", "local_steps": 4, "method_options.aggregation_credit": False},
    "concentrated, 4 steps": {"method": "concentrated", "local_steps": 4},
    "dp-scaffold, 4 steps": {"method": "dp-scaffold", "local_steps": 4, "method_options.stop_at_budget": "no"},
    "secure-fedavg, 4 steps": {
        "method": "secure-fedavg",
        "local_steps": 4,
        "method_options.first_round": "cohort",
    },
}
RATES = (0.25, 1.0, 4.0, 16.0)
CLIPS = (0.25, 0.7, 2.0)


class Cell(NamedTuple):
    """What is compared."""

    data: str
    method: str
    epsilon: float
    view: str


def spec_of(
    data_name: str, method: str, epsilon: float, view: str, candidate: tuple[float, float], seed: int
) -> Spec:
    """One run of a cell, with a candidate's step size and clip."""
    values, (rate, clip) = dict(METHODS[method]), candidate
    factor = values.pop("rate_factor", 1.0)
    setting = DATA[data_name]
    return (
        Spec()
        .with_values({"method": values.pop("method")})
        .with_values(
            {
                **COMMON,
                **setting,
                **VIEWS[view](setting["num_clients"]),
                "num_rounds": STEPS // values["local_steps"],
                # A clipped gradient is no longer than the clip: the same step then goes as far
                "client_lr": rate * factor / clip,
                "privacy.clip_norm": clip,
                "privacy.epsilon": epsilon,
                "seed": seed,
                **values,
            }
        )
    )


class Splits:
    """One data set, and who holds which of its rows: proxy records for tuning, the private part for the result."""

    def __init__(self, data_name: str) -> None:
        spec = spec_of(data_name, next(iter(METHODS)), 1.0, "uploads", (1.0, 1.0), 0)
        dataset = build.load_data(spec)
        if data_name in FEATURES:
            x_train, x_test = map(FEATURES[data_name], (dataset.x_train, dataset.x_test))
            dataset = dataset._replace(x_train=x_train, x_test=x_test, image_shape=(), feature_names=())
        self.dataset = dataset
        self.arrays = build.pooled(self.dataset)
        count = len(self.dataset.y_train)
        order = np.random.default_rng(0).permutation(count)  # by row number alone
        self.public, self.private = np.split(order, [round(PROXY * count)])
        self.public = self.public[: len(self.public) // FOLDS * FOLDS]
        self.test = np.arange(count, count + len(self.dataset.y_test))
        self.clients = spec.num_clients
        self.floor = float(np.bincount(self.dataset.y_test).max() / len(self.test))

    def problem(self, rows: np.ndarray, scored: np.ndarray, seed: int) -> engine.Problem:
        """These rows dealt out to the clients at random, as many as the private part has."""
        each = len(self.private) // self.clients
        rows = np.random.default_rng(seed).permutation(np.resize(rows, each * self.clients)).astype(np.int32)
        start = np.arange(self.clients, dtype=np.int32) * each
        names = tuple(f"client {number}" for number in range(self.clients))
        partition = data.ClientPartition(rows, start, np.full(self.clients, each, np.int32), names)
        weights = np.full(len(scored), 1.0 / len(scored))
        return engine.Problem(*self.arrays, [partition], [scored], [weights], [np.zeros(1, np.int32)])

    def fold(self, number: int) -> engine.Problem:
        """The proxy records outside a fold, repeated up to the count of the private ones; scored on the fold."""
        folds = self.public.reshape(FOLDS, -1)
        return self.problem(np.delete(folds, number, axis=0).ravel(), folds[number], number)

    def final(self, seed: int) -> engine.Problem:
        """The private records; scored on the test records."""
        return self.problem(self.private, self.test, seed)

    def assemble(self, spec: Spec, problem: engine.Problem) -> build.Experiment:
        return build.assemble(spec, self.dataset, problem.partitions[0], problem)


def accuracies(experiment: build.Experiment, runs: Sequence[tuple[engine.Problem, int, Any]]) -> list[float]:
    """Accuracy of runs (problem, seed, noise and rates) that share one compiled program, side by side."""
    key = program(experiment.spec.with_values({"privacy.colluders": 0}))
    simulation = _SIMULATIONS.setdefault(key, build.make_simulation(experiment))
    problems, seeds, hypers = zip(*runs, strict=True)
    inputs = simulation.inputs(
        joined_problem(problems),
        seeds=seeds,
        hyper={name: np.stack([np.asarray(hyper[name]) for hyper in hypers]) for name in hypers[0]},
        cohorts=[experiment.plan.design] if experiment.plan.design is not None else None,
    )
    rounds = build.planned_rounds(experiment)
    result = engine.train(simulation, inputs, num_rounds=rounds, eval_every=rounds)
    return [float(score) for score in result.history[-1].metrics["test_accuracy"]]


_SIMULATIONS: dict[str, engine.Simulation] = {}  # noise is a value: cells that differ in it share a program


def make_cell(splits: Splits, cell: Cell) -> dict[str, Any]:
    """Tune on the proxies, then five seeds."""
    began = time.process_time()
    candidates = list(itertools.product(RATES, CLIPS))
    folds = [splits.fold(number) for number in range(FOLDS)]
    tried = [splits.assemble(spec_of(*cell, candidate, 0), folds[0]) for candidate in candidates]
    runs = [(fold, seed, build.compiled_hyper(each)) for each in tried for seed, fold in enumerate(folds)]
    tuned = np.reshape(accuracies(tried[0], runs), (len(candidates), FOLDS)).mean(1)
    best = int(np.argmax(tuned))
    hyper = build.compiled_hyper(tried[best])  # counts are the same, and so is the noise
    row = tried[best].accountant().proven()
    return {
        **cell._asdict(),
        "proven": row.value,
        "recipe": row.recipe,
        "rate": candidates[best][0],
        "clip": candidates[best][1],
        "proxy": dict(zip((f"{rate:g} {clip:g}" for rate, clip in candidates), tuned.tolist(), strict=True)),
        "accuracy": accuracies(tried[best], [(splits.final(seed), seed, hyper) for seed in range(SEEDS)]),
        "seconds": time.process_time() - began,
    }


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells that are asked for; without noise (ε = ∞) only the first method, as the ceiling."""
    for data_name in arguments.data or DATA:
        for epsilon in arguments.epsilon or (math.inf, *EPSILONS):
            for view in arguments.view or VIEWS:
                for method in arguments.method or METHODS:
                    if math.isfinite(epsilon) or (method == next(iter(METHODS)) and view == "uploads"):
                        yield Cell(data_name, method, epsilon, view)


def path_of(cell: Cell) -> Path:
    data_name, method, epsilon, view = cell
    name = "-".join(f"{data_name} {epsilon:g} {view} {method}".replace(",", "").split())
    settings = json.dumps([COMMON, DATA[data_name], METHODS[method], RATES, CLIPS, STEPS, SEEDS, FOLDS])
    return CELLS / f"{name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"


def run(arguments: argparse.Namespace) -> None:
    CELLS.mkdir(parents=True, exist_ok=True)
    splits = cache(Splits)
    for cell in cells(arguments):
        path = path_of(cell)
        if path.exists():
            continue
        try:
            result = make_cell(splits(cell.data), cell)
        except (NoProof, SpecError) as error:  # a method without a proof has an empty cell, which says why
            result = {**cell._asdict(), "refused": str(error)}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        mean = np.mean(result.get("accuracy", math.nan))
        print(f"{path.stem}: {mean:.4f} {result.get('refused', '')} {result.get('seconds', 0):.0f} s", flush=True)


# The table


class Interval(NamedTuple):
    """A mean with its 95% t interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1)) * spread)


# What was aimed at: data, view, ε, accuracy
GOALS = [
    ("adult", "sums", 0.1, 0.846),
    ("adult", "sums", 0.3, 0.851),
    ("adult", "sums", 1.0, 0.852),
    ("adult", "uploads", 0.1, 0.825),
    ("adult", "uploads", 0.3, 0.845),
    ("adult", "uploads", 1.0, 0.851),
    ("mnist", "sums", 1.0, 0.978),
    ("mnist", "sums", 3.0, 0.982),
    ("mnist", "uploads", 1.0, 0.965),
    ("mnist", "uploads", 3.0, 0.975),
]


def summary(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the table says: intervals, who beats whom, goals."""
    rows = [
        {**cell, **Interval.of(cell["accuracy"])._asdict()} if "accuracy" in cell else cell
        for cell in made
        if math.isfinite(cell["epsilon"])
    ]
    scored = [row for row in rows if "accuracy" in row]
    beats = []
    for first, second in itertools.permutations(scored, 2):
        if all(first[key] == second[key] for key in ("data", "view", "epsilon")):
            gain = Interval.of(np.subtract(first["accuracy"], second["accuracy"]))
            if gain.mean > gain.half:
                where = {key: first[key] for key in ("data", "view", "epsilon")}
                beats.append({**where, "method": first["method"], "beats": second["method"], **gain._asdict()})
    goals = []
    for data_name, view, epsilon, goal in GOALS:
        of = [row for row in scored if (row["data"], row["view"], row["epsilon"]) == (data_name, view, epsilon)]
        # The method is the one that the proxy records prefer, not the one that the test records do
        best = max(of, key=lambda row: max(row["proxy"].values()), default=None)
        reached = {"method": best["method"], "mean": best["mean"], "half": best["half"]} if best else {}
        goals.append({"data": data_name, "view": view, "epsilon": epsilon, "goal": goal, **reached})
    return {
        "cells": rows,
        "floor": {name: Splits(name).floor for name in {row["data"] for row in rows}},
        "ceiling": {c["data"]: Interval.of(c["accuracy"])._asdict() for c in made if math.isinf(c["epsilon"])},
        "beats": beats,
        "goals": goals,
    }


def latex(result: dict[str, Any]) -> str:
    """A table for each data set: methods by view and ε."""
    lines = []
    for data_name in sorted(result["floor"]):
        rows = [row for row in result["cells"] if row["data"] == data_name]
        epsilons = sorted({row["epsilon"] for row in rows})
        lines += [f"% {data_name}: accuracy at proven epsilon, 5 seeds, 95% intervals"]
        lines += ["\\begin{tabular}{ll" + "r" * len(epsilons) + "}", "\\toprule"]
        lines += [
            "server sees & method & " + " & ".join(f"$\\varepsilon={e:g}$" for e in epsilons) + r" \\",
            "\\midrule",
        ]
        for view, method in itertools.product(VIEWS, METHODS):
            of = {row["epsilon"]: row for row in rows if (row["view"], row["method"]) == (view, method)}
            if of:
                numbers = [
                    f"${of[e]['mean']:.4f} \\pm {of[e]['half']:.4f}$" if e in of and "mean" in of[e] else "--"
                    for e in epsilons
                ]
                lines.append(f"{view} & {method} & " + " & ".join(numbers) + r" \\")
        lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = sorted(result["floor"])
    figure, axes = plt.subplots(
        len(names), len(VIEWS), figsize=(4.2 * len(VIEWS), 3.6 * len(names)), squeeze=False, sharey="row"
    )
    for row_axes, data_name in zip(axes, names, strict=True):
        for axis, view in zip(row_axes, VIEWS, strict=True):
            for number, method in enumerate(METHODS):
                of = [
                    row
                    for row in result["cells"]
                    if (row["data"], row["view"], row["method"]) == (data_name, view, method) and "mean" in row
                ]
                of.sort(key=lambda row: row["epsilon"])
                if of:
                    x, y, half = zip(*((row["epsilon"], row["mean"], row["half"]) for row in of), strict=True)
                    axis.errorbar(x, y, half, label=method, color=f"C{number}", marker="o", ms=3, capsize=2, lw=1)
            axis.axhline(result["floor"][data_name], color="0.6", linestyle=":", linewidth=1)
            if data_name in result["ceiling"]:
                axis.axhline(result["ceiling"][data_name]["mean"], color="0.3", linestyle="--", linewidth=1)
            axis.set(xscale="log", xlabel="proven ε", title=f"{data_name}: {view}")
            axis.grid(alpha=0.2)
        row_axes[0].set_ylabel("test accuracy")
    entries = {
        name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    axes[0, 0].legend(list(entries.values()), list(entries), fontsize=7, loc="lower right")
    figure.text(
        0.5,
        0.005,
        "dashed: without noise; dotted: most frequent class; bars: 95%, 5 seeds",
        ha="center",
        fontsize=7,
    )
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=150)


def table(arguments: argparse.Namespace) -> None:
    """The results of all cells with today's settings, and what they say."""
    del arguments
    every = argparse.Namespace(data=None, epsilon=None, view=None, method=None)
    paths = [path_of(cell) for cell in cells(every)]
    result = summary([json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()])
    (RESULTS / "accuracy.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "accuracy.tex").write_text(latex(result), encoding="utf-8")
    draw(result, RESULTS / "accuracy.png")
    for row in result["cells"]:
        said = f"{row['mean']:.4f} ± {row['half']:.4f}" if "mean" in row else row["refused"]
        print(f"{row['data']:6} {row['view']:24} ε={row['epsilon']:<4g} {row['method']:28} {said}")
    for goal in result["goals"]:
        if "mean" in goal:
            met = "met" if goal["mean"] >= goal["goal"] else "missed"
            where = f"{goal['data']}, {goal['view']}, ε={goal['epsilon']:g}"
            print(
                f"{where}: goal {goal['goal']}, {goal['mean']:.4f} ± {goal['half']:.4f} ({goal['method']}): {met}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", nargs="+", choices=list(DATA))
    running.add_argument("--epsilon", nargs="+", type=float)
    running.add_argument("--view", nargs="+", choices=list(VIEWS))
    running.add_argument("--method", nargs="+", choices=list(METHODS))
    running.set_defaults(call=run)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
