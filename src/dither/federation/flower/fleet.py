"""Everything of Flower that lies below its documented API, in one file (why: `dither.federation.flower`).

Three things: a party's connection to the SuperLink (`serve`), registered keys and signed requests (`register`,
`signer`), and the coordinator's messages to parties (`PartyMessages`) or to SuperNodes (`SuperNodeMessages`).

A SuperNode starts a process for every message, sleeps 3 s whenever there is none, runs the app that the server
sends, and goes to whatever host the server refers it to. `serve` asks for a message, which the gate answers when
there is one. It hands the message to a function of this process and never looks at the app: the server can make it
compute nothing but what Dither answers.

Flower's programs send a message with an empty content and then its objects, three for one of ours, by a call for
each, and fetch them in the same way: 16 calls for a question and its answer. A message may just as well have its
content with it. Between a coordinator and parties of ours it does: two calls of each party, and two of the
coordinator for all of them.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import PriorityQueue
from secrets import token_hex
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, message_pb2, runtime_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, verify_signature
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dither.errors import FederationError
from dither.federation.local import IdleTimer, clock

RECORD, BODY = "dither", "body"
_FIRST_POLL, _LONGEST_POLL = 0.03, 0.5  # seconds between two polls: right after a message, and at most
_CALL_SECONDS = 30.0, 0.1  # for a call's answer, and more for each node: all of them may call at once
_HEARTBEAT_SECONDS = 10.0, 1800.0  # the shortest and the longest that a SuperLink takes; it waits for two
_HEARTBEATS = 5.0  # a second, of all nodes together
_LINGER_SECONDS = 2.0  # a SuperLink throws away a node's last answer if the node leaves before it is fetched
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 5.0  # between attempts to connect
_FETCHERS = 4  # calls at once by which answers are fetched: a client keeps as many connections open, and no more
_MOST_AT_ONCE = 1 << 25  # bytes of messages in one call of the coordinator's
_PATIENCE = 190.0  # seconds after which a SuperLink no longer waits for objects that were announced
_IN_EVERY_ANSWER = 64 * "0"  # an object, by its digest
_FETCH_SECONDS = 0.1  # how long one `Answers.pull` waits for answers that are being fetched
_COMPLETE_SECONDS = 600.0  # for an answer that was begun to become complete
_LONGEST_ANSWER = 1 << 30  # bytes of one of the server's to a call: more than any question has

logging.getLogger("httpx").setLevel(logging.WARNING)


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


# A party's connection


# reason: where, what to answer, and four limits
def serve(
    server: Server,
    answer: Callable[[bytes], bytes],
    *,
    until: Callable[[], bool],
    patience: float,
    idle: float = 86400.0,
    nodes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Answer messages until `until()`, as one of so many `nodes`. A broken connection is made again, with growing
    pauses. `FederationError` after `patience` seconds without one, after `idle` seconds in which nothing was asked
    and answered, and when the server may not be trusted or does not know this node."""
    pause, since, tries = _FIRST_PAUSE, time.monotonic(), 0
    timer = IdleTimer(f"the server at {server.address}", idle, say)
    while not until():
        try:
            with _Connection(server, nodes) as connection:
                say(f"connected to {server.address}")
                pause, poll, tries = _FIRST_PAUSE, _FIRST_POLL, 0
                while not until():
                    body = connection.next()
                    since = time.monotonic()
                    if body is None:
                        timer.check()
                        time.sleep(poll)
                        poll = min(1.3 * poll, _LONGEST_POLL)
                    else:
                        found = answer(body)  # which may wait for the owner
                        since = time.monotonic()
                        timer.reset()
                        connection.reply(found)
                        poll = _FIRST_POLL
                time.sleep(_LINGER_SECONDS)
        except ConnectionLost as error:
            away = time.monotonic() - since
            if away > patience:
                raise FederationError(
                    f"no server at {server.address} for {patience:.0f} s ({error}); check the address and that "
                    "`dither serve` runs there"
                ) from None
            timer.check()
            tries += 1
            if tries & (tries - 1) == 0:  # the first, second, fourth, eighth ...
                say(
                    f"no connection to {server.address} since {clock(-away)}, try {tries} ({error}); the next in "
                    f"{pause:.1f} s, the last at {clock(patience - away)}"
                )
            end = time.monotonic() + pause
            while time.monotonic() < end and not until():
                time.sleep(0.05)
            pause = min(2 * pause, _LONGEST_PAUSE)


