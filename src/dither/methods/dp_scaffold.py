"""DP-SCAFFOLD with drift control: control variates, per-step noise that decays, a stop when the budget is spent.

W.-T. Chang, M. Seif, R. Tandon, "Differentially Private Federated Learning with Drift Control", Conference on
Information Sciences and Systems (CISS), 2022.

| paper | here | | paper | here |
|---|---|---|---|---|
| K, S | `num_clients`, `cohort_size` | | σ_0; σ_0² | `noise_std`; `initial_variance`, on the averaged gradient |
| p = S/K, q = B/D | `client_rate`, `data_rate` | | β, R_th | `noise_decay`, `noise_decay_start` |
| R, r (from 1) | `num_rounds`, `round_number` | | L (privacy) | `clip_norm`, per example (S4) |
| τ, t (from 1) | `local_steps`, `step_number` | | L (Theorem 3) | `smoothness` |
| B, D | `batch_size`, a client's size | | rdp(α)/α; 24 | `leakage_slope`; `const` |
| η_l, η_g | `client_lr`, `server_lr` | | R_eff (the bracket) | `effective_rounds` |
| η̃ = τ η_g η_l | `effective_lr` | | σ² (one-sample gradient) | `gradient_variance` |
| c, c_k; C_0 | `control`; `control_error` | | ‖w(0)−w*‖ | `initial_distance` |

Schemes 0, 1, 2 are the noise schedules "constant", "rounds" (eq (6)) and "steps" (eq (7)). Deviations: S4 (the
clip is ours: the paper assumes bounded gradients); S3, S5, S6 (the printed numbers come from a fixed α and other
constants, so α and the constant 24 are options and failing conditions are reported); S7 (`corrected=True` counts
the noise of all d coordinates, where the paper writes the variance of one, and gives Corollary 3 the 1/τ it
misses). S2 (the server knows whom it sampled) is not repaired here: see the proven ε. All users have the same
noise, as in the paper's schemes; its sum over users is K times that. τ = 1 reads (1 + 1/(τ−1))^0 as 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither import methods, types
from dither.errors import SpecError
from dither.methods import BoundTerms, Condition, Float, check_cohort, check_positive, f64, local, scalar
from dither.models import Model
from dither.privacy import noise
from dither.spec import METHODS
from dither.types import ClientResult, ClientState, Hyper, Keys, Message, Params, PrivacyPlan, Records, Round

OPTIONS = METHODS["dp-scaffold"].options
_SCHEMES = {"constant": 0, "rounds": 1, "steps": 2}

WHY = (
    "the claim fixes the Rényi order instead of optimising it, so that ln(1/δ)/(α-1) hides the true, far "
    "smaller leakage (S1, S6); it also counts the server's choice of clients as amplification, which the proof "
    "does not (S2)"
)


class NoiseScheme(NamedTuple):
    """How the noise falls over a run: not at all (scheme 0), from round to round (1) or from step to step (2)."""

    scheme: int
    num_rounds: Float
    local_steps: Float = 1
    decay: Float = 1.0
    decay_start: Float = 0


class ScaffoldParams(NamedTuple):
    """The quantities of Theorems 1 and 2, and the order of Definition 5.

    alpha_mode "fixed" uses `alpha` as given (what the printed numbers did, S6); "optimised" minimises over
    the order, and `capped` keeps it within the theorem's range."""

    schedule: NoiseScheme
    batch_size: Float
    clip_norm: Float
    client_rate: Float
    data_rate: Float
    alpha_mode: str = "fixed"
    alpha: Float = 2.5
    capped: bool = True
    const: Float = 24.0

    def over(self, num_rounds: Float) -> ScaffoldParams:
        """The same run over another number of rounds."""
        return self._replace(schedule=self.schedule._replace(num_rounds=num_rounds))


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> types.Prepared:
    """DP-SCAFFOLD for one federation (Algorithm 1)."""
    if plan.lr_decay:
        raise SpecError(
            f"lr_decay={plan.lr_decay:g} is not supported by dp-scaffold: eq (2) divides by one client_lr"
        )
    gradients = local.noisy_gradients(model, plan, source="DP-SCAFFOLD Theorem 1; errata S2")
    # σ_0 for which the claimed ε after all rounds is the target
    budget = {"epsilon": plan.epsilon, "delta": plan.delta}
    std = local.chosen_noise_std(plan, lambda: math.sqrt(initial_noise_variance(_params(plan), **budget)))
    hyper = {**local.gradient_hyper(plan, std), "server_lr": plan.server_lr}
    rounds = _last_round(plan, local.quietest(hyper))
    return types.Prepared(
        plan=plan._replace(
            hyper=hyper,
            noise_names=("noise_std",),
            client_state=True,
            own_epochs=True,
        ),
        build=lambda hyper: scaffold(plan, gradients, hyper),
        claim=_claim(plan, local.quietest(hyper), rounds),
        cohort_size_at=lambda index: plan.cohort_size,
        reclaim=lambda other: _claim(plan, local.quietest(other), rounds),
        num_rounds=rounds,
        stop_when_proven=plan.noise == "given" and plan.options["stop_at_budget"] == "proven",
    )


