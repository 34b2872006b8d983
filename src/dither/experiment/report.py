"""The result of a run as typed values: the only reader and writer of summary.json.

report = dither.run("adult")                               # or dither.load("runs/first")
report.epsilon.claimed.value                               # the paper's ε
report.epsilon.proven("server sees uploads").value         # the ε that is proved against this adversary
report.metrics                                             # a pandas DataFrame, one row per evaluation
report.predict("people.csv")
"""

from __future__ import annotations

import html
import math
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from dither.accounting import ClientEpsilon, ClientRange, ProvenRow
from dither.errors import DamagedFile, DataError, DataWarning, RunExists, SpecError, did_you_mean
from dither.experiment.folder import RunFolder, to_json
from dither.experiment.metrics import Advice, Labelled, TestScores, evaluate
from dither.spec import Spec, model_file
from dither.spec.code import register_model
from dither.types import ADVERSARIES, SHORT_VIEWS, Claim, epsilon_text

if TYPE_CHECKING:
    import pandas as pd

    from dither import models
    from dither.data import Encoded, Label, Schema
    from dither.types import Params

T = TypeVar("T")

_SUMMED = {
    "off": "the server sees every upload",
    "ideal": "summed as secure aggregation would (secagg.mode = ideal)",
    "real": "under secure aggregation",
}
_NAMED_CLIENTS = 4  # clients of one target that are named one by one


class Overview(ABC):
    """A result that shows itself as a title and a few lines, in a terminal and in a notebook."""

    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def overview(self) -> list[tuple[str, str]]:
        """A few lines of (what, value)."""

    def to_json(self) -> str:
        """The result as JSON; ∞ is the string "inf"."""
        return to_json(self, indent=2)

    def __repr__(self) -> str:
        return text_lines(self.title(), self.overview())

    def _repr_html_(self) -> str:
        return html_table(self.title(), [], self.overview())


# What a report is made of


@dataclass(frozen=True)
class AttackedRow:
    """What `dither audit` has shown for one adversary: a lower bound on ε, beside the claim and the proof."""

    value: float
    view: str
    adjacency: str
    unit: str
    delta: float
    form: str
    confidence: float
    proven: float
    claimed: float | None = None
    local: bool = False  # measured with private records at hand: no ε covers it

    @classmethod
    def from_json(cls, row: Mapping[str, Any], *, local: bool = False) -> AttackedRow:
        return decode(cls, {**row, **row["attacked"], "delta": row["delta"]}, given={"local": local})


