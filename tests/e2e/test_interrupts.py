"""Ctrl-C as the terminal sends it: exit code 130, one line that says how to go on, and it does go on."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dither
from dither.cli import common
from dither.experiment import folder as runs

PLAN = [
    "plan", "cpfed", "--epsilon", "8", "--clients", "4", "--model", "logistic", "--proxy", "breast-cancer",
    "--public-fraction", "0.5", "--set", "data.features=all", "--set", "batch_size=56", "--set", "local_steps=1",
    "--set", "cohort_size=4", "--grid", "num_rounds=5,10,20,40", "--seeds", "3", "--mode", "empirical", "--json",
]  # fmt: skip
AUDIT = """
method = "cpfed"
num_clients = 4
cohort_size = 4
num_rounds = 2
local_steps = 2
batch_size = 8

[data]
name = "breast-cancer"

[privacy]
epsilon = 2.0
noise = "proven"
"""


# Whoever starts the tests in the background of a shell has SIGINT ignored, which children inherit.
HEEDING = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def start(*arguments, program=("-m", "dither"), **environment):
    return subprocess.Popen(
        [sys.executable, "-c", HEEDING, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        start_new_session=True,
    )


def interrupted(process, ready, seconds=300):
    """Send SIGINT when `ready` says so; what was on standard error."""
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came that far"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    return errors


def finished(*arguments, **environment):
    process = start(*arguments, **environment)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return json.loads(output)


def kept(cache):
    return [path for path in (cache / "unfinished").glob("*.jsonl") if path.stat().st_size]


def hanging(replace):
    """A program that is `dither` but for what `replace` puts in; wait() hangs there, and says so by a file."""
    return f"""
import sys, time
from pathlib import Path

SIGN = Path(sys.argv.pop())

def wait():
    SIGN.touch()
    time.sleep(60)
{replace}
from dither.cli import main
main()
"""


# A download that hangs: what came so far must not be taken for the file.
SLOW = hanging("""
from dither.data import downloads

def fetch(origin, download, missing, staging, progress):
    (staging / "part").write_bytes(b"half a file")
    wait()

