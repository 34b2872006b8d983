"""What a figure is: a grid of runs, panels that show them, and criteria that judge them.

The figures of a paper are declared in papers/PAPER.toml. Its [[figures]] are `Figure`s, numbered from
`first_figure`, on top of what [every_figure] says and of the table that `like` names. Their `panels`, `tables` and
`judge` name functions of the module of that paper, which take a `View`; further arguments of a judge stand beside
its name. A paper with `figures_of` has the figures of that other paper, with its own [names] in their {places}.

A `View` is a figure at one scale: as printed, as Dither deploys the method, or at equal proven ε. It turns
settings into specs and, once they are computed, into numbers. A figure names settings only by what differs from
its base, so the same panel and the same criterion serve every view and every scale, the twin without noise, and
the figure with one of its open settings changed.

[open.NAME] of a paper's file is a setting that the paper leaves open: what the paper says, what is taken here,
why, and what else is plausible. Each figure lists the NAMEs that bear on it.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dither.errors import DitherError, SpecError, did_you_mean
from dither.reproduction.judging import FAILS, HOLDS, LOOKS, Verdict, all_of
from dither.spec import Spec

if TYPE_CHECKING:
    from dither.reproduction.cache import Accounts

Values = Mapping[str, Any]
Setting = tuple[str, Values]  # a label, and what differs from the base
SCALES = ("smoke", "quick", "robust", "full")  # robust: where open settings are changed; as quick if not declared
NOTHING: Values = MappingProxyType({})
AXIS_LABELS = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss",
    "gradient_sq": "‖∇f‖²",
}
PAPERS = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated")
PRINTED, DEPLOYED, PROVEN = "printed", "deployed", "proven"
VIEW_TITLES = {PRINTED: "as printed", DEPLOYED: "as deployed by Dither", PROVEN: "at equal proven ε"}
TUNING_SEEDS = 3
# Settings that differ only in their noise are one run without it.
WITHOUT_NOISE: Values = {
    "privacy.epsilon": math.inf,
    "privacy.noise": "paper",
    "privacy.noise_std": 0.0,
    "privacy.noise_schedule": "constant",
    "privacy.noise_decay": 1.0,
    "privacy.noise_decay_start": 0,
}
FORMULA = "formula."  # keys of changes that are no part of a spec, but of a formula
TIMES = "× "  # an alternative "× 0.3" is that multiple of the figure's own value


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
    max_seeds: int = 0  # an undecided criterion gets more seeds, up to this many; 30 at `robust` and `full`
    note: str = ""


class OpenSetting(NamedTuple):
    """A setting that a paper does not give, and its plausible values."""

    name: str  # one word: "rate"
    title: str
    paper: str  # what the paper says about it
    reference: str  # what is taken here
    why: str
    alternatives: Mapping[str, Values]  # by label: what changes
    beyond: bool = False  # the paper gives it: changed to see what holds elsewhere, and counted apart

    def row(self) -> dict[str, str]:
        """As a report lists it."""
        tried = ", ".join(self.alternatives)
        said = {"setting": self.title, "the paper": self.paper, "here": self.reference}
        return {**said, "also tried": tried, "why": self.why}


class Change(NamedTuple):
    """A figure's reference with one open setting changed, or two that interact."""

    label: str
    settings: tuple[str, ...]  # names of the open settings
    values: Values
    beyond: bool = False


class Line(NamedTuple):
    """One line of a panel: settings (what differs from the base), or a formula."""

    label: str
    values: Values = NOTHING
    formula: Callable[[View], tuple[np.ndarray, np.ndarray]] | None = None  # (x, y) in float64
    dashed: bool = False
    until: Callable[[View, int], int] | None = None  # the last round shown, given the seed
    style: str = ""  # lines with the same one have the same colour; "": the label


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
    per_round: Callable[[View, Values], float] | None = None  # what a round costs, where x is that and not rounds
    first: float = 0.0  # where x begins


