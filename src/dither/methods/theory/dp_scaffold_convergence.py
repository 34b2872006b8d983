"""DP-SCAFFOLD with drift control, section Convergence: Theorem 3, eqs (8)-(10), Corollaries 1-3.

Citation: W.-T. Chang, M. Seif, R. Tandon, "Differentially Private Federated Learning with Drift Control",
56th Annual Conference on Information Sciences and Systems (CISS), 2022.

| paper | code | | paper | code |
|---|---|---|---|---|
| K, S | `num_clients`, `cohort_size` | | (σ̃_{k,t}^(r))² | `variances` [num_rounds, local_steps] |
| R, τ | `num_rounds`, `local_steps` | | σ_0² | `initial_variance` |
| B | `batch_size` | | β, R_th | `decay`, `decay_start` |
| L | `smoothness` | | σ² (one-sample gradient) | `gradient_variance` |
| η_l, η_g | `client_lr`, `server_lr` | | C_0 | `control_error` |
| η̃ = τ η_g η_l | `effective_lr` | | ‖w(0)−w*‖ | `initial_distance` |

Deviations: S7. `corrected=True` counts the noise of all d coordinates (`num_params`) where the paper writes
the variance of one, and gives Corollary 3 the 1/τ it misses. The noise is the same for all users, as in the
paper's schemes; its sum over users is K times that. τ = 1 reads (1 + 1/(τ−1))^0 as 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.methods.theory.common import Condition, Float, check_cohort, check_positive, f64, geometric_sum, scalar
from dither.methods.theory.dp_scaffold import Schedule, check_scheme

# Convergence


class Training(NamedTuple):
    """What Theorem 3 speaks of besides the noise. Only the corrected bounds need `num_params`."""

    num_clients: Float
    cohort_size: Float
    batch_size: Float
    server_lr: Float
    control_error: Float
    gradient_variance: Float
    num_params: Float | None = None


class ErrorTerms(NamedTuple):
    """The factor of η̃ in eq (8); its `total` is what eqs (9) and (10) take the root of."""

    privacy_noise: Float  # first sum of eq (8)
    privacy_drift: Float  # second sum: noise that moves the local models
    control_lag: Float  # 11 K C_0/(S R)
    gradient_variance: Float

    @property
    def total(self) -> Float:
        """The sum of the terms."""
        return sum(self)


class ConvergenceBound(NamedTuple):
    """Bound on E f(w̄(R)) − f(w*), eq (8), term by term."""

    privacy_noise: Float
    privacy_drift: Float
    control_lag: Float
    gradient_variance: Float
    initial_distance: Float

    @property
    def total(self) -> Float:
        """The bound: the sum of the terms."""
        return sum(self)


def _coordinates(corrected: bool, num_params: Float | None) -> Float:
    if not corrected:
        return 1.0
    if num_params is None:
        raise SpecError("corrected=True needs num_params, the dimension of the noise (S7)")
    check_positive(num_params=num_params)
    return f64(num_params)[0]


def _noise_free(training: Training, num_rounds: Float, local_steps: Float) -> tuple[Float, Float]:
    """The two terms of eq (8) that have nothing to do with privacy."""
    t = training
    check_cohort(t.cohort_size, t.num_clients)
    check_positive(num_rounds=num_rounds, local_steps=local_steps, batch_size=t.batch_size, server_lr=t.server_lr)
    K, S, R, tau, B = f64(t.num_clients, t.cohort_size, num_rounds, local_steps, t.batch_size)
    eta_g, C_0, var = f64(t.server_lr, t.control_error, t.gradient_variance)
    lag = 11.0 * K * C_0 / (S * R)
    return lag, 15.0 / (tau * S * B) * (1.0 + tau / eta_g**2) * var  # eq (8)


def error_terms(training: Training, variances: np.ndarray, *, corrected: bool = False) -> ErrorTerms:
    """The factor of η̃ in eq (8) for any noise variances [num_rounds, local_steps], summed exactly."""
    s2 = np.asarray(variances, dtype=np.float64) * _coordinates(corrected, training.num_params)
    R, tau = s2.shape
    K, S, eta_g = f64(training.num_clients, training.cohort_size, training.server_lr)
    lag, variance = _noise_free(training, R, tau)
    growth = 0.0 if tau == 1 else float(np.log1p(1.0 / (tau - 1.0)))
    # Σ_t Σ_{i<t} g^i s2(t−i) = Σ_j s2(j) Σ_{i=0}^{τ−j} g^i, g = 1 + 1/(τ−1)
    weights = np.asarray(geometric_sum(growth, tau + 1.0 - np.arange(1, tau + 1)))
    return ErrorTerms(
        16.0 / (tau * S * R) * K * np.sum(s2),
        K * np.sum(s2 @ weights) / (25.0 * eta_g**2 * S * tau**3 * R),
        lag,
        variance,
    )  # eq (8)


def error_terms_closed(
    training: Training, schedule: Schedule, *, initial_variance: Float, corrected: bool = False
) -> ErrorTerms:
    """The bracket of Corollary 1 (scheme 0, eq (11)), 2 (scheme 1, eq (12)) or 3 (scheme 2, eq (13)).

    Vectorised. Up to round R_th the three agree."""
    scheme = schedule.scheme
    check_scheme(scheme, schedule.decay)
    K, S, eta_g = f64(training.num_clients, training.cohort_size, training.server_lr)
    R, tau, beta, R_th = f64(schedule.num_rounds, schedule.local_steps, schedule.decay, schedule.decay_start)
    s2 = f64(initial_variance)[0] * _coordinates(corrected, training.num_params)
    lag, variance = _noise_free(training, schedule.num_rounds, schedule.local_steps)
    drift = 3.0 / (25.0 * eta_g**2 * tau)
    if scheme == 0:
        return ErrorTerms(K / S * 16.0 * s2, K / S * drift * s2, lag, variance)  # eq (11)
    before, after = np.minimum(R, R_th), np.maximum(R - R_th, 0.0)
    shrink = np.log(beta)
    if scheme == 1:
        rounds = before + geometric_sum(shrink, after + 1.0) - 1.0
        return ErrorTerms(
            K / (S * R) * rounds * 16.0 * s2, K / (S * R) * rounds * drift * s2, lag, variance
        )  # eq (12)
    steps = geometric_sum(shrink, tau * after)
    late_drift = drift if corrected else 3.0 / (25.0 * eta_g**2)  # eq (13) prints no 1/τ (S7)
    return ErrorTerms(
        before / R * (K / S) * 16.0 * s2 + K / (tau * S * R) * 16.0 * steps * s2,
        before / R * (K / S) * drift * s2 + K / (tau * S * R) * late_drift * steps * s2,
        lag,
        variance,
    )  # eq (13)


def convergence(
    errors: ErrorTerms, *, effective_lr: Float, num_rounds: Float, initial_distance: Float
) -> ConvergenceBound:
    """eq (8) at a given effective learning rate η̃ = τ η_g η_l."""
    check_positive(effective_lr=effective_lr, num_rounds=num_rounds)
    eta, R, dist = f64(effective_lr, num_rounds, initial_distance)
    scaled = [scalar(eta * term) for term in errors]
    return ConvergenceBound._make([*scaled, dist**2 / (eta * R)])  # eq (8)


def optimal_effective_lr(errors: ErrorTerms, *, num_rounds: Float, initial_distance: Float) -> Float:
    """η̃* = ‖w(0)−w*‖/(√R √(...)) (eq (9)). May exceed the 1/(81L) of Theorem 3: ask the conditions (S7)."""
    check_positive(num_rounds=num_rounds)
    R, dist = f64(num_rounds, initial_distance)
    return dist / (np.sqrt(R) * np.sqrt(errors.total))


def convergence_optimal(errors: ErrorTerms, *, num_rounds: Float, initial_distance: Float) -> ConvergenceBound:
    """eq (10) (and (11)-(13)): eq (8) at η̃*, whose total is 2‖w(0)−w*‖√(...)/√R."""
    eta = optimal_effective_lr(errors, num_rounds=num_rounds, initial_distance=initial_distance)
    return convergence(errors, effective_lr=eta, num_rounds=num_rounds, initial_distance=initial_distance)


def max_client_lr(*, smoothness: Float, local_steps: Float, server_lr: Float) -> Float:
    """η_l <= 1/(81 L τ η_g) (Theorem 3)."""
    check_positive(smoothness=smoothness, local_steps=local_steps, server_lr=server_lr)
    L, tau, eta_g = f64(smoothness, local_steps, server_lr)
    return 1.0 / (81.0 * L * tau * eta_g)


def convergence_conditions(*, effective_lr: float, smoothness: float, server_lr: float) -> tuple[Condition, ...]:
    """Theorem 3's conditions: η_g >= 1 and η̃ <= 1/(81L), which is its bound on η_l."""
    limit = 1.0 / (81.0 * smoothness)
    return (
        (f"Theorem 3: η_g = {server_lr:.4g} >= 1", server_lr >= 1.0),
        (f"Theorem 3: η̃ = {effective_lr:.4g} <= 1/(81L) = {limit:.4g}", effective_lr <= limit),
    )
