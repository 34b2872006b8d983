"""Concentrated DP federated learning: noise, claimed privacy and convergence, as printed and corrected.

Citation: R. Hu, Y. Guo, Y. Gong, "Concentrated Differentially Private Federated Learning With Performance
Analysis", IEEE Open Journal of the Computer Society, vol. 2, 2021, doi 10.1109/OJCS.2021.3099108.

| paper | code | | paper | code |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ (on the averaged gradient) | `noise_std` |
| T, τ, K = Tτ | `num_rounds`, `local_steps`, their product | | ρ | `rho` |
| γ, m | `batch_size`, `client_size` | | G | `clip_norm` |
| C_i | `participations` | | L, λ | `smoothness`, `strong_convexity` |
| η | `client_lr` | | β² | `gradient_variance` |
| d | `num_params` | | f(θ⁰)−f* | `initial_gap` |

Deviations: D1, G7 (the aggregation credit) and D2 (fractional epochs) stay as printed and are reported as
conditions; `record_uses` counts whole uses. D4: the DP-DSGD baseline's n is an argument, so that r can be
given. D5: `corrected=True` removes the unexplained 1/2 of eq (22) and restores Lemma 7's factor 4 in the
learning-rate condition. D6: equal participation is only possible up to rounding, `participation_bounds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.core import Claim
from dither.errors import SpecError
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
    """2G/γ: one averaged gradient with per-example clipping (Corollary 1)."""
    check_positive(clip_norm=clip_norm, batch_size=batch_size)
    G, gamma = f64(clip_norm, batch_size)
    return 2.0 * G / gamma


def noise_multiplier(*, noise_std: Float, clip_norm: Float, batch_size: Float) -> Float:
    """σγ/(2G): noise over the sensitivity of one step."""
    (sigma,) = f64(noise_std)
    return sigma / step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)


def expected_participations(*, num_rounds: Float, cohort_size: Float, num_clients: Float) -> Float:
    """E[C_i] = T r/n (Section V)."""
    check_cohort(cohort_size, num_clients)
    T, r, n = f64(num_rounds, cohort_size, num_clients)
    return T * r / n


def participation_bounds(*, num_rounds: int, cohort_size: int, num_clients: int) -> tuple[int, int]:
    """(⌊T r/n⌋, ⌈T r/n⌉): what a balanced design can give every client (D6)."""
    check_cohort(cohort_size, num_clients)
    slots = num_rounds * cohort_size
    return slots // num_clients, -(-slots // num_clients)


def noise_std(
    *,
    epsilon: Float,
    delta: Float,
    participations: Float,
    local_steps: Float,
    batch_size: Float,
    client_size: Float,
    clip_norm: Float,
    cohort_size: Float,
    secure_aggregation: bool = True,
) -> Float:
    """σ = G√(2C_iτ/(r m γ ρ)) (Theorem 1 solved for σ); r counts as 1 without secure aggregation."""
    rho = zcdp_from_epsilon(epsilon=epsilon, delta=delta)
    unit = rho_total(
        noise_std=1.0,
        participations=participations,
        local_steps=local_steps,
        batch_size=batch_size,
        client_size=client_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    return np.sqrt(unit / rho)


def dpdsgd_noise_std(
    *,
    epsilon: Float,
    delta: Float,
    participations: Float,
    batch_size: Float,
    clip_norm: Float,
    credited_clients: Float,
) -> Float:
    """σ = G√(2C_i/(n ρ))/γ of the DP-DSGD baseline (Section VII-C).

    `credited_clients` is n as printed, or r, which its derivation gives (D4)."""
    check_positive(participations=participations, credited_clients=credited_clients)
    C_i, n = f64(participations, credited_clients)
    Delta = step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)
    return Delta * np.sqrt(C_i / (2.0 * n * zcdp_from_epsilon(epsilon=epsilon, delta=delta)))


# Privacy


def rho_total(
    *,
    noise_std: Float,
    participations: Float,
    local_steps: Float,
    batch_size: Float,
    client_size: Float,
    clip_norm: Float,
    cohort_size: Float,
    secure_aggregation: bool = True,
) -> Float:
    """ρ_i = 2C_iτG²/(r m γ σ²): C_i rounds of τγ/m epochs, each one step's 2G²/(γ²σ²) (Lemmas 1-3)."""
    check_positive(noise_std=noise_std, participations=participations, local_steps=local_steps)
    check_positive(client_size=client_size, cohort_size=cohort_size)
    sigma, C_i, tau, gamma, m = f64(noise_std, participations, local_steps, batch_size, client_size)
    (r,) = f64(cohort_size if secure_aggregation else 1)
    step = step_sensitivity(clip_norm=clip_norm, batch_size=batch_size) ** 2 / (2.0 * sigma**2)
    return C_i * (tau * gamma / m) * step / r


