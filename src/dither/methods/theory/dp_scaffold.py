"""DP-SCAFFOLD with drift control: time-varying noise, claimed privacy and convergence, as printed.

Citation: W.-T. Chang, M. Seif, R. Tandon, "Differentially Private Federated Learning with Drift Control",
56th Annual Conference on Information Sciences and Systems (CISS), 2022.

| paper | code | | paper | code |
|---|---|---|---|---|
| K, S | `num_clients`, `cohort_size` | | σ_0² (on the averaged batch gradient) | `initial_variance` |
| p = S/K, q = B/D | `client_rate`, `data_rate` | | β, R_th | `decay`, `decay_start` |
| R, r (from 1) | `num_rounds`, `round_number` | | L (gradient bound) | `clip_norm` |
| τ, t (from 1) | `local_steps`, `step_number` | | rdp(α)/α | `leakage_slope` |
| B | `batch_size` | | α | `alpha` |
| R_eff (the bracket) | `effective_rounds` | | 24 | `const` |

Deviations: S3, S5, S6: the printed numbers come from a fixed α and other constants, so α (`alpha_mode`) and
the constant 24 (`const`) are options and failing conditions are reported. S4: the privacy L is a per-example
clip, apart from the smoothness of Theorem 3. S2 (the server knows whom it sampled) is not repaired here:
see the proven ε. The section `# Convergence` is `dp_scaffold_convergence`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.methods.theory.common import (
    Condition,
    Float,
    check_delta,
    check_positive,
    epsilon_from_rdp,
    f64,
    geometric_sum,
    scalar,
    zcdp_from_epsilon,
)
from dither.types import Claim

SCHEMES = (0, 1, 2)


class Schedule(NamedTuple):
    """How the noise falls over a run: not at all (scheme 0), from round to round (1) or from step to step (2)."""

    scheme: int
    num_rounds: Float
    local_steps: Float = 1
    decay: Float = 1.0
    decay_start: Float = 0


class Params(NamedTuple):
    """What Theorems 1 and 2 speak of, and the order of Definition 5.

    alpha_mode "fixed" uses `alpha` as given (what the printed numbers did, S6); "optimised" minimises over
    the order, and `capped` keeps it within the theorem's range."""

    schedule: Schedule
    batch_size: Float
    clip_norm: Float
    client_rate: Float
    data_rate: Float
    alpha_mode: str = "fixed"
    alpha: Float = 2.5
    capped: bool = True
    const: Float = 24.0

    def over(self, num_rounds: Float) -> Params:
        """The same run over another number of rounds."""
        return self._replace(schedule=self.schedule._replace(num_rounds=num_rounds))


# Noise


def check_scheme(scheme: int, decay: Float = 1.0) -> None:
    """Raise `SpecError` unless the scheme is known and 0 < β <= 1."""
    if scheme not in SCHEMES:
        raise SpecError(f"scheme={scheme!r} is not one of 0 (constant), 1 (eq (6)), 2 (eq (7))")
    beta = np.asarray(decay, dtype=np.float64)
    bad = ~((beta > 0) & (beta <= 1))
    if scheme != 0 and bad.any():
        raise SpecError(f"decay={beta[bad].flat[0]:g} must lie in (0, 1]")


