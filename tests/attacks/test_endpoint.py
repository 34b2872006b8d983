"""Strangers at /health: what they learn, and what they cost."""

import json
import socket
import threading
import urllib.request

import pytest

from dither.federation import health
from dither.federation.state import Journal


@pytest.fixture
def endpoint(tmp_path):
    with health.Endpoint("127.0.0.1", 0, tmp_path) as endpoint:
        yield endpoint


def get(endpoint):
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/health", timeout=5) as answer:
        assert "Python" not in answer.headers["Server"]
        return json.load(answer)


def test_a_question_does_not_read_the_whole_run_again(endpoint, tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    for number in range(200):
        journal.progress("round", round=number, of=500, missing=[])
    read, new_events = [], health.new_events

    def counted(*where):
        at, events = new_events(*where)
        read.extend(events)
        return at, events

    monkeypatch.setattr(health, "new_events", counted)
    for _ in range(10):
        assert get(endpoint)["round"] == 200
    assert len(read) == 200


def test_connections_that_say_nothing_keep_nobody_out(endpoint):
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(100)]
    try:
        assert get(endpoint)["state"] == "starting"
        assert threading.active_count() - before <= 2 * health._CONNECTIONS
    finally:
        for line in silent:
            line.close()


def test_half_a_line_hides_nothing_that_comes_after_it(endpoint, tmp_path):
    journal = Journal(tmp_path)
    journal.progress("start", rounds=3, done=0)
    with open(tmp_path / "progress.jsonl", "a") as file:
        file.write('{"event": "round", "rou')  # the disk was full
    journal.progress("up", process=2)
    journal.progress("failed", error="no space left")
    assert health.RunStatus(tmp_path).facts()["state"] == "failed"
