"""A PyTorch network of yours, trained on MNIST over ten institutions with a proven ε.

Run it:   pip install 'dither[torch]'
          dither run examples/mnist.toml --set model.name=examples/torch_model.py:cnn --ledger ledger.sqlite
"""

from torch import nn


def cnn(input_shape, num_outputs, channels=16):
    """Two convolutions and two linear layers, for MNIST's images, which come with the channels first."""
    return nn.Sequential(
        nn.Conv2d(input_shape[2], channels, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(channels, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, num_outputs),
    )
