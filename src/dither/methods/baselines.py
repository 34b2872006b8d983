"""What the papers compare with: FedAvg, FedProx, SCAFFOLD, DP-SGD, DP-DSGD and DP-FedAvg.

FedAvg: B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017. FedProx: T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. SCAFFOLD: S. P.
Karimireddy et al., ICML 2020. DP-SGD and DP-DSGD: the baselines of CPFed (Sec. VII-C) and of Concentrated DP-FL
(Sec. VII-C). DP-FedAvg: B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018: the privacy of whole clients, noise added by a trusted server.

Each `prepare_*` is a method of its own; `spec.METHODS` names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from dither import types
from dither.accounting import exact
from dither.errors import SpecError
from dither.methods import concentrated, cpfed, dp_scaffold, local
from dither.models import Model
from dither.privacy import clipping, sampling
from dither.types import ClientResult, ClientState, Hyper, Keys, Params, Prepared, PrivacyPlan, Records, Round

# Algorithm


def prepare_fedavg(model: Model, plan: PrivacyPlan) -> Prepared:
    """FedAvg: local steps without clip or noise, average weighted by the clients' sizes."""
    return _plain(model, plan, proximal=0.0, optimizer=plan.options["optimizer"])


def prepare_fedprox(model: Model, plan: PrivacyPlan) -> Prepared:
    """FedProx: FedAvg with a pull towards the broadcast model."""
    options = plan.options
    return _plain(model, plan, proximal=float(options["proximal"]), optimizer=options["optimizer"])


def prepare_scaffold(model: Model, plan: PrivacyPlan) -> Prepared:
    """SCAFFOLD: DP-SCAFFOLD without clip and noise."""
    plan = plan._replace(noise="none", clip="none", noise_schedule="constant")
    gradients = local.noisy_gradients(model, plan, source="no noise")
    return Prepared(
        plan=plan._replace(hyper={**local.gradient_hyper(plan, 0.0), "server_lr": plan.server_lr}),
        build=lambda hyper: dp_scaffold.scaffold(plan, gradients, hyper),
        claim=local.no_noise(plan),
        cohort_size_at=lambda index: plan.cohort_size,
    )


def prepare_dp_sgd(model: Model, plan: PrivacyPlan) -> Prepared:
    """DP-SGD as in CPFed's comparison: one noisy step a round, the budget split evenly over the rounds."""
    _one_step(plan, "dp-sgd")
    params = cpfed.dpsgd_params(cpfed.params_of(plan), credit_sa=bool(plan.options["equal_credit"]))
    return local.noisy_averaging(
        model,
        plan._replace(ignores_counts=True),
        params,
        source=cpfed.SOURCE,
        noise_std=cpfed.noise_std,
        claim=cpfed.claim,
    )


def prepare_dp_dsgd(model: Model, plan: PrivacyPlan) -> Prepared:
    """DP-DSGD as in the comparison of Concentrated DP-FL: one noisy step a round on a fresh batch."""
    _one_step(plan, "dp-dsgd")
    cohorts = concentrated.participation_design(plan)
    credited = plan.num_clients if plan.options["credited_clients"] == "n" else plan.cohort_size
    params = concentrated.dpdsgd_params(concentrated.params_of(plan, cohorts), credited_clients=credited)

    def claim(params: concentrated.ConcentratedParams, *, noise_std: float, delta: float) -> types.Claim:
        value = float(concentrated.epsilon_of_noise(params, noise_std=noise_std, delta=delta))
        aggregation = ("the other clients' noise is credited, which needs secure aggregation (G7)", False)
        return types.Claim(value, "run", delta, "Concentrated DP-FL Sec. VII-C", (aggregation,))

    return local.noisy_averaging(
        model,
        plan._replace(design=cohorts, ignores_counts=True),
        params,
        source="Concentrated DP-FL Corollary 1; errata G7a",
        noise_std=concentrated.noise_std,
        claim=claim,
    )


