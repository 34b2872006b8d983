"""Methods by name: the papers' files, and any Python file of yours with OPTIONS and prepare.

Also what the papers' formulas share: the classical Gaussian constant, zCDP and RDP conversions, argument checks.
Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014 (Theorem A.1, the classical Gaussian
mechanism); Bun and Steinke, "Concentrated Differential Privacy", TCC 2016 (zCDP); Mironov, "Rényi Differential
Privacy", CSF 2017 (RDP).

| paper | code | | paper | code |
|---|---|---|---|---|
| ε, δ | `epsilon`, `delta` | | ρ | `rho` |
| c = √(2 ln(1.25/δ)) | `gaussian_constant` | | α (Rényi order) | `alpha` |

A method's sections `# Noise`, `# Privacy` and `# Convergence` are NumPy float64. They say what the *paper* says.
If it is wrong, `corrected=True` or a function whose name ends in `_corrected` gives the correction, with the
erratum's id. `dither.accounting` computes the proven ε. The quantities of a theorem are one immutable tuple, which
`_replace` varies. Its fields and the other arguments may be arrays that broadcast: a bound over a grid is one
call.

Deviations: none. G1: the classical constant is proved for ε < 1 only. G6: these conversions are loose; the tighter
ones are in `dither.accounting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from dither.errors import SpecError
from dither.spec import METHODS, Spec, method_module
from dither.types import Prepared, PrivacyPlan


class Method(NamedTuple):
    """A method as its file gives it."""

    prepare: Callable[[Any, PrivacyPlan], Prepared]
    pilot_metric: str = ""
    why: str = ""  # why its claimed and its proven ε differ, with errata ids


def method(name: str) -> Method:
    """The method of that name, or of a Python file."""
    if name not in METHODS:
        return _method(method_module(name))
    module, _, baseline = METHODS[name].module.partition(":")
    if baseline:
        return Method(getattr(import_module(module), f"prepare_{baseline}"))
    return _method(import_module(module))


# What a plan takes as the spec has it
_OF_SPEC = (
    *("cohort_size", "num_rounds", "local_steps", "batch_size", "batch_sampling", "sampling_rate", "client_lr"),
    *("lr_decay", "server_lr", "colluders", "adjacency", "seed", "aggregation"),
)
_OF_PRIVACY = (
    *("clip_norm", "clip", "clip_quantile", "epsilon", "epsilons", "delta", "unit", "view", "assume_credit"),
    *("noise_std", "noise_schedule", "noise_decay", "noise_decay_start", "noise_scale"),
)


def prepare(
    spec: Spec, model: Any, *, client_sizes: np.ndarray, num_params: int, chosen: Method | None = None
) -> Prepared:
    """The spec's method (or `chosen`, if it was read before), prepared for clients of these sizes."""
    num_clients = len(client_sizes)
    if spec.cohort_size > num_clients:
        raise SpecError(f"cohort_size={spec.cohort_size} exceeds num_clients={num_clients}; lower it")
    secagg = spec.secagg
    largest_sum = 2.0 ** (secagg.modulus_bits - 2 - secagg.scale_bits) if spec.aggregation != "off" else 0.0
    plan = PrivacyPlan(
        **{name: getattr(spec, name) for name in _OF_SPEC},
        **{name: getattr(spec.privacy, name) for name in _OF_PRIVACY},
        client_sizes=np.asarray(client_sizes),
        num_params=num_params,
        l2=spec.model.l2,
        l2_inside_clip=spec.model.l2_inside_clip,
        noise="none" if math.isinf(spec.privacy.epsilon) else spec.privacy.noise,
        options=spec.method_options,
        discrete_noise=secagg.noise == "discrete",
        scale_bits=secagg.scale_bits,
        largest_sum=largest_sum,
        largest_word=secagg.bound,
        exact_noise=spec.source_of_randomness == "os",
        max_norm=spec.federation.max_norm,
    )
    prepared = (chosen or method(spec.method)).prepare(model, plan)
    if spec.server_optimizer == "sgd" and spec.server_schedule == "constant" and not spec.server_average:
        return prepared  # the server adds a round's change as it is
    from dither.methods.server import with_optimizer  # which imports this package

    return with_optimizer(prepared, spec)


def _method(module: Any) -> Method:
    return Method(module.prepare, getattr(module, "PILOT_METRIC", ""), getattr(module, "WHY", ""))


# Formulas that papers share

Float = Any  # a float gives a float, an array gives a float64 array; arguments broadcast
Condition = tuple[str, bool]  # a validity condition with its numbers, and whether it holds
CLASSICAL_EPSILON_LIMIT = 1.0  # the classical Gaussian mechanism is proved below this (G1)


def f64(*values: Float) -> tuple[Any, ...]:
    """The values as float64, ready to be bound to the paper's letters."""
    return tuple(np.asarray(value, dtype=np.float64) for value in values)


def scalar(value: Float) -> Float:
    """A 0-d array as a plain NumPy float, anything larger unchanged."""
    return np.asarray(value, dtype=np.float64)[()]


