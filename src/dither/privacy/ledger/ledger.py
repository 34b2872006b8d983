"""`Ledger`: charges, budgets and what was spent, over the file of `store` and the accounts of `book`."""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import platformdirs

from dither.errors import LedgerError
from dither.privacy.accounting import ZERO_OUT, Facts, honest_others

from .book import Book
from .entries import (
    BUDGET,
    CHARGE,
    GENESIS,
    Budget,
    Charge,
    Entry,
    Row,
    Spent,
    decode,
    decode_charges,
    encode_budget,
    encode_charges,
)
from .store import Store, read_anchor


class Ledger:
    """What was spent on which data; see the package's docstring for what it protects against.

    `path` is created when missing, with its secret key beside it (`<path>.key`, mode 0600). `anchor` names one
    or several files kept apart, which remember the newest entry: they are checked when the ledger is opened and
    before every charge, and written after it. Opening checks the whole chain. Safe for threads and forks.
    """

    def __init__(self, path: Path | str, *, anchor: Path | str | Sequence[Path | str] | None = None) -> None:
        anchors = [anchor] if isinstance(anchor, Path | str) else list(anchor or ())
        self._store = Store(Path(path), [Path(each) for each in anchors])
        self._book = Book()
        self._lock = threading.RLock()
        self._catch_up()

    @staticmethod
    def default_path() -> Path:
        """$DITHER_LEDGER, or ledger.sqlite in the user's data folder."""
        named = os.environ.get("DITHER_LEDGER")
        return Path(named) if named else platformdirs.user_data_path("dither") / "ledger.sqlite"

    @property
    def path(self) -> Path:
        return self._store.path

    @property
    def key_path(self) -> Path:
        """The secret key: back it up with the ledger, give it to nobody."""
        return self._store.key_path

    # Data sets

    def fingerprint(self, *arrays: np.ndarray) -> str:
        """The id of a data set in this ledger: a keyed hash over shapes, types and bytes, in order.

        The same arrays have the same id in this ledger, and one that says nothing in any other.
        """
        digest = hashlib.blake2b(key=self._store.fingerprint_key, digest_size=16)
        for given in arrays:
            array = np.asarray(given)
            if array.dtype.hasobject:
                raise ValueError(f"an array of dtype {array.dtype} has no bytes of its own; convert it first")
            header = repr((np.lib.format.dtype_to_descr(array.dtype), array.shape)).encode()
            digest.update(len(header).to_bytes(8, "big") + header)
            flat = np.ascontiguousarray(array).reshape(-1)
            digest.update(flat.view(np.uint8).data if flat.nbytes else b"")
        return digest.hexdigest()

    # Budgets

    def set_budget(self, dataset: str, budget: Budget | None, client: str | None = None) -> str:
        """A budget for one client, or for every client of the data set that has none of its own.

        None removes it (a client then falls back to the data set's). A budget below what is spent already is
        allowed: nothing more is. The change is an entry of the chain; returns the new head.
        """
        with self._lock:
            with self._current(write=True) as connection:
                row = self._store.append(connection, BUDGET, dataset, "", encode_budget(budget, client))
            return self._committed(row)

    def budget(self, dataset: str, client: str | None = None) -> Budget | None:
        """The budget that binds a client: its own, else the data set's. Without a client: the data set's."""
        with self._lock:
            self._catch_up()
            if client is None:
                return self._book.budgets.get((dataset, None))
            return self._book.budget(dataset, client)

    # Charges

    def charge(
        self,
        run: str,
        dataset: str,
        charges: Sequence[Charge],
        *,
        rounds: tuple[int, int],
        facts: Facts | None = None,
        replay: bool = False,
    ) -> str:
        """Record what rounds [start, stop) of a run will reveal, all of it or nothing; returns the new head.

        Call it before anything leaves. `BudgetExhausted` names the first client that cannot pay, and nothing
        is charged. When it returns, the charge is on the disk; if it raises `LedgerError`, treat it as not
        charged and release nothing (it may have been, which over-counts).

        `run` must be unique to the run. Charging the same rounds again counts again, as a run that is resumed
        with fresh randomness reveals more. With `replay`, an identical earlier charge (same run, data set,
        rounds, clients, releases and facts) stands for this one. That is sound only if all randomness of these
        rounds (cohorts, batches, noise) is seeded and the inputs are the same, so that the very same bits
        leave twice, which reveals nothing new. With noise from the operating system, or after any change of
        code, data, device or settings that moves one bit, an adversary averages two releases: leave it off.
        """
        facts = _checked(facts)
        start, stop = rounds
        if not 0 <= start < stop:
            raise ValueError(f"rounds={rounds}: the start must be at least 0 and before the stop")
        content = encode_charges(charges, (start, stop), facts)
        charged = decode_charges(content)
        with self._lock:
            # First without the lock, so that other processes do not wait for the accountant; what it found is
            # remembered, and counts again only if somebody else has charged in between.
            for write in (False, True):
                with self._current(write=write) as connection:
                    if replay and self._book.has_charged(dataset, run, content):
                        return self._head()
                    self._book.check(dataset, run, charged)
                    if write:
                        row = self._store.append(connection, CHARGE, dataset, run, content)
            return self._committed(row)

    def affordable(
        self,
        dataset: str,
        per_round: Callable[[int], Sequence[Charge]],
        num_rounds: int,
        *,
        run: str = "",
        start: int = 0,
        facts: Facts | None = None,
    ) -> int:
        """The largest n such that every client can pay for the first n of `num_rounds` coming rounds.

        `per_round(i)` is what the i-th coming round (i = 0, 1, ...) will reveal; `start` is that round's number
        in the run. Nothing is reserved: `charge` checks again. What was found affordable is remembered, so
        that charging these rounds afterwards, in any chunks, needs no accounting.
        """
        if num_rounds < 0:
            raise ValueError(f"num_rounds={num_rounds} is negative")
        facts = _checked(facts)
        with self._lock:
            self._catch_up()
            return self._book.affordable(dataset, run, start, per_round, num_rounds, facts)

    # Reports

    def spent(
        self,
        dataset: str,
        client: str | None = None,
        *,
        delta: float = 1e-5,
        view: str = "upload",
        adjacency: str = ZERO_OUT,
    ) -> list[Spent]:
        """What one client, or every known client, has spent: at its budget's δ, view and adjacency, or at the
        given ones where it has no budget."""
        with self._lock:
            self._catch_up()
            names = {name for owner, name in self._book.budgets if owner == dataset and name is not None}
            names = {client} if client is not None else names | self._book.accounts.get(dataset, {}).keys()
            result = []
            for name in sorted(names):
                account, budget = self._book.account(dataset, name), self._book.budget(dataset, name)
                terms = budget or Budget(0.0, delta, view, adjacency).check()
                result.append(
                    Spent(
                        client=name,
                        epsilon=self._book.epsilon(account, terms),
                        delta=terms.delta,
                        view=terms.view,
                        adjacency=terms.adjacency,
                        participations=account.participations(),
                        runs=tuple(account.runs),
                        budget=budget,
                    )
                )
            return result

    def datasets(self) -> list[str]:
        """The data sets with a charge or a budget, by id."""
        with self._lock:
            self._catch_up()
            return sorted(self._book.accounts.keys() | {dataset for dataset, _ in self._book.budgets})

    def history(self, dataset: str | None = None) -> list[Entry]:
        """All charges and changes of budgets, oldest first, of one data set or of all; checks the chain."""
        with self._store.transaction(write=False) as connection:
            rows = self._store.read(connection, [])
        return [decode(row) for row in rows if row.kind != GENESIS and dataset in (None, row.dataset)]

    # The chain

    def head(self) -> str:
        """The newest entry as "position:hash": remembered elsewhere, it is an anchor."""
        with self._lock:
            self._catch_up()
            return self._head()

    def verify(self, anchors: Iterable[Path | str] = ()) -> None:
        """LedgerError unless the file is sound, every link of the chain fits, and the chain passes through the
        ledger's own anchors and the given ones (files, or heads as `head` returns them)."""
        seen = [*self._store.own_anchors(), *(read_anchor(anchor) for anchor in anchors)]  # before the snapshot
        with self._lock, self._store.transaction(write=False) as connection:
            self._store.check_integrity(connection)
            hashes = [row.hash for row in self._store.read(connection, [])]
            if hashes[: len(self._store.hashes)] != self._store.hashes:
                raise LedgerError(f"{self.path}: the file was replaced while in use; restore it from a backup")
            self._store.check_anchors(hashes, seen)

    def _head(self) -> str:
        return f"{len(self._store.hashes) - 1}:{self._store.hashes[-1]}"

    @contextmanager
    def _current(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """A transaction in which memory holds what any process has added, checked against the anchors."""
        anchors = self._store.own_anchors()  # before the snapshot: others move them on
        with self._store.transaction(write=write) as connection:
            self._take_in(self._store.read(connection, self._store.hashes))
            self._store.check_anchors(self._store.hashes, anchors)
            yield connection

    def _catch_up(self) -> None:
        with self._current(write=False):
            pass

    def _committed(self, row: Row) -> str:
        """A row of ours that is on the disk: into memory, and to the anchors; returns the head."""
        self._take_in([row])
        self._store.write_anchors(row.position, row.hash)
        return f"{row.position}:{row.hash}"

    def _take_in(self, rows: Iterable[Row]) -> None:
        try:
            for row in rows:
                self._book.apply(row)
                self._store.hashes.append(row.hash)
        except BaseException:
            # never go on with half of the entries: whoever tries again starts from the first
            self._store.hashes, self._book = [], Book()
            raise


def _checked(facts: Facts | None) -> Facts:
    """ValueError for facts that no accountant can use: they must not enter the ledger."""
    facts = Facts() if facts is None else facts
    honest_others(facts.cohort_size, facts.colluders)
    if facts.others_noise is not None and not 0.0 <= facts.others_noise < math.inf:
        raise ValueError(f"others_noise={facts.others_noise} must be at least 0 and finite")
    if facts.exposures < 0:
        raise ValueError(f"exposures={facts.exposures} is negative")
    return facts