class _Connection:
    """One activation of this node at the SuperLink."""

    def __init__(self, server: Server, nodes: int = 1) -> None:
        shortest, longest = _HEARTBEAT_SECONDS
        self._beat_seconds = min(max(shortest, 2 * nodes / _HEARTBEATS), longest)
        key: Any = load_ssh_private_key(server.key.read_bytes(), None)
        self._server, self._public = server, public_key_to_bytes(key.public_key())
        seconds, more = _CALL_SECONDS
        self._client = FleetHttpClient(
            f"https://{server.address}",
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
            verify=ssl.create_default_context(cafile=str(server.ca)),
            timeout=seconds + more * nodes,
        )
        web: Any = self._client._client
        web.follow_redirects = False  # no server sends a party to other hosts
        web.headers["accept-encoding"] = "identity"
        web.event_hooks = {"response": [_check_length]}
        self._node: Any = None
        self._question: Any = None
        self._stop = threading.Event()
        self._beat = threading.Thread(target=self._heartbeat, daemon=True)

    def __enter__(self) -> _Connection:
        self._client.__enter__()
        try:
            request = fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=self._beat_seconds)
            try:
                answer = self._call(self._client.ActivateNode, request)
            except _RequestRejected:
                self._leave_first()
                try:
                    answer = self._call(self._client.ActivateNode, request)
                except _RequestRejected:
                    raise FederationError(
                        f"{self._server.address} does not admit this node: {self._server.key.name} is not a "
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
        if not self._server.memory.is_file():
            return
        with suppress(_RequestRejected, ValueError):  # a number that cannot be read is as good as none
            self._leave(int(self._server.memory.read_text(encoding="ascii")))

    def _leave(self, number: int) -> None:
        self._call(self._client.DeactivateNode, fleet_pb2.DeactivateNodeRequest(node_id=number))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        try:
            self._leave(self._node.node_id)
        except (ConnectionLost, FederationError):
            pass  # it may be gone already
        finally:
            self._beat.join(1.0)
            self._client.__exit__(None, None, None)

    def next(self) -> bytes | None:
        """The body of the next message, or None."""
        answer = self._call(self._client.PullMessages, fleet_pb2.PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        self._question = _read(answer.messages_list[0])
        return body_of(self._question) or b""

    def reply(self, body: bytes) -> None:
        """Answer the message that `next` gave."""
        listed, trees = _with_content([Message(content(body), reply_to=self._question)], _IN_EVERY_ANSWER)
        request = fleet_pb2.PushMessagesRequest(
            node=self._node, messages_list=listed, message_object_trees=trees, clientapp_runtime_list=[0.0]
        )
        self._call(self._client.PushMessages, request)

    def _heartbeat(self) -> None:
        request = heartbeat_pb2.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=self._beat_seconds)
        while not self._stop.wait(self._beat_seconds / 2):
            with suppress(ConnectionLost, FederationError):  # whoever asks for messages meets it too, and says so
                self._call(self._client.SendNodeHeartbeat, request)

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """One call: what may heal is `ConnectionLost`, what will not is `FederationError`."""
        try:
            return method(request)
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code == 401 and self._node is None:
                raise FederationError(
                    f"{self._server.address} does not know this node: is {self._server.key.name} the key of a "
                    "party of this federation, and is the clock right?"
                ) from None
            if 400 <= code < 500 and code != 429:  # too many connections, until the gate drops old ones
                raise _RequestRejected(f"HTTP {code}") from None
            raise ConnectionLost(f"HTTP {code}") from None
        except httpx.RequestError as error:
            self._check_trust(error)
            raise ConnectionLost(str(error) or type(error).__name__) from None
        except ValueError as error:  # no message of Flower's
            raise ConnectionLost(f"an answer that cannot be read: {error}") from None

    def _check_trust(self, error: BaseException) -> None:
        """A server that may not be trusted is no broken connection."""
        text, inner = str(error), error.__cause__ or error.__context__
        while inner is not None and not isinstance(inner, ssl.SSLCertVerificationError):
            inner = inner.__cause__ or inner.__context__
        if "CERTIFICATE_VERIFY_FAILED" in text or inner is not None:
            reason = text if inner is None else inner.verify_message
            raise FederationError(
                f"the certificate of {self._server.address} is refused: {reason}; it must come from this "
                "federation's CA, name this address and be in force (dither federation renew)"
            ) from None
        if "WRONG_VERSION_NUMBER" in text:
            raise FederationError(
                f"{self._server.address} does not speak TLS; it is not a server of this federation"
            )


def _check_length(answer: httpx.Response) -> None:
    """ValueError, before anything of it is read, if an answer may become longer than a question can be."""
    length = answer.headers.get("content-length", "")
    if "content-encoding" in answer.headers or not length.isdigit() or int(length) > _LONGEST_ANSWER:
        raise ValueError(f"content-length {length[:20]!r}, at most {_LONGEST_ANSWER} plain bytes are possible")


# Registered keys and signed requests


def register(superlink: str, ca: Path, public_keys: Mapping[str, str]) -> None:
    """Let nodes connect to the SuperLink at that address: names and their keys (OpenSSH)."""
    with ControlHttpClient.from_server_address(
        superlink, False, ca.read_bytes(), interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    ) as client:
        for name, public_key in public_keys.items():
            key: Any = load_ssh_public_key(public_key.encode())
            request = control_pb2.RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name)
            refused = (
                f"Flower does not take the key of {name!r}; leave that party out (`dither federation revoke`)"
            )
            try:
                taken = client.RegisterNode(request).node_id
            except httpx.HTTPStatusError:
                raise FederationError(refused) from None
            if not taken:
                raise FederationError(refused)


