"""CPFed: periodic averaging, noise on every gradient, secure aggregation, zCDP.

R. Hu, Y. Gong, Y. Guo, "CPFed: Communication-Efficient and Privacy-Preserving Federated Learning",
arXiv 2003.13761, 2020.

| paper | here | | paper | here |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ | `noise_std`, on the averaged gradient |
| T, τ, K = Tτ | `num_rounds`, `local_steps`, their product | | ρ | `rho` |
| B, m | `batch_size`, `client_size` | | L (Section V, Lipschitz) | `clip_norm`, per example |
| η | `client_lr` | | L, λ (Section VI) | `smoothness`, `strong_convexity` |
| d | `num_params` | | β (a variance) | `gradient_variance` |
| f(θ⁰)−f* | `initial_gap` | | | |

Deviations: none in the algorithm. C1 (the factor r/n "in expectation") and C2, G7 (the aggregation credit) stay as
printed and are reported as conditions of the claim; C3 says what is proved. C6: `corrected=True` averages s² over
a round as (τ−1)(2τ−1)/6, where the printed bounds are 6 times looser in that term. C7: the DP-SGD baseline gets
no aggregation credit as printed; `credit_sa=True` gives it CPFed's. Section VI is for batches of one record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither import methods
from dither.methods import BoundTerms, Condition, Float, check_cohort, check_positive, f64, local, scalar
from dither.models import Model
from dither.spec import METHODS
from dither.types import Claim, Prepared, PrivacyPlan

OPTIONS = METHODS["cpfed"].options
SOURCE = "CPFed Corollary 1; errata G7a"

WHY = (
    "the claim averages participation instead of counting it (C1) and credits all of the other clients' noise, "
    "although their later steps contract it (G7); the proof against a server that sees every upload uses the "
    "sampling of records, which the paper ignores (C3)"
)


class CpfedParams(NamedTuple):
    """The quantities of Theorem 1. `cohort_size` matters only without secure aggregation."""

    num_rounds: Float
    local_steps: Float
    num_clients: Float
    batch_size: Float
    clip_norm: Float
    cohort_size: Float = 1
    secure_aggregation: bool = True
    colluders: int = 0


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """CPFed for one federation (Algorithm 1): τ noisy steps, then the mean of r local models."""
    params = params_of(plan)._replace(secure_aggregation=bool(plan.options["aggregation_credit"]))
    plan = plan._replace(ignores_counts=True)
    return local.noisy_averaging(model, plan, params, source=SOURCE, noise_std=noise_std, claim=claim)


def params_of(plan: PrivacyPlan) -> CpfedParams:
    """The quantities of Theorem 1, with the credit of secure aggregation."""
    clients = (plan.num_clients, plan.batch_size, plan.clip_norm, plan.cohort_size)
    return CpfedParams(plan.num_rounds, plan.local_steps, *clients, colluders=plan.colluders)


# Noise


def step_sensitivity(*, clip_norm: Float, batch_size: Float) -> Float:
    """2L/B: one averaged gradient with per-example clipping (Corollary 1)."""
    check_positive(clip_norm=clip_norm, batch_size=batch_size)
    L, B = f64(clip_norm, batch_size)
    return 2.0 * L / B


def upload_sensitivity(*, clip_norm: Float, batch_size: Float, client_lr: Float, local_steps: Float) -> Float:
    """2ητL/B: the sum of uploads (Lemma 4). Compares gradients at equal iterates (G7)."""
    eta, tau = f64(client_lr, local_steps)
    return eta * tau * step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)


def noise_std(params: CpfedParams, *, epsilon: Float, delta: Float) -> Float:
    """σ = L√(2Tτ/(nρ))/B (Theorem 1 solved for σ)."""
    return np.sqrt(rho_total(params, noise_std=1.0) / methods.zcdp_from_epsilon(epsilon=epsilon, delta=delta))


def dpsgd_params(params: CpfedParams, *, credit_sa: bool = False) -> CpfedParams:
    """The DP-SGD baseline (Section VII-C): one step a round, ρ split evenly over T rounds, Lemma 1.

    As printed nobody else's noise counts and every round does: Theorem 1 with n = r = 1, σ = L√(2T/ρ)/B.
    `credit_sa` gives it the same 1/n as CPFed (C7)."""
    alone = {} if credit_sa else {"num_clients": 1, "cohort_size": 1}
    return params._replace(local_steps=1, secure_aggregation=credit_sa, **alone)


# Privacy


def rho_round(params: CpfedParams, *, noise_std: Float) -> Float:
    """2τL²/(rB²σ²): zCDP of one round for a selected client (Section V); r is 1 without aggregation."""
    check_positive(noise_std=noise_std, local_steps=params.local_steps, cohort_size=params.cohort_size)
    sigma, tau, r = f64(noise_std, params.local_steps, params.cohort_size if params.secure_aggregation else 1)
    Delta = step_sensitivity(clip_norm=params.clip_norm, batch_size=params.batch_size)
    return tau * Delta**2 / (2.0 * r * sigma**2)


def rho_total(params: CpfedParams, *, noise_std: Float) -> Float:
    """2TτL²/(nB²σ²): T rounds, each counted r/n (Theorem 1); r times that without aggregation."""
    check_positive(num_rounds=params.num_rounds)
    if not params.secure_aggregation:
        check_cohort(params.cohort_size, params.num_clients)
    T, n, r = f64(params.num_rounds, params.num_clients, 1 if params.secure_aggregation else params.cohort_size)
    # With aggregation the round's 1/r cancels the participation's r.
    return T * r / n * rho_round(params._replace(cohort_size=1), noise_std=noise_std)


def epsilon_of_noise(params: CpfedParams, *, noise_std: Float, delta: Float) -> Float:
    """ε = ρ + 2√(ρ ln(1/δ)) (Theorem 1, eq (13)): the inverse of `noise_std`."""
    return methods.epsilon_from_zcdp(rho=rho_total(params, noise_std=noise_std), delta=delta)


def conditions(params: CpfedParams) -> tuple[Condition, ...]:
    """What Theorem 1 takes for granted. All hold when every client takes part and sends in the open.

    One local step leaves nothing to contract the others' noise; a cohort of one gets no credit for it."""
    T, tau, r, n = params.num_rounds, params.local_steps, params.cohort_size, params.num_clients
    listed: list[Condition] = [
        (f"Theorem 1: every client takes part at most T r/n = {T * r / n:.4g} of {T} times (C1)", r == n)
    ]
    if params.secure_aggregation:
        listed.append((f"Section V: colluders = {params.colluders} is 0 (C2)", params.colluders == 0))
        kept = tau == 1 or r == 1
        listed.append((f"Section V: τ = {tau} local steps keep all of the others' noise (G7)", kept))
    return tuple(listed)


