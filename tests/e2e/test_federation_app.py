"""Dither as a Flower app: `flwr run` on a SuperLink, Flower's own SuperNodes, `dither join` behind them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

from dither.experiment.folder import write_text
from dither.federation import keys
from dither.federation.flower import APP, TlsFiles
from dither.federation.flower.superlink import SuperLink, environment
from dither.federation.local import free_port, separate_process, stop
from tests.e2e.federations import Processes
from tests.federation.parties import Parties, small_spec

pytestmark = pytest.mark.slow


def supernode(own: Path, superlink: str) -> subprocess.Popen:
    program = Path(sys.executable).parent / "flower-supernode"
    command = [str(program), "--superlink", superlink, "--root-certificates", str(own / "ca.pem")]
    command += ["--auth-supernode-private-key", str(own / "node.key"), "--port", str(free_port())]
    command += ["--node-config", f'dither-socket="{own / "node.sock"}"']
    with open(own / "supernode.log", "wb") as log:
        return subprocess.Popen(
            command, env=environment(own), stdout=log, stderr=subprocess.STDOUT, **separate_process()
        )


def test_flwr_run_with_supernodes(tmp_path):
    spec = small_spec(
        **{
            "num_clients": 2,
            "cohort_size": 2,
            "num_rounds": 2,
            "secagg.mode": "real",
            "federation.min_clients": 2,
            "privacy.colluders": -1,
            "federation.round_timeout": 120.0,
        }
    )
    parties = Parties(tmp_path, spec)
    server = tmp_path / "keys" / "server"
    write_text(tmp_path / "run" / "asked.toml", spec.to_toml())
    nodes = []
    with Processes(parties) as run, SuperLink(tmp_path, TlsFiles.of(server), {}) as link:
        try:
            for party in keys.Keyring.load(server).parties:
                own = tmp_path / "keys" / "parties" / party.name
                link.register([party])
                run.join(party.name, "--behind-supernode")
                nodes.append(supernode(own, link.inside))
            link.run(APP, {"keys": str(server), "run": str(tmp_path / "run"), "wait": "300"})
            end = time.monotonic() + 500
            while not (tmp_path / "run" / "summary.json").is_file():
                assert time.monotonic() < end, (tmp_path / "superlink.log").read_text()[-2000:]
                time.sleep(0.5)
        finally:
            for node in nodes:
                stop(node)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [facts["counted"] for facts in summary["federation"]["parties"].values()] == [2, 2]
