"""Tests of `dither.experiment.evaluation`: private scores from noisy counts."""

import inspect
import json

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn import metrics
from typer.testing import CliRunner

from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.experiment import counting, evaluation, private_schema, statistics, train
from dither.experiment.counting import Counting
from dither.experiment.evaluation import PrivateScores
from dither.experiment.statistics import Estimate
from dither.spec import Spec
from tests.experiment.test_statistics import seeded


def scored(odds, truth, institutions):
    """Of two classes, dealt out to institutions."""
    table = evaluation.score_columns(odds, truth, "classification", 2)
    return [table.iloc[at::institutions] for at in range(institutions)]


def balanced(rng):
    truth = (rng.random(12_000) < 0.3).astype(int)
    return 2.0 * truth - 1.5 + rng.normal(size=len(truth)), truth


def rare(rng):
    """One record in thirteen is positive, and most probabilities are small."""
    odds = rng.normal(-4.0, 2.2, 20_000)
    return odds, (rng.random(len(odds)) < expit(odds)).astype(int)


def few_values(rng):
    """Scores so close to each other that a part holds them all: in each clump the positive ones are above."""
    odds, truth = balanced(rng)
    return np.round(odds / 2) * 2 + 1e-6 * truth, truth


def exact_scores(odds, truth):
    probability = expit(odds)
    return {
        "accuracy": metrics.accuracy_score(truth, odds > 0),
        "auc": metrics.roc_auc_score(truth, odds),
        "log_loss": metrics.log_loss(truth, probability),
        "brier": metrics.brier_score_loss(truth, probability),
    }


def frequent(rng):
    odds, truth = rare(rng)
    return -odds, 1 - truth


@pytest.mark.parametrize(("made", "off"), [(balanced, 0.03), (rare, 0.05), (frequent, 0.05), (few_values, 0.2)])
def test_scores_of_two_classes_are_near_and_their_intervals_hold_the_exact_ones(made, off):
    odds, truth = made(np.random.default_rng(5))
    exact, inside, auc = exact_scores(odds, truth), {}, []
    for seed in range(12):
        counting = Counting(scored(odds, truth, 3), 1.0, 1e-5, seeded(seed), lists_names=False)
        scores = evaluation.private_scores(counting, "ab", None, 1.0, 1e-5)
        auc.append(scores.model["auc"].value)
        for name, value in exact.items():
            at = scores.model[name]
            assert 0 <= at.low <= at.value <= at.high
            inside.setdefault(name, []).append(at.low <= value <= at.high)
        inside.setdefault("trivial", []).append(
            scores.trivial["accuracy"].low
            <= max(truth.mean(), 1 - truth.mean())
            <= scores.trivial["accuracy"].high
        )
        assert scores.records == len(truth)
    assert np.abs(np.subtract(auc, exact["auc"])).max() < off
    assert np.mean(list(inside.values())) >= 0.95
    assert min(map(np.mean, inside.values())) >= 0.9
    if made is not few_values:  # where it lies at one end of what ties allow
        assert np.mean(auc) == pytest.approx(exact["auc"], abs=0.006)


@pytest.mark.parametrize("scale", [0.001, 1.0, 1000.0])
def test_without_noise_the_scores_are_exact_up_to_ties(scale):
    """Whatever the scale of the log-odds; the interval is what ties, and the ends of the parts, leave open."""
    odds, truth = rare(np.random.default_rng(5))
    quiet = Counting(scored(odds * scale, truth, 1), 1e12, 1e-5, seeded(0), lists_names=False)
    scores, exact = (
        evaluation.private_scores(quiet, "ab", None, 1.0, 1e-5).model,
        exact_scores(odds * scale, truth),
    )
    for name, value in exact.items():
        at = scores[name]
        assert at.low - 1e-3 * value <= value <= at.high + 1e-3 * value
        assert at.value == pytest.approx(value, rel=0.02)
    assert scores["auc"].high - scores["auc"].low < 0.06


