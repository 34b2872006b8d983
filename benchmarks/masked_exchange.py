"""Masked rounds without training, for benchmarks/federation.py: light parties in few processes, and their server.

A light party holds its identity and its session of secure aggregation; it really masks, signs and opens. The
server is the coordinator's mailbox and session over the transport of `dither serve`. Neither trains.

    python benchmarks/masked_exchange.py FOLDER TRANSPORT HOST:PORT INDEX PROCESSES SITES

runs every PROCESSES-th party, from INDEX. Over Flower each has a connection of its own. Over NVIDIA FLARE a site
is two processes, so where there are fewer sites than parties, parties share a site: each still gets messages of
its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dither.federation import keys, messages
from dither.federation.local import answer_at
from dither.federation.messages import Mailbox
from dither.secagg.client import ClientSession
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession

SESSION = bytes(32)
PATIENCE = 1800.0


def rules_of(config: Mapping[str, str]) -> Rules:
    colluders = int(config["colluders"])
    return Rules(32, 0, colluders, colluders + 2, 0).check()


def row_of(number: int, words: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 1000, words, dtype=np.uint32)


# Processes


def process_tree(root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parent = int((each / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(each.name))
    tree, left = set(), [root]
    while left:
        process = left.pop()
        tree.add(process)
        left += children.get(process, [])
    return tree


def cpu_seconds(processes: set[int]) -> float:
    total = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(processes: set[int], field: str = "VmHWM") -> int:
    """The most memory that each of the processes ever held, added up."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
    return total


# A party


class LightParty:
    """Answers the coordinator's messages; its vector is made of its number."""

    def __init__(self, number: int, keyring: keys.Keyring, folder: Path, config: Mapping[str, str]) -> None:
        self._number, self._keyring, self._words = number, keyring, int(config["words"])
        self._name = keyring.parties[number].name
        self._identity = keys.Identity.load(folder)
        self._session = ClientSession(
            number,
            federation=SESSION,
            server=keyring.server,
            rules=rules_of(config),
            signing=self._identity.private,
        )

    def answer(self, content: bytes) -> bytes:
        message = messages.unpack(
            content, federation=self._keyring.id, to=self._name, keys={messages.SERVER: self._keyring.server}
        )
        session, arrays = self._session, {}
        fields: dict[str, Any] = {}
        if message.kind == "hello":
            fields = {"records": 1, "versions": {}}
        elif message.kind == "enrol":
            arrays = {"secagg": session.hello()}
        elif message.kind == "roster":
            arrays = {"secagg": session.confirm(message.bytes("secagg"))}
        elif message.kind == "confirmed":
            session.confirmed(message.bytes("secagg"))
        elif message.kind == "round":
            message.array("m0", "<f4")
            arrays = {"secagg": session.upload(message.bytes("secagg"), row_of(self._number, self._words))}
        elif message.kind == "unseal":
            arrays = {"secagg": session.unseal(message.bytes("secagg"))}
        return messages.pack(
            self._identity,
            federation=self._keyring.id,
            kind=message.kind,
            sender=self._name,
            to=messages.SERVER,
            fields=fields,
            arrays=arrays,
            answers=messages.digest(content),
        )


def run_parties(folder: Path, transport: str, address: str, index: int, processes: int, sites: int) -> None:
    """Until this process is ended."""
    config = json.loads((folder / "config.json").read_text())
    keyring = keys.Keyring.load(folder / "keys" / "server")
    homes = [folder / "keys" / "parties" / party.name for party in keyring.parties]
    parties = {n: LightParty(n, keyring, homes[n], config) for n in range(index, len(homes), processes)}
    if transport == "flower":
        from dither.federation.flower import fleet

        for number, party in parties.items():
            home = homes[number]
            at = fleet.Server(address, home / "ca.pem", home / "node.key", home / "node.number")
            work = {"until": lambda: False, "patience": PATIENCE, "nodes": len(homes)}
            threading.Thread(target=fleet.serve, args=(at, party.answer), kwargs=work, daemon=True).start()
    else:
        from dither.federation.nvflare import system

        for site in sorted({number % sites for number in parties}):

            def answer(body: bytes) -> bytes:
                return parties[int.from_bytes(body[:4], "little")].answer(body[4:])

            line = system.socket_of(homes[site])
            work = {"until": lambda: False}
            threading.Thread(target=answer_at, args=(line, answer), kwargs=work, daemon=True).start()
            system.start_relay(homes[site], address)
    threading.Event().wait()


