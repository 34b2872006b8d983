"""A deployed run and a simulated run of the same spec end with the same bits."""

import numpy as np
import pytest

from dither.accounting.exact import SUM_WIDTH
from dither.accounting.ledger import Budget
from dither.errors import FederationError
from dither.experiment import build
from dither.federation import messages
from dither.federation.state import PendingUpload
from dither.secagg import encoding
from tests.federation.parties import Parties, assert_simulated, server_bits, simulated, small_spec

QUICK = [("cpfed", "real")]  # the others take the same path, and their time


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)


CASES = [
    pytest.param(method, mode, marks=[] if (method, mode) in QUICK else [pytest.mark.slow])
    for method in ("cpfed", "dp-scaffold", "nbafl", "secure-fedavg", "concentrated")
    for mode in ("off", "real")
]


@pytest.mark.parametrize(("method", "mode"), CASES)
def test_same_bits_as_the_simulator(tmp_path, method, mode):
    spec = small_spec(method, **{"cohort_size": 3, "secagg.mode": mode, "federation.min_clients": 3})
    parties = Parties(tmp_path, spec)
    coordinator = parties.coordinator()
    report = coordinator.run()
    deployed = server_bits(coordinator)
    for ours, theirs in zip(deployed, simulated(parties.experiment, "loop"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(deployed, simulated(parties.experiment, "vmap"), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    assert report.rounds == 3
    counted = sum(party.counted for party in report.federation.parties.values())
    assert counted == sum(len(cohort) for cohort in parties.experiment.cohorts)


def test_the_opened_sum_is_the_sum_of_the_encodings(tmp_path, monkeypatch):
    """With a clip that adapts: it is broadcast beside the model, and its count is summed with the updates."""
    adapts = {"local_steps": 1, "privacy.clip": "example", "privacy.clip_quantile": 0.8}
    parties = Parties(tmp_path, small_spec(**{"secagg.mode": "real", "num_rounds": 2, **adapts}))
    opened = []
    decode = encoding.decode
    monkeypatch.setattr(encoding, "decode", lambda words, how: opened.append(words.copy()) or decode(words, how))
    coordinator = parties.coordinator()
    coordinator.run()
    rows = [parties.nodes[name]._run.store.load(PendingUpload).row for name in parties.nodes]
    assert all(row.dtype == np.uint32 for row in rows)
    np.testing.assert_array_equal(opened[-1], np.add.reduce(rows, dtype=np.uint32))
    assert coordinator.engine.state.server["clip"] != 1
    assert_simulated(coordinator, parties)


@pytest.mark.slow
def test_discrete_noise_on_the_words_is_the_simulators(tmp_path):
    spec = small_spec("nbafl", **{"secagg.mode": "real", "secagg.noise": "discrete", "privacy.noise_std": 0.5})
    parties = Parties(tmp_path, spec)
    coordinator = parties.coordinator()
    coordinator.run()
    assert_simulated(coordinator, parties)


def test_noisy_integers_are_summed_as_they_are(tmp_path, monkeypatch):
    """Exact sums (R9) of parties that set their own targets when they join: what secure aggregation opens is the
    sum of the noisy integers, and the model that follows has the simulator's bits. (A seed draws the noise
    here, so that both have the same.) A party whom an agreement would cost more refuses by itself."""
    options = build.engine_options
    monkeypatch.setattr(build, "engine_options", lambda of: {**options(of), "randomness": "seeded"})
    values = {"local_steps": 1, "batch_sampling": "full", "model.l2": 0.01, "lr_decay": 0.1, "num_rounds": 2}
    values |= {"server_optimizer": "momentum", "server_average": 0.5, "secagg.modulus_bits": 64}
    values |= {"privacy.noise": "proven", "privacy.epsilon": 2.0, "privacy.view": "sum", "privacy.delta": 1e-5}
    values |= {"privacy.adjacency": "zero-out", "randomness": "os", "secagg.mode": "real"}
    values |= {"federation.min_clients": 4}  # nobody may be missing, as in the simulation
    targets = [0.5, 2.0, 1.0, 2.0]
    parties = Parties(tmp_path, small_spec("dp-sgd", **values, **{"privacy.epsilons": targets}))
    assert parties.experiment.plan.exact_sums
    for name, target in zip(parties.names, targets, strict=True):
        parties.nodes[name] = parties.node(name, target=Budget(target, 1e-5))
    coordinator = parties.coordinator()
    coordinator.asked_spec = parties.spec.with_values({"privacy.epsilons": []})
    report = coordinator.run()
    assert_simulated(coordinator, parties)
    rows = [parties.nodes[name]._run.store.load(PendingUpload).row.view(np.int64) for name in parties.nodes]
    assert max(np.abs(row).max() for row in rows) < 2**31 // 4
    assert all(np.std(row) > 0.5 * SUM_WIDTH for row in rows)
    assert [row.target for row in report.epsilon.clients] == targets
    assert all(0.998 * row.target < row.proven <= row.target for row in report.epsilon.clients)

    agreement, experiment = coordinator.agreement, coordinator.experiment
    strict, exacting = (parties.node("ann", target=Budget(*each)) for each in ((0.25, 1e-5), (0.5, 1e-9)))
    with pytest.raises(
        FederationError, match=r"proves ε = 0.4\d+ .* above its own target of 0.25; raise --epsilon"
    ):
        strict._check_target(agreement, experiment)
    with pytest.raises(FederationError, match="δ = 1e-05, above this party's 1e-09"):
        exacting._check_target(agreement, experiment)
