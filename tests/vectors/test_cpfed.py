"""CPFed's formulas against the published numbers and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from dither import methods
from dither.errors import SpecError
from dither.methods import cpfed
from dither.methods.cpfed import AveragingTraining, CpfedParams

from .published import PERIODIC, bounds_fall_with_epsilon, noise_falls_and_inverts, periodic, vectors


def params(v):
    return CpfedParams(v.get("T", 1), v.get("tau", 1), v.get("n", 1), v["B"], v["L"], v.get("r", 1))


def target(v):
    return {"epsilon": v["eps"], "delta": v["delta"]}


def training(v):
    return AveragingTraining(**periodic(v), gradient_variance=v["beta"], client_size=v["m"])


DISPATCH = {
    "cp.rho_from_eps*": lambda v: methods.zcdp_from_epsilon(epsilon=v["eps"], delta=v["delta"]),
    "cp.sigma.*": lambda v: cpfed.noise_std(params(v), **target(v)),
    "cp.sigma.DPSGD.*": lambda v: cpfed.noise_std(cpfed.dpsgd_params(params(v)), **target(v)),
    "cp.eps_forward.*": lambda v: cpfed.epsilon_of_noise(params(v), noise_std=v["sigma"], delta=v["delta"]),
    "cp.rho_round": lambda v: cpfed.rho_round(params(v), noise_std=v["sigma"]),
    "cp.thm2": lambda v: cpfed.convergence_convex(training(v)).total,
    "cp.thm3": lambda v: cpfed.convergence_nonconvex(training(v)).total,
    "cp.eta_max.*": lambda v: cpfed.max_client_lr(smoothness=v["L"], local_steps=v["tau"]),
}
FIG6 = CpfedParams(num_rounds=20, local_steps=10, num_clients=16, batch_size=64, clip_norm=1.0)
TRAINING = AveragingTraining(**PERIODIC, gradient_variance=1.0, client_size=2441)


test_published_value, test_every_paper_entry_is_covered = vectors(DISPATCH, "cp")


@pytest.mark.parametrize("secure_aggregation", [True, False])
def test_noise_falls_with_epsilon_and_inverts(secure_aggregation):
    noise_falls_and_inverts(cpfed, FIG6._replace(cohort_size=10, secure_aggregation=secure_aggregation))


def test_total_is_the_rounds_that_a_client_is_expected_to_join():
    for aggregated in (True, False):
        params = FIG6._replace(cohort_size=10, secure_aggregation=aggregated)
        total = cpfed.rho_total(params, noise_std=0.05)
        assert total == pytest.approx(20 * 10 / 16 * cpfed.rho_round(params, noise_std=0.05), rel=1e-13)


def test_round_cost_follows_from_the_sensitivity_of_the_sum():
    Delta = cpfed.upload_sensitivity(clip_norm=1.0, batch_size=64, client_lr=0.1, local_steps=10)
    std = np.sqrt(10 * 10) * 0.1 * 0.05  # √(rτ) η σ
    rho = cpfed.rho_round(FIG6._replace(cohort_size=10), noise_std=0.05)
    assert methods.zcdp_of_gaussian(sensitivity=Delta, noise_std=std) == pytest.approx(rho, rel=1e-13)


def test_baseline_with_equal_credit_needs_a_quarter_of_the_noise():
    plain, credited = (
        cpfed.noise_std(cpfed.dpsgd_params(FIG6, credit_sa=credit), epsilon=10, delta=1e-4)
        for credit in (False, True)
    )
    assert (plain, credited) == (pytest.approx(0.0733, abs=1e-4), pytest.approx(0.0183, abs=1e-4))  # C7
    assert plain / credited == pytest.approx(4)


def test_claim_reports_what_is_taken_for_granted():
    claim = cpfed.claim(FIG6._replace(cohort_size=10, colluders=1), noise_std=0.057951675688361695, delta=1e-4)
    assert claim.value == pytest.approx(10)
    failing = methods.failing(claim.conditions)
    assert len(failing) == 3
    assert "12.5 of 20" in failing[0]
    alone = CpfedParams(5, 9, 4, batch_size=1, clip_norm=1.0, cohort_size=4, secure_aggregation=False)
    assert not methods.failing(cpfed.conditions(alone))
    one_step = alone._replace(local_steps=1, secure_aggregation=True)
    assert not methods.failing(cpfed.conditions(one_step))
    one_client = alone._replace(num_clients=1, cohort_size=1, secure_aggregation=True)  # nobody else's noise
    assert not methods.failing(cpfed.conditions(one_client))
    (contracted,) = methods.failing(cpfed.conditions(alone._replace(secure_aggregation=True)))
    assert "τ = 9 local steps" in contracted


def test_learning_rate_condition_is_tight():
    for tau in (1, 5, 40):
        best = float(cpfed.max_client_lr(smoothness=3.0, local_steps=tau))
        kwargs = {"smoothness": 3.0, "local_steps": tau}
        assert all(holds for _, holds in cpfed.convergence_conditions(client_lr=best, **kwargs))
        assert not cpfed.convergence_conditions(client_lr=1.001 * best, **kwargs)[0][1]
    assert not cpfed.convergence_conditions(client_lr=1e-3, smoothness=1, local_steps=1, batch_size=64)[1][1]


def test_corrected_bound_only_shrinks_the_drift():
    printed, fixed = (cpfed.convergence_nonconvex(TRAINING, corrected=c) for c in (False, True))
    assert printed.privacy_drift == pytest.approx(6 * fixed.privacy_drift)
    assert printed.variance_drift == pytest.approx(6 * fixed.variance_drift)
    for term in ("optimisation", "privacy_noise", "gradient_variance"):
        assert printed[term] == fixed[term]
    assert sum(printed.values()) == printed.total


def test_one_local_step_has_no_drift():
    bound = cpfed.convergence_convex(TRAINING._replace(local_steps=1))
    assert bound.privacy_drift == bound.variance_drift == 0


def test_communication_factor():
    assert cpfed.communication_factor(cohort_size=10, num_clients=16, local_steps=10) == pytest.approx(0.0625)
    with pytest.raises(SpecError, match="cohort_size=17 exceeds num_clients=16"):
        cpfed.communication_factor(cohort_size=17, num_clients=16, local_steps=10)


def test_bounds_over_a_grid():
    bounds_fall_with_epsilon(cpfed, FIG6, TRAINING)


def federation(records, noise_std, *, cohort_size, local_steps, rate=0.1, trials=4000):
    """n clients with losses ‖θ − x‖²/2 over their records x, from θ = 0: the mean noisy gradient of the last step,
    and the models, of `trials` rounds."""
    rng = np.random.default_rng(0)
    n, m, d = records.shape
    models = np.zeros((trials, cohort_size, d))
    cohorts = rng.permuted(np.tile(np.arange(n), (trials, 1)), axis=1)[:, :cohort_size]
    mean = np.zeros((trials, d))
    for _ in range(local_steps):
        drawn = records[cohorts, rng.integers(m, size=cohorts.shape)]
        gradients = models - drawn + noise_std * rng.normal(size=drawn.shape)
        mean = gradients.mean(axis=1)
        models = models - rate * gradients
    return mean, models


def test_lemmas_5_to_7_bound_what_happens():
    rng = np.random.default_rng(1)
    n, m, d, r, sigma = 6, 40, 3, 4, 0.5
    records = rng.normal(size=(n, m, d)) + rng.normal(size=(n, 1, d))
    centres = records.mean(axis=1)
    beta = float(np.mean(np.sum((records - centres.mean(axis=0)) ** 2, axis=-1)))
    run = TRAINING._replace(num_params=d, noise_std=sigma, gradient_variance=beta, client_size=m, client_lr=0.1)
    assert sum(cpfed.sampling_variances(gradient_variance=beta, client_size=m)) == pytest.approx(beta)
    squares = np.sum(centres**2, axis=-1)  # ‖∇f_i‖² at the start

    mean, _ = federation(records, sigma, cohort_size=r, local_steps=1)
    variance = float(np.mean(np.sum((mean + centres.mean(axis=0)) ** 2, axis=-1)))
    assert variance <= cpfed.mean_gradient_variance(run, cohort_size=r, client_gradients_sq=squares)
    assert cpfed.skipped_clients(n, squares) == 0.0

    for step in (1, 3):
        _, models = federation(records, sigma, cohort_size=r, local_steps=step)
        error = float(np.mean(np.sum((models - models.mean(axis=1, keepdims=True)) ** 2, axis=-1)))
        fields = {"step": step, "cohort_size": r, "client_gradients_sq": step * squares}
        printed, corrected = (cpfed.network_error(run, **fields, corrected=each) for each in (False, True))
        assert error <= printed <= corrected
