"""Fig. 4: training loss for several ε with 20 of 50 clients scheduled."""

from __future__ import annotations

from math import inf

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, PROVEN, PROVEN_NOTE, SMOKE, final_loss, over_rounds
from dither.reproduce.figures.words import eps
from dither.reproduce.judging import Verdict, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(eps(e), {"privacy.epsilon": e}) for e in view.grid("epsilon")]


def panels(view: View) -> list[Panel]:
    return [over_rounds("", settings(view))]


def falls_with_epsilon(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final_loss(view, values), names, rising=False)


FIGURE = Figure(
    id="nbafl/fig4",
    title="Training loss for several ε, K = 20 of 50 clients scheduled",
    shows="As Fig. 2 with K = 20 clients drawn each round; here Lemma 4 sets the downlink noise to 0.",
    base={**BASE, "cohort_size": 20},
    panels=panels,
    claims=(
        Claim(
            "NB-A3",
            "the same order under scheduling",
            falls_with_epsilon,
            errata=("N4",),
            why="Lemma 4 switches the downlink noise off for K < N; what is left is so little that all losses lie "
            "within 0.003, an order that is no longer about ε",
        ),
    ),
    scales={
        "full": Scale(5, {"epsilon": (50.0, 60.0, 100.0, inf)}, proven_seeds=3),
        "quick": Scale(3, {"epsilon": (60.0, inf)}, proven_seeds=0),
        "smoke": Scale(1, {"epsilon": (50.0, inf)}, {**SMOKE, "cohort_size": 3}),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
