"""What a figure is: a grid of runs, panels that show them, and criteria that judge them.

The figures of a paper are declared in papers/PAPER.toml. Its [[figures]] are `Figure`s, numbered from
`first_figure`, on top of what [every_figure] says and of the table that `like` names. Their `panels`, `tables` and
`judge` name functions of the module of that paper, which take a `View`; further arguments of a judge stand beside
its name. A paper with `figures_of` has the figures of that other paper, with its own [names] in their {places}.

A `View` is a figure at one scale, as printed or at equal proven ε. It turns settings into specs and, once they are
computed, into numbers. A figure names settings only by what differs from its base, so the same panel and the same
criterion serve both views and every scale.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.errors import DitherError, SpecError, did_you_mean
from dither.reproduction.judging import Verdict
from dither.spec import Spec

if TYPE_CHECKING:
    from dither.reproduction.cache import Accounts

Values = Mapping[str, Any]
Setting = tuple[str, Values]  # a label, and what differs from the base
SCALES = ("smoke", "quick", "full")
NOTHING: Values = MappingProxyType({})
AXIS_LABELS = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss (cross-entropy)",
    "gradient_sq": "‖∇f‖² of the training loss",
}
PAPERS = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated")


class MissingRun(DitherError):
    """A number was asked for that no finished run provides."""


@dataclass(frozen=True)
class Scale:
    """How much of a figure is computed: seeds, the values of each axis, and changes of the base spec."""

    seeds: int
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    proven_seeds: int | None = None  # at equal proven ε; None: as many as `seeds`, 0: not at this scale
    proven_grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # where it differs from `grid`
    note: str = ""


class Line(NamedTuple):
    """One line of a panel: settings (what differs from the base), or a formula."""

    label: str
    values: Values = NOTHING
    formula: Callable[[View], tuple[np.ndarray, np.ndarray]] | None = None  # (x, y) in float64
    dashed: bool = False
    until: Callable[[View, int], int] | None = None  # the last round shown, given the seed


class Axis(NamedTuple):
    """The horizontal axis of a panel, where it is not the round: numbers, and the settings they stand for."""

    label: str
    points: Sequence[tuple[float, Values]]
    log: bool = False


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    lines: Sequence[Line]
    metric: str
    axis: Axis | None = None  # None: the metric against rounds
    log: bool = False
    row: int = 0  # panels of one row share a legend
    x_label: str = "communication round"
    y_label: str = ""  # "": that of the metric


class Criterion(NamedTuple):
    """A finding of the paper, and how it is judged."""

    id: str
    text: str
    judge: Callable[[View], Verdict]
    variant: str = ""  # "": as the paper states it; else what was changed to test it ("equal credit")
    proven: bool = True  # whether it makes sense at equal proven ε too
    errata: tuple[str, ...] = ()
    why: str = ""  # why it fails or cannot be seen, where that is known


@dataclass(frozen=True)
class Table:
    """Numbers beside a figure."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str


@dataclass(frozen=True)
class Figure:
    """A figure of a paper, declared."""

    id: str
    title: str
    shows: str  # one or two sentences for the caption
    base: Values  # "preset" and what differs from it
    panels: Callable[[View], Sequence[Panel]]
    criteria: Sequence[Criterion]
    scales: Mapping[str, Scale]
    proven: Values | None = None  # what hands the noise to the accountant; None: does not apply
    proven_note: str = ""  # what the proven panels are, or why there are none
    gradient_norm: bool = False
    tables: Callable[[View], Sequence[Table]] | None = None
    notes: Sequence[str] = ()
    options: Values = field(default_factory=dict)  # what its panels and judges ask for besides

    @property
    def paper(self) -> str:
        """The paper's name, which stands before the slash."""
        return self.id.partition("/")[0]

    @property
    def number(self) -> str:
        """The figure's number in its paper."""
        return self.id.rpartition("fig")[2]

    def views(
        self, scale: str, runs: Mapping[str, FinishedRun] | None = None, accounts: Accounts | None = None
    ) -> list[View]:
        """The figure as printed and, where that applies at this scale, at equal proven ε."""
        if scale not in self.scales:
            raise SpecError(f"{self.id} has no scale {scale!r}; it has {', '.join(self.scales)}")
        views = [View(self, scale, {} if runs is None else runs, accounts, proven=False)]
        if self.proven is not None and self.scales[scale].proven_seeds != 0:
            views.append(View(self, scale, views[0].runs, accounts, proven=True))
        return views


class FinishedRun(NamedTuple):
    """A run as the cache keeps it: its metrics as columns, and where it was computed."""

    metrics: Mapping[str, Sequence[float]]  # "round" and one column a metric
    claim: Mapping[str, Any]
    seconds: float
    device: str
    versions: Mapping[str, str]


