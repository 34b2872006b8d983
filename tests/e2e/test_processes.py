"""Several processes make one simulation: the result of one process, and nobody waits when one of them ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import dither
from dither.cli import common
from dither.errors import SpecError
from dither.experiment import build, plots, train
from dither.experiment import folder as runs
from dither.experiment.build import sharing
from dither.simulation import devices, distributed
from dither.simulation.arrays import Shards
from dither.spec import Spec

SPEC = """
method = "dp-scaffold"
num_clients = 6
cohort_size = 3
num_rounds = 6
eval_every = 3
local_steps = 2
batch_size = 8
batch_sampling = "fixed"

[data]
name = "breast-cancer"

[privacy]
noise = "given"
noise_std = 0.05

[method_options]
stop_at_budget = "no"
"""
# As the tests' own programs are compiled (tests/conftest.py), and one device a process.
ALIKE = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "DITHER_DEVICES": "1"}
LONG = ["--set", "num_rounds=100000", "--set", "eval_every=20", "--checkpoint-seconds", "0"]


class Crew:
    """Two processes with the same command; killed at the end, whatever happens. `first` is what each one's Python
    does before the command."""

    def __init__(self, *arguments, where=(None, None), first=("", ""), environment=()):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.all = [
            subprocess.Popen(
                [*self._program(first[number]), *map(str, arguments), *self._options(number, address)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=where[number],
                env={**os.environ, **ALIKE, **dict(environment)},
                start_new_session=True,
            )
            for number in (0, 1)
        ]

    @staticmethod
    def _program(first):
        if not first:
            return [sys.executable, "-m", "dither"]
        return [sys.executable, "-c", first + "\nfrom dither.cli import main\nmain()"]

    @staticmethod
    def _options(number, address):
        return ["--processes", "2", "--process", str(number), "--coordinator", address]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def ended(self, seconds=120):
        """Exit codes, standard outputs, standard errors."""
        end = time.monotonic() + seconds
        heard = [process.communicate(timeout=max(end - time.monotonic(), 0.1)) for process in self.all]
        return [process.returncode for process in self.all], *map(list, zip(*heard, strict=True))

    def at_round(self, folder, round, seconds=120):
        """Wait until a round is evaluated."""
        end = time.monotonic() + seconds
        while not (rows := runs.RunFolder(folder).metrics()) or rows[-1]["round"] < round:
            assert all(process.poll() is None for process in self.all), self.ended()
            assert time.monotonic() < end, "it never came that far"
            time.sleep(0.02)
        return self


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC, encoding="utf-8")
    return path


@pytest.fixture
def two_devices(monkeypatch):
    """One process shares a run among two devices, however small its rounds."""
    monkeypatch.setattr(devices, "cores", lambda: 2)
    monkeypatch.setattr(devices, "worth_sharing", lambda flops: True)


def model(folder):
    return np.concatenate([leaf.ravel() for leaf in runs.RunFolder(folder).load_model().values()])


def scores(folder):
    return [{**row, "seconds": 0} for row in runs.RunFolder(folder).metrics()]


@pytest.mark.slow
def test_two_processes_make_the_run_of_one_with_two_devices(spec, tmp_path, two_devices):
    with Crew("run", spec, "--out", tmp_path / "two", "--json") as crew:
        dither.run(spec, out=tmp_path / "one")
        codes, outputs, errors = crew.ended()
    assert codes == [0, 0], errors
    assert model(tmp_path / "two").tobytes() == model(tmp_path / "one").tobytes()
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    # Process 0 alone prints, and nothing but its result: JAX's own lines are not in it.
    assert json.loads(outputs[0])["test_accuracy"] == scores(tmp_path / "one")[-1]["test_accuracy"]
    assert outputs[1] == ""
    assert len(errors[1].splitlines()) == 1
    assert "computes for process 0" in errors[1]
    made = json.loads((tmp_path / "two" / "provenance.json").read_text(encoding="utf-8"))
    assert made["processes"] == 2


def test_options_that_do_not_fit_together_are_refused():
    for given, wrong in [
        ((None, 1, None), "need --processes"),
        ((0, None, None), "at least 1"),
        ((2, 1, None), "together"),
        ((2, None, "a:1"), "together"),
        ((2, 2, "a:1"), "not among 0 to 1"),
        ((2, 0, "nowhere"), "not HOST:PORT"),
        ((2, 0, "a:99999"), "not HOST:PORT"),
    ]:
        with pytest.raises(SpecError, match=wrong):
            common._count(*given)
    assert common._count(None, None, None) == 1


def test_processes_share_whatever_was_asked_for_but_nothing_that_must_be_drawn_once(monkeypatch):
    monkeypatch.setattr(distributed, "_count", 3)
    monkeypatch.setattr(distributed, "_each", 2)
    assert devices.for_one_run(round_flops=1e3, record_bytes=1000) == Shards(1, 6)
    assert devices.for_many_runs(4, record_bytes=1000) == Shards(6, 1)
    assert devices.for_many_runs(2, record_bytes=1000) == Shards(3, 1)
    assert devices.for_many_runs(50, record_bytes=3 << 30) == Shards(3, 1)
    experiment = build.build_experiment(Spec.from_toml(SPEC).with_values({"randomness": "os"}))
    with pytest.raises(SpecError, match="3 processes cannot share randomness='os'"):
        sharing(experiment)
    monkeypatch.setattr(distributed, "_count", 1)
    monkeypatch.setattr(devices, "cores", lambda: 2)
    assert devices.for_one_run(round_flops=1e12, record_bytes=1000) == Shards(1, 2)
    monkeypatch.setattr(distributed, "_parted", True)
    assert devices.for_one_run(round_flops=1e12, record_bytes=1000) == Shards(1, 1)


def test_what_process_0_does_alone_comes_after_the_others_have_parted(spec, tmp_path, monkeypatch):
    calls = []

    def note(where, name, instead=None):
        function = instead or getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, **k: [calls.append(name), function(*a, **k)][1])

    note(distributed, "exchange")
    note(distributed, "part")
    note(train, "report_of")
    note(train, "without_noise", lambda experiment, rounds: 0.5)
    note(plots, "draw_run", lambda *_, **__: None)
    note(runs.RunFolder, "save_summary")
    dither.run(spec, values={"compare": True}, out=tmp_path / "run")
    alone = ["report_of", "without_noise", "draw_run", "save_summary"]
    shared = ["exchange"] * 4  # the spec, where to begin, two chunks of rounds
    assert calls == [*shared, "part", "exchange", *alone]


def test_an_error_after_the_others_have_parted_is_told_to_nobody(monkeypatch):
    told = []
    monkeypatch.setattr(distributed, "exchange", lambda message: told.append(message) or [{}, {}])
    monkeypatch.setattr(distributed, "disconnect", lambda: monkeypatch.setattr(distributed, "_count", 1))
    monkeypatch.setattr(distributed, "_count", 2)

    @distributed.together()
    def fail():
        distributed.part(3)
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail()
    assert told == [{}]
    monkeypatch.setattr(distributed, "_count", 2)
    monkeypatch.setattr(distributed, "_number", 1)
    with pytest.raises(SystemExit, match="3"):  # any other process
        fail()
    assert told == [{}, {}]


def test_an_error_is_told_unless_the_others_are_in_compiled_rounds(monkeypatch):
    told = []
    monkeypatch.setattr(distributed, "exchange", lambda message: told.append(message) or [{}, {}])
    monkeypatch.setattr(distributed, "_count", 2)
    for name in ("_lost", "_computing"):
        monkeypatch.setattr(distributed, name, False)

    @distributed.together()
    def compute(error, inside):
        with distributed.computing():
            with distributed.between_rounds():
                if inside:
                    raise error
            raise error

    with pytest.raises(KeyboardInterrupt):
        compute(KeyboardInterrupt(), inside=True)
    assert told == [{"error": "it was interrupted", "exit_code": 130}]
    assert not distributed.lost()
    with pytest.raises(ValueError, match="early"):
        compute(ValueError("early"), inside=False)
    assert len(told) == 1
    assert distributed.lost()


def test_devices_are_connected_once_and_when_all_processes_are_there(monkeypatch):
    asked = []
    monkeypatch.setattr(distributed, "exchange", lambda message: asked.append(message))
    monkeypatch.setattr(distributed, "_met", set())
    some = jax.local_devices()[:1]
    distributed.meet(some)
    assert asked == []  # alone
    monkeypatch.setattr(distributed, "_count", 2)
    distributed.meet(some)
    distributed.meet(some)
    assert asked == [{}]


def test_an_error_of_gloo_is_explained():
    late = RuntimeError("UNKNOWN: Gloo context initialization failed: [pair.cc:144] timeout")
    assert re.search("resolve .* firewall .* compiles more slowly .*pair.cc", str(distributed._gone(late)))
    hangs = RuntimeError("Gloo all-reduce failed: Timed out waiting 1800000ms for recv operation to complete")
    assert "waited too long" in str(distributed._gone(hangs))
    assert "lost another" in str(distributed._gone(RuntimeError("Gloo all-reduce failed: Connection closed")))


def test_those_that_run_are_ended_where_another_cannot_be_started(monkeypatch):
    started = []

    def start(command, **how):
        if started:
            raise OSError("no room for another process")
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **how))
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setenv("DITHER_COORDINATOR", "")  # is set on the way
    monkeypatch.setattr(common.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(common, "_CHILD_SECONDS", 0.1)
    monkeypatch.setattr(common.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no room"), common.several(3, None, None):
        pass
    assert len(started) == 1
    assert started[0].poll() == -signal.SIGKILL


HELD_UP = """
import {module} as module, pathlib, time
function, mark = module.{name}, pathlib.Path({mark!r})
def held_up(*arguments, **more):
    mark.touch()
    while mark.exists():
        time.sleep(0.02)
    return function(*arguments, **more)
