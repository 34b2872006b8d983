"""Tests of `dither.experiment.start`: from raw tables to an evaluated model with one ε."""

import json

import pytest
from typer.testing import CliRunner

from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.data import Schema
from dither.errors import DataError, SpecError
from dither.experiment import start
from dither.experiment.account import account
from dither.experiment.evaluation import PrivateScores
from dither.experiment.private_schema import Wanted
from dither.experiment.statement import statement
from dither.experiment.statistics import Estimate
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
    needed = r"1,\d{3} records of one table share, or 5\d\d of all if they are 0/1.* largest one 1,200: declare"
    with pytest.raises(DataError, match=needed):
        start.plan_project(folder, Wanted("ill"), epsilon=0.5)
    assert "classes no, yes" in start.plan_project(folder, Wanted("ill", classes=("no", "yes"))).lines()[0][1]
    start.plan_project(folder, Wanted("age", "regression"), epsilon=0.5)
    found = start.plan_project(folder, Wanted("ill"))
    assert f"{found.least_class.usual} of all if they are 0/1, -1/1, 1/2, no/yes" in found.lines()[0][1]
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
    ],
)
def test_what_needs_only_counts_is_refused_before_anything_is_spent(folder, tmp_path, values, said):
    """A value that only the training refuses had cost the ε of the schema."""
    plan = start.plan_project(folder, Wanted("ill", classes=("no", "yes")))
    ledger = tmp_path / "ledger.sqlite"
    with pytest.raises((DataError, SpecError), match=said):
        start.start_project(plan, out=tmp_path / "out", ledger=ledger, values=values)
    assert Ledger(ledger).history() == []


@pytest.mark.parametrize(
    ("auc", "said"),
    [((0.99, 0.97, 1.0), "too good to be true"), ((0.5, 0.0, 1.0), "the noise hides"), ((0.9, 0.85, 0.95), "")],
)
def test_scores_that_let_one_doubt_the_features_are_named(auc, said):
    scores = PrivateScores({"auc": Estimate(*auc)}, {}, (), 100, 1.0, 1e-5)
    project = start.Project(None, None, scores, (), {})
    assert project.doubt.startswith(said)
    assert bool(project.doubt) == bool(said)


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