@pytest.mark.parametrize("by_chance", [(-6.1, -5.7), (-4.0, 0.0), (5.7, 6.1)])
def test_a_range_that_stands_out_by_chance_or_on_one_side_cuts_nothing_off(by_chance, monkeypatch):
    """All other log-odds had counted as its ends, and the intervals did not tell."""
    odds, truth = balanced(np.random.default_rng(5))
    monkeypatch.setattr(evaluation, "zoom", lambda *_: {"score": by_chance})
    counting = Counting(scored(odds, truth, 3), 1.0, 1e-5, seeded(0), lists_names=False)
    scores = evaluation.private_scores(counting, "ab", None, 1.0, 1e-5)
    for name, value in exact_scores(odds, truth).items():
        assert scores.model[name].low <= value <= scores.model[name].high


def test_of_a_class_that_drowns_in_noise_no_auc_is_said():
    odds, truth = rare(np.random.default_rng(5))
    counting = Counting(scored(odds[:600], truth[:600], 2), 0.1, 1e-5, seeded(0), lists_names=False)
    assert evaluation.private_scores(counting, "ab", None, 0.1, 1e-5).model["auc"] == (0.5, 0.0, 1.0)


def test_scores_of_several_classes():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 4, 9000)
    predicted = np.where(rng.random(9000) < 0.7, truth, rng.integers(0, 4, 9000))
    table = pd.DataFrame(
        {
            "score": rng.uniform(0.3, 1.0, 9000),
            "predicted": predicted,
            "truth": truth,
            "right": (truth == predicted).astype(int),
        }
    )
    scores = evaluation.private_scores(Counting([table], 1.0, 1e-5, seeded(2)), "abcd", None, 1.0, 1e-5)
    assert scores.model["accuracy"].low <= np.mean(truth == predicted) <= scores.model["accuracy"].high
    assert scores.model["f1"].value == pytest.approx(metrics.f1_score(truth, predicted, average="macro"), abs=0.03)
    assert scores.trivial["accuracy"].value == pytest.approx(np.bincount(truth).max() / 9000, abs=0.03)


def test_of_several_classes_sure_predictions_are_calibrated_too():
    """Every probability lies in one of eight equal parts, also those that are nearly 1."""
    for score, said in ((0.999, 63 / 64), (0.51, 33 / 64), (0.001, 1 / 64)):
        table = pd.DataFrame({"score": [score] * 100, "predicted": 0, "truth": [0] * 80 + [1] * 20})
        table["right"] = (table["predicted"] == table["truth"]).astype(int)
        quiet = Counting([table], 1e12, 1e-5, seeded(0), lists_names=False)
        ((at, often),) = evaluation.private_scores(quiet, "abc", None, 1.0, 1e-5).calibration
        assert at == pytest.approx(said, abs=0.01)
        assert often.value == pytest.approx(0.8, abs=0.05)


def test_scores_of_a_regression():
    rng = np.random.default_rng(1)
    truth = rng.random(9000)
    predicted = np.clip(truth + rng.normal(0, 0.1, 9000), 0, 1)
    table = pd.DataFrame({"error": np.abs(predicted - truth), "truth": truth})
    exact = {
        "r2": metrics.r2_score(truth, predicted),
        "mae": 20 * metrics.mean_absolute_error(truth, predicted),
        "rmse": 20 * metrics.root_mean_squared_error(truth, predicted),
    }
    inside = []
    for seed in range(60):
        scores = evaluation.private_scores(Counting([table], 1.0, 1e-5, seeded(seed)), (), (10.0, 30.0), 1.0, 1e-5)
        inside += [scores.model[name].low <= value <= scores.model[name].high for name, value in exact.items()]
    assert np.mean(inside) >= 0.9
    assert scores.trivial["rmse"].value == pytest.approx(20 * truth.std(), rel=0.05)
    assert (scores.epsilon, scores.delta) == (1.0, 1e-5)


def test_no_interval_of_a_regression_reaches_beyond_what_is_possible():
    """R² from -20 to 17 was said."""
    table = pd.DataFrame({"error": [0.1] * 100, "truth": [0.4, 0.6] * 50})
    for seed in range(5):
        scores = evaluation.private_scores(Counting([table], 0.1, 1e-5, seeded(seed)), (), (0.0, 1.0), 0.1, 1e-5)
        assert scores.model["r2"].high <= 1.0
        assert min(scores.model["rmse"].low, scores.model["mae"].low) >= 0.0


