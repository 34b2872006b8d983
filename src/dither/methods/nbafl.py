"""NbAFL: noise before aggregation, parameter clipping, uplink and downlink noise, K-client scheduling.

K. Wei, J. Li, M. Ding, C. Ma, H. H. Yang, F. Farokhi, S. Jin, T. Q. S. Quek, H. V. Poor, "Federated Learning with
Differential Privacy: Algorithms and Performance Analysis", IEEE Transactions on Information Forensics and
Security, vol. 15, pp. 3454-3469, 2020 (arXiv 1911.00222).

| paper | here | | paper | here |
|---|---|---|---|---|
| N, K | `num_clients`, `cohort_size` | | σ_U, σ_D, σ_A | uplink, downlink, aggregate `noise_std` |
| T, L | `num_rounds`, `exposures` | | Δs_U, Δs_D | uplink, downlink `sensitivity` |
| C | `param_clip`, on the whole parameter vector | | c | `gaussian_constant(delta)` |
| m | `min_client_size` | | b, γ (Lemma 4) | `scheduling_factor`, `scheduling_gamma` |
| p_i | weight: n_i/n, or 1/K under scheduling | | P, Q | `contraction`, `scheduled_contraction` |
| μ, B | `proximal`, `dissimilarity` | | λ_2, λ_1, λ_0 | `IncrementCoefficients` |
| ρ, β, l | `smoothness`, `lipschitz`, `pl_constant` | | κ_1, κ_0 | `noise_coefficients` |
| Θ = F(w(0))−F* | `initial_gap` | | | |

Deviations: local training to "a preset termination condition" is read as `local_steps` full-batch steps of Adam.
N1/G1 (the classical constant beyond ε < 1) and N2 (Δs_U = 2C/m is not proved) are reported as conditions of the
claim. N3: the two channels are claimed apart. N4 (Lemma 4 inverts amplification in the wrong direction):
`scheduled_*_corrected`; Theorem 3 rests on it and has no corrected form. N6 (λ_1 = 1/μ + ρB/μ must be 1 + ρB/μ,
the noise enters as one coordinate, and with σ_A = cCT/(m√N ε) instead of eq (13)): `convergence_corrected`. N7:
a C taken from a pilot depends on the data, printed as a caveat.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dither import methods, types
from dither.accounting import exact
from dither.errors import SpecError
from dither.methods import BoundTerms, Condition, Float, check_cohort, check_positive, f64, local, scalar
from dither.models import Model
from dither.privacy import clipping, noise, sampling
from dither.spec import METHODS
from dither.types import ClientResult, ClientState, Hyper, Keys, Params, Prepared, PrivacyPlan, Records, Round

OPTIONS = METHODS["nbafl"].options
PILOT_METRIC = "param_norm"

WHY = (
    "the claim takes a sensitivity of 2C/m where clipping proves only 2C (N2), and the classical Gaussian "
    "constant far above ε = 1, where it fails (N1)"
)


class NbaflParams(NamedTuple):
    """The quantities of Theorem 1 and Lemma 4. Without `cohort_size` all clients take part (Theorem 1)."""

    param_clip: Float
    min_client_size: Float
    exposures: Float
    num_rounds: Float
    num_clients: Float
    cohort_size: Float | None = None
    weights: np.ndarray | None = None  # p_i of all clients, where they take part and differ; None: each 1/N

    @property
    def cohort(self) -> Float:
        """K, which is N if all clients take part."""
        return self.num_clients if self.cohort_size is None else self.cohort_size

    @property
    def max_weight(self) -> Float:
        """max_i p_i, which is 1/K unless weights are given."""
        return 1.0 / f64(self.cohort)[0] if self.weights is None else np.max(self.weights)

    @property
    def weights_sq_sum(self) -> Float:
        """Σ p_i², which is 1/K unless weights are given."""
        return 1.0 / f64(self.cohort)[0] if self.weights is None else np.sum(np.square(self.weights))

    @property
    def uplink_sensitivity(self) -> Float:
        """Δs_U = 2C/m."""
        return uplink_sensitivity(param_clip=self.param_clip, min_client_size=self.min_client_size)


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """NbAFL for one federation (Algorithm 1)."""
    param_clip = float(plan.options["param_clip"])
    if param_clip <= 0:
        raise SpecError(f"method_options.param_clip={param_clip:g} must be above 0; 0 needs a pilot run first")
    local_model = local.proximal_training(model, plan, optimizer_name=plan.options["optimizer"])
    num_records = int(plan.client_sizes.sum())
    everyone = plan.cohort_size == plan.num_clients
    error = local.whole_error(model) if local.is_exact(plan) else 0.0

    def build(hyper: Hyper) -> types.Algorithm:
        def client(
            keys: Keys, message: Params, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            end = local_model(hyper, keys, message, records, round, round.index * plan.local_steps)
            norm = clipping.norm(end)
            reach = hyper["param_clip"]
            end = local.clip_whole(plan, end, reach)  # w_i / max(1, |w_i|/C)
            end = local.noisy_vector(plan, keys.noise, end, noise_std=hyper["uplink_std"], reach=reach)
            weight = records.size / num_records if everyone else 1 / round.cohort_size  # p_i
            upload = local.scale(weight, local.subtract(end, message))
            clipped = (norm > hyper["param_clip"]).astype(jnp.float32)
            return ClientResult(upload, weight, state, {"clipped": clipped, PILOT_METRIC: norm})

        def server(key: types.Key, state: Params, upload: Params, cohort: types.Cohort) -> Params:
            # Where updates were left out the others weigh more, and so must the noise.
            std = hyper["downlink_std"] * plan.cohort_size / jnp.maximum(cohort.size, 1)
            return noise.gaussian(key, local.add(state, upload), noise_std=std)

        return local.model_as_state(
            client=client, server=server, releases=lambda info: _releases(info, hyper, plan, error)
        )

    uplink, downlink = noise_stds(plan)
    return Prepared(
        plan=plan._replace(
            hyper={
                **local.rate_hyper(plan),
                "param_clip": param_clip,
                **local.proximal_hyper(float(plan.options["proximal"])),
                "uplink_std": uplink,
                "downlink_std": downlink,
            },
            noise_names=("uplink_std", "downlink_std"),
            weights=plan.client_sizes if everyone else None,
            upload_noise="uplink_std",
            upload_unit=float(_weights(plan).min()),
            exposures=int(plan.options["exposures"]),
            assumed=plan.options["sensitivity"] == "paper",
        ),
        build=build,
        claim=_claim(plan, uplink, downlink),
        cohort_size_at=lambda index: plan.cohort_size,
        caveats=_caveats(plan),
        reclaim=lambda other: _claim(plan, float(other["uplink_std"]), float(other["downlink_std"])),
    )


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


def uplink_noise_std(params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
    """σ_U = c L Δs_U/ε (Section III-A), unchanged by scheduling."""
    check_positive(epsilon=epsilon, exposures=params.exposures)
    eps, L = f64(epsilon, params.exposures)
    return methods.gaussian_constant(delta) * L * params.uplink_sensitivity / eps


def downlink_noise_std(params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
    """σ_D = 2cC√(T² − L²N)/(mNε) if T > L√N, else 0 (Theorem 1, eq (10); p_i = 1/N).

    With unequal p_i the same derivation from eq (9), σ_D² = (cTΔs_D/ε)² − σ_U² Σ p_i² where positive: N max p_i
    and N Σ p_i² take the places of 1."""
    eps, C, m, L, T, N, _ = _letters(params, epsilon)
    if params.weights is not None:
        T, L = T * N * params.max_weight, L * np.sqrt(N * params.weights_sq_sum)
    missing = np.where(L * np.sqrt(N) < T, T**2 - L**2 * N, 0.0)  # eq (10), branch first
    return scalar(2.0 * methods.gaussian_constant(delta) * C * np.sqrt(np.maximum(missing, 0.0)) / (m * N * eps))


def _letters(params: NbaflParams, epsilon: Float) -> tuple[Float, ...]:
    """ε, C, m, L, T, N and K, of which ε, L, T and N are checked."""
    named = {"epsilon": epsilon, "exposures": params.exposures}
    check_positive(**named, num_rounds=params.num_rounds, num_clients=params.num_clients)
    return f64(epsilon, *params[:5], params.cohort)


def aggregate_noise_std(*, uplink_std: Float, downlink_std: Float, weights_sq_sum: Float) -> Float:
    """σ_A = √(σ_D² + σ_U² Σ p_i²): the noise on w̃(t). Σ p_i² is 1/N for equal clients, 1/K scheduled."""
    sigma_U, sigma_D, p2 = f64(uplink_std, downlink_std, weights_sq_sum)
    return np.sqrt(sigma_D**2 + sigma_U**2 * p2)


def required_aggregate_noise_std(params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
    """σ_A of eq (13), for all clients: cTΔs_D/ε if T > L√N, else cLΔs_U/(√N ε), which is the larger of the two.
    With unequal p_i Δs_D has max p_i in place of 1/N, and √(Σ p_i²) takes the place of 1/√N."""
    eps, _, _, L, T, _, _ = _letters(params, epsilon)
    everyone, Delta_U = params._replace(cohort_size=None), params.uplink_sensitivity
    broadcasts, uploads = T * Delta_U * everyone.max_weight, L * Delta_U * np.sqrt(everyone.weights_sq_sum)
    return scalar(methods.gaussian_constant(delta) * np.maximum(broadcasts, uploads) / eps)  # eq (13)


def scheduling_gamma(params: NbaflParams, *, epsilon: Float) -> Float:
    """γ = −ln(1 − K/N + (K/N) e^{−ε/(L√K)}) (Lemma 4)."""
    check_positive(epsilon=epsilon, exposures=params.exposures)
    check_cohort(params.cohort, params.num_clients)
    eps, N, K, L = f64(epsilon, params.num_clients, params.cohort, params.exposures)
    y = eps / (L * np.sqrt(K))
    with np.errstate(divide="ignore"):
        return scalar(np.where(K == N, y, -np.log1p((K / N) * np.expm1(-y))))


def scheduling_threshold(params: NbaflParams, *, epsilon: Float) -> Float:
    """ε/γ: Lemma 4 adds downlink noise only for T above it (L√N when K = N)."""
    return f64(epsilon)[0] / scheduling_gamma(params, epsilon=epsilon)


def _amplification(params: NbaflParams, epsilon: Float) -> tuple[Float, Float, Float]:
    """ε/T, N and K."""
    check_positive(epsilon=epsilon, num_rounds=params.num_rounds)
    check_cohort(params.cohort, params.num_clients)
    eps, T, N, K = f64(epsilon, params.num_rounds, params.num_clients, params.cohort)
    return eps / T, N, K


def scheduled_base_epsilon(params: NbaflParams, *, epsilon: Float) -> Float:
    """ε0 = −ln(1 − N/K + (N/K)e^{−ε/T}) = bε/T of Lemma 4; NaN if the logarithm does not exist."""
    x, N, K = _amplification(params, epsilon)
    argument = (K + N * np.expm1(-x)) / K  # 1 − N/K + (N/K)e^{−x}, positive just when K > N(1−e^{−x})
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.where(argument > 0.0, -np.log(argument), np.nan)
    return scalar(np.where(K == N, x, value))  # K = N: ε0 = ε/T, also where e^{−x} underflows


def scheduled_base_epsilon_corrected(params: NbaflParams, *, epsilon: Float) -> Float:
    """ε0 = ln(1 + (N/K)(e^{ε/T} − 1)): the right inversion of amplification by sampling (N4)."""
    x, N, K = _amplification(params, epsilon)
    return scalar(np.where(K == N, x, np.logaddexp(0.0, np.log(N / K) + x + np.log(-np.expm1(-x)))))


def scheduling_factor(params: NbaflParams, *, epsilon: Float) -> Float:
    """b = −(T/ε) ln(1 − N/K + (N/K)e^{−ε/T}) (Lemma 4); NaN where undefined, 1 when K = N."""
    eps, T = f64(epsilon, params.num_rounds)
    return scalar(scheduled_base_epsilon(params, epsilon=epsilon) * T / eps)


def min_defined_cohort(params: NbaflParams, *, epsilon: float) -> int:
    """The smallest K for which b and Theorem 3 exist: K > N(1 − e^{−ε/T})."""
    T, N = params.num_rounds, params.num_clients
    check_positive(epsilon=epsilon, num_rounds=T, num_clients=N)
    edge = float(-N * np.expm1(-epsilon / T))
    return int(min(np.floor(edge) + 1, N))


def scheduling_note(params: NbaflParams, *, epsilon: float) -> str:
    """Which branch of Lemma 4 applies and, if b has no value, why; in one sentence."""
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


def scheduled_downlink_noise_std(params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
    """σ_D = 2cC√(T²/b² − L²K)/(mKε) if T > ε/γ, else 0 (Lemma 4, eq (16)).

    The branch is tested before b is formed: b is undefined only where the second branch applies."""
    gamma = scheduling_gamma(params, epsilon=epsilon)
    b = scheduling_factor(params, epsilon=epsilon)
    eps, C, m, L, T, _, K = _letters(params, epsilon)
    active = (gamma * T > eps) & ~np.isnan(b)  # rounding at the edge, where both branches are 0
    missing = np.where(active, (T / np.where(active, b, 1.0)) ** 2 - L**2 * K, 0.0)  # eq (16)
    return scalar(2.0 * methods.gaussian_constant(delta) * C * np.sqrt(np.maximum(missing, 0.0)) / (m * K * eps))


def scheduled_aggregate_noise_std(params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
    """σ_A = √(σ_D² + σ_U²/K) with σ_D of Lemma 4 as printed."""
    (K,) = f64(params.cohort)
    sigma_U = uplink_noise_std(params, epsilon=epsilon, delta=delta)
    sigma_D = scheduled_downlink_noise_std(params, epsilon=epsilon, delta=delta)
    return aggregate_noise_std(uplink_std=sigma_U, downlink_std=sigma_D, weights_sq_sum=1.0 / K)


def scheduled_required_noise_std(
    params: NbaflParams, *, epsilon: Float, delta: Float, form: str = "printed"
) -> Float:
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
    return scalar(methods.gaussian_constant(delta) * 2.0 * C / (m * K * base))


def scheduled_downlink_noise_std_corrected(
    params: NbaflParams, *, epsilon: Float, delta: Float, sampling_credit: bool = False
) -> Float:
    """Lemma 4 repaired (N4): what the uplink noise leaves missing of σ_A = cΔ/ε0.

    Without sampling credit (the default, G5) ε0 = ε/T; with it, the right inversion of the amplification."""
    (K,) = f64(params.cohort)
    form = "corrected" if sampling_credit else "uncredited"
    sigma_A = scheduled_required_noise_std(params, epsilon=epsilon, delta=delta, form=form)
    sigma_U = uplink_noise_std(params, epsilon=epsilon, delta=delta)
    return scalar(np.sqrt(np.maximum(sigma_A**2 - sigma_U**2 / K, 0.0)))


def quietest_cohort(params: NbaflParams, *, epsilon: float, delta: float) -> int:
    """The K in 1..N with the smallest σ_A under Lemma 4 as printed (an artefact, N4)."""
    K = np.arange(1, params.num_clients + 1)
    sigma_A = scheduled_aggregate_noise_std(params._replace(cohort_size=K), epsilon=epsilon, delta=delta)
    return int(K[np.argmin(sigma_A)])


def noise_stds(plan: PrivacyPlan) -> tuple[float, float]:
    """σ_U, and σ_D by Theorem 1 (all clients) or Lemma 4 (K of N scheduled)."""
    local.refuse_unused(plan, "nbafl", schedule=True, scale=True)
    if plan.noise == "none":
        return 0.0, 0.0
    if plan.noise == "proven":
        return 1.0, 0.0  # a unit on the uploads: the accountant sets the factor
    everyone = plan.cohort_size == plan.num_clients
    if plan.noise == "given":
        return plan.noise_std, 0.0
    params, budget = _params(plan), {"epsilon": plan.epsilon, "delta": plan.delta}
    uplink = float(uplink_noise_std(params, **budget))
    form = plan.options["scheduling"]
    if everyone:
        return uplink, float(downlink_noise_std(params, **budget))
    if form == "printed":
        return uplink, float(scheduled_downlink_noise_std(params, **budget))
    downlink = scheduled_downlink_noise_std_corrected(params, **budget, sampling_credit=form == "corrected")
    return uplink, float(downlink)


def _params(plan: PrivacyPlan) -> NbaflParams:
    return NbaflParams(
        float(plan.options["param_clip"]),
        int(plan.client_sizes.min()),
        int(plan.options["exposures"]),
        plan.num_rounds,
        plan.num_clients,
        plan.cohort_size,
        None if plan.cohort_size < plan.num_clients else _weights(plan),
    )


def _caveats(plan: PrivacyPlan) -> tuple[str, ...]:
    caveats = []
    if plan.noise == "paper" and plan.cohort_size < plan.num_clients:
        caveats.append(scheduling_note(_params(plan), epsilon=plan.epsilon))
    if plan.options["sensitivity"] != "clip":
        caveats.append("not covered: the sensitivity 2C/m of eq (4) is assumed, and false in general (errata N2)")
    return tuple(caveats)


# Privacy


def uplink_epsilon_of_noise(*, noise_std: Float, sensitivity: Float, delta: Float, exposures: Float) -> Float:
    """cLΔs_U/σ_U: the ε that the paper claims for the uploads of one client."""
    check_positive(noise_std=noise_std, sensitivity=sensitivity, exposures=exposures)
    sigma_U, Delta_U, L = f64(noise_std, sensitivity, exposures)
    return methods.gaussian_constant(delta) * L * Delta_U / sigma_U


def downlink_epsilon_of_noise(*, noise_std: Float, sensitivity: Float, delta: Float, num_rounds: Float) -> Float:
    """cTΔs_D/σ_A: the ε that the paper claims for T broadcasts with aggregate noise σ_A."""
    check_positive(noise_std=noise_std, sensitivity=sensitivity, num_rounds=num_rounds)
    sigma_A, Delta_D, T = f64(noise_std, sensitivity, num_rounds)
    return methods.gaussian_constant(delta) * T * Delta_D / sigma_A


def scheduled_epsilon_of_noise(
    params: NbaflParams, *, noise_std: Float, sensitivity: Float, delta: Float
) -> Float:
    """−T ln(1 − K/N + (K/N)e^{−ε0}), ε0 = cΔ/σ_A, Δ = 2C/(mK): Lemma 4 as printed, solved for ε."""
    check_cohort(params.cohort, params.num_clients)
    T, N, K = f64(params.num_rounds, params.num_clients, params.cohort)
    base = downlink_epsilon_of_noise(noise_std=noise_std, sensitivity=sensitivity, delta=delta, num_rounds=1.0)
    with np.errstate(divide="ignore"):
        return scalar(T * np.where(K == N, base, -np.log1p((K / N) * np.expm1(-base))))


def conditions(params: NbaflParams, *, uplink_epsilon: float, downlink_epsilon: float) -> tuple[Condition, ...]:
    """What the two claims rest on, with the numbers of this setting."""
    limit, L, T = methods.CLASSICAL_EPSILON_LIMIT, params.exposures, params.num_rounds
    up, down = uplink_epsilon / L, downlink_epsilon / T
    return (
        (f"classical Gaussian mechanism: uplink ε/L = {up:.4g} < 1 (G1, N1)", up < limit),
        (f"classical Gaussian mechanism: downlink ε/T = {down:.4g} < 1 (G1, N1)", down < limit),
        (f"Section II-B: L = {L:g} <= T = {T:g}", L <= T),
        ("eq (4): the local model is the mean of per-sample minimisers, so that Δs_U = 2C/m (N2)", False),
    )


def channel_claims(
    params: NbaflParams, *, uplink_std: float, aggregate_std: float, delta: float
) -> tuple[types.Claim, types.Claim]:
    """The paper's ε of the uplink and of the downlink for the noise that ran, each with all conditions.

    A cohort below N asks for Lemma 4."""
    Delta_U, K = params.uplink_sensitivity, params.cohort
    up = uplink_epsilon_of_noise(
        noise_std=uplink_std, sensitivity=Delta_U, delta=delta, exposures=params.exposures
    )
    down = scheduled_epsilon_of_noise(
        params, noise_std=aggregate_std, sensitivity=Delta_U * params.max_weight, delta=delta
    )
    up, down = float(up), float(down)
    base = conditions(params, uplink_epsilon=up, downlink_epsilon=down)
    if params.num_clients > K:
        base += (("Lemma 4: amplification by client sampling holds for one record (N4, G5)", False),)
    source = "Theorem 1, eq (13)" if params.num_clients == K else "Lemma 4, eq (16)"
    return (
        types.Claim(up, "run, uplink", delta, "Section III-A", base),
        types.Claim(down, "run, downlink", delta, source, base),
    )


def _weights(plan: PrivacyPlan) -> np.ndarray:
    if plan.cohort_size < plan.num_clients:
        return np.full(plan.cohort_size, 1 / plan.cohort_size)
    return np.asarray(plan.client_sizes / plan.client_sizes.sum())


def aggregate_std(plan: PrivacyPlan, uplink: float, downlink: float, colluders: int = 0) -> float:
    """σ_A: the noise an outsider finds on a broadcast; `colluders` know their own part of it (N3)."""
    honest = np.sort(np.square(_weights(plan)))[: max(len(_weights(plan)) - colluders, 1)]
    squares = float(np.sum(honest))
    return float(aggregate_noise_std(uplink_std=uplink, downlink_std=downlink, weights_sq_sum=squares))


def _claim(plan: PrivacyPlan, uplink: float, downlink: float) -> types.Claim:
    """The larger of the two channels' claimed ε (the paper states each by itself)."""
    if uplink == 0:
        return local.no_noise(plan)
    channels = channel_claims(
        _params(plan),
        uplink_std=uplink,
        aggregate_std=aggregate_std(plan, uplink, downlink),
        delta=plan.delta,
    )
    larger = max(channels, key=lambda channel: channel.value)
    channel = larger.unit.removeprefix("run, ")
    return larger._replace(unit="run", source=f"{larger.source}, {channel}")


