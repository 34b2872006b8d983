"""SIGKILL in every phase of a federation, a network that is cut, and what the server's processes really receive.

The processes kill themselves at a named place (tests/e2e/faults), so that no phase is missed by luck.
"""

import base64
import json
import os
import pickle
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from dither.federation import keys
from tests.e2e.faults.sitecustomize import PHASES
from tests.e2e.federations import FLOWER, TRANSPORTS, Processes, ledgers, rounds, same_bits, summary
from tests.e2e.forwarder import Forwarder
from tests.federation.parties import NAMES, Parties, small_spec

pytestmark = pytest.mark.slow

NODE = [
    ("terms", None),
    ("roster", None),
    ("enrolled", None),
    ("announce", 1),
    ("charging", 2),
    ("charged", 3),
    ("trained", 4),
    ("before upload", 5),
    ("after upload", 6),
    ("unseal asked", 7),
    ("unseal saved", 8),
    ("unseal sent", 9),
]
SERVER = [
    ("server: terms", None),
    ("server: roster", None),
    ("server: confirmed", None),
    ("server: announce", 0),
    ("server: collecting", 1),
    ("server: unseal", 2),
    ("server: opened", 3),
    ("server: half a line", 4),
    ("server: complete", 5),
]
SERVER_OPEN = [
    ("server: announce", 0),
    ("server: one answer", 1),
    ("server: half a line", 2),
    ("server: complete", 3),
]
INSIDE = {"flower": ["gate", "coordinator"], "nvflare": ["gate", "job", "coordinator"]}  # places of the taps
KILLS = int(os.environ.get("DITHER_STORM_KILLS", "100"))


def test_every_phase_is_tried():
    assert {phase for phase, _ in [*NODE, *SERVER, *SERVER_OPEN]} == set(PHASES)


def outlive(run, who, phases):
    """The federation ends well although this party or the server dies in each of the phases."""
    run.faults(who, phases)
    run.serve()
    run.join_all()
    run.revive(1800)
    assert run.wait("server", 30) == 0, run.output("server")
    assert run.died(who) == len(phases), run.output(who)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_killed_in_each_phase_changes_nothing(tmp_path, transport):
    """Four parties, all of which are needed: the one that dies twelve times (over FLARE ten: its own process
    sends nothing) is waited for and asked again. The model has the bits of a simulation in which nobody died;
    every round is charged once."""
    phases = NODE if transport == "flower" else [each for each in NODE if "fleet" not in PHASES[each[0]][0]]
    spec = small_spec(
        **{
            "num_rounds": 12,
            "secagg.mode": "real",
            "federation.min_clients": 4,
            "federation.round_timeout": 90.0,
        }
    )
    with Processes(Parties(tmp_path, spec), transport=transport) as run:
        outlive(run, "dan", phases)
        assert [line["counted"] for line in rounds(run)] == [list(NAMES)] * 12
        assert [line["attempts"] for line in rounds(run)] == [1] * 12
        same_bits(run.parties)
        assert ledgers(run) == {name: list(range(12)) for name in NAMES}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["real", "off"])
def test_a_server_killed_in_each_phase(tmp_path, mode, transport):
    """It goes on after the last complete round. In the open nothing is lost (DP-SCAFFOLD: nor what nodes keep).
    Under secure aggregation a round that was being opened is, because nobody helps to open two sums of one round.
    Ledgers: every round once."""
    phases = SERVER if mode == "real" else SERVER_OPEN
    lost = [2, 3, 4] if mode == "real" else []
    count = 7 if mode == "real" else 5
    spec = small_spec(
        "cpfed" if mode == "real" else "dp-scaffold",
        **{
            "num_rounds": count,
            "secagg.mode": mode,
            "federation.min_clients": 4,
            "federation.round_timeout": 90.0,
        },
    )
    with Processes(Parties(tmp_path, spec), transport=transport) as run:
        outlive(run, "server", phases)
        expected = [[] if index in lost else list(NAMES) for index in range(count)]
        assert [line["counted"] for line in rounds(run)] == expected
        assert summary(run)["federation"]["void_rounds"] == len(lost)
        if not lost:
            same_bits(run.parties)
        assert ledgers(run) == {name: list(range(count)) for name in NAMES}
        for name in NAMES:
            assert run.wait(name, 60) == 0, run.output(name)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_storm_of_kills_in_mid_round(tmp_path, transport):
    """A hundred times a party that has just computed a round is killed (SIGKILL), at a random moment of the next
    one, and started again at once. All four are needed, so every round is computed by all of them in the end, and
    is in every ledger once."""
    rng, started = random.Random(5), time.monotonic()
    spec = small_spec(**{"num_rounds": 5000, "secagg.mode": "real", "eval_every": 5000})
    spec = spec.with_values({"federation.round_timeout": 120.0, "federation.min_clients": 4})
    with Processes(Parties(tmp_path, spec), transport=transport) as run:
        run.start_until_round(1, 300)
        begun, at = len(rounds(run)), dict.fromkeys(NAMES, 0)
        for kill in range(KILLS):
            until, victim = time.monotonic() + 300, ""
            while not victim:
                assert time.monotonic() < until, f"nobody answers after {kill} kills: {run.output('server')}"
                assert run.running["server"].poll() is None, run.output("server")
                logs = {name: next(iter(party_logs(run, name)), None) for name in NAMES}
                ready = [name for name, log in logs.items() if log is not None and log.stat().st_size > at[name]]
                victim = rng.choice(ready) if ready else ""
                time.sleep(0.05)
            time.sleep(rng.uniform(0.0, 0.5))
            run.kill(victim)
            at[victim] = next(iter(party_logs(run, victim))).stat().st_size
            run.join(victim)
        done, seconds = len(rounds(run)), time.monotonic() - started
        print(f"{KILLS} kills over {transport} in {seconds:.0f} s: {done - begun} rounds completed in between")
        run.until_round(done + 2, 300)
        run.kill("server")
        time.sleep(5)  # a party may be computing what it was asked
        for name in list(run.running):
            run.kill(name)
        charges = ledgers(run)
        print(f"charges: { ({name: len(charged) for name, charged in charges.items()}) }")
        for charged in charges.values():
            assert charged == list(range(len(charged)))
            assert len(charged) >= done + 2


