"""`dither.account`: claimed and proven ε of a spec or a run, without training."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.accounting import Conditions, ProvenRow
from dither.accounting.ledger import Budget, Charge, Ledger, Spent, composed
from dither.accounting.ledger.runs import EVERY_RECORD
from dither.errors import DataError
from dither.experiment.folder import RunFolder, write_text
from dither.experiment.report import TOGETHER, Epsilon, Overview, Report, SpentPart, run_folder
from dither.spec import MODELS, Spec
from dither.types import SHORT_VIEWS, epsilon_text

if TYPE_CHECKING:
    from dither.accounting.accountant import Accountant
    from dither.data.schema import SchemaPrivacy
    from dither.experiment.build import Experiment
    from dither.types import Release


@dataclass(frozen=True, repr=False)
class PrivacyReport(Overview):
    """Claimed, proven and attacked ε of a spec or a run.

    On request, `tried` holds every bound that was tried, including refusals with their reason, and `ex_ante`
    the same bounds before an honest party draws who takes part (R4).
    """

    method: str
    epsilon: Epsilon
    why: str  # why claim and proof differ
    tried: tuple[ProvenRow, ...] = ()
    ex_ante: tuple[ProvenRow, ...] = ()
    split: tuple[SpentPart, ...] = ()  # with what else was spent on the same records; the last part is all of it

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        more = {"tried": self.tried, "ex_ante": self.ex_ante}
        return {
            **{name: [row.to_json() for row in rows] for name, rows in more.items() if rows},
            "method": self.method,
            **self.epsilon.to_json(),
            "why": self.why,
            **({"split": [part._asdict() for part in self.split]} if self.split else {}),
        }

    def title(self) -> str:
        return f"{self.method}: claimed and proven ε"

    def overview(self) -> list[tuple[str, str]]:
        """Each proven and attacked ε, the claim, and what else was spent."""
        parts = [
            (f"ε of {part.what}", f"{epsilon_text(part.epsilon, digits=4)} at δ = {part.delta:.3g}")
            for part in self.split
        ]
        return self.epsilon.lines(self.epsilon.notable) + parts


_PARTS = ("schema", "statistics", "evaluation")
_ELSE = "what else was charged for these records"
NOT_HERE = f"{_ELSE}: the ledger is not here"


def spent_parts(report: Report, ledger: str | Path | None = None) -> tuple[SpentPart, ...]:
    """What the ledger says was spent on a run's records: each part by itself, and all parts composed. With several
    files, the one that has spent most. Of a federation's run, what its server asked for. If the ledger is not on
    this machine, or does not know these records, what the folder knows of: the run and its private schema."""
    if report.ledger is None and report.federation is not None:
        return report.federation.split
    book = charged_ledger(report, ledger)
    if book is None:
        return _schema_and_run(report)
    dataset, spent = max(charged_accounts(report, book), key=lambda pair: pair[1].epsilon)
    row = report.epsilon.main[0]
    terms = Budget(0.0, spent.budget.delta if spent.budget else row.delta, spent.view, spent.adjacency)
    parts = [
        SpentPart(run.partition("-")[0] if run.startswith(_PARTS) else "training", value, terms.delta)
        for run, value in book.spent_by_run(dataset, EVERY_RECORD, terms).items()
    ]
    gaps = tuple(gap for gap in (*spent.numbers, spent.not_covered) if gap)
    words = f"{SHORT_VIEWS[spent.view]}, {spent.adjacency}"
    return (*parts, SpentPart(TOGETHER, spent.epsilon, spent.delta, words, gaps))


def _schema_and_run(report: Report) -> tuple[SpentPart, ...]:
    """The ε of a private schema, of the run that was trained with it, and of both: their sum, as the folder does
    not say what the run released."""
    if report.schema is None or report.schema.privacy is None:
        return ()
    row = report.epsilon.proven()
    schema = _schema_part(report.schema.privacy, row.view, row.adjacency)
    words = f"{SHORT_VIEWS[row.view]}, {row.adjacency}"
    gaps = (NOT_HERE,) if report.ledger else ()
    both = SpentPart(TOGETHER, schema.epsilon + row.value, schema.delta + row.delta, words, gaps)
    return schema, SpentPart("training", row.value, row.delta), both


def _schema_part(privacy: SchemaPrivacy, view: str, adjacency: str) -> SpentPart:
    """What a private schema costs for these neighbours: its own ε is for a blanked record."""
    from dither.experiment.counting import release  # imports JAX, which a cached answer does not need

    look = [Charge(EVERY_RECORD, [((release(privacy.epsilon, privacy.delta),), 1)])], Conditions()
    terms = Budget(0.0, privacy.delta, view, adjacency)
    return SpentPart("schema", composed([look], terms)[0], privacy.delta)


def charged_ledger(report: Report, ledger: str | Path | None = None) -> Ledger | None:
    """The ledger that a run was charged to, at its place or the named one; None if it is not there: of these
    records another one knows nothing."""
    path = None if report.ledger is None else Path(ledger or report.ledger.file)
    book = None if path is None or not path.is_file() else Ledger(path)
    return book if book and charged_accounts(report, book) else None


def charged_accounts(report: Report, book: Ledger) -> list[tuple[str, Spent]]:
    """The data sets that a run was charged to, one for each file, and what was spent on each, in its terms; none
    if this ledger (an old copy, or another one) has no charge for this very run."""
    row, made = report.epsilon.main[0], RunFolder(report.folder).read_json("provenance.json") or {}
    accounts = [
        (dataset, spent)
        for dataset in (report.ledger.dataset.split(", ") if report.ledger else ())
        for spent in book.spent(dataset, EVERY_RECORD, delta=row.delta, view=row.view, adjacency=row.adjacency)
    ]
    known = (any(name.startswith(str(made.get("run", ""))) for name in spent.runs) for _, spent in accounts)
    return accounts if all(known) else []


def with_counts(
    accountant: Accountant,
    terms: Budget,
    before: Sequence[Release],
    after: Sequence[Release] = (),
    charge: Charge | None = None,
) -> tuple[float, float]:
    """(ε, δ) of a run composed with private counts, for the client that reveals most, or for a `charge`."""
    runs = [charge] if charge else [Charge(EVERY_RECORD, group.most) for group in accountant.clients]
    counts = [
        [([Charge(EVERY_RECORD, [((release,), 1)])], Conditions()) for release in part] for part in (before, after)
    ]
    return max(composed([*counts[0], ([run], accountant.conditions), *counts[1]], terms) for run in runs)


def _with_schema(experiment: Experiment) -> tuple[SpentPart, ...]:
    """The ε of a private schema, of the run, and of both together."""
    schema, spec = experiment.dataset.schema, experiment.spec
    if schema is None or schema.privacy is None:
        return ()
    from dither.experiment.counting import release  # imports JAX, which a cached answer does not need

    accountant, privacy = experiment.accountant(), schema.privacy
    terms = Budget(0.0, spec.privacy.delta, accountant.plan.view, accountant.plan.adjacency)
    together = with_counts(accountant, terms, before=[release(privacy.epsilon, privacy.delta)])
    return (
        _schema_part(privacy, terms.view, terms.adjacency),
        SpentPart("training", accountant.epsilon(), terms.delta),
        SpentPart(TOGETHER, *together, not_covered=(_ELSE,)),
    )


def account(
    what: Spec | str | Path | Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    every_recipe: bool = False,
    ex_ante: bool = False,
    data_dir: str | Path | None = None,
    model: Any = None,
    ledger: str | Path | None = None,
) -> PrivacyReport:
    """Claimed and proven ε of a preset, a TOML file, a mapping, a `Spec` or a run folder, without training.

    `values` are dotted keys that are set on top of the spec. `every_recipe` also lists each bound that was
    tried, and `ex_ante` each bound before the cohorts are drawn. With a private schema, or for a run whose
    ledger is here (or named), the report also says what else was spent on the same records.
    """
    if model is not None:
        values = {**(values or {}), "model.name": model}
    folder = run_folder(what)
    finished = Report.read(folder.path) if folder is not None else None
    if finished is not None and not (values or every_recipe or ex_ante):
        return PrivacyReport(finished.method, finished.epsilon, finished.why, split=spent_parts(finished, ledger))
    spec = (folder.spec() if folder is not None else Spec.from_any(what)).with_values(values or {})
    if folder is None and not (every_recipe or ex_ante):
        return _remembered(spec, data_dir, lambda: _compute(spec, data_dir))
    as_run = None if values else folder
    report = _compute(spec, data_dir, as_run, finished, every_recipe=every_recipe, ex_ante=ex_ante)
    if finished is None or as_run is None:
        return report
    attacked, split = finished.epsilon.attacked, spent_parts(finished, ledger)
    return replace(report, epsilon=replace(report.epsilon, attacked=attacked), split=split)


def _compute(
    spec: Spec,
    data_dir: str | Path | None,
    folder: RunFolder | None = None,
    finished: Report | None = None,
    *,
    every_recipe: bool = False,
    ex_ante: bool = False,
) -> PrivacyReport:
    """The ε of all rounds that a spec plans, or of those of a run's folder: the ones of its report, or what was
    begun with fresh noise and, where it is not finished, what is left of the plan."""
    from dither.experiment import build

    experiment = build.build_experiment(spec, data_dir=data_dir, blank=True)
    claim, planned = experiment.prepared.claim, build.planned_rounds(experiment)
    begun = folder.begun() if folder is not None and spec.source_of_randomness == "os" else []
    if folder is not None and begun and finished is None:  # the rest would be made from the newest checkpoint on
        checkpoint = folder.load_checkpoint()
        begun.append((0 if checkpoint is None else checkpoint.round, planned))
    if folder is not None and finished is not None and finished.rounds < planned:
        claim = build.claim_after(experiment, finished.rounds)
        experiment = experiment if begun else experiment.first_rounds(finished.rounds)
    released = experiment.realised(begun) if begun else experiment
    accountant = released.accountant()
    return PrivacyReport(
        method=spec.method,
        epsilon=Epsilon.of(spec, claim, accountant.table(), clients=build.client_epsilons(released)),
        why=experiment.method.why,
        tried=tuple(accountant.tried()) if every_recipe else (),
        ex_ante=tuple(accountant.before_the_draw(experiment.prepared.cohort_size_at)) if ex_ante else (),
        split=_with_schema(released),
    )


# Answers for public data sets are kept in the user's cache folder: the same question is answered without JAX.

_LIBRARIES = ("dp-accounting", "jax", "numpy", "scikit-learn", "scipy")


def _remembered(spec: Spec, data_dir: str | Path | None, compute: Callable[[], PrivacyReport]) -> PrivacyReport:
    """What `compute` returns, from the cache if it is there."""
    path = _cache_file(spec, data_dir)
    if path is None:
        return compute()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return PrivacyReport(spec.method, Epsilon.from_json(kept, spec), str(kept["why"]))
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        report = compute()
    with suppress(OSError):  # a read-only home is no reason not to answer
        write_text(path, report.to_json())
    return report


def _cache_file(spec: Spec, data_dir: str | Path | None) -> Path | None:
    """Named by a digest of all that the answer follows from: the spec, the published files, Dither's code and the
    libraries. None for your own records, schemas and methods, and with DITHER_ACCOUNT_CACHE=0."""
    wish = os.environ.get("DITHER_ACCOUNT_CACHE", "")
    own_code = spec.method.endswith(".py") or spec.model.name not in MODELS
    own_files = (spec.data.path, spec.data.test_path, spec.data.schema)
    if wish == "0" or own_code or any(own_files):
        return None
    from dither import data

    try:
        published = data.get(spec.data.name, data_dir=data_dir, download=False)
    except DataError:
        return None
    package = Path(__file__).parents[1]
    code = sorted(file for kind in ("*.py", "*.toml") for file in package.rglob(kind))
    digest = hashlib.sha256(spec.digest().encode())
    digest.update(" ".join(version(name) for name in _LIBRARIES).encode())
    for file in (*code, *published):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    if wish:
        return Path(wish) / f"{digest.hexdigest()}.json"
    from platformdirs import user_cache_path

    return user_cache_path("dither") / "accounts" / f"{digest.hexdigest()}.json"
