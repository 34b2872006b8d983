"""CPFed (Hu, Gong, Guo 2020), Figs. 4 to 9: Adult, categorical columns, 10 of 16 devices a round.

Concentrated DP-FL (`concentrated`) has the same six figures, so they are declared for a `Paper`: noise and local
steps, a comparison with one noisy step a round, and accuracy with and without secure aggregation, each for softmax
regression and for a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dither.reproduction import figure, judging
from dither.reproduction.figure import Axis, Criterion, Figure, Line, Panel, Scale, Setting, Values, View, curves

PROVEN = {"privacy.noise": "proven", "privacy.view": "upload"}
PROVEN_NOTE = (
    "The accountant sets the noise for the whole run: every upload seen, replace-one, this seed's participation."
)
SMOKE = {
    **figure.TABLE_STAND_IN,
    "data.features": "all",
    "data.encoding": "minmax",
    "cohort_size": 4,
    "num_rounds": 3,
    "batch_size": 8,
    "eval_every": 1,
    "local_steps": 2,
}
SMOKE_NETWORK = {**SMOKE, "model.hidden": [4]}
ACCURACY, LOSS, GRADIENT = "test_accuracy", "train_loss", "gradient_sq"


class Paper(NamedTuple):
    """What the two papers' figures differ in."""

    name: str  # the preset; that of the network has "-network" behind it
    title: str
    subject: str  # the method in a criterion's sentence
    prefix: str  # of the criteria's ids
    rival: str
    rivals: tuple[Setting, Setting]  # the baseline as printed, and with the credit that is due to it
    variant: str  # the second of them
    errata: tuple[str, ...]
    why_rival: str
    why_late: str  # why the plateau of A2 is not seen
    first_figure: int

    def figure(self, offset: int, *, base: Values, **declared: Any) -> Figure:
        """One of the six figures; every other one is about the network."""
        network = offset % 2 == 1
        return Figure(
            id=f"{self.name}/fig{self.first_figure + offset}",
            base={"preset": f"{self.name}-network" if network else self.name, **base},
            proven=PROVEN,
            gradient_norm=network,  # in all of them, so that their runs are one program
            **{"proven_note": PROVEN_NOTE, **declared},
        )


# Noise and local steps: CPFed Figs. 4 and 5, Concentrated Figs. 3 and 4

LOUDER = "σ × 10 and × 100 too"
QUIET = "the printed σ lie far below the level of ε = 10"
GROWS = "with clipped steps at this rate (the paper gives none) the gradient norm starts small and grows"
UNSTEADY = "the loss grows with σ; accuracy moves by a few thousandths, not always in one direction"


def levels(view: View, louder: bool = True) -> list[Setting]:
    """From the least noise to the most: σ as printed and louder, or ε falling."""
    if view.proven:
        return view.levels()
    stds = sorted({*view.grid("noise_std"), *(view.grid("louder") if louder else ())})
    return [(f"σ = {std:g}", {"privacy.noise": "given", "privacy.noise_std": std}) for std in stds]


def noise_panels(view: View, metric: str) -> list[Panel]:
    """For each τ the printed σ, then σ up to a hundred times larger; then the end against the noise."""
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


def noise_hurts(view: View, metric: str, louder: bool) -> judging.Verdict:
    """The end is worse the more noise there is, for every τ: the metric grows and accuracy falls."""
    verdicts = []
    for steps in view.grid("local_steps"):
        for which, rising in ((metric, True), (ACCURACY, False)):
            groups, names = view.finals(levels(view, louder), which, {"local_steps": steps})
            verdicts.append(
                judging.ordered_within_noise(groups, names, rising=rising, what=f"{which}, τ = {steps}")
            )
    return judging.all_of(*verdicts)


