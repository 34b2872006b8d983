"""Published guarantees that do not hold, shown by experiment."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from dither.auditing import audit
from dither.experiment.build import build_experiment

from .grid import small_dataset, small_spec


def secure_fedavg(trials):
    """Q = 1, b = 1, 325 records a client, noise as printed for ε = 0.5 a message: the setting of the paper."""
    spec = small_spec(
        "secure-fedavg",
        num_clients=2,
        cohort_size=2,
        num_rounds=1,
        local_steps=1,
        batch_size=1,
        client_lr=0.2,
        lr_decay=0.01,
        model__l2=1e-4,
        privacy__epsilon=0.5,
        privacy__delta=1e-4,
        privacy__noise="paper",
        privacy__unit="message",
        privacy__clip="batch",
        privacy__clip_norm=2.0,
    )
    experiment = build_experiment(spec, dataset=small_dataset(records=650))
    report = audit(experiment, views=("upload",), trials=trials, confidence=0.99)
    return next(row for row in report.rows if row.unit == "message")


def by_counts(row):
    return next(b for b in row.bounds if b.form == "counts").value


def test_secure_fedavg_reveals_more_than_its_half():
    row = secure_fedavg(100_000)
    assert row.claimed == pytest.approx(0.5)
    assert row.refutes_claim
    assert by_counts(row) > 2.0
    assert 100 < row.attacked.value <= row.proven  # the exhibited pair


@pytest.mark.slow
def test_a_million_trials_count_six():
    row = secure_fedavg(1_000_000)
    assert 5.5 < by_counts(row) < 10


def test_nbafl_uploads_differ_by_more_than_its_sensitivity(monkeypatch):
    """99 records at x = 0 and one at x = 1 whose label is flipped (errata N2)."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    found = import_module("audit_nbafl").counterexample()
    assert found.stated == pytest.approx(0.4)
    assert found.distance > found.stated
    assert found.distance <= 2 * found.param_clip + 1e-4
    assert np.isfinite(found.distance)
