"""What one client sends is uniform, and every bit of a seed matters. Fixed keys: the numbers never change."""

import numpy as np
import pytest
from scipy import stats

from dither.secagg import primitives
from dither.secagg.client import ClientSession
from dither.secagg.graph import Rules
from dither.secagg.server import ServerSession

ROUNDS, DIMENSION = 60, 1 << 14


def ciphertexts(bits: int, value: int) -> list[np.ndarray]:
    """Client 0's masked vector in many rounds, its plaintext always the same word, its seal (fresh) left out."""
    rules = Rules(bits)
    server = ServerSession(federation=b"f" * 32, rules=rules, signing=b"s" * 32)
    clients = [
        ClientSession(
            who,
            federation=b"f" * 32,
            server=server.signing.public,
            rules=rules,
            signing=bytes([who + 1] * 32),
            agreement=bytes([who + 101] * 32),
        )
        for who in range(2)
    ]
    for client in clients:
        server.hello(client.hello())
    roster = server.make_roster()
    for client in clients:
        server.confirm(client.confirm(roster))
    clients[0].confirmed(server.confirmed())
    vector = np.full(DIMENSION, value, f"<u{bits // 8}")
    found = []
    for round_index in range(ROUNDS):
        upload = clients[0].upload(server.announce(round_index, (0, 1), DIMENSION), vector)
        words = np.frombuffer(upload[-64 - vector.nbytes : -64], vector.dtype).copy()
        newest = clients[0]._attempt
        if newest.seed:
            primitives.mask(words, [(newest.cohort.seal_key(newest.seed, 0), -1)])
        found.append(words)
    return found


@pytest.mark.parametrize("value", [0, 2**32 - 1])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_ciphertext_is_uniform_over_bytes_and_words(bits, value):
    found = ciphertexts(bits, value)
    looks = {
        "bytes": [np.bincount(words.view(np.uint8), minlength=256) for words in found],
        "high bits of words": [np.bincount((words >> (bits - 10)).astype(int), minlength=1024) for words in found],
        "low bits of words": [np.bincount((words & 1023).astype(int), minlength=1024) for words in found],
        "neighbours": [
            np.bincount(((words[:-1] & 15) * 16 + (words[1:] & 15)).astype(int), minlength=256) for words in found
        ],
    }
    for what, counts in looks.items():
        # Keys are fresh in every run: at these levels one run in 100,000 is refused by chance.
        p_values = [stats.chisquare(count).pvalue for count in counts]
        assert min(p_values) > 1e-7, what
        assert stats.kstest(p_values, "uniform").pvalue > 1e-6, what
        assert stats.chisquare(np.sum(counts, axis=0)).pvalue > 1e-6, what


def test_the_check_would_see_a_bias():
    """One word in 100 of the plaintext left unmasked is enough to fail the test above."""
    words = ciphertexts(32, 0)[0].copy()
    words[::100] = 0
    assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue < 1e-5


def test_no_two_rounds_share_words():
    """Of a quarter of a million 64-bit words two are equal by chance once in 10^8 times."""
    found = np.array([words[:4096] for words in ciphertexts(64, 7)])
    assert np.unique(found).size == found.size


def test_every_bit_of_a_seed_changes_half_the_mask():
    seed = bytes(range(32))
    base = np.zeros(1024, np.uint32)
    primitives.mask(base, [(primitives.expand(seed, b"mask"), 1)])
    changed = []
    for bit in range(256):
        flipped = bytearray(seed)
        flipped[bit // 8] ^= 1 << (bit % 8)
        out = np.zeros(1024, np.uint32)
        primitives.mask(out, [(primitives.expand(bytes(flipped), b"mask"), 1)])
        changed.append(np.unpackbits((out ^ base).view(np.uint8)).mean())
    deviation = (np.array(changed) - 0.5) / (0.5 / np.sqrt(32768))
    assert np.abs(deviation).max() < 4.5
    assert stats.kstest(deviation, "norm").pvalue > 1e-6
