"""Method, rounds, batches, rate and clip for a user's own records, where a spec names no method.

They follow from public facts alone: how many records each client holds, how wide a record is, and ε. No record is
looked at, so the choice costs no privacy. `benchmarks/messy.py` shows what it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dither import data
from dither.accounting import ADD_REMOVE, gaussian_mu
from dither.data.schema import Categorical
from dither.errors import SpecError
from dither.experiment.build import Chosen, deal, load_data
from dither.spec import Spec

NUM_ROUNDS, LOCAL_STEPS = 100, 3
_RATE = 0.05  # the smallest sampling rate
_MULTIPLIER = 2.5  # noise multiplier from which on a smaller batch costs no accuracy
_CLIP = 0.6  # of the norm of a usual record
_LEAST_PATH, _MOST_PATH = 90.0, 300.0  # step size times steps
_DRIFT = 2.5  # of a model by noise alone, over all its parameters and steps
_SQUARED_CLIP, _SQUARED_DRIFT = 0.15, 0.2  # the same for a number scaled to [0, 1], which is seldom far off
_CLIENTS = 10  # that a single table is dealt out to

_START = {
    "method": "cpfed",
    "num_clients": 0,
    "batch_sampling": "poisson",
    "eval_every": 10,
    "data.encoding": "standard",
    "method_options.aggregation_credit": False,
}


TUNED = (  # chosen here, unless a spec says otherwise
    "num_rounds",
    "local_steps",
    "sampling_rate",
    "batch_size",
    "client_lr",
    "eval_every",
    "privacy.clip_norm",
)


def defaults_for(
    sizes: Sequence[int] | np.ndarray,
    num_features: int,
    epsilon: float,
    *,
    delta: float = 1e-5,
    norm: float = 0.0,
    summed: int = 1,
    regression: bool = False,
) -> dict[str, Any]:
    """Values of a spec for clients that hold `sizes` records of `num_features` features. `norm` is the norm of a
    usual record (by default √num_features), `summed` the number of clients whose noise counts in a secure sum:
    then each needs 1/√summed of the noise, if it is added once a round.

    Noisy gradient descent on Poisson batches. Over all steps the noise in a parameter is about
    (step size · steps) · clip · √clients / (μ · records). So step size times steps, which says how far the model
    can go, is as large as this allows, from 90 to 300. The sampling rate is as small as costs no accuracy.
    For `regression` a step is at most one over the curvature of the squared loss: beyond two, steps grow.
    """
    sizes = np.asarray(sizes)
    norm = norm or math.sqrt(num_features + 1)
    clip = float(f"{(_SQUARED_CLIP if regression else _CLIP) * norm:.2g}")
    mu = min(gaussian_mu(epsilon, delta), 10.0)
    steps = NUM_ROUNDS * LOCAL_STEPS
    rate = float(f"{min(max(_RATE, _MULTIPLIER * mu / math.sqrt(steps)), 1.0):.2g}")
    drift, least, most = (
        (_SQUARED_DRIFT, 0.0, steps / norm**2) if regression else (_DRIFT, _LEAST_PATH, _MOST_PATH)
    )
    path = (
        drift * mu * math.sqrt(summed) * float(sizes.sum()) / (clip * math.sqrt(len(sizes) * (num_features + 1)))
    )
    return {
        "cohort_size": len(sizes),
        "num_rounds": steps if summed > 1 else NUM_ROUNDS,
        "local_steps": 1 if summed > 1 else LOCAL_STEPS,
        "sampling_rate": rate,
        "batch_size": max(round(rate * float(sizes.mean())), 1),
        "client_lr": float(f"{min(max(path, least), most) / steps:.2g}"),
        "privacy.clip_norm": clip,
    }


def completed(given: Mapping[str, Any], records: Any, data_dir: str | Path | None) -> Chosen:
    """The spec for your own records, with what is not given chosen by `defaults_for`."""
    sums = given.get("secagg.mode") in ("ideal", "real")  # of at least two uploads
    spec = Spec.from_any({**_START, "cohort_size": 2 if sums else 1, **given})
    if spec.adjacency == ADD_REMOVE:
        raise SpecError(
            "Dither chooses by the record counts, which privacy.adjacency='add/remove' hides: name a method, its "
            "batches, rate and δ, or use 'zero-out'"
        )
    dataset = load_data(spec, data_dir=data_dir, records=records)
    chosen: dict[str, Any] = {}
    if spec.num_clients == 0 and spec.data.partition == "iid" and not dataset.sources:
        chosen["num_clients"] = min(_CLIENTS, len(dataset.y_train))
        spec = spec.with_values(chosen)
    sizes = deal(spec, dataset)[0].size
    if "privacy.delta" not in given:  # below one over the number of records
        chosen["privacy.delta"] = min(spec.privacy.delta, 10.0 ** -math.ceil(math.log10(sizes.sum())))
    delta = chosen.get("privacy.delta", spec.privacy.delta)
    features = dataset.x_train.shape[1]
    transformed = spec.data.transform != "none"
    norm = math.hypot(1, data.NORM_BOUND) if transformed else _usual_norm(dataset.schema, spec.data.encoding)
    summed = max(len(sizes) - spec.colluders, 1) if sums and spec.privacy.view != "upload" else 1
    chosen |= defaults_for(
        sizes, features, spec.privacy.epsilon,
        delta=delta, norm=norm, summed=summed, regression=not dataset.classes,
    )  # fmt: skip
    chosen["model.name"] = {0: "linear", 2: "logistic"}.get(len(dataset.classes), "softmax")
    chosen = {key: value for key, value in chosen.items() if key not in given}
    spec = Spec.from_any({**_START, **chosen, **given})
    shown = ", ".join(f"{key}={value}" for key, value in {"method": spec.method, **chosen}.items())
    return Chosen(spec, dataset, f"chosen by Dither from the counts, the number of features and ε: {shown}")


def federated_defaults(schema: data.Schema, sizes: Sequence[int], epsilon: float, delta: float) -> dict[str, Any]:
    """What `completed` chooses, for the parties of a federation: only their record counts are known."""
    norm = _usual_norm(schema, str(_START["data.encoding"]))
    features = len(schema.feature_names())
    return {
        **_START,
        "num_clients": len(sizes),
        **defaults_for(sizes, features, epsilon, delta=delta, norm=norm, regression=not schema.label.classes),
        "model.name": {0: "linear", 2: "logistic"}.get(len(schema.label.classes), "softmax"),
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
    }


def _usual_norm(schema: data.Schema | None, encoding: str) -> float:
    """The norm of a usual record and its bias, from the schema alone; 0 if there is none."""
    if schema is None:
        return 0.0
    categories = sum(isinstance(column, Categorical) for column in schema.columns)
    numbers = len(schema.columns) - categories
    return math.sqrt(1 + categories + numbers * (2.0 if encoding == "standard" else 0.35))
