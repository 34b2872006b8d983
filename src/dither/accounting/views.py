"""The table of proven ε: what a client's releases are worth to each adversary, under one adjacency.

Views, from the strongest adversary to the weakest (errata, Recipes):

    upload      the server sees every upload
    sum         the server sees only sums, and `colluders` clients collude with it (secure aggregation)
    broadcast   an outsider sees what is broadcast, and at most `exposures` of the client's uploads
    final       an outsider sees the final model only; bounded by "broadcast"

A later view is a function of an earlier one, so each bound carries over (except for an outsider who also sees
some uploads, which sums do not bound). If several recipes are valid for a view, its value is their minimum, never
across adjacencies. ε is ∞ if no theorem covers the case.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from dither.accounting.composition import (
    ADD_REMOVE,
    ADJACENCIES,
    ZERO_OUT,
    Group,
    Item,
    aggregated_round_mu,
    batches_per_epoch,
    credit_refusal,
    epochs_in_round,
    groups_epsilon,
    honest_others,
    item_by_use,
    sampled_item,
    smooth_round_mu,
    step_multiplier,
    total_shuffled_uses,
)
from dither.accounting.gaussian import (
    check_delta,
    compose_gaussians,
    gaussian_epsilon,
    mixture_epsilon,
    rho,
    shuffled_round_pattern,
    zcdp_epsilon_tight,
)
from dither.accounting.pld import FINE, Resolution
from dither.errors import NoProof
from dither.types import Conditions, ExactNoise, Lattice, Participation, Release, Sampling

Participations = Sequence[tuple[Release | tuple[Release, ...], int]]


@dataclass(frozen=True)
class ClientEpsilon:
    """A client with its own target: the paper's ε at its noise, the ε that is proved for it (for the spec's
    view, adjacency and unit), and its weight in a sum (the mean over the clients is 1)."""

    client: str
    target: float
    claimed: float
    proven: float
    weight: float


@dataclass(frozen=True)
class ProvenRow:
    """A rigorous ε with everything it depends on, for one view, adjacency and unit. It is ∞ by recipe "no proof"
    if none is known. In a run's table it is the largest over all clients.

    Attributes:
        view: What the adversary sees: "upload", "sum", "broadcast" or "final" (`accounting.VIEWS`).
        unit: "run" for the whole run, "message" for one participation. ", whole client" is appended if the unit of
            privacy is a client.
        recipe: The theorem used; "no proof" if ε = ∞.
        assumed: Whether the value rests on an assumption that is not established.
        not_covered: What the proof leaves out, in words.
        against: The collusion that a value withstands if it relies on the other clients' noise; otherwise empty.
        clients: The smallest, median and largest ε over the clients; None for one message.
        no_credit: For sums, why the other clients' noise earned no credit; empty if it did.
        sampler_delta: The part of δ that the sampler of exact noise uses; None if none counts.
    """

    view: str
    adjacency: str
    value: float
    delta: float
    unit: str
    recipe: str
    assumed: bool = False
    not_covered: tuple[str, ...] = ()
    detail: str = ""
    against: str = ""
    clients: ClientRange | None = None
    no_credit: str | None = None
    sampler_delta: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as summary.json has it; ∞ is still a float here. `experiment.report.decode` reads it."""
        row = {**vars(self), "not_covered": list(self.not_covered)}
        row["clients"] = None if self.clients is None else dict(vars(self.clients))
        optional = ("clients", "no_credit", "sampler_delta")
        return {name: value for name, value in row.items() if name not in optional or value is not None}


@dataclass(frozen=True)
class ClientRange:
    """A figure over the clients of a run, such as their ε: the least, the median and the largest."""

    min: float
    median: float
    max: float


REALISED = Participation()


def binomial(num_rounds: int, rate: float, *, adaptive: bool = False, certain: int = 0) -> Participation:
    """Independent participation with probability `rate` in each of `num_rounds` rounds (R4), except for the first
    `certain` of them, which are certain."""
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate={rate} is not in [0, 1]")
    return Participation("binomial", num_rounds, rate, adaptive, certain)


class Bound(NamedTuple):
    value: float
    recipe: str
    detail: str
    assumed: bool = False
    sampler_delta: float | None = None


_Groups = Sequence[tuple[tuple[Release, ...], int, float]]  # releases, how often, the probability of each


