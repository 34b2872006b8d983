"""Concentrated DP-FL: CPFed with shuffled epochs, participation counts and non-convex convergence.

R. Hu, Y. Guo, Y. Gong, "Concentrated Differentially Private Federated Learning With Performance Analysis",
IEEE Open Journal of the Computer Society, vol. 2, 2021, doi 10.1109/OJCS.2021.3099108.

| paper | here | | paper | here |
|---|---|---|---|---|
| n, r | `num_clients`, `cohort_size` | | σ | `noise_std`, on the averaged gradient |
| T, τ, K = Tτ | `num_rounds`, `local_steps`, their product | | ρ | `rho` |
| γ, m | `batch_size`, `client_size` | | G | `clip_norm`, per example |
| C_i | `participations` | | L, λ | `smoothness`, `strong_convexity` |
| η | `client_lr` | | β² | `gradient_variance` |
| d | `num_params` | | f(θ⁰)−f* | `initial_gap` |

Deviations: D2 (the partial last batch of an epoch is dropped, so every batch has γ records), D6 (equal
participation is impossible when T·r/n is not whole: a balanced design gives floor or ceil of it to each client
and the noise is set for the larger). D1, G7 (the aggregation credit) and fractional epochs (D2) stay as printed
and are reported as conditions of the claim; `record_uses` counts whole uses. D4: the clients credited to the
DP-DSGD baseline are an argument. D5: `corrected=True` removes the unexplained 1/2 of eq (22) and restores Lemma
7's factor 4 in the learning-rate condition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither import methods
from dither.errors import SpecError
from dither.methods import BoundTerms, Condition, Float, check_cohort, check_positive, f64, local, scalar
from dither.methods.cpfed import AveragingTraining, skipped_clients
from dither.methods.cpfed import step_sensitivity as step_sensitivity  # 2G/γ here: the same Corollary 1
from dither.methods.cpfed import upload_sensitivity as upload_sensitivity  # 2ητG/γ: Lemma 5
from dither.models import Model
from dither.spec import METHODS
from dither.types import Claim, Prepared, PrivacyPlan

OPTIONS = METHODS["concentrated"].options

WHY = (
    "the claim counts a fraction of an epoch as a fraction of a use of a record, and credits noise that is not "
    "there (D1, D2); the proof counts whole uses with shuffled batches (D2), and far less with Poisson batches"
)


class ConcentratedParams(NamedTuple):
    """The quantities of Theorem 1; r counts as 1 without secure aggregation."""

    participations: Float
    local_steps: Float
    batch_size: Float
    client_size: Float
    clip_norm: Float
    cohort_size: Float
    secure_aggregation: bool = True
    colluders: int = 0


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """Concentrated DP-FL for one federation: epochs of disjoint batches that carry over from round to round."""
    if plan.options["exact_epochs"]:
        plan = plan._replace(batch_size=_exact_batch(plan))
    cohorts = participation_design(plan)
    params = params_of(plan, cohorts)._replace(secure_aggregation=bool(plan.options["aggregation_credit"]))
    source = "Concentrated DP-FL Corollary 1; errata D2, G7a"
    plan = plan._replace(design=cohorts)
    return local.noisy_averaging(model, plan, params, source=source, noise_std=noise_std, claim=claim)


def params_of(plan: PrivacyPlan, cohorts: np.ndarray | None) -> ConcentratedParams:
    """The quantities of Theorem 1, for the smallest client and with the credit of secure aggregation."""
    client = (plan.local_steps, plan.batch_size, int(plan.client_sizes.min()), plan.clip_norm)
    return ConcentratedParams(participations(plan, cohorts), *client, plan.cohort_size, colluders=plan.colluders)


def participation_design(plan: PrivacyPlan) -> np.ndarray | None:
    """Cohorts `[num_rounds, cohort_size]` drawn beforehand, or None if each round draws its own.

    Each round takes the clients that took part least so far, ties broken at random: counts never differ by more
    than one. The design depends on the seed alone, never on data.
    """
    kind = plan.options["participation"]
    if kind == "uniform":
        return None
    total = plan.num_rounds * plan.cohort_size
    if kind == "equal" and total % plan.num_clients:
        raise SpecError(
            f"participation='equal' is impossible: num_rounds*cohort_size/num_clients = {plan.num_rounds}*"
            f"{plan.cohort_size}/{plan.num_clients} = {total / plan.num_clients:g} is not whole; "
            "use 'balanced'"
        )
    rng = np.random.default_rng([plan.seed, 0xC047])
    counts = np.zeros(plan.num_clients, int)
    design = np.empty((plan.num_rounds, plan.cohort_size), np.int32)
    for index in range(plan.num_rounds):
        order = np.lexsort((rng.random(plan.num_clients), counts))
        design[index] = order[: plan.cohort_size]
        counts[design[index]] += 1
    return design


def participations(plan: PrivacyPlan, cohorts: np.ndarray | None) -> float:
    """C_i for which the noise is set: as given, or the largest count of the design (T if none is drawn)."""
    if plan.options["participations"]:
        return float(plan.options["participations"])
    if cohorts is None:
        return float(plan.num_rounds)
    return float(np.bincount(cohorts.ravel(), minlength=plan.num_clients).max())


def _exact_batch(plan: PrivacyPlan) -> int:
    smallest = int(plan.client_sizes.min())
    if plan.local_steps > smallest:
        raise SpecError(
            f"exact_epochs: local_steps={plan.local_steps} exceeds the {smallest} records of a client; lower it"
        )
    return smallest // plan.local_steps


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


# Noise


def noise_multiplier(*, noise_std: Float, clip_norm: Float, batch_size: Float) -> Float:
    """σγ/(2G): noise over the sensitivity of one step."""
    (sigma,) = f64(noise_std)
    return sigma / step_sensitivity(clip_norm=clip_norm, batch_size=batch_size)


def noise_std(params: ConcentratedParams, *, epsilon: Float, delta: Float) -> Float:
    """σ = G√(2C_iτ/(r m γ ρ)) (Theorem 1 solved for σ)."""
    return np.sqrt(rho_total(params, noise_std=1.0) / methods.zcdp_from_epsilon(epsilon=epsilon, delta=delta))


def dpdsgd_params(params: ConcentratedParams, *, credited_clients: Float) -> ConcentratedParams:
    """The DP-DSGD baseline (Section VII-C): one step a round on a fresh batch, ρ = 2C_iG²/(nγ²σ²), which is
    Theorem 1 with τγ = m. `credited_clients` is n as printed, or r, which its derivation gives (D4)."""
    return params._replace(local_steps=1, client_size=params.batch_size, cohort_size=credited_clients)


# Privacy


def rho_total(params: ConcentratedParams, *, noise_std: Float) -> Float:
    """ρ_i = 2C_iτG²/(r m γ σ²): C_i rounds of τγ/m epochs, each one step's 2G²/(γ²σ²) (Lemmas 1-3)."""
    check_positive(noise_std=noise_std, participations=params.participations, local_steps=params.local_steps)
    check_positive(client_size=params.client_size, cohort_size=params.cohort_size)
    sigma, C_i, tau = f64(noise_std, params.participations, params.local_steps)
    gamma, m, r = f64(
        params.batch_size, params.client_size, params.cohort_size if params.secure_aggregation else 1
    )
    step = step_sensitivity(clip_norm=params.clip_norm, batch_size=gamma) ** 2 / (2.0 * sigma**2)
    return C_i * (tau * gamma / m) * step / r


