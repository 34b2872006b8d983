"""A federation as it is deployed: a server and parties as processes over each transport, TLS and loopback."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from dither import data
from tests.attacks.test_run_folder import secrets_in
from tests.e2e.federations import FLARE, FLOWER, TRANSPORTS, Processes, ledgers, same_bits, summary
from tests.federation.parties import NAMES, Parties, small_spec

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


METHODS = ["cpfed", "dp-scaffold", "nbafl", "secure-fedavg", "concentrated"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *(pytest.param(method, {}, id=f"{method}-flower", marks=FLOWER) for method in METHODS),
        pytest.param("cpfed", {"transport": "nvflare"}, id="cpfed-nvflare", marks=FLARE),
        pytest.param("dp-scaffold", {"transport": "nvflare", "own_kits": True}, id="own-nvflare", marks=FLARE),
    ],
)
def test_processes_give_the_bits_of_the_simulator_and_end_by_themselves(folder, method, more):
    with Processes(Parties(folder, small_spec(method, **{"secagg.mode": "real"})), **more) as run:
        run.serve()
        run.join_all()
        assert run.wait("server", 600) == 0, run.output("server")
        for name in NAMES:
            assert run.wait(name, 90) == 0, run.output(name)
        same_bits(run.parties)
        assert secrets_in(run.folder / "run", run.folder / "keys") == []
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
    table, public = table[:400], table[400:]  # records of parties cannot be public test records
    table.to_csv(folder / "diabetes.csv", index=False)
    public.to_csv(folder / "test.csv", index=False)
    bounds = {name: (float(np.floor(table[name].min())), float(np.ceil(table[name].max()))) for name in table}
    columns = tuple(data.Numeric.with_bounds(name, bounds[name], "public") for name in table if name != "target")
    schema = data.Schema(data.Label("target", bounds=(0.0, 400.0)), columns, name="diabetes")
    (folder / "schema.toml").write_text(schema.to_toml())
    values = {
        "data.name": "",
        "data.path": str(folder / "diabetes.csv"),
        "data.schema": str(folder / "schema.toml"),
        "data.test_path": str(folder / "test.csv"),
        "data.test_public": True,
        "model.name": "linear",
        "federation.round_timeout": 120.0,
    }
    return Parties(folder, small_spec(**values), table=table)


@FLOWER
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_nodes_and_a_killed_server(folder, transport):
    """SIGKILL of a node, of the server, of a node again: the same bits in the end, each round charged once."""
    spec = small_spec(**{"num_rounds": 12, "federation.min_clients": 4, "federation.round_timeout": 60.0})
    with Processes(Parties(folder, spec), transport=transport) as run:
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
        assert ledgers(run) == {name: list(range(12)) for name in NAMES}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_or_dead_party_is_left_out_and_named(folder, transport):
    spec = small_spec(**{"num_rounds": 6, "secagg.mode": "real", "federation.round_timeout": 8.0})
    with Processes(Parties(folder, spec), transport=transport) as run:
        run.start_until_round(2, 600)
        run.running["dan"].send_signal(signal.SIGSTOP)  # alive and silent, as behind a cut network
        assert run.wait("server", 600) == 0, run.output("server")
        run.running["dan"].send_signal(signal.SIGCONT)
        federation = summary(run)["federation"]
        assert federation["parties"]["dan"]["missing"] >= 3
        assert federation["most_missing"] == 1
        assert "missing dan" in run.output("server")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_soak_of_a_hundred_rounds_with_random_kills(folder, transport):
    """Parties are killed at random moments, and the other three go on without them."""
    rng, kills = random.Random(7), Counter()
    spec = small_spec(**{"num_rounds": 100, "eval_every": 25, "federation.round_timeout": 30.0})
    with Processes(Parties(folder, spec), transport=transport) as run:
        run.serve()
        run.join_all()
        for kill in range(12):
            run.until_round(3 + 7 * kill, 600)
            time.sleep(rng.uniform(0.0, 0.5))
            assert run.running["server"].poll() is None, run.output("server")
            name = rng.choice(NAMES)
            run.kill(name)
            run.join(name)
            kills[name] += 1
        assert run.wait("server", 1500) == 0, run.output("server")
        assert summary(run)["rounds"] == 100
        print("charges:", {name: len(charged) for name, charged in ledgers(run, kills).items()})
