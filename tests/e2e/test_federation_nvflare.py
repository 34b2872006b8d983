"""A federation over NVIDIA FLARE: a server, sites and parties as processes, mutual TLS, loopback."""

import pytest

pytest.importorskip("nvflare", reason="the extra 'nvflare' is not installed")

from tests.e2e.federations import Processes
from tests.e2e.test_federation import same_bits
from tests.federation.parties import NAMES, Parties, small_spec

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["cpfed", "dp-scaffold"])
def test_processes_give_the_bits_of_the_simulator_and_end_by_themselves(tmp_path, method):
    with Processes(Parties(tmp_path, small_spec(method, **{"secagg.mode": "real"})), transport="nvflare") as run:
        run.serve()
        run.join_all()
        assert run.wait("server", 300) == 0, run.output("server")
        for name in NAMES:
            assert run.wait(name, 90) == 0, run.output(name)
        same_bits(run.parties)
        assert "round 3/3  4 parties" in run.output("server")
        assert "this party answered 3" in run.output("ann")


def test_killed_parties_and_a_killed_server(tmp_path):
    """SIGKILL of a party, of the server, of a party again: the same bits in the end, each round charged once."""
    spec = small_spec(**{"num_rounds": 12, "federation.min_clients": 4, "federation.round_timeout": 60.0})
    with Processes(Parties(tmp_path, spec), transport="nvflare") as run:
        run.start_until_round(2, 300)
        run.kill("bob")
        run.join("bob")
        run.until_round(4, 200)
        run.kill("server")
        run.serve()
        run.until_round(6, 300)
        run.kill("ann")
        run.join("ann")
        assert run.wait("server", 300) == 0, run.output("server")
        same_bits(run.parties)
        run.parties.nodes = {name: run.parties.node(name) for name in NAMES}
        assert [run.parties.charged(name) for name in NAMES] == [list(range(12))] * 4
