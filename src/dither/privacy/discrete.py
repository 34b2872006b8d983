"""Noise on the integers: the discrete Gaussian, exactly, and what the sum of many clients' noise proves.

Continuous noise that is rounded at each client does not survive secure aggregation rigorously (errata G8): the sum
of rounded values is not a function of the exact sum. Here each client turns its vector into integers first and
then adds a discrete Gaussian N_Z(0, σ²) (probability of k proportional to exp(-k²/2σ²)); the integers are summed
modulo 2^k. Nothing is rounded after the noise: the sum over the clients is the release, the modulus is
post-processing.

    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020         (CKS)
    Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning
    with secure aggregation", ICML 2021                                                             (KLS)

**The sampler** is CKS Algorithms 1 to 3, vectorised: discrete Laplace by rejection, discrete Gaussian by rejection
from it. All its coins are Bernoulli(exp(-x)) with rational x. A coin compares 64 random bits with exp(-x) in
float64, computed to better than 2^-42; only where they are closer than 2^-32 the coin is decided by rational
arithmetic and as many further random bits as it takes. So the samples are exact, given that `numpy.exp` is right
to 2^-33, and floats never touch a sample. The time a draw takes depends on what is drawn.

**The sum** over the clients is proved in `accounting.gaussian` (KLS Proposition 14).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dither.accounting import zcdp_epsilon_tight
from dither.accounting.gaussian import rho
from dither.errors import NoProof, SpecError

Words = Callable[[int], np.ndarray]  # so many independent uniform words of 64 bits


def os_words(count: int) -> np.ndarray:
    """From the operating system."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


# Coins of probability exp(-x)

_RELATIVE, _ABSOLUTE = (
    2.0**-32,
    2.0**-60,
)  # how near a coin may come to its probability before it is decided exactly


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
    """Uniform integers from 0 to scale - 1; fewer than `count` where some had to be rejected."""
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
    if not (math.isfinite(variance) and 0 < variance < 2**78):
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


# From vectors to integers (KLS Algorithm 1)


def rotate(vector: np.ndarray, seed: bytes) -> np.ndarray:
    """The vector, padded to a power of two, under a random rotation that spreads its weight over all coordinates.

    Signs from a public seed that all clients of a round share, then the Walsh-Hadamard transform, orthonormal.
    """
    padded = np.zeros(padded_size(len(vector)))
    padded[: len(vector)] = vector
    return _hadamard(padded * _signs(padded.size, seed))


def rotate_back(rotated: np.ndarray, dimension: int, seed: bytes) -> np.ndarray:
    """The inverse of `rotate`."""
    signed = _hadamard(np.asarray(rotated, np.float64)) * _signs(len(rotated), seed)
    return np.asarray(signed[:dimension])


def padded_size(dimension: int) -> int:
    return 1 << max(0, dimension - 1).bit_length()


