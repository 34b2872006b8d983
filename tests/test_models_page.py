"""docs/models.md: its file and its commands work as written, in small."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dither
from dither.cli import app

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
SMALL = ["--set", "num_rounds=2", "--set", "eval_every=2"]
SMALL_MNIST = ["--set", "data.records_per_client=100", "--set", "batch_size=5"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's file and the examples."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n# my_model.py\n(.*?)```", PAGE, re.S)
    (tmp_path / "my_model.py").write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def given(command):
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_the_commands_of_the_page_work(folder):
    assert len(COMMANDS) >= 4
    for line in COMMANDS:
        if "torch" in line:
            continue
        program, *command = shlex.split(line)
        assert program == "dither"
        is_run = command[0] == "run"
        given([*command, *SMALL * is_run, *SMALL_MNIST * (is_run and "mnist" in line)])
    assert dither.load("runs/public").num_params > 0


@pytest.mark.slow
def test_everything_that_takes_a_spec_takes_a_network_of_yours(folder):
    """account, sweep, audit, an interrupted run and predictions, as for a model of Dither's."""
    model = ["--set", "model.name=my_model.py:net", "--set", "data.name=breast-cancer", *SMALL]
    model += ["--set", "num_clients=3", "--set", "cohort_size=3", "--set", "batch_size=8"]
    assert "proven" in given(["account", "adult", *model])
    given(["sweep", "adult", *model, "--vary", "seed=0,1", "--out", "sweep"])
    given(["audit", "adult", *model, "--trials", "200", "--rounds", "1"])

    def stop(row):
        raise KeyboardInterrupt

    values = {"model.name": "my_model.py:net", "data.name": "breast-cancer", "num_rounds": 2, "eval_every": 1}
    values |= {"num_clients": 3, "cohort_size": 3, "batch_size": 8, "compare": False}
    with pytest.raises(KeyboardInterrupt):
        dither.run("adult", values=values, out="run", on_evaluation=stop, checkpoint_seconds=0)
    given(["run", "--resume", "run"])
    dataset = dither.data.load("breast-cancer")
    np.savez("records.npz", x=dataset.x_test)
    given(["predict", "run", "--data", "records.npz", "--out", "predictions.csv"])
    assert len(Path("predictions.csv").read_text().splitlines()) == len(dataset.x_test) + 1
