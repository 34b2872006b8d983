"""DP-FedAvg protects whole clients, the ledger records: blanking a record can turn a client's update round."""

import jax
import jax.numpy as jnp
import numpy as np

from dither import accounting, models
from dither.accounting.accountant import Accountant
from dither.methods import prepare
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
