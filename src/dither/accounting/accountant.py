"""What a plan proves: from its releases and its cohorts to the table of proven ε, and back to the noise.

`accounting.account` handles one client's releases. A run has many clients that take part in different rounds. For
each class of clients with the same releases, this module finds a participation pattern that reveals, rank by
rank, at least as much as any member's, and accounts for that pattern. The result holds for every client.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from dither.accounting import views
from dither.accounting.composition import ADJACENCIES, REPLACE_ONE
from dither.accounting.gaussian import brentq
from dither.accounting.pld import COARSE
from dither.accounting.views import VIEWS, ClientRange, ProvenRow
from dither.errors import NoProof, SpecError
from dither.types import Algorithm, Conditions, Lattice, PrivacyPlan, Release, RoundInfo, Sampling

_MOST_CLASSES = 24  # classes of clients accounted one by one; more are bounded jointly

_ANSWERS: dict[Any, Any] = {}  # of the accountant, by the whole question
_MOST_ANSWERS = 8192

Participations = list[tuple[tuple[Release, ...], int]]
Releases = Callable[[RoundInfo], tuple[Release, ...]]


class ClientClass(NamedTuple):
    """Clients with identical releases, and the participations of the least, the median and the most exposed of
    them (`most` is an upper envelope over the class)."""

    members: np.ndarray
    least: Participations
    median: Participations
    most: Participations


# reason: one question about a federation, which tests and the ledger put in parts
def classes(
    releases: Releases,
    sizes: np.ndarray,
    cohorts: Sequence[np.ndarray],
    *,
    joint: bool = False,
    lattice: Lattice | None = None,
    groups: Sequence[np.ndarray] | None = None,
    numbers: Sequence[int] = (),
) -> list[ClientClass]:
    """Group clients with identical releases, and bound what the members of each group reveal.

    `cohorts[t]` are the clients of round t, or of round `numbers[t]` where rounds were made twice. `joint` makes
    one group of all clients. `lattice` says that the noise is discrete: then the grid takes part in how strong a
    round is. `groups` are those of `alike`, for callers that ask more than once, or some of them.
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
        return [_bound_class(np.sort(np.concatenate(groups)), taking_part, worst, lattice)]
    return [_bound_class(group, taking_part, at, lattice) for group in groups]