downloads._fetch = fetch
""")


def test_a_download(tmp_path):
    sign = tmp_path / "fetching"
    folders = {"DITHER_DATA": "", "XDG_CACHE_HOME": tmp_path / "cache", "HOME": tmp_path}
    process = start("data", "get", "mnist", "--quiet", sign, program=("-c", SLOW), **folders)
    errors = interrupted(process, sign.exists)
    assert errors == "interrupted; complete files are kept; run the same command to continue\n"
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


# Any command that leaves nothing behind, in the midst of its work.
WAITING = hanging("""
from dither import spec
spec.preset_names = wait
""")


def test_a_command_without_a_state(tmp_path):
    sign = tmp_path / "waiting"
    errors = interrupted(start("presets", sign, program=("-c", WAITING)), sign.exists)
    assert errors == "interrupted; no file is left half-written; run the same command to start again\n"


def test_a_run_that_is_interrupted_as_it_reports_keeps_what_it_has_made(tmp_path):
    values = {"num_rounds": 9, "eval_every": 3, "num_clients": 4, "cohort_size": 2, "data.name": "breast-cancer"}

    def interrupt(row):
        if row["round"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        dither.run("fedavg", values=values, out=tmp_path / "run", checkpoint_seconds=3600, on_evaluation=interrupt)
    assert runs.RunFolder(tmp_path / "run").load_checkpoint().round == 6


@pytest.mark.slow
def test_a_plan_goes_on_with_what_it_measured(tmp_path):
    whole = finished(*PLAN, DITHER_CACHE=tmp_path / "other")
    cache = tmp_path / "cache"
    errors = interrupted(start(*PLAN, DITHER_CACHE=cache), lambda: kept(cache))
    assert errors == "interrupted; measured runs are kept; run the same command to continue\n"
    lines = kept(cache)[0].read_text().count("\n")
    again = finished(*PLAN, DITHER_CACHE=cache)
    assert lines >= 1
    assert kept(cache) == []
    for name in ("choice", "score", "neighbours", "pareto", "proven_epsilon"):
        assert again[name] == whole[name], name


@pytest.mark.slow
def test_an_audit_goes_on_after_the_last_row(tmp_path):
    (tmp_path / "spec.toml").write_text(AUDIT)
    command = ["audit", tmp_path / "spec.toml", "--trials", 4000, "--canaries", 40, "--json"]
    whole = finished(*command, DITHER_CACHE=tmp_path / "other")
    cache = tmp_path / "cache"
    errors = interrupted(start(*command, DITHER_CACHE=cache), lambda: kept(cache))
    assert errors == "interrupted; finished rows are kept; run the same command to continue\n"
    again = finished(*command, DITHER_CACHE=cache)
    assert kept(cache) == []
    assert again == whole


@pytest.mark.slow
def test_a_reproduction_keeps_finished_runs(tmp_path):
    cache = tmp_path / "cache"
    command = ["reproduce", "secure-fedavg", "--scale", "smoke", "--only-compute", "--cache", cache, "--json"]
    errors = interrupted(start(*command), lambda: list(cache.rglob("runs-*/*/*.json.gz")))
    assert errors == "interrupted; finished runs are kept; run the same command to continue\n"
    before = len(list(cache.rglob("runs-*/*/*.json.gz")))
    assert finished(*command)["made"]["computed"] > 0
    assert len(list(cache.rglob("runs-*/*/*.json.gz"))) > before


@pytest.mark.slow
def test_a_demonstration_of_a_federation_goes_on(tmp_path):
    pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")
    folder = tmp_path / "demo"
    journal = folder / "run" / "metrics.jsonl"

    def two_rounds():
        return journal.is_file() and journal.read_text().count("\n") >= 2

    command = ["federation", "demo", "--out", folder, "--json"]
    errors = interrupted(start(*command), two_rounds)
    assert errors == f"interrupted; continue with: dither federation demo --out {folder}\n"
    time.sleep(3)
    assert [line for line in commands() if str(folder) in line] == []  # nobody is left behind
    done = subprocess.run(
        [sys.executable, "-m", "dither", *map(str, command)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "note"
    assert events[-1]["event"] == "done"
    assert events[-1]["rounds"] == 10
    (begun,) = [event for event in events if event["event"] == "start"]
    assert begun["done"] >= 2


def commands():
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_server_and_a_party_go_on(tmp_path):
    pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")
    from tests.e2e.federations import Processes
    from tests.federation.parties import Parties, small_spec

    spec = small_spec(**{"num_rounds": 8, "federation.min_clients": 4, "federation.round_timeout": 60.0})
    with Processes(Parties(tmp_path, spec)) as run:
        run.start_until_round(2, 600)
        for name in ("server", "bob"):
            process = run.running.pop(name)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130, run.output(name)
        assert f"interrupted; continue with the same command and --out {tmp_path / 'run'}" in run.output("server")
        assert "interrupted; run the same command to continue" in run.output("bob")
        run.serve("--json")
        run.join("bob", "--json")
        assert run.wait("server", 600) == 0, run.output("server")
        assert run.wait("bob", 90) == 0, run.output("bob")
        last = json.loads(run.output("server").splitlines()[-1])
        assert (last["event"], last["rounds"]) == ("done", 8)
        last = json.loads(run.output("bob").splitlines()[-1])
        assert (last["event"], last["party"]) == ("done", "bob")


def test_an_interrupt_that_python_drops_is_sent_again(monkeypatch):
    """Python drops what is raised in a callback of the garbage collector, and JAX has one."""
    sent = []

    def callback(*_):
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)  # handled here

    def collect():
        gc.collect()
        time.sleep(30)

    monkeypatch.setattr(sys, "unraisablehook", common.raise_again)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gc.callbacks.append(callback)
        with pytest.raises(KeyboardInterrupt):
            collect()
        assert sent
    finally:
        gc.callbacks.remove(callback)
        signal.signal(signal.SIGINT, before)
