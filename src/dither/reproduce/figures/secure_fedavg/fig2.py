"""Fig. 2: accuracy for several numbers of clients a round."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.secure_fedavg import (
    BASE,
    PARTITIONS,
    PROVEN,
    PROVEN_NOTE,
    SMOKE,
    final,
    rounds_panel,
)
from dither.reproduce.judging import Verdict, not_monotone, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(f"K = {k}", {"cohort_size": k}) for k in view.grid("cohort_size")]


def panels(view: View) -> list[Panel]:
    return [rounds_panel(title, settings(view), more) for title, more in PARTITIONS.items()]


def larger_cohorts_help(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final(view, values, PARTITIONS["i.i.d."]), names)


def not_monotone_for_one_class(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return not_monotone(final(view, values, PARTITIONS["one class a client"]), names)


FIGURE = Figure(
    id="secure-fedavg/fig2",
    title="Accuracy for several numbers K of clients a round",
    shows="ε = 0.5 per message, Q = 10 local steps, b = 1, 100 clients.",
    base={**BASE, "local_steps": 10},
    panels=panels,
    claims=(
        Claim(
            "SF-A3",
            "i.i.d.: larger K is better",
            larger_cohorts_help,
            why="the means go the paper's way by less than two standard errors: at Q = 10 and b = 1 single runs "
            "end points apart, whatever K is",
        ),
        Claim("SF-A4", "not i.i.d.: not monotone in K (weak)", not_monotone_for_one_class),
    ),
    scales={
        "full": Scale(5, {"cohort_size": (10, 30, 50, 100)}),
        "quick": Scale(5, {"cohort_size": (10, 50, 100)}, {"num_rounds": 50}),
        "smoke": Scale(1, {"cohort_size": (4,)}, {**SMOKE, "local_steps": 2}),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
