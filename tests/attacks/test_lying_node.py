"""A party that signs what no honest party sends: it is named, recorded, excluded, and costs one round at most."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dither import data
from dither.errors import DitherError, FederationError
from dither.federation import messages
from dither.secagg import primitives
from dither.secagg.roster import AnnouncedCohort
from tests.federation.parties import NAMES, Parties, small_spec

LIAR, NUMBER = "bob", 1
OPEN = {"federation.refused": "abort"}  # a liar's NaN must not end the run, whatever the spec says of honest ones
MASKED = {"secagg.mode": "real", "privacy.colluders": 1, "num_rounds": 4}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody waits for parties that are away; the liar seals every sum, as it would sooner or later."""
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "GRACE_SECONDS", 0.05)
    shuffled = AnnouncedCohort._shuffled
    monkeypatch.setattr(
        AnnouncedCohort,
        "_shuffled",
        lambda self, purpose: sorted(shuffled(self, purpose), key=lambda who: who != NUMBER),
    )


def run(folder, changes, lie):
    """A run in which the liar's answers come from `lie(node, honest, body)`."""
    parties = Parties(folder, small_spec(**changes))
    node = parties.nodes[LIAR]
    honest = node.answer
    node.answer = lambda body: lie(node, honest, body)
    return parties, parties.coordinator().run()


def recorded(parties):
    return [json.loads(line) for line in (parties.folder / "run" / "rounds.jsonl").read_text().splitlines()]


def largest(parties):
    found = load_file(parties.folder / "run" / "model.safetensors")
    return max(float(np.abs(leaf).max()) for leaf in found.values())


def named(parties, report, why, *, round=0):
    """The liar, and nobody else, is named with the reason, in the round where it lied and in the summary."""
    lines = recorded(parties)
    assert why in lines[round]["excluded"][LIAR]
    assert [list(line.get("excluded", ())) for line in lines] == [
        [LIAR] if at == round else [] for at in range(len(lines))
    ]
    assert list(report.federation.excluded) == [LIAR]
    assert why in report.federation.excluded[LIAR].why
    assert report.federation.excluded[LIAR].round == round
    assert all(LIAR not in line["counted"] for line in lines[round:])


# In the open


def uploads(value):
    def lie(node, honest, body):
        answer = honest(body)
        message = _read(node, answer, body)
        if message.kind != "upload":
            return answer
        row = message.arrays["upload"]
        row = np.full(row.shape, value, "<f4") if np.isscalar(value) else value
        return node._pack("upload", dict(message.fields), {"upload": row}, quoted=messages.digest(body))

    return lie


def _read(node, answer, body):
    return messages.unpack(
        answer,
        federation=node.keyring.id,
        to=messages.SERVER,
        keys={node.name: node.identity.public},
        answers=messages.digest(body),
    )


def garbage(node, honest, body):
    return b"\0" * 999 if b'"kind":"round"' in body[:400].replace(b" ", b"") else honest(body)


class Replay:
    """The answer to the first round, again and again."""

    def __init__(self):
        self.old = None

    def __call__(self, node, honest, body):
        answer = honest(body)
        if _read(node, answer, body).kind == "upload":
            self.old = self.old or answer
            return self.old
        return answer


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        pytest.param(uploads(3e38), "norm", id="overflow"),
        pytest.param(uploads(1e30), "norm", id="large", marks=pytest.mark.slow),
        pytest.param(uploads(np.nan), "not finite", id="nan", marks=pytest.mark.slow),
        pytest.param(uploads(np.zeros(3, "<f4")), "shape", id="shape", marks=pytest.mark.slow),
        pytest.param(garbage, "not a message", id="garbage", marks=pytest.mark.slow),
    ],
)
def test_an_open_upload_that_no_honest_party_sends(tmp_path, lie, why):
    parties, report = run(tmp_path, OPEN, lie)
    named(parties, report, why)
    assert [line["counted"] for line in recorded(parties)] == [["ann", "cat", "dan"]] * 3
    assert largest(parties) < 10


@pytest.mark.slow
def test_an_old_answer_replayed(tmp_path):
    parties, report = run(tmp_path, OPEN, Replay())
    named(parties, report, "replay", round=1)


# Under secure aggregation


def altered_session(alter):
    """Lie by altering each session of secure aggregation, once."""
    altered = []

    def lie(node, honest, body):
        session = getattr(node._run, "_session", None)
        if session is not None and session not in altered:
            alter(session)
            altered.append(session)
        return honest(body)

    return lie


def seals(change):
    """Attach another seal than the honest one to each upload."""

    def alter(session):
        seal = session._seal
        session._seal = lambda cohort, seed: change(cohort, seal(cohort, seed))

    return altered_session(alter)


