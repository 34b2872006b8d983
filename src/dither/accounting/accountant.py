"""What a run proves: from its releases and its cohorts to the table of proven ε, and back to the noise.

The accountant (`account`) knows one client's releases. A run has many clients that take part in
different rounds; this room finds, for each class of alike clients, the participation that reveals at least as
much as any member's (rank by rank the strongest), and accounts for that: the result holds for every client.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from dither import accounting
from dither.errors import NoProof, SpecError
from dither.types import Algorithm, Prepared, Release, RoundInfo, Sampling

_MOST_CLASSES = 24  # classes of clients accounted one by one; more are bounded jointly

_FACTORS: dict[Any, float] = {}  # answers of the accountant, by the whole question
_MOST_FACTORS = 4096

Participations = list[tuple[tuple[Release, ...], int]]


class Circumstances(NamedTuple):
    """Public facts of a run that proofs need besides its releases (see `accounting.Facts`)."""

    cohort_size: int
    num_rounds: int
    colluders: int
    convex: bool
    smoothness: float | None
    client_state: bool
    own_epochs: bool
    exposures: int
    noise_ratio: float  # least over largest noise that clients add to the sum
    per_client: bool  # the unit of privacy is a whole client
    assumed: bool  # the releases themselves rest on an assumption
    assume_credit: bool  # the user asks for the credit of the others' noise where it is unproved
    not_covered: tuple[str, ...]
    lattice: accounting.Lattice | None = None  # the uplink's noise is discrete
    encoded: bool = False  # uploads are rounded before they are summed
    missing: int = 0  # of the colluders: those who are merely not in the sum
    counts_shown: str = "nobody said that none is"  # why add/remove has no proof; empty: it may have one


class Clients(NamedTuple):
    """A class of clients that reveal the same when they take part: their participations, at least, at the
    median and at most (an envelope over the class)."""

    members: np.ndarray
    least: Participations
    median: Participations
    most: Participations


def classes(
    releases: Callable[[RoundInfo], tuple[Release, ...]],
    sizes: np.ndarray,
    cohorts: Sequence[np.ndarray],
    *,
    joint: bool = False,
    lattice: accounting.Lattice | None = None,
    groups: Sequence[np.ndarray] | None = None,
    numbers: Sequence[int] = (),
) -> list[Clients]:
    """Group clients whose releases are the same, and bound what the members of a group reveal.

    `cohorts[t]` are the clients of round t, or of round `numbers[t]` where rounds were made twice. `joint` makes
    one group of all clients. `lattice` says that the noise is discrete: then the grid takes part in how strong a
    round is. `groups` are those of `alike`, for callers that ask more than once.
    """
    num_clients = len(sizes)
    taking_part = _TakingPart(cohorts, num_clients)
    lengths = taking_part.lengths.tolist()  # plain numbers: `at` is asked for every round, at every payment

    @cache
    def size(client: int) -> int:
        return int(sizes[client])

    def at(client: int, index: int) -> tuple[Release, ...]:
        return releases(RoundInfo(numbers[index] if numbers else index, client, size(client), lengths[index]))

    if not len(cohorts):
        groups = [np.arange(num_clients)]
    elif groups is None:
        groups = alike(releases, sizes, cohorts, numbers)
    if len(groups) > _MOST_CLASSES or (joint and len(groups) > 1):
        worst = _worst_of(at, [int(group[0]) for group in groups], lattice)
        return [_bound_class(np.arange(num_clients), taking_part, worst, lattice)]
    return [_bound_class(group, taking_part, at, lattice) for group in groups]


def alike(
    releases: Callable[[RoundInfo], tuple[Release, ...]],
    sizes: np.ndarray,
    cohorts: Sequence[np.ndarray],
    numbers: Sequence[int] = (),
) -> list[np.ndarray]:
    """The clients that reveal the same when they take part in the first round, one in the middle and the last, and
    so in any other: what a method owes (CONTRIBUTING.md) is that clients differ in their records and in the size
    of their noise, not in a course that it takes between."""
    used = [index for index, cohort in enumerate(cohorts) if len(cohort)]
    asked = sorted({used[0], used[len(used) // 2], used[-1]}) if used else []
    found: dict[tuple[tuple[Release, ...], ...], list[int]] = {}
    for client, size in enumerate(sizes.tolist()):
        key = tuple(
            releases(RoundInfo(numbers[index] if numbers else index, client, size, len(cohorts[index])))
            for index in asked
        )
        found.setdefault(key, []).append(client)
    return [np.array(group) for group in found.values()]


class _TakingPart:
    """Who takes part in which round."""

    def __init__(self, cohorts: Sequence[np.ndarray], num_clients: int) -> None:
        self.lengths = np.array([len(c) for c in cohorts], np.int64)
        self._flat = np.concatenate(cohorts).astype(np.int64) if len(cohorts) else np.zeros(0, np.int64)
        self.counts = np.bincount(self._flat, minlength=num_clients)

    @cached_property
    def _by_client(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[np.argsort(self._flat, kind="stable")]

    @cached_property
    def _borders(self) -> np.ndarray:
        return np.append(0, np.cumsum(self.counts))

    def rounds(self, client: int) -> np.ndarray:
        """Of one client."""
        return self._by_client[self._borders[client] : self._borders[client + 1]]

    @property
    def used(self) -> np.ndarray:
        """Rounds in which anybody takes part."""
        return np.flatnonzero(self.lengths)


class _Kinds:
    """Different participations, numbered. Most are the very same object, which is told without comparing."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Release, ...], int] = {}
        self._seen: dict[int, tuple[int, tuple[Release, ...]]] = {}  # the object is kept, so its id stays its own

    def number(self, releases: tuple[Release, ...]) -> int:
        known = self._seen.get(id(releases))
        if known is None:
            known = (self._numbers.setdefault(releases, len(self._numbers)), releases)
            self._seen[id(releases)] = known
        return known[0]

    @property
    def all(self) -> list[tuple[Release, ...]]:
        return list(self._numbers)


