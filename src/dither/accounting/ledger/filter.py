"""Across runs: a privacy filter, valid when a later run is chosen after looking at earlier results (R10).

Composing loss distributions is valid for a list of releases that was fixed beforehand, not for one that reacts to
outputs. What is valid (docs/privacy.md has the proof): each run, with all that it registered before its first
output, is covered by one Gaussian and a small probability of failure,

    δ_run(ε) <= tail + (1 - tail) δ_G(ε; μ)     for every ε,

and over runs μ² and the tails add up, each within a limit that was fixed before the first output: the fully
adaptive composition of Gaussian differential privacy (Smith and Thakurta 2022; Koskela, Tobaben and Honkela 2023).
Unsampled Gaussian releases are their own cover, with tail 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dither.accounting import Conditions, proven
from dither.accounting.gaussian import log_gaussian_delta
from dither.accounting.pld import COARSE
from dither.types import Release

# The share of δ for the runs' tails. Where the first run needs a tail, the Gaussians have the rest of δ. Where it
# is Gaussian itself, they keep all of δ, and the guarantee is at (1 + TRACE)·δ.
RESERVE, TRACE = 0.25, 1e-3
# What the errors of samplers may add to δ, as a share of it: the noise of all runs is drawn at a total variation
# distance D from what is proved, which adds (1 + e^ε) D whatever was chosen after looking at what.
SAMPLERS = 0.1

_MOST_MU = 1e6
_NO_LOSS = 1e-9  # an ε below is 0
_GROWTH, _FINE_FROM, _FINE_GROWTH = 1.5, 1e-3, 1.15  # of δ from one point of a profile to the next
_PARTS = 32  # of each interval between two points


def tail(delta: float, number: int, *, sampled_first: bool) -> float:
    """The tail of the `number`-th run (from 1) that needs one. Over any number of runs they sum to at most the
    share of δ that is kept for them."""
    return (RESERVE if sampled_first else TRACE) * delta / (number * (number + 1))


def is_gaussian(recipe: str) -> bool:
    """Whether a bound is that of unsampled Gaussian releases, so that it holds for adaptive lists as it is."""
    return recipe in ("R1", "R1 discrete", "R1 sum", "R1 downlink", "R1 joint", "R6 G7b", "R6 G7c")


def cover(
    participations: Sequence[tuple[tuple[Release, ...], int]],
    conditions: Conditions,
    tail: float,
    view: str,
    adjacency: str,
) -> float:
    """The μ of a Gaussian that covers these releases up to `tail`; infinite if there is none."""
    resolution = COARSE._replace(grid_delta=tail)

    def epsilon(delta: float) -> float:
        value = proven(
            participations, delta, conditions, view=view, adjacency=adjacency, resolution=resolution
        ).value
        return value if value > _NO_LOSS else 0.0

    points = [(epsilon(tail), tail)]  # of the profile, from the largest ε to 0
    if points[0][0] == math.inf:
        return math.inf
    while points[-1][0] > 0 and points[-1][1] < 1.0:
        before = points[-1][1]
        delta = min(1.0, before * (_GROWTH if before < _FINE_FROM else _FINE_GROWTH))
        points.append((epsilon(delta), delta))
    low, high = points[-2][1] if len(points) > 1 else tail, points[-1][1]
    while high > low * 1.002:  # where ε becomes 0
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle) > 0 else (low, middle)
    points[-1] = (0.0, min(1.0, high + 2.0 * _NO_LOSS))  # δ(0) <= δ(ε) + e^ε - 1
    return _dominating_mu(points, tail)


def _dominating_mu(points: list[tuple[float, float]], tail: float) -> float:
    """The least μ with δ_run(ε) <= tail + (1 - tail) δ_G(ε; μ) from the profile's points.

    A profile is convex in e^ε, so between two points it lies below their chord. Each interval is cut into parts;
    the chord is largest at a part's left end, the Gaussian's profile smallest at its right end. Below ε = 0 the
    inequality follows from that above it, as both orders of the neighbours have these points.
    """
    ends, needed = [], []
    for (right, least), (left, most) in pairwise(points):
        if right <= left:
            continue
        cuts = np.linspace(left, right, _PARTS + 1)
        share = (np.exp(cuts - right) - math.exp(left - right)) / -math.expm1(left - right)
        ends.append(cuts[1:])
        needed.append((most + (least - most) * share)[:-1])
    if not ends:
        return 0.0
    epsilons = np.concatenate(ends)
    with np.errstate(divide="ignore"):
        log_deltas = np.log(np.maximum(np.concatenate(needed) - tail, 0.0) / (1.0 - tail))

    def covers(mu: float) -> bool:
        return bool(np.all(log_gaussian_delta(epsilons, mu) >= log_deltas))

    low, high = 0.0, 1.0
    while not covers(high):
        low, high = high, 2.0 * high
        if high > _MOST_MU:
            return math.inf
    while high > low * (1.0 + 1e-6) and high > 1e-12:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high
