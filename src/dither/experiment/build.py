"""A spec brought to life: data, who holds it, the model, the method and what it proves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dither import accounting, data, models
from dither.accounting import accountant
from dither.errors import SpecError
from dither.privacy import sampling
from dither.secagg.encoding import FixedPoint
from dither.simulation import cohorts, devices, engine
from dither.simulation.aggregation import Aggregation
from dither.simulation.arrays import aligned
from dither.spec import Spec, method, prepare
from dither.types import Claim, Prepared, RoundInfo


@dataclass(frozen=True)
class Experiment:
    """A spec brought to life: data, who holds it, the model and the method."""

    spec: Spec
    dataset: data.Dataset
    partition: data.ClientPartition
    problem: engine.Problem
    model: models.Model
    prepared: Prepared
    num_params: int
    cohorts: list[np.ndarray]  # who takes part in each round
    numbers: tuple[int, ...] = ()  # of these rounds, where some were made twice; empty: 0, 1, 2, ...
    missing: int = 0  # of the spec's colluders: those who are merely not in the sum
    federated: bool = False  # of a real federation, whose parties show each other their record counts

    @cached_property
    def data_digest(self) -> str:
        """SHA-256 of the encoded records and of who holds them."""
        digest = hashlib.sha256(self.dataset.digest.encode())
        # A folder's files have one already.
        records = () if self.dataset.digest else (self.problem.x, self.problem.y)
        for array in (*records, self.partition.order, self.partition.size):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    # Each asks every client once, of whom there may be a hundred thousand.

    @cached_property
    def alike(self) -> list[np.ndarray]:
        """Clients that reveal the same when they take part."""
        releases = self.prepared.build(self.prepared.hyper).releases
        return accountant.alike(releases, self.partition.size, self.cohorts, self.numbers)

    @cached_property
    def noise_ratio(self) -> float:
        """Least over largest noise that a client adds to the sum."""
        alike = np.ones(len(self.partition.size))
        weights = alike if self.prepared.weights is None else self.prepared.weights
        return accountant.noise_ratio(self.prepared.build(self.prepared.hyper), self.partition.size, weights)


Arrays = tuple[np.ndarray, np.ndarray]


def build_experiment(
    spec: Spec,
    *,
    data_dir: str | Path | None = None,
    dataset: data.Dataset | None = None,
    arrays: Arrays | None = None,
    stream: str = "",
) -> Experiment:
    """Load the data (unless given), deal it out, and make model and method ready.

    `arrays` are `pooled(dataset)`, for callers that make many experiments of one data set. `stream` is used
    instead of data.stream.
    """
    devices.set_up()
    if dataset is None:
        dataset = load_data(spec, data_dir=data_dir, stream=stream)
    x, y = arrays = arrays or pooled(dataset)
    count = len(dataset.y_train)
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
    """Model and method for records that are dealt out already. Of the others' records a member of a real
    federation knows the counts alone (`partition.size`), and nothing here needs more. `missing` is how many
    clients' noise a calibration must not count on (by default as many as the spec tolerates)."""
    model = models.make(
        spec.model.name,
        num_features=dataset.x_train.shape[1],
        num_classes=len(dataset.classes),
        hidden=spec.model.hidden,
        image_shape=dataset.image_shape,
    )
    num_params = models.count_params(jax.eval_shape(model.init, jax.random.key(0)))
    prepared = _prepared(spec, model, partition, problem, num_params)
    num_rounds = min(prepared.num_rounds or spec.num_rounds, spec.num_rounds)
    if spec.secagg.noise == "discrete" and not prepared.upload_noise:
        raise SpecError(
            "secagg.noise='discrete' is for methods that noise the finished upload (secure-fedavg, nbafl), not "
            f"for {spec.method}, whose noise is inside the local steps"
        )
    who = cohorts.planned(
        spec.seed,
        num_clients=len(partition.size),
        cohort_size_at=prepared.cohort_size_at,
        design=prepared.cohorts,
        num_rounds=num_rounds,
    )
    experiment = Experiment(
        spec, dataset, partition, problem, model, prepared, num_params, who, federated=federated
    )
    if prepared.stop_when_proven and math.isfinite(spec.privacy.epsilon):
        experiment = replace(experiment, cohorts=who[: _last_affordable(experiment)])
    if spec.privacy.noise != "proven" or math.isinf(spec.privacy.epsilon):
        return experiment
    if prepared.assumed or spec.privacy.assume_credit:
        raise SpecError(
            "privacy.noise='proven' cannot rest on an assumption: drop assume_credit and sensitivity='paper'"
        )
    judged = with_missing(experiment, tolerated(spec) if missing is None else missing)
    calibrated = accountant.calibrated(
        judged.prepared,
        partition.size,
        who,
        circumstances(judged),
        epsilon=spec.privacy.epsilon,
        delta=spec.privacy.delta,
        view=spec.privacy.view,
        adjacency=spec.adjacency,
        unit=spec.privacy.unit,
    )
    return replace(experiment, prepared=prepared._replace(hyper=calibrated.hyper, claim=calibrated.claim))


