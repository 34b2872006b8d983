"""The privacy loss engine against exact results, brute force and dp-accounting."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dither import accounting
from dither.accounting import pld
from dither.accounting.composition import Group, Item, groups_epsilon
from tests.accounting import renyi


def single(curve, count, delta):
    return pld.compose([pld.Events([(curve, count)])], delta).epsilon(delta)


@pytest.mark.parametrize(
    ("mu", "count", "delta"),
    [
        (1.0, 1, 1e-5),
        (3.0, 1, 1e-2),
        (0.01, 1000, 1e-5),
        (1e-3, 50_000, 1e-6),
        (20.0, 3, 1e-5),
        (0.3, 40, 1e-10),
    ],
)
def test_plain_gaussians_are_bounded_from_above_and_closely(mu, count, delta):
    exact = accounting.gaussian_epsilon(mu * math.sqrt(count), delta)
    bound = single(pld.removal(1.0, mu), count, delta)
    assert exact <= bound <= exact * 1.0005


@pytest.mark.parametrize("kind", ["poisson", "fixed", "poisson_replace"])
@pytest.mark.parametrize(
    ("rate", "mu", "count", "delta"),
    [(0.06, 0.2, 400, 1e-5), (2e-3, 1.8, 400, 1e-5), (0.06, 2.1, 400, 1e-5), (0.05, 0.125, 50_000, 1e-6),
     (0.9, 0.01, 1000, 1e-9), (0.01, 1.0, 1, 1e-2)],
)  # fmt: skip
def test_a_coarse_grid_gives_a_larger_epsilon_but_hardly(kind, rate, mu, count, delta):
    groups = [Group((Item(kind, rate, 1 / mu, count),))]
    fine = groups_epsilon(groups, delta)
    assert fine <= groups_epsilon(groups, delta, resolution=pld.COARSE) <= fine * 1.003


@pytest.mark.parametrize(("kind", "distance"), [("fixed", 1.0), ("poisson", 1.0), ("poisson_replace", 2.0)])
@pytest.mark.parametrize(("noise_multiplier", "count"), [(1e-4, 1), (1e-5, 1000), (1e-10, 7)])
def test_batches_of_all_records_with_hardly_any_noise_are_gaussians(kind, distance, noise_multiplier, count):
    """Seen from afar all of the loss lies at one place."""
    exact = accounting.gaussian_epsilon(distance * math.sqrt(count) / noise_multiplier, 1e-5)
    epsilon = groups_epsilon([Group((Item(kind, 1.0, noise_multiplier, count),))], 1e-5)
    assert exact * (1 - 1e-12) <= epsilon <= exact * (1 + 1e-4)


@pytest.mark.parametrize("kind", ["fixed", "removal", "addition", "replacement"])
@pytest.mark.parametrize(("rate", "mu"), [(0.02, 1.0), (0.3, 0.05), (0.7, 2.5)])
def test_one_release_matches_its_profile(kind, rate, mu):
    """The curve's own hockey stick, integrated over densities, is what the grid reports."""
    x = np.linspace(-14, 14 + 3 * mu, 400_001)

    def normal(centre):
        return np.exp(-0.5 * (x - centre) ** 2) / math.sqrt(2 * math.pi)

    absent, used, other = normal(0.0), normal(mu), normal(-mu)
    mixed = (1 - rate) * absent + rate * used
    first, second, curve = {
        "fixed": (mixed, absent, pld.fixed_size(rate, mu)),
        "removal": (mixed, absent, pld.removal(rate, mu)),
        "addition": (absent, mixed, pld.addition(rate, mu)),
        "replacement": (mixed, (1 - rate) * absent + rate * other, pld.poisson_replacement(rate, mu)),
    }[kind]
    composed = pld.compose([pld.Events([(curve, 1)])], 1e-5)
    for epsilon in (0.0, 0.05, 0.3, 1.0):
        exact = np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0), x)
        assert composed.delta(epsilon) == pytest.approx(exact, rel=1e-3, abs=2e-7)
        assert composed.delta(epsilon) >= exact - 1e-8


