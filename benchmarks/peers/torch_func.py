"""A plain torch.func loop: clients and steps in Python, per-example gradients by vmap(grad).

python torch_func.py A1 A32 B1 B2 [--seconds S]
"""

from __future__ import annotations

import torch
import torch_common as common
import workloads


def timed(w: workloads.Workload, seconds: float) -> None:
    torch.manual_seed(1)
    x, y = common.tensors(w)
    model = common.make_model(w)
    server = {name: value.detach() for name, value in model.named_parameters()}

    def rounds(count):
        for _ in range(count):
            total = {name: torch.zeros_like(value) for name, value in server.items()}
            for client in torch.randperm(w.clients)[: w.cohort]:
                local = common.train_client(w, server, x[client], y[client])
                for name, value in total.items():
                    value.add_(local[name])
            for name, value in server.items():
                value.copy_(total[name] / w.cohort)

    workloads.measure(w, "torch.func", common.versions(), rounds, lambda: common.layers_of(model), seconds=seconds)


if __name__ == "__main__":
    workloads.each(timed)
