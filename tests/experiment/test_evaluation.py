"""Tests of `dither.experiment.evaluation`: private scores from noisy counts."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics
from typer.testing import CliRunner

from dither.accounting.ledger import Ledger
from dither.cli import app
from dither.experiment import evaluation, train
from dither.experiment.counting import Counting
from tests.experiment.test_statistics import seeded


def binary_tables(count=3, records=4000):
    rng = np.random.default_rng(5)
    tables = []
    for _ in range(count):
        truth = (rng.random(records) < 0.3).astype(int)
        probability = 1 / (1 + np.exp(-(2.0 * truth - 1.5 + rng.normal(size=records))))
        predicted = (probability > 0.5).astype(int)
        tables.append(
            pd.DataFrame(
                {
                    "probability": probability,
                    "predicted": predicted,
                    "truth": truth,
                    "right": (truth == 1).astype(int),
                }
            )
        )
    return tables


def test_scores_of_two_classes_are_near_and_their_intervals_hold_the_exact_ones():
    everyone = pd.concat(binary_tables())
    exact = {
        "accuracy": metrics.accuracy_score(everyone["truth"], everyone["predicted"]),
        "auc": metrics.roc_auc_score(everyone["truth"], everyone["probability"]),
        "log_loss": metrics.log_loss(everyone["truth"], everyone["probability"]),
        "brier": metrics.brier_score_loss(everyone["truth"], everyone["probability"]),
    }
    inside = []
    for seed in range(8):
        counting = Counting(binary_tables(), 1.0, 1e-5, seeded(seed))
        scores = evaluation._classification(counting, 2, 1.0, 1e-5)
        assert scores.model["auc"].value == pytest.approx(exact["auc"], abs=0.03)
        inside += [
            scores.model[name].low - 0.003 <= value <= scores.model[name].high + 0.003
            for name, value in exact.items()
        ]
        inside.append(
            scores.trivial["accuracy"].low <= 1 - everyone["truth"].mean() <= scores.trivial["accuracy"].high
        )
        assert scores.records == len(everyone)
    assert np.mean(inside) >= 0.9
    # without noise the binned scores are the exact ones, up to the width of a bin
    silent = Counting(binary_tables(), 1.0, 1e-5, seeded(0))
    silent.mu = silent.institutions[0].mu = silent.institutions[1].mu = silent.institutions[2].mu = 1e6
    quiet = evaluation._classification(silent, 2, 1.0, 1e-5)
    for name, value in exact.items():
        assert quiet.model[name].value == pytest.approx(value, abs=0.004)


def test_scores_of_several_classes():
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 4, 9000)
    predicted = np.where(rng.random(9000) < 0.7, truth, rng.integers(0, 4, 9000))
    table = pd.DataFrame(
        {
            "probability": rng.uniform(0.3, 1.0, 9000),
            "predicted": predicted,
            "truth": truth,
            "right": (truth == predicted).astype(int),
        }
    )
    scores = evaluation._classification(Counting([table], 1.0, 1e-5, seeded(2)), 4, 1.0, 1e-5)
    assert scores.model["accuracy"].low <= np.mean(truth == predicted) <= scores.model["accuracy"].high
    assert scores.model["f1"].value == pytest.approx(metrics.f1_score(truth, predicted, average="macro"), abs=0.03)
    assert scores.trivial["accuracy"].value == pytest.approx(np.bincount(truth).max() / 9000, abs=0.03)


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
        scores = evaluation._regression(Counting([table], 1.0, 1e-5, seeded(seed)), (10.0, 30.0), 1.0, 1e-5)
        inside += [scores.model[name].low <= value <= scores.model[name].high for name, value in exact.items()]
    assert np.mean(inside) >= 0.9
    assert scores.trivial["rmse"].value == pytest.approx(20 * truth.std(), rel=0.05)
    assert (scores.epsilon, scores.delta) == (1.0, 1e-5)


def test_calibration_is_said_of_eighths_that_stand_out_of_their_noise():
    """Four bins are an eighth: noise of std 2 on each moves its count by 1.96 · 2 · √4 = 7.84."""
    cells = np.zeros((2, 32), int)
    cells[:, :4] = [[60, 80, 100, 60], [10, 20, 30, 40]]
    cells[:, 4] = [20, 11]  # 31 of 4 · 7.84 = 31.36
    cells[:, 28:] = [[0, 0, 1, 0], [25, 25, 25, 24]]
    (first, low), (last, high) = evaluation._calibration(cells, 2.0)
    assert (first, last) == (1 / 16, 15 / 16)
    assert low == pytest.approx((0.25, 0.25 - 0.0196, 0.25 + 0.0196))
    assert high == pytest.approx((0.99, 0.99 - 0.0784, 1.0))


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
    seen = table.dropna() if not classes else table[table["right"] >= 0]
    assert len(seen) == 2
    counters = []
    for frame in (table, seen):
        counter = Counting([frame], 1e6, 1e-5, seeded(0), lists_names=False)
        counter.records = 2
        counters.append(evaluation.private_scores(counter, range(classes), (0.0, 1.0), 1.0, 1e-5).model)
    assert counters[0] == counters[1]


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
    value, low, high = scores["model"]["accuracy"]
    exact = np.mean([run.evaluate(file).scores.model["accuracy"] for file in files])
    assert abs(value - exact) <= 3 * (high - low) / 2  # 5.9 standard deviations of the noise
    second = Ledger(tmp_path / "second.sqlite")
    spent = [each.epsilon for dataset in second.datasets() for each in second.spent(dataset)]
    assert spent == pytest.approx([5.0, 5.0], rel=1e-3)
