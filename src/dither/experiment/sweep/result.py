"""The result of a sweep: its runs, tables and curves, the folder that holds them, and the picture.

sweep.json    spec, grid, versions, device, timing; complete: true once everything is there
batches/      one file per finished batch, written whole: a kill loses only the batch under way
runs.csv      one row per run               curves.csv    every evaluation, in long form
plot.png      accuracy against rounds, and against the first varied number
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from dither.errors import RunExists
from dither.experiment import plots
from dither.experiment.folder import read_checked, to_json, write_bytes, write_checked, write_text
from dither.experiment.report import Overview, decode
from dither.experiment.sweep.batches import Outcome
from dither.spec import Spec
from dither.types import ADVERSARIES, epsilon_text

_SCORES = {"test_accuracy": "test accuracy", "test_r2": "test R²"}  # the score of a task, and how it is written
_FINAL = ("auc", "average_precision", "f1", "log_loss", "brier", "rmse", "mae")  # of the final model
_METRICS = (*_SCORES, "loss", "train_loss", *_FINAL)

Setting = tuple[dict[str, Any], list[Outcome]]  # the varied values without the seed, and the runs that share them


@dataclass(frozen=True, repr=False)
class Sweep(Overview, Sequence[Outcome]):
    """The outcomes of a sweep, in the order of its specs."""

    keys: tuple[str, ...]  # the varied keys
    runs: tuple[Outcome, ...]
    timing: dict[str, float]  # seconds of this call, by what they were spent on
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, index: int) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, index: int | slice) -> Outcome | Sequence[Outcome]:
        return self.runs[index]

    @property
    def score(self) -> str:
        """The metric that says how good a model is: "test_accuracy", or "test_r2" of a regression."""
        return next(name for name in _SCORES if name in self[0].metrics[-1])

    @property
    def score_name(self) -> str:
        return _SCORES[self.score]

    def title(self) -> str:
        methods = dict.fromkeys(Path(run.spec.method).stem for run in self)
        sets = dict.fromkeys(run.spec.data.title for run in self)
        return f"{', '.join(methods)} on {', '.join(sets)}: {len(self)} runs"

    def overview(self) -> list[tuple[str, str]]:
        """One line per setting: accuracy, claimed and proven ε."""
        lines, name = [], self.score_name.removeprefix("test ")
        for row in self.table():
            setting = ", ".join(f"{key}={row[key]}" for key in self.keys if key in row)
            error = "" if row[f"{self.score}_error"] is None else f" ± {row[f'{self.score}_error']:.4f}"
            proven = f", proven ε {epsilon_text(row['proven_epsilon'])}" if "proven_epsilon" in row else ""
            claimed = f"claimed ε {epsilon_text(row['claimed_epsilon'], 'nearest')} per {row['claimed_unit']}"
            lines.append((setting or "all runs", f"{name} {row[self.score]:.4f}{error}, {claimed}{proven}"))
        return lines

    def varied(self, run: Outcome) -> dict[str, Any]:
        """The varied keys of a run, with their values."""
        flat = run.spec.flat()
        return {key: flat.get(key, "") for key in self.keys}

    def rows(self) -> list[dict[str, Any]]:
        """One row per run: runs.csv."""
        rows = []
        for number, run in enumerate(self):
            last, claim, proven = run.metrics[-1], run.claim, run.proven
            row = {"run": number, **_csv_values(self.varied(run)), "rounds": last["round"]}
            row |= {name: last[name] for name in _METRICS if name in last}
            row |= {"claimed_epsilon": claim.value, "claimed_unit": claim.unit, "claimed_delta": claim.delta}
            if proven is not None:
                row |= {"proven_epsilon": proven.value, "proven_unit": proven.unit, "proven_delta": proven.delta}
                row |= {"proven_view": proven.view, "proven_adjacency": proven.adjacency}
                row |= {"proven_recipe": proven.recipe, "proven_assumed": str(proven.assumed).lower()}
            rows.append({**row, **run.seen, "seconds": round(run.seconds, 3)})
        return rows

    def curves(self) -> list[dict[str, Any]]:
        """One row per run, evaluation and metric: curves.csv."""
        return [
            {"run": number, **varied, "round": row["round"], "metric": name, "value": value}
            for number, run in enumerate(self)
            for varied in [_csv_values(self.varied(run))]
            for row in run.metrics
            for name, value in row.items()
            if name not in ("round", "trivial", *_FINAL)
        ]

    def settings(self) -> list[Setting]:
        """The varied values without the seed, and the runs that share them."""
        groups: dict[str, Setting] = {}
        for run in self:
            setting = {key: value for key, value in self.varied(run).items() if key != "seed"}
            groups.setdefault(repr(setting), (setting, []))[1].append(run)
        return list(groups.values())

    def table(self) -> list[dict[str, Any]]:
        """One row per setting: mean and standard error over its seeds, and the largest claimed and proven ε."""
        rows = []
        for setting, runs in self.settings():
            row: dict[str, Any] = {**setting, "runs": len(runs)}
            last = [run.metrics[-1] for run in runs]
            for name in (self.score, "loss", *_FINAL):
                if all(name in entry for entry in last):
                    row[name], row[f"{name}_error"] = mean_and_error([entry[name] for entry in last])
            claim = max((run.claim for run in runs), key=lambda claim: claim.value)
            row |= {"claimed_epsilon": claim.value, "claimed_unit": claim.unit}
            if proven := [run.proven for run in runs if run.proven]:
                worst = max(proven, key=lambda each: each.value)
                row |= {"proven_epsilon": worst.value, "proven_unit": worst.unit, "assumed": worst.assumed}
            rows.append(row)
        return rows

    def not_covered(self) -> list[str]:
        """What the proofs of any run leave out."""
        return list(dict.fromkeys(text for run in self if run.proven for text in run.proven.not_covered))

    def warnings(self) -> list[str]:
        """What a reader of the table should know about its runs."""
        events = {
            "refused": "client updates were not finite and were left out",
            "void_rounds": "rounds had too few clients and are void",
            "clamped": "coordinates were clamped before a sum (secagg.bound)",
        }
        lines = list(self.notes)
        for name, text in events.items():
            counts = [run.seen.get(name, 0) for run in self]
            if any(counts):
                lines.append(f"{sum(counts)} {text}, in {sum(map(bool, counts))} of {len(counts)} runs")
        return lines


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for a single value."""
    array = np.asarray(values, float)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else None
    return float(array.mean()), error


