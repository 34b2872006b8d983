"""NbAFL's constants ρ, β, l, B and Θ, estimated along a run without noise (for Fig. 8).

The paper evaluates Theorem 2 with constants that it says were estimated, without saying how. Here they are read
off the iterates w_0, …, w_T of a run without noise, on the training records F = (1/N) Σ F_i:

    ρ   largest eigenvalue of ∇²F at the iterates, by power iteration      (smoothness along the path)
    β   largest ‖∇F_i‖ over clients and iterates                          (Lipschitz constant along the path)
    l   smallest ‖∇F‖² / (2 (F − F*)) over the iterates                    (Polyak-Łojasiewicz)
    B   largest √(mean_i ‖∇F_i‖²) / ‖∇F‖ over the iterates                 (dissimilarity)
    Θ   F(w_0) − F*

with F* = 0, the least value of a cross-entropy, which a network of this size can approach on 5,000 images. Each is
an estimate from below (ρ, β, B) or from above (l) of what the theorem needs: a maximum over the path is not one
over the space.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dither import models
from dither.experiment.build import Experiment, planned_rounds
from dither.simulation.engine import Simulation
from dither.types import Array, Params

METHOD = (
    "along the iterates of a run without noise: ρ largest Hessian eigenvalue (power iteration), β largest ‖∇F_i‖, "
    "l smallest ‖∇F‖²/(2(F − F*)), B largest √(mean ‖∇F_i‖²)/‖∇F‖, Θ = F(w_0) − F*, with F* = 0"
)
_ITERATIONS = 15
_LOOKS = 6  # iterates at which the constants are read


def estimate(experiment: Experiment) -> dict[str, Any]:
    """The constants, as plain numbers. `experiment` must have no noise."""
    model, prepared = experiment.model, experiment.prepared
    simulation = Simulation(
        model,
        prepared.build,
        num_clients=len(experiment.partition.size),
        cohort_size_at=prepared.cohort_size_at,
    )
    hyper = {name: np.asarray(value)[None] for name, value in prepared.hyper.items()}
    inputs = simulation.inputs(experiment.problem, seeds=[experiment.spec.seed], hyper=hyper)
    federation = experiment.partition
    rows = np.stack(
        [federation.order[s : s + federation.size.min()] for s in federation.start]
    )  # all alike in the figure
    x, y = (
        jnp.asarray(experiment.problem.x[rows]),
        jnp.asarray(experiment.problem.y[rows]),
    )  # [clients, records, ...]

    def client_loss(params: Params, records: tuple[Array, Array]) -> Array:
        return jnp.mean(models.losses(model, params, *records))

    def total_loss(params: Params) -> Array:
        return jnp.mean(jax.lax.map(lambda records: client_loss(params, records), (x, y)))

    @jax.jit
    def look(params: Params) -> tuple[Array, Array, Array, Array]:
        """F, ‖∇F‖², mean and largest ‖∇F_i‖²."""

        def one(total: Params, records: tuple[Array, Array]) -> tuple[Params, Array]:
            gradient = jax.grad(client_loss)(params, records)
            return jax.tree.map(jnp.add, total, gradient), _squared(gradient)

        summed, squares = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), (x, y))
        mean = jax.tree.map(lambda leaf: leaf / x.shape[0], summed)
        return total_loss(params), _squared(mean), jnp.mean(squares), jnp.max(squares)

    @jax.jit
    def curvature(params: Params) -> Array:
        """The Hessian's largest eigenvalue in size."""

        def turn(_: int, direction: Params) -> Params:
            product = jax.jvp(jax.grad(total_loss), (params,), (direction,))[1]
            return jax.tree.map(lambda leaf: leaf / jnp.sqrt(_squared(product) + 1e-30), product)

        start = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
        direction = jax.lax.fori_loop(0, _ITERATIONS, turn, start)
        return jnp.sqrt(_squared(jax.jvp(jax.grad(total_loss), (params,), (direction,))[1]))

    rounds = planned_rounds(experiment)
    stops = np.unique(np.round(np.linspace(0, rounds, _LOOKS)).astype(int))
    state, done = simulation.start(inputs), 0
    seen, bent = [], []
    for stop in stops.tolist():
        state = simulation.advance(state, inputs, done, stop)
        done = stop
        params = jax.tree.map(lambda leaf: leaf[0], simulation.params(state, inputs))
        seen.append([float(value) for value in look(params)])
        bent.append(float(curvature(params)))
    loss, gradient_sq, mean_sq, largest_sq = np.array(seen, np.float64).T
    return {
        "smoothness": max(bent),
        "lipschitz": float(np.sqrt(largest_sq.max())),
        "pl_constant": float(np.min(gradient_sq / (2 * loss))),
        "dissimilarity": float(np.max(np.sqrt(mean_sq / gradient_sq))),
        "initial_gap": float(loss[0]),
        "rounds": stops.tolist(),
        "loss": loss.tolist(),
    }


def _squared(tree: Params) -> Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))
