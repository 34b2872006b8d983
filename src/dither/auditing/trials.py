"""Trials of an attack, on the code path of a run: the method's own client and server functions, thousands at once.

A trial is one run of the target's participations. Its seed opens the same streams of batches and noise as a run's
seed. What the adversary sees of a participation is projected on one direction: from the noiseless output of one
neighbour to that of the other. One compiled program serves both neighbours, every pair and the noiseless draws:
data, noise, broadcast and direction are its inputs.

upload      each upload of the target, and one of another client, whose noise must be independent
sum         the sum of the honest cohort's uploads
broadcast   what each broadcast adds to the one before, and `exposures` uploads of the target before that
final       the parameters after the last round

`run_canaries` puts many canaries into one run instead (Steinke, Nasr, Jagielski 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import models
from dither.auditing.neighbours import CANARY_NORM, Example, TrialData, certain_start, stack
from dither.errors import SpecError
from dither.experiment.build import Experiment
from dither.privacy import clipping, noise, sampling
from dither.simulation import devices, engine
from dither.types import Algorithm, Array, ClientResult, Cohort, Hyper, Keys, Params, PyTree, Records, Round

VIEWS = ("upload", "sum", "broadcast", "final")
LARGE_MODEL = 20_000  # parameters above which no other client's upload is looked at beside the target's
_FLOATS_AT_ONCE = 8e6  # of one batch of trials
_MOST_AT_ONCE = 1024

KeysOf = Callable[[Any, Array, Array], Keys]


class CodeUnderAudit(NamedTuple):
    """How to build the algorithm, and how a seed becomes a client's keys."""

    build: Callable[[Hyper], Algorithm]
    hyper: dict[str, Any]
    noise_names: tuple[str, ...]
    client_state: bool
    keys: KeysOf = engine.client_keys

    @classmethod
    def of(cls, experiment: Experiment) -> CodeUnderAudit:
        """The code that a run of this experiment executes."""
        prepared = experiment.prepared
        return cls(prepared.build, dict(prepared.hyper), prepared.plan.noise_names, prepared.plan.client_state)

    def with_noise(self, factor: float) -> dict[str, Any]:
        """The hyper-parameters with every noise at a factor of the planned one."""
        return {k: np.asarray(v) * factor if k in self.noise_names else v for k, v in self.hyper.items()}


class TargetSchedule(NamedTuple):
    """Which rounds are seen, who takes part, and which of them is the target."""

    target: int
    rounds: np.ndarray  # [T]
    cohorts: np.ndarray  # [T, r], the target first, padded with -1
    cohort_sizes: np.ndarray  # [T], as the clients are told

    def first(self, rounds: int) -> TargetSchedule:
        """The first so many rounds."""
        return TargetSchedule(self.target, self.rounds[:rounds], self.cohorts[:rounds], self.cohort_sizes[:rounds])


