"""Secret sharing: every threshold of shares rebuilds, one fewer says nothing."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dither.errors import ProtocolAbort
from dither.secagg import primitives, shamir


def is_prime(n: int) -> bool:
    """Miller-Rabin with the first 40 primes: a composite passes with probability below 4^-40."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    small = [p for p in range(2, 174) if all(p % q for q in range(2, p))]
    assert len(small) == 40
    for base in small:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def test_the_field_is_a_field_and_holds_every_secret():
    assert is_prime(shamir.PRIME)
    assert not is_prime(shamir.PRIME - 2)
    assert 2**256 < shamir.PRIME < 2 ** (8 * shamir.SHARE_BYTES)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_every_subset_of_the_threshold_rebuilds(secret, shares, data):
    threshold = data.draw(st.integers(1, shares))
    found = shamir.split(secret, shares=shares, threshold=threshold)
    assert {len(share) for share in found} == {shamir.SHARE_BYTES}
    for subset in itertools.combinations(range(1, shares + 1), threshold):
        assert shamir.join({x: found[x - 1] for x in subset}, threshold=threshold) == secret
    assert shamir.join(dict(enumerate(found, 1)), threshold=threshold) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_large_cohorts_and_the_ends_of_the_range(secret):
    found = shamir.split(secret, shares=100, threshold=51)
    assert shamir.join({x: found[x - 1] for x in range(50, 101)}, threshold=51) == secret


def test_fewer_shares_fit_every_secret(monkeypatch):
    """Over a field of 7 elements all polynomials can be listed: for each secret and each pair of share numbers,
    two of three shares take each of the 49 pairs of values exactly once. So they say nothing about the secret."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    for secret in range(7):
        seen: dict[tuple[int, int], Counter] = {
            pair: Counter() for pair in itertools.combinations((1, 2, 3, 4), 2)
        }
        for coefficients in itertools.product(range(7), repeat=2):
            drawn = iter(coefficients)
            monkeypatch.setattr(shamir.secrets, "randbelow", lambda n, drawn=drawn: next(drawn))
            shares = shamir.split(secret.to_bytes(32, "big"), shares=4, threshold=3)
            for pair, counts in seen.items():
                counts[tuple(shares[x - 1] for x in pair)] += 1
        for counts in seen.values():
            assert len(counts) == 49
            assert set(counts.values()) == {1}


def test_the_coefficients_are_fresh():
    secret = primitives.fresh_key()
    assert len({shamir.split(secret, shares=3, threshold=2)[0] for _ in range(50)}) == 50


def test_what_is_refused():
    found = shamir.split(bytes(32), shares=5, threshold=3)
    numbered = dict(enumerate(found, 1))
    with pytest.raises(ProtocolAbort, match="2 shares received, threshold is 3"):
        shamir.join({1: found[0], 2: found[1]}, threshold=3)
    with pytest.raises(ProtocolAbort, match="share 5 does not fit the others"):
        shamir.join({**numbered, 5: found[3]}, threshold=3)
    with pytest.raises(ProtocolAbort, match="33 bytes, not 32"):
        shamir.join({**numbered, 1: found[0][1:]}, threshold=3)
    with pytest.raises(ProtocolAbort, match="not a reduced element"):
        shamir.join({**numbered, 1: shamir.PRIME.to_bytes(33, "big")}, threshold=3)
    with pytest.raises(ProtocolAbort, match="no secret of 256 bits"):
        shamir.join({1: (2**256).to_bytes(33, "big")}, threshold=1)
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="threshold="):
            shamir.split(bytes(32), shares=5, threshold=wrong)
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        shamir.split(bytes(31), shares=5, threshold=2)


@pytest.mark.parametrize("count", [1, 3, 4, 31, 32, 300, 16_000, shamir.MOST_SHARES])
def test_shares_are_values_of_the_polynomial(count):
    """Limbs and their carries, with the largest coefficients and others, at the ends and in between."""
    for coefficients in ([shamir.PRIME - 1] * 24, [shamir.PRIME - 1 - 7**n % shamir.PRIME for n in range(25)]):
        values = shamir._evaluate(coefficients, count)
        assert len(values) == count
        for x in {1, 2, count // 2, count - 1, count} & set(range(1, count + 1)):
            assert values[x - 1] == sum(c * x**power for power, c in enumerate(coefficients)) % shamir.PRIME


def test_too_many_shares_are_refused():
    with pytest.raises(ValueError, match="at most 32767 are possible"):
        shamir.split(bytes(32), shares=shamir.MOST_SHARES + 1, threshold=2)
