"""Zero-out: one record's contribution counts as zero, its place stays. Every sampler's bound against exact
mixtures: all batches of a small client enumerated, and their hockey-stick divergence integrated."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from dither import accounting
from dither.accounting import REPLACE_ONE, ZERO_OUT, composition, pld
from dither.types import Release, Sampling

DELTA = 1e-3
REACH, CELLS = 9.0, 2401


def exact_delta(p, q, epsilon, std):
    """δ(ε) of two mixtures of Gaussians: `{centre: weight}`, centres tuples of one or two coordinates."""
    centres = np.array([*p, *q]) / std
    axes = [
        np.linspace(low - REACH, high + REACH, CELLS)
        for low, high in zip(centres.min(0), centres.max(0), strict=True)
    ]

    def density(mixture):
        total = 0.0
        for centre, weight in mixture.items():
            one = [np.exp(-0.5 * (axis - c / std) ** 2) for axis, c in zip(axes, centre, strict=True)]
            total = total + weight * (one[0] if len(one) == 1 else np.multiply.outer(*one))
        return total / math.sqrt(2 * math.pi) ** len(axes)

    cell = math.prod(axis[1] - axis[0] for axis in axes)
    return float(np.maximum(density(p) - math.exp(epsilon) * density(q), 0).sum() * cell)


def mixture(outcomes):
    """{centre: weight} of (centre, weight) pairs."""
    found = Counter()
    for centre, weight in outcomes:
        found[tuple(np.round(np.atleast_1d(centre), 12))] += weight
    return found


def worst_delta(with_record, blanked, epsilon, std):
    return max(exact_delta(with_record, blanked, epsilon, std), exact_delta(blanked, with_record, epsilon, std))


def bound(kind, rate, std, *, uses=1, adjacency=ZERO_OUT, stated=ZERO_OUT, size=1.0, fixed_rate=True, **sampling):
    release = Release(
        "uplink", std, size, uses, Sampling(kind, rate, stated, fixed_rate=fixed_rate, **sampling), "test"
    )
    found = accounting.proven(
        [(release, 1)], DELTA, accounting.Conditions(own_epochs=True), view="upload", adjacency=adjacency
    )
    return found.value


def steps(draws, values):
    """The sums of each step's batch: the noiseless outputs of a participation."""
    return tuple(sum(values[i] for i in batch) for batch in draws)


def others(kind, count, seed):
    """Contributions of the other records, of norm at most 1."""
    if kind == "opposing":
        return [-1.0] * count
    return list(np.random.default_rng(seed).uniform(-1, 1, count)) if kind == "random" else [0.0] * count


EVERYONE = pytest.mark.parametrize("rest", ["opposing", "silent", "random"])


def recipes(kind, rate, std, uses):
    """The bounds of R2 and of R4, each by itself: ε by the rate above which batches are taken as known."""
    release = Release("uplink", std, 1.0, uses, Sampling(kind, rate, ZERO_OUT), "test")
    items = {given: composition.sampled_item(release, ZERO_OUT, given=given) for given in (1.0, 0.0)}
    return {
        given: composition.groups_epsilon([composition.Group((item,))], DELTA) for given, item in items.items()
    }


@EVERYONE
@pytest.mark.parametrize(
    ("count", "size", "std", "uses"),
    [(4, 1, 0.6, 1), (5, 2, 0.8, 1), (5, 1, 3.0, 1), (4, 2, 1.5, 2), (4, 1, 0.5, 2), (3, 2, 0.7, 2)],
)
def test_fixed_size_batches_amplify_at_the_replace_one_distance_or_not_at_all(rest, count, size, std, uses):
    values = [1.0, *others(rest, count - 1, count)]
    batches = list(itertools.combinations(range(count), size))
    draws = list(itertools.product(batches, repeat=uses))
    worlds = [mixture((steps(d, v), 1 / len(draws)) for d in draws) for v in (values, [0.0, *values[1:]])]
    each = recipes("fixed", size / count, std, uses)
    for epsilon in each.values():
        assert worst_delta(*worlds, epsilon, std) <= DELTA * (1 + 1e-6)
    assert bound("fixed", size / count, std, uses=uses) == min(each.values())
    assert each[1.0] == bound("fixed", size / count, std, uses=uses, adjacency=REPLACE_ONE)


