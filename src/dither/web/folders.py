"""What may be read: files that lie inside the runs folder, wherever their links point."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SPEC = "spec.toml"
_DEEPEST = 4  # folders below the root in which a run may lie
_MOST = 20_000
_LARGEST = 256 * 2**20  # bytes of a text that is read


class Folder:
    """A folder of which files may be read. Links are followed only while they stay inside."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()

    def file(self, *parts: str) -> Path | None:
        """The file at that place under the root; None where there is none or it lies outside."""
        try:
            path = self.root.joinpath(*parts).resolve()
            inside = path.is_relative_to(self.root) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # a name with a null byte, a link to itself
            return None
        return path if inside else None

    def text(self, *parts: str) -> str | None:
        """The file's text, or None."""
        path = self.file(*parts)
        try:
            if path is None or path.stat().st_size > _LARGEST:
                return None
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def may_read(self, *parts: str) -> bool:
        """Whether there is nothing at that place, or a file that `text` would read."""
        path = self.file(*parts)
        missing = path is None and not os.path.lexists(self.root.joinpath(*parts))
        return missing or (path is not None and path.stat().st_size <= _LARGEST)

    def runs(self) -> Iterator[str]:
        """Run folders as paths relative to the root ("." where the root is one itself)."""
        if (self.root / SPEC).is_file():
            yield "."
            return
        seen = 0
        waiting = [("", 0)]
        while waiting:
            where, depth = waiting.pop()
            try:
                with os.scandir(self.root / where) as entries:
                    names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            for name in names:
                seen += 1
                if name.startswith(".") or seen > _MOST:
                    continue
                inner = f"{where}/{name}" if where else name
                if os.path.lexists(self.root / inner / SPEC):
                    yield inner
                elif depth < _DEEPEST:
                    waiting.append((inner, depth + 1))
