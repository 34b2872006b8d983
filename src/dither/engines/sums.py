"""Sums of a round's uploads, over those that count."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dither.core import Array, PyTree
from dither.engines.arrays import Gathered, Sent


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
        counts = sent.finite & here
        one = (sent.upload, sent.metrics, sent.clamped)
        sums = jax.lax.fori_loop(
            0, counts.astype(jnp.int32), lambda _, sums, one=one: jax.tree.map(jnp.add, sums, one), sums
        )
        return sums, (sent.state, counts, sent.finite)

    (total, metrics, clamped), (states, counted, finite) = jax.lax.scan(add, zeros, (clients, present))
    return Gathered(total, states, metrics, counted, finite, clamped)
