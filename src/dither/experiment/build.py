"""A spec brought to life: data, who holds it, the model, the method and what it proves; then the simulator as
the spec asks for it, on as many devices as that is worth, and what its rounds read."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dither import data
from dither.accounting import ADD_REMOVE, REPLACE_ONE, ZERO_OUT, ClientEpsilon, step_multiplier
from dither.accounting.accountant import Accountant, alike, noise_ratio
from dither.accounting.ledger.store import KnownRecords, known_records
from dither.errors import RunExists, SpecError
from dither.experiment.report import RoundingMargin
from dither.methods import Method, method, prepare
from dither.methods.local import COUNT_SHARE, batch_sampler
from dither.models import Model, count_params, program_digest
from dither.models import from_spec as model_from_spec
from dither.models.adapters import refuse_callbacks
from dither.privacy import sampling
from dither.privacy.clipping import REACH
from dither.privacy.discrete import MOST_VARIANCE
from dither.privacy.entropy import OsEntropy
from dither.privacy.noise import for_round, stream
from dither.secagg.encoding import FixedPoint
from dither.secagg.graph import Rules
from dither.simulation import devices, distributed, engine, streaming
from dither.simulation.aggregation import Aggregation
from dither.simulation.arrays import ONE_DEVICE, Shards, aligned
from dither.spec import IN_MEMORY, METHODS, MODELS, Spec
from dither.types import CLIP_RANGE, Claim, Cohort, Prepared, PrivacyPlan, Records, Round, RoundInfo

LIBRARIES = ("jaxlib", "optax", "scipy")  # whose code compiled rounds are traced from
_BEGAN = time.time() - 60  # not later than this process read its code


@dataclass(frozen=True)
class Experiment:
    """A spec brought to life: data, who holds it, the model, the method, and the plan of what it reveals."""

    spec: Spec
    dataset: data.Dataset
    partition: data.ClientPartition
    problem: engine.Problem
    model: Model
    prepared: Prepared
    method: Method  # read once: its file may change while the run goes on

    @property
    def plan(self) -> PrivacyPlan:
        """What runs and what is proved."""
        return self.prepared.plan

    @property
    def cohorts(self) -> tuple[np.ndarray, ...]:
        """Who takes part in each round."""
        return self.plan.cohorts

    @property
    def num_params(self) -> int:
        return self.plan.num_params

    def with_plan(self, **changes: Any) -> Experiment:
        """The same experiment with entries of its plan changed."""
        return replace(self, prepared=self.prepared._replace(plan=self.plan._replace(**changes)))

    def prepare(self, **changes: Any) -> Prepared:
        """The method set up again, for a plan that differs in these entries."""
        return self.method.prepare(self.model, self.plan._replace(**changes))

    def first_rounds(self, rounds: int) -> Experiment:
        """The same experiment cut after some rounds."""
        return self.with_plan(cohorts=self.cohorts[:rounds])

    def realised(self, begun: Sequence[tuple[int, int]]) -> Experiment:
        """The experiment when these stretches of rounds were begun, each with noise of its own: a round that a
        kill undid and that was repeated has been released twice."""
        numbers = tuple(number for start, stop in begun for number in range(start, stop))
        if numbers == tuple(range(len(numbers))):
            return self.first_rounds(len(numbers))
        # A client may have been seen in each part of the run as often as it may be seen in a whole run.
        cohorts = tuple(self.cohorts[number] for number in numbers)
        return self.with_plan(cohorts=cohorts, round_numbers=numbers, exposures=self.plan.exposures * len(begun))

    def accountant(self, missing: int | None = None) -> Accountant:
        """The accountant of this experiment, if at most `missing` clients are absent from any sum (by default as
        many as the spec tolerates)."""
        missing = tolerated(self.spec) if missing is None else missing
        if missing == self.plan.missing and not self.plan.noise_lost:
            return Accountant(self.plan, self.prepared.releases, self._alike)
        plan = self.plan._replace(missing=missing)
        return Accountant(plan, self.prepare(missing=missing).build(plan.hyper).releases)

    def proven_epsilon(self, rounds: int | None = None, begun: Sequence[tuple[int, int]] = ()) -> float:
        """Proven ε of the first rounds, or of those `begun`, for the spec's own view and adjacency."""
        if begun and self.spec.source_of_randomness == "os":
            return self.realised(begun).accountant().epsilon()
        return (self if rounds is None else self.first_rounds(rounds)).accountant().epsilon()

    @cached_property
    def _alike(self) -> list[np.ndarray]:
        """Clients that reveal the same when they take part. Looks at every client: there may be 100,000."""
        return alike(self.prepared.releases, self.plan.client_sizes, self.cohorts, self.plan.round_numbers)

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 of what a model of your own computes; empty for one of Dither's."""
        if self.spec.model.name in MODELS:
            return ""
        return program_digest(self.model, self.dataset.x_train.shape[1])

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of the encoded records and of who holds them."""
        digest = hashlib.sha256(self.dataset.digest.encode())
        # A folder's files have one already.
        records = () if self.dataset.digest else (self.problem.x, self.problem.y)
        for array in (*records, self.partition.order, self.partition.size):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


Arrays = tuple[np.ndarray, np.ndarray]


class Chosen(NamedTuple):
    """A spec, its records if they are already loaded, and a note on what was chosen."""

    spec: Spec
    dataset: data.Dataset | None = None
    note: str = ""


def choose(
    source: Spec | str | Path | Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
    *,
    records: Any = None,
    data_dir: str | Path | None = None,
) -> Chosen:
    """The spec of a preset, a TOML file, a mapping or a `Spec`, with `values` on top. For your own records without
    a method, Dither chooses what is not given (`defaults.completed`). `records` are given in Python."""
    given = Spec.given(source)
    on_top = dict(values or {})
    if records is not None:
        on_top["data.path"] = IN_MEMORY
    if isinstance(records, tuple) and len(records) == 3:
        on_top["data.partition"] = "column"
    keys = {**(given or {}), **on_top}
    if given is not None and keys.get("data.path") and "method" not in keys:
        from dither.experiment.defaults import completed  # which builds on this module

        return completed(keys, records, data_dir)
    spec = Spec.from_any(source).with_values(on_top) if given is None else Spec.from_any(keys)
    return Chosen(spec, None if records is None else load_data(spec, records=records))


def build_experiment(
    spec: Spec,
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    arrays: Arrays | None = None,
    stream: str = "",
    blank: bool = False,
) -> Experiment:
    """Load the data (unless given), deal it out, and make model and method ready.

    `arrays` are `pooled(dataset)`, for callers that make many experiments of one data set. `stream` is used
    instead of data.stream. `blank` says that nothing will be trained: features are then left out where possible.
    """
    devices.set_up()
    if dataset is None:
        blank = blank and not _has_pilot(spec, method(spec.method))
        dataset = load_data(spec, data_dir=data_dir, stream=stream, blank=blank)
    x, y = arrays = arrays or pooled(dataset)
    count = len(dataset.y_train)
    if spec.batch_size > count:
        raise SpecError(
            f"batch_size={spec.batch_size} exceeds the {count} training records of all clients together; lower it"
        )
    # Parts of the pooled arrays from here on, so that the records are held once.
    dataset = dataset._replace(x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    partition, problem = deal(spec, dataset, arrays)
    return assemble(spec, dataset, partition, problem)


def assemble(
    spec: Spec,
    dataset: data.Dataset,
    partition: data.ClientPartition,
    problem: engine.Problem,
    *,
    missing: int | None = None,
    federated: bool = False,
) -> Experiment:
    """Model, method and plan for records that are already assigned to clients. A party of a real federation
    (`federated`) knows only how many records the others hold (`partition.size`); nothing here needs more.
    Calibration does not rely on the noise of `missing` clients (by default as many as the spec tolerates)."""
    model = model_from_spec(spec.model, dataset.x_train.shape[1], len(dataset.classes), dataset.image_shape)
    num_params = count_params(jax.eval_shape(lambda: model.init(jax.random.key(0))))
    chosen = method(spec.method)
    prepared = _prepared(spec, model, partition, problem, num_params, chosen)
    if spec.secagg.noise == "discrete" and not prepared.plan.upload_noise:
        raise SpecError(
            "secagg.noise='discrete' is for methods that noise the finished upload (secure-fedavg, nbafl), not "
            f"for {spec.method}, whose noise is inside the local steps"
        )
    _check_supported(prepared, spec.method)
    experiment = Experiment(spec, dataset, partition, problem, model, prepared, chosen)
    if spec.method not in METHODS and (spec.data.path or federated):
        _refuse_callbacks(experiment)
    experiment = experiment.with_plan(**_completion(experiment, federated))
    calibrates = spec.privacy.noise == "proven" and math.isfinite(spec.privacy.epsilon)
    lost = _uploads_cut(experiment, noisy=not calibrates) or (not calibrates and _noise_rounded(experiment))
    experiment = experiment.with_plan(noise_lost=lost)
    if prepared.stop_when_proven and math.isfinite(spec.privacy.epsilon):
        experiment = experiment.first_rounds(_last_affordable(experiment))
    if not calibrates:
        return experiment
    if prepared.plan.assumed or spec.privacy.assume_credit:
        raise SpecError(
            "privacy.noise='proven' cannot rest on an assumption: drop assume_credit and sensitivity='paper'"
        )
    factor, plan = experiment.accountant(missing).noise_factors(), experiment.plan
    hyper = {
        name: np.asarray(value) * factor if name in plan.noise_names else value
        for name, value in plan.hyper.items()
    }
    calibrated = experiment.with_plan(hyper=hyper)
    if plan.epsilons:  # the louder a client's noise, the less its upload counts in a sum
        weights = 1 / factor / np.mean(1 / factor)
        calibrated = calibrated.with_plan(
            hyper={**hyper, "client_weight": weights},
            weights=weights,
            noise_ratio=noise_ratio(prepared.build(hyper), plan.client_sizes, weights),
            upload_unit=plan.upload_unit * float(weights.min()),
        )
    cut, rounded = _uploads_cut(calibrated), _noise_rounded(calibrated)
    calibrated = calibrated.with_plan(noise_lost=cut or rounded)
    if calibrated.plan.noise_lost and not plan.noise_projected and spec.privacy.view != "upload":
        how = "cut" if cut else "round away"
        bits = (
            "lower secagg.scale_bits, raise secagg.bound, or" if cut else "raise secagg.scale_bits, and if need be"
        )
        raise SpecError(
            f"with secagg.scale_bits={plan.scale_bits} a secure sum would {how} the noise of uploads, on which "
            f"privacy.view={spec.privacy.view!r} counts: {bits} set secagg.modulus_bits to 64"
        )
    claim = prepared.reclaim(calibrated.plan.hyper) if prepared.reclaim else prepared.claim
    return replace(calibrated, prepared=calibrated.prepared._replace(claim=claim))


def _check_supported(prepared: Prepared, method: str) -> None:
    """Refuse clients' own targets and an adaptive clip if the method would ignore them."""
    plan = prepared.plan
    if plan.epsilons and len(plan.epsilons) != plan.num_clients:
        raise SpecError(
            f"privacy.epsilons has {len(plan.epsilons)} entries for {plan.num_clients} clients; give one for each"
        )
    needs = {"epsilons": (plan.epsilons, "client_weight"), "clip_quantile": (plan.clip_quantile, "clip_quantile")}
    for key, (asked, entry) in needs.items():
        if asked and entry not in plan.hyper:
            raise SpecError(
                f"privacy.{key} is for methods that average noisy local steps (cpfed, concentrated, dp-sgd, "
                f"dp-dsgd), not {method}"
            )


