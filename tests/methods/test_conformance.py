"""One suite that every method passes. A sixth method is put to it by its name in `spec.METHODS` alone."""

import functools

import jax
import numpy as np
import pytest

from dither import methods, models
from dither.errors import SpecError
from dither.methods import dp_scaffold, prepare
from dither.simulation import engine
from dither.spec import METHODS, Spec, declared
from dither.types import Keys, Records, Round, RoundInfo
from tests.conftest import make_federation, make_records

SIZES = np.array([12, 12, 12, 12, 12, 12])
BASE = {
    "num_clients": 6,
    "cohort_size": 3,
    "num_rounds": 6,
    "local_steps": 2,
    "batch_size": 4,
    "client_lr": 0.1,
    "eval_every": 3,
    "privacy.noise": "paper",
    "privacy.epsilon": 2.0,
    "privacy.delta": 1e-3,
    "privacy.clip_norm": 1.0,
}
ONE_STEP = ("dp-sgd", "dp-dsgd")  # defined for one local step a round


def spec_of(name, **values):
    changes = {**BASE, "method": name, **values}
    if name in ONE_STEP:
        changes["local_steps"] = 1
    return Spec().with_values(changes)


def problem(seed=0, features=6, classes=2):
    x, y = make_records(int(SIZES.sum()) + 40, features, classes, seed=seed)
    n = int(SIZES.sum())
    return engine.problem(x[:n], y[:n], make_federation(SIZES), x[n:], y[n:])


def train(spec, *, model=None, layout="vmap", rounds=None, **arguments):
    model = model or models.logistic(6)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    seeds = arguments.pop("seeds", (spec.seed,))
    return engine.simulate(
        prepared.build,
        model,
        arguments.pop("problem", None) or problem(),
        num_rounds=rounds or prepared.num_rounds or spec.num_rounds,
        cohort_size=prepared.cohort_size_at,
        seeds=seeds,
        hyper=arguments.pop(
            "hyper", {k: np.stack([np.asarray(v)] * len(seeds)) for k, v in prepared.hyper.items()}
        ),
        cohorts=None if prepared.plan.design is None else [prepared.plan.design],
        eval_every=3,
        layout=layout,
        **arguments,
    )


def vector(result, run=0):
    return np.concatenate([np.asarray(leaf)[run].ravel() for leaf in jax.tree.leaves(result.params)])


@functools.cache
def plain(name):
    """The run that other runs of the method are compared with."""
    return vector(train(spec_of(name)))


# Baselines that run the code of one of the others: DP-SGD and DP-DSGD that of CPFed, SCAFFOLD that of DP-SCAFFOLD,
# FedProx that of FedAvg.
SHARED = {"dp-sgd", "dp-dsgd", "scaffold", "fedprox"}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in SHARED else ()) for name in sorted(METHODS)]
)
def name(request):
    return request.param


def test_it_trains_and_the_same_seed_gives_the_same_bits(name):
    assert np.isfinite(plain(name)).all()
    assert np.abs(plain(name)).sum() > 0
    assert vector(train(spec_of(name))).tobytes() == plain(name).tobytes()


def test_layouts_agree_and_padding_clients_change_nothing(name):
    for changes in ({"layout": "loop"}, {"pad_cohort": 2}):
        np.testing.assert_allclose(vector(train(spec_of(name), **changes)), plain(name), rtol=2e-4, atol=2e-5)


def test_many_runs_are_one_program_and_equal_single_runs(name):
    both = train(spec_of(name), seeds=(0, 1))
    np.testing.assert_allclose(vector(both, 0), plain(name), rtol=2e-4, atol=2e-5)
    assert not np.array_equal(vector(both, 1), vector(both, 0))  # another seed, another model


