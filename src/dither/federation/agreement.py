"""What everybody agrees on before a run, its digest, and the owner's approval.

An agreement holds the complete spec, how a table becomes features, and the public facts: who takes part and how
many records each party holds. From it a party computes its own noise, its rounds and the proven ε. The server
cannot change any of this without changing the digest, and a party answers only under the digest that its owner
approved.

`Agreement` is for training, `StatisticsTerms` for what is counted: for which purpose (a schema, statistics, an
evaluation) and at which ε. Counts leave as masked integers where the agreement sums securely; names of categories
leave as a list, which the noise on their counts covers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_origin, get_type_hints

import jax
import numpy as np

from dither import data, methods, models
from dither.accounting.accountant import Accountant
from dither.errors import DamagedFile, DataError, FederationError, SpecError
from dither.experiment import build, counting
from dither.experiment.counting import PURPOSES
from dither.experiment.folder import read_checked, write_checked
from dither.federation.keys import canonical
from dither.privacy import clipping
from dither.privacy.discrete import Words
from dither.secagg.graph import Rules
from dither.simulation.arrays import Problem
from dither.spec import MODELS, Spec, code, method_available, model_file
from dither.types import ADVERSARIES, PrivacyPlan, Release, RoundInfo, epsilon_text

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
MODULUS_BITS = 64  # of statistics: counts reach 2^31 records times 2^16 units
NEIGHBOURS = ("zero-out", "replace-one")  # under add/remove the counts, which all parties see, would tell

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

# What the owner sees: what is done, what leaves, what it costs.
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Terms:
    """What every agreement has: parties, a spec, and a digest that changes with any of it."""

    file: ClassVar[str]  # its name in the folder of a run
    purpose: ClassVar[str]  # of statistics; empty for training

    federation: str
    run: str
    spec: Spec
    names: tuple[str, ...]  # the parties; a client's number is its place here
    sizes: tuple[int, ...]  # records of each party that count

    # To and from JSON

    def to_dict(self) -> dict[str, Any]:
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {"format": FORMAT, **plain, "spec": self.spec.to_dict()}

    @classmethod
    def from_dict(cls, received: Mapping[str, Any]) -> Self:
        """An agreement from JSON that anybody may have written. Nothing it names is opened, imported or allocated
        before all of it is known to be in bounds."""
        check_json(received)
        version = received.get("format")
        require(version == FORMAT, f"has format {version!r}; this Dither reads {FORMAT}")
        kinds = get_type_hints(cls)
        parts = {
            each.name: _read_field(received.get(each.name), each.name, kinds[each.name]) for each in fields(cls)
        }
        return cls(**parts).check()

    @classmethod
    def load(cls, folder: Path, advice: str) -> Self | None:
        """The agreement in the folder of a run; None if there is no file."""
        path, keys = folder / cls.file, ("format", *(each.name for each in fields(cls)))
        try:
            return cls.from_dict(read_checked(path, advice, old=keys)) if path.is_file() else None
        except (
            FederationError,
            SpecError,
            DataError,
        ) as error:  # a file that is not approved now, another version
            raise FederationError(f"{str(path)!r}: {error}") from None

    def save(self, folder: Path) -> None:
        write_checked(folder / self.file, self.to_dict())

    def check(self) -> Self:
        """Itself, or an error if the parts do not fit together."""
        parts = f"{len(self.names)} parties, {len(self.sizes)} sizes and num_clients={self.spec.num_clients}"
        require(len(self.names) == len(self.sizes) == self.spec.num_clients, f"has {parts}")
        require(len(set(self.names)) == len(self.names), "names a party twice")
        empty = [name for name, size in zip(self.names, self.sizes, strict=True) if size < 1]
        if empty:
            raise FederationError(f"no records: {', '.join(empty)}; leave such parties out with --without")
        require(max(self.sizes) < 2**31, f"has a party of {max(self.sizes)} records: below 2^31 is possible")
        plain = self.run.isascii() and self.run.isalnum() and len(self.run) <= 64
        require(plain, f"has run {self.run[:80]!r}; use up to 64 letters and digits")
        return self

    # What follows from them

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return digest_of(self.to_dict())

    def number(self, name: str) -> int:
        """A party's number among the clients."""
        if name not in self.names:
            raise FederationError(f"{name!r} is not among the parties of this run: {', '.join(self.names)}")
        return self.names.index(name)

    @property
    def least(self) -> int:
        """Answers without which a round is not used."""
        return build.least_clients(self.spec)

    def counted(self, records: int) -> int:
        """How many of a party's records this agreement is about."""
        return held_out_sizes(self.spec, records)[0]

    def describe(self, name: str, experiment: build.Experiment | None = None) -> list[tuple[str, str]]:
        """The agreement in plain words, for the owner of one party's data."""
        number = self.number(name)
        parties = ", ".join(f"{each} ({size:,})" for each, size in zip(self.names, self.sizes, strict=True))
        records = f"{self.sizes[number]:,}; this count is shown to everybody"
        safe, warning = collusion_notes(self.spec)
        what, leaves, cost = self._described(number, experiment)
        rows = [*what, ("your records", records), ("parties", parties), *leaves]
        rows += [("collusion", safe)] * bool(safe) + [("WARNING", warning)] * bool(warning) + cost
        if self.spec.randomness == "seeded":
            rows.append(("WARNING", "a test: the noise comes from a public seed and protects nothing"))
        return [*rows, ("digest", self.digest)]

    def _described(self, number: int, experiment: build.Experiment | None) -> tuple[Rows, Rows, Rows]:
        """What is done, what leaves the party, and what it costs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Agreement(Terms):
    """The agreement of one run."""

    file, purpose = "terms.json", ""

    schema: dict[str, Any] | None  # how a table becomes features; None: arrays are used as they are
    classes: tuple[str, ...]
    num_features: int
    image_shape: tuple[int, ...]

    def check(self) -> Self:
        super().check()
        adjacency = self.spec.privacy.adjacency
        require(adjacency in NEIGHBOURS, f"has {_unequal_counts(adjacency)}")
        self._check_numbers()
        self._check_size()
        return self

    def _check_numbers(self) -> None:
        """`FederationError` if a number of the spec, or a count, is out of bounds."""
        for key, listed in self.spec.flat().items():
            for value in listed if isinstance(listed, list) else [listed]:
                if isinstance(value, int):
                    most = _MOST.get(key, 2**32)
                    require(value <= most, f"has {key}={value}: at most {most} is possible")
                elif isinstance(value, float) and value:
                    bounds = f"0 and {_LEAST_REAL:g} to {_MOST_REAL:g} are possible"
                    require(_LEAST_REAL <= abs(value) <= _MOST_REAL, f"has {key}={value:g}: {bounds}")
        classes, sides = len(self.classes), self.image_shape
        label = {} if self.schema is None else self.schema.get("label")
        regression = isinstance(label, dict) and "bounds" in label
        distinct = 2 <= classes <= _MOST_CLASSES and len(set(self.classes)) == classes
        possible = classes == 0 if regression else distinct
        require(
            possible, f"has {classes} classes: 2 to {_MOST_CLASSES} are possible, each once, 0 for a regression"
        )
        possible = 1 <= self.num_features <= _MOST_PARAMETERS
        require(possible, f"has {self.num_features} features: 1 to {_MOST_PARAMETERS} are possible")
        fits = not sides or (len(sides) <= 3 and min(sides) >= 1 and math.prod(sides) == self.num_features)
        require(fits, f"has pictures of {sides[:4]} and {self.num_features} features")

    def _check_size(self) -> None:
        """`FederationError` if the agreement asks for more than a machine can give."""
        spec, widths = self.spec, self.spec.model.hidden
        widest = max(widths, default=0)
        small = len(widths) <= _MOST_LAYERS and widest <= _MOST_PARAMETERS
        require(small, f"has {len(widths)} hidden layers of up to {widest}: too large a model")
        parameters = models.count_params(jax.eval_shape(self.model().init, jax.random.key(0)))
        batch = max(self.sizes) if spec.batch_sampling in ("full", "poisson-full") else spec.batch_size
        # Coins, or the order of an epoch, are drawn for as many records as the largest party has.
        epochs = 2 + spec.local_steps // max(min(self.sizes) // max(spec.batch_size, 1), 1)
        draws = {"poisson": spec.local_steps, "shuffled": epochs, "disjoint": 1}.get(spec.batch_sampling, 0)
        for what, amount, limit in (
            ("parameters", parameters, _MOST_PARAMETERS),
            ("places in cohorts", spec.num_rounds * spec.cohort_size, 1e7),
            ("local steps", spec.num_rounds * spec.local_steps, 1e7),
            ("different targets", len(set(spec.privacy.epsilons)), 100),  # each is calibrated for
            ("records in a round", max(spec.local_steps * batch, draws * max(self.sizes)), 1e9),
            ("numbers in a batch's gradients", batch * parameters, 2.0**34),
            ("operations", spec.num_rounds * spec.local_steps * batch * parameters, _MOST_WORK),
        ):
            require(amount <= limit, f"asks for {amount:.3g} {what}: at most {limit:.3g} are possible")

    def model(self) -> models.Model:
        return models.from_spec(self.spec.model, self.num_features, len(self.classes), self.image_shape)

    @property
    def may_lack(self) -> int:
        """How many of a cohort may lack in a sum that is used: proofs count on none of their noise."""
        return max(self.spec.cohort_size - self.least, 0)

    def lacking(self, plan: PrivacyPlan) -> int:
        """How many others' noise no proof of a party counts on. Where integers are summed that carry their noise,
        the party itself sees to it that enough others are in the sum. In the open no other's noise hides an
        upload. Nor in a sum of floats: a server that broadcasts 2^40 to the others rounds all their noise away."""
        return self.may_lack if sums_integers(plan) else self.spec.cohort_size - 1

    def accountant(self, experiment: build.Experiment) -> Accountant:
        """The ε of a party as its ledger charges it: for one record, also where whole clients are protected."""
        accountant = experiment.accountant(self.lacking(experiment.plan))
        if experiment.plan.per_client:
            return Accountant(accountant.plan, accountant.ledger_releases)
        return accountant

    def experiment(self) -> build.Experiment:
        """The method made ready, by public facts alone: no record is needed to know what runs."""
        if methods.method(self.spec.method).pilot_metric and not self.spec.method_options["param_clip"]:
            raise SpecError(
                "method_options.param_clip=0 trains a pilot on everybody's data; give it a public value"
            )
        schema = None if self.schema is None else data.Schema.from_dict(self.schema)
        x = np.zeros((0, self.num_features), np.float32)
        y = np.zeros(0, np.int32 if self.classes else np.float32)
        dataset = data.Dataset(
            self.spec.data.name,
            *(x, y, x, y),
            self.classes,
            feature_names=tuple(f"x{index}" for index in range(self.num_features)),
            image_shape=self.image_shape,
            schema=schema,
            label_bounds=schema.label.bounds if schema else None,
            notes=schema.coverage_notes() if schema else (),
            covered=schema is not None and schema.covered,
        )
        sizes, none = np.array(self.sizes, np.int32), np.zeros(0)
        partition = data.ClientPartition(np.zeros(0, np.int32), np.zeros_like(sizes), sizes, self.names)
        problem = Problem(x, y, [partition], [none], [none])
        return build.assemble(self.spec, dataset, partition, problem, missing=self.may_lack, federated=True)

    def encode(
        self, source: PartyData, *, empty: bool = False, held_out: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """A party's training records as arrays, by the schema, or those that are held out of training by their row
        numbers; with `empty` none of them, and no value is looked at."""
        x, y = source.encode(self, empty=empty)
        if x.shape[1] != self.num_features:
            raise DataError(
                f"{source.name!r} has {x.shape[1]} features a record, the federation's model takes "
                f"{self.num_features}; bring the columns into the form of the schema"
            )
        least = 0 if self.schema is None or "privacy" not in self.schema else -1  # a blank
        if len(y) and (y.min() < least or y.max() > (len(self.classes) - 1 if self.classes else 1)):
            raise DataError(f"{source.name!r} has labels beyond the {len(self.classes)} classes of the federation")
        # Of all records, so that no refusal of an evaluation tells of those that are held out.
        if held_out or (self.spec.data.split == "rows" and not empty):
            rows = held_out_rows(self.spec, len(y))[held_out]
            x, y = x[rows], y[rows]
        return x, y

    def _described(self, number: int, experiment: build.Experiment | None) -> tuple[Rows, Rows, Rows]:
        spec = self.spec
        if experiment is None:
            raise FederationError("an agreement is described by what it runs")
        mine = [index for index, cohort in enumerate(experiment.cohorts) if number in cohort]
        what = [
            ("method", f"{spec.method}, {spec.model.name} model of {experiment.num_params:,} numbers"),
            ("rounds", f"{len(experiment.cohorts)}, you take part in {len(mine)} of them"),
            ("in a round", f"{spec.local_steps} steps on batches of {spec.batch_size} ({spec.batch_sampling})"),
        ]
        # What the server passes to files of the owner's.
        own = {"method": code.is_approved(spec.method) and spec.method_options, "model": spec.model.options}
        what += [(f"{name} options", json.dumps(dict(options))) for name, options in own.items() if options]
        leaves: Rows = []
        if spec.data.transform != "none":
            rule = "computed here from each record by a fixed public rule"
            leaves.append(("features", f"{spec.data.transform}, {rule}"))
        noise = self._noise_words(experiment, number, mine)
        carried = "as they are" if noise.startswith("NONE") else "with your noise"
        sent = f"numbers {carried}, readable by the server"
        if spec.aggregation != "off":
            least = build.least_clients(spec)
            sent = f"masked integers; the server learns sums of at least {least} parties, nobody's alone"
        leaves.append(("what leaves", f"in each of your rounds {experiment.num_params:,} {sent}"))
        cost = [("your noise", noise)]
        accountant = self.accountant(experiment)
        if spec.privacy.epsilons:
            accountant = accountant.of([number])
            weight = float(experiment.plan.hyper["client_weight"][number])
            target = f"ε = {spec.privacy.epsilons[number]:.15g}; your weight is {weight:.3g} (mean 1)"
            cost.append(("your target", target))
        shown = set()
        for row in accountant.table():
            value = f"at most {epsilon_text(row.value)}" if np.isfinite(row.value) else "∞ (no proof)"
            if row.adjacency != spec.adjacency or row.unit.startswith("message") or (value, row.view) in shown:
                continue
            shown.add((value, row.view))
            against = ADVERSARIES[row.view] + f", {row.against}" * bool(row.against)
            proven = f"{value} at δ = {row.delta:g} ({row.adjacency}) against {against}"
            cost.append((f"{'assumed' if row.assumed else 'proven'} ε", proven))
            cost += [gap for gap in (("not covered", each) for each in row.not_covered) if gap not in cost]
        return what, leaves, cost

    def _noise_words(self, experiment: build.Experiment, number: int, mine: list[int]) -> str:
        if not mine:
            return "none: you take part in no round"
        info = RoundInfo(mine[0], number, self.sizes[number], len(experiment.cohorts[mine[0]]))
        uplink = [release for release in experiment.prepared.releases(info) if release.channel == "uplink"]
        if not uplink or all(release.noise_std == 0 for release in uplink):
            return "NONE: the uploads are not protected"
        first = uplink[0]
        source = "the operating system" if self.spec.randomness == "os" else "a public seed"
        return (
            f"Gaussian, std {first.noise_std:.4g} against a sensitivity of {first.sensitivity:.4g} "
            f"({first.source}), drawn on this machine from {source}"
        )


@dataclass(frozen=True)
class StatisticsTerms(Terms):
    """What parties agree to have counted."""

    file = "statistics.json"

    purpose: str  # type: ignore[misc]  # here it is part of the agreement
    epsilon: float
    delta: float
    trained: Agreement | None = None  # evaluation: what the model was trained under

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "trained": None if self.trained is None else self.trained.to_dict()}

    def check(self) -> Self:
        super().check()
        counting.check_budget(self.epsilon, self.delta)
        require(self.purpose in PURPOSES, f"counts for {self.purpose!r}; known: {', '.join(PURPOSES)}")
        evaluated = (self.purpose == "evaluation") == (self.trained is not None)
        require(evaluated, "evaluates no model, or one too many")
        require(self.spec.num_clients == self.spec.cohort_size, "does not ask each of its parties once")
        return self

    @property
    def least(self) -> int:
        return len(self.names)

    def counted(self, records: int) -> int:
        return records if self.trained is None else held_out_sizes(self.trained.spec, records)[1]

    @property
    def rules(self) -> Rules | None:
        """Of secure aggregation: every party must answer, or the sum is not opened. None: sums are in the open."""
        if self.spec.aggregation == "off":
            return None
        everyone = max(len(self.names), build.least_clients(self.spec))
        return _connected(Rules(MODULUS_BITS, 0, self.spec.colluders, everyone, self.spec.secagg.neighbours))

    @property
    def lists_names(self) -> bool:
        return self.purpose != "evaluation"

    @property
    def release(self) -> Release:
        """What all answers together reveal, as a ledger is charged with it."""
        return counting.release(self.epsilon, self.delta, lists_names=self.lists_names)

    def words(self, client: int) -> Words:
        """Where a party's noise comes from."""
        return counting.noise_words(self.spec.randomness, self.spec.seed, self.purpose, client)

    def _described(self, number: int, experiment: object) -> tuple[Rows, Rows, Rows]:
        what = {
            "schema": "what the columns hold, bounds, scales and categories, for a schema",
            "statistics": "counts, means, quantiles and categories of the columns",
            "evaluation": "how well the trained model predicts your records that training left out",
        }
        counts = "counts with your noise, readable by the server"
        if self.rules is not None:
            counts = "masked counts with your noise; the server learns the sum over all parties"
        leaves = [("what leaves", counts)]
        if self.lists_names:
            leaves.append(
                ("also", "the names of your columns, and of categories that enough of your records have")
            )
        proven = f"at most {epsilon_text(self.epsilon)} at δ = {self.delta:g} (zero-out) against anybody"
        asked = self.spec.with_values({"privacy.delta": self.delta})
        warnings = [("WARNING", text) for text in build.large_delta(asked, self.sizes[number], federated=True)]
        return [("counted", what[self.purpose])], leaves, [("proven ε", proven), *warnings]