def _csv_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values as CSV holds them: lists as text."""
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}


# The folder

# Keys of sweep.json before it had a checksum.
_OLD_KEYS = (
    *("spec", "specs", "vary", "runs", "proven", "complete", "programs", "batches", "memory", "settings"),
    *("not_covered", "troubles", "made_by", "seconds", "timing"),
)


class SweepFolder:
    """Reads and writes the files of one sweep."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def claim(self, description: Mapping[str, Any]) -> None:
        """Create the folder, or check that it holds the same sweep."""
        existing = self.summary()
        plain = json.loads(to_json(description))
        if existing is not None:
            other = next((key for key in plain if existing.get(key) != plain[key]), None)
            if other is not None:
                raise RunExists(
                    f"{str(self.path)!r} holds a sweep with another {other}; give another --out, or continue it "
                    "with the command that started it"
                )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunExists(f"{str(self.path)!r} already exists and is not a sweep; give another --out")
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        if existing is None:
            self.save_summary({**description, "complete": False})

    def summary(self) -> dict[str, Any] | None:
        """sweep.json, or None."""
        path = self.path / "sweep.json"
        if not path.is_file():
            return None
        return read_checked(path, "give another --out: finished runs of this one are in batches/", old=_OLD_KEYS)

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write sweep.json."""
        write_checked(self.path / "sweep.json", json.loads(to_json(summary)))

    def save_batch(self, batch: Sequence[Outcome]) -> None:
        """Save a finished batch."""
        plain = ({**vars(run), "claim": run.claim._asdict()} for run in batch)
        runs = [{"digest": run.pop("spec").digest(), **run} for run in plain]
        name = hashlib.sha256("".join(run["digest"] for run in runs).encode()).hexdigest()[:24]
        # mtime=0: the same batch is the same file
        write_bytes(self.path / "batches" / f"{name}.json.gz", gzip.compress(to_json(runs).encode(), mtime=0))

    def finished(self, specs: Sequence[Spec]) -> dict[int, Outcome]:
        """The finished runs among the specs, by position. A damaged file counts as missing."""
        wanted = {spec.digest(): (number, spec) for number, spec in enumerate(specs)}
        finished: dict[int, Outcome] = {}
        for path in sorted(self.path.glob("batches/*.json.gz")):
            try:
                runs = json.loads(gzip.decompress(path.read_bytes()))
                batch = [(*wanted[run["digest"]], run) for run in runs if run["digest"] in wanted]
                finished |= {
                    number: decode(Outcome, run, {"spec": spec, "participation": np.asarray(run["participation"])})
                    for number, spec, run in batch
                }
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                continue
        return finished

    def save_tables(self, sweep: Sweep) -> None:
        """Write runs.csv, curves.csv and plot.png."""
        for name, rows in {"runs.csv": sweep.rows(), "curves.csv": sweep.curves()}.items():
            text = io.StringIO()
            columns = dict.fromkeys(key for row in rows for key in row)
            writer = csv.DictWriter(text, list(columns), lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(rows)
            write_text(self.path / name, text.getvalue())
        draw_sweep(sweep, self.path / "plot.png")


# The picture

# When the colours are used up, the dashes change.
_COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, "#CC79A7", plots.ORANGE, "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*"
_MOST_LINES = len(_COLOURS) * len(_DASHES)
_MOST_BANDS = 8  # with more settings the bands of their spread would cover each other
_LEGEND_ROWS = 24


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Accuracy against rounds, one line per setting; final accuracy against the first varied number."""
    settings = sweep.settings()
    lines = settings[:_MOST_LINES]
    height = max(4.0, 0.24 * min(len(lines), _LEGEND_ROWS) + 1.2)
    figure, axes = plots.new_figure(1, 2, width=11.0, height=height)
    curves, finals = axes[0]
    handles = [_draw_curve(curves, sweep, setting, at, len(lines)) for at, setting in enumerate(lines)]
    curves.set_xlabel("communication round")
    curves.set_ylabel(sweep.score_name)
    seeds = max(len(runs) for _, runs in settings)
    caption = f"mean of {seeds} seeds" if seeds > 1 else "one seed each"
    if seeds > 1 and len(lines) <= _MOST_BANDS:
        caption += ", band: ± standard error"
    if len(settings) > len(lines):
        caption += f"; {len(settings) - len(lines)} more settings in curves.csv"
    _caption(curves, caption)
    _draw_finals(finals, sweep, lines)
    shown = [row[sweep.score] for _, runs in lines for run in runs for row in run.metrics]
    trivial = {round(run.metrics[-1].get("trivial", math.nan), 6) for run in sweep}
    references = {"trivial predictor": trivial.pop()} if len(trivial) == 1 else {}  # one for each data set
    for axis in (curves, finals):
        plots.score_axis(axis, shown, references)
    plots.headline(figure, sweep.title(), _privacy(sweep))
    if any(values for values, _ in lines):
        figure.legend(
            handles=handles, loc="outside right upper", frameon=False, fontsize=8, title=_names(sweep.keys),
            title_fontsize=8, ncols=1 + (len(handles) - 1) // _LEGEND_ROWS,
        )  # fmt: skip
    plots.save(figure, path)


