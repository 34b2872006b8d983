"""Data for the tests of this room: Adult through the project's own loader, and a small table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dither import data
from dither.errors import DataError


@pytest.fixture(scope="session")
def adult() -> data.Dataset:
    try:
        return data.load("adult", group_column="workclass")
    except DataError as error:
        pytest.skip(f"Adult is not available here: {error}")


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    """Twenty patients of two hospitals; one age and one ward are missing."""
    rng = np.random.default_rng(0)
    lines = ["age,ward,hospital,outcome"]
    for row in range(20):
        age = "" if row == 3 else str(rng.integers(20, 80))
        ward = "?" if row == 5 else ("north" if row % 3 else "south")
        lines.append(f"{age},{ward},{'east' if row < 12 else 'west'},{'dead' if row % 4 == 0 else 'alive'}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
