"""Exact noise (R7) in every method: no record moves the integers that noise is added to further than the release
says, and rows say what is covered and what is not."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither import accounting, models
from dither.accounting import exact, views
from dither.accounting.exact import SUM_WIDTH, WIDTH
from dither.experiment import build
from dither.methods import local, prepare
from dither.privacy import clipping, noise
from dither.privacy.entropy import OsEntropy
from dither.types import Cohort, Keys, Records, Release, Round, RoundInfo, Sampling
from tests.auditing.grid import small_dataset, small_spec
from tests.privacy.test_totality import FEATURES, strange_records

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

SIZE = 10
CASES = {
    "secure-fedavg, regulariser outside": (
        "secure-fedavg",
        {"privacy__clip": "batch", "model__l2": 0.3, "model__l2_inside_clip": False},
    ),
    "an adaptive clip, sums": (
        "cpfed",
        {"privacy__clip": "example", "privacy__clip_quantile": 0.5, "secagg__mode": "ideal", "local_steps": 1},
    ),
    "nbafl": ("nbafl", {"method_options__param_clip": 0.4}),
    "gradients, batch": ("cpfed", {"privacy__clip": "batch", "model__l2": 0.1}),
}
SLOW = {
    "sums": ("cpfed", {"privacy__clip": "example", "secagg__mode": "ideal", "local_steps": 1}),
    "gradients, example": ("cpfed", {"privacy__clip": "example"}),
    "secure-fedavg, batch": ("secure-fedavg", {"privacy__clip": "batch"}),
    "dp-scaffold": ("dp-scaffold", {"privacy__noise_schedule": "rounds", "privacy__noise_decay": 0.8}),
}


def prepared(method, **changes):
    common = {"batch_sampling": "full", "randomness": "os", "local_steps": 2, "privacy__noise": "paper"}
    if method in ("cpfed", "dp-scaffold"):
        common |= {"privacy__noise": "given", "privacy__noise_std": 0.3, "privacy__epsilon": 100.0}
    model = models.mlp(FEATURES, 3, (4,))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    sizes = {"client_sizes": np.full(3, SIZE), "num_params": models.count_params(shapes)}
    spec = small_spec(method, **{**common, "num_clients": 3, **changes})
    return model, prepare(spec, model, **sizes)


def integers_before_the_noise(monkeypatch, call):
    """The first integers that noise is added to in a call."""
    seen = []
    original = noise._with_noise

    def watched(key, integers, *rest):
        row = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(integers)])
        jax.debug.callback(lambda row: seen.append(np.asarray(row, np.float64)), row, ordered=True)
        return original(key, integers, *rest)

    monkeypatch.setattr(noise, "_with_noise", watched)

    def first(*arguments):
        seen.clear()
        jax.block_until_ready(call(*arguments))
        jax.effects_barrier()
        return seen[0]

    return first


def check(monkeypatch, method, changes):
    model, ready = prepared(method, **changes)
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in ready.hyper.items()}
    algorithm = ready.build(hyper)
    params = model.init(jax.random.key(1))
    message = algorithm.message(algorithm.init(params))
    others = np.random.default_rng(0).normal(size=(SIZE, FEATURES)).astype(np.float32)

    @jax.jit
    def client(x, y):
        records = Records(x, y, jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
        keys = Keys(*jax.random.split(noise.key(0), 3))
        round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(3))
        return algorithm.client(keys, message, algorithm.client_init(params), records, round).upload

    first = integers_before_the_noise(monkeypatch, client)
    rows = []
    for number, record in enumerate([*strange_records(12), others[0] * 1e3, -others[0] * 1e3, others[0]]):
        x = np.concatenate([record[None], others[1:]]).astype(np.float32)
        rows.append(first(x, np.r_[number % 3, np.arange(1, SIZE) % 3].astype(np.int32)))
    (release,) = [r for r in ready.releases(RoundInfo(0, 0, SIZE, 3)) if r.channel == "uplink"]
    blanked = release.sampling.adjacency != accounting.REPLACE_ONE and not release.sampling.kind.endswith("-round")
    reach = (2 if blanked else 1) * release.sensitivity / release.noise_std + release.exact.rounding
    moved = max(np.linalg.norm(a - b) for a in rows for b in rows)
    width = SUM_WIDTH if release.exact.sums else WIDTH
    assert 0.2 * reach * width < moved <= reach * width


@pytest.mark.parametrize("case", CASES)
def test_no_record_moves_a_release_further_than_it_says(monkeypatch, case):
    check(monkeypatch, *CASES[case])


def test_a_round_too_short_for_squares_in_float32_has_no_proof(monkeypatch):
    """A model at which float32 makes steps of 1e-20 up to twice as long. Their squares are 0, which no clip sees:
    a record moved the integers 1.9 times as far as proved."""
    model = models.logistic(FEATURES)

    def at(client_lr):
        options = {"randomness": "os", "local_steps": 2, "privacy__noise": "paper", "privacy__clip": "batch"}
        spec = small_spec("secure-fedavg", batch_sampling="full", num_clients=3, client_lr=client_lr, **options)
        ready = prepare(spec, model, client_sizes=np.full(3, SIZE), num_params=FEATURES + 1)
        (release,) = ready.releases(RoundInfo(0, 0, SIZE, 3))
        return ready, release.sensitivity / release.noise_std + release.exact.rounding

    ready, reach = at(1e-20)
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in ready.hyper.items()}
    between = 2.1 * 2**23 * 1e-20 / math.sqrt(FEATURES)
    message = jax.tree.map(lambda leaf: jnp.full_like(leaf, between), model.init(jax.random.key(0)))
    x = jnp.full((SIZE, FEATURES), 1e6)  # a gradient as long as the clip

    @jax.jit
    def client(y):
        records = Records(x, y, jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
        keys = Keys(*jax.random.split(noise.key(0), 3))
        return ready.build(hyper).client(keys, message, (), records, Round(0, 0, jnp.int32(3))).upload

    first = integers_before_the_noise(monkeypatch, client)
    one, other = (first(np.r_[label, np.full(SIZE - 1, -1)].astype(np.int32)) for label in (0, 1))
    assert 0 < np.linalg.norm(one - other) <= reach * WIDTH
    assert math.isinf(reach)
    assert math.isfinite(at(1e-7)[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_no_record_moves_other_releases_further_than_they_say(monkeypatch, case):
    check(monkeypatch, *SLOW[case])


def test_a_regulariser_outside_the_clip_shrinks_the_model_by_all_it_should():
    """Records that are blanked move nothing: each of two steps leaves 1 - 2ηλ of the model, whatever the clip."""
    outside = {"privacy__clip": "batch", "model__l2": 0.5, "model__l2_inside_clip": False, "privacy__epsilon": 1e4}
    model, ready = prepared("secure-fedavg", **outside, lr_decay=0.0, privacy__clip_norm=0.01)
    params = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0)))
    records = Records(np.zeros((SIZE, FEATURES)), np.full(SIZE, -1), np.arange(SIZE), np.int32(0), np.int32(SIZE))
    round = Round(np.int32(0), np.int32(0), np.int32(3))
    client = jax.jit(lambda hyper, *rest: ready.build(hyper).client(*rest).upload)
    sent = client(ready.hyper, Keys(*jax.random.split(noise.key(0), 3)), params, (), records, round)
    for leaf in jax.tree.leaves(sent):
        np.testing.assert_allclose(leaf, (0.9**2 - 1) / 3, rtol=1e-3)


@pytest.mark.slow
def test_a_servers_noise_is_exact_for_whole_clients(monkeypatch):
    values = {"privacy__noise": "paper", "method_options__update_clip": 0.5, "local_steps": 1}
    _, ready = prepared("dp-fedavg", **values, method_options__noise_multiplier=2.0)
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in ready.hyper.items()}
    algorithm = ready.build(hyper)
    state = jax.tree.map(jnp.zeros_like, models.mlp(FEATURES, 3, (4,)).init(jax.random.key(0)))
    cohort = Cohort(jnp.arange(3), jnp.ones(3, bool), jnp.int32(3))
    first = integers_before_the_noise(
        monkeypatch, lambda upload: algorithm.server(noise.key(0), state, upload, cohort)
    )
    rng = np.random.default_rng(0)

    def upload(length):
        drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * length, state)
        return local.scale(1 / 3, local.clip_whole(ready.plan, drawn, jnp.float32(0.5)))

    rest = local.add(upload(1.0), upload(1e20))
    release = ready.releases(RoundInfo(0, 0, SIZE, 3))[1]
    without = first(rest)
    moved = max(np.linalg.norm(first(local.add(rest, upload(length))) - without) for length in (1e-3, 1.0, 1e18))
    reach = (release.sensitivity / release.noise_std + release.exact.rounding) * WIDTH
    assert 0.9 * reach < moved <= reach


# Rows


def gaps(method, adjacency="replace-one", **changes):
    """What computing leaves uncovered, by view."""
    experiment = build.build_experiment(small_spec(method, randomness="os", **changes), dataset=small_dataset())
    rows = [row for row in experiment.accountant().table() if row.adjacency == adjacency and row.unit == "run"]
    return {row.view: [text for text in row.not_covered if text in views.NUMBERS] for row in rows}, rows


def test_a_protected_run_is_covered_against_a_server_that_sees_uploads():
    found, rows = gaps("cpfed")
    assert set(map(tuple, found.values())) == {()}
    assert all(0 < row.sampler_delta < 1e-9 for row in rows)


def test_credit_for_the_noise_of_others_stays_a_proof_for_real_numbers():
    own = {"method_options__param_clip": 1.0, "batch_sampling": "full"}
    for method, changes in (("secure-fedavg", {}), ("nbafl", own)):
        found, _ = gaps(method, **changes)
        assert found["upload"] == []
        assert all(
            "several clients" in found[view][0] or "low bits" in found[view][0] for view in ("sum", "final")
        )


def test_the_credit_is_exact_where_integers_are_summed_as_they_are():
    """Exact sums (R9): r - c clients' noise, sampling kept, nothing uncovered, every client's draws charged."""
    one = {"local_steps": 1, "batch_sampling": "poisson", "sampling_rate": 0.2, "secagg__mode": "ideal"}
    changes = {**one, "privacy__noise": "given", "privacy__noise_std": 0.5, "cohort_size": 6}
    experiment = build.build_experiment(small_spec("dp-sgd", randomness="os", **changes), dataset=small_dataset())
    assert experiment.plan.exact_sums
    (sampled,) = experiment.prepared.releases(RoundInfo(0, 0, 24, 6))
    for colluders in (0, 2):
        accountant = experiment.with_plan(colluders=colluders).accountant()
        row = accountant.proven("sum", "zero-out")
        assert row.not_covered == ()
        assert row.recipe == "R3 sum"
        alone = views.account(
            [(sampled._replace(noise_std=sampled.noise_std * np.sqrt(6 - colluders)), 6)], 1e-3,
            adjacency="zero-out", views=("upload",),
        )[0]  # fmt: skip
        assert row.value == pytest.approx(alone.value, rel=1e-3)
    assert sampled.exact.distance == pytest.approx(6 * exact.noise(experiment.num_params).distance)
    projected = gaps("dp-sgd", **one, federation__max_norm=1.0)[1]
    upload, summed = (next(row.value for row in projected if row.view == view) for view in ("upload", "sum"))
    assert summed == upload  # a projection after the noise leaves no credit


def test_records_that_change_places_are_not_covered():
    poisson = {
        "batch_sampling": "poisson-full",
        "sampling_rate": 0.2,
        "local_steps": 1,
    }
    found, rows = gaps("dp-sgd", "add/remove", **poisson, privacy__adjacency="add/remove")
    assert np.isfinite(rows[0].value)
    assert "change places" in found["upload"][0]
    assert gaps("dp-sgd", "zero-out", **poisson, privacy__adjacency="zero-out")[0]["upload"] == []


@pytest.mark.parametrize("width", [10, 100, 1000])
def test_under_add_remove_the_error_is_that_of_the_longest_block_whatever_the_count(width):
    model, sampler = models.logistic(FEATURES), SimpleNamespace(kind="poisson-full", width=width)
    plan = SimpleNamespace(clip="example", adjacency="add/remove")
    longest = max(exact.block_size(records) for records in range(1, 1000))
    expected = exact.summed_error(clipping.norm_error(model), longest, fixed_places=True)
    assert local._gradient_error(model, plan, sampler) == expected
    assert longest == 128


def test_a_count_beside_the_gradient_adds_its_own_four_roundings():
    four = 4 * 2.0**-24 / (1 - 4 * 2.0**-24)
    expected = math.hypot(1.01, local.COUNT_SHARE * (1 + 2 * 300 * four)) * (1 + four) - 1
    assert local._with_count(0.01, 300) == pytest.approx(expected, rel=1e-12)
    assert local._with_count(0.01, 0) == pytest.approx(math.hypot(1.01, local.COUNT_SHARE) - 1, rel=1e-12)


def test_a_sampler_error_that_is_not_small_is_said():
    """At so large an ε, e^ε times the sampler's error exceeds δ: the bound is for ideal noise and says so."""
    sampling = Sampling("full", 1.0, "zero-out")
    release = Release("uplink", 0.1, 1.0, 1, sampling, "test", exact=exact.noise(10_000))
    (row,) = views.account([(release, 1)], 1e-5, adjacency="zero-out", views=("upload",))
    assert row.value > 30
    assert row.sampler_delta is None
    assert views.SAMPLER_ERROR in row.not_covered
    quiet = views.account([(release._replace(noise_std=4.0), 1)], 1e-5, adjacency="zero-out", views=("upload",))[0]
    assert 0 < quiet.sampler_delta < 1e-9
    assert quiet.not_covered == ()