@dataclass(frozen=True)
class Epsilon:
    """Claimed, proven and attacked ε of one run.

    `claimed` is what the paper's formula says, `table` what is proved for each adversary, neighbour relation and
    unit, and `attacked` what `dither audit` has shown (empty before an audit). `view`, `adjacency` and `unit` are
    those of the spec. `clients` has a row for each client if clients have their own targets.
    """

    claimed: Claim
    table: tuple[ProvenRow, ...]
    attacked: tuple[AttackedRow, ...] = ()
    view: str = "upload"
    adjacency: str = "zero-out"
    unit: str = "run"
    clients: tuple[ClientEpsilon, ...] = ()

    def proven(self, view: str = "", adjacency: str = "", unit: str = "run") -> ProvenRow:
        """The proven ε against one adversary.

        `view` is "upload", "sum", "broadcast" or "final", or its description ("server sees uploads"); `adjacency`
        is "zero-out", "replace-one" or "add/remove"; `unit` is "run" or "message". View and adjacency are those of
        the spec unless given.
        """
        view = view_key(view or self.view)
        adjacency = adjacency or self.adjacency
        for row in self.table:
            if (row.view, row.adjacency, row.unit.split(",")[0]) == (view, adjacency, unit):
                return row
        offered = sorted({(row.view, row.adjacency, row.unit.split(",")[0]) for row in self.table})
        raise SpecError(
            f"no proven ε for view={view!r}, adjacency={adjacency!r}, unit={unit!r}; there is one for: "
            + "; ".join(", ".join(each) for each in offered)
        )

    @property
    def main(self) -> list[ProvenRow]:
        """The rows for the spec's view and unit: one for each adjacency that has a proof, the spec's first."""
        rows = [row for row in self.table if row.view == self.view and not row.unit.startswith("message")]
        if self.unit == "message":
            rows = [row for row in self.table if row.unit.startswith("message")] + rows
        finite = [row for row in rows if math.isfinite(row.value)] or rows[:1]
        return sorted(finite, key=lambda row: row.adjacency != self.adjacency)

    @property
    def notable(self) -> list[ProvenRow]:
        """All rows with a finite ε, then one row for each adjacency that has none."""
        finite = [row for row in self.table if math.isfinite(row.value)]
        proved = {row.adjacency for row in finite}
        without = {row.adjacency: row for row in reversed(self.table) if row.adjacency not in proved}
        order = {adjacency: at for at, adjacency in enumerate(dict.fromkeys(row.adjacency for row in self.table))}
        return finite + sorted(without.values(), key=lambda row: order[row.adjacency])

    @property
    def failing_conditions(self) -> list[str]:
        """Conditions of the paper's formula that do not hold here."""
        return [text for text, holds in self.claimed.conditions if not holds]

    def to_json(self) -> dict[str, Any]:
        """The entry "epsilon" of summary.json."""
        return {
            "claimed": self.claimed.to_json(),
            "proven": [row.to_json() for row in self.table],
            "attacked": None,
            **({"clients": [dict(vars(row)) for row in self.clients]} if self.clients else {}),
        }

    def lines(self, proven: Sequence[ProvenRow]) -> list[tuple[str, str]]:
        """Some proven rows, then the claimed and the attacked ε, as pairs of (what, value)."""
        lines = [(epsilon_label(row), proven_text(row)) for row in proven]
        for who, client in self.by_target():
            both = f"proven {epsilon_text(client.proven)}, claimed {epsilon_text(client.claimed, 'nearest')}"
            lines.append((f"target ε {client.target:.15g}", f"{who}: {both}, weight {client.weight:.3g} (mean 1)"))
        for row in self.attacked:
            attack = f"{row.adjacency}, against {ADVERSARIES[row.view]} ({row.confidence:.3g} confidence)"
            what = "attacked ε, local, not private" if row.local else "attacked ε"
            lines.append((what, f"at least {epsilon_text(row.value, 'down')} per {row.unit}, {attack}"))
        return [*lines, ("claimed ε", claim_text(self.claimed))]

    def by_target(self) -> list[tuple[str, ClientEpsilon]]:
        """Who has which target, in words, and the largest claimed and proven ε among them, by rising target."""
        groups: dict[float, list[ClientEpsilon]] = {}
        for row in sorted(self.clients, key=lambda row: row.target):
            groups.setdefault(row.target, []).append(row)
        return [
            (
                ", ".join(row.client for row in rows) if len(rows) <= _NAMED_CLIENTS else f"{len(rows)} clients",
                max(rows, key=lambda row: (row.proven, row.claimed)),
            )
            for rows in groups.values()
        ]

    @classmethod
    def from_json(cls, value: Mapping[str, Any], spec: Spec, attacked: Sequence[AttackedRow] = ()) -> Epsilon:
        table = decode(tuple[ProvenRow, ...], value["proven"])
        clients = decode(tuple[ClientEpsilon, ...], value.get("clients", ()))
        return cls.of(spec, decode(Claim, value["claimed"]), table, attacked, clients)

    @classmethod
    def of(
        cls,
        spec: Spec,
        claimed: Claim,
        table: Sequence[ProvenRow],
        attacked: Sequence[AttackedRow] = (),
        clients: Sequence[ClientEpsilon] = (),
    ) -> Epsilon:
        """The ε of a spec."""
        asked = (spec.privacy.view, spec.adjacency, spec.privacy.unit)
        return cls(claimed, tuple(table), tuple(attacked), *asked, tuple(clients))


@dataclass(frozen=True)
class RoundingMargin:
    """What rounding before a sum could add to its proven ε, by a rule of thumb (errata G8): no proof."""

    step: float
    margin: float
    epsilon: float


