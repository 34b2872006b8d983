"""From what is seen of rounds to ε: near the truth where it is Gaussian, never above it where it is not."""

import numpy as np
import pytest

from dither import accounting
from dither.auditing.rounds import attacked
from dither.privacy.discrete import discrete_gaussian
from dither.simulation.aggregation import seeded_words

DELTA, ROUNDS = 1e-5, 3


def seen(mu, bend=lambda value: value, scale=1.0):
    """Rounds whose shifts make μ together; the last one has another scale, and `bend` follows the noise."""
    shift = mu / np.sqrt(ROUNDS)

    def see(first, count, with_record, noise):
        rng = np.random.default_rng(first)
        values = noise * rng.normal(size=(count, ROUNDS, 4))
        values[..., 1] += shift * with_record
        values = bend(values)
        values[:, -1] *= scale
        return values

    return see


def epsilon(see, **changes):
    return attacked(see, delta=DELTA, error=1e-7, **{"gaussian": True, **changes})


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_a_gaussian_shift_is_shown_nearly_in_full(scale):
    proven = accounting.gaussian_epsilon(2.0, DELTA)
    assert 0.85 * proven < epsilon(seen(2.0, scale=scale)) < proven


@pytest.mark.parametrize("bend", [np.sign, np.tanh, lambda value: np.clip(value, -1, 1), lambda value: value**3])
def test_what_bends_the_noise_is_not_taken_for_gaussian(bend):
    """Signs of two Gaussians four apart have means six of their standard deviations apart."""
    proven = accounting.gaussian_epsilon(4.0, DELTA)
    assert 0.2 * proven < epsilon(seen(4.0, bend)) < proven


def test_no_noise_shows_everything():
    assert epsilon(lambda first, count, with_record, noise: np.full((count, 1, 2), float(with_record))) > 1e6


def test_a_record_that_changes_nothing_shows_nothing():
    assert epsilon(seen(0.0)) == 0.0


def test_counts_alone_assume_nothing():
    """A record that makes the noise vanish is seen, though it moves no mean."""

    def see(first, count, with_record, noise):
        values = noise * np.random.default_rng(first).normal(size=(count, 1, 1))
        return 0.01 + values * 0.01 if with_record else values

    assert 2.0 < epsilon(see, gaussian=False) < np.log(4096)


@pytest.mark.parametrize(("std", "step"), [(4.0, 3), (4.0, 12), (40.0, 45)])
def test_noise_on_integers_is_shown_nearly_in_full_and_not_above_its_own_epsilon(std, step):
    """One number, on a grid as coarse as any proof allows: ε of the discrete Gaussian itself, by its sum."""
    values = np.arange(-60 * int(std), 60 * int(std))
    mass, moved = (np.exp(-((values - shift) ** 2) / (2 * std**2)) for shift in (step, 0))
    mass, moved = mass / mass.sum(), moved / moved.sum()
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        over = np.sum(np.maximum(mass - np.exp(middle) * moved, 0.0))
        low, high = (middle, high) if over > DELTA else (low, middle)

    def see(first, count, with_record, noise):
        drawn = discrete_gaussian(count, std**2, words=seeded_words(first))
        return (drawn + step * with_record).astype(float).reshape(count, 1, 1)

    assert 0.8 * low < epsilon(see, halves=False) < low
