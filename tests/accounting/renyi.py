"""Rényi accounting of sampled batches: independent of the accountant's loss distributions, and looser."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp

ORDERS = tuple(range(2, 257))  # integers: fractional orders lose precision for multipliers above 100


def fixed_size_rdp(rate, noise_multiplier, orders=ORDERS):
    """Rényi divergences of one fixed-size batch, replace-one (Wang et al. 2019, Theorem 27; R2).

    The theorem needs the moments E[(P/Q - 1)^l] of the Gaussian pair. dp-accounting forms them as
    alternating sums, which lose all digits for multipliers in the hundreds (12 % too large at z = 707,
    order 88); for even l the integrand is positive, and a trapezoid rule gives them to full precision.
    """
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


def _log_even_moments(mu, powers):
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


def poisson_rdp(rate, noise_multiplier, orders=ORDERS):
    """Rényi divergences of one Poisson batch, add/remove (Mironov, Talwar and Zhang 2019; R3)."""
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant([int(order) for order in orders])
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier)))
    return np.asarray(accountant._rdp, float)


def epsilon(divergences, steps, delta, tried=ORDERS):
    """ε of a composition: RDP adds up; converted as by Canonne, Kamath and Steinke (2020).

    For a schedule of noise levels only the smallest multiplier is evaluated: with h = e^{(a-1)RDP} - 1,
    h(z) z² does not increase with z, so Σ RDP(z_t) <= h(z_min)/(a-1) · z_min² Σ 1/z_t² (errata S1).
    """
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
