"""Methods at equal proven ε: accuracy on Adult, MNIST and Fashion-MNIST, by what the server sees.

    python benchmarks/accuracy.py run --goals               # the cells that goals are about, if they are missing
    python benchmarks/accuracy.py run                       # all cells that are missing, one after the other
    python benchmarks/accuracy.py run --data adult --epsilon 0.1 0.3 --method dp-sgd
    python benchmarks/accuracy.py table                     # results/accuracy.* and docs/benchmarks.md

A cell is a data set, a method, an ε and a view: "uploads" (the server sees every upload), "sums" (secure
aggregation, nobody colludes) or "sums, a third colludes". All ε are proven for the whole run, zero-out neighbours,
δ = 1e-5. The features are public (`data.transform`).

Every method makes as many gradient steps and is tuned with the same effort: as many candidates of step size and
clip, each trained on folds of proxy records (Adult's with five draws of the noise). Those are a tenth of the
training records, declared public by row number alone; all folds but one are repeated up to the count of all
records, and that one scores. The chosen candidate is then trained with five seeds on all training records, and
only those five models see the test records. The ε holds for the nine tenths that were not declared public: of the
proxy records it covers the training but not the tuning.

Which method a goal is about is decided by proxy scores too. Where the best is within one standard error (of its
differences, fold by fold) of `DEFAULT`, it is that one: momentum and averaging cost no ε, and proxies are few.

Intervals are t intervals over the seeds, and of paired differences where methods are compared. The floor predicts
the most frequent class; the ceiling is the dp-sgd without noise that the proxy records prefer.

Seeded runs: their proof is for real numbers. A protected run (randomness = "os") adds the same noise on integers
and has the same ε for what the computer does; Secure FedAvg's E3 is not proven there.

Fashion-MNIST's files are those of the catalogue. `--arrays fashion-mnist=FILE.npz` takes a file of your own
instead (x_train, y_train, x_test, y_test, classes), and the cells say so.

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
from dither.errors import NoProof, SpecError
from dither.experiment import build, plots
from dither.experiment.sweep.batches import joined_problem, program
from dither.reproduction.drawing import COLOURS, MARKS
from dither.simulation import engine
from dither.spec import Spec

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "accuracy"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SEEDS = 5
PROXY = 0.1  # share of the training records that is declared public
EPSILONS = (0.1, 0.3, 1.0, 3.0)

COMMON = {
    "batch_sampling": "poisson",
    "randomness": "seeded",
    "compare": False,
    "privacy.noise": "proven",
    "privacy.unit": "run",
    "privacy.clip": "example",
    "privacy.adjacency": "zero-out",
    "privacy.delta": 1e-5,
}


class Setting(NamedTuple):
    """A data set: its values in a spec, the gradient steps of a client in a run, however many a round has, and the
    candidates that every method is tuned over."""

    values: dict[str, Any]
    steps: int
    folds: int
    draws: int  # runs of a candidate on a fold, each with its own noise
    rates: tuple[float, ...]
    clips: tuple[float, ...]


def _pictures(name: str, transform: str, steps: int) -> Setting:
    values = {
        "data.name": name,
        "data.transform": transform,
        "model.name": "softmax",
        "num_clients": 10,
        "cohort_size": 10,
        "sampling_rate": 0.125,
        "batch_size": 750,
    }
    return Setting(values, steps, folds=3, draws=1, rates=(16.0, 48.0, 128.0, 384.0), clips=(0.2, 0.6))


DATA = {
    "adult": Setting(
        {
            "data.name": "adult",
            "data.encoding": "standard",
            "data.transform": "unit",
            "model.name": "logistic",
            "num_clients": 16,
            "cohort_size": 16,
            "sampling_rate": 0.0625,
            "batch_size": 127,
        },
        steps=400,
        folds=5,
        draws=5,
        rates=(2.0, 6.0, 16.0, 48.0),
        clips=(0.2, 0.4, 0.8),
    ),
    "mnist": _pictures("mnist", "scattering", steps=800),
    "fashion-mnist": _pictures("fashion-mnist", "scattering-random", steps=400),
}
VIEWS = {
    "uploads": lambda clients: {"privacy.view": "upload", "secagg.mode": "off"},
    "sums": lambda clients: {"privacy.view": "sum", "secagg.mode": "ideal", "privacy.colluders": 0},
    "sums, a third colludes": lambda clients: {
        "privacy.view": "sum",
        "secagg.mode": "ideal",
        "privacy.colluders": clients // 3,
    },
}
# A method is one line: the values it sets. Its candidates are those of the data set, times its rate factor.
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
        "rate_factor": 0.125,  # its best proof (E3) is for steps that do not expand
    },
}
DEFAULT = "dp-sgd, momentum, averaged"


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
    rounds = setting.steps // values["local_steps"]
    return (
        Spec()
        .with_values({"method": values.pop("method")})
        .with_values(
            {
                **COMMON,
                **setting.values,
                **VIEWS[view](setting.values["num_clients"]),
                "num_rounds": rounds,
                "eval_every": rounds,
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
    """One data set, and who holds which of its rows: proxy records for tuning, all records for the result."""

    def __init__(self, data_name: str, arrays: Path | None) -> None:
        spec = spec_of(data_name, next(iter(METHODS)), 1.0, "uploads", (1.0, 1.0), 0)
        self.source = "catalogue"
        if arrays is None:
            self.dataset = build.load_data(spec)
        else:
            self.dataset = data.transformed(data.load(path=arrays), spec.data.transform)
            self.source = f"own arrays, SHA-256 {data.file_digest(arrays)}"
        self.arrays = build.pooled(self.dataset)
        count = len(self.dataset.y_train)
        order = np.random.default_rng(0).permutation(count)  # by row number alone
        public = order[: round(PROXY * count)]
        self.folds, self.draws = DATA[data_name].folds, DATA[data_name].draws
        self.public = public[: len(public) // self.folds * self.folds].reshape(self.folds, -1)
        self.train, self.test = np.arange(count), np.arange(count, count + len(self.dataset.y_test))
        self.clients = spec.num_clients
        self.floor = float(np.bincount(self.dataset.y_test).max() / len(self.test))

    def problem(self, rows: np.ndarray, scored: np.ndarray, seed: int) -> engine.Problem:
        """These rows dealt out to the clients at random, repeated up to the count of all."""
        each = len(self.train) // self.clients
        rows = np.random.default_rng(seed).permutation(np.resize(rows, each * self.clients)).astype(np.int32)
        start = np.arange(self.clients, dtype=np.int32) * each
        names = tuple(f"client {number}" for number in range(self.clients))
        partition = data.ClientPartition(rows, start, np.full(self.clients, each, np.int32), names)
        weights = np.full(len(scored), 1.0 / len(scored))
        return engine.Problem(*self.arrays, [partition], [scored], [weights], [np.zeros(1, np.int32)])

    def fold(self, number: int) -> engine.Problem:
        """The proxy records outside a fold; scored on the fold."""
        return self.problem(np.delete(self.public, number, axis=0).ravel(), self.public[number], number)

    def final(self, seed: int) -> engine.Problem:
        """All training records; scored on the test records."""
        return self.problem(self.train, self.test, seed)

    def assemble(self, spec: Spec, problem: engine.Problem) -> build.Experiment:
        return build.assemble(spec, self.dataset, problem.partitions[0], problem)


def accuracies(experiment: build.Experiment, runs: Sequence[tuple[engine.Problem, int, Any]]) -> list[float]:
    """Accuracy of runs (problem, seed, noise and rates) that share one compiled program, side by side."""
    simulation = _SIMULATIONS.setdefault(_program(experiment), build.make_simulation(experiment))
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


def _program(experiment: build.Experiment) -> str:
    return program(experiment.spec.with_values({"privacy.colluders": 0}))


class Scores(NamedTuple):
    """Of a cell: proxy scores by candidate and fold, which candidate is best, and its five test scores."""

    tuned: np.ndarray
    best: int
    accuracy: list[float]


_SIMULATIONS: dict[str, engine.Simulation] = {}  # noise is a value: cells that differ in it share a program
_SCORES: dict[str, Scores] = {}  # and those that have the same noise are the same runs


def score(splits: Splits, tried: Sequence[build.Experiment]) -> Scores:
    """Tune on the proxies, then five seeds."""
    hypers = [build.compiled_hyper(each) for each in tried]
    values = [sorted((name, np.asarray(value).tolist()) for name, value in hyper.items()) for hyper in hypers]
    key = repr((splits.dataset.name, _program(tried[0]), values))
    if key not in _SCORES:
        folds = [splits.fold(number) for number in range(splits.folds)]
        draws = [(fold, seed) for seed, fold in enumerate(folds * splits.draws)]
        runs = [(fold, seed, hyper) for hyper in hypers for fold, seed in draws]
        tuned = np.reshape(accuracies(tried[0], runs), (len(tried), splits.draws, splits.folds)).mean(1)
        best = int(np.argmax(tuned.mean(1)))  # its noise is that of all records, whose count is the same
        finals = [(splits.final(seed), seed, hypers[best]) for seed in range(SEEDS)]
        _SCORES[key] = Scores(tuned, best, accuracies(tried[best], finals))
    return _SCORES[key]


def make_cell(splits: Splits, cell: Cell) -> dict[str, Any]:
    """One cell of the table."""
    began = time.process_time()
    candidates = list(itertools.product(DATA[cell.data].rates, DATA[cell.data].clips))
    fold = splits.fold(0)
    tried = [splits.assemble(spec_of(*cell, candidate, 0), fold) for candidate in candidates]
    tuned, best, accuracy = score(splits, tried)
    row = tried[best].accountant().proven()
    return {
        **cell._asdict(),
        "source": splits.source,
        "floor": splits.floor,
        "proven": row.value,
        "recipe": row.recipe,
        "rate": candidates[best][0],
        "clip": candidates[best][1],
        "proxy": tuned[best].tolist(),
        "candidates": dict(
            zip((f"{rate:g} {clip:g}" for rate, clip in candidates), tuned.mean(1).tolist(), strict=True)
        ),
        "accuracy": accuracy,
        "seconds": time.process_time() - began,
    }


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells that are asked for; without noise (ε = ∞) only dp-sgd, for the ceiling."""
    goals = {(data_name, view, epsilon) for data_name, view, epsilon, _ in GOALS}
    for data_name in arguments.data or DATA:
        for epsilon in arguments.epsilon or (math.inf, *EPSILONS):
            for view in arguments.view or VIEWS:
                for method in arguments.method or METHODS:
                    if math.isinf(epsilon) and (METHODS[method]["method"] != "dp-sgd" or view != "uploads"):
                        continue
                    if not arguments.goals or (data_name, view, epsilon) in goals:
                        yield Cell(data_name, method, epsilon, view)