@pytest.mark.parametrize(("bounds", "error"), [((10.0, 30.0), 5.0), (None, 0.25)])
def test_the_error_of_one_record_is_its_own(bounds, error):
    """In units of the label; without bounds, of its range."""
    table = pd.DataFrame({"error": [0.25], "truth": [0.5]})
    quiet = Counting([table], 1e12, 1e-5, seeded(0), lists_names=False)
    scores = evaluation.private_scores(quiet, (), bounds, 1.0, 1e-5).model
    assert (scores["mae"].value, scores["rmse"].value) == pytest.approx((error, error), rel=1e-3)


def test_calibration_is_said_of_eighths_that_stand_out_of_their_noise():
    """Four bins are an eighth: noise of std 2 on each moves its count by 1.96 · 2 · √4 = 7.84."""
    cells = np.zeros((2, 32), int)
    cells[:, :4] = [[60, 80, 100, 60], [10, 20, 30, 40]]
    cells[:, 4] = [20, 11]  # 31 of 4 · 7.84 = 31.36
    cells[:, 28:] = [[0, 0, -1, 0], [25, 25, 26, 25]]
    (first, low), (last, high) = evaluation._calibration(cells, 2.0, np.arange(32) / 31)
    assert first == pytest.approx((100 + 2 * 130 + 3 * 100) / 31 / 400)
    assert last == pytest.approx((28 + 29 + 30 + 31) / 31 / 4)
    assert low == pytest.approx((0.25, 0.25 - 0.0196, 0.25 + 0.0196))
    assert high == pytest.approx((1.0, 1.0 - 0.0784, 1.0))


@pytest.mark.parametrize("classes", [2, 3, 0])
def test_no_output_of_a_model_makes_counting_fail(classes):
    """A failure would tell of one record. What is no number is counted nowhere."""
    strange = np.array([np.nan, np.inf, -np.inf, 3e38, 0.0], np.float32)
    outputs = strange if classes < 3 else np.stack([strange, np.zeros(5, np.float32), strange[::-1]], 1)
    truth = np.array([0, 1, 1, 0, 1], np.int32) if classes else np.array([np.nan, 2.0, -1.0, 0.5, 1.0])
    with np.errstate(invalid="ignore"):
        table = evaluation.score_columns(outputs, truth, "classification" if classes else "regression", classes)
    if not classes:
        np.testing.assert_array_equal(table["truth"], [np.nan, 1.0, np.nan, 0.5, 1.0])  # below 0: a blank
        np.testing.assert_array_equal(table["error"], [np.nan, 0.0, np.nan, 0.5, 1.0])
    counter = Counting([table], 1.0, 1e-5, seeded(0), lists_names=False)
    scores = evaluation.private_scores(counter, range(classes), (0.0, 1.0), 1.0, 1e-5)
    assert scores.records == 5


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_a_blank_is_counted_nowhere(classes):
    """A record whose label is no class of a private schema has the label -1."""
    outputs = np.ones((4, 3)) if classes == 3 else np.ones(4)
    table = evaluation.score_columns(outputs, np.array([-1, 1, 0, -1]), "classification", classes)
    seen = table.dropna() if not classes else table[table["truth"] >= 0]
    assert len(seen) == 2
    counters = []
    for frame in (table, seen):
        counter = Counting([frame], 1e6, 1e-5, seeded(0), lists_names=False)
        counter.records = 2
        counters.append(evaluation.private_scores(counter, range(classes), (0.0, 1.0), 1.0, 1e-5).model)
    assert counters[0] == counters[1]


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_a_blank_moves_no_count_that_a_server_sees(classes):
    """Of a record and a blank in its place, a party's answers were √2 as far apart as its noise allows for."""
    outputs = np.ones((2, 3)) if classes == 3 else np.ones(2)
    tables = [
        counting.Columns(evaluation.score_columns(outputs, np.array([1, truth]), "classification", classes))
        for truth in (0, -1)
    ]
    asked = []

    class Asked(Counting):
        def total(self, question):
            asked.append(question)
            return super().total(question)

    counter = Asked([tables[0].table], 1.0, 1e-5, seeded(0), lists_names=False)
    evaluation.private_scores(counter, range(classes), (0.0, 1.0), 1.0, 1e-5)
    for question in asked:
        with_it, blanked = (counting._COUNTERS[question.kind](question, table) for table in tables)
        assert np.sum((with_it - blanked).astype(float) ** 2) <= question.touched
    assert len(asked) > 1 or not classes


