"""Training one spec: rounds, checkpoints, budget, and what a run folder holds in the end."""

from __future__ import annotations

import html
import itertools
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from dither.accounting import ClientRange, ProvenRow
from dither.accounting.ledger.book import SEED
from dither.accounting.ledger.runs import JointSpending, Ledger, Spending, client_name, data_id, rounds_in
from dither.accounting.ledger.sketch import Overlap, overlap
from dither.data import Dataset, RecordHashes, check_unchanged, hash_records
from dither.data.hashing import hash_arrays
from dither.errors import BudgetExhausted, ClientRefused, DitherError, RunExists, SpecError
from dither.experiment import build, plots
from dither.experiment.build import Compiled, Experiment, build_experiment, choose
from dither.experiment.folder import Checkpoint, RunFolder, lock, to_json, write_text
from dither.experiment.metrics import Labelled, diverged_model, judge_run
from dither.experiment.report import DiskReads, Epsilon, LedgerCharge, Report, RunTraffic, encode, load
from dither.models import leaf_name
from dither.simulation import distributed, engine
from dither.simulation.arrays import Shards
from dither.simulation.devices import Clock
from dither.simulation.streaming import Streamed
from dither.spec import Spec, model_file
from dither.spec.code import file_content, register_model
from dither.types import Params, __version__

CHECKPOINT_SECONDS = 5.0
_WAYS = {"no": "in memory", "yes": "streamed from the disk"}  # data.stream, and how provenance.json says it


class RunOptions(NamedTuple):
    """The keywords of `run`: where a run is written, what it is charged to, and its callbacks."""

    out: str | Path | None = None
    resume: str | Path | None = None
    data_dir: str | Path | None = None
    ledger: str | Path | None = None
    new_ledger: bool = False
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    on_start: Callable[[Experiment, Path, int], None] | None = None
    on_evaluation: Callable[[dict[str, Any]], None] | None = None
    records: Any = None
    keep_programs: bool = False
    note: str = ""  # for the report


# reason: the library's main entry point; every parameter but the spec is a keyword with a default
def run(
    spec: Spec | str | Path | Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    data_dir: str | Path | None = None,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_start: Callable[[Experiment, Path, int], None] | None = None,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    model: Any = None,
    data: Any = None,
    keep_programs: bool = False,
) -> Report:
    """Train a spec (a preset's name, a TOML file, a mapping or a `Spec`) and leave a run folder.

    `values` are dotted keys that are set on top of the spec. `model` is your own model instead of model.name: a
    `dither.Model`, an Equinox, Flax or PyTorch module, or a function that returns one.

    `data` are records instead of data.path: a pandas DataFrame, a list or mapping of them (one for each
    institution), or arrays (X, y) or (X, y, groups). If your own records come without a method, Dither chooses
    whatever is not given (`defaults.defaults_for`).

    `resume` continues an interrupted folder. The outcome is bit for bit that of an uninterrupted run on the same
    device and versions. A resumed run keeps its number of devices, and its records stay where they were (in
    memory or on disk), whatever memory is free now.

    Your own data is always charged to a ledger (the default one, or `ledger`); the catalogue's sets only if
    `ledger` is given. Records that another ledger of yours knows are refused unless `new_ledger` is set. If a
    budget ends the run early, `Report.stopped` says so.

    `keep_programs` stores the compiled rounds for the next process with the same spec, records and code, which
    then starts faster; `dither run` does this. Leave it off in a process that replaces functions of Dither.

    With several processes (`simulation.distributed`), each calls this. The spec of process 0 counts. Process 0
    alone writes and returns; the others exit when the rounds are done.
    """
    if on_start is None and on_evaluation is None and in_notebook():
        bar = NotebookProgress()
        on_start, on_evaluation = bar.start, bar.update
    place = (out, resume, data_dir, ledger, new_ledger)
    options = RunOptions(*place, checkpoint_seconds, on_start, on_evaluation, data, keep_programs)
    if model is not None:
        name = register_model(model, "" if resume is None else RunFolder.open(resume).spec().model.name)
        values = {**(values or {}), "model.name": name}
    with distributed.together():
        return _run(spec, values, options)