def _refuse_callbacks(experiment: Experiment) -> None:
    """Refuse a method in a file that could stop at one record. It is traced with noise that asks no host."""
    spec, prepared, problem = experiment.spec, experiment.prepared, experiment.problem

    def one_round(hyper: Any, root: Any, x: Any, y: Any, number: Any) -> Any:
        algorithm, params = prepared.build(hyper), experiment.model.init(jax.random.key(0))
        state, drawn = algorithm.init(params), OsEntropy(root) if spec.source_of_randomness == "os" else root[0]
        records = Records(x, y, jax.numpy.arange(len(y)), number, number + 1)
        result = algorithm.client(
            engine.client_keys(root[0], number, number, drawn),
            algorithm.message(state),
            algorithm.client_init(params),
            records,
            Round(number, number, number + 1),
        )
        cohort = Cohort(number[None], number[None] == 0, number + 1)
        key = for_round(stream(drawn, "server"), number)
        return result, algorithm.server(key, state, result.upload, cohort)

    hyper = {name: np.asarray(value, np.float32) for name, value in prepared.hyper.items()}
    # Before it agrees, a party has no records at hand.
    arrays = [jax.ShapeDtypeStruct((max(1, len(a)), *a.shape[1:]), a.dtype) for a in (problem.x, problem.y)]
    refuse_callbacks(f"method {spec.method!r}", one_round, hyper, np.zeros(8, np.uint32), *arrays, np.int32(0))


