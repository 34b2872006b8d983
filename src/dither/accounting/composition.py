"""From releases to loss items under one adjacency, from loss items to ε, and what the other clients' noise is
worth under secure aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dither.accounting import pld
from dither.accounting.gaussian import (
    binomial_pmf,
    charge_truncation,
    check_delta,
    gaussian_epsilon,
    mixture_epsilon,
    rounded_levels,
)
from dither.errors import NoProof
from dither.types import Release

ZERO_OUT = "zero-out"  # one record's contribution counts as zero; its place, and so every count, stays
REPLACE_ONE = "replace-one"
ADD_REMOVE = "add/remove"
ADJACENCIES = (ZERO_OUT, REPLACE_ONE, ADD_REMOVE)
_LEAST_NOISE = 2.0**-100  # float32 ends at 2^-126; what is drawn and its weight need some room


class Item(NamedTuple):
    """`uses` releases of one kind: "plain" (R1), "fixed" (R2/R5), "poisson" or "poisson_replace" (R3), "mixture"
    (E3 and R4, with its (weight, share of the distance) pairs)."""

    kind: str
    rate: float
    noise_multiplier: float
    uses: int
    shares: tuple[tuple[float, float], ...] = ()


class Group(NamedTuple):
    """`repeats` participations that each make these items, each happening with `probability`."""

    items: tuple[Item, ...]
    repeats: int = 1
    probability: float = 1.0


def noise_multiplier(release: Release, factor: float = 1.0) -> float:
    """noise_std over `factor` times the sensitivity, and over what rounding adds to that once; infinite where
    nothing depends on the record."""
    noise_std, sensitivity = float(release.noise_std), float(release.sensitivity) * factor
    if math.isnan(noise_std) or math.isnan(sensitivity) or noise_std < 0 or sensitivity < 0:
        raise NoProof(f"noise_std={noise_std} and sensitivity={sensitivity} ({release.source}) give no bound")
    if sensitivity == math.inf:
        raise NoProof(f"the sensitivity is unbounded ({release.source})")
    if 0 < noise_std < _LEAST_NOISE:
        raise NoProof(f"noise_std={noise_std:g} is below 2^-100: float32 rounds such noise to 0")
    if sensitivity == 0:
        return math.inf
    rounding = release.exact.rounding * noise_std if release.exact else 0.0
    return noise_std / (sensitivity + rounding)


def step_multiplier(release: Release, adjacency: str) -> float:
    """The noise multiplier of one release under `adjacency`, without any credit for sampling."""
    return noise_multiplier(release, _distance_factor(release, adjacency))


def _distance_factor(release: Release, adjacency: str) -> float:
    """What the stated sensitivity is multiplied by for neighbours under `adjacency`.

    A sensitivity stated for zero-out (or add/remove) is the norm of one contribution: it holds for replace-one at
    twice its size (two triangle sides). One stated for replace-one holds for zero-out as it is, since a blank is
    one of the contributions that the clip allows; it says nothing about a record's absence, except for Poisson
    batches, whose contributions are clipped to a ball around zero of half the replace-one distance. Of kinds
    ending in "-round" the sensitivity holds between any two worlds of the round (record used, another one, none).
    """
    stated, kind = release.sampling.adjacency, release.sampling.kind
    if stated not in ADJACENCIES or adjacency not in ADJACENCIES:
        raise NoProof(f"unknown adjacency {stated!r} or {adjacency!r}")
    absent = adjacency == ADD_REMOVE
    if kind in ("fixed", "disjoint", "shuffled") and ADD_REMOVE in (adjacency, stated):
        raise NoProof(f"{kind} batches have no add/remove neighbours: their number of records is public (G3)")
    if absent and kind.startswith("poisson") and not release.sampling.fixed_rate:
        raise NoProof(
            "add/remove needs a data-independent rate, and this one depends on the client's record count: set "
            "sampling_rate, a public number (R3)"
        )
    if absent and kind.endswith("-round") and stated != ADD_REMOVE:
        raise NoProof(f"{kind} batches have no add/remove neighbours: their number of records is public (G3)")
    if absent and kind != "poisson" and stated != ADD_REMOVE:
        raise NoProof(f"the sensitivity is stated for {stated} and does not bound a record's absence (G2)")
    if kind.endswith("-round"):
        return 1.0
    if stated == REPLACE_ONE:
        return 0.5 if kind == "poisson" and adjacency != REPLACE_ONE else 1.0
    return 2.0 if adjacency == REPLACE_ONE else 1.0


def sampled_item(release: Release, adjacency: str, *, gain: float = 1.0, given: float = 1.0) -> Item:
    """The release with its sampling's amplification; `gain` multiplies the noise std. Batches of fixed size that
    use a record more often than `given` are taken as known, where that brings neighbours nearer."""
    kind, rate = release.sampling.kind, float(release.sampling.rate)
    if not 0.0 <= rate <= 1.0:
        raise NoProof(f"sampling rate {rate} is not in [0, 1]")
    uses = int(release.uses)
    if uses < 0 or uses != release.uses:
        raise NoProof(f"uses={release.uses} is not a number of releases")
    z = step_multiplier(release, adjacency) * gain
    # A batch of fixed size that lacks the record holds another one instead: its amplification (G4) needs the
    # distance of a replacement, also where the neighbour's record is a blank.
    swapped = step_multiplier(release, REPLACE_ONE) * gain
    if kind in ("full", "full-round"):
        return Item("plain", 1.0, z, uses)
    if kind == "poisson":
        # of a replacement the pair itself doubles the distance
        single = noise_multiplier(release, 0.5 * _distance_factor(release, REPLACE_ONE)) * gain
        return Item("poisson_replace" if adjacency == REPLACE_ONE else "poisson", rate, single, uses)
    if kind == "poisson-round" and adjacency != REPLACE_ONE:
        return Item("poisson", rate, z, uses)
    if kind in ("fixed-round", "poisson-round", "disjoint-round"):
        return Item("fixed", rate, z, uses)
    if kind == "disjoint":
        # At most one of the round's `uses` batches holds the record; swapping it with an unused one changes
        # that one release, so G4 applies to the whole round with q = uses · rate.
        rate, uses = min(1.0, uses * rate), 1 if uses else 0
    if kind in ("fixed", "disjoint"):
        if z == swapped or rate <= given:
            return Item("fixed", rate, swapped, uses)
        # Given the batches, a blank changes a release that uses it by half of that distance (R4).
        return Item("mixture", 1.0, z, uses, ((rate, 1.0),)) if rate < 1 else Item("plain", 1.0, z, uses)
    raise NoProof(f"no theorem for batches of kind {kind!r}")


_MOST_USES = 12  # of a record in one round that are told apart


def item_by_use(release: Release, adjacency: str, *, gain: float = 1.0) -> Item:
    """The release by how many local steps use the record (E3); they must not expand. With J ~ Bin(Q, q) uses the
    worlds are at most J shares of the sensitivity apart. One profile serves both directions."""
    kind, rate, uses = release.sampling.kind, float(release.sampling.rate), release.by_use
    if uses is None or adjacency == ADD_REMOVE:
        raise NoProof("the effect of one use of a record on the upload is not known, or not for add/remove (E3)")
    z = step_multiplier(release, adjacency) * gain
    # A blank moves a sum half as far as a replacement, unless another record takes the place of one not drawn.
    share = uses.share * (0.5 if adjacency == ZERO_OUT and kind in ("full-round", "poisson-round") else 1.0)
    count = int(release.uses)
    if kind == "full-round":
        return Item("plain", 1.0, z / min(1.0, uses.steps * share), count)
    if kind == "disjoint-round":
        return Item("fixed", rate, z / min(1.0, share), count)
    if kind not in ("fixed-round", "poisson-round") or not 0 < rate < 1:
        raise NoProof(f"no theorem by use for batches of kind {kind!r} (E3)")
    one_step = -math.expm1(math.log1p(-rate) / uses.steps)
    weights = binomial_pmf(uses.steps, one_step)[1:] / rate
    told = [(float(w), min(1.0, (j + 1) * share)) for j, w in enumerate(weights[: _MOST_USES - 1])]
    rest = max(0.0, 1.0 - math.fsum(w for w, _ in told))  # more uses count as all of them
    shares = [*told, (rest, 1.0)] if uses.steps >= _MOST_USES else told
    return Item("mixture", rate, z, count, tuple((w, s) for w, s in shares if w > 0))


def batches_per_epoch(release: Release) -> int:
    """Whole batches in one epoch; the partial last one is dropped (D2)."""
    sampling = release.sampling
    if sampling.batch_size > 0 and sampling.population >= sampling.batch_size:
        return int(sampling.population) // int(sampling.batch_size)
    if not 0 < sampling.rate <= 1 or sampling.kind != "shuffled":
        raise NoProof(f"shuffled batches need batch_size and population, or a rate; got {sampling}")
    return max(1, math.floor(1.0 / sampling.rate + 1e-9))


def epochs_in_round(steps: int, per_epoch: int) -> int:
    """How many epochs `steps` consecutive batches can touch, when rounds follow each other without gaps."""
    if per_epoch % steps == 0:
        return 1
    if steps % per_epoch == 0:
        return steps // per_epoch
    return (steps + per_epoch - 2) // per_epoch + 1


def total_shuffled_uses(
    participations: int, steps: int, per_epoch: int, *, own_epochs: bool, num_rounds: int | None
) -> int:
    """D2: the most often a record is used in `participations` rounds of `steps` batches.

    own_epochs: a client's epochs advance only when it takes part, so its batches are consecutive. Otherwise
    they advance with the calendar and every participation may meet a new epoch, or two.
    """
    if steps == 0 or participations == 0:
        return 0
    if own_epochs or num_rounds == participations:
        return shuffled_uses(participations * steps, per_epoch)
    most = participations * epochs_in_round(steps, per_epoch)
    return most if num_rounds is None else min(most, shuffled_uses(num_rounds * steps, per_epoch))


# ε of groups. What a noise multiplier is relative to differs by kind, because the adjacencies do:
#
#     fixed size, replace-one      noise std / replace-one distance       σB/(2·clip)
#     Poisson, any adjacency       noise std / norm of one contribution   σB/clip, B the fixed normaliser q·m

_CURVES: dict[str, tuple[Callable[[float, float], pld.Curve], ...]] = {
    "fixed": (pld.fixed_size,),
    "poisson": (pld.removal, pld.addition),
    "poisson_replace": (pld.poisson_replacement,),
}


def groups_epsilon(
    groups: Sequence[Group],
    delta: float,
    *,
    failure: float = 0.0,
    others_failure: float = math.inf,
    resolution: pld.Resolution = pld.FINE,
) -> float:
    """ε of all groups together; the failures of truncated batches are those of `charge_truncation`."""
    kept, grid_delta = _normalise(groups), resolution.grid_delta or delta

    def epsilon_of(delta: float) -> float:
        return _epsilon(kept, delta, grid_delta, resolution)

    return charge_truncation(epsilon_of, delta, min(1.0, failure), others_failure=others_failure)


def fixed_size_composition(steps: Iterable[tuple[float, float, int]], delta: float) -> float:
    """R2: fresh uniform batches of fixed size, replace-one, from (rate, noise multiplier, count) triples."""
    return _steps_epsilon("fixed", steps, delta)


def fixed_size_epsilon(rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """R2 for `steps` batches of one kind; R5 with the rate of a whole round."""
    return _steps_epsilon("fixed", [(rate, noise_multiplier, steps)], delta)


def poisson_epsilon(
    rate: float, noise_multiplier: float, steps: int, delta: float, *, adjacency: str = ZERO_OUT
) -> float:
    """R3: `steps` Poisson batches; noise relative to the norm of one record's contribution.

    zero-out and add/remove: the larger of both directions. replace-one: the pair of `pld.poisson_replacement`,
    which is also what dp-accounting's PLD accountant computes under REPLACE_ONE. It doubles the distance itself:
    the multiplier stays relative to the contribution.
    """
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency={adjacency!r}; known: {ADJACENCIES}")
    kind = "poisson_replace" if adjacency == REPLACE_ONE else "poisson"
    return _steps_epsilon(kind, [(rate, noise_multiplier, steps)], delta)


def _steps_epsilon(kind: str, steps: Iterable[tuple[float, float, int]], delta: float) -> float:
    check_delta(delta)
    items = [Item(kind, float(rate), float(noise_multiplier), count) for rate, noise_multiplier, count in steps]
    for item in items:
        if not 0.0 <= item.rate <= 1.0:
            raise ValueError(f"rate={item.rate} is not in [0, 1]")
        if math.isnan(item.noise_multiplier) or item.noise_multiplier < 0:
            raise ValueError(f"noise_multiplier={item.noise_multiplier} is negative")
        if item.uses < 0 or item.uses != int(item.uses):
            raise ValueError(f"count={item.uses} is not a number of releases")
    return groups_epsilon([Group(tuple(items))], delta)


def _normalise(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Drop what reveals nothing, add up plain releases, round long schedules down, merge equal groups."""
    sure: dict[tuple[str, float, float, tuple[tuple[float, float], ...]], int] = {}
    chance: dict[tuple[tuple[Item, ...], float], int] = {}
    plain = 0.0
    levels: dict[str, dict[tuple[float, float], tuple[float, float]]] = {}
    for kind in {item.kind for group in groups for item in group.items}:
        inside = [i for g in groups for i in g.items if i.kind == kind and (kind != "plain" or g.probability < 1)]
        levels[kind] = rounded_levels((item.rate, item.noise_multiplier) for item in inside)
    for group in groups:
        if not 0.0 <= group.probability <= 1.0 or group.repeats < 0:
            raise ValueError(f"probability={group.probability}, repeats={group.repeats} of a group")
        counts: dict[tuple[str, float, float, tuple[tuple[float, float], ...]], int] = {}
        for kind, rate, z, count, shares in group.items:
            if not count or not group.repeats or not group.probability or rate == 0 or z == math.inf:
                continue
            if kind == "plain" and group.probability == 1.0:
                # R1: μ² adds up exactly, so that no schedule is too long
                plain += group.repeats * count / z**2 if z > 0 else math.inf
                continue
            key = (kind, *levels[kind][rate, z], shares)
            counts[key] = counts.get(key, 0) + count
        if group.probability == 1.0:  # certain rounds need not stay apart
            for key, count in counts.items():
                sure[key] = sure.get(key, 0) + count * group.repeats
        elif counts:
            items = tuple(Item(*key[:3], count, key[3]) for key, count in sorted(counts.items()))
            chance[items, group.probability] = chance.get((items, group.probability), 0) + group.repeats
    result = [Group((Item("plain", 1.0, 1.0 / math.sqrt(plain), 1),))] if plain > 0 else []
    result += [Group((Item(*key[:3], 1, key[3]),), count) for key, count in sorted(sure.items())]
    result += [Group(items, repeats, probability) for (items, probability), repeats in chance.items()]
    return tuple(result)


