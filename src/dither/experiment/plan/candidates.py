"""The search space of a plan, and its candidates: points with the noise that their proven ε needs.

A point maps spec keys to values, ready for `Spec.with_values`. Learning rates are tried by *reach*: how far the
model can move in a whole run if every gradient is as long as its clip, rounds × steps × rate × clip. The best
reach depends far less on the other hyperparameters than the best rate does, so a few values are enough.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from dither.data import Dataset
from dither.errors import NoProof, SpecError, did_you_mean
from dither.experiment.build import Experiment, build_experiment
from dither.experiment.folder import Unfinished
from dither.experiment.report import bytes_text
from dither.experiment.sweep.batches import Simulations, train_specs
from dither.spec import Spec
from dither.types import Claim, Prepared, RoundInfo

Point = dict[str, Any]
Item = TypeVar("Item")

# Spec key -> label. NbAFL clips parameters, the other methods clip gradients.
LABELS = {
    "num_rounds": "rounds",
    "cohort_size": "clients per round",
    "local_steps": "local steps",
    "batch_size": "batch",
    "privacy.clip_norm": "clip",
    "method_options.param_clip": "clip",
    "client_lr": "learning rate",
}
INTEGER_KEYS = ("num_rounds", "cohort_size", "local_steps", "batch_size")
_FLOAT_BYTES = 4
_MODELS_SENT = {"dp-scaffold": 2, "scaffold": 2}  # per participation: SCAFFOLD also sends a control variate


class Infeasible(SpecError):
    """The request cannot be met. The message names the nearest one that can."""


def clip_key(method: str) -> str:
    """The spec key of the clip that bounds the method's sensitivity."""
    return "method_options.param_clip" if method == "nbafl" else "privacy.clip_norm"


