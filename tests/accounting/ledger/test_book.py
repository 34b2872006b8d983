"""Conditions that several segments or runs share, data sets that share rows, and epochs that end with a run."""

import math

import numpy as np
import pytest

from dither.accounting import gaussian_epsilon
from dither.accounting.ledger import book
from dither.data.hashing import RecordHashes
from dither.types import Conditions, Lattice, Release, Sampling, Uses

from .conftest import all_of, shuffled

STRONG = Conditions(
    cohort_size=10,
    colluders=1,
    convex=True,
    smoothness=0.5,
    lipschitz=0.1,
    own_epochs=True,
    num_rounds=20,
    exposures=1,
    lattice=Lattice(0.5, 7, 0.9),
    encoded=True,
)
WEAK = STRONG._replace(
    cohort_size=6,
    colluders=3,
    others_noise=1.5,
    convex=False,
    smoothness=2.0,
    lipschitz=0.7,
    own_epochs=False,
    num_rounds=50,
    exposures=2,
    lattice=Lattice(0.25, 9, 0.8),
    encoded=False,
    counts_shown="weights",
)


@pytest.mark.parametrize("one_run", [True, False])
@pytest.mark.parametrize("pair", [(STRONG, WEAK), (WEAK, STRONG)])
def test_several_segments_share_the_weakest_of_their_conditions(pair, one_run):
    shared = book.weakest(pair, one_run=one_run)
    assert shared == Conditions(
        cohort_size=6,
        colluders=3,
        others_noise=1.5,
        convex=False,
        smoothness=2.0,
        lipschitz=0.7,
        own_epochs=False,
        num_rounds=50 if one_run else None,  # epochs of another run are shuffled anew
        exposures=2 if one_run else 3,  # each run has exposed its own
        lattice=Lattice(0.5, 9, 0.8),
        encoded=False,
        counts_shown="weights",
    )


def test_one_run_keeps_the_conditions_that_never_change():
    assert book.weakest([STRONG, STRONG], one_run=True) == STRONG
    twice = book.weakest([STRONG, STRONG], one_run=False)
    assert twice == STRONG._replace(others_noise=8.0, own_epochs=False, num_rounds=None, exposures=2)


@pytest.mark.parametrize("name", ["smoothness", "lipschitz", "num_rounds", "lattice"])
def test_what_one_segment_does_not_know_none_has_but_a_grid(name):
    pair = [STRONG, STRONG._replace(**{name: None})]
    shared = getattr(book.weakest(pair, one_run=True), name)
    assert shared == (STRONG.lattice if name == "lattice" else None)


@pytest.mark.parametrize("alone", [{"client_state": True}, {"cohort_size": 1}])
def test_a_segment_without_credit_leaves_none(alone):
    shared = book.weakest([STRONG, STRONG._replace(**alone)], one_run=False)
    assert shared == Conditions(
        client_state=True, exposures=2, encoded=True, lattice=STRONG.lattice, own_epochs=False
    )
    # noise of others that is stated counts whatever the cohort
    stated = STRONG._replace(cohort_size=1, others_noise=4.0)
    assert book.weakest([STRONG, stated], one_run=False).others_noise == 4.0


def records(start, stop):
    numbers = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return RecordHashes(np.stack([numbers, numbers ^ np.uint64(1)]), numbers[:0])


@pytest.mark.parametrize("turned", [False, True])
def test_data_sets_that_are_declared_others_may_share_rows(ledger, turned):
    old, new, third = "a" * 16, "b" * 16, "c" * 16
    ledger.identify(old, lambda: records(0, 900), file="old.csv")
    assert "old.csv" in ledger.known_as(new, records(300, 1200), file="new.csv")
    ledger.declare_other(*((old, new) if turned else (new, old)))
    assert ledger.known_as(new, records(300, 1200), file="new.csv") == ""
    ledger.identify(new, lambda: records(300, 1200), file="new.csv")
    # of a third one nothing was declared: it is compared with both, and the one that it shares most with is named
    said = ledger.known_as(third, records(500, 1400), file="third.csv")
    assert "new.csv" in said
    assert "so do 1 others" in said
    assert ledger.known_as(old, records(0, 900), file="old.csv") == ""


def test_epochs_end_with_a_run_also_where_a_round_releases_more_than_batches(ledger):
    """Five of ten batches in each of two runs, and broadcasts: two uses, not ten batches of one epoch."""
    down = Release("downlink", 9.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), "test")
    for run in ("one", "two"):
        charges = all_of(["ann"], (*shuffled(20.0, 10, 100), down), 5)
        ledger.charge(run, "data", charges, rounds=(0, 5), conditions=Conditions(own_epochs=True))
    (spent,) = ledger.spent("data", "ann", adjacency="replace-one")
    assert spent.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2) / 20, spent.delta), rel=1e-6)


@pytest.mark.parametrize("weaker", [{"convex": False}, {"smoothness": None}, {"smoothness": 3.0}])
@pytest.mark.parametrize("first", [True, False])
def test_rounds_made_again_are_proved_by_use_only_if_all_of_them_may_be(ledger, weaker, first):
    """E3 needs convex losses, and rates that the smoothness allows, in every stretch of a run."""
    convex = Conditions(convex=True, smoothness=1.0)
    sampling = Sampling("fixed-round", 1 - 0.98**10, "replace-one", 0.0, 1, 50)
    by_use = (Release("uplink", 5.0, 20.0, 1, sampling, "test", by_use=Uses(10, 0.1, 1.0)),)

    def spent(dataset, *conditions):
        for each in conditions:
            ledger.charge("run", dataset, all_of(["ann"], by_use, 5), rounds=(0, 5), conditions=each)
        (row,) = ledger.spent(dataset, "ann", adjacency="replace-one")
        return row.epsilon

    weak = convex._replace(**weaker)
    mixed = spent("mixed", *((weak, convex) if first else (convex, weak)))
    assert mixed == pytest.approx(spent("unknown", Conditions(), Conditions()), rel=1e-9)
    assert mixed > 1.5 * spent("convex", convex, convex)


def test_epochs_that_are_shuffled_again_count_as_they_were_made(ledger):
    """A run registered ten batches, made five of them and then five anew; another run follows. Each stretch is a
    use of the record, also where sums are seen: the one epoch that was registered did not happen."""
    conditions = Conditions(encoded=True, cohort_size=10, own_epochs=True)
    for rounds in ((0, 5), (0, 5)):
        ledger.charge(
            "one",
            "data",
            all_of(["ann"], shuffled(), 5),
            rounds=rounds,
            conditions=conditions,
            plan=lambda: all_of(["ann"], shuffled(), 10),
        )
    plain = (Release("uplink", 20.0, 1.0, 1, Sampling("full", 1.0, "replace-one"), "test"),)
    ledger.charge("two", "data", all_of(["ann"], plain, 3), rounds=(0, 3), conditions=conditions)
    (spent,) = ledger.spent("data", "ann", view="sum", adjacency="replace-one")
    assert spent.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2 + 3) / 20, spent.delta), rel=1e-6)
