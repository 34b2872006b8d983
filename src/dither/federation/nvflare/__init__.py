"""NVIDIA FLARE as the transport of a federation: the only importer of `nvflare`.

    apps        the job: a Controller that runs the coordinator, an Executor that hands messages to `dither join`
    kits        startup kits, made in one place or from the parties' own requests
    system      FLARE's processes: its server with the job that is submitted to it, its client at a party

Used as documented: `nvflare provision`, `nvflare cert` and `nvflare package`, the programs and options in the
startup kits, the FLARE API session (`submit_job`, `get_connected_client_list`), Controller and Executor, and
auxiliary messages. A question is an auxiliary message that is sent and forgotten; its answer is another one, in
the other direction. So nothing is polled, and nobody waits for the slowest party. (`multicast_aux_requests` with a
timeout does not work in 2.9.0: it passes an argument that the cell below does not take.)

FLARE would let a server do more at a site than a party of Dither allows. The kits that `dither federation init`
makes therefore allow one class in jobs, no code in jobs, no shell commands, and no logs to the server.

Nothing in here knows what the messages mean.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dither.errors import ConfigError, extra

KIT = "nvflare"  # folder of a startup kit, in the folder of the server or of a party
SOCKET = "DITHER_SOCKET"  # in the environment of a site's FLARE client: where `dither join` answers
CONNECTED = "connected.json"  # in the run folder's: sites that are connected, for the coordinator
ADMIN_KIT = "nvflare-admin"  # in the server's folder: submits the job


def require() -> None:
    """`ConfigError` if NVIDIA FLARE is not installed."""
    if find_spec("nvflare") is None:
        raise ConfigError(f"this federation uses NVIDIA FLARE: {extra('nvflare')}")


def is_used(folder: Path) -> bool:
    """Whether the folder of a server or of a party has a startup kit of NVIDIA FLARE."""
    return (folder / KIT).is_dir()
