"""NbAFL, section Convergence: Lemma 3 and Theorems 2 and 3, as printed and corrected.

Citation: K. Wei, J. Li, M. Ding, C. Ma, H. H. Yang, F. Farokhi, S. Jin, T. Q. S. Quek, H. V. Poor, "Federated
Learning with Differential Privacy: Algorithms and Performance Analysis", IEEE Transactions on Information
Forensics and Security, vol. 15, pp. 3454-3469, 2020 (arXiv 1911.00222).

| paper | code | | paper | code |
|---|---|---|---|---|
| N, K, T, L | `num_clients`, `cohort_size`, `num_rounds`, `exposures` | | Θ = F(w(0))−F* | `initial_gap` |
| C, m | `param_clip`, `min_client_size` | | P, Q | `contraction`, `scheduled_contraction` |
| ρ, β, l | `smoothness`, `lipschitz`, `pl_constant` | | λ_2, λ_1, λ_0 | `IncrementCoefficients` |
| B, μ | `dissimilarity`, `proximal` | | κ_1, κ_0 | `noise_coefficients` |

Deviations: N6. As printed λ_1 = 1/μ + ρB/μ (it must be 1 + ρB/μ), the noise enters as one coordinate, and
with σ_A = cCT/(m√N ε) instead of eq (13). `convergence_corrected` repairs the three. Theorem 3 has no
corrected form: its proof is not in the text, and N4 removes the Lemma 4 it rests on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.methods.theory.common import Condition, Float, check_positive, f64, gaussian_constant, scalar
from dither.methods.theory.nbafl import Params, required_aggregate_noise_std, scheduled_base_epsilon

# Convergence


class LossConstants(NamedTuple):
    """What Assumption 1 and Lemma 2 say of the loss; any field may be an array."""

    smoothness: Float  # ρ
    lipschitz: Float  # β
    pl_constant: Float  # l, Polyak-Łojasiewicz
    dissimilarity: Float  # B
    proximal: Float  # μ
    initial_gap: Float  # Θ


class IncrementCoefficients(NamedTuple):
    """λ_2, λ_1, λ_0 of Lemma 3, each named by what it multiplies."""

    gradient: Float  # λ_2, of E‖∇F‖²
    cross: Float  # λ_1, of E[‖n‖ ‖∇F‖]
    noise: Float  # λ_0, of E‖n‖²


class IncrementBound(NamedTuple):
    """Lemma 3, eq (12): the change of the loss in one aggregation, term by term."""

    gradient: Float
    cross: Float
    noise: Float

    @property
    def total(self) -> Float:
        """The bound: the sum of the terms."""
        return sum(self)


class ConvergenceBound(NamedTuple):
    """Bound on E[F] − F* after T aggregations: what is left of the start, and the two noise terms."""

    optimisation: Float
    noise_linear: Float  # grows with E‖n‖
    noise_quadratic: Float  # grows with E‖n‖²

    @property
    def total(self) -> Float:
        """The bound: the sum of the terms."""
        return sum(self)


def increment_coefficients(loss: LossConstants, *, corrected: bool = False) -> IncrementCoefficients:
    """λ_2, λ_1, λ_0 of Lemma 3; `corrected` takes λ_1 = 1 + ρB/μ (N6)."""
    check_positive(proximal=loss.proximal, smoothness=loss.smoothness)
    rho, B, mu = f64(loss.smoothness, loss.dissimilarity, loss.proximal)
    lambda_2 = -1.0 / mu + rho * B / mu**2 + rho * B**2 / (2.0 * mu**2)
    lambda_1 = (1.0 if corrected else 1.0 / mu) + rho * B / mu
    return IncrementCoefficients(lambda_2, lambda_1, rho / 2.0)


def increment_bound(
    loss: LossConstants,
    *,
    gradient_sq: Float,
    noise_times_gradient: Float,
    noise_sq: Float,
    corrected: bool = False,
) -> IncrementBound:
    """Lemma 3: λ_2 E‖∇F‖² + λ_1 E[‖n‖‖∇F‖] + λ_0 E‖n‖²."""
    lam = increment_coefficients(loss, corrected=corrected)
    g2, ng, n2 = f64(gradient_sq, noise_times_gradient, noise_sq)
    return IncrementBound(lam.gradient * g2, lam.cross * ng, lam.noise * n2)  # eq (12)


def contraction(loss: LossConstants) -> Float:
    """P = 1 + 2lλ_2 (Theorem 2)."""
    (ell,) = f64(loss.pl_constant)
    return 1.0 + 2.0 * ell * increment_coefficients(loss).gradient


def noise_coefficients(loss: LossConstants, params: Params, *, delta: Float) -> tuple[Float, Float]:
    """(κ_1, κ_0) of Theorem 2, with λ_1 as printed."""
    C, m, N = params.param_clip, params.min_client_size, params.num_clients
    check_positive(param_clip=C, min_client_size=m, num_clients=N)
    beta, C, m, N = f64(loss.lipschitz, C, m, N)
    c, P, lam = gaussian_constant(delta), contraction(loss), increment_coefficients(loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        kappa_1 = lam.cross * beta * c * C / (m * (1.0 - P)) * np.sqrt(2.0 / (N * np.pi))
        kappa_0 = lam.noise * c**2 * C**2 / (m**2 * (1.0 - P) * N)
    return kappa_1, kappa_0


def convergence(loss: LossConstants, params: Params, *, epsilon: Float, delta: Float) -> ConvergenceBound:
    """Theorem 2: P^T Θ + (κ_1 T/ε + κ_0 T²/ε²)(1 − P^T). Meaningful for 0 < P < 1: ask the conditions."""
    check_positive(epsilon=epsilon, num_rounds=params.num_rounds)
    Theta, eps, T = f64(loss.initial_gap, epsilon, params.num_rounds)
    kappa_1, kappa_0 = noise_coefficients(loss, params, delta=delta)
    with np.errstate(invalid="ignore", over="ignore"):
        left = np.power(contraction(loss), T)
        return ConvergenceBound(
            left * Theta, kappa_1 * T / eps * (1.0 - left), kappa_0 * T**2 / eps**2 * (1.0 - left)
        )  # eq (14)


def convergence_conditions(loss: LossConstants) -> tuple[Condition, ...]:
    """When Theorem 2 means anything: 0 < P < 1, that is λ_2 < 0 and 2l|λ_2| < 1."""
    rho, B, mu = float(loss.smoothness), float(loss.dissimilarity), float(loss.proximal)
    needed = rho * B + rho * B**2 / 2.0
    P = float(contraction(loss))
    return (
        (f"λ_2 < 0: μ = {mu:.4g} > ρB + ρB²/2 = {needed:.4g}", mu > needed),
        (f"Theorem 2: 0 < P = {P:.4g} < 1", 0.0 < P < 1.0),
    )


def curvature(loss: LossConstants, params: Params, *, epsilon: Float, delta: Float) -> Float:
    """d²h/dT² of the Theorem 2 bound h(T), eq (15): positive where the bound is convex in T."""
    check_positive(epsilon=epsilon, num_rounds=params.num_rounds)
    Theta, eps, T = f64(loss.initial_gap, epsilon, params.num_rounds)
    k1, k0 = noise_coefficients(loss, params, delta=delta)
    with np.errstate(invalid="ignore", divide="ignore"):
        P = contraction(loss)
        left, slope = np.power(P, T), np.log(P)
        return (
            (Theta - k1 * T / eps - k0 * T**2 / eps**2) * left * slope**2
            - 2.0 * (k1 / eps + 2.0 * k0 * T / eps**2) * left * slope
            + 2.0 * k0 / eps**2 * (1.0 - left)
        )  # eq (15)


def expected_norm(*, noise_std: Float, num_params: Float) -> Float:
    """E‖n‖ = σ√2 Γ((d+1)/2)/Γ(d/2) for n ~ N(0, σ² I_d) (N6)."""
    from scipy.special import gammaln

    sigma, d = f64(noise_std, num_params)
    return sigma * np.sqrt(2.0) * np.exp(gammaln((d + 1.0) / 2.0) - gammaln(d / 2.0))


def convergence_corrected(
    loss: LossConstants, params: Params, *, epsilon: Float, delta: Float, num_params: Float
) -> ConvergenceBound:
    """Theorem 2 repaired (N6): P^T Θ + (λ_1 β E‖n‖ + λ_0 E‖n‖²)(1 − P^T)/(1 − P).

    n ~ N(0, σ_A² I_d) with σ_A of eq (13) and λ_1 = 1 + ρB/μ. Where λ_2 >= 0 the PL inequality may not be
    used: there λ_2‖∇F‖² <= λ_2β² each round. Where P < 0 one round forgets the start: P counts as 0."""
    check_positive(num_params=num_params)
    Theta, beta, T, d = f64(loss.initial_gap, loss.lipschitz, params.num_rounds, num_params)
    sigma_A = required_aggregate_noise_std(params, epsilon=epsilon, delta=delta)
    lam = increment_coefficients(loss, corrected=True)
    descends = np.asarray(lam.gradient) < 0.0
    P = np.where(descends, np.maximum(contraction(loss), 0.0), 1.0)
    left = np.power(P, T)
    rounds = np.where(descends, (1.0 - left) / np.where(descends, 1.0 - P, 1.0), T)  # Σ_{t<T} P^t
    drift = np.where(descends, 0.0, lam.gradient * beta**2 * T)
    linear = lam.cross * beta * expected_norm(noise_std=sigma_A, num_params=d)
    return ConvergenceBound(
        scalar(left * Theta + drift), scalar(linear * rounds), scalar(lam.noise * d * sigma_A**2 * rounds)
    )


def scheduled_contraction(loss: LossConstants, *, cohort_size: Float) -> Float:
    """Q of Theorem 3."""
    check_positive(cohort_size=cohort_size, proximal=loss.proximal)
    rho, B, mu, ell, K = f64(loss.smoothness, loss.dissimilarity, loss.proximal, loss.pl_constant, cohort_size)
    root = np.sqrt(K)
    bracket = rho * B**2 / 2.0 + rho * B + rho * B**2 / K + 2.0 * rho * B**2 / root + mu * B / root - mu
    return 1.0 + 2.0 * ell / mu**2 * bracket  # Theorem 3


def scheduled_convergence(
    loss: LossConstants, params: Params, *, epsilon: Float, delta: Float
) -> ConvergenceBound:
    """Theorem 3, eq (17), as printed; NaN where K <= N(1 − e^{−ε/T}), which has no logarithm (N4)."""
    base = scheduled_base_epsilon(params, epsilon=epsilon)  # −ln(1 − N/K + (N/K)e^{−ε/T})
    rho, B, mu, beta, Theta = f64(
        loss.smoothness, loss.dissimilarity, loss.proximal, loss.lipschitz, loss.initial_gap
    )
    C, m, _, T, N, K = f64(*params._replace(cohort_size=params.cohort))
    c, Q = gaussian_constant(delta), scheduled_contraction(loss, cohort_size=params.cohort)
    alpha_0 = 2.0 * rho * K / N + rho
    alpha_1 = 1.0 + 2.0 * rho * B / mu + 2.0 * rho * B * np.sqrt(K) / (mu * N)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        left = np.power(Q, T)
        rounds = (1.0 - left) / (1.0 - Q)
        linear = c * C * alpha_1 * beta / (m * K * base) * np.sqrt(2.0 / np.pi)
        quadratic = c**2 * C**2 * alpha_0 / (m**2 * K**2 * base**2)
        return ConvergenceBound(left * Theta, rounds * linear, rounds * quadratic)  # eq (17)


def scheduled_convergence_conditions(
    loss: LossConstants, params: Params, *, epsilon: float
) -> tuple[Condition, ...]:
    """When Theorem 3 has a value and means anything."""
    K, edge = params.cohort, float(-params.num_clients * np.expm1(-epsilon / params.num_rounds))
    Q = float(scheduled_contraction(loss, cohort_size=K))
    return (
        (f"Theorem 3: K = {K} > N(1−e^(−ε/T)) = {edge:.4g}", edge < K),
        (f"Theorem 3: 0 < Q = {Q:.4g} < 1", 0.0 < Q < 1.0),
    )


def optimal_num_rounds(
    loss: LossConstants, params: Params, *, epsilon: float, delta: float, max_rounds: int = 1000
) -> int:
    """The integer T in 1..max_rounds with the smallest bound: Theorem 2, or 3 if a cohort is given."""
    T = np.arange(1, max_rounds + 1)
    theorem = convergence if params.cohort_size is None else scheduled_convergence
    bound = theorem(loss, params._replace(num_rounds=T), epsilon=epsilon, delta=delta)
    return int(T[_argmin_defined(bound.total, "num_rounds", max_rounds)])


def optimal_cohort(loss: LossConstants, params: Params, *, epsilon: float, delta: float) -> int:
    """The K in 1..N with the smallest Theorem 3 among those where it is defined (Remark 5; see N4)."""
    K = np.arange(1, params.num_clients + 1)
    bound = scheduled_convergence(loss, params._replace(cohort_size=K), epsilon=epsilon, delta=delta)
    return int(K[_argmin_defined(bound.total, "cohort_size", params.num_clients)])


def _argmin_defined(total: Float, name: str, limit: int) -> int:
    """argmin over the defined entries; a search without any is an error, not an index."""
    values = np.asarray(total, dtype=np.float64)
    if not np.isfinite(values).any():
        raise SpecError(f"the bound has no finite value for any {name} in 1..{limit}; see the conditions")
    return int(np.nanargmin(values))
