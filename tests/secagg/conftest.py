import pytest

from dither.secagg.graph import Rules
from tests.secagg.support import IDS, enrolled, vectors


@pytest.fixture
def five():
    """Five clients with a vector each, of which one may lie or collude; four answers open a sum."""
    server, clients = enrolled(IDS, Rules(colluders=1, min_clients=3))
    return server, clients, vectors(IDS, server.rules)
