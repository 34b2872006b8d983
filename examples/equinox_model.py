"""A model of your own, an Equinox network, trained over ten institutions with a proven ε.

Run it:   pip install equinox && python examples/equinox_model.py
Or:       dither run adult --set data.name=digits --set model.name=examples/equinox_model.py:cnn
"""

import equinox as eqx
import jax

import dither


def cnn(input_shape, num_outputs, key, width=16):
    """A convolution, a norm of each record by itself, and a linear layer. Images come with the channels first."""
    height, columns, channels = input_shape
    first, last = jax.random.split(key)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(channels, width, 3, padding=1, key=first),
            eqx.nn.GroupNorm(4, width),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Lambda(jax.numpy.ravel),
            eqx.nn.Linear(width * (height // 2) * (columns // 2), num_outputs, key=last),
        ]
    )


def main(rounds: int = 40, out: str | None = None) -> dither.Report:
    """Train on digits at proven ε = 4."""
    values = {
        "data.name": "digits",
        "num_clients": 10,
        "cohort_size": 10,
        "num_rounds": rounds,
        "local_steps": 4,
        "batch_size": 32,
        "client_lr": 0.5,
        "privacy.epsilon": 4.0,
        "compare": False,
    }
    return dither.run("adult", values=values, model=cnn, out=out)


if __name__ == "__main__":
    print(main())
