"""Opacus, client after client: one private model and optimiser, loaded anew for each client.

    python opacus_loop.py A1 A32 B1 [--ghost] [--seconds S]

--ghost uses Opacus' fast gradient clipping with ghost norms instead of per-example gradients. B2 clips no
gradient: there is nothing for Opacus to do.
"""

from __future__ import annotations

import warnings

import torch
import torch_common as common
import workloads
from opacus import PrivacyEngine

warnings.filterwarnings("ignore")
GHOST = workloads.flag("--ghost")


def private(w: workloads.Workload):
    """Model, optimiser and criterion as `PrivacyEngine.make_private` gives them."""
    model = common.make_model(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=w.lr)
    # The loader only tells Opacus the batch size; the batches of each client are drawn below.
    records = torch.utils.data.TensorDataset(torch.zeros(w.records, 1))
    loader = torch.utils.data.DataLoader(records, batch_size=w.batch, drop_last=True)
    loss = torch.nn.CrossEntropyLoss() if w.outputs > 1 else torch.nn.BCEWithLogitsLoss()
    options = {"noise_multiplier": w.step_noise * w.batch / w.clip, "max_grad_norm": w.clip}
    options |= {"poisson_sampling": False, "module": model, "optimizer": optimizer, "data_loader": loader}
    if GHOST:
        model, optimizer, loss, _ = PrivacyEngine().make_private(
            **options, criterion=loss, grad_sample_mode="ghost"
        )
        return model, optimizer, loss
    model, optimizer, _ = PrivacyEngine().make_private(**options)
    return model, optimizer, loss


def timed(w: workloads.Workload, seconds: float) -> None:
    torch.manual_seed(1)
    x, y = common.tensors(w)
    labels = y if w.outputs > 1 else y.float()[..., None]
    model, optimizer, loss = private(w)
    weights = list(model.parameters())
    server = [value.detach().clone() for value in weights]

    def rounds(count):
        for _ in range(count):
            total = [torch.zeros_like(value) for value in server]
            for client in torch.randperm(w.clients)[: w.cohort]:
                with torch.no_grad():
                    for value, start in zip(weights, server, strict=True):
                        value.copy_(start)
                for rows in common.batches(w):
                    optimizer.zero_grad()
                    loss(model(x[client][rows]), labels[client][rows]).backward()
                    optimizer.step()
                local = common.finish(w, {str(i): value.detach() for i, value in enumerate(weights)})
                for value, end in zip(total, local.values(), strict=True):
                    value.add_(end)
            for value, ends in zip(server, total, strict=True):
                value.copy_(ends / w.cohort)

    def layers():
        pairs = zip(server[::2], server[1::2], strict=True)
        return [(weight.numpy().T.copy(), bias.numpy().copy()) for weight, bias in pairs]

    name = "opacus-ghost" if GHOST else "opacus"
    workloads.measure(w, name, common.versions("opacus"), rounds, layers, seconds=seconds)


if __name__ == "__main__":
    workloads.each(timed)
