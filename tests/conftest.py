"""Shared by all tests: small federations, and data through the project's own loader."""

from __future__ import annotations

import gc
import os
import tempfile

# What tests spend must not stand in anybody's own ledger, nor be remembered beside it.
os.environ.setdefault("DITHER_LEDGER", os.path.join(tempfile.mkdtemp(prefix="dither-tests-"), "ledger.sqlite"))
os.environ["DITHER_STATE"] = tempfile.mkdtemp(prefix="dither-tests-")
# Tests compile much and compute little: they take the short ways through the compiler, not those to quick programs
# (`compiled_as_in_use`: those of users). Four devices, for what is shared among devices; the rest uses the first.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=4",
)

import jax
import numpy as np
import pytest
from jax._src import compiler

from dither import data
from dither.errors import DataError
from dither.types import PrivacyPlan

gc.set_threshold(2_000_000)  # traced programs are many objects that stay: looking through them often takes long


@pytest.fixture(autouse=True, scope="module")
def nothing_remembered(tmp_path_factory):
    """What the fixtures of one module charge is not held against those of another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DITHER_STATE", str(tmp_path_factory.mktemp("module", numbered=True) / "state"))
        yield


@pytest.fixture(autouse=True)
def nothing_spent(tmp_path_factory, monkeypatch):
    """Each test begins with a ledger and a memory of its own: many use the same records."""
    own = tmp_path_factory.mktemp("own", numbered=True)
    monkeypatch.setenv("DITHER_LEDGER", str(own / "ledger.sqlite"))
    monkeypatch.setenv("DITHER_STATE", str(own / "state"))


# What XLA does where nobody says otherwise
IN_USE = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
}


@pytest.fixture(scope="module")
def compiled_as_in_use():
    """Programs are compiled as a user's are: for tests of bits, of rounding, and of what is not a number."""
    options = compiler.get_compile_options

    def in_use(*arguments, env_options_overrides=None, **rest):
        return options(*arguments, env_options_overrides=IN_USE | (env_options_overrides or {}), **rest)

    jax.clear_caches()  # of what was compiled otherwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", in_use)
        yield
    jax.clear_caches()


def make_plan(sizes, **changes) -> PrivacyPlan:
    """A `PrivacyPlan` with small defaults."""
    values = {
        "client_sizes": np.asarray(sizes),
        "num_params": 7,
        "cohort_size": max(1, len(sizes) // 2),
        "num_rounds": 10,
        "local_steps": 2,
        "batch_size": 3,
        "batch_sampling": "fixed",
        "sampling_rate": 0.0,
        "client_lr": 0.2,
        "lr_decay": 0.01,
        "server_lr": 1.0,
        "clip_norm": 2.0,
        "clip": "batch",
        "l2": 1e-4,
        "l2_inside_clip": True,
        "epsilon": 0.5,
        "delta": 1e-4,
        "noise": "paper",
        "unit": "message",
        "view": "upload",
        "colluders": 0,
        "adjacency": "replace-one",
        "options": {},
    }
    return PrivacyPlan(**{**values, **changes})


def make_federation(sizes) -> data.ClientPartition:
    """Clients that hold consecutive rows."""
    sizes = np.asarray(sizes, np.int32)
    start = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    return data.ClientPartition(
        np.arange(sizes.sum(), dtype=np.int32), start, sizes, tuple(f"client {i}" for i in range(len(sizes)))
    )


def make_records(count, features=6, classes=2, seed=0):
    """Random records that a linear model can learn."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype(np.float32)
    scores = x @ rng.normal(size=(features, classes))
    return x, scores.argmax(1).astype(np.int32)


def load_or_skip(name, **arguments) -> data.Dataset:
    """A data set through the loader; a machine that can reach no source skips the test."""
    try:
        return data.load(name, **arguments)
    except DataError as error:
        pytest.skip(f"{name} is not available here: {error}")


@pytest.fixture(scope="session")
def adult_standard() -> data.Dataset:
    return load_or_skip("adult", encoding="standard")


@pytest.fixture(scope="session")
def adult() -> data.Dataset:
    return load_or_skip("adult")
