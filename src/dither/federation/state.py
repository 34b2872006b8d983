"""What must survive a restart: one folder for each run, every file whole or not at all.

At a party (`PartyStore`):

    terms.json       the agreement its owner approved
    secret.key       opens its streams of batches; never leaves (mode 0600)
    state.npz        the client's state after the last round that counted, and that round
    pending.npz      the newest upload, before masking, and the state that goes with it: what is sent again
    intent.json      the round that was charged last, and what became of it
    secagg.json      keys and rules of secure aggregation (mode 0600)
    log.jsonl        one line for every round answered or refused
    releases.jsonl   one signed line for every upload that left this party, and for its help to open a sum

A party that has forgotten what it sent refuses to continue the run. It notices this if the ledger knows of rounds
that intent.json lacks, if intent.json knows of an upload that is gone, if others know keys that secagg.json lacks,
if the other files would release again what releases.jsonl holds, or if more was released than releases.jsonl says,
by a note in the user's state folder. It cannot notice an older copy of all of these together, or two copies in use
on two machines: never restore the folder from a backup.

At the server (`Journal`), a run folder with a few files more:

    terms.json      the agreement that was sent out
    rounds.jsonl    one line for every completed round: who counted, who was missing or refused, and why
    excluded.json   who was caught in a lie, in which round and in which lie; they are not asked again
    secagg.json     public keys and the open round of secure aggregation (mode 0600)
    progress.jsonl  events, for anyone who watches
    signature.json  the server's signature of the finished run
    releases.json   what each party said of its releases.jsonl at the end of the run

A round is complete when its checkpoint is on disk. When a server restarts, it drops lines past the checkpoint and
announces that round again. One server at a time: the folder is locked while a server runs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np

from dither.accounting.ledger.store import state_folder
from dither.errors import DamagedFile, FederationError, LedgerError, RunExists
from dither.experiment.counting import PURPOSES
from dither.experiment.folder import Checkpoint, RunFolder, lock, read_checked, to_json, write_bytes, write_checked
from dither.federation.agreement import Agreement
from dither.federation.keys import Identity, Keyring, is_signed
from dither.federation.messages import digest

# Never from a copy: see above.
PARTY_ADVICE = "this party cannot continue the run: the others can continue without it, or start a new run"
_SERVER_ADVICE = "restore it from a copy, or start a new run in another folder"
COMPUTED = "computed"
_SIGNATURE, RELEASES, _STATEMENTS = "signature.json", "releases.jsonl", "releases.json"
_FORGOTTEN = (
    "this party has released something in this run that its folder does not remember: it was "
    "restored from a copy, or a copy is in use. Continue without this party, or start a new run"
)
_OLD_NOTE = (
    "this party's state folder remembers less of what it has released in this run than its own folder does: the "
    "state folder was restored from a copy. Continue without this party, or start a new run"
)
_RECORD_ADVICE = "the record of this party's releases in this run is not complete"
_STATED = ("party", "terms", "releases", "head")
_SIGNED = (
    *("spec.toml", "schema.toml", "terms.json", "provenance.json", "rounds.jsonl", "metrics.jsonl"),
    *("excluded.json", "summary.json", "model.safetensors", "plot.png", "plot.svg"),
    *("statistics.json", "scores.json", "model.py", "local/schema.toml"),
)
_WORKING = (  # what the server works with, or a transport: no file of the run's outcome
    *("signature.json", "releases.json", "digests.json", "asked.toml", "progress.jsonl"),
    *("serve.lock", "superlink.log", "nvflare.log", "local/key", "local/README"),
)
_WORKING_FOLDERS = ("flwr/", "nvflare/", "local/checkpoints/")
_OWN = ("lock", "secagg.json")  # of the server, also in the folder of a counting


class _RunFiles:
    """What both sides keep of a run."""

    def __init__(self, path: Path, advice: str) -> None:
        self.path, self._advice = path, advice

    def agreement(self) -> Agreement | None:
        return Agreement.load(self.path, self._advice)

    def save_agreement(self, agreement: Agreement) -> None:
        agreement.save(self.path)

    def secagg(self) -> bytes | None:
        path = self.path / "secagg.json"
        return path.read_bytes() if path.is_file() else None

    def save_secagg(self, state: bytes) -> None:
        write_bytes(self.path / "secagg.json", state, private=True)


class ChargedRound(NamedTuple):
    """The newest round that is charged, or about to be."""

    round: int
    outcome: str  # empty until it is computed; then COMPUTED, or why its update must not leave


class ClientState(NamedTuple):
    """The client's state after a round."""

    round: int
    leaves: list[np.ndarray]