def test_no_method_retraces_on_later_rounds(name):
    spec = spec_of(name)
    model = models.logistic(6)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    traces = []

    def build(hyper):
        traces.append(1)
        return prepared.build(hyper)

    # the size of the cohort is fixed here: Secure FedAvg's first round with everyone is a program of its own
    simulation = engine.Simulation(model, build, num_clients=6, cohort_size_at=lambda index: 3)
    inputs = simulation.inputs(
        problem(),
        seeds=[0],
        hyper={k: np.asarray(v)[None] for k, v in prepared.hyper.items()},
        cohorts=None if prepared.plan.design is None else [prepared.plan.design],
    )
    state = simulation.advance(simulation.start(inputs), inputs, 0, 2)
    before = len(traces)
    for start in (2, 3, 4):
        state = simulation.advance(state, inputs, start, start + 1)
    assert len(traces) == before


def test_client_state_round_trips_through_a_checkpoint(name, tmp_path):
    from dither.experiment import folder
    from dither.experiment.train import restore

    spec = spec_of(name)
    model = models.logistic(6)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    simulation = engine.Simulation(model, prepared.build, num_clients=6, cohort_size_at=prepared.cohort_size_at)

    def inputs():
        return simulation.inputs(
            problem(),
            seeds=[0],
            hyper={k: np.asarray(v)[None] for k, v in prepared.hyper.items()},
            cohorts=None if prepared.plan.design is None else [prepared.plan.design],
        )

    data = inputs()
    halfway = simulation.advance(simulation.start(data), data, 0, 3)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(halfway)]
    folder.RunFolder(tmp_path).save_checkpoint(folder.Checkpoint(3, leaves, "s", "d"))
    straight = simulation.advance(halfway, data, 3, 6)
    loaded = folder.RunFolder(tmp_path).load_checkpoint()
    resumed = simulation.advance(restore(simulation.start(data), loaded.leaves), data, 3, 6)
    for one, two in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_a_cohort_of_one_works(name):
    assert np.isfinite(vector(train(spec_of(name, cohort_size=1)))).all()


def test_a_zero_update_divides_by_nothing(name):
    """Records of zeros with a loss that is flat: every gradient is zero, and nothing becomes NaN."""
    blank = problem()
    blank = blank._replace(x=np.zeros_like(blank.x))
    result = train(spec_of(name, **{"privacy.noise": "none"}), problem=blank)
    assert np.isfinite(vector(result)).all()


def test_records_that_are_not_numbers_count_as_nothing_where_noise_is_added(name):
    """Nobody is named for its records. A method without noise names the client, and leaves it out."""
    dirty = problem()
    dirty.x[12:24] = np.nan  # client 1
    spec = spec_of(name, cohort_size=6, batch_sampling="full")
    prepared = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    refuse = not any(np.any(prepared.hyper[noise]) for noise in prepared.plan.noise_names)
    result = train(spec, problem=dirty, refuse=refuse)
    assert np.isfinite(vector(result)).all()
    assert result.refused[0].tolist() == [0, result.participation[0][1] if refuse else 0, 0, 0, 0, 0]


def test_releases_are_finite_numbers_for_the_accountant(name):
    spec = spec_of(name)
    prepared = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    algorithm = prepared.build(prepared.hyper)
    for index in (0, 5):
        releases = algorithm.releases(RoundInfo(index=index, client=2, size=12, cohort_size=3))
        assert releases
        for release in releases:
            assert type(release.noise_std) is float
            assert release.noise_std >= 0
            assert release.uses >= 1
        if np.isfinite(prepared.claim.value):
            assert any(release.noise_std > 0 and np.isfinite(release.sensitivity) for release in releases)


def test_the_proof_knows_what_a_client_keeps(name):
    """Shuffled epochs advance by the steps that a client has counted, else with the rounds of the run. What is not
    a whole number, as a control variate, makes later uploads depend on more than the sums show."""
    ready = prepare(spec_of(name), models.logistic(6), client_sizes=SIZES, num_params=7)
    state = ready.build(ready.hyper).client_init(models.logistic(6).init(jax.random.key(0)))
    floats = any(leaf.dtype.kind not in "iu" for leaf in jax.tree.leaves(state))
    if ready.plan.noise_names:
        counts = isinstance(state, dict) and "steps" in state
        assert ready.plan.client_state == floats
        assert ready.plan.own_epochs == (counts and not ready.plan.per_client)


