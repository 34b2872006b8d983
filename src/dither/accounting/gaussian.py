"""Exact accounting of Gaussian releases without sampling: recipe R1.

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
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy.special import erfcx, log_ndtr

from dither.errors import NoProof

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2.0)
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


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The papers' conversion of ρ-zCDP, ε = ρ + 2 sqrt(ρ ln(1/δ)): valid, loose (G6)."""
    return rho + 2.0 * math.sqrt(rho * math.log(1.0 / delta))


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


def classical_noise_multiplier(epsilon: float, delta: float) -> float:
    """The textbook σ/Δ = sqrt(2 ln(1.25/δ))/ε, proved for ε < 1 only (G1)."""
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def classical_valid_up_to(delta: float) -> float:
    """The largest ε at which the textbook constant is still sufficient, found with R1 (G1)."""

    def slack(epsilon: float) -> float:
        return classical_noise_multiplier(epsilon, delta) - gaussian_noise_multiplier(epsilon, delta)

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


def rho(sensitivity: float, *, variance: float, clients: int, dimension: int, l1: float | None = None) -> float:
    """ρ of ρ-zCDP for one release of the sum; several releases add up. See the module's docstring.

    `sensitivity` is the ℓ2 distance of neighbours' integer vectors, `variance` that of one client's noise,
    `clients` how many add it unknown to the adversary. `l1` is the ℓ1 distance where a better one is known than
    the ℓ2 distance implies (for integers sensitivity·min(sqrt(d), sensitivity)).
    """
    if clients < 1:
        raise NoProof(f"{clients} clients add noise that the adversary does not know: nothing is hidden")
    if variance < 0.25 and clients > 1:
        raise NoProof(
            f"variance={variance:g} is below 1/4 per client: the sum's noise has no proof; use a finer grid"
        )
    implied = sensitivity * min(math.sqrt(dimension), sensitivity)
    l1 = implied if l1 is None else min(l1, implied)
    ratio, tau = sensitivity / math.sqrt(clients * variance), closeness(variance, clients)
    return 0.5 * min(
        ratio**2 + 2.0 * tau * dimension,
        ratio**2 + 2.0 * tau * l1 / math.sqrt(clients * variance) + tau**2 * dimension,
        (ratio + tau * math.sqrt(dimension)) ** 2,
    )
