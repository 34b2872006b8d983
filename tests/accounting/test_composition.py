"""R6: secure aggregation, with a Monte Carlo of the aggregated round."""

import itertools
import math

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from dither import accounting
from dither.accounting import composition
from dither.accounting.composition import Group, Item, groups_epsilon
from dither.errors import NoProof
from dither.types import Release, Sampling

CLIENTS = STEPS = 10
BATCH = 400
MULTIPLIER = 1.8544536220275742  # σB/(2·clip) of CPFed at ε = 10
FEATURE = 1.8
CURVATURE = FEATURE**2 / 4  # smoothness of the logistic loss of one record


def observed_mu(step_smoothness, samples=120_000, seed=5):
    """Two worlds of one aggregated round of logistic regression in one dimension, clip 1, full batch.

    The others' records are balanced pairs at |x| = 1.8; the target holds one such record, replaced by its
    mirror image in the other world, and otherwise records at x = 0. Returns the separation of the sums.
    """
    rng = np.random.default_rng(seed)
    noise_std = 2 * MULTIPLIER / BATCH
    rate = step_smoothness / CURVATURE

    def gradient(theta, x, label):
        return np.clip((1 / (1 + np.exp(-x * theta)) - label) * x, -1, 1)

    def world(record):
        theta = np.zeros((CLIENTS, samples))
        for _ in range(STEPS):
            mean = 0.5 * (gradient(theta, FEATURE, 1) + gradient(theta, FEATURE, 0))
            mean[0] = gradient(theta[0], record, 1) / BATCH
            theta = theta - rate * (mean + noise_std * rng.standard_normal(theta.shape))
        return theta.sum(axis=0)

    first, second = world(FEATURE), world(-FEATURE)
    # a threshold attack: for Gaussian sums its operating point gives μ
    threshold = 0.5 * (first.mean() + second.mean())
    return norm.ppf(np.mean(first > threshold)) - norm.ppf(np.mean(second > threshold))


def bound_mu(step_smoothness):
    return accounting.aggregated_round_mu(
        MULTIPLIER,
        STEPS,
        rates=[1.0] * STEPS,
        others=CLIENTS - 1,
        smoothness=step_smoothness,
        convex=True,
    )


@pytest.mark.parametrize(("step_smoothness", "bound"), [(1.0, 1.237), (0.1, 0.751)])
def test_monte_carlo_of_the_aggregated_round(step_smoothness, bound):
    """G7b: the others' noise contracts; the papers' W = τ is beaten by a simple attack."""
    claimed = STEPS / (MULTIPLIER * math.sqrt(STEPS + (CLIENTS - 1) * STEPS))
    assert claimed == pytest.approx(0.539, abs=1e-3)
    assert bound_mu(step_smoothness) == pytest.approx(bound, abs=1e-3)
    observed = observed_mu(step_smoothness)
    assert claimed * 1.15 < observed < bound
    if step_smoothness == 1.0:
        assert observed > 1.03


# R6': rates, noise and curvature that change from step to step


def survives(rates, smoothness, variances=None):
    return accounting.surviving_variance(rates, variances or [rate**2 for rate in rates], smoothness)


def test_equal_rates_give_the_geometric_sum():
    assert survives([1.0] * 10, 0.1) == pytest.approx(4.623280765312794)
    assert survives([1.0] * 10, 0.0) == pytest.approx(10)  # the papers' expression
    assert survives([1.0] * 10, 1.0) == survives([1.0] * 10, None) == 1.0
    assert survives([2.0] * 10, 0.05) == pytest.approx(4 * 4.623280765312794)


def linear_gaussian(rates, noise, used, own, others):
    """Exact μ² of one round in one dimension: quadratic losses of the target and of each other client, whose
    curvatures may change from step to step; sensitivity 1."""
    steps = len(rates)

    def later(curvatures, step):
        return math.prod(1 - rates[t] * curvatures[t] for t in range(step + 1, steps))

    def variance(curvatures):
        return sum((rates[t] * noise[t] * later(curvatures, t)) ** 2 for t in range(steps))

    shift = sum(rates[t] * later(own, t) for t in used)
    return shift**2 / (variance(own) + sum(variance(each) for each in others))


