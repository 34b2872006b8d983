"""The bounds over priced points: named terms, the rate each theorem allows, what a larger budget buys."""

import math

import numpy as np
import pytest

from dither.errors import SpecError
from dither.experiment.plan import ProblemConstants, bounds, candidates, records
from dither.methods import cpfed, secure_fedavg

NUMBERS = {
    "smoothness": 1.0,
    "strong_convexity": 0.1,
    "pl_constant": 0.5,
    "lipschitz": 1.0,
    "example_lipschitz": 1.0,
    "gradient_variance": 0.5,
    "dissimilarity": 1.1,
    "heterogeneity": 0.01,
    "control_error": 0.01,
    "initial_gap": 5.0,
    "initial_distance": 3.0,
    "initial_gradient_sq": 1.0,
}
CONSTANTS = ProblemConstants(**NUMBERS, sources=dict.fromkeys(NUMBERS, "made up"))
COUNTS = records.counts_only(4000, 3, ("0", "1"))


def priced(method, epsilon=4.0, rounds=(5, 20, 80), clients=4):
    facts = {"privacy.epsilon": epsilon, "privacy.delta": 1e-5, "privacy.view": "upload"}
    facts |= {"privacy.adjacency": "replace-one", "num_clients": clients, "model.name": "logistic"}
    base, _ = records.base_spec(method, facts, {"data.partition": "iid"}, {})
    given = {
        "num_rounds": rounds,
        "cohort_size": (clients,),
        "local_steps": (1, 4),
        "batch_size": (1000,) if method == "nbafl" else (10,) if method == "secure-fedavg" else (50, 1000),
        candidates.clip_key(method): (bounds.theory_clip(base, CONSTANTS),),
        "client_lr": (1.0,),
    }
    points = candidates.points(base, 1000, given)
    return base, [candidates.candidate(base, point, COUNTS) for point in points]


@pytest.mark.parametrize("method", bounds.METHODS)
def test_every_method_has_a_bound_with_named_terms(method):
    base, prices = priced(method)
    found = bounds.bounds(base, prices, CONSTANTS, 1000)
    assert found.total.shape == (len(prices),)
    assert all(np.all(term >= 0) for term in found.terms.values())
    assert any("noise" in name for name in found.terms)
    np.testing.assert_allclose(sum(found.terms.values()), found.total)
    assert found.trivial == 5.0
    best = found.best
    assert found.total[best] == found.total.min()
    assert found.vacuous == (found.total[best] >= 5.0)
    chosen = {name: float(column[best]) for name, column in found.values.items()}
    conditions = bounds.conditions(base, prices[best], CONSTANTS, chosen, 1000)
    # What the theorem lets the planner set, it sets within its conditions.
    assert all(holds for text, holds in conditions if "η" in text or "λ_2" in text)
    louder = bounds.bounds(*priced(method, epsilon=1.0), CONSTANTS, 1000)
    assert louder.total[louder.best] > found.total[best]


def test_cpfed_says_something_for_a_friendly_loss():
    base, prices = priced("cpfed")
    assert not bounds.bounds(base, prices, CONSTANTS, 1000).vacuous
    hard = bounds.bounds(base, prices, CONSTANTS.with_given({"pl_constant": 1e-4}), 1000)
    assert hard.vacuous


def test_rounds_have_an_interior_optimum_at_a_held_rate_only():
    """Rounds buy optimisation and cost noise. At a held rate the best number under a proven budget is interior;
    where the rate may shrink as rounds grow, the bound only flattens."""
    base, prices = priced("cpfed", epsilon=0.5, rounds=(4, 16, 64, 256, 1024, 4096))
    prices = [price for price in prices if price.point["batch_size"] == 1000 and price.point["local_steps"] == 1]
    training = cpfed.AveragingTraining(
        client_lr=0.1,
        smoothness=1.0,
        strong_convexity=0.5,
        local_steps=1,
        num_rounds=np.array([price.point["num_rounds"] for price in prices]),
        num_params=4,
        noise_std=np.array([price.noise_std for price in prices]),
        gradient_variance=0.5 / 1000,
        client_size=1000,
        initial_gap=5.0,
    )
    held = cpfed.convergence_convex(training, corrected=True).total
    assert 0 < np.argmin(held) < len(held) - 1
    free = bounds.bounds(base, prices, CONSTANTS, 1000).total
    assert free[-1] < 1.05 * free.min()
    assert held[-1] > 1.5 * held.min()


def test_the_papers_epsilon_of_the_added_noise_is_what_its_bound_is_given():
    """Secure FedAvg's Theorem 1 at the proven noise: the message ε of eq (9) for that noise, not the target."""
    _, prices = priced("secure-fedavg")
    one = prices[0]
    params = secure_fedavg.SecureFedavgParams(one.spec.local_steps, one.spec.batch_size, client_size=1000)
    delta = 4 * one.spec.local_steps * one.spec.privacy.clip_norm * one.spec.client_lr
    claimed = secure_fedavg.epsilon_of_noise(params, noise_std=one.noise_std, sensitivity=delta, delta=1e-5)
    assert one.claimed.value == pytest.approx(float(claimed))
    assert not math.isclose(one.claimed.value, 4.0, rel_tol=0.05)


def test_a_loss_without_strong_convexity_is_refused_where_it_is_needed():
    base, prices = priced("secure-fedavg")
    with pytest.raises(SpecError, match=r"set model\.l2"):
        bounds.bounds(base, prices, CONSTANTS.with_given({"strong_convexity": 0.0}), 1000)
