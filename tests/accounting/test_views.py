"""The table of views: what is proven for whom, and what is refused."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither import accounting
from dither.accounting import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, Conditions, views
from dither.accounting.gaussian import rho
from dither.errors import NoProof
from dither.types import ExactNoise, Lattice, Participation, Release, Sampling

Z_CPFED = 1.8544536220275742
Z_CONCENTRATED = 0.3002770038368145
CONVEX = Conditions(cohort_size=10, convex=True, smoothness=1.0)


def release(kind, z, *, uses=1, rate=1.0, adjacency=REPLACE_ONE, channel="uplink", **sampling):
    return Release(channel, z, 1.0, uses, Sampling(kind, rate, adjacency, **sampling), "test", rates=(1.0,))


def table(participations, delta, conditions=None, **options):
    return {row.view: row for row in accounting.account(participations, delta, conditions, **options)}


def by_recipe(participations, delta, conditions, view, adjacency):
    rows = accounting.account(
        participations, delta, conditions, adjacency=adjacency, views=(view,), every_recipe=True
    )
    return {row.recipe: row for row in rows}


def cpfed(participations=20):
    return [(release("fixed", Z_CPFED, uses=10, rate=64 / 2441, batch_size=64, population=2441), participations)]


def concentrated(kind="shuffled", batch=64):
    shape = {"rate": batch / 2441, "batch_size": batch, "population": 2441}
    return [(release(kind, Z_CONCENTRATED, uses=10, **shape), 13)]


# --- the five papers' settings, through releases -------------------------------------------------------


def test_cpfed():
    rows = table(cpfed(), 1e-4, CONVEX, adjacency=REPLACE_ONE)
    assert [row.view for row in rows.values()] == list(accounting.VIEWS)
    assert rows["upload"].value == pytest.approx(0.7946, rel=5e-3)
    assert rows["upload"].recipe == "R2"
    assert rows["sum"].value == rows["upload"].value  # post-processing beats the aggregation credit here
    tried = by_recipe(cpfed(), 1e-4, CONVEX, "sum", REPLACE_ONE)
    assert tried["R6 G7b"].value == pytest.approx(35.117580081386436, rel=1e-6)
    assert any("G8" in text for text in tried["R6 G7b"].not_covered)
    ex_ante = CONVEX._replace(participation=accounting.binomial(20, 10 / 16))
    tried = by_recipe(cpfed(), 1e-4, ex_ante, "sum", REPLACE_ONE)
    assert tried["R6 G7b+R4"].value == pytest.approx(27.767679388162158, rel=1e-6)
    assert tried["R2+R4"].value < 0.7946
    tried = by_recipe(cpfed(), 1e-4, ex_ante._replace(colluders=3), "sum", REPLACE_ONE)
    assert tried["R6 G7b+R4"].value == pytest.approx(31.51194371313641, rel=1e-6)


def test_concentrated():
    own = CONVEX._replace(own_epochs=True)
    assert table(concentrated(), 1e-4, own, adjacency=REPLACE_ONE)["upload"].value == pytest.approx(46.2, abs=0.05)
    fixed = table(concentrated("fixed"), 1e-4, adjacency=REPLACE_ONE)["upload"]
    assert fixed.value == pytest.approx(44.433, rel=5e-3)
    poisson = [(release("poisson", 2 * Z_CONCENTRATED, uses=10, rate=64 / 2441, adjacency=ADD_REMOVE), 13)]
    assert table(poisson, 1e-4)["upload"].value == pytest.approx(6.20, abs=0.01)
    assert table(poisson, 1e-4, adjacency=REPLACE_ONE)["upload"].value == pytest.approx(7.06, abs=0.01)


def test_shuffled_epochs_that_cross_a_round_are_charged_twice():
    """38 batches an epoch and 10 a round: two uses can meet in a round, which costs more than two rounds."""
    own = CONVEX._replace(own_epochs=True)
    crossing = table(concentrated(), 1e-4, own, adjacency=REPLACE_ONE)["sum"]
    assert crossing.recipe == "R6 G7b+R4"
    assert crossing.value == pytest.approx(9.5993627, rel=1e-6)
    pattern = accounting.shuffled_round_pattern(13, 10, 38, 64 / 2441)
    assert sum(pattern.values()) == pytest.approx(1.0)
    assert max(once + 2 * twice for once, twice in pattern) == 4
    # where the noise changes, the worst pattern is taken: two rounds with two uses each
    uneven = [
        (concentrated()[0][0], 12),
        (concentrated()[0][0]._replace(noise_std=Z_CONCENTRATED * 1.0001), 1),
    ]
    worst = table(uneven, 1e-4, own, adjacency=REPLACE_ONE)["sum"]
    mu = math.sqrt(2 * 4 / (2 + 9)) / Z_CONCENTRATED
    assert worst.value == pytest.approx(accounting.gaussian_epsilon(mu, 1e-4), rel=1e-9)
    # 40 batches an epoch: no round straddles two epochs, and the single-use formula holds
    shape = {"rate": 61 / 2441, "batch_size": 61, "population": 2441}
    aligned = [(release("shuffled", Z_CONCENTRATED, uses=10, **shape), 13)]
    row = table(aligned, 1e-4, own, adjacency=REPLACE_ONE)["sum"]
    assert row.value == pytest.approx(9.48, abs=0.01)
    # epochs that advance with the calendar meet more epochs
    calendar = CONVEX._replace(num_rounds=20)
    assert (
        "6 uses"
        in table(concentrated(), 1e-4, calendar, adjacency=REPLACE_ONE, views=("upload",))["upload"].detail
    )


def test_secure_fedavg_per_round_release():
    rows = table(
        [(release("fixed-round", 0.8062266872137587, rate=0.03034667218864549), 50)],
        1e-4,
        adjacency=REPLACE_ONE,
    )
    assert rows["upload"].value == pytest.approx(2.387, rel=5e-3)
    assert rows["upload"].recipe == "R5"
    # the noise is added once, so the sum has the noise of all ten clients and keeps the amplification
    summed = table(
        [(release("fixed-round", 0.8062266872137587, rate=0.03034667218864549), 50)],
        1e-4,
        Conditions(cohort_size=10),
        adjacency=REPLACE_ONE,
    )["sum"]
    expected = accounting.fixed_size_epsilon(0.03034667218864549, 0.8062266872137587 * math.sqrt(10), 50, 1e-4)
    assert summed.value == pytest.approx(expected)
    assert summed.recipe == "R5 sum"


def test_nbafl_channels():
    constant = math.sqrt(2 * math.log(1.25 / 0.01))
    up = release("full", constant / (50 / 1.0))
    down = release("full", constant * 25 / 50, channel="downlink")
    rounds = [((up, down), 25)]
    rows = table(rounds, 0.01, Conditions(exposures=1), adjacency=REPLACE_ONE)
    assert rows["broadcast"].value == pytest.approx(171.62414541907197, rel=1e-6)
    assert rows["broadcast"].recipe == "R1 joint"
    assert rows["final"].value == pytest.approx(11.918178190326882, rel=1e-6)
    assert rows["final"].recipe == "R1 downlink"
    assert rows["upload"].value == pytest.approx(accounting.gaussian_epsilon(5 * 50 / constant, 0.01))
    assert table(rounds, 0.01, adjacency=REPLACE_ONE)["broadcast"].value == rows["final"].value


def test_scaffold_and_its_private_state():
    rounds = [(release("fixed", 707.1067811865476, uses=50, rate=0.2), 120)]
    conditions = Conditions(cohort_size=8, convex=True, smoothness=0.1, client_state=True)
    rows = table(rounds, 1e-5, conditions, adjacency=REPLACE_ONE)
    assert rows["upload"].value == pytest.approx(0.06487, rel=5e-3)
    assert rows["sum"].value == rows["upload"].value
    refused = by_recipe(rounds, 1e-5, conditions, "sum", REPLACE_ONE)["no proof"]
    assert refused.value == math.inf
    assert "private state" in refused.detail


def test_shuffled_pattern_by_simulation():
    rng, trials = np.random.default_rng(1), 40_000
    rounds, steps, per_epoch, rate = 5, 3, 7, 0.125  # one record in eight is in the dropped batch
    slots = rng.integers(0, 8, size=(trials, 3)) + np.arange(3) * per_epoch
    inside = (slots < (np.arange(3) + 1) * per_epoch) & (slots < rounds * steps)
    uses = np.zeros((trials, rounds), int)
    for epoch in range(3):
        hit = np.flatnonzero(inside[:, epoch])
        uses[hit, slots[hit, epoch] // steps] += 1
    for (once, twice), weight in accounting.shuffled_round_pattern(rounds, steps, per_epoch, rate).items():
        seen = np.mean(((uses == 1).sum(1) == once) & ((uses == 2).sum(1) == twice))
        assert seen == pytest.approx(weight, abs=5 * math.sqrt(weight / trials) + 1e-4)


# --- rates and noise that change inside a round --------------------------------------------------------


def steps_of(rates, noise, kind="full", **sampling):
    one = Sampling(kind, sampling.pop("rate", 1.0), REPLACE_ONE, **sampling)
    return tuple(Release("uplink", z, 1.0, 1, one, "test", (r,)) for r, z in zip(rates, noise, strict=True))


def summed_mu(participations, conditions=CONVEX):
    row = table(participations, 1e-5, conditions, adjacency=REPLACE_ONE, views=("sum",))["sum"]
    assert row.recipe.startswith("R6")
    return accounting.gaussian_mu(row.value, 1e-5)


def test_noise_that_changes_from_step_to_step_counts_as_it_is():
    rates, noise = (1.0, 0.7, 0.5), (5.0, 4.0, 3.0)
    mu = accounting.aggregated_round_mu(noise, 3, rates=rates, others=9, smoothness=1.0, convex=True)
    assert summed_mu([(steps_of(rates, noise), 1)]) == pytest.approx(mu, rel=1e-6)
    # the least noise at every step costs more, the most less
    assert summed_mu([(steps_of(rates, [5.0] * 3), 1)]) < mu < summed_mu([(steps_of(rates, [3.0] * 3), 1)])
    # the same noise in one release is the same round
    one = release("full", 4.0, uses=3)._replace(rates=rates)
    assert summed_mu([(one, 1)]) == pytest.approx(summed_mu([(steps_of(rates, [4.0] * 3), 1)]))


def test_steps_of_different_sensitivity_count_with_the_largest():
    def mu(*sensitivities):
        steps = steps_of((1.0, 0.7), (5.0, 5.0))
        pairs = zip(steps, sensitivities, strict=True)
        return summed_mu([(tuple(step._replace(sensitivity=far) for step, far in pairs), 1)])

    assert mu(1.0, 1.0) < mu(1.0, 2.0) <= mu(2.0, 2.0)
    assert mu(1.0, 1.0) < mu(2.0, 1.0) <= mu(2.0, 2.0)


def test_one_use_in_disjoint_batches_is_at_the_worst_step():
    rates = (1.0, 0.5, 0.2)
    one = release("disjoint", 4.0, uses=3, rate=1 / 3)._replace(rates=rates)
    mu = accounting.aggregated_round_mu(4.0, 1, rates=rates, others=9, smoothness=1.0, convex=True)
    assert summed_mu([(one, 1)]) == pytest.approx(mu, rel=1e-6)


def test_shuffled_epochs_take_the_costliest_rounds():
    """Two epochs of six batches in rounds of three: two uses; the first round's rates cost most."""
    shape = {"rate": 1 / 6, "batch_size": 1, "population": 6}

    def round_of(index):
        return release("shuffled", 4.0, uses=3, **shape)._replace(
            rates=tuple(1.0 / (1 + 0.4 * (3 * index + step)) for step in range(3))
        )

    conditions = CONVEX._replace(own_epochs=True, num_rounds=4)
    costs = sorted(
        accounting.aggregated_round_mu(4.0, 1, rates=round_of(t).rates, others=9, smoothness=1.0, convex=True) ** 2
        for t in range(4)
    )
    mu = summed_mu([(round_of(t), 1) for t in range(4)], conditions)
    assert mu == pytest.approx(math.sqrt(costs[-1] + costs[-2]), rel=1e-6)


