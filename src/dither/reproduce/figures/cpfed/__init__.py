"""CPFed (Hu, Gong, Guo 2020): Adult, categorical columns, 10 of 16 devices a round, δ = 1e-4."""

from __future__ import annotations

from dither.reproduce.figure import Values
from dither.reproduce.figures.periodic import SMOKE as SHARED

LOGISTIC = {"preset": "cpfed"}
NETWORK = {"preset": "cpfed-network"}
SMOKE = {**SHARED, "local_steps": 2}
SMOKE_NETWORK = {**SMOKE, "model.hidden": [4]}
RIVALS: list[tuple[str, Values]] = [
    ("DP-SGD, as printed", {"method": "dp-sgd", "local_steps": 1}),
    ("DP-SGD, equal credit", {"method": "dp-sgd", "local_steps": 1, "method_options.equal_credit": True}),
]
WHY_RIVAL = (
    "the printed baseline gets neither the participation nor the aggregation credit that CPFed gets: 4 times the "
    "noise at the same claimed ε (C7)"
)