def scaffold(plan: PrivacyPlan, gradients: local.NoisyGradients, hyper: Hyper) -> types.Algorithm:
    """SCAFFOLD's drift control around any gradients; also the noiseless baseline."""
    local_steps = plan.local_steps

    def init(params: Params) -> types.ServerState:
        return {"params": params, "control": jax.tree.map(jnp.zeros_like, params)}  # c(0) = 0

    def client_init(params: Params) -> ClientState:
        return {"control": jax.tree.map(jnp.zeros_like, params), "steps": jnp.int32(0)}  # c_k(0) = 0

    def client(keys: Keys, message: Message, state: ClientState, records: Records, round: Round) -> ClientResult:
        start, server_control, control = message["params"], message["control"], state["control"]
        correction = local.subtract(server_control, control)  # c(r-1) - c_k(r-1)
        batches = gradients.sampler.draw(keys, state["steps"], records.size)
        keys = keys._replace(noise=noise.for_steps(keys.noise, len(batches.positions)))

        def step(params: Params, batch: types.Batch, number: types.Array) -> tuple[Params, types.Array]:
            gradient, clipped = gradients.at(hyper, keys, params, batch, records, round, number)
            direction = local.add(gradient, correction)
            return local.axpy(-hyper["client_lr"], direction, params), clipped

        end, clipped = local.train(start, records, batches, step)
        # c_k(r) = c_k(r-1) - c(r-1) + (w_{k,0} - w_{k,τ})/(τ η_l): the mean of the τ noisy gradients (S8)
        drift = local.scale(1 / (local_steps * hyper["client_lr"]), local.subtract(start, end))
        new_control = local.subtract(drift, correction)
        weight = 1 / round.cohort_size
        upload = {
            "params": local.scale(weight, local.subtract(end, start)),
            "control": local.scale(weight, local.subtract(new_control, control)),
        }
        kept = {"control": new_control, "steps": state["steps"] + local_steps}
        return ClientResult(upload, weight, kept, {"clipped": clipped})

    def server(
        key: types.Key, state: types.ServerState, upload: types.Upload, cohort: types.Cohort
    ) -> types.ServerState:
        del key
        share = cohort.size / plan.num_clients  # S/K
        return {
            "params": local.axpy(hyper["server_lr"], upload["params"], state["params"]),
            "control": local.axpy(share, upload["control"], state["control"]),
        }

    return types.Algorithm(
        init=init,
        client_init=client_init,
        message=lambda state: state,
        client=client,
        server=server,
        params=lambda state: state["params"],
        releases=lambda info: gradients.releases(hyper, info),
    )


# Noise


def check_scheme(scheme: int, decay: Float = 1.0) -> None:
    """Raise `SpecError` unless the scheme is known and 0 < β <= 1."""
    if scheme not in _SCHEMES.values():
        raise SpecError(f"scheme={scheme!r} is not one of 0 (constant), 1 (eq (6)), 2 (eq (7))")
    beta = np.asarray(decay, dtype=np.float64)
    bad = ~((beta > 0) & (beta <= 1))
    if scheme != 0 and bad.any():
        raise SpecError(f"decay={beta[bad].flat[0]:g} must lie in (0, 1]")