def case(rng):
    """A random round; curvatures are mostly at the ends of what is allowed, where bounds are attained."""
    steps = int(rng.integers(1, 7))
    smoothness = float(rng.choice([0.05, 0.5, 1.0, 3.0]))
    rates = [float(r) for r in 10 ** rng.uniform(-2.5, 0, steps) * 2 / smoothness]
    noise = [float(z) for z in 10 ** rng.uniform(-0.7, 0.7, steps)]
    used = sorted(rng.choice(steps, rng.integers(1, steps + 1), replace=False).tolist())

    def curvatures():
        return [float(smoothness * rng.choice([0.0, 1.0, rng.random()])) for _ in range(steps)]

    others = [[smoothness] * steps if rng.random() < 0.5 else curvatures() for _ in range(rng.integers(0, 5))]
    return smoothness, rates, noise, used, [0.0] * steps if rng.random() < 0.5 else curvatures(), others


def test_no_linear_gaussian_round_exceeds_the_bound():
    """The bound for a number of uses, and the one for the very pattern, against 4,000 exact values."""
    rng, tightest = np.random.default_rng(11), 0.0
    for _ in range(4000):
        smoothness, rates, noise, used, own, others = case(rng)
        exact = linear_gaussian(rates, noise, used, own, others)
        bound = accounting.aggregated_round_mu(
            noise, len(used), rates=rates, others=len(others), smoothness=smoothness, convex=True
        )
        variances = [(rate * z) ** 2 for rate, z in zip(rates, noise, strict=True)]
        last = [*variances[:-1], variances[-1] + len(others) * survives(rates, smoothness, variances)]
        shifts = [rate if step in used else 0.0 for step, rate in enumerate(rates)]
        pattern = accounting.absorption_cost(shifts, last)
        assert exact <= pattern * (1 + 1e-9)
        assert pattern <= bound**2 * (1 + 1e-9)
        tightest = max(tightest, exact / pattern)
    assert tightest > 0.999  # attained: the cases can tell when the bound is too small


def test_early_noise_does_not_absorb_later_shifts():
    """The closed form (Σ s)²/(Σ η² + V) would let it. In one dimension early noise of a flat loss does hide later
    shifts; where the target's own second step wipes it out, nothing is left of it."""
    rates, noise, flat, steep = [1.0, 0.1], [1.0, 1.0], [0.0, 0.0], [0.0, 10.0]
    exact = linear_gaussian(rates, noise, [1], steep, [steep])
    closed = 0.1**2 / (1 + 0.1**2 + survives(rates, 10.0))
    assert exact > 6 * closed
    assert exact == pytest.approx(accounting.absorption_cost([0.0, 0.1], [1.0, 0.1**2 + survives(rates, 10.0)]))
    assert linear_gaussian(rates, noise, [1], flat, [steep]) == pytest.approx(closed)


def kinked_delta(rates, smoothness, shift, epsilon):
    """δ(ε) between a client's last iterate and the same shifted: loss β·max(y, 0)²/2, whose slope has a kink."""
    width, count = 12.0, 6001
    grid = np.linspace(-width, width, count)
    spacing = grid[1] - grid[0]
    edges = np.append(grid - spacing / 2, grid[-1] + spacing / 2)
    mass = np.where(grid == 0, 1.0, 0.0)
    for rate in rates:
        moved = grid - rate * smoothness * np.maximum(grid, 0)
        # mass is spread over the two nearest points, which keeps its mean
        place = (moved + width) / spacing
        low = np.clip(np.floor(place).astype(int), 0, count - 2)
        share = place - low
        mass = np.bincount(low, mass * (1 - share), count) + np.bincount(low + 1, mass * share, count)
        kernel = np.diff(norm.cdf(edges / rate))
        mass = np.maximum(fftconvolve(mass, kernel, "same"), 0)
    both = [(mass, np.interp(grid - way * shift, grid, mass)) for way in (1, -1)]
    pairs = [*both, *(pair[::-1] for pair in both)]
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in pairs)