def test_packing_bounds_every_way_to_place_the_uses():
    rng = np.random.default_rng(5)
    for _ in range(200):
        most, uses = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        costs = [(np.cumsum(rng.exponential(size=most)).tolist(), int(rng.integers(1, 3))) for _ in range(3)]
        rounds = [each for each, count in costs for _ in range(count)]
        best = [0.0] + [-math.inf] * uses
        for each in rounds:
            best = [
                max(best[j - k] + (each[k - 1] if k else 0.0) for k in range(min(j, most) + 1))
                for j in range(uses + 1)
            ]
        assert views._packed(costs, uses) >= max(best) * (1 - 1e-12)
    convex = [([1.0, 3.0], 5), ([1.0, 2.5], 5)]
    assert views._packed(convex, 5) == pytest.approx(3.0 + 3.0 + 1.0)
    assert views._packed([([4.0, 6.0], 3)], 3) == pytest.approx(3 * 4.0)  # one in each round


def test_unknown_or_partial_rates_earn_no_credit():
    for rates in ((), (1.0, 0.5)):
        row = by_recipe(
            [(release("full", 4.0, uses=3)._replace(rates=rates), 1)], 1e-5, CONVEX, "sum", REPLACE_ONE
        )
        assert "learning rate of every local step" in row["no proof"].detail
    expanding = release("full", 4.0, uses=3)._replace(rates=(2.1, 0.1, 0.1))
    assert "2.1 > 2" in by_recipe([(expanding, 1)], 1e-5, CONVEX, "sum", REPLACE_ONE)["no proof"].detail


