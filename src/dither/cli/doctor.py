"""dither doctor: what is installed, what is missing, and the command for it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dither.cli.common import Json, LedgerFile, Quiet, print_table
from dither.errors import DitherError
from dither.types import __version__

_NEEDED = (
    "jax",
    "numpy",
    "scipy",
    "pandas",
    "scikit-learn",
    "matplotlib",
    "cryptography",
    "dp-accounting",
)
_EXTRAS = {"deploy": "flwr", "web": "fastapi", "pdf": "fpdf2", "docs": "mkdocs-material"}


class Finding(NamedTuple):
    """One thing that was looked at: whether it is fine, what was seen, and the command that mends it."""

    what: str
    fine: bool
    seen: str
    fix: str = ""


def doctor(ledger: LedgerFile = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Check this installation: versions, devices, data, caches, the ledger (exit code 1: something is wrong)."""
    looks: tuple[Callable[[], list[Finding]], ...] = (_software, _devices, _data, _disk, lambda: _ledger(ledger))
    findings = [finding for look in looks for finding in look()]
    extras = [finding for finding in findings if not finding.fine and finding.what.startswith("extra")]
    wrong = [finding for finding in findings if not finding.fine and finding not in extras]
    rows = [
        {
            "state": "ok" if each.fine else "missing" if each in extras else "wrong",
            "what": each.what,
            "seen": each.seen,
            "to fix": "" if each.fine else each.fix,
        }
        for each in findings
    ]
    footer = "all is well" if not wrong else f"{len(wrong)} of {len(findings)} need attention"
    footer += f"; {len(extras)} optional extras are not installed" if extras else ""
    print_table(rows, as_json=as_json, quiet=quiet, title=f"Dither {__version__}", footer=footer)
    if any(finding.what in ("python", "packages", "device", "ledger") for finding in wrong):
        sys.exit(1)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _software() -> list[Finding]:
    python = Finding(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer"
    )
    versions = {name: _version(name) for name in _NEEDED}
    missing = [name for name, version in versions.items() if not version]
    seen = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    packages = Finding("packages", not missing, seen, f"pip install {' '.join(missing)}")
    extras = [
        Finding(
            f"extra {extra}",
            bool(_version(name)),
            f"{name} {_version(name)}".strip(),
            f"pip install 'dither[{extra}]'",
        )
        for extra, name in _EXTRAS.items()
    ]
    return [python, packages, *extras]


def _devices() -> list[Finding]:
    try:
        from dither.simulation import devices
    except Exception as error:  # a broken JAX must not end the look at the rest
        return [Finding("device", False, str(error).splitlines()[0], "pip install --upgrade jax jaxlib")]
    name = " ".join(dict.fromkeys(devices.device().split(": ")))  # "cpu: cpu" is "cpu"
    return [Finding("device", True, f"{name}, {devices.cores()} cores")]


def _data() -> list[Finding]:
    folder = os.environ.get("DITHER_DATA", "")
    if folder and not Path(folder).is_dir():
        return [
            Finding(
                "data folder", False, f"DITHER_DATA={folder} is not a folder", "unset DITHER_DATA, or create it"
            )
        ]
    from dither.data.downloads import cache_folder

    cache = cache_folder()
    kept = sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []
    seen = [f"DITHER_DATA={folder}"] if folder else []
    seen.append(f"downloaded: {', '.join(kept) or 'nothing yet'}")
    return [Finding("data", True, "; ".join(seen))]


def _disk() -> list[Finding]:
    from platformdirs import user_cache_path

    cache = user_cache_path("dither")
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.is_dir() else 0
    free = shutil.disk_usage(cache if cache.is_dir() else Path.home()).free
    return [Finding("cache", free > 1e9, f"{cache}: {size / 1e6:,.0f} MB, {free / 1e9:,.0f} GB free", "make room")]


def _ledger(path: Path | None) -> list[Finding]:
    from dither.accounting.ledger import Ledger

    file = path or Ledger.default_path()
    if not file.exists():
        return [Finding("ledger", True, f"{file}: nothing has been charged")]
    try:
        book = Ledger(file)
        book.verify()
        return [Finding("ledger", True, f"{file}: {len(book.datasets())} data sets, intact")]
    except DitherError as error:
        return [Finding("ledger", False, str(error))]
