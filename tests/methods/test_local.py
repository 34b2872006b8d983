"""An adaptive clip: what its count reveals is in the release, and the clip follows the quantile."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import models
from dither.accounting import exact
from dither.errors import SpecError
from dither.experiment import build
from dither.methods import baselines, local
from dither.privacy import noise
from dither.simulation import engine
from dither.types import CLIP_RANGE, Keys, Records, Release, Round, RoundInfo, Sampling
from tests.auditing.grid import small_dataset, small_spec
from tests.conftest import make_federation, make_plan

SIZE, FEATURES, CLIP = 8, 4, 0.6
ADAPTS = {"clip": "example", "clip_norm": CLIP, "clip_quantile": 0.5, "l2": 0.0, "lr_decay": 0.0, "client_lr": 1.0}


def prepared(size, **changes):
    values = {"noise": "given", "noise_std": 0.05, "unit": "run", "local_steps": 1, "batch_sampling": "full"}
    plan = make_plan([size] * 3, cohort_size=3, options={"equal_credit": False}, **{**values, **ADAPTS, **changes})
    return baselines.prepare_dp_sgd(models.logistic(FEATURES), plan)


@pytest.fixture(scope="module")
def ready():
    return prepared(SIZE)


def compiled(ready):
    """A compiled function of a record, its label, the clip that is broadcast, a factor of the noise and a seed,
    each along a first axis: uploads `[count, FEATURES + 2]` of client 0 from a model of zeros, the change of the
    model and then the balance, in units of the first clip. The other records are blank."""
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in ready.hyper.items()}
    params = jax.tree.map(jnp.zeros_like, models.logistic(FEATURES).init(jax.random.key(0)))

    def one(record, label, clip, noise, seed):
        algorithm = ready.build({**hyper, "noise_std": hyper["noise_std"] * noise})
        message = {**algorithm.message(algorithm.init(params)), "clip": clip}
        x = jnp.zeros((SIZE, FEATURES)).at[0].set(record)
        y = jnp.full(SIZE, -1, jnp.int32).at[0].set(label)
        records = Records(x, y, jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
        keys = Keys(*jax.random.split(jax.random.key(seed), 3))
        round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(1))
        sent = algorithm.client(keys, message, algorithm.client_init(params), records, round).upload
        leaves = [*jax.tree.leaves(sent["model"]), local.COUNT_SHARE * CLIP * sent["unclipped"]]
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    return jax.jit(jax.vmap(one))


_COMPILED = functools.cache(lambda: compiled(prepared(SIZE)))


def upload(record, label, *, clip=1.0, noise=0.0):
    """Uploads of 1,000 seeds."""
    filled = [np.full(1000, each, np.float32) for each in (record, clip, noise)]
    record, clip, noise = np.repeat(filled[0][:, None], FEATURES, 1), *filled[1:]
    rows = _COMPILED()(record, np.full(1000, label), clip, noise, np.arange(1000))
    return np.asarray(rows, np.float64)


def test_the_count_is_in_the_sensitivity(ready):
    """A clipped and a blanked record are as far apart as the release says: without the charge for the count the
    release would promise too much."""
    (release,) = ready.releases(RoundInfo(0, 0, SIZE, 3))
    far, blank, small = (upload(x, y)[0] for x, y in ((9.0, 1), (0.0, -1), (0.01, 1)))
    assert np.linalg.norm(far - blank) == pytest.approx(release.sensitivity, rel=1e-5)
    assert np.linalg.norm(far - blank) > CLIP / SIZE * 1.004
    assert (far - small)[-1] == pytest.approx(-2 * local.COUNT_SHARE * CLIP / SIZE)
    assert np.linalg.norm(far - small) <= 2 * release.sensitivity


@pytest.mark.parametrize("clip", [8.0, 1e30, 0.0, -3.0, np.nan, np.inf])
def test_whatever_clip_is_broadcast_noise_and_clip_stay_in_proportion(ready, clip):
    """A hostile server chooses the clip. The noise multiplier is the same, and every upload is finite."""
    (release,) = ready.releases(RoundInfo(0, 0, SIZE, 3))
    quiet = upload(9e4, 1, clip=clip), upload(0.0, -1, clip=clip)
    loud = upload(9e4, 1, clip=clip, noise=1.0)
    assert np.isfinite(loud).all()
    factor = 2.0**-10 if not clip > 0 else min(clip, 2.0**10)
    unit = np.r_[np.ones(FEATURES + 1) / factor, 1.0]  # of the clip at hand; the balance is so already
    distance = np.linalg.norm((quiet[0] - quiet[1])[0] * unit)
    assert distance == pytest.approx(release.sensitivity, rel=1e-4)
    assert np.std((loud - quiet[0]) * unit) == pytest.approx(release.noise_std, rel=0.04)


def test_the_clip_follows_the_quantile():
    """Of records whose gradients have norms √(1 + length²)/2, at a model that hardly moves."""
    rng = np.random.default_rng(0)
    lengths = rng.uniform(0.5, 4.5, 90)
    x = (lengths[:, None] * np.eye(FEATURES)[np.arange(90) % FEATURES]).astype(np.float32)
    y = rng.integers(0, 2, 90).astype(np.int32)
    adapts = prepared(30, clip_quantile=0.8, client_lr=1e-6, noise_std=0.01)
    model = models.logistic(FEATURES)
    simulation = engine.Simulation(model, adapts.build, num_clients=3, cohort_size_at=lambda index: 3)
    inputs = simulation.inputs(
        engine.problem(x, y, make_federation([30] * 3), x[:4], y[:4]),
        seeds=[0],
        hyper={name: np.asarray(value)[None] for name, value in adapts.hyper.items()},
    )
    state = simulation.advance(simulation.start(inputs), inputs, 0, 100)
    norms = 0.5 * np.sqrt(1 + lengths**2)
    clip = CLIP * float(state.server["clip"][0])
    assert np.mean(norms <= clip) == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("cpfed", {"local_steps": 3}, "needs local_steps=1"),
        ("cpfed", {"local_steps": 1, "privacy__clip": "batch"}, "and privacy.clip='example'"),
        ("dp-scaffold", {"local_steps": 1}, "not dp-scaffold"),
        ("secure-fedavg", {"local_steps": 1, "privacy__clip": "example"}, "not secure-fedavg"),
    ],
)
def test_an_adaptive_clip_that_would_be_ignored_is_refused(method, changes, problem):
    def built():
        spec = small_spec(method, **changes, privacy__clip_quantile=0.5)
        return build.build_experiment(spec, dataset=small_dataset())

    with pytest.raises(SpecError, match=problem):
        built()


@pytest.mark.parametrize(("quantile", "smallest"), [(0.0, 1.0), (0.5, 1 / CLIP_RANGE)])
def test_noise_of_the_last_step_at_the_smallest_clip_moves_an_upload_least(quantile, smallest):
    values = {"num_rounds": 10, "local_steps": 5, "client_lr": 0.4, "lr_decay": 0.1, "cohort_size": 4}
    rates = [0.4 / (1 + 0.1 * step) for step in range(10 * 5)]
    found = local.upload_unit(SimpleNamespace(**values, clip_quantile=quantile))
    assert found == pytest.approx(smallest * min(rates) / 4, rel=1e-12)


@pytest.mark.parametrize("noise", [None, exact.noise(10)])
def test_noise_that_does_not_fall_has_no_rounding_of_a_schedule(noise):
    release = Release("uplink", 2.0, 1.0, 1, Sampling("full", 1.0, "zero-out"), "test", exact=noise)
    assert local._scheduled(release, 1.0) == release
    falling = local._scheduled(release, 0.5)
    assert falling.noise_std == 1.0
    assert (falling.sensitivity > 1.0) == (noise is not None)


def test_what_a_method_would_ignore_or_has_no_proof_is_refused(monkeypatch):
    plan = make_plan([30] * 3, batch_sampling="disjoint", noise_schedule="steps")
    with pytest.raises(SpecError, match="'steps' has no proof for batch_sampling='disjoint'"):
        local.noisy_gradients(models.logistic(FEATURES), plan, source="test")
    local.noisy_gradients(models.logistic(FEATURES), plan._replace(noise_schedule="rounds"), source="test")
    monkeypatch.setattr(local, "_MOST_COUNTED", SIZE)
    prepared(SIZE)
    with pytest.raises(SpecError, match=r"batches of 9 records: at most 8 are possible"):
        prepared(SIZE + 1)
    with pytest.raises(SpecError, match="noise_scale has 2 entries for 3 clients"):
        local.gradient_hyper(plan._replace(noise_scale=(1.0, 2.0)), 1.0)
    for ignored, said in (
        ({"noise_schedule": "rounds"}, "noise_schedule='rounds'"),
        ({"noise_scale": (1.0,)}, "scale"),
    ):
        with pytest.raises(SpecError, match=said):
            local.refuse_unused(make_plan([30], **ignored), "a method", schedule=True, scale=True)
        local.refuse_unused(make_plan([30], **ignored), "a method")


@pytest.mark.parametrize(
    ("changes", "sums"),
    [
        ({}, True),
        ({"local_steps": 2}, False),
        ({"noise_scale": (1.0, 2.0, 3.0)}, False),
        ({"clip": "none"}, False),
        ({"max_norm": 3.0}, False),
        ({"aggregation": "off"}, False),
        ({"exact_noise": False}, False),
        ({"noise": "none"}, False),
        ({"discrete_noise": True}, False),
        ({"cohort_size": 1351}, True),
        ({"cohort_size": 1352}, False),
    ],
)
def test_integers_are_summed_as_they_are_where_all_are_alike_and_have_room(changes, sums):
    """For up to 1,351 clients 2^31/M - 33·2^14 is at least 2^20."""
    values = {"local_steps": 1, "exact_noise": True, "aggregation": "ideal", "cohort_size": 3}
    plan = make_plan([30] * 3, **{**values, **changes})
    assert local.sums_exactly(plan) is sums


def test_a_record_moves_a_mean_gradient_by_its_clip_over_the_batch():
    """Twice that if it is replaced; a clip of the whole batch bounds it by twice the clip, no clip by nothing."""
    assert local.gradient_sensitivity("example", 3.0, 5, "replace-one") == 2 * 3.0 / 5
    assert local.gradient_sensitivity("example", 3.0, 5, "zero-out") == 3.0 / 5
    assert local.gradient_sensitivity("example", 3.0, 5, "add/remove") == 3.0 / 5
    assert local.gradient_sensitivity("batch", 3.0, 5, "zero-out") == 6.0
    assert local.gradient_sensitivity("none", 3.0, 5, "zero-out") == float("inf")


def test_rates_of_a_round_are_stated_as_they_run():
    assert local.round_rates({"client_lr": 0.3, "lr_decay": 0.1}, 7, 1) == ()  # of one step no proof needs it
    assert local.round_rates({"client_lr": 0.3, "lr_decay": 0.0}, 7, 4) == (0.3,)
    rates = local.round_rates({"client_lr": 0.3, "lr_decay": 0.1}, 7, 3)
    assert rates == pytest.approx([0.3 / 3.1, 0.3 / 3.2, 0.3 / 3.3])
    traced = [local.learning_rate({"client_lr": 0.3, "lr_decay": 0.1}, step) for step in (21, 22, 23)]
    assert rates == pytest.approx([float(rate) for rate in traced], rel=1e-6)


def test_the_clip_follows_its_count_and_stays_in_its_range():
    hyper = {"clip_quantile": 0.5}
    for factor, balance, expected in (
        (1.0, 0.0, 1.0),  # half of the records are clipped
        (1.0, 1.0, np.exp(-0.1)),  # none is: the clip falls
        (1.0, -1.0, np.exp(0.1)),
        (2.0, 9.0, 2 * np.exp(-0.3)),  # noise counts as at most one whole batch more
        (2.0, -9.0, 2 * np.exp(0.3)),
        (CLIP_RANGE, -1.0, CLIP_RANGE),
        (1 / CLIP_RANGE, 1.0, 1 / CLIP_RANGE),
    ):
        assert float(local._next_clip(hyper, factor, balance)) == pytest.approx(expected, rel=1e-6)


def test_rounding_for_a_secure_sum_moves_every_coordinate_by_one_step():
    plan = make_plan([30] * 3, num_params=49, aggregation="ideal", scale_bits=10)
    assert local.rounding(plan) == 7 * 2.0**-10
    assert local.rounding(plan._replace(aggregation="off")) == 0.0


def test_no_two_steps_share_noise_whatever_the_plan_of_the_averaging_says(monkeypatch):
    """A method may make its gradients with another plan. On a GPU all keys of a round are derived before it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = make_plan([SIZE] * 3, cohort_size=3, local_steps=1, batch_sampling="full", client_lr=1.0)
    sampler = local.batch_sampler(plan._replace(local_steps=3))

    def at(hyper, keys, params, batch, records, round, step):
        words = jax.random.key_data(noise.for_step(keys.noise, step)) % 2**20
        return jnp.zeros((3, 2)).at[step].set(-words.astype(jnp.float32)), jnp.zeros(())

    gradients = local.NoisyGradients(at, None, None, sampler)
    algorithm = local.averaging(plan, gradients)({"client_lr": jnp.float32(1), "lr_decay": jnp.float32(0)})
    records = Records(jnp.zeros((SIZE, 2)), jnp.zeros(SIZE, int), jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
    keys, start = Keys(*map(noise.key, range(3))), jnp.zeros((3, 2))
    round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(1))
    sent = algorithm.client(keys, start, algorithm.client_init(start), records, round).upload
    expected = [jax.random.key_data(noise.for_step(keys.noise, step)) % 2**20 for step in range(3)]
    np.testing.assert_array_equal(sent, expected)
