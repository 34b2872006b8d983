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
from collections.abc import Mapping, Sequence

import numpy as np

from dither.errors import ProtocolAbort

PRIME = 2**257 - 93
SECRET_BYTES = 32
SHARE_BYTES = 33
MOST_SHARES = (1 << 15) - 1


def split(secret: bytes, *, shares: int, threshold: int) -> list[bytes]:
    """Shares 1 to `shares` of a secret of 32 bytes."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= shares:
        raise ValueError(f"threshold={threshold} must lie in 1 to shares={shares}")
    if shares > MOST_SHARES:
        raise ValueError(f"shares={shares}: at most {MOST_SHARES} are possible")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [value.to_bytes(SHARE_BYTES, "big") for value in _evaluate(coefficients, shares)]


def _evaluate(coefficients: Sequence[int], count: int) -> list[int]:
    """The polynomial at 1 to `count`, by Horner's rule at all of them at once. Numbers are in limbs, short enough
    for two steps of the rule to fit 63 bits; then what exceeds a limb goes to the next, and 2^257 counts as 93."""
    bits = 61 - 2 * count.bit_length()
    limbs = -(-257 // bits)
    top, mask = 257 - bits * (limbs - 1), (1 << bits) - 1
    table = [[number >> bits * limb & mask for limb in range(limbs)] for number in coefficients]
    places, value = np.arange(1, count + 1), np.zeros((limbs, count), np.int64)
    for step, row in enumerate(np.array(table[::-1], np.int64)[:, :, None]):
        value *= places
        value += row
        if step % 2:
            value[0] += 93 * (value[-1] >> top)
            value[-1] &= (1 << top) - 1
            carry = value[:-1] >> bits
            value[:-1] &= mask
            value[1:] += carry
    return [sum(part << bits * limb for limb, part in enumerate(each)) % PRIME for each in value.T.tolist()]


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
