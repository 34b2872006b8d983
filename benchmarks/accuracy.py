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

from dither import data
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
        self.dataset = build.load_data(spec)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", nargs="+", choices=list(DATA))
    running.add_argument("--epsilon", nargs="+", type=float)
    running.add_argument("--view", nargs="+", choices=list(VIEWS))
    running.add_argument("--method", nargs="+", choices=list(METHODS))
    running.set_defaults(call=run)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
