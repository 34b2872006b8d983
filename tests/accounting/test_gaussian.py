"""R1: the exact Gaussian profile and its inverses."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from dither import accounting, methods
from dither.accounting.gaussian import (
    log_gaussian_delta,
    message_epsilon,
    message_noise_multiplier,
    rounded_levels,
)

mus = st.floats(-13.8, 6.9).map(math.exp)  # 1e-6 .. 1e3
deltas = st.floats(-40.0, -2.0).map(math.exp)


@given(mu=mus, delta=deltas)
def test_epsilon_and_delta_are_inverse(mu, delta):
    epsilon = accounting.gaussian_epsilon(mu, delta)
    assert epsilon >= 0
    if epsilon == 0:
        assert accounting.gaussian_delta(0.0, mu) <= delta
    else:
        assert accounting.gaussian_delta(epsilon, mu) == pytest.approx(delta, rel=1e-8)
        assert accounting.gaussian_noise_multiplier(epsilon, delta) * mu == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("mu", [1e9, 1e10, 1e13, 1e16, 1e30])
@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.4])
def test_an_epsilon_without_digits_left_is_rounded_up(mu, delta):
    """Of hardly any noise: half of μ² is exceeded with probability 1/2."""
    epsilon = accounting.gaussian_epsilon(mu, delta)
    assert mu**2 / 2 <= epsilon <= mu**2 / 2 * (1 + 1e-6)
    assert accounting.mixture_epsilon([0.9, 0.1], [mu, 2 * mu], delta) >= mu**2 / 2


@given(mu=mus, delta=deltas, factor=st.floats(1.001, 10.0))
def test_more_noise_never_costs_more(mu, delta, factor):
    assert accounting.gaussian_epsilon(mu, delta) <= accounting.gaussian_epsilon(mu * factor, delta)


@pytest.mark.parametrize("mu", [0.05, 0.19, 0.21, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.3, 2.0, 6.0])
def test_profile_is_the_hockey_stick_integral(mu, epsilon):
    def gap(x):
        return max(0.0, math.exp(-0.5 * (x - mu) ** 2) - math.exp(epsilon - 0.5 * x * x)) / math.sqrt(2 * math.pi)

    crossing = epsilon / mu + mu / 2
    # where the crossing lies outside the range, the tail beyond it is the whole of a tiny delta
    integral, _ = quad(gap, crossing, crossing + 40, epsabs=0, epsrel=1e-10, limit=200)
    assert accounting.gaussian_delta(epsilon, mu) == pytest.approx(integral, rel=1e-7)


def test_small_mu_has_the_right_limit():
    # δ/μ -> φ(x) - x Φ(-x) at ε = x μ
    x = 2.0
    limit = math.exp(-x * x / 2) / math.sqrt(2 * math.pi) - x * 0.5 * math.erfc(x / math.sqrt(2))
    assert accounting.gaussian_delta(x * 1e-9, 1e-9) / 1e-9 == pytest.approx(limit, rel=1e-7)


def test_composition_adds_squares():
    assert accounting.compose_gaussians([(2.0, 4), (0.5, 1)]) == pytest.approx(math.sqrt(1 + 4))
    assert accounting.compose_gaussians([(0.0, 1)]) == math.inf
    assert accounting.compose_gaussians([(0.0, 0)]) == 0.0


def test_ends():
    assert accounting.gaussian_epsilon(0.0, 1e-5) == 0.0
    assert accounting.gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert accounting.gaussian_epsilon(1.0, 0.0) == math.inf
    assert accounting.gaussian_epsilon(1.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="delta=2"):
        accounting.gaussian_epsilon(1.0, 2.0)
    with pytest.raises(ValueError, match="mu=-1"):
        accounting.gaussian_epsilon(-1.0, 0.1)


def test_ends_of_the_profile_and_of_its_inverse():
    assert accounting.gaussian_delta(1.0, 0.0) == 0.0
    assert accounting.gaussian_delta(-1.0, 0.0) == pytest.approx(1 - math.exp(-1))
    assert accounting.gaussian_delta(1.0, math.inf) == 1.0
    assert accounting.gaussian_delta(math.inf, 1.0) == 0.0
    assert accounting.gaussian_mu(1.0, 1.0) == accounting.gaussian_mu(math.inf, 1e-5) == math.inf
    assert accounting.gaussian_mu(1.0, 0.0) == 0.0
    with pytest.raises(ValueError, match="epsilon=-1"):
        accounting.gaussian_mu(-1.0, 1e-5)


@given(rho=st.floats(1e-4, 50.0), delta=st.floats(1e-12, 0.1))
def test_conversions_are_ordered(rho, delta):
    """G6: the papers' conversion is loosest, the exact Gaussian one tightest."""
    exact = accounting.gaussian_epsilon(math.sqrt(2 * rho), delta)
    tight = accounting.zcdp_epsilon_tight(rho, delta)
    assert exact <= tight * (1 + 1e-9)
    assert tight <= methods.epsilon_from_zcdp(rho=rho, delta=delta) * (1 + 1e-9)