def test_fixed_size_profile_bounds_all_small_datasets():
    """G4 by brute force: every dataset on a grid, every replacement, both directions; and it is attained."""
    noise_std, x = 0.6, np.linspace(-6, 6, 4001)
    for population, batch in ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)):
        rate, mu = batch / population, 2.0 / batch / noise_std
        subsets = list(itertools.combinations(range(population), batch))

        def density(data, subsets=subsets, batch=batch):
            centres = np.array([sum(data[i] for i in subset) / batch for subset in subsets])
            waves = np.exp(-0.5 * ((x[None, :] - centres[:, None]) / noise_std) ** 2)
            return waves.mean(axis=0) / (noise_std * math.sqrt(2 * math.pi))

        densities = {data: density(data) for data in itertools.product((-1, 0, 1), repeat=population)}
        for epsilon in (-1.2, -0.3, 0.0, 0.2, 1.0, 2.5):
            forward = rate * accounting.gaussian_delta(accounting.unamplified_epsilon(abs(epsilon), rate), mu)
            profile = forward if epsilon >= 0 else -math.expm1(epsilon) + math.exp(epsilon) * forward
            worst = 0.0
            for data, first in densities.items():
                for replaced in (-1, 0, 1):
                    second = densities[(replaced, *data[1:])]
                    worst = max(worst, np.trapezoid(np.maximum(first - math.exp(epsilon) * second, 0), x))
            assert worst <= profile + 1e-6, (population, batch, epsilon)
            if epsilon >= 0:
                assert worst >= profile - 1e-4, (population, batch, epsilon)


def test_fixed_size_curve_has_the_atom_of_the_errata():
    for rate, mu in ((0.01, 3.0), (0.5, 0.5), (0.9, 1e-3)):
        above, log_mirrored = pld.fixed_size(rate, mu).upper(np.zeros(1))
        tail = 0.5 * math.erfc(mu / 2 / math.sqrt(2))
        assert 1 - above[0] - math.exp(log_mirrored[0]) == pytest.approx((1 - rate) * (1 - 2 * tail), rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "noise_multiplier", "steps"), [(0.02, 1.0, 1000), (0.1, 3.0, 300), (0.03, 0.6, 130)]
)
def test_poisson_agrees_with_dp_accounting(rate, noise_multiplier, steps):
    """R3, both adjacencies. Under REPLACE_ONE the library doubles the distance itself: same multiplier."""
    import dp_accounting

    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier)), steps
    )
    for adjacency, relation in (
        ("add/remove", dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE),
        ("replace-one", dp_accounting.NeighboringRelation.REPLACE_ONE),
    ):
        accountant = dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=1e-3)
        accountant.compose(event)
        ours = accounting.poisson_epsilon(rate, noise_multiplier, steps, 1e-5, adjacency=adjacency)
        assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=3e-3)


def test_library_doubles_the_distance_only_in_pld():
    """The trap of the errata: z = 2 is 4.377 by PLD under REPLACE_ONE and 2.166 by RDP."""
    import dp_accounting

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    by_pld = dp_accounting.pld.PLDAccountant(relation).compose(dp_accounting.GaussianDpEvent(2.0))
    by_rdp = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation).compose(
        dp_accounting.GaussianDpEvent(2.0)
    )
    assert by_pld.get_epsilon(1e-5) == pytest.approx(accounting.gaussian_epsilon(1.0, 1e-5), rel=1e-3)
    assert by_rdp.get_epsilon(1e-5) == pytest.approx(2.166, rel=1e-3)


