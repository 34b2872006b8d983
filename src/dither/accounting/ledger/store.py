"""The ledger's file, its secret key, its anchors, and the user's state folder: durable, shared by many processes.

Every operation opens its own connection and closes it, so that a ledger survives forks and threads, and the
file is complete by itself (no write-ahead log left behind) whenever nobody is using it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import platformdirs

from dither.accounting.ledger.entries import DATA, FORMAT, GENESIS, Row, canonical, row_hash
from dither.accounting.ledger.sketch import Overlap, Sketch, scan
from dither.data.hashing import RecordHashes
from dither.errors import LedgerError

BUSY_SECONDS = 60.0
_APPLICATION = 0x44495448  # "DITH" in the file's header
_COLUMNS = ", ".join(Row._fields)
_CREATE = """CREATE TABLE entries (
    position INTEGER PRIMARY KEY, time TEXT NOT NULL, kind TEXT NOT NULL, dataset TEXT NOT NULL,
    run TEXT NOT NULL, content TEXT NOT NULL, hash TEXT NOT NULL)"""
_NO_HASH = "0" * 64
_ID = re.compile(r'"ledger":"([0-9a-f]{32})"')
_HEAD = re.compile(r"(\d+):([0-9a-f]{64})")
_RESTORE = "restore it (with the files beside it) from a backup"


class Anchor(NamedTuple):
    """A head seen earlier, kept apart from the ledger: the chain must still pass through it."""

    ledger: str  # "" when unknown: a head passed as text
    position: int
    hash: str
    where: str


class Store:
    """Reads, checks and appends rows. `hashes[p]` is the verified hash of the row at position p."""

    def __init__(self, path: Path, anchors: Iterable[Path] = (), state: Path | None = None) -> None:
        self.path = Path(path)
        self.anchors = tuple(Path(anchor) for anchor in anchors)
        self._state = state  # where anchors of all ledgers are kept, apart from them
        self._outside: Path | None = None  # this ledger's anchor there
        self.key_path = self.path.with_name(self.path.name + ".key")
        self._new_key_path = self.path.with_name(self.path.name + ".key.new")
        self.hashes: list[str] = []
        self.id = ""
        with self._explained():
            if self._is_new():
                self._create()
        key = self._load_key()
        self._chain_key = _subkey(key, b"chain")
        self.fingerprint_key = _subkey(key, b"fingerprint")
        self.sketch_key = _subkey(key, b"sketch")[:16]
        # A foreign file is refused before anything in it changes.
        with self.transaction(write=False) as connection:
            first = connection.execute("SELECT content FROM entries WHERE position = 0").fetchone()
        with self._explained():
            self._use_wal()
        if state is not None and first and (found := _ID.search(str(first[0]))):
            self._outside = state / f"{found[1]}.json"
            others = [anchor for anchor in self._seen_here() if anchor != self._outside]
            if others:
                raise LedgerError(
                    f"{self.path}: not the ledger that was here, whose anchor is {others[0]}; {_RESTORE}, or "
                    "delete that file to forget all that was spent"
                )
            self.anchors += (self._outside,)

    # Transactions

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """One snapshot of the ledger; with `write`, alone among all processes and durable at the end."""
        with self._explained():
            if not self.path.is_file():
                raise LedgerError(f"{self.path}: the ledger is gone; {_RESTORE}")
            with closing(self._connect()) as connection:
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    self._check_schema(connection)
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: never create a file by accident, which would be an empty ledger
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: past the disk's own cache
        return connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's and the system's errors as one line that names the file and the fix."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LedgerError(
                    f"{self.path}: in use by another process for {BUSY_SECONDS:g} s; try again when that is done"
                ) from error
            if code in (
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_READONLY,
                sqlite3.SQLITE_FULL,
                sqlite3.SQLITE_PERM,
            ):
                raise LedgerError(
                    f"{self.path}: cannot be used ({error}); check the folder's permissions and free space"
                ) from error
            raise LedgerError(f"{self.path}: damaged, or not a ledger ({error}); {_RESTORE}") from error
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot be used ({error}); check permissions and free space"
            ) from error

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        application, version = self._header(connection)
        found = sorted(tuple(row) for row in connection.execute("SELECT type, name FROM sqlite_master"))
        if application != _APPLICATION or found != [("table", "entries")]:
            raise LedgerError(f"{self.path}: an SQLite file, but not a ledger; give another path, or {_RESTORE}")
        if not 1 <= version <= FORMAT:
            raise LedgerError(
                f"{self.path}: ledger format {version}, this Dither reads 1 to {FORMAT}; use a matching one"
            )

    @staticmethod
    def _header(connection: sqlite3.Connection) -> tuple[int, int]:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        return application, version

    # Creation

    def _is_new(self) -> bool:
        """Nothing there yet, or a creation that was interrupted before its first entry."""
        evidence = self._evidence()  # asked first: it appears after the file
        if not self.path.exists():
            if evidence:
                raise self._gone(evidence)
            return True
        if 0 < self.path.stat().st_size < 100:  # less than a header; SQLite would overwrite a single byte
            raise LedgerError(f"{self.path}: damaged, or not a ledger; {_RESTORE}")
        with closing(self._connect()) as connection:
            return self._is_empty(connection)

    def _is_empty(self, connection: sqlite3.Connection) -> bool:
        return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and (
            self._header(connection) == (0, 0)
        )

    def _evidence(self) -> Path | None:
        """A file that says that there was a ledger here: its key, or an anchor."""
        return next((path for path in (self.key_path, *self.anchors, *self._seen_here()) if path.exists()), None)

    def _seen_here(self) -> list[Path]:
        """The anchors outside that have seen a ledger at this path."""
        found = sorted(self._state.glob("*.json")) if self._state is not None else []
        return [anchor for anchor in found if _place(anchor) == str(self.path.resolve())]

    def _gone(self, evidence: Path) -> LedgerError:
        return LedgerError(
            f"{self.path}: the ledger is gone or empty, but {evidence} belongs to one; {_RESTORE}, "
            "or delete that file too to forget all that was spent"
        )

    def _create(self) -> None:
        """The file, its genesis entry and its key. The key is in place before the genesis is committed and
        gets its final name after, so the next process that opens the ledger completes what a kill interrupted."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not self._is_empty(connection):
                connection.execute("ROLLBACK")  # another process was first
                return
            if evidence := self._evidence():
                connection.execute("ROLLBACK")
                raise self._gone(evidence)
            key = secrets.token_bytes(32)
            write_atomically(self._new_key_path, key.hex() + "\n", mode=0o600)
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute(_CREATE)
            self._insert(
                connection,
                _subkey(key, b"chain"),
                _NO_HASH,
                Row(
                    0, _now(), GENESIS, "", "", canonical({"ledger": secrets.token_hex(16), "format": FORMAT}), ""
                ),
            )
            connection.execute("COMMIT")
        self._place_key()

    def _use_wal(self) -> None:
        """Switch a new file to write-ahead logging, for good. Another process may be at it, or be reading in
        the old mode; the next one to open the ledger then switches. Both modes are durable and safe."""
        with closing(self._connect()) as connection:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA busy_timeout = 1000")
                with suppress(sqlite3.OperationalError):
                    connection.execute("PRAGMA journal_mode = WAL")

    def _place_key(self) -> None:
        with suppress(FileNotFoundError):  # another process has placed it
            os.replace(self._new_key_path, self.key_path)
        _sync_folder(self.path.parent)

    def _load_key(self) -> bytes:
        for _ in range(2):
            for path in (self.key_path, self._new_key_path):
                with suppress(FileNotFoundError, ValueError):
                    key = bytes.fromhex(path.read_text(encoding="ascii"))
                    if len(key) == 32:
                        if path != self.key_path:
                            self._place_key()
                        return key
        raise LedgerError(f"{self.key_path}: the ledger's key is missing or damaged; restore it from a backup")

    # Rows

    def read(self, connection: sqlite3.Connection, hashes: list[str]) -> list[Row]:
        """The rows after those whose hashes are given, checked link by link."""
        start = max(len(hashes) - 1, 0)
        rows: list[Row] = []
        expected = start
        for values in connection.execute(
            f"SELECT {_COLUMNS} FROM entries WHERE position >= ? ORDER BY position",  # noqa: S608 (constants)
            (start if hashes else -(2**62),),
        ):
            row = Row(*values)
            if not all(isinstance(text, str) for text in row[1:]):
                raise self._broken(expected, "was edited")
            if row.position != expected:
                raise self._broken(expected, "is missing")
            if hashes and expected == start:
                if row.hash != hashes[start]:
                    raise self._broken(start, "is not the one seen before: the file was edited or replaced")
            else:
                previous = rows[-1].hash if rows else (hashes[-1] if hashes else _NO_HASH)
                if row.hash != row_hash(self._chain_key, previous, row):
                    reason = "was edited, or the key belongs to another ledger" if expected == 0 else "was edited"
                    raise self._broken(expected, f"{reason} (its hash does not fit the chain)")
                rows.append(row)
            expected += 1
        if expected == start:
            reason = "the file was rolled back while in use" if hashes else "the ledger has no first entry"
            raise self._broken(start, f"is missing: {reason}")
        if rows and rows[0].position == 0:
            self.id = json.loads(rows[0].content)["ledger"]
        return rows

    def append(self, connection: sqlite3.Connection, kind: str, dataset: str, run: str, content: str) -> Row:
        """Add a row behind the newest; it counts when the transaction ends."""
        if kind == DATA:  # not for a Dither that does not know them
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        row = Row(len(self.hashes), _now(), kind, dataset, run, content, "")
        return self._insert(connection, self._chain_key, self.hashes[-1], row)

    @staticmethod
    def _insert(connection: sqlite3.Connection, chain_key: bytes, previous: str, row: Row) -> Row:
        row = row._replace(hash=row_hash(chain_key, previous, row))
        marks = ", ".join("?" * len(row))
        connection.execute(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", row)  # noqa: S608 (constants)
        return row

    def _broken(self, position: int, what: str) -> LedgerError:
        return LedgerError(f"{self.path}: entry {position} {what}; {_RESTORE}")

    def check_integrity(self, connection: sqlite3.Connection) -> None:
        """SQLite's own check of the pages."""
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise LedgerError(f"{self.path}: damaged ({verdict}); {_RESTORE}")

    # Anchors

    def check_anchors(self, hashes: list[str], anchors: Iterable[Anchor]) -> None:
        """LedgerError unless the chain passes through every anchor."""
        for anchor in anchors:
            if anchor.ledger and anchor.ledger != self.id:
                raise LedgerError(
                    f"{self.path}: {anchor.where} is the anchor of ledger {anchor.ledger}, this is {self.id}; "
                    f"give the right ledger, or {_RESTORE}"
                )
            if anchor.position >= len(hashes):
                raise LedgerError(
                    f"{self.path}: the newest entry is {len(hashes) - 1}, but {anchor.where} has seen entry "
                    f"{anchor.position}: the ledger was rolled back; {_RESTORE}"
                )
            if anchor.hash != hashes[anchor.position]:
                raise LedgerError(
                    f"{self.path}: entry {anchor.position} is not the one that {anchor.where} has seen: "
                    f"the ledger was replaced or is a copy; {_RESTORE}"
                )

    def own_anchors(self) -> list[Anchor]:
        """The anchors that this ledger keeps, as far as they are written yet."""
        return [read_anchor(path) for path in self.anchors if path.exists()]

    def write_anchors(self, position: int, head: str) -> None:
        """Move the anchors on to a committed entry; never back, whichever process comes first."""
        if not self.anchors:
            return
        fields = {"ledger": self.id, "position": position, "head": head}
        with self.transaction(write=True):  # only for its lock
            for path in self.anchors:
                place = {"path": str(self.path.resolve())} if path == self._outside else {}
                if not path.exists() or read_anchor(path).position < position or (place and self._moved()):
                    # Where a crash brings back the older one, it still holds.
                    write_atomically(path, json.dumps({**fields, **place}) + "\n", mode=0o600, sync_folder=False)

    def is_besides(self, datasets: Iterable[str]) -> bool:
        """Whether another ledger began a second account of the records of one of these data sets."""
        return self._state is not None and any(
            (state_folder("besides") / f"{self.id}-{each}").exists() for each in datasets
        )

    def remember(self) -> None:
        """Write the anchor outside if there is none yet, or if the ledger has moved."""
        if self._outside is not None and (not self._outside.exists() or self._moved()):
            self.write_anchors(len(self.hashes) - 1, self.hashes[-1])

    def _moved(self) -> bool:
        place = _place(self._outside) if self._outside is not None else ""
        return place != str(self.path.resolve()) and not Path(place).is_file()


def _place(anchor: Path) -> str:
    """Where the ledger of an anchor outside lay."""
    return str(_anchor_fields(anchor, path=str)[0])


def _anchor_fields(source: Path | str, **kinds: Callable[[Any], Any]) -> list[Any]:
    """Fields of an anchor's file, each of its kind."""
    try:
        fields = json.loads(Path(source).read_text(encoding="utf-8"))
        return [kind(fields[name]) for name, kind in kinds.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{source}: not a readable anchor ({type(error).__name__}); restore it, or delete it if its ledger is "
            "known to be complete"
        ) from error


def read_anchor(source: Path | str) -> Anchor:
    """An anchor from its file, or from a head ("position:hash") that somebody remembered."""
    if isinstance(source, str) and (match := _HEAD.fullmatch(source)):
        return Anchor("", int(match[1]), match[2], f"the remembered head {match[1]}:{match[2][:8]}…")
    ledger, position, head = _anchor_fields(source, ledger=str, position=int, head=str)
    return Anchor(ledger, position, head, f"anchor {source}")


def write_atomically(path: Path, text: str, *, mode: int, sync_folder: bool = True) -> None:
    """Write a file beside its place, push it to the disk, and move it there: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    if sync_folder:
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # Windows cannot open folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _subkey(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, b"dither ledger " + purpose, hashlib.sha256).digest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# What is remembered of a user's ledgers outside of them, where neither an old copy of a ledger nor a new one
# brings it back:
#
#     ledgers/ID.json        the newest entry seen of a ledger, and where it lies
#     data/ID-DATASET.json   the sketch of a data set that was charged to it, under a key of this folder's own
#     sketch.key             that key
#     besides/ID-DATASET     there if another ledger began a second account of these records
#     lock                   whoever asks which records are known, and adds some


class KnownRecords(NamedTuple):
    """Records that a ledger knows: which, where it lies, the file they came from, what is shared, and what they
    are called in the state folder."""

    ledger: str
    path: str
    file: str
    shared: Overlap
    entry: str = ""


def state_folder(part: str = "") -> Path:
    """$DITHER_STATE, or a folder in the user's state folder: apart from the ledger, which may be put back from an
    old copy together with the folder it is in."""
    named = os.environ.get("DITHER_STATE")
    place = (Path(named) if named else platformdirs.user_state_path("dither-anchors")) / part
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"{place}: cannot be created ({error.strerror}), and Dither remembers ledgers there; "
            "set DITHER_STATE to a writable folder"
        ) from error
    return place


@contextmanager
def _here() -> Iterator[None]:
    """The system's errors in the state folder, as one line that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{error.filename or state_folder()}: cannot be used ({error.strerror}), and Dither remembers ledgers "
            "there; give this user access to it, or free some space"
        ) from error


