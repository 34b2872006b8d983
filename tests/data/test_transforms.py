"""Public features: fixed, of each record by itself, bounded, and the same wherever a spec names them."""

import numpy as np
import pytest

from dither import data, run
from dither.errors import DataError, SpecError
from dither.experiment.build import build_experiment
from dither.spec import Spec

PICTURES = np.random.default_rng(0).random((300, 64)).astype(np.float32)


@pytest.mark.parametrize("name", ["unit", "scattering", "random", "scattering-random"])
def test_features_follow_from_one_record_and_have_a_bounded_norm(name):
    features = data.transform(PICTURES, name)
    changed = PICTURES.copy()
    changed[7] = 1 - changed[7]
    other = data.transform(changed, name)
    assert np.flatnonzero((other != features).any(1)).tolist() == [7]
    np.testing.assert_allclose(data.transform(PICTURES[150:151], name)[0], features[150], atol=1e-6)
    extreme = np.concatenate([PICTURES, np.zeros((1, 64), np.float32), 1e6 * PICTURES, -PICTURES])
    norms = np.linalg.norm(data.transform(extreme, name).astype(np.float64), axis=1)
    assert 0.5 < norms[0] <= norms.max() <= data.NORM_BOUND


def test_random_features_approximate_the_kernel():
    x = np.eye(2, 64, dtype=np.float32) + np.eye(1, 64, dtype=np.float32)  # (2, 0, ...) and (1, 1, 0, ...)
    gram = 2 * data.transform(x, "random") @ data.transform(x, "random").T
    squared = 2 - 2 * np.sqrt(0.5)  # distance of the two with a norm of 1
    np.testing.assert_allclose(gram, np.exp(-2 * squared * (1 - np.eye(2))), atol=0.1)


def test_values_without_finite_features_are_refused():
    with pytest.raises(DataError, match=r"record 1 has no finite scattering features"):
        data.transform(np.stack([PICTURES[0], np.full(64, 3e38, np.float32)]), "scattering")
    with pytest.raises(DataError, match="not for records of 30 features"):
        data.transform(PICTURES[:, :30], "scattering")


SPEC = {
    "method": "dp-sgd",
    "data.name": "digits",
    "data.transform": "scattering",
    "model.name": "softmax",
    "num_clients": 4,
    "cohort_size": 4,
    "num_rounds": 2,
    "local_steps": 1,
    "batch_size": 64,
    "randomness": "seeded",
    "compare": False,
}


def test_a_run_trains_and_predicts_on_the_features(tmp_path):
    report = run(SPEC, out=tmp_path / "run")
    digits = data.load("digits")
    assert report.num_features == data.transform(digits.x_test, "scattering").shape[1] != 64
    predicted = np.asarray(report.predict(digits.x_test), int)  # pixels, as they are without a transform
    assert np.mean(predicted == digits.y_test) == pytest.approx(report.accuracy, abs=1e-6)
    np.savez(tmp_path / "new.npz", x=digits.x_test, y=digits.y_test)
    np.testing.assert_array_equal(np.asarray(report.predict(tmp_path / "new.npz"), int), predicted)


def test_a_transform_is_part_of_the_spec_and_bounds_the_smoothness():
    spec = Spec.from_any(
        {**SPEC, "data.name": "breast-cancer", "model.name": "logistic", "privacy.clip": "example"}
    )
    plain, other = (spec.with_values({"data.transform": name}) for name in ("none", "random"))
    assert plain.digest() != other.digest()
    assert build_experiment(other).plan.smoothness == pytest.approx(2 / 4, rel=1e-4)  # (1 + 1) of a sigmoid
    with pytest.raises(SpecError, match=r"privacy\.project_epsilon"):
        other.with_values({"privacy.project_epsilon": 1.0})