def more_steps_trade(view: View, metric: str, louder: bool) -> judging.Verdict:
    """At the largest noise: more local steps are lower at the first evaluation and higher at the last."""
    _, values = levels(view, louder)[-1]
    steps = view.grid("local_steps")
    evaluated = [view.curve({**values, "local_steps": tau}, metric) for tau in steps]
    names, first = [f"τ = {tau}" for tau in steps], int(evaluated[0][0][0])
    start, end = ([curve[:, at] for _, curve in evaluated] for at in (0, -1))
    return judging.all_of(
        judging.ordered_within_noise(start, names, rising=False, what=f"after round {first}"),
        judging.ordered_within_noise(end, names, what="after the last round"),
    )


def falls_then_rises(view: View, metric: str, louder: bool) -> judging.Verdict:
    """At the largest noise and τ the metric is lower inside the run than at its first and last evaluation."""
    name, values = levels(view, louder)[-1]
    tau = view.grid("local_steps")[-1]
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
    text = f"{name}, τ = {tau}: falls by {down} until round {rounds[best]:g}, then rises by {up}"
    if down.sign > 0 and up.sign > 0:
        return judging.Verdict(judging.HOLDS, text, numbers)
    # The lowest value is at an end: it only falls, or only rises.
    return judging.Verdict(judging.FAILS if best in (0, len(rounds) - 1) else judging.INCONCLUSIVE, text, numbers)


def same_trends(view: View, metric: str, louder: bool) -> judging.Verdict:
    """The trends of the figure before, in this metric."""
    return judging.all_of(
        *(trend(view, metric, louder) for trend in (noise_hurts, more_steps_trade, falls_then_rises))
    )


def _as_printed_and_louder(
    id: str, text: str, trend: Callable[[View, str, bool], judging.Verdict], metric: str, why: tuple[str, str]
) -> list[Criterion]:
    printed, louder = (lambda view: trend(view, metric, False)), (lambda view: trend(view, metric, True))
    return [
        Criterion(id, text, printed, why=why[0]),
        Criterion(id, text, louder, variant=LOUDER, proven=False, why=why[1]),
    ]


def _noise_scales(
    printed: Sequence[float], louder: Sequence[float], steps: Sequence[int], quick: Values, smoke: Values
) -> dict[str, Scale]:
    """All values; the ends of each; one."""
    every = {"noise_std": printed, "louder": louder, "local_steps": steps, "epsilon": (10.0, 3.0, 1.0, 0.3)}
    ends = {"noise_std": (printed[0], printed[-1]), "louder": louder[-2:], "local_steps": (steps[0], steps[-1])}
    one = {"noise_std": printed[-1:], "louder": louder[-1:], "local_steps": (2,), "epsilon": (10.0,)}
    return {
        "full": Scale(5, every, proven_seeds=3),
        "quick": Scale(3, {**ends, "epsilon": (10.0, 0.3)}, quick),
        "smoke": Scale(1, one, smoke),
    }


def noise_figures(paper: Paper) -> tuple[Figure, Figure]:
    """The metric for several σ and τ."""
    trends = (
        ("A1", "the final loss grows with σ and accuracy falls", noise_hurts, UNSTEADY),
        ("A2", "larger τ: faster at first, a higher plateau", more_steps_trade, paper.why_late),
        ("A3", "largest σ and τ: the loss falls, then rises", falls_then_rises, ""),
    )
    hidden = f"{QUIET}, so that their noise hardly shows"
    declared = {
        "shows": "First row: the printed σ; second row: values up to 100 times larger. The first 100 rounds.",
        "proven_note": f'{PROVEN_NOTE} Lines are levels of proven ε instead of σ; criteria read "more noise" as '
        "smaller ε.",
    }
    convex = paper.figure(
        0,
        title="Training loss and accuracy for several σ and τ, softmax regression",
        base={"num_rounds": 100, "eval_every": 1},
        panels=partial(noise_panels, metric=LOSS),
        criteria=tuple(
            criterion
            for number, text, trend, why in trends
            for criterion in _as_printed_and_louder(f"{paper.prefix}-{number}", text, trend, LOSS, (hidden, why))
        ),
        scales=_noise_scales(
            (1e-05, 0.0001, 0.0005, 0.001),
            (0.005, 0.01, 0.05, 0.1),
            (1, 5, 10, 40),
            {"num_rounds": 60, "eval_every": 2},
            SMOKE,
        ),
        **declared,
    )
    printed, louder = _as_printed_and_louder(
        f"{paper.prefix}-A4", "the same trends in ‖∇f‖²", same_trends, GRADIENT, (f"{QUIET}; and {GROWS}", GROWS)
    )
    network = paper.figure(
        1,
        title="The squared gradient norm for several σ and τ, 3-layer network",
        base={"num_rounds": 100, "eval_every": 2},
        panels=partial(noise_panels, metric=GRADIENT),
        criteria=(printed._replace(errata=("G7",)), louder),
        scales=_noise_scales(
            (0.0001, 0.001, 0.005, 0.01),
            (0.05, 0.1, 0.5, 1.0),
            (1, 5, 10, 20),
            {"num_rounds": 40, "eval_every": 4},
            SMOKE_NETWORK,
        ),
        **declared,
    )
    return convex, network


