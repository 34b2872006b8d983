"""`plan`: which rounds, cohort, local steps, batch, clip and learning rate, under a proven budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dither.data import Dataset
from dither.errors import SpecError
from dither.experiment.partial import Unfinished
from dither.experiment.plan import empirical, knobs, pareto, pricing, shapes, theory
from dither.experiment.plan.constants import Constants, check_given, estimate
from dither.experiment.plan.empirical import Search, Trial
from dither.experiment.plan.knobs import Impossible, Point
from dither.experiment.plan.pricing import Price
from dither.experiment.plan.request import base_spec, material, smallest_client
from dither.experiment.plan.shapes import Material
from dither.experiment.plan.theory import Bounds
from dither.experiment.sweep.batches import train_specs
from dither.methods.formulas import Condition
from dither.spec import Spec

MODES = ("auto", "theory", "empirical")
FRONTIER = (0.25, 0.5, 2.0, 4.0)  # other budgets that the choice is tried at, in shares of the asked one
_ENOUGH_SIGNAL = 1.0


@dataclass(frozen=True)
class Plan:
    """A choice, why, and everything that was weighed against it."""

    spec: Spec  # ready for `dither run`
    mode: str  # "theory" or "empirical": what decided
    price: Price
    proven_epsilon: float
    source: str  # of the records that were planned on
    notes: tuple[str, ...]
    constants: Constants | None = None
    prices: list[Price] = field(default_factory=list)  # of the theory grid
    bounds: Bounds | None = None
    conditions: tuple[Condition, ...] = ()
    search: Search | None = None
    frontier: list[Trial] = field(default_factory=list)
    seconds: float = math.nan  # of a simulated run on this machine

    @property
    def score(self) -> float:
        """The bound, or the mean accuracy measured on the proxy."""
        if self.mode == "theory" and self.bounds is not None:
            return float(self.bounds.total[self.bounds.best])
        return self.search.best.mean_accuracy if self.search else math.nan

    def pareto(self) -> list[Trial]:
        """Measured points that no other beats in accuracy, ε and bytes at once."""
        trials = [*(self.search.trials if self.search else []), *self.frontier]
        usable = [trial for trial in trials if len(trial.accuracy) > 1]
        return pareto.front(usable, lambda t: (t.epsilon, -t.mean_accuracy, t.price.bytes_per_client))

    def to_toml(self) -> str:
        """The spec as TOML, with where it comes from in its first lines."""
        how = {
            "theory": f"the smallest value of {self.bounds.source}" if self.bounds else "a bound",
            "empirical": f"the best of {self.search.runs} runs" if self.search else "measured runs",
        }[self.mode]
        privacy = self.spec.privacy
        return (
            f"# Planned by `dither plan {self.spec.method}`: {how}, on {self.source}.\n"
            f"# The noise is set by the accountant when it runs: proven ε <= {privacy.epsilon:g} at δ = "
            f"{privacy.delta:g}, {self.spec.adjacency}, view {privacy.view}.\n" + self.spec.to_toml()
        )


def plan(
    what: Spec | str | Path | Mapping[str, Any],
    *,
    epsilon: float,
    delta: float = 1e-5,
    clients: int | None = None,
    records: int | None = None,
    model: str | None = None,
    dim: int | None = None,
    proxy: str = "",
    public_fraction: float = 0.0,
    mode: str = "auto",
    view: str = "upload",
    adjacency: str = "auto",
    values: Mapping[str, Any] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    constants: Mapping[str, float] | None = None,
    metric: str = "accuracy",
    seeds: int = 5,
    effort: str = "search",
    anyway: bool = False,
    extras: bool = True,
    data_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    keep: str | Path | None = None,
) -> Plan:
    """Choose T, K, Q, b, C, the learning rate and with them the noise, so that the bound (mode "theory") or the
    measured loss or accuracy on public records ("empirical") is best at a proven (ε, δ). "auto" takes the bound
    where it says anything, and measures where it does not.

    what             a method's name, a preset, a TOML file or a `Spec`; `values` are dotted keys on top
    records          private training records in all; counted where they are a share of `proxy`
    dim              parameters of a logistic model, where there is no proxy
    proxy            a data set of the catalogue, or a file, that is public
    public_fraction  share of the proxy's training records that is public; the plan is then for the others
    grid             values to try, by key; a knob among `values` is fixed
    constants        constants of the loss that are known, by name (see `Constants`)
    anyway           plan also where no signal can be left
    extras           also measure other budgets (the ε-accuracy frontier) and how long the chosen run takes
    keep             a folder where measured runs wait until the plan is made, so that an interrupted one goes on
    """
    if mode not in MODES:
        raise SpecError(f"mode={mode!r} is not one of {', '.join(map(repr, MODES))}")
    if metric not in ("accuracy", "loss"):
        raise SpecError(f"metric={metric!r} is not one of 'accuracy', 'loss'")
    if not 0 < epsilon < math.inf:
        raise SpecError(f"epsilon={epsilon} must be above 0 and finite: without a budget there is nothing to plan")
    check_given(constants or {})
    given = {key: tuple(values_) for key, values_ in (grid or {}).items()}
    base, fixed = base_spec(what, epsilon, delta, clients, model, view, adjacency, dict(values or {}), given)
    base, planned_on, num_records = material(base, records, dim, proxy, public_fraction, data_dir)
    smallest = smallest_client(base, num_records)
    first = planned_on.dataset
    counts = shapes.stand_in(num_records, first.x_train.shape[1], first.classes)
    counts = counts._replace(schema=first.schema, image_shape=first.image_shape)
    kept = Unfinished(keep, "plan", [base.digest(), shapes.digest(first)])
    job = _Job(base, planned_on, counts, smallest, fixed, metric, seeds, effort, anyway, extras, progress, kept)

    made: Plan | None = None
    notes: list[str] = []
    if mode == "auto" and "client_lr" in fixed:
        notes.append("client_lr is given, and a theorem sets its own")
    elif mode != "empirical" and base.method in theory.METHODS:
        made = job.by_theory(constants or {})
        if made.bounds is not None and made.bounds.vacuous:
            bound, gap = made.score, made.bounds.trivial
            notes.append(
                f"the bound is vacuous: {made.bounds.source} promises {bound:.3g} at best, and the initial model "
                f"is only {gap:.3g} above the minimum"
            )
    elif mode == "theory":
        raise SpecError(f"no convergence theorem for method={base.method!r}; use --mode empirical")
    if mode == "empirical" or (mode == "auto" and (made is None or notes)):
        if notes:
            notes.append("so the plan is by measurement instead")
        by_bound = made
        made = job.by_measurement()
        if by_bound is not None:
            made = replace(made, constants=by_bound.constants, prices=by_bound.prices, bounds=by_bound.bounds)
    assert made is not None  # noqa: S101  # one of the two modes has run
    if not planned_on.public:
        notes.append("planned on synthetic records: the choice is only as good as their likeness to yours")
    seconds = measured_seconds(made, planned_on) if extras else math.nan
    kept.done()
    return replace(made, notes=(*notes, *made.notes), seconds=seconds)


@dataclass(frozen=True)
class _Job:
    base: Spec
    material: Material
    counts: Dataset
    smallest: int
    fixed: Mapping[str, tuple[Any, ...]]
    metric: str
    seeds: int
    effort: str
    anyway: bool
    extras: bool
    progress: Callable[[str], None] | None
    kept: Unfinished

    def say(self, line: str) -> None:
        if self.progress:
            self.progress(line)

    def by_theory(self, known: Mapping[str, float]) -> Plan:
        base = self.base
        self.say(f"constants of the loss on {self.material.source}")
        found = estimate(base, self.material).with_given(known)
        if base.method == "secure-fedavg" and found.strong_convexity == 0:
            raise SpecError("Theorem 1 of secure-fedavg needs a strongly convex loss; set model.l2 above 0")
        if "client_lr" in self.fixed:
            raise SpecError(
                "client_lr is given, but a theorem sets its own rate; use --mode empirical, or leave it"
            )
        key = knobs.clip_key(base.method)
        given = {key: (theory.theory_clip(base, found),), **self.fixed, "client_lr": (1.0,)}
        tried = knobs.ranges(base, self.smallest, given, effort="quick" if self.effort == "quick" else "bound")
        points = knobs.points(base, tried, self.smallest)
        self.say(f"noise of {len(points)} points by the accountant")
        prices = self.affordable(points)
        bounds = theory.bounds(base, prices, found, self.smallest)
        best = bounds.best
        chosen = {name: float(column[best]) for name, column in bounds.values.items()}
        price = pricing.price(base, {**prices[best].point, **chosen}, self.counts)
        conditions = theory.conditions(base, price, found, chosen, self.smallest)
        return Plan(
            spec=price.spec,
            mode="theory",
            price=price,
            proven_epsilon=pricing.proven_epsilon(base, price.point, self.counts),
            source=self.material.source,
            notes=tuple(f"condition fails: {text}" for text, holds in conditions if not holds),
            constants=found,
            prices=prices,
            bounds=bounds,
            conditions=conditions,
        )

    def by_measurement(self) -> Plan:
        base = self.base
        tried = knobs.ranges(base, self.smallest, self.fixed, effort=self.effort)
        points = knobs.points(base, tried, self.smallest)
        own = self.own_setting()
        self.say(f"noise of {len(points)} points by the accountant")
        prices = self.affordable(points + ([own] if own else []))
        found = empirical.search(
            base,
            prices,
            self.material,
            counts=self.counts,
            smallest=self.smallest,
            fixed=tuple(self.fixed),
            metric=self.metric,
            seeds=self.seeds,
            progress=self.progress,
            kept=self.kept,
        )
        best = found.best
        return Plan(
            spec=best.price.spec,
            mode="empirical",
            price=best.price,
            proven_epsilon=pricing.proven_epsilon(base, best.price.point, self.counts),
            source=self.material.source,
            notes=(),
            search=found,
            frontier=self.other_budgets(found) if self.extras else [],
        )

    def other_budgets(self, found: Search) -> list[Trial]:
        """The best, and the best of those that send less, at other ε."""
        leanest = pareto.front(
            [trial for trial in found.trials if len(trial.accuracy) == len(found.best.accuracy)],
            lambda trial: (trial.price.bytes_per_client, -trial.score(self.metric)),
        )
        chosen = [found.best, *(trial for trial in leanest if trial is not found.best)][:3]
        self.say("the ε-accuracy frontier")
        epsilons = [share * self.base.privacy.epsilon for share in FRONTIER]
        return empirical.frontier(
            self.base,
            chosen,
            self.material,
            epsilons,
            self.counts,
            seeds=min(2, self.seeds),
            progress=self.progress,
            kept=self.kept,
        )

    def own_setting(self) -> Point | None:
        """The spec's own knobs as one more candidate, where they are free and feasible."""
        base = self.base
        if self.fixed or base.batch_size > self.smallest or base.num_rounds * base.local_steps > 2000:
            return None
        key = knobs.clip_key(base.method)
        clip = base.method_options["param_clip"] if base.method == "nbafl" else base.privacy.clip_norm
        point = {name: getattr(base, name) for name in (*knobs.WHOLE, "client_lr")} | {key: clip}
        return knobs.completed(base, point, math.nan, self.smallest)

    def affordable(self, points: list[Point]) -> list[Price]:
        """Priced points; refused where there is none, or where noise drowns the longest signal at all of them."""
        base = self.base
        prices, reasons = pricing.priced(base, points, self.counts)
        if not prices:
            raise Impossible(
                f"no noise has a proven ε at any of {len(points)} points: {'; '.join(reasons)}; nearest feasible: "
                "another --adjacency or --view, or --set batch_sampling"
            )
        best = max(prices, key=lambda price: price.signal_to_noise)
        if best.signal_to_noise < _ENOUGH_SIGNAL and not self.anyway:
            raise Impossible(self.drowned(best))
        return prices

    def drowned(self, best: Price) -> str:
        """In words: what ε = E leaves, and the nearest ε and number of clients that leave a signal."""
        base, epsilon = self.base, self.base.privacy.epsilon
        nearest = epsilon
        for _ in range(40):
            nearest *= 1.25
            asked = base.with_values({"privacy.epsilon": nearest})
            if pricing.price(asked, best.point, self.counts).signal_to_noise >= _ENOUGH_SIGNAL:
                break
        else:
            nearest = math.inf
        clients = math.ceil(base.num_clients / best.signal_to_noise**2)
        chosen = ", ".join(f"{name}={best.point[name]:g}" for name in (*knobs.WHOLE, knobs.clip_key(base.method)))
        return (
            f"proven ε={epsilon:g} leaves no signal: at the best point tried ({chosen}) the noise in the model is "
            f"{1 / best.signal_to_noise:.3g} times as long as the longest signal; nearest feasible: epsilon="
            f"{nearest:.2g}, or about {clients:,} clients of {self.smallest} records (--anyway plans all the same)"
        )


def measured_seconds(made: Plan, material: Material) -> float:
    """How long the chosen run takes when it is simulated here, compilation included: it is run once."""
    spec = shapes.rehearsal(made.spec).with_values({"eval_every": made.spec.num_rounds})
    began = time.perf_counter()
    train_specs([spec], dataset=material.dataset)
    return time.perf_counter() - began


def by_knob(points: Sequence[Point], scores: np.ndarray, key: str, *, smaller: bool) -> list[tuple[float, float]]:
    """(value, the best score over all other knobs) of one knob."""
    best: dict[float, float] = {}
    for point, score in zip(points, scores, strict=True):
        value = float(point[key])
        if math.isfinite(score):
            pick = min if smaller else max
            best[value] = pick(best.get(value, float(score)), float(score))
    return sorted(best.items())
