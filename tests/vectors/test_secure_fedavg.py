"""Secure FedAvg's formulas against the published numbers and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from dither import accounting
from dither.errors import ConfigError, SpecError
from dither.methods import secure_fedavg as sf
from dither.methods.secure_fedavg import SecureFedavgParams, SecureFedavgTraining
from dither.types import Claim

from .published import SECURE_FEDAVG, entries, vectors

RATES = {"client_lr": 0.2, "lr_decay": 0.01}  # Section 4.1
PAPER = SecureFedavgParams(local_steps=10, batch_size=1, client_size=325)
START = {"strong_convexity": 0.1, "num_steps": 1000, "initial_distance_sq": 1.0}


def params(v):
    return SecureFedavgParams(v["Q"], v["b"], v["n_k"])


def sigma(v):
    eta = sf.learning_rate(v["t"] + 1, **RATES)
    return sf.noise_std(params(v), epsilon=v["eps"], delta=v["delta"], clip_norm=v["G"], next_lr=eta)


def training(v):
    if "sum_p2g2" in v:
        spread = v["sum_p2g2"]
    else:
        weights = np.full(v["n_terms_in_sum"], v["p_k"])
        spread = sf.weighted_variance(weights=weights, gradient_variances=v["gamma_k2"])
    sizes = (v["L"], v.get("Q", 1), v["b"], v["G"], v["M"], v["n"])
    return SecureFedavgTraining(*sizes, v["eps"], v["delta"], v["K"], spread, v["Gamma"], v.get("N", 0))


DISPATCH = {
    "sf.sigma.*": sigma,
    "sf.noise_multiplier.*": lambda v: sf.noise_multiplier(params(v), epsilon=v["eps"], delta=v["delta"]),
    "sf.base_eps.*": lambda v: sf.base_epsilon(params(v), epsilon=v["eps"]),
    "sf.eq8_max_eps0": lambda v: sf.MAX_BASE_EPSILON,
    "sf.thm1.B": lambda v: sf.constants(training(v)).privacy_noise,
    "sf.thm1.C": lambda v: sf.constants(training(v)).client_sampling,
    "sf.eq13.Q*": lambda v: sf.communication_rounds(training(v)).total,
    "sf.eq13.argmin_Q": lambda v: sf.optimal_local_steps(training(v)),
}


test_published_value, test_every_paper_entry_is_covered = vectors(DISPATCH, "sf")


def test_inputs_recorded_beside_the_verified_values():
    for entry in entries("sf"):
        v = entry["inputs"]
        if "p" in v and "Q" in v:
            assert sf.inclusion_probability(params(v)) == pytest.approx(v["p"], rel=1e-12)
        if "eps0" in v:
            eps0 = accounting.unamplified_epsilon(v["eps"], v["p"])
            assert eps0 == pytest.approx(v["eps0"], rel=1e-12)
            assert accounting.amplified_epsilon(eps0, v["p"]) == pytest.approx(v["eps"], rel=1e-9)
        if "Delta" in v:
            Delta = sf.sensitivity(local_steps=v["Q"], clip_norm=v["G"], next_lr=v["eta_t_plus_1"])
            assert Delta == pytest.approx(v["Delta"], rel=1e-12)
        if "z_true" in v:
            rates, _ = sf.round_learning_rates(0, local_steps=v["Q"], **RATES)
            exact = sf.sensitivity_exact(clip_norm=v["G"], round_lrs=rates)
            assert sigma(v | {"eps": v["eps_claimed"]}) / exact == pytest.approx(v["z_true"], rel=1e-12)


def test_max_base_epsilon_is_the_root():
    from scipy.special import lambertw

    root = -0.5 - lambertw(-np.exp(-0.5) / 2, -1).real
    assert pytest.approx(root, rel=1e-14) == sf.MAX_BASE_EPSILON


@pytest.mark.parametrize("round_index", [0, 1, 30])
@pytest.mark.parametrize("local_steps", [1, 10, 100])
def test_lemma1_covers_the_exact_worst_case(round_index, local_steps):
    rates, after = sf.round_learning_rates(round_index, local_steps=local_steps, **RATES)
    assert len(rates) == local_steps
    assert rates[0] == pytest.approx(0.2 / (1 + 0.01 * round_index * local_steps))
    ((text, holds),) = sf.lemma1_conditions(round_lrs=rates, next_lr=after)
    assert holds, text  # E7: holds for Q <= 100
    printed = sf.sensitivity(local_steps=local_steps, clip_norm=2.0, next_lr=after)
    assert sf.sensitivity_exact(clip_norm=2.0, round_lrs=rates) <= printed


def test_lemma1_condition_fails_beyond_a_hundred_steps():
    rates, after = sf.round_learning_rates(0, local_steps=101, **RATES)
    assert not sf.lemma1_conditions(round_lrs=rates, next_lr=after)[0][1]


def test_noise_falls_with_epsilon_and_inverts():
    epsilon = np.linspace(0.1, 5, 50)
    std = sf.noise_std(PAPER, epsilon=epsilon, delta=1e-4, clip_norm=2.0, next_lr=0.1)
    assert np.all(np.diff(std) < 0)
    Delta = sf.sensitivity(local_steps=10, clip_norm=2.0, next_lr=0.1)
    back = sf.epsilon_of_noise(PAPER, noise_std=std, sensitivity=Delta, delta=1e-4)
    np.testing.assert_allclose(back, epsilon, rtol=1e-12)


def test_too_small_sampling_rate_names_q_delta_and_the_fix():
    with pytest.raises(SpecError, match=r"q=1e-05 and 0.8\*delta=8e-05: lower delta below 1.25e-05") as caught:
        sf.noise_multiplier(SecureFedavgParams(1, 1, 100_000), epsilon=1.0, delta=1e-4)
    assert isinstance(caught.value, ConfigError)


def test_claim_reports_the_broken_step_of_the_proof():
    std = sf.noise_std(PAPER, epsilon=0.5, delta=1e-4, clip_norm=2.0, next_lr=0.1)
    claim = sf.claim(PAPER, noise_std=std, sensitivity=8.0, delta=1e-4)
    assert isinstance(claim, Claim)
    assert claim.unit == "message"
    assert claim.value == pytest.approx(0.5)
    broken = [text for text, holds in claim.conditions if not holds]
    assert any("eq (8)" in text and "8.125" in text for text in broken)


def test_conditions_of_eq9_flip_at_their_limits():
    q = 10 / 325
    for base, in_eq8, classical in (
        (0.999, True, True),
        (1.001, True, False),
        (1.2564, True, False),
        (1.2565, False, False),
    ):
        found = sf.conditions(PAPER, epsilon=2 * q * base, delta=1e-4)
        assert [holds for _, holds in found] == [in_eq8, classical, True, True]
    for steps, holds in ((325, True), (326, False)):  # of one record each: q <= 1
        assert (
            sf.conditions(PAPER._replace(local_steps=steps, batch_size=1), epsilon=1.0, delta=1e-4)[-1][1] is holds
        )


def test_theorem1_terms_add_up_and_noise_falls_with_epsilon():
    bound = sf.convergence(SECURE_FEDAVG, **START)
    kappa, L, mu, T = 10.0, 1.0, 0.1, 1000
    A = 0.01 / 10 + 8 * 16 * 4 + 6 * 0.1
    parts = sf.constants(SECURE_FEDAVG)
    assert parts.gradient_variance + parts.local_drift + parts.heterogeneity == pytest.approx(A)
    whole = 2 * kappa / (T + 80) * ((A + parts.privacy_noise + parts.client_sampling) / mu + 2 * L)
    assert bound.total == pytest.approx(whole, rel=1e-12)
    assert sf.convergence(SECURE_FEDAVG._replace(epsilon=5.0), **START).total < bound.total
    assert sf.convergence(SECURE_FEDAVG._replace(cohort_size=100), **START).client_sampling == 0


def test_theorem1_conditions():
    base = {"smoothness": 1, "strong_convexity": 0.1, "batch_size": 1, "num_records": 32561, "delta": 1e-4}
    assert all(holds for _, holds in sf.convergence_conditions(local_steps=5, **base))
    texts = [t for t, holds in sf.convergence_conditions(local_steps=83, **base) if not holds]
    assert len(texts) == 2
    assert "Q = 83" in texts[0]


def test_bounds_over_a_grid():
    epsilon, steps = np.meshgrid(np.linspace(0.1, 10, 200), np.arange(1, 201))
    total = sf.convergence(SECURE_FEDAVG._replace(epsilon=epsilon, local_steps=steps), **START).total
    assert total.shape == (200, 200)
    one = SECURE_FEDAVG._replace(epsilon=epsilon[3, 7], local_steps=steps[3, 7])
    assert total[3, 7] == pytest.approx(sf.convergence(one, **START).total, rel=1e-13)
