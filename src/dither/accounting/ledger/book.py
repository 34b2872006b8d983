"""The ledger in memory: who has released what, and what that is worth. Pure, except for its caches."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from dither.accounting import (
    ADD_REMOVE,
    REALISED,
    Conditions,
    Lattice,
    ProvenRow,
    gaussian_epsilon,
    gaussian_mu,
    honest_others,
    proven,
    views,
)
from dither.accounting.ledger import entries, filter
from dither.accounting.ledger.entries import EVERY_RECORD, About, Budget, Charge, Charged, Row
from dither.accounting.ledger.sketch import Overlap, Scan, Sketch
from dither.accounting.views import NUMBERS, SAMPLER_ERROR, sampler_error
from dither.errors import BudgetExhausted, ConfigError, LedgerError, SpecError
from dither.types import ExactNoise, Release, Sampling, epsilon_text

_CACHED = 4096  # values of ε that are remembered
SEED = "-seed:"  # in the name of a seeded run
_FINE = 1e-15  # δ at which Gaussian releases are turned into one Gaussian: small, so that its ε is not 0

_Number = TypeVar("_Number", int, float)
Counts = dict[int, int]  # participation -> how often


class _Together(NamedTuple):
    """A client's releases and the conditions that hold for all of them, ready for the accountant."""

    conditions: Conditions
    counts: Counts


