"""Whole compiled rounds under attack: the engine itself, run thousands of times with and without a record.

`Rounds` runs `simulation.engine` on constructed records and keeps what an adversary sees: the finished upload of
one client, as a party sends it (`Simulation.sent`), or, after every round, the sum, the broadcast or the model.
Whatever the engine does after the method's client (projection, encoding, aggregation, the server's step, state
that is kept between rounds) is part of it. `attacked` bounds ε from below by two of the forms of
`auditing.bounds`:

exhibited   if what is seen is the record's shift plus a linear function of the noise (checked: the shift is the
            same for all seeds, and half the noise moves it half as far), it is Gaussian: distance, measured
            variance, then R1
counts      otherwise: a score, the log likelihood ratio of two Gaussians fitted to a pilot, and counts at
            thresholds; where a Gaussian trade-off is proved, a lower limit of its μ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.stats import chi2

from dither import accounting
from dither.auditing import bounds
from dither.auditing.trials import float32
from dither.data import ClientPartition
from dither.experiment.build import Experiment, aggregation, compiled_hyper, engine_options
from dither.methods import local
from dither.secagg import encoding
from dither.simulation import engine
from dither.simulation.aggregation import add_discrete
from dither.simulation.arrays import Inputs, RunInputs, Shards, State, all_finite
from dither.types import Algorithm, Array, ClientResult, Cohort, Hyper, Params, PyTree, Records, Round, RoundInfo

_FIT, _COUNTED = 512, 4096  # runs to which a score is fitted, and that a bound is computed from
_FIRST_COUNTED = 10**5  # their seeds begin here
_CERTAIN = 1e6  # μ from which on ε is μ²/2 and more
_LINEAR = 0.01  # of the noise: how far from linear what is called so may be


class Scene(NamedTuple):
    """A model to begin with, and the rows that the target's other records and each other client's records are."""

    start: int
    rest: int
    others: tuple[int, ...]  # in turn: by client if `by_client`, else by record
    by_client: bool = True


class _Watched(engine.Simulation):
    """The engine with a given first model and given cohorts, of which some clients do not answer."""

    starts: PyTree
    cohort_table: np.ndarray  # [rounds, largest cohort]
    absent: np.ndarray  # [rounds, largest cohort]

    def initial(self, run: RunInputs) -> Params:
        return jax.tree.map(lambda leaf: leaf[run.hyper["start"].astype(int)], self.starts)

    def cohort(self, run: RunInputs, index: Array, cohort_size: int) -> tuple[Cohort, Array]:
        members, absent = (jnp.asarray(table)[index, :cohort_size] for table in (self.cohort_table, self.absent))
        return Cohort(members, jnp.ones(cohort_size, bool), jnp.int32(cohort_size)), ~absent

    def _least(self, cohort_size: int) -> int:
        return 1  # those who are absent may be colluders, whose uploads the adversary knows


class Rounds:
    """The rounds of one experiment on rows that may stand in any place: `records` are theirs, `target` the client
    with the record under attack, `silent` how many others do not answer. The row `absent` stands
    for no record."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        records: tuple[np.ndarray, np.ndarray],
        starts: Sequence[Params],
        scenes: Sequence[Scene],
        view: str,
        target: int,
        silent: int,
        absent: int = -1,
    ) -> None:
        self.view = view
        self.differences = view == "broadcast" and experiment.spec.server_optimizer == "sgd"
        self.experiment, self.plan, self.target, self.scenes = experiment, experiment.plan, target, scenes
        self.absent = absent
        self.x, self.y = records
        self.numbers = self.plan.round_numbers or tuple(range(len(self.plan.cohorts)))
        self.sizes = np.asarray(self.plan.client_sizes)
        self.simulation = _Watched(
            experiment.model,
            _watched(experiment.prepared.build, self._upload_shape(starts[0])),
            num_clients=len(self.sizes),
            cohort_size_at=experiment.prepared.cohort_size_at,
            **{**engine_options(experiment), **_spread(experiment), "randomness": "seeded"},
        )
        self.simulation.starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
        self.simulation.cohort_table, self.simulation.absent = self._cohorts(silent)
        self._look = jax.jit(jax.vmap(self._seen))
        self._sent = jax.jit(jax.vmap(self._one_upload, in_axes=(0, None, 0, 0, 0)))

    def _upload_shape(self, start: Params) -> PyTree:
        zero, one = np.int32(0), np.int32(1)
        records = Records(jnp.asarray(self.x), jnp.asarray(self.y), jnp.zeros(1, jnp.int32), zero, one)

        def upload(records: Records) -> PyTree:
            algorithm = self.experiment.prepared.build(float32(compiled_hyper(self.experiment)))
            message, kept = algorithm.message(algorithm.init(start)), algorithm.client_init(start)
            keys = engine.client_keys(jnp.uint32(0), zero, zero)
            return algorithm.client(keys, message, kept, records, Round(zero, zero, one)).upload

        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(upload, records))

    def _cohorts(self, silent: int) -> tuple[np.ndarray, np.ndarray]:
        """Who takes part, and who of them does not answer: the loudest."""
        cohorts = self.plan.cohorts
        shape = max(self.numbers) + 1, max(map(len, cohorts))
        table, absent = np.zeros(shape, np.int32), np.zeros(shape, bool)
        weights = np.ones(len(self.sizes)) if self.plan.weights is None else self.plan.weights
        releases = self.experiment.prepared.releases
        for number, members in zip(self.numbers, cohorts, strict=True):
            table[number, : len(members)] = members
            loud = [
                releases(RoundInfo(number, int(k), int(self.sizes[k]), len(members)))[0].noise_std * weights[k]
                for k in members
            ]
            others = [at for at in np.argsort(loud)[::-1] if members[at] != self.target]
            absent[number, others[: min(silent, len(members) - 1)]] = True
        return table, absent

    def inputs(self, record: np.ndarray, scene: np.ndarray, seed: np.ndarray, noise: np.ndarray) -> Inputs:
        """What so many runs read: in each of them a row in the target's first place, a scene, a seed, and the
        noise as a factor of the planned one."""
        partitions = {key: self._partition(*key) for key in set(zip(record.tolist(), scene.tolist(), strict=True))}
        hyper = {
            name: np.stack([np.asarray(value, np.float64)] * len(seed))
            for name, value in compiled_hyper(self.experiment).items()
        }
        for name in self.plan.noise_names:
            hyper[name] = hyper[name] * noise.reshape(-1, *[1] * (hyper[name].ndim - 1))
        hyper["start"] = np.array([self.scenes[at].start for at in scene])
        nothing = np.zeros(1)
        problem = engine.Problem(
            self.x,
            self.y,
            [partitions[key] for key in zip(record.tolist(), scene.tolist(), strict=True)],
            [nothing.astype(np.int32)],
            [nothing],
        )
        return self.simulation.inputs(problem, seeds=seed.tolist(), hyper=hyper)

    def _partition(self, record: int, scene: int) -> ClientPartition:
        _, rest, others, by_client = self.scenes[scene]
        client = np.repeat(np.arange(len(self.sizes)), self.sizes)
        turn = client if by_client else np.arange(len(client))
        order = np.where(client == self.target, rest, np.asarray(others)[turn % len(others)]).astype(np.int32)
        start = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)
        mine = int(self.sizes[self.target]) if self.plan.per_client else 1  # the whole client, or one record
        order[start[self.target] : start[self.target] + mine] = record
        gone = (np.arange(len(self.sizes)) == self.target) & (record == self.absent)
        return ClientPartition(order, start + gone, (self.sizes - gone).astype(np.int32), ())

    # What is seen

    def uploads(
        self, inputs: Inputs, index: np.ndarray, client: np.ndarray, cohort: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        """Finished uploads from the first model, and whether the method's client left all of them finite."""
        columns = (np.asarray(column, np.int32) for column in (index, client, cohort))
        sent, finite, weights = self._sent(inputs.runs, inputs.shared, *columns)
        if self.plan.discrete_noise:
            where = zip(np.asarray(inputs.runs.seed), index, client, cohort, strict=True)
            rows = zip(np.asarray(sent), np.asarray(weights, np.float64), where, strict=True)
            sent = np.stack([self._noisy_integers(row, float(weight), *map(int, at)) for row, weight, at in rows])
        return np.asarray(sent, np.float64), bool(np.all(finite))

    # reason: one upload, and where its noise comes from
    def _noisy_integers(
        self, row: np.ndarray, weight: float, seed: int, index: int, client: int, cohort: int
    ) -> np.ndarray:
        """One upload with discrete noise, as a party adds it."""
        secure_sum = self.simulation.aggregation
        assert secure_sum is not None  # noqa: S101
        assert secure_sum.noise_std is not None  # noqa: S101
        how = secure_sum.how
        words = encoding.words(row, how) if row.dtype == np.int32 else encoding.encode(row, how)[0]
        std = secure_sum.noise_std(index, client, cohort) * 2.0**how.scale_bits * weight
        return encoding.decode(add_discrete(words, std, self.simulation.words(seed, index, client)), how)

    def _one_upload(self, run: RunInputs, shared: Any, index: Array, client: Array, cohort: Array) -> Any:
        algorithm, params = self.simulation.build(run.hyper), self.simulation.initial(run)
        server, kept = algorithm.init(params), algorithm.client_init(params)
        sent = self.simulation.sent(algorithm.message(server), kept, run, shared, index, client, cohort)
        upload, secure_sum = sent.upload, self.simulation.aggregation
        if self.plan.discrete_noise:
            return ravel_pytree(upload)[0], sent.metrics["finite"], sent.weight
        if secure_sum:
            upload = jax.tree.map(lambda leaf: encoding.traced_decode(leaf, secure_sum.how), upload)
            upload = algorithm.decode(server, upload, index, cohort) if algorithm.decode else upload
        if self.plan.clip_quantile:  # the count in the unit of the model's change, so that all noise is alike
            unit = local.COUNT_SHARE * run.hyper["clip_norm"] * local.learning_rate(run.hyper, index)
            upload = {**upload, "unclipped": upload["unclipped"] * unit}
        upload = upload["params"] if self.plan.client_state and "params" in upload else upload
        return ravel_pytree(upload)[0], sent.metrics["finite"], sent.weight

    def seen(self, inputs: Inputs, again: Inputs) -> tuple[np.ndarray, bool]:
        """`[runs, rounds, numbers]`: each of the target's uploads, each sum, what each broadcast adds to the one
        before, or the last model; and whether no failure showed. Rounds after a kill are made with the noise of
        `again`. For sums the adversary is the server, which sends the first model every time."""
        if self.view == "upload":
            return self._own_uploads(inputs, again)
        simulation = self.simulation
        state = simulation.start(inputs)
        first = before = _copied(state)
        rows = []
        for at, number in enumerate(self.numbers):
            repeated = number in self.numbers[:at]
            state = state._replace(server=_copied(first.server)) if self.view == "sum" else state
            if repeated and number <= self.numbers[at - 1]:
                state = before
            before = _copied(state)
            state = simulation.advance(state, again if repeated else inputs, number, number + 1)
            row = self._look(state.server, inputs.runs.hyper)
            rows.append(row - self._look(before.server, inputs.runs.hyper) if self.differences else row)
        sound = self._sound(state)
        kept = rows[-1:] if self.view == "final" else rows
        return np.stack([np.asarray(row, np.float64) for row in kept], axis=1), sound

    def _own_uploads(self, inputs: Inputs, again: Inputs) -> tuple[np.ndarray, bool]:
        """The target's upload in each of its rounds, every time from the first model. (Methods that keep private
        state have that of a first round.)"""
        rows, sound = [], True
        for at, number in enumerate(self.numbers):
            cohort = self.plan.cohorts[at]
            if self.target not in cohort:
                continue
            columns = (np.full(len(inputs.runs.seed), value) for value in (number, self.target, len(cohort)))
            row, finite = self.uploads(again if number in self.numbers[:at] else inputs, *columns)
            rows.append(row)
            sound &= finite
        return np.stack(rows, axis=1), sound

    def _seen(self, server: PyTree, hyper: Hyper) -> Array:
        algorithm, spec = self.simulation.build(hyper), self.experiment.spec
        # What momentum or Adam has made of a sum can be undone. A trusted server's noise is in the change alone.
        if self.plan.per_client and self.view == "broadcast" and spec.server_optimizer != "sgd":
            return ravel_pytree(server["inner"]["memory"])[0]
        if self.view == "sum" or (self.view == "broadcast" and spec.server_optimizer != "sgd"):
            return ravel_pytree(server["sum"])[0]
        return ravel_pytree(algorithm.message(server) if self.view == "broadcast" else algorithm.params(server))[0]

    def _sound(self, state: State) -> bool:
        finite = np.asarray(state.metrics["finite"]) / np.maximum(np.asarray(state.rounds), 1)
        failures = (state.refused, state.void)
        return bool(np.all(finite > 1 - 1e-3) and not any(np.any(np.asarray(each)) for each in failures))


def _spread(experiment: Experiment) -> dict[str, Any]:
    """Clients side by side, one after the other, or on two devices: as the engine does by size, here by turns."""
    turn, secure_sum = round(1000 * experiment.plan.client_lr) % 4, aggregation(experiment)
    even = all(len(cohort) % 2 == 0 for cohort in experiment.plan.cohorts)
    compiled = secure_sum is None or secure_sum.compiled
    if turn == 3 and even and compiled and len(jax.local_devices()) > 1:
        return {"shards": Shards(clients=2)}
    return {"layout": "loop" if turn == 2 else "vmap"}


def _copied(tree: Any) -> Any:
    """The engine reuses the buffers of what it is given."""
    return jax.tree.map(jnp.copy, tree)


def _watched(build: Callable[[Hyper], Algorithm], upload: PyTree) -> Callable[[Hyper], Algorithm]:
    """The method, whose server keeps each sum and whose clients say whether all they computed is finite. `upload`
    is shaped like one."""

    def watched(hyper: Hyper) -> Algorithm:
        inner = build(hyper)

        def client(*arguments: Any) -> ClientResult:
            result = inner.client(*arguments)
            finite = all_finite(result.upload).astype(jnp.float32)
            return result._replace(metrics={**result.metrics, "finite": finite})

        def init(params: Params) -> PyTree:
            return {"inner": inner.init(params), "sum": jax.tree.map(jnp.zeros_like, upload)}

        def server(key: Any, state: PyTree, upload: PyTree, cohort: Cohort) -> PyTree:
            return {"inner": inner.server(key, state["inner"], upload, cohort), "sum": upload}

        decode = inner.decode
        return inner._replace(
            init=init,
            message=lambda state: inner.message(state["inner"]),
            client=client,
            server=server,
            params=lambda state: inner.params(state["inner"]),
            decode=decode and (lambda state, *rest: decode(state["inner"], *rest)),
        )

    return watched


# From what is seen to ε


class Score(NamedTuple):
    """The log likelihood ratio of two Gaussians fitted to a pilot: of one number a round, what was seen in the
    direction of the shift in units of the noise."""

    directions: np.ndarray  # [rounds, numbers]
    means: np.ndarray  # [2, rounds], with the record and without
    inverses: np.ndarray  # [2, rounds, rounds], of the covariances
    log_sizes: np.ndarray  # [2]
    covariance: np.ndarray  # [rounds, rounds], without the record

    @classmethod
    def fit(cls, inside: np.ndarray, outside: np.ndarray) -> Score:
        """To what was seen with the same seeds in both worlds, `[runs, rounds, numbers]`."""
        shift, spread = np.mean(inside - outside, axis=0), np.var(outside, axis=0)
        directions = shift / (spread + _floor(spread, shift))
        lone = ~np.any(directions, axis=1)
        directions[lone] = directions[~lone].mean(axis=0) if np.any(~lone) else 0.0
        columns = [np.einsum("nrd,rd->nr", seen, directions) for seen in (inside, outside)]
        scale = np.maximum(np.std(columns[1], axis=0), np.abs(np.mean(columns[0] - columns[1], axis=0)))
        scale = np.where(scale > 0, scale, 1.0)  # rounds may differ by many orders of magnitude
        directions, columns = directions / scale[:, None], [column / scale for column in columns]
        means = np.stack([column.mean(axis=0) for column in columns])
        covariances = [np.cov(column, rowvar=False).reshape(len(shift), -1) for column in columns]
        covariances = [each + 1e-10 * np.eye(len(shift)) for each in covariances]
        inverses = np.stack([np.linalg.inv(each) for each in covariances])
        log_sizes = np.array([np.linalg.slogdet(each)[1] for each in covariances])
        return cls(directions, means, inverses, log_sizes, covariances[1])

    def columns(self, seen: np.ndarray) -> np.ndarray:
        """One number a round."""
        return np.asarray(np.einsum("nrd,rd->nr", seen, self.directions))

    def __call__(self, seen: np.ndarray) -> np.ndarray:
        """The log likelihood ratio of each run."""
        far = self.columns(seen)[None] - self.means[:, None]
        losses = np.einsum("wnr,wrs,wns->wn", far, self.inverses, far) + self.log_sizes[:, None]
        return np.asarray(0.5 * (losses[1] - losses[0]))


def _floor(spread: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """A little of each round's own scale, where a number has no noise: `[rounds, 1]`."""
    scale = np.maximum(np.max(spread, axis=-1, keepdims=True), np.max(shift**2, axis=-1, keepdims=True))
    return np.asarray(1e-12 * scale + 1e-60)


def told_apart(inside: np.ndarray, outside: np.ndarray, spread: np.ndarray) -> float:
    """How well the two are told apart, roughly, if that is the noise's variance."""
    shift = np.mean(inside - outside, axis=0)
    return float(np.sum(shift**2 / (spread + _floor(spread, shift))))


# What was seen with so many seeds from the first on: with the record or not, at a factor of the planned noise
See = Callable[[int, int, bool, float], np.ndarray]


def attacked(see: See, *, delta: float, error: float, gaussian: bool, halves: bool = True) -> float:
    """A lower bound of ε. `gaussian`: a Gaussian trade-off was proved. `halves`: what is seen may not be linear in
    the noise, which half of it shows; without, there are only half as many runs."""
    pilots = inside, outside = [see(1, _FIT, with_record, 1.0) for with_record in (True, False)]
    shift, scale = np.mean(inside - outside, axis=0), np.std(outside, axis=0)
    if not np.any(shift):
        return 0.0
    unlike, counts = np.std(inside - outside, axis=0), _COUNTED if halves else _COUNTED // 2
    if halves:
        unlike = np.maximum(unlike, np.std(outside - 2 * see(1, _FIT, False, 0.5), axis=0))
    linear = unlike <= _LINEAR * scale + 1e-6 * np.abs(shift)  # [rounds, numbers]
    found = [0.0]
    if np.any(shift[linear]):
        score = Score.fit(inside * linear, outside * linear)
        seen = score.columns(see(_FIRST_COUNTED, counts, False, 1.0) * linear)
        found.append(_exhibited(score, seen, delta, error / 2))
    if not np.all(linear | (shift == 0)):
        score = Score.fit(*pilots)
        counted = [see(_FIRST_COUNTED, counts // 2, with_record, 1.0) for with_record in (True, False)]
        fitted, scores = ((score(one), score(other)) for one, other in (pilots, counted))
        thresholds = bounds.choose_thresholds(*fitted, trials=len(scores[0]), delta=delta, error=error / 4)
        found.append(bounds.count_bound(scores, thresholds, delta=delta, confidence=1 - error / 4).value)
        if gaussian:
            thresholds = bounds.mu_thresholds(*fitted)
            found.append(bounds.mu_bound(scores, thresholds, delta=delta, confidence=1 - error / 4).value)
    return max(found)


def _exhibited(score: Score, seen: np.ndarray, delta: float, error: float) -> float:
    """R1 for a shift that is exact and a Gaussian noise whose variance along the best weights is measured."""
    shift = score.means[0] - score.means[1]
    weights = np.linalg.solve(score.covariance, shift)
    noise = (seen - seen.mean(axis=0)) @ weights
    variance = float(np.sum(noise**2) / chi2.ppf(error, len(noise) - 1))
    if variance == 0:
        return math.inf
    mu = abs(float(shift @ weights)) / math.sqrt(variance)
    return accounting.gaussian_epsilon(mu, delta) if mu < _CERTAIN else mu**2 / 2
