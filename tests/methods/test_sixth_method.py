"""The skeleton of CONTRIBUTING.md: one file, found by its path, passes the suite and trains with proven ε."""

from pathlib import Path

import numpy as np
import pytest

from dither import api
from dither.spec import Spec
from tests.methods import test_conformance as suite

FILE = Path(__file__).parents[2] / "examples" / "fedavgm_dp.py"


@pytest.fixture
def name():
    return str(FILE)


GIVEN = {"privacy.noise": "given", "privacy.noise_std": 0.3}


@pytest.fixture(autouse=True)
def given_noise(monkeypatch):
    monkeypatch.setitem(suite.BASE, "privacy.noise", "given")
    monkeypatch.setitem(suite.BASE, "privacy.noise_std", 0.3)


test_same_bits = suite.test_it_trains_and_the_same_seed_gives_the_same_bits
test_layouts = suite.test_layouts_agree_and_padding_clients_change_nothing
test_traces = suite.test_no_method_retraces_on_later_rounds
test_checkpoints = suite.test_client_state_round_trips_through_a_checkpoint
test_one = suite.test_a_cohort_of_one_works
test_nan = suite.test_records_that_are_not_numbers_count_as_nothing_where_noise_is_added
test_releases = suite.test_releases_are_finite_numbers_for_the_accountant


def test_it_trains_with_a_proven_epsilon(name):
    spec = Spec().with_values(
        {
            "method": name,
            "num_clients": 6,
            "cohort_size": 6,
            "num_rounds": 5,
            "batch_size": 8,
            "batch_sampling": "poisson",
            "sampling_rate": 0.1,
            "data.name": "breast-cancer",
            "privacy.adjacency": "zero-out",
        }
    )
    experiment = api.build_experiment(spec)
    assert float(np.min(experiment.prepared.hyper["noise_std"])) > 0
    assert experiment.proven_epsilon(5) == pytest.approx(1.0, rel=1e-3)
    assert spec.method_options == {"momentum": 0.5}
