"""ServerApp and ClientApp: what Flower starts.

The ServerApp runs the coordinator. The ClientApp is for SuperNodes that exist already: Flower starts a process for
every message, and that process hands the message over a Unix socket to `dither join --behind-supernode`, which
holds data, keys and compiled programs. The socket lies in the party's folder, which nobody else may enter; its
path is the node configuration's "dither-socket".
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dither.federation.flower import require
from dither.federation.flower.fleet import IdleTimer, body_of, content
from dither.federation.flower.grid import GridTransport

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 31
_ANSWER_SECONDS = 3600.0


def server_app(coordinate: Callable[[Any, Mapping[str, Any]], None]) -> Any:
    """A ServerApp that calls `coordinate(transport, run configuration)`."""
    require()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        coordinate(GridTransport(grid), dict(context.run_config))

    return app


def client_app() -> Any:
    """A ClientApp that hands messages to the process behind the socket."""
    require()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def query(message: Any, context: Any) -> Any:
        path = context.node_config.get("dither-socket")
        if not path:
            raise RuntimeError("start the SuperNode with --node-config 'dither-socket=\"PATH\"'")
        answer = hand_over(Path(str(path)), body_of(message) or b"")
        return Message(content(answer), reply_to=message)

    return app


def hand_over(path: Path, body: bytes) -> bytes:
    """One message through a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_ANSWER_SECONDS)
        line.connect(str(path))
        line.sendall(_LENGTH.pack(len(body)) + body)
        return _read(line)


def answer_at(
    path: Path, answer: Callable[[bytes], bytes], *, until: Callable[[], bool], quiet: IdleTimer | None = None
) -> None:
    """Serve `hand_over` at a Unix socket that its owner alone may use, until `until()`."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))
        path.chmod(0o600)
        door.listen(8)
        door.settimeout(0.2)
        try:
            while not until():
                try:
                    line, _ = door.accept()
                except TimeoutError:
                    if quiet is not None:
                        quiet.look()
                    continue
                with line:
                    line.settimeout(60.0)
                    try:
                        body = answer(_read(line))
                        line.sendall(_LENGTH.pack(len(body)) + body)
                        if quiet is not None:
                            quiet.heard()
                    except (OSError, ValueError):
                        continue  # whoever called has gone, or did not speak our language
        finally:
            path.unlink(missing_ok=True)


def _read(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise OSError("the line was closed")
        parts += part
    return bytes(parts)
