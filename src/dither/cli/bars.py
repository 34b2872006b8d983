"""Progress of many runs: a live bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import Any

import typer

from dither.cli.printing import terminal


class Bar:
    """`update(done, total, text)` as work goes on. Work that was done before is no sign of today's speed: the bar
    starts behind what the first update names as done."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self._bar: Any = None
        self._task: Any = None
        self._before = 0.0
        self._told = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, total: float, text: str) -> None:
        """Show how far things are."""
        if self.silent:
            return
        if self._bar is None and terminal().is_terminal:
            self._start(done, total)
        tenths = int(10 * done / max(total, 1e-9))
        if self._bar is not None:
            self._bar.update(self._task, completed=done - self._before, description=text)
        elif tenths > self._told:
            self._told = tenths
            typer.echo(f"{10 * tenths}%  {text}")

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self.silent:
            return
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            typer.echo(line)

    def _start(self, done: float, total: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description:20}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=terminal(),
        )
        self._before = done
        self._task = self._bar.add_task("", total=max(total - done, 1e-9))
        self._bar.start()
