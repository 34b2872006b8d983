"""Flower's simulation (Ray): a ClientApp in torch, the FedAvg strategy, one CPU and one thread a client.

python flower_simulation.py A1 A32 B1 B2 [--seconds S]
"""

from __future__ import annotations

import os
import sys

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_DEDUP_LOGS="0", OMP_NUM_THREADS="1"
)
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # Ray's workers import what we import

import logging

import torch_common as common
import workloads
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    w = workloads.WORKLOADS[message.content["config"]["workload"]]
    x, y = common.tensors(w)
    own = context.node_config["partition-id"]
    model = common.make_model(w)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    local = common.train_module(w, model, x[own], y[own])
    metrics = MetricRecord({"num-examples": w.records})
    return Message(RecordDict({"arrays": ArrayRecord(local), "metrics": metrics}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    workloads.each(lambda w, seconds: timed(w, seconds, grid))


def timed(w: workloads.Workload, seconds: float, grid: Grid) -> None:
    model = common.make_model(w)
    strategy = FedAvg(
        fraction_train=w.cohort / w.clients,
        fraction_evaluate=0.0,
        min_train_nodes=w.cohort,
        min_available_nodes=w.clients,
    )
    arrays = ArrayRecord(model.state_dict())

    def rounds(count):
        nonlocal arrays
        config = ConfigRecord({"workload": w.name})
        arrays = strategy.start(grid, arrays, num_rounds=count, train_config=config).arrays

    def layers():
        model.load_state_dict(arrays.to_torch_state_dict())
        return common.layers_of(model)

    workloads.measure(w, "flower", common.versions("flwr", "ray"), rounds, layers, seconds=seconds)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    names = [name for name in sys.argv[1:] if name in workloads.WORKLOADS]
    (clients,) = {workloads.WORKLOADS[name].clients for name in names}  # workloads of one federation at a time
    run_simulation(
        server_app,
        client_app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
            "init_args": {"logging_level": "ERROR", "log_to_driver": False, "num_cpus": 2},
        },
    )


if __name__ == "__main__":
    main()