def test_noise_follows_epsilon(name):
    loud = prepare(spec_of(name), models.logistic(6), client_sizes=SIZES, num_params=7)
    if not np.isfinite(loud.claim.value):
        pytest.skip("a method without privacy")
    assert loud.claim.value == pytest.approx(2.0, rel=2e-3)
    quiet = prepare(
        spec_of(name, **{"privacy.epsilon": 8.0}), models.logistic(6), client_sizes=SIZES, num_params=7
    )
    info = RoundInfo(index=0, client=0, size=12, cohort_size=3)
    for one, two in zip(
        loud.build(loud.hyper).releases(info), quiet.build(quiet.hyper).releases(info), strict=True
    ):
        assert one.noise_std > two.noise_std or one.noise_std == two.noise_std == 0


def test_it_runs_on_another_model_and_more_classes(name):
    model = models.mlp(6, 3, (5,))
    result = train(spec_of(name), model=model, problem=problem(classes=3))
    assert np.isfinite(vector(result)).all()


def test_unknown_options_are_refused_by_name(name):
    with pytest.raises(SpecError, match=r"method_options\.nonsense"):
        spec_of(name, **{"method_options.nonsense": 1})
    assert all(option.help for option in declared(name).options.values())


# With the noise off, methods that should coincide do

QUIET = {
    "privacy.noise": "none",
    "batch_sampling": "full",
    "cohort_size": 6,
    "local_steps": 1,
    "lr_decay": 0.0,
}


def test_with_one_step_and_no_noise_the_gradient_methods_are_one():
    huge = {**QUIET, "privacy.clip_norm": 1e6, "privacy.clip": "example"}
    reference = vector(train(spec_of("fedavg", **huge)))
    for other in ("secure-fedavg", "cpfed", "concentrated", "dp-scaffold", "scaffold", "dp-sgd", "dp-dsgd"):
        np.testing.assert_allclose(
            vector(train(spec_of(other, **huge))), reference, rtol=1e-4, atol=1e-6, err_msg=other
        )


def test_without_noise_dp_scaffold_is_scaffold():
    values = {"privacy.noise": "none", "privacy.clip_norm": 1e6, "local_steps": 4, "num_rounds": 12}
    a, b = train(spec_of("dp-scaffold", **values)), train(spec_of("scaffold", **values))
    np.testing.assert_allclose(vector(a), vector(b), rtol=1e-4, atol=1e-6)


def test_a_client_of_dp_scaffold_keeps_the_mean_of_its_gradients():
    """Eq (2) against a loop in NumPy: steps along gradient + c - c_k, after which c_k is the mean gradient."""
    quiet = {**QUIET, "local_steps": 3, "model.l2": 0.0, "privacy.clip_norm": 1e6}
    ready = prepare(spec_of("dp-scaffold", **quiet), models.logistic(6), client_sizes=SIZES, num_params=7)
    x, y = make_records(12)
    rng = np.random.default_rng(1)
    start, c, own = (rng.normal(size=7).astype(np.float32) for _ in range(3))

    def tree(row):
        return {"out": {"w": row[:6, None], "b": row[6:]}}

    records = Records(x, y, np.arange(12), np.int32(0), np.int32(12))
    keys, round = Keys(*jax.random.split(jax.random.key(0), 3)), Round(np.int32(0), np.int32(0), np.int32(6))
    message, state = {"params": tree(start), "control": tree(c)}, {"control": tree(own), "steps": np.int32(0)}
    client = jax.jit(lambda hyper, *rest: ready.build(hyper).client(*rest))
    result = client(ready.hyper, keys, message, state, records, round)
    features, w, gradients = np.hstack([x, np.ones((12, 1))]), start.astype(float), []
    for _ in range(3):
        gradients.append(features.T @ (1 / (1 + np.exp(-features @ w)) - y) / 12)
        w = w - 0.1 * (gradients[-1] + c - own)
    mean = np.mean(gradients, axis=0)
    for found, expected in (
        (result.state["control"], mean),
        (result.upload["control"], (mean - own) / 6),
        (result.upload["params"], (w - start) / 6),
    ):
        np.testing.assert_allclose(np.r_[np.ravel(found["out"]["w"]), found["out"]["b"]], expected, atol=2e-6)