class Premises(NamedTuple):
    """What a recipe rests on: the participations that are counted and how they happen; the conditions, the
    adjacency and δ of the answer; and on which grid losses are composed."""

    groups: _Groups
    how: str
    conditions: Conditions
    adjacency: str
    delta: float
    resolution: Resolution

    def of(self, channel: str) -> _Groups:
        """The groups with the releases of one channel alone."""
        return [(tuple(r for r in group if r.channel == channel), count, p) for group, count, p in self.groups]


VIEWS = ("upload", "sum", "broadcast", "final")
NO_PROOF = "no proof"
_Recipe = Callable[[Premises], Bound]
_ROUNDING = "rounding and clamping before secure aggregation (G8)"
FLOAT_NOISE = (
    "floating-point noise: the proof is for real numbers, and the low bits of an upload can reveal more (H3)"
)
SAMPLER_ERROR = "the error of the noise sampler, which is not small compared with δ at such a large ε (R7)"
_FLOAT_CREDIT = (
    "floating-point sums of several clients' noise: the credit is proved for real numbers, and for a server "
    "that broadcasts no huge numbers (R7)"
)
_FLOAT_PLACES = "floating-point sums under add/remove, where records change places (R7)"
OVERHEARD = "an outsider who sees uploads of the other clients too: their noise is counted as unknown (N3)"
FLOAT_SUMS = "floating-point sums before the noise: the proof is for real numbers"

# What computing with numbers may leave uncovered
NUMBERS = (FLOAT_NOISE, FLOAT_SUMS, _FLOAT_CREDIT, _FLOAT_PLACES, SAMPLER_ERROR)


def compress(rounds: Iterable[tuple[Release, ...]]) -> list[tuple[tuple[Release, ...], int]]:
    """Equal participations counted once: the input of `account`, from one tuple of releases a round."""
    return list(Counter(tuple(releases) for releases in rounds).items())


# reason: what is proved for whom is one question
def account(
    participations: Participations,
    delta: float,
    conditions: Conditions | None = None,
    *,
    adjacency: str = ZERO_OUT,
    views: Sequence[str] = VIEWS,
    every_recipe: bool = False,
    resolution: Resolution = FINE,
) -> list[ProvenRow]:
    """Proven ε of one client's releases for each view, under one adjacency.

    `participations` holds pairs (releases of one participation, number of such participations); a single Release
    stands for a participation that makes only this one. Keep the releases of one participation
    together in one tuple: the sum's credit and R4 depend on what happens in the same round.
    `every_recipe` returns one row for each recipe that was tried, including refusals, instead of the best row
    for each view. A coarser `resolution` is faster and gives a larger ε.
    """
    check_delta(delta)
    conditions = Conditions() if conditions is None else conditions
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency={adjacency!r}; known: {ADJACENCIES}")
    unknown = [view for view in views if view not in VIEWS]
    if unknown:
        raise ValueError(f"view={unknown[0]!r}; known: {VIEWS}")
    groups, how = _counted(participations, conditions)
    premises = Premises(groups, how, conditions, adjacency, delta, resolution)

    @functools.cache
    def bound(recipe: _Recipe) -> Bound:
        """Fail closed: what a recipe refuses is ε = ∞ with the reason."""
        try:
            if adjacency == ADD_REMOVE and conditions.counts_shown:
                raise NoProof(
                    "add/remove needs releases that do not depend on a record count: "
                    f"{conditions.counts_shown}; use zero-out"
                )
            return _with_sampler_error(recipe, premises)
        except NoProof as refusal:
            return Bound(math.inf, NO_PROOF, str(refusal))

    table = []
    for view in views:
        tried = [bound(recipe) for recipe in _recipes(view, premises)]
        best = min(tried, key=lambda b: (b.value, b.assumed))
        if best.recipe == NO_PROOF:
            best = best._replace(detail="; ".join(b.detail for b in tried))
        for row in tried if every_recipe else [best]:
            table.append(
                ProvenRow(
                    view=view,
                    adjacency=adjacency,
                    value=row.value,
                    delta=delta,
                    unit=conditions.unit,
                    recipe=row.recipe,
                    not_covered=conditions.not_covered + _gaps(row, premises),
                    assumed=row.assumed,
                    detail=row.detail,
                    sampler_delta=row.sampler_delta,
                )
            )
    return table


