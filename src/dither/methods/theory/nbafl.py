"""NbAFL: noise on both channels, claimed privacy and convergence, as printed and corrected.

Citation: K. Wei, J. Li, M. Ding, C. Ma, H. H. Yang, F. Farokhi, S. Jin, T. Q. S. Quek, H. V. Poor, "Federated
Learning with Differential Privacy: Algorithms and Performance Analysis", IEEE Transactions on Information
Forensics and Security, vol. 15, pp. 3454-3469, 2020 (arXiv 1911.00222).

| paper | code | | paper | code |
|---|---|---|---|---|
| N, K | `num_clients`, `cohort_size` | | σ_U, σ_D, σ_A | uplink, downlink, aggregate `noise_std` |
| T, L | `num_rounds`, `exposures` | | Δs_U, Δs_D | uplink, downlink `sensitivity` |
| C | `param_clip` | | c | `gaussian_constant(delta)` |
| m, p_i | `min_client_size`, `weights` | | b, γ (Lemma 4) | `scheduling_factor`, `scheduling_gamma` |

Deviations: N1/G1 (the classical constant beyond ε < 1) and N2 (Δs_U = 2C/m is not proved) are reported as
conditions; N4 (Lemma 4 inverts amplification in the wrong direction): `scheduled_*_corrected`; N6 (λ_1, and
the noise is a d-vector): see `nbafl_convergence`. N3: the two channels are claimed apart.
The section `# Convergence` is `nbafl_convergence`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.methods.theory.common import (
    CLASSICAL_EPSILON_LIMIT,
    Condition,
    Float,
    check_cohort,
    check_positive,
    f64,
    gaussian_constant,
    scalar,
)
from dither.types import Claim


class Params(NamedTuple):
    """What Theorem 1 and Lemma 4 speak of. Without `cohort_size` all clients take part (Theorem 1)."""

    param_clip: Float
    min_client_size: Float
    exposures: Float
    num_rounds: Float
    num_clients: Float
    cohort_size: Float | None = None

    @property
    def cohort(self) -> Float:
        """K, which is N where all clients take part."""
        return self.num_clients if self.cohort_size is None else self.cohort_size

    @property
    def uplink_sensitivity(self) -> Float:
        """Δs_U = 2C/m."""
        return uplink_sensitivity(param_clip=self.param_clip, min_client_size=self.min_client_size)


# Noise


def uplink_sensitivity(*, param_clip: Float, min_client_size: Float) -> Float:
    """Δs_U = 2C/m (eqs (5)-(6)). Not proved by clipping, which gives 2C (N2)."""
    check_positive(param_clip=param_clip, min_client_size=min_client_size)
    C, m = f64(param_clip, min_client_size)
    return 2.0 * C / m


def downlink_sensitivity(*, param_clip: Float, min_client_size: Float, weights: Float) -> Float:
    """Δs_D = max_i 2 C p_i/m (Lemma 1, eq (9)); clients lie on the last axis of `weights`."""
    (p,) = f64(weights)
    Delta_U = uplink_sensitivity(param_clip=param_clip, min_client_size=min_client_size)
    return Delta_U * np.max(np.atleast_1d(p), axis=-1)


def uplink_noise_std(params: Params, *, epsilon: Float, delta: Float) -> Float:
    """σ_U = c L Δs_U/ε (Section III-A), unchanged by scheduling."""
    check_positive(epsilon=epsilon, exposures=params.exposures)
    eps, L = f64(epsilon, params.exposures)
    return gaussian_constant(delta) * L * params.uplink_sensitivity / eps


def downlink_noise_std(
    params: Params, *, epsilon: Float, delta: Float, weights: np.ndarray | None = None
) -> Float:
    """σ_D = 2cC√(T² − L²N)/(mNε) if T > L√N, else 0 (Theorem 1, eq (10); p_i = 1/N).

    With unequal `weights` p_i the same derivation from eq (9), σ_D² = (cTΔs_D/ε)² − σ_U² Σ p_i² where positive:
    N max p_i and N Σ p_i² take the places of 1."""
    eps, C, m, L, T, N, _ = _letters(params, epsilon)
    if weights is not None:
        T, L = T * N * np.max(weights), L * np.sqrt(N * np.sum(np.square(weights)))
    missing = np.where(L * np.sqrt(N) < T, T**2 - L**2 * N, 0.0)  # eq (10), branch first
    return scalar(2.0 * gaussian_constant(delta) * C * np.sqrt(np.maximum(missing, 0.0)) / (m * N * eps))


def _letters(params: Params, epsilon: Float) -> tuple[Float, ...]:
    """ε, C, m, L, T, N and K, of which ε, L, T and N are checked."""
    named = {"epsilon": epsilon, "exposures": params.exposures}
    check_positive(**named, num_rounds=params.num_rounds, num_clients=params.num_clients)
    return f64(epsilon, *params._replace(cohort_size=params.cohort))


def aggregate_noise_std(*, uplink_std: Float, downlink_std: Float, weights_sq_sum: Float) -> Float:
    """σ_A = √(σ_D² + σ_U² Σ p_i²): the noise on w̃(t). Σ p_i² is 1/N for equal clients, 1/K scheduled."""
    sigma_U, sigma_D, p2 = f64(uplink_std, downlink_std, weights_sq_sum)
    return np.sqrt(sigma_D**2 + sigma_U**2 * p2)


def required_aggregate_noise_std(params: Params, *, epsilon: Float, delta: Float) -> Float:
    """σ_A of eq (13): cTΔs_D/ε if T > L√N, else cLΔs_U/(√N ε)."""
    eps, _, _, L, T, N, _ = _letters(params, epsilon)
    Delta_U = params.uplink_sensitivity
    scale = np.where(L * np.sqrt(N) < T, T * Delta_U / N, L * Delta_U / np.sqrt(N))  # eq (13)
    return scalar(gaussian_constant(delta) * scale / eps)


def scheduling_gamma(params: Params, *, epsilon: Float) -> Float:
    """γ = −ln(1 − K/N + (K/N) e^{−ε/(L√K)}) (Lemma 4)."""
    check_positive(epsilon=epsilon, exposures=params.exposures)
    check_cohort(params.cohort, params.num_clients)
    eps, N, K, L = f64(epsilon, params.num_clients, params.cohort, params.exposures)
    y = eps / (L * np.sqrt(K))
    with np.errstate(divide="ignore"):
        return scalar(np.where(K == N, y, -np.log1p((K / N) * np.expm1(-y))))


def scheduling_threshold(params: Params, *, epsilon: Float) -> Float:
    """ε/γ: Lemma 4 adds downlink noise only for T above it (L√N when K = N)."""
    return f64(epsilon)[0] / scheduling_gamma(params, epsilon=epsilon)


def _amplification(params: Params, epsilon: Float) -> tuple[Float, Float, Float]:
    """ε/T, N and K."""
    check_positive(epsilon=epsilon, num_rounds=params.num_rounds)
    check_cohort(params.cohort, params.num_clients)
    eps, T, N, K = f64(epsilon, params.num_rounds, params.num_clients, params.cohort)
    return eps / T, N, K


def scheduled_base_epsilon(params: Params, *, epsilon: Float) -> Float:
    """ε0 = −ln(1 − N/K + (N/K)e^{−ε/T}) = bε/T of Lemma 4; NaN where the logarithm does not exist."""
    x, N, K = _amplification(params, epsilon)
    argument = (K + N * np.expm1(-x)) / K  # 1 − N/K + (N/K)e^{−x}, positive just when K > N(1−e^{−x})
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(argument > 0.0, -np.log(argument), np.nan)
    return scalar(np.where(K == N, x, value))  # K = N: ε0 = ε/T, also where e^{−x} underflows


def scheduled_base_epsilon_corrected(params: Params, *, epsilon: Float) -> Float:
    """ε0 = ln(1 + (N/K)(e^{ε/T} − 1)): the right inversion of amplification by sampling (N4)."""
    x, N, K = _amplification(params, epsilon)
    return scalar(np.where(K == N, x, np.logaddexp(0.0, np.log(N / K) + x + np.log(-np.expm1(-x)))))


def scheduling_factor(params: Params, *, epsilon: Float) -> Float:
    """b = −(T/ε) ln(1 − N/K + (N/K)e^{−ε/T}) (Lemma 4); NaN where undefined, 1 when K = N."""
    eps, T = f64(epsilon, params.num_rounds)
    return scalar(scheduled_base_epsilon(params, epsilon=epsilon) * T / eps)


def min_defined_cohort(params: Params, *, epsilon: float) -> int:
    """The smallest K for which b and Theorem 3 exist: K > N(1 − e^{−ε/T})."""
    T, N = params.num_rounds, params.num_clients
    check_positive(epsilon=epsilon, num_rounds=T, num_clients=N)
    edge = float(-N * np.expm1(-epsilon / T))
    return min(int(np.floor(edge)) + 1, N)


def scheduling_note(params: Params, *, epsilon: float) -> str:
    """Which branch of Lemma 4 applies, and why b has no value where it has none, in one sentence."""
    threshold, rounds = float(scheduling_threshold(params, epsilon=epsilon)), params.num_rounds
    if rounds > threshold:
        return f"num_rounds={rounds:g} > ε/γ={threshold:.4g}: Lemma 4 adds noise on the downlink"
    smallest = min_defined_cohort(params, epsilon=epsilon)
    note = f"num_rounds={rounds:g} <= ε/γ={threshold:.4g}: Lemma 4 sets the downlink noise to 0"
    if params.cohort < smallest:
        note += (
            f"; b and Theorem 3 have no value, as cohort_size={params.cohort} is below "
            f"{smallest}, the first above N(1−e^(−ε/T)) (N4)"
        )
    return note


def scheduled_downlink_noise_std(params: Params, *, epsilon: Float, delta: Float) -> Float:
    """σ_D = 2cC√(T²/b² − L²K)/(mKε) if T > ε/γ, else 0 (Lemma 4, eq (16)).

    The branch is tested before b is formed: b is undefined only where the second branch applies."""
    gamma = scheduling_gamma(params, epsilon=epsilon)
    b = scheduling_factor(params, epsilon=epsilon)
    eps, C, m, L, T, _, K = _letters(params, epsilon)
    active = (gamma * T > eps) & ~np.isnan(b)  # rounding at the edge, where both branches are 0
    missing = np.where(active, (T / np.where(active, b, 1.0)) ** 2 - L**2 * K, 0.0)  # eq (16)
    return scalar(2.0 * gaussian_constant(delta) * C * np.sqrt(np.maximum(missing, 0.0)) / (m * K * eps))


def scheduled_aggregate_noise_std(params: Params, *, epsilon: Float, delta: Float) -> Float:
    """σ_A = √(σ_D² + σ_U²/K) with σ_D of Lemma 4 as printed."""
    (K,) = f64(params.cohort)
    sigma_U = uplink_noise_std(params, epsilon=epsilon, delta=delta)
    sigma_D = scheduled_downlink_noise_std(params, epsilon=epsilon, delta=delta)
    return aggregate_noise_std(uplink_std=sigma_U, downlink_std=sigma_D, weights_sq_sum=1.0 / K)


def scheduled_required_noise_std(params: Params, *, epsilon: Float, delta: Float, form: str = "printed") -> Float:
    """σ_A = c·2C/(mK ε0) that the broadcasts need, before the uplink noise is counted.

    `form` says which ε0: "printed" (Lemma 4), "corrected" (the right inversion, N4) or "uncredited" (ε/T, no
    sampling credit: what record-level privacy allows, G5)."""
    C, m, K = f64(params.param_clip, params.min_client_size, params.cohort)
    if form == "printed":
        base = scheduled_base_epsilon(params, epsilon=epsilon)
    elif form == "corrected":
        base = scheduled_base_epsilon_corrected(params, epsilon=epsilon)
    elif form == "uncredited":
        base = _amplification(params, epsilon)[0]
    else:
        raise SpecError(f"form={form!r} is not one of 'printed', 'corrected', 'uncredited'")
    return scalar(gaussian_constant(delta) * 2.0 * C / (m * K * base))


def scheduled_downlink_noise_std_corrected(
    params: Params, *, epsilon: Float, delta: Float, sampling_credit: bool = False
) -> Float:
    """Lemma 4 repaired (N4): what the uplink noise leaves missing of σ_A = cΔ/ε0.

    Without sampling credit (the default, G5) ε0 = ε/T; with it, the right inversion of the amplification."""
    (K,) = f64(params.cohort)
    form = "corrected" if sampling_credit else "uncredited"
    sigma_A = scheduled_required_noise_std(params, epsilon=epsilon, delta=delta, form=form)
    sigma_U = uplink_noise_std(params, epsilon=epsilon, delta=delta)
    return scalar(np.sqrt(np.maximum(sigma_A**2 - sigma_U**2 / K, 0.0)))


def quietest_cohort(params: Params, *, epsilon: float, delta: float) -> int:
    """The K in 1..N with the smallest σ_A under Lemma 4 as printed (an artefact, N4)."""
    K = np.arange(1, params.num_clients + 1)
    sigma_A = scheduled_aggregate_noise_std(params._replace(cohort_size=K), epsilon=epsilon, delta=delta)
    return int(K[np.argmin(sigma_A)])


# Privacy


def uplink_epsilon_of_noise(*, noise_std: Float, sensitivity: Float, delta: Float, exposures: Float) -> Float:
    """cLΔs_U/σ_U: the ε that the paper claims for the uploads of one client."""
    check_positive(noise_std=noise_std, sensitivity=sensitivity, exposures=exposures)
    sigma_U, Delta_U, L = f64(noise_std, sensitivity, exposures)
    return gaussian_constant(delta) * L * Delta_U / sigma_U


def downlink_epsilon_of_noise(*, noise_std: Float, sensitivity: Float, delta: Float, num_rounds: Float) -> Float:
    """cTΔs_D/σ_A: the ε that the paper claims for T broadcasts with aggregate noise σ_A."""
    check_positive(noise_std=noise_std, sensitivity=sensitivity, num_rounds=num_rounds)
    sigma_A, Delta_D, T = f64(noise_std, sensitivity, num_rounds)
    return gaussian_constant(delta) * T * Delta_D / sigma_A


def scheduled_epsilon_of_noise(params: Params, *, noise_std: Float, sensitivity: Float, delta: Float) -> Float:
    """−T ln(1 − K/N + (K/N)e^{−ε0}), ε0 = cΔ/σ_A, Δ = 2C/(mK): Lemma 4 as printed, solved for ε."""
    check_cohort(params.cohort, params.num_clients)
    T, N, K = f64(params.num_rounds, params.num_clients, params.cohort)
    base = downlink_epsilon_of_noise(noise_std=noise_std, sensitivity=sensitivity, delta=delta, num_rounds=1.0)
    with np.errstate(divide="ignore"):
        return scalar(T * np.where(K == N, base, -np.log1p((K / N) * np.expm1(-base))))


def conditions(params: Params, *, uplink_epsilon: float, downlink_epsilon: float) -> tuple[Condition, ...]:
    """What the two claims rest on, with the numbers of this setting."""
    limit, L, T = CLASSICAL_EPSILON_LIMIT, params.exposures, params.num_rounds
    up, down = uplink_epsilon / L, downlink_epsilon / T
    return (
        (f"classical Gaussian mechanism: uplink ε/L = {up:.4g} < 1 (G1, N1)", up < limit),
        (f"classical Gaussian mechanism: downlink ε/T = {down:.4g} < 1 (G1, N1)", down < limit),
        (f"Section II-B: L = {L:g} <= T = {T:g}", L <= T),
        ("eq (4): the local model is the mean of per-sample minimisers, so that Δs_U = 2C/m (N2)", False),
    )


def channel_claims(
    params: Params, *, uplink_std: float, aggregate_std: float, delta: float, max_weight: float | None = None
) -> tuple[Claim, Claim]:
    """The paper's ε of the uplink and of the downlink for the noise that ran, each with all conditions.

    A cohort below N asks for Lemma 4; `max_weight` is max_i p_i (1/K unless given)."""
    Delta_U, K = params.uplink_sensitivity, params.cohort
    share = 1.0 / K if max_weight is None else max_weight
    up = uplink_epsilon_of_noise(
        noise_std=uplink_std, sensitivity=Delta_U, delta=delta, exposures=params.exposures
    )
    down = scheduled_epsilon_of_noise(params, noise_std=aggregate_std, sensitivity=Delta_U * share, delta=delta)
    up, down = float(up), float(down)
    base = conditions(params, uplink_epsilon=up, downlink_epsilon=down)
    if params.num_clients > K:
        base += (("Lemma 4: amplification by client sampling holds for one record (N4, G5)", False),)
    source = "Theorem 1, eq (13)" if params.num_clients == K else "Lemma 4, eq (16)"
    return (
        Claim(up, "run, uplink", delta, "Section III-A", base),
        Claim(down, "run, downlink", delta, source, base),
    )
