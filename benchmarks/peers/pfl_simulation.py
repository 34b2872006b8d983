"""pfl (PyTorch) on the workloads, in two processes.

    torchrun --nproc_per_node 2 pfl_simulation.py A1 A32 B1 B2 [--seconds S]

`FederatedAveraging` on a `SimulatedBackend`. Where a step clips each example's gradient, the local training step
is a function of ours (pfl has none); otherwise pfl's own, with its `local_max_grad_norm` where the batch is one
record.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
import torch_common as common
import workloads
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

logging.disable(logging.WARNING)
torch.set_num_threads(1)
if "LOCAL_RANK" in os.environ:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"]) % os.cpu_count()]})


class Network(torch.nn.Module):
    """The workload's model with the two methods that pfl asks for."""

    def __init__(self, w: workloads.Workload):
        super().__init__()
        self.inner, self.criterion = common.make_model(w), common.criterion(w)

    def forward(self, x):
        return self.inner(x)

    def loss(self, x, y, is_eval=False):
        return self.criterion(self.inner(x), y)

    def metrics(self, x, y):
        return {}


class Averaging(FederatedAveraging):
    """FedAvg whose local step and upload are the workload's."""

    def __init__(self, w: workloads.Workload):
        super().__init__()
        self.w = w

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        w = self.w
        if w.clip and w.batch > 1:
            model.do_multiple_epochs_of(user_dataset, central_context.model_train_params, self.step)
            statistics = model.get_model_difference(initial_model_state)
        else:
            statistics, _ = super().train_one_user(initial_model_state, model, user_dataset, central_context)
        local = dict(model.variable_map)
        with torch.no_grad():
            common.finish(w, {name: value.data for name, value in local.items()})
        if w.param_clip or w.upload_noise:
            statistics = model.get_model_difference(initial_model_state)
        return statistics, Metrics()

    def step(self, pytorch_model, local_optimizer, raw_data, train_kwargs, train_step_args):
        params = {name: value.data for name, value in pytorch_model.inner.named_parameters()}
        found = common.private_gradient(self.w, params, *raw_data)
        for name, value in pytorch_model.inner.named_parameters():
            value.grad = found[name]
        local_optimizer.step()


def timed(w: workloads.Workload, seconds: float) -> None:
    rank = pytorch_ops.distributed.global_rank
    np.random.seed(1)  # noqa: NPY002 (pfl draws its cohorts from it; the same on both processes)
    torch.manual_seed(rank)
    x, y = common.tensors(w)

    def make_dataset(user):
        rows = common.batches(w).reshape(-1)
        return Dataset([x[user][rows], y[user][rows]], user_id=str(user))

    users = FederatedDataset(make_dataset, get_user_sampler("minimize_reuse", list(range(w.clients))))
    backend = SimulatedBackend(training_data=users, val_data=users)
    network = Network(w)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    train = NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=w.lr,
        local_batch_size=w.batch,
        local_max_grad_norm=w.clip if w.clip and w.batch == 1 else None,
    )
    algorithm, done = Averaging(w), 0

    def rounds(count):
        nonlocal done
        done += count
        params = NNAlgorithmParams(
            central_num_iterations=done,
            evaluation_frequency=10**9,  # the first round alone
            train_cohort_size=w.cohort,
            val_cohort_size=0,
        )
        algorithm.run(params, backend, model, train, callbacks=[], send_metrics_to_platform=False)

    def agree(number):
        return int(pytorch_ops.distributed.all_reduce([torch.tensor([float(number * (rank == 0))])])[0][0])

    workloads.measure(
        w,
        "pfl",
        common.versions("pfl"),
        rounds,
        lambda: common.layers_of(network),
        seconds=seconds,
        agree=agree,
        silent=rank > 0,
        processes=pytorch_ops.distributed.world_size,
    )


if __name__ == "__main__":
    workloads.each(timed)
