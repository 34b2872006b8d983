"""Tests of `dither.cli.common`: what a command line names becomes a spec."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer

from dither.__main__ import main
from dither.cli import common, runs
from dither.errors import SpecError
from dither.experiment import evaluation
from tests.cli.test_wrong_inputs import run_command


def test_a_table_can_be_given_a_method():
    spec = common.source_from("a.csv", None, ["data.label=sick", "method=dp-scaffold"], 3)
    assert (spec.data.path, spec.data.label, spec.method, spec.seed) == ("a.csv", "sick", "dp-scaffold", 3)
    assert common.source_from("a.csv", None, ["data.label=sick"], None)["data.path"] == "a.csv"  # Dither chooses


def test_an_empty_name_is_no_preset():
    with pytest.raises(SpecError, match="is empty"):
        runs.run(None, [""])


def test_a_narrow_table_folds_what_does_not_fit(capsys, monkeypatch):
    """ "replac…" and "zero-o…" were all that 60 columns left of two neighbour relations."""
    monkeypatch.setenv("COLUMNS", "40")
    rows = [
        {"method": "dp-scaffold", "adversary": "server", "neighbouring data": "replace-one", "source": "R3"}
    ] * 2
    common.print_table(rows)
    common.print_lines("run", [("run folder", "a/very/long/path/to/a/folder/that/does/not/fit")])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= 40


def test_a_table_breaks_no_word_while_there_is_room(capsys, monkeypatch):
    """ "dp-scaffo / ld" beside scores that could break at a space."""
    monkeypatch.setenv("COLUMNS", "60")
    scores = {f"score {number}": "0.8480 ± 0.0468" for number in range(3)}
    common.print_table([{"method": "secure-fedavg", **scores}])
    printed = capsys.readouterr().out
    assert "secure-fedavg" in printed
    assert max(map(len, printed.splitlines())) <= 60


def test_ctrl_c_at_a_question_is_one_line(capsys):
    """It was a traceback: Typer makes another exception of it."""
    with pytest.raises(SystemExit) as end, common.on_interrupt("nothing was spent"):
        raise typer.Abort
    assert end.value.code == common.INTERRUPTED
    assert capsys.readouterr().err == "\ninterrupted; nothing was spent\n"


def test_the_title_of_a_narrow_table_is_one_line(capsys):
    common.print_table([{"": "schema", "ε": "0.2"}], title="Spent on these records", footer="server sees uploads")
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("Spent on these records", "server sees uploads")


def test_a_terminal_breaks_prose_between_words_and_a_pipe_gets_it_whole(capsys, monkeypatch):
    text = "the proof holds against a server :b: that colludes with nobody"
    common.tell(text)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    common.tell(text)
    whole, *broken = capsys.readouterr().out.splitlines()
    assert whole == text
    assert [line.rstrip() for line in broken] == [
        "the proof holds against a",
        "server :b: that colludes with",
        "nobody",
    ]


def test_no_warning_of_a_library_ends_a_command(monkeypatch):
    """Under -W error one record whose scores overflow gave `dither evaluate --epsilon` another exit code."""

    def command():
        odds = evaluation.score_columns(np.array([[np.inf, np.inf], [0.0, 1.0]]), np.array([0, 1]), "", 2)["score"]
        seen.append(odds.tolist())

    seen = []
    monkeypatch.setattr("dither.cli.main", command)
    monkeypatch.setattr("gc.set_threshold", lambda count: None)
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # put back afterwards
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main()
    assert seen == [[pytest.approx(np.nan, nan_ok=True), 1.0]]


def test_what_a_command_starts_is_as_silent_as_the_command(monkeypatch):
    """Servers and clients of Flower and NVIDIA FLARE wrote Python's warnings to their logs."""
    said = []

    def command():
        child = [sys.executable, "-c", "import warnings; warnings.warn('cell 12')"]
        said.append(subprocess.run(child, capture_output=True, text=True, check=True).stderr)

    monkeypatch.setattr("dither.cli.main", command)
    monkeypatch.setattr("gc.set_threshold", lambda count: None)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with warnings.catch_warnings():
        main()
    assert said == [""]


def test_an_epsilon_that_was_given_is_shown_as_given(tmp_path):
    """A budget of 0.1234567 was "0.123457" where it was set, and 0.124 in the table."""
    pd.DataFrame({"age": range(50), "ill": [0, 1] * 25}).to_csv(tmp_path / "a.csv", index=False)
    table = str(tmp_path / "a.csv")
    set_budget = ["budget", "set", table, "--epsilon", "0.1234567"]
    counted = ["stats", table, "--epsilon", "0.0123456789"]
    for asked in (set_budget, counted, ["budget", "show"], ["budget", "history"]):
        code, errors, printed = run_command(asked)
        assert code == 0, errors
        assert ("0.0123456789" if asked is counted else "0.1234567") in printed


def test_no_epsilon_is_rounded_by_a_format():
    """`:g` leaves six digits: `epsilon_text` rounds the safe way, `:.15g` leaves what was given."""
    rounded = re.compile(r"\{[^{}()]*epsilon:(?!\.15)[.\d]*g\}")
    files = Path(common.__file__).parent.parent.rglob("*.py")
    assert [line for file in files for line in file.read_text("utf-8").splitlines() if rounded.search(line)] == []
