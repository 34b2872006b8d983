"""The built-in models: shapes, losses, and what `make` refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.errors import SpecError
from dither.privacy import clipping
from dither.spec import ModelSpec

SHAPES = {
    "logistic": ({"num_features": 5, "num_classes": 2}, (7,), 6),
    "softmax": ({"num_features": 5, "num_classes": 3}, (7, 3), 18),
    "linear": ({"num_features": 5, "num_classes": 0}, (7,), 6),
    "mlp": ({"num_features": 5, "num_classes": 3, "hidden": (4,)}, (7, 3), 39),
    "cnn": ({"num_features": 64, "num_classes": 3, "hidden": (2,), "image_shape": (8, 8, 1)}, (7, 3), 1175),
}


@pytest.mark.parametrize("name", models.MODELS)
def test_scores_have_one_row_a_record_and_the_parameters_are_counted(name):
    shape, scores, num_params = SHAPES[name]
    model = models.make(name, **shape)
    params = jax.eval_shape(model.init, jax.random.key(0))
    records = np.ones((7, shape["num_features"]), np.float32)
    assert jax.eval_shape(model.apply, params, records).shape == scores
    assert models.count_params(params) == num_params
    assert model.convex == (name in ("logistic", "softmax", "linear"))


def test_losses_are_the_cross_entropy_of_the_probabilities():
    y = np.array([0, 1, 1])
    for scores in (np.float32([-2, 0, 3]), np.float32([[1, 2], [0, 0], [5, -1]])):
        chosen = np.asarray(models.probabilities(scores))[np.arange(3), y]
        np.testing.assert_allclose(models.cross_entropy(scores, y), -np.log(chosen), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("logistic", {"num_classes": 3}, "is binary but the data has 3 classes; use 'softmax'"),
        ("cnn", {"image_shape": ()}, "needs images"),
        ("cnn", {"hidden": (2, 2, 2, 2)}, "4 poolings shrink an image of 8x8 to nothing"),
        ("mpl", {}, "did you mean 'mlp'"),
        ("logistic", {"num_classes": 0}, "is for classes, but the label is a number; use 'linear'"),
        ("linear", {}, "is for regression, but the label has 2 classes; use 'logistic'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(name, changes, message):
    shape = {"num_features": 64, "num_classes": 2, "image_shape": (8, 8, 1), **changes}
    with pytest.raises(SpecError) as caught:
        models.make(name, **shape)
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "changes"), [("mlp", {"hidden": (4,)}), ("cnn", {"hidden": (2,)})])
def test_networks_have_one_score_for_a_regression(name, changes):
    model = models.make(name, num_features=64, num_classes=0, image_shape=(8, 8, 1), **changes)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.eval_shape(model.apply, params, np.ones((7, 64), np.float32)).shape == (7,)


def test_squared_and_huber_losses_agree_up_to_delta_and_huber_is_linear_beyond():
    scores, y = np.float32([0.5, 0.6, 3.5]), np.float32([0.5, 0.5, 0.5])
    np.testing.assert_allclose(models.squared(scores, y), [0, 0.005, 4.5], rtol=1e-5)
    np.testing.assert_allclose(models.huber(scores, y, delta=0.2), [0, 0.005, 0.2 * (3 - 0.1)], rtol=1e-5)
    slopes = [
        jax.grad(lambda s, loss=loss: jnp.sum(loss(s, y)))(scores)
        for loss in (models.squared, ONE_SCORE["huber"].loss)
    ]
    np.testing.assert_allclose(slopes, [[0, 0.1, 3], [0, 0.1, 0.3]], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda s: models.squared(s, y[:1])[0])(np.float32([1e12])), [2.0**30])


@pytest.mark.parametrize(
    ("values", "num_classes", "message"),
    [
        ({"loss": "squared"}, 2, "model.loss='squared' does not fit a label that is a class; use 'cross-entropy'"),
        ({"loss": "cross-entropy"}, 0, "does not fit a label that is a number; use 'squared' or 'huber'"),
        ({"class_weight": (1.0, 2.0, 3.0)}, 2, "model.class_weight has 3 entries; give one for each of the 2"),
        ({"class_counts": (1.0, 2.0)}, 0, "model.class_counts has 2 entries; regression has no classes"),
    ],
)
def test_a_loss_that_does_not_fit_the_label_is_refused(values, num_classes, message):
    with pytest.raises(SpecError) as caught:
        models.with_loss(models.linear(3), ModelSpec(**values), num_classes)
    assert message in str(caught.value)


def test_class_weights_multiply_the_loss_and_public_counts_balance_it():
    scores, y = np.float32([0.3, -0.2, 1.0]), np.array([0, 1, 1])
    given = models.with_loss(models.logistic(3), ModelSpec(class_weight=(1.0, 5.0)), 2)
    np.testing.assert_allclose(
        given.loss(scores, y), models.cross_entropy(scores, y) * np.array([1, 5, 5]), rtol=1e-6
    )
    assert given.curvature == 5 / 4
    assert models.class_weights(ModelSpec(class_counts=(90.0, 10.0)), 2) == (100 / 180, 100 / 20)


ONE_SCORE = {
    "squared": models.linear(4),
    "huber": models.with_loss(models.linear(4), ModelSpec(loss="huber", huber_delta=0.3), 0),
    "cross-entropy": models.logistic(4),
    "weighted": models.with_loss(models.logistic(4), ModelSpec(class_weight=(0.5, 6.0)), 2),
    "two scores": models.softmax(4, 2),
}


@pytest.mark.parametrize("name", ONE_SCORE)
def test_steps_on_clipped_gradients_never_expand_up_to_the_rate_that_the_curvature_allows(name):
    """The condition of R6': without it the credit for the other clients' noise is not proved (docs/privacy.md)."""
    model, rng = ONE_SCORE[name], np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(1, 4)).astype(np.float32)
    rate = 2 / (model.curvature * (1 + float(np.sum(x**2))))
    y = jnp.asarray([1.0 if model.task == "regression" else 1])

    def step(params, clip_norm):
        total, _ = clipping.example_clipped_sum(model, params, x, y, jnp.ones(1), clip_norm=clip_norm)
        return jax.tree.map(lambda p, g: p - rate * g, params, total)

    def distances(one, other, clip_norm):
        apart = jax.tree.map(jnp.subtract, one, other)
        moved = jax.tree.map(jnp.subtract, step(one, clip_norm), step(other, clip_norm))
        return clipping.norm(moved), clipping.norm(apart)

    start = model.init(jax.random.key(0))
    scales = 10.0 ** rng.uniform(-2, 1.5, size=(2, 300))

    def drawn(scale):
        return jax.tree.map(lambda p: rng.normal(size=(300, *p.shape)) * scale.reshape(-1, *[1] * p.ndim), start)

    one, other = drawn(scales[0]), drawn(scales[1])
    clip_norms = 10.0 ** rng.uniform(-2, 1.5, size=300)
    after, before = jax.jit(jax.vmap(distances))(*jax.tree.map(jnp.float32, (one, other, clip_norms)))
    assert np.all(np.asarray(after) <= np.asarray(before) * (1 + 1e-5))
    ratio = np.asarray(after / before)
    assert np.max(ratio) > 0.999, "some pair keeps its distance: the bound is tight"
    assert np.min(ratio) < 0.95, "the steps do something"


@pytest.mark.parametrize("scores", [(), (1,), (3,)])
def test_scores_of_each_are_those_of_a_batch(scores):
    """Also of a model that squeezes a batch of one."""
    weights = np.linspace(-1, 1, 4 * max(scores, default=1)).reshape(4, -1).astype(np.float32)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)

    def apply(params, x):
        return (x @ params).reshape(len(x), *scores).squeeze() if scores != (1,) else x @ params

    model = models.Model(lambda key: weights, apply)
    each = models.scores_of_each(model, weights, x)
    assert each.shape == (5, *scores)
    assert np.allclose(each, apply(weights, x), atol=1e-6)