def _epsilon(groups: tuple[Group, ...], delta: float, grid_delta: float, resolution: pld.Resolution) -> float:
    """ε at `delta`, on a grid made for `grid_delta` (so that one composition answers many δ)."""
    if not groups:
        return 0.0
    if delta <= 0:
        return math.inf
    if any(item.noise_multiplier == 0 for group in groups for item in group.items):
        return math.inf
    if all(item.kind == "plain" for group in groups for item in group.items):
        squares = [sum(i.uses / i.noise_multiplier**2 for i in group.items) for group in groups]
        if all(group.probability == 1 for group in groups):
            return gaussian_epsilon(
                math.sqrt(sum(g.repeats * s for g, s in zip(groups, squares, strict=True))), delta
            )
        if len(groups) == 1:
            trials = groups[0].repeats
            mus = np.sqrt(np.arange(trials + 1) * squares[0])
            return mixture_epsilon(binomial_pmf(trials, groups[0].probability), mus, delta)
    return max(d.epsilon(delta) for d in _distributions(groups, grid_delta, resolution))


@lru_cache(maxsize=128)
def _distributions(
    groups: tuple[Group, ...], delta: float, resolution: pld.Resolution
) -> tuple[pld.LossDistribution, ...]:
    """The composed loss, once a direction: a neighbour is a removal in all rounds or an addition in all."""
    kinds = {item.kind for group in groups for item in group.items}
    directions = max((len(_CURVES[kind]) for kind in kinds if kind in _CURVES), default=1)

    def curve(item: Item, direction: int) -> pld.Curve:
        mu = 1.0 / item.noise_multiplier
        if item.kind == "plain":
            return pld.removal(1.0, mu)
        if item.kind == "mixture":
            return pld.mixture(item.rate, mu, item.shares)
        choices = _CURVES[item.kind]
        return choices[min(direction, len(choices) - 1)](item.rate, mu)

    result = []
    for direction in range(directions):
        sure = [(curve(i, direction), i.uses * g.repeats) for g in groups if g.probability == 1 for i in g.items]
        events = [pld.Events(sure)] if sure else []
        events += [
            pld.Events([(curve(i, direction), i.uses) for i in g.items], g.repeats, g.probability)
            for g in groups
            if g.probability < 1
        ]
        result.append(pld.compose(events, delta, resolution))
    return tuple(result)