@given(rho=st.floats(1e-3, 20.0), delta=st.floats(1e-10, 0.05))
def test_tight_conversion_is_the_minimum_over_orders(rho, delta):
    orders = 1 + np.exp(np.linspace(-6, math.log(1 / delta), 4000))
    values = orders * rho + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert accounting.zcdp_epsilon_tight(rho, delta) == pytest.approx(max(0.0, values.min()), rel=1e-4, abs=1e-4)


@given(epsilon=st.floats(1e-6, 300.0), rate=st.floats(1e-6, 1.0))
def test_amplification_inverts(epsilon, rate):
    smaller = accounting.amplified_epsilon(epsilon, rate)
    assert smaller <= epsilon * (1 + 1e-12)
    assert accounting.unamplified_epsilon(smaller, rate) == pytest.approx(epsilon, rel=1e-6, abs=1e-9)


def test_amplification_of_a_huge_epsilon_is_finite():
    assert accounting.amplified_epsilon(1000.0, 0.25) == pytest.approx(1000.0 + math.log(0.25))
    assert accounting.unamplified_epsilon(1000.0, 0.25) == pytest.approx(1000.0 - math.log(0.25))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("epsilon", [29.9, 30.0, 30.1, 31.0])
def test_amplification_is_exact_where_its_formula_changes(epsilon, rate):
    rise, share = Decimal(epsilon).exp() - 1, Decimal(rate)
    for formula, exact in (
        (accounting.amplified_epsilon, (1 + share * rise).ln()),
        (accounting.unamplified_epsilon, (1 + rise / share).ln()),
    ):
        assert formula(epsilon, rate) == pytest.approx(float(exact), abs=1e-14)


@pytest.mark.parametrize("smallest", [0.1, 1.0, 7.0])
def test_long_schedules_are_rounded_down_by_no_more_than_their_number_asks(smallest):
    multipliers = np.geomspace(smallest, 10 * smallest, 1000).tolist()
    rounded = rounded_levels([(0.01, z) for z in multipliers], 64)
    assert len(set(rounded.values())) <= 64
    for z in multipliers:
        rate, floor = rounded[0.01, z]
        assert rate == 0.01
        assert z * 10 ** (-1 / 64) * (1 - 1e-9) <= floor <= z


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate):
    for formula in (accounting.amplified_epsilon, accounting.unamplified_epsilon):
        with pytest.raises(ValueError, match="rate="):
            formula(1.0, rate)


@pytest.mark.parametrize("count", [-1, 1.5])
def test_a_count_that_is_no_number_of_releases_is_refused(count):
    with pytest.raises(ValueError, match="count="):
        accounting.fixed_size_epsilon(0.1, 1.0, count, 1e-5)


