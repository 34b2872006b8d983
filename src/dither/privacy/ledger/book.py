"""The ledger in memory: who has released what, and what that is worth. Pure, except for its caches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from dither.core import Release, Sampling
from dither.errors import BudgetExhausted
from dither.privacy.accounting import ADD_REMOVE, REALISED, Facts, gaussian_mu, honest_others, proven

from .entries import BUDGET, CHARGE, Budget, Charge, Charged, Row, decode_budget, decode_charges, encode_charges

_CACHED = 4096  # values of ε that are remembered
_FINE = 1e-15  # δ at which a run's shuffled epochs are turned into one Gaussian

_Number = TypeVar("_Number", int, float)
Counts = dict[int, int]  # participation -> how often


class _Together(NamedTuple):
    """All that a client has released, ready for the accountant."""

    facts: Facts
    counts: Counts


class Account:
    """One client's history on one data set. Participations are numbers of the book; a segment is an unbroken
    stretch of rounds of one run, inside which shuffled epochs go on."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []  # of each segment
        self.facts: list[Facts] = []  # of each segment
        self.runs: dict[str, tuple[int, int]] = {}  # run -> (its newest segment, the round at which that stops)

    def copy(self) -> Account:
        other = Account()
        other.counts = [dict(counts) for counts in self.counts]
        other.facts = list(self.facts)
        other.runs = dict(self.runs)
        return other

    def add(self, run: str, rounds: tuple[int, int], facts: Facts, counts: Iterable[tuple[int, int]]) -> None:
        """Rounds that the run has released before are a new segment: done again, they reveal more."""
        segment, stop = self.runs.get(run, (-1, 0))
        facts = _normal(facts)
        if segment < 0 or rounds[0] < stop:
            segment = len(self.counts)
            self.counts.append({})
            self.facts.append(facts)
        else:
            self.facts[segment] = weakest([self.facts[segment], facts], one_run=True)
        self.runs[run] = (segment, rounds[1])
        own = self.counts[segment]
        for participation, count in counts:
            own[participation] = own.get(participation, 0) + count

    def participations(self) -> int:
        return sum(count for counts in self.counts for count in counts.values())


