"""A method in a file, as a user might write it, that does what proofs find hard: the fuzz net draws it.

It adds noise to gradients as CPFed does. Then a client may send signs alone, or add its last update to the next
one; and later rounds may take fewer clients than the first. It states weights unless it sends signs, which are not
linear.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dither.methods import local
from dither.models import Model
from dither.types import Algorithm, Claim, ClientResult, Hyper, Params, Prepared, PrivacyPlan, Records, Round

OPTIONS = {
    "sends": ("updates", "updates, signs of them, or sums of the last two"),
    "later": (0, "clients of a round after the first; 0: as many as in the first"),
}


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """Make the method ready for one federation."""
    averaging = local.averaging(plan, local.noisy_gradients(model, plan, source="a method in a file"))
    sends, later = plan.options["sends"], int(plan.options["later"])

    def build(hyper: Hyper) -> Algorithm:
        plain = averaging(hyper)
        if sends == "signs":
            return plain._replace(client=lambda *arguments: _signs(plain.client(*arguments)))
        return _remembering(plain) if sends == "sums" else plain

    return Prepared(
        plan=plan._replace(
            hyper=local.gradient_hyper(plan, local.chosen_noise_std(plan, _no_formula)),
            noise_names=("noise_std",),
            weights=None if sends == "signs" else np.ones(plan.num_clients),
            upload_unit=local.upload_unit(plan),
        ),
        build=build,
        claim=Claim(math.inf, "run", plan.delta, "no paper"),
        cohort_size_at=lambda index: (index and later) or plan.cohort_size,
    )


def _signs(result: ClientResult) -> ClientResult:
    return result._replace(upload=jax.tree.map(jnp.sign, result.upload))


def _remembering(plain: Algorithm) -> Algorithm:
    def client(keys: Any, message: Any, state: Any, records: Records, round: Round) -> ClientResult:
        result = plain.client(keys, message, state["inner"], records, round)
        upload = local.add(result.upload, state["last"])
        return result._replace(upload=upload, state={"inner": result.state, "last": result.upload})

    def client_init(params: Params) -> Any:
        return {"inner": plain.client_init(params), "last": jax.tree.map(jnp.zeros_like, params)}

    return plain._replace(client=client, client_init=client_init)


def _no_formula() -> float:
    return 1.0  # never used: "proven" and "given" need none