def _last_affordable(experiment: Experiment) -> int:
    """The last round whose proven ε, for the spec's view and adjacency, is within privacy.epsilon."""
    budget = experiment.spec.privacy.epsilon
    low, high = 0, len(experiment.cohorts)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if proven_so_far(experiment, middle) <= budget else (low, middle - 1)
    if low == 0:
        raise SpecError(f"privacy.epsilon={budget:g} is spent in the first round; raise it or noise_std")
    return low


def aggregation(experiment: Experiment) -> Aggregation | None:
    """How the run's uploads are summed; None: in the open."""
    spec, secagg = experiment.spec, experiment.spec.secagg
    if spec.aggregation == "off":
        return None
    largest = max(len(cohort) for cohort in experiment.cohorts)
    room = 2 if secagg.noise == "discrete" else 1  # half of the range for the noise
    if secagg.bound:
        how = FixedPoint(secagg.scale_bits, secagg.modulus_bits, secagg.bound, room * largest).check()
    else:
        how = FixedPoint.fitting(room * largest, scale_bits=secagg.scale_bits, modulus_bits=secagg.modulus_bits)
    made = Aggregation(
        spec.aggregation,
        how,
        colluders=spec.colluders,
        min_clients=max(min(spec.federation.min_clients, spec.cohort_size), 2),
        threshold=secagg.threshold,
        neighbours=secagg.neighbours,
    )
    for size in {len(cohort) for cohort in experiment.cohorts}:
        made.check_cohort(size)
    if secagg.noise == "discrete":
        made = made._replace(noise_std=_upload_noise(experiment, how))
    return made


def _upload_noise(experiment: Experiment, how: FixedPoint) -> Callable[[int, int, int], float]:
    """std of the noise on a client's upload before its weight, at (round, client, cohort size)."""
    prepared, sizes = experiment.prepared, [len(cohort) for cohort in experiment.cohorts]
    releases = prepared.build(prepared.hyper).releases

    def std(index: int, client: int, cohort_size: int) -> float:
        info = RoundInfo(index, client, int(experiment.partition.size[client]), cohort_size)
        return next(release.noise_std for release in releases(info) if release.channel == "uplink")

    # The noise of a whole sum must fit the other half of the range: ten standard deviations of it.
    count = len(experiment.partition.size)
    shares = np.ones(count) if prepared.weights is None else prepared.weights / prepared.weights.min()
    weights = prepared.upload_unit * shares * max(sizes) / min(sizes)
    stds = [max(std(0, client, size) for size in set(sizes)) for client in range(count)]
    loudest = np.sort(np.array(stds) * weights)[-max(sizes) :]
    reach = 10 * float(np.sqrt(np.sum(loudest**2))) * 2.0**how.scale_bits
    if reach >= 2.0 ** (how.modulus_bits - 2):
        raise SpecError(
            f"the noise of a sum reaches {reach:.3g} at {how.scale_bits} fractional bits, beyond "
            f"2^{how.modulus_bits - 2}; lower secagg.scale_bits, or set secagg.modulus_bits to 64"
        )
    return std


def tolerated(spec: Spec) -> int:
    """How many clients may lack in a sum that is opened, where clients may be lost or left out at all."""
    if not spec.federation.dropout and spec.federation.refused != "continue":
        return 0
    least = spec.federation.min_clients
    if spec.aggregation != "off":
        how = Aggregation(spec.aggregation, FixedPoint(), spec.colluders, least, spec.secagg.threshold)
        least = how.least(spec.cohort_size)
    return max(spec.cohort_size - least, 0)


