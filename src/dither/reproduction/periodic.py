"""The six figures that CPFed and Concentrated DP-FL both have: noise and local steps, a comparison with one noisy
step a round, and accuracy with and without secure aggregation; each for softmax regression and for a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dither.reproduction.figure import Axis, Claim, Figure, Line, Panel, Scale, Values, View
from dither.reproduction.judging import (
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
from dither.reproduction.labels import ACCURACY, GRADIENT, TABLE_STAND_IN, TRAIN_LOSS, eps

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
    "local_steps": 2,
}
SMOKE_NETWORK = {**SMOKE, "model.hidden": [4]}
LABELS = {"train_loss": TRAIN_LOSS, "test_accuracy": ACCURACY, "gradient_sq": GRADIENT}


class Paper(NamedTuple):
    """What the two papers' figures differ in."""

    name: str  # the preset; that of the network has "-network" behind it
    title: str
    subject: str  # the method in a claim's sentence
    prefix: str  # of the claims' ids
    rival: str
    rivals: Sequence[tuple[str, Values]]  # the baseline as printed, and with the credit that is due to it
    variant: str  # the second of them
    errata: tuple[str, ...]
    why_rival: str
    why_late: str  # why CP-A2's plateau is not seen
    first_figure: int

    def id(self, offset: int) -> str:
        return f"{self.name}/fig{self.first_figure + offset}"

    @property
    def logistic(self) -> Values:
        return {"preset": self.name}

    @property
    def network(self) -> Values:
        return {"preset": f"{self.name}-network"}


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


LOUDER = "σ × 10 and × 100 too"
QUIET = "the printed σ lie far below the level of ε = 10"
GROWS = "under clipped steps at this rate (the paper gives none) the gradient norm starts small and grows"
NOISE_SHOWS = "First row: the printed σ; second row: values up to 100 times larger. The first 100 rounds."
NOISE_NOTE = PROVEN_NOTE + ' Lines are levels of proven ε instead of σ; claims read "more noise" as smaller ε.'


def _as_printed_and_louder(
    id: str,
    text: str,
    judge: Callable[..., Callable[[View], Verdict]],
    metric: str,
    why: tuple[str, str],
    **more: Any,
) -> list[Claim]:
    return [
        Claim(id, text, judge(metric, louder=False), why=why[0], **more),
        Claim(id, text, judge(metric, louder=True), variant=LOUDER, proven=False, why=why[1]),
    ]


def _noise_scales(
    noise_std: Sequence[float], louder: Sequence[float], steps: Sequence[int], quick: Values, smoke: Values
) -> dict[str, Scale]:
    """All values; the ends of each; one."""
    ends = {
        "noise_std": (noise_std[0], noise_std[-1]),
        "louder": louder[-2:],
        "local_steps": (steps[0], steps[-1]),
    }
    full = {"noise_std": noise_std, "louder": louder, "local_steps": steps, "epsilon": (10.0, 3.0, 1.0, 0.3)}
    one = {"noise_std": noise_std[-1:], "louder": louder[-1:], "local_steps": (2,), "epsilon": (10.0,)}
    return {
        "full": Scale(5, full, proven_seeds=3),
        "quick": Scale(3, {**ends, "epsilon": (10.0, 0.3)}, quick),
        "smoke": Scale(1, one, smoke),
    }


def noise_figures(paper: Paper) -> tuple[Figure, Figure]:
    """The metric for several σ and τ."""
    quiet = f"{QUIET}, so that their noise hardly shows"
    unsteady = "the loss grows with σ; accuracy moves by a few thousandths, not always in one direction"
    claims = (
        ("A1", "the final loss grows with σ and accuracy falls", noise_hurts, unsteady),
        ("A2", "larger τ: faster at first, a higher plateau", more_steps_trade, paper.why_late),
        ("A3", "largest σ and τ: the loss falls, then rises", falls_then_rises, ""),
    )
    return (
        Figure(
            id=paper.id(0),
            title="Training loss and accuracy for several σ and τ, softmax regression",
            shows=NOISE_SHOWS,
            base={**paper.logistic, "num_rounds": 100, "eval_every": 1},
            panels=noise_panels("train_loss"),
            claims=tuple(
                claim
                for number, text, judge, why in claims
                for claim in _as_printed_and_louder(
                    f"{paper.prefix}-{number}", text, judge, "train_loss", (quiet, why)
                )
            ),
            scales=_noise_scales(
                (1e-05, 0.0001, 0.0005, 0.001),
                (0.005, 0.01, 0.05, 0.1),
                (1, 5, 10, 40),
                {"num_rounds": 60, "eval_every": 2},
                SMOKE,
            ),
            proven=PROVEN,
            proven_note=NOISE_NOTE,
        ),
        Figure(
            id=paper.id(1),
            title="The squared gradient norm for several σ and τ, 3-layer network",
            shows=NOISE_SHOWS,
            base={**paper.network, "num_rounds": 100, "eval_every": 2},
            panels=noise_panels("gradient_sq"),
            claims=tuple(
                _as_printed_and_louder(
                    f"{paper.prefix}-A4",
                    "the same trends in ‖∇f‖²",
                    same_trends,
                    "gradient_sq",
                    (f"{QUIET}; and {GROWS}", GROWS),
                    errata=("G7",),
                )
            ),
            scales=_noise_scales(
                (0.0001, 0.001, 0.005, 0.01),
                (0.05, 0.1, 0.5, 1.0),
                (1, 5, 10, 20),
                {"num_rounds": 40, "eval_every": 4},
                SMOKE_NETWORK,
            ),
            proven=PROVEN,
            proven_note=NOISE_NOTE,
            gradient_norm=True,
        ),
    )