def digest_of(saved: Mapping[str, Any]) -> str:
    """The digest of an agreement as it was saved: the files that it names need not be approved here."""
    return hashlib.sha256(canonical(saved)).hexdigest()


def sums_integers(plan: PrivacyPlan) -> bool:
    """Whether secure aggregation sums integers with noise that no broadcast can take from them."""
    return plan.aggregation != "off" and (plan.exact_sums or plan.discrete_noise)


def held_out_rows(spec: Spec, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of a party's records (training, held out): all are for training unless data.split is 'rows'."""
    return data.row_split(count, _held_out(spec), spec.seed)


def held_out_sizes(spec: Spec, count: int) -> tuple[int, int]:
    """How many rows these are."""
    return data.row_split_sizes(count, _held_out(spec))


def _held_out(spec: Spec) -> float:
    return spec.data.test_fraction if spec.data.split == "rows" else 0.0


def require(good: bool, otherwise: str) -> None:
    if not good:
        raise FederationError(f"the agreement {otherwise}")


def _require_model(received: object) -> None:
    """`FederationError` unless the model is one of Dither's, or its file was approved here."""
    name = received.get("name") if isinstance(received, dict) else None
    named = model_file(name) if isinstance(name, str) else None
    good = name in MODELS or (named is not None and code.is_approved(named[0]))
    weights = received.get("weights", "") if isinstance(received, dict) else ""
    good = good and (weights == "" or code.is_approved(weights))
    name = name if weights == "" else f"{name} with {weights}"
    require(good, f"names model {name!r}, which is not one of Dither's; approve your own file with --model FILE")


def check_json(received: object) -> None:
    """`FederationError` unless this is plain JSON of moderate size, whose numbers are finite."""
    left, count = [(received, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        inner: list[Any] = []
        if isinstance(value, dict):
            inner = [*value, *value.values()]
        elif isinstance(value, list):
            inner = value
        elif isinstance(value, str):
            require(len(value) <= _MOST_TEXT, f"has a text of {len(value)} characters: at most {_MOST_TEXT}")
        elif isinstance(value, float):
            require(math.isfinite(value), f"has {value}, which is not a finite number")
        elif isinstance(value, int):
            require(abs(value) <= 2**53, "has a whole number beyond 2^53")
        moderate = depth <= 12 and count + len(left) + len(inner) <= _MOST_VALUES
        require(moderate, f"has more than {_MOST_VALUES} values, or is nested more than 12 deep")
        left += [(each, depth + 1) for each in inner]


def _read_field(value: Any, key: str, kind: Any) -> Any:
    """A field of an agreement, if what was received for it has the type that the agreement declares."""
    if kind is Spec:
        require(type(value) is dict, f"has a {key} that is not a table")
        name, advice = value.get("method"), "approve your own file with --method FILE"
        require(method_available(name), f"names method {name!r}, which is not one of Dither's; {advice}")
        _require_model(value.get("model"))
        return Spec.from_any(value)
    if get_origin(kind) is UnionType:
        if value is None:
            return None
        kind = get_args(kind)[0]
    expected = dict if kind is Agreement else list if get_origin(kind) is tuple else get_origin(kind) or kind
    require(type(value) is expected, f"has a {key} of type {type(value).__name__}, not {expected.__name__}")
    if kind is Agreement:
        return Agreement.from_dict(value)
    if expected is list:
        inner = get_args(kind)[0]
        require(all(type(each) is inner for each in value), f"has {key} that are not all of type {inner.__name__}")
        return tuple(value)
    return value


class PartyData:
    """A party's file: read once, encoded when the schema is known."""

    def __init__(self, path: str | Path, label: str = "") -> None:
        self.path, self.label = Path(path), label
        self.name, self._content = self.path.name, data.file_digest(path)
        if self.path.suffix.lower() == ".npz":
            if label:
                raise DataError("--label is for tables; a .npz file holds its labels in 'y'")
            self.table = None
            encoded = data.read_arrays(self.path, label=data.Label("y"), labels="ignore")
            self.count = len(encoded.x)
            return
        self.table = data.read_table(self.path)
        self.count = len(self.table)
        columns = [str(column) for column in self.table.columns]
        if label and label not in columns:
            from dither.errors import did_you_mean

            raise DataError(f"label column {label!r} is not in {self.name!r}{did_you_mean(label, columns)}")

    def frame(self) -> pd.DataFrame:
        """The table, for what is counted in it."""
        if self.table is None:
            raise FederationError(f"{self.name!r} holds arrays; statistics need a table")
        return self.table

    def check_unchanged(self) -> None:
        """`DataError` if the file is not the one that was read."""
        data.check_unchanged(self.path, self._content)

    def rows(self) -> data.RecordHashes:
        """The hashes of all records, for the ledger (`data.hashing`)."""
        return data.hash_records(self.path) if self.table is None else data.hash_table(self.table)

    def encode(self, agreement: Agreement, *, empty: bool = False) -> tuple[np.ndarray, np.ndarray]:
        if self.table is None or agreement.schema is None:
            if self.table is not None or agreement.schema is not None:
                wanted = "arrays (.npz)" if agreement.schema is None else "a table (.csv or .parquet)"
                raise DataError(f"{self.name!r}: the federation trains on {wanted}; give such a file")
            labels = "ignore" if empty else "required"
            encoded = data.read_arrays(self.path, label=data.Label("y", agreement.classes), labels=labels)
            self.check_unchanged()
        else:
            schema = data.Schema.from_dict(agreement.schema)
            if self.label and self.label != schema.label.column:
                raise DataError(
                    f"--label {self.label!r}, but the federation predicts {schema.label.column!r}; make them agree"
                )
            table = self.table[:0] if empty else self.table
            encoded = schema.encode(table, agreement.spec.data.encoding, agreement.spec.data.features)
        name = agreement.spec.data.transform
        if empty:
            return data.transform(encoded.x[:0], name), np.zeros(0, np.int32 if agreement.classes else np.float32)
        if encoded.y is None:
            raise DataError(f"{self.name!r} has no labels")
        return data.transform(encoded.x, name), encoded.y


def _unequal_counts(adjacency: str) -> str:
    return (
        f"privacy.adjacency={adjacency!r}: every party's record count is shown to all, so neighbours must have "
        "equal counts; use 'zero-out' or 'replace-one'"
    )


def federated_spec(spec: Spec, num_clients: int, name: str) -> Spec:
    """The spec as a federation runs it: no path of anybody's machine, noise from the system unless a test asks for
    the seed's, sums by the real protocol wherever the spec wants them aggregated, neighbours named."""
    adjacency = "zero-out" if spec.privacy.adjacency == "auto" else spec.privacy.adjacency
    if adjacency not in NEIGHBOURS:
        raise SpecError(_unequal_counts(adjacency))
    if spec.num_clients not in (0, num_clients):
        raise SpecError(
            f"num_clients={spec.num_clients}, but the federation has {num_clients} parties; set it to "
            f"{num_clients} or, with data.partition='column', to 0"
        )
    if spec.federation.dropout:
        raise SpecError("federation.dropout is for simulations; in a federation, clients drop out by themselves")
    if math.isinf(spec.privacy.epsilon):
        raise SpecError("privacy.epsilon=inf cannot be agreed on; for no noise set privacy.noise='none'")
    if spec.method.endswith(".py"):  # its content is what parties approve, not a path of the server's machine
        spec = replace(spec, method=code.approve(spec.method))
    spec = _approved_model(spec)
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
    files = ("path", "public", "test_path", "test_public", "id", "label", "schema")
    for key in (*files, "partition", "column", "split", "records_per_client"):
        values[f"data.{key}"] = Spec.default(f"data.{key}")
    if spec.data.split == "rows":  # by a public rule, which every party can follow by itself
        values["data.split"] = "rows"
    return spec.with_values(values)


def _approved_model(spec: Spec) -> Spec:
    """The spec with the file of its model named by content, as parties approve it."""
    if spec.model.weights and not code.is_approved(spec.model.weights):
        spec = replace(spec, model=replace(spec.model, weights=code.approve(spec.model.weights)))
    if spec.model.name in MODELS:
        return spec
    named = model_file(spec.model.name)
    if named is None:
        raise SpecError("a federation needs its model as a file that parties can read: 'my_model.py:factory'")
    file, factory = named
    file = file if code.is_approved(file) else code.approve(file)
    return replace(spec, model=replace(spec.model, name=f"{file}:{factory}"))


def default_colluders(cohort_size: int) -> int:
    """Colluders that a federation allows for unless its spec says otherwise: a third of a cohort. Of two parties
    either has the other's upload from the sum and its own: no protocol helps there."""
    return -(-cohort_size // 3) if cohort_size > 2 else 0


def collusion_notes(spec: Spec) -> tuple[str, str]:
    """Against whom sums are safe, in words, and a warning if that is less than it could be."""
    if spec.aggregation == "off":
        return "", ""
    words = (
        f"sums are safe from a server that colludes with up to {spec.colluders} of the {spec.cohort_size} "
        f"parties "
        f"of a round; {build.least_clients(spec)} of them must answer"
    )
    everyone = default_colluders(spec.num_clients)
    if spec.colluders >= max(default_colluders(spec.cohort_size), 1):
        if spec.cohort_size == spec.num_clients or spec.colluders >= everyone:
            return words, ""
        return (
            words,
            "the seed, which the server chose, decides who meets in a round: if a third of all parties, "
            f"{everyone}, collude with it, they can be most of your cohorts; let all take part in every round",
        )
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


def secagg_rules(experiment: build.Experiment) -> Rules | None:
    """The rules of secure aggregation; None: sums are in the open."""
    aggregation = build.aggregation(experiment)
    if aggregation is None:
        return None
    # What the proof counts on, so that no party helps to open less.
    return _connected(aggregation.rules._replace(min_clients=build.least_clients(experiment.spec)))


def _connected(rules: Rules) -> Rules:
    """The rules, if no order of the ring can cut an honest party off."""
    if 0 < rules.neighbours <= rules.colluders:
        raise SpecError(
            f"secagg.neighbours={rules.neighbours} with privacy.colluders={rules.colluders}: a server "
            "can look for an order of the ring that cuts a party off; take more neighbours than "
            "colluders, or 0 for all"
        )
    return rules.check()


# Approval


def _approval_file(folder: Path, purpose: str) -> Path:
    return folder / (f"approved-{purpose}.json" if purpose else "approved.json")


def approved_digest(folder: Path, purpose: str = "") -> str | None:
    """The digest the owner approved last, for training or for the `purpose` of statistics, or None."""
    return next(iter(_approved(folder, purpose)), None)


def is_approved(folder: Path, terms: Terms) -> bool:
    """Whether the owner has approved this agreement, then or now: an older run may go on after a newer one."""
    return terms.digest in _approved(folder, terms.purpose)


def _approved(folder: Path, purpose: str) -> list[str]:
    """All digests the owner approved, the newest first."""
    path = _approval_file(folder, purpose)
    if not path.is_file():
        return []
    advice = "delete it to be asked again"
    saved = read_checked(path, advice, old=("digest", "run", "approved", "how"))
    if not isinstance(saved.get("digest"), str):
        raise DamagedFile(f"{str(path)!r} names no digest; {advice}")
    return [saved["digest"], *saved.get("earlier", ())]


def record_approval(folder: Path, terms: Terms, answer: str) -> None:
    """Write down that the owner approved this agreement."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    earlier = [digest for digest in _approved(folder, terms.purpose) if digest != terms.digest]
    content = {"digest": terms.digest, "run": terms.run, "approved": at, "how": answer, "earlier": earlier}
    write_checked(_approval_file(folder, terms.purpose), content)
