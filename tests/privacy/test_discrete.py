"""Discrete Gaussian noise: exact samples, exact integers, and a bound for the sum that is never too low."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from dither.accounting.gaussian import closeness, rho
from dither.errors import NoProof, SpecError
from dither.privacy import discrete


def seeded(seed: int):
    """Words that repeat: a test that passes once passes always."""
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(0, 2**64 - 1, count, np.uint64, endpoint=True)


def gaussian_pmf(variance: float, reach: int) -> np.ndarray:
    k = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-(k**2) / (2 * variance))
    return weights / weights.sum()


def fits(samples: np.ndarray, pmf: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 are joined."""
    reach = len(pmf) // 2
    assert np.abs(samples).max() <= reach
    counts = np.bincount(samples + reach, minlength=len(pmf))
    expected = pmf * samples.size
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


# The sampler


@pytest.mark.parametrize("variance", [Fraction(1, 9), 0.5, 1, Fraction(7, 3), 10.0, 900])
def test_the_samples_have_the_exact_distribution(variance):
    """Ten batches: their p-values are uniform, and all together fit."""
    batches = [discrete.discrete_gaussian(30_000, variance, words=seeded(seed)) for seed in range(10)]
    pmf = gaussian_pmf(float(variance), 12 + int(9 * math.sqrt(variance)))
    assert stats.kstest([fits(batch, pmf) for batch in batches], "uniform").pvalue > 1e-3
    samples = np.concatenate(batches)
    assert fits(samples, pmf) > 1e-3
    k = np.arange(len(pmf)) - len(pmf) // 2
    true = float((pmf * k**2).sum())
    assert true <= float(variance) * (1 + 1e-12)  # CKS: never more than σ²
    fourth = float((pmf * k**4).sum())
    assert abs(samples.var() - true) < 5 * math.sqrt((fourth - true**2) / samples.size)
    assert abs(samples.mean()) < 5 * math.sqrt(true / samples.size)


def test_large_variances():
    """Too many values for a table: the distribution function instead."""
    sigma = 2.0**20 + 0.37
    samples = discrete.discrete_gaussian(100_000, sigma**2, words=seeded(3))
    assert stats.kstest(samples / sigma, "norm").pvalue > 1e-3
    assert np.unique(samples % 2).size == 2
    assert abs((samples % 2).mean() - 0.5) < 0.008


@pytest.mark.parametrize("scale", [1, 2, 5, 64])
def test_the_discrete_laplace(scale):
    samples = discrete.discrete_laplace(100_000, scale, words=seeded(scale))
    k = np.arange(-40 * scale, 40 * scale + 1)
    pmf = np.exp(-np.abs(k) / scale)
    assert fits(samples, pmf / pmf.sum()) > 1e-3


def test_the_check_would_see_a_wrong_variance():
    samples = discrete.discrete_gaussian(150_000, 10.4, words=seeded(1))
    assert fits(samples, gaussian_pmf(10.0, 60)) < 1e-3


@pytest.mark.parametrize("variance", [Fraction(1, 3), 2.5, 12345])
def test_floats_decide_as_rational_arithmetic_would(monkeypatch, variance):
    """The same words, once with float64 coins and once with every coin decided exactly: the same samples."""
    quick = discrete.discrete_gaussian(300, variance, words=seeded(5))
    monkeypatch.setattr(discrete, "_RELATIVE", 2.0)
    monkeypatch.setattr(discrete, "_ABSOLUTE", 2.0)
    assert discrete.discrete_gaussian(300, variance, words=seeded(5)).tolist() == quick.tolist()


@pytest.mark.parametrize(
    "x", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(22, 7), Fraction(50), Fraction(2000)]
)
def test_bounds_of_the_exponential(x):
    for bits in (20, 80, 200):
        low, high = discrete._exp_bounds(x, bits)
        assert 0 <= high - low <= Fraction(1, 2**bits)
        assert float(low) <= math.exp(-x) * (1 + 1e-12)
        assert float(high) >= math.exp(-x) * (1 - 1e-12)


def test_a_coin_that_64_bits_leave_open_is_decided_by_further_bits():
    x = Fraction(1)
    cell = math.floor(discrete._exp_bounds(x, 100)[0] * 2**64)  # exp(-1) lies inside this cell
    asked = []

    def more(value):
        def words(count):
            asked.append(count)
            return np.array([value] * count, np.uint64)

        return words

    assert discrete._below(cell, x, more(0))
    assert not discrete._below(cell, x, more(2**64 - 1))
    assert len(asked) == 2
    assert discrete._below(cell - 1, x, more(0))
    assert not discrete._below(cell + 1, x, more(0))
    assert len(asked) == 2


