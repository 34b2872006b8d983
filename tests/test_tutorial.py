"""The tutorial, executed: its files are written as printed, its commands run in order, their output is the page's.

Numbers differ from run to run, as the noise comes from the operating system; all else must agree, and the numbers
that are promised are checked.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:`([\w.]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT = {"dither run patients.toml --out again": 3}
NUMBER = re.compile(r"(?<![A-Za-z])\d[\d,]*\.?\d*(e-?\d+)?")


def steps():
    """("write", name, text) and ("run", command, lines of output), in the page's order."""
    found = []
    for name, language, text in BLOCK.findall(PAGE):
        if name:
            found.append(("write", name, text))
            continue
        assert language == "", f"a block in {language} without a file's name before it"
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(("run", command, output.splitlines()))
    return found


def plain(line):
    """A line without its numbers, its boxes and what lies between words."""
    return " ".join(NUMBER.sub("#", line).replace("│", " ").split())


def test_the_page_has_what_it_promises():
    kinds = [(kind, what.split(" --")[0]) for kind, what, _ in steps()]
    assert ("write", "patients.schema.toml") in kinds
    assert sum(kind == "run" and what.startswith("dither") for kind, what in kinds) >= 8
    assert plain("│ proven  │ 0.219 │ run │") == plain("│ proven │ 1 │ run │") == "proven # run"
    assert plain("R3") == "R3"


@pytest.mark.slow
def test_the_tutorial_works_as_printed(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in {"python": sys.executable, "dither": f"{sys.executable} -m dither"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DITHER_LEDGER": str(tmp_path / "ledger.sqlite"),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    work = tmp_path / "work"
    work.mkdir()
    said = {}
    for kind, what, text in steps():
        if kind == "write":
            (work / what).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(what, shell=True, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == EXIT.get(what, 0), f"{what}: {done.stderr}"
        said[what] = done.stdout + done.stderr
        real = {plain(line) for line in said[what].splitlines()}
        missing = [line for line in text if line != "..." and not any(plain(line) in one for one in real)]
        assert missing == [], what
    trained = said["dither run patients.toml --out hospital"]
    (epsilon,) = re.findall(r"proven ε +│ ([\d.]+) per run, δ = 1e-05, zero-out", trained)
    assert 0.99 <= float(epsilon) <= 1.0
    assert "preprocessing not covered" not in trained
    assert 0.73 < float(re.search(r"test accuracy +│ ([\d.]+)", trained)[1]) < 0.78
    (rounds,) = set(re.findall(r"ends after round (\d+) of 40", said["dither run patients.toml --out again"]))
    assert 5 <= int(rounds) < 40
