"""Secure FedAvg against a loop written from Algorithm 1, record by record, in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import methods, models
from dither.errors import SpecError
from dither.methods import local, secure_fedavg
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


def apart_at_most(rates, l2, length):
    """How far two runs can end from each other: in each step one of them goes `length` further, and a regulariser
    outside the clip multiplies what is between them, by a factor that is counted where it exceeds 1."""
    between = 0.0
    for rate in rates:
        between = max(1.0, abs(1 - 2 * rate * l2)) * between + 2 * length * rate
    return between


@pytest.mark.parametrize(
    ("clip", "inside", "l2", "decay"),
    [
        ("batch", True, 30.0, 0.5),
        ("batch", False, 30.0, 0.5),
        ("example", True, 0.01, 0.0),
        ("example", True, 30.0, 0.5),
    ],
)
def test_the_sensitivity_is_that_of_the_worst_two_runs_of_a_round(clip, inside, l2, decay):
    values = {"clip": clip, "l2": l2, "l2_inside_clip": inside, "lr_decay": decay}
    plan = make_plan(SIZES, **values, local_steps=4, options={"first_round": "all"})
    (release,) = secure_fedavg.prepare(models.logistic(6), plan).releases(RoundInfo(2, 1, 30, 2))
    rates = [0.2 / (1 + decay * t) for t in range(8, 12)]
    outside = clip == "example" or not inside
    assert release.sensitivity == pytest.approx(apart_at_most(rates, l2 if outside else 0.0, 2.0), rel=1e-12)


def test_poisson_batches_are_as_long_as_their_cap():
    plan = make_plan([50] * 3, clip="example", batch_sampling="poisson", options={"first_round": "all"})
    sampler = sampling.make("poisson", batch_size=3, local_steps=2, client_sizes=np.array([50]))
    for each, length in ((plan, sampler.width / 3), (plan._replace(clip="batch"), 1.0)):
        (release,) = secure_fedavg.prepare(models.logistic(6), each).releases(RoundInfo(0, 1, 50, 2))
        assert release.sensitivity == pytest.approx(2 * 2.0 * length * (0.2 + 0.2 / 1.01))
    assert sampler.width > 3


FAR = 2.0**100 / 0.8  # a clip of which two steps of rate 0.2 go 2^100 apart


@pytest.mark.parametrize(("l2", "clip_norm", "bounded"), [
    (2.5 * 2.0**29.9, 2.0, True), (2.5 * 2.0**30.1, 2.0, False), (0.0, 0.99 * FAR, True), (0.0, 1.01 * FAR, False),
])  # fmt: skip
def test_rounds_that_float32_may_not_finish_have_no_bound(l2, clip_norm, bounded):
    """For a rate η of 0.2, |1 - 2ηλ|² is 2^60 where λ = 2.5·2^30."""
    plan = make_plan(
        SIZES, clip="example", l2=l2, clip_norm=clip_norm, lr_decay=0.0, options={"first_round": "all"}
    )  # fmt: skip
    (release,) = secure_fedavg.prepare(models.logistic(6), plan).releases(RoundInfo(0, 1, 30, 2))
    assert np.isfinite(release.sensitivity) == bounded


def test_what_is_proven_of_float32_is_a_little_further():
    plan = make_plan(SIZES, exact_noise=True, options={"first_round": "all"})
    exactly, ideal = (
        secure_fedavg.prepare(models.logistic(6), each).releases(RoundInfo(0, 1, 30, 2))[0].sensitivity
        for each in (plan, plan._replace(exact_noise=False))
    )
    operations = (8 * 2 + 16) * 2.0**-24
    error = (1 + local.whole_error(models.logistic(6))) * (1 + operations / (1 - operations))
    assert exactly == pytest.approx(ideal * error, rel=1e-12)
    assert exactly > ideal * (1 + operations)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise_schedule": "rounds"}, "noise_schedule='rounds'"),
        ({"noise_scale": (1.0,) * 3}, "noise_scale is for"),
    ],
)
def test_what_only_noise_on_gradients_has_is_refused(changes, said):
    with pytest.raises(SpecError, match=f"{said}.* not secure-fedavg"):
        secure_fedavg.prepare(models.logistic(6), make_plan(SIZES, options={"first_round": "all"}, **changes))


def test_eq_9_needs_a_sampling_bound_above_four_fifths_of_delta():
    """There its logarithm, ln(1.25 q/δ), is 0."""
    for batch_size, refused in ((79, True), (80, True), (81, False)):  # q in thousandths, δ = 0.1
        params = secure_fedavg.SecureFedavgParams(1, batch_size, 1000)
        if refused:
            with pytest.raises(SpecError, match=r"needs q = .* > 0\.8\*delta"):
                secure_fedavg.noise_multiplier(params, epsilon=1.0, delta=0.1)
        else:
            expected = np.sqrt(8) * 0.081 * np.sqrt(np.log(1.25 * 0.81))
            assert secure_fedavg.noise_multiplier(params, epsilon=1.0, delta=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(("l2", "local_steps"), [(0.0, 3), (1.0, 3), (30.0, 4)])
def test_a_change_is_put_into_the_ball_that_the_release_speaks_of(monkeypatch, l2, local_steps):
    """With exact noise a change is clipped, last of all, to half of the sensitivity: at the rates of the round,
    and times what a regulariser outside the clip adds. The ball lies around what a round without records leaves of
    the message, which is public."""
    clipped = []

    def watched(plan, tree, reach):
        clipped.append((flat(tree), float(reach)))
        return tree

    monkeypatch.setattr(local, "clip_whole", watched)
    plan = make_plan(
        SIZES, exact_noise=True, clip="example", l2=l2, lr_decay=0.5, local_steps=local_steps,
        options={"first_round": "all"},
    )  # fmt: skip
    result, start, _, _, _, ready = one_client(plan, index=2)
    ((moved, reach),) = clipped
    rates = [0.2 / (1 + 0.5 * t) for t in range(2 * local_steps, 3 * local_steps)]
    assert 2 * reach == pytest.approx(apart_at_most(rates, l2, 2.0), rel=1e-6)
    (release,) = ready.releases(RoundInfo(2, 1, 30, 2))
    assert release.sensitivity == pytest.approx(2 * reach, rel=1e-4)
    kept = np.prod([1 - 2 * rate * l2 for rate in rates])
    weight = SIZES[1] / sum(SIZES) * 3 / 2
    noisy = flat(result.upload) / weight - (kept - 1) * flat(start)
    assert np.abs(noisy - moved).max() < 6 * release.noise_std