def claim(params: CpfedParams, *, noise_std: float, delta: float) -> Claim:
    """The paper's ε of the run, with what it takes for granted."""
    epsilon = float(epsilon_of_noise(params, noise_std=noise_std, delta=delta))
    return Claim(epsilon, "run", delta, "Theorem 1, eq (13)", conditions(params))


# Convergence


class AveragingTraining(NamedTuple):
    """The quantities of Theorems 2 and 3, and those of Concentrated DP-FL. Only convex bounds need strong
    convexity; CPFed's need the size of a client, Concentrated's those of a batch and of a cohort."""

    client_lr: Float
    smoothness: Float
    local_steps: Float
    num_rounds: Float
    num_params: Float
    noise_std: Float
    gradient_variance: Float
    initial_gap: Float
    client_size: Float = np.nan
    batch_size: Float = np.nan
    cohort_size: Float = np.nan
    strong_convexity: Float = 0.0


def sampling_variances(*, gradient_variance: Float, client_size: Float) -> tuple[Float, Float]:
    """(β/m, β − β/m) of Lemma 5: E‖∇f_i − ∇f‖², and E‖g − ∇f_i‖² of one record's gradient."""
    beta, m = f64(gradient_variance, client_size)
    return beta / m, beta - beta / m


def mean_gradient_variance(
    training: AveragingTraining, *, cohort_size: Float, client_gradients_sq: Float
) -> Float:
    """Lemma 6, eq (18): dσ² + β − β/m + 4(n−r)²/n³ Σ_i ‖∇f_i‖², the variance of a cohort's mean noisy gradient.

    Clients lie on the last axis of `client_gradients_sq`, which holds ‖∇f_i‖² of all n."""
    return _step_variance(training) + skipped_clients(cohort_size, client_gradients_sq)


def network_error(
    training: AveragingTraining,
    *,
    step: Float,
    cohort_size: Float,
    client_gradients_sq: Float,
    corrected: bool = False,
) -> Float:
    """Lemma 7, eq (19): how far local models are from their mean after `step` = s steps of a round, mean square.

    `client_gradients_sq` holds Σ_{h<s} ‖∇f_i‖² of all n clients on its last axis. `corrected` takes 4s²η² before
    dσ² + β − β/m, as the proof has, in place of 2sη² (C6)."""
    s, eta, r, squares = f64(step, training.client_lr, cohort_size, client_gradients_sq)
    n = squares.shape[-1]
    factor = 4.0 * s**2 if corrected else 2.0 * s
    gradients = 4.0 * s * (3.0 * n**2 + 2.0 * (n - r) ** 2) / n**3 * squares.sum(axis=-1)
    return scalar(eta**2 * (factor * _step_variance(training) + gradients))


