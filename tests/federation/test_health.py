"""How a run stands: from its folder, over HTTP, and for a folder of keys."""

import fcntl
import json
import urllib.error
import urllib.request

import pytest

from dither.errors import ConfigError
from dither.federation import health, keys
from dither.federation.state import Journal

STORY = [
    ("up", {"process": 1}, "starting"),
    ("joined", {"party": "ann", "records": 5, "versions": {}}, "starting"),
    ("waiting", {"to": "join", "parties": ["bob"]}, "waiting"),
    ("start", {"rounds": 3, "done": 0}, "running"),
    ("round", {"round": 0, "of": 3, "missing": ["bob"], "accuracy": 0.5}, "running"),
    ("failed", {"error": "bob did not come", "exit_code": 6}, "failed"),
    ("up", {"process": 2}, "starting"),
    ("start", {"rounds": 3, "done": 1}, "running"),
    ("done", {"folder": "x"}, "done"),
]


def test_the_state_follows_the_events(tmp_path):
    journal = Journal(tmp_path)
    journal.lock()
    for event, facts, state in STORY:
        journal.progress(event, **facts)
        seen = health.of_folder(tmp_path)
        assert (seen["state"], seen["healthy"]) == (state, state != "failed")
    assert (seen["round"], seen["of"], seen["joined"]) == (1, 3, ["ann"])
    assert "accuracy" not in json.dumps(seen)


def test_a_server_that_was_killed_is_not_called_healthy(tmp_path):
    Journal(tmp_path).progress("start", rounds=3, done=1)
    for name in ("serve.lock", "lock"):
        (tmp_path / name).touch()  # nobody holds them any more
    seen = health.of_folder(tmp_path)
    assert (seen["state"], seen["healthy"], seen["round"]) == ("stopped", False, 1)
    assert "the same `dither serve` command continues the run" in seen["why"]
    with open(tmp_path / "serve.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert health.of_folder(tmp_path)["state"] == "running"


def test_the_endpoint(tmp_path):
    with health.Endpoint("127.0.0.1", 0, tmp_path) as endpoint:

        def get(path="/health"):
            with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}{path}", timeout=5) as answer:
                return json.load(answer)

        assert get()["state"] == "starting"
        Journal(tmp_path).progress("failed", error="bob did not come", exit_code=6)
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            get()
        assert json.load(caught.value)["why"] == "bob did not come"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("/etc/passwd")


def test_members_and_their_certificate(tmp_path):
    keys.create(tmp_path / "fed", ["ann", "bob"], hosts=["localhost"], days=10)
    for folder in ("fed", "fed/server"):
        seen = health.of_folder(tmp_path / folder)
        assert seen["parties"] == ["ann", "bob"]
        assert seen["certificate_expires_in_days"] == 9
        assert "renew" in seen["advice"]
    with pytest.raises(ConfigError, match="neither"):
        health.of_folder(tmp_path)