def test_certain_rounds_count_beside_those_that_are_drawn():
    noisy, quiet = release("full", 4.0), release("full", 9.0)

    def drawn(certain, *participations):
        total = sum(count for _, count in participations)
        conditions = Conditions(participation=accounting.binomial(total, 0.1, certain=certain))
        return table(list(participations), 1e-5, conditions, adjacency=REPLACE_ONE, views=("upload",))["upload"]

    one = accounting.gaussian_epsilon(1 / 4, 1e-5)
    assert drawn(1, (noisy, 1)).value == pytest.approx(one)
    assert drawn(0, (noisy, 1)).value < one
    assert one < drawn(1, (noisy, 6)).value < accounting.gaussian_epsilon(math.sqrt(6) / 4, 1e-5)
    assert drawn(1, (noisy, 1), (quiet, 5)).value > drawn(1, (quiet, 1), (noisy, 1), (quiet, 4)).value
    assert "5 rounds with probability 0.1 and in 1 with certainty" in drawn(1, (noisy, 6)).detail


# --- refusals ------------------------------------------------------------------------------------------


def test_unknown_combinations_fail_closed():
    for participations, adjacency, reason in (
        (cpfed(), ADD_REMOVE, "G3"),
        (concentrated(), ADD_REMOVE, "G3"),
        ([(release("full", 1.0), 3)], ADD_REMOVE, "G2"),
        ([(release("importance", 1.0, rate=0.1), 3)], REPLACE_ONE, "importance"),
        ([(release("fixed", 1.0, rate=0.1, adjacency="removal"), 3)], REPLACE_ONE, "removal"),
        ([(release("fixed", 1.0, rate=0.1, adjacency=ADD_REMOVE), 3)], ZERO_OUT, "G3"),
        ([(release("full", 1.0, adjacency=ZERO_OUT), 3)], ADD_REMOVE, "G2"),
        ([(release("full", 1.0)._replace(sensitivity=math.inf), 1)], REPLACE_ONE, "unbounded"),
        ([(release("full", math.nan), 1)], REPLACE_ONE, "nan"),
    ):
        for row in accounting.account(participations, 1e-5, adjacency=adjacency):
            assert row.value == math.inf
            assert row.recipe == "no proof"
            assert reason in row.detail


