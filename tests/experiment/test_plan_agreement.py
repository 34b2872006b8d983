"""What runs is what is proved: on random accepted specs the compiled client and the releases that the accountant
reads agree on sampling frequencies, noise and sensitivity, all taken from one `PrivacyPlan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dither import data
from dither.errors import NoProof, SpecError
from dither.experiment import build
from dither.spec import Spec
from dither.types import Keys, Records, Round, RoundInfo

SIZE = 12  # records of a client: record i has feature i alone, so that an upload shows who was in the batch
TRIALS = 1000
METHODS = ("cpfed", "concentrated", "dp-scaffold", "dp-sgd", "secure-fedavg", "nbafl", "dp-dsgd")


@st.composite
def specs(draw):
    method = draw(st.sampled_from(METHODS))
    at_the_end = method in ("secure-fedavg", "nbafl")  # noise on the finished upload
    sampling = draw(
        st.sampled_from(("fixed", "shuffled", "poisson", "full") if not at_the_end else ("fixed", "full"))
    )
    clip = draw(st.sampled_from(("example", "batch")))
    values = {
        "method": method,
        "num_clients": 4,
        "cohort_size": draw(st.integers(2, 4)),
        "num_rounds": 3,
        "local_steps": 1,
        "batch_size": draw(st.integers(1, 6)),
        "batch_sampling": sampling,
        "sampling_rate": draw(st.sampled_from((0.0, 0.3))) if sampling == "poisson" else 0.0,
        "client_lr": draw(st.floats(0.05, 0.4)),
        "privacy.clip": clip,
        "privacy.clip_norm": draw(st.floats(0.1, 0.6)),
        "privacy.noise": "paper" if method == "secure-fedavg" else "given",
        "privacy.epsilon": 100.0,  # so that DP-SCAFFOLD does not stop early
        "privacy.noise_std": draw(st.floats(0.05, 2.0)),
        "privacy.adjacency": "replace-one",
        "model.l2": 0.0,
        "lr_decay": 0.0,
        "randomness": draw(st.sampled_from(("seeded", "os"))),
    }
    if not at_the_end:
        values["privacy.noise_schedule"] = draw(st.sampled_from(("constant", "rounds")))
        values["privacy.noise_decay"] = draw(st.floats(0.5, 1.0))
    return values


def experiment_of(values):
    x = np.tile(np.eye(SIZE, dtype=np.float32), (4, 1))
    y = np.zeros(4 * SIZE, np.int32)
    names = tuple(f"x{number}" for number in range(SIZE))
    dataset = data.Dataset("", x, y, x[:4], y[:4], ("no", "yes"), names, (), None, None, None, (), True)
    try:
        return build.build_experiment(Spec().with_values(values), dataset=dataset)
    except (SpecError, NoProof):  # not accepted
        return None


def uploads(experiment, index, client=0):
    """Uploads `[3, trials, dimension]` of a client in one round, each trial with keys of its own: without noise,
    with it, and without noise where record 0 has the other label."""
    plan, prepared = experiment.plan, experiment.prepared
    values = {name: jnp.asarray(value, jnp.float32) for name, value in plan.hyper.items()}
    params = jax.tree.map(jnp.zeros_like, experiment.model.init(jax.random.key(0)))
    cohort_size = len(experiment.cohorts[index])

    def one(noise, label, seed):
        hyper = {name: value * noise if name in plan.noise_names else value for name, value in values.items()}
        algorithm = prepared.build(hyper)
        labels = jnp.zeros(SIZE, jnp.int32).at[0].set(label)
        records = Records(jnp.eye(SIZE), labels, jnp.arange(SIZE), jnp.int32(0), jnp.int32(SIZE))
        keys = Keys(*jax.random.split(jax.random.key(seed), 3))
        message = algorithm.message(algorithm.init(params))
        round = Round(jnp.int32(index), jnp.int32(client), jnp.int32(cohort_size))
        result = algorithm.client(keys, message, algorithm.client_init(params), records, round)
        upload = result.upload["params"] if experiment.spec.method == "dp-scaffold" else result.upload
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(upload)])

    seeds = jax.vmap(one, in_axes=(None, None, 0))
    every = jax.jit(jax.vmap(seeds, in_axes=(0, 0, None)))
    return np.asarray(every(jnp.array([0.0, 1.0, 0.0]), jnp.array([0, 0, 1]), jnp.arange(TRIALS)), np.float64)


def check(experiment, client=0):
    """Returns the std of the noise on the client's upload."""
    plan, index = experiment.plan, 2
    info = RoundInfo(index, client, SIZE, len(experiment.cohorts[index]))
    (release,) = [r for r in experiment.prepared.releases(info) if r.channel == "uplink"]
    quiet, loud, neighbour = uploads(experiment, index, client)
    # Noise: what is added has the variance that the release states, in the unit of the upload.
    unit = plan.upload_unit or plan.client_lr / plan.cohort_size  # DP-SCAFFOLD keeps no unit
    unit *= max(map(len, plan.cohorts)) / len(plan.cohorts[index])  # it is stated for the largest cohort
    if plan.weights is not None:
        unit *= plan.weights[client] / plan.weights.min()  # it is stated for the least weight
    std = float(np.std(loud - quiet))
    assert std == pytest.approx(unit * release.noise_std, rel=0.03)
    # Frequencies: how often record 0 is in the batch.
    if release.sampling.kind in ("fixed", "poisson", "shuffled"):
        sizes = [leaf.size for leaf in jax.tree.leaves(experiment.model.init(jax.random.key(0)))]
        weight = sum(sizes[: next(at for at, size in enumerate(sizes) if size >= SIZE)])  # of record 0's feature
        share = (np.abs(quiet[:, weight]) > 1e-9).mean()
        assert share == pytest.approx(release.sampling.rate, abs=4 * np.sqrt(0.25 / TRIALS))
    # Sensitivity: no exhibited pair of neighbours moves an upload by more.
    moved = np.linalg.norm(neighbour - quiet, axis=1).max()
    factor = 2 if release.sampling.adjacency != "replace-one" else 1  # stated for a blanked record
    assert moved <= factor * release.sensitivity * unit * (1 + 1e-4)
    assert moved > 0
    return std


