"""From a target (ε, δ) to the noise: monotone root finding on the accountant itself."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.optimize import brentq

from dither.accounting.bounds import Participations
from dither.accounting.composition import ZERO_OUT
from dither.accounting.table import proven
from dither.errors import NoProof
from dither.types import Conditions

TOLERANCE = 1e-3  # the proven ε of the result lies within this share below the target
_LIMIT = 2.0**40
_LARGE = 1e6  # stands for ε = ∞ in the search


def calibrate(epsilon: float, proven_epsilon: Callable[[float], float], *, guess: float = 1.0) -> float:
    """The noise (a multiplier, a std: anything positive) whose proven ε is at most `epsilon`, and near it.

    `proven_epsilon` must not increase with the noise. The result satisfies
    (1 - TOLERANCE)·epsilon <= proven_epsilon(noise) <= epsilon, except where the function jumps past the
    target; then it is the smallest noise found that meets it. NoProof if no noise does.
    """
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon} must be positive and finite")
    if not 0.0 < guess < math.inf:
        raise ValueError(f"guess={guess} must be positive and finite")
    seen: dict[float, float] = {}

    def excess(log_noise: float) -> float:
        """ln(proven ε / target), bounded; aims half the tolerance below the target."""
        noise = math.exp(log_noise)
        value = seen[log_noise] = proven_epsilon(noise)
        if math.isnan(value):
            raise ValueError(f"the proven epsilon at noise {noise} is not a number")
        return math.log(min(max(value, epsilon * 1e-9), epsilon * _LARGE) / (epsilon * (1.0 - TOLERANCE / 2)))

    low = high = math.log(guess)
    if excess(low) > 0:
        while excess(high) > 0:
            low, high = high, high + math.log(4.0)
            if high > math.log(guess * _LIMIT):
                raise NoProof(
                    f"no noise reaches epsilon={epsilon:g}: "
                    f"at noise {math.exp(high):.3g} the proven value is {seen[low]:g}"
                )
    else:
        while excess(low) <= 0:
            low, high = low - math.log(4.0), low
            if low < math.log(guess / _LIMIT):
                return math.exp(high)  # even almost no noise meets the target
    brentq(excess, low, high, xtol=1e-6, rtol=1e-9, maxiter=100)
    best = min((x for x, value in seen.items() if value <= epsilon), default=high)
    below = max((x for x in seen if x < best), default=low)
    # A pessimistic grid makes the curve rough at its last digits: close in by halves if the root missed
    for _ in range(60):
        if seen[best] >= epsilon * (1.0 - TOLERANCE) or best - below < 1e-9:
            break
        middle = 0.5 * (best + below)
        excess(middle)
        if seen[middle] <= epsilon:
            best = middle
        else:
            below = middle
    return math.exp(best)


def calibrate_releases(
    epsilon: float,
    delta: float,
    make_participations: Callable[[float], Participations],
    conditions: Conditions | None = None,
    *,
    view: str = "upload",
    adjacency: str = ZERO_OUT,
    guess: float = 1.0,
) -> float:
    """The noise for which `proven(make_participations(noise), ...)` meets `epsilon` in one view.

    NoProof, with the accountant's reason, if the combination has no proof at any noise.
    """

    def value(noise: float) -> float:
        return proven(make_participations(noise), delta, conditions, view=view, adjacency=adjacency).value

    try:
        return calibrate(epsilon, value, guess=guess)
    except NoProof as failure:
        last = proven(make_participations(guess * _LIMIT), delta, conditions, view=view, adjacency=adjacency)
        raise NoProof(f"{failure} ({last.recipe}: {last.detail})") from failure
