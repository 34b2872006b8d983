"""Noise that something else was done to does not hide the other clients of a sum.

`federation.max_norm` scales long uploads down after their noise was added. Each of the others here holds records
of one direction, so that its upload is long and ends on the ball: the noise along that direction is gone. The
target's upload is short and keeps its noise. A proof that counted the others' noise was four times too small.
"""

import numpy as np
import pytest
from safetensors import numpy as safetensors

from dither import accounting
from dither.data import ClientPartition, Dataset
from dither.errors import SpecError
from dither.experiment.build import assemble, engine_options
from dither.simulation import engine
from dither.spec import Spec

CLIENTS, RECORDS, RUNS = 17, 10, 1000
VALUES = {
    "method": "cpfed",
    "num_clients": CLIENTS,
    "cohort_size": CLIENTS,
    "num_rounds": 1,
    "local_steps": 1,
    "batch_sampling": "full",
    "client_lr": 1.0,
    "model.name": "logistic",
    "privacy.noise": "given",
    "privacy.noise_std": 0.095,  # of one client among 17; ε = 1 by the noise of all of them, 4.7 alone
    "privacy.view": "sum",
    "privacy.adjacency": "zero-out",
    "secagg.mode": "ideal",
}


def world(target, values, label=None):
    """The experiment whose target record is there, or blanked: all records point in the first direction."""
    y = np.repeat(np.arange(CLIENTS, dtype=np.int32) % 2, RECORDS)
    y = y if label is None else np.full_like(y, label)  # or all pull the same way
    x = np.zeros((len(y), 2), np.float32)
    x[:, 0] = 100.0  # half of the others pull one way, half the other way
    y[:RECORDS] = -1  # the target's other records say nothing
    y[0] = (1 if label is None else label) if target else -1
    start, size = np.arange(CLIENTS) * RECORDS, np.full(CLIENTS, RECORDS)
    partition = ClientPartition(np.arange(len(y)), start, size, tuple(map(str, range(CLIENTS))))
    dataset = Dataset("made", x, y, x[:1], y[-1:], ("a", "b"), ("one", "two"))
    problem = engine.problem(x, y, partition, x[:1], y[-1:])
    return assemble(Spec().with_values({**VALUES, **values}), dataset, partition, problem)


def exhibited(values, label=None, server=lambda state: state):
    """ε shown by the sums of many runs in both worlds, and the proven one. `server` makes the state in which the
    round is made."""
    worlds = [world(target, values, label) for target in (True, False)]
    first, seeds = worlds[0], list(range(RUNS))
    simulation = engine.Simulation(
        first.model, first.prepared.build, num_clients=CLIENTS, cohort_size_at=lambda index: CLIENTS,
        **{**engine_options(first), "randomness": "seeded"},
    )  # fmt: skip
    hyper = {name: np.stack([np.asarray(value)] * RUNS) for name, value in first.prepared.hyper.items()}
    sums = []
    for each in worlds:
        inputs = simulation.inputs(each.problem, seeds=seeds, hyper=hyper)
        state = simulation.start(inputs)
        state = simulation.advance(state._replace(server=server(state.server)), inputs, 0, 1)
        sums.append(np.asarray(simulation.params(state, inputs)["out"]["w"])[:, 0, 0])
    shift = abs(np.mean(sums[0] - sums[1]))  # the seeds are the same, and so is the noise
    spread = np.std(sums[0], ddof=1) * (1 + 4 / np.sqrt(2 * RUNS))  # four standard errors above what was seen
    row = first.accountant().proven()
    return accounting.gaussian_epsilon(float(shift / spread), row.delta), row


BALL = {"federation.max_norm": 0.05}
CLAMPED = {"client_lr": 3e13, "secagg.mode": "off"}  # each coordinate is cut at 2^40
ENCODED = {"secagg.bound": 0.05}  # and here before it is encoded
WORDS = {"client_lr": 2000.0}  # at the largest number that the words hold: 64


@pytest.mark.parametrize("values", [BALL, {**BALL, "randomness": "os"}, CLAMPED, ENCODED, WORDS])
def test_projected_uploads_hide_nobody_else(values):
    attacked, row = exhibited(values)
    assert 3 < attacked <= row.value


TIGHT = {"secagg.bound": 0.11}  # enough for the longest first upload and its noise


