"""What the server must still know after a restart: a run folder, with a few files more.

    terms.json      the agreement that was sent out
    rounds.jsonl    one line a completed round: who counted, who was missing or refused, and why
    excluded.json   who was caught in a lie, in which round and in which lie: asked nothing any more
    secagg.json     keys and the open round of secure aggregation (mode 0600)
    progress.jsonl  what happens, for whoever watches

A round is complete when its checkpoint is on the disk; lines past the checkpoint are dropped when a server starts
again, and that round is announced anew. One server at a time: the folder is locked while one is at work.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dither.errors import RunExists
from dither.experiment import folder
from dither.federation.agreement import Agreement

_ADVICE = "restore it from a copy, or start a new run in another folder"


class Journal:
    """The server's files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = folder.RunFolder(path)
        self._lock: TextIO | None = None

    def lock(self, seconds: float = 10.0) -> None:
        """Keep others out; a server that was killed lets go by itself."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = open(self.path / "lock", "w", encoding="ascii")  # noqa: SIM115  # held until the process ends
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    handle.close()
                    raise RunExists(f"another server is at work in {str(self.path)!r}") from None
                time.sleep(0.1)
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # Agreement

    def agreement(self) -> Agreement | None:
        return Agreement.load(self.path / "terms.json", _ADVICE)

    def save_agreement(self, agreement: Agreement) -> None:
        agreement.save(self.path / "terms.json")

    def forget_agreement(self) -> None:
        """Drop an agreement that not everybody accepted, and the enrolment under it."""
        for name in ("terms.json", "secagg.json"):
            (self.path / name).unlink(missing_ok=True)

    # Rounds

    def rounds(self) -> list[dict[str, Any]]:
        """Completed rounds, in order."""
        found = []
        for line in (self.folder.read("rounds.jsonl") or b"").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break  # cut off by a kill
        return found

    def complete(self, line: Mapping[str, Any], leaves: list[np.ndarray], agreement: Agreement) -> None:
        """Write down a round and the state after it."""
        with open(self.path / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(folder.to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        done = int(line["round"]) + 1
        self.folder.save_checkpoint(folder.Checkpoint(done, leaves, agreement.spec.digest(), agreement.digest))

    def resume(self, agreement: Agreement) -> tuple[int, list[np.ndarray] | None]:
        """Rounds that are complete, and the state after them; what came later is dropped."""
        checkpoint = self.folder.load_checkpoint()
        self.folder.clear_leftovers()
        done = 0 if checkpoint is None else checkpoint.round
        if checkpoint is not None and checkpoint.data_digest != agreement.digest:
            raise RunExists(f"the checkpoint in {str(self.path)!r} belongs to another agreement")
        kept = [line for line in self.rounds() if line["round"] < done]
        self.folder.write("rounds.jsonl", "".join(folder.to_json(line) + "\n" for line in kept).encode())
        self.folder.drop_metrics_after(done)
        return done, None if checkpoint is None else checkpoint.leaves

    def excluded(self) -> dict[str, dict[str, Any]]:
        """Party -> round and reason."""
        try:
            found: dict[str, dict[str, Any]] = json.loads(self.folder.read("excluded.json") or b"{}")
            return {name: {"round": int(each["round"]), "why": str(each["why"])} for name, each in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RunExists(f"{str(self.path / 'excluded.json')!r} is damaged: {_ADVICE}") from None

    def exclude(self, name: str, round: int, why: str) -> None:
        """Write it down at once: a server that is killed now must not be lied to again."""
        found = {**self.excluded(), name: {"round": round, "why": why}}
        self.folder.write("excluded.json", (json.dumps(found, indent=1) + "\n").encode())

    # Secure aggregation

    def secagg(self) -> bytes | None:
        path = self.path / "secagg.json"
        return path.read_bytes() if path.is_file() else None

    def save_secagg(self, state: bytes) -> None:
        path = self.path / "secagg.json"
        if not path.is_file():
            path.touch(mode=0o600)
        folder.write_bytes(path, state)
        path.chmod(0o600)

    # For whoever watches

    def progress(self, event: str, **facts: Any) -> None:
        with open(self.path / "progress.jsonl", "a", encoding="utf-8") as file:
            file.write(folder.to_json({"event": event, **facts}) + "\n")
