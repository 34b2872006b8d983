"""The README's Python runs as printed, and its commands exist."""

import re
from pathlib import Path

import pytest

from dither.errors import DataError

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_screen_has_the_two_commands():
    top = "\n".join(README.splitlines()[:12])
    assert "make run" in top
    assert "make test" in top


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    try:
        exec(compile(code, f"README block {number}", "exec"), {})
    except DataError as error:
        pytest.skip(f"data not available here: {error}")
    assert capsys.readouterr().out.strip()


def test_every_command_is_known():
    from dither.cli import app, datasets, privacy

    def names(typer_app):
        return {c.name or c.callback.__name__ for c in typer_app.registered_commands}

    top = names(app) | {"data", "budget"}
    for command, sub in re.findall(r"^(?:\$ )?dither (\w+)(?: (\w+))?", README, re.M):
        assert command in top, command
        if command == "data":
            assert sub in names(datasets.app)
        if command == "budget":
            assert sub in names(privacy.budget)
    for command in re.findall(r"`dither (\w+)", README):
        assert command in top, command


# Commands of the README

COMMANDS = [
    line.partition("#")[0].strip()
    for _, block in re.findall(r"^```(\w*)\n(.*?)^```", README, re.S | re.M)
    for line in block.splitlines()
    if line.startswith("dither ")
]
ELSEWHERE = {  # they run for long or need other machines: who runs them
    "web": "tests/e2e/test_web.py",
    "serve": "tests/e2e/test_federation.py",
    "join": "tests/e2e/test_federation.py",
    "reproduce": "tests/reproduction",
}
LIGHTER = {  # the same command with less work
    "run": "--set num_rounds=2 --set compare=false",
    "audit": "--trials 300 --rounds 1",
    "plan": "--quick --seeds 1 --grid num_rounds=5",
    "start": "--yes --epsilon 50 --set num_rounds=2",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands name: tables, a spec, a description of training, a finished run."""
    import dither
    from dither.spec import preset_text
    from tests.cli.test_wrong_inputs import TABLE

    folder = tmp_path_factory.mktemp("readme")
    for number, name in enumerate(("north", "south", "west", "public", "new")):
        rows = [line.replace("p", f"p{number}", 1) for line in TABLE.splitlines()[1:]]
        (folder / f"{name}.csv").write_text("\n".join(["patient,age,site,outcome", *rows]) + "\n")
    (folder / "my.toml").write_text(preset_text("adult"))
    (folder / "training.toml").write_text(
        (Path(__file__).parents[1] / "examples/check/opacus-mnist.toml").read_text(encoding="utf-8")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DITHER_LEDGER", str(folder / "first.sqlite"))
        tables = [f"{name}.csv" for name in ("north", "south", "west")]
        dither.run({"data.path": tables, "data.label": "outcome", "num_rounds": 2}, out="runs/done")
    return folder


def test_commands_that_run_elsewhere_exist():
    assert {command.split()[1] for command in COMMANDS} >= set(ELSEWHERE)
    assert all((Path(__file__).parents[1] / where).exists() for where in ELSEWHERE.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if each.split()[1] not in ELSEWHERE])
def test_commands_run(command, place, monkeypatch):
    from tests.cli.test_wrong_inputs import run_command

    monkeypatch.chdir(place)
    words = [word.replace("runs/...", "runs/done") for word in command.split()]
    if "--fuzz" in words:
        words[words.index("--fuzz") + 1] = "1"
    elif "--resume" not in words:
        words += LIGHTER.get(words[1], "").split()
    code, errors, _ = run_command(words[1:])
    allowed = (0, 1) if words[1] in ("check", "doctor") else (0,)  # 1: no proof, or something is missing
    assert code in allowed, errors
    assert "Traceback" not in errors
