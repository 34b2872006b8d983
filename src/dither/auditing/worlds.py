"""Paired worlds on the code path of a run: the method's own client and server functions, thousands at once.

A trial is one run of the target's participations with a seed of its own, which opens the same streams of batches
and noise as a run's seed does. What the adversary sees of a participation is projected on one line: the one that
joins the noiseless outputs of the two worlds. One compiled program serves both worlds, every design and the
noiseless draws: data, noise, broadcast and line are its inputs.

upload      each upload of the target, and one of another client, whose noise must be independent
sum         the sum of the honest cohort's uploads
broadcast   what each broadcast adds to the one before, and `exposures` uploads of the target before that
final       the parameters after the last round
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import models
from dither.auditing.designs import World
from dither.privacy import noise
from dither.simulation import devices, engine
from dither.types import (
    Algorithm,
    Array,
    ClientResult,
    Cohort,
    Hyper,
    Keys,
    Params,
    Prepared,
    PyTree,
    Records,
    Round,
)

VIEWS = ("upload", "sum", "broadcast", "final")
_FLOATS_AT_ONCE = 8e6  # of one batch of trials
_MOST_AT_ONCE = 1024

KeysOf = Callable[[Any, Array, Array], Keys]


class Code(NamedTuple):
    """The code under audit: how to build the algorithm, and how a seed becomes a client's keys."""

    build: Callable[[Hyper], Algorithm]
    hyper: dict[str, Any]
    noise_names: tuple[str, ...]
    client_state: bool
    keys: KeysOf = engine.client_keys

    @classmethod
    def of(cls, prepared: Prepared) -> Code:
        return cls(prepared.build, dict(prepared.hyper), prepared.plan.noise_names, prepared.plan.client_state)

    def without_noise(self) -> dict[str, Any]:
        """The hyper-parameters with every noise set to 0."""
        return {k: np.zeros_like(np.asarray(v)) if k in self.noise_names else v for k, v in self.hyper.items()}


class Schedule(NamedTuple):
    """Which rounds are seen, who takes part, and which of them is the target."""

    target: int
    rounds: np.ndarray  # [T]
    cohorts: np.ndarray  # [T, r], the target first, padded with -1
    cohort_sizes: np.ndarray  # [T], as the clients are told


class Seen(NamedTuple):
    """Projections `[trials, T]`, and those of another client's upload (view upload; else zeros)."""

    target: np.ndarray
    other: np.ndarray


class Inputs(NamedTuple):
    """What the compiled program reads besides seeds."""

    hyper: dict[str, Any]
    quiet: dict[str, Any]  # without noise: what the adversary can compute by itself
    world: World
    reference: World  # the neighbour, for the adversary's own expectation
    start: Params
    line: Array


KIND = {"upload": "upload", "sum": "sum", "broadcast": "evolving", "final": "evolving"}


