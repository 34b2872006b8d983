"""The progress of many runs on stderr: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import Any

from dither.cli.printing import error_terminal, escape


class Bar:
    """The progress of sweep, plan and reproduce. Work finished before the first update says nothing about today's
    speed, so the bar starts after it."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._before = 0.0
        self._tenths = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, total: float, text: str) -> None:
        """Show how much of the work is done."""
        if self.silent:
            return
        if self._bar is None and error_terminal().is_terminal:
            self._start(done, total)
        tenths = int(10 * done / max(total, 1e-9))
        if self._bar is not None:
            self._bar.update(self._task, completed=done - self._before, description=text)
        elif tenths > self._tenths:
            self._tenths = tenths
            self.say(f"{10 * tenths}%  {text}")

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        if not self.silent:
            console = self._bar.console if self._bar is not None else error_terminal()
            console.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)

    def _start(self, done: float, total: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description:20}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=error_terminal(),
        )
        self._before = done
        self._task = self._bar.add_task("", total=max(total - done, 1e-9))
        self._bar.start()