def _signs(size: int, seed: bytes) -> np.ndarray:
    stream = hashlib.shake_256(b"dither rotation, version 1\n" + seed).digest((size + 7) // 8)
    return 1.0 - 2.0 * np.unpackbits(np.frombuffer(stream, np.uint8))[:size]


def _hadamard(vector: np.ndarray) -> np.ndarray:
    out, step = vector.copy(), 1
    while step < out.size:
        pairs = out.reshape(-1, 2, step)
        out = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(-1)
        step *= 2
    return out / math.sqrt(out.size)


def rounded_norm(norm: float, dimension: int, bias: float) -> float:
    """The ℓ2 norm that a vector of at most `norm` keeps after rounding at random, with probability 1 - bias (KLS
    Proposition 22); with bias 0 always. In units of the grid."""
    always = norm + math.sqrt(dimension)
    if bias == 0:
        return always
    likely = norm**2 + dimension / 4 + math.sqrt(2 * math.log(1 / bias)) * (norm + math.sqrt(dimension) / 2)
    return min(always, math.sqrt(likely))


def conditionally_rounded(vector: np.ndarray, most: float, *, words: Words = os_words) -> np.ndarray:
    """Each coordinate up or down at random, right on average; drawn again until the ℓ2 norm is at most `most`."""
    floor = np.floor(vector)
    for _ in range(10_000):
        rounded: np.ndarray = (floor + (words(vector.size) * 2.0**-64 < vector - floor)).astype(np.int64)
        if math.sqrt(sum(int(part @ part) for part in np.array_split(rounded, -(-rounded.size // 4096)))) <= most:
            return rounded
    raise SpecError(f"no rounding of this vector has a norm of at most {most:g}; clip it first")


@dataclass(frozen=True)
class DistributedGaussian:
    """KLS Algorithm 1: how a client's float vector becomes noisy integers, and what their sum is worth.

    `clip` bounds the vector's ℓ2 norm, `granularity` is the grid (γ), `noise_std` one client's noise, all in the
    vector's own units; `bias` is β, the chance by which rounding may be redone.

    Neighbours differ in one client's whole vector (replaced, or present and absent), or, with `moved`, in one
    record that moves a client's vector by at most that much. Rounding at random can carry two near vectors further
    apart, by sqrt(d) steps of the grid at most (the same random bits for both; clip and rotation do not expand).
    That argument needs bits that do not depend on the vector, so no rounding may be redone: `bias` must be 0.
    """

    dimension: int
    clip: float
    granularity: float
    noise_std: float
    bias: float = math.exp(-0.5)

    def check(self) -> DistributedGaussian:
        for name in ("dimension", "clip", "granularity", "noise_std"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"{name}={value} must be a finite number above 0")
        if not 0 <= self.bias < 1:
            raise SpecError(f"bias={self.bias} must lie in 0 to 1")
        return self

    @property
    def norm(self) -> float:
        """The largest ℓ2 norm of a client's integers before noise."""
        return rounded_norm(self.clip / self.granularity, padded_size(self.dimension), self.bias)

    @property
    def variance(self) -> float:
        """Of the noise on the grid."""
        return (self.noise_std / self.granularity) ** 2

    def encode(self, vector: np.ndarray, seed: bytes, *, words: Words = os_words) -> np.ndarray:
        """A client's integers, noise included: clip, rotate, round, add. To be summed modulo 2^k."""
        vector = np.asarray(vector, np.float64)
        if vector.shape != (self.dimension,) or not np.isfinite(vector).all():
            raise SpecError(f"expected a vector of {self.dimension} finite numbers, not {vector.shape}")
        length = float(np.linalg.norm(vector))
        scaled = vector * (min(1.0, self.clip / length) if length else 1.0) / self.granularity
        rounded = conditionally_rounded(rotate(scaled, seed), self.norm, words=words)
        return np.asarray(rounded + discrete_gaussian(rounded.size, self.variance, words=words))

    def decode(self, total: np.ndarray, seed: bytes) -> np.ndarray:
        """The sum of the clients' vectors, with its noise, from the sum of their integers (signed)."""
        return self.granularity * rotate_back(total, self.dimension, seed)

    def sensitivity(self, *, replace: bool = True, moved: float | None = None) -> float:
        """The ℓ2 distance of neighbours' integers before noise."""
        whole = self.norm * (2.0 if replace else 1.0)
        if moved is None:
            return whole
        if self.bias:
            raise NoProof(
                f"bias={self.bias:g}: a bound for one record needs rounding that is never redone, bias = 0"
            )
        return min(whole, moved / self.granularity + math.sqrt(padded_size(self.dimension)))

    def rho(self, clients: int, *, replace: bool = True, moved: float | None = None) -> float:
        """ρ-zCDP of one sum in which that many clients' noise is unknown to the adversary."""
        distance = self.sensitivity(replace=replace, moved=moved)
        return rho(distance, variance=self.variance, clients=clients, dimension=padded_size(self.dimension))

    def epsilon(
        self, delta: float, *, rounds: int, clients: int, replace: bool = True, moved: float | None = None
    ) -> float:
        """Proven ε of that many sums, each client in all of them."""
        return zcdp_epsilon_tight(rounds * self.rho(clients, replace=replace, moved=moved), delta)