def test_no_noise_is_no_privacy_and_no_sensitivity_is_no_loss():
    assert table([(release("full", 0.0), 1)], 1e-5, adjacency=REPLACE_ONE)["upload"].value == math.inf
    silent = release("full", 1.0)._replace(sensitivity=0.0)
    assert table([(silent, 9)], 1e-5, adjacency=REPLACE_ONE)["upload"].value == 0.0
    assert table([], 1e-5)["upload"].value == 0.0


def test_neural_networks_get_no_credit_unless_asked_for_by_name():
    network = Conditions(cohort_size=10)
    rounds = [(release("full", 2.0, uses=5), 4)]
    plain = table(rounds, 1e-5, network, adjacency=REPLACE_ONE)
    assert plain["sum"].value == plain["upload"].value
    assert not plain["sum"].assumed
    assumed = table(rounds, 1e-5, network._replace(assume=True), adjacency=REPLACE_ONE)["sum"]
    assert assumed.assumed
    assert "assumed" in assumed.detail
    assert assumed.value < plain["sum"].value
    # an established bound is not an assumption, even when assuming is allowed
    established = network._replace(convex=True, smoothness=0.5, assume=True)
    assert not table(rounds, 1e-5, established, adjacency=REPLACE_ONE)["sum"].assumed
    smooth = by_recipe(rounds, 1e-5, network._replace(lipschitz=0.01), "sum", REPLACE_ONE)
    assert not smooth["R6 G7c"].assumed


def test_adaptive_selection_is_refused():
    pmf = accounting.binomial_pmf(20, 0.5)
    with pytest.raises(NoProof, match="maximum of 20 uses"):
        accounting.random_uses_epsilon(pmf, 0.3, 1e-5, adaptive_selection=True)
    rounds = [(release("full", 3.0), 20)]
    honest = Conditions(participation=accounting.binomial(20, 0.5))
    adaptive = Conditions(participation=accounting.binomial(20, 0.5, adaptive=True))
    every = table(rounds, 1e-5, adaptive, adjacency=REPLACE_ONE)["upload"]
    assert every.value == pytest.approx(accounting.gaussian_epsilon(math.sqrt(20) / 3, 1e-5))
    assert "adaptive" in every.detail
    assert table(rounds, 1e-5, honest, adjacency=REPLACE_ONE)["upload"].value < every.value


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="adjacency='removal'"):
        accounting.account([], 1e-5, adjacency="removal")
    with pytest.raises(ValueError, match="view='server'"):
        accounting.account([], 1e-5, views=("server",))
    with pytest.raises(ValueError, match="3 participations are listed for a binomial over num_rounds=20"):
        accounting.account(
            [(release("full", 1.0), 3)], 1e-5, Conditions(participation=accounting.binomial(20, 0.5))
        )
    with pytest.raises(ValueError, match="channel='sidelink'"):
        accounting.account([(release("full", 1.0, channel="sidelink"), 3)], 1e-5)


def test_exposed_uploads_of_sampled_releases_have_no_joint_bound():
    """What batches that are cut charge to δ is no part of it."""
    down = release("full", 5.0, adjacency=ZERO_OUT, channel="downlink")
    conditions = Conditions(cohort_size=10, exposures=1)
    for kind, joint in (("poisson", False), ("full", True)):
        up = release(kind, 5.0, rate=0.1 if kind == "poisson" else 1.0, adjacency=ZERO_OUT, truncation=0.0)
        rows = by_recipe([((up, down), 3)], 1e-5, conditions, "broadcast", ZERO_OUT)
        assert ("R1 joint" in rows) is joint
        assert joint or "unsampled Gaussian releases only" in rows["no proof"].detail


@pytest.mark.parametrize("distance", [1e-13, 1e-10, 5e-9, 3e-8])
def test_the_samplers_error_and_the_noise_share_delta(distance):
    drawn = release("full", 1.0)._replace(exact=ExactNoise(0.0, distance))
    row = table([(drawn, 1)], 1e-5, adjacency=REPLACE_ONE, views=("upload",))["upload"]
    assert row.sampler_delta >= distance * (1 + math.exp(row.value)) * (1 - 1e-9)
    assert accounting.gaussian_delta(row.value, 1.0) + row.sampler_delta <= 1e-5 * (1 + 1e-6)


