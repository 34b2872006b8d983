"""docs/tasks.md: its commands and its spec work as written."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dither
from dither.cli import app

PAGE = (Path(__file__).parent.parent / "docs" / "tasks.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def test_the_commands_of_the_page_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first,) = [shlex.split(line) for line in COMMANDS if line.startswith("python -c ")]
    exec(first[2])
    (spec,) = re.findall(r"```toml\n(# diabetes.toml.*?)```", PAGE, re.S)
    Path("diabetes.toml").write_text(spec.replace("num_rounds = 100", "num_rounds = 40"))
    commands = [shlex.split(line)[1:] for line in COMMANDS if line.startswith("dither ")]
    assert len(commands) + 1 == len(COMMANDS)
    assert [command[0] for command in commands] == ["data", "run", "evaluate", "predict"]
    outputs = []
    for command in commands:
        more = ["--ledger", "ledger.json", "--new-ledger"] if command[0] == "run" else []
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    shown = re.findall(r"```\n(schema.toml: .*?)\n```", PAGE, re.S)[0]
    assert outputs[0].splitlines()[:2] == shown.splitlines()
    report = dither.load("runs/diabetes")
    assert report.task == "regression"
    assert report.test_accuracy is None
    assert report.test_r2 == pytest.approx(report.scores.model["r2"], abs=1e-4)
    assert report.epsilon.proven().value <= 3
    assert "RMSE" in outputs[2]
    predicted = [float(line) for line in Path("predictions.csv").read_text().splitlines()[1:]]
    assert len(predicted) == 442
    assert 0 <= min(predicted) < max(predicted) <= 400


@pytest.mark.slow
def test_the_python_of_the_page_works(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    given = "classes=[0, 1], ledger=LEDGER, new_ledger=True"
    exec(code.replace("classes=[0, 1]", given), {"LEDGER": tmp_path / "ledger.json"})
