"""The cost formula against the bytes of real messages."""

import numpy as np
import pytest

from dither.secagg.encoding import FixedPoint
from dither.secagg.messages import round_bytes
from dither.secagg.session import LocalFederation


@pytest.mark.parametrize(("clients", "bits", "colluders"), [(2, 32, 0), (7, 64, 0), (9, 32, 3)])
def test_the_formula_counts_what_is_sent(clients, bits, colluders):
    how = FixedPoint.fitting(clients, modulus_bits=bits)
    federation = LocalFederation(clients, how, colluders=colluders)
    summed = federation.sum(0, {who: np.full(11, who, how.dtype) for who in range(clients)})
    sent, received = round_bytes(11, clients, modulus_bits=bits, colluders=colluders)
    assert np.mean(list(summed.bytes_up.values())) == pytest.approx(sent)
    assert np.mean(list(summed.bytes_down.values())) == pytest.approx(received)
