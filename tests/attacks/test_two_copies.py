"""Two copies of one party's folder on its machine: a backup that was put beside the original, or one that is put
in its place while the party runs. Both have the party's keys and its ledger, and the server asks each of them."""

import json
import re
import shutil

import pytest

from dither.accounting.ledger import Ledger, store
from dither.experiment.counting import Institution, Question
from dither.federation import messages, state
from dither.federation import party as party_module
from dither.federation.agreement import PartyData, StatisticsTerms
from dither.federation.engines import ClientEngine
from dither.federation.party import REFUSALS, Party
from tests.federation.parties import Parties, small_spec
from tests.federation.test_hostile import Enrolled, Hostile, stop
from tests.federation.test_statistics import Clinics

AGE = Question("histogram", ("age",), 0.5, ((0.0, 128.0),), bins=4)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Statistics to which all parties have agreed, with noise from the operating system."""
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    clinics = Clinics(tmp_path, 40, **{"secagg.mode": "off", "randomness": "os"})
    asking = clinics.asking((1.0, 1e-5))
    asking.clinics = clinics
    return asking


def asked(server, party, index=0, question=AGE):
    """The party's answer to a question, or why it refuses."""
    fields = {"run": server.agreement.run, "round": index, "question": question.to_dict()}
    body = server.mailbox._pack("ann", "question", fields, {})
    answer = messages.unpack(
        party.answer(body),
        federation=party.keyring.id,
        to=messages.SERVER,
        keys={"ann": party.identity.public},
        answers=messages.digest(body),
    )
    return answer.fields.get("why") or answer.array("upload").tolist()


@pytest.fixture
def copy(server):
    """A copy that runs beside the original: both have looked at the ledger before anything is in it."""
    folder = server.clinics.nodes["ann"].folder.with_name("copy")
    shutil.copytree(server.clinics.nodes["ann"].folder, folder)
    party = Party(
        folder,
        PartyData(server.clinics.file("ann")),
        ledger=Ledger(server.clinics.folder / "ann.sqlite"),
        approve=server.clinics.approve,
    )
    party._current(server.agreement.run)
    return party


def test_a_question_that_the_ledger_holds_is_not_answered_by_a_copy(server, copy):
    """Charged once, it was answered twice, with fresh noise: the mean of both says more than was charged."""
    original = server.clinics.nodes["ann"]
    first = asked(server, original)
    assert len(first) == 4
    assert asked(server, copy) == REFUSALS["other"]
    assert asked(server, copy, index=1) == REFUSALS["other"]  # nor anything later
    assert asked(server, original) == first


def test_of_two_copies_that_are_asked_at_once_one_answers(server, copy, monkeypatch):
    """Both find that nobody was charged, and charge: the ledger takes one charge on top of nothing."""
    monkeypatch.setattr(copy.ledger, "charged", lambda *_: asked(server, server.clinics.nodes["ann"]) and [])
    assert asked(server, copy) == REFUSALS["other"]
    monkeypatch.undo()
    assert asked(server, copy) == REFUSALS["other"]  # nor afterwards
    assert len(asked(server, server.clinics.nodes["ann"])) == 4


def test_a_folder_that_is_put_back_while_the_party_runs_gives_no_second_answer(server):
    party = server.clinics.nodes["ann"]
    run = party.folder / "runs" / server.agreement.run
    before = run.with_name("before")
    shutil.copytree(run, before)
    assert len(asked(server, party)) == 4
    shutil.rmtree(run)
    before.rename(run)
    assert asked(server, party) == REFUSALS["other"]
    assert asked(server, party, question=AGE._replace(bins=2)) == REFUSALS["other"]  # nor to another question


def test_a_round_that_the_ledger_holds_is_not_computed_by_a_copy(tmp_path):
    """It was charged again, but masked with the same stream."""
    parties = Parties(tmp_path / "federation", small_spec(**{"secagg.mode": "real"}))
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    hostile = Hostile(tmp_path / "copy", parties)
    original = hostile.nodes["ann"]
    shutil.copytree(original.folder, original.folder.with_name("second"))
    copy = Party(
        original.folder.with_name("second"),
        original.source,
        ledger=Ledger(hostile.folder / "ann.sqlite"),
        approve=lambda agreement, experiment: "test",
        seeded=True,
        say=hostile.parties.said.append,
    )
    copy._current(hostile.agreement.run)
    announcement = hostile.announce(range(4))
    assert hostile.round("ann", announcement).kind == "upload"
    hostile.nodes["ann"] = copy
    answer = hostile.round("ann", announcement)
    assert "does not remember" in answer.fields.get("why", "")
    assert hostile.charged("ann") == [0]


