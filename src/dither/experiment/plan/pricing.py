"""What a point costs: the noise its proven ε asks for, the paper's own, what is sent, what signal is left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dither.data import Dataset
from dither.errors import NoProof, SpecError
from dither.experiment.build import Experiment, build_experiment, proven_so_far
from dither.experiment.plan.knobs import Point, clip_key
from dither.experiment.plan.shapes import rehearsal
from dither.methods import prepare
from dither.spec import Spec
from dither.types import Claim, Prepared, RoundInfo

FLOAT_BYTES = 4
# Per participation, in models: DP-SCAFFOLD sends and receives its control variate too.
MODELS_SENT = {"dp-scaffold": 2, "scaffold": 2}


@dataclass(frozen=True)
class Price:
    """A point with all that can be said of it before any record is seen."""

    point: Point
    spec: Spec
    noise_std: float  # on one upload's or one gradient's coordinate, in the method's own terms
    printed_noise_std: float  # what the paper's formula adds for the same ε; nan where it gives none
    claimed: Claim  # the paper's ε for the noise that is added
    participations: int  # the most rounds that one client takes part in
    uploads: float  # the mean over clients
    num_params: int
    signal_to_noise: float  # length of the longest signal over the length of the noise, in the final model

    @property
    def bytes_per_client(self) -> float:
        """Sent and received by a client in the whole run, on average."""
        models = MODELS_SENT.get(self.spec.method, 1)
        return 2 * self.uploads * models * self.num_params * FLOAT_BYTES


def assemble(base: Spec, point: Mapping[str, Any], counts: Dataset) -> Experiment:
    """The point made ready on counts alone: noise by the rigorous accountant."""
    spec = rehearsal(base).with_values(point)
    return build_experiment(spec, dataset=counts, arrays=(counts.x_train, counts.y_train))


def price(base: Spec, point: Point, counts: Dataset) -> Price:
    """Noise, claim, communication and signal of a point. Raises `NoProof` where no noise has a proof."""
    experiment = assemble(base, point, counts)
    seen = np.bincount(np.concatenate(experiment.cohorts), minlength=len(experiment.partition.size))
    std = first_noise(experiment.prepared, experiment)
    return Price(
        point=point,
        spec=base.with_values(point),
        noise_std=std,
        printed_noise_std=_printed(experiment),
        claimed=experiment.prepared.claim,
        participations=int(seen.max()),
        uploads=float(seen.mean()),
        num_params=experiment.num_params,
        signal_to_noise=_signal(base.method, point, std, experiment.num_params),
    )


def proven_epsilon(base: Spec, point: Point, counts: Dataset) -> float:
    """The proven ε of the point for the spec's view and adjacency, from the releases themselves."""
    experiment = assemble(base, point, counts)
    return proven_so_far(experiment, len(experiment.cohorts))


def first_noise(prepared: Prepared, experiment: Experiment) -> float:
    """The noise std of the first uplink release of the first client."""
    info = RoundInfo(0, 0, int(experiment.partition.size[0]), len(experiment.cohorts[0]))
    uplink = [r for r in prepared.build(prepared.hyper).releases(info) if r.channel == "uplink"]
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
    """The most that clipped updates can move the model in the run, over the length of the noise added meanwhile.

    Gradients: T·Q steps of length rate·clip against √(T·Q·d/K)·rate·σ. Secure FedAvg: the same with one noise a
    round. NbAFL: a model of norm C against the last round's noise. No learning rate changes it.
    """
    clients, clip = point["cohort_size"], point[clip_key(method)]
    if std == 0:
        return math.inf
    root = math.sqrt(clients / num_params)
    if method == "nbafl":
        return clip * root / std
    steps = point["num_rounds"] * point["local_steps"]
    if method == "secure-fedavg":  # std is on the upload: Q·rate·clip of signal a round
        return math.sqrt(point["num_rounds"]) * point["local_steps"] * point["client_lr"] * clip * root / std
    return math.sqrt(steps) * clip * root / std


def priced(base: Spec, points: list[Point], counts: Dataset) -> tuple[list[Price], list[str]]:
    """Prices of all points that have a proof, and the reasons of those that have none."""
    found, refused = [], []
    for point in points:
        try:
            found.append(price(base, point, counts))
        except NoProof as reason:
            refused.append(str(reason))
    return found, list(dict.fromkeys(refused))
