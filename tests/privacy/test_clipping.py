"""Clipping: bounded norms, the factorised sum equals the plain one, zero is handled (the rest: test_totality)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.accounting import exact
from dither.privacy import clipping
from dither.types import Batch


def clipped_sum(model, *records, clip_norm):
    """`clipping.example_clipped_sum`, compiled: operation by operation it takes several times as long."""
    return jax.jit(functools.partial(clipping.example_clipped_sum, model, clip_norm=clip_norm))(*records)


def example_gradients(model, params, x, y):
    def loss(p, one_x, one_y):
        return models.losses(model, p, one_x[None], one_y[None])[0]

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(params, x, y)


def reference(model, params, x, y, weights, clip_norm):
    """Clip and add one record after the other, in NumPy and float64."""
    per_example = example_gradients(model, params, x, y)
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), per_example)
    for i in range(len(y)):
        one = jax.tree.map(lambda leaf, i=i: np.asarray(leaf[i], np.float64), per_example)
        size = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(one)))
        factor = float(weights[i]) * min(1.0, clip_norm / size if size else 1.0)
        total = jax.tree.map(lambda a, b, f=factor: a + f * b, total, one)
    return total


def close(a, b, tolerance=1e-5):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


MODELS = {
    "logistic": (lambda: models.logistic(12), 2),
    "softmax": (lambda: models.softmax(12, 4), 4),
    "mlp": (lambda: models.mlp(12, 4, (9, 7)), 4),
    "cnn": (lambda: models.cnn((4, 3, 1), 4, (5,), width=6), 4),
}


def batch(num_classes, count=37, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(count, 12)), jnp.float32)
    y = jnp.asarray(rng.integers(0, num_classes, count))
    weights = jnp.asarray((rng.random(count) < 0.8), jnp.float32)
    return x, y, weights


def randomised(model, seed=0):
    params = jax.eval_shape(model.init, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.5, jnp.float32), params)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.3, *(pytest.param(each, marks=pytest.mark.slow) for each in (2.0, 1e6))])
def test_example_clipping_equals_the_record_by_record_sum(name, clip_norm):
    make, classes = MODELS[name]
    model = make()
    params, (x, y, weights) = randomised(model), batch(classes)
    total, fraction = clipped_sum(model, params, x, y, weights, clip_norm=clip_norm)
    close(total, reference(model, params, x, y, weights, clip_norm))
    assert 0 <= float(fraction) <= 1
    assert (float(fraction) == 0) == (clip_norm > 100)


@pytest.mark.parametrize("name", ["logistic", "softmax", "mlp"])
def test_factorised_and_generic_paths_agree(name):
    make, classes = MODELS[name]
    model = make()
    params, (x, y, weights) = randomised(model), batch(classes, count=50)
    fast, fast_fraction = clipped_sum(model, params, x, y, weights, clip_norm=0.7)
    slow, slow_fraction = clipped_sum(model._replace(layers=()), params, x, y, weights, clip_norm=0.7)
    close(fast, slow)
    assert float(fast_fraction) == pytest.approx(float(slow_fraction))


def test_one_record_never_moves_the_sum_by_more_than_the_clip():
    model = models.mlp(12, 4, (9,))
    params, (x, y, _) = randomised(model), batch(4)
    clipped = jax.jit(functools.partial(clipping.example_clipped_sum, model, params, clip_norm=0.5))
    for weight in (1e3, 1e-3):
        ones = jnp.ones(len(y))
        with_it, _ = clipped(x * weight, y, ones)
        without, _ = clipped(x * weight, y, ones.at[3].set(0))
        moved = clipping.norm(jax.tree.map(jnp.subtract, with_it, without))
        assert float(moved) <= 0.5 * (1 + 1e-4)


def test_zero_vector_is_left_alone():
    zero = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    assert all(bool(jnp.all(leaf == 0)) for leaf in jax.tree.leaves(clipping.clip(zero, 1.0)))
    # a model whose gradient is exactly zero: no features and a saturated bias
    model = models.logistic(2)
    params = {"out": {"w": jnp.zeros((2, 1)), "b": jnp.full((1,), 200.0)}}
    records = jnp.zeros((3, 2)), jnp.ones(3, jnp.int32), jnp.ones(3)
    total, _ = clipped_sum(model, params, *records, clip_norm=1.0)
    assert all(bool(jnp.all(leaf == 0)) for leaf in jax.tree.leaves(total))


def test_a_vector_within_the_clip_stays_as_it_is():
    vector = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    for clip_norm in (5.001, 6.0, 1e6):
        close(clipping.clip(vector, clip_norm), vector, 0)
    close(clipping.clip(vector, 2.5), jax.tree.map(lambda leaf: leaf / 2, vector))


@pytest.mark.parametrize("inside", [True, False])
def test_batch_clip_with_the_regulariser_inside_or_outside(inside):
    model = models.logistic(12)
    params, (x, y, weights) = randomised(model), batch(2)
    rule = {"divisor": 10.0, "clip_norm": 0.2, "mode": "batch", "l2": 0.1, "l2_inside_clip": inside}
    got = jax.jit(lambda: clipping.gradient(model, params, Batch(x, y, weights), **rule).gradient)()
    plain = jax.grad(lambda p: jnp.sum(weights * models.losses(model, p, x, y)) / 10.0)(params)
    penalty = jax.tree.map(lambda leaf: 0.2 * leaf, params)
    if inside:
        expected = clipping.clip(jax.tree.map(jnp.add, plain, penalty), 0.2)
        assert float(clipping.norm(got)) == pytest.approx(0.2, rel=1e-5)
    else:
        expected = jax.tree.map(jnp.add, clipping.clip(plain, 0.2), penalty)
        assert float(clipping.norm(got)) > 0.2
    close(got, expected)


def test_a_feature_that_is_no_number_counts_as_zero():
    model = models.softmax(12, 4)
    x = np.random.default_rng(1).normal(size=(3, 12)).astype(np.float32)
    broken, zero = x.copy(), x.copy()
    broken[1, [0, 4, 7]] = np.nan, np.inf, -np.inf
    zero[1, [0, 4, 7]] = 0.0
    params, y, ones = randomised(model), np.arange(3), np.ones(3, np.float32)
    total = jax.jit(lambda x: clipping.example_clipped_sum(model, params, x, y, ones, clip_norm=0.5)[0])
    close(total(broken), total(zero))


def test_whole_micro_batches_are_filled_up_with_records_that_count_for_nothing(monkeypatch):
    model = models.softmax(12, 4)
    params, (x, y, weights) = randomised(model), batch(4, count=40)

    def clipped(model):
        return jax.jit(lambda: clipping.example_clipped_sum(model, params, x, y, weights, clip_norm=0.7))()

    expected, fraction = clipped(model)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where a micro-batch has 32 records
    total, same = clipped(model._replace(layers=()))
    close(total, expected)
    assert float(same) == pytest.approx(float(fraction))


@pytest.mark.parametrize(("rows", "columns"), [(7, 3), (3, 7)])
def test_products_of_records_are_taken_in_full_float32(rows, columns):
    """On a CPU they always are; a GPU shortens them where the program does not say so."""
    traced = jax.make_jaxpr(clipping.product)(jnp.ones((rows, 5)), jnp.ones((rows, columns)))
    (product,) = (each for each in traced.eqns if each.primitive.name == "dot_general")
    assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("hidden", [(), (9, 7), (3,)])
def test_the_error_of_a_dense_networks_norm_follows_from_its_widest_layer(hidden):
    """Squares of the widest layer, in and out, and one term a layer (docs/privacy.md, Exact noise)."""
    sizes = [12, *hidden, 4]
    widest = max(a + b for a, b in itertools.pairwise(sizes))
    model = models.mlp(12, 4, hidden) if hidden else models.softmax(12, 4)
    assert clipping.norm_error(model) == exact.norm_error(widest + len(sizes) - 1)


def test_the_error_of_another_models_norm_follows_from_its_parameters():
    model = MODELS["cnn"][0]()
    leaves = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    count = sum(leaf.size for leaf in leaves)
    assert clipping.norm_error(model) == exact.norm_error(count + 4 * len(leaves) + 16)


def test_a_projection_stays_a_thousandth_inside_its_ball():
    tree = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    inside = clipping.projected(tree, 2.0)
    np.testing.assert_allclose(inside["a"], [3 / 5 * 2 * (1 - 2.0**-10), 0.0], rtol=1e-6)
    np.testing.assert_allclose(inside["b"], [[4 / 5 * 2 * (1 - 2.0**-10)]], rtol=1e-6)
    for radius in (0.0, 6.0):  # any radius; one that it is inside of
        close(clipping.projected(tree, radius), tree, 0)


def test_the_clipped_fraction_counts_those_that_were_longer_than_the_clip():
    """Of logistic regression at 0 a gradient is √(1 + |x|²)/2 long: 0.707, 1.118, 2.062."""
    model, x = models.logistic(1), jnp.array([[1.0], [2.0], [4.0], [9.0]])
    params, y = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0))), jnp.ones(4, jnp.int32)
    weights = jnp.array([1.0, 1.0, 1.0, 0.0])
    batch = Batch(x, y, weights)

    @functools.partial(jax.jit, static_argnames="mode")
    def fractions(clip_norm, mode):
        rule = {"divisor": 3.0, "clip_norm": clip_norm, "mode": mode, "l2": 0.0}
        whole = clipping.on_lattice(model, params, batch, scale=100.0, fixed_places=True, **rule)
        return clipping.gradient(model, params, batch, **rule).fraction, whole.fraction

    for clip_norm, fraction in ((0.7, 1.0), (1.0, 2 / 3), (2.0, 1 / 3), (2.1, 0.0)):
        np.testing.assert_allclose(fractions(clip_norm, "example"), fraction, rtol=1e-6)
    length = np.hypot(7 / 3, 1) / 2
    for clip_norm, clipped in ((length * 1.001, 0.0), (length * 0.999, 1.0)):
        assert fractions(clip_norm, "batch") == (clipped, clipped)
    none = clipping.gradient(model, params, batch, divisor=3.0, clip_norm=0.1, mode="none")
    assert float(none.fraction) == 0.0
    assert float(clipping.norm(none.gradient)) == pytest.approx(length, rel=1e-5)
