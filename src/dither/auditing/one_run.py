"""Many canaries in one run (Steinke, Nasr, Jagielski 2023): an independent coin decides which are there.

The target client holds m canaries in directions of their own, each present or replaced by a record without a
gradient. After one run of its participations the adversary projects the sum of the uploads on each canary's
direction and calls the highest "in", the lowest "out". One run gives m coins instead of one, at the price that all
other canaries are noise to each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import models
from dither.auditing.designs import REACH, Record, World, certain_start, stack
from dither.auditing.worlds import Code, Schedule, float32
from dither.errors import SpecError
from dither.models import Model
from dither.types import Array, Records, Round


class OneRun(NamedTuple):
    """Each canary's score and whether its coin let it in."""

    scores: np.ndarray
    included: np.ndarray


def run(
    code: Code,
    model: Model,
    plan: Schedule,
    sizes: np.ndarray,
    *,
    num_features: int,
    canaries: int,
    movement: float,
    seed: int,
) -> OneRun:
    """One run of the target's participations with canaries; every broadcast is chosen by the adversary."""
    size, rows = int(sizes[plan.target]), int(np.max(sizes))
    if model.name not in ("logistic", "softmax"):
        raise SpecError(f"canaries are made for logistic and softmax models, not for {model.name!r}")
    if canaries > size:
        raise SpecError(f"canaries={canaries} exceed the {size} records of the client")
    rng = np.random.default_rng([int(seed), 1])
    included = rng.random(canaries) < 0.5
    directions = _directions(rng, canaries, num_features)
    silent = Record(np.zeros(num_features), 0)
    held = [Record(REACH * directions[i], 1) if i < canaries and included[i] else silent for i in range(rows)]
    x, y = stack(held)
    start = certain_start(model, movement, seed=0)
    world = World(jnp.asarray(x), jnp.asarray(y), jnp.int32(size), jnp.asarray(x[:1]), jnp.asarray(y[:1]))

    def lines() -> Array:
        def pull(direction: Array) -> Array:
            def loss(params: models.Params) -> Array:
                return models.losses(model, params, REACH * direction[None], jnp.ones(1, jnp.int32))[0]

            flat = ravel_pytree(jax.grad(loss)(start))[0]
            return -flat / jnp.linalg.norm(flat)

        return jax.vmap(pull)(jnp.asarray(directions, jnp.float32))

    def scores(root: Array) -> Array:
        algorithm = code.build(float32(code.hyper))
        message = algorithm.message(algorithm.init(start))
        records = Records(world.x, world.y, jnp.arange(rows, dtype=jnp.int32), jnp.int32(0), world.size)
        target = jnp.int32(plan.target)
        along = lines()

        def one(state, entry):  # type: ignore[no-untyped-def]
            index, cohort = entry
            keys = code.keys(root, index, target)
            result = algorithm.client(keys, message, state, records, Round(index, target, cohort))
            upload = result.upload["params"] if code.client_state else result.upload
            return result.state, along @ (ravel_pytree(upload)[0] / result.weight)

        entries = (jnp.asarray(plan.rounds, jnp.int32), jnp.asarray(plan.cohort_sizes, jnp.int32))
        _, seen = jax.lax.scan(one, algorithm.client_init(start), entries)
        return jnp.sum(seen, axis=0)

    return OneRun(np.asarray(jax.jit(scores)(jnp.uint32(seed)), np.float64), included)


def _directions(rng: np.random.Generator, count: int, num_features: int) -> np.ndarray:
    """Orthogonal as far as there are dimensions, random beyond."""
    if count <= num_features:
        return np.eye(num_features)[:count]
    random = rng.normal(size=(count, num_features))
    return random / np.linalg.norm(random, axis=1, keepdims=True)
