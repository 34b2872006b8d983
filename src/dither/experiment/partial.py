"""What a long computation has found so far, kept until it is done: an interrupted one goes on from there.

One file a computation, one line an answer with its checksum. Nothing stays behind a computation that came to its
end, so that no later version of the code meets answers of an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dither.types import __version__


def default_folder() -> Path:
    """$DITHER_CACHE, or the platform's cache folder, with "unfinished" below it."""
    wish = os.environ.get("DITHER_CACHE", "")
    if wish:
        return Path(wish) / "unfinished"
    from platformdirs import user_cache_path

    return user_cache_path("dither") / "unfinished"


class Unfinished:
    """Answers by key. `about` is everything they depend on; with folder None nothing is kept."""

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
        """What was found before; None where nothing was."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep an answer."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            # A line that a kill cut off must not swallow this one.
            text = json.dumps([key, value], default=_plain)
            file.write("\n" * (file.tell() > 0) + json.dumps([text, zlib.crc32(text.encode())]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self) -> None:
        """It came to its end: forget the answers."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be stored")
