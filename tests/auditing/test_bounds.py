"""Lower bounds on ε: valid at their confidence, sharp enough, and the same as jax-privacy's where both exist."""

import math

import numpy as np
import pytest
from jax_privacy import auditing
from scipy.stats import beta, binom

from dither import accounting
from dither.auditing import bounds


def gaussian_scores(mu, trials, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(mu, 1, trials), rng.normal(0, 1, trials)


def test_clopper_pearson_limits_are_the_beta_quantiles():
    for count, trials in ((0, 50), (3, 50), (50, 50), (700, 10_000)):
        upper = 1.0 if count == trials else beta.ppf(0.99, count + 1, trials - count)
        lower = 0.0 if count == 0 else beta.ppf(0.01, count, trials - count + 1)
        assert float(bounds.upper_rate(count, trials, 0.01)) == pytest.approx(upper, rel=1e-9)
        assert float(bounds.lower_rate(count, trials, 0.01)) == pytest.approx(lower, rel=1e-9)


@pytest.mark.parametrize("form", ["counts", "mu"])
def test_bounds_hold_at_their_confidence(form):
    """At 80% confidence one in five may fail; a bound that ignored its choice of threshold would more often."""
    mu, delta, trials = 1.0, 1e-3, 2000
    true = accounting.gaussian_epsilon(mu, delta)
    failures = 0
    for seed in range(100):
        pilot, main = gaussian_scores(mu, 500, seed), gaussian_scores(mu, trials, 10_000 + seed)
        if form == "counts":
            thresholds = bounds.choose_thresholds(*pilot, trials=trials, delta=delta, error=0.2)
            found = bounds.count_bound(main, thresholds, delta=delta, confidence=0.8)
        else:
            found = bounds.mu_bound(main, bounds.mu_thresholds(*pilot), delta=delta, confidence=0.8)
        failures += found.value > true
        assert found.value > 0.2 * true
    assert failures <= binom.ppf(0.999, 100, 0.2)


def test_the_gaussian_form_reaches_nearly_all_of_epsilon():
    mu, delta = 0.8, 1e-5
    pilot, main = gaussian_scores(mu, 2000, 1), gaussian_scores(mu, 200_000, 2)
    found = bounds.mu_bound(main, bounds.mu_thresholds(*pilot), delta=delta, confidence=0.99)
    assert 0.9 < found.value / accounting.gaussian_epsilon(mu, delta) <= 1
    assert "assumes Gaussian trade-off" in found.form


def test_counts_agree_with_jax_privacy_at_a_given_threshold():
    inside, outside = gaussian_scores(1.5, 5000, 3)
    ours = bounds.count_bound((inside, outside), [bounds.Threshold(1.2, "in")], delta=1e-5, confidence=0.99)
    theirs = auditing.CanaryScoreAuditor(inside, outside).epsilon_clopper_pearson(
        0.01, 1e-5, threshold_strategy=auditing.Explicit(1.2)
    )
    assert ours.value == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("right", [55, 70, 100])
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_one_run_agrees_with_jax_privacy(right, delta):
    """Guesses of one side only, as jax-privacy makes them: `right` of 100 calls among 1000 canaries."""
    guesses = bounds.Guesses(1000, 100, right)
    inside = np.concatenate([np.full(right, 2.0), np.full(500 - right, 0.0)])
    outside = np.concatenate([np.full(100 - right, 2.0), np.full(400 + right, 0.0)])
    judge = auditing.CanaryScoreAuditor(inside, outside)
    at = auditing.Explicit(1.0)
    ours = bounds.one_run_bound(guesses, delta=delta, confidence=0.95).value
    assert ours == pytest.approx(judge.epsilon_one_run(0.05, delta, threshold_strategy=at), abs=2e-5)
    ours = bounds.one_run_gaussian_bound(guesses, delta=delta, confidence=0.95).value
    assert ours == pytest.approx(judge.epsilon_one_run_fdp(0.05, delta, threshold_strategy=at), abs=2e-3)


def test_one_run_bounds_hold_for_independent_canaries():
    mu, delta, failures = 1.0, 1e-5, 0
    true = accounting.gaussian_epsilon(mu, delta)
    values = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        included = rng.random(1000) < 0.5
        guesses = bounds.count_guesses(rng.normal(mu * included, 1), included, 0.2)
        values.append(bounds.one_run_gaussian_bound(guesses, delta=delta, confidence=0.9).value)
        failures += values[-1] > true
        failures += bounds.one_run_bound(guesses, delta=delta, confidence=0.9).value > true
    assert failures <= binom.ppf(0.999, 100, 0.1)
    assert np.mean(values) > 0.4 * true


def test_an_exhibited_pair_gives_the_exact_value_from_below():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.5, 100_000)
    plain = bounds.exhibited_bound(bounds.ExhibitedPair(1.0, noise, None, 10), delta=1e-5, confidence=0.99)
    assert 0.98 < plain.value / accounting.gaussian_epsilon(2.0, 1e-5) <= 1
    thrice = bounds.exhibited_bound(bounds.ExhibitedPair(1.0, noise, None, 10, 3), delta=1e-5, confidence=0.99)
    assert 0.98 < thrice.value / accounting.gaussian_epsilon(2.0 * math.sqrt(3), 1e-5) <= 1
    rare = bounds.exhibited_bound(bounds.ExhibitedPair(1.0, noise, 2000, 100_000), delta=1e-4, confidence=0.99)
    assert 0.9 < rare.value / accounting.message_epsilon(2.0, 0.02, 1e-4) <= 1
    often = bounds.exhibited_bound(
        bounds.ExhibitedPair(1.0, noise, 2000, 100_000, 50), delta=1e-4, confidence=0.99
    )
    assert 0.9 < often.value / accounting.fixed_size_epsilon(0.02, 0.5, 50, 1e-4) <= 1


def test_nothing_seen_shows_nothing():
    same = np.zeros(1000)
    thresholds = bounds.choose_thresholds(same, same, trials=1000, delta=1e-5, error=0.05)
    assert bounds.count_bound((same, same), thresholds, delta=1e-5, confidence=0.95).value == 0
    silent = bounds.exhibited_bound(bounds.ExhibitedPair(0.0, np.ones(10), 10, 10), delta=1e-5, confidence=0.95)
    assert silent.value == 0
