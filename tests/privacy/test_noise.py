"""Keys of plain array operations give the bits of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from dither.errors import SpecError
from dither.privacy import noise, sampling
from dither.privacy.entropy import OsEntropy

pytestmark = pytest.mark.usefixtures("compiled_as_in_use")

DRAWS = {
    "words": lambda key: jax.random.bits(key, (7, 11)),
    "bytes": lambda key: jax.random.bits(key, (5,), "uint8"),
    "integers": lambda key: jax.random.randint(key, (9,), 0, 77),
    "normals": lambda key: jax.random.normal(key, (1000,)),
    "order": lambda key: jax.random.permutation(key, 33),
    "folded": lambda key: jax.random.key_data(jax.random.fold_in(key, 99)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, (3, 2))),
    "none": lambda key: jax.random.bits(key, (0,)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_bits_are_those_of_jax(name):
    with jax.threefry_partitionable(True):
        for seed in (0, 1, 2**32 - 1):
            theirs, ours = jax.random.key(np.uint32(seed)), noise.key(np.uint32(seed))
            np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(theirs))
            np.testing.assert_array_equal(DRAWS[name](ours), DRAWS[name](theirs))


def test_the_cipher_gives_its_published_answers():
    # Known answers of the authors' distribution for threefry2x32 with 20 rounds.
    ones = jnp.uint32(0xFFFFFFFF)
    zero = jnp.uint32(0)
    assert [hex(int(word)) for word in noise.block(zero, zero, zero, zero)] == ["0x6b200159", "0x99ba4efe"]
    assert [hex(int(word)) for word in noise.block(ones, ones, ones, ones)] == ["0x1cb996fc", "0xbb002be7"]
    words = [jnp.uint32(word) for word in (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3)]
    assert [hex(int(word)) for word in noise.block(*words)] == ["0xc4923a9c", "0x483df7a0"]


def test_the_wide_cipher_gives_its_published_answers():
    # Known answers of the authors' distribution for threefry4x32 with 20 rounds: counter, key, result
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
    known = {
        "9c6ca96a e17eae66 fc10ecd4 5256a7d8": ((0,) * 4, (0,) * 4),
        "2a881696 57012287 f6c7446e a16a6732": ((2**32 - 1,) * 4, (2**32 - 1,) * 4),
        "59cd1dbb b8879579 86b5d00c ac8b6d84": pi,
    }
    for result, (counter, key) in known.items():
        found = noise.wide_cipher([jnp.uint32(word) for word in key], [jnp.uint32(word) for word in counter])
        assert " ".join(f"{int(word):08x}" for word in found) == result


def test_batches_are_drawn_by_keys_of_128_bits():
    """Who knows all other records could try 2^64 keys, and would learn who is in which batch."""
    words = np.frombuffer(bytes(jax.random.key_data(noise.fresh_keys(3))), np.uint32).reshape(3, 4)
    assert len(np.unique(words)) == 12
    alike = np.stack([words[0], words[0]])
    alike[1, 3] ^= 1 << 31  # one bit apart
    keys = noise.wrap(alike)
    derived = jax.vmap(lambda key: noise.for_client(noise.for_round(noise.stream(key, "batch"), 3), 2))(keys)
    split = jax.vmap(jax.random.split)(keys)
    drawn = [jax.random.bits(key, (1000,)) for each in (keys, derived, split[:, 0], split[:, 1]) for key in each]
    assert len(np.unique(np.stack(drawn))) > 8 * 1000 - 40  # no two draws share words, but by chance
    for bit in range(32):
        assert abs(np.mean(np.stack(drawn) >> np.uint32(bit) & np.uint32(1)) - 0.5) < 0.04
    inside = jax.vmap(lambda key: sampling.subset(key, 1000, 10, largest=1000, rows=1)[0])(keys)
    assert len(np.unique(inside)) > 12


def test_keys_map_and_wrap():
    words = np.arange(6, dtype=np.uint32).reshape(3, 2)
    keys = noise.wrap(words)
    assert noise.is_key(keys)
    assert not noise.is_key(noise.fresh_keys(3))  # their words are not those of pairs
    drawn = jax.vmap(lambda key: jax.random.bits(key, (4,)))(keys)
    one = jax.random.bits(jax.random.wrap_key_data(jnp.asarray(words[2]), impl="threefry2x32"), (4,))
    np.testing.assert_array_equal(drawn[2], one)


def test_more_than_the_counter_holds_is_refused():
    with pytest.raises(SpecError, match="at most 2"):
        jax.jit(lambda: jax.random.bits(noise.key(0), (2**17, 2**16))).lower()


def test_noise_for_more_numbers_than_the_counter_holds_is_refused():
    """The small leaf would take numbers that the large one has had, and with them its noise."""
    tree = {
        "large": jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32),
        "small": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    with pytest.raises(SpecError, match="at most 2"):
        jax.jit(lambda: noise.standard_normal(noise.key(0), tree)).lower()


def test_normals_are_the_inverse_distribution_function_of_their_words():
    words = np.concatenate([np.arange(0, 2**32, 9973, dtype=np.uint64), [2**32 - 1]]).astype(np.uint32)
    u = ((words >> 8 | 1).astype(np.float64)) / 2**23 - 1
    exact = scipy.special.ndtri((1 + u) / 2)
    found = np.asarray(noise.from_words(jnp.asarray(words)), np.float64)
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-7)
    assert 5.2 < found.max() < 5.4
    assert 5.2 < -found.min() < 5.4


@pytest.mark.parametrize("mapped", [False, True])
def test_noise_in_the_shape_of_its_leaves_is_the_block_cut_up(mapped):
    """Large leaves are drawn in their own shape, small ones together: the numbers are those of one draw."""
    shapes = {"a": (300, 41), "b": (41,), "c": (41, 3), "d": (9001,), "e": ()}
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    total = sum(leaf.size for leaf in tree.values())
    assert max(leaf.size for leaf in tree.values()) > noise._ONE_DRAW

    def draw(key):
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(noise.standard_normal(key, tree))])

    def block(key):
        return noise.from_words(jax.random.bits(key, (total,), jnp.uint32))

    keys = jax.random.split(noise.key(4), 3) if mapped else noise.key(4)
    wrap = jax.vmap if mapped else (lambda function: function)
    np.testing.assert_array_equal(jax.jit(wrap(draw))(keys), jax.jit(wrap(block))(keys))


def test_words_by_number_are_those_of_the_draw():
    key = noise.key(8)
    np.testing.assert_array_equal(
        noise.words(key, noise.counted((5, 2), 90)), jax.random.bits(key, (100,))[90:].reshape(5, 2)
    )
    assert noise.is_key(key)
    assert not noise.is_key(jax.random.key(8))


@pytest.mark.parametrize("name", ["constant", "rounds", "steps"])
def test_a_schedule_is_the_same_in_a_compiled_round_and_in_a_proof(name):
    factor = noise.schedule(name, local_steps=3).factor
    log_decay, start = np.log(0.9), 2.0
    for index, step in ((0, 0), (1, 2), (2, 0), (2, 1), (5, 2)):
        plain = factor(index, step, log_decay, start)
        traced = factor(jnp.int32(index), jnp.int32(step), jnp.float32(log_decay), jnp.float32(start))
        assert float(traced) == pytest.approx(plain, rel=1e-6)
        exponent = {"constant": 0, "rounds": index + 1 - 2, "steps": 3 * (index - 2) + step}[name]
        assert plain == pytest.approx(0.9 ** (max(exponent, 0) / 2))


def test_unknown_sources_and_schedules_are_named():
    with pytest.raises(SpecError, match="unknown randomness='seed'; did you mean 'seeded'"):
        noise.check_source("seed")
    assert [noise.check_source(name) for name in noise.SOURCES] == ["seeded", "os"]
    with pytest.raises(SpecError, match="unknown noise_schedule='round'; did you mean 'rounds'"):
        noise.schedule("round", local_steps=1)


def test_words_of_64_bits_are_those_of_jax():
    with jax.threefry_partitionable(True), jax.enable_x64(True):
        theirs, ours = (jax.random.bits(key(3), (5, 2), "uint64") for key in (jax.random.key, noise.key))
    assert ours.dtype == np.uint64
    np.testing.assert_array_equal(ours, theirs)


def test_keys_of_all_steps_are_those_of_each(monkeypatch):
    key = noise.key(3)
    assert noise.for_steps(key, 4) is key  # on a CPU
    each = [noise.for_step(key, step) for step in range(4)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    all_steps = noise.for_steps(key, 4)
    assert [noise.for_step(all_steps, step) == one for step, one in enumerate(each)] == [True] * 4
    every = [jax.random.key_data(noise.for_step(all_steps, step)).tolist() for step in range(-3, 9)]
    assert len(set(map(tuple, every))) == 12  # also where a method asks for more
    from_the_system = OsEntropy()
    assert noise.for_steps(from_the_system, 4) is from_the_system
