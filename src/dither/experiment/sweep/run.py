"""`sweep`: a grid of specs, trained in batches, each proven and saved as soon as it is finished."""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from dither import data
from dither.errors import BudgetExhausted, SpecError
from dither.experiment import build, train
from dither.experiment.account import NOT_HERE, spent_parts
from dither.experiment.build import choose
from dither.experiment.report import load
from dither.experiment.sweep import batches
from dither.experiment.sweep.batches import BatchPlan, Outcome
from dither.experiment.sweep.result import Sweep, SweepFolder
from dither.experiment.train import check_public
from dither.simulation import devices, distributed
from dither.simulation.devices import Clock
from dither.spec import Spec, parse_setting
from dither.spec.code import register_model
from dither.types import epsilon_text

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")

OnProgress = Callable[[float, float, str], None]  # estimated seconds done, their total, and a short text


# reason: a public function whose options are independent of each other
@distributed.together()
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
    on_progress: OnProgress | None = None,
    model: Any = None,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
) -> Sweep:
    """Train every combination of the varied values on top of a spec, with as few compiled programs as possible.

        result = dither.sweep("adult", {"privacy.epsilon": [0.1, 1.0], "seed": range(5)}, out="sweeps/first")
        result.table()            # one row per setting: accuracy with its standard error, claimed and proven ε
        result[0].metrics         # the evaluations of the first run: the result is a sequence of outcomes

    `what` is the name of a preset, a TOML file, a mapping or a `Spec`, or a list of specs instead of `vary`.
    `values` are set on top of it for all runs. Runs that differ only in seed, noise, rates or clip share a
    program and train in parallel. `max_memory` ("4GB", or bytes) limits the estimated memory of a batch,
    including the records. A single run is always trained, whatever memory it needs.

    With `out`, each finished batch is saved at once, and the same call continues an interrupted sweep to the same
    bits. In the end the folder holds runs.csv, curves.csv, plot.png and sweep.json. `prove=False` omits the proven
    ε; so does a list of specs without `out`, by default.

    On your own records each run is charged to the ledger (the default one, or `ledger`) before it begins, and kept
    as a run folder in `out`/runs; only runs on records that are declared public (data.public) train in parallel.

    With several processes (`simulation.distributed`), each calls this. The specs of process 0 count. Process 0
    alone writes and returns; the others exit when the batches are trained.
    """
    if not distributed.leading():
        _train_only(data_dir)
    clock = Clock()
    if model is not None:
        values = {**(values or {}), "model.name": register_model(model)}
    if not isinstance(what, list | tuple):
        what, values = choose(cast(Any, what), values, data_dir=data_dir).spec, None
    specs, keys, grid = _specs(what, vary, values)
    private = any(spec.private for spec in specs)
    _check_records(specs, dataset, None if out is None else Path(out), private=private)
    limit = batches.parse_bytes(max_memory) if isinstance(max_memory, str) else max_memory
    if limit is not None and not limit > 0:
        raise SpecError(f"max_memory={max_memory!r} must be above 0")
    prove = (vary is not None or out is not None) if prove is None else prove
    description = {**grid, "runs": len(specs), "proven": prove}
    folder = None if out is None else SweepFolder(out)
    if folder is not None:
        _refuse_duplicates(specs)  # runs are saved under the digest of their spec
        folder.claim(description)
    finished = folder.finished(specs) if folder is not None else {}
    progress = on_progress or (lambda done, total, text: None)
    plan, notes = None, []
    if private:
        charge = {"ledger": ledger, "new_ledger": new_ledger}
        runs = finished | _train_charged(specs, finished, cast(SweepFolder, folder), charge, progress)
        notes += _spent_note(specs, cast(SweepFolder, folder), ledger)
    else:
        with clock("start_up"):
            if distributed.count() > 1 and dataset is not None:
                raise SpecError(
                    "dataset= exists in this process only; several processes must load the data themselves"
                )
            shared = {"specs": [spec.to_toml() for spec in specs], "limit": limit, "finished": sorted(finished)}
            plan = _shared_plan(shared, data_dir, dataset)
            files = {(each.spec.data.path, each.spec.data.test_path): each for each in plan.experiments}
            for experiment in files.values():
                check_public(experiment)
        runs = finished | _train(plan, finished, folder, prove, clock, progress)
        if limit is not None and (estimate := _estimated_bytes(plan)) > limit:
            notes.append(f"a single run is estimated at {estimate / 1e6:.0f} MB, above --max-memory")
    in_order = tuple(runs[number] for number in range(len(specs)))
    result = Sweep(tuple(keys), in_order, {}, None if folder is None else folder.path, tuple(notes))
    if folder is not None:
        with clock("plot"):
            folder.save_tables(result)
        memory = {"limit": limit, "estimate": _estimated_bytes(plan) if plan else None}
        folder.save_summary({**description, **_summary(result, plan), "memory": memory, "timing": clock.report()})
    result.timing.update(clock.report())
    return result


