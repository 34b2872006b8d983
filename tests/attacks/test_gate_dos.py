"""Strangers, without a key, fill the memory of `dither serve` through the port that it opens to the world."""

import socket
import ssl
import threading

import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

from dither.federation import keys
from dither.federation.flower import TlsFiles
from dither.federation.flower import gate as gates
from dither.federation.flower.gate import Gate
from dither.federation.local import free_port

MEBIBYTE = 1 << 20


class Counting(Gate):
    """A gate that counts the bytes of bodies which it takes in."""

    taken = 0

    async def _app(self, scope, receive, send):
        async def counted():
            part = await receive()
            self.taken += len(part.get("body", b""))
            return part

        await super()._app(scope, counted, send)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "keys"
    keys.create(folder, ["ann", "bob"], hosts=["localhost"])
    return folder


@pytest.fixture
def gate(folder):
    server, port = folder / "server", free_port()
    inside = f"127.0.0.1:{free_port()}"  # nobody is there
    nodes = [party.node_key for party in keys.Keyring.load(server).parties]
    with Counting("127.0.0.1", port, inside=inside, nodes=nodes, tls=TlsFiles.of(server)) as found:
        found.port = port
        yield found


def connected(gate):
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", gate.port), timeout=10)
    return trust.wrap_socket(plain)


def post(gate, length, headers="", sent=0):
    """Post a body said to be of that length, of which `sent` mebibytes are sent; the answer's first line, empty
    where the line is cut."""
    with connected(gate) as line:
        head = f"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{headers}\r\n"
        try:
            line.sendall(head.encode())
            for _ in range(sent):
                line.sendall(bytes(MEBIBYTE))
            return line.recv(100).split(b"\r\n")[0]
        except OSError:
            return b""


def test_no_strangers_body_is_read(gate):
    strangers = [threading.Thread(target=post, args=(gate, 8 * MEBIBYTE, "", 8)) for _ in range(4)]
    for each in strangers:
        each.start()
    for each in strangers:
        each.join(20)
    assert gate.taken == 0


def signed(folder, name="ann", age=0.0):
    """Headers with which a node shows itself, as Flower makes them."""
    from base64 import b64encode
    from datetime import UTC, datetime, timedelta

    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    key = load_ssh_private_key((folder / "parties" / name / "node.key").read_bytes(), None)
    at = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    public, signature = public_key_to_bytes(key.public_key()), sign_message(key, at.encode())
    return (
        f"flwr-public-key: {b64encode(public).decode()}\r\nflwr-timestamp: {at}\r\n"
        f"flwr-signature: {b64encode(signature).decode()}\r\n"
    )


def test_a_node_shows_itself_by_its_signature_of_the_time(gate, folder, tmp_path):
    good = signed(folder)
    assert b" 502 " in post(gate, 10, good)  # it passes, and nobody is inside
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    older, others = signed(folder, age=3600), signed(tmp_path / "keys")
    mixed = "\r\n".join([good.split("\r\n")[0], *others.split("\r\n")[1:]])
    for headers in ("", older, others, mixed, good.replace("flwr-signature: ", "flwr-signature: AAAA")):
        assert post(gate, 10, headers) == b"HTTP/1.1 401 Unauthorized"


def test_a_nodes_body_is_no_longer_than_the_terms_allow(gate, folder):
    most = gate.most_bytes
    assert post(gate, most + 1, signed(folder)) == b"HTTP/1.1 413 Request Entity Too Large"
    assert post(gate, 10**18, signed(folder)) == b"HTTP/1.1 413 Request Entity Too Large"
    gate.most_bytes = 2 * most
    assert b" 502 " in post(gate, most + 1, signed(folder))
    chunked = signed(folder) + "Transfer-Encoding: chunked\r\n"
    assert b" 200 " not in post(gate, 10, chunked)


def test_strangers_are_few_and_soon_gone(gate, folder, monkeypatch):
    """Silent connections, with and without TLS: never more than a few, and a node gets in meanwhile."""
    silent = [socket.create_connection(("127.0.0.1", gate.port), timeout=10) for _ in range(100)]
    assert b" 502 " in post(gate, 10, signed(folder))
    assert len(gate._peers) <= gates._STRANGERS + 1
    for line in silent[:30]:
        assert ended(line)  # the oldest made room
    for line in silent:
        line.close()
    monkeypatch.setattr(gates, "_STRANGER_SECONDS", 0.3)
    plain, slow = socket.create_connection(("127.0.0.1", gate.port), timeout=10), connected(gate)
    slow.sendall(b"POST /v1/fleet/push-messages HTTP/1.1\r\n")  # and never more
    assert ended(plain)
    assert ended(slow)
    monkeypatch.undo()
    assert post(gate, 0, "x: y\r\n" * MEBIBYTE) in (b"HTTP/1.1 400 Bad Request", b"")


def test_strangers_crowd_out_nobody_else(gate):
    """Who connects from one place again and again makes room for himself: a node elsewhere is not cut."""
    slow = socket.create_connection(("127.0.0.1", gate.port), timeout=10, source_address=("127.0.0.2", 0))
    crowd = [socket.create_connection(("127.0.0.1", gate.port), timeout=10) for _ in range(100)]
    assert ended(crowd[0])
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    with trust.wrap_socket(slow) as line:  # it would find its line cut
        line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 404")
    for each in crowd:
        each.close()


def ended(line):
    """Whether the other side ends this connection, within ten seconds."""
    try:
        return line.recv(100) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
