"""What a run leaves behind says no more than its ε, and its ε is that of what happened (H6, H7, state files)."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dither
from dither.accounting.ledger.runs import Budget, Ledger
from dither.cli import app
from dither.errors import DitherError
from dither.experiment import folder as runs
from dither.experiment.account import account
from dither.experiment.report import AttackedRow
from dither.spec import Spec
from dither.types import epsilon_text
from tests.experiment.test_report import report  # noqa: F401

OWN = {
    "method": "cpfed",
    "num_clients": 4,
    "cohort_size": 2,
    "num_rounds": 6,
    "batch_size": 4,
    "batch_sampling": "poisson",
    "sampling_rate": 0.05,
    "client_lr": 0.3,
    "eval_every": 2,
    "secagg.mode": "off",
    "privacy.noise": "given",
    "privacy.noise_std": 0.5,
    "data.label": "sick",
    "data.test_fraction": 0.25,
}
CATALOGUE = {key: value for key, value in OWN.items() if not key.startswith("data.")} | {
    "data.name": "breast-cancer",
    "data.features": "all",
    "sampling_rate": 0.04,
    "randomness": "os",
}


class Killed(BaseException):
    """The process ends here."""


def write_table(path: Path, *, other: bool = False) -> Path:
    """160 patients; in the `other` world one of them has other values."""
    generator = np.random.default_rng(0)
    age, weight = generator.uniform(20, 90, 160), generator.uniform(40, 120, 160)
    sick = np.where(age + generator.normal(0, 10, 160) > 55, "yes", "no")
    if other:
        age[7], weight[7], sick[7] = 90.0, 120.0, "no"
    rows = [f"{a:.1f},{w:.1f},{s}" for a, w, s in zip(age, weight, sick, strict=True)]
    path.write_text("age,weight,sick\n" + "\n".join(rows) + "\n")
    schema = path.with_suffix(".toml")
    rest = 'standard = [60, 20]\nstandard_from = "public"\nmissing = 60\nmissing_from = "public"\n'
    schema.write_text(
        '[label]\ncolumn = "sick"\nclasses = ["no", "yes"]\nclasses_from = "public"\n'
        f'[[columns]]\nname = "age"\ntype = "numeric"\nbounds = [20, 90]\nbounds_from = "public"\n{rest}'
        f'[[columns]]\nname = "weight"\ntype = "numeric"\nbounds = [40, 120]\nbounds_from = "public"\n{rest}'
    )
    return path


def own_spec(path: Path, **values) -> Spec:
    where = {"data.path": str(path), "data.name": "", "data.schema": str(path.with_suffix(".toml"))}
    return Spec().with_values({**OWN, **where, **values})


def killed_after(evaluations: int):
    seen = []

    def stop(row):
        seen.append(row)
        if len(seen) == evaluations:
            raise Killed

    return stop


def killed_and_resumed(spec: Spec, folder: Path, **arguments):
    """Killed before its first checkpoint, killed again after it, then finished."""
    with pytest.raises(Killed):
        dither.run(spec, out=folder, checkpoint_seconds=1e9, on_evaluation=killed_after(2), **arguments)
    with pytest.raises(Killed):
        dither.run(spec, resume=folder, checkpoint_seconds=0, on_evaluation=killed_after(1), **arguments)
    return dither.run(spec, resume=folder, **arguments)


def proven(summary: dict, view: str = "upload") -> dict[str, float]:
    rows = summary["epsilon"]["proven"]
    return {r["adjacency"]: float(r["value"]) for r in rows if r["view"] == view and r["unit"] == "run"}


# H6


@pytest.mark.parametrize(("cohort_size", "decay"), [pytest.param(4, 0.7, marks=pytest.mark.slow), (2, 1.0)])
def test_a_run_killed_and_resumed_with_fresh_noise_reports_what_the_ledger_does(tmp_path, cohort_size, decay):
    """Also where cohorts differ from stretch to stretch: the ledger adds to what the most exposed client of all of
    them has revealed, not to that of each."""
    path, book = write_table(tmp_path / "t.csv"), tmp_path / "ledger.sqlite"
    schedule = {"privacy.noise_schedule": "rounds", "privacy.noise_decay": decay} if decay < 1 else {}
    spec = own_spec(path, cohort_size=cohort_size, **schedule)
    made = killed_and_resumed(spec, tmp_path / "run", ledger=book)
    ledger = Ledger(book)
    dataset = made.summary["ledger"]["dataset"]
    assert dataset in ledger.datasets()
    for adjacency, value in proven(made.summary).items():
        (spent,) = ledger.spent(dataset, delta=spec.privacy.delta, adjacency=adjacency)
        assert value == pytest.approx(spent.epsilon, rel=1e-12), adjacency
    planned = proven({"epsilon": account(spec).to_dict()})
    assert proven(made.summary)["replace-one"] > planned["replace-one"]


@pytest.mark.slow
def test_a_folder_put_back_from_a_copy_reports_what_was_released_meanwhile(tmp_path):
    """The copy knows nothing of rounds that were made after it, and makes them again with other noise."""
    path, book, folder = write_table(tmp_path / "t.csv"), tmp_path / "ledger.sqlite", tmp_path / "run"
    spec = own_spec(path, cohort_size=4, num_rounds=4)
    with pytest.raises(Killed):
        dither.run(spec, out=folder, ledger=book, checkpoint_seconds=0, on_evaluation=killed_after(1))
    shutil.copytree(folder, tmp_path / "copy")
    before = dither.run(spec, resume=folder, ledger=book)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    after = dither.run(spec, resume=folder, ledger=book)
    ledger = Ledger(book)
    (spent,) = ledger.spent(ledger.datasets()[0], delta=spec.privacy.delta, adjacency="zero-out")
    assert proven(after.summary)["zero-out"] == pytest.approx(spent.epsilon, rel=1e-12)
    assert spent.epsilon > proven(before.summary)["zero-out"]
    assert (before.repeated_rounds, after.repeated_rounds) == (0, 2)
    again = account(folder, every_recipe=True)  # computed anew: by the copy's own word alone it was smaller
    assert proven({"epsilon": again.to_dict()}) == proven(after.summary)


@pytest.mark.parametrize("more", [1.0001, pytest.param(1.1, marks=pytest.mark.slow)])
def test_rounds_that_were_undone_count_also_where_a_budget_forbids_to_make_them_again(tmp_path, more):
    """Rounds 4 and 5 were made and shown, then undone by a kill; the budget pays again for none, or for one."""
    path, book = write_table(tmp_path / "t.csv"), tmp_path / "ledger.sqlite"
    spec, folder = own_spec(path, cohort_size=4, num_rounds=8), tmp_path / "run"
    with pytest.raises(Killed):
        dither.run(spec, out=folder, checkpoint_seconds=0, on_evaluation=killed_after(2), ledger=book)
    with pytest.raises(Killed):
        dither.run(spec, resume=folder, checkpoint_seconds=1e9, on_evaluation=killed_after(1), ledger=book)
    ledger, delta = Ledger(book), spec.privacy.delta
    (dataset,) = ledger.datasets()
    (spent,) = ledger.spent(dataset, delta=delta)
    ledger.set_budget(dataset, Budget(spent.epsilon * more, delta))
    made = dither.run(spec, resume=folder, ledger=book)
    assert "stopped" in made.summary
    assert made.summary["rounds"] == (4 if more < 1.01 else 5)
    assert made.summary["repeated_rounds"] == 2
    (spent,) = ledger.spent(dataset, delta=delta)
    assert proven(made.summary)["zero-out"] == pytest.approx(spent.epsilon, rel=1e-12)


def test_seeded_rounds_made_again_are_the_same_bits_and_cost_nothing(tmp_path):
    spec = Spec().with_values({**CATALOGUE, "randomness": "seeded"})
    with pytest.raises(Killed):
        dither.run(spec, out=tmp_path / "run", checkpoint_seconds=1e9, on_evaluation=killed_after(2))
    made = dither.run(spec, resume=tmp_path / "run")
    assert "repeated_rounds" not in made.summary
    assert proven(made.summary) == proven({"epsilon": account(spec).to_dict()})


# H7


def released(folder: Path) -> dict[str, str]:
    """Everything outside local/, without the clock, the run's random name and the way to the files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or name.startswith("local/"):
            continue
        text = path.read_bytes().decode("latin-1")
        text = re.sub(r'"(seconds|started|run|head|hash|file|dataset|data_digest)": ("[^"]*"|[\d.e-]+)', "", text)
        text = re.sub(r'"timing": \{[^}]*\}', "", text)
        found[name] = text.replace(folder.name, "")
    return found


