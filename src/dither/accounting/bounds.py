"""What an accountant answers: `Proven`, and the bounds that it is the least of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dither.types import Participation, Release

Participations = Sequence[tuple[Release | tuple[Release, ...], int]]


class Proven(NamedTuple):
    """A rigorous ε with everything it depends on; ∞ by recipe "no proof" where none is known."""

    view: str
    adjacency: str
    value: float
    delta: float
    unit: str
    recipe: str
    not_covered: tuple[str, ...]
    assumed: bool
    detail: str


REALISED = Participation()
WORST = Participation("worst")


def binomial(num_rounds: int, rate: float, *, adaptive: bool = False, certain: int = 0) -> Participation:
    """Independent participation with probability `rate` in each of `num_rounds` rounds (R4), but for the first
    `certain` of them, which are sure."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate={rate} is not in [0, 1]")
    return Participation("binomial", num_rounds, rate, adaptive, certain)


class Bound(NamedTuple):
    value: float
    recipe: str
    detail: str
    assumed: bool = False


class Rounds(NamedTuple):
    """The participations that are counted, (releases, how many, the probability of each), and how they happen."""

    groups: list[tuple[tuple[Release, ...], int, float]]
    how: str
