"""Totality: whatever bits a record, a model or a broadcast has, what leaves the clip is finite and within it."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.federation import engines
from dither.methods import prepare
from dither.privacy import clipping
from dither.simulation import engine
from dither.spec import METHODS
from dither.types import Batch
from tests.methods.test_conformance import SIZES, spec_of

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

FEATURES = 12


def _embedding():
    """A table of embeddings, a layer norm, rows through one dense layer; a weight that is used twice."""
    shapes = {"table": (5, 3), "scale": (3,), "w": (3, 3), "out": (3, 4)}

    def apply(params, x):
        rows = params["table"][jnp.clip(x[:, :4], 0, 4).astype(jnp.int32)] + x.reshape(len(x), 4, 3)
        rows = rows / (1 + jnp.abs(rows).mean(-1, keepdims=True)) * params["scale"]
        return jnp.tanh(rows @ params["w"]).sum(1) @ params["w"] @ params["out"]

    def init(key):
        return {name: 0.5 * jax.random.normal(key, shape) for name, shape in shapes.items()}

    return models.Model(init, apply)


MODELS = {
    "logistic": (models.logistic(FEATURES), 2),
    "softmax": (models.softmax(FEATURES, 4), 4),
    "mlp": (models.mlp(FEATURES, 4, (5,)), 4),
    "cnn": (models.cnn((4, 3, 1), 4, (2,), width=3), 4),
    "mlp, by rules": (models.mlp(FEATURES, 4, (5,))._replace(layers=()), 4),
    "embedding": (_embedding(), 4),
}
PRIVATE = sorted(set(METHODS) - {"fedavg", "fedprox", "scaffold"})
WORDS = [0x0, 0x1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FC0BEEF]
EDGES = [1e-45, 1e-38, 1e-30, 1e-20, 1e-19, 1.08e-19, 1.1e-19, 1e-10, 1e9, 1e18, 1.8e19, 1.85e19, 1e20, 1e30, 3e38]
# Zeros, denormals, the least normal, 1, the largest, infinity, NaNs, and where squares over- and underflow
SPECIAL = np.concatenate([np.array(WORDS, np.uint32).view(np.float32), np.array(EDGES, np.float32)])
SPECIAL = np.concatenate([SPECIAL, -SPECIAL])


def patterns(rng, *shape):
    """Random bits as float32."""
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


def strange_records(count, seed=0):
    """A third random bits, a third with special numbers among ordinary ones, a third of all magnitudes."""
    rng = np.random.default_rng(seed)
    x = patterns(rng, count, FEATURES)
    third = count // 3
    plain = rng.normal(size=(third, FEATURES)).astype(np.float32)
    x[:third] = np.where(rng.random(plain.shape) < 0.3, rng.choice(SPECIAL, plain.shape), plain)
    powers = 10.0 ** rng.uniform(-45, 38.4, (third, 1)) * rng.normal(size=(third, FEATURES))
    x[third : 2 * third] = np.clip(powers, -3.4e38, 3.4e38).astype(np.float32)
    return x


def strange_params(model, seed=0):
    """Models: as they begin, ordinary, huge, and of random bits; finite, as a node takes no others."""
    rng = np.random.default_rng(seed)
    first = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    yield first
    for factor in (1.0, 30.0, 1e18, 1e38):
        normal = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), first)
        yield jax.tree.map(lambda leaf, f=factor: np.clip(leaf * f, -3.4e38, 3.4e38).astype(np.float32), normal)
    bits = jax.tree.map(lambda leaf: patterns(rng, *leaf.shape), first)
    yield jax.tree.map(lambda leaf: np.where(np.isfinite(leaf), leaf, 1).astype(np.float32), bits)


@cache
def contributions(name, clip_norm, mode="example"):
    """Each record's part of a clipped sum, by itself."""
    model, _ = MODELS[name]

    def one(params, x, y):
        return clipping.gradient(
            model, params, Batch(x[None], y[None], jnp.ones(1)), divisor=1.0, clip_norm=clip_norm, mode=mode
        ).gradient

    return jax.jit(jax.vmap(one, (None, 0, 0)))


def norms(tree):
    return np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).reshape(len(leaf), -1).sum(1) for leaf in tree))


def check(name, clip_norm, params, x, mode="example"):
    classes = MODELS[name][1]
    found = contributions(name, clip_norm, mode)(params, x, np.arange(len(x)) % classes)
    found = jax.tree.leaves(found)
    assert all(np.isfinite(leaf).all() for leaf in found)
    assert norms(found).max() <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_record_of_any_bits_stays_inside_the_clip(name):
    """A million numbers a model (by layer rules a tenth; the rest is slow), over six sets of parameters."""
    models_of = list(strange_params(MODELS[name][0]))
    count = (10**6 if MODELS[name][0].layers else 10**5) // FEATURES // len(models_of) + 1
    for number, params in enumerate(models_of):
        check(name, 0.5, params, strange_records(count, seed=number))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), itertools.product(MODELS, ("example", "batch")))
@pytest.mark.parametrize("clip_norm", [1e-6, 1.0, 1e6])
def test_a_record_of_any_bits_stays_inside_any_clip(name, mode, clip_norm):
    for seed in range(4):
        for number, params in enumerate(strange_params(MODELS[name][0], seed)):
            check(name, clip_norm, params, strange_records(20_000, 100 * seed + number), mode)


