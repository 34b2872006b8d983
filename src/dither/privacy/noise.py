"""Gaussian noise, its schedules over time, the generator behind it, and the named random streams of a run.

A seed opens one stream a purpose (`partition`, `init`, `cohort`, `batch`, `epoch`, `noise`, `server`):
changing how many numbers one purpose draws never shifts another. Inside a stream, each round and each
client has its own key, so that no two clients and no two rounds ever share noise.

A key may be a JAX key (research: the same seed gives the same bits) or an `OsEntropy` (deployment: fresh at every
draw, see `privacy.entropy`). Both are derived for each round, client and step and used for one draw; the code does
not depend on which it is.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from dither.accounting.exact import SPREAD, SUM_SPREAD, WIDTHS
from dither.errors import SpecError, did_you_mean
from dither.privacy import lattice
from dither.privacy.entropy import OsEntropy
from dither.privacy.softmax import is_turned
from dither.types import Array, Key, PyTree

# Threefry-2x32 as plain array operations: the same bits as JAX's own keys, several times faster on a CPU. JAX
# lowers its generator on a CPU to a rolled loop, which the compiler neither fuses with what follows nor spreads
# over cores. Written out, the twenty rounds, the step to a normal and the addition become one pass over memory
# (`python benchmarks/noise.py`). Keys of this kind go wherever JAX's do, and give the bits of "threefry2x32"
# under `jax_threefry_partitionable`, whatever that flag is set to: a test compares them. The cipher: J. Salmon,
# M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def key(seed: int | Array) -> Key:
    """The key of a seed. (`jax.random.key` would add JAX_RANDOM_SEED_OFFSET: to draws, not to what is planned.)"""
    return wrap(_seed(jnp.asarray(seed, jnp.uint32)))


def wrap(words: Array) -> Key:
    """Keys from pairs of 32-bit words, `[..., 2]`, or wide ones from fours."""
    impl = _IMPL if words.shape[-1] == 2 else _WIDE_IMPL
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=impl)


def fresh_keys(count: int) -> Key:
    """`count` JAX keys of 128 bits from the operating system, for draws that are secret but not noise: which
    records enter a batch."""
    return wrap(np.frombuffer(os.urandom(16 * count), np.uint32).reshape(count, 4))


def cipher(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Threefry on pairs of 32-bit words: uint32 arrays of JAX or NumPy, broadcast against each other."""
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


block = jax.jit(cipher)  # traced once for many keys


def is_key(key: Key) -> bool:
    """Whether a key is of this kind."""
    return jax.random.key_impl(key) == _IMPL


def words(key: Key, numbers: Array) -> Array:
    """The 32-bit words of a key with the given numbers (uint32): those of `jax.random.bits(key, (n,))` there."""
    pair = jax.random.key_data(key)
    x0, x1 = block(pair[0], pair[1], np.uint32(0), numbers)
    return x0 ^ x1


# What JAX asks of a generator: keys are pairs of words


def _seed(seed: Array) -> Array:
    high = jax.lax.shift_right_logical(seed, jnp.asarray(32, seed.dtype))  # 0 where the seed has 32 bits
    return jnp.stack([high.astype(jnp.uint32), seed.astype(jnp.uint32)])


def _fold_in(words: Array, data: Array) -> Array:
    data = jnp.asarray(data).astype(jnp.uint32)
    return jnp.stack(block(words[0], words[1], jnp.zeros_like(data), data))


def _split(words: Array, shape: tuple[int, ...]) -> Array:
    return jnp.stack(_counted(words, shape), axis=-1)