# The server


def coordinate(transport: Any, config: Mapping[str, str]) -> None:
    """Enrol everybody, then rounds; what each exchange took goes to the file `config["result"]`."""
    folder = Path(config["folder"])
    mailbox = Mailbox(
        transport, keys.Keyring.load(folder / "keys" / "server"), keys.Identity.load(folder / "keys" / "server")
    )
    names = [party.name for party in mailbox.keyring.parties]
    signing = keys.Identity.load(folder / "keys" / "server").private
    session = ServerSession(federation=SESSION, rules=rules_of(config), signing=signing)
    own = process_tree(os.getpid())
    main, party_processes = int(config["process"]), json.loads((folder / "parties.json").read_text())
    theirs, start = set[int](), time.monotonic()

    def ask(kind: str, questions: Mapping[str, Any], take: Any) -> dict[str, float]:
        nonlocal theirs
        theirs = set().union(*map(process_tree, party_processes))
        ours = (process_tree(main) - theirs) | own
        groups = {"server": ours, "gate": {main}, "coordinator": own, "parties": theirs}
        before = {who: cpu_seconds(processes) for who, processes in groups.items()}
        began = time.perf_counter()
        failures = mailbox.ask(kind, questions, seconds=PATIENCE, take=take)
        assert not failures.reasons, failures.reasons
        row: dict[str, Any] = {"kind": kind, "seconds": time.perf_counter() - began}
        row |= {who: cpu_seconds(processes) - before[who] for who, processes in groups.items()}
        row |= {"server_bytes": resident_bytes(ours), "party_bytes": resident_bytes(theirs)}
        say(row)
        return row

    def say(what: Any) -> None:
        with open(folder / "progress.log", "a") as log:
            log.write(f"{time.monotonic() - start:.1f} {what}\n")

    def same(body: bytes) -> dict[str, Any]:
        return {name: ({}, {"secagg": body}) for name in names}

    while len(mailbox.present()) < len(names):
        mailbox.look()
        transport.pause()
        say(f"{len(mailbox.present())} parties are here")
    ask("enrol", {name: ({}, {}) for name in names}, lambda name, answer: session.hello(answer.bytes("secagg")))
    ask("roster", same(session.make_roster()), lambda name, answer: session.confirm(answer.bytes("secagg")))
    ask("confirmed", same(session.confirmed()), lambda name, answer: None)
    words, rows = int(config["words"]), []
    model = np.zeros(words, np.float32)
    expected = np.add.reduce([row_of(number, words) for number in range(len(names))], dtype=np.uint32)
    for index in range(int(config["rounds"]) + 1):
        announcement = session.announce(index, range(len(names)), words)
        questions: dict[str, Any] = {name: ({}, {"secagg": announcement, "m0": model}) for name in names}
        rows.append(ask("round", questions, lambda name, answer: session.upload(answer.bytes("secagg"))))
        requests = {names[who]: ({}, {"secagg": body}) for who, body in session.unseal().items()}
        rows.append(ask("unseal", requests, lambda name, answer: session.shares(answer.bytes("secagg"))))
        began, before = time.perf_counter(), time.process_time()
        total = session.open()
        rows[-1]["seconds"] += time.perf_counter() - began
        rows[-1]["server"] += time.process_time() - before
        np.testing.assert_array_equal(total, expected)
    Path(config["result"]).write_text(json.dumps(rows[2:]))  # the first round finds everything cold


if __name__ == "__main__":
    run_parties(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
