"""An Equinox network of yours, trained on MNIST over ten institutions with a proven ε.

Run it:   pip install equinox
          dither run examples/mnist.toml --set model.name=examples/equinox_model.py:cnn --ledger ledger.sqlite
"""

import equinox as eqx
import jax


def cnn(input_shape, num_outputs, key, channels=16):
    """Two convolutions and two linear layers, for MNIST's images, which come with the channels first."""
    keys = jax.random.split(key, 4)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(input_shape[2], channels, 8, stride=2, padding=3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.tanh),
            eqx.nn.MaxPool2d(2, 1),
            eqx.nn.Conv2d(channels, 32, 4, stride=2, key=keys[1]),
            eqx.nn.Lambda(jax.nn.tanh),
            eqx.nn.MaxPool2d(2, 1),
            eqx.nn.Lambda(jax.numpy.ravel),
            eqx.nn.Linear(32 * 4 * 4, 32, key=keys[2]),
            eqx.nn.Lambda(jax.nn.tanh),
            eqx.nn.Linear(32, num_outputs, key=keys[3]),
        ]
    )