def target_schedule(
    cohorts: Sequence[np.ndarray],
    sizes: np.ndarray,
    *,
    view: str,
    rounds: int | None,
    colluders: int = 0,
    target: int | None = None,
) -> TargetSchedule:
    """The rounds an audit looks at: those of the target, by default the most exposed client.

    For uploads and sums only the target's own rounds matter; broadcasts and the final model depend on all.
    Colluders are left out of the sum: they know their own part and subtract it. `rounds` cuts the schedule.
    """
    target = most_exposed(cohorts, sizes) if target is None else target
    chosen = [t for t, members in enumerate(cohorts) if target in members or view in ("broadcast", "final")]
    chosen = chosen[: rounds if rounds else len(chosen)]
    rows = []
    for t in chosen:
        others = [int(c) for c in cohorts[t] if int(c) != target]
        others = others[:1] if view == "upload" else others[colluders:]
        # In rounds without the target, the first of the others has the first place.
        rows.append([target, *others] if target in cohorts[t] else others)
    table = np.full((len(rows), max(len(row) for row in rows)), -1, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return TargetSchedule(target, np.array(chosen), table, np.array([len(cohorts[t]) for t in chosen]))


def most_exposed(cohorts: Sequence[np.ndarray], sizes: np.ndarray) -> int:
    """The client that takes part most often; of several, the one with the fewest records."""
    counts = np.bincount(np.concatenate(cohorts), minlength=len(sizes)) if len(cohorts) else np.zeros(len(sizes))
    most = np.flatnonzero(counts == counts.max())
    return int(most[np.argmin(np.asarray(sizes)[most])])


def batch_width(experiment: Experiment) -> int:
    """Records that one local step reads."""
    spec, sizes = experiment.spec, np.asarray(experiment.partition.size)
    if spec.batch_sampling in ("full", "poisson-full"):
        return int(sizes.max())
    sampler = sampling.make(
        spec.batch_sampling,
        batch_size=min(spec.batch_size, int(sizes.min())),
        local_steps=1,
        client_sizes=sizes,
        sampling_rate=spec.sampling_rate,
    )
    return sampler.width


class Observations(NamedTuple):
    """Projections `[trials, T]`, and those of another client's upload (view upload; else zeros)."""

    target: np.ndarray
    other: np.ndarray


class TrialInputs(NamedTuple):
    """What the compiled program reads besides seeds."""

    hyper: dict[str, Any]
    noiseless: dict[str, Any]  # what the adversary can compute without the target
    data: TrialData
    reference: TrialData  # the neighbour without the canary, for the adversary's own expectation
    start: Params
    direction: Array


class _RoundEntry(NamedTuple):
    """One scanned round; `exposed`: the adversary sees the target's upload itself."""

    index: Array
    members: Array
    cohort_size: Array
    exposed: Array


class PairedTrials:
    """The trials of one view, compiled for one schedule."""

    def __init__(self, experiment: Experiment, code: CodeUnderAudit, view: str, schedule: TargetSchedule) -> None:
        devices.set_up()
        self.code, self.schedule = code, schedule
        self.kind = "rounds" if view in ("broadcast", "final") else view  # these two share a program
        self.sizes = np.asarray(experiment.partition.size, np.int32)
        self.exposures = experiment.plan.exposures if self.kind == "rounds" else 0
        self.leaving = _leaving(experiment)
        others = [int(c) for c in schedule.cohorts.ravel() if c >= 0 and c != schedule.target]
        large = experiment.num_params > LARGE_MODEL
        self.other = None if large or not others else others[0]  # the client whose upload is seen too
        members = schedule.cohorts.shape[1] if view != "upload" else 1 if large else 2
        floats = members * (
            3 * experiment.num_params + batch_width(experiment) * (experiment.problem.x.shape[1] + 8)
        )
        self.at_once = int(np.clip(_FLOATS_AT_ONCE / max(float(floats), 1.0), 1, _MOST_AT_ONCE))
        self._program = jax.jit(self._trials)
        self._first_output = jax.jit(self._first_participation)

    # Called from outside

    def inputs(
        self, data: TrialData, reference: TrialData, start: Params, direction: np.ndarray, *, noise: float
    ) -> TrialInputs:
        """What trials on `data` read; `noise` is a factor of the planned one."""
        hyper, noiseless = (float32(self.code.with_noise(factor)) for factor in (noise, 0.0))
        return TrialInputs(hyper, noiseless, data, reference, start, jnp.asarray(direction, jnp.float32))

    def direction(self, inside: TrialData, outside: TrialData, start: Params) -> np.ndarray:
        """The unit vector from the noiseless output without the canary to that with it."""
        outputs = []
        for data in (inside, outside):
            inputs = self.inputs(data, outside, start, np.zeros(1), noise=0.0)
            outputs.append(np.asarray(self._first_output(inputs, jnp.uint32(0)), np.float64))
        difference = outputs[0] - outputs[1]
        length = float(np.linalg.norm(difference))
        return np.asarray(difference / length if length > 0 else difference)

    def observe(self, inputs: TrialInputs, seeds: np.ndarray, *, final: bool = False) -> Observations:
        """Trials with these seeds. `final` looks at the last model alone."""
        at_once, pieces = self.at_once, []  # always as many, so that one compilation serves any number of trials
        for first in range(0, len(seeds), at_once):
            some = seeds[first : first + at_once]
            padded = np.concatenate([some, np.repeat(some[-1:], at_once - len(some))]).astype(np.uint32)
            both = self._program(inputs, jnp.asarray(padded))
            pieces.append([np.asarray(side[: len(some)], np.float64) for side in both])
        target, other = (np.concatenate(side) for side in zip(*pieces, strict=True))
        if self.kind == "rounds":
            columns = slice(-1, None) if final else slice(0, -1)
            target, other = target[:, columns], other[:, columns]
        return Observations(target, other)

    # Compiled

    def _trials(self, inputs: TrialInputs, seeds: Array) -> tuple[Array, Array]:
        one = self._upload_trial if self.kind == "upload" else self._cohort_trial
        return jax.vmap(lambda seed: one(inputs, seed))(seeds)

    def _upload_trial(self, inputs: TrialInputs, seed: Array) -> tuple[Array, Array]:
        """The server sees each upload and chooses each broadcast, so every round starts from the same one."""
        algorithm = self.code.build(inputs.hyper)
        message = algorithm.message(algorithm.init(inputs.start))
        target = jnp.int32(self.schedule.target)
        members = jnp.asarray([self.schedule.target] + ([] if self.other is None else [self.other]), jnp.int32)

        def step(states: PyTree, entry: _RoundEntry) -> tuple[PyTree, tuple[Array, Array]]:
            entry = entry._replace(members=members)
            results = self._clients(algorithm, message, states, inputs.data, seed, entry)
            seen = jax.vmap(lambda upload, weight: _project(inputs.direction, upload, weight))(
                results.upload, results.weight
            )
            seen_target, seen_other = seen[0], jnp.zeros(()) if self.other is None else seen[1]
            if self.code.client_state:
                # The state is a function of earlier uploads: the adversary knows it and subtracts its part. It
                # does not know the batches: those of its own expectation come from a fixed seed.
                expected = self.code.build(inputs.noiseless).client(
                    self.code.keys(jnp.uint32(0), entry.index, target),
                    message,
                    jax.tree.map(lambda leaf: leaf[target], states),
                    self._records(inputs.reference, target),
                    Round(entry.index, target, entry.cohort_size),
                )
                seen_target -= _project(inputs.direction, expected.upload, expected.weight)
            return _updated(states, results.state, members), (seen_target, seen_other)

        states = self._client_states(algorithm, inputs)
        return jax.lax.scan(step, states, self._entries())[1]

    def _cohort_trial(self, inputs: TrialInputs, seed: Array) -> tuple[Array, Array]:
        """Sums with chosen broadcasts (kind "sum"), or rounds that follow each other as in a run ("rounds")."""
        algorithm = self.code.build(inputs.hyper)

        def step(carry: PyTree, entry: _RoundEntry) -> tuple[PyTree, Array]:
            server, states = carry
            message = algorithm.message(server)
            results = self._clients(algorithm, message, states, inputs.data, seed, entry)
            present = entry.members >= 0

            def total(leaf: Array) -> Array:
                return jnp.sum(jnp.where(present.reshape(-1, *([1] * (leaf.ndim - 1))), leaf, 0), axis=0)

            summed = jax.tree.map(total, results.upload)
            states = _updated(states, results.state, entry.members)
            if self.kind == "sum":
                return (server, states), _project(inputs.direction, summed, 1.0)
            key = noise.for_round(noise.stream(seed, "server"), entry.index)
            # Colluders count as present, if silent.
            server = algorithm.server(key, server, summed, Cohort(entry.members, present, entry.cohort_size))
            # What is new in a broadcast is what it adds to the one before.
            after = _project(inputs.direction, algorithm.message(server), 1.0)
            seen = after - _project(inputs.direction, message, 1.0)
            if self.exposures:
                upload = jax.tree.map(lambda leaf: leaf[0], results.upload)  # the target's, where it takes part
                weight = results.weight.reshape(-1)[0]
                seen = jnp.where(entry.exposed, _project(inputs.direction, upload, weight), seen)
            return (server, states), seen

        first = (algorithm.init(inputs.start), self._client_states(algorithm, inputs))
        (last, _), seen = jax.lax.scan(step, first, self._entries())
        if self.kind == "rounds":
            seen = jnp.append(seen, _project(inputs.direction, algorithm.message(last), 1.0))
        return seen, jnp.zeros_like(seen)

    # reason: what one round of clients needs, all traced
    def _clients(
        self,
        algorithm: Algorithm,
        message: PyTree,
        states: PyTree,
        data: TrialData,
        seed: Array,
        entry: _RoundEntry,
    ) -> ClientResult:
        """Everybody's result, side by side as in the engine."""

        def one(number: Array) -> ClientResult:
            client = jnp.maximum(number, 0)  # padding computes something that nobody adds up
            result = algorithm.client(
                self.code.keys(seed, entry.index, client),
                message,
                jax.tree.map(lambda leaf: leaf[client], states),
                self._records(data, client),
                Round(entry.index, client, entry.cohort_size),
            )
            weight = jnp.asarray(result.weight, jnp.float32)
            return result._replace(upload=self.leaving(result.upload), weight=weight)

        return jax.vmap(one)(entry.members)

    def _entries(self) -> _RoundEntry:
        schedule = self.schedule
        takes_part = schedule.cohorts[:, 0] == schedule.target
        return _RoundEntry(
            jnp.asarray(schedule.rounds, jnp.int32),
            jnp.asarray(schedule.cohorts, jnp.int32),
            jnp.asarray(schedule.cohort_sizes, jnp.int32),
            jnp.asarray(takes_part & (np.cumsum(takes_part) <= self.exposures)),
        )

    def _client_states(self, algorithm: Algorithm, inputs: TrialInputs) -> PyTree:
        one = algorithm.client_init(inputs.start)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(self.sizes), *leaf.shape)), one)

    def _first_participation(self, inputs: TrialInputs, seed: Array) -> Array:
        """The first participation's output as one vector, in the form that is projected."""
        algorithm = self.code.build(inputs.hyper)
        server = algorithm.init(inputs.start)
        target = jnp.int32(self.schedule.target)
        index, size = jnp.int32(self.schedule.rounds[0]), jnp.int32(self.schedule.cohort_sizes[0])
        result = algorithm.client(
            self.code.keys(seed, index, target),
            algorithm.message(server),
            algorithm.client_init(inputs.start),
            self._records(inputs.data, target),
            Round(index, target, size),
        )
        if self.kind in ("upload", "sum"):
            return ravel_pytree(result.upload)[0]
        present = Cohort(target[None], jnp.ones(1, bool), jnp.int32(1))
        key = noise.for_round(noise.stream(seed, "server"), index)
        return ravel_pytree(algorithm.message(algorithm.server(key, server, result.upload, present)))[0]

    def _records(self, data: TrialData, client: Array) -> Records:
        """A client's window on the rows: the target's own come first, then those that all others hold."""
        rows = data.x.shape[0]
        is_target = client == self.schedule.target
        return Records(
            jnp.concatenate([data.x, data.other_x]),
            jnp.concatenate([data.y, data.other_y]),
            jnp.arange(2 * rows, dtype=jnp.int32),
            jnp.where(is_target, 0, rows),
            jnp.where(is_target, data.size, jnp.asarray(self.sizes)[client]),
        )


