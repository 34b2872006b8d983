"""Noise that float64 proves and float32 does not have: the compiled rounds would add none, or add it to an ∞."""

import numpy as np
import pytest

from dither.errors import SpecError

from .test_projected_sums import world


def test_noise_that_falls_below_float32_is_refused():
    """The last rounds of this run were made without any noise, at a proven ε of 15."""
    values = {"privacy.noise_std": 1e36, "privacy.noise_schedule": "rounds", "privacy.noise_decay": 0.01,
              "num_rounds": 39}  # fmt: skip
    with pytest.raises(SpecError, match=r"noise_decay=0\.01 shrinks the noise to 1e-39"):
        world(True, values)
    with pytest.raises(SpecError, match="noise_decay"):
        world(True, {**values, "privacy.noise_schedule": "steps", "local_steps": 2, "num_rounds": 20})
    world(True, {**values, "privacy.noise_decay_start": 30})
    with pytest.raises(SpecError, match="client_lr"):  # by which Secure FedAvg scales its noise
        world(True, {"method": "secure-fedavg", "privacy.noise": "proven", "lr_decay": 1e38, "secagg.mode": "off"})


def test_noise_below_float32_proves_nothing():
    row = world(True, {"privacy.noise_std": 1e-40}).accountant().proven("upload")
    assert row.value == np.inf
    assert "2^-100" in row.detail


@pytest.mark.parametrize(
    "values",
    [
        {"client_lr": 1e38, "privacy.clip_norm": 100.0},
        {"privacy.clip_norm": 1e39},
        {"model.l2": 1e39},
        {"method": "nbafl", "privacy.clip": "none", "method_options.param_clip": 1e39},
        {"method": "dp-fedavg", "method_options.update_clip": 1e39},
    ],
)
def test_numbers_beyond_float32_are_refused(values):
    with pytest.raises(SpecError, match=r"beyond 2\^60"):
        world(True, values)


def test_a_model_that_overflows_before_its_noise_proves_nothing():
    """Of a rate of 1e38 and a clip of 100, Secure FedAvg's model was ±∞ by the sign of its gradients, and noise on
    that +∞, -∞ or no number: one record decided which, in half of the runs, at a proven ε of 0.9995."""
    values = {"method": "secure-fedavg", "privacy.noise": "paper", "secagg.mode": "off", "client_lr": 2.0**59}
    near, far = (world(True, {**values, "privacy.clip_norm": 2.0**power}).accountant() for power in (30, 59))
    assert near.epsilon("upload") < np.inf == far.epsilon("upload")
