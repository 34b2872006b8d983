import pytest

from dither.federation import messages
from tests.federation.parties import Parties, small_spec


@pytest.fixture
def quick(monkeypatch):
    """Nobody waits for parties that are away."""
    monkeypatch.setattr(messages, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(messages, "GRACE_SECONDS", 0.05)


@pytest.fixture
def parties(tmp_path, quick):
    """Four parties whose uploads are summed in the open."""
    return Parties(tmp_path, small_spec())


@pytest.fixture
def masked(tmp_path, quick):
    """Four parties under secure aggregation."""
    return Parties(tmp_path, small_spec(**{"secagg.mode": "real"}))