def _releases(info: types.RoundInfo, hyper: Hyper, plan: PrivacyPlan, error: float) -> tuple[types.Release, ...]:
    """An upload and a broadcast a round. Clipping alone proves a sensitivity of 2C, not 2C/m (N2); float32 may
    exceed it by `error`. A broadcast's noise is that of many uploads, whose sum is a float32 one. Poisson batches
    may not use a record at all in a round (R5); other samplers, those of the paper, are credited with nothing."""
    reach = 2 * float(hyper["param_clip"]) * (1 + error)
    source = "with the sensitivity 2C of errata N2"
    if plan.options["sensitivity"] == "paper":
        reach /= int(plan.client_sizes.min())
        source = "with the sensitivity 2C/m of eq (4), assumed"
    weights = _weights(plan)
    used = types.Sampling("full", 1.0, sampling.REPLACE_ONE, 0.0, info.size, info.size)
    if plan.batch_sampling.startswith("poisson"):
        used = sampling.of_round(local.batch_sampler(plan).sampling(info.size), plan.local_steps)
    uplink, downlink = float(hyper["uplink_std"]), float(hyper["downlink_std"])
    # Of the uploads' noise, in a broadcast. Without it, rounding precedes all of the noise.
    counted, rounded = (0.0, local.rounding(plan)) if plan.noise_projected else (uplink, 0.0)
    return (
        types.Release(
            "uplink",
            uplink,
            reach,
            1,
            used,
            f"NbAFL eq (4) {source}",
            exact=exact.noise(plan.num_params) if local.is_exact(plan) else None,
        ),
        types.Release(
            "downlink",
            aggregate_std(plan, counted, downlink, plan.silent),
            reach * float(weights.max()) + rounded,
            1,
            used,
            f"NbAFL Theorem 1 {source}",
        ),
    )


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


