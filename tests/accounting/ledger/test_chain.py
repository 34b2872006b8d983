"""Edits are detected by the chain, rollback by an anchor; damage is one line with the fix."""

import json
import os
import re
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dither.accounting.ledger import Budget, Ledger
from dither.accounting.ledger.book import Account
from dither.accounting.ledger.store import state_folder
from dither.data.hashing import RecordHashes
from dither.errors import LedgerError

from .conftest import all_of, gaussian


def alone(path, **options):
    """A ledger without the anchor in the user's state folder."""
    return Ledger(path, anchored=False, **options)


def fill(ledger, rounds=5, first=0):
    """A budget and some charges; returns the head."""
    ledger.set_budget("data", Budget(5.0, 1e-5))
    for t in range(first, first + rounds):
        head = ledger.charge("run", "data", all_of(["ann", "bob"], gaussian()), rounds=(t, t + 1))
    return head


def sql(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        return [connection.execute(*statement).fetchall() for statement in statements]


def assert_refused(path, match, **options):
    """Opening raises, in one line that names the file."""
    with pytest.raises(LedgerError, match=match) as caught:
        Ledger(path, **options)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def copy_folder(source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)


# Edits


def test_an_untouched_ledger_verifies(ledger, path):
    head = fill(ledger)
    ledger.verify()
    ledger.verify([head])
    Ledger(path).verify([head])
    assert Ledger(path).head() == head == ledger.head()
    assert re.fullmatch(r"6:[0-9a-f]{64}", head)


@pytest.mark.parametrize("position", [0, 1, 3, 6])
def test_every_byte_of_an_entrys_content_is_covered(ledger, path, position):
    fill(ledger)
    ((content,),) = sql(path, ("SELECT content FROM entries WHERE position = ?", (position,)))[0]
    for i, letter in enumerate(content):
        edited = content[:i] + ("7" if letter != "7" else "8") + content[i + 1 :]
        sql(path, ("UPDATE entries SET content = ? WHERE position = ?", (edited, position)))
        with pytest.raises(LedgerError, match=f"entry {position} "):
            ledger.verify()
    assert_refused(path, f"entry {position} was edited")
    sql(path, ("UPDATE entries SET content = ? WHERE position = ?", (content, position)))
    ledger.verify()


@pytest.mark.parametrize("column", ["time", "kind", "dataset", "run", "hash", "content"])
@pytest.mark.parametrize("edit", ["{0} || 'x'", "substr({0}, 2)", "'genesis'", "CAST({0} || '' AS BLOB)", "'ä7'"])
def test_every_column_is_covered(ledger, path, column, edit):
    fill(ledger)
    sql(path, (f"UPDATE entries SET {column} = {edit.format(column)} WHERE position = 3",))
    if column == "run" and edit == "substr({0}, 2)":
        assert sql(path, ("SELECT run FROM entries WHERE position = 3",)) == [[("un",)]]
    with pytest.raises(LedgerError, match="entry 3 was edited"):
        ledger.verify()
    assert_refused(path, "entry 3 was edited")


@pytest.mark.parametrize(
    "statements",
    [
        ["DELETE FROM entries WHERE position = 3"],
        ["DELETE FROM entries WHERE position = 0"],
        [
            "DELETE FROM entries WHERE position = 3",
            "UPDATE entries SET position = position - 1 WHERE position > 3",
        ],
        [
            "UPDATE entries SET position = 99 WHERE position = 3",
            "UPDATE entries SET position = 3 WHERE position = 4",
            "UPDATE entries SET position = 4 WHERE position = 99",
        ],
        ["INSERT INTO entries SELECT 7, time, kind, dataset, run, content, hash FROM entries WHERE position = 6"],
        ["INSERT INTO entries SELECT -1, time, kind, dataset, run, content, hash FROM entries WHERE position = 6"],
        ["DELETE FROM entries"],
    ],
    ids=["middle", "first", "renumbered", "swapped", "repeated", "before the first", "all"],
)
def test_entries_that_go_come_or_move_are_detected(ledger, path, statements):
    fill(ledger)
    sql(path, *[(statement,) for statement in statements])
    with pytest.raises(LedgerError, match="entry"):
        ledger.verify()
    assert_refused(path, "entry")


def test_a_charge_refuses_to_build_on_a_broken_chain(ledger, path):
    fill(ledger)
    other = Ledger(path)
    sql(path, ("UPDATE entries SET hash = ? WHERE position = 6", ("0" * 64,)))
    with pytest.raises(LedgerError, match="entry 6"):
        other.charge("run", "data", all_of(["ann"], gaussian()), rounds=(9, 10))
    assert sql(path, ("SELECT count(*) FROM entries",)) == [[(7,)]]


def test_the_schema_is_part_of_it(ledger, path):
    fill(ledger)
    sql(path, ("CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries WHERE position > 3; END",))
    with pytest.raises(LedgerError, match="not a ledger"):
        ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(9, 10))


