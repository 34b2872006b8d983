"""A party of the federation that wants the run to fail: what it sends ends no server."""

import json
import struct
import time
from types import SimpleNamespace

import pytest

from dither.errors import FederationError
from dither.federation import keys, messages


def with_shape(identity, shape):
    """A signed answer that announces an empty array of that shape."""
    header = {
        **{"federation": "f", "kind": "upload", "from": "bob", "to": messages.SERVER, "nonce": "", "answers": "q"},
        **{"fields": {"round": 0}, "arrays": [["upload", "<f4", shape]]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<4sBI", b"DTHR", 1, len(text)) + text + b"\0" * (4 if shape == [True] else 0)
    return content + identity.sign(content)


@pytest.mark.parametrize("shape", [[0, 2**31, 2**31, 2**31], [True], [0, False], [-1]])
def test_a_shape_that_no_array_has_is_a_message_that_cannot_be_read(tmp_path, shape):
    """Anything but FederationError would end the coordinator, which names and excludes nobody then."""
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    identity = keys.Identity.load(tmp_path / "keys" / "parties" / "bob")
    with pytest.raises(FederationError, match="'upload' of type"):
        messages.unpack(
            with_shape(identity, shape),
            federation="f",
            to=messages.SERVER,
            keys={"bob": identity.public},
            answers="q",
        )


def test_an_answer_that_flower_cannot_read_ends_no_coordinator():
    """Flower's own objects around the answer are the party's, too: a record whose bytes are no record."""
    pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.node_pb2 import Node

    from dither.federation.flower.apps import GridTransport

    bodies = {"garbage": b"ConfigRecord  3\0abc", "no message": b"ConfigRecord  0\0", "unknown": b"Nothing  0\0"}

    class Client:
        def PullMessages(self, request):
            ids = request.message_ids
            metadata = [SimpleNamespace(reply_to_message_id=n, message_id=n, run_id=1) for n in ids]
            return SimpleNamespace(
                messages_list=[SimpleNamespace(metadata=each) for each in metadata],
                message_object_trees=[ObjectTree(object_id=n) for n in ids],
            )

        def PullObject(self, request):
            content = bodies[request.object_id]
            return SimpleNamespace(object_found=True, object_available=True, object_content=content)

        def ConfirmMessageReceived(self, request):
            pass

    grid = SimpleNamespace(_runtime_client=Client(), node=Node(node_id=1))
    transport = GridTransport(grid, supernodes=True)
    found, until = [], time.monotonic() + 20
    while len(found) < len(bodies) and time.monotonic() < until:
        found += transport.pull([number for number in bodies if number not in dict(found)])
    assert dict(found) == dict.fromkeys(bodies, b"")  # which is no message: its sender is named


def test_an_answer_with_a_content_that_is_not_ours_ends_no_coordinator():
    pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")
    from flwr.app import ConfigRecord, RecordDict
    from flwr.common.serde import recorddict_to_proto
    from flwr.proto.error_pb2 import Error
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.recorddict_pb2 import RecordDict as Sent

    from dither.federation.flower.apps import GridTransport

    contents = {
        "nothing": Sent(),
        "a record without a value": Sent(items=[{"key": "dither"}]),
        "another record": recorddict_to_proto(RecordDict({"other": ConfigRecord({"body": b"x"})})),
        "text for bytes": recorddict_to_proto(RecordDict({"dither": ConfigRecord({"body": "x"})})),
    }

    class Client:
        def PullMessages(self, request):
            there = [number for number in request.message_ids if number in contents]
            said = [Message(metadata=_about(number), content=contents[number]) for number in there]
            said += [Message(metadata=_about("gone"), error=Error(code=1, reason="x"))]
            return SimpleNamespace(messages_list=[*said, Message(metadata=_about("never asked"))])

        def PullObject(self, request):
            """What the transport drops later, in its own thread."""

    def _about(number):
        return Metadata(
            reply_to_message_id=number, message_id=f"answer to {number}", ttl=60.0, message_type="query"
        )

    transport = GridTransport(SimpleNamespace(_runtime_client=Client(), node=None, run=SimpleNamespace(run_id=1)))
    found = transport.pull([*contents, "gone", "not yet answered"])
    assert dict(found) == {**dict.fromkeys(contents, b""), "gone": None}


def test_answers_without_content_are_asked_for_again_but_not_in_a_flood(tmp_path, monkeypatch):
    """Each question carries the whole model: who answers nothing, at once, must not have it sent at once again."""
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    folder, ticks, pushed = tmp_path / "keys" / "server", iter(range(10**6)), []

    class Empty:
        def nodes(self):
            return {1: "mark"}

        def push(self, bodies, *, ttl):
            pushed.append(bodies)
            return {address: f"{len(pushed)}" for address in bodies}

        def pull(self, ids):
            return [(number, None) for number in ids]

        def pause(self):
            pass

    monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
    letters = messages.Mailbox(Empty(), keys.Keyring.load(folder), keys.Identity.load(folder))
    letters._address, letters._asked = {"bob": 1}, {1: "mark"}
    letters.ask("round", {"bob": ({}, {})}, seconds=10.0, take=lambda name, answer: None)
    assert 5 <= len(pushed) <= 10 / messages._LOOK_SECONDS + 1
