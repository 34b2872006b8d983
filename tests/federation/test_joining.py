"""What a party sees when something does not fit: one line that names it, before anything leaves."""

import subprocess
import sys

import pytest
import typer

from dither.accounting.ledger import Budget, Ledger
from dither.accounting.ledger.runs import data_id
from dither.cli.federations import _approval
from dither.errors import FederationError
from dither.federation import joining, keys, local
from dither.federation.nvflare import KIT, kits, system


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("age,ward,outcome\n50,a,yes\n61,z,no\n,b,no\n")
    return path


def test_check_says_in_words_what_is_wrong(tmp_path, table):
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    own = tmp_path / "keys" / "parties" / "ann"
    book = tmp_path / "ledger.sqlite"

    def said(**changes):
        given = {"data": table, "label": "outcome", "server": "", "ledger": book, **changes}
        return {finding.what: finding.good for finding in joining.check(own, **given)}

    good = said()
    assert all(good.values()), good
    assert "own.csv has 3 records" in good
    assert not said(label="result")["label column 'result' is not in 'own.csv'; known: age, outcome, ward"]
    (missing,) = [what for what, fine in said(server="127.0.0.1:1").items() if not fine]
    assert "127.0.0.1:1 cannot be reached" in missing
    (own / "node.key").chmod(0o644)
    assert not said()["node.key can be read by others: chmod 600"]
    assert not said(server="nowhere")["--server 'nowhere' is not of the form HOST:PORT"]


def test_the_commands(tmp_path):
    """init makes the folders; errors are one line and exit code 2 or 6, never a traceback."""

    def dither(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "dither", *arguments], capture_output=True, text=True, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    code, text = dither("federation", "init", str(tmp_path / "keys"), "--parties", "ann,bob")
    assert code == 0
    assert "hand to ann" in text
    code, text = dither("federation", "init", str(tmp_path / "keys"), "--parties", "ann,bob")
    assert code == 2
    assert "not empty" in text
    for command in (("init", "other", "--request"), ("accept", "--federation", "own")):
        code, text = dither("federation", *command, "nowhere.json")
        assert (code, text) == (2, "error: file 'nowhere.json' not found; check the path\n")
    code, text = dither("federation", "check", "--federation", str(tmp_path / "keys" / "server"))
    assert code == 6
    assert "is not a party's folder" in text.replace("\n", " ")


@pytest.mark.parametrize(("stopped", "raised"), [(typer.Abort, KeyboardInterrupt), (None, FederationError)])
def test_ctrl_c_at_the_question_is_no_refusal(monkeypatch, stopped, raised):
    """It was sent as one, and ended the run of all parties."""

    def confirm(question):
        if stopped:
            raise stopped
        return False

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)})())
    with pytest.raises(raised):
        _approval("a" * 64, None, yes=False, named="", silent=False)


def test_an_agreement_that_nobody_reads_needs_a_limit(tmp_path, table):
    """`--yes` approved whatever came first, at any ε."""
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    book = tmp_path / "ledger.sqlite"

    def stops(**options):
        with pytest.raises(FederationError) as stopped:
            joining.join(
                table, label="outcome", server="127.0.0.1:1", folder=tmp_path / "keys" / "parties" / "ann",
                ledger=book, patience=0.0, approve=lambda terms, experiment: "--yes", **options,
            )  # fmt: skip
        return str(stopped.value)

    assert "say how much it may cost" in stops(unread=True)
    limited = [{"target": Budget(1.0, 1e-5)}, {"seeded": True}]
    assert all("127.0.0.1:1" in stops(unread=True, **limit) for limit in limited)
    assert "127.0.0.1:1" in stops()
    ledger = Ledger(book)
    ledger.set_budget(data_id(ledger, path=str(table)), Budget(1.0, 1e-5))
    assert "127.0.0.1:1" in stops(unread=True)
    # A budget for outsiders says nothing of what the server may see.
    ledger.set_budget(data_id(ledger, path=str(table)), Budget(1.0, 1e-5, "final"), raising=True)
    assert "say how much it may cost" in stops(unread=True)


def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path):
    """The error was "AF_UNIX path too long"."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(FederationError, match=r"node.sock' \(AF_UNIX path too long\): move the party's folder"):
        local.answer_at(folder / "node.sock", lambda body: body, until=lambda: True)


def test_a_server_that_has_moved_is_joined_where_it_is(tmp_path, monkeypatch):
    """Over NVIDIA FLARE: within a minute after an earlier `dither join` its client still ran, to the old address.
    The party waited there for a day."""
    config = tmp_path / KIT / "startup" / "fed_client.json"
    kits.write(config, {"servers": [{"service": {"target": "old:1"}}]})
    holds = (
        "import os, sys, time; from dither.experiment.folder import lock; from pathlib import Path;"
        "handle = lock(Path(sys.argv[1])); handle.write(str(os.getpid())); handle.flush(); print(1, flush=True);"
        "time.sleep(60)"
    )
    relay = subprocess.Popen([sys.executable, "-c", holds, str(tmp_path / "relay.lock")], stdout=subprocess.PIPE)
    relay.stdout.readline()
    started = []
    monkeypatch.setattr(system.subprocess, "Popen", lambda command, **_: started.append(command))
    try:
        system.start_relay(tmp_path, "old:1")
        assert not started
        assert relay.poll() is None
        system.start_relay(tmp_path, "new:2")
        assert started
        assert relay.wait(10.0) == -15
    finally:
        relay.kill()
    assert kits.server_of(tmp_path / KIT) == "new:2"
