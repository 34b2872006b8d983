"""A server that must survive: parties gone for good, a second server, no records to score on, kills."""

import json

import pytest

from dither.errors import FederationError, RunExists
from dither.federation import messages, serving
from tests.federation.parties import FIRST, NAMES, Parties, small_spec


class Killed(Exception):
    """The server dies."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody waits for parties that are away."""
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "GRACE_SECONDS", 0.05)


def dies_after(number):
    def on_event(event, facts):
        if event == "round" and facts["round"] == number:
            raise Killed

    return on_event


def recorded(parties):
    return [json.loads(line) for line in (parties.folder / "run" / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", [pytest.param("off", marks=pytest.mark.slow), "real"])
@pytest.mark.parametrize(
    "without", [pytest.param((), id="min_clients"), pytest.param(("dan",), id="without", marks=pytest.mark.slow)]
)
def test_a_restarted_server_goes_on_without_a_party_that_is_gone(tmp_path, mode, without):
    parties = Parties(tmp_path, small_spec(**{"secagg.mode": mode}))
    with pytest.raises(Killed):
        parties.coordinator(on_event=dies_after(0)).run()
    if without:
        parties.nodes["dan"].answer = lambda body: None  # connected, and silent: only --without helps at once
    else:
        del parties.transport.answer[FIRST + 3]
    report = parties.coordinator(without=without).run()
    assert [line["counted"] for line in recorded(parties)] == [list(NAMES), *[list(NAMES[:3])] * 2]
    assert report.federation.parties["dan"].missing == 2
    assert report.federation.most_missing == 1
    assert parties.charged("dan") == [0]


@pytest.mark.slow
def test_without_before_the_first_round_makes_new_terms(tmp_path):
    """Everybody has to approve; a party that never does can be left out before the run has begun."""
    parties = Parties(tmp_path, small_spec(num_clients=4, cohort_size=3))
    answer = parties.nodes["dan"].answer
    parties.nodes["dan"].answer = lambda body: None if b'"terms"' in body[:400] else answer(body)
    with pytest.raises(FederationError, match=r"dan.*--without dan"):
        parties.coordinator(wait_seconds=0.3).run()
    parties.spec = parties.spec.with_values({"num_clients": 3})
    parties.coordinator(without=("dan",)).run()
    assert [line["counted"] for line in recorded(parties)] == [list(NAMES[:3])] * 3


def test_a_server_without_records_to_score_on(tmp_path):
    parties = Parties(tmp_path, small_spec(num_rounds=1))
    server = parties.coordinator()
    server._evaluation = server._evaluation._replace(
        x_test=server._evaluation.x_test[:0], y_test=server._evaluation.y_test[:0]
    )
    report = server.run()
    assert not isinstance(report.test_accuracy, float)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_second_server_is_kept_out_and_told_who_is_there(tmp_path):
    folder = tmp_path / "run"
    with (
        serving.alone(folder),
        pytest.raises(RunExists, match=r"process \d+ .*since") as caught,
        serving.alone(folder),
    ):
        pass
    assert "\n" not in str(caught.value)
    with serving.alone(folder):  # and whoever leaves lets go
        pass


@pytest.mark.slow
def test_progress_under_kills_in_mid_round(tmp_path):
    """The server dies in every round, at another step each time, and each restart completes a round."""
    parties = Parties(tmp_path, small_spec(**{"secagg.mode": "real", "num_rounds": 6}))
    asked = []

    def ask(self, kind, questions, **more):
        asked.append(kind)
        if len(asked) % 7 == 0:
            raise Killed
        return ask.honest(self, kind, questions, **more)

    ask.honest = messages.Mailbox.ask
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.Mailbox, "ask", ask)
        for _ in range(20):
            parties.nodes = {name: parties.node(name) for name in NAMES}
            try:
                parties.coordinator().run()
                break
            except Killed:
                done.append(len(recorded(parties)) if (tmp_path / "run" / "rounds.jsonl").is_file() else 0)
    assert len(recorded(parties)) == 6
    assert done == sorted(done)
    assert all(parties.charged(name) == list(range(6)) for name in NAMES)