def test_a_kinked_loss_beats_the_product_of_contractions_and_not_the_bound():
    """One large rate and many small ones: early noise may be worth less than contraction alone says."""
    rates, smoothness = [2.0] + [0.02] * 60, 1.0
    product = sum(
        rates[t] ** 2 * math.prod((1 - rates[u] * smoothness) ** 2 for u in range(t + 1, len(rates)))
        for t in range(len(rates))
    )
    bound = survives(rates, smoothness)
    for shift, epsilon in ((0.1, 0.1), (0.1, 0.5), (1.0, 1.0)):
        seen = kinked_delta(rates, smoothness, shift, epsilon)
        assert seen <= accounting.gaussian_delta(epsilon, shift / math.sqrt(bound))
    seen = kinked_delta(rates, smoothness, 0.1, 0.5)
    assert seen > 4 * accounting.gaussian_delta(0.5, 0.1 / math.sqrt(product))


def test_one_use_at_the_worst_step():
    """Single use at u: μ² = η_u²/(Σ_{t>=u} η_t² + V)."""
    rates, others = [1.0, 0.5, 0.4], 3
    credit = others * survives(rates, 1.0)
    each = [rates[u] ** 2 / (sum(r**2 for r in rates[u:]) + credit) for u in range(3)]
    mu = accounting.aggregated_round_mu(2.0, 1, rates=rates, others=others, smoothness=1.0, convex=True)
    assert mu**2 == pytest.approx(max(each) / 4)


def test_many_patterns_are_bounded_by_one_that_costs_more():
    rng = np.random.default_rng(3)
    for _ in range(20):
        rates = [float(r) for r in rng.uniform(0.1, 1.0, 12)]

        def mu(uses, rates=rates):
            return accounting.aggregated_round_mu(1.0, uses, rates=rates, others=4, smoothness=0.7, convex=True)

        variances = [rate**2 for rate in rates]
        variances[-1] += 4 * survives(rates, 0.7)
        for _ in range(50):
            used = rng.choice(12, 4, replace=False)
            cost = accounting.absorption_cost([r if t in used else 0.0 for t, r in enumerate(rates)], variances)
            assert cost <= mu(4) ** 2 * (1 + 1e-12)
        assert mu(1) <= mu(4) <= mu(12) * math.sqrt(12 / 4) * 3


def test_credit_ends():
    def mu(**changes):
        conditions = {"rates": [1.0] * 5, "others": 9, "smoothness": 0.5, "convex": True, **changes}
        return accounting.aggregated_round_mu(2.0, conditions.pop("uses", 5), **conditions)

    # all others collude: the plain composition of the target's own steps
    assert mu(others=0) == pytest.approx(math.sqrt(5) / 2)
    # one local step: noise is added once, and the credit is exact
    one = 1 / (2 * math.sqrt(10))
    assert mu(uses=1, rates=[1.0]) == pytest.approx(one)
    assert mu(uses=1, rates=[0.3], convex=False) == pytest.approx(one)  # whatever its rate and the loss
    assert mu(uses=0) == 0.0
    assert mu(rates=[7.0] * 5, smoothness=0.5 / 7) == pytest.approx(mu())  # the unit of rates is nobody's business
    assert accounting.honest_others(10, 3) == 6
    assert accounting.honest_others(2, 5) == 0


def test_unproved_credit_is_refused():
    def mu(**changes):
        conditions = {"rates": [1.0] * 5, "others": 9, "smoothness": 0.5, "convex": True, **changes}
        return accounting.aggregated_round_mu(2.0, 5, **conditions)

    with pytest.raises(NoProof, match="convex"):
        mu(convex=False)
    with pytest.raises(NoProof, match="non-expansive"):
        mu(smoothness=None)
    with pytest.raises(NoProof, match=r"2\.5 > 2"):
        mu(rates=[5.0, 1, 1, 1, 1])  # the largest of the rates decides, wherever it stands
    with pytest.raises(NoProof, match="rates"):
        mu(rates=[1.0, 1.0, 0.0, 1.0, 1.0])
    assert mu(convex=False, assume=True) == mu()