@dataclass(frozen=True)
class RunTraffic:
    """What an average client sends and receives in a round, and how many uploads were lost."""

    aggregation: str
    upload_bytes: float
    download_bytes: float
    lost: int
    most_missing: int
    void_rounds: int
    bound: float | None = None  # coordinates beyond it are clamped
    mask_seconds: float | None = None
    open_seconds: float | None = None
    attempts: float | None = None
    enrol_seconds: float | None = None
    rounding: RoundingMargin | None = None

    def text(self) -> str:
        """One line on what a round sends."""
        sent, received = bytes_text(self.upload_bytes), bytes_text(self.download_bytes)
        parts = [f"{sent} a round and gets {received}", _SUMMED[self.aggregation]]
        if self.mask_seconds is not None:
            parts.append(f"masks {1000 * self.mask_seconds:.3g} ms a client")
        if self.lost:
            parts.append(f"{self.lost} uploads lost")
        return "; ".join(parts)


@dataclass(frozen=True)
class LedgerCharge:
    """The ledger that was charged, and its id of the data."""

    file: str
    dataset: str


@dataclass(frozen=True)
class DiskReads:
    """What a run whose records stay on the disk has read."""

    block_records: int
    blocks: int
    records_read: int
    records_scored: int
    seconds_waiting: float


@dataclass(frozen=True)
class PartyTotals:
    """What one party did in the rounds of a federation."""

    records: int
    counted: int
    missing: int
    refused: int
    bytes_up: float
    bytes_down: float


@dataclass(frozen=True)
class Exclusion:
    """The round (from 0) after which a party was excluded, and why."""

    round: int
    why: str


TOGETHER = "everything together"


class SpentPart(NamedTuple):
    """One part of what was spent on the same records, or all parts together."""

    what: str
    epsilon: float
    delta: float
    terms: str = ""  # for which adversary and neighbours, where a ledger says so
    not_covered: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederationTotals:
    """How the rounds of a real federation went."""

    id: str
    terms: str  # digest of the agreement
    parties: dict[str, PartyTotals]
    excluded: dict[str, Exclusion]
    aggregation: str
    most_missing: int
    void_rounds: int
    seconds_a_round: float
    colluders: int | None = None  # folders of the first release do not say
    split: tuple[SpentPart, ...] = ()  # where the same records were also counted; the last part is all of it


