"""A party's signed record of what it released: nothing in it can be changed, taken out or put in."""

import fcntl
import json
from dataclasses import replace

import pytest

from dither.errors import DamagedFile, FederationError
from dither.experiment.folder import write_text
from dither.federation import keys, state


@pytest.fixture
def record(tmp_path):
    keyring = keys.create(tmp_path / "fed", ["ann", "bob"], hosts=["localhost"])
    homes = {name: tmp_path / "fed" / "parties" / name for name in ("ann", "bob")}
    identities = {name: keys.Identity.load(home) for name, home in homes.items()}

    def opened(name="ann", terms="t"):
        return state.ReleaseRecord(tmp_path, name, terms, identities[name])

    ann = opened()
    ann.check(first=True)
    for content, *place in ((b"zero", 0), (b"one", 1), (b"one", 1), (b"one again", 1, 1), (b"two", 2)):
        ann.append(content, *place)
    return tmp_path, keyring, opened


def lines(folder):
    return (folder / state.RELEASES).read_text().splitlines(keepends=True)


def test_a_repeated_upload_is_no_new_release_and_a_new_attempt_is_one(record):
    folder, keyring, opened = record
    assert [json.loads(line)["round"] for line in lines(folder)] == [0, 1, 1, 2]
    again = opened()  # after a restart
    again.append(b"two", 2)
    assert len(lines(folder)) == 4
    again.append(b"three", 3)
    assert state.check_record(folder, keyring)["releases"] == 5
    statement = again.statement()
    assert state.check_statement(statement, "ann", "t", keyring)["releases"] == 5
    for who, terms in (("bob", "t"), ("ann", "other")):
        with pytest.raises(FederationError, match="another"):
            state.check_statement(statement, who, terms, keyring)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda all_: [all_[0], *all_[2:]], "line 2 does not follow"),
        (lambda all_: [all_[0], all_[0], *all_[1:]], "line 2 does not follow"),
        (lambda all_: [all_[1], all_[0], *all_[2:]], "line 1 does not follow"),
        (lambda all_: [*all_[:-1], all_[-1].replace('"round": 2', '"round": 3')], "line 4 is not signed by 'ann'"),
        (lambda all_: [*all_[:-1], all_[-1].replace('"signature": "', '"signature": "x')], "line 4 is not signed"),
        (lambda all_: [*all_, "[]\n"], "cannot be read"),
    ],
)
def test_a_record_that_was_changed_is_refused(record, change, why):
    folder, keyring, _ = record
    before = lines(folder)
    changed = change(before)
    assert changed != before
    (folder / state.RELEASES).write_text("".join(changed))
    with pytest.raises(DamagedFile, match=why):
        state.check_record(folder, keyring)


def test_half_a_line_is_dropped_and_another_partys_line_refused(record):
    folder, keyring, opened = record
    whole = lines(folder)
    (folder / state.RELEASES).write_text("".join(whole) + whole[-1][:40])  # the power failed: nothing left
    opened().append(b"three", 3)
    assert state.check_record(folder, keyring)["releases"] == 5
    bob = opened("bob")
    bob.check(first=True)
    bob.append(b"four", 4)
    with pytest.raises(DamagedFile, match="line 6 does not follow"):
        state.check_record(folder, keyring)


def test_a_record_goes_forward_alone(record):
    """Whatever other files of the folder say: an attempt of a round once, and nothing beside an opened sum."""
    ann = record[2]()
    for content, index, attempt, opens in ((b"", 1, 2, False), (b"other", 2, 0, False), (b"", 1, 1, True)):
        with pytest.raises(FederationError, match="does not remember"):
            ann.append(content, index, attempt, opens=opens)
    ann.append(b"shares", 2, opens=True)
    for attempt, opens in ((0, False), (1, False), (1, True)):
        with pytest.raises(FederationError, match="does not remember"):
            ann.append(b"", 2, attempt, opens=opens)
    ann.append(b"shares of its own seal", 2, opens=True)
    ann.append(b"shares", 2, opens=True)  # asked again
    ann.append(b"three", 3)
    assert len(lines(record[0])) == 8


def test_a_line_that_a_full_disk_cut_off_is_written_again(record, monkeypatch):
    """The party went on only after a restart: until then it took itself for a copy."""
    folder, keyring, opened = record
    ann = opened()
    whole = state._append

    def full(path, entry):
        with open(path, "a", encoding="utf-8") as file:
            file.write('{"party": "an')
        raise OSError("No space left on device")

    monkeypatch.setattr(state, "_append", full)
    with pytest.raises(OSError, match="No space"):
        ann.append(b"three", 3)
    monkeypatch.setattr(state, "_append", whole)
    ann.append(b"three", 3)
    assert state.check_record(folder, keyring)["releases"] == 5


def test_a_full_disk_outside_of_the_folder_makes_no_copy_of_it(record, monkeypatch):
    """After two messages that could not be noted, the party took itself for a copy for ever."""
    folder, keyring, opened = record
    ann, whole = opened(), state.write_checked

    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "write_checked", full)
    for index in (3, 4):
        with pytest.raises(FederationError, match=r"releases' cannot be written to \(No space left"):
            ann.append(b"content", index)
    monkeypatch.setattr(state, "write_checked", whole)
    ann.append(b"content", 4)
    assert state.check_record(folder, keyring)["releases"] == 6


