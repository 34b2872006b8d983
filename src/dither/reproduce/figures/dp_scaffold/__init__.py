"""DP-SCAFFOLD with drift control (Chang, Seif, Tandon 2022): schemes 0, 1 and 2 of noise over time."""

from __future__ import annotations

from typing import Any

SCHEMES = {
    0: "scheme 0, constant noise",
    1: "scheme 1, decays by round",
    2: "scheme 2, decays by step",
}
SCHEDULES = {0: "constant", 1: "rounds", 2: "steps"}

# Fig. 3 of the paper, formulas only (methods: σ_0² = 8, one-sample gradient variance 1).
FIG3: dict[str, Any] = {
    "local_steps": 200,
    "num_clients": 40,
    "cohort_size": 8,
    "batch_size": 500,
    "initial_variance": 8.0,
}
FIG3_DECAY = {0: 1.0, 1: 0.998, 2: 0.99998}
FIG3_START = 200
FIG3_ROUNDS = 700