def epsilon_of_noise(
    *,
    noise_std: Float,
    delta: Float,
    participations: Float,
    local_steps: Float,
    batch_size: Float,
    client_size: Float,
    clip_norm: Float,
    cohort_size: Float,
    secure_aggregation: bool = True,
) -> Float:
    """ε_i = ρ_i + 2√(ρ_i ln(1/δ)) (Theorem 1, eq (10)): the inverse of `noise_std`."""
    rho = rho_total(
        noise_std=noise_std,
        participations=participations,
        local_steps=local_steps,
        batch_size=batch_size,
        client_size=client_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    return epsilon_from_zcdp(rho=rho, delta=delta)


def dpdsgd_epsilon_of_noise(
    *,
    noise_std: Float,
    delta: Float,
    participations: Float,
    batch_size: Float,
    clip_norm: Float,
    credited_clients: Float,
) -> Float:
    """The baseline's claimed ε, ρ = 2C_iG²/(nγ²σ²) (Section VII-C): the inverse of `dpdsgd_noise_std`."""
    check_positive(noise_std=noise_std, participations=participations, credited_clients=credited_clients)
    sigma, C_i, n = f64(noise_std, participations, credited_clients)
    Delta = step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)
    return epsilon_from_zcdp(rho=C_i * Delta**2 / (2.0 * n * sigma**2), delta=delta)


