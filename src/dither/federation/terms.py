"""What everybody agrees on before a run, its digest, and the owner's approval.

The terms hold the complete spec, how a table becomes features, and the public facts: who takes part and how many
records each holds. From them a node computes by itself the noise it adds, the rounds it takes part in and the
proven ε; the server cannot change any of it without changing the digest, and a node answers only under the digest
that its owner approved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dither import compiling, data, tasks
from dither.core import RoundInfo
from dither.engines.simulate import Simulation
from dither.errors import DataError, FederationError, SpecError
from dither.runs import write_text
from dither.secagg.roster import Rules
from dither.spec import Spec, method

FORMAT = 1


@dataclass(frozen=True)
class Terms:
    """The terms of one run."""

    federation: str
    run: str
    spec: Spec
    schema: dict[str, Any] | None  # how a table becomes features; None: arrays are used as they are
    classes: tuple[str, ...]
    num_features: int
    image_shape: tuple[int, ...]
    names: tuple[str, ...]  # the parties; a client's number is its place here
    sizes: tuple[int, ...]  # records each party holds

    # To and from JSON

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "federation": self.federation,
            "run": self.run,
            "spec": self.spec.to_dict(),
            "schema": self.schema,
            "classes": list(self.classes),
            "num_features": self.num_features,
            "image_shape": list(self.image_shape),
            "names": list(self.names),
            "sizes": list(self.sizes),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Terms:
        try:
            if found["format"] != FORMAT:
                raise FederationError(f"terms of format {found['format']}, this Dither reads {FORMAT}")
            terms = cls(
                federation=str(found["federation"]),
                run=str(found["run"]),
                spec=Spec.from_any(dict(found["spec"])),
                schema=None if found["schema"] is None else dict(found["schema"]),
                classes=tuple(str(each) for each in found["classes"]),
                num_features=int(found["num_features"]),
                image_shape=tuple(int(side) for side in found["image_shape"]),
                names=tuple(str(each) for each in found["names"]),
                sizes=tuple(int(each) for each in found["sizes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise FederationError(f"terms that cannot be read: {error}") from None
        return terms.check()

    def check(self) -> Terms:
        """Itself, or an error where the parts do not fit together."""
        if not len(self.names) == len(self.sizes) == self.spec.num_clients:
            raise FederationError(
                f"terms with {len(self.names)} parties, {len(self.sizes)} sizes and "
                f"num_clients={self.spec.num_clients}"
            )
        if len(set(self.names)) < len(self.names):
            raise FederationError("terms that name a party twice")
        without = [name for name, size in zip(self.names, self.sizes, strict=True) if size < 1]
        if without:
            raise FederationError(f"no records: {', '.join(without)}; leave such parties out with --without")
        if not (self.run.isascii() and self.run.isalnum() and len(self.run) <= 64):
            raise FederationError(f"terms whose run is {self.run[:80]!r}: letters and digits are possible")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form: spec, schema, parties and their sizes."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # What follows from them

    def number(self, name: str) -> int:
        """A party's number among the clients."""
        if name not in self.names:
            raise FederationError(f"{name!r} is not among the parties of this run: {', '.join(self.names)}")
        return self.names.index(name)

    @property
    def may_lack(self) -> int:
        """How many of a cohort may lack in a sum that is used: proofs count on none of their noise."""
        return max(self.spec.cohort_size - least_clients(self.spec), 0)

    def dataset(self, x: np.ndarray, y: np.ndarray) -> data.Dataset:
        """One member's own records, in the place where a simulation has everybody's."""
        schema = None if self.schema is None else data.Schema.from_dict(self.schema)
        return data.Dataset(
            name=self.spec.data.name,
            x_train=x,
            y_train=y,
            x_test=x[:0],
            y_test=y[:0],
            classes=self.classes,
            feature_names=tuple(f"x{index}" for index in range(self.num_features)),
            image_shape=self.image_shape,
            schema=schema,
            groups=None,
            groups_test=None,
            notes=schema.coverage_notes() if schema else (),
            covered=schema is not None and schema.covered,
        )

    def task(self, x: np.ndarray, y: np.ndarray) -> tasks.Task:
        """The method made ready, by public facts alone: the records only say how wide a record is."""
        if method(self.spec.method).pilot_metric and not self.spec.method_options["param_clip"]:
            raise SpecError(
                "method_options.param_clip=0 trains a pilot on everybody's data; give it a public value"
            )
        sizes = np.array(self.sizes, np.int32)
        federation = data.Federation(np.zeros(0, np.int32), np.zeros_like(sizes), sizes, self.names)
        dataset = self.dataset(x, y)
        problem = tasks.simulate.Problem(x, y, [federation], [np.zeros(0)], [np.zeros(0)])
        return tasks.task_of(self.spec, dataset, federation, problem, missing=self.may_lack)

    def encode(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """A party's records as arrays, by the schema of the terms."""
        x, y = source.encode(self)
        if x.shape[1] != self.num_features:
            raise DataError(
                f"{source.name!r} has {x.shape[1]} features a record, the federation's model takes "
                f"{self.num_features}; bring the columns into the form of the schema"
            )
        if len(y) and (y.min() < 0 or y.max() >= len(self.classes)):
            raise DataError(f"{source.name!r} has labels beyond the {len(self.classes)} classes of the federation")
        return x, y


class Source:
    """A party's file: read once, encoded when the schema is known."""

    def __init__(self, path: str | Path, label: str = "") -> None:
        self.path, self.label = Path(path), label
        self.name = self.path.name
        if self.path.suffix.lower() == ".npz":
            if label:
                raise DataError("--label is for tables; a .npz file holds its labels in 'y'")
            self.table = None
            found = data.read_arrays(self.path, classes=(), labels="ignore")
            self.records = len(found.x)
            return
        self.table = data.read_table(self.path)
        self.records = len(self.table)
        columns = [str(column) for column in self.table.columns]
        if label and label not in columns:
            from dither.errors import did_you_mean

            raise DataError(f"label column {label!r} is not in {self.name!r}{did_you_mean(label, columns)}")

    def encode(self, terms: Terms) -> tuple[np.ndarray, np.ndarray]:
        if self.table is None or terms.schema is None:
            if self.table is not None or terms.schema is not None:
                wanted = "arrays (.npz)" if terms.schema is None else "a table (.csv or .parquet)"
                raise DataError(f"{self.name!r}: the federation trains on {wanted}; give such a file")
            found = data.read_arrays(self.path, classes=terms.classes)
        else:
            schema = data.Schema.from_dict(terms.schema)
            if self.label and self.label != schema.label.column:
                raise DataError(
                    f"--label {self.label!r}, but the federation predicts {schema.label.column!r}; make them agree"
                )
            found = schema.encode(self.table, terms.spec.data.encoding, terms.spec.data.features)
        if found.y is None:
            raise DataError(f"{self.name!r} has no labels")
        return found.x, found.y


def federated(spec: Spec, num_clients: int, name: str) -> Spec:
    """The spec as a federation runs it: no path of anybody's machine, noise from the system unless a test asks for
    the seed's, sums by the real protocol wherever the spec wants them aggregated."""
    if spec.num_clients not in (0, num_clients):
        raise SpecError(
            f"num_clients={spec.num_clients}, but the federation has {num_clients} parties; set it to "
            f"{num_clients} or, with data.partition='column', to 0"
        )
    if spec.federation.dropout:
        raise SpecError("federation.dropout is for simulations: in a federation clients are lost by themselves")
    values: dict[str, Any] = {
        "num_clients": num_clients,
        "randomness": "seeded" if spec.randomness == "seeded" else "os",
        "secagg.mode": "off" if spec.aggregation == "off" else "real",
        "data.name": name,
        "compare": False,
    }
    for key in ("path", "test_path", "label", "schema", "partition", "column", "split", "records_per_client"):
        values[f"data.{key}"] = Spec.default(f"data.{key}")
    return spec.with_values(values)


def least_clients(spec: Spec) -> int:
    """Answers without which a round is not used."""
    least = min(spec.federation.min_clients, spec.cohort_size)
    if spec.aggregation == "off":
        return least
    majority = (spec.cohort_size + spec.privacy.colluders) // 2 + 1
    return max(least, 2, spec.privacy.colluders + 2, spec.secagg.threshold or majority)


def simulation(task: tasks.Task) -> Simulation:
    """The engine whose functions a member of the federation runs."""
    return compiling.simulation(task)


def rules(task: tasks.Task) -> Rules | None:
    """The rules of secure aggregation; None: sums are in the open."""
    how = tasks.aggregation(task)
    if how is None:
        return None
    return Rules(
        how.how.modulus_bits,
        how.threshold,
        how.colluders,
        least_clients(task.spec),  # what the proof counts on, so that no node helps to open less
        how.neighbours,
    ).check()


# What the owner sees


def summary(terms: Terms, task: tasks.Task, name: str) -> list[tuple[str, str]]:
    """The terms in plain words, for the owner of one party's data."""
    spec, number = terms.spec, terms.number(name)
    mine = [index for index, cohort in enumerate(task.cohorts) if number in cohort]
    rows = [
        ("method", f"{spec.method}, {spec.model.name} model of {task.num_params:,} numbers"),
        ("rounds", f"{len(task.cohorts)}, you take part in {len(mine)} of them"),
        ("in a round", f"{spec.local_steps} steps on batches of {spec.batch_size} ({spec.batch_sampling})"),
        ("your records", f"{terms.sizes[number]:,}; this count is shown to everybody"),
        ("parties", ", ".join(f"{each} ({size:,})" for each, size in zip(terms.names, terms.sizes, strict=True))),
    ]
    if spec.aggregation == "off":
        leaves = f"in each of your rounds {task.num_params:,} numbers with your noise, readable by the server"
    else:
        leaves = (
            f"in each of your rounds {task.num_params:,} masked integers; the server learns the sum of at least "
            f"{least_clients(spec)} parties, nobody's alone"
        )
    rows.append(("what leaves", leaves))
    rows.append(("your noise", _noise_words(terms, task, number, mine)))
    shown = set()
    for row in tasks.proven(task, missing=terms.may_lack):
        if row["adjacency"] != spec.privacy.adjacency or row["unit"].startswith("message"):
            continue
        value = "∞ (no proof)" if not np.isfinite(row["value"]) else f"at most {row['value']:.3g}"
        if (value, row["view"]) in shown:
            continue
        shown.add((value, row["view"]))
        seen = {
            "upload": "each upload",
            "sum": "the sums",
            "broadcast": "the broadcast models",
            "final": "the final model",
        }
        kind = "assumed" if row["assumed"] else "proven"
        rows.append(
            (
                f"{kind} ε",
                f"{value} at δ = {row['delta']:g} ({row['adjacency']}) for one who sees {seen[row['view']]}",
            )
        )
        for what in row["not_covered"]:
            if ("not covered", what) not in rows:
                rows.append(("not covered", what))
    if spec.randomness == "seeded":
        rows.append(("WARNING", "a test: the noise comes from a public seed and protects nothing"))
    rows.append(("digest", terms.digest))
    return rows


def _noise_words(terms: Terms, task: tasks.Task, number: int, mine: list[int]) -> str:
    if not mine:
        return "none: you take part in no round"
    releases = task.prepared.build(task.prepared.hyper).releases
    info = RoundInfo(mine[0], number, terms.sizes[number], len(task.cohorts[mine[0]]))
    uplink = [release for release in releases(info) if release.channel == "uplink"]
    if not uplink or all(release.noise_std == 0 for release in uplink):
        return "NONE: the uploads are not protected"
    first = uplink[0]
    source = "the operating system" if terms.spec.randomness == "os" else "a public seed"
    return (
        f"Gaussian, std {first.noise_std:.4g} against a sensitivity of {first.sensitivity:.4g} "
        f"({first.source}), drawn on this machine from {source}"
    )


# Approval


def approved(folder: Path) -> str | None:
    """The digest the owner approved, or None."""
    path = folder / "approved.json"
    if not path.is_file():
        return None
    return str(json.loads(path.read_text(encoding="utf-8"))["digest"])


def approve(folder: Path, terms: Terms, how: str) -> None:
    """Write down that the owner approved these terms."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"digest": terms.digest, "run": terms.run, "approved": at, "how": how}
    write_text(folder / "approved.json", json.dumps(content, indent=2) + "\n")