def test_a_coin_that_float64_cannot_tell_from_its_probability_is_decided_exactly():
    """Both words are exp(-1) in float64: one is below it, the other above."""
    cell = math.floor(discrete._exp_bounds(Fraction(1), 100)[0] * 2**64)
    drawn = np.array([cell - 1, cell + 1], np.uint64)
    assert np.unique(drawn * 2.0**-64).size == 1
    coins = discrete._coins(np.ones(2), lambda _: Fraction(1), lambda count: drawn[:count])
    assert coins.tolist() == [True, False]


def test_the_operating_system_feeds_it():
    one, other = (discrete.discrete_gaussian(1000, 100.0) for _ in range(2))
    assert one.dtype == np.int64
    assert not np.array_equal(one, other)
    assert 70 < one.var() < 135  # 6 standard deviations
    assert discrete.discrete_gaussian(0, 1.0).size == 0


def test_impossible_parameters():
    for wrong in (0, -1.0, math.nan, math.inf, 2.0**80):
        with pytest.raises(SpecError, match="variance="):
            discrete.discrete_gaussian(1, wrong)
    with pytest.raises(SpecError, match="scale=0"):
        discrete.discrete_laplace(1, 0)


# Rotation and rounding


# The sum's accountant


REACH = 60  # far beyond what decides a divergence of the orders below


def log_pmf(variance: float, reach: int = REACH) -> np.ndarray:
    weights = -(np.arange(-reach, reach + 1, dtype=np.float64) ** 2) / (2 * variance)
    return weights - special.logsumexp(weights)


def log_convolved(variance: float, clients: int) -> np.ndarray:
    """The logarithm of the sum's probabilities: tails far below what a float holds still count."""
    one, total = log_pmf(variance), log_pmf(variance)
    for _ in range(clients - 1):
        wide = np.full((len(one), len(total) + len(one) - 1), -np.inf)
        for place, weight in enumerate(one):
            wide[place, place : place + len(total)] = total + weight
        total = special.logsumexp(wide, axis=0)
    return total


def renyi(log_p: np.ndarray, shift: int, order: float) -> float:
    """The Rényi divergence of a distribution from itself, shifted, over the part where both are accurate."""
    moved, still = log_p[shift:], log_p[: len(log_p) - shift]
    return float(special.logsumexp(order * moved + (1 - order) * still) / (order - 1))


@pytest.mark.parametrize("variance", [0.25, 0.3, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("clients", [1, 2, 5, 20])
def test_the_proof_holds_for_sums_computed_exactly(variance, clients):
    """In one dimension the sum's distribution can be computed: its divergence at every order is within ρ·order."""
    log_p = log_convolved(variance, clients)
    for shift in (1, 2, 3):
        bound = rho(shift, variance=variance, clients=clients, dimension=1)
        for order in (1.1, 1.5, 2, 4, 8):
            assert renyi(log_p, shift, order) <= order * bound * (1 + 1e-9)
        # No better than continuous noise of the same variance.
        assert bound >= shift**2 / (2 * clients * variance) * (1 - 1e-12)


def test_closeness_bounds_how_far_the_sum_is_from_one_discrete_gaussian():
    for variance in (0.25, 0.4, 0.6):
        for clients in (2, 3, 6):
            found = log_convolved(variance, clients)
            one = log_pmf(clients * variance, len(found) // 2)
            middle = slice(len(found) // 2 - 30, len(found) // 2 + 31)
            assert np.abs(found[middle] - one[middle]).max() <= closeness(variance, clients)


def test_the_sum_costs_almost_nothing_beyond_the_gaussian_when_the_grid_is_fine():
    assert closeness(4.0, 100) < 1e-14
    assert closeness(1.0, 1) == 0
    found = rho(10.0, variance=4.0, clients=100, dimension=2**20)
    assert found == pytest.approx(100 / (2 * 400), rel=1e-6)
    coarse = rho(10.0, variance=0.3, clients=100, dimension=2**20)
    assert coarse > 2 * 100 / (2 * 30)


def test_no_proof_without_noise_that_is_unknown_or_wide_enough():
    with pytest.raises(NoProof, match="0 clients add noise"):
        rho(1.0, variance=1.0, clients=0, dimension=1)
    with pytest.raises(NoProof, match="below 1/4"):
        rho(1.0, variance=0.2, clients=2, dimension=1)
    assert rho(1.0, variance=0.2, clients=1, dimension=1) == pytest.approx(2.5)


@pytest.mark.parametrize("scale", [0, 2**40])
def test_a_scale_beyond_its_range_is_refused(scale):
    with pytest.raises(SpecError, match=f"scale={scale} must lie in 1 to 2"):
        discrete.discrete_laplace(1, scale)