# --- properties ----------------------------------------------------------------------------------------


kinds = st.sampled_from(["full", "fixed", "poisson", "disjoint", "shuffled", "fixed-round", "poisson-round"])


def any_release(kind, z, uses):
    adjacency = ADD_REMOVE if kind.startswith("poisson") else REPLACE_ONE
    uses = 1 if kind.endswith("-round") else uses
    return release(kind, z, uses=uses, rate=0.05, adjacency=adjacency, batch_size=5, population=100)


@settings(max_examples=25, deadline=None)
@given(kind=kinds, z=st.floats(0.7, 20.0), uses=st.integers(1, 6), count=st.integers(1, 40))
def test_views_are_ordered_and_monotone(kind, z, uses, count):
    adjacency = ADD_REMOVE if kind.startswith("poisson") else REPLACE_ONE
    conditions = CONVEX._replace(own_epochs=True)

    def values(z, count):
        return table([(any_release(kind, z, uses), count)], 1e-5, conditions, adjacency=adjacency)

    base, more, louder = values(z, count), values(z, count + 10), values(z * 1.3, count)
    assert base["final"].value <= base["broadcast"].value <= base["sum"].value <= base["upload"].value
    for view, row in base.items():
        assert math.isfinite(row.value)
        assert more[view].value >= row.value * (1 - 1e-4) - 1e-6
        assert louder[view].value <= row.value * (1 + 1e-4) + 1e-6
        assert row.value >= values(z, 1)[view].value * (1 - 1e-4) - 1e-6
    assert louder["upload"].value < base["upload"].value or base["upload"].value == 0


@settings(max_examples=15, deadline=None)
@given(kind=kinds, z=st.floats(0.8, 8.0), count=st.integers(2, 12))
def test_counting_equals_listing(kind, z, count):
    adjacency = ADD_REMOVE if kind.startswith("poisson") else REPLACE_ONE
    one = any_release(kind, z, 2)
    counted = accounting.account([(one, count)], 1e-5, CONVEX, adjacency=adjacency)
    listed = accounting.account([(one, 1)] * count, 1e-5, CONVEX, adjacency=adjacency)
    rounds = accounting.account(accounting.compress([(one,)] * count), 1e-5, CONVEX, adjacency=adjacency)
    assert [row.value for row in counted] == pytest.approx([row.value for row in listed], rel=1e-9)
    assert counted == rounds


def test_truncated_poisson_batches_are_charged():
    def rounds(truncation):
        return [(release("poisson", 1.0, uses=10, rate=0.02, adjacency=ADD_REMOVE, truncation=truncation), 100)]

    clean = table(rounds(0.0), 1e-5)["upload"]
    charged = table(rounds(1e-12), 1e-5)["upload"]
    assert clean.value < charged.value < clean.value * 1.01
    assert "truncated" in charged.detail
    assert table(rounds(1e-3), 1e-5)["upload"].value == math.inf
    in_round = [(release("poisson-round", 1.0, rate=1 - 0.98**7, adjacency=ADD_REMOVE, truncation=1e-12,
                         batch_size=2, population=100), 100)]  # fmt: skip
    assert math.isfinite(table(in_round, 1e-5)["upload"].value)


def test_mixed_releases_compose():
    """Different samplers in one run: more than each, less than the sum of squares allows."""
    plain, sampled = (release("full", 8.0), 5), (release("fixed", 1.5, rate=0.05, uses=4), 30)
    both = table([plain, sampled], 1e-5, adjacency=REPLACE_ONE)["upload"]
    alone = [table([one], 1e-5, adjacency=REPLACE_ONE)["upload"].value for one in (plain, sampled)]
    assert max(alone) < both.value < sum(alone)
    assert both.recipe == "R1+R2"


@pytest.mark.slow
def test_times_are_printed(capsys):
    """Accounting of long runs; numbers for people, no assertion on time."""
    cases = {
        "10,000 rounds, one noise level": [(release("fixed", 2.0, uses=10, rate=0.01), 10_000)],
        "10,000 rounds, all different": [
            (release("fixed", 4.0 * 0.9999**r, uses=10, rate=0.01), 1) for r in range(10_000)
        ],
        "10,000 Poisson rounds, all different": [
            (release("poisson", 4.0 * 0.9999**r, uses=10, rate=0.01, adjacency=ADD_REMOVE), 1)
            for r in range(10_000)
        ],
        "30,000 steps at z=707": [(release("fixed", 707.1, uses=50, rate=0.2), 600)],
    }
    with capsys.disabled():
        for name, participations in cases.items():
            start = time.perf_counter()
            adjacency = participations[0][0].sampling.adjacency
            rows = table(participations, 1e-5, CONVEX, adjacency=adjacency)
            print(f"\n  {name}: ε={rows['upload'].value:.4f} in {time.perf_counter() - start:.2f} s", end="")
    assert rows["upload"].value == pytest.approx(0.1566, rel=1e-3)