class PairedRuns:
    """One kind of view of one method, compiled for one schedule: uploads, sums, or models that evolve."""

    def __init__(
        self,
        code: Code,
        kind: str,
        schedule: Schedule,
        sizes: np.ndarray,
        *,
        exposures: int = 0,
        alone: bool = False,
        work: float,
    ) -> None:
        devices.set_up()
        self.code, self.kind, self.schedule = code, kind, schedule
        self.sizes = np.asarray(sizes, np.int32)
        self.exposures = exposures
        others = [int(c) for c in schedule.cohorts.ravel() if c >= 0 and c != schedule.target]
        self.stranger = others[0] if others else schedule.target
        alone = alone or not others
        self.alone = alone  # look at no other client's upload
        self.at_once = int(np.clip(_FLOATS_AT_ONCE / max(work, 1.0), 1, _MOST_AT_ONCE))
        self._program = jax.jit(self._trials)
        self._one = jax.jit(self._vectors)

    # What a caller does

    def inputs(self, world: World, reference: World, start: Params, line: np.ndarray, *, noise: bool) -> Inputs:
        quiet = self.code.without_noise()
        chosen = self.code.hyper if noise else quiet
        return Inputs(float32(chosen), float32(quiet), world, reference, start, jnp.asarray(line, jnp.float32))

    def line(self, all_in: World, all_out: World, start: Params) -> np.ndarray:
        """The unit vector from the noiseless output of one world to that of the other."""
        zero = jnp.zeros(1, jnp.float32)
        quiet = float32(self.code.without_noise())
        ends = [
            np.asarray(self._one(Inputs(quiet, quiet, w, all_out, start, zero), jnp.uint32(0)), np.float64)
            for w in (all_in, all_out)
        ]
        difference = ends[0] - ends[1]
        length = float(np.linalg.norm(difference))
        return difference / length if length > 0 else difference

    def observe(self, inputs: Inputs, seeds: np.ndarray, *, final: bool = False) -> Seen:
        """Trials with these seeds. `final` looks at the last model alone."""
        at_once, pieces = self.at_once, []  # always as many, so that one compilation serves any number of trials
        for first in range(0, len(seeds), at_once):
            some = seeds[first : first + at_once]
            padded = np.concatenate([some, np.repeat(some[-1:], at_once - len(some))]).astype(np.uint32)
            both = self._program(inputs, jnp.asarray(padded))
            pieces.append([np.asarray(side[: len(some)], np.float64) for side in both])
        target, other = (np.concatenate(side) for side in zip(*pieces, strict=True))
        if self.kind == "evolving":
            columns = slice(-1, None) if final else slice(0, -1)
            target, other = target[:, columns], other[:, columns]
        return Seen(target, other)

    # What is compiled

    def _trials(self, inputs: Inputs, seeds: Array) -> tuple[Array, Array]:
        one = self._uploads if self.kind == "upload" else self._cohort_trial
        return jax.vmap(lambda seed: one(inputs, seed))(seeds)

    def _uploads(self, inputs: Inputs, seed: Array) -> tuple[Array, Array]:
        """The server sees each upload and chooses each broadcast, so every round starts from the same one."""
        algorithm = self.code.build(inputs.hyper)
        message = algorithm.message(algorithm.init(inputs.start))
        target = jnp.int32(self.schedule.target)
        members = jnp.asarray([self.schedule.target] + ([] if self.alone else [self.stranger]), jnp.int32)

        def one(states: PyTree, entry: tuple[Array, ...]) -> tuple[PyTree, tuple[Array, Array]]:
            index, _, size, _ = entry
            results = self._clients(algorithm, message, states, inputs.world, seed, index, members, size)
            seen = jax.vmap(lambda upload, weight: _along(inputs.line, upload, weight))(
                results.upload, results.weight
            )
            own, other = seen[0], jnp.zeros(()) if self.alone else seen[1]
            if self.code.client_state:
                # The state is a function of earlier uploads: the adversary knows it and subtracts its part. It
                # does not know the batches: those of its own expectation come from a fixed seed.
                expected = self.code.build(inputs.quiet).client(
                    self.code.keys(jnp.uint32(0), index, target),
                    message,
                    jax.tree.map(lambda leaf: leaf[target], states),
                    self._records(inputs.reference, target),
                    Round(index, target, size),
                )
                own = own - _along(inputs.line, expected.upload, expected.weight)
            return _kept(states, results.state, members), (own, other)

        states = self._client_states(algorithm, inputs)
        return jax.lax.scan(one, states, self._entries())[1]

    def _cohort_trial(self, inputs: Inputs, seed: Array) -> tuple[Array, Array]:
        """Sums with chosen broadcasts (kind "sum"), or rounds that follow each other as in a run ("evolving")."""
        algorithm = self.code.build(inputs.hyper)

        def one(carry: PyTree, entry: tuple[Array, ...]) -> tuple[PyTree, Array]:
            server, states = carry
            index, members, size, exposed = entry
            message = algorithm.message(server)
            results = self._clients(algorithm, message, states, inputs.world, seed, index, members, size)
            present = members >= 0

            def total(leaf: Array) -> Array:
                return jnp.sum(jnp.where(present.reshape(-1, *([1] * (leaf.ndim - 1))), leaf, 0), axis=0)

            summed = jax.tree.map(total, results.upload)
            new_states = _kept(states, results.state, members)
            if self.kind == "sum":
                return (server, new_states), _along(inputs.line, summed, 1.0)
            key = noise.for_round(noise.stream(seed, "server"), index)
            # Colluders count as present, if silent.
            following = algorithm.server(key, server, summed, Cohort(members, present, size))
            # What is new in a broadcast is what it adds to the one before.
            seen = _along(inputs.line, algorithm.message(following), 1.0) - _along(inputs.line, message, 1.0)
            if self.exposures:
                own = jax.tree.map(lambda leaf: leaf[0], results.upload)  # the target's, where it takes part
                seen = jnp.where(exposed, _along(inputs.line, own, results.weight.reshape(-1)[0]), seen)
            return (following, new_states), seen

        first = (algorithm.init(inputs.start), self._client_states(algorithm, inputs))
        (last, _), seen = jax.lax.scan(one, first, self._entries())
        if self.kind == "evolving":
            seen = jnp.append(seen, _along(inputs.line, algorithm.message(last), 1.0))
        return seen, jnp.zeros_like(seen)

    def _clients(
        self,
        algorithm: Algorithm,
        message: PyTree,
        states: PyTree,
        world: World,
        seed: Array,
        index: Array,
        members: Array,
        size: Array,
    ) -> ClientResult:
        """Everybody's result, side by side as in the engine."""

        def one(number: Array) -> ClientResult:
            own = jnp.maximum(number, 0)  # padding computes something that nobody adds up
            result = algorithm.client(
                self.code.keys(seed, index, own),
                message,
                jax.tree.map(lambda leaf: leaf[own], states),
                self._records(world, own),
                Round(index, own, size),
            )
            return result._replace(weight=jnp.asarray(result.weight, jnp.float32))

        return jax.vmap(one)(members)

    def _entries(self) -> tuple[Array, ...]:
        """(round, members, cohort size, whether the target's upload is exposed), one a round."""
        s = self.schedule
        takes_part = s.cohorts[:, 0] == s.target
        exposed = takes_part & (np.cumsum(takes_part) <= self.exposures)
        return (
            jnp.asarray(s.rounds, jnp.int32),
            jnp.asarray(s.cohorts, jnp.int32),
            jnp.asarray(s.cohort_sizes, jnp.int32),
            jnp.asarray(exposed),
        )

    def _client_states(self, algorithm: Algorithm, inputs: Inputs) -> PyTree:
        one = algorithm.client_init(inputs.start)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(self.sizes), *leaf.shape)), one)

    def _vectors(self, inputs: Inputs, seed: Array) -> Array:
        """The first participation's output as one vector, in the form that `line` is applied to."""
        algorithm = self.code.build(inputs.hyper)
        server = algorithm.init(inputs.start)
        target = jnp.int32(self.schedule.target)
        index, size = jnp.int32(self.schedule.rounds[0]), jnp.int32(self.schedule.cohort_sizes[0])
        result = algorithm.client(
            self.code.keys(seed, index, target),
            algorithm.message(server),
            algorithm.client_init(inputs.start),
            self._records(inputs.world, target),
            Round(index, target, size),
        )
        if self.kind in ("upload", "sum"):
            return ravel_pytree(result.upload)[0]
        present = Cohort(target[None], jnp.ones(1, bool), jnp.int32(1))
        key = noise.for_round(noise.stream(seed, "server"), index)
        return ravel_pytree(algorithm.message(algorithm.server(key, server, result.upload, present)))[0]

    def _records(self, world: World, client: Array) -> Records:
        """A client's window on the rows: the target's own come first, then those that all others hold."""
        rows = world.x.shape[0]
        is_target = client == self.schedule.target
        return Records(
            jnp.concatenate([world.x, world.strange_x]),
            jnp.concatenate([world.y, world.strange_y]),
            jnp.arange(2 * rows, dtype=jnp.int32),
            jnp.where(is_target, 0, rows),
            jnp.where(is_target, world.size, jnp.asarray(self.sizes)[client]),
        )