def large_delta(spec: Spec, records: int, federated: bool) -> list[str]:
    """A warning if δ exceeds one record's share, or 0.01 on public data, where some papers use a larger share."""
    delta = spec.privacy.delta
    if delta <= (1 / records if federated or spec.data.path else 0.01):
        return []
    enough = 10.0 ** -math.ceil(math.log10(records))
    return [
        f"δ = {delta:g} lets the guarantee fail for {delta * records:,.0f} of {records:,} records: "
        f"set privacy.delta={enough:g} or smaller"
    ]


def _completion(experiment: Experiment, federated: bool) -> dict[str, Any]:
    """The entries of the plan that need the prepared method: who takes part, and what proofs may assume about
    model and data."""
    spec, dataset, prepared = experiment.spec, experiment.dataset, experiment.prepared
    plan = prepared.plan
    taking_part = engine.planned_cohorts(
        spec.seed,
        num_clients=plan.num_clients,
        cohort_size_at=prepared.cohort_size_at,
        design=plan.design,
        num_rounds=min(prepared.num_rounds or spec.num_rounds, spec.num_rounds),
    )
    not_covered = [text for text in (*dataset.notes, *prepared.caveats) if "not covered" in text]
    if spec.data.path and spec.data.split != "rows":
        not_covered.append("neighbours differ within one client's training records: the split counts as public")
    if spec.data.path and spec.source_of_randomness == "seeded":
        not_covered.append(
            "the noise comes from a seed: anyone who knows the seed, or sees another run with it, can subtract it"
        )
    if spec.privacy.view == "sum" and spec.aggregation == "off":
        not_covered.append("a server that sees single uploads: secagg.mode is 'off', and privacy.view is 'sum'")
    if spec.model.weights:
        not_covered.append("the data behind model.weights: the file counts as public")
    if spec.adjacency != ADD_REMOVE:  # the warning names the count
        not_covered += large_delta(spec, int(np.sum(plan.client_sizes)), federated)
    if plan.per_client and federated:
        not_covered.append("how many records a client holds: every party learns it")
    # Clipping each record's gradient keeps the steps of a model with one linear score those of a convex loss: all
    # gradients of a record have the direction (record, 1). No other clip and no other model does.
    model = experiment.model
    convex = model.convex and model.curvature is not None and spec.privacy.clip == "example"
    smoothness = _smoothness(experiment) if convex else None
    weights = np.ones(plan.num_clients) if plan.weights is None else plan.weights
    # What a method in a file does with its noise is unknown: only if it states weights do others count on it.
    stated = spec.method in METHODS or plan.weights is not None
    algorithm = prepared.build(plan.hyper)
    kept = jax.eval_shape(lambda: algorithm.client_init(model.init(jax.random.key(0))))
    return {
        "cohorts": tuple(taking_part),
        "noise_ratio": noise_ratio(algorithm, plan.client_sizes, weights) if stated else 0.0,
        # Whole numbers count steps; whatever else a client keeps may hold what its records did.
        "client_state": plan.client_state or any(leaf.dtype.kind not in "iu" for leaf in jax.tree.leaves(kept)),
        "convex": convex,
        "smoothness": smoothness,
        "not_covered": tuple(not_covered),
        "counts_shown": _counts_shown(experiment, smoothness, federated),
    }


def _last_affordable(experiment: Experiment) -> int:
    """The last round whose proven ε, for the spec's view and adjacency, is within privacy.epsilon."""
    budget = experiment.spec.privacy.epsilon
    rounds = bisect.bisect_right(range(1, len(experiment.cohorts) + 1), budget, key=experiment.proven_epsilon)
    if rounds == 0:
        raise SpecError(f"privacy.epsilon={budget:.15g} is spent in the first round; raise it or noise_std")
    return rounds


def aggregation(experiment: Experiment) -> Aggregation | None:
    """How the run's uploads are summed; None: in the open."""
    spec, secagg, plan = experiment.spec, experiment.spec.secagg, experiment.plan
    if plan.aggregation == "off":
        return None
    encoding = _encoding(experiment).check()
    fewest = max(min(spec.federation.min_clients, plan.cohort_size), plan.colluders + 2)
    rules = Rules(encoding.modulus_bits, secagg.threshold, plan.colluders, fewest, secagg.neighbours)
    secure_sum = Aggregation(plan.aggregation, encoding, rules, integers=plan.exact_sums)
    for size in {len(cohort) for cohort in plan.cohorts}:
        secure_sum.check_cohort(size)
    if plan.discrete_noise:
        secure_sum = secure_sum._replace(noise_std=_upload_noise(experiment, encoding))
    return secure_sum


def _encoding(experiment: Experiment) -> FixedPoint:
    """How uploads become integers of a secure sum."""
    plan, secagg = experiment.plan, experiment.spec.secagg
    largest = max(map(len, plan.cohorts))
    room = 2 if plan.discrete_noise else 1  # half of the range for the noise
    if plan.exact_sums:  # uploads are integers already
        return FixedPoint.fitting(largest, scale_bits=0, modulus_bits=secagg.modulus_bits)
    if secagg.bound:
        return FixedPoint(plan.scale_bits, secagg.modulus_bits, secagg.bound, room * largest)
    return FixedPoint.fitting(room * largest, scale_bits=plan.scale_bits, modulus_bits=secagg.modulus_bits)


def _uploads_cut(experiment: Experiment, *, noisy: bool = True) -> bool:
    """Whether floats that carry noise may be cut, where they are encoded or else where they are sent: if records
    all pull one way, and by eight deviations of the largest noise (if `noisy`). What is cut has lost noise that
    others count on."""
    plan, stretch = experiment.plan, 1.0  # the longest batch over its divisor
    if plan.exact_sums or plan.discrete_noise:
        return False
    if plan.clip == "example" and plan.batch_sampling.startswith("poisson"):
        # The longest batch follows from a count, which add/remove may not show: there it is the longest of any.
        width = batch_sampler(plan._replace(batch_sampling="poisson")).width
        stretch = (2.0**32 if plan.adjacency == ADD_REMOVE else width) / plan.batch_size
    smallest = min(map(len, plan.cohorts))
    heaviest = 1.0 if plan.weights is None else float(np.max(plan.weights) / np.mean(plan.weights))
    deviation = _largest_noise(experiment, smallest) if noisy else 0.0
    moved = stretch * plan.longest_upload + 8 * deviation
    moved += _moved_by_broadcast(experiment, heaviest * moved, noisy=noisy)
    if plan.clip_quantile:  # the share of unclipped records, up to 1, is sent as it is, whatever rate and clip are
        moved = max(moved, stretch + 8 * deviation / (plan.client_lr * CLIP_RANGE * COUNT_SHARE * plan.clip_norm))
    bound = REACH if plan.aggregation == "off" else _encoding(experiment).bound
    return heaviest / smallest * moved > bound


