"""Secure FedAvg: noise on the local model after Q local steps, amplification by mini-batches.

Y. Li, T.-H. Chang, C.-Y. Chi, "Secure Federated Averaging Algorithm with Differential Privacy", IEEE
International Workshop on Machine Learning for Signal Processing (MLSP), 2020.

| paper | here | | paper | here |
|---|---|---|---|---|
| N, K | `num_clients`, `cohort_size` | | G | `clip_norm` |
| T/Q | `num_rounds` | | η_t | `client_lr / (1 + lr_decay·t)` |
| Q | `local_steps` | | σ_{t,k}/Δ_{t+1,k} | `noise_multiplier` |
| b | `batch_size` | | p_k = n_k/n | `share` |

Deviations: E8 (the weights of a round sum to one also when S_0 = [N] or the n_k differ: the average is taken
of the changes w_k - w̄, with weight p_k N/|S_t|). The formulas of noise, privacy and convergence are in
`methods.theory.secure_fedavg`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from dither.errors import SpecError
from dither.methods import local
from dither.methods.theory import secure_fedavg as theory
from dither.models import Model
from dither.privacy import clipping, noise, sampling
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
    Release,
    Round,
    RoundInfo,
    Sampling,
    ServerState,
    Upload,
)

OPTIONS = {
    "first_round": ("all", "who takes part in round 0: 'all' as printed (S_0 = [N]) or 'cohort'"),
}

WHY = (
    "eq (8) uses e^x - 1 <= 2x far beyond x = 1.26, where it holds (E1); the claim is for one message, the proof "
    "for all rounds a client takes part in (E2)"
)

# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """Secure FedAvg for one federation."""
    sizes = plan.client_sizes
    sampler = sampling.make(
        plan.batch_sampling,
        batch_size=plan.batch_size,
        local_steps=plan.local_steps,
        client_sizes=sizes,
        sampling_rate=plan.sampling_rate,
    )
    local_steps = plan.local_steps
    num_records = int(sizes.sum())

    def build(hyper: Hyper) -> Algorithm:
        def client(
            keys: Keys, message: Message, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            first = round.index * local_steps
            batches = sampler.draw(keys, first, records.size)

            def step(params: Params, batch: local.Batch, number: Array) -> tuple[Params, Array]:
                gradient, clipped = clipping.gradient(
                    model,
                    params,
                    *batch,
                    divisor=sampler.divisor(records.size),
                    clip_norm=hyper["clip_norm"],
                    mode=plan.clip,
                    l2=plan.l2,
                    l2_inside_clip=plan.l2_inside_clip,
                )
                return local.axpy(-local.learning_rate(hyper, first + number), gradient, params), clipped

            end, clipped = local.train(message, records, batches, step)
            # Lemma 1 with the rate of the next step, η_{t+1}; eq (9) with this client's own n_k
            sensitivity = 4 * local_steps * hyper["clip_norm"] * local.learning_rate(hyper, first + local_steps)
            noise_std = hyper["noise_multiplier"][round.client] * sensitivity
            end = noise.gaussian(keys.noise, end, noise_std=noise_std)
            share = records.size / num_records
            weight = share * len(sizes) / round.cohort_size  # p_k N/|S_t| (E8)
            upload = local.scale(weight, local.subtract(end, message))
            return ClientResult(upload, weight, state, {"clipped": clipped})

        of_round = cache(lambda index: _round_sensitivities(index, hyper, plan, sampler))
        of_size = cache(lambda size: _round_sampling(size, plan, sampler))

        @cache
        def made(index: int, client: int, size: int) -> tuple[Release, ...]:
            printed, proven = of_round(index)
            return (
                Release(
                    channel="uplink",
                    noise_std=float(np.asarray(hyper["noise_multiplier"])[client]) * printed,
                    sensitivity=proven,
                    uses=1,
                    sampling=of_size(size),
                    source="Secure FedAvg eq (9), Lemma 1; errata R5",
                ),
            )

        def releases(info: RoundInfo) -> tuple[Release, ...]:
            """One noisy model a participation; with a constant rate all rounds are alike."""
            return made(info.index if float(hyper["lr_decay"]) else 0, info.client, info.size)

        return Algorithm(
            init=lambda params: params,
            client_init=lambda params: (),
            message=lambda server: server,
            client=client,
            server=_server,
            params=lambda server: server,
            releases=releases,
        )

    def cohort_size_at(index: int) -> int:
        everyone = index == 0 and plan.options["first_round"] == "all"
        return plan.num_clients if everyone else plan.cohort_size

    multiplier = noise_multipliers(plan)
    return Prepared(
        plan=plan._replace(
            hyper={
                "client_lr": plan.client_lr,
                "lr_decay": plan.lr_decay,
                "clip_norm": plan.clip_norm,
                "noise_multiplier": multiplier,
            },
            noise_names=("noise_multiplier",),
            weights=sizes,
            upload_noise="noise_multiplier",
            upload_unit=float(sizes.min() / sizes.sum() * len(sizes) / max(map(cohort_size_at, range(2)))),
        ),
        build=build,
        claim=claim(plan, multiplier),
        cohort_size_at=cohort_size_at,
        reclaim=lambda other: claim(plan, np.asarray(other["noise_multiplier"])),
    )


def _server(key: Key, server: ServerState, upload: Upload, cohort: Cohort) -> ServerState:
    del key, cohort
    return local.add(server, upload)


# Noise


def noise_multipliers(plan: PrivacyPlan) -> np.ndarray:
    """σ/Δ of eq (9) for each client from its own n_k; zeros without privacy."""
    if plan.noise == "none":
        return np.zeros(plan.num_clients)
    if plan.clip == "none":
        raise SpecError("privacy.clip='none' leaves eq (9) without a sensitivity; use 'batch' or 'example'")
    if plan.noise == "given":
        raise SpecError("privacy.noise='given' is not for secure-fedavg, whose noise follows its learning rate")
    local.refuse_unused(plan, "secure-fedavg", schedule=True, scale=True)
    if plan.noise == "proven":
        return np.ones(plan.num_clients)  # a unit: the accountant sets the factor
    params = theory.Params(plan.local_steps, plan.batch_size, plan.client_sizes)
    return np.asarray(theory.noise_multiplier(params, epsilon=plan.epsilon, delta=plan.delta))


# Privacy


def claim(plan: PrivacyPlan, multiplier: np.ndarray) -> Claim:
    """The paper's ε per message (E2), with the conditions of its derivation at the largest client: there the
    base ε/(2q) is largest and q closest to δ. The ε itself is the same for all clients."""
    if not np.any(multiplier):
        return Claim(float("inf"), "message", plan.delta, "no noise")
    worst = int(np.argmax(plan.client_sizes))
    rates, next_lr = theory.round_learning_rates(
        0, local_steps=plan.local_steps, client_lr=plan.client_lr, lr_decay=plan.lr_decay
    )
    sensitivity = float(
        theory.sensitivity(local_steps=plan.local_steps, clip_norm=plan.clip_norm, next_lr=next_lr)
    )
    return theory.claim(
        theory.Params(plan.local_steps, plan.batch_size, int(plan.client_sizes[worst])),
        noise_std=float(multiplier[worst]) * sensitivity,
        sensitivity=sensitivity,
        delta=plan.delta,
        extra=theory.lemma1_conditions(round_lrs=rates, next_lr=next_lr),
    )


def _sensitivity(plan: PrivacyPlan, sampler: sampling.BatchSampler, clip_norm: float, rates: np.ndarray) -> float:
    """2 G Σ η (the exact worst case behind Lemma 1), for a step that may be longer than G or expand.

    Clipping every record bounds a Poisson batch's mean by G times its largest length over its divisor. A
    regulariser outside the clip moves two runs apart by |1 - 2 η λ| a step where that exceeds 1.
    """
    if plan.clip == "none":
        return float("inf")
    longest = clip_norm
    if plan.clip == "example" and sampler.kind.startswith("poisson"):
        longest *= sampler.width / plan.batch_size
    outside = plan.clip == "example" or not plan.l2_inside_clip
    expansion = np.maximum(1.0, np.abs(1 - 2 * rates * plan.l2)) if outside else np.ones(len(rates))
    if np.prod(expansion) > 2.0**60:  # parameters might overflow in one world and not in the other
        return float("inf")
    later = np.append(np.cumprod(expansion[::-1])[::-1][1:], 1.0)  # product over the steps that follow
    return float(2 * longest * np.sum(rates * later))


def _round_sensitivities(
    index: int, hyper: Hyper, plan: PrivacyPlan, sampler: sampling.BatchSampler
) -> tuple[float, float]:
    """Of one round: the printed sensitivity, to which the noise is made, and the exact worst case, which holds
    whatever the batches are."""
    rates, next_lr = theory.round_learning_rates(
        index,
        local_steps=plan.local_steps,
        client_lr=float(hyper["client_lr"]),
        lr_decay=float(hyper["lr_decay"]),
    )
    clip_norm = float(hyper["clip_norm"])
    printed = float(theory.sensitivity(local_steps=plan.local_steps, clip_norm=clip_norm, next_lr=next_lr))
    return printed, _sensitivity(plan, sampler, clip_norm, rates)


def _round_sampling(size: int, plan: PrivacyPlan, sampler: sampling.BatchSampler) -> Sampling:
    """A record is used at all with probability `used_in_round`. The weight p_k follows the client's record count:
    proved for a replaced record only."""
    one_batch = sampler.sampling(size)
    return one_batch._replace(
        kind=f"{one_batch.kind}-round",
        rate=sampling.used_in_round(one_batch, plan.local_steps),
        adjacency=sampling.REPLACE_ONE,
    )
