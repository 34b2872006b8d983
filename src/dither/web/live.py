"""Changes pushed to open pages: one watcher looks at the folder for all of them, and rests when nobody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi.concurrency import run_in_threadpool

from dither.experiment.folder import to_json
from dither.web.index import Changes, Index, Row

_BEAT = 15.0  # seconds after which a silent connection gets a sign of life


class Watcher:
    """Server-sent events with the rows that changed since a page last heard."""

    def __init__(self, index: Index, seconds: float, public: Callable[[Row], Row]) -> None:
        self.index, self.seconds, self.public = index, seconds, public
        self._pages = 0
        self._looked = asyncio.Event()  # a new one each time the folder was looked at
        self._task: asyncio.Task[None] | None = None

    async def events(self, since: str = "") -> AsyncIterator[str]:
        """The stream of one page, from the position it knows. Each event carries the position after it, which a
        browser that lost the connection sends back."""
        position = since or self.index.position
        self._pages += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield "retry: 2000\n\nevent: hello\ndata: {}\n\n"
            while True:
                looked = self._looked
                # In a thread: the index may be held by a look at the folder.
                position, changes = await run_in_threadpool(self.index.since, position)
                if changes is None or changes.changed or changes.removed:
                    yield await run_in_threadpool(self._event, position, changes)
                    continue
                try:
                    await asyncio.wait_for(looked.wait(), _BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self._pages -= 1

    async def _watch(self) -> None:
        while self._pages:
            await run_in_threadpool(self.index.refresh)
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(self.seconds)

    def _event(self, position: str, changes: Changes | None) -> str:
        rows = self.index.rows(None if changes is None else changes.changed)
        removed = [] if changes is None else changes.removed
        told = {"rows": [self.public(row) for row in rows], "removed": removed, "all": changes is None}
        return f"id: {position}\nevent: runs\ndata: {to_json(told)}\n\n"  # one line: JSON has no raw line break
