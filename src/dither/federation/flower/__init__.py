"""Flower as the transport of a federation: the only importer of `flwr`.

    fleet       a node of ours, which speaks to a SuperLink as a SuperNode does
    grid        the coordinator's side, over the Grid of a ServerApp
    superlink   the SuperLink as a process of ours: started, told which nodes to let in, given the run
    gate        what is reachable from outside: TLS, and the calls of nodes alone
    apps        ServerApp and ClientApp, for the above and for SuperLinks and SuperNodes that exist already

Nothing in here knows what the messages mean. Flower's telemetry and update checks are off unless the environment
says otherwise, and nothing listens but on the address that was given and on 127.0.0.1.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from dither.errors import ConfigError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}


def require() -> None:
    """`ConfigError` where Flower is not installed; else its telemetry and update checks are off from here on."""
    if find_spec("flwr") is None:
        raise ConfigError("a federation needs Flower: install Dither with its extra, pip install 'dither[deploy]'")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
