"""Sweeps as the planner uses them: a method's own traced constants, batches that are filled up."""

from typing import NamedTuple

import numpy as np
import pytest

from dither.experiment.folder import Unfinished
from dither.experiment.plan import candidates as search
from dither.experiment.plan import records
from dither.experiment.sweep import batches
from dither.simulation import engine
from dither.spec import Spec


class Outcome(NamedTuple):
    metrics: list


DATASET = records.synthetic_data(120, 3).dataset
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
    genuine = engine.Simulation
    monkeypatch.setattr(batches.engine, "Simulation", lambda *a, **k: programs.append(1) or genuine(*a, **k))
    specs = [BASE.with_values({"method_options.param_clip": clip}) for clip in (0.5, 2.0)]
    together = batches.train_specs(specs, dataset=DATASET)
    assert len(programs) == 1
    alone = batches.train_specs(specs, dataset=DATASET, max_runs=lambda _: 1)
    losses = [[outcome.metrics[-1]["loss"] for outcome in each] for each in (together, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)


def test_filled_batches_give_every_spec_its_own_outcome(monkeypatch):
    monkeypatch.setattr(search, "BATCHES", (2,))
    specs = [BASE.with_values({"seed": seed}) for seed in range(3)]
    trainer = search.Trainer(DATASET, Unfinished(None, "plan", 0))
    found = trainer.measure(specs, ["same"] * 3)
    assert len(trainer.simulations) == 1  # both batches are one compilation
    assert len({row["loss"] for row in found}) == 3
    one = batches.train_specs(specs[2:], dataset=DATASET)[0]
    assert found[2]["loss"] == pytest.approx(one.metrics[-1]["loss"], rel=1e-5)


def test_an_interrupted_search_makes_no_batch_twice(monkeypatch, tmp_path):
    """Ctrl-C in the second of two batches; the same search then makes that one alone, and finds the same."""
    monkeypatch.setattr(search, "BATCHES", (2,))
    made = []

    def fake(specs, **_):
        if made == [[0, 1]]:
            made.append("interrupted")
            raise KeyboardInterrupt
        made.append([spec.seed for spec in specs])
        return [Outcome([{"test_accuracy": spec.seed / 7, "loss": spec.seed / 3}]) for spec in specs]

    monkeypatch.setattr(search, "train_specs", fake)
    specs = [BASE.with_values({"seed": seed}) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        search.Trainer(DATASET, Unfinished(tmp_path, "plan", 0)).measure(specs, ["same"] * 3)
    found = search.Trainer(DATASET, Unfinished(tmp_path, "plan", 0)).measure(specs, ["same"] * 3)
    assert made == [[0, 1], "interrupted", [2, 2]]
    assert [row["loss"] for row in found] == [0.0, 1 / 3, 2 / 3]
