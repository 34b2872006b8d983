"""Fig. 4: accuracy for several batch sizes."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.secure_fedavg import BASE, PROVEN, PROVEN_NOTE, SMOKE, final, rounds_panel
from dither.reproduce.judging import Verdict, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(f"b = {b}", {"batch_size": b}) for b in view.grid("batch_size")]


def by_steps(view: View) -> list[tuple[int, Values]]:
    return [
        (steps, {"local_steps": steps, "num_rounds": rounds})
        for steps, rounds in zip(view.grid("local_steps"), view.grid("num_rounds"), strict=True)
    ]


def panels(view: View) -> list[Panel]:
    return [rounds_panel(f"Q = {steps}", settings(view), more) for steps, more in by_steps(view)]


def larger_batches_hurt(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final(view, values, by_steps(view)[1][1]), names, rising=False)


def larger_batches_help(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final(view, values, by_steps(view)[0][1]), names)


FIGURE = Figure(
    id="secure-fedavg/fig4",
    title="Accuracy for several batch sizes b",
    shows="ε = 0.5 per message, K = 50 of 100 clients a round.",
    base={**BASE, "cohort_size": 50},
    panels=panels,
    claims=(
        Claim("SF-A7", "Q = 10: larger b is worse", larger_batches_hurt),
        Claim(
            "SF-A8",
            "Q = 1: larger b is better (fragile: σ grows with b too; only b ≤ 10)",
            larger_batches_help,
            errata=("E4",),
            why="eq (9) lets the noise grow with b through q = Qb/n, while the clip of the whole batch keeps the "
            "sensitivity: what a larger batch saves in gradient variance it pays in noise",
        ),
    ),
    scales={
        "full": Scale(5, {"batch_size": (1, 5, 10), "local_steps": (1, 10), "num_rounds": (200, 100)}),
        "quick": Scale(5, {"batch_size": (1, 5, 10), "local_steps": (1, 10), "num_rounds": (100, 50)}),
        "smoke": Scale(1, {"batch_size": (1,), "local_steps": (1, 2), "num_rounds": (4, 4)}, SMOKE),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