def _shared_plan(shared: dict[str, Any], data_dir: str | Path | None, dataset: data.Dataset | None) -> BatchPlan:
    """The batches of a sweep, the same in every process: `shared` is what process 0 tells the others. Each process
    trains as many runs at once as it would alone."""
    devices.set_up()
    if distributed.count() > 1:
        shared |= distributed.broadcast(shared)
    kind = devices.device_kind()
    plan = batches.plan_batches(
        [Spec.from_toml(text, where="a spec of process 0") for text in shared["specs"]],
        data_dir=data_dir,
        dataset=dataset,
        max_runs=lambda each: distributed.count() * batches.runs_at_once(each, kind, shared["limit"]),
    )
    if distributed.count() > 1:
        distributed.assert_equal(fingerprints(plan))
    return plan


def fingerprints(plan: BatchPlan) -> dict[str, str]:
    """What must be the same in all processes that share a sweep, by name."""
    dealt, values = hashlib.sha256(repr([batch.numbers for batch in plan.batches]).encode()), hashlib.sha256()
    problems = {id(experiment.problem.x): experiment.problem for experiment in plan.experiments}
    for problem in problems.values():  # many runs share the same arrays
        dealt.update(np.ascontiguousarray(problem.x).data)
        dealt.update(np.ascontiguousarray(problem.y).data)
    for experiment in plan.experiments:
        dealt.update(experiment.partition.order.tobytes() + experiment.partition.size.tobytes())
        values.update(build.value_digest(experiment).encode())
    return {
        **build.surroundings(plan.experiments[0].spec),
        "the data, or how its runs are batched": dealt.hexdigest()[:16],
        "noise, rates and clips": values.hexdigest()[:12],
    }


def _train_only(data_dir: str | Path | None) -> NoReturn:
    """Any process but 0: train the batches of process 0, then exit."""
    shared: dict[str, Any] = {}
    plan = _shared_plan(shared, data_dir, None)
    with distributed.Interrupt() as interrupt:

        def go_on(*_: object) -> None:
            with distributed.between_rounds():
                interrupt.exchange()

        with distributed.computing():
            batches.train_batches(plan, done=shared["finished"], on_evaluation=go_on, on_batch=go_on)
    distributed.part()
    raise SystemExit


def _train(
    plan: BatchPlan,
    finished: Mapping[int, Outcome],
    folder: SweepFolder | None,
    prove: bool,
    clock: Clock,
    on_progress: OnProgress,
) -> dict[int, Outcome]:
    """Train what is not finished; prove and save each batch."""
    made = {**devices.versions(), "device": devices.device()}
    runs: dict[int, Outcome] = {}
    progress = _progress(plan, finished, on_progress)
    started = time.perf_counter()

    def evaluated(batch: int, round: int) -> None:
        with distributed.between_rounds():
            if interrupt.asked:
                raise KeyboardInterrupt
            progress(batch, round)
            interrupt.exchange()

    def trained(batch: dict[int, Outcome]) -> None:
        nonlocal started
        with distributed.between_rounds():
            seconds = (time.perf_counter() - started) / len(batch)
            with clock("accounting"):
                new = {
                    number: _proven(plan.experiments[number], replace(outcome, seconds=seconds, made=made), prove)
                    for number, outcome in batch.items()
                }
            if folder is not None:
                folder.save_batch(list(new.values()))
            runs.update(new)
            started = time.perf_counter()
            interrupt.exchange()

    with distributed.Interrupt() as interrupt, distributed.computing():
        batches.train_batches(
            plan, done=finished, on_evaluation=evaluated, on_batch=trained, clock=clock, scores=True
        )
    distributed.part()  # the rest needs no other process's devices
    return runs


def _proven(experiment: build.Experiment, outcome: Outcome, prove: bool) -> Outcome:
    """The outcome with its claim for the rounds that were made, and its proven ε."""
    if build.stop_reason(experiment):
        claim = build.claim_after(experiment, build.planned_rounds(experiment))
        outcome = replace(outcome, claim=claim)
    accountant = experiment.accountant() if prove else None
    return outcome if accountant is None else replace(outcome, proven=accountant.row(accountant.proven()))