def _gaps(bound: Bound, premises: Premises) -> tuple[str, ...]:
    """What floating-point arithmetic leaves uncovered, and who may hear others. Exact noise (R7) covers releases
    whose bound rests on their own noise alone."""
    recipe, conditions = bound.recipe, premises.conditions
    channel = "downlink" if recipe.endswith(" downlink") else "uplink"
    releases = [r for group, _, _ in premises.of(channel) for r in group if r.uses]
    exact = all(release.exact is not None for release in releases)
    by_use = recipe.startswith("E3")  # local steps round, whatever the noise is
    integers = all(release.exact is not None and release.exact.sums for release in releases)
    if conditions.lattice is not None:  # noise on integers that are summed as such
        return () if exact else (FLOAT_SUMS,)
    summed = recipe.startswith("R6") or recipe.endswith(" sum")
    # A broadcast's noise counts that of the uploads.
    rounded = summed or (conditions.encoded and recipe.endswith((" downlink", " joint")))
    ideal = bound.sampler_delta is None and any(
        r.exact and (r.exact.distance or r.exact.failure) for r in releases
    )
    gaps = {
        FLOAT_NOISE: not exact,
        _FLOAT_CREDIT: exact and not integers and (summed or recipe.endswith(" joint")),
        _FLOAT_PLACES: exact and premises.adjacency == ADD_REMOVE and recipe != NO_PROOF,
        FLOAT_SUMS: exact and by_use,
        SAMPLER_ERROR: ideal and recipe != NO_PROOF,
        _ROUNDING: rounded and not integers,
        OVERHEARD: recipe.endswith(" joint"),
    }
    return tuple(text for text, applies in gaps.items() if applies)


_SHARES = (1e-4, 1e-2, 0.1, 0.5)  # of δ that the sampler's error may take, tried in turn


def _with_sampler_error(recipe: _Recipe, premises: Premises) -> Bound:
    """The recipe's bound for noise as it is drawn (`ExactNoise.delta`). Where the sampler's error would take most
    of δ the bound is for ideal noise, and labelled so."""
    error = sampler_error((group, count) for group, count, _ in premises.groups)
    for share in _SHARES if any(error) else ():
        bound = recipe(premises._replace(delta=premises.delta * (1 - share)))
        added = error.delta(bound.value)
        if added <= share * premises.delta:
            return bound._replace(sampler_delta=added)
    return recipe(premises)


def sampler_error(participations: Iterable[tuple[Sequence[Release], int]]) -> ExactNoise:
    """Distance and failure of all noise that is drawn in these participations."""
    errors = [
        (count * release.uses * release.exact.distance, count * release.uses * release.exact.failure)
        for releases, count in participations
        for release in releases
        if release.exact is not None
    ]
    return ExactNoise(0.0, math.fsum(error[0] for error in errors), math.fsum(error[1] for error in errors))


def _recipes(view: str, premises: Premises) -> tuple[_Recipe, ...]:
    """All recipes that are valid for a view; the value is their minimum."""
    uploads, sums = [upload_bound], [sum_bound]
    if _never_expands(premises):
        uploads, sums = [*uploads, convex_bound], [*sums, convex_sum_bound]
    if view == "upload":
        return tuple(uploads)
    if view == "sum":
        return (*uploads, *sums)
    if view == "broadcast" and premises.conditions.exposures:
        # the outsider sees some uploads too: sums alone no longer bound the view, all uploads still do
        return (*uploads, joint_bound)
    return (*uploads, *sums, downlink_bound)


def proven(
    participations: Participations,
    delta: float,
    conditions: Conditions | None = None,
    *,
    view: str,
    adjacency: str = ZERO_OUT,
    resolution: Resolution = FINE,
) -> ProvenRow:
    """The best bound for one view: `account` with a single row."""
    return account(participations, delta, conditions, adjacency=adjacency, views=(view,), resolution=resolution)[0]