# Rollback


def test_deleting_the_newest_entries_needs_an_anchor_to_be_seen(tmp_path, path):
    anchor = tmp_path / "apart" / "anchor.json"
    head = fill(alone(path, anchor=anchor))
    seen = json.loads(anchor.read_text())
    assert f"{seen['position']}:{seen['head']}" == head
    sql(path, ("DELETE FROM entries WHERE position >= 5",))

    alone(path).verify()  # not detected without an anchor: the chain is a valid, shorter one
    assert alone(path).spent("data", "ann")[0].participations == 3

    assert_refused(path, "newest entry is 4, but .* has seen entry 6", anchor=anchor, anchored=False)
    with pytest.raises(LedgerError, match="rolled back"):
        alone(path).verify([anchor])
    with pytest.raises(LedgerError, match="rolled back"):
        alone(path).verify([head])


def test_restoring_an_older_copy_needs_an_anchor_to_be_seen(tmp_path, path):
    anchors = [tmp_path / "run" / "anchor.json", tmp_path / "second.json"]
    ledger = alone(path, anchor=anchors)
    fill(ledger, 3)
    copy_folder(path.parent, tmp_path / "backup")
    fill(ledger, 2, first=3)
    copy_folder(tmp_path / "backup", path.parent)

    alone(path).verify()  # not detected without an anchor
    for anchor in anchors:
        assert_refused(path, "rolled back", anchor=anchor, anchored=False)
    with pytest.raises(LedgerError, match="entry 7 is missing: the file was rolled back"):
        ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(9, 10))  # this process has seen more