def test_renyi_divergences_agree_where_the_library_is_accurate():
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant([2, 3, 8, 32], dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(25, 2, dp_accounting.GaussianDpEvent(1.5)))
    np.testing.assert_allclose(renyi.fixed_size_rdp(0.08, 1.5, [2, 3, 8, 32]), accountant._rdp, rtol=1e-9)
    for rate, noise_multiplier in ((0.0, 1.5), (0.08, math.inf)):
        np.testing.assert_array_equal(renyi.fixed_size_rdp(rate, noise_multiplier, [2, 8]), [0.0, 0.0])
    np.testing.assert_allclose(renyi.fixed_size_rdp(1.0, 1.5, [2, 8]), [2 * 0.5 / 1.5**2, 8 * 0.5 / 1.5**2])


def test_renyi_divergence_bounds_the_exact_one():
    """Theorem 27 against the divergence of the attaining pair, where sums of powers cancel."""
    rate, noise_multiplier, x = 0.2, 50.0, np.linspace(-12, 12, 200_001)
    mu = 1 / noise_multiplier
    ratio = 1 - rate + rate * np.exp(mu * x - mu * mu / 2)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    orders = [2, 5, 20, 64]
    exact = [math.log1p(np.trapezoid(density * (ratio**a - 1), x)) / (a - 1) for a in orders]
    bound = renyi.fixed_size_rdp(rate, noise_multiplier, orders)
    assert np.all(bound >= exact)
    assert bound[0] <= 4.2 * exact[0]


def test_renyi_divergences_give_a_looser_epsilon():
    tight = accounting.fixed_size_epsilon(0.05, 2.0, 500, 1e-5)
    loose = renyi.epsilon(renyi.fixed_size_rdp, [(0.05, 2.0, 500)], 1e-5)
    assert tight < loose < 4 * tight


@pytest.mark.parametrize("kind", ["fixed_size", "removal", "addition", "poisson_replacement"])
def test_composing_n_times_is_n_composes(kind):
    """One power in the transform equals n plain convolutions of the same grid."""
    curve, count, delta = getattr(pld, kind)(0.1, 0.8), 3, 1e-5
    composed = pld.compose([pld.Events([(curve, count)])], delta)
    listed = pld.compose([pld.Events([(curve, 1)] * count)], delta)
    step = composed.step
    quantile = 8.5
    grid = pld._discretise(curve, step, quantile)
    masses, infinite = np.ones(1), 0.0
    for _ in range(count):
        masses = np.convolve(masses, grid.masses)
        infinite = 1 - (1 - infinite) * (1 - grid.infinite)
    chained = pld.LossDistribution(grid.start * count, step, masses, infinite)
    for epsilon in (0.0, 0.5, 1.5):
        assert composed.delta(epsilon) == pytest.approx(chained.delta(epsilon), rel=1e-6, abs=1e-11)
        assert listed.delta(epsilon) == pytest.approx(composed.delta(epsilon), rel=1e-6, abs=1e-11)
    assert composed.epsilon(delta) == pytest.approx(chained.epsilon(delta), rel=1e-5)


def test_chance_participation_is_the_mixture():
    """(1-p) + pF per round is R4's sum over the number of uses."""
    curve, delta = pld.removal(1.0, 0.7), 1e-4
    mixture = pld.compose([pld.Events([(curve, 1)], repeats=12, probability=0.3)], delta).epsilon(delta)
    exact = accounting.random_uses_epsilon(accounting.binomial_pmf(12, 0.3), 0.7, delta)
    assert exact <= mixture <= exact * 1.001


