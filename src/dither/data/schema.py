"""The schema: everything the encoding of a table depends on, fixed before any record is read.

Bounds, categories and imputation values taken from private records leak information, so a schema says where its
values came from: "public", "private" or "read from data". A private value was estimated with noise; `[privacy]`
says at which ε, which adds to that of every run. A schema with any value that was read from the records, or that
does not say, leaves the preprocessing outside the privacy claim (`Schema.read_from_data`). A drafted schema has
only such values: the owner of the records replaces them by what is publicly known.

In `schema.toml`:

    name = "patients"
    origin = "public"              # of every value below that does not say otherwise
    [label]
    column = "outcome"
    classes = ["alive", "dead"]    # or, for regression, bounds = [0, 100]: labels outside are clamped
    [[columns]]
    name = "age"
    type = "numeric"
    bounds = [0, 120]              # values outside are clamped
    standard = [40, 20]            # centre and scale, for encoding = "standard"; by default from the bounds
    standard_from = "read from data"    # where this one value came from
    missing = 40                   # what an empty cell stands for; by default the centre
    [[columns]]
    name = "sex"
    type = "categorical"
    categories = ["female", "male"]     # everything else goes to one more column, "(other)"
    missing = "female"             # by default "(other)"
    [privacy]                      # where a value is "private": what `dither data schema --private` spent
    epsilon = 0.1
    delta = 1e-5
    charge = "schema-5d1f..."      # its name in the ledger
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dither.data.tables import StrPath
from dither.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

# What an empty cell looks like. "None" is not among them: it is a category in many tables.
MISSING = ("", "?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL")
# What else stands for one among numbers. In a column of categories these may be categories ("-": Rh negative).
MISSING_NUMBER = (*MISSING, "-", "--", ".", "na", "n.a.", "N.A.", "k.A.", "none", "None", "missing", "unknown")
_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0+")

PUBLIC = "public"
PRIVATE = "private"  # estimated with noise, at the ε that the schema states
READ_FROM_DATA = "read from data"
NOT_COVERED = "preprocessing not covered"  # how a note on such values begins
UNSTATED = "not stated"  # a file that does not say where a value came from: not covered
_ORIGINS = (PUBLIC, PRIVATE, READ_FROM_DATA, UNSTATED)
OTHER = "(other)"  # in brackets: "Other" is itself a category of Adult's race

_MEANINGS = {
    "classes_from": "classes",
    "bounds_from": "bounds",
    "standard_from": "centre and scale",
    "missing_from": "missing value",
    "categories_from": "categories",
}

ENCODINGS = ("minmax", "standard")
FEATURES = ("all", "categorical", "ordinal")
LABELS = ("required", "if present", "ignore")

LARGEST = 1e307  # of a bound: the distance of larger ones may be infinite

# A draft takes a label of more different whole numbers, or of more numbers with fractions, for regression.
MOST_WHOLE_CLASSES, MOST_FRACTIONAL_CLASSES = 64, 10


class Numeric(NamedTuple):
    """A column of numbers."""

    name: str
    bounds: tuple[float, float]
    standard: tuple[float, float]  # centre, scale
    missing: float
    bounds_from: str = PUBLIC
    standard_from: str = PUBLIC
    missing_from: str = PUBLIC

    @classmethod
    def with_bounds(cls, name: str, bounds: tuple[float, float], origin: str = PUBLIC) -> Numeric:
        """A column of which only the bounds are given: six units of scale wide, its centre for missing cells."""
        low, high = bounds
        centre, scale = (low + high) / 2, (high - low) / 6 if high > low else 1.0
        return cls(name, bounds, (centre, scale), centre, origin, origin, origin)

    def scaled(self, series: pd.Series, encoding: str) -> np.ndarray:
        """Imputed, clamped to the bounds, then scaled by the bounds to [0, 1], or by centre and scale."""
        # Nobody has looked at the cells of a private schema: one that is no number counts as missing.
        values = number_column(series, self.name, strict=self.bounds_from != PRIVATE)
        values = np.where(np.isnan(values), self.missing, values).clip(*self.bounds)
        if encoding == "standard":
            return (values - self.standard[0]) / self.standard[1]
        low, high = self.bounds
        return (values - low) / (high - low) if high > low else np.zeros_like(values)


class Categorical(NamedTuple):
    """A column of categories; all values that are not listed share one more category."""

    name: str
    categories: tuple[str, ...]
    missing: str
    categories_from: str = PUBLIC
    missing_from: str = PUBLIC

    def codes(self, series: pd.Series) -> np.ndarray:
        """0..len(categories); the last one is for every value that is not listed."""
        code_of = {category: code for code, category in enumerate(self.categories)}
        other = len(self.categories)
        raw, texts = factorize(series)
        translate = [code_of.get(value, other) for value in texts]
        codes: np.ndarray = np.array([*translate, code_of.get(self.missing, other)], dtype=np.int64)[raw]
        return codes


Column = Numeric | Categorical


class Label(NamedTuple):
    """The column to predict and its classes, in the order of their numbers; or, for regression, its bounds."""

    column: str
    classes: tuple[str, ...] = ()
    classes_from: str = PUBLIC
    bounds: tuple[float, float] | None = None
    bounds_from: str = PUBLIC


class Encoded(NamedTuple):
    """A table as arrays. `y` is None if the label column was absent or ignored."""

    x: np.ndarray  # float32 [rows, features]
    y: np.ndarray | None  # [rows]: int32 class numbers, or float32 labels scaled by their bounds to [0, 1]
    feature_names: tuple[str, ...]


class SchemaPrivacy(NamedTuple):
    """What the private values of a schema cost together, and the name of that charge in the ledger."""

    epsilon: float
    delta: float
    charge: str = ""


@dataclass(frozen=True)
class Schema:
    """The label and the feature columns of a table; see the module docstring for the file."""

    label: Label
    columns: tuple[Column, ...]
    name: str = ""
    privacy: SchemaPrivacy | None = None

    def __post_init__(self) -> None:
        _validate(self)

    # Files

    @classmethod
    def load(cls, path: StrPath) -> Schema:
        """Read a `schema.toml`."""
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"schema file {str(path)!r} not found; draft one with `dither data schema FILE`"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(f"schema file {str(path)!r} cannot be read: {error}") from None
        try:
            return cls.from_dict(content)
        except DataError as error:
            raise DataError(f"schema file {str(path)!r}: {error}") from None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Schema:
        """From the parsed TOML (or any mapping of that shape)."""
        _check_keys("the schema", content, ("label", "columns"), ("name", "origin", "privacy"))
        if not isinstance(content["label"], Mapping) or not isinstance(content["columns"], list):
            raise DataError("the schema needs a [label] table and [[columns]] tables")
        origin = content.get("origin", UNSTATED)
        _choice("origin of the schema", origin, _ORIGINS)
        label = _label_from_dict(content["label"], origin)
        columns = tuple(_column_from_dict(column, origin) for column in content["columns"])
        privacy = _privacy_from_dict(content["privacy"]) if "privacy" in content else None
        return cls(label=label, columns=columns, name=str(content.get("name", "")), privacy=privacy)

    def to_dict(self) -> dict[str, Any]:
        """The shape of the TOML file."""
        columns: list[dict[str, Any]] = []
        for column in self.columns:
            kind = "numeric" if isinstance(column, Numeric) else "categorical"
            written: dict[str, Any] = {"name": column.name, "type": kind}
            values = column._asdict()
            for key in values:
                if f"{key}_from" in values:  # each value with its origin below it
                    value = values[key]
                    written[key] = [_plain(item) for item in value] if isinstance(value, tuple) else _plain(value)
                    written[f"{key}_from"] = values[f"{key}_from"]
            columns.append(written)
        key = "classes" if self.label.bounds is None else "bounds"
        values = self.label._asdict()
        label = {"column": self.label.column, key: list(values[key]), f"{key}_from": values[f"{key}_from"]}
        privacy = {} if self.privacy is None else {"privacy": self.privacy._asdict()}
        return {"name": self.name, "label": label, "columns": columns, **privacy}

    def to_toml(self) -> str:
        """The text of a TOML file with every value and its origin."""
        return _toml(self.to_dict())

    def to_short_toml(self) -> str:
        """The same schema in as few keys as can say it."""
        content, origin = self.to_dict(), READ_FROM_DATA if self.read_from_data else PUBLIC
        if self.covered and PRIVATE in self._origins():
            origin = PRIVATE
        for part, column in ((content["label"], None), *zip(content["columns"], self.columns, strict=True)):
            for key in [key for key in part if f"{key}_from" in part]:
                if part[f"{key}_from"] == origin:
                    del part[f"{key}_from"]
            if isinstance(column, Numeric):
                plain = Numeric.with_bounds(column.name, column.bounds, column.bounds_from)
                for key in ("standard", "missing"):
                    if all(getattr(plain, each) == getattr(column, each) for each in (key, f"{key}_from")):
                        part.pop(key), part.pop(f"{key}_from", None)
            elif isinstance(column, Categorical) and column[2::2] == (OTHER, PUBLIC):
                part.pop("missing"), part.pop("missing_from", None)
        return _toml({"name": content.pop("name"), "origin": origin, **content})

    def save(self, path: StrPath, *, comments: Sequence[str] = ()) -> None:
        """Write `schema.toml` atomically, with a comment on each of its first lines."""
        lines = list(comments)
        if not self.covered:
            lines += [
                "These values were read from the records, which no ε covers. Replace each by one that is known",
                f'without looking at the records, or confirm that it is; then set origin = "{PUBLIC}".',
            ]
        elif self.privacy is not None:
            lines += [
                f"These values were estimated with noise at ε = {self.privacy.epsilon:.15g}, which the ledger has",
                "charged: it adds to the ε of every run.",
            ]
        head = "".join(f"# {' '.join(line.split())}\n" for line in lines) + "\n" * bool(lines)
        target = Path(path)
        partial = target.with_name(f"{target.name}.tmp")
        try:
            partial.write_text(head + self.to_short_toml(), encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            error.filename = error.filename or str(target)
            raise

    def digest(self) -> str:
        """SHA-256 of the content, whatever the layout of the file: equal digests encode alike."""
        content = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    # Privacy

    @property
    def read_from_data(self) -> tuple[str, ...]:
        """Every value that came from the records, or may have, such as "bounds of 'age'"."""
        return tuple(
            f"{_MEANINGS[key]} of {part[0]!r}"
            for part in (self.label, *self.columns)
            for key, value in part._asdict().items()
            if key in _MEANINGS and value not in (PUBLIC, PRIVATE)
        )

    @property
    def covered(self) -> bool:
        """Whether the encoding depends on public values, and on private ones whose ε is stated, only."""
        return not self.read_from_data

    def as_public(self) -> Schema:
        """The schema with every value declared public."""

        def declared(part: Any) -> Any:
            return part._replace(**{key: PUBLIC for key in part._asdict() if key in _MEANINGS})

        columns = tuple(map(declared, self.columns))
        return replace(self, label=declared(self.label), columns=columns, privacy=None)

    def coverage_notes(self) -> tuple[str, ...]:
        """The note to print beside an ε; () when every value is public."""
        values = self.read_from_data
        if not values and self.privacy is not None:
            epsilon, delta, _ = self.privacy
            cost = f"its ε = {epsilon:.15g} (δ = {delta:g}) adds to this one"
            return (f"the schema was estimated privately: {cost}",)
        if not values:
            return ()
        more = f" and {len(values) - 3} more values" if len(values) > 3 else ""
        listed = f"{', '.join(values[:3])}{more}"
        if READ_FROM_DATA in self._origins():
            return (f"{NOT_COVERED}: {listed} were read from the data",)
        return (
            f"{NOT_COVERED}: the schema does not say where {listed} came from; if they were chosen "
            f'without the records, add origin = "{PUBLIC}" at its top',
        )

    def _origins(self) -> set[str]:
        parts = (self.label, *self.columns)
        return {value for part in parts for key, value in part._asdict().items() if key in _MEANINGS}

    # Encoding

    def encode(
        self,
        frame: pd.DataFrame,
        encoding: str = "minmax",
        features: str = "all",
        *,
        labels: str = "required",
    ) -> Encoded:
        """The table as arrays.

        encoding  "minmax" scales numbers to [0, 1] by the bounds; "standard" by centre and scale
        features  "all"; "categorical" (those columns only, one-hot); "ordinal" (one feature per column,
                  categories as their number scaled to [0, 1])
        labels    "required", "if present" or "ignore"
        """
        _choice("encoding", encoding, ENCODINGS)
        _choice("features", features, FEATURES)
        _choice("labels", labels, LABELS)
        columns = [c for c in self.columns if features != "categorical" or isinstance(c, Categorical)]
        if not columns:
            raise DataError("features='categorical', but the schema has no categorical column; use features='all'")
        _need_columns(frame, [column.name for column in columns])
        names = self.feature_names(features)
        x = np.zeros((len(frame), len(names)), dtype=np.float32)
        rows = np.arange(len(frame))
        feature = 0
        for column in columns:
            if isinstance(column, Numeric):
                x[:, feature] = column.scaled(frame[column.name], encoding)
                feature += 1
            elif features == "ordinal":
                x[:, feature] = column.codes(frame[column.name]) / len(column.categories)
                feature += 1
            else:
                x[rows, feature + column.codes(frame[column.name])] = 1.0
                feature += len(column.categories) + 1
        if labels == "ignore" or (labels == "if present" and self.label.column not in frame.columns):
            return Encoded(x, None, names)
        return Encoded(x, self.encode_labels(frame), names)

    def check_columns(self, frame: pd.DataFrame) -> None:
        """`DataError` if the table lacks the label or a feature."""
        _need_columns(frame, [self.label.column, *(column.name for column in self.columns)])

    def misread(self, frame: pd.DataFrame) -> Iterator[str]:
        """A line for each column of the table with cells that a private schema takes for missing, though they hold
        something. For the owner's eyes: what is released must not depend on it."""
        private = [each.name for each in self.columns if isinstance(each, Numeric) and each.bounds_from == PRIVATE]
        for name in [name for name in private if name in frame.columns]:
            rows = np.flatnonzero(_no_number(frame[name]))
            if len(rows):
                first = f"{str(frame[name].iloc[rows[0]])!r} in row {rows[0] + 1:,}"
                yield (
                    f"column {name!r} is numeric, but not in {len(rows):,} of {len(frame):,} cells, such as "
                    f"{first}: they count as missing; correct them"
                )

    def feature_names(self, features: str = "all") -> tuple[str, ...]:
        """The name of every column of `x`: "age", "sex=female", "sex=(other)"."""
        names: list[str] = []
        for column in self.columns:
            if isinstance(column, Categorical) and features != "ordinal":
                names += [f"{column.name}={category}" for category in (*column.categories, OTHER)]
            elif isinstance(column, Categorical) or features != "categorical":
                names.append(column.name)
        return tuple(names)

    def squared_norm_bound(self, encoding: str, features: str) -> float:
        """An upper bound of the squared norm of an encoded record, from the schema only."""
        total = 0.0
        for column in self.columns:
            if isinstance(column, Categorical):
                total += 1.0
            elif features != "categorical":
                centre, scale = column.standard
                reach = max(abs(bound - centre) for bound in column.bounds) / scale
                total += reach**2 if encoding == "standard" else 1.0
        return total

    def encode_labels(self, frame: pd.DataFrame) -> np.ndarray:
        """Class numbers, int32 [rows]; for regression labels scaled by their bounds to [0, 1], float32.

        With a private schema, nobody has looked at the labels. A label that is not a class, or not a number, is
        -1, and its record counts as a blank. An error would reveal that there is such a record.
        """
        _need_columns(frame, [self.label.column])
        strict = self.privacy is None
        if self.label.bounds is not None:
            values = number_column(frame[self.label.column], self.label.column, strict=strict)
            known = np.isfinite(values) | strict
            values = np.where(known, values, self.label.bounds[0])
            labels = scaled_labels(values, self.label.bounds, f"label column {self.label.column!r}")
            return np.where(known, labels, np.float32(-1))
        codes, texts = factorize(frame[self.label.column])
        number_of = {name: number for number, name in enumerate(self.label.classes)}
        if strict:
            self._check_labels(codes, texts)
        numbers: np.ndarray = np.array([*(number_of.get(value, -1) for value in texts), -1], dtype=np.int32)[codes]
        return numbers

    def _check_labels(self, codes: np.ndarray, texts: Sequence[str]) -> None:
        """`DataError` if a label is missing, or no class."""
        missing = np.flatnonzero(codes < 0)
        if len(missing):
            raise DataError(_empty(f"label column {self.label.column!r}", missing))
        for code, value in enumerate(texts):
            if value not in self.label.classes:
                row = int(np.flatnonzero(codes == code)[0]) + 1
                raise DataError(
                    f"label {value!r} (column {self.label.column!r}, row {row}) is not a class of the schema"
                    f"{did_you_mean(value, self.label.classes)}"
                )


