"""Shared by the ledger's tests: a fresh ledger, and releases that are quick to account for."""

from __future__ import annotations

import pytest

from dither.accounting.ledger import Charge, Ledger
from dither.types import Release, Sampling

FULL = Sampling("full", 1.0, "add/remove")


def gaussian(noise_std=10.0, channel="uplink", uses=1) -> tuple[Release, ...]:
    """One participation: an unsampled Gaussian release of sensitivity 1."""
    return (Release(channel, noise_std, 1.0, uses, FULL, "test"),)


def poisson(noise_std=1.0, rate=0.02, uses=3) -> tuple[Release, ...]:
    return (Release("uplink", noise_std, 1.0, uses, Sampling("poisson", rate, "add/remove"), "test"),)


def shuffled(noise_std=20.0, batch_size=10, population=100) -> tuple[Release, ...]:
    """One batch of a shuffled epoch."""
    sampling = Sampling("shuffled", batch_size / population, "replace-one", 0.0, batch_size, population)
    return (Release("uplink", noise_std, 1.0, 1, sampling, "test"),)


def all_of(clients, releases, count=1) -> list[Charge]:
    return [Charge(client, [(releases, count)]) for client in clients]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "place" / "ledger.sqlite"


@pytest.fixture
def ledger(path):
    return Ledger(path)