def _run(
    spec: Spec | str | Path | Mapping[str, Any], values: Mapping[str, Any] | None, options: RunOptions
) -> Report:
    clock, dataset = Clock(), None
    if distributed.leading():
        spec, dataset, note = choose(spec, values, records=options.records, data_dir=options.data_dir)
        options = options._replace(note=note)
        path, shared = _place(spec, options.out, options.resume)
        distributed.broadcast(shared)
    else:
        shared, path = distributed.broadcast({}), Path()
        spec = Spec.from_toml(shared["spec"], where="process 0's spec")
    if shared["complete"]:
        distributed.part()
        return load(path)
    with clock("start_up"):
        begun: dict[str, Any] = shared["begun"]
        kept = next((stream for stream, way in _WAYS.items() if way == begun.get("records")), "")
        if dataset is None and options.records is not None:
            dataset = build.load_data(spec, records=options.records)
        experiment = build_experiment(spec, data_dir=options.data_dir, dataset=dataset, stream=kept)
        shards = build.check(experiment, begun)  # before there is a folder
        if begun.get("model_digest", "") != experiment.model_digest and begun:
            raise RunExists(
                f"{str(path)!r} was begun with another model than {spec.model.name!r} is now; restore the model, "
                "or start a new run"
            )
        if distributed.count() > 1:
            distributed.assert_equal(build.facts(experiment))
    if not distributed.leading():
        return train(experiment, None, shards, None, clock, options)
    with clock("start_up"):
        if options.resume is None:
            files = model_source(spec)
            if (schema := experiment.dataset.schema) is not None:  # what was read from the records stays local
                files["schema.toml" if experiment.dataset.covered else "local/schema.toml"] = schema.to_toml()
            origin = {**provenance(experiment), "devices": shards.devices}
            folder = RunFolder.create(path, spec, origin, files)
            local = {"data_digest": experiment.data_digest}
            write_text(folder.path / "local" / "provenance.json", to_json(local, indent=2))
        else:
            folder = RunFolder.open(options.resume)
    handle = lock(folder.path / "spec.toml")
    if handle is None:  # what each of two had begun, the other's report would not count
        raise RunExists(f"another process is continuing {str(folder.path)!r}; wait until it ends")
    with handle:
        try:
            with clock("ledger"):
                account = spending(experiment, folder, options.ledger, new_ledger=options.new_ledger)
        except DitherError:
            if options.resume is None:
                folder.discard()
            raise
        return train(experiment, folder, shards, account, clock, options)


def _place(spec: Spec, out: str | Path | None, resume: str | Path | None) -> tuple[Path, dict[str, Any]]:
    """The folder, and what process 0 tells the others of it and of the spec."""
    shared = {"spec": spec.to_toml(), "begun": {}, "complete": False}
    if resume is None:
        path = Path(out) if out is not None else free_path("runs", spec)
        RunFolder(path).refuse_taken()  # before any data is loaded
        return path, shared
    folder = RunFolder.open(resume)
    _check_spec(folder, spec)
    finished = Report.read(resume)
    complete = finished is not None and not finished.stopped
    if not complete:
        folder.resumable_state()
    return folder.path, {**shared, "begun": folder.provenance(), "complete": complete}


def spending(
    experiment: Experiment, folder: RunFolder, ledger: str | Path | None, *, new_ledger: bool = False
) -> Spending | JointSpending | None:
    """The run's account in a ledger, or None for a set of the catalogue without one."""
    spec = experiment.spec
    check_public(experiment)
    if ledger is None and not spec.private:
        return None
    if experiment.plan.assumed:
        raise SpecError(
            "the releases of this run rest on an assumption (method_options.sensitivity='paper'), which no ledger "
            "can charge; use 'clip', or a catalogue data set without --ledger"
        )
    # The run folder keeps an anchor: a ledger that is rolled back later no longer agrees with it.
    anchor = folder.path / "local" / "ledger-anchor.json"
    book = Ledger(ledger or Ledger.default_path(), anchor=anchor)
    datasets = _identified(experiment, book, new_ledger=new_ledger)
    if spec.private:
        _check_test_records(experiment)  # again: the run's own training records are known by now
    held_out = _held_out(experiment, book)
    for dataset, rows, (path, known) in zip(datasets, held_out, _files(experiment), strict=True):
        if spec.scored and rows:
            book.check_public(dataset, rows)
            if known is not None:  # what another ledger was charged for, this one cannot say
                build.refuse_charged(f"the test part of {path}", known=book.elsewhere(known))

    def digest(text: str) -> str:
        return book.fingerprint(np.frombuffer(text.encode(), np.uint8))

    # The run's name in the ledger holds all that determines what it releases: a folder whose spec, seed, records
    # or surroundings were changed is another run, which pays for itself. Of seeded runs it also says which share
    # their noise.
    seeded = spec.source_of_randomness == "seeded"
    name = f"{folder.run_id()}-{digest(build.origin(experiment, folder.provenance()))}"
    name += f"{SEED}{digest(str(spec.seed))}" * seeded
    # If a run may continue without some clients, no client's noise is relied on in a sum.
    missing = experiment.plan.cohort_size - 1 if spec.federation.refused == "continue" else None
    accountant = experiment.accountant(missing)
    names = [client_name(spec.data.column or "groups", name) for name in experiment.partition.names or ()]
    one_client_each = build.by_file(spec, experiment.dataset)
    accounts = [
        Spending(
            book,
            accountant,
            run=name,
            dataset=dataset,
            clients=names if spec.data.partition == "column" else None,
            client=number if one_client_each else None,
            replay=seeded,
            held_out=held_out[number],
            public=spec.scored and bool(held_out[number]),
        )
        for number, dataset in enumerate(datasets)
    ]
    return accounts[0] if len(accounts) == 1 else JointSpending(accounts)


