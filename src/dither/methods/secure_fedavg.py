"""Secure FedAvg: noise on the local model after Q local steps, amplification by mini-batches.

Y. Li, T.-H. Chang, C.-Y. Chi, "Secure Federated Averaging Algorithm with Differential Privacy", IEEE
International Workshop on Machine Learning for Signal Processing (MLSP), 2020.

| paper | here | | paper | here |
|---|---|---|---|---|
| N, K | `num_clients`, `cohort_size` | | σ_{t,k} | `noise_std` |
| T; T/Q | `num_steps`; `num_rounds` | | σ_{t,k}/Δf | `noise_multiplier` |
| Q | `local_steps` | | Δf_{t+1,k} | `sensitivity` |
| b | `batch_size` | | η_t | `client_lr / (1 + lr_decay·t)` |
| n_k; n | `client_size`; `num_records` | | η_{t+1}; η_{t+1-Q..t} | `next_lr`; `round_lrs` |
| p_k = n_k/n | `share` | | L, μ | `smoothness`, `strong_convexity` |
| G | `clip_norm` | | Γ | `heterogeneity` |
| M | `num_params` | | Σ p_k² γ_k² | `weighted_variance` |
| q = Q b/n_k | `sampling_bound` | | ‖w_0−w*‖² | `initial_distance_sq` |
| 1−(1−b/n_k)^Q | `inclusion` | | ε/(2q) | `base_epsilon` |

Deviations: E1 (eq (8) fails at the paper's settings: reported as a condition, never repaired silently), E2 (ε is
per message), E5 (eq (7) is read as 1−(1−b/n_k)^Q), E7 (the sensitivity of the message sent at step t uses
η_{t+1}), E8 (the weights of a round sum to one also when S_0 = [N] or the n_k differ: the average is taken of
the changes w_k - w̄, with weight p_k N/|S_t|), E9 (the sums of Theorem 1 run over all N clients).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dither import methods, types
from dither.accounting import exact
from dither.errors import SpecError
from dither.methods import BoundTerms, Condition, Float, check_cohort, check_positive, f64, local, scalar
from dither.models import Model
from dither.privacy import noise, sampling
from dither.privacy.sampling import BatchSampler
from dither.spec import METHODS
from dither.types import ClientResult, ClientState, Hyper, Keys, Params, Prepared, PrivacyPlan, Records, Round

OPTIONS = METHODS["secure-fedavg"].options

WHY = (
    "eq (8) uses e^x - 1 <= 2x far beyond x = 1.26, where it holds (E1); the claim is for one message, the proof "
    "for all rounds a client takes part in (E2)"
)


# The largest x with e^x − 1 <= 2x, which eq (8) uses: x = −1/2 − W_{−1}(−e^{−1/2}/2)
MAX_BASE_EPSILON = 1.2564312086261697


class SecureFedavgParams(NamedTuple):
    """The quantities of eqs (7)-(9): how many records one message of a client draws."""

    local_steps: Float
    batch_size: Float
    client_size: Float


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """Secure FedAvg for one federation."""
    sizes = plan.client_sizes
    sampler = local.batch_sampler(plan)

    def cohort_size_at(index: int) -> int:
        everyone = index == 0 and plan.options["first_round"] == "all"
        return plan.num_clients if everyone else plan.cohort_size

    multiplier = noise_multipliers(plan)
    # The ball that a change is put into has a radius of float32: a few operations a step
    error = 0.0
    if local.is_exact(plan):
        error = (1 + local.whole_error(model)) * (1 + exact.accumulated(8 * plan.local_steps + 16)) - 1
    return Prepared(
        plan=plan._replace(
            hyper={**local.rate_hyper(plan), "clip_norm": plan.clip_norm, "noise_multiplier": multiplier},
            noise_names=("noise_multiplier",),
            weights=sizes,
            upload_noise="noise_multiplier",
            upload_unit=float(sizes.min() / sizes.sum() * len(sizes) / max(map(cohort_size_at, range(2)))),
        ),
        build=lambda hyper: local.model_as_state(
            client=_client(model, plan, sampler, hyper),
            server=lambda key, state, upload, cohort: local.add(state, upload),
            releases=_releases(plan, sampler, hyper, error),
        ),
        claim=_claim(plan, multiplier),
        cohort_size_at=cohort_size_at,
        reclaim=lambda other: _claim(plan, np.asarray(other["noise_multiplier"])),
    )


def _client(model: Model, plan: PrivacyPlan, sampler: BatchSampler, hyper: Hyper) -> local.ClientFunction:
    local_steps, num_records = plan.local_steps, int(plan.client_sizes.sum())
    clipped_gradient = local.clipped_gradients(model, plan, sampler)

    def client(keys: Keys, message: Params, state: ClientState, records: Records, round: Round) -> ClientResult:
        first = round.index * local_steps
        batches = sampler.draw(keys, first, records.size)

        def step(params: Params, batch: types.Batch, number: types.Array) -> tuple[Params, types.Array]:
            gradient, clipped = clipped_gradient(hyper, params, batch, records.size)
            return local.axpy(-local.learning_rate(hyper, first + number), gradient, params), clipped

        end, clipped = local.train(message, records, batches, step)
        # Lemma 1 with the rate of the next step, η_{t+1}; eq (9) with this client's own n_k
        sensitivity = 4 * local_steps * hyper["clip_norm"] * local.learning_rate(hyper, first + local_steps)
        noise_std = hyper["noise_multiplier"][round.client] * sensitivity
        if local.is_exact(plan):
            change = _exact_change(plan, sampler, hyper, keys.noise, message, end, first, noise_std)
        else:
            change = local.subtract(noise.gaussian(keys.noise, end, noise_std=noise_std), message)
        share = records.size / num_records
        weight = share * plan.num_clients / round.cohort_size  # p_k N/|S_t| (E8)
        upload = local.scale(weight, change)
        return ClientResult(upload, weight, state, {"clipped": clipped})

    return client


# reason: one upload: where it starts and ends, its rates and its noise
def _exact_change(
    plan: PrivacyPlan,
    sampler: BatchSampler,
    hyper: Hyper,
    key: types.Key,
    message: Params,
    end: Params,
    first: types.Array,
    noise_std: types.Array,
) -> Params:
    """The noisy change of the model (R7). Without records a round ends at the message, shrunk by a regulariser
    outside the clip; what records do to it lies in a ball around that. It is put there once more, as float32 may
    have left it, and noised: the centre is public."""
    rates = local.learning_rate(hyper, first + jnp.arange(plan.local_steps))
    kept = 1 - 2 * rates * plan.l2 if _l2_outside(plan) else jnp.ones_like(rates)
    later = jnp.append(jnp.cumprod(jnp.maximum(1.0, jnp.abs(kept))[::-1])[::-1][1:], 1.0)
    reach = _longest_step(plan, sampler, hyper["clip_norm"]) * jnp.sum(rates * later)
    centre = local.scale(jnp.prod(kept), message) if _l2_outside(plan) else message
    moved = local.clip_whole(plan, local.subtract(end, centre), reach)
    noisy = local.noisy_vector(plan, key, moved, noise_std=noise_std, reach=reach)
    return local.add(noisy, local.subtract(centre, message)) if _l2_outside(plan) else noisy


def _longest_step(plan: PrivacyPlan, sampler: BatchSampler, clip_norm: types.Array) -> types.Array:
    """The longest mean gradient: clipping every record bounds a Poisson batch's by G times its largest length over
    its divisor."""
    if plan.clip == "example" and sampler.kind.startswith("poisson"):
        return clip_norm * (sampler.width / plan.batch_size)
    return clip_norm


def _l2_outside(plan: PrivacyPlan) -> bool:
    """Whether a regulariser moves the model in addition to the clipped gradient."""
    return plan.l2 > 0 and (plan.clip == "example" or not plan.l2_inside_clip)


# Noise


def learning_rate(step: Float, *, client_lr: Float, lr_decay: Float) -> Float:
    """η_t = client_lr/(1 + lr_decay·t), the schedule of Section 4.1 (0.2 and 0.01 there)."""
    t, eta0, decay = f64(step, client_lr, lr_decay)
    return eta0 / (1.0 + decay * t)


def round_learning_rates(
    round_index: int, *, local_steps: int, client_lr: float, lr_decay: float
) -> tuple[np.ndarray, float]:
    """(η_{t+1−Q}, ..., η_t) used in a round, and η_{t+1}, which Lemma 1 asks for (E7)."""
    t = (round_index + 1) * local_steps - 1  # mod(t+1, Q) = 0: the step at which the round uploads
    steps = np.arange(t + 1 - local_steps, t + 1)
    return (
        np.asarray(learning_rate(steps, client_lr=client_lr, lr_decay=lr_decay)),
        float(learning_rate(t + 1, client_lr=client_lr, lr_decay=lr_decay)),
    )


def _checked(params: SecureFedavgParams) -> tuple[Float, Float, Float]:
    check_positive(**params._asdict())
    return f64(*params)


def sampling_bound(params: SecureFedavgParams) -> Float:
    """q = Q b/n_k, the paper's bound on a record's chance of being used in a round (eq (7))."""
    Q, b, n_k = _checked(params)
    return Q * b / n_k


def inclusion_probability(params: SecureFedavgParams) -> Float:
    """p = 1 − (1 − b/n_k)^Q: left side of eq (7), read with the power outside the bracket (E5)."""
    Q, b, n_k = _checked(params)
    if np.any(b > n_k):
        raise SpecError(f"batch_size={np.max(b):g} exceeds client_size={np.min(n_k):g}")
    with np.errstate(divide="ignore"):
        return -np.expm1(Q * np.log1p(-b / n_k))


def sensitivity(*, local_steps: Float, clip_norm: Float, next_lr: Float) -> Float:
    """Δf_{t+1,k} = 4 Q G η_{t+1} (Lemma 1); `next_lr` is the rate of the step *after* the upload (E7)."""
    check_positive(local_steps=local_steps, clip_norm=clip_norm, next_lr=next_lr)
    Q, G, eta = f64(local_steps, clip_norm, next_lr)
    return 4.0 * Q * G * eta


def sensitivity_exact(*, clip_norm: Float, round_lrs: Float) -> Float:
    """2 G Σ_τ η_{t+1−Q+τ}: the exact worst case behind Lemma 1. Rates of one round lie on the last axis."""
    check_positive(clip_norm=clip_norm, round_lrs=round_lrs)
    G, etas = f64(clip_norm, round_lrs)
    return 2.0 * G * np.sum(np.atleast_1d(etas), axis=-1)


def lemma1_conditions(*, round_lrs: Float, next_lr: float) -> tuple[Condition, ...]:
    """Lemma 1's condition on the rates: η_{t+1−Q+τ} <= 2 η_{t+1} for τ = 0..Q−1."""
    largest = float(np.max(np.asarray(round_lrs, dtype=np.float64)))
    text = f"Lemma 1: largest rate of the round {largest:.6g} <= 2 η_(t+1) = {2 * next_lr:.6g}"
    return ((text, largest <= 2.0 * next_lr),)


