"""Rounds of a coordinator with four parties in one process: who is missing, who lies, who is killed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dither import data
from dither.errors import DamagedFile, FederationError, RunExists, SpecError
from dither.experiment.folder import write_text
from dither.experiment.report import PartyTotals
from dither.federation import server, serving, state
from dither.federation.server import Coordinator, load_evaluation_data
from tests.federation.parties import (
    FIRST,
    NAMES,
    Parties,
    intercept,
    lies,
    lines,
    small_spec,
)


def signed_by_the_server(coordinator):
    """The finished run is what the server signed, and nobody else; the check itself is seen to fail."""
    keyring, journal = coordinator.keyring, coordinator.journal
    signed = journal.verify(keyring)["files"]
    assert {"summary.json", "model.safetensors", "rounds.jsonl", "terms.json", "excluded.json"} <= set(signed)
    with pytest.raises(DamagedFile, match="not signed by the server"):
        journal.verify(replace(keyring, server=keyring.parties[0].identity))
    model = (journal.path / "model.safetensors").read_bytes()
    (journal.path / "model.safetensors").write_bytes(model[:-1] + bytes([model[-1] ^ 1]))
    with pytest.raises(DamagedFile, match=r"model.safetensors' is not the file that the server signed"):
        journal.verify(keyring)
    (journal.path / "model.safetensors").write_bytes(model)
    released_by_the_parties(coordinator)


def released_by_the_parties(coordinator):
    """Each party's record is whole, signed by it, and the one that it stated at the end of the run."""
    keyring, agreement, folder = coordinator.keyring, coordinator.agreement, coordinator.journal.path
    stated = state.load_statements(folder, agreement.digest, keyring)
    assert set(stated) == set(NAMES)
    for name, statement in stated.items():
        run = folder.parent / "keys" / "parties" / name / "runs" / agreement.run
        if name == "dan":  # who lies in this run: not by its own program, which released nothing
            assert statement["releases"] == 0
            assert not (run / state.RELEASES).exists()
            continue
        record = state.check_record(run, keyring)
        assert record.pop("complete")
        assert record == {key: statement[key] for key in record}
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        recorded = [json.loads(line)["round"] for line in (run / state.RELEASES).read_text().splitlines()]
        assert recorded == [line["round"] for line in log]
    stated["ann"]["releases"] += 1
    state.save_statements(folder, stated)
    with pytest.raises(DamagedFile, match="'ann' did not sign"):
        state.load_statements(folder, agreement.digest, keyring)


# In the open


def test_what_no_honest_party_sends_excludes_it_and_the_round_goes_on(parties):
    """A signed upload of another type, whatever the spec says of updates that are not finite. (tests/attacks has
    the others.)"""
    lies(parties, "dan", np.zeros(parties.experiment.num_params, np.int32))
    coordinator = parties.coordinator()
    report = coordinator.run()
    signed_by_the_server(coordinator)
    assert [line["counted"] for line in lines(parties)] == [["ann", "bob", "cat"]] * 3
    assert [list(line["refused"]) for line in lines(parties)] == [["dan"], [], []]
    assert "type int32" in lines(parties)[0]["excluded"]["dan"]
    dan = replace(report.federation.parties["dan"], bytes_up=0, bytes_down=0)
    assert dan == PartyTotals(records=100, counted=0, missing=2, refused=1, bytes_up=0, bytes_down=0)
    assert report.federation.most_missing == 1
    assert any("missing from a sum" in note for note in report.notes)
    assert any(note.startswith("dan was excluded in round 1: ") for note in report.notes)


def test_a_liar_without_whom_the_terms_cannot_be_kept_ends_the_run_by_name(parties):
    """Four answers are needed: also a server that is started again knows whom it cannot do with, and says so."""
    parties.spec = parties.spec.with_values({"federation.min_clients": 4})
    lies(parties, "dan", np.zeros(3, np.float32))
    with pytest.raises(FederationError, match=r"3 of at least 4 answers.*dan.*shape"):
        parties.coordinator().run()
    with pytest.raises(FederationError, match=r"4 of 4 parties, and dan is out: .*shape.*new run"):
        parties.coordinator().run()


def test_honest_uploads_are_projected_onto_the_ball_and_the_server_drops_larger_ones(tmp_path, quick):
    """A refusal would tell the server a bit about an update: an honest node has none."""
    parties = Parties(tmp_path, small_spec(**{"federation.max_norm": 1e-6, "num_rounds": 1}))
    lies(parties, "dan", np.ones(parties.experiment.num_params, np.float32))
    parties.coordinator().run()
    (line,) = lines(parties)
    assert line["counted"] == ["ann", "bob", "cat"]
    assert "its upload has norm" in line["refused"]["dan"]
    for name in ("ann", "bob", "cat"):
        row = parties.nodes[name]._run.store.load(state.PendingUpload).row
        assert 0.99e-6 < np.linalg.norm(row.astype(np.float64)) <= 1e-6