@dataclass(frozen=True)
class LocalFigures:
    """Exact figures of a run that no ε covers: local, not private."""

    train_loss: float | None = None
    clamped: int = 0
    scores: TestScores | None = None  # where test records are not public: on some of the training records
    advice: tuple[Advice, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()

    def text(self) -> str:
        """The figures in one line."""
        parts = [] if self.train_loss is None else [f"training loss {self.train_loss:.4f}"]
        if self.clamped:
            parts.append(f"{self.clamped} coordinates clamped: raise secagg.bound or lower client_lr")
        return "; ".join(parts)


@dataclass(frozen=True)
class Evaluated:
    """Scores of a model on a file with labels: exact, and so local, not private."""

    loss: float
    scores: TestScores

    def to_dict(self) -> dict[str, Any]:
        """One entry for each metric, and those of the trivial predictor beside them."""
        about = {"trivial": self.scores.trivial, "trivial_predictor": self.scores.trivial_predictor}
        return {"records": self.scores.records, "loss": self.loss, **self.scores.model, **about}


@dataclass(frozen=True, repr=False)
class Report(Overview):
    """A finished run: its folder, spec, scores, ε, and the trained model.

    Fields after `evaluations` are the entries of summary.json, under the same names.
    """

    folder: Path
    spec: Spec
    evaluations: tuple[Mapping[str, Any], ...]
    method: str
    data: str
    test_accuracy: float | None  # None if the test records are not public
    loss: float | None
    rounds: int
    seconds: float
    epsilon: Epsilon
    why: str  # why claim and proof differ
    participation: ClientRange  # in how many rounds a client took part
    randomness: str
    notes: tuple[str, ...]
    num_clients: int
    num_features: int
    num_params: int
    image_shape: tuple[int, ...]
    classes: tuple[str, ...]
    repeated_rounds: int = 0  # undone by an interruption and made again
    traffic: RunTraffic | None = None
    refused: dict[str, int] = field(default_factory=dict)  # updates left out as not finite, by client
    stopped: str = ""  # why the run ended early
    ledger: LedgerCharge | None = None
    test_accuracy_without_noise: float | None = None
    test_r2: float | None = None  # of a regression, instead of test_accuracy
    test_r2_without_noise: float | None = None
    scores: TestScores | None = None  # on the public test records, by scikit-learn, beside the trivial predictor
    advice: tuple[Advice, ...] = ()  # warnings that rest on public records and the released model alone
    streamed: DiskReads | None = None
    timing: dict[str, float] = field(default_factory=dict)  # seconds of this process, by what they went to
    federation: FederationTotals | None = None

    # Reading and writing

    @classmethod
    def read(cls, path: str | Path) -> Report | None:
        """The report of a finished run folder; None if the run is not finished. Loads no model."""
        folder = RunFolder.open(path)
        summary, spec = folder.summary(), folder.spec()
        if summary is None:
            return None
        audit, local = folder.audit()
        try:
            attacked = [AttackedRow.from_json(row, local=local) for row in (audit or {}).get("rows", ())]
            return cls.from_json(summary, folder.path, spec, folder.metrics(), attacked)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{str(folder.path / 'summary.json')!r} is not the summary of a run ({error}); restore it from a "
                "copy, or repeat the run"
            ) from None

    @classmethod
    def from_json(
        cls,
        summary: Mapping[str, Any],
        folder: Path,
        spec: Spec,
        evaluations: Sequence[Mapping[str, Any]],
        attacked: Sequence[AttackedRow] = (),
    ) -> Report:
        """The report whose `to_dict` is `summary`."""
        beside = {"folder": folder, "spec": spec, "evaluations": tuple(evaluations)}
        epsilon = Epsilon.from_json(summary["epsilon"], spec, attacked)
        return decode(cls, summary, given={**beside, "epsilon": epsilon})

    def save(self, local: Mapping[str, Any] | None = None) -> None:
        """Write summary.json (and local/summary.json): the run is then finished."""
        RunFolder(self.folder).save_summary(self.to_dict(), local)

    def to_dict(self) -> dict[str, Any]:
        """What summary.json holds, as plain values."""
        return {name: value for name, value in encode(self).items() if name not in _BESIDE}

    @property
    def summary(self) -> dict[str, Any]:
        """The same as `to_dict()`."""
        return self.to_dict()

    def with_notes(self, *notes: str) -> Report:
        """The same report with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    # Looking

    @property
    def task(self) -> str:
        """ "classification" or "regression"."""
        return "classification" if self.classes else "regression"

    @property
    def test_score(self) -> float | None:
        """Accuracy, or R² of a regression, on the public test records; None if there are none."""
        return self.test_accuracy if self.classes else self.test_r2

    @property
    def score_without_noise(self) -> float | None:
        """The same score of the same run without noise; None if it was not trained."""
        return self.test_accuracy_without_noise if self.classes else self.test_r2_without_noise

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the public test records; None if there are none."""
        return self.test_accuracy

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation: round, test accuracy, loss, seconds."""
        import pandas as pd

        return pd.DataFrame(list(self.evaluations))

    @property
    def local(self) -> LocalFigures:
        """Exact figures that no ε covers: the training loss and others. Local, not private."""
        folder = RunFolder(self.folder)
        return decode(LocalFigures, folder.local_summary(), given={"metrics": tuple(folder.local_metrics())})

    def title(self) -> str:
        return f"{self.method} on {self.data}"

    def overview(self) -> list[tuple[str, str]]:
        """The report in a few lines of (what, value)."""
        remarks = len(uncovered(self.epsilon.main)) + len(other_notes(self))
        more = f"{remarks}, in report.notes and report.epsilon.proven().not_covered"
        return [*self.main_lines(), *([("notes", more)] if remarks else []), ("folder", str(self.folder))]

    def lines(self) -> list[tuple[str, str]]:
        """The whole report, as pairs of (what, value)."""
        lines, main = self.main_lines(), self.epsilon.main
        if self.federation is not None:
            count = self.federation.colluders
            who = f"{count} {'party' if count == 1 else 'parties'}"
            safe = f"secure aggregation, safe from a server that colludes with {who}"
            lines.append(("sums", safe if self.federation.aggregation != "off" else "in the open"))
            lines.append(("a round", f"{self.federation.seconds_a_round:.2f} s"))
        if (read := self.streamed) is not None:
            blocks = f"{read.blocks} blocks of up to {read.block_records:,}"
            lines.append(("records", f"streamed from disk: {blocks}, {read.seconds_waiting:.1f} s of waiting"))
        if self.traffic is not None:
            lines.append(("a client sends", self.traffic.text()))
        lines += [("noise", text) for text in sampler_text(main)]
        lines += [("not covered", text) for text in uncovered(main)]
        if self.score_without_noise is not None:
            score = f"test {'accuracy' if self.classes else 'R²'} {self.score_without_noise:.4f}"
            lines.append(("without noise", f"{score} (not private: the same run with its noise left out)"))
        lines += [("note", note) for note in other_notes(self)]
        if (self.folder / "plot.png").is_file():
            lines.append(("plot", str(self.folder / "plot.png")))
        lines.append(("run folder", str(self.folder)))
        if exact := self.local.text():
            lines.append(("local, not private", f"{exact}; more in {self.folder / 'local'}"))
        return lines + [("warning, local, not private", each.text) for each in self.local.advice]

    def main_lines(self) -> list[tuple[str, str]]:
        """Scores, rounds, clients and the three ε."""
        scores = "not scored: the test records are not public"
        if self.test_score is not None and self.loss is not None:
            trivial = "".join(f" ({name}: {value:.4f})" for name, value in self._trivial().items())
            scores = f"{self.test_score:.4f}, loss {self.loss:.4f}{trivial}"
        least, median, most = (f"{each:g}" for each in vars(self.participation).values())
        times = f"{most} rounds" if least == most else f"{least} to {most} rounds (median {median})"
        lines = [
            ("test accuracy" if self.classes else "test R²", scores),
            *([("", self.scores.text())] if self.scores is not None else []),
            ("rounds", f"{self.rounds} in {self.seconds:.1f} s"),
            ("clients", f"{self.num_clients}, each in {times}"),
            *self.epsilon.lines(self.epsilon.main),
        ]
        if failing := len(self.epsilon.failing_conditions):
            lines.append(("", f"{failing} of the claim's conditions fail: dither account {self.folder}"))
        if self.stopped:
            lines.append(("stopped", self.stopped))
        return [*lines, *(("warning", each.text) for each in self.advice)]

    def privacy_line(self) -> str:
        """The proven ε first, then what the paper's formula claims: for pictures."""
        claimed = f"the paper's formula claims {epsilon_text(self.epsilon.claimed.value, 'nearest')}"
        if not self.epsilon.main:
            return f"no proven ε; {claimed}"
        row = self.epsilon.main[0]
        kind, adversary = epsilon_label(row), ADVERSARIES[row.view]
        if math.isinf(row.value):
            return "no noise: not private" if math.isinf(self.epsilon.claimed.value) else f"{kind} ∞; {claimed}"
        return (
            f"{kind} = {epsilon_text(row.value)} per {row.unit} (δ = {row.delta:g}, {row.adjacency}, against "
            f"{adversary}); {claimed}"
        )

    def score_lines(self) -> dict[str, float]:
        """What a score is compared with: the trivial predictor and the same run without noise, where known."""
        without = self.score_without_noise
        return self._trivial() | ({} if without is None else {"without noise": without})

    def _trivial(self) -> dict[str, float]:
        """The trivial predictor's score, by its name; empty if it is not known."""
        name = "accuracy" if self.classes else "r2"
        if self.scores is None or name not in self.scores.trivial:
            return {}
        return {self.scores.trivial_predictor: self.scores.trivial[name]}

    def to_latex(self) -> str:
        """A small table, one line for each proven ε of the spec's view."""
        claim, score = self.epsilon.claimed, self.test_score
        shared = {
            "Method": self.method,
            "Data": Path(self.data).name,
            "Accuracy" if self.classes else "R²": "--" if score is None else f"{score:.4f}",
            "Claimed ε": f"{epsilon_text(claim.value, 'nearest')} per {claim.unit}",
        }
        rows = [
            {
                **shared,
                "Proven ε": f"{epsilon_text(row.value)} per {row.unit}{' (assumed)' if row.assumed else ''}",
                "δ": f"{row.delta:g}",
                "Neighbours": row.adjacency,
                "Against": ADVERSARIES[row.view],
            }
            for row in self.epsilon.main
        ]
        return latex_table(list(rows[0]), [list(row.values()) for row in rows])

    # The model

    @cached_property
    def model(self) -> models.Model:
        """The model's functions."""
        from dither import models

        spec = self.spec.model
        named = model_file(spec.name)
        if named and RunFolder(self.folder).read("model.py") is not None:
            spec = replace(spec, name=f"{self.folder / 'model.py'}:{named[1]}")
        if spec.weights and (self.folder / "model.safetensors").is_file():  # with what stayed as it was
            spec = replace(spec, weights=str(self.folder / "model.safetensors"))
        return models.from_spec(spec, self.num_features, len(self.classes), self.image_shape)

    @cached_property
    def params(self) -> Params:
        """The trained parameters, as model.safetensors holds them."""
        import jax

        from dither.models import leaf_name

        leaves = RunFolder(self.folder).load_model()
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        paths, structure = jax.tree_util.tree_flatten_with_path(shapes)
        return jax.tree.unflatten(structure, [leaves[leaf_name(where)] for where, _ in paths])

    @cached_property
    def schema(self) -> Schema | None:
        """How a table becomes features; None for a run on arrays."""
        from dither.data import Schema

        folder = RunFolder(self.folder)
        for name in ("local/schema.toml", "schema.toml"):
            if folder.read(name) is not None:
                return Schema.load(self.folder / name)
        return None

    @property
    def label(self) -> Label:
        """The classes, or the bounds of a regression's label."""
        from dither.data import Label

        if self.schema is not None:
            return self.schema.label
        if self.classes:
            return Label("y", self.classes)
        bounds = self.spec.data.label_bounds or RunFolder(self.folder).local_summary()["label_bounds"]
        return Label("y", bounds=(float(bounds[0]), float(bounds[1])))

    def predict_proba(self, features: Any) -> np.ndarray:
        """Class probabilities `[n, classes]` of an encoded array, a data frame or a file."""
        from dither import models

        if not self.classes:
            raise SpecError("predict_proba is for classes, but this run is a regression; use predict")
        return np.asarray(models.probabilities(self.outputs(self._table(features), labels="ignore")[0]))

    def predict(self, features: Any) -> np.ndarray:
        """The class name of each record of an encoded array, a data frame or a file (CSV, Parquet, npz). For a
        regression, the label itself."""
        from dither import models

        predicted = np.asarray(models.predict(self.outputs(self._table(features), labels="ignore")[0], self.task))
        if self.label.bounds is not None:
            low, high = self.label.bounds
            return low + (high - low) * predicted.astype(np.float64)
        names: np.ndarray = np.asarray(self.classes)[predicted]
        return names

    def evaluate(self, path: str | Path) -> Evaluated:
        """Scores on a file with labels: exact, and so local, not private."""
        scores, y = self.outputs(self._table(path))
        scores, y = scores[y >= 0], y[y >= 0]  # without blanks
        loss = float(np.mean(np.asarray(self.model.loss(scores, y))))
        bounds = self.label.bounds
        return Evaluated(loss, evaluate(self.model, scores, y, classes=self.classes, label_bounds=bounds))

    def _table(self, features: Any) -> Any:
        """The records; those of a file as a table, after a warning of what it holds that is no number."""
        from dither import data

        if self.schema is None or isinstance(features, np.ndarray | list):
            return features
        if isinstance(features, str | Path):
            if Path(features).suffix == ".npz" or Path(features).expanduser().is_dir():
                return features
            features = data.read_table(features)
        for line in self.schema.misread(features):
            warnings.warn(line, DataWarning, stacklevel=3)
        return features

    def outputs(self, features: Any, *, labels: str = "required") -> tuple[np.ndarray, np.ndarray]:
        """The model's output for each record, and the encoded labels (none if `labels` is "ignore")."""
        from dither.models import scores_of_each

        outputs, y = [], []
        for encoded in self._pieces(features, labels=labels):
            if encoded.y is None and labels == "required":
                raise DataError(f"{str(features)!r} has no labels to evaluate on")
            outputs.append(np.asarray(scores_of_each(self.model, self.params, self._model_input(encoded.x))))
            y.append(np.zeros(0) if encoded.y is None else encoded.y)
        return np.concatenate(outputs), np.concatenate(y)

    def _pieces(self, features: Any, *, labels: str) -> Iterator[Encoded]:
        """The records of an array, a table or a file; those of a folder, which may not fit memory, in blocks."""
        from dither import data

        if isinstance(features, np.ndarray | list):
            yield data.Encoded(np.asarray(features, np.float32), None, ())
            return
        if not isinstance(features, str | Path) or not Path(features).expanduser().is_dir():
            yield self._encode(features, labels=labels)
            return
        if self.schema is not None:
            raise DataError(f"this run was trained on a table; give one instead of the folder {str(features)!r}")
        x, y = data.open_folder(features, label=self.label, labels=labels)
        names, at = tuple(f"x{index}" for index in range(x.shape[1])), 0
        for some in Labelled(x, np.zeros(0), np.arange(len(x)), "a folder").pieces():
            yield data.Encoded(some, None if y is None else y[at : at + len(some)], names)
            at += len(some)

    def _encode(self, features: Any, *, labels: str) -> Encoded:
        from dither import data

        encoding = (self.spec.data.encoding, self.spec.data.features)
        if not isinstance(features, str | Path):
            if self.schema is None:
                raise DataError("this run has no schema for tables; give an array of encoded features")
            return self.schema.encode(features, *encoding, labels=labels)
        if Path(features).suffix == ".npz":
            return data.read_arrays(features, label=self.label, labels=labels)
        if self.schema is None:
            raise DataError(f"this run was trained on arrays; give a .npz file instead of {str(features)!r}")
        return self.schema.encode(data.read_table(features), *encoding, labels=labels)

    def _model_input(self, x: np.ndarray) -> np.ndarray:
        """Encoded records as the model reads them."""
        from dither import data

        if x.ndim == 2:
            x = data.transform(x, self.spec.data.transform)
        if x.ndim != 2 or x.shape[1] != self.num_features:
            raise DataError(f"the data has shape {x.shape}, the model takes {self.num_features} features a record")
        return x


