"""The arrays of a simulation: what its rounds read, change and hand on, how devices share them, how
uploads are summed, and how a model is scored.

`Shards` is a mesh of devices: runs along one axis, the clients of a round along the other. Every device holds all
records and the state of its runs. In a round each device trains its part of the cohort; the sums meet in one
reduction and the clients' new states are gathered, so that all devices of a run close the round alike. Runs need
nothing of each other. The devices may be those of several processes (`simulation.distributed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dither import models
from dither.data import ClientPartition, zeros_aligned
from dither.errors import SpecError
from dither.privacy.entropy import OsEntropy
from dither.simulation import distributed
from dither.types import Array, Params, PyTree


def aligned(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts one after the other, aligned to 64 bytes: JAX on a CPU reads such an array in place, while any
    other is copied twice. Parts that are already aligned and adjacent (as `load_folder` reads them) are not
    copied."""
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
    train_rows: Sequence[np.ndarray] = ()  # as the training loss adds them up; (): client by client


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
    noise_key: Array | None = None  # of one call that draws protected noise on an accelerator; never kept


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
    """What one client's round comes to: its upload (integers, if sums are aggregated securely) and the weight
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


# Devices

RUNS, CLIENTS = "runs", "clients"


class Shards(NamedTuple):
    """How many devices share the runs, and how many share each run's clients."""

    runs: int = 1
    clients: int = 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.runs * self.clients

    @property
    def alone(self) -> bool:
        """There is one device: nothing below does anything."""
        return self.devices == 1

    @property
    def meeting_on_cpu(self) -> bool:
        """Devices of a CPU wait for each other in a round. Nothing more may be asked of them until it is over. XLA
        has as many threads as devices, to start programs for several of them and to compute. With 32 programs
        queued, the next one waits for a place and holds a thread, which may be that of the device that the others
        wait for: they wait forever."""
        return self.clients > 1 and jax.default_backend() == "cpu"

    # From outside

    def spread(self, function: Callable[..., Any], arguments: str) -> Callable[..., Any]:
        """`function` with its positional arguments spread over the devices: those marked "r" and all results along
        their leading axis of runs, those marked "." whole on each device. Keywords are constants."""
        if self.alone:
            return function
        specs = tuple(PartitionSpec(RUNS) if letter == "r" else PartitionSpec() for letter in arguments)

        def everywhere(*values: Any, **constants: Any) -> Any:
            return jax.shard_map(
                partial(function, **constants),
                mesh=self._mesh(),
                in_specs=specs,
                out_specs=PartitionSpec(RUNS),
                check_vma=False,  # that results agree along the clients' axis is `whole`'s doing, and tested
            )(*values)

        return everywhere

    def jit(self, function: Callable[..., Any], arguments: str, *, wide_vectors: bool, **options: Any) -> Any:
        """`spread` and compiled. Results lie as `place` lays the runs: what a call returns, the next one takes
        without another program."""
        if not self.alone:
            options["out_shardings"] = NamedSharding(self._mesh(), PartitionSpec(RUNS))
        if wide_vectors and jax.default_backend() == "cpu":
            options["compiler_options"] = {"xla_cpu_prefer_vector_width": 512}
        return jax.jit(self.spread(function, arguments), **options)

    def place(self, runs: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        """The arrays of the runs, and those that all runs read, where `spread` wants them."""
        if self.alone:
            return runs, shared
        size = jax.tree.leaves(runs)[0].shape[0]
        if size % self.runs:
            raise SpecError(f"{size} runs cannot be shared equally by {self.runs} devices; fill up or use fewer")
        mesh = self._mesh()
        by_run, everywhere = NamedSharding(mesh, PartitionSpec(RUNS)), NamedSharding(mesh, PartitionSpec())
        if distributed.count() == 1:
            return jax.device_put(runs, by_run), jax.device_put(shared, everywhere)
        distributed.meet(list(mesh.devices.flat))
        return (
            jax.tree.map(lambda leaf: distributed.put(leaf, by_run), runs),
            jax.tree.map(lambda leaf: distributed.put(leaf, everywhere), shared),
        )

    def _mesh(self) -> Mesh:
        available = distributed.devices(self.devices)
        if len(available) < self.devices:
            raise SpecError(
                f"{self.runs} x {self.clients} shards need {self.devices} devices, here: {len(available)}"
            )
        return Mesh(np.array(available).reshape(self.runs, self.clients), (RUNS, CLIENTS))

    # On each device, along the clients' axis

    def lacking(self, length: int) -> int:
        """Entries to add so that every device gets as many."""
        return -length % self.clients

    def part(self, array: Array) -> Array:
        """This device's share of an array's leading axis."""
        if self.clients == 1:
            return array
        size = array.shape[0] // self.clients
        return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(CLIENTS) * size, size)

    def joined(self, tree: PyTree) -> PyTree:
        """The devices' parts one after the other: what `part` has split."""
        return tree if self.clients == 1 else jax.lax.all_gather(tree, CLIENTS, tiled=True)

    def shared(self, source: Any) -> Any:
        """A source of randomness from which all devices draw the same. From a seed, and from a key, they do."""
        os_entropy = isinstance(source, OsEntropy) and self.clients > 1
        return replace(source, shared_along=CLIENTS) if os_entropy else source

    def summed(self, tree: PyTree) -> PyTree:
        """The devices' sums together."""
        return tree if self.clients == 1 else jax.lax.psum(tree, CLIENTS)

    def whole(self, gathered: Gathered) -> Gathered:
        """The devices' parts of a round together."""
        if self.clients == 1:
            return gathered
        total, metrics, clamped = self.summed((gathered.total, gathered.metrics, gathered.clamped))
        each = (gathered.states, gathered.counted, gathered.finite)
        states, counted, finite = self.joined(each)
        return Gathered(total, states, metrics, counted, finite, clamped)


