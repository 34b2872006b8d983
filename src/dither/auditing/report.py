"""The report of an audit: rows, audit.json, and pictures of the ROC and of attacked ε against trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.accounting import ProvenRow
from dither.auditing import bounds
from dither.experiment import folder, plots
from dither.experiment.build import Experiment
from dither.experiment.report import Overview, decode, encode
from dither.spec import Spec
from dither.types import ADVERSARIES, epsilon_text

_COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.VERMILION, plots.GREY)
_LIMITS = (("claimed", "--"), ("proven", "-."))  # and their line styles
_VIEW_NAMES = {"upload": "every upload", "sum": "sums", "broadcast": "broadcasts", "final": "final model"}


class AttackResult(NamedTuple):
    """What the attack on one view found."""

    view: str
    unit: str
    design: str  # the pair of neighbouring data sets
    rounds: int
    bounds: list[bounds.LowerBound]
    scores_in: np.ndarray
    scores_out: np.ndarray
    thresholds: list[bounds.Threshold]
    mu_thresholds: list[bounds.Threshold]  # empty if the trade-off is not a Gaussian's

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> AttackResult:
        """The result whose `_asdict()` was written as JSON."""
        return decode(cls, values, {name: np.asarray(values[name]) for name in ("scores_in", "scores_out")})

    def label(self) -> str:
        """The view in a legend."""
        name = "one upload" if self.unit == "message" else _VIEW_NAMES[self.view]
        return f"{name} ({self.design})" if self.unit == "one run" else name

    def curve(self, delta: float, confidence: float) -> tuple[ReachedEpsilon, ...]:
        """Attacked ε from the first trials, for the picture of ε against trials."""
        steps = []
        count = len(self.scores_in) if self.thresholds else 0
        while count >= 100:
            scores = self.scores_in[:count], self.scores_out[:count]
            counted = bounds.count_bound(scores, self.thresholds, delta=delta, confidence=confidence)
            gaussian = None
            if self.mu_thresholds:
                gaussian = bounds.mu_bound(scores, self.mu_thresholds, delta=delta, confidence=confidence).value
            steps.append(ReachedEpsilon(count, counted.value, gaussian))
            count //= 2
        return tuple(steps[::-1])


@dataclass(frozen=True)
class ReachedEpsilon:
    """Attacked ε from so many trials, by counts and, for a Gaussian trade-off, in the mu-GDP form."""

    trials: int
    counts: float
    mu: float | None = None


@dataclass(frozen=True)
class AuditRow:
    """What was attacked, proved and claimed for one adversary, and the verdict."""

    view: str
    unit: str
    adjacency: str
    delta: float
    claimed: float | None  # None if the paper's ε is not meant for this adversary
    proven: float
    recipe: str
    assumed: bool
    not_covered: tuple[str, ...]
    attacked: bounds.LowerBound  # the largest of `bounds`
    bounds: tuple[bounds.LowerBound, ...]
    design: str
    rounds: int
    refutes_claim: bool
    verdict: str  # "VIOLATION", "beyond a proof that rests on an assumption" or "within the proof"
    reached: tuple[ReachedEpsilon, ...]

    @property
    def violated(self) -> bool:
        """Whether the attacked ε exceeds the proven one, which rests on no assumption."""
        return self.verdict == "VIOLATION"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as audit.json has them."""
        attacked = self.attacked._asdict()
        del attacked["delta"]
        each = [bound._asdict() for bound in self.bounds]
        return {**encode(self), "attacked": attacked, "bounds": each}


