"""What is remembered of a user's ledgers outside of them, where neither an old copy of a ledger nor a new one
brings it back.

    ledgers/ID.json        the newest entry seen of a ledger, and where it lies (written by `store`)
    data/ID-DATASET.json   the sketch of a data set that was charged to it, under a key of this folder's own
    sketch.key             that key
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import numpy as np
import platformdirs

from dither.accounting.ledger.sketch import Sketch, scan
from dither.accounting.ledger.store import write_atomically
from dither.errors import LedgerError


class Known(NamedTuple):
    """Records that a ledger knows: which, where it lies, the file they came from, and how much is shared."""

    ledger: str
    path: str
    file: str
    share: float


def folder(part: str = "") -> Path:
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


def known(rows: np.ndarray) -> list[Known]:
    """Which ledgers know these records, as far as this user has charged any."""
    found = [_read(path) for path in sorted(folder("data").glob("*.json"))]
    scanned = scan(rows, _key(), [sketch for _, sketch in found])
    shares = [(about, scanned.shared(sketch)) for about, sketch in found]
    return [about._replace(share=share) for about, share in shares if share]


def remembers(ledger: str, dataset: str) -> bool:
    """Whether the data set of a ledger is known here."""
    return (folder("data") / f"{ledger}-{dataset}.json").exists()


def remember(rows: np.ndarray, ledger: str, path: Path, dataset: str, file: str) -> None:
    """Records that a ledger is about to be charged for."""
    about = {"ledger": ledger, "path": str(path.resolve()), "file": file}
    text = json.dumps({**about, **scan(rows, _key()).sketch.encode()}) + "\n"
    write_atomically(folder("data") / f"{ledger}-{dataset}.json", text, mode=0o600)


def _read(path: Path) -> tuple[Known, Sketch]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Known(fields["ledger"], fields["path"], fields["file"], 0.0), Sketch.decode(fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{path}: not readable ({type(error).__name__}); restore it, or delete it if nothing was ever spent "
            "on these records"
        ) from error


def _key() -> bytes:
    path = folder() / "sketch.key"
    if not path.exists():
        if (
            any(folder("data").glob("*.json")) and not path.exists()
        ):  # another process may have made both meanwhile
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
