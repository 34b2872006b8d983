"""The scikit-learn estimators."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import check_estimator

from dither import PrivateFederatedClassifier, PrivateFederatedRegressor, load

LOW = [18, 1, 10, 50, 50, 20, 10, 1, 2, 50]
HIGH = [90, 2, 60, 160, 400, 300, 120, 12, 8, 160]


def test_a_regressor_learns_over_institutions_at_the_epsilon_it_was_given(tmp_path):
    diabetes = load_diabetes(scaled=False)
    hospital = np.arange(len(diabetes.target)) % 3
    model = PrivateFederatedRegressor(
        epsilon=3.0, feature_bounds=(LOW, HIGH), label_bounds=(0, 400), random_state=0, num_rounds=60,
        ledger=tmp_path / "ledger.json",
    )  # fmt: skip
    with pytest.raises(NotFittedError):
        model.predict(diabetes.data)
    model.fit(diabetes.data, diabetes.target, groups=hospital)
    assert model.score(diabetes.data, diabetes.target) > 0.2
    assert 2.9 < model.epsilon_ <= 3.0
    assert model.report_.num_clients == 3
    assert model.report_.ledger is not None
    again = pickle.loads(pickle.dumps(model))
    predicted = again.predict(diabetes.data)
    assert np.array_equal(predicted, model.predict(diabetes.data))
    assert predicted.min() >= 0
    assert predicted.max() <= 400


def test_classes_that_were_read_from_the_labels_are_labelled_wherever_the_epsilon_goes(tmp_path):
    """The note was on the estimator's report alone: the folder, and a statement made from it, knew nothing."""
    x, y = np.random.default_rng(0).uniform(size=(60, 2)), np.repeat(["a", "b"], 30)
    for classes in (None, ["a", "b"]):
        folder = tmp_path / str(classes)
        model = PrivateFederatedClassifier(
            feature_bounds=(0, 1), classes=classes, random_state=0, num_rounds=1, out=folder,
            ledger=tmp_path / f"{classes}.sqlite", new_ledger=True,
        ).fit(x, y)  # fmt: skip
        assert set(model.predict(x)) <= {"a", "b"}
        texts = load(folder).epsilon.proven().not_covered
        assert any("classes were read" in text for text in texts) == (classes is None)


@pytest.mark.slow
def test_a_classifier_keeps_the_order_and_the_type_of_its_classes(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(600, 2))
    y = np.where(x[:, 0] > x[:, 1], "b", "a")
    model = PrivateFederatedClassifier(
        epsilon=5.0, feature_bounds=(0, 1), classes=["b", "a"], random_state=0, ledger=tmp_path / "ledger.json"
    ).fit(x, y)
    assert model.score(x, y) > 0.9
    assert list(model.classes_) == ["b", "a"]
    probabilities = model.predict_proba(x)
    assert np.array_equal(np.array(["b", "a"])[probabilities.argmax(1)], model.predict(x))
    assert np.allclose(probabilities.sum(1), 1)
    assert clone(model).get_params()["classes"] == ["b", "a"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (PrivateFederatedClassifier(), "needs feature_bounds"),
        (PrivateFederatedClassifier(feature_bounds=(1, 1)), "every low must be below its high"),
        (PrivateFederatedClassifier(feature_bounds=(0, 1), classes=[0, 2]), "not in classes"),
        (PrivateFederatedRegressor(feature_bounds=(0, 1)), "needs label_bounds"),
    ],
)
def test_bounds_that_are_not_public_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(np.random.default_rng(0).uniform(size=(20, 2)), np.arange(20) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PrivateFederatedClassifier, PrivateFederatedRegressor])
def test_scikit_learns_own_checks_pass(kind, tmp_path):
    bounds = {"label_bounds": (-100, 100)} if kind is PrivateFederatedRegressor else {}
    model = kind(
        feature_bounds=(-50, 50),
        num_rounds=2,
        random_state=0,
        ledger=tmp_path / "l.json",
        new_ledger=True,
        values={"data.id": "the tables of scikit-learn's checks, which overlap"},
        **bounds,
    )
    check_estimator(model)
