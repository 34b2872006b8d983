"""A TCP line between a party and the server that a test can cut and heal, and that may keep what passes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Forwarder:
    """`with Forwarder(port) as line`: `line.port` leads to `port`."""

    def __init__(self, target: int, *, keep: bool = False) -> None:
        self._target, self._keep = target, keep
        self.sent: list[bytes] = []  # by parties, to the server
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._over = False
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])

    def __enter__(self) -> Forwarder:
        threading.Thread(target=self._accept, args=(self._door,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._flows.set()
        self._door.close()
        self._break()

    def cut(self, *, silent: bool) -> None:
        """Silent: lines stay open, nothing passes. Else they break, and new ones are refused."""
        if silent:
            self._flows.clear()
            return
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._break()

    def heal(self) -> None:
        self._flows.set()
        if self._door.fileno() < 0:
            self._door = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self._door,), daemon=True).start()

    def _break(self) -> None:
        with self._lock:
            lines, self._open = self._open, set()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _accept(self, door: socket.socket) -> None:
        while not self._over:
            try:
                near, _ = door.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            threading.Thread(target=self._carry, args=(near, far, self._keep), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            while part := source.recv(1 << 16):
                self._flows.wait()
                if keep:
                    with self._lock:
                        self.sent.append(part)
                sink.sendall(part)
        for line in (source, sink):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
