"""Runs and clients shared among devices: the same results as one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.errors import SpecError
from dither.methods import dp_scaffold
from dither.privacy import noise
from dither.secagg.encoding import FixedPoint
from dither.simulation import devices, engine
from dither.simulation.aggregation import Aggregation
from dither.simulation.arrays import ONE_DEVICE, Shards
from dither.types import Algorithm, ClientResult
from tests.conftest import make_federation, make_plan, make_records
from tests.simulation.test_engine import SIZES, batched, leaves, prepare, small_problem, train

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (tests/conftest.py asks for them)")


@functools.cache
def trained(layout, shards=ONE_DEVICE):
    model, prepared = prepare()  # cohorts of 3: with 2 or 4 devices for the clients, some have nothing to do
    hyper = batched(prepared.hyper, 4)
    hyper["client_lr"] = np.array([0.1, 0.2, 0.4, 0.1])
    how = {"seeds": (3, 4, 5, 6), "hyper": hyper, "rounds": 3, "eval_every": 3}
    return train(model, prepared, small_problem(), layout=layout, shards=shards, **how)


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        pytest.param("vmap", Shards(2, 1), marks=pytest.mark.slow),
        pytest.param("vmap", Shards(1, 2), marks=pytest.mark.slow),
        ("vmap", Shards(2, 2)),
        pytest.param("loop", Shards(4, 1), marks=pytest.mark.slow),
        ("loop", Shards(1, 4)),
    ],
)
def test_any_sharing_of_runs_and_clients_gives_what_one_device_gives(layout, shards):
    alone, shared = trained(layout), trained(layout, shards)
    np.testing.assert_allclose(leaves(shared), leaves(alone), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(shared.participation, alone.participation)
    for name, values in alone.history[-1].metrics.items():
        np.testing.assert_allclose(shared.history[-1].metrics[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_states_of_clients_on_other_devices_are_kept():
    model = models.logistic(6)
    options = {name: default for name, (default, *_) in dp_scaffold.OPTIONS.items()} | {"stop_at_budget": "no"}
    plan = make_plan(SIZES, noise_std=0.1, noise="given", lr_decay=0.0, options=options)
    prepared = dp_scaffold.prepare(model, plan)
    alone = train(model, prepared, small_problem(), rounds=4, eval_every=4)
    shared = train(model, prepared, small_problem(), rounds=4, eval_every=4, shards=Shards(1, 2))
    kept = jax.tree.leaves(alone.state.clients)
    for one, other in zip(kept, jax.tree.leaves(shared.state.clients), strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-5, atol=1e-6)
    assert any(np.asarray(leaf).any() for leaf in kept)


def test_rounds_after_an_evaluation_run_the_same_program():
    """The state always lies as the inputs do. The compiler is free to lay a single run otherwise, and then the
    rounds after the first evaluation were compiled again."""
    model, prepared = prepare()
    simulation = engine.Simulation(
        model,
        prepared.build,
        num_clients=len(SIZES),
        cohort_size_at=prepared.cohort_size_at,
        shards=Shards(1, 2),
    )
    inputs = simulation.inputs(small_problem(), seeds=[3], hyper=batched(prepared.hyper, 1))
    state = simulation.start(inputs)
    for index in range(2):
        assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {inputs.runs.seed.sharding}
        state = engine.reset_metrics(simulation.advance(state, inputs, index, index + 1))
    assert simulation._advance._jitted._cache_size() == 1


def test_rounds_in_which_devices_meet_are_over_when_the_call_returns():
    """A program that is asked for meanwhile could take the thread of one device while the other waits for it."""
    model, prepared = prepare()
    simulation = engine.Simulation(
        model,
        prepared.build,
        num_clients=len(SIZES),
        cohort_size_at=prepared.cohort_size_at,
        shards=Shards(1, 2),
    )
    inputs = simulation.inputs(small_problem(), seeds=[3], hyper=batched(prepared.hyper, 1))
    state = simulation.advance(simulation.start(inputs), inputs, 0, 1)  # compiles
    state = simulation.advance(state, inputs, 1, 1001)
    assert all(leaf.is_ready() for leaf in jax.tree.leaves(state))


def test_wide_vectors_change_no_bit_of_noise_sums_and_products_of_matrices():
    """Optimised as in a run: elsewhere in these tests the compiler does not vectorise."""

    def program(seed, x):
        z = noise.gaussian(noise.key(seed), x, noise_std=jnp.float32(0.5))
        product = jax.nn.softmax(z.T @ z)
        return z, product, jnp.sum(z, axis=0), jnp.sum(z, axis=1), jnp.sqrt(jnp.sum(jnp.square(z)))

    x = np.random.default_rng(0).random((203, 101), np.float32)
    found = {}
    for width in (256, 512):
        options = {"xla_cpu_prefer_vector_width": width, "xla_backend_optimization_level": 3}
        found[width] = jax.jit(program, compiler_options=options)(np.uint32(7), x)
    for narrow, wide in zip(found[256], found[512], strict=True):
        assert np.asarray(narrow).tobytes() == np.asarray(wide).tobytes()


def test_integer_sums_are_the_same_bit_for_bit():
    model, prepared = prepare()
    how = Aggregation("ideal", FixedPoint.fitting(3, scale_bits=16, modulus_bits=32))
    alone = train(model, prepared, small_problem(), rounds=2, aggregation=how, layout="loop")
    shared = train(model, prepared, small_problem(), rounds=2, aggregation=how, layout="loop", shards=Shards(1, 2))
    assert leaves(alone).tobytes() == leaves(shared).tobytes()


def test_runs_one_after_the_other_on_each_device():
    model, prepared = prepare()
    hyper = batched(prepared.hyper, 4)
    hyper["client_lr"] = np.array([0.1, 0.2, 0.4, 0.1])
    how = {"seeds": (3, 4, 5, 6), "hyper": hyper, "rounds": 3, "eval_every": 3}
    apart = train(model, prepared, small_problem(), sequential_runs=True, shards=Shards(2, 1), **how)
    np.testing.assert_allclose(leaves(apart), leaves(trained("vmap")), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("key", [None, np.arange(8, dtype=np.uint32)[None]], ids=["host", "key"])
def test_devices_share_the_servers_protected_noise_and_no_other(key, monkeypatch):
    """Two clients on two devices upload noise and the server adds its own: both devices have the same state."""
    monkeypatch.setattr(
        engine.Simulation,
        "with_noise_key",
        lambda self, inputs: inputs._replace(runs=inputs.runs._replace(noise_key=key)),
    )
    zero = jnp.zeros(50)

    def client(keys, message, state, records, round):
        alone = noise.gaussian(keys.noise, zero, noise_std=1.0)
        row = jnp.where(round.client == jnp.arange(2)[:, None], alone, 0.0)
        return ClientResult({"clients": row, "server": zero}, jnp.float32(1), (), {})

    def server(key, state, upload, cohort):
        return {**upload, "server": noise.gaussian(key, zero, noise_std=1.0)}

    algorithm = Algorithm(
        init=lambda params: {"clients": jnp.zeros((2, 50)), "server": zero},
        client_init=lambda params: (),
        message=lambda server: (),
        client=client,
        server=server,
        params=lambda server: server,
        releases=lambda info: (),
    )
    simulation = engine.Simulation(
        models.logistic(6),
        lambda hyper: algorithm,
        num_clients=2,
        cohort_size_at=lambda index: 2,
        randomness="os",
        shards=Shards(1, 2),
    )
    x, y = make_records(20)
    inputs = simulation.inputs(engine.problem(x, y, make_federation([10, 10]), x, y), seeds=[0], hyper={})
    state = simulation.advance(simulation.start(inputs), inputs, 0, 1)
    for leaf in state.server.values():
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        np.testing.assert_array_equal(first, second)
    rows = np.concatenate([np.asarray(state.server["clients"])[0], np.asarray(state.server["server"])])
    assert (np.abs(rows).max(axis=1) > 1).all()
    assert np.abs(np.corrcoef(rows)[np.triu_indices(3, 1)]).max() < 0.7


def test_runs_must_fill_the_devices_and_devices_must_exist():
    model, prepared = prepare()
    with pytest.raises(SpecError, match="3 runs cannot be shared equally by 2 devices"):
        train(model, prepared, small_problem(), seeds=(0, 1, 2), shards=Shards(2, 1))
    with pytest.raises(SpecError, match="need 64 devices"):
        train(model, prepared, small_problem(), seeds=tuple(range(64)), shards=Shards(64, 1))


def test_short_rounds_stay_on_one_device_and_records_are_not_copied_without_bound(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 4)
    assert devices.for_one_run(round_flops=1e7, record_bytes=1000) is ONE_DEVICE
    assert devices.for_one_run(round_flops=3e10, record_bytes=1000) == Shards(1, 4)
    assert devices.for_one_run(round_flops=3e10, record_bytes=2 << 30) == Shards(1, 2)
    assert devices.for_one_run(round_flops=3e10, record_bytes=64 << 30) == ONE_DEVICE
    assert devices.for_many_runs(25, record_bytes=1000) == Shards(4, 1)
    assert devices.for_many_runs(3, record_bytes=1000) == Shards(3, 1)
