"""Exact noise (R7): in float32, no record moves the integers that noise is added to by more than is proved, and no
record changes the bits of another one's contribution."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.accounting import exact
from dither.accounting.exact import WIDTH
from dither.privacy import clipping, lattice, noise
from dither.types import Batch
from tests.privacy.test_totality import FEATURES, MODELS, strange_records

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

CLIP = 0.7
WIDE = models.mlp(FEATURES, 3, (40, 24))


def on_lattice(model, params, mode, step, fixed_places, divisor=1.0):
    """(x, y, weights) -> the integers of a batch, in one row."""

    def integers(x, y, weights):
        found = clipping.on_lattice(
            model, params, Batch(x, y, weights), divisor=jnp.float32(divisor), clip_norm=jnp.float32(CLIP),
            mode=mode, scale=1 / step, fixed_places=fixed_places,
        )  # fmt: skip
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found.gradient)])

    return jax.jit(lambda xs, ys, ws: jax.lax.map(lambda one: integers(*one), (xs, ys, ws)))


def batches(count, classes, seed, variants):
    """A batch with one place that holds, in turn, a blank and all sorts of records; the others stay."""
    rng = np.random.default_rng(seed)
    others = rng.normal(size=(count, FEATURES)).astype(np.float32) * rng.choice([0.05, 1.0, 30.0], (count, 1))
    others[: count // 4] = others[0]  # alike: their sum is long
    strange = strange_records(variants - 4, seed)
    loud = others[0] * np.array([[1.0], [-1.0], [300.0]], np.float32)  # along the sum, against it, far along it
    x = np.repeat(others[None], variants, 0).astype(np.float32)
    x[:, count // 2] = np.concatenate([np.zeros((1, FEATURES), np.float32), strange, loud.astype(np.float32)])
    y = np.repeat(rng.integers(0, classes, (1, count)), variants, 0).astype(np.int32)
    y[1:, count // 2] = np.arange(variants - 1) % classes
    weights = np.ones((variants, count), np.float32)
    weights[0, count // 2] = 0.0
    return x, y, weights


def furthest(rows):
    """The largest distance from the first row, and between any two."""
    rows = rows.astype(np.float64)
    squares = np.sum(rows**2, 1)
    between = np.sqrt(np.maximum(squares[:, None] + squares - 2 * rows @ rows.T, 0)).max()
    return np.linalg.norm(rows - rows[0], axis=1).max(), between


def check_movement(name, count, fixed_places, multiplier):
    model, classes = {**MODELS, "wide": (WIDE, 3)}[name]
    params = jax.tree.map(lambda leaf: leaf + 0.01, model.init(jax.random.key(1)))
    dimension = models.count_params(params)
    step = np.float32(multiplier * CLIP / WIDTH)
    x, y, weights = batches(count, classes, seed=count, variants=40)
    rows = np.asarray(on_lattice(model, params, "example", step, fixed_places)(x, y, weights))
    reach = CLIP * (1 + clipping.norm_error(model)) / float(step)
    error = exact.sum_error(count, fixed_places=fixed_places)
    blanked, replaced = furthest(rows)
    assert blanked <= reach * (1 + error) + np.sqrt(dimension)
    assert replaced <= 2 * reach * (1 + error) + np.sqrt(dimension)
    if np.abs(rows).max() < lattice.REACH:  # some record uses all of the clip
        assert blanked > 0.99 * CLIP / float(step)


@pytest.mark.parametrize(("name", "fixed_places"), [("mlp", False), ("mlp", True), ("cnn", True)])
def test_no_record_moves_the_integers_further_than_proved(name, fixed_places):
    check_movement(name, 150, fixed_places, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "wide"])
@pytest.mark.parametrize(("count", "fixed_places"), [(7, False), (150, False), (150, True), (700, True)])
@pytest.mark.parametrize("multiplier", [0.02, 40.0])
def test_no_record_moves_any_integers_further_than_proved(name, count, fixed_places, multiplier):
    check_movement(name, count, fixed_places, multiplier)


@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_clipped_means_lie_within_the_proved_ball(name):
    model, classes = MODELS[name]
    params = model.init(jax.random.key(1))
    step = np.float32(0.05 * CLIP / WIDTH)
    x, y, weights = batches(6, classes, seed=3, variants=60)
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are among the records
        x[1:] *= 1e4  # the mean is mostly one record's
    rows = np.asarray(on_lattice(model, params, "batch", step, False, divisor=6.0)(x, y, weights))
    error = exact.blocked_norm_error(leaf.size for leaf in jax.tree.leaves(params))
    reach = CLIP * (1 + error) * (1 + exact.accumulated(8)) / float(step) + np.sqrt(rows.shape[1]) / 2
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert 0.99 * CLIP / float(step) < lengths.max() <= reach


@pytest.mark.parametrize(("clip", "clipped"), [(1e-3, 1.0), (1e3, 0.0)])
def test_a_mean_counts_as_clipped_if_it_is_longer_than_the_clip(clip, clipped):
    model, classes = MODELS["mlp"]
    params = model.init(jax.random.key(1))
    x, y, weights = batches(6, classes, seed=3, variants=5)
    batch = Batch(jnp.asarray(x[0]), jnp.asarray(y[0]), jnp.asarray(weights[0]))
    options = {"mode": "batch", "divisor": jnp.float32(6.0), "clip_norm": jnp.float32(clip)}
    options |= {"scale": jnp.float32(1.0), "fixed_places": False}
    fraction = jax.jit(lambda: clipping.on_lattice(model, params, batch, **options).fraction)()
    assert float(fraction) == clipped


def check_bits(name, count):
    model, classes = {**MODELS, "wide": (WIDE, 3)}[name]
    params = jax.tree.map(lambda leaf: leaf + 0.01, model.init(jax.random.key(1)))
    rng = np.random.default_rng(0)
    mine = rng.normal(size=FEATURES).astype(np.float32)

    @jax.jit
    def alone(x, y, weights):
        total, _ = clipping.example_clipped_sum(
            model, params, x, y, weights, clip_norm=jnp.float32(CLIP), stored=True
        )
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])

    found = set()
    for place in {0, 1, count // 2, count - 1}:
        for strange in (False, True):
            x = strange_records(count, place) if strange else rng.normal(size=(count, FEATURES)).astype(np.float32)
            x[place] = mine
            y = rng.integers(0, classes, count).astype(np.int32)
            y[place] = 1
            weights = np.zeros(count, np.float32)
            weights[place] = 1.0
            found.add((np.asarray(alone(x, y, weights)) + 0.0).tobytes())  # -0 and 0 are one
    assert len(found) == 1


def test_a_contribution_has_the_same_bits_whatever_the_others_are_and_wherever_it_stands():
    check_bits("wide", 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "wide"])
@pytest.mark.parametrize("count", [5, 33, 64, 128])
def test_contributions_have_the_same_bits_in_all_shapes(name, count):
    check_bits(name, count)


ONE_SCORE = models.logistic(64)
SCORES = {
    "logistic": ONE_SCORE,
    "linear": models.linear(64),
    "own": models.Model(ONE_SCORE.init, ONE_SCORE.apply),  # by the rules for layers
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("count", [5, 20, 77, 150])
def test_one_score_has_the_same_bits_wherever_its_record_stands(name, count):
    """A CPU adds up a matrix times a vector in another order for the rows that are left after the last eight. A
    server may broadcast weights whose products cancel. There a record that moved by a place counted for a whole
    clip more, and two worlds were 2.00 clips apart where 1.0009 were proved."""
    model, rng = SCORES[name], np.random.default_rng(0)
    direction = np.float32(rng.normal(size=64) * 2.0**34).astype(float)
    params = {"out": {"w": jnp.asarray(direction[:, None], jnp.float32), "b": jnp.zeros(1)}}
    integers = on_lattice(model, params, "example", jnp.float32(1e-4), False)
    batch = np.zeros((count, count, 64), np.float32)
    for _ in range(6):
        record = rng.normal(size=64)
        record -= direction * (direction @ record) / (direction @ direction)  # its score is about 0
        batch[np.arange(count), np.arange(count)] = record
        rows = np.asarray(integers(batch, np.ones((count, count), np.int32), np.eye(count, dtype=np.float32)))
        assert len(np.unique(rows, axis=0)) == 1


@pytest.mark.parametrize("count", [1, 37, 130, 1_000, 20_000])
@pytest.mark.parametrize("fixed_places", [True, False])
def test_sums_err_no_more_than_their_bound(count, fixed_places):
    """Against float64, for contributions that float32 adds badly: all alike, or cancelling."""
    rng = np.random.default_rng(count)
    size = exact.block_size(count)
    for parts in (np.full(count, 0.1), rng.choice([-1.0, 1.0], count) * 0.3, rng.uniform(-1, 1, count)):
        parts = parts.astype(np.float32)
        blocks = [np.add.accumulate(parts[i : i + size])[-1] for i in range(0, count, size)]  # one after the other
        total = np.add.accumulate(np.array(blocks, np.float32))[-1]
        errors = [abs(b - math_sum(parts[i * size : (i + 1) * size])) for i, b in enumerate(blocks)]
        error = max(errors) if fixed_places else abs(total - math_sum(parts))
        assert error <= exact.sum_error(count, fixed_places=fixed_places) / 2


def math_sum(values):
    return math.fsum(values.astype(np.float64))


def test_integers_stay_within_their_limits_and_never_move_further():
    """Clamping is monotone and moves nobody further apart, whatever was added before and comes after."""
    limit = 2**30 - 64
    values = jnp.array([np.inf, -np.inf, 3e38, 1e30, 2.0**30, 1.5, -2.5, 0.0], jnp.float32)
    integers = np.asarray(lattice.rounded(values, jnp.float32(1.0)))
    assert integers.dtype == np.int32
    assert integers.tolist() == [limit, -limit, limit, limit, limit, 2, -2, 0]
    rng = np.random.default_rng(0)
    steps = rng.integers(-limit, limit, (10, 200)).astype(np.int32)
    start, near = np.int32(limit - 5), np.int32(limit)
    one, other = np.full(200, start), np.full(200, near)
    for row in steps:
        one, other = (np.asarray(lattice.added(each, jnp.asarray(row))) for each in (one, other))
        assert np.all(np.abs(one.astype(np.int64)) <= limit)
        assert np.all(np.abs(other.astype(np.int64) - one) <= 5)
    noisy = noise.exact_gaussian(
        noise.key(0), jnp.full(1000, limit, jnp.int32), noise_std=jnp.float32(WIDTH), scale=jnp.float32(1.0)
    )
    assert np.all(np.asarray(noisy) > 2.0**29)  # nothing wraps round


@pytest.mark.parametrize("fixed_places", [True, False])
def test_an_accelerator_sums_blocks_side_by_side(fixed_places, monkeypatch):
    """20 blocks in two groups, the second one filled up: the sum of blocks that come one after the other, up to
    what their float32 sums may err, and clamped like it."""
    model, classes = MODELS["softmax"]
    params = jax.tree.map(lambda leaf: leaf + 0.01, model.init(jax.random.key(1)))
    x, y, weights = (a[:1] for a in batches(64 * 19 + 7, classes, 3, 5))
    step = jnp.float32(1e-4)
    in_turn = np.asarray(on_lattice(model, params, "example", step, fixed_places)(x, y, weights))
    monkeypatch.setattr(clipping.jax, "default_backend", lambda: "gpu")
    together = np.asarray(on_lattice(model, params, "example", step, fixed_places)(x, y, weights))
    assert np.abs(in_turn).max() > 1000
    assert np.linalg.norm(together - in_turn) < 0.01 * CLIP / step + math.sqrt(in_turn.size)
    alike = np.repeat(x[:, :1], x.shape[1], 1), np.repeat(y[:, :1], y.shape[1], 1)
    clamped = np.asarray(on_lattice(model, params, "example", step * 1e-9, fixed_places)(*alike, weights))
    assert set(np.abs(clamped).ravel().tolist()) <= {0, int(lattice.REACH)}  # no block has turned a sign
    np.testing.assert_array_equal(
        np.sign(clamped), np.sign(on_lattice(model, params, "example", step, fixed_places)(*alike, weights))
    )
