"""What everybody agrees on before a run, its digest, and the owner's approval.

An agreement holds the complete spec, how a table becomes features, and the public facts: who takes part and how
many records each party holds. From it a party computes its own noise, its rounds and the proven ε. The server
cannot change any of this without changing the digest, and a party answers only under the digest that its owner
approved.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dither import data, methods, models
from dither.errors import DamagedFile, DataError, FederationError, SpecError
from dither.experiment import build, compiled
from dither.experiment.folder import read_checked, write_checked
from dither.privacy import clipping
from dither.secagg.roster import Rules
from dither.simulation.engine import Simulation
from dither.spec import Spec
from dither.spec.options import approve, is_available
from dither.types import RoundInfo

FORMAT = 1
NEIGHBOURS = ("zero-out", "replace-one")  # under add/remove the counts, which all parties see, would tell
_OLD = ("format", "federation", "run", "spec", "schema", "classes", "num_features", "image_shape", "names")

# What an agreement may ask of a party, in all: more than any real run, less than what would harm a machine.
_MOST_VALUES = 100_000  # in the JSON of the agreement
_MOST_TEXT = 4096  # characters of one string
_MOST_LAYERS = 16
_MOST_CLASSES = 10_000
_MOST_PARAMETERS = 1 << 25
_MOST_WORK = 1e16  # parameters x records, over all steps of a party
_LEAST_REAL, _MOST_REAL = 1e-20, 1e9  # a real number of the spec that is not 0
_MOST = {
    "num_rounds": 100_000,
    "local_steps": 100_000,
    "batch_size": 1 << 24,
    "num_clients": 10_000,
    "cohort_size": 10_000,
    "secagg.threshold": 10_000,
    "secagg.neighbours": 10_000,
    "privacy.colluders": 10_000,
}


@dataclass(frozen=True)
class Agreement:
    """The agreement of one run."""

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
    def load(cls, path: Path, advice: str) -> Agreement | None:
        """An agreement that `save` wrote; None if there is no file."""
        return cls.from_dict(read_checked(path, advice, old=(*_OLD, "sizes"))) if path.is_file() else None

    def save(self, path: Path) -> None:
        write_checked(path, self.to_dict())

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Agreement:
        """An agreement from JSON that anybody may have written. Nothing it names is opened, imported or allocated
        before all of it is known to be in bounds."""
        _check_json(found)
        if found.get("format") != FORMAT:
            raise FederationError(f"the agreement has format {found.get('format')!r}; this Dither reads {FORMAT}")
        spec, schema = found.get("spec"), found.get("schema")
        if not isinstance(spec, dict) or not isinstance(schema, dict | None):
            raise FederationError("the agreement cannot be read: spec or schema is not a table")
        if not is_available(spec.get("method")):
            raise FederationError(
                f"the agreement names method {spec.get('method')!r}, which is not one of Dither's; approve "
                "a file of yours with --method FILE"
            )
        return cls(
            federation=_typed(found, "federation", str),
            run=_typed(found, "run", str),
            spec=Spec.from_any(spec),
            schema=schema,
            classes=_listed(found, "classes", str),
            num_features=_typed(found, "num_features", int),
            image_shape=_listed(found, "image_shape", int),
            names=_listed(found, "names", str),
            sizes=_listed(found, "sizes", int),
        ).check()

    def check(self) -> Agreement:
        """Itself, or an error where the parts do not fit together."""
        if not len(self.names) == len(self.sizes) == self.spec.num_clients:
            raise FederationError(
                f"the agreement has {len(self.names)} parties, {len(self.sizes)} sizes and "
                f"num_clients={self.spec.num_clients}"
            )
        if len(set(self.names)) < len(self.names):
            raise FederationError("the agreement names a party twice")
        without = [name for name, size in zip(self.names, self.sizes, strict=True) if size < 1]
        if without:
            raise FederationError(f"no records: {', '.join(without)}; leave such parties out with --without")
        if self.spec.privacy.adjacency not in NEIGHBOURS:
            raise FederationError(f"the agreement has {_neighbours_words(self.spec.privacy.adjacency)}")
        if not (self.run.isascii() and self.run.isalnum() and len(self.run) <= 64):
            raise FederationError(f"the agreement has run {self.run[:80]!r}; use up to 64 letters and digits")
        self._check_size()
        return self

    def _check_size(self) -> None:
        """`FederationError` where the agreement asks for more than a machine can give."""
        spec = self.spec
        for key, found in spec.flat().items():
            for value in found if isinstance(found, list) else [found]:
                if isinstance(value, int) and value > (most := _MOST.get(key, 2**32)):
                    raise FederationError(f"the agreement has {key}={value}: at most {most} is possible")
                if isinstance(value, float) and value and not _LEAST_REAL <= abs(value) <= _MOST_REAL:
                    bounds = f"{_LEAST_REAL:g} to {_MOST_REAL:g}"
                    raise FederationError(f"the agreement has {key}={value:g}: 0 and {bounds} are possible")
        if max(self.sizes) >= 2**31:
            raise FederationError(
                f"the agreement has a party of {max(self.sizes)} records: below 2^31 is possible"
            )
        if not 2 <= len(self.classes) <= _MOST_CLASSES or len(set(self.classes)) < len(self.classes):
            raise FederationError(
                f"the agreement has {len(self.classes)} classes: 2 to {_MOST_CLASSES}, each once"
            )
        if not 1 <= self.num_features <= _MOST_PARAMETERS:
            raise FederationError(
                f"the agreement has {self.num_features} features: 1 to {_MOST_PARAMETERS} are possible"
            )
        sides = self.image_shape
        if sides and (len(sides) > 3 or min(sides) < 1 or math.prod(sides) != self.num_features):
            raise FederationError(f"the agreement has pictures of {sides[:4]} and {self.num_features} features")
        widths = spec.model.hidden
        if len(widths) > _MOST_LAYERS or max(widths, default=0) > _MOST_PARAMETERS:
            raise FederationError(
                f"the agreement has {len(widths)} hidden layers of up to {max(widths)}: too large a model"
            )
        parameters = models.count_params(jax.eval_shape(self._model().init, jax.random.key(0)))
        if parameters > _MOST_PARAMETERS:
            raise FederationError(
                f"the agreement has a model of {parameters} parameters: at most {_MOST_PARAMETERS}"
            )
        batch = max(self.sizes) if spec.batch_sampling in ("full", "poisson-full") else spec.batch_size
        for what, amount, limit in (
            ("places in cohorts", spec.num_rounds * spec.cohort_size, 1e7),
            ("local steps", spec.num_rounds * spec.local_steps, 1e7),
            ("records in a round", spec.local_steps * batch, 1e9),
            ("numbers in a batch's gradients", batch * parameters, 2.0**34),
            ("operations", spec.num_rounds * spec.local_steps * batch * parameters, _MOST_WORK),
        ):
            if amount > limit:
                raise FederationError(
                    f"the agreement asks for {amount:.3g} {what}: at most {limit:.3g} are possible"
                )

    def _model(self) -> models.Model:
        return models.make(
            self.spec.model.name,
            num_features=self.num_features,
            num_classes=len(self.classes),
            hidden=self.spec.model.hidden,
            image_shape=self.image_shape,
        )

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

    def experiment(self, x: np.ndarray, y: np.ndarray) -> build.Experiment:
        """The method made ready, by public facts alone: the records only say how wide a record is."""
        if methods.method(self.spec.method).pilot_metric and not self.spec.method_options["param_clip"]:
            raise SpecError(
                "method_options.param_clip=0 trains a pilot on everybody's data; give it a public value"
            )
        sizes = np.array(self.sizes, np.int32)
        federation = data.ClientPartition(np.zeros(0, np.int32), np.zeros_like(sizes), sizes, self.names)
        dataset = self.dataset(x, y)
        problem = build.engine.Problem(x, y, [federation], [np.zeros(0)], [np.zeros(0)])
        return build.assemble(self.spec, dataset, federation, problem, missing=self.may_lack, federated=True)

    def encode(self, source: PartyData, *, empty: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """A party's records as arrays, by the schema; with `empty` none of them, and no value is looked at."""
        x, y = source.encode(self, empty=empty)
        if x.shape[1] != self.num_features:
            raise DataError(
                f"{source.name!r} has {x.shape[1]} features a record, the federation's model takes "
                f"{self.num_features}; bring the columns into the form of the schema"
            )
        if len(y) and (y.min() < 0 or y.max() >= len(self.classes)):
            raise DataError(f"{source.name!r} has labels beyond the {len(self.classes)} classes of the federation")
        return x, y


