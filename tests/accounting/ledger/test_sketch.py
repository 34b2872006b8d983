"""Sketches of records: what two data sets share is estimated within the error that is stated, and keyed."""

import math

import numpy as np
import pytest

from dither.accounting.ledger import sketch
from dither.data.hashing import RecordHashes
from dither.data.parts import sample

KEY = bytes(range(16))
RNG = np.random.default_rng(7)


def rows(start, stop):
    """Distinct records, some of them as numbers."""
    numbers = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return of(np.stack([numbers, numbers ^ np.uint64(1)]))


def of(whole):
    return RecordHashes(whole, np.zeros(0, np.uint64))


def rows_in_order(start, stop):
    return of(rows(start, stop).whole[:1])


def share(new, old, key=KEY, parts=True):
    known = sketch.scan(old, key).sketch
    known = known if parts else known._replace(parts=None)
    shared = sketch.scan(new, key, [known]).shared(known)
    assert not (shared.parts and shared.share)
    return shared.share


def test_siphash_is_that_of_its_paper():
    """The reference code's vector for an input of 8 bytes (vectors_sip64), and a slow version of it."""
    (found,) = sketch.siphash(np.frombuffer(bytes(range(8)), "<u8"), KEY)
    assert found.astype("<u8").tobytes().hex() == "6224939a79f5f593"
    numbers = RNG.integers(0, 2**63, 50).astype(np.uint64)
    assert sketch.siphash(numbers, KEY).tolist() == [plain_siphash(int(number), KEY) for number in numbers]


def plain_siphash(number, key):
    mask = 2**64 - 1
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [
        k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573,
    ]  # fmt: skip

    def turn(x, b):
        return ((x << b) | (x >> (64 - b))) & mask

    def rounds(count):
        for _ in range(count):
            v[0] = (v[0] + v[1]) & mask
            v[1] = turn(v[1], 13) ^ v[0]
            v[0] = turn(v[0], 32)
            v[2] = (v[2] + v[3]) & mask
            v[3] = turn(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & mask
            v[3] = turn(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & mask
            v[1] = turn(v[1], 17) ^ v[2]
            v[2] = turn(v[2], 32)

    for word in (number, 8 << 56):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_a_sketch_says_nothing_without_its_key_and_comes_back_from_text():
    one, other = (sketch.scan(rows(0, 5000), key).sketch for key in (KEY, bytes(16)))
    assert len(one.ordered) == len(one.mixed) == sketch.K
    assert not np.isin(one.ordered, other.ordered).any()
    again = sketch.Sketch.decode(one.encode())
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    shuffled = RNG.permuted(np.concatenate([rows(0, 5000).whole, rows(0, 900).whole], axis=1), axis=1)
    assert np.array_equal(sketch.scan(of(shuffled), KEY).sketch.ordered, one.ordered), "order and repetition"


@pytest.mark.parametrize(
    ("new", "old", "truth"),
    [
        ((0, 30_000), (0, 30_000), 1.0),
        ((0, 30_000), (15_000, 45_000), 0.5),
        ((0, 30_000), (28_500, 58_500), 0.05),
        ((0, 3_000), (0, 60_000), 1.0),  # a part
        ((0, 60_000), (0, 3_000), 1.0),  # more
        ((0, 60_000), (59_900, 60_900), 0.1),  # some of a small one, among many
        ((0, 3_000), (2_000, 62_000), 1 / 3),
        ((0, 700), (0, 500), 1.0),
    ],
)
def test_the_share_of_the_smaller_set_is_estimated_within_its_error(new, old, truth):
    sizes = [stop - start for start, stop in (new, old)]
    compared = min(*sizes, sketch.K, math.ceil(sketch.K * sizes[0] / sizes[1]))
    error = 4.5 * math.sqrt(truth * (1 - truth) / compared) + 1e-12
    for seed in range(3):
        key = bytes([seed]) * 16
        assert share(rows(*new), rows(*old), key) == pytest.approx(truth, abs=error)


def test_one_percent_is_seen_and_a_tenth_of_it_is_chance():
    """5,000 records each. 1% is overlooked with probability 0.9%, 0.1% taken for more than 1% with 2%."""
    keys = [RNG.bytes(16) for _ in range(50)]
    old = rows_in_order(0, 5000)
    assert sum(share(rows_in_order(4950, 9950), old, key) == 0 for key in keys) <= 4
    assert sum(share(rows_in_order(4995, 9995), old, key) > 0 for key in keys) <= 6
    assert share(rows_in_order(5000, 10_000), old) == 0


def test_small_sets_are_compared_exactly():
    assert share(rows(0, 1000), rows(990, 1990)) == 0  # 1% is not above 1%
    assert share(rows(0, 1000), rows(989, 1989)) == pytest.approx(0.011)
    assert share(rows(0, 50_000), rows(49_999, 50_059)) == pytest.approx(1 / 60)


def test_a_part_of_a_hundredth_is_seen():
    """1,000 of 100,000: about ten records can be compared, none with probability e^-10."""
    assert share(rows(500, 1500), rows(0, 100_000)) == 1.0


def test_parts_are_compared_if_records_share_nothing():
    """By a sketch that was kept as text; a sample of the parts gives the same answer."""
    parts = RNG.integers(0, 2**63, 40_000).astype(np.uint64)
    old = sketch.Sketch.decode(sketch.scan(RecordHashes(rows(0, 900).whole, parts[:20_000]), KEY).sketch.encode())
    for start, truth in ((0, 1.0), (10_000, 0.5), (19_000, 0.05), (19_900, 0.0), (20_000, 0.0)):
        for zeros in (0, 3):
            some = sample(parts[start : start + 20_000], zeros)
            shared = sketch.scan(RecordHashes(rows(900, 1800).whole, some, zeros), KEY, [old]).shared(old)
            assert shared.parts
            assert shared.share == pytest.approx(truth, abs=0.25 if zeros else 0.05)
            assert (shared.share > 0) == (truth > 0) or zeros
    whole = sketch.scan(RecordHashes(rows(0, 900).whole, parts[:0]), KEY, [old]).shared(old)
    assert whole == sketch.Overlap(1.0)


def test_a_sketch_without_parts_is_read_and_compared():
    """As ledgers of old have them; the columns may have changed places."""
    old = sketch.scan(rows(0, 900), KEY).sketch._replace(parts=None)
    assert sketch.Sketch.decode(old.encode()).parts is None
    turned = of(rows(0, 900).whole[::-1] ^ np.array([[1], [0]], np.uint64))
    again = of(np.stack([turned.whole[0], rows(0, 900).whole[1]]))
    assert sketch.scan(again, KEY, [old]).shared(old) == sketch.Overlap(1.0)


def test_rows_that_only_their_order_tells_apart_are_not_compared_without_it():
    """Tables of zeros and ones: any two have the same counts of ones."""
    few = RNG.integers(0, 50, 5000).astype(np.uint64)
    one, other = (of(np.stack([rows(a, a + 5000).whole[0], few])) for a in (0, 9000))
    assert share(one, other, parts=False) == 0
    wide = of(one.whole[:1])
    assert share(wide, wide) == 1.0