@contextmanager
def alone() -> Iterator[None]:
    """While no other process, nor thread, is here."""
    with _here(), (state_folder() / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@_here()
def known_records(rows: RecordHashes) -> list[KnownRecords]:
    """Which ledgers know these records, as far as this user has charged any."""
    found = [_read_known(path) for path in sorted(state_folder("data").glob("*.json"))]
    scanned = scan(rows, _sketch_key(), [sketch for _, sketch in found])
    compared = [about._replace(shared=scanned.shared(sketch)) for about, sketch in found]
    return [about for about in compared if about.shared.share]


def remembers_records(ledger: str, dataset: str) -> bool:
    """Whether the data set of a ledger is known here, by its parts too."""
    path = state_folder("data") / f"{ledger}-{dataset}.json"
    return path.exists() and _read_known(path)[1].parts is not None


@_here()
def remember_records(rows: RecordHashes, ledger: str, path: Path, dataset: str, file: str) -> None:
    """Records that a ledger is about to be charged for."""
    about = {"ledger": ledger, "path": str(path.resolve()), "file": file}
    text = json.dumps({**about, **scan(rows, _sketch_key()).sketch.encode()}) + "\n"
    write_atomically(state_folder("data") / f"{ledger}-{dataset}.json", text, mode=0o600)


def _read_known(path: Path) -> tuple[KnownRecords, Sketch]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        about = KnownRecords(fields["ledger"], fields["path"], fields["file"], Overlap(0.0), path.stem)
        return about, Sketch.decode(fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{path}: not readable ({type(error).__name__}); restore it, or delete it if nothing was ever spent "
            "on these records"
        ) from error


def _sketch_key() -> bytes:
    path = state_folder() / "sketch.key"
    if not path.exists():
        # Asked twice: another process may have made both meanwhile.
        if any(state_folder("data").glob("*.json")) and not path.exists():
            raise LedgerError(
                f"{path}: the key of the sketches beside it is missing; restore it, or delete them too"
            )
        # Another process may be first: whoever linked it there has the key.
        mine = path.with_name(f"sketch.{secrets.token_hex(8)}.tmp")
        write_atomically(mine, secrets.token_bytes(16).hex() + "\n", mode=0o600)
        try:
            os.link(mine, path)
        except FileExistsError:
            pass
        finally:
            mine.unlink()
    key = bytes.fromhex(path.read_text(encoding="ascii"))
    if len(key) != 16:
        raise LedgerError(f"{path}: damaged; restore it from a backup")
    return key