def noise_variance(
    schedule: NoiseScheme, *, round_number: Float, step_number: Float, initial_variance: Float
) -> Float:
    """(σ_t^(r))² of schemes 0, 1 (eq (6)) and 2 (eq (7)); rounds r and steps t count from 1."""
    scheme = schedule.scheme
    check_scheme(scheme, schedule.decay)
    check_positive(round_number=round_number, step_number=step_number, initial_variance=initial_variance)
    r, t, s2 = f64(round_number, step_number, initial_variance)
    beta, R_th, tau = f64(schedule.decay, schedule.decay_start, schedule.local_steps)
    if scheme == 0:
        exponent = 0.0 * r * t
    elif scheme == 1:
        exponent = np.where(r > R_th, r - R_th, 0.0) + 0.0 * t  # eq (6)
    else:
        exponent = np.where(r > R_th, tau * (r - R_th - 1.0) + t - 1.0, 0.0)  # eq (7)
    return scalar(s2 * (np.power(beta, exponent) if scheme else 1.0 + exponent))


def noise_schedule(schedule: NoiseScheme, *, initial_variance: float) -> np.ndarray:
    """The variances of a whole run, [num_rounds, local_steps]."""
    shape = (schedule.num_rounds, schedule.local_steps)
    rounds, steps = np.arange(1, shape[0] + 1)[:, None], np.arange(1, shape[1] + 1)[None, :]
    value = noise_variance(schedule, round_number=rounds, step_number=steps, initial_variance=initial_variance)
    return np.broadcast_to(value, shape).copy()


def initial_noise_variance(params: ScaffoldParams, *, epsilon: float, delta: float) -> float:
    """σ_0² that spends exactly ε in R rounds by Theorem 1 or 2: the inverse of `epsilon_of_noise`.

    "optimised" is solved without the theorem's cap on α (the result's conditions tell whether it binds)."""
    alpha_mode, alpha = params.alpha_mode, params.alpha
    check_positive(epsilon=epsilon, batch_size=params.batch_size, clip_norm=params.clip_norm)
    unit = leakage_slope(params, initial_variance=1.0)
    if alpha_mode == "fixed":
        spent = float(np.log(1.0 / delta)) / (alpha - 1.0)
        if epsilon <= spent:
            raise SpecError(
                f"epsilon={epsilon:.15g} is not above ln(1/delta)/(alpha-1)={spent:g}: "
                f"raise epsilon or alpha={alpha:g}"
            )
        return float(unit * alpha / (epsilon - spent))
    if alpha_mode != "optimised":
        raise SpecError(f"alpha_mode={alpha_mode!r} is neither 'fixed' nor 'optimised'")
    # min over α of Aα + ln(1/δ)/(α−1) is A + 2√(A ln(1/δ)), so A is the zCDP ρ of (ε, δ)
    return float(unit / methods.zcdp_from_epsilon(epsilon=epsilon, delta=delta))


def _last_round(plan: PrivacyPlan, std: float) -> int | None:
    """The last round within the budget `epsilon` for a given noise; None if nothing stops the run."""
    rule = plan.options["stop_at_budget"]
    if plan.noise != "given" or rule != "claimed" or math.isinf(plan.epsilon):
        return None
    last = stopping_round(_params(plan), budget=plan.epsilon, delta=plan.delta, initial_variance=std**2)
    if last == 0:
        first = _claim(plan, std, 1).value
        raise SpecError(
            f"privacy.epsilon={plan.epsilon:.15g} is spent in the first round, which costs {first:.4g}; raise "
            "epsilon or noise_std"
        )
    return last


# Privacy


def effective_rounds(schedule: NoiseScheme) -> Float:
    """The bracket of Theorems 1 and 2: a run's leakage in rounds of scheme 0 (R itself when β = 1)."""
    scheme = schedule.scheme
    check_scheme(scheme, schedule.decay)
    R, beta, R_th, tau = f64(schedule.num_rounds, schedule.decay, schedule.decay_start, schedule.local_steps)
    if scheme == 0:
        return scalar(R)
    before, after = np.minimum(R, R_th), np.maximum(R - R_th, 0.0)
    growth = -np.log(beta)  # ratio 1/β
    if scheme == 1:
        return scalar(before + methods.geometric_sum(growth, after + 1.0) - 1.0)  # Theorem 1
    return scalar(before + methods.geometric_sum(growth, tau * after) / tau)  # Theorem 2


