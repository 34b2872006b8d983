"""The simulator: clients vmapped, local steps and rounds in compiled loops, whole sweeps as one program.

    simulation = Simulation(model, build, num_clients=100, cohort_size_at=lambda index: 50)
    inputs = simulation.inputs(problem, seeds=[0, 1], hyper={"client_lr": [0.1, 0.2]})
    state = simulation.start(inputs)
    state = simulation.advance(state, inputs, 0, 100)      # 100 rounds, one call
    simulation.evaluate(state, inputs)

or all of it as `simulate(...)`. Every array has a leading axis of runs; a single run is the batch of one.
What a sweep varies (`hyper`, seeds, who holds which rows) is traced, so that one compilation serves a grid
and any number of rounds. Rounds are counted by a traced loop bound: no memory grows with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dither import models
from dither.data import ClientPartition
from dither.errors import SpecError
from dither.privacy import clipping, entropy, noise, sampling
from dither.privacy.discrete import Words, os_words
from dither.secagg import encoding
from dither.simulation import arrays, devices, distributed
from dither.simulation.aggregation import Aggregation, Aggregator, add_discrete, seeded_words
from dither.simulation.arrays import (
    ONE_DEVICE,
    ClientUpload,
    Gathered,
    RunInputs,
    Shards,
    Shared,
    all_finite,
    masked_sum,
    running_sum,
    sum_in_memory,
    sum_unfused,
)
from dither.simulation.arrays import Inputs as Inputs  # also under this module's name
from dither.simulation.arrays import Problem as Problem
from dither.simulation.arrays import State as State
from dither.simulation.devices import Clock, KeptProgram, kept_numbers
from dither.types import Algorithm, Array, Cohort, Hyper, Keys, Params, PyTree, Records, Round

_WORDS_AHEAD = 1 << 19  # words of protected noise, 2 MiB, that the host may draw at a time for later rounds


class Evaluation(NamedTuple):
    """One row of the history; arrays have one entry a run."""

    round: int
    metrics: dict[str, np.ndarray]


class SimulationResult(NamedTuple):
    """What `simulate` returns; every array has a leading axis of runs."""

    params: Params
    history: list[Evaluation]
    participation: np.ndarray
    refused: np.ndarray
    state: State


@dataclass(eq=False, repr=False)
class Simulation:
    """A method compiled for a federation of fixed shape.

    layout "vmap" runs a round's clients side by side, "loop" one after the other with the sum carried along
    (less memory; faster on a CPU once a model and its batch fill its caches). "auto" chooses by device and size of
    the model (`experiment.build`, which knows the batches, also by those). Both give the same result up to
    the rounding of the sum.

    randomness "seeded" draws all from the runs' seeds: the same bits again. "os" takes the noise of clients and
    server from OS entropy, fresh at every draw, and chooses batches by keys that `inputs` draws anew for each run,
    so that the public seed does not give them away. The seed still fixes the initial model, the partition and the
    cohorts: who takes part is public in every proof of Dither.

    `aggregation` sums integers as secure aggregation does (`simulation.aggregation`); without it uploads are
    summed as they are. A chosen client is lost with probability `dropout`; a round that fewer than `min_clients`
    finish is void: nothing is opened and the model stays.

    Every upload is finite, whatever the records are, and lies in the ball of radius `max_norm` (0: each coordinate
    within `clipping.REACH`). With `refuse`, which is for methods that protect no record, an upload that is not
    finite is left out instead, and its sender counted.

    `shards` spreads runs and a round's clients over devices. On each device its runs go side by side, or, with
    `sequential_runs`, one after the other: a CPU's caches prefer that once a run's arrays are large.

    `wide_vectors` compiles for vectors of 512 bits on a CPU that has them (XLA's own choice is 256), at which
    noise is drawn twice as fast. Products of two matrices keep their bits; others are added in another order.

    gradient_norm adds "gradient_sq" to the evaluation: |∇f|² of the mean loss over all clients' records.

    `program_key` names all that the compiled programs depend on besides the arguments' shapes; with it they are
    kept for the next process (`devices.KeptProgram`).
    """

    # A federation's shape and how its rounds are computed; each has a default that fits one small run
    model: models.Model
    build: Callable[[Hyper], Algorithm]
    _: KW_ONLY
    num_clients: int
    cohort_size_at: Callable[[int], int]
    layout: str = "auto"
    pad_cohort: int = 0
    randomness: str = "seeded"
    aggregation: Aggregation | None = None
    dropout: float = 0.0
    min_clients: int = 1
    max_norm: float = 0.0
    refuse: bool = False
    gradient_norm: bool = False
    shards: Shards = ONE_DEVICE
    sequential_runs: bool = False
    wide_vectors: bool = False
    program_key: str = ""

    def __post_init__(self) -> None:
        devices.set_up()
        if noise.check_source(self.randomness) == "os":
            devices.check_protected()
        if self.aggregation:
            self.aggregation.check()
        self.aggregators: list[Aggregator] = []  # one a run, where sums are made on the host
        self._smallest = min(self.cohort_size_at(0), self.cohort_size_at(1))  # a first round may take everyone
        if self.layout == "auto":
            shapes = jax.eval_shape(self.model.init, jax.random.key(0))
            self.layout = "loop" if devices.sequential_clients(models.count_params(shapes)) else "vmap"
        if self.layout not in ("vmap", "loop"):
            raise SpecError(f"layout={self.layout!r} is not one of 'auto', 'vmap', 'loop'")
        if not self.shards.alone and self.aggregation and not self.aggregation.compiled:
            raise SpecError(
                f"{self.shards.devices} devices with secure aggregation {self.aggregation.mode!r}, which sums on "
                "the host: use shards=ONE_DEVICE"
            )

        def program(function: Callable[..., Any], arguments: str, **options: Any) -> KeptProgram:
            """Each argument has a letter: "r" if it has an axis of runs, "." if not."""
            name = f"{self.program_key} {function.__name__}" if self.program_key else ""
            jitted = self.shards.jit(function, arguments, wide_vectors=self.wide_vectors, **options)
            return KeptProgram(jitted, name, awaited=self.shards.meeting_on_cpu)

        self._start = program(self._start_runs, "r.")
        self._advance = program(self._advance_runs, "rr...", static_argnames="cohort_size", donate_argnums=0)
        self._gather = jax.jit(self._gather_runs, static_argnames="cohort_size")
        self._close = jax.jit(self._close_runs, static_argnames="cohort_size", donate_argnums=0)
        self._evaluate = program(self._evaluate_runs, "rr.")
        self._params = program(self._params_runs, "rr")

    # What a caller does

    def inputs(
        self,
        problem: Problem,
        *,
        seeds: Sequence[int],
        hyper: Mapping[str, Any],
        cohorts: Sequence[np.ndarray] | None = None,
    ) -> Inputs:
        """Arrays on the device for a batch of runs. Each entry of `hyper` has a leading axis of runs."""
        runs = len(seeds)
        for name, value in hyper.items():
            if np.shape(value)[:1] != (runs,):
                raise SpecError(f"hyper[{name!r}] has shape {np.shape(value)}, expected {runs} runs in front")
        partitions = _one_a_run(problem.partitions, runs, "partitions")
        for partition in partitions:
            if len(partition.size) != self.num_clients:
                raise SpecError(
                    f"the partition has {len(partition.size)} clients, expected num_clients={self.num_clients}"
                )
        # Converted by NumPy: each conversion by JAX is a small program of its own, at the start of every run.
        seed = jnp.asarray(np.array(seeds, np.uint32))
        runs_inputs = RunInputs(
            seed=seed,
            secret=noise.fresh_keys(runs) if self.randomness == "os" else seed,
            hyper={name: jnp.asarray(np.asarray(value, np.float32)) for name, value in hyper.items()},
            order=_whole([f.order for f in partitions]),
            start=_whole([f.start for f in partitions]),
            size=_whole([f.size for f in partitions]),
            test_rows=_whole(_one_a_run(problem.test_rows, runs, "test_rows")),
            test_weights=jnp.asarray(
                np.stack(_one_a_run(problem.test_weights, runs, "test_weights")).astype(np.float32)
            ),
            cohorts=_whole(_one_a_run(cohorts or [np.zeros((0, 0))], runs, "cohorts")),
            train_rows=_whole(_one_a_run(problem.train_rows, runs, "train_rows")) if problem.train_rows else None,
        )
        records = Shared(problem.x, problem.y)
        # Among processes each puts its own on its devices, straight from the host.
        apart = distributed.count() > 1 and not self.shards.alone
        return Inputs(*self.shards.place(runs_inputs, records if apart else jax.device_put(records)))

    def start(self, inputs: Inputs) -> State:
        """The state before round 0."""
        self.aggregators = []  # another federation enrols anew
        state: State = self._start(*inputs)
        return state

    def advance(self, state: State, inputs: Inputs, start: int, stop: int) -> State:
        """Rounds start..stop-1. The given state's buffers are reused: keep only what is returned."""
        if self.aggregation and not self.aggregation.compiled:
            for index in range(start, stop):
                state = self._round_on_host(state, inputs, index, self.aggregation)
            return state
        while start < stop:
            cohort_size = self.cohort_size_at(start)
            end = start + 1
            while end < stop and self.cohort_size_at(end) == cohort_size:
                end += 1
            fresh = self.with_noise_key(inputs)
            state = self._advance(state, *fresh, np.int32(start), np.int32(end), cohort_size=cohort_size)
            start = end
        return state

    def with_noise_key(self, inputs: Inputs) -> Inputs:
        """The inputs of one call that draws protected noise. On an accelerator each call, a repeated one too, gets
        a key of its own; on a CPU the host draws one whenever it is asked for noise."""
        if self.randomness != "os" or jax.default_backend() == "cpu":
            return inputs
        return inputs._replace(runs=inputs.runs._replace(noise_key=entropy.fresh_key(len(inputs.runs.seed))))

    def evaluate(self, state: State, inputs: Inputs) -> dict[str, np.ndarray]:
        """Accuracy (or R²) and loss on the scored records, loss on the clients' own records, and the mean of the
        clients' metrics since the last reset; one entry a run."""
        scores: dict[str, np.ndarray] = distributed.fetched(self._evaluate(state, *inputs))
        return scores

    def params(self, state: State, inputs: Inputs) -> Params:
        """The model's parameters, with a leading axis of runs."""
        return self._params(state.server, inputs.runs.hyper)

    def sizes(self, state: State, inputs: Inputs) -> tuple[int, int]:
        """Numbers in a broadcast and in an upload."""

        def message_and_upload(state: State, run: RunInputs) -> tuple[PyTree, PyTree]:
            client = self._client(state, run, inputs.shared, jnp.int32(0), self.cohort_size_at(0))
            return self.build(run.hyper).message(state.server), client(jnp.int32(0)).upload

        def counted() -> tuple[int, ...]:
            one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (state, inputs.runs))
            return tuple(map(models.count_params, jax.eval_shape(message_and_upload, *one)))

        message, upload = kept_numbers(self.program_key and f"{self.program_key} sizes", counted)
        return message, upload

    # What is compiled

    def _start_runs(self, runs: RunInputs, shared: Shared) -> State:
        return jax.vmap(lambda run: self._start_run(run, shared))(runs)

    def _start_run(self, run: RunInputs, shared: Shared) -> State:
        algorithm = self.build(run.hyper)
        params = self.initial(run)
        server = algorithm.init(params)
        one = algorithm.client_init(params)
        clients = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.num_clients, *leaf.shape)), one)
        number = jnp.int32(0)
        result = jax.eval_shape(
            lambda: algorithm.client(
                client_keys(run.secret, number, number, self._noise_root(run)),
                algorithm.message(server),
                one,
                _records(run, shared, number),
                Round(number, number, jnp.int32(1)),
            )
        )
        return State(
            server=server,
            clients=clients,
            participation=jnp.zeros(self.num_clients, jnp.int32),
            refused=jnp.zeros(self.num_clients, jnp.int32),
            lost=jnp.zeros(self.num_clients, jnp.int32),
            missing=jnp.zeros((), jnp.int32),
            void=jnp.zeros((), jnp.int32),
            clamped=jnp.zeros((), jnp.int32),
            metrics={name: jnp.zeros(()) for name in result.metrics},
            rounds=jnp.zeros((), jnp.int32),
        )

    def initial(self, run: RunInputs) -> Params:
        """The model before the first round."""
        return self.model.init(noise.stream(run.seed, "init"))

    def _advance_runs(
        self, state: State, runs: RunInputs, shared: Shared, start: Array, stop: Array, *, cohort_size: int
    ) -> State:
        def rounds(state: State, run: RunInputs) -> State:
            client_words = self._words_ahead(state, run, shared, cohort_size)
            if client_words:
                return self._rounds_ahead(state, run, shared, (start, stop), cohort_size, client_words)

            def one(index: Array, state: State) -> State:
                return self._round(state, run, shared, index, cohort_size)

            after: State = jax.lax.fori_loop(start, stop, one, state)
            return after

        if self.sequential_runs:
            state = jax.lax.map(lambda one: rounds(*one), (state, runs))
            return state
        return jax.vmap(rounds)(state, runs)

    def _words_ahead(self, state: State, run: RunInputs, shared: Shared, cohort_size: int) -> int:
        """How many words of protected noise a client uses in a round, where those of several rounds are drawn
        ahead: on a CPU, for clients that draw once and little. The host is then asked every few rounds alone."""
        if self.randomness != "os" or run.noise_key is not None:
            return 0
        client = self._client(state, run, shared, jnp.int32(0), cohort_size)
        words = entropy.words_of_one_draw(client, jnp.int32(0))
        return words if 2 * words * cohort_size <= _WORDS_AHEAD else 0

    # reason: one run's arrays, all traced
    def _rounds_ahead(
        self,
        state: State,
        run: RunInputs,
        shared: Shared,
        span: tuple[Array, Array],
        cohort_size: int,
        client_words: int,
    ) -> State:
        """The rounds from `span[0]` on up to `span[1]`, several at a time with words that are drawn together."""
        start, stop = span
        clients = self.shards.part(self.cohort(run, start, cohort_size)[0].clients).shape[0]
        rounds = max(1, _WORDS_AHEAD // (clients * client_words))

        def some(reached: tuple[Array, State]) -> tuple[Array, State]:
            first, state = reached
            words = self._noise_root(run).words(rounds * clients * client_words)
            words = words.reshape(rounds, clients, client_words)

            def one(index: Array, state: State) -> State:
                return self._round(state, run, shared, index, cohort_size, words[index - first])

            end = jnp.minimum(first + rounds, stop)
            return end, jax.lax.fori_loop(first, end, one, state)

        after: State = jax.lax.while_loop(lambda reached: reached[0] < stop, some, (start, state))[1]
        return after

    # reason: one run's arrays, all traced
    def _round(
        self,
        state: State,
        run: RunInputs,
        shared: Shared,
        index: Array,
        cohort_size: int,
        words: Array | None = None,
    ) -> State:
        """One round of one run: the steps of docs/architecture.md, in their order. `words` are those of the
        clients' noise where they were drawn ahead, one row for each client of this device."""
        with jax.named_scope("cohort"):
            cohort, present = self.cohort(run, index, cohort_size)
        clients, present_here = self.shards.part(cohort.clients), self.shards.part(present)
        client = self._client(state, run, shared, index, cohort_size)
        if words is None:
            gathered = self._clients(client, clients, present_here, index)
        else:
            gathered = self._clients(lambda entry: client(*entry), (clients, words), present_here, index)
        gathered = self.shards.whole(gathered)
        if self.aggregation:
            how = self.aggregation.how
            total = jax.tree.map(lambda leaf: encoding.traced_decode(leaf, how), gathered.total)
            gathered = gathered._replace(total=total)
        with jax.named_scope("close"):
            return self.close(state, run, index, cohort, present, gathered, cohort_size)

    def _client(
        self, state: State, run: RunInputs, shared: Shared, index: Array, cohort_size: int
    ) -> Callable[..., ClientUpload]:
        """A function that runs the round of one client, given its number and, if they were drawn ahead, the words
        of its noise."""
        message = self.build(run.hyper).message(state.server)

        def client(number: Array, words: Array | None = None) -> ClientUpload:
            client_state = jax.tree.map(lambda leaf: leaf[number], state.clients)
            return self.sent(message, client_state, run, shared, index, number, cohort_size, words)

        return client

    # reason: one client's arrays, all traced; shared with a real party
    def sent(
        self,
        message: PyTree,
        client_state: PyTree,
        run: RunInputs,
        shared: Shared,
        index: Array,
        number: Array,
        cohort_size: int,
        words: Array | None = None,
    ) -> ClientUpload:
        """What one client makes of a broadcast and the state it has kept, here and at a real party."""
        result = self.build(run.hyper).client(
            client_keys(run.secret, index, number, self._noise_root(run, words)),
            message,
            client_state,
            _records(run, shared, number),
            Round(index, number, jnp.int32(cohort_size)),
        )
        if self.aggregation and result.integers is not None:
            weight, kept, metrics = result.weight, clipping.reined(result.state), dict(result.metrics)
            return ClientUpload(result.integers, weight, kept, metrics, jnp.array(True), jnp.int32(0))
        # Of what was released already (post-processing), so that it takes no proof.
        upload, kept = result.upload, result.state
        if not self.refuse:
            upload, kept = clipping.reined((upload, kept))
        upload, clamped = clipping.projected(upload, self.max_norm), jnp.int32(0)
        finite = all_finite(upload)
        if self.aggregation and self.aggregation.how.modulus_bits == 32:
            leaves, structure = jax.tree.flatten(upload)
            encoded = [encoding.traced_encode(leaf, self.aggregation.how) for leaf in leaves]
            upload = jax.tree.unflatten(structure, [words for words, _ in encoded])
            clamped = sum((count for _, count in encoded), jnp.int32(0))
        return ClientUpload(upload, result.weight, kept, dict(result.metrics), finite, clamped)

    def _clients(
        self, client: Callable[[PyTree], ClientUpload], clients: PyTree, present: Array, index: Array
    ) -> Gathered:
        """All clients of a round, and the sum of the finite uploads of those who are present. `clients` has an
        entry for each along its arrays' first axis."""
        if self.layout == "loop" and not self.aggregation:
            return running_sum(client, clients, present)
        sent = self._each(client, clients)
        finite = sent.finite
        if self.aggregation:
            total = jax.tree.map(lambda leaf: sum_unfused(leaf, finite & present), sent.upload)
        elif jax.default_backend() == "cpu":
            total, finite = sum_in_memory(sent.upload, present, index)
        else:  # an accelerator would wait for the loop
            total = jax.tree.map(lambda leaf: masked_sum(leaf, finite & present), sent.upload)
        return arrays.gathered(sent, total, finite, present)

    def _each(self, client: Callable[[PyTree], ClientUpload], clients: PyTree) -> ClientUpload:
        """Every client's round, side by side or one after the other."""
        return jax.vmap(client)(clients) if self.layout == "vmap" else jax.lax.map(client, clients)

    # reason: one round's arrays, all traced; shared with the server of a real federation
    def close(
        self,
        state: State,
        run: RunInputs,
        index: Array,
        cohort: Cohort,
        present: Array,
        gathered: Gathered,
        cohort_size: int,
    ) -> State:
        """The state after a round whose sum is known."""
        algorithm = self.build(run.hyper)
        counted = gathered.counted
        used = jnp.sum(counted)
        # Updates that were left out are made up for by the others, so that the weights still sum to one.
        share = cohort.size / jnp.maximum(used, 1)
        total = jax.tree.map(lambda leaf: leaf * share, gathered.total)
        if self.aggregation and algorithm.decode:
            # A program of its own within any other: the compiler rounds it alike in a simulation and at a server.
            server, total = jax.lax.optimization_barrier((state.server, total))
            total = jax.lax.optimization_barrier(algorithm.decode(server, total, index, cohort.size))
        key = noise.for_round(noise.stream(self.shards.shared(self._noise_root(run)), "server"), index)
        server = algorithm.server(key, state.server, total, cohort._replace(active=counted, size=used))
        server = server if self.refuse else clipping.reined(server)
        enough = used >= self._least(cohort_size)
        server = jax.tree.map(lambda new, old: jnp.where(enough, new, old), server, state.server)

        nobody = self.num_clients  # out of range: a scatter drops it

        def those(mask: Array) -> Array:
            return jnp.where(mask, cohort.clients, nobody)

        may_lose = self.dropout > 0 or present is not cohort.active
        # Whoever sent has used its batches, whether or not the sum was opened.
        kept = those(counted)
        return State(
            server=server,
            clients=jax.tree.map(
                lambda leaf, new: leaf.at[kept].set(new, mode="drop"), state.clients, gathered.states
            ),
            participation=state.participation.at[those(cohort.active)].add(1, mode="drop"),
            refused=state.refused.at[those(present & ~gathered.finite)].add(1, mode="drop"),
            lost=state.lost.at[those(cohort.active & ~present)].add(1, mode="drop") if may_lose else state.lost,
            missing=jnp.maximum(state.missing, jnp.where(enough, self._smallest - used, 0)),
            void=state.void + ~enough,
            clamped=state.clamped + gathered.clamped,
            metrics={
                name: state.metrics[name] + value / jnp.maximum(used, 1)
                for name, value in gathered.metrics.items()
            },
            rounds=state.rounds + 1,
        )

    # Sums made on the host: the real protocol, or words that JAX does not have

    def _round_on_host(self, state: State, inputs: Inputs, index: int, aggregation: Aggregation) -> State:
        """One round of all runs: clients compiled, the sum by the protocol, then the server compiled."""
        runs, cohort_size = len(inputs.runs.seed), self.cohort_size_at(index)
        if not self.aggregators:
            self.aggregators = [Aggregator(aggregation, self.num_clients) for _ in range(runs)]
        inputs = self.with_noise_key(inputs)
        uploads, weights, gathered, clients = self._gather(state, inputs, np.int32(index), cohort_size=cohort_size)
        weights = np.asarray(weights, np.float64)
        rows = [np.asarray(leaf).reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(uploads)]
        vectors = np.concatenate(rows, axis=2)  # [run, client, coordinate]
        counted, clients = np.asarray(gathered.counted), np.asarray(clients)
        totals = np.zeros((runs, vectors.shape[2]), np.float32)
        clamped = np.asarray(gathered.clamped).copy()
        for run, aggregator in enumerate(self.aggregators):
            if counted[run].sum() < self._least(cohort_size):
                continue
            words = {}
            for row, client in enumerate(clients[run, :cohort_size].tolist()):
                if vectors.dtype == np.int32:
                    vector = encoding.words(vectors[run, row], aggregation.how)
                else:
                    # Whoever is lost never sends: its words are only there to be missed.
                    kept = vectors[run, row] if counted[run, row] else np.zeros_like(vectors[run, row])
                    vector, over = encoding.encode(kept, aggregation.how)
                    clamped[run] += over
                if aggregation.noise_std is not None:
                    steps = 2.0**aggregation.how.scale_bits * float(weights[run, row])
                    std = aggregation.noise_std(index, client, cohort_size) * steps
                    vector = add_discrete(vector, std, self.words(int(inputs.runs.seed[run]), index, client))
                words[client] = vector
            lost = {int(clients[run, row]): "before-upload" for row in np.flatnonzero(~counted[run, :cohort_size])}
            totals[run] = encoding.decode(aggregator.sum(index, words, lost), aggregation.how)
        gathered = gathered._replace(clamped=clamped)
        state = self._close(state, inputs, np.int32(index), gathered, totals, cohort_size=cohort_size)
        return state

    def words(self, seed: int, index: int, client: int) -> Words:
        """Random words for discrete noise: the system's, or those of the seed."""
        return os_words if self.randomness == "os" else seeded_words(seed, index, client)

    def _gather_runs(
        self, state: State, inputs: Inputs, index: Array, cohort_size: int
    ) -> tuple[PyTree, Array, Gathered, Array]:
        """Every client's upload and weight, the rest of the round, and whose uploads they are."""

        def gather(state: State, run: RunInputs) -> tuple[PyTree, Array, Gathered, Array]:
            cohort, present = self.cohort(run, index, cohort_size)
            sent = self._each(self._client(state, run, inputs.shared, index, cohort_size), cohort.clients)
            everything = arrays.gathered(sent, (), sent.finite, present)
            return sent.upload, sent.weight, everything, cohort.clients

        return jax.vmap(gather)(state, inputs.runs)

    def _close_runs(
        self,
        state: State,
        inputs: Inputs,
        index: Array,
        gathered: Gathered,
        totals: Array,
        cohort_size: int,
    ) -> State:
        def close(state: State, run: RunInputs, gathered: Gathered, total: Array) -> State:
            cohort, present = self.cohort(run, index, cohort_size)
            shapes = jax.eval_shape(self._client(state, run, inputs.shared, index, cohort_size), jnp.int32(0))
            leaves, structure = jax.tree.flatten(shapes.upload)
            ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
            parts = [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(total, ends), leaves, strict=True)]
            gathered = gathered._replace(total=jax.tree.unflatten(structure, parts))
            return self.close(state, run, index, cohort, present, gathered, cohort_size)

        return jax.vmap(close)(state, inputs.runs, gathered, totals)

    def _least(self, cohort_size: int) -> int:
        """The number of clients below which a round is void."""
        needed = self.aggregation.rules.least(cohort_size) if self.aggregation else 0
        return max(self.min_clients, needed)

    def _noise_root(self, run: RunInputs, words: Array | None = None) -> Any:
        if self.randomness == "seeded":
            return run.seed
        return entropy.OsEntropy(run.noise_key, ahead=words).over(run.seed)

    def cohort(self, run: RunInputs, index: Array, cohort_size: int) -> tuple[Cohort, Array]:
        """Who is chosen, and which of them are there when uploads are collected."""
        if run.cohorts.size:
            chosen = run.cohorts[index]
        else:
            key = noise.for_round(noise.stream(run.seed, "cohort"), index)
            chosen = sampling.cohort(key, self.num_clients, cohort_size)
        padding = self.pad_cohort + self.shards.lacking(cohort_size + self.pad_cohort)
        clients = jnp.concatenate([chosen, jnp.zeros(padding, jnp.int32)]) if padding else chosen
        active = jnp.arange(cohort_size + padding) < cohort_size
        present = active
        if self.dropout:
            key = noise.for_round(noise.stream(run.seed, "dropout"), index)
            present = active & ~jax.random.bernoulli(key, self.dropout, active.shape)
        return Cohort(clients, active, jnp.int32(cohort_size)), present

    def _evaluate_runs(self, state: State, runs: RunInputs, shared: Shared) -> dict[str, Array]:
        def evaluate(one: tuple[State, RunInputs]) -> dict[str, Array]:
            state, run = one
            params = self.build(run.hyper).params(state.server)
            scored = arrays.Scored(self.model, params, shared, self.shards)
            test_score, test_loss = scored.test_score(run.test_rows, run.test_weights)
            train_rows = run.order if run.train_rows is None else run.train_rows
            _, train_loss = scored.score(train_rows, jnp.full(train_rows.shape[0], 1.0 / train_rows.shape[0]))
            rounds = jnp.maximum(state.rounds, 1)
            return {
                **test_score,
                "loss": test_loss,
                "train_loss": train_loss,
                **({"gradient_sq": scored.gradient_sq(train_rows)} if self.gradient_norm else {}),
                **{name: value / rounds for name, value in state.metrics.items()},
            }

        # One run after the other: scoring many side by side would hold all their activations at once.
        scores: dict[str, Array] = jax.lax.map(evaluate, (state, runs))
        return scores

    def _params_runs(self, server: PyTree, hyper: Hyper) -> Params:
        return jax.vmap(lambda server, hyper: self.build(hyper).params(server))(server, hyper)


