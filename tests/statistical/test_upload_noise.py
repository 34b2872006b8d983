"""The noise on an upload is Gaussian, has the stated variance, and is nobody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dither import models
from dither.methods import secure_fedavg
from dither.simulation import engine
from dither.types import Records, Round, RoundInfo
from tests.conftest import make_plan, make_records

SIZE, CLIENTS, ROUNDS, FEATURES = 20, 40, 60, 30


@pytest.fixture(scope="module")
def noise():
    """Upload minus noiseless upload, `[rounds, clients, parameters]`, every client holding the same records."""
    model = models.logistic(FEATURES)
    plan = make_plan([SIZE] * CLIENTS, lr_decay=0.0, options={"first_round": "all"})
    prepared = secure_fedavg.prepare(model, plan)
    silent = {**prepared.hyper, "noise_multiplier": np.zeros(CLIENTS)}
    x, y = make_records(SIZE, FEATURES)
    params = model.init(jax.random.key(0))

    def upload(hyper, index, client):
        algorithm = prepared.build({name: jnp.asarray(value) for name, value in hyper.items()})
        records = Records(jnp.asarray(x), jnp.asarray(y), jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
        keys = engine.client_keys(jnp.uint32(5), index, client)
        result = algorithm.client(keys, params, (), records, Round(index, client, jnp.int32(CLIENTS)))
        vector = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(result.upload)])
        return vector / result.weight

    def difference(index, client):
        return upload(prepared.hyper, index, client) - upload(silent, index, client)

    every = jax.jit(jax.vmap(jax.vmap(difference, in_axes=(None, 0)), in_axes=(0, None)))
    values = np.asarray(every(jnp.arange(ROUNDS), jnp.arange(CLIENTS)), np.float64)
    (release,) = prepared.releases(RoundInfo(0, 0, SIZE, CLIENTS))
    return values / release.noise_std


def test_mean_and_variance_are_as_stated(noise):
    count = noise.size
    assert abs(noise.mean()) < 4 / np.sqrt(count)
    assert abs(noise.var() - 1) < 4 * np.sqrt(2 / count)


def test_it_is_gaussian(noise):
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3


def test_each_client_and_each_round_has_the_stated_variance(noise):
    per_client = noise.transpose(1, 0, 2).reshape(CLIENTS, -1).var(1)
    per_round = noise.reshape(ROUNDS, -1).var(1)
    for variances, count in ((per_client, noise.size / CLIENTS), (per_round, noise.size / ROUNDS)):
        assert np.abs(variances - 1).max() < 5 * np.sqrt(2 / count)


def test_clients_rounds_and_coordinates_are_uncorrelated(noise):
    for axis in range(3):
        vectors = np.moveaxis(noise, axis, 0).reshape(noise.shape[axis], -1)
        correlation = np.corrcoef(vectors)
        off = correlation[~np.eye(len(correlation), dtype=bool)]
        assert np.abs(off).max() < 5.5 / np.sqrt(vectors.shape[1])


def test_equal_data_and_round_still_give_different_noise(noise):
    assert len(np.unique(noise.round(5), axis=1)[0]) > 1
    flat = noise.reshape(-1, noise.shape[-1])
    assert len(np.unique(flat, axis=0)) == len(flat)  # no vector is ever drawn twice
