"""What is left of a data set's budget, by the ledger that the page was started with.

A run's summary names a ledger file. That name is compared with the page's own ledger and never opened.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dither.errors import DitherError
from dither.web.index import text_of


class Budgets:
    """Budget, spent and left by data set, read again when the ledger's file changes."""

    def __init__(self, ledger: str | Path | None) -> None:
        self.path = Path(ledger).resolve() if ledger is not None else None
        self._seen: tuple[int, ...] = ()
        self._known: dict[str, dict[str, Any] | None] = {}
        self._lock = threading.Lock()

    def left(self, named: Mapping[str, Any]) -> dict[str, Any] | None:
        """The budget of the data set that a run was charged to; None where there is no such budget."""
        if self.path is None or not named or not self.path.is_file():
            return None
        try:
            if Path(text_of(named.get("file", ""))).resolve() != self.path:
                return None
        except (OSError, ValueError, RuntimeError):
            return None
        with self._lock:
            seen = tuple(
                path.stat().st_mtime_ns
                for path in (self.path, self.path.with_name(self.path.name + "-wal"))
                if path.is_file()
            )
            if seen != self._seen:
                self._seen, self._known = seen, {}
            dataset = text_of(named.get("dataset", ""))
            if dataset not in self._known:
                self._known[dataset] = self._read(dataset)
            return self._known[dataset]

    def _read(self, dataset: str) -> dict[str, Any] | None:
        from dither.accounting.ledger.runs import EVERY_RECORD, Ledger

        assert self.path is not None  # noqa: S101  # `left` has asked
        try:
            ledger = Ledger(self.path)
            budget = ledger.budget(dataset)
            if budget is None:
                return None
            spent = next((each.epsilon for each in ledger.spent(dataset) if each.client == EVERY_RECORD), 0.0)
        except DitherError as error:
            return {"problem": str(error)}
        return {"budget": budget.epsilon, "spent": spent, "left": max(budget.epsilon - spent, 0.0)}
