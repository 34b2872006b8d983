"""Reports of `dither reproduce`: HTML pages in a folder, shown in a frame that can do nothing."""

from __future__ import annotations

import json
from typing import Any

from dither.web.folders import Folder
from dither.web.index import section, text_of

_DEEPEST = 3


def listed(folder: Folder) -> list[dict[str, Any]]:
    """Every HTML page of the folder, newest first, with what a report.json beside it says."""
    found = []
    for path in folder.root.rglob("*.html") if folder.root.is_dir() else ():
        parts = path.relative_to(folder.root).parts
        inside = folder.file(*parts)
        if len(parts) > _DEEPEST + 1 or inside is None or any(part.startswith(".") for part in parts):
            continue
        name = "/".join(parts)
        found.append({"name": name, "time": inside.stat().st_mtime, **_beside(folder, parts[:-1])})
    return sorted(found, key=lambda report: (-report["time"], report["name"]))


def _beside(folder: Folder, where: tuple[str, ...]) -> dict[str, Any]:
    text = folder.text(*where, "report.json")
    try:
        said = json.loads(text) if text else {}
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        return {}
    figures = said.get("figures")
    return {
        "scale": text_of(said.get("scale", "")),
        "figures": len(figures) if isinstance(figures, list) else None,
        "command": text_of(section(said, "made").get("command", "")),
    }


def page(folder: Folder, name: str) -> str | None:
    """A report's HTML, or None where the name is no report of the folder."""
    if not name.endswith(".html"):
        return None
    return folder.text(*name.split("/"))
