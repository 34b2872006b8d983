"""CPFed: noise, claimed privacy and convergence, as printed.

Citation: R. Hu, Y. Gong, Y. Guo, "CPFed: Communication-Efficient and Privacy-Preserving Federated Learning",
arXiv 2003.13761, 2020.

| paper | code | | paper | code |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ (on the averaged gradient) | `noise_std` |
| T, τ, K = Tτ | `num_rounds`, `local_steps`, their product | | ρ | `rho` |
| B, m | `batch_size`, `client_size` | | L (Section V) | `clip_norm` |
| η | `client_lr` | | L, λ (Section VI) | `smoothness`, `strong_convexity` |
| d | `num_params` | | β (a variance) | `gradient_variance` |
| f(θ⁰)−f* | `initial_gap` | | | |

Deviations: C1 (the factor r/n "in expectation") and C2, G7 (the aggregation credit) stay as printed and are
reported as conditions. C6: `corrected=True` averages s² over a round as (τ−1)(2τ−1)/6, where the printed
bounds are 6 times looser in that term. C7: the DP-SGD baseline gets no aggregation credit as printed;
`credit_sa=True` gives it CPFed's. Section VI is stated for batches of one record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.core import Claim
from dither.papers.theory.common import (
    Condition,
    Float,
    check_cohort,
    check_positive,
    epsilon_from_zcdp,
    f64,
    zcdp_from_epsilon,
)

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


def noise_std(
    *,
    epsilon: Float,
    delta: Float,
    num_rounds: Float,
    local_steps: Float,
    num_clients: Float,
    batch_size: Float,
    clip_norm: Float,
    cohort_size: Float = 1,
    secure_aggregation: bool = True,
) -> Float:
    """σ = L√(2Tτ/(nρ))/B (Theorem 1 solved for σ). `cohort_size` matters only without secure aggregation."""
    rho = zcdp_from_epsilon(epsilon=epsilon, delta=delta)
    unit = rho_total(
        noise_std=1.0,
        num_rounds=num_rounds,
        local_steps=local_steps,
        num_clients=num_clients,
        batch_size=batch_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    return np.sqrt(unit / rho)


def dpsgd_noise_std(
    *,
    epsilon: Float,
    delta: Float,
    num_rounds: Float,
    batch_size: Float,
    clip_norm: Float,
    num_clients: Float = 1,
    credit_sa: bool = False,
) -> Float:
    """σ of the DP-SGD baseline (Section VII-C): one step a round, ρ split evenly over T rounds, Lemma 1.

    As printed, L√(2T/ρ)/B; `credit_sa` gives it the same 1/n as CPFed, its formula at τ = 1 (C7)."""
    return noise_std(
        epsilon=epsilon,
        delta=delta,
        num_rounds=num_rounds,
        local_steps=1,
        num_clients=num_clients if credit_sa else 1,
        batch_size=batch_size,
        clip_norm=clip_norm,
    )


# Privacy


def rho_round(
    *,
    noise_std: Float,
    local_steps: Float,
    batch_size: Float,
    clip_norm: Float,
    cohort_size: Float,
    secure_aggregation: bool = True,
) -> Float:
    """2τL²/(rB²σ²): zCDP of one round for a selected client (Section V); r is 1 without aggregation."""
    check_positive(noise_std=noise_std, local_steps=local_steps, cohort_size=cohort_size)
    sigma, tau, r = f64(noise_std, local_steps, cohort_size if secure_aggregation else 1)
    Delta = step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)
    return tau * Delta**2 / (2.0 * r * sigma**2)


def rho_total(
    *,
    noise_std: Float,
    num_rounds: Float,
    local_steps: Float,
    num_clients: Float,
    batch_size: Float,
    clip_norm: Float,
    cohort_size: Float = 1,
    secure_aggregation: bool = True,
) -> Float:
    """2TτL²/(nB²σ²): T rounds, each counted r/n (Theorem 1); r times that without aggregation."""
    check_positive(num_rounds=num_rounds)
    if not secure_aggregation:
        check_cohort(cohort_size, num_clients)
    T, n, r = f64(num_rounds, num_clients, 1 if secure_aggregation else cohort_size)
    one = rho_round(
        noise_std=noise_std,
        local_steps=local_steps,
        batch_size=batch_size,
        clip_norm=clip_norm,
        cohort_size=1,
    )
    return T * r / n * one  # with aggregation the round's 1/r cancels the participation's r


def epsilon_of_noise(
    *,
    noise_std: Float,
    delta: Float,
    num_rounds: Float,
    local_steps: Float,
    num_clients: Float,
    batch_size: Float,
    clip_norm: Float,
    cohort_size: Float = 1,
    secure_aggregation: bool = True,
) -> Float:
    """ε = ρ + 2√(ρ ln(1/δ)) (Theorem 1, eq (13)): the inverse of `noise_std`."""
    rho = rho_total(
        noise_std=noise_std,
        num_rounds=num_rounds,
        local_steps=local_steps,
        num_clients=num_clients,
        batch_size=batch_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    return epsilon_from_zcdp(rho=rho, delta=delta)


def conditions(
    *,
    num_rounds: int,
    local_steps: int,
    num_clients: int,
    cohort_size: int,
    colluders: int = 0,
    secure_aggregation: bool = True,
) -> tuple[Condition, ...]:
    """What Theorem 1 takes for granted. All hold when every client takes part and sends in the open.

    One local step leaves nothing to contract the others' noise; a cohort of one gets no credit for it."""
    expected = num_rounds * cohort_size / num_clients
    listed: list[Condition] = [
        (
            f"Theorem 1: every client takes part at most T r/n = {expected:.4g} of {num_rounds} times (C1)",
            cohort_size == num_clients,
        )
    ]
    if secure_aggregation:
        listed.append((f"Section V: colluders = {colluders} is 0 (C2)", colluders == 0))
        kept = local_steps == 1 or cohort_size == 1
        listed.append((f"Section V: τ = {local_steps} local steps keep all of the others' noise (G7)", kept))
    return tuple(listed)