def test_the_sampler_takes_little_of_delta_at_an_epsilon_of_ten_and_many_draws():
    """1,000 steps of 200,000 parameters: what multiplies e^ε is far smaller than what does not."""
    sampling = Sampling("full", 1.0, "zero-out")
    release = Release("uplink", 15.0, 1.0, 1000, sampling, "test", exact=exact.noise(200_000))
    (row,) = views.account([(release, 1)], 1e-5, adjacency="zero-out", views=("upload",))
    assert 9 < row.value < 12
    assert row.sampler_delta == pytest.approx(
        2e8 * 2.0**-49 + 2e8 * 2.0**-65 * (1 + math.exp(row.value)), rel=1e-9
    )
    assert row.sampler_delta < 1e-6
    assert row.not_covered == ()


def test_rounding_is_charged_once_whatever_the_neighbours():
    """In units of the noise's std, 1/μ⁻¹: S/σ + √d/R, and 2S/σ + √d/R for a replacement."""
    sampling = Sampling("full", 1.0, "zero-out")
    release = Release("uplink", 2.0, 1.0, 1, sampling, "test", exact=exact.noise(40_000))
    rounding = exact.noise(40_000).rounding
    for adjacency, distance in (("zero-out", 0.5), ("replace-one", 1.0)):
        assert 1 / accounting.step_multiplier(release, adjacency) == pytest.approx(distance + rounding, rel=1e-12)
    assert rounding == pytest.approx(200 / WIDTH, rel=1e-6)


def test_noise_from_the_operating_system_takes_the_same_road():
    """The client function with OS entropy in place of the key: integers, then one factor."""
    model, ready = prepared("cpfed", privacy__clip="example", local_steps=1)
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in ready.hyper.items()}
    algorithm = ready.build(hyper)
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(SIZE, FEATURES)), jnp.float32)
    records = Records(x, jnp.arange(SIZE) % 3, jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
    keys = Keys(noise.key(0), noise.key(1), OsEntropy())

    @jax.jit
    def client():
        round = Round(jnp.int32(0), jnp.int32(0), jnp.int32(3))
        return algorithm.client(keys, params, algorithm.client_init(params), records, round).upload

    one, other = client(), client()
    drawn = np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)])
    assert np.std(drawn) == pytest.approx(0.1 * 0.3 / 3 * np.sqrt(2), rel=0.5)