def scaled_labels(values: np.ndarray, bounds: tuple[float, float], where: str) -> np.ndarray:
    """Labels clamped to their bounds and scaled by them to [0, 1], float32. No label is below 0, which would mark
    a blanked record."""
    low, high = bounds
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        if np.isnan(values[bad[0]]):
            raise DataError(_empty(where, bad))
        raise DataError(f"{where} is not finite in row {bad[0] + 1}; remove the row")
    clamped = np.clip(np.asarray(values, np.float64), low, high)
    return np.asarray((clamped - low) / (high - low), np.float32)


def _empty(where: str, rows: np.ndarray) -> str:
    more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
    return f"{where} is empty in row {rows[0] + 1:,}{more}; remove rows without a label"


def with_label_bounds(schema: Schema, bounds: Sequence[float]) -> Schema:
    """The schema with these public bounds of its label; () leaves it as it is."""
    if not bounds:
        return schema
    if schema.label.bounds is None:
        raise DataError(
            f"label_bounds={list(bounds)} is given, but the schema lists classes of {schema.label.column!r}; give "
            "it bounds instead of classes, or leave label_bounds out"
        )
    low, high = bounds
    return replace(schema, label=schema.label._replace(bounds=(low, high), bounds_from=PUBLIC))


def propose_task(values: np.ndarray) -> str:
    """ "regression" for a label of many different numbers, otherwise "classification". `values` are numbers, NaN
    for anything else."""
    distinct = np.unique(values)
    if np.isnan(distinct).any():
        return "classification"
    whole = np.array_equal(distinct, np.round(distinct))
    most = MOST_WHOLE_CLASSES if whole else MOST_FRACTIONAL_CLASSES
    return "regression" if len(distinct) > most else "classification"


