"""A model of your own, here an Equinox network, trained by Dither's engine with a proven ε.

Run it:   pip install equinox && python examples/equinox_model.py
Any pair (init, apply) is a model. The noise is solved for by the accountant, from what the method itself says that
a client reveals in a round: its releases.
"""

import equinox as eqx
import jax
import numpy as np

from dither import Model, Spec, accounting, data, simulate
from dither.methods import prepare
from dither.simulation.engine import problem
from dither.types import RoundInfo

EPSILON, DELTA, CLIENTS, ROUNDS, STEPS, BATCH, CLIP = 4.0, 1e-5, 10, 40, 4, 32, 1.0


def equinox_model(features: int, classes: int) -> Model:
    """An MLP: its arrays are the parameters, the rest of the module is closed over."""

    def make(key):
        return eqx.nn.MLP(features, classes, width_size=32, depth=1, key=key)

    _, static = eqx.partition(make(jax.random.key(0)), eqx.is_array)
    return Model(
        init=lambda key: eqx.filter(make(key), eqx.is_array),
        apply=lambda params, x: jax.vmap(eqx.combine(params, static))(x),
    )


def main(rounds: int = ROUNDS) -> tuple[float, float]:
    """Train on digits; returns test accuracy and proven ε."""
    digits = data.load("digits")
    clients = data.partition(digits, kind="dirichlet", num_clients=CLIENTS, seed=0, alpha=1.0)
    rate = BATCH / int(np.mean(clients.size))  # public: the mean count, not each client's own
    model = equinox_model(digits.x_train.shape[1], len(digits.classes))
    spec = Spec.from_preset("adult").with_values(
        {
            "num_clients": CLIENTS,
            "cohort_size": CLIENTS,
            "num_rounds": rounds,
            "local_steps": STEPS,
            "batch_size": BATCH,
            "sampling_rate": rate,
            "client_lr": 0.5,
            "privacy.clip_norm": CLIP,
            "privacy.noise": "given",
            "privacy.noise_std": 1.0,  # until it is known
        }
    )
    leaves = jax.tree.leaves(model.init(jax.random.key(0)))
    shape = {"client_sizes": clients.size, "num_params": sum(leaf.size for leaf in leaves)}

    # What the largest client reveals in a round: a longer table cuts its batches more often, all else is alike.
    largest = RoundInfo(0, int(np.argmax(clients.size)), int(clients.size.max()), CLIENTS)
    before = prepare(spec, model, **shape)
    released = before.build(before.hyper).releases(largest)

    def every_round(std):
        return [(tuple(release._replace(noise_std=std) for release in released), rounds)]

    std = accounting.calibrate_releases(EPSILON, DELTA, every_round, view="upload", adjacency="zero-out")
    proven = accounting.proven(every_round(std), DELTA, view="upload", adjacency="zero-out").value
    method = prepare(spec.with_values({"privacy.noise_std": std}), model, **shape)
    result = simulate(
        method.build,
        model,
        problem(digits.x_train, digits.y_train, clients, digits.x_test, digits.y_test),
        num_rounds=rounds,
        cohort_size=CLIENTS,
        seeds=[0],
        hyper={name: np.asarray(value)[None] for name, value in method.hyper.items()},
    )
    return float(result.history[-1].metrics["test_accuracy"][0]), proven


if __name__ == "__main__":
    accuracy, epsilon = main()
    print(f"test accuracy {accuracy:.3f}, proven ε = {epsilon:.3f} at δ = {DELTA:g} (zero-out, every upload seen)")
