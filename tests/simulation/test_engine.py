"""The engine: one program for many runs, the same result in every layout, nothing that grows with rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.accounting.exact import WIDTH
from dither.errors import SpecError
from dither.methods import secure_fedavg
from dither.privacy import entropy, lattice, noise
from dither.simulation import engine
from dither.types import Algorithm, ClientResult
from tests.conftest import make_federation, make_plan, make_records

SIZES = [12, 30, 17, 9, 25, 14]


def prepare(model=None, **changes):
    return _prepared(model, changes) if model or changes else _usual()


def _prepared(model, changes):
    model = model or models.logistic(6)
    plan = make_plan(SIZES, **{"options": {"first_round": "cohort"}, **changes})
    return model, secure_fedavg.prepare(model, plan)


@functools.cache
def _usual():
    return _prepared(None, {})


@functools.cache
def _usual_simulation():
    """Compiled once for all tests of the usual method."""
    model, prepared = _usual()
    sizes = prepared.cohort_size_at
    return engine.Simulation(model, prepared.build, num_clients=len(SIZES), cohort_size_at=sizes)


def small_problem(seed=0):
    x, y = make_records(sum(SIZES) + 50, seed=seed)
    n = sum(SIZES)
    return engine.problem(x[:n], y[:n], make_federation(SIZES), x[n:], y[n:])


def batched(hyper, runs):
    return {name: np.stack([np.asarray(value)] * runs) for name, value in hyper.items()}


def train(model, prepared, problem, *, seeds=(0,), hyper=None, rounds=6, fresh=False, **arguments):
    hyper = hyper or batched(prepared.hyper, len(seeds))
    if prepared is _usual()[1] and not fresh and not arguments.keys() - {"eval_every"}:
        inputs = _usual_simulation().inputs(problem, seeds=seeds, hyper=hyper)
        return engine.train(_usual_simulation(), inputs, num_rounds=rounds, **{"eval_every": 2, **arguments})
    return engine.simulate(
        prepared.build,
        model,
        problem,
        num_rounds=rounds,
        cohort_size=prepared.cohort_size_at,
        seeds=seeds,
        hyper=hyper,
        eval_every=arguments.pop("eval_every", 2),
        **arguments,
    )


def leaves(result):
    return np.concatenate(
        [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(result.params)], 1
    )


def test_same_seed_same_bits_other_seed_other_model():
    model, prepared = prepare()
    first, second = (leaves(train(model, prepared, small_problem(), fresh=fresh)) for fresh in (True, False))
    other = leaves(train(model, prepared, small_problem(), seeds=(1,)))
    assert first.tobytes() == second.tobytes()
    assert not np.allclose(first, other)


def test_how_rounds_are_cut_into_chunks_changes_no_bit():
    model, prepared = prepare()
    a = leaves(train(model, prepared, small_problem(), eval_every=1))
    b = leaves(train(model, prepared, small_problem(), eval_every=6))
    assert a.tobytes() == b.tobytes()


def test_a_batch_of_runs_equals_the_runs_one_by_one():
    model, prepared = prepare()
    seeds = (3, 4, 5)
    hyper = batched(prepared.hyper, 3)
    hyper["client_lr"] = np.array([0.1, 0.2, 0.4])
    hyper["noise_multiplier"] = hyper["noise_multiplier"] * np.array([0.0, 1.0, 2.0])[:, None]
    together = leaves(train(model, prepared, small_problem(), seeds=seeds, hyper=hyper))
    for i, seed in enumerate(seeds):
        alone = train(
            model, prepared, small_problem(), seeds=(seed,), hyper={k: v[i : i + 1] for k, v in hyper.items()}
        )
        np.testing.assert_allclose(together[i], leaves(alone)[0], rtol=2e-5, atol=1e-6)


def test_layouts_agree_and_padding_changes_nothing():
    model, prepared = prepare()
    assert _usual_simulation().layout == "vmap"
    side_by_side = leaves(train(model, prepared, small_problem()))
    one_by_one = leaves(train(model, prepared, small_problem(), layout="loop"))
    padded = train(model, prepared, small_problem(), layout="vmap", pad_cohort=3)
    np.testing.assert_allclose(side_by_side, one_by_one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(side_by_side, leaves(padded), rtol=1e-5, atol=1e-6)
    assert padded.participation.sum() == 6 * 3


def test_one_compilation_serves_all_rounds_and_a_whole_grid():
    model, prepared = prepare()
    traces = []

    def build(hyper):
        traces.append(1)
        return prepared.build(hyper)

    simulation = engine.Simulation(model, build, num_clients=6, cohort_size_at=lambda index: 3)

    def rounds(lr, start, stop, state=None):
        hyper = {**batched(prepared.hyper, 1), "client_lr": np.array([lr])}
        inputs = simulation.inputs(small_problem(), seeds=[0], hyper=hyper)
        return simulation.advance(simulation.start(inputs) if state is None else state, inputs, start, stop)

    state = rounds(0.1, 0, 3)
    before = len(traces)
    state = rounds(0.1, 3, 50, state)
    rounds(0.3, 0, 7)
    assert len(traces) == before


def test_cohorts_are_drawn_without_replacement_and_counted():
    model, prepared = prepare()
    result = train(model, prepared, small_problem(), rounds=40)
    assert result.participation.shape == (1, 6)
    assert result.participation.sum() == 40 * 3
    assert result.participation.max() <= 40


def test_first_round_with_everyone():
    model, prepared = prepare(options={"first_round": "all"})
    result = train(model, prepared, small_problem(), rounds=1)
    assert result.participation.tolist() == [[1] * 6]


def test_a_cohort_of_one_works():
    model, prepared = prepare(cohort_size=1)
    assert np.isfinite(leaves(train(model, prepared, small_problem()))).all()


def test_an_update_that_is_not_finite_is_left_out_where_no_noise_protects_records():
    """With noise whoever is left out would be known by its records: there nobody is (tests/attacks)."""
    model, prepared = prepare(
        clip="none", cohort_size=6, noise="none", batch_sampling="full", epsilon=float("inf")
    )
    problem = small_problem()
    clean = train(model, prepared, problem, rounds=1)
    x = problem.x.copy()
    start, size = int(problem.partitions[0].start[2]), SIZES[2]
    x[start : start + size] = np.nan
    for refuse in (True, False):
        dirty = train(model, prepared, problem._replace(x=x), rounds=1, refuse=refuse)
        assert dirty.refused.tolist() == [[0, 0, int(refuse), 0, 0, 0]]
        assert np.isfinite(leaves(dirty)).all()
        assert not np.allclose(leaves(dirty), leaves(clean))


def test_memory_does_not_grow_with_rounds():
    """1,000 clients, 1,000 rounds: the live arrays after the last round are those of the first."""
    sizes = [8] * 1000
    x, y = make_records(8000)
    problem = engine.problem(x, y, make_federation(sizes), x[:100], y[:100])
    model = models.logistic(6)
    plan = make_plan(sizes, cohort_size=100, options={"first_round": "cohort"})
    prepared = secure_fedavg.prepare(model, plan)
    simulation = engine.Simulation(model, prepared.build, num_clients=1000, cohort_size_at=prepared.cohort_size_at)
    inputs = simulation.inputs(problem, seeds=[0], hyper=batched(prepared.hyper, 1))
    state = simulation.advance(simulation.start(inputs), inputs, 0, 10)
    jax.block_until_ready(state)

    def live_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    before = live_bytes()
    for start in range(10, 1000, 110):
        state = simulation.advance(state, inputs, start, start + 110)
        jax.block_until_ready(state)
    assert live_bytes() == before
    assert int(state.participation.sum()) == 1000 * 100
    assert np.isfinite(simulation.evaluate(state, inputs)["loss"]).all()


def test_wrong_shapes_are_refused_with_both_numbers():
    model, prepared = prepare()
    with pytest.raises(SpecError, match="expected 2 runs"):
        train(model, prepared, small_problem(), seeds=(0, 1), hyper=batched(prepared.hyper, 1))
    simulation = engine.Simulation(model, prepared.build, num_clients=7, cohort_size_at=lambda index: 3)
    with pytest.raises(SpecError, match="6 clients, expected num_clients=7"):
        simulation.inputs(small_problem(), seeds=[0], hyper=batched(prepared.hyper, 1))


def test_chunks_end_at_evaluations_and_resume_on_the_same_grid():
    assert engine.chunks(0, 25, 10) == [(0, 10), (10, 20), (20, 25)]
    assert engine.chunks(10, 25, 10) == [(10, 20), (20, 25)]
    assert engine.chunks(25, 25, 10) == []
    assert engine.chunks(13, 25, 10) == [(13, 20), (20, 25)]
    assert engine.chunks(0, 3, 10) == [(0, 3)]


def test_per_client_weights_give_the_mean_over_clients():
    """A test weight of 1/(clients * own size) makes the score the mean of the clients' own accuracies."""
    model, prepared = prepare(noise="none")
    problem = small_problem()
    rows = np.array([0, 1, 2, 3, 4, 40, 41])
    weights = np.array([0.1] * 5 + [0.25] * 2)
    scored = problem._replace(test_rows=[rows], test_weights=[weights])
    result = train(model, prepared, scored, rounds=2)
    params = jax.tree.map(lambda leaf: leaf[0], result.params)
    right = np.asarray(models.predict(model.apply(params, problem.x[rows]))) == problem.y[rows]
    expected = (right[:5].mean() + right[5:].mean()) / 2
    assert result.history[-1].metrics["test_accuracy"][0] == pytest.approx(expected, abs=1e-6)


