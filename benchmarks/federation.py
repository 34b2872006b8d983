"""What a federation costs on loopback: an exchange over Flower and over NVIDIA FLARE, and a masked round.

    python benchmarks/federation.py              # all, writes benchmarks/federation.json
    python benchmarks/federation.py --only scale --counts 4,16,64
    python benchmarks/federation.py --only scale --transport nvflare --parameters 100000 --counts 4,16,64
    python benchmarks/federation.py --only sums --parameters 100000 --counts 4,16,64,256

before, after: an exchange, which is one message of a model's size to every node and its answer, without
training. "before" is Flower as it comes: SuperNodes that start a process for every message, `send_and_receive`,
and a worker behind a Unix socket so that no process imports JAX. "after" is the node and the loop of
`dither serve` and `dither join`. Both have TLS and node authentication and run on the same machine in the same
minutes: compare them with each other, not with another machine.

scale: masked rounds of light parties over a transport, with TLS (benchmarks/masked_exchange.py): they really mask,
sign and open, and train nothing; a third of them may collude. A round is two exchanges: "round" (the model down,
the masked words up) and "unseal". CPU is that of all processes of the server (over Flower also of the gate and of
the coordinator alone; what is left is the SuperLink's) or of the parties, for each party and exchange; memory the
peak of each process, added up.

sums: a masked round in one process, without any transport: parties that really mask, and the server, which checks
signatures, adds up and opens the sum. CPU for each party, at the party and at the server.

open, masked: whole rounds of the demonstration (Adult, four institutions, all of it in processes), with sums in
the open or by secure aggregation. Overhead is what a round takes beyond the training of its slowest party.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import masked_exchange
import numpy as np

from dither.federation import demo, keys
from dither.federation.flower import APP, fleet
from dither.federation.flower.superlink import FlowerServer, environment
from dither.federation.local import answer_at, free_port, separate_process, stop
from dither.secagg import session
from dither.secagg.encoding import FixedPoint

_PARTY_PROCESSES = 2

SERVER_APP = """
import json, os, time
from flwr.app import Message
from flwr.serverapp import ServerApp
from dither.federation.flower.fleet import content
from dither.federation.flower.apps import GridTransport, client_app

client = client_app()
server = ServerApp()


@server.main()
def main(grid, context):
    config = context.run_config
    count, rounds, size = int(config["nodes"]), int(config["rounds"]), int(config["size"])
    transport = GridTransport(grid, hints=os.environ["DITHER_SUPERLINK"])
    while len(transport.nodes()) < count:
        time.sleep(0.1)
    nodes = sorted(transport.nodes())[:count]
    seconds = []
    for index in range(rounds + 1):
        began = time.perf_counter()
        body = bytes(size)
        if config["how"] == "before":
            questions = [Message(content(body), dst_node_id=node, message_type="query") for node in nodes]
            assert len(list(grid.send_and_receive(questions, timeout=300))) == count
        else:
            waiting = set(transport.push({node: body for node in nodes}, ttl=300).values())
            while waiting:
                waiting -= {number for number, _ in transport.pull(waiting)}
                if waiting:
                    transport.pause()
        seconds.append(time.perf_counter() - began)
    with open(config["result"], "w") as file:
        json.dump(seconds[1:], file)  # the first one finds everything cold