def test_the_command(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 2))
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "ill": np.where(x.sum(axis=1) > 0, "yes", "no")})
    train_file, files = tmp_path / "train.csv", [tmp_path / "north.csv", tmp_path / "south.csv"]
    frame[:200].to_csv(train_file, index=False)
    for at, file in enumerate(files):
        frame[200 + 200 * at : 400 + 200 * at].to_csv(file, index=False)
    book = tmp_path / "ledger.sqlite"
    spec = {
        "method": "fedavg", "data": {"path": str(train_file), "label": "ill"},
        "num_clients": 2,
        "privacy": {"noise": "none"},
        "cohort_size": 2, "num_rounds": 5, "batch_size": 50, "local_steps": 2, "client_lr": 1.0,
    }  # fmt: skip
    run = train.run(spec, out=tmp_path / "run", ledger=book)
    options = [each for file in files for each in ("--data", str(file))]
    arguments = ["evaluate", str(run.folder), *options, "--ledger", str(tmp_path / "second.sqlite"), "--json"]
    assert CliRunner().invoke(app, arguments).exit_code != 0  # exact scores are of one file
    assert CliRunner().invoke(app, [*arguments, "--epsilon", "0"]).exit_code != 0  # and costs nothing
    assert Ledger(tmp_path / "second.sqlite").datasets() == []
    result = CliRunner().invoke(app, [*arguments, "--epsilon", "5"])
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    assert (scores["epsilon"], scores["delta"], scores["records"]) == (5.0, 1e-5, 400)
    value, low, high = scores["model"]["accuracy"]
    exact = np.mean([run.evaluate(file).scores.model["accuracy"] for file in files])
    assert abs(value - exact) <= 3 * (high - low) / 2  # 5.9 standard deviations of the noise
    second = Ledger(tmp_path / "second.sqlite")
    spent = [each.epsilon for dataset in second.datasets() for each in second.spent(dataset)]
    assert spent == pytest.approx([5.0, 5.0], rel=1e-3)


def test_an_interval_of_everything_is_no_score():
    model = {"auc": Estimate(0.5, 0.0, 1.0), "accuracy": Estimate(0.8, 0.7, 0.9)}
    scores = PrivateScores(model, {"accuracy": Estimate(0.6, 0.5, 0.7)}, (), 100, 0.3, 1e-5)
    first, second = scores.rows()
    assert (first["AUC"], first["accuracy"]) == ("hidden by the noise", "0.8 (0.7 to 0.9)")
    assert second["AUC"] == ""


@pytest.mark.parametrize(
    "function", [evaluation.evaluate_privately, statistics.statistics, private_schema.private_schema]
)
def test_by_default_delta_is_that_of_a_run_and_the_ledger_is_the_one_there_is(function):
    parameters = inspect.signature(function).parameters
    assert parameters["delta"].default == Spec().privacy.delta == 1e-5
    assert parameters["new_ledger"].default is False


def test_what_is_counted_has_the_noise_of_what_is_charged(monkeypatch):
    """Categories that are listed by name take a part of δ: charge and counts must agree whether there are any."""
    seen = []

    class Stop(Exception):
        pass

    def counts(*_, lists_names):
        seen.append(lists_names)
        raise Stop

    monkeypatch.setattr(evaluation, "Counting", counts)
    monkeypatch.setattr(evaluation, "scored_table", lambda *_, **__: None)
    monkeypatch.setattr(evaluation.counting, "digests", lambda data: [])
    monkeypatch.setattr(evaluation.counting, "charge", lambda *_, lists_names, **__: seen.append(lists_names))
    with pytest.raises(Stop):
        evaluation.evaluate_privately(None, ["north.csv"], epsilon=1.0)
    assert seen == [False, False]


