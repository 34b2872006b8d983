"""Where the seconds of a run or a sweep went, with those of the compiler apart from the others.

    clock = Clock()
    with clock("rounds"):
        state = jax.block_until_ready(simulation.advance(...))
    clock.seconds  # {"compile": 0.41, "rounds": 2.03}

JAX tells how long it traced, lowered and compiled a function, or fetched the program from its cache on disk. One
of these may happen inside another, so what counts is the time that any of them was under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

COMPILE = "compile"

_EVENTS = "/jax/core/compile/"
_spent = 0.0  # seconds of this process under way in the compiler
_covered: list[tuple[float, float]] = []  # the latest spans, by their end
_listening = False


class Clock:
    """Seconds by what they were spent on. Compiling counts as "compile", wherever it happens."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {COMPILE: 0.0}
        _listen()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Count what happens inside as `what`. Not to be nested."""
        began, compiled = time.perf_counter(), _spent
        try:
            yield
        finally:
            compiled = _spent - compiled
            took = time.perf_counter() - began
            self.seconds[COMPILE] += compiled
            self.seconds[what] = self.seconds.get(what, 0.0) + max(took - compiled, 0.0)

    def report(self) -> dict[str, float]:
        """The seconds, rounded to milliseconds."""
        return {what: round(value, 3) for what, value in self.seconds.items()}


def _listen() -> None:
    global _listening
    if not _listening:
        _listening = True
        import jax

        jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    """A span has just ended. Spans that lie inside it have ended before, and are counted already."""
    global _spent
    if not event.startswith(_EVENTS):
        return
    end = time.perf_counter()
    start = earliest = end - duration_secs
    inside = 0.0
    while _covered and _covered[-1][1] > start:
        first, last = _covered.pop()
        inside += last - max(first, start)
        earliest = min(first, earliest)
    _spent += max(duration_secs - inside, 0.0)
    _covered.append((earliest, end))
    del _covered[:-64]
