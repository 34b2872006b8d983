"""What takes seconds: computed one at a time in the background, once for each state of a run."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dither.errors import DitherError

_KEPT = 200


class NotComputed(DitherError):
    """The page does not compute this; the message says why, and what does."""


class Computer:
    """Answers by key. Equal questions wait for one answer; a failure is not kept: it may be mended meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dither-web")
        self._answers: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._lock = threading.RLock()  # a question may be done before it is let go

    async def ask(self, key: Hashable, question: Callable[[], Any]) -> Any:
        """The answer to a question, computed unless it is known."""
        with self._lock:
            future = self._answers.get(key)
            if future is None:
                future = self._answers[key] = self._pool.submit(question)
                future.add_done_callback(lambda done: self._forget_failure(key, done))
                while len(self._answers) > _KEPT:
                    self._answers.popitem(last=False)
        # A page that is closed meanwhile must not cancel what another one waits for.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _forget_failure(self, key: Hashable, done: Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                self._answers.pop(key, None)