def _random_bits(words: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    first, second = _counted(words, shape)
    if bit_width == 64:
        return (first.astype(jnp.uint64) << np.uint64(32)) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{bit_width}")


def _counted(words: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The cipher on the numbers 0, 1, ... in the given shape."""
    first, second = block(words[0], words[1], np.uint32(0), counted(shape))
    return first, second


def counted(shape: tuple[int, ...], first: int = 0) -> Array:
    """The numbers first, first + 1, ... in the given shape."""
    if first + math.prod(shape) > 2**32:
        raise SpecError(f"{first + math.prod(shape)} random words in one draw; draw at most 2^32 at a time")
    numbers = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return numbers + np.uint32(first) if first else numbers


_IMPL = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="dither_threefry2x32",
    tag="dfry",
)


# Keys of 128 bits: who knows all records but one could try 2^64 keys of batches, and then amplifies nothing.
# Threefry-4x32 of the same paper; a draw, a split and a derived key are told apart by the counter's last word.

_WIDE_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_DRAW, _SPLIT, _DERIVE = np.arange(3, dtype=np.uint32)


def wide_cipher(key: Sequence[Array], counter: Sequence[Array]) -> list[Array]:
    """Threefry on fours of 32-bit words: uint32 arrays, broadcast against each other."""
    schedule = (*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _PARITY)
    x = [word + first for word, first in zip(counter, key, strict=True)]
    for number in range(20):
        odd = number % 2
        for a, b, rotation in zip((0, 2), (3, 1) if odd else (1, 3), _WIDE_ROTATIONS[number % 8], strict=True):
            x[a] = x[a] + x[b]
            x[b] = ((x[b] << np.uint32(rotation)) | (x[b] >> np.uint32(32 - rotation))) ^ x[a]
        if number % 4 == 3:
            turn = number // 4 + 1
            x = [word + schedule[(turn + place) % 5] for place, word in enumerate(x)]
            x[3] = x[3] + np.uint32(turn)
    return x


@jax.jit
def _wide_word(words: Array, number: Array, kind: Array, place: Array = np.uint32(0)) -> Array:
    """The first word of a block. (If more are asked of one block, XLA computes all of it for each.)"""
    return wide_cipher(list(words), [number, place, np.uint32(0), kind])[0]


def _wide_bits(words: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    if bit_width == 64:
        high, low = _wide_bits(words, 32, (2, *shape)).astype(jnp.uint64)
        return (high << np.uint64(32)) | low
    return _wide_word(words, counted(shape), _DRAW).astype(f"uint{bit_width}")


def _wide_key(words: Array, numbers: Array, kind: Array) -> Array:
    return _wide_word(words, jnp.asarray(numbers).astype(jnp.uint32)[..., None], kind, counted((4,)))


_WIDE_IMPL = define_prng_impl(
    key_shape=(4,),
    seed=lambda seed: jnp.concatenate([jnp.zeros(2, jnp.uint32), _seed(seed)]),
    split=lambda words, shape: _wide_key(words, counted(shape), _SPLIT),
    random_bits=_wide_bits,
    fold_in=lambda words, data: _wide_key(words, data, _DERIVE),
    name="dither_threefry4x32",
    tag="dfry4",
)


# Streams and draws

_ONE_DRAW = 8192  # numbers up to which one draw for all leaves is quicker than one a leaf
SOURCES = ("seeded", "os")  # what a run's randomness may be


def check_source(name: str) -> str:
    """The name of a source of randomness, if there is one of that name."""
    if name not in SOURCES:
        raise SpecError(f"unknown randomness={name!r}{did_you_mean(name, SOURCES)}")
    return name


def stream(root: int | Array | Key, name: str) -> Key:
    """The key of a named stream (CRC-32 of the name, so it is the same everywhere). The root is a run's seed, a
    JAX key, or an OsEntropy."""
    if isinstance(root, OsEntropy):
        return replace(root, name=name)
    is_key = isinstance(root, jax.Array) and jnp.issubdtype(root.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(root if is_key else key(root), zlib.crc32(name.encode()))


def for_round(key: Key, index: Array) -> Key:
    """A stream's key in one round."""
    return _derive(key, index)


HostKeys = tuple[np.ndarray, np.ndarray]  # the two words of each key, in NumPy: nothing need be compiled


def host_keys(seed: int, name: str, rounds: np.ndarray) -> HostKeys:
    """The keys of a stream in these rounds."""
    high, low = host_words(
        (np.zeros(1, np.uint32), np.array([seed], np.uint32)), np.array([zlib.crc32(name.encode())])
    )
    first, second = host_words((high[0], low[0]), rounds)
    return first[0], second[0]


def host_words(keys: HostKeys, numbers: np.ndarray) -> HostKeys:
    """The pairs of words of each key with the given numbers: `jax.random.split` takes 0, 1, ... and makes keys of
    them, `jax.random.bits` takes their XOR."""
    with np.errstate(over="ignore"):  # words wrap around
        words = cipher(keys[0][:, None], keys[1][:, None], np.uint32(0), numbers.astype(np.uint32))
    return words[0], words[1]


def for_client(key: Key, client: Array) -> Key:
    """A round's key for one client."""
    return _derive(key, client)


class StepKeys(NamedTuple):
    """A client's keys for all local steps of a round."""

    keys: Key


def for_steps(key: Key, count: int) -> Key:
    """What `for_step` derives so many keys from: on a GPU the keys themselves, which would else take a kernel a
    step."""
    if isinstance(key, OsEntropy) or jax.default_backend() == "cpu":
        return key
    return StepKeys(jax.vmap(functools.partial(_derive, key))(jnp.arange(count)))


def for_step(key: Key, step: Array) -> Key:
    """A client's key for one local step."""
    if not isinstance(key, StepKeys):
        return _derive(key, step)
    known = jnp.clip(step, 0, len(key.keys) - 1)
    # Beyond them XLA would give the last one again and again.
    words = jax.random.key_data(key.keys[known]) ^ jnp.asarray(step - known).astype(jnp.uint32)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key.keys))


