"""A sixth method in one file: noisy gradients as in CPFed, server momentum as in FedAvgM (Hsu et al. 2019).

Run it:   dither run adult --set method=examples/fedavgm_dp.py
A method's file has OPTIONS (its own constants: name -> (default, help)) and prepare(model, plan). It is put
to the suite that all methods pass by tests/methods/test_sixth_method.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dither.errors import SpecError
from dither.methods import local
from dither.models import Model
from dither.types import Algorithm, Claim, Hyper, Prepared, PrivacyPlan

OPTIONS = {"momentum": (0.5, "how much of the last round's step is kept")}
WHY = "no paper claims anything for this method: only the proven ε counts"


# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """Make the method ready for one federation: noise, factory, claim."""
    gradients = local.noisy_gradients(model, plan, source="DP-FedAvgM; errata G7a")
    averaging = local.averaging(plan, gradients)
    std = local.chosen_noise_std(plan, _no_formula)
    return Prepared(
        plan=plan._replace(
            hyper={**local.gradient_hyper(plan, std), "momentum": float(plan.options["momentum"])},
            noise_names=("noise_std",),
            own_epochs=True,
            weights=np.ones(plan.num_clients),  # alike, and only a factor follows the noise
            upload_unit=local.upload_unit(plan),
        ),
        build=lambda hyper: with_momentum(averaging(hyper), hyper),
        claim=Claim(float("inf"), "run", plan.delta, "no claim"),
        cohort_size_at=lambda index: plan.cohort_size,
    )


def with_momentum(algorithm: Algorithm, hyper: Hyper) -> Algorithm:
    """The same clients, another server: v <- momentum·v + mean update, w <- w + v."""

    def init(params):
        return {"params": algorithm.init(params), "velocity": jax.tree.map(jnp.zeros_like, params)}

    def server(key, state, upload, cohort):
        velocity = local.axpy(hyper["momentum"], state["velocity"], upload)
        return {"params": local.add(state["params"], velocity), "velocity": velocity}

    return algorithm._replace(
        init=init,
        message=lambda state: state["params"],
        server=server,
        params=lambda state: state["params"],
    )


# Noise


def _no_formula() -> float:
    raise SpecError("this method has no printed noise formula: use privacy.noise='proven' or 'given'")
