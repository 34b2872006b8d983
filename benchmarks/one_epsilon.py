"""Six raw files to an evaluated model with one ε = 1 that covers everything, simulated and federated.

    python benchmarks/messy.py make hospitals
    python benchmarks/one_epsilon.py show hospitals          # about ten minutes on two cores

It trains four times: with bounds and evaluation for free (all of ε for training, a schema from public records); by
`dither start`, whose ε covers schema, training and evaluation; and twice with noise from one seed, so that the two
can be compared, simulated and in a federation of six parties with secure aggregation (in one process).
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import messy

import dither
from dither import data
from dither.accounting.ledger import Ledger
from dither.experiment.private_schema import Wanted
from dither.experiment.start import Project, plan_project, start_project
from dither.federation import keys, messages
from dither.federation.agreement import PartyData, default_colluders
from dither.federation.party import Party
from dither.federation.server import Coordinator, load_evaluation_data
from dither.federation.state import Journal
from dither.spec import Spec


class InProcess:
    """Nodes in this process, each a function from a message to its answer."""

    def __init__(self, parties: Collection[Party]) -> None:
        self._parties = dict(enumerate(parties))
        self._open: dict[str, tuple[int, bytes]] = {}

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(self._parties, "0")

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        del ttl
        ids = {address: secrets.token_hex(8) for address in bodies}
        self._open |= {ids[address]: (address, body) for address, body in bodies.items()}
        return ids

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        asked = [(each, *self._open.pop(each)) for each in ids if each in self._open]
        return [(each, self._parties[address].answer(body)) for each, address, body in asked]

    def pause(self) -> None:
        pass


def simulate(files: list[Path], label: str, epsilon: float, out: Path, *, seeded: bool) -> Project:
    """`dither start`, seeded as a federation of these files would be, or protected."""
    plan = plan_project(files, Wanted(label), epsilon=epsilon)
    colluders = default_colluders(len(files))
    values = {"randomness": "seeded", "secagg.mode": "ideal", "privacy.colluders": colluders} if seeded else {}
    ledger = out.with_suffix(".sqlite")
    return start_project(plan, out=out, ledger=ledger, new_ledger=True, values=values, on_step=print)


def federate(files: list[Path], label: str, epsilon: float, out: Path) -> tuple[dither.Report, dict[str, float]]:
    """The same by a server and a party for each file: real messages, real secure aggregation, one ledger each.
    Returns the report and what each party has spent."""
    messages._LOOK_SECONDS = 0.0
    names = [file.stem for file in files]
    keys.create(out / "keys", names, hosts=["localhost"])
    ledgers = {name: Ledger(out / f"{name}.sqlite") for name in names}
    parties = [
        Party(
            out / "keys" / "parties" / name,
            PartyData(file),
            ledger=ledgers[name],
            new_ledger=True,
            approve=lambda terms, experiment: "benchmark",
            seeded=True,
        )
        for name, file in zip(names, files, strict=True)
    ]
    spec = Spec.from_any(
        {
            "data.label": label,
            "data.partition": "files",
            "num_clients": 0,
            "cohort_size": len(files),
            "privacy.project_epsilon": epsilon,
            "secagg.mode": "real",
            "randomness": "seeded",
        }
    )
    (out / "run").mkdir()
    server = Coordinator(
        InProcess(parties), out / "keys" / "server", spec, Journal(out / "run"), load_evaluation_data(spec)
    )
    report = server.run()
    delta = report.spec.privacy.delta
    spent = {
        name: each.epsilon
        for name, ledger in ledgers.items()
        for dataset in ledger.datasets()
        for each in ledger.spent(dataset, delta=delta)
    }
    return report, spent


def show(folder: Path, out: Path, label: str = messy.LABEL, epsilon: float = 1.0) -> dict[str, float]:
    """All four runs, scored on the public test records, and what they spent."""
    public = folder.parent / f"{folder.name}-test.parquet"
    out.mkdir(parents=True)
    files = data.table_files(folder)
    messy_result = messy.show(folder, out / "free")
    protected = simulate(files, label, epsilon, out / "protected", seeded=False)
    simulated = simulate(files, label, epsilon, out / "simulated", seeded=True)
    (out / "federated").mkdir()
    _, spent = federate(files, label, epsilon, out / "federated")
    scores = json.loads((out / "federated" / "run" / "scores.json").read_text())

    def auc(run: dither.Report) -> float:
        return float(run.evaluate(public).scores.model["auc"])

    result = {
        "AUC, bounds and evaluation free, ε for training alone": messy_result["AUC of Dither"],
        "AUC, one ε for everything": auc(protected.report),
        "its private estimate": protected.scores.model["auc"].value,
        "its one ε": protected.epsilon.epsilon,
        "δ": protected.epsilon.delta,
        "AUC, seeded, simulated": auc(simulated.report),
        "AUC, seeded, federated": auc(dither.load(out / "federated" / "run")),
        "private AUC, seeded, simulated": simulated.scores.model["auc"].value,
        "private AUC, seeded, federated": scores["model"]["auc"][0],
        "ε, seeded, simulated": simulated.epsilon.epsilon,
        "ε, seeded, federated, of the party that spent most": max(spent.values()),
    }
    for name, value in result.items():
        print(f"{name}: {value:.6g}")
    return result


if __name__ == "__main__":
    place = Path(sys.argv[2])
    show(place, place.parent / f"{place.name}-one-epsilon")
