"""A server that holds the right keys and wants more than was agreed, and parties that have lost their memory.

One federation is enrolled and goes no further; each test plays the server with its keys against nodes as they are
after a restart, in a copy of that federation's folder.
"""

import shutil

import numpy as np
import pytest

from dither.accounting.ledger.runs import Ledger
from dither.errors import DataError, FederationError, LedgerError
from dither.experiment.build import least_clients
from dither.federation import engines, joining, messages
from dither.federation.party import REFUSALS
from dither.federation.state import ChargedRound, PartyStore
from dither.secagg.messages import Kind
from dither.secagg.roster import AnnouncedCohort
from dither.secagg.server import ServerSession
from tests.federation.parties import NAMES, Parties, small_spec


class Enrolled(Exception):
    """As far as the server goes."""


def stop(event, facts):
    if event == "start":
        raise Enrolled


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    """Four parties under secure aggregation; the agreement asks for two answers, the protocol for three."""
    folder = tmp_path_factory.mktemp("hostile") / "federation"
    parties = Parties(folder, small_spec(**{"secagg.mode": "real", "federation.min_clients": 2}))
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    return parties


class Hostile:
    """The server's keys in other hands."""

    def __init__(self, folder, parties):
        shutil.copytree(parties.folder, folder)
        self.folder, self.experiment, self.spec = folder, parties.experiment, parties.spec
        self.parties = object.__new__(Parties)
        self.parties.__dict__ |= {**parties.__dict__, "folder": folder, "said": []}
        self.server = self.parties.coordinator()
        self.journal = self.server.journal
        self.agreement = self.journal.agreement()
        self.session = None
        if self.journal.secagg() is not None:
            self.session = ServerSession.load(self.journal.secagg(), self.server._identity.private)
        self.nodes = {name: self.node(name) for name in NAMES}

    def node(self, name, **changes):
        """A node as it is after a restart."""
        return self.parties.node(name, **changes)

    def restart(self, name, **changes):
        self.nodes[name] = self.node(name, **changes)

    def store(self, name):
        return self.folder / "keys" / "parties" / name / "runs" / self.agreement.run

    def charged(self, name):
        ledger = Ledger(self.folder / f"{name}.sqlite")
        return [entry.rounds[0] for entry in ledger.history() if entry.kind == "charge"]

    def ask(self, name, kind, fields, arrays=None):
        """A party's answer to a message that the server signs; of a refusal what the owner reads."""
        body = self.server.mailbox._pack(name, kind, fields, arrays or {})
        node = self.nodes[name]
        answer = messages.unpack(
            node.answer(body),
            federation=node.keyring.id,
            to=messages.SERVER,
            keys={name: node.identity.public},
            answers=messages.digest(body),
        )
        if answer.kind == "refused":
            assert list(answer.fields) == ["why"]
            assert answer.fields["why"] in REFUSALS.values()  # all that the server hears
            answer = answer._replace(fields={"why": self.parties.said[-1].removeprefix("refused: ")})
        return answer

    def announce(self, ids, *, round=0, attempt=0, threshold=3, value=0.0):
        """An announcement that an honest server's own checks may forbid, of a round with that broadcast."""
        asked = messages.asked_digest(list(self.broadcast("ann", value).values()))
        cohort = AnnouncedCohort(
            self.session.roster, round, attempt, threshold, self.experiment.num_params, tuple(ids), asked
        )
        return self.session._pack(Kind.ANNOUNCE, cohort.pack(), cohort)

    def broadcast(self, name, value):
        engine = self.nodes[name]._current(self.agreement.run)._engine
        return {f"m{n}": np.full(shape, value, dtype) for n, (shape, dtype) in enumerate(engine.message_shapes)}

    def round(self, name, announce=None, *, round=0, value=0.0):
        """A party's answer to a round whose broadcast has that value everywhere."""
        leaves = self.broadcast(name, value)
        if announce is not None:
            leaves["announce"] = announce
        return self.ask(name, "round", {"run": self.agreement.run, "round": round, "last_counted": -1}, leaves)


@pytest.fixture
def hostile(enrolled, tmp_path):
    return Hostile(tmp_path / "copy", enrolled)


def why(answer):
    assert answer.kind == "refused", answer.kind
    return answer.fields["why"]


# Sums


