"""Fig. 9: final loss against the number of aggregations, all clients and K scheduled."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Line, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, DESTROYED, SMOKE, final_loss, rounds_axis, too_short
from dither.reproduce.figures.words import TRAIN_LOSS, eps
from dither.reproduce.judging import Verdict, all_of, convex, greater_by


def schedules(view: View) -> list[tuple[str, Values]]:
    scheduled = view.grid("cohort_size")[0]
    return [("all clients", {}), (f"K = {scheduled}", {"cohort_size": scheduled})]


def panels(view: View) -> list[Panel]:
    lines = [
        Line(f"{eps(e)}, {name}", {"privacy.epsilon": e, **values}, dashed=bool(values))
        for e in view.grid("epsilon")
        for name, values in schedules(view)
    ]
    return [Panel("", lines, "train_loss", TRAIN_LOSS, rounds_axis(view))]


def convex_in_rounds(view: View) -> Verdict:
    short = too_short(view)
    if short:
        return short
    rounds = view.grid("num_rounds")
    verdicts = []
    for e in view.grid("epsilon"):
        for name, values in schedules(view):
            losses = final_loss(view, [{"privacy.epsilon": e, **values, "num_rounds": t} for t in rounds])
            verdicts.append(convex(losses, rounds, what=f"{eps(e)}, {name}"))
    return all_of(*verdicts)


def scheduling_helps_late(view: View) -> Verdict:
    short = too_short(view)
    if short:
        return short
    last = view.grid("num_rounds")[-1]
    verdicts = []
    for e in view.grid("epsilon"):
        (everyone, all_values), (some, values) = schedules(view)
        a, b = final_loss(
            view, [{"privacy.epsilon": e, **each, "num_rounds": last} for each in (all_values, values)]
        )
        verdicts.append(greater_by(a, b, (everyone, some), what=f"loss at T = {last}, {eps(e)}"))
    return all_of(*verdicts)


FIGURE = Figure(
    id="nbafl/fig9",
    title="Final training loss against T: all clients, and K of N scheduled",
    shows="N = 50. Solid: all clients every round; dashed: K drawn each round, downlink noise by Lemma 4.",
    base=BASE,
    panels=panels,
    claims=(
        Claim("NB-A8", "the final loss is convex in T", convex_in_rounds, proven=False),
        Claim(
            "NB-A9",
            "scheduling is better for large T",
            scheduling_helps_late,
            proven=False,
            errata=("N4",),
            why="Lemma 4 inverts the amplification in the wrong direction and so asks for too little noise",
        ),
    ),
    scales={
        "full": Scale(
            5,
            {"epsilon": (60.0, 100.0), "num_rounds": (5, 10, 15, 25, 40, 60, 100), "cohort_size": (20,)},
        ),
        "quick": Scale(3, {"epsilon": (60.0, 100.0), "num_rounds": (4, 10, 25), "cohort_size": (20,)}),
        "smoke": Scale(1, {"epsilon": (50.0,), "num_rounds": (2, 3, 4), "cohort_size": (3,)}, SMOKE),
    },
    proven_note=DESTROYED,
)
