"""DP-SCAFFOLD with drift control: control variates, per-step noise that decays, a stop when the budget is spent.

W.-T. Chang, M. Seif, R. Tandon, "Differentially Private Federated Learning with Drift Control", Conference on
Information Sciences and Systems (CISS), 2022.

| paper | here | | paper | here |
|---|---|---|---|---|
| K, S | `num_clients`, `cohort_size` | | σ_0 | `noise_std`, on the averaged gradient |
| R, τ | `num_rounds`, `local_steps` | | β, R_th | `noise_decay`, `noise_decay_start` |
| B, D | `batch_size`, a client's size | | L (privacy) | `clip_norm`, per example (S4) |
| η_l, η_g | `client_lr`, `server_lr` | | c, c_k | `control` of server and client |

Schemes 0, 1, 2 are the noise schedules "constant", "rounds" (eq (6)) and "steps" (eq (7)). Deviations: S4 (the
clip is ours: the paper assumes bounded gradients). The formulas are in `methods.theory.dp_scaffold`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dither.errors import SpecError
from dither.methods import local
from dither.methods.theory import dp_scaffold as theory
from dither.models import Model
from dither.types import (
    Algorithm,
    Array,
    Claim,
    ClientResult,
    ClientState,
    Cohort,
    Hyper,
    Key,
    Keys,
    Message,
    Params,
    Prepared,
    PrivacyPlan,
    Records,
    Round,
    ServerState,
    Upload,
)

OPTIONS = {
    "alpha_mode": (
        "optimised",
        "Rényi order of the claimed ε: 'optimised', or 'fixed' as the printed numbers",
    ),
    "alpha": (2.5, "the order for alpha_mode='fixed'"),
    "capped": (False, "keep the optimised order within the theorem's range (S5)"),
    "const": (24.0, "constant of the leakage formula: 24 as printed in Theorem 1"),
    "stop_at_budget": (
        "claimed",
        "with noise='given', which ε must stay within privacy.epsilon: claimed, proven, no",
    ),
}
VALUES = ("alpha_mode", "alpha", "capped", "const", "stop_at_budget")  # of the claim and the stop alone
_SCHEMES = {"constant": 0, "rounds": 1, "steps": 2}

WHY = (
    "the claim fixes the Rényi order instead of optimising it, so that ln(1/δ)/(α-1) hides the true, far smaller, "
    "leak (S1, S6); it also counts the server's choice of users as amplification, which the proof does not (S2)"
)

# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """DP-SCAFFOLD for one federation (Algorithm 1)."""
    if plan.lr_decay:
        raise SpecError(f"lr_decay={plan.lr_decay:g} is not for dp-scaffold: eq (2) divides by one client_lr")
    gradients = local.noisy_gradients(model, plan, source="DP-SCAFFOLD Theorem 1; errata S2")
    std = local.chosen_noise_std(plan, lambda: noise_std(plan))
    hyper = {**local.gradient_hyper(plan, std), "server_lr": plan.server_lr}
    rounds = stopping_round(plan, local.quietest(hyper))
    return Prepared(
        plan=plan._replace(
            hyper=hyper,
            noise_names=("noise_std",),
            client_state=True,
            own_epochs=True,
        ),
        build=lambda hyper: scaffold(plan, gradients, hyper),
        claim=claim(plan, local.quietest(hyper), rounds),
        cohort_size_at=lambda index: plan.cohort_size,
        reclaim=lambda other: claim(plan, local.quietest(other), rounds),
        num_rounds=rounds,
        stop_when_proven=plan.noise == "given" and plan.options["stop_at_budget"] == "proven",
    )


def scaffold(plan: PrivacyPlan, gradients: local.NoisyGradients, hyper: Hyper) -> Algorithm:
    """SCAFFOLD's drift control around any gradients; also the noiseless baseline."""
    local_steps = plan.local_steps

    def init(params: Params) -> ServerState:
        return {"params": params, "control": jax.tree.map(jnp.zeros_like, params)}  # c(0) = 0

    def client_init(params: Params) -> ClientState:
        return {"control": jax.tree.map(jnp.zeros_like, params), "steps": jnp.int32(0)}  # c_k(0) = 0

    def client(keys: Keys, message: Message, state: ClientState, records: Records, round: Round) -> ClientResult:
        start, server_control, control = message["params"], message["control"], state["control"]
        correction = local.subtract(server_control, control)  # c(r-1) - c_k(r-1)

        def step(params: Params, batch: local.Batch, number: Array) -> tuple[Params, Array]:
            gradient, clipped = gradients.at(hyper, keys, params, batch, records, round, number)
            direction = local.add(gradient, correction)
            return local.axpy(-hyper["client_lr"], direction, params), clipped

        batches = gradients.sampler.draw(keys, state["steps"], records.size)
        end, clipped = local.train(start, records, batches, step)
        # c_k(r) = c_k(r-1) - c(r-1) + (w_{k,0} - w_{k,τ})/(τ η_l): the mean of the τ noisy gradients (S8)
        drift = local.scale(1 / (local_steps * hyper["client_lr"]), local.subtract(start, end))
        new_control = local.subtract(drift, correction)
        weight = 1 / round.cohort_size
        upload = {
            "params": local.scale(weight, local.subtract(end, start)),
            "control": local.scale(weight, local.subtract(new_control, control)),
        }
        kept = {"control": new_control, "steps": state["steps"] + local_steps}
        return ClientResult(upload, weight, kept, {"clipped": clipped})

    def server(key: Key, state: ServerState, upload: Upload, cohort: Cohort) -> ServerState:
        del key
        share = cohort.size / plan.num_clients  # S/K
        return {
            "params": local.axpy(hyper["server_lr"], upload["params"], state["params"]),
            "control": local.axpy(share, upload["control"], state["control"]),
        }

    return Algorithm(
        init=init,
        client_init=client_init,
        message=lambda state: state,
        client=client,
        server=server,
        params=lambda state: state["params"],
        releases=lambda info: gradients.releases(hyper, info),
    )