@pytest.mark.slow

# Under secure aggregation


def test_a_party_lost_in_each_phase_of_a_masked_round(masked):
    """Lost before its upload: the others are announced anew. Lost before unsealing: the others' shares suffice."""
    when = {0: "round", 1: "unseal", 2: None}
    now = [0]

    def change(message, body):
        if message.kind == "round":
            now[0] = message.fields["round"]
        if message.kind in ("round", "unseal") and message.kind == when[now[0]]:
            del masked.transport.answer[FIRST + 3]  # gone, and not connected any more
            return b""
        return None

    intercept(masked, "dan", change)
    away = masked.transport.answer[FIRST + 3]

    def back(event, facts):
        masked.events.append((event, facts))
        if event == "round":
            masked.transport.answer[FIRST + 3] = away
            masked.transport.marks[FIRST + 3] = f"again {facts['round']}"

    report = masked.coordinator(on_event=back).run()
    assert [line["missing"] for line in lines(masked)] == [["dan"], [], []]
    assert [line["attempts"] for line in lines(masked)] == [2, 1, 1]
    assert report.federation.most_missing == 1
    assert report.federation.void_rounds == 0
    assert masked.charged("dan") == [1, 2]  # it never computed round 0
    assert masked.charged("ann") == [0, 1, 2]


@pytest.mark.slow
def test_a_server_killed_while_it_opens_a_sum_loses_that_round_and_no_more(masked):
    from dither.secagg.server import ServerSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerSession, "open", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            masked.coordinator().run()
    masked.nodes = {name: masked.node(name) for name in NAMES}
    report = masked.coordinator().run()
    assert [line["counted"] for line in lines(masked)] == [[], list(NAMES), list(NAMES)]
    assert report.federation.void_rounds == 1
    assert any("without effect: round 1 " in note for note in report.notes)
    assert [masked.charged(name) for name in NAMES] == [[0, 1, 2]] * 4


def test_silence_while_sums_are_opened_is_recorded_and_ends_the_run_before_it_burns_all_rounds(masked):
    """Also where those who are silent help in every other round."""
    asked = dict.fromkeys(("cat", "dan"), 0)

    def silent(name):
        def now(message, body):
            asked[name] += message.kind == "unseal"
            return b"" if message.kind == "unseal" and asked[name] % 2 else None

        return now

    for name in asked:
        intercept(masked, name, silent(name))
    masked.spec = masked.spec.with_values({"federation.round_timeout": 0.3, "num_rounds": 6})
    with pytest.raises(FederationError, match=r"round 3 could not be opened: no help from cat, dan, for the"):
        masked.coordinator().run()
    assert [(line["counted"], line.get("silent")) for line in lines(masked)] == [
        ([], ["cat", "dan"]),
        (list(NAMES), None),
    ]
    assert masked.charged("ann") == [0, 1, 2]


def test_too_few_for_a_safe_sum_stop_the_run_with_nothing_opened(masked):
    for name in ("cat", "dan"):
        intercept(masked, name, lambda message, body: b"" if message.kind == "round" else None)
    masked.spec = masked.spec.with_values({"federation.round_timeout": 0.2})
    with pytest.raises(
        FederationError, match=r"round 1 has 2 of at least 3 answers.*cat, dan.*start the server again"
    ):
        masked.coordinator().run()


def test_the_server_receives_masked_words_alone(masked):
    """Every byte the coordinator is given, against what the nodes computed."""
    received, computed = [], []
    for address, honest in list(masked.transport.answer.items()):

        def answer(body, honest=honest, name=NAMES[address - FIRST]):
            reply = honest(body)
            received.append(reply)
            run = masked.nodes[name]._run
            pending = run.store.load(state.PendingUpload) if run is not None else None
            if pending is not None:
                computed.append(pending.row)
            return reply

        masked.transport.answer[address] = answer
    masked.coordinator().run()
    everything = b"".join(received)
    rows = {row.tobytes() for row in computed}
    assert len(rows) == 12
    for row in rows:
        # Not even four words in a row of any plaintext are to be found in anything that was received.
        assert not any(row[at : at + 16] in everything for at in range(0, len(row) - 16, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "colluders"), [(2, 0), (3, 1), (4, 2)])
