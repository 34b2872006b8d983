"""DP-FedAvg, its moments accountant, and DP-DSGD."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from dp_accounting import rdp

from dither import methods, models
from dither.methods import baselines, local
from dither.types import RoundInfo, Sampling
from tests.conftest import make_plan


@pytest.mark.parametrize(
    ("rate", "num_rounds", "multiplier", "delta"),
    [
        (0.1, 60, 0.9, 1e-4),  # best at order 3
        (0.01, 2000, 4.0, 1e-6),  # at 40
        (0.3, 5, 30.0, 1e-5),  # at 128
        (0.5, 300, 0.3, 1e-3),  # at 1.4, beside orders that do not converge
        (1.0, 10, 2.0, 1e-5),  # at 3.9
    ],
)
def test_few_orders_find_what_all_find(rate: float, num_rounds: int, multiplier: float, delta: float) -> None:
    event = baselines._central_event(rate, num_rounds, multiplier)
    every = rdp.RdpAccountant().compose(event).get_epsilon(delta)
    assert baselines.MomentsAccountant().compose(event).get_epsilon(delta) == every


def dp_fedavg(**changes):
    plan = make_plan([20] * 6, cohort_size=4, options={"update_clip": 0.5, "noise_multiplier": 3.0}, **changes)
    return baselines.prepare_dp_fedavg(models.logistic(6), plan)


@pytest.mark.parametrize(
    ("changes", "error", "moved"),
    [
        ({}, False, 0.0),
        ({"exact_noise": True}, True, 0.0),
        ({"aggregation": "ideal", "scale_bits": 12}, False, math.sqrt(7) * 2.0**-12 / 2),
        ({"aggregation": "ideal", "scale_bits": 12, "exact_noise": True}, False, math.sqrt(7) * 2.0**-12 / 2),
    ],
)
def test_a_blanked_client_moves_the_mean_by_its_share_of_the_bound(changes, error, moved):
    """And by what float32 errs in a sum of four that were clipped: 2K·γ(K + 8)."""
    seen, mean = dp_fedavg(**changes).releases(RoundInfo(0, 0, 20, 4))
    assert (seen.channel, seen.noise_std, seen.sensitivity) == ("uplink", 0.0, math.inf)
    further = 12 * 2.0**-24 / (1 - 12 * 2.0**-24)
    factor = (1 + local.whole_error(models.logistic(6))) * (1 + 2 * 4 * further) if error else 1.0
    assert mean.sensitivity == pytest.approx(0.5 / 4 * factor + moved, rel=1e-12)
    assert mean.noise_std == pytest.approx(3.0 * 0.5 / 4)
    assert (mean.channel, mean.uses, mean.sampling.kind, mean.sampling.adjacency) == (
        "downlink",
        1,
        "full",
        "zero-out",
    )
    assert (mean.exact is not None) is error


@pytest.mark.parametrize(("size", "std"), [(4, 3.0 * 0.5 / 4), (1, 3.0 * 0.5), (0, 3.0 * 0.5)])
def test_the_servers_noise_is_that_of_a_mean_over_those_who_are_left(size, std):
    ready = dp_fedavg(server_lr=2.0)
    state = {"w": np.ones(20_000, np.float32)}
    cohort = SimpleNamespace(size=np.int32(size))
    server = jax.jit(lambda *given: ready.build(ready.hyper).server(*given, cohort))
    sent = server(jax.random.key(0), state, {"w": np.zeros(20_000)})["w"]
    assert float(np.std(sent)) == pytest.approx(2.0 * std, rel=0.03)
    assert float(np.mean(sent)) == pytest.approx(1.0, abs=0.1)


def test_without_protection_a_server_sees_everything():
    (everything,) = baselines._unprotected(RoundInfo(3, 1, 20, 4))
    assert (everything.noise_std, everything.sensitivity, everything.uses) == (0.0, math.inf, 1)
    assert everything.sampling == Sampling("full", 1.0, "replace-one", 0.0, 20, 20)


@pytest.mark.parametrize(("who", "credited"), [("n", 6), ("r", 4)])
def test_the_noise_of_dp_dsgd_credits_all_clients_as_printed_or_the_cohort(who, credited):
    """ρ = 2C_iG²/(n'γ²σ²), for ten rounds with everyone's batch of three at a clip of two."""
    options = {"participation": "uniform", "participations": 10, "credited_clients": who}
    plan = make_plan([20] * 6, cohort_size=4, local_steps=1, options=options, noise="paper", unit="run")
    ready = baselines.prepare_dp_dsgd(models.logistic(6), plan)
    rho = methods.zcdp_from_epsilon(epsilon=0.5, delta=1e-4)
    assert ready.hyper["noise_std"][0] == pytest.approx(math.sqrt(2 * 10 * 2.0**2 / (credited * 9 * rho)))
    assert ready.claim.value == pytest.approx(0.5)
    assert [holds for _, holds in ready.claim.conditions] == [False]
