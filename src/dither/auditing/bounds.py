"""Lower bounds on ε with a stated confidence, from what an attack observed. NumPy and SciPy in float64.

An attack scores each trial; trials with the record should score higher than those without it. For any
score and any threshold t, (ε, δ)-DP says Pr_in[S >= t] <= e^ε Pr_out[S >= t] + δ and Pr_out[S < t] <=
e^ε Pr_in[S < t] + δ. Measured rates with Clopper-Pearson limits therefore bound ε from below ("counts"): about
ln(trials) at most. The other forms go further by assuming more, and carry that in their name.

counts       nothing is assumed
mu-GDP       assumes a Gaussian trade-off (Dong, Roth, Su 2022): a lower limit of μ, then R1
one run      many canaries in one run (Steinke, Nasr, Jagielski 2023)
one run mu   its f-DP refinement for Gaussian trade-offs (Mahloujifar, Melis, Chaudhuri 2025)
exhibited    a pair of datasets: measured distance of the outputs, measured noise and use, then R1 or R5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv, expit, ndtr, ndtri
from scipy.stats import binom, chi2

from dither import accounting
from dither.types import epsilon_text

MU_FORM = "mu-GDP form: assumes Gaussian trade-off"
EXHIBITED_FORM = "exhibited pair: assumes Gaussian noise, independent of batch and round"
Scores = tuple[np.ndarray, np.ndarray]  # of the trials with the record, and without it
_MOST_THRESHOLDS = 2000  # of the pilot's scores, how many are looked at


class LowerBound(NamedTuple):
    """ε is at least `value` at `delta`, or an event of probability 1 - confidence has happened."""

    value: float
    form: str
    confidence: float
    delta: float
    trials: int
    detail: str = ""


class Threshold(NamedTuple):
    """Guess "in" for scores of at least `value` (side "in"), or "out" for those below it (side "out")."""

    value: float
    side: str


# Binomial limits


def upper_rate(count: np.ndarray | float, trials: float, error: float) -> np.ndarray:
    """Clopper-Pearson: the true rate is larger with probability at most `error`. Counts need not be whole."""
    count = np.asarray(count, float)
    inside = np.minimum(count, trials - 1e-9)
    return np.where(count >= trials, 1.0, betaincinv(inside + 1.0, np.maximum(trials - inside, 1e-9), 1.0 - error))


def lower_rate(count: np.ndarray | float, trials: float, error: float) -> np.ndarray:
    """Clopper-Pearson: the true rate is smaller with probability at most `error`."""
    return 1.0 - upper_rate(trials - np.asarray(count, float), trials, error)


# Counts


def epsilon_of_counts(
    hits: np.ndarray | float, trials: float, false: np.ndarray | float, others: float, delta: float, error: float
) -> np.ndarray:
    """ε from `hits` of `trials` where the event is likely and `false` of `others` where it is not: each limit may
    fail with probability error/2."""
    likely = lower_rate(hits, trials, error / 2) - delta
    unlikely = upper_rate(false, others, error / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(likely > 0, np.maximum(np.log(np.maximum(likely, 1e-300) / unlikely), 0.0), 0.0)


def choose_thresholds(
    pilot_in: np.ndarray, pilot_out: np.ndarray, *, trials: int, delta: float, error: float
) -> list[Threshold]:
    """A few promising thresholds, from trials that the bound itself will not use.

    For each side, the one with the best expected bound. If the pilot saw no false guess at all, also a few
    deeper in that region, because the pilot cannot tell how far to go.
    """
    candidates: list[tuple[float, Threshold]] = []
    pooled = np.unique(np.concatenate([pilot_in, pilot_out]))
    if len(pooled) < 2:
        return [Threshold(float(pooled[0]) if len(pooled) else 0.0, "in")]
    if len(pooled) > _MOST_THRESHOLDS:
        rungs = np.unique(np.geomspace(1, len(pooled) / 2, _MOST_THRESHOLDS // 2).astype(int))
        pooled = pooled[np.unique(np.concatenate([rungs - 1, len(pooled) - rungs]))]
    middles = (pooled[1:] + pooled[:-1]) / 2
    for side, likely, unlikely in (("in", pilot_in, pilot_out), ("out", pilot_out, pilot_in)):
        hits, false = (_reached(scores, middles, side) for scores in (likely, unlikely))
        scale_hits, scale_false = trials / len(likely), trials / len(unlikely)
        expected = epsilon_of_counts(hits * scale_hits, trials, false * scale_false, trials, delta, error)
        seen = np.flatnonzero(false > 0)
        if len(seen):
            best = seen[np.argmax(expected[seen])]
            candidates.append((float(expected[best]), Threshold(float(middles[best]), side)))
        clean = np.flatnonzero((false == 0) & (hits > 0))
        if len(clean):
            most = hits[clean].max()
            for share in (0.95, 0.55):
                at = clean[np.argmin(np.abs(hits[clean] - share * most))]
                candidates.append((float(expected[at]), Threshold(float(middles[at]), side)))
    candidates.sort(key=lambda pair: -pair[0])
    best_expected = candidates[0][0] if candidates else 0.0
    chosen = list(dict.fromkeys(threshold for value, threshold in candidates[:6] if value >= 0.5 * best_expected))
    return chosen or [Threshold(float(np.median(middles)), "in")]


def _reached(scores: np.ndarray, thresholds: np.ndarray, side: str) -> np.ndarray:
    below = np.searchsorted(np.sort(scores), thresholds, side="left")
    return len(scores) - below if side == "in" else below


def count_bound(scores: Scores, thresholds: Sequence[Threshold], *, delta: float, confidence: float) -> LowerBound:
    """ε from counts at thresholds that were chosen beforehand; a union bound over them keeps the confidence."""
    scores_in, scores_out = scores
    error = (1.0 - confidence) / len(thresholds)
    outcomes = []
    for threshold in thresholds:
        likely, unlikely = (scores_in, scores_out) if threshold.side == "in" else (scores_out, scores_in)
        at = np.array([threshold.value])
        hits, false = (float(_reached(scores, at, threshold.side)[0]) for scores in (likely, unlikely))
        value = float(epsilon_of_counts(hits, len(likely), false, len(unlikely), delta, error))
        outcomes.append(
            (value, f'{hits:.0f} of {len(likely)} right, {false:.0f} of {len(unlikely)} false "{threshold.side}"')
        )
    value, detail = max(outcomes)
    return LowerBound(value, "counts", confidence, delta, len(scores_in), detail)


# A Gaussian trade-off


def mu_thresholds(pilot_in: np.ndarray, pilot_out: np.ndarray) -> list[Threshold]:
    """Thresholds for a lower limit of μ: the middle, and one nearer to each side."""
    low, high = float(np.median(pilot_out)), float(np.median(pilot_in))
    return [Threshold(low + share * (high - low), "in") for share in (0.5, 0.25, 0.75)]


def _mu_text(mu: float) -> str:
    return f"μ >= {epsilon_text(mu, 'down', 4)}"


def mu_bound(scores: Scores, thresholds: Sequence[Threshold], *, delta: float, confidence: float) -> LowerBound:
    """ε at δ by R1 from a lower limit of μ = Φ⁻¹(1 - FPR) - Φ⁻¹(FNR), of both error counts. Only for releases
    whose trade-off is Gaussian."""
    scores_in, scores_out = scores
    error = (1.0 - confidence) / len(thresholds)
    mu = 0.0
    for threshold in thresholds:
        fpr = upper_rate(float(np.sum(scores_out >= threshold.value)), len(scores_out), error / 2)
        fnr = upper_rate(float(np.sum(scores_in < threshold.value)), len(scores_in), error / 2)
        mu = max(mu, float(-ndtri(fpr) - ndtri(fnr)))
    value = accounting.gaussian_epsilon(mu, delta)
    return LowerBound(value, MU_FORM, confidence, delta, len(scores_in), _mu_text(mu))


# Many canaries in one run


class Guesses(NamedTuple):
    """Of `canaries` independent coins, `guessed` were called and `right` of the calls were right."""

    canaries: int
    guessed: int
    right: int


def count_guesses(scores: np.ndarray, included: np.ndarray, share: float) -> Guesses:
    """Call the canaries with the highest scores "in" and those with the lowest "out", `share` of all in total."""
    each = max(1, int(len(scores) * share / 2))
    order = np.argsort(scores, kind="stable")
    right = int(np.sum(included[order[-each:]])) + int(np.sum(~included[order[:each]]))
    return Guesses(len(scores), 2 * each, right)


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Chance of so many right calls under (ε, δ)-DP, at most (Steinke, Nasr, Jagielski 2023, Theorem 5.2).

    At δ = 0 each call is right with probability at most e^ε/(1 + e^ε), whatever the others. δ adds
    2 m δ max_i (Pr[W >= v - i] - Pr[W >= v])/i.
    """
    rate = float(expit(epsilon))
    enough = float(binom.sf(guesses.right - 1, guesses.guessed, rate))
    if delta == 0 or guesses.right == 0:
        return enough
    fewer = np.arange(1, guesses.right + 1)
    gain = (binom.sf(guesses.right - fewer - 1, guesses.guessed, rate) - enough) / fewer
    return min(1.0, enough + 2 * guesses.canaries * delta * float(gain.max()))


