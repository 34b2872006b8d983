"""The sum of many clients' discrete Gaussian noise: zCDP (Kairouz, Liu, Steinke, ICML 2021, KLS).

KLS Proposition 14: let n clients each add N_Z(0, σ²), σ >= 1/2, to every coordinate of an integer
query in d dimensions, with ℓ2 and ℓ1 sensitivities Δ and Δ_1. With τ = 10 Σ_{k=1}^{n-1} exp(-2π²σ² k/(k+1)) and
s = sqrt(n)·σ, the Rényi divergence of order a > 1 between neighbours is at most the smallest of

    a Δ²/(2s²) + τ d,    a/2 (Δ²/s² + 2τ Δ_1/s + τ² d),    a/2 (Δ/s + τ sqrt(d))².

As a > 1, the first is at most a/2 (Δ²/s² + 2τd): so the sum is ρ-zCDP with `rho`. For n = 1 this is CKS
Theorem 4 and τ is 0. `n` counts the clients whose noise the adversary does not know: survivors less colluders.
"""

from __future__ import annotations

import math

import numpy as np

from dither.errors import NoProof


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
