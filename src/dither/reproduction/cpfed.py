"""Panels and judges of the figures of CPFed and Concentrated DP-FL (papers/cpfed.toml): noise and local steps, a
comparison with one noisy step a round, and accuracy with and without secure aggregation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dither.reproduction import judging
from dither.reproduction.figure import NOTHING, Axis, Line, Panel, Setting, Table, Values, View, curves
from dither.reproduction.judging import Verdict

ACCURACY, GRADIENT = "test_accuracy", "gradient_sq"


# Noise and local steps: CPFed Figs. 4 and 5, Concentrated Figs. 3 and 4


def levels(view: View, louder: bool = True) -> list[Setting]:
    """From the least noise to the most: σ as printed and louder, or ε falling."""
    if view.proven:
        return view.levels()
    stds = sorted({*view.grid("noise_std"), *(view.grid("louder") if louder else ())})
    return [(f"σ = {std:g}", {"privacy.noise": "given", "privacy.noise_std": std}) for std in stds]


def noise_panels(view: View) -> list[Panel]:
    """A panel for each printed noise, as in the papers: the metric, then accuracy; then the end against the noise,
    up to a hundred times louder."""
    metric = view.figure.options["metric"]
    steps = view.grid("local_steps")
    panels = []
    for row, name in enumerate((metric, ACCURACY)):
        for label, values in levels(view, louder=False):
            taus = [(f"τ = {tau}", {"local_steps": tau}) for tau in steps]
            log = name == GRADIENT or (view.proven and name != ACCURACY)
            panels.append(curves(label, taus, name, values, log=log, row=row))
    key = "privacy.epsilon" if view.proven else "privacy.noise_std"
    points = [(values[key], values) for _, values in levels(view)]
    axis = Axis("proven ε" if view.proven else "noise std σ", points, log=True)
    lines = [Line(f"τ = {tau}", {"local_steps": tau}) for tau in steps]
    for name in (metric, ACCURACY):
        panels.append(Panel("after the last round", lines, name, axis, name == GRADIENT, row=2))
    return panels


def noise_hurts(view: View, louder: bool) -> Iterator[Verdict]:
    """The end, averaged over τ, is worse the more noise there is: the metric grows and accuracy falls."""
    steps = view.grid("local_steps")
    for which, rising in ((view.figure.options["metric"], True), (ACCURACY, False)):
        by_steps = [view.finals(levels(view, louder), which, {"local_steps": tau}) for tau in steps]
        groups = list(np.mean([groups for groups, _ in by_steps], axis=0))
        yield judging.ordered_within_noise(groups, by_steps[0][1], rising=rising, what=which)


def more_steps_trade(view: View, louder: bool) -> Iterator[Verdict]:
    """At every noise: with more local steps the metric falls faster at first, and ends higher."""
    steps, metric = view.grid("local_steps"), view.figure.options["metric"]
    names = [f"τ = {tau}" for tau in steps]
    for level, values in levels(view, louder):
        runs = [view.curve({**values, "local_steps": tau}, metric) for tau in steps]
        first = int(np.argmax(runs[0][0] > 0))
        start, end = ([curve[:, at] for _, curve in runs] for at in (first, -1))
        at_first = f"{level}, after round {runs[0][0][first]:g}"
        yield judging.ordered_within_noise(start, names, rising=False, what=at_first)
        yield judging.ordered_within_noise(end, names, what=f"{level}, after the last round")


def falls_then_rises(view: View, louder: bool, metric: str = "") -> Verdict:
    """At the largest noise and τ the metric is lower inside the run than at its start and its end."""
    name, values = levels(view, louder)[-1]
    tau, metric = view.grid("local_steps")[-1], metric or view.figure.options["metric"]
    rounds, curve = view.curve({**values, "local_steps": tau}, metric)
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
    text = f"{name}, τ = {tau}: {metric} falls by {down} until round {rounds[best]:g}, then rises by {up}"
    if down.sign > 0 and up.sign > 0:
        return Verdict(judging.HOLDS, text, numbers)
    # The lowest value is at an end: it only falls, or only rises.
    return Verdict(judging.FAILS if best in (0, len(rounds) - 1) else judging.INCONCLUSIVE, text, numbers)


def same_trends(view: View, louder: bool) -> Iterator[Verdict]:
    """The trends of the figure before, in this metric."""
    for trend in (noise_hurts, more_steps_trade):
        yield judging.all_of(*trend(view, louder))


DEVICES = 16
CLIENT_RECORDS = {"adult": 2441}  # of a device, for training
LEVEL = 7.0  # "the expected loss decreased to 7 using about 40 rounds" (σ = 0.001, τ = 40)


def level_tables(view: View) -> list[Table]:
    """Which rate and clip come near the one level that the papers' text gives."""
    if view.scale_name == "smoke":
        return []
    _, noisiest = levels(view, louder=False)[-1]
    rows = []
    for clip in ("none", "example"):
        for rate in view.figure.options["rates"]:
            values = {
                **noisiest,
                "local_steps": view.grid("local_steps")[-1],
                "client_lr": rate,
                "privacy.clip": clip,
            }
            rounds, curve = view.curve(values, view.figure.options["metric"])
            summed = DEVICES * curve.mean(axis=0)
            best = int(np.argmin(summed))
            rows.append(
                {
                    "clip": "none" if clip == "none" else f"{view.base.privacy.clip_norm:g}",
                    "rate": f"{rate:g}",
                    "least loss": f"{summed[best]:.2f}",
                    "after round": f"{rounds[best]:g}",
                    "after the last": f"{summed[-1]:.2f}",
                }
            )
    note = (
        f"The text: the loss falls to {LEVEL:g} in about 40 rounds, then rises. A mean cross-entropy of {LEVEL:g} "
        f"is out of reach here; summed over the {DEVICES} devices, as we guess, it is {LEVEL / DEVICES:.2f} for "
        "each. Losses here are such sums."
    )
    return [Table("The level that the text gives", rows, note)]


