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


def test_conversions_by_hand():
    assert methods.classical_noise_multiplier(epsilon=0.5, delta=1e-5) == pytest.approx(
        np.sqrt(2 * np.log(1.25e5)) / 0.5
    )
    assert methods.zcdp_of_gaussian(sensitivity=3.0, noise_std=2.0) == pytest.approx(9 / 8)
    assert methods.epsilon_from_zcdp(rho=0.1, delta=1e-5) == pytest.approx(0.1 + 2 * np.sqrt(0.1 * np.log(1e5)))
    assert methods.epsilon_from_rdp(rdp=0.1, alpha=3.0, delta=1e-5) == pytest.approx(0.1 + np.log(1e5) / 2)
    np.testing.assert_array_equal(
        methods.epsilon_from_rdp(rdp=0.0, alpha=[0.5, 1.0, 2.0], delta=np.exp(-1.0)), [np.inf, np.inf, 1.0]
    )


def test_zcdp_adds_up_over_mechanisms_or_is_the_largest_of_disjoint_ones():
    rhos = [[0.1, 0.4, 0.2], [1.0, 2.0, 3.0]]
    np.testing.assert_allclose(methods.composed_zcdp(rhos), [0.7, 6.0])
    np.testing.assert_allclose(methods.composed_zcdp(rhos, disjoint=True), [0.4, 3.0])


@pytest.mark.parametrize("ratio", [0.5, 0.999999, 1.0, 1.7])
def test_a_geometric_sum_is_that_of_its_terms(ratio):
    for count in (0, 1, 5):
        expected = sum(ratio**j for j in range(count))
        assert methods.geometric_sum(np.log(ratio), count) == pytest.approx(expected, rel=1e-9)


def test_what_is_above_0_is_finite_too():
    methods.check_positive(a=1e-300, b=[1.0, 2.0])
    for value in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(SpecError, match=r"b=.* must be a finite number above 0"):
            methods.check_positive(a=1.0, b=value)


def test_a_bound_is_the_sum_of_its_named_terms():
    bound = methods.BoundTerms(noise=1.5, drift=2.0)
    assert (bound.noise, bound["drift"], bound.total) == (1.5, 2.0, 3.5)
    assert bound.scaled(2.0) == {"noise": 3.0, "drift": 4.0}
    with pytest.raises(AttributeError, match="no term 'variance'; there are noise, drift"):
        _ = bound.variance
    assert methods.failing((("holds", True), ("fails", False))) == ("fails",)
