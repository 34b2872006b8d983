"""`dither sweep` as a user has it: Ctrl-C, kill -9, and its memory."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.e2e.test_cli import dither

GRID = [
    "sweep", "secure-fedavg", "--set", "data.name=breast-cancer", "--set", "num_clients=10",
    "--set", "cohort_size=5", "--vary", "local_steps=1,2,3", "--vary", "seed=0:2",
]  # fmt: skip


@contextmanager
def started(*arguments):
    """The command as a process, which does not outlive a test that fails."""
    with subprocess.Popen(
        [sys.executable, "-m", "dither", *map(str, arguments)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "NO_COLOR": "1"},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


@pytest.mark.slow
def test_ctrl_c_and_a_kill_lose_the_batch_under_way_and_no_more(tmp_path):
    rounds = ["--set", "num_rounds=20000", "--set", "eval_every=500"]
    folder = tmp_path / "out"
    batches = lambda: len(list(folder.glob("batches/*.json.gz")))  # noqa: E731
    with started(*GRID, *rounds, "--out", folder) as process:
        until(lambda: batches() == 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"--out {folder}" in errors.replace("\n", " ")
    assert "continue with" in errors
    assert "Traceback" not in errors
    kept = batches()
    with started(*GRID, *rounds, "--out", folder):
        until(lambda: batches() == kept + 1)  # and then it is killed
    assert not (folder / "runs.csv").exists()
    dither(*GRID, *rounds, "--out", folder, "--quiet")
    dither(*GRID, *rounds, "--out", tmp_path / "whole", "--quiet")
    assert (folder / "curves.csv").read_bytes() == (tmp_path / "whole" / "curves.csv").read_bytes()


@pytest.mark.slow
def test_a_run_of_a_sweep_is_the_run_by_itself(tmp_path):
    more = ["--set", "num_rounds=20"]
    told = json.loads(dither(*GRID, *more, "--out", tmp_path / "sweep", "--json").stdout)
    assert told["programs"] == 3
    assert told["runs"] == 6
    last = (tmp_path / "sweep" / "runs.csv").read_text().splitlines()
    row = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
    alone = dither(
        "run", "secure-fedavg", *GRID[2:8], *more, "--set", "local_steps=3", "--seed", "1", "--json",
        "--out", tmp_path / "run",
    )  # fmt: skip
    summary = json.loads(alone.stdout)
    assert float(row["loss"]) == pytest.approx(summary["loss"], rel=1e-5)
    assert float(row["claimed_epsilon"]) == summary["epsilon"]["claimed"]["value"]


def test_refusals_are_one_line_and_exit_code_2(tmp_path):
    result = dither(*GRID, "--vary", "privacy.epsilonn=1", "--out", tmp_path / "out", check=False)
    assert result.returncode == 2
    assert "did you mean 'privacy.epsilon'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
