"""Attacked ε never exceeds proven ε, and comes near it where it should: the guard of the accountant.

The slow test covers all methods, samplers and views; a few stand here by default.
"""

import pytest

from dither.auditing import audit
from dither.experiment.build import build_experiment

from .grid import configurations, small_dataset, small_spec

GRID = configurations()
ROWS = sum(len(views) + 1 for _, _, views in GRID)  # at most so many tests
CONFIDENCE = 1 - 0.01 / ROWS  # 99% for all of them together


def attacked_within_proof(method, changes, views, trials):
    experiment = build_experiment(small_spec(method, **changes), dataset=small_dataset())
    report = audit(experiment, views=views, trials=trials, confidence=CONFIDENCE)
    for row in report.rows:
        assert row.attacked.value <= row.proven * (1 + 1e-6), row
    return report


def test_the_grid_is_large_enough():
    assert sum(len(views) for _, _, views in GRID) >= 60
    assert {method for method, _, _ in GRID} >= {"secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated"}
    assert {view for _, _, views in GRID for view in views} == {"upload", "sum", "broadcast", "final"}
    samplers = {changes.get("batch_sampling", "fixed") for _, changes, _ in GRID}
    assert samplers >= {"fixed", "disjoint", "shuffled", "poisson", "full"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GRID)))
def test_attacked_is_within_proven(number):
    method, changes, views = GRID[number]
    attacked_within_proof(method, changes, views, trials=10_000)


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_a_sampled_method_is_within_its_proof(adjacency):
    changes = {"num_rounds": 2, "batch_size": 6, "privacy__adjacency": adjacency}
    report = attacked_within_proof("cpfed", changes, ("upload",), 4000)
    assert report.rows[0].adjacency == adjacency
    assert report.rows[0].attacked.value > 0  # the attack is not asleep


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_a_plain_gaussian_release_is_attacked_to_four_fifths_of_its_proof(adjacency):
    changes = {"privacy__delta": 1e-5, "privacy__adjacency": adjacency}
    spec = small_spec("cpfed", batch_sampling="full", local_steps=1, num_rounds=1, **changes)
    experiment = build_experiment(spec, dataset=small_dataset())
    report = audit(experiment, views=("upload",), trials=100_000, confidence=0.99)
    row = report.rows[0]
    assert row.proven == pytest.approx(2.0, rel=2e-3)
    gaussian = next(b for b in row.bounds if b.form.startswith("mu-GDP"))
    assert 0.8 * row.proven <= gaussian.value <= row.proven
