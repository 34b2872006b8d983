"""Programs that are kept for the next process: loaded only under their own key, else traced."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither.experiment import build
from dither.experiment.plan.records import synthetic_data
from dither.simulation import devices
from dither.spec import Spec

DATASET = synthetic_data(160, 3).dataset
SMALL = {"num_clients": 8, "cohort_size": 4, "batch_size": 2, "num_rounds": 4, "eval_every": 4}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_misses", itertools.count().__next__)  # as if JAX's cache were empty
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "traced"
    jax.config.update("jax_compilation_cache_dir", before)


def kept(key, traced, factor=2.0):
    """A program as a new process has it; `traced` counts how often it is traced."""

    def scaled(x, *, power):
        traced.append(key)
        return factor * x**power

    return devices.KeptProgram(jax.jit(scaled, static_argnames="power"), key)


def test_a_program_is_traced_once_under_its_key(folder):
    traced, x = [], jnp.arange(3.0)
    first = kept("one", traced)(x, power=2)
    assert np.array_equal(kept("one", traced)(x, power=2), first)
    assert traced == ["one"]
    assert np.array_equal(kept("two", traced, factor=3.0)(x, power=2), 1.5 * first)  # nothing of the other's
    assert np.array_equal(kept("one", traced)(x, power=1), 2 * x)  # another constant
    assert kept("one", traced)(jnp.arange(4.0), power=2).shape == (4,)  # another shape
    assert kept("one", traced)(jnp.arange(3), power=2).dtype == jnp.float32  # another type
    assert traced == ["one", "two", "one", "one", "one"]


def test_without_a_key_nothing_is_kept_and_what_is_broken_is_traced(folder):
    traced, x = [], jnp.arange(3.0)
    kept("", traced)(x, power=2)
    assert not folder.exists()
    kept("one", traced)(x, power=2)
    (file,) = folder.iterdir()
    for broken in (b"", b"nonsense", file.read_bytes()[:-100]):
        file.write_bytes(broken)
        assert np.array_equal(kept("one", traced)(x, power=2), 2 * x**2)
    assert len(traced) == 5
    assert devices.kept_numbers("n", lambda: (3, 4)) == devices.kept_numbers("n", lambda: (0, 0)) == (3, 4)
    assert devices.kept_numbers("", lambda: (5,)) == (5,)


def test_what_comes_out_of_the_cache_of_jax_is_compiled_anew_at_the_second_start(folder, monkeypatch):
    monkeypatch.setattr(devices, "_misses", lambda: 7)
    traced, x = [], jnp.arange(3.0)
    kept("one", traced)(x, power=2)
    assert [(path.suffix, path.stat().st_size) for path in folder.iterdir()] == [(".again", 0)]
    kept("one", traced)(x, power=2)
    assert [path.suffix for path in folder.iterdir()] == [""]
    assert np.array_equal(kept("one", traced)(x, power=2), 2 * x**2)
    assert traced == ["one", "one"]
    assert jax.config.jax_enable_compilation_cache


def experiment(values=None, **changes):
    spec = Spec.from_preset("adult").with_values({**SMALL, "randomness": "seeded", **(values or {})})
    made = build.build_experiment(spec, dataset=DATASET)
    return made.with_plan(**changes) if changes else made


def key(made):
    return build.program_key(made, {**build.engine_options(made), **build.sharing(made)})


def test_a_key_holds_what_the_rounds_are_traced_from(monkeypatch):
    monkeypatch.setattr(build, "_BEGAN", np.inf)
    base = experiment()
    assert key(base)
    assert key(base) == key(experiment())
    others = [experiment({"local_steps": 3}), experiment({"seed": 5}), experiment({"privacy.clip_norm": 0.3})]
    others += [experiment(l2=0.25), experiment(hyper={**base.plan.hyper, "client_lr": 9.0})]
    assert len({key(base), *map(key, others)}) == 6
    options = {**build.engine_options(base), **build.sharing(base)}
    assert build.program_key(base, {**options, "dropout": 0.5}) != build.program_key(base, options)
    assert not key(experiment({"randomness": "os"}))  # what is drawn must not be in a program that is used twice
    monkeypatch.setattr(build, "_BEGAN", 0.0)
    assert not key(base)  # the code on the disk is newer than the process


def test_a_run_from_kept_programs_has_the_same_bits(folder, monkeypatch):
    monkeypatch.setattr(build, "_BEGAN", np.inf)

    def trained():
        program = build.compiled(experiment(), keep_programs=True)
        state = program.simulation.advance(program.simulation.start(program.inputs), program.inputs, 0, 4)
        sizes = program.simulation.sizes(state, program.inputs)
        return jax.tree.leaves((program.simulation.params(state, program.inputs), sizes))

    first = trained()
    count = len(list(folder.iterdir()))
    monkeypatch.setattr(devices, "_store", None)  # nothing is traced again
    for one, other in zip(first, trained(), strict=True):
        assert np.array_equal(one, other)
    assert len(list(folder.iterdir())) == count == 4
