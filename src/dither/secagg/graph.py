"""The rules of a federation's sums; and how few neighbours are enough: the degree of the mask graph and the
threshold, for given dropouts and colluders.

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
from dither.secagg.encoding import check_modulus

FAILURE = 2.0**-40  # what clients accept of one attempt
MAX_CLIENTS = 1 << 16


class Rules(NamedTuple):
    """What everyone agrees on before enrolling; a roster with other rules is refused.

    `colluders` is c, how many clients may work together with the server. `threshold` is how many answers open a
    sum; 0 takes the smallest safe number for the cohort a round begins with. `neighbours` is how many other
    clients each one shares masks with; 0 is all of them.
    """

    modulus_bits: int = 32
    threshold: int = 0
    colluders: int = 0
    min_clients: int = 2
    neighbours: int = 0

    def check(self) -> Rules:
        """Itself, or `SpecError` if the rules protect nobody."""
        check_modulus(self.modulus_bits)
        if not 0 <= self.colluders <= MAX_CLIENTS:
            raise SpecError(f"colluders={self.colluders} must lie in 0 to {MAX_CLIENTS}")
        if not self.colluders + 2 <= self.min_clients <= MAX_CLIENTS:
            raise SpecError(
                f"min_clients={self.min_clients} must be at least colluders + 2 = {self.colluders + 2}: "
                "in a smaller sum the colluders would read the one client that is left"
            )
        if self.threshold and not self.colluders + 2 <= self.threshold <= MAX_CLIENTS:
            raise SpecError(f"threshold={self.threshold} must be at least colluders + 2 = {self.colluders + 2}")
        if self.neighbours < 0 or self.neighbours % 2 or self.neighbours > MAX_CLIENTS:
            raise SpecError(f"neighbours={self.neighbours} must be 0 (all) or an even number")
        return self

    def check_sum(self, size: int, threshold: int) -> None:
        """`SpecError` if a sum of so many clients that `threshold` answers open would protect too little."""
        safe = (size + self.colluders) // 2 + 1
        if threshold < safe:
            raise SpecError(
                f"threshold {threshold} is too low for a cohort of {size} with {self.colluders} colluders: "
                f"two sums could be opened; at least {safe} is safe"
            )
        if self.neighbours and disconnected(size, self.colluders, self.neighbours) > FAILURE:
            enough = degree(size, self.colluders) or "all (0)"
            raise SpecError(
                f"neighbours={self.neighbours} are too few for a cohort of {size} with {self.colluders} "
                f"colluders: use {enough}"
            )

    def threshold_for(self, cohort_size: int) -> int:
        """How many answers open a sum in a round that begins with that many clients (2·threshold > size + c)."""
        return self.threshold or (cohort_size + self.colluders) // 2 + 1

    def least(self, cohort_size: int) -> int:
        """Clients without which no sum of such a round is opened."""
        return max(self.min_clients, self.colluders + 2, self.threshold_for(cohort_size))

    @property
    def word_bytes(self) -> int:
        return self.modulus_bits // 8


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