class PendingUpload(NamedTuple):
    """The newest upload of a party, and the client's state if its round counts."""

    round: int
    broadcast: str  # digest of the broadcast it answers
    leaves: list[np.ndarray]

    @property
    def row(self) -> np.ndarray:
        return self.leaves[0]

    @property
    def state(self) -> list[np.ndarray]:
        return self.leaves[1:]


_Memory = TypeVar("_Memory", ChargedRound, ClientState, PendingUpload)
_FILES: dict[type, str] = {
    ChargedRound: "intent.json",
    ClientState: "state.npz",
    PendingUpload: "pending.npz",
}


class PartyStore(_RunFiles):
    """The files of one run at one party."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PARTY_ADVICE)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)

    def load(self, kind: type[_Memory]) -> _Memory | None:
        """What was saved last of this kind; None if nothing was."""
        path = self.path / _FILES[kind]
        if not path.is_file():
            return None
        if path.suffix == ".json":
            saved = read_checked(path, PARTY_ADVICE, old=kind._fields)
        else:
            try:
                with np.load(path, allow_pickle=False) as archive:
                    saved = json.loads(str(archive["meta"]))
                    saved["leaves"] = [archive[f"leaf{index}"] for index in range(saved["leaves"])]
            except Exception:  # whatever comes of damaged bytes
                raise DamagedFile(f"{str(path)!r} is damaged; {PARTY_ADVICE}") from None
        if not set(kind._fields) <= set(saved):
            raise DamagedFile(f"{str(path)!r} does not hold {', '.join(kind._fields)}; {PARTY_ADVICE}")
        return kind(**{name: saved[name] for name in kind._fields})

    def save(self, memory: ChargedRound | ClientState | PendingUpload) -> None:
        path, content = self.path / _FILES[type(memory)], memory._asdict()
        if path.suffix == ".json":
            return write_checked(path, content)
        leaves = content.pop("leaves")
        arrays: dict[str, Any] = {f"leaf{index}": leaf for index, leaf in enumerate(leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps({**content, "leaves": len(leaves)})), **arrays)
        write_bytes(path, buffer.getvalue())

    def check_space(self, needed: int) -> None:
        """Before a charge: an upload that cannot be saved is never sent."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise FederationError(
                f"{str(self.path)!r} has {free >> 10:,} KiB of free space, and a round may take {needed >> 10:,}: "
                "free some for the next round"
            )

    def secret(self) -> bytes:
        """16 bytes of its own for this run, made at the first call; in the file its digest follows."""
        path = self.path / "secret.key"
        if not self.has_secret():
            fresh = secrets.token_bytes(16)
            write_bytes(path, fresh + hashlib.sha256(fresh).digest(), private=True)
        saved = path.read_bytes()
        if len(saved) != 16 and hashlib.sha256(saved[:16]).digest() != saved[16:]:  # 16: of an earlier version
            raise DamagedFile(f"{str(path)!r} does not hold what was written; {PARTY_ADVICE}")
        return saved[:16]

    def has_secret(self) -> bool:
        return (self.path / "secret.key").is_file()

    def log(self, entry: Mapping[str, Any]) -> None:
        _append(self.path / "log.jsonl", entry)

    def answered(self) -> int:
        """How many rounds have an upload, by the log."""
        path = self.path / "log.jsonl"
        rounds = set()
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            with suppress(ValueError, KeyError, TypeError):  # cut off by a power failure, or damaged
                entry = json.loads(line)
                rounds |= set() if "refused" in entry else {entry["round"]}
        return len(rounds)