def one_run_bound(guesses: Guesses, *, delta: float, confidence: float) -> LowerBound:
    """The largest ε that the calls refute."""
    error = 1.0 - confidence
    value = _largest_refuted(lambda epsilon: one_run_p_value(guesses, epsilon, delta) <= error)
    detail = f"{guesses.right} of {guesses.guessed} calls right, {guesses.canaries} canaries"
    return LowerBound(value, "one run", confidence, delta, 1, detail)


def one_run_gaussian_refuted(guesses: Guesses, mu: float, error: float) -> bool:
    """Whether μ-GDP is refuted at level `error` (Mahloujifar, Melis, Chaudhuri 2025, audit with a cap on calls).

    r and h bound the mass of outcomes with at least i right calls, split by whether one canary's own call is right
    or wrong; f-DP ties a step of one to the other through Φ(Φ⁻¹(r) - μ).
    """
    right = error * guesses.right / guesses.canaries
    wrong = error * (guesses.guessed - guesses.right) / guesses.canaries
    for i in range(guesses.right - 1, -1, -1):
        tied = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        if tied == wrong:
            break  # nothing changes any more
        right = min(1.0, right + i / (guesses.guessed - i) * (tied - wrong))
        wrong = tied
    return right + wrong > guesses.guessed / guesses.canaries