def _toml(content: Mapping[str, Any]) -> str:
    """TOML with short lists on one line."""
    import tomli_w

    def on_one_line(match: re.Match[str]) -> str:
        line = f"[{match[1].strip().removesuffix(',')}]".replace("\n    ", " ")
        return line if len(line) <= 100 else match[0]

    return re.sub(r"\[((?:\n    .*,)+)\n\]", on_one_line, tomli_w.dumps(content))


def _plain(value: str | float) -> str | float:
    """Numbers as floats: 0 and 0.0 are the same content and must give the same digest."""
    return value if isinstance(value, str) else float(value)


def _need_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    present = [str(column) for column in frame.columns]
    for name in names:
        if name not in present:
            raise DataError(f"column {name!r} of the schema is not in the table{did_you_mean(name, present)}")


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise DataError(f"{key}={value!r} is unknown{did_you_mean(str(value), allowed)}")


def _check_keys(where: str, content: Any, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if not isinstance(content, Mapping):
        raise DataError(f"{where} must be a table, not {content!r}")
    for key in content:
        if key not in (*required, *optional):
            raise DataError(f"{where} has an unknown key {key!r}{did_you_mean(key, (*required, *optional))}")
    for key in required:
        if key not in content:
            raise DataError(f"{where} needs the key {key!r}")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list, not {value!r}")
    return tuple(canonical(item) for item in value)


def _pair(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise DataError(f"{where} must be two numbers, not {value!r}")
    return _number(where, value[0]), _number(where, value[1])


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} must be a finite number, not {value!r}")
    return float(value)


def _privacy_from_dict(content: Any) -> SchemaPrivacy:
    _check_keys("[privacy]", content, ("epsilon", "delta"), ("charge",))
    epsilon, delta = (_number(f"{key} of [privacy]", content[key]) for key in ("epsilon", "delta"))
    if epsilon <= 0 or not 0 < delta < 1:
        raise DataError(
            f"[privacy] has epsilon={epsilon:.15g} and delta={delta:g}; they must satisfy ε > 0 and 0 < δ < 1"
        )
    return SchemaPrivacy(epsilon, delta, str(content.get("charge", "")))


def _label_from_dict(content: Mapping[str, Any], origin: str) -> Label:
    key = "bounds" if "bounds" in content else "classes"
    _check_keys("[label]", content, ("column", key), (f"{key}_from",))
    column, origin = str(content["column"]), content.get(f"{key}_from", origin)
    if key == "bounds":
        return Label(column, bounds=_pair("bounds of the label", content["bounds"]), bounds_from=origin)
    return Label(column, _texts("classes of the label", content["classes"]), origin)


def _column_from_dict(content: Any, origin: str) -> Column:
    if not isinstance(content, Mapping) or "name" not in content:
        raise DataError("every [[columns]] table needs a 'name'")
    name = str(content["name"])
    where = f"column {name!r}"
    _choice(f"the type of {where}", content.get("type", ""), ("numeric", "categorical"))
    numeric = content["type"] == "numeric"
    parse: dict[str, Callable[[str, Any], Any]] = (
        {"bounds": _pair, "standard": _pair, "missing": _number}
        if numeric
        else {"categories": _texts, "missing": lambda _, value: canonical(value)}
    )
    needed, *others = parse
    _check_keys(where, content, ("name", "type", needed), (*others, *(f"{field}_from" for field in parse)))
    given = {field: parse[field](f"{field} of {where}", content[field]) for field in parse if field in content}
    origins = {f"{field}_from": content.get(f"{field}_from", origin) for field in given}
    for field in parse:
        if f"{field}_from" in content and field not in given:
            raise DataError(f"{where} has {field}_from, but no {field}; give both or neither")
    if numeric:  # what is left out follows from the bounds
        column = Numeric.with_bounds(name, given["bounds"], origins["bounds_from"])
        return column._replace(**given, **origins)
    return Categorical(name, given["categories"], OTHER)._replace(**given, **origins)


def _validate(schema: Schema) -> None:
    """Check what every schema must satisfy, drafted or written by hand."""
    label = schema.label
    if label.bounds is not None and not (label.bounds[0] < label.bounds[1] and not label.classes):
        low, high = label.bounds
        raise DataError(f"bounds of label {label.column!r}: low={low} must be below high={high}, without classes")
    if label.bounds is None and len(label.classes) < 2:
        raise DataError(f"label {label.column!r} has {len(label.classes)} class; at least 2 are needed")
    _no_repeats(f"classes of {label.column!r}", label.classes)
    if not schema.columns:
        raise DataError("the schema has no feature columns; at least one is needed")
    _no_repeats("columns", [column.name for column in schema.columns])
    if label.column in {column.name for column in schema.columns}:
        raise DataError(f"the label column {label.column!r} is also a feature column; remove it from [[columns]]")
    for column in schema.columns:
        if isinstance(column, Categorical):
            if not column.categories:
                raise DataError(f"column {column.name!r} has no categories; list at least one")
            _no_repeats(f"categories of {column.name!r}", column.categories)
        elif not column.bounds[0] <= column.bounds[1]:
            low, high = column.bounds
            raise DataError(f"bounds of {column.name!r}: low={low} exceeds high={high}")
        elif not column.standard[1] > 0:
            raise DataError(f"standard of {column.name!r}: scale={column.standard[1]} must be positive")
    for part in (label, *schema.columns):
        if (bounds := getattr(part, "bounds", None)) and max(map(abs, bounds)) > LARGEST:
            raise DataError(
                f"bounds of {part[0]!r}: {bounds[0]:.3g} to {bounds[1]:.3g}, but at most ±{LARGEST:g} is "
                "possible; correct the numbers, or leave the column out"
            )
        for key, value in part._asdict().items():
            if key.endswith("_from"):
                _choice(f"{key} of {part[0]!r}", value, _ORIGINS)
    if PRIVATE in schema._origins() and schema.privacy is None:
        raise DataError(f'a value of the schema is "{PRIVATE}", but it has no [privacy] with the ε that was spent')


def _no_repeats(where: str, values: Iterable[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise DataError(f"{where}: {value!r} is listed twice")


# Cells of a column


def canonical(value: Any) -> str:
    """One spelling for each value: '1.0', 1.0 and 1 are all '1', wherever they were read from."""
    if isinstance(value, float | np.floating):
        value = repr(float(value) + 0.0)  # -0.0 equals 0.0: which of them comes first must not matter
    text = str(value).strip()
    return text.partition(".")[0] if _WHOLE_NUMBER.fullmatch(text) else text


def factorize(series: pd.Series, missing: Collection[str] = MISSING) -> tuple[np.ndarray, list[str]]:
    """(codes, texts): cell i reads `texts[codes[i]]`; a missing cell has code -1. Each distinct value is looked at
    once, so the cost grows with the distinct values and not with the rows."""
    import pandas as pd

    raw_codes, raw_values = pd.factorize(series, use_na_sentinel=True)
    if series.dtype == object and not all(isinstance(value, str) for value in raw_values):
        # To pandas True, 1 and 1.0 are one value, spelled as the first of them: spell each cell by itself.
        raw_codes, raw_values = pd.factorize(series.map(canonical, na_action="ignore"), use_na_sentinel=True)
    spelled = [canonical(value) for value in raw_values]
    texts = sorted(set(spelled) - set(missing))
    code_of = {text: code for code, text in enumerate(texts)}
    # The extra last entry answers the -1 of cells that pandas itself calls missing.
    translate = np.array([*(code_of.get(text, -1) for text in spelled), -1], dtype=np.int64)
    return translate[raw_codes], texts


def text_column(series: pd.Series, missing: str) -> np.ndarray:
    """A column as text, with `missing` for its missing cells."""
    codes, texts = factorize(series)
    column: np.ndarray = np.array([*texts, missing], dtype=object)[codes].astype(str)
    return column


def parse_numbers(texts: list[str]) -> np.ndarray:
    """Float64 values; NaN for what is not a number."""
    import pandas as pd

    return np.asarray(pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce"), dtype=np.float64)


def cast_numbers(series: pd.Series, missing: Collection[str]) -> np.ndarray | None:
    """A column as float64, NaN where missing; None if a cell is not plainly a number."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    if pd.api.types.is_bool_dtype(series.dtype):
        return None
    if pd.api.types.is_numeric_dtype(series.dtype):
        values: np.ndarray = series.to_numpy(dtype=np.float64, na_value=np.nan)
        return values
    try:
        cells: Any = pa.array(series)
        if not pa.types.is_string(cells.type) and not pa.types.is_large_string(cells.type):
            return None
        empty = pc.is_in(cells, value_set=pa.array(list(missing), cells.type))
        numbers = pc.cast(pc.if_else(empty, None, cells), pa.float64())
        return np.asarray(numbers.to_numpy(zero_copy_only=False), np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


def _numbers(series: pd.Series) -> tuple[np.ndarray, tuple[int, str] | None]:
    """A column as float64, NaN where a cell is missing or no number, and the first such row with its text."""
    values = cast_numbers(series, MISSING_NUMBER)
    if values is not None:
        return values, None
    codes, texts = factorize(series, MISSING_NUMBER)
    parsed = parse_numbers(texts)
    wrong = [(int(np.argmax(codes == code)) + 1, texts[code]) for code in np.flatnonzero(np.isnan(parsed))[:1]]
    return np.append(parsed, np.nan)[codes], wrong[0] if wrong else None


def _no_number(series: pd.Series) -> np.ndarray:
    """Which cells hold something that is no finite number."""
    codes, texts = factorize(series, MISSING_NUMBER)
    wrong: np.ndarray = ~np.isfinite([*parse_numbers(texts), 0.0])[codes]
    return wrong


def is_number_column(series: pd.Series) -> bool:
    """Whether every cell that is not missing is a number. True/False columns are categories."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series.dtype):
        return not pd.api.types.is_bool_dtype(series.dtype)
    values, wrong = _numbers(series)
    return wrong is None and not bool(np.isnan(values).all())


def number_column(series: pd.Series, column: str, *, strict: bool = True) -> np.ndarray:
    """A column as float64, NaN where missing; text or an infinite value is an error that names its row, or,
    unless `strict`, missing."""
    values, wrong = _numbers(series)
    if not strict:
        return np.where(np.isfinite(values), values, np.nan)
    if wrong is not None:
        raise DataError(
            f"column {column!r} is numeric, but row {wrong[0]} holds {wrong[1]!r}; correct the cell, or declare "
            "the column categorical in the schema"
        )
    for row in np.flatnonzero(np.isinf(values))[:1]:
        raise DataError(
            f"column {column!r}, row {row + 1}: the value {values[row]} is not finite; correct it or leave the "
            "cell empty"
        )
    return values
