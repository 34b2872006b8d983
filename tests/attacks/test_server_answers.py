"""A server with its real certificate gives answers that make a party's machine do more than was agreed."""

import gzip
import ssl
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr", reason="the extra 'deploy' is not installed")

from dither.errors import FederationError
from dither.federation import keys
from dither.federation.flower import fleet

MEBIBYTE = 1 << 20


@pytest.fixture
def asked(tmp_path):
    """`asked(status, headers, body)`: why a party's first call to a server that answers this comes to nothing, and
    what another host heard meanwhile."""
    keys.create(tmp_path / "keys", ["ann", "bob"], hosts=["localhost"])
    own, server, heard = tmp_path / "keys" / "parties" / "ann", tmp_path / "keys" / "server", []

    class Answer(BaseHTTPRequestHandler):
        said = (200, {}, b"")

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            status, headers, body = self.said
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Other(Answer):
        def do_POST(self):
            heard.append(self.path)
            super().do_POST()

        do_GET = do_POST

    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(server / "server.pem", server / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as one, ThreadingHTTPServer(("127.0.0.1", 0), Other) as two:
        one.socket = trust.wrap_socket(one.socket, server_side=True)
        for each in (one, two):
            threading.Thread(target=each.serve_forever, daemon=True).start()

        def ask(status, headers, body=b""):
            elsewhere = f"http://127.0.0.1:{two.server_port}/inside"
            Answer.said = status, {name: value or elsewhere for name, value in headers.items()}, body
            where = fleet.Server(
                f"127.0.0.1:{one.server_port}", own / "ca.pem", own / "node.key", own / "node.number"
            )
            with pytest.raises(FederationError) as error:
                fleet.serve(where, lambda body: body, until=lambda: False, patience=0.0)
            return str(error.value), heard

        yield ask
        for each in (one, two):
            each.shutdown()


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_party_calls_no_other_host(asked, status):
    """A redirection had it send what it had signed wherever the server liked, also inside its own network."""
    why, heard = asked(status, {"location": "", "content-length": "0"})
    assert f"HTTP {status}" in why
    assert heard == []


def test_an_answer_is_as_long_as_it_says(asked):
    """An answer of some kilobytes, compressed, filled gigabytes of memory."""
    body = gzip.compress(bytes(64 * MEBIBYTE))
    tracemalloc.start()
    try:
        why, _ = asked(200, {"content-encoding": "gzip", "content-length": str(len(body))}, body)
        assert tracemalloc.get_traced_memory()[1] < 24 * MEBIBYTE
    finally:
        tracemalloc.stop()
    assert "cannot be read" in why
    for headers in ({}, {"content-length": str(1 << 40)}):
        assert "cannot be read" in asked(200, headers)[0]
