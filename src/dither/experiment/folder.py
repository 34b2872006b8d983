"""The run folder: everything a run leaves behind, written so that a kill at any moment does no harm.

    spec.toml         the complete spec: the same file runs again
    provenance.json   versions, device
    metrics.jsonl     one line per evaluation, appended as it happens: scores on public test records
    model.safetensors the parameters by name
    model.py          the file of a model of your own
    schema.toml       how a table becomes features (tables whose schema is public)
    summary.json      the outcome: accuracy, loss, the three ε
    plot.png, .svg    accuracy and loss against rounds
    digests.json      what the finished files hold, and which rounds were begun
    local/            what no ε covers: it stays with the owner of the records
        metrics.jsonl     training loss and the clients' own figures
        checkpoints/      the state after some round, with the clients' states: the newest two
        summary.json      outcomes that are exact

A file is written beside its place and moved there when complete, so that it is never half there. Metrics are
appended before the checkpoint of the same round: after a kill, lines past the checkpoint are dropped and
written again. `digests.json` is written last: a file that does not hold what it says is named, not used. It finds
accidents, not the owner's own edits: who can write the folder can write new digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import io
import json
import math
import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from dither.accounting import ProvenRow
from dither.errors import DamagedFile, DitherError, RunExists, SpecError
from dither.spec import Spec
from dither.types import __version__

FORMAT = 2  # of run folders; those without a number have no digests.json
_KEEP_CHECKPOINTS = 2
_ADVICE = "restore it from a copy, or repeat the run"
# Files that grow: what is listed of them is how many lines there were, and their digest. How long the lines of a
# local file are would tell of its exact figures.
_LOGS = ("metrics.jsonl", "local/metrics.jsonl", "rounds.jsonl")
_OUTCOME = ("model.safetensors", "model.npz", "plot.png", "plot.svg", "summary.json", "local/summary.json")
_ONCE = ("local/key", "spec.toml", "provenance.json", "schema.toml", "local/schema.toml", "terms.json", "model.py")
_LOCAL = """\
Local, not private: no epsilon covers what is in this folder. It holds exact figures of the records (training
loss, shares of clipped gradients), the clients' states, and what is needed to resume an interrupted run.
Do not publish it and do not send it. Everything outside it is public or covered by the epsilon in summary.json.
"""


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
    def create(
        cls, path: str | Path, spec: Spec, provenance: Mapping[str, Any], schema: Mapping[str, str] | None = None
    ) -> RunFolder:
        """A new run folder; refuses one that already exists and is not empty. `schema` is a file's text by its
        name."""
        folder = cls(path)
        folder.refuse_taken()
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.begin_files({"run": secrets.token_hex(8), **provenance}, spec, schema)
        return folder

    def refuse_taken(self) -> None:
        """`RunExists` where the folder exists already and is not empty."""
        path = self.path
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunExists(
                f"{str(path)!r} already exists; give another --out, or continue it with --resume {path}"
            )

    def begin_files(
        self, provenance: Mapping[str, Any], spec: Spec, schema: Mapping[str, str] | None = None
    ) -> None:
        """The files that a run begins with."""
        (self.path / "local").mkdir(mode=0o700, parents=True, exist_ok=True)  # exact figures: for the owner alone
        write_text(self.path / "local" / "README", _LOCAL)
        write_text(self.path / "local" / "key", secrets.token_hex(32))
        self._save_digests({"files": {}, "begun": []})
        for name, text in (schema or {}).items():
            write_text(self.path / name, text)
        write_text(self.path / "provenance.json", to_json({**provenance, "format": FORMAT}, indent=2))
        files = {**self._digests_of(), "spec.toml": self._listing("spec.toml", spec.to_toml().encode())}
        self._save_digests({"files": files, "begun": []})
        # Last, as a folder with a spec.toml is one that can be resumed.
        write_text(self.path / "spec.toml", spec.to_toml())

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder."""
        folder = cls(path)
        if not (folder.path / "spec.toml").is_file():
            inside = folder.path / "run"  # of a project of `dither start`
            where = f"; give {str(inside)!r}" if (inside / "spec.toml").is_file() else ": it has no spec.toml"
            raise RunExists(f"{str(folder.path)!r} is not a run folder{where}")
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
        found = self.read_json("provenance.json")
        if found is None or "run" not in found:
            raise self._damaged("provenance.json", "is missing" if found is None else "has no 'run'")
        return found

    def discard(self) -> None:
        """Remove a folder in which no round was made."""
        if not self.metrics() and not self.begun():
            shutil.rmtree(self.path, ignore_errors=True)

    def spec(self) -> Spec:
        """The run's spec."""
        text = self._text("spec.toml")
        if text is None or "method" not in text:  # a spec of a run folder is complete: without keys it is none
            raise self._damaged("spec.toml", "is missing" if text is None else "holds no spec")
        return Spec.from_toml(text, where=str(self.path / "spec.toml"))

    # Digests

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if there is none. DamagedFile if it is not what was written."""
        state, path = self._digests(), self.path / name
        listed = None if state is None else state["files"].get(name)
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise self._damaged(name, f"cannot be read ({error.strerror})") from None
        if listed is None or (name.startswith("local/") and not (self.path / "local").is_dir()):
            return content  # not listed, or in a copy of what is released alone
        if content is None:
            raise self._damaged(name, "is missing")
        size, _, digest = listed.rpartition(":")
        if self._digest(name, _beginning(content, size)) != digest:
            raise self._damaged(name, "does not hold what was written (its digest differs)")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place of another one, whose digest is forgotten before."""
        state = self._digests()
        if state is not None and state["files"].pop(name, None):
            self._save_digests(state)
        write_bytes(self.path / name, content)
        if state is not None:
            self._save_digests({**state, "files": {**state["files"], name: self._listing(name, content)}})

    def seal(self, also: Mapping[str, str] | None = None) -> None:
        """List what the files hold now, and `also` these."""
        state = self._digests()
        if state is not None:
            self._save_digests({**state, "files": self._digests_of({**state["files"], **(also or {})})})

    def begin(self, start: int, stop: int) -> None:
        """Write down that rounds start..stop-1 are about to be made, and forget an earlier outcome. When this
        returns it is on the disk: rounds that a kill makes undone, and that are made again with fresh noise, have
        been released twice."""
        state = self.resumable_state()
        begun = [list(span) for span in state["begun"]]
        if begun and begun[-1][1] == start:
            begun[-1][1] = stop
        elif start < stop:
            begun.append([start, stop])
        files = {name: digest for name, digest in state["files"].items() if name not in _OUTCOME}
        self._save_digests({"files": files, "begun": begun})
        (self.path / "summary.json").unlink(missing_ok=True)

    def remember_begun(self, begun: Sequence[tuple[int, int]]) -> None:
        """Take over what a ledger knows of the rounds that were begun, where this folder is an old copy."""
        self._save_digests({**self.resumable_state(), "begun": [list(span) for span in begun]})

    def resumable_state(self) -> dict[str, Any]:
        """What digests.json holds; `RunExists` in a folder of an earlier version, which had none."""
        state = self._digests()
        if state is None:
            raise RunExists(
                f"{str(self.path)!r} was begun by an earlier version and cannot be resumed; start a new run"
            )
        return state

    def begun(self) -> list[tuple[int, int]]:
        """Stretches of rounds, in the order in which they were begun; they overlap where a kill undid some."""
        state = self._digests()
        return [] if state is None else [(start, stop) for start, stop in state["begun"]]

    def _digests(self) -> dict[str, Any] | None:
        """digests.json; None in a folder of a version that had none."""
        path = self.path / "digests.json"
        if not path.is_file():
            provenance = self.path / "provenance.json"
            if provenance.is_file() and b'"format"' in provenance.read_bytes():
                raise self._damaged("digests.json", "is missing")
            return None
        found = read_checked(path, _ADVICE)
        try:
            files = {str(name): str(digest) for name, digest in found["files"].items()}
            return {"files": files, "begun": [(int(start), int(stop)) for start, stop in found["begun"]]}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._damaged("digests.json", "is not a list of digests") from None

    def _save_digests(self, state: Mapping[str, Any]) -> None:
        write_checked(self.path / "digests.json", state)

    def _digests_of(self, known: Mapping[str, str] | None = None) -> dict[str, str]:
        """The digests of all finished files; those `known` stay where a file is written once."""
        kept = {str(path.relative_to(self.path)) for path in self._checkpoint_files()}
        found = {name: d for name, d in (known or {}).items() if name in kept or "checkpoints/" not in name}
        for name in (*_ONCE, *_LOGS, *_OUTCOME):
            if (self.path / name).is_file() and (name not in found or name not in _ONCE):
                found[name] = self._listing(name, (self.path / name).read_bytes())
        return found

    def _listing(self, name: str, content: bytes) -> str:
        return f"{len(content.splitlines())} lines:" * (name in _LOGS) + self._digest(name, content)

    def _digest(self, name: str, content: bytes) -> str:
        """SHA-256; keyed for local files, with a local key, so that nobody can test guesses of records."""
        if not name.startswith("local/") or name == "local/key":
            return hashlib.sha256(content).hexdigest()
        return hmac.new(self.read("local/key") or b"", content, hashlib.sha256).hexdigest()

    def _damaged(self, name: str, what: str) -> DamagedFile:
        return DamagedFile(f"{str(self.path / name)!r} {what}; {_ADVICE}")

    def _text(self, name: str) -> str | None:
        content = self.read(name)
        try:
            return None if content is None else content.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(name, "is not text in UTF-8") from None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """What a JSON file holds; None if there is none."""
        text = self._text(name)
        if text is None:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damaged(name, "is not valid JSON") from None
        if not isinstance(found, dict):
            raise self._damaged(name, "is not a JSON object")
        return found

    # Metrics

    def append_metrics(self, row: Mapping[str, Any], local: Mapping[str, Any] | None = None) -> None:
        """Add one line to metrics.jsonl and one to that of local/, and push them to the disk."""
        for name, values in (("metrics.jsonl", row), ("local/metrics.jsonl", local)):
            if values is None:
                continue
            (self.path / name).parent.mkdir(exist_ok=True)
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(to_json(values) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """All evaluations so far, as far as they are released; a line cut off by a kill is left out."""
        return self.rows("metrics.jsonl")

    def local_metrics(self) -> list[dict[str, Any]]:
        """The exact figures of the same evaluations: local, not private."""
        return self.rows("local/metrics.jsonl")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The lines of a log, one for each round; a line cut off by a kill is left out."""
        rows = []
        for line in (self.read(name) or b"").splitlines():
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("round"), int):
                    rows.append(row)
        return rows

    def drop_metrics_after(self, round: int) -> None:
        """Forget evaluations past a round: the resumed run makes them again."""
        for name in ("metrics.jsonl", "local/metrics.jsonl"):
            kept = [row for row in self.rows(name) if row["round"] <= round]
            if kept or (self.path / name).is_file() or name == "metrics.jsonl":
                self.write(name, "".join(to_json(row) + "\n" for row in kept).encode())

    # Checkpoints

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, list what there is by now, and drop all but the newest two."""
        meta = {**checkpoint._asdict(), "leaves": len(checkpoint.leaves)}
        arrays: dict[str, Any] = {f"leaf{i}": leaf for i, leaf in enumerate(checkpoint.leaves)}
        buffer = io.BytesIO()
        np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
        name = f"local/checkpoints/round-{checkpoint.round:08d}.npz"
        write_bytes(self.path / name, buffer.getvalue())
        self.seal({name: self._listing(name, buffer.getvalue())})
        for old in self._checkpoint_files()[:-_KEEP_CHECKPOINTS]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None if none was written."""
        damaged: DitherError | None = None
        state = self._digests()
        self.read("local/key")  # if it is damaged, not they
        for path in reversed(self._checkpoint_files()):
            name = str(path.relative_to(self.path))
            if state is not None and name not in state["files"]:
                continue  # a kill came before it was listed: its rounds are made again
            try:
                with np.load(io.BytesIO(self.read(name) or b""), allow_pickle=False) as archive:
                    meta = json.loads(str(archive["meta"]))
                    leaves = [archive[f"leaf{i}"] for i in range(meta["leaves"])]
                return Checkpoint(**{**meta, "leaves": leaves})
            except Exception:  # damaged bytes may raise anything
                damaged = self._damaged(name, "is damaged")  # the one before it still serves
        listed = [name for name in (state or {"files": ()})["files"] if "checkpoints" in name]
        if damaged is not None or listed:
            raise damaged or self._damaged(listed[-1], "is missing")
        return None

    def _checkpoint_files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.path.glob("local/checkpoints/round-*.npz"))

    # The outcome

    def save_model(self, leaves: Mapping[str, np.ndarray]) -> None:
        """The parameters as model.safetensors, by name."""
        from safetensors.numpy import save

        arrays = {name: np.ascontiguousarray(leaf) for name, leaf in leaves.items()}
        write_bytes(self.path / "model.safetensors", save(arrays))

    def load_model(self) -> dict[str, np.ndarray]:
        """The parameters by name."""
        from safetensors.numpy import load

        content, old = self.read("model.safetensors"), self.read("model.npz")  # as earlier versions wrote it
        name = "model.npz" if content is None else "model.safetensors"
        if content is None and old is None:
            raise SpecError(
                f"{str(self.path)!r} has no model yet; finish it with `dither run --resume {self.path}`"
            )
        try:
            if content is not None:
                return dict(load(content))
            with np.load(io.BytesIO(old or b""), allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except Exception:  # damaged bytes may raise anything
            raise self._damaged(name, "is damaged") from None

    def save_summary(self, summary: Mapping[str, Any], local: Mapping[str, Any] | None = None) -> None:
        """summary.json: its presence, once it is listed, says that the run is complete."""
        if local is not None:
            write_text(self.path / "local" / "summary.json", to_json(local, indent=2))
        write_text(self.path / "summary.json", to_json(summary, indent=2))
        self.seal()

    def summary(self) -> dict[str, Any] | None:
        """The summary of a complete run, or None."""
        state = self._digests()
        if state is not None and "summary.json" not in state["files"]:
            return None  # of an outcome that is being made anew, or a kill came before it was listed
        return self.read_json("summary.json")

    def audit(self) -> tuple[dict[str, Any] | None, bool]:
        """What `dither audit` has shown, and whether it is exact, of a user's own records, and so local."""
        released = self.read_json("audit.json")
        found = released or self.read_json("local/audit.json")
        if found is not None and not isinstance(found.get("rows"), list):
            raise self._damaged("audit.json", "has no rows")
        return found, not released

    def local_summary(self) -> dict[str, Any]:
        """Outcomes that are exact: local, not private."""
        return self.read_json("local/summary.json") or {}


def _beginning(content: bytes, size: str) -> bytes:
    """As much of a log as is listed: that many lines (earlier versions listed bytes); all of another file."""
    count, _, lines = size.partition(" ")
    if lines:
        return b"".join(content.splitlines(keepends=True)[: int(count)])
    return content[: int(count)] if count else content


# Atomic writes


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file beside its place, push it to the disk, and move it there. When this returns, the file is in its
    place on the disk. A `private` one can be read by its owner alone, at every moment. A link stays a link; a
    device or a pipe is written to, not replaced."""
    if not private:
        path = path.resolve()
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o600 if private else 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:  # a full disk
            error.filename = str(path)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # else a power failure may undo the move
    finally:
        os.close(handle)


def lock(path: Path, seconds: float = 0.0) -> TextIO | None:
    """Lock a file until the handle is closed or the process ends; None if another process holds it for so long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # the caller holds it
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= until:
                handle.close()
                return None
            time.sleep(0.1)
        except OSError as error:  # such as a network disk without locks: nobody else is there
            handle.close()
            error.filename = str(path)
            raise


def is_free(path: Path) -> bool:
    """Whether the file is there, and no process holds its lock."""
    if not path.is_file():
        return False
    with open(path, "rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of itself."""
    plain = json.loads(json.dumps(value))
    write_text(path, json.dumps({**plain, "checksum": _checksum(plain)}, indent=1, ensure_ascii=False) + "\n")


def read_checked(path: Path, advice: str, old: tuple[str, ...] = ()) -> dict[str, Any]:
    """What `write_checked` wrote, or DamagedFile. A version without checksums wrote objects of `old` keys."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise DamagedFile(f"{str(path)!r} cannot be read ({error.strerror}); {advice}") from None
    except (ValueError, RecursionError):
        raise DamagedFile(f"{str(path)!r} is not valid JSON; {advice}") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{str(path)!r} is not a JSON object; {advice}")
    checksum = found.pop("checksum", None)
    if checksum != _checksum(found) and (checksum is not None or not old or not set(found) <= set(old)):
        raise DamagedFile(f"{str(path)!r} does not hold what was written (its checksum differs); {advice}")
    return found


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON of plain values, dataclasses and whatever has a `to_dict`. ∞ and NaN are the strings "inf" and "nan":
    JSON has no such numbers."""
    return json.dumps(_json_ready(value), indent=indent, ensure_ascii=False)


def _json_ready(value: Any) -> Any:
    if isinstance(value, ProvenRow):
        value = value.to_json()
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _json_ready(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return _json_ready(value.tolist())
    if isinstance(value, np.generic):
        return _json_ready(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


# Partial results of a long computation, kept until it is finished, so that an interrupted one can be resumed. One
# file per computation, one line per answer with its checksum. A finished computation leaves nothing behind, so no
# later version of the code meets answers of an earlier one.


def cache_folder(name: str) -> Path:
    """A folder for what can be computed again: in $DITHER_CACHE, or in the platform's cache folder."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("DITHER_CACHE") or user_cache_path("dither")) / name


class Unfinished:
    """Answers by key. `about` is everything they depend on; with folder None nothing is stored."""

    def __init__(self, folder: str | Path | None, kind: str, about: Any) -> None:
        text = json.dumps([__version__, kind, about], sort_keys=True, default=str)
        name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.jsonl"
        self.path = None if folder is None else Path(folder) / name
        self._known: dict[str, Any] = {}
        if self.path is not None and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    text, checksum = json.loads(line)
                    key, value = json.loads(text)
                except (TypeError, ValueError):  # cut off by a kill
                    continue
                if checksum == zlib.crc32(text.encode()):
                    self._known[key] = value

    def get(self, key: str) -> Any:
        """What was found before; None if nothing was."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store an answer."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Of an audit these are exact figures of the records: for the owner alone.
        with open(self.path, "a", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            # A line that a kill cut off must not swallow this one.
            text = json.dumps([key, value], default=_plain)
            file.write("\n" * (file.tell() > 0) + json.dumps([text, zlib.crc32(text.encode())]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> None:
        """The computation is finished: delete the answers."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored")