ONE_DEVICE = Shards()


# Sums of a round's uploads


def all_finite(tree: PyTree, axes: int = 0) -> Array:
    """Whether every number of an upload is finite, for each entry of the first `axes` axes."""
    leaves = jax.tree.leaves(tree)
    return jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(leaf), axis=tuple(range(axes, leaf.ndim))) for leaf in leaves]), axis=0
    )


def masked_sum(leaf: Array, counted: Array) -> Array:
    mask = counted.reshape(-1, *([1] * (leaf.ndim - 1)))
    return jnp.sum(jnp.where(mask, leaf, 0), axis=0, dtype=leaf.dtype)


def gathered(sent: ClientUpload, total: PyTree, finite: Array, present: Array) -> Gathered:
    """A round's clients with the sum of the uploads that count; all of `sent` has a leading axis of clients."""
    counted = finite & present
    metrics = {name: masked_sum(value, counted) for name, value in sent.metrics.items()}
    return Gathered(total, sent.state, metrics, counted, finite, masked_sum(sent.clamped, counted))


def sum_unfused(words: Array, counted: Array) -> Array:
    """`masked_sum` of integers, in a loop of two halves.

    What enters a loop lies in memory, so the compiler cannot fuse the sum with the clients' own arithmetic, whose
    last bits would then differ from those of clients that are not summed here (`_gather_runs`, a real party).
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


def sum_in_memory(upload: PyTree, present: Array, index: Array) -> tuple[PyTree, Array]:
    """The sum of the finite uploads of those who are present, and whose are finite; clients along the first axis.

    Made in memory (see `_kept`): else the noise in the uploads is computed again for each of the results, and for
    whatever asks whose upload counts.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), upload)
    once = jnp.minimum(index, 0) + 1  # 1, which the compiler cannot know

    def add(turn: Array, done: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        kept = _kept(upload, turn < once)
        finite = all_finite(kept, axes=1)
        return jax.tree.map(lambda sum, leaf: sum + masked_sum(leaf, finite & present), done[0], kept), finite

    total, finite = jax.lax.fori_loop(0, once, add, (zeros, jnp.zeros_like(present)))
    return total, finite


def _kept(tree: PyTree, true: Array) -> PyTree:
    """The tree, inside a loop that is made once. What enters a loop lies in memory, unless the compiler finds that
    it is the same at every turn and computes outside: hence a condition, always true, that depends on the turn."""
    return jax.tree.map(lambda leaf: jnp.where(true, leaf, 0), tree)


def running_sum(client: Callable[[PyTree], ClientUpload], clients: PyTree, present: Array) -> Gathered:
    """Clients one after the other with the sum carried along, so that one upload is held at a time.

    The addition is a loop that is made once, or not at all, so that it is not fused (see `sum_unfused`).
    """
    shapes = jax.eval_shape(client, jax.tree.map(lambda leaf: leaf[0], clients))
    summed = (shapes.upload, shapes.metrics, shapes.clamped)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), summed)

    def add(sums: PyTree, entry: tuple[PyTree, Array]) -> tuple[PyTree, tuple[PyTree, Array, Array]]:
        number, here = entry
        sent = client(number)
        one = (sent.upload, sent.metrics, sent.clamped)

        times = here.astype(jnp.int32)

        def count(turn: Array, done: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            kept = _kept(one, turn < times)
            finite = all_finite(kept[0])
            return jax.tree.map(lambda sum, value: sum + jnp.where(finite, value, 0), done[0], kept), finite

        sums, finite = jax.lax.fori_loop(0, times, count, (sums, jnp.array(False)))
        return sums, (sent.state, finite, finite | ~here)

    (total, metrics, clamped), (states, counted, finite) = jax.lax.scan(add, zeros, (clients, present))
    return Gathered(total, states, metrics, counted, finite, clamped)


# Scores

SCORED_ROWS = 4096  # records whose scores are added up at a time
_CPU_ROWS = 512  # records that a CPU scores at a time: their layers stay in a core's cache


class Scored(NamedTuple):
    """A model with its parameters, and the records that its scores are over."""

    model: models.Model
    params: Params
    shared: Shared
    shards: Shards

    def test_score(self, rows: Array, weights: Array) -> tuple[dict[str, Array], Array]:
        """The score that fits the task (accuracy or R²), by its name, and the loss over those rows."""
        total, loss = self.score(rows, weights)
        return named_score(self.model, total, self.shared.y[rows], weights), loss

    def score(self, rows: Array, weights: Array) -> tuple[Array, Array]:
        """Weighted accuracy (for regression: squared error) and loss over those rows; the devices share them."""
        if not rows.shape[0]:  # of private test records nothing is scored
            return jnp.zeros(()), jnp.zeros(())
        whole = _filled(rows, _block() * self.shards.clients)
        hits, losses = self.shards.joined(self._rows_scored(self.shards.part(whole)))
        scores = (weights, hits[: rows.shape[0]], losses[: rows.shape[0]])
        accuracy, loss = self._summed(_weighted, (jnp.zeros(()), jnp.zeros(())), *scores)
        return accuracy, loss

    def score_on(self, total: tuple[Array, Array], weights: Array) -> tuple[Array, Array]:
        """`total`, the sums of `score` so far, carried on through the records that are here, in their order: whole
        pieces. The sums over pieces that come one call after the other are those of all of them in one."""
        scores = (weights, *self._rows_scored(jnp.arange(weights.shape[0])))
        accuracy, loss = _add_up(_weighted, total, [part.reshape(-1, SCORED_ROWS) for part in scores])
        return accuracy, loss

    def _rows_scored(self, rows: Array) -> tuple[Array, Array]:
        """Whether each row is classified correctly (for regression: its squared error), and its loss; whole blocks
        of rows."""

        def block(some: Array) -> tuple[Array, Array]:
            scores, y = self.model.apply(self.params, self.shared.x[some]), self.shared.y[some]
            predicted = models.predict(scores, self.model.task)
            hits = jnp.square(predicted - y) if self.model.task == "regression" else predicted == y
            return hits, self.model.loss(scores, y)

        hits, losses = jax.lax.map(block, rows.reshape(-1, _block()))
        return hits.reshape(-1), losses.reshape(-1)

    def gradient_sq(self, rows: Array) -> Array:
        """Squared norm of the gradient of the mean loss over those rows."""

        def part(some: Array, weight: Array) -> Params:
            def loss(params: Params) -> Array:
                x, y = self.shared.x[some], self.shared.y[some]
                return jnp.sum(weight * models.losses(self.model, params, x, y))

            return jax.grad(loss)(self.params)

        zeros = jax.tree.map(jnp.zeros_like, self.params)
        gradient = self._summed(part, zeros, rows, jnp.full(rows.shape[0], 1.0 / rows.shape[0]))
        return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]))

    def _summed(self, part: Callable[..., PyTree], zeros: PyTree, *each: Array) -> PyTree:
        """The sum of `part` over pieces of the arrays, which have one entry a record."""
        pieces = [_filled(array, SCORED_ROWS * self.shards.clients).reshape(-1, SCORED_ROWS) for array in each]
        return self.shards.summed(_add_up(part, zeros, [self.shards.part(array) for array in pieces]))


def named_score(model: models.Model, total: Array, y: Array, weights: Array) -> dict[str, Array]:
    """Accuracy, or R² from the squared error (0 if all labels are the same), of labels with weights that sum to
    1."""
    if model.task != "regression":
        return {"test_accuracy": total}
    spread = jnp.sum(weights * jnp.square(y - jnp.sum(weights * y)))
    return {"test_r2": jnp.where(spread > 0, 1 - total / jnp.where(spread > 0, spread, 1), 0)}


def _block() -> int:
    return _CPU_ROWS if jax.default_backend() == "cpu" else SCORED_ROWS


def _filled(array: Array, multiple: int) -> Array:
    """The array with zeros at its end, up to a multiple of that length."""
    return jnp.concatenate([array, jnp.zeros(-array.shape[0] % multiple, array.dtype)])


def _weighted(weights: Array, hits: Array, losses: Array) -> tuple[Array, Array]:
    return jnp.sum(weights * hits), jnp.sum(weights * losses)


def _add_up(part: Callable[..., PyTree], total: PyTree, pieces: Sequence[Array]) -> PyTree:
    def add(total: PyTree, piece: Sequence[Array]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, part(*piece)), None

    return jax.lax.scan(add, total, pieces)[0]
