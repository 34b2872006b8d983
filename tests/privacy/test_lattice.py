"""The sampler of protected noise: its law is the stated one exactly, and what comes out of it has that law, tails
included."""

import functools
import itertools
import math
import operator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from scipy import stats

from dither.accounting.exact import (
    FAILURE_PER_DRAW,
    SPREAD,
    STD_FACTOR,
    SUM_SPREAD,
    SUM_WIDTH,
    TABLE_STD,
    TV_PER_DRAW,
    WIDTH,
)
from dither.privacy import entropy, lattice, noise
from dither.privacy.entropy import OsEntropy

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

BINS = 2**14
released = jax.jit(lattice.released)


def words_of(seed, count):
    return np.random.default_rng(seed).integers(2**32, size=(4, count), dtype=np.uint32)


@jax.jit
def draw(words):
    return lattice.draw(words[:2], words[2:])


def unpacked():
    """Thresholds of 50 bits and aliases."""
    high, low = lattice.table().astype(object)
    return [(int(h) >> 14) << 32 | int(w) for h, w in zip(high, low, strict=True)], [
        int(h) & BINS - 1 for h in high
    ]


def test_the_weights_are_those_of_a_gaussian():
    weights = lattice._weights(9000)
    for x in (0, 1, 2, 880, 8191, 9000):
        assert weights[x] / 2**256 == pytest.approx(math.exp(-(x**2) / (2 * TABLE_STD**2)), rel=1e-12)


def test_the_table_draws_its_law_exactly():
    cases = [0] * BINS
    for own, (threshold, alias) in enumerate(zip(*unpacked(), strict=True)):
        cases[own] += threshold
        cases[alias] += 2**50 - threshold
    assert cases == [int(count) for count in lattice.law()]
    assert sum(cases) == 2**64
    assert cases[1:] == cases[:0:-1]  # symmetric


