"""A sweep from its grid to its folder: plan, train what is missing, prove, write."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither import data
from dither.errors import SpecError
from dither.experiment import build, compiled, sizing, sweeps
from dither.experiment.sweep import drawing
from dither.experiment.sweep.accounts import proven as proven_row
from dither.experiment.sweep.folder import Record, SweepFolder
from dither.experiment.sweep.grid import differing, product, refuse_twins
from dither.experiment.sweep.result import Sweep
from dither.experiment.train import Interrupt
from dither.simulation import devices, distributed
from dither.simulation.timing import Clock
from dither.spec import Spec


class Progress(NamedTuple):
    """What a caller hears: seconds of estimated work done, of how much, and finished runs, of how many."""

    done: float
    total: float
    runs: int
    of: int


def sweep(
    what: Spec | str | Path | Mapping[str, Any] | Sequence[Spec],
    vary: Mapping[str, Sequence[Any]] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    max_memory: str | float | None = None,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    prove: bool | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Sweep:
    """Train every combination of the varied values on top of a spec, as few compiled programs.

        found = dither.sweep("adult", {"privacy.epsilon": [0.1, 1.0], "seed": range(5)}, out="sweeps/first")
        found.table()             # one row a setting: accuracy with its standard error, claimed and proven ε
        found[0].metrics          # the first run's evaluations; `found` is a sequence of outcomes

    `what` is a preset's name, a TOML file, a mapping or a `Spec`; or a list of specs, instead of `vary`. `values`
    are set on top of it for all runs. Runs that differ in seed, noise, rates or clip are one program, trained side
    by side. `max_memory` ("4GB", or bytes) bounds what a batch of them takes with the records that they share, by
    an estimate; a single run is made whatever it takes.

    With `out` each finished batch is on disk at once, and the same call continues an interrupted one to the same
    bits; in the end the folder holds runs.csv, curves.csv, plot.png and sweep.json. `prove=False` leaves the
    proven ε out, as a plain list of specs without `out` does by itself. Records of your own are refused: a sweep
    is charged to no ledger.

    Among several processes (`simulation.distributed`) this is for process 0; the others call `following.follow`.
    """
    with distributed.together():
        return _sweep(what, vary, values, out, max_memory, data_dir, dataset, prove, on_progress)


def _sweep(
    what: Spec | str | Path | Mapping[str, Any] | Sequence[Spec],
    vary: Mapping[str, Sequence[Any]] | None,
    values: Mapping[str, Any] | None,
    out: str | Path | None,
    max_memory: str | float | None,
    data_dir: str | Path | None,
    dataset: data.Dataset | None,
    prove: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Sweep:
    distributed.must_lead()
    clock = Clock()
    specs, keys, grid = _specs(what, vary, values)
    sweeps.refuse_own_data(specs)
    limit = sizing.parse_bytes(max_memory) if isinstance(max_memory, str) else max_memory
    if limit is not None and not limit > 0:
        raise SpecError(f"max_memory={max_memory!r} must be above 0")
    prove = (vary is not None or out is not None) if prove is None else prove
    place = SweepFolder(out) if out is not None else None
    described = {**grid, "runs": len(specs), "proven": prove}
    if place is not None:
        refuse_twins(specs)  # runs are kept by their spec
        place.claim(described)
    with clock("start_up"):
        devices.set_up()
        kind = devices.device_kind()
        records = place.finished(specs) if place is not None else {}
        if distributed.count() > 1 and dataset is not None:
            raise SpecError("dataset= is in this process alone: several processes load a sweep's data themselves")
        tomls = [spec.to_toml() for spec in specs] if distributed.count() > 1 else []
        distributed.tell("sweep", specs=tomls, limit=limit, done=sorted(records))
        planned = planned_for(specs, limit, data_dir=data_dir, dataset=dataset)
        if distributed.count() > 1:
            distributed.compare(facts(planned))
    work = _Work(planned, records, kind, on_progress)
    kept = _Kept(planned, place, prove, clock)
    with Interrupt() as interrupt:

        def evaluated(batch: int, round: int) -> None:
            distributed.reached()
            if interrupt.asked:
                raise KeyboardInterrupt
            work.advance(batch, round)
            go_on()

        def trained(batch: dict[int, sweeps.Outcome]) -> None:
            distributed.reached()
            kept.keep(batch)
            go_on()

        def go_on() -> None:
            if distributed.tell("go on", work=True):
                interrupt.asked = True  # in another process

        go_on()
        sweeps.train(planned, done=records, on_evaluation=evaluated, on_batch=trained, clock=clock)
        distributed.reached()
    distributed.dismiss()  # nothing below needs another's devices
    records = records | kept.records
    largest = max(planned.batches, key=lambda batch: len(batch.numbers))
    model = planned.experiments[largest.numbers[0]]
    estimate = sizing.shared_bytes(model, kind) + len(largest.numbers) * sizing.run_bytes(model, kind)
    notes = []
    if limit is not None and estimate > limit:
        notes.append(f"a single run is estimated at {estimate / 1e6:.0f} MB, above --max-memory")
    found = Sweep(
        specs=tuple(specs),
        keys=tuple(keys),
        records=tuple(records[number] for number in range(len(specs))),
        timing={},
        folder=place.path if place else None,
        notes=tuple(notes),
    )
    if place is not None:
        with clock("plot"):
            place.save_table("runs.csv", found.rows())
            place.save_table("curves.csv", found.curves())
            drawing.draw(found, place.path / "plot.png")
        place.save_summary(_summary(found, described, planned, limit, estimate, clock))
    found.timing.update(clock.report())
    return found


def planned_for(
    specs: Sequence[Spec],
    limit: float | None,
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
) -> sweeps.Plan:
    """The batches of a sweep: each process takes as many runs at once as it would alone."""
    kind = devices.device_kind()
    return sweeps.plan(
        specs,
        data_dir=data_dir,
        dataset=dataset,
        max_runs=lambda experiment: distributed.count() * sizing.runs_at_once(experiment, kind, limit),
    )


def facts(planned: sweeps.Plan) -> dict[str, str]:
    """What every process that shares a sweep must have alike, by name."""
    dealt = hashlib.sha256(repr([batch.numbers for batch in planned.batches]).encode())
    values, records = (
        hashlib.sha256(),
        {id(experiment.problem.x): experiment.problem for experiment in planned.experiments},
    )
    for problem in records.values():  # held once, by however many runs
        dealt.update(np.ascontiguousarray(problem.x).data)
        dealt.update(np.ascontiguousarray(problem.y).data)
    for experiment in planned.experiments:
        dealt.update(experiment.partition.order.tobytes() + experiment.partition.size.tobytes())
        values.update(compiled.value_digest(experiment).encode())
    return {
        **compiled.surroundings(planned.experiments[0].spec),
        "the data, or how its runs are batched": dealt.hexdigest()[:16],
        "noise, rates and clips": values.hexdigest()[:12],
    }


def _specs(
    what: Any, vary: Mapping[str, Sequence[Any]] | None, values: Mapping[str, Any] | None
) -> tuple[list[Spec], list[str], dict[str, Any]]:
    """The runs, the keys that vary, and the grid as sweep.json names it."""
    if isinstance(what, list | tuple):
        if vary is not None:
            raise SpecError("give a list of specs or the keys to vary, not both")
        specs = [Spec.from_any(each).with_values(values or {}) for each in what]
        if not specs:
            raise SpecError("a sweep of no specs; give at least one")
        return specs, differing(specs), {"specs": [spec.to_dict() for spec in specs]}
    columns = {key: list(column) for key, column in (vary or {}).items()}
    specs = product(what, columns, values or {})
    base = Spec.from_any(what).with_values(values or {})
    return specs, list(columns), {"spec": base.to_dict(), "vary": columns}


class _Work:
    """Tells how much is done, by the estimated time of each batch."""

    def __init__(
        self,
        planned: sweeps.Plan,
        done: Mapping[int, Record],
        kind: str,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._batches, self._tell = planned.batches, on_progress
        self._seconds = [
            sum(sizing.seconds(planned.experiments[number].spec, kind) for number in batch.numbers)
            for batch in planned.batches
        ]
        self._before = [all(number in done for number in batch.numbers) for batch in planned.batches]
        if on_progress:
            finished = [at for at, before in enumerate(self._before) if before]
            on_progress(self._progress(finished, 0.0))

    def advance(self, batch: int, round: int) -> None:
        share = round / self._batches[batch].num_rounds
        finished = [
            at for at, before in enumerate(self._before) if before or at < batch or (at == batch and share >= 1)
        ]
        if self._tell:
            self._tell(self._progress(finished, 0.0 if share >= 1 else share * self._seconds[batch]))

    def _progress(self, finished: Sequence[int], more: float) -> Progress:
        return Progress(
            sum(self._seconds[at] for at in finished) + more,
            sum(self._seconds),
            sum(len(self._batches[at].numbers) for at in finished),
            sum(len(batch.numbers) for batch in self._batches),
        )


class _Kept:
    """Proves and keeps each batch as it is done."""

    def __init__(self, planned: sweeps.Plan, place: SweepFolder | None, prove: bool, clock: Clock) -> None:
        self._tasks, self._place, self._prove, self._clock = planned.experiments, place, prove, clock
        self._since = time.perf_counter()
        self._made = {**devices.versions(), "device": devices.device()}
        self.records: dict[int, Record] = {}

    def keep(self, batch: dict[int, sweeps.Outcome]) -> None:
        each = (time.perf_counter() - self._since) / len(batch)
        found = {}
        with self._clock("accounting"):
            for number, outcome in batch.items():
                experiment = self._tasks[number]
                if build.stop_reason(experiment):  # the claim is for the rounds that were made
                    outcome = replace(
                        outcome, claim=build.claim_after(experiment, build.planned_rounds(experiment))
                    )
                proven = proven_row(experiment) if self._prove else None
                found[number] = Record(outcome, proven, each, self._made)
        if self._place is not None:
            self._place.save_batch(list(found.values()))
        self.records |= found
        self._since = time.perf_counter()


def _summary(
    found: Sweep,
    described: Mapping[str, Any],
    planned: sweeps.Plan,
    limit: float | None,
    estimate: float,
    clock: Clock,
) -> dict[str, Any]:
    """sweep.json."""
    made: list[dict[str, str]] = []
    for record in found.records:
        if record.made not in made:
            made.append(record.made)
    return {
        **described,
        "complete": True,
        "programs": len({batch.program for batch in planned.batches}),
        "batches": [len(batch.numbers) for batch in planned.batches],
        "memory": {"limit": limit, "estimate": estimate},
        "settings": found.table(),
        "not_covered": found.not_covered(),
        "troubles": found.troubles(),
        "made_by": made,
        "seconds": round(sum(record.seconds for record in found.records), 3),
        "timing": clock.report(),
    }


def default_folder(spec: Spec) -> Path:
    """sweeps/METHOD-DATA-TIME, made distinct when two start in the same second."""
    base = Path("sweeps") / f"{Path(spec.method).stem}-{spec.data.name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path