def _counted(participations: Participations, conditions: Conditions) -> tuple[_Groups, str]:
    """The participations that count, with their probabilities, and how they happen."""
    groups = [
        ((releases,) if isinstance(releases, Release) else tuple(releases), int(count))
        for releases, count in participations
    ]
    for releases, count in groups:
        if count < 0:
            raise ValueError(f"count={count} of {releases} is negative")
        for release in releases:
            if release.channel not in ("uplink", "downlink"):
                raise ValueError(f"channel={release.channel!r}; known: 'uplink', 'downlink'")
    total = sum(count for _, count in groups)
    kind, num_rounds, rate, adaptive, certain = conditions.participation
    sure = [(releases, count, 1.0) for releases, count in groups]
    if kind == "realised":
        return sure, f"given the {total} participations that happened"
    if kind == "worst":
        return sure, f"at most {total} participations"
    if kind != "binomial":
        raise ValueError(f"participation kind={kind!r}; known: 'realised', 'worst', 'binomial'")
    if num_rounds is not None and total != num_rounds:
        raise ValueError(f"{total} participations are listed for a binomial over num_rounds={num_rounds}")
    if adaptive:
        return sure, f"all {total} rounds, because R4 is refused for adaptive selection"
    drawn, left = [], certain
    for releases, count in groups:
        first = min(left, count)
        left -= first
        drawn += [(releases, first, 1.0), (releases, count - first, rate)]
    how = f"ex ante, participation in each of {total - certain} rounds with probability {rate:g}"
    how += f" and in {certain} with certainty" if certain else ""
    return [group for group in drawn if group[1]], how


_LEAST_VARIANCE = 16.0  # of discrete noise: above, its distance from a Gaussian (τ) is below 1e-60
_GIVEN = (1.0, 0.25, 0.0)  # above which rate batches of fixed size are taken as known: each gives a bound
_MOST_EPOCHS = 200  # beyond, the pattern of shuffled uses is bounded by the worst one


def batch_rate(sampling: Sampling) -> float:
    """The chance of a record in one Poisson batch, of a release at the end of a round too."""
    if not sampling.kind.endswith("-round"):
        return float(sampling.rate)
    return sampling.batch_size / sampling.population if sampling.population else 1.0


def _failures(groups: _Groups) -> tuple[float, float]:
    """Union bounds on a truncated Poisson batch anywhere, and on the other records alone filling one."""
    any_batch = others_alone = 0.0
    for group, count, _ in groups:
        for release in group:
            sampling = release.sampling
            if not sampling.truncation:
                continue
            batches, rate = float(release.uses), batch_rate(sampling)
            if sampling.kind.endswith("-round"):
                # the release's rate is 1 - (1 - q)^Q: recover the Q batches behind it
                if not 0 < rate < 1 or not 0 < sampling.rate < 1:
                    raise NoProof(
                        "truncated batches inside one release cannot be charged: their number is unknown"
                    )
                batches *= math.ceil(math.log1p(-sampling.rate) / math.log1p(-rate) - 1e-6)
            any_batch += count * batches * sampling.truncation
            others_alone += count * batches * sampling.truncation / rate if rate > 0 else 0.0
    return any_batch, others_alone


def _name(groups: _Groups, item: Callable[[Release], Item]) -> str:
    """The recipes behind a composition of these items, as a readable name."""
    names = {"plain": "R1", "poisson": "R3", "poisson_replace": "R3", "mixture": "R4"}
    used = {"R1"} if not any(group for group, _, _ in groups) else set()
    used |= {"R4"} if any(p < 1 for _, _, p in groups) else set()
    for release in {release for group, _, _ in groups for release in group}:
        at_the_end = release.sampling.kind in ("fixed-round", "poisson-round", "disjoint-round")
        used.add("R5" if at_the_end else names.get(item(release).kind, "R2"))
    return "+".join(sorted(used, key=lambda recipe: (recipe == "R4", recipe)))


def _shuffled(group: Sequence[Release]) -> bool:
    return any(release.sampling.kind in ("shuffled", "shuffled-round") for release in group)


# --- recipes -------------------------------------------------------------------------------------------


def upload_bound(premises: Premises) -> Bound:
    """(i) adaptive composition of all uplink releases: R1, R2, R3 or R5 by sampler, R4 by participation."""
    lattice = premises.conditions.lattice
    if lattice is not None:
        return _discrete(premises, lattice, clients=1)
    return _composed(premises.of("uplink"), premises)