# Secure aggregation: what the noise of the other clients is worth (R6, G7). The server sees only the sum of r
# uploads; c of the r clients collude with it and subtract their own noise. Every μ below is for one round. A
# round has local steps of `rates` η_t, and `noise_multiplier` is (noise std of the gradient)/(its sensitivity),
# one for all steps or one a step. Rounds compose by adding μ² (each depends on the past through the public sum
# only). docs/privacy.md has the proofs.

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


_ONE_STEP = "; with local_steps=1 there is nothing to prove, and the credit is exact (R9)"


def credit_refusal(rates: Sequence[float], smoothness: float | None, convex: bool) -> str:
    """Why R6' proves nothing for a round of these rates; empty if it holds."""
    if len(rates) == 1:
        return ""  # noise is added once, after the only look at the data
    if not convex:
        return f"the credit for the other clients' noise is proved for convex losses only (G7b){_ONE_STEP}"
    if smoothness is None:
        return "G7b needs non-expansive steps, and no bound on learning rate x smoothness is known"
    if max(rates) * smoothness > 2.0:
        far = max(rates) * smoothness
        return f"learning rate x smoothness = {far:g} > 2: local steps may expand (G7b){_ONE_STEP}"
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

    Proved for one linear score, per-example clipping and steps with η_t β <= 2. Otherwise NoProof, unless
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


def shuffled_uses(steps: int, batches_per_epoch: int) -> int:
    """D2: uses of one record in `steps` consecutive batches of shuffled epochs (partial ones dropped)."""
    if batches_per_epoch < 1:
        raise ValueError(f"batches_per_epoch={batches_per_epoch} must be at least 1")
    return -(-steps // batches_per_epoch)