def check_public(experiment: Experiment) -> None:
    """`SpecError` if records that are declared public, for training or for scores, were charged before."""
    _check_test_records(experiment)
    for path, rows in _files(experiment) if experiment.spec.data.public else ():
        build.refuse_charged(path, rows)


def _files(experiment: Experiment) -> list[tuple[str, RecordHashes | None]]:
    """The files of the records, and the hashes of these."""
    if not experiment.dataset.sources:
        return [(experiment.spec.data.path, experiment.dataset.record_hashes)]
    return [(str(each.path), each.record_hashes) for each in experiment.dataset.sources]


def _check_test_records(experiment: Experiment) -> None:
    """`SpecError` if test records that are declared public are known to a ledger, or are training records of the
    same run, which no ledger may know yet."""
    spec, dataset = experiment.spec.data, experiment.dataset
    what, tested, trained = repr(spec.test_path or spec.path), dataset.test_hashes, _files(experiment)
    if not experiment.spec.scored:
        return
    if tested is not None:
        build.refuse_charged(spec.test_path or spec.path, tested)
    elif _has_test_arrays(dataset):
        what, tested = f"x_test of {what}", hash_arrays(dataset.x_test, dataset.y_test)
        trained = [("the training records", hash_arrays(dataset.x_train, dataset.y_train))]
    if tested is None or not experiment.spec.private:
        return
    for name, rows in trained:
        shared = Overlap(0.0) if rows is None else overlap(tested, rows)
        if shared.share > 0.5 or shared.people:  # a few may be equal by chance
            raise SpecError(
                f"{what} is declared public, but it and {Path(name).name}, which this run trains on as private, "
                f"share {shared}; hold other records out"
            )


def _has_test_arrays(dataset: Dataset) -> bool:
    """Whether a file of arrays says which of its records are held out: those that come last."""
    known, held_out = dataset.record_hashes, dataset.test_rows
    if known is None or held_out is None or not len(dataset.y_test) or dataset.streamed:
        return False
    return np.array_equal(held_out, np.arange(known.whole.shape[1])[-len(held_out) :])


def _identified(experiment: Experiment, book: Ledger, *, new_ledger: bool) -> list[str]:
    """The ledger's ids of the records: one for each file, after saying which records it holds."""
    spec, dataset = experiment.spec, experiment.dataset
    if dataset.sources:
        ids = [data_id(book, path=str(source.path), digest=source.digest) for source in dataset.sources]
        for source in dataset.sources:
            if source.content:
                check_unchanged(source.path, source.content)
        for each, source in zip(ids, dataset.sources, strict=True):
            rows = partial(attrgetter("record_hashes"), source)
            name = f"{spec.data.id}/{source.name}" if spec.data.id else ""
            book.identify(each, rows, file=source.path.name, name=name, new_ledger=new_ledger)
        return ids
    # What was read is charged, not what lies there by now.
    only = data_id(book, path=spec.data.path, name=spec.data.name, digest=dataset.ledger_digest)
    if dataset.content:
        check_unchanged(spec.data.path, dataset.content)
    if spec.data.path:
        read = dataset.record_hashes
        book.identify(
            only,
            lambda: hash_records(spec.data.path) if read is None else read,
            file=spec.data.title,
            name=spec.data.id,
            new_ledger=new_ledger,
        )
    return [only]


