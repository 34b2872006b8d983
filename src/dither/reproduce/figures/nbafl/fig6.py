"""Fig. 6: training loss for several numbers of clients."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, DESTROYED, SMOKE, final_loss, over_rounds
from dither.reproduce.judging import Verdict, ordered_within_noise


def settings(view: View) -> list[tuple[str, Values]]:
    return [(f"N = {n}", {"num_clients": n, "cohort_size": n}) for n in view.grid("num_clients")]


def panels(view: View) -> list[Panel]:
    return [over_rounds("", settings(view))]


def more_clients_help(view: View) -> Verdict:
    names, values = zip(*settings(view), strict=True)
    return ordered_within_noise(final_loss(view, values), names, rising=False)


FIGURE = Figure(
    id="nbafl/fig6",
    title="Training loss for several numbers N of clients",
    shows="ε = 60, T = 25, 100 images a client, all clients every round.",
    base={**BASE, "privacy.epsilon": 60.0},
    panels=panels,
    claims=(
        Claim(
            "NB-A5",
            "the loss falls as N grows",
            more_clients_help,
            proven=False,
            why="each loss is over the own records of its N clients, and more clients are more records to fit",
        ),
    ),
    scales={
        "full": Scale(5, {"num_clients": (50, 60, 80, 100)}),
        "quick": Scale(3, {"num_clients": (50, 100)}, {"num_rounds": 10}),
        "smoke": Scale(1, {"num_clients": (6,)}, SMOKE),
    },
    proven_note=DESTROYED,
    notes=("The caption in the paper says 50 clients while N varies (N5).",),
)
