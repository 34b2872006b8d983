"""What the figures of CPFed and of Concentrated DP-FL share: both vary noise and local steps, both compare with
one noisy step a round, and both count secure aggregation on and off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dither.reproduce.figure import Axis, Line, Panel, Values, View
from dither.reproduce.figures.words import ACCURACY, GRADIENT, TABLE_STAND_IN, TRAIN_LOSS, eps
from dither.reproduce.judging import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Verdict,
    all_of,
    difference,
    greater_by,
    never_below,
    ordered_within_noise,
    summary,
    too_few,
)

PROVEN = {"privacy.noise": "proven", "privacy.view": "upload"}
PROVEN_NOTE = (
    "Noise set by the accountant for the whole run: every upload seen, replace-one, this seed's participation."
)
SMOKE = {
    **TABLE_STAND_IN,
    "data.features": "all",
    "data.encoding": "minmax",
    "cohort_size": 4,
    "num_rounds": 3,
    "batch_size": 8,
    "eval_every": 1,
}
LABELS = {"train_loss": TRAIN_LOSS, "test_accuracy": ACCURACY, "gradient_sq": GRADIENT}


# Noise and local steps: CPFed Figs. 4 and 5, Concentrated Figs. 3 and 4


def levels(view: View, louder: bool = True) -> list[tuple[str, float, Values]]:
    """(label, value, settings) from the least noise to the most: σ as printed and louder, or ε falling."""
    if view.proven:
        return [(eps(e), e, {"privacy.epsilon": e}) for e in view.grid("epsilon")]
    stds = [*view.grid("noise_std"), *(view.grid("louder") if louder else ())]
    return [
        (f"σ = {std:g}", std, {"privacy.noise": "given", "privacy.noise_std": std}) for std in sorted(set(stds))
    ]


def noise_panels(metric: str) -> Callable[[View], list[Panel]]:
    """A panel for each τ: the printed σ, then σ up to a hundred times larger; then the end against the noise."""

    def panels(view: View) -> list[Panel]:
        def row(number: int, chosen: Sequence[tuple[str, float, Values]]) -> list[Panel]:
            return [
                Panel(
                    f"τ = {steps}",
                    [Line(name, {**values, "local_steps": steps}) for name, _, values in chosen],
                    metric,
                    LABELS[metric],
                    log=metric == "gradient_sq",
                    row=number,
                )
                for steps in view.grid("local_steps")
            ]

        quiet, everything = levels(view, louder=False), levels(view)
        made = row(0, quiet)
        loud = [level for level in everything if level not in quiet]
        if loud:
            made += row(1, loud)
        axis = Axis("proven ε" if view.proven else "noise std σ", [(x, v) for _, x, v in everything], log=True)
        lines = [Line(f"τ = {steps}", {"local_steps": steps}) for steps in view.grid("local_steps")]
        for name in dict.fromkeys((metric, "test_accuracy")):
            made.append(
                Panel("after the last round", lines, name, LABELS[name], axis, name == "gradient_sq", row=2)
            )
        return made

    return panels


def noise_hurts(metric: str, *, louder: bool) -> Callable[[View], Verdict]:
    """The end is worse the more noise there is, for every τ: the metric grows and accuracy falls."""

    def judge(view: View) -> Verdict:
        chosen = levels(view, louder)
        names = [name for name, _, _ in chosen]
        verdicts = []
        for steps in view.grid("local_steps"):
            for which, rising in ((metric, True), ("test_accuracy", False)):
                found = [view.final({**values, "local_steps": steps}, which) for _, _, values in chosen]
                what = f"{which}, τ = {steps}"
                verdicts.append(ordered_within_noise(found, names, rising=rising, what=what))
        return all_of(*verdicts)

    return judge


def more_steps_trade(metric: str, *, louder: bool) -> Callable[[View], Verdict]:
    """At the largest noise: more local steps are lower at the first evaluation and higher at the last."""

    def judge(view: View) -> Verdict:
        _, _, values = levels(view, louder)[-1]
        steps = view.grid("local_steps")
        curves = [view.curve({**values, "local_steps": tau}, metric) for tau in steps]
        names = [f"τ = {tau}" for tau in steps]
        first = int(curves[0][0][0])
        return all_of(
            ordered_within_noise([c[:, 0] for _, c in curves], names, rising=False, what=f"after round {first}"),
            ordered_within_noise([c[:, -1] for _, c in curves], names, what="after the last round"),
        )

    return judge


def falls_then_rises(metric: str, *, louder: bool) -> Callable[[View], Verdict]:
    """At the largest noise and τ the metric is lower inside the run than at its first and last evaluation."""

    def judge(view: View) -> Verdict:
        name, _, values = levels(view, louder)[-1]
        tau = view.grid("local_steps")[-1]
        rounds, curve = view.curve({**values, "local_steps": tau}, metric)
        few = too_few(curve[:, 0])
        if few:
            return few
        best = int(np.argmin(curve.mean(axis=0)))
        numbers = (
            summary(f"round {rounds[0]:g}", curve[:, 0]),
            summary(f"round {rounds[best]:g} (lowest)", curve[:, best]),
            summary(f"round {rounds[-1]:g}", curve[:, -1]),
        )
        down, up = difference(curve[:, 0], curve[:, best]), difference(curve[:, -1], curve[:, best])
        text = f"{name}, τ = {tau}: falls by {down} until round {rounds[best]:g}, then rises by {up}"
        if down.sign > 0 and up.sign > 0:
            return Verdict(HOLDS, text, numbers)
        # The lowest value is at an end: it only falls, or only rises.
        return Verdict(FAILS if best in (0, len(rounds) - 1) else INCONCLUSIVE, text, numbers)

    return judge


def same_trends(metric: str, *, louder: bool) -> Callable[[View], Verdict]:
    """The trends of the figure before, in this metric."""

    def judge(view: View) -> Verdict:
        return all_of(
            noise_hurts(metric, louder=louder)(view),
            more_steps_trade(metric, louder=louder)(view),
            falls_then_rises(metric, louder=louder)(view),
        )

    return judge


# Against one noisy step a round: CPFed Figs. 6 and 7, Concentrated Figs. 5 and 6


def baseline_panels(
    method: str, rivals: Sequence[tuple[str, Values]], metrics: Sequence[str]
) -> Callable[[View], list[Panel]]:
    """Method and baselines against rounds; at equal proven ε the credits make no difference, so one baseline."""

    def panels(view: View) -> list[Panel]:
        shown = rivals[:1] if view.proven else rivals
        lines = [Line(method), *(Line(name, values, dashed=i > 0) for i, (name, values) in enumerate(shown))]
        return [Panel("", lines, metric, LABELS[metric], log=metric == "gradient_sq") for metric in metrics]

    return panels


def beats(method: str, rival: tuple[str, Values], metrics: Sequence[str]) -> Callable[[View], Verdict]:
    """Faster (better on average over the first half of the rounds) and better at the end, in every metric."""

    def judge(view: View) -> Verdict:
        name, values = rival
        if view.proven:
            name = name.split(",")[0]
        verdicts = []
        for metric in metrics:
            rounds, own = view.curve({}, metric)
            _, other = view.curve(values, metric)
            half = max(1, len(rounds) // 2)
            lower = metric != "test_accuracy"
            for what, a, b in (
                ("first half", own[:, :half].mean(axis=1), other[:, :half].mean(axis=1)),
                ("end", own[:, -1], other[:, -1]),
            ):
                pair = ((b, a), (name, method)) if lower else ((a, b), (method, name))
                verdicts.append(greater_by(*pair[0], pair[1], what=f"{metric}, {what}"))
        return all_of(*verdicts)

    return judge


# With and without secure aggregation: CPFed Figs. 8 and 9, Concentrated Figs. 7 and 8

AGGREGATION_NOTE = (
    "Noise set by the accountant for the whole run; with secure aggregation the adversary sees sums, without it "
    "every upload. No credit for the others' noise is proved here (G7: {why}), so the two lines are one."
)


def aggregation(view: View) -> list[tuple[str, Values]]:
    """With and without secure aggregation: in the claim, or in what the accountant's adversary sees."""
    if view.proven:
        return [
            ("with secure aggregation", {"privacy.view": "sum"}),
            ("without", {"privacy.view": "upload"}),
        ]
    return [
        ("with secure aggregation", {"method_options.aggregation_credit": True, "privacy.view": "sum"}),
        ("without", {"method_options.aggregation_credit": False}),
    ]


def aggregation_panels(view: View) -> list[Panel]:
    axis = Axis(
        "proven ε" if view.proven else "claimed ε",
        [(e, {"privacy.epsilon": e}) for e in view.grid("epsilon")],
        log=True,
    )
    lines = [Line(name, values, dashed=i > 0) for i, (name, values) in enumerate(aggregation(view))]
    return [Panel("", lines, "test_accuracy", ACCURACY, axis)]


def aggregation_helps(view: View) -> Verdict:
    """Accuracy grows with ε, and secure aggregation is never surely worse and somewhere surely better."""
    levels = view.grid("epsilon")
    found = {
        name: [view.final({**values, "privacy.epsilon": e}, "test_accuracy") for e in levels]
        for name, values in aggregation(view)
    }
    names = [eps(e) for e in levels]
    with_it, without = found
    return all_of(
        *(ordered_within_noise(groups, names, what=name) for name, groups in found.items()),
        never_below(found[with_it], found[without], names, ("with", "without")),
    )