def test_where_the_model_does_not_move_released_files_of_two_worlds_are_the_same(tmp_path):
    """A rate that rounds to 0 keeps the model as it began: whatever still differs is not covered by any noise. The
    worlds differ in a training record, the only one that is clipped, and in a test record that nobody called
    public. digests.json told how long the lines with the share of clipped gradients are."""
    files, test = [], tmp_path / "test.csv"
    for world in (False, True):
        path = write_table(tmp_path / "t.csv", other=world)
        write_table(test, other=world)
        values = {"randomness": "seeded", "data.test_path": str(test), "cohort_size": 4}
        values |= {"server_optimizer": "momentum", "server_lr": 1e-60}
        values |= {"batch_sampling": "full", "sampling_rate": 0.0, "privacy.clip_norm": 0.86}
        spec, folder = own_spec(path, **values), tmp_path / f"run-{world}"
        made = dither.run(
            spec, out=folder, ledger=tmp_path / f"{world}.sqlite", new_ledger=True, checkpoint_seconds=0
        )
        files.append(released(folder))
        assert made.summary["test_accuracy"] is None
        digest = json.loads((folder / "local" / "provenance.json").read_text())["data_digest"]
        assert not any(digest in text for text in files[-1].values())
        assert made.local.train_loss > 0
        assert (runs.RunFolder(folder).local_metrics()[0]["clipped"] > 0) == world
    first, second = files
    for texts in files:  # of the files, with their times; of local ones with a key
        texts["digests.json"] = re.sub("[0-9a-f]{64}", "", texts["digests.json"])
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == set()


