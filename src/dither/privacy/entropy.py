"""Random words from the operating system's entropy: the source of protected runs (R8).

`OsEntropy` stands wherever `privacy.noise` takes a key. It has two ways to make words:

*On a CPU* the compiled program asks the host, once a draw and for all clients that draw together. Each call has
a 256-bit key and a nonce of its own from `os.urandom` and expands them with AES-256 in counter mode, several
gigabytes a second. No key outlives its call and nothing is kept: a forked child, a restored snapshot, a retried
round or a second thread has nothing to share with its twin. On several devices each asks for itself; what all
must share (the server's noise) is the first one's.

*On an accelerator* the host would be too slow, so the compiled program expands a key with ChaCha12.
The key is an argument of the program, drawn from `os.urandom` for each call of it (`fresh_key`), never a
constant of it and never saved. The nonce holds round, client and step, 31 bits each, a bit that tells the
server's draws from the clients', and one that tells the two kinds of block apart; the block counter goes through
a draw and through whatever vmap maps over. So no two draws of one program share a block, and no two calls share
a key.

This is the second importer of `cryptography`, after `secagg.primitives`: noise that a party could predict
protects as little as a mask that it could, and `privacy` stands above `secagg`, so it may not ask there. The
package is imported at the first draw: seeded research runs where it is not installed, and there is no other
keystream to fall back on. Memory is not wiped after use.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from dither.accounting.exact import SPREAD
from dither.errors import SpecError
from dither.privacy import lattice
from dither.privacy.softmax import is_turned
from dither.types import Array

_CHUNK = memoryview(bytes(1 << 17))  # zeros to encrypt, few enough for a core's cache
_STREAMS = {"noise": 0, "server": 1}
_NOTHING = np.uint32(2**31 - 1)  # in a nonce: no client, no step


# Words


def host_words(count: int) -> np.ndarray:
    """`count` uniform 32-bit words, different at every call."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
    out = np.empty(4 * count + 16, np.uint8)  # 16: `update_into` asks for a block more
    for start in range(0, 4 * count, len(_CHUNK)):
        zeros = _CHUNK[: 4 * count - start]
        encryptor.update_into(zeros, out.data[start : start + len(zeros) + 16])
    return out[: 4 * count].view(np.uint32)


def fresh_key(runs: int) -> np.ndarray:
    """A ChaCha key for each run, `[runs, 8]`, from the operating system."""
    return np.frombuffer(os.urandom(32 * runs), np.uint32).reshape(runs, 8)


