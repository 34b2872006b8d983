"""The members of a federation by themselves: one client, or the server, each in a process of its own.

Both run the functions that are compiled into every simulated round (`Simulation.sent`, `Simulation.close`), mapped
over a batch of one run as there, so that on one kind of CPU the bits are those of a simulated round whose clients
run one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither.data import ClientPartition
from dither.experiment import build
from dither.secagg import encoding
from dither.simulation.aggregation import add_discrete
from dither.simulation.arrays import Gathered, Inputs, Problem, RunInputs, State
from dither.simulation.engine import Simulation
from dither.types import PyTree

Leaves = list[np.ndarray]


class Answer(NamedTuple):
    """What a client makes of a broadcast: a row of float32, or of words if sums are aggregated securely."""

    row: np.ndarray
    state: Leaves
    finite: bool
    clamped: int


class RunSettings(NamedTuple):
    """What a run's members compute with: the simulation, and what seeds and tunes its rounds."""

    simulation: Simulation
    seed: int
    hyper: dict[str, Any]
    design: np.ndarray | None = None  # of cohorts that are not drawn as they go

    @classmethod
    def of(cls, experiment: build.Experiment) -> RunSettings:
        simulation, hyper = build.make_simulation(experiment), build.compiled_hyper(experiment)
        return cls(simulation, experiment.spec.seed, hyper, experiment.plan.design)

    def inputs(self, problem: Problem) -> Inputs:
        """The arrays of a batch of this one run."""
        hyper = {name: np.asarray(value)[None] for name, value in self.hyper.items()}
        cohorts = None if self.design is None else [self.design]
        return self.simulation.inputs(problem, seeds=[self.seed], hyper=hyper, cohorts=cohorts)


class ClientEngine:
    """One client: number `client`, holding the records (x, y). `secret` opens its streams of batches."""

    def __init__(
        self, settings: RunSettings, x: np.ndarray, y: np.ndarray, *, client: int, secret: Any = None
    ) -> None:
        simulation, self.client, self._seed = settings.simulation, client, settings.seed
        self.simulation = simulation
        size = np.zeros(simulation.num_clients, np.int32)
        size[client] = len(y)
        partition = ClientPartition(np.arange(len(y), dtype=np.int32), np.zeros_like(size), size, ())
        none = np.zeros(0)
        inputs = settings.inputs(Problem(x, y, [partition], [none], [none]))
        if secret is not None:
            inputs = inputs._replace(runs=inputs.runs._replace(secret=secret))
        self.inputs = inputs

        def first(run: RunInputs) -> tuple[PyTree, PyTree]:
            algorithm, params = simulation.build(run.hyper), simulation.initial(run)
            return algorithm.message(algorithm.init(params)), algorithm.client_init(params)

        # reason: what a compiled program takes, array by array
        def answer(
            message: PyTree, state: PyTree, inputs: Inputs, index: Any, number: Any, cohort_size: int
        ) -> Any:
            def sent(message: PyTree, state: PyTree, run: RunInputs) -> Any:
                return simulation.sent(message, state, run, inputs.shared, index, number, cohort_size)

            return jax.vmap(sent)(message, state, inputs.runs)

        self._first = jax.jit(lambda inputs: jax.vmap(first)(inputs.runs))
        self._answer = jax.jit(answer, static_argnames="cohort_size")
        message, own_state = jax.eval_shape(self._first, inputs)
        self._message, self._client_state = jax.tree.structure(message), jax.tree.structure(own_state)
        self.message_shapes = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(message)]

    def start(self) -> Leaves:
        """The state of a client that has not taken part yet."""
        return _leaves(self._first(self.inputs)[1])

    def warm(self) -> None:
        """Compile now what the first round would wait for; what it computes is thrown away."""
        zeros = [np.zeros(shape, dtype) for shape, dtype in self.message_shapes]
        self.answer(zeros, self.start(), 0)

    def answer(self, message: Leaves, client_state: Leaves, index: int) -> Answer:
        """What leaves this client in round `index`, and the state it has then."""
        sent = self._answer(
            _tree(self._message, message),
            _tree(self._client_state, client_state),
            self.simulation.with_noise_key(self.inputs),
            np.int32(index),
            np.int32(self.client),  # traced: clients of one size share a compiled program
            cohort_size=self.simulation.cohort_size_at(index),
        )
        row = np.concatenate([leaf.ravel() for leaf in _leaves(sent.upload)])
        finite, clamped = bool(sent.finite[0]), int(sent.clamped[0])
        aggregation = self.simulation.aggregation
        if aggregation is not None and finite:
            if row.dtype == np.int32:
                row = encoding.words(row, aggregation.how)
            else:
                row, clamped = encoding.encode(row, aggregation.how)
            if aggregation.noise_std is not None:
                steps = 2.0**aggregation.how.scale_bits * float(np.asarray(sent.weight, np.float64)[0])
                std = aggregation.noise_std(index, self.client, self.simulation.cohort_size_at(index)) * steps
                row = add_discrete(row, std, self.simulation.words(self._seed, index, self.client))
        return Answer(row, _leaves(sent.state), finite, clamped)


