"""Progress of a run in a notebook: a bar that updates in place."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dither.experiment.build import Experiment


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookProgress:
    """The callbacks of `run` that draw the bar."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._total = 0

    def start(self, experiment: Experiment, folder: Path, done: int) -> None:
        from IPython.display import HTML, display

        from dither.experiment.build import planned_rounds

        self._total = planned_rounds(experiment)
        self._handle = display(HTML(self._bar(done, "")), display_id=True)

    def update(self, row: dict[str, Any]) -> None:
        from IPython.display import HTML

        score = next((name for name in ("test_accuracy", "test_r2") if row.get(name) is not None), None)
        text = "" if score is None else f"{score.replace('_', ' ')} {row[score]:.4f}"
        self._handle.update(HTML(self._bar(row["round"], text)))

    def _bar(self, done: int, text: str) -> str:
        bar = f'<progress value="{done}" max="{self._total}"></progress>'
        return f"{bar} round {done}/{self._total} {html.escape(text)}"