def _bound_class(
    members: np.ndarray,
    taking_part: _TakingPart,
    at: Callable[[int, int], tuple[Release, ...]],
    lattice: accounting.Lattice | None,
) -> Clients:
    model = int(members[0])  # all are alike, or `at` is already the worst over them
    counts = taking_part.counts[members]
    order = np.argsort(counts, kind="stable")
    used = taking_part.used
    # Thousands of rounds are few different ones: each kind is looked at once.
    kinds = _Kinds()
    kind = np.array([kinds.number(at(model, index)) for index in used.tolist()], np.int64)
    revealed = kinds.all

    def compressed(positions: np.ndarray) -> Participations:
        """Equal participations counted once, in the order in which they first come."""
        which, first, count = np.unique(kind[positions], return_index=True, return_counts=True)
        return [(revealed[int(which[i])], int(count[i])) for i in np.argsort(first)]

    if len(revealed) == 1:  # then only the number of participations counts
        ranked = [int(counts[order[at]]) for at in (0, len(order) // 2, -1)]
        least, median, most = ([(revealed[0], count)] if count else [] for count in ranked)
        return Clients(members, least, median, most)
    if counts.min() == len(used):  # all have taken part in all of it
        every = compressed(np.arange(len(used)))
        return Clients(members, every, every, every)
    if len({tuple(r.rates for r in releases) for releases in revealed}) > 1:
        # Rates put rounds in no order of strength: where clients took part in different rounds they are left out,
        # and with them the credit that needs them.
        return _bound_class(members, taking_part, lambda client, index: without_rates(at(client, index)), lattice)
    own = [taking_part.rounds(int(member)) for member in members]
    # Rounds of a class differ in noise or sensitivity alone: by strength they stand in one row, so that rank
    # by rank the strongest over the members reveals at least as much as any member.
    strengths = np.array([sum(_information(r, lattice) for r in releases) for releases in revealed])
    by_strength = np.argsort(strengths[kind], kind="stable")  # positions in `used`
    rank = np.empty(len(used), np.int64)
    rank[by_strength] = np.arange(len(used))
    envelope = np.full(int(counts.max(initial=0)), -1)
    for rounds in own:
        ranks = np.sort(rank[np.searchsorted(used, rounds)])[::-1]
        envelope[: len(ranks)] = np.maximum(envelope[: len(ranks)], ranks)

    def of(member: int) -> np.ndarray:
        return np.searchsorted(used, own[member])

    return Clients(
        members=members,
        least=compressed(of(int(order[0]))),
        median=compressed(of(int(order[len(order) // 2]))),
        most=compressed(by_strength[envelope]),
    )


def without_rates(releases: Sequence[Release]) -> tuple[Release, ...]:
    """The same releases as one sees them who sees every upload: nobody's learning rate matters to them."""
    return tuple(release._replace(rates=()) for release in releases)


def charged(
    releases: Callable[[RoundInfo], tuple[Release, ...]], known: accounting.Facts
) -> Callable[[RoundInfo], tuple[Release, ...]]:
    """The releases as a ledger holds them: without rates that no proof could use, so that equal rounds are one;
    and of a method whose unit is a whole client as they protect a record."""
    if "whole client" in known.unit:
        return lambda info: tuple(map(_of_a_record, releases(info)))
    if known.convex and known.smoothness is not None:
        return releases
    return lambda info: without_rates(releases(info))


def _of_a_record(release: Release) -> Release:
    """A blanked client moves a result by its update; a blanked record may turn that update round, twice as far."""
    if release.sampling.adjacency == accounting.REPLACE_ONE:
        return release
    sampling = release.sampling._replace(adjacency=accounting.REPLACE_ONE)
    return release._replace(sensitivity=2 * release.sensitivity, sampling=sampling)


def _information(release: Release, lattice: accounting.Lattice | None = None) -> float:
    """Order of strength among releases that differ only in noise and sensitivity. With discrete noise rounding
    adds √d steps of the grid to the distance, which weigh more where the noise is less."""
    if release.noise_std == 0:
        return math.inf
    rounding = lattice.step * math.sqrt(lattice.dimension) if lattice and release.channel == "uplink" else 0.0
    return release.uses * ((release.sensitivity + rounding) / release.noise_std) ** 2


def _worst_of(
    at: Callable[[int, int], tuple[Release, ...]], clients: Sequence[int], lattice: accounting.Lattice | None
) -> Callable[[int, int], tuple[Release, ...]]:
    """Releases at least as revealing as any of these clients': the highest sampling rate with the least noise."""

    def joint(client: int, index: int) -> tuple[Release, ...]:
        del client
        everyone = [at(other, index) for other in clients]
        worst = []
        if len({tuple(r.rates for r in releases) for releases in everyone}) > 1:
            everyone = [without_rates(releases) for releases in everyone]
        for alternatives in zip(*everyone, strict=True):
            fastest = max(alternatives, key=lambda r: (r.sampling.rate, -r.sampling.population))
            if lattice is not None:
                least, furthest = min(r.noise_std for r in alternatives), max(r.sensitivity for r in alternatives)
                worst.append(fastest._replace(noise_std=least, sensitivity=furthest))
                continue
            quietest = min(
                alternatives,
                key=lambda r: r.noise_std / r.sensitivity if r.sensitivity else math.inf,
            )
            scale = quietest.noise_std / quietest.sensitivity if quietest.sensitivity else math.inf
            truncation = max(r.sampling.truncation for r in alternatives)
            sampling = fastest.sampling._replace(truncation=truncation)
            worst.append(
                fastest._replace(
                    noise_std=scale * fastest.sensitivity if quietest.noise_std else 0.0,
                    sampling=_straddling(sampling, fastest.uses, alternatives),
                )
            )
        return tuple(worst)

    return joint


def _straddling(sampling: Sampling, steps: int, alternatives: Sequence[Release]) -> Sampling:
    """Shuffled epochs of the shortest client, shortened until a round can straddle two if anybody's can."""
    if sampling.kind != "shuffled" or steps <= 1:
        return sampling
    lengths = [r.sampling.population // r.sampling.batch_size for r in alternatives]
    epoch = min(lengths)
    if any(length % steps for length in lengths):
        while epoch > 1 and epoch % steps == 0:
            epoch -= 1
    return sampling._replace(population=epoch * sampling.batch_size, rate=1.0 / epoch)


# The table


def facts(circumstances: Circumstances, unit: str = "run") -> accounting.Facts:
    """What the accountant is told."""
    c = circumstances
    others = max(c.cohort_size - c.colluders - 1, 0) * c.noise_ratio**2
    return accounting.Facts(
        cohort_size=c.cohort_size,
        colluders=min(c.colluders, max(c.cohort_size - 1, 0)),
        others_noise=others,
        convex=c.convex,
        smoothness=c.smoothness,
        client_state=c.client_state,
        own_epochs=c.own_epochs,
        num_rounds=c.num_rounds,
        exposures=c.exposures,
        lattice=c.lattice,
        encoded=c.encoded,
        assume=c.assume_credit,
        participation=accounting.REALISED,
        unit=unit + (", whole client" if c.per_client else ""),
        not_covered=c.not_covered,
        counts_shown=c.counts_shown,
    )


def table(groups: Sequence[Clients], delta: float, circumstances: Circumstances) -> list[dict[str, Any]]:
    """Proven ε for every view and adjacency, the largest over clients, with the least and the median beside it;
    then one participation by itself (unit "message")."""
    rows = []
    known = facts(circumstances)
    members = [len(group.members) for group in groups]
    for adjacency in accounting.ADJACENCIES:
        # [group][least, median, most][view]
        found = [
            [accounting.account(which, delta, known, adjacency=adjacency) for which in group[1:]]
            for group in groups
        ]
        for number in range(len(accounting.VIEWS)):
            most = max((entry[2][number] for entry in found), key=lambda p: p.value)
            medians = [entry[1][number].value for entry in found]
            row = _row(most, circumstances)
            row["clients"] = {
                "min": min(entry[0][number].value for entry in found),
                "median": float(np.median(np.repeat(medians, members))),
                "max": most.value,
            }
            if most.view == "sum":
                values = [entry[2][number].value for entry in found]
                row["no_credit"] = _refusal(groups[int(np.argmax(values))], delta, known, adjacency, most)
            rows.append(row)
        rows.append(_row(message(groups, delta, circumstances, adjacency=adjacency), circumstances))
    return rows


def _refusal(
    group: Clients, delta: float, known: accounting.Facts, adjacency: str, best: accounting.Proven
) -> str:
    """Why sums are proved no better than the uploads themselves, where another bound holds; else empty."""
    if math.isinf(best.value):
        return ""
    bounds = accounting.account(group.most, delta, known, adjacency=adjacency, views=("sum",), every_recipe=True)
    return next((bound.detail for bound in bounds if math.isinf(bound.value)), "")


def tried(
    groups: Sequence[Clients],
    delta: float,
    circumstances: Circumstances,
    *,
    participation: accounting.Participation = accounting.REALISED,
) -> list[dict[str, Any]]:
    """Every recipe that was tried, the largest over the classes of clients, refusals with their reason."""
    known = facts(circumstances)._replace(participation=participation)
    rows = []
    for adjacency in accounting.ADJACENCIES:
        found = [accounting.account(g.most, delta, known, adjacency=adjacency, every_recipe=True) for g in groups]
        for same in zip(*found, strict=True):
            rows.append(_row(max(same, key=lambda row: row.value), circumstances))
    return rows


def message(
    groups: Sequence[Clients], delta: float, circumstances: Circumstances, *, adjacency: str
) -> accounting.Proven:
    """One participation by itself, the most revealing one, to a server that sees the upload.

    Rounds of one class are ordered by strength, so its strongest stands for it; classes differ in sampling too, so
    each is accounted for.
    """
    # Which message of a shuffled epoch it is, is not known: it may straddle two.
    known = facts(circumstances, unit="message")._replace(own_epochs=False)
    strongest = [
        max(
            (revealed for revealed, _ in group.most),
            key=lambda rs: sum(_information(r, circumstances.lattice) for r in rs),
        )
        for group in groups
        if group.most
    ]
    return max(
        (
            accounting.proven([(revealed, 1)], delta, known, view="upload", adjacency=adjacency)
            for revealed in strongest
        ),
        key=lambda p: p.value,
    )


def _row(p: accounting.Proven, circumstances: Circumstances) -> dict[str, Any]:
    return {
        "view": p.view,
        "adjacency": p.adjacency,
        "value": p.value,
        "delta": p.delta,
        "unit": p.unit,
        "recipe": p.recipe,
        "assumed": p.assumed or circumstances.assumed,
        "not_covered": list(p.not_covered),
        "detail": p.detail,
        "against": against(p, circumstances),
    }


def against(p: accounting.Proven, circumstances: Circumstances) -> str:
    """Whom a bound that counts on the others' noise holds against; empty where it counts on nobody's."""
    if not p.recipe.startswith("R6") and not p.recipe.endswith((" sum", " downlink", " joint")):
        return ""
    c, lost = circumstances, circumstances.missing
    rest = f" and lacks the noise of {lost} more" if lost else ""
    return f"against a server that colludes with {c.colluders - lost} of the {c.cohort_size} parties{rest}"


def worst(
    groups: Sequence[Clients], delta: float, circumstances: Circumstances, *, view: str, adjacency: str, unit: str
) -> float:
    """The largest proven ε over the clients for one view."""
    if unit == "message":
        return message(groups, delta, circumstances, adjacency=adjacency).value
    known = facts(circumstances)
    return max(
        accounting.proven(group.most, delta, known, view=view, adjacency=adjacency).value for group in groups
    )


# Calibration


def calibrated(
    prepared: Prepared,
    sizes: np.ndarray,
    cohorts: Sequence[np.ndarray],
    circumstances: Circumstances,
    *,
    epsilon: float,
    delta: float,
    view: str,
    adjacency: str,
    unit: str,
) -> Prepared:
    """The method with noise for which the *proven* ε is at most `epsilon` and within 0.1% of it."""
    if not prepared.noise_names:
        raise SpecError("this method adds no noise, so privacy.noise='proven' has nothing to set; use 'none'")

    def hyper_at(factor: float) -> dict[str, Any]:
        return {
            name: np.asarray(value) * factor if name in prepared.noise_names else value
            for name, value in prepared.hyper.items()
        }

    def classes_at(factor: float) -> list[Clients]:
        releases = prepared.build(hyper_at(factor)).releases
        return classes(releases, sizes, cohorts, lattice=circumstances.lattice)

    unit_classes = classes_at(1.0)

    def proven_epsilon(factor: float) -> float:
        # Noise enters every release as a factor: the classes and their envelopes stay the same.
        return worst(
            quieter(unit_classes, factor), delta, circumstances, view=view, adjacency=adjacency, unit=unit
        )

    def refuse_without_proof() -> None:
        if math.isfinite(proven_epsilon(1e9)):
            return
        rows = facts(circumstances)
        first = accounting.proven(unit_classes[0].most, delta, rows, view=view, adjacency=adjacency)
        raise NoProof(
            f"no noise has a proven ε for view={view!r} under {adjacency}: {first.detail}; choose another "
            "privacy.adjacency, privacy.view or batch_sampling"
        )

    # Specs of a sweep that differ in seed or learning rate alone put the same question to the accountant: each is
    # answered once.
    releases, known = question_of((group.most for group in unit_classes), facts(circumstances), view)
    question = (releases, known, epsilon, delta, view, adjacency, unit)
    if question not in _FACTORS:
        refuse_without_proof()
        if len(_FACTORS) >= _MOST_FACTORS:
            _FACTORS.pop(next(iter(_FACTORS)))
        _FACTORS[question] = accounting.calibrate(epsilon, proven_epsilon)
    hyper = hyper_at(_FACTORS[question])
    return prepared._replace(hyper=hyper, claim=prepared.reclaim(hyper) if prepared.reclaim else prepared.claim)


def question_of(
    participations: Iterable[Participations], known: accounting.Facts, view: str
) -> tuple[tuple[Any, ...], accounting.Facts]:
    """What the accountant's answer for a view depends on: nobody's learning rate matters to one who sees every
    upload, so that specs that differ in it alone ask the same."""
    if view != "upload":
        return tuple(tuple(each) for each in participations), known
    plain = []
    for each in participations:
        counts: Counter[tuple[Release, ...]] = Counter()
        for releases, count in each:
            counts[without_rates(releases)] += count
        plain.append(tuple(counts.items()))
    return tuple(plain), known._replace(smoothness=None)


def quieter(groups: Sequence[Clients], factor: float) -> list[Clients]:
    """The classes of clients as if all noise were `factor` times what it is."""
    return [group._replace(most=_louder(group.most, factor)) for group in groups]


def _louder(participations: Participations, factor: float) -> Participations:
    return [
        (tuple(release._replace(noise_std=release.noise_std * factor) for release in revealed), count)
        for revealed, count in participations
    ]


def noise_ratio(algorithm: Algorithm, sizes: np.ndarray, weights: np.ndarray) -> float:
    """Least over largest noise that a client adds to the sum of weighted uploads at the same step (1 where all are
    alike, 0 where their learning rates differ: noise of other rates is not compared)."""
    rows = [
        [r for r in algorithm.releases(RoundInfo(0, client, int(size), 1)) if r.channel == "uplink"]
        for client, size in enumerate(sizes)
    ]
    if len({(len(row), *(r.rates for r in row)) for row in rows}) > 1:
        return 0.0
    ratio = 1.0
    for step in zip(*rows, strict=True):
        stds = [release.noise_std * weight for release, weight in zip(step, weights, strict=True)]
        ratio = min(ratio, min(stds) / max(stds) if max(stds) > 0 else 1.0)
    return ratio
