"""Flower as transport, without a run: who is let in, who is not, and what can be reached from outside."""

import re
import socket
import ssl
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

import httpx

from dither.errors import ConfigError, FederationError
from dither.federation import flower, keys
from dither.federation.flower import TlsFiles, fleet
from dither.federation.flower import gate as gates
from dither.federation.flower.gate import Gate
from dither.federation.flower.superlink import SuperLink
from dither.federation.local import free_port
from tests.federation.parties import days_ago


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """A SuperLink that lets in ann and bob but not eve, and the gate before it."""
    folder = tmp_path_factory.mktemp("link")
    federation = keys.create(folder / "keys", ["ann", "bob", "eve"], hosts=["localhost"])
    server, port = folder / "keys" / "server", free_port()
    with SuperLink(folder, TlsFiles.of(server), {}) as found:
        found.register([federation.party(name) for name in ("ann", "bob")])
        nodes = [federation.party(name).node_key for name in ("ann", "bob")]
        with Gate("127.0.0.1", port, inside=found.inside, nodes=nodes, tls=TlsFiles.of(server)):
            yield folder / "keys", port, found


def where(folder: Path, port: int, name: str, **changes) -> fleet.Server:
    own = folder / "parties" / name
    values = {
        "address": f"127.0.0.1:{port}",
        "ca": own / "ca.pem",
        "key": own / "node.key",
        "memory": own / "node.number",
    }
    return fleet.Server(**{**values, **changes})


def visit(server: fleet.Server, patience: float = 0.0) -> list[str]:
    """Connect, look once for messages, and leave; what was said."""
    said: list[str] = []
    looks = iter([False] * 6)
    fleet.serve(server, lambda body: body, until=lambda: next(looks, True), patience=patience, say=said.append)
    return said


def test_a_key_that_flower_does_not_take_is_named(link):
    """The server ended with an HTTP error that named nobody."""
    folder, _, found = link
    ann = keys.Keyring.load(folder / "server").party("ann")
    with pytest.raises(FederationError, match="does not take the key of 'twice'"):
        found.register([replace(ann, name="twice")])


def test_a_registered_node_is_let_in(link):
    folder, port, _ = link
    assert visit(where(folder, port, "ann")) == [f"connected to 127.0.0.1:{port}"]


def test_a_node_that_was_killed_takes_its_place_back(link):
    folder, port, _ = link
    dead = fleet._Connection(where(folder, port, "bob"))
    dead.__enter__()  # and never leaves
    dead._stop.set()
    assert visit(where(folder, port, "bob")) == [f"connected to 127.0.0.1:{port}"]


def test_a_node_that_nobody_registered_is_not(link):
    folder, port, _ = link
    with pytest.raises(FederationError, match=r"does not know this node: is node.key the key of a party"):
        visit(where(folder, port, "eve"))


def test_a_node_with_anothers_number_is_not(link, tmp_path):
    """A wrong key: signed by a key that is registered nowhere, in the name of a node that is."""
    folder, port, _ = link
    visit(where(folder, port, "ann"))
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    wrong = tmp_path / "keys" / "parties" / "ann" / "node.key"
    with pytest.raises(FederationError, match=r"does not admit|does not know"):
        visit(where(folder, port, "ann", key=wrong))


def test_a_server_from_another_ca_is_refused(link, tmp_path):
    folder, port, _ = link
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    with pytest.raises(FederationError, match=r"certificate of .* is refused.*federation's CA"):
        visit(where(folder, port, "ann", ca=tmp_path / "keys" / "ca" / "ca.pem"))


def test_an_expired_certificate_is_refused(link, tmp_path, monkeypatch):
    _, _, found = link
    with days_ago(monkeypatch, 30):
        keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"], days=7)
    port = free_port()
    with (
        Gate("127.0.0.1", port, inside=found.inside, nodes=[], tls=TlsFiles.of(tmp_path / "keys" / "server")),
        pytest.raises(FederationError, match=r"certificate has expired.*renew"),
    ):
        visit(where(tmp_path / "keys", port, "ann"))


def test_plain_text_is_spoken_by_nobody(link):
    folder, port, _ = link
    with pytest.raises(httpx.HTTPError):  # to the gate
        httpx.post(f"http://127.0.0.1:{port}/v1/fleet/activate-node", content=b"", timeout=5)
    with socket.create_server(("127.0.0.1", 0)) as plain:  # a server that does not know TLS

        def greet():
            line, _ = plain.accept()
            with line:
                line.recv(100)
                line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(FederationError, match=r"does not speak TLS"):
            visit(where(folder, plain.getsockname()[1], "ann"))


