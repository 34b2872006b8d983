"""Fig. 10: final loss against the number of scheduled clients."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isinf

import numpy as np

from dither.reproduce.figure import Axis, Claim, Figure, Line, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, DESTROYED, SMOKE, final_loss
from dither.reproduce.figures.words import TRAIN_LOSS, eps
from dither.reproduce.judging import Verdict, all_of, greater_by, ordered_within_noise


def cohort(view: View, k: int, lemma4: str) -> Values:
    """K clients a round; with all of them Lemma 4 is Theorem 1, whatever its form."""
    form = {"method_options.scheduling": lemma4} if k < view.base.num_clients and lemma4 != "printed" else {}
    return {"cohort_size": k, **form}


def panels(view: View) -> list[Panel]:
    made = []
    for title, lemma4 in (("Lemma 4 as printed", "printed"), ("Lemma 4 corrected (N4)", "corrected")):
        axis = Axis("scheduled clients K", [(k, cohort(view, k, lemma4)) for k in view.grid("cohort_size")])
        levels = [e for e in view.grid("epsilon") if lemma4 == "printed" or not isinf(e)]
        lines = [Line(eps(e), {"privacy.epsilon": e}) for e in levels]
        made.append(Panel(title, lines, "train_loss", TRAIN_LOSS, axis))
    return made


def fewer_clients_win(lemma4: str) -> Callable[[View], Verdict]:
    def judge(view: View) -> Verdict:
        cohorts = view.grid("cohort_size")
        verdicts = []
        for e in view.grid("epsilon"):
            if isinf(e) and lemma4 != "printed":
                continue
            settings = [{"privacy.epsilon": e, **cohort(view, k, lemma4)} for k in cohorts]
            losses = final_loss(view, settings)
            if isinf(e):
                verdicts.append(
                    ordered_within_noise(losses, [f"K = {k}" for k in cohorts], rising=False, what=eps(e))
                )
                continue
            best = int(np.argmin([np.mean(loss) for loss in losses[:-1]]))
            names = (f"K = {cohorts[-1]}", f"K = {cohorts[best]}")
            verdicts.append(greater_by(losses[-1], losses[best], names, what=f"loss, {eps(e)}"))
        return all_of(*verdicts)

    return judge


FIGURE = Figure(
    id="nbafl/fig10",
    title="Final training loss against the number K of scheduled clients",
    shows="N = 50, T = 25. Right: the same with the amplification of Lemma 4 inverted correctly.",
    base=BASE,
    panels=panels,
    claims=(
        Claim(
            "NB-A10",
            "for every ε some K < N beats K = N; without noise larger K is better",
            fewer_clients_win("printed"),
            proven=False,
            errata=("N4",),
            why="guaranteed by the printed formula: Lemma 4 switches the downlink noise off for K < N",
        ),
        Claim(
            "NB-A10",
            "for every ε some K < N beats K = N",
            fewer_clients_win("corrected"),
            variant="Lemma 4 corrected (N4)",
            proven=False,
            errata=("N4",),
            why="with the correct inversion fewer clients need more noise, not less",
        ),
    ),
    scales={
        "full": Scale(5, {"epsilon": (50.0, 60.0, 100.0, inf), "cohort_size": (10, 20, 30, 40, 43, 50)}),
        "quick": Scale(3, {"epsilon": (60.0, inf), "cohort_size": (20, 50)}),
        "smoke": Scale(1, {"epsilon": (50.0, inf), "cohort_size": (3, 6)}, SMOKE),
    },
    proven_note=DESTROYED,
)