class Journal(_RunFiles):
    """The server's files of one run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SERVER_ADVICE)
        self.folder = RunFolder(path)
        self._lock: TextIO | None = None

    def lock(self, seconds: float = 10.0) -> None:
        """Keep others out until this process ends."""
        self._lock = lock(self.path / "lock", seconds)
        if self._lock is None:
            raise RunExists(f"another server is running in {str(self.path)!r}")

    def forget_agreement(self) -> None:
        """Drop an agreement that not everybody accepted, and the enrolment under it."""
        for name in ("terms.json", "secagg.json"):
            (self.path / name).unlink(missing_ok=True)

    def agreed(self) -> dict[str, Any]:
        """The agreement as it was saved: what it names need not be approved here. Empty without one."""
        path = self.path / Agreement.file
        return read_checked(path, self._advice) if path.is_file() else {}

    def rounds(self) -> list[dict[str, Any]]:
        """Completed rounds, in order."""
        return self.folder.rows("rounds.jsonl")

    def complete(self, line: Mapping[str, Any], leaves: list[np.ndarray], agreement: Agreement) -> None:
        """Write down a round and the state after it."""
        _append(self.path / "rounds.jsonl", line)
        done = int(line["round"]) + 1
        self.folder.save_checkpoint(Checkpoint(done, leaves, agreement.spec.digest(), agreement.digest))

    def resume(self, agreement: Agreement) -> tuple[int, list[np.ndarray] | None]:
        """Rounds that are complete, and the state after them; what came later is dropped."""
        checkpoint = self.folder.load_checkpoint()
        self.folder.clear_leftovers()
        done = 0 if checkpoint is None else checkpoint.round
        if checkpoint is not None and checkpoint.data_digest != agreement.digest:
            raise RunExists(f"the checkpoint in {str(self.path)!r} belongs to another agreement")
        kept = [line for line in self.rounds() if line["round"] < done]
        self.folder.write("rounds.jsonl", "".join(to_json(line) + "\n" for line in kept).encode())
        self.folder.drop_metrics_after(done)
        return done, None if checkpoint is None else checkpoint.leaves

    def excluded(self) -> dict[str, dict[str, Any]]:
        """Party -> round and reason."""
        return self.folder.read_json("excluded.json") or {}

    def exclude(self, name: str, round: int, why: str) -> None:
        """Write it down at once: a server that is killed now must not be lied to again."""
        excluded = {**self.excluded(), name: {"round": round, "why": why}}
        self.folder.write("excluded.json", (json.dumps(excluded, indent=1) + "\n").encode())

    def progress(self, event: str, **facts: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with open(self.path / "progress.jsonl", "a", encoding="utf-8") as file:
            file.write(to_json({"event": event, "time": now, **facts}) + "\n")

    @property
    def signed(self) -> bool:
        """Whether the run is complete."""
        return (self.path / _SIGNATURE).is_file()

    def sign(self, identity: Identity, federation: str) -> None:
        """The server's signature of the finished run, beside it: signature.json."""
        present = [name for name in _SIGNED if (self.path / name).is_file()]
        counted = [name for name in self._outcome() if name.split("/")[0] in PURPOSES]
        files = {name: digest((self.path / name).read_bytes()) for name in [*present, *counted]}
        write_checked(self.path / _SIGNATURE, identity.signed({"federation": federation, "files": files}))

    def verify(self, keyring: Keyring) -> dict[str, Any]:
        """What the server of this federation signed, and which files of the folder it did not sign; DamagedFile if
        the files differ."""
        path = self.path / _SIGNATURE
        if not path.is_file():
            raise DamagedFile(
                f"{str(self.path)!r} has no {_SIGNATURE}: its run is not complete, or no federation's"
            )
        saved = read_checked(path, _SERVER_ADVICE)
        if saved.get("federation") != keyring.id or not is_signed(saved, keyring.server):
            raise DamagedFile(f"{str(path)!r} is not signed by the server of this federation")
        for name, signed in saved["files"].items():
            file = self.path / name
            if not file.is_file() or digest(file.read_bytes()) != signed:
                raise DamagedFile(f"{str(file)!r} is not the file that the server signed")
        for file in (self.path / name for name in _SIGNED if name not in saved["files"]):
            if file.exists():
                raise DamagedFile(f"{str(file)!r} is not among the files that the server signed")
        unsigned = [name for name in self._outcome() if name not in saved["files"]]
        return {**{name: saved[name] for name in ("federation", "files")}, "unsigned": unsigned}

    def _outcome(self) -> list[str]:
        """Every file of the folder that may be taken for part of the run's outcome."""
        paths = (path for path in sorted(self.path.rglob("*")) if not path.is_dir())
        names = [path.relative_to(self.path).as_posix() for path in paths]
        others = [name for name in names if name not in _WORKING and not name.startswith(_WORKING_FOLDERS)]
        return [name for name in others if name.rpartition("/")[2] not in _OWN]