def _noise_rounded(experiment: Experiment) -> bool:
    """Whether the steps in which floats are encoded may swallow the least noise of an upload: that of the last
    round, at the smallest clip. From four steps on, rounding costs others nothing (docs/privacy.md, R6)."""
    plan = experiment.plan
    counted = plan.noise_ratio > 0 and not plan.client_state
    if not counted or plan.aggregation == "off" or plan.exact_sums or plan.discrete_noise:
        return False
    quietest = {int(np.argmin(plan.hyper[name])) for name in plan.noise_names} or {0}
    last = max(plan.round_numbers, default=len(plan.cohorts) - 1)
    infos = [RoundInfo(last, client, int(plan.client_sizes[client]), plan.cohort_size) for client in quietest]
    stds = [r.noise_std for info in infos for r in experiment.prepared.releases(info) if r.channel == "uplink"]
    least = min(stds, default=0.0)
    return least > 0 and least * plan.upload_unit < 4 * 2.0**-plan.scale_bits  # a unit of 0 is unknown


def _moved_by_broadcast(experiment: Experiment, moved: float, *, noisy: bool) -> float:
    """How far a broadcast model may carry a coordinate of the uploads that answer it, if a round moves the model
    by `moved` at most: by the pull of a regulariser outside the clip, or by how far a broadcast of NbAFL lies
    outside the ball of its clip."""
    plan, spec = experiment.plan, experiment.spec
    param_clip = float(plan.options.get("param_clip", 0.0))
    pull = 2 * plan.client_lr * plan.l2 if plan.clip == "example" or not plan.l2_inside_clip else 0.0
    if not param_clip and not pull:
        return 0.0
    leaves = jax.tree.leaves(experiment.model.init(stream(spec.seed, "init")))
    start = max(float(np.max(np.abs(leaf), initial=0.0)) for leaf in leaves)
    # A round takes a share of the model away (NbAFL: all of it), several times if the server's rate is large or
    # the heaviest clients are left. The model may grow if that is more than all of it, for a regulariser twice.
    weights = np.ones(plan.num_clients) if plan.weights is None else plan.weights
    left = max(min(map(len, plan.cohorts)) - tolerated(spec), 1)
    often = max(1.0, spec.server_lr) * float(np.mean(np.sort(weights)[-left:]) / np.mean(weights))
    taken, most = (1.0, 1.0) if param_clip else (min(plan.local_steps * pull, 2.0), 2.0)
    if pull > 2 or often * taken > most * (1 + 1e-9) or spec.server_optimizer != "sgd":
        return math.inf  # the model may go anywhere
    if param_clip:
        info = RoundInfo(0, 0, int(plan.client_sizes[0]), plan.cohort_size)
        stds = [release.noise_std for release in experiment.prepared.releases(info)] if noisy else []
        lost = plan.cohort_size / max(plan.cohort_size - tolerated(spec), 1)  # whose noise the server makes up for
        return max(start - param_clip, 8 * lost * math.hypot(*stds))
    return plan.local_steps * pull * (start + len(plan.cohorts) * max(1.0, spec.server_lr) * moved)


def _largest_noise(experiment: Experiment, cohort_size: int) -> float:
    """The largest deviation of any client's noise on the change of its model, in the first round, at the largest
    clip."""
    plan, releases = experiment.plan, experiment.prepared.releases
    loudest = {int(np.argmax(plan.hyper[name])) for name in plan.noise_names} or {0}  # 0 if all have the same
    infos = [RoundInfo(0, client, int(plan.client_sizes[client]), cohort_size) for client in loudest]
    squares = [sum(r.uses * r.noise_std**2 for r in releases(info) if r.channel == "uplink") for info in infos]
    deviation = math.sqrt(max(squares)) * (CLIP_RANGE if plan.clip_quantile else 1.0)
    return deviation * (1.0 if plan.upload_noise else plan.client_lr)  # upload, or gradients


def _upload_noise(experiment: Experiment, encoding: FixedPoint) -> Callable[[int, int, int], float]:
    """std of the noise on a client's upload before its weight, at (round, client, cohort size)."""
    plan, sizes = experiment.plan, [len(cohort) for cohort in experiment.cohorts]
    releases = experiment.prepared.releases

    def std(index: int, client: int, cohort_size: int) -> float:
        info = RoundInfo(index, client, int(experiment.partition.size[client]), cohort_size)
        return next(release.noise_std for release in releases(info) if release.channel == "uplink")

    # The noise of a whole sum must fit the other half of the range: ten standard deviations of it.
    count = len(experiment.partition.size)
    shares = np.ones(count) if plan.weights is None else plan.weights / plan.weights.min()
    weights = plan.upload_unit * shares * max(sizes) / min(sizes)
    stds = [max(std(0, client, size) for size in set(sizes)) for client in range(count)]
    loudest = np.sort(np.array(stds) * weights)[-max(sizes) :] * 2.0**encoding.scale_bits
    if float(loudest[-1]) ** 2 >= MOST_VARIANCE:
        raise SpecError(
            f"the noise of an upload has a std of {loudest[-1]:.3g} at {encoding.scale_bits} fractional bits; at "
            f"most {math.sqrt(MOST_VARIANCE):.3g} can be drawn: lower secagg.scale_bits"
        )
    reach = 10 * float(np.sqrt(np.sum(loudest**2)))
    if reach >= 2.0 ** (encoding.modulus_bits - 2):
        raise SpecError(
            f"the noise of a sum reaches {reach:.3g} at {encoding.scale_bits} fractional bits, beyond "
            f"2^{encoding.modulus_bits - 2}; lower secagg.scale_bits, or set secagg.modulus_bits to 64"
        )
    return std


def tolerated(spec: Spec) -> int:
    """How many clients may be absent from a sum that is still opened; 0 if no client can drop out."""
    if not spec.federation.dropout and spec.federation.refused != "continue":
        return 0
    return max(spec.cohort_size - least_clients(spec), 0)


def least_clients(spec: Spec) -> int:
    """Answers without which a round is not used."""
    least = min(spec.federation.min_clients, spec.cohort_size)
    if spec.aggregation == "off":
        return least
    rules = Rules(threshold=spec.secagg.threshold, colluders=spec.colluders, min_clients=least)
    return rules.least(spec.cohort_size)