# Against one noisy step a round: CPFed Figs. 6 and 7, Concentrated Figs. 5 and 6

WHY_NORM = (
    "accuracy agrees; ‖∇f‖² starts small and grows with clipped steps at this rate (the paper gives none), and "
    "more for the method that moves further"
)


def baseline_panels(view: View, paper: Paper, metrics: Sequence[str]) -> list[Panel]:
    """Method and baselines against rounds; at equal proven ε the credits make no difference, so one baseline."""
    rivals = [(_uncredited(paper.rivals[0][0]), paper.rivals[0][1])] if view.proven else paper.rivals
    lines = [Line(paper.title), *(Line(*rival, dashed=i > 0) for i, rival in enumerate(rivals))]
    return [Panel("", lines, metric, log=metric == GRADIENT) for metric in metrics]


def _uncredited(name: str) -> str:
    """A baseline's name without what its claim credits, which plays no part in proven noise."""
    return name.split(",")[0]


def beats(view: View, method: str, rival: Setting, metrics: Sequence[str]) -> judging.Verdict:
    """Faster (better on average over the first half of the rounds) and better at the end, in every metric."""
    name = _uncredited(rival[0]) if view.proven else rival[0]
    verdicts = []
    for metric in metrics:
        rounds, ours = view.curve({}, metric)
        _, theirs = view.curve(rival[1], metric)
        half = max(1, len(rounds) // 2)
        for what, a, b in (
            ("first half", ours[:, :half].mean(axis=1), theirs[:, :half].mean(axis=1)),
            ("end", ours[:, -1], theirs[:, -1]),
        ):
            pair = (a, b, (method, name)) if metric == ACCURACY else (b, a, (name, method))
            verdicts.append(judging.greater_by(*pair, what=f"{metric}, {what}"))
    return judging.all_of(*verdicts)


def baseline_figures(paper: Paper) -> tuple[Figure, Figure]:
    """The method and its baseline against rounds."""

    def criteria(number: str, measure: str, metrics: Sequence[str], why: tuple[str, str]) -> list[Criterion]:
        text = f"{paper.subject} converges faster and ends with higher accuracy and lower {measure}"
        printed, due = (partial(beats, method=paper.title, rival=rival, metrics=metrics) for rival in paper.rivals)
        first = Criterion(f"{paper.prefix}-{number}", text, printed, errata=paper.errata, why=why[0])
        return [first, first._replace(judge=due, variant=paper.variant, proven=False, why=why[1])]

    def shows(rounds: int, steps: int) -> str:
        return (
            f"T = {rounds}, τ = {steps} for {paper.title}, one noisy step a round for {paper.rival}; "
            "10 of 16 devices a round."
        )

    title = f"{paper.title} against {paper.rival} at ε = 10"
    smoke, metrics = Scale(1, values=SMOKE), (ACCURACY, LOSS)
    convex = paper.figure(
        2,
        title=f"{title}, softmax regression",
        shows=shows(20, 10),
        base={"eval_every": 1},
        panels=partial(baseline_panels, paper=paper, metrics=metrics),
        criteria=criteria("A5", "loss", metrics, (paper.why_rival, "")),
        scales={"full": Scale(5), "quick": Scale(5), "smoke": smoke},
    )
    smoke, metrics = Scale(1, values=SMOKE_NETWORK), (ACCURACY, GRADIENT)
    network = paper.figure(
        3,
        title=f"{title}, 3-layer network",
        shows=shows(50, 5),
        base={"eval_every": 1},
        panels=partial(baseline_panels, paper=paper, metrics=metrics),
        criteria=criteria("A6", "gradient norm", metrics, (WHY_NORM, WHY_NORM)),
        scales={"full": Scale(5), "quick": Scale(3, values={"eval_every": 5}), "smoke": smoke},
    )
    return convex, network


# With and without secure aggregation: CPFed Figs. 8 and 9, Concentrated Figs. 7 and 8

AGGREGATION_NOTE = (
    "The accountant sets the noise for the whole run; the adversary sees sums with secure aggregation, every "
    "upload without it. No credit for the noise of others is proved here ({why}), so the two lines coincide (G7)."
)


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


def aggregation_figures(paper: Paper) -> tuple[Figure, Figure]:
    """Accuracy against ε, with and without secure aggregation."""

    def criterion(number: str) -> Criterion:
        text = "accuracy grows with ε; with secure aggregation it is never lower"
        why = "what the credit buys shows only where the noise is large; and no credit is proved here"
        return Criterion(f"{paper.prefix}-{number}", text, aggregation_helps, errata=("G7",), why=why)

    title, levels = "Accuracy against ε, with and without secure aggregation", (0.5, 1.0, 2.0, 5.0, 10.0)
    shows = "With secure aggregation the claim counts the noise of the other clients in a sum."
    convex = paper.figure(
        4,
        title=f"{title}, softmax regression",
        shows=f"T = 20, τ = 2. {shows}",
        base={"local_steps": 2, "eval_every": 20},
        panels=aggregation_panels,
        criteria=[criterion("A7")],
        scales={
            "full": Scale(5, {"epsilon": levels}),
            "quick": Scale(5, {"epsilon": levels}),
            "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE, "eval_every": 3}),
        },
        proven_note=AGGREGATION_NOTE.format(why="the local steps may expand at this learning rate"),
    )
    network = paper.figure(
        5,
        title=f"{title}, 3-layer network",
        shows=f"T = 50, τ = 5. {shows}",
        base={"eval_every": 50},
        panels=aggregation_panels,
        criteria=[criterion("A8")],
        scales={
            "full": Scale(5, {"epsilon": levels}),
            "quick": Scale(3, {"epsilon": (0.5, 2.0, 10.0)}),
            "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE_NETWORK, "eval_every": 3}),
        },
        proven_note=AGGREGATION_NOTE.format(why="a network's loss is not convex"),
    )
    return convex, network


CPFED = Paper(
    name="cpfed",
    title="CPFed",
    subject="CPFed",
    prefix="CP",
    rival="DP-SGD",
    rivals=(
        ("DP-SGD, as printed", {"method": "dp-sgd", "local_steps": 1}),
        ("DP-SGD, equal credit", {"method": "dp-sgd", "local_steps": 1, "method_options.equal_credit": True}),
    ),
    variant="equal credit (C7)",
    errata=("C7",),
    why_rival="the printed baseline gets neither the participation nor the aggregation credit that CPFed gets: "
    "4 times the noise at the same claimed ε",
    why_late="with τ = 1 the loss is still falling after the last round: its plateau is not reached",
    first_figure=4,
)

FIGURES = (*noise_figures(CPFED), *baseline_figures(CPFED), *aggregation_figures(CPFED))
