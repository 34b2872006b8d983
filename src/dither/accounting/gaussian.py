"""Gaussian releases: exact accounting without sampling (R1), and on sampled batches (R2, R3).

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

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from scipy.special import erfcx, gammaln, log_ndtr, logsumexp

from dither.accounting import pld
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


# Releases on sampled batches: fixed-size batches (R2), Poisson batches (R3), and the Rényi fallback. A step is
# (rate, noise_multiplier, count). What the noise multiplier is relative to differs, because the adjacencies do:
#
#     fixed size, replace-one      noise std / replace-one distance       σB/(2·clip)
#     Poisson, any adjacency       noise std / norm of one contribution   σB/clip, B the fixed normaliser q·m

Step = tuple[float, float, int]

MAX_NOISE_LEVELS = 64
ORDERS = tuple(range(2, 257))  # integers: fractional orders lose precision for multipliers above 100


def check_step(rate: float, noise_multiplier: float, count: int) -> None:
    """Raise ValueError for a rate outside [0, 1], a negative multiplier or a negative count."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate={rate} is not in [0, 1]")
    if math.isnan(noise_multiplier) or noise_multiplier < 0:
        raise ValueError(f"noise_multiplier={noise_multiplier} is negative")
    if count < 0 or count != int(count):
        raise ValueError(f"count={count} is not a number of releases")


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


def merge_steps(steps: Iterable[Step], limit: int = MAX_NOISE_LEVELS) -> tuple[Step, ...]:
    """Equal steps counted together, after `rounded_levels`; what reveals nothing is dropped."""
    kept = []
    for rate, noise_multiplier, count in steps:
        check_step(rate, noise_multiplier, count)
        if count and rate > 0 and noise_multiplier < math.inf:
            kept.append(((float(rate), float(noise_multiplier)), int(count)))
    levels = rounded_levels((level for level, _ in kept), limit)
    counts: dict[tuple[float, float], int] = {}
    for level, count in kept:
        counts[levels[level]] = counts.get(levels[level], 0) + count
    return tuple((rate, z, n) for (rate, z), n in sorted(counts.items()))


CURVES: dict[str, tuple[Callable[[float, float], pld.Curve], ...]] = {
    "fixed": (pld.fixed_size,),
    "poisson": (pld.removal, pld.addition),
    "poisson_replace": (pld.poisson_replacement,),
}


@functools.lru_cache(maxsize=256)
def _distributions(kind: str, steps: tuple[Step, ...], delta: float) -> tuple[pld.LossDistribution, ...]:
    """One composed loss distribution a direction."""
    return tuple(
        pld.compose([pld.Events([(curve(rate, 1.0 / z), n) for rate, z, n in steps])], delta)
        for curve in CURVES[kind]
    )


def _pld_epsilon(kind: str, steps: Sequence[Step], delta: float) -> float:
    check_delta(delta)
    merged = merge_steps(steps)
    if not merged or delta >= 1:
        return 0.0
    if any(z == 0 for _, z, _ in merged):
        return math.inf
    return max(d.epsilon(delta) for d in _distributions(kind, merged, delta))


def fixed_size_epsilon(
    rate: float, noise_multiplier: float, steps: int, delta: float, *, method: str = "pld"
) -> float:
    """R2: `steps` fresh uniform batches of fixed size, replace-one, noise relative to that distance.

    method "pld" composes the dominating profile of G4; "rdp" is the fallback (Wang, Balle and
    Kasiviswanathan 2019), about twice looser and useless below a multiplier of 0.5.
    """
    return fixed_size_composition([(rate, noise_multiplier, steps)], delta, method=method)


def fixed_size_composition(
    steps: Sequence[Step], delta: float, *, method: str = "pld", orders: Sequence[int] = ORDERS
) -> float:
    """R2 for batches of different rate or noise; `orders` are those of the Rényi fallback."""
    if method == "pld":
        return _pld_epsilon("fixed", steps, delta)
    if method == "rdp":
        return _rdp_epsilon(fixed_size_rdp, steps, delta, orders)
    raise ValueError(f"method={method!r}; known: 'pld', 'rdp'")


def poisson_epsilon(
    rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    *,
    adjacency: str = "zero-out",
    method: str = "pld",
) -> float:
    """R3: `steps` Poisson batches; noise relative to the norm of one record's contribution.

    zero-out and add/remove: the larger of both directions. replace-one: the pair of
    `loss.poisson_replacement`, which is also what dp-accounting's PLD accountant computes under REPLACE_ONE;
    it doubles the distance itself, so the multiplier stays relative to the contribution.
    """
    return poisson_composition([(rate, noise_multiplier, steps)], delta, adjacency=adjacency, method=method)


def poisson_composition(
    steps: Sequence[Step],
    delta: float,
    *,
    adjacency: str = "zero-out",
    method: str = "pld",
    orders: Sequence[int] = ORDERS,
) -> float:
    """R3 for batches of different rate or noise; `orders` are those of the Rényi fallback."""
    if adjacency not in ("zero-out", "replace-one", "add/remove"):
        raise ValueError(f"adjacency={adjacency!r}; known: 'zero-out', 'replace-one', 'add/remove'")
    if method == "pld":
        return _pld_epsilon("poisson_replace" if adjacency == "replace-one" else "poisson", steps, delta)
    if method == "rdp" and adjacency != "replace-one":
        return _rdp_epsilon(poisson_rdp, steps, delta, orders)
    raise ValueError(f"method={method!r} does not cover {adjacency} with Poisson batches")


