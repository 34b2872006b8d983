"""Who takes part when, computed on the host: the same draws the compiled rounds make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from dither.privacy import noise, sampling
from dither.types import Array


def planned(
    seed: int,
    *,
    num_clients: int,
    cohort_size_at: Callable[[int], int],
    design: np.ndarray | None,
    num_rounds: int,
) -> list[np.ndarray]:
    """The cohort of each round. Participation is drawn from the seed alone, never from data or results."""
    if design is not None:
        return list(np.asarray(design[:num_rounds]))
    sizes = np.array([cohort_size_at(index) for index in range(num_rounds)], int)
    cohorts: list[np.ndarray] = [np.zeros(0, np.int32)] * num_rounds
    for size in np.unique(sizes):
        rounds = np.flatnonzero(sizes == size)
        if size == num_clients:
            drawn = np.broadcast_to(np.arange(num_clients, dtype=np.int32), (len(rounds), num_clients))
        else:
            # Filled up to a power of two: specs of a sweep that differ in their rounds share a compilation.
            padded = np.zeros(1 << (len(rounds) - 1).bit_length(), np.int32)
            padded[: len(rounds)] = rounds
            drawn = np.asarray(_draw(np.uint32(seed), padded, num_clients=num_clients, size=int(size)))[
                : len(rounds)
            ]
        for at, chosen in zip(rounds, drawn, strict=True):
            cohorts[at] = chosen
    return cohorts


@partial(jax.jit, static_argnames=("num_clients", "size"))
def _draw(seed: Array, rounds: Array, *, num_clients: int, size: int) -> Array:
    stream = noise.stream(seed, "cohort")
    return jax.vmap(lambda index: sampling.cohort(noise.for_round(stream, index), num_clients, size))(rounds)