def _never_expands(premises: Premises) -> bool:
    """Whether E3 applies: one release after local steps that do not move two models apart, known by use."""
    conditions = premises.conditions
    return conditions.lattice is None and all(
        r.by_use is not None and not credit_refusal((r.by_use.rate,) * 2, conditions.smoothness, conditions.convex)
        for group, _, _ in premises.of("uplink")
        for r in group
    )


def convex_bound(premises: Premises, *, gain: float = 1.0) -> Bound:
    """E3: one release after local steps that do not expand, by how many of them use the record."""
    groups = premises.of("uplink")
    value, _ = _amplified(groups, premises, lambda r: item_by_use(r, premises.adjacency, gain=gain))
    return Bound(value, "E3" + ("+R4" if any(p < 1 for _, _, p in groups) else ""), premises.how)


def convex_sum_bound(premises: Premises) -> Bound:
    """E3 in a sum: the noise is added once, after the last look at the data, so that the credit is exact."""
    gain = math.sqrt(1.0 + _others_noise(premises.conditions))
    bound = convex_bound(premises, gain=gain)
    return bound._replace(
        recipe=f"{bound.recipe} sum", detail=f"{bound.detail}; noise of {gain**2:g} clients counts"
    )


def downlink_bound(premises: Premises) -> Bound:
    """(iii) the broadcasts' own noise."""
    groups = premises.of("downlink")
    if not any(group for group, _, _ in groups):
        raise NoProof("no noise is added to the broadcast")
    if premises.conditions.lattice is not None:
        raise NoProof("the broadcast carries the uploads' noise, which is discrete here: the bound for sums holds")
    hidden = [group for group, _, _ in premises.groups if not _has_downlink(group)]
    if any(release.channel == "uplink" for group in hidden for release in group):
        raise NoProof("some rounds release an upload without a noisy broadcast")
    bound = _composed(groups, premises)
    return bound._replace(recipe=f"{bound.recipe} downlink")


def _has_downlink(group: Sequence[Release]) -> bool:
    return any(release.channel == "downlink" for release in group)


def _amplified(groups: _Groups, premises: Premises, item: Callable[[Release], Item]) -> tuple[float, float]:
    """ε of all releases, each as `item` has it, and the probability of a truncated batch, which is charged."""
    events = [Group(tuple(item(r) for r in group), count, probability) for group, count, probability in groups]
    failure, others_failure = _failures(groups)
    value = groups_epsilon(
        events,
        premises.delta,
        failure=failure,
        others_failure=others_failure,
        resolution=premises.resolution,
    )
    return value, failure


def _composed(groups: _Groups, premises: Premises, *, gain: float = 1.0) -> Bound:
    """All releases of the groups with their sampling's amplification, noise multiplied by `gain`."""
    if any(_shuffled(group) for group, _, _ in groups):
        return _shuffled_composition(groups, premises, gain)
    fixed = any(r.sampling.kind in ("fixed", "disjoint") for group, _, _ in groups for r in group)
    tried = []
    for given in _GIVEN if fixed and premises.adjacency == ZERO_OUT else (1.0,):
        item = functools.partial(sampled_item, adjacency=premises.adjacency, gain=gain, given=given)
        tried.append((*_amplified(groups, premises, item), _name(groups, item)))
    value, failure, name = min(tried)
    charged = f"; {failure:.3g} of truncated batches charged to δ" if failure else ""
    noise = f"; noise of {gain**2:g} clients counts" if gain != 1.0 else ""
    return Bound(value, name, f"{premises.how}{noise}{charged}")


def _shuffled_uses(groups: _Groups, conditions: Conditions) -> tuple[int, int, int, list[tuple[Release, int]]]:
    """(U uses in all, most uses in one round, steps of a round, releases with their participations)."""
    flat = [(group[0], count) for group, count, _ in groups if group and count]
    if any(len(group) > 1 for group, _, _ in groups) or len({r.sampling for r, _ in flat}) > 1:
        raise NoProof("shuffled epochs are accounted for one kind of release a round only (D2)")
    if not flat:
        return 0, 0, 0, flat
    first = flat[0][0]
    kind, participations = first.sampling.kind, sum(count for _, count in flat)
    per_epoch, steps = batches_per_epoch(first), max(int(r.uses) for r, _ in flat)
    if kind == "shuffled-round":
        # `rate` is the share of the records that a round consumes; a use costs the whole round's release
        consumed = first.sampling.rate * first.sampling.population / first.sampling.batch_size
        steps = max(1, math.ceil(consumed - 1e-9))
    if steps == 0:
        return 0, 0, 0, flat
    uses = total_shuffled_uses(
        participations, steps, per_epoch, own_epochs=conditions.own_epochs, num_rounds=conditions.num_rounds
    )
    most = min(epochs_in_round(steps, per_epoch), steps, uses)
    if kind == "shuffled-round":
        uses, most = participations if first.sampling.rate >= 1 else min(uses, participations), 1
    return uses, most, steps, flat