def as_begun(experiment: Experiment, begun: Sequence[tuple[int, int]]) -> Experiment:
    """The experiment as proofs must see it when these stretches of rounds were begun, each with noise of its own:
    a round that a kill undid and that was made again has been released twice."""
    numbers = tuple(number for start, stop in begun for number in range(start, stop))
    if numbers == tuple(range(len(numbers))):
        return replace(experiment, cohorts=experiment.cohorts[: len(numbers)])
    # Whoever was seen at times of a whole run may have been seen as often in each part of it.
    prepared = experiment.prepared._replace(exposures=experiment.prepared.exposures * len(begun))
    cohorts = [experiment.cohorts[number] for number in numbers]
    return replace(experiment, cohorts=cohorts, numbers=numbers, prepared=prepared)


def with_missing(experiment: Experiment, missing: int) -> Experiment:
    """The experiment as proofs must see it when `missing` clients' updates may lack in a sum: their noise counts
    for as little as a colluder's."""
    if missing == 0:
        return experiment
    privacy = replace(experiment.spec.privacy, colluders=experiment.spec.colluders + missing)
    spec = replace(experiment.spec, privacy=privacy)
    plain = replace(spec, privacy=replace(privacy, noise="none")) if privacy.noise == "proven" else spec
    if plain.method_options.get("param_clip") == 0:  # found by a pilot
        plain = plain.with_values({"method_options.param_clip": float(experiment.prepared.hyper["param_clip"])})
    rebuilt = prepare(
        plain, experiment.model, client_sizes=experiment.partition.size, num_params=experiment.num_params
    )
    prepared = experiment.prepared._replace(build=rebuilt.build)
    return replace(experiment, spec=spec, prepared=prepared, missing=experiment.missing + missing)


def circumstances(experiment: Experiment) -> accountant.Circumstances:
    """The public facts of a run that proofs need."""
    spec, prepared = experiment.spec, experiment.prepared
    not_covered = [note for note in experiment.dataset.notes if "not covered" in note]
    not_covered += [caveat for caveat in prepared.caveats if "not covered" in caveat]
    if spec.data.path:
        not_covered.append("neighbours differ inside one client's training records: the split was made before")
        if spec.source_of_randomness == "seeded":
            not_covered.append("the noise comes from a seed: who knows it can subtract the noise")
    if prepared.per_client and experiment.federated:
        not_covered.append("how many records a client holds: the parties are told")
    # Clipping each record's gradient keeps a binary linear model's steps those of a convex loss: no other clip.
    convex = experiment.model.convex and len(experiment.dataset.classes) == 2 and spec.privacy.clip == "example"
    ratio = experiment.noise_ratio
    smoothness = _smoothness(experiment) if convex else None
    return accountant.Circumstances(
        cohort_size=spec.cohort_size,
        num_rounds=len(experiment.cohorts),
        colluders=spec.colluders,
        missing=experiment.missing,
        convex=convex,
        smoothness=smoothness,
        client_state=prepared.client_state,
        own_epochs=prepared.own_epochs,
        exposures=prepared.exposures,
        noise_ratio=ratio,
        lattice=_lattice(experiment, ratio),
        encoded=spec.aggregation != "off",
        per_client=prepared.per_client,
        assumed=prepared.assumed,
        assume_credit=spec.privacy.assume_credit,
        not_covered=tuple(not_covered),
        counts_shown=_counts_shown(experiment, smoothness),
    )


def _counts_shown(experiment: Experiment, smoothness: float | None) -> str:
    """What the run shows that depends on how many records a client holds, in words. Empty where nothing does: only
    then has add/remove a proof, since a neighbour there has another count."""
    spec = experiment.spec
    if experiment.federated:
        return "a federation shows every party's count to all"
    if not experiment.prepared.ignores_counts:
        return f"the noise, the weights or the claimed ε of {spec.method} follow the counts"
    if not spec.batch_sampling.startswith("poisson"):
        return f"{spec.batch_sampling} batches hold a part of the records that follows the count (G3)"
    if not spec.sampling_rate:
        return "the sampling rate is batch_size over the count (set sampling_rate, a public number)"
    if spec.batch_sampling == "poisson":
        return (
            "batches are cut at a length that follows the largest count (batch_sampling='poisson-full' cuts none)"
        )
    if spec.data.split == "per-client" or spec.data.part != "all" or experiment.dataset.streamed:
        return "the summary says how many records were pooled, taken or read"
    if smoothness is not None and spec.local_steps > 1:
        return "the proof for sums of several steps takes the longest batch, which follows the largest count"
    return ""


