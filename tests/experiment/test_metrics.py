"""Scores as scikit-learn defines them, beside the best constant prediction."""

import numpy as np
import pytest
from sklearn import metrics as reference

from dither import models
from dither.experiment import metrics


def test_scores_of_two_classes_are_scikit_learns_and_stand_beside_the_majority():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.01, 0.99, 400)
    y = (rng.uniform(size=400) < p**3).astype(np.int32)
    scores = metrics.classification_scores(np.stack([1 - p, p], 1), y, ("no", "yes"))
    assert scores.model == pytest.approx(
        {
            "accuracy": reference.accuracy_score(y, p > 0.5),
            "auc": reference.roc_auc_score(y, p),
            "average_precision": reference.average_precision_score(y, p),
            "f1": reference.f1_score(y, p > 0.5),
            "log_loss": reference.log_loss(y, p),
            "brier": reference.brier_score_loss(y, p),
        }
    )
    share = y.mean()
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert scores.trivial_predictor == "always 'no'"
    trivial = {"accuracy": 1 - share, "auc": 0.5, "average_precision": share, "f1": 0, "log_loss": entropy}
    assert scores.trivial == pytest.approx({**trivial, "brier": share * (1 - share)})
    assert np.array_equal(scores.confusion, reference.confusion_matrix(y, p > 0.5))
    assert sum(each.records for each in scores.calibration) == 400
    assert all(0 <= each.observed <= 1 for each in scores.calibration)


def test_more_classes_one_of_them_absent_and_a_network_that_says_nan():
    y = np.array([0, 1, 1, 3], np.int32)
    outputs = np.float32([[3, 0, 0, 0], [0, 3, 0, 0], [0, 3, 0, 0], [0, 0, 3, 0]])
    scores = metrics.evaluate(models.softmax(2, 4), outputs, y, classes="abcd", label_bounds=None)
    assert scores.model["accuracy"] == 0.75
    assert 0.5 < scores.model["auc"] <= 1
    assert scores.trivial["auc"] == 0.5
    outputs[0] = np.nan
    assert np.isfinite(
        list(metrics.evaluate(models.softmax(2, 4), outputs, y, classes="abcd", label_bounds=None).model.values())
    ).all()
    one = metrics.classification_scores(np.full((3, 2), 0.5), np.zeros(3, np.int32), ("a", "b"))
    assert "auc" not in one.model


def test_scores_of_a_regression_are_in_the_unit_of_the_label():
    y = np.float32([0, 0.25, 0.5, 1])
    outputs = np.float32([0.1, 0.25, 0.5, 1.7])  # predictions are kept within the bounds
    scores = metrics.evaluate(models.linear(2), outputs, y, classes=(), label_bounds=(100, 300))
    labels, predicted = [100, 150, 200, 300], [120, 150, 200, 300]
    assert scores.model["r2"] == pytest.approx(reference.r2_score(labels, predicted), abs=1e-6)
    assert scores.model["mae"] == pytest.approx(5, abs=1e-4)
    assert scores.model["rmse"] == pytest.approx(10, abs=1e-4)
    assert scores.trivial == pytest.approx({"r2": 0, "rmse": np.std(labels), "mae": 62.5}, abs=1e-4)
    assert scores.trivial_predictor == "always the mean, 187.5 (MAE: the median, 175)"


@pytest.mark.parametrize("num_classes", [2, 3, 6])
def test_every_metric_is_scikit_learns_with_ties_and_classes_that_are_never_predicted(num_classes):
    rng = np.random.default_rng(num_classes)
    for trial in range(20):
        y = rng.integers(0, num_classes, 60).astype(np.int32)
        whole = 2 ** (3 + trial % 4)  # few different probabilities: many ties
        p = rng.multinomial(whole, np.full(num_classes, 1 / num_classes), 60) / whole
        scores = metrics.classification_scores(p, y, [str(k) for k in range(num_classes)])
        binary, predicted, truth = num_classes == 2, p.argmax(axis=1), np.eye(num_classes)[y]
        columns = [1] if binary else np.unique(y)
        average = "binary" if binary else "macro"
        assert scores.model == pytest.approx(
            {
                "accuracy": reference.accuracy_score(y, predicted),
                "auc": reference.roc_auc_score(truth[:, columns], p[:, columns]),
                "average_precision": reference.average_precision_score(truth[:, columns], p[:, columns]),
                "f1": reference.f1_score(y, predicted, average=average, zero_division=0),
                "log_loss": reference.log_loss(y, p, labels=range(num_classes)),
                "brier": reference.brier_score_loss(y, p[:, 1] if binary else p, labels=range(num_classes)),
            }
        )


def test_constant_labels_have_the_r2_of_scikit_learn():
    for predicted in ([3.0, 3.0], [3.0, 4.0]):
        scores = metrics.regression_scores(np.array(predicted), np.array([3.0, 3.0]))
        assert scores.model["r2"] == reference.r2_score([3.0, 3.0], predicted)