def _largest(
    flat: Sequence[tuple[Release, int]], uses: int, per_round: int, adjacency: str
) -> list[tuple[float, int]]:
    """The `uses` costliest releases: (noise multiplier, how many), at most `per_round` a participation."""
    left, chosen = uses, []
    for z, count in sorted((step_multiplier(release, adjacency), count) for release, count in flat):
        taken = min(left, count * per_round)
        chosen.append((z, taken))
        left -= taken
    return [(z, n) for z, n in chosen if n]


def _shuffled_composition(groups: _Groups, premises: Premises, gain: float) -> Bound:
    """D2: parallel composition inside an epoch, so U uses of the record (R1)."""
    uses, most, _, flat = _shuffled_uses(groups, premises.conditions)
    chosen = _largest(flat, uses, max(most, 1), premises.adjacency)
    value = groups_epsilon([Group(tuple(Item("plain", 1.0, z * gain, n) for z, n in chosen))], premises.delta)
    return Bound(value, "R1", f"{uses} uses in shuffled epochs (D2), all participations counted")


def _others_noise(conditions: Conditions) -> float:
    """Variance of the honest others' noise in a sum, relative to the target's."""
    if conditions.cohort_size < 2 and conditions.others_noise is None:
        raise NoProof(f"cohort_size={conditions.cohort_size}: there is no other client's noise in the sum")
    if conditions.client_state:
        raise NoProof("clients keep private state, so a round depends on more than the public sums (G7)")
    others = conditions.others_noise
    if others is None:
        others = float(honest_others(conditions.cohort_size, conditions.colluders))
    if others < 0:
        raise ValueError(f"others_noise={others} is negative")
    return others


def sum_bound(premises: Premises) -> Bound:
    """(ii) R6: the honest others' noise counts too."""
    conditions, groups = premises.conditions, premises.of("uplink")
    others = _others_noise(conditions)
    if conditions.lattice is not None:
        clients = 1 + honest_others(conditions.cohort_size, conditions.colluders)
        return _discrete(premises, conditions.lattice, clients=clients)
    if all(len(group) <= 1 and sum(r.uses for r in group) <= 1 for group, _, _ in groups):
        # noise added once, after the last look at the data: the credit is exact, amplification remains
        bound = _composed(groups, premises, gain=math.sqrt(1.0 + others))
        return bound._replace(recipe=f"{bound.recipe} sum")
    return _noise_inside_steps(groups, premises, others)


def _discrete(premises: Premises, lattice: Lattice, *, clients: int) -> Bound:
    """Discrete Gaussians on the integers, summed over `clients` (Kairouz, Liu, Steinke 2021): zCDP adds up. One
    client's alone is a randomised rounding, of std 2, of a continuous Gaussian, up to a factor 1 ± 2^-110
    (`accounting.exact`, step 1): that is R1.

    Rounding happens before the noise, so it is part of the query: a coordinate of two neighbours' uploads moves by
    at most one step of the grid more. Nothing is credited for sampling or for chance in participation.
    """
    total = squares = 0.0
    for group, count, _ in premises.of("uplink"):
        if not group or not count:
            continue
        if len(group) > 1 or group[0].uses > 1:
            raise NoProof("discrete noise is accounted for one release a round, at its end")
        release = group[0]
        distance = (
            release.noise_std / step_multiplier(release, premises.adjacency) if release.noise_std else math.inf
        )
        if not math.isfinite(distance):
            return Bound(math.inf, "R6 discrete" if clients > 1 else "R1 discrete", "no noise")
        variance = (lattice.least * release.noise_std / lattice.step) ** 2
        if variance < _LEAST_VARIANCE:
            raise NoProof(
                f"discrete noise of {math.sqrt(variance):.2g} steps of the grid is too little to rank rounds "
                "by: use more fractional bits (secagg.scale_bits)"
            )
        moved = distance / lattice.step + math.sqrt(lattice.dimension)
        squares += count * moved**2 / (variance - 4.0)
        total += count * rho(moved, variance=variance, clients=clients, dimension=lattice.dimension)
    how = premises.how.replace("ex ante, participation in each", "all")
    if clients == 1:
        value = gaussian_epsilon(math.sqrt(squares), premises.delta)
        return Bound(value, "R1 discrete", f"{how}; discrete noise")
    detail = f"{how}; discrete noise of {clients} clients, zCDP"
    return Bound(zcdp_epsilon_tight(total, premises.delta), "R6 discrete", detail)