def _counts_shown(experiment: Experiment, smoothness: float | None, federated: bool) -> str:
    """Which output of the run depends on how many records a client holds. Only if none does (an empty string) is
    there a proof for add/remove, where neighbours differ in that count."""
    spec = experiment.spec
    if federated:
        return "a federation shows every party's count to all parties"
    if not experiment.plan.ignores_counts:
        return f"the noise, the weights or the claimed ε of {spec.method} depend on the counts"
    if not spec.batch_sampling.startswith("poisson"):
        return f"the share of the records in {spec.batch_sampling} batches depends on the count (G3)"
    if not spec.sampling_rate:
        return "the sampling rate is batch_size over the count (set sampling_rate, a public number)"
    if spec.batch_sampling == "poisson":
        return "batches are cut at a length that depends on the largest count ('poisson-full' cuts none)"
    if spec.data.split != "given" or spec.data.part != "all" or experiment.dataset.streamed:
        return "the summary says how many records were pooled, taken or read"
    if experiment.plan.clip_quantile and experiment.plan.exact_noise:
        return "how exactly an adaptive clip is counted in float32 depends on the largest count"
    if smoothness is not None and spec.local_steps > 1:
        return "the proof for sums of several steps uses the longest batch, which depends on the largest count"
    if spec.adjacency != ADD_REMOVE:
        return "warnings and last digits follow from counts unless privacy.adjacency is 'add/remove'"
    return ""


def squared_norm_bound(spec: Spec, dataset: data.Dataset) -> float | None:
    """A public bound on the squared norm of any record as the model reads it; None if there is none."""
    if spec.data.transform != "none":
        return data.NORM_BOUND**2
    if dataset.schema is not None:
        return dataset.schema.squared_norm_bound(spec.data.encoding, spec.data.features)
    if dataset.image_shape and not spec.data.path:
        return float(dataset.x_train.shape[1])  # every pixel lies in [0, 1]
    return None


def _smoothness(experiment: Experiment) -> float | None:
    """A bound on the smoothness of any client's loss, from public bounds alone: the curvature of the loss in its
    score (1/4 for one sigmoid output, 1/2 for two softmax outputs, 1 for squared and Huber loss, times the largest
    class weight) times R², R the largest norm of (record, 1) (G7b)."""
    spec, dataset = experiment.spec, experiment.dataset
    if not dataset.covered or experiment.model.curvature is None:
        return None  # bounds that were read from the records are no public bounds
    squared = squared_norm_bound(spec, dataset)
    if squared is None:
        return None
    curvature = (squared + 1) * experiment.model.curvature
    if spec.batch_sampling.startswith("poisson"):
        # The method may have set its own batch size: what it releases says which.
        first = RoundInfo(0, 0, int(experiment.partition.size[0]), spec.cohort_size)
        releases = experiment.prepared.releases(first)
        if not releases:
            raise SpecError(
                f"method={spec.method!r} releases nothing: `releases` must return a `Release` for everything that "
                "leaves a client, with noise_std=0.0 where there is no noise"
            )
        batch_size = releases[0].sampling.batch_size
        sampler = sampling.make(
            spec.batch_sampling,
            batch_size=batch_size,
            local_steps=spec.local_steps,
            client_sizes=experiment.partition.size,
            sampling_rate=spec.sampling_rate,
        )
        curvature *= sampler.width / batch_size  # the longest batch over the fixed divisor
    return curvature + 2 * spec.model.l2


def _prepared(
    spec: Spec,
    model: Model,
    partition: data.ClientPartition,
    problem: engine.Problem,
    num_params: int,
    chosen: Method,
) -> Prepared:
    """The spec's method. NbAFL's param_clip = 0 asks for the median parameter norm of a run without clip and
    noise, which is itself a look at private data (errata N7, G9)."""
    shape: dict[str, Any] = {"client_sizes": partition.size, "num_params": num_params, "chosen": chosen}
    if not _has_pilot(spec, chosen):
        return prepare(spec, model, **shape)
    if spec.data.path:
        raise SpecError(
            "method_options.param_clip=0 trains a pilot without noise, which no ledger could charge to your own "
            "records; give param_clip a public value"
        )
    pilot = prepare(spec.with_values({"privacy.noise": "none", "method_options.param_clip": 1e9}), model, **shape)
    history = engine.simulate(
        pilot.build,
        model,
        problem,
        num_rounds=spec.num_rounds,
        cohort_size=pilot.cohort_size_at,
        seeds=[spec.seed],
        hyper={name: np.asarray(value)[None] for name, value in pilot.hyper.items()},
        eval_every=1,
    ).history
    norm = float(np.median([entry.metrics[chosen.pilot_metric][0] for entry in history]))
    prepared = prepare(spec.with_values({"method_options.param_clip": norm}), model, **shape)
    caveat = f"not covered: param_clip = {norm:.4g} is the median norm of a non-private pilot (errata N7)"
    return prepared._replace(caveats=(*prepared.caveats, caveat))


def _has_pilot(spec: Spec, chosen: Method) -> bool:
    return bool(chosen.pilot_metric) and not spec.method_options["param_clip"]


def load_data(
    spec: Spec,
    *,
    data_dir: str | Path | None = None,
    stream: str = "",
    records: Any = None,
    blank: bool = False,
) -> data.Dataset:
    """The spec's data set, encoded. `stream` is used instead of data.stream, `records` instead of a file. If
    `blank`, a named set comes without features where nothing is made of them."""
    d = spec.data
    if d.split == "rows" and not d.path:
        raise SpecError("data.split='rows' is for your own tables (data.path); leave it out")
    if d.path == IN_MEMORY and records is None:
        raise SpecError("the records of this run were given in Python; give them again: dither.run(..., data=...)")
    dataset = data.load(
        "" if d.path else d.name,
        path=d.paths if records is None else "",
        records=records,
        test_path=d.test_path,
        label=d.label,
        schema=d.schema,
        encoding=d.encoding,
        features=d.features,
        data_dir=data_dir,
        test_fraction=d.test_fraction,
        group_column=d.column if d.partition == "column" else "",
        seed=spec.seed,
        stream=stream or d.stream,
        task=spec.task,
        label_bounds=d.label_bounds,
        # No record decides whether a public one is held out.
        split_by_rows=d.split == "rows" or (bool(d.path) and d.public_fraction > 0),
        blank=blank and d.transform == "none" and d.part == "all",
    )
    if d.split == "rows" and dataset.schema is None:
        raise SpecError("data.split='rows' is for your own tables, not for arrays; leave it out")
    if d.test_path and dataset.test_hashes is None:  # then others would be scored
        raise SpecError(
            f"data.test_path={d.test_path!r} does not go with arrays that are given in Python; give both as files"
        )
    if d.part == "public" and d.public and not dataset.covered:
        raise SpecError(
            f"the encoding of {d.path!r} would be read from its private records too; write a schema with `dither "
            "data schema` (for arrays, list their classes) and confirm that its values are public"
        )
    if d.transform != "none":
        dataset = data.transformed(dataset, d.transform)
    if d.split not in ("given", "rows"):
        if dataset.test_hashes is not None:  # a ledger knows the folder by the other records
            raise SpecError(
                f"data.split={d.split!r} would train on x_test.npy of {d.path!r}, which no ledger charges; leave "
                "data.split out, or put all records into x.npy"
            )
        dataset = data.pool(dataset)
    return dataset if d.part == "all" else data.public_part(dataset, d.part, d.public_fraction)