rates = st.floats(0.005, 0.6)
multipliers = st.floats(-0.5, 3.0).map(math.exp)
epsilons = {
    "fixed": accounting.fixed_size_epsilon,
    "poisson": accounting.poisson_epsilon,
    "poisson replace-one": lambda *a: accounting.poisson_epsilon(*a, adjacency="replace-one"),
    "plain": lambda _, z, n, d: accounting.gaussian_epsilon(math.sqrt(n) / z, d),
}


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(epsilons)),
    rate=rates,
    z=multipliers,
    steps=st.integers(1, 400),
    factor=st.floats(1.05, 3.0),
)
def test_epsilon_falls_with_noise_and_grows_with_rounds(kind, rate, z, steps, factor):
    epsilon = epsilons[kind]
    base, slack = epsilon(rate, z, steps, 1e-5), 1e-4
    assert epsilon(rate, z * factor, steps, 1e-5) <= base * (1 + slack) + 1e-6
    assert epsilon(rate, z, steps * 2, 1e-5) >= base * (1 - slack) - 1e-6
    assert base >= epsilon(rate, z, 1, 1e-5) * (1 - slack) - 1e-6  # never below one release


@settings(max_examples=20, deadline=None)
@given(rate=rates, z=multipliers, steps=st.integers(1, 300))
def test_sampling_never_hurts_and_adjacencies_are_ordered(rate, z, steps):
    plain = accounting.gaussian_epsilon(math.sqrt(steps) / z, 1e-5)
    assert accounting.fixed_size_epsilon(rate, z, steps, 1e-5) <= plain * 1.001 + 1e-6
    removed = accounting.poisson_epsilon(rate, z, steps, 1e-5)
    replaced = accounting.poisson_epsilon(rate, z, steps, 1e-5, adjacency="replace-one")
    assert removed <= replaced * 1.001 + 1e-6
    # G3: a fixed size replaces the absent record by another one, twice as far
    assert replaced <= accounting.fixed_size_epsilon(rate, z / 2, steps, 1e-5) * 1.001 + 1e-6


@settings(max_examples=6, deadline=None)
@given(zs=st.lists(st.floats(0.8, 6.0), min_size=65, max_size=90), rate=st.floats(0.01, 0.5))
def test_long_schedules_are_rounded_upwards_only(zs, rate):
    rounded = accounting.fixed_size_composition([(rate, z, 1) for z in zs], 1e-5)
    finer = pld.compose([pld.Events([(pld.fixed_size(rate, 1 / z), 1) for z in zs])], 1e-5).epsilon(1e-5)
    assert finer * (1 - 1e-4) <= rounded <= finer * 1.12


def test_wrong_steps_are_refused():
    with pytest.raises(ValueError, match=r"rate=1\.5"):
        accounting.fixed_size_epsilon(1.5, 1.0, 3, 1e-5)
    with pytest.raises(ValueError, match="noise_multiplier=-1"):
        accounting.fixed_size_epsilon(0.5, -1.0, 3, 1e-5)
    with pytest.raises(ValueError, match="adjacency='zero'"):
        accounting.poisson_epsilon(0.5, 1.0, 3, 1e-5, adjacency="zero")
    assert accounting.fixed_size_epsilon(0.5, 0.0, 3, 1e-5) == math.inf
    assert accounting.fixed_size_epsilon(0.5, 1.0, 0, 1e-5) == 0.0
    assert accounting.fixed_size_epsilon(0.0, 1.0, 3, 1e-5) == 0.0


def test_truncation_is_charged():
    def plain(delta):
        return accounting.gaussian_epsilon(0.5, delta)

    base = plain(1e-5)
    charged = accounting.charge_truncation(plain, 1e-5, 1e-7)
    assert base < charged
    left = 1e-5 - (1 + math.exp(charged)) * 1e-7
    assert plain(left) <= charged <= plain(left) * (1 + 1e-5)
    assert accounting.charge_truncation(plain, 1e-5, 1e-5) == math.inf
    # the other charge has no factor e^ε
    assert accounting.charge_truncation(plain, 1e-5, 1e-5, others_failure=2e-6) == pytest.approx(
        plain(8e-6), rel=1e-5
    )