def party_logs(run, name):
    return (run.folder / "keys" / "parties" / name / "runs").glob("*/log.jsonl")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_progress_under_a_kill_every_twenty_seconds(tmp_path, transport):
    """Five minutes in which the server or a party is killed (SIGKILL) every 20 s, wherever it is, and started
    again at once: rounds are completed all the while, and the ledgers are exact."""
    rng, begun, kills = random.Random(3), time.monotonic(), Counter()
    spec = small_spec(**{"num_rounds": 500, "secagg.mode": "real", "federation.round_timeout": 30.0})
    with Processes(Parties(tmp_path, spec), transport=transport) as run:
        run.start_until_round(1, 300)
        done, until = [len(rounds(run))], time.monotonic() + 300
        while time.monotonic() < until:
            time.sleep(20)
            name = rng.choice(["server", *NAMES])
            run.kill(name)
            kills[name] += 1
            run.serve() if name == "server" else run.join(name)
            done.append(len(rounds(run)))
        print("rounds complete at each kill:", done, f"after {time.monotonic() - begun:.0f} s")
        assert done == sorted(done)
        thirds = done[len(done) // 3], done[2 * len(done) // 3], done[-1]
        assert done[0] < thirds[0] < thirds[1] < thirds[2], done
        ledgers(run, kills)


@FLOWER
def test_a_superlink_that_dies_is_started_again(tmp_path):
    """Nobody else notices more than a broken connection."""
    spec = small_spec(**{"num_rounds": 12, "secagg.mode": "real", "federation.round_timeout": 60.0})
    with Processes(Parties(tmp_path, spec)) as run:
        run.start_until_round(2, 300)
        server = run.running["server"].pid
        children = [int(each) for each in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        (link,) = [each for each in children if b"superlink" in Path(f"/proc/{each}/cmdline").read_bytes()]
        os.kill(link, signal.SIGKILL)
        assert run.wait("server", 600) == 0, run.output("server")
        assert "Flower's SuperLink died; restarting it" in run.output("server")
        assert [line["counted"] for line in rounds(run)][-1] == list(NAMES)
        for name in NAMES:
            assert run.wait(name, 60) == 0, run.output(name)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_network_that_is_cut_and_healed(tmp_path, how, transport):
    """Refused: connections break, and new ones are not taken. Silent: they stay open and carry nothing."""
    spec = small_spec(**{"num_rounds": 12, "secagg.mode": "real", "federation.round_timeout": 8.0})
    with Processes(Parties(tmp_path, spec), transport=transport) as run, Forwarder(run.port) as line:
        run.through["dan"] = line.port
        run.start_until_round(2, 300)
        line.cut(silent=how == "silent")
        before = len(rounds(run))
        run.until_round(before + 2, 120)
        line.heal()
        assert run.wait("server", 300) == 0, run.output("server")
        assert run.wait("dan", 60) == 0, run.output("dan")
        counted = ["dan" in each["counted"] for each in rounds(run)]
        assert not all(counted[before : before + 2])
        assert counted[-1], counted  # it is back without anybody's help
        assert all(set(NAMES[:3]) <= set(each["counted"]) for each in rounds(run))
        assert summary(run)["federation"]["parties"]["dan"]["missing"] == counted.count(False)
        charged = ledgers(run)
        assert charged["ann"] == list(range(12))
        assert {index for index, came in enumerate(counted) if came} <= set(charged["dan"])


def pieces(content, step=1):
    """Every 16 bytes of it: what a search looks for."""
    return {content[at : at + 16] for at in range(0, len(content) - 15, step)}


def forms(secret):
    """Bytes as they may travel: as they are, in hexadecimal, in base64 wherever they begin."""
    return [secret, secret.hex().encode(), *(base64.b64encode(secret[at:]) for at in range(3))]


def private_keys(folder):
    """Of a party: its identity, what opens its masks and its batches, and those of the transport."""
    yield keys.Identity.load(folder).private
    for path in folder.glob("runs/*/secret.key"):  # where batches are drawn by the operating system
        yield path.read_bytes()[:16]
    for path in folder.glob("runs/*/secagg.json"):
        yield bytes.fromhex(json.loads(path.read_bytes().splitlines()[0])["agreement"])
    for path in folder.rglob("*.key"):
        content = path.read_bytes()
        if b"PRIVATE KEY" in content:
            read = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
            numbers = read(content, None).private_numbers()
            secret = numbers.private_value if hasattr(numbers, "private_value") else numbers.d
            yield secret.to_bytes(-(-secret.bit_length() // 8), "big")


def what_must_not_be_seen(run, rows):
    """16 bytes -> what they are of: an update (encoded, not yet masked), a record (as text or encoded), a key."""
    wanted = {}
    for index, row in enumerate(rows):
        wanted |= dict.fromkeys(pieces(row.tobytes(), 4), ("update", index))
    for name in NAMES:
        for line in run.parties.file(name).read_bytes().splitlines()[1:]:
            wanted |= dict.fromkeys(pieces(line), ("record", "text"))
        for secret in private_keys(run.folder / "keys" / "parties" / name):
            for form in forms(secret):
                wanted |= dict.fromkeys(pieces(form), ("key", name))
    for record in run.parties.experiment.dataset.x_train.astype(np.float32):
        wanted |= dict.fromkeys(pieces(record.tobytes(), 4), ("record", "encoded"))
    return wanted


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["real", "off"])
def test_what_the_servers_processes_receive(tmp_path, mode, transport):
    """Every byte that parties send: on the wire, behind TLS (at the gate before Flower; in the two processes of
    NVIDIA FLARE's server), and as the coordinator reads it. No record is among them, no private key; with secure
    aggregation no four words of anybody's encoded update either. In the open those are, which shows that the
    search finds what is there."""
    taps = tmp_path / "taps"
    taps.mkdir()
    spec = small_spec(**{"secagg.mode": mode, "federation.min_clients": 4, "federation.round_timeout": 90.0})
    with (
        Processes(Parties(tmp_path, spec), taps=taps, transport=transport) as run,
        Forwarder(run.port, keep=True) as line,
    ):
        run.through = dict.fromkeys(NAMES, line.port)
        run.serve()
        run.join_all()
        assert run.wait("server", 300) == 0, run.output("server")
        for name in NAMES:
            assert run.wait(name, 60) == 0

    def kept(what):
        found = sorted(taps.glob(f"{what}-*"), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_bytes() for path in found]

    rows = [pickle.loads(each) for each in kept("row")]
    assert len(rows) == 12
    behind_tls = {place: b"".join(kept(place)) for place in INSIDE[transport]}
    seen = {"wire": b"".join(line.sent), **behind_tls}
    assert all(len(content) > 12 * rows[0].nbytes for content in seen.values())  # the uploads are in there
    wanted = what_must_not_be_seen(run, rows)

    def found(content):
        parts = (content[at : at + 16] for at in range(len(content) - 15))
        return Counter(kind for kind, _ in {wanted[part] for part in parts if part in wanted})

    own = b"".join(path.read_bytes() for path in (run.folder / "keys" / "parties" / "ann").rglob("*.key"))
    assert found(own + run.parties.file("ann").read_bytes()) == {
        "key": 1,
        "record": 1,
    }  # the search finds those too
    expected = {"update": 12} if mode == "off" else {}
    assert {place: found(content) for place, content in seen.items()} == {
        "wire": {},
        **dict.fromkeys(behind_tls, expected),
    }
    if mode == "real":
        sums = [pickle.loads(each) for each in kept("sum")]
        totals = [np.add.reduce(rows[4 * index : 4 * index + 4], dtype=rows[0].dtype) for index in range(3)]
        assert len(sums) == 3
        for opened, total in zip(sums, totals, strict=True):
            np.testing.assert_array_equal(opened, total)
