"""`dither start`: from raw tables to an evaluated model, with one ε that covers everything.

project = dither.start("hospitals/", label="readmitted", epsilon=1.0)
project.scores.model["auc"]        # private, on records that training left out
project.split                      # what schema, training and evaluation spent, and together

ε is split before anything is looked at: a private schema, training on rows that a public rule chooses, a private
evaluation on the others. Each file gets a budget of that ε in the ledger, so that nothing more can be spent on it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dither import data
from dither.accounting import gaussian_epsilon, gaussian_mu
from dither.accounting.ledger import Budget, Ledger
from dither.accounting.ledger.runs import charged_in_all, data_id
from dither.data.schema import SchemaPrivacy
from dither.errors import BudgetExhausted, DataError, SpecError
from dither.experiment import counting
from dither.experiment.account import spent_parts, with_counts
from dither.experiment.build import Experiment, build_experiment, by_file, choose
from dither.experiment.defaults import TUNED
from dither.experiment.evaluation import PrivateScores, evaluate_privately
from dither.experiment.folder import RunFolder, to_json, write_bytes, write_text
from dither.experiment.private_schema import LeastClass, Wanted, check_classes, private_schema
from dither.experiment.report import Report, SpentPart, load
from dither.experiment.train import run
from dither.privacy.discrete import Words
from dither.simulation.engine import chunks
from dither.spec import Spec
from dither.types import epsilon_text

SHARES = (0.05, 0.85, 0.10)  # of μ²: schema, training, evaluation
_FILTER = 0.75  # of δ that is left where a sampled run comes among others (`ledger.filter`)
_TARGET = 0.9995, 0.993  # of ε: most and least that the parts may come to
_STEPS = 8
_DECIDED = {
    *("data.name", "data.path", "data.schema", "data.label", "data.split", "data.classes", "task"),
    *("data.public", "data.test_public", "privacy.epsilon", "privacy.delta"),
}
_TOO_GOOD = 0.98
BEGUN = "begun.json"  # in the folder of a project that has a schema and is not complete
_DONE = "project.json"
_ROOM = 1 << 20  # bytes that must fit onto the disk before anything is charged
_PARTS = {
    "files": "tables",
    "accounts": "records or another ledger",
    "wanted": "options for the label and columns",
    "budgets": "--epsilon, --delta or --split",
    "values": "--set",
}
_LABELS = re.compile(
    r"^(label|target|outcome|class|y|result|response|diagnosis|readmitted|survived|income)$", re.I
)


class Budgets(NamedTuple):
    """One (ε, δ) for everything, and ε of each part by itself: together they come to less than their sum."""

    epsilon: float
    delta: float
    schema: float
    training: float
    evaluation: float

    @classmethod
    def split(cls, epsilon: float, records: int, delta: float = 0.0, shares: Sequence[float] = SHARES) -> Budgets:
        """Split ε by shares of μ². `delta` 0: below one over the number of records."""
        check_shares(shares)
        delta = delta or min(1e-5, 10.0 ** -math.ceil(math.log10(records)))
        counting.check_budget(epsilon, delta)
        mu = gaussian_mu(epsilon, _FILTER * delta)
        parts = (float(f"{gaussian_epsilon(mu * math.sqrt(share), delta):.4g}") for share in shares)
        return cls(epsilon, delta, *parts)


def check_shares(shares: Sequence[float]) -> None:
    """`SpecError` unless they split the whole into three parts."""
    if len(shares) != 3 or not min(shares) > 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise SpecError(f"shares={tuple(shares)} must be three numbers above 0 that add up to 1")


@dataclass(frozen=True)
class ProjectPlan:
    """What will be spent on which files, decided by their headers and record counts alone."""

    files: tuple[Path, ...]
    records: tuple[int, ...]
    header: tuple[str, ...]  # the columns that all files have
    wanted: Wanted
    budgets: Budgets
    least_class: LeastClass
    unshared: Mapping[str, str]  # columns that only some files have

    def lines(self) -> list[tuple[str, str]]:
        """What a person should know before anything is looked at."""
        label = repr(self.wanted.label)
        if self.wanted.classes:
            label += f" with classes {', '.join(self.wanted.classes)}"
        elif self.wanted.task != "regression":
            label += f"; {self.least_class} (--classes declares them)"
        return [
            ("tables", f"{len(self.files)}, {sum(self.records):,} records"),
            *(("left out", f"column {name!r} {why}") for name, why in self.unshared.items()),
            ("label", label),
            (
                "ε in all",
                f"{self.budgets.epsilon:.15g} at δ = {self.budgets.delta:g}, for each file, set as its budget in "
                f"the ledger",
            ),
            ("schema", f"ε = {epsilon_text(self.budgets.schema)}: kinds, bounds, categories"),
            ("training", f"ε ≈ {epsilon_text(self.budgets.training)}: on 4 of 5 records"),
            ("evaluation", f"ε = {epsilon_text(self.budgets.evaluation)}: on the others"),
        ]


@dataclass(frozen=True)
class Project:
    """A trained and privately evaluated model, and everything that was spent."""

    folder: Path
    report: Report
    scores: PrivateScores
    split: tuple[SpentPart, ...]  # the last part is everything together
    excluded: Mapping[str, str]

    @property
    def epsilon(self) -> SpentPart:
        """The one ε."""
        return self.split[-1]

    @property
    def doubt(self) -> str:
        """What the private scores make one think of features that follow from the label; empty if nothing."""
        told = [self.scores.model[name] for name in ("auc", "r2") if name in self.scores.model]
        if any(each.value > _TOO_GOOD for each in told):
            return "too good to be true? look for a column that follows from the label, and leave it out (--drop)"
        if any(each.high > _TOO_GOOD for each in told):
            return "the noise hides whether a column follows from the label: leave out those that do (--drop)"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "scores": asdict(self.scores),
            "split": [part._asdict() for part in self.split],
            "left_out": dict(self.excluded),
            "doubt": self.doubt,
        }


def propose_label(path: str | Path | Sequence[str | Path]) -> tuple[str, list[str]]:
    """The label by the names of the columns alone, and these names: one that is called like a label, else the last
    one."""
    header = counting.shared_columns([counting.read(file) for file in table_files(path)])
    return next((name for name in header if _LABELS.match(name)), header[-1]), header


def table_files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The tables of a folder, a pattern or a list; a single table by itself."""
    files = data.table_files(path)
    if not files and isinstance(path, str | Path):
        files = [Path(path).expanduser()]
    return files


