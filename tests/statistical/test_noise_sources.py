"""Both sources of noise, seeded keys and OS entropy: Gaussian, independent, never repeated.

OS entropy cannot be replayed, so each check has a false-alarm rate near 1e-6 or below; the tests at the end
of the first part show that the checks still reject noise that is a little off.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dither import models
from dither.errors import SpecError
from dither.methods import cpfed, secure_fedavg
from dither.privacy import entropy, noise
from dither.privacy.entropy import OsEntropy
from dither.simulation import engine
from dither.types import Algorithm, ClientResult
from tests.conftest import make_federation, make_plan, make_records

ROUNDS, CLIENTS, STEPS = 20, 16, 4
TREE = {"bias": jnp.zeros(200), "weights": jnp.zeros((30, 20))}
SOURCES = ["seeded", "os"]


def root(source):
    return noise.stream(OsEntropy() if source == "os" else 5, "noise")


def flat(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def standard(key):
    """Noise of std 1 in the shape of TREE."""
    return noise.gaussian(key, TREE, noise_std=1.0)


@jax.jit
def engine_like(key):
    """A step's noise inside scan over steps, vmap over clients and fori_loop over rounds: `[R, C, S, D]`."""

    def client(key, number):
        key = noise.for_client(key, number)

        def step(carry, number):
            return carry, flat(standard(noise.for_step(key, number)))

        return jax.lax.scan(step, 0, jnp.arange(STEPS))[1]

    def one(index, seen):
        in_round = noise.for_round(key, index)
        return seen.at[index].set(jax.vmap(client, in_axes=(None, 0))(in_round, jnp.arange(CLIENTS)))

    return jax.lax.fori_loop(0, ROUNDS, one, jnp.zeros((ROUNDS, CLIENTS, STEPS, 800)))


@pytest.fixture(scope="module", params=SOURCES)
def draws(request):
    return np.asarray(engine_like(root(request.param)), np.float64)


def problems(z):
    """What is wrong with a million draws `[rounds, clients, steps, coordinates]`; empty for N(0, 1)."""
    found = set()
    n = z.size
    if abs(z.mean()) > 6 / np.sqrt(n):
        found.add("mean")
    if abs(z.var() - 1) > 6 * np.sqrt(2 / n):
        found.add("variance")
    if abs(stats.skew(z, axis=None)) > 6 * np.sqrt(6 / n):
        found.add("skew")
    if abs(stats.kurtosis(z, axis=None)) > 7 * np.sqrt(24 / n):
        found.add("kurtosis")
    if stats.kstest(z.ravel(), "norm").pvalue < 1e-7:
        found.add("distribution")
    for side in (z > 4, z < -4):
        if stats.binomtest(int(side.sum()), n, stats.norm.sf(4)).pvalue < 1e-7:
            found.add("tails")
    for axis, name in enumerate(("rounds", "clients", "steps", "coordinates")):
        vectors = np.moveaxis(z, axis, 0).reshape(z.shape[axis], -1)
        if (np.abs(vectors.var(1) - 1) > 7 * np.sqrt(2 / vectors.shape[1])).any():
            found.add(f"variance of {name}")
        off = np.corrcoef(vectors)[~np.eye(len(vectors), dtype=bool)]
        if np.abs(off).max() > 7 / np.sqrt(vectors.shape[1]):  # 640,000 pairs of coordinates at most
            found.add(f"correlation of {name}")
    if repeated(z):
        found.add("repeats")
    return found


def repeated(z, width=8):
    """How many of the aligned runs of 8 consecutive draws occurred before."""
    rows = np.ascontiguousarray(z).reshape(-1, width)
    return len(rows) - len(np.unique(rows.view(f"V{rows.itemsize * width}")))


def test_both_sources_are_standard_normal_and_independent(draws):
    assert problems(draws) == set()


@pytest.mark.slow
def test_the_checks_reject_noise_that_is_a_little_off():
    z = np.random.default_rng(1).normal(size=(ROUNDS, CLIENTS, STEPS, 800))
    assert problems(z) == set()
    assert {"variance", "distribution"} <= problems(1.02 * z)
    assert "mean" in problems(z + 0.01)
    assert "tails" in problems(np.clip(z, -4, 4))
    assert "kurtosis" in problems(z * np.where(np.arange(800) % 2, 1.06, np.sqrt(2 - 1.06**2)))
    again = z.copy()
    again[7, 3, 1, 80:88] = z[2, 9, 0, 400:408]
    assert problems(again) == {"repeats"}
    shared = z.copy()
    shared[:, 5] += 0.05 * z[:, 6]
    assert "correlation of clients" in problems(shared)
    for axis, name in enumerate(("rounds", "clients", "steps", "coordinates")):
        stale = z.copy()
        np.moveaxis(stale, axis, 0)[1] = np.moveaxis(z, axis, 0)[0]
        assert f"correlation of {name}" in problems(stale)


