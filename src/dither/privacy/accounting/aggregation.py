"""Secure aggregation: what the noise of the other clients is worth (R6, G7).

The server sees only the sum of r uploads; c of the r clients collude with it and subtract their own noise.
Every μ below is for one round, per unit noise multiplier z = (noise std of one local step)/(sensitivity of
one local step); rounds compose by adding μ² (each depends on the past through the public sum only).
"""

from __future__ import annotations

import math

from dither.errors import NoProof


def honest_others(cohort_size: int, colluders: int) -> int:
    """r - c - 1: clients besides the target whose noise the server does not know (0 at worst)."""
    if cohort_size < 1 or colluders < 0:
        raise ValueError(f"cohort_size={cohort_size} with colluders={colluders}")
    return max(0, cohort_size - colluders - 1)


def contraction_factor(local_steps: int, step_smoothness: float | None) -> float:
    """W = Σ_{k<τ} κ^{2k}, κ = max(0, 1 - ηβ): how much of the others' noise survives their own steps.

    `step_smoothness` is ηβ with a data-independent smoothness bound β; None (unknown) or >= 1 gives W = 1,
    the last step's noise only. The papers' expression is W = τ (no contraction), which is false: G7b.
    """
    if local_steps < 1:
        raise ValueError(f"local_steps={local_steps} must be at least 1")
    if step_smoothness is None or step_smoothness >= 1.0:
        return 1.0
    if step_smoothness < 0:
        raise ValueError(f"step_smoothness={step_smoothness} is negative")
    kappa_squared = (1.0 - step_smoothness) ** 2
    return float(sum(kappa_squared**k for k in range(local_steps)))


def aggregated_round_mu(
    noise_multiplier: float,
    uses: int,
    *,
    local_steps: int,
    others: float,
    step_smoothness: float | None,
    convex: bool,
    assume: bool = False,
) -> float:
    """R6/G7b: μ of one round with noise inside the local steps, record used in `uses` of them.

    Each use shifts the target's local model by ηΔ; non-expansive steps keep shifts from growing. A shift is
    absorbed by the target's own noise at the steps that use it (weight `uses`) and by the others' noise
    (weight `others`·W), at minimal cost
        μ² = uses² / (z² (uses + others·W)).
    uses = τ is the errata's rho_round, uses = 1 its rho_use. `others` is r - c - 1, or for unequal weights
    the honest others' noise variance in the sum relative to the target's.

    Proved for convex losses and steps with ηβ <= 2. Otherwise NoProof, unless `assume`: the caller then
    labels the value as assumed.
    """
    if not 0 <= uses <= local_steps:
        raise ValueError(f"uses={uses} in local_steps={local_steps}")
    if not assume:
        if not convex:
            raise NoProof("the credit for the other clients' noise is proved for convex losses only (G7b)")
        if step_smoothness is None and local_steps > 1:
            raise NoProof("G7b needs non-expansive steps, and no bound on learning rate x smoothness is known")
        if step_smoothness is not None and step_smoothness > 2.0 and local_steps > 1:
            raise NoProof(f"learning rate x smoothness = {step_smoothness:g} > 2: local steps may expand (G7b)")
    if uses == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    factor = contraction_factor(local_steps, step_smoothness)
    return uses / (noise_multiplier * math.sqrt(uses + others * factor))


def smooth_round_mu(
    noise_multiplier: float, uses: int, *, local_steps: int, others: float, step_lipschitz: float
) -> float:
    """G7c: one round, non-convex but smooth. step_lipschitz = η·Ls, Ls of the clipped-gradient map.

    The shift grows by at most (1 + ηLs) a step, own noise is treated as public and of the others' noise
    only the last step counts: μ² = (uses (1 + ηLs)^{τ-1})² / (z² · others).
    """
    if step_lipschitz < 0:
        raise ValueError(f"step_lipschitz={step_lipschitz} is negative")
    if others <= 0 or noise_multiplier <= 0:
        return math.inf if uses else 0.0
    log_growth = (local_steps - 1) * math.log1p(step_lipschitz)
    growth = math.exp(log_growth) if log_growth < 700 else math.inf
    return uses * growth / (noise_multiplier * math.sqrt(others))


def end_of_round_mu(noise_multiplier: float, *, others: float) -> float:
    """One release with noise added once, at the end of the round: the r - c credit is exact (G7)."""
    return math.inf if noise_multiplier <= 0 else 1.0 / (noise_multiplier * math.sqrt(1.0 + others))


def shuffled_uses(steps: int, batches_per_epoch: int) -> int:
    """D2: uses of one record in `steps` consecutive batches of shuffled epochs (partial ones dropped)."""
    if batches_per_epoch < 1:
        raise ValueError(f"batches_per_epoch={batches_per_epoch} must be at least 1")
    return -(-steps // batches_per_epoch)