class Criterion(NamedTuple):
    """A finding of the paper, and how it is judged."""

    id: str
    text: str
    judge: Callable[[View], Verdict]
    variant: str = ""  # "": as the paper states it; else what was changed to test it ("equal credit")
    proven: bool = True  # whether it makes sense at equal proven ε too
    control: bool = False  # it is about noise: it must not hold in the twin without noise
    closed: bool = False  # no setting that the paper leaves open enters it
    errata: tuple[str, ...] = ()
    why: str = ""  # why it fails or cannot be seen, where that is known

    def verdict(self, view: View) -> Verdict:
        """What the seeds say. A statement about noise holds only where it does not hold without noise too."""
        verdict = self.judge(view)
        if not self.control or verdict.status != HOLDS:
            return verdict
        twin = self.judge(view.twin())
        if twin.status != HOLDS:
            return replace(verdict, text=f"{verdict.text}; without noise: {twin.status}")
        text = f"{verdict.text}; but it is not the noise, for without noise the same holds: {twin.text}"
        return Verdict(FAILS, text, verdict.numbers)

    def needs(self, view: View) -> dict[str, Spec]:
        """The runs that `verdict` asks for, by key. The twin's follow once these are there."""
        needed = view.needs(self.judge)
        if not (self.control and all(key in view.runs for key in needed)):
            return needed
        with suppress(MissingRun):  # where nothing is accounted, the twin may be needed
            if self.judge(view).status != HOLDS:
                return needed
        return needed | view.twin().needs(self.judge)


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
    literal: Values = field(default_factory=dict)  # what the paper's algorithm changes of what Dither deploys
    proven: Values | None = None  # what hands the noise to the accountant; None: does not apply
    proven_note: str = ""  # what the proven panels are, or why there are none
    open: Sequence[OpenSetting] = ()
    interacting: Sequence[Sequence[str]] = ()  # pairs of open settings that are changed together too
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
        """As printed; as deployed, where that differs; and at equal proven ε, where that applies at this scale."""
        if scale not in self.scales:
            raise SpecError(f"{self.id} has no scale {scale!r}; it has {', '.join(self.scales)}")
        kinds = [PRINTED]
        if self.literal and self.scales[scale].seeds:
            kinds.append(DEPLOYED)
        if self.proven is not None and self.scales[scale].proven_seeds != 0:
            kinds.append(PROVEN)
        return [View(self, scale, {} if runs is None else runs, accounts, kind) for kind in kinds]

    def changes(self) -> list[Change]:
        """One open setting at a time, then pairs that interact."""
        each = {
            setting.name: [
                Change(f"{setting.name}: {label}", (setting.name,), values, setting.beyond)
                for label, values in setting.alternatives.items()
            ]
            for setting in self.open
        }
        pairs = [
            Change(f"{a.label}, {b.label}", a.settings + b.settings, {**a.values, **b.values})
            for first, second in self.interacting
            for a in each[first]
            for b in each[second]
        ]
        return [change for changes in each.values() for change in changes] + pairs


class FinishedRun(NamedTuple):
    """A run as the cache keeps it: its metrics as columns, and where it was computed."""

    metrics: Mapping[str, Sequence[float]]  # "round" and one column a metric
    claim: Mapping[str, Any]
    seconds: float
    device: str
    versions: Mapping[str, str]