def _bound(optimisation: Float, linear: Float, quadratic: Float) -> BoundTerms:
    """On E[F] − F* after T aggregations: what is left of the start, and the terms of E‖n‖ and of E‖n‖²."""
    terms = {"optimisation": optimisation, "noise_linear": linear, "noise_quadratic": quadratic}
    return BoundTerms({name: scalar(term) for name, term in terms.items()})


def dissimilarity(*, gradient_norm: Float, divergences: Float, weights: np.ndarray | None = None) -> Float:
    """The least B of Lemma 2, eq (11), for ‖∇F_i − ∇F‖ <= ε_i: √(1 + Σ p_i ε_i²/‖∇F‖²).

    Clients lie on the last axis of `divergences`; without `weights` p_i = 1/N. ∞ if the gradient vanishes (N8).
    """
    norm, divergence = f64(gradient_norm, divergences)
    spread = np.average(np.square(divergence), axis=-1, weights=weights)
    with np.errstate(divide="ignore"):
        return scalar(np.sqrt(1.0 + np.divide(spread, np.square(norm))))


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
) -> BoundTerms:
    """Lemma 3: λ_2 E‖∇F‖² + λ_1 E[‖n‖‖∇F‖] + λ_0 E‖n‖²."""
    lam = increment_coefficients(loss, corrected=corrected)
    g2, ng, n2 = f64(gradient_sq, noise_times_gradient, noise_sq)
    return BoundTerms(gradient=lam.gradient * g2, cross=lam.cross * ng, noise=lam.noise * n2)  # eq (12)