def leakage_slope(params: ScaffoldParams, *, initial_variance: Float) -> Float:
    """rdp(α)/α = 24 p²q²L²τ R_eff/(B²σ_0²) (Theorems 1-2); `const` replaces the 24 (S3, S6)."""
    steps = params.schedule.local_steps
    check_positive(batch_size=params.batch_size, initial_variance=initial_variance, local_steps=steps)
    tau, B, L, s2 = f64(steps, params.batch_size, params.clip_norm, initial_variance)
    p, q, k = f64(params.client_rate, params.data_rate, params.const)
    return k * p**2 * q**2 * L**2 * tau * effective_rounds(params.schedule) / (B**2 * s2)


def _decay_exponent(schedule: NoiseScheme) -> Float:
    """How often the last noise of the run was multiplied by β, as Theorems 1 and 2 count it."""
    R, R_th, tau = f64(schedule.num_rounds, schedule.decay_start, schedule.local_steps)
    after = np.maximum(R - R_th, 0.0)
    if schedule.scheme == 0:
        return 0.0 * after
    return after if schedule.scheme == 1 else np.maximum(tau * after - 1.0, 0.0)


def max_alpha(params: ScaffoldParams, *, initial_variance: Float) -> Float:
    """The largest order the theorem allows: β^{R−R_th} σ_0² ln(1/(pq)), or β^{τ(R−R_th)−1}..."""
    schedule = params.schedule
    check_scheme(schedule.scheme, schedule.decay)
    p, q, s2, beta = f64(params.client_rate, params.data_rate, initial_variance, schedule.decay)
    exponent = _decay_exponent(schedule)
    shrink = np.power(beta, exponent) if schedule.scheme else 1.0 + exponent
    return scalar(shrink * s2 * np.log(1.0 / (p * q)))


def optimal_alpha(*, slope: Float, delta: Float) -> Float:
    """α* = 1 + √(ln(1/δ)/A): minimises Aα + ln(1/δ)/(α−1), A = rdp(α)/α."""
    methods.check_delta(delta)
    A, d = f64(slope, delta)
    with np.errstate(divide="ignore"):  # no leakage: any order; leakage that overflowed: order 1, ε = ∞
        return 1.0 + np.sqrt(np.log(1.0 / d) / A)


def min_decay(schedule: NoiseScheme, *, initial_variance: float) -> float:
    """The smallest β of Theorems 1 and 2: (5/σ_0²)^{1/(R−R_th)}, or the power 1/(τ(R−R_th)−1); 0 if none."""
    check_scheme(schedule.scheme)
    exponent = float(_decay_exponent(schedule))
    return 0.0 if exponent <= 0.0 else float((5.0 / initial_variance) ** (1.0 / exponent))


def _slope_and_order(params: ScaffoldParams, initial_variance: Float, delta: Float) -> tuple[Float, Float]:
    """rdp(α)/α and the order α that Definition 5 uses."""
    A = leakage_slope(params, initial_variance=initial_variance)
    if params.alpha_mode == "fixed":
        return A, np.asarray(params.alpha, dtype=np.float64)
    if params.alpha_mode != "optimised":
        raise SpecError(f"alpha_mode={params.alpha_mode!r} is neither 'fixed' nor 'optimised'")
    order = np.asarray(optimal_alpha(slope=A, delta=delta))
    if params.capped:
        order = np.minimum(order, max_alpha(params, initial_variance=initial_variance))
    return A, order


def epsilon_of_noise(params: ScaffoldParams, *, initial_variance: Float, delta: Float) -> Float:
    """The paper's ε after R rounds: Theorem 1 or 2 and Definition 5."""
    A, order = _slope_and_order(params, initial_variance, delta)
    with np.errstate(invalid="ignore"):  # leakage that overflowed, at an order below 1
        return methods.epsilon_from_rdp(rdp=A * order, alpha=order, delta=delta)  # Definition 5


def conditions(
    params: ScaffoldParams, *, initial_variance: float, alpha: float | None = None
) -> tuple[Condition, ...]:
    """The validity conditions of Theorem 1 (scheme 1), 2 (scheme 2) or their β = 1 case (scheme 0), S5."""
    scheme, decay = params.schedule.scheme, params.schedule.decay
    std, pq = float(np.sqrt(initial_variance)), params.client_rate * params.data_rate
    listed: list[Condition] = [
        (f"Theorems 1-2: σ_0 = {std:.4g} >= √5 = 2.236", std >= float(np.sqrt(5.0))),
        (f"Theorems 1-2: pq = {pq:.4g} <= 0.1", pq <= 0.1),
    ]
    if scheme != 0:
        smallest = min_decay(params.schedule, initial_variance=initial_variance)
        text = f"Theorem {scheme}: β = {decay:.6g} in [{smallest:.6g}, 1]"
        listed.append((text, smallest <= decay <= 1.0))
    if alpha is not None:
        largest = float(max_alpha(params, initial_variance=initial_variance))
        listed.append((f"Theorems 1-2: α = {alpha:.4g} <= {largest:.4g}", alpha <= largest))
    return tuple(listed)


