"""Strangers, without a key, fill the memory of `dither serve` through the port that it opens to the world."""

import socket
import ssl
import threading

import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

from dither.engines.flower.gate import Gate
from dither.engines.flower.superlink import free_port
from dither.federation import keys

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
    files = {"certificate": server / "server.pem", "key": server / "server.key", "ca": server / "ca.pem"}
    with Counting("127.0.0.1", port, inside=inside, **files) as found:
        found.port = port
        yield found


def connected(gate):
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    plain = socket.create_connection(("127.0.0.1", gate.port), timeout=10)
    return trust.wrap_socket(plain)


def post(gate, length, headers=""):
    """A stranger who posts a body of that length; the answer's first line, empty where the line is cut."""
    with connected(gate) as line:
        head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{headers}\r\n"
        try:
            line.sendall(head.encode())
            for _ in range(length // MEBIBYTE):
                line.sendall(bytes(MEBIBYTE))
            return line.recv(100).split(b"\r\n")[0]
        except OSError:
            return b""


@pytest.mark.xfail(strict=True, reason="the gate reads bodies before it knows from whom")
def test_no_strangers_body_is_read(gate):
    strangers = [threading.Thread(target=post, args=(gate, 8 * MEBIBYTE)) for _ in range(4)]
    for each in strangers:
        each.start()
    for each in strangers:
        each.join(20)
    assert gate.taken == 0