def _privacy(sweep: Sweep) -> str:
    """The smallest and largest proven ε of the settings."""
    rows = [run.proven for run in sweep if run.proven is not None]
    if not rows:
        return "no proven ε"
    bounded = [row.value for row in rows if math.isfinite(row.value)]
    values = bounded or [math.inf]
    ends = dict.fromkeys(epsilon_text(value) for value in (min(values), max(values)))
    guarantees = {f"δ = {row.delta:g}, {row.adjacency}, against {ADVERSARIES[row.view]}" for row in rows}
    held_for = (
        f" ({guarantees.pop()})" if len(guarantees) == 1 else ", each setting by its own δ, view and neighbours"
    )
    beside = ", beside runs without a bound (ε = ∞)" * (0 < len(bounded) < len(rows))
    return f"proven ε = {' to '.join(ends)} per run{held_for}{beside}"


def _draw_curve(axis: Any, sweep: Sweep, setting: Setting, at: int, lines: int) -> Any:
    values, runs = setting
    rounds = [row["round"] for row in runs[0].metrics]
    alike = [run.metrics for run in runs if [row["round"] for row in run.metrics] == rounds]
    accuracy = np.array([[row[sweep.score] for row in rows] for rows in alike])
    mean, colour = accuracy.mean(axis=0), _colour(at)
    dashes = _DASHES[at // len(_COLOURS) % len(_DASHES)]
    (line,) = axis.plot(rounds, mean, label=_label(values), linewidth=1.6, color=colour, linestyle=dashes)
    if len(rounds) == 1:
        line.set_marker("o")
    if lines <= _MOST_BANDS and len(alike) > 1:
        spread, alpha = accuracy.std(axis=0, ddof=1) / np.sqrt(len(alike)), 0.15 if lines <= 4 else 0.07
        axis.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=alpha, linewidth=0)
    return line


