"""What a sweep found: its runs, their curves, and one row a setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from dither.experiment.sweep.folder import Record
from dither.experiment.sweep.grid import flatten
from dither.experiment.sweeps import Outcome
from dither.spec import Spec

_METRICS = ("test_accuracy", "loss", "train_loss")


@dataclass(frozen=True)
class Sweep(Sequence[Outcome]):
    """The outcomes of a sweep, in the order of its specs, and what was proved of each."""

    specs: tuple[Spec, ...]
    keys: tuple[str, ...]  # what varies
    records: tuple[Record, ...]
    timing: dict[str, float]  # seconds of this call by what they went to; compiling apart
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Outcome: ...
    @overload
    def __getitem__(self, index: slice) -> list[Outcome]: ...
    def __getitem__(self, index: int | slice) -> Outcome | list[Outcome]:
        if isinstance(index, slice):
            return [record.outcome for record in self.records[index]]
        return self.records[index].outcome

    def varied(self, number: int) -> dict[str, Any]:
        """The varied keys of a run, with its values."""
        flat = flatten(self.specs[number])
        return {key: flat.get(key, "") for key in self.keys}

    def rows(self) -> list[dict[str, Any]]:
        """One row a run: runs.csv."""
        found = []
        for number, (outcome, proven, seconds, _) in enumerate(self.records):
            last, claim = outcome.metrics[-1], outcome.claim
            row = {"run": number, **_cells(self.varied(number)), "rounds": last["round"]}
            row |= {name: last[name] for name in _METRICS}
            row |= {"claimed_epsilon": claim.value, "claimed_unit": claim.unit, "claimed_delta": claim.delta}
            if proven is not None:
                row |= {"proven_epsilon": proven["value"], "proven_unit": proven["unit"]}
                row |= {f"proven_{name}": proven[name] for name in ("delta", "view", "adjacency", "recipe")}
                row["proven_assumed"] = str(proven["assumed"]).lower()
            found.append({**row, **outcome.seen, "seconds": round(seconds, 3)})
        return found

    def curves(self) -> list[dict[str, Any]]:
        """One row a run, evaluation and metric: curves.csv."""
        return [
            {"run": number, **_cells(self.varied(number)), "round": row["round"], "metric": name, "value": value}
            for number, outcome in enumerate(self)
            for row in outcome.metrics
            for name, value in row.items()
            if name != "round"
        ]

    def settings(self) -> list[tuple[dict[str, Any], list[int]]]:
        """The varied values apart from the seed, and the runs that share them."""
        groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for number in range(len(self)):
            setting = {key: value for key, value in self.varied(number).items() if key != "seed"}
            groups.setdefault(repr(setting), (setting, []))[1].append(number)
        return list(groups.values())

    def table(self) -> list[dict[str, Any]]:
        """One row a setting: mean and standard error over its seeds; of claimed and proven ε the largest."""
        rows = []
        for setting, numbers in self.settings():
            last = [self[number].metrics[-1] for number in numbers]
            claims = [self[number].claim for number in numbers]
            row: dict[str, Any] = {**setting, "runs": len(numbers)}
            for name in ("test_accuracy", "loss"):
                row[name], row[f"{name}_error"] = mean_and_error([each[name] for each in last])
            largest = max(claims, key=lambda claim: claim.value)
            row |= {"claimed_epsilon": largest.value, "claimed_unit": largest.unit}
            proven = [record.proven for record in (self.records[number] for number in numbers) if record.proven]
            if proven:
                most = max(proven, key=lambda each: each["value"])
                row |= {"proven_epsilon": most["value"], "proven_unit": most["unit"], "assumed": most["assumed"]}
            rows.append(row)
        return rows

    def not_covered(self) -> list[str]:
        """What the proofs of any run leave out."""
        return list(dict.fromkeys(text for r in self.records if r.proven for text in r.proven["not_covered"]))

    def troubles(self) -> list[str]:
        """What somebody who reads the table should know about its runs."""
        seen = {
            "refused": "clients' updates that were not finite were left out",
            "void_rounds": "rounds had too few clients and are void",
            "clamped": "coordinates were clamped before a sum (secagg.bound)",
        }
        lines = list(self.notes)
        for name, what in seen.items():
            counts = [outcome.seen.get(name, 0) for outcome in self]
            if any(counts):
                lines.append(f"{sum(counts)} {what}, in {sum(map(bool, counts))} of {len(counts)} runs")
        return lines


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None where one value tells nothing of the spread."""
    array = np.asarray(values, float)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array)))


def _cells(values: dict[str, Any]) -> dict[str, Any]:
    """Values as a CSV holds them: lists as text."""
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}
