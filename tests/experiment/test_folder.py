"""The run folder: whole files or none, and a way back from every kill."""

import json
import os

import numpy as np
import pytest

from dither.errors import DamagedFile, RunExists
from dither.experiment import folder as runs
from dither.experiment import train
from dither.spec import Spec


def checkpoint(round, value=1.0):
    return runs.Checkpoint(round, [np.full(3, value, np.float32), np.arange(2)], "spec", "data")


def test_checkpoints_round_trip_and_only_the_newest_two_stay(tmp_path):
    folder = runs.RunFolder(tmp_path)
    for round in (10, 20, 30):
        folder.save_checkpoint(checkpoint(round, round / 7))
    files = sorted(path.name for path in (tmp_path / "local" / "checkpoints").iterdir())
    assert files == ["round-00000020.npz", "round-00000030.npz"]
    loaded = folder.load_checkpoint()
    assert loaded.round == 30
    assert loaded.leaves[0].tobytes() == np.full(3, 30 / 7, np.float32).tobytes()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    folder = runs.RunFolder(tmp_path)
    folder.save_checkpoint(checkpoint(10))
    folder.save_checkpoint(checkpoint(20))
    newest = tmp_path / "local" / "checkpoints" / "round-00000020.npz"
    newest.write_bytes(newest.read_bytes()[:-40])
    assert folder.load_checkpoint().round == 10


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "summary.json"
    runs.write_text(target, "old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        runs.write_text(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_file_is_in_its_place_on_the_disk_when_it_was_written(tmp_path, monkeypatch):
    """A power failure undoes a rename that is not on the disk. A party would forget an upload that has left, and
    mask another one with the same stream."""
    done = []
    replace, sync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("moved") or replace(*paths))
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_ino) or sync(file))
    runs.write_bytes(tmp_path / "secagg.json", b"newest", private=True)
    assert done == [(tmp_path / "secagg.json").stat().st_ino, "moved", tmp_path.stat().st_ino]


def test_metrics_past_the_checkpoint_and_cut_lines_are_dropped(tmp_path):
    folder = runs.RunFolder(tmp_path)
    for round in (10, 20, 30):
        folder.append_metrics({"round": round, "loss": float("nan") if round == 20 else 0.5})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"round": 40, "lo')
    assert [row["round"] for row in folder.metrics()] == [10, 20, 30]
    folder.drop_metrics_after(20)
    assert [row["round"] for row in folder.metrics()] == [10, 20]
    assert folder.metrics()[1]["loss"] == "nan"


def test_a_folder_in_use_is_refused_and_a_stranger_is_not_opened(tmp_path):
    runs.RunFolder.create(tmp_path / "run", Spec(), {})
    with pytest.raises(RunExists, match="already exists"):
        runs.RunFolder.create(tmp_path / "run", Spec(), {})
    with pytest.raises(RunExists, match="not a run folder"):
        runs.RunFolder.open(tmp_path)


def test_other_users_of_the_machine_cannot_enter_what_is_local(tmp_path):
    before = os.umask(0o022)
    try:
        runs.RunFolder.create(tmp_path / "run", Spec(), {})
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "run" / "local").stat().st_mode & 0o777 == 0o700


def test_json_has_words_for_infinity():
    text = runs.to_json({"a": float("inf"), "b": np.float32(1.5), "c": np.array([1, 2]), "d": (1, -float("inf"))})
    assert json.loads(text) == {"a": "inf", "b": 1.5, "c": [1, 2], "d": [1, "-inf"]}


def test_a_schema_that_was_read_from_records_is_listed_with_a_key(tmp_path):
    folder = runs.RunFolder.create(tmp_path / "run", Spec(), {}, {"local/schema.toml": "bounds"})
    assert folder.read("local/schema.toml") == b"bounds"
    (tmp_path / "run" / "local" / "schema.toml").write_text("others")
    with pytest.raises(DamagedFile, match=r"local/schema.toml' does not hold what was written"):
        folder.read("local/schema.toml")


def test_a_run_that_is_under_way_is_not_continued_by_another_process(tmp_path):
    """Two that begin rounds in one folder would each report without the other's."""
    refused = []

    def second(experiment, folder, done):
        with pytest.raises(RunExists, match="another process"):
            train.resume(folder)
        refused.append(done)

    values = {"num_rounds": 2, "num_clients": 4, "cohort_size": 4, "data.name": "breast-cancer"}
    report = train.run("cpfed", values={**values, "data.features": "all"}, out=tmp_path / "run", on_start=second)
    assert refused == [0]
    assert train.resume(tmp_path / "run").rounds == report.rounds == 2


def test_a_folder_of_an_earlier_version_is_refused_and_left_alone(tmp_path):
    folder = runs.RunFolder.create(tmp_path / "old", Spec(), {})
    folder.append_metrics({"round": 10, "loss": 0.5})
    (folder.path / "digests.json").unlink()
    (folder.path / "provenance.json").write_text('{"run": "old"}')
    with pytest.raises(RunExists, match="earlier version"):
        train.resume(folder.path)
    assert folder.metrics() == [{"round": 10, "loss": 0.5}]