def points(
    base: Spec, smallest: int, given: Mapping[str, Sequence[Any]], *, effort: str = "search"
) -> list[Point]:
    """Every feasible combination of values, before the noise is calibrated. They follow from public facts alone:
    clients, records of the smallest client, method.

    effort "bound" is fine: evaluating a bound costs only the calibration of the noise. "search" is coarse, since
    every point is trained, and the search refines it. "quick" is coarser still. `given` replaces the values of a
    key; a single value fixes it.
    """
    clip = clip_key(base.method)
    allowed = {*INTEGER_KEYS, "client_lr", clip}
    for key in given:
        if key not in allowed:
            raise SpecError(f"a plan does not choose {key!r}{did_you_mean(key, allowed)}")
    clients = base.num_clients
    fine, quick = effort == "bound", effort == "quick"
    values: dict[str, Sequence[Any]] = {
        "num_rounds": (5, 10, 20, 40, 80, 160) if fine else (10, 40) if quick else (10, 30, 100),
        "cohort_size": (max(1, clients // 2), clients) if fine else (clients,),
        "local_steps": (1, 2, 5, 10) if fine else (1,) if quick else (1, 4),
        "batch_size": _batch_sizes(base, smallest, effort),
        clip: (0.5, 2.0) if quick else (0.5, 1.0, 2.0),
    }
    reach: Sequence[float] = (16.0, 64.0) if quick else (8.0, 32.0, 128.0)
    if base.method == "secure-fedavg" and not fine and not quick:  # a round reveals little: try more rounds
        values["num_rounds"] = (30, 100, 300)
    if base.method == "nbafl":  # no gradient is clipped, so reach means nothing
        values |= {"client_lr": (0.005, 0.02, 0.08), clip: (0.5, 2.0, 8.0), "local_steps": (5, 20)}
        values["num_rounds"] = (1, 2, 4, 8, 16, 32) if fine else (1, 5) if quick else (1, 2, 5, 20)
    values |= {key: tuple(column) for key, column in given.items()}
    _check(base, smallest, values)
    keys = [*INTEGER_KEYS, clip, *(["client_lr"] if "client_lr" in values else [])]
    combinations = [dict(zip(keys, row, strict=True)) for row in itertools.product(*(values[key] for key in keys))]
    return [
        completed(base, point, each, smallest)
        for point in combinations
        if point["cohort_size"] <= clients and point["batch_size"] <= smallest
        for each in ((math.nan,) if "client_lr" in values else reach)
    ]


def _batch_sizes(base: Spec, smallest: int, effort: str) -> Sequence[int]:
    if base.method == "nbafl" or base.batch_sampling == "full":
        return (smallest,)
    if base.method == "secure-fedavg":  # its sensitivity does not shrink with the batch (E4): small batches
        shares = [size / smallest for size in ((1, 4, 16) if effort == "bound" else (1, 4))]
    else:
        shares = [1 / 32, 1 / 8, 1.0] if effort == "bound" else [1 / 16, 1.0]
    if effort == "quick":
        shares = shares[-1:] if base.method != "secure-fedavg" else shares[:1]
    return tuple(sorted({min(smallest, max(1, round(share * smallest))) for share in shares}))


def _check(base: Spec, smallest: int, tried: Mapping[str, Sequence[Any]]) -> None:
    for key, values in tried.items():
        integer = key in INTEGER_KEYS
        if not values or any(not 0 < v < math.inf or (integer and int(v) != v) for v in values):
            kind = "whole numbers" if integer else "numbers"
            raise SpecError(f"{key}={list(values)} must be {kind} above 0")
    clients, cohort, batch = base.num_clients, min(tried["cohort_size"]), min(tried["batch_size"])
    if cohort > clients:
        raise Infeasible(
            f"cohort_size={cohort} exceeds the {clients} clients; nearest feasible: cohort_size={clients}"
        )
    if batch > smallest:
        fewer = max(1, clients * smallest // batch)
        raise Infeasible(
            f"batch_size={batch} exceeds the {smallest} records of the smallest of {clients} clients; nearest "
            f"feasible: batch_size={smallest}, or the same records over at most {fewer} clients"
        )


def completed(base: Spec, point: Mapping[str, Any], reach: float, smallest: int) -> Point:
    """The point with its learning rate from `reach` (unless it has one) and the sampler for its batch."""
    full = dict(point)
    if "client_lr" not in full:
        full["client_lr"] = reach / (full["num_rounds"] * full["local_steps"] * full[clip_key(base.method)])
    # A batch of all records is the full batch, whatever the sampler.
    full["batch_sampling"] = "full" if full["batch_size"] >= smallest else base.batch_sampling
    if full["batch_sampling"] == "full" and base.sampling_rate:
        full["sampling_rate"] = 0.0
    return full


def shape(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the compiled program and the accountant depend on: everything but clip and rate."""
    return (*(point[key] for key in INTEGER_KEYS), point["batch_sampling"])


def neighbours(base: Spec, point: Point, smallest: int, fixed: Iterable[str] = ()) -> list[Point]:
    """Points one step away: each value doubled or halved. Rounds, steps and clip keep the reach."""
    clip, fixed = clip_key(base.method), set(fixed)
    near: list[Point] = []
    for key in (*INTEGER_KEYS, clip, "client_lr"):
        if key in fixed:
            continue
        for factor in (0.5, 2.0):
            moved = {**point, key: point[key] * factor}
            if key in INTEGER_KEYS:
                moved[key] = max(1, round(moved[key]))
            if key in ("num_rounds", "local_steps", clip) and "client_lr" not in fixed and base.method != "nbafl":
                moved["client_lr"] = point["client_lr"] * point[key] / moved[key]
            moved["cohort_size"] = min(moved["cohort_size"], base.num_clients)
            moved["batch_size"] = min(moved["batch_size"], smallest)
            moved = completed(base, moved, math.nan, smallest)
            if moved != point and moved not in near:
                near.append(moved)
    return near


def pareto_front(items: Sequence[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Items that no other item beats: at least as good in every cost and better in one. Equal items count once.

    Sorted by the first cost, then by the next."""
    front: list[Item] = []
    for item in sorted(items, key=costs):
        # In this order, whatever dominates or equals an item stands before it.
        if not any(all(a <= b for a, b in zip(costs(other), costs(item), strict=True)) for other in front):
            front.append(item)
    return front


# Candidates


@dataclass(frozen=True)
class Candidate:
    """A point with everything that is known of it before any record is seen."""

    point: Point
    spec: Spec
    noise_std: float  # on a coordinate of an upload or a gradient, as the method defines it
    claimed: Claim  # the paper's ε for the noise that is added
    uploads: float  # per client, on average
    num_params: int
    printed_noise_std: float = math.nan  # what the paper's formula adds for the same ε, if it gives any
    signal_to_noise: float = math.nan  # length of the longest signal over that of the noise, in the final model

    @property
    def bytes_per_client(self) -> float:
        """Sent and received by a client in the whole run, on average."""
        models = _MODELS_SENT.get(self.spec.method, 1)
        return 2 * self.uploads * models * self.num_params * _FLOAT_BYTES

    def labelled(self) -> dict[str, str]:
        """The chosen hyperparameters and the traffic, for a table."""
        chosen = {label: f"{self.point[key]:.4g}" for key, label in LABELS.items() if key in self.point}
        return {**chosen, "per client": bytes_text(self.bytes_per_client)}


def proxy_spec(spec: Spec) -> Spec:
    """The spec as it runs on a proxy: the same except for where the records come from."""
    return spec.with_values(
        {
            **dict.fromkeys(("data.path", "data.test_path", "data.label", "data.schema", "data.column"), ""),
            "data.name": "adult",  # unused: the records are passed in
            "data.part": "all",
            "data.partition": "iid" if spec.data.partition == "column" else spec.data.partition,
            "data.split": "given",
            "randomness": "seeded",
        }
    )


def _experiment(base: Spec, point: Mapping[str, Any], counts: Dataset) -> Experiment:
    """The point's experiment on counts alone; the accountant sets its noise."""
    spec = proxy_spec(base).with_values({**point, "randomness": base.source_of_randomness})
    return build_experiment(spec, dataset=counts, arrays=(counts.x_train, counts.y_train))


def candidate(base: Spec, point: Point, counts: Dataset) -> Candidate:
    """Noise, claim, traffic and signal of a point. Raises `NoProof` where no noise has a proof."""
    experiment = _experiment(base, point, counts)
    participations = np.bincount(np.concatenate(experiment.cohorts), minlength=len(experiment.partition.size))
    std = first_noise(experiment.prepared, experiment)
    try:  # the paper's own noise for this ε, read as its formula reads it (Secure FedAvg: per message)
        printed = first_noise(experiment.prepare(noise="paper"), experiment)
    except SpecError:
        printed = math.nan
    return Candidate(
        point=point,
        spec=base.with_values(point),
        noise_std=std,
        printed_noise_std=printed,
        claimed=experiment.prepared.claim,
        uploads=float(participations.mean()),
        num_params=experiment.num_params,
        signal_to_noise=_signal(base.method, point, std, experiment.num_params),
    )


def proven_epsilon(base: Spec, point: Point, counts: Dataset) -> float:
    """The proven ε of the point for the spec's view and adjacency, from the releases themselves."""
    return _experiment(base, point, counts).proven_epsilon()


def first_noise(prepared: Prepared, experiment: Experiment) -> float:
    """The noise std of the first uplink release of the first client."""
    info = RoundInfo(0, 0, int(experiment.partition.size[0]), len(experiment.cohorts[0]))
    uplink = [r for r in prepared.releases(info) if r.channel == "uplink"]
    return float(uplink[0].noise_std)


def _signal(method: str, point: Mapping[str, Any], std: float, num_params: int) -> float:
    """The farthest that clipped updates can move the model in a run, over the length of the noise in it.

    Gradients: T·Q steps of length rate·clip against √(T·Q·d/K)·rate·σ. Secure FedAvg: the same with one noise per
    round. NbAFL: a model of norm C against the last round's noise. The learning rate cancels out.
    """
    if std == 0:
        return math.inf
    clip, root = float(point[clip_key(method)]), math.sqrt(point["cohort_size"] / num_params)
    if method == "nbafl":
        return clip * root / std
    if method == "secure-fedavg":  # std is on the upload: Q·rate·clip of signal per round
        longest = math.sqrt(point["num_rounds"]) * point["local_steps"] * point["client_lr"] * clip
        return float(longest * root / std)
    return math.sqrt(point["num_rounds"] * point["local_steps"]) * clip * root / std


def affordable(base: Spec, points: Iterable[Point], counts: Dataset) -> tuple[list[Candidate], list[str]]:
    """Candidates of all points that have a proof, and the reasons why others have none."""
    proven, reasons = [], []
    for point in points:
        try:
            proven.append(candidate(base, point, counts))
        except NoProof as reason:
            reasons.append(str(reason))
    return proven, list(dict.fromkeys(reasons))


# Planning by measurement: successive halving on public records.

FIRST_SEED = 1_000_000  # no final run has these seeds
KEEP = 6  # one in so many survives a rung
FEWEST = 4  # but never fewer than these
BATCHES = (3, 9)  # numbers of runs that are compiled together


@dataclass(frozen=True)
class Trial:
    """A candidate and its measurements, one entry per seed."""

    candidate: Candidate
    accuracy: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()

    @property
    def epsilon(self) -> float:
        """The proven budget of the candidate."""
        return self.candidate.spec.privacy.epsilon

    @property
    def mean_accuracy(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.accuracy))

    @property
    def mean_loss(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.loss))

    @property
    def standard_error(self) -> float:
        """Of the mean accuracy; nan with one seed."""
        count = len(self.accuracy)
        return float(np.std(self.accuracy, ddof=1) / math.sqrt(count)) if count > 1 else math.nan

    def accuracy_text(self) -> str:
        """The mean accuracy, with its standard error where there is one."""
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.4f}"
        return f"{self.mean_accuracy:.4f}{error}"

    def score(self, metric: str) -> float:
        """Larger is better."""
        value = self.mean_accuracy if metric == "accuracy" else -self.mean_loss
        return value if math.isfinite(value) else -math.inf


@dataclass(frozen=True)
class Search:
    """All trials, the best first; the number of runs and their time; accuracy of the most frequent class alone,
    and of the best trial without noise."""

    trials: list[Trial]
    runs: int
    seconds: float
    trivial: float
    without_noise: float = math.nan

    @property
    def best(self) -> Trial:
        """The choice."""
        return self.trials[0]


@dataclass(frozen=True)
class Trainer:
    """Trains candidates on public records. `partial` keeps finished batches until the plan is complete."""

    dataset: Dataset
    partial: Unfinished
    say: Callable[[str], None] = lambda line: None
    simulations: Simulations = field(default_factory=dict)  # a program is compiled once for the whole search

    def run(self, trials: Sequence[Trial], seeds: Sequence[int]) -> list[Trial]:
        """Every trial with further seeds, counted from `FIRST_SEED`."""
        specs = [_trial_spec(trial.candidate, FIRST_SEED + seed) for trial in trials for seed in seeds]
        plural = "s" * (len(seeds) > 1)
        self.say(f"{len(trials)} candidates, {len(seeds)} seed{plural} each: {len(specs)} runs")
        rows = self.measure(specs, [shape(trial.candidate.point) for trial in trials for _ in seeds])
        by_trial = [rows[at : at + len(seeds)] for at in range(0, len(rows), len(seeds))]
        return [
            replace(
                trial,
                accuracy=(*trial.accuracy, *(row["test_accuracy"] for row in new)),
                loss=(*trial.loss, *(row["loss"] for row in new)),
            )
            for trial, new in zip(trials, by_trial, strict=True)
        ]

    def without_noise(self, trial: Trial) -> float:
        """The mean accuracy of a trial's seeds, with the noise left out."""
        seeds = range(FIRST_SEED, FIRST_SEED + len(trial.accuracy))
        specs = [_trial_spec(trial.candidate, seed).with_values({"privacy.noise": "none"}) for seed in seeds]
        rows = self.measure(specs, ["without noise"] * len(specs))
        return float(np.mean([row["test_accuracy"] for row in rows]))

    def measure(self, specs: Sequence[Spec], shapes: Sequence[Any]) -> list[dict[str, float]]:
        """Final accuracy and loss of each spec.

        Specs of one shape train together, in batches of few sizes: a batch that is not full repeats its last run,
        which costs less than compiling the program for another size. A batch is computed whole or taken whole from
        `partial`, so an interrupted search ends with the same numbers."""
        groups: dict[Any, list[int]] = {}
        for number, group in enumerate(shapes):
            groups.setdefault(group, []).append(number)
        results: dict[int, dict[str, float]] = {}
        for remaining in groups.values():
            while remaining:
                width = next((size for size in BATCHES if size >= len(remaining)), BATCHES[-1])
                batch, remaining = remaining[:width], remaining[width:]
                key = " ".join([str(width), *(specs[number].digest() for number in batch)])
                rows = self.partial.get(key)
                if rows is None:
                    filled = [specs[number] for number in [*batch, *batch[-1:] * (width - len(batch))]]
                    outcomes = train_specs(filled, dataset=self.dataset, simulations=self.simulations)
                    last = [outcome.metrics[-1] for outcome in outcomes[: len(batch)]]
                    rows = [{name: row[name] for name in ("test_accuracy", "loss")} for row in last]
                    self.partial.put(key, rows)
                results.update(zip(batch, rows, strict=True))
        return [results[number] for number in range(len(specs))]


def _trial_spec(candidate: Candidate, seed: int) -> Spec:
    spec = proxy_spec(candidate.spec)
    return spec.with_values({"eval_every": spec.num_rounds, "compare": False, "seed": seed})


def search(
    trainer: Trainer,
    candidates: Sequence[Candidate],
    neighbours: Callable[[Point], list[Candidate]],
    *,
    metric: str = "accuracy",
    seeds: int = 5,
) -> Search:
    """Successive halving; the last candidates have `seeds` seeds."""
    started, runs = time.perf_counter(), 0

    def ranked(trials: Sequence[Trial]) -> list[Trial]:
        return sorted(trials, key=lambda trial: trial.score(metric), reverse=True)

    def more(trials: Sequence[Trial], first: int, last: int) -> Sequence[Trial]:
        nonlocal runs
        new = range(first, min(last, seeds))
        if not trials or not new:
            return trials
        runs += len(trials) * len(new)
        return trainer.run(trials, new)

    rung = ranked(more([Trial(candidate) for candidate in candidates], 0, 1))
    tried = [trial.candidate.point for trial in rung]
    near = [Trial(candidate) for candidate in neighbours(tried[0]) if candidate.point not in tried]
    rung = ranked([*rung, *more(near, 0, 1)])
    dropped: list[Trial] = []
    for first, last in ((1, 2), (2, seeds)):
        keep = max(FEWEST, math.ceil(len(rung) / KEEP))
        dropped += rung[keep:]
        rung = ranked(more(rung[:keep], first, last))
    labels = trainer.dataset.y_test[trainer.dataset.y_test >= 0]  # without blanks
    trivial = float(np.bincount(labels, minlength=1).max() / max(1, len(labels)))
    return Search([*rung, *ranked(dropped)], runs, time.perf_counter() - started, trivial)
