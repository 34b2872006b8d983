"""What the bounds ask of a loss, estimated on public or synthetic records, or given; with the source of each.

Smoothness is the largest Hessian eigenvalue found (for logistic and softmax regression that of the initial model
w = 0 is the largest anywhere); the other constants are the worst along a path of gradient descent from the initial
model to the minimum. They are estimates: a theorem evaluated at them is a prediction, not a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dither import data, models
from dither.errors import SpecError, did_you_mean
from dither.experiment.plan.shapes import Material, rehearsal
from dither.spec import Spec

_MOST_RECORDS = 4000  # enough for constants; more only costs time
_MOST_CLIENTS = 20
_STEPS = 400
_PATH = (0, 1, 3, 10, 30, 100, 200)
_DENSE_HESSIAN = 1000  # parameters up to which the smallest eigenvalue is computed


@dataclass(frozen=True)
class Constants:
    """One loss's constants; `sources` says of each where it comes from."""

    smoothness: float  # L, ρ
    strong_convexity: float  # μ, λ; 0 where there is none
    pl_constant: float  # l: |∇f|² >= 2 l (f - f*)
    lipschitz: float  # the longest gradient of the whole loss
    example_lipschitz: float  # the longest gradient of one record: a clip there clips nothing
    gradient_variance: float  # of one record's gradient
    dissimilarity: float  # B: E|∇F_i|² <= B² |∇F|²
    heterogeneity: float  # Γ = F* - Σ p_k F_k*
    control_error: float  # mean |∇F_k(w*)|²
    initial_gap: float  # F(w_0) - F*
    initial_distance: float  # |w_0 - w*|
    initial_gradient_sq: float  # |∇F(w_0)|²
    sources: Mapping[str, str]

    def with_given(self, given: Mapping[str, float]) -> Constants:
        """The constants with some of them given by the user."""
        check_given(given)
        sources = {**self.sources, **dict.fromkeys(given, "given")}
        return replace(self, **given, sources=sources)


def check_given(given: Mapping[str, float]) -> None:
    """Raise `SpecError` for a name that is no constant, or a value that none can have."""
    names = [field.name for field in fields(Constants) if field.name != "sources"]
    for name, value in given.items():
        if name not in names:
            raise SpecError(f"unknown constant {name!r}{did_you_mean(name, names)}")
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"constant {name}={value} must be a finite number, 0 or above")


def estimate(spec: Spec, material: Material, *, seed: int = 0) -> Constants:
    """Constants of the spec's model and regulariser on the material, dealt out as the spec says."""
    dataset = material.dataset
    model = models.make(
        spec.model.name,
        num_features=dataset.x_train.shape[1],
        num_classes=len(dataset.classes),
        hidden=spec.model.hidden,
        image_shape=dataset.image_shape,
    )
    x, y = _clients(spec, dataset, seed)
    start, unravel = ravel_pytree(model.init(jax.random.key(seed)))

    def loss(w: Any, rows: Any, labels: Any) -> Any:
        fit = jnp.mean(models.losses(model, unravel(w), rows, labels))
        return fit + spec.model.l2 * jnp.sum(jnp.square(w))

    flat_x, flat_y = x.reshape(-1, *x.shape[2:]), y.reshape(-1)

    def whole(w: Any) -> Any:
        return loss(w, flat_x, flat_y)

    eigenvalue = jax.jit(lambda at: _largest_eigenvalue(whole, at))
    smoothness = float(eigenvalue(start))
    path, end = jax.jit(lambda at: _descend(whole, at, 1.0 / smoothness))(start)
    if not model.convex:
        smoothness = max(smoothness, *(float(eigenvalue(w)) for w in path[1:]))
    own_ends = jax.jit(jax.vmap(lambda a, b: _descend(lambda w: loss(w, a, b), end, 1.0 / smoothness)[1]))(x, y)
    own_losses = np.asarray(jax.vmap(loss)(own_ends, x, y), np.float64)
    least = float(whole(end))
    look_at = jax.jit(lambda w: _look(w, loss, flat_x, flat_y, x, y))
    along = [{name: float(value) for name, value in look_at(w).items()} for w in path]
    away = [look for look in along if look["loss"] - least > 1e-3 * (along[0]["loss"] - least)]
    control = jax.vmap(lambda a, b: jnp.sum(jnp.square(jax.grad(loss)(end, a, b))))(x, y)
    words = f"worst along {_STEPS} steps of descent on {material.source}"
    at_end = f"at the end of {_STEPS} steps of descent on {material.source}"
    found = {
        "smoothness": (smoothness, f"largest Hessian eigenvalue on {material.source}"),
        "strong_convexity": _strong_convexity(whole, end, model.convex, spec.model.l2, material.source),
        "pl_constant": (
            min(look["gradient_sq"] / (2 * (look["loss"] - least)) for look in away),
            words,
        ),
        "lipschitz": (max(math.sqrt(look["gradient_sq"]) for look in along), words),
        "example_lipschitz": (max(look["longest"] for look in along), words),
        "gradient_variance": (max(look["variance"] for look in along), words),
        "dissimilarity": (max(look["dissimilarity"] for look in away), words),
        "heterogeneity": (max(least - float(own_losses.mean()), 0.0), at_end),
        "control_error": (float(jnp.mean(control)), at_end),
        "initial_gap": (along[0]["loss"] - least, at_end),
        "initial_distance": (float(jnp.linalg.norm(end - start)), at_end),
        "initial_gradient_sq": (along[0]["gradient_sq"], f"at the initial model on {material.source}"),
    }
    return Constants(
        **{name: float(value) for name, (value, _) in found.items()},
        sources={name: source for name, (_, source) in found.items()},
    )