class Account:
    """One client's history on one data set. Participations are numbers of the book; a segment is an unbroken
    stretch of rounds of one run, inside which shuffled epochs continue. Where data sets were joined, a run on two
    of them is two runs (`run_key`): each reveals all that it registered for its own records."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []  # of each segment
        self.conditions: list[Conditions] = []  # of each segment
        self.runs: dict[str, tuple[int, int]] = {}  # run -> (its newest segment, the round at which that stops)
        self.owners: list[str] = []  # the run of each segment
        self.plans: dict[str, tuple[Conditions, Counts]] = {}  # run -> what it registered before its first round
        self.order: dict[str, None] = {}  # runs, in the order in which they began

    def copy(self) -> Account:
        other = Account()
        other.counts = [dict(counts) for counts in self.counts]
        other.conditions = list(self.conditions)
        other.runs, other.plans, other.order = dict(self.runs), dict(self.plans), dict(self.order)
        other.owners = list(self.owners)
        return other

    def register(self, run: str, conditions: Conditions, counts: Iterable[tuple[int, int]]) -> None:
        """What the whole run will reveal, said before its first output."""
        self.order.setdefault(run)
        self.plans.setdefault(run, (_normal(conditions), dict(counts)))

    def add(
        self, run: str, rounds: tuple[int, int], conditions: Conditions, counts: Iterable[tuple[int, int]]
    ) -> None:
        """Rounds that the run has released before are a new segment: done again, they reveal more."""
        segment, stop = self.runs.get(run, (-1, 0))
        conditions = _normal(conditions)
        if segment < 0 or rounds[0] < stop:
            segment = len(self.counts)
            self.counts.append({})
            self.conditions.append(conditions)
            self.owners.append(run)
            self.order.setdefault(run)
        else:
            self.conditions[segment] = weakest([self.conditions[segment], conditions], one_run=True)
        self.runs[run] = (segment, rounds[1])
        own = self.counts[segment]
        for participation, count in counts:
            own[participation] = own.get(participation, 0) + count

    def join(self, other: Account) -> None:
        """The history of a data set that turned out to be the same."""
        first = len(self.counts)
        self.counts += other.counts
        self.conditions += other.conditions
        self.owners += other.owners
        self.plans |= other.plans
        self.order |= other.order
        self.runs |= {run: (first + segment, stop) for run, (segment, stop) in other.runs.items()}

    def with_runs(self, other: Account, runs: set[str]) -> Account:
        """This history and another one's of these runs."""
        both = self.copy()
        for segment, run in enumerate(other.owners):
            if run in runs:
                newest, stop = other.runs[run]
                if newest == segment:
                    both.runs[run] = (len(both.counts), stop)
                both.counts.append(dict(other.counts[segment]))
                both.conditions.append(other.conditions[segment])
                both.owners.append(run)
        both.plans |= {run: plan for run, plan in other.plans.items() if run in runs}
        both.order |= {run: None for run in other.order if run in runs}
        return both

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
        self.sketches: list[tuple[str, Sketch]] = []  # (data set, of its records)
        self.files: dict[str, str] = {}  # data set -> a file's name
        self.names: dict[str, str] = {}  # a name that the owner gave -> data set
        self._same: dict[str, str] = {}  # data set -> the one it is charged with
        self._other: set[frozenset[str]] = set()  # data sets that share rows but not records
        self.rounds: dict[tuple[str, str], list[tuple[int, int]]] = {}  # (data set, run) -> what was charged
        self._charged: set[tuple[str, str, bytes]] = set()
        self._registered: set[tuple[str, str]] = set()  # (data set, run)
        self.held_out: dict[str, set[str]] = {}  # data set -> what its charges left out; "": nothing
        self._began: dict[str, int] = {}  # run -> its place in the order of first charges
        self._besides: set[str] = set()  # data sets of which other ledgers have accounts
        self._late: set[str] = set()  # data sets whose budget was set, raised or joined after the first charge
        self._values: dict[object, float] = {}
        self._rows: dict[object, ProvenRow] = {}
        self._known: dict[tuple[str, str], tuple[Budget, list[_Together]]] = {}

    # Entries

    def apply(self, row: Row) -> None:
        """Take in one verified row."""
        dataset = self.root(row.dataset)
        if row.kind == entries.BUDGET:
            budget, client, _ = entries.decode_budget(row.content)
            was = self.budget(dataset, client)
            if budget is None:
                self.budgets.pop((dataset, client), None)
            else:
                self.budgets[dataset, client] = budget
            if self.accounts.get(dataset) and _allows_more(self.budget(dataset, client), was):
                self._late.add(dataset)
        elif row.kind == entries.DATA:
            self._learn(row.dataset, entries.decode_about(row.content))
        elif row.kind == entries.CHARGE:
            charged = entries.decode_charges(row.content)
            accounts = self.accounts.setdefault(dataset, {})
            for client, counts, plan in self._by_client(charged):
                account = accounts.setdefault(client, Account())
                _charge(account, run_key(row.dataset, row.run), charged, counts, plan)
            self._began.setdefault(run_key(row.dataset, row.run), len(self._began))
            self.held_out.setdefault(dataset, set()).add(charged.held_out)
            self.rounds.setdefault((row.dataset, row.run), []).append(charged.rounds)
            if charged.plan is not None:
                self._registered.add((row.dataset, row.run))
            self._charged.add(_identity(row.dataset, row.run, row.content))
        elif row.kind != entries.GENESIS:
            raise LedgerError(f"the ledger holds a {row.kind!r} entry, written by a newer version; upgrade Dither")

    # Data sets

    def root(self, dataset: str) -> str:
        """The data set that another one is charged with, or itself if it has its own account."""
        while dataset in self._same:
            dataset = self._same[dataset]
        return dataset

    def alike(self, dataset: str) -> set[str]:
        """The data sets that have one account with this one."""
        return {dataset, *(each for each, _ in self.sketches if self.root(each) == self.root(dataset))}

    def known(self) -> set[str]:
        """Data sets that anything is said of."""
        return {*self.accounts, *(d for d, _ in self.budgets), *self._same, *self.files, *self.names.values()}

    def find(self, name: str) -> str | None:
        """The data set that is called so: by its owner, or by the first eight or more letters of its id."""
        found = {self.root(self.names[name])} if name in self.names else set()
        if not found and len(name) >= 8:
            found = {self.root(dataset) for dataset in self.known() if dataset.startswith(name)}
        return found.pop() if len(found) == 1 else None

    def called(self, dataset: str) -> str:
        """A data set in words."""
        dataset = self.root(dataset)
        names = [name for name, each in self.names.items() if self.root(each) == dataset]
        files = [file for each, file in self.files.items() if self.root(each) == dataset]
        return f"{(names or [dataset[:8]])[0]}{f' ({files[0]})' if files else ''}"

    def overlaps(self, dataset: str, scan: Scan) -> list[tuple[Overlap, str]]:
        """The data sets that share records with the scanned one, and the share, largest first."""
        found: dict[str, Overlap] = {}
        for each, sketch in self.sketches:
            root = self.root(each)
            apart = frozenset((each, dataset)) in self._other
            if root != self.root(dataset) and not apart and (shared := scan.shared(sketch)).share:
                found[root] = max(shared, found.get(root, shared))
        return sorted(((share, root) for root, share in found.items()), reverse=True)

    def check_same(self, one: str, other: str) -> None:
        """ConfigError if two data sets have budgets of which neither is the stricter one."""
        mine, theirs = (
            {client: b for (owner, client), b in self.budgets.items() if owner == self.root(each)}
            for each in (one, other)
        )
        apart = mine.keys() != theirs.keys() or any(
            not mine[c].within(theirs[c]) and not theirs[c].within(mine[c]) for c in mine
        )
        if self.root(one) != self.root(other) and mine and theirs and apart:
            raise ConfigError(
                f"{self.called(one)} and {self.called(other)} have budgets that cannot be compared: give both the "
                "same δ, view and neighbours, for the same clients, before you join them"
            )

    def _learn(self, dataset: str, about: About) -> None:
        for same in about.same:
            self._join(self.root(dataset), self.root(same))
        for other in about.other:  # the word is on what either account holds by now, not on what joins it later
            both = self.alike(dataset), self.alike(other)
            self._other |= {frozenset(pair) for pair in itertools.product(*both)}
        if about.file:
            self.files.setdefault(dataset, about.file)
        if about.name:
            self.names[about.name] = dataset
        if about.besides:
            self._besides.add(dataset)
        if about.sketch is not None:
            self.sketches.append((dataset, about.sketch))

    def _join(self, gone: str, kept: str) -> None:
        """One account for two data sets, with the stricter budget: who is in either may be in both."""
        if gone == kept:
            return
        charged = [each for each in (gone, kept) if self.accounts.get(each)]
        clients = {None, *(client for owner, client in self.budgets if owner in (gone, kept))}
        before = [(client, self.budget(each, client)) for each in charged for client in clients]
        self._same[gone] = kept
        self.held_out.setdefault(kept, set()).update(self.held_out.pop(gone, ()))
        accounts = self.accounts.setdefault(kept, {})
        for client, account in self.accounts.pop(gone, {}).items():
            accounts.setdefault(client, Account()).join(account)
        for key in [key for key in self.budgets if key[0] == gone]:
            budget, other = self.budgets.pop(key), self.budgets.get((kept, key[1]))
            self.budgets[kept, key[1]] = other if other is not None and other.within(budget) else budget
        raised = any(_allows_more(self.budget(kept, client), was) for client, was in before)
        if len(charged) > 1 or raised or gone in self._late:
            self._late.add(kept)
        self._known.clear()

    def has_charged(self, dataset: str, run: str, content: str) -> bool:
        """Whether this very charge of this run is an entry already."""
        return _identity(dataset, run, content) in self._charged

    def is_registered(self, dataset: str, run: str) -> bool:
        """Whether the run has said what all of it will reveal."""
        return (dataset, run) in self._registered

    def _by_client(
        self, charged: Charged
    ) -> list[tuple[str, list[tuple[int, int]] | None, list[tuple[int, int]] | None]]:
        """(client, what it is charged, what the whole run will be charged to it where the entry says so)."""
        now = {client: counts for clients, counts in self._numbered(charged) for client in clients}
        if charged.plan is None:
            return [(client, counts, None) for client, counts in now.items()]
        plan = {client: counts for clients, counts in self._numbered(charged.plan) for client in clients}
        return [(client, now.get(client), plan.get(client)) for client in {**now, **plan}]

    def _numbered(self, charged: Charged) -> list[tuple[tuple[str, ...], list[tuple[int, int]]]]:
        numbers = [self._number(releases) for releases in charged.participations]
        return [(clients, [(numbers[i], n) for i, n in counts]) for clients, counts in charged.groups]

    def _number(self, releases: tuple[Release, ...]) -> int:
        number = self._numbers.setdefault(releases, len(self._participations))
        if number == len(self._participations):
            self._participations.append(releases)
            self._shuffled.append(any(r.sampling.kind.startswith("shuffled") for r in releases))
        return number

    def check_public(self, dataset: str, held_out: str) -> None:
        """`SpecError` if records that a run holds out, and declares public, were charged as private."""
        if self.held_out.get(self.root(dataset), set()) - {held_out}:
            raise SpecError(
                f"data.test_public declares records of {self.called(dataset)} public that were charged as private "
                "(other runs held out other records, or none): give the public ones in a file of their own "
                "(data.test_path), or keep data.test_fraction, data.split and seed as they were"
            )

    # Budgets

    def budget(self, dataset: str, client: str | None) -> Budget | None:
        """The client's own budget, else that of the data set. Without a client: the data set's."""
        dataset = self.root(dataset)
        return self.budgets.get((dataset, client), self.budgets.get((dataset, None)))

    def check(self, dataset: str, run: str, charged: Charged) -> None:
        """BudgetExhausted for the first client that cannot pay."""
        first, stop = charged.rounds
        for client, counts, plan in [*self._by_client(charged), *self._not_named(dataset, run, charged)]:
            budget = self.budget(dataset, client)
            if budget is None:
                continue
            if budget.adjacency == ADD_REMOVE and charged.conditions.counts_shown:
                raise BudgetExhausted(
                    f"client {client!r}: its budget {budget} cannot pay for run {run!r}, which shows counts: "
                    f"{charged.conditions.counts_shown}; set one that can: dither budget set DATA --epsilon "
                    f"{budget.epsilon:.15g} --delta {budget.delta:g} --adjacency zero-out --yes"
                )
            before = self.account(dataset, client)
            after = before.copy()
            _charge(after, run_key(dataset, run), charged, counts, plan)
            if not self._affords(dataset, client, after, budget):
                spent, would_be = (epsilon_text(self.epsilon(each, budget), digits=6) for each in (before, after))
                who = self.called(dataset) + f", client {client!r}" * (client != EVERY_RECORD)
                raise BudgetExhausted(
                    f"{who} has spent ε={spent} of its budget {budget}; "
                    f"rounds {first} to {stop - 1} of run {run[:16]!r} would make it ε={would_be}"
                )

    def account(self, dataset: str, client: str) -> Account:
        """The client's history; an empty one if it has none. Its records are also in runs that do not name it:
        there they may have revealed as much as any. (Runs of old named clients by their value alone: which column
        it was of is unknown, so they name no client of today.)"""
        accounts = self.accounts.get(self.root(dataset), {})
        own, everyone = accounts.get(client) or Account(), accounts.get(EVERY_RECORD)
        unnamed = set() if everyone is None else everyone.order.keys() - own.order.keys()
        if everyone is None or not unnamed:
            return own
        account = own.with_runs(everyone, unnamed)
        account.order = dict.fromkeys(sorted(account.order, key=lambda run: self._began[run]))
        return account

    def _not_named(
        self, dataset: str, run: str, charged: Charged
    ) -> list[tuple[str, list[tuple[int, int]] | None, list[tuple[int, int]] | None]]:
        """What a run that names no such client is charged to clients with a budget of their own: as "every
        record"."""
        named = {client: (counts, plan) for client, counts, plan in self._by_client(charged)}
        if EVERY_RECORD not in named:
            return []
        (counts, plan), accounts = named[EVERY_RECORD], self.accounts.get(self.root(dataset), {})
        return [
            (client, counts, plan)
            for owner, client in self.budgets
            if owner == self.root(dataset) and client is not None and client not in named
            if run_key(dataset, run) not in (accounts.get(client) or Account()).order
        ]

    def _affords(self, dataset: str, client: str, account: Account, budget: Budget) -> bool:
        """Whether ε is within the budget. An amount that was found affordable covers every part of it, so a run
        whose rounds were checked beforehand needs no accounting while it continues."""
        blocks = self._blocks(account, budget)
        known_budget, known = self._known.get((dataset, client), (None, None))
        if known is not None and known_budget == budget and _covered(blocks, known):
            return True
        if not self._filtered(account, blocks, budget) <= budget.epsilon:
            return False
        self._known[dataset, client] = (budget, blocks)
        return True

    # ε

    def epsilon(self, account: Account, terms: Budget) -> float:
        """Proven ε of all releases of an account, at the δ, view and adjacency of a budget."""
        return self._filtered(account, self._blocks(account, terms), terms)

    def by_run(self, account: Account, terms: Budget) -> dict[str, float]:
        """Proven ε of each run by itself, in the order in which they began; all of a run on joined data sets."""
        segments: dict[str, list[int]] = {run_name(key): [] for key in account.order}
        for number, owner in enumerate(account.owners):
            segments[run_name(owner)].append(number)
        return {
            run: self._row(self._together(account, terms, parts), terms, ideal=False).value
            for run, parts in segments.items()
            if parts
        }

    def delta(self, account: Account, terms: Budget) -> float:
        """The δ of `epsilon`: that of the budget, or a thousandth more for the tails of sampled runs that follow a
        Gaussian one; and with the errors of samplers, if there are several runs."""
        gaussian = [self._is_gaussian(block, terms) for block in self._blocks(account, terms)]
        tails = filter.TRACE * (gaussian[:1] == [True] and not all(gaussian))
        return terms.delta * (1.0 + tails) + (self._sampler_delta(account, terms) if len(gaussian) > 1 else 0.0)

    def numbers(self, account: Account, terms: Budget) -> tuple[str, ...]:
        """What computing with numbers leaves uncovered (R7)."""
        blocks = self._blocks(account, terms)
        rows = [self._row(block, terms, ideal=len(blocks) > 1) for block in blocks]
        gaps = {text for row in rows for text in row.not_covered}
        if len(blocks) > 1 and self._sampler_delta(account, terms) > filter.SAMPLERS * terms.delta:
            gaps.add(SAMPLER_ERROR)
        return tuple(text for text in NUMBERS if text in gaps)

    def _sampler_delta(self, account: Account, terms: Budget) -> float:
        """What the errors of all samplers add to δ at the budget's ε, or at what was spent if that is more."""
        plans = {run: [planned] for run, (_, planned) in account.plans.items()}
        made: dict[str, list[Counts]] = {}
        for run, counts in zip(account.owners, account.counts, strict=True):
            made.setdefault(run, []).append(counts)

        def error(stretches: list[Counts]) -> ExactNoise:
            return sampler_error((self._participations[i], n) for counts in stretches for i, n in counts.items())

        runs = [(error(made.get(run, [])), error(plans.get(run, []))) for run in {**plans, **made}]
        total = ExactNoise(
            rounding=0.0,
            distance=math.fsum(max(each.distance for each in both) for both in runs),
            failure=math.fsum(max(each.failure for each in both) for both in runs),
        )
        return total.delta(max(terms.epsilon, self.epsilon(account, terms))) if any(total) else 0.0

    def not_covered(self, dataset: str, client: str, account: Account, terms: Budget, *, besides: bool) -> str:
        """What else was spent elsewhere, and why ε does not hold for what was chosen by results."""
        gaps = [self._chosen(dataset, client, account, terms)]
        if any(SEED in run_name(run) for run in account.order):
            gaps.append("noise from a seed: whoever knows the seed can subtract it")
        if besides or self.root(dataset) in map(self.root, self._besides):
            gaps.append("another ledger's account of these records (--new-ledger): its ε adds up")
        return "; ".join(gap for gap in gaps if gap)

    def _chosen(self, dataset: str, client: str, account: Account, terms: Budget) -> str:
        """Why ε does not hold for rounds and runs that were chosen after looking at earlier results."""
        blocks = self._blocks(account, terms)
        if len(blocks) > 1 and _share_noise(map(run_name, account.order)):  # the gravest
            return "runs with one seed: they share their noise, and their difference has none"
        gaussian = all(self._is_gaussian(block, terms) for block in blocks)
        if len(account.owners) > len(set(account.owners)) and not gaussian:
            return "rounds that were repeated with fresh noise because of an earlier result, not a kill (R10)"
        if len(blocks) < 2:
            return ""
        if self.root(dataset) in self._late:
            return "a budget that was set or raised, or data sets that were joined, after the first run (R10)"
        unregistered = set(account.owners) - account.plans.keys()
        if unregistered and not gaussian:
            return "sampled runs that did not register their length before the first charge (R10)"
        if self.budget(dataset, client) is None:
            return "runs that were chosen by earlier results: no budget was set before the first run (R10)"
        return ""

    def _filtered(self, account: Account, blocks: list[_Together], terms: Budget) -> float:
        """One run: its own composition. Several: the filter of `ledger.filter`, whatever made the owner start the
        later ones."""
        everything = self._together(account, terms, range(len(account.counts)))
        if len(blocks) < 2:
            return self._row(everything, terms, ideal=False).value
        gaussian = [self._is_gaussian(block, terms) for block in blocks]
        if all(gaussian) and filter.is_gaussian((row := self._row(everything, terms)).recipe):
            return row.value
        squares, number = 0.0, 0
        for block, plain in zip(blocks, gaussian, strict=True):
            number += not plain
            tail = filter.tail(terms.delta, max(number, 1), sampled_first=not gaussian[0])
            squares += (self._mu(block, terms) if plain else self._cover(block, terms, tail)) ** 2
        share = 1.0 if gaussian[0] else 1.0 - filter.RESERVE
        return gaussian_epsilon(math.sqrt(squares), share * terms.delta)

    def _is_gaussian(self, block: _Together, terms: Budget) -> bool:
        """Whether all that is counted are unsampled Gaussian releases. Capped batches are not: they charge δ."""
        samplings = [release.sampling for i in block.counts for release in self._participations[i]]
        if any(sampling.truncation for sampling in samplings):
            return False
        if terms.view == "upload" and block.conditions.lattice is None:  # then no other recipe is tried
            return all(s.kind in ("full", "full-round", "shuffled", "shuffled-round") for s in samplings)
        return filter.is_gaussian(self._row(block, terms).recipe)

    def _row(self, together: _Together, terms: Budget, *, ideal: bool = True) -> ProvenRow:
        """The bound of these participations; `ideal` leaves the errors of samplers to `delta`."""
        key = (together.conditions, tuple(sorted(together.counts.items())), ideal, *terms[1:])
        if key not in self._rows:
            if len(self._rows) >= _CACHED:
                self._rows.clear()
            items = self._items(together, ideal=ideal)
            self._rows[key] = proven(
                items,
                terms.delta,
                together.conditions,
                view=_view(together.conditions, terms),
                adjacency=terms.adjacency,
            )
        return self._rows[key]

    def _cover(self, block: _Together, terms: Budget, tail: float) -> float:
        view = _view(block.conditions, terms)
        key = (block.conditions, tuple(sorted(block.counts.items())), tail, view, terms.adjacency)
        if key not in self._values:
            self._remember(key, filter.cover(self._items(block), block.conditions, tail, view, terms.adjacency))
        return self._values[key]

    def _remember(self, key: object, value: float) -> None:
        if len(self._values) >= _CACHED:
            self._values.clear()
        self._values[key] = value

    def _items(self, together: _Together, *, ideal: bool = True) -> list[tuple[tuple[Release, ...], int]]:
        items = [(self._participations[i], count) for i, count in together.counts.items()]
        return [(tuple(map(_ideal, releases)), count) for releases, count in items] if ideal else items

    def _blocks(self, account: Account, terms: Budget) -> list[_Together]:
        """What each run counts for. Gaussian releases count as they are made. A run with other releases counts,
        from its first round on, with everything it registered: its owner may stop it because of its outputs, and
        composition inside a run does not cover that."""
        result = []
        for run in account.order:
            made = self._together(account, terms, [i for i, owner in enumerate(account.owners) if owner == run])
            conditions, planned = account.plans.get(run, (made.conditions, {}))
            if not made.counts:
                made = _Together(conditions, {})
            counts = {i: max(made.counts.get(i, 0), planned.get(i, 0)) for i in {**planned, **made.counts}}
            whole = _Together(made.conditions, counts)
            if not counts:
                continue
            # Another bound may be better for the first rounds alone: these would be a sampled run that stops.
            gaussian = self._is_gaussian(whole, terms) and self._is_gaussian(made, terms)
            if len(account.order) == 1 or not planned or gaussian:
                result.append(made)
            elif account.owners.count(run) > 1 and any(self._shuffled[i] for i in planned):
                result.append(made)  # shuffled again: each stretch is a Gaussian by now
            else:
                result.append(whole)
        return result

    def _together(self, account: Account, terms: Budget, segments: Iterable[int]) -> _Together:
        """One list of participations over these segments, with conditions that hold for all of them."""
        segments = list(segments)
        all_counts = [account.counts[i] for i in segments]
        all_conditions = [account.conditions[i] for i in segments]
        if not segments:
            return _Together(Conditions(), {})
        shuffled = [
            conditions.lattice is None and any(self._shuffled[i] for i in counts)
            for conditions, counts in zip(all_conditions, all_counts, strict=True)
        ]
        # no credit besides the uploads' own noise
        uploads_alone = Conditions(
            lattice=_coarsest(all_conditions),
            counts_shown=_counts_shown(all_conditions),
            convex=all(each.convex for each in all_conditions),
            smoothness=_most(each.smoothness for each in all_conditions),
        )
        if len(all_counts) == 1:
            plain = terms.view == "upload" and not shuffled[0]
            return _Together(uploads_alone if plain else all_conditions[0], all_counts[0])
        merged: Counts = {}
        for segment, counts in enumerate(all_counts):
            if shuffled[segment]:
                # every run shuffles anew: its epochs are worth one Gaussian, which composes with the rest
                counts = {self._one_gaussian(counts, all_conditions[segment], terms): 1}
            for i, count in counts.items():
                merged[i] = merged.get(i, 0) + count
        if terms.view == "upload" or any(shuffled):
            return _Together(uploads_alone, merged)
        return _Together(weakest(all_conditions, one_run=False), merged)

    def _mu(self, block: _Together, terms: Budget) -> float:
        """μ of Gaussian releases, rounded up: by the best bound for those."""
        key = (block.conditions, tuple(sorted(block.counts.items())), _FINE, *terms[2:])
        if key not in self._values:
            view = _view(block.conditions, terms)
            tried = views.account(
                self._items(block),
                _FINE,
                block.conditions,
                adjacency=terms.adjacency,
                views=(view,),
                every_recipe=True,
            )
            epsilon = min((row.value for row in tried if filter.is_gaussian(row.recipe)), default=math.inf)
            self._remember(key, gaussian_mu(epsilon, _FINE) * (1.0 + 1e-9))
        return self._values[key]

    def _one_gaussian(self, counts: Counts, conditions: Conditions, terms: Budget) -> int:
        """A participation that reveals what a segment of shuffled epochs does (D2: R1 over its uses)."""
        mu = self._mu(_Together(conditions, counts), terms._replace(view="upload"))
        noise_std = 0.0 if mu == math.inf else 1.0 / mu
        sampling = Sampling("full", 1.0, terms.adjacency)
        return self._number((Release("uplink", noise_std, 1.0, 1, sampling, "shuffled epochs of one run (D2)"),))


