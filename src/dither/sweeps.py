"""Sweeps: many specs, as few compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dither import data
from dither.core import Claim
from dither.engines import simulate
from dither.errors import SpecError
from dither.spec import Spec
from dither.tasks import Arrays, Task, build_task, designs, load_data, planned_rounds, pooled


@dataclass(frozen=True)
class Outcome:
    """One run of a sweep: no folder, only what was measured."""

    spec: Spec
    metrics: list[dict[str, Any]]
    claim: Claim
    participation: np.ndarray


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


def sweep(
    specs: Sequence[Spec],
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    on_evaluation: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Many runs, as few programs: specs that differ only in seed, noise, rates and clip train side by side.

    `dataset` is used instead of loading one, for all specs. Results come in the order of `specs`;
    `on_evaluation(done, total)` counts rounds over all runs.
    """
    own = next((spec.data.path for spec in specs if spec.data.path), "")
    if own:
        raise SpecError(
            f"data.path={own!r}: a sweep is not charged to a ledger, so it takes sets of the catalogue only"
        )
    loaded: dict[Any, tuple[data.Dataset, Arrays]] = {}
    made: list[Task] = []
    groups: dict[tuple[str, int], list[int]] = {}
    for number, spec in enumerate(specs):
        which = "given" if dataset is not None else spec.data
        if which not in loaded:
            found = dataset or load_data(spec, data_dir=data_dir)
            loaded[which] = (found, pooled(found))
        made.append(build_task(spec, dataset=loaded[which][0], arrays=loaded[which][1]))
        groups.setdefault((_program(made[-1]), planned_rounds(made[-1])), []).append(number)
    outcomes: dict[int, Outcome] = {}
    total, finished = sum(planned_rounds(task) for task in made), 0
    for members in groups.values():
        tasks = [made[number] for number in members]
        first = tasks[0]
        hyper = {
            name: np.stack([np.asarray(t.prepared.hyper[name]) for t in tasks]) for name in first.prepared.hyper
        }

        def count(evaluation: simulate.Evaluation, base: int = finished, runs: int = len(tasks)) -> None:
            if on_evaluation:
                on_evaluation(base + evaluation.round * runs, total)

        result = simulate.simulate(
            first.prepared.build,
            first.model,
            _joined([task.problem for task in tasks]),
            num_rounds=planned_rounds(first),
            cohort_size=first.prepared.cohort_size_at,
            seeds=[task.spec.seed for task in tasks],
            hyper=hyper,
            cohorts=designs(tasks),
            eval_every=first.spec.eval_every,
            randomness=first.spec.source_of_randomness,
            on_evaluation=count,
        )
        finished += len(tasks) * planned_rounds(first)
        for i, (number, task) in enumerate(zip(members, tasks, strict=True)):
            rows = [
                {"round": entry.round, **{name: float(value[i]) for name, value in entry.metrics.items()}}
                for entry in result.history
            ]
            outcomes[number] = Outcome(task.spec, rows, task.prepared.claim, result.participation[i])
    return [outcomes[number] for number in range(len(specs))]


def _program(task: Task) -> str:
    """What two specs must share to be one compiled program. A method's own constant that stands among the values
    of `hyper` by its own name (NbAFL's param_clip) is traced too."""
    spec = task.spec
    plain = spec.with_values({key: Spec.default(key) for key in TRACED})
    traced = {key: 1.0 for key in spec.method_options if key in task.prepared.hyper}
    return plain.with_values({f"method_options.{key}": value for key, value in traced.items()}).digest()


def _joined(problems: Sequence[simulate.Problem]) -> simulate.Problem:
    """One problem for many runs: the same records, each run with its own dealing."""
    return problems[0]._replace(
        federations=[problem.federations[0] for problem in problems],
        test_rows=[problem.test_rows[0] for problem in problems],
        test_weights=[problem.test_weights[0] for problem in problems],
    )