def _lattice(experiment: Experiment, ratio: float) -> accounting.Lattice | None:
    """The grid of discrete noise in the unit of the releases, where the least weight makes it coarsest."""
    if experiment.spec.secagg.noise != "discrete":
        return None
    step = 2.0**-experiment.spec.secagg.scale_bits / experiment.prepared.upload_unit
    return accounting.Lattice(step, experiment.num_params, ratio)


def _smoothness(experiment: Experiment) -> float | None:
    """A bound on the smoothness of any client's loss, from public bounds alone: R²/4 for one sigmoid output, R²/2
    for two softmax outputs (G7b), R the largest norm of (record, 1)."""
    spec, dataset = experiment.spec, experiment.dataset
    if not dataset.covered:
        return None  # bounds that were read from the records are no public bounds
    if dataset.schema is not None:
        squared = dataset.schema.squared_norm_bound(spec.data.encoding, spec.data.features)
    elif dataset.image_shape and not spec.data.path:
        squared = float(dataset.x_train.shape[1])  # every pixel lies in [0, 1]
    else:
        return None
    curvature = (squared + 1) / (4 if experiment.model.name == "logistic" else 2)
    if spec.batch_sampling.startswith("poisson"):
        # The method may have set its own batch size: what it releases says which.
        first = RoundInfo(0, 0, int(experiment.partition.size[0]), spec.cohort_size)
        batch_size = experiment.prepared.build(experiment.prepared.hyper).releases(first)[0].sampling.batch_size
        sampler = sampling.make(
            spec.batch_sampling,
            batch_size=batch_size,
            local_steps=spec.local_steps,
            client_sizes=experiment.partition.size,
            sampling_rate=spec.sampling_rate,
        )
        curvature *= sampler.width / batch_size  # the longest batch over the fixed divisor
    return curvature + 2 * spec.model.l2


def proven(experiment: Experiment, rounds: int | None = None, missing: int | None = None) -> list[dict[str, Any]]:
    """The table of proven ε after the first `rounds` rounds (all of them by default), when at most `missing`
    clients lacked in any sum (by default as many as the spec tolerates)."""
    experiment = with_missing(experiment, tolerated(experiment.spec) if missing is None else missing)
    return accountant.table(classes(experiment, rounds), experiment.spec.privacy.delta, circumstances(experiment))


