"""How many runs train side by side."""

import pytest

from dither.errors import SpecError
from dither.experiment import build
from dither.experiment.plan.records import synthetic_data
from dither.experiment.sweep import batches
from dither.spec import Spec

DATASET = synthetic_data(160, 3).dataset
BASE = Spec.from_preset("adult").with_values({"num_clients": 8, "cohort_size": 4, "batch_size": 2})


def test_batches_stay_small_enough():
    assert batches.batch_size(15, 40) == 15
    assert batches.batch_size(15, 6) == 5  # three equal batches compile once
    assert batches.batch_size(7, 4) == 4
    assert batches.batch_size(3, 0) == 1


def test_memory_splits_a_sweep():
    experiment = build.build_experiment(BASE, dataset=DATASET)
    shared, each = batches.batch_memory(experiment, "cpu")
    assert batches.runs_at_once(experiment, "cpu", shared + 3.5 * each) == 3
    assert batches.runs_at_once(experiment, "cpu", shared / 2) == 1  # one run is made whatever it takes
    assert batches.parse_bytes("4GB") == 4e9
    assert batches.parse_bytes("1.5 GiB") == 1.5 * 2**30
    assert batches.parse_bytes("2e9") == 2e9
    for bad in ("", "much", "-1GB", "0", "4XB", "nan"):
        with pytest.raises(SpecError, match="amount of memory"):
            batches.parse_bytes(bad)


def test_a_value_that_a_method_leaves_out_makes_another_program():
    few = {"num_clients": 8, "cohort_size": 8, "data.records_per_client": 20, "model.name": "logistic"}
    base = Spec.from_any("nbafl").with_values(few)
    specs = [base.with_values({"method_options.proximal": value}) for value in (0.0, 0.1, 0.0, 0.2)]
    plan = batches.plan_batches(specs, dataset=DATASET)
    assert [batch.numbers for batch in plan.batches] == [(0, 2), (1, 3)]
    assert "proximal" not in plan.experiments[0].plan.hyper
