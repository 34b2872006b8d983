"""Local training that all methods share: a scan of steps over a round's batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dither.core import Array, Params, PyTree, Records
from dither.privacy.sampling import Batches


class Batch(NamedTuple):
    """One local step's records, with 0/1 weights (0 is padding)."""

    x: Array
    y: Array
    weights: Array


def train(
    start: PyTree,
    records: Records,
    batches: Batches,
    step: Callable[[PyTree, Batch, Array], tuple[PyTree, Array]],
) -> tuple[PyTree, Array]:
    """Apply `step(carry, batch, number) -> (carry, diagnostic)` to each batch in turn.

    Returns the last carry and the mean diagnostic. Records are fetched inside the scan: all batches of all
    clients at once would not fit for image data.
    """

    def body(carry: PyTree, inputs: tuple[Array, Array, Array]) -> tuple[PyTree, Array]:
        number, positions, weights = inputs
        return step(carry, Batch(*records.take(positions), weights), number)

    numbers = jnp.arange(batches.positions.shape[0])
    end, diagnostics = jax.lax.scan(body, start, (numbers, batches.positions, batches.weights))
    return end, jnp.mean(diagnostics)


def subtract(a: Params, b: Params) -> Params:
    """a - b, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def add(a: Params, b: Params) -> Params:
    """a + b, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def scale(factor: Array, tree: Params) -> Params:
    """factor · tree."""
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def axpy(factor: Array, x: Params, y: Params) -> Params:
    """factor · x + y."""
    return jax.tree.map(lambda a, b: factor * a + b, x, y)