_BESIDE = ("folder", "spec", "evaluations")  # fields of a report that are not in summary.json


def load(path: str | Path, *, model: Any = None) -> Report:
    """The report of a finished run, with its model ready to predict. If `run` was given a model object, give it
    again as `model`."""
    report = Report.read(path)
    if report is not None and model is not None:
        register_model(model, report.spec.model.name)
    if report is None:
        raise RunExists(f"{str(path)!r} is not complete; finish it with `dither run --resume {path}`")
    _ = report.params, report.schema  # so that a damaged file is named here
    return report


def run_folder(what: Any) -> RunFolder | None:
    """The run folder that a path names; None for whatever else describes a run."""
    is_run = isinstance(what, str | Path) and (Path(what) / "spec.toml").is_file()
    return RunFolder(what) if is_run else None


# Words for values


def view_key(view: str) -> str:
    """ "upload" for "server sees uploads", and so on."""
    names = {name: key for table in (SHORT_VIEWS, ADVERSARIES) for key, name in table.items()}
    key = names.get(view, view)
    if key not in SHORT_VIEWS:
        offered = [*SHORT_VIEWS, *SHORT_VIEWS.values()]
        raise SpecError(f"view={view!r} is not one of {', '.join(offered)}{did_you_mean(view, offered)}")
    return key


