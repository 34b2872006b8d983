"""What a long computation has found so far outlives a kill, and nothing outlives its end."""

import numpy as np

from dither.experiment.folder import Unfinished, cache_folder


def test_answers_come_back_exactly_until_the_end(tmp_path):
    kept = Unfinished(tmp_path, "plan", ["a spec", 1])
    assert kept.get("one") is None
    kept.put("one", {"loss": np.float64(0.1) * 3, "scores": np.array([1 / 3, np.inf])})
    again = Unfinished(tmp_path, "plan", ["a spec", 1])
    assert again.get("one") == {"loss": 0.1 * 3, "scores": [1 / 3, np.inf]}
    assert Unfinished(tmp_path, "plan", ["another spec", 1]).get("one") is None
    assert Unfinished(tmp_path, "audit", ["a spec", 1]).get("one") is None
    again.done()
    assert list(tmp_path.iterdir()) == []
    assert Unfinished(tmp_path, "plan", ["a spec", 1]).get("one") is None


def test_a_line_cut_off_by_a_kill_costs_itself_alone(tmp_path):
    kept = Unfinished(tmp_path, "plan", 1)
    kept.put("one", 1)
    kept.put("two", 2)
    kept.path.write_bytes(kept.path.read_bytes()[:-4])
    again = Unfinished(tmp_path, "plan", 1)
    assert (again.get("one"), again.get("two")) == (1, None)
    again.put("two", 2)
    last = Unfinished(tmp_path, "plan", 1)
    assert (last.get("one"), last.get("two")) == (1, 2)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = Unfinished(None, "plan", 1)
    kept.put("one", 1)
    kept.done()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_CACHE", str(tmp_path))
    assert cache_folder("unfinished") == tmp_path / "unfinished"


def test_other_users_cannot_read_what_an_audit_has_found(tmp_path):
    """Of a user's own records it is exact; the file was as open as the cache folder."""
    kept = Unfinished(tmp_path, "audit", 1)
    kept.put("one", 1)
    assert kept.path.stat().st_mode & 0o077 == 0
