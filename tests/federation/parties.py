"""Federations for tests: keys, parties with parts of a small data set, and a coordinator, in one process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from dither import data
from dither.accounting.ledger.runs import Ledger
from dither.experiment import build
from dither.federation import keys, messages
from dither.federation import server as coordinator
from dither.federation.agreement import PartyData
from dither.federation.party import Party
from dither.federation.state import Journal
from dither.simulation.arrays import ONE_DEVICE
from dither.spec import Spec

NAMES = ("ann", "bob", "cat", "dan")
FIRST = 100  # address of the first node


def small_spec(method: str = "cpfed", **changes: Any) -> Spec:
    """Breast cancer over four parties, seeded, with noise that is given."""
    values = {
        "data.name": "breast-cancer",
        "data.encoding": "minmax",
        "data.features": "all",
        "data.partition": "iid",
        "data.split": "given",
        "data.records_per_client": 100,
        "num_clients": 4,
        "cohort_size": 4,
        "num_rounds": 3,
        "local_steps": 2,
        "batch_size": 8,
        "eval_every": 1,
        "randomness": "seeded",
        "secagg.mode": "off",
        "privacy.noise_decay_start": 0,
        "privacy.epsilon": 1000.0,
        "privacy.colluders": 1,  # of four: the third that a federation would take leaves nobody to be lost
        "federation.min_clients": 3,
        "federation.round_timeout": 5.0,
    }
    if method != "secure-fedavg":
        values |= {"privacy.noise": "given", "privacy.noise_std": 0.1}
    return Spec.from_preset(method).with_values({**values, **changes})


def raw_training_table() -> Any:
    """The training records of breast-cancer as the table they are encoded from."""
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    frame = pd.DataFrame(bunch.data, columns=list(bunch.feature_names))
    frame["diagnosis"] = [str(bunch.target_names[target]) for target in bunch.target]
    labels = data.packaged_schema("breast-cancer").encode_labels(frame)
    rows, _ = data.stratified_split(labels, round(0.2 * len(labels)), 0)
    return frame.iloc[rows]


def simulated(experiment: build.Experiment, layout: str) -> list[np.ndarray]:
    """The server's state after a simulation of the same spec."""
    import jax

    simulation, _, inputs = build.compiled(experiment, layout=layout, shards=ONE_DEVICE)
    state = simulation.advance(simulation.start(inputs), inputs, 0, len(experiment.cohorts))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.server)]


class Clock:
    """The time of a server whose parties are in its own process: nothing comes to pass while it waits for them, so
    that its waits are not slept through but counted."""

    waited = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.waited


CLOCK = messages.time = coordinator.time = Clock()


class LocalTransport:
    """Nodes in this process: each is a function from a message to its answer. None: it does not answer (yet)."""

    def __init__(self, answer: Mapping[int, Callable[[bytes], bytes | None]]) -> None:
        self.answer = dict(answer)
        self.marks = dict.fromkeys(self.answer, "0")
        self._open: dict[str, tuple[int, bytes]] = {}

    def nodes(self) -> dict[int, str]:
        return {address: self.marks[address] for address in self.answer}

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        del ttl
        ids = {}
        for address, body in bodies.items():
            if address in self.answer:
                ids[address] = secrets.token_hex(8)
                self._open[ids[address]] = (address, body)
        return ids

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        answers: list[tuple[str, bytes | None]] = []
        for each in ids:
            if each in self._open:
                address, body = self._open.pop(each)
                reply = self.answer[address](body) if address in self.answer else None
                if reply is not None:
                    answers.append((each, reply))
        return answers

    def pause(self) -> None:
        CLOCK.waited += 0.02