class Book:
    """All accounts and budgets, built entry by entry."""

    def __init__(self) -> None:
        self.accounts: dict[str, dict[str, Account]] = {}
        self.budgets: dict[tuple[str, str | None], Budget] = {}
        self._participations: list[tuple[Release, ...]] = []
        self._shuffled: list[bool] = []  # of each participation
        self._numbers: dict[tuple[Release, ...], int] = {}
        self._charged: set[tuple[str, str, bytes]] = set()
        self._values: dict[object, float] = {}
        self._known: dict[tuple[str, str], tuple[Budget, _Together]] = {}

    # Entries

    def apply(self, row: Row) -> None:
        """Take in one verified row."""
        if row.kind == BUDGET:
            budget, client = decode_budget(row.content)
            if budget is None:
                self.budgets.pop((row.dataset, client), None)
            else:
                self.budgets[row.dataset, client] = budget
        elif row.kind == CHARGE:
            charged = decode_charges(row.content)
            accounts = self.accounts.setdefault(row.dataset, {})
            for clients, counts in self._numbered(charged):
                for client in clients:
                    account = accounts.setdefault(client, Account())
                    account.add(row.run, charged.rounds, charged.facts, counts)
            self._charged.add(_identity(row.dataset, row.run, row.content))

    def has_charged(self, dataset: str, run: str, content: str) -> bool:
        """Whether this very charge of this run is an entry already."""
        return _identity(dataset, run, content) in self._charged

    def _numbered(self, charged: Charged) -> list[tuple[tuple[str, ...], list[tuple[int, int]]]]:
        numbers = [self._number(releases) for releases in charged.participations]
        return [(clients, [(numbers[i], n) for i, n in counts]) for clients, counts in charged.groups]

    def _number(self, releases: tuple[Release, ...]) -> int:
        number = self._numbers.setdefault(releases, len(self._participations))
        if number == len(self._participations):
            self._participations.append(releases)
            self._shuffled.append(any(r.sampling.kind.startswith("shuffled") for r in releases))
        return number

    # Budgets

    def budget(self, dataset: str, client: str) -> Budget | None:
        """The client's own budget, else that of the data set."""
        return self.budgets.get((dataset, client), self.budgets.get((dataset, None)))

    def check(self, dataset: str, run: str, charged: Charged) -> None:
        """BudgetExhausted for the first client that cannot pay."""
        first, stop = charged.rounds
        for clients, counts in self._numbered(charged):
            for client in clients:
                budget = self.budget(dataset, client)
                if budget is None:
                    continue
                if budget.adjacency == ADD_REMOVE and charged.facts.counts_shown:
                    raise BudgetExhausted(
                        f"client {client!r}: its budget {budget} cannot pay for run {run!r}, which shows counts: "
                        f"{charged.facts.counts_shown}; set one that can: dither budget set DATA --epsilon "
                        f"{budget.epsilon:g} --delta {budget.delta:g} --adjacency zero-out"
                    )
                before = self.account(dataset, client)
                after = before.copy()
                after.add(run, charged.rounds, charged.facts, counts)
                if not self._affords(dataset, client, after, budget):
                    spent, would_be = self.epsilon(before, budget), self.epsilon(after, budget)
                    raise BudgetExhausted(
                        f"client {client!r} has spent ε={spent:.6g} of its budget {budget}; "
                        f"rounds {first} to {stop - 1} of run {run!r} would make it ε={would_be:.6g}"
                    )

    def affordable(
        self,
        dataset: str,
        run: str,
        start: int,
        per_round: Callable[[int], Sequence[Charge]],
        num_rounds: int,
        facts: Facts,
    ) -> int:
        """The largest n such that every client can pay for the first n rounds."""
        coming: dict[str, list[tuple[int, int, int]]] = {}  # client -> (round, participation, count)
        numbers: dict[tuple[Release, ...], int] = {}
        for round in range(num_rounds):
            for client, participations in per_round(round):
                for releases, count in participations:
                    releases = tuple(releases)
                    if releases not in numbers:
                        content = encode_charges([Charge(client, [(releases, 1)])], (round, round + 1), facts)
                        numbers[releases] = self._number(decode_charges(content).participations[0])
                    coming.setdefault(client, []).append((round, numbers[releases], int(count)))

        limit = num_rounds
        for client, items in coming.items():
            budget = self.budget(dataset, client)
            if budget is None:
                continue
            before = self.account(dataset, client)

            def pays(
                rounds: int,
                client: str = client,
                items: list[tuple[int, int, int]] = items,
                budget: Budget = budget,
                before: Account = before,
            ) -> bool:
                due = [(participation, count) for round, participation, count in items if round < rounds]
                if not due:
                    return True
                after = before.copy()
                after.add(run, (start, start + rounds), facts, due)
                return self._affords(dataset, client, after, budget)

            if pays(limit):
                continue
            low, high = 0, limit  # pays(low), not pays(high)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if pays(middle) else (low, middle)
            limit = low
            if limit == 0:
                break
        return limit

    def account(self, dataset: str, client: str) -> Account:
        """The client's history; an empty one if it has none."""
        return self.accounts.get(dataset, {}).get(client) or Account()

    def _affords(self, dataset: str, client: str, account: Account, budget: Budget) -> bool:
        """Whether ε is within the budget. What was found affordable once covers every part of it, so that a
        run whose rounds were checked beforehand costs no accounting while it goes on."""
        together = self._together(account, budget)
        known_budget, known = self._known.get((dataset, client), (None, None))
        if (
            known is not None
            and (known_budget, known.facts) == (budget, together.facts)
            and all(count <= known.counts.get(i, 0) for i, count in together.counts.items())
        ):
            return True
        if not self._value(together, budget) <= budget.epsilon:
            return False
        self._known[dataset, client] = (budget, together)
        return True

    # ε

    def epsilon(self, account: Account, terms: Budget) -> float:
        """Proven ε of all releases of an account, at the δ, view and adjacency of a budget."""
        return self._value(self._together(account, terms), terms)

    def _value(self, together: _Together, terms: Budget) -> float:
        key = (together.facts, tuple(sorted(together.counts.items())), *terms[1:])
        if key not in self._values:
            if len(self._values) >= _CACHED:
                self._values.clear()
            items = [(self._participations[i], count) for i, count in together.counts.items()]
            self._values[key] = proven(
                items, terms.delta, together.facts, view=terms.view, adjacency=terms.adjacency
            ).value
        return self._values[key]

    def _together(self, account: Account, terms: Budget) -> _Together:
        """One list of participations over all runs, with facts that hold for all of them."""
        if not account.counts:
            return _Together(Facts(), {})
        shuffled = [any(self._shuffled[i] for i in counts) for counts in account.counts]
        if len(account.counts) == 1:
            plain = terms.view == "upload" and not shuffled[0]
            own = account.facts[0]
            return _Together(Facts(counts_shown=own.counts_shown) if plain else own, account.counts[0])
        merged: Counts = {}
        for segment, counts in enumerate(account.counts):
            if shuffled[segment]:
                # every run shuffles anew: its epochs are worth one Gaussian, which composes with the rest
                counts = {self._one_gaussian(counts, account.facts[segment], terms): 1}
            for i, count in counts.items():
                merged[i] = merged.get(i, 0) + count
        if terms.view == "upload" or any(shuffled):
            # no credit besides the uploads' own noise
            return _Together(Facts(counts_shown=_counts_shown(account.facts)), merged)
        return _Together(weakest(account.facts, one_run=False), merged)

    def _one_gaussian(self, counts: Counts, facts: Facts, terms: Budget) -> int:
        """A participation that reveals what a segment of shuffled epochs does (D2: R1 over its uses)."""
        alone = self._value(_Together(facts, counts), Budget(0.0, _FINE, "upload", terms.adjacency))
        mu = gaussian_mu(alone, _FINE) * (1.0 + 1e-9)  # rounded up
        noise_std = 0.0 if mu == math.inf else 1.0 / mu
        sampling = Sampling("full", 1.0, terms.adjacency)
        return self._number((Release("uplink", noise_std, 1.0, 1, sampling, "shuffled epochs of one run (D2)"),))


