"""Sweeps as the planner uses them: a method's own traced constants, batches that are filled up."""

import numpy as np
import pytest

from dither import engines, sweeps
from dither.planning import empirical, shapes
from dither.spec import Spec

MATERIAL = shapes.synthetic(120, 3)
BASE = Spec.from_preset("nbafl").with_values(
    {
        "num_clients": 4,
        "cohort_size": 4,
        "num_rounds": 3,
        "local_steps": 1,
        "client_lr": 0.1,
        "eval_every": 3,
        "data.name": "adult",
        "data.records_per_client": 0,
        "model.name": "logistic",
        "model.hidden": [],
        "privacy.noise": "proven",
        "privacy.epsilon": 50.0,
        "method_options.optimizer": "sgd",
    }
)


def test_parameter_clips_share_a_program_and_change_nothing(monkeypatch):
    programs = []
    genuine = engines.simulate.Simulation
    monkeypatch.setattr(sweeps.simulate, "Simulation", lambda *a, **k: programs.append(1) or genuine(*a, **k))
    specs = [BASE.with_values({"method_options.param_clip": clip}) for clip in (0.5, 2.0)]
    together = sweeps.sweep(specs, dataset=MATERIAL.dataset)
    assert len(programs) == 1
    alone = [sweeps.sweep([spec], dataset=MATERIAL.dataset)[0] for spec in specs]
    losses = [[outcome.metrics[-1]["loss"] for outcome in each] for each in (together, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)


def test_filled_batches_give_every_spec_its_own_outcome(monkeypatch):
    monkeypatch.setattr(empirical, "BATCHES", (2,))
    specs = [BASE.with_values({"seed": seed}) for seed in range(3)]
    found = empirical._outcomes(specs, ["same"] * 3, MATERIAL)
    assert [outcome.spec.seed for outcome in found] == [0, 1, 2]
    one = sweeps.sweep(specs[2:], dataset=MATERIAL.dataset)[0]
    assert found[2].metrics[-1]["loss"] == pytest.approx(one.metrics[-1]["loss"], rel=1e-5)