# Against one noisy step a round: CPFed Figs. 6 and 7, Concentrated Figs. 5 and 6


def rivals(view: View) -> list[Setting]:
    """The baselines; what a claim credits to one is no part of its name where the noise is proven. Where the
    method's rounds are whole epochs, a baseline has batches of the same size."""
    records = CLIENT_RECORDS.get(view.base.data.name, 0)
    same_batch = view.base.method_options.get("exact_epochs") and records
    batch: Values = {"batch_size": records // view.base.local_steps} if same_batch else {}
    return [
        (rival["label"].split(",")[0] if view.proven else rival["label"], {**rival["values"], **batch})
        for rival in view.figure.options["rivals"]
    ]


def baseline_lines(view: View) -> list[Line]:
    """Method and baselines, each with the rate that does best on the validation records. At equal proven ε the
    credits make no difference, so one baseline."""
    named = [(view.figure.options["method"], NOTHING), *rivals(view)[: 1 if view.proven else None]]
    return [
        Line(name, view.tuned(values), dashed=number > 1, style=name if number > 1 else name.split(",")[0])
        for number, (name, values) in enumerate(named)
    ]


def baseline_panels(view: View) -> list[Panel]:
    return [
        Panel("", baseline_lines(view), metric, log=metric == GRADIENT)
        for metric in view.figure.options["metrics"]
    ]


def tuned_tables(view: View) -> list[Table]:
    """The rates that were chosen."""
    key = view.figure.options["tuned"]
    rows = [
        {"line": line.label, "rate": f"{line.values.get(key, view.base.client_lr):g}"}
        for line in baseline_lines(view)
    ]
    listed = ", ".join(f"{value:g}" for value in view.grid(key))
    note = f"Chosen among {listed} by mean validation accuracy after the last round."
    return [Table("Learning rates, tuned alike (as printed)", rows, note)]


def beats(view: View, rival: int) -> Iterator[Verdict]:
    """Faster (better on average over the first half of the rounds) and better at the end, in every metric."""
    lines = baseline_lines(view)
    method, other = lines[0], lines[1 + min(rival, len(lines) - 2)]
    for metric in view.figure.options["metrics"]:
        rounds, ours = view.curve(method.values, metric)
        _, theirs = view.curve(other.values, metric)
        half = max(1, len(rounds) // 2)
        for what, a, b in (
            ("first half", ours[:, :half].mean(axis=1), theirs[:, :half].mean(axis=1)),
            ("end", ours[:, -1], theirs[:, -1]),
        ):
            pair = (a, b, (method.label, other.label))
            if metric != ACCURACY:
                pair = (b, a, (other.label, method.label))
            yield judging.greater_by(*pair, what=f"{metric}, {what}")


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


def aggregation_helps(view: View) -> Iterator[Verdict]:
    """Accuracy grows with ε; secure aggregation is nowhere significantly worse, and somewhere better."""
    (name, values), (other, other_values) = aggregation(view)
    with_it, labels = view.finals(view.levels(), ACCURACY, values)
    without, _ = view.finals(view.levels(), ACCURACY, other_values)
    yield judging.ordered_within_noise(with_it, labels, what=name)
    yield judging.ordered_within_noise(without, labels, what=other)
    yield judging.never_below(with_it, without, labels, ("with", "without"))