def claim(params: ScaffoldParams, *, initial_variance: float, delta: float) -> types.Claim:
    """The paper's ε of the run, with the theorem's conditions at the order that was used."""
    epsilon = float(epsilon_of_noise(params, initial_variance=initial_variance, delta=delta))
    order = float(_slope_and_order(params, initial_variance, delta)[1])
    scheme = params.schedule.scheme
    source = "Theorems 1-2 (R_eff = R)" if scheme == 0 else f"Theorem {scheme}"
    met = conditions(params, initial_variance=initial_variance, alpha=order)
    return types.Claim(epsilon, "run", delta, f"{source}, Definition 5, α = {order:.4g}", met)


def last_round_within(schedule: NoiseScheme) -> int:
    """The last round within what scheme 0 spends in all `num_rounds` rounds. R_eff >= R bounds it."""
    budget = schedule.num_rounds
    rounds = np.arange(1, int(np.floor(budget)) + 1)
    spent = effective_rounds(schedule._replace(num_rounds=rounds))
    return int(np.sum(np.asarray(spent) <= budget * (1.0 + 1e-12)))


def stopping_round(params: ScaffoldParams, *, budget: float, delta: float, initial_variance: float) -> int:
    """The last of the `num_rounds` rounds r whose ε(r) does not exceed the budget (0 if none).

    ε(r) never falls: the leakage grows with r, and the theorem's range of orders shrinks."""
    rounds = np.arange(1, params.schedule.num_rounds + 1)
    epsilons = epsilon_of_noise(params.over(rounds), initial_variance=initial_variance, delta=delta)
    return int(np.sum(np.asarray(epsilons) <= budget * (1.0 + 1e-12)))


def _claim(plan: PrivacyPlan, std: float, rounds: int | None = None) -> types.Claim:
    """Theorems 1 and 2 at this noise after `rounds` rounds."""
    if std == 0:
        return local.no_noise(plan)
    params = _params(plan).over(rounds or plan.num_rounds)
    return claim(params, initial_variance=std**2, delta=plan.delta)


def _params(plan: PrivacyPlan) -> ScaffoldParams:
    scheme, decay = _SCHEMES[plan.noise_schedule], plan.noise_decay
    return ScaffoldParams(
        NoiseScheme(scheme, plan.num_rounds, plan.local_steps, decay, plan.noise_decay_start),
        plan.batch_size,
        plan.clip_norm,
        client_rate=plan.cohort_size / plan.num_clients,
        # The theorems have one data size D: the smallest client has the largest rate q = B/D.
        data_rate=plan.batch_size / int(plan.client_sizes.min()),
        **{name: plan.options[name] for name in ("alpha_mode", "alpha", "capped", "const")},
    )


# Convergence


class ScaffoldTraining(NamedTuple):
    """The quantities of Theorem 3 besides the noise. Only the corrected bounds need `num_params`."""

    num_clients: Float
    cohort_size: Float
    batch_size: Float
    server_lr: Float
    control_error: Float
    gradient_variance: Float
    num_params: Float | None = None


def _coordinates(corrected: bool, num_params: Float | None) -> Float:
    if not corrected:
        return 1.0
    if num_params is None:
        raise SpecError("corrected=True needs num_params, the dimension of the noise (S7)")
    check_positive(num_params=num_params)
    return f64(num_params)[0]


