"""Secure FedAvg against a loop written from Algorithm 1, record by record, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import methods, models
from dither.errors import SpecError
from dither.methods import secure_fedavg
from dither.privacy import sampling
from dither.types import Keys, Records, Round, RoundInfo, Uses
from tests.conftest import make_plan, make_records

SIZES = [12, 30, 17]


def reference_client(start, x, y, batches, first_step, *, lr, decay, clip_norm, l2):
    """Q steps of w <- w - η_t clip(mean gradient + 2 λ w, G) for logistic regression; w has the bias last."""
    w = start.copy()
    for number, batch in enumerate(batches):
        features = np.hstack([x[batch], np.ones((len(batch), 1))]).astype(np.float64)
        p = 1 / (1 + np.exp(-features @ w))
        gradient = features.T @ (p - y[batch]) / len(batch) + 2 * l2 * w
        size = np.linalg.norm(gradient)
        gradient *= min(1, clip_norm / size)
        w = w - lr / (1 + decay * (first_step + number)) * gradient
    return w


def flat(params):
    return np.concatenate([np.asarray(params["out"]["w"]).ravel(), np.asarray(params["out"]["b"])])


def one_client(plan, client=1, index=4, seed=0):
    model = models.logistic(6)
    prepared = secure_fedavg.prepare(model, plan)
    algorithm = prepared.build(prepared.hyper)
    x, y = make_records(sum(SIZES))
    start_row = sum(SIZES[:client])
    rng = np.random.default_rng(1)
    start = {
        "out": {
            "w": jnp.asarray(rng.normal(size=(6, 1)), jnp.float32),
            "b": jnp.asarray(rng.normal(size=1), jnp.float32),
        }
    }
    keys = Keys(*(jax.random.fold_in(jax.random.key(seed), i) for i in range(3)))
    records = Records(
        jnp.asarray(x), jnp.asarray(y), jnp.arange(len(y)), jnp.int32(start_row), jnp.int32(SIZES[client])
    )
    result = algorithm.client(keys, start, (), records, Round(jnp.int32(index), jnp.int32(client), jnp.int32(2)))
    own = slice(start_row, start_row + SIZES[client])
    return result, start, keys, x[own], y[own], prepared


@pytest.mark.parametrize("local_steps", [1, 4])
def test_a_client_follows_algorithm_1(local_steps):
    plan = make_plan(SIZES, local_steps=local_steps, noise="none", options={"first_round": "all"})
    result, start, keys, x, y, _ = one_client(plan)
    sampler = sampling.make("fixed", batch_size=3, local_steps=local_steps, client_sizes=np.array(SIZES))
    batches = np.asarray(sampler.draw(keys, 0, jnp.int32(SIZES[1])).positions)
    end = reference_client(flat(start), x, y, batches, 4 * local_steps, lr=0.2, decay=0.01, clip_norm=2.0, l2=1e-4)
    weight = SIZES[1] / sum(SIZES) * 3 / 2  # p_k N/|S_t|
    assert float(result.weight) == pytest.approx(weight)
    np.testing.assert_allclose(flat(result.upload), weight * (end - flat(start)), rtol=2e-5, atol=2e-6)


def test_each_client_gets_the_noise_of_its_own_size():
    plan = make_plan(SIZES, options={"first_round": "all"})
    prepared = secure_fedavg.prepare(models.logistic(6), plan)
    for client, size in enumerate(SIZES):
        q = 2 * 3 / size
        expected = np.sqrt(8) * q * np.sqrt(np.log(1.25 * q / 1e-4)) / 0.5
        assert prepared.hyper["noise_multiplier"][client] == pytest.approx(expected, rel=1e-12)
    assert prepared.claim.value == pytest.approx(0.5)
    assert prepared.claim.unit == "message"


def test_the_release_states_what_the_client_does():
    plan = make_plan(SIZES, options={"first_round": "all"})
    prepared = secure_fedavg.prepare(models.logistic(6), plan)
    (release,) = prepared.releases(RoundInfo(index=4, client=1, size=30, cohort_size=2))
    rates = [0.2 / (1 + 0.01 * t) for t in (8, 9, 10)]
    assert release.sensitivity == pytest.approx(2 * 2.0 * (rates[0] + rates[1]))  # 2 G Σ η
    assert release.noise_std == pytest.approx(prepared.hyper["noise_multiplier"][1] * 4 * 2 * 2.0 * rates[2])
    assert release.sampling.rate == pytest.approx(1 - (1 - 3 / 30) ** 2)
    assert release.uses == 1
    assert release.by_use is None
    plan = plan._replace(clip="example")
    (release,) = secure_fedavg.prepare(models.logistic(6), plan).releases(RoundInfo(4, 1, 30, 2))
    one_use = 2 * 2.0 / 3 * rates[0]  # 2G/b at the largest rate of the round
    assert release.by_use == Uses(2, pytest.approx(one_use / release.sensitivity), 0.2)


def test_the_claim_states_what_fails_for_the_largest_client():
    """Its records are drawn most rarely, so that its base ε/(2q), here ε·60/12, is the largest."""
    for epsilon, base, holds in ((0.198, 0.99, True), (0.202, 1.01, False)):
        plan = make_plan([20, 60, 40], epsilon=epsilon, options={"first_round": "all"})
        conditions = dict(secure_fedavg.prepare(models.logistic(6), plan).claim.conditions)
        assert conditions[f"classical Gaussian mechanism: base ε/(2q) = {base} < 1"] is holds


def test_the_claim_asks_lemma_1_of_the_first_round():
    """There rates fall fastest: η_0 <= 2 η_2 just where two steps of decay add at most 1."""
    for decay, holds in ((0.49, True), (0.51, False)):
        plan = make_plan(SIZES, epsilon=0.01, lr_decay=decay, options={"first_round": "all"})
        failing = methods.failing(secure_fedavg.prepare(models.logistic(6), plan).claim.conditions)
        assert any("Lemma 1" in text for text in failing) is not holds


def test_uploads_of_a_round_average_to_weight_one():
    """With all clients and no noise, equal changes w - w̄ of every client move the average by that change."""
    plan = make_plan(SIZES, noise="none", options={"first_round": "all"})
    prepared = secure_fedavg.prepare(models.logistic(6), plan)
    assert prepared.cohort_size_at(0) == 3
    assert prepared.cohort_size_at(1) == plan.cohort_size
    weights = [size / sum(SIZES) * 3 / 3 for size in SIZES]
    assert sum(weights) == pytest.approx(1)


def test_eq_9_refuses_a_delta_too_large_for_the_sampling_rate():
    plan = make_plan([5000], local_steps=1, batch_size=1, delta=0.3, options={"first_round": "all"})
    with pytest.raises(SpecError, match=r"q=0\.0002"):
        secure_fedavg.prepare(models.logistic(6), plan)
