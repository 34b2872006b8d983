"""Random words of protected runs: the ciphers give their official vectors, keys and nonces repeat nowhere, and a
key is nowhere but in a program's arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dither.accounting.exact import WIDTH
from dither.errors import SpecError
from dither.privacy import entropy, lattice, noise
from dither.privacy.entropy import OsEntropy

KEY = np.arange(32, dtype=np.uint8).view(np.uint32)  # 00 01 02 ... 1f, as in RFC 8439


def as_words(text):
    return np.frombuffer(bytes.fromhex(text), np.uint32)


@pytest.mark.parametrize(
    ("key", "counter", "nonce", "expected"),
    [
        (  # section 2.3.2
            KEY,
            1,
            "000000090000004a00000000",
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        ),
        (  # appendix A.1, vector 1
            np.zeros(8, np.uint32),
            0,
            "00" * 12,
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
        (  # appendix A.1, vector 4
            as_words("00ff" + "00" * 30),
            2,
            "00" * 12,
            "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
            "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
        ),
    ],
)
def test_twenty_rounds_give_the_vectors_of_rfc_8439(key, counter, nonce, expected):
    counters = np.array([counter, counter + 1], np.uint32)
    seed = [jnp.uint32(word) for word in (*key, *as_words(nonce))]
    block = np.stack(jax.jit(lambda seed: entropy.chacha_block(seed, counters, rounds=20))(seed))
    np.testing.assert_array_equal(block[:, 0], as_words(expected))


def test_twelve_rounds_give_the_vector_of_chacha12():
    """Test case 1 of draft-strombergson-chacha-test-vectors, 256 bits of key: all zero."""
    block = jax.jit(entropy.chacha_block)([jnp.uint32(0)] * 11, np.zeros(1, np.uint32))
    expected = (
        "9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f"
        "0564f879d27ae3c02ce82834acfa8c793a629f2ca0de6919610be82f411326be"
    )
    np.testing.assert_array_equal(np.stack(block)[:, 0], as_words(expected))


def test_the_host_gives_the_vector_of_nist_sp_800_38a(monkeypatch):
    """CTR-AES256, section F.5.5: the keystream is the ciphertext xor the plaintext."""
    from_system = {
        32: "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        16: "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
    }
    monkeypatch.setattr(entropy.os, "urandom", lambda count: bytes.fromhex(from_system[count]))
    plaintext = as_words("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    ciphertext = as_words("601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5")
    np.testing.assert_array_equal(entropy.host_words(8), plaintext ^ ciphertext)
    # in chunks, the counter goes on
    long = entropy.host_words(3 * 2**15 + 5)
    monkeypatch.setattr(entropy, "_CHUNK", memoryview(bytes(2**20)))
    np.testing.assert_array_equal(long, entropy.host_words(3 * 2**15 + 5))


def test_every_place_has_integers_of_its_own():
    """Round, client, step and stream each change the nonce, and a nonce or a key all integers."""
    root = OsEntropy(jnp.asarray(KEY))
    noise_of, server = noise.stream(root, "noise"), noise.stream(root, "server")
    few = [0, 1, 2**31 - 2]
    sources = [root, *(root.at(a) for a in few), *(root.at(a).at(b) for a in few for b in few)]
    sources += [root.at(a).at(b).at(c) for a in few for b in few for c in few]
    nonces = np.stack([source._nonce() for source in sources])
    nonces = np.concatenate([nonces, np.stack([noise.stream(source, "server")._nonce() for source in sources])])
    assert len(np.unique(nonces, axis=0)) == len(nonces) == 80
    np.testing.assert_array_equal(noise_of.at(1).at(2)._nonce(), [1, 2, 2**31 - 1])
    np.testing.assert_array_equal(server.at(1)._nonce(), [2**31 + 1, 2**31 - 1, 2**31 - 1])
    draw = jax.jit(entropy._expanded(40))
    keys = [KEY] * 3 + [KEY + np.uint32(1)]
    rows = np.stack([draw(key, nonces[i], 0) for key, i in zip(keys, (0, 1, 41, 0), strict=True)])
    assert len(np.unique(rows.reshape(-1, 8), axis=0)) == rows.size // 8
    np.testing.assert_array_equal(draw(KEY, nonces[1], 0), rows[1])
    with pytest.raises(SpecError, match="4 times"):
        noise_of.at(0).at(0).at(0).at(0).integers([(1,)])


@pytest.mark.parametrize("key", [None, KEY], ids=["host", "key"])
def test_whatever_vmap_maps_over_has_integers_of_its_own(key):
    """Runs with one key each, clients at one place: nobody shares a draw."""

    def run(seed):
        source = OsEntropy(None if key is None else jnp.asarray(key)).over(seed).at(0)
        return jax.vmap(lambda number: source.over(number).integers([(40,)])[0])(jnp.zeros(3, jnp.int32))

    rows = np.asarray(jax.jit(jax.vmap(run))(jnp.zeros(4, jnp.int32)))
    assert rows.shape == (4, 3, 40)
    assert len(np.unique(rows.reshape(-1, 8), axis=0)) == rows.size // 8


def test_a_key_is_an_argument_of_the_program_alone():
    """Nothing of it stands in the lowered program, which a compilation cache may keep."""
    key = entropy.fresh_key(1)[0]

    def noisy(key, value):
        return noise.gaussian(OsEntropy(key).at(3), value, noise_std=1.0)

    text = jax.jit(noisy).lower(key, jnp.zeros(5)).as_text()
    assert not any(str(int(word)) in text or f"{word:08X}" in text for word in key)
    assert (entropy.fresh_key(2) != entropy.fresh_key(2)).any(axis=1).all()


@pytest.mark.parametrize("few", [entropy._FEW, 0], ids=["one kernel", "two kernels"])
def test_a_gpus_kernels_draw_what_xla_draws(monkeypatch, few):
    """They are interpreted here; the seeds are two equal ones and one other."""
    monkeypatch.setattr(entropy, "_FEW", few)
    seed = jnp.asarray(np.stack([np.arange(11), np.arange(11), np.arange(11) + 5]).astype(np.uint32))
    kernel = jax.jit(lambda seed: entropy.chacha_draws(seed, 1300, kernel=True, interpret=True))(seed)
    by_xla = np.asarray(jax.jit(lambda seed: entropy.chacha_draws(seed, 1300))(seed))
    np.testing.assert_array_equal(kernel, by_xla)
    assert np.abs(np.corrcoef(by_xla)[np.triu_indices(3, 1)]).max() < 6 / np.sqrt(1300)
    assert abs(by_xla.std() / WIDTH - 1) < 6 / np.sqrt(2 * by_xla.size)


def test_the_words_of_two_blocks_make_eight_draws():
    """The first block's words pick, the second's decide ties; a bit of the nonce tells the blocks apart."""
    seed = jnp.asarray(np.arange(4, 15, dtype=np.uint32))
    drawn = jax.jit(lambda seed: entropy.chacha_draws(seed, 8 * 2**16))(seed)

    @jax.jit
    def by_hand(seed, bit, last):
        counter = jnp.arange(2**16, dtype=jnp.uint32)
        words = entropy.chacha_block(list(seed), counter)
        ties = [word ^ last for word in entropy.chacha_block([*seed[:9], seed[9] | bit, seed[10]], counter)]
        return jnp.concatenate([lattice.draw(words[i : i + 2], ties[i : i + 2]) for i in range(0, 16, 2)])

    np.testing.assert_array_equal(drawn, by_hand(seed, jnp.uint32(2**31), jnp.uint32(0)))
    assert 0 < (drawn != by_hand(seed, jnp.uint32(0), jnp.uint32(0))).sum() < 10
    assert 0 < (drawn != by_hand(seed, jnp.uint32(2**31), jnp.uint32(2**32 - 1))).sum() < 10


def test_a_gpus_second_kernel_draws_blocks_with_ties_again(monkeypatch):
    """A seed with ties that change blocks 627 and 1074 of 1,408, which the first and the last search find."""
    monkeypatch.setattr(entropy, "_FEW", 0)
    seed, count = jnp.arange(11, dtype=jnp.uint32).at[10].set(54), 8 * 1408
    drawn = jax.jit(lambda seed: entropy.chacha_draws(seed, count, kernel=True, interpret=True))(seed[None])[0]
    words = jax.jit(entropy.chacha_block)(list(seed), jnp.arange(1408, dtype=jnp.uint32))
    nothing = [jnp.zeros(1408, jnp.uint32)] * 2
    without = jnp.stack([lattice.draw(words[i : i + 2], nothing) for i in range(0, 16, 2)])
    np.testing.assert_array_equal(np.argwhere(drawn.reshape(8, 1408) != without), [[0, 1074], [7, 627]])
    np.testing.assert_array_equal(drawn, jax.jit(lambda seed: entropy.chacha_draws(seed, count))(seed))


def test_more_than_a_kernel_can_count_is_drawn_without_one():
    seeds = jax.ShapeDtypeStruct((2, 11), jnp.uint32)
    for count, kernels in [(1000, 1), (2**29, 2), (2**30, 0)]:
        traced = str(jax.make_jaxpr(functools.partial(entropy.chacha_draws, count=count, kernel=True))(seeds))
        assert traced.count("pallas_call[") == kernels


def test_only_a_single_draw_outside_loops_may_be_drawn_ahead():
    value, source = jnp.ones(10), OsEntropy().over(jnp.int32(0))

    def once(number):
        return noise.gaussian(source.at(number), value, noise_std=1.0)

    def twice(number):
        return once(number) + once(number)

    def in_a_loop(number):
        return jax.lax.fori_loop(0, number, lambda _, total: total + once(number), value)

    def mapped(number):
        return jax.vmap(lambda row: noise.gaussian(source.at(number), row, noise_std=1.0))(jnp.ones((4, 10)))

    expected = {once: 32, jax.jit(once): 32, twice: 0, in_a_loop: 0, mapped: 0, jnp.sin: 0}
    for function, words in expected.items():
        assert entropy.words_of_one_draw(function, jnp.int32(3)) == words
    with pytest.raises(SpecError, match="32 words, but 29"):
        noise.gaussian(OsEntropy(ahead=jnp.zeros(29, jnp.uint32)), value, noise_std=1.0)


def test_more_blocks_than_the_counter_has_are_refused_before_anything_is_drawn():
    seeds = jax.ShapeDtypeStruct((2**16, 11), jnp.uint32)
    with pytest.raises(SpecError, match="random integers in one draw"):
        jax.eval_shape(lambda seed: entropy.chacha_draws(seed, 8 * 2**16), seeds)
