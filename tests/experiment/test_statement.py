"""Tests of `dither.experiment.statement`: what a run guarantees, in plain words."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from dither.accounting.gaussian import gaussian_epsilon
from dither.accounting.ledger import Budget, Charge, Ledger
from dither.accounting.ledger.runs import EVERY_RECORD
from dither.data import Label, Numeric, Schema
from dither.data.schema import SchemaPrivacy
from dither.errors import DamagedFile, SpecError
from dither.experiment.account import NOT_HERE, spent_parts
from dither.experiment.evaluation import PrivateScores
from dither.experiment.folder import RunFolder, to_json
from dither.experiment.report import TOGETHER, LedgerCharge, SpentPart
from dither.experiment.statement import guesses_right, statement, true_positives
from dither.experiment.statistics import Estimate
from dither.types import Release, Sampling, epsilon_text
from tests.experiment.test_report import NASTY, everything, report  # noqa: F401


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_no_gaussian_attack_beats_the_stated_odds(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert guesses_right(epsilon, delta) >= norm.cdf(mu / 2)  # the best guess between N(0, 1) and N(μ, 1)
    for rate in (0.001, 0.01, 0.1, 0.5):
        assert true_positives(epsilon, delta, rate) >= norm.sf(norm.isf(rate) - mu)


def test_the_odds_are_attained_by_randomised_response():
    epsilon = math.log(3)  # tells the truth in three of four cases
    assert guesses_right(epsilon, 0.0) == pytest.approx(0.75)
    assert true_positives(epsilon, 0.0, 0.25) == pytest.approx(0.75)
    assert guesses_right(math.inf, 1e-5) == true_positives(math.inf, 1e-5, 0.1) == 1.0
    rates = np.linspace(0, 1, 101)
    assert np.all(np.diff([true_positives(1.0, 1e-5, rate) for rate in rates]) >= 0)


def test_the_statement_gives_the_proven_value_of_the_specs_adversary(report):  # noqa: F811
    text = statement(report).to_markdown()
    row = report.epsilon.main[0]
    assert f"ε = {row.value:g} and δ = 1e-05 (proven)" in text
    assert f"{epsilon_text(100 * guesses_right(row.value, row.delta))}%" in text
    assert "Floats (H3)" in text
    assert "noise comes from a seed" in text
    assert "was not charged to a ledger" in text
    assert "condition fails: every client takes part" in text
    assert "noise comes from a seed" not in statement(replace(report, randomness="os")).to_markdown()


def charge_of(report):  # noqa: F811
    """What a ledger calls a run."""
    return f"{RunFolder(report.folder).run_id()}-digest"


def test_a_ledger_that_knows_nothing_of_the_run_says_nothing_of_it(report, tmp_path):  # noqa: F811
    """Where another ledger lies at the same place, or was named by mistake, all runs came to ε = 0, in 0 runs.
    One that was put back from an old copy knows other runs on these records, and was taken for all."""
    for name in ("own", "other"):
        Ledger(tmp_path / name)
    ledger = Ledger(tmp_path / "own")
    ledger.charge("before", "table", [Charge(EVERY_RECORD, [])], rounds=(0, 1))
    old = replace(report, ledger=LedgerCharge(str(ledger.path), "table"))
    assert "The ledger own has no charge for this run" in statement(old).to_markdown()
    ledger.charge(charge_of(report), "table", [Charge(EVERY_RECORD, [])], rounds=(0, 1))
    charged = replace(report, ledger=LedgerCharge(str(ledger.path), "table"))
    assert "| table | 2 | 0 |" in statement(charged).to_markdown()
    moved = replace(charged, ledger=LedgerCharge(str(tmp_path / "other"), "table"))
    for text in (statement(moved).to_markdown(), statement(charged, ledger=tmp_path / "other").to_markdown()):
        assert "The ledger other has no charge for this run; `--ledger FILE` names the one" in text
        assert "| 0 |" not in text
    assert spent_parts(charged)
    assert not spent_parts(charged, tmp_path / "other")


def test_a_private_schema_counts_where_the_ledger_is_not(report, tmp_path):  # noqa: F811
    """On the officer's machine there is no ledger. What the schema spent was left out of ε, without a word."""
    label = Label("y", ("no", "yes"), "private")
    bounds = Numeric.with_bounds("age", (0.0, 100.0), "private")
    schema = Schema(label, (bounds,), privacy=SchemaPrivacy(0.5, 1e-6))
    schema.save(tmp_path / "schema.toml")
    row = replace(report.epsilon.proven(), adjacency="zero-out", value=2.0)
    epsilon = replace(report.epsilon, adjacency="zero-out", table=(row,))
    run = replace(
        report, folder=tmp_path, epsilon=epsilon, ledger=LedgerCharge(str(tmp_path / "gone.sqlite"), "table")
    )
    *parts, both = spent_parts(run)
    assert [part.what for part in parts] == ["schema", "training"]
    assert [part.epsilon for part in parts] == pytest.approx([0.5, 2.0], abs=1e-3)
    assert (both.epsilon, both.delta) == pytest.approx((2.5, 1.1e-5), abs=1e-3)
    assert both.terms.endswith("zero-out")
    assert both.not_covered == (NOT_HERE,)
    other = Ledger(tmp_path / "other.sqlite")  # where that ledger was, of other records
    other.set_budget("else", Budget(9.0, 1e-5))
    unknown = replace(run, ledger=LedgerCharge(str(other.path), "table"))
    assert spent_parts(unknown) == spent_parts(run)
    assert "The ledger other.sqlite has no charge for this run" in statement(unknown).to_markdown()
    for each in (run, replace(run, ledger=None), unknown):
        text = statement(each).to_markdown()
        assert f"With its private schema it is ε = {epsilon_text(both.epsilon)} at δ = 1.1e-05" in text
        assert "| schema | 0.5 | 1e-06 |" in text
    replaced = replace(
        run, epsilon=replace(epsilon, adjacency="replace-one", table=(replace(row, adjacency="replace-one"),))
    )
    assert spent_parts(replaced)[0].epsilon > 0.99  # another neighbour relation costs the schema more, too
    schema.as_public().save(tmp_path / "schema.toml")
    assert "With its private schema" not in statement(replace(report, folder=tmp_path)).to_markdown()