def alike(
    releases: Releases,
    sizes: np.ndarray,
    cohorts: Sequence[np.ndarray],
    numbers: Sequence[int] = (),
) -> list[np.ndarray]:
    """Groups of clients with identical releases in the first, a middle and the last round, and therefore in every
    round: a method must ensure (CONTRIBUTING.md) that clients differ only in their records and their noise scale,
    not in how the noise changes over time."""
    used = [index for index, cohort in enumerate(cohorts) if len(cohort)]
    asked = sorted({used[0], used[len(used) // 2], used[-1]}) if used else []
    clients_by_releases: dict[tuple[tuple[Release, ...], ...], list[int]] = {}
    for client, size in enumerate(sizes.tolist()):
        key = tuple(
            releases(RoundInfo(numbers[index] if numbers else index, client, size, len(cohorts[index])))
            for index in asked
        )
        clients_by_releases.setdefault(key, []).append(client)
    return [np.array(group) for group in clients_by_releases.values()]


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
        """The rounds of one client."""
        return self._by_client[self._borders[client] : self._borders[client + 1]]

    @property
    def used(self) -> np.ndarray:
        """Rounds in which anybody takes part."""
        return np.flatnonzero(self.lengths)


class _Kinds:
    """Numbers distinct participations. Most are the same object, recognised without a comparison."""

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
    lattice: Lattice | None,
) -> ClientClass:
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
        return ClientClass(members, least, median, most)
    if counts.min() == len(used):  # all have taken part in all of it
        every = compressed(np.arange(len(used)))
        return ClientClass(members, every, every, every)
    if len({tuple(r.rates for r in releases) for releases in revealed}) > 1:
        # Rates put rounds in no order of strength: where clients took part in different rounds they are left out,
        # and with them the credit that needs them.
        return _bound_class(members, taking_part, lambda client, index: without_rates(at(client, index)), lattice)
    revealed = [_with_largest_share(releases, revealed) for releases in revealed]
    member_rounds = [taking_part.rounds(int(member)) for member in members]
    # Rounds of a class differ in noise or sensitivity alone: by strength they stand in one row, so that rank
    # by rank the strongest over the members reveals at least as much as any member.
    strengths = np.array([sum(_information(r, lattice) for r in releases) for releases in revealed])
    by_strength = np.argsort(strengths[kind], kind="stable")  # positions in `used`
    rank = np.empty(len(used), np.int64)
    rank[by_strength] = np.arange(len(used))
    envelope = np.full(int(counts.max(initial=0)), -1)
    for rounds in member_rounds:
        ranks = np.sort(rank[np.searchsorted(used, rounds)])[::-1]
        envelope[: len(ranks)] = np.maximum(envelope[: len(ranks)], ranks)

    def of(member: int) -> np.ndarray:
        return np.searchsorted(used, member_rounds[member])

    return ClientClass(
        members=members,
        least=compressed(of(int(order[0]))),
        median=compressed(of(int(order[len(order) // 2]))),
        most=compressed(by_strength[envelope]),
    )


def without_rates(releases: tuple[Release, ...]) -> tuple[Release, ...]:
    """The same releases without learning rates, which tell a server that sees every upload nothing new."""
    if not any(release.rates for release in releases):
        return releases  # the very same object: rounds that are alike are told by it
    return tuple(release._replace(rates=()) for release in releases)


def _with_largest_share(
    releases: tuple[Release, ...], alternatives: Iterable[tuple[Release, ...]]
) -> tuple[Release, ...]:
    """The releases with the largest share of one use (E3) among alternatives, so that these differ in strength
    alone; without it if one has none."""
    uses = {r.by_use for each in alternatives for r in each}
    if len(uses) == 1:
        return releases
    known = [each for each in uses if each is not None]
    worst = max(known, key=lambda each: each.share) if len(known) == len(uses) else None
    if worst and any((each.steps, each.rate) != (worst.steps, worst.rate) for each in known):
        worst = None
    return tuple(release._replace(by_use=worst) for release in releases)


def _of_a_record(release: Release) -> Release:
    """Blanking a client removes its update; blanking a record may reverse that update, which moves the result
    twice as far."""
    if release.sampling.adjacency == REPLACE_ONE:
        return release
    sampling = release.sampling._replace(adjacency=REPLACE_ONE)
    return release._replace(sensitivity=2 * release.sensitivity, sampling=sampling)


def _information(release: Release, lattice: Lattice | None = None) -> float:
    """Order of strength among releases that differ only in noise and sensitivity. With discrete noise, rounding
    adds √d grid steps to the distance, which weigh more if there is less noise."""
    if release.noise_std == 0:
        return math.inf
    rounding = lattice.step * math.sqrt(lattice.dimension) if lattice and release.channel == "uplink" else 0.0
    rounding += release.exact.rounding * release.noise_std if release.exact else 0.0
    return release.uses * ((release.sensitivity + rounding) / release.noise_std) ** 2


def _worst_of(
    at: Callable[[int, int], tuple[Release, ...]], clients: Sequence[int], lattice: Lattice | None
) -> Callable[[int, int], tuple[Release, ...]]:
    """Releases at least as revealing as any of these clients': the highest sampling rate with the least noise."""

    def joint(client: int, index: int) -> tuple[Release, ...]:
        del client
        everyone = [at(other, index) for other in clients]
        worst = []
        if len({tuple(r.rates for r in releases) for releases in everyone}) > 1:
            everyone = [without_rates(releases) for releases in everyone]
        everyone = [_with_largest_share(releases, everyone) for releases in everyone]
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
            sampling = fastest.sampling._replace(truncation=_most_truncated(fastest.sampling, alternatives))
            worst.append(
                fastest._replace(
                    noise_std=scale * fastest.sensitivity if quietest.noise_std else 0.0,
                    sampling=_straddling(sampling, fastest.uses, alternatives),
                )
            )
        return tuple(worst)

    return joint


def _most_truncated(sampling: Sampling, alternatives: Sequence[Release]) -> float:
    """The truncation of the most truncated of the alternatives, by itself and over its rate: it is charged in the
    cheaper of two ways (`gaussian.charge_truncation`)."""
    truncated = [r.sampling for r in alternatives if r.sampling.truncation]
    return max(
        (each.truncation * max(1.0, views.batch_rate(sampling) / views.batch_rate(each)) for each in truncated),
        default=0.0,
    )


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


class Accountant:
    """Proven ε of a plan, planned or realised.

    `releases` are the method's releases at the plan's noise. `alike` are the classes of clients that `alike()`
    finds, for callers that ask about one method more than once. If `members` are given, the rows are for them
    alone.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        releases: Releases,
        alike: Sequence[np.ndarray] | None = None,
        members: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        self.plan, self.releases, self._alike, self._members = plan, releases, alike, members
        self.conditions = plan.conditions()

    @cached_property
    def clients(self) -> list[ClientClass]:
        """Classes of clients with the same releases and the same target, and what their members reveal."""
        plan, groups = self.plan, self._alike

        def bounded(groups: Sequence[np.ndarray] | None) -> list[ClientClass]:
            return classes(
                self.releases,
                plan.client_sizes,
                plan.cohorts,
                lattice=plan.lattice,
                groups=groups,
                numbers=plan.round_numbers,
            )

        if not plan.epsilons and self._members is None:
            return bounded(groups)
        if groups is None:
            groups = alike(self.releases, plan.client_sizes, plan.cohorts, plan.round_numbers)
        targets = np.asarray(plan.epsilons or np.ones(plan.num_clients))
        members = np.arange(plan.num_clients) if self._members is None else np.asarray(self._members)
        by_target = []
        for target in np.unique(targets[members]):  # so that no bound is joint over different targets
            same = [group[targets[group] == target] for group in groups]
            by_target += bounded([group for group in same if len(group)])
        return [each for each in by_target if np.isin(each.members, members).any()]

    def of(self, clients: Sequence[int] | np.ndarray) -> Accountant:
        """The accountant of these clients alone. Its rows hold for their whole classes."""
        return Accountant(self.plan, self.releases, self._alike, clients)

    @property
    def ledger_releases(self) -> Releases:
        """The releases as a ledger stores them: without rates that no proof can use, so that equal rounds are
        stored once. For a method that protects whole clients, restated for one record."""
        if self.plan.per_client:
            return lambda info: tuple(map(_of_a_record, self.releases(info)))
        if self.plan.convex and self.plan.smoothness is not None:
            return self.releases
        return lambda info: without_rates(self.releases(info))

    # One number

    def epsilon(self, view: str = "", adjacency: str = "", unit: str = "run", *, noise: float = 1.0) -> float:
        """The largest proven ε over the clients, by default for the plan's own view and adjacency. `noise` is a
        factor on all noise."""
        return self.proven(view, adjacency, unit, noise=noise).value

    def proven(self, view: str = "", adjacency: str = "", unit: str = "run", *, noise: float = 1.0) -> ProvenRow:
        """The row behind `epsilon`. Plans with the same question (for example specs of a sweep that differ in the
        seed) are answered once."""
        view, adjacency = view or self.plan.view, adjacency or self.plan.adjacency
        if unit == "message":
            return self._message(adjacency, noise)
        asked, conditions = question_of((group.most for group in self.clients), self.conditions, view)
        rows = [self._ask(each, conditions, view, adjacency, noise) for each in asked]
        return max(rows, key=lambda row: row.value)

    def _message(self, adjacency: str, noise: float = 1.0) -> ProvenRow:
        """One participation by itself, the most revealing one, against a server that sees the upload.

        Rounds of one class are ordered by strength, so its strongest stands for it; classes differ in sampling
        too, so each is accounted for.
        """
        # Which message of a shuffled epoch it is, is not known: it may straddle two.
        conditions = self.plan.conditions("message")._replace(own_epochs=False)
        rows = []
        for group in self.clients:
            if group.most:
                strongest = max((revealed for revealed, _ in scaled(group.most, noise)), key=self._strength)
                rows.append(self._ask([(strongest, 1)], conditions, "upload", adjacency))
        return max(rows, key=lambda row: row.value)

    def _strength(self, releases: Sequence[Release]) -> float:
        return sum(_information(release, self.plan.lattice) for release in releases)

    def _ask(
        self,
        participations: Sequence[tuple[tuple[Release, ...], int]],
        conditions: Conditions,
        view: str,
        adjacency: str,
        noise: float = 1.0,
    ) -> ProvenRow:
        delta = self.plan.delta

        def answer() -> ProvenRow:
            return views.proven(scaled(participations, noise), delta, conditions, view=view, adjacency=adjacency)

        if noise != 1.0:  # a step of a search, not asked again
            return answer()
        row: ProvenRow = _answered((tuple(participations), delta, conditions, view, adjacency), answer)
        return row

    # Tables

    def table(self) -> list[ProvenRow]:
        """Proven ε for every view and adjacency: the largest over the clients, with the smallest and the median
        beside it; then one participation by itself (unit "message")."""
        rows = []
        members = [len(group.members) for group in self.clients]
        for adjacency in ADJACENCIES:
            most = [self._account(group.most, adjacency) for group in self.clients]
            pairs = list(zip(self.clients, most, strict=True))
            least = [self._at_most(group, group.least, adjacency, bounds) for group, bounds in pairs]
            median = [self._at_most(group, group.median, adjacency, bounds) for group, bounds in pairs]
            for number, view in enumerate(VIEWS):
                values = [bounds[number].value for bounds in most]
                worst = int(np.argmax(values))
                middle = float(np.median(np.repeat([each[number] for each in median], members)))
                clients = ClientRange(min(each[number] for each in least), middle, values[worst])
                row = most[worst][number]
                no_credit = self._refusal(self.clients[worst], adjacency, row) if view == "sum" else None
                rows.append(self.row(row, clients=clients, no_credit=no_credit))
            rows.append(self.row(self._message(adjacency)))
        return rows

    def _at_most(
        self, group: ClientClass, participations: Participations, adjacency: str, most: list[ProvenRow]
    ) -> list[float]:
        """ε of a less exposed member in every view, on a coarse grid: shown beside the table, never above it."""
        if participations == group.most:
            return [row.value for row in most]
        rows = self._account(participations, adjacency, resolution=COARSE)
        return [min(row.value, bound.value) for row, bound in zip(rows, most, strict=True)]

    def _account(self, participations: Participations, adjacency: str, **options: Any) -> list[ProvenRow]:
        return views.account(participations, self.plan.delta, self.conditions, adjacency=adjacency, **options)

    def _refusal(self, group: ClientClass, adjacency: str, best: ProvenRow) -> str:
        """Why sums are proved no better than the uploads themselves, where another bound holds; else empty."""
        if math.isinf(best.value):
            return ""
        bounds = self._account(group.most, adjacency, views=("sum",), every_recipe=True)
        return next((bound.detail for bound in bounds if math.isinf(bound.value)), "")

    def tried(self) -> list[ProvenRow]:
        """Every recipe that was tried, the largest over the classes of clients, refusals with their reason."""
        return self._tried(self.clients, self.conditions)

    def _tried(self, groups: Sequence[ClientClass], conditions: Conditions) -> list[ProvenRow]:
        rows = []
        # Whoever took no part has no releases, of which every recipe holds; others' recipes depend on theirs.
        revealed = [group.most for group in groups if group.most] or [[]]
        for adjacency in ADJACENCIES:
            tried = [
                views.account(each, self.plan.delta, conditions, adjacency=adjacency, every_recipe=True)
                for each in revealed
            ]
            rows += [self.row(max(same, key=lambda row: row.value)) for same in zip(*tried, strict=True)]
        return rows

    def before_the_draw(self, cohort_size_at: Callable[[int], int]) -> list[ProvenRow]:
        """Every bound before an honest party draws each round's cohort, independently of data and outputs. A
        client takes part in each round with probability cohort_size/num_clients (R4), and with certainty in rounds
        with all clients (Secure FedAvg's first round)."""
        plan = self.plan
        if plan.round_numbers:
            raise SpecError("some rounds of this run were repeated: their participants are already drawn (R4)")
        if plan.design is not None:
            raise SpecError("this method fixes the participants in advance: there is nothing left to draw (R4)")
        rounds = len(plan.cohorts)
        everyone, nobody = np.arange(plan.num_clients), np.zeros(0, int)
        shares = [cohort_size_at(index) / plan.num_clients for index in range(rounds)]
        groups = alike(self.releases, plan.client_sizes, [everyone] * rounds)

        def taking_part(certain: bool) -> list[ClientClass]:
            cohorts = [everyone if (share >= 1) == certain else nobody for share in shares]
            return classes(self.releases, plan.client_sizes, cohorts, lattice=plan.lattice, groups=groups)

        # The certain rounds are listed first.
        joined = [
            sure._replace(most=[*sure.most, *drawn.most])
            for sure, drawn in zip(taking_part(True), taking_part(False), strict=True)
        ]
        rate = max((share for share in shares if share < 1), default=1.0)
        participation = views.binomial(rounds, rate, certain=sum(share >= 1 for share in shares))
        rows = self._tried(joined, self.conditions._replace(participation=participation))
        return [*rows, *self._hidden_cohorts(rounds)]

    def _hidden_cohorts(self, rounds: int) -> list[ProvenRow]:
        """What outsiders learn of a whole client if they do not learn who takes part: a cohort is then a batch of
        clients (R2). Nothing like it holds for records (docs/privacy.md, Hidden cohorts)."""
        plan, everyone = self.plan, np.arange(self.plan.num_clients)
        rate = plan.cohort_size / plan.num_clients
        # A client that goes on with its epoch remembers whether it took part: rounds are then no fresh draws.
        if not plan.per_client or rate >= 1 or plan.batch_sampling == "shuffled":
            return []

        def hidden(info: RoundInfo) -> tuple[Release, ...]:
            return tuple(
                release._replace(sampling=release.sampling._replace(kind="fixed", rate=rate))
                if release.channel == "downlink"
                else release
                for release in self.releases(info)
            )

        groups = classes(hidden, plan.client_sizes, [everyone] * rounds, lattice=plan.lattice)
        condition = "assumed: no outsider learns who takes part, so the seed (in spec.toml) stays secret"
        rows = []
        for adjacency in ADJACENCIES:
            proved = [
                views.account(
                    group.most, plan.delta, self.conditions, adjacency=adjacency, views=("broadcast", "final")
                )
                for group in groups
            ]
            worst = [max(same, key=lambda row: row.value) for same in zip(*proved, strict=True)]
            rows += [
                replace(self.row(row), assumed=True, recipe=f"{row.recipe} hidden", detail=condition)
                for row in worst
                if math.isfinite(row.value)
            ]
        return rows

    def row(self, p: ProvenRow, **more: Any) -> ProvenRow:
        """A proven ε as reports show it: with the adversary it holds against."""
        return replace(p, assumed=p.assumed or self.plan.assumed, against=self._against(p), **more)

    def _against(self, p: ProvenRow) -> str:
        """The adversary that a bound relying on other clients' noise holds against; empty if it relies on none."""
        if not p.recipe.startswith("R6") and not p.recipe.endswith((" sum", " downlink", " joint")):
            return ""
        plan = self.plan
        rest = f" while the noise of {plan.missing} more is missing" if plan.missing else ""
        return f"against a server that colludes with {plan.colluders} of the {plan.cohort_size} parties{rest}"

    # Noise

    def noise_factors(self) -> np.ndarray:
        """`noise_factor` for the target of each client; one for all if all have the plan's target."""
        plan = self.plan
        if not plan.epsilons:
            return np.asarray(self.noise_factor())
        factors = np.zeros(plan.num_clients)
        for target in sorted(set(plan.epsilons)):
            members = np.flatnonzero(np.asarray(plan.epsilons) == target)
            factors[members] = self.of(members).noise_factor(target)
        return factors

    def noise_factor(self, epsilon: float | None = None) -> float:
        """The factor on all noise for which the proven ε is at most `epsilon` (by default the plan's) and within
        0.1% of it."""
        plan = self.plan
        epsilon = plan.epsilon if epsilon is None else epsilon
        if not plan.noise_names:
            raise SpecError("this method adds no noise, so privacy.noise='proven' has nothing to set; use 'none'")

        def at(factor: float) -> float:
            # Noise enters every release as a factor: the classes and their envelopes stay the same.
            return self.epsilon(unit=plan.unit, noise=factor)

        def solve() -> float:
            most = self.proven(unit=plan.unit, noise=1e9)
            if math.isinf(most.value):
                raise NoProof(
                    f"no noise has a proven ε for view={plan.view!r} under {plan.adjacency}: {most.detail}; "
                    "choose another privacy.adjacency, privacy.view or batch_sampling"
                )
            return calibrate(epsilon, at)

        asked, conditions = question_of((group.most for group in self.clients), self.conditions, plan.view)
        question = (asked, conditions, epsilon, plan.delta, plan.view, plan.adjacency, plan.unit)
        factor: float = _answered(question, solve)
        return factor


def _answered(question: Any, answer: Callable[[], Any]) -> Any:
    if question not in _ANSWERS:
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.pop(next(iter(_ANSWERS)))
        _ANSWERS[question] = answer()
    return _ANSWERS[question]


def question_of(
    participations: Iterable[Participations], conditions: Conditions, view: str
) -> tuple[tuple[Any, ...], Conditions]:
    """What the accountant's answer for a view depends on. Learning rates are irrelevant to a server that sees
    every upload, so specs that differ only in them share an answer."""
    if view != "upload":
        return tuple(tuple(each) for each in participations), conditions
    plain = []
    for each in participations:
        counts: Counter[tuple[Release, ...]] = Counter()
        for releases, count in each:
            counts[without_rates(releases)] += count
        plain.append(tuple(counts.items()))
    by_use = any(release.by_use for each in plain for releases, _ in each for release in releases)
    return tuple(plain), conditions if by_use else conditions._replace(smoothness=None)


def scaled(participations: Iterable[tuple[tuple[Release, ...], int]], noise: float) -> Participations:
    """The same participations with all noise times a factor."""
    return [
        (tuple(release._replace(noise_std=release.noise_std * noise) for release in revealed), count)
        for revealed, count in participations
    ]


def noise_ratio(algorithm: Algorithm, sizes: np.ndarray, weights: np.ndarray) -> float:
    """Smallest over largest noise that clients add to the sum of weighted uploads at the same step: 1 if all are
    equal, 0 if their learning rates differ, because noise at different rates is not compared."""
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


TOLERANCE = 1e-3  # the proven ε of the result lies within this share below the target
_LIMIT = 2.0**40
_LARGE = 1e6  # stands for ε = ∞ in the search


def calibrate(epsilon: float, proven_epsilon: Callable[[float], float], *, guess: float = 1.0) -> float:
    """The noise (a multiplier, a std, or anything else positive) whose proven ε is at most `epsilon` and close
    to it.

    `proven_epsilon` must not increase with the noise. The result satisfies
    (1 - TOLERANCE)·epsilon <= proven_epsilon(noise) <= epsilon, unless the function jumps past the
    target; then it is the smallest noise found that meets it. Raises NoProof if no noise does.
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
                    f"no noise reaches epsilon={epsilon:.15g}: "
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