def test_a_regulariser_may_push_uploads_over_the_bound(tmp_path):
    """At this model the regulariser adds 1.3 to every upload, so that the long ones of the others are cut: 4.2 was
    shown for 0.95."""
    weights = save(tmp_path, 1.3)
    attacked, row = exhibited({**TIGHT, "model.l2": 0.5, "model.weights": weights}, label=0)
    assert 3 < attacked <= row.value
    small = {**TIGHT, "model.l2": 1e-3, "model.weights": weights}
    assert world(True, small).accountant().epsilon("sum") <= 1
    assert world(True, {**small, "server_optimizer": "adam"}).accountant().epsilon("sum") > 3
    assert world(True, {**small, "client_lr": 0.1, "model.l2": 11.0}).accountant().epsilon("sum") > 3


def test_a_clip_that_grows_may_push_uploads_over_the_bound():
    """The clip may grow by 20% a round, and uploads grow with it: 4.2 was shown for 3.4."""

    def grown(state):
        return {**state, "clip": np.full_like(state["clip"], 1.19**9)}

    attacked, row = exhibited({**TIGHT, "privacy.clip_quantile": 0.9, "num_rounds": 10}, 0, grown)
    assert 3.5 < attacked <= row.value
    roomy = world(True, {"privacy.clip_quantile": 0.9, "secagg.modulus_bits": 64}).accountant()
    assert roomy.epsilon("sum") < 0.5 * roomy.epsilon("upload")


def test_a_broadcast_outside_the_ball_may_push_nbafls_uploads_over_the_bound(tmp_path):
    """An upload is the way from the broadcast into the ball."""
    values = {"method": "nbafl", "privacy.clip": "none", "privacy.noise_std": 0.12, "secagg.bound": 0.3}
    inside, outside = (
        world(True, {**values, "method_options.param_clip": 1.0, "model.weights": save(tmp_path, start)})
        for start in (0.5, 4.5)
    )
    assert inside.accountant().epsilon("sum") < 0.5 * inside.accountant().epsilon("upload")
    assert outside.accountant().epsilon("sum") == outside.accountant().epsilon("upload")


@pytest.mark.parametrize(
    "values",
    [
        {"model.l2": 0.25, "secagg.bound": 60.0},
        {"method": "nbafl", "privacy.clip": "none", "method_options.param_clip": 1.0, "secagg.bound": 0.5},
    ],
)
def test_a_server_that_overshoots_may_push_uploads_over_the_bound(values, tmp_path):
    """The server goes back 10 or 20 times as far as the clients ask: the model grows from round to round, and
    uploads of every client were cut. Sums were proved at 3.5, single uploads at 19."""
    values = {**values, "server_schedule": "linear", "num_rounds": 10, "model.weights": save(tmp_path, 1.0)}
    overshooting = world(True, {**values, "server_lr": 20.0})
    simulation = engine.Simulation(
        overshooting.model, overshooting.prepared.build, num_clients=CLIENTS, cohort_size_at=lambda index: CLIENTS,
        **{**engine_options(overshooting), "randomness": "seeded"},
    )  # fmt: skip
    hyper = {name: np.asarray(value)[None] for name, value in overshooting.prepared.hyper.items()}
    inputs = simulation.inputs(overshooting.problem, seeds=[0], hyper=hyper)
    assert simulation.advance(simulation.start(inputs), inputs, 0, 9).clamped[0] >= CLIENTS
    accountant, steady = overshooting.accountant(), world(True, values).accountant()
    assert accountant.epsilon("sum") == accountant.epsilon("upload")
    assert steady.epsilon("sum") < 0.5 * steady.epsilon("upload")


def save(folder, start):
    """A file of weights with this number in the first direction."""
    file = folder / f"{start}.safetensors"
    safetensors.save_file({"out/w": np.array([[start], [0.0]], np.float32)}, file)
    return str(file)


def test_without_a_ball_the_others_noise_counts():
    attacked, row = exhibited({})
    assert 0.6 < attacked <= row.value <= 1


def test_bits_that_leave_noise_no_room_are_refused_or_earn_no_credit():
    """Of 32 bits, 30 behind the point leave a bound of 1/16. It cuts uploads of 1/17 with noise of 0.006, and more
    once the accountant asks for more noise. ε = 1.07 was shown for 0.95."""
    bits = {"secagg.scale_bits": 30}
    given = world(True, bits).accountant()
    assert given.epsilon("sum") == given.epsilon("upload")
    calibrated = {**bits, "privacy.noise": "proven", "privacy.epsilon": 0.01, "privacy.clip_norm": 0.1}
    with pytest.raises(SpecError, match="would cut the noise of uploads"):
        world(True, calibrated)
    roomy = world(True, {**calibrated, "secagg.modulus_bits": 64}).accountant()
    assert roomy.epsilon("sum") < 0.5 * roomy.epsilon("upload")