def test_what_was_spent_in_all_is_at_the_terms_of_the_run(report, tmp_path):  # noqa: F811
    """The budget is for blanked records and the run's ε for replaced ones: 2.7 was spent in all, and the statement
    of a run of 1.8 gave 1.6, without a word on what it was for, nor on what the filter over runs leaves open."""
    ledger, sampling = Ledger(tmp_path / "ledger.sqlite"), Sampling("poisson", 0.1, "zero-out")
    noisy = (Release("uplink", 2.0, 1.0, 20, sampling, "test"),)
    for run in ("first", charge_of(report)):  # neither registers
        ledger.charge(run, "table", [Charge(EVERY_RECORD, [(noisy, 1)])], rounds=(0, 1))
    ledger.set_budget("table", Budget(9.0, 1e-5))
    row = replace(report.epsilon.main[0], adjacency="replace-one", value=1.8)
    epsilon = replace(report.epsilon, adjacency="replace-one", table=(row,))
    charged = replace(report, epsilon=epsilon, ledger=LedgerCharge(str(ledger.path), "table"))
    text = statement(charged).to_markdown()
    total, delta = ledger.total("table", EVERY_RECORD, Budget(0.0, 1e-5, row.view, "replace-one"))
    assert total > 2.6 > 1.7 > ledger.spent("table")[0].epsilon
    assert f"comes to ε = {epsilon_text(total)} at δ = {delta:.4g} for the same guess" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| table")]
    assert line.endswith("| server sees uploads | zero-out |")
    assert "Not covered by the spent ε: a budget that was set or raised" in text
    assert "a budget that was set or raised" in spent_parts(charged)[-1].not_covered[-1]


@pytest.mark.parametrize("proved", [True, False])
def test_the_epsilon_of_one_message_is_not_that_of_the_run(report, proved):  # noqa: F811
    """A spec may ask about one message (Secure FedAvg's claim); the statement is about all of them."""
    row = report.epsilon.main[0]
    message = replace(row, unit="message", value=row.value / 4)
    rows = report.epsilon.table if proved else [replace(each, value=math.inf) for each in report.epsilon.table]
    epsilon = replace(report.epsilon, unit="message", table=(message, *rows))
    made = statement(replace(report, epsilon=epsilon))
    assert f"ε = {message.value:g} and" not in made.to_markdown()
    assert (f"ε = {row.value:g} and" in made.to_markdown()) == proved
    assert ("No guarantee is proven" in made.sections[0].answer[0]) != proved


def test_the_score_of_a_regression_is_stated(report):  # noqa: F811
    made = replace(report, classes=(), test_accuracy=None, test_r2=0.25)
    assert "R² 0.2500 on public test records" in statement(made).to_markdown()
    assert "Not stated" in statement(replace(made, test_r2=None)).to_markdown()