def test_what_a_square_loses_does_not_come_back_larger():
    """d² underflows to 0 while |a| |d| is far above the clip: the norm must not be read as 0."""
    params = {"out": {"w": jnp.array([[1.0], [-1.0]]), "b": jnp.array([-44.0])}}  # e^-44 = 8e-20
    x = jnp.full((1, 2), 1.2e19)
    total, _ = clipping.example_clipped_sum(
        models.logistic(2), params, x, jnp.zeros(1, jnp.int32), jnp.ones(1), clip_norm=0.01
    )
    assert 0 < norms([leaf[None] for leaf in jax.tree.leaves(total)])[0] <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("mode", ["example", "batch"])
@pytest.mark.parametrize("name", MODELS)
def test_a_record_of_weight_zero_has_no_influence_whatever_it_is(name, mode):
    """The place of padding holds some record: amplification by sampling rests on its absence."""
    model, classes = MODELS[name]
    params = list(strange_params(model))[1]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(9, FEATURES)).astype(np.float32)
    weights = np.ones(9, np.float32)
    weights[3] = 0

    @jax.jit
    def clipped(x, y):
        return clipping.gradient(
            model, params, Batch(x, y, weights), divisor=4.0, clip_norm=0.5, mode=mode
        ).gradient

    y = np.arange(9) % classes
    plain = jax.tree.leaves(clipped(x, y))
    for row in strange_records(30):
        x[3], y[3] = row, (y[3] + 1) % classes
        for before, after in zip(plain, jax.tree.leaves(clipped(x, y)), strict=True):
            np.testing.assert_array_equal(np.asarray(after), np.asarray(before))


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_one_strange_record_leaves_the_others_as_they_are(name):
    """The clipped sum of a batch is that of its ordinary records plus what the strange one is by itself."""
    model, classes = MODELS[name]
    params = list(strange_params(model))[1]
    x = np.random.default_rng(1).normal(size=(8, FEATURES)).astype(np.float32)
    y = np.arange(8) % classes

    @jax.jit
    def clipped(x, y, weights):
        return clipping.example_clipped_sum(model, params, x, y, weights, clip_norm=0.5)[0]

    others, alone = np.ones(8), np.zeros(8)
    others[3], alone[3] = 0, 1
    for row in strange_records(40):
        x[3] = row
        both, rest, one = (jax.tree.leaves(clipped(x, y, w)) for w in (np.ones(8), others, alone))
        for a, b, c in zip(both, rest, one, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b) + np.asarray(c), rtol=1e-5, atol=1e-6)


def test_a_vector_of_any_bits_is_clipped_and_reined():
    rng = np.random.default_rng(0)
    rows = np.concatenate(
        [patterns(rng, 2000, 40), rng.choice(SPECIAL, (2000, 40)), np.zeros((1, 40), np.float32)]
    )
    tree = {"a": rows[:, :30], "b": rows[:, 30:]}
    found = jax.tree.leaves(jax.vmap(lambda v: clipping.clip(v, 3.0))(tree))
    assert all(np.isfinite(leaf).all() for leaf in found)
    assert norms(found).max() <= 3.0 * (1 + 1e-5)
    kept = jax.vmap(clipping.reined)(tree)
    for leaf, given in zip(jax.tree.leaves(kept), jax.tree.leaves(tree), strict=True):
        expected = np.where(np.isnan(given), 0, np.clip(given, -clipping.REACH, clipping.REACH))
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=2.0**-126)
    ball = jax.tree.leaves(jax.vmap(lambda v: clipping.projected(v, 3.0))(kept))
    assert norms(ball).max() <= 3.0  # a server that drops larger ones drops none of an honest client


def upload(name, model, x, y, **values):
    """A compiled client of a method, as a node has it, and the values it takes."""
    spec = spec_of(name, cohort_size=6, **{"privacy.clip": "example", "model.l2": 1e-3, **values})
    params = jax.eval_shape(model.init, jax.random.key(0))
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=models.count_params(params))
    simulation = engine.Simulation(model, prepared.build, num_clients=6, cohort_size_at=prepared.cohort_size_at)
    return engines.ClientEngine(engines.RunSettings(simulation, 0, dict(prepared.hyper)), x, y, client=1)


def check_uploads(name, kind, seeds, **values):
    model, classes = MODELS[kind]
    if name == "nbafl":
        values.pop("privacy.clip", None)
    y = (np.arange(12) % classes).astype(np.int32)
    client = None
    for seed in seeds:
        x = strange_records(36, seed)[seed % 3 :: 3]
        client = client or upload(name, model, x, y, **values)
        client.inputs = client.inputs._replace(shared=client.inputs.shared._replace(x=jnp.asarray(x)))
        rng, own = np.random.default_rng(seed), client.start()
        for index, size in enumerate((0.1, 1e10, 3e38)):
            message = [
                np.clip(rng.normal(size=shape) * size, -3.4e38, 3.4e38).astype(dtype)
                for shape, dtype in client.message_shapes
            ]
            answer = client.answer(message, own, index)
            own = answer.state
            assert answer.finite
            assert np.isfinite(answer.row).all()
            assert all(np.isfinite(leaf).all() for leaf in own)


def test_uploads_of_strange_records_are_finite():
    check_uploads("secure-fedavg", "mlp", range(12))


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["example", "batch"])
@pytest.mark.parametrize("kind", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("name", PRIVATE)
def test_uploads_of_strange_records_are_finite_with_every_method_and_model(name, kind, clip):
    check_uploads(name, kind, range(30), **{"privacy.clip": clip})
