"""The steps of ../clipping.py in torch: without a clip, and with Opacus, plain and with ghost norms; as JSON.

python opacus_clipping.py [REPEATS]
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

warnings.filterwarnings("ignore")
BATCH, REPEATS = 64, int(sys.argv[1]) if len(sys.argv) > 1 else 90


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()


def per_example(model: GradSampleModule, x: torch.Tensor, y: torch.Tensor) -> None:
    """As Opacus' optimiser clips: norms of the formed gradients, then their weighted sum."""
    nn.functional.cross_entropy(model(x), y).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()], 1).norm(dim=1)
    scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        p.grad = torch.einsum("i,i...", scale, p.grad_sample) / BATCH


class Ghost:
    """Norms in a first pass backwards, the sum of the clipped gradients in a second."""

    def __init__(self, model: nn.Module) -> None:
        self.model = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
        )
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            expected_batch_size=BATCH,
        )
        self.loss = DPLossFastGradientClipping(self.model, optimizer, nn.CrossEntropyLoss())

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.loss(self.model(x), y).backward()


def measured(name: str, make) -> dict:
    torch.manual_seed(0)
    x, y = torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))
    ordinary, sampled, ghost = make(), GradSampleModule(make()), Ghost(make())
    ways = {
        "torch, no clip": (ordinary, lambda: plain(ordinary, x, y)),
        "clip, opacus": (sampled, lambda: per_example(sampled, x, y)),
        "clip, opacus ghost": (ghost.model, lambda: ghost(x, y)),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(REPEATS + 2):
        for way, (model, run) in ways.items():
            model.zero_grad()
            began = time.perf_counter()
            run()
            if repeat > 1:
                times[way].append(time.perf_counter() - began)
    best = {way: min(values) for way, values in times.items()}
    rows = [
        {"step": way, "milliseconds": 1e3 * value, "ratio": value / best["torch, no clip"]}
        for way, value in best.items()
    ]
    return {"model": name, "rows": rows}


if __name__ == "__main__":
    print(json.dumps([measured("mlp 784-256-10 (torch)", mlp), measured("cnn 16-32-32-10 (torch)", cnn)]))