def contraction(loss: LossConstants) -> Float:
    """P = 1 + 2lλ_2 (Theorem 2)."""
    (ell,) = f64(loss.pl_constant)
    return 1.0 + 2.0 * ell * increment_coefficients(loss).gradient


def noise_coefficients(loss: LossConstants, params: NbaflParams, *, delta: Float) -> tuple[Float, Float]:
    """(κ_1, κ_0) of Theorem 2, with λ_1 as printed."""
    C, m, N = params.param_clip, params.min_client_size, params.num_clients
    check_positive(param_clip=C, min_client_size=m, num_clients=N)
    beta, C, m, N = f64(loss.lipschitz, C, m, N)
    c, P, lam = methods.gaussian_constant(delta), contraction(loss), increment_coefficients(loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        kappa_1 = lam.cross * beta * c * C / (m * (1.0 - P)) * np.sqrt(2.0 / (N * np.pi))
        kappa_0 = lam.noise * c**2 * C**2 / (m**2 * (1.0 - P) * N)
    return kappa_1, kappa_0


def convergence(loss: LossConstants, params: NbaflParams, *, epsilon: Float, delta: Float) -> BoundTerms:
    """Theorem 2: P^T Θ + (κ_1 T/ε + κ_0 T²/ε²)(1 − P^T). Meaningful for 0 < P < 1: ask the conditions."""
    check_positive(epsilon=epsilon, num_rounds=params.num_rounds)
    Theta, eps, T = f64(loss.initial_gap, epsilon, params.num_rounds)
    kappa_1, kappa_0 = noise_coefficients(loss, params, delta=delta)
    with np.errstate(invalid="ignore", over="ignore"):
        left = np.power(contraction(loss), T)
        linear, quadratic = kappa_1 * T / eps * (1.0 - left), kappa_0 * T**2 / eps**2 * (1.0 - left)
        return _bound(left * Theta, linear, quadratic)  # eq (14)


def convergence_conditions(loss: LossConstants) -> tuple[Condition, ...]:
    """When Theorem 2 means anything: 0 < P < 1, that is λ_2 < 0 and 2l|λ_2| < 1."""
    rho, B, mu = float(loss.smoothness), float(loss.dissimilarity), float(loss.proximal)
    needed = rho * B + rho * B**2 / 2.0
    P = float(contraction(loss))
    return (
        (f"λ_2 < 0: μ = {mu:.4g} > ρB + ρB²/2 = {needed:.4g}", mu > needed),
        (f"Theorem 2: 0 < P = {P:.4g} < 1", 0.0 < P < 1.0),
    )


def curvature(loss: LossConstants, params: NbaflParams, *, epsilon: Float, delta: Float) -> Float:
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
    loss: LossConstants, params: NbaflParams, *, epsilon: Float, delta: Float, num_params: Float
) -> BoundTerms:
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
    quadratic = lam.noise * d * sigma_A**2
    return _bound(left * Theta + drift, linear * rounds, quadratic * rounds)


