"""What a figure is: a grid of runs, panels that show them, and claims about them.

    FIGURE = Figure(
        id="secure-fedavg/fig1",
        title="Accuracy against rounds for several ε",
        base={"preset": "secure-fedavg", "cohort_size": 50},
        panels=panels,                       # View -> the panels to draw: lines of settings
        claims=(Claim("SF-A1", "...", judge),),    # judge: View -> Verdict
        scales={"full": Scale(seeds=5, grid={"epsilon": (0.1, 0.5, 1.0, inf)}), ...},
        proven={"privacy.noise": "proven"},
    )

A `View` is a figure at one scale, as printed or at equal proven ε. It turns settings into specs, and once they
are computed, into numbers. A figure names settings only by what differs from its base, so that the same panel
and the same claim serve both views and every scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from dither.errors import DitherError, SpecError
from dither.reproduction.judging import Verdict
from dither.spec import Spec

Values = Mapping[str, Any]
SCALES = ("smoke", "quick", "full")


class NotComputed(DitherError):
    """A number was asked for that no run has given yet."""


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
    values: Values = MappingProxyType({})
    formula: Callable[[View], tuple[np.ndarray, np.ndarray]] | None = None  # (x, y) in float64
    dashed: bool = False
    until: Callable[[View, int], int] | None = None  # the last round shown, given the seed


class Axis(NamedTuple):
    """What a panel has below it when it is not the round: a number, and the settings it stands for."""

    label: str
    points: Sequence[tuple[float, Values]]
    log: bool = False


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    lines: Sequence[Line]
    metric: str
    label: str  # of the vertical axis
    axis: Axis | None = None  # None: the metric against rounds
    log: bool = False
    x_label: str = "communication round"
    row: int = 0  # panels of one row share a legend


class Claim(NamedTuple):
    """A criterion: what the paper finds, and how it is judged."""

    id: str
    text: str
    judge: Callable[[View], Verdict]
    variant: str = ""  # "": as the paper states it; else what was changed to test it ("equal credit")
    proven: bool = True  # whether it makes sense at equal proven ε too
    errata: tuple[str, ...] = ()
    why: str = ""  # why it fails or cannot be seen, where that is known


class Table(NamedTuple):
    """Numbers beside a figure."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure of a paper, declared."""

    id: str
    title: str
    shows: str  # one or two sentences for the caption
    base: Values  # "preset" and what differs from it
    panels: Callable[[View], Sequence[Panel]]
    claims: Sequence[Claim]
    scales: Mapping[str, Scale]
    proven: Values | None = None  # what makes the noise the accountant's; None: does not apply
    proven_note: str = ""  # what the proven panels are, or why there are none
    gradient_norm: bool = False
    tables: Callable[[View], Sequence[Table]] | None = None
    notes: Sequence[str] = ()

    @property
    def paper(self) -> str:
        """The paper's name: what stands before the slash."""
        return self.id.partition("/")[0]

    @property
    def number(self) -> str:
        """The figure's number in its paper."""
        return self.id.rpartition("fig")[2]

    def views(
        self, scale: str, store: Mapping[str, Record] | None = None, accounts: Accounts | None = None
    ) -> list[View]:
        """As printed, and at equal proven ε where that applies at this scale."""
        if scale not in self.scales:
            raise SpecError(f"{self.id} has no scale {scale!r}; it has {', '.join(self.scales)}")
        known = {} if store is None else store
        both = [View(self, scale, known, accounts, proven=False)]
        if self.proven is not None and self.scales[scale].proven_seeds != 0:
            both.append(View(self, scale, known, accounts, proven=True))
        return both


