"""A federation as it is deployed: a server and parties as processes over Flower, TLS and loopback."""

import json
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

from sklearn.datasets import load_diabetes

from dither import data
from tests.e2e.federations import Processes, same_bits
from tests.federation.parties import NAMES, Parties, small_spec

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize("method", ["cpfed", "dp-scaffold", "nbafl", "secure-fedavg", "concentrated"])
def test_processes_give_the_bits_of_the_simulator_and_end_by_themselves(folder, method):
    with Processes(Parties(folder, small_spec(method, **{"secagg.mode": "real"}))) as run:
        run.serve()
        run.join_all()
        assert run.wait("server", 600) == 0, run.output("server")
        for name in NAMES:
            assert run.wait(name, 90) == 0, run.output(name)
        same_bits(run.parties)
        assert "enrolled for secure aggregation" in run.output("server")
        assert "round 3/3  4 parties" in run.output("server")
        assert "Rounds by party" in run.output("server")
        assert "What you are asked to agree to" in run.output("ann")
        assert "this party answered 3" in run.output("ann")


def equinox_parties(folder):
    """MNIST with the example's network: images, and a file that each party's owner approves."""
    values = {"data.name": "mnist", "model.name": f"{EXAMPLES / 'equinox_model.py'}:cnn", "eval_every": 3}
    return Parties(folder, small_spec(**values, **{"federation.round_timeout": 120.0}))  # it compiles first


def regression_parties(folder):
    """Linear regression on diabetes, with public bounds of every column."""
    table = load_diabetes(as_frame=True, scaled=False).frame
    table.to_csv(folder / "diabetes.csv", index=False)
    bounds = {name: (float(np.floor(table[name].min())), float(np.ceil(table[name].max()))) for name in table}
    columns = tuple(data.Numeric.with_bounds(name, bounds[name], "public") for name in table if name != "target")
    schema = data.Schema(data.Label("target", bounds=(0.0, 400.0)), columns, name="diabetes")
    (folder / "schema.toml").write_text(schema.to_toml())
    values = {
        "data.name": "",
        "data.path": str(folder / "diabetes.csv"),
        "data.schema": str(folder / "schema.toml"),
        "data.test_path": str(folder / "diabetes.csv"),
        "data.test_public": True,
        "model.name": "linear",
        "federation.round_timeout": 120.0,
    }
    return Parties(folder, small_spec(**values), table=table)


@pytest.mark.parametrize("made", [equinox_parties, regression_parties])
def test_a_network_of_yours_and_a_regression_give_the_bits_of_the_simulator(folder, made):
    approved = ("--model", str(EXAMPLES / "equinox_model.py")) if made is equinox_parties else ()
    with Processes(made(folder), more=approved) as run:
        run.serve()
        run.join_all()
        assert run.wait("server", 600) == 0, run.output("server")
        for name in NAMES:
            assert run.wait(name, 90) == 0, run.output(name)
        same_bits(run.parties)


def test_killed_nodes_and_a_killed_server(folder):
    """SIGKILL of a node, of the server, of a node again: the same bits in the end, each round charged once."""
    spec = small_spec(**{"num_rounds": 12, "federation.min_clients": 4, "federation.round_timeout": 60.0})
    with Processes(Parties(folder, spec)) as run:
        run.start_until_round(2, 600)
        run.kill("bob")
        run.join("bob")
        run.until_round(4, 400)
        run.kill("server")
        time.sleep(1)
        run.serve()
        run.until_round(6, 600)
        run.kill("ann")
        run.join("ann")
        assert run.wait("server", 600) == 0, run.output("server")
        assert "continuing after round" in run.output("server")
        same_bits(run.parties)
        run.parties.nodes = {name: run.parties.node(name) for name in NAMES}
        assert [run.parties.charged(name) for name in NAMES] == [list(range(12))] * 4


def test_a_slow_or_dead_party_is_left_out_and_named(folder):
    spec = small_spec(**{"num_rounds": 6, "secagg.mode": "real", "federation.round_timeout": 8.0})
    with Processes(Parties(folder, spec)) as run:
        run.start_until_round(2, 600)
        run.running["dan"].send_signal(signal.SIGSTOP)  # alive and silent, as behind a cut network
        assert run.wait("server", 600) == 0, run.output("server")
        run.running["dan"].send_signal(signal.SIGCONT)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["federation"]["parties"]["dan"]["missing"] >= 3
        assert summary["federation"]["most_missing"] == 1
        assert "missing dan" in run.output("server")


def test_soak_of_a_hundred_rounds_with_random_kills(folder):
    """Nodes are killed at random moments; each one's ledger holds exactly the rounds it made an upload for."""
    rng = random.Random(7)
    spec = small_spec(**{"num_rounds": 100, "eval_every": 25, "federation.round_timeout": 30.0})
    with Processes(Parties(folder, spec)) as run:
        run.serve()
        run.join_all()
        done, kills = 3, 0
        run.until_round(done, 600)
        while run.running["server"].poll() is None and kills < 12:
            time.sleep(rng.uniform(0.0, 3.0))
            name = rng.choice(NAMES)
            run.kill(name)
            run.join(name)
            kills += 1
            lines = len(run.parties.coordinator().journal.rounds())
            if lines < 92:
                run.until_round(lines + rng.randrange(3, 8), 600)
        assert run.wait("server", 1500) == 0, run.output("server")
        assert kills == 12
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["rounds"] == 100
        run.parties.nodes = {name: run.parties.node(name) for name in NAMES}
        rounds = run.parties.coordinator().journal.rounds()
        for name in NAMES:
            (log,) = (folder / "keys" / "parties" / name / "runs").glob("*/log.jsonl")
            computed = [json.loads(line)["round"] for line in log.read_text().splitlines()]
            charged = run.parties.charged(name)
            assert charged == sorted(set(computed))  # what was computed, each once, and nothing else
            counted = [line["round"] for line in rounds if name in line["counted"]]
            assert set(counted) <= set(charged)