# Inside a traced function


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class OsEntropy:
    """A source of noise that is fresh at every draw. Without a key it asks the host.

    `place` says for whom a draw is made: `at(client)` adds a number to it. With a key it is the nonce: at most
    three numbers (round, client, step), and one draw at each. Without, its value is never read, but it makes a
    draw depend on what `vmap` maps over: vmap evaluates once, for all clients, what depends on none of them, and
    they would share one draw. So a source must be derived for each client as a key must, with
    `noise.for_client`. `mapped` is a number that is not part of the place and depends on what vmap maps over,
    such as a run's seed. `ahead` are words that were drawn before, for one draw (`words_of_one_draw`). Devices
    along the mesh axis `shared_along` get the same words."""

    key: Array | None = None
    place: tuple[Array, ...] = ()
    mapped: Array | None = None
    ahead: Array | None = None
    name: str = "noise"
    shared_along: str = ""

    def at(self, number: Array) -> OsEntropy:
        """The source for one round, client or step."""
        return replace(self, place=(*self.place, jnp.asarray(number).astype(jnp.int32)))

    def over(self, number: Array) -> OsEntropy:
        """The source where vmap maps over `number`."""
        number = jnp.asarray(number).astype(jnp.int32)
        return replace(self, mapped=number if self.mapped is None else self.mapped + number)

    def integers(self, shapes: Sequence[tuple[int, ...]], spread: int = SPREAD) -> list[Array]:
        """Discrete Gaussian integers (`privacy.lattice`) in these shapes, for each index that vmap maps over."""
        mapped = jnp.int32(0) if self.mapped is None else self.mapped
        sizes = [math.prod(shape) for shape in shapes]
        parts = [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]
        if self.key is not None:
            drawn = _expanded(sum(sizes), spread)(self.key, self._nonce(), mapped)
            return [_in_shape(drawn[part], shape) for part, shape in zip(parts, shapes, strict=True)]
        words, total = self.words(3 * sum(sizes) + 2), sum(sizes)
        # Drawn in the shape of use, for which `noise._in_shape` has the reasons.
        return [
            self._by_words(words, total, part, shape, spread) for part, shape in zip(parts, shapes, strict=True)
        ]

    def _by_words(self, words: Array, total: int, part: slice, shape: tuple[int, ...], spread: int) -> Array:
        """Draws from two words each, and a third for ties: the second pick's is the sum of three draws' ones, so
        that only four ties at once depend on each other (`accounting.exact`)."""

        def at(offset: int) -> Array:
            return words[offset + part.start : offset + part.stop].reshape(shape)

        ties = at(2 * total)
        further = (ties, ties ^ at(2 * total + 1) ^ at(2 * total + 2))
        return lattice.draw((at(0), at(total)), further, spread=spread)

    def words(self, count: int) -> Array:
        """`count` uniform 32-bit words from the host, for each index that vmap maps over."""
        if self.ahead is not None:
            if self.ahead.shape != (count,):
                raise SpecError(f"a draw of {count} words, but {self.ahead.size} were drawn ahead")
            return self.ahead
        mapped = jnp.int32(0) if self.mapped is None else self.mapped
        words = _from_host(count)(sum(self.place, mapped))
        if not self.shared_along:
            return words
        first = jax.lax.axis_index(self.shared_along) == 0
        return jax.lax.psum(jnp.where(first, words, np.uint32(0)), self.shared_along)

    def _nonce(self) -> Array:
        if len(self.place) > 3:
            raise SpecError(f"OS entropy was derived {len(self.place)} times for one draw; at most 3 times")
        numbers = [jnp.asarray(number).astype(jnp.uint32) & _NOTHING for number in self.place]
        numbers += [jnp.full_like(numbers[0] if numbers else jnp.uint32(0), _NOTHING)] * (3 - len(numbers))
        numbers[0] = numbers[0] | np.uint32(_STREAMS[self.name] << 31)
        return jnp.stack(numbers, axis=-1)

    def tree_flatten(self) -> tuple[tuple[object, ...], tuple[str, str]]:
        return (self.key, self.place, self.mapped, self.ahead), (self.name, self.shared_along)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, str], children: tuple[object, ...]) -> OsEntropy:
        return cls(*children, *names)  # type: ignore[call-arg, arg-type]


@functools.cache
def _from_host(count: int) -> Callable[[Array], Array]:
    """A function of a place that calls the host once for all the indices vmap maps over.

    The callback is an effect to JAX and to XLA: neither may drop it, merge two of them, fold it into a
    constant, move it out of a loop or keep it in the compilation cache. It is unordered, because draws have
    no order; each consumer waits for its own. It takes no argument: each would cost tens of microseconds.
    """
    host_words(1)  # a missing package shows here, while tracing, not in the middle of a run

    @custom_vmap
    def draw(place: Array) -> Array:
        shape = (*place.shape, count)

        def host() -> np.ndarray:
            return host_words(math.prod(shape)).reshape(shape)

        return io_callback(host, jax.ShapeDtypeStruct(shape, jnp.uint32))

    @draw.def_vmap
    def _(axis_size: int, in_batched: list[bool], place: Array) -> tuple[Array, bool]:
        del axis_size, in_batched  # vmap calls this only with a mapped place, its axis in front
        return draw(place), True

    return draw


def words_of_one_draw(function: Callable[..., object], *arguments: object) -> int:
    """How many words a function draws from the host, if it does so once and in no loop; 0 otherwise. Only then may
    they be drawn ahead: whatever draws again would get the same words again."""
    draws = list(_host_draws(jax.make_jaxpr(function)(*arguments).jaxpr))
    return draws[0] if len(draws) == 1 else 0


