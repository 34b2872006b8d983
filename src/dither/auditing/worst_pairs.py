"""Pairs of datasets that refute a claim by being shown: nothing is sampled, two noiseless runs are compared.

NbAFL's noise rests on a sensitivity of 2C/m: that replacing one of m records moves the local model by no more.
`nbafl_pair` runs the method's own client, without noise, on two datasets of m records that differ in one label.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import accounting, models
from dither.methods.theory import nbafl as theory
from dither.simulation import engine
from dither.spec import Spec, prepare
from dither.types import Records, Round


class Pair(NamedTuple):
    """How far apart the noiseless uploads of two neighbours are, and what the paper says they may be."""

    distance: float
    stated: float  # 2C/m
    param_clip: float
    noise_std: float  # σ_U as printed for the claimed ε
    claimed: float
    epsilon: float  # R1: what one upload with that noise reveals of this pair, exact
    delta: float


def nbafl_pair(
    *, model: models.Model | None = None, num_features: int = 1, epsilon: float = 50.0, values: Any = None
) -> Pair:
    """m - 1 records at x = 0, their labels in turn 0 and 1, and one at x = 1 with either label (errata N2).

    The defaults are a logistic model of one feature trained to its optimum, where the paper's argument would be
    exact: gradient steps until the proximal objective no longer moves. `values` are dotted keys of the spec.
    """
    made = model or models.logistic(num_features)
    changes = {
        "num_clients": 50,
        "cohort_size": 50,
        "num_rounds": 25,
        "local_steps": 4000,
        "client_lr": 1.0,
        "batch_sampling": "full",
        "method_options.optimizer": "sgd",
        "privacy.epsilon": epsilon,
        **(values or {}),
    }
    spec = Spec.from_preset("nbafl").with_values(changes)
    count = spec.data.records_per_client
    sizes = np.full(spec.num_clients, count)
    params = made.init(jax.random.key(spec.seed))
    prepared = prepare(spec, made, client_sizes=sizes, num_params=models.count_params(params))
    x = np.zeros((count, num_features), np.float32)
    x[0] = 1.0
    quiet = {k: 0.0 if k in prepared.plan.noise_names else v for k, v in prepared.hyper.items()}

    @jax.jit
    def upload(y: Any) -> Any:
        algorithm = prepared.build({k: jnp.asarray(v, jnp.float32) for k, v in quiet.items()})
        records = Records(jnp.asarray(x), y, jnp.arange(count), jnp.int32(0), jnp.int32(count))
        zero = jnp.int32(0)
        result = algorithm.client(
            engine.client_keys(jnp.uint32(0), zero, zero),
            algorithm.message(algorithm.init(params)),
            algorithm.client_init(params),
            records,
            Round(zero, zero, jnp.int32(spec.cohort_size)),
        )
        return ravel_pytree(result.upload)[0] / result.weight

    labels = np.arange(count, dtype=np.int32) % 2
    ends = []
    for label in (0, 1):
        labels[0] = label
        ends.append(np.asarray(upload(jnp.asarray(labels)), np.float64))
    distance = float(np.linalg.norm(ends[0] - ends[1]))
    clip, delta = float(prepared.hyper["param_clip"]), spec.privacy.delta
    noise_std = float(prepared.hyper["uplink_std"])
    return Pair(
        distance,
        float(theory.uplink_sensitivity(param_clip=clip, min_client_size=count)),
        clip,
        noise_std,
        epsilon,
        accounting.gaussian_epsilon(distance / noise_std, delta),
        delta,
    )