# reason: a batch of runs: what is trained, on what, and how long
def simulate(
    build: Callable[[Hyper], Algorithm],
    model: models.Model,
    problem: Problem,
    *,
    num_rounds: int,
    cohort_size: int | Callable[[int], int],
    seeds: Sequence[int] = (0,),
    hyper: Mapping[str, Any] | None = None,
    cohorts: Sequence[np.ndarray] | None = None,
    eval_every: int = 10,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    **options: Any,
) -> SimulationResult:
    """Train. `build(hyper)` makes the algorithm; each entry of `hyper` has a leading axis of runs, as many as
    `seeds`. Evaluates every `eval_every` rounds and after the last. `options` are those of `Simulation`."""
    simulation = Simulation(
        model,
        build,
        num_clients=len(problem.partitions[0].size),
        cohort_size_at=cohort_size if callable(cohort_size) else lambda index: cohort_size,
        **options,
    )
    inputs = simulation.inputs(problem, seeds=seeds, hyper=hyper or {}, cohorts=cohorts)
    return train(simulation, inputs, num_rounds=num_rounds, eval_every=eval_every, on_evaluation=on_evaluation)


def train(
    simulation: Simulation,
    inputs: Inputs,
    *,
    num_rounds: int,
    eval_every: int = 10,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    clock: Clock | None = None,
    from_start: bool = False,
) -> SimulationResult:
    """All rounds of a batch of runs, from the start. `from_start` scores the initial model too, as round 0. A
    second batch of the same shape compiles nothing."""
    clock = clock or Clock()
    with clock("start_up"):
        state = simulation.start(inputs)
    history = [Evaluation(0, simulation.evaluate(state, inputs))] if from_start else []
    for start, stop in chunks(0, num_rounds, eval_every):
        with clock("rounds"):
            state = jax.block_until_ready(simulation.advance(state, inputs, start, stop))
        with clock("evaluation"):
            evaluation = Evaluation(stop, simulation.evaluate(state, inputs))
            state = reset_metrics(state)
        history.append(evaluation)
        if on_evaluation:
            on_evaluation(evaluation)
    return SimulationResult(
        params=simulation.params(state, inputs),
        history=history,
        participation=distributed.fetched(state.participation),
        refused=distributed.fetched(state.refused),
        state=state,
    )