def _derive(key: Key, number: Array) -> Key:
    return key.at(number) if isinstance(key, OsEntropy) else jax.random.fold_in(key, number)


def standard_normal(key: Key, tree: PyTree) -> PyTree:
    """Independent N(0, 1) in the shape of `tree`: one block of numbers, cut up for the leaves."""
    leaves, structure = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    total = sum(math.prod(shape) for shape in shapes)
    if _ONE_DRAW < total <= 2**32 and is_key(key):
        if jax.default_backend() == "cpu":
            return jax.tree.unflatten(structure, _in_shape(key, shapes))
        if any(map(is_turned, shapes)):
            return jax.tree.unflatten(structure, _as_it_lies(key, shapes))
    return jax.tree.unflatten(structure, _cut(from_words(jax.random.bits(key, (total,), jnp.uint32)), shapes))


def _cut(block: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    return [block[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def _in_shape(key: Key, shapes: list[tuple[int, ...]]) -> list[Array]:
    """The numbers of the block for a CPU, those of a large leaf made in the shape in which they are used.

    The compiler then makes words, normals and their addition in one pass. It shares an array among cores along its
    first axis, and where the shares are unequal it does not vectorise: steps with one block of odd length took
    seven times as long (`python benchmarks/noise.py`). A small leaf may be narrow, which is as bad: the small ones
    are made together, in a loop of two turns, so that the compiler cannot make them in their own shape.
    """
    sizes = [math.prod(shape) for shape in shapes]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    small = [size <= _ONE_DRAW for size in sizes]
    drawn: list[Any] = [
        None if together else from_words(words(key, counted(shape, first)))
        for shape, first, together in zip(shapes, firsts, small, strict=True)
    ]
    which = [i for i, together in enumerate(small) if together]
    if which:
        numbers = np.concatenate([firsts[i] + np.arange(sizes[i]) for i in which]).astype(np.uint32)
        halves = np.append(numbers, np.zeros(len(numbers) % 2, np.uint32)).reshape(2, -1)
        block = jax.lax.map(lambda half: from_words(words(key, half)), jnp.asarray(halves)).reshape(-1)
        for i, values in zip(which, _cut(block, [shapes[i] for i in which]), strict=True):
            drawn[i] = values
    return drawn


def _as_it_lies(key: Key, shapes: list[tuple[int, ...]]) -> list[Array]:
    """The numbers of the block for a GPU, those of each leaf made in the order in which it is kept: the compiler
    would not make them and add them in one pass otherwise."""
    drawn, first = [], 0
    for shape in shapes:
        if is_turned(shape):
            rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, shape[::-1], axis) for axis in (1, 0))
            drawn.append(from_words(words(key, rows * np.uint32(shape[1]) + columns + np.uint32(first))).T)
        else:
            drawn.append(from_words(words(key, counted(shape, first))))
        first += math.prod(shape)
    return drawn


# Coefficients of M. Giles, "Approximating the erfinv function", GPU Computing Gems 2 (2012), highest power first
# fmt: off
_CENTRE = np.array([2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
                    -0.00417768164, 0.246640727, 1.50140941], np.float32)
_TAIL = np.array([-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
                  0.00943887047, 1.00167406, 2.83297682], np.float32)
# fmt: on


def from_words(words: Array) -> Array:
    """N(0, 1) in float32, one a 32-bit word: √2 erfinv(u) for u uniform on the odd multiples of 2^-23 in (-1, 1).

    As `jax.random.normal` does, with a u that is symmetric about 0 and without XLA's careful log1p, which costs a
    CPU a sixth of the whole draw and changes only the last bits (`benchmarks/noise.py`; a test compares with
    SciPy). The tails end at 5.3 σ: this source is for research, `privacy.entropy` is for protection.
    """
    odd = (words >> np.uint32(8)) | np.uint32(1)
    u = odd.astype(jnp.float32) * np.float32(2.0**-23) - 1
    w = -jnp.log((1 - u) * (1 + u))
    root = jnp.sqrt(w) - 3
    centre, tail = jnp.full_like(w, _CENTRE[0]), jnp.full_like(w, _TAIL[0])
    for a, b in zip(_CENTRE[1:], _TAIL[1:], strict=True):
        centre, tail = a + centre * (w - 2.5), b + tail * root
    return np.float32(math.sqrt(2)) * u * jnp.where(w < 5, centre, tail)


def gaussian(key: Key, tree: PyTree, *, noise_std: Array) -> PyTree:
    """`tree` plus independent noise of std `noise_std` on every coordinate. `key` must be used only here.

    From a JAX key N(0, noise_std²) in float32. From OS entropy discrete Gaussian noise on a lattice, to which the
    values are rounded first (`privacy.lattice`).
    """
    with jax.named_scope("noise"):  # names for a profile (benchmarks/profiling.py)
        if isinstance(key, OsEntropy):
            drawn = _lattice_noise(key, tree)
            return jax.tree.map(lambda value, n: lattice.released(value, n, noise_std), tree, drawn)
        noise = standard_normal(key, tree)
        return jax.tree.map(lambda value, z: value + noise_std * z, tree, noise)


def exact_gaussian(key: Key, integers: PyTree, *, noise_std: Array, scale: Array) -> PyTree:
    """Integers of `lattice.rounded`, at that `scale`, plus noise of std `noise_std`. A std of 0 adds nothing."""
    with jax.named_scope("noise"):
        noisy = _with_noise(key, integers, noise_std, SPREAD)
        return jax.tree.map(lambda k: k.astype(jnp.float32) / scale, noisy)


def integers_to_sum(key: Key, integers: PyTree, *, noise_std: Array, clients: int) -> PyTree:
    """Integers at the scale of `lattice.sum_scale`, cut to what a sum over so many clients has room for, plus
    noise of std `noise_std`, as integers."""
    with jax.named_scope("noise"):
        reach = lattice.sum_reach(clients)
        cut = jax.tree.map(lambda k: jnp.clip(k, -reach, reach), integers)
        return _with_noise(key, cut, noise_std, SUM_SPREAD)


def _with_noise(key: Key, integers: PyTree, noise_std: Array, spread: int) -> PyTree:
    drawn = _lattice_noise(key, integers, spread)
    return jax.tree.map(lambda k, n: k + jnp.where(noise_std > 0, n, 0), integers, drawn)


def _lattice_noise(key: Key, tree: PyTree, spread: int = SPREAD) -> PyTree:
    """Independent integers of std `WIDTHS[spread]`. From a seed: normals, rounded, for audits and tests."""
    if not isinstance(key, OsEntropy):
        drawn = standard_normal(key, tree)
        return jax.tree.map(lambda z: jnp.rint(z * np.float32(WIDTHS[spread])).astype(jnp.int32), drawn)
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.size:
            # Should a caller have forgotten to derive the source: clients whose values differ never share a draw.
            key = key.over(leaf[(0,) * leaf.ndim] != 0)
    return jax.tree.unflatten(structure, key.integers([jnp.shape(leaf) for leaf in leaves], spread))


# Schedules: how the noise changes over a run, for any method that noises gradients


class NoiseSchedule(NamedTuple):
    """`factor(round_index, step, log_decay, start)`: what the initial noise std is multiplied by.

    Rounds and steps count from 0; `log_decay` is the logarithm of the factor of the *variance* (the factor itself
    would lose its digits in float32) and may be traced, as may `start`, the number of rounds before the decay
    begins. Works on JAX and on NumPy values.
    """

    name: str
    factor: Callable[[Array, Array, Array, Array], Array]


def schedule(name: str, *, local_steps: int) -> NoiseSchedule:
    """The schedule of that name: "constant", "rounds" (DP-SCAFFOLD eq (6)) or "steps" (eq (7))."""

    def constant(index: Array, step: Array, log_decay: Array, start: Array) -> Array:
        return 1.0

    def over_rounds(index: Array, step: Array, log_decay: Array, start: Array) -> Array:
        return _root_power(log_decay, index + 1 - start)  # eq (6): β^(r - R_th) after round R_th, r = index + 1

    def over_steps(index: Array, step: Array, log_decay: Array, start: Array) -> Array:
        return _root_power(log_decay, local_steps * (index - start) + step)  # eq (7): β^(τ(r-R_th-1) + t-1)

    factors = {"constant": constant, "rounds": over_rounds, "steps": over_steps}
    if name not in factors:
        raise SpecError(f"unknown noise_schedule={name!r}{did_you_mean(name, factors)}")
    return NoiseSchedule(name, factors[name])


def _root_power(log_base: Array, exponent: Array) -> Array:
    """sqrt(base^exponent), 1 while the exponent is not positive."""
    if not any(isinstance(value, jax.Array) for value in (log_base, exponent)):
        return float(np.exp(0.5 * np.float64(log_base) * max(float(exponent), 0.0)))
    return jnp.exp(0.5 * log_base * jnp.maximum(exponent, 0))