def _log_term(q: Float, delta: Float) -> Float:
    """ln(1.25 q/δ) of eq (9), which needs q > 0.8 δ."""
    methods.check_delta(delta)
    q, d = np.broadcast_arrays(*f64(q, delta))
    bad = q <= 0.8 * d
    if bad.any():
        raise SpecError(
            f"eq (9) needs q = local_steps*batch_size/client_size > 0.8*delta, but q={q[bad].flat[0]:g} and "
            f"0.8*delta={0.8 * d[bad].flat[0]:g}: lower delta below {1.25 * q[bad].flat[0]:g}, or raise "
            "local_steps or batch_size"
        )
    return np.log(1.25 * q / d)


def noise_multiplier(params: SecureFedavgParams, *, epsilon: Float, delta: Float) -> Float:
    """σ/Δf = √8 q √ln(1.25 q/δ) / ε (eq (9)); the same for every message."""
    check_positive(epsilon=epsilon)
    (eps,) = f64(epsilon)
    q = sampling_bound(params)
    return np.sqrt(8.0) * q * np.sqrt(_log_term(q, delta)) / eps  # eq (9)


def noise_std(
    params: SecureFedavgParams, *, epsilon: Float, delta: Float, clip_norm: Float, next_lr: Float
) -> Float:
    """σ_{t,k} of eq (9) with Δf of Lemma 1, for one message at (ε, δ)."""
    z = noise_multiplier(params, epsilon=epsilon, delta=delta)
    return z * sensitivity(local_steps=params.local_steps, clip_norm=clip_norm, next_lr=next_lr)


