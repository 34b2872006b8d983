"""Fingerprints name a data set in one ledger and say nothing elsewhere."""

import numpy as np
import pytest

from dither.accounting.ledger import Ledger

X = np.arange(12, dtype=np.float32).reshape(3, 4)
Y = np.array([0, 1, 0])


def test_same_data_same_id_also_after_reopening(ledger, path):
    name = ledger.fingerprint(X, Y)
    assert len(name) == 32
    assert ledger.fingerprint(X.copy(), Y.copy()) == name
    assert Ledger(path).fingerprint(X, Y) == name
    assert ledger.fingerprint(np.asfortranarray(X), Y) == name, "the layout in memory is not data"


def test_another_key_gives_another_id(ledger, tmp_path):
    assert Ledger(tmp_path / "other.sqlite").fingerprint(X, Y) != ledger.fingerprint(X, Y)


def test_every_single_bit_matters(ledger):
    seen = {ledger.fingerprint(X)}
    for bit in range(X.nbytes * 8):
        changed = bytearray(X.tobytes())
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(ledger.fingerprint(np.frombuffer(changed, X.dtype).reshape(X.shape)))
    assert len(seen) == 1 + X.nbytes * 8


def test_shapes_types_order_and_boundaries_matter(ledger):
    variants = [
        (X,),
        (X.reshape(4, 3),),
        (X.reshape(-1),),
        (X.view(np.int32),),
        (X.astype(">f4"),),
        (X[:2], X[2:]),
        (X[:1], X[1:]),
        (X, Y),
        (Y, X),
        (X, np.zeros((0, 4), np.float32)),
        (X, np.zeros((0, 5), np.float32)),
        (),
        (np.array(1.0),),
        (np.array([1.0]),),
        (np.array(["a", "b"]),),
        (np.array(["a", "b"], dtype="<U2"),),
        (np.array(["2020-01-01"], dtype="datetime64[D]"),),
    ]
    assert len({ledger.fingerprint(*arrays) for arrays in variants}) == len(variants)


def test_arrays_of_pointers_are_refused(ledger):
    with pytest.raises(ValueError, match="object"):
        ledger.fingerprint(np.array(["a", None], dtype=object))
