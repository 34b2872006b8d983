"""The run folder: everything a run leaves behind, written so that a kill at any moment does no harm.

    spec.toml         the complete spec: the same file runs again
    provenance.json   versions, device, digest of the data
    metrics.jsonl     one line an evaluation, appended as it happens
    checkpoints/      the state after some round, the newest two
    model.npz         the parameters, with the names of their leaves
    schema.toml       how a table becomes features (tables only)
    summary.json      the outcome: accuracy, loss, the three ε
    plot.png          accuracy and loss against rounds

A file is written beside its place and moved there when complete, so that it is never half there. Metrics are
appended before the checkpoint of the same round: after a kill, lines past the checkpoint are dropped and
written again, bit for bit the same.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dither.errors import RunExists, SpecError
from dither.spec import Spec

_KEEP_CHECKPOINTS = 2


class Checkpoint(NamedTuple):
    """A state after `round` rounds: its leaves in order, and what it belongs to."""

    round: int
    leaves: list[np.ndarray]
    spec_digest: str
    data_digest: str


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # Opening

    @classmethod
    def create(cls, path: str | Path, spec: Spec, provenance: Mapping[str, Any]) -> RunFolder:
        """A new run folder; refuses one that already exists and is not empty."""
        folder = cls(path)
        if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
            raise RunExists(
                f"{str(folder.path)!r} already exists; give another --out, or continue it with --resume {path}"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        write_text(folder.path / "provenance.json", to_json({"run": secrets.token_hex(8), **provenance}, indent=2))
        # Last, as a folder with a spec.toml is one that can be resumed.
        write_text(folder.path / "spec.toml", spec.to_toml())
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder."""
        folder = cls(path)
        if not (folder.path / "spec.toml").is_file():
            raise RunExists(f"{str(folder.path)!r} is not a run folder: it has no spec.toml")
        return folder

    def clear_leftovers(self) -> None:
        """Remove what a killed process left beside its place."""
        for left in self.path.rglob(".*.tmp"):
            left.unlink(missing_ok=True)

    def run_id(self) -> str:
        """A name that no other run has: where and when it was made, as provenance.json says."""
        return str(self.provenance()["run"])

    def provenance(self) -> dict[str, Any]:
        """Where and how the run was begun."""
        found: dict[str, Any] = json.loads((self.path / "provenance.json").read_text(encoding="utf-8"))
        return found

    def discard(self) -> None:
        """Remove a folder in which no round was made."""
        if not self.metrics():
            shutil.rmtree(self.path, ignore_errors=True)

    def spec(self) -> Spec:
        """The run's spec."""
        return Spec.from_toml((self.path / "spec.toml").read_text(encoding="utf-8"), where=str(self.path))

    # Metrics

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl and push it to the disk."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(to_json(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All evaluations so far; a line cut off by a kill is left out."""
        path = self.path / "metrics.jsonl"
        rows = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):
                    rows.append(json.loads(line))
        return rows

    def drop_metrics_after(self, round: int) -> None:
        """Forget evaluations past a round: the resumed run makes them again."""
        kept = [row for row in self.metrics() if row["round"] <= round]
        write_text(self.path / "metrics.jsonl", "".join(to_json(row) + "\n" for row in kept))

    # Checkpoints

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop all but the newest two."""
        meta = {
            "round": checkpoint.round,
            "spec_digest": checkpoint.spec_digest,
            "data_digest": checkpoint.data_digest,
            "leaves": len(checkpoint.leaves),
        }
        arrays: dict[str, Any] = {f"leaf{i}": leaf for i, leaf in enumerate(checkpoint.leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
        write_bytes(self._checkpoints / f"round-{checkpoint.round:08d}.npz", buffer.getvalue())
        for old in self._checkpoint_files()[:-_KEEP_CHECKPOINTS]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None."""
        for path in reversed(self._checkpoint_files()):
            try:
                with np.load(path, allow_pickle=False) as archive:
                    meta = json.loads(str(archive["meta"]))
                    leaves = [archive[f"leaf{i}"] for i in range(meta["leaves"])]
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                continue  # a damaged disk block: the one before it still serves
            return Checkpoint(meta["round"], leaves, meta["spec_digest"], meta["data_digest"])
        return None

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _checkpoint_files(self) -> list[Path]:
        return sorted(self._checkpoints.glob("round-*.npz"))

    # The outcome

    def save_model(self, leaves: Mapping[str, np.ndarray]) -> None:
        """The parameters as model.npz, one array a leaf, named by its path in the tree."""
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        np.savez(buffer, **arrays)
        write_bytes(self.path / "model.npz", buffer.getvalue())

    def load_model(self) -> dict[str, np.ndarray]:
        """The parameters by name."""
        path = self.path / "model.npz"
        if not path.is_file():
            raise SpecError(
                f"{str(self.path)!r} has no model yet; finish it with `dither run --resume {self.path}`"
            )
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json: its presence says that the run is complete."""
        write_text(self.path / "summary.json", to_json(summary, indent=2))

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete run, or None."""
        path = self.path / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# Atomic writes


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file beside its place, push it to the disk, and move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in which ∞ and NaN are the strings "inf" and "nan", as JSON has no such numbers."""
    return json.dumps(_json_ready(value), indent=indent, ensure_ascii=False)


def _json_ready(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_ready(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return _json_ready(value.tolist())
    if isinstance(value, np.generic):
        return _json_ready(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
