"""The values a plan tries, and what it says to a wish that cannot be had."""

import math

import numpy as np
import pytest

from dither.accounting import accountant
from dither.errors import NoProof, SpecError
from dither.experiment.build import build_experiment
from dither.experiment.plan import candidates, records
from dither.methods import cpfed
from dither.spec import Spec

BASE = Spec.from_preset("cpfed")
COUNTS = records.counts_only(400, 5, ("0", "1"))


def test_every_point_is_a_valid_spec_within_the_facts():
    for method in ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated"):
        base = Spec.from_preset(method)
        for effort in ("bound", "search", "quick"):
            points = candidates.points(base, 120, {}, effort=effort)
            assert points
            for point in points[:: max(1, len(points) // 12)]:
                spec = base.with_values({"privacy.noise_decay_start": 0, **point})
                assert spec.cohort_size <= base.num_clients
                assert spec.batch_size <= 120
                assert (spec.batch_sampling == "full") == (spec.batch_size == 120)


def test_reach_is_kept_when_rounds_change():
    for point in candidates.points(BASE, 100, {"privacy.clip_norm": (2.0,)}):
        reach = point["num_rounds"] * point["local_steps"] * point["privacy.clip_norm"] * point["client_lr"]
        assert any(reach == pytest.approx(value) for value in (8.0, 32.0, 128.0))


def test_neighbours_differ_in_one_step_and_keep_what_is_fixed():
    point = candidates.points(BASE, 100, {})[0]
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
        candidates.points(BASE, 100, given)


def test_bad_values_and_unknown_knobs_are_named():
    with pytest.raises(SpecError, match="num_rounds"):
        candidates.points(BASE, 100, {"num_rounds": (0,)})
    with pytest.raises(SpecError, match="did you mean 'num_rounds'"):
        candidates.points(BASE, 100, {"num_round": (3,)})


def test_the_front_keeps_what_nothing_beats():
    points = [(1, 5), (2, 4), (2, 6), (3, 4), (1, 5), (4, 1)]
    assert candidates.pareto_front(points, lambda p: p) == [(1, 5), (2, 4), (4, 1)]
    assert candidates.pareto_front([], lambda p: p) == []


# The noise, from counts alone


def base_of(method, epsilon=1.0, clients=4, **values):
    facts = {"privacy.epsilon": epsilon, "privacy.delta": 1e-5, "privacy.view": "upload"}
    facts |= {"privacy.adjacency": "replace-one", "num_clients": clients, "model.name": "logistic"}
    base, _ = records.base_spec(method, facts, values, {})
    return candidates.proxy_spec(base.with_values({"data.partition": "iid"}))


def point_of(base, rounds=5, cohort=4, steps=2, batch=10, clip=1.0, rate=0.5):
    one = {"num_rounds": rounds, "cohort_size": cohort, "local_steps": steps, "batch_size": batch}
    return candidates.completed(
        base, {**one, candidates.clip_key(base.method): clip, "client_lr": rate}, math.nan, 100
    )


@pytest.mark.parametrize("method", ["secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated"])
def test_the_budget_is_proven_and_not_wasted(method):
    base = base_of(method)
    point = point_of(base, batch=100 if method == "nbafl" else 10)
    value = candidates.proven_epsilon(base, point, COUNTS)
    assert 0.998 < value <= 1.0
    found = candidates.candidate(base, point, COUNTS)
    assert found.uploads == 5
    sent = 2 if method == "dp-scaffold" else 1
    assert found.bytes_per_client == 2 * 5 * sent * 6 * 4  # up and down, five rounds, six float32


def test_counts_give_the_noise_of_the_real_run():
    """The planned noise is what `dither run` will add: nothing but counts went into it."""
    base = base_of("cpfed")
    point = point_of(base)
    material = records.synthetic_data(400, 5)
    real = build_experiment(base.with_values(point), dataset=material.dataset)
    assert candidates.candidate(base, point, COUNTS).noise_std == pytest.approx(
        float(real.prepared.hyper["noise_std"][0])
    )


def test_the_accountant_is_asked_once_for_equal_questions(monkeypatch):
    asked = []
    genuine = accountant.calibrate
    monkeypatch.setattr(accountant, "_ANSWERS", {})
    monkeypatch.setattr(accountant, "calibrate", lambda *a, **k: asked.append(1) or genuine(*a, **k))
    base = base_of("cpfed")
    stds = [
        candidates.candidate(base.with_values({"seed": seed}), point_of(base, rate=rate), COUNTS).noise_std
        for rate in (0.1, 0.5, 2.0)
        for seed in (0, 1)
    ]
    assert len(asked) == 1
    assert len(set(stds)) == 1
    candidates.candidate(base, point_of(base, rounds=6), COUNTS)
    candidates.candidate(base.with_values({"privacy.epsilon": 2.0}), point_of(base), COUNTS)
    assert len(asked) == 3


def test_signal_to_noise_compares_lengths_in_the_final_model():
    base = base_of("cpfed")
    found = candidates.candidate(base, point_of(base, rounds=20, steps=2, rate=0.5), COUNTS)
    longest = 20 * 2 * 0.5 * 1.0
    # w is a sum of 40 steps, each with the mean of 4 clients' noise on 6 coordinates
    noise = 0.5 * math.sqrt(40 * 6 / 4) * found.noise_std
    assert found.signal_to_noise == pytest.approx(longest / noise)
    faster = candidates.candidate(base, point_of(base, rounds=20, steps=2, rate=3.0), COUNTS)
    assert faster.signal_to_noise == pytest.approx(found.signal_to_noise)  # no learning rate changes it


def test_no_proof_is_told_apart():
    base = base_of("secure-fedavg").with_values({"privacy.adjacency": "add/remove"})
    point = point_of(base)
    with pytest.raises(NoProof):
        candidates.candidate(base, point, COUNTS)
    found, reasons = candidates.affordable(base, [point], COUNTS)
    assert found == []
    assert len(reasons) == 1


def test_printed_noise_is_beside_it():
    base = base_of("cpfed")
    found = candidates.candidate(base, point_of(base), COUNTS)
    params = cpfed.CpfedParams(num_rounds=5, local_steps=2, num_clients=4, batch_size=10, clip_norm=1.0)
    printed = cpfed.noise_std(params, epsilon=1.0, delta=1e-5)
    assert found.printed_noise_std == pytest.approx(float(printed))
    assert np.isfinite(found.claimed.value)


def test_a_plan_from_a_preset_with_a_sampling_rate_sets_its_own_batches():
    base, _ = records.base_spec("adult", {"privacy.epsilon": 1.0}, {}, {})
    assert base.sampling_rate == 0
    point = {"num_rounds": 5, "local_steps": 1, "batch_size": 50, "privacy.clip_norm": 1.0}
    fixed = base.with_values({"sampling_rate": 0.1})
    assert base.with_values(candidates.completed(fixed, point, 1.0, 50)).batch_sampling == "full"
    assert "sampling_rate" not in candidates.completed(fixed, point, 1.0, 100)
