"""Two data sets that refute the sensitivity on which NbAFL's noise rests: python tools/audit_nbafl.py"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from audit_reconstruction import first_result
from jax.flatten_util import ravel_pytree

from dither import accounting, models
from dither.methods import nbafl, prepare
from dither.models import Model
from dither.spec import Spec
from dither.types import Records


class Counterexample(NamedTuple):
    """How far apart the noiseless uploads of two neighbours are, and the sensitivity that the paper states."""

    distance: float
    stated: float  # 2C/m
    param_clip: float
    noise_std: float  # σ_U as printed for the claimed ε
    claimed: float
    epsilon: float  # what one upload with that noise reveals of this pair, exact (R1)
    delta: float


def counterexample(
    *, model: Model | None = None, num_features: int = 1, epsilon: float = 50.0, values: Any = None
) -> Counterexample:
    """NbAFL's noise assumes that replacing one of m records moves the local model by at most 2C/m. Two data sets
    refute it (errata N2): m - 1 records at x = 0, their labels in turn 0 and 1, and one at x = 1 with either
    label. The method's own client runs on both, without noise.

    The defaults are a logistic model of one feature trained to its optimum, where the paper's argument would be
    exact: gradient steps until the proximal objective no longer moves. `values` are dotted keys of the spec.
    """
    model = model or models.logistic(num_features)
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
    params = model.init(jax.random.key(spec.seed))
    prepared = prepare(
        spec, model, client_sizes=np.full(spec.num_clients, count), num_params=models.count_params(params)
    )
    x = np.zeros((count, num_features), np.float32)
    x[0] = 1.0
    noiseless = {k: 0.0 if k in prepared.plan.noise_names else v for k, v in prepared.hyper.items()}

    @jax.jit
    def upload(y: Any) -> Any:
        algorithm = prepared.build({k: jnp.asarray(v, jnp.float32) for k, v in noiseless.items()})
        records = Records(jnp.asarray(x), y, jnp.arange(count), jnp.int32(0), jnp.int32(count))
        result = first_result(algorithm, params, records, seed=0, cohort_size=spec.cohort_size)
        return ravel_pytree(result.upload)[0] / result.weight

    labels = np.arange(count, dtype=np.int32) % 2
    uploads = []
    for label in (0, 1):
        labels[0] = label
        uploads.append(np.asarray(upload(jnp.asarray(labels)), np.float64))
    distance = float(np.linalg.norm(uploads[0] - uploads[1]))
    clip, delta = float(prepared.hyper["param_clip"]), spec.privacy.delta
    noise_std = float(prepared.hyper["uplink_std"])
    return Counterexample(
        distance,
        float(nbafl.uplink_sensitivity(param_clip=clip, min_client_size=count)),
        clip,
        noise_std,
        epsilon,
        accounting.gaussian_epsilon(distance / noise_std, delta),
        delta,
    )


def main() -> None:
    """The optimum of logistic regression, and the paper's network after ten steps of Adam."""
    network = models.mlp(784, 10, (256,))
    steps = {"local_steps": 10, "client_lr": 0.002, "method_options.optimizer": "adam"}
    for found in (counterexample(), counterexample(model=network, num_features=784, values=steps)):
        claim = f"claimed ε {found.claimed:g}, but one upload has {found.epsilon:,.4g}"
        print(f"{found.distance:.3g} apart, not {found.stated:.3g}; {claim}")


if __name__ == "__main__":
    main()