def plan_project(
    path: str | Path | Sequence[str | Path],
    wanted: Wanted,
    *,
    epsilon: float = 1.0,
    delta: float = 0.0,
    shares: Sequence[float] = SHARES,
) -> ProjectPlan:
    """Split ε over schema, training and evaluation. `shares` are those of μ²: ε of the parts is larger than their
    share, as parts compose better than they add up."""
    files = table_files(path)
    tables = [counting.read(file) for file in files]
    records = tuple(map(len, tables))
    budgets = Budgets.split(epsilon, sum(records), delta, shares)
    header = counting.shared_columns(tables)
    least = check_classes(wanted, header, records, (budgets.schema, budgets.delta))
    unshared = counting.unshared_columns(tables)
    return ProjectPlan(tuple(files), records, tuple(header), wanted, budgets, least, unshared)


def start_project(
    plan: ProjectPlan,
    *,
    out: str | Path | None = None,
    ledger: str | Path | None = None,
    new_ledger: bool = False,
    values: Mapping[str, Any] | None = None,
    on_checked: Callable[[], None] = lambda: None,
    on_step: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Project:
    """Estimate a schema, train and evaluate, all privately. `values` are keys of a spec put on top of what Dither
    chooses, `options` those of `train.run`. `on_checked` is called before anything is written or spent. If `out`
    holds an interrupted project of the same tables and options, it is continued after its schema."""
    folder, values = Path(out) if out is not None else free_folder(), values or {}
    if folder.exists() and ((folder / _DONE).exists() or not (folder / BEGUN).is_file()):
        raise SpecError(f"{str(folder)!r} exists; nothing is overwritten, give another --out")
    if decided := _DECIDED & set(values):
        raise SpecError(f"{min(decided)!r} follows from the tables and the options of start; leave it out")
    book = Ledger(ledger or Ledger.default_path())
    datasets = _accounts(book, plan)
    asked = _asked(plan, datasets, values)
    begun = _begun(folder, asked)
    budget: dict[str, Any] = {"delta": plan.budgets.delta, "ledger": book.path, "new_ledger": new_ledger}

    def words(purpose: str) -> list[Words]:
        source = str(values.get("randomness", "os")), int(values.get("seed", 0)), purpose
        return [counting.noise_words(*source, number) for number in range(len(plan.files))]

    if begun is None:
        _check_unspent(book, plan, datasets)
        _rehearse(plan, values)
        on_checked()
        folder.mkdir(parents=True)  # before anything is charged: it may be refused
        try:
            room = folder / "room"  # or have none
            write_bytes(room, bytes(_ROOM))
            room.unlink()
            counting.identify(
                book, plan.files, counting.digests(plan.files), new_ledger
            )  # before any budget is set
            for dataset in datasets:
                if book.budget(dataset) is None:
                    book.set_budget(dataset, Budget(plan.budgets.epsilon, plan.budgets.delta))
            on_step("estimating the schema")
            drafted = private_schema(
                plan.files, plan.wanted, epsilon=plan.budgets.schema, words=words("schema"), **budget
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        drafted.schema.save(folder / "schema.toml")
        write_text(folder / "federation.toml", federation_toml(plan, values))
        begun = {**asked, "left_out": drafted.excluded}
        write_text(folder / BEGUN, to_json(begun, indent=2))
    if "scores" in begun:
        report = load(folder / "run")
    else:
        report = _trained(
            plan, folder, values, on_step, {"ledger": book.path, "new_ledger": new_ledger, **options}
        )
        on_step("evaluating")
        budget |= {"epsilon": plan.budgets.evaluation, "words": words("evaluation")}
        try:
            begun["scores"] = asdict(evaluate_privately(report, plan.files, held_out=True, **budget))
        except BudgetExhausted as refusal:  # what was interrupted may have been charged without a result
            raise BudgetExhausted(f"{str(folder / 'run')!r} is trained but not evaluated: {refusal}") from None
        write_text(folder / BEGUN, to_json(begun, indent=2))
    scores = PrivateScores.from_json(to_json(begun["scores"]))
    project = Project(folder, report, scores, spent_parts(report, book.path), begun["left_out"])
    write_text(folder / _DONE, to_json(project.to_dict(), indent=2))
    (folder / BEGUN).unlink()
    return project


def _trained(
    plan: ProjectPlan,
    folder: Path,
    values: Mapping[str, Any],
    on_step: Callable[[str], None],
    options: dict[str, Any],
) -> Report:
    """The run of a project, begun or continued."""
    path = folder / "run"
    if (path / "spec.toml").is_file():
        on_step("continuing the training")
        return run(RunFolder.open(path).spec(), resume=path, **options)
    RunFolder(path).discard()  # a kill came before anything was charged
    on_step("choosing the noise")
    spec = training_spec(plan, folder / "schema.toml", values)
    on_step("training")
    return run(spec, out=path, **options)


def free_folder() -> Path:
    """Where a project goes that names no folder."""
    return Path("runs") / time.strftime("start-%Y%m%d-%H%M%S")


def _asked(plan: ProjectPlan, datasets: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a project was asked for, as it stands in its folder. The accounts of other records, or in another
    ledger, are others: there, the schema was not charged."""
    files = [str(file.resolve()) for file in plan.files]
    asked = {"files": files, "accounts": datasets, "wanted": asdict(plan.wanted), "budgets": plan.budgets}
    return dict(json.loads(to_json({**asked, "values": values})))


def _begun(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an interrupted project of the same tables and options left in the folder; None if there is none."""
    if not folder.exists():
        return None
    begun: dict[str, Any] = json.loads((folder / BEGUN).read_text())
    if changed := [name for name in asked if begun.get(name) != asked[name]]:
        raise SpecError(
            f"{str(folder)!r} was begun with other {' and '.join(_PARTS[name] for name in changed)}; repeat the "
            f"command that began it, or give another --out"
        )
    return begun


def _accounts(book: Ledger, plan: ProjectPlan) -> list[str]:
    """The files' accounts in the ledger."""
    datasets = [data_id(book, path=str(file)) for file in plan.files]
    for number, (file, dataset) in enumerate(zip(plan.files, datasets, strict=True)):
        if dataset in datasets[:number]:
            raise DataError(f"{file.name!r} holds the records of another table; give each institution's once")
    return datasets


def _check_unspent(book: Ledger, plan: ProjectPlan, datasets: Sequence[str]) -> None:
    """The files must have spent nothing before, and have no smaller budget."""
    for file, dataset in zip(plan.files, datasets, strict=True):
        limit = book.budget(dataset)
        if any(spent.participations for spent in book.spent(dataset, delta=plan.budgets.delta)):
            raise DataError(
                f"{file.name!r} has spent ε before (ledger {book.path}): one ε for everything needs records on "
                f"which nothing was spent; see `dither budget show`, and continue with `dither run`"
            )
        if limit is not None and not Budget(plan.budgets.epsilon, plan.budgets.delta).within(limit):
            raise SpecError(f"{file.name!r} has a budget of {limit}; give an --epsilon and --delta within it")


def _rehearse(plan: ProjectPlan, values: Mapping[str, Any]) -> None:
    """Whatever training would refuse after ε is spent on the schema, refused before: the same choice for blank
    tables of these sizes. Only their headers and counts are known."""
    features, _ = plan.wanted.features(plan.header)
    columns = tuple(data.Numeric.with_bounds(name, (0.0, 1.0)) for name in features)
    label = data.Label(plan.wanted.label, plan.wanted.classes or ("0", "1"))
    if plan.wanted.task == "regression":
        label = data.Label(plan.wanted.label, bounds=(0.0, 1.0))
    privacy = SchemaPrivacy(plan.budgets.schema, plan.budgets.delta)  # with which blank labels are possible
    # Each table has its own number in every cell: equal ones would be taken for the same records.
    blank = [
        pd.DataFrame(dict.fromkeys(features, np.full(count, 1.0 + number))).assign(**{plan.wanted.label: ""})
        for number, count in enumerate(plan.records)
    ]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "schema.toml"
        data.Schema(label, columns, "blank", privacy).save(path)
        spec = training_spec(plan, path, values, blank if len(blank) > 1 else blank[0])
    held_out = (data.row_split(count, spec.data.test_fraction, spec.seed)[1] for count in plan.records)
    if not any(map(len, held_out)):
        raise SpecError(
            f"data.test_fraction={spec.data.test_fraction:g} leaves no record for the evaluation; raise it"
        )


def training_spec(plan: ProjectPlan, schema: Path, values: Mapping[str, Any], records: Any = None) -> Spec:
    """What Dither chooses for these files (or `records` in their place), with as much ε as schema and evaluation
    leave."""
    files = [str(file.resolve()) for file in plan.files]
    given = {
        "data.path": files if len(files) > 1 else files[0],
        **({"cohort_size": len(files)} if len(files) > 1 else {}),
        "data.schema": str(schema.resolve()),
        "data.split": "rows",
        "privacy.epsilon": plan.budgets.training,
        "privacy.delta": plan.budgets.delta,
        **values,
    }
    chosen = choose(given, records=records)
    return calibrated(chosen.spec, lambda spec: build_experiment(spec, dataset=chosen.dataset), plan.budgets)


def federation_toml(plan: ProjectPlan, values: Mapping[str, Any]) -> str:
    """A spec with which `dither serve` does the same where every table stays with its owner."""
    import tomli_w

    tuned = {key: value for key, value in values.items() if key in TUNED}
    wanted = plan.wanted
    content = {
        "num_clients": 0,
        "cohort_size": len(plan.files),
        "task": wanted.task,
        **{key: value for key, value in tuned.items() if "." not in key},
        "data": {"label": wanted.label, "classes": ",".join(wanted.classes), "partition": "files"},
        "privacy": {
            "project_epsilon": plan.budgets.epsilon,
            **{key.partition(".")[2]: value for key, value in tuned.items() if "." in key},
        },
        "secagg": {"mode": "real"},
    }
    head = "# The same project while each table stays with its owner: dither serve federation.toml\n"
    return head + tomli_w.dumps(content)


def calibrated(spec: Spec, build: Callable[[Spec], Experiment], budgets: Budgets) -> Spec:
    """The spec with the largest ε for training (to a hundredth) at which all parts compose to at most the one
    ε, as the ledger will find it."""
    most, least = (share * budgets.epsilon for share in _TARGET)
    target = spec.privacy.epsilon
    for _ in range(_STEPS):
        spec = spec.with_values({"privacy.epsilon": float(f"{target:.4g}")})
        total = everything(build(spec), budgets)
        if least <= total <= most:
            return spec
        target *= (0.5 * (most + least) / total) ** (1 / SHARES[1])
    if total > most:
        raise SpecError(
            f"schema, training and evaluation come to ε = {epsilon_text(total, digits=4)}, not "
            f"{budgets.epsilon:.15g}; give other shares"
        )
    return spec


def everything(experiment: Experiment, budgets: Budgets) -> float:
    """ε of schema, training and evaluation as they compose in the ledger. Every record of one table is charged
    what the most exposed client of each stretch of rounds reveals."""
    schema = counting.release(budgets.schema, budgets.delta)
    evaluation = counting.release(budgets.evaluation, budgets.delta, lists_names=False)
    terms = Budget(budgets.epsilon, budgets.delta)
    accountant, spec, charge = experiment.accountant(), experiment.spec, None
    if spec.data.path and not by_file(spec, experiment.dataset):
        stretches = chunks(0, len(experiment.cohorts), spec.eval_every)
        charge = charged_in_all(accountant, stretches)
    return with_counts(accountant, terms, before=[schema], after=[evaluation], charge=charge)[0]


# reason: keyword options of a public function
def start(
    path: str | Path | Sequence[str | Path],
    *,
    label: str = "",
    task: str = "auto",
    classes: Sequence[str] = (),
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    epsilon: float = 1.0,
    delta: float = 0.0,
    shares: Sequence[float] = SHARES,
    **options: Any,
) -> Project:
    """From a table, a folder or a list of tables to an evaluated model, with one ε for everything. Without `label`
    the header proposes one. `options` are those of `start_project`."""
    label = label or propose_label(path)[0]
    wanted = Wanted(label, task, tuple(classes), tuple(drop), tuple(keep))
    return start_project(plan_project(path, wanted, epsilon=epsilon, delta=delta, shares=shares), **options)
