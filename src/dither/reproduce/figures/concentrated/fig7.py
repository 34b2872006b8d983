"""Fig. 7: accuracy against ε, with and without secure aggregation, softmax regression."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Scale
from dither.reproduce.figures.concentrated import LOGISTIC, SMOKE
from dither.reproduce.figures.periodic import AGGREGATION_NOTE, PROVEN, aggregation_helps, aggregation_panels

FIGURE = Figure(
    id="concentrated/fig7",
    title="Accuracy against ε, with and without secure aggregation, softmax regression",
    shows="T = 20, τ = 2. Secure aggregation lets the claim count the noise of the others in a sum.",
    base={**LOGISTIC, "local_steps": 2, "eval_every": 20},
    panels=aggregation_panels,
    claims=(
        Claim(
            "CD-A7",
            "accuracy grows with ε; with secure aggregation it is never lower",
            aggregation_helps,
            errata=("G7",),
            why="what the credit buys shows only where the noise is large; and no credit is proved here (G7)",
        ),
    ),
    scales={
        "full": Scale(5, {"epsilon": (0.5, 1.0, 2.0, 5.0, 10.0)}),
        "quick": Scale(5, {"epsilon": (0.5, 1.0, 2.0, 5.0, 10.0)}),
        "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE, "eval_every": 3}),
    },
    proven=PROVEN,
    proven_note=AGGREGATION_NOTE.format(why="the local steps may expand at this learning rate"),
)
