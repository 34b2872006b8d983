"""Nothing outside the runs folder can be read: not by names, not by links."""

import os

import pytest

from dither.web.files import SafeFolder
from tests.web.folders import make_run

NAMES = [
    ("..", "secret.txt"),
    ("../secret.txt",),
    ("run", "..", "..", "secret.txt"),
    ("run/../../secret.txt",),
    ("run", "....//secret.txt"),
    ("run\\..\\..\\secret.txt",),
    ("run", "spec.toml\0.png"),
    ("run", "%2e%2e/%2e%2e/secret.txt"),
    ("",),
    ("run",),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    make_run(tmp_path / "runs")
    return SafeFolder(tmp_path / "runs")


@pytest.mark.parametrize("parts", NAMES, ids=repr)
def test_a_name_that_leads_out_reads_nothing(folder, parts):
    assert folder.file(*parts) is None
    assert folder.text(*parts) is None


def test_an_absolute_name_reads_nothing(folder, tmp_path):
    assert folder.file(str(tmp_path / "secret.txt")) is None
    assert folder.file("run", "/etc/hosts") is None


def test_a_link_that_leads_out_reads_nothing_and_one_inside_does(folder, tmp_path):
    os.symlink(tmp_path / "secret.txt", folder.root / "run" / "summary2.json")
    os.symlink(tmp_path, folder.root / "out")
    os.symlink("spec.toml", folder.root / "run" / "copy.toml")
    os.symlink("self", folder.root / "run" / "self")
    assert folder.text("run", "summary2.json") is None
    assert folder.text("out", "secret.txt") is None
    assert folder.text("run", "self") is None
    assert folder.text("run", "copy.toml") == folder.text("run", "spec.toml") != ""


def test_runs_are_found_in_folders_but_not_through_links(folder, tmp_path):
    make_run(folder.root, "sweep/a")
    make_run(tmp_path / "elsewhere", "b")
    os.symlink(tmp_path / "elsewhere", folder.root / "linked")
    make_run(folder.root, ".hidden")
    make_run(folder.root, "run/checkpoints/inner")  # inside a run: a part of it, not another one
    assert sorted(folder.runs()) == ["run", "sweep/a"]


def test_a_folder_that_is_a_run_is_the_only_run(folder):
    assert list(SafeFolder(folder.root / "run").runs()) == ["."]