def test_distance_c_is_wrong_for_fixed_size_batches():
    """Another record takes the place of the one that is not drawn: the counter-example, by one exact mixture."""
    std, rate = 0.6, 0.25
    with_record = mixture([(-1.0, 1 - rate), (1.0, rate)])  # one of four records, the others at -1
    blanked = mixture([(-1.0, 1 - rate), (0.0, rate)])
    naive = accounting.fixed_size_epsilon(rate, std, 1, DELTA)  # as if the distance were 1
    assert worst_delta(with_record, blanked, naive, std) > 5 * DELTA
    assert worst_delta(with_record, blanked, bound("fixed", rate, std), std) <= DELTA


@EVERYONE
@pytest.mark.parametrize(("rate", "std", "uses"), [(0.3, 0.7, 1), (0.5, 1.2, 2)])
def test_poisson_batches_take_the_add_remove_bound_whatever_the_rate_follows(rest, rate, std, uses):
    values = [1.0, *others(rest, 2, 3)]
    subsets = [s for k in range(4) for s in itertools.combinations(range(3), k)]
    chance = {s: rate ** len(s) * (1 - rate) ** (3 - len(s)) for s in subsets}
    draws = [(d, math.prod(chance[s] for s in d)) for d in itertools.product(subsets, repeat=uses)]
    worlds = [mixture((steps(d, v), w) for d, w in draws) for v in (values, [0.0, *values[1:]])]
    stated = {"stated": "add/remove", "uses": uses}
    epsilon = bound("poisson", rate, std, fixed_rate=False, **stated)
    found = worst_delta(*worlds, epsilon, std)
    assert found <= DELTA * (1 + 1e-4)
    if rest == "silent":
        assert found >= 0.98 * DELTA  # attained
    assert epsilon == bound("poisson", rate, std, adjacency="add/remove", **stated)
    assert bound("poisson", rate, std, adjacency="add/remove", fixed_rate=False, **stated) == math.inf


@EVERYONE
@pytest.mark.parametrize(
    ("count", "batches", "std"), [(3, 2, 0.7), (4, 2, 0.5), (5, 2, 0.9), (5, 1, 3.0), (2, 2, 0.8)]
)
def test_disjoint_batches(rest, count, batches, std):
    """Batches of one record, so many of `count` a round: used with probability batches/count."""
    values = [1.0, *others(rest, count - 1, count)]
    draws = [tuple((i,) for i in order) for order in itertools.permutations(range(count), batches)]
    worlds = [mixture((steps(d, v), 1 / len(draws)) for d in draws) for v in (values, [0.0, *values[1:]])]
    each = recipes("disjoint", 1 / count, std, batches)
    for epsilon in each.values():
        assert worst_delta(*worlds, epsilon, std) <= DELTA * (1 + 1e-6)
    assert bound("disjoint", 1 / count, std, uses=batches) == min(each.values())
    if batches == count:  # every record is used: given the batches, one release moves by 1
        assert min(each.values()) == pytest.approx(accounting.gaussian_epsilon(1 / std, DELTA))
    if (rest, count) == ("opposing", 4):  # attained, nearly: R4 gives nothing away
        assert worst_delta(*worlds, each[0.0], std) > 0.999 * DELTA


def test_several_rounds_take_the_smallest_recipe_and_say_which():
    """An example that had R2's 3.90: three of ten rounds use the record, and the noise is large."""
    conditions, sampling = accounting.Conditions(), Sampling("disjoint", 0.15, ZERO_OUT)
    rounds = [(Release("uplink", 30.0, 1.0, 2, sampling, "test"), 500)]
    row = accounting.proven(rounds, 1e-5, conditions, view="upload")
    by_uses = accounting.random_uses_epsilon(accounting.binomial_pmf(500, 0.3), 1 / 30, 1e-5)
    assert by_uses <= row.value <= by_uses * 1.001
    assert row.recipe == "R4"
    replaced = accounting.proven(rounds, 1e-5, conditions, view="upload", adjacency=REPLACE_ONE)
    assert replaced.recipe == "R2"
    assert replaced.value == pytest.approx(accounting.fixed_size_epsilon(0.3, 15.0, 500, 1e-5))
    # Each kind of release takes what suits it: rare batches amplify, frequent ones are taken as known.
    rare = (Release("uplink", 5.0, 1.0, 1, Sampling("fixed", 0.01, ZERO_OUT), "test"), 2000)
    both = accounting.proven([*rounds, rare], 1e-5, conditions, view="upload")
    one_recipe = [
        [composition.Group((composition.sampled_item(r, ZERO_OUT, given=g),), n) for r, n in (*rounds, rare)]
        for g in (1.0, 0.0)
    ]
    assert both.recipe == "R2+R4"
    assert both.value < 0.95 * min(composition.groups_epsilon(groups, 1e-5) for groups in one_recipe)