def test_the_length_of_a_transform_is_the_least_that_is_quick():
    from scipy.fft import next_fast_len

    lengths = [*range(1, 3000), *np.random.default_rng(0).integers(3000, 2**23, 500).tolist()]
    assert [pld._fast_size(length) for length in lengths] == [next_fast_len(n, real=True) for n in lengths]


@pytest.mark.parametrize("delta", [1e-3, 1e-8, 1e-12])
def test_one_batch_is_the_amplified_gaussian_at_every_delta(delta):
    """A removal from one Poisson batch: the hockey-stick divergence is the rate times the Gaussian's."""
    exact = accounting.amplified_epsilon(accounting.gaussian_epsilon(2.0, delta / 0.1), 0.1)
    assert exact <= accounting.poisson_epsilon(0.1, 0.5, 1, delta) <= exact * (1 + 1e-4)


def profile_of(curve, epsilon):
    """δ of one curve at ε >= 0, from its tails."""
    p, log_q = curve.upper(np.array([epsilon]))
    return float(p[0] - math.exp(epsilon + log_q[0]))


@pytest.mark.parametrize(
    "curve",
    [
        pld.removal(0.3, 1.2),
        pld.removal(1.0, 0.8),
        pld.addition(0.3, 1.2),
        pld.fixed_size(0.2, 2.0),
        pld.poisson_replacement(0.3, 1.0),
        pld.poisson_replacement(1.0, 0.5),
        pld.mixture(0.4, 1.5, ((0.75, 0.5), (0.25, 1.0))),
    ],
)
@pytest.mark.parametrize("quantile", [1.0, 2.0, 6.0])
def test_a_grid_holds_all_mass_and_no_less_than_the_curve(curve, quantile):
    """Where tails are cut early, what is cut stands at its pessimistic end: the lower one at the first loss, the
    upper one at infinity."""
    step = 0.05
    grid = pld._discretise(curve, step, quantile)
    losses = grid.losses(step)
    assert grid.masses.min() >= 0
    assert grid.masses.sum() + grid.infinite == pytest.approx(1.0, abs=1e-12)
    low, high = curve.span(quantile)
    assert losses[0] <= low
    assert high <= losses[-1]
    assert losses[0] <= -step < step <= losses[-1]
    for epsilon in (0.0, 4 * step, 10 * step):
        over = losses > epsilon
        held = grid.infinite + float(-np.expm1(epsilon - losses[over]) @ grid.masses[over])
        exact = profile_of(curve, epsilon)
        assert held >= exact * (1 - 1e-12)
        if quantile > 5:  # dots on the curve itself
            assert held == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("kind", "rate", "mu"), [("removal", 0.3, 1.2), ("poisson_replacement", 0.3, 1.0)])
def test_a_span_holds_all_but_tails_of_its_quantile(kind, rate, mu):
    curve = getattr(pld, kind)(rate, mu)
    for k in (1.0, 3.0, 5.0):
        low, high = curve.span(k)
        (p_high, _), (p_low, _) = curve.tails(np.array([0.0, high]), np.array([low, 0.0]))
        assert p_high[-1] <= norm.sf(k) * (1 + 1e-9)
        assert p_low[0] <= norm.sf(k) * (1 + 1e-9)


def test_what_the_transforms_rounding_takes_is_charged(monkeypatch):
    events, inverse = [pld.Events([(pld.removal(0.1, 1.0), 50)])], np.fft.irfft
    plain = pld.compose(events, 1e-5)

    def rough(*arguments):
        masses = inverse(*arguments)
        masses[masses.argmin()] = -1e-3
        return masses

    monkeypatch.setattr(np.fft, "irfft", rough)
    assert pld.compose(events, 1e-5).infinite == pytest.approx(plain.infinite + 1e-3, rel=1e-6)