@pytest.mark.parametrize("failure", [-1e-9, 1.5, math.nan])
def test_a_failure_that_is_no_probability_is_refused(failure):
    with pytest.raises(ValueError, match="failure="):
        accounting.charge_truncation(lambda delta: 1.0, 1e-5, failure)


def test_classical_constant_fails_beyond_its_range():
    """G1: proved below 1, sufficient up to 8.42 at δ = 1e-5."""
    limit = accounting.classical_valid_up_to(1e-5)
    assert limit == pytest.approx(8.42, abs=0.01)
    for epsilon, good in ((limit * 0.99, True), (limit * 1.01, False)):
        mu = 1 / methods.classical_noise_multiplier(epsilon=epsilon, delta=1e-5)
        assert (accounting.gaussian_epsilon(mu, 1e-5) <= epsilon) is good


def test_without_delta_a_mixture_hides_nothing_but_what_is_not_used():
    assert accounting.mixture_epsilon([0.5, 0.5], [0.0, 1.0], 0.0) == math.inf
    assert accounting.mixture_epsilon([0.5, 0.5], [0.0, 0.0], 0.0) == 0.0


def test_outcomes_of_a_mixture_that_hide_nothing_take_their_probability_from_delta():
    hidden = accounting.mixture_epsilon([0.9], [1.0], 9e-6)
    assert accounting.mixture_epsilon([0.9, 1e-6], [1.0, math.inf], 1e-5) == pytest.approx(hidden, rel=1e-12)
    assert accounting.mixture_epsilon([0.9, 1e-5], [1.0, math.inf], 1e-5) == math.inf


@pytest.mark.parametrize(("epsilon", "mu"), [(2.9, 0.1), (3.5, 0.1), (6.0, 0.15), (1.2, 0.03), (1.0, 0.01)])
def test_the_profile_keeps_its_digits_in_the_far_tail(epsilon, mu):
    """For small μ at 29 to 100 standard deviations, against 60 digits."""
    with localcontext() as context:
        context.prec = 60
        e, m = Decimal(epsilon), Decimal(mu)

        def mills(t):
            below = t
            for k in range(300, 0, -1):  # Laplace's continued fraction
                below = t + k / below
            return 1 / below

        near = e / m - m / 2
        exact = -near * near / 2 - Decimal(2 * math.pi).ln() / 2 + (mills(near) - mills(near + m)).ln()
        error = abs(Decimal(float(log_gaussian_delta(epsilon, mu))) - exact)
    assert error < 1e-9


def test_a_mixture_that_stays_within_delta_reveals_nothing():
    assert accounting.mixture_epsilon([0.5, 0.5], [1e-7, 1e-6], 1e-5) == 0.0
    assert accounting.mixture_epsilon([1e-5], [3.0], 1.1e-5) == 0.0


def test_weights_that_are_no_probabilities_are_refused():
    for weights, mus in (([0.5], [1.0, 2.0]), ([-0.1, 0.5], [1.0, 2.0]), ([0.6, 0.6], [1.0, 2.0])):
        with pytest.raises(ValueError, match="weights of sum"):
            accounting.mixture_epsilon(weights, mus, 1e-5)
    for pmf in ([0.5, 0.4], [0.6, 0.6]):
        with pytest.raises(ValueError, match="pmf sums to"):
            accounting.random_uses_epsilon(pmf, 1.0, 1e-5)


def test_random_uses_weigh_the_profiles_of_their_numbers():
    pmf, mu, delta = [0.3, 0.5, 0.2], 0.8, 1e-4
    epsilon = accounting.random_uses_epsilon(pmf, mu, delta)
    profiles = [accounting.gaussian_delta(epsilon, math.sqrt(uses) * mu) for uses in (1, 2)]
    assert 0.5 * profiles[0] + 0.2 * profiles[1] == pytest.approx(delta, rel=1e-9)


@pytest.mark.parametrize("pair", [(-1.0, 1), (1.0, -1)])
def test_noise_and_counts_below_zero_are_not_composed(pair):
    with pytest.raises(ValueError, match="must not be negative"):
        accounting.compose_gaussians([pair])