module.{name} = held_up
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["run", "sweep", "interrupted"])
def test_the_others_end_while_process_0_finishes_alone(spec, tmp_path, how):
    command, module, name = ["run", spec, "--set", "compare=true"], "dither.experiment.train", "without_noise"
    if how == "sweep":
        command, module, name = (
            ["sweep", spec, "--vary", "seed=0:2"],
            "dither.experiment.sweep.result",
            "draw_sweep",
        )
    mark = tmp_path / "held up"
    late = HELD_UP.format(module=module, name=name, mark=str(mark))
    with Crew(*command, "--out", tmp_path / "made", "-q", first=(late, "")) as crew:
        assert crew.all[1].wait(timeout=120) == 0
        end = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < end, crew.ended()
            time.sleep(0.02)
        time.sleep(1)  # were it waited for, or somebody missed, it would not be there any more
        assert crew.all[0].poll() is None
        assert not (tmp_path / "made" / "plot.png").exists()
        if how == "interrupted":
            crew.all[0].send_signal(signal.SIGINT)
        else:
            mark.unlink()
        codes, _, errors = crew.ended(30)
    if how == "interrupted":
        assert codes == [130, 0], errors
        assert f"continue with: dither run --resume {tmp_path / 'made'}" in errors[0]
        made = train.resume(tmp_path / "made")
        assert made.summary["test_accuracy_without_noise"] > 0.5
        return
    assert codes == [0, 0], errors
    assert errors == ["", ""]
    assert (tmp_path / "made" / "plot.png").is_file()
    if how == "run":
        assert runs.RunFolder(tmp_path / "made").summary()["test_accuracy_without_noise"] > 0.5


