"""Panels and judges of the figures of CPFed and Concentrated DP-FL (papers/cpfed.toml): noise and local steps, a
comparison with one noisy step a round, and accuracy with and without secure aggregation."""

from __future__ import annotations

import numpy as np

from dither.reproduction import judging
from dither.reproduction.figure import Axis, Line, Panel, Setting, Values, View, curves

ACCURACY, GRADIENT = "test_accuracy", "gradient_sq"


# Noise and local steps: CPFed Figs. 4 and 5, Concentrated Figs. 3 and 4


def levels(view: View, louder: bool = True) -> list[Setting]:
    """From the least noise to the most: σ as printed and louder, or ε falling."""
    if view.proven:
        return view.levels()
    stds = sorted({*view.grid("noise_std"), *(view.grid("louder") if louder else ())})
    return [(f"σ = {std:g}", {"privacy.noise": "given", "privacy.noise_std": std}) for std in stds]


def noise_panels(view: View) -> list[Panel]:
    """For each τ the printed σ, then σ up to a hundred times larger; then the end against the noise."""
    metric = view.figure.options["metric"]
    printed, everything = levels(view, louder=False), levels(view)
    steps = view.grid("local_steps")
    rows = (printed, [level for level in everything if level not in printed])
    panels = [
        curves(f"τ = {tau}", row, metric, {"local_steps": tau}, log=metric == GRADIENT, row=number)
        for number, row in enumerate(rows)
        if row
        for tau in steps
    ]
    label, key = ("proven ε", "privacy.epsilon") if view.proven else ("noise std σ", "privacy.noise_std")
    axis = Axis(label, [(values[key], values) for _, values in everything], log=True)
    lines = [Line(f"τ = {tau}", {"local_steps": tau}) for tau in steps]
    for name in (metric, ACCURACY):
        panels.append(Panel("after the last round", lines, name, axis, name == GRADIENT, row=2))
    return panels


def noise_hurts(view: View, louder: bool) -> judging.Verdict:
    """The end is worse the more noise there is, for every τ: the metric grows and accuracy falls."""
    verdicts = []
    for steps in view.grid("local_steps"):
        for which, rising in ((view.figure.options["metric"], True), (ACCURACY, False)):
            groups, names = view.finals(levels(view, louder), which, {"local_steps": steps})
            verdicts.append(
                judging.ordered_within_noise(groups, names, rising=rising, what=f"{which}, τ = {steps}")
            )
    return judging.all_of(*verdicts)


def more_steps_trade(view: View, louder: bool) -> judging.Verdict:
    """At the largest noise: more local steps are lower at the first evaluation and higher at the last."""
    _, values = levels(view, louder)[-1]
    steps, metric = view.grid("local_steps"), view.figure.options["metric"]
    evaluated = [view.curve({**values, "local_steps": tau}, metric) for tau in steps]
    names, first = [f"τ = {tau}" for tau in steps], int(evaluated[0][0][0])
    start, end = ([curve[:, at] for _, curve in evaluated] for at in (0, -1))
    return judging.all_of(
        judging.ordered_within_noise(start, names, rising=False, what=f"after round {first}"),
        judging.ordered_within_noise(end, names, what="after the last round"),
    )


def falls_then_rises(view: View, louder: bool) -> judging.Verdict:
    """At the largest noise and τ the metric is lower inside the run than at its first and last evaluation."""
    name, values = levels(view, louder)[-1]
    tau = view.grid("local_steps")[-1]
    rounds, curve = view.curve({**values, "local_steps": tau}, view.figure.options["metric"])
    few = judging.too_few(curve[:, 0])
    if few:
        return few
    best = int(np.argmin(curve.mean(axis=0)))
    numbers = (
        judging.summary(f"round {rounds[0]:g}", curve[:, 0]),
        judging.summary(f"round {rounds[best]:g} (lowest)", curve[:, best]),
        judging.summary(f"round {rounds[-1]:g}", curve[:, -1]),
    )
    down, up = judging.difference(curve[:, 0], curve[:, best]), judging.difference(curve[:, -1], curve[:, best])
    text = f"{name}, τ = {tau}: falls by {down} until round {rounds[best]:g}, then rises by {up}"
    if down.sign > 0 and up.sign > 0:
        return judging.Verdict(judging.HOLDS, text, numbers)
    # The lowest value is at an end: it only falls, or only rises.
    return judging.Verdict(judging.FAILS if best in (0, len(rounds) - 1) else judging.INCONCLUSIVE, text, numbers)