# Protected noise


@pytest.mark.parametrize("layout", ["vmap", "loop"])
def test_words_drawn_ahead_are_used_once(layout, monkeypatch):
    """Three rounds' words at a time, eight rounds of two runs in two calls: every client's noise is new, and what
    the host gave is used in its order."""
    given = []

    def host_words(count):
        given.append(np.random.default_rng(len(given)).integers(2**32, size=count, dtype=np.uint32))
        return given[-1]

    monkeypatch.setattr(entropy, "host_words", host_words)
    monkeypatch.setattr(engine, "_WORDS_AHEAD", 3 * 2 * (3 * 40 + 2))
    zero = jnp.zeros(40)

    def client(keys, message, state, records, round):
        noisy = noise.gaussian(keys.noise, zero, noise_std=float(WIDTH))
        here = (jnp.arange(8)[:, None] == round.index) & (jnp.arange(2) == round.client)
        return ClientResult(jnp.where(here[..., None], noisy, 0.0), jnp.float32(1), (), {})

    algorithm = Algorithm(
        init=lambda params: jnp.zeros((8, 2, 40)),
        client_init=lambda params: (),
        message=lambda server: (),
        client=client,
        server=lambda key, state, upload, cohort: state + upload,
        params=lambda server: server,
        releases=lambda info: (),
    )
    simulation = engine.Simulation(
        models.logistic(6),
        lambda hyper: algorithm,
        num_clients=2,
        cohort_size_at=lambda index: 2,
        randomness="os",
        layout=layout,
    )
    x, y = make_records(20)
    inputs = simulation.inputs(engine.problem(x, y, make_federation([10, 10]), x, y), seeds=[0, 0], hyper={})
    state = simulation.advance(simulation.start(inputs), inputs, 0, 5)
    state = simulation.advance(state, inputs, 5, 8)
    rows = np.asarray(state.server).reshape(2 * 8 * 2, 40)
    assert len(np.unique(rows, axis=0)) == 2 * 8 * 2
    assert [words.size for words in given if words.size > 1] == [2 * 3 * 2 * 122] * 3  # rounds 0-2, 3-4, 5-7
    words = given[-1].reshape(2, 3, 2, 122)  # the last call: rounds 5 to 7 of both runs
    for run, index, number in ((0, 5, 0), (1, 7, 1)):
        high, ties = words[run, index - 5, number, :80].reshape(2, 40), words[run, index - 5, number, 80:]
        expected = np.asarray(jax.jit(lattice.draw)(high, (ties[:40], ties[:40] ^ ties[1:41] ^ ties[2:])))
        np.testing.assert_allclose(np.asarray(state.server)[run, index, number], expected, rtol=1e-6)