def test_broadcasts_of_projected_uploads_count_the_servers_noise_alone():
    """NbAFL adds up the noise of all uploads in a broadcast."""
    values = {"method": "nbafl", "privacy.clip": "none", "privacy.noise_std": 20.0, "secagg.mode": "off"}
    free, projected = (world(True, {**values, "federation.max_norm": norm}).accountant() for norm in (0.0, 0.05))
    assert free.epsilon("final") < 0.5 * free.epsilon("upload")
    assert projected.epsilon("final") == projected.epsilon("upload") == free.epsilon("upload")
    cut = world(True, {**values, "secagg.mode": "ideal", "secagg.bound": 0.05}).accountant()
    assert cut.epsilon("final") == free.epsilon("upload")


METHOD = '''
import jax, jax.numpy as jnp, numpy as np
from dither.methods import local
from dither.types import Claim, Prepared

OPTIONS = {
    "stated": (False, "whether weights are stated"),
    "later": (0, "fewer clients a round, after the first"),
    "memory": (False, "whether a client keeps its last update"),
}

def prepare(model, plan):
    """Sends signs: a client whose updates are large has no noise left in them."""
    gradients = local.noisy_gradients(model, plan, source="signs")
    def build(hyper):
        averaging = local.averaging(plan, gradients)(hyper)
        def client(*arguments):
            result = averaging.client(*arguments)
            return result._replace(upload=jax.tree.map(jnp.sign, result.upload))
        def with_memory(keys, message, state, records, round):
            result = averaging.client(keys, message, state["inner"], records, round)
            upload = local.add(result.upload, state["last"])
            return result._replace(upload=upload, state={"inner": result.state, "last": result.upload})
        def client_init(params):
            return {"inner": averaging.client_init(params), "last": jax.tree.map(jnp.zeros_like, params)}
        if plan.options["memory"]:
            return averaging._replace(client=with_memory, client_init=client_init)
        return averaging._replace(client=client)
    return Prepared(
        plan=plan._replace(
            hyper=local.gradient_hyper(plan, local.chosen_noise_std(plan, None)),
            noise_names=("noise_std",),
            weights=np.ones(plan.num_clients) if plan.options["stated"] else None,
            upload_unit=local.upload_unit(plan),
        ),
        build=build,
        claim=Claim(float("inf"), "run", plan.delta, "no paper"),
        cohort_size_at=lambda index: (index and plan.options["later"]) or plan.cohort_size,
    )
'''


def test_a_method_of_your_own_that_states_no_weights_hides_nobody_else(tmp_path):
    """Nothing says what it does with its noise: here it sends signs."""
    unstated, stated = (accountant(tmp_path, stated=value) for value in (False, True))
    assert unstated.epsilon("sum") == unstated.epsilon("upload") == stated.epsilon("upload")
    assert stated.epsilon("sum") < 0.5 * stated.epsilon("upload")


def test_the_smallest_cohort_of_a_method_of_your_own_counts(tmp_path):
    """The proof counted on as many clients as the spec asks for, however few the method takes."""
    whole, few = (accountant(tmp_path, stated=True, later=later) for later in (0, 2))
    alone = whole.epsilon("upload")
    assert few.epsilon("upload") <= alone  # some clients take part once
    assert whole.epsilon("sum") < 0.5 * alone
    assert few.epsilon("sum") > 0.6 * few.epsilon("upload")


def test_what_a_client_of_your_own_method_keeps_counts_as_private(tmp_path):
    """`client_state` was taken as stated: a method that adds its last update to the next one need not say so."""
    found = accountant(tmp_path, stated=True, memory=True)
    assert found.plan.client_state
    assert found.epsilon("sum") == found.epsilon("upload")


def accountant(folder, **options):
    (folder / "signs.py").write_text(METHOD)
    values = {"method": str(folder / "signs.py"), "num_rounds": 2}
    return world(
        True, {**values, **{f"method_options.{key}": value for key, value in options.items()}}
    ).accountant()
