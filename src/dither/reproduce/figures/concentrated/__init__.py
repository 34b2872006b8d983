"""Concentrated DP-FL (Hu, Guo, Gong 2021): Adult, all columns, 10 of 16 devices a round, δ = 1e-4."""

from __future__ import annotations

from dither.reproduce.figure import Values
from dither.reproduce.figures.periodic import SMOKE as SHARED

LOGISTIC = {"preset": "concentrated"}
NETWORK = {"preset": "concentrated-network"}
SMOKE = {**SHARED, "local_steps": 2}
SMOKE_NETWORK = {**SMOKE, "model.hidden": [4]}
BASELINE = {"method": "dp-dsgd", "local_steps": 1, "batch_sampling": "fixed"}
RIVALS: list[tuple[str, Values]] = [
    ("DP-DSGD, n credited as printed", BASELINE),
    ("DP-DSGD, r credited", {**BASELINE, "method_options.credited_clients": "r"}),
]