def test_two_copies_that_are_both_charged_are_seen_by_an_anchor(tmp_path, path):
    anchor = tmp_path / "anchor.json"
    fill(alone(path, anchor=anchor), 2)
    copy_folder(path.parent, tmp_path / "copy")
    copied = tmp_path / "copy" / path.name
    alone(path, anchor=anchor).charge("a", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    alone(copied).charge("b", "data", all_of(["ann"], gaussian()), rounds=(0, 1))
    alone(copied).verify()  # not detected without an anchor
    assert_refused(copied, "replaced or is a copy", anchor=anchor, anchored=False)


def test_entries_of_two_copies_cannot_be_mixed(tmp_path, path):
    """Both are genuine, at the same position and under the same key, but follow different pasts."""
    fill(alone(path), 2)
    copy_folder(path.parent, tmp_path / "copy")
    copied = tmp_path / "copy" / path.name
    for place, noise in ((path, 10.0), (copied, 1e6)):
        for t in range(2):
            alone(place).charge("more", "data", all_of(["bob"], gaussian(noise * (t + 1))), rounds=(t, t + 1))
    (cheap,) = sql(copied, ("SELECT content, hash, time FROM entries WHERE position = 5",))[0]
    sql(path, ("UPDATE entries SET content = ?, hash = ?, time = ? WHERE position = 5", cheap))
    assert_refused(path, "entry 5 was edited", anchored=False)


def test_an_anchor_is_at_or_before_the_head(tmp_path, path):
    anchor, late = tmp_path / "anchor.json", tmp_path / "late.json"
    fill(Ledger(path, anchor=anchor), 2)
    text = anchor.read_text()
    head = fill(Ledger(path), 2, first=2)  # without the anchor: it stays behind, and holds
    assert anchor.read_text() == text
    Ledger(path, anchor=anchor).verify([head])
    ledger = Ledger(path, anchor=[anchor, late])
    head = ledger.charge("run", "data", all_of(["ann"], gaussian()), rounds=(9, 10))
    assert anchor.read_text() == late.read_text() != text
    ledger.verify([anchor, str(late), head])


def test_anchors_never_move_back(tmp_path, path):
    anchor = tmp_path / "anchor.json"
    ledger = Ledger(path, anchor=anchor)
    fill(ledger, 2)
    text = anchor.read_text()
    ledger._store.write_anchors(1, ledger._store.hashes[1])  # a slower process
    assert anchor.read_text() == text


def test_an_anchor_of_another_ledger_or_a_damaged_one(tmp_path, path, ledger):
    anchor = tmp_path / "anchor.json"
    fill(Ledger(tmp_path / "other.sqlite", anchor=anchor), 1)
    fill(ledger)
    assert_refused(path, "is the anchor of ledger", anchor=anchor)
    for text in ("", "{", "[]", '{"ledger": "x"}'):
        anchor.write_text(text)
        with pytest.raises(LedgerError, match="not a readable anchor"):
            Ledger(path, anchor=anchor)
    with pytest.raises(LedgerError, match="not a readable anchor"):
        ledger.verify([tmp_path / "missing.json"])


# The anchor outside, in the user's state folder


def test_a_ledger_that_forgets_is_seen_from_outside(tmp_path, path):
    fill(Ledger(path), 3)
    copy_folder(path.parent, tmp_path / "backup")
    fill(Ledger(path), 2, first=3)
    (anchor,) = (state_folder() / "ledgers").iterdir()
    assert stat.S_IMODE(anchor.stat().st_mode) == 0o600
    assert_refused(tmp_path / "backup" / path.name, "rolled back")  # the copy elsewhere
    shutil.rmtree(path.parent)
    assert_refused(path, f"gone or empty, but {anchor} belongs to one")  # deleted, with its key
    copy_folder(tmp_path / "backup", path.parent)
    assert_refused(path, "rolled back")
    shutil.rmtree(path.parent)
    alone(path)
    assert_refused(path, f"not the ledger that was here, whose anchor is {anchor}")
    anchor.unlink()  # as the messages say
    assert Ledger(path).spent("data") == []


def test_a_ledger_may_move_and_two_copies_may_not(tmp_path, path):
    fill(Ledger(path), 1)
    copied, moved = tmp_path / "copy" / path.name, tmp_path / "moved" / path.name
    copy_folder(path.parent, copied.parent)
    assert Ledger(copied).head() == Ledger(path).head()
    path.parent.rename(moved.parent)
    fill(Ledger(moved), 1, first=1)
    assert_refused(copied, "rolled back")
    Ledger(path)  # nothing is left there: another ledger may begin
    fill(Ledger(moved), 1, first=2)


def test_an_old_ledger_gets_its_anchor_when_it_is_opened(path):
    fill(alone(path), 2)
    assert not os.path.exists(os.environ["DITHER_STATE"])
    Ledger(path)
    sql(path, ("DELETE FROM entries WHERE position = 3",))
    assert_refused(path, "rolled back")


def test_a_state_folder_that_cannot_be_used(tmp_path, path, monkeypatch):
    fill(Ledger(path), 1)
    (anchor,) = (state_folder() / "ledgers").iterdir()
    anchor.write_text("{")
    with pytest.raises(LedgerError, match=rf"{anchor}: not a readable anchor"):
        Ledger(path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DITHER_STATE", str(tmp_path / "file"))
    with pytest.raises(LedgerError, match="set DITHER_STATE to a writable folder"):
        Ledger(path)


def test_a_state_folder_that_one_may_not_write_to_is_named(path):
    """It was said that permission is denied: not for what, nor what would help."""
    numbers, ledger = np.arange(6, dtype=np.uint64).reshape(2, 3), Ledger(path)
    (state_folder() / "lock").mkdir()
    with pytest.raises(LedgerError, match=r"/lock: cannot be used .*, and Dither remembers ledgers there; give"):
        ledger.identify("d" * 16, lambda: RecordHashes(numbers, numbers[0]), file="a.csv")


# Damage


def test_the_key_and_the_ledger_are_for_the_owner_only(tmp_path, path):
    old = os.umask(0)
    try:
        ledger = Ledger(path, anchor=tmp_path / "anchor.json")
        fill(ledger, 1)
    finally:
        os.umask(old)
    for file in (ledger.key_path, path, tmp_path / "anchor.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert len(bytes.fromhex(ledger.key_path.read_text())) == 32
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, path.name + ".key"]


def test_it_is_durable(ledger):
    with ledger._store.transaction(write=False) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


@pytest.mark.parametrize("content", [b"\0", b"hello", b"x" * 5000, b"SQLite format 3\0" + b"\1" * 5000])
def test_a_file_that_is_no_ledger(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    assert_refused(path, "damaged, or not a ledger")
    assert path.read_bytes() == content
    assert not path.with_name(path.name + ".key").exists()


def test_somebody_elses_database_is_left_alone(path):
    path.parent.mkdir()
    sql(path, ("CREATE TABLE recipes (name)",))
    before = path.read_bytes()
    path.with_name(path.name + ".key").write_text("00" * 32)
    assert_refused(path, "not a ledger")
    assert path.read_bytes() == before


def test_truncation_at_any_page(ledger, path):
    fill(ledger, 30)
    whole = path.read_bytes()
    assert len(whole) >= 4 * 4096
    for size in [*range(4096, len(whole), 4096), 100, len(whole) - 1, len(whole) // 2 + 7]:
        path.write_bytes(whole[:size])
        with pytest.raises(LedgerError):
            Ledger(path).verify()
    path.write_bytes(whole)
    Ledger(path).verify()


def test_flipped_bytes_in_the_file_never_change_what_was_spent(ledger, path):
    fill(ledger, 10)
    whole, spent = path.read_bytes(), ledger.spent("data")
    refused = 0
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        try:
            assert Ledger(path).spent("data") == spent  # free space, or a header field that means nothing
        except LedgerError:
            refused += 1
    assert refused > 20


def test_an_emptied_or_missing_ledger_is_not_a_new_one(tmp_path, ledger, path):
    fill(ledger, 1)
    path.write_bytes(b"")
    assert_refused(path, "gone or empty")
    path.unlink()
    with pytest.raises(LedgerError, match="is gone"):
        ledger.head()
    assert_refused(path, "gone or empty, but .*key belongs to one")
    assert not path.exists()


def test_a_ledger_deleted_with_its_key_is_seen_by_its_anchor_only(tmp_path, path):
    anchor = tmp_path / "anchor.json"
    fill(alone(path, anchor=anchor), 1)
    shutil.rmtree(path.parent)
    assert_refused(path, "gone or empty, but .*anchor.json belongs to one", anchor=anchor, anchored=False)
    assert alone(path).spent("data") == []  # not detected without an anchor


def test_the_key_must_be_there_and_fit(tmp_path, ledger, path):
    fill(ledger, 1)
    key = ledger.key_path.read_text()
    ledger.key_path.write_text("ab" * 32)
    assert_refused(path, "entry 0 was edited, or the key belongs to another ledger")
    for text in ("", "zz", "ab"):
        ledger.key_path.write_text(text)
        with pytest.raises(LedgerError, match="key is missing or damaged"):
            Ledger(path)
    ledger.key_path.write_text(key)
    Ledger(path).verify()


def test_other_formats_and_folders(tmp_path, ledger, path):
    sql(path, ("PRAGMA user_version = 9",))
    assert_refused(path, "ledger format 9, this Dither reads 1")
    (tmp_path / "folder").mkdir()
    assert_refused(tmp_path / "folder", "cannot be used")


def test_failing_half_way_never_leaves_half_of_the_accounts(ledger, path, monkeypatch):
    other = Ledger(path)
    fill(other, 4)
    add, calls = Account.add, []

    def breaks(account, *values):
        calls.append(values)
        if len(calls) == 4:  # the second client of the second charge
            raise KeyboardInterrupt
        add(account, *values)

    monkeypatch.setattr(Account, "add", breaks)
    with pytest.raises(KeyboardInterrupt):
        ledger.spent("data")
    assert ledger.spent("data") == other.spent("data")


def test_the_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("DITHER_LEDGER", str(tmp_path / "mine.sqlite"))
    assert Ledger.default_path() == tmp_path / "mine.sqlite"
    monkeypatch.delenv("DITHER_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Ledger.default_path().name == "ledger.sqlite"
    assert "dither" in Ledger.default_path().parts


def test_a_creation_that_was_cut_off_is_finished_by_the_next(tmp_path, ledger, path):
    name, new_key = ledger.fingerprint(), path.with_name(path.name + ".key.new")
    ledger.key_path.rename(new_key)  # killed after the first entry, before the key had its name
    assert Ledger(path).fingerprint() == name
    assert not new_key.exists()

    other = tmp_path / "other.sqlite"  # killed before the first entry
    other.touch()
    other.with_name(other.name + ".key.new").write_text("ab" * 32)
    fill(Ledger(other), 1)
    Ledger(other).verify()
    assert "ab" * 32 not in Ledger(other).key_path.read_text()


# Older formats


def test_a_ledger_of_format_1_keeps_its_entries_and_goes_on(tmp_path):
    """Written by Dither before data sets had names and sketches."""
    shutil.copytree(Path(__file__).parent / "format1", tmp_path / "old")
    path, dataset = tmp_path / "old" / "ledger.sqlite", "72b1d2577629cffdb2b90689b5213054"
    ledger = Ledger(path)
    wide, own = Budget(7.0, 1e-5, "upload", "replace-one"), Budget(1.0, 1e-6, "sum", "add/remove")
    assert (ledger.budget(dataset), ledger.budget(dataset, "ann")) == (wide, own)
    assert {spent.client: spent.epsilon for spent in ledger.spent(dataset)} == pytest.approx(
        {"ann": 0.714693972071001, "every record": 1.9481947170570875}, rel=1e-6
    )
    assert [entry.kind for entry in ledger.history()] == ["budget", "budget", *["charge"] * 3, "budget"]
    ledger.charge("new", dataset, all_of(["ann"], gaussian()), rounds=(0, 1))
    assert sql(path, ("PRAGMA user_version",)) == [[(1,)]], "still for older programs"
    numbers = np.arange(6, dtype=np.uint64).reshape(2, 3)
    ledger.identify(dataset, lambda: RecordHashes(numbers, numbers[0]), file="a.csv", name="people")
    assert sql(path, ("PRAGMA user_version",)) == [[(2,)]]
    again = Ledger(path)
    again.verify()
    assert again.find("people") == dataset
    assert again.spent(dataset, "ann")[0].participations == 4


def test_an_entry_of_a_kind_that_is_not_known_is_refused(path):
    ledger = Ledger(path)
    with ledger._current(write=True) as connection:
        ledger._store.append(connection, "gift", "data", "", "{}")
    with pytest.raises(LedgerError, match="'gift' entry, written by a newer version"):
        Ledger(path)
