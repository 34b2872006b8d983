"""What a node must still know after a restart: one folder a run, every file whole or not at all.

    terms.json       the terms its owner approved
    secret.key       opens its streams of batches; never leaves (mode 0600)
    state.npz        the client's state after the last round that counted
    pending.npz      the newest upload, before masking, and the state that goes with it: sent again when asked
    again intent.json      the round that is being charged to the ledger, until its upload is in pending.npz
    secagg.json      keys and rules of secure aggregation (mode 0600) log.jsonl        one line for every round
    answered or refused

Deleting files makes a node forget. It then refuses rounds or charges them again, except for one: without
secagg.json it cannot take part any more. Never restore this folder from a backup.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.runs import to_json, write_bytes, write_text


class Pending(NamedTuple):
    """The newest upload of a node."""

    round: int
    broadcast: str  # digest of the broadcast it answers
    row: np.ndarray
    state: list[np.ndarray]  # the client's state if the round counts
    clamped: int


class Store:
    """The files of one run at one party."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)

    def terms(self) -> dict[str, Any] | None:
        return self._json("terms.json")

    def save_terms(self, terms: Mapping[str, Any]) -> None:
        write_text(self.folder / "terms.json", json.dumps(terms, indent=1) + "\n")

    def secret(self) -> bytes:
        """16 bytes of its own for this run, made at the first call."""
        path = self.folder / "secret.key"
        if not path.is_file():
            self._private("secret.key", secrets.token_bytes(16))
        return path.read_bytes()

    def state(self) -> list[np.ndarray] | None:
        found = self._arrays("state.npz")
        return None if found is None else found[1]

    def save_state(self, leaves: list[np.ndarray]) -> None:
        self._save_arrays("state.npz", {}, leaves)

    def pending(self) -> Pending | None:
        found = self._arrays("pending.npz")
        if found is None:
            return None
        meta, (row, *state) = found
        return Pending(meta["round"], meta["broadcast"], row, state, meta["clamped"])

    def save_pending(self, pending: Pending) -> None:
        meta = {"round": pending.round, "broadcast": pending.broadcast, "clamped": pending.clamped}
        self._save_arrays("pending.npz", meta, [pending.row, *pending.state])

    def intent(self) -> int | None:
        found = self._json("intent.json")
        return None if found is None else int(found["round"])

    def save_intent(self, round: int) -> None:
        write_text(self.folder / "intent.json", json.dumps({"round": round}))

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

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _private(self, name: str, content: bytes) -> None:
        # The folder is the owner's alone (mode 0700), so the moment before chmod shows nothing.
        write_bytes(self.folder / name, content)
        (self.folder / name).chmod(0o600)

    def _arrays(self, name: str) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        path = self.folder / name
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as archive:
            meta = json.loads(str(archive["meta"]))
            return meta, [archive[f"leaf{index}"] for index in range(meta["leaves"])]

    def _save_arrays(self, name: str, meta: dict[str, Any], leaves: list[np.ndarray]) -> None:
        arrays: dict[str, Any] = {f"leaf{index}": leaf for index, leaf in enumerate(leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps({**meta, "leaves": len(leaves)})), **arrays)
        write_bytes(self.folder / name, buffer.getvalue())