def scheduled_contraction(loss: LossConstants, *, cohort_size: Float) -> Float:
    """Q of Theorem 3."""
    check_positive(cohort_size=cohort_size, proximal=loss.proximal)
    rho, B, mu, ell, K = f64(loss.smoothness, loss.dissimilarity, loss.proximal, loss.pl_constant, cohort_size)
    root = np.sqrt(K)
    bracket = rho * B**2 / 2.0 + rho * B + rho * B**2 / K + 2.0 * rho * B**2 / root + mu * B / root - mu
    return 1.0 + 2.0 * ell / mu**2 * bracket  # Theorem 3


def scheduled_convergence(loss: LossConstants, params: NbaflParams, *, epsilon: Float, delta: Float) -> BoundTerms:
    """Theorem 3, eq (17), as printed; NaN if K <= N(1 − e^{−ε/T}), which has no logarithm (N4)."""
    base = scheduled_base_epsilon(params, epsilon=epsilon)  # −ln(1 − N/K + (N/K)e^{−ε/T})
    rho, B, mu, beta, Theta = f64(
        loss.smoothness, loss.dissimilarity, loss.proximal, loss.lipschitz, loss.initial_gap
    )
    C, m, _, T, N, K = f64(*params[:5], params.cohort)
    c, Q = methods.gaussian_constant(delta), scheduled_contraction(loss, cohort_size=params.cohort)
    alpha_0 = 2.0 * rho * K / N + rho
    alpha_1 = 1.0 + 2.0 * rho * B / mu + 2.0 * rho * B * np.sqrt(K) / (mu * N)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        left = np.power(Q, T)
        rounds = (1.0 - left) / (1.0 - Q)
        linear = c * C * alpha_1 * beta / (m * K * base) * np.sqrt(2.0 / np.pi)
        quadratic = c**2 * C**2 * alpha_0 / (m**2 * K**2 * base**2)
        return _bound(left * Theta, rounds * linear, rounds * quadratic)  # eq (17)


