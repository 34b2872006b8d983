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
