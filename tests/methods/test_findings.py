"""What the papers find, on real data and over seeds. Minutes long: run with `make test-slow`."""

import numpy as np
import pytest

import dither
from dither.spec import Spec
from tests.conftest import load_or_skip

pytestmark = pytest.mark.slow


def final(specs, metric, **arguments):
    outcomes = dither.sweep(specs, **arguments)
    return np.array([outcome.metrics[-1][metric] for outcome in outcomes])


def test_scaffold_needs_fewer_rounds_than_averaging_on_one_class_clients():
    """Without noise, one class a client, 20 local steps: rounds to 0.85 on digits, 3 seeds."""
    base = Spec().with_values(
        {
            "num_clients": 20,
            "cohort_size": 10,
            "num_rounds": 50,
            "local_steps": 20,
            "batch_size": 20,
            "client_lr": 0.1,
            "eval_every": 2,
            "data.name": "digits",
            "data.partition": "one-class",
            "model.name": "softmax",
            "privacy.noise": "none",
        }
    )
    needed = {}
    for method in ("fedavg", "scaffold"):
        outcomes = dither.sweep([base.with_values({"method": method, "seed": seed}) for seed in range(3)])
        needed[method] = [
            next((row["round"] for row in outcome.metrics if row["test_accuracy"] >= 0.85), np.inf)
            for outcome in outcomes
        ]
    assert max(needed["scaffold"]) < min(needed["fedavg"]), needed


def test_nbafl_improves_with_epsilon():
    """Training loss on MNIST falls as ε grows (Fig. 2), mean of 2 seeds; from 100 on the noise hardly shows."""
    mnist = load_or_skip("mnist")
    base = Spec.from_preset("nbafl").with_values({"eval_every": 25})
    levels = (50.0, 60.0, 100.0, float("inf"))
    specs = [base.with_values({"privacy.epsilon": e, "seed": s}) for e in levels for s in range(2)]
    loss = final(specs, "train_loss", dataset=mnist).reshape(4, 2).mean(1)
    assert loss[0] > loss[1] > loss[2], loss
    assert loss[3] < loss[2] + 0.01, loss


def test_cpfed_with_the_aggregation_credit_is_at_least_as_accurate():
    """At equal claimed ε, with and without the credit of secure aggregation (Fig. 8), mean of 5 seeds."""
    load_or_skip("adult")
    base = Spec.from_preset("cpfed").with_values({"local_steps": 2, "eval_every": 20})
    for epsilon in (0.5, 2.0, 10.0):
        accuracy = {}
        for credit in (True, False):
            values = {"privacy.epsilon": epsilon, "method_options.aggregation_credit": credit}
            specs = [base.with_values({**values, "seed": seed}) for seed in range(5)]
            accuracy[credit] = final(specs, "test_accuracy")
        gain = accuracy[True] - accuracy[False]
        assert gain.mean() > -2 * gain.std(ddof=1) / np.sqrt(5), (epsilon, accuracy)