def _held_out(experiment: Experiment, book: Ledger) -> list[str]:
    """A name of the records in each file that are held out of training; empty if none is. Of records, not of row
    numbers: another order, or another part of the file, has other records in the same rows."""
    dataset, problem = experiment.dataset, experiment.problem
    scored = problem.test_rows[0]

    def name(hashes: RecordHashes | None, rows: np.ndarray | None) -> str:
        if hashes is None or rows is None or not len(rows):
            return ""
        return book.fingerprint(np.sort(hashes.whole[0, rows]))

    if experiment.spec.data.split not in ("given", "rows"):  # the clients hold theirs out, of the pooled records
        encoded = list(Labelled(problem.x, problem.y, scored, "").pieces())
        hashes = hash_arrays(np.concatenate(encoded), problem.y[scored]) if encoded else None
        return [name(hashes, np.arange(len(scored)))] * max(len(dataset.sources), 1)
    files = [name(each.record_hashes, each.test_rows) for each in dataset.sources]
    return files or [name(dataset.record_hashes, dataset.test_rows)]


def resume(path: str | Path, **arguments: Any) -> Report:
    """Continue an interrupted run folder with its own spec."""
    return run(RunFolder.open(path).spec(), resume=path, **arguments)


class _Outcome(NamedTuple):
    """The outcome of the rounds, fetched from the devices of all processes."""

    rounds: int
    stopped: str  # why there are fewer than asked for; empty where all were made
    params: Params
    refused: np.ndarray  # updates of each client that were left out
    participation: np.ndarray
    clamped: int  # coordinates: exact, and so local
    traffic: RunTraffic
    sharing_note: str


def train(
    experiment: Experiment,
    folder: RunFolder | None,
    shards: Shards,
    account: Spending | JointSpending | None,
    clock: Clock,
    options: RunOptions,
) -> Report:
    """Train from the newest checkpoint (or from the start) to the end; then write model, summary and plot.

    Process 0 has the folder. Any other process (folder None) computes the same rounds and exits after them.
    """
    recorder = _Recorder(experiment, folder, account, clock, options) if folder is not None else None
    with clock("start_up"):
        program = build.compiled(experiment, keep_programs=options.keep_programs, shards=shards)
        state, done = program.simulation.start(program.inputs), 0
    if recorder is not None:
        state, done = recorder.restored(state)
    done = int(distributed.broadcast({"done": done})["done"])
    if done and not shards.alone:  # the others get it too, and it lies where the rounds take it
        with distributed.computing():
            leaves, structure = jax.tree.flatten(state)
            leaves = distributed.broadcast_arrays([distributed.fetched(leaf) for leaf in leaves])
            state = program.simulation.shards.place(jax.tree.unflatten(structure, leaves), ())[0]
    if recorder is not None:
        plots.preload()
    outcome = _train_rounds(experiment, program, state, done, recorder, clock)
    # The rest is process 0's alone, and may take long: nothing below may need another's devices.
    distributed.part(BudgetExhausted.exit_code if outcome.stopped else 0)
    return _finish(cast(_Recorder, recorder), program, outcome)


def _train_rounds(
    experiment: Experiment,
    program: Compiled,
    state: engine.State,
    done: int,
    recorder: _Recorder | None,
    clock: Clock,
) -> _Outcome:
    """The rounds from `done` on, as many as the budget and Ctrl-C allow, each stretch evaluated and recorded."""
    simulation, rounds, inputs = program
    stopped = ""
    reading = closing(rounds) if isinstance(rounds, Streamed) else nullcontext()
    with reading, distributed.Interrupt() as interrupt:
        for start, end in engine.chunks(done, build.planned_rounds(experiment), experiment.spec.eval_every):
            stop, stopped = recorder.charge(start, end) if recorder else (end, "")
            shared = interrupt.exchange(stop=stop, stopped=stopped)
            stop, stopped = shared["stop"], shared["stopped"]
            if stop == start:
                break
            with distributed.computing():
                with clock("rounds"):
                    state = jax.block_until_ready(rounds.advance(state, inputs, start, stop))
                with clock("evaluation"):
                    scores = {name: float(value[0]) for name, value in rounds.evaluate(state, inputs).items()}
                    state = engine.reset_metrics(state)
            if recorder:
                recorder.record(stop, state, scores, interrupt, last=stop < end)
            done = stop
            if stop < end:
                break
    with distributed.computing():
        params = jax.tree.map(lambda leaf: np.asarray(leaf)[0], simulation.params(state, inputs))
    completed = experiment.first_rounds(done)
    participation = np.asarray(state.participation)[0]
    planned = np.bincount(np.concatenate(completed.cohorts or [[]]).astype(int), minlength=len(participation))
    if not np.array_equal(participation, planned):  # ε is proved for the cohorts of the plan
        raise DitherError("other clients took part than the plan says: a bug; trust no ε of this run")
    return _Outcome(
        rounds=done,
        stopped=stopped or build.stop_reason(experiment),
        params=params,
        refused=np.asarray(state.refused)[0],
        participation=participation,
        clamped=int(np.asarray(state.clamped)[0]) if simulation.aggregation is not None else 0,
        traffic=traffic(completed, simulation, state, simulation.sizes(state, inputs)),
        sharing_note=build.sharing_note(completed),
    )


