"""What a party must still know after a restart: one folder a run, every file whole or not at all.

    terms.json       the agreement its owner approved
    data.json        the ledger's name of the records it began with
    secret.key       opens its streams of batches; never leaves (mode 0600)
    state.npz        the client's state after the last round that counted, and that round
    pending.npz      the newest upload, before masking, and the state that goes with it: what is sent again
    intent.json      the round that was charged last, and what became of it
    secagg.json      keys and rules of secure aggregation (mode 0600)
    log.jsonl        one line for every round answered or refused

A party that has forgotten what it sent refuses to go on with the run: the ledger knows of rounds that intent.json
does not, intent.json of an upload that is gone, others of keys that secagg.json had. What cannot be noticed is an
older copy of this folder together with an older copy of the ledger, or two copies in use at once: never restore it
from a backup.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.errors import DamagedFile
from dither.experiment.folder import read_checked, to_json, write_bytes, write_checked
from dither.federation.agreement import Agreement

# Never from a copy: see above.
_ADVICE = "this party cannot go on with the run: the others can without it, or start a new run"


class PendingUpload(NamedTuple):
    """The newest upload of a party."""

    round: int
    broadcast: str  # digest of the broadcast it answers
    row: np.ndarray
    state: list[np.ndarray]  # the client's state if the round counts
    clamped: int


class ClientState(NamedTuple):
    """The client's state after a round."""

    round: int
    state: list[np.ndarray]


COMPUTED = "computed"


class ChargedRound(NamedTuple):
    """The newest round that is charged, or about to be."""

    round: int
    outcome: str  # empty until it is computed; then COMPUTED, or why its update must not leave


class PartyStore:
    """The files of one run at one party."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def agreement(self) -> Agreement | None:
        return Agreement.load(self.folder / "terms.json", _ADVICE)

    def save_agreement(self, agreement: Agreement) -> None:
        agreement.save(self.folder / "terms.json")

    def dataset(self) -> str | None:
        found = self._json("data.json", "id")
        return None if found is None else str(found["id"])

    def save_dataset(self, dataset: str) -> None:
        if self.dataset() is None:
            write_checked(self.folder / "data.json", {"id": dataset})

    def secret(self) -> bytes:
        """16 bytes of its own for this run, made at the first call; in the file its digest follows."""
        path = self.folder / "secret.key"
        if not self.has_secret():
            made = secrets.token_bytes(16)
            self._private("secret.key", made + hashlib.sha256(made).digest())
        found = path.read_bytes()
        if len(found) != 16 and hashlib.sha256(found[:16]).digest() != found[16:]:  # 16: of an earlier version
            raise DamagedFile(f"{str(path)!r} does not hold what was written; {_ADVICE}")
        return found[:16]

    def has_secret(self) -> bool:
        return (self.folder / "secret.key").is_file()

    def state(self) -> ClientState | None:
        found = self._arrays("state.npz")
        return None if found is None else ClientState(found[0]["round"], found[1])

    def save_state(self, round: int, leaves: list[np.ndarray]) -> None:
        self._save_arrays("state.npz", {"round": round}, leaves)

    def pending(self) -> PendingUpload | None:
        found = self._arrays("pending.npz")
        if found is None:
            return None
        meta, (row, *state) = found
        return PendingUpload(meta["round"], meta["broadcast"], row, state, meta["clamped"])

    def save_pending(self, pending: PendingUpload) -> None:
        meta = {"round": pending.round, "broadcast": pending.broadcast, "clamped": pending.clamped}
        self._save_arrays("pending.npz", meta, [pending.row, *pending.state])

    def intent(self) -> ChargedRound | None:
        found = self._json("intent.json", *ChargedRound._fields)
        return None if found is None else ChargedRound(int(found["round"]), str(found["outcome"]))

    def save_intent(self, intent: ChargedRound) -> None:
        write_checked(self.folder / "intent.json", intent._asdict())

    def secagg(self) -> bytes | None:
        path = self.folder / "secagg.json"
        return path.read_bytes() if path.is_file() else None

    def save_secagg(self, state: bytes) -> None:
        self._private("secagg.json", state)

    def log(self, entry: Mapping[str, Any]) -> None:
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(to_json(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def answered(self) -> int:
        """How many rounds have an upload, by the log."""
        path = self.folder / "log.jsonl"
        found = set()
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            with suppress(ValueError, KeyError, TypeError):  # cut off by a power failure, or damaged
                entry = json.loads(line)
                found |= set() if "refused" in entry else {entry["round"]}
        return len(found)

    def _json(self, name: str, *keys: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        found = read_checked(path, _ADVICE, old=keys)
        if set(found) != set(keys):
            raise DamagedFile(f"{str(path)!r} does not hold {', '.join(keys)}; {_ADVICE}")
        return found

    def _private(self, name: str, content: bytes) -> None:
        # The folder is the owner's alone (mode 0700), so the moment before chmod shows nothing.
        write_bytes(self.folder / name, content)
        (self.folder / name).chmod(0o600)

    def _arrays(self, name: str) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                meta = json.loads(str(archive["meta"]))
                return meta, [archive[f"leaf{index}"] for index in range(meta["leaves"])]
        except Exception:  # whatever comes of damaged bytes
            raise DamagedFile(f"{str(path)!r} is damaged; {_ADVICE}") from None

    def _save_arrays(self, name: str, meta: dict[str, Any], leaves: list[np.ndarray]) -> None:
        arrays: dict[str, Any] = {f"leaf{index}": leaf for index, leaf in enumerate(leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps({**meta, "leaves": len(leaves)})), **arrays)
        write_bytes(self.folder / name, buffer.getvalue())