def test_an_interval_is_as_wide_as_the_noise_and_what_bins_leave_open():
    """2.2 standard deviations on either side, of 200 draws, within what a score can be."""

    def scores(first, second):
        return {"mae": Estimate(float(first[0] + second[0]), 90.0, 130.0), "auc": Estimate(0.9, 0.9, 0.9)}

    counts = [np.array([70.0, 5.0]), np.array([30.0])]
    found = evaluation._estimates(counts, [3.0, 4.0], scores)
    assert found["mae"].value == 100.0
    assert found["mae"] == pytest.approx((100.0, 90.0, 130.0))  # its ends do not move with these counts
    assert found["auc"] == pytest.approx((0.9, 0.9, 0.9))

    def moving(first, second):
        total = float(first[0] + second[0])
        return {"mae": Estimate(total, total - 1, total + 2), "auc": Estimate(total / 100, 0.98, total / 100)}

    found = evaluation._estimates(counts, [3.0, 4.0], moving)
    assert 100 - found["mae"].low == pytest.approx(1 + 2.2 * 5, rel=0.12)
    assert found["mae"].high - 100 == pytest.approx(2 + 2.2 * 5, rel=0.12)
    assert found["auc"] == pytest.approx((1.0, 0.98, 1.0))  # no score is above 1
    assert evaluation._estimates(counts, [3.0, 4.0], moving) == found  # the same interval at every look


def test_scores_of_a_table_of_classes():
    table = np.array([[30.0, 10.0, 0.0], [5.0, 15.0, 0.0], [0.0, 0.0, -3.0]])  # predicted, true; noise below 0
    scores = evaluation._class_scores(table)
    assert scores["accuracy"].value == pytest.approx(42 / 57)
    assert scores["f1"].value == pytest.approx((60 / 75 + 30 / 45 - 6 / 1) / 3)
    assert evaluation._majority(np.array([35.0, 25.0, -3.0]))["accuracy"].value == pytest.approx(35 / 57)
    assert evaluation._majority(np.array([-3.0, 0.2]))["accuracy"].value == pytest.approx(0.2)


def test_ranks_are_shares_of_the_records_below():
    np.testing.assert_allclose(evaluation._ranks(np.array([2.0, 0.0, 6.0, 2.0])), [0.1, 0.2, 0.5, 0.9])
    np.testing.assert_allclose(
        evaluation._ranks(np.array([-2.0, 4.0, 8.0])), [0.0, 0.0, 0.6]
    )  # never outside 0 to 1


def test_a_score_on_one_side_of_0_is_looked_for_on_both():
    assert evaluation._both_sides((-3.0, 2.0)) == (-3.0, 2.0)
    assert evaluation._both_sides((1.0, 4.0)) == (-4.0, 4.0)
    assert evaluation._both_sides((-4.0, 0.0)) == (-4.0, 4.0)
    assert evaluation._both_sides((0.0, 2.0)) == (-2.0, 2.0)


def test_losses_of_log_odds():
    """Of a record of the first class, at the probability expit(odds) of the second."""
    odds = np.array([-3.0, 0.0, 2.0])
    np.testing.assert_allclose(evaluation._log_loss(odds), -np.log1p(-expit(odds)))
    np.testing.assert_allclose(evaluation._brier(odds), expit(odds) ** 2)
    assert evaluation._log_loss(np.array([1e9]))[0] == pytest.approx(52 * np.log(2))


def test_errors_of_a_regression_follow_from_their_sums():
    """400 records with labels in 10 to 30. In units of that range errors have mean 0.1 and mean square 0.02, and
    labels 0.5 and 0.3."""

    class Sums:
        records = 400

        def total(self, question):
            assert (question.kind, question.share) == ("sums", 1.0)
            assert (question.columns, question.ranges) == (("error", "truth"), ((0.0, 1.0),) * 2)
            each = np.array([[0.1, 0.02], [0.5, 0.3]]) * 400 * 2**16
            return [each[:1], each[1:]], 2**16 * 1.5

    model, constant, calibration = evaluation._regression(Sums(), (10.0, 30.0))
    assert model["mae"].value == pytest.approx(20 * 0.1)
    assert model["rmse"].value == pytest.approx(20 * np.sqrt(0.02))
    assert model["r2"].value == pytest.approx(1 - 0.02 / 0.05)
    assert (constant["r2"], calibration) == ((0.0, 0.0, 0.0), ())
    assert constant["rmse"].value == pytest.approx(20 * np.sqrt(0.05))
    # 2.2 standard deviations of the noise, 1.5 records' worth of 400
    assert model["mae"].high - model["mae"].value == pytest.approx(2.2 * 20 * 1.5 / 400, rel=0.12)
    assert model["mae"].value - model["mae"].low == pytest.approx(2.2 * 20 * 1.5 / 400, rel=0.12)
