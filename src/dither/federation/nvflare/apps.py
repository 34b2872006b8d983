"""The FLARE job: what runs in the job processes of the server and of the sites.

The Controller hands one task to every site, "take_part", which lasts as long as the job: so no site polls for
tasks. Meanwhile questions and answers travel as auxiliary messages. At a site the Executor hands each question to
`dither join` over its Unix socket, and tells the server every few seconds whether somebody is there, which
questions it has received and which of its answers it still keeps: so the server notices a question or an answer
that was lost on the way. (A request that waits for its reply would be confirmed at once, but FLARE streams those:
an answer then takes four messages in place of one.)

A question has an identifier of 128 random bits, which only its receiver learns: no site can answer in the place of
another. What an answer says is checked by the signature inside it.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply

from dither.federation.local import answers_at, hand_over
from dither.federation.messages import TransportRestart
from dither.federation.nvflare import CONNECTED, KIT, SOCKET

_TASK = "take_part"
_QUESTION, _ANSWER, _PRESENCE, _AGAIN = "dither.question", "dither.answer", "dither.presence", "dither.again"
_SERVER = "server"  # FLARE's name for it
_BEAT_SECONDS = 3.0  # between two messages of a site that says who is there
_LOOK_SECONDS = 0.2  # between two looks at the socket
_SILENT_SECONDS = 15.0  # after which a site is gone
_LOST_SECONDS = 5.0  # after which a question that the site does not list was lost on the way
_STUCK_SECONDS = 3.0  # without an answer, before the coordinator looks at who has come back
_JOIN_SECONDS = 20.0  # for a connected site's job process to speak
_LISTED = 1024  # newest questions that a site confirms
_KEPT = 2  # newest answers that a site can send again
_MOST_WAITING = 1 << 28  # bytes of questions that a site holds
_EACH = 1 << 10  # bytes that a question takes besides its body


class AuxTransport:
    """Implements `dither.federation.messages.Transport`."""

    def __init__(self, engine: Any, context: Any, connected: Path | None = None) -> None:
        self._engine, self._context, self._connected = engine, context, connected
        self._began = self._heard_anything = time.monotonic()
        self._heard: dict[str, float] = {}  # site -> when its job process last spoke
        self._news = threading.Condition()
        self._numbers: dict[str, int] = {}  # site -> address
        self._present: dict[int, tuple[str, float]] = {}  # address -> mark, when it was heard
        self._open: dict[str, tuple[int, float]] = {}  # question -> address, when it was sent
        self._answers: dict[str, bytes | None] = {}  # question -> its answer; None if there will be none
        engine.register_aux_message_handler(_ANSWER, self._on_answer)
        engine.register_aux_message_handler(_PRESENCE, self._on_presence)

    def nodes(self) -> dict[int, str]:
        now = time.monotonic()
        with self._news:
            return {at: mark for at, (mark, heard) in self._present.items() if now - heard < _SILENT_SECONDS}

    def push(self, bodies: Mapping[int, bytes], *, ttl: float) -> dict[int, str]:
        del ttl  # a question that nobody waits for any more is answered to nobody
        sites = {number: site for site, number in self._numbers.items()}
        numbers = {address: secrets.token_hex(16) for address in bodies if address in sites}
        requests = {sites[at]: _shareable(number=number, body=bodies[at]) for at, number in numbers.items()}
        with self._news:
            self._open |= {number: (address, time.monotonic()) for address, number in numbers.items()}
        self._engine.multicast_aux_requests(_QUESTION, requests, 0.0, self._context)
        return numbers

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        with self._news:
            return [(number, self._answers.pop(number)) for number in ids if number in self._answers]

    def pause(self) -> None:
        """Until an answer comes, but not for long: the caller also looks at who is there."""
        with self._news:
            if not self._answers:
                self._news.wait(0.2)
        if time.monotonic() - self._heard_anything > _STUCK_SECONDS:
            self.check_sites()

    def check_sites(self) -> None:
        """`TransportRestart` if a site is connected without its job process: FLARE lets it take part in the next
        job, not in this one."""
        if self._connected is None or time.monotonic() - self._began < _JOIN_SECONDS:
            return
        try:
            sites = json.loads(self._connected.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        now = time.monotonic()
        absent = [site for site in sites if now - self._heard.get(site, -_JOIN_SECONDS) >= _JOIN_SECONDS]
        if absent:
            raise TransportRestart(f"{', '.join(absent)} came back")

    def _on_answer(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        number, body = str(request.get("number")), request.get("body")
        with self._news:
            asked, _ = self._open.get(number, (None, 0.0))
            # Of the site that was asked alone: another one may have handed it the question, to stand for it.
            if asked == self._numbers.get(_peer(fl_ctx), -1) and (body is None or isinstance(body, bytes)):
                del self._open[number]
                self._answers[number] = body
                self._heard_anything = time.monotonic()
                self._news.notify_all()
        return make_reply(ReturnCode.OK)

    def _on_presence(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        site = _peer(fl_ctx)
        mark = str(request.get("mark") or "")
        received, answered = (_strings(request.get(key)) for key in ("received", "answered"))
        now = time.monotonic()
        with self._news:
            self._heard[site] = now
            address = self._numbers.setdefault(site, len(self._numbers))
            if mark:
                self._present[address] = mark, now
            else:
                self._present.pop(address, None)
            for number, (at, sent) in list(self._open.items()):
                if at == address and now - sent > _LOST_SECONDS and number not in received:
                    del self._open[number]
                    self._answers[number] = None
                    self._news.notify_all()
            lost = [number for number in answered if self._open.get(number, (None, 0.0))[0] == address]
        if lost:
            self._engine.multicast_aux_requests(_AGAIN, {site: _shareable(numbers=lost)}, 0.0, fl_ctx)
        return make_reply(ReturnCode.OK)


class CoordinatorController(Controller):  # type: ignore[misc]
    """Runs the coordinator of `dither serve`."""

    def __init__(self, config: dict[str, str]) -> None:
        super().__init__()
        self._config = config

    def start_controller(self, fl_ctx: Any) -> None:
        self._transport = AuxTransport(fl_ctx.get_engine(), fl_ctx, Path(self._config["run"]) / KIT / CONNECTED)

    def control_flow(self, abort_signal: Any, fl_ctx: Any) -> None:
        from dither.federation import serving

        self.broadcast(Task(_TASK, Shareable()), fl_ctx, min_responses=0)
        serving.coordinate(self._transport, self._config, self._transport.check_sites)

    def stop_controller(self, fl_ctx: Any) -> None:
        """Nothing is open: the coordinator's files are whole at any moment."""

    def process_result_of_unknown_task(self, client: Any, task_name: str, *_: Any) -> None:
        """A site that comes back with a task of an earlier job."""