# What a party released: a line of releases.jsonl has the digest of what was sent and of the line before, and the
# party's signature. A line that is changed, taken out or put in breaks the chain. A line is on the disk before
# what it speaks of leaves. The same upload sent again is no new release; the same vector under the masks of a new
# attempt is one. Lines only go forward, so that other files that were put back release nothing a second time. How
# far the record has come is also kept outside of the folder (`state_folder`), from before the first charge on: a
# folder that was put back may hold a charged round without its answer, which it would compute again with fresh
# noise.


class ReleaseRecord:
    """The record of one run at one party; `terms` is the digest of its agreement."""

    def __init__(self, folder: Path, party: str, terms: str, identity: Identity) -> None:
        self._path, self._party, self._terms, self._identity = folder / RELEASES, party, terms, identity
        content = self._path.read_bytes() if self._path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a power failure in the middle of a line: what it speaks of did not leave
            os.truncate(self._path, len(whole))
        lines = whole.splitlines()
        self._count, self._newest = len(lines), _read_line(lines[-1], self._path, PARTY_ADVICE) if lines else {}
        self._head, self._size = digest(lines[-1]) if lines else "", len(whole)
        self._outside = _note_outside(party, terms)

    @property
    def newest_round(self) -> int:
        """Of the newest release; -1 if there is none."""
        return int(self._newest.get("round", -1))

    def check(self, *, first: bool = False) -> None:
        """Before every charge: what could not be released afterwards is not paid for. The note outside is made
        before the `first` one, and must be there from then on."""
        with self._alone(first=first):
            self._note()  # written anew: that there is space is not seen from the note that is there

    def append(self, content: bytes, index: int, attempt: int = 0, *, opens: bool = False) -> None:
        """Record what is about to leave: an upload of this round (and attempt), or help to open that sum."""
        place = {"round": index, "attempt": attempt, "opens": opens}
        sent = {**place, "bytes": len(content), "sha256": digest(content)}
        with self._alone():
            if sent != {name: self._newest.get(name) for name in sent}:
                self._check_forward(sent)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                line = {"party": self._party, "terms": self._terms, "time": now, **sent, "previous": self._head}
                try:
                    text = _append(self._path, self._identity.signed(line))
                except OSError:  # such as a full disk
                    with suppress(FileNotFoundError):
                        os.truncate(self._path, self._size)
                    raise
                self._count, self._newest, self._head = self._count + 1, line, digest(text.encode())
                self._size = self._path.stat().st_size
            self._note()

    def _check_forward(self, sent: Mapping[str, Any]) -> None:
        """A round is uploaded for before a later one, an attempt once, and after a sum was opened nothing of its
        round leaves but more help to open it."""
        new, old = ([line.get(name, 0) for name in ("round", "attempt", "opens")] for line in (sent, self._newest))
        if self._newest and not (new == old if old[2] and new[0] == old[0] else new > old):
            raise FederationError(_FORGOTTEN)

    def _note(self) -> None:
        with self._writable():
            write_checked(self._outside, {"releases": self._count, "head": self._head})

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FederationError(
                f"{str(self._outside.parent)!r} cannot be written to ({error.strerror}), and a party notes there "
                "what it has released: make it writable or free some space, then run the same command again"
            ) from None

    @contextmanager
    def _alone(self, *, first: bool = False) -> Iterator[None]:
        """Keep copies out; `FederationError` unless the record in the folder is this one, and nothing was released
        after it."""
        with self._writable():
            handle = lock(self._outside.with_suffix(".lock"), 10.0)
        with handle or nullcontext():
            if first and handle is not None and not self._outside.is_file():
                self._note()
            size = self._path.stat().st_size if self._path.is_file() else 0
            if not self._outside.is_file():
                raise FederationError(
                    f"{str(self._outside)!r} is missing, the note of what this party has released in this run: "
                    "put it back, or set DITHER_STATE to the folder that has it; otherwise continue without this "
                    "party, or start a new run"
                )
            saved = read_checked(self._outside, PARTY_ADVICE)
            noted, now = (saved["releases"], saved["head"]), (self._count, self._head)
            before = self._count - 1, self._newest.get("previous")  # killed in between
            if handle is None or size != self._size or noted not in (now, before):
                raise FederationError(_FORGOTTEN if noted[0] >= self._count else _OLD_NOTE)
            if noted != now:  # before a second line follows that the note does not know
                self._note()
            yield

    def statement(self) -> dict[str, Any]:
        """How many lines the record has and the digest of the last, signed."""
        if self._count or self._outside.is_file():
            with self._alone():  # no false statement by a folder that was put back
                pass
        content = dict(zip(_STATED, (self._party, self._terms, self._count, self._head), strict=True))
        return self._identity.signed(content)


