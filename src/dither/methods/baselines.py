"""What the papers compare with: FedAvg, FedProx, SCAFFOLD, DP-SGD, DP-DSGD and DP-FedAvg.

FedAvg: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017. FedProx: T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. SCAFFOLD: S. P.
Karimireddy et al., ICML 2020. DP-SGD and DP-DSGD: the baselines of CPFed (Sec. VII-C) and of Concentrated DP-FL
(Sec. VII-C). DP-FedAvg: B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018: the privacy of whole clients, noise added by a trusted server.

Each `prepare_*` is a method of its own; `spec.METHODS` names them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dither.errors import SpecError
from dither.methods import concentrated, cpfed, dp_scaffold, local
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

# Algorithm

FEDAVG_OPTIONS: dict[str, Any] = {"optimizer": ("sgd", "local optimiser: 'sgd' or 'adam'")}
FEDPROX_OPTIONS: dict[str, Any] = {
    **FEDAVG_OPTIONS,
    "proximal": (0.1, "μ of the proximal term (μ/2)|w - w_global|^2"),
}
SCAFFOLD_OPTIONS: dict[str, Any] = {}
DP_SGD_OPTIONS: dict[str, Any] = {
    "equal_credit": (False, "give the baseline CPFed's participation and aggregation credit too (C7)"),
}
DP_DSGD_OPTIONS: dict[str, Any] = {
    "credited_clients": ("n", "clients whose noise is credited: 'n' as printed, 'r' as derived (D4)"),
    "participation": concentrated.OPTIONS["participation"],
    "participations": concentrated.OPTIONS["participations"],
}
DP_SGD_VALUES = ("equal_credit",)  # they set the noise, no structure
DP_DSGD_VALUES = ("credited_clients", "participations")
DP_FEDAVG_OPTIONS: dict[str, Any] = {
    "update_clip": (1.0, "S, bound on the norm of a client's whole update"),
    "noise_multiplier": (0.0, "noise std over S on the sum of updates; 0: from epsilon"),
}


def prepare_fedavg(model: Model, setting: PrivacyPlan) -> Prepared:
    """FedAvg: local steps without clip or noise, average weighted by the clients' sizes."""
    return _plain(model, setting, proximal=0.0, optimizer=setting.options["optimizer"])


def prepare_fedprox(model: Model, setting: PrivacyPlan) -> Prepared:
    """FedProx: FedAvg with a pull towards the broadcast model."""
    options = setting.options
    return _plain(model, setting, proximal=float(options["proximal"]), optimizer=options["optimizer"])


def prepare_scaffold(model: Model, setting: PrivacyPlan) -> Prepared:
    """SCAFFOLD: DP-SCAFFOLD without clip and noise."""
    setting = setting._replace(noise="none", clip="none", noise_schedule="constant")
    gradients = local.noisy_gradients(model, setting, source="no noise")
    return Prepared(
        plan=setting._replace(
            hyper={**local.gradient_hyper(setting, 0.0), "server_lr": setting.server_lr},
        ),
        build=lambda hyper: dp_scaffold.scaffold(setting, gradients, hyper),
        claim=local.no_noise(setting),
        cohort_size_at=lambda index: setting.cohort_size,
    )


def prepare_dp_sgd(model: Model, setting: PrivacyPlan) -> Prepared:
    """DP-SGD as CPFed compares: one noisy step a round, the budget split evenly over the rounds."""
    _one_step(setting, "dp-sgd")
    clients = (setting.num_clients, setting.batch_size, setting.clip_norm, setting.cohort_size)
    params = cpfed.dpsgd_params(
        cpfed.Params(setting.num_rounds, setting.local_steps, *clients),
        credit_sa=bool(setting.options["equal_credit"]),
    )
    return local.noisy_averaging(
        model,
        setting,
        source="CPFed Corollary 1; errata G7a",
        noise_std=lambda: cpfed.noise_std(params, epsilon=setting.epsilon, delta=setting.delta),
        claim=lambda std: cpfed.claim(params, noise_std=std, delta=setting.delta),
        ignores_counts=True,
    )