def noise_multipliers(plan: PrivacyPlan) -> np.ndarray:
    """σ/Δ of eq (9) for each client from its own n_k; zeros without privacy."""
    if plan.noise == "none":
        return np.zeros(plan.num_clients)
    if plan.clip == "none":
        raise SpecError("privacy.clip='none' leaves eq (9) without a sensitivity; use 'batch' or 'example'")
    if plan.noise == "given":
        raise SpecError(
            "privacy.noise='given' is not supported by secure-fedavg: its noise depends on its learning rate"
        )
    local.refuse_unused(plan, "secure-fedavg", schedule=True, scale=True)
    if plan.noise == "proven":
        return np.ones(plan.num_clients)  # a unit: the accountant sets the factor
    params = SecureFedavgParams(plan.local_steps, plan.batch_size, plan.client_sizes)
    return np.asarray(noise_multiplier(params, epsilon=plan.epsilon, delta=plan.delta))


# Privacy


def epsilon_of_noise(params: SecureFedavgParams, *, noise_std: Float, sensitivity: Float, delta: Float) -> Float:
    """The ε per message that the paper claims for a given σ: eq (9) solved for ε."""
    check_positive(noise_std=noise_std, sensitivity=sensitivity)
    sigma, Delta = f64(noise_std, sensitivity)
    q = sampling_bound(params)
    return np.sqrt(8.0) * q * Delta * np.sqrt(_log_term(q, delta)) / sigma  # eq (9)