def epsilon_of_noise(params: ConcentratedParams, *, noise_std: Float, delta: Float) -> Float:
    """ε_i = ρ_i + 2√(ρ_i ln(1/δ)) (Theorem 1, eq (10)): the inverse of `noise_std`."""
    return methods.epsilon_from_zcdp(rho=rho_total(params, noise_std=noise_std), delta=delta)


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


def conditions(params: ConcentratedParams) -> tuple[Condition, ...]:
    """What Theorem 1 takes for granted, with the numbers of this setting."""
    tau, gamma, m = params.local_steps, params.batch_size, params.client_size
    whole = m % gamma == 0
    listed: list[Condition] = [
        (f"Section V: batch_size={gamma} divides client_size={m} (D2)", whole),
        (
            f"Theorem 1: τγ/m = {tau * gamma / m:.4g} is a whole number of epochs (D2)",
            whole and tau % (m // gamma) == 0,
        ),
    ]
    if params.secure_aggregation:
        listed.append((f"threat model: colluders = {params.colluders} is 0 (D1)", params.colluders == 0))
        real = params.cohort_size == 1 or (tau == 1 and gamma == m)
        listed.append(("Section V: the upload's noise variance is mτη²σ²/γ (D1, G7)", real))
    return tuple(listed)


def claim(params: ConcentratedParams, *, noise_std: float, delta: float) -> Claim:
    """The paper's ε_i of the run for a client that takes part `participations` times."""
    epsilon = float(epsilon_of_noise(params, noise_std=noise_std, delta=delta))
    source = f"Theorem 1, eq (10), C_i = {params.participations:g}"
    return Claim(epsilon, "run", delta, source, conditions(params))


# Convergence


def mean_gradient_variance(training: AveragingTraining, *, client_gradients_sq: Float) -> Float:
    """Lemma 6, eq (15): dσ²/r + β²/γ + 4(n−r)²/n³ Σ_i ‖∇f_i‖², the variance of a cohort's mean noisy gradient.

    Clients lie on the last axis of `client_gradients_sq`, which holds ‖∇f_i‖² of all n."""
    t = training
    d, sigma, r, beta_sq, gamma = f64(t.num_params, t.noise_std, t.cohort_size, t.gradient_variance, t.batch_size)
    return d * sigma**2 / r + beta_sq / gamma + skipped_clients(t.cohort_size, client_gradients_sq)


def network_error(training: AveragingTraining, *, step: Float, client_gradients_sq: Float) -> Float:
    """Lemma 7, eq (16): how far local models are from their mean after `step` = s steps of a round, mean square.

    `client_gradients_sq` holds Σ_{h<s} ‖∇f_i‖² of all n clients on its last axis."""
    t = training
    s, eta, d, sigma, r = f64(step, t.client_lr, t.num_params, t.noise_std, t.cohort_size)
    beta_sq, gamma, squares = f64(t.gradient_variance, t.batch_size, client_gradients_sq)
    n = squares.shape[-1]
    noise = 2.0 * s**2 * (d * sigma**2 * (r + 1.0) / r + 2.0 * beta_sq / gamma)
    gradients = 4.0 * s * (2.0 * (n - r) ** 2 + n**2) / n**3 * squares.sum(axis=-1)
    return scalar(eta**2 * (noise + gradients))


def convergence_nonconvex(training: AveragingTraining, *, corrected: bool = False) -> BoundTerms:
    """Theorem 2, eq (18): bound on the mean of E‖∇f‖² over iterations. `corrected`: no 1/2 (D5)."""
    t = training
    check_positive(client_lr=t.client_lr, num_rounds=t.num_rounds)
    check_positive(batch_size=t.batch_size, cohort_size=t.cohort_size)
    eta, L, tau, T, d = f64(t.client_lr, t.smoothness, t.local_steps, t.num_rounds, t.num_params)
    sigma, beta_sq, gamma, r, gap = f64(
        t.noise_std, t.gradient_variance, t.batch_size, t.cohort_size, t.initial_gap
    )
    half = 1.0 if corrected else 0.5
    spread = (tau - 1.0) * (2.0 * tau - 1.0) * eta**2 * L**2
    return BoundTerms(
        optimisation=2.0 * gap / (eta * T * tau),
        gradient_variance=half * eta * L * beta_sq / gamma,
        privacy_noise=half * eta * L * d * sigma**2 / r,
        variance_drift=spread * 2.0 * beta_sq / (3.0 * gamma),  # through the local models' divergence, Lemma 7
        privacy_drift=spread * d * sigma**2 * (r + 1.0) / (3.0 * r),
    )  # eq (18)


def convergence_convex(training: AveragingTraining, *, corrected: bool = False) -> BoundTerms:
    """Corollary 2, eq (23): bound on the mean of E f − f* over iterations; noise as in eq (18), over 2λ."""
    check_positive(strong_convexity=training.strong_convexity)
    eta, lam, tau = f64(training.client_lr, training.strong_convexity, training.local_steps)
    T, gap = f64(training.num_rounds, training.initial_gap)
    start = (1.0 - eta * lam) / (T * tau * eta * lam) * gap
    noise = convergence_nonconvex(training, corrected=corrected).scaled(1.0 / (2.0 * lam))
    return BoundTerms(noise, optimisation=start)  # eq (23)


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