def scheduled_convergence_conditions(
    loss: LossConstants, params: NbaflParams, *, epsilon: float
) -> tuple[Condition, ...]:
    """When Theorem 3 has a value and means anything."""
    K, edge = params.cohort, float(-params.num_clients * np.expm1(-epsilon / params.num_rounds))
    Q = float(scheduled_contraction(loss, cohort_size=K))
    return (
        (f"Theorem 3: K = {K} > N(1−e^(−ε/T)) = {edge:.4g}", edge < K),
        (f"Theorem 3: 0 < Q = {Q:.4g} < 1", 0.0 < Q < 1.0),
    )


def optimal_num_rounds(
    loss: LossConstants, params: NbaflParams, *, epsilon: float, delta: float, max_rounds: int = 1000
) -> int:
    """The integer T in 1..max_rounds with the smallest bound: Theorem 2, or 3 if a cohort is given."""
    T = np.arange(1, max_rounds + 1)
    theorem = convergence if params.cohort_size is None else scheduled_convergence
    bound = theorem(loss, params._replace(num_rounds=T), epsilon=epsilon, delta=delta)
    return int(T[_argmin_defined(bound.total, "num_rounds", max_rounds)])


def optimal_cohort(loss: LossConstants, params: NbaflParams, *, epsilon: float, delta: float) -> int:
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
