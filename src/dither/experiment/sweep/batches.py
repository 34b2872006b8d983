"""Batches of runs: specs that share one compiled program train side by side, within a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dither import data
from dither.accounting import ProvenRow
from dither.errors import SpecError
from dither.experiment import build
from dither.experiment.build import Arrays, Experiment, assemble, deal, load_data, planned_rounds, pooled
from dither.experiment.metrics import final_scores
from dither.simulation import devices, distributed, engine
from dither.simulation.arrays import Problem
from dither.simulation.devices import Clock
from dither.spec import METHODS, Spec, declared
from dither.types import Claim

# Keys that reach the compiled program as values: specs that differ only in these share a program.
TRACED = ("seed", "client_lr", "lr_decay", "server_lr", "privacy.epsilon", "privacy.delta", "privacy.clip_norm")
# Values in the methods that ship with Dither; a method in a file of your own may use them while it is traced.
TRACED_IN_BUILT_IN = (
    "num_rounds",
    "eval_every",
    "data.partition",  # the clients' sizes are compared separately
    "data.similarity",
    "data.alpha",
    "privacy.noise",
    "privacy.noise_std",
    "privacy.noise_decay",
    "privacy.noise_decay_start",
    "privacy.unit",
    "privacy.view",
    "privacy.adjacency",
    "privacy.colluders",
)

Simulations = dict[tuple[Any, ...], engine.Simulation]  # by program and devices


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep: its measurements and what is proven of it. Such a run has no folder."""

    spec: Spec
    metrics: list[dict[str, float]]
    claim: Claim
    participation: np.ndarray
    seen: dict[str, int] = field(default_factory=dict)  # counts: refused, lost, void_rounds, clamped
    proven: ProvenRow | None = None  # None: not asked for
    seconds: float = 0.0  # its share of its batch
    made: dict[str, str] = field(default_factory=dict)  # versions and device


class RunBatch(NamedTuple):
    """Runs that one compiled program trains side by side, by position among the specs."""

    numbers: tuple[int, ...]
    program: tuple[str, bytes]  # batches with the same program are compiled once
    num_rounds: int


class BatchPlan(NamedTuple):
    """Experiments and their batches. Batches depend on the specs alone, so an interrupted sweep gets the same."""

    experiments: list[Experiment]
    batches: list[RunBatch]