def chunks(done: int, num_rounds: int, eval_every: int) -> list[tuple[int, int]]:
    """Spans of rounds between evaluations: they end at multiples of `eval_every` and at the last round."""
    ends = [*range(eval_every, num_rounds, eval_every), num_rounds]
    starts = [0, *ends[:-1]]
    return [(max(start, done), end) for start, end in zip(starts, ends, strict=True) if end > max(start, done)]


def reset_metrics(state: State) -> State:
    """The state with the sums of metrics emptied."""

    def zeros(value: Array) -> Array:  # where the value lies: the compiled rounds take no other place
        several = len(value.sharding.device_set) > 1
        return jnp.zeros_like(value, device=value.sharding if several else None)

    return state._replace(
        metrics={name: zeros(value) for name, value in state.metrics.items()}, rounds=zeros(state.rounds)
    )


def problem(
    x: np.ndarray, y: np.ndarray, partition: ClientPartition, x_test: np.ndarray, y_test: np.ndarray
) -> Problem:
    """A problem with one partition and one test set that every run shares."""
    count = len(y)
    rows = np.arange(count, count + len(y_test))
    weights = np.full(len(y_test), 1.0 / max(len(y_test), 1))
    return Problem(np.concatenate([x, x_test]), np.concatenate([y, y_test]), [partition], [rows], [weights])