def base_epsilon(params: SecureFedavgParams, *, epsilon: Float) -> Float:
    """ε/(2q): what eq (9) hands to the classical Gaussian mechanism before amplification."""
    check_positive(epsilon=epsilon)
    (eps,) = f64(epsilon)
    return eps / (2.0 * sampling_bound(params))


def conditions(params: SecureFedavgParams, *, epsilon: float, delta: float) -> tuple[Condition, ...]:
    """What the derivation of eq (9) assumes, with the numbers of this setting (E1, G1)."""
    q = float(sampling_bound(params))
    eps0 = epsilon / (2.0 * q)
    return (
        (f"eq (8): base ε/(2q) = {eps0:.4g} <= {MAX_BASE_EPSILON:.4f}", eps0 <= MAX_BASE_EPSILON),
        (f"classical Gaussian mechanism: base ε/(2q) = {eps0:.4g} < 1", eps0 < 1.0),
        (f"eq (9): q = {q:.4g} > 0.8 δ = {0.8 * delta:.4g}", q > 0.8 * delta),
        (f"eq (7): q = {q:.4g} <= 1", q <= 1.0),
    )


def claim(
    params: SecureFedavgParams,
    *,
    noise_std: float,
    sensitivity: float,
    delta: float,
    extra: tuple[Condition, ...] = (),
) -> types.Claim:
    """The paper's ε of one message at this noise, with the conditions of its derivation (E2: per message).

    `extra` takes conditions checked elsewhere, such as `lemma1_conditions`."""
    eps = float(epsilon_of_noise(params, noise_std=noise_std, sensitivity=sensitivity, delta=delta))
    met = conditions(params, epsilon=eps, delta=delta)
    return types.Claim(eps, "message", delta, "eq (9), Lemma 1", met + extra)


def _claim(plan: PrivacyPlan, multiplier: np.ndarray) -> types.Claim:
    """The paper's ε per message (E2), with the conditions of its derivation at the largest client: there the
    base ε/(2q) is largest and q closest to δ. The ε itself is the same for all clients."""
    if not np.any(multiplier):
        return local.no_noise(plan, "message")
    worst = int(np.argmax(plan.client_sizes))
    rates, next_lr = round_learning_rates(
        0, local_steps=plan.local_steps, client_lr=plan.client_lr, lr_decay=plan.lr_decay
    )
    Delta = float(sensitivity(local_steps=plan.local_steps, clip_norm=plan.clip_norm, next_lr=next_lr))
    return claim(
        SecureFedavgParams(plan.local_steps, plan.batch_size, int(plan.client_sizes[worst])),
        noise_std=float(multiplier[worst]) * Delta,
        sensitivity=Delta,
        delta=plan.delta,
        extra=lemma1_conditions(round_lrs=rates, next_lr=next_lr),
    )


