"""Noise on a lattice: discrete Gaussian integers from random words, in integer arithmetic alone.

The sampler is one alias table (Walker 1977; Vose 1991) of a discrete Gaussian, used twice a draw.
`accounting.exact` has its constants and the proof of what it draws. It has no branches and takes the same
time for every draw, up to the processor's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from dither.accounting.exact import SPREAD, SUM_SPREAD, SUM_WIDTH, TABLE_BITS, TABLE_STD, WIDTH
from dither.types import Array, PyTree

REACH = np.float32(
    2**30 - 64
)  # two such integers add up in int32; lattice values are cut here, some 2,000 noise stds from 0
_BINS = 1 << TABLE_BITS
_HIGH_BITS = 32 - TABLE_BITS  # bits of a word, beside the bin, that are compared with the threshold
_CENTRE = 3 * TABLE_STD // 2
_FRACTION_BITS = 256  # of the integers that probabilities are computed with


LookUp = Callable[[Array], tuple[Array, Array]]


# The table, made once


@functools.cache
def law() -> np.ndarray:
    """How many of 2^64 equally likely cases give x = -2^13, ..., 2^13 - 1, as uint64: P(x)·2^64, beyond ±_CENTRE
    rounded up. What that takes is missing inside, in proportion."""
    weights = _weights(_BINS // 2)
    total = weights[0] + 2 * sum(weights[1:-1]) + weights[-1]
    outer = [(weight << 64) // total + 1 for weight in weights[_CENTRE + 1 :]]
    left, inside = 2**64 - 2 * sum(outer[:-1]) - outer[-1], weights[0] + 2 * sum(weights[1 : _CENTRE + 1])
    centre = [weight * left // inside for weight in weights[1 : _CENTRE + 1]]
    half = [left - 2 * sum(centre), *centre, *outer]
    return np.array([*half[:0:-1], *half[:-1]], np.uint64)


def _weights(last: int) -> list[int]:
    """exp(-x²/2s²)·2^256 for x = 0, ..., last, each with an error below 2^30."""
    one = 1 << _FRACTION_BITS
    ratio = _exponential(Fraction(1, 2 * TABLE_STD**2))  # exp(-1/2s²)
    square = ratio * ratio >> _FRACTION_BITS
    weights = [one]
    for _ in range(last):
        weights.append(weights[-1] * ratio >> _FRACTION_BITS)  # exp(-(x+1)²/2s²) is that of x times ratio^(2x+1)
        ratio = ratio * square >> _FRACTION_BITS
    return weights


def _exponential(x: Fraction) -> int:
    """exp(-x)·2^256 for a small x, by its series."""
    term = total = Fraction(1 << _FRACTION_BITS)
    for k in range(1, 64):
        term = Fraction(int(-term * x / k))
        total += term
    return int(total)


@functools.cache
def table() -> np.ndarray:
    """The alias table, `[2, bins]` of uint32: a threshold's high bits above the alias, and its low bits.

    Of 2^50 cases of a bin, those below the threshold give the bin's own number, the others its alias.
    """
    capacity = 2**64 // _BINS
    cases = [int(count) for count in law()]
    thresholds, aliases = list(cases), list(range(_BINS))
    small = [i for i, count in enumerate(cases) if count < capacity]
    large = [i for i, count in enumerate(cases) if count > capacity]
    while small:
        filled, giver = small.pop(), large[-1]
        thresholds[filled], aliases[filled] = cases[filled], giver
        cases[giver] -= capacity - cases[filled]
        if cases[giver] <= capacity:
            large.pop()
        if cases[giver] < capacity:
            small.append(giver)
    # A bin that is full holds its own number alone: as its alias, since a threshold of 2^50 has 51 bits.
    thresholds = [0 if alias == i else thresholds[i] for i, alias in enumerate(aliases)]
    high = [threshold >> 32 << TABLE_BITS | alias for threshold, alias in zip(thresholds, aliases, strict=True)]
    return np.array([high, [threshold & 0xFFFFFFFF for threshold in thresholds]], np.uint32)


# Draws


def draw(
    high: Sequence[Array], low: Sequence[Array], look_up: LookUp | None = None, *, spread: int = SPREAD
) -> Array:
    """Integers of std `WIDTHS[spread]`, int32, from two arrays of uniform uint32 and two further ones, which
    decide ties: one draw in 2^17 has one. `look_up` reads the table's columns."""
    look_up = look_up or _look_up
    return spread * _pick(high[0], low[0], look_up) + _pick(high[1], low[1], look_up)


