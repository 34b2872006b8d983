"""Tests of `dither.experiment.start`: from raw tables to an evaluated model with one ε."""

import errno
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dither.accounting.ledger import Ledger
from dither.cli import app, runs
from dither.data import Schema
from dither.errors import BudgetExhausted, DataError, SpecError
from dither.experiment import evaluation, start
from dither.experiment import folder as folders
from dither.experiment.account import account
from dither.experiment.evaluation import PrivateScores
from dither.experiment.private_schema import Wanted
from dither.experiment.report import TOGETHER, SpentPart
from dither.experiment.statement import statement
from dither.experiment.statistics import Estimate, statistics
from dither.spec import Spec
from dither.web.files import SafeFolder
from tests.experiment.test_private_schema import clinic


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "clinics").mkdir()
    for seed, name in enumerate(("north", "south")):
        table = clinic(1200, seed)
        table.loc[:9, "ill"] = ["maybe", ""] * 5  # no classes of a private schema: such records are blanks
        table.to_csv(tmp_path / "clinics" / f"{name}.csv", index=False)
    return tmp_path / "clinics"


def test_a_plan_needs_headers_and_counts_alone(folder, monkeypatch):
    monkeypatch.setattr(start, "private_schema", lambda *_: pytest.fail("looked"))
    ill = Wanted("ill", classes=("no", "yes"))
    plan = start.plan_project(folder, ill)
    assert plan.records == (1200, 1200)
    budgets = plan.budgets
    assert (budgets.epsilon, budgets.delta) == (1.0, 1e-5)
    assert budgets.schema < budgets.evaluation < budgets.training < 1.0
    assert budgets.schema + budgets.evaluation + budgets.training > 1.0  # they compose better than they add up
    assert start.plan_project(folder, ill, delta=1e-7).budgets.delta == 1e-7
    with pytest.raises(SpecError, match="add up to 1"):
        start.plan_project(folder, ill, shares=(0.5, 0.5, 0.5))
    with pytest.raises(DataError, match="label column 'il'"):
        start.plan_project(folder, Wanted("il"))


def test_classes_that_cannot_be_found_are_asked_for_before_anything_is_spent(folder, tmp_path):
    needed = r"1,\d{3} records of one table have it, or 5\d\d of all tables for 0/1.* largest one 1,200: declare"
    with pytest.raises(DataError, match=needed):
        start.plan_project(folder, Wanted("ill"), epsilon=0.5)
    assert (
        "classes no, yes"
        in dict(start.plan_project(folder, Wanted("ill", classes=("no", "yes"))).lines())["label"]
    )
    start.plan_project(folder, Wanted("age", "regression"), epsilon=0.5)
    found = start.plan_project(folder, Wanted("ill"))
    assert f"{found.least_class.usual} of all tables for 0/1, -1/1, 1/2, no/yes" in dict(found.lines())["label"]
    assert found.least_class.usual <= 2400 / 5 < found.least_class.named  # so that other names than these are not
    declared = start.plan_project(folder, Wanted("ill", classes=("no", "yes")))
    (tmp_path / "federation.toml").write_text(start.federation_toml(declared, {}))
    assert Spec.from_any(tmp_path / "federation.toml").data.class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": 5000}, "batch_size=5000 exceeds the 1920 training records"),
        ({"data.records_per_client": 5000}, "records_per_client=5000"),
        ({"data.test_fraction": 0.0}, "leaves no record for the evaluation"),
        ({"data.public": True}, "'data.public' follows"),
        ({"data.test_public": True}, "'data.test_public' follows"),
    ],
)
def test_what_needs_only_counts_is_refused_before_anything_is_spent(folder, tmp_path, values, said):
    """A value that only the training refuses had cost the ε of the schema."""
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")))
    ledger = tmp_path / "ledger.sqlite"
    with pytest.raises((DataError, SpecError), match=said):
        start.start_project(plan, out=tmp_path / "out", ledger=ledger, values=values)
    assert Ledger(ledger).history() == []


def test_a_column_that_only_some_tables_have_is_named_before_anything_is_spent(folder, tmp_path):
    """It was left out without a word: one hospital's other spelling cost a feature."""
    south = clinic(1200, 1).rename(columns={"age": "Age"})
    south.to_csv(folder / "south.csv", index=False)
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")))
    assert [value for what, value in plan.lines() if what == "left out"] == [
        "column 'age' is not in every table: 1 of 2",
        "column 'Age' is not in every table: 1 of 2",
    ]
    arguments = ["data", "schema", str(folder), "--label", "ill", "--private", "--epsilon", "8"]
    places = ["--out", str(tmp_path / "schema.toml"), "--ledger", str(tmp_path / "ledger.sqlite")]
    printed = CliRunner().invoke(app, [*arguments, *places]).output
    assert "left out: 'Age' is not in every table: 1 of 2\n" in printed