def refuse_charged(
    path: str, rows: data.RecordHashes | None = None, known: Sequence[KnownRecords] | None = None
) -> None:
    """`SpecError` where a file that is declared public holds records that were charged to a ledger of this user,
    whatever it is called and however it is written: those are private. `rows` are their hashes, `known` what some
    ledgers know of them (by default, all do)."""
    if known is None:
        known = known_records(data.hash_records(path) if rows is None else rows)
    for each in known:
        if each.shared.share > 0.5 or each.shared.people:  # a few whole rows may be equal by chance
            raise SpecError(
                f"{path!r} is declared public, but it and {each.file}, which was charged to {each.path!r} as "
                f"private, share {each.shared}; leave it out"
            )


def by_file(spec: Spec, dataset: data.Dataset) -> bool:
    """Whether each of several files is one client."""
    return spec.data.partition == "files" or (spec.data.partition == "iid" and bool(dataset.sources))


def pooled(dataset: data.Dataset) -> Arrays:
    """All records of a data set, training before test, held once for any number of runs. On a CPU the compiled
    program reads these very arrays (`arrays.aligned`): do not write to them. Streamed records stay on the disk."""
    in_place = dataset.streamed or dataset.blank
    x = data.all_records(dataset) if in_place else aligned([dataset.x_train, dataset.x_test])
    return x, aligned([dataset.y_train, dataset.y_test])


def deal(
    spec: Spec, dataset: data.Dataset, arrays: Arrays | None = None
) -> tuple[data.ClientPartition, engine.Problem]:
    """Who holds which records, and what the model is scored on."""
    d = spec.data
    x, y = arrays or pooled(dataset)
    everything = partition_of(spec, dataset, spec.seed)
    if d.split in ("given", "rows"):
        count, scored = len(dataset.y_train), len(dataset.y_test) if spec.scored else 0
        rows, even = np.arange(count, count + scored), np.full(scored, 1.0 / max(scored, 1))
        return everything, engine.Problem(x, y, [everything], [rows], [even], _as_stored(dataset, everything))
    # Each client keeps 80% for training; accuracy is the mean over the clients' own test or validation records.
    train, test, validation = data.per_client_split(everything, fractions=(0.8, 0.1, 0.1), seed=spec.seed)
    test = validation if d.split == "validation" else test
    weights = np.repeat(1.0 / (len(test.size) * np.maximum(test.size, 1)), test.size)
    at = slice(0) if not spec.scored else np.argsort(test.order) if dataset.digest else slice(None)
    return train, engine.Problem(x, y, [train], [test.order[at]], [weights[at]], _as_stored(dataset, train))


def partition_of(spec: Spec, dataset: data.Dataset, seed: int) -> data.ClientPartition:
    """Who holds which training records, before any are held out for tests."""
    return data.partition(
        dataset,
        kind="files" if by_file(spec, dataset) else spec.data.partition,
        num_clients=spec.num_clients,
        seed=seed,
        similarity=spec.data.similarity,
        alpha=spec.data.alpha,
        groups=dataset.groups,
        records_per_client=spec.data.records_per_client,
    )


def _as_stored(dataset: data.Dataset, partition: data.ClientPartition) -> list[np.ndarray]:
    """The clients' rows in the order of a folder's files, so that reading from disk is sequential. The order is
    the same for records in memory, so that the training loss is the same to the last bit."""
    return [np.sort(partition.order)] if dataset.digest else []


def stop_reason(experiment: Experiment) -> str:
    """Why the method stops before the requested number of rounds; empty if it does not."""
    planned, asked = planned_rounds(experiment), experiment.spec.num_rounds
    if planned >= asked:
        return ""
    which = "proven" if experiment.prepared.stop_when_proven else "claimed"
    epsilon = experiment.spec.privacy.epsilon
    return f"the {which} ε reaches privacy.epsilon={epsilon:.15g} after round {planned} of {asked}"


def planned_rounds(experiment: Experiment) -> int:
    """Rounds the run will make: the spec's, or fewer if the method's budget is spent before."""
    return len(experiment.cohorts)


def rounding(experiment: Experiment, missing: int) -> RoundingMargin | None:
    """What rounding before the sum could add to the proven ε of sums, by the rule of thumb of errata G8: √d·2^-f
    on top of the sensitivity. Not a proof. None if nothing is rounded or the method's unit is unknown."""
    how = aggregation(experiment)
    if how is None or how.noise_std or how.integers or not experiment.plan.upload_unit:
        return None
    accountant, plan = experiment.accountant(missing=missing), experiment.plan
    uplink = [r for g in accountant.clients for releases, _ in g.most for r in releases if r.channel == "uplink"]
    if not uplink or not all(r.noise_std and math.isfinite(r.sensitivity) for r in uplink):
        return None
    relation = REPLACE_ONE if plan.adjacency == REPLACE_ONE else ZERO_OUT
    least = min(r.noise_std / step_multiplier(r, relation) for r in uplink)
    if not least:
        return None
    step = 2.0**-how.how.scale_bits
    margin = math.sqrt(plan.num_params) * step / (plan.upload_unit * least)
    # Against a server that sees every upload rounding reveals nothing more: that bound holds as it is.
    value = min(accountant.epsilon("upload"), accountant.epsilon("sum", noise=1 / (1 + margin)))
    return RoundingMargin(step, margin, value)


def claim_after(experiment: Experiment, rounds: int, client: int | None = None) -> Claim:
    """The paper's ε for the rounds that were made, at the noise that was used: the largest over the clients, or
    that of one client's noise."""
    plan = experiment.plan
    again = experiment.prepare(
        num_rounds=rounds, noise="none", noise_decay_start=min(plan.noise_decay_start, rounds)
    )
    hyper = dict(plan.hyper)
    if client is not None:
        hyper |= {name: np.asarray(hyper[name])[client] for name in plan.noise_names}
    return again.reclaim(hyper) if again.reclaim else experiment.prepared.claim


