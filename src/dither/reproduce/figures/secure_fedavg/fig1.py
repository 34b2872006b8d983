"""Fig. 1: accuracy for several ε, with one and with ten local steps."""

from __future__ import annotations

from math import inf

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.secure_fedavg import BASE, PROVEN, PROVEN_NOTE, SMOKE, final, rounds_panel
from dither.reproduce.figures.words import eps
from dither.reproduce.judging import Verdict, all_of, greater_by, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(eps(e, "without DP"), {"privacy.epsilon": e}) for e in view.grid("epsilon")]


def by_steps(view: View) -> list[tuple[int, Values]]:
    return [
        (steps, {"local_steps": steps, "num_rounds": rounds})
        for steps, rounds in zip(view.grid("local_steps"), view.grid("num_rounds"), strict=True)
    ]


def panels(view: View) -> list[Panel]:
    return [rounds_panel(f"Q = {steps}", settings(view), more) for steps, more in by_steps(view)]


def rises_with_epsilon(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return all_of(
        *(
            ordered_within_noise(final(view, values, more), names, what=f"Q = {steps}")
            for steps, more in by_steps(view)
        )
    )


def spread_is_small_for_one_step(view: View) -> Verdict:
    """Without DP minus the smallest ε; "much smaller" is read as less than half."""
    values = [v for _, v in settings(view)]
    spreads = []
    for _, more in by_steps(view):
        accuracy = final(view, values, more)
        spreads.append(accuracy[-1] - accuracy[0])
    few, many = (steps for steps, _ in by_steps(view))
    names = (f"spread at Q = {many}", f"twice the spread at Q = {few}")
    return greater_by(spreads[1], 2 * spreads[0], names)


FIGURE = Figure(
    id="secure-fedavg/fig1",
    title="Accuracy for several ε per message, with one and with ten local steps",
    shows="K = 50 of 100 clients a round, b = 1, δ = 1e-4; ε is for one message.",
    base={**BASE, "cohort_size": 50},
    panels=panels,
    claims=(
        Claim("SF-A1", "accuracy does not fall as ε grows; without DP it is best", rises_with_epsilon),
        Claim(
            "SF-A2",
            "the spread over ε is much smaller for Q = 1 than for Q = 10",
            spread_is_small_for_one_step,
            errata=("E1",),
            why="the printed noise at Q = 1 is far too small for its ε: a true ε costs accuracy there too",
        ),
    ),
    scales={
        "full": Scale(5, {"epsilon": (0.1, 0.5, 1.0, inf), "local_steps": (1, 10), "num_rounds": (200, 100)}),
        "quick": Scale(5, {"epsilon": (0.1, 0.5, 1.0, inf), "local_steps": (1, 10), "num_rounds": (100, 50)}),
        "smoke": Scale(1, {"epsilon": (0.5, inf), "local_steps": (1, 2), "num_rounds": (4, 4)}, SMOKE),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