def prepare_dp_dsgd(model: Model, setting: PrivacyPlan) -> Prepared:
    """DP-DSGD as Concentrated DP-FL compares: one noisy step a round on a fresh batch."""
    _one_step(setting, "dp-dsgd")
    cohorts = concentrated.participation_design(setting)
    which = setting.options["credited_clients"]
    if which not in ("n", "r"):
        raise SpecError(f"method_options.credited_clients={which!r} is not one of 'n', 'r'")
    params = concentrated.Params(
        concentrated.participations(setting, cohorts),
        setting.local_steps,
        setting.batch_size,
        setting.batch_size,
        setting.clip_norm,
        setting.cohort_size,
    )
    credited = setting.num_clients if which == "n" else setting.cohort_size
    params = concentrated.dpdsgd_params(params, credited_clients=credited)

    def claim(std: float) -> Claim:
        value = float(concentrated.epsilon_of_noise(params, noise_std=std, delta=setting.delta))
        aggregation = ("the other clients' noise is credited under aggregation alone (G7)", False)
        return Claim(value, "run", setting.delta, "Concentrated DP-FL Sec. VII-C", (aggregation,))

    return local.noisy_averaging(
        model,
        setting,
        source="Concentrated DP-FL Corollary 1; errata G7a",
        noise_std=lambda: concentrated.noise_std(params, epsilon=setting.epsilon, delta=setting.delta),
        claim=claim,
        cohorts=cohorts,
        ignores_counts=True,
    )