# --- Rényi fallback ------------------------------------------------------------------------------------


def fixed_size_rdp(rate: float, noise_multiplier: float, orders: Sequence[int] = ORDERS) -> np.ndarray:
    """Rényi divergences of one fixed-size batch, replace-one (Wang et al. 2019, Theorem 27; R2).

    The theorem needs the moments E[(P/Q - 1)^l] of the Gaussian pair. dp-accounting forms them as
    alternating sums, which lose all digits for multipliers in the hundreds (12 % too large at z = 707,
    order 88); for even l the integrand is positive, and a trapezoid rule gives them to full precision.
    """
    _check_orders(orders)
    if rate == 0 or noise_multiplier == math.inf:
        return np.zeros(len(orders))
    wanted = np.array(orders, float)
    rho = 0.5 / noise_multiplier**2
    if rate == 1:
        return wanted * rho
    powers = np.arange(2, max(orders) + 1)
    even = np.arange(2, max(orders) + 3, 2)
    log_moments = _log_even_moments(1.0 / noise_multiplier, even)
    low, high = powers // 2 - 1, (powers + 1) // 2 - 1
    with np.errstate(over="ignore"):
        second = min(
            math.log(4.0) + math.log(math.expm1(2 * rho)) if 2 * rho < 700 else math.inf,
            2 * rho + math.log(2),
        )
    terms = np.minimum(
        math.log(4.0) + 0.5 * (log_moments[low] + log_moments[high]),
        math.log(2.0) + powers * (powers - 1) * rho,
    )
    terms[0] = second
    terms += powers * math.log(rate)
    result = np.empty(len(orders))
    for k, order in enumerate(orders):
        inside = powers[: order - 1]
        log_choose = gammaln(order + 1) - gammaln(inside + 1) - gammaln(order - inside + 1)
        result[k] = np.logaddexp(0.0, logsumexp(log_choose + terms[: order - 1])) / (order - 1)
    return result


def _log_even_moments(mu: float, powers: np.ndarray) -> np.ndarray:
    """ln E[(e^{μx - μ²/2} - 1)^l], x standard normal, for even l."""
    widest = float(powers[-1])
    x = np.arange(-math.sqrt(widest) - 14.0, max(widest * mu, math.sqrt(widest)) + mu + 14.0, 0.02)
    exponent = mu * x - mu**2 / 2.0
    with np.errstate(divide="ignore"):
        # ln|e^y - 1|, whose large side would overflow
        log_gap = np.where(
            exponent > 1,
            exponent + np.log1p(-np.exp(-np.abs(exponent))),
            np.log(np.abs(np.expm1(np.minimum(exponent, 1.0)))),
        )
    log_density = -0.5 * x**2 - 0.5 * math.log(2.0 * math.pi) + math.log(0.02)
    return np.array([logsumexp(log_density + power * log_gap) for power in powers])


def poisson_rdp(rate: float, noise_multiplier: float, orders: Sequence[int] = ORDERS) -> np.ndarray:
    """Rényi divergences of one Poisson batch, add/remove (Mironov, Talwar and Zhang 2019; R3)."""
    import dp_accounting

    _check_orders(orders)
    accountant = dp_accounting.rdp.RdpAccountant([int(order) for order in orders])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier)))
    return np.asarray(accountant._rdp, float)


def _check_orders(orders: Sequence[int]) -> None:
    if any(order != int(order) or order < 2 for order in orders):
        raise ValueError(f"orders={tuple(orders)}: only integers from 2 on are exact enough")


def _rdp_epsilon(
    divergences: Callable[..., np.ndarray], steps: Sequence[Step], delta: float, tried: Sequence[int]
) -> float:
    """ε of a composition: RDP adds up; converted as by Canonne, Kamath and Steinke (2020).

    For a schedule of noise levels only the smallest multiplier is evaluated: with h = e^{(a-1)RDP} - 1,
    h(z) z² does not increase with z, so Σ RDP(z_t) <= h(z_min)/(a-1) · z_min² Σ 1/z_t² (errata S1).
    """
    check_delta(delta)
    if delta == 0:
        return math.inf
    orders = np.array(tried, float)
    total = np.zeros(len(orders))
    for rate in sorted({step[0] for step in steps if step[2]}):
        own = [(z, n) for r, z, n in steps if r == rate and n]
        smallest = min(z for z, _ in own)
        if rate == 0 or smallest == math.inf:
            continue
        if smallest == 0:
            return math.inf
        single = divergences(rate, smallest, tried)
        if all(z == smallest for z, _ in own):
            total += sum(n for _, n in own) * single
        else:
            with np.errstate(over="ignore"):
                weight = smallest**2 * sum(n / z**2 for z, n in own)
                total += np.expm1((orders - 1.0) * single) / (orders - 1.0) * weight
    if not total.any():
        return 0.0
    values = total + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
    return max(0.0, float(np.nanmin(values)))


# --- truncated Poisson batches -------------------------------------------------------------------------


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


def plain_epsilon(noise_multiplier: float, steps: int, delta: float) -> float:
    """R1 for `steps` equal releases without sampling."""
    check_step(1.0, noise_multiplier, steps)
    if steps == 0:
        return 0.0
    return gaussian_epsilon(math.inf if noise_multiplier == 0 else math.sqrt(steps) / noise_multiplier, delta)