# Seeded: the same bits again


def test_a_seed_gives_the_same_bits_and_derives_as_jax_does():
    first, second = (np.asarray(engine_like(root("seeded"))) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    key = jax.random.key(3)
    for derive in (noise.for_round, noise.for_client, noise.for_step):
        assert jnp.array_equal(
            jax.random.key_data(derive(key, 4)), jax.random.key_data(jax.random.fold_in(key, 4))
        )
    of_seed, of_key = noise.stream(3, "batch"), noise.stream(key, "batch")
    assert jnp.array_equal(jax.random.key_data(of_seed), jax.random.key_data(of_key))


# OS entropy: never the same again


def test_words_of_the_host_are_new_at_every_call():
    words = np.concatenate([entropy.host_words(count) for count in (0, 1, 5, 2 * 2**15 + 3, 5)])
    assert words.dtype == np.uint32
    assert words.shape == (2 * 2**15 + 14,)
    assert repeated(words[: len(words) // 8 * 8]) == 0
    share = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).mean(axis=0)  # of each bit
    assert np.abs(share - 0.5).max() < 6 * 0.5 / np.sqrt(len(words))


def test_the_source_is_a_constant_to_jax():
    assert jax.tree.leaves(OsEntropy()) == []
    assert jax.jit(lambda source: source)(OsEntropy()) == OsEntropy()
    derived = noise.for_client(noise.for_round(OsEntropy(), 3), jnp.int32(2))
    assert isinstance(jax.jit(lambda source: source)(derived), OsEntropy)
    assert jax.tree.leaves(noise.stream(OsEntropy(), "server")) == []


def vectors_with_jit():
    draw = jax.jit(lambda key: flat(standard(key)))
    return [draw(OsEntropy()) for _ in range(20)]


def vectors_without_jit():
    return [flat(standard(OsEntropy())) for _ in range(5)]


def vectors_twice_in_one_program():
    def twice(key):
        return [flat(standard(key)) for _ in range(5)]

    return jax.jit(twice)(OsEntropy())


def vectors_in_a_scan_that_derives_nothing():
    def step(carry, _):
        return carry, flat(standard(OsEntropy()))

    return jax.jit(lambda: jax.lax.scan(step, 0, None, length=12)[1])()


def vectors_in_a_loop_with_traced_bounds():
    def body(index, seen):
        return seen.at[index].set(flat(standard(OsEntropy())))

    return jax.jit(lambda stop: jax.lax.fori_loop(0, stop, body, jnp.zeros((9, 800))))(9)


def vectors_of_clients_in_one_round():
    def client(number):
        return flat(standard(noise.for_client(OsEntropy(), number)))

    return jax.jit(jax.vmap(client))(jnp.zeros(11, jnp.int32))  # equal numbers, still different noise


def vectors_of_runs_and_clients():
    def run(seed):
        return jax.vmap(lambda c: flat(standard(OsEntropy().at(seed).at(c))))(jnp.arange(3))

    return jax.jit(jax.vmap(run))(jnp.arange(4)).reshape(12, -1)


def vectors_of_clients_whose_source_was_not_derived():
    trees = jax.tree.map(lambda leaf: jnp.zeros((11, *leaf.shape)), TREE)
    return jax.vmap(lambda tree: flat(noise.gaussian(OsEntropy(), tree, noise_std=1.0)))(trees)


@pytest.mark.parametrize(
    "vectors",
    [
        vectors_with_jit,
        vectors_without_jit,
        vectors_twice_in_one_program,
        vectors_in_a_scan_that_derives_nothing,
        vectors_in_a_loop_with_traced_bounds,
        vectors_of_clients_in_one_round,
        vectors_of_runs_and_clients,
        vectors_of_clients_whose_source_was_not_derived,
    ],
)
def test_no_way_of_tracing_repeats_a_draw(vectors):
    rows = np.stack([np.asarray(row) for row in vectors()])
    assert np.abs(rows).max() > 2
    assert repeated(rows) == 0
    assert np.abs(np.corrcoef(rows)[~np.eye(len(rows), dtype=bool)]).max() < 7 / np.sqrt(800)


def test_the_noise_is_scaled_and_added_to_the_tree():
    tree = {"a": jnp.full(200_000, 3.0), "b": jnp.full((2, 2), -1.0)}
    noisy = jax.jit(lambda key, std: noise.gaussian(key, tree, noise_std=std))(OsEntropy(), 0.5)
    assert jax.tree.map(jnp.shape, noisy) == jax.tree.map(jnp.shape, tree)
    z = (np.asarray(noisy["a"], np.float64) - 3) / 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-7
    assert noisy["a"].dtype == jnp.float32


PROCESS = """
import os, sys
import numpy as np
import jax, jax.numpy as jnp
from dither.privacy import entropy, noise

def show(z):
    os.write(1, (np.asarray(z, np.float64).tobytes().hex() + "\\n").encode())

show(entropy.host_words(8))
children = []
for _ in range(2):
    child = os.fork()  # before JAX has threads of its own
    if child == 0:
        show(entropy.host_words(8))
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
show(entropy.host_words(8))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
draw = jax.jit(lambda key: noise.gaussian(key, jnp.zeros(8), noise_std=1.0))
show(draw(entropy.OsEntropy()))
show(draw(entropy.OsEntropy()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_processes_and_forked_children_never_repeat(tmp_path):
    """Two processes that share a compilation cache, each with two children."""
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path)], capture_output=True, text=True, check=True
        )
        lines += done.stdout.split()
    rows = np.array([np.frombuffer(bytes.fromhex(line)) for line in lines])
    assert rows.shape == (12, 8)
    assert len(np.unique(rows, axis=0)) == len(rows)


# Whole runs

SIZES = [12, 30, 17, 9, 25, 14]


def train(paper, *, randomness, times=1, layout="vmap", **changes):
    """The models of two runs with the same seed in one batch, trained `times` over by one compiled program."""
    x, y = make_records(sum(SIZES) + 50)
    problem = engine.problem(x[:-50], y[:-50], make_federation(SIZES), x[-50:], y[-50:])
    model = models.logistic(6)
    options = {name: default for name, (default, *_) in paper.OPTIONS.items()} | {"first_round": "cohort"}
    prepared = paper.prepare(model, make_plan(SIZES, options=options, **changes))
    simulation = engine.Simulation(
        model,
        prepared.build,
        num_clients=len(SIZES),
        cohort_size_at=prepared.cohort_size_at,
        layout=layout,
        randomness=randomness,
    )
    hyper = {name: np.stack([np.asarray(value)] * 2) for name, value in prepared.hyper.items()}
    trained = []
    for _ in range(times):
        inputs = simulation.inputs(problem, seeds=[3, 3], hyper=hyper)
        state = simulation.advance(simulation.start(inputs), inputs, 0, 4)
        trained.append(np.asarray(jax.vmap(flat)(state.server)))
    return np.concatenate(trained)


@pytest.mark.parametrize(("paper", "layout"), [(secure_fedavg, "vmap"), (cpfed, "loop")])
def test_seeded_runs_are_identical_and_os_runs_differ(paper, layout):
    seeded, fresh = (train(paper, randomness=source, times=2, layout=layout) for source in SOURCES)
    assert np.isfinite(fresh).all()
    assert np.abs(fresh).max() > 0
    assert len(np.unique(seeded, axis=0)) == 1
    assert len(np.unique(np.concatenate([seeded, fresh]), axis=0)) == 5


def test_os_runs_draw_secret_batches_from_the_same_first_model():
    """Without noise, what differs is what was drawn; with everything in every batch, nothing does."""
    quiet = {"noise": "none", "epsilon": float("inf")}
    assert len(np.unique(train(secure_fedavg, randomness="os", **quiet), axis=0)) == 2
    everything = {**quiet, "batch_sampling": "full", "cohort_size": 6}
    seeded, fresh = (train(secure_fedavg, randomness=source, **everything) for source in SOURCES)
    np.testing.assert_array_equal(fresh, seeded)


def test_the_server_too_draws_from_the_chosen_source():
    zero = jnp.zeros(50)
    algorithm = Algorithm(
        init=lambda params: params,
        client_init=lambda params: (),
        message=lambda server: server,
        client=lambda keys, message, state, records, round: ClientResult(zero, jnp.float32(1), (), {}),
        server=lambda key, server, upload, cohort: server + noise.gaussian(key, upload, noise_std=1.0),
        params=lambda server: server,
        releases=lambda info: (),
    )
    model = models.logistic(6)._replace(init=lambda key: zero, apply=lambda params, x: jnp.zeros((len(x), 2)))
    x, y = make_records(sum(SIZES))
    problem = engine.problem(x, y, make_federation(SIZES), x[:5], y[:5])

    def noises(randomness):
        result = engine.simulate(
            lambda hyper: algorithm,
            model,
            problem,
            num_rounds=3,
            cohort_size=2,
            seeds=(4, 4),
            eval_every=3,
            randomness=randomness,
        )
        return np.asarray(result.params)

    seeded, fresh = (noises(source) for source in SOURCES)
    assert seeded[0].tobytes() == seeded[1].tobytes()
    assert len(np.unique(fresh, axis=0)) == len(fresh)
    assert abs(fresh.var() / 3 - 1) < 0.9  # three rounds' variances add up


def test_an_unknown_source_is_refused():
    with pytest.raises(SpecError, match="randomness='urandom'"):
        train(secure_fedavg, randomness="urandom")