def _draw_finals(axis: Any, sweep: Sweep, lines: list[Setting]) -> None:
    """Final accuracy against the first varied number, one line for each setting of the other keys."""
    axis.set_ylabel(f"final {sweep.score_name}")
    noisy = [values for values, _ in lines if not math.isinf(values.get("privacy.epsilon", 0.0))]
    key = next((key for key in sweep.keys if key != "seed" and _numeric([each[key] for each in noisy])), None)
    if key is None:
        _draw_dots(axis, sweep, lines)
        return
    groups: dict[str, list[tuple[float, float, float, int]]] = {}
    for at, (values, runs) in enumerate(lines):
        others = _label({name: value for name, value in values.items() if name != key})
        mean, error = mean_and_error([run.metrics[-1][sweep.score] for run in runs])
        if values not in noisy:
            axis.axhline(mean, color=_colour(at), linestyle="--", linewidth=1)
            continue
        groups.setdefault(others, []).append((float(values[key]), mean, error or 0.0, at))
    ticks = sorted({float(values[key]) for values in noisy})
    on_log = ticks[0] > 0 and ticks[-1] / ticks[0] >= 5
    for number, (others, points) in enumerate(groups.items()):
        points.sort()
        aside = 0.02 * (number - (len(groups) - 1) / 2)  # of the axis: bars of two groups stand side by side
        ratio, span = (ticks[-1] / ticks[0]) ** aside if on_log else 1.0, 0.0 if on_log else ticks[-1] - ticks[0]
        numbers, means, errors, places = zip(*points, strict=True)
        x = [ratio * value + aside * span for value in numbers]
        dashes, marker = _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]
        axis.plot(x, means, color=plots.GREY, linewidth=1.0, linestyle=dashes, zorder=1)
        for at, place in enumerate(places):
            axis.errorbar(x[at], means[at], errors[at], fmt=marker, color=_colour(place), markersize=5, capsize=3)
        if len(groups) > 1:
            axis.plot([], [], color=plots.GREY, linewidth=1.0, linestyle=dashes, marker=marker, label=others)
    if on_log:
        axis.set_xscale("log")
        if len(ticks) <= 8:
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
    axis.set_xlabel(key)
    axis.margins(x=0.08)
    if len(groups) > 1:
        axis.legend(frameon=False, fontsize=8, title=_names(sweep.keys, key), title_fontsize=8)
    if any(len(runs) > 1 for _, runs in lines):
        _caption(axis, f"mean ± standard error over seeds{'; dashed: without noise' * (len(noisy) < len(lines))}")


def _draw_dots(axis: Any, sweep: Sweep, lines: list[Setting]) -> None:
    """Where no number varies: every run as a dot, and the mean of its setting."""
    for at, (_, runs) in enumerate(lines):
        accuracy = [run.metrics[-1][sweep.score] for run in runs]
        axis.plot([at] * len(accuracy), accuracy, "o", markersize=4, color=_colour(at), alpha=0.6)
        axis.plot([at - 0.25, at + 0.25], [np.mean(accuracy)] * 2, color=_colour(at))
    labels = [_label(values) or "all runs" for values, _ in lines]
    axis.set_xticks(range(len(lines)), labels, rotation=30 if sum(map(len, labels)) > 40 else 0, fontsize=8)
    axis.set_xlim(-0.6, len(lines) - 0.4)
    _caption(axis, "every seed, and their mean")


def _caption(axis: Any, text: str) -> None:
    axis.set_title(text, fontsize=8.5, loc="left", color=plots.GREY)


def _colour(at: int) -> str:
    return _COLOURS[at % len(_COLOURS)]


def _numeric(values: list[Any]) -> bool:
    """Whether these are at least two different finite numbers."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return len(numbers) == len(values) and len(set(numbers)) > 1 and all(map(np.isfinite, numbers))


def _names(keys: Sequence[str], *shown: str) -> str:
    return ", ".join(key.removeprefix("method_options.") for key in keys if key not in ("seed", *shown))


def _label(values: dict[str, Any]) -> str:
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values.values())