def test_tails_that_are_cut_are_charged_far_below_delta():
    for delta, cut in ((1e-5, 1e-12), (1e-3, 1e-10), (0.5, 1e-9), (1e-14, 1e-19)):
        composed = pld.compose([pld.Events([(pld.removal(1.0, 0.5), 3)])], delta)
        assert cut <= composed.infinite <= 2.1 * cut + 1e-14
    # rounding is one unit a factor at least, where tails are less
    many = pld.compose([pld.Events([(pld.removal(1.0, 1e-3), 10**6)])], 1e-10)
    assert many.infinite >= 10**6 * 2.0**-52


def test_rounds_that_may_not_happen_mix_with_none():
    """δ of one such round is the probability's share; of none at all, nothing."""
    once = pld.compose([pld.Events([(pld.removal(1.0, 1.0), 1)], 1, 0.25)], 1e-5)
    for epsilon in (0.0, 0.5, 2.0):
        assert once.delta(epsilon) == pytest.approx(0.25 * accounting.gaussian_delta(epsilon, 1.0), rel=1e-3)
    nothing = pld.compose([], 1e-5)
    assert (nothing.epsilon(1e-5), nothing.delta(0.0), nothing.infinite) == (0.0, 0.0, 0.0)
    beside = pld.compose([pld.Events([], 3), pld.Events([(pld.removal(1.0, 1.0), 1)])], 1e-5)
    assert beside.epsilon(1e-5) == pytest.approx(accounting.gaussian_epsilon(1.0, 1e-5), rel=1e-3)


def test_a_distribution_answers_from_the_masses_it_holds():
    """Losses -1, 0, 1, 2 by hand: δ(ε) = Σ (1 - e^{ε-L}) p over losses above ε, and its inverse."""
    held = pld.LossDistribution(-1, 1.0, np.array([0.4, 0.3, 0.2, 0.1]), 1e-3)

    def delta(epsilon):
        return 1e-3 + sum(-math.expm1(epsilon - loss) * p for loss, p in ((1, 0.2), (2, 0.1)) if loss > epsilon)

    for epsilon in (0.0, 0.3, 1.0, 1.7, 2.0, 5.0):
        assert held.delta(epsilon) == pytest.approx(delta(epsilon), rel=1e-12)
        if 0 < epsilon < 2:
            assert held.epsilon(delta(epsilon)) == pytest.approx(epsilon, rel=1e-9)
    assert held.epsilon(delta(0.0)) == pytest.approx(0.0, abs=1e-12)
    assert held.epsilon(delta(0.0) * 1.001) == 0.0
    assert held.epsilon(1.001e-3) < 2.0
    assert held.epsilon(1e-3) == math.inf  # no more than what is infinite
    positive = pld.LossDistribution(2, 0.5, np.array([0.6, 0.4]), 0.0)  # losses 1 and 1.5
    for epsilon in (0.0, 0.4, 1.2):
        exact = sum(-math.expm1(epsilon - loss) * p for loss, p in ((1, 0.6), (1.5, 0.4)) if loss > epsilon)
        assert positive.delta(epsilon) == pytest.approx(exact, rel=1e-12)
        assert positive.epsilon(exact) == pytest.approx(epsilon, abs=1e-9)
    assert pld.LossDistribution(-3, 1.0, np.array([0.5, 0.5]), 0.0).epsilon(1e-5) == 0.0
    assert pld.LossDistribution(0, 1.0, np.array([0.5, 0.5]), 0.9).delta(-1e9) == 1.0


def test_a_window_too_large_for_its_cells_makes_them_wider(monkeypatch):
    events = [pld.Events([(pld.removal(1.0, 0.05), 400)])]
    fine = pld.compose(events, 1e-5)
    monkeypatch.setattr(pld, "_WINDOW_CELLS", len(fine.masses) // 3)
    wide = pld.compose(events, 1e-5)
    assert wide.step > 2.9 * fine.step
    assert len(wide.masses) <= len(fine.masses) // 2
    exact = accounting.gaussian_epsilon(1.0, 1e-5)
    assert exact <= wide.epsilon(1e-5) <= 1.01 * exact
