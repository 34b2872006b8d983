"""Discrete Gaussian integers from a ChaCha key, inside a compiled program.

The cipher is ChaCha12: that of RFC 8439 with 12 rounds in place of 20, as in Rust's `StdRng`. The best attacks
that are published break 7. On a GPU it is bound by its arithmetic: with 20 rounds a draw takes 1.4 times as long.

A block has 16 words, enough for five draws of three (`privacy.lattice`), and one more for their ties. On a GPU one
kernel makes blocks and draws in registers, so that no word passes through memory; elsewhere the same arithmetic is
left to XLA. Both give the same integers."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dither.accounting.lattice_noise import SPREAD
from dither.errors import SpecError
from dither.privacy import lattice
from dither.types import Array

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_ROUNDS = 12
_DRAWS = 5  # of a block
_LANES = 128  # blocks that a GPU's kernel makes side by side


def block(seed: list[Array], counter: Array, rounds: int = _ROUNDS) -> list[Array]:
    """The 16 words of each block (section 2.3). `seed` is 8 words of key and 3 of nonce; all are uint32."""
    fixed = [*(np.uint32(word) for word in _CONSTANTS), *seed[:8], counter, *seed[8:]]
    start = [jnp.broadcast_to(word, counter.shape) for word in fixed]
    mixed = jax.lax.fori_loop(0, rounds // 2, lambda _, state: _double_round(state), start)
    return [word + first for word, first in zip(mixed, start, strict=True)]


def _double_round(state: list[Array]) -> list[Array]:
    state = list(state)
    for column in range(4):
        _quarter_round(state, column, 4 + column, 8 + column, 12 + column)
    for column in range(4):
        _quarter_round(state, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return state


def _quarter_round(state: list[Array], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[x] = state[x] + state[y]
        turned = state[z] ^ state[x]
        state[z] = turned << np.uint32(bits) | turned >> np.uint32(32 - bits)


def draws(
    seed: Array, count: int, *, spread: int = SPREAD, kernel: bool = False, interpret: bool = False
) -> Array:
    """`[..., count]` integers for seeds `[..., 11]` of key and nonce. The block counter goes on from seed to seed:
    equal seeds still give different integers."""
    batch, seeds = seed.shape[:-1], math.prod(seed.shape[:-1])
    blocks = -(-count // (_DRAWS * _LANES)) * _LANES
    if seeds * blocks >= 2**32:
        raise SpecError(f"{seeds * count} random integers in one draw; draw at most {_DRAWS * 2**32} at a time")
    flat = seed.reshape(seeds, 11)
    drawn = _on_gpu(flat, blocks, spread, interpret) if kernel else _by_xla(flat, blocks, spread)
    return drawn.reshape(*batch, _DRAWS * blocks)[..., :count]


def _by_xla(seed: Array, blocks: int, spread: int) -> Array:
    counter = jax.lax.iota(jnp.uint32, len(seed) * blocks).reshape(-1, blocks)
    return jnp.stack(_drawn([seed[:, i, None] for i in range(11)], counter, spread), axis=1)


def _drawn(seed: list[Array], counter: Array, spread: int, look_up: lattice.LookUp | None = None) -> list[Array]:
    """The draws of each block, one array for each of the block's places."""
    words = block(seed, counter)
    high, ties = words[: 2 * _DRAWS], words[2 * _DRAWS : -1]
    return [
        lattice.draw(high[2 * i : 2 * i + 2], (ties[i], ties[i] ^ words[-1]), look_up, spread=spread)
        for i in range(_DRAWS)
    ]


def _on_gpu(seed: Array, blocks: int, spread: int, interpret: bool) -> Array:
    from jax.experimental import pallas

    high, low = jnp.asarray(lattice.table())
    make = pallas.pallas_call(
        functools.partial(_kernel, blocks, spread),
        out_shape=jax.ShapeDtypeStruct((len(seed), _DRAWS, blocks), jnp.int32),
        grid=(len(seed), blocks // _LANES),
        interpret=interpret,
    )
    drawn: Array = make(seed, high, low)
    return drawn


def _kernel(blocks: int, spread: int, seed: Array, high: Array, low: Array, out: Array) -> None:
    """The draws of `_LANES` blocks of one seed. The arguments are references to arrays in the GPU's memory."""
    from jax.experimental import pallas

    number, first = pallas.program_id(0), pallas.program_id(1) * _LANES
    lanes = jax.lax.broadcasted_iota(jnp.int32, (_LANES,), 0)
    counter = (number * blocks + first + lanes).astype(jnp.uint32)
    drawn = _drawn([seed[number, i] for i in range(11)], counter, spread, lambda own: (high[own], low[own]))
    for i, integers in enumerate(drawn):
        out[number, i, pallas.ds(first, _LANES)] = integers