@dataclass(eq=False)
class View:
    """A figure at one scale: as printed, as deployed, or at equal proven ε."""

    figure: Figure
    scale_name: str
    runs: Mapping[str, FinishedRun]
    given_accounts: Accounts | None
    kind: str = PRINTED
    changed: Values = field(default_factory=dict)  # open settings with other values than the reference
    more_seeds: int = 0  # than the scale has
    noiseless: bool = False  # the twin: the same runs without noise
    trial: bool = False  # invented numbers: a judge is only asked what it needs
    asked: dict[str, Spec] = field(default_factory=dict)  # the runs whose numbers were asked for
    tuning: dict[str, Spec] = field(default_factory=dict)  # the runs that tuned a line
    _specs: dict[tuple[str, int, bool], tuple[Spec, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scale = self.figure.scales[self.scale_name]
        chosen = self.scale.proven_seeds if self.proven else None
        self.seeds = list(range(max(self.more_seeds, self.scale.seeds if chosen is None else chosen)))
        keys = {key: value for key, value in self.changed.items() if not key.startswith(FORMULA)}
        self.formula = {key.removeprefix(FORMULA): v for key, v in self.changed.items() if key not in keys}
        literal = self.figure.literal if self.kind == PRINTED else NOTHING
        self.base = _base(json.dumps({**self.figure.base, **literal, **self.scale.values}), json.dumps(keys))

    @property
    def proven(self) -> bool:
        """Whether the accountant sets the noise."""
        return self.kind == PROVEN

    @property
    def accounts(self) -> Accounts:
        """Answers questions about ε."""
        if self.trial:
            return cast("Accounts", _TRIAL_ACCOUNTS)
        if self.given_accounts is None:
            raise MissingRun(f"{self.figure.id}: nothing is accounted while runs are being computed")
        return self.given_accounts

    def like(self, **differing: Any) -> View:
        """The same view, except for what is given. Specs are shared: they are named by values, seed and noise."""
        return replace(self, asked={}, tuning={}, **differing)

    def twin(self) -> View:
        """The same runs without noise."""
        return self.like(noiseless=True)

    def needs(self, judge: Callable[[View], Any]) -> dict[str, Spec]:
        """The runs that a judge asks for, by key. Where a line is not tuned yet, the runs that tune it."""
        trial = self.like(trial=True)
        judge(trial)
        return trial.untuned() or trial.asked

    def untuned(self) -> dict[str, Spec]:
        """The runs that tune a line and are not computed yet."""
        return {key: spec for key, spec in self.tuning.items() if key not in self.runs}

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

    def tuned(self, values: Values, last_round: int = 0) -> Values:
        """The settings with the value of the key `options.tuned`, of its grid, that does best on the validation
        records, by mean final accuracy (or that of a `last_round`) over the first `options.tuning_seeds`. Every
        line has the same grid: equal effort. A change of that key as an open setting is taken instead; at equal
        proven ε, the value of what is deployed."""
        key = self.figure.options["tuned"]
        if key in self.changed:
            return values
        if self.proven:
            deployed = View(self.figure, self.scale_name, self.runs, None, DEPLOYED, more_seeds=len(self.seeds))
            tuned = deployed.tuned(values, last_round)
            self.tuning |= deployed.tuning
            return tuned
        grid, seeds = self.grid(key), self.figure.options.get("tuning_seeds", TUNING_SEEDS)
        rounds = last_round or self.base.num_rounds
        validated = {"data.split": "validation", "num_rounds": rounds, "eval_every": rounds}
        scores = []
        for value in grid:
            candidate = {**values, key: value, **validated}
            keyed = [self._keyed(candidate, seed) for seed in self.seeds[:seeds]]
            self.tuning |= {run: spec for spec, run in keyed}
            if all(run in self.runs for _, run in keyed):
                scores.append(float(np.mean([self.runs[run].metrics["test_accuracy"][-1] for _, run in keyed])))
        best = int(np.argmax(scores)) if len(scores) == len(grid) else 0
        return {**values, key: grid[best]}

    def spec(self, values: Values, seed: int) -> Spec:
        """The run of these settings with this seed."""
        return self._keyed(values, seed)[0]

    def _keyed(self, values: Values, seed: int) -> tuple[Spec, str]:
        """A run and its key in the cache; kept, because panels and criteria ask for the same few repeatedly."""
        which = (repr(sorted(values.items())), seed, self.noiseless)
        if which not in self._specs:
            own = {**values, "seed": seed, **(WITHOUT_NOISE if self.noiseless else {})}
            spec = self.base.with_values(own)
            noiseless = math.isinf(spec.privacy.epsilon) or spec.privacy.noise == "none"  # the same in both views
            if self.proven and self.figure.proven is not None and not noiseless:
                spec = self.base.with_values({**self.figure.proven, **own})
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

    def shown(self) -> dict[str, Spec]:
        """The runs that the panels show, by key."""
        keyed = [self._keyed(values, seed) for _, values in self.settings() for seed in self.seeds]
        return {key: spec for spec, key in keyed}

    def needed(self) -> dict[str, Spec]:
        """Every run of the figure by key: what its panels show and its criteria ask for. Where a line is not tuned
        yet, the runs that tune it."""
        shown = self.shown()
        needed = self.untuned() or {**shown, **self.tuning}
        if self.figure.tables is not None and self.kind == PRINTED:
            needed |= self.needs(self.figure.tables)
        for criterion in self.figure.criteria:
            if criterion.proven or not self.proven:
                needed |= criterion.needs(self)
        return needed

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
            if before != value:
                less.append(f"{key} = {value} instead of {before}")
        if scale.proven_seeds == 0 and full.proven_seeds != 0 and self.figure.proven is not None:
            less.append("nothing at equal proven ε")
        return less + ([scale.note] if scale.note else [])

    # What came out

    def run(self, values: Values, seed: int) -> FinishedRun:
        """The finished run of these settings."""
        spec, key = self._keyed(values, seed)
        self.asked[key] = spec
        if self.trial:
            return _TRIAL_RUN
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


# What a trial answers

_TRIAL_RUN = FinishedRun(
    {"round": [0.0, 1.0, 2.0], **dict.fromkeys(("test_accuracy", "train_loss", "loss", "gradient_sq"), [0.5] * 3)},
    claim={"value": 1.0, "unit": "run"},
    seconds=0.0,
    device="",
    versions={},
)
_CONSTANTS = ("smoothness", "lipschitz", "pl_constant", "dissimilarity", "initial_gap")
_TRIAL_ACCOUNTS = SimpleNamespace(
    proven_epsilon=lambda *_: 1.0,
    proven_stop=lambda *_: 1,
    estimated=lambda *_: {**dict.fromkeys(_CONSTANTS, 1.0), "rounds": [0]},
)


@cache
def _base(values: str, changed: str) -> Spec:
    """The spec of a preset with other values, of which some are changed in turn; both as JSON."""
    differing = json.loads(values)
    base = Spec.from_preset(differing.pop("preset")).with_values(differing)
    return base.with_values({key: _scaled(value, base, key) for key, value in json.loads(changed).items()})


def _scaled(value: Any, base: Spec, key: str) -> Any:
    """The value of a change, which may be a multiple of what the base has."""
    if not (isinstance(value, str) and value.startswith(TIMES)):
        return value
    before = attrgetter(key)(base)
    scaled = float(value.removeprefix(TIMES)) * before
    return round(scaled) if isinstance(before, int) else scaled


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
    settings = {key: _open_setting(key, **fields) for key, fields in declared.get("open", {}).items()}
    figures = []
    for number, own_fields in enumerate(declared["figures"], declared["first_figure"]):
        alike = declared[own_fields.pop("like")] if "like" in own_fields else {}
        fields = _merged(_merged(declared["every_figure"], alike), own_fields)
        fields["robust"] = {"max_seeds": LOOKS[-1], **fields.get("robust", fields["quick"])}
        fields["full"] = {"max_seeds": LOOKS[-1], **fields["full"]}
        fields["scales"] = {scale: Scale(**fields.pop(scale)) for scale in SCALES}
        criteria = [
            Criterion(**{**criterion, "judge": _judge(module, criterion["judge"])})
            for criterion in fields.pop("criteria")
        ]
        fields["open"] = [settings[key] for key in fields.get("open", ())]
        for key in {"panels", "tables"} & fields.keys():
            fields[key] = _function(module, fields[key])
        figures.append(Figure(id=f"{name}/fig{number}", criteria=criteria, **fields))
    return Paper(declared["title"], tuple(figures))


def _open_setting(name: str, *, reference: Any, alternatives: Mapping[str, Any], **others: Any) -> OpenSetting:
    kept = {label: values for label, values in alternatives.items() if values is not False}
    # noise_rate and tuned_rate are a rate: a figure has one of them
    return OpenSetting(name.split("_")[-1], reference=str(reference), alternatives=kept, **others)


def _declared(name: str) -> dict[str, Any]:
    text = files("dither.reproduction").joinpath("papers", f"{name}.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)
    return _merged(_declared(declared["figures_of"]), declared) if "figures_of" in declared else declared


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables in one, with their tables merged too."""
    both = {key: _merged(below[key], above[key]) for key in below if isinstance(above.get(key), dict)}
    return {**below, **above, **both}


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """The value with names put into every {place} of its texts; a text that is one place becomes what it names."""
    if isinstance(value, dict):
        return {key: _filled(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, names) for inner in value]
    if not isinstance(value, str) or not names:
        return value
    return names[value[1:-1]] if value[1:-1] in names and value[0] == "{" else value.format_map(names)


def _function(module: str, declared: str | Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a paper's module, imported when it is called: listing figures needs no JAX."""
    arguments = {"function": declared} if isinstance(declared, str) else dict(declared)
    name = arguments.pop("function")
    return lambda view: getattr(import_module(f"dither.reproduction.{module}"), name)(view, **arguments)


def _judge(module: str, declared: str | Mapping[str, Any]) -> Callable[[View], Verdict]:
    """A judge of a paper's module; where it gives several verdicts, all must hold."""
    function = _function(module, declared)

    def judge(view: View) -> Verdict:
        verdict = function(view)
        return verdict if isinstance(verdict, Verdict) else all_of(*verdict)

    return judge


def names() -> list[str]:
    """Every figure's id."""
    return [figure.id for name in PAPERS for figure in paper(name).figures]


def load(name: str) -> Figure:
    """The figure of that id."""
    (figure,) = select(name)
    return figure


def select(wanted: str | Sequence[str] = "all") -> list[Figure]:
    """Figures by id, by paper, or all of them, in the papers' order and each once."""
    asked = {wanted} if isinstance(wanted, str) else set(wanted) or {"all"}
    known = [*names(), *PAPERS, "all"]
    for unknown in asked - set(known):
        raise SpecError(f"unknown figure {unknown!r}{did_you_mean(unknown, known)}")
    return [each for name in PAPERS for each in paper(name).figures if asked & {"all", name, each.id}]