def _check_json(found: object) -> None:
    """`FederationError` unless this is plain JSON of moderate size, whose numbers are finite."""
    left, count = [(found, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, list):
            inner = value
        elif isinstance(value, str):
            if len(value) > _MOST_TEXT:
                raise FederationError(f"the agreement has a text of {len(value)} characters: at most {_MOST_TEXT}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise FederationError(f"the agreement has {value}, which is not a finite number")
        elif isinstance(value, int) and abs(value) > 2**53:
            raise FederationError("the agreement has a whole number beyond 2^53")
        if depth > 12 or count + len(left) + len(inner) > _MOST_VALUES:
            raise FederationError(
                f"the agreement has more than {_MOST_VALUES} values, or is nested more than 12 deep"
            )
        left += [(each, depth + 1) for each in inner]


def _typed(found: Mapping[str, Any], key: str, kind: type) -> Any:
    value = found.get(key)
    if type(value) is not kind:
        raise FederationError(f"the agreement's {key} has type {type(value).__name__}, not {kind.__name__}")
    return value


def _listed(found: Mapping[str, Any], key: str, kind: type) -> tuple[Any, ...]:
    value = _typed(found, key, list)
    if any(type(each) is not kind for each in value):
        raise FederationError(f"the agreement's {key} are not all of type {kind.__name__}")
    return tuple(value)


class PartyData:
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

    def rows(self) -> np.ndarray:
        """Each record as a number, for the ledger (`data.hashing`)."""
        return data.hash_records(self.path) if self.table is None else data.hash_table(self.table)

    def encode(self, agreement: Agreement, *, empty: bool = False) -> tuple[np.ndarray, np.ndarray]:
        if self.table is None or agreement.schema is None:
            if self.table is not None or agreement.schema is not None:
                wanted = "arrays (.npz)" if agreement.schema is None else "a table (.csv or .parquet)"
                raise DataError(f"{self.name!r}: the federation trains on {wanted}; give such a file")
            labels = "ignore" if empty else "required"
            found = data.read_arrays(self.path, classes=() if empty else agreement.classes, labels=labels)
        else:
            schema = data.Schema.from_dict(agreement.schema)
            if self.label and self.label != schema.label.column:
                raise DataError(
                    f"--label {self.label!r}, but the federation predicts {schema.label.column!r}; make them agree"
                )
            table = self.table[:0] if empty else self.table
            found = schema.encode(table, agreement.spec.data.encoding, agreement.spec.data.features)
        if empty:
            return found.x[:0], np.zeros(0, np.int32)
        if found.y is None:
            raise DataError(f"{self.name!r} has no labels")
        return found.x, found.y


def _neighbours_words(adjacency: str) -> str:
    return (
        f"privacy.adjacency={adjacency!r}: every party's record count is shown to all, so neighbours must have "
        "equal counts; use 'zero-out' or 'replace-one'"
    )


def federated_spec(spec: Spec, num_clients: int, name: str) -> Spec:
    """The spec as a federation runs it: no path of anybody's machine, noise from the system unless a test asks for
    the seed's, sums by the real protocol wherever the spec wants them aggregated, neighbours named."""
    adjacency = "zero-out" if spec.privacy.adjacency == "auto" else spec.privacy.adjacency
    if adjacency not in NEIGHBOURS:
        raise SpecError(_neighbours_words(adjacency))
    if spec.num_clients not in (0, num_clients):
        raise SpecError(
            f"num_clients={spec.num_clients}, but the federation has {num_clients} parties; set it to "
            f"{num_clients} or, with data.partition='column', to 0"
        )
    if spec.federation.dropout:
        raise SpecError("federation.dropout is for simulations: in a federation clients are lost by themselves")
    if math.isinf(spec.privacy.epsilon):
        raise SpecError("privacy.epsilon=inf is no number to agree on; for no noise set privacy.noise='none'")
    if spec.method.endswith(".py"):  # its content is what parties approve, not a path of the server's machine
        options = {f"method_options.{key}": value for key, value in spec.method_options.items()}
        spec = spec.with_values({"method": approve(spec.method), **options})
    values: dict[str, Any] = {
        "num_clients": num_clients,
        "privacy.adjacency": adjacency,
        "randomness": "seeded" if spec.randomness == "seeded" else "os",
        "secagg.mode": "off" if spec.aggregation == "off" else "real",
        "privacy.colluders": default_colluders(spec.cohort_size)
        if spec.privacy.colluders < 0
        else spec.privacy.colluders,
        "data.name": name,
        "compare": False,
    }
    files = ("path", "test_path", "test_public", "id", "label", "schema")
    for key in (*files, "partition", "column", "split", "records_per_client"):
        values[f"data.{key}"] = Spec.default(f"data.{key}")
    return spec.with_values(values)


def least_clients(spec: Spec) -> int:
    """Answers without which a round is not used."""
    least = min(spec.federation.min_clients, spec.cohort_size)
    if spec.aggregation == "off":
        return least
    majority = (spec.cohort_size + spec.colluders) // 2 + 1
    return max(least, 2, spec.colluders + 2, spec.secagg.threshold or majority)


def default_colluders(cohort_size: int) -> int:
    """Colluders that a federation allows for unless its spec says otherwise: a third of a cohort. Of two parties
    either has the other's upload from the sum and its own: no protocol helps there."""
    return -(-cohort_size // 3) if cohort_size > 2 else 0


def collusion_notes(spec: Spec) -> tuple[str, str]:
    """Against whom sums are safe, in words, and a warning where that is less than it could be."""
    if spec.aggregation == "off":
        return "", ""
    words = (
        f"sums are safe from a server that colludes with up to {spec.colluders} of the {spec.cohort_size} parties "
        f"of a round; {least_clients(spec)} of them must answer"
    )
    if spec.cohort_size < spec.num_clients:
        words += "; who meets in a round follows from the seed, which the server chose"
    if spec.colluders >= max(default_colluders(spec.cohort_size), 1):
        return words, ""
    together = f"the server and {spec.colluders + 1} of the parties together can read the others' uploads"
    if spec.cohort_size == 2:
        return words, f"{together}: two parties cannot be safe from each other"
    return (
        words,
        f"{together}; leave privacy.colluders out for a third of a cohort, {default_colluders(spec.cohort_size)}",
    )


def largest_norm(spec: Spec, dimension: int) -> float:
    """The radius of the ball that no honest upload leaves."""
    return spec.federation.max_norm or clipping.REACH * math.sqrt(dimension)


def simulation(experiment: build.Experiment) -> Simulation:
    """The engine whose functions a member of the federation runs."""
    return compiled.simulation(experiment)


def secagg_rules(experiment: build.Experiment) -> Rules | None:
    """The rules of secure aggregation; None: sums are in the open."""
    how = build.aggregation(experiment)
    if how is None:
        return None
    if 0 < how.neighbours <= how.colluders:
        raise SpecError(
            f"secagg.neighbours={how.neighbours} with privacy.colluders={how.colluders}: a server can look for an "
            "order of the ring that cuts a party off; take more neighbours than colluders, or 0 for all"
        )
    return Rules(
        how.how.modulus_bits,
        how.threshold,
        how.colluders,
        least_clients(experiment.spec),  # what the proof counts on, so that no party helps to open less
        how.neighbours,
    ).check()


# What the owner sees


def describe(agreement: Agreement, experiment: build.Experiment, name: str) -> list[tuple[str, str]]:
    """The agreement in plain words, for the owner of one party's data."""
    spec, number = agreement.spec, agreement.number(name)
    mine = [index for index, cohort in enumerate(experiment.cohorts) if number in cohort]
    rows = [
        ("method", f"{spec.method}, {spec.model.name} model of {experiment.num_params:,} numbers"),
        ("rounds", f"{len(experiment.cohorts)}, you take part in {len(mine)} of them"),
        ("in a round", f"{spec.local_steps} steps on batches of {spec.batch_size} ({spec.batch_sampling})"),
        ("your records", f"{agreement.sizes[number]:,}; this count is shown to everybody"),
        (
            "parties",
            ", ".join(f"{each} ({size:,})" for each, size in zip(agreement.names, agreement.sizes, strict=True)),
        ),
    ]
    if spec.aggregation == "off":
        leaves = (
            f"in each of your rounds {experiment.num_params:,} numbers with your noise, readable by the server"
        )
    else:
        leaves = (
            f"in each of your rounds {experiment.num_params:,} masked integers; the server learns the sum of at "
            f"least {least_clients(spec)} parties, nobody's alone"
        )
    rows.append(("what leaves", leaves))
    safe, warning = collusion_notes(spec)
    rows += [("collusion", safe)] * bool(safe) + [("WARNING", warning)] * bool(warning)
    rows.append(("your noise", _noise_words(agreement, experiment, number, mine)))
    shown = set()
    for row in experiment.accountant(agreement.may_lack).table():
        if row["adjacency"] != spec.adjacency or row["unit"].startswith("message"):
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
                f"{value} at δ = {row['delta']:g} ({row['adjacency']}) for one who sees {seen[row['view']]}"
                + f", {row['against']}" * bool(row["against"]),
            )
        )
        for what in row["not_covered"]:
            if ("not covered", what) not in rows:
                rows.append(("not covered", what))
    if spec.randomness == "seeded":
        rows.append(("WARNING", "a test: the noise comes from a public seed and protects nothing"))
    rows.append(("digest", agreement.digest))
    return rows


def _noise_words(agreement: Agreement, experiment: build.Experiment, number: int, mine: list[int]) -> str:
    if not mine:
        return "none: you take part in no round"
    releases = experiment.prepared.releases
    info = RoundInfo(mine[0], number, agreement.sizes[number], len(experiment.cohorts[mine[0]]))
    uplink = [release for release in releases(info) if release.channel == "uplink"]
    if not uplink or all(release.noise_std == 0 for release in uplink):
        return "NONE: the uploads are not protected"
    first = uplink[0]
    source = "the operating system" if agreement.spec.randomness == "os" else "a public seed"
    return (
        f"Gaussian, std {first.noise_std:.4g} against a sensitivity of {first.sensitivity:.4g} "
        f"({first.source}), drawn on this machine from {source}"
    )


# Approval


def approved_digest(folder: Path) -> str | None:
    """The digest the owner approved, or None."""
    path = folder / "approved.json"
    if not path.is_file():
        return None
    advice = "delete it to be asked again"
    found = read_checked(path, advice, old=("digest", "run", "approved", "how"))
    if not isinstance(found.get("digest"), str):
        raise DamagedFile(f"{str(path)!r} names no digest; {advice}")
    return str(found["digest"])


def record_approval(folder: Path, agreement: Agreement, how: str) -> None:
    """Write down that the owner approved this agreement."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"digest": agreement.digest, "run": agreement.run, "approved": at, "how": how}
    write_checked(folder / "approved.json", content)
