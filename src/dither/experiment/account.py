"""`dither.account`: claimed and proven ε of a spec or a run, without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dither.accounting import ProvenRow
from dither.experiment.folder import to_json
from dither.experiment.report import (
    Epsilon,
    Overview,
    Report,
    attacked_text,
    claim_text,
    label,
    proven_text,
    run_folder,
)
from dither.spec import Spec


@dataclass(frozen=True, repr=False)
class PrivacyReport(Overview):
    """Claimed, proven and attacked ε of a spec or a run.

    Where they were asked for, `tried` holds every bound that was tried, refusals with their reason, and `ex_ante`
    the same before an honest party draws who takes part (R4).
    """

    method: str
    epsilon: Epsilon
    why: str  # why claim and proof differ
    tried: tuple[ProvenRow, ...] = ()
    ex_ante: tuple[ProvenRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        more = {"tried": self.tried, "ex_ante": self.ex_ante}
        return {
            **{name: [row.to_json() for row in rows] for name, rows in more.items() if rows},
            "method": self.method,
            **self.epsilon.to_json(),
            "why": self.why,
        }

    def to_json(self) -> str:
        """The same as text; ∞ is the string "inf"."""
        return to_json(self.to_dict(), indent=2)

    def title(self) -> str:
        return f"{self.method}: claimed and proven ε"

    def overview(self) -> list[tuple[str, str]]:
        """The claim, then each proven and each attacked ε."""
        return [
            ("claimed ε", claim_text(self.epsilon.claimed)),
            *((label(row), proven_text(row)) for row in self.epsilon.notable),
            *(("attacked ε", attacked_text(row)) for row in self.epsilon.attacked),
        ]


def account(
    what: Spec | str | Path | Mapping[str, Any],
    *,
    values: Mapping[str, Any] | None = None,
    every_recipe: bool = False,
    ex_ante: bool = False,
    data_dir: str | Path | None = None,
) -> PrivacyReport:
    """Claimed and proven ε of a preset, a TOML file, a mapping, a `Spec` or a run folder, without training.

    `values` are dotted keys put on top of the spec. `every_recipe` also lists each bound that was tried, `ex_ante`
    each bound before the cohorts are drawn.
    """
    folder = run_folder(what)
    finished = Report.read(folder.path) if folder is not None else None
    if finished is not None and not (values or every_recipe or ex_ante):
        return PrivacyReport(finished.method, finished.epsilon, finished.why)
    spec = (folder.spec() if folder is not None else Spec.from_any(what)).with_values(values or {})
    rounds: int | None = None
    begun: list[tuple[int, int]] = []
    if folder is not None and not values:
        rounds = finished.rounds if finished is not None else None
        begun = folder.begun() if spec.source_of_randomness == "os" else []
        if begun and finished is None:  # what is left would be made from the newest checkpoint on
            checkpoint = folder.load_checkpoint()
            begun.append((0 if checkpoint is None else checkpoint.round, spec.num_rounds))
    from dither.experiment import build
    from dither.methods import method

    experiment = build.build_experiment(spec, data_dir=data_dir)
    claim = experiment.prepared.claim
    if rounds is not None and rounds < build.planned_rounds(experiment):
        claim = build.claim_after(experiment, rounds)
        experiment = experiment if begun else experiment.first_rounds(rounds)
    accountant = (experiment.realised(begun) if begun else experiment).accountant()
    attacked = finished.epsilon.attacked if finished is not None and not values else ()
    return PrivacyReport(
        method=spec.method,
        epsilon=Epsilon.of(spec, claim, accountant.table(), attacked),
        why=method(spec.method).why,
        tried=tuple(accountant.tried()) if every_recipe else (),
        ex_ante=tuple(accountant.before_the_draw(experiment.prepared.cohort_size_at)) if ex_ante else (),
    )