# Longer than JAX waits for a process that is not at its first collective over some devices, 30 s.
SLOW = """
import time
from dither.simulation import engine
rounds = engine.Simulation.advance
def advance(*arguments):
    engine.Simulation.advance = rounds
    time.sleep(40)
    return rounds(*arguments)
engine.Simulation.advance = advance
"""
TWO_CORES = "from dither.simulation import devices\ndevices.cores = lambda: 2\n"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["run", "sweep"])
def test_processes_of_two_devices_wait_for_one_that_compiles_slowly(spec, tmp_path, which):
    vary = ["--vary", "seed=0:4"] if which == "sweep" else []
    two_each = {"DITHER_DEVICES": "2"}
    first = (TWO_CORES, TWO_CORES + SLOW)
    with Crew(which, spec, *vary, "--out", tmp_path / "made", "-q", first=first, environment=two_each) as crew:
        codes, _, errors = crew.ended(180)
    assert codes == [0, 0], errors
    if which == "run":
        dither.run(spec, out=tmp_path / "one")
        np.testing.assert_allclose(model(tmp_path / "made"), model(tmp_path / "one"), rtol=1e-5, atol=1e-6)
    else:
        found = json.loads((tmp_path / "made" / "sweep.json").read_text(encoding="utf-8"))
        assert found["batches"] == [4]