# reason: two theorems and three samplers in one place, read beside docs/privacy.md
def _noise_inside_steps(groups: _Groups, premises: Premises, others: float) -> Bound:
    """R6' for convex steps, G7c where only a Lipschitz bound is known."""
    conditions, delta = premises.conditions, premises.delta
    groups = [group for group in groups if sum(r.uses for r in group[0])]
    if any(r.sampling.kind.endswith("-round") for group, _, _ in groups for r in group):
        raise NoProof("noise inside and at the end of a round in one participation")
    steps = {group: _steps(group, premises.adjacency) for group, _, _ in groups}
    refused = any(credit_refusal(rates, conditions.smoothness, conditions.convex) for rates, _ in steps.values())
    by_lipschitz = refused and not conditions.assume and conditions.lipschitz is not None
    assumed = refused and not by_lipschitz
    theorem = "G7c" if by_lipschitz else "G7b"
    noise = f"noise of {others:g} honest others in the sum"
    if assumed:
        noise += "; assumed: convex losses and non-expansive steps"

    def cost(group: tuple[Release, ...], uses: int) -> float:
        """μ² of a participation that uses the record this many times."""
        rates, multipliers = steps[group]
        if by_lipschitz:
            bound = float(conditions.lipschitz or 0.0)
            return smooth_round_mu(multipliers, uses, rates=rates, others=others, lipschitz=bound) ** 2
        mu = aggregated_round_mu(
            multipliers,
            uses,
            rates=rates,
            others=others,
            smoothness=conditions.smoothness,
            convex=conditions.convex,
            assume=conditions.assume,
        )
        return mu**2

    events = []
    if any(_shuffled(group) for group in steps):
        uses, most, length, flat = _shuffled_uses(groups, conditions)
        first, participations = flat[0][0], sum(count for _, count in flat)
        consecutive = conditions.own_epochs or conditions.num_rounds == participations
        straddling = most == 2 and length <= batches_per_epoch(first)
        if straddling and consecutive and len({steps[(r,)] for r, _ in flat}) == 1 and uses <= _MOST_EPOCHS:
            once, twice = (cost((first,), share) for share in (1, 2))
            pattern = shuffled_round_pattern(
                participations, length, batches_per_epoch(first), float(first.sampling.rate)
            )
            value = mixture_epsilon(
                list(pattern.values()), [math.sqrt(a * once + b * twice) for a, b in pattern], delta
            )
            used = f"ex ante over the client's shuffles, up to {uses} uses and two in one round"
            return Bound(value, f"R6 {theorem}+R4", f"{used}; {noise}", assumed=assumed)
        costs = [([cost((r,), share + 1) for share in range(min(most, len(steps[(r,)][0])))], n) for r, n in flat]
        events.append(Group((_plain(math.sqrt(_packed(costs, uses)), 1),)))
        used = f"{uses} uses in shuffled epochs, up to {most} in one round"
    else:
        for group, count, probability in groups:
            if all(r.sampling.kind == "disjoint" for r in group):
                # one use at most, in a round drawn by the honest client: R4 again
                chance = probability * min(1.0, sum(r.uses * r.sampling.rate for r in group))
                events.append(Group((_plain(math.sqrt(cost(group, 1)), 1),), count, chance))
            else:
                every = len(steps[group][0])
                events.append(Group((_plain(math.sqrt(cost(group, every)), 1),), count, probability))
        used = premises.how
    failure, others_failure = _failures(groups)
    value = groups_epsilon(events, delta, failure=failure, others_failure=others_failure)
    recipe = f"R6 {theorem}" + ("+R4" if any(event.probability < 1 for event in events) else "")
    return Bound(value, recipe, f"{used}; {noise}", assumed=assumed)