def _releases(
    plan: PrivacyPlan, sampler: BatchSampler, hyper: Hyper, error: float
) -> Callable[[types.RoundInfo], tuple[types.Release, ...]]:
    """One noisy model a participation; with a constant rate all rounds are the same. Float32 may exceed the
    sensitivity by `error`."""
    of_round = cache(lambda index: _round_sensitivities(index, hyper, plan, sampler))
    # The weight p_k depends on the client's record count: proved for a replaced record only.
    of_size = cache(lambda size: sampling.of_round(sampler.sampling(size), plan.local_steps))

    @cache
    def upload(index: int, client: int, size: int) -> tuple[types.Release, ...]:
        printed, proven = of_round(index)
        by_use = _by_use(plan, hyper, index, of_size(size).batch_size, proven)
        return (
            types.Release(
                channel="uplink",
                noise_std=float(np.asarray(hyper["noise_multiplier"])[client]) * printed,
                sensitivity=proven * (1 + error),
                uses=1,
                sampling=of_size(size),
                source="Secure FedAvg eq (9), Lemma 1; errata R5",
                exact=exact.noise(plan.num_params) if local.is_exact(plan) else None,
                by_use=by_use,
            ),
        )

    return lambda info: upload(info.index if float(hyper["lr_decay"]) else 0, info.client, info.size)


def _by_use(plan: PrivacyPlan, hyper: Hyper, index: int, divisor: int, sensitivity: float) -> types.Uses | None:
    """One use of a record, replaced, moves a step by 2G/b times its rate (E3, E4); rates never rise. Not used if
    the proof is for what float32 computes: it has no bound on the rounding of local steps (R7)."""
    if plan.clip != "example" or local.is_exact(plan) or not 0 < sensitivity < np.inf:
        return None
    first = float(hyper["client_lr"]) / (1 + float(hyper["lr_decay"]) * index * plan.local_steps)
    share = 2 * float(hyper["clip_norm"]) / divisor * first / sensitivity
    return types.Uses(plan.local_steps, min(1.0, share), float(hyper["client_lr"]))


def _round_sensitivities(
    index: int, hyper: Hyper, plan: PrivacyPlan, sampler: BatchSampler
) -> tuple[float, float]:
    """Of one round: the printed sensitivity, by which the noise is scaled, and the exact worst case, which holds
    for all batches."""
    rates, next_lr = round_learning_rates(
        index,
        local_steps=plan.local_steps,
        client_lr=float(hyper["client_lr"]),
        lr_decay=float(hyper["lr_decay"]),
    )
    clip_norm = float(hyper["clip_norm"])
    printed = float(sensitivity(local_steps=plan.local_steps, clip_norm=clip_norm, next_lr=next_lr))
    return printed, _proven_sensitivity(plan, sampler, clip_norm, rates)


def _proven_sensitivity(plan: PrivacyPlan, sampler: BatchSampler, clip_norm: float, rates: np.ndarray) -> float:
    """2 G Σ η (the exact worst case behind Lemma 1), for a step that may be longer than G or expand: a
    regulariser outside the clip moves two runs apart by |1 - 2 η λ| a step where that exceeds 1."""
    if plan.clip == "none":
        return float("inf")
    longest = float(_longest_step(plan, sampler, clip_norm))
    expansion = np.maximum(1.0, np.abs(1 - 2 * rates * plan.l2)) if _l2_outside(plan) else np.ones(len(rates))
    later = np.append(np.cumprod(expansion[::-1])[::-1][1:], 1.0)  # product over the steps that follow
    apart = float(2 * longest * np.sum(rates * later))
    # Beyond, parameters might overflow in one world and not in the other; below, a clip misses squares that vanish
    return apart if np.prod(expansion) <= 2.0**60 and 2.0**-29 <= apart <= 2.0**100 else float("inf")


# Convergence


class SecureFedavgTraining(NamedTuple):
    """The quantities of eqs (12a)-(13). Only eq (12c) needs `num_clients`."""

    smoothness: Float
    local_steps: Float
    batch_size: Float
    clip_norm: Float
    num_params: Float
    num_records: Float
    epsilon: Float
    delta: Float
    cohort_size: Float
    weighted_variance: Float
    heterogeneity: Float
    num_clients: Float = 0


def weighted_variance(*, weights: Float, gradient_variances: Float) -> Float:
    """Σ_k p_k² γ_k² over all clients (E9: the printed upper limit K is read as N)."""
    p, gamma2 = f64(weights, gradient_variances)
    return np.sum(p**2 * gamma2, axis=-1)


