"""Secure aggregation: what the noise of the other clients is worth (R6, G7).

The server sees only the sum of r uploads; c of the r clients collude with it and subtract their own noise.
Every μ below is for one round. A round has local steps of `rates` η_t, and `noise_multiplier` is (noise std of the
gradient)/(its sensitivity), one for all steps or one a step. Rounds compose by adding μ² (each depends on the past
through the public sum only). docs/privacy.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

from dither.errors import NoProof

_MOST_PATTERNS = 100  # of steps that use the record: more are bounded by one that costs more than any


def honest_others(cohort_size: int, colluders: int) -> int:
    """r - c - 1: clients besides the target whose noise the server does not know (0 at worst)."""
    if cohort_size < 1 or colluders < 0:
        raise ValueError(f"cohort_size={cohort_size} with colluders={colluders}")
    return max(0, cohort_size - colluders - 1)


def surviving_variance(rates: Sequence[float], variances: Sequence[float], smoothness: float | None) -> float:
    """W: what a shift of one client's last iterate costs is (length)²/W, if that client absorbs it alone.

    Its step t adds noise of `variances[t]` and is a gradient step of rate η_t on a convex loss of `smoothness` β,
    which may shrink what came before by κ = 1 - η_t β, or not at all. With ηβ >= 1, or β unknown, only the last
    step's noise counts. Equal rates and variances give G7b's Σ_{k<τ} κ^{2k}; the papers' W = τ is false.
    """
    total = 0.0
    for rate, fresh in zip(rates, variances, strict=True):
        kappa = 0.0 if smoothness is None else max(0.0, 1.0 - rate * smoothness)
        if kappa * (1.0 - kappa) * total <= 2.0 * fresh:
            total = fresh + kappa**2 * total
        else:  # a longer early shift would overshoot where the step does not shrink it
            total = (1.0 + kappa) ** 2 / (4.0 / total + (1.0 - kappa) ** 2 / fresh)
    return total


def absorption_cost(shifts: Iterable[float], variances: Iterable[float]) -> float:
    """μ² of shifts that arrive one after the other and are absorbed by noise of these variances, each when it is
    there or later: Σ slope²·length over the greatest convex minorant of the cumulated points."""
    segments: list[tuple[float, float]] = []
    for rise, length in zip(shifts, variances, strict=True):
        while segments and segments[-1][0] * length >= rise * segments[-1][1]:
            before = segments.pop()
            rise, length = rise + before[0], length + before[1]
        segments.append((rise, length))
    return sum(rise**2 / length for rise, length in segments if rise)


def credit_refusal(rates: Sequence[float], smoothness: float | None, convex: bool) -> str:
    """Why R6' proves nothing for a round of these rates; empty where it holds."""
    if len(rates) == 1:
        return ""  # noise is added once, after the only look at the data
    if not convex:
        return "the credit for the other clients' noise is proved for convex losses only (G7b)"
    if smoothness is None:
        return "G7b needs non-expansive steps, and no bound on learning rate x smoothness is known"
    if max(rates) * smoothness > 2.0:
        return f"learning rate x smoothness = {max(rates) * smoothness:g} > 2: local steps may expand (G7b)"
    return ""


# reason: the hypotheses of the theorem, each by its name
def aggregated_round_mu(
    noise_multiplier: float | Sequence[float],
    uses: int,
    *,
    rates: Sequence[float],
    others: float,
    smoothness: float | None,
    convex: bool,
    assume: bool = False,
) -> float:
    """R6': μ of one round with noise inside the local steps, record used in `uses` of them, whichever they are.

    A use at step t shifts the target's local model by η_t times the sensitivity; non-expansive steps keep shifts
    from growing. A shift is absorbed by the target's own noise of that step or later, and by what survives of the
    others' (V = others·W, available at the end). `others` is r - c - 1, or for unequal weights or noise the honest
    others' noise variance in the sum relative to the target's.

    Proved for binary linear models with per-example clipping and steps with η_t β <= 2. Otherwise NoProof, unless
    `assume`: the caller then labels the value as assumed.
    """
    steps = len(rates)
    if not 0 <= uses <= steps:
        raise ValueError(f"uses={uses} in {steps} local steps")
    noise = _each(noise_multiplier, rates)
    refusal = credit_refusal(rates, smoothness, convex)
    if refusal and not assume:
        raise NoProof(refusal)
    if uses == 0:
        return 0.0
    if min(noise) <= 0:
        return math.inf
    if max(noise) == math.inf:
        return 0.0 if min(noise) == math.inf else math.inf
    # Only ratios matter: a common factor of rates and noise is taken out, so that equal rounds are computed once.
    scaled = None if smoothness is None else smoothness * rates[-1]
    relative = tuple(rate / rates[-1] for rate in rates)
    return _unit_mu(relative, tuple(z / noise[-1] for z in noise), uses, float(others), scaled) / noise[-1]