# Noise


def noise_std(plan: PrivacyPlan) -> float:
    """σ_0 for which the claimed ε after all rounds is the target."""
    return math.sqrt(theory.initial_noise_variance(_params(plan), epsilon=plan.epsilon, delta=plan.delta))


def stopping_round(plan: PrivacyPlan, std: float) -> int | None:
    """The last round within the budget `epsilon` for a given noise; None where nothing stops the run."""
    rule = plan.options["stop_at_budget"]
    if rule not in ("claimed", "proven", "no"):
        raise SpecError(f"method_options.stop_at_budget={rule!r} is not one of 'claimed', 'proven', 'no'")
    if plan.noise != "given" or rule != "claimed" or math.isinf(plan.epsilon):
        return None
    last = theory.stopping_round(_params(plan), budget=plan.epsilon, delta=plan.delta, initial_variance=std**2)
    if last == 0:
        first = claim(plan, std, 1).value
        raise SpecError(
            f"privacy.epsilon={plan.epsilon:g} is spent in the first round, which costs {first:.4g}; raise "
            "epsilon or noise_std"
        )
    return last


# Privacy


def claim(plan: PrivacyPlan, std: float, rounds: int | None = None) -> Claim:
    """Theorems 1 and 2 at this noise after `rounds` rounds."""
    if std == 0:
        return local.no_noise(plan)
    params = _params(plan).over(rounds or plan.num_rounds)
    return theory.claim(params, initial_variance=std**2, delta=plan.delta)


def _params(plan: PrivacyPlan) -> theory.Params:
    scheme, decay = _SCHEMES[plan.noise_schedule], plan.noise_decay
    return theory.Params(
        theory.Schedule(scheme, plan.num_rounds, plan.local_steps, decay, plan.noise_decay_start),
        plan.batch_size,
        plan.clip_norm,
        client_rate=plan.cohort_size / plan.num_clients,
        # The theorems have one data size D: the smallest client has the largest rate q = B/D.
        data_rate=plan.batch_size / int(plan.client_sizes.min()),
        **{name: plan.options[name] for name in ("alpha_mode", "alpha", "capped", "const")},
    )