@dataclass
class Parties:
    """Keys, files, nodes and a coordinator in one folder. Each party has its part of the training records: rows of
    `table` (breast cancer's by default), or arrays where the data set is one of images."""

    folder: Path
    spec: Spec
    table: Any = None
    said: list[str] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = NAMES[: self.spec.num_clients]
        self.experiment = build.build_experiment(self.spec)
        dataset, federation = self.experiment.dataset, self.experiment.partition
        if not (self.folder / "keys").exists():
            keys.create(self.folder / "keys", self.names, hosts=["localhost"])
            table = raw_training_table() if self.table is None else self.table
            for number, name in enumerate(self.names):
                rows = federation.rows(number)
                if dataset.schema is None:
                    images = dataset.x_train[rows].reshape(-1, *dataset.image_shape)
                    np.savez(self.file(name), x=images, y=dataset.y_train[rows])
                    continue
                table.iloc[rows].to_csv(self.file(name), index=False)
                encoded = dataset.schema.encode(data.read_table(self.file(name)))
                np.testing.assert_array_equal(encoded.x, dataset.x_train[rows])
        self.nodes = {name: self.node(name) for name in self.names}
        self.transport = LocalTransport(
            {FIRST + number: self._answering(name) for number, name in enumerate(self.names)}
        )

    def _answering(self, name: str):
        return lambda body: self.nodes[name].answer(body)

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.{'csv' if self.experiment.dataset.schema else 'npz'}"

    @property
    def label(self) -> str:
        schema = self.experiment.dataset.schema
        return schema.label.column if schema else ""

    def node(self, name: str, **changes: Any) -> Party:
        """A node as it is after a (re)start."""
        arguments = {"approve": lambda agreement, experiment: "test", "seeded": True, "say": self.said.append}
        return Party(
            self.folder / "keys" / "parties" / name,
            PartyData(self.file(name), self.label),
            **{"ledger": Ledger(self.folder / f"{name}.sqlite"), **arguments, **changes},
        )

    def coordinator(self, **changes: Any) -> coordinator.Coordinator:
        """A coordinator as it is after a (re)start."""
        return coordinator.Coordinator(
            self.transport,
            self.folder / "keys" / "server",
            self.spec,
            Journal(self.folder / "run"),
            self.experiment.dataset,
            **{
                "wait_seconds": 5.0,
                "on_event": lambda event, facts: self.events.append((event, facts)),
                **changes,
            },
        )

    def charged(self, name: str) -> list[int]:
        """Rounds in a party's ledger, in order."""
        ledger = self.nodes[name].ledger
        return [entry.rounds[0] for entry in ledger.history() if entry.kind == "charge"]


# What the tests do with them


def lines(parties):
    return [facts for event, facts in parties.events if event == "round"]


def kind_of(parties, name, body):
    """The kind of a message to a party, as the party reads it."""
    node = parties.nodes[name]
    keyring = node.keyring
    return messages.unpack(body, federation=keyring.id, to=name, keys={messages.SERVER: keyring.server})


def intercept(parties, name, change):
    """Let `change(message, body)` answer in a party's place; None: the node itself answers."""
    honest = parties.transport.answer[FIRST + NAMES.index(name)]

    def answer(body):
        message = kind_of(parties, name, body)
        found = change(message, body)
        return honest(body) if found is None else found or None

    parties.transport.answer[FIRST + NAMES.index(name)] = answer


def lies(parties, name, row):
    """An upload that the party signs although it never computed it."""

    def change(message, body):
        if message.kind != "round":
            return None
        return parties.nodes[name]._pack(
            "upload", {"round": message.fields["round"]}, {"upload": row}, quoted=messages.digest(body)
        )

    intercept(parties, name, change)


def server_bits(coordinator):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(coordinator.engine.state.server)]


def assert_simulated(coordinator, parties):
    """The server has, bit for bit, what the simulator computes."""
    for deployed, expected in zip(server_bits(coordinator), simulated(parties.experiment, "loop"), strict=True):
        np.testing.assert_array_equal(deployed, expected)


@contextmanager
def days_ago(monkeypatch, days):
    """Certificates are signed as if this were so many days earlier."""
    past = datetime.now(UTC) - timedelta(days=days)
    with monkeypatch.context() as patch:
        patch.setattr(keys, "datetime", SimpleNamespace(now=lambda zone: past))
        yield
