"""Ctrl-C: every command ends with exit code 130 and says how to go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from typer.core import TyperGroup

from dither.cli.printing import error_terminal, escape

INTERRUPTED = 130
_AGAIN = "nothing is left half-written: the same command begins again"


class Program(TyperGroup):
    """The program: a command that says nothing of its own on Ctrl-C gets the sentence that holds for all."""

    def invoke(self, ctx: Any) -> Any:
        with going_on(_AGAIN):
            return super().invoke(ctx)


@contextmanager
def going_on(how: str | Callable[[], str]) -> Iterator[None]:
    """A block whose interruption ends the program with `how` to go on (asked for at that moment)."""
    try:
        yield
    except KeyboardInterrupt:
        stop(how() if callable(how) else how)


def stop(how: str) -> NoReturn:
    """One line and the exit code of an interruption."""
    error_terminal().print(f"interrupted; {escape(how)}", soft_wrap=True, highlight=False)
    sys.exit(INTERRUPTED)
