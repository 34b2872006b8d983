"""The FLARE client of a party, kept running beside `dither join`.

FLARE takes a client that dies out of the running job. So the client is not a child of `dither join`, which may be
killed and started again at any time, but of this small process, which ends when no `dither join` has used the
party's folder for a while, and starts the client again when that dies.

    python -m dither.federation.nvflare.relay FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from dither.experiment.folder import lock
from dither.federation import keys
from dither.federation.local import answers_at, separate_process, stop
from dither.federation.nvflare import KIT
from dither.federation.nvflare.kits import point_site

_ALONE_SECONDS = 60.0  # without a `dither join`
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


def start(folder: Path, server: str) -> None:
    """Start the relay of this party to the server at HOST:PORT, unless it runs."""
    folder = folder.resolve()
    handle = lock(folder / "relay.lock")
    if handle is None:
        return
    handle.close()
    point_site(folder / KIT, server)
    with open(folder / "nvflare.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def end(folder: Path) -> None:
    """End the relay: this party's run is over."""
    handle = lock(folder / "relay.lock")
    if handle is not None:  # it has ended
        handle.close()
        return
    with suppress(ValueError, ProcessLookupError):
        os.kill(int((folder / "relay.lock").read_text(encoding="ascii")), signal.SIGTERM)


def socket_of(folder: Path) -> Path:
    """Where `dither join` answers."""
    return folder.resolve() / "node.sock"


def _client(folder: Path) -> subprocess.Popen[bytes]:
    from dither.federation.nvflare.apps import SOCKET

    command = [sys.executable, "-m", "nvflare.private.fed.app.client.client_train", "-m", str(folder / KIT)]
    command += ["-s", "fed_client.json", "--set", "secure_train=true", f"uid={keys.party_name(folder)}"]
    command += ["config_folder=config", "org=dither"]
    environment = {**os.environ, SOCKET: str(socket_of(folder))}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **separate_process())


def main(folder: Path) -> None:
    """Run until nobody needs it."""
    own = lock(folder / "relay.lock")
    if own is None:
        return
    own.truncate(0)
    own.write(str(os.getpid()))
    own.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    client, pause, used = _client(folder), _FIRST_PAUSE, time.monotonic()
    try:
        while time.monotonic() - used < _ALONE_SECONDS:
            time.sleep(0.5)
            if client.poll() is not None:
                time.sleep(pause)
                client, pause = _client(folder), min(2 * pause, _LONGEST_PAUSE)
            if answers_at(socket_of(folder)):
                used = time.monotonic()
    finally:
        stop(client)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
