"""DP-FedAvg protects whole clients, the ledger records: blanking a record can turn a client's update round."""

import jax
import jax.numpy as jnp
import numpy as np

from dither import accounting, models
from dither.accounting.accountant import Accountant
from dither.data import ClientPartition, Dataset
from dither.experiment.build import assemble, compiled
from dither.methods import prepare
from dither.simulation import engine
from dither.spec import Spec
from dither.types import Keys, Records, Round, RoundInfo
from tests.methods.test_conformance import SIZES, spec_of


def test_the_ledger_charges_what_one_record_can_move_in_a_client_s_update():
    clip, model = 0.3, models.logistic(6)
    options = {"method_options.update_clip": clip, "method_options.noise_multiplier": 4.0}
    spec = spec_of("dp-fedavg", client_lr=50.0, local_steps=1, batch_sampling="full", **options)
    prepared = prepare(spec, model, client_sizes=SIZES, num_params=7)
    algorithm = prepared.build({name: jnp.asarray(value) for name, value in prepared.hyper.items()})
    start = model.init(jax.random.key(0))
    size = int(SIZES[0])
    x = np.zeros((size, 6), np.float32)
    x[0], x[1] = 10.0, -5.0  # both of class 1: the first outweighs the second

    def upload(labels):
        records = Records(jnp.asarray(x), jnp.asarray(labels), jnp.arange(size), jnp.int32(0), jnp.int32(size))
        keys = Keys(*(jax.random.key(1) for _ in Keys._fields))
        state = algorithm.client_init(start)
        result = algorithm.client(keys, start, state, records, Round(jnp.int32(0), jnp.int32(0), jnp.int32(1)))
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.upload)])

    with_it = np.full(size, -1, np.int32)  # all others are blank
    with_it[:2] = 1
    without = with_it.copy()
    without[0] = -1  # zero-out
    moved = np.linalg.norm(upload(with_it) - upload(without)) / clip
    assert moved > 1.8

    info = RoundInfo(0, 0, size, 1)
    releases = prepared.releases
    charges = Accountant(prepared.plan, releases).ledger_releases(info)
    (charged,) = [r for r in charges if r.channel == "downlink"]
    assert accounting.step_multiplier(charged, "zero-out") <= 4.0 / moved
    (of_a_client,) = [r for r in releases(info) if r.channel == "downlink"]
    assert accounting.step_multiplier(of_a_client, "zero-out") == 4.0


def test_rounding_for_a_secure_sum_counts_before_the_servers_noise():
    """Each update is rounded before it is summed, and the noise comes after that. With steps of 1 and S/K = 0.51 a
    client moved the model by 1, and its ε was proved for 0.51."""
    values = {"method": "dp-fedavg", "num_clients": 2, "cohort_size": 2, "num_rounds": 1, "batch_sampling": "full"}
    values |= {"client_lr": 1.0, "model.name": "logistic", "secagg.mode": "ideal", "secagg.scale_bits": 0}
    values |= {"method_options.update_clip": 1.02, "privacy.noise": "paper", "privacy.view": "final"}
    x, models_after = np.array([[100.0, 0.0]] * 4, np.float32), []
    partition = ClientPartition(np.arange(4), np.array([0, 2]), np.array([2, 2]), ("one", "two"))
    for label in (1, -1):  # the first client, and a blank in its place
        y = np.array([label, label, -1, -1], np.int32)
        dataset = Dataset("made", x, y, x[:1], y[:1], ("a", "b"), ("one", "two"))
        experiment = assemble(
            Spec().with_values(values), dataset, partition, engine.problem(x, y, partition, x[:1], y[:1])
        )
        simulation, _, inputs = compiled(experiment)
        state = simulation.advance(simulation.start(inputs), inputs, 0, 1)
        models_after.append(np.asarray(simulation.params(state, inputs)["out"]["w"]))  # with the same noise
    (release,) = [r for r in experiment.prepared.releases(RoundInfo(0, 0, 2, 2)) if r.channel == "downlink"]
    moved = float(np.linalg.norm(models_after[0] - models_after[1]))
    assert 0.99 < moved <= release.sensitivity < 1.4
