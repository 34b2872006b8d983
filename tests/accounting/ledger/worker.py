"""Run as a program by test_processes: processes that charge, and that are killed while they do.

It starts once and forks, so that hundreds of processes are cheap. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

from dither.accounting.ledger import Charge, Ledger
from dither.errors import BudgetExhausted
from dither.types import Release, Sampling

RELEASES = (Release("uplink", 10.0, 1.0, 1, Sampling("full", 1.0, "add/remove"), "test"),)


def spawn(work):
    """Fork a child that writes lines to a pipe; (pid, reading end)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            work(lambda line: os.write(writing, f"{line}\n".encode()))
            code = 0
        except BaseException:
            traceback.print_exc()  # pytest shows it with the failing test
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    return pid, reading


def finish(pid, reading):
    """(exit status, complete lines that the child wrote)."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    return status, text.split("\n")[:-1]


def charge_forever(path, anchor, run, say, wait=lambda: None):
    """Charge one round after the other and say so each time; stops only when the budget does. `wait()` after the
    first."""
    ledger = Ledger(path, anchor=anchor)
    t = 0
    while True:
        try:
            head = ledger.charge(run, "data", [Charge("ann", [(RELEASES, 1)])], rounds=(t, t + 1))
        except BudgetExhausted:
            return
        say(f"{t} {head}")
        if t == 0:
            wait()
        t += 1


def race(path, anchor, workers):
    """Several processes charge at once, each until it cannot pay any more. None goes on before all have charged
    once: on a busy machine the first might otherwise spend everything before the last begins."""
    opened = Ledger(path)  # also before the fork: a ledger may be inherited
    opened.head()
    gate, latch = os.pipe()

    def charge(say, number):
        os.close(latch)
        charge_forever(path, anchor, f"run {number}", say, wait=lambda: os.read(gate, 1))

    children = [spawn(lambda say, i=i: charge(say, i)) for i in range(workers)]
    for _, reading in children:
        select.select([reading], [], [], 60)
    os.close(latch)  # all that wait read the end
    return [finish(*child) for child in children]


def kill(path, anchor, trials):
    """Kill a charging process at a random moment, many times, on one ledger."""
    chance = random.Random(1)
    results = []
    for trial in range(trials):
        pid, reading = spawn(lambda say, trial=trial: charge_forever(path, anchor, f"run {trial}", say))
        if trial % 2:  # on a busy machine the other half may all be killed before their first charge
            select.select([reading], [], [], 60)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        results.append(finish(pid, reading))
    return results


def create(folder, anchor, trials):
    """One or two processes create a ledger and charge once; in three of four trials one is to be killed while
    it does, at a random moment of the time that this takes."""
    chance = random.Random(2)
    results = []

    def once(path, say):
        charge = [Charge("ann", [(RELEASES, 1)])]
        say(Ledger(path).charge(f"run {os.getpid()}", "data", charge, rounds=(0, 1)))

    began = time.perf_counter()
    for i in range(5):
        finish(*spawn(lambda say, i=i: once(folder / f"timing {i}" / "ledger.sqlite", say)))
    takes = (time.perf_counter() - began) / 5
    for trial in range(trials):
        path = folder / str(trial) / "ledger.sqlite"
        children = [spawn(lambda say, path=path: once(path, say)) for _ in range(1 + trial % 2)]
        if trial % 4 != 1:
            time.sleep(chance.uniform(0.0, takes))
            os.kill(children[0][0], signal.SIGKILL)
        results.append([finish(*child) for child in children])
    return results


if __name__ == "__main__":
    job, place, anchor, number = sys.argv[1:]
    jobs = {"race": race, "kill": kill, "create": create}
    json.dump(jobs[job](Path(place), Path(anchor), int(number)), sys.stdout)
