"""Threefry-2x32 as plain array operations: the same bits as JAX's own keys, several times faster on a CPU.

JAX lowers its generator on a CPU to a rolled loop, which the compiler neither fuses with what follows nor spreads
over cores. Written out, the twenty rounds, the step to a normal and the addition become one pass over memory
(`python benchmarks/noise.py`). Keys of this kind go wherever JAX's do, and give the bits of "threefry2x32" under
`jax_threefry_partitionable`, whatever that flag is set to: a test compares them.

The cipher: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from dither.errors import SpecError
from dither.types import Array, Key

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def key(seed: int | Array) -> Key:
    """The key of a seed."""
    return jax.random.key(seed, impl=_IMPL)


def wrap(words: Array) -> Key:
    """Keys from pairs of 32-bit words, `[..., 2]`."""
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl=_IMPL)


@jax.jit  # traced once for many keys
def block(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """The cipher on pairs of 32-bit words (all arguments uint32, broadcast against each other)."""
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


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