class Accounts(Protocol):
    """Answers about ε and estimates from data, computed once and kept (`accounts.Book`)."""

    def proven_stop(self, spec: Spec, budget: float) -> int:
        """The last round of a run whose proven ε is within the budget."""

    def proven_epsilon(self, spec: Spec, unit: str = "run") -> float:
        """Proven ε of a run for its own view and adjacency."""

    def estimated(self, name: str, spec: Spec, estimate: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
        """What `estimate(experiment)` finds, kept under a name."""


class Record(NamedTuple):
    """A finished run as the cache keeps it: its metrics as columns, and where it was made."""

    metrics: Mapping[str, Sequence[float]]  # "round" and one column a metric
    claim: Mapping[str, Any]
    seconds: float
    device: str
    versions: Mapping[str, str]


class View:
    """A figure at one scale, as printed or at equal proven ε."""

    def __init__(
        self, figure: Figure, scale: str, store: Mapping[str, Record], accounts: Accounts | None, *, proven: bool
    ) -> None:
        self.figure = figure
        self.scale_name = scale
        self.scale = figure.scales[scale]
        self.store = store
        self._accounts = accounts
        self._specs: dict[tuple[str, int], tuple[Spec, str]] = {}
        self.proven = proven
        chosen = self.scale.proven_seeds if proven else None
        self.seeds = list(range(self.scale.seeds if chosen is None else chosen))
        values = {**figure.base, **self.scale.values}
        self.base = Spec.from_preset(values.pop("preset")).with_values(values)

    def grid(self, name: str) -> tuple[Any, ...]:
        """The values of one axis at this scale."""
        if self.proven and name in self.scale.proven_grid:
            return tuple(self.scale.proven_grid[name])
        return tuple(self.scale.grid[name])

    def spec(self, values: Values, seed: int) -> Spec:
        """The run of these settings with this seed."""
        return self._known(values, seed)[0]

    def _known(self, values: Values, seed: int) -> tuple[Spec, str]:
        """A run and its name in the cache: panels and claims ask for the same few again and again."""
        which = (repr(sorted(values.items())), seed)
        if which not in self._specs:
            spec = self._spec(values, seed)
            self._specs[which] = (spec, point_key(spec, self.figure.gradient_norm))
        return self._specs[which]

    def _spec(self, values: Values, seed: int) -> Spec:
        plain = self.base.with_values({**values, "seed": seed})
        if not self.proven or self.figure.proven is None:
            return plain
        if math.isinf(plain.privacy.epsilon) or plain.privacy.noise == "none":
            return plain  # no noise is the same in both views
        return self.base.with_values({**self.figure.proven, **values, "seed": seed})

    @property
    def accounts(self) -> Accounts:
        """What answers questions about ε."""
        if self._accounts is None:
            raise NotComputed(f"{self.figure.id}: nothing is accounted while runs are being made")
        return self._accounts

    # What has to be computed

    def settings(self) -> list[tuple[str, Values]]:
        """Every setting that the panels show, with the name of its line, each once."""
        found: dict[str, tuple[str, Values]] = {}
        for panel in self.figure.panels(self):
            for line in panel.lines:
                if line.formula is not None:
                    continue
                for x, more in panel.axis.points if panel.axis else ((None, {}),):
                    values = {**line.values, **more}
                    name = ": ".join(part for part in (panel.title, line.label) if part)
                    if panel.axis is not None and x is not None:
                        name += f", {panel.axis.label} {x:g}"
                    found.setdefault(self._known(values, 0)[1], (name, values))
        return list(found.values())

    def specs(self) -> list[Spec]:
        """Every run of the figure."""
        return [self.spec(values, seed) for _, values in self.settings() for seed in self.seeds]

    # What came out

    def record(self, values: Values, seed: int) -> Record:
        """The finished run of these settings."""
        key = self._known(values, seed)[1]
        if key not in self.store:
            raise NotComputed(f"{self.figure.id}: no run yet of {dict(values)}, seed {seed}")
        return self.store[key]

    def curve(
        self, values: Values, metric: str, until: Callable[[View, int], int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, metric[seed, round]); shortened to what all seeds have."""
        rows = []
        for seed in self.seeds:
            record = self.record(values, seed)
            rounds, column = np.asarray(record.metrics["round"]), np.asarray(record.metrics[metric], float)
            kept = rounds <= until(self, seed) if until else np.full(len(rounds), True)
            rows.append((rounds[kept], column[kept]))
        shortest = min(rows, key=lambda row: len(row[0]))[0]
        return shortest, np.stack([column[: len(shortest)] for _, column in rows])

    def final(self, values: Values, metric: str, *, at: Callable[[View, int], int] | None = None) -> np.ndarray:
        """The metric of each seed after the last round, or at the last evaluation up to round `at(view, seed)`."""
        found = []
        for seed in self.seeds:
            record = self.record(values, seed)
            rounds, column = record.metrics["round"], record.metrics[metric]
            if at is None:
                found.append(column[-1])
                continue
            made = np.flatnonzero(np.asarray(rounds) <= at(self, seed))
            found.append(column[int(made[-1]) if len(made) else 0])
        return np.asarray(found, float)

    def reductions(self) -> list[str]:
        """What this scale leaves out of the full one, in words."""
        full, own = self.figure.scales["full"], self.scale
        if own is full:
            return []
        words = []
        if own.seeds != full.seeds:
            words.append(f"{own.seeds} of {full.seeds} seeds")
        for name, wanted in full.grid.items():
            if tuple(own.grid.get(name, ())) != tuple(wanted):
                words.append(f"{name}: {_list(own.grid.get(name, ()))} of {_list(wanted)}")
        for key, value in own.values.items():
            if full.values.get(key) != value:
                before = full.values.get(key, self.figure.base.get(key, "the preset's"))
                words.append(f"{key} = {value} instead of {before}")
        if own.proven_seeds == 0 and full.proven_seeds != 0 and self.figure.proven is not None:
            words.append("nothing at equal proven ε")
        return words + ([own.note] if own.note else [])


def point_key(spec: Spec, gradient_norm: bool) -> str:
    """The name of a run in the cache."""
    return spec.fingerprint() + ("-gradient" if gradient_norm else "")


def _list(values: Sequence[Any]) -> str:
    return "{" + ", ".join(f"{v:g}" if isinstance(v, int | float) else str(v) for v in values) + "}"
