"""The test statistic of an attack: the log likelihood ratio of the two neighbours, fitted to pilot trials.

The pilot runs the same seeds with and without noise. Without noise, the projections take few values (for example
by how often the canary was used): the components of a mixture. The difference is the noise: its std, and whether
another client's upload or the previous round reveals it. The score of a trial is the log ratio of the two
mixtures. Any score gives a valid bound, because pilot trials are not counted; a good model makes the bound
sharper.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from dither.auditing.bounds import ExhibitedPair
from dither.auditing.trials import Observations
from dither.types import Release

_GRAIN = 0.05  # values nearer than this many noise stds are one
_MOST_COMPONENTS = 48
_MOST_PATTERNS = 400
_ROWS = 20_000  # trials scored at a time
_LINEAR = 0.01  # of the noise: how far from linear what is called so may be
_SIGNIFICANT = 6.0  # stds of a sample correlation before the adversary believes it


class Pilot(NamedTuple):
    """Pilot trials with and without the canary: as observed, and the same seeds without noise."""

    noisy_in: Observations
    noisy_out: Observations
    noiseless_in: Observations
    noiseless_out: Observations
    bent: np.ndarray  # [trials, T], by how much the canary moves less, or more, where there is noise
    curved: np.ndarray  # [trials, T], by how much the noise moves more than twice what half of it does

    def seen(self) -> tuple[Observations, ...]:
        return self.noisy_in, self.noisy_out, self.noiseless_in, self.noiseless_out

    def is_linear(self) -> bool:
        """Whether what is seen is the canary's shift plus something linear in the noise, and so Gaussian."""
        noisy, moved = self.noisy_out.target, np.abs(self.noiseless_in.target - self.noiseless_out.target)
        allowed = _LINEAR * np.std(noisy, axis=0) + 1e-6 * np.max(moved + np.abs(noisy), axis=0)
        return all(bool(np.all(np.sqrt(np.mean(each**2, axis=0)) <= allowed)) for each in (self.bent, self.curved))

    def noise(self) -> np.ndarray:
        """What the noise adds to the projections, in all trials."""
        return np.concatenate(
            [self.noisy_in.target - self.noiseless_in.target, self.noisy_out.target - self.noiseless_out.target]
        )


class Mixture(NamedTuple):
    """Weighted points: `[K]` for one round, `[K, T]` for all together."""

    points: np.ndarray
    weights: np.ndarray


class LikelihoodRatio(NamedTuple):
    """A score fitted to a pilot. `joint` mixtures are over all rounds at once, others round by round."""

    other_slope: np.ndarray  # [T], what of the other client's upload is subtracted
    previous_slope: np.ndarray  # [T], what of the round before is subtracted
    centre: np.ndarray  # [T], mean without the canary
    noise_std: np.ndarray  # [T]
    mixtures_in: list[Mixture]
    mixtures_out: list[Mixture]
    joint: bool

    def __call__(self, observed: Observations) -> np.ndarray:
        """The log likelihood ratio of each trial, "in" over "out"."""
        denoised = _denoised(observed, self.other_slope, self.previous_slope)
        values = (denoised - self.centre) / self.noise_std
        columns = [slice(None)] if self.joint else [slice(t, t + 1) for t in range(values.shape[1])]
        scores = np.zeros(len(values))
        for start in range(0, len(values), _ROWS):
            rows = slice(start, start + _ROWS)
            for column, inside, outside in zip(columns, self.mixtures_in, self.mixtures_out, strict=True):
                part = values[rows, column]
                scores[rows] += _log_density(part, inside) - _log_density(part, outside)
        return scores

    def separation(self, pilot: Pilot) -> float:
        """How well it tells the pilot's data sets apart: the larger of the two Kullback-Leibler divergences."""
        return max(float(np.mean(self(pilot.noisy_in))), -float(np.mean(self(pilot.noisy_out))))


def fit(pilot: Pilot) -> LikelihoodRatio:
    """The better of two models: rounds independent of each other, or their patterns as they occurred."""
    slopes = _correlations(pilot)
    clean = [Observations(_denoised(seen, *slopes), seen.other) for seen in pilot.seen()]
    denoised = Pilot(clean[0], clean[1], clean[2], clean[3], pilot.bent, pilot.curved)
    centre = denoised.noiseless_out.target.mean(axis=0)
    # float32 cannot tell apart what is nearer than this, however small the noise
    precision = 1e-6 * max(np.abs(pilot.noiseless_in.target).max(), np.abs(pilot.noiseless_out.target).max())
    noise_std = np.maximum(denoised.noise().std(axis=0), max(precision, 1e-30))
    points = [(seen.target - centre) / noise_std for seen in (denoised.noiseless_in, denoised.noiseless_out)]
    rounds = points[0].shape[1]
    mixtures = [[_grouped(side[:, t : t + 1], _MOST_COMPONENTS, _GRAIN) for t in range(rounds)] for side in points]
    by_round = LikelihoodRatio(*slopes, centre, noise_std, mixtures[0], mixtures[1], joint=False)
    patterns = [_grouped(side, _MOST_PATTERNS, 0.25) for side in points]
    if rounds == 1 or max(len(pattern.weights) for pattern in patterns) >= _MOST_PATTERNS:
        return by_round
    together = by_round._replace(mixtures_in=patterns[:1], mixtures_out=patterns[1:], joint=True)
    return max((by_round, together), key=lambda ratio: ratio.separation(pilot))