def test_zcdp_of_nothing_is_nothing():
    assert accounting.zcdp_epsilon_tight(0.0, 1e-5) == 0.0


def test_a_record_enters_one_of_several_fresh_batches():
    assert accounting.inclusion_probability(3, 10, 4) == pytest.approx(1 - 0.7**4, rel=1e-14)
    assert accounting.inclusion_probability(10, 10, 1) == 1.0
    for batch_size in (0, 11):
        with pytest.raises(ValueError, match="population=10"):
            accounting.inclusion_probability(batch_size, 10, 4)


def test_one_message_is_an_amplified_gaussian_and_back():
    """R5: the hockey-stick of (1-p) N(0, 1) + p N(μ, 1) against N(0, 1) is p times a Gaussian's, at ε0."""
    mu, rate, delta = 2.0, 0.1, 1e-5
    epsilon = message_epsilon(mu, rate, delta)
    inner = math.log1p(math.expm1(epsilon) / rate)
    assert rate * accounting.gaussian_delta(inner, mu) == pytest.approx(delta, rel=1e-8)
    assert message_noise_multiplier(epsilon, rate, delta) == pytest.approx(1 / mu, rel=1e-8)
    # a record that is in the batch with probability at most δ needs no noise
    assert message_epsilon(mu, delta, delta) == message_noise_multiplier(1.0, delta, delta) == 0.0


@pytest.mark.parametrize(("steps", "per_epoch", "rate"), [(0, 5, 0.1), (6, 5, 0.1), (2, 5, -0.1), (2, 5, 0.3)])
def test_rounds_that_are_no_part_of_an_epoch_have_no_pattern(steps, per_epoch, rate):
    with pytest.raises(ValueError, match="epochs of whole batches"):
        accounting.shuffled_round_pattern(3, steps, per_epoch, rate)


def test_many_sampling_rates_are_all_raised_to_the_largest():
    few = [(0.01 * (k + 1), 1.0 + k) for k in range(16)] * 5
    assert rounded_levels(few, 64) == {level: level for level in few}
    several = [(0.01 * (k + 1), z) for k in range(16) for z in np.geomspace(1, 9, 10).tolist()]
    rounded = rounded_levels(several, 64)
    assert len(set(rounded.values())) <= 64
    assert all(raised == rate and z * 9**-0.25 * (1 - 1e-9) <= floor <= z
               for (rate, z), (raised, floor) in rounded.items())  # fmt: skip
    many = [(0.001 * (k + 1), 2.0 + k / 100) for k in range(100)]
    rounded = rounded_levels(many, 64)
    assert len(set(rounded.values())) <= 64
    assert all(raised == 0.1 and floor <= z for (_, z), (raised, floor) in rounded.items())
    ends = {(0.5, 0.0): (0.5, 0.0), (0.5, math.inf): (0.5, math.inf)}
    assert ends.items() <= rounded_levels([*ends, *((0.5, 1.0 + k) for k in range(80))], 64).items()


@pytest.mark.parametrize(
    "formula",
    [
        lambda delta: accounting.gaussian_epsilon(1.0, delta),
        lambda delta: accounting.gaussian_mu(1.0, delta),
        lambda delta: accounting.mixture_epsilon([0.5, 0.5], [1.0, 2.0], delta),
        lambda delta: accounting.convex_message_epsilon([0.1] * 3, 1.0, 1, 10, 1.0, delta),
        lambda delta: accounting.fixed_size_epsilon(0.1, 1.0, 3, delta),
        lambda delta: accounting.poisson_epsilon(0.1, 1.0, 3, delta),
    ],
)
def test_a_delta_that_is_no_probability_is_refused(formula):
    assert formula(1.0) >= 0.0
    assert formula(0.0) in (0.0, math.inf)
    for delta in (-1e-9, 1.0 + 1e-9, math.nan):
        with pytest.raises(ValueError, match="is not a probability"):
            formula(delta)
