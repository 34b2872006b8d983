"""Fig. 4: the squared gradient norm for several noise levels and local steps, 3-layer network."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Scale
from dither.reproduce.figures.concentrated import NETWORK, SMOKE_NETWORK
from dither.reproduce.figures.periodic import PROVEN, PROVEN_NOTE, noise_panels, same_trends

METRIC = "gradient_sq"
LOUDER = "σ × 10 and × 100 too"
GROWS = "under clipped steps at this rate (the paper gives none) the gradient norm starts small and grows"
QUIET = f"the printed σ lie far below the level of ε = 10; and {GROWS}"

FIGURE = Figure(
    id="concentrated/fig4",
    title="The squared gradient norm for several σ and τ, 3-layer network",
    shows="First row: the printed σ; second row: values up to 100 times larger. The first 100 rounds.",
    base={**NETWORK, "num_rounds": 100, "eval_every": 2},
    panels=noise_panels(METRIC),
    claims=(
        Claim("CD-A4", "the same trends in ‖∇f‖²", same_trends(METRIC, louder=False), errata=("G7",), why=QUIET),
        Claim(
            "CD-A4",
            "the same trends in ‖∇f‖²",
            same_trends(METRIC, louder=True),
            variant=LOUDER,
            proven=False,
            why=GROWS,
        ),
    ),
    scales={
        "full": Scale(
            5,
            {
                "noise_std": (0.0001, 0.001, 0.005, 0.01),
                "louder": (0.05, 0.1, 0.5, 1.0),
                "local_steps": (1, 5, 10, 20),
                "epsilon": (10.0, 3.0, 1.0, 0.3),
            },
            proven_seeds=3,
        ),
        "quick": Scale(
            3,
            {
                "noise_std": (0.0001, 0.01),
                "louder": (0.5, 1),
                "local_steps": (1, 20),
                "epsilon": (10.0, 0.3),
            },
            {"num_rounds": 40, "eval_every": 4},
        ),
        "smoke": Scale(
            1,
            {"noise_std": (0.01,), "louder": (1,), "local_steps": (2,), "epsilon": (10.0,)},
            SMOKE_NETWORK,
        ),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE + ' Lines are levels of proven ε instead of σ; claims read "more noise" as smaller ε.',
    gradient_norm=True,
)
