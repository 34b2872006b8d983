"""Does a finding depend on what the paper leaves open? It is judged at the reference and with one open setting
changed at a time, or two that interact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dither.errors import DataError
from dither.reproduction.figure import Change, Criterion, Figure, FinishedRun, MissingRun, View
from dither.reproduction.judging import NOT_COMPUTED, Robustness

if TYPE_CHECKING:
    from dither.reproduction.cache import Accounts

REFERENCE = Change("reference", (), {})


def views(
    figure: Figure, scale: str, runs: Mapping[str, FinishedRun], accounts: Accounts | None = None
) -> Iterator[tuple[Change, View]]:
    """The figure as printed, at the reference and with each change."""
    for change in [REFERENCE, *figure.changes()]:
        yield change, View(figure, scale, runs, accounts, changed=change.values)


def judged_criteria(figure: Figure) -> Sequence[Criterion]:
    """The criteria as the paper states them, where a run stands behind them."""
    return [criterion for criterion in figure.criteria if not criterion.variant]


def judge(
    figure: Figure, scale: str, runs: Mapping[str, FinishedRun], accounts: Accounts
) -> dict[str, Robustness]:
    """Each criterion of the figure in every setting, by its id."""
    rows: dict[str, list[dict[str, str]]] = {criterion.id: [] for criterion in judged_criteria(figure)}
    for change, view in views(figure, scale, runs, accounts):
        for criterion in judged_criteria(figure):
            try:
                verdict = criterion.verdict(view).status
            except (MissingRun, DataError):
                verdict = NOT_COMPUTED
            row = {"setting": change.label, "changes": ", ".join(change.settings), "verdict": verdict}
            rows[criterion.id].append(row)
    return {name: Robustness(scale, tuple(verdicts)) for name, verdicts in rows.items()}
