"""Scoring a model on records, a few thousand at a time, the pieces dealt out to a mesh's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dither import models
from dither.simulation.arrays import Shared
from dither.simulation.sharding import Shards
from dither.types import Array, Params, PyTree

ROWS = 4096  # records scored at a time


class Scored(NamedTuple):
    """A model with its parameters, and the records that its scores are over."""

    model: models.Model
    params: Params
    shared: Shared
    shards: Shards

    def score(self, rows: Array, weights: Array) -> tuple[Array, Array]:
        """Weighted accuracy and loss over those rows."""
        accuracy, loss = self._summed(self._score, rows, weights, (jnp.zeros(()), jnp.zeros(())))
        return accuracy, loss

    def score_on(self, total: tuple[Array, Array], weights: Array) -> tuple[Array, Array]:
        """`total`, the sums of `score` so far, carried on through the records that are here, in their order: whole
        pieces. The sums over pieces that come one call after the other are those of all of them in one."""
        rows = jnp.arange(weights.shape[0]).reshape(-1, ROWS)
        accuracy, loss = _add_up(self._score, total, (rows, weights.reshape(-1, ROWS)))
        return accuracy, loss

    def _score(self, some: Array, weight: Array) -> tuple[Array, Array]:
        scores, y = self.model.apply(self.params, self.shared.x[some]), self.shared.y[some]
        right = jnp.sum(weight * (models.predict(scores) == y))
        return right, jnp.sum(weight * models.score_losses(scores, y))

    def gradient_sq(self, rows: Array) -> Array:
        """Squared norm of the gradient of the mean loss over those rows."""

        def part(some: Array, weight: Array) -> Params:
            def loss(params: Params) -> Array:
                x, y = self.shared.x[some], self.shared.y[some]
                return jnp.sum(weight * models.losses(self.model, params, x, y))

            return jax.grad(loss)(self.params)

        zeros = jax.tree.map(jnp.zeros_like, self.params)
        gradient = self._summed(part, rows, jnp.full(rows.shape[0], 1.0 / rows.shape[0]), zeros)
        return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]))

    def _summed(
        self, part: Callable[[Array, Array], PyTree], rows: Array, weights: Array, zeros: PyTree
    ) -> PyTree:
        extra = -rows.shape[0] % ROWS
        extra += ROWS * self.shards.lacking((rows.shape[0] + extra) // ROWS)
        rows = jnp.concatenate([rows, jnp.zeros(extra, rows.dtype)]).reshape(-1, ROWS)
        weights = jnp.concatenate([weights, jnp.zeros(extra, weights.dtype)]).reshape(-1, ROWS)
        pieces = self.shards.part(rows), self.shards.part(weights)
        return self.shards.summed(_add_up(part, zeros, pieces))


def _add_up(part: Callable[[Array, Array], PyTree], total: PyTree, pieces: tuple[Array, Array]) -> PyTree:
    def add(total: PyTree, piece: tuple[Array, Array]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, part(*piece)), None

    return jax.lax.scan(add, total, pieces)[0]