def test_discrete_noise_below_four_steps_of_the_grid_has_no_proof():
    """Rounds are ranked by strength as if their noise were Gaussian, which so little noise is not."""
    for std, proved in ((3.99, False), (4.01, True)):
        discrete = Conditions(cohort_size=10, lattice=Lattice(1.0, 4, 1.0))
        rows = table([(release("full", std), 1)], 1e-5, discrete, adjacency=REPLACE_ONE)
        assert math.isfinite(rows["upload"].value) is proved
        assert math.isfinite(rows["sum"].value) is proved
        assert proved or "too little" in rows["upload"].detail


def test_shuffled_epochs_of_two_kinds_are_refused():
    one = release("shuffled", 5.0, rate=0.1, batch_size=10, population=100)
    other = release("shuffled", 5.0, rate=0.2, batch_size=20, population=100)
    for rounds in ([((one,), 3), ((other,), 3)], [((one, one), 3)]):
        row = table(rounds, 1e-5, adjacency=REPLACE_ONE)["upload"]
        assert (row.value, row.recipe) == (math.inf, "no proof")
        assert "one kind of release a round" in row.detail
    assert views._shuffled_uses([], Conditions()) == (0, 0, 0, [])


@pytest.mark.parametrize(("rate", "shape"), [(0.5, (0, 0)), (0.5, (10, 10)), (1.0, (5, 10)), (0.0, (5, 10))])
def test_truncated_batches_whose_number_is_unknown_have_no_proof(rate, shape):
    size = {"batch_size": shape[0], "population": shape[1]}
    rounds = [(release("poisson-round", 2.0, rate=rate, adjacency=ADD_REMOVE, truncation=1e-13, **size), 1)]
    row = table(rounds, 1e-5, adjacency=ADD_REMOVE)["upload"]
    assert row.value == math.inf
    assert "their number is unknown" in row.detail


def test_sums_of_rounded_uploads_say_that_rounding_is_not_covered():
    rows = table([(release("full", 2.0), 1)], 1e-5, Conditions(cohort_size=10), adjacency=REPLACE_ONE)
    assert rows["sum"].recipe == "R1 sum"
    for view, rounded in (("sum", True), ("upload", False)):
        assert any("(G8)" in text for text in rows[view].not_covered) is rounded


@pytest.mark.parametrize("rate", [-0.1, 1.5, math.nan])
def test_a_sampling_rate_that_is_no_probability_has_no_proof(rate):
    for kind, adjacency in (("fixed", REPLACE_ONE), ("poisson", ADD_REMOVE)):
        rounds = [(release(kind, 2.0, rate=rate, adjacency=adjacency), 1)]
        row = table(rounds, 1e-5, adjacency=adjacency)["upload"]
        assert row.value == math.inf
        assert "is not in [0, 1]" in row.detail


@pytest.mark.parametrize("uses", [-1, 1.5])
def test_uses_that_are_no_count_have_no_proof(uses):
    sampled = release("fixed", 2.0, rate=0.1, adjacency=REPLACE_ONE)._replace(uses=uses)
    row = table([(sampled, 1)], 1e-5, adjacency=REPLACE_ONE)["upload"]
    assert row.value == math.inf
    assert f"uses={uses} is not a number of releases" in row.detail


def test_a_delta_that_is_no_probability_is_refused_whatever_is_accounted():
    for delta in (-1e-9, 1.5):
        with pytest.raises(ValueError, match="is not a probability"):
            views.account([], delta, adjacency=ZERO_OUT)


@pytest.mark.parametrize(("rate", "uses"), [(0.5, 2), (1.0, 4)])
def test_a_whole_round_of_shuffled_batches_counts_once_for_each_epoch_it_meets(rate, uses):
    """Four rounds: two epochs of two rounds each, or a whole epoch in every round."""
    sampling = Sampling("shuffled-round", rate, ZERO_OUT, 0.0, 4, 16)
    groups = [((Release("uplink", 1.0, 1.0, 1, sampling, "test"),), 4, 1.0)]
    assert views._shuffled_uses(groups, Conditions(own_epochs=True))[:2] == (uses, 1)


def detail(participations, view, conditions=None, adjacency=REPLACE_ONE):
    row = by_recipe(participations, 1e-5, conditions, view, adjacency)["no proof"]
    assert row.value == math.inf
    return row.detail


def test_participations_that_are_no_counts_or_probabilities_are_refused():
    with pytest.raises(ValueError, match="count=-1"):
        accounting.account([(release("full", 1.0), -1)], 1e-5)
    for rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"rate={rate}"):
            accounting.binomial(5, rate)
    with pytest.raises(ValueError, match="participation kind='often'"):
        accounting.account([], 1e-5, Conditions(participation=Participation("often")))