def another_commitment(cohort, seal):
    return primitives.fresh_key() + seal[32:]


def undecryptable(cohort, seal):
    altered = bytearray(seal)
    entry = (len(seal) - 32) // len(cohort.ids)
    for place in range(len(cohort.ids)):
        altered[32 + place * entry + 40] ^= 255
    return bytes(altered)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        pytest.param(seals(another_commitment), "committed to a seal that is not", id="commitment"),
        pytest.param(seals(undecryptable), "cannot be opened", id="shares"),
        pytest.param(seals(lambda cohort, seal: seal[:-1]), "a seal of", id="length", marks=pytest.mark.slow),
    ],
)
def test_a_seal_that_cannot_be_opened_costs_one_round(tmp_path, lie, why):
    parties, report = run(tmp_path, MASKED, lie)
    named(parties, report, why)
    counted = [line["counted"] for line in recorded(parties)]
    assert counted[1:] == [["ann", "cat", "dan"]] * 3
    assert report.federation.void_rounds <= 1
    # Nobody is charged for more than it answered, and the liar for nothing after it was found out.
    assert parties.charged("ann") == [0, 1, 2, 3]
    assert parties.charged(LIAR) == [0]


@pytest.mark.slow
def test_huge_words_under_a_mask_are_bounded(tmp_path):
    """Nobody can see whose they are; what they do to the model is bounded by what honest parties could do."""

    def alter(session):
        upload = session.upload
        session.upload = lambda announced, row: upload(announced, np.full_like(row, 2**30))

    parties, report = run(tmp_path, {**MASKED, "federation.max_norm": 1.0}, altered_session(alter))
    assert report.federation.void_rounds == 0
    assert largest(parties) <= 4 * 4 / 3 + 1


def test_a_hello_that_says_too_much(tmp_path):
    """Fields that no honest hello has must not reach the server's own records, nor end the run."""
    parties = Parties(tmp_path, small_spec())
    hello = parties.nodes[LIAR]._hello
    parties.nodes[LIAR]._hello = lambda: {
        **hello(),
        "event": "done",
        "party": "cat",
        "versions": {**hello()["versions"], "x": "y" * 10**6},
    }
    journal_events = []

    def progress(event, **facts):
        journal_events.append((event, facts))

    parties.coordinator(on_event=lambda event, facts: progress(event, **facts)).run()
    joined = [facts["party"] for event, facts in journal_events if event == "joined"]
    assert sorted(joined) == sorted(NAMES)
    assert max(len(json.dumps(facts)) for _, facts in journal_events) < 10**5


def test_nothing_is_allocated_for_records_that_a_party_says_it_holds(tmp_path, monkeypatch):
    """The rows of 2^31 - 1 records were put in order to count them: the server ran out of memory."""
    parties = Parties(tmp_path, small_spec())
    hello = parties.nodes[LIAR]._hello
    parties.nodes[LIAR]._hello = lambda: {**hello(), "records": 2**31 - 1}
    split = data.row_split
    monkeypatch.setattr(data, "row_split", lambda count, *more: split(min(count, 10**4), *more))
    with pytest.raises(FederationError, match=f"{LIAR} does not take part"):  # its own program refuses
        parties.coordinator().run()
    assert parties.coordinator().journal.agreement().sizes[NAMES.index(LIAR)] == 2**31 - 1


@pytest.mark.parametrize(("facts", "why"), [({"epsilon": 1e-21}, "1e-21"), ({"records": 1}, "1")])
def test_what_a_party_says_of_itself_is_somebodys(tmp_path, facts, why):
    """A run that cannot begin because of one party's hello: its server must know without whom it could."""
    spec = {"privacy.noise": "proven", "privacy.epsilon": 1.0}
    parties = Parties(tmp_path, small_spec(**spec))
    hello = parties.nodes[LIAR]._hello
    parties.nodes[LIAR]._hello = lambda: {**hello(), **facts}
    with pytest.raises(DitherError, match=rf" {why} \({LIAR}\)"):
        parties.coordinator().run()


def test_keys_that_cannot_be_read_are_somebodys(tmp_path):
    """The run cannot begin, and its server must know without whom it could."""
    parties = Parties(tmp_path, small_spec(**MASKED))
    agree = parties.nodes[LIAR]._agree_to
    parties.nodes[LIAR]._agree_to = lambda message: (agree(message)[0], {"hello": b"\xff" * 200})
    with pytest.raises(FederationError, match=f"{LIAR} does not take part: .*--without {LIAR}"):
        parties.coordinator().run()