def number_in(answer: bytes) -> int:
    """The number that a SuperLink gives to a node that connects."""
    return int(fleet_pb2.ActivateNodeResponse.FromString(answer).node_id)


def signing_keys(public_keys: Collection[str]) -> dict[bytes, Any]:
    """Public keys (OpenSSH) by the bytes that stand for them in requests."""
    keys: list[Any] = [load_ssh_public_key(each.encode()) for each in public_keys]
    return {public_key_to_bytes(each): each for each in keys}


def signer(headers: Mapping[bytes, bytes], keys: Mapping[bytes, Any]) -> bytes:
    """Which of the keys signed the time in a request's headers; empty where none did."""
    try:
        public = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
        signed = headers[TIMESTAMP_HEADER.encode()]
        age = (datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii"))).total_seconds()
        timely = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        return public if timely and verify_signature(keys[public], signed, signature) else b""
    except (KeyError, ValueError, TypeError):
        return b""


# The coordinator's messages


class PartyMessages:
    """Messages to parties that `serve`, with their content. The SuperLink also lists an object for each, which it
    waits for in vain. It drops the objects of a push, and what is left of their messages, when it is asked for one
    of them after its patience (180 s). So it is: for a question of each push, and for the object that all answers
    have in common. Its memory stays bounded."""

    def __init__(self, grid: Any) -> None:
        self._grid, self._longest, self._sweep = grid, 1, 0.0
        self._waited_for: PriorityQueue[tuple[float, str]] = PriorityQueue()  # when to ask for it, object
        threading.Thread(target=self._drop, daemon=True).start()

    def push(self, messages: Sequence[Message], *, ttl: float) -> list[str]:
        """Their ids; empty for one that the SuperLink does not take."""
        self._longest = max([self._longest, *(len(body_of(each) or b"") for each in messages)])
        numbers: list[str] = []
        for batch in self._batches(messages):
            listed, trees = _with_content(batch)
            request = runtime_pb2.PushAppMessagesRequest(messages_list=listed, message_object_trees=trees)
            taken = self._grid._runtime_client.PushMessages(request).message_ids
            self._expect(next(filter(None, taken), ""), ttl)
            numbers += taken
        return numbers

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        """Answers that have come; None for a message that will never be answered."""
        answers = []
        for batch in self._batches(list(ids)):
            request = runtime_pb2.PullAppMessagesRequest(message_ids=batch)
            for message in self._grid._runtime_client.PullMessages(request).messages_list:
                answers.append((message.metadata.reply_to_message_id, _answer(message)))
        if answers and time.monotonic() > self._sweep:
            self._sweep = time.monotonic() + _PATIENCE
            self._expect(_IN_EVERY_ANSWER, 2 * _PATIENCE)
        return [(number, body) for number, body in answers if number in ids]

    def _batches(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """So many at once that no call carries too much: an answer is about as long as its question."""
        count = max(1, _MOST_AT_ONCE // self._longest)
        return (items[at : at + count] for at in range(0, len(items), count))

    def _expect(self, number: str, seconds: float) -> None:
        self._waited_for.put((time.monotonic() + max(seconds, _PATIENCE), number))

    def _drop(self) -> None:
        while True:
            due, number = self._waited_for.get()
            if due > time.monotonic():
                self._waited_for.put((due, number))
                time.sleep(1.0)
                continue
            request = message_pb2.PullObjectRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, object_id=number
            )
            with suppress(httpx.HTTPError):
                self._grid._runtime_client.PullObject(request)


class SuperNodeMessages:
    """Messages to SuperNodes, by the documented call, and their answers. One call asks which there are; each is
    fetched by itself, in a thread, so that one that was only begun holds up nobody."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._fetching: dict[str, Future[bytes | None]] = {}  # question -> its answer
        self._calling = threading.Semaphore(_FETCHERS)

    def push(self, messages: Sequence[Message], *, ttl: float) -> list[str]:
        """Their ids; empty for one that the SuperLink does not take."""
        del ttl  # it is in the messages
        return list(self._grid.push_messages(messages))

    def pull(self, ids: Collection[str]) -> list[tuple[str, bytes | None]]:
        """Answers that have come; None for a message that will never be answered."""
        unanswered = [number for number in ids if number not in self._fetching]
        if unanswered:
            request = runtime_pb2.PullAppMessagesRequest(message_ids=unanswered)
            listed = self._grid._runtime_client.PullMessages(request)
            for message, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
                self._fetching[message.metadata.reply_to_message_id] = self._start(message.metadata, tree)
        wait(self._fetching.values(), _FETCH_SECONDS)
        done = [number for number, answer in self._fetching.items() if answer.done()]
        answers = [(number, self._fetching.pop(number).result()) for number in done]
        return [(number, body) for number, body in answers if number in ids]

    def _start(self, metadata: Any, tree: Any) -> Future[bytes | None]:
        """Fetch one answer in a daemon thread: one that waits in vain keeps no process from ending."""
        answer: Future[bytes | None] = Future()

        def fetch() -> None:
            try:
                answer.set_result(self._fetch(metadata, tree))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=fetch, daemon=True).start()
        return answer

    def _fetch(self, metadata: Any, tree: Any) -> bytes | None:
        client, node = self._grid._runtime_client, self._grid.node
        until = time.monotonic() + _COMPLETE_SECONDS

        def part(number: str) -> bytes | None:
            pause = _FIRST_POLL
            request = message_pb2.PullObjectRequest(node=node, run_id=metadata.run_id, object_id=number)
            while time.monotonic() < until:
                with self._calling:
                    answer = client.PullObject(request)
                if not answer.object_found:
                    break
                if answer.object_available:
                    return bytes(answer.object_content)
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
            return None

        try:
            message = _assembled(tree, part)
        except UnreadableMessage:
            return b""  # no message of ours either: whoever sent it is named for that
        if message is None:
            return None  # its sender died in the middle of it
        confirmed = message_pb2.ConfirmMessageReceivedRequest(
            node=node, run_id=metadata.run_id, message_object_id=metadata.message_id
        )
        with self._calling:
            client.ConfirmMessageReceived(confirmed)
        return (body_of(message) or b"") if message.has_content() else None


def _with_content(messages: Sequence[Message], *objects: str) -> tuple[list[Any], list[Any]]:
    """Messages as they are sent with their content, and the tree of objects that goes with each."""
    for message in messages:
        message.metadata.__dict__["_message_id"] = token_hex(32)  # which a SuperLink takes for a digest
    below = [message_pb2.ObjectTree(object_id=each) for each in objects]
    trees = [message_pb2.ObjectTree(object_id=each.metadata.message_id, children=below) for each in messages]
    return [message_to_proto(message) for message in messages], trees


def _read(sent: Any) -> Message:
    """A message that was sent with its content."""
    try:
        return message_from_proto(sent)
    except Exception as error:  # whatever comes of bytes that anybody may have sent
        raise UnreadableMessage(f"a message that cannot be read: {type(error).__name__}") from None


def _answer(sent: Any) -> bytes | None:
    """The bytes in an answer; None where it is Flower's own, that there will be none."""
    try:
        message = _read(sent)
    except UnreadableMessage:
        return b""  # no message of ours either: whoever sent it is named for that
    return (body_of(message) or b"") if message.has_content() else None


def _assembled(tree: Any, part: Callable[[str], bytes | None]) -> Any:
    """A Flower message from its parts, or None where one of them is not to be had."""
    contents = {}
    for each in inflatable_object.iterate_object_tree(tree):
        content_of_part = part(each.object_id)
        if content_of_part is None:
            return None
        contents[each.object_id] = content_of_part
    try:
        message = inflate_object_from_contents(tree.object_id, contents)
    except Exception as error:  # whatever comes of bytes that anybody may have sent
        raise UnreadableMessage(f"a message that cannot be read: {type(error).__name__}") from None
    if not isinstance(message, Message):
        raise UnreadableMessage(f"a {type(message).__name__} in the place of a message")
    return message


# Our bytes in a Flower message (documented)


def content(body: bytes) -> RecordDict:
    """Our bytes as the content of a Flower message."""
    return RecordDict({RECORD: ConfigRecord({BODY: body})})


def body_of(message: Message) -> bytes | None:
    """Our bytes in a Flower message, or None where it carries none."""
    if not message.has_content() or not isinstance(message.content, RecordDict):
        return None
    record = message.content.get(RECORD)
    body = record.get(BODY) if isinstance(record, ConfigRecord) else None
    return body if isinstance(body, bytes) else None