def prepare_dp_fedavg(model: Model, setting: PrivacyPlan) -> Prepared:
    """DP-FedAvg: each client's update clipped to S, Gaussian noise on the sum, added by the server."""
    reach = float(setting.options["update_clip"])
    if reach <= 0:
        raise SpecError(f"method_options.update_clip={reach:g} must be above 0")
    multiplier = central_noise_multiplier(setting)
    plain = _plain(model, setting, proximal=0.0, optimizer="sgd")

    def build(hyper: Hyper) -> Algorithm:
        inner = plain.build(hyper)

        def client(
            keys: Keys, message: Message, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            result = inner.client(keys, message, state, records, round)
            update = local.scale(1 / result.weight, result.upload)
            clipped = (clipping.norm(update) > hyper["update_clip"]).astype(jnp.float32)
            weight = 1 / round.cohort_size  # the same for all: a private size may not weigh an average
            upload = local.scale(weight, clipping.clip(update, hyper["update_clip"]))
            return ClientResult(upload, weight, result.state, {"clipped": clipped})

        def server(key: Key, state: ServerState, upload: Upload, cohort: Cohort) -> ServerState:
            std = hyper["central_multiplier"] * hyper["update_clip"] / jnp.maximum(cohort.size, 1)
            return local.axpy(hyper["server_lr"], noise.gaussian(key, upload, noise_std=std), state)

        def releases(info: RoundInfo) -> tuple[Release, ...]:
            # The unit is a client: one whose update is blanked (its place in the cohort stays) moves the mean by
            # S/K. Who takes part is public here, so a client's participations are counted and its chance of being
            # chosen amplifies nothing.
            cohort = sampling.Sampling(
                "full", 1.0, sampling.ZERO_OUT, 0.0, setting.cohort_size, setting.num_clients
            )
            bound = float(hyper["update_clip"])
            return (
                *_unprotected(info),  # the server sees the updates as they are
                Release(
                    "downlink",
                    float(hyper["central_multiplier"]) * bound / setting.cohort_size,
                    bound / setting.cohort_size,
                    1,
                    cohort,
                    "DP-FedAvg, whole clients, trusted server",
                ),
            )

        return inner._replace(client=client, server=server, releases=releases)

    return Prepared(
        plan=setting._replace(
            hyper={
                **plain.hyper,
                "server_lr": setting.server_lr,
                "update_clip": reach,
                "central_multiplier": multiplier,
            },
            noise_names=("central_multiplier",),
            per_client=True,
        ),
        build=build,
        claim=_central_claim(setting, multiplier),
        cohort_size_at=lambda index: setting.cohort_size,
        reclaim=lambda other: _central_claim(setting, float(other["central_multiplier"])),
        caveats=("ε is for whole clients against those who see the model; the server is trusted",),
    )


def _plain(model: Model, setting: PrivacyPlan, *, proximal: float, optimizer: str) -> Prepared:
    """Local steps without privacy; weights p_k N/|S| as in Secure FedAvg."""
    local_model = local.proximal_training(model, setting, optimizer_name=optimizer)
    num_records = int(setting.client_sizes.sum())

    def build(hyper: Hyper) -> Algorithm:
        def client(
            keys: Keys, message: Message, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            done = state["steps"]

            end = local_model(hyper, keys, message, records, round, done)
            weight = records.size / num_records * setting.num_clients / round.cohort_size
            upload = local.scale(weight, local.subtract(end, message))
            return ClientResult(upload, weight, {"steps": done + setting.local_steps}, {"clipped": jnp.zeros(())})

        return Algorithm(
            init=lambda params: params,
            client_init=lambda params: {"steps": jnp.int32(0)},
            message=lambda server: server,
            client=client,
            server=lambda key, server, upload, cohort: local.axpy(hyper["server_lr"], upload, server),
            params=lambda server: server,
            releases=lambda info: _unprotected(info),
        )

    return Prepared(
        plan=setting._replace(
            hyper={
                "client_lr": setting.client_lr,
                "lr_decay": setting.lr_decay,
                "server_lr": setting.server_lr,
                "proximal": proximal,
            },
        ),
        build=build,
        claim=local.no_noise(setting),
        cohort_size_at=lambda index: setting.cohort_size,
    )


def _one_step(setting: PrivacyPlan, method: str) -> None:
    if setting.local_steps != 1:
        raise SpecError(f"local_steps={setting.local_steps}: {method} takes one noisy step a round; set it to 1")


# Noise


def central_noise_multiplier(setting: PrivacyPlan) -> float:
    """Noise std over S on the sum of updates: as given, or for the claimed ε (moments accountant)."""
    if setting.noise == "none":
        return 0.0
    if setting.noise == "proven":
        return 1.0  # a unit: the accountant sets the factor
    given = float(setting.options["noise_multiplier"])
    if given:
        return given
    import dp_accounting
    from dp_accounting import rdp

    def event(multiplier: float) -> Any:
        return _central_event(setting, multiplier)

    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: rdp.RdpAccountant(), event, setting.epsilon, setting.delta, tol=1e-6
        )
    )


def _central_event(setting: PrivacyPlan, multiplier: float) -> Any:
    import dp_accounting

    rate = setting.cohort_size / setting.num_clients
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
    return dp_accounting.SelfComposedDpEvent(one, setting.num_rounds)


# Privacy


def _central_claim(setting: PrivacyPlan, multiplier: float) -> Claim:
    """ε for a whole client by the moments accountant, which takes cohorts as drawn by coins."""
    if multiplier == 0:
        return local.no_noise(setting)
    from dp_accounting import rdp

    value = rdp.RdpAccountant().compose(_central_event(setting, multiplier)).get_epsilon(setting.delta)
    coins = ("cohorts are drawn by independent coins (here: a uniform subset of fixed size)", False)
    source = "McMahan et al. 2018, moments accountant, per client"
    return Claim(float(value), "run", setting.delta, source, (coins,), "add/remove")


def _unprotected(info: RoundInfo) -> tuple[Release, ...]:
    everything = sampling.Sampling("full", 1.0, sampling.REPLACE_ONE, 0.0, info.size, info.size)
    return (Release("uplink", 0.0, float("inf"), 1, everything, "no noise"),)
