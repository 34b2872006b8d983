"""Secret sharing: any `threshold` of the shares of a 256-bit secret rebuild it, fewer say nothing about it.

Shamir, "How to share a secret", CACM 1979. The secret is the constant term of a polynomial of degree threshold-1
over the integers modulo the prime 2^257 - 93, its other coefficients are uniform, and share x (1, 2, ...) is the
value at x. Given threshold-1 shares, each candidate secret fits exactly one polynomial: all are equally likely.

The arithmetic is Python's and its time depends on the numbers. Shares are made and joined once a round, far from
anyone who could time them closely; do not use this file where that is not so.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping

from dither.errors import ProtocolAbort

PRIME = 2**257 - 93
SECRET_BYTES = 32
SHARE_BYTES = 33
_REDUCE = 16  # steps of a polynomial between two reductions modulo the prime


def split(secret: bytes, *, shares: int, threshold: int) -> list[bytes]:
    """Shares 1 to `shares` of a secret of 32 bytes."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= shares:
        raise ValueError(f"threshold={threshold} must lie in 1 to shares={shares}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    downwards = coefficients[::-1]
    parts = [downwards[start : start + _REDUCE] for start in range(0, threshold, _REDUCE)]
    values = []
    for x in range(1, shares + 1):
        value = 0
        for part in parts:
            for coefficient in part:
                value = value * x + coefficient
            value %= PRIME
        values.append(value.to_bytes(SHARE_BYTES, "big"))
    return values


def join(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret, from shares by their number. More than `threshold` of them must lie on one polynomial."""
    if len(shares) < threshold:
        raise ProtocolAbort(f"{len(shares)} shares received, threshold is {threshold}")
    values = {x: read(share) for x, share in shares.items()}
    points = tuple(sorted(values)[:threshold])
    for x in sorted(values)[threshold:]:
        if _interpolate(values, points, x) != values[x]:
            raise ProtocolAbort(f"share {x} does not fit the others")
    secret = _interpolate(values, points, 0)
    if secret >> (8 * SECRET_BYTES):
        raise ProtocolAbort("the shares join to no secret of 256 bits: one of them is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")


def read(share: bytes) -> int:
    """A share as an element of the field, or `ProtocolAbort`."""
    if len(share) != SHARE_BYTES:
        raise ProtocolAbort(f"a share has {SHARE_BYTES} bytes, not {len(share)}")
    value = int.from_bytes(share, "big")
    if value >= PRIME:
        raise ProtocolAbort("a share is not a reduced element of the field")
    return value


def _interpolate(values: Mapping[int, int], points: tuple[int, ...], at: int) -> int:
    """The polynomial through the points, at another one (Lagrange)."""
    return sum(values[x] * weight for x, weight in zip(points, _weights(points, at), strict=True)) % PRIME


@functools.lru_cache(16)
def _weights(points: tuple[int, ...], at: int) -> list[int]:
    """What each point counts for: the same for all secrets that are shared among the same receivers."""
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * (at - other) % PRIME
                below = below * (x - other) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
