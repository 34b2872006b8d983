"""The moments accountant of DP-FedAvg."""

from __future__ import annotations

import pytest
from dp_accounting import rdp

from dither.methods import baselines


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