def client_epsilons(experiment: Experiment, missing: int | None = None) -> tuple[ClientEpsilon, ...]:
    """A row for each client, if clients have their own targets."""
    plan = experiment.plan
    if not plan.epsilons:
        return ()
    accountant, proven = experiment.accountant(missing), np.zeros(plan.num_clients)
    for group in accountant.clients:
        proven[group.members] = accountant.of(group.members[:1]).epsilon(unit=plan.unit)
    rounds = min(len(plan.cohorts), plan.num_rounds)
    claims = {
        std: claim_after(experiment, rounds, client).value
        for client, std in enumerate(np.asarray(plan.hyper["noise_std"]).tolist())
    }
    names = experiment.partition.names or tuple(map(str, range(plan.num_clients)))
    columns = (names, plan.epsilons, plan.hyper["noise_std"], proven, plan.hyper["client_weight"])
    return tuple(
        ClientEpsilon(str(name), target, claims[float(std)], float(value), float(weight))
        for name, target, std, value, weight in zip(*columns, strict=True)
    )


# The simulator


class Compiled(NamedTuple):
    """The simulation, what makes its rounds (itself, or one that streams its records), and what they read."""

    simulation: engine.Simulation
    rounds: engine.Simulation | streaming.Streamed
    inputs: engine.Inputs


def compiled(experiment: Experiment, *, keep_programs: bool = False, **options: Any) -> Compiled:
    """The engine for one run. `options` come on top of what the spec asks for. `keep_programs` keeps what is
    compiled for the next process."""
    options = {**engine_options(experiment), **sharing(experiment), **options}
    key = program_key(experiment, options) if keep_programs else ""
    simulation = make_simulation(experiment, **options, program_key=key)
    rounds: engine.Simulation | streaming.Streamed = simulation
    if experiment.dataset.streamed:
        held = _held(experiment, simulation.shards)
        rounds = streaming.Streamed(simulation, experiment.problem, experiment.cohorts, held)
    inputs = rounds.inputs(
        experiment.problem, seeds=[experiment.spec.seed], hyper=hypers([experiment]), cohorts=designs([experiment])
    )
    return Compiled(simulation, rounds, inputs)


def check(experiment: Experiment, begun: Mapping[str, Any] | None = None) -> Shards:
    """The devices for one run. Refuses what cannot be shared among processes, and records that stream through too
    little memory.

    `begun` is the provenance of a run to be continued. It gets as many devices as it had, whatever would be chosen
    here: another number would add its sums in another order, to other bits."""
    shards: Shards = sharing(experiment)["shards"]
    wanted = int((begun or {}).get("devices", shards.devices))
    # Among processes everyone gives as many; and a run that several began, any number of them may continue.
    if begun and wanted != shards.devices and distributed.count() == 1:
        here = len(distributed.devices(wanted))
        if here == wanted:
            shards = Shards(clients=wanted)
        elif "processes" not in begun:
            raise RunExists(
                f"this run was begun on {wanted} devices; {here} devices would add its sums in another order. "
                f"Continue it on {wanted} (on a CPU: DITHER_DEVICES={wanted}), or start a new run"
            )
    if experiment.dataset.streamed:
        _held(experiment, shards)
    return shards


def make_simulation(experiment: Experiment, **options: Any) -> engine.Simulation:
    """The simulator for runs like this one."""
    return engine.Simulation(
        experiment.model,
        experiment.prepared.build,
        num_clients=len(experiment.partition.size),
        cohort_size_at=experiment.prepared.cohort_size_at,
        **{**engine_options(experiment), **options},
    )


def hypers(experiments: Sequence[Experiment]) -> dict[str, np.ndarray]:
    """The methods' values of a batch of runs."""
    each = [compiled_hyper(experiment) for experiment in experiments]
    return {name: np.stack([np.asarray(hyper[name]) for hyper in each]) for name in each[0]}


def engine_options(experiment: Experiment) -> dict[str, Any]:
    """What a spec asks of the simulator, apart from method, data and seeds."""
    spec, prepared = experiment.spec, experiment.prepared
    noisy = any(np.any(prepared.hyper[name]) for name in prepared.plan.noise_names)
    large = devices.sequential_clients(step_numbers(experiment))
    # Wide vectors change the last bits of other products: of convolutions, and of a single score or record.
    dense = spec.model.name in ("softmax", "mlp") and len(experiment.dataset.classes) > 2
    return {
        "layout": "loop" if large else "vmap",
        "wide_vectors": large and dense and batch_records(experiment) > 1,
        "randomness": spec.source_of_randomness,
        "aggregation": aggregation(experiment),
        "dropout": spec.federation.dropout,
        "min_clients": min(spec.federation.min_clients, spec.cohort_size),
        "max_norm": spec.federation.max_norm,
        # Without a claimed ε and without noise a client whose update is not finite may be named.
        "refuse": math.isinf(prepared.claim.value) and not noisy,
    }


