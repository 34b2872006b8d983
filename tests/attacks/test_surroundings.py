"""Settings of JAX and the device that would make another run of it than the one that is proved."""

import jax
import numpy as np
import pytest

from dither import models
from dither.errors import SpecError
from dither.privacy import noise, sampling
from dither.simulation import devices, engine


def test_an_offset_of_jaxs_seeds_moves_no_cohort():
    """JAX_RANDOM_SEED_OFFSET=7 made the compiled rounds draw other cohorts than those that were accounted for:
    a run stopped at that, but a sweep gave the ε of clients that had not taken part."""
    planned = sampling.planned_cohorts(3, np.arange(6), 20, 5)

    @jax.jit
    def drawn(seed, index):
        return sampling.cohort(noise.for_round(noise.stream(seed, "cohort"), index), 20, 5)

    before = jax.config.jax_random_seed_offset
    jax.config.update("jax_random_seed_offset", 7)
    try:
        for index, cohort in enumerate(planned):
            np.testing.assert_array_equal(drawn(np.uint32(3), index), cohort)
    finally:
        jax.config.update("jax_random_seed_offset", before)


@pytest.mark.parametrize("device", ["tpu", "METAL"])
def test_protected_runs_need_the_arithmetic_that_was_proved(device, monkeypatch):
    """A TPU makes products of float32 from six in bfloat16, which XLA's flags for GPUs are refused for."""
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    shape = {"num_clients": 1, "cohort_size_at": lambda index: 1}
    engine.Simulation(models.logistic(6), lambda hyper: None, **shape)
    with pytest.raises(SpecError, match="no proof on this device"):
        engine.Simulation(models.logistic(6), lambda hyper: None, randomness="os", **shape)


@pytest.mark.parametrize(
    ("name", "shorter", "exact"),
    [
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", "STRICT"),
        ("DNNL_DEFAULT_FPMATH_MODE", "any", "strict"),
        ("NVIDIA_TF32_OVERRIDE", "1", "0"),
    ],
)
def test_libraries_that_shorten_products_are_refused(name, shorter, exact, monkeypatch):
    """Where XLA leaves products to oneDNN (with flags, on x86), BF16 let a record among 64 move a protected sum by
    1.0012 clips; 1.0006 were proved."""
    monkeypatch.setenv(name, shorter)
    with pytest.raises(SpecError, match=f"{name}={shorter} is set"):
        devices.set_up()
    monkeypatch.setenv(name, exact)
    devices.set_up()