def _clients(spec: Spec, dataset: data.Dataset, seed: int) -> tuple[Any, Any]:
    """Records of up to `_MOST_CLIENTS` clients, cut to one size: `[clients, records, features]`."""
    plain = rehearsal(spec)
    federation = data.partition(
        dataset,
        kind=plain.data.partition,
        num_clients=plain.num_clients,
        seed=seed,
        similarity=plain.data.similarity,
        alpha=plain.data.alpha,
        groups=None,
        records_per_client=plain.data.records_per_client,
    )
    count = min(_MOST_CLIENTS, len(federation.size))
    size = max(1, min(int(federation.size[:count].min()), _MOST_RECORDS // count))
    rows = np.stack([federation.order[start : start + size] for start in federation.start[:count]])
    return jnp.asarray(dataset.x_train[rows]), jnp.asarray(dataset.y_train[rows])


def _descend(function: Any, start: Any, rate: float) -> tuple[list[Any], Any]:
    """Nesterov's descent: the points of `_PATH` on plain descent's way, and the end of the faster one."""
    gradient = jax.grad(function)

    def step(carry: tuple[Any, Any], number: Any) -> tuple[tuple[Any, Any], Any]:
        w, ahead = carry
        new = ahead - rate * gradient(ahead)
        return (new, new + (number / (number + 3.0)) * (new - w)), new

    (end, _), points = jax.lax.scan(step, (start, start), jnp.arange(_STEPS, dtype=jnp.float32))
    return [start, *(points[index - 1] for index in _PATH[1:])], end


def _largest_eigenvalue(function: Any, at: Any) -> Any:
    """Power iteration with Hessian-vector products."""

    def product(vector: Any) -> Any:
        return jax.jvp(jax.grad(function), (at,), (vector,))[1]

    def body(_: Any, vector: Any) -> Any:
        image = product(vector)
        return image / jnp.maximum(jnp.linalg.norm(image), 1e-30)

    first = jax.random.normal(jax.random.key(0), at.shape)
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


def _look(w: Any, loss: Any, flat_x: Any, flat_y: Any, x: Any, y: Any) -> dict[str, Any]:
    """What the constants need of one model."""
    value, gradient = jax.value_and_grad(loss)(w, flat_x, flat_y)

    def one(record: tuple[Any, Any]) -> tuple[Any, Any]:
        own = jax.grad(loss)(w, record[0][None], record[1][None])
        return jnp.sum(jnp.square(own)), jnp.sum(jnp.square(own - gradient))

    squares, deviations = jax.lax.map(one, (flat_x, flat_y), batch_size=100)  # a network's gradients are large
    of_clients = jax.vmap(lambda a, b: jnp.sum(jnp.square(jax.grad(loss)(w, a, b))))(x, y)
    gradient_sq = jnp.sum(jnp.square(gradient))
    return {
        "loss": value,
        "gradient_sq": gradient_sq,
        "longest": jnp.sqrt(jnp.max(squares)),
        "variance": jnp.mean(deviations),
        "dissimilarity": jnp.sqrt(jnp.maximum(jnp.mean(of_clients) / jnp.maximum(gradient_sq, 1e-30), 1.0)),
    }
