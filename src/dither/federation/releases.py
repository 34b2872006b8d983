"""What a party released in a run, as a record that it signs.

    releases.jsonl   in a party's folder of the run: a line for each upload that left it
    releases.json    in the server's run folder: what each party said of its record at the end of the run

A line has the digest of what was sent and of the line before, and the party's signature: a line that is changed,
taken out or put in breaks the chain. A line is on the disk before its upload leaves. The same upload sent again is
no new release; the same vector under the masks of a new attempt is one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dither.errors import DamagedFile, FederationError
from dither.experiment.folder import read_checked, to_json, write_checked
from dither.federation.keys import Identity, Keyring, canonical, verify

RECORD, STATEMENTS = "releases.jsonl", "releases.json"
_ADVICE = "the record of this party's releases in this run is not whole"
_STATED = ("party", "terms", "releases", "head")


class ReleaseRecord:
    """The record of one run at one party; `terms` is the digest of its agreement."""

    def __init__(self, folder: Path, party: str, terms: str, identity: Identity) -> None:
        self._path, self._party, self._terms, self._identity = folder / RECORD, party, terms, identity
        content = self._path.read_bytes() if self._path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a power failure in the middle of a line: what it speaks of did not leave
            os.truncate(self._path, len(whole))
        lines = whole.splitlines()
        self._count, self._newest = len(lines), _read(lines[-1], self._path) if lines else {}
        self._head = _digest(lines[-1]) if lines else ""

    def append(self, round_index: int, content: bytes) -> None:
        """Record an upload that is about to leave."""
        sent = {"round": round_index, "bytes": len(content), "sha256": _digest(content)}
        if sent == {name: self._newest.get(name) for name in sent}:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"party": self._party, "terms": self._terms, "time": now, **sent, "previous": self._head}
        text = to_json(_signed(line, self._identity))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._count, self._newest, self._head = self._count + 1, line, _digest(text.encode())

    def statement(self) -> dict[str, Any]:
        """How many lines the record has and the digest of the last, signed."""
        content = dict(zip(_STATED, (self._party, self._terms, self._count, self._head), strict=True))
        return _signed(content, self._identity)


def check_record(folder: Path, keyring: Keyring) -> dict[str, Any]:
    """What the record in a party's folder of a run amounts to, as its statement would say; DamagedFile where it is
    not the record that the party signed."""
    path = folder / RECORD
    party = terms = head = ""
    lines = path.read_bytes().splitlines()
    for number, text in enumerate(lines, start=1):
        line = _read(text, path)
        party, terms = party or str(line.get("party")), terms or str(line.get("terms"))
        if (line.get("party"), line.get("terms"), line.get("previous")) != (party, terms, head):
            raise DamagedFile(f"{str(path)!r}: line {number} does not follow the line before; {_ADVICE}")
        if not _is_signed(line, keyring.party(party).identity):
            raise DamagedFile(f"{str(path)!r}: line {number} is not signed by {party!r}; {_ADVICE}")
        head = _digest(text)
    return dict(zip(_STATED, (party, terms, len(lines), head), strict=True))


def check_statement(statement: Any, party: str, terms: str, keyring: Keyring) -> dict[str, Any]:
    """A party's statement, if it made it of this agreement; else FederationError."""
    if not isinstance(statement, dict) or set(statement) != {*_STATED, "signature"}:
        raise FederationError("a statement of releases that cannot be read")
    if (statement["party"], statement["terms"]) != (party, terms):
        raise FederationError("a statement of another party's releases, or of another agreement's")
    if not _is_signed(statement, keyring.party(party).identity):
        raise FederationError(f"a statement of releases that {party!r} did not sign")
    return statement


def save_statements(folder: Path, statements: Mapping[str, dict[str, Any]]) -> None:
    write_checked(folder / STATEMENTS, statements)


def load_statements(folder: Path, terms: str, keyring: Keyring) -> dict[str, dict[str, Any]]:
    """What the parties said of their records; DamagedFile where one of them did not sign that."""
    path = folder / STATEMENTS
    saved = read_checked(path, "the run itself is unharmed") if path.is_file() else {}
    try:
        return {name: check_statement(each, name, terms, keyring) for name, each in saved.items()}
    except FederationError as error:
        raise DamagedFile(f"{str(path)!r} holds {error}") from None


def _signed(content: dict[str, Any], identity: Identity) -> dict[str, Any]:
    return {**content, "signature": identity.sign(canonical(content)).hex()}


def _is_signed(content: Mapping[str, Any], public: bytes) -> bool:
    try:
        signature = bytes.fromhex(content["signature"])
    except (KeyError, TypeError, ValueError):
        return False
    return verify(public, signature, canonical({k: v for k, v in content.items() if k != "signature"}))


def _read(text: bytes, path: Path) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict):
        raise DamagedFile(f"{str(path)!r} has a line that cannot be read; {_ADVICE}")
    return line


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