def weakest(facts: Sequence[Facts], *, one_run: bool) -> Facts:
    """Facts that all of the given ones imply: the fewest others, the most colluders, nothing that only some
    have. Exposed uploads add up over runs; shuffled epochs do not go on from one run to the next."""
    if one_run and all(f == facts[0] for f in facts):
        return facts[0]
    exposures = max(f.exposures for f in facts) if one_run else sum(f.exposures for f in facts)
    epochs = Facts(counts_shown=_counts_shown(facts))
    if one_run:
        epochs = epochs._replace(
            own_epochs=all(f.own_epochs for f in facts), num_rounds=_most(f.num_rounds for f in facts)
        )
    if any(f.client_state or (f.cohort_size < 2 and f.others_noise is None) for f in facts):
        return epochs._replace(client_state=True, exposures=exposures)  # no credit for sums
    return epochs._replace(
        cohort_size=min(f.cohort_size for f in facts),
        colluders=max(f.colluders for f in facts),
        others_noise=min(_others(f) for f in facts),
        convex=all(f.convex for f in facts),
        step_smoothness=_most(f.step_smoothness for f in facts),
        step_lipschitz=_most(f.step_lipschitz for f in facts),
        exposures=exposures,
    )


def _counts_shown(facts: Sequence[Facts]) -> str:
    return next((f.counts_shown for f in facts if f.counts_shown), "")


def _others(facts: Facts) -> float:
    if facts.others_noise is not None:
        return facts.others_noise
    return float(honest_others(facts.cohort_size, facts.colluders))


def _most(values: Iterable[_Number | None]) -> _Number | None:
    """The largest, or None where one is unknown."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return max(known)


def _normal(facts: Facts) -> Facts:
    """Participation as it happened and nothing assumed: the ledger knows what ran, and proves."""
    return facts._replace(participation=REALISED, assume=False, unit="run", not_covered=(), encoded=False)


def _identity(dataset: str, run: str, content: str) -> tuple[str, str, bytes]:
    return dataset, run, hashlib.sha256(content.encode("utf-8")).digest()