def run_key(dataset: str, run: str) -> str:
    """What an account calls a run on a data set."""
    return f"{run}\0{dataset}"


def run_name(key: str) -> str:
    """The run of a key."""
    return key.partition("\0")[0]


def _allows_more(budget: Budget | None, was: Budget | None) -> bool:
    """Whether a budget was set, or raised in any of its terms."""
    return budget is not None and (was is None or not budget.within(was))


def _share_noise(runs: Iterable[str]) -> bool:
    """Whether two runs of different bits have the seed of their noise in common. The name of a seeded run ends in
    a digest of that, after one of all that determines its bits (`experiment.train.spending`)."""
    by_seed: dict[str, set[str]] = {}
    for run in runs:
        name, seeded, seed = run.rpartition(SEED)
        if seeded:
            by_seed.setdefault(seed, set()).add(name.partition("-")[2])
    return any(len(bits) > 1 for bits in by_seed.values())


def composed(runs: Sequence[tuple[Sequence[Charge], Conditions]], terms: Budget) -> tuple[float, float]:
    """(ε, δ) of several runs, each with all that it reveals, as a ledger would find it: later ones may be chosen
    after looking at earlier ones."""
    book, account = Book(), Account()
    for number, (charges, conditions) in enumerate(runs):
        charged = entries.decode_charges(entries.encode_charges(charges, (0, 1), conditions, charges))
        for _, counts, plan in book._by_client(charged):
            _charge(account, f"run {number}", charged, counts, plan)
    return book.epsilon(account, terms), book.delta(account, terms)


