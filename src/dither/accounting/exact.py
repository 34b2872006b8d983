"""Exact noise (R7): how far float32 may be from the real numbers of a proof, and what the sampler owes.

docs/privacy.md ("Exact noise") has the theorem and every inequality for float32. All errors are relative to what
they bound; no order of summation is assumed, with or without fused multiplication. What the sampler draws, and how
far that is from a Gaussian:

Protected noise is drawn on the integers (`privacy.lattice`): a coordinate y is rounded to a multiple k of
noise_std / WIDTH, and k + n is released, with n = SPREAD·x1 + x2 and x1, x2 two draws from one table of the
discrete Gaussian D(s), s = TABLE_STD: P(x) proportional to exp(-x²/2s²) on all integers. The table's law is
known exactly, since it is made and used in integer arithmetic. Proofs use four numbers: WIDTH, STD_FACTOR,
FAILURE_PER_DRAW, TV_PER_DRAW.

**Claim.** There is a randomised function F such that, with N ~ N(0, (STD_FACTOR·WIDTH)²) continuous, the law of
n is a mixture: with probability 1 - FAILURE_PER_DRAW a law within TV_PER_DRAW of F(N)'s in total variation, else
some other one. k + n is then the same mixture with F(k + N), for every integer k: the release is a
post-processing of the Gaussian mechanism, but for coins that do not depend on k and for TV_PER_DRAW, for each
coordinate of each draw. So every bound for Gaussian noise holds with std STD_FACTOR·noise_std and δ + m·
(FAILURE_PER_DRAW + (1 + e^ε)·TV_PER_DRAW), m the number of coordinates drawn for one client; ε is not changed.

**Why the coins cost no e^ε.** Let P', Q' be the laws of all that is released in two neighbouring worlds, P, Q
those given that no coin fails, P0, Q0 those of the Gaussian mechanism, D = m·TV_PER_DRAW, and r <= m·
FAILURE_PER_DRAW the probability that some coin fails, in both worlds the same. P' <= (1 - r)·P + r and Q' >=
(1 - r)·Q, so
P'(A) <= (1 - r)·(P0(A) + D) + r <= (1 - r)·(e^ε·Q0(A) + δ + D) + r <= e^ε·Q'(A) + δ + (1 + e^ε)·D + r.

**Proof.** F rounds at random: F(t) is discrete Gaussian on the integers with centre t and std 2 (Peikert 2010).
Write φ_r for the density of N(0, r²), K for SPREAD and R for WIDTH = s·sqrt(K² + 1).

1. F(k + t) has the law of k + F(t) for integers k. With N ~ N(0, R² - 4), P(F(N) = z) is the integral of φ(t)·
   exp(-(z-t)²/8)/S(t), and S(t) = Σ_j exp(-(j-t)²/8) = 2·sqrt(2π)·(1 ± e2), e2 = 2·Σ_j exp(-8π²j²) < 2^-112, by
   Poisson summation. Hence P(F(N) = z) = φ_R(z)/(1 ± e2).
2. For exact x1, x2 ~ D(s), P(K·x1 + x2 = z) is the sum over x1 of exp(-x1²/2s²)·exp(-(z - K·x1)²/2s²)/Z², where
   Z = s·sqrt(2π)·(1 ± 2^-1000). Completing the square it is exp(-z²/2R²) times the sum over x1 of exp(-(K·x1 -
   cz)²/2τ²), τ = K·s/sqrt(K² + 1), which is (τ·sqrt(2π)/K)·(1 ± e1), e1 = 2·Σ_j exp(-2π²j²s²/(K² + 1)) < 2^-83.
   So this law is φ_R(z)·(1 ± 2·e1).
3. Let D'(s) be D(s), given that x is one of the table's -2^13, ..., 2^13 - 1. It is within CUT, the probability
   of all other integers, of D(s).
4. The table holds integers c_x with sum 2^64 and c_x/2^64 >= (1 - η)·D'(s)(x) for each of its x: far from 0 they
   are rounded up, and what that takes near 0 is small beside the probabilities there. So its law is
   (1 - η)·D'(s) plus η times another law.
5. A draw from the table takes a bin and 18 bits from a word of its own; only if these equal the first 18 bits of
   the bin's threshold (a tie, probability 2^-18) do the 32 bits of a further word decide. On a GPU each pick has
   such a word of its own, and the picks are independent. On a CPU draw i has one such word w_i, which its first
   pick reads; the second pick reads w_i ^ w_(i+1) ^ w_(i+2). Picks whose ties read linearly independent sums are
   independent. Each sum has an odd number of terms, so a dependent set is even; no two sums are equal, so it has
   at least four. Of the smallest ones, two begin at each draw: {w_i ^ w_(i+1) ^ w_(i+2), w_i, w_(i+1), w_(i+2)}
   and {two neighbouring sums of three, w_i, w_(i+3)}; all four tie with probability 2^-72. Larger ones hold k >= 2
   sums of three, each at most two draws after the one before (else they fall apart), and at least six in all:
   fewer than 2^k begin at a draw, with probability 2^-18·max(6, k + 1). So all draws together are within 2^-70 a
   draw of independent ones.

Together 2·η <= FAILURE_PER_DRAW and 2·CUT + 2^-70 + 4·e1 + 2·e2 <= TV_PER_DRAW. A test computes η and CUT with
integers of 256 bits.

**Sums.** The steps hold for every SPREAD from 1 to 512, as e1 only falls with it; SUM_SPREAD leaves room for sums
of many clients' integers in 32 bits. Let n_1, ..., n_M be independent draws. If the laws of one of them and of the
sum of the others are φ_R and φ_{R·sqrt(M-1)} up to factors 1 ± a and 1 ± b, then, completing the square as in step
2, the law of the whole sum is φ_{R·sqrt(M)} up to (1 ± a)(1 ± b)(1 ± e3), e3 = 2·Σ_j exp(-2π²j²R²(M-1)/M), which
is below 2^-1000. By induction n_1 + ... + n_M is, unless one of the clients' coins fails, within M·TV_PER_DRAW of
F(N), N ~ N(0, M·R² - 4) continuous, and k + Σ n_i of F(k + N) for every integer k: the sum of M clients' noisy
integers is a post-processing of the Gaussian mechanism with M times the variance, up to M·TV_PER_DRAW for each
coordinate and M·FAILURE_PER_DRAW for the coins. (It is not itself discrete Gaussian, nor need it be.)

STD_FACTOR also covers that noise_std, WIDTH and their quotient are float32 when the value is scaled (2^-22
together). Rounding y to the lattice, and the error of y itself, belong to the sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dither.types import ExactNoise

# The sampler

TABLE_BITS = 14  # the table has 2^14 bins: 128 KiB
TABLE_STD = 880  # of a draw from the table, which reaches 9.3 of them
SPREAD = 512
SUM_SPREAD = 32  # where the integers of many clients are summed modulo 2^32: it leaves room for them


# The std of n = spread·x1 + x2, by spread
WIDTHS = {SPREAD: TABLE_STD * math.sqrt(SPREAD**2 + 1), SUM_SPREAD: TABLE_STD * math.sqrt(SUM_SPREAD**2 + 1)}
WIDTH, SUM_WIDTH = WIDTHS[SPREAD], WIDTHS[SUM_SPREAD]
STD_FACTOR = (1 - 2.0**-22) * math.sqrt(1 - 4 / SUM_WIDTH**2)
FAILURE_PER_DRAW = 2.0**-49
TV_PER_DRAW = 2.0**-65

# Float32

UNIT = 2.0**-24  # relative error of a float32 operation
BLOCK = 64  # records whose clipped gradients are summed at once, where a batch has more than twice as many
ROW = 256  # squares that a norm sums at once
PLACES = 8  # a batch is filled up to a multiple: what is left of it a CPU would multiply in another order
_SCALE = 16 * UNIT  # square root, quotient and product behind a clip; clip and noise rounded to float32


def accumulated(operations: float) -> float:
    """Relative error of that many float32 operations in turn (Higham's γ)."""
    if operations * UNIT >= 0.5:
        return math.inf
    return operations * UNIT / (1.0 - operations * UNIT)


def noise(dimension: int, *, summed: int = 0) -> ExactNoise:
    """What integer noise costs each use of a release of this dimension; the integers of `summed` clients are
    summed as they are."""
    rounding = math.sqrt(dimension) / ((SUM_WIDTH if summed else WIDTH) * STD_FACTOR)
    draws = max(summed, 1) * dimension
    return ExactNoise(rounding, draws * TV_PER_DRAW, draws * FAILURE_PER_DRAW, bool(summed))


def norm_error(squares: int) -> float:
    """By how much, relatively, a vector may exceed the clip if float32 sums its squared norm in this many
    operations."""
    return 0.5 * accumulated(squares + 4) * 1.01 + _SCALE


def blocked_norm_error(sizes: Iterable[int]) -> float:
    """The same for `clipping.blocked_norm` of arrays of these sizes."""
    return norm_error(ROW + sum(-(-size // ROW) for size in sizes))


def block_size(records: int) -> int:
    """How many places of a batch are summed at once."""
    return -(-records // PLACES) * PLACES if records <= 2 * BLOCK else BLOCK


def sum_error(records: int, *, fixed_places: bool) -> float:
    """How much further than by one contribution a sum of clipped contributions may move, in units of the clip.

    Both worlds' sums err, and so do their quotients by the step of the lattice. With `fixed_places` the record has
    one place in both worlds: only its own block differs, and blocks are added as integers. Else others may change
    places: every block may differ, and their float32 sums are added in turn.
    """
    block = min(records, block_size(records))  # adding zeros errs nowhere
    if fixed_places:
        return 2.0 * block * accumulated(block + 4)
    return 2.0 * records * accumulated(block + -(-records // block) + 4)


def summed_error(norm_error: float, records: int, *, fixed_places: bool) -> float:
    """How much further than by the clip one record may move a sum of clipped contributions, relatively."""
    return (1.0 + norm_error) * (1.0 + sum_error(records, fixed_places=fixed_places)) / STD_FACTOR - 1.0


def whole_error(sizes: Iterable[int]) -> float:
    """The same for a vector that is clipped as a whole, by `blocked_norm`, and then rounded."""
    return (1.0 + blocked_norm_error(sizes)) * (1.0 + accumulated(8)) / STD_FACTOR - 1.0
