"""Rounds whose records come from the disk: a block of rounds at a time, the next one read while this one computes.

Who takes part in a round is known beforehand (`engine.planned_cohorts`). So the records of a block's clients are
gathered into one array of fixed length, and the compiled rounds of `Simulation` run on it as on any other. A
client's records keep their number and their order, by which batches are drawn: the result is bit for bit that of
the same records in memory, however long the blocks are.

    streamed = Streamed(simulation, problem, cohorts, room(memory, ...))     # problem.x is `data.MappedArray`
    inputs = streamed.inputs(problem, seeds=[0], hyper=hyper)
    state = simulation.start(inputs)
    state = streamed.advance(state, inputs, 0, 100)
    streamed.evaluate(state, inputs)
    streamed.close()

Two blocks are alive at a time: one at work, one that is read ahead (and, on an accelerator, already put there). A
third is only asked for when the first is done, whose memory it takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither.data import ClientPartition, MappedArray, zeros_aligned
from dither.errors import SpecError
from dither.simulation import arrays
from dither.simulation.arrays import Inputs, Problem, Shards, Shared, State
from dither.simulation.engine import Simulation
from dither.types import Array, Params

GB = 1e9
_SHORT = 3  # the first block has an eighth of the room, the next ones twice as much each
_PIECES = 16  # pieces of `arrays.SCORED_ROWS` records that are scored in one call


class Room(NamedTuple):
    """How many records a block holds, and how many pieces are scored in one call."""

    rows: int
    pieces: int


def room(memory: float, *, features: int, shards: Shards, wanted: int, scored: int) -> Room:
    """What `memory` bytes are enough for: two blocks (with a copy of each a device, where CPU devices share a
    run), and two of what is scored at a time. `wanted` records are all that the rounds use, `scored` the most
    that an evaluation goes through. It may be too little for the largest round."""
    row = row_bytes(features)
    pieces = int(min(_PIECES, max(memory / 8 // (arrays.SCORED_ROWS * row), 1), -(-scored // arrays.SCORED_ROWS)))
    left = memory - 2 * pieces * arrays.SCORED_ROWS * row
    return Room(int(min(max(left, 0) // (copies(shards) * row), wanted)), pieces)


def memory_for(rows: int, *, features: int, shards: Shards) -> float:
    """The memory that blocks of this many records need: `room` sets aside at most a quarter of it, or one piece
    twice, for scoring."""
    return row_bytes(features) * (copies(shards) * rows * 4 / 3 + 2 * arrays.SCORED_ROWS)


def row_bytes(features: int) -> int:
    """A record with its label and its place."""
    return 4 * features + 8


def copies(shards: Shards) -> int:
    """Copies of a block's records in the machine's memory. JAX's CPU reads ours where they lie, as one device."""
    apart = jax.default_backend() == "cpu" and not shards.alone
    return 2 + (2 * shards.devices if apart else 0)


def most_in_a_round(cohorts: Sequence[np.ndarray], sizes: np.ndarray) -> tuple[int, int]:
    """The round with the most records, and their number."""
    counts = [int(sizes[np.asarray(cohort)].sum(dtype=np.int64)) for cohort in cohorts]
    at = int(np.argmax(counts))
    return at, counts[at]


class Block(NamedTuple):
    """The rounds first..stop-1 and the arrays that they read."""

    first: int
    stop: int
    inputs: Inputs


