"""Softmax regression in the way of a GPU. Its kernel is interpreted here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.accounting import exact
from dither.accounting.exact import WIDTH
from dither.data import Dataset
from dither.experiment import build
from dither.methods import local
from dither.privacy import clipping, noise, softmax
from dither.privacy.sampling import Batches
from dither.simulation.arrays import ONE_DEVICE
from dither.spec import Spec
from dither.types import Batch, Records
from tests.privacy.test_clipping import clipped_sum

FEATURES, CLASSES = 40, 5
block_sums = functools.partial(clipping.softmax_block_sums, interpret=True)


def compiled_sums(model, clip_norm):
    return jax.jit(functools.partial(block_sums, model, clip_norm=clip_norm))


@pytest.fixture
def on_gpu(monkeypatch):
    """What is compiled for a GPU, on this machine."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(clipping, "softmax_block_sums", block_sums)


def a_batch(records, seed=0):
    draw = np.random.default_rng(seed)
    params = {"out": {"w": draw.normal(size=(FEATURES, CLASSES)), "b": draw.normal(size=CLASSES)}}
    x = draw.normal(size=(records, FEATURES))
    batch = x, draw.integers(0, CLASSES, records), (draw.random(records) < 0.8) * 1.0
    types = (jnp.float32, jnp.int32, jnp.float32)
    return (
        jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params),
        tuple(jnp.asarray(a, kind) for a, kind in zip(batch, types, strict=True)),
    )


@pytest.mark.parametrize(("records", "blocks"), [(7, 1), (72, 1), (128, 2), (192, 3)])
def test_sums_of_blocks_are_those_of_a_cpu(records, blocks):
    model, (params, (x, y, weights)) = models.softmax(FEATURES, CLASSES), a_batch(records)
    x = x.at[3].set(1e30).at[4].set(jnp.inf).at[5, 2].set(jnp.nan).at[6].set(3e38)
    clip = jnp.float32(3.0)
    expected, fraction = clipped_sum(model, params, x, y, weights, clip_norm=clip)
    in_blocks = (a.reshape(blocks, -1, *a.shape[1:]) for a in (x, y, weights))
    sums, clipped, counted = compiled_sums(model, clip)(params, *in_blocks)
    assert 0 < fraction < 1
    assert float(jnp.sum(clipped) / jnp.sum(counted)) == pytest.approx(float(fraction), rel=1e-6)
    assert jnp.array_equal(counted, weights.reshape(blocks, -1).sum(1))
    for a, b in zip(jax.tree.leaves(sums), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a.sum(0), b, atol=1e-5)


def test_whatever_is_mapped_is_clipped_by_itself():
    model = models.softmax(FEATURES, CLASSES)
    (params, batch), (other, others) = a_batch(64), a_batch(64, seed=1)

    @jax.jit
    def sums(params, x, y, weights, clip):
        return block_sums(model, params, x[None], y[None], weights[None], clip_norm=clip)

    pairs = jax.tree.map(lambda a, b: jnp.stack([a, b]), (params, *batch), (other, *others))
    mapped = jax.vmap(sums)(*pairs, jnp.array([1.0, 4.0]))
    for which, one in enumerate([sums(params, *batch, 1.0), sums(other, *others, 4.0)]):
        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[which], b, atol=1e-6)


