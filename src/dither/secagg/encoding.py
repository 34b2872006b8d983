"""Floats as integers modulo 2^k, so that sums of masked vectors are exact.

A value is clamped to [-bound, bound], multiplied by 2^scale_bits, rounded to even and taken modulo 2^k. Sums of
up to `num_clients` such values cannot overflow: num_clients · bound · 2^scale_bits < 2^(k-1) is required. Decoding
reads the sum as a signed number. Rounding and clamping happen at each client, so the sum of encodings is not a
function of the exact sum: the credit for other clients' noise is then only approximate (errata G8).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dither.errors import SpecError
from dither.types import Array


def check_modulus(bits: int) -> None:
    """`SpecError` unless words have 32 or 64 bits."""
    if bits not in (32, 64):
        raise SpecError(f"modulus_bits={bits} is not one of 32, 64")


class FixedPoint(NamedTuple):
    """How numbers become integers."""

    scale_bits: int = 20
    modulus_bits: int = 32
    bound: float = 64.0
    num_clients: int = 10

    def check(self) -> FixedPoint:
        """Itself, or `SpecError` if a sum could overflow."""
        check_modulus(self.modulus_bits)
        if not (np.isfinite(self.bound) and self.bound > 0):
            raise SpecError(f"bound={self.bound} must be a finite number above 0")
        # Compiled rounds clamp at the bound as float32, which may lie above it.
        bound = max(self.bound, float(np.float32(self.bound)))
        largest = self.num_clients * bound * 2.0**self.scale_bits
        if largest >= 2.0 ** (self.modulus_bits - 1):
            raise SpecError(
                f"a sum of {self.num_clients} values up to {self.bound:g} at {self.scale_bits} fractional bits "
                f"reaches {largest:.3g}, beyond 2^{self.modulus_bits - 1}; lower scale_bits or bound, or use 64"
            )
        return self

    @classmethod
    def fitting(cls, num_clients: int, *, scale_bits: int = 20, modulus_bits: int = 32) -> FixedPoint:
        """With the largest power of two as bound for which no sum of `num_clients` values overflows."""
        bound = 2.0 ** (modulus_bits - 2 - scale_bits - math.floor(math.log2(num_clients)))
        return cls(scale_bits, modulus_bits, bound, num_clients).check()

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The unsigned words of the ring."""
        return np.uint32 if self.modulus_bits == 32 else np.uint64


def encode(values: np.ndarray, fixed_point: FixedPoint) -> tuple[np.ndarray, int]:
    """The values as ring elements, and how many coordinates had to be clamped."""
    fixed_point.check()
    values = np.asarray(values, np.float64)
    if not np.isfinite(values).all():
        raise SpecError("a value to encode is not finite; refuse the update before encoding it")
    clamped = int(np.count_nonzero(np.abs(values) > fixed_point.bound))
    scaled = np.rint(np.clip(values, -fixed_point.bound, fixed_point.bound) * 2.0**fixed_point.scale_bits)
    return scaled.astype(np.int64).astype(np.uint64).astype(fixed_point.dtype), clamped


def words(integers: np.ndarray, fixed_point: FixedPoint) -> np.ndarray:
    """Integers of 32 bits as ring elements."""
    return np.asarray(integers.astype(np.int64).astype(np.uint64).astype(fixed_point.dtype))


def traced_encode(values: Array, fixed_point: FixedPoint) -> tuple[Array, Array]:
    """`encode` inside a compiled program, for 32-bit words: the same integers, as int32. Values that are not
    finite become 0; the caller leaves such a vector out.

    Exact in float32: a product with a power of two and the rounding of a float to an integer lose nothing.
    """
    values = jnp.where(jnp.isfinite(values), values, 0).astype(jnp.float32)
    clamped = jnp.sum(jnp.abs(values) > fixed_point.bound, dtype=jnp.int32)
    scaled = jnp.rint(jnp.clip(values, -fixed_point.bound, fixed_point.bound) * 2.0**fixed_point.scale_bits)
    return scaled.astype(jnp.int32), clamped


def traced_decode(total: Array, fixed_point: FixedPoint) -> Array:
    """`decode` inside a compiled program, to float32, from int32 words."""
    return total.astype(jnp.float32) * 2.0**-fixed_point.scale_bits


def decode(total: np.ndarray, fixed_point: FixedPoint) -> np.ndarray:
    """A sum of encodings (modulo 2^k) as floats."""
    signed = np.asarray(total, fixed_point.dtype).view(np.int32 if fixed_point.modulus_bits == 32 else np.int64)
    return signed.astype(np.float64) / 2.0**fixed_point.scale_bits
