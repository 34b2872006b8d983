"""What the server makes of a round's change of the model: momentum, Adam, schedules, averages of iterates.

FedAvgM: T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019. FedAdam: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021. Averages of
the last iterates: B. Polyak, A. Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.

All of it is computed from what the method's own server has released already and costs no ε. A real server runs the
same compiled function as the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dither.errors import SpecError
from dither.methods import local
from dither.spec import Spec
from dither.types import Algorithm, Array, Cohort, Hyper, Key, Params, Prepared, Upload

if TYPE_CHECKING:
    import optax

_ADAM_FLOOR = 1e-3  # ε of FedAdam: coordinates that have hardly moved are not blown up


def with_optimizer(prepared: Prepared, spec: Spec) -> Prepared:
    """The method with the spec's server optimiser."""
    # Adam's steps have a length of their own; others scale the change, which some methods' servers do themselves.
    applied = "server_lr" in prepared.plan.hyper and spec.server_optimizer != "adam"
    values = {
        "server_lr": spec.server_lr,
        "server_momentum": spec.server_momentum,
        "server_rounds": float(prepared.num_rounds or spec.num_rounds),
        "server_average": spec.server_average,
    }

    def build(hyper: Hyper) -> Algorithm:
        scale = jnp.float32(1) if applied else hyper["server_lr"]
        return _optimised(prepared.build(hyper), hyper, spec, scale)

    return prepared._replace(
        plan=prepared.plan._replace(hyper={**values, **prepared.plan.hyper}),
        build=build,
    )


def _rule(spec: Spec, momentum: Array) -> optax.GradientTransformation:
    import optax

    if spec.server_optimizer == "adam":
        return optax.scale_by_adam(b1=momentum, b2=0.99, eps=_ADAM_FLOOR)
    return optax.trace(decay=momentum) if spec.server_optimizer == "momentum" else optax.identity()


def _progress(spec: Spec, done: Array) -> Array:
    """The factor of the step after this fraction of the rounds."""
    left = jnp.clip(1 - done, 0, 1)
    return {"constant": jnp.ones_like(left), "linear": left, "cosine": 0.5 * (1 - jnp.cos(jnp.pi * left))}[
        spec.server_schedule
    ]


def _optimised(inner: Algorithm, hyper: Hyper, spec: Spec, scale: Array) -> Algorithm:
    rule = _rule(spec, hyper["server_momentum"])

    def init(params: Params) -> dict[str, Any]:
        model = inner.init(params)
        if str(jax.tree.structure(model)) != str(jax.tree.structure(params)):
            raise SpecError(
                f"server_optimizer, server_schedule and server_average are not for {spec.method}: its server "
                "keeps more than the model; leave them out"
            )
        average = {"average": model} if spec.server_average else {}
        return {"model": model, "memory": rule.init(model), "updates": jnp.float32(0), **average}

    def server(key: Key, state: dict[str, Any], upload: Upload, cohort: Cohort) -> dict[str, Any]:
        change = local.subtract(inner.server(key, state["model"], upload, cohort), state["model"])
        direction, memory = rule.update(change, state["memory"], state["model"])
        rate = scale * _progress(spec, state["updates"] / hyper["server_rounds"])
        model, updates = local.axpy(rate, direction, state["model"]), state["updates"] + 1
        after = {"model": model, "memory": memory, "updates": updates}
        if spec.server_average:
            # The mean of the models after the last rounds, that share of them
            counted = jnp.maximum(updates - jnp.floor((1 - hyper["server_average"]) * hyper["server_rounds"]), 1)
            after["average"] = local.axpy(1 / counted, local.subtract(model, state["average"]), state["average"])
        return after

    of_the_model = inner.decode

    return inner._replace(
        init=init,
        message=lambda state: inner.message(state["model"]),
        server=server,
        params=lambda state: inner.params(state["average" if spec.server_average else "model"]),
        decode=of_the_model and (lambda state, *rest: of_the_model(state["model"], *rest)),
    )