def _progress(
    plan: BatchPlan, finished: Mapping[int, Outcome], on_progress: OnProgress
) -> Callable[[int, int], None]:
    """A callback for `(batch, round)` that reports the work done, weighted by the estimated time of each batch."""
    kind = devices.device_kind()
    seconds = [
        sum(batches.estimated_seconds(plan.experiments[number].spec, kind) for number in batch.numbers)
        for batch in plan.batches
    ]
    shares = [float(all(number in finished for number in batch.numbers)) for batch in plan.batches]

    def report() -> None:
        done = sum(share * each for share, each in zip(shares, seconds, strict=True))
        runs = sum(len(batch.numbers) for batch, share in zip(plan.batches, shares, strict=True) if share >= 1)
        on_progress(done, sum(seconds), f"{runs}/{len(plan.experiments)} runs")

    def advance(batch: int, round: int) -> None:
        shares[batch] = round / plan.batches[batch].num_rounds
        report()

    report()
    return advance


def _estimated_bytes(plan: BatchPlan) -> float:
    """Memory of the largest batch."""
    kind = devices.device_kind()
    largest = max(plan.batches, key=lambda batch: len(batch.numbers))
    memory = batches.batch_memory(plan.experiments[largest.numbers[0]], kind)
    return memory.shared + len(largest.numbers) * memory.each


def _summary(result: Sweep, plan: BatchPlan | None) -> dict[str, Any]:
    """What sweep.json says about a finished sweep."""
    return {
        "complete": True,
        "programs": len({batch.program for batch in plan.batches}) if plan else None,
        "batches": [len(batch.numbers) for batch in plan.batches] if plan else [1] * len(result),
        "settings": result.table(),
        "not_covered": result.not_covered(),
        "troubles": result.warnings(),
        "made_by": list({repr(run.made): run.made for run in result}.values()),
        "seconds": round(sum(run.seconds for run in result), 3),
    }


# The grid


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each --vary option, `key=value,value` or `key=first:end`, by key. `end` is excluded."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key or not values.strip():
            raise SpecError(f"--vary {text!r} is not of the form key=value,value or key=first:end")
        if key in grid:
            raise SpecError(f"--vary {key} is given twice; put all its values into one, {key}=value,value")
        grid[key] = [value for part in _split(values) for value in _parse_values(key, part.strip())]
    return grid


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[]":
            depth += 1 if letter == "[" else -1
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse_values(key: str, text: str) -> list[Any]:
    if not text:
        raise SpecError(f"--vary {key} has an empty value; remove the extra comma")
    span = _RANGE.fullmatch(text)
    if span is None:
        return [parse_setting(f"{key}={text}")[1]]
    first, end, step = int(span[1]), int(span[2]), int(span[3] or 1)
    values = list(range(first, end, step)) if step else []
    if not values:
        raise SpecError(f"--vary {key}={text} is an empty range; first:end counts from first to end - 1")
    return values


