"""Sweeps: many specs, as few compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither import data
from dither.errors import SpecError
from dither.experiment import compiled as compiling
from dither.experiment.build import Arrays, Experiment, assemble, deal, load_data, planned_rounds, pooled
from dither.simulation import devices, distributed, engine
from dither.simulation.timing import Clock
from dither.spec import METHODS, Spec, method
from dither.types import Claim


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep: no folder, only what was measured."""

    spec: Spec
    metrics: list[dict[str, Any]]
    claim: Claim
    participation: np.ndarray
    seen: Mapping[str, int] = field(default_factory=dict)  # updates refused or lost, void rounds, clamped numbers


# Keys that reach the compiled program as values: specs that differ only in these are one program.
TRACED = (
    "seed",
    "client_lr",
    "lr_decay",
    "server_lr",
    "privacy.epsilon",
    "privacy.delta",
    "privacy.clip_norm",
)
# So do these in the methods that ship with Dither; a file of yours may build them in.
TRACED_HERE = (
    "num_rounds",
    "eval_every",
    "data.partition",  # who holds how many records is compared by itself
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


class Batch(NamedTuple):
    """Runs that one compiled program trains side by side, by position among the specs."""

    numbers: tuple[int, ...]
    program: tuple[str, bytes]  # batches with the same share a compilation
    num_rounds: int


class Plan(NamedTuple):
    """Specs brought to life, and dealt out to batches. The batches follow from the specs alone: a sweep that was
    interrupted is planned to the same ones."""

    experiments: list[Experiment]
    batches: list[Batch]


def sweep(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    on_evaluation: Callable[[int, int], None] | None = None,
    on_batch: Callable[[dict[int, Outcome]], None] | None = None,
    max_runs: Callable[[Experiment], int] | None = None,
    gradient_norm: bool = False,
) -> list[Outcome]:
    """Many runs, as few programs: specs that differ only in seed, noise, rates and clip train side by side.

    `dataset` is used instead of loading one, for all specs. Results come in the order of `specs`;
    `on_evaluation(done, total)` counts rounds over all runs. `max_runs(experiment)` bounds how many runs like this
    one train at once, and `on_batch` is given each batch as it is done, by position in `specs`, to be saved.
    """
    planned = plan(specs, data_dir=data_dir, dataset=dataset, max_runs=max_runs)
    rounds = [len(batch.numbers) * batch.num_rounds for batch in planned.batches]

    def count(at: int, round: int) -> None:
        if on_evaluation:
            on_evaluation(sum(rounds[:at]) + round * len(planned.batches[at].numbers), sum(rounds))

    outcomes = train(planned, on_evaluation=count, on_batch=on_batch, gradient_norm=gradient_norm)
    return [outcomes[number] for number in range(len(specs))]


def refuse_own_data(specs: Sequence[Spec]) -> None:
    """Nobody's own records: what a sweep reveals is charged to no ledger."""
    own = next((spec.data.path for spec in specs if spec.data.path), "")
    if own:
        raise SpecError(
            f"data.path={own!r}: a sweep is not charged to a ledger, so it takes sets of the catalogue only"
        )


def plan(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    max_runs: Callable[[Experiment], int] | None = None,
) -> Plan:
    """Load the data, make every run ready, and group those that one program can train."""
    refuse_own_data(specs)
    devices.set_up()
    loaded: dict[Any, tuple[data.Dataset, Arrays]] = {}
    dealt: dict[Any, tuple[data.ClientPartition, engine.Problem]] = {}
    made: list[Experiment] = []
    groups: dict[tuple[str, bytes, int, int], list[int]] = {}
    for number, spec in enumerate(specs):
        which = "given" if dataset is not None else spec.data
        if which not in loaded:
            found = dataset or load_data(spec, data_dir=data_dir)
            loaded[which] = (found, pooled(found))
        hands = (which, spec.data, spec.num_clients, spec.seed)
        if hands not in dealt:
            dealt[hands] = deal(spec, *loaded[which])
        made.append(assemble(spec, loaded[which][0], *dealt[hands]))
        key = (program(spec), made[-1].partition.size.tobytes(), planned_rounds(made[-1]), spec.eval_every)
        groups.setdefault(key, []).append(number)
    batches = []
    for (name, sizes, num_rounds, _), members in groups.items():
        size = batch_size(len(members), max_runs(made[members[0]]) if max_runs else len(members))
        for at in range(0, len(members), size):
            batches.append(Batch(tuple(members[at : at + size]), (name, sizes), num_rounds))
    return Plan(made, batches)


def train(
    planned: Plan,
    *,
    done: Collection[int] = (),
    on_evaluation: Callable[[int, int], None] | None = None,
    on_batch: Callable[[dict[int, Outcome]], None] | None = None,
    gradient_norm: bool = False,
    clock: Clock | None = None,
) -> dict[int, Outcome]:
    """Train every batch but those whose runs are all among `done`. `on_evaluation(batch, round)` is called after
    each evaluation."""
    clock = clock or Clock()
    outcomes: dict[int, Outcome] = {}
    compiled: dict[Any, engine.Simulation] = {}
    for at, (numbers, name, num_rounds) in enumerate(planned.batches):
        if all(number in done for number in numbers):
            continue
        experiments = [planned.experiments[number] for number in numbers]
        first = experiments[0]
        with clock("start_up"):
            how = compiling.sharing(first, len(experiments))
            # Every device gets as many runs: the last one is repeated where some would lack.
            experiments += experiments[-1:] * (-len(experiments) % how["shards"].runs)
            if (name, how["shards"]) not in compiled:
                compiled[name, how["shards"]] = compiling.simulation(first, gradient_norm=gradient_norm, **how)
            simulation = compiled[name, how["shards"]]
            inputs = simulation.inputs(
                _joined([experiment.problem for experiment in experiments]),
                seeds=[experiment.spec.seed for experiment in experiments],
                hyper=compiling.hypers(experiments),
                cohorts=compiling.designs(experiments),
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
        )
        seen = _seen(result.state)
        batch = {
            number: Outcome(
                experiment.spec,
                _rows(result, i),
                experiment.prepared.claim,
                result.participation[i],
                {name: int(counts[i].sum()) for name, counts in seen.items()},
            )
            for i, (number, experiment) in enumerate(zip(numbers, experiments, strict=False))
        }
        outcomes |= batch
        if on_batch:
            on_batch(batch)
    return outcomes


def program(spec: Spec) -> str:
    """What two specs must share, besides the clients' sizes, to be one compiled program."""
    if spec.aggregation == "real" or spec.secagg.noise == "discrete":
        return spec.digest()  # the protocol and noise on integers are outside the program, and each run's own
    known = method(spec.method)
    options = {f"method_options.{name}": known.options[name][0] for name in known.values}
    values = (*TRACED, *TRACED_HERE) if spec.method in METHODS else TRACED
    aggregation = {"secagg.mode": spec.aggregation}  # before the options that it may follow from
    colluders = {"privacy.colluders": spec.colluders if spec.aggregation != "off" else 0}
    plain = {**{key: Spec.default(key) for key in values}, **options, **aggregation, **colluders}
    return spec.with_values(plain).digest()


def batch_size(runs: int, limit: int) -> int:
    """How many of `runs` alike runs to train at once, at most `limit`: batches of one size compile once."""
    limit = max(1, min(runs, limit))
    even = next(size for size in range(limit, 0, -1) if runs % size == 0)
    return even if 2 * even > limit else limit


def _rows(result: engine.Result, run: int) -> list[dict[str, Any]]:
    return [
        {"round": entry.round, **{name: float(value[run]) for name, value in entry.metrics.items()}}
        for entry in result.history
    ]


def _seen(state: engine.State) -> dict[str, np.ndarray]:
    """What befell the uploads, by run."""
    counts = {"refused": state.refused, "lost": state.lost, "void_rounds": state.void, "clamped": state.clamped}
    return distributed.fetched(counts)


def _joined(problems: Sequence[engine.Problem]) -> engine.Problem:
    """One problem for many runs: the same records, each run with its own dealing."""
    return problems[0]._replace(
        partitions=[problem.partitions[0] for problem in problems],
        test_rows=[problem.test_rows[0] for problem in problems],
        test_weights=[problem.test_weights[0] for problem in problems],
        train_rows=[problem.train_rows[0] for problem in problems] if problems[0].train_rows else (),
    )
