"""Rounds between a coordinator and four nodes in one process: who is missing, who lies, who is killed."""

import jax
import numpy as np
import pytest

from dither.accounting.ledger.runs import Budget, data_id
from dither.errors import FederationError
from dither.federation import messages
from dither.federation.agreement import approved_digest, describe
from dither.federation.party import REFUSALS
from tests.federation.parties import FIRST, NAMES, Parties, simulated, small_spec


def lines(parties):
    return [facts for event, facts in parties.events if event == "round"]


def kind_of(parties, name, body):
    """The kind of a message to a party, as the party reads it."""
    node = parties.nodes[name]
    keyring = node.keyring
    return messages.unpack(body, federation=keyring.id, to=name, keys={messages.SERVER: keyring.server})


def intercept(parties, name, change):
    """Let `change(message, body)` answer in a party's place; None: the node itself answers."""
    honest = parties.transport.answer[FIRST + NAMES.index(name)]

    def answer(body):
        message = kind_of(parties, name, body)
        found = change(message, body)
        return honest(body) if found is None else found or None

    parties.transport.answer[FIRST + NAMES.index(name)] = answer


def lies(parties, name, row):
    """An upload that the party signs although it never computed it."""

    def change(message, body):
        if message.kind != "round":
            return None
        return parties.nodes[name]._pack(
            "upload", {"round": message.fields["round"]}, {"upload": row}, quoted=messages.digest(body)
        )

    intercept(parties, name, change)


def server_bits(coordinator):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(coordinator.engine.state.server)]


# In the open


def test_what_no_honest_party_sends_excludes_it_and_the_round_goes_on(parties):
    """A signed upload of another type, whatever the spec says of updates that are not finite. (tests/attacks has
    the others.)"""
    lies(parties, "dan", np.zeros(parties.experiment.num_params, np.int32))
    summary = parties.coordinator().run()
    assert [line["counted"] for line in lines(parties)] == [["ann", "bob", "cat"]] * 3
    assert [list(line["refused"]) for line in lines(parties)] == [["dan"], [], []]
    assert "type int32" in lines(parties)[0]["excluded"]["dan"]
    assert summary["federation"]["parties"]["dan"] | {"bytes_up": 0, "bytes_down": 0} == {
        "records": 100,
        "counted": 0,
        "missing": 2,
        "refused": 1,
        "bytes_up": 0,
        "bytes_down": 0,
    }
    assert summary["federation"]["most_missing"] == 1
    assert any("lacked in a sum" in note for note in summary["notes"])
    assert any(note.startswith("dan was excluded in round 1: ") for note in summary["notes"])


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
        row = parties.nodes[name]._run.store.pending().row
        assert 0.99e-6 < np.linalg.norm(row.astype(np.float64)) <= 1e-6


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
    from dither.federation.state import Journal

    first = {}

    def complete(self, *arguments):
        first.update({name: parties.nodes[name]._run.store.pending().row for name in NAMES})
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
    summary = parties.coordinator().run()
    assert [line["counted"] for line in lines(parties)] == [["ann", "bob", "dan"]] * 3
    assert lines(parties)[0]["refused"]["cat"] == "this party's budget does not allow it"
    assert parties.charged("cat") == []
    assert summary["federation"]["parties"]["cat"]["refused"] == 3


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
    assert "is due" in ask(arrays={name: leaf.ravel()[:1] for name, leaf in leaves.items()})
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
        seen.append(describe(agreement, experiment, "ann"))
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


def test_a_node_refuses_seeded_noise_and_counts_that_are_not_its_own(parties):
    parties.nodes["bob"] = parties.node("bob", seeded=False)
    with pytest.raises(FederationError, match=r"bob does not take part: the agreement is refused"):
        parties.coordinator().run()
    assert "public seed" in str(parties.nodes["bob"].refusal)


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

    summary = masked.coordinator(on_event=back).run()
    assert [line["missing"] for line in lines(masked)] == [["dan"], [], []]
    assert [line["attempts"] for line in lines(masked)] == [2, 1, 1]
    assert summary["federation"]["most_missing"] == 1
    assert summary["federation"]["void_rounds"] == 0
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
    summary = masked.coordinator().run()
    assert [line["counted"] for line in lines(masked)] == [[], list(NAMES), list(NAMES)]
    assert summary["federation"]["void_rounds"] == 1
    assert any("without effect: round 1 " in note for note in summary["notes"])
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
            pending = run.store.pending() if run is not None else None
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
        seen.append(describe(agreement, experiment, "ann"))
        return "asked"

    parties.nodes["ann"] = parties.node("ann", approve=owner)
    summary = parties.coordinator().run()
    assert lines(parties)[0]["counted"] == list(NAMES[:count])
    assert summary["federation"]["colluders"] == colluders
    told = dict(seen[0])["collusion"]
    assert f"colludes with up to {colluders} of the {count} parties" in told
    assert f"{count} of them must answer" in told
    warned = [text for what, text in seen[0] if what == "WARNING" and "together can read" in text]
    assert len(warned) == (count == 2)
    for row in summary["epsilon"]["proven"]:
        if row["recipe"].startswith("R6"):
            assert row["against"] == f"against a server that colludes with {colluders} of the {count} parties"
