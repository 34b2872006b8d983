"""The papers' convergence bounds on a grid of candidates, and the problem constants that they need.

A bound is a function of the noise. Where a paper states it in its own ε, it gets the ε that the paper's formula
assigns to the noise that is really added; the proven ε stays the budget. Bounds are float64 and vectorised.

| method | bound | on |
|---|---|---|
| secure-fedavg | Theorem 1 | E F(w_T) - F* |
| nbafl | Theorem 2, corrected (N6) | E F(w_T) - F* |
| dp-scaffold | Corollary 1 at eq (9)'s rate, capped by Theorem 3's condition, corrected (S7) | E f(mean) - f* |
| cpfed | Theorem 2, corrected (C6), with the PL constant, all its proof uses | mean E f - f* |
| concentrated | Corollary 2, corrected (D5), likewise | mean E f - f* |

Constants are estimated on public or synthetic records, or given by the user. Smoothness is the largest Hessian
eigenvalue found (for logistic and softmax regression it is largest at the initial model w = 0); the others are the
worst along a path of gradient descent to the minimum. So a bound is a prediction, not a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import models
from dither.data import Dataset
from dither.errors import SpecError, did_you_mean
from dither.experiment.build import partition_of
from dither.experiment.plan.candidates import Candidate, proxy_spec
from dither.experiment.plan.records import PlanningData
from dither.methods import Condition, concentrated, cpfed, dp_scaffold, nbafl, secure_fedavg
from dither.spec import Spec

_RATES = np.geomspace(1e-4, 1.0, 81)  # rates to try, as shares of the largest that a theorem allows


@dataclass(frozen=True)
class BoundGrid:
    """A bound on a grid of candidates. `terms[name]` and `total` have one entry per candidate, and so has each of
    `values`: spec keys that the theorem sets itself (a learning rate, NbAFL's μ)."""

    source: str
    terms: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    trivial: float  # what holds without training: the initial gap

    @property
    def total(self) -> np.ndarray:
        """The bound: the sum of its terms."""
        return np.asarray(np.sum(list(self.terms.values()), axis=0))

    @property
    def best(self) -> int:
        """The candidate with the smallest bound."""
        total = self.total
        if not np.isfinite(total).any():
            raise SpecError(f"{self.source} has no finite value at any point of the grid")
        return int(np.nanargmin(total))

    @property
    def vacuous(self) -> bool:
        """True if even the best bound promises no more than the initial model."""
        return not float(self.total[self.best]) < self.trivial


# Problem constants

_MOST_RECORDS = 4000  # more would only take longer
_MOST_CLIENTS = 20
_STEPS = 400
_PATH = (0, 1, 3, 10, 30, 100, 200)
_DENSE_HESSIAN = 1000  # parameters up to which the smallest eigenvalue is computed


@dataclass(frozen=True)
class ProblemConstants:
    """The constants of a loss that the bounds need; `sources` says where each comes from."""

    smoothness: float  # L, ρ
    strong_convexity: float  # μ, λ; 0 if there is none
    pl_constant: float  # l: |∇f|² >= 2 l (f - f*)
    lipschitz: float  # the longest gradient of the whole loss
    example_lipschitz: float  # the longest gradient of one record: with this clip nothing is clipped
    gradient_variance: float  # of one record's gradient
    dissimilarity: float  # B: E|∇F_i|² <= B² |∇F|²
    heterogeneity: float  # Γ = F* - Σ p_k F_k*
    control_error: float  # mean |∇F_k(w*)|²
    initial_gap: float  # F(w_0) - F*
    initial_distance: float  # |w_0 - w*|
    initial_gradient_sq: float  # |∇F(w_0)|²
    sources: Mapping[str, str]

    def with_given(self, given: Mapping[str, float]) -> ProblemConstants:
        """The constants, with some of them given by the user."""
        check_given(given)
        return replace(self, **given, sources={**self.sources, **dict.fromkeys(given, "given")})


def check_given(given: Mapping[str, float]) -> None:
    """Raise `SpecError` for an unknown constant or an impossible value."""
    names = [field.name for field in fields(ProblemConstants) if field.name != "sources"]
    for name, value in given.items():
        if name not in names:
            raise SpecError(f"unknown constant {name!r}{did_you_mean(name, names)}")
        if not 0 <= value < math.inf:
            raise SpecError(f"constant {name}={value} must be a finite number, 0 or above")


def estimate(spec: Spec, planning: PlanningData, *, seed: int = 0) -> ProblemConstants:
    """The constants of the spec's model and regulariser on these records, dealt to clients as the spec says."""
    dataset = planning.dataset
    model = models.from_spec(spec.model, dataset.x_train.shape[1], len(dataset.classes), dataset.image_shape)
    x, y = _client_records(spec, dataset, seed)
    start, unravel = ravel_pytree(model.init(jax.random.key(seed)))
    pooled = x.reshape(-1, *x.shape[2:]), y.reshape(-1)

    def loss(w: Any, rows: Any, labels: Any) -> Any:
        fit = jnp.mean(models.losses(model, unravel(w), rows, labels))
        return fit + spec.model.l2 * jnp.sum(jnp.square(w))

    def whole(w: Any) -> Any:
        return loss(w, *pooled)

    eigenvalue = jax.jit(lambda w: _largest_eigenvalue(whole, w))
    smoothness = float(eigenvalue(start))
    path, end = jax.jit(lambda w: _descend(whole, w, 1.0 / smoothness))(start)
    if not model.convex:
        smoothness = max(smoothness, *(float(eigenvalue(w)) for w in path[1:]))
    client_ends = jax.jit(jax.vmap(lambda a, b: _descend(lambda w: loss(w, a, b), end, 1.0 / smoothness)[1]))(x, y)
    client_losses = np.asarray(jax.vmap(loss)(client_ends, x, y), np.float64)
    least = float(whole(end))
    statistics = jax.jit(lambda w: _statistics(w, loss, pooled, (x, y)))
    along = [{name: float(value) for name, value in statistics(w).items()} for w in path]
    away = [at for at in along if at["loss"] - least > 1e-3 * (along[0]["loss"] - least)]
    control_errors = jax.vmap(lambda a, b: jnp.sum(jnp.square(jax.grad(loss)(end, a, b))))(x, y)
    source = planning.source
    worst = f"worst along {_STEPS} steps of descent on {source}"
    at_end = f"at the end of {_STEPS} steps of descent on {source}"
    estimates = {
        "smoothness": (smoothness, f"largest Hessian eigenvalue on {source}"),
        "strong_convexity": _strong_convexity(whole, end, model.convex, spec.model.l2, source),
        "pl_constant": (min(at["gradient_sq"] / (2 * (at["loss"] - least)) for at in away), worst),
        "lipschitz": (max(math.sqrt(at["gradient_sq"]) for at in along), worst),
        "example_lipschitz": (max(at["longest"] for at in along), worst),
        "gradient_variance": (max(at["variance"] for at in along), worst),
        "dissimilarity": (max(at["dissimilarity"] for at in away), worst),
        "heterogeneity": (max(least - float(client_losses.mean()), 0.0), at_end),
        "control_error": (float(jnp.mean(control_errors)), at_end),
        "initial_gap": (along[0]["loss"] - least, at_end),
        "initial_distance": (float(jnp.linalg.norm(end - start)), at_end),
        "initial_gradient_sq": (along[0]["gradient_sq"], f"at the initial model on {source}"),
    }
    values = {name: float(value) for name, (value, _) in estimates.items()}
    return ProblemConstants(**values, sources={name: text for name, (_, text) in estimates.items()})


def _client_records(spec: Spec, dataset: Dataset, seed: int) -> tuple[Any, Any]:
    """Records of up to `_MOST_CLIENTS` clients, cut to one size: `[clients, records, features]`."""
    partition = partition_of(proxy_spec(spec), dataset, seed)
    count = min(_MOST_CLIENTS, len(partition.size))
    size = max(1, min(int(partition.size[:count].min()), _MOST_RECORDS // count))
    rows = np.stack([partition.order[start : start + size] for start in partition.start[:count]])
    return jnp.asarray(dataset.x_train[rows]), jnp.asarray(dataset.y_train[rows])


def _descend(function: Any, start: Any, rate: float) -> tuple[list[Any], Any]:
    """Nesterov's accelerated descent: the points of `_PATH`, and the end."""
    gradient = jax.grad(function)

    def step(carry: tuple[Any, Any], number: Any) -> tuple[tuple[Any, Any], Any]:
        w, ahead = carry
        new = ahead - rate * gradient(ahead)
        return (new, new + (number / (number + 3.0)) * (new - w)), new

    (end, _), points = jax.lax.scan(step, (start, start), jnp.arange(_STEPS, dtype=jnp.float32))
    return [start, *(points[index - 1] for index in _PATH[1:])], end


def _largest_eigenvalue(function: Any, w: Any) -> Any:
    """Power iteration with Hessian-vector products."""

    def product(vector: Any) -> Any:
        return jax.jvp(jax.grad(function), (w,), (vector,))[1]

    def body(_: Any, vector: Any) -> Any:
        image = product(vector)
        return image / jnp.maximum(jnp.linalg.norm(image), 1e-30)

    first = jax.random.normal(jax.random.key(0), w.shape)
    vector = jax.lax.fori_loop(0, 60, body, first / jnp.linalg.norm(first))
    return jnp.abs(vector @ product(vector))


def _strong_convexity(whole: Any, end: Any, convex: bool, l2: float, source: str) -> tuple[float, str]:
    if not convex:
        return 0.0, "a network has none"
    if end.size > _DENSE_HESSIAN:
        return 2 * l2, "the regulariser's"
    least = float(np.linalg.eigvalsh(np.asarray(jax.hessian(whole)(end), np.float64))[0])
    if least <= max(2 * l2, 1e-6):
        return 2 * l2, "the regulariser's: the records alone give none"
    return least, f"smallest Hessian eigenvalue at the minimum on {source}"


def _statistics(w: Any, loss: Any, pooled: tuple[Any, Any], clients: tuple[Any, Any]) -> dict[str, Any]:
    """Loss and gradients at one model."""
    value, gradient = jax.value_and_grad(loss)(w, *pooled)

    def one(record: tuple[Any, Any]) -> tuple[Any, Any]:
        record_gradient = jax.grad(loss)(w, record[0][None], record[1][None])
        return jnp.sum(jnp.square(record_gradient)), jnp.sum(jnp.square(record_gradient - gradient))

    squares, deviations = jax.lax.map(one, pooled, batch_size=100)  # a network's gradients are large
    client_squares = jax.vmap(lambda a, b: jnp.sum(jnp.square(jax.grad(loss)(w, a, b))))(*clients)
    gradient_sq = jnp.sum(jnp.square(gradient))
    return {
        "loss": value,
        "gradient_sq": gradient_sq,
        "longest": jnp.sqrt(jnp.max(squares)),
        "variance": jnp.mean(deviations),
        "dissimilarity": jnp.sqrt(jnp.maximum(jnp.mean(client_squares) / jnp.maximum(gradient_sq, 1e-30), 1.0)),
    }


# Bounds


def bounds(base: Spec, candidates: Sequence[Candidate], constants: ProblemConstants, smallest: int) -> BoundGrid:
    """The method's bound at every candidate."""
    if base.method not in _BOUNDS:
        raise SpecError(f"no convergence theorem for method={base.method!r}; use --mode empirical")
    return _BOUNDS[base.method](base, candidates, constants, smallest)


def conditions(
    base: Spec, candidate: Candidate, constants: ProblemConstants, values: dict[str, float], smallest: int
) -> tuple[Condition, ...]:
    """The theorem's conditions at one candidate, with their numbers."""
    spec, smoothness, local_steps = candidate.spec, constants.smoothness, candidate.spec.local_steps
    rate = values.get("client_lr", spec.client_lr)
    if base.method == "secure-fedavg":
        return secure_fedavg.convergence_conditions(
            smoothness=smoothness,
            strong_convexity=constants.strong_convexity,
            local_steps=local_steps,
            batch_size=spec.batch_size,
            num_records=spec.num_clients * smallest,
            delta=spec.privacy.delta,
        )
    if base.method == "nbafl":
        return nbafl.convergence_conditions(_nbafl_constants(constants, values["method_options.proximal"]))
    if base.method == "dp-scaffold":
        return dp_scaffold.convergence_conditions(
            effective_lr=rate * local_steps * spec.server_lr, smoothness=smoothness, server_lr=spec.server_lr
        )
    if base.method == "cpfed":
        return cpfed.convergence_conditions(
            client_lr=rate, smoothness=smoothness, local_steps=local_steps, batch_size=spec.batch_size
        )
    return concentrated.convergence_conditions(
        client_lr=rate, smoothness=smoothness, local_steps=local_steps, corrected=True
    )


def theory_clip(base: Spec, constants: ProblemConstants) -> float:
    """The smallest clip that the theorems allow: no gradient (NbAFL: not the minimum) is clipped."""
    return constants.initial_distance if base.method == "nbafl" else constants.example_lipschitz


def _column(candidates: Sequence[Candidate], key: str) -> np.ndarray:
    return np.array([candidate.point[key] for candidate in candidates], np.float64)


def _noise(candidates: Sequence[Candidate]) -> np.ndarray:
    return np.array([candidate.noise_std for candidate in candidates])


def _terms(bound: Any) -> dict[str, np.ndarray]:
    shape = np.shape(bound.total)
    return {name: np.broadcast_to(np.asarray(term, np.float64), shape) for name, term in bound.items()}


def _smallest(bound: Any, tried: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The terms where the bound is smallest along its first axis, and the value of `tried` there."""
    chosen = np.argmin(np.nan_to_num(bound.total, nan=np.inf), axis=0)
    everywhere = np.arange(len(chosen))
    tried = np.broadcast_to(tried, np.shape(bound.total))
    return {name: term[chosen, everywhere] for name, term in _terms(bound).items()}, tried[chosen, everywhere]


def _secure_fedavg(base: Spec, candidates: Sequence[Candidate], c: ProblemConstants, smallest: int) -> BoundGrid:
    if c.strong_convexity == 0:
        raise SpecError("Theorem 1 of secure-fedavg needs a strongly convex loss; set model.l2 above 0")
    Q, T = _column(candidates, "local_steps"), _column(candidates, "num_rounds")
    clients = base.num_clients
    training = secure_fedavg.SecureFedavgTraining(
        smoothness=c.smoothness,
        local_steps=Q,
        batch_size=_column(candidates, "batch_size"),
        clip_norm=_column(candidates, "privacy.clip_norm"),
        num_params=candidates[0].num_params,
        num_records=clients * smallest,
        epsilon=np.array([candidate.claimed.value for candidate in candidates]),
        delta=base.privacy.delta,
        cohort_size=_column(candidates, "cohort_size"),
        weighted_variance=c.gradient_variance / clients,
        heterogeneity=c.heterogeneity,
        num_clients=clients,
    )
    bound = secure_fedavg.convergence(
        training, strong_convexity=c.strong_convexity, num_steps=T * Q, initial_distance_sq=c.initial_distance**2
    )
    kappa = c.smoothness / c.strong_convexity  # η_t = 2/(μ(8κ+t)) of Theorem 1
    ones = np.ones(len(candidates))
    rates = {"client_lr": ones / (4 * c.strong_convexity * kappa), "lr_decay": ones / (8 * kappa)}
    return BoundGrid("Secure FedAvg Theorem 1", _terms(bound), rates, c.initial_gap)


def _nbafl_constants(c: ProblemConstants, proximal: Any) -> nbafl.LossConstants:
    return nbafl.LossConstants(c.smoothness, c.lipschitz, c.pl_constant, c.dissimilarity, proximal, c.initial_gap)


def _nbafl(base: Spec, candidates: Sequence[Candidate], c: ProblemConstants, smallest: int) -> BoundGrid:
    T, K = _column(candidates, "num_rounds"), _column(candidates, "cohort_size")
    clip = _column(candidates, "method_options.param_clip")
    std = _noise(candidates) / np.sqrt(K)  # σ_A: no noise on the broadcast
    params = nbafl.NbaflParams(clip, smallest, base.method_options["exposures"], T, num_clients=K)
    unit = nbafl.required_aggregate_noise_std(params, epsilon=1.0, delta=base.privacy.delta)
    least = c.smoothness * c.dissimilarity * (1 + c.dissimilarity / 2)  # λ_2 < 0 above it
    proximal = least * np.geomspace(1.05, 1e3, 41)[:, None]
    bound = nbafl.convergence_corrected(
        _nbafl_constants(c, proximal),
        params,
        epsilon=unit / std,  # eq (13) solved for ε
        delta=base.privacy.delta,
        num_params=candidates[0].num_params,
    )
    terms, chosen = _smallest(bound, proximal)
    return BoundGrid("NbAFL Theorem 2, corrected (N6)", terms, {"method_options.proximal": chosen}, c.initial_gap)


def _dp_scaffold(base: Spec, candidates: Sequence[Candidate], c: ProblemConstants, smallest: int) -> BoundGrid:
    R, tau = _column(candidates, "num_rounds"), _column(candidates, "local_steps")
    training = dp_scaffold.ScaffoldTraining(
        num_clients=base.num_clients,
        cohort_size=_column(candidates, "cohort_size"),
        batch_size=_column(candidates, "batch_size"),
        server_lr=base.server_lr,
        control_error=c.control_error,
        gradient_variance=c.gradient_variance,
        num_params=candidates[0].num_params,
    )
    errors = dp_scaffold.error_terms_closed(
        training, dp_scaffold.NoiseScheme(0, R, tau), initial_variance=_noise(candidates) ** 2, corrected=True
    )
    run = {"num_rounds": R, "initial_distance": c.initial_distance}
    best = dp_scaffold.optimal_effective_lr(errors, **run)
    effective = np.minimum(best, 1 / (81 * c.smoothness))  # eq (9) may leave Theorem 3's range (S7)
    bound = dp_scaffold.convergence(errors, effective_lr=effective, **run)
    rates = {"client_lr": effective / (tau * base.server_lr)}
    return BoundGrid("DP-SCAFFOLD Corollary 1, corrected (S7)", _terms(bound), rates, c.initial_gap)


def _averaged(candidates: Sequence[Candidate], c: ProblemConstants, rates: np.ndarray) -> dict[str, Any]:
    """The quantities in the bounds of both CPFed and Concentrated DP-FL."""
    return {
        "smoothness": c.smoothness,
        "strong_convexity": c.pl_constant,
        "initial_gap": c.initial_gap,
        "client_lr": rates,
        "local_steps": _column(candidates, "local_steps"),
        "num_rounds": _column(candidates, "num_rounds"),
        "num_params": candidates[0].num_params,
        "noise_std": _noise(candidates),
    }


def _cpfed(base: Spec, candidates: Sequence[Candidate], c: ProblemConstants, smallest: int) -> BoundGrid:
    tau = _column(candidates, "local_steps")
    rates = _RATES[:, None] * cpfed.max_client_lr(smoothness=c.smoothness, local_steps=tau)
    training = cpfed.AveragingTraining(
        **_averaged(candidates, c, rates),
        # Stated for batches of one: β is the variance of the gradient that is used, here a mean of B.
        gradient_variance=c.gradient_variance / _column(candidates, "batch_size"),
        client_size=smallest,
    )
    terms, chosen = _smallest(cpfed.convergence_convex(training, corrected=True), rates)
    return BoundGrid("CPFed Theorem 2, corrected (C6)", terms, {"client_lr": chosen}, c.initial_gap)


def _concentrated(base: Spec, candidates: Sequence[Candidate], c: ProblemConstants, smallest: int) -> BoundGrid:
    tau = _column(candidates, "local_steps")
    largest = concentrated.max_client_lr(smoothness=c.smoothness, local_steps=tau, corrected=True)
    rates = _RATES[:, None] * largest
    training = cpfed.AveragingTraining(
        **_averaged(candidates, c, rates),
        gradient_variance=c.gradient_variance,
        batch_size=_column(candidates, "batch_size"),
        cohort_size=_column(candidates, "cohort_size"),
    )
    terms, chosen = _smallest(concentrated.convergence_convex(training, corrected=True), rates)
    return BoundGrid("Concentrated Corollary 2, corrected (D5)", terms, {"client_lr": chosen}, c.initial_gap)


_BOUNDS: dict[str, Callable[[Spec, Sequence[Candidate], ProblemConstants, int], BoundGrid]] = {
    "secure-fedavg": _secure_fedavg,
    "nbafl": _nbafl,
    "dp-scaffold": _dp_scaffold,
    "cpfed": _cpfed,
    "concentrated": _concentrated,
}
METHODS = tuple(_BOUNDS)