def noise_variance(
    schedule: Schedule, *, round_number: Float, step_number: Float, initial_variance: Float
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


def noise_schedule(schedule: Schedule, *, initial_variance: float) -> np.ndarray:
    """The variances of a whole run, [num_rounds, local_steps]."""
    shape = (schedule.num_rounds, schedule.local_steps)
    rounds, steps = np.arange(1, shape[0] + 1)[:, None], np.arange(1, shape[1] + 1)[None, :]
    value = noise_variance(schedule, round_number=rounds, step_number=steps, initial_variance=initial_variance)
    return np.broadcast_to(value, shape).copy()


def initial_noise_variance(params: Params, *, epsilon: float, delta: float) -> float:
    """σ_0² that spends exactly ε in R rounds by Theorem 1 or 2: the inverse of `epsilon_of_noise`.

    "optimised" is solved without the theorem's cap on α (the result's conditions tell whether it binds)."""
    alpha_mode, alpha = params.alpha_mode, params.alpha
    check_positive(epsilon=epsilon, batch_size=params.batch_size, clip_norm=params.clip_norm)
    unit = leakage_slope(params, initial_variance=1.0)
    if alpha_mode == "fixed":
        spent = float(np.log(1.0 / delta)) / (alpha - 1.0)
        if epsilon <= spent:
            raise SpecError(
                f"epsilon={epsilon:g} is not above ln(1/delta)/(alpha-1)={spent:g}: "
                f"raise epsilon or alpha={alpha:g}"
            )
        return float(unit * alpha / (epsilon - spent))
    if alpha_mode != "optimised":
        raise SpecError(f"alpha_mode={alpha_mode!r} is neither 'fixed' nor 'optimised'")
    # min over α of Aα + ln(1/δ)/(α−1) is A + 2√(A ln(1/δ)), so A is the zCDP ρ of (ε, δ)
    return float(unit / zcdp_from_epsilon(epsilon=epsilon, delta=delta))


# Privacy


def effective_rounds(schedule: Schedule) -> Float:
    """The bracket of Theorems 1 and 2: a run's leakage in rounds of scheme 0 (R itself when β = 1)."""
    scheme = schedule.scheme
    check_scheme(scheme, schedule.decay)
    R, beta, R_th, tau = f64(schedule.num_rounds, schedule.decay, schedule.decay_start, schedule.local_steps)
    if scheme == 0:
        return scalar(R)
    before, after = np.minimum(R, R_th), np.maximum(R - R_th, 0.0)
    growth = -np.log(beta)  # ratio 1/β
    if scheme == 1:
        return scalar(before + geometric_sum(growth, after + 1.0) - 1.0)  # Theorem 1
    return scalar(before + geometric_sum(growth, tau * after) / tau)  # Theorem 2


def leakage_slope(params: Params, *, initial_variance: Float) -> Float:
    """rdp(α)/α = 24 p²q²L²τ R_eff/(B²σ_0²) (Theorems 1-2); `const` replaces the 24 (S3, S6)."""
    steps = params.schedule.local_steps
    check_positive(batch_size=params.batch_size, initial_variance=initial_variance, local_steps=steps)
    tau, B, L, s2 = f64(steps, params.batch_size, params.clip_norm, initial_variance)
    p, q, k = f64(params.client_rate, params.data_rate, params.const)
    return k * p**2 * q**2 * L**2 * tau * effective_rounds(params.schedule) / (B**2 * s2)


def _decay_exponent(schedule: Schedule) -> Float:
    """How often the last noise of the run was multiplied by β, as Theorems 1 and 2 count it."""
    R, R_th, tau = f64(schedule.num_rounds, schedule.decay_start, schedule.local_steps)
    after = np.maximum(R - R_th, 0.0)
    if schedule.scheme == 0:
        return 0.0 * after
    return after if schedule.scheme == 1 else np.maximum(tau * after - 1.0, 0.0)


def max_alpha(params: Params, *, initial_variance: Float) -> Float:
    """The largest order the theorem allows: β^{R−R_th} σ_0² ln(1/(pq)), or β^{τ(R−R_th)−1}..."""
    schedule = params.schedule
    check_scheme(schedule.scheme, schedule.decay)
    p, q, s2, beta = f64(params.client_rate, params.data_rate, initial_variance, schedule.decay)
    exponent = _decay_exponent(schedule)
    shrink = np.power(beta, exponent) if schedule.scheme else 1.0 + exponent
    return scalar(shrink * s2 * np.log(1.0 / (p * q)))


def optimal_alpha(*, slope: Float, delta: Float) -> Float:
    """α* = 1 + √(ln(1/δ)/A): minimises Aα + ln(1/δ)/(α−1), A = rdp(α)/α."""
    check_delta(delta)
    A, d = f64(slope, delta)
    with np.errstate(divide="ignore"):  # no leakage: any order; leakage that overflowed: order 1, ε = ∞
        return 1.0 + np.sqrt(np.log(1.0 / d) / A)


def min_decay(schedule: Schedule, *, initial_variance: float) -> float:
    """The smallest β of Theorems 1 and 2: (5/σ_0²)^{1/(R−R_th)}, or the power 1/(τ(R−R_th)−1); 0 if none."""
    check_scheme(schedule.scheme)
    exponent = float(_decay_exponent(schedule))
    return 0.0 if exponent <= 0.0 else float((5.0 / initial_variance) ** (1.0 / exponent))


def _slope_and_order(params: Params, initial_variance: Float, delta: Float) -> tuple[Float, Float]:
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


def epsilon_of_noise(params: Params, *, initial_variance: Float, delta: Float) -> Float:
    """The paper's ε after R rounds: Theorem 1 or 2 and Definition 5."""
    A, order = _slope_and_order(params, initial_variance, delta)
    with np.errstate(invalid="ignore"):  # leakage that overflowed, at an order below 1
        return epsilon_from_rdp(rdp=A * order, alpha=order, delta=delta)  # Definition 5


def conditions(params: Params, *, initial_variance: float, alpha: float | None = None) -> tuple[Condition, ...]:
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


def claim(params: Params, *, initial_variance: float, delta: float) -> Claim:
    """The paper's ε of the run, with the theorem's conditions at the order that was used."""
    epsilon = float(epsilon_of_noise(params, initial_variance=initial_variance, delta=delta))
    order = float(_slope_and_order(params, initial_variance, delta)[1])
    scheme = params.schedule.scheme
    source = "Theorems 1-2 (R_eff = R)" if scheme == 0 else f"Theorem {scheme}"
    met = conditions(params, initial_variance=initial_variance, alpha=order)
    return Claim(epsilon, "run", delta, f"{source}, Definition 5, α = {order:.4g}", met)


def last_round_within(schedule: Schedule) -> int:
    """The last round within what scheme 0 spends in all `num_rounds` rounds. R_eff >= R bounds it."""
    budget = schedule.num_rounds
    rounds = np.arange(1, int(np.floor(budget)) + 1)
    spent = effective_rounds(schedule._replace(num_rounds=rounds))
    return int(np.sum(np.asarray(spent) <= budget * (1.0 + 1e-12)))


def stopping_round(params: Params, *, budget: float, delta: float, initial_variance: float) -> int:
    """The last of the `num_rounds` rounds r whose ε(r) does not exceed the budget (0 if none).

    ε(r) never falls: the leakage grows with r, and the theorem's range of orders shrinks."""
    rounds = np.arange(1, params.schedule.num_rounds + 1)
    epsilons = epsilon_of_noise(params.over(rounds), initial_variance=initial_variance, delta=delta)
    return int(np.sum(np.asarray(epsilons) <= budget * (1.0 + 1e-12)))
