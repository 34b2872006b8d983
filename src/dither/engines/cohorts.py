"""Who takes part when, computed on the host: the same draws the compiled rounds make."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
        drawn = _drawing(num_clients, int(size))(stream, rounds.astype(np.int32))
        for at, chosen in zip(rounds, np.asarray(drawn), strict=True):
            cohorts[at] = chosen
    return cohorts


@lru_cache(maxsize=64)
def _drawing(num_clients: int, size: int) -> Callable[[Any, np.ndarray], Any]:
    """The draw of many rounds' cohorts, compiled once for all seeds of a sweep."""

    def draw(stream: Any, rounds: Any) -> Any:
        return jax.vmap(lambda index: sampling.cohort(noise.for_round(stream, index), num_clients, size))(rounds)

    return jax.jit(draw)
