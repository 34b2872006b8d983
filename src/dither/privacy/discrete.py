"""Noise on the integers: the discrete Gaussian, exactly.

Continuous noise that is rounded at each client does not survive secure aggregation rigorously (errata G8): the sum
of rounded values is not a function of the exact sum. Here each client turns its vector into integers first and
then adds a discrete Gaussian N_Z(0, σ²) (probability of k proportional to exp(-k²/2σ²)); the integers are summed
modulo 2^k. Nothing is rounded after the noise: the sum over the clients is the release, the modulus is
post-processing.

    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020         (CKS)
    Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning
    with secure aggregation", ICML 2021                                                              (KLS)

**The sampler** is CKS Algorithms 1 to 3, vectorised: discrete Laplace by rejection, discrete Gaussian by rejection
from it. All its coins are Bernoulli(exp(-x)) with rational x. A coin compares 64 random bits with exp(-x) in
float64, computed to better than 2^-42; only where they are closer than 2^-32 the coin is decided by rational
arithmetic and as many further random bits as it takes. So the samples are exact, given that `numpy.exp` is right
to 2^-33, and floats never touch a sample. The time a draw takes depends on what is drawn.

**The sum** over the clients is proved in `accounting.gaussian` (KLS Proposition 14).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from dither.errors import SpecError

Words = Callable[[int], np.ndarray]  # so many independent uniform words of 64 bits
MOST_VARIANCE = 2**78  # of a discrete Gaussian: its integers fit 64 bits


def os_words(count: int) -> np.ndarray:
    """From the operating system."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


# Coins of probability exp(-x)

# How near a coin may come to its probability before it is decided exactly
_RELATIVE, _ABSOLUTE = 2.0**-32, 2.0**-60


def _coins(x: np.ndarray, exactly: Callable[[int], Fraction], words: Words) -> np.ndarray:
    """Independent Bernoulli(exp(-x)); `exactly(i)` is x[i] as a rational number."""
    drawn = words(x.size)
    uniform, chance = drawn * 2.0**-64, np.exp(-x)
    margin = chance * _RELATIVE + _ABSOLUTE
    heads: np.ndarray = uniform < chance
    for i in np.flatnonzero(np.abs(uniform - chance) <= margin):
        heads[i] = _below(int(drawn[i]), exactly(int(i)), words)
    return heads


def _below(drawn: int, x: Fraction, words: Words) -> bool:
    """Whether the uniform number whose first 64 bits are `drawn` is below exp(-x)."""
    bits = 64
    while True:
        low, high = _exp_bounds(x, bits + 8)
        if drawn + 1 <= low * 2**bits:
            return True
        if drawn >= high * 2**bits:
            return False
        drawn, bits = drawn << 64 | int(words(1)[0]), bits + 64


def _exp_bounds(x: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Rational numbers around exp(-x), at most 2^-bits apart."""
    whole, rest = divmod(x, 1)
    low, high = _unit_bounds(rest, bits + 2)
    if whole:
        # |a^n - b^n| <= n |a - b| for a, b in [0, 1]
        below, above = _unit_bounds(Fraction(1), bits + 2 + int(whole).bit_length())
        low, high = low * below ** int(whole), high * above ** int(whole)
    return low, high


def _unit_bounds(x: Fraction, bits: int) -> tuple[Fraction, Fraction]:
    """Around exp(-x) for x in [0, 1]: the partial sums of its series lie above and below it in turns."""
    low, high, term, total, k = Fraction(0), Fraction(1), Fraction(1), Fraction(1), 0
    while high - low > Fraction(1, 2**bits):
        k += 1
        term = term * x / k
        total += -term if k % 2 else term
        low, high = (total, high) if k % 2 else (low, total)
    return low, high


# Samplers


def discrete_laplace(count: int, scale: int, *, words: Words = os_words) -> np.ndarray:
    """`count` integers with probability proportional to exp(-|k|/scale) (CKS Algorithm 2, integer scale)."""
    if not 1 <= scale < 2**40:
        raise SpecError(f"scale={scale} must lie in 1 to 2^40")
    samples = [np.zeros(0, np.int64)]
    missing = count
    while missing > 0:
        batch = int(1.7 * missing) + 16
        rest = _below_scale(batch, scale, words)

        def exactly(i: int, rest: np.ndarray = rest) -> Fraction:
            return Fraction(int(rest[i]), scale)

        rest = rest[_coins(rest / scale, exactly, words)]
        size = rest + scale * _geometric(rest.size, words)
        negative = (words(size.size) & np.uint64(1)).astype(bool)
        kept = ~(negative & (size == 0))  # zero would otherwise come twice
        samples.append(np.where(negative, -size, size)[kept])
        missing -= samples[-1].size
    return np.concatenate(samples)[:count]


def _below_scale(count: int, scale: int, words: Words) -> np.ndarray:
    """Uniform integers from 0 to scale - 1; fewer than `count` if some had to be rejected."""
    bits = (scale - 1).bit_length()
    if bits == 0:
        return np.zeros(count, np.int64)
    drawn = (words(count) >> np.uint64(64 - bits)).astype(np.int64)
    return drawn[drawn < scale]


def _geometric(count: int, words: Words) -> np.ndarray:
    """How many coins of probability 1/e come up heads before the first tails."""
    heads = np.zeros(count, np.int64)
    going = np.arange(count)
    while going.size:
        going = going[_coins(np.ones(going.size), lambda _: Fraction(1), words)]
        heads[going] += 1
    return heads


def discrete_gaussian(count: int, variance: Fraction | float, *, words: Words = os_words) -> np.ndarray:
    """`count` integers with probability proportional to exp(-k²/(2·variance)) (CKS Algorithm 3).

    A float is taken as the rational number that it is. The samples' variance is at most `variance`.
    """
    if not (math.isfinite(variance) and 0 < variance < MOST_VARIANCE):
        raise SpecError(f"variance={variance} must lie in 0 to 2^78")
    exact = Fraction(variance)
    scale = math.isqrt(math.floor(exact)) + 1
    centre = exact / scale
    samples = [np.zeros(0, np.int64)]
    missing = count
    while missing > 0:
        drawn = discrete_laplace(int(1.5 * missing) + 16, scale, words=words)
        size = np.abs(drawn)

        def exactly(i: int, size: np.ndarray = size) -> Fraction:
            return (int(size[i]) - centre) ** 2 / (2 * exact)

        x = (size - float(centre)) ** 2 / (2 * float(exact))
        samples.append(drawn[_coins(x, exactly, words)])
        missing -= samples[-1].size
    return np.concatenate(samples)[:count]