def _denoised(observed: Observations, other_slope: np.ndarray, previous_slope: np.ndarray) -> np.ndarray:
    """The target's projections minus what another upload or the previous round reveals about their noise."""
    values: np.ndarray = observed.target - other_slope * observed.other
    if np.any(previous_slope):
        values[:, 1:] -= previous_slope[1:] * observed.target[:, :-1]
    return values


def _correlations(pilot: Pilot) -> tuple[np.ndarray, np.ndarray]:
    """What the noise of each round shares with the other client's and with the round before: 0 unless certain."""
    noise = pilot.noise()
    other = np.concatenate(
        [pilot.noisy_in.other - pilot.noiseless_in.other, pilot.noisy_out.other - pilot.noiseless_out.other]
    )
    other_slope = _slope(noise, other)
    previous_slope = np.zeros(noise.shape[1])
    if noise.shape[1] > 1:
        previous_slope[1:] = _slope(noise[:, 1:], noise[:, :-1])
    return other_slope, np.where(other_slope == 0, previous_slope, 0.0)


def _slope(values: np.ndarray, on: np.ndarray) -> np.ndarray:
    variance, target = on.var(axis=0), values.var(axis=0)
    covariance = ((values - values.mean(axis=0)) * (on - on.mean(axis=0))).mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.nan_to_num(covariance / np.sqrt(variance * target))
        slope = np.nan_to_num(covariance / variance)
    return np.where(np.abs(correlation) > _SIGNIFICANT / np.sqrt(len(values)), slope, 0.0)


def _grouped(points: np.ndarray, most: int, grain: float) -> Mixture:
    """Equal points counted once, on a coarser grid if there are too many."""
    while True:
        rounded, index, counts = np.unique(
            np.round(points / grain).astype(np.int64), axis=0, return_inverse=True, return_counts=True
        )
        if len(counts) <= most or grain > 4.0:
            break
        grain *= 2
    centres = np.zeros(rounded.shape)
    np.add.at(centres, index.ravel(), points)
    return Mixture(centres / counts[:, None], counts / counts.sum())


def _log_density(values: np.ndarray, mixture: Mixture) -> np.ndarray:
    """ln Σ_k w_k exp(-|x - c_k|²/2), by one matrix product."""
    square = np.sum(mixture.points**2, axis=1)
    exponent = values @ mixture.points.T - 0.5 * square + np.log(mixture.weights)
    return np.asarray(logsumexp(exponent, axis=1))  # -|x|²/2 is the same with and without the canary


# Exhibited pairs


def is_unsampled(releases: tuple[Release, ...]) -> bool:
    """Every record is always used: the trade-off of each view is a Gaussian's."""
    return bool(releases) and all(r.sampling.kind in ("full", "full-round") for r in releases)


def exhibited_pair(pilot: Pilot, ratio: LikelihoodRatio, releases: tuple[Release, ...]) -> ExhibitedPair | None:
    """The pilot as an exhibited pair, if its noiseless outputs are two points: one with the canary used, one
    without. None if they are not, if what is seen is not linear in the noise, if rounds differ by more than 2%, or
    if the use in one round reveals that in another."""
    if not releases or np.any(ratio.other_slope) or np.any(ratio.previous_slope) or not pilot.is_linear():
        return None
    inside, outside = pilot.noiseless_in.target, pilot.noiseless_out.target
    base, rounds, unsampled = outside[0], inside.shape[1], is_unsampled(releases)
    grain = _GRAIN * ratio.noise_std
    used = np.abs(inside - base) > grain  # [trials, T]
    if np.any(np.abs(outside - base) > grain) or not np.all(np.any(used, axis=0)):
        return None
    if rounds > 1 and releases[0].sampling.kind.startswith("shuffled"):
        return None
    shift = np.where(used, inside - base, 0.0)
    distance = shift.sum(axis=0) / used.sum(axis=0)
    if np.any(np.abs(np.where(used, inside - base - distance, 0.0)) > grain):
        return None
    noise = pilot.noise()
    relative = noise.std(axis=0) / np.abs(distance)
    spread = 1.02 * relative.min() + 6 * relative.mean() / math.sqrt(len(noise))
    if rounds > 1 and not unsampled and relative.max() > spread:
        return None
    # Always used, where the method says so and the pilot saw nothing else.
    times_used = None if unsampled and np.all(used) else int(used.sum())
    bent = np.abs(pilot.bent).max(axis=0)
    if rounds == 1:
        nearest = max(np.abs(shift[used]).min() - bent[0], 0.0)
        return ExhibitedPair(float(nearest), noise.ravel(), times_used, used.size)
    # In units of each round's distance; unequal rounds without sampling: the mean of σ² is cautious (Jensen).
    farthest = np.abs(distance)
    nearest = (np.abs(np.where(used, inside - base, distance)).min(axis=0) - bent) / farthest
    least = max(float(nearest.min()), 0.0)
    return ExhibitedPair(least, (noise / farthest).ravel(), times_used, used.size, rounds)