def test_nothing_but_the_calls_of_nodes_passes_the_gate(link):
    folder, port, found = link
    trust = ssl.create_default_context(cafile=str(folder / "server" / "ca.pem"))
    with httpx.Client(verify=trust, timeout=10) as client:

        def status(method, path, at=port):
            return client.request(method, f"https://127.0.0.1:{at}{path}").status_code

        assert status("POST", "/v1/fleet/pull-messages") == 401  # a node's call, and no node
        for path in (
            "/v1/control/start-run",
            "/v1/control/register-node",
            "/v1/runtime/acquire-task",
            "/docs",
        ):
            assert status("POST", path) == 404
            assert status("GET", path) == 404
        for call in ("register-node", "get-run", "get-fab"):  # the last two tell of the server's own files
            assert status("POST", f"/v1/fleet/{call}") == 404
        # The paths are real ones: inside, on 127.0.0.1, they exist.
        assert status("POST", "/v1/control/start-run", found.port) != 404
        assert status("POST", "/v1/runtime/acquire-task", found.port) != 404


def test_a_call_for_a_question_waits_at_the_gate(link, monkeypatch):
    """Once the SuperLink has said that there is none, it is asked again when the coordinator hints at one, or when
    that was long ago."""
    folder, _, found = link
    hints, port, passed, line = gates.Hints(), free_port(), [], gates._Line.ask
    party = keys.Keyring.load(folder / "server").party("ann")

    def ask(self, request, body):
        passed.append(request.target)
        return line(self, request, body)

    monkeypatch.setattr(gates._Line, "ask", ask)
    monkeypatch.setattr(gates, "_HOLD_SECONDS", (0.3, 0.0))
    tls = TlsFiles.of(folder / "server")
    with (
        Gate("127.0.0.1", port, inside=found.inside, nodes=[party.node_key], tls=tls, hints=hints),
        fleet._Connection(where(folder, port, "ann")) as node,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as coordinator,
    ):
        coordinator.connect(("127.0.0.1", int(hints.address.split(":")[1])))

        def pulls(calls=1):
            before = passed.count(b"/v1/fleet/pull-messages")
            assert [node.next() for _ in range(calls)] == [None] * calls
            return passed.count(b"/v1/fleet/pull-messages") - before

        assert pulls() == 1
        assert pulls(3) == 0
        coordinator.send(b"odd")
        coordinator.send(array("Q", [node._node.node_id + 1]))  # nobody here
        assert pulls() == 0
        monkeypatch.setattr(gates, "_HOLD_SECONDS", (60.0, 0.0))
        threading.Timer(0.3, coordinator.send, [array("Q", [5, node._node.node_id])]).start()
        assert pulls() == 1  # it waited for this
        monkeypatch.setattr(gates, "_HOLD_SECONDS", (0.3, 0.0))
        assert pulls() == 0
        monkeypatch.setattr(gates, "_SURE_SECONDS", 0.0)
        monkeypatch.setattr(gates, "_SURE_PULLS", 1e9)
        assert pulls() == 1


def test_an_unreachable_server_is_tried_again_and_then_named(link, monkeypatch):
    folder, _, _ = link
    monkeypatch.setattr(fleet, "_FIRST_PAUSE", 0.05)
    said: list[str] = []
    port = free_port()
    began = time.monotonic()
    with pytest.raises(FederationError, match=rf"no server at 127.0.0.1:{port} for 1 s .*`dither serve`"):
        fleet.serve(
            where(folder, port, "ann"), lambda body: body, until=lambda: False, patience=1.0, say=said.append
        )
    pauses = [float(line.split("the next in ")[1].split()[0]) for line in said]
    assert 1.0 <= time.monotonic() - began < 10.0
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0]
    assert [line.split("try ")[1].split()[0] for line in said] == [str(2**n) for n in range(len(said))]
    assert all("since" in line and "the last at" in line for line in said)


def test_a_party_whose_owner_took_long_is_not_out_of_patience(tmp_path, monkeypatch):
    """An owner who approved after more than --patience: one broken call ended the party, as if no server had been
    there all the time."""
    tried: list[int] = []

    class Broken:
        def __init__(self, *_: object) -> None:
            tried.append(0)

        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def next(self) -> bytes:
            return b"terms"

        def reply(self, body: bytes) -> None:
            raise fleet.ConnectionLost("the server was started again")

    monkeypatch.setattr(fleet, "_Connection", Broken)
    monkeypatch.setattr(fleet, "_FIRST_PAUSE", 0.0)
    fleet.serve(
        where(tmp_path, 1, "ann"),
        lambda body: time.sleep(0.3) or body,
        until=lambda: len(tried) == 2,
        patience=0.2,
        idle=0.2,
    )


@pytest.mark.parametrize(("code", "heals"), [(429, True), (403, False)])
def test_a_gate_that_has_no_room_at_the_moment_is_tried_again(tmp_path, code, heals):
    """After a few broken connections the gate still holds the old ones: the party ended, as if it were unknown."""
    answer = httpx.Response(code, request=httpx.Request("POST", "https://server"))
    connection = object.__new__(fleet._Connection)
    connection._node, connection._server = None, where(tmp_path, 1, "ann")
    with pytest.raises(fleet.ConnectionLost) as caught:
        connection._call(lambda request: answer.raise_for_status(), None)
    assert heals is not isinstance(caught.value, fleet._RequestRejected)


