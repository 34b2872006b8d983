"""A run and the ledger: what its coming rounds will reveal, charged before they are computed.

Whose account? A record may belong to client 3 today and to client 5 tomorrow, or be partitioned by another
column. So every run is charged to the account "every record" with what its most exposed client reveals, and the
budget of a data set holds for that account. With `data.partition = "column"`, each institution also has its own
account, named by column and value ("site=north"), which its own budget may limit further; a run that does not name
an institution is charged to it as to "every record" (`book`). If each institution has its own file, each file is
its own data set, charged with what its client reveals. In a federation, the institution's own ledger has the same
entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from dither.accounting import compress
from dither.accounting.accountant import Accountant, alike, classes
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.accounting.ledger.entries import EVERY_RECORD, client_name
from dither.data import folder_digest
from dither.errors import BudgetExhausted
from dither.types import Release, RoundInfo


def data_id(ledger: Ledger, *, path: str = "", name: str = "", digest: str = "") -> str:
    """The ledger's id of a data set: of the bytes of the user's own file (of a folder: of x.npy and y.npy),
    however it is encoded; of the name of a set of the catalogue. `digest` is the `ledger_digest` of a folder that
    is loaded already: what was read is charged, whatever lies at `path` by now."""
    own = Path(path).expanduser()
    if path and (digest or own.is_dir()):
        content = f"folder: {digest or folder_digest(own)}".encode()
    else:
        content = own.read_bytes() if path else f"catalogue: {name}".encode()
    return ledger.fingerprint(np.frombuffer(content, np.uint8))


class Spending:
    """The account of one run in a ledger. `clients` are their names if each has its own account. If the data set
    is the file of one `client`, only what that client reveals is charged. With `replay`, repeated rounds release
    the same bits (seeded noise). `held_out` names the records of the data set that are not trained on; with
    `public`, scores on them are released."""

    def __init__(
        self,
        ledger: Ledger,
        accountant: Accountant,
        *,
        run: str,
        dataset: str,
        clients: Sequence[str] | None,
        replay: bool,
        client: int | None = None,
        held_out: str = "",
        public: bool = False,
    ) -> None:
        self.ledger, self.run, self.dataset = ledger, run, dataset
        self._plan, self._conditions = accountant.plan, accountant.conditions
        self._releases = accountant.ledger_releases
        self._clients, self._client, self._replay = clients, client, replay
        self._held_out, self._public = held_out, public
        self._everyone = all(len(cohort) == self._plan.num_clients for cohort in self._plan.cohorts)
        self._alike: list[np.ndarray] | None = None  # asked once
        self._charged: list[tuple[int, int]] = []  # stretches of rounds that this run has been charged for
        self._next = -1  # the round after them; -1: look into the ledger
        self._answers: dict[tuple[int, ...], Counter[tuple[Release, ...]]] = {}

    def pay(self, start: int, stop: int) -> int:
        """Charge rounds start..stop-1, or as many of them as every client can pay; returns where to stop.

        When this returns, the charge is on the disk. Raises `BudgetExhausted` when not even one round can be paid.
        """
        if start != self._next:
            self._charged = self._before(start)
        new = not self._charged and not self.ledger.is_registered(self.dataset, self.run)
        end = len(self._plan.cohorts)
        try:
            self._charge(start, stop, end)
        except BudgetExhausted:
            # Of a new run, as much is registered as can be paid.
            last = self._last_affordable(self._charged, start, end if new else stop)
            if last == start:
                raise
            stop = min(stop, last)
            self._charge(start, stop, last if new else end)
        self._charged, self._next = [*self._charged, (start, stop)], stop
        return stop

    def stretches(self) -> list[tuple[int, int]]:
        """The rounds that this run was charged for, in the order of the charges; what follows directly is one."""
        merged: list[tuple[int, int]] = []
        for start, stop in self.ledger.charged(self.run, self.dataset):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        return merged

    def affordable(self, start: int, stop: int) -> int:
        """How far `pay` would get; nothing is charged. Raises as `pay` does."""
        charged = self._charged if start == self._next else self._before(start)
        known = charged or self.ledger.is_registered(self.dataset, self.run)
        end = self._last_affordable(charged, start, stop if known else len(self._plan.cohorts))
        return min(stop, end) if end > start else self.pay(start, stop)

    def _last_affordable(self, charged: Sequence[tuple[int, int]], start: int, end: int) -> int:
        """The last round up to which this run can be paid, on top of what it was charged for."""
        return start + self.ledger.affordable(
            self.run,
            self.dataset,
            lambda rounds: self._charges(charged, start, start + rounds),
            end - start,
            start=start,
            conditions=self._conditions,
        )

    def _before(self, start: int) -> list[tuple[int, int]]:
        """What this run has revealed before it makes round `start` and those after it. The same bits again reveal
        nothing new: then these are the rounds up to `start` alone, and only those that were charged to this very
        run (a checkpoint may be another one's). With fresh noise every stretch that was charged counts."""
        charged = self.ledger.charged(self.run, self.dataset)
        if not self._replay:
            return charged
        first = start
        for begun, stop in sorted(charged, reverse=True):
            if begun < first <= stop:
                first = begun
        return [(first, start)] if first < start else []

    def _charge(self, start: int, stop: int, end: int) -> None:
        # Also rounds that add nothing are an entry: what comes later is charged on top of them.
        while not self.ledger.charge(
            self.run,
            self.dataset,
            self._charges(self._charged, start, stop),
            rounds=(start, stop),
            conditions=self._conditions,
            replay=self._replay,
            plan=None if self._charged else lambda: self._charges([], start, end),
            on_top_of=None if self._replay else self._charged,
            held_out=self._held_out,
            public=self._public,
        ):
            self._charged = self._before(start)  # another process continues this run too

    def _charges(self, before: Sequence[tuple[int, int]], start: int, stop: int) -> list[Charge]:
        if self._client is not None:
            return [Charge(EVERY_RECORD, compress(self._seen(start, stop).get(self._client, [])))]
        # What the run reveals with these rounds less what it was charged before: summed over any chunks it holds
        # what the most exposed client has revealed.
        if self._everyone:  # then these rounds add what they reveal by themselves
            before = []
        added = self._exposed([*before, (start, stop)]) - self._exposed(before)
        everyone = Charge(EVERY_RECORD, list(added.items()))
        if self._clients is None:
            return [everyone]
        # All are named: who is picked in none of these rounds reveals nothing in them.
        seen = self._seen(start, stop)
        named = enumerate(self._clients)
        return [everyone, *(Charge(name, compress(seen.get(client, []))) for client, name in named)]

    def _seen(self, start: int, stop: int) -> dict[int, list[tuple[Release, ...]]]:
        """What each client reveals in rounds start..stop-1."""
        seen: dict[int, list[tuple[Release, ...]]] = {}
        for index in range(start, stop):
            cohort = self._plan.cohorts[index]
            for client in np.asarray(cohort).tolist():
                if self._client in (None, client):
                    info = RoundInfo(index, client, int(self._plan.client_sizes[client]), len(cohort))
                    seen.setdefault(client, []).append(self._releases(info))
        return seen

    def _exposed(self, stretches: Sequence[tuple[int, int]]) -> Counter[tuple[Release, ...]]:
        """What the most exposed client reveals in these stretches of rounds, each with noise of its own."""
        numbers = tuple(number for start, stop in stretches for number in range(start, stop))
        if not numbers:
            return Counter()
        if numbers not in self._answers:
            plan = self._plan
            if self._alike is None:
                self._alike = alike(self._releases, plan.client_sizes, plan.cohorts)
            (everyone,) = classes(
                self._releases,
                plan.client_sizes,
                [plan.cohorts[number] for number in numbers],
                joint=True,
                lattice=plan.lattice,
                groups=self._alike,
                numbers=numbers,
            )
            while len(self._answers) > 2:  # the whole run, what was charged and what comes: these are asked again
                self._answers.pop(next(iter(self._answers)))
            self._answers[numbers] = Counter(dict(everyone.most))
        return self._answers[numbers]


def charged_in_all(accountant: Accountant, stretches: Sequence[tuple[int, int]]) -> Charge:
    """What a run on one table will be charged for every record, if it pays for these stretches one by one."""
    no_ledger = cast(Ledger, None)  # none is asked
    run = Spending(no_ledger, accountant, run="", dataset="", clients=None, replay=False)
    counts: Counter[tuple[Release, ...]] = Counter()
    for number, (start, stop) in enumerate(stretches):
        (charge,) = run._charges(stretches[:number], start, stop)
        counts.update(dict(charge.participations))
    return Charge(EVERY_RECORD, list(counts.items()))


def rounds_in(stretches: Sequence[tuple[int, int]]) -> int:
    """How many rounds there are in these stretches, repeated ones included."""
    return sum(stop - start for start, stop in stretches)


class JointSpending:
    """The accounts of one run on several files: no round is made that one of them cannot pay."""

    def __init__(self, accounts: Sequence[Spending]) -> None:
        self._accounts = accounts
        self.ledger, self.dataset = accounts[0].ledger, ", ".join(account.dataset for account in accounts)

    def stretches(self) -> list[tuple[int, int]]:
        """As `Spending.stretches`, of rounds that all files paid for."""
        return min((account.stretches() for account in self._accounts), key=rounds_in)

    def pay(self, start: int, stop: int) -> int:
        """As `Spending.pay`, for all files. Nothing is charged before every file is found to afford it."""
        for account in self._accounts:
            stop = account.affordable(start, stop)
        for account in self._accounts:
            # Where another process has spent in between, one file may pay for rounds that are not made.
            stop = account.pay(start, stop)
        return stop


__all__ = [
    "EVERY_RECORD",
    "Budget",
    "JointSpending",
    "Ledger",
    "Spending",
    "charged_in_all",
    "client_name",
    "data_id",
    "rounds_in",
]