def _leaving(experiment: Experiment) -> Callable[[PyTree], PyTree]:
    """What the engine does to an upload before it leaves: into the ball, and clamped at a bound that was set."""
    plan, bound = experiment.plan, experiment.spec.secagg.bound if experiment.plan.aggregation != "off" else 0.0

    def leaving(upload: PyTree) -> PyTree:
        upload = clipping.projected(upload, plan.max_norm)
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -bound, bound), upload) if bound else upload

    return leaving if not plan.exact_sums else lambda upload: upload


def _updated(states: PyTree, new: PyTree, members: Array) -> PyTree:
    """Everyone's state, with the members' new ones."""
    where = jnp.where(members >= 0, members, np.iinfo(np.int32).max)  # out of range: a scatter drops it
    return jax.tree.map(lambda leaf, some: leaf.at[where].set(some, mode="drop"), states, new)


def _project(direction: Array, tree: PyTree, weight: Array | float) -> Array:
    """The tree as one vector, projected on the direction, with the weight taken out."""
    flat = ravel_pytree(tree)[0]
    return jnp.dot(flat, direction, precision=jax.lax.Precision.HIGHEST) / weight


def float32(hyper: Hyper) -> dict[str, Any]:
    """Hyper-parameters as the compiled program takes them."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in hyper.items()}


# Many canaries in one run


class CanaryScores(NamedTuple):
    """Each canary's score, and whether its coin let it in."""

    scores: np.ndarray
    included: np.ndarray


