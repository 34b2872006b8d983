"""The commands of deploy/compose.yaml as processes, with folders in place of volumes. No container engine is used:
what an image holds is not tried here."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")
pytest.importorskip("yaml")

import yaml

from dither.federation import keys
from dither.federation.local import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def folders(folder, names):
    """What the compose file asks for: keys that each party made itself, records, the manual's spec and schema."""
    for name in names:
        keys.request(folder / "parties" / name / "keys", name)
    requests = [
        keys.read_request(next((folder / "parties" / name / "keys").glob("*.request.json"))) for name in names
    ]
    keys.create_from(folder / "fed", requests, hosts=["localhost"])
    rng = np.random.default_rng(1)
    for name in names:
        home = folder / "parties" / name
        keys.accept(home / "keys", keys.invitation_file(folder / "fed", name))
        ages, wards = rng.integers(20, 100, 640), rng.choice(["surgery", "medicine"], 640)
        rows = [f"{age},{ward},{'yes' if age > 60 else 'no'}" for age, ward in zip(ages, wards, strict=True)]
        (home / "data.csv").write_text("\n".join(["age,ward,outcome", *rows]) + "\n")
    (folder / "server").mkdir()
    (folder / "fed" / "server").rename(folder / "server" / "keys")
    manual = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    schema, spec = re.findall(r"```toml\n(.*?)```", manual, re.S)
    (folder / "server" / "schema.toml").write_text(schema)
    (folder / "server" / "spec.toml").write_text(spec.replace("num_rounds = 12", "num_rounds = 3"))


def test_a_federation_of_five_from_the_compose_file(tmp_path):
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    names = [name for name in services if name != "server"]
    assert len(names) == 5
    folders(tmp_path, names)
    port, health = free_port(), free_port()
    workdir = re.findall(r"^WORKDIR (\S+)$", (ROOT / "deploy" / "Containerfile").read_text(), re.M)[-1]
    running = {}
    try:
        for name, service in services.items():
            (volume,) = service["volumes"]
            home = tmp_path / volume.removesuffix(":/srv/dither")
            words = [
                word.replace("/srv/dither", str(home))
                .replace("0.0.0.0:9440", f"127.0.0.1:{port}")
                .replace("server:9440", f"localhost:{port}")
                .replace("127.0.0.1:9441", f"127.0.0.1:{health}")
                for word in service["command"].split()
            ]
            environment = {**os.environ, "DITHER_STATE": str(home / "state")}
            with open(tmp_path / f"{name}.log", "wb") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "dither", *words],
                    cwd=workdir.replace("/srv/dither", str(home)),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        states, until = set(), time.monotonic() + 400
        while running["server"].poll() is None and time.monotonic() < until:
            time.sleep(0.2)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{health}/health", timeout=5) as answer:
                    states.add(json.load(answer)["state"])
            except OSError:
                pass  # it is starting, or ending
        for name, process in running.items():
            assert process.wait(60) == 0, (tmp_path / f"{name}.log").read_text()
    finally:
        for process in running.values():
            process.kill()
    assert "running" in states
    done = json.loads((tmp_path / "server.log").read_text().splitlines()[-1])
    assert (done["event"], done["rounds"]) == ("done", 3)
    keys_of_north = tmp_path / "parties" / "north" / "keys"
    command = [sys.executable, "-m", "dither", "federation", "verify", str(tmp_path / "server" / "runs" / "first")]
    subprocess.run([*command, "--federation", str(keys_of_north)], check=True)