def test_what_may_happen_at_most_counts_as_if_it_had_happened():
    rounds = [(release("full", 3.0), 5)]
    worst = table(rounds, 1e-5, Conditions(participation=Participation("worst")), adjacency=REPLACE_ONE)["upload"]
    assert worst.value == accounting.gaussian_epsilon(math.sqrt(5) / 3, 1e-5)
    assert worst.detail == "at most 5 participations"


LATTICE = Lattice(step=0.01, dimension=9)


def test_discrete_noise_counts_what_rounding_moves():
    """One client's: R1 at (Δ/step + √d) of the grid over σ² - 4; of the cohort: zCDP (KLS)."""
    rounds = [(release("full", 2.0), 3), ((), 4), (release("full", 2.0), 0)]
    rows = table(rounds, 1e-5, Conditions(cohort_size=5, colluders=1, lattice=LATTICE), adjacency=REPLACE_ONE)
    mu = math.sqrt(3) * (100 + 3) / math.sqrt(200**2 - 4)
    assert rows["upload"].recipe == "R1 discrete"
    assert rows["upload"].value == pytest.approx(accounting.gaussian_epsilon(mu, 1e-5), rel=1e-12)
    each = rho(103.0, variance=200.0**2, clients=4, dimension=9)
    assert rows["sum"].recipe == "R6 discrete"
    assert rows["sum"].value == pytest.approx(accounting.zcdp_epsilon_tight(3 * each, 1e-5), rel=1e-12)
    # a client whose noise is half of the target's decides how much each counts for
    quiet = Conditions(cohort_size=5, colluders=1, lattice=LATTICE._replace(least=0.5))
    each = rho(103.0, variance=100.0**2, clients=4, dimension=9)
    quiet_row = table(rounds, 1e-5, quiet, adjacency=REPLACE_ONE)["sum"]
    assert quiet_row.value == pytest.approx(accounting.zcdp_epsilon_tight(3 * each, 1e-5), rel=1e-12)


def test_discrete_noise_proves_nothing_of_what_is_not_its_own():
    discrete = Conditions(cohort_size=5, lattice=LATTICE)
    up, down = release("full", 2.0), release("full", 2.0, channel="downlink")
    for several in ((up, up), (up._replace(uses=2),)):
        assert "one release a round" in detail([(several, 1)], "upload", discrete)
    assert "too little to rank rounds" in detail([(up._replace(noise_std=0.03), 1)], "upload", discrete)
    silent = table([(up._replace(noise_std=0.0), 1)], 1e-5, discrete, adjacency=REPLACE_ONE)
    assert [silent[view].value for view in ("upload", "sum")] == [math.inf] * 2
    assert silent["upload"].detail == "no noise"
    assert "which is discrete here" in detail([((up, down), 1)], "final", discrete)
    joint = by_recipe([((up, down), 1)], 1e-5, discrete._replace(exposures=1), "broadcast", REPLACE_ONE)
    assert "continuous noise only" in joint["no proof"].detail


def test_a_round_that_is_not_covered_by_its_broadcast_leaves_no_bound_for_it():
    up, down = release("full", 2.0), release("full", 2.0, channel="downlink")
    assert "no noise is added to the broadcast" in detail([(up, 2)], "final")
    assert "without a noisy broadcast" in detail([((up, down), 2), (up, 1)], "final")
    only_down = by_recipe([((up, down), 2), (down, 1)], 1e-5, None, "final", REPLACE_ONE)
    assert only_down["R1 downlink"].value == pytest.approx(accounting.gaussian_epsilon(math.sqrt(3) / 2, 1e-5))
    exposed = by_recipe([((up, down), 2), (up, 1)], 1e-5, Conditions(exposures=1), "broadcast", REPLACE_ONE)
    assert "no noisy broadcast" in exposed["no proof"].detail


def test_an_exposed_upload_after_batches_has_the_distance_of_any_two_worlds():
    """N1 gives no credit for batches that may not hold the record, and exposes the worst rounds."""

    def rounds(kind, rate):
        down = release("full", 3.0, channel="downlink")
        return [((release(kind, z, rate=rate), down), 2) for z in (2.0, 1.0)]

    values = [
        by_recipe(rounds(kind, rate), 1e-5, Conditions(exposures=3), "broadcast", REPLACE_ONE)["R1 joint"].value
        for kind, rate in (("fixed-round", 0.1), ("full", 1.0))
    ]
    mu = math.sqrt(2 / 1 + 1 / 4 + 1 / 9)  # both loud rounds, one of the others, and one broadcast
    assert values == pytest.approx([accounting.gaussian_epsilon(mu, 1e-5)] * 2, rel=1e-9)


def test_sums_without_a_number_of_honest_others_have_no_credit():
    rounds = [(release("full", 2.0, uses=2), 1)]
    assert "no other client's noise" in detail(
        rounds, "sum", Conditions(cohort_size=1, convex=True, smoothness=1.0)
    )
    with pytest.raises(ValueError, match="others_noise=-1"):
        table(rounds, 1e-5, CONVEX._replace(others_noise=-1.0), adjacency=REPLACE_ONE)
    alone = CONVEX._replace(cohort_size=1, others_noise=9.0)  # stated: whatever the cohort
    assert by_recipe(rounds, 1e-5, alone, "sum", REPLACE_ONE)["R6 G7b"].value == pytest.approx(
        by_recipe(rounds, 1e-5, CONVEX, "sum", REPLACE_ONE)["R6 G7b"].value
    )


