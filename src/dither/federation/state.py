"""What must survive a restart: one folder for each run, every file whole or not at all.

At a party (`PartyStore`):

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

At the server (`Journal`), a run folder with a few files more:

    terms.json      the agreement that was sent out
    rounds.jsonl    one line for every completed round: who counted, who was missing or refused, and why
    excluded.json   who was caught in a lie, in which round and in which lie: asked nothing any more
    secagg.json     public keys and the open round of secure aggregation (mode 0600)
    progress.jsonl  what happens, for whoever watches
    signature.json  the server's signature of the finished run

A round is complete when its checkpoint is on the disk; lines past the checkpoint are dropped when a server starts
again, and that round is announced anew. One server at a time: the folder is locked while one is at work.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from dither.errors import DamagedFile, RunExists
from dither.experiment.folder import Checkpoint, RunFolder, lock, read_checked, to_json, write_bytes, write_checked
from dither.federation.agreement import Agreement
from dither.federation.keys import Identity, Keyring, canonical, verify

# Never from a copy: see above.
_PARTY_ADVICE = "this party cannot go on with the run: the others can without it, or start a new run"
_SERVER_ADVICE = "restore it from a copy, or start a new run in another folder"
COMPUTED = "computed"
_SIGNATURE = "signature.json"
_SIGNED = (
    *("spec.toml", "schema.toml", "terms.json", "provenance.json", "rounds.jsonl", "metrics.jsonl"),
    *(
        "excluded.json",
        "summary.json",
        "model.safetensors",
        "plot.png",
        "plot.svg",
        "statistics.json",
        "scores.json",
    ),
)


class _RunFiles:
    """What both sides keep of a run."""

    def __init__(self, path: Path, advice: str) -> None:
        self.path, self._advice = path, advice

    def agreement(self) -> Agreement | None:
        return Agreement.load(self.path / "terms.json", self._advice)

    def save_agreement(self, agreement: Agreement) -> None:
        agreement.save(self.path / "terms.json")

    def secagg(self) -> bytes | None:
        path = self.path / "secagg.json"
        return path.read_bytes() if path.is_file() else None

    def save_secagg(self, state: bytes) -> None:
        write_bytes(self.path / "secagg.json", state, private=True)


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


class ChargedRound(NamedTuple):
    """The newest round that is charged, or about to be."""

    round: int
    outcome: str  # empty until it is computed; then COMPUTED, or why its update must not leave


class PartyStore(_RunFiles):
    """The files of one run at one party."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _PARTY_ADVICE)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)

    def dataset(self) -> str | None:
        saved = self._json("data.json", "id")
        return None if saved is None else str(saved["id"])

    def save_dataset(self, dataset: str) -> None:
        if self.dataset() is None:
            write_checked(self.path / "data.json", {"id": dataset})

    def secret(self) -> bytes:
        """16 bytes of its own for this run, made at the first call; in the file its digest follows."""
        path = self.path / "secret.key"
        if not self.has_secret():
            fresh = secrets.token_bytes(16)
            write_bytes(path, fresh + hashlib.sha256(fresh).digest(), private=True)
        saved = path.read_bytes()
        if len(saved) != 16 and hashlib.sha256(saved[:16]).digest() != saved[16:]:  # 16: of an earlier version
            raise DamagedFile(f"{str(path)!r} does not hold what was written; {_PARTY_ADVICE}")
        return saved[:16]

    def has_secret(self) -> bool:
        return (self.path / "secret.key").is_file()

    def state(self) -> ClientState | None:
        saved = self._arrays("state.npz")
        return None if saved is None else ClientState(saved[0]["round"], saved[1])

    def save_state(self, round: int, leaves: list[np.ndarray]) -> None:
        self._save_arrays("state.npz", {"round": round}, leaves)

    def pending(self) -> PendingUpload | None:
        saved = self._arrays("pending.npz")
        if saved is None:
            return None
        meta, (row, *state) = saved
        return PendingUpload(meta["round"], meta["broadcast"], row, state, meta["clamped"])

    def save_pending(self, pending: PendingUpload) -> None:
        meta = {"round": pending.round, "broadcast": pending.broadcast, "clamped": pending.clamped}
        self._save_arrays("pending.npz", meta, [pending.row, *pending.state])

    def charged(self) -> ChargedRound | None:
        saved = self._json("intent.json", *ChargedRound._fields)
        return None if saved is None else ChargedRound(int(saved["round"]), str(saved["outcome"]))

    def save_charged(self, charged: ChargedRound) -> None:
        write_checked(self.path / "intent.json", charged._asdict())

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

    def _json(self, name: str, *keys: str) -> dict[str, Any] | None:
        path = self.path / name
        if not path.is_file():
            return None
        saved = read_checked(path, _PARTY_ADVICE, old=keys)
        if set(saved) != set(keys):
            raise DamagedFile(f"{str(path)!r} does not hold {', '.join(keys)}; {_PARTY_ADVICE}")
        return saved

    def _arrays(self, name: str) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        path = self.path / name
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                meta = json.loads(str(archive["meta"]))
                return meta, [archive[f"leaf{index}"] for index in range(meta["leaves"])]
        except Exception:  # whatever comes of damaged bytes
            raise DamagedFile(f"{str(path)!r} is damaged; {_PARTY_ADVICE}") from None

    def _save_arrays(self, name: str, meta: dict[str, Any], leaves: list[np.ndarray]) -> None:
        arrays: dict[str, Any] = {f"leaf{index}": leaf for index, leaf in enumerate(leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps({**meta, "leaves": len(leaves)})), **arrays)
        write_bytes(self.path / name, buffer.getvalue())


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
            raise RunExists(f"another server is at work in {str(self.path)!r}")

    def forget_agreement(self) -> None:
        """Drop an agreement that not everybody accepted, and the enrolment under it."""
        for name in ("terms.json", "secagg.json"):
            (self.path / name).unlink(missing_ok=True)

    def rounds(self) -> list[dict[str, Any]]:
        """Completed rounds, in order."""
        lines = []
        for line in (self.folder.read("rounds.jsonl") or b"").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break  # cut off by a kill
        return lines

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
        try:
            saved: dict[str, dict[str, Any]] = json.loads(self.folder.read("excluded.json") or b"{}")
            return {name: {"round": int(each["round"]), "why": str(each["why"])} for name, each in saved.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunExists(f"{str(self.path / 'excluded.json')!r} is damaged: {_SERVER_ADVICE}") from None

    def exclude(self, name: str, round: int, why: str) -> None:
        """Write it down at once: a server that is killed now must not be lied to again."""
        excluded = {**self.excluded(), name: {"round": round, "why": why}}
        self.folder.write("excluded.json", (json.dumps(excluded, indent=1) + "\n").encode())

    def progress(self, event: str, **facts: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with open(self.path / "progress.jsonl", "a", encoding="utf-8") as file:
            file.write(to_json({"event": event, "time": now, **facts}) + "\n")

    def sign(self, identity: Identity, federation: str) -> None:
        """The server's signature of the finished run, beside it: signature.json."""
        present = [name for name in _SIGNED if (self.path / name).is_file()]
        files = {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in present}
        content = {"federation": federation, "files": files}
        write_checked(self.path / _SIGNATURE, {**content, "signature": identity.sign(canonical(content)).hex()})

    def verify(self, keyring: Keyring) -> dict[str, Any]:
        """What the server of this federation signed; DamagedFile where the files are not those."""
        path = self.path / _SIGNATURE
        if not path.is_file():
            raise DamagedFile(
                f"{str(self.path)!r} has no {_SIGNATURE}: its run is not complete, or no federation's"
            )
        saved = read_checked(path, _SERVER_ADVICE)
        content = {name: saved.get(name) for name in ("federation", "files")}
        try:
            signature = bytes.fromhex(saved["signature"])
        except (KeyError, TypeError, ValueError):
            signature = b""
        if content["federation"] != keyring.id or not verify(keyring.server, signature, canonical(content)):
            raise DamagedFile(f"{str(path)!r} is not signed by the server of this federation")
        for name, digest in saved["files"].items():
            file = self.path / name
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise DamagedFile(f"{str(file)!r} is not the file that the server signed")
        return content


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line of JSON, and push it to the disk."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(to_json(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