def sharing(experiment: Experiment, runs: int = 1) -> dict[str, Any]:
    """How a batch of runs like this one is shared among devices, and whether a device's runs go one by one."""
    secure_sum, records, spec = aggregation(experiment), experiment.problem.x.nbytes, experiment.spec
    on_host = secure_sum is not None and not secure_sum.compiled
    if spec.source_of_randomness == "os" or on_host or experiment.dataset.streamed:
        _refuse_processes(experiment)
    if on_host:
        return {"shards": ONE_DEVICE}
    if experiment.dataset.streamed:
        records = min(records, int(streaming.GB * spec.data.stream_memory) // 2)  # a block at work
    if runs == 1:
        return {"shards": devices.for_one_run(round_flops=_round_flops(experiment), record_bytes=records)}
    return {
        "shards": devices.for_many_runs(runs, record_bytes=records),
        "sequential_runs": devices.sequential_runs(4 * spec.cohort_size * step_numbers(experiment)),
    }


def sharing_note(experiment: Experiment) -> str:
    """A warning if it does not pay to share this run among processes; otherwise empty."""
    flops = _round_flops(experiment)
    if distributed.count() == 1 or devices.worth_sharing(flops):
        return ""
    return (
        f"a round of this run has about {flops:.0e} operations: its {distributed.count()} processes wait for "
        f"each other longer than they compute, so one process is faster"
    )


def _refuse_processes(experiment: Experiment) -> None:
    if distributed.count() == 1:
        return
    spec = experiment.spec
    if spec.source_of_randomness == "os":
        what = "randomness='os': the server's noise must not differ from process to process"
    elif experiment.dataset.streamed:
        what = "streamed records: each would read its own (data.stream='no' holds them in memory)"
    elif spec.secagg.noise == "discrete":
        what = "secagg.noise='discrete': such noise is added on one host"
    elif spec.aggregation == "real":
        what = "secagg.mode='real': the protocol runs on one host ('ideal' gives the same sums)"
    else:
        what = f"secagg.modulus_bits={spec.secagg.modulus_bits}: such sums stay on one host (32 can be shared)"
    raise SpecError(f"{distributed.count()} processes cannot share {what}; use one process")


def step_numbers(experiment: Experiment) -> int:
    """Numbers that one client works on in a local step: its model and its batch."""
    return experiment.num_params + batch_records(experiment) * int(np.prod(experiment.problem.x.shape[1:]))


def batch_records(experiment: Experiment) -> int:
    """Records in a batch."""
    full = experiment.spec.batch_sampling == "full"
    return int(experiment.partition.size.max()) if full else experiment.spec.batch_size


def _round_flops(experiment: Experiment) -> float:
    steps = experiment.spec.local_steps * experiment.spec.cohort_size
    return 6.0 * experiment.num_params * batch_records(experiment) * steps


def _held(experiment: Experiment, shards: Shards) -> streaming.Room:
    """How many streamed records are in memory at a time; refuses if a round has more."""
    sizes, memory = experiment.partition.size, streaming.GB * experiment.spec.data.stream_memory
    features = experiment.problem.x.shape[1]
    at, most = streaming.most_in_a_round(experiment.cohorts, sizes)
    taking_part = np.unique(np.concatenate(experiment.cohorts))
    held = streaming.room(
        memory,
        features=features,
        shards=shards,
        wanted=int(sizes[taking_part].sum(dtype=np.int64)),
        scored=max(len(experiment.partition.order), len(experiment.problem.test_rows[0])),
    )
    if held.rows >= most:
        return held
    needed = streaming.memory_for(most, features=features, shards=shards) / streaming.GB
    fixes = [f"raise it to {math.ceil(needed * 100) / 100:g}", "lower cohort_size"]
    if experiment.spec.method_options.get("first_round") == "all" and at == 0:
        fixes[1] = "set method_options.first_round='cohort' (round 0 takes everyone)"
    raise SpecError(
        f"data.stream_memory={experiment.spec.data.stream_memory:g} (GB) has room for {held.rows:,} records in a "
        f"block, but round {at} takes {len(experiment.cohorts[at]):,} clients with {most:,}: {' or '.join(fixes)}"
    )


def compiled_hyper(experiment: Experiment) -> dict[str, Any]:
    """The method's values as the compiled rounds take them: without the noise that is added on the integers."""
    hyper = dict(experiment.prepared.hyper)
    if experiment.spec.secagg.noise == "discrete":
        name = experiment.plan.upload_noise
        hyper[name] = np.zeros_like(np.asarray(hyper[name]))
    return hyper


def designs(experiments: Sequence[Experiment]) -> list[np.ndarray] | None:
    """The participation designs of the runs, or None where cohorts are drawn as they go."""
    planned = [experiment.plan.design for experiment in experiments if experiment.plan.design is not None]
    return planned or None


# What a run's bits depend on


def facts(experiment: Experiment) -> dict[str, str]:
    """What must be equal in all processes that share a run, by name."""
    return {
        **surroundings(experiment.spec),
        "the data": experiment.data_digest[:16],
        "the model": experiment.model_digest,
        "noise, rates and clips": value_digest(experiment)[:12],
    }


def surroundings(spec: Spec) -> dict[str, str]:
    """Versions, the kind of device, and the method if it is a file."""
    versions = devices.versions()
    here = {name: versions[name] for name in ("dither", "jax", "numpy")} | {"its device": devices.device_kind()}
    if Path(spec.method).is_file():
        here["the method's file"] = hashlib.sha256(Path(spec.method).read_bytes()).hexdigest()[:12]
    return here


def value_digest(experiment: Experiment) -> str:
    """SHA-256 of the values that the compiled rounds take."""
    digest = hashlib.sha256()
    for name, value in sorted(compiled_hyper(experiment).items()):
        digest.update(name.encode() + np.asarray(value, np.float64).tobytes())
    return digest.hexdigest()


def origin(experiment: Experiment, begun: Mapping[str, Any]) -> str:
    """SHA-256 of all that the bits of a seeded run depend on: spec and seed, records, code, versions, processor,
    settings of the compiler, devices. What has one origin releases the same bits; whatever may move a bit makes
    another. `begun` is the run's provenance."""
    about = {
        **facts(experiment),
        "spec": experiment.spec.digest(),
        "records": [experiment.data_digest, experiment.dataset.streamed],
        "code": _code()[0],
        "python": platform.python_version(),
        "libraries": [(name, metadata.version(name)) for name in LIBRARIES],
        "device": devices.device(),
        "processor": [platform.machine(), devices.cores(), *sorted(_processor())],
        "compiler": [*_compiler_variables(), repr(sorted(jax.config.values.items()))],
        "devices": [begun.get("devices"), distributed.count()],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def program_key(experiment: Experiment, options: Mapping[str, Any]) -> str:
    """SHA-256 of everything from which the compiled rounds are traced; empty if they must be traced again.

    This is the case if not all of it is known: a method or a model in the user's own file, several processes, or
    code that was edited since this process began. It is also the case if randomness is not seeded: nothing drawn
    from the operating system may be part of a program that is used twice."""
    spec, (code, newest) = experiment.spec, _code()
    ours = spec.method in METHODS and spec.model.name in MODELS
    seeded = options["randomness"] == "seeded"
    if not (ours and seeded) or distributed.count() > 1 or newest > _BEGAN:
        return ""
    plan = {name: value for name, value in experiment.plan._asdict().items() if name != "cohorts"}
    about = (origin(experiment, {}), code, sorted(options.items(), key=lambda item: item[0]), plan)
    return hashlib.sha256(repr(about).encode()).hexdigest()


@cache
def _code() -> tuple[str, float]:
    """SHA-256 of Dither's own code, and when it was last changed."""
    digest, newest = hashlib.sha256(), 0.0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
        newest = max(newest, path.stat().st_mtime)
    return digest.hexdigest(), newest


def _compiler_variables() -> list[str]:
    """Variables by which the compiler and its libraries choose how to add numbers up, and by how many threads."""
    names = ("XLA_", "NPROC", "PJRT_", "ONEDNN_", "DNNL_", "CUBLAS_", "NVIDIA_TF32")
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(names))


def _processor() -> set[str]:
    """The processor's name and what it can do: compiled programs depend on both."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {platform.processor()}
    return {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