def _ideal(release: Release) -> Release:
    """The release with ideal noise: without the sampler's error."""
    if release.exact is None:
        return release
    return release._replace(exact=release.exact._replace(distance=0.0, failure=0.0))


def _charge(
    account: Account,
    run: str,
    charged: Charged,
    counts: Iterable[tuple[int, int]] | None,
    plan: Iterable[tuple[int, int]] | None,
) -> None:
    if plan is not None:
        account.register(run, charged.conditions, plan)
    if counts is not None:
        account.add(run, charged.rounds, charged.conditions, counts)


def _covered(blocks: list[_Together], known: list[_Together]) -> bool:
    """Whether these are part of what is known."""
    return len(blocks) == len(known) and all(
        block.conditions == other.conditions
        and all(count <= other.counts.get(i, 0) for i, count in block.counts.items())
        for block, other in zip(blocks, known, strict=True)
    )


def weakest(conditions: Sequence[Conditions], *, one_run: bool) -> Conditions:
    """Conditions that all of the given ones imply: the fewest others, the most colluders, nothing that only some
    have. Exposed uploads add up over runs; shuffled epochs do not continue from one run to the next."""
    if one_run and all(f == conditions[0] for f in conditions):
        return conditions[0]
    exposures = max(f.exposures for f in conditions) if one_run else sum(f.exposures for f in conditions)
    epochs = Conditions(counts_shown=_counts_shown(conditions), encoded=all(f.encoded for f in conditions))
    if one_run:
        epochs = epochs._replace(
            own_epochs=all(f.own_epochs for f in conditions), num_rounds=_most(f.num_rounds for f in conditions)
        )
    epochs = epochs._replace(lattice=_coarsest(conditions))
    if any(f.client_state or (f.cohort_size < 2 and f.others_noise is None) for f in conditions):
        return epochs._replace(client_state=True, exposures=exposures)  # no credit for sums
    return epochs._replace(
        cohort_size=min(f.cohort_size for f in conditions),
        colluders=max(f.colluders for f in conditions),
        others_noise=min(
            float(honest_others(f.cohort_size, f.colluders)) if f.others_noise is None else f.others_noise
            for f in conditions
        ),
        convex=all(f.convex for f in conditions),
        smoothness=_most(f.smoothness for f in conditions),
        lipschitz=_most(f.lipschitz for f in conditions),
        exposures=exposures,
    )