def test_noise_inside_and_at_the_end_of_a_round_has_no_credit_together():
    inside, end = release("full", 2.0, uses=2), release("full-round", 2.0)
    assert "inside and at the end of a round" in detail([((inside, end), 1)], "sum", CONVEX)


def test_a_round_of_one_step_counts_beside_rounds_of_several():
    """Its own noise is added once: the whole credit, whatever its rate."""
    several = release("full", 4.0, uses=2)
    for rates in ((), (0.3,)):
        one = release("full", 2.0)._replace(rates=rates)
        alone = accounting.aggregated_round_mu(4.0, 2, rates=[1.0] * 2, others=9, smoothness=1.0, convex=True)
        assert summed_mu([(several, 1), (one, 1)]) == pytest.approx(
            math.hypot(alone, 0.5 / math.sqrt(10)), rel=1e-6
        )


def test_a_round_of_shuffled_batches_without_steps_uses_nothing():
    none = release("shuffled", 2.0, uses=0, rate=0.1, batch_size=10, population=100)
    assert table([(none, 3)], 1e-5, adjacency=REPLACE_ONE)["upload"].value == 0.0


INTEGERS = ExactNoise(1e-6, 1e-12, 1e-12)
SUMMED = INTEGERS._replace(sums=True)
PLAIN_GAPS = (views.FLOAT_NOISE,)


@pytest.mark.parametrize(
    ("recipe", "exact", "changes", "expected"),
    [
        ("R1", None, {}, PLAIN_GAPS),
        ("R1", INTEGERS, {}, ()),
        ("R1", INTEGERS, {"sampler_delta": None}, (views.SAMPLER_ERROR,)),
        ("R1", INTEGERS._replace(distance=0.0), {"sampler_delta": None}, (views.SAMPLER_ERROR,)),
        ("R1", INTEGERS._replace(failure=0.0), {"sampler_delta": None}, (views.SAMPLER_ERROR,)),
        ("R1", ExactNoise(1e-6, 0.0), {"sampler_delta": None}, ()),
        ("R1", None, {"sampler_delta": None}, PLAIN_GAPS),
        ("no proof", INTEGERS, {"sampler_delta": None}, ()),
        ("R1", INTEGERS, {"adjacency": ADD_REMOVE}, (views._FLOAT_PLACES,)),
        ("R1", None, {"adjacency": ADD_REMOVE}, PLAIN_GAPS),
        ("no proof", INTEGERS, {"adjacency": ADD_REMOVE}, ()),
        ("E3", INTEGERS, {}, (views.FLOAT_SUMS,)),
        ("E3", None, {}, PLAIN_GAPS),
        ("R1 sum", None, {}, (views.FLOAT_NOISE, views._ROUNDING)),
        ("R6 G7b", None, {}, (views.FLOAT_NOISE, views._ROUNDING)),
        ("R1 sum", INTEGERS, {}, (views._FLOAT_CREDIT, views._ROUNDING)),
        ("R6 G7b", INTEGERS, {}, (views._FLOAT_CREDIT, views._ROUNDING)),
        ("R1 sum", SUMMED, {}, ()),
        ("R1 joint", INTEGERS, {}, (views._FLOAT_CREDIT, views.OVERHEARD)),
        ("R1 joint", INTEGERS, {"encoded": True}, (views._FLOAT_CREDIT, views._ROUNDING, views.OVERHEARD)),
        ("R1 joint", SUMMED, {"encoded": True}, (views.OVERHEARD,)),
        ("R1 downlink", INTEGERS, {}, PLAIN_GAPS),  # the broadcast's own noise is not exact
        ("R1 downlink", INTEGERS, {"encoded": True}, (views.FLOAT_NOISE, views._ROUNDING)),
        ("R1 discrete", INTEGERS, {"lattice": LATTICE}, ()),
        ("R6 discrete", None, {"lattice": LATTICE}, (views.FLOAT_SUMS,)),
    ],
)
def test_a_row_says_what_its_bound_leaves_uncovered(recipe, exact, changes, expected):
    """One upload a round, with exact noise or not, a broadcast without, and a release that is never made."""
    values = {"sampler_delta": 1e-9, "adjacency": REPLACE_ONE, "encoded": False, "lattice": None, **changes}
    up, down = release("full", 2.0)._replace(exact=exact), release("full", 2.0, channel="downlink")
    never = release("full", 2.0, uses=0)
    conditions = Conditions(encoded=values["encoded"], lattice=values["lattice"])
    premises = views.Premises(
        [((up, down, never), 3, 1.0)], "", conditions, values["adjacency"], 1e-5, resolution=views.FINE
    )
    row = views.Bound(1.0, recipe, "", sampler_delta=values["sampler_delta"])
    assert views._gaps(row, premises) == expected
