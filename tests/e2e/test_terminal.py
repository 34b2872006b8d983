"""What all commands share: --json, widths, colours, exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from dither import errors, spec
from dither.cli import PANELS, app, main

ROOT = Path(__file__).parents[2]


def commands():
    """Every command as click has it, by its whole name."""
    found = {}
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {each}": one for each, one in inner.items()} if inner else {name: command}
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_json_and_quiet(name):
    assert {"--json", "--quiet"} <= {each for option in commands()[name].params for each in option.opts}


def run(*arguments, **environment):
    settings = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    return subprocess.run(
        [sys.executable, "-m", "dither", *map(str, arguments)],
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


@pytest.fixture
def call(monkeypatch, capsys):
    """The program in this process: exit code, standard output, standard error."""

    def calling(*arguments):
        monkeypatch.setattr(sys, "argv", ["dither", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    return calling


QUIET = {
    "presets": 0,
    "presets cpfed": 0,
    "keys": 0,
    "data list": 0,
    "budget show": 0,
    "federation check --federation nowhere": 6,
}


@pytest.mark.parametrize("command", QUIET)
def test_quiet_leaves_the_exit_code_alone(command, call, tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_LEDGER", str(tmp_path / "ledger.sqlite"))
    assert call(*command.split(), "--quiet") == (QUIET[command], "", "")


def test_json_of_the_federation_commands(call, tmp_path):
    keys = tmp_path / "keys"
    made = json.loads(call("federation", "init", keys, "--parties", "ann,bob", "--json")[1])
    assert made["server"] == str(keys / "server")
    assert set(made["parties"]) == {"ann", "bob"}
    renewed = json.loads(call("federation", "renew", keys, "--days", "30", "--json")[1])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", renewed["until"])
    code, output, _ = call("federation", "check", "--federation", keys / "parties" / "ann", "--json")
    findings = json.loads(output)
    assert findings[0] == {"good": True, "what": "keys of 'ann', one of 2 parties"}
    assert code == (0 if all(finding["good"] for finding in findings) else 6)


def test_a_preset_as_json_is_its_spec(call):
    assert json.loads(call("presets", "cpfed", "--json")[1]) == spec.Spec.from_preset("cpfed").to_dict()


def test_help_waits_for_nothing_heavy():
    """Neither the list of commands nor the options of one import JAX, pandas or anything of the kind."""
    code = """
import sys
from dither.cli import main
try:
    main()
finally:
    heavy = {"jax", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "rich.progress", "fastapi", "flwr"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for arguments in (["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "[]\n")


def test_every_command_has_its_place_in_the_help(call):
    told = call("--help")[1]
    assert all(f"─ {panel} ─" in told for panel in PANELS)
    assert "─ Commands ─" not in told
    placed = [name for names in PANELS.values() for name in names]
    assert sorted(placed) == sorted({name.split()[0] for name in commands()})


def test_completion_knows_commands_and_options():
    def offered(line):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_DITHER_COMPLETE": "complete_bash"}
        code = "import sys; sys.argv[0] = 'dither'; from dither.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | words)
        return done.stdout.split()

    assert offered("dither re") == ["reproduce"]
    assert offered("dither run --qui") == ["--quiet"]
    assert offered("dither federation de") == ["demo"]
    assert offered("dither run cpf") == ["cpfed", "cpfed-network"]
    assert "complete -o default -F _dither_completion dither" in show_completion()


def show_completion():
    code = "import sys; sys.argv[0] = 'dither'; from dither.cli import main; main()"
    shell = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"], capture_output=True, text=True, env=shell
    )
    return done.stdout


SMALL = {"data.name": "breast-cancer", "data.features": "all", "num_clients": 4, "cohort_size": 4, "batch_size": 8}
UNPROVEN = {**SMALL, "privacy.noise": "proven", "privacy.adjacency": "add/remove"}
NO_PROOF = [word for key, value in UNPROVEN.items() for word in ("--set", f"{key}={value}")]


def test_exit_codes(call, tmp_path):
    """3 is met in test_budget, 5 in tests/auditing, 130 in test_interrupts."""
    (tmp_path / "ledger.sqlite").write_bytes(b"this is no ledger" * 100)
    assert call("presets")[0] == 0
    code, _, errors = call("account", "cpfed", *NO_PROOF)
    assert (code, errors.startswith("error: no noise has a proven ε")) == (1, True)
    assert call("run", "no-such-preset")[0] == 2
    assert call("no-such-command")[0] == 2
    assert call("budget", "show", "--ledger", tmp_path / "ledger.sqlite")[0] == 4
    assert call("federation", "check", "--federation", tmp_path)[0] == 6


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
