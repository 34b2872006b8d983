"""Budgets end to end: a run stops at the last round it can pay, and the next one starts from what is spent."""

import json

import pytest

from dither import run
from tests.e2e.test_cli import dither, dither_here, table, write_table

SPEC = """
method = "cpfed"
num_clients = 2
cohort_size = 2
num_rounds = 40
batch_size = 4
batch_sampling = "poisson"
sampling_rate = 0.05
client_lr = 0.3
eval_every = 10
randomness = "seeded"

[data]
path = "t.csv"
label = "sick"
column = "site"
partition = "column"
name = ""

[privacy]
epsilon = 4.0
"""


@pytest.fixture
def place(tmp_path):
    write_table(tmp_path / "t.csv", table(200))
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def test_a_users_own_data_is_always_charged_and_the_budget_holds(place):
    ledger = {"DITHER_LEDGER": str(place / "ledger.sqlite")}
    dither_here("budget", "set", "t.csv", "--epsilon", "3", cwd=place, **ledger)
    first = dither("run", "spec.toml", "--out", "one", cwd=place, check=False, **ledger)
    assert first.returncode == 3, first.stderr
    assert "the privacy budget ends after round" in first.stderr
    summary = json.loads((place / "one" / "summary.json").read_text())
    assert 10 < summary["rounds"] < 40
    proven = {(r["view"], r["adjacency"], r["unit"]): r["value"] for r in summary["epsilon"]["proven"]}
    assert 2.7 < proven["upload", "zero-out", "run"] <= 3.0
    assert (place / "one" / "model.safetensors").is_file()
    rows = json.loads(dither_here("budget", "show", "t.csv", "--json", cwd=place, **ledger).stdout)
    assert {row["client"] for row in rows} == {"every record", "site=north", "site=south"}
    assert all(float(row["spent"]) <= 3.0 for row in rows)
    second = dither_here("run", "spec.toml", "--set", "seed=1", "--out", "two", cwd=place, check=False, **ledger)
    assert second.returncode == 3
    assert "has spent" in second.stderr
    assert not (place / "two").exists()
    history = json.loads(dither_here("budget", "history", "--json", cwd=place, **ledger).stdout)
    assert [row["what"].split()[0] for row in history[:3]] == ["data:", "budget", "rounds"]
    assert any("rounds 0 to 9" in row["what"] for row in history)


@pytest.mark.slow
def test_a_raised_budget_lets_a_stopped_run_go_on(place):
    ledger = {"DITHER_LEDGER": str(place / "ledger.sqlite")}
    dither("budget", "set", "t.csv", "--epsilon", "3", cwd=place, **ledger)
    assert dither("run", "spec.toml", "--out", "one", "-q", cwd=place, check=False, **ledger).returncode == 3
    stopped = json.loads((place / "one" / "summary.json").read_text())["rounds"]
    more = ["budget", "set", "t.csv", "--epsilon", "100"]
    refused = dither(*more, cwd=place, check=False, **ledger)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: this raises the budget from ε=3 ")
    dither(*more, "--yes", cwd=place, **ledger)
    dither("run", "--resume", "one", "-q", cwd=place, **ledger)
    finished = json.loads((place / "one" / "summary.json").read_text())
    assert stopped < finished["rounds"] == 40
    assert "stopped" not in finished
    # and it is the run that was never stopped
    dither("run", "spec.toml", "--out", "whole", "-q", cwd=place, **ledger)
    assert (place / "one" / "model.safetensors").read_bytes() == (
        place / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_bundled_sets_are_charged_only_when_asked(tmp_path):
    ledger = {"DITHER_LEDGER": str(tmp_path / "default.sqlite")}
    quick = ["--set", "data.name=breast-cancer", "--set", "num_rounds=3", "--set", "batch_size=8", "-q"]
    dither("run", "adult", *quick, "--out", "a", cwd=tmp_path, **ledger)
    assert not (tmp_path / "default.sqlite").exists()
    dither("run", "adult", *quick, "--out", "b", "--ledger", "mine.sqlite", cwd=tmp_path, **ledger)
    rows = json.loads(dither("budget", "show", "--ledger", "mine.sqlite", "--json", cwd=tmp_path).stdout)
    assert [row["client"] for row in rows] == ["every record"]
    assert float(rows[0]["spent"]) == pytest.approx(1.0, abs=0.01)


def test_a_finished_run_is_not_trained_or_charged_again(place):
    ledger = {"DITHER_LEDGER": str(place / "ledger.sqlite")}
    dither("run", "spec.toml", "--out", "one", "-q", cwd=place, **ledger)
    before = json.loads(dither_here("budget", "history", "--json", cwd=place, **ledger).stdout)
    dither_here("run", "--resume", "one", "-q", cwd=place, **ledger)
    assert json.loads(dither_here("budget", "history", "--json", cwd=place, **ledger).stdout) == before


@pytest.mark.slow
def test_another_partition_of_the_same_file_is_no_new_budget(place):
    ledger = {"DITHER_LEDGER": str(place / "ledger.sqlite")}
    dither("budget", "set", "t.csv", "--epsilon", "3", cwd=place, **ledger)
    assert dither("run", "spec.toml", "--out", "one", "-q", cwd=place, check=False, **ledger).returncode == 3
    iid = ["--set", "data.partition=iid", "--set", "num_clients=2", "--out", "two", "-q"]
    again = dither("run", "spec.toml", *iid, cwd=place, check=False, **ledger)
    assert again.returncode == 3
    assert "has spent" in again.stderr
    assert not (place / "two").exists()


def test_noise_for_a_users_own_data_comes_from_the_system(place, monkeypatch):
    monkeypatch.chdir(place)
    ledger = place / "ledger.sqlite"
    (place / "spec.toml").write_text(SPEC.replace('randomness = "seeded"\n', "").replace("= 40", "= 4"))
    models = []
    for name in ("one", "two"):
        run("spec.toml", out=name, ledger=ledger)
        models.append((place / name / "model.safetensors").read_bytes())
        assert json.loads((place / name / "provenance.json").read_text())["randomness"] == "os"
    assert models[0] != models[1]
    seeded = dither_here(
        "run", "spec.toml", "--set", "randomness=seeded", "--out", "three", cwd=place, DITHER_LEDGER=str(ledger)
    )
    assert "a simulation, not a protection" in seeded.stdout.replace("\n", " ")


@pytest.mark.slow
def test_dp_scaffold_that_stops_at_its_own_budget_says_so(tmp_path):
    quick = [
        "--set", "data.name=breast-cancer", "--set", "num_clients=4", "--set", "cohort_size=2",
        "--set", "batch_size=10",
        "--set", "local_steps=2", "--set", "data.records_per_client=0", "--set", "privacy.noise_std=0.5",
        "--set", "privacy.noise_decay_start=5", "--set", "num_rounds=60", "--set", "privacy.epsilon=20",
        "--set", "data.partition=iid",
    ]  # fmt: skip
    run = dither("run", "dp-scaffold", *quick, "--out", "run", cwd=tmp_path, check=False)
    assert run.returncode == 3, run.stdout + run.stderr
    assert "the claimed ε reaches privacy.epsilon=20 after round" in run.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["rounds"] < 60
    assert summary["epsilon"]["claimed"]["value"] <= 20