def _kept(states: PyTree, new: PyTree, members: Array) -> PyTree:
    """Everyone's state, with the members' new ones."""
    where = jnp.where(members >= 0, members, jnp.iinfo(jnp.int32).max)  # out of range: a scatter drops it
    return jax.tree.map(lambda leaf, some: leaf.at[where].set(some, mode="drop"), states, new)


def _along(line: Array, tree: PyTree, weight: Array | float) -> Array:
    """The tree as one vector, projected on the line, with the weight taken out."""
    flat = ravel_pytree(tree)[0]
    return jnp.dot(flat, line, precision=jax.lax.Precision.HIGHEST) / weight


def float32(hyper: Hyper) -> dict[str, Any]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in hyper.items()}


def schedule(
    cohorts: Sequence[np.ndarray],
    sizes: np.ndarray,
    *,
    view: str,
    rounds: int | None,
    colluders: int = 0,
    target: int | None = None,
) -> Schedule:
    """The rounds an audit looks at: those of the client that takes part most (for ties, of the smallest).

    For uploads and sums only the target's own rounds matter; what is broadcast and the final model depend on all.
    Colluders are left out of the sum: they know their own part and subtract it. `rounds` cuts the schedule.
    """
    counts = np.bincount(np.concatenate(cohorts), minlength=len(sizes)) if len(cohorts) else np.zeros(len(sizes))
    if target is None:
        target = int(min(np.flatnonzero(counts == counts.max()), key=lambda c: (sizes[c], c)))
    own = [t for t, members in enumerate(cohorts) if target in members]
    chosen = own if view in ("upload", "sum") else list(range(len(cohorts)))
    chosen = chosen[: rounds if rounds else len(chosen)]
    rows = []
    for t in chosen:
        others = [int(c) for c in cohorts[t] if int(c) != target]
        kept = others[colluders:] if view in ("sum", "broadcast", "final") else others[:1]
        # Without the target nobody stands in the first slot's place but the first of the others.
        rows.append([target, *kept] if target in cohorts[t] else kept)
    width = max(len(row) for row in rows)
    table = np.full((len(rows), width), -1, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return Schedule(target, np.array(chosen), table, np.array([len(cohorts[t]) for t in chosen]))


def floats_per_trial(model: models.Model, num_features: int, width: int, members: int) -> float:
    """About how many floats one trial holds at a time."""
    params = models.count_params(jax.eval_shape(model.init, jax.random.key(0)))
    return float(members * (3 * params + width * (num_features + 8)))
