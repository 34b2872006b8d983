"""The conversions that the papers share, against the published numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dither import methods
from dither.errors import SpecError

from .published import ENTRIES, vectors

DISPATCH = {
    "gen.classical_z.*": lambda v: methods.classical_noise_multiplier(epsilon=v["eps"], delta=v["delta"]),
}


test_published_value, test_every_paper_entry_is_covered = vectors(DISPATCH, "gen")


def test_vector_file_is_complete():
    raw = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
    assert len(raw["values"]) == len({entry["id"] for entry in raw["values"]}) == 221
    assert {entry["kind"] for entry in ENTRIES} == set(raw["kinds"])
    assert {entry["id"].split(".")[0] for entry in ENTRIES} == {"sf", "nb", "sc", "cp", "cd", "gen", "sa"}


def test_zcdp_round_trip_over_many_scales():
    epsilon = np.logspace(-8, 4, 200)
    rho = methods.zcdp_from_epsilon(epsilon=epsilon, delta=1e-5)
    np.testing.assert_allclose(methods.epsilon_from_zcdp(rho=rho, delta=1e-5), epsilon, rtol=1e-12)


def test_rdp_at_order_one_claims_nothing():
    assert methods.epsilon_from_rdp(rdp=0.1, alpha=1.0, delta=1e-5) == np.inf


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, np.nan])
def test_delta_out_of_range_is_refused(delta):
    with pytest.raises(SpecError, match="delta="):
        methods.gaussian_constant(delta)


def test_errors_name_the_value():
    with pytest.raises(SpecError, match=r"epsilon=-2 must be"):
        methods.check_positive(epsilon=[1.0, -2.0])
    with pytest.raises(SpecError, match=r"cohort_size=5 exceeds num_clients=4"):
        methods.check_cohort([1, 5], 4)
    with pytest.raises(SpecError, match=r"delta=1 must lie"):
        methods.check_delta([0.5, 1.0])
    with pytest.raises(SpecError, match=r"delta=0 must lie"):
        methods.epsilon_from_zcdp(rho=0.1, delta=0.0)
