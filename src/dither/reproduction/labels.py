"""Labels and small stand-ins that several figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence

ACCURACY = "test accuracy"
TRAIN_LOSS = "training loss (cross-entropy)"
GRADIENT = "‖∇f‖² of the training loss"

# Small sets that ship with scikit-learn: the smallest scale needs no download.
TABLE_STAND_IN = {"data.name": "breast-cancer", "num_clients": 8}
IMAGE_STAND_IN = {"data.name": "digits"}


def eps(value: float, without: str = "without noise") -> str:
    """A line's label for a target ε."""
    return without if math.isinf(value) else f"ε = {value:g}"


def labels(name: str, values: Sequence[float]) -> list[str]:
    """Labels "name = value"."""
    return [f"{name} = {value:g}" for value in values]
