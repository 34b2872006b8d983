"""Privacy loss distributions: curves of one release, discretised pessimistically and composed by FFT.

A release is described by a pair (P, Q) that dominates it for one adjacency (Zhu, Dong and Wang, "Optimal
Accounting of Differential Privacy via Characteristic Function", 2022): if the pair of every step is
dominated, the adaptive composition is dominated by the product. The privacy loss is L = ln P/Q under P.

Discretisation is "connect the dots" (Doroshenko et al., PETS 2022): the hockey-stick curve is replaced by
its chord between grid points, which lies above it. Seen from the loss, every grid interval hands its P-mass
to its two ends so that its Q-mass is kept as well; in this form nothing cancels in the tails. dp-accounting
has the same construction; it is done here in NumPy because the curve of fixed-size sampling is not among
its mechanisms and a schedule of many noise levels needs one FFT a level, not one convolution a step. Tests
hold the two against each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
from scipy.linalg.lapack import dtbtrs
from scipy.special import log_ndtr, ndtr, ndtri

Tails = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

_ALL_STEPS_CELLS = 2**21  # at most so many cells for all different releases together
_WINDOW_CELLS = 2**22  # and for the composed loss
_ULP = 2.0**-52  # relative error of a product in float64, and of what is transformed
_LEAST_SPAN = 1e-12  # losses that all lie closer together are taken as this far apart


class Resolution(NamedTuple):
    """How fine the grid of losses is. On every grid ε is an upper bound; a coarser one gives a larger ε, faster.

    cells_per_std      of one step's loss; 129 add about 1e-5 of its variance
    min_cells_per_std  never coarser than this, however many steps
    soft_cells         beyond this many cells the grid is coarsened, down to the limit above
    step_cells         at most so many cells for one release whose loss reaches far beyond its deviation
    grid_delta         the δ that the grid is made for, so that one composition answers many δ; 0: the δ asked for
    """

    cells_per_std: float = 129.0
    min_cells_per_std: float = 20.0
    soft_cells: int = 2**18
    step_cells: int = 2**19
    grid_delta: float = 0.0


FINE = Resolution()
COARSE = Resolution(24.0, 8.0, 2**13, 2**12)  # ε at most about 1% larger, a few milliseconds


class Curve(NamedTuple):
    """The loss of one release: tails of L under P and Q.

    upper(ε) for ε >= 0 is P[L > ε], ln Q[L > ε]; lower(ε) for ε <= 0 is P[L <= ε], Q[L <= ε]; span(k) brackets L
    but for tails of Gaussian quantile k. Where both directions are the same (an atom at L = 0 is allowed), `upper`
    says all and `lower` is None.
    """

    upper: Tails
    lower: Tails | None
    span: Callable[[float], tuple[float, float]]

    def tails(self, above: np.ndarray, below: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """`upper` of the losses from 0 on, `lower` of those up to 0."""
        p, log_q = self.upper(above)
        if self.lower is not None:
            return (p, log_q), self.lower(below)
        q = np.exp(log_q)
        mirrored = np.append(q[:0:-1], 1.0 - p[0]), np.append(p[:0:-1], 1.0 - q[0])
        return (p, log_q), mirrored


class Events(NamedTuple):
    """`repeats` independent rounds; in each, with probability `probability`, all (curve, count) happen."""

    curves: Sequence[tuple[Curve, int]]
    repeats: int = 1
    probability: float = 1.0


# --- curves ------------------------------------------------------------------------------------------


def removal(rate: float, mu: float) -> Curve:
    """P = (1-q) N(0,1) + q N(μ,1) against Q = N(0,1): a Poisson-sampled record is removed (R3).

    With ε0 = ln(1 + (e^ε - 1)/q) the event L > ε is x > ε0/μ + μ/2. rate = 1 is the plain Gaussian.
    """
    log_absent = math.log1p(-rate) if rate < 1 else -math.inf

    def point(epsilon: np.ndarray) -> np.ndarray:
        if rate == 1:
            return epsilon / mu
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inner = np.log1p(np.maximum(np.expm1(np.minimum(epsilon, 30.0)) / rate, -1.0))
            if epsilon.max() >= 30.0:
                large = epsilon - math.log(rate) + np.log1p(-(1.0 - rate) * np.exp(-np.maximum(epsilon, 30.0)))
                inner = np.where(epsilon < 30.0, inner, large)
            return np.where(epsilon <= log_absent, -np.inf, inner) / mu

    def upper(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = point(epsilon)
        log_q = log_ndtr(-mu / 2.0 - t)
        return rate * ndtr(mu / 2.0 - t) + (1.0 - rate) * np.exp(log_q), log_q

    def lower(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = point(epsilon)
        q = ndtr(t + mu / 2.0)
        return rate * ndtr(t - mu / 2.0) + (1.0 - rate) * q, q

    def span(k: float) -> tuple[float, float]:
        reach = mu * (mu / 2.0 + k)
        return (
            float(np.logaddexp(log_absent, math.log(rate) - reach)),
            float(np.logaddexp(log_absent, math.log(rate) + reach)),
        )

    return Curve(upper, lower, span)


def addition(rate: float, mu: float) -> Curve:
    """The other direction of `removal`: P = N(0,1) against Q = (1-q) N(0,1) + q N(μ,1) (R3)."""
    forward = removal(rate, mu)
    forward_lower = cast(Tails, forward.lower)

    def upper(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, q = forward_lower(-epsilon)
        with np.errstate(divide="ignore"):
            return q, np.log(p)

    def lower(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, log_q = forward.upper(-epsilon)
        return np.exp(log_q), p

    def span(k: float) -> tuple[float, float]:
        low, high = forward.span(k)
        return -high, -low

    return Curve(upper, lower, span)


def _symmetric(upper: Tails, span: Callable[[float], float]) -> Curve:
    return Curve(upper, None, lambda k: (-span(k), span(k)))


def fixed_size(rate: float, mu: float) -> Curve:
    """The dominating profile of a fresh fixed-size batch under replace-one (G4, R2).

    For ε > 0 it has the tails of `removal` with μ = 1/z, z relative to the replace-one distance; for
    ε < 0 their mirror image; an atom at 0 holds the rest, (1-q)(1 - 2Φ(-μ/2)).
    """
    forward = removal(rate, mu)
    return _symmetric(forward.upper, lambda k: forward.span(k)[1])


def mixture(rate: float, mu: float, shares: Sequence[tuple[float, float]]) -> Curve:
    """Σ w·(profile of `fixed_size` at rate and share·μ) over pairs of weight w and share (E3): the tails of a loss
    are linear in its profile."""
    parts = [(weight, removal(rate, share * mu)) for weight, share in shares]

    def upper(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tails = [(weight, *part.upper(epsilon)) for weight, part in parts]
        log_q = np.logaddexp.reduce([math.log(weight) + log_q for weight, _, log_q in tails])
        return sum((weight * p for weight, p, _ in tails), np.zeros(())), log_q

    return _symmetric(upper, lambda k: max(part.span(k)[1] for _, part in parts))


def poisson_replacement(rate: float, mu: float) -> Curve:
    """(1-q) N(0,1) + q N(μ,1) against (1-q) N(0,1) + q N(-μ,1): R3 under replace-one.

    The record is in the batch by its own coin and contributes a vector of norm at most μ (in units of the
    noise), another one in the neighbouring dataset. By advanced joint convexity H_a(P||Q) equals
    q H_a'(P1 || (1-b) P0 + b P1'), a mixture whose centres are within μ and 2μ of P1; the mixture-of-
    Gaussians lemma (Choquette-Choo et al. 2024) says that collinear centres at exactly these distances are
    worst, which is the pair above, in both directions. L > ε is x > t with
    μ t = ε/2 + asinh(((1-q)/q) e^{μ²/2} sinh(ε/2)).
    """
    log_odds = math.log1p(-rate) - math.log(rate) if rate < 1 else -math.inf
    log_absent = math.log1p(-rate) if rate < 1 else -math.inf

    def upper(epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        half = epsilon / 2.0
        with np.errstate(divide="ignore", over="ignore"):
            log_sinh = half + np.log(-np.expm1(-epsilon)) - math.log(2.0)
            y = log_odds + mu**2 / 2.0 + log_sinh
            # asinh(e^y), which is y + ln 2 once e^y is large
            inverse = np.where(y > 20.0, y + math.log(2.0), np.arcsinh(np.exp(np.minimum(y, 20.0))))
        t = (half + inverse) / mu
        log_q = log_ndtr(-mu - t)
        if rate < 1:
            log_q = np.logaddexp(log_absent + log_ndtr(-t), math.log(rate) + log_q)
        return (1.0 - rate) * ndtr(-t) + rate * ndtr(mu - t), log_q

    def span(k: float) -> float:
        centre, reach = math.log(rate) - mu**2 / 2.0, mu * (mu + k)
        return float(np.logaddexp(log_absent, centre + reach) - np.logaddexp(log_absent, centre - reach))

    return _symmetric(upper, span)


# --- discretisation and composition --------------------------------------------------------------------


class _Grid(NamedTuple):
    """Masses on `(start + k) * step`, and the mass of an infinite loss."""

    start: int
    masses: np.ndarray
    infinite: float

    def losses(self, step: float) -> np.ndarray:
        return (self.start + np.arange(len(self.masses))) * step


def _discretise(curve: Curve, step: float, quantile: float) -> _Grid:
    """Connect the dots on multiples of `step`."""
    low, high = curve.span(quantile)
    first, last = min(-1, math.floor(low / step)), max(1, math.ceil(high / step))
    above = np.arange(0, last + 1) * step
    below = np.arange(first, 1) * step
    (p_up, log_q_up), (p_low, q_low) = curve.tails(above, below)
    # Masses of the intervals (edge_i, edge_{i+1}], Q's in units of e^{-edge_i}
    p_above = p_up[:-1] - p_up[1:]
    q_above = np.exp(log_q_up[:-1] + above[:-1]) - np.exp(log_q_up[1:] + above[:-1])
    p_below = np.diff(p_low)
    q_below = np.diff(q_low) * np.exp(below[:-1])
    p = np.maximum(np.concatenate([p_below, p_above]), 0.0)
    q = np.concatenate([q_below, q_above])
    left = np.clip((q - p * math.exp(-step)) / -math.expm1(-step), 0.0, p)
    masses = np.zeros(last - first + 1)
    masses[:-1] += left
    masses[1:] += p - left
    masses[0] += p_low[0]  # the lower tail moves up: pessimistic
    return _Grid(first, masses, float(p_up[-1]))


def _moments(grid: _Grid, step: float) -> tuple[float, float]:
    losses = grid.losses(step)
    mean = float(losses @ grid.masses)
    return mean, float(losses**2 @ grid.masses) - mean**2


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """values ** exponent by squaring: faster than a complex power and exact about what it multiplies."""
    if exponent < 1:
        return np.ones_like(values)
    result: np.ndarray | None = None
    while True:
        if exponent & 1:
            result = values.copy() if result is None else result * values
        exponent >>= 1
        if not exponent:
            return values if result is None else result
        values = values * values


class LossDistribution(NamedTuple):
    """A composed privacy loss on a grid; answers δ(ε) and ε(δ) with upper bounds."""

    start: int
    step: float
    masses: np.ndarray
    infinite: float

    def _above(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For grid points ε >= 0: ε, P[L > ε], and E[e^{ε-L}; L > ε]."""
        skip = max(0, -self.start)
        masses = self.masses[skip:]
        losses = (max(self.start, 0) + np.arange(len(masses))) * self.step
        if len(masses) == 0:
            return np.zeros(1), np.zeros(1), np.zeros(1)
        decay = math.exp(-self.step)
        tail = np.cumsum(masses[::-1])[::-1] - masses
        # Σ_{j>=k} p_j e^{-(j-k) step}: x_k - decay x_{k+1} = p_k, solved from the end
        band = np.full((2, len(masses)), -decay)
        inside = dtbtrs(band, masses, uplo="U", diag="U")[0].reshape(-1)
        if self.start > 0:  # all losses are positive: add the point ε = 0
            lead = math.exp(-losses[0])
            return (
                np.concatenate([[0.0], losses]),
                np.concatenate([[tail[0] + masses[0]], tail]),
                np.concatenate([[lead * inside[0]], inside - masses]),
            )
        return losses, tail, inside - masses

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ(ε), ε >= 0."""
        losses = (self.start + np.arange(len(self.masses))) * self.step
        over = losses > epsilon
        return min(1.0, self.infinite + float(-np.expm1(epsilon - losses[over]) @ self.masses[over]))

    def epsilon(self, delta: float) -> float:
        """An upper bound on ε(δ); infinite where the truncated tails alone exceed δ."""
        room = delta - self.infinite
        if room <= 0:
            return math.inf
        losses, tail, scaled = self._above()
        over = np.flatnonzero(tail - scaled > room)
        if len(over) == 0:
            return 0.0
        at = int(over[-1])
        following = float(losses[min(at + 1, len(losses) - 1)])
        if scaled[at] <= 0:  # the next losses are so far that e^-loss vanishes
            return following
        # inside the interval above grid point `at`, δ(ε) = tail - e^{ε-loss} scaled
        return min(following, float(losses[at] + math.log((tail[at] - room) / scaled[at])))


def compose(events: Sequence[Events], delta: float, resolution: Resolution = FINE) -> LossDistribution:
    """The loss of all events together, with tails truncated far below `delta` (and charged).

    Rounds in which the client takes part with a probability contribute (1-p) + p F to the transform: the
    mixture of R4, ex ante, for a pattern drawn independently of the data and of every earlier output.
    """
    steps = sum(e.repeats * sum(count for _, count in e.curves) for e in events)
    if steps == 0:
        return LossDistribution(0, 1.0, np.ones(1), 0.0)
    tail = 1e-7 * min(max(delta, 1e-12), 1e-2)
    quantile = -float(ndtri(tail / steps)) if tail / steps > 1e-300 else 37.0

    step, variance, span = _step_size(events, tail, quantile, resolution)
    # From the order that is best for a Gaussian sum down to one that suits a few rare, large losses
    log_tail = math.log(1.0 / tail)
    highest = 4.0 * math.sqrt(2.0 * log_tail / variance)
    orders = np.geomspace(min(highest / 64.0, log_tail / (20.0 * span)), highest, 16)
    while True:
        grids = [[_discretise(curve, step, quantile) for curve, _ in event.curves] for event in events]
        lower, upper = _window(events, grids, step, orders, log_tail)
        if (upper - lower) / step <= _WINDOW_CELLS:
            break
        step *= (upper - lower) / step / _WINDOW_CELLS * 1.1
    first, last = math.floor(lower / step), math.ceil(upper / step)
    widest = max(len(grid.masses) for row in grids for grid in row)
    size = _fast_size(max(last - first + 1, widest, 2))

    total, log_finite = _transform(events, grids, size)
    if total is None:
        return LossDistribution(0, 1.0, np.ones(1), 0.0)
    masses = np.roll(np.fft.irfft(total, size), -first)
    # Mass that left the window wraps around: from below to the top, which is pessimistic; from above to the
    # bottom, which is at most `tail` and charged. Negative cells show how large the rounding of the FFT is; what
    # all cells of a tail share they do not show, and that grows with every product.
    rounding = float(-masses[masses < 0].sum())
    charged = max(tail + rounding, steps * _ULP)
    return LossDistribution(first, step, np.maximum(masses, 0.0), -math.expm1(log_finite) + charged)


def _step_size(
    events: Sequence[Events], tail: float, quantile: float, resolution: Resolution
) -> tuple[float, float, float]:
    """(width of a cell, variance of the whole loss, widest span of a curve), from moments on a coarse grid."""
    coarse: list[list[tuple[_Grid, float]]] = []
    spans: list[float] = []
    for event in events:
        row = []
        for curve, _ in event.curves:
            low, high = curve.span(quantile)
            spans.append(max(high - low, _LEAST_SPAN))
            width = spans[-1] / 4000.0
            row.append((_discretise(curve, width, quantile), width))
        coarse.append(row)
    variance = pure = 0.0
    for event, row in zip(events, coarse, strict=True):
        moments = [_moments(grid, width) for grid, width in row]
        counts = [count for _, count in event.curves]
        mean = sum(n * m for n, (m, _) in zip(counts, moments, strict=True))
        inner = event.repeats * event.probability * sum(n * v for n, (_, v) in zip(counts, moments, strict=True))
        pure += inner
        variance += inner + event.repeats * event.probability * (1.0 - event.probability) * mean**2
    least = (max(spans) / resolution.step_cells) ** 2  # no grid shows less: losses that lie at one place have none
    pure, variance = max(pure, least), max(variance, least)
    expected_steps = sum(e.repeats * e.probability * sum(n for _, n in e.curves) for e in events)
    deviation = math.sqrt(pure / expected_steps)  # of one step, root mean square
    reach = 2.0 * math.sqrt(variance) * math.sqrt(-2.0 * math.log(tail))
    step = deviation / resolution.cells_per_std
    step = min(max(step, reach / resolution.soft_cells), deviation / resolution.min_cells_per_std)
    step = max(step, max(spans) / resolution.step_cells, sum(spans) / _ALL_STEPS_CELLS)
    return step, variance, max(spans)


def _fast_size(least: int) -> int:
    """The least length from `least` on without prime factors above 5: the FFT is quick there. (scipy.fft has this,
    and takes longer to import than most proofs to compute.)"""
    odd: list[int] = [3**i * 5**j for i in range(20) for j in range(14)]
    return min(part << max(0, -(-least // part) - 1).bit_length() for part in odd)


def _transform(events: Sequence[Events], grids: list[list[_Grid]], size: int) -> tuple[np.ndarray | None, float]:
    """The transform of the whole loss (None where nothing happens), and the logarithm of its finite mass."""
    total: np.ndarray | None = None
    log_finite = 0.0
    for event, grid_row in zip(events, grids, strict=True):
        transform: np.ndarray | None = None
        log_kept = 0.0
        for (_, count), grid in zip(event.curves, grid_row, strict=True):
            cyclic = np.zeros(size)
            cyclic[np.arange(grid.start, grid.start + len(grid.masses)) % size] = grid.masses
            factor = _power(np.fft.rfft(cyclic), count)
            transform = factor if transform is None else transform * factor
            log_kept += count * math.log1p(-grid.infinite)
        if transform is None:
            continue
        if event.probability < 1.0:
            transform = (1.0 - event.probability) + event.probability * transform
        log_finite += event.repeats * math.log1p(event.probability * math.expm1(log_kept))
        transform = _power(transform, event.repeats)
        total = transform if total is None else total * transform
    return total, log_finite


def _window(
    events: Sequence[Events], grids: list[list[_Grid]], step: float, orders: np.ndarray, log_tail: float
) -> tuple[float, float]:
    """Chernoff bounds that the composed loss falls below, or exceeds, with probability e^-log_tail each.

    Every order gives one. The logarithm of a moment generating function is convex, so they fall and then rise with
    the order: the best one is found by halving.
    """
    rows = []
    for grid_row in grids:
        held = [(grid, grid.masses > 0) for grid in grid_row]
        rows.append([(grid.losses(step)[mask], np.log(grid.masses[mask])) for grid, mask in held])

    def reach(order: float) -> float:
        total = 0.0
        for event, row in zip(events, rows, strict=True):
            inner = 0.0
            for (_, count), (losses, log_masses) in zip(event.curves, row, strict=True):
                exponents = order * losses + log_masses
                peak = exponents.max()  # log-sum-exp by hand: SciPy's checks cost more than the sum here
                inner += count * (peak + np.log(np.exp(exponents - peak).sum()))
            if event.probability < 1.0:
                inner = np.logaddexp(math.log1p(-event.probability), math.log(event.probability) + inner)
            total += event.repeats * inner
        return float((total + log_tail) / abs(order))

    return -_least(reach, -orders), _least(reach, orders)


def _least(function: Callable[[float], float], points: np.ndarray) -> float:
    """The least value at points along which the function falls and then rises."""
    low, high = 0, len(points) - 1

    @functools.cache
    def value(at: int) -> float:
        return function(float(points[at]))

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) <= value(middle + 1) else (middle + 1, high)
    return value(low)