def test_the_address_that_is_taken_is_named(link):
    folder, port, found = link
    taken = Gate("127.0.0.1", port, inside=found.inside, nodes=[], tls=TlsFiles.of(folder / "server"))
    with pytest.raises(FederationError, match=f"cannot listen on 127.0.0.1:{port}"):
        taken.__enter__()


def test_another_version_of_flower_is_refused(monkeypatch):
    pinned = re.search(r'"flwr>=([\d.]+),<([\d.]+)"', Path("pyproject.toml").read_text())
    assert (pinned[1], pinned[2]) == (flower.VERSIONS[0], f"1.{int(flower.VERSIONS[-1][2:]) + 1}")
    flower.require()
    monkeypatch.setattr(flower, "version", lambda package: "1.43.1")
    with pytest.raises(ConfigError, match=r"Flower 1\.43\.1 is installed.*1\.42: pip install .*\[deploy\]"):
        flower.require()


def test_an_answer_that_never_becomes_complete_holds_up_nobody(monkeypatch):
    """A node killed between announcing its answer and sending it: Flower then waits for minutes."""
    from types import SimpleNamespace

    from flwr.proto.node_pb2 import Node

    from dither.federation.flower.apps import GridTransport

    def begun(number):
        metadata = SimpleNamespace(reply_to_message_id=number, message_id=number, run_id=1)
        return SimpleNamespace(metadata=metadata)

    class Client:
        def PullMessages(self, request):
            there = [number for number in request.message_ids if number in ("half", "whole")]
            return SimpleNamespace(messages_list=[begun(n) for n in there], message_object_trees=there)

        def PullObject(self, request):
            available = request.object_id == "whole"
            return SimpleNamespace(object_found=True, object_available=available, object_content=b"whole")

        def ConfirmMessageReceived(self, request):
            assert request.message_object_id == "whole"

    answer = SimpleNamespace(has_content=lambda: True, content=fleet.content(b"whole"))
    monkeypatch.setattr(fleet, "_assembled", lambda tree, part: part(tree) and answer)
    grid = SimpleNamespace(_runtime_client=Client(), node=Node(node_id=1))
    transport = GridTransport(grid, supernodes=True)
    began = time.monotonic()
    found: list = []
    while not found and time.monotonic() - began < 20:
        found = transport.pull(["half", "whole", "none"])
    assert found == [("whole", b"whole")]
    assert transport.pull(["half", "none"]) == []
    assert time.monotonic() - began < 20


def test_messages_that_carry_their_content_leave_nothing_at_the_superlink(monkeypatch):
    """For each it lists an object that never comes: it drops them, and their push, when it is asked for one after
    its patience."""
    from datetime import timedelta
    from types import SimpleNamespace

    from flwr.app import Message
    from flwr.proto.node_pb2 import Node
    from flwr.supercore import constant, date
    from flwr.supercore.corestate import in_memory_corestate
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
    from flwr.supercore.task_identity import TaskIdentity

    class State(in_memory_corestate.InMemoryCoreState):
        def _on_push_session_expired(self, message_object_ids):
            dropped.update(message_object_ids)

    State.__abstractmethods__ = frozenset()
    state, dropped, late, asked = State(InMemoryObjectStore()), set(), [0.0], threading.Event()
    monkeypatch.setattr(in_memory_corestate, "now", lambda: date.now() + timedelta(seconds=late[0]))
    monkeypatch.setattr(fleet, "_PATIENCE", 0.0)
    for number in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, number, 1, raising=False)
    assert constant.OBJECT_PUSH_SESSION_TTL_SECONDS < 190.0

    class Client:
        def PushMessages(self, request):
            session = state.start_session(1)
            for tree in request.message_object_trees:
                state.preregister_object_tree(tree, session)
            return SimpleNamespace(message_ids=[tree.object_id for tree in request.message_object_trees])

        def PullMessages(self, request):
            metadata = SimpleNamespace(reply_to_message_id=numbers[0])
            return SimpleNamespace(messages_list=[SimpleNamespace(metadata=metadata)])

        def PullObject(self, request):
            late[0] = 190.0
            assert state.get_object(1, request.object_id) is None
            asked.set()

    run = SimpleNamespace(run_id=1)
    messages = fleet.PartyMessages(SimpleNamespace(_runtime_client=Client(), node=Node(node_id=1), run=run))
    questions = [Message(fleet.content(body), dst_node_id=7, message_type="query") for body in (b"a", b"b")]
    numbers = messages.push(questions, ttl=0.0)
    assert asked.wait(10)
    assert dropped == set(numbers)
    assert len(numbers) == 2
    asked.clear()
    late[0] = 0.0
    for question in questions:  # answers come one by one; one call is for all of them
        _, trees = fleet._with_content([Message(fleet.content(b"c"), reply_to=question)], fleet._IN_EVERY_ANSWER)
        state.preregister_object_tree(trees[0], state.start_session(1))
    assert len(state.object_store) == 3
    assert messages.pull(numbers) == [(numbers[0], b"")]
    assert asked.wait(10)
    assert not state._object_push_sessions
    assert not state._object_push_session_by_root
    assert len(state.object_store) == 0
