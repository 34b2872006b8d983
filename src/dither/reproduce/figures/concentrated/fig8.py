"""Fig. 8: accuracy against ε, with and without secure aggregation, 3-layer network."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Scale
from dither.reproduce.figures.concentrated import NETWORK, SMOKE_NETWORK
from dither.reproduce.figures.periodic import AGGREGATION_NOTE, PROVEN, aggregation_helps, aggregation_panels

FIGURE = Figure(
    id="concentrated/fig8",
    title="Accuracy against ε, with and without secure aggregation, 3-layer network",
    shows="T = 50, τ = 5. Secure aggregation lets the claim count the noise of the others in a sum.",
    base={**NETWORK, "eval_every": 50},
    panels=aggregation_panels,
    claims=(
        Claim(
            "CD-A8",
            "accuracy grows with ε; with secure aggregation it is never lower",
            aggregation_helps,
            errata=("G7",),
            why="what the credit buys shows only where the noise is large; and no credit is proved here (G7)",
        ),
    ),
    scales={
        "full": Scale(5, {"epsilon": (0.5, 1.0, 2.0, 5.0, 10.0)}),
        "quick": Scale(3, {"epsilon": (0.5, 2.0, 10.0)}),
        "smoke": Scale(1, {"epsilon": (1.0, 10.0)}, {**SMOKE_NETWORK, "eval_every": 3}),
    },
    proven=PROVEN,
    gradient_norm=True,  # not shown: it makes these runs one program with those of the figures before
    proven_note=AGGREGATION_NOTE.format(why="a network's loss is not convex"),
)