def _host_draws(jaxpr: Any, in_loop: bool = False) -> Iterator[int]:
    """The words of each draw from the host in a traced function, 0 for one that is mapped or in a loop."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "io_callback":
            shape = equation.outvars[0].aval.shape
            yield shape[0] if len(shape) == 1 and not in_loop else 0
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_traced):
            if _is_traced(parameter):
                inner = getattr(parameter, "jaxpr", parameter)
                yield from _host_draws(inner, in_loop or name in ("scan", "while", "cond"))


def _is_traced(value: object) -> bool:
    return hasattr(value, "eqns")


def _in_shape(drawn: Array, shape: tuple[int, ...]) -> Array:
    """Any order of a draw will do: that in which the compiler has least to move."""
    return drawn.reshape(shape[::-1]).T if is_turned(shape) else drawn.reshape(shape)


@functools.cache
def _expanded(count: int, spread: int = SPREAD) -> Callable[[Array, Array, Array], Array]:
    """A function of key, nonce and a mapped number: that many integers. Each index that vmap maps over has
    blocks of its own, even at one place."""

    @custom_vmap
    def draw(key: Array, nonce: Array, mapped: Array) -> Array:
        seed = jnp.concatenate([key, nonce], axis=-1)
        return chacha_draws(
            jnp.broadcast_to(seed, (*mapped.shape, 11)),
            count,
            spread=spread,
            kernel=jax.default_backend() == "gpu",
        )

    @draw.def_vmap
    def _(axis_size: int, in_batched: list[bool], *operands: Array) -> tuple[Array, bool]:
        whole = [
            operand if batched else jnp.broadcast_to(operand, (axis_size, *operand.shape))
            for operand, batched in zip(operands, in_batched, strict=True)
        ]
        return draw(*whole), True

    return draw


# ChaCha
#
# The cipher is ChaCha12: that of RFC 8439 with 12 rounds in place of 20, as in Rust's `StdRng`. The best attacks
# that are published break 7. On a GPU it is bound by its arithmetic: with 20 rounds a draw takes 1.4 times as
# long.
#
# A block has 16 words, enough for eight draws of two picks (`privacy.lattice`). A second block, with a bit of the
# nonce that tells the two apart, has the words that decide ties, one for each pick. On a GPU a kernel makes blocks
# and draws in registers, so that no word passes through memory. Where there is much to draw, one kernel makes
# first blocks alone and marks ties, and another makes the few marked blocks again, with their second ones.
# Elsewhere the same arithmetic is left to XLA. All give the same integers.

_CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_CHACHA_ROUNDS = 12
_DRAWS = 8  # of a block
_LANES = 128  # blocks that a GPU's kernel makes side by side
_AT_ONCE = 8  # as many such parts are searched for ties at once
_FEW = 1 << 17  # blocks for which a second kernel takes longer than second blocks for all
_TIES = np.uint32(1 << 31)  # in a nonce's second word, whose number has 31 bits: the block decides ties


def chacha_block(seed: list[Array], counter: Array, rounds: int = _CHACHA_ROUNDS) -> list[Array]:
    """The 16 words of each block (section 2.3). `seed` is 8 words of key and 3 of nonce; all are uint32."""
    fixed = [*(np.uint32(word) for word in _CHACHA_CONSTANTS), *seed[:8], counter, *seed[8:]]
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


def chacha_draws(
    seed: Array, count: int, *, spread: int = SPREAD, kernel: bool = False, interpret: bool = False
) -> Array:
    """`[..., count]` integers for seeds `[..., 11]` of key and nonce. The block counter continues from seed to
    seed: equal seeds still give different integers."""
    batch, seeds = seed.shape[:-1], math.prod(seed.shape[:-1])
    blocks = -(-count // (_DRAWS * _LANES)) * _LANES
    if seeds * blocks >= 2**32:
        raise SpecError(f"{seeds * count} random integers in one draw; draw at most {_DRAWS * 2**32} at a time")
    flat = seed.reshape(seeds, 11)
    kernel = kernel and seeds * blocks * _DRAWS < 2**31  # a kernel counts in 32 bits
    drawn = _chacha_on_gpu(flat, blocks, spread, interpret) if kernel else _chacha_by_xla(flat, blocks, spread)
    return drawn.reshape(*batch, _DRAWS * blocks)[..., :count]


def _chacha_by_xla(seed: Array, blocks: int, spread: int) -> Array:
    counter = jax.lax.iota(jnp.uint32, len(seed) * blocks).reshape(-1, blocks)
    return jnp.stack(_chacha_drawn([seed[:, i, None] for i in range(11)], counter, spread), axis=1)


def _chacha_drawn(
    seed: list[Array], counter: Array, spread: int, look_up: lattice.LookUp | None = None
) -> list[Array]:
    """The draws of each block, one array for each of the block's places."""
    words = chacha_block(seed, counter)
    ties = chacha_block([*seed[:9], seed[9] | _TIES, seed[10]], counter)
    return [
        lattice.draw(words[i : i + 2], ties[i : i + 2], look_up, spread=spread) for i in range(0, 2 * _DRAWS, 2)
    ]


