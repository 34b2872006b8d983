"""A run and the ledger: what its coming rounds will reveal, charged before they are computed.

Whose account? A record may sit with client 3 today and with client 5 tomorrow, or be dealt out by another
column: so every run is charged to the account "every record" with what its most exposed client reveals, and the
budget of a data set holds for that account. With `data.partition = "column"` each institution has an account of
its own besides, which its own budget may limit further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dither import data
from dither.accounting import Facts, accountant, compress
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.errors import BudgetExhausted
from dither.types import Release, RoundInfo

EVERY_RECORD = "every record"


def data_id(ledger: Ledger, *, path: str = "", name: str = "", digest: str = "") -> str:
    """The ledger's id of a data set: of the bytes of the user's own file (of a folder: of x.npy and y.npy),
    however it is encoded; of the name of a set of the catalogue. `digest` is the `ledger_digest` of a folder that
    is loaded already: what was read is charged, whatever lies at `path` by now."""
    own = Path(path).expanduser()
    if path and (digest or own.is_dir()):
        content = f"folder: {digest or data.folder_digest(own)}".encode()
    else:
        content = own.read_bytes() if path else f"catalogue: {name}".encode()
    return ledger.fingerprint(np.frombuffer(content, np.uint8))


class Spending:
    """The account of one run in a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        run: str,
        dataset: str,
        releases: Callable[[RoundInfo], tuple[Release, ...]],
        sizes: np.ndarray,
        cohorts: Sequence[np.ndarray],
        clients: Sequence[str] | None,
        facts: Facts,
        replay: bool,
    ) -> None:
        self.ledger, self.run, self.dataset = ledger, run, dataset
        self._releases = accountant.charged(releases, facts)
        self._sizes, self._cohorts = sizes, cohorts
        self._clients, self._facts, self._replay = clients, facts, replay
        self._alike: list[np.ndarray] | None = None  # asked once
        self._first, self._paid = 0, 0  # all rounds from the one up to the other are charged to this run
        self._so_far: tuple[tuple[int, int], Counter[tuple[Release, ...]]] = ((0, 0), Counter())  # newest question

    def pay(self, start: int, stop: int) -> int:
        """Charge rounds start..stop-1, or as many of them as every client can pay; returns where to stop.

        When this returns, the charge is on the disk. Raises `BudgetExhausted` when not even one round can be paid.
        """
        if self._replay and start != self._paid:
            self._first = self.ledger.charged_since(self.run, self.dataset, start)
        try:
            self._charge(start, stop)
        except BudgetExhausted:
            affordable = self.ledger.affordable(
                self.dataset,
                lambda i: self._charges(start + i, start + i + 1),
                stop - start,
                run=self.run,
                start=start,
                facts=self._facts,
            )
            if affordable == 0:
                raise
            stop = start + affordable
            self._charge(start, stop)
        self._paid = stop
        return stop

    def _charge(self, start: int, stop: int) -> None:
        # Of a run that may be replayed also rounds that add nothing are an entry: they are known to be its own.
        charges = [charge for charge in self._charges(start, stop) if charge.participations or self._replay]
        if charges:
            self.ledger.charge(
                self.run, self.dataset, charges, rounds=(start, stop), facts=self._facts, replay=self._replay
            )

    def _charges(self, start: int, stop: int) -> list[Charge]:
        if self._replay:
            # The same bits again reveal nothing new. So what the run reveals up to `stop` less what it was charged
            # up to `start` will do: summed over any chunks it holds what the most exposed client has revealed.
            # Only rounds that were charged to this very run are subtracted: a checkpoint may be another one's.
            known, before = self._so_far
            before = before if known == (self._first, start) else self._exposed(self._first, start)
            self._so_far = ((self._first, stop), self._exposed(self._first, stop))
            added = self._so_far[1] - before
        else:
            # With fresh noise a resumed chunk is another release: each pays for its own most exposed client.
            added = self._exposed(start, stop)
        everyone = Charge(EVERY_RECORD, list(added.items()))
        if self._clients is None:
            return [everyone]
        own: dict[int, list[tuple[Release, ...]]] = {}
        for index in range(start, stop):
            cohort = self._cohorts[index]
            for client in np.asarray(cohort).tolist():
                info = RoundInfo(index, client, int(self._sizes[client]), len(cohort))
                own.setdefault(client, []).append(self._releases(info))
        return [everyone, *(Charge(self._clients[client], compress(seen)) for client, seen in sorted(own.items()))]

    def _exposed(self, start: int, stop: int) -> Counter[tuple[Release, ...]]:
        if start == stop:
            return Counter()
        # Rounds keep their numbers: what is revealed may depend on them.
        cohorts = [np.zeros(0, np.int32)] * start + list(self._cohorts[start:stop])
        if self._alike is None:
            self._alike = accountant.alike(self._releases, self._sizes, self._cohorts)
        (everyone,) = accountant.classes(self._releases, self._sizes, cohorts, joint=True, groups=self._alike)
        return Counter(dict(everyone.most))


__all__ = ["EVERY_RECORD", "Budget", "Ledger", "Spending", "data_id"]
