"""NbAFL: noise before aggregation, parameter clipping, uplink and downlink noise, K-client scheduling.

K. Wei et al., "Federated Learning with Differential Privacy: Algorithms and Performance Analysis", IEEE
Transactions on Information Forensics and Security 15, 2020.

| paper | here | | paper | here |
|---|---|---|---|---|
| N, K | `num_clients`, `cohort_size` | | C | `param_clip`, on the whole parameter vector |
| T | `num_rounds` | | μ | `proximal` |
| L (exposures) | `exposures` | | σ_U, σ_D | `uplink_std`, `downlink_std` |
| m | smallest client | | p_i | weight: n_i/n, or 1/K under scheduling |

Deviations: local training to "a preset termination condition" is read as `local_steps` full-batch steps of
Adam; N7 (a C taken from a pilot depends on the data: printed as a caveat). The claimed ε is Theorem 1's and
Lemma 4's; errata N1, N2 and N4 say why they do not hold. The formulas are in `methods.theory.nbafl`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from dither.errors import SpecError
from dither.methods import local
from dither.methods.theory import nbafl as theory
from dither.models import Model
from dither.privacy import clipping, noise, sampling
from dither.types import (
    Algorithm,
    Claim,
    ClientResult,
    ClientState,
    Cohort,
    Hyper,
    Key,
    Keys,
    Message,
    Prepared,
    PrivacyPlan,
    Records,
    Release,
    Round,
    RoundInfo,
    ServerState,
    Upload,
)

OPTIONS = {
    "param_clip": (20.0, "C, bound on the norm of all parameters; 0: the median norm of a non-private pilot"),
    "proximal": (0.01, "μ of the proximal term (μ/2)|w - w_global|^2"),
    "exposures": (1, "L, how many uploads of one client an outsider may see"),
    "sensitivity": ("clip", "what proofs rest on: 'clip' (2C, proved) or 'paper' (2C/m, only assumed: N2)"),
    "optimizer": ("adam", "local optimiser: 'adam' or 'sgd'"),
    "scheduling": (
        "printed",
        "downlink noise with K < N: 'printed' (Lemma 4), 'corrected' (N4) or 'uncredited' (no sampling credit)",
    ),
}
VALUES = ("param_clip", "proximal", "exposures", "sensitivity", "scheduling")  # they set numbers, no structure
PILOT_METRIC = "param_norm"

WHY = (
    "the claim takes a sensitivity of 2C/m where clipping proves only 2C (N2), and the classical Gaussian "
    "constant far above ε = 1, where it fails (N1)"
)

# Algorithm


def prepare(model: Model, plan: PrivacyPlan) -> Prepared:
    """NbAFL for one federation (Algorithm 1)."""
    param_clip = float(plan.options["param_clip"])
    if param_clip <= 0:
        raise SpecError(f"method_options.param_clip={param_clip:g} must be above 0 (0 asks for a pilot run first)")
    local_model = local.proximal_training(model, plan, optimizer_name=plan.options["optimizer"])
    num_records = int(plan.client_sizes.sum())
    everyone = plan.cohort_size == plan.num_clients

    def build(hyper: Hyper) -> Algorithm:
        def client(
            keys: Keys, message: Message, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            end = local_model(hyper, keys, message, records, round, round.index * plan.local_steps)
            norm = clipping.norm(end)
            end = clipping.clip(end, hyper["param_clip"])  # w_i / max(1, |w_i|/C)
            end = noise.gaussian(keys.noise, end, noise_std=hyper["uplink_std"])
            weight = records.size / num_records if everyone else 1 / round.cohort_size  # p_i
            upload = local.scale(weight, local.subtract(end, message))
            clipped = (norm > hyper["param_clip"]).astype(jnp.float32)
            return ClientResult(upload, weight, state, {"clipped": clipped, PILOT_METRIC: norm})

        def server(key: Key, state: ServerState, upload: Upload, cohort: Cohort) -> ServerState:
            # Where updates were left out the others weigh more, and so must the noise.
            std = hyper["downlink_std"] * plan.cohort_size / jnp.maximum(cohort.size, 1)
            return noise.gaussian(key, local.add(state, upload), noise_std=std)

        return Algorithm(
            init=lambda params: params,
            client_init=lambda params: (),
            message=lambda state: state,
            client=client,
            server=server,
            params=lambda state: state,
            releases=lambda info: _releases(info, hyper, plan),
        )

    uplink, downlink = noise_stds(plan)
    return Prepared(
        plan=plan._replace(
            hyper={
                "client_lr": plan.client_lr,
                "lr_decay": plan.lr_decay,
                "param_clip": param_clip,
                "proximal": float(plan.options["proximal"]),
                "uplink_std": uplink,
                "downlink_std": downlink,
            },
            noise_names=("uplink_std", "downlink_std"),
            weights=plan.client_sizes if everyone else None,
            upload_noise="uplink_std",
            upload_unit=float(_weights(plan).min()),
            exposures=int(plan.options["exposures"]),
            assumed=plan.options["sensitivity"] == "paper",
        ),
        build=build,
        claim=claim(plan, uplink, downlink),
        cohort_size_at=lambda index: plan.cohort_size,
        caveats=(*_scheduling_caveat(plan), *_sensitivity_caveat(plan)),
        reclaim=lambda other: claim(plan, float(other["uplink_std"]), float(other["downlink_std"])),
    )


# Noise


def noise_stds(plan: PrivacyPlan) -> tuple[float, float]:
    """σ_U, and σ_D by Theorem 1 (all clients) or Lemma 4 (K of N scheduled)."""
    local.refuse_unused(plan, "nbafl", schedule=True, scale=True)
    if plan.noise == "none":
        return 0.0, 0.0
    if plan.noise == "proven":
        return 1.0, 0.0  # a unit on the uploads: the accountant sets the factor
    everyone = plan.cohort_size == plan.num_clients
    if plan.noise == "given":
        return plan.noise_std, 0.0
    params, budget = _params(plan), {"epsilon": plan.epsilon, "delta": plan.delta}
    uplink = float(theory.uplink_noise_std(params, **budget))
    form = plan.options["scheduling"]
    if everyone:
        return uplink, float(theory.downlink_noise_std(params, **budget, weights=_weights(plan)))
    if form == "printed":
        return uplink, float(theory.scheduled_downlink_noise_std(params, **budget))
    if form not in ("corrected", "uncredited"):
        raise SpecError(f"method_options.scheduling={form!r} is not one of 'printed', 'corrected', 'uncredited'")
    downlink = theory.scheduled_downlink_noise_std_corrected(params, **budget, sampling_credit=form == "corrected")
    return uplink, float(downlink)


def _params(plan: PrivacyPlan) -> theory.Params:
    return theory.Params(
        float(plan.options["param_clip"]),
        int(plan.client_sizes.min()),
        int(plan.options["exposures"]),
        plan.num_rounds,
        plan.num_clients,
        plan.cohort_size,
    )


def _sensitivity_caveat(plan: PrivacyPlan) -> tuple[str, ...]:
    kind = plan.options["sensitivity"]
    if kind not in ("clip", "paper"):
        raise SpecError(f"method_options.sensitivity={kind!r} is not one of 'clip', 'paper'")
    if kind == "clip":
        return ()
    return ("not covered: the sensitivity 2C/m of eq (4) is assumed, and false in general (errata N2)",)


def _scheduling_caveat(plan: PrivacyPlan) -> tuple[str, ...]:
    if plan.noise != "paper" or plan.cohort_size == plan.num_clients:
        return ()
    note = theory.scheduling_note(_params(plan), epsilon=plan.epsilon)
    return (note,) if note else ()


# Privacy


def _weights(plan: PrivacyPlan) -> np.ndarray:
    if plan.cohort_size < plan.num_clients:
        return np.full(plan.cohort_size, 1 / plan.cohort_size)
    return plan.client_sizes / plan.client_sizes.sum()


def aggregate_std(plan: PrivacyPlan, uplink: float, downlink: float, colluders: int = 0) -> float:
    """σ_A: the noise an outsider finds on a broadcast; `colluders` know their own part of it (N3)."""
    honest = np.sort(np.square(_weights(plan)))[: max(len(_weights(plan)) - colluders, 1)]
    squares = float(np.sum(honest))
    return float(theory.aggregate_noise_std(uplink_std=uplink, downlink_std=downlink, weights_sq_sum=squares))


def claim(plan: PrivacyPlan, uplink: float, downlink: float) -> Claim:
    """The larger of the two channels' claimed ε (the paper states each by itself)."""
    if uplink == 0:
        return local.no_noise(plan)
    channels = theory.channel_claims(
        _params(plan),
        uplink_std=uplink,
        aggregate_std=aggregate_std(plan, uplink, downlink),
        delta=plan.delta,
        max_weight=float(_weights(plan).max()),
    )
    larger = max(channels, key=lambda channel: channel.value)
    channel = larger.unit.removeprefix("run, ")
    return larger._replace(unit="run", source=f"{larger.source}, {channel}")


def _releases(info: RoundInfo, hyper: Hyper, plan: PrivacyPlan) -> tuple[Release, ...]:
    """An upload and a broadcast a round. Clipping alone proves a sensitivity of 2C, not 2C/m (N2)."""
    reach = 2 * float(hyper["param_clip"])
    source = "with the sensitivity 2C of errata N2"
    if plan.options["sensitivity"] == "paper":
        reach /= int(plan.client_sizes.min())
        source = "with the sensitivity 2C/m of eq (4), assumed"
    weights = _weights(plan)
    everything = sampling.Sampling("full", 1.0, sampling.REPLACE_ONE, 0.0, info.size, info.size)
    uplink, downlink = float(hyper["uplink_std"]), float(hyper["downlink_std"])
    return (
        Release("uplink", uplink, reach, 1, everything, f"NbAFL eq (4) {source}"),
        Release(
            "downlink",
            aggregate_std(plan, uplink, downlink, plan.silent),
            reach * float(weights.max()),
            1,
            everything,
            f"NbAFL Theorem 1 {source}",
        ),
    )
