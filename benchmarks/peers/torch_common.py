"""What the torch peers share: the model, per-example gradients by torch.func, batches, a client's training."""

from __future__ import annotations

import functools
import sys

import numpy as np
import torch
import workloads
from torch import nn
from torch.func import functional_call, grad, vmap
from workloads import Workload


def versions(*modules: str) -> dict[str, str]:
    from importlib.metadata import version

    return {"python": sys.version.split()[0]} | {name: version(name) for name in ("torch", *modules)}


def make_model(w: Workload) -> nn.Sequential:
    """The workload's model with its initial parameters."""
    layers: list[nn.Module] = []
    for a, b in zip(w.widths[:-1], w.widths[1:], strict=True):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    load(model, workloads.initial(w))
    return model


@torch.no_grad()
def load(model: nn.Module, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for layer, (weight, bias) in zip(
        (m for m in model.modules() if isinstance(m, nn.Linear)), layers, strict=True
    ):
        layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T)))
        layer.bias.copy_(torch.from_numpy(bias))


def layers_of(model: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [(m.weight.detach().numpy().T.copy(), m.bias.detach().numpy().copy()) for m in linear]


def criterion(w: Workload, reduction: str = "mean"):
    """loss(scores, labels)."""
    if w.outputs > 1:
        return nn.CrossEntropyLoss(reduction=reduction)
    bce = nn.BCEWithLogitsLoss(reduction=reduction)
    return lambda scores, y: bce(scores[..., 0], y.float())


@functools.cache
def tensors(w: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = workloads.data(w)
    return torch.from_numpy(x), torch.from_numpy(y).long()


def batches(w: Workload) -> torch.Tensor:
    """Positions [local_steps, batch] of a client's round."""
    if w.epoch:
        return torch.randperm(w.records).view(w.local_steps, w.batch)
    if w.batch == 1:
        return torch.randint(w.records, (w.local_steps, 1))
    return torch.stack([torch.randperm(w.records)[: w.batch] for _ in range(w.local_steps)])


@functools.cache
def gradient_functions(w: Workload):
    """(per-example gradients, batch gradient) as functions of (params, x, y)."""
    model, loss = make_model(w), criterion(w)

    def one(params, x, y):
        return loss(functional_call(model, params, (x[None],)), y[None])

    def many(params, x, y):
        return loss(functional_call(model, params, (x,)), y)

    return vmap(grad(one), in_dims=(None, 0, 0)), grad(many)


@torch.no_grad()
def private_gradient(w: Workload, params: dict, x: torch.Tensor, y: torch.Tensor) -> dict:
    """The step's gradient: each example's clipped, the mean, then noise, as far as the workload has them."""
    per_example, whole = gradient_functions(w)
    if not w.clip:
        return whole(params, x, y)
    each = per_example(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    scale = (w.clip / (norms + 1e-12)).clamp(max=1.0) / len(x)
    found = {name: torch.tensordot(scale, g, dims=1) for name, g in each.items()}
    if w.step_noise:
        found = {name: g + w.step_noise * torch.randn_like(g) for name, g in found.items()}
    return found


@torch.no_grad()
def train_client(w: Workload, start: dict, x: torch.Tensor, y: torch.Tensor) -> dict:
    """A client's round: what it uploads, from the server's parameters and its own records."""
    params = {name: value.clone() for name, value in start.items()}
    for rows in batches(w):
        found = private_gradient(w, params, x[rows], y[rows])
        for name, value in params.items():
            value.sub_(found[name], alpha=w.lr)
    return finish(w, params)


def train_module(w: Workload, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict:
    """The same with a module and its optimiser, as most people write it. Per-example gradients only where they are
    needed: a batch of one record has its gradient clipped as it is."""
    if w.clip and w.batch > 1:
        return train_client(w, {name: value.detach() for name, value in model.named_parameters()}, x, y)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=w.lr), criterion(w)
    for rows in batches(w):
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        if w.clip:
            nn.utils.clip_grad_norm_(model.parameters(), w.clip)
        optimizer.step()
    return finish(w, {name: value.detach() for name, value in model.named_parameters()})


@torch.no_grad()
def finish(w: Workload, params: dict) -> dict:
    """Clip and noise of the finished local model."""
    if w.param_clip:
        norm = torch.stack([value.norm() for value in params.values()]).norm()
        for value in params.values():
            value.mul_((w.param_clip / norm).clamp(max=1.0))
    if w.upload_noise:
        for value in params.values():
            value.add_(torch.randn_like(value), alpha=w.upload_noise)
    return params