def accounted(
    spec: Spec,
    *,
    data_dir: str | Path | None = None,
    every_recipe: bool = False,
    ex_ante: bool = False,
    rounds: int | None = None,
    begun: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Claimed and proven ε of a spec (or of its first `rounds` rounds, or of those `begun`), without running it;
    with `every_recipe` also each bound that was tried, with `ex_ante` each before the cohorts are drawn (R4)."""
    experiment = build_experiment(spec, data_dir=data_dir)
    claim = experiment.prepared.claim
    if rounds is not None and rounds < planned_rounds(experiment):
        claim = claim_after(experiment, rounds)
        experiment = experiment if begun else replace(experiment, cohorts=experiment.cohorts[:rounds])
    experiment = as_begun(experiment, begun) if begun else experiment
    tried = {}
    judged = with_missing(experiment, tolerated(spec))
    if every_recipe:
        tried["tried"] = accountant.tried(classes(judged, None), spec.privacy.delta, circumstances(judged))
    if ex_ante:
        tried["ex_ante"] = _before_the_draw(judged)
    return {
        **tried,
        "method": spec.method,
        "claimed": claimed(claim),
        "proven": proven(experiment),
        "attacked": None,
        "why": method(spec.method).why,
    }


def _before_the_draw(experiment: Experiment) -> list[dict[str, Any]]:
    """Every bound when an honest party is yet to draw each round's cohort, independently of data and outputs: a
    client takes part in each round with probability cohort_size/num_clients (R4), but surely where all do (Secure
    FedAvg's first round)."""
    if experiment.numbers:
        raise SpecError("rounds of this run were made twice: who took part in them is drawn already (R4)")
    if experiment.prepared.cohorts is not None:
        raise SpecError("this method fixes who takes part beforehand: there is nothing left to draw (R4)")
    num_clients, rounds = len(experiment.partition.size), len(experiment.cohorts)
    releases = experiment.prepared.build(experiment.prepared.hyper).releases
    known, sizes = circumstances(experiment), experiment.partition.size
    everyone, nobody = np.arange(num_clients), np.zeros(0, int)
    shares = [experiment.prepared.cohort_size_at(index) / num_clients for index in range(rounds)]
    alike = accountant.alike(releases, sizes, [everyone] * rounds)

    def made(certain: bool) -> list[accountant.Clients]:
        cohorts = [everyone if (share >= 1) == certain else nobody for share in shares]
        return accountant.classes(releases, sizes, cohorts, lattice=known.lattice, groups=alike)

    # The certain rounds are listed first.
    groups = [
        sure._replace(most=[*sure.most, *drawn.most]) for sure, drawn in zip(made(True), made(False), strict=True)
    ]
    certain = sum(share >= 1 for share in shares)
    rate = max((share for share in shares if share < 1), default=1.0)
    drawn = accounting.binomial(rounds, rate, certain=certain)
    return accountant.tried(groups, experiment.spec.privacy.delta, known, participation=drawn)


def proven_so_far(experiment: Experiment, rounds: int, begun: Sequence[tuple[int, int]] = ()) -> float:
    """Proven ε of the first rounds, or of those `begun`, for the spec's own view and adjacency."""
    if begun and experiment.spec.source_of_randomness == "os":
        experiment = as_begun(experiment, begun)
        rounds = len(experiment.cohorts)
    experiment = with_missing(experiment, tolerated(experiment.spec))
    privacy = experiment.spec.privacy
    return accountant.worst(
        classes(experiment, rounds),
        privacy.delta,
        circumstances(experiment),
        view=privacy.view,
        adjacency=experiment.spec.adjacency,
        unit="run",
    )


def classes(experiment: Experiment, rounds: int | None) -> list[accountant.Clients]:
    prepared = experiment.prepared
    releases = prepared.build(prepared.hyper).releases
    return accountant.classes(
        releases,
        experiment.partition.size,
        experiment.cohorts[: len(experiment.cohorts) if rounds is None else rounds],
        lattice=circumstances(experiment).lattice,
        groups=experiment.alike,
        numbers=experiment.numbers,
    )


def _prepared(
    spec: Spec, model: models.Model, partition: data.ClientPartition, problem: engine.Problem, num_params: int
) -> Prepared:
    """The spec's method. NbAFL's param_clip = 0 asks for the median parameter norm of a run without clip and
    noise, which is itself a look at private data (errata N7, G9)."""
    shape: dict[str, Any] = {"client_sizes": partition.size, "num_params": num_params}
    metric = method(spec.method).pilot_metric
    if not metric or spec.method_options["param_clip"]:
        return prepare(spec, model, **shape)
    if spec.data.path:
        raise SpecError(
            "method_options.param_clip=0 trains a pilot without noise, which nobody would charge to your own "
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
    norm = float(np.median([entry.metrics[metric][0] for entry in history]))
    prepared = prepare(spec.with_values({"method_options.param_clip": norm}), model, **shape)
    caveat = f"not covered: param_clip = {norm:.4g} is the median norm of a non-private pilot (errata N7)"
    return prepared._replace(caveats=(*prepared.caveats, caveat))


def load_data(spec: Spec, *, data_dir: str | Path | None = None, stream: str = "") -> data.Dataset:
    """The spec's data set, encoded. `stream` is used instead of data.stream."""
    d = spec.data
    dataset = data.load(
        "" if d.path else d.name,
        path=d.path,
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
    )
    dataset = data.pool(dataset) if d.split == "per-client" else dataset
    return dataset if d.part == "all" else data.public_part(dataset, d.part, d.public_fraction)


def pooled(dataset: data.Dataset) -> Arrays:
    """All records of a data set, training before test, held once for any number of runs. On a CPU the compiled
    program reads these very arrays (`arrays.aligned`): do not write to them. Streamed records stay on the disk."""
    return (
        data.all_records(dataset) if dataset.streamed else aligned([dataset.x_train, dataset.x_test]),
        aligned([dataset.y_train, dataset.y_test]),
    )


def deal(
    spec: Spec, dataset: data.Dataset, arrays: Arrays | None = None
) -> tuple[data.ClientPartition, engine.Problem]:
    """Who holds which records, and what the model is scored on."""
    d = spec.data
    x, y = arrays or pooled(dataset)
    everything = data.partition(
        dataset,
        kind=d.partition,
        num_clients=spec.num_clients,
        seed=spec.seed,
        similarity=d.similarity,
        alpha=d.alpha,
        groups=dataset.groups,
        records_per_client=d.records_per_client,
    )
    if d.split == "given":
        count, scored = len(dataset.y_train), len(dataset.y_test)
        scored = scored if spec.scored else 0
        rows, even = np.arange(count, count + scored), np.full(scored, 1.0 / max(scored, 1))
        return everything, engine.Problem(x, y, [everything], [rows], [even], _as_stored(dataset, everything))
    # Each client keeps 80% for training; accuracy is the mean over the clients' own test records.
    train, test, _ = data.per_client_split(everything, fractions=(0.8, 0.1, 0.1), seed=spec.seed)
    weights = np.repeat(1.0 / (len(test.size) * np.maximum(test.size, 1)), test.size)
    at = np.argsort(test.order) if dataset.digest else slice(None)
    at = at if spec.scored else slice(0)
    return train, engine.Problem(x, y, [train], [test.order[at]], [weights[at]], _as_stored(dataset, train))


def _as_stored(dataset: data.Dataset, partition: data.ClientPartition) -> list[np.ndarray]:
    """The clients' rows as the files of a folder have them: who reads them from the disk reads on and on. The same
    where the records of a folder are in memory, so that the training loss is the same to the last bit."""
    return [np.sort(partition.order)] if dataset.digest else []


def stop_reason(experiment: Experiment) -> str:
    """Why the method itself makes fewer rounds than asked for; empty where it makes them all."""
    made, asked = planned_rounds(experiment), experiment.spec.num_rounds
    if made >= asked:
        return ""
    which = "proven" if experiment.prepared.stop_when_proven else "claimed"
    return (
        f"the {which} ε reaches privacy.epsilon={experiment.spec.privacy.epsilon:g} after round {made} of {asked}"
    )


def planned_rounds(experiment: Experiment) -> int:
    """Rounds the run will make: the spec's, or fewer where the method's budget is spent before."""
    return len(experiment.cohorts)


def rounding(experiment: Experiment, missing: int) -> dict[str, float] | None:
    """What rounding before the sum could add to the proven ε of sums, by the rule of thumb of errata G8: √d·2^-f
    on top of the sensitivity. Not a proof. None where nothing is rounded or the method's unit is unknown."""
    how = aggregation(experiment)
    if how is None or how.noise_std or not experiment.prepared.upload_unit:
        return None
    experiment = with_missing(experiment, missing)
    groups = classes(experiment, None)
    uplink = [r for g in groups for releases, _ in g.most for r in releases if r.channel == "uplink"]
    if not uplink or not all(r.noise_std and math.isfinite(r.sensitivity) for r in uplink):
        return None
    relation = (
        accounting.REPLACE_ONE if experiment.spec.adjacency == accounting.REPLACE_ONE else accounting.ZERO_OUT
    )
    least = min(r.noise_std / accounting.step_multiplier(r, relation) for r in uplink)
    if not least:
        return None
    step = 2.0**-how.how.scale_bits
    margin = math.sqrt(experiment.num_params) * step / (experiment.prepared.upload_unit * least)
    privacy, known = experiment.spec.privacy, circumstances(experiment)

    def epsilon(groups: list[accountant.Clients], view: str) -> float:
        return accountant.worst(
            groups, privacy.delta, known, view=view, adjacency=experiment.spec.adjacency, unit="run"
        )

    # To one who sees every upload rounding reveals nothing more: that bound holds as it is.
    value = min(epsilon(groups, "upload"), epsilon(accountant.quieter(groups, 1 / (1 + margin)), "sum"))
    return {"step": step, "margin": margin, "epsilon": value}


def claim_after(experiment: Experiment, rounds: int) -> Claim:
    """The paper's ε for the rounds that were made, at the noise that was used."""
    fewer = replace(
        experiment.spec.privacy,
        noise_decay_start=min(experiment.spec.privacy.noise_decay_start, rounds),
        noise="none",
    )
    spec = replace(experiment.spec, num_rounds=rounds, privacy=fewer)
    again = prepare(
        spec, experiment.model, client_sizes=experiment.partition.size, num_params=experiment.num_params
    )
    return again.reclaim(experiment.prepared.hyper) if again.reclaim else experiment.prepared.claim


def claimed(claim: Claim) -> dict[str, Any]:
    """A claim as it stands in summary.json."""
    return {
        "value": claim.value,
        "unit": claim.unit,
        "delta": claim.delta,
        "source": claim.source,
        "adjacency": claim.adjacency,
        "conditions": [{"condition": text, "holds": bool(holds)} for text, holds in claim.conditions],
    }