def prepare_dp_fedavg(model: Model, plan: PrivacyPlan) -> Prepared:
    """DP-FedAvg: each client's update clipped to S, Gaussian noise on the sum, added by the server."""
    reach = float(plan.options["update_clip"])
    multiplier = central_noise_multiplier(plan)
    plain = _plain(model, plan, proximal=0.0, optimizer="sgd")
    # The sum of a secure aggregation is one of floats that were encoded: no exact noise.
    exactly, error = local.is_exact(plan) and plan.aggregation == "off", 0.0
    if exactly:
        error = (1 + local.whole_error(model)) * (
            1 + 2 * plan.cohort_size * exact.accumulated(plan.cohort_size + 8)
        ) - 1

    def build(hyper: Hyper) -> types.Algorithm:
        inner = plain.build(hyper)

        def client(
            keys: Keys, message: Params, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            result = inner.client(keys, message, state, records, round)
            update = local.scale(1 / result.weight, result.upload)
            clipped = (clipping.norm(update) > hyper["update_clip"]).astype(jnp.float32)
            weight = 1 / round.cohort_size  # the same for all: a private size may not weigh an average
            upload = local.scale(weight, local.clip_whole(plan, update, hyper["update_clip"]))
            return ClientResult(upload, weight, result.state, {"clipped": clipped})

        def server(key: types.Key, state: Params, upload: Params, cohort: types.Cohort) -> Params:
            std = hyper["central_multiplier"] * hyper["update_clip"] / jnp.maximum(cohort.size, 1)
            noisy = local.noisy_vector(plan, key, upload, noise_std=std, reach=hyper["update_clip"])
            return local.axpy(hyper["server_lr"], noisy, state)

        def releases(info: types.RoundInfo) -> tuple[types.Release, ...]:
            # The unit is a client: one whose update is blanked (its place in the cohort stays) moves the mean by
            # S/K. Who takes part is public here, so a client's participations are counted and its chance of being
            # chosen amplifies nothing.
            cohort = types.Sampling("full", 1.0, sampling.ZERO_OUT, 0.0, plan.cohort_size, plan.num_clients)
            bound = float(hyper["update_clip"])
            return (
                *_unprotected(info),  # the server sees the updates as they are
                types.Release(
                    "downlink",
                    float(hyper["central_multiplier"]) * bound / plan.cohort_size,
                    bound / plan.cohort_size * (1 + error) + local.rounding(plan) / 2,  # a blank is not rounded
                    1,
                    cohort,
                    "DP-FedAvg, whole clients, trusted server",
                    exact=exact.noise(plan.num_params) if exactly else None,
                ),
            )

        return inner._replace(client=client, server=server, releases=releases)

    return Prepared(
        plan=plan._replace(
            hyper={
                **plain.hyper,
                "server_lr": plan.server_lr,
                "update_clip": reach,
                "central_multiplier": multiplier,
            },
            noise_names=("central_multiplier",),
            per_client=True,
        ),
        build=build,
        claim=_central_claim(plan, multiplier),
        cohort_size_at=lambda index: plan.cohort_size,
        reclaim=lambda other: _central_claim(plan, float(other["central_multiplier"])),
        caveats=("ε protects whole clients against anyone who sees the model; the server is trusted",),
    )


def _plain(model: Model, plan: PrivacyPlan, *, proximal: float, optimizer: str) -> Prepared:
    """Local steps without privacy; weights p_k N/|S| as in Secure FedAvg."""
    local_model = local.proximal_training(model, plan, optimizer_name=optimizer)
    num_records = int(plan.client_sizes.sum())

    def build(hyper: Hyper) -> types.Algorithm:
        def client(
            keys: Keys, message: Params, state: ClientState, records: Records, round: Round
        ) -> ClientResult:
            done = state["steps"]

            end = local_model(hyper, keys, message, records, round, done)
            weight = records.size / num_records * plan.num_clients / round.cohort_size
            upload = local.scale(weight, local.subtract(end, message))
            return ClientResult(upload, weight, {"steps": done + plan.local_steps}, {"clipped": jnp.zeros(())})

        return local.model_as_state(
            client_init=local.counted_steps,
            client=client,
            server=lambda key, state, upload, cohort: local.axpy(hyper["server_lr"], upload, state),
            releases=_unprotected,
        )

    return Prepared(
        plan=plan._replace(
            hyper={**local.rate_hyper(plan), "server_lr": plan.server_lr, **local.proximal_hyper(proximal)}
        ),
        build=build,
        claim=local.no_noise(plan),
        cohort_size_at=lambda index: plan.cohort_size,
    )


def _one_step(plan: PrivacyPlan, method: str) -> None:
    if plan.local_steps != 1:
        raise SpecError(f"local_steps={plan.local_steps}: {method} takes one noisy step a round; set it to 1")


# Noise


def central_noise_multiplier(plan: PrivacyPlan) -> float:
    """Noise std over S on the sum of updates: as given, or for the claimed ε (moments accountant)."""
    if plan.noise == "none":
        return 0.0
    if plan.noise == "proven":
        return 1.0  # a unit: the accountant sets the factor
    given = float(plan.options["noise_multiplier"])
    if given:
        return given
    return _calibrated_multiplier(plan.cohort_size / plan.num_clients, plan.num_rounds, plan.epsilon, plan.delta)


@lru_cache(maxsize=256)
def _calibrated_multiplier(rate: float, num_rounds: int, epsilon: float, delta: float) -> float:
    import dp_accounting

    def event(multiplier: float) -> Any:
        return _central_event(rate, num_rounds, multiplier)

    return float(dp_accounting.calibrate_dp_mechanism(MomentsAccountant, event, epsilon, delta, tol=1e-6))


class MomentsAccountant:
    """dp-accounting's Rényi accountant, asked for few of its orders, each of which takes time. Along the orders ε
    falls and then rises: the whole ones, which are the quickest, are tried from 2 on for as long as it falls, and
    then those beside the best of them. Orders whose series does not converge are skipped, which is sound; the
    warnings about them are silenced."""

    def __init__(self) -> None:
        from dp_accounting import NoOpDpEvent

        self.ledger: Any = NoOpDpEvent()

    def compose(self, event: Any) -> MomentsAccountant:
        """The same accountant, for this event alone."""
        self.ledger = event
        return self

    def get_epsilon(self, delta: float) -> float:
        """ε at δ, the least over the orders."""
        from absl import logging
        from dp_accounting import rdp

        logging.set_verbosity(logging.ERROR)
        orders = rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS

        def least(along: Sequence[float]) -> tuple[float, float]:
            """The least ε, and its order, where ε first rises along these orders."""
            best = (math.inf, along[0])
            for order in along:
                epsilon = float(rdp.RdpAccountant([order]).compose(self.ledger).get_epsilon(delta))
                if epsilon >= best[0]:
                    break
                best = (epsilon, order)
            return best

        start = orders.index(least([order for order in orders if order == int(order)])[1])
        return min(least(orders[start:]), least(orders[start::-1]))[0]


def _central_event(rate: float, num_rounds: int, multiplier: float) -> Any:
    import dp_accounting

    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
    return dp_accounting.SelfComposedDpEvent(one, num_rounds)


# Privacy


def _central_claim(plan: PrivacyPlan, multiplier: float) -> types.Claim:
    """ε for a whole client by the moments accountant, which assumes Poisson-sampled cohorts."""
    if multiplier == 0:
        return local.no_noise(plan)
    event = _central_event(plan.cohort_size / plan.num_clients, plan.num_rounds, multiplier)
    value = MomentsAccountant().compose(event).get_epsilon(plan.delta)
    coins = ("cohorts are drawn by independent coins (here: a uniform subset of fixed size)", False)
    source = "McMahan et al. 2018, moments accountant, per client"
    return types.Claim(float(value), "run", plan.delta, source, (coins,), "add/remove")


def _unprotected(info: types.RoundInfo) -> tuple[types.Release, ...]:
    everything = types.Sampling("full", 1.0, sampling.REPLACE_ONE, 0.0, info.size, info.size)
    return (types.Release("uplink", 0.0, float("inf"), 1, everything, "no noise"),)