class RelayExecutor(Executor):  # type: ignore[misc]
    """Hands questions to `dither join` on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._path = Path(os.environ[SOCKET])
        self._questions: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self._waiting, self._counting = 0, threading.Lock()  # bytes of them
        self._received: deque[str] = deque(maxlen=_LISTED)
        self._answers: dict[str, bytes | None] = {}  # the newest, by question

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        if event_type == EventType.START_RUN:
            self._engine = fl_ctx.get_engine()
            self._engine.register_aux_message_handler(_QUESTION, self._on_question)
            self._engine.register_aux_message_handler(_AGAIN, self._on_again)
            threading.Thread(target=self._answer_all, daemon=True).start()

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        """Say who is there until the job is over."""
        said, at = "", 0.0
        while not abort_signal.triggered:
            mark = self._mark()
            if mark != said or time.monotonic() - at > _BEAT_SECONDS:
                self._send(_PRESENCE, mark=mark, received=list(self._received), answered=list(self._answers))
                said, at = mark, time.monotonic()
            time.sleep(_LOOK_SECONDS)
        return make_reply(ReturnCode.OK)

    def _mark(self) -> str:
        """Changes with the process behind the socket; empty if there is none."""
        try:
            return str(self._path.stat().st_ctime_ns) if answers_at(self._path) else ""
        except OSError:
            return ""

    def _on_question(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        number, body = request.get("number"), request.get("body")
        if isinstance(number, str) and isinstance(body, bytes):
            if not self._make_room(len(body) + _EACH):
                return make_reply(ReturnCode.OK)  # not confirmed: the server asks again
            self._received.append(number)
            self._questions.put((number, body))
        return make_reply(ReturnCode.OK)

    def _make_room(self, size: int) -> bool:
        """Count that many bytes more, unless there are too many."""
        with self._counting:
            fits = not self._waiting or self._waiting + size <= _MOST_WAITING
            self._waiting += size * fits
        return fits

    def _answer_all(self) -> None:
        while True:
            number, body = self._questions.get()
            self._make_room(-len(body) - _EACH)
            try:
                answer: bytes | None = hand_over(self._path, body)
            except OSError:  # the process died with the question in its hands, or there is none
                answer = None
            self._answers[number] = answer
            for old in list(self._answers)[:-_KEPT]:
                del self._answers[old]
            self._send(_ANSWER, number=number, body=answer)

    def _on_again(self, topic: str, request: Any, fl_ctx: Any) -> Any:
        """The server misses an answer that this site gave."""
        for number in _strings(request.get("numbers")):
            if number in self._answers:
                self._send(_ANSWER, number=number, body=self._answers[number])
        return make_reply(ReturnCode.OK)

    def _send(self, topic: str, **values: Any) -> None:
        """One message to the server, which is not waited for."""
        with self._engine.new_context() as context:
            self._engine.multicast_aux_requests(topic, {_SERVER: _shareable(**values)}, 0.0, context)


def _shareable(**values: Any) -> Any:
    shareable = Shareable()
    shareable.update(values)
    return shareable


def _peer(fl_ctx: Any) -> str:
    """The site that sent a message, as it says."""
    return str(fl_ctx.get_peer_context().get_identity_name())


def _strings(listed: Any) -> set[str]:
    """The strings in what should be a list of them."""
    return {each for each in listed if isinstance(each, str)} if isinstance(listed, list) else set()
