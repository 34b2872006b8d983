"""From projections to scores: the log likelihood ratio of the two worlds, learnt from pilot trials.

The pilot runs the same seeds with and without noise. Without noise the projections take few values (how often the
record was used, say): the components of a mixture. The difference is the noise: its std, and whether another
client's upload or the round before betrays it. The score of a trial is the log ratio of the two mixtures. Any
score gives a valid bound, as the trials that count are others than the pilot's; a good model makes it sharper.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from dither.auditing.worlds import Seen

_GRAIN = 0.05  # components nearer than this many noise stds are one
_MOST_COMPONENTS = 48
_MOST_PATTERNS = 400
_ROWS = 20_000  # trials scored at a time
_SIGNIFICANT = 6.0  # stds of a sample correlation before the adversary believes it


class Pilot(NamedTuple):
    """Pilot trials of both worlds: as seen, and the same seeds without noise."""

    seen_in: Seen
    seen_out: Seen
    plain_in: Seen
    plain_out: Seen


class Mixture(NamedTuple):
    """Weighted points: `[K]` for one round, `[K, T]` for all together."""

    points: np.ndarray
    weights: np.ndarray


class Score(NamedTuple):
    """A score learnt from a pilot. `joint` mixtures are over all rounds at once, others round by round."""

    helper: np.ndarray  # [T], what of the other client's upload is subtracted
    before: np.ndarray  # [T], what of the round before is subtracted
    centre: np.ndarray  # [T], where the world without the record lies
    noise_std: np.ndarray  # [T]
    world_in: list[Mixture]
    world_out: list[Mixture]
    joint: bool

    def __call__(self, seen: Seen) -> np.ndarray:
        """The log likelihood ratio of each trial, "in" over "out"."""
        values = (_cleaned(seen, self.helper, self.before) - self.centre) / self.noise_std
        pieces = []
        for start in range(0, len(values), _ROWS):
            part = values[start : start + _ROWS]
            if self.joint:
                pieces.append(_log_density(part, self.world_in[0]) - _log_density(part, self.world_out[0]))
                continue
            total = np.zeros(len(part))
            for t, (inside, outside) in enumerate(zip(self.world_in, self.world_out, strict=True)):
                column = part[:, t : t + 1]
                total += _log_density(column, inside) - _log_density(column, outside)
            pieces.append(total)
        return np.concatenate(pieces)


def learn(pilot: Pilot) -> Score:
    """The better of the two models: rounds independent of each other, or their patterns as they occurred."""
    helper, before = _betrayed(pilot)
    cleaned = Pilot(*(Seen(_cleaned(seen, helper, before), seen.other) for seen in pilot))
    residual = np.concatenate(
        [cleaned.seen_in.target - cleaned.plain_in.target, cleaned.seen_out.target - cleaned.plain_out.target]
    )
    centre = cleaned.plain_out.target.mean(axis=0)
    inside, outside = cleaned.plain_in.target - centre, cleaned.plain_out.target - centre
    # float32 cannot tell apart what is nearer than this, however small the noise
    precision = 1e-6 * max(np.abs(pilot.plain_in.target).max(), np.abs(pilot.plain_out.target).max())
    noise_std = np.maximum(residual.std(axis=0), max(precision, 1e-30))
    points_in, points_out = inside / noise_std, outside / noise_std
    by_round = Score(
        helper,
        before,
        centre,
        noise_std,
        [_grouped(points_in[:, t : t + 1], _MOST_COMPONENTS) for t in range(points_in.shape[1])],
        [_grouped(points_out[:, t : t + 1], _MOST_COMPONENTS) for t in range(points_out.shape[1])],
        joint=False,
    )
    patterns = [_grouped(points, _MOST_PATTERNS, grain=0.25) for points in (points_in, points_out)]
    if points_in.shape[1] == 1 or max(len(p.weights) for p in patterns) >= _MOST_PATTERNS:
        return by_round
    together = by_round._replace(world_in=patterns[:1], world_out=patterns[1:], joint=True)
    return max((by_round, together), key=lambda score: separation(score, pilot))


def separation(score: Score, pilot: Pilot) -> float:
    """How far the pilot's worlds are told apart: the larger of the two Kullback-Leibler divergences."""
    return max(float(np.mean(score(pilot.seen_in))), -float(np.mean(score(pilot.seen_out))))


def _cleaned(seen: Seen, helper: np.ndarray, before: np.ndarray) -> np.ndarray:
    values = seen.target - helper * seen.other
    if np.any(before):
        values = values.copy()
        values[:, 1:] -= before[1:] * seen.target[:, :-1]
    return values


def _betrayed(pilot: Pilot) -> tuple[np.ndarray, np.ndarray]:
    """What the noise of each round shares with the other client's and with the round before: 0 unless certain."""
    noise = np.concatenate(
        [pilot.seen_in.target - pilot.plain_in.target, pilot.seen_out.target - pilot.plain_out.target]
    )
    other = np.concatenate(
        [pilot.seen_in.other - pilot.plain_in.other, pilot.seen_out.other - pilot.plain_out.other]
    )
    helper = _slope(noise, other)
    before = np.zeros(noise.shape[1])
    if noise.shape[1] > 1:
        before[1:] = _slope(noise[:, 1:], noise[:, :-1])
    return helper, np.where(helper == 0, before, 0.0)


def _slope(values: np.ndarray, on: np.ndarray) -> np.ndarray:
    variance, target = on.var(axis=0), values.var(axis=0)
    covariance = ((values - values.mean(axis=0)) * (on - on.mean(axis=0))).mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.nan_to_num(covariance / np.sqrt(variance * target))
        slope = np.nan_to_num(covariance / variance)
    return np.where(np.abs(correlation) > _SIGNIFICANT / np.sqrt(len(values)), slope, 0.0)


def _grouped(points: np.ndarray, most: int, grain: float = _GRAIN) -> Mixture:
    """Equal points counted once; a coarser grain where there are too many."""
    while True:
        cells, index, counts = np.unique(
            np.round(points / grain).astype(np.int64), axis=0, return_inverse=True, return_counts=True
        )
        if len(counts) <= most or grain > 4.0:
            break
        grain *= 2
    centres = np.zeros(cells.shape)
    np.add.at(centres, index.ravel(), points)
    return Mixture(centres / counts[:, None], counts / counts.sum())


def _log_density(values: np.ndarray, mixture: Mixture) -> np.ndarray:
    """ln Σ_k w_k exp(-|x - c_k|²/2), by one matrix product."""
    square = np.sum(mixture.points**2, axis=1)
    exponent = values @ mixture.points.T - 0.5 * square + np.log(mixture.weights)
    return logsumexp(exponent, axis=1)  # -|x|²/2 is the same in both worlds
