"""Fig. 3: training loss for several ε, clients of 512 images."""

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
    id="nbafl/fig3",
    title="Training loss for several ε, 512 images a client",
    shows="As Fig. 2 with m = 512 images a client, which allows a smaller ε at the same noise.",
    base={**BASE, "data.records_per_client": 512},
    panels=panels,
    claims=(Claim("NB-A2", "the same order at m = 512", falls_with_epsilon),),
    scales={
        "full": Scale(5, {"epsilon": (6.0, 8.0, 10.0, inf)}, proven_seeds=3),
        "quick": Scale(3, {"epsilon": (6.0, inf)}, {"num_rounds": 8, "local_steps": 3}, proven_seeds=0),
        "smoke": Scale(1, {"epsilon": (6.0, inf)}, {**SMOKE, "data.records_per_client": 20}),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
