"""Across runs the ledger is a privacy filter: later runs may be chosen by the results of earlier ones."""

import math

import numpy as np
import pytest

from dither.accounting import (
    Conditions,
    Lattice,
    exact,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    proven,
    views,
)
from dither.accounting.ledger import Budget, Charge, Ledger, filter
from dither.accounting.pld import FINE
from dither.errors import BudgetExhausted
from dither.types import Release, Sampling

from .conftest import all_of, gaussian, poisson

DELTA = 1e-5


def value(*participations, delta=DELTA):
    return proven(list(participations), delta, view="upload").value


def spent(ledger, client="ann", **options):
    (row,) = ledger.spent("data", client, **options)
    return row


def poisson_delta(epsilon, rate, mu):
    """The profile of one Poisson batch, for the world that has the record (R3)."""
    if math.exp(epsilon) <= 1 - rate:
        return -math.expm1(epsilon)
    return rate * gaussian_delta(math.log1p(math.expm1(epsilon) / rate), mu)


# What was wrong


def test_a_choice_after_looking_beats_the_merged_list_and_not_the_filter(ledger):
    """Both lists that an adversary may end with compose to (1, 1e-3). One that looks at the first output and then
    picks the worse list reaches more: so the merged list is no filter."""
    epsilon, delta = 1.0, 1e-3
    first = gaussian(4.0)
    mu, left = 1 / 4.0, math.sqrt(gaussian_mu(epsilon, delta) ** 2 - 1 / 16)
    plain = gaussian(1 / (left * (1 - 1e-6)))

    rate = 0.00122
    sampled = (Release("uplink", 0.2, 1.0, 1, Sampling("poisson", rate, "add/remove"), "test"),)
    for second in (plain, sampled):
        assert value((first, 1), (second, 1), delta=delta) <= epsilon, "the merged list admits either"
    x = np.linspace(-10, 10, 1001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    losses = mu**2 / 2 + mu * x
    ends = [
        np.array([gaussian_delta(epsilon - loss, left * (1 - 1e-6)) for loss in losses]),
        np.array([poisson_delta(epsilon - loss, rate, 5.0) for loss in losses]),
    ]
    fixed = [float(density @ end) for end in ends]
    assert max(fixed) <= delta * (1 + 1e-6)
    assert float(density @ np.maximum(*ends)) > 1.3 * delta, "δ of the adversary that chooses"

    ledger.set_budget("data", Budget(epsilon, delta))
    ledger.charge("one", "data", all_of(["ann"], first), rounds=(0, 1))
    assert ledger.affordable("two", "data", lambda n: all_of(["ann"], sampled), 1) == 0
    assert ledger.affordable("two", "data", lambda n: all_of(["ann"], plain), 1) == 1


# The cover of one run


@pytest.mark.parametrize("releases", [(poisson(1.0), 40), (poisson(3.0, rate=0.2), 30), (poisson(0.7, 0.01), 1)])
def test_a_cover_is_above_the_whole_profile(releases):
    tail = 1e-6
    mu = filter.cover([releases], Conditions(), tail, "upload", "zero-out")
    one_grid = FINE._replace(grid_delta=tail)
    for delta in np.geomspace(tail * 1.001, 0.5, 40):
        epsilon = proven([releases], float(delta), view="upload", resolution=one_grid).value
        if epsilon > 0:  # the profile is delta there, up to the grid
            assert tail + (1 - tail) * gaussian_delta(epsilon, mu) >= delta * (1 - 1e-3)
    assert gaussian_epsilon(mu, DELTA - tail) >= value(releases)
    assert mu < math.sqrt(3 * releases[1]) / releases[0][0].noise_std, "sampling is credited"


def test_the_cover_of_a_gaussian_is_itself_and_of_nothing_nothing():
    mu = filter.cover([(gaussian(4.0), 4)], Conditions(), 1e-6, "upload", "zero-out")
    assert 0.5 <= mu <= 0.5 * 1.01
    assert filter.cover([(gaussian(math.inf), 4)], Conditions(), 1e-6, "upload", "zero-out") == 0.0
    assert filter.cover([(poisson(0.0), 1)], Conditions(), 1e-6, "upload", "zero-out") == math.inf


def test_capped_batches_are_covered_too():
    """Their ε is never quite 0, as a failure is charged to δ."""
    ((release,), count) = poisson(1.0), 10
    capped = release._replace(sampling=release.sampling._replace(truncation=1e-12))
    whole, cut = (
        filter.cover([((each,), count)], Conditions(), 1e-6, "upload", "zero-out") for each in (release, capped)
    )
    assert whole <= cut < whole * 1.01


@pytest.mark.parametrize("sampled_first", [True, False])
def test_tails_never_exceed_their_share(sampled_first):
    share = filter.RESERVE if sampled_first else filter.TRACE
    total = sum(filter.tail(DELTA, number, sampled_first=sampled_first) for number in range(1, 10_000))
    assert 0.99 * share * DELTA < total < share * DELTA


# Runs


def planned(ledger, run, releases, made, total, clients=("ann",)):
    ledger.charge(
        run,
        "data",
        all_of(clients, releases, made),
        rounds=(0, made),
        plan=lambda: all_of(clients, releases, total),
    )


def test_one_run_counts_what_it_made_and_several_what_they_registered(ledger, path):
    ledger.set_budget("data", Budget(50.0, DELTA))
    planned(ledger, "one", poisson(2.0), 5, 60)
    assert spent(ledger).epsilon == pytest.approx(value((poisson(2.0), 5)), rel=1e-12), "one run: as ever"
    planned(ledger, "two", poisson(3.0), 5, 5)
    both = spent(ledger).epsilon
    assert both > value((poisson(2.0), 60), (poisson(3.0), 5))
    assert both < 1.25 * value((poisson(2.0), 60), (poisson(3.0), 5))
    ledger.charge("one", "data", all_of(["ann"], poisson(2.0), 55), rounds=(5, 60))
    assert spent(ledger).epsilon == both, "it was counted from the beginning"
    ledger.charge("one", "data", all_of(["ann"], poisson(2.0), 5), rounds=(60, 65))
    assert spent(ledger).epsilon > both, "more than it registered"
    assert spent(Ledger(path)) == spent(ledger)
    assert spent(ledger).not_covered == ""


@pytest.mark.parametrize(
    ("names", "labelled"),
    [
        (("a-x-seed:1", "b-y-seed:1"), True),
        (("a-x-seed:1", "b-x-seed:1", "c-y-seed:2"), False),  # the same bits; another seed
        (("a-x-north", "b-y-north", "schema-c"), False),  # a party's runs, and counts
    ],
)
def test_runs_that_share_their_noise_are_labelled(ledger, names, labelled):
    for run in names:
        planned(ledger, run, poisson(8.0), 1, 1)
    assert ("one seed" in spent(ledger).not_covered) is labelled
    planned(ledger, names[0], poisson(8.0), 1, 1)  # again: what else is to be said does not hide it
    assert ("one seed" in spent(ledger).not_covered) is labelled


def test_a_sampled_run_in_sums_counts_all_that_it_registered(ledger):
    """Steps in sums have a Gaussian bound, too (R6'). It is not the better one, and must not make Gaussian runs of
    sampled ones, which may then be stopped because of what they showed."""
    sums = Conditions(cohort_size=9, others_noise=8.0, convex=True, smoothness=0.1, encoded=True)
    (release,) = poisson(4.0, rate=0.05, uses=4)
    steps, rounds = (release._replace(rates=(1.0,)),), 50
    plan = all_of(["ann"], steps, rounds)
    seen = []
    for start, stop in ((0, 1), (1, rounds)):
        for run in ("one", "two"):
            made = all_of(["ann"], steps, stop - start)
            ledger.charge(run, "data", made, rounds=(start, stop), conditions=sums, plan=lambda: plan)
        seen.append(spent(ledger, view="sum").epsilon)
    assert seen[0] == seen[1]
    assert seen[1] < 1.25 * proven([(steps, 2 * rounds)], DELTA, sums, view="sum").value


def test_runs_that_nothing_bounds_cost_infinity_among_others(ledger):
    open_uploads = (gaussian(0.0)[0]._replace(sensitivity=math.inf),)
    for run, releases in (("one", open_uploads), ("two", poisson(2.0)), ("three", open_uploads)):
        planned(ledger, run, releases, 2, 2)
        assert spent(ledger).epsilon == spent(ledger, view="sum").epsilon == math.inf


def test_each_sampled_run_has_a_tail_of_its_own(ledger):
    for run in ("one", "two"):
        planned(ledger, run, poisson(2.0), 5, 5)
    squares = sum(
        filter.cover([(poisson(2.0), 5)], Conditions(), tail, "upload", "zero-out") ** 2
        for tail in (filter.tail(DELTA, number, sampled_first=True) for number in (1, 2))
    )
    expected = gaussian_epsilon(math.sqrt(squares), (1 - filter.RESERVE) * DELTA)
    assert spent(ledger).epsilon == pytest.approx(expected, rel=1e-9)


def test_joined_data_sets_keep_what_each_run_registered(ledger):
    for run, dataset in (("one", "d" * 16), ("two", "e" * 16)):
        charges, plan = all_of(["ann"], poisson(2.0), 5), all_of(["ann"], poisson(2.0), 60)
        ledger.charge(run, dataset, charges, rounds=(0, 5), plan=lambda plan=plan: plan)
    ledger.identify("e" * 16, name="d" * 16)
    (row,) = ledger.spent("d" * 16, "ann")
    assert row.epsilon > value((poisson(2.0), 120))
    assert "joined" in row.not_covered


def test_a_run_that_takes_all_of_a_budget_leaves_nothing_for_another(ledger):
    """It was admitted by the composition of one run. What the filter says of it is more: no other run begins."""
    ledger.set_budget("data", Budget(value((poisson(1.0), 60)) * (1 + 1e-9), DELTA))
    planned(ledger, "one", poisson(1.0), 1, 60)
    with pytest.raises(BudgetExhausted):
        planned(ledger, "two", poisson(50.0), 1, 1)
    ledger.charge("one", "data", all_of(["ann"], poisson(1.0), 59), rounds=(1, 60))
    assert spent(ledger).epsilon <= ledger.budget("data").epsilon


def test_a_plan_binds_every_client_that_it_names(ledger):
    ledger.set_budget("data", Budget(1.0, DELTA))
    planned(ledger, "one", poisson(2.0), 5, 20, clients=("ann", "bob"))
    charge = all_of(["ann"], poisson(3.0), 1)
    huge = [Charge("ann", [(poisson(3.0), 1)]), Charge("bob", [(poisson(0.5), 500)])]
    with pytest.raises(BudgetExhausted, match="'bob'"):
        ledger.charge("two", "data", charge, rounds=(0, 1), plan=lambda: huge)
    ledger.charge("two", "data", charge, rounds=(0, 1), plan=lambda: charge)


def test_gaussian_runs_count_as_they_are_made_whatever_they_registered(ledger):
    planned(ledger, "one", gaussian(8.0), 3, 50)
    planned(ledger, "two", gaussian(9.0), 2, 2)
    expected = value((gaussian(8.0), 3), (gaussian(9.0), 2))
    assert spent(ledger).epsilon == pytest.approx(expected, rel=1e-12)
    planned(ledger, "three", poisson(3.0), 4, 4)
    mixed = spent(ledger).epsilon
    assert expected < mixed < value((gaussian(8.0), 3), (gaussian(9.0), 2)) + value((poisson(3.0), 4))


def test_a_plan_is_recorded_once_and_a_replay_needs_none(ledger, path):
    def charge(**options):
        return Ledger(path).charge("run", "data", all_of(["ann"], poisson(), 2), rounds=(0, 2), **options)

    first = charge(plan=lambda: all_of(["ann"], poisson(), 9), replay=True)
    assert charge(replay=True) == first
    assert charge(plan=lambda: pytest.fail("asked again"), replay=True) == first
    assert ledger.is_registered("data", "run")
    assert not ledger.is_registered("data", "other")


# What is labelled


def test_several_runs_without_a_budget_are_labelled(ledger):
    """Nothing limited what is spent. A budget that was set later was labelled; none at all was not."""
    planned(ledger, "one", gaussian(), 5, 5)
    assert spent(ledger).not_covered == "", "one run needs no filter"
    planned(ledger, "two", gaussian(), 5, 5)
    assert "no budget was set before the first run (R10)" in spent(ledger).not_covered
    ledger.set_budget("data", Budget(5.0, DELTA))
    assert "set or raised" in spent(ledger).not_covered


def test_runs_that_did_not_register_are_labelled(ledger):
    ledger.set_budget("data", Budget(50.0, DELTA))
    ledger.charge("one", "data", all_of(["ann"], poisson(2.0), 5), rounds=(0, 5))
    assert spent(ledger).not_covered == "", "one run needs no filter"
    planned(ledger, "two", poisson(2.0), 5, 5)
    assert "did not register their length before the first charge (R10)" in spent(ledger).not_covered
    for run in ("one", "two"):
        ledger.charge(run, "data", all_of(["bob"], gaussian(), 5), rounds=(5, 10))
    assert spent(ledger, "bob").not_covered == "", "Gaussian releases need no plan"


def test_a_budget_of_after_the_first_run_is_labelled_and_a_lower_one_is_not(ledger):
    ledger.set_budget("data", Budget(5.0, DELTA))
    planned(ledger, "one", poisson(2.0), 5, 5)
    planned(ledger, "two", poisson(2.0), 5, 5)
    ledger.set_budget("data", Budget(4.0, DELTA))
    assert spent(ledger).not_covered == ""
    ledger.set_budget("data", Budget(6.0, DELTA), raising=True)
    assert "set or raised" in spent(ledger).not_covered


def test_a_clients_budget_that_falls_back_to_a_larger_one_is_labelled(ledger):
    ledger.set_budget("data", Budget(5.0, DELTA))
    ledger.set_budget("data", Budget(4.0, DELTA), "ann")
    for run in ("one", "two"):
        planned(ledger, run, poisson(2.0), 5, 5)
    assert spent(ledger).not_covered == ""
    ledger.set_budget("data", None, "ann", raising=True)
    assert "set or raised" in spent(ledger).not_covered


@pytest.mark.parametrize("stays", ["charged", "other"])
@pytest.mark.parametrize("raised", [False, True])
def test_a_budget_that_comes_with_a_join_after_the_first_run_is_labelled(ledger, path, stays, raised):
    """Of several data sets with nothing but a budget, the owner could join one by the results; and a raised budget
    was no longer labelled where the charged data set took the other one's account."""
    other = "e" * 16
    ledger.identify("data", name="charged")
    ledger.set_budget("data" if raised else other, Budget(5.0, DELTA))
    for run in ("one", "two"):
        planned(ledger, run, poisson(2.0), 5, 5)
    assert "joined" not in spent(ledger).not_covered
    if raised:
        ledger.set_budget("data", Budget(6.0, DELTA), raising=True)
        ledger.set_budget(other, Budget(6.0, DELTA))
    gone, kept = (other, "charged") if stays == "charged" else ("data", other)
    ledger.identify(gone, name=kept)
    for each in (ledger, Ledger(path)):
        assert each.budget("data") is not None
        assert "joined" in spent(each).not_covered


def test_a_join_with_a_data_set_without_charges_is_not_labelled(ledger):
    ledger.identify("data", name="charged")
    ledger.set_budget("data", Budget(5.0, DELTA))
    for run in ("one", "two"):
        planned(ledger, run, poisson(2.0), 5, 5)
    ledger.set_budget("e" * 16, Budget(4.0, DELTA))
    ledger.identify("e" * 16, name="charged")
    assert ledger.budget("data") == Budget(4.0, DELTA)
    assert spent(ledger).not_covered == ""


def test_the_delta_of_tails_is_shown(ledger):
    """After a Gaussian run the tails of sampled ones come on top of δ: what is reported says so."""
    ledger.charge("one", "data", all_of(["ann"], gaussian(4.0)), rounds=(0, 1))
    assert spent(ledger, delta=DELTA).delta == DELTA
    ledger.charge("two", "data", all_of(["ann"], poisson(3.0), 2), rounds=(0, 2))
    assert spent(ledger, delta=DELTA).delta == pytest.approx(DELTA * (1 + filter.TRACE))


@pytest.mark.parametrize(("releases", "labelled"), [(poisson(3.0), True), (gaussian(4.0), False)])
def test_rounds_made_again_are_labelled(ledger, releases, labelled):
    """Where a kill followed from a result, repeating a sampled round is a choice that no registration covers."""
    ledger.charge("one", "data", all_of(["ann"], releases, 4), rounds=(0, 4))
    assert not spent(ledger).not_covered
    ledger.charge("one", "data", all_of(["ann"], releases, 2), rounds=(2, 4))
    assert ("R10" in spent(ledger).not_covered) == labelled


# Noise as it is drawn (R7)


def exactly(releases, dimension=50):
    return tuple(release._replace(exact=exact.noise(dimension)) for release in releases)


def test_exact_releases_come_back_from_the_file(path):
    one = (*exactly(gaussian()), *exactly(poisson()))
    Ledger(path).charge("run", "data", [Charge("ann", [(one, 2), (gaussian(), 1)])], rounds=(0, 3))
    (entry,) = [entry for entry in Ledger(path).history() if entry.charges]
    assert {releases for releases, _ in entry.charges[0].participations} == {one, gaussian()}


def test_the_samplers_error_is_part_of_delta(ledger):
    """One run pays for it within its δ; of several runs the errors are added, and `spent` says to what."""
    one = exactly(gaussian(4.0))
    ledger.charge("one", "data", all_of(["ann"], one, 3), rounds=(0, 3))
    alone = spent(ledger)
    assert alone.delta == DELTA
    assert alone.epsilon == pytest.approx(value((one, 3)), rel=1e-12)
    assert alone.numbers == ()
    ledger.charge("two", "data", all_of(["ann"], one, 2), rounds=(0, 2))
    both = spent(ledger)
    ideal = value((tuple(r._replace(exact=r.exact._replace(distance=0.0, failure=0.0)) for r in one), 5))
    assert both.epsilon == pytest.approx(ideal, rel=1e-9)
    error = one[0].exact
    added = 5 * error.failure + 5 * error.distance * (1 + math.exp(both.epsilon))
    assert both.delta - DELTA == pytest.approx(added, rel=1e-4)
    assert both.numbers == ()


def test_a_samplers_error_that_is_not_small_is_said(ledger):
    loud = exactly(gaussian(0.25), dimension=100_000)
    for run in ("one", "two"):
        ledger.charge(run, "data", all_of(["ann"], loud), rounds=(0, 1))
    assert spent(ledger).numbers == (views.SAMPLER_ERROR,)
    ledger.charge("three", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    assert spent(ledger).numbers == (views.FLOAT_NOISE, views.SAMPLER_ERROR)


def test_discrete_noise_passes_the_filter_like_any_other(ledger):
    """Runs with noise on integers beside others. Against uploads all are Gaussian; a sum's zCDP gets a cover."""
    grid = Conditions(encoded=True, cohort_size=4, lattice=Lattice(0.01, 100))
    budget = Budget(2.0, DELTA)
    ledger.set_budget("data", budget)
    plan = all_of(["ann"], gaussian(9.0), 3)
    ledger.charge("one", "data", plan, rounds=(0, 3), conditions=grid, plan=lambda: plan)
    alone = spent(ledger).epsilon
    assert alone == pytest.approx(proven([(gaussian(9.0), 3)], DELTA, grid, view="upload").value)
    steps = all_of(["ann"], gaussian(30.0, uses=3), 2)  # no recipe takes both in one list
    ledger.charge("two", "data", steps, rounds=(0, 2), plan=lambda: steps)
    ledger.charge("three", "data", plan, rounds=(0, 3), conditions=grid, plan=lambda: plan)
    together = spent(ledger)
    assert together.not_covered == ""
    squares = 6 * (1.1 / 9.0) ** 2 + 6 * (1 / 30.0) ** 2  # rounding adds √100 steps of 0.01
    assert together.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(squares), DELTA), rel=1e-4)
    assert alone < spent(ledger, view="sum").epsilon < math.inf
    many = all_of(["ann"], gaussian(9.0), 40)
    with pytest.raises(BudgetExhausted):
        ledger.charge("four", "data", many, rounds=(0, 40), conditions=grid, plan=lambda: many)