def test_a_refused_start_sets_no_budget(folder, tmp_path):
    """Records that another ledger knows were refused after each file had its budget, which bound what followed."""
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")))
    book = Ledger(tmp_path / "ledger.sqlite")
    statistics(list(plan.files), epsilon=0.1, ledger=tmp_path / "known.sqlite")
    with pytest.raises(DataError, match="--new-ledger"):
        start.start_project(plan, out=tmp_path / "out", ledger=book.path)
    assert book.history() == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("auc", "said"),
    [((0.99, 0.97, 1.0), "too good to be true"), ((0.5, 0.0, 1.0), "the noise hides"), ((0.9, 0.85, 0.95), "")],
)
def test_scores_that_let_one_doubt_the_features_are_named(auc, said):
    scores = PrivateScores({"auc": Estimate(*auc)}, {}, (), 100, 1.0, 1e-5)
    project = start.Project(None, None, scores, (), {})
    assert project.doubt.startswith(said)
    assert bool(project.doubt) == bool(said)


def test_one_epsilon_does_not_cover_what_another_ledger_was_charged(tmp_path, capsys):
    """With --new-ledger it was said to cover all of it."""
    split = SpentPart("training", 0.9, 1e-5), SpentPart(TOGETHER, 1.0, 1e-5, "", ("another ledger's account",))
    scores = PrivateScores({}, {}, (), 500, 0.2, 1e-5)
    report = SimpleNamespace(epsilon=SimpleNamespace(main=[]), advice=(), local=SimpleNamespace(advice=()))
    runs._print_project(start.Project(tmp_path, report, scores, split, {}))
    said = capsys.readouterr().out
    assert "covers all of it, except the following\nnot covered: another ledger's account\n" in said
    split = split[0], split[1]._replace(not_covered=())
    runs._print_project(start.Project(tmp_path, report, scores, split, {}))
    assert "covers all of it\n" in capsys.readouterr().out


def test_the_header_proposes_a_label(folder, tmp_path):
    assert start.propose_label(folder) == ("ill", list(clinic(1).columns))  # the last column
    clinic(20).rename(columns={"year": "Outcome"}).to_csv(tmp_path / "one.csv", index=False)
    assert start.propose_label(tmp_path / "one.csv")[0] == "Outcome"


