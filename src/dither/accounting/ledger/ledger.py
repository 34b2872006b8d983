"""`Ledger`: charges, budgets and what was spent, over the file of `store` and the accounts of `book`."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import platformdirs

from dither.accounting import ZERO_OUT, Conditions, honest_others
from dither.accounting.ledger import entries, sketch, store
from dither.accounting.ledger.book import Book, run_name
from dither.accounting.ledger.entries import About, Budget, Charge, Entry, Row, Spent
from dither.accounting.ledger.store import Store, read_anchor
from dither.data.hashing import RecordHashes
from dither.errors import BudgetExhausted, ConfigError, DataError, LedgerError

_HEX = re.compile("[0-9a-f]{8,}")


class Ledger:
    """What was spent on which data; see the package's docstring for what it protects against.

    `path` is created if it is missing, with its secret key beside it (`<path>.key`, mode 0600). `anchor` names one
    or several files elsewhere that remember the newest entry. They are checked when the ledger is opened and
    before every charge, and written after it. One more is kept in the user's state folder (`store`), unless
    `anchored` is False. Opening checks the whole chain. The ledger is safe for threads and forks.
    """

    def __init__(
        self, path: Path | str, *, anchor: Path | str | Sequence[Path | str] | None = None, anchored: bool = True
    ) -> None:
        anchors = [anchor] if isinstance(anchor, Path | str) else list(anchor or ())
        state = store.state_folder("ledgers") if anchored else None
        self._store = Store(Path(path), [Path(each) for each in anchors], state)
        self._book = Book()
        self._lock = threading.RLock()
        self._catch_up()
        self._store.remember()

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
        """The secret key: back it up with the ledger, and keep it secret."""
        return self._store.key_path

    # Data sets

    def fingerprint(self, *arrays: np.ndarray) -> str:
        """The id of a data set in this ledger: a keyed hash over shapes, types and bytes, in order.

        The same arrays have the same id in this ledger, and an unrelated one in any other.
        """
        digest = hashlib.blake2b(key=self._store.fingerprint_key, digest_size=16)
        for given in arrays:
            array = np.asarray(given)
            if array.dtype.hasobject:
                raise ValueError(f"an array of dtype {array.dtype} cannot be hashed; convert it first")
            header = repr((np.lib.format.dtype_to_descr(array.dtype), array.shape)).encode()
            digest.update(len(header).to_bytes(8, "big") + header)
            flat = np.ascontiguousarray(array).reshape(-1)
            digest.update(flat.view(np.uint8).data if flat.nbytes else b"")
        return digest.hexdigest()

    def identify(
        self,
        dataset: str,
        rows: Callable[[], RecordHashes] | None = None,
        *,
        file: str = "",
        name: str = "",
        new_ledger: bool = False,
    ) -> None:
        """Say which records a data set holds, before it is charged: `rows()` returns their hashes
        (`dither.data.hashing`) and is called once. With the `name` of a known data set, both are charged together
        from then on. Any other name becomes the name of this data set.

        Raises `DataError` if the records overlap with a data set that is not named, or with one that another
        ledger of this user knows, unless `new_ledger` confirms the latter.
        """
        if not name.isprintable() or len(name) > 64:
            raise ConfigError(f"data.id={name!r} must be at most 64 printable letters")
        if _HEX.fullmatch(name) and self.find(name) is None:
            raise ConfigError(f"data.id={name!r}: no data set of {self.path} has an id that begins with it")
        with self._lock:
            self._catch_up()
            target = self._book.find(name) if name else None
            about = About(
                file=file,
                name=name if name and target is None else "",
                same=(target,) if target not in (None, self._book.root(dataset)) else (),
            )
            known = list(self._book.sketches)
            compared = rows is None or dataset in {each for each, old in known if old.parts is not None}
            if compared and rows is not None and not store.remembers_records(self._store.id, dataset):
                store.remember_records(rows(), self._store.id, self.path, dataset, file)
            if compared and not about.name and not about.same:
                return
            if target is not None:
                self._book.check_same(dataset, target)
            if rows is not None and not compared:
                numbers = rows()
                scan = sketch.scan(numbers, self._store.sketch_key, [each for _, each in known])
                if shared := self._overlap(file or dataset[:8], dataset, scan, besides=target):
                    raise DataError(shared)
                with store.alone():  # of two ledgers that meet new records at once, one comes second
                    elsewhere = self.elsewhere(numbers)
                    if elsewhere and not new_ledger:
                        raise DataError(_known_elsewhere(file or dataset[:8], elsewhere))
                    for each in elsewhere:  # their ledgers do not hear of it otherwise
                        (store.state_folder("besides") / each.entry).touch()
                    store.remember_records(numbers, self._store.id, self.path, dataset, file)
                about = about._replace(
                    sketch=scan.sketch, besides=tuple(sorted({each.ledger for each in elsewhere}))
                )
            if not self._add(dataset, about, known=len(known)):
                self.identify(dataset, rows, file=file, name=name, new_ledger=new_ledger)

    def known_as(self, dataset: str, rows: RecordHashes, *, file: str) -> str:
        """Which data set these records are known as, in words; empty if they are new, or have this account."""
        with self._reading() as book:
            scan = sketch.scan(rows, self._store.sketch_key, [each for _, each in book.sketches])
            return self._overlap(file, dataset, scan)

    def elsewhere(self, rows: RecordHashes) -> list[store.KnownRecords]:
        """What other ledgers of this user know of these records."""
        return [each for each in store.known_records(rows) if each.ledger != self._store.id]

    def declare_other(self, dataset: str, than: str) -> None:
        """The owner's declaration that two data sets hold different records, although they share rows."""
        self._add(dataset, About(other=(than,)))

    def find(self, name: str) -> str | None:
        """The data set with this name, or whose id begins with it (eight letters or more)."""
        with self._reading() as book:
            return book.find(name)

    def called(self, dataset: str) -> str:
        """A readable name of a data set: its name, else the beginning of its id; and a file."""
        with self._reading() as book:
            return book.called(dataset)

    def _add(self, dataset: str, about: About, known: int | None = None) -> bool:
        """Whether it was added: not where another process has come with records that were not compared."""
        with self._lock:
            with self._current(write=True) as connection:
                if known not in (None, len(self._book.sketches)):
                    return False
                row = self._store.append(connection, entries.DATA, dataset, "", entries.encode_about(about))
            self._committed(row)
            return True

    def _overlap(self, what: str, dataset: str, scan: sketch.Scan, *, besides: str | None = None) -> str:
        """What a data set shares with others, and what to do about it; empty if it is nothing."""
        shared = [found for found in self._book.overlaps(dataset, scan) if found[1] != besides]
        if not shared:
            return ""
        most, other = shared[0]
        name = self._book.called(other).split(" (")[0]
        more = f" (so do {len(shared) - 1} others)" if len(shared) > 1 else ""
        return (
            f"{what!r} and data set {self._book.called(other)} of {self.path} share {most}{more}: set "
            f"data.id={name!r} (`dither budget same {what} {name}`) to charge them together, or, if they are "
            f"other people's, say so with `dither budget other {what} {name}`"
        )

    # Budgets

    def client(self, dataset: str, name: str) -> str:
        """The account that a client's name stands for: itself with its column ("site=north"), or the one known
        account of this value."""
        with self._reading() as book:
            root = book.root(dataset)
            known = {*book.accounts.get(root, {}), *(each or "" for owner, each in book.budgets if owner == root)}
        named = sorted(each for each in known if each.endswith(f"={name}"))
        if "=" in name or (name in known and not named):
            return name
        if len(named) == 1:
            return named[0]
        example = " or ".join(named) or f"site={name}"
        raise ConfigError(f"client={name!r}: say which column it is a value of, such as {example}")

    def set_budget(
        self, dataset: str, budget: Budget | None, client: str | None = None, *, raising: bool = False
    ) -> str:
        """A budget for one client, or for every client of the data set that has none of its own.

        None removes it (a client then falls back to the data set's). A budget below what is already spent is
        allowed; nothing more can then be spent. A budget that allows more than before, in any term, needs
        `raising`. The change is an entry of the chain, with the previous budget. Returns the new head.
        """
        with self._lock:
            with self._current(write=True) as connection:
                was = self._book.budget(dataset, client)
                left = budget or (self._book.budget(dataset, None) if client else None)
                if was is not None and not raising and (left is None or not left.check().within(was)):
                    raise ConfigError(
                        f"this raises the budget from {was} to {left or 'none'}: confirm it with --yes (in Python "
                        "by raising=True)"
                    )
                row = self._store.append(
                    connection, entries.BUDGET, dataset, "", entries.encode_budget(budget, client, was)
                )
            return self._committed(row)

    def budget(self, dataset: str, client: str | None = None) -> Budget | None:
        """The budget that binds a client: its own, else the data set's. Without a client: the data set's."""
        with self._reading() as book:
            return book.budget(dataset, client)

    # Charges

    # reason: a charge states every fact it rests on; a record of them would have one user
    def charge(
        self,
        run: str,
        dataset: str,
        charges: Sequence[Charge],
        *,
        rounds: tuple[int, int],
        conditions: Conditions | None = None,
        replay: bool = False,
        plan: Callable[[], Sequence[Charge]] | None = None,
        on_top_of: Sequence[tuple[int, int]] | None = None,
        held_out: str = "",
        public: bool = False,
    ) -> str:
        """Record what rounds [start, stop) of a run will reveal, all of it or nothing; returns the new head.

        Call it before anything leaves. `BudgetExhausted` names the first client that cannot pay; nothing
        is charged then. When the call returns, the charge is on disk. If it raises `LedgerError`, assume that
        nothing was charged and release nothing (it may have been charged, which over-counts).

        `run` must be unique to the run. Charging the same rounds again counts again, because a run that is resumed
        with fresh randomness reveals more. With `replay`, an identical earlier charge (same run, data set,
        rounds, clients, releases and conditions) covers this one. This is sound only if all randomness of
        these rounds (cohorts, batches, noise) is seeded and the inputs are the same: the very same bits then
        leave twice, which reveals nothing new. With noise from the operating system, or after any change of
        code, data, device or settings that changes one bit, an adversary can average two releases: leave it off.

        `plan()` is the most that the whole run will reveal, including these rounds. It is called and recorded
        with the first charge of the run, before its first output; the filter over runs (`ledger.filter`) relies
        on it. Without it, the ε of several sampled runs is labelled as not covered (`Spent.not_covered`).

        A charge that was computed from earlier charges of the run is right only `on_top_of` exactly those
        stretches (`charged`). If another process has charged the run since, nothing is charged and "" is returned.

        `held_out` names the records of the data set that the run does not use. With `public`, the run declares
        them public: `SpecError` if any charge before this one did not leave them out.
        """
        conditions = _checked(conditions)
        start, stop = rounds
        if not 0 <= start < stop:
            raise ValueError(f"rounds={rounds}: the start must be at least 0 and before the stop")
        content = entries.encode_charges(charges, (start, stop), conditions, held_out=held_out)
        charged = entries.decode_charges(content)
        planned: Sequence[Charge] | None = None
        with self._lock:
            # First without the lock, so that other processes do not wait for the accountant; what it found is
            # remembered, and counts again only if somebody else has charged in between.
            for write in (False, True):
                with self._current(write=write) as connection:
                    if on_top_of is not None and list(on_top_of) != self._book.rounds.get((dataset, run), []):
                        return ""
                    if replay and self._book.has_charged(dataset, run, content):
                        return self._head()
                    if public:
                        self._book.check_public(dataset, held_out)
                    if plan is not None and not self._book.is_registered(dataset, run):
                        planned = plan() if planned is None else planned
                        written = entries.encode_charges(charges, (start, stop), conditions, planned, held_out)
                        self._book.check(dataset, run, entries.decode_charges(written))
                    else:
                        written = content
                        self._book.check(dataset, run, charged)
                    if write:
                        row = self._store.append(connection, entries.CHARGE, dataset, run, written)
            return self._committed(row)

    def check_public(self, dataset: str, held_out: str) -> None:
        """`SpecError` if a charge of a data set did not leave out these records, which a run declares public."""
        with self._reading() as book:
            book.check_public(dataset, held_out)

    def is_registered(self, dataset: str, run: str) -> bool:
        """Whether a run has said, with its first charge, what all of it will reveal."""
        with self._reading() as book:
            return book.is_registered(dataset, run)

    def affordable(
        self,
        run: str,
        dataset: str,
        charges: Callable[[int], Sequence[Charge]],
        most: int,
        *,
        start: int = 0,
        conditions: Conditions | None = None,
    ) -> int:
        """The largest n up to `most` such that `charge` would accept the first n coming rounds of a run.

        `charges(n)` is what they reveal together, and `start` the number of the first. Nothing is reserved:
        `charge` checks again. The answer is remembered, so charging these rounds afterwards, in any chunks,
        needs no accounting.
        """
        conditions = _checked(conditions)
        low, high, middle = 0, most, most
        while low < high:
            content = entries.encode_charges(charges(middle), (start, start + middle), conditions)
            try:
                with self._reading() as book:
                    book.check(dataset, run, entries.decode_charges(content))
                low = middle
            except BudgetExhausted:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def charged(self, run: str, dataset: str) -> list[tuple[int, int]]:
        """The stretches of rounds that a run was charged for, in the order of the charges."""
        with self._reading() as book:
            return list(book.rounds.get((dataset, run), ()))

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
        given ones if it has no budget."""
        with self._reading() as book:
            root = book.root(dataset)
            names = {name for owner, name in book.budgets if owner == root and name is not None}
            names = {client} if client is not None else names | book.accounts.get(root, {}).keys()
            besides, result = self._store.is_besides(book.alike(dataset)), []
            for name in sorted(names):
                account, budget = book.account(dataset, name), book.budget(dataset, name)
                terms = budget or Budget(0.0, delta, view, adjacency).check()
                result.append(
                    Spent(
                        client=name,
                        epsilon=book.epsilon(account, terms),
                        delta=book.delta(account, terms),
                        view=terms.view,
                        adjacency=terms.adjacency,
                        participations=account.participations(),
                        runs=tuple(dict.fromkeys(map(run_name, account.runs))),
                        budget=budget,
                        not_covered=book.not_covered(dataset, name, account, terms, besides=besides),
                        numbers=book.numbers(account, terms),
                    )
                )
            return result

    def total(self, dataset: str, client: str, terms: Budget) -> tuple[float, float]:
        """Proven ε of everything that was charged to a client, at these terms, whatever its budget is for; and the
        δ at which it holds."""
        with self._reading() as book:
            account = book.account(dataset, client)
            return book.epsilon(account, terms.check()), book.delta(account, terms)

    def spent_by_run(self, dataset: str, client: str, terms: Budget) -> dict[str, float]:
        """Proven ε of each run of a client by itself, oldest first, at the terms of a budget."""
        with self._reading() as book:
            return book.by_run(book.account(dataset, client), terms.check())

    def datasets(self) -> list[str]:
        """The data sets with a charge or a budget, by id."""
        with self._reading() as book:
            return sorted(book.accounts.keys() | {dataset for dataset, _ in book.budgets})

    def history(self, dataset: str | None = None) -> list[Entry]:
        """All charges, changes of budgets and declarations about data, oldest first, for one data set or all.
        Checks the chain."""
        with self._reading() as book:
            root = book.root
            with self._store.transaction(write=False) as connection:
                rows = self._store.read(connection, [])
            wanted = None if dataset is None else root(dataset)
            return [
                entries.decode(row)
                for row in rows
                if row.kind != entries.GENESIS and wanted in (None, root(row.dataset))
            ]

    # The chain

    def head(self) -> str:
        """The newest entry as "position:hash": remembered elsewhere, it is an anchor."""
        with self._reading():
            return self._head()

    def verify(self, anchors: Iterable[Path | str] = ()) -> None:
        """Raises LedgerError unless the file is intact, every link of the chain fits, and the chain passes through
        the ledger's own anchors and the given ones (files, or heads as `head` returns them)."""
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

    @contextmanager
    def _reading(self) -> Iterator[Book]:
        """The accounts with what any process has added."""
        with self._lock:
            self._catch_up()
            yield self._book

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


def _checked(conditions: Conditions | None) -> Conditions:
    """ValueError for conditions that no accountant can use: they must not enter the ledger."""
    conditions = Conditions() if conditions is None else conditions
    honest_others(conditions.cohort_size, conditions.colluders)
    if conditions.others_noise is not None and not 0.0 <= conditions.others_noise < math.inf:
        raise ValueError(f"others_noise={conditions.others_noise} must be at least 0 and finite")
    if conditions.exposures < 0:
        raise ValueError(f"exposures={conditions.exposures} is negative")
    return conditions


def _known_elsewhere(what: str, found: list[store.KnownRecords]) -> str:
    most = max(found, key=lambda each: each.shared)
    return (
        f"{what!r} and {most.file or 'data'} in another ledger, {most.path}, share {most.shared}: "
        f"charge that one (--ledger), or begin a second account of them with --new-ledger"
    )
