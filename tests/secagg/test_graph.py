"""The mask graph: regular, the same for everyone, and connected without the colluders as often as claimed."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from dither.errors import SpecError
from dither.secagg import graph
from dither.secagg.graph import Rules
from dither.secagg.roster import AnnouncedCohort, Roster


def cohort(size: int, neighbours: int, round_index: int = 0) -> AnnouncedCohort:
    """A cohort whose members have no keys: the graph asks for none."""
    rules = Rules(neighbours=neighbours)
    roster = Roster(bytes(32), rules, {})
    roster.__dict__["digest"] = b"r" * 32
    return AnnouncedCohort(roster, round_index, 0, size // 2 + 1, 1, tuple(range(0, 3 * size, 3)))


def connected(adjacent: dict[int, set[int]]) -> bool:
    seen, todo = set(), [next(iter(adjacent))]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += adjacent[here] - seen
    return len(seen) == len(adjacent)


@pytest.mark.parametrize(("size", "neighbours"), [(7, 2), (7, 4), (20, 6), (50, 10)])
def test_the_graph_is_regular_symmetric_and_new_at_every_round(size, neighbours):
    one, other = cohort(size, neighbours), cohort(size, neighbours, 1)
    for who in one.ids:
        found = one.neighbours(who)
        assert len(set(found)) == len(found) == neighbours
        assert who not in found
        assert all(who in one.neighbours(peer) for peer in found)
    assert any(set(one.neighbours(who)) != set(other.neighbours(who)) for who in one.ids)


@pytest.mark.parametrize(("size", "neighbours"), [(5, 0), (5, 4), (5, 6), (2, 2)])
def test_small_cohorts_use_the_whole_graph(size, neighbours):
    found = cohort(size, neighbours)
    assert all(set(found.neighbours(who)) == set(found.ids) - {who} for who in found.ids)


@pytest.mark.parametrize(
    ("size", "colluders", "neighbours"), [(7, 3, 2), (8, 4, 2), (8, 4, 4), (9, 5, 4), (9, 4, 6)]
)
def test_the_probability_is_exact(size, colluders, neighbours):
    """Against all placements of the colluders on a ring."""
    half, apart, all_ = neighbours // 2, 0, 0
    for bad in itertools.combinations(range(size), colluders):
        honest = set(range(size)) - set(bad)
        steps = [step for step in range(-half, half + 1) if step]
        adjacent = {i: {(i + step) % size for step in steps} & honest for i in honest}
        apart += not connected(adjacent)
        all_ += 1
    assert graph.disconnected(size, colluders, neighbours) == Fraction(apart, all_)


def test_the_protocols_own_graphs_fall_apart_as_often_as_computed():
    """Real cohorts, hashes and all, at a probability that can be seen; 4,000 rounds, 4.5 standard deviations."""
    size, colluders, neighbours, rounds = 20, 6, 4, 4000
    expected = float(graph.disconnected(size, colluders, neighbours))
    assert 0.05 < expected < 0.5
    apart = 0
    for round_index in range(rounds):
        found = cohort(size, neighbours, round_index)
        honest = set(found.ids[colluders:])
        apart += not connected({who: set(found.neighbours(who)) & honest for who in honest})
    assert abs(apart / rounds - expected) < 4.5 * np.sqrt(expected * (1 - expected) / rounds)


def test_degrees():
    for size, colluders in ((100, 10), (100, 33), (1000, 100), (1000, 333)):
        found = graph.degree(size, colluders)
        assert graph.disconnected(size, colluders, found) <= 2.0**-40
        assert graph.disconnected(size, colluders, found - 2) > 2.0**-40
    assert graph.degree(100, 0) == 2  # a ring is connected
    assert graph.degree(4, 1) == 2
    assert graph.degree(3, 1) == 0  # of three, all
    assert graph.disconnected(100, 9, 10) == 0  # more neighbours than colluders
    assert [graph.degree(size, size // 10, failure=1e-6) for size in (50, 100, 1000, 10_000)] == sorted(
        graph.degree(size, size // 10, failure=1e-6) for size in (50, 100, 1000, 10_000)
    )


@pytest.mark.parametrize("failure", [0.3, 1e-2, 1e-6, 2.0**-40])
def test_a_degree_is_enough_for_every_larger_cohort_with_as_many_colluders(failure):
    """Not a matter of course: with very few honest clients one more of them is one more that can be cut off."""
    for least, colluders in ((10, 8), (20, 10), (40, 12), (60, 30)):
        found = graph.degree(least, colluders, failure=failure)
        assert found or colluders > least / 3
        for size in range(least, 3 * least) if found else ():
            assert graph.disconnected(size, colluders, found) <= failure


def test_the_helper():
    found = graph.sparse(100, dropout=0.2, collusion=0.1)
    assert (found.colluders, found.threshold, found.least) == (10, 56, 80)
    assert found.neighbours == graph.degree(80, 10)
    Rules(threshold=found.threshold, colluders=10, min_clients=12, neighbours=found.neighbours).check()
    with pytest.raises(SpecError, match=r"of 100 clients 50 remain and 10 collude.*dropout must stay below 0.45"):
        graph.sparse(100, dropout=0.5, collusion=0.1)
    assert graph.sparse(100, dropout=0.44, collusion=0.1).least == 56
    for wrong in ({"dropout": -0.1, "collusion": 0.1}, {"dropout": 0.1, "collusion": 1.0}):
        with pytest.raises(SpecError, match="must lie in 0 to 1"):
            graph.sparse(10, **wrong)
    with pytest.raises(SpecError, match="even number above 0"):
        graph.disconnected(10, 2, 3)
    with pytest.raises(SpecError, match="colluders=10"):
        graph.disconnected(10, 10, 2)
    with pytest.raises(SpecError, match="failure=2"):
        graph.degree(10, 2, failure=2)
