"""The plan is the accountant's own answer, and what is no slider's value is refused."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")

from dither import accounting
from dither.errors import NoProof, SpecError
from dither.spec import Spec
from dither.web import plan_page
from dither.web.app import one_release
from dither.web.plan_page import PlanRequest


def test_the_noise_meets_the_budget_and_not_much_more_by_another_way_to_compute_it():
    request = PlanRequest(rounds=50)
    found = plan_page.required_noise(request)
    direct = accounting.poisson_epsilon(
        request.batch / request.each, found.multiplier, 50 * request.steps, request.delta, adjacency="zero-out"
    )
    assert direct == pytest.approx(found.proven, rel=2e-3)  # the plan charges truncated batches too
    assert 0.995 <= found.proven <= 1.0


@pytest.mark.parametrize("method", plan_page.METHODS)
def test_every_method_has_a_plan_that_is_a_spec(method):
    request = plan_page.parse({"method": method, "adjacency": "replace-one", "rounds": "20", "epsilon": "2"})
    found = plan_page.answer(request)
    assert 1.99 <= found["proven"] <= 2.0
    spec = Spec.from_toml(found["spec"])
    assert (spec.privacy.epsilon, spec.privacy.noise, spec.num_rounds) == (2.0, "proven", 20)
    assert plan_page.required_noise(request._replace(epsilon=1.0)).multiplier > found["multiplier"]
    assert plan_page.required_noise(request._replace(rounds=40)).multiplier > found["multiplier"]


def test_what_has_no_proof_says_so():
    none = accounting.ProvenRow("upload", "zero-out", math.inf, 1e-5, "run", "no proof", detail="why not")
    with pytest.raises(NoProof, match="why not"):
        plan_page.solve(lambda factor: none, 1.0, guess=1.0)


@pytest.mark.parametrize("method", plan_page.METHODS)
def test_blanking_asks_for_no_more_noise_than_replacing(method):
    request = PlanRequest(method=method, rounds=20, epsilon=2.0)
    assert (
        plan_page.required_noise(request).noise_std
        <= plan_page.required_noise(request._replace(adjacency="replace-one")).noise_std * 1.01
    )


def test_a_plan_agrees_with_the_run_it_becomes():
    from dither.experiment.build import build_experiment
    from dither.experiment.plan.candidates import first_noise
    from dither.experiment.plan.records import counts_only

    request = PlanRequest(rounds=10, clients=4, records=2000, batch=50)
    counts = counts_only(2000, 3, ("0", "1"))
    experiment = build_experiment(
        plan_page.spec_of(request), dataset=counts, arrays=(counts.x_train, counts.y_train)
    )
    assert first_noise(experiment.prepared, experiment) == pytest.approx(
        plan_page.required_noise(request).noise_std, rel=5e-3
    )
    assert experiment.proven_epsilon(10) == pytest.approx(1.0, rel=5e-3)


def test_participations_that_are_drawn_hold_with_the_stated_probability():
    import numpy as np

    request = PlanRequest(clients=20, rounds=60, share=0.3)
    most = plan_page.required_noise(request).participations
    drawn = np.random.default_rng(0).random((4000, 60, 20)).argsort(axis=2) < request.cohort
    assert np.mean(drawn.sum(axis=1).max(axis=1) <= most) >= 0.95
    assert most < 60


@pytest.mark.parametrize(
    "given",
    [{"epsilon": "0"}, {"epsilon": "nan"}, {"rounds": "1e9"}, {"clients": "x"}, {"method": "evil.py"},
     {"delta": "-1"}, {"adjacency": "none"}, {"adjacency": "add/remove"}, {"clients": "1000", "records": "100"}],
)  # fmt: skip
def test_a_value_that_is_no_slider_is_refused(given):
    with pytest.raises(SpecError, match=next(iter(given))):
        plan_page.parse(given)


def test_the_solver_finds_a_jump_and_a_bend():
    def rough(factor):
        value = 10 / factor if factor < 3 else 1 / factor**2
        return accounting.ProvenRow("upload", "zero-out", value, 1e-5, "run", "R")

    factor, found, _ = plan_page.solve(rough, 1.0, guess=1.0)
    assert found.value <= 1.0
    assert factor == pytest.approx(3.0, rel=1e-3)

    def hopeless(factor):
        return replace(rough(factor), value=math.inf, detail="none at all")

    with pytest.raises(NoProof):
        plan_page.solve(hopeless, 1.0, guess=1.0)


def test_curve_passes_through_the_plan():
    request = PlanRequest(rounds=40)
    curve, multiplier = plan_page.curve(request), plan_page.required_noise(request).multiplier
    assert curve["by_epsilon"][curve["epsilon"].index(request.epsilon)] == multiplier
    assert curve["by_rounds"][curve["rounds"].index(40)] == multiplier
    assert curve["by_epsilon"] == sorted(curve["by_epsilon"], reverse=True)
    assert curve["by_rounds"] == sorted(curve["by_rounds"])


def test_one_release_is_exact():
    found = one_release(2.0, 4, 1e-5)
    assert accounting.gaussian_delta(found["upload"], 0.5) == pytest.approx(1e-5, rel=1e-6)
    assert accounting.gaussian_delta(found["average"], 0.25) == pytest.approx(1e-5, rel=1e-6)
    with pytest.raises(SpecError, match="clients=0"):
        one_release(2.0, 0, 1e-5)