def backed_up(run, compute):
    """The computation, in the middle of which a backup is made of the run's folder."""

    def computed(*given, **more):
        answer = compute(*given, **more)
        shutil.copytree(run, run.with_name("before"))
        return answer

    return computed


def put_back(run):
    shutil.rmtree(run)
    run.with_name("before").rename(run)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_folder_that_was_backed_up_during_a_question_gives_no_second_answer(server, monkeypatch, restarted):
    """Folder and ledger knew the question alike: it was answered again with fresh noise, and without a charge."""
    party = server.clinics.nodes["ann"]
    run = party.folder / "runs" / server.agreement.run
    with monkeypatch.context() as patch:
        patch.setattr(Institution, "answer", backed_up(run, Institution.answer))
        first = asked(server, party)
    put_back(run)
    party = server.clinics.node("ann") if restarted else party
    assert asked(server, party) == REFUSALS["other"]
    assert len(first) == 4


@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_that_was_backed_up_during_a_round_gives_no_second_upload(tmp_path, monkeypatch, restarted):
    parties = Parties(tmp_path / "federation", small_spec(**{"randomness": "os", "privacy.delta": 1e-5}))
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    hostile = Hostile(tmp_path / "copy", parties)
    run = hostile.store("ann")
    hostile.broadcast("ann", 0.0)  # now its engine is made, which computes a round on trial
    with monkeypatch.context() as patch:
        patch.setattr(ClientEngine, "answer", backed_up(run, ClientEngine.answer))
        assert hostile.round("ann").kind == "upload"
    put_back(run)
    if restarted:
        hostile.restart("ann")
    assert "its folder does not remember" in hostile.round("ann").fields.get("why", "")
    assert hostile.charged("ann") == [0]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("after", [False, True])
def test_a_party_killed_at_any_write_answers_once_and_is_charged_before(server, monkeypatch, after):
    """Before or after each of the five: intent, charge, answer, what it released, how much that was."""
    left = [0]

    def dying(write):
        def write_or_die(*given, **more):
            left[0] -= 1
            if left[0] == 0 and not after:
                raise Killed
            found = write(*given, **more)
            if left[0] == 0:
                raise Killed
            return found

        return write_or_die

    monkeypatch.setattr(party_module, "write_checked", dying(party_module.write_checked))
    monkeypatch.setattr(state, "_append", dying(state._append))
    monkeypatch.setattr(state, "write_checked", dying(state.write_checked))
    monkeypatch.setattr(Ledger, "charge", dying(Ledger.charge))
    question = AGE._replace(share=0.2)
    for index in range(5):
        left[0] = index + 1
        with pytest.raises(Killed):
            asked(server, server.clinics.node("ann"), index, question)
        party = server.clinics.node("ann")
        answer = asked(server, party, index, question)
        assert len(answer) == 4
        charged = party.ledger.charged(party._runs[StatisticsTerms]._account, party.dataset)
        assert [start for start, _ in charged] == list(range(index + 1))
        assert asked(server, server.clinics.node("ann"), index, question) == answer
        (note,) = store.state_folder("releases").glob("ann-*.json")
        assert json.loads(note.read_text())["releases"] == index + 1
    (spent,) = server.clinics.spent("ann")
    assert 0.99 < spent.epsilon <= 1.0


def test_a_party_keeps_no_more_answers_than_fit_into_memory(server, monkeypatch):
    """All are read for each question. Ten thousand questions of a million counts each were allowed."""
    party, question = server.clinics.nodes["ann"], AGE._replace(share=0.2)
    assert len(asked(server, party, 0, question)) == 4
    size = (party.folder / "runs" / server.agreement.run / "answers.json").stat().st_size
    monkeypatch.setattr(party_module, "_MOST_ANSWERS", size)
    assert len(asked(server, party, 1, question)) == 4
    assert asked(server, party, 2, question) == REFUSALS["other"]
    charged = party.ledger.charged(party._runs[StatisticsTerms]._account, party.dataset)
    assert [start for start, _ in charged] == [0, 1]


@pytest.fixture
def masked(tmp_path, request):
    """A server with its keys, of four parties whose sums are masked."""
    randomness = {"randomness": getattr(request, "param", "seeded"), "privacy.delta": 1e-5}
    parties = Parties(tmp_path / "federation", small_spec(**{"secagg.mode": "real", **randomness}))
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    return Hostile(tmp_path / "copy", parties)


def unsealed(masked, uploads, cohort, attempt):
    """What ann answers when it is asked to open that attempt."""
    if attempt == 0:
        asked = messages.asked_digest(list(masked.broadcast("ann", 0.0).values()))
        masked.session.announce(0, cohort, masked.experiment.num_params, asked)
    for upload in uploads:
        masked.session.upload(upload)
    request = masked.session.unseal()[0]
    return masked.ask("ann", "unseal", {"run": masked.agreement.run}, {"secagg": request})


