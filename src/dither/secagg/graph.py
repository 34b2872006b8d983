"""How few neighbours are enough: the degree of the mask graph and the threshold, for given dropouts and colluders.

With `neighbours = k`, the cohort is placed on a ring in an order chosen by a public hash, and each client shares
masks with the k/2 on either side (the Harary graph of Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure
single-server aggregation with (poly)logarithmic overhead", CCS 2020). Pairs then number n·k/2 and not n²/2.

What must hold is less than in Bell et al., because dropouts never reveal a pair's mask here: every client of an
opened attempt has uploaded, so the masks protect the honest clients' sum as long as the graph that is left without
the colluders is connected. On the ring it falls apart if and only if at least two gaps between neighbouring honest
clients hold k/2 or more colluders each (one such gap leaves a path; an edge spans k/2 places and cannot jump one).

Given g honest and c colluding clients in random order, the g gaps are a uniformly random way to write c as an
ordered sum of g numbers: C(c+g-1, g-1) ways, of which C(c-jh+g-1, g-1) have j named gaps of at least h = k/2. By
inclusion and exclusion, with S_j = C(g, j)·C(c-jh+g-1, g-1) / C(c+g-1, g-1),

    P[two gaps or more] = Σ_{j≥2} (-1)^j (j-1) S_j  <=  S_2

`disconnected` is the sum, exactly; it is 0 for k > c. `degree` makes S_2 small enough. One more honest client
multiplies S_2 by (g+1)(c+g-k) / ((g-1)(c+g)), which is at most 1 if k(g+1) >= 2(c+g), and then stays so: `degree`
asks for that too, so that what it finds for a cohort is enough for every larger one with as many colluders.

This treats the hash as a random order and assumes that the colluders are fixed before it is known. A server that
deviates can try other cohorts until an order suits it: allow for that with a smaller `failure`, or use all
neighbours.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

from dither.errors import SpecError

FAILURE = 2.0**-40  # what clients accept of one attempt


@functools.lru_cache(256)
def disconnected(size: int, colluders: int, neighbours: int) -> Fraction:
    """The probability that the honest clients' masks do not connect them all, exactly."""
    if not 0 <= colluders < size:
        raise SpecError(f"colluders={colluders} must lie in 0 to size - 1 = {size - 1}")
    if neighbours < 2 or neighbours % 2:
        raise SpecError(f"neighbours={neighbours} must be an even number above 0")
    if neighbours >= size - 1:
        return Fraction(0)
    half, honest = neighbours // 2, size - colluders
    total = 0
    for j in range(2, min(honest, colluders // half) + 1):
        ways = math.comb(honest, j) * math.comb(colluders - j * half + honest - 1, honest - 1)
        total += (-1) ** j * (j - 1) * ways
    return Fraction(total, math.comb(size - 1, honest - 1))


def degree(size: int, colluders: int, *, failure: float = FAILURE) -> int:
    """The fewest neighbours with which an attempt of `size` clients or more fails with at most that probability.

    0 means all: fewer would not be enough.
    """
    if not 0 < failure < 1:
        raise SpecError(f"failure={failure} must lie between 0 and 1")
    for neighbours in range(2, size - 1, 2):
        honest, rest = size - colluders, colluders - neighbours
        ways = math.comb(honest, 2) * math.comb(rest + honest - 1, honest - 1) if rest >= 0 else 0
        falling = neighbours * (honest + 1) >= 2 * size
        if falling and Fraction(ways, math.comb(size - 1, honest - 1)) <= failure:
            return neighbours
    return 0


class Sparse(NamedTuple):
    """What `Rules` should say for a federation of that kind."""

    colluders: int
    threshold: int
    neighbours: int
    least: int  # the smallest cohort that may remain, for which `neighbours` is enough


def sparse(size: int, *, dropout: float, collusion: float, failure: float = FAILURE) -> Sparse:
    """Colluders, threshold and neighbours for cohorts of `size` of which those fractions may drop out and collude.

    The threshold is the smallest at which no two sums of a round can be opened, 2·threshold > size + colluders;
    the clients that remain must reach it. `neighbours` is enough for every cohort that may remain.
    """
    for name, value in (("dropout", dropout), ("collusion", collusion)):
        if not 0 <= value < 1:
            raise SpecError(f"{name}={value} must lie in 0 to 1")
    colluders = math.ceil(collusion * size)
    threshold = (size + colluders) // 2 + 1
    least = size - math.floor(dropout * size)
    if least < max(threshold, colluders + 2):
        raise SpecError(
            f"of {size} clients {least} remain and {colluders} collude: opening one sum and no more needs "
            f"{threshold} answers; dropout must stay below {(size - threshold + 1) / size:.3g}"
        )
    return Sparse(colluders, threshold, degree(least, colluders, failure=failure), least)