def same_trends(view: View, louder: bool) -> judging.Verdict:
    """The trends of the figure before, in this metric."""
    return judging.all_of(*(trend(view, louder) for trend in (noise_hurts, more_steps_trade, falls_then_rises)))


# Against one noisy step a round: CPFed Figs. 6 and 7, Concentrated Figs. 5 and 6


def rivals(view: View) -> list[Setting]:
    """The baselines; what a claim credits to one is no part of its name where the noise is proven."""
    return [
        (rival["label"].split(",")[0] if view.proven else rival["label"], rival["values"])
        for rival in view.figure.options["rivals"]
    ]


def baseline_panels(view: View) -> list[Panel]:
    """Method and baselines against rounds; at equal proven ε the credits make no difference, so one baseline."""
    options = view.figure.options
    baselines = enumerate(rivals(view)[: 1 if view.proven else None])
    lines = [Line(options["method"]), *(Line(*rival, dashed=number > 0) for number, rival in baselines)]
    return [Panel("", lines, metric, log=metric == GRADIENT) for metric in options["metrics"]]


def beats(view: View, rival: int) -> judging.Verdict:
    """Faster (better on average over the first half of the rounds) and better at the end, in every metric."""
    method, (name, values) = view.figure.options["method"], rivals(view)[rival]
    verdicts = []
    for metric in view.figure.options["metrics"]:
        rounds, ours = view.curve({}, metric)
        _, theirs = view.curve(values, metric)
        half = max(1, len(rounds) // 2)
        for what, a, b in (
            ("first half", ours[:, :half].mean(axis=1), theirs[:, :half].mean(axis=1)),
            ("end", ours[:, -1], theirs[:, -1]),
        ):
            pair = (a, b, (method, name)) if metric == ACCURACY else (b, a, (name, method))
            verdicts.append(judging.greater_by(*pair, what=f"{metric}, {what}"))
    return judging.all_of(*verdicts)


# With and without secure aggregation: CPFed Figs. 8 and 9, Concentrated Figs. 7 and 8


def aggregation(view: View) -> list[Setting]:
    """With and without secure aggregation: in the claim, or in what the accountant's adversary sees."""
    credit = "method_options.aggregation_credit"
    with_it: Values = {"privacy.view": "sum", credit: True}
    without: Values = {credit: False}
    if view.proven:
        with_it, without = {"privacy.view": "sum"}, {"privacy.view": "upload"}
    return [("with secure aggregation", with_it), ("without", without)]


def aggregation_panels(view: View) -> list[Panel]:
    label = "proven ε" if view.proven else "claimed ε"
    axis = Axis(label, [(e, {"privacy.epsilon": e}) for e in view.grid("epsilon")], log=True)
    lines = [Line(*setting, dashed=i > 0) for i, setting in enumerate(aggregation(view))]
    return [Panel("", lines, ACCURACY, axis)]


def aggregation_helps(view: View) -> judging.Verdict:
    """Accuracy grows with ε; secure aggregation is nowhere significantly worse, and somewhere better."""
    (name, values), (other, other_values) = aggregation(view)
    with_it, labels = view.finals(view.levels(), ACCURACY, values)
    without, _ = view.finals(view.levels(), ACCURACY, other_values)
    return judging.all_of(
        judging.ordered_within_noise(with_it, labels, what=name),
        judging.ordered_within_noise(without, labels, what=other),
        judging.never_below(with_it, without, labels, ("with", "without")),
    )