def test_no_node_helps_to_open_a_sum_of_fewer_than_its_proof_counts_on(hostile):
    """`min_clients = 2`, but the proof counts on a majority of the drawn cohort. A cohort of two that is
    announced as the round's first attempt would need two answers alone, and have the noise of two."""
    assert least_clients(hostile.agreement.spec) == 3
    assert hostile.agreement.may_lack == 1
    assert "min_clients is 3" in why(hostile.round("ann", hostile.announce((0, 1), threshold=2)))
    assert "cohort of 1" in why(hostile.round("ann", hostile.announce((0,), threshold=1)))
    assert "not in the announced cohort" in why(hostile.round("ann", hostile.announce((1, 2, 3))))
    assert "two sums could be opened" in why(hostile.round("ann", hostile.announce(range(4), threshold=2)))
    assert hostile.charged("ann") == []


def test_all_who_are_summed_were_sent_one_model(hostile):
    """Sent to the others, a model of which nothing is learnt (or that rounds their noise away) would leave one
    party's upload alone in the sum."""
    one, other = hostile.announce(range(4)), hostile.announce(range(4), value=2.0**40)
    assert "something else" in why(hostile.round("bob", one, value=2.0**40))
    assert "something else" in why(hostile.round("ann", other))
    assert hostile.charged("ann") == hostile.charged("bob") == []


@pytest.mark.slow
def test_attempts_of_a_round_never_give_two_sums_to_subtract(hostile):
    """Announced anew with one client less, and a restart between any two steps: the upload is made once, later
    attempts only lose clients, and one of them is opened."""
    first = hostile.announce(range(4))
    upload = hostile.round("ann", first).bytes("upload")
    hostile.restart("ann")
    assert hostile.round("ann", first).bytes("upload") == upload  # a repetition: the same bytes
    hostile.restart("ann")
    second = hostile.announce((0, 1, 2), attempt=1)
    masked = hostile.round("ann", second).bytes("upload")
    assert masked[-64:] != upload[-64:]
    hostile.restart("ann")
    assert "joins in" in why(hostile.round("ann", hostile.announce((0, 1, 3), attempt=2)))
    assert "is over" in why(hostile.round("ann", first))
    assert "something else" in why(hostile.round("ann", second, value=1.0))
    other = hostile.announce((0, 1), attempt=2, threshold=3, value=1.0)
    assert "min_clients is 3" in why(hostile.round("ann", other, value=1.0))
    session, asked = hostile.session, messages.asked_digest(list(hostile.broadcast("ann", 0.0).values()))
    session.announce(0, range(4), hostile.experiment.num_params, asked)
    old = session._pack(Kind.UNSEAL, session._open().cohort.digest + bytes(4), session._open().cohort)
    assert "wrong attempt" in why(hostile.ask("ann", "unseal", {"run": hostile.agreement.run}, {"secagg": old}))
    # Attempt 1 is opened; after that the round is over for this node, also after another restart.
    session.announce(0, (0, 1, 2), hostile.experiment.num_params, asked)
    for name in NAMES[:3]:
        if name != "ann":  # a round begins with attempt 0
            assert hostile.round(name, first).kind == "upload"
        session.upload(hostile.round(name, second).bytes("upload"))
    request = session.unseal()[0]
    assert hostile.ask("ann", "unseal", {"run": hostile.agreement.run}, {"secagg": request}).kind == "unseal"
    hostile.restart("ann")
    assert "is over" in why(hostile.round("ann", hostile.announce((0, 1, 2), attempt=2)))
    assert hostile.charged("ann") == [0]


# Agreements


def test_terms_cannot_change_under_a_run_that_was_agreed_on(hostile):
    """A run's number stands for its agreement: else a charge under much noise would pay for little noise."""
    found = hostile.agreement.to_dict()
    quieter = hostile.agreement.spec.with_values({"privacy.noise_std": 0.001})
    asked = []
    hostile.restart("ann", approve=lambda agreement, experiment: asked.append(agreement.digest) or "asked")
    answer = hostile.ask("ann", "terms", {"terms": {**found, "spec": quieter.to_dict()}})
    assert "has another agreement already" in why(answer)
    shared = {key: found[key] for key in ("format", "federation", "run", "names", "sizes", "spec")}
    counted = {**shared, "purpose": "statistics", "epsilon": 1.0, "delta": 1e-5, "trained": None}
    counted["sizes"] = [hostile.nodes["ann"].source.count] * len(found["names"])
    assert "has another agreement already" in why(hostile.ask("ann", "statistics", {"terms": counted}))
    assert asked == []
    assert hostile.ask("ann", "terms", {"terms": found}).kind == "accepted"  # those that were approved: as before