def check_positive(**values: Float) -> None:
    """Raise `SpecError` naming the first argument that is not a finite number above zero."""
    for name, value in values.items():
        array = np.asarray(value, dtype=np.float64)
        bad = ~(np.isfinite(array) & (array > 0))
        if bad.any():
            raise SpecError(f"{name}={array[bad].flat[0]:g} must be a finite number above 0")


def check_delta(delta: Float) -> None:
    """Raise `SpecError` unless 0 < δ < 1."""
    array = np.asarray(delta, dtype=np.float64)
    bad = ~((array > 0) & (array < 1))
    if bad.any():
        raise SpecError(f"delta={array[bad].flat[0]:g} must lie strictly between 0 and 1")


def check_cohort(cohort_size: Float, num_clients: Float) -> None:
    """Raise `SpecError` unless 0 < cohort_size <= num_clients."""
    check_positive(cohort_size=cohort_size, num_clients=num_clients)
    cohort, clients = np.broadcast_arrays(*f64(cohort_size, num_clients))
    bad = cohort > clients
    if bad.any():
        raise SpecError(f"cohort_size={cohort[bad].flat[0]:g} exceeds num_clients={clients[bad].flat[0]:g}")


def failing(conditions: tuple[Condition, ...]) -> tuple[str, ...]:
    """The conditions that do not hold, as text."""
    return tuple(text for text, holds in conditions if not holds)


def geometric_sum(log_ratio: Float, count: Float) -> Float:
    """Σ_{j=0}^{count−1} e^{j·log_ratio}, which is `count` in the limit of ratio 1."""
    a, n = np.broadcast_arrays(*f64(log_ratio, count))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return scalar(np.where(a == 0.0, n, np.expm1(n * a) / np.where(a == 0.0, 1.0, np.expm1(a))))


def gaussian_constant(delta: Float) -> Float:
    """c(δ) = √(2 ln(1.25/δ)) of the classical Gaussian mechanism."""
    check_delta(delta)
    (d,) = f64(delta)
    return np.sqrt(2.0 * np.log(1.25 / d))


def classical_noise_multiplier(*, epsilon: Float, delta: Float) -> Float:
    """σ/Δ = c(δ)/ε of the classical Gaussian mechanism; proved for ε < 1 (G1)."""
    check_positive(epsilon=epsilon)
    (eps,) = f64(epsilon)
    return gaussian_constant(delta) / eps


def zcdp_of_gaussian(*, sensitivity: Float, noise_std: Float) -> Float:
    """ρ = Δ²/(2σ²): zCDP of one Gaussian release (CPFed Lemma 1, Concentrated Lemma 1)."""
    check_positive(noise_std=noise_std)
    Delta, sigma = f64(sensitivity, noise_std)
    return Delta**2 / (2.0 * sigma**2)


def composed_zcdp(rhos: Float, *, disjoint: bool = False) -> Float:
    """Σ ρ_j of mechanisms one after another (CPFed Lemma 2, Concentrated Lemma 2), or max_j ρ_j where each sees
    its own part of a random partition of the records (Concentrated Lemma 3). They lie on the last axis."""
    (values,) = f64(rhos)
    return scalar(values.max(axis=-1) if disjoint else values.sum(axis=-1))


def epsilon_from_zcdp(*, rho: Float, delta: Float) -> Float:
    """ε = ρ + 2√(ρ ln(1/δ)) (CPFed Lemma 3, Concentrated Lemma 4)."""
    check_delta(delta)
    r, d = f64(rho, delta)
    return r + 2.0 * np.sqrt(r * np.log(1.0 / d))


def zcdp_from_epsilon(*, epsilon: Float, delta: Float) -> Float:
    """ρ = (√(ln(1/δ)+ε) − √ln(1/δ))²: the inverse of `epsilon_from_zcdp`."""
    check_positive(epsilon=epsilon)
    check_delta(delta)
    eps, d = f64(epsilon, delta)
    log_term = np.log(1.0 / d)
    # ε/(√(a+ε)+√a) is √(a+ε)−√a without the cancellation at small ε
    return (eps / (np.sqrt(log_term + eps) + np.sqrt(log_term))) ** 2


def epsilon_from_rdp(*, rdp: Float, alpha: Float, delta: Float) -> Float:
    """ε = rdp(α) + ln(1/δ)/(α−1) (DP-SCAFFOLD Definition 5); ∞ if α <= 1."""
    check_delta(delta)
    leak, a, d = f64(rdp, alpha, delta)
    with np.errstate(divide="ignore", invalid="ignore"):
        return scalar(np.where(a > 1.0, leak + np.log(1.0 / d) / (a - 1.0), np.inf))


class BoundTerms(dict[str, Any]):
    """A bound as its named terms, also read as attributes; `total` is the bound."""

    def __getattr__(self, name: str) -> Float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no term {name!r}; there are {', '.join(self)}") from None

    @property
    def total(self) -> Float:
        """The sum of the terms."""
        return sum(self.values())

    def scaled(self, factor: Float) -> BoundTerms:
        """Every term times `factor`."""
        return BoundTerms({name: scalar(factor * term) for name, term in self.items()})