def run_canaries(
    experiment: Experiment,
    code: CodeUnderAudit,
    schedule: TargetSchedule,
    *,
    canaries: int,
    movement: float,
    seed: int,
) -> CanaryScores:
    """One run of the target's participations with many canaries; the adversary chooses every broadcast.

    Each canary has a direction of its own. A coin decides whether it is there or a record without a gradient in
    its place. The adversary projects the sum of the uploads on each direction and calls the highest "in", the
    lowest "out". One run gives as many coins as canaries, but to each canary all others are noise.
    """
    model, sizes = experiment.model, np.asarray(experiment.partition.size)
    size, rows = int(sizes[schedule.target]), int(sizes.max())
    if model.name not in ("logistic", "softmax"):
        raise SpecError(f"canaries are made for logistic and softmax models, not for {model.name!r}")
    if canaries > size:
        raise SpecError(f"canaries={canaries} exceed the {size} records of the client")
    rng = np.random.default_rng([int(seed), 1])
    included = rng.random(canaries) < 0.5
    num_features = experiment.problem.x.shape[1]
    directions = _directions(rng, canaries, num_features)
    silent = Example(np.zeros(num_features), 0)
    x, y = stack(
        [Example(CANARY_NORM * directions[i], 1) if i < canaries and included[i] else silent for i in range(rows)]
    )
    start, leaving = certain_start(model, movement), _leaving(experiment)

    def update(direction: Array) -> Array:
        """The unit vector along which a canary moves the model."""

        def loss(params: Params) -> Array:
            return models.losses(model, params, CANARY_NORM * direction[None], jnp.ones(1, jnp.int32))[0]

        flat = ravel_pytree(jax.grad(loss)(start))[0]
        return -flat / jnp.linalg.norm(flat)

    def scores(root: Array) -> Array:
        algorithm = code.build(float32(code.hyper))
        message = algorithm.message(algorithm.init(start))
        records = Records(x, y, jnp.arange(rows, dtype=jnp.int32), jnp.int32(0), jnp.int32(size))
        target = jnp.int32(schedule.target)
        updates = jax.vmap(update)(jnp.asarray(directions, jnp.float32))

        def step(state: PyTree, entry: tuple[Array, Array]) -> tuple[PyTree, Array]:
            index, cohort = entry
            keys = code.keys(root, index, target)
            result = algorithm.client(keys, message, state, records, Round(index, target, cohort))
            upload = leaving(result.upload)
            upload = upload["params"] if code.client_state else upload
            return result.state, updates @ (ravel_pytree(upload)[0] / result.weight)

        entries = (jnp.asarray(schedule.rounds, jnp.int32), jnp.asarray(schedule.cohort_sizes, jnp.int32))
        return jnp.sum(jax.lax.scan(step, algorithm.client_init(start), entries)[1], axis=0)

    return CanaryScores(np.asarray(jax.jit(scores)(jnp.uint32(seed)), np.float64), included)


def _directions(rng: np.random.Generator, count: int, num_features: int) -> np.ndarray:
    """Orthogonal as far as there are dimensions, random beyond."""
    if count <= num_features:
        return np.eye(num_features)[:count]
    random = rng.normal(size=(count, num_features))
    return np.asarray(random / np.linalg.norm(random, axis=1, keepdims=True))