def _note_outside(party: str, terms: str) -> Path:
    return state_folder("releases") / f"{party}-{terms}.json"


def check_record(folder: Path, keyring: Keyring) -> dict[str, Any]:
    """What the record in a party's folder of a run amounts to, as its statement would say, and whether a note on
    this machine says that it is complete; DamagedFile if it is not the record that the party signed."""
    path = folder / RELEASES
    party = terms = head = before = ""
    lines = path.read_bytes().splitlines()
    for number, text in enumerate(lines, start=1):
        line = _read_line(text, path)
        party, terms = party or str(line.get("party")), terms or str(line.get("terms"))
        if (line.get("party"), line.get("terms"), line.get("previous")) != (party, terms, head):
            raise DamagedFile(f"{str(path)!r}: line {number} does not follow the line before; {_RECORD_ADVICE}")
        if not is_signed(line, keyring.party(party).identity):
            raise DamagedFile(f"{str(path)!r}: line {number} is not signed by {party!r}; {_RECORD_ADVICE}")
        before, head = head, digest(text)
    if not lines:
        raise DamagedFile(f"{str(path)!r} is empty; {_RECORD_ADVICE}")
    saved: dict[str, Any] = {}
    with suppress(LedgerError):  # no state folder here
        note = _note_outside(party, terms)
        saved = read_checked(note, _RECORD_ADVICE) if note.is_file() else {}
    noted = saved.get("releases"), saved.get("head")
    if saved and noted not in ((len(lines), head), (len(lines) - 1, before)):
        raise DamagedFile(
            f"{str(path)!r} has {len(lines)} lines, but {party} has released {noted[0]} messages; {_RECORD_ADVICE}"
        )
    return {**dict(zip(_STATED, (party, terms, len(lines), head), strict=True)), "complete": bool(saved)}


def check_statement(statement: Any, party: str, terms: str, keyring: Keyring) -> dict[str, Any]:
    """A party's statement, if it made it of this agreement; else FederationError."""
    if not isinstance(statement, dict) or set(statement) != {*_STATED, "signature"}:
        raise FederationError("a statement of releases that cannot be read")
    count, head = statement["releases"], statement["head"]  # which `dither federation verify` prints
    if type(count) is not int or not isinstance(head, str) or not re.fullmatch("([0-9a-f]{64})?", head):
        raise FederationError("a statement of releases that is no count and digest")
    if (statement["party"], statement["terms"]) != (party, terms):
        raise FederationError("a statement of another party's releases, or of another agreement's")
    if not is_signed(statement, keyring.party(party).identity):
        raise FederationError(f"a statement of releases that {party!r} did not sign")
    return statement


def save_statements(folder: Path, statements: Mapping[str, dict[str, Any]]) -> None:
    write_checked(folder / _STATEMENTS, statements)


def load_statements(folder: Path, terms: str, keyring: Keyring) -> dict[str, dict[str, Any]]:
    """The statements that members of the federation made of their records; DamagedFile if one of them did not sign
    its statement. Nobody can check those of parties that were taken out since."""
    path = folder / _STATEMENTS
    saved = read_checked(path, "the run itself is unharmed") if path.is_file() else {}
    members = [party.name for party in keyring.parties if party.name in saved]
    try:
        return {name: check_statement(saved[name], name, terms, keyring) for name in members}
    except FederationError as error:
        raise DamagedFile(f"{str(path)!r} holds {error}") from None


def _read_line(text: bytes, path: Path, advice: str = _RECORD_ADVICE) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise DamagedFile(f"{str(path)!r} has a line that cannot be read; {advice}")
    return line


def _append(path: Path, entry: Mapping[str, Any]) -> str:
    """Add a line of JSON, and push it to the disk."""
    text = to_json(entry)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    return text
