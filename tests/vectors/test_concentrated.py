"""The formulas of Concentrated DP-FL against the published numbers and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from dither import methods
from dither.errors import SpecError
from dither.methods import concentrated as cd
from dither.methods.concentrated import ConcentratedParams
from dither.methods.cpfed import AveragingTraining

from .published import PERIODIC, bounds_fall_with_epsilon, noise_falls_and_inverts, periodic, vectors


def params(v):
    return ConcentratedParams(v["C_i"], v["tau"], v["gamma"], v["m"], v["G"], v["r"])


def baseline(v):
    alone = ConcentratedParams(v["C_i"], 1, v["gamma"], v["gamma"], v["G"], 1)
    return cd.dpdsgd_params(alone, credited_clients=v["n"])


def training(v):
    sizes = {"batch_size": v["gamma"], "cohort_size": v["r"]}
    return AveragingTraining(**periodic(v), gradient_variance=v["beta_sq"], **sizes)


def uses(v):
    kwargs = {"participations": v["C_i"], "local_steps": v["tau"], "batch_size": v["gamma"]}
    counts = [cd.record_uses(client_size=v["m"], drop_last=drop, **kwargs) for drop in (False, True)]
    assert counts[0] == counts[1]  # here the two ways of counting agree
    return counts[0]


DISPATCH = {
    "cd.sigma.*": lambda v: cd.noise_std(params(v), epsilon=v["eps"], delta=v["delta"]),
    "cd.sigma.DPDSGD.*": lambda v: cd.noise_std(baseline(v), epsilon=v["eps"], delta=v["delta"]),
    "cd.eps_forward": lambda v: cd.epsilon_of_noise(params(v), noise_std=v["sigma"], delta=1e-4),
    "cd.noise_multiplier": lambda v: cd.noise_multiplier(
        noise_std=v["sigma"], clip_norm=v["G"], batch_size=v["gamma"]
    ),
    "cd.uses_persistent_epochs": uses,
    "cd.verified.local.zcdp_formula": lambda v: methods.epsilon_from_zcdp(
        rho=v["U"] * methods.zcdp_of_gaussian(sensitivity=1.0, noise_std=v["z"]), delta=1e-4
    ),
    "cd.thm2": lambda v: cd.convergence_nonconvex(training(v)).total,
    "cd.thm2_corrected": lambda v: cd.convergence_nonconvex(training(v), corrected=True).total,
    "cd.cor2": lambda v: cd.convergence_convex(training(v)).total,
    "cd.eta_max.*": lambda v: cd.max_client_lr(smoothness=v["L"], local_steps=v["tau"]),
}
FIG5 = ConcentratedParams(12.5, local_steps=10, batch_size=64, client_size=2441, clip_norm=1.0, cohort_size=10)
TRAINING = AveragingTraining(**PERIODIC, gradient_variance=1.0, batch_size=64, cohort_size=10)


test_published_value, test_every_paper_entry_is_covered = vectors(DISPATCH, "cd")


@pytest.mark.parametrize("secure_aggregation", [True, False])
def test_noise_falls_with_epsilon_and_inverts(secure_aggregation):
    noise_falls_and_inverts(cd, FIG5._replace(participations=13, secure_aggregation=secure_aggregation))


def test_without_aggregation_the_noise_grows_by_the_root_of_the_cohort():
    alone, summed = (
        cd.noise_std(FIG5._replace(secure_aggregation=aggregated), epsilon=10, delta=1e-4)
        for aggregated in (False, True)
    )
    assert alone / summed == pytest.approx(np.sqrt(10))


def test_baseline_with_the_cohort_in_place_of_everyone():
    params = [cd.dpdsgd_params(FIG5, credited_clients=n) for n in (16, 10)]
    std = [cd.noise_std(one, epsilon=10, delta=1e-4) for one in params]
    np.testing.assert_allclose(std, [0.01449, 0.01833], atol=6e-6)  # D4
    back = cd.epsilon_of_noise(params[1], noise_std=std[1], delta=1e-4)
    assert back == pytest.approx(10, rel=1e-12)


def test_participation_cannot_be_equal():
    assert cd.participation_bounds(num_rounds=20, cohort_size=10, num_clients=16) == (12, 13)
    assert cd.participation_bounds(num_rounds=50, cohort_size=10, num_clients=16) == (31, 32)
    assert cd.participation_bounds(num_rounds=16, cohort_size=10, num_clients=16) == (10, 10)
    assert cd.expected_participations(num_rounds=20, cohort_size=10, num_clients=16) == 12.5


def test_uses_by_playing_the_epochs():
    for size, batch, steps, rounds in (
        (2441, 64, 10, 13),
        (10, 4, 3, 7),
        (12, 4, 3, 5),
        (9, 5, 2, 3),
        (7, 7, 1, 4),
    ):
        batches = size // batch
        counted = -(-(steps * rounds) // batches)
        kwargs = {"participations": rounds, "local_steps": steps, "batch_size": batch, "client_size": size}
        assert cd.record_uses(**kwargs) == counted
        # a record sits in one batch of every epoch; the first batch of the order is the worst
        played = sum(1 for step in range(steps * rounds) if step % batches == 0)
        assert played == counted
        fresh = sum(1 for step in range(steps) if step % batches == 0) * rounds
        assert cd.record_uses(reshuffle_each_round=True, **kwargs) == fresh


def test_dropping_the_last_batch_can_cost_one_more_use():
    kwargs = {"participations": 5, "local_steps": 1, "batch_size": 4, "client_size": 10}
    assert cd.record_uses(drop_last=False, **kwargs) == 2
    assert cd.record_uses(drop_last=True, **kwargs) == 3  # D2: the paper's count is one short
    with pytest.raises(SpecError, match="batch_size=11 exceeds client_size=10"):
        cd.record_uses(**kwargs | {"batch_size": 11})


def test_claim_reports_fractional_epochs():
    claim = cd.claim(FIG5, noise_std=0.009383656369900453, delta=1e-4)
    assert claim.value == pytest.approx(10)
    failing = methods.failing(claim.conditions)
    assert "batch_size=64 divides client_size=2441" in failing[0]
    assert "τγ/m = 0.2622" in failing[1]
    whole = ConcentratedParams(1, 20, 244, 2440, clip_norm=1.0, cohort_size=1, secure_aggregation=False)
    assert not methods.failing(cd.conditions(whole))
    credited = whole._replace(cohort_size=3, secure_aggregation=True)
    (credit,) = methods.failing(cd.conditions(credited))
    assert "noise variance" in credit
    assert not methods.failing(cd.conditions(credited._replace(cohort_size=1)))


@pytest.mark.parametrize("corrected", [False, True])
def test_learning_rate_condition_is_tight(corrected):
    for tau in (1, 5, 40):
        kwargs = {"smoothness": 3.0, "local_steps": tau, "corrected": corrected}
        best = float(cd.max_client_lr(**kwargs))
        assert cd.convergence_conditions(client_lr=best, **kwargs)[0][1]
        assert not cd.convergence_conditions(client_lr=1.001 * best, **kwargs)[0][1]
    assert cd.max_client_lr(smoothness=1, local_steps=5, corrected=True) < cd.max_client_lr(
        smoothness=1, local_steps=5
    )


def test_corrected_terms_double_and_add_up():
    for function in (cd.convergence_nonconvex, cd.convergence_convex):
        printed, fixed = (function(TRAINING, corrected=c) for c in (False, True))
        assert fixed.privacy_noise == pytest.approx(2 * printed.privacy_noise)
        assert fixed.gradient_variance == pytest.approx(2 * printed.gradient_variance)
        assert fixed.privacy_drift == printed.privacy_drift
        assert sum(printed.values()) == printed.total


def test_bounds_over_a_grid():
    bounds_fall_with_epsilon(cd, FIG5, TRAINING)


def test_lemmas_1_to_5_give_the_cost_of_a_round():
    params = FIG5._replace(participations=1, cohort_size=1, local_steps=10, batch_size=50, client_size=500)
    step = methods.zcdp_of_gaussian(
        sensitivity=cd.step_sensitivity(clip_norm=params.clip_norm, batch_size=50), noise_std=0.05
    )
    epoch = methods.composed_zcdp(np.full(10, step), disjoint=True)  # Lemma 3: ten disjoint batches
    assert methods.composed_zcdp([epoch]) == pytest.approx(cd.rho_total(params, noise_std=0.05))  # Lemma 2
    assert methods.composed_zcdp([0.1, 0.2]) == pytest.approx(0.3)
    upload = cd.upload_sensitivity(clip_norm=1.0, batch_size=50, client_lr=0.1, local_steps=10)  # Lemma 5
    assert upload == pytest.approx(0.1 * 10 * 2 / 50)


def test_lemmas_6_and_7_are_cpfeds_with_the_noise_divided_by_the_cohort():
    squares = np.array([1.0, 2.0, 3.0, 4.0])
    run = TRAINING._replace(num_params=7, noise_std=0.3, gradient_variance=2.0, batch_size=5, cohort_size=2)
    variance = cd.mean_gradient_variance(run, client_gradients_sq=squares)
    assert variance == pytest.approx(7 * 0.09 / 2 + 2 / 5 + 4 * 4 / 64 * 10)
    error = cd.network_error(run._replace(client_lr=0.1), step=3, client_gradients_sq=squares)
    assert error == pytest.approx(0.01 * (18 * (7 * 0.09 * 3 / 2 + 4 / 5) + 12 * (8 + 16) / 64 * 10))
