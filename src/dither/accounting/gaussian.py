"""Gaussian releases: exact accounting without sampling (R1), random numbers of uses (R4), one message (R5).

A Gaussian release with noise multiplier z = (noise std)/(sensitivity) is μ-Gaussian-DP with μ = 1/z, and
its privacy profile is known in closed form (Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy", ICML 2018, Theorem 8):

    δ(ε; μ) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ).

Adaptive composition adds μ² (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, Corollary 3.3), so
nothing is lost by composing first and converting once. Everything is float64 and works with ln δ.

Discrete noise. The sum of many clients' discrete Gaussian noise: zCDP (Kairouz, Liu, Steinke, ICML 2021, KLS).

KLS Proposition 14: let n clients each add N_Z(0, σ²), σ >= 1/2, to every coordinate of an integer
query in d dimensions, with ℓ2 and ℓ1 sensitivities Δ and Δ_1. With τ = 10 Σ_{k=1}^{n-1} exp(-2π²σ² k/(k+1)) and
s = sqrt(n)·σ, the Rényi divergence of order a > 1 between neighbours is at most the smallest of

    a Δ²/(2s²) + τ d,    a/2 (Δ²/s² + 2τ Δ_1/s + τ² d),    a/2 (Δ/s + τ sqrt(d))².

As a > 1, the first is at most a/2 (Δ²/s² + 2τd): so the sum is ρ-zCDP with `rho`. For n = 1 this is CKS
Theorem 4 and τ is 0. `n` counts the clients whose noise the adversary does not know: survivors less colluders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.special import erfcx, log_ndtr, logsumexp

from dither.errors import NoProof

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2.0)
_LARGE_MU = 1e8  # beyond, ε/μ and μ/2 agree in too many of their digits
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def brentq(function: Callable[[float], float], low: float, high: float, **options: Any) -> float:
    """SciPy's root finder, imported when it is first called: all of scipy.optimize comes with it."""
    from scipy.optimize import brentq

    return float(brentq(function, low, high, **options))


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 <= delta <= 1."""
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta={delta} is not a probability")


def _mills(t: np.ndarray) -> np.ndarray:
    """Mills' ratio Φ(-t)/φ(t)."""
    return np.asarray(_SQRT_HALF_PI * erfcx(t / math.sqrt(2.0)))


