"""Candidates: points with the noise that their proven ε needs, the paper's noise, traffic, and signal left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dither.data import Dataset
from dither.errors import NoProof, SpecError
from dither.experiment.build import Experiment, build_experiment
from dither.experiment.plan.candidates import Point, clip_key
from dither.experiment.plan.records import proxy_spec
from dither.methods import prepare
from dither.spec import Spec
from dither.types import Claim, Prepared, RoundInfo

_FLOAT_BYTES = 4
_MODELS_SENT = {"dp-scaffold": 2, "scaffold": 2}  # per participation: SCAFFOLD also sends a control variate


@dataclass(frozen=True)
class Candidate:
    """A point with everything that is known of it before any record is seen."""

    point: Point
    spec: Spec
    noise_std: float  # on a coordinate of an upload or a gradient, as the method defines it
    printed_noise_std: float  # what the paper's formula adds for the same ε; nan where it gives none
    claimed: Claim  # the paper's ε for the noise that is added
    uploads: float  # per client, on average
    num_params: int
    signal_to_noise: float  # length of the longest signal over the length of the noise, in the final model

    @property
    def bytes_per_client(self) -> float:
        """Sent and received by a client in the whole run, on average."""
        models = _MODELS_SENT.get(self.spec.method, 1)
        return 2 * self.uploads * models * self.num_params * _FLOAT_BYTES


def assemble(base: Spec, point: Mapping[str, Any], counts: Dataset) -> Experiment:
    """The point's experiment on counts alone; the accountant sets its noise."""
    spec = proxy_spec(base).with_values(point)
    return build_experiment(spec, dataset=counts, arrays=(counts.x_train, counts.y_train))


def candidate(base: Spec, point: Point, counts: Dataset) -> Candidate:
    """Noise, claim, traffic and signal of a point. Raises `NoProof` where no noise has a proof."""
    experiment = assemble(base, point, counts)
    participations = np.bincount(np.concatenate(experiment.cohorts), minlength=len(experiment.partition.size))
    std = first_noise(experiment.prepared, experiment)
    return Candidate(
        point=point,
        spec=base.with_values(point),
        noise_std=std,
        printed_noise_std=_printed(experiment),
        claimed=experiment.prepared.claim,
        uploads=float(participations.mean()),
        num_params=experiment.num_params,
        signal_to_noise=_signal(base.method, point, std, experiment.num_params),
    )


def proven_epsilon(base: Spec, point: Point, counts: Dataset) -> float:
    """The proven ε of the point for the spec's view and adjacency, from the releases themselves."""
    experiment = assemble(base, point, counts)
    return experiment.proven_epsilon()


def first_noise(prepared: Prepared, experiment: Experiment) -> float:
    """The noise std of the first uplink release of the first client."""
    info = RoundInfo(0, 0, int(experiment.partition.size[0]), len(experiment.cohorts[0]))
    uplink = [r for r in prepared.releases(info) if r.channel == "uplink"]
    return float(uplink[0].noise_std)


def _printed(experiment: Experiment) -> float:
    """The paper's own noise for this ε, read as its formula reads it (Secure FedAvg: per message)."""
    paper = replace(experiment.spec.privacy, noise="paper")
    try:
        prepared = prepare(
            replace(experiment.spec, privacy=paper),
            experiment.model,
            client_sizes=experiment.partition.size,
            num_params=experiment.num_params,
        )
    except SpecError:
        return math.nan
    return first_noise(prepared, experiment)


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
        return float(
            math.sqrt(point["num_rounds"]) * point["local_steps"] * point["client_lr"] * clip * root / std
        )
    return math.sqrt(point["num_rounds"] * point["local_steps"]) * clip * root / std


def affordable(base: Spec, points: Iterable[Point], counts: Dataset) -> tuple[list[Candidate], list[str]]:
    """Candidates of all points that have a proof, and the reasons why others have none."""
    candidates, reasons = [], []
    for point in points:
        try:
            candidates.append(candidate(base, point, counts))
        except NoProof as reason:
            reasons.append(str(reason))
    return candidates, list(dict.fromkeys(reasons))