def test_disjoint_batches_cannot_have_amplification_and_half_the_distance():
    std, values = 0.5, [1.0, -1.0, -1.0, -1.0, -1.0]
    draws = [tuple((i,) for i in order) for order in itertools.permutations(range(5), 2)]
    worlds = [mixture((steps(d, v), 1 / len(draws)) for d in draws) for v in (values, [0.0, *values[1:]])]
    naive = accounting.fixed_size_epsilon(0.4, std, 1, DELTA)
    assert worst_delta(*worlds, naive, std) > 3 * DELTA


@EVERYONE
def test_shuffled_epochs_use_a_record_once_at_distance_c(rest):
    values, std = [1.0, *others(rest, 3, 4)], 0.8
    draws = [(order[:2], order[2:]) for order in itertools.permutations(range(4))]  # an epoch of two batches
    worlds = [mixture((steps(d, v), 1 / 24) for d in draws) for v in (values, [0.0, *values[1:]])]
    epsilon = bound("shuffled", 0.5, std, uses=2, batch_size=2, population=4)
    assert epsilon == pytest.approx(accounting.gaussian_epsilon(1 / std, DELTA))
    assert worst_delta(*worlds, epsilon, std) <= DELTA * (1 + 1e-6)


def test_full_batches_move_by_c_and_a_replacement_by_twice_that():
    assert bound("full", 1.0, 2.0) == pytest.approx(accounting.gaussian_epsilon(0.5, DELTA))
    assert bound("full", 1.0, 2.0, adjacency=REPLACE_ONE) == pytest.approx(accounting.gaussian_epsilon(1.0, DELTA))


def test_a_sensitivity_stated_for_replacements_is_not_halved():
    """Batch clipping, NbAFL: nothing says that a blank is nearer than any other record."""
    for kind, rate in (
        ("full", 1.0),
        ("fixed", 0.2),
        ("disjoint", 0.2),
        ("full-round", 1.0),
        ("fixed-round", 0.2),
    ):
        stated = {"stated": REPLACE_ONE}
        assert bound(kind, rate, 2.0, **stated) == bound(kind, rate, 2.0, adjacency=REPLACE_ONE, **stated)


@pytest.mark.parametrize("rest", ["opposing", "random"])
@pytest.mark.parametrize("kind", ["poisson-round", "fixed-round"])
def test_one_release_after_several_steps(rest, kind):
    """Secure FedAvg (R5): two clipped steps whose gradients depend on the model, noise on the end alone. Blanking
    moves the whole path, so the distance is that of any two ends; with coins the blank's world is one Gaussian
    for each choice of the others, with batches of fixed size it is not."""
    rate, std, values = 0.5, 0.8, [1.0, *others(rest, 2, 5)]

    def end(draw, pulls):
        w = 0.0
        for batch in draw:
            mean = sum(math.tanh(pulls[i] * 3 - w) for i in batch if pulls[i] is not None) / (
                3 if kind[0] == "p" else 1
            )
            w += 0.5 * max(-1.0, min(1.0, mean))
        return w

    subsets = [s for k in range(4) for s in itertools.combinations(range(3), k)]
    if kind == "fixed-round":
        rate, subsets = 1 / 3, [(i,) for i in range(3)]
        chance = dict.fromkeys(subsets, 1 / 3)
    else:
        chance = {s: rate ** len(s) * (1 - rate) ** (3 - len(s)) for s in subsets}
    draws = [(d, math.prod(chance[s] for s in d)) for d in itertools.product(subsets, repeat=2)]
    worlds = [mixture((end(d, v), w) for d, w in draws) for v in (values, [None, *values[1:]])]
    stated = {"stated": REPLACE_ONE, "size": 2.0}  # 2 G Σ η
    epsilon = bound(kind, 1 - (1 - rate) ** 2, std, **stated)
    assert worst_delta(*worlds, epsilon, std) <= DELTA * (1 + 1e-6)
    assert epsilon <= bound(kind, 1 - (1 - rate) ** 2, std, adjacency=REPLACE_ONE, **stated)


def test_the_poisson_pair_of_both_directions_is_below_the_fixed_size_profile():
    """Why the two recipes differ: one direction of zero-out is an addition, which costs less."""
    epsilons = np.array([0.5, 1.0, 2.0])
    removal, addition = (one(0.3, 2.0).upper(epsilons) for one in (pld.removal, pld.addition))
    assert np.all(addition[0] - np.exp(epsilons + addition[1]) < removal[0] - np.exp(epsilons + removal[1]))