def constants(training: SecureFedavgTraining) -> BoundTerms:
    """A (three terms), B and C of Theorem 1, eqs (12a)-(12c). B is vacuous at the paper's settings (E9)."""
    t = training
    check_positive(smoothness=t.smoothness, local_steps=t.local_steps, batch_size=t.batch_size, epsilon=t.epsilon)
    check_cohort(t.cohort_size, t.num_clients)
    L, Q, b, G, M, n, eps, d, K, v, Gamma, N = f64(*training)
    noise = 64.0 * M * Q**4 * b**2 * G**2 / (n * L**2 * eps**2) * np.log(n)  # eq (12b)
    noise = noise * np.log(1.25**2 * Q**2 * b**2 / (n * d**2)) * (8.0 * (Q - 1.0) ** 2 + 1.0)  # eq (12b)
    spread = (N - K) / np.maximum(N - 1.0, 1.0)  # 0 when N = K = 1
    return BoundTerms(
        gradient_variance=v / b,  # A, eq (12a)
        local_drift=8.0 * (Q - 1.0) ** 2 * G**2,  # A
        heterogeneity=6.0 * L * Gamma,  # A
        privacy_noise=noise,  # B, eq (12b)
        client_sampling=spread * (4.0 / K) * Q**2 * G**2,  # C, eq (12c)
    )


def convergence(
    training: SecureFedavgTraining, *, strong_convexity: Float, num_steps: Float, initial_distance_sq: Float
) -> BoundTerms:
    """Theorem 1: (2κ/(T+α)) ((A+B+C)/μ + 2L‖w_0−w*‖²), κ = L/μ, α = 8κ, for η_t = 2/(μ(α+t))."""
    check_positive(strong_convexity=strong_convexity, num_steps=num_steps)
    L, mu, T, start = f64(training.smoothness, strong_convexity, num_steps, initial_distance_sq)
    kappa = L / mu
    factor = 2.0 * kappa / (T + 8.0 * kappa)  # Theorem 1
    return BoundTerms(constants(training).scaled(factor / mu), initial_distance=factor * 2.0 * L * start)


def convergence_conditions(
    *,
    smoothness: float,
    strong_convexity: float,
    local_steps: float,
    batch_size: float,
    num_records: float,
    delta: float,
) -> tuple[Condition, ...]:
    """What Theorem 1 assumes. With η_t = 2/(μ(α+t)), η_{t+1} <= 2η_{t+Q} for all t means Q <= α+2."""
    kappa = smoothness / strong_convexity
    alpha = 8.0 * kappa
    moved, floor = 1.25 * local_steps * batch_size, float(np.sqrt(num_records)) * delta
    return (
        (f"Theorem 1: κ = L/μ = {kappa:.4g} > 1", kappa > 1.0),
        (
            f"Theorem 1: Q = {local_steps:g} <= α+2 = {alpha + 2:.4g} (η_(t+1) <= 2η_(t+Q))",
            local_steps <= alpha + 2,
        ),
        (f"base result of Li et al.: Q = {local_steps:g} <= α = {alpha:.4g} (E9)", local_steps <= alpha),
        (f"eq (12b): 1.25 Q b = {moved:.4g} > √n δ = {floor:.4g}, else B is negative", moved > floor),
    )


def communication_rounds(training: SecureFedavgTraining) -> BoundTerms:
    """T_ε/Q of eq (13): rounds to a fixed accuracy, up to a constant the paper does not give."""
    t = training
    check_positive(
        local_steps=t.local_steps, batch_size=t.batch_size, epsilon=t.epsilon, cohort_size=t.cohort_size
    )
    L, Q, b, G, M, n, eps, d, K, v, Gamma, _ = f64(*training)
    noise = M * b**2 * G**2 * np.log(n) * np.log(Q**2 * b**2 / (n * d**2)) / (n * L**2 * eps**2)
    return BoundTerms(
        privacy_noise=noise * Q**5,
        drift_and_sampling=(1.0 + 1.0 / K) * G**2 * Q,
        variance_and_heterogeneity=(v / b + L * Gamma) / Q,
    )  # eq (13)


def optimal_local_steps(training: SecureFedavgTraining, *, max_local_steps: int = 200) -> int:
    """The integer Q in 1..max_local_steps with the smallest eq (13) (Remark 1)."""
    Q = np.arange(1, max_local_steps + 1)
    estimate = communication_rounds(training._replace(local_steps=Q))
    return int(Q[np.argmin(scalar(estimate.total))])
