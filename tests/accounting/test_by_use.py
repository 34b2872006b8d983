"""E3: one release after several local steps, by how many of them use the record."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dither import accounting
from dither.accounting import convex_message_epsilon, inclusion_probability, views
from dither.accounting.composition import item_by_use
from dither.accounting.ledger import entries
from dither.errors import NoProof
from dither.experiment.build import build_experiment
from dither.types import Conditions, Release, Sampling, Uses
from tests.auditing.grid import small_dataset, small_spec

CONVEX = Conditions(convex=True, smoothness=1.0)


def release(kind, steps, rate, noise_std, *, one_step, lr=1.0):
    """A round of `steps` steps of rate `lr`; a replaced record moves a step by 2."""
    used = 1 - (1 - one_step) ** steps
    sampling = Sampling(f"{kind}-round", used, "replace-one", 0.0, 1, round(1 / one_step))
    return Release("uplink", noise_std, 2.0 * steps * lr, 1, sampling, "t", by_use=Uses(steps, 1 / steps, rate))


def bound(one, delta, adjacency, count=1):
    (row,) = views.account([(one, count)], delta, CONVEX, adjacency=adjacency, views=("upload",))
    return row


def test_one_message_has_the_value_of_its_formula():
    one = release("fixed", 10, 0.2, 5.0, one_step=1 / 325, lr=0.2)
    expected = convex_message_epsilon([0.2] * 10, 1.0, 1, 325, 5.0, 1e-4)
    assert inclusion_probability(1, 325, 10) == pytest.approx(one.sampling.rate)
    row = bound(one, 1e-4, "replace-one")
    assert row.recipe == "E3"
    assert expected <= row.value <= 1.001 * expected


def exact_delta(epsilon, worlds, sigma):
    """δ(ε) of two equal mixtures of Gaussians, in both orders."""
    x = np.linspace(-30, 30, 20_001)
    first, second = (np.mean([norm.pdf(x, centre, sigma) for centre in centres], axis=0) for centres in worlds)
    step = x[1] - x[0]
    return max(
        float(np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) * step)
        for a, b in ((first, second), (second, first))
    )


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize("kind", ["fixed", "poisson"])
def test_exact_mixtures_over_all_batches_do_not_exceed_it(kind, adjacency):
    """Three records of gradient ±1, of which one is replaced or blanked; two steps of rate 1 on batches of one, or
    on coins of 1/3. All patterns have the same probability, or are repeated as often as they should be."""
    others, target, neighbour = -1.0, 1.0, -1.0 if adjacency == "replace-one" else 0.0
    if kind == "fixed":
        steps = [[g, others, others] for g in (target, neighbour)]
    else:  # each of three coins: a record is drawn in one of three equally likely cases
        coins = list(itertools.product((1, 0, 0), repeat=2))
        steps = [[a * g + b * others for a, b in coins] for g in (target, neighbour)]
    worlds = [[sum(pair) for pair in itertools.product(each, repeat=2)] for each in steps]
    for sigma, epsilon in itertools.product((0.8, 3.0), (0.1, 1.0)):
        one = release(kind, 2, 1.0, sigma, one_step=1 / 3)
        delta = exact_delta(epsilon, worlds, sigma)
        if delta > 1e-9:
            assert bound(one, delta, adjacency).value >= epsilon - 1e-4


def test_the_bound_is_attained_by_opposed_records():
    """Where all others oppose the record, the fixed-size profile leaves nothing away."""
    sigma, epsilon = 1.5, 0.2
    worlds = [[sum(pair) for pair in itertools.product([g, -1.0, -1.0], repeat=2)] for g in (1.0, -1.0)]
    delta = exact_delta(epsilon, worlds, sigma)
    assert bound(release("fixed", 2, 1.0, sigma, one_step=1 / 3), delta, "replace-one").value < 1.2 * epsilon


def test_steps_that_may_expand_keep_the_worst_case():
    one = release("fixed", 10, 2.1, 5.0, one_step=1 / 325)
    assert bound(one, 1e-4, "replace-one").recipe == "R5"
    row = views.account([(one._replace(by_use=Uses(10, 0.1, 1.0)), 1)], 1e-4, views=("upload",))[0]
    assert row.recipe == "R5"  # nobody said that losses are convex


def test_a_method_states_it_for_clipped_records_alone():
    common = {"batch_sampling": "poisson", "sampling_rate": 0.2, "privacy__adjacency": "zero-out"}
    found = {}
    for clip in ("example", "batch"):
        spec = small_spec("secure-fedavg", **common, privacy__clip=clip)
        found[clip] = build_experiment(spec, dataset=small_dataset())
    assert [found[clip].accountant().proven().recipe for clip in found] == ["E3", "R5"]
    noise = {clip: float(found[clip].plan.hyper["noise_multiplier"][0]) for clip in found}
    assert noise["example"] < 0.5 * noise["batch"]
    fast = small_spec("secure-fedavg", **common, privacy__clip="example", client_lr=5.0)
    assert build_experiment(fast, dataset=small_dataset()).accountant().proven().recipe == "R5"
    protected = small_spec("secure-fedavg", **common, privacy__clip="example", randomness="os")
    row = build_experiment(protected, dataset=small_dataset()).accountant().proven()
    assert (row.recipe, row.not_covered) == ("R5", ())  # local steps round: no proof of what float32 computes


def test_sums_multiply_its_noise():
    one = release("fixed", 10, 0.2, 5.0, one_step=1 / 325, lr=0.2)
    conditions = CONVEX._replace(cohort_size=9, colluders=0)
    (row,) = views.account([(one, 4)], 1e-4, conditions, adjacency="replace-one", views=("sum",))
    louder = one._replace(noise_std=15.0)
    assert row.recipe == "E3 sum"
    assert row.value == pytest.approx(bound(louder, 1e-4, "replace-one", 4).value, rel=1e-6)


def test_a_ledger_keeps_it():
    one = release("poisson", 10, 0.2, 5.0, one_step=1 / 325)
    assert entries._decode_release(entries._encode_release(one)) == one
    plain = one._replace(by_use=None)
    assert len(entries._encode_release(plain)) == 6
    exactly = plain._replace(exact=accounting.exact.noise(10, summed=4))
    assert entries._decode_release(entries._encode_release(exactly)) == exactly


def uses_of(kind, steps=4, share=0.25, count=1, rate=1.0):
    sampling = Sampling(kind, rate, "replace-one", 0.0, 1, 10)
    return Release("uplink", 5.0, 2.0, count, sampling, "t", by_use=Uses(steps, share, 1.0))


def test_the_record_of_a_full_batch_is_used_in_every_step():
    item = item_by_use(uses_of("full-round", steps=3, count=2), "replace-one")
    assert (item.kind, item.noise_multiplier, item.uses) == ("plain", 2.5 / 0.75, 2)
    assert item_by_use(uses_of("full-round", steps=3), "zero-out").noise_multiplier == 2.5 / 0.375
    # but no two worlds are further apart than the sensitivity
    assert item_by_use(uses_of("full-round", steps=9), "replace-one").noise_multiplier == 2.5


def test_the_record_of_disjoint_batches_is_used_once():
    item = item_by_use(uses_of("disjoint-round", rate=0.4), "replace-one")
    assert (item.kind, item.rate, item.noise_multiplier) == ("fixed", 0.4, 10.0)
    # a blank's place in its batch is another record's: no half
    assert item_by_use(uses_of("disjoint-round", rate=0.4), "zero-out").noise_multiplier == 10.0
    assert item_by_use(uses_of("disjoint-round", share=2.0), "replace-one").noise_multiplier == 2.5


@pytest.mark.parametrize("steps", [4, 11, 12, 40])
def test_the_weights_of_uses_are_those_of_drawn_batches(steps):
    used = 1 - 0.9**steps
    item = item_by_use(uses_of("fixed-round", steps=steps, share=1 / steps, rate=used), "replace-one")
    told = min(steps, 11)
    for uses, (weight, share) in enumerate(item.shares[:told], 1):
        assert weight * used == pytest.approx(binom.pmf(uses, steps, 0.1), rel=1e-9)
        assert share == pytest.approx(uses / steps)
    assert sum(weight for weight, _ in item.shares) == pytest.approx(1.0, abs=1e-12)
    assert len(item.shares) == (told if steps < 12 else 12)
    assert steps < 12 or item.shares[-1][1] == 1.0  # more uses count as all of them


def test_what_is_not_known_by_use_has_no_proof_by_use():
    absent = uses_of("poisson-round", rate=0.1)._replace(sampling=Sampling("poisson-round", 0.1, "add/remove"))
    for refused, adjacency in (
        (uses_of("fixed-round", rate=0.1)._replace(by_use=None), "replace-one"),
        (absent, "add/remove"),
        (uses_of("shuffled-round", rate=0.1), "replace-one"),
        (uses_of("fixed-round", rate=1.0), "replace-one"),
        (uses_of("fixed-round", rate=0.0), "replace-one"),
    ):
        with pytest.raises(NoProof, match=r"\(E3\)"):
            item_by_use(refused, adjacency)


def test_by_use_the_chance_of_participation_counts_too():
    one = release("fixed", 10, 0.2, 5.0, one_step=1 / 325, lr=0.2)
    drawn = CONVEX._replace(participation=accounting.binomial(8, 0.25))
    (row,) = views.account([(one, 8)], 1e-4, drawn, adjacency="replace-one", views=("upload",))
    assert row.recipe == "E3+R4"
    assert bound(one, 1e-4, "replace-one").value < row.value < bound(one, 1e-4, "replace-one", 8).value
    certain = drawn._replace(participation=accounting.binomial(8, 1.0))
    (row,) = views.account([(one, 8)], 1e-4, certain, adjacency="replace-one", views=("upload",))
    assert (row.recipe, row.value) == ("E3", pytest.approx(bound(one, 1e-4, "replace-one", 8).value, rel=1e-9))


def test_by_use_every_release_must_be_known_and_may_not_expand():
    """One round of steps that may expand, or one that nobody knows by use, leaves the worst case for all."""
    one = release("fixed", 10, 0.2, 5.0, one_step=1 / 325, lr=0.2)
    for other in (one._replace(by_use=Uses(10, 0.1, 2.1)), one._replace(by_use=None)):
        for pair in ([(one, 1), (other, 1)], [(other, 1), (one, 1)]):
            (row,) = views.account(pair, 1e-4, CONVEX, adjacency="replace-one", views=("upload",))
            assert row.recipe == "R5"
            assert row.value > bound(one, 1e-4, "replace-one", 2).value
