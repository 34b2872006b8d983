"""Fig. 3: accuracy for several numbers of local steps."""

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
from dither.reproduce.judging import Verdict, interior_optimum, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(f"Q = {q}", {"local_steps": q}) for q in view.grid("local_steps")]


def panels(view: View) -> list[Panel]:
    return [rounds_panel(title, settings(view), more) for title, more in PARTITIONS.items()]


def fewer_steps_help(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final(view, values, PARTITIONS["i.i.d."]), names, rising=False)


def an_interior_q_wins(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return interior_optimum(final(view, values, PARTITIONS["one class a client"]), names, lowest=False)


FIGURE = Figure(
    id="secure-fedavg/fig3",
    title="Accuracy for several numbers Q of local steps",
    shows="ε = 0.5 per message, K = 10 of 100 clients a round, b = 1; the same number of rounds for every Q.",
    base={**BASE, "cohort_size": 10},
    panels=panels,
    claims=(
        Claim("SF-A5", "i.i.d.: smaller Q is better", fewer_steps_help),
        Claim(
            "SF-A6",
            "not i.i.d.: not monotone; a Q inside the range can win (weak)",
            an_interior_q_wins,
            why="the noise grows with Q (Lemma 1: 4QGη), and more local steps do not make up for it here: Q = 1 "
            "is best, as for i.i.d. records",
        ),
    ),
    scales={
        "full": Scale(5, {"local_steps": (1, 5, 10, 20)}),
        "quick": Scale(5, {"local_steps": (1, 5, 20)}, {"num_rounds": 50}),
        "smoke": Scale(1, {"local_steps": (1, 2)}, SMOKE),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE,
)