def product(base: Spec, vary: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> list[Spec]:
    """Every combination of the varied values on top of a spec, all checked. The last key varies fastest."""
    base = base.with_values(values)
    if not vary:
        raise SpecError("nothing varies: give at least one --vary key=value,value, or use `dither run`")
    for key, column in vary.items():
        if key in values:
            raise SpecError(f"{key} is both set and varied; leave one out")
        if not len(column):
            raise SpecError(f"{key} has no value to take; give at least one")
    combinations = itertools.product(*vary.values())
    specs = [base.with_values(dict(zip(vary, row, strict=True))) for row in combinations]
    _refuse_duplicates(specs)
    return specs


def _refuse_duplicates(specs: Sequence[Spec]) -> None:
    """The same run twice would count as two runs that agree."""
    first: dict[str, int] = {}
    for number, spec in enumerate(specs):
        other = first.setdefault(spec.digest(), number)
        if other != number:
            raise SpecError(f"runs {other} and {number} of the sweep are the same; give each value once")


def _specs(
    what: Any, vary: Mapping[str, Sequence[Any]] | None, values: Mapping[str, Any] | None
) -> tuple[list[Spec], list[str], dict[str, Any]]:
    """The specs, the keys that vary, and the grid as sweep.json has it."""
    values = values or {}
    if isinstance(what, list | tuple):
        if vary is not None:
            raise SpecError("give a list of specs or the keys to vary, not both")
        specs = [Spec.from_any(each).with_values(values) for each in what]
        if not specs:
            raise SpecError("the list of specs is empty; give at least one")
        return specs, differing(specs), {"specs": [spec.to_dict() for spec in specs]}
    columns = {key: list(column) for key, column in (vary or {}).items()}
    grid = {"spec": what.with_values(values).to_dict(), "vary": columns}
    return product(what, columns, values), list(columns), grid


def differing(specs: Sequence[Spec]) -> list[str]:
    """The keys in which specs differ, in the order of a spec."""
    flat = [spec.flat() for spec in specs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [key for key in keys if any(values.get(key) != flat[0].get(key) for values in flat[1:])]


# Sweeps over private records: each run is charged to the ledger before it begins, and no two train side by side.
# What a run's folder keeps local stays there: the sweep's tables hold only what its runs release.


def _check_records(
    specs: Sequence[Spec], dataset: data.Dataset | None, folder: Path | None, *, private: bool
) -> None:
    """`SpecError` if runs could not be compared; or if runs on private records could not be kept or charged."""
    path = specs[0].data.title
    if not all(spec.scored for spec in specs):
        raise SpecError(
            f"the runs of a sweep are compared on test records, but those of {path!r} are private; give public "
            "ones (data.test_path and data.test_public = true)"
        )
    loaded = dataset is not None and (dataset.record_hashes is not None or dataset.sources)
    other = dataset is not None and not loaded and dataset.name not in data.entries()  # made by hand
    if other or (loaded and not all(spec.data.public for spec in specs)):
        raise SpecError(
            "dataset= holds your own records, which no ledger would be charged for; name their file in data.path, "
            "or declare them public (data.public = true)"
        )
    if private and distributed.count() > 1:
        raise SpecError(f"{path!r} holds private records, whose runs {distributed.count()} processes cannot share")
    if private and folder is None:
        raise SpecError(f"{path!r} holds private records: give out=FOLDER, where each charged run is kept")


def _spent_note(specs: Sequence[Spec], folder: SweepFolder, ledger: str | Path | None) -> list[str]:
    """What the runs come to together: the table has the ε of each by itself."""
    reports = {report.ledger: report for report in (load(_place(folder, spec)) for spec in specs) if report.ledger}
    splits = [spent_parts(report, ledger) for report in reports.values()]
    parts = [split[-1] for split in splits if split]
    if len(parts) < len(splits) or any(NOT_HERE in part.not_covered for part in parts):
        return [f"the ε of the {len(specs)} runs adds up: the ledger that was charged is not here to say to what"]
    if not parts:
        return []
    most, about = max(parts, key=lambda part: part.epsilon), "the same records: all that was charged for these"
    if len(reports) > 1:
        about = f"{len(reports)} data sets: all that was charged for the one that spent most"
    return [
        f"the {len(specs)} runs are about {about} comes to ε = {epsilon_text(most.epsilon, digits=4)} at "
        f"δ = {most.delta:.4g} ({most.terms})",
        *(f"of that ε not covered: {gap}" for gap in most.not_covered),
    ]


def _place(folder: SweepFolder, spec: Spec) -> Path:
    """The folder of one charged run."""
    return folder.path / "runs" / spec.digest()[:16]


def _train_charged(
    specs: Sequence[Spec],
    finished: Mapping[int, Outcome],
    folder: SweepFolder,
    charge: Mapping[str, Any],
    on_progress: OnProgress,
) -> dict[int, Outcome]:
    """Train what is not finished, one run after the other, and keep each. An interrupted run is resumed. `charge`
    holds the keywords of `train.run` that name the ledger."""
    devices.set_up()
    made = {**devices.versions(), "device": devices.device()}
    runs: dict[int, Outcome] = {}
    for number, spec in enumerate(specs):
        if number in finished:
            continue
        done = f"{len(finished) + len(runs)}/{len(specs)} runs"
        on_progress(len(finished) + len(runs), len(specs), done)
        place, started = _place(folder, spec), time.perf_counter()
        begun = (place / "spec.toml").is_file()
        report = train.run(spec, out=None if begun else place, resume=place if begun else None, **charge)
        if report.stopped:
            raise BudgetExhausted(f"{report.stopped}; {done} are finished in {str(folder.path)!r}")
        rows = [dict(row) for row in report.evaluations]
        rows[-1] |= {} if report.scores is None else report.scores.beside_evaluations()
        runs[number] = Outcome(
            spec,
            rows,
            report.epsilon.claimed,
            np.zeros(0, np.int64),
            proven=report.epsilon.proven(),
            seconds=time.perf_counter() - started,
            made=made,
        )
        folder.save_batch([runs[number]])
    return runs
