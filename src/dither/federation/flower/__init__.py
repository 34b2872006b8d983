"""Flower as the transport of a federation: the only importer of `flwr`.

    apps        ServerApp and ClientApp, and the coordinator's transport over the ServerApp's Grid
    superlink   the SuperLink as a process of ours
    gate        before it: TLS, registered nodes alone, and only calls that find something
    fleet       what lies below Flower's documented API

Documented and used as such: `flower-superlink` and `flwr run` with their options, ServerApp, ClientApp, Context,
Message, RecordDict, ConfigRecord, and of Grid `push_messages` and `get_nodes`. Not documented, all in `fleet`, so
that `dither[deploy]` pins Flower's versions and `require` checks them:

- A party speaks the Fleet API (activate, heartbeat, pull, push, deactivate) in place of a SuperNode. A SuperNode
  starts a process for each message: an exchange takes 9.3 s in place of 0.4 s (`benchmarks/federation.py`). And it
  runs whatever app the server sends, which a party must not do.
- Messages between the coordinator and parties have their content with them, in place of `Grid.push_messages` and
  `pull_messages`, which send and fetch each of a message's three objects by a call of its own.
- Answers of SuperNodes are fetched one by one in place of `Grid.pull_messages`, which waits up to two hours for an
  answer that was only begun, and 1 s whenever it looks between an answer's beginning and its end.
- Keys are registered by the request that `flwr supernode register` sends: the command takes 1.2 s of a core for
  each party.
- The gate checks the headers in which nodes sign their requests, as the SuperLink behind it does again. It knows
  the paths of the Fleet API, and that an empty answer to a call for messages means that there is none.

Nothing in here knows what the messages mean. Flower's telemetry and update checks are off unless the environment
says otherwise, and nothing listens but on the address that was given and on 127.0.0.1.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dither.errors import ConfigError, extra

APP = Path(__file__).parent.parent / "app"  # the Flower app: what `flwr run` takes
SUPERLINK = "DITHER_SUPERLINK"  # in the environment of a SuperLink of `dither serve`: its nodes are parties
VERSIONS = ("1.41", "1.42")  # as in pyproject.toml
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}
for _name, _value in QUIET.items():  # before any module here imports Flower
    os.environ.setdefault(_name, _value)


def require() -> None:
    """`ConfigError` where Flower is not installed, or in a version that `fleet` was not written for."""
    if find_spec("flwr") is None:
        raise ConfigError(f"a federation needs Flower: {extra('deploy')}")
    found = version("flwr")
    if ".".join(found.split(".")[:2]) not in VERSIONS:
        raise ConfigError(
            f"Flower {found} is installed, and this Dither works with {' and '.join(VERSIONS)}: {extra('deploy')}"
        )


class TlsFiles(NamedTuple):
    """The server's certificate, its key, and the CA's certificate."""

    certificate: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, folder: Path) -> TlsFiles:
        """In the folder that `dither federation init` made for the server."""
        return cls(folder / "server.pem", folder / "server.key", folder / "ca.pem")