@dataclass(frozen=True, repr=False)
class Audit(Overview):
    """An audit's outcome. `results` keep the scores for pictures."""

    spec: Spec
    confidence: float
    claimed: dict[str, Any]
    rows: list[AuditRow]
    notes: list[str]
    results: list[AttackResult] = field(default_factory=list)

    @property
    def violations(self) -> list[AuditRow]:
        """Rows whose attacked ε exceeds the proven one: a bug in the method, its noise or the accountant."""
        return [row for row in self.rows if row.violated]

    @property
    def refuted(self) -> list[AuditRow]:
        """Rows whose attacked ε exceeds the paper's claim."""
        return [row for row in self.rows if row.refutes_claim]

    def title(self) -> str:
        return f"{self.spec.method}: attacked ε with {self.confidence:.4g} confidence"

    def overview(self) -> list[tuple[str, str]]:
        """One line for each attack: what it showed, and what was proved and claimed."""
        lines = []
        for row in self.rows:
            shown, proven = epsilon_text(row.attacked.value, "down"), epsilon_text(row.proven)
            claimed = "" if row.claimed is None else f", claimed {epsilon_text(row.claimed, 'nearest')}"
            adversary = "a server that sees one upload" if row.unit == "message" else ADVERSARIES[row.view]
            verdict = row.verdict + (", refutes the claim" if row.refutes_claim else "")
            lines.append((adversary, f"at least {shown}, proven {proven}{claimed}: {verdict}"))
        return lines

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, without the scores."""
        return {
            "method": self.spec.method,
            "spec": self.spec.to_dict(),
            "confidence": self.confidence,
            "claimed": self.claimed,
            "rows": [row.to_dict() for row in self.rows],
            "notes": self.notes,
        }


def report_row(
    result: AttackResult, experiment: Experiment, proven: list[ProvenRow], claim: dict[str, Any], confidence: float
) -> AuditRow:
    """A result with what is proved for the same view, and the verdict."""
    adjacency, delta = experiment.spec.adjacency, experiment.spec.privacy.delta
    unit = "run" if result.unit == "one run" else result.unit
    proof = next(
        row
        for row in proven
        if row.view == result.view and row.adjacency == adjacency and row.unit.split(",")[0] == unit
    )
    best = max(result.bounds, key=lambda b: b.value)
    alike = claim["unit"] == unit and claim["adjacency"] == adjacency and claim["delta"] <= delta
    claimed = claim["value"] if alike and _claim_covers(result, experiment) else None
    beyond = "beyond a proof that rests on an assumption" if proof.assumed else "VIOLATION"
    return AuditRow(
        view=result.view,
        unit=result.unit,
        adjacency=adjacency,
        delta=delta,
        claimed=claimed,
        proven=proof.value,
        recipe=proof.recipe,
        assumed=proof.assumed,
        not_covered=proof.not_covered,
        attacked=best._replace(confidence=confidence),
        bounds=tuple(result.bounds),
        design=result.design,
        rounds=result.rounds,
        refutes_claim=claimed is not None and best.value > claimed,
        verdict=beyond if best.value > proof.value * (1 + 1e-6) else "within the proof",
        reached=result.curve(delta, best.confidence),
    )


def _claim_covers(result: AttackResult, experiment: Experiment) -> bool:
    """Whether the paper's ε is meant for this adversary: claims that credit the others' noise are for sums,
    NbAFL's is for an outsider who sees L uploads."""
    options = experiment.spec.method_options
    if options.get("aggregation_credit") or options.get("equal_credit") or "credited_clients" in options:
        return result.view != "upload"
    exposures = experiment.plan.exposures
    return not exposures or result.view in ("broadcast", "final") or result.rounds <= exposures


# Files


def save(report: Audit, directory: Path) -> list[Path]:
    """Write audit.json, audit-roc.png and audit-trials.png; returns what was written."""
    paths = [directory / "audit.json", directory / "audit-roc.png", directory / "audit-trials.png"]
    folder.write_text(paths[0], folder.to_json(report.to_dict(), indent=2) + "\n")
    draw_roc(report, paths[1])
    return paths if draw_trials(report, paths[2]) else paths[:2]


