"""Planted bugs: each of them makes an audit report a violation, and the code without them does not."""

import jax
import numpy as np
import pytest

from dither.auditing import audit
from dither.experiment.build import build_experiment
from dither.simulation import engine
from dither.types import Keys

from .grid import small_dataset, small_spec

TRIALS, CONFIDENCE = 4000, 0.999


def assemble(**changes):
    values = {"num_rounds": 2, "cohort_size": 3, "local_steps": 1, "batch_size": 4, **changes}
    return build_experiment(small_spec("cpfed", **values), dataset=small_dataset())


def attack(experiment, **mutation):
    return audit(experiment, views=("upload",), trials=TRIALS, confidence=CONFIDENCE, **mutation)


def with_hyper(experiment, **changes):
    """The method built with other values than those its proof is for."""
    return lambda hyper: experiment.prepared.build(
        {**hyper, **{k: change(hyper[k]) for k, change in changes.items()}}
    )


@pytest.mark.slow
def test_without_a_bug_nothing_is_reported():
    assert not attack(assemble()).violations


def test_halved_noise_is_caught():
    experiment = assemble(batch_sampling="full")
    found = attack(experiment, build=with_hyper(experiment, noise_std=lambda std: std / 2))
    assert found.violations
    # By counting alone, too: the proof needs no assumption to be refuted.
    counted = next(b for b in found.violations[0].bounds if b.form == "counts")
    assert counted.value > found.violations[0].proven


def test_skipped_clipping_is_caught():
    experiment = assemble()
    assert attack(experiment, build=with_hyper(experiment, clip_norm=lambda norm: norm * 1e6)).violations


def test_a_noise_key_shared_by_two_clients_is_caught():
    """Whoever sees both uploads subtracts one from the other and the noise is gone."""

    def shared(root, index, client):
        return engine.client_keys(root, index, client)._replace(
            noise=engine.client_keys(root, index, np.int32(0)).noise
        )

    assert attack(assemble(), keys=shared).violations


@pytest.mark.parametrize("sampler", ["fixed", pytest.param("poisson", marks=pytest.mark.slow)])
def test_sampling_without_its_randomness_is_caught(sampler):
    """A batch key that is the same in every run: the adversary knows which records are drawn."""

    def fixed(root, index, client) -> Keys:
        known = engine.client_keys(np.uint32(3), index, client)
        return engine.client_keys(root, index, client)._replace(batch=known.batch, epoch=known.epoch)

    rate = {"sampling_rate": 0.1, "privacy__adjacency": "zero-out"} if sampler == "poisson" else {}
    experiment = assemble(batch_sampling=sampler, batch_size=2, **rate)
    assert attack(experiment, keys=fixed).violations


@pytest.mark.slow
def test_one_batch_for_all_rounds_is_caught():
    """A batch key that forgets the round: a record is used in all rounds or in none."""

    def stuck(root, index, client) -> Keys:
        first = engine.client_keys(root, jax.numpy.int32(0), client)
        return engine.client_keys(root, index, client)._replace(batch=first.batch)

    experiment = assemble(batch_size=2, num_rounds=8, cohort_size=6, privacy__epsilon=1.0)
    assert attack(experiment, keys=stuck).violations