def _counts_shown(conditions: Sequence[Conditions]) -> str:
    return next((f.counts_shown for f in conditions if f.counts_shown), "")


def _coarsest(conditions: Sequence[Conditions]) -> Lattice | None:
    """A grid as coarse as any: its proof charges more, also for noise that is continuous."""
    found = [f.lattice for f in conditions if f.lattice is not None]
    if not found:
        return None
    steps, dimensions, least = zip(*found, strict=True)
    return Lattice(max(steps), max(dimensions), min(least))


def _most(values: Iterable[_Number | None]) -> _Number | None:
    """The largest, or None if one is unknown."""
    known = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return max(known)


def _normal(conditions: Conditions) -> Conditions:
    """Participation as it happened and nothing assumed: the ledger knows what ran, and proves."""
    return conditions._replace(participation=REALISED, assume=False, unit="run", not_covered=())


def _view(conditions: Conditions, terms: Budget) -> str:
    """What the adversary of a budget has seen: single uploads, not sums, of runs that summed in the open."""
    return "upload" if terms.view == "sum" and not conditions.encoded else terms.view


def _identity(dataset: str, run: str, content: str) -> tuple[str, str, bytes]:
    return dataset, run, hashlib.sha256(entries.without_plan(content).encode("utf-8")).digest()