def test_smooth_networks():
    """G7c grows with the Lipschitz constant and needs another honest client."""

    def mu(lipschitz, others, rates=(1.0, 1.0, 1.0), uses=3):
        return accounting.smooth_round_mu(2.0, uses, rates=rates, others=others, lipschitz=lipschitz)

    assert mu(0.0, 9) == pytest.approx(3 / (2 * 3))
    assert mu(0.5, 9) == pytest.approx((1.5**2 + 1.5 + 1) / (2 * 3))
    assert mu(0.5, 9, uses=1) == pytest.approx(1.5**2 / (2 * 3))
    assert mu(0.5, 0) == math.inf
    # the last step's noise is what counts
    assert mu(0.0, 9, (1.0, 1.0, 0.1)) == pytest.approx(2.1 / (0.1 * 2 * 3))


def test_shuffled_uses():
    assert accounting.shuffled_uses(130, 38) == 4
    assert accounting.shuffled_uses(38, 38) == 1
    assert accounting.shuffled_uses(39, 38) == 2


def test_rounds_touch_as_many_epochs_as_the_worst_of_them():
    """Rounds of so many batches, one after the other: counted by going through them."""
    for steps, per_epoch in itertools.product(range(1, 13), range(1, 13)):
        rounds = range(steps * per_epoch)
        most = max(len({(r * steps + i) // per_epoch for i in range(steps)}) for r in rounds)
        found = composition.epochs_in_round(steps, per_epoch)
        anywhere = max(len({(at + i) // per_epoch for i in range(steps)}) for at in range(per_epoch))
        assert most <= found <= anywhere
        if math.gcd(steps, per_epoch) in (1, steps, per_epoch):
            assert found == most


def test_a_record_is_used_once_in_each_epoch_that_is_met():
    def uses(participations, **when):
        when = {"own_epochs": False, "num_rounds": None, **when}
        return composition.total_shuffled_uses(participations, 10, 38, **when)

    assert uses(13, own_epochs=True) == uses(13, num_rounds=13) == 4  # 130 consecutive batches
    assert uses(13) == 26  # any two epochs in each
    assert uses(13, num_rounds=20) == 6  # 200 batches pass in all
    assert uses(2, num_rounds=20) == 4
    assert uses(0) == composition.total_shuffled_uses(5, 0, 38, own_epochs=True, num_rounds=None) == 0


def shuffled(rate, batch_size=0, population=0, kind="shuffled"):
    return Release("uplink", 1.0, 1.0, 1, Sampling(kind, rate, "replace-one", 0.0, batch_size, population), "test")


def test_an_epoch_has_whole_batches_only():
    assert composition.batches_per_epoch(shuffled(0.3, 64, 2441)) == 38
    assert composition.batches_per_epoch(shuffled(1.0, 64, 64)) == 1
    assert composition.batches_per_epoch(shuffled(1 / 7)) == 7  # by the rate, where no size is stated
    assert composition.batches_per_epoch(shuffled(0.3)) == 3
    assert composition.batches_per_epoch(shuffled(1.0)) == 1
    for unknown in (shuffled(0.0), shuffled(1.1), shuffled(0.5, kind="shuffled-round")):
        with pytest.raises(NoProof, match="batch_size and population, or a rate"):
            composition.batches_per_epoch(unknown)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="uses=6 in 5 local steps"):
        accounting.aggregated_round_mu(1.0, 6, rates=[1.0] * 5, others=1, smoothness=1.0, convex=True)
    with pytest.raises(ValueError, match="lipschitz=-1"):
        accounting.smooth_round_mu(1.0, 1, rates=[1.0], others=1, lipschitz=-1.0)
    with pytest.raises(ValueError, match="batches_per_epoch=0"):
        accounting.shuffled_uses(5, 0)
    for cohort_size, colluders in ((0, 0), (5, -1)):
        with pytest.raises(ValueError, match=f"cohort_size={cohort_size}"):
            accounting.honest_others(cohort_size, colluders)
    plain = (Item("plain", 1.0, 1.0, 1),)
    for group in (Group(plain, probability=1.1), Group(plain, probability=-0.1), Group(plain, repeats=-1)):
        with pytest.raises(ValueError, match="of a group"):
            groups_epsilon([group], 1e-5)


def test_noise_without_an_end_hides_everything_only_at_every_step():
    def mu(*noise):
        return accounting.aggregated_round_mu(noise, 1, rates=[1.0] * 2, others=3, smoothness=0.5, convex=True)

    assert mu(math.inf, math.inf) == 0.0
    assert mu(1.0, math.inf) == math.inf  # not counted on: ratios of such noise are no numbers
    assert mu(0.0, 1.0) == math.inf


def test_growth_beyond_what_a_float_holds_is_no_bound():
    assert accounting.smooth_round_mu(1.0, 3, rates=[1.0] * 3, others=4, lipschitz=1e200) == math.inf
    assert accounting.smooth_round_mu(1.0, 0, rates=[1.0] * 3, others=0, lipschitz=0.0) == 0.0
    assert accounting.smooth_round_mu(0.0, 0, rates=[1.0] * 3, others=2, lipschitz=0.0) == 0.0


def test_noise_that_float32_may_lose_has_no_multiplier():
    def multiplier(noise_std, sensitivity=1.0):
        return composition.noise_multiplier(shuffled(0.5)._replace(noise_std=noise_std, sensitivity=sensitivity))

    assert multiplier(2.0**-100) == 2.0**-100
    assert multiplier(0.0) == 0.0
    assert multiplier(0.0, 0.0) == math.inf
    for noise_std, sensitivity, said in (
        (2.0**-101, 1.0, r"below 2\^-100"),
        (-1.0, 1.0, "give no bound"),
        (1.0, -1.0, "give no bound"),
        (1.0, math.inf, "unbounded"),
    ):
        with pytest.raises(NoProof, match=said):
            multiplier(noise_std, sensitivity)


@pytest.mark.parametrize("kind", ["fixed-round", "disjoint-round", "full-round", "poisson-round"])
def test_a_round_of_batches_says_nothing_of_an_absent_record(kind):
    """A sensitivity between any two worlds that hold the record or another one: its absence is neither."""
    with pytest.raises(NoProof, match="no add/remove neighbours"):
        composition.step_multiplier(shuffled(0.5, kind=kind), "add/remove")
    assert composition.step_multiplier(shuffled(0.5, kind=kind), "zero-out") == 1.0
    assert composition.step_multiplier(shuffled(0.5, kind=kind), "replace-one") == 1.0


def test_a_round_of_disjoint_batches_uses_a_record_once_at_most():
    """q = uses · rate, and 1 where rounding or an odd release would make it more."""
    disjoint = shuffled(0.34, kind="disjoint")._replace(uses=3)
    for rate, used in ((0.34, 1.0), (0.2, 0.6), (0.0, 0.0)):
        one = disjoint._replace(sampling=disjoint.sampling._replace(rate=rate))
        assert composition.sampled_item(one, "replace-one") == Item("fixed", pytest.approx(used), 1.0, 1)
    none = composition.sampled_item(disjoint._replace(uses=0), "replace-one")
    assert (none.rate, none.uses) == (0.0, 0)


@pytest.mark.parametrize(("rate", "kind"), [(0.15, "fixed"), (0.17, "mixture"), (0.3, "mixture"), (0.34, "plain")])
def test_a_blank_in_batches_that_are_known_moves_half_as_far(rate, kind):
    """A contribution is half of a replacement, if its release is known to be the one that changes."""
    sampling = Sampling("disjoint", rate, "zero-out", 0.0, 5, 100)
    one = Release("uplink", 3.0, 1.0, 3, sampling, "test")
    item = composition.sampled_item(one, "zero-out", given=0.5)
    amplified = ("fixed", pytest.approx(min(1.0, 3 * rate)), 1.5, 1, ())
    known = {
        "fixed": amplified,
        "mixture": ("mixture", 1.0, 3.0, 1, ((pytest.approx(3 * rate), 1.0),)),
        "plain": ("plain", 1.0, 3.0, 1, ()),
    }
    assert item == known[kind]
    assert composition.sampled_item(one, "zero-out") == amplified
    assert composition.sampled_item(one, "replace-one", given=0.0) == amplified
