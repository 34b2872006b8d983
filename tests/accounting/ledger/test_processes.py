"""Many processes on one ledger, and processes that die: nothing is overspent, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dither.accounting import proven
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.errors import BudgetExhausted

from .worker import RELEASES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
KILLED = -getattr(signal, "SIGKILL", 9)


def work(job, place, anchor, number):
    """What worker.py prints: (exit status, lines said) of each process."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("worker.py")),
        job,
        str(place),
        str(anchor),
        str(number),
    ]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout)


def epsilon(count):
    return proven([(RELEASES, count)], 1e-5, view="upload").value


def entries(path):
    return [entry for entry in Ledger(path).history() if entry.kind == "charge"]


@pytest.mark.parametrize("workers", [2, 6])
def test_charging_at_once_never_overspends_and_loses_nothing(path, tmp_path, workers):
    affordable = 40
    anchor = tmp_path / "anchor.json"
    Ledger(path).set_budget("data", Budget(epsilon(affordable) * (1 + 1e-9), 1e-5))
    results = work("race", path, anchor, workers)
    assert [status for status, _ in results] == [0] * workers
    said = [line for _, lines in results for line in lines]
    assert len(said) == affordable
    assert all(lines for _, lines in results)

    charged = {f"{entry.rounds[0]} {entry.position}:{entry.hash}" for entry in entries(path)}
    assert charged == set(said)
    ledger = Ledger(path, anchor=anchor)
    ledger.verify([line.split()[1] for line in said])
    (row,) = ledger.spent("data")
    assert row.participations == affordable
    assert row.epsilon == pytest.approx(epsilon(affordable))
    assert row.epsilon <= row.budget.epsilon
    assert f"{json.loads(anchor.read_text())['position']}:" == ledger.head()[: ledger.head().index(":") + 1]
    with pytest.raises(BudgetExhausted):
        ledger.charge("late", "data", [Charge("ann", [(RELEASES, 1)])], rounds=(0, 1))


def test_a_kill_at_any_moment_loses_no_acknowledged_charge(path, tmp_path):
    anchor = tmp_path / "anchor.json"
    Ledger(path)
    trials = 60
    results = work("kill", path, anchor, trials)
    assert [status for status, _ in results] == [KILLED] * trials
    ledger = Ledger(path, anchor=anchor)
    charged = {}
    for entry in entries(path):
        charged.setdefault(entry.run, []).append(f"{entry.rounds[0]} {entry.position}:{entry.hash}")
    unsaid = 0
    for trial, (_, lines) in enumerate(results):
        own = charged.get(f"run {trial}", [])
        assert own[: len(lines)] == lines, f"trial {trial}: said {len(lines)}, in the ledger {len(own)}"
        assert len(own) - len(lines) in (0, 1), "at most the one charge in flight"
        unsaid += len(own) - len(lines)
        ledger.verify([line.split()[1] for line in lines])
    said = sum(len(lines) for _, lines in results)
    assert said > trials / 4, "the kills came too early to test anything"
    assert ledger.spent("data")[0].participations == said + unsaid
    with ledger._store.transaction(write=False) as connection:
        ledger._store.check_integrity(connection)


def test_creation_by_two_at_once_and_kills_while_creating(tmp_path):
    trials = 40
    results = work("create", tmp_path, "unused", trials)
    killed = 0
    for trial, children in enumerate(results):
        assert {status for status, _ in children} <= {0, KILLED}, f"trial {trial}"
        killed += sum(status == KILLED for status, _ in children)
        heads = {line for _, lines in children for line in lines}
        path = tmp_path / str(trial) / "ledger.sqlite"
        ledger = Ledger(path)  # finishes what was interrupted
        ledger.verify(heads)
        assert len(entries(path)) - len(heads) in (0, 1)
        ledger.charge("after", "data", [Charge("ann", [(RELEASES, 1)])], rounds=(0, 1))
        Ledger(path).verify(heads)
        assert ledger._store.key_path.exists()
    assert killed >= trials / 5, "too few were killed on the way"
