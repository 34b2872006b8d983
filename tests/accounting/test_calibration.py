"""Calibration: the noise found really has the ε asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither import accounting
from dither.accounting import ADD_REMOVE, REPLACE_ONE, Conditions
from dither.errors import NoProof
from dither.types import Release, Sampling

targets = st.floats(math.log(0.05), math.log(30.0)).map(math.exp)


def calibrate_releases(epsilon, delta, participations, conditions=None, *, guess=1.0, **target):
    target = {"view": "upload", **target}
    return accounting.calibrate(
        epsilon,
        lambda noise: accounting.proven(participations(noise), delta, conditions, **target).value,
        guess=guess,
    )


def check(epsilon, achieved):
    assert achieved <= epsilon
    assert achieved >= 0.999 * epsilon


@settings(max_examples=15, deadline=None)
@given(
    epsilon=targets,
    kind=st.sampled_from(["full", "fixed", "poisson"]),
    rate=st.floats(0.005, 0.5),
    steps=st.integers(1, 500),
)
def test_round_trip(epsilon, kind, rate, steps):
    adjacency = ADD_REMOVE if kind == "poisson" else REPLACE_ONE
    sampling = Sampling(kind, rate, adjacency)

    def participations(noise):
        return [(Release("uplink", noise, 1.0, 1, sampling, "test"), steps)]

    noise = calibrate_releases(epsilon, 1e-5, participations, adjacency=adjacency)
    check(epsilon, accounting.proven(participations(noise), 1e-5, view="upload", adjacency=adjacency).value)


@pytest.mark.parametrize("view", ["upload", "sum", "final"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_every_view_and_a_decaying_schedule(view, epsilon):
    conditions = Conditions(cohort_size=8, convex=True, smoothness=0.2)

    def participations(noise):
        return [
            (Release("uplink", noise * 0.98**r, 1.0, 5, Sampling("fixed", 0.1, REPLACE_ONE), "test", (1.0,)), 1)
            for r in range(60)
        ]

    noise = calibrate_releases(
        epsilon, 1e-5, participations, conditions, view=view, adjacency=REPLACE_ONE, guess=5.0
    )
    check(
        epsilon, accounting.proven(participations(noise), 1e-5, conditions, view=view, adjacency=REPLACE_ONE).value
    )


def test_agrees_with_the_analytic_calibration():
    noise = accounting.calibrate(2.0, lambda z: accounting.gaussian_epsilon(1 / z, 1e-6))
    assert noise == pytest.approx(accounting.gaussian_noise_multiplier(2.0, 1e-6), rel=1e-3)


@pytest.mark.parametrize("guess", [1e-3, 1.0, 1e5])
def test_guess_does_not_matter(guess):
    noise = accounting.calibrate(0.5, lambda z: accounting.fixed_size_epsilon(0.1, z, 50, 1e-5), guess=guess)
    check(0.5, accounting.fixed_size_epsilon(0.1, noise, 50, 1e-5))


def test_no_proof_is_said():
    sampling = Sampling("fixed", 0.1, REPLACE_ONE)
    with pytest.raises(NoProof):
        calibrate_releases(
            1.0,
            1e-5,
            lambda noise: [(Release("uplink", noise, 1.0, 1, sampling, "test"), 5)],
            adjacency=ADD_REMOVE,
        )
    with pytest.raises(ValueError, match="epsilon=0"):
        accounting.calibrate(0.0, lambda noise: 1 / noise)


def test_jump_past_the_target_keeps_the_promise():
    noise = accounting.calibrate(1.0, lambda z: 2.0 if z < 3.0 else 0.5)
    assert noise == pytest.approx(3.0, rel=1e-5)
    assert noise >= 3.0


def test_where_any_noise_will_do_the_least_that_is_looked_at_is_taken():
    assert 0 < accounting.calibrate(1.0, lambda noise: 0.0, guess=3.0) < 3.0 * 2.0**-37


def test_what_cannot_be_searched_is_refused():
    for guess in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=f"guess={guess}"):
            accounting.calibrate(1.0, lambda noise: 1 / noise, guess=guess)
    for epsilon in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive and finite"):
            accounting.calibrate(epsilon, lambda noise: 1 / noise)
    with pytest.raises(ValueError, match="not a number"):
        accounting.calibrate(1.0, lambda noise: math.nan)
    with pytest.raises(NoProof, match="no noise reaches epsilon=1"):
        accounting.calibrate(1.0, lambda noise: 2.0)


@pytest.mark.parametrize("rough", [1e-3, 1e-2])
def test_a_rough_curve_is_met_from_below_and_closely(rough):
    """A grid makes ε jump by its cells: the noise found meets the target all the same."""

    def stairs(noise):
        return math.ceil(1 / noise / rough) * rough

    noise = accounting.calibrate(1.0 + rough / 2, stairs, guess=40.0)
    assert stairs(noise) == pytest.approx(1.0)
    assert noise == pytest.approx(1.0, rel=1e-4)
