"""Random numbers of uses (R4) and one release per round on random batches (R5, Secure FedAvg)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp

from dither.accounting.gaussian import (
    amplified_epsilon,
    brentq,
    check_delta,
    fixed_size_epsilon,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    log_gaussian_delta,
    unamplified_epsilon,
)
from dither.errors import NoProof


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
    if excess(high) >= 0:  # one component: the mixture is the Gaussian, up to rounding
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


# --- Secure FedAvg -------------------------------------------------------------------------------------


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


def batch_structured_epsilon(rate: float, noise_multiplier: float, participations: int, delta: float) -> float:
    """R5, whole run: G4's profile with q = p and z = σ/Δ_true, composed over the participations. E2."""
    return fixed_size_epsilon(rate, noise_multiplier, participations, delta)


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