@pytest.mark.parametrize("name", ["", "secagg.json"])
def test_a_folder_that_is_put_back_helps_to_open_one_sum_of_a_round(masked, name):
    """A copy made between upload and opening had forgotten that it helped to open the first attempt. It uploaded
    for the second one and opened that, too: with one colluder, the difference of both sums is bob's upload."""
    run, first = masked.store("ann"), masked.announce(range(4))
    uploads = [masked.round(name, first).bytes("upload") for name in masked.nodes]
    shutil.copytree(run, run.with_name("before"))
    assert unsealed(masked, uploads, range(4), 0).kind == "unseal"
    if name:
        shutil.copy(run.with_name("before") / name, run)
    else:
        put_back(run)
    masked.restart("ann")
    answer = masked.round("ann", masked.announce((0, 2, 3), attempt=1))
    assert "does not remember" in answer.fields.get("why", "")


def test_a_folder_that_is_put_back_helps_to_open_nothing(masked, monkeypatch):
    """A copy made in the middle of the round: its second upload was refused, but then it took part in the opening
    of what it was asked to upload for."""
    run, first = masked.store("ann"), masked.announce(range(4))
    others = [masked.round(name, first).bytes("upload") for name in masked.nodes if name != "ann"]
    masked.broadcast("ann", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ClientEngine, "answer", backed_up(run, ClientEngine.answer))
        upload = masked.round("ann", first).bytes("upload")
    put_back(run)
    masked.restart("ann")
    assert "does not remember" in masked.round("ann", first).fields["why"]
    assert "does not remember" in unsealed(masked, [*others, upload], range(4), 0).fields.get("why", "")


def test_a_party_that_has_lost_the_note_of_what_it_released_does_not_go_on(server):
    """Without the state folder, a folder that was put back cannot be told from one that was not."""
    party = server.clinics.nodes["ann"]
    question = AGE._replace(share=0.2)
    assert len(asked(server, party, 0, question)) == 4
    for note in store.state_folder("releases").glob("*.json"):
        note.unlink()
    assert asked(server, party, 0, question) == REFUSALS["other"]
    assert asked(server, server.clinics.node("ann"), 1, question) == REFUSALS["other"]


@pytest.mark.parametrize("lost", ["gone", "not writable"])
def test_what_cannot_be_released_is_not_charged(tmp_path, monkeypatch, lost):
    """Without its note, or with a full state folder, a party was charged for every further round of the run, and
    sent none of them."""
    parties = Parties(tmp_path / "federation", small_spec())
    with pytest.raises(Enrolled):
        parties.coordinator(on_event=stop).run()
    hostile = Hostile(tmp_path / "copy", parties)
    assert hostile.round("ann").kind == "upload"
    if lost == "gone":
        for note in store.state_folder("releases").glob("*.json"):
            note.unlink()
    else:
        monkeypatch.setattr(state, "lock", lambda *_: (_ for _ in ()).throw(PermissionError(13, "not permitted")))
    for index in (1, 2):
        hostile.restart("ann")
        assert re.search("set DITHER_STATE|make it writable", hostile.round("ann", round=index).fields["why"])
    assert hostile.charged("ann") == [0]
    monkeypatch.undo()


def test_a_file_that_is_put_back_by_itself_gives_no_second_answer(server, monkeypatch):
    """As the record of what was released was whole, the answer that it lists was made again with fresh noise."""
    party = server.clinics.nodes["ann"]
    run = party.folder / "runs" / server.agreement.run
    with monkeypatch.context() as patch:
        patch.setattr(Institution, "answer", backed_up(run, Institution.answer))
        first = asked(server, party)
    shutil.copy(run.with_name("before") / "answers.json", run)
    assert asked(server, party) == REFUSALS["other"]
    assert len(first) == 4


@pytest.mark.parametrize("masked", ["os"], indirect=True)  # the same row under the same masks is no second one
def test_files_of_a_round_that_are_put_back_by_themselves_give_no_second_upload(masked, monkeypatch):
    run, first = masked.store("ann"), masked.announce(range(4))
    masked.broadcast("ann", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ClientEngine, "answer", backed_up(run, ClientEngine.answer))
        assert masked.round("ann", first).kind == "upload"
    for name in ("intent.json", "secagg.json"):
        shutil.copy(run.with_name("before") / name, run)
    (run / "pending.npz").unlink()
    masked.restart("ann")
    assert "does not remember" in masked.round("ann", first).fields.get("why", "")