def test_small_federations_run_with_the_colluders_they_take_by_default(tmp_path, quick, count, colluders):
    """A third of the cohort, rounded up; everybody must answer then, and the agreement says so."""
    seen = []
    changes = {"num_clients": count, "cohort_size": count, "num_rounds": 1, "federation.min_clients": 2}
    spec = small_spec(**changes, **{"secagg.mode": "real", "privacy.colluders": -1})
    parties = Parties(tmp_path, spec)

    def owner(agreement, experiment):
        seen.append(agreement.describe("ann", experiment))
        return "asked"

    parties.nodes["ann"] = parties.node("ann", approve=owner)
    report = parties.coordinator().run()
    assert lines(parties)[0]["counted"] == list(NAMES[:count])
    assert report.federation.colluders == colluders
    told = dict(seen[0])["collusion"]
    assert f"colludes with up to {colluders} of the {count} parties" in told
    assert f"{count} of them must answer" in told
    warned = [text for what, text in seen[0] if what == "WARNING" and "together can read" in text]
    assert len(warned) == (count == 2)
    for row in report.epsilon.table:
        if row.recipe.startswith("R6"):
            assert row.against == f"against a server that colludes with {colluders} of the {count} parties"


def test_the_reason_of_a_failure_reaches_every_party(parties):
    coordinator = parties.coordinator()
    coordinator.gather(parties.names, 4)
    coordinator.tell_failure("no help from dan\x1b[31m")
    assert parties.said == ["the server has stopped: no help from dan [31m"] * 4
    assert all(node.outcome is None and node.refusal is None for node in parties.nodes.values())


def test_a_hello_that_was_lost_on_the_way_is_sent_again(parties):
    """Else a party that is connected would be waited for without an end."""
    pull, lost = parties.transport.pull, [True]

    def lossy(ids):
        return [(number, None if lost else body) for number, body in pull(ids)]

    parties.transport.pull = lossy
    box = parties.coordinator().mailbox
    box.look()
    assert box.present() == set()
    lost.clear()
    box.look()
    assert box.present() == set(NAMES)


def test_a_run_that_lacks_its_signature_is_continued(parties, monkeypatch):
    """Killed after the summary: `dither serve` took the run for complete, and `verify` for incomplete."""
    folder = parties.folder / "run"
    with monkeypatch.context() as patch:
        patch.setattr(state.Journal, "sign", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            parties.coordinator().run()
    assert (folder / "summary.json").is_file()
    write_text(folder / "asked.toml", parties.spec.to_toml())
    serving._ask(folder, parties.spec)
    coordinator = parties.coordinator()
    coordinator.run()
    signed = coordinator.journal.verify(coordinator.keyring)
    assert "summary.json" in signed["files"]
    assert signed["unsigned"] == []
    with pytest.raises(RunExists, match="is complete"):
        serving._ask(folder, parties.spec)


def test_parties_of_a_signed_run_are_told_of_its_end_by_a_restarted_server(parties, monkeypatch):
    """Killed before it told them: `dither serve` called the run complete, and they waited until --patience."""
    folder = parties.folder / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_say_goodbye", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            parties.coordinator().run()
    write_text(folder / "asked.toml", parties.spec.to_toml())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    serving._ask(folder, parties.spec)
    monkeypatch.setattr(server, "_COME_BACK_SECONDS", 1.0)
    del parties.transport.answer[FIRST]  # ann does not come back
    parties.events.clear()
    coordinator = parties.coordinator()
    report = coordinator.run()
    assert [event for event, _ in parties.events if event != "waiting"] == ["done"]
    assert report.rounds == 3
    assert parties.nodes["bob"].outcome == {"rounds": 3, "accuracy": report.test_accuracy}
    assert parties.nodes["ann"].outcome is None
    assert set(state.load_statements(folder, coordinator.agreement.digest, coordinator.keyring)) == set(NAMES[1:])
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(RunExists, match="is complete"):
        serving._ask(folder, parties.spec)


def test_a_server_does_not_score_on_what_a_party_of_its_user_trains_on(tmp_path, monkeypatch):
    """A server that began before the party called its records public, and told all others their exact scores."""
    parties = Parties(tmp_path, small_spec(num_rounds=1))
    table = data.read_table(parties.file("ann"))
    table[::-1].to_csv(tmp_path / "test.csv", index=False)
    data.packaged_schema("breast-cancer").save(tmp_path / "schema.toml")
    values = {"data.test_path": str(tmp_path / "test.csv"), "data.test_public": True}
    parties.spec = parties.spec.with_values({**values, "data.schema": str(tmp_path / "schema.toml")})
    with monkeypatch.context() as before:
        before.setenv("DITHER_STATE", str(tmp_path / "nothing-yet"))
        parties.experiment = replace(parties.experiment, dataset=load_evaluation_data(parties.spec))
    with pytest.raises(SpecError, match=r"test\.csv' is declared public, but it and ann\.csv.* share"):
        parties.coordinator().run()
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