@pytest.mark.parametrize("place", ["run/scores.json", "project.json"])
def test_private_scores_are_stated_with_their_epsilon(report, tmp_path, place):  # noqa: F811
    """The statement of a project said "Not stated", though its score had been measured privately."""
    made = replace(report, test_accuracy=None, folder=tmp_path / "run")
    assert "Not stated" in statement(made).to_markdown()
    estimates = {"accuracy": Estimate(0.8, 0.75, 0.85), "auc": Estimate(0.5, 0.0, 1.0)}
    scores = PrivateScores(estimates, {"accuracy": Estimate(0.6, 0.55, 0.65)}, (), 600, 0.55391, 1e-5, ("a gap",))
    content = scores.to_json() if place == "run/scores.json" else to_json({"scores": scores})
    (tmp_path / place).write_text(content)
    text = statement(made).to_markdown()
    assert "| the model | 0.8 (0.75 to 0.85) | hidden by the noise |" in text
    assert "On 600 records" in text
    assert "ε of its own, 0.554 at δ = 1e-05, which adds to that of the run" in text
    assert "- Not covered by it: a gap." in text
    assert "Not stated" not in text
    assert "on public test records" in statement(replace(made, test_accuracy=0.7)).to_markdown()
    (tmp_path / place).write_text('{"scores": 1}')
    with pytest.raises(DamagedFile, match="the private scores of"):
        statement(made)


@pytest.mark.parametrize("epsilon", [1.004, 0.9951])
def test_no_bound_is_rounded_down(report, epsilon):  # noqa: F811
    table = tuple(replace(row, value=epsilon) for row in report.epsilon.table)
    text = statement(replace(report, epsilon=replace(report.epsilon, table=table))).to_markdown()
    stated = re.search(r"right in at most ([\d.]+)% .* differential privacy with ε = ([\d.]+) ", text)
    odds, value = map(float, stated.groups())
    assert value >= epsilon
    assert odds >= 100 * guesses_right(epsilon, table[0].delta)
    assert f"| proven | {value:g} |" in text


def test_no_proof_is_said_first(report):  # noqa: F811
    table = tuple(replace(row, value=math.inf, recipe="no proof") for row in report.epsilon.table)
    made = statement(replace(report, epsilon=replace(report.epsilon, table=table)))
    assert made.sections[0].answer[0].startswith("No guarantee is proven")
    assert "an attacker may be certain" in made.to_markdown()
    assert "No noise protects" in made.to_markdown()


def test_an_assumed_value_and_a_trusted_server_are_named(report):  # noqa: F811
    table = tuple(
        replace(row, value=math.inf) if row.view == "upload" else replace(row, assumed=True)
        for row in report.epsilon.table
    )
    epsilon = replace(report.epsilon, table=table, view="broadcast")
    text = statement(replace(report, epsilon=epsilon)).to_markdown()
    assert "(assumed, not proven)" in text
    assert "must be trusted" in text


def test_one_institution(report):  # noqa: F811
    federated = everything(report)
    assert "north" in statement(federated, party="north").to_markdown()
    with pytest.raises(SpecError, match="its parties are north"):
        statement(federated, party="west")
    with pytest.raises(SpecError, match="simulated"):
        statement(report, party="north")


def test_what_a_federation_counted_besides_training_is_added(report):  # noqa: F811
    report = replace(everything(report), ledger=None)
    total = 3.0 + report.epsilon.main[0].value
    parts = (("statistics", 2.5), ("training", total - 3.0), (TOGETHER, total))
    split = tuple(SpentPart(what, epsilon, 1e-5) for what, epsilon in parts)
    report = replace(report, federation=replace(report.federation, split=split))
    assert spent_parts(report) == split
    text = statement(report).to_markdown()
    assert f"the server knows about these records comes to ε = {epsilon_text(total)}" in text
    assert "| statistics | 2.5 |" in text


def test_files(report, tmp_path):  # noqa: F811
    made = statement(replace(report, method=NASTY))
    for ending in ("md", "html", "pdf", "json"):
        content = made.save(tmp_path / f"statement.{ending}").read_bytes()
        assert len(content) > 1000
        with pytest.raises(SpecError, match="nothing is overwritten"):
            made.save(tmp_path / f"statement.{ending}")
    assert (tmp_path / "statement.pdf").read_bytes().startswith(b"%PDF")
    assert "<script>" not in (tmp_path / "statement.html").read_text()
    assert len(json.loads((tmp_path / "statement.json").read_text())["sections"]) == len(made.sections)
    with pytest.raises(SpecError, match="must end in one of"):
        made.save(tmp_path / "statement.doc")
    with pytest.raises(SpecError, match="does not exist"):
        made.save(tmp_path / "none" / "statement.md")