def skipped_clients(cohort_size: Float, client_gradients_sq: Float) -> Float:
    """4(n−r)²/n³ Σ_i ‖∇f_i‖²: what drawing r of n clients adds to the variance (Lemma 6)."""
    r, squares = f64(cohort_size, client_gradients_sq)
    n = squares.shape[-1]
    check_cohort(cohort_size, n)
    return scalar(4.0 * (n - r) ** 2 / n**3 * squares.sum(axis=-1))


def _step_variance(training: AveragingTraining) -> Float:
    """dσ² + β − β/m: noise and sampling of one record's gradient."""
    d, sigma = f64(training.num_params, training.noise_std)
    sampled = sampling_variances(gradient_variance=training.gradient_variance, client_size=training.client_size)
    return d * sigma**2 + sampled[1]


def _terms(start: Float, scale: Float, training: AveragingTraining, corrected: bool) -> BoundTerms:
    """start + scale·(4ηL(τ−1)(2τ−1) + 1)(dσ² + β − β/m), taken apart."""
    eta, L, tau = f64(training.client_lr, training.smoothness, training.local_steps)
    d, sigma, m = f64(training.num_params, training.noise_std, training.client_size)
    (beta,) = f64(training.gradient_variance)
    drift = (4.0 / 6.0 if corrected else 4.0) * eta * L * (tau - 1.0) * (2.0 * tau - 1.0)  # C6
    noise, variance = d * sigma**2, sampling_variances(gradient_variance=beta, client_size=m)[1]
    return BoundTerms(
        optimisation=start,
        privacy_noise=scale * noise,
        gradient_variance=scale * variance,
        privacy_drift=scale * drift * noise,
        variance_drift=scale * drift * variance,
    )


def convergence_convex(training: AveragingTraining, *, corrected: bool = False) -> BoundTerms:
    """Theorem 2, eq (22): bound on the mean over iterations of E f(θ^k) − f*."""
    t = training
    check_positive(client_lr=t.client_lr, strong_convexity=t.strong_convexity, num_rounds=t.num_rounds)
    eta, L, lam, tau = f64(t.client_lr, t.smoothness, t.strong_convexity, t.local_steps)
    T, gap = f64(t.num_rounds, t.initial_gap)
    start = (1.0 - eta * lam) / (T * tau * eta * lam) * gap
    return _terms(start, eta * L / (2.0 * lam), training, corrected)  # H(τ, σ²)


def convergence_nonconvex(training: AveragingTraining, *, corrected: bool = False) -> BoundTerms:
    """Theorem 3, eq (27): bound on the mean over iterations of E‖∇f‖²."""
    check_positive(client_lr=training.client_lr, num_rounds=training.num_rounds)
    eta, L, tau = f64(training.client_lr, training.smoothness, training.local_steps)
    T, gap = f64(training.num_rounds, training.initial_gap)
    return _terms(2.0 * gap / (eta * T * tau), eta * L, training, corrected)  # P(τ, σ²)


def max_client_lr(*, smoothness: Float, local_steps: Float) -> Float:
    """The largest η with 5ηL + 20τ²η²L² <= 1 (Theorems 2-3)."""
    check_positive(smoothness=smoothness, local_steps=local_steps)
    L, tau = f64(smoothness, local_steps)
    return (-5.0 + np.sqrt(25.0 + 80.0 * tau**2)) / (40.0 * tau**2 * L)


def convergence_conditions(
    *, client_lr: float, smoothness: float, local_steps: float, batch_size: float = 1
) -> tuple[Condition, ...]:
    """Theorems 2-3: the learning rate, and batches of one record."""
    eta, L, tau = client_lr, smoothness, local_steps
    left = 5.0 * eta * L + 20.0 * tau**2 * eta**2 * L**2
    limit = float(max_client_lr(smoothness=L, local_steps=tau))
    return (
        (
            f"Theorems 2-3: 5ηL + 20τ²η²L² = {left:.4g} <= 1 (η = {eta:.4g}, at most {limit:.4g})",
            left <= 1.0 + 1e-12,
        ),
        (f"Section VI: batch_size = {batch_size:g} is 1", batch_size == 1),
    )


def communication_factor(*, cohort_size: Float, num_clients: Float, local_steps: Float) -> Float:
    """r/(nτ): uploads relative to all clients sending after every step (Section VI)."""
    check_cohort(cohort_size, num_clients)
    r, n, tau = f64(cohort_size, num_clients, local_steps)
    return r / (n * tau)