def _chacha_on_gpu(seed: Array, blocks: int, spread: int, interpret: bool) -> Array:
    """In one kernel where there is little to draw; else in two, the second of which draws again what has ties."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    high, low = jnp.asarray(lattice.table())
    results = jax.ShapeDtypeStruct((len(seed), _DRAWS, blocks), jnp.int32)

    def call(kernel: Callable[..., None], width: int, results: Any, **options: Any) -> Callable[..., Any]:
        return pallas.pallas_call(
            functools.partial(kernel, blocks, spread),
            out_shape=results,
            grid=(len(seed) * -(-blocks // width),),  # one axis: a GPU's others are short
            compiler_params=triton.CompilerParams(),
            interpret=interpret,
            **options,
        )

    if len(seed) * blocks <= _FEW:
        drawn: Array = call(_all_draws, _LANES, results)(seed, high, low)
        return drawn
    width = _LANES * _AT_ONCE
    marks = jax.ShapeDtypeStruct((len(seed), -(-blocks // width) * width), jnp.int8)
    drawn, tied = call(_draws_without_ties, _LANES, (results, marks))(seed, high)
    whole: Array = call(_draws_with_ties, width, results, input_output_aliases={4: 0})(
        seed, high, low, tied, drawn
    )
    return whole


# In a kernel the arguments are references to arrays in the GPU's memory. One program makes `_LANES` blocks of one
# seed: one for each of its threads, since more take four times as long.


class _ProgramBlocks(NamedTuple):
    """Blocks that one program makes."""

    number: Array  # of the seed
    first: Array  # of its blocks

    @classmethod
    def of_program(cls, blocks: int, width: int = _LANES) -> _ProgramBlocks:
        """Where this program begins, of programs that make `width` blocks each."""
        from jax.experimental import pallas

        program, programs = pallas.program_id(0), -(-blocks // width)
        return cls(program // programs, program % programs * width)

    def blocks(self, seed: Any, each: int) -> tuple[list[Array], Array]:
        """The seed and the counters, where each seed has so many blocks."""
        counter = self.number * each + self.first + jax.lax.broadcasted_iota(jnp.int32, (_LANES,), 0)
        return [seed[self.number, i] for i in range(11)], counter.astype(jnp.uint32)

    def keep(self, drawn: list[Array], out: Any) -> None:
        from jax.experimental import pallas

        for i, integers in enumerate(drawn):
            out[self.number, i, pallas.ds(self.first, _LANES)] = integers


def _all_draws(blocks: int, spread: int, seed: Any, high: Any, low: Any, out: Any) -> None:
    part = _ProgramBlocks.of_program(blocks)
    part.keep(_chacha_drawn(*part.blocks(seed, blocks), spread, lambda own: (high[own], low[own])), out)


def _draws_without_ties(blocks: int, spread: int, seed: Any, high: Any, out: Any, tied: Any) -> None:
    """The draws, wrong where a pick ties, and which blocks have a tie."""
    from jax.experimental import pallas

    part = _ProgramBlocks.of_program(blocks)
    words = chacha_block(*part.blocks(seed, blocks))
    packed = [high[lattice.bin_of(word)] for word in words]
    columns, nothing = iter(packed), jnp.zeros(_LANES, jnp.uint32)
    drawn = [
        lattice.draw(words[i : i + 2], (nothing, nothing), lambda _: (next(columns), nothing), spread=spread)
        for i in range(0, 2 * _DRAWS, 2)
    ]
    part.keep(drawn, out)
    ties = functools.reduce(operator.or_, map(lattice.tied, words, packed))
    tied[part.number, pallas.ds(part.first, _LANES)] = ties.astype(jnp.int8)


# reason: as above
def _draws_with_ties(
    blocks: int, spread: int, seed: Any, high: Any, low: Any, tied: Any, before: Any, out: Any
) -> None:
    """The draws once more where a block has a tie; the others stay."""
    from jax.experimental import pallas

    del before  # it is `out`
    number, first = _ProgramBlocks.of_program(blocks, _LANES * _AT_ONCE)

    def any_of(first: Array, width: int) -> Array:
        exists = first + jax.lax.broadcasted_iota(jnp.int32, (width,), 0) < blocks  # beyond, nothing was marked
        marks = tied[number, pallas.ds(first, width)].astype(jnp.int32)
        return jnp.max(jnp.where(exists, marks, 0)) > 0

    @pallas.when(any_of(first, _LANES * _AT_ONCE))
    def _() -> None:
        def again(i: Array, done: tuple[()]) -> tuple[()]:
            part = _ProgramBlocks(number, first + i * _LANES)

            @pallas.when(any_of(part.first, _LANES))
            def _() -> None:
                drawn = _chacha_drawn(*part.blocks(seed, blocks), spread, lambda own: (high[own], low[own]))
                part.keep(drawn, out)

            return done

        jax.lax.fori_loop(0, _AT_ONCE, again, ())