def path_of(cell: Cell) -> Path:
    data_name, method, epsilon, view = cell
    name = "-".join(f"{data_name} {epsilon:g} {view} {method}".replace(",", "").split())
    settings = json.dumps([COMMON, DATA[data_name], METHODS[method], SEEDS, PROXY])
    return CELLS / f"{name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"


def run(arguments: argparse.Namespace) -> None:
    CELLS.mkdir(parents=True, exist_ok=True)
    arrays = {name: Path(path) for name, _, path in (given.partition("=") for given in arguments.arrays)}
    splits = cache(lambda name: Splits(name, arrays.get(name)))
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
    ("fashion-mnist", "sums", 3.0, 0.885),
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
        chosen = preferred(of) if of else {}
        reached = {key: chosen[key] for key in ("method", "mean", "half") if chosen}
        goals.append({"data": data_name, "view": view, "epsilon": epsilon, "goal": goal, **reached})
    noiseless: dict[str, list[dict[str, Any]]] = {}
    for cell in made:
        if math.isinf(cell["epsilon"]):
            noiseless.setdefault(cell["data"], []).append(cell)
    return {
        "cells": rows,
        "floor": {cell["data"]: cell["floor"] for cell in made if "floor" in cell},
        "ceiling": {name: Interval.of(preferred(of)["accuracy"])._asdict() for name, of in noiseless.items()},
        "beats": beats,
        "goals": goals,
    }