def bytes_text(count: float) -> str:
    """1234 -> 1.23 kB."""
    power = next((power for power in (0, 1, 2) if count < 1000 ** (power + 1)), 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def epsilon_label(row: ProvenRow) -> str:
    return "assumed ε" if row.assumed else "proven ε"


def claim_text(claim: Claim) -> str:
    """The paper's ε in one line."""
    return f"{epsilon_text(claim.value, 'nearest')} per {claim.unit}, δ = {claim.delta:g} ({claim.source})"


def proven_text(row: ProvenRow) -> str:
    """A proven ε in one line, with the adversary."""
    collusion = f", {row.against.removeprefix('against a server that ')}" if row.against else ""
    return (
        f"{epsilon_text(row.value)} per {row.unit}, δ = {row.delta:g}, {row.adjacency}, "
        f"against {ADVERSARIES[row.view]}{collusion} ({row.recipe})"
    )


def uncovered(rows: Sequence[ProvenRow]) -> list[str]:
    """What no proof of these rows covers, each once."""
    texts = dict.fromkeys(text for row in rows for text in row.not_covered)
    return [
        text.removeprefix("not covered: ").replace("preprocessing not covered", "preprocessing") for text in texts
    ]


def other_notes(report: Report) -> list[str]:
    """The notes of a report, without those already listed as not covered."""
    texts = {text for row in report.epsilon.main for text in row.not_covered}
    return [note for note in report.notes if note not in texts]


def sampler_text(rows: Sequence[ProvenRow]) -> list[str]:
    """What the error of the noise sampler costs, in one line; none if no exact noise is drawn."""
    parts = [row.sampler_delta for row in rows if row.sampler_delta is not None]
    return [f"exact; the sampler's error uses {max(parts):.2g} of δ and none of ε (R7)"] if parts else []


# Small tables

_WIDTH, _HEIGHT = 100, 24


def text_lines(title: str, lines: Sequence[tuple[str, str]]) -> str:
    """A title and aligned lines, cut to a screen."""
    width = max((len(what) for what, _ in lines), default=0)
    shown = [title, *(f"  {what:<{width}}  {value}" for what, value in lines)]
    if len(shown) > _HEIGHT:
        shown = [*shown[: _HEIGHT - 1], f"  ... {len(shown) - _HEIGHT + 1} more lines"]
    flat = (" ".join(line.splitlines()) for line in shown)
    return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in flat)


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for notebooks: no script, everything escaped."""

    def line(values: Sequence[str], tag: str) -> str:
        cells = "".join(f'<{tag} style="text-align:left">{html.escape(str(value))}</{tag}>' for value in values)
        return f"<tr>{cells}</tr>"

    body = "".join(line(row, "td") for row in rows)
    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    return f"<table><caption>{html.escape(title)}</caption>{top}<tbody>{body}</tbody></table>"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "ε": r"$\varepsilon$", "δ": r"$\delta$", "∞": r"$\infty$",
}  # fmt: skip


def latex_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular, every special character escaped."""
    escaped = [
        " & ".join("".join(_LATEX.get(letter, letter) for letter in " ".join(value.split())) for value in row)
        for row in (head, *rows)
    ]
    lines = [r"\begin{tabular}{" + "l" * len(head) + "}", r"\hline", escaped[0] + r" \\", r"\hline"]
    return "\n".join([*lines, *(row + r" \\" for row in escaped[1:]), r"\hline", r"\end{tabular}"]) + "\n"


