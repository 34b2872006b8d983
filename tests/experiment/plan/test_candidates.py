"""The values a plan tries, and what it says to a wish that cannot be had."""

import pytest

from dither.errors import SpecError
from dither.experiment.plan import candidates
from dither.spec import Spec

BASE = Spec.from_preset("cpfed")


def test_every_point_is_a_valid_spec_within_the_facts():
    for method in ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated"):
        base = Spec.from_preset(method)
        for effort in ("bound", "search", "quick"):
            points = candidates.points(base, candidates.search_space(base, 120, {}, effort=effort), 120)
            assert points
            for point in points[:: max(1, len(points) // 12)]:
                spec = base.with_values({"privacy.noise_decay_start": 0, **point})
                assert spec.cohort_size <= base.num_clients
                assert spec.batch_size <= 120
                assert (spec.batch_sampling == "full") == (spec.batch_size == 120)


def test_reach_is_kept_when_rounds_change():
    tried = candidates.search_space(BASE, 100, {"privacy.clip_norm": (2.0,)})
    for point in candidates.points(BASE, tried, 100):
        reach = point["num_rounds"] * point["local_steps"] * point["privacy.clip_norm"] * point["client_lr"]
        assert any(reach == pytest.approx(value) for value in tried.reach)


def test_neighbours_differ_in_one_step_and_keep_what_is_fixed():
    point = candidates.points(BASE, candidates.search_space(BASE, 100, {}), 100)[0]
    near = candidates.neighbours(BASE, point, 100, fixed=["num_rounds"])
    assert near
    assert all(one["num_rounds"] == point["num_rounds"] for one in near)
    assert all(one["cohort_size"] <= BASE.num_clients and one["batch_size"] <= 100 for one in near)
    assert point not in near


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cohort_size": (40,)}, "cohort_size=40 exceeds the 16 clients; nearest feasible: cohort_size=16"),
        ({"batch_size": (500,)}, "nearest feasible: batch_size=100, or the same records over at most 3 clients"),
    ],
)
def test_the_impossible_is_answered_with_the_nearest_point(given, words):
    with pytest.raises(candidates.Infeasible, match=words):
        candidates.search_space(BASE, 100, given)


def test_bad_values_and_unknown_knobs_are_named():
    with pytest.raises(SpecError, match="num_rounds"):
        candidates.search_space(BASE, 100, {"num_rounds": (0,)})
    with pytest.raises(SpecError, match="did you mean 'num_rounds'"):
        candidates.search_space(BASE, 100, {"num_round": (3,)})


def test_the_front_keeps_what_nothing_beats():
    points = [(1, 5), (2, 4), (2, 6), (3, 4), (1, 5), (4, 1)]
    assert candidates.pareto_front(points, lambda p: p) == [(1, 5), (2, 4), (4, 1)]
    assert candidates.pareto_front([], lambda p: p) == []