def train_specs(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    on_evaluation: Callable[[int, int], None] | None = None,
    max_runs: Callable[[Experiment], int] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Train every spec, with as few compiled programs as possible. Outcomes have the order of `specs`.

    dataset        used for all specs instead of loading one
    on_evaluation  called with the number of rounds done and their total, over all runs
    max_runs       how many runs like the given experiment may train side by side
    options        those of `train_batches`
    """
    plan = plan_batches(specs, data_dir=data_dir, dataset=dataset, max_runs=max_runs)
    rounds = [len(batch.numbers) * batch.num_rounds for batch in plan.batches]

    def count(at: int, round: int) -> None:
        if on_evaluation:
            on_evaluation(sum(rounds[:at]) + round * len(plan.batches[at].numbers), sum(rounds))

    outcomes = train_batches(plan, on_evaluation=count, **options)
    return [outcomes[number] for number in range(len(specs))]


def plan_batches(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    max_runs: Callable[[Experiment], int] | None = None,
) -> BatchPlan:
    """Load the data, build every experiment, and group those that can share a program. Private records are
    refused: runs that train side by side are not charged to a ledger."""
    if private := next((spec for spec in specs if spec.private), None):
        raise SpecError(
            f"{private.data.title!r} holds private records, and runs that train side by side are not charged to a "
            "ledger; use `dither sweep`, which charges each run, or declare the records public (data.public=true)"
        )
    devices.set_up()
    loaded: dict[Any, tuple[data.Dataset, Arrays]] = {}
    dealt: dict[Any, tuple[data.ClientPartition, Problem]] = {}
    experiments: list[Experiment] = []
    groups: dict[tuple[str, bytes, int, int], list[int]] = {}
    for number, spec in enumerate(specs):
        source = "given" if dataset is not None else (spec.data, spec.task)
        if source not in loaded:
            records = dataset or load_data(spec, data_dir=data_dir)
            loaded[source] = (records, pooled(records))
        partition = (source, spec.data, spec.num_clients, spec.seed)
        if partition not in dealt:
            dealt[partition] = deal(spec, *loaded[source])
        experiment = assemble(spec, loaded[source][0], *dealt[partition])
        experiments.append(experiment)
        name = " ".join([program(spec), *sorted(experiment.plan.hyper)])  # a method may leave out values of 0
        key = (name, experiment.partition.size.tobytes(), planned_rounds(experiment), spec.eval_every)
        groups.setdefault(key, []).append(number)
    batches = []
    for (name, sizes, num_rounds, _), members in groups.items():
        size = batch_size(len(members), max_runs(experiments[members[0]]) if max_runs else len(members))
        for at in range(0, len(members), size):
            batches.append(RunBatch(tuple(members[at : at + size]), (name, sizes), num_rounds))
    return BatchPlan(experiments, batches)


# reason: options that are independent of each other
def train_batches(
    plan: BatchPlan,
    *,
    done: Collection[int] = (),
    on_evaluation: Callable[[int, int], None] | None = None,
    on_batch: Callable[[dict[int, Outcome]], None] | None = None,
    gradient_norm: bool = False,
    from_start: bool = False,
    simulations: Simulations | None = None,
    clock: Clock | None = None,
    scores: bool = False,
) -> dict[int, Outcome]:
    """Train every batch, except those whose runs are all in `done`.

    on_evaluation  called with batch and round after each evaluation
    on_batch       called with the outcomes of each finished batch, by position among the specs
    from_start     score the initial model too, as round 0
    simulations    compiled programs, to be shared by calls with the same data
    scores         the last evaluation of each run also has scikit-learn's metrics
    """
    clock = clock or Clock()
    outcomes: dict[int, Outcome] = {}
    simulations = {} if simulations is None else simulations
    for at, (numbers, name, num_rounds) in enumerate(plan.batches):
        if all(number in done for number in numbers):
            continue
        experiments = [plan.experiments[number] for number in numbers]
        first = experiments[0]
        with clock("start_up"):
            options = build.sharing(first, len(experiments))
            shards = options["shards"]
            # Every device trains the same number of runs: the last run is repeated to fill up.
            experiments += experiments[-1:] * (-len(experiments) % shards.runs)
            key = (name, shards, gradient_norm)
            if key not in simulations:
                simulations[key] = build.make_simulation(first, gradient_norm=gradient_norm, **options)
            simulation = simulations[key]
            inputs = simulation.inputs(
                joined_problem([experiment.problem for experiment in experiments]),
                seeds=[experiment.spec.seed for experiment in experiments],
                hyper=build.hypers(experiments),
                cohorts=build.designs(experiments),
            )

        def evaluated(evaluation: engine.Evaluation, at: int = at) -> None:
            if on_evaluation:
                on_evaluation(at, evaluation.round)

        result = engine.train(
            simulation,
            inputs,
            num_rounds=num_rounds,
            eval_every=first.spec.eval_every,
            on_evaluation=evaluated,
            clock=clock,
            from_start=from_start,
        )
        batch = dict(zip(numbers, _outcomes(experiments[: len(numbers)], result, scores=scores), strict=True))
        outcomes |= batch
        if on_batch:
            on_batch(batch)
    return outcomes


def _outcomes(
    experiments: Sequence[Experiment], result: engine.SimulationResult, *, scores: bool
) -> list[Outcome]:
    state, params = result.state, distributed.fetched(result.params)
    counts = distributed.fetched(
        {"refused": state.refused, "lost": state.lost, "void_rounds": state.void, "clamped": state.clamped}
    )
    outcomes = []
    for run, experiment in enumerate(experiments):
        rows = [
            {"round": entry.round, **{name: float(value[run]) for name, value in entry.metrics.items()}}
            for entry in result.history
        ]
        if scores:
            rows[-1] |= final_scores(experiment, jax.tree.map(lambda leaf, run=run: leaf[run], params))
        seen = {name: int(count[run].sum()) for name, count in counts.items()}
        outcomes.append(Outcome(experiment.spec, rows, experiment.prepared.claim, result.participation[run], seen))
    return outcomes


def program(spec: Spec) -> str:
    """What two specs must share, in addition to the clients' sizes, to be one compiled program."""
    if spec.aggregation == "real" or spec.secagg.noise == "discrete":
        return spec.digest()  # the protocol, and noise on integers, run outside the program
    entries = declared(spec.method).options.items()
    options = {f"method_options.{name}": option.default for name, option in entries if option.traced}
    traced = (*TRACED, *TRACED_IN_BUILT_IN) if spec.method in METHODS else TRACED
    aggregation = {"secagg.mode": spec.aggregation}  # before the options that may depend on it
    colluders = {"privacy.colluders": spec.colluders if spec.aggregation != "off" else 0}
    plain = {**{key: Spec.default(key) for key in traced}, **options, **aggregation, **colluders}
    # Protected noise is drawn on integers: a run without noise computes in another way.
    noiseless = spec.privacy.noise == "none" or math.isinf(spec.privacy.epsilon)
    exactly = spec.source_of_randomness == "os" and not noiseless
    return spec.with_values(plain).digest() + ("" if not exactly else " exact")


def batch_size(runs: int, limit: int) -> int:
    """How many of `runs` alike runs to train at once, at most `limit`. Batches of one size compile once."""
    limit = max(1, min(runs, limit))
    even = next(size for size in range(limit, 0, -1) if runs % size == 0)
    return even if 2 * even > limit else limit


def joined_problem(problems: Sequence[Problem]) -> Problem:
    """One problem for many runs: the same records, with each run's own partition."""
    return problems[0]._replace(
        partitions=[problem.partitions[0] for problem in problems],
        test_rows=[problem.test_rows[0] for problem in problems],
        test_weights=[problem.test_weights[0] for problem in problems],
        train_rows=[problem.train_rows[0] for problem in problems] if problems[0].train_rows else (),
    )


# Estimates of memory and time, made before a run is trained

BATCH_BYTES = {"cpu": 1.0e9, "gpu": 3.0e10}
_BATCH_SECONDS = 40.0  # on a CPU, so that a kill loses at most about this much
_MOST_RUNS = {"cpu": 40, "gpu": 80}
_SCORED = 4096  # records scored at a time (simulation.arrays)
_SHAPES = {  # features, classes and records of the papers' data sets
    "adult": (103, 2, 48_842),
    "mnist": (784, 10, 60_000),
    "emnist-bymerge": (784, 47, 100_000),
    "digits": (64, 10, 1_438),
    "breast-cancer": (30, 2, 569),
}
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


def runs_at_once(experiment: Experiment, kind: str, max_bytes: float | None = None) -> int:
    """How many runs like this one train side by side: limited by memory, and on a CPU by time."""
    memory = batch_memory(experiment, kind)
    available = BATCH_BYTES[kind] if max_bytes is None else max_bytes - memory.shared
    most = int(min(_MOST_RUNS[kind], max(available, 0.0) / memory.each))
    if kind == "cpu":
        # A run that fills a core's caches gains nothing from others beside it.
        large = devices.sequential_clients(build.step_numbers(experiment))
        seconds = estimated_seconds(experiment.spec, kind)
        most = min(most, devices.parallel_tasks() if large else math.ceil(_BATCH_SECONDS / seconds))
    return max(1, most)


class BatchMemory(NamedTuple):
    """Upper estimates, in bytes; docs/sweep.md compares them with measurements."""

    shared: float  # whatever the size of the batch: the records on the host and on each device, and their scoring
    each: float  # what one more run adds


def batch_memory(experiment: Experiment, kind: str) -> BatchMemory:
    """What a batch of runs like this one takes."""
    spec, params, sizes = experiment.spec, experiment.num_params, experiment.partition.size
    features, hidden = float(np.prod(experiment.problem.x.shape[1:])), float(sum(spec.model.hidden))
    # Numbers that one record becomes on its way through the model
    width = features + (hidden * features if spec.model.name == "cnn" else hidden)
    # All clients' states, and the indices of their records and of the test records; before and after a chunk of
    # rounds, on host and device.
    each = 4.0 * (4.0 * params * len(sizes) + 6.0 * (int(sizes.sum()) + len(experiment.problem.test_rows[0])))
    # Model, gradient, optimiser, noise, upload and batch of each client at work in one run
    one_by_one = kind == "cpu" and devices.sequential_clients(build.step_numbers(experiment))
    clients = 1 if one_by_one else spec.cohort_size
    work = 4.0 * clients * (12.0 * params + 4.0 * build.batch_records(experiment) * width)
    records = float(np.asarray(experiment.problem.x).nbytes)
    shared, copies = records + 4.0 * 3 * _SCORED * width, 1 + devices.usable(int(records))
    if build.sharing(experiment, 2).get("sequential_runs"):  # a device trains its runs one after another
        return BatchMemory(copies * (shared + work), each)
    return BatchMemory(copies * shared, each + work)


def estimated_seconds(spec: Spec, kind: str) -> float:
    """A rough estimate of one run's time in a batch, for progress bars and for the size of a batch.

    It is fitted to a machine with two CPU cores and to an NVIDIA H200. Only ratios matter for a progress bar."""
    features, classes, records = _SHAPES.get(spec.data.name, (100, 2, 50_000))
    widths = [features, *spec.model.hidden, classes if spec.model.name != "logistic" else 1]
    params = float(sum(a * b for a, b in pairwise(widths)))
    client_records = spec.data.records_per_client or records // max(spec.num_clients, 1)
    batch = client_records if spec.batch_sampling == "full" else spec.batch_size
    steps = float(spec.num_rounds * spec.local_steps)
    flops = 6.0 * params * batch * steps * spec.cohort_size
    evaluations = spec.num_rounds / spec.eval_every
    scored = 2.0 * params * evaluations * (client_records * spec.num_clients + records / 6)
    if kind == "cpu":
        return 0.02 + flops / 1.1e11 + scored / 1e11 + 1.5e-5 * steps * spec.cohort_size + 2e-3 * evaluations
    return 0.02 + flops / 8e12 + scored / 2e12 + 4e-6 * steps + 1e-3 * evaluations


def parse_bytes(text: str) -> float:
    """`4GB`, `500 MB`, `1.5GiB` or a number of bytes."""
    letters = text.strip().lstrip("0123456789.eE+")
    number, unit = text.strip()[: len(text.strip()) - len(letters)], letters.strip().upper()
    try:
        value = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise SpecError(f"{text!r} is not an amount of memory; write for example 500MB, 4GB or 1.5GiB")
    return value