def _finish(recorder: _Recorder, program: Compiled, outcome: _Outcome) -> Report:
    """Write the model, the report and the plot."""
    folder, clock, spec = recorder.folder, recorder.clock, recorder.spec
    experiment = recorder.experiment.first_rounds(outcome.rounds)
    folder.save_model({**experiment.model.frozen, **named_leaves(outcome.params)})
    report = _account_for(recorder, outcome)
    found: dict[str, Any] = {}
    if spec.compare and not spec.data.path:
        simulation, rounds, _ = program
        with clock("without_noise"):
            reusable = simulation if rounds is simulation and simulation.shards.devices == 1 else None
            name = "test_r2" if report.task == "regression" else "test_accuracy"
            found[f"{name}_without_noise"] = without_noise(experiment, reusable)
    rows = folder.metrics()
    with clock("scores"):
        judged, local_judged = _judged(experiment, outcome.params, folder)
    report = replace(report, **found, **judged)
    if spec.scored:
        with clock("plot"):
            plots.draw_run(report, rows, folder.path / "plot.png")
    if isinstance(program.rounds, Streamed):
        report = replace(report, streamed=DiskReads(**program.rounds.report()))
    report = replace(report, timing=clock.report())  # of this process: what a resumed run did before is not in it
    train_loss = (folder.local_metrics() or rows)[-1]["train_loss"]
    local = {"train_loss": train_loss, "clamped": outcome.clamped, **local_judged}
    if experiment.dataset.label_bounds is not None:  # which may have been read from the records
        local["label_bounds"] = list(experiment.dataset.label_bounds)
    report.save(local)
    return report


