"""Fig. 3: training loss and accuracy for several noise levels and local steps, softmax regression."""

from __future__ import annotations

from dither.reproduce.figure import Claim, Figure, Scale
from dither.reproduce.figures.concentrated import LOGISTIC, SMOKE
from dither.reproduce.figures.periodic import (
    PROVEN,
    PROVEN_NOTE,
    falls_then_rises,
    more_steps_trade,
    noise_hurts,
    noise_panels,
)

METRIC = "train_loss"
LOUDER = "σ × 10 and × 100 too"
QUIET = "the printed σ lie far below the level of ε = 10, so that their noise hardly shows"

FIGURE = Figure(
    id="concentrated/fig3",
    title="Training loss and accuracy for several σ and τ, softmax regression",
    shows="First row: the printed σ; second row: values up to 100 times larger. The first 100 rounds.",
    base={**LOGISTIC, "num_rounds": 100, "eval_every": 1},
    panels=noise_panels(METRIC),
    claims=(
        Claim(
            "CD-A1", "the final loss grows with σ and accuracy falls", noise_hurts(METRIC, louder=False), why=QUIET
        ),
        Claim(
            "CD-A1",
            "the final loss grows with σ and accuracy falls",
            noise_hurts(METRIC, louder=True),
            variant=LOUDER,
            proven=False,
            why="the loss grows with σ; accuracy moves by a few thousandths, not always in one direction",
        ),
        Claim(
            "CD-A2",
            "larger τ: faster at first, a higher plateau",
            more_steps_trade(METRIC, louder=False),
            why=QUIET,
        ),
        Claim(
            "CD-A2",
            "larger τ: faster at first, a higher plateau",
            more_steps_trade(METRIC, louder=True),
            variant=LOUDER,
            proven=False,
        ),
        Claim(
            "CD-A3",
            "largest σ and τ: the loss falls, then rises",
            falls_then_rises(METRIC, louder=False),
            why=QUIET,
        ),
        Claim(
            "CD-A3",
            "largest σ and τ: the loss falls, then rises",
            falls_then_rises(METRIC, louder=True),
            variant=LOUDER,
            proven=False,
        ),
    ),
    scales={
        "full": Scale(
            5,
            {
                "noise_std": (1e-05, 0.0001, 0.0005, 0.001),
                "louder": (0.005, 0.01, 0.05, 0.1),
                "local_steps": (1, 5, 10, 40),
                "epsilon": (10.0, 3.0, 1.0, 0.3),
            },
            proven_seeds=3,
        ),
        "quick": Scale(
            3,
            {
                "noise_std": (1e-05, 0.001),
                "louder": (0.05, 0.1),
                "local_steps": (1, 40),
                "epsilon": (10.0, 0.3),
            },
            {"num_rounds": 60, "eval_every": 2},
        ),
        "smoke": Scale(
            1,
            {"noise_std": (0.001,), "louder": (0.1,), "local_steps": (2,), "epsilon": (10.0,)},
            SMOKE,
        ),
    },
    proven=PROVEN,
    proven_note=PROVEN_NOTE + ' Lines are levels of proven ε instead of σ; claims read "more noise" as smaller ε.',
)