def claim(
    *,
    noise_std: float,
    delta: float,
    num_rounds: int,
    local_steps: int,
    num_clients: int,
    batch_size: int,
    clip_norm: float,
    cohort_size: int,
    colluders: int = 0,
    secure_aggregation: bool = True,
) -> Claim:
    """The paper's ε of the run, with what it takes for granted."""
    eps = epsilon_of_noise(
        noise_std=noise_std,
        delta=delta,
        num_rounds=num_rounds,
        local_steps=local_steps,
        num_clients=num_clients,
        batch_size=batch_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    assumed = conditions(
        num_rounds=num_rounds,
        local_steps=local_steps,
        num_clients=num_clients,
        cohort_size=cohort_size,
        colluders=colluders,
        secure_aggregation=secure_aggregation,
    )
    return Claim(float(eps), "run", delta, "Theorem 1, eq (13)", assumed)


# Convergence


class ConvergenceBound(NamedTuple):
    """Theorem 2 or 3, term by term; the noise and the variance each at once and through local drift."""

    optimisation: Float
    privacy_noise: Float
    gradient_variance: Float
    privacy_drift: Float
    variance_drift: Float

    @property
    def total(self) -> Float:
        """The bound: the sum of the terms."""
        return sum(self)


def _terms(
    start: Float,
    scale: Float,
    client_lr: Float,
    smoothness: Float,
    local_steps: Float,
    num_params: Float,
    noise_std: Float,
    gradient_variance: Float,
    client_size: Float,
    corrected: bool,
) -> ConvergenceBound:
    """start + scale·(4ηL(τ−1)(2τ−1) + 1)(dσ² + β − β/m), taken apart."""
    eta, L, tau, d, sigma, beta, m = f64(
        client_lr, smoothness, local_steps, num_params, noise_std, gradient_variance, client_size
    )
    drift = (4.0 / 6.0 if corrected else 4.0) * eta * L * (tau - 1.0) * (2.0 * tau - 1.0)  # C6
    noise, variance = d * sigma**2, beta - beta / m
    return ConvergenceBound(
        start, scale * noise, scale * variance, scale * drift * noise, scale * drift * variance
    )


def convergence_convex(
    *,
    client_lr: Float,
    smoothness: Float,
    strong_convexity: Float,
    local_steps: Float,
    num_rounds: Float,
    num_params: Float,
    noise_std: Float,
    gradient_variance: Float,
    client_size: Float,
    initial_gap: Float,
    corrected: bool = False,
) -> ConvergenceBound:
    """Theorem 2, eq (22): bound on the mean over iterations of E f(θ^k) − f*."""
    check_positive(client_lr=client_lr, strong_convexity=strong_convexity, num_rounds=num_rounds)
    eta, L, lam, tau, T, gap = f64(client_lr, smoothness, strong_convexity, local_steps, num_rounds, initial_gap)
    start = (1.0 - eta * lam) / (T * tau * eta * lam) * gap
    return _terms(
        start,
        eta * L / (2.0 * lam),  # H(τ, σ²)
        client_lr,
        smoothness,
        local_steps,
        num_params,
        noise_std,
        gradient_variance,
        client_size,
        corrected,
    )


def convergence_nonconvex(
    *,
    client_lr: Float,
    smoothness: Float,
    local_steps: Float,
    num_rounds: Float,
    num_params: Float,
    noise_std: Float,
    gradient_variance: Float,
    client_size: Float,
    initial_gap: Float,
    corrected: bool = False,
) -> ConvergenceBound:
    """Theorem 3, eq (27): bound on the mean over iterations of E‖∇f‖²."""
    check_positive(client_lr=client_lr, num_rounds=num_rounds)
    eta, L, tau, T, gap = f64(client_lr, smoothness, local_steps, num_rounds, initial_gap)
    return _terms(
        2.0 * gap / (eta * T * tau),
        eta * L,  # P(τ, σ²)
        client_lr,
        smoothness,
        local_steps,
        num_params,
        noise_std,
        gradient_variance,
        client_size,
        corrected,
    )


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