def _judged(experiment: Experiment, params: Params, folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scores and advice for the report, on public test records; where there are none, whether the released model
    diverged. And those for local/summary.json, on the clients' records, where test records are not public."""
    public = experiment.spec.scored
    diverged = None if public else diverged_model(experiment, params)
    if diverged is not None:  # it needs no other advice
        return {"advice": (diverged,)}, {}
    rows = folder.metrics() if public else folder.local_metrics()
    judgement = judge_run(experiment, params, rows, local=not public)
    found = {} if judgement is None else judgement._asdict()
    return (found, {}) if public else ({}, encode(found))


def _account_for(recorder: _Recorder, outcome: _Outcome) -> Report:
    """The report of the rounds that were made: scores, proven ε, traffic, and notes on what went wrong."""
    folder, spec, seen = recorder.folder, recorder.spec, outcome.traffic
    experiment = recorder.experiment.first_rounds(outcome.rounds)
    # Also what was undone and never made again; and what only the ledger remembers, if the folder is an old copy.
    begun, account = folder.begun(), recorder.account
    if account is not None:
        begun = max(begun, account.stretches(), key=rounds_in)
    released = recorder.experiment.realised(begun) if recorder.fresh else experiment
    repeated, missing = len(released.cohorts) - len(experiment.cohorts), seen.most_missing
    if repeated:  # how undone rounds ended is unknown
        missing = max(missing, build.tolerated(spec))
    with recorder.clock("accounting"):
        report = report_of(released, folder, folder.metrics(), outcome.participation, missing)
    names, notes = experiment.partition.names, []
    left_out = {names[i]: int(outcome.refused[i]) for i in np.flatnonzero(outcome.refused)}
    if repeated:
        notes.append(
            f"{repeated} rounds were undone when the run was interrupted, and repeated rounds have fresh noise: "
            "the proven ε counts all of them"
        )
    if seen.lost:
        notes.append(
            f"{seen.lost} uploads were lost, at most {missing} in a round; the proven ε of sums takes no credit "
            "for the noise of missing clients"
        )
    if seen.void_rounds:
        notes.append(f"{seen.void_rounds} of {report.rounds} rounds had too few clients and are void")
    if left_out:
        notes.append(f"updates that were not finite were left out: {left_out}")
    notes += filter(None, (recorder.options.note, outcome.sharing_note))
    epsilon = replace(report.epsilon, table=_clamp_noted(report.epsilon.table, seen.bound, spec))
    if outcome.stopped:
        epsilon = replace(epsilon, claimed=build.claim_after(experiment, report.rounds))
    return replace(
        report,
        notes=(*report.notes, *notes),
        repeated_rounds=repeated,
        traffic=replace(seen, rounding=build.rounding(released, missing)),
        epsilon=epsilon,
        refused=left_out,
        stopped=outcome.stopped,
        ledger=None if account is None else LedgerCharge(str(account.ledger.path), account.dataset),
    )


def _clamp_noted(table: tuple[ProvenRow, ...], bound: float | None, spec: Spec) -> tuple[ProvenRow, ...]:
    """The table, where it takes credit for rounded sums with what clamping means for that."""
    if bound is None or spec.secagg.noise == "discrete":
        return table
    # How many were is exact, and so stays local.
    limit = (
        f"coordinates beyond {bound:g} are clamped before the sum: the credit holds only if none was "
        "clamped (local/summary.json)"
    )
    return tuple(
        replace(row, not_covered=(*row.not_covered, limit)) if any("G8" in t for t in row.not_covered) else row
        for row in table
    )


class _Recorder:
    """What process 0 does between compiled rounds: it charges them, and writes metrics and checkpoints."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        account: Spending | JointSpending | None,
        clock: Clock,
        options: RunOptions,
    ) -> None:
        self.experiment, self.spec, self.folder, self.account = experiment, experiment.spec, folder, account
        self.clock, self.options = clock, options
        self.num_rounds = build.planned_rounds(experiment)
        self.fresh = self.spec.source_of_randomness == "os"  # a round made again is another release
        self.began = self.saved = time.perf_counter()
        self.seconds_before = 0.0

    def restored(self, state: engine.State) -> tuple[engine.State, int]:
        """The state of the newest checkpoint and its round, or the given state and 0."""
        folder, done = self.folder, 0
        checkpoint = folder.load_checkpoint()
        folder.clear_leftovers()
        if self.fresh and self.spec.batch_sampling == "shuffled" and folder.begun():
            raise RunExists(
                f"{str(folder.path)!r} cannot be resumed: its shuffled epochs came from randomness='os', which is "
                "never stored, and a new order could use a record twice in one epoch; start a new run"
            )
        if checkpoint is not None:
            _check_spec(folder, self.spec, checkpoint.spec_digest)
            digest = self.experiment.data_digest
            if checkpoint.data_digest != digest:
                raise RunExists(
                    f"the checkpoint in {str(folder.path)!r} was made with other data "
                    f"({checkpoint.data_digest[:12]}, now {digest[:12]}); restore the data, or start a new run"
                )
            state, done = restore(state, checkpoint.leaves), checkpoint.round
        made = [] if self.account is None or not self.fresh else self.account.stretches()
        if rounds_in(made) > rounds_in(folder.begun()):
            folder.remember_begun(made)
        folder.drop_metrics_after(done)
        rows = folder.metrics()
        self.seconds_before = float(rows[-1]["seconds"]) if rows else 0.0
        folder.begin(done, done)  # an earlier outcome no longer holds
        if self.options.on_start:
            self.options.on_start(self.experiment, folder.path, done)
        return state, done

    def charge(self, start: int, end: int) -> tuple[int, str]:
        """The last round that the budget allows, and the reason if that is before `end`. The rounds up to there
        are charged."""
        stop = end
        if self.account is not None:
            try:
                with self.clock("ledger"):
                    stop = self.account.pay(start, end)
            except BudgetExhausted as refusal:
                if start == 0:
                    self.folder.discard()
                    raise
                return start, str(refusal)
        if self.fresh:
            self.folder.begin(start, stop)
        return stop, f"the privacy budget ends after round {stop} of {self.num_rounds}" if stop < end else ""

    def record(
        self,
        stop: int,
        state: engine.State,
        scores: dict[str, float],
        interrupt: distributed.Interrupt,
        *,
        last: bool,
    ) -> None:
        """Append the metrics; write a checkpoint at the end, at an interruption and now and then."""
        refused = np.flatnonzero(np.asarray(state.refused)[0])
        if len(refused) and self.spec.federation.refused == "abort":
            names = ", ".join(map(str, refused[:5])) + (", ..." if len(refused) > 5 else "")
            raise ClientRefused(
                f"client {names} sent an update that is not finite by round {stop}; lower client_lr "
                "or the noise, or check that client's records"
            )
        now, asked = time.perf_counter(), interrupt.asked  # read once: no end without its checkpoint
        released, local = split_scores(scores, self.spec)
        row = {"round": stop, **released, "seconds": round(self.seconds_before + now - self.began, 3)}
        self.folder.append_metrics(row, {"round": stop, **local})
        if stop == self.num_rounds or last or asked or now - self.saved >= self.options.checkpoint_seconds:
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
            self.folder.save_checkpoint(Checkpoint(stop, leaves, self.spec.digest(), self.experiment.data_digest))
            self.saved = time.perf_counter()
        if self.options.on_evaluation:
            self.options.on_evaluation({**row, "local": local})
        if asked and stop < self.num_rounds:
            raise KeyboardInterrupt


def without_noise(experiment: Experiment, compiled_rounds: engine.Simulation | None = None) -> float:
    """Test accuracy (or R²) of the same run with its noise set to 0: what the noise costs. `compiled_rounds` are
    those of the run itself, used again if only the noise differs."""
    prepared, spec = experiment.prepared, experiment.spec
    hyper = {
        name: (np.zeros_like(np.asarray(value)) if name in prepared.plan.noise_names else np.asarray(value))[None]
        for name, value in prepared.hyper.items()
    }
    simulation, how = compiled_rounds, build.aggregation(experiment)
    if simulation is None or spec.source_of_randomness != "seeded" or how is not None:
        how = how and how._replace(noise_std=None)
        simulation = build.make_simulation(experiment, randomness="seeded", aggregation=how)
    inputs = simulation.inputs(
        experiment.problem, seeds=[spec.seed], hyper=hyper, cohorts=build.designs([experiment])
    )
    rounds = build.planned_rounds(experiment)
    result = engine.train(simulation, inputs, num_rounds=rounds, eval_every=rounds)
    last = result.history[-1].metrics
    return float(last["test_r2" if experiment.model.task == "regression" else "test_accuracy"][0])


# Pieces


def report_of(
    experiment: Experiment,
    folder: RunFolder,
    rows: list[dict[str, Any]],
    participation: np.ndarray,
    missing: int = 0,
) -> Report:
    """The report on the completed rounds, with at most `missing` clients absent from any sum."""
    last, spec = rows[-1], experiment.spec
    counts = np.sort(participation)
    return Report(
        folder=folder.path,
        spec=spec,
        evaluations=tuple(rows),
        method=spec.method,
        data=spec.data.path.replace("\n", ", ") or spec.data.name,
        test_accuracy=last.get("test_accuracy"),
        test_r2=last.get("test_r2"),
        loss=last["loss"],
        rounds=last["round"],
        seconds=last["seconds"],
        epsilon=Epsilon.of(
            spec,
            experiment.prepared.claim,
            experiment.accountant(missing).table(),
            clients=build.client_epsilons(experiment, missing),
        ),
        why=experiment.method.why,
        participation=ClientRange(int(counts[0]), float(np.median(counts)), int(counts[-1])),
        randomness=spec.source_of_randomness,
        notes=(*experiment.dataset.notes, *experiment.prepared.caveats, *_caveats(spec)),
        num_clients=len(experiment.partition.size),
        num_features=int(experiment.dataset.x_train.shape[1]),
        num_params=experiment.num_params,
        image_shape=tuple(experiment.dataset.image_shape),
        classes=tuple(experiment.dataset.classes),
    )


def traffic(
    experiment: Experiment, simulation: engine.Simulation, state: engine.State, sizes: tuple[int, int]
) -> RunTraffic:
    """What an average client sends and receives in a round, and how many uploads were lost."""
    message, upload = sizes
    how = simulation.aggregation
    sent: float = 4 * upload
    received: float = 0
    protocol: dict[str, Any] = {}
    if how is not None and how.mode == "real" and simulation.aggregators:
        (aggregator,) = simulation.aggregators
        protocol = {**aggregator.traffic.report(), "enrol_seconds": aggregator.enrol_seconds}
        sent, received = protocol.pop("upload_bytes"), protocol.pop("download_bytes")
    elif how is not None:
        from dither.secagg.messages import round_bytes  # needs cryptography, which a plain run does not

        sent, received = round_bytes(
            upload, experiment.spec.cohort_size, modulus_bits=how.how.modulus_bits, colluders=how.rules.colluders
        )
    return RunTraffic(
        aggregation=experiment.spec.aggregation,
        upload_bytes=sent,
        download_bytes=received + 4 * message,
        lost=int(np.asarray(state.lost).sum()),
        most_missing=int(np.asarray(state.missing)[0]),
        void_rounds=int(np.asarray(state.void)[0]),
        bound=None if how is None else how.how.bound,
        **protocol,
    )


UNSCORED = (
    "test records are held out but not scored: if yours are public, say so with data.test_public=true, or train "
    "on all records with data.test_fraction=0; `dither evaluate` scores a file for you alone"
)


def split_scores(scores: Mapping[str, float], spec: Spec) -> tuple[dict[str, Any], dict[str, float]]:
    """What an evaluation found: scores on public test records, and what is exact about others and stays local."""
    public = ("test_accuracy", "test_r2", "loss")
    released = {name: scores[name] if spec.scored else None for name in public if name in scores}
    return released, {name: value for name, value in scores.items() if name not in public}


def model_source(spec: Spec) -> dict[str, str]:
    """model.py, a copy of the file of your own model: the run's model still loads if that file changes."""
    named = model_file(spec.model.name)
    return {"model.py": file_content(named[0]).decode("utf-8")} if named else {}


def _caveats(spec: Spec) -> list[str]:
    """What a reader of the report should know about the spec."""
    caveats = [] if spec.scored else [UNSCORED]
    if spec.data.public:
        caveats.append("data.public: you declared these records public, so nothing was charged to a ledger")
    if spec.private and spec.source_of_randomness == "seeded":
        caveats.append(
            "seeded noise: a simulation, not a protection; anyone who knows the seed, or sees another run with "
            "it, can subtract the noise"
        )
    if spec.data.path and spec.compare:
        caveats.append("compare is for public data: nothing was trained without noise on your records")
    return caveats


def provenance(experiment: Experiment) -> dict[str, Any]:
    """Where a run was computed: enough to repeat it."""
    device = jax.devices()[0]
    return {
        "dither": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        **({"processes": distributed.count()} if distributed.count() > 1 else {}),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "records": _WAYS["yes" if experiment.dataset.streamed else "no"],
        "spec_digest": experiment.spec.digest(),
        "randomness": experiment.spec.source_of_randomness,
        **({"model_digest": experiment.model_digest} if experiment.model_digest else {}),
    }


def free_path(parent: str, spec: Spec) -> Path:
    """PARENT/METHOD-DATA-TIME, with a number appended if two start in the same second."""
    stem = Path(spec.data.title).stem.replace(" ", "-").strip("*")
    base = Path(parent) / f"{Path(spec.method).stem}-{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not path.exists())


def named_leaves(params: Params) -> dict[str, np.ndarray]:
    """Leaves by the path in the tree: 'dense0/w'."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(params)
    return {leaf_name(where): np.asarray(leaf) for where, leaf in pairs}


def restore(like: engine.State, leaves: list[np.ndarray]) -> engine.State:
    """A state like the given one, from the leaves of a checkpoint."""
    expected, structure = jax.tree.flatten(like)
    if [leaf.shape for leaf in expected] != [leaf.shape for leaf in leaves]:
        raise RunExists("the checkpoint's arrays do not have the shapes of this spec; start a new run")
    arrays = [jax.numpy.asarray(saved, leaf.dtype) for saved, leaf in zip(leaves, expected, strict=True)]
    restored: engine.State = jax.tree.unflatten(structure, arrays)
    return restored


def _check_spec(folder: RunFolder, spec: Spec, digest: str = "") -> None:
    digest = digest or folder.spec().digest()
    if digest != spec.digest():
        raise RunExists(
            f"the checkpoint in {str(folder.path)!r} is from another spec ({digest[:12]}, this one is "
            f"{spec.digest()[:12]}); resume with the folder's own spec.toml unchanged, or start a new run"
        )


# Progress of a run in a notebook: a bar that updates in place.


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookProgress:
    """The callbacks of `run` that draw the bar."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._total = 0

    def start(self, experiment: Experiment, folder: Path, done: int) -> None:
        from IPython.display import HTML, display

        self._total = build.planned_rounds(experiment)
        self._handle = display(HTML(self._bar(done, "")), display_id=True)

    def update(self, row: dict[str, Any]) -> None:
        from IPython.display import HTML

        score = next((name for name in ("test_accuracy", "test_r2") if row.get(name) is not None), None)
        text = "" if score is None else f"{score.replace('_', ' ')} {row[score]:.4f}"
        self._handle.update(HTML(self._bar(row["round"], text)))

    def _bar(self, done: int, text: str) -> str:
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        return f"{bar} round {done}/{self._total} {html.escape(text)}"