def log_gaussian_delta(epsilon: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """ln δ(ε; μ) of a μ-Gaussian-DP release (R1), for arrays; ε may be negative.

    With x = ε/μ, e^ε φ(x + μ/2) = φ(x - μ/2), so that δ = φ(x - μ/2) (M(x - μ/2) - M(x + μ/2)) with
    Mills' ratio M. That form keeps its relative precision in the far tail. For small μ the difference
    itself would cancel, and is integrated instead: -M'(t) = 1 - t M(t).
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    result = np.full(epsilon.shape, -np.inf)
    # μ = 0 reveals nothing: δ = max(0, 1 - e^ε)
    silent = mu <= 0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        result[silent] = np.log(np.maximum(0.0, -np.expm1(np.minimum(epsilon[silent], 0.0))))
        result[mu == np.inf] = 0.0
        live = (mu > 0) & (mu < np.inf) & (epsilon < np.inf)
        e, m = epsilon[live], mu[live]
        near, far = e / m - m / 2.0, e / m + m / 2.0
        # near < -5: δ is close to max(1 - e^ε, ...), where the plain difference is accurate
        log_near = log_ndtr(-near)
        plain = log_near + np.log(-np.expm1(np.minimum(e + log_ndtr(-far) - log_near, 0.0)))
        floor = np.maximum(near, -6.0)
        gap = _mills(floor) - _mills(far)
        half = (m / 2.0)[..., None]
        t = (e / m)[..., None] + half * _NODES
        # past t of about 30, 1 - tM(t) loses digits: its asymptotic series takes over
        series = 1 / t**2 - 3 / t**4 + 15 / t**6 - 105 / t**8
        slope = np.where(t > 30.0, series, 1.0 - t * _mills(np.maximum(t, -6.0)))
        gap = np.where(m < 0.2, np.sum(half * _WEIGHTS * slope, axis=-1), gap)
        tail = -0.5 * near**2 - _LOG_SQRT_2PI + np.log(gap)
        result[live] = np.minimum(np.where(near < -5.0, plain, tail), 0.0)
    return result


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε; μ) of a μ-Gaussian-DP release: R1, exact."""
    return float(np.exp(log_gaussian_delta(epsilon, mu)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε >= 0 with δ(ε; μ) <= delta: R1, exact. Infinite for delta = 0 and any μ > 0."""
    check_delta(delta)
    if math.isnan(mu) or mu < 0:
        raise ValueError(f"mu={mu} is not a distance")
    if mu == 0 or delta >= 1.0:
        return 0.0
    if delta == 0.0 or mu == math.inf:
        return math.inf
    log_delta = math.log(delta)
    if float(log_gaussian_delta(0.0, mu)) <= log_delta:
        return 0.0
    # δ(ε) <= Φ(μ/2 - ε/μ) <= exp(-(ε/μ - μ/2)²/2) bounds ε from above
    high = mu * (mu / 2.0 + math.sqrt(-2.0 * log_delta))
    if mu > _LARGE_MU:
        return high * (1.0 + 1e-15)
    return float(
        brentq(lambda e: float(log_gaussian_delta(e, mu)) - log_delta, 0.0, high, xtol=1e-14 * high, rtol=1e-14)
    )


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest μ with δ(ε; μ) <= delta: the inverse of `gaussian_epsilon` (R1)."""
    check_delta(delta)
    if epsilon < 0:
        raise ValueError(f"epsilon={epsilon} is negative")
    if delta >= 1.0 or epsilon == math.inf:
        return math.inf
    if delta == 0.0:
        return 0.0
    log_delta = math.log(delta)

    def excess(log_mu: float) -> float:
        return float(log_gaussian_delta(epsilon, math.exp(log_mu))) - log_delta

    low = high = 0.0
    while excess(low) > 0:
        low -= 2.0
    while excess(high) < 0:
        high += 1.0
    return math.exp(brentq(excess, low, high, xtol=1e-14, rtol=1e-14))


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """Smallest σ/Δ of one Gaussian release that is (ε, δ)-DP: Balle and Wang's analytic calibration."""
    mu = gaussian_mu(epsilon, delta)
    return math.inf if mu == 0 else 1.0 / mu


def compose_gaussians(noise_multipliers: Iterable[tuple[float, float]]) -> float:
    """μ of an adaptive composition, from (noise multiplier, count) pairs: R1, μ² = Σ count/z²."""
    total = 0.0
    for noise_multiplier, count in noise_multipliers:
        if noise_multiplier < 0 or count < 0:
            raise ValueError(f"noise_multiplier={noise_multiplier} and count={count} must not be negative")
        if count:
            total += math.inf if noise_multiplier == 0 else count / noise_multiplier**2
    return math.sqrt(total)


def zcdp_epsilon_tight(rho: float, delta: float) -> float:
    """Conversion of ρ-zCDP by Canonne, Kamath and Steinke (2020, Corollary 13): G6.

    ε = min over α > 1 of αρ + ln(1 - 1/α) - ln(δα)/(α - 1). For Gaussian releases R1 is tighter still.
    """
    if rho == 0:
        return 0.0

    def slope(log_order: float) -> float:
        # derivative in α: ρ + (1/(α(α-1))) - [1/(α(α-1)) - ln(δα)/(α-1)²] = ρ + ln(δα)/(α-1)²
        order = 1.0 + math.exp(log_order)
        return rho + math.log(delta * order) / (order - 1.0) ** 2

    low, high = -30.0, math.log(1.0 / delta)
    order = 1.0 + math.exp(brentq(slope, low, high, xtol=1e-14)) if slope(high) > 0 else 1.0 / delta
    return max(0.0, order * rho + math.log1p(-1.0 / order) - math.log(delta * order) / (order - 1.0))


def classical_valid_up_to(delta: float) -> float:
    """The largest ε at which the textbook σ/Δ = sqrt(2 ln(1.25/δ))/ε, proved for ε < 1, still suffices (G1)."""

    def slack(epsilon: float) -> float:
        return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon - gaussian_noise_multiplier(epsilon, delta)

    return float(brentq(slack, 1.0, 50.0, xtol=1e-12, rtol=1e-13))


def amplified_epsilon(epsilon: float, rate: float) -> float:
    """ε' = ln(1 + rate (e^ε - 1)): privacy amplification by sampling (δ' = rate · δ)."""
    _check_rate(rate)
    if epsilon > 30.0:
        return epsilon + math.log(rate) + math.log1p((1.0 - rate) / rate * math.exp(-epsilon))
    return math.log1p(rate * math.expm1(epsilon))


def unamplified_epsilon(epsilon: float, rate: float) -> float:
    """ε0 = ln(1 + (e^ε - 1)/rate): the inverse of `amplified_epsilon` (E1, N4; δ0 = δ/rate)."""
    _check_rate(rate)
    if epsilon > 30.0:
        return epsilon - math.log(rate) + math.log1p(-(1.0 - rate) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / rate)


def _check_rate(rate: float) -> None:
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate={rate} is not in (0, 1]")


def closeness(variance: float, clients: int) -> float:
    """KLS's τ: how far the sum of that many discrete Gaussians is from one of the summed variance."""
    k = np.arange(1, clients, dtype=np.float64)
    return float(10.0 * np.exp(-2.0 * math.pi**2 * variance * k / (k + 1)).sum())


def rho(sensitivity: float, *, variance: float, clients: int, dimension: int) -> float:
    """ρ of ρ-zCDP for one release of the sum; several releases add up. See the module's docstring.

    `sensitivity` is the ℓ2 distance of neighbours' integer vectors, `variance` that of one client's noise,
    `clients` how many add it unknown to the adversary. It implies the ℓ1 distance: of integers, at most
    sensitivity·min(sqrt(d), sensitivity).
    """
    if clients < 1:
        raise NoProof(f"{clients} clients add noise that the adversary does not know: nothing is hidden")
    if variance < 0.25 and clients > 1:
        raise NoProof(
            f"variance={variance:g} is below 1/4 per client: the sum's noise has no proof; use a finer grid"
        )
    l1 = sensitivity * min(math.sqrt(dimension), sensitivity)
    ratio, tau = sensitivity / math.sqrt(clients * variance), closeness(variance, clients)
    return 0.5 * min(
        ratio**2 + 2.0 * tau * dimension,
        ratio**2 + 2.0 * tau * l1 / math.sqrt(clients * variance) + tau**2 * dimension,
        (ratio + tau * math.sqrt(dimension)) ** 2,
    )


# Long schedules, and Poisson batches that are cut (R3)

MAX_NOISE_LEVELS = 64


def rounded_levels(
    levels: Iterable[tuple[float, float]], limit: int = MAX_NOISE_LEVELS
) -> dict[tuple[float, float], tuple[float, float]]:
    """For each (rate, noise multiplier) the pessimistic level that stands for it; about `limit` of them.

    Up to `limit` levels stand for themselves. More are rounded geometrically between the smallest and the
    largest multiplier of each rate, downwards only, so that the result is an upper bound: a schedule of
    10,000 noise levels costs `limit` transforms. Too many rates are all raised to the largest.
    """
    levels = sorted(set(levels))
    if len(levels) <= limit:
        return {level: level for level in levels}
    rates = sorted({rate for rate, _ in levels})
    target = {rate: rate if len(rates) <= limit // 4 else rates[-1] for rate in rates}
    share = limit // len(set(target.values()))
    result = {}
    for raised in sorted(set(target.values())):
        own = [level for level in levels if target[level[0]] == raised]
        finite = [z for _, z in own if 0 < z < math.inf]
        smallest = min(finite, default=1.0)
        width = max(math.log(max(finite, default=1.0) / smallest) / share, 1e-12)
        for rate, z in own:
            floor = z
            if 0 < z < math.inf:
                # the last bucket is closed: the largest multiplier joins it
                bucket = min(int(math.log(z / smallest) / width), share - 1)
                floor = min(z, smallest * math.exp(bucket * width))
            result[rate, z] = (raised, floor)
    return result


def charge_truncation(
    epsilon_of: Callable[[float], float], delta: float, failure: float, *, others_failure: float = math.inf
) -> float:
    """The smallest ε with δ'(ε) + charge(ε) <= δ, where ε = epsilon_of(δ'): capped Poisson batches (R3).

    A capped batch differs from the sampled one only when more records were drawn than fit. Two charges are
    valid, and the smaller one is taken at each ε:

    (1 + e^ε)·failure, if that happens anywhere in the run with probability at most `failure` on each of the
    two datasets, because for all events S
        Pr[M~(D) in S] <= Pr[M(D) in S] + failure <= e^ε Pr[M(D') in S] + δ' + failure
                       <= e^ε Pr[M~(D') in S] + δ' + (1 + e^ε)·failure;

    others_failure, if with at most that probability the records other than the target alone fill a batch.
    This event has the same probability in both worlds, and outside it the target's coin is independent of
    the rest and nothing is cut: each step's loss is a Poisson step's, or infinite with that probability.
    Pr[Bin(n,q) > cap] >= q Pr[Bin(n-1,q) >= cap], so a batch's truncation probability over q bounds it.
    """
    if not 0.0 <= failure <= 1.0:
        raise ValueError(f"failure={failure} is not a probability")

    def room(epsilon: float) -> float:
        growth = 1.0 + math.exp(min(epsilon, 700.0))
        return delta - min(growth * failure, others_failure)

    epsilon = epsilon_of(delta)
    if failure == 0.0 or epsilon == math.inf:
        return epsilon
    # From below, the iteration only increases ε, so it stops at the smallest solution or has none.
    for _ in range(200):
        left = room(epsilon)
        if left <= 0:
            return math.inf
        larger = epsilon_of(left)
        if larger == math.inf:
            return math.inf
        if larger <= epsilon * (1.0 + 1e-9) + 1e-12:
            # a little above the limit the inequality holds, not merely nearly
            candidate = larger * (1.0 + 1e-7) + 1e-10
            if room(candidate) > 0 and epsilon_of(room(candidate)) <= candidate:
                return candidate
        epsilon = max(larger, epsilon)
    return math.inf


# Random numbers of uses (R4)


def binomial_pmf(trials: int, probability: float) -> np.ndarray:
    """Pr[J = j] for j = 0..trials, J ~ Bin(trials, probability)."""
    from scipy.stats import binom  # half a second to import: only where it is needed

    return np.asarray(binom.pmf(np.arange(trials + 1), trials, probability), float)


def mixture_epsilon(
    weights: Sequence[float] | np.ndarray, mus: Sequence[float] | np.ndarray, delta: float
) -> float:
    """The smallest ε >= 0 with Σ_j weights_j δ_G(ε; mus_j) <= delta (R4)."""
    check_delta(delta)
    weights, mus = np.asarray(weights, float), np.asarray(mus, float)
    if weights.shape != mus.shape or np.any(weights < 0) or weights.sum() > 1 + 1e-9:
        raise ValueError(f"weights of sum {weights.sum()} and shape {weights.shape} for mus of shape {mus.shape}")
    held = (weights > 0) & (mus > 0)
    weights, mus = weights[held], mus[held]
    if len(mus) == 0:
        return 0.0
    if delta == 0.0:
        return math.inf
    if np.any(mus == np.inf):
        # outcomes that hide nothing are a failure probability
        lost = float(weights[mus == np.inf].sum())
        return (
            mixture_epsilon(weights[mus < np.inf], mus[mus < np.inf], delta - lost) if lost < delta else math.inf
        )
    log_weights, log_delta = np.log(weights), math.log(delta)

    def excess(epsilon: float) -> float:
        return float(logsumexp(log_weights + log_gaussian_delta(epsilon, mus))) - log_delta

    if excess(0.0) <= 0:
        return 0.0
    high = gaussian_epsilon(float(mus.max()), delta)
    if excess(high) >= 0 or mus.max() > _LARGE_MU:  # one component: the mixture is the Gaussian, up to rounding
        return high
    return float(brentq(excess, 0.0, high, xtol=1e-14 * high, rtol=1e-13))


def random_uses_epsilon(
    pmf: Sequence[float] | np.ndarray, mu_one: float, delta: float, *, adaptive_selection: bool = False
) -> float:
    """R4: the record is used J times, Pr[J = j] = pmf[j], each use costing μ = mu_one.

    δ(ε) = Σ_j Pr[J=j] δ_G(ε; sqrt(j) μ), whether the pattern of uses is visible or not. Ex ante: given the
    realised J the guarantee is that of J uses. The pattern must be drawn by an honest party independently
    of the data and of every earlier output; a pattern that reacts to outputs is refused, because the
    mixture is then false (the second round chosen by the first one's output can multiply δ by 23).
    """
    pmf = np.asarray(pmf, float)
    if adaptive_selection:
        most = int(np.flatnonzero(pmf > 0).max(initial=0))
        raise NoProof(
            f"R4 needs uses drawn independently of earlier outputs, and selection is adaptive; "
            f"account for the maximum of {most} uses instead"
        )
    if abs(pmf.sum() - 1.0) > 1e-9:
        raise ValueError(f"pmf sums to {pmf.sum()}, not 1")
    return mixture_epsilon(pmf, np.sqrt(np.arange(len(pmf))) * mu_one, delta)


def shuffled_round_pattern(rounds: int, steps: int, per_epoch: int, rate: float) -> dict[tuple[int, int], float]:
    """Pr[a rounds use the record once, b rounds twice] for shuffled epochs over consecutive rounds (D2, R4).

    Epochs of `per_epoch` batches are consumed in rounds of `steps` <= per_epoch batches; in each epoch the
    record is in one batch, uniformly (`rate` a batch; the dropped partial batch takes the rest). A round that
    straddles two epochs can use it twice, which aggregation credits less than two rounds with one use.
    """
    if not 1 <= steps <= per_epoch or not 0 <= rate * per_epoch <= 1 + 1e-9:
        raise ValueError(f"steps={steps}, per_epoch={per_epoch}, rate={rate} are not epochs of whole batches")
    total = rounds * steps
    # (rounds with one use, with two, whether the last use lies in the round that the next epoch shares)
    state = {(0, 0, False): 1.0}
    for start in range(0, total, per_epoch):
        end = min(start + per_epoch, total)
        head = min(-start % steps, end - start)  # batches in the round shared with the epoch before
        tail = end % steps if end == start + per_epoch else 0  # and with the one after
        chances = (head * rate, (end - start - head - tail) * rate, tail * rate)
        following: dict[tuple[int, int, bool], float] = {}

        def add(
            key: tuple[int, int, bool], weight: float, into: dict[tuple[int, int, bool], float] = following
        ) -> None:
            if weight > 0:
                into[key] = into.get(key, 0.0) + weight

        for (once, twice, pending), weight in state.items():
            met = (once - 1, twice + 1, False) if pending else (once + 1, twice, False)
            add(met, weight * chances[0])
            add((once + 1, twice, False), weight * chances[1])
            add((once + 1, twice, True), weight * chances[2])
            add((once, twice, False), weight * (1.0 - sum(chances)))
        state = following
    result: dict[tuple[int, int], float] = {}
    for (once, twice, _), weight in state.items():
        result[once, twice] = result.get((once, twice), 0.0) + weight
    return result


# One release a round on random batches (R5, Secure FedAvg)


def inclusion_probability(batch_size: int, population: int, local_steps: int) -> float:
    """p = 1 - (1 - b/n)^Q: the record enters at least one of Q fresh batches (E5 corrects eq (7))."""
    if not 0 < batch_size <= population:
        raise ValueError(f"batch_size={batch_size} of population={population}")
    if batch_size == population:
        return 1.0
    return -math.expm1(local_steps * math.log1p(-batch_size / population))


def message_epsilon(mu: float, rate: float, delta: float) -> float:
    """R5, one message: ε' = ln(1 + p (e^ε0 - 1)) with ε0 exact at (μ = Δ/σ, δ/p). E1."""
    return amplified_epsilon(gaussian_epsilon(mu, min(1.0, delta / rate)), rate)


def message_noise_multiplier(epsilon: float, rate: float, delta: float) -> float:
    """R5 inverted: the σ/Δ that gives one message (ε, δ). E1's correct calibration."""
    if delta >= rate:
        return 0.0  # the record is absent from the batch with probability at least 1 - δ
    return gaussian_noise_multiplier(unamplified_epsilon(epsilon, rate), delta / rate)


def convex_message_epsilon(
    learning_rates: Sequence[float],
    clip_norm: float,
    batch_size: int,
    population: int,
    noise_std: float,
    delta: float,
) -> float:
    """E3: one message when local steps are non-expansive and clipping is per example.

    The record is used J ~ Bin(Q, b/n) times and then shifts the local model by at most
    Δ_j = (2G/b)·(sum of the j largest learning rates), so that
    δ'(ε') = Σ_{j>=1} Pr[J=j] δ_G(ln(1 + (e^ε' - 1)/p); Δ_j/σ). Holds for η <= 2/smoothness with a
    smoothness bound that does not depend on the data (feature norms clamped).
    """
    check_delta(delta)
    rates = np.sort(np.asarray(learning_rates, float))[::-1]
    used = inclusion_probability(batch_size, population, len(rates))
    weights = binomial_pmf(len(rates), batch_size / population)[1:]
    shifts = 2.0 * clip_norm / batch_size * np.cumsum(rates)
    if noise_std <= 0 or delta == 0:
        return math.inf
    # Σ_j w_j = p: the inner mixture at δ/p, then amplification
    return amplified_epsilon(mixture_epsilon(weights / used, shifts / noise_std, min(1.0, delta / used)), used)
