"""Who takes part when, computed on the host: the same draws the compiled rounds make."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from dither.privacy import noise, sampling


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
    stream = noise.stream(seed, "cohort")
    cohorts: list[np.ndarray] = [np.zeros(0, np.int32)] * num_rounds
    for size in np.unique(sizes):
        rounds = np.flatnonzero(sizes == size)
        draw = jax.jit(
            jax.vmap(lambda i, size=int(size): sampling.cohort(noise.for_round(stream, i), num_clients, size))
        )
        for at, chosen in zip(rounds, np.asarray(draw(rounds.astype(np.int32))), strict=True):
            cohorts[at] = chosen
    return cohorts