def test_nbafl_without_pull_and_clip_is_fedavg():
    values = {**QUIET, "local_steps": 5, "batch_sampling": "shuffled"}  # epochs go on from round to round
    free = {
        "method_options.param_clip": 1e6,
        "method_options.optimizer": "sgd",
        "method_options.proximal": 0.0,
    }
    a, b = train(spec_of("nbafl", **values, **free)), train(spec_of("fedavg", **values))
    assert a.history[-1].metrics["clipped"].max() == 0
    np.testing.assert_allclose(vector(a), vector(b), rtol=1e-4, atol=1e-6)


def test_fedprox_pulls_towards_the_broadcast_model():
    values = {**QUIET, "local_steps": 20, "num_rounds": 1}
    free = vector(train(spec_of("fedprox", **values, **{"method_options.proximal": 0.0})))
    held = vector(train(spec_of("fedprox", **values, **{"method_options.proximal": 5.0})))
    assert np.linalg.norm(held) < 0.9 * np.linalg.norm(free)
    np.testing.assert_allclose(free, vector(train(spec_of("fedavg", **values))), rtol=1e-5, atol=1e-7)


def test_dp_fedavg_bounds_every_client_and_noises_the_sum():
    spec = spec_of(
        "dp-fedavg",
        cohort_size=6,
        client_lr=50.0,
        **{"method_options.update_clip": 0.3, "privacy.noise": "none"},
    )
    bounded = train(spec, rounds=1)
    assert np.linalg.norm(vector(bounded)) <= 0.3 * (1 + 1e-5)
    assert bounded.history[-1].metrics["clipped"].max() == 1
    noisy = spec_of(
        "dp-fedavg",
        client_lr=1e-9,
        cohort_size=6,
        **{"method_options.noise_multiplier": 4.0, "method_options.update_clip": 0.3},
    )
    many = train(noisy, rounds=1, seeds=tuple(range(400)))
    assert many.history[-1].metrics["clipped"].max() == 0
    values = np.concatenate([vector(many, i) for i in range(400)])
    assert values.std() == pytest.approx(4.0 * 0.3 / 6, rel=0.05)