def _look_up(bins: Array) -> tuple[Array, Array]:
    high, low = jnp.asarray(table())
    return high.at[bins].get(mode="promise_in_bounds"), low.at[bins].get(mode="promise_in_bounds")


def _pick(high: Array, low: Array, look_up: LookUp = _look_up) -> Array:
    """One draw from the table."""
    own = bin_of(high)
    packed, threshold_low = look_up(own)
    compared, threshold = _compared(high, packed)
    keep = (compared < threshold) | ((compared == threshold) & (low < threshold_low))
    alias = (packed & np.uint32(_BINS - 1)).astype(jnp.int32)
    return jnp.where(keep, own, alias) - _BINS // 2


def bin_of(high: Array) -> Array:
    """The bin of the table that a word takes."""
    return (high >> np.uint32(_HIGH_BITS)).astype(jnp.int32)


def tied(high: Array, packed: Array) -> Array:
    """Whether a further word decides what the word draws; `packed` is the first column of its bin."""
    compared, threshold = _compared(high, packed)
    return compared == threshold


def _compared(high: Array, packed: Array) -> tuple[Array, Array]:
    return high & np.uint32(2**_HIGH_BITS - 1), packed >> np.uint32(TABLE_BITS)


# Integers before the noise


def scale_of(noise_std: Array, reach: Array) -> Array:
    """Steps of the lattice in 1 for noise of that std; for a std of 0 such that values up to `reach` fit."""
    noise_std = jnp.asarray(noise_std, jnp.float32)
    return jnp.minimum(jnp.where(noise_std > 0, np.float32(WIDTH) / noise_std, 2.0**28 / reach), np.float32(1e30))


def sum_reach(clients: int) -> int:
    """Where a client's integers are cut, so that no sum over so many clients overflows 32 bits with its noise."""
    return 2**31 // clients - (SUM_SPREAD + 1) * _BINS


def sum_scale(noise_std: Array, clip_norm: Array) -> Array:
    """`scale_of` for integers that are summed over clients, of means whose records are clipped."""
    noise_std = jnp.asarray(noise_std, jnp.float32)
    return jnp.minimum(
        jnp.where(noise_std > 0, np.float32(SUM_WIDTH) / noise_std, 2.0**18 / clip_norm), np.float32(1e30)
    )


def rounded(tree: PyTree, scale: Array) -> PyTree:
    """The nearest integers to tree · scale, within ±REACH."""
    return jax.tree.map(lambda leaf: jnp.clip(jnp.rint(leaf * scale), -REACH, REACH).astype(jnp.int32), tree)


def added(one: PyTree, other: PyTree) -> PyTree:
    """The sum of two trees of such integers, again within ±REACH. Clamping is monotone and moves no two sums
    further apart, whatever was added before and is added later."""
    return jax.tree.map(lambda a, b: jnp.clip(a + b, -np.int32(REACH), np.int32(REACH)), one, other)


def released(value: Array, drawn: Array, noise_std: Array) -> Array:
    """`value` rounded to the lattice of noise_std / WIDTH, plus the integers drawn. A std of 0 adds nothing."""
    noise_std = jnp.asarray(noise_std, jnp.float32)
    scale = jnp.minimum(np.float32(WIDTH) / noise_std, np.float32(1e30))
    noisy = (rounded(value, scale) + drawn).astype(jnp.float32) * (noise_std * np.float32(1 / WIDTH))
    return jnp.where(noise_std > 0, noisy, value)
