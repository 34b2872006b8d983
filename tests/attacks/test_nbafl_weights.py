"""NbAFL with unequal clients: eq (9) has max p_i, so a large client needs more noise on the downlink."""

import numpy as np
import pytest

from dither import models
from dither.methods import nbafl
from tests.conftest import make_plan

OPTIONS = {name: default for name, (default, *_) in nbafl.OPTIONS.items()}


def test_unequal_clients_get_the_epsilon_they_asked_for():
    run = {"cohort_size": 10, "num_rounds": 25, "batch_sampling": "full", "options": OPTIONS}
    plan = make_plan(np.array([100] * 9 + [900]), epsilon=50.0, delta=0.01, unit="run", **run)
    claim = nbafl.prepare(models.logistic(6), plan).claim
    assert claim.value == pytest.approx(50.0)