class ServerEngine:
    """The server: it holds its state and the records it scores the model on, none of the clients'."""

    def __init__(
        self, settings: RunSettings, x_test: np.ndarray, y_test: np.ndarray, *, sizes: np.ndarray
    ) -> None:
        self.simulation = simulation = settings.simulation
        self.scored = len(y_test)
        if not self.scored:  # shapes need a record; nothing is computed from it
            x_test, y_test = np.zeros((1, *x_test.shape[1:]), x_test.dtype), np.zeros(1, y_test.dtype)
        rows = np.arange(len(y_test), dtype=np.int32)
        weights = np.full(len(y_test), 1.0 / len(y_test))
        partition = ClientPartition(rows, np.zeros_like(sizes), sizes, ())
        self.inputs = settings.inputs(Problem(x_test, y_test, [partition], [rows], [weights]))
        state = simulation.start(self.inputs)

        def message(server: PyTree, run: RunInputs) -> PyTree:
            return simulation.build(run.hyper).message(server)

        def upload(state: State, run: RunInputs) -> PyTree:
            client_state, first = jax.tree.map(lambda leaf: leaf[0], state.clients), jnp.int32(0)
            shared, size = self.inputs.shared, simulation.cohort_size_at(0)
            sent = simulation.sent(message(state.server, run), client_state, run, shared, first, first, size)
            return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), sent.upload)

        shapes = jax.eval_shape(jax.vmap(upload), state, self.inputs.runs)
        zeros, self._as_upload = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), shapes))
        self.dimension = zeros.size
        # What clients keep stays with them: the server's state has no place for it.
        self.state = state._replace(clients=())
        self._message = jax.jit(lambda state, inputs: jax.vmap(message)(state.server, inputs.runs))
        self._close = jax.jit(self._close_runs, static_argnames="cohort_size")

    def message(self) -> Leaves:
        """What is broadcast in the next round."""
        return _leaves(self._message(self.state, self.inputs))

    def close(self, index: int, total: np.ndarray, counted: np.ndarray, present: np.ndarray) -> None:
        """End round `index` with the sum of the uploads that counted. `present` are those of the cohort whose
        answers came; who was present and does not count was refused. Who answered too few: nothing changes."""
        self.state = self._close(
            self.state,
            self.simulation.with_noise_key(self.inputs),
            np.int32(index),
            np.asarray(total, np.float32)[None],
            np.asarray(counted, bool)[None],
            np.asarray(present, bool)[None],
            cohort_size=len(counted),
        )

    def sum(self, rows: list[np.ndarray]) -> np.ndarray:
        """Uploads in the open, added one after the other."""
        total = np.zeros(self.dimension, np.float32)
        for row in rows:
            total = total + row
        return total

    def evaluate(self) -> dict[str, float]:
        """Accuracy (or R²) and loss on the server's own test records; nothing if it has none."""
        if not self.scored:
            return {}
        scores = self.simulation.evaluate(self.state, self.inputs)
        return {name: float(scores[name][0]) for name in ("test_accuracy", "test_r2", "loss") if name in scores}

    def params(self) -> PyTree:
        """The model."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], self.simulation.params(self.state, self.inputs))

    def save(self) -> Leaves:
        """The state as arrays."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]

    # reason: what a compiled program takes, array by array
    def _close_runs(
        self, state: State, inputs: Inputs, index: Any, total: Any, counted: Any, present: Any, cohort_size: int
    ) -> State:
        def close(state: State, run: RunInputs, total: Any, counted: Any, present: Any) -> State:
            gathered = Gathered(
                total=self._as_upload(total),
                states=(),
                metrics={name: jnp.zeros(()) for name in state.metrics},
                counted=counted,
                finite=counted,
                clamped=jnp.int32(0),
            )
            cohort, _ = self.simulation.cohort(run, index, cohort_size)
            return self.simulation.close(state, run, index, cohort, present, gathered, cohort_size)

        return jax.vmap(close)(state, inputs.runs, total, counted, present)


def _leaves(tree: PyTree) -> Leaves:
    """The arrays of a tree, without the axis of runs."""
    return [np.asarray(leaf)[0] for leaf in jax.tree.leaves(tree)]


def _tree(structure: Any, leaves: Leaves) -> PyTree:
    return jax.tree.unflatten(structure, [jnp.asarray(leaf)[None] for leaf in leaves])
