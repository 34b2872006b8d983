"""Whole federations: the sum is that of the survivors' words bit for bit, whoever is lost and when."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither.errors import ProtocolAbort, SpecError
from dither.secagg.encoding import FixedPoint, decode, encode
from dither.secagg.graph import Rules
from dither.secagg.session import LOST, LocalFederation
from tests.secagg.support import plain_sum

WORDS = {32: np.uint32, 64: np.uint64}


def how(bits: int, num_clients: int) -> FixedPoint:
    return FixedPoint(scale_bits=16, modulus_bits=bits, bound=8.0, num_clients=num_clients)


def words(rng, bits: int, clients, dimension: int) -> dict[int, np.ndarray]:
    most = np.iinfo(WORDS[bits]).max
    return {who: rng.integers(0, most, dimension, WORDS[bits], endpoint=True) for who in clients}


def expect(cohort, lost, rules: Rules):
    """Whom the sum holds and after how many attempts, or None where the round must abort: said a second time."""
    threshold = rules.threshold_for(len(cohort))
    before = {who for who in cohort if lost.get(who) == "before-upload"}
    after = {who for who in cohort if lost.get(who) == "after-upload"}
    least = max(rules.min_clients, threshold, 2)
    survivors, attempts = set(cohort), 1
    if before:
        survivors, attempts = survivors - before, 2
        if len(survivors) < least:
            return None
        if after:
            survivors, attempts = survivors - after, 3
    if len(survivors) < least or len(survivors - after) < threshold:
        return None
    return tuple(sorted(survivors)), attempts


def check(federation, round_index, encodings, lost):
    expected = expect(encodings, lost, federation.server.rules)
    if expected is None:
        with pytest.raises(ProtocolAbort, match=r"threshold is|min_clients is|a cohort of"):
            federation.sum(round_index, encodings, lost=lost)
        return
    summed = federation.sum(round_index, encodings, lost=lost)
    assert (summed.survivors, summed.attempts) == expected
    assert summed.total.dtype == federation.fixed_point.dtype
    assert np.array_equal(summed.total, plain_sum(encodings[who] for who in summed.survivors))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("colluders", [0, 1])
def test_every_subset_and_every_dropout_pattern_of_four_clients(bits, colluders):
    federation = LocalFederation(4, how(bits, 4), colluders=colluders)
    rng = np.random.default_rng(bits)
    # Each client is outside the cohort, stays, or is lost in one of two ways.
    for round_index, pattern in enumerate(itertools.product(("outside", "stays", *LOST), repeat=4)):
        cohort = [who for who in range(4) if pattern[who] != "outside"]
        lost = {who: pattern[who] for who in cohort if pattern[who] in LOST}
        check(federation, round_index, words(rng, bits, cohort, 3), lost)


FEDERATIONS = {
    (bits, colluders, neighbours): LocalFederation(12, how(bits, 12), colluders=colluders, neighbours=neighbours)
    for bits in (32, 64)
    for colluders, neighbours in ((0, 0), (3, 0), (1, 4))
}
ROUNDS = itertools.count()


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_subset_and_any_dropout_pattern(data):
    bits, colluders, neighbours = data.draw(st.sampled_from(sorted(FEDERATIONS)))
    federation = FEDERATIONS[bits, colluders, neighbours]
    cohort = data.draw(st.sets(st.integers(0, 11), min_size=1))
    lost = data.draw(st.dictionaries(st.sampled_from(sorted(cohort)), st.sampled_from(LOST)))
    values = st.lists(st.integers(0, 2**bits - 1), min_size=4, max_size=4)
    encodings = {who: np.array(data.draw(values), WORDS[bits]) for who in cohort}
    check(federation, next(ROUNDS), encodings, lost)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("size", [2, 3, 10, 33, 100])
def test_cohorts_from_2_to_100(bits, size):
    rng = np.random.default_rng(size)
    federation = LocalFederation(size, how(bits, size), colluders=size // 10)
    for round_index, share in enumerate((0.0, 0.2)):
        lost = {who: str(rng.choice(LOST)) for who in range(size) if rng.random() < share}
        check(federation, round_index, words(rng, bits, range(size), 7), lost)


def test_floats_there_and_back():
    """What the protocol is for: decoded, the sum is that of the rounded values."""
    rng = np.random.default_rng(1)
    rule = how(32, 10)
    values = rng.normal(size=(10, 50))
    federation = LocalFederation(16, rule)
    summed = federation.sum(0, {who + 3: encode(row, rule)[0] for who, row in enumerate(values)})
    assert summed.survivors == tuple(range(3, 13))
    assert np.array_equal(decode(summed.total, rule), np.rint(values * 2**16).sum(0) / 2**16)


def test_what_a_round_costs_in_bytes():
    """The cost table of docs/secagg.md: one upload of d words and little else."""
    size, dimension, colluders = 20, 1000, 2
    federation = LocalFederation(size, how(32, size), colluders=colluders)
    summed = federation.sum(0, words(np.random.default_rng(0), 32, range(size), dimension))
    frame, committee = 62 + 64, colluders + 1
    upload, shares = frame + 36 + 4 * dimension, frame + 36 + 37 * committee
    seal = 32 + 93 * size
    announce, unseal = frame + 80 + 4 * size, frame + 36 + 65 * committee
    assert (
        sorted(summed.bytes_up.values())
        == [upload + shares] * (size - committee) + [upload + shares + seal] * committee
    )
    assert set(summed.bytes_down.values()) == {announce + unseal}
    client, server = federation.clients[0], federation.server
    assert len(client.hello()) + len(client.confirm(server.make_roster())) == 380
    assert len(server.make_roster()) + len(server.confirmed()) == 305 + 228 * size
    assert summed.mask_seconds > 0
    assert summed.unmask_seconds > 0


def test_after_an_abort_the_next_round_goes_on():
    federation = LocalFederation(3, how(32, 3))
    encodings = words(np.random.default_rng(0), 32, range(3), 4)
    with pytest.raises(ProtocolAbort, match="a cohort of 1"):
        federation.sum(0, encodings, lost={0: "before-upload", 1: "before-upload"})
    with pytest.raises(ProtocolAbort, match="1 shares received, threshold is 2"):
        federation.sum(1, encodings, lost={0: "after-upload", 1: "after-upload"})
    assert np.array_equal(federation.sum(2, encodings).total, plain_sum(encodings.values()))
    with pytest.raises(ProtocolAbort, match="round 2 is over"):
        federation.sum(2, encodings)
    with pytest.raises(ProtocolAbort, match="round numbers must increase"):
        federation.sum(1, encodings)


def test_a_fixed_threshold():
    federation = LocalFederation(6, how(32, 6), threshold=5)
    encodings = words(np.random.default_rng(0), 32, range(6), 4)
    lost = {0: "after-upload"}
    assert federation.sum(0, encodings, lost=lost).survivors == tuple(range(6))
    with pytest.raises(ProtocolAbort, match="4 shares received, threshold is 5"):
        federation.sum(1, encodings, lost={**lost, 1: "after-upload"})
    with pytest.raises(ProtocolAbort, match="threshold 2 is too low for a cohort of 6 with 0 colluders"):
        LocalFederation(6, how(32, 6), threshold=2).sum(0, encodings)


def test_ids_may_be_numpys_and_rounds_are_not_negative():
    federation = LocalFederation(3, how(32, 3))
    encodings = words(np.random.default_rng(0), 32, np.arange(3), 4)
    with pytest.raises(ProtocolAbort, match="round -1, attempt 0 is out of range"):
        federation.sum(-1, encodings)
    assert np.array_equal(federation.sum(0, encodings).total, plain_sum(encodings.values()))
    federation.server.save()


def test_too_few_neighbours_for_the_colluders_are_refused():
    federation = LocalFederation(12, how(32, 12), colluders=4, neighbours=2)
    encodings = words(np.random.default_rng(0), 32, range(12), 4)
    with pytest.raises(ProtocolAbort, match="neighbours=2 are too few for a cohort of 12 with 4 colluders: use 6"):
        federation.sum(0, encodings)
    assert LocalFederation(12, how(32, 12), colluders=4, neighbours=6).sum(0, encodings).attempts == 1


def test_wrong_values_are_named():
    federation = LocalFederation(3, how(32, 2))
    encodings = words(np.random.default_rng(0), 32, range(3), 4)
    with pytest.raises(SpecError, match=r"lost\[0\]='later' is not one of before-upload, after-upload"):
        federation.sum(0, encodings, lost={0: "later"})
    with pytest.raises(SpecError, match="3 encodings; the range is checked for num_clients=2"):
        federation.sum(0, encodings)
    with pytest.raises(SpecError, match="client 7 is not one of the 3"):
        federation.sum(0, {0: encodings[0], 7: encodings[1]})
    with pytest.raises(ProtocolAbort, match="the vector is uint32"):
        federation.sum(0, {0: encodings[0], 1: encodings[1][:3]})
    with pytest.raises(ProtocolAbort, match="a cohort of 1"):
        federation.sum(1, {0: encodings[0]})
    with pytest.raises(ProtocolAbort, match="a cohort of 0"):
        federation.sum(2, {})
    with pytest.raises(SpecError, match="num_clients=1 is below min_clients=2"):
        LocalFederation(1, how(32, 1))
