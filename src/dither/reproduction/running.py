"""`reproduce`: figures by name, computed in batches, judged, drawn and reported."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from math import isinf
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

from dither import data
from dither.errors import DataError, DitherError
from dither.experiment import build
from dither.experiment.folder import to_json, write_bytes, write_text
from dither.experiment.report import Overview
from dither.experiment.sweep import Outcome, batches
from dither.reproduction import drawing, report
from dither.reproduction.cache import Accounts, Cache
from dither.reproduction.figure import (
    DEPLOYED,
    PRINTED,
    PROVEN,
    VIEW_TITLES,
    Change,
    Criterion,
    Figure,
    FinishedRun,
    MissingRun,
    View,
    load,
    select,
)
from dither.reproduction.judging import (
    INCONCLUSIVE,
    LOOKS,
    NOT_COMPUTED,
    NOT_JUDGED,
    JudgedCriterion,
    Robustness,
    Verdict,
    counted,
)
from dither.reproduction.report import FigureResult
from dither.simulation import devices
from dither.spec import Spec
from dither.types import ADVERSARIES, epsilon_text

_DIGITS = 7  # training is in float32
PICTURES = ("png", "svg", "pdf")  # for a screen, to be edited, to be printed

# What a caller hears: estimated seconds of work done, of how many, and the figure under way.
OnProgress = Callable[[float, float, str], None]


@dataclass(frozen=True, repr=False)
class Reproduction(Overview):
    """What `reproduce` returns: the figures with their verdicts, and where the report lies."""

    scale: str
    figures: tuple[FigureResult, ...]
    provenance: dict[str, Any]  # command, time, versions; "made" in report.json
    report: Path | None

    @property
    def claims(self) -> list[JudgedCriterion]:
        """Every verdict, in the papers' order."""
        return [claim for figure in self.figures for claim in figure.claims]

    def title(self) -> str:
        """What it is."""
        return f"reproduction at scale {self.scale}"

    def overview(self) -> list[tuple[str, str]]:
        """One line a criterion: its name, and its verdict in each view."""
        return [(f"{figure.id} {claim.name}", claim.text) for figure in self.figures for claim in figure.claims]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as report.json has them."""
        return {
            "scale": self.scale,
            "made": self.provenance,
            "figures": [figure.to_dict() for figure in self.figures],
        }


# reason: a public function whose keyword-only options mirror those of `dither reproduce`
def reproduce(
    what: str | Sequence[str] = "all",
    *,
    scale: str = "quick",
    out: str | Path | None = None,
    cache: str | Path | None = None,
    data_dir: str | Path | None = None,
    only_compute: bool = False,
    robust: str = "",
    minutes: float = 0.0,
    jobs: int = 1,
    command: str = "",
    on_progress: OnProgress | None = None,
    on_figure: Callable[[FigureResult], None] | None = None,
) -> Reproduction:
    """Compute, judge and draw figures: "all", a paper ("nbafl"), or one ("nbafl/fig2").

    `out` is the folder for pictures, CSVs and report.html; without it nothing is drawn. Finished runs are kept in
    `cache` (default: the platform's cache folder). `only_compute` fills the cache and stops: draw the report from
    the same folder later, on any machine. `robust` is the scale at which each finding is judged with open settings
    changed too. After `minutes` no further batch of runs is started: the same call continues. With `jobs` above 1
    that many processes share the figures, proofs and pictures included.
    """
    began, chosen = time.perf_counter(), select(what)
    folder = Path(out) if out and not only_compute else None
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    task = _Task(scale, robust, Cache(cache).folder, data_dir, folder, only_compute, deadline)
    names = [figure.id for figure in chosen]
    if jobs > 1 and len(names) > 1:
        parts = _in_processes(task, chosen, min(jobs, len(names)), on_progress, on_figure)
    else:
        parts = [_reproduced(task, names, on_progress, on_figure)]
    refused = {name: why for part in parts for name, why in part.refused.items()}
    wanted = {key: seconds for part in parts for key, seconds in part.wanted.items()}
    provenance = {
        "command": command,
        "when": datetime.now().astimezone().isoformat(timespec="seconds"),
        "computed": sum(part.computed for part in parts),
        "missing": sum(seconds is None for seconds in wanted.values()),
        "runs": len(wanted),
        "seconds": round(sum(seconds or 0.0 for seconds in wanted.values()), 1),
        "elapsed": round(time.perf_counter() - began, 1),
        "versions": devices.versions(),
    }
    if only_compute and refused:
        raise DataError("; ".join(refused.values()))
    by_id = {figure.id: figure for part in parts for figure in part.figures}
    figures = tuple(by_id[name] for name in names if name in by_id)
    result = Reproduction(scale, figures, provenance, folder / "report.html" if folder else None)
    if folder is not None:
        write_text(folder / "report.html", report.page(result, folder))
        write_text(folder / "report.json", to_json(result.to_dict(), indent=1))
    return result


class _Task(NamedTuple):
    """What is to be done with each figure."""

    scale: str
    robust: str
    cache: Path
    data_dir: str | Path | None
    folder: Path | None  # for pictures
    only_compute: bool
    deadline: float


class _Part(NamedTuple):
    """What came of some of the figures."""

    figures: tuple[FigureResult, ...]
    computed: int
    refused: dict[str, str]  # data sets that are not available, and why
    wanted: dict[str, float | None]  # seconds of each run by its key; None: not computed


def _reproduced(
    task: _Task,
    names: Sequence[str],
    on_progress: OnProgress | None = None,
    on_figure: Callable[[FigureResult], None] | None = None,
) -> _Part:
    """Compute figures; judge and draw them."""
    runs = Cache(task.cache)
    accounts, chosen = Accounts(runs, task.data_dir), [load(name) for name in names]
    work = Work.of_figures(chosen, task.scale, task.robust, runs, None if task.only_compute else accounts)
    refused, computed = work.compute(data_dir=task.data_dir, on_progress=on_progress, deadline=task.deadline)
    figures = []
    for figure in chosen if not task.only_compute else ():
        views = figure.views(task.scale, runs, accounts)
        robust_verdicts = judge_changed(figure, task.robust, runs, accounts) if task.robust else {}
        judged = _judged_figure(figure, views, refused, robust_verdicts)
        if task.folder is not None and not judged.refused:
            complete = [_widest(view) for view in views if all(key in runs for key in view.shown())]
            judged = replace(judged, files=draw_figure(figure, complete, task.folder))
        figures.append(judged)
        if on_figure:
            on_figure(judged)
    wanted = {point.key: runs[point.key].seconds if point.key in runs else None for point in work.points()}
    return _Part(tuple(figures), computed, refused, wanted)


def _in_processes(
    task: _Task,
    chosen: Sequence[Figure],
    jobs: int,
    on_progress: OnProgress | None,
    on_figure: Callable[[FigureResult], None] | None,
) -> list[_Part]:
    """Figures shared out among processes, the longest first. A run that two figures need may be computed twice."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share a GPU's memory
    seconds = dict.fromkeys((figure.id for figure in chosen), 1.0)
    for point in points(chosen, task.scale):
        seconds[point.figure] += batches.estimated_seconds(point.spec, "cpu")
    parts: list[_Part] = []
    others = set(active_children())
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        longest_first = sorted(seconds, key=lambda name: -seconds[name])
        futures = {pool.submit(_reproduced, task, [name]): name for name in longest_first}
        done = 0.0
        for future in as_completed(futures):
            parts.append(future.result())
            done += seconds[futures[future]]
            if on_progress:
                on_progress(done, sum(seconds.values()), futures[future])
            for figure in parts[-1].figures:
                if on_figure:
                    on_figure(figure)
    except BrokenProcessPool:
        raise DitherError(
            f"one of {jobs} processes died, perhaps for lack of memory; finished runs are kept: try fewer --jobs"
        ) from None
    except BaseException:  # Ctrl-C too
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return parts


def estimates(
    what: str | Sequence[str], scale: str, cache: str | Path | None = None, robust: str = ""
) -> list[str]:
    """How many runs each figure still needs, and about how long they take: a sentence for each figure."""
    runs, kind = Cache(cache), devices.device_kind()
    missing: dict[str, list[float]] = {}
    for point in Work.of_figures(select(what), scale, robust, runs, None).points():
        if point.key not in runs:
            missing.setdefault(point.figure, []).append(batches.estimated_seconds(point.spec, kind))
    return [
        f"{figure}: {len(seconds)} runs to compute, about {sum(seconds):.0f} s and compilation"
        for figure, seconds in missing.items()
    ]


# The runs


class Point(NamedTuple):
    """One run to compute, and the figure that first asks for it."""

    key: str
    spec: Spec
    gradient_norm: bool
    figure: str


def points(figures: Iterable[Figure], scale: str, runs: Mapping[str, FinishedRun] | None = None) -> list[Point]:
    """Every run that figures need at a scale, each once; of a line that is not tuned yet, those that tune it."""
    views = [view for figure in figures for view in figure.views(scale, {} if runs is None else runs)]
    return _unique((view.figure, view.needed()) for view in views)


def _unique(needs: Iterable[tuple[Figure, Mapping[str, Spec]]]) -> list[Point]:
    by_key: dict[str, Point] = {}
    for figure, specs in needs:
        for key, spec in specs.items():
            by_key.setdefault(key, Point(key, spec, figure.gradient_norm, figure.id))
    return list(by_key.values())


class Work:
    """What is to be computed: the runs that views show, and those that decide criteria."""

    def __init__(
        self, runs: Cache, judged: Sequence[tuple[View, Sequence[Criterion]]], shown: Sequence[View] = ()
    ) -> None:
        self.runs, self._judged, self._shown = runs, judged, shown

    @classmethod
    def of_figures(
        cls, figures: Sequence[Figure], scale: str, robust: str, runs: Cache, accounts: Accounts | None
    ) -> Work:
        """Figures at a scale, and their findings with open settings changed at another."""
        shown = [view for figure in figures for view in figure.views(scale, runs, accounts)]
        judged = [(view, judged_in(view)) for view in shown]
        for figure in figures if robust else ():
            judged += [(view, judged_criteria(figure)) for _, view in changed_views(figure, robust, runs)]
        return cls(runs, judged, shown)

    def points(self) -> list[Point]:
        """Every run that is known to be needed so far: first those of all figures, then more seeds."""
        needs = [(view.figure, view.needed()) for view in self._shown]
        needs += [(view.figure, each.needs(view)) for view, criteria in self._judged for each in criteria]
        for view, criteria in self._judged:
            for criterion in criteria:
                more: dict[str, Spec] = {}
                with suppress(MissingRun, DataError):
                    settled(criterion, view, more)
                needs.append((view.figure, more))
        return _unique(needs)

    def compute(
        self, *, data_dir: str | Path | None, on_progress: OnProgress | None, deadline: float
    ) -> tuple[dict[str, str], int]:
        """Compute what is missing, then what follows from it: tuned lines, more seeds. Returns the data sets that
        are not available, and the number of runs computed."""
        refused: dict[str, str] = {}
        tried: set[str] = set()
        with suppress(_OutOfTime):
            while missing := [p for p in self.points() if p.key not in self.runs and p.key not in tried]:
                tried |= {point.key for point in missing}
                refused |= compute(
                    missing, self.runs, data_dir=data_dir, on_progress=on_progress, deadline=deadline
                )
        return refused, sum(key in self.runs for key in tried)


def settled(criterion: Criterion, view: View, more: dict[str, Spec] | None = None) -> Verdict:
    """The verdict with as many seeds as decide it, up to the scale's `max_seeds`. The runs of the further looks
    that were taken, and of one that is still to be taken, are put into `more`."""
    verdict = criterion.verdict(view)
    for wider in _wider(view):
        if verdict.status != INCONCLUSIVE:
            break
        needed = criterion.needs(wider)
        if more is not None:
            more |= needed
        if not all(key in view.runs for key in needed):
            break
        verdict = criterion.verdict(wider)
    return verdict


def _wider(view: View) -> list[View]:
    """The view with more seeds, for each further look at an undecided criterion."""
    return [view.like(more_seeds=s) for s in LOOKS if len(view.seeds) < s <= view.scale.max_seeds]


class _OutOfTime(Exception):
    """The time for computing is over; what was finished is kept."""


def compute(
    wanted: Sequence[Point],
    cache: Cache,
    *,
    data_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
    deadline: float = float("inf"),
) -> dict[str, str]:
    """Compute runs, program by program, and keep each batch as it is done, until the deadline.

    Returns the data sets that are not available, by name, and why: their runs are left out."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in wanted:
        # What is loaded does not depend on these.
        records = replace(point.spec.data, partition="iid", similarity=0.0)
        groups.setdefault((records, batches.program(point.spec), point.gradient_norm), []).append(point)
    kind = devices.device_kind()
    total, done = sum(batches.estimated_seconds(point.spec, kind) for point in wanted), 0.0

    def advance(rounds: int, of: int, *, before: float, share: float, figure: str) -> None:
        if on_progress:
            on_progress(before + share * rounds / max(of, 1), total, figure)

    refused: dict[str, str] = {}
    loaded: tuple[Any, data.Dataset] | None = None
    for (records, _, gradient_norm), members in groups.items():
        if records.name in refused:
            continue
        if time.time() > deadline:
            raise _OutOfTime
        if loaded is None or loaded[0] != records:
            loaded = None  # one data set in memory at a time
            try:
                loaded = (records, build.load_data(members[0].spec, data_dir=data_dir))
            except DataError as error:
                refused[records.name] = f"{records.name} is not available here: {error}"
                continue
        share = sum(batches.estimated_seconds(member.spec, kind) for member in members)
        on_evaluation = partial(advance, before=done, share=share, figure=members[0].figure)
        on_evaluation(0, 1)
        batches.train_specs(
            [member.spec for member in members],
            dataset=loaded[1],
            on_evaluation=on_evaluation,
            on_batch=_keeper(members, cache, deadline),
            max_runs=lambda experiment: batches.runs_at_once(experiment, kind),
            gradient_norm=gradient_norm,
            from_start=True,
        )
        done += share
    return refused


def _keeper(members: Sequence[Point], cache: Cache, deadline: float) -> Callable[[dict[int, Outcome]], None]:
    """Keeps each batch of a program as it is done, with its share of the time."""
    since = time.time()

    def keep(batch: dict[int, Outcome]) -> None:
        nonlocal since
        now = time.time()
        for number, outcome in batch.items():
            cache.put(members[number].key, _finished(outcome, (now - since) / len(batch)))
        since = now
        if now > deadline:
            raise _OutOfTime

    return keep


def _finished(outcome: Outcome, seconds: float) -> FinishedRun:
    columns = {
        name: [float(f"{row[name]:.{_DIGITS}g}") for row in outcome.metrics]
        for name in outcome.metrics[0]
        if name != "clipped"
    }
    return FinishedRun(columns, outcome.claim.to_json(), round(seconds, 3), devices.device(), devices.versions())


# The figures


def _judged_figure(
    figure: Figure,
    views: Sequence[View],
    refused: dict[str, str],
    robust: Mapping[str, Robustness],
) -> FigureResult:
    """One figure, judged; not judged where its data are not available."""
    printed, why = views[0], ""
    behind = {key: spec for view in views for key, spec in view.needed().items()}
    try:
        claims = [_judged(criterion, views, behind, robust) for criterion in figure.criteria]
        tables = figure.tables(printed) if figure.tables else ()
        epsilons = [row for view in views if not _left_out([view]) for row in _epsilons(view)]
    except (MissingRun, DataError) as error:
        why = refused.get(printed.base.data.name, str(error))
        claims = [_claim(criterion, {PRINTED: Verdict(NOT_JUDGED, why)}) for criterion in figure.criteria]
        tables, epsilons = (), []
    runs = [printed.runs[key] for key in behind if key in printed.runs]  # may be shared with other figures
    return FigureResult(
        id=figure.id,
        paper=figure.paper,
        number=figure.number,
        title=figure.title,
        shows=figure.shows,
        data=printed.base.data.name if printed.seeds else "",
        scale=printed.scale_name,
        seeds=len(printed.seeds),
        reduced=(*printed.reductions(), *_left_out(views)),
        settings=_settings(printed.base) if printed.seeds else "",
        proven_note=figure.proven_note,
        notes=tuple(figure.notes),
        open=tuple(setting.row() for setting in figure.open),
        refused=why,
        tables=tuple(tables),
        epsilons=tuple(epsilons),
        runs=len(runs),
        seconds=round(sum(run.seconds for run in runs), 1),
        devices=dict(Counter(run.device for run in runs)),
        versions=tuple(sorted({f"dither {r.versions['dither']}, jax {r.versions['jax']}" for r in runs})),
        claims=tuple(claims),
    )


def _left_out(views: Sequence[View]) -> list[str]:
    """How much of each view is not computed."""
    missing = {view.kind: sum(key not in view.runs for key in view.shown()) for view in views}
    return [f"{number} runs not computed {VIEW_TITLES[kind]}" for kind, number in missing.items() if number]


def _widest(view: View) -> View:
    """The view with as many seeds as all its lines have: undecided criteria have asked for more."""
    complete = [wider for wider in _wider(view) if all(key in wider.runs for key in wider.shown())]
    return complete[-1] if complete else view


def draw_figure(figure: Figure, views: Sequence[View], folder: Path) -> tuple[str, ...]:
    """Write a picture for each view, in three formats, and the numbers of all; returns the files' names."""
    stem = figure.id.replace("/", "-")
    for view in views:
        canvas = drawing.draw(figure, view)
        for kind in PICTURES:
            write_bytes(folder / f"{stem}-{view.kind}.{kind}", drawing.encoded(canvas, kind))
            canvas.set_layout_engine("none")  # the others in the layout of the first
    write_text(folder / f"{stem}.csv", drawing.to_csv(figure, views))
    pictures = [f"{stem}-{view.kind}.{kind}" for kind in PICTURES for view in views]
    return (*pictures, f"{stem}.csv")


def _judged(
    criterion: Criterion, views: Sequence[View], behind: dict[str, Spec], robust: Mapping[str, Robustness]
) -> JudgedCriterion:
    """The verdict in each view whose runs are there; as printed they must be. Further seeds go into `behind`."""
    verdicts = {}
    for view in views:
        if criterion not in judged_in(view):
            continue
        try:
            verdicts[view.kind] = settled(criterion, view, behind)
        except MissingRun:
            if view is views[0]:
                raise
    return _claim(criterion, verdicts, None if criterion.variant else robust.get(criterion.id))


def _claim(
    criterion: Criterion, verdicts: Mapping[str, Verdict], robustness: Robustness | None = None
) -> JudgedCriterion:
    said = (criterion.id, criterion.variant, criterion.text, tuple(criterion.errata), criterion.why)
    return JudgedCriterion(
        *said, verdicts[PRINTED], verdicts.get(DEPLOYED), verdicts.get(PROVEN), robustness=robustness
    )


def _settings(base: Spec) -> str:
    """The figure's base in one line."""
    drawn = f"batches of {base.batch_size} ({base.batch_sampling})"
    if base.batch_sampling == "full":
        drawn = "full batches"
    elif base.method_options.get("exact_epochs"):
        drawn = f"batches that make a round one epoch ({base.batch_sampling})"
    parts = [
        f"{base.method} on {base.data.name}",
        f"{base.num_clients} clients, {base.cohort_size} a round",
        f"{base.num_rounds} rounds of {counted(base.local_steps, 'local step')}",
        drawn,
        f"learning rate {base.client_lr:g}",
        f"δ = {base.privacy.delta:g}",
    ]
    if base.privacy.clip != "none":
        parts.append(f"clip {base.privacy.clip_norm:g} ({base.privacy.clip})")
    return "; ".join(parts) + "; except for what the lines vary"


def _epsilons(view: View) -> list[dict[str, str]]:
    """Claimed and proven ε of each setting (first seed)."""
    rows = []
    for name, values in view.settings() if view.seeds else ():
        spec, claim = view.spec(values, view.seeds[0]), view.run(values, view.seeds[0]).claim
        if isinf(float(claim["value"])):  # "inf" where the cache was read
            continue
        proven = f"{epsilon_text(view.accounts.proven_epsilon(spec))} per run"
        if spec.privacy.unit == "message":
            proven += f", {epsilon_text(view.accounts.proven_epsilon(spec, 'message'))} per message"
        claimed = f"{epsilon_text(claim['value'], 'nearest')} per {claim['unit']}"
        row = {"view": VIEW_TITLES[view.kind], "setting": name, "claimed": claimed, "proven": proven}
        rows.append({**row, "against": ADVERSARIES[spec.privacy.view]})
    return rows


# Does a finding depend on what the paper leaves open? It is judged at the reference and with one open setting
# changed at a time, or two that interact.

REFERENCE = Change("reference", (), {})


def changed_views(
    figure: Figure, scale: str, runs: Mapping[str, FinishedRun], accounts: Accounts | None = None
) -> Iterator[tuple[Change, View]]:
    """The figure as printed, at the reference and with each change."""
    for change in [REFERENCE, *figure.changes()]:
        yield change, View(figure, scale, runs, accounts, changed=change.values)


def judged_in(view: View) -> Sequence[Criterion]:
    """The criteria that make sense in a view."""
    return [criterion for criterion in view.figure.criteria if criterion.proven or not view.proven]


def judged_criteria(figure: Figure) -> Sequence[Criterion]:
    """The criteria as the paper states them, where a setting that it leaves open enters."""
    return [criterion for criterion in figure.criteria if not (criterion.variant or criterion.closed)]


def judge_changed(
    figure: Figure, scale: str, runs: Mapping[str, FinishedRun], accounts: Accounts
) -> dict[str, Robustness]:
    """Each criterion of the figure in every setting, by its id."""
    rows: dict[str, list[dict[str, Any]]] = {criterion.id: [] for criterion in figure.criteria}
    for change, view in changed_views(figure, scale, runs, accounts):
        for criterion in judged_criteria(figure):
            rows[criterion.id].append(changed_row(criterion, change, view))
    return {name: Robustness(scale, tuple(verdicts)) for name, verdicts in rows.items()}


def changed_row(criterion: Criterion, change: Change, view: View) -> dict[str, Any]:
    """The verdict in one setting, and how many seeds it rests on."""
    try:
        verdict = settled(criterion, view)
    except (MissingRun, DataError):
        verdict = Verdict(NOT_COMPUTED, "")
    said = {"setting": change.label, "changes": ", ".join(change.settings), "verdict": verdict.status}
    return {**said, "seeds": verdict.seeds, **({"beyond": True} if change.beyond else {})}
