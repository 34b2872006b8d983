"""The built-in models: shapes, losses, and what `make` refuses."""

import jax
import numpy as np
import pytest

from dither import models
from dither.errors import SpecError

SHAPES = {
    "logistic": ({"num_features": 5, "num_classes": 2}, (7,), 6),
    "softmax": ({"num_features": 5, "num_classes": 3}, (7, 3), 18),
    "mlp": ({"num_features": 5, "num_classes": 3, "hidden": (4,)}, (7, 3), 39),
    "cnn": ({"num_features": 64, "num_classes": 3, "hidden": (2,), "image_shape": (8, 8, 1)}, (7, 3), 1175),
}


@pytest.mark.parametrize("name", models.MODELS)
def test_scores_have_one_row_a_record_and_the_parameters_are_counted(name):
    shape, scores, num_params = SHAPES[name]
    model = models.make(name, **shape)
    params = model.init(jax.random.key(0))
    assert model.apply(params, np.ones((7, shape["num_features"]), np.float32)).shape == scores
    assert models.count_params(params) == num_params
    assert model.convex == (name in ("logistic", "softmax"))


def test_losses_are_the_cross_entropy_of_the_probabilities():
    y = np.array([0, 1, 1])
    for scores in (np.float32([-2, 0, 3]), np.float32([[1, 2], [0, 0], [5, -1]])):
        chosen = np.asarray(models.probabilities(scores))[np.arange(3), y]
        np.testing.assert_allclose(models.score_losses(scores, y), -np.log(chosen), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("logistic", {"num_classes": 3}, "is binary but the data has 3 classes; use 'softmax'"),
        ("cnn", {"image_shape": ()}, "needs images"),
        ("cnn", {"hidden": (2, 2, 2, 2)}, "4 poolings shrink an image of 8x8 to nothing"),
        ("mpl", {}, "did you mean 'mlp'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(name, changes, message):
    shape = {"num_features": 64, "num_classes": 2, "image_shape": (8, 8, 1), **changes}
    with pytest.raises(SpecError) as caught:
        models.make(name, **shape)
    assert message in str(caught.value)