# What each method refuses


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("cpfed", {"privacy.clip_norm": 0.0}, "privacy.clip_norm=0.0 must be above 0"),
        ("cpfed", {"local_steps": 0}, "local_steps=0 must be at least 1"),
        ("dp-scaffold", {"privacy.noise_decay_start": 7}, "noise_decay_start=7 exceeds num_rounds=6"),
        ("dp-scaffold", {"privacy.noise_decay": 1.5}, "privacy.noise_decay=1.5 must be at most 1"),
        ("dp-scaffold", {"privacy.noise_decay": 0.0}, "privacy.noise_decay=0.0 must be above 0"),
        ("concentrated", {"method_options.participation": "equal", "num_rounds": 5}, "= 5*3/6 = 2.5 is not whole"),
        ("concentrated", {"method_options.participation": "often"}, "'often' is not one of"),
        (
            "concentrated",
            {"method_options.exact_epochs": True, "local_steps": 13},
            "local_steps=13 exceeds the 12",
        ),
        ("cpfed", {"cohort_size": 7, "num_clients": 7}, "cohort_size=7 exceeds num_clients=6; lower it"),
        ("dp-sgd", {"local_steps": 2}, "dp-sgd takes one noisy step a round"),
        ("dp-scaffold", {"lr_decay": 0.1}, "lr_decay=0.1 is not supported by dp-scaffold"),
        ("nbafl", {"method_options.param_clip": -1.0}, "param_clip=-1.0 must be at least 0"),
        ("nbafl", {"method_options.optimizer": "lion"}, "'lion' is not one of 'sgd', 'adam'"),
        ("nbafl", {"method_options.scheduling": "lucky"}, "'lucky' is not one of"),
        ("dp-fedavg", {"method_options.update_clip": 0.0}, "update_clip=0.0 must be above 0"),
        ("dp-dsgd", {"method_options.credited_clients": "all", "local_steps": 1}, "'all' is not one of 'n', 'r'"),
        ("cpfed", {"privacy.noise": "given"}, "needs privacy.noise_std above 0"),
        ("cpfed", {"privacy.noise_scale": [1.0, 2.0]}, "noise_scale has 2 entries for num_clients=6"),
        (
            "secure-fedavg",
            {"privacy.noise": "given", "privacy.noise_std": 1.0},
            "is not supported by secure-fedavg",
        ),
        ("secure-fedavg", {"privacy.clip": "none"}, "leaves eq (9) without a sensitivity"),
        (
            "dp-scaffold",
            {"privacy.noise": "given", "privacy.noise_std": 1e-6, "privacy.epsilon": 1e-3},
            "is spent in the first round",
        ),
    ],
)
def test_bad_values_are_refused_with_the_numbers(name, values, message):
    def attempt():
        spec = Spec().with_values({**BASE, "method": name, **values})
        prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)

    with pytest.raises(SpecError) as caught:
        attempt()
    assert message in str(caught.value)


def test_nbafl_can_take_its_clip_from_a_pilot_and_says_so():
    from dither.experiment import build

    spec = Spec().with_values(
        {**BASE, "method": "nbafl", "data.name": "breast-cancer", "batch_sampling": "full",
         "method_options.param_clip": 0.0, "privacy.epsilon": 50.0, "client_lr": 0.01}
    )  # fmt: skip
    experiment = build.build_experiment(spec)
    clip = float(experiment.prepared.hyper["param_clip"])
    assert 0 < clip < 10
    assert any(
        "median norm of a non-private pilot (errata N7)" in caveat for caveat in experiment.prepared.caveats
    )
    assert float(build.build_experiment(spec).prepared.hyper["param_clip"]) == clip


def test_balanced_participation_never_differs_by_more_than_one():
    spec = spec_of("concentrated", num_rounds=20, cohort_size=4)
    prepared = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    counts = np.bincount(prepared.plan.design.ravel(), minlength=6)
    assert counts.sum() == 80
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row)) == 4 for row in prepared.plan.design.tolist())


def test_exact_epochs_use_every_record_at_most_once_a_round():
    spec = spec_of("concentrated", local_steps=4, **{"method_options.exact_epochs": True})
    prepared = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    (release,) = prepared.releases(RoundInfo(0, 0, 12, 3))
    assert release.sampling.batch_size == 3  # floor(12 / 4): four batches are exactly one epoch
    sizes = np.array([12, 9, 12, 12, 12, 12])  # the smallest decides
    (release,) = prepare(spec, models.logistic(6), client_sizes=sizes, num_params=7).releases(
        RoundInfo(0, 0, 12, 3)
    )
    assert release.sampling.batch_size == 2
    one_each = spec_of("concentrated", local_steps=12, **{"method_options.exact_epochs": True})
    (release,) = prepare(one_each, models.logistic(6), client_sizes=SIZES, num_params=7).releases(
        RoundInfo(0, 0, 12, 3)
    )
    assert release.sampling.batch_size == 1