def preferred(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The method by proxy scores, not by test scores: the default, unless another is better by more than one
    standard error."""
    best = max(rows, key=lambda row: float(np.mean(row["proxy"])))
    for row in rows:
        if row["method"] == DEFAULT:
            gain = np.subtract(best["proxy"], row["proxy"])
            if gain.mean() <= gain.std(ddof=1) / math.sqrt(len(gain)):
                return row
    return best


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


def markdown(result: dict[str, Any]) -> str:
    """The goals and a table for each data set, as docs/benchmarks.md has them."""
    lines = ["| data | server sees | ε | goal | reached | method |", "|---|---|---|---|---|---|"]
    for goal in result["goals"]:
        if "mean" in goal:
            met = "met" if goal["mean"] >= goal["goal"] else "missed"
            reached = f"{goal['mean']:.4f} ± {goal['half']:.4f}, {met}"
            cells = [goal["data"], goal["view"], f"{goal['epsilon']:g}", goal["goal"], reached, goal["method"]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, setting in DATA.items():
        rows = {
            (row["view"], row["method"], row["epsilon"]): row for row in result["cells"] if row["data"] == name
        }
        if not rows:
            continue
        none = Interval(**result["ceiling"][name]) if name in result["ceiling"] else None
        ceiling = f", no noise {none.mean:.4f} ± {none.half:.4f}" if none else ""
        clients = setting.values["num_clients"]
        lines += [
            "",
            f"**{name}**, {clients} institutions: most frequent class {result['floor'][name]:.4f}{ceiling}",
            "",
        ]
        lines += [f"| server sees | method | {' | '.join(f'ε = {e:g}' for e in EPSILONS)} |", f"|{'---|' * 6}"]
        for view, method in itertools.product(VIEWS, METHODS):
            of = [rows.get((view, method, epsilon), {}) for epsilon in EPSILONS]
            cells = [f"{row['mean']:.4f} ± {row['half']:.4f}" if "mean" in row else "–" for row in of]
            lines.append(f"| {view if method == next(iter(METHODS)) else ''} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy by ε: a row for each data set, a column for each view; PNG and SVG."""
    names = [name for name in DATA if name in result["floor"]]
    figure, axes = plots.new_figure(len(names), len(VIEWS), width=7.0, height=0.9 + 2.0 * len(names))
    entries: dict[str, Any] = {}
    for (data_name, view), axis in zip(itertools.product(names, VIEWS), axes.flat, strict=True):
        floor = result["floor"][data_name] + 0.05  # what is at chance would flatten the others
        every = [row for row in result["cells"] if row["data"] == data_name and row.get("mean", 0) > floor]
        for number, method in enumerate(METHODS):
            rows = [row for row in every if (row["view"], row["method"]) == (view, method)]
            rows.sort(key=lambda row: row["epsilon"])
            if rows:
                x, y, half = zip(*((row["epsilon"], row["mean"], row["half"]) for row in rows), strict=True)
                x = np.multiply(x, 1.04 ** (number - len(METHODS) / 2))  # beside each other, not on top
                style = {"color": COLOURS[number], "marker": MARKS[number], "ms": 2.5, "capsize": 1.5, "lw": 0.9}
                entries[method] = axis.errorbar(x, y, half, label=method, **style)
        ceiling = result["ceiling"].get(data_name, {}).get("mean", math.nan)
        plots.score_axis(axis, [row["mean"] for row in every], {"no noise": ceiling})
        axis.set_title(f"{data_name}: {view}", fontsize=7)
        axis.set(xscale="log", xlim=(0.08, 4))
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.tick_params(labelsize=7)
        axis.minorticks_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("test accuracy", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("proven ε", fontsize=8)
    figure.legend(list(entries.values()), list(entries), fontsize=7, loc="outside lower center", ncols=4)
    plots.headline(
        figure,
        "Methods at equal proven ε",
        "whole run, zero-out, δ = 1e-5; 95% intervals of 5 seeds; results near chance are left out",
    )
    plots.save(figure, path)


def table(arguments: argparse.Namespace) -> None:
    """The results of all cells with today's settings, and what they say."""
    del arguments
    every = argparse.Namespace(data=None, epsilon=None, view=None, method=None, goals=False)
    paths = [path_of(cell) for cell in cells(every)]
    result = summary([json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()])
    (RESULTS / "accuracy.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "accuracy.tex").write_text(latex(result), encoding="utf-8")
    draw(result, RESULTS / "accuracy.png")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!--accuracy-->")
    after = rest.partition("<!--/accuracy-->")[2]
    PAGE.write_text(f"{before}<!--accuracy-->\n{markdown(result)}\n<!--/accuracy-->{after}", encoding="utf-8")
    for name, ceiling in result["ceiling"].items():
        print(f"{name}: floor {result['floor'][name]:.4f}, no noise {ceiling['mean']:.4f} ± {ceiling['half']:.4f}")
    for row in result["cells"]:
        said = f"{row['mean']:.4f} ± {row['half']:.4f}" if "mean" in row else row["refused"]
        print(f"{row['data']:13} {row['view']:24} ε={row['epsilon']:<4g} {row['method']:28} {said}")
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
    running.add_argument("--goals", action="store_true", help="only cells that a goal is about")
    running.add_argument("--arrays", nargs="+", default=[], metavar="NAME=FILE.npz", help="files of your own")
    running.set_defaults(call=run)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