def test_the_stated_constants_hold():
    """Items 1 to 5 of the proof in `accounting.exact`."""
    weights = lattice._weights(2 * BINS)  # beyond these, less than 2^-900 in all
    total = weights[0] + 2 * sum(weights[1:])
    cases = {x - BINS // 2: int(count) for x, count in enumerate(lattice.law())}
    within = sum(weights[abs(x)] for x in cases)
    cut = float(Fraction(total - within, total))
    # what each case lacks of its probability given the table's reach, relatively
    lacking = max(1 - Fraction(count * within, weights[abs(x)] << 64) for x, count in cases.items())
    assert FAILURE_PER_DRAW / 2 < 2 * float(lacking) <= FAILURE_PER_DRAW
    smooth = 2.1 * math.exp(-2 * math.pi**2 * TABLE_STD**2 / (SPREAD**2 + 1)), 2.1 * math.exp(-8 * math.pi**2)
    assert smooth[0] < 2.0**-82
    assert smooth[1] < 2.0**-112
    per_draw = 2 * cut + 2.0**-70 + 4 * smooth[0] + 2 * smooth[1]
    assert TV_PER_DRAW / 2 < per_draw <= TV_PER_DRAW
    assert abs(WIDTH**2 / (TABLE_STD**2 * (SPREAD**2 + 1)) - 1) < 1e-15
    assert 1 - 3e-7 < STD_FACTOR < math.sqrt(1 - 4 / WIDTH**2)
    assert abs(float(np.float32(WIDTH)) / WIDTH - 1) < 2.0**-24


def test_the_sum_of_several_draws_is_near_a_wider_gaussian():
    """Sums of the proof in `accounting.exact`: the exact law of three clients' noise, convolved."""
    table = lattice.law().astype(np.float64) / 2.0**64
    reach = BINS // 2 * (SUM_SPREAD + 1)
    spread_out = np.zeros(BINS * SUM_SPREAD)
    spread_out[::SUM_SPREAD] = table
    drawn = scipy.signal.fftconvolve(spread_out, table)
    total = scipy.signal.fftconvolve(scipy.signal.fftconvolve(drawn, drawn), drawn)
    y = np.arange(total.size) - 3 * reach
    gaussian = np.exp(-(y**2) / (6 * SUM_WIDTH**2)) / math.sqrt(6 * math.pi * SUM_WIDTH**2)
    assert np.abs(total - gaussian).sum() / 2 < 1e-12
    assert np.abs(drawn.sum() - 1) < 1e-12


def test_integers_that_are_summed_leave_room_for_all_clients():
    for clients in (2, 16, 1000):
        most = lattice.sum_reach(clients) + BINS // 2 * (SUM_SPREAD + 1)
        assert clients * most < 2**31
    words = [jnp.full(4, word, jnp.uint32) for word in (2**32 - 1, 2**32 - 1, 0, 0)]
    assert int(jnp.max(lattice.draw(words[:2], words[2:], spread=SUM_SPREAD))) <= BINS // 2 * (SUM_SPREAD + 1)


def test_a_pick_compares_all_fifty_bits():
    """Around each threshold, one below keeps the bin and the threshold itself takes the alias."""
    thresholds, aliases = unpacked()
    own = np.array([i for i, t in enumerate(thresholds) if t > 0])
    at = np.array([thresholds[i] for i in own], np.uint64)
    for values, expected in ((at - np.uint64(1), own), (at, np.array(aliases)[own])):
        high = (own.astype(np.uint64) << np.uint64(18) | values >> np.uint64(32)).astype(np.uint32)
        got = jax.jit(lattice._pick)(
            jnp.asarray(high), jnp.asarray((values & np.uint64(2**32 - 1)).astype(np.uint32))
        )
        np.testing.assert_array_equal(got, expected - BINS // 2)


def fit(drawn, reach=6.0, cells=200):
    """p-values of integers of std WIDTH: cells of equal width out to `reach`, both tails, and all residues."""
    z = np.asarray(drawn, np.float64) / WIDTH
    edges = np.concatenate([[-np.inf], np.linspace(-reach, reach, cells + 1), [np.inf]])
    expected = np.diff(stats.norm.cdf(edges)) * len(z)
    seen = np.histogram(z, edges)[0]
    rare = expected < 10
    seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    residues = np.bincount(np.asarray(drawn) % SPREAD, minlength=SPREAD)
    return {
        "variance": 2 * stats.norm.sf(abs(z.var() - 1) / np.sqrt(2 / len(z))),
        "cells": stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue,
        "above": stats.binomtest(int((z > 4).sum()), len(z), stats.norm.sf(4)).pvalue,
        "below": stats.binomtest(int((z < -4).sum()), len(z), stats.norm.sf(4)).pvalue,
        "residues": stats.chisquare(residues).pvalue,
    }


def test_what_is_drawn_fits_tails_included():
    drawn = draw(words_of(3, 2_000_000))
    assert drawn.dtype == jnp.int32
    assert min(fit(drawn).values()) > 1e-6
    # and the check would see a table that is a little off
    assert fit(np.rint(np.asarray(drawn) * 1.005).astype(np.int64))["variance"] < 1e-6
    assert fit(np.clip(drawn, -4 * WIDTH, 4 * WIDTH).astype(np.int64))["above"] < 1e-6
    assert fit(np.asarray(drawn) // 2 * 2)["residues"] < 1e-6


def test_the_words_for_ties_depend_on_each_other_by_fours():
    """Item 5 of the proof: of the words that neighbouring draws on a CPU read at ties, the smallest sets whose sum
    is always 0 have four words, and two of them begin at each draw."""
    draws = 7
    single = [1 << i for i in range(draws + 2)]
    reads = [*single[:draws], *(single[i] ^ single[i + 1] ^ single[i + 2] for i in range(draws))]
    dependent = [
        picks
        for size in (1, 2, 3, 4)
        for picks in itertools.combinations(range(len(reads)), size)
        if functools.reduce(operator.xor, (reads[at] for at in picks)) == 0
    ]
    expected = [(i, i + 1, i + 2, draws + i) for i in range(draws - 2)]
    expected += [(i, i + 3, draws + i, draws + i + 1) for i in range(draws - 3)]
    assert sorted(dependent) == sorted(expected)


@pytest.mark.slow
def test_a_hundred_million_draws_fit():
    draw = jax.jit(lambda source: source.integers([(1_000_000,)])[0])
    drawn = np.concatenate([np.asarray(draw(OsEntropy())) for _ in range(100)])
    assert min(fit(drawn, cells=20_000).values()) > 1e-6
    for reach in (4.5, 5.0, 5.5):
        for side in (drawn > reach * WIDTH, drawn < -reach * WIDTH):
            assert stats.binomtest(int(side.sum()), drawn.size, stats.norm.sf(reach)).pvalue > 1e-7


def test_the_release_is_an_integer_plus_an_integer():
    """y to its nearest lattice point, up to float32, plus what is drawn; a std of 0 changes nothing."""
    value = jnp.asarray(np.random.default_rng(1).normal(size=1000).astype(np.float32))
    std = jnp.float32(0.37)
    step = float(std) / WIDTH
    drawn = draw(words_of(4, 1000))
    noisy = np.asarray(released(value, drawn, std), np.float64) / step
    np.testing.assert_allclose(noisy, np.rint(np.asarray(value, np.float64) / step) + drawn, rtol=3e-7, atol=1)
    np.testing.assert_array_equal(released(value, drawn, jnp.float32(0)), value)
    huge = released(jnp.float32([3e38, -3e38, 0]), jnp.zeros(3, jnp.int32), jnp.float32(1e-36))
    assert np.isfinite(huge).all()


def test_noise_from_given_words_is_what_the_formula_says(monkeypatch):
    """The path of protected noise with words that are known: a party's release can be computed by hand."""
    words = words_of(5, 14).reshape(-1)
    monkeypatch.setattr(entropy, "host_words", lambda count: words[:count].copy())
    tree = {"a": jnp.linspace(-1, 1, 10).reshape(2, 5), "b": jnp.ones(4)}
    noisy = jax.jit(lambda std: noise.gaussian(OsEntropy(), tree, noise_std=std))(0.5)
    ties = words[28:44]
    drawn = np.asarray(draw(np.stack([words[:14], words[14:28], ties[:14], ties[:14] ^ ties[1:15] ^ ties[2:]])))
    for name, part in (("a", drawn[:10].reshape(2, 5)), ("b", drawn[10:])):
        np.testing.assert_array_equal(noisy[name], released(tree[name], part, jnp.float32(0.5)))


def test_a_std_from_numpy_gives_the_bits_of_float32():
    """Whatever number stands for it outside of a compiled round: the grid is that of the std in float32."""
    value, drawn = jnp.linspace(-3, 3, 1000), jnp.arange(1000, dtype=jnp.int32) - 500
    for std in (0.1, 1 / 3, 0.7, 12.3):
        expected = lattice.released(value, drawn, jnp.float32(std))
        np.testing.assert_array_equal(lattice.released(value, drawn, np.float64(std)), expected)
        assert float(lattice.scale_of(np.float64(std), 1.0)) == float(lattice.scale_of(jnp.float32(std), 1.0))
        assert float(lattice.sum_scale(np.float64(std), 1.0)) == float(lattice.sum_scale(jnp.float32(std), 1.0))


def test_without_noise_the_grid_is_as_fine_as_the_values_allow():
    assert float(lattice.scale_of(0.0, 4.0)) == 2.0**26
    assert float(lattice.sum_scale(0.0, 4.0)) == 2.0**16
    assert float(lattice.scale_of(2.0, 4.0)) == pytest.approx(WIDTH / 2, rel=1e-6)
    assert float(lattice.sum_scale(2.0, 4.0)) == pytest.approx(SUM_WIDTH / 2, rel=1e-6)
    for scale in (lattice.scale_of(1e-30, 4.0), lattice.sum_scale(1e-30, 4.0), lattice.scale_of(0.0, 1e-30)):
        assert float(scale) == pytest.approx(1e30)
    value = jnp.array([0.3, -7.0])
    np.testing.assert_array_equal(lattice.released(value, jnp.array([5, 6]), 0.0), value)
