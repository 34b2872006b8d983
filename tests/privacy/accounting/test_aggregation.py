"""R6: secure aggregation, with a Monte Carlo of the aggregated round."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dither.errors import NoProof
from dither.privacy import accounting

CLIENTS = STEPS = 10
BATCH = 400
MULTIPLIER = 1.8544536220275742  # σB/(2·clip) of CPFed at ε = 10
FEATURE = 1.8
CURVATURE = FEATURE**2 / 4  # smoothness of the logistic loss of one record


def observed_mu(step_smoothness, samples=120_000, seed=5):
    """Two worlds of one aggregated round of logistic regression in one dimension, clip 1, full batch.

    The others' records are balanced pairs at |x| = 1.8; the target holds one such record, replaced by its
    mirror image in the other world, and otherwise records at x = 0. Returns the separation of the sums.
    """
    rng = np.random.default_rng(seed)
    noise_std = 2 * MULTIPLIER / BATCH
    rate = step_smoothness / CURVATURE

    def gradient(theta, x, label):
        return np.clip((1 / (1 + np.exp(-x * theta)) - label) * x, -1, 1)

    def world(record):
        theta = np.zeros((CLIENTS, samples))
        for _ in range(STEPS):
            mean = 0.5 * (gradient(theta, FEATURE, 1) + gradient(theta, FEATURE, 0))
            mean[0] = gradient(theta[0], record, 1) / BATCH
            theta = theta - rate * (mean + noise_std * rng.standard_normal(theta.shape))
        return theta.sum(axis=0)

    first, second = world(FEATURE), world(-FEATURE)
    # a threshold attack: for Gaussian sums its operating point gives μ
    threshold = 0.5 * (first.mean() + second.mean())
    return norm.ppf(np.mean(first > threshold)) - norm.ppf(np.mean(second > threshold))


def bound_mu(step_smoothness):
    return accounting.aggregated_round_mu(
        MULTIPLIER,
        STEPS,
        local_steps=STEPS,
        others=CLIENTS - 1,
        step_smoothness=step_smoothness,
        convex=True,
    )


@pytest.mark.parametrize(("step_smoothness", "bound"), [(1.0, 1.237), (0.1, 0.751)])
def test_monte_carlo_of_the_aggregated_round(step_smoothness, bound):
    """G7b: the others' noise contracts; the papers' W = τ is beaten by a simple attack."""
    claimed = STEPS / (MULTIPLIER * math.sqrt(STEPS + (CLIENTS - 1) * STEPS))
    assert claimed == pytest.approx(0.539, abs=1e-3)
    assert bound_mu(step_smoothness) == pytest.approx(bound, abs=1e-3)
    observed = observed_mu(step_smoothness)
    assert claimed * 1.15 < observed < bound
    if step_smoothness == 1.0:
        assert observed > 1.03


def test_contraction_factor():
    assert accounting.contraction_factor(10, 0.1) == pytest.approx(4.623280765312794)
    assert accounting.contraction_factor(10, 0.0) == 10  # the papers' expression
    assert accounting.contraction_factor(10, 1.0) == accounting.contraction_factor(10, None) == 1.0


def test_credit_ends():
    def mu(**changes):
        facts = {"local_steps": 5, "others": 9, "step_smoothness": 0.5, "convex": True, **changes}
        return accounting.aggregated_round_mu(2.0, facts.pop("uses", 5), **facts)

    # all others collude: the plain composition of the target's own steps
    assert mu(others=0) == pytest.approx(math.sqrt(5) / 2)
    # one local step: noise is added once, and the credit is exact
    one = accounting.end_of_round_mu(2.0, others=9)
    assert mu(uses=1, local_steps=1) == pytest.approx(one) == pytest.approx(1 / (2 * math.sqrt(10)))
    assert mu(uses=0) == 0.0
    assert accounting.honest_others(10, 3) == 6
    assert accounting.honest_others(2, 5) == 0


def test_unproved_credit_is_refused():
    def mu(**changes):
        facts = {"local_steps": 5, "others": 9, "step_smoothness": 0.5, "convex": True, **changes}
        return accounting.aggregated_round_mu(2.0, 5, **facts)

    with pytest.raises(NoProof, match="convex"):
        mu(convex=False)
    with pytest.raises(NoProof, match="non-expansive"):
        mu(step_smoothness=None)
    with pytest.raises(NoProof, match=r"2\.5 > 2"):
        mu(step_smoothness=2.5)
    assert mu(convex=False, assume=True) == mu()


def test_smooth_networks():
    """G7c grows with the Lipschitz constant and needs another honest client."""

    def mu(lipschitz, others):
        return accounting.smooth_round_mu(2.0, 3, local_steps=3, others=others, step_lipschitz=lipschitz)

    assert mu(0.0, 9) == pytest.approx(3 / (2 * 3))
    assert mu(0.5, 9) == pytest.approx(0.5 * 1.5**2)
    assert mu(0.5, 0) == math.inf


def test_shuffled_uses():
    assert accounting.shuffled_uses(130, 38) == 4
    assert accounting.shuffled_uses(38, 38) == 1
    assert accounting.shuffled_uses(39, 38) == 2