# JSON


def encode(value: Any) -> Any:
    """A dataclass as plain values; optional fields that hold their default are left out."""
    if hasattr(value, "to_json") and not isinstance(value, Report):
        return value.to_json()
    if is_dataclass(value):
        entries = ((entry, getattr(value, entry.name)) for entry in fields(value))
        return {entry.name: encode(inner) for entry, inner in entries if not _is_default(entry, inner)}
    if isinstance(value, Mapping):
        return {name: encode(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encode(inner) for inner in value]
    return value


def _is_default(entry: Field[Any], value: Any) -> bool:
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return default is not MISSING and value == default


def decode(kind: type[T], value: Any, given: Mapping[str, Any] | None = None) -> T:
    """The value of a type from plain values; TypeError or ValueError if it is none. A named tuple may be written
    as a list, and a pair as an object. Entries that the type does not have are left out, and those `given` are
    used directly."""
    origin, inner = get_origin(kind), get_args(kind)
    result: Any
    if kind is Any:
        result = value
    elif origin in (Union, types.UnionType):
        plain = next(each for each in inner if each is not type(None))
        result = None if value is None else decode(plain, value)
    elif origin is tuple and inner[-1] is not Ellipsis:
        items = value.values() if isinstance(value, Mapping) else _of(list | tuple, value)
        result = tuple(decode(each, item) for each, item in zip(inner, items, strict=True))
    elif origin in (list, tuple):
        result = origin(decode(inner[0], each) for each in _of(list | tuple, value))
    elif origin in (dict, Mapping):
        result = {str(name): decode(inner[1], each) for name, each in _of(Mapping, value).items()}
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        hints, known = _hints(cast(Any, kind)), dict(given or {})
        plain = dict(zip(hints, value, strict=True)) if isinstance(value, list | tuple) else _of(Mapping, value)
        wanted = [name for name in hints if name in plain and name not in known]
        result = kind(**known, **{name: decode(hints[name], plain[name]) for name in wanted})
    elif kind is float:
        number = float(value) if isinstance(value, str) else value
        result = _of(int | float, number)
    else:
        result = _of(kind, value)
    return cast(T, result)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.40} is not a {getattr(kind, '__name__', kind)}")
    return value
