"""The server's optimiser: what it makes of the rounds' changes, computed by hand, and that the proof stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither.errors import SpecError
from dither.experiment import build
from dither.methods import local, server
from dither.spec import Spec
from dither.types import Cohort
from tests.auditing.grid import small_dataset, small_spec

COHORT = Cohort(jnp.arange(2), jnp.ones(2, bool), jnp.int32(2))
CHANGES = ([1.0, -2.0], [0.5, 0.5], [-1.0, 3.0], [0.25, -0.5])


def models_after(**values):
    """The models after each change, and the final one, of a server that adds changes."""
    spec = Spec().with_values({"method": "dp-sgd", "local_steps": 1, "num_rounds": len(CHANGES), **values})
    adding = local.model_as_state(
        client=None, server=lambda key, state, upload, cohort: local.add(state, upload), releases=None
    )
    experiment = build.build_experiment(small_spec("dp-sgd", local_steps=1), dataset=small_dataset())
    prepared = experiment.prepared._replace(build=lambda hyper: adding)
    prepared = server.with_optimizer(prepared._replace(plan=prepared.plan._replace(hyper={})), spec)
    algorithm = prepared.build(prepared.plan.hyper)
    state, seen = algorithm.init(jnp.zeros(2)), []
    for change in CHANGES:
        state = algorithm.server(None, state, jnp.array(change), COHORT)
        seen.append(np.asarray(algorithm.message(state)))
    return np.array(seen), np.asarray(algorithm.params(state))


def test_momentum_is_fedavgm():
    speed, model, expected = np.zeros(2), np.zeros(2), []
    for change in CHANGES:
        speed = 0.5 * speed + np.array(change)
        model = model + 0.1 * speed
        expected.append(model)
    seen, last = models_after(server_optimizer="momentum", server_momentum=0.5, server_lr=0.1)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    np.testing.assert_array_equal(last, seen[-1])


def test_adam_steps_have_a_length_of_their_own():
    seen, _ = models_after(server_optimizer="adam", server_lr=0.1)
    np.testing.assert_allclose(seen[0], [0.1, -0.1], rtol=2e-3)


def test_schedules_fall_to_zero_over_the_rounds():
    for schedule, factors in (("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.853553, 0.5, 0.146447])):
        seen, _ = models_after(server_schedule=schedule)
        np.testing.assert_allclose(seen, np.cumsum(np.array(factors)[:, None] * CHANGES, axis=0), rtol=1e-5)


def test_the_average_is_that_of_the_last_models():
    seen, last = models_after(server_average=0.5)
    np.testing.assert_allclose(seen, np.cumsum(CHANGES, axis=0), rtol=1e-6)  # broadcasts stay as they were
    np.testing.assert_allclose(last, seen[2:].mean(axis=0), rtol=1e-6)


def test_the_proof_does_not_change():
    optimised = {"server_optimizer": "adam", "server_average": 0.5, "server_schedule": "cosine"}
    specs = [small_spec("dp-sgd", local_steps=1, **each) for each in ({}, optimised)]
    plain, other = (build.build_experiment(spec, dataset=small_dataset()) for spec in specs)
    assert plain.accountant().table() == other.accountant().table()


def test_servers_that_keep_more_than_the_model_refuse():
    spec = small_spec("dp-scaffold", server_optimizer="momentum")
    experiment = build.build_experiment(spec, dataset=small_dataset())
    algorithm = experiment.prepared.build(experiment.prepared.hyper)
    with pytest.raises(SpecError, match="not for dp-scaffold"):
        algorithm.init(experiment.model.init(jax.random.key(0)))
