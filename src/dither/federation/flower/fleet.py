"""A node that speaks Flower's Fleet API by itself: messages in, answers out, no code of anybody else's.

A SuperNode starts a process for every message, sleeps 3 s whenever there is none, and runs the app that the server
sends it. This node asks often while messages come (every 30 ms, then ever less, down to twice a second), hands the
message to a function of this process, and never looks at the app: the server can make it compute nothing but what
Dither answers. The calls are those of Flower's SuperNode; they lie below Flower's documented interface, which is
why `dither[deploy]` pins its versions.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dither.errors import FederationError
from dither.federation.flower import require

RECORD, BODY = "dither", "body"
_ASK_SECONDS, _REST_SECONDS = 0.03, 0.5  # between two questions: right after a message, and at most
_SHARE = 4.0  # times as long as the last question took: a server with many nodes is asked less often by each
_HEARTBEAT_SECONDS = 10.0  # the shortest that a SuperLink takes; it gives a silent node up after two
_LINGER_SECONDS = 2.0  # a SuperLink throws away what a node said last if it leaves before that is fetched
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # between attempts to connect
_QUIET_SECONDS = 60.0  # without a question before that is said; then twice as long, and so on


@dataclass(frozen=True)
class Server:
    """Where the SuperLink is, and how this node proves who it is."""

    address: str  # host:port
    ca: Path
    key: Path  # OpenSSH private key, ECDSA
    memory: Path  # remembers this node's number at the SuperLink, to take its place back after a crash


class ConnectionLost(Exception):
    """The connection broke: connect anew."""


class _RequestRejected(ConnectionLost):
    """The SuperLink understood and said no."""


class UnreadableMessage(ConnectionLost):
    """Parts that make no message of Flower's."""


class IdleTimer:
    """How long nothing has been asked: said now and then, and ended with `FederationError` after `seconds`."""

    def __init__(self, where: str, seconds: float, say: Callable[[str], None]) -> None:
        self._where, self._seconds, self._say = where, seconds, say
        self.heard()

    def heard(self) -> None:
        """Something was asked, and answered."""
        self._since, self._next = time.monotonic(), _QUIET_SECONDS

    def look(self) -> None:
        quiet = time.monotonic() - self._since
        if quiet > self._seconds:
            raise FederationError(
                f"{self._where} has asked nothing for {self._seconds:.0f} s; this party gives up: start it again "
                "when the server's owner says so"
            )
        if quiet > self._next:
            end = _clock(self._seconds - quiet)
            self._say(f"{self._where} has asked nothing since {_clock(-quiet)}; waiting until {end}")
            self._next *= 2


def _clock(seconds: float) -> str:
    """The time of day so many seconds from now."""
    return f"{datetime.now(UTC) + timedelta(seconds=seconds):%d %b %H:%M:%S} UTC"