class Streamed:
    """`inputs`, `advance` and `evaluate` of a simulation, for one run on `MappedArray` records."""

    def __init__(
        self, simulation: Simulation, problem: Problem, cohorts: Sequence[np.ndarray], held: Room
    ) -> None:
        records: Any = problem.x
        if not isinstance(records, MappedArray) or len(problem.partitions) != 1:
            raise SpecError(f"streaming is for one run on MappedArray records, not on {type(records).__name__}")
        self.simulation, self.held = simulation, held
        self._problem, self._records, self._partition = problem, records, problem.partitions[0]
        self._cohorts = cohorts
        self._most = most = most_in_a_round(cohorts, self._partition.size)[1]
        if most > held.rows:
            raise SpecError(f"a round has {most:,} records, a block only holds {held.rows:,}: give it more memory")
        features = problem.x.shape[1]
        # What is not filled yet is 0: padding reads it, which counts for nothing but must be finite.
        shapes = (held.rows, features), (held.pieces * arrays.SCORED_ROWS, features)
        self._blocks, self._pieces = ([zeros_aligned(shape, records.dtype) for _ in range(2)] for shape in shapes)
        self._common: Inputs | None = None
        self._ahead: Future[Block] | None = None
        self._now: Block | None = None
        self._reader = ThreadPoolExecutor(1, "read-ahead")
        self._scorer = ThreadPoolExecutor(1, "read-to-score")
        self._closed = threading.Event()
        self._score = jax.jit(self._score_pieces)
        self._means = jax.jit(_means)
        self._read = {"blocks": 0, "records_read": 0, "records_scored": 0}
        self._waited = 0.0

    def inputs(self, problem: Problem, *, seeds: Sequence[int], **others: Any) -> Inputs:
        """`Simulation.inputs`, as far as blocks share them: each brings its own records, `order` and `start`."""
        if len(seeds) != 1 or problem is not self._problem:
            raise SpecError(f"{len(seeds)} runs: streaming takes one run, on the problem given at the start")
        size, none = self._partition.size, np.zeros(0, np.int32)
        nobody = ClientPartition(np.zeros(self.held.rows, np.int32), np.zeros_like(size), size, ())
        one = np.zeros((1, problem.x.shape[1]), np.float32)
        empty = Problem(one, np.zeros(1, problem.y.dtype), [nobody], [none], [none])
        self._common = self.simulation.inputs(empty, seeds=seeds, **others)
        return self._common

    def advance(self, state: State, inputs: Inputs, start: int, stop: int) -> State:
        """Rounds start..stop-1, as `Simulation.advance`. A block that reaches beyond them is kept."""
        if inputs is not self._common:
            raise SpecError("these are not the inputs that the records are streamed for")
        while start < stop:
            block = self._at(start, inputs)
            end = min(stop, block.stop)
            # Done before its memory is given to the block after the next.
            state = jax.block_until_ready(self.simulation.advance(state, block.inputs, start, end))
            start = end
            del block  # or it would be alive while the next one is waited for
        return state

    def evaluate(self, state: State, inputs: Inputs) -> dict[str, np.ndarray]:
        """As `Simulation.evaluate`."""
        problem = self._problem
        # By way of the host: scores are made on one device, wherever the rounds were.
        params = jax.tree.map(lambda leaf: np.asarray(leaf)[0], self.simulation.params(state, inputs))
        own = problem.train_rows[0] if problem.train_rows else self._partition.order
        even = np.full(len(own), 1.0 / max(len(own), 1), np.float32)
        rows, weights = problem.test_rows[0], problem.test_weights[0].astype(np.float32)
        total, loss = self._scored_on(params, rows, weights)
        test_score = arrays.named_score(self.simulation.model, total, problem.y[rows], weights)
        _, train_loss = self._scored_on(params, own, even)
        scores = {**test_score, "loss": loss, "train_loss": train_loss}
        means = self._means(state.metrics, state.rounds)
        return {name: np.asarray(value)[None] for name, value in scores.items()} | {
            name: np.asarray(value) for name, value in means.items()
        }

    def report(self) -> dict[str, Any]:
        """What was read, for the summary of a run."""
        return {
            "block_records": self.held.rows,
            **self._read,
            "seconds_waiting": round(self._waited, 3),
        }

    def close(self) -> None:
        """Stop reading at once and discard what is being read ahead. No rounds may follow."""
        self._closed.set()
        for threads in (self._reader, self._scorer):
            threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._read[name] += number  # each name is counted in one thread alone

    # Blocks

    def _at(self, index: int, common: Inputs) -> Block:
        """The block that holds a round; starts reading the next one."""
        if self._now is not None and self._now.first <= index < self._now.stop:
            return self._now
        self._now = None  # it is done, and its memory is what the next one asked for is read into
        ahead, self._ahead = self._ahead, None
        block: Block | None = self._waiting(ahead) if ahead is not None else None
        if block is None or block.first != index:  # the first one, or rounds were skipped
            block = self._waiting(self._ask(index, common))
        if block.stop < len(self._cohorts):
            self._ahead = self._ask(block.stop, common)
        self._now = block
        return block

    def _ask(self, first: int, common: Inputs) -> Future[Block]:
        self._blocks.reverse()  # the one that is not at work
        return self._reader.submit(self._load, first, self._blocks[0], common)

    def _waiting(self, asked: Future[Any]) -> Any:
        began = time.perf_counter()
        try:
            return asked.result()  # what went wrong in the other thread is raised here
        finally:
            self._waited += time.perf_counter() - began

    def _load(self, first: int, x: np.ndarray, common: Inputs) -> Block:
        """Read the records of as many rounds as there is room for."""
        # Short blocks at first: for the first of them the rounds must wait.
        begun = self._read["blocks"]
        stop, clients = self._span(first, max(self._most, self.held.rows >> max(_SHORT - begun, 0)))
        partition, problem = self._partition, self._problem
        sizes = partition.size[clients].astype(np.int64)
        begins = np.cumsum(sizes) - sizes
        places = np.repeat(partition.start[clients] - begins, sizes) + np.arange(sizes.sum())
        rows = partition.order[places]
        # As the disk has them; `order` leads each client to its own.
        at = np.argsort(rows)
        rows = rows[at]
        self._records.read(rows, x, self._closed)
        order, start = (np.zeros(n, np.int32) for n in (len(x), len(partition.size)))
        y = np.zeros(len(x), problem.y.dtype)
        y[: len(rows)] = problem.y[rows]
        order[at] = np.arange(len(rows), dtype=np.int32)
        start[clients] = begins
        runs = common.runs._replace(order=jnp.asarray(order[None]), start=jnp.asarray(start[None]))
        shared = Shared(jax.device_put(x), jax.device_put(y))
        block = Block(first, stop, Inputs(*self.simulation.shards.place(runs, shared)))
        self._count(blocks=1, records_read=len(rows))
        jax.block_until_ready(block)
        return block

    def _span(self, first: int, most: int) -> tuple[int, np.ndarray]:
        """The rounds from `first` on whose clients together have at most `most` records: where they stop, and the
        clients."""
        inside = np.zeros(len(self._partition.size), np.bool_)
        stop, rows = first, 0
        while stop < len(self._cohorts):
            cohort = np.asarray(self._cohorts[stop])
            fresh = cohort[~inside[cohort]]
            rows += int(self._partition.size[fresh].sum(dtype=np.int64))
            if rows > most:
                break
            inside[fresh] = True
            stop += 1
        return stop, np.flatnonzero(inside)

    # Scores

    def _score_pieces(self, total: Any, params: Params, x: Array, y: Array, weights: Array) -> Any:
        scored = arrays.Scored(self.simulation.model, params, Shared(x, y), self.simulation.shards)
        return scored.score_on(total, weights)

    def _scored_on(self, params: Params, rows: np.ndarray, weights: np.ndarray) -> tuple[Array, Array]:
        """`Scored.score`: the same pieces in the same order. Where devices would have shared them, those of each
        device are added up by themselves."""
        shards = self.simulation.shards
        pieces = -(-len(rows) // arrays.SCORED_ROWS)
        each = (pieces + shards.lacking(pieces)) // shards.clients * arrays.SCORED_ROWS
        totals = [self._add_up(params, rows, weights, d * each, (d + 1) * each) for d in range(shards.clients)]
        return tuple(sum(parts[1:], parts[0]) for parts in zip(*totals, strict=True))

    def _add_up(self, params: Params, rows: np.ndarray, weights: np.ndarray, first: int, stop: int) -> Any:
        buffers = self._pieces
        total = (jnp.zeros(()), jnp.zeros(()))
        starts = range(first, min(stop, len(rows)), len(buffers[0]))
        asked: Future[Any] | None = None
        for number, at in enumerate(starts):
            x, y, weight = self._waiting(asked or self._ask_scored(rows, weights, at, stop, buffers[0]))
            asked = None
            if number + 1 < len(starts):
                jax.block_until_ready(total)  # the call before this one has done with the other buffer
                asked = self._ask_scored(rows, weights, starts[number + 1], stop, buffers[(number + 1) % 2])
            total = self._score(total, params, x, y, weight)
        return jax.block_until_ready(total)

    def _ask_scored(
        self, rows: np.ndarray, weights: np.ndarray, at: int, stop: int, x: np.ndarray
    ) -> Future[tuple[Array, Array, Array]]:
        def load() -> tuple[Array, Array, Array]:
            some = rows[at : min(at + len(x), stop)]
            self._records.read(some, x, self._closed)
            y, weight = np.zeros(len(x), self._problem.y.dtype), np.zeros(len(x), np.float32)
            y[: len(some)], weight[: len(some)] = self._problem.y[some], weights[at : at + len(some)]
            self._count(records_scored=len(some))
            loaded: tuple[Array, Array, Array] = jax.block_until_ready(jax.device_put((x, y, weight)))
            return loaded

        return self._scorer.submit(load)


def _means(metrics: Mapping[str, Array], rounds: Array) -> dict[str, Array]:
    return {name: value / jnp.maximum(rounds, 1) for name, value in metrics.items()}
