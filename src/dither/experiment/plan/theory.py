"""The papers' bounds as functions of a plan's knobs, at the noise that the rigorous accountant asks for.

A theorem is a function of its noise. Where a paper writes it in its own ε, it is handed the ε that the paper's own
formula gives to the noise that is really added; the proven ε stays the budget. Everything is float64 and
vectorised: a whole grid is one call.

| method | bound | on |
|---|---|---|
| secure-fedavg | Theorem 1 | E F(w_T) - F* |
| nbafl | Theorem 2, corrected (N6) | E F(w_T) - F* |
| dp-scaffold | Corollary 1 at eq (9)'s rate, capped by Theorem 3's condition, corrected (S7) | E f(mean) - f* |
| cpfed | Theorem 2, corrected (C6), with the PL constant, all its proof uses | mean E f - f* |
| concentrated | Corollary 2, corrected (D5), likewise | mean E f - f* |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dither.errors import SpecError
from dither.experiment.plan.constants import Constants
from dither.experiment.plan.pricing import Price
from dither.methods import concentrated, cpfed, dp_scaffold, nbafl, secure_fedavg
from dither.methods.formulas import Condition
from dither.spec import Spec

_RATES = np.geomspace(1e-4, 1.0, 81)  # tried rates, as shares of the largest a theorem allows


@dataclass(frozen=True)
class Bounds:
    """A bound over priced points: `terms[name]` and `total` have one entry a point; `values` are spec keys that
    the theorem sets itself (a learning rate, NbAFL's μ), one entry a point each."""

    source: str
    terms: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    trivial: float  # what holds without any training: the initial gap

    @property
    def total(self) -> np.ndarray:
        """The bound: the sum of its terms."""
        return np.sum(list(self.terms.values()), axis=0)

    @property
    def best(self) -> int:
        """The point with the smallest bound."""
        total = self.total
        if not np.isfinite(total).any():
            raise SpecError(f"{self.source} has no finite value at any point of the grid")
        return int(np.nanargmin(total))

    @property
    def vacuous(self) -> bool:
        """True where even the best bound promises no more than the initial model keeps."""
        return not float(self.total[self.best]) < self.trivial


METHODS = ("secure-fedavg", "nbafl", "dp-scaffold", "cpfed", "concentrated")


def bounds(base: Spec, prices: Sequence[Price], constants: Constants, smallest: int) -> Bounds:
    """The method's bound at every priced point."""
    if base.method not in METHODS:
        raise SpecError(f"no convergence theorem for method={base.method!r}; use --mode empirical")
    return _BOUNDS[base.method](base, prices, constants, smallest)


def conditions(
    base: Spec, price: Price, constants: Constants, values: dict[str, float], smallest: int
) -> tuple[Condition, ...]:
    """The theorem's conditions at one point, with their numbers."""
    c, spec, method = constants, price.spec, base.method
    rate = values.get("client_lr", spec.client_lr)
    if method == "secure-fedavg":
        return secure_fedavg.convergence_conditions(
            smoothness=c.smoothness,
            strong_convexity=c.strong_convexity,
            local_steps=spec.local_steps,
            batch_size=spec.batch_size,
            num_records=spec.num_clients * smallest,
            delta=spec.privacy.delta,
        )
    if method == "nbafl":
        return nbafl.convergence_conditions(_loss(c, values["method_options.proximal"]))
    if method == "dp-scaffold":
        return dp_scaffold.convergence_conditions(
            effective_lr=rate * spec.local_steps * spec.server_lr,
            smoothness=c.smoothness,
            server_lr=spec.server_lr,
        )
    if method == "cpfed":
        return cpfed.convergence_conditions(
            client_lr=rate, smoothness=c.smoothness, local_steps=spec.local_steps, batch_size=spec.batch_size
        )
    return concentrated.convergence_conditions(
        client_lr=rate, smoothness=c.smoothness, local_steps=spec.local_steps, corrected=True
    )


def _column(prices: Sequence[Price], key: str) -> np.ndarray:
    return np.array([price.point[key] for price in prices], np.float64)


def _secure_fedavg(base: Spec, prices: Sequence[Price], c: Constants, smallest: int) -> Bounds:
    if c.strong_convexity == 0:
        raise SpecError("Theorem 1 of secure-fedavg needs a strongly convex loss; set model.l2 above 0")
    Q, T, b, K = (_column(prices, key) for key in ("local_steps", "num_rounds", "batch_size", "cohort_size"))
    clients = base.num_clients
    training = secure_fedavg.SecureFedavgTraining(
        smoothness=c.smoothness,
        local_steps=Q,
        batch_size=b,
        clip_norm=_column(prices, "privacy.clip_norm"),
        num_params=prices[0].num_params,
        num_records=clients * smallest,
        epsilon=np.array([price.claimed.value for price in prices]),
        delta=base.privacy.delta,
        cohort_size=K,
        weighted_variance=c.gradient_variance / clients,
        heterogeneity=c.heterogeneity,
        num_clients=clients,
    )
    found = secure_fedavg.convergence(
        training,
        strong_convexity=c.strong_convexity,
        num_steps=T * Q,
        initial_distance_sq=c.initial_distance**2,
    )
    kappa = c.smoothness / c.strong_convexity  # η_t = 2/(μ(8κ+t)) of Theorem 1
    ones = np.ones(len(prices))
    rates = {"client_lr": ones / (4 * c.strong_convexity * kappa), "lr_decay": ones / (8 * kappa)}
    return Bounds("Secure FedAvg Theorem 1", _terms(found, len(prices)), rates, c.initial_gap)


def _loss(c: Constants, proximal: Any) -> nbafl.LossConstants:
    return nbafl.LossConstants(c.smoothness, c.lipschitz, c.pl_constant, c.dissimilarity, proximal, c.initial_gap)


def _nbafl(base: Spec, prices: Sequence[Price], c: Constants, smallest: int) -> Bounds:
    T, K, C = (_column(prices, key) for key in ("num_rounds", "cohort_size", "method_options.param_clip"))
    std = np.array([price.noise_std for price in prices]) / np.sqrt(K)  # σ_A: no noise on the broadcast
    params = nbafl.NbaflParams(C, smallest, base.method_options["exposures"], T, num_clients=K)
    unit = nbafl.required_aggregate_noise_std(params, epsilon=1.0, delta=base.privacy.delta)
    epsilon = unit / std  # eq (13) solved for ε
    least = c.smoothness * c.dissimilarity * (1 + c.dissimilarity / 2)  # λ_2 < 0 above it
    proximal = least * np.geomspace(1.05, 1e3, 41)[:, None]
    found = nbafl.convergence_corrected(
        _loss(c, proximal),
        params,
        epsilon=epsilon,
        delta=base.privacy.delta,
        num_params=prices[0].num_params,
    )
    chosen = np.argmin(np.nan_to_num(found.total, nan=np.inf), axis=0)
    picked = {name: term[chosen, np.arange(len(prices))] for name, term in _grid_terms(found).items()}
    values = {"method_options.proximal": proximal[chosen, 0]}
    return Bounds("NbAFL Theorem 2, corrected (N6)", picked, values, c.initial_gap)


def _dp_scaffold(base: Spec, prices: Sequence[Price], c: Constants, smallest: int) -> Bounds:
    R, tau, S, B = (_column(prices, key) for key in ("num_rounds", "local_steps", "cohort_size", "batch_size"))
    training = dp_scaffold.ScaffoldTraining(
        num_clients=base.num_clients,
        cohort_size=S,
        batch_size=B,
        server_lr=base.server_lr,
        control_error=c.control_error,
        gradient_variance=c.gradient_variance,
        num_params=prices[0].num_params,
    )
    errors = dp_scaffold.error_terms_closed(
        training,
        dp_scaffold.NoiseScheme(0, R, tau),
        initial_variance=np.array([price.noise_std for price in prices]) ** 2,
        corrected=True,
    )
    run = {"num_rounds": R, "initial_distance": c.initial_distance}
    best = dp_scaffold.optimal_effective_lr(errors, **run)
    effective = np.minimum(best, 1 / (81 * c.smoothness))  # S7: eq (9) may leave Theorem 3's range
    found = dp_scaffold.convergence(errors, effective_lr=effective, **run)
    rates = {"client_lr": effective / (tau * base.server_lr)}
    return Bounds("DP-SCAFFOLD Corollary 1, corrected (S7)", _terms(found, len(prices)), rates, c.initial_gap)


def _periodic(
    largest: Callable[[np.ndarray], np.ndarray], found: Callable[..., Any], prices: Sequence[Price]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The best rate that the theorem allows, point by point."""
    tau = _column(prices, "local_steps")
    rates = _RATES[:, None] * largest(tau)
    bound = found(
        client_lr=rates,
        local_steps=tau,
        num_rounds=_column(prices, "num_rounds"),
        num_params=prices[0].num_params,
        noise_std=np.array([price.noise_std for price in prices]),
    )
    chosen = np.argmin(np.nan_to_num(bound.total, nan=np.inf), axis=0)
    everyone = np.arange(len(prices))
    return {key: term[chosen, everyone] for key, term in _grid_terms(bound).items()}, rates[chosen, everyone]


def _cpfed(base: Spec, prices: Sequence[Price], c: Constants, smallest: int) -> Bounds:
    def found(**run: Any) -> Any:
        training = cpfed.CpfedTraining(
            smoothness=c.smoothness,
            strong_convexity=c.pl_constant,
            # Stated for batches of one: β is the variance of the gradient that is used, a mean of B here.
            gradient_variance=c.gradient_variance / _column(prices, "batch_size"),
            client_size=smallest,
            initial_gap=c.initial_gap,
            **run,
        )
        return cpfed.convergence_convex(training, corrected=True)

    terms, rates = _periodic(
        lambda tau: cpfed.max_client_lr(smoothness=c.smoothness, local_steps=tau), found, prices
    )
    return Bounds("CPFed Theorem 2, corrected (C6)", terms, {"client_lr": rates}, c.initial_gap)


def _concentrated(base: Spec, prices: Sequence[Price], c: Constants, smallest: int) -> Bounds:
    def found(**run: Any) -> Any:
        training = concentrated.ConcentratedTraining(
            smoothness=c.smoothness,
            strong_convexity=c.pl_constant,
            gradient_variance=c.gradient_variance,
            batch_size=_column(prices, "batch_size"),
            cohort_size=_column(prices, "cohort_size"),
            initial_gap=c.initial_gap,
            **run,
        )
        return concentrated.convergence_convex(training, corrected=True)

    def largest(tau: np.ndarray) -> np.ndarray:
        return concentrated.max_client_lr(smoothness=c.smoothness, local_steps=tau, corrected=True)

    terms, rates = _periodic(largest, found, prices)
    return Bounds("Concentrated Corollary 2, corrected (D5)", terms, {"client_lr": rates}, c.initial_gap)


_BOUNDS = {
    "secure-fedavg": _secure_fedavg,
    "nbafl": _nbafl,
    "dp-scaffold": _dp_scaffold,
    "cpfed": _cpfed,
    "concentrated": _concentrated,
}


def _terms(bound: Any, count: int) -> dict[str, np.ndarray]:
    return {name: np.broadcast_to(np.asarray(term, np.float64), (count,)) for name, term in bound.items()}


def _grid_terms(bound: Any) -> dict[str, np.ndarray]:
    shape = np.shape(bound.total)
    return {name: np.broadcast_to(np.asarray(term, np.float64), shape) for name, term in bound.items()}


def theory_clip(base: Spec, constants: Constants) -> float:
    """The smallest clip that the theorems' assumptions allow: no gradient (NbAFL: not the minimum) is cut."""
    return constants.initial_distance if base.method == "nbafl" else constants.example_lipschitz
