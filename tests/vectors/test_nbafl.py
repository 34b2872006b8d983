"""NbAFL's formulas against the published numbers and against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither import methods
from dither.errors import SpecError
from dither.methods import nbafl as nb
from dither.methods.nbafl import NbaflParams

from .published import vectors

LOSS = nb.LossConstants(1.0, 1.0, 0.5, 1.2, 10.0, 2.3)
RUN = NbaflParams(param_clip=20.0, min_client_size=100, exposures=1, num_rounds=25, num_clients=50)
BUDGET = {"epsilon": 50.0, "delta": 0.01}


def params(v):
    given = (v.get("C", 20), v.get("m", 100), v.get("L", 1), v.get("T", 1), v.get("N", 1))
    return NbaflParams(*given, v.get("K"))


def budget(v):
    return {"epsilon": v["eps"], "delta": v["delta"]}


def loss(v):
    return nb.LossConstants(v["rho"], v["beta"], v["l"], v["B"], v["mu"], v["Theta"])


def sigma_a(v):
    up = nb.uplink_noise_std(params(v), **budget(v))
    down = nb.downlink_noise_std(params(v), **budget(v))
    direct = nb.required_aggregate_noise_std(params(v), **budget(v))
    value = nb.aggregate_noise_std(uplink_std=up, downlink_std=down, weights_sq_sum=1 / v["N"])
    assert value == pytest.approx(direct, rel=1e-12)  # eq (13) is the same number
    return value


def both_required(v):
    forms = ("printed", "corrected")
    return [nb.scheduled_required_noise_std(params(v), **budget(v), form=form) for form in forms]


DISPATCH = {
    "nb.c": lambda v: methods.gaussian_constant(v["delta"]),
    "nb.sigmaU.*": lambda v: nb.uplink_noise_std(params(v), **budget(v)),
    "nb.sigmaD.*": lambda v: nb.downlink_noise_std(params(v), **budget(v)),
    "nb.sigmaA.*": sigma_a,
    "nb.gamma.*": lambda v: nb.scheduling_gamma(params(v), epsilon=v["eps"]),
    "nb.threshold.*": lambda v: nb.scheduling_threshold(params(v), epsilon=v["eps"]),
    "nb.b.*": lambda v: nb.scheduling_factor(params(v), epsilon=v["eps"]),
    "nb.sigmaD_K.*": lambda v: nb.scheduled_downlink_noise_std(params(v), **budget(v)),
    "nb.sigmaA_K.*": lambda v: nb.scheduled_aggregate_noise_std(params(v), **budget(v)),
    "nb.K_min_defined.*": lambda v: nb.min_defined_cohort(params(v), epsilon=v["eps"]),
    "nb.K_min_noise.*": lambda v: nb.quietest_cohort(params(v), **budget(v)),
    "nb.base_eps_paper.*": lambda v: nb.scheduled_base_epsilon(params(v), epsilon=v["eps"]),
    "nb.base_eps_correct.*": lambda v: nb.scheduled_base_epsilon_corrected(params(v), epsilon=v["eps"]),
    "nb.downlink_noise_paper_vs_correct.*": both_required,
    "nb.lambda2": lambda v: nb.increment_coefficients(loss(v)).gradient,
    "nb.P": lambda v: nb.contraction(loss(v)),
    "nb.kappa1": lambda v: nb.noise_coefficients(loss(v), params(v), delta=v["delta"])[0],
    "nb.kappa0": lambda v: nb.noise_coefficients(loss(v), params(v), delta=v["delta"])[1],
    "nb.thm2.T*": lambda v: nb.convergence(loss(v), params(v), **budget(v)).total,
    "nb.thm2.Topt.*": lambda v: nb.optimal_num_rounds(loss(v), params(v), **budget(v)),
    "nb.eq15.*": lambda v: nb.curvature(loss(v), params(v), **budget(v)),
    "nb.thm2_corrected.*": lambda v: (
        nb.convergence_corrected(loss(v), params(v), **budget(v), num_params=v["d"]).total
    ),
    "nb.thm3.T*": lambda v: nb.scheduled_convergence(loss(v), params(v), **budget(v)).total,
    "nb.thm3.Q.*": lambda v: nb.scheduled_contraction(loss(v), cohort_size=v["K"]),
}


test_published_value, test_every_paper_entry_is_covered = vectors(DISPATCH, "nb")


@pytest.mark.parametrize("num_rounds", [1, 7, 8, 25, 200])
@pytest.mark.parametrize("exposures", [1, 3])
def test_full_cohort_reduces_lemma4_to_theorem1(num_rounds, exposures):
    run = RUN._replace(num_rounds=num_rounds, exposures=exposures, cohort_size=50)
    assert nb.scheduled_downlink_noise_std(run, **BUDGET) == pytest.approx(
        nb.downlink_noise_std(run, **BUDGET), rel=1e-12
    )
    assert nb.scheduling_factor(run, epsilon=50.0) == 1


def test_lemma4_is_continuous_at_its_threshold():
    run = RUN._replace(cohort_size=20)
    edge = nb.scheduling_threshold(run, epsilon=50.0)
    near = edge * (1 + np.array([-1e-9, 1e-9, 1e-6]))
    std = nb.scheduled_downlink_noise_std(run._replace(num_rounds=near), **BUDGET)
    later = nb.scheduled_downlink_noise_std(run._replace(num_rounds=2 * edge), **BUDGET)
    assert std[0] == 0
    assert 0 < std[1] < std[2] < 1e-2 * later


@settings(max_examples=200, deadline=None)
@given(
    num_clients=st.integers(1, 200),
    share=st.floats(0.005, 1),
    num_rounds=st.integers(1, 2000),
    exposures=st.integers(1, 5),
    epsilon=st.floats(0.01, 2000),
)
def test_lemma4_never_meets_its_undefined_region(num_clients, share, num_rounds, exposures, epsilon):
    cohort = max(1, int(share * num_clients))
    run = NbaflParams(20.0, 100, exposures, num_rounds, num_clients, cohort)
    std = nb.scheduled_downlink_noise_std(run, epsilon=epsilon, delta=0.01)
    assert np.isfinite(std)
    assert std >= 0
    factor = nb.scheduling_factor(run, epsilon=epsilon)
    assert np.isnan(factor) == (cohort < nb.min_defined_cohort(run, epsilon=epsilon))
    if np.isnan(factor):
        assert std == 0
        assert "no value" in nb.scheduling_note(run, epsilon=epsilon)


def test_scheduling_note_names_the_branch():
    run = RUN._replace(cohort_size=20)
    assert "adds noise" in nb.scheduling_note(run._replace(num_rounds=200), epsilon=50.0)
    note = nb.scheduling_note(run, epsilon=50.0)
    assert "sets the downlink noise to 0" in note
    assert "cohort_size=20 is below 44" in note


def test_inverses_round_trip():
    epsilon = np.linspace(1, 100, 30)
    up = nb.uplink_noise_std(RUN._replace(exposures=3), epsilon=epsilon, delta=0.01)
    back = nb.uplink_epsilon_of_noise(noise_std=up, sensitivity=0.4, delta=0.01, exposures=3)
    np.testing.assert_allclose(back, epsilon, rtol=1e-12)
    total = nb.required_aggregate_noise_std(RUN, epsilon=epsilon, delta=0.01)
    Delta = nb.downlink_sensitivity(param_clip=20, min_client_size=100, weights=np.full(50, 1 / 50))
    back = nb.downlink_epsilon_of_noise(noise_std=total, sensitivity=Delta, delta=0.01, num_rounds=25)
    np.testing.assert_allclose(back, epsilon, rtol=1e-12)
    assert np.all(np.diff(up) < 0)
    assert np.all(np.diff(total) < 0)


def test_scheduled_inverse_recovers_epsilon_where_noise_was_added():
    short, release = RUN._replace(cohort_size=20), {"sensitivity": 2 * 20 / (100 * 20), "delta": 0.01}
    long = short._replace(num_rounds=200)
    std = nb.scheduled_aggregate_noise_std(long, **BUDGET)
    assert nb.scheduled_epsilon_of_noise(long, noise_std=std, **release) == pytest.approx(50, rel=1e-12)
    quiet = nb.scheduled_aggregate_noise_std(short, **BUDGET)
    gamma = nb.scheduling_gamma(short, epsilon=50.0)
    claimed = nb.scheduled_epsilon_of_noise(short, noise_std=quiet, **release)
    assert claimed == pytest.approx(25 * gamma, rel=1e-12)  # below ε: the uplink noise suffices
    assert claimed < 50


def test_corrected_lemma4_asks_for_more_noise_as_the_cohort_shrinks():
    K = np.array([50, 40, 30, 20, 10])
    run = RUN._replace(num_rounds=200, cohort_size=K)
    required = nb.scheduled_required_noise_std(run, **BUDGET, form="corrected")
    np.testing.assert_allclose(required, [0.0994, 0.1023, 0.1069, 0.1158, 0.1406], atol=6e-5)  # N4 (ii)
    plain = nb.scheduled_required_noise_std(run, **BUDGET, form="uncredited")
    assert np.all(plain >= required * (1 - 1e-12))
    for credit, target in ((False, plain), (True, required)):
        down = nb.scheduled_downlink_noise_std_corrected(run, **BUDGET, sampling_credit=credit)
        up = nb.uplink_noise_std(run, **BUDGET)
        np.testing.assert_allclose(np.sqrt(down**2 + up**2 / K), target, rtol=1e-12)
    with pytest.raises(SpecError, match="form='typo'"):
        nb.scheduled_required_noise_std(run, **BUDGET, form="typo")


def test_general_weights():
    weights = np.array([0.5, 0.25, 0.25])
    assert nb.downlink_sensitivity(param_clip=2, min_client_size=10, weights=weights) == pytest.approx(0.2)
    std = nb.aggregate_noise_std(uplink_std=0.3, downlink_std=0.4, weights_sq_sum=np.sum(weights**2))
    assert std == pytest.approx(np.sqrt(0.16 + 0.09 * 0.375))


@pytest.mark.parametrize(("exposures", "num_rounds"), [(1, 25), (25, 25)])
def test_unequal_clients_get_the_noise_that_their_claim_needs(exposures, num_rounds):
    sizes = np.array([300, 100, 100, 500])
    run = NbaflParams(20.0, 100, exposures, num_rounds, 4, weights=sizes / sizes.sum())
    total = nb.required_aggregate_noise_std(run, **BUDGET)
    up, down = nb.uplink_noise_std(run, **BUDGET), nb.downlink_noise_std(run, **BUDGET)
    assert total == pytest.approx(
        nb.aggregate_noise_std(uplink_std=up, downlink_std=down, weights_sq_sum=run.weights_sq_sum)
    )
    claimed = nb.channel_claims(run, uplink_std=float(up), aggregate_std=float(total), delta=0.01)
    assert claimed[0].value == pytest.approx(50)
    # Uploads that are all seen carry more noise than the broadcasts need.
    assert claimed[1].value == pytest.approx(50) if exposures == 1 else claimed[1].value < 50
    same = nb.required_aggregate_noise_std(run._replace(weights=np.full(4, 1 / 4)), **BUDGET)
    assert same == pytest.approx(nb.required_aggregate_noise_std(run._replace(weights=None), **BUDGET))
    corrected = nb.convergence_corrected(LOSS, run, **BUDGET, num_params=100)
    even = nb.convergence_corrected(LOSS, run._replace(weights=None), **BUDGET, num_params=100)
    assert corrected.total > even.total


def test_lemma_2_is_met_and_no_smaller_constant_is():
    rng = np.random.default_rng(0)
    weights = np.array([0.5, 0.2, 0.3])
    gradients = rng.normal(size=(3, 5)) + 1
    mean = weights @ gradients
    divergences = np.linalg.norm(gradients - mean, axis=1)
    B = nb.dissimilarity(gradient_norm=np.linalg.norm(mean), divergences=divergences, weights=weights)
    assert weights @ np.sum(gradients**2, axis=1) == pytest.approx(B**2 * np.sum(mean**2))
    assert nb.dissimilarity(gradient_norm=0.0, divergences=divergences) == np.inf
    assert nb.dissimilarity(gradient_norm=2.0, divergences=np.zeros(3)) == 1.0


def test_claims_per_channel():
    up, down = nb.channel_claims(
        RUN,
        uplink_std=float(nb.uplink_noise_std(RUN, **BUDGET)),
        aggregate_std=float(nb.required_aggregate_noise_std(RUN, **BUDGET)),
        delta=0.01,
    )
    assert (up.value, down.value) == (pytest.approx(50), pytest.approx(50))
    broken = methods.failing(up.conditions)
    assert any("ε/L = 50" in text for text in broken)
    assert any("N2" in text for text in broken)
    assert not any("Lemma 4" in text for text in broken)
    scheduled = nb.channel_claims(RUN._replace(cohort_size=20), uplink_std=1.0, aggregate_std=1.0, delta=0.01)
    assert any("Lemma 4" in text for text in methods.failing(scheduled[1].conditions))


def test_cohort_larger_than_the_federation_is_refused():
    with pytest.raises(SpecError, match="cohort_size=60 exceeds num_clients=50"):
        nb.scheduled_downlink_noise_std(RUN._replace(cohort_size=60), **BUDGET)


def test_theorem2_curvature_is_the_derivative():
    T = np.array([24.99, 25.0, 25.01])
    h = nb.convergence(LOSS, RUN._replace(num_rounds=T), **BUDGET).total
    numeric = (h[0] - 2 * h[1] + h[2]) / 0.01**2
    assert nb.curvature(LOSS, RUN, **BUDGET) == pytest.approx(numeric, rel=1e-5)


def test_lemma3_terms():
    kwargs = {"gradient_sq": 4.0, "noise_times_gradient": 2.0, "noise_sq": 9.0}
    printed = nb.increment_bound(LOSS, **kwargs)
    fixed = nb.increment_bound(LOSS, corrected=True, **kwargs)
    assert printed.total == pytest.approx(-0.0808 * 4 + 0.22 * 2 + 0.5 * 9)
    assert fixed.cross == pytest.approx(1.12 * 2)


def test_optimal_rounds_grow_with_epsilon():
    best = [nb.optimal_num_rounds(LOSS, RUN, epsilon=e, delta=0.01) for e in (50, 60, 100)]
    assert best == [42, 44, 52]


def test_optimal_cohort_is_defined_and_smallest():
    run = RUN._replace(num_rounds=200, cohort_size=np.arange(1, 51))
    best = nb.optimal_cohort(LOSS, run, **BUDGET)
    totals = nb.scheduled_convergence(LOSS, run, **BUDGET).total
    assert np.isnan(totals[0])
    assert totals[best - 1] == np.nanmin(totals)
    run = RUN._replace(num_rounds=np.arange(1, 1001), cohort_size=20)
    by_rounds = nb.optimal_num_rounds(LOSS, run, **BUDGET)
    over_rounds = nb.scheduled_convergence(LOSS, run, **BUDGET).total
    assert over_rounds[by_rounds - 1] == np.nanmin(over_rounds)


@pytest.mark.parametrize(("epsilon", "failing"), [(0.99, 1), (1.0, 2)])
def test_the_classical_mechanism_needs_less_than_1_for_an_upload_and_a_broadcast(epsilon, failing):
    run = nb.NbaflParams(1.0, 100, 5, 25, 50)
    for link in ("uplink", "downlink"):
        other = "downlink" if link == "uplink" else "uplink"
        count = {"uplink": 5, "downlink": 25}[link]
        claimed = {f"{link}_epsilon": count * epsilon, f"{other}_epsilon": 0.1}
        assert len(methods.failing(nb.conditions(run, **claimed))) == failing  # one always: N2


def test_conditions_of_the_theorems():
    assert all(holds for _, holds in nb.convergence_conditions(LOSS))
    weak = LOSS._replace(proximal=1.0)
    assert methods.failing(nb.convergence_conditions(weak))
    run = RUN._replace(cohort_size=20)
    failing = methods.failing(nb.scheduled_convergence_conditions(LOSS, run, epsilon=50.0))
    assert len(failing) == 1
    assert "K = 20" in failing[0]


def test_corrected_bound_without_contraction_grows_by_rounds():
    weak = LOSS._replace(proximal=1.0)  # λ_2 > 0: PL may not be used
    one = nb.convergence_corrected(weak, RUN._replace(num_rounds=10), **BUDGET, num_params=10)
    lam = nb.increment_coefficients(weak, corrected=True)
    assert one.optimisation == pytest.approx(2.3 + 10 * lam.gradient)
    wide, narrow = (nb.convergence_corrected(LOSS, RUN, **BUDGET, num_params=d) for d in (203_530, 10))
    assert wide.total > 1e2 * narrow.noise_quadratic


def test_expected_norm_between_jensen_bounds():
    d = np.array([1, 2, 10, 203_530])
    value = nb.expected_norm(noise_std=1.0, num_params=d)
    assert value[0] == pytest.approx(np.sqrt(2 / np.pi))
    assert np.all(value < np.sqrt(d))
    np.testing.assert_allclose(value[2:], np.sqrt(d[2:] - 0.5), rtol=2e-3)


def test_bounds_over_a_grid():
    T, K = np.meshgrid(np.arange(1, 201), np.linspace(1, 50, 200))
    run, budget = RUN._replace(num_rounds=T, cohort_size=K), {"epsilon": 60.0, "delta": 0.01}
    second = nb.convergence(LOSS, run, **budget)
    third = nb.scheduled_convergence(LOSS, run, **budget)
    std = nb.scheduled_aggregate_noise_std(run, **budget)
    assert second.total.shape == third.total.shape == std.shape == (200, 200)
    np.testing.assert_allclose(
        second.optimisation + second.noise_linear + second.noise_quadratic, second.total, rtol=1e-14
    )
    one = run._replace(num_rounds=T[150, 120], cohort_size=K[150, 120])
    total = nb.scheduled_convergence(LOSS, one, **budget).total
    assert third.total[150, 120] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "epsilon", "message"),
    [
        ({}, 0.0, "epsilon=0 must be"),
        ({"num_rounds": 0}, 50.0, "num_rounds=0 must be"),
        ({"cohort_size": 60}, 50.0, "cohort_size=60 exceeds num_clients=50"),
    ],
)
@pytest.mark.parametrize("form", ["printed", "corrected", "uncredited"])
def test_noise_on_the_downlink_needs_an_epsilon_rounds_and_a_cohort(change, epsilon, message, form):
    run = RUN._replace(**{"cohort_size": 20, **change})
    with pytest.raises(SpecError, match=message):
        nb.scheduled_required_noise_std(run, epsilon=epsilon, delta=0.01, form=form)


def test_noise_on_the_uplink_needs_an_epsilon_and_exposures():
    run = nb.NbaflParams(1.0, 100, 5, 25, 50)
    with pytest.raises(SpecError, match="epsilon=0 must be"):
        nb.uplink_noise_std(run, epsilon=0.0, delta=0.01)
    with pytest.raises(SpecError, match="exposures=0 must be"):
        nb.uplink_noise_std(run._replace(exposures=0), epsilon=1.0, delta=0.01)


def test_the_noise_that_all_clients_need_asks_for_no_cohort():
    assert nb.required_aggregate_noise_std(RUN._replace(cohort_size=20), **BUDGET) == pytest.approx(
        nb.required_aggregate_noise_std(RUN._replace(cohort_size=None), **BUDGET), rel=1e-12
    )