def record_uses(
    *,
    participations: int,
    local_steps: int,
    batch_size: int,
    client_size: int,
    drop_last: bool = True,
    reshuffle_each_round: bool = False,
) -> int:
    """How often one record can be used at most, in whole uses (D2).

    One shuffled order consumed across rounds: ⌈C_iτ/⌊m/γ⌋⌉ when the partial last batch is dropped,
    ⌈C_iτγ/m⌉ when it is kept. A fresh shuffle every round: C_i times the uses of one round."""
    check_positive(participations=participations, local_steps=local_steps, batch_size=batch_size)
    if batch_size > client_size:
        raise SpecError(f"batch_size={batch_size} exceeds client_size={client_size}")
    rounds, steps = (participations, local_steps) if reshuffle_each_round else (1, participations * local_steps)
    once = -(-steps // (client_size // batch_size)) if drop_last else -(-steps * batch_size // client_size)
    return rounds * once


def conditions(
    *,
    local_steps: int,
    batch_size: int,
    client_size: int,
    cohort_size: int,
    colluders: int = 0,
    secure_aggregation: bool = True,
) -> tuple[Condition, ...]:
    """What Theorem 1 takes for granted, with the numbers of this setting."""
    whole = client_size % batch_size == 0
    epochs = local_steps * batch_size / client_size
    listed: list[Condition] = [
        (f"Section V: batch_size={batch_size} divides client_size={client_size} (D2)", whole),
        (
            f"Theorem 1: τγ/m = {epochs:.4g} is a whole number of epochs (D2)",
            whole and local_steps % (client_size // batch_size) == 0,
        ),
    ]
    if secure_aggregation:
        listed.append((f"threat model: colluders = {colluders} is 0 (D1)", colluders == 0))
        real = cohort_size == 1 or (local_steps == 1 and batch_size == client_size)
        listed.append(("Section V: the upload's noise variance is mτη²σ²/γ (D1, G7)", real))
    return tuple(listed)


def claim(
    *,
    noise_std: float,
    delta: float,
    participations: float,
    local_steps: int,
    batch_size: int,
    client_size: int,
    clip_norm: float,
    cohort_size: int,
    colluders: int = 0,
    secure_aggregation: bool = True,
) -> Claim:
    """The paper's ε_i of the run for a client that takes part `participations` times."""
    eps = epsilon_of_noise(
        noise_std=noise_std,
        delta=delta,
        participations=participations,
        local_steps=local_steps,
        batch_size=batch_size,
        client_size=client_size,
        clip_norm=clip_norm,
        cohort_size=cohort_size,
        secure_aggregation=secure_aggregation,
    )
    assumed = conditions(
        local_steps=local_steps,
        batch_size=batch_size,
        client_size=client_size,
        cohort_size=cohort_size,
        colluders=colluders,
        secure_aggregation=secure_aggregation,
    )
    return Claim(float(eps), "run", delta, f"Theorem 1, eq (10), C_i = {participations:g}", assumed)


# Convergence


class ConvergenceBound(NamedTuple):
    """Theorem 2 or Corollary 2, term by term."""

    optimisation: Float
    gradient_variance: Float
    privacy_noise: Float
    variance_drift: Float  # through the local models' divergence, Lemma 7
    privacy_drift: Float

    @property
    def total(self) -> Float:
        """The bound: the sum of the terms."""
        return sum(self)


def convergence_nonconvex(
    *,
    client_lr: Float,
    smoothness: Float,
    local_steps: Float,
    num_rounds: Float,
    num_params: Float,
    noise_std: Float,
    gradient_variance: Float,
    batch_size: Float,
    cohort_size: Float,
    initial_gap: Float,
    corrected: bool = False,
) -> ConvergenceBound:
    """Theorem 2, eq (18): bound on the mean of E‖∇f‖² over iterations. `corrected`: no 1/2 (D5)."""
    check_positive(client_lr=client_lr, num_rounds=num_rounds, batch_size=batch_size, cohort_size=cohort_size)
    eta, L, tau, T, d = f64(client_lr, smoothness, local_steps, num_rounds, num_params)
    sigma, beta_sq, gamma, r, gap = f64(noise_std, gradient_variance, batch_size, cohort_size, initial_gap)
    half = 1.0 if corrected else 0.5
    spread = (tau - 1.0) * (2.0 * tau - 1.0) * eta**2 * L**2
    return ConvergenceBound(
        2.0 * gap / (eta * T * tau),
        half * eta * L * beta_sq / gamma,
        half * eta * L * d * sigma**2 / r,
        spread * 2.0 * beta_sq / (3.0 * gamma),
        spread * d * sigma**2 * (r + 1.0) / (3.0 * r),
    )  # eq (18)


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
    batch_size: Float,
    cohort_size: Float,
    initial_gap: Float,
    corrected: bool = False,
) -> ConvergenceBound:
    """Corollary 2, eq (23): bound on the mean of E f − f* over iterations; noise as in eq (18), over 2λ."""
    check_positive(strong_convexity=strong_convexity)
    eta, lam, tau, T, gap = f64(client_lr, strong_convexity, local_steps, num_rounds, initial_gap)
    base = convergence_nonconvex(
        client_lr=client_lr,
        smoothness=smoothness,
        local_steps=local_steps,
        num_rounds=num_rounds,
        num_params=num_params,
        noise_std=noise_std,
        gradient_variance=gradient_variance,
        batch_size=batch_size,
        cohort_size=cohort_size,
        initial_gap=initial_gap,
        corrected=corrected,
    )
    start = (1.0 - eta * lam) / (T * tau * eta * lam) * gap
    return ConvergenceBound(start, *(term / (2.0 * lam) for term in base[1:]))  # eq (23)


def max_client_lr(*, smoothness: Float, local_steps: Float, corrected: bool = False) -> Float:
    """The largest η with 5ηL + 3τ²η²L² <= 1 (Theorem 2); 12 in place of 3 when corrected (D5)."""
    check_positive(smoothness=smoothness, local_steps=local_steps)
    L, tau = f64(smoothness, local_steps)
    factor = 12.0 if corrected else 3.0
    return (-5.0 + np.sqrt(25.0 + 4.0 * factor * tau**2)) / (2.0 * factor * tau**2 * L)


def convergence_conditions(
    *, client_lr: float, smoothness: float, local_steps: float, corrected: bool = False
) -> tuple[Condition, ...]:
    """The learning-rate condition of Theorem 2 and Corollary 2."""
    eta, L, tau, factor = client_lr, smoothness, local_steps, 12 if corrected else 3
    left = 5.0 * eta * L + factor * tau**2 * eta**2 * L**2
    limit = float(max_client_lr(smoothness=L, local_steps=tau, corrected=corrected))
    text = f"Theorem 2: 5ηL + {factor}τ²η²L² = {left:.4g} <= 1 (η = {eta:.4g}, at most {limit:.4g})"
    return ((text, left <= 1.0 + 1e-12),)