"""


def measure(how: str, count: int, rounds: int, size: int, folder: Path) -> list[float]:
    """Seconds of each round with that many nodes."""
    federation = keys.create(folder / "keys", [f"node-{number}" for number in range(count)], hosts=["localhost"])
    server = folder / "keys" / "server"
    app = folder / "app"
    (app / "dither_app").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        (APP / "pyproject.toml").read_text().split("[tool.flwr.app.config]")[0]
        + '[tool.flwr.app.config]\nnodes = ""\nrounds = ""\nsize = ""\nhow = ""\nresult = ""\n'
    )
    (app / "dither_app" / "__init__.py").write_text(SERVER_APP)
    result, over = folder / "result.json", threading.Event()
    port = free_port()
    config = {"nodes": count, "rounds": rounds, "size": size, "how": how, "result": result}
    children, threads = [], []
    with FlowerServer(folder, server, ("127.0.0.1", port), {}) as link:
        link.hear({"upload_bytes": 1 << 28})
        for party in federation.parties:
            own = folder / "keys" / "parties" / party.name
            if how == "before":
                children.append(_supernode(own, link.port))  # which calls more than the gate lets through
                work = (answer_at, (own / "node.sock", lambda body: body), {"until": over.is_set})
            else:
                at = fleet.Server(f"127.0.0.1:{port}", own / "ca.pem", own / "node.key", own / "node.number")
                work = (fleet.serve, (at, lambda body: body), {"until": over.is_set, "patience": 120.0})
            threads.append(threading.Thread(target=work[0], args=work[1], kwargs=work[2], daemon=True))
            threads[-1].start()
        link.run(app, {name: str(value) for name, value in config.items()})
        until = time.monotonic() + 600
        while not result.is_file() or not result.read_text():
            if time.monotonic() > until:
                raise SystemExit(f"no result; see {folder / 'superlink.log'}")
            time.sleep(0.2)
        over.set()
        for child in children:
            stop(child)
        for thread in threads:
            thread.join(5)
    return json.loads(result.read_text())


# reason: what is measured, and where
def measure_scale(
    transport: str, count: int, rounds: int, words: int, sites: int, folder: Path
) -> dict[str, float]:
    """A masked round of light parties: seconds, CPU and memory of the server, CPU of the parties."""
    names, port, sites = [f"party-{number}" for number in range(count)], free_port(), min(count, sites)
    requests = [keys.request(folder / "homes" / name, name) for name in names]
    keys.create_from(folder / "keys", requests, hosts=["localhost"])
    (folder / "homes").rename(folder / "keys" / "parties")
    for name in names:
        shutil.copy(folder / "keys" / "ca" / "ca.pem", folder / "keys" / "parties" / name)
    result, over_flare = folder / "result.json", transport == "nvflare"
    config = {
        "folder": folder,
        "result": result,
        "rounds": rounds,
        "words": words,
        "parties": count,
        "sites": sites,
    }
    config |= {"colluders": -(-count // 3), "process": os.getpid()}
    config = {name: str(value) for name, value in config.items()}
    (folder / "config.json").write_text(json.dumps(config))
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    children = []
    with (
        _flare_server(folder, names[:sites], port, path)
        if over_flare
        else _flower_server(folder, port, path) as run
    ):
        for index in range(_PARTY_PROCESSES):
            command = [sys.executable, masked_exchange.__file__, str(folder), transport, f"127.0.0.1:{port}"]
            command += [str(number) for number in (index, _PARTY_PROCESSES, sites)]
            with open(folder / "parties.log", "ab") as log:
                children.append(subprocess.Popen(command, stdout=log, stderr=log, **separate_process()))
        (folder / "parties.json").write_text(json.dumps([child.pid for child in children]))
        try:
            run(config)
            until = time.monotonic() + 1800
            while not result.is_file() or not result.read_text():
                if time.monotonic() > until:
                    raise SystemExit(f"no result; see the logs in {folder}")
                time.sleep(0.2)
        finally:
            for name in names[:sites] if over_flare else []:
                _end_relay(folder / "keys" / "parties" / name)
            for child in children:
                stop(child)
    rows = json.loads(result.read_text())
    facts: dict[str, float] = (
        {"parties": count, "words": words, "sites": sites} if over_flare else {"parties": count, "words": words}
    )
    facts["round_s"] = _median([sum(row["seconds"] for row in rows[at : at + 2]) for at in range(0, len(rows), 2)])
    for kind in ("round", "unseal"):
        chosen = [row for row in rows if row["kind"] == kind]
        for who in ("server", "parties") if over_flare else ("server", "gate", "coordinator", "parties"):
            facts[f"{kind}_{who}_ms"] = round(1e3 * sum(row[who] for row in chosen) / (count * len(chosen)), 2)
    facts["server_MB"] = round(max(row["server_bytes"] for row in rows) / 1e6)
    facts["parties_MB"] = round(max(row["party_bytes"] for row in rows) / 1e6)
    return facts


@contextmanager
def _flower_server(folder: Path, port: int, path: dict[str, str]) -> Iterator[Callable[[dict[str, str]], None]]:
    app = folder / "app"
    (app / "dither_app").mkdir(parents=True)
    with FlowerServer(folder, folder / "keys" / "server", ("127.0.0.1", port), path) as link:
        link.hear({"upload_bytes": 1 << 28})

        def run(config: dict[str, str]) -> None:
            declared = "".join(f'{name} = ""\n' for name in config)
            head = (APP / "pyproject.toml").read_text().split("[tool.flwr.app.config]")[0]
            (app / "pyproject.toml").write_text(f"{head}[tool.flwr.app.config]\n{declared}")
            source = (APP / "dither_app" / "__init__.py").read_text()
            source = source.replace("server_app()", "server_app(coordinate)")
            (app / "dither_app" / "__init__.py").write_text(f"from masked_exchange import coordinate\n{source}")
            link.run(app, config)

        yield run


@contextmanager
def _flare_server(
    folder: Path, sites: list[str], port: int, path: dict[str, str]
) -> Iterator[Callable[[dict[str, str]], None]]:
    from dither.federation.nvflare import KIT, kits, system

    class Server(system.FlareServer):
        controller = "flare_exchange.ExchangeController"

    kits.provision(folder / "keys", sites, host="localhost", port=port)
    local = folder / "keys" / "server" / KIT / "local" / "resources.json"
    local.write_text(local.read_text().replace(system.FlareServer.controller, Server.controller))
    others = {party.name for party in keys.Keyring.load(folder / "keys" / "server").parties} - set(sites)
    options = {"without": ",".join(others), "wait": "400"}
    with Server(folder, folder / "keys" / "server", ("127.0.0.1", port), path) as server:
        yield lambda config: server.submit({**config, **options}, lambda event, facts: None)


def _end_relay(home: Path) -> None:
    from dither.federation.nvflare import system

    system.end_relay(home)


def measure_sum(count: int, words: int) -> dict[str, float]:
    """CPU of the server in one masked round, of which a third of the parties may collude."""
    session.time = SimpleNamespace(perf_counter=time.process_time)  # CPU in place of seconds
    federation = session.LocalFederation(
        count, FixedPoint(num_clients=count, bound=1.0, scale_bits=16), colluders=-(-count // 3)
    )
    rows = np.random.default_rng(0).integers(0, 1000, (count, words), dtype=np.uint32)
    summed = federation.sum(0, dict(enumerate(rows)))
    np.testing.assert_array_equal(summed.total, rows.sum(0, dtype=np.uint32))
    spent = {"party_ms": summed.mask_seconds, "server_ms": summed.unmask_seconds}
    return {name: round(1e3 * seconds / count, 3) for name, seconds in spent.items()}


def _supernode(own: Path, port: int) -> subprocess.Popen:
    program = Path(sys.executable).parent / "flower-supernode"
    command = [str(program), "--superlink", f"127.0.0.1:{port}", "--root-certificates", str(own / "ca.pem")]
    command += ["--auth-supernode-private-key", str(own / "node.key"), "--port", str(free_port())]
    command += ["--node-config", f'dither-socket="{own / "node.sock"}"']
    with open(own / "supernode.log", "wb") as log:
        return subprocess.Popen(
            command, env=environment(own), stdout=log, stderr=subprocess.STDOUT, **separate_process()
        )


def whole_rounds(mode: str, folder: Path) -> dict[str, float]:
    """The demonstration, of 12 rounds of which the first two find things cold."""
    port, skip = free_port(), 2
    settings = [f"secagg.mode={mode}", "num_rounds=12"]
    if demo.run(folder, port=port, settings=settings, say=lambda line: None):
        raise SystemExit(f"the federation failed; see {folder}")
    lines = [json.loads(line) for line in (folder / "run" / "rounds.jsonl").read_text().splitlines()]
    training: dict[int, float] = {}
    for log in folder.glob("keys/parties/*/runs/*/log.jsonl"):
        for entry in map(json.loads, log.read_text().splitlines()):
            training[entry["round"]] = max(training.get(entry["round"], 0.0), entry["seconds"])
    whole = [line["seconds"] for line in lines[skip:]]
    beyond = [line["seconds"] - training[line["round"]] for line in lines[skip:]]
    return {"median_s": _median(whole), "overhead_s": _median(beyond), "most_overhead_s": round(max(beyond), 3)}


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["before", "after", "scale", "sums", "open", "masked"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=114, help="float32 numbers in a message (Adult: 114)")
    parser.add_argument("--counts", default="4,16,64,128")
    parser.add_argument("--transport", choices=["flower", "nvflare"], default="flower")
    parser.add_argument(
        "--sites", type=int, default=16, help="of NVIDIA FLARE at most, an even number: more parties share them"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` too ends what was started here
    found = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    size = 4 * arguments.parameters
    plan = [("before", 4), ("after", 4)]
    plan = [(how, count) for how, count in plan if arguments.only in (None, how)]
    for how, mode in (("open", "off"), ("masked", "real")):
        if arguments.only in (None, how):
            with tempfile.TemporaryDirectory(prefix="dither-bench-") as folder:
                facts = whole_rounds(mode, Path(folder) / "demo")
            found[f"rounds-{how}"] = {"nodes": 4, **facts, "load": round(os.getloadavg()[0], 1)}
            print(f"rounds {how}: {facts}  (load {os.getloadavg()[0]:.1f})", flush=True)
            arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    for count in map(int, arguments.counts.split(",")) if arguments.only == "scale" else []:
        with tempfile.TemporaryDirectory(prefix="dither-bench-") as folder:
            facts = measure_scale(
                arguments.transport, count, arguments.rounds, arguments.parameters, arguments.sites, Path(folder)
            )
        name = f"scale-{arguments.transport}-{count}-{arguments.parameters}"
        found[name] = {**facts, "load": round(os.getloadavg()[0], 1)}
        print(f"{name}: {found[name]}", flush=True)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    for count in map(int, arguments.counts.split(",")) if arguments.only == "sums" else []:
        facts = {"parties": count, "words": arguments.parameters, **measure_sum(count, arguments.parameters)}
        found[f"sums-{count}"] = {**facts, "load": round(os.getloadavg()[0], 1)}
        print(f"sums: {found[f'sums-{count}']}", flush=True)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    for how, count in plan:
        with tempfile.TemporaryDirectory(prefix="dither-bench-") as folder:
            seconds = measure(how, count, arguments.rounds, size, Path(folder))
        median = _median(seconds)
        found[f"{how}-{count}"] = {"nodes": count, "median_s": median, "load": round(os.getloadavg()[0], 1)}
        print(f"{how:7} {count:4} nodes  {median:7.3f} s a round  (load {os.getloadavg()[0]:.1f})", flush=True)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
