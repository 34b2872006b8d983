"""The arrays of a simulation: what its rounds read, change and hand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dither.data import ClientPartition, zeros_aligned
from dither.types import Array, PyTree


def aligned(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts one after the other, on a border of 64 bytes: JAX's CPU reads such an array where it lies, while
    any other is copied, twice. Parts that lie so already (`load_folder` reads them so) are not copied."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    if _in_a_row(parts):
        return np.lib.stride_tricks.as_strided(parts[0], shape)
    return np.concatenate(parts, out=zeros_aligned(shape, np.result_type(*parts)))


def _in_a_row(parts: Sequence[np.ndarray]) -> bool:
    """The parts are views of one piece of memory, from a border on and without gaps."""
    ends = [part.ctypes.data + part.nbytes for part in parts]
    return (
        parts[0].base is not None
        and parts[0].ctypes.data % 64 == 0
        and all(part.base is parts[0].base and part.dtype == parts[0].dtype for part in parts)
        and all(part.flags.c_contiguous for part in parts)
        and all(part.ctypes.data == end for part, end in zip(parts[1:], ends, strict=False))
    )


class Problem(NamedTuple):
    """Data of a simulation: all records once, and for each run who holds which rows and what is scored."""

    x: np.ndarray
    y: np.ndarray
    partitions: Sequence[ClientPartition]  # one a run, or a single one shared by all runs
    test_rows: Sequence[np.ndarray]  # likewise
    test_weights: Sequence[np.ndarray]  # weights that sum to 1, so that a mean over clients is a plain sum
    train_rows: Sequence[
        np.ndarray
    ] = ()  # the clients' rows as the training loss adds them up; (): client by client


class RunInputs(NamedTuple):
    """What one run of a batch reads and never changes; in `Inputs` each with a leading axis of runs."""

    seed: Array
    secret: Array  # what opens the streams of batches: the seed, or a key from OS entropy
    hyper: Mapping[str, Array]
    order: Array
    start: Array
    size: Array
    test_rows: Array
    test_weights: Array
    cohorts: Array  # [num_rounds, cohort_size] where participation is designed beforehand, else [0, 0]
    train_rows: Array | None = None  # what the training loss adds up, where it is not `order`


class Shared(NamedTuple):
    """What all runs of a batch read."""

    x: Array
    y: Array


class Inputs(NamedTuple):
    """Arrays on the device that the compiled program reads."""

    runs: RunInputs
    shared: Shared


class State(NamedTuple):
    """What a round changes."""

    server: PyTree
    clients: PyTree
    participation: Array  # rounds each client has taken part in
    refused: Array  # updates of each client that were not finite and left out
    lost: Array  # rounds in which each client was chosen and vanished
    missing: Array  # the most clients that lacked in any opened sum, of a usual cohort
    void: Array  # rounds without enough clients: nothing was opened, the model stayed
    clamped: Array  # coordinates that the encoding clamped
    metrics: Mapping[str, Array]  # sums since `rounds` was last 0
    rounds: Array


class ClientUpload(NamedTuple):
    """What one client's round comes to: its upload (integers, where sums are aggregated securely) and the weight
    in it, what it keeps, its metrics, whether the upload may count, how many of its coordinates were clamped."""

    upload: PyTree
    weight: Array
    state: PyTree
    metrics: Mapping[str, Array]
    finite: Array
    clamped: Array


class Gathered(NamedTuple):
    """A round's clients together: the sum of the uploads that count, everyone's new state, summed metrics."""

    total: PyTree
    states: PyTree
    metrics: Mapping[str, Array]
    counted: Array  # whose upload is in the sum
    finite: Array
    clamped: Array
