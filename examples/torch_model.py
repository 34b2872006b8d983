"""A PyTorch network, trained with a proven ε.

Run it:   pip install 'dither[torch]' && dither run adult --set data.name=digits \\
              --set model.name=examples/torch_model.py:cnn
"""

from torch import nn


def cnn(input_shape, num_outputs, width=16):
    """As torch has it: images come with the channels first. GroupNorm, since batch normalisation mixes records."""
    height, columns, channels = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * (height // 2) * (columns // 2), num_outputs),
    )
