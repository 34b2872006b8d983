"""What `dither serve` and `dither join` do while nothing happens, or when what they started dies."""

import json

import pytest

from dither.errors import FederationError
from dither.federation import local, serving


class Played:
    """Coordinators that say these things, one list a start, and die; `links`: when the SuperLink is dead."""

    def __init__(self, folder, *scripts, links=()):
        self.folder, self.scripts, self.starts, self.links, self.events = folder, scripts, 0, set(links), []
        folder.mkdir()
        self.progress = folder / "progress.jsonl"
        self.progress.touch()
        (folder / "lock").touch()  # and nobody holds it: whoever was up is gone

    name, log = "Flower's SuperLink", "superlink.log"

    def submit(self, config, on_event):
        self.links.discard(self.starts)
        script = self.scripts[min(self.starts, len(self.scripts) - 1)]
        self.starts += 1
        with open(self.progress, "a") as file:
            for event, facts in [("up", {"process": 2**22 + 1}), *script]:
                file.write(json.dumps({"event": event, **facts}) + "\n")

    def alive(self):
        return self.starts not in self.links

    def revive(self):
        pass

    def hear(self, facts):
        pass

    watch = alive

    def play(self):
        serving._watch(self, {}, lambda event, facts: self.events.append((event, facts)))
        return [event for event, _ in self.events]


ROUND, DONE = ("round", {"round": 0}), ("done", {})


def test_a_coordinator_that_dies_is_started_again_while_rounds_are_completed(tmp_path):
    played = Played(tmp_path / "run", *[[ROUND]] * 9, [DONE])
    assert played.play().count("restart") == 9


def test_a_coordinator_that_never_completes_a_round_is_given_up(tmp_path):
    crash = ("failed", {"error": "TypeError: no such thing", "exit_code": 1, "final": False})
    played = Played(tmp_path / "run", [ROUND], [crash])
    with pytest.raises(FederationError, match=r"died 4 times.*TypeError: no such thing.*superlink.log"):
        played.play()
    assert played.starts == 5  # the first one completed a round


def test_what_the_coordinator_gives_up_itself_is_final(tmp_path):
    played = Played(tmp_path / "run", [("failed", {"error": "dan did not come", "exit_code": 6})])
    with pytest.raises(FederationError, match="dan did not come") as caught:
        played.play()
    assert caught.value.exit_code == 6
    assert played.starts == 1


def test_a_superlink_that_dies_is_started_again(tmp_path):
    """Whatever its coordinator says of that."""
    lost = ("failed", {"error": "ConnectError", "exit_code": 1, "final": False})
    played = Played(tmp_path / "run", [ROUND, lost], [DONE], links=[1])
    assert played.play() == ["round", "restart", "done"]
    assert played.events[1][1]["what"] == "Flower's SuperLink"


def test_a_party_says_since_when_it_was_asked_nothing_and_gives_up(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    timer = local.IdleTimer("the server at x", 1000.0, said.append)
    for now[0] in range(0, 1000, 10):
        timer.check()
    assert len(said) == 5  # after 1, 2, 4, 8 and 16 minutes
    assert all("asked nothing since" in line and "until" in line for line in said)
    timer.reset()
    now[0] += 500
    timer.check()
    now[0] += 501
    with pytest.raises(FederationError, match="asked nothing for 1000 s") as caught:
        timer.check()
    assert caught.value.exit_code == 6