def test_the_masks_of_a_run_are_for_one_agreement(hostile):
    """A party that was killed before the terms were saved went on under other terms with the keys and the rules of
    the first: a sum of fewer parties than the owner had read."""
    (hostile.store("ann") / "terms.json").unlink()
    hostile.restart("ann")
    found = hostile.agreement.to_dict()
    spec = hostile.agreement.spec.with_values({"federation.min_clients": 4})
    answer = hostile.ask("ann", "terms", {"terms": {**found, "spec": spec.to_dict()}})
    assert "begun under another agreement" in why(answer)
    assert hostile.ask("ann", "terms", {"terms": found}).kind == "accepted"


@pytest.mark.parametrize("change", [{"secagg.mode": "ideal"}, {"data.schema": "own.toml"}, {"compare": True}])
def test_terms_with_settings_of_a_simulation_are_refused(hostile, change):
    spec = hostile.agreement.spec.with_values(change)
    answer = hostile.ask(
        "ann", "terms", {"terms": {**hostile.agreement.to_dict(), "run": "new", "spec": spec.to_dict()}}
    )
    assert "never runs with" in why(answer)
    shared = {key: hostile.agreement.to_dict()[key] for key in ("format", "federation", "names", "sizes")}
    counted = {"purpose": "statistics", "epsilon": 1.0, "delta": 1e-5, "trained": None, "run": "newer"}
    answer = hostile.ask("ann", "statistics", {"terms": {**shared, **counted, "spec": spec.to_dict()}})
    assert "never runs with" in why(answer)


@pytest.mark.parametrize("run", ["../../other", "", "a/b", "."])
def test_a_run_names_no_other_folder(hostile, run):
    answer = hostile.ask("ann", "terms", {"terms": {**hostile.agreement.to_dict(), "run": run}})
    assert "the agreement has run" in why(answer)


def test_the_end_of_a_run_is_told_in_numbers(hostile):
    node = hostile.parties.nodes["ann"]
    for told in ({}, {"rounds": "\x1b[2J"}, {"rounds": 3, "accuracy": "\x1b[2J"}):
        assert why(hostile.ask("ann", "finish", {"run": hostile.agreement.run, **told}))
        assert node.outcome is None


def test_what_the_server_hears_never_quotes_records(hostile):
    """Classes that nobody has: the owner reads which labels do not fit, the server does not (see `ask`)."""
    found = hostile.agreement.to_dict()
    schema = {**found["schema"], "label": {**found["schema"]["label"], "classes": ["x", "y"]}}
    answer = hostile.ask(
        "ann", "terms", {"terms": {**found, "run": "new", "schema": schema, "classes": ["x", "y"]}}
    )
    assert "benign" in why(answer)
    assert "benign" in str(hostile.nodes["ann"].refusal)
    assert not any("benign" in each for each in REFUSALS.values())


# Rounds


@pytest.mark.slow
def test_a_refused_round_is_computed_once_and_its_reason_stays_here(hostile, monkeypatch):
    """Every refusal is a bit about an update: computed anew for each question, they would add up, uncharged."""
    announce = {value: hostile.announce(range(4), value=value) for value in (0.0, 1.0, 2.0, 3.0)}
    computed = []
    honest = engines.ClientEngine.answer

    def refused(*arguments):
        computed.append(1)
        return honest(*arguments)._replace(finite=False)

    monkeypatch.setattr(engines.ClientEngine, "answer", refused)
    said = {why(hostile.round("ann", announce[value], value=value)) for value in (0.0, 0.0, 1.0, 2.0)}
    assert said == {"round 0: the update is not finite"}
    assert len(computed) == 1
    hostile.restart("ann")
    assert {why(hostile.round("ann", announce[3.0], value=3.0))} == said
    assert len(computed) == 2  # a node compiles when it starts, on zeros; nothing more
    assert "lower client_lr" in (hostile.store("ann") / "log.jsonl").read_text()
    assert hostile.charged("ann") == [0]


