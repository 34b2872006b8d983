"""Fig. 7: final loss against the number of aggregations."""

from __future__ import annotations

import numpy as np

from dither.reproduce.figure import Claim, Figure, Line, Panel, Scale, View
from dither.reproduce.figures.nbafl import BASE, DESTROYED, SMOKE, final_loss, rounds_axis, too_short
from dither.reproduce.figures.words import TRAIN_LOSS, eps
from dither.reproduce.judging import Verdict, all_of, interior_optimum, ordered_within_noise


def panels(view: View) -> list[Panel]:
    lines = [Line(eps(e), {"privacy.epsilon": e}) for e in view.grid("epsilon")]
    return [Panel("", lines, "train_loss", TRAIN_LOSS, rounds_axis(view))]


def best_inside_and_growing(view: View) -> Verdict:
    short = too_short(view)
    if short:
        return short
    rounds, levels = view.grid("num_rounds"), view.grid("epsilon")
    verdicts, best = [], []
    for e in levels:
        losses = final_loss(view, [{"privacy.epsilon": e, "num_rounds": t} for t in rounds])
        verdicts.append(interior_optimum(losses, [f"T = {t}" for t in rounds], what=eps(e)))
        best.append(np.array(rounds, float)[np.argmin(np.stack(losses), axis=0)])  # of each seed
    names = [eps(e) for e in levels]
    return all_of(*verdicts, ordered_within_noise(best, names, what="each seed's best T of the grid"))


FIGURE = Figure(
    id="nbafl/fig7",
    title="Final training loss against the number T of aggregations",
    shows="N = 50. Every T is a run of its own: the downlink noise is set for T and grows with it.",
    base=BASE,
    panels=panels,
    claims=(
        Claim("NB-A6", "a T inside the range is best, and it grows with ε", best_inside_and_growing, proven=False),
    ),
    scales={
        "full": Scale(5, {"epsilon": (50.0, 60.0, 80.0, 100.0), "num_rounds": (5, 10, 15, 25, 40, 60, 100)}),
        "quick": Scale(3, {"epsilon": (60.0, 100.0), "num_rounds": (4, 10, 25)}),
        "smoke": Scale(1, {"epsilon": (50.0,), "num_rounds": (2, 3, 4)}, SMOKE),
    },
    proven_note=DESTROYED,
)