def draw_roc(report: Audit, path: Path) -> None:
    """True against false positive rate of each view, with the most that the claim and the proof allow."""
    figure, axes = plots.new_figure(1, 1, width=5.2, height=4.4)
    axis = axes[0][0]
    trials = [len(result.scores_in) for result in report.results]
    floor = 1 / (2 * max(trials))
    grid = np.geomspace(floor, 1.0, 400)
    for result, colour in zip(report.results, _COLOURS, strict=False):
        # Between two points of the curve lies a straight line, which log axes would bend.
        true_rates = np.interp(grid, *roc(result.scores_in, result.scores_out))
        axis.plot(grid, true_rates, color=colour, linewidth=1.6, label=result.label())
    axis.plot(grid, grid, color=plots.GREY, linewidth=0.8, linestyle=":", label="a guess")
    # One line a distinct limit: (ε, δ)-DP allows TPR <= e^ε FPR + δ.
    for name, style in _LIMITS:
        for epsilon, delta in _limits(report, name):
            if math.isfinite(epsilon) and epsilon < 200:
                allowed = np.minimum(1.0, math.exp(epsilon) * grid + delta)
                axis.plot(grid, allowed, style, color="black", linewidth=1.0, label=_limit_text(name, epsilon))
    axis.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1.1))
    axis.set_xlabel("false positive rate")
    axis.set_ylabel("true positive rate")
    axis.legend(frameon=False, fontsize=7.5, loc="lower right")
    axis.set_title(f"{report.spec.method}: {min(trials):,} trials with and without", fontsize=10, loc="left")
    plots.save(figure, path)


def _limits(report: Audit, name: str) -> list[tuple[float, float]]:
    """The two smallest claimed or proven (ε, δ)."""
    values = ((getattr(row, name), row.delta) for row in report.rows)
    return sorted({(epsilon, delta) for epsilon, delta in values if epsilon is not None})[:2]


def _limit_text(name: str, epsilon: float) -> str:
    return f"{name} ε = {epsilon_text(epsilon, 'up' if name == 'proven' else 'nearest')}"


def draw_trials(report: Audit, path: Path) -> bool:
    """Attacked ε against trials, with claim and proof. False if no view has a curve."""
    curves = [(r, row.reached) for r, row in zip(report.results, report.rows, strict=True) if row.reached]
    if not curves:
        return False
    figure, axes = plots.new_figure(1, 1, width=5.2, height=4.0)
    axis = axes[0][0]
    top = 0.0
    for (result, steps), colour in zip(curves, _COLOURS, strict=False):
        trials = [step.trials for step in steps]
        for form, style, name in (("counts", "-o", "counts"), ("mu", "--o", "mu-GDP form")):
            values = [getattr(step, form) for step in steps]
            if None not in values:
                top = max(top, *values)
                axis.plot(trials, values, style, color=colour, markersize=3, label=f"{result.label()}, {name}")
    for name, style in _LIMITS:
        for epsilon, _ in _limits(report, name):
            label = _limit_text(name, epsilon)
            if epsilon <= 4 * max(top, 0.25):
                axis.axhline(epsilon, color="black", linewidth=1.0, linestyle=style, label=label)
            else:
                axis.plot([], [], " ", label=f"{label}, above the axis")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("trials with the record, and as many without")
    axis.set_ylabel(f"attacked ε, {report.confidence:.0%} confidence")
    axis.legend(frameon=False, fontsize=7.5)
    axis.set_title(f"{report.spec.method}: attacked ε by number of trials", fontsize=10, loc="left")
    plots.save(figure, path)
    return True


def roc(scores_in: np.ndarray, scores_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(false positive rates, true positive rates) as the threshold falls, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([scores_in, scores_out]))[::-1]
    if len(thresholds) > 4000:
        thresholds = thresholds[np.unique(np.geomspace(1, len(thresholds), 4000).astype(int) - 1)]
    false = 1 - np.searchsorted(np.sort(scores_out), thresholds, side="left") / len(scores_out)
    true = 1 - np.searchsorted(np.sort(scores_in), thresholds, side="left") / len(scores_in)
    return np.concatenate([[0.0], false, [1.0]]), np.concatenate([[0.0], true, [1.0]])
