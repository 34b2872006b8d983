"""Changes pushed to open pages: one watcher looks at the folder for all of them, and rests when nobody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.concurrency import run_in_threadpool

from dither.runs import to_json
from dither.web.index import Index, Row

_BEAT = 15.0  # seconds after which a silent connection gets a sign of life


class Watcher:
    """Server-sent events with the rows that changed."""

    def __init__(self, index: Index, seconds: float, public: Callable[[Row], Row]) -> None:
        self.index, self.seconds, self.public = index, seconds, public
        self._listeners: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def events(self) -> AsyncIterator[str]:
        """The stream of one page."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._listeners.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\nevent: hello\ndata: {}\n\n"
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), _BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._listeners.discard(queue)

    async def _watch(self) -> None:
        while self._listeners:
            changes = await run_in_threadpool(self.index.refresh)
            if changes.changed or changes.removed:
                rows = [self.public(row) for row in self.index.rows(changes.changed)]
                self._tell("runs", {"rows": rows, "removed": changes.removed})
            await asyncio.sleep(self.seconds)

    def _tell(self, name: str, value: Any) -> None:
        message = f"event: {name}\ndata: {to_json(value)}\n\n"  # one line: JSON has no raw line break
        for queue in self._listeners:
            queue.put_nowait(message)
