"""Secure aggregation in a simulation.

In the open, floats are summed inside the compiled round (`simulation.arrays`). With secure aggregation the server
learns the sum alone: "ideal" adds the encoded integers, which is what the protocol's sum comes to without its
masks, inside the compiled round; "real" runs the protocol of `secagg` between as many clients as the cohort has,
every message as bytes. Both sum the same integers, so they give the same parameters bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.privacy import discrete
from dither.secagg.encoding import FixedPoint
from dither.secagg.graph import Rules

MODES = ("ideal", "real")


class Aggregation(NamedTuple):
    """Secure aggregation of one run, as its spec asks for it."""

    mode: str
    how: FixedPoint
    rules: Rules = Rules()
    noise_std: Callable[[int, int, int], float] | None = None  # discrete noise: at round, client, cohort size
    integers: bool = False  # uploads are noisy integers already (`ClientResult.integers`)

    def check(self) -> Aggregation:
        """Itself, or `SpecError`."""
        if self.mode not in MODES:
            raise SpecError(f"aggregation mode={self.mode!r} is not one of {', '.join(map(repr, MODES))}")
        self.how.check()
        return self

    def check_cohort(self, size: int) -> None:
        """`SpecError` if the protocol would refuse a cohort of this size, or one that losses leave of it."""
        least, colluders = self.rules.check().least(size), self.rules.colluders
        if least > size:
            raise SpecError(
                f"a cohort of {size} clients with privacy.colluders={colluders}: at least {least} must "
                "answer for a sum to be opened safely; take more clients a round, fewer colluders, or "
                "secagg.mode='off'"
            )
        for left in (size, *range(least, size)):
            try:
                self.rules.check_sum(left, least)
            except SpecError as error:
                raise SpecError(f"secagg.{error}") from None

    @property
    def compiled(self) -> bool:
        """Whether the sum is made inside the compiled round (JAX has 32-bit integers there)."""
        return self.mode == "ideal" and self.how.modulus_bits == 32 and self.noise_std is None


class Traffic:
    """What the protocol sent and took, over the rounds since it was made."""

    def __init__(self) -> None:
        self.rounds = self.attempts = self.uploads = 0
        self.bytes_up = self.bytes_down = 0
        self.mask_seconds = self.open_seconds = 0.0

    def add(self, summed: Any) -> None:
        """One round's report."""
        self.rounds += 1
        self.attempts += summed.attempts
        self.uploads += len(summed.bytes_up)
        self.bytes_up += sum(summed.bytes_up.values())
        self.bytes_down += sum(summed.bytes_down.values())
        self.mask_seconds += summed.mask_seconds
        self.open_seconds += summed.unmask_seconds

    def report(self) -> dict[str, float]:
        """Means a client and round."""
        uploads, rounds = max(self.uploads, 1), max(self.rounds, 1)
        return {
            "upload_bytes": self.bytes_up / uploads,
            "download_bytes": self.bytes_down / uploads,
            "mask_seconds": self.mask_seconds / uploads,
            "open_seconds": self.open_seconds / rounds,
            "attempts": self.attempts / rounds,
        }


def add_discrete(words: np.ndarray, std: float, words_of_64: discrete.Words) -> np.ndarray:
    """The encoding with a discrete Gaussian of that std (in steps of the grid) on every coordinate."""
    if std == 0:
        return words
    noise = discrete.discrete_gaussian(words.size, std**2, words=words_of_64)
    return np.asarray(words + noise.astype(np.uint64).astype(words.dtype))


def seeded_words(*where: int) -> discrete.Words:
    """Words of 64 bits that follow from the numbers given: research only."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(where)))
    return lambda count: generator.integers(0, 2**64, count, dtype=np.uint64)


class Aggregator:
    """Sums of one run, round by round, on the host."""

    def __init__(self, aggregation: Aggregation, num_clients: int) -> None:
        self.aggregation = aggregation
        self.traffic = Traffic()
        self.enrol_seconds = 0.0
        self._federation = None
        if aggregation.mode == "real":
            from dither.secagg.session import LocalFederation

            began = time.perf_counter()
            self._federation = LocalFederation(num_clients, aggregation.how, **aggregation.rules._asdict())
            self.enrol_seconds = time.perf_counter() - began

    def sum(self, index: int, words: Mapping[int, np.ndarray], lost: Mapping[int, str]) -> np.ndarray:
        """The sum of the words of all of a cohort who are not `lost`, modulo 2^k."""
        if self._federation is None:
            kept = [vector for client, vector in words.items() if client not in lost]
            return np.asarray(np.add.reduce(kept, dtype=self.aggregation.how.dtype))
        summed = self._federation.sum(index, words, lost=lost)
        self.traffic.add(summed)
        return summed.total