@pytest.mark.parametrize(("schedule", "scheme"), [("constant", 0), ("rounds", 1), ("steps", 2)])
def test_the_noise_that_is_drawn_follows_the_schedules_of_dp_scaffold(schedule, scheme):
    """Releases against eqs (6) and (7) at every round and step."""
    values = {"privacy.noise_schedule": schedule, "privacy.noise_decay": 0.9, "privacy.noise_decay_start": 2}
    given = {"privacy.noise": "given", "privacy.noise_std": 3.0, "privacy.epsilon": 1e6}
    prepared = prepare(
        spec_of("dp-scaffold", **values, **given), models.logistic(6), client_sizes=SIZES, num_params=7
    )
    releases = prepared.releases
    expected = dp_scaffold.noise_schedule(dp_scaffold.NoiseScheme(scheme, 6, 2, 0.9, 2), initial_variance=9.0)
    for index in range(6):
        found = [r.noise_std**2 for r in releases(RoundInfo(index, 0, 12, 3)) for _ in range(r.uses)]
        np.testing.assert_allclose(found, expected[index], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "values", "unit"),
    [
        ("nbafl", {"cohort_size": 4}, 6 / 36),  # everyone: the smallest client's share of the records
        ("nbafl", {"cohort_size": 2}, 1 / 2),
        ("secure-fedavg", {"cohort_size": 2, "method_options.first_round": "cohort"}, 6 / 36 * 4 / 2),
        ("secure-fedavg", {"cohort_size": 2, "method_options.first_round": "all"}, 6 / 36 * 4 / 4),
        ("cpfed", {"cohort_size": 2, "local_steps": 1}, 0.1 / 2),
    ],
)
def test_the_unit_of_an_upload_is_that_of_the_client_with_the_least_weight(name, values, unit):
    """The grid of discrete noise is coarsest, and summation errs most, for this one."""
    spec, sizes = spec_of(name, **{"num_clients": 4, "batch_sampling": "full", **values}), np.array([10, 6, 12, 8])
    plan = prepare(spec, models.logistic(6), client_sizes=sizes, num_params=7).plan
    assert plan.upload_unit == pytest.approx(unit)
    weighted = name == "secure-fedavg" or (name == "nbafl" and values["cohort_size"] == 4)
    np.testing.assert_array_equal(np.ones(4) if plan.weights is None else plan.weights, sizes if weighted else 1)


@pytest.mark.parametrize("name", ["cpfed", "concentrated", "dp-scaffold"])
def test_a_claim_is_that_of_the_client_with_the_least_noise(name):
    spec = spec_of(name, **{"privacy.noise_scale": [3.0, 1.0, 2.0, 1.5, 2.5, 4.0]})
    ready = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    assert ready.claim.value == pytest.approx(2.0, rel=2e-3)
    least = {**ready.hyper, "noise_std": np.full(6, ready.hyper["noise_std"].min())}
    assert ready.reclaim(least).value == ready.claim.value


NBAFL = {"num_clients": 4, "cohort_size": 4, "num_rounds": 40, "method_options.param_clip": 3.0}
UNEQUAL = np.array([10, 6, 12, 8])


def test_the_noise_of_nbafl_is_that_of_theorem_1():
    """σ_U = cL·2C/(mε), and σ_A = cT·2C max p_i/(mε) with what the server adds, for L = 2 of T = 40 uploads."""
    spec = spec_of("nbafl", **NBAFL, **{"method_options.exposures": 2})
    hyper = prepare(spec, models.logistic(6), client_sizes=UNEQUAL, num_params=7).hyper
    unit = methods.gaussian_constant(1e-3) * 2 * 3.0 / (6 * 2.0)
    assert hyper["uplink_std"] == pytest.approx(unit * 2)
    uploads = hyper["uplink_std"] ** 2 * np.sum(np.square(UNEQUAL / 36))
    assert np.sqrt(uploads + hyper["downlink_std"] ** 2) == pytest.approx(unit * 40 * 12 / 36)


def test_one_record_moves_a_broadcast_of_nbafl_by_the_weight_of_the_largest_client():
    """A client's model lies within C of 0, so that a record moves it by 2C, and the mean by 2C max p_i."""
    ready = prepare(spec_of("nbafl", **NBAFL), models.logistic(6), client_sizes=UNEQUAL, num_params=7)
    uplink, downlink = ready.releases(RoundInfo(0, 1, 6, 4))
    assert (uplink.sensitivity, downlink.sensitivity) == (pytest.approx(6.0), pytest.approx(6.0 * 12 / 36))