@given(specs())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_engine_and_accountant_read_the_same_plan(values):
    experiment = experiment_of(values)
    assume(experiment is not None)
    check(experiment)


@pytest.mark.slow
@given(specs())
@settings(max_examples=150, deadline=None)
def test_engine_and_accountant_read_the_same_plan_many_times(values):
    experiment = experiment_of(values)
    assume(experiment is not None)
    check(experiment)


OWN_TARGETS = {
    "method": "dp-sgd", "num_clients": 4, "cohort_size": 4, "num_rounds": 3, "local_steps": 1, "batch_size": 12,
    "batch_sampling": "full", "client_lr": 0.1, "privacy.clip": "example", "privacy.clip_norm": 0.2,
    "privacy.noise": "proven", "privacy.epsilon": 4.0, "privacy.epsilons": (0.5, 1.0, 1.0, 4.0),
    "privacy.adjacency": "zero-out", "model.l2": 0.0,
}  # fmt: skip


# Floats, and integers that are summed exactly
@pytest.mark.parametrize(("view", "randomness"), [("upload", "seeded"), ("sum", "os")])
def test_every_client_runs_with_the_noise_of_its_own_target(view, randomness):
    values = {**OWN_TARGETS, "privacy.view": view, "randomness": randomness, "secagg.mode": "ideal"}
    experiment = experiment_of(values)
    assert experiment.plan.exact_sums == (randomness == "os")
    accountant = experiment.accountant()
    for client, target in enumerate(OWN_TARGETS["privacy.epsilons"]):
        assert 0.998 * target <= accountant.of([client]).epsilon() <= target
    stds = [check(experiment, client) for client in (0, 1, 3)]
    assert max(stds) <= 1.05 * min(stds)  # weighted, all add the same noise to a sum
    weights = experiment.plan.weights
    assert weights.mean() == pytest.approx(1.0)
    assert weights[0] < weights[1] == weights[2] < weights[3]


def test_a_weight_that_is_not_the_stated_one_is_noticed():
    experiment = experiment_of({**OWN_TARGETS, "randomness": "seeded"})
    hyper = {**experiment.plan.hyper, "client_weight": np.ones(4)}
    with pytest.raises(AssertionError):
        check(experiment.with_plan(hyper=hyper), 0)


def test_equal_targets_are_one_target():
    alone = {**OWN_TARGETS, "privacy.epsilons": (), "privacy.epsilon": 2.0, "randomness": "seeded"}
    one, each = (experiment_of({**alone, "privacy.epsilons": targets}) for targets in ((), (2.0,) * 4))
    np.testing.assert_array_equal(one.plan.hyper["noise_std"], each.plan.hyper["noise_std"])
    np.testing.assert_array_equal(each.plan.weights, np.ones(4))


def test_a_client_that_adds_less_noise_than_it_states_is_noticed(monkeypatch):
    """The test above can fail: noise, sampling and clip of the running code, each bent by a little."""
    from dither.privacy import clipping, noise, sampling

    values = {
        "method": "cpfed", "num_clients": 4, "cohort_size": 4, "num_rounds": 3, "local_steps": 1, "batch_size": 3,
        "batch_sampling": "fixed", "client_lr": 0.1, "privacy.clip": "example", "privacy.clip_norm": 0.2,
        "privacy.noise": "given", "privacy.noise_std": 0.5, "privacy.adjacency": "replace-one",
    }  # fmt: skip
    check(experiment_of(values))
    gaussian, gradient, make = noise.gaussian, clipping.gradient, sampling.make

    def larger(kind, *, batch_size, **options):
        stated = make(kind, batch_size=batch_size, **options)
        return make(kind, batch_size=batch_size + 1, **options)._replace(sampling=stated.sampling)

    bent = {
        (noise, "gaussian"): lambda key, tree, *, noise_std: gaussian(key, tree, noise_std=0.9 * noise_std),
        (clipping, "gradient"): lambda *a, clip_norm, **k: gradient(*a, clip_norm=2.5 * clip_norm, **k),
        (sampling, "make"): larger,
    }
    for (module, name), other in bent.items():
        monkeypatch.setattr(module, name, other)
        with pytest.raises(AssertionError):
            check(experiment_of(values))
        monkeypatch.undo()
