"""Sums of a round's uploads, over those that count."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dither.simulation.arrays import Gathered, Sent
from dither.types import Array, PyTree


def all_finite(tree: PyTree, axes: int = 0) -> Array:
    """Whether every number of an upload is finite, for each entry of the first `axes` axes."""
    leaves = jax.tree.leaves(tree)
    return jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(leaf), axis=tuple(range(axes, leaf.ndim))) for leaf in leaves]), axis=0
    )


def masked_sum(leaf: Array, counted: Array) -> Array:
    mask = counted.reshape(-1, *([1] * (leaf.ndim - 1)))
    return jnp.sum(jnp.where(mask, leaf, 0), axis=0, dtype=leaf.dtype)


def sum_apart(words: Array, counted: Array) -> Array:
    """`masked_sum` of integers, in a loop of two halves.

    What enters a loop lies in memory, so the compiler cannot merge the sum with the clients' own arithmetic, whose
    last bits would then differ from those of clients that are not summed here (`_gather_runs`, a real node).
    """
    extra = words.shape[0] % 2
    words = jnp.concatenate([words, jnp.zeros((extra, *words.shape[1:]), words.dtype)]) if extra else words
    counted = jnp.concatenate([counted, jnp.zeros(extra, bool)])
    half = words.shape[0] // 2

    def add(which: Array, total: Array) -> Array:
        def part(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, which * half, half)

        return total + masked_sum(part(words), part(counted))

    return jax.lax.fori_loop(0, 2, add, jnp.zeros(words.shape[1:], words.dtype))


def summed_beside(upload: PyTree, present: Array, index: Array) -> tuple[PyTree, Array]:
    """The sum of the finite uploads of those who are present, and whose are finite; clients along the first axis.

    Made in memory (see `_kept`): else the noise in the uploads is computed again for each of the results, and for
    whatever asks whose upload counts.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), upload)
    once = jnp.minimum(index, 0) + 1  # 1, which the compiler cannot know

    def add(turn: Array, done: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        kept = _kept(upload, turn < once)
        finite = all_finite(kept, axes=1)
        return jax.tree.map(lambda sum, leaf: sum + masked_sum(leaf, finite & present), done[0], kept), finite

    return jax.lax.fori_loop(0, once, add, (zeros, jnp.zeros_like(present)))


def _kept(tree: PyTree, true: Array) -> PyTree:
    """The tree, inside a loop that is made once. What enters a loop lies in memory, unless the compiler finds that
    it is the same at every turn and computes outside: hence a condition, always true, that depends on the turn."""
    return jax.tree.map(lambda leaf: jnp.where(true, leaf, 0), tree)


def summed_along(client: Callable[[Array], Sent], clients: Array, present: Array) -> Gathered:
    """Clients one after the other with the sum carried along, so that one upload is held at a time.

    The addition is a loop that is made once, or not at all: apart from the client's arithmetic, as in `sum_apart`.
    """
    shapes = jax.eval_shape(client, clients[0])
    summed = (shapes.upload, shapes.metrics, shapes.clamped)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), summed)

    def add(sums: PyTree, entry: tuple[Array, Array]) -> tuple[PyTree, tuple[PyTree, Array, Array]]:
        number, here = entry
        sent = client(number)
        one = (sent.upload, sent.metrics, sent.clamped)

        times = here.astype(jnp.int32)

        def count(turn: Array, done: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            kept = _kept(one, turn < times)
            finite = all_finite(kept[0])
            return jax.tree.map(lambda sum, value: sum + jnp.where(finite, value, 0), done[0], kept), finite

        sums, finite = jax.lax.fori_loop(0, times, count, (sums, jnp.array(False)))
        return sums, (sent.state, finite, finite | ~here)

    (total, metrics, clamped), (states, counted, finite) = jax.lax.scan(add, zeros, (clients, present))
    return Gathered(total, states, metrics, counted, finite, clamped)