def planned_cohorts(
    seed: int,
    *,
    num_clients: int,
    cohort_size_at: Callable[[int], int],
    design: np.ndarray | None,
    num_rounds: int,
) -> list[np.ndarray]:
    """The cohort of each round, by the draws that the compiled rounds make. Participation depends on the seed
    alone, never on data or results."""
    if design is not None:
        return list(np.asarray(design[:num_rounds]))
    sizes = np.array([cohort_size_at(index) for index in range(num_rounds)], int)
    cohorts: list[np.ndarray] = [np.zeros(0, np.int32)] * num_rounds
    for size in np.unique(sizes):
        rounds = np.flatnonzero(sizes == size)
        if size == num_clients:
            drawn = np.broadcast_to(np.arange(num_clients, dtype=np.int32), (len(rounds), num_clients))
        else:
            drawn = sampling.planned_cohorts(seed, rounds, num_clients, int(size))
        for at, chosen in zip(rounds, drawn, strict=True):
            cohorts[at] = chosen
    return cohorts


def client_keys(root: Any, index: Array, client: Array, noise_root: Any = None) -> Keys:
    """A client's keys in one round. `root` opens the run's streams, `noise_root` that of the noise if given."""

    def this_round(root: Any, name: str) -> Any:
        return noise.for_client(noise.for_round(noise.stream(root, name), index), client)

    return Keys(
        batch=this_round(root, "batch"),
        epoch=noise.for_client(noise.stream(root, "epoch"), client),
        noise=this_round(root if noise_root is None else noise_root, "noise"),
    )


def _records(run: RunInputs, shared: Shared, client: Array) -> Records:
    return Records(shared.x, shared.y, run.order, run.start[client], run.size[client])


def _whole(arrays: Sequence[np.ndarray]) -> Array:
    return jnp.asarray(np.stack(arrays).astype(np.int32))


def _one_a_run(values: Sequence[Any], runs: int, name: str) -> list[Any]:
    if len(values) == 1:
        return [values[0]] * runs
    if len(values) != runs:
        raise SpecError(f"{len(values)} {name} for {runs} runs; give one, or one per run")
    return list(values)