def _error_terms(
    training: ScaffoldTraining, num_rounds: Float, local_steps: Float, noise: Float, drift: Float
) -> BoundTerms:
    """The factor of η̃ in eq (8): its two sums over the noise, and the terms without noise."""
    t = training
    check_cohort(t.cohort_size, t.num_clients)
    check_positive(num_rounds=num_rounds, local_steps=local_steps, batch_size=t.batch_size, server_lr=t.server_lr)
    K, S, R, tau, B = f64(t.num_clients, t.cohort_size, num_rounds, local_steps, t.batch_size)
    eta_g, C_0, var = f64(t.server_lr, t.control_error, t.gradient_variance)
    return BoundTerms(
        privacy_noise=noise,
        privacy_drift=drift,  # noise that moves the local models
        control_lag=11.0 * K * C_0 / (S * R),
        gradient_variance=15.0 / (tau * S * B) * (1.0 + tau / eta_g**2) * var,
    )  # eq (8)


def error_terms(training: ScaffoldTraining, variances: np.ndarray, *, corrected: bool = False) -> BoundTerms:
    """The factor of η̃ in eq (8) for any noise variances [num_rounds, local_steps], summed exactly."""
    s2 = np.asarray(variances, dtype=np.float64) * _coordinates(corrected, training.num_params)
    R, tau = s2.shape
    K, S, eta_g = f64(training.num_clients, training.cohort_size, training.server_lr)
    growth = 0.0 if tau == 1 else float(np.log1p(1.0 / (tau - 1.0)))
    # Σ_t Σ_{i<t} g^i s2(t−i) = Σ_j s2(j) Σ_{i=0}^{τ−j} g^i, g = 1 + 1/(τ−1)
    weights = np.asarray(methods.geometric_sum(growth, tau + 1.0 - np.arange(1, tau + 1)))
    noise = 16.0 / (tau * S * R) * K * np.sum(s2)
    drift = K * np.sum(s2 @ weights) / (25.0 * eta_g**2 * S * tau**3 * R)
    return _error_terms(training, R, tau, noise, drift)


def error_terms_closed(
    training: ScaffoldTraining, schedule: NoiseScheme, *, initial_variance: Float, corrected: bool = False
) -> BoundTerms:
    """The bracket of Corollary 1 (scheme 0, eq (11)), 2 (scheme 1, eq (12)) or 3 (scheme 2, eq (13)).

    Vectorised. Up to round R_th the three agree."""
    scheme = schedule.scheme
    check_scheme(scheme, schedule.decay)
    K, S, eta_g = f64(training.num_clients, training.cohort_size, training.server_lr)
    R, tau, beta, R_th = f64(schedule.num_rounds, schedule.local_steps, schedule.decay, schedule.decay_start)
    s2 = f64(initial_variance)[0] * _coordinates(corrected, training.num_params)
    drift = late_drift = 3.0 / (25.0 * eta_g**2 * tau)
    before, after = np.minimum(R, R_th), np.maximum(R - R_th, 0.0)
    shrink = np.log(beta)
    if scheme == 0:
        early, late = 1.0, 0.0  # eq (11)
    elif scheme == 1:
        early, late = (before + methods.geometric_sum(shrink, after + 1.0) - 1.0) / R, 0.0  # eq (12)
    else:
        early, late = before / R, methods.geometric_sum(shrink, tau * after) / (tau * R)  # eq (13)
        late_drift = drift if corrected else 3.0 / (25.0 * eta_g**2)  # eq (13) prints no 1/τ (S7)
    noise = K / S * 16.0 * s2 * (early + late)
    return _error_terms(training, R, tau, noise, K / S * s2 * (early * drift + late * late_drift))


def convergence(
    errors: BoundTerms, *, effective_lr: Float, num_rounds: Float, initial_distance: Float
) -> BoundTerms:
    """eq (8) at a given effective learning rate η̃ = τ η_g η_l."""
    check_positive(effective_lr=effective_lr, num_rounds=num_rounds)
    eta, R, dist = f64(effective_lr, num_rounds, initial_distance)
    return BoundTerms(errors.scaled(eta), initial_distance=dist**2 / (eta * R))  # eq (8)


def optimal_effective_lr(errors: BoundTerms, *, num_rounds: Float, initial_distance: Float) -> Float:
    """η̃* = ‖w(0)−w*‖/(√R √(...)) (eq (9)). May exceed the 1/(81L) of Theorem 3: ask the conditions (S7)."""
    check_positive(num_rounds=num_rounds)
    R, dist = f64(num_rounds, initial_distance)
    return dist / (np.sqrt(R) * np.sqrt(errors.total))


def convergence_optimal(errors: BoundTerms, *, num_rounds: Float, initial_distance: Float) -> BoundTerms:
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