def test_a_full_disk_outside_of_the_folder_is_found_before_a_charge(record, monkeypatch):
    """Each round was charged, and none was sent."""
    ann = record[2]()
    monkeypatch.setattr(state, "write_checked", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(FederationError, match=r"releases' cannot be written to \(No space left"):
        ann.check()
    assert ann.statement()["releases"] == 4


def test_a_disk_without_locks_makes_no_copy_of_a_party(record, monkeypatch):
    """On some network disks: the party was told that a copy of it is in use."""
    ann = record[2]()
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
    with pytest.raises(FederationError, match=r"cannot be written to \(No locks available\)"):
        ann.check()


def test_a_last_line_that_is_damaged_says_what_to_do(record):
    folder, _, opened = record
    (folder / state.RELEASES).write_text("".join([*lines(folder)[:-1], "[]\n"]))
    with pytest.raises(DamagedFile, match="cannot be read; this party cannot continue the run: the others can"):
        opened()


def test_a_state_folder_that_was_put_back_is_named(record):
    """The party's own folder was said to remember too little."""
    ann = record[2]()
    (note,) = state.state_folder("releases").glob("*.json")
    before = note.read_bytes()
    for index in (3, 4):
        ann.append(b"content", index)
    note.write_bytes(before)
    with pytest.raises(FederationError, match="state folder was restored from a copy"):
        ann.append(b"content", 5)


def test_a_folder_that_was_put_back_states_nothing(record):
    """It signed that it had released less than it had."""
    folder, _, opened = record
    before = (folder / state.RELEASES).read_bytes()
    opened().append(b"three", 3)
    (folder / state.RELEASES).write_bytes(before)
    with pytest.raises(FederationError, match="does not remember"):
        opened().statement()


@pytest.mark.parametrize("left", [0, 1, 3])
def test_lines_that_are_missing_at_the_end_are_noticed(record, left):
    """`dither federation verify` said that nothing is missing, also of a record without a line."""
    folder, keyring, _ = record
    before = lines(folder)
    assert state.check_record(folder, keyring)["complete"]
    (folder / state.RELEASES).write_text("".join(before[:left]))
    with pytest.raises(DamagedFile, match="has released 4 messages" if left else "is empty"):
        state.check_record(folder, keyring)
    for note in state.state_folder("releases").glob("*.json"):
        note.unlink()  # another machine cannot know
    if left:
        assert not state.check_record(folder, keyring)["complete"]


def test_a_run_can_be_verified_after_one_of_its_parties_was_taken_out(record):
    """Its statement cannot be checked any more; the others' were refused with it, as damaged."""
    folder, keyring, opened = record
    state.save_statements(folder, {"ann": opened().statement(), "bob": {"party": "bob"}})
    left = replace(keyring, parties=keyring.parties[:1])
    assert list(state.load_statements(folder, "t", left)) == ["ann"]
    with pytest.raises(DamagedFile, match="cannot be read"):
        state.load_statements(folder, "t", keyring)


@pytest.mark.parametrize("change", [{"releases": "\x1b[2J"}, {"releases": True}, {"head": 7}, {"head": "\x1b[2J"}])
def test_a_statement_is_a_count_and_a_digest(record, change):
    """`dither federation verify` prints both, and ended in a TypeError: nobody could check the run any more."""
    folder, keyring, opened = record
    identity = keys.Identity.load(folder / "fed" / "parties" / "ann")
    statement = opened().statement()
    del statement["signature"]
    assert state.check_statement(identity.signed(statement), "ann", "t", keyring)["releases"] == 4
    with pytest.raises(FederationError, match="no count and digest"):
        state.check_statement(identity.signed(statement | change), "ann", "t", keyring)


@pytest.mark.parametrize("name", ["model.py", "local/schema.toml", "scores.json"])
def test_what_is_added_to_a_signed_run_is_noticed(tmp_path, name):
    """`dither predict` runs model.py, and of two schemas reads the local one: neither was signed."""
    keys.create(tmp_path / "keys", ("ann", "bob"), hosts=["localhost"])
    keyring, identity = (each.load(tmp_path / "keys" / "server") for each in (keys.Keyring, keys.Identity))
    journal = state.Journal(tmp_path / "run")
    write_text(tmp_path / "run" / "spec.toml", "")
    journal.sign(identity, keyring.id)
    journal.verify(keyring)
    write_text(tmp_path / "run" / name, "print('not the server')")
    with pytest.raises(DamagedFile, match="is not among the files that the server signed"):
        journal.verify(keyring)
    journal.sign(identity, keyring.id)
    assert name in journal.verify(keyring)["files"]


def test_a_countings_files_are_signed_and_what_is_not_signed_is_named(tmp_path):
    """Terms and answers of a federation's statistics could be changed, and a false audit.json laid beside a signed
    run, without a word."""
    keys.create(tmp_path / "keys", ("ann", "bob"), hosts=["localhost"])
    keyring, identity = (each.load(tmp_path / "keys" / "server") for each in (keys.Keyring, keys.Identity))
    run = tmp_path / "run"
    for name in ("spec.toml", "lock", "progress.jsonl", "statistics/answers.json", "statistics/secagg.json"):
        write_text(run / name, "")
    for name in ("local/key", "local/checkpoints/3.npz", "flwr/config.toml"):
        write_text(run / name, "")
    journal = state.Journal(run)
    journal.sign(identity, keyring.id)
    signed = journal.verify(keyring)
    assert set(signed["files"]) == {"spec.toml", "statistics/answers.json"}
    assert signed["unsigned"] == []
    for name in ("audit.json", "local/summary.json", "statistics/excluded.json"):
        write_text(run / name, "{}")
    assert journal.verify(keyring)["unsigned"] == ["audit.json", "local/summary.json", "statistics/excluded.json"]
    write_text(run / "statistics/answers.json", "{}")
    with pytest.raises(DamagedFile, match=r"answers.json' is not the file that the server signed"):
        journal.verify(keyring)