@pytest.mark.slow
def test_one_device_gives_the_same_to_rounding(spec, tmp_path):
    dither.run(spec, out=tmp_path / "one")
    subprocess.run(
        [sys.executable, "-m", "dither", "run", spec, "--out", tmp_path / "two", "--processes", "2"],
        env={**os.environ, **ALIKE},
        timeout=120,
        check=True,
    )
    np.testing.assert_allclose(model(tmp_path / "two"), model(tmp_path / "one"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_sweep_is_that_of_one_process(spec, tmp_path, monkeypatch):
    grid = {"seed": [0, 1, 2], "client_lr": [0.1, 0.2]}
    vary = ["--vary", "seed=0:3", "--vary", "client_lr=0.1,0.2"]
    with Crew("sweep", spec, *vary, "--out", tmp_path / "two", "-q") as crew:
        codes, _, errors = crew.ended()
    assert codes == [0, 0], errors
    monkeypatch.setattr(devices, "cores", lambda: 2)
    dither.sweep(spec, grid, out=tmp_path / "one")
    for name in ("curves.csv", "sweep.json"):
        assert (tmp_path / "two" / name).is_file()
    assert (tmp_path / "two" / "curves.csv").read_text() == (tmp_path / "one" / "curves.csv").read_text()


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(spec, tmp_path, monkeypatch):
    more = ["--set", "num_rounds=60", "--set", "eval_every=1", "--out", tmp_path / "two"]
    command = [
        "sweep",
        spec,
        "--vary",
        "seed=0:2",
        "--vary",
        "batch_size=4,8,16",
        *more,
        "--out",
        tmp_path / "two",
    ]
    finished = tmp_path / "two" / "batches"
    with Crew(*command) as crew:
        end = time.monotonic() + 120
        while not finished.is_dir() or not any(finished.iterdir()):
            assert time.monotonic() < end, crew.ended()
            time.sleep(0.02)
        crew.all[0].send_signal(signal.SIGINT)
        codes, _, errors = crew.ended()
    assert codes == [130, 130], errors
    assert "finished batches are kept; continue with: dither sweep" in errors[0]
    kept = sorted(path.name for path in finished.iterdir())
    assert len(kept) < 3
    with Crew(*command, "-q") as crew:
        codes, _, errors = crew.ended()
    assert codes == [0, 0], errors
    assert errors == ["", ""]
    monkeypatch.setattr(devices, "cores", lambda: 2)
    values = {"num_rounds": 60, "eval_every": 1}
    dither.sweep(spec, {"seed": [0, 1], "batch_size": [4, 8, 16]}, values=values, out=tmp_path / "one")
    assert (tmp_path / "two" / "curves.csv").read_text() == (tmp_path / "one" / "curves.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("whom", [0, 1])
def test_ctrl_c_in_any_process_stops_all_with_a_checkpoint_and_the_run_goes_on(spec, tmp_path, two_devices, whom):
    rounds = ["--set", "num_rounds=400", "--set", "eval_every=20", "--checkpoint-seconds", "3600"]
    with Crew("run", spec, *rounds, "--out", tmp_path / "two") as crew:
        crew.at_round(tmp_path / "two", 20).all[whom].send_signal(signal.SIGINT)
        codes, _, errors = crew.ended()
    assert codes == [130, 130], errors
    assert f"continue with: dither run --resume {tmp_path / 'two'}" in errors[0]
    assert "process 0 ended: it was interrupted" in errors[1]
    kept = runs.RunFolder(tmp_path / "two").load_checkpoint()
    assert kept is not None
    assert 20 <= kept.round < 400
    with Crew("run", "--resume", tmp_path / "two", "-q") as crew:
        codes, _, errors = crew.ended()
    assert codes == [0, 0], errors
    dither.run(spec, values={"num_rounds": 400, "eval_every": 20}, out=tmp_path / "one")
    assert model(tmp_path / "two").tobytes() == model(tmp_path / "one").tobytes()
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    with Crew("run", "--resume", tmp_path / "two", "-q") as crew:  # nothing is left to do
        assert crew.ended()[0] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("whom", [0, 1])
def test_a_killed_process_ends_the_other_and_leaves_a_run_that_can_be_resumed(spec, tmp_path, whom):
    with Crew("run", spec, *LONG, "--out", tmp_path / "run") as crew:
        crew.at_round(tmp_path / "run", 40).all[whom].kill()
        codes, _, errors = crew.ended(seconds=30)
    assert codes[whom] == -signal.SIGKILL
    assert codes[1 - whom] not in (0, -signal.SIGKILL), errors
    if whom == 1:  # without process 0 JAX itself may end the other first, in its own words
        assert codes[0] == 1
        assert "process 0 has lost another process" in errors[0]
        assert f"continue with: dither run --resume {tmp_path / 'run'}" in errors[0]
        assert "Traceback" not in errors[0]
    folder = runs.RunFolder(tmp_path / "run")
    kept = folder.load_checkpoint()
    assert kept is not None
    assert kept.round >= 20
    assert folder.summary() is None


@pytest.mark.slow
def test_a_silent_process_is_given_up(spec, tmp_path):
    with Crew("run", spec, *LONG, "--out", tmp_path / "run") as crew:
        crew.at_round(tmp_path / "run", 40).all[1].send_signal(signal.SIGSTOP)
        assert crew.all[0].wait(timeout=2 * distributed.HEARTBEAT_SECONDS) != 0


@pytest.mark.slow
def test_an_error_in_process_0_is_told(spec, tmp_path):
    with Crew("run", spec, *LONG, "--out", tmp_path / "run") as crew:
        crew.at_round(tmp_path / "run", 20)
        (tmp_path / "run" / "local" / "checkpoints").rename(tmp_path / "kept")
        (tmp_path / "run" / "local" / "checkpoints").write_text("not a folder")
        codes, _, errors = crew.ended()
    assert codes[0] == 2, errors
    assert codes[1] == 1, errors
    assert "process 0 ended: " in errors[1]
    assert "checkpoints" in errors[1]
    with Crew("run", spec, "--out", tmp_path / "run") as crew:
        codes, _, errors = crew.ended()
    assert codes == [2, 2]
    assert "already exists" in errors[1]


@pytest.mark.slow
def test_records_that_differ_are_refused_and_process_0_alone_pays(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_LEDGER", str(tmp_path / "ledger.sqlite"))
    lines = ["a,b,label", *(f"{i % 7},{(i * i) % 5},{'yes' if i % 3 else 'no'}" for i in range(120))]
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
        (place / "own.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "own.toml").write_text(SPEC.split("[data]")[0] + 'randomness = "seeded"\n', encoding="utf-8")
    own = ["run", tmp_path / "own.toml", "--set", "data.path=own.csv", "--set", "data.label=label"]
    with Crew(*own, "--out", "run", "-q", where=places) as crew:
        codes, _, errors = crew.ended()
    assert codes == [0, 0], errors
    assert not (places[1] / "run").exists()
    assert (places[0] / "run" / "local" / "ledger-anchor.json").is_file()
    (places[1] / "own.csv").write_text("\n".join([*lines[:-1], "6,4,no"]) + "\n", encoding="utf-8")
    with Crew(*own, "--out", "other", "-q", where=places) as crew:
        codes, _, errors = crew.ended()
    assert codes == [1, 1], errors
    assert all("process 1 differs from process 0 in the data" in text for text in errors)
    assert not (places[0] / "other").exists()


@pytest.mark.slow
def test_nobody_waits_for_ever_for_one_who_does_not_come(tmp_path):
    program = (
        "from dither.simulation import distributed as p\n"
        "try: p.connect('127.0.0.1:{port}', count=2, number={number}, seconds=2)\n"
        "except p.ProcessError as error: print(error, flush=True); import os; os._exit(7)\n"
    )
    for number, words in [(0, "not all of the 2 processes came"), (1, "found no process 0")]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        text = program.format(port=port, number=number)
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 7, done.stderr
        assert words in done.stdout