def _steps(group: tuple[Release, ...], adjacency: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Learning rates and noise multipliers of all local steps. The multipliers are relative to the round's largest
    sensitivity, so that a use shifts the model by the rate alone."""
    furthest = max(r.sensitivity for r in group)
    rates: list[float] = []
    multipliers: list[float] = []
    for release in group:
        uses = int(release.uses)
        rates += release.rates * uses if len(release.rates) == 1 else release.rates
        multipliers += [step_multiplier(release._replace(sensitivity=furthest), adjacency)] * uses
    if len(multipliers) == 1:
        return (1.0,), tuple(multipliers)
    if len(rates) != len(multipliers):
        raise NoProof(
            "the credit for the other clients' noise needs the learning rate of every local step: here it is "
            "unknown, or it changes between rounds and clients take part in different rounds (R6')"
        )
    return tuple(rates), tuple(multipliers)


def _packed(costs: Sequence[tuple[list[float], int]], uses: int) -> float:
    """The largest total of `uses` uses over rounds: ([cost of 1, 2, ... uses in such a round], how many rounds).

    Convex costs are largest where rounds are filled one after the other, and one more has the rest; others are
    replaced by a straight line above them.
    """
    most = max(len(each) for each, _ in costs)
    filled = []
    for each, count in costs:
        rises = [b - a for a, b in pairwise([0.0, *each])]
        if len(each) < most or any(a > b * (1 + 1e-12) for a, b in pairwise(rises)):
            steepest = max(cost / (share + 1) for share, cost in enumerate(each))
            each = [steepest * (share + 1) for share in range(most)]
        filled.append((each, count))
    full, rest = divmod(uses, most)
    total = max(each[rest - 1] for each, _ in filled) if rest else 0.0
    for each, count in sorted(filled, key=lambda pair: -pair[0][-1]):
        taken = min(full, count)
        total, full = total + taken * each[-1], full - taken
    return total


def _square(items: Iterable[Item]) -> float:
    """μ² of plain items."""
    return compose_gaussians((item.noise_multiplier, item.uses) for item in items) ** 2


def _plain(mu: float, count: int) -> Item:
    return Item("plain", 1.0, math.inf if mu == 0 else 1.0 / mu, count)


def _unsampled(release: Release) -> Release:
    """One release at the end of a round, without credit for batches that may not hold the record."""
    if not release.sampling.kind.endswith("-round"):
        return release
    return release._replace(sampling=release.sampling._replace(kind="full-round", rate=1.0, truncation=0.0))


def joint_bound(premises: Premises) -> Bound:
    """(iii) with L exposed uploads, N1: μ² = L (Δ_U/σ_U)² + (T-L) (Δ_D/σ_A)².

    Given a round's upload, its broadcast adds nothing; the worst L rounds are taken as the exposed ones.
    """
    conditions = premises.conditions
    if conditions.lattice is not None:
        raise NoProof("exposed uploads are accounted for continuous noise only")
    rows = []
    for group, count, _ in premises.groups:
        if not _has_downlink(group):
            raise NoProof("some rounds have no noisy broadcast")
        up, down = (
            [sampled_item(_unsampled(r), premises.adjacency) for r in group if r.channel == channel]
            for channel in ("uplink", "downlink")
        )
        if any(item.kind != "plain" for item in (*up, *down)):
            raise NoProof("exposed uploads are accounted for unsampled Gaussian releases only (N1)")
        exposed, hidden = _square(up), _square(down)
        rows.append((exposed, min(exposed, hidden) if up else hidden, count))
    left, total = conditions.exposures, 0.0
    for exposed, hidden, count in sorted(rows, key=lambda row: row[1] - row[0]):
        seen = min(left, count)
        left -= seen
        total += (seen * exposed if seen else 0.0) + ((count - seen) * hidden if count > seen else 0.0)
    value = groups_epsilon([Group((_plain(math.sqrt(total), 1),))], premises.delta)
    return Bound(
        value, "R1 joint", f"{conditions.exposures} exposed uploads, every broadcast (N1), all listed rounds"
    )