def one_run_gaussian_bound(guesses: Guesses, *, delta: float, confidence: float) -> LowerBound:
    """ε at δ by R1 from the largest μ that the calls refute."""
    error = 1.0 - confidence
    mu = _largest_refuted(lambda mu: one_run_gaussian_refuted(guesses, mu, error))
    detail = f"{_mu_text(mu)}; {guesses.right} of {guesses.guessed} calls right, {guesses.canaries} canaries"
    value = accounting.gaussian_epsilon(mu, delta)
    return LowerBound(value, f"one run, {MU_FORM}", confidence, delta, 1, detail)


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 1e4:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


# An exhibited pair


class ExhibitedPair(NamedTuple):
    """What was measured of a pair of neighbouring datasets.

    distance    between the outputs with the same noise when the record is used, along the line that joins them
    residuals   noise on that line, one a trial (known mean 0)
    used        trials in which the record was used, of `draws`; None: it is used always
    releases    how often this happens, independently
    """

    distance: float
    residuals: np.ndarray
    used: int | None
    draws: int
    releases: int = 1


def exhibited_bound(pair: ExhibitedPair, *, delta: float, confidence: float) -> LowerBound:
    """ε of the pair (1-p) N(0, σ²) + p N(Δ, σ²) against N(0, σ²), composed: R1 for p = 1, R5 for one release.

    The limits of σ (χ²) and of p (Clopper-Pearson) may each fail with half the error. Several releases with p < 1
    are composed by dp-accounting with optimistic rounding, so that the value stays a lower bound.
    """
    error = (1.0 - confidence) / 2
    count = len(pair.residuals)
    square = float(np.sum(np.square(pair.residuals, dtype=np.float64)))
    noise_std = math.sqrt(square / float(chi2.ppf(error, count)))
    used = 1.0 if pair.used is None else float(lower_rate(pair.used, pair.draws, error))
    if pair.distance == 0 or used == 0:
        value = 0.0
    elif noise_std == 0:
        value = math.inf if used > delta else 0.0
    else:
        value = _pair_epsilon(pair.distance / noise_std, used, pair.releases, delta)
    least = [epsilon_text(number, "down", 4) for number in (pair.distance, used)]
    most = epsilon_text(noise_std, digits=4)
    detail = f"distance >= {least[0]}, noise std <= {most}, used with probability >= {least[1]}"
    detail += f", {pair.releases} releases" if pair.releases > 1 else ""
    return LowerBound(value, EXHIBITED_FORM, confidence, delta, count, detail)


def _pair_epsilon(mu: float, used: float, releases: int, delta: float) -> float:
    if used == 1.0:
        return accounting.gaussian_epsilon(mu * math.sqrt(releases), delta)
    if delta >= used and releases == 1:
        return 0.0
    single = accounting.message_epsilon(mu, used, delta)
    if releases == 1:
        return single
    # The grid must hold the widest loss; a coarser one only lowers an optimistic value.
    one = optimistic_loss(1.0 / mu, used, max(1e-4, mu * (mu + 10.0) / 2e5))
    return max(single, float(one.self_compose(releases).get_epsilon_for_delta(delta)))


def optimistic_loss(noise_std: float, rate: float, step: float) -> Any:
    """dp-accounting's distribution of the privacy loss of a Gaussian that a record of norm 1 enters with this
    probability, rounded down to a grid."""
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_std,
        sampling_prob=rate,
        value_discretization_interval=step,
        pessimistic_estimate=False,
        use_connect_dots=False,
    )
