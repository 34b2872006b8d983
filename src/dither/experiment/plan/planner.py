"""`plan`: rounds, cohort, local steps, batch, clip and learning rate for a proven budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dither.data import Dataset
from dither.errors import SpecError
from dither.experiment import plots
from dither.experiment.folder import Unfinished
from dither.experiment.plan import bounds as theory
from dither.experiment.plan import candidates as space
from dither.experiment.plan.bounds import BoundGrid, ProblemConstants
from dither.experiment.plan.candidates import Candidate, Infeasible, Point, Search, Trainer, Trial
from dither.experiment.plan.records import (
    PlanningData,
    base_spec,
    counts_only,
    digest,
    planned_gaps,
    planning_data,
    smallest_client,
)
from dither.experiment.report import Overview, bytes_text, claim_text
from dither.experiment.sweep.batches import train_specs
from dither.methods import Condition
from dither.spec import Spec
from dither.types import ADVERSARIES, epsilon_text

MODES = ("auto", "theory", "empirical")
OTHER_BUDGETS = (0.25, 0.5, 2.0, 4.0)  # of the ε-accuracy frontier, in multiples of the asked ε
_ENOUGH_SIGNAL = 1.0


@dataclass(frozen=True, repr=False)
class Plan(Overview):
    """The choice, its reason, and everything it was compared with."""

    spec: Spec  # ready for `dither run`
    mode: str  # what decided: "theory" or "empirical"
    candidate: Candidate
    proven_epsilon: float
    source: str  # of the records that were planned on
    notes: tuple[str, ...] = ()
    constants: ProblemConstants | None = None
    candidates: list[Candidate] = field(default_factory=list)  # of the theory grid
    bounds: BoundGrid | None = None
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

    def title(self) -> str:
        how = "by its theorem" if self.mode == "theory" else "measured on the proxy"
        return f"Plan for {self.spec.method}, {how}"

    def overview(self) -> list[tuple[str, str]]:
        """The choice, its score, its ε, and what it was planned on."""
        chosen, claim, privacy = self.candidate, self.candidate.claimed, self.spec.privacy
        lines = [(label, text) for label, text in chosen.labelled().items() if label != "per client"]
        further = ("lr_decay", "method_options.proximal")
        lines += [(key, f"{chosen.point[key]:.4g}") for key in further if key in chosen.point]
        if self.mode == "theory" and self.bounds is not None:
            gap = f"initial gap {self.bounds.trivial:.4g}"
            lines.append(("bound", f"{self.score:.4g} ({self.bounds.source}); {gap}"))
        elif self.search is not None:
            best = self.search.best
            seeds = f"{len(best.accuracy)} seeds, which also chose it"
            measured = f"accuracy {best.accuracy_text()}, loss {best.mean_loss:.4f} ({seeds})"
            lines.append(("on the proxy", measured))
            lines.append(("search", f"{self.search.runs} runs in {self.search.seconds:.0f} s"))
        noise = f"{chosen.noise_std:.4g}"
        if not math.isnan(chosen.printed_noise_std):
            noise += f"; the paper's formula adds {chosen.printed_noise_std:.4g}"
        relation = f"{self.spec.adjacency}, against {ADVERSARIES[privacy.view]}"
        traffic = f"{bytes_text(chosen.bytes_per_client)} sent and received"
        lines += [
            ("noise std", noise),
            ("claimed ε", claim_text(claim)),
            (
                "proven ε",
                f"{epsilon_text(self.proven_epsilon, digits=4)} per run, δ = {privacy.delta:g}, {relation}",
            ),
            *(("not covered", text) for text in planned_gaps(self.spec)),
            ("uploads", f"{chosen.uploads:.4g} per client, {traffic}"),
        ]
        if not math.isnan(self.seconds):
            lines.append(("time", f"{self.seconds:.1f} s simulated here, compilation included"))
        return [*lines, ("planned on", self.source), *(("note", note) for note in self.notes)]

    def terms(self) -> dict[str, float]:
        """The terms of the bound at the choice of the theorem."""
        if self.bounds is None:
            return {}
        return {name: float(column[self.bounds.best]) for name, column in self.bounds.terms.items()}

    def alternatives(self) -> list[dict[str, str]]:
        """The choice first, then points that differ from it in one key (theory) or came next (measured)."""

        def line(candidate: Candidate, **score: str) -> dict[str, str]:
            noise = f"{candidate.noise_std:.4g}"
            claimed = epsilon_text(candidate.claimed.value, "nearest")
            return {**candidate.labelled(), "claimed ε": claimed, "noise std": noise, **score}

        if self.mode == "empirical" and self.search is not None:
            return [line(trial.candidate, accuracy=trial.accuracy_text()) for trial in self.search.trials[:8]]
        if self.bounds is None:
            return []
        chosen, total = self.candidates[self.bounds.best].point, self.bounds.total
        one_off = [
            number
            for number, candidate in enumerate(self.candidates)
            if sum(candidate.point[key] != chosen[key] for key in chosen if key != "batch_sampling") <= 1
        ]
        rates = self.bounds.values.get("client_lr")
        return [
            line(self.candidates[number], bound=f"{total[number]:.4g}")
            | {"learning rate": "" if rates is None else f"{rates[number]:.4g}"}
            for number in sorted(one_off, key=lambda number: total[number])[:9]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what `dither plan --json` prints."""
        chosen, constants = self.candidate, self.constants
        return {
            "method": self.spec.method,
            "mode": self.mode,
            "choice": chosen.point,
            "score": self.score,
            "proven_epsilon": self.proven_epsilon,
            "claimed_epsilon": {"value": chosen.claimed.value, "unit": chosen.claimed.unit},
            "noise_std": chosen.noise_std,
            "printed_noise_std": chosen.printed_noise_std,
            "uploads_per_client": chosen.uploads,
            "bytes_per_client": chosen.bytes_per_client,
            "predicted_seconds": self.seconds,
            "signal_to_noise": chosen.signal_to_noise,
            "terms": self.terms(),
            "constants": {
                name: {"value": getattr(constants, name), "source": source}
                for name, source in (constants.sources.items() if constants else ())
            },
            "neighbours": self.alternatives(),
            "pareto": [
                {
                    "epsilon": trial.epsilon,
                    "accuracy": trial.mean_accuracy,
                    "bytes_per_client": trial.candidate.bytes_per_client,
                    "choice": trial.candidate.point,
                }
                for trial in self.pareto()
            ],
            "source": self.source,
            "notes": self.notes,
            "not_covered": planned_gaps(self.spec),
            "spec": self.spec.to_dict(),
        }

    def pareto(self) -> list[Trial]:
        """Measured candidates that no other beats in accuracy, ε and bytes at once."""
        trials = [*(self.search.trials if self.search else []), *self.frontier]
        usable = [trial for trial in trials if len(trial.accuracy) > 1]
        return space.pareto_front(usable, lambda t: (t.epsilon, -t.mean_accuracy, t.candidate.bytes_per_client))

    def to_toml(self) -> str:
        """The spec as TOML; the first lines say where it comes from."""
        reason = f"the smallest value of {self.bounds.source}" if self.bounds else ""
        if self.mode == "empirical" and self.search:
            reason = f"the best of {self.search.runs} runs"
        privacy = self.spec.privacy
        return (
            f"# Planned by `dither plan {self.spec.method}`: {reason}, on {self.source}.\n"
            f"# The accountant sets the noise when it runs: proven ε <= {privacy.epsilon:.15g} at δ = "
            f"{privacy.delta:g}, {self.spec.adjacency}, view {privacy.view}.\n" + self.spec.to_toml()
        )