# Against one noisy step a round: CPFed Figs. 6 and 7, Concentrated Figs. 5 and 6


def baseline_panels(
    method: str, rivals: Sequence[tuple[str, Values]], metrics: Sequence[str]
) -> Callable[[View], list[Panel]]:
    """Method and baselines against rounds; at equal proven ε the credits make no difference, so one baseline."""

    def panels(view: View) -> list[Panel]:
        shown = [(_plainly(name), values) for name, values in rivals[:1]] if view.proven else rivals
        lines = [Line(method), *(Line(name, values, dashed=i > 0) for i, (name, values) in enumerate(shown))]
        return [Panel("", lines, metric, LABELS[metric], log=metric == "gradient_sq") for metric in metrics]

    return panels


def _plainly(name: str) -> str:
    """A baseline's name without what its claim credits, which proven noise does not ask."""
    return name.split(",")[0]


def beats(method: str, rival: tuple[str, Values], metrics: Sequence[str]) -> Callable[[View], Verdict]:
    """Faster (better on average over the first half of the rounds) and better at the end, in every metric."""

    def judge(view: View) -> Verdict:
        name, values = rival
        if view.proven:
            name = _plainly(name)
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


WHY_NORM = (
    "accuracy says so; ‖∇f‖² starts small and grows under clipped steps at this rate (the paper gives none), and "
    "more for the method that moves further"
)


def baseline_figures(paper: Paper) -> tuple[Figure, Figure]:
    """The method and its baseline against rounds."""

    def claims(number: str, measure: str, metrics: Sequence[str], why: tuple[str, str]) -> tuple[Claim, Claim]:
        text = f"{paper.subject} converges faster and ends with higher accuracy and lower {measure}"
        printed, due = (beats(paper.title, rival, metrics) for rival in paper.rivals)
        id = f"{paper.prefix}-{number}"
        return (
            Claim(id, text, printed, errata=paper.errata, why=why[0]),
            Claim(id, text, due, variant=paper.variant, proven=False, errata=paper.errata, why=why[1]),
        )

    def shows(rounds: int, steps: int) -> str:
        return (
            f"T = {rounds}, τ = {steps} for {paper.title}, one noisy step a round for {paper.rival}; "
            "10 of 16 devices a round."
        )

    convex, network = ("test_accuracy", "train_loss"), ("test_accuracy", "gradient_sq")
    return (
        Figure(
            id=paper.id(2),
            title=f"{paper.title} against {paper.rival} at ε = 10, softmax regression",
            shows=shows(20, 10),
            base={**paper.logistic, "eval_every": 1},
            panels=baseline_panels(paper.title, paper.rivals, convex),
            claims=claims("A5", "loss", convex, (paper.why_rival, "")),
            scales={"full": Scale(5), "quick": Scale(5), "smoke": Scale(1, values=SMOKE)},
            proven=PROVEN,
            proven_note=PROVEN_NOTE,
        ),
        Figure(
            id=paper.id(3),
            title=f"{paper.title} against {paper.rival} at ε = 10, 3-layer network",
            shows=shows(50, 5),
            base={**paper.network, "eval_every": 1},
            panels=baseline_panels(paper.title, paper.rivals, network),
            claims=claims("A6", "gradient norm", network, (WHY_NORM, WHY_NORM)),
            scales={
                "full": Scale(5),
                "quick": Scale(3, values={"eval_every": 5}),
                "smoke": Scale(1, values=SMOKE_NETWORK),
            },
            proven=PROVEN,
            proven_note=PROVEN_NOTE,
            gradient_norm=True,
        ),
    )


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


def aggregation_figures(paper: Paper) -> tuple[Figure, Figure]:
    """Accuracy against ε, with and without secure aggregation."""

    def claims(number: str) -> tuple[Claim]:
        text = "accuracy grows with ε; with secure aggregation it is never lower"
        why = "what the credit buys shows only where the noise is large; and no credit is proved here (G7)"
        return (Claim(f"{paper.prefix}-{number}", text, aggregation_helps, errata=("G7",), why=why),)

    title, levels = "Accuracy against ε, with and without secure aggregation", (0.5, 1.0, 2.0, 5.0, 10.0)
    shows = "Secure aggregation lets the claim count the noise of the others in a sum."
    return (
        Figure(
            id=paper.id(4),
            title=f"{title}, softmax regression",
            shows=f"T = 20, τ = 2. {shows}",
            base={**paper.logistic, "local_steps": 2, "eval_every": 20},
            panels=aggregation_panels,
            claims=claims("A7"),
            scales={
                "full": Scale(5, {"epsilon": levels}),
                "quick": Scale(5, {"epsilon": levels}),
                "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE, "eval_every": 3}),
            },
            proven=PROVEN,
            proven_note=AGGREGATION_NOTE.format(why="the local steps may expand at this learning rate"),
        ),
        Figure(
            id=paper.id(5),
            title=f"{title}, 3-layer network",
            shows=f"T = 50, τ = 5. {shows}",
            base={**paper.network, "eval_every": 50},
            panels=aggregation_panels,
            claims=claims("A8"),
            scales={
                "full": Scale(5, {"epsilon": levels}),
                "quick": Scale(3, {"epsilon": (0.5, 2.0, 10.0)}),
                "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE_NETWORK, "eval_every": 3}),
            },
            proven=PROVEN,
            gradient_norm=True,  # not shown: it makes these runs one program with those of the figures before
            proven_note=AGGREGATION_NOTE.format(why="a network's loss is not convex"),
        ),
    )
