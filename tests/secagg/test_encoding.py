"""Encodings: the published numbers, exact sums, and no overflow that is not refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither.errors import SpecError
from dither.secagg.encoding import FixedPoint, decode, encode
from tests.vectors.published import entries


def test_published_numbers():
    found = entries("sa")
    assert len(found) == 2
    for entry in found:
        inputs = entry["inputs"]
        how = FixedPoint(inputs["scale_bits"], inputs["modulus_bits"])
        words, clamped = encode(np.array([inputs["x"]]), how)
        assert int(words[0]) == entry["value"], entry["id"]
        assert clamped == 0


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_sums_of_encodings_decode_to_the_sum_of_the_rounded_values(bits, data):
    how = FixedPoint(scale_bits=16 if bits == 32 else 40, modulus_bits=bits, bound=100.0, num_clients=20)
    clients = data.draw(st.integers(2, 20))
    values = np.array(data.draw(st.lists(st.floats(-100, 100), min_size=clients, max_size=clients)))
    with np.errstate(over="ignore"):
        total = np.add.reduce([encode(np.array([v]), how)[0] for v in values], dtype=how.dtype)
    expected = np.rint(values * 2.0**how.scale_bits).sum() / 2.0**how.scale_bits
    assert decode(total, how)[0] == expected


def test_clamps_are_counted_and_overflow_is_refused_with_the_numbers():
    words, clamped = encode(np.array([1.0, 70.0, -1e9]), FixedPoint())
    assert clamped == 2
    assert decode(words, FixedPoint()).tolist() == [1.0, 64.0, -64.0]
    with pytest.raises(SpecError, match="a sum of 40 values up to 64 at 20 fractional bits"):
        encode(np.zeros(1), FixedPoint(num_clients=40))
    with pytest.raises(SpecError, match="not finite"):
        encode(np.array([np.nan]), FixedPoint())
