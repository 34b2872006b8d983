"""Exact noise (R7): how far float32 may be from the real numbers of a proof, and what the sampler owes.

docs/privacy.md ("Exact noise") has the theorem and every inequality. All errors are relative to what they bound;
no order of summation is assumed, with or without fused multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dither.accounting.lattice_noise import FAILURE_PER_DRAW, STD_FACTOR, SUM_WIDTH, TV_PER_DRAW, WIDTH
from dither.types import ExactNoise

UNIT = 2.0**-24  # relative error of a float32 operation
BLOCK = 64  # records whose clipped gradients are summed at once, where a batch has more than twice as many
ROW = 256  # squares that a norm sums at once
_SCALE = 16 * UNIT  # square root, quotient and product behind a clip; clip and noise rounded to float32


def accumulated(operations: float) -> float:
    """Relative error of that many float32 operations in turn (Higham's γ)."""
    if operations * UNIT >= 0.5:
        return math.inf
    return operations * UNIT / (1.0 - operations * UNIT)


def noise(dimension: int, *, summed: int = 0) -> ExactNoise:
    """What each use of a release of so many coordinates owes to noise on integers; `summed` clients' integers are
    summed as they are."""
    rounding = math.sqrt(dimension) / ((SUM_WIDTH if summed else WIDTH) * STD_FACTOR)
    draws = max(summed, 1) * dimension
    return ExactNoise(rounding, draws * TV_PER_DRAW, draws * FAILURE_PER_DRAW, bool(summed))


def norm_error(squares: int) -> float:
    """How much longer than the clip a vector may be whose squared norm float32 sums in so many operations."""
    return 0.5 * accumulated(squares + 4) * 1.01 + _SCALE


def blocked_norm_error(sizes: Iterable[int]) -> float:
    """The same for `clipping.blocked_norm` of arrays of these sizes."""
    return norm_error(ROW + sum(-(-size // ROW) for size in sizes))


def block_size(records: int) -> int:
    """Records that are summed at once in a batch of so many."""
    return records if records <= 2 * BLOCK else BLOCK


def sum_error(records: int, *, fixed_places: bool) -> float:
    """How much further than by one contribution a sum of clipped contributions may move, in units of the clip.

    Both worlds' sums err, and so do their quotients by the step of the lattice. With `fixed_places` the record has
    one place in both worlds: only its own block differs, and blocks are added as integers. Else others may change
    places: every block may differ, and their float32 sums are added in turn.
    """
    block = block_size(records)
    if fixed_places:
        return 2.0 * block * accumulated(block + 4)
    return 2.0 * records * accumulated(block + -(-records // block) + 4)


def summed_error(norm_error: float, records: int, *, fixed_places: bool) -> float:
    """How much further than by the clip one record may move a sum of clipped contributions, relatively."""
    return (1.0 + norm_error) * (1.0 + sum_error(records, fixed_places=fixed_places)) / STD_FACTOR - 1.0


def whole_error(sizes: Iterable[int]) -> float:
    """The same for a vector that is clipped as a whole, by `blocked_norm`, and then rounded."""
    return (1.0 + blocked_norm_error(sizes)) * (1.0 + accumulated(8)) / STD_FACTOR - 1.0