def test_a_record_moves_a_sum_by_at_most_the_clip_whatever_its_bits():
    """Each record is alone in its block: random bits, special values, numbers of all sizes."""
    model, records, clip = models.softmax(FEATURES, CLASSES), 512, 0.7
    draw = np.random.default_rng(3)
    bits = draw.integers(0, 2**32, (records, FEATURES), dtype=np.uint32).view(np.float32).copy()
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, 1e-30, 1e30, 1], np.float32)
    bits[::4] = draw.choice(special, (records // 4, FEATURES))
    bits[1::2] = draw.normal(size=(records // 2, FEATURES)) * 10 ** draw.uniform(-30, 17, (records // 2, 1))
    params, _ = a_batch(1)
    y = jnp.asarray(draw.integers(-2, CLASSES + 2, (records, 1)), jnp.int32)
    in_blocks = (jnp.asarray(bits)[:, None], y, jnp.ones((records, 1)))
    sums, _, _ = compiled_sums(model, clip)(params, *in_blocks)
    flat = np.concatenate([np.asarray(leaf, np.float64).reshape(records, -1) for leaf in jax.tree.leaves(sums)], 1)
    lengths = np.linalg.norm(flat, axis=1)
    assert np.isfinite(flat).all()
    assert lengths.max() <= clip * (1 + 1e-6)
    assert (lengths > 0.99 * clip).sum() > records / 20


def test_a_record_of_weight_zero_has_no_influence():
    model, (params, (x, y, weights)) = models.softmax(FEATURES, CLASSES), a_batch(64)
    hidden = jnp.where(weights[:, None] > 0, x, jnp.nan)
    sums = compiled_sums(model, 1.0)
    without, with_it = (sums(params, each[None], y[None], weights[None]) for each in (hidden, x))
    for a, b in zip(jax.tree.leaves(with_it), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("fixed_places", [True, False])
def test_no_record_moves_protected_sums_further_than_proved(on_gpu, fixed_places):
    """Blocks of 64 side by side: one place holds a blank, or a record of any size along or against the others."""
    features, classes, records, clip = 100, 47, 192, 0.7
    draw, model = np.random.default_rng(2), models.softmax(features, classes)
    params = jax.tree.map(lambda leaf: leaf + 0.01, model.init(jax.random.key(1)))
    assert clipping._is_large_softmax(model, params)
    x = draw.normal(size=(records, features))
    x[: records // 2] = x[0]
    sizes = np.array([0, 1, -1, 1e-3, 30, 1e20, -300])
    changed = np.where(np.arange(records)[:, None] == 70, x[0] * sizes[:, None, None], x)
    y, weights = np.zeros(records, np.int32), np.ones((len(sizes), records))
    weights[0, 70] = 0
    scale = WIDTH / (0.02 * clip)

    def integers(x, weights):
        batch = Batch(x, jnp.asarray(y), weights)
        rules = {"mode": "example", "divisor": 1.0, "clip_norm": jnp.float32(clip), "fixed_places": fixed_places}
        total = clipping.on_lattice(model, params, batch, scale=jnp.float32(scale), **rules).gradient
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])

    given = jnp.asarray(changed, jnp.float32), jnp.asarray(weights, jnp.float32)
    rows = np.asarray(jax.jit(lambda *batches: jax.lax.map(lambda one: integers(*one), batches))(*given), float)
    most = clip * (1 + exact.summed_error(clipping.norm_error(model), records, fixed_places=fixed_places)) * scale
    moved = np.linalg.norm(rows - rows[0], axis=1)
    assert 0.99 * clip * scale < moved.max() <= most + np.sqrt(rows.shape[1])
    assert np.linalg.norm(rows[:, None] - rows, axis=2).max() <= 2 * most + np.sqrt(rows.shape[1])


@pytest.mark.parametrize("batch_size", [40, 150])
def test_rounds_compiled_for_a_gpu_are_those_of_a_cpu(request, batch_size):
    """Parameters kept as their transpose, noise drawn as they lie, batches filled up to whole blocks: the same
    model to float32's rounding, also where runs and clients are mapped."""
    spec = Spec.from_any("dp-scaffold").with_values(
        {
            **{"num_clients": 4, "cohort_size": 3, "local_steps": 2, "num_rounds": 2, "client_lr": 0.5},
            **{"privacy.noise_decay_start": 0, "privacy.clip_norm": 0.5, "privacy.noise_std": 0.01},
            **{"method_options.stop_at_budget": "no", "data.records_per_client": 200, "batch_size": batch_size},
        }
    )
    draw = np.random.default_rng(0)
    x, y = draw.random((900, 100), np.float32) / 10, draw.integers(0, 47, 900).astype(np.int32)
    names, columns = tuple(map(str, range(47))), tuple(f"x{i}" for i in range(100))
    parts = (x[:800], y[:800], x[800:], y[800:])
    dataset = Dataset("made up", *parts, names, columns, (), None, None, None, (), True)

    def trained():
        experiment = build.build_experiment(spec, dataset=dataset)
        simulation = build.make_simulation(experiment, shards=ONE_DEVICE, layout="vmap")
        inputs = simulation.inputs(
            experiment.problem,
            seeds=[0, 5],
            hyper=build.hypers([experiment] * 2),
            cohorts=build.designs([experiment] * 2),
        )
        state = simulation.advance(simulation.start(inputs), inputs, 0, 2)
        return simulation.params(state, inputs), state.metrics

    expected = trained()
    request.getfixturevalue("on_gpu")
    assert softmax.is_turned((100, 47))
    for a, b in zip(jax.tree.leaves(trained()), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 0.01
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_large_matrices_with_rows_at_odd_places_are_turned_on_a_gpu_alone(on_gpu, monkeypatch):
    assert softmax.is_turned((784, 47))
    assert softmax.is_turned((47, 784))
    for other in [(784, 48), (783, 47), (113, 2), (47,), (8, 784, 47)]:
        assert not softmax.is_turned(other)
    tree = {"w": jnp.arange(784 * 47.0).reshape(784, 47), "b": jnp.arange(47.0)}
    assert softmax.turned(tree)["w"].shape == (47, 784)
    assert jnp.array_equal(softmax.turned(softmax.turned(tree))["w"], tree["w"])
    key = noise.key(4)
    lying = noise.standard_normal(key, tree)
    monkeypatch.undo()
    assert not softmax.is_turned((784, 47))
    for a, b in zip(
        jax.tree.leaves(lying), jax.tree.leaves(noise.standard_normal(key, tree)), strict=True
    ):  # the same numbers at the same places
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


CHANGES = {
    "weights": lambda batch: batch._replace(weights=batch.weights * 0),
    "labels": lambda batch: batch._replace(y=batch.y * 0),
    "records": lambda batch: batch._replace(x=1 - batch.x),
    "a part": lambda batch: type(batch)(*(each[:20] for each in batch)),
    "a part of each leaf": lambda batch: jax.tree.map(lambda each: each[:20], batch),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("protected", [False, True])
def test_what_a_step_makes_of_its_batch_is_what_is_clipped(on_gpu, change, protected):
    """The kernel fetches a batch by itself, but not where a method has changed that batch."""
    model, draw = models.softmax(100, 47), np.random.default_rng(4)
    x, y = draw.random((300, 100), np.float32), draw.integers(0, 47, 300, np.int32)
    records = Records(*map(jnp.asarray, (x, y, np.arange(300, dtype=np.int32), np.int32(0), np.int32(300))))
    batches = Batches(jnp.asarray(draw.integers(0, 300, (2, 192), np.int32)), jnp.ones((2, 192)))
    zeros = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))

    def total(batch):
        rules = {"mode": "example", "divisor": 1.0, "clip_norm": jnp.float32(0.7)}
        if not protected:
            return clipping.gradient(model, zeros, batch, **rules).gradient
        integers = clipping.on_lattice(model, zeros, batch, **rules, scale=2.0**20, fixed_places=True).gradient
        return jax.tree.map(lambda leaf: leaf / 2.0**20, integers)

    def trained(changed):
        def step(sums, batch, number):
            return jax.tree.map(jnp.add, sums, total(changed(batch))), jnp.zeros(())

        return jax.jit(lambda: local.train(zeros, records, batches, step)[0])()

    each = [Batch(*records.take(some), jnp.ones(192)) for some in batches.positions]
    expected = jax.jit(lambda: jax.tree.map(jnp.add, *(total(change(batch)) for batch in each)))()
    sums = trained(change), expected, trained(lambda batch: batch)
    for a, b, other in zip(*map(jax.tree.leaves, sums), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(other - b).max() > 0.1


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float16])
def test_records_of_any_kind_are_clipped_as_float32(kind):
    model, (params, (x, y, weights)) = models.softmax(FEATURES, CLASSES), a_batch(7)
    whole = np.abs(np.rint(10 * x)).astype(kind)
    sums = [compiled_sums(model, 1.0)(params, one[None], y[None], weights[None]) for one in (whole, whole * 1.0)]
    for a, b in zip(*map(jax.tree.leaves, sums), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_that_a_kernel_reads_are_rows_of_the_records(on_gpu):
    """XLA moves a row that is none to the nearest one. A kernel would read what lies there."""
    order = jnp.array([3, 1, 10**6, -(10**6)], jnp.int32)
    records = Records(jnp.zeros((5, 2)), jnp.zeros(5, jnp.int32), order, jnp.int32(0), jnp.int32(4))
    seen = []

    def step(carry, batch, number):
        seen.append(batch.steps.rows)
        return carry, jnp.zeros(())

    local.train({}, records, Batches(jnp.arange(4)[None], jnp.ones((1, 4))), step)
    assert seen[0].tolist() == [[3, 1, 4, 0]]
