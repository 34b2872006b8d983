"""What all commands share: --json, widths, colours, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dither import errors
from dither.cli import app

ROOT = Path(__file__).parents[2]
# These serve, or talk to people, while they run.
FEDERATION = {f"federation {name}" for name in ("init", "renew", "check", "demo")}
WITHOUT_JSON = {"web", "serve", "join", *FEDERATION}


def commands():
    found = {}
    for group in (("", app), *((each.name, each.typer_instance) for each in app.registered_groups)):
        for command in group[1].registered_commands:
            name = command.name or command.callback.__name__
            found[f"{group[0]} {name}".strip()] = command.callback
    return found


@pytest.mark.parametrize("name", sorted(set(commands()) - WITHOUT_JSON))
def test_every_command_speaks_json(name):
    assert isinstance(app, typer.Typer)
    assert "as_json" in commands()[name].__annotations__


def run(*arguments, **environment):
    settings = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    return subprocess.run(
        [sys.executable, "-m", "dither.cli", *arguments],
        capture_output=True,
        text=True,
        env={**settings, **environment},
    )


def widest(text):
    return max(len(line.rstrip()) for line in text.splitlines())


def test_tables_in_a_pipe_are_wide_unless_told_otherwise_and_without_colours():
    wide, narrow = run("presets"), run("presets", COLUMNS="60")
    assert 80 < widest(wide.stdout) <= 120
    assert widest(narrow.stdout) <= 60
    assert "\x1b" not in wide.stdout


def test_no_color_wins_over_a_terminal():
    assert "\x1b[" in run("presets", FORCE_COLOR="1").stdout
    assert not re.search(r"\x1b\[[\d;]*3\d", run("presets", FORCE_COLOR="1", NO_COLOR="1").stdout)


def test_every_exit_code_is_documented():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.exit_code for kind in kinds if issubclass(kind, errors.DitherError)} <= documented
    assert {0, 130} <= documented


def test_every_command_is_documented():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in commands():
        assert f"`dither {name.split()[0]}`" in page, name