def serve(
    server: Server,
    answer: Callable[[bytes], bytes],
    *,
    until: Callable[[], bool],
    patience: float,
    idle: float = 86400.0,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Answer messages until `until()`. A broken connection is made again, with growing pauses. `FederationError`
    after `patience` seconds without one, after `idle` seconds in which nothing was asked and answered, and when
    the server may not be trusted or does not know this node."""
    require()
    pause, since, tries = _FIRST_PAUSE, time.monotonic(), 0
    quiet = IdleTimer(f"the server at {server.address}", idle, say)
    while not until():
        try:
            with _Connection(server) as connection:
                say(f"connected to {server.address}")
                pause, rest, tries = _FIRST_PAUSE, _ASK_SECONDS, 0
                while not until():
                    asked = time.monotonic()
                    body = connection.next()
                    since = time.monotonic()
                    if body is None:
                        quiet.look()
                        time.sleep(max(rest, _SHARE * (since - asked)))
                        rest = min(1.3 * rest, _REST_SECONDS)
                    else:
                        connection.reply(answer(body))
                        quiet.heard()
                        rest = _ASK_SECONDS
                time.sleep(_LINGER_SECONDS)
        except ConnectionLost as error:
            away = time.monotonic() - since
            if away > patience:
                raise FederationError(
                    f"no server at {server.address} for {patience:.0f} s ({error}); check the address and that "
                    "`dither serve` runs there"
                ) from None
            quiet.look()
            tries += 1
            if tries & (tries - 1) == 0:  # the first, second, fourth, eighth ...
                say(
                    f"no connection to {server.address} since {_clock(-away)}, try {tries} ({error}); the next in "
                    f"{pause:.1f} s, the last at {_clock(patience - away)}"
                )
            _sleep(pause, until)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _sleep(seconds: float, until: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        time.sleep(0.05)


class _Connection:
    """One activation of this node at the SuperLink."""

    def __init__(self, server: Server) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        logging.getLogger("httpx").setLevel(logging.WARNING)
        key: Any = load_ssh_private_key(server.key.read_bytes(), None)
        self._server, self._public = server, public_key_to_bytes(key.public_key())
        self._client = FleetHttpClient.from_server_address(
            server.address,
            False,
            server.ca.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )
        self._node: Any = None
        self._question: Any = None
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._heartbeat, daemon=True)

    def __enter__(self) -> _Connection:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node

        self._client.__enter__()
        try:
            request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_HEARTBEAT_SECONDS)
            try:
                answer = self._call(self._client.ActivateNode, request)
            except _RequestRejected:
                self._leave_first()
                try:
                    answer = self._call(self._client.ActivateNode, request)
                except _RequestRejected:
                    raise FederationError(
                        f"{self._server.address} does not admit this node: {self._server.key.name} is no "
                        "registered key of this federation, or another process with this key is connected"
                    ) from None
            self._node = Node(node_id=answer.node_id)
            self._server.memory.write_text(str(answer.node_id), encoding="ascii")
        except BaseException:
            self._client.__exit__(None, None, None)
            raise
        self._beat.start()
        return self

    def _leave_first(self) -> None:
        """A process that was killed is still connected in the SuperLink's eyes: sign it off."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        if not self._server.memory.is_file():
            return
        with suppress(_RequestRejected, ValueError):  # a number that cannot be read is as good as none
            number = int(self._server.memory.read_text(encoding="ascii"))
            self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=number))

    def __exit__(self, *_: object) -> None:
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        self._stop.set()
        try:
            self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self._node.node_id))
        except (ConnectionLost, FederationError):
            pass  # it may be gone already
        finally:
            self._beat.join(1.0)
            self._client.__exit__(None, None, None)

    def next(self) -> bytes | None:
        """The body of the next message, or None."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        answer = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        message, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        run, number = message.metadata.run_id, message.metadata.message_id
        whole = inflated(
            tree, lambda part: self._object(PullObjectRequest(node=self._node, run_id=run, object_id=part))
        )
        self._call(
            self._client.ConfirmMessageReceived,
            ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=number),
        )
        whole.metadata.__dict__["_message_id"] = number
        self._question = whole
        return body_of(whole) or b""

    def _object(self, request: Any) -> bytes:
        """One object of a message; the server may still be receiving it."""
        for _ in range(200):
            found = self._call(self._client.PullObject, request)
            if found.object_found and found.object_available:
                return found.object_content
            time.sleep(_ASK_SECONDS)
        raise ConnectionLost("a message that never became complete")

    def reply(self, body: bytes) -> None:
        """Answer the message that `next` gave."""
        from flwr.app import Message
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        message = Message(content(body), reply_to=self._question)
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            tree, parts = get_object_tree(message), get_all_nested_objects(message)
            answer = self._call(
                self._client.PushMessages,
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(message))],
                    message_object_trees=[tree],
                    clientapp_runtime_list=[0.0],
                ),
            )
            for number in answer.objects_to_push:
                self._call(
                    self._client.PushObject,
                    PushObjectRequest(
                        node=self._node,
                        run_id=message.metadata.run_id,
                        session_id=answer.session_id,
                        object_id=number,
                        object_content=parts[number].deflate(),
                    ),
                )

    def _heartbeat(self) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not self._stop.wait(_HEARTBEAT_SECONDS / 2):
            try:
                self._call(
                    self._client.SendNodeHeartbeat,
                    SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=_HEARTBEAT_SECONDS),
                )
            except (ConnectionLost, FederationError):
                continue  # whoever asks for messages meets the same trouble, and says so

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """One call: what may heal is `ConnectionLost`, what will not is `FederationError`."""
        import httpx

        try:
            return method(request)
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code == 401 and self._node is None:
                raise FederationError(
                    f"{self._server.address} does not know this node: is {self._server.key.name} the key of a "
                    "party of this federation, and is the clock right?"
                ) from None
            if 400 <= code < 500:
                raise _RequestRejected(f"HTTP {code}") from None
            raise ConnectionLost(f"HTTP {code}") from None
        except httpx.TransportError as error:
            self._judge(error)
            raise ConnectionLost(str(error) or type(error).__name__) from None
        except ValueError as error:  # no message of Flower's
            raise ConnectionLost(f"an answer that cannot be read: {error}") from None

    def _judge(self, error: BaseException) -> None:
        """A server that may not be trusted is no broken connection."""
        text, inner = str(error), error.__cause__ or error.__context__
        while inner is not None:
            if isinstance(inner, ssl.SSLCertVerificationError):
                text = inner.verify_message
                break
            inner = inner.__cause__ or inner.__context__
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(inner, ssl.SSLCertVerificationError):
            raise FederationError(
                f"the certificate of {self._server.address} is refused: {text}; it must come from this "
                "federation's CA, name this address and be in force (dither federation renew)"
            ) from None
        if "WRONG_VERSION_NUMBER" in text:
            raise FederationError(f"{self._server.address} does not speak TLS; it is no server of this federation")


def content(body: bytes) -> Any:
    """Our bytes as the content of a Flower message."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({RECORD: ConfigRecord({BODY: body})})


def inflated(tree: Any, part: Callable[[str], bytes | None]) -> Any:
    """A Flower message from its parts, or None where one of them is not to be had."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    contents = {}
    for each in iterate_object_tree(tree):
        found = part(each.object_id)
        if found is None:
            return None
        contents[each.object_id] = found
    try:
        whole = inflate_object_from_contents(tree.object_id, contents)
    except Exception as error:  # whatever comes of bytes that anybody may have sent
        raise UnreadableMessage(f"a message that cannot be read: {type(error).__name__}") from None
    if not isinstance(whole, Message):
        raise UnreadableMessage(f"a {type(whole).__name__} in the place of a message")
    return whole


def body_of(message: Any) -> bytes | None:
    """Our bytes in a Flower message, or None where it carries none."""
    from flwr.app import ConfigRecord, RecordDict

    if not message.has_content() or not isinstance(message.content, RecordDict):
        return None
    record = message.content.get(RECORD)
    found = record.get(BODY) if isinstance(record, ConfigRecord) else None
    return found if isinstance(found, bytes) else None
