"""A party's part in the rounds: its state, its budget, and what it answers and refuses."""

from types import SimpleNamespace

import numpy as np
import pytest

from dither.accounting.ledger.runs import Budget, data_id
from dither.errors import FederationError
from dither.federation import messages, state
from dither.federation.agreement import approved_digest
from dither.federation.party import REFUSALS
from tests.federation.parties import (
    NAMES,
    Parties,
    intercept,
    lines,
    server_bits,
    simulated,
    small_spec,
)


@pytest.mark.slow
def test_nodes_come_and_go_and_keep_their_state(tmp_path, quick):
    """DP-SCAFFOLD keeps control variates on the node: restarted between all rounds, it still gives the same bits;
    a server that is killed goes on after the last complete round, and nobody is charged twice."""
    parties = Parties(tmp_path, small_spec("dp-scaffold"))
    rounds = []

    def killed(event, facts):
        if event == "round":
            rounds.append(facts["round"])
            raise KeyboardInterrupt

    for _ in range(3):
        parties.nodes = {name: parties.node(name) for name in NAMES}
        with pytest.raises(KeyboardInterrupt):
            parties.coordinator(on_event=killed).run()
    parties.nodes = {name: parties.node(name) for name in NAMES}
    last = parties.coordinator()
    last.run()
    assert rounds == [0, 1, 2]
    for ours, theirs in zip(server_bits(last), simulated(parties.experiment, "loop"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [parties.charged(name) for name in NAMES] == [[0, 1, 2]] * 4


def test_a_round_asked_again_is_the_same_upload_and_charged_once(parties):
    """The server dies with the answers in its hands: the round is announced anew."""
    from dither.federation.state import Journal, PendingUpload

    first = {}

    def complete(self, *arguments):
        first.update({name: parties.nodes[name]._run.store.load(PendingUpload).row for name in NAMES})
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "complete", complete)
        with pytest.raises(KeyboardInterrupt):
            parties.coordinator().run()
    parties.nodes = {name: parties.node(name) for name in NAMES}
    again = []
    intercept(
        parties, "ann", lambda message, body: again.append(message.kind) if message.kind == "round" else None
    )
    parties.coordinator().run()
    assert len(again) == 3
    assert [parties.charged(name) for name in NAMES] == [[0, 1, 2]] * 4


def test_a_budget_ends_a_partys_part_and_nobody_elses(parties):
    ledger = parties.nodes["cat"].ledger
    dataset = data_id(ledger, path=str(parties.file("cat")))
    ledger.set_budget(dataset, Budget(1e-3, 1e-5, "upload", "replace-one"))
    report = parties.coordinator().run()
    assert [line["counted"] for line in lines(parties)] == [["ann", "bob", "dan"]] * 3
    assert lines(parties)[0]["refused"]["cat"] == "this party's budget does not allow it"
    assert parties.charged("cat") == []
    assert report.federation.parties["cat"].refused == 3


def test_a_node_answers_nothing_that_its_terms_do_not_foresee(parties):
    """Asked by a server that holds the right key and wants more than was agreed."""
    parties.coordinator().run()
    node = parties.nodes["ann"]
    server = parties.coordinator()
    run = node._run.agreement.run
    leaves = {f"m{number}": leaf for number, leaf in enumerate(_message(parties))}

    def ask(kind="round", arrays=leaves, **fields):
        fields = {"run": run, "round": 2, "last_counted": 1, **fields}
        body = server.mailbox._pack("ann", kind, fields, arrays)
        reply = node.answer(body)
        message = messages.unpack(
            reply,
            federation=node.keyring.id,
            to=messages.SERVER,
            keys={"ann": node.identity.public},
            answers=messages.digest(body),
        )
        assert message.kind == "refused"
        assert message.fields == {"why": REFUSALS["other"]}
        return parties.said[-1]

    before = parties.charged("ann")
    assert "3 rounds" in ask(round=3)
    assert "is over" in ask(round=1)
    assert "another broadcast" in ask()
    assert "not finite" in ask(arrays={name: np.full_like(leaf, np.nan) for name, leaf in leaves.items()})
    assert "expected float32" in ask(arrays={name: leaf.ravel()[:1] for name, leaf in leaves.items()})
    assert "without 'm0'" in ask(arrays={})
    assert "unknown here" in ask(run="0123456789abcdef")
    assert "unknown here" in ask(run="../../etc")
    assert "nothing to mask" in ask(kind="unseal")
    assert "unknown kind" in ask(kind="export")
    assert "not int" in ask(round="2")
    assert parties.charged("ann") == before


def _message(parties):
    node = parties.nodes["ann"]._run._engine
    return [np.zeros(shape, dtype) for shape, dtype in node.message_shapes]


# Agreements


def test_terms_are_shown_approved_and_never_changed_behind_the_owners_back(parties, tmp_path):
    seen = []

    def owner(agreement, experiment):
        seen.append(agreement.describe("ann", experiment))
        return "asked"

    parties.nodes["ann"] = parties.node("ann", approve=owner)
    parties.coordinator().run()
    shown = dict(seen[0])
    assert shown["rounds"] == "3, you take part in 3 of them"
    assert "std 0.1" in shown["your noise"]
    assert "readable by the server" in shown["what leaves"]
    assert "public seed" in shown["WARNING"]
    approved = approved_digest(parties.nodes["ann"].folder)

    def refuses(agreement, experiment):
        raise FederationError("the owner does not approve the agreement")

    # Another run, with a tenth of the noise: another agreement, so the owner is asked again, and says no.
    parties.spec = parties.spec.with_values({"privacy.noise_std": 0.01})
    parties.nodes["ann"] = parties.node("ann", approve=refuses)
    (parties.folder / "run").rename(parties.folder / "first")
    with pytest.raises(FederationError, match=r"ann does not take part: the agreement is refused; .*own output"):
        parties.coordinator().run()
    assert str(parties.nodes["ann"].refusal) == "the owner does not approve the agreement"
    assert approved_digest(parties.nodes["ann"].folder) == approved
    assert parties.charged("ann") == [0, 1, 2]


def test_a_round_whose_upload_cannot_be_saved_is_not_charged(parties, monkeypatch):
    """With a disk that is almost full, every round was charged, and none was sent."""
    with monkeypatch.context() as patch:
        patch.setattr(state.shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
        with pytest.raises(FederationError, match="round 1 has 0 of at least 3 answers"):
            parties.coordinator().run()
    assert any("has 2 KiB of free space" in line for line in parties.said)
    assert parties.charged("ann") == []
    parties.coordinator().run()
    assert parties.charged("ann") == [0, 1, 2]


def test_a_run_goes_on_after_another_one_was_approved(parties):
    """A server that was stopped in one run, and used for another: nobody took part in the first one any more."""

    def killed(event, facts):
        if event == "round":
            raise KeyboardInterrupt

    asked, run = [], parties.folder / "run"
    parties.nodes["ann"] = parties.node("ann", approve=lambda terms, experiment: asked.append(terms) or "test")
    with pytest.raises(KeyboardInterrupt):
        parties.coordinator(on_event=killed).run()
    run.rename(parties.folder / "first")
    parties.coordinator().run()
    run.rename(parties.folder / "second")
    (parties.folder / "first").rename(run)
    parties.nodes = {name: parties.node(name) for name in parties.nodes}
    assert len(parties.coordinator().run().federation.parties) == 4
    assert len(asked) == 2
    assert parties.charged("ann") == [0, 0, 1, 2, 1, 2]
    # What the owner takes back is not approved any more.
    (parties.nodes["ann"].folder / "approved.json").unlink()
    with pytest.raises(FederationError, match="did not approve"):
        parties.node("ann")._current(asked[0].run)


def test_a_node_refuses_seeded_noise_and_counts_that_are_not_its_own(parties):
    parties.nodes["bob"] = parties.node("bob", seeded=False)
    with pytest.raises(FederationError, match=r"bob does not take part: the agreement is refused"):
        parties.coordinator().run()
    assert "public seed" in str(parties.nodes["bob"].refusal)
