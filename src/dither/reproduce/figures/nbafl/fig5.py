"""Fig. 5: training loss for several parameter clips C."""

from __future__ import annotations

from dither.reproduce.figure import Axis, Claim, Figure, Line, Panel, Scale, Values, View
from dither.reproduce.figures.nbafl import BASE, DESTROYED, SMOKE, final_loss, over_rounds
from dither.reproduce.figures.words import TRAIN_LOSS
from dither.reproduce.judging import Verdict, interior_optimum


def clip(c: float) -> Values:
    return {"method_options.param_clip": c}


def panels(view: View) -> list[Panel]:
    printed, wider = view.grid("param_clip"), view.grid("wider")
    everything = Axis("parameter clip C", [(c, clip(c)) for c in (*printed, *wider)])
    return [
        over_rounds("the paper's C", [(f"C = {c:g}", clip(c)) for c in printed]),
        Panel("all C", [Line("final loss")], "train_loss", TRAIN_LOSS, everything),
    ]


def best_inside(view: View) -> Verdict:
    values = view.grid("param_clip")
    return interior_optimum(final_loss(view, [clip(c) for c in values]), [f"C = {c:g}" for c in values])


def best_inside_wider(view: View) -> Verdict:
    values = (*view.grid("param_clip"), *view.grid("wider"))
    return interior_optimum(final_loss(view, [clip(c) for c in values]), [f"C = {c:g}" for c in values])


FIGURE = Figure(
    id="nbafl/fig5",
    title="Training loss for several parameter clips C",
    shows="N = 50, ε = 60, T = 25. A small C cuts the model, a large one raises the noise (σ grows with C).",
    base={**BASE, "privacy.epsilon": 60.0},
    panels=panels,
    claims=(
        Claim(
            "NB-A4",
            "a C inside 10 … 25 is best (20 in the paper)",
            best_inside,
            proven=False,
            why="with the optimiser and rate assumed here the best C lies further out (next line)",
        ),
        Claim("NB-A4", "a C inside 10 … 60 is best", best_inside_wider, variant="C up to 60", proven=False),
    ),
    scales={
        "full": Scale(5, {"param_clip": (10.0, 15.0, 20.0, 25.0), "wider": (30.0, 40.0, 60.0)}),
        "quick": Scale(3, {"param_clip": (10.0, 20.0, 25.0), "wider": (40.0,)}, {"num_rounds": 10}),
        "smoke": Scale(1, {"param_clip": (2.0, 20.0), "wider": (30.0,)}, SMOKE),
    },
    proven_note=DESTROYED,
)