def test_training_records_that_are_public_make_no_test_records_public(tmp_path):
    """data.public is about data.path. Exact scores on the table of data.test_path were released with it."""
    path, test = write_table(tmp_path / "t.csv"), write_table(tmp_path / "test.csv", other=True)
    values = {"data.public": True, "data.test_path": str(test), "randomness": "seeded"}
    made = dither.run(own_spec(path, **values), out=tmp_path / "run")
    assert made.test_accuracy is made.scores is None
    assert all(row["test_accuracy"] is None for row in made.evaluations)
    declared = own_spec(path, **values, **{"data.test_public": True})
    assert dither.run(declared, out=tmp_path / "scored").test_accuracy is not None


def test_what_an_audit_of_own_records_found_is_in_no_statement(small, tmp_path):
    """It is exact, and local/ is where it lies; a statement is handed out."""
    row = {"view": "upload", "adjacency": "replace-one", "unit": "run", "delta": 1e-5, "proven": 2.0}
    row["attacked"] = {"value": 0.777, "form": "counts", "confidence": 0.95}
    for name, local in (("local/audit.json", True), ("audit.json", False)):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(small, copy)
        (copy / name).write_text(json.dumps({"rows": [row]}))
        made = dither.load(copy)
        assert made.epsilon.attacked[0].local == local
        assert ("0.777" in dither.statement(copy).to_markdown()) != local
        lines = [what for what, value in made.epsilon.lines([]) if "0.777" in value]
        assert lines == ["attacked ε, local, not private" if local else "attacked ε"]
        shown = CliRunner().invoke(app, ["account", str(copy)]).output
        assert ("(local, not" in shown) == local


