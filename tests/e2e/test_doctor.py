"""Tests of `dither doctor`."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dither
from dither.accounting.ledger import Ledger
from dither.cli import app


def looked(*arguments):
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, {row["what"]: row for row in json.loads(result.stdout)}


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger.sqlite"


def test_this_installation_works(ledger):
    code, rows = looked("--ledger", str(ledger))
    assert code == 0
    assert {rows[what]["state"] for what in ("python", "packages", "device", "ledger")} == {"ok"}
    assert not ledger.exists()  # looking creates nothing


def test_what_is_missing_comes_with_its_command(monkeypatch, ledger):
    version = importlib.metadata.version

    def without(name):
        if name in ("fpdf2", "scipy"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    code, rows = looked("--ledger", str(ledger))
    assert code == 1
    assert (rows["extra pdf"]["state"], rows["extra pdf"]["to fix"]) == (
        "missing",
        "pip install '.[pdf]' in a clone of Dither",
    )
    assert rows["packages"]["to fix"] == "pip install scipy"


def test_a_wrong_data_folder_and_a_damaged_ledger_are_named(monkeypatch, tmp_path, ledger):
    monkeypatch.setenv("DITHER_DATA", str(tmp_path / "none"))
    Ledger(ledger)
    ledger.write_bytes(b"no ledger")
    code, rows = looked("--ledger", str(ledger))
    assert code == 1
    assert rows["data folder"]["state"] == rows["ledger"]["state"] == "wrong"
    assert "ledger" in rows["ledger"]["seen"]


def test_nobody_is_sent_to_an_index_for_dither():
    """Dither is on none: what has its name there is somebody else's. Flower can install what an app lists."""
    files = [*Path(dither.__file__).parent.rglob("*.py"), *Path(dither.__file__).parent.rglob("*.toml")]
    assert [
        path.name for path in files if re.search(r"""pip install ['"]?dither|= \["dither""", path.read_text())
    ] == []
