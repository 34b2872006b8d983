"""Fig. 2: training loss for several ε."""

from __future__ import annotations

from math import inf

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, PROVEN, PROVEN_NOTE, SHOWS, SMOKE, final_loss, over_rounds
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
    id="nbafl/fig2",
    title="Training loss for several ε",
    shows=SHOWS,
    base=BASE,
    panels=panels,
    claims=(Claim("NB-A1", "the loss falls as ε grows; without noise it is lowest", falls_with_epsilon),),
    scales={
        "full": Scale(5, {"epsilon": (50.0, 60.0, 100.0, inf)}, proven_seeds=3),
        "quick": Scale(3, {"epsilon": (60.0, 100.0, inf)}, proven_seeds=1, proven_grid={"epsilon": (100.0, inf)}),
        "smoke": Scale(1, {"epsilon": (50.0, inf)}, SMOKE),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