# reason: a public function: its options are independent, and most lines are signature and docstring
def plan(
    what: Spec | str | Path | Mapping[str, Any],
    *,
    epsilon: float,
    delta: float = 1e-5,
    clients: int | None = None,
    records: int | None = None,
    model: Any = None,
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
    """Choose rounds, cohort, local steps, batch, clip and learning rate, and with them the noise, so that the
    bound (mode "theory") or the accuracy or loss on public records ("empirical") is best at a proven (ε, δ).
    "auto" uses the bound unless it is vacuous, and measures otherwise.

    Args:
        what: The name of a method or preset, a TOML file or a `Spec`.
        values: Dotted keys that are set on top of it. A key given here is fixed.
        records: The number of private training records; counted if they are a share of `proxy`.
        dim: The number of parameters of a logistic model, if there is no proxy.
        proxy: A public data set: a name of the catalogue, or a file.
        public_fraction: The share of the proxy's training records that is public; the plan is for the others.
        grid: Values to try, by key.
        constants: Known constants of the loss, by name (see `ProblemConstants`).
        anyway: Plan even if the noise hides all signal.
        extras: Also measure other budgets (the ε-accuracy frontier) and the time of the chosen run.
        keep: A folder for measured runs until the plan is complete, so that interrupted plans continue.
    """
    if mode not in MODES:
        raise SpecError(f"mode={mode!r} is not one of {', '.join(map(repr, MODES))}")
    if metric not in ("accuracy", "loss"):
        raise SpecError(f"metric={metric!r} is not one of 'accuracy', 'loss'")
    if not 0 < epsilon < math.inf:
        raise SpecError(f"epsilon={epsilon} must be above 0 and finite: without a budget there is nothing to plan")
    theory.check_given(constants or {})
    facts = {
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "privacy.view": view,
        "privacy.adjacency": None if adjacency == "auto" else adjacency,
        "num_clients": clients,
        "model.name": model,
    }
    given = {key: tuple(column) for key, column in (grid or {}).items()}
    base, fixed = base_spec(what, facts, values or {}, given)
    base, planning, num_records = planning_data(base, records, dim, proxy, public_fraction, data_dir)
    dataset = planning.dataset
    if not dataset.classes:
        raise SpecError("plans are for classes, but the label is a number; choose the values by dither sweep")
    counts = counts_only(num_records, dataset.x_train.shape[1], dataset.classes)
    counts = counts._replace(schema=dataset.schema, image_shape=dataset.image_shape)
    partial = Unfinished(keep, "plan", [base.digest(), digest(dataset)])
    trainer = Trainer(dataset, partial, progress or (lambda line: None))
    smallest = smallest_client(base, num_records)
    planner = _Planner(base, planning, counts, smallest, fixed, metric, seeds, effort, anyway, extras, trainer)
    chosen = planner.choose(mode, constants or {})
    partial.done()
    return chosen


@dataclass(frozen=True)
class _Planner:
    base: Spec
    planning: PlanningData
    counts: Dataset
    smallest: int  # records of the smallest client
    fixed: Mapping[str, tuple[Any, ...]]
    metric: str
    seeds: int
    effort: str
    anyway: bool
    extras: bool
    trainer: Trainer

    def choose(self, mode: str, given: Mapping[str, float]) -> Plan:
        """The plan by the bound where it says something, otherwise by measurement."""
        by_bound: Plan | None = None
        notes: list[str] = []
        if mode == "auto" and "client_lr" in self.fixed:
            notes.append("client_lr is given, but a theorem sets its own")
        elif mode != "empirical" and self.base.method in theory.METHODS:
            by_bound = self.by_theory(given)
            if by_bound.bounds is not None and by_bound.bounds.vacuous:
                notes.append(
                    f"the bound is vacuous: {by_bound.bounds.source} promises {by_bound.score:.3g} at best, and "
                    f"the initial model is only {by_bound.bounds.trivial:.3g} above the minimum"
                )
        elif mode == "theory":
            raise SpecError(f"no convergence theorem for method={self.base.method!r}; use --mode empirical")
        if by_bound is not None and (mode == "theory" or not notes):
            chosen = by_bound
        else:
            if notes:
                notes.append("so the plan is by measurement instead")
            chosen = self.by_measurement()
            if by_bound is not None:
                kept = {name: getattr(by_bound, name) for name in ("constants", "candidates", "bounds")}
                chosen = replace(chosen, **kept)
        if not self.planning.public:
            notes.append("planned on synthetic records: the choice is only as good as their resemblance to yours")
        seconds = math.nan
        if self.extras:  # the time of the chosen run when it is simulated here, compilation included
            spec, started = space.proxy_spec(chosen.spec), time.perf_counter()
            train_specs([spec.with_values({"eval_every": spec.num_rounds})], dataset=self.planning.dataset)
            seconds = time.perf_counter() - started
        if chosen.spec.data.features != "all":
            notes.append(
                f"data.features={chosen.spec.data.features!r}, as the preset has it: other columns are not used, "
                "and a model of all of them may be better (--set data.features=all)"
            )
        if chosen.spec.data.public_fraction:
            share = f"{1 - chosen.spec.data.public_fraction:.0%}"
            notes.append(
                f"the plan trains on the private {share} of the records; a run on all of them may be better"
            )
        return replace(chosen, notes=(*notes, *chosen.notes), seconds=seconds)

    def by_theory(self, given: Mapping[str, float]) -> Plan:
        base = self.base
        self.trainer.say(f"constants of the loss on {self.planning.source}")
        constants = theory.estimate(base, self.planning).with_given(given)
        if base.method == "secure-fedavg" and constants.strong_convexity == 0:
            raise SpecError("Theorem 1 of secure-fedavg needs a strongly convex loss; set model.l2 above 0")
        if "client_lr" in self.fixed:
            raise SpecError(
                "client_lr is given, but a theorem sets its own rate; use --mode empirical, or leave it out"
            )
        clip = {space.clip_key(base.method): (theory.theory_clip(base, constants),)}
        effort = "quick" if self.effort == "quick" else "bound"
        candidates = self.candidates({**clip, **self.fixed, "client_lr": (1.0,)}, effort)
        bounds = theory.bounds(base, candidates, constants, self.smallest)
        values = {name: float(column[bounds.best]) for name, column in bounds.values.items()}
        best = space.candidate(base, {**candidates[bounds.best].point, **values}, self.counts)
        conditions = theory.conditions(base, best, constants, values, self.smallest)
        return Plan(
            spec=best.spec,
            mode="theory",
            candidate=best,
            proven_epsilon=space.proven_epsilon(base, best.point, self.counts),
            source=self.planning.source,
            notes=tuple(f"condition fails: {text}" for text, holds in conditions if not holds),
            constants=constants,
            candidates=candidates,
            bounds=bounds,
            conditions=conditions,
        )

    def by_measurement(self) -> Plan:
        def near(point: Point) -> list[Candidate]:
            moved = space.neighbours(self.base, point, self.smallest, self.fixed)
            return space.affordable(self.base, moved, self.counts)[0]

        base, own = self.base, []
        if not self.fixed and base.batch_size <= self.smallest and base.num_rounds * base.local_steps <= 2000:
            # The spec's own values are one more candidate.
            clip = base.method_options["param_clip"] if base.method == "nbafl" else base.privacy.clip_norm
            point = {key: getattr(base, key) for key in (*space.INTEGER_KEYS, "client_lr")}
            point[space.clip_key(base.method)] = clip
            own = [space.completed(base, point, math.nan, self.smallest)]
        candidates = self.candidates(self.fixed, self.effort, own)
        result = space.search(self.trainer, candidates, near, metric=self.metric, seeds=self.seeds)
        best = result.best.candidate
        if self.extras:
            result = replace(result, without_noise=self.trainer.without_noise(result.best))
        return Plan(
            spec=best.spec,
            mode="empirical",
            candidate=best,
            proven_epsilon=space.proven_epsilon(self.base, best.point, self.counts),
            source=self.planning.source,
            search=result,
            frontier=self.frontier(result) if self.extras else [],
        )

    def frontier(self, result: Search) -> list[Trial]:
        """The best candidate, and the best of those that send less, at other ε."""
        leanest = space.pareto_front(
            [trial for trial in result.trials if len(trial.accuracy) == len(result.best.accuracy)],
            lambda trial: (trial.candidate.bytes_per_client, -trial.score(self.metric)),
        )
        chosen = [result.best, *(trial for trial in leanest if trial is not result.best)][:3]
        self.trainer.say("the ε-accuracy frontier")
        trials = []
        for factor in OTHER_BUDGETS:
            base = self.base.with_values({"privacy.epsilon": factor * self.base.privacy.epsilon})
            same = space.affordable(base, [trial.candidate.point for trial in chosen], self.counts)[0]
            trials += [Trial(each) for each in same]
        return self.trainer.run(trials, range(min(2, self.seeds)))

    def candidates(
        self, given: Mapping[str, tuple[Any, ...]], effort: str, more: Sequence[Point] = ()
    ) -> list[Candidate]:
        """Points with their noise. Refuses if none has a proof, or if noise hides the signal at all of them."""
        base = self.base
        grid = space.points(base, self.smallest, given, effort=effort)
        self.trainer.say(f"the accountant sets the noise of {len(grid)} points")
        candidates, reasons = space.affordable(base, [*grid, *more], self.counts)
        if not candidates:
            raise Infeasible(
                f"no noise has a proven ε at any of {len(grid)} points: {'; '.join(reasons)}; nearest feasible: "
                "another --adjacency or --view, or --set batch_sampling"
            )
        best = max(candidates, key=lambda each: each.signal_to_noise)
        if best.signal_to_noise < _ENOUGH_SIGNAL and not self.anyway:
            raise Infeasible(self.drowned(best))
        return candidates

    def drowned(self, best: Candidate) -> str:
        """The message for a budget that leaves no signal, with the nearest ε and number of clients that do."""
        base, epsilon = self.base, self.base.privacy.epsilon
        nearest = epsilon
        for _ in range(40):
            nearest *= 1.25
            asked = base.with_values({"privacy.epsilon": nearest})
            if space.candidate(asked, best.point, self.counts).signal_to_noise >= _ENOUGH_SIGNAL:
                break
        else:
            nearest = math.inf
        clients = math.ceil(base.num_clients / best.signal_to_noise**2)
        chosen = ", ".join(
            f"{key}={best.point[key]:g}" for key in (*space.INTEGER_KEYS, space.clip_key(base.method))
        )
        return (
            f"proven ε={epsilon:.15g} leaves no signal: at the best point tried ({chosen}) the noise in the model "
            f"is {1 / best.signal_to_noise:.3g} times as long as the longest signal; nearest feasible: epsilon="
            f"{nearest:.2g}, or about {clients:,} clients of {self.smallest} records (--anyway plans regardless)"
        )


# The picture

_FAR = 20.0  # above so many times the initial gap, bounds are drawn without its line


def draw_plan(plan: Plan, path: Path) -> None:
    """Bound or accuracy against each hyperparameter, with the choice marked, and the ε-accuracy frontier."""
    bounds = plan.bounds if plan.mode == "theory" else None
    trials = plan.search.trials if plan.search else []
    if bounds is not None:
        tried, scores, label = plan.candidates, list(bounds.total), "bound"
        reason = f"{bounds.source}, initial gap {bounds.trivial:.3g}"
    else:
        tried, label = [trial.candidate for trial in trials], "accuracy on the proxy"
        scores = [trial.mean_accuracy for trial in trials]
        reason = f"{plan.search.runs} measured runs" if plan.search else ""
    keys = [*space.INTEGER_KEYS, space.clip_key(plan.spec.method), *([] if bounds is not None else ["client_lr"])]
    errors = [0.0] * len(tried) if bounds is not None else [trial.standard_error for trial in trials]
    better = min if bounds is not None else max
    curves = {key: _best_by_value(tried, zip(scores, errors, strict=True), key, better) for key in keys}
    curves = {key: curve for key, curve in curves.items() if len(curve) > 1}
    count = len(curves) + bool(plan.frontier)
    columns = 2 if count in (2, 4) else min(3, max(1, count))
    rows = math.ceil(max(1, count) / columns)
    figure, axes = plots.new_figure(rows, columns, width=3.4 * columns, height=2.7 * rows + 0.6)
    panels = list(axes.flat)
    shown = [score for curve in curves.values() for _, score, _ in curve]
    for axis, (key, curve) in zip(panels, curves.items(), strict=False):
        _draw_curve(axis, curve, float(plan.candidate.point[key]))
        _label(axis, space.LABELS[key], f"best {label}")
        if bounds is None:
            plots.score_axis(axis, [*shown, *(trial.mean_accuracy for trial in plan.frontier)], _references(plan))
            continue
        axis.set_yscale("log")
        axis.set_ylim(0.8 * min(shown), 1.25 * max(shown))  # the same for all panels
        if plan.score <= _FAR * bounds.trivial:  # else the line would flatten the curves
            axis.set_ylim(0.8 * min(*shown, bounds.trivial), 1.25 * max(*shown, bounds.trivial))
            axis.axhline(bounds.trivial, color=plots.GREY, linestyle=":", linewidth=1)
            axis.annotate(
                "initial gap", (0.98, bounds.trivial), xycoords=("axes fraction", "data"), ha="right",
                va="bottom", fontsize=7, color=plots.GREY,
            )  # fmt: skip
    if plan.frontier:
        _draw_frontier(panels[len(curves)], plan)
    for axis in panels[count:]:
        axis.set_visible(False)
    privacy = plan.spec.privacy
    what = f"proven ε ≤ {privacy.epsilon:.15g} (δ = {privacy.delta:g}, {plan.spec.adjacency}, against "
    bars = "; bars: ± standard error" if bounds is None else ""
    plots.headline(
        figure,
        f"Plan for {plan.spec.method} over {plan.spec.num_clients} clients ({reason})",
        f"{what}{ADVERSARIES[privacy.view]}){bars}",
    )
    plots.save(figure, path)


def _best_by_value(
    tried: Sequence[Candidate],
    scores: Iterable[tuple[float, float]],
    key: str,
    better: Callable[..., tuple[float, float]],
) -> list[tuple[float, float, float]]:
    """The values of one key, each with the best score over all others and its standard error."""
    best: dict[float, tuple[float, float]] = {}
    for each, score in zip(tried, scores, strict=True):
        value = float(each.point[key])
        if math.isfinite(score[0]):
            best[value] = better(best.get(value, score), score, key=lambda pair: pair[0])
    return [(value, *best[value]) for value in sorted(best)]


def _draw_curve(axis: Any, curve: list[tuple[float, float, float]], chosen: float) -> None:
    values, best, errors = zip(*curve, strict=True)
    bars = [0.0 if math.isnan(error) else error for error in errors]
    axis.errorbar(values, best, bars, color=plots.BLUE, marker="o", markersize=3.5, linewidth=1.4, capsize=2)
    _star(axis, *min(curve, key=lambda point: abs(math.log(point[0] / chosen)))[:2])
    axis.set_xscale("log")
    if len(values) <= 6:
        axis.set_xticks(values, [f"{value:,.4g}" for value in values])
        axis.minorticks_off()


def _draw_frontier(axis: Any, plan: Plan) -> None:
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for trial in [*([plan.search.best] if plan.search else []), *plan.frontier]:
        traffic = f"{bytes_text(trial.candidate.bytes_per_client)} per client"
        error = 0.0 if math.isnan(trial.standard_error) else trial.standard_error
        lines.setdefault(traffic, []).append((trial.epsilon, trial.mean_accuracy, error))
    for (name, line), colour in zip(lines.items(), (plots.BLUE, plots.ORANGE, plots.GREEN), strict=False):
        x, y, bars = zip(*sorted(line), strict=True)
        axis.errorbar(x, y, bars, color=colour, marker="o", markersize=3.5, linewidth=1.2, capsize=2, label=name)
    measured = [point[:2] for line in lines.values() for point in line]
    plots.score_axis(axis, [accuracy for _, accuracy in measured], _references(plan))
    _star(axis, *max((point for point in measured if point[0] == plan.spec.privacy.epsilon), key=lambda p: p[1]))
    axis.set_xscale("log")
    ticks = sorted({epsilon for epsilon, _ in measured})
    axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axis.minorticks_off()
    _label(axis, "proven ε", "accuracy on the proxy")
    axis.legend(frameon=False, fontsize=7, title="sent and received", title_fontsize=7)


def _references(plan: Plan) -> dict[str, float]:
    if plan.search is None:
        return {}
    return {"most frequent class": plan.search.trivial, "the choice without noise": plan.search.without_noise}


def _star(axis: Any, x: float, y: float) -> None:
    axis.plot(x, y, marker="*", markersize=13, color=plots.VERMILION, linestyle="none", zorder=3)


def _label(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.tick_params(labelsize=8)