@pytest.mark.slow
def test_an_audit_of_own_records_says_that_it_is_local(tmp_path):
    path = write_table(tmp_path / "t.csv")
    spec = own_spec(path, **{"randomness": "seeded"})
    outcome = dither.audit(spec, views=("upload",), trials=200, rounds=1)
    assert outcome.notes[-1].startswith("local, not private")


def test_exact_training_scores_are_not_among_the_released_metrics(small, tmp_path):
    for row in runs.RunFolder(small).metrics():
        assert set(row) <= {"round", "test_accuracy", "loss", "seconds"}
        assert row["test_accuracy"] > 0  # the catalogue's test records are public
    assert "train_loss" not in (small / "summary.json").read_text()
    assert "not private" in (small / "local" / "README").read_text()
    digests = (small / "digests.json").read_text()
    for path in small.glob("local/*.json*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() not in digests
    # What is released stands by itself.
    shutil.copytree(small, tmp_path / "released", ignore=shutil.ignore_patterns("local"))
    assert dither.load(tmp_path / "released").summary == dither.load(small).summary


# State files


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "run"
    dither.run(Spec().with_values({**CATALOGUE, "num_rounds": 2}), out=folder)
    return folder


def test_a_flipped_digit_of_epsilon_is_noticed(small, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(small, copy)
    text = (copy / "summary.json").read_text()
    value = str(proven(json.loads(text))["replace-one"])
    (copy / "summary.json").write_text(
        text.replace(value, value.replace(value[2], str((int(value[2]) + 1) % 10), 1))
    )
    with pytest.raises(DitherError, match=r"summary.json"):
        dither.load(copy)


def test_an_empty_spec_is_no_spec(small, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(small, copy)
    (copy / "spec.toml").write_text("")
    with pytest.raises(DitherError, match=r"spec.toml"):
        runs.RunFolder.open(copy).spec()


def test_exact_counts_of_own_records_are_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_table(tmp_path / "t.csv")
    asked = ["data", "describe", str(path), "--label", "sick", "--schema", str(path.with_suffix(".toml"))]
    assert "local, not private" in CliRunner().invoke(app, asked).output
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["local"] is True


def test_a_printed_bound_stays_a_bound(report):  # noqa: F811 (the fixture)
    """A proven 1.004 was printed as 1, and an attack that shows 1.006 as 1.01."""
    epsilon = report.epsilon
    table = tuple(replace(row, value=1.004) for row in epsilon.table)
    attacked = (AttackedRow(1.006, "upload", "zero-out", "run", 1e-5, "counts", 0.95, 1.004),)
    claimed = epsilon.claimed._replace(value=1.004)
    lines = replace(epsilon, table=table, attacked=attacked, claimed=claimed).lines(table)
    for what, text in lines:
        number = text.removeprefix("at least ").split(" per ")[0]
        assert number == ("1.01" if what.startswith("proven") else "1"), (what, text)
    assert {what.split(" ")[0] for what, _ in lines} >= {"proven", "attacked", "claimed"}
    rng = np.random.default_rng(0)
    for value in [*10.0 ** rng.uniform(-4, 8, 500), 0.1, 0.3, 1.0, 4, 999.7, 0.0]:
        up, down, near = (float(epsilon_text(value, rounded)) for rounded in ("up", "down", "nearest"))
        assert down <= value <= up
        assert near in (up, down)
        assert up - down <= 0.0101 * value
        assert near == float(f"{value:.3g}")
        assert epsilon_text(float(f"{value:.3g}")) == f"{value:.3g}", "three digits are printed as they are"
    assert epsilon_text(math.inf) == epsilon_text("inf") == "∞"
    assert epsilon_text(0.99961, digits=4) == "0.9997"