@lru_cache(maxsize=1 << 14)
def _unit_mu(
    rates: tuple[float, ...], noise: tuple[float, ...], uses: int, others: float, smoothness: float | None
) -> float:
    steps = len(rates)
    variances = [(rate * z) ** 2 for rate, z in zip(rates, noise, strict=True)]
    credit = others * surviving_variance(rates, variances, smoothness)
    variances[-1] += credit
    if math.comb(steps, uses) <= _MOST_PATTERNS:
        patterns = [
            [rate if step in used else 0.0 for step, rate in enumerate(rates)]
            for used in combinations(range(steps), uses)
        ]
    else:  # the largest shifts, as late as can be: later or larger shifts never cost less
        patterns = [[0.0] * (steps - uses) + sorted(rates)[steps - uses :]]
    return math.sqrt(max(absorption_cost(pattern, variances) for pattern in patterns))


def smooth_round_mu(
    noise_multiplier: float | Sequence[float],
    uses: int,
    *,
    rates: Sequence[float],
    others: float,
    lipschitz: float,
) -> float:
    """G7c: one round, non-convex but smooth; `lipschitz` Ls is that of the clipped-gradient map.

    A shift grows by at most (1 + η_t Ls) a step, own noise is treated as public and of the others' noise only the
    last step counts: μ² = (Σ_u η_u Π_{t>u} (1 + η_t Ls))² / (others·(η_τ z_τ)²), over the costliest uses.
    """
    if lipschitz < 0:
        raise ValueError(f"lipschitz={lipschitz} is negative")
    noise = _each(noise_multiplier, rates)
    if others <= 0 or min(noise) <= 0:
        return math.inf if uses else 0.0
    shifts, log_growth = [], 0.0
    for rate in reversed(rates):
        shifts.append(rate * math.exp(log_growth) if log_growth < 700 else math.inf)
        log_growth += math.log1p(rate * lipschitz)
    return sum(sorted(shifts)[len(shifts) - uses :]) / (rates[-1] * noise[-1] * math.sqrt(others))


def _each(noise_multiplier: float | Sequence[float], rates: Sequence[float]) -> tuple[float, ...]:
    """One noise multiplier a step, checked together with the rates."""
    noise = tuple(noise_multiplier) if isinstance(noise_multiplier, Sequence) else (noise_multiplier,) * len(rates)
    if len(noise) != len(rates) or not rates or not all(0 < rate < math.inf for rate in rates):
        raise NoProof(
            f"rates={tuple(rates)} for {len(noise)} local steps give no bound: every rate must be positive"
        )
    return noise


def end_of_round_mu(noise_multiplier: float, *, others: float) -> float:
    """One release with noise added once, at the end of the round: the r - c credit is exact (G7)."""
    return math.inf if noise_multiplier <= 0 else 1.0 / (noise_multiplier * math.sqrt(1.0 + others))


def shuffled_uses(steps: int, batches_per_epoch: int) -> int:
    """D2: uses of one record in `steps` consecutive batches of shuffled epochs (partial ones dropped)."""
    if batches_per_epoch < 1:
        raise ValueError(f"batches_per_epoch={batches_per_epoch} must be at least 1")
    return -(-steps // batches_per_epoch)