class View:
    """A figure at one scale, as printed or at equal proven ε."""

    def __init__(
        self,
        figure: Figure,
        scale: str,
        runs: Mapping[str, FinishedRun],
        accounts: Accounts | None,
        *,
        proven: bool,
    ) -> None:
        self.figure, self.scale_name, self.scale = figure, scale, figure.scales[scale]
        self.proven = proven
        self.runs, self._accounts = runs, accounts
        self._specs: dict[tuple[str, int], tuple[Spec, str]] = {}
        chosen = self.scale.proven_seeds if proven else None
        self.seeds = list(range(self.scale.seeds if chosen is None else chosen))
        values = {**figure.base, **self.scale.values}
        self.base = Spec.from_preset(values.pop("preset")).with_values(values)

    @property
    def accounts(self) -> Accounts:
        """Answers questions about ε."""
        if self._accounts is None:
            raise MissingRun(f"{self.figure.id}: nothing is accounted while runs are being computed")
        return self._accounts

    # What to compute

    def grid(self, name: str) -> tuple[Any, ...]:
        """The values of one axis at this scale."""
        return tuple({**self.scale.grid, **(self.scale.proven_grid if self.proven else {})}[name])

    def levels(self, without: str = "without noise") -> list[Setting]:
        """One setting for each target ε of the grid."""
        return [(eps(e, without), {"privacy.epsilon": e}) for e in self.grid("epsilon")]

    def varied(self, label: str, *keys: str, grid: str = "") -> list[Setting]:
        """One setting for each value of an axis (that of the first key), which these keys take."""
        return [(f"{label} = {value:g}", dict.fromkeys(keys, value)) for value in self.grid(grid or keys[0])]

    def spec(self, values: Values, seed: int) -> Spec:
        """The run of these settings with this seed."""
        return self._keyed(values, seed)[0]

    def _keyed(self, values: Values, seed: int) -> tuple[Spec, str]:
        """A run and its key in the cache; kept, because panels and criteria ask for the same few repeatedly."""
        which = (repr(sorted(values.items())), seed)
        if which not in self._specs:
            spec = self.base.with_values({**values, "seed": seed})
            noiseless = math.isinf(spec.privacy.epsilon) or spec.privacy.noise == "none"  # the same in both views
            if self.proven and self.figure.proven is not None and not noiseless:
                spec = self.base.with_values({**self.figure.proven, **values, "seed": seed})
            self._specs[which] = (spec, run_key(spec, self.figure.gradient_norm))
        return self._specs[which]

    def settings(self) -> list[Setting]:
        """Every setting that the panels show, with the name of its line, each once."""
        settings: dict[str, Setting] = {}
        for panel in self.figure.panels(self):
            points = panel.axis.points if panel.axis else [(None, NOTHING)]
            for line in panel.lines:
                if line.formula is not None:
                    continue
                for x, more in points:
                    values = {**line.values, **more}
                    name = ": ".join(part for part in (panel.title, line.label) if part)
                    if panel.axis is not None:
                        name += f", {panel.axis.label} {x:g}"
                    settings.setdefault(self._keyed(values, 0)[1], (name, values))
        return list(settings.values())

    def specs(self) -> list[Spec]:
        """Every run of the figure."""
        return [self.spec(values, seed) for _, values in self.settings() for seed in self.seeds]

    def reductions(self) -> list[str]:
        """What this scale leaves out of the full one, in sentences."""
        full, scale = self.figure.scales["full"], self.scale
        if scale is full:
            return []
        less = [f"{scale.seeds} of {full.seeds} seeds"] if scale.seeds != full.seeds else []
        for name, values in full.grid.items():
            if tuple(scale.grid.get(name, ())) != tuple(values):
                less.append(f"{name}: {_listed(scale.grid.get(name, ()))} of {_listed(values)}")
        for key, value in scale.values.items():
            before = full.values.get(key, self.figure.base.get(key, "the preset's"))
            if full.values.get(key) != value:
                less.append(f"{key} = {value} instead of {before}")
        if scale.proven_seeds == 0 and full.proven_seeds != 0 and self.figure.proven is not None:
            less.append("nothing at equal proven ε")
        return less + ([scale.note] if scale.note else [])

    # What came out

    def run(self, values: Values, seed: int) -> FinishedRun:
        """The finished run of these settings."""
        key = self._keyed(values, seed)[1]
        if key not in self.runs:
            raise MissingRun(f"{self.figure.id}: no run yet of {dict(values)}, seed {seed}")
        return self.runs[key]

    def curve(
        self, values: Values, metric: str, until: Callable[[View, int], int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, metric[seed, round]) up to round `until(view, seed)`, as far as all seeds have come."""
        rounds, columns = zip(
            *(self._evaluations(values, metric, seed, until) for seed in self.seeds), strict=True
        )
        shortest = min(rounds, key=len)
        return shortest, np.stack([column[: len(shortest)] for column in columns])

    def final(self, values: Values, metric: str, until: Callable[[View, int], int] | None = None) -> np.ndarray:
        """The metric of each seed at its last evaluation up to round `until(view, seed)`."""
        return np.array([self._evaluations(values, metric, seed, until)[1][-1] for seed in self.seeds])

    def finals(
        self, settings: Sequence[Setting], metric: str, more: Values = NOTHING
    ) -> tuple[list[np.ndarray], list[str]]:
        """The final metric of each setting (one value a seed) and its label, as the judges take them."""
        groups = [self.final({**more, **values}, metric) for _, values in settings]
        return groups, [label for label, _ in settings]

    def _evaluations(
        self, values: Values, metric: str, seed: int, until: Callable[[View, int], int] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        metrics = self.run(values, seed).metrics
        rounds, column = np.asarray(metrics["round"]), np.asarray(metrics[metric], float)
        shown = len(rounds) if until is None else max(1, np.searchsorted(rounds, until(self, seed), "right"))
        return rounds[:shown], column[:shown]


def run_key(spec: Spec, gradient_norm: bool) -> str:
    """The name of a run in the cache."""
    return spec.fingerprint() + ("-gradient" if gradient_norm else "")


def curves(title: str, settings: Sequence[Setting], metric: str, more: Values = NOTHING, **style: Any) -> Panel:
    """The metric against rounds, one line a setting; `style` are further fields of the panel."""
    return Panel(title, [Line(label, {**more, **values}) for label, values in settings], metric, **style)


def eps(value: float, without: str = "without noise") -> str:
    """A line's label for a target ε."""
    return without if math.isinf(value) else f"ε = {value:g}"


def _listed(values: Sequence[Any]) -> str:
    return "{" + ", ".join(f"{v:g}" if isinstance(v, int | float) else str(v) for v in values) + "}"


# The figures by name


class Paper(NamedTuple):
    """A paper's short title and its figures."""

    title: str
    figures: tuple[Figure, ...]


@cache
def paper(name: str) -> Paper:
    """A paper as papers/NAME.toml declares it."""
    declared = _declared(name)
    module = declared.get("figures_of", name).replace("-", "_")
    declared = _filled(declared, declared.get("names", {}))
    figures = []
    for number, own_fields in enumerate(declared["figures"], declared["first_figure"]):
        alike = declared[own_fields.pop("like")] if "like" in own_fields else {}
        fields = _merged(_merged(declared["every_figure"], alike), own_fields)
        fields["scales"] = {scale: Scale(**fields.pop(scale)) for scale in SCALES}
        criteria = [
            Criterion(**{**criterion, "judge": _function(module, criterion["judge"])})
            for criterion in fields.pop("criteria")
        ]
        for key in {"panels", "tables"} & fields.keys():
            fields[key] = _function(module, fields[key])
        figures.append(Figure(id=f"{name}/fig{number}", criteria=criteria, **fields))
    return Paper(declared["title"], tuple(figures))


def _declared(name: str) -> dict[str, Any]:
    text = files("dither.reproduction").joinpath("papers", f"{name}.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)
    return _merged(_declared(declared["figures_of"]), declared) if "figures_of" in declared else declared


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables in one, with their tables merged too."""
    both = {key: _merged(below[key], above[key]) for key in below if isinstance(above.get(key), dict)}
    return {**below, **above, **both}


def _filled(value: Any, names: Mapping[str, str]) -> Any:
    """The value with names put into every {place} of its texts."""
    if isinstance(value, dict):
        return {key: _filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, names) for inner in value]
    return value.format_map(names) if isinstance(value, str) and names else value


def _function(module: str, declared: str | Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a paper's module, imported when it is called: listing figures needs no JAX."""
    arguments = {"function": declared} if isinstance(declared, str) else dict(declared)
    name = arguments.pop("function")
    return lambda view: getattr(import_module(f"dither.reproduction.{module}"), name)(view, **arguments)


def names() -> list[str]:
    """Every figure's id."""
    return [figure.id for name in PAPERS for figure in paper(name).figures]


def load(name: str) -> Figure:
    """The figure of that id."""
    if name not in names():
        raise SpecError(f"unknown figure {name!r}{did_you_mean(name, [*names(), *PAPERS, 'all'])}")
    return next(figure for figure in paper(name.partition("/")[0]).figures if figure.id == name)


def select(wanted: str | Sequence[str] = "all") -> list[Figure]:
    """Figures by id, by paper, or all of them, in the papers' order and each once."""
    asked = [wanted] if isinstance(wanted, str) else list(wanted)
    for each in asked:
        if each != "all" and each not in PAPERS:
            load(each)  # raises for an unknown name
    everything = not asked or "all" in asked
    return [load(name) for name in names() if everything or name in asked or name.partition("/")[0] in asked]