def test_one_epsilon_covers_everything(folder, tmp_path):
    out, book = tmp_path / "out", tmp_path / "ledger.sqlite"
    arguments = [
        "start",
        str(folder),
        "--yes",
        "--epsilon",
        "6",
        "--out",
        str(out),
        "--ledger",
        str(book),
        "--json",
    ]
    quick = ["--set", "num_rounds=4", "--set", "local_steps=1", "--drop", "copy", "--drop", "number_copy"]
    result = CliRunner().invoke(app, [*arguments, *quick, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [part["what"] for part in facts["split"]] == ["schema", "training", "evaluation", "everything together"]
    *parts, together = (part["epsilon"] for part in facts["split"])
    assert 0.99 * 6 < together <= 6.0
    assert max(parts) < together < sum(parts)
    assert facts["scores"]["records"] == 480
    assert Schema.load(out / "schema.toml").covered
    report = account(out / "run")
    assert [part.epsilon for part in report.split] == pytest.approx([*parts, together])
    assert not any("split" in text or "preprocessing" in text for text in report.epsilon.main[0].not_covered)
    text = statement(out / "run").to_markdown()
    assert "| 3 |" in text  # three runs on each file
    assert f"comes to ε = {together:.3g}" in text
    assert list(SafeFolder(tmp_path).runs()) == ["out/run"]  # what the page shows
    # the budget of every file is spent: nothing more can be taken from it
    ledger = Ledger(book)
    assert {spent.budget.epsilon for each in ledger.datasets() for spent in ledger.spent(each)} == {6.0}
    more = ["stats", str(folder / "north.csv"), "--epsilon", "0.5", "--ledger", str(book)]
    assert CliRunner().invoke(app, more).exit_code != 0
    with pytest.raises(SpecError, match="nothing is overwritten"):
        start.start(folder, label="ill", classes=("no", "yes"), out=out, ledger=book)
    with pytest.raises(DataError, match="has spent ε before"):
        start.start(folder, label="ill", classes=("no", "yes"), out=tmp_path / "second", ledger=book)
    assert not (tmp_path / "second").exists()


def test_an_interrupted_project_is_continued_by_the_same_command(folder, tmp_path, monkeypatch):
    """It had been lost: the schema's ε was spent, and no command took up its folder."""
    out, book = tmp_path / "out", tmp_path / "ledger.sqlite"
    wanted = Wanted("ill", classes=("no", "yes"), drop=("copy", "number_copy"))
    plan = start.plan_project(folder, wanted, epsilon=6.0)
    values = {"num_rounds": 4, "local_steps": 1, "eval_every": 1, "randomness": "seeded"}

    def begin(out=out, values=values, **options):
        return start.start_project(plan, out=out, ledger=book, values=values, **options)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    whole = start.start_project(plan, out=tmp_path / "whole", ledger=tmp_path / "other.sqlite", values=values)
    for options in (
        {"on_start": interrupt},
        {"on_evaluation": interrupt},
    ):  # before the first round, in the rounds
        with pytest.raises(KeyboardInterrupt):
            begin(**options, new_ledger=True)
        assert (out / start.BEGUN).is_file()
    with pytest.raises(SpecError, match="begun with other --set; repeat the command that began it"):
        begin(values={**values, "num_rounds": 5})
    with pytest.raises(SpecError, match="begun with other records or another ledger"):
        start.start_project(plan, out=out, ledger=tmp_path / "third.sqlite", values=values, new_ledger=True)
    monkeypatch.setattr(start, "private_schema", lambda *_: pytest.fail("spent twice"))
    with monkeypatch.context() as patch:  # after the evaluation
        patch.setattr(start, "spent_parts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begin(new_ledger=True, on_checked=lambda: pytest.fail("asked twice"))
    charges = len(Ledger(book).history())
    monkeypatch.setattr(start, "evaluate_privately", lambda *_, **__: pytest.fail("evaluated twice"))
    project = begin(new_ledger=True)
    assert len(Ledger(book).history()) == charges
    assert project.scores == whole.scores
    assert project.excluded == whole.excluded
    assert [part.epsilon for part in project.split] == pytest.approx([part.epsilon for part in whole.split])
    assert sorted(file.name for file in out.iterdir()) == ["federation.toml", "project.json", "run", "schema.toml"]
    with pytest.raises(SpecError, match="nothing is overwritten"):
        begin()


def test_an_evaluation_that_was_charged_and_lost_is_not_repeated_for_free(folder, tmp_path, monkeypatch):
    wanted = Wanted("ill", classes=("no", "yes"), drop=("copy", "number_copy"))
    plan = start.plan_project(folder, wanted, epsilon=6.0)

    def begin():
        values = {"num_rounds": 4, "local_steps": 1, "eval_every": 1}
        return start.start_project(plan, out=tmp_path / "out", ledger=tmp_path / "ledger.sqlite", values=values)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "private_scores", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            begin()
    with pytest.raises(BudgetExhausted, match=r"is trained but not evaluated: .* of its budget ε=6"):
        begin()


def test_a_folder_that_cannot_be_made_costs_nothing(folder, tmp_path):
    (tmp_path / "file").write_text("")
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")), epsilon=6.0)
    book = tmp_path / "ledger.sqlite"
    with pytest.raises(NotADirectoryError):
        start.start_project(plan, out=tmp_path / "file" / "out", ledger=book, values={"num_rounds": 4})
    assert not [entry for entry in Ledger(book).history() if entry.kind in ("charge", "budget")]


def test_a_full_disk_costs_nothing(folder, tmp_path, monkeypatch):
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")), epsilon=6.0)

    def full(path, data):
        monkeypatch.setattr(folders.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        folders.write_bytes(path, data)

    monkeypatch.setattr(start, "write_bytes", full)
    book = tmp_path / "ledger.sqlite"
    with pytest.raises(OSError, match="full") as refusal:
        start.start_project(plan, out=tmp_path / "out", ledger=book, values={"num_rounds": 4})
    monkeypatch.undo()
    assert refusal.value.filename == str(tmp_path / "out" / "room")
    assert not (tmp_path / "out").exists()
    assert not [entry for entry in Ledger(book).history() if entry.kind in ("charge", "budget")]


def test_ctrl_c_names_the_command_that_continues(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["start", str(folder), "--classes", "no,yes", "--epsilon", "6", "--ledger", "book.sqlite"]
    monkeypatch.setattr("sys.argv", ["dither", *arguments])
    monkeypatch.setattr(start, "training_spec", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(start, "_rehearse", lambda *_: None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    made = next((tmp_path / "runs").iterdir()).relative_to(tmp_path)
    assert f"continue with: dither {' '.join(arguments)} --out {made} --label ill" in result.stderr