@pytest.mark.parametrize("sampler", ["fixed", "shuffled", "disjoint", "full", "poisson"])
def test_the_releases_of_nbafl_credit_no_batches_but_poisson_ones(sampler):
    drawn = {"batch_size": 2, "batch_sampling": sampler, "sampling_rate": 0.2 if sampler == "poisson" else 0.0}
    ready = prepare(spec_of("nbafl", **NBAFL, **drawn), models.logistic(6), client_sizes=UNEQUAL, num_params=7)
    for release in ready.releases(RoundInfo(0, 1, 6, 4)):
        assert release.sampling.rate == pytest.approx(1 - (1 - 0.2) ** 2 if sampler == "poisson" else 1)
        assert release.sampling.adjacency == "replace-one"


def test_nbafl_without_a_clip_is_refused():
    spec = spec_of("nbafl", **{"method_options.param_clip": 0.0})
    with pytest.raises(SpecError, match="param_clip=0 must be above 0"):
        prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)


@pytest.mark.parametrize(("decay", "rates"), [(0.0, [0.3, 0.3, 0.3]), (1.0, [0.3, 0.15, 0.1])])
def test_with_noise_that_falls_in_every_step_each_release_has_its_own_rate(decay, rates):
    values = {"privacy.noise_schedule": "steps", "privacy.noise_decay": 0.9, "local_steps": 3, "client_lr": 0.3}
    spec = spec_of("cpfed", lr_decay=decay, **values)
    ready = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
    releases = ready.releases(RoundInfo(0, 0, int(SIZES[0]), 4))
    assert [release.uses for release in releases] == [1, 1, 1]
    assert [release.rates for release in releases] == [(pytest.approx(rate),) for rate in rates]


@pytest.mark.parametrize(("sensitivity", "said"), [("paper", True), ("clip", False)])
def test_nbafl_says_where_its_sensitivity_is_only_assumed(sensitivity, said):
    spec = spec_of("nbafl", **{"method_options.sensitivity": sensitivity})
    caveats = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7).caveats
    assert any("2C/m" in caveat for caveat in caveats) is said


def test_nbafl_says_which_branch_of_lemma_4_sets_its_noise():
    for cohort, said in ((3, True), (6, False)):
        prepared = prepare(
            spec_of("nbafl", cohort_size=cohort), models.logistic(6), client_sizes=SIZES, num_params=7
        )
        assert any("Lemma 4" in caveat for caveat in prepared.caveats) is said


@pytest.mark.parametrize("name", ["cpfed", "concentrated"])
def test_without_the_credit_of_aggregation_the_papers_need_more_noise(name):
    stds = {}
    for credit in (True, False):
        spec = spec_of(name, **{"method_options.aggregation_credit": credit})
        prepared = prepare(spec, models.logistic(6), client_sizes=SIZES, num_params=7)
        stds[credit] = float(prepared.hyper["noise_std"][0])
        assert prepared.claim.value == pytest.approx(2.0)
    assert stds[False] == pytest.approx(stds[True] * np.sqrt(3))  # a cohort of three


def test_the_noise_of_dp_fedavg_is_none_or_given_or_that_of_the_claim():
    def prepared(**values):
        return prepare(spec_of("dp-fedavg", **values), models.logistic(6), client_sizes=SIZES, num_params=7)

    assert prepared(**{"privacy.noise": "none"}).hyper["central_multiplier"] == 0.0
    assert prepared(**{"method_options.noise_multiplier": 4.0}).hyper["central_multiplier"] == 4.0
    claim = prepared().claim
    assert claim.value == pytest.approx(2.0, rel=1e-4)
    ((condition, holds),) = claim.conditions
    assert "independent coins" in condition
    assert not holds