def test_a_node_that_has_lost_its_memory_does_not_go_on(hostile):
    """Deleted, or restored from a copy: the ledger knows of rounds that the folder does not."""
    copy = hostile.folder / "backup"
    shutil.copytree(hostile.store("ann"), copy)
    assert hostile.round("ann", hostile.announce(range(4))).kind == "upload"
    shutil.copytree(hostile.store("ann"), hostile.folder / "round0")

    def restored(source):
        shutil.rmtree(hostile.store("ann"))
        if source is not None:
            shutil.copytree(source, hostile.store("ann"))
        hostile.restart("ann")
        return hostile.ask("ann", "terms", {"terms": hostile.agreement.to_dict()})

    assert "does not remember" in why(restored(None))
    assert "does not remember" in why(restored(copy))
    assert restored(hostile.folder / "round0").kind == "accepted"  # whole again
    (hostile.store("ann") / "pending.npz").unlink()
    hostile.restart("ann")
    assert "its upload is lost" in why(hostile.round("ann", hostile.announce(range(4))))
    # Nor does it go on with its state of the beginning: under shuffled epochs it would use the same batches again.
    assert "its upload is lost" in why(hostile.round("ann", hostile.announce(range(4), round=1), round=1))
    assert hostile.charged("ann") == [0]


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_does_not_go_on_with_another_ledger(hostile, killed):
    """Nor with other records: the account that paid for its rounds is gone. Nor if it was about to charge one."""
    assert hostile.round("ann", hostile.announce(range(4))).kind == "upload"
    if killed:
        PartyStore(hostile.store("ann")).save(ChargedRound(1, ""))
    hostile.restart("ann", ledger=Ledger(hostile.folder / "fresh.sqlite"), new_ledger=True)
    answer = hostile.ask("ann", "terms", {"terms": hostile.agreement.to_dict()})
    assert "began with other records or another ledger" in why(answer)


@pytest.mark.slow
def test_a_node_that_has_lost_its_batches_secret_does_not_go_on(tmp_path_factory, tmp_path):
    """With another secret the epochs would be shuffled anew, and a record used more often than accounted for."""
    folder = tmp_path_factory.mktemp("secret") / "federation"
    parties = Parties(folder, small_spec(randomness="os"))
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    hostile = Hostile(tmp_path / "copy", parties)
    first = hostile.round("ann").array("upload")
    hostile.restart("ann")
    np.testing.assert_array_equal(hostile.round("ann").array("upload"), first)  # noise is not drawn twice
    (hostile.store("ann") / "secret.key").unlink()
    hostile.restart("ann")
    assert "does not remember" in why(hostile.ask("ann", "terms", {"terms": hostile.agreement.to_dict()}))


def test_a_ledger_that_was_rolled_back_charges_nothing(hostile):
    """The party's folder remembers how long the ledger was."""
    own = hostile.folder / "keys" / "parties" / "ann"
    path = hostile.folder / "ann.sqlite"

    def opened():
        hostile.restart("ann", ledger=Ledger(path, anchor=own / "ledger-anchor.json"))

    opened()
    shutil.copy(path, hostile.folder / "old.sqlite")
    assert hostile.round("ann", hostile.announce(range(4))).kind == "upload"
    shutil.copy(hostile.folder / "old.sqlite", path)
    answer = hostile.round("ann", hostile.announce(range(4), round=1), round=1)
    assert "rolled back" in why(answer)
    with pytest.raises(LedgerError, match="anchor"):  # nobody opens it any more
        hostile.charged("ann")
    with pytest.raises(LedgerError, match="anchor"):  # nor does a node start with it
        opened()


def test_a_run_goes_on_with_the_records_it_began_with(hostile):
    """One record changed, as many as before: another data set to the ledger, with nothing spent."""
    table = hostile.folder / "ann.csv"
    before = table.read_text()
    table.write_text(before.replace("malignant", "benign", 1))
    with pytest.raises(DataError, match="share 99% of the smaller one's records"):
        hostile.restart("ann")
    table.write_text(before)
    hostile.restart("ann", seeded=False)
    assert "public seed" in why(hostile.ask("ann", "terms", {"terms": hostile.agreement.to_dict()}))
    hostile.restart("ann")
    assert hostile.ask("ann", "terms", {"terms": hostile.agreement.to_dict()}).kind == "accepted"


def test_two_nodes_cannot_share_a_folder(hostile):
    own = hostile.folder / "keys" / "parties" / "ann"
    with (
        joining.alone(own),
        pytest.raises(FederationError, match=r"another `dither join` is using .*ann"),
        joining.alone(own),
    ):
        pass
    with joining.alone(own):  # and whoever leaves lets go
        pass
