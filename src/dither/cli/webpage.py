"""dither web: a page to look at runs, plans and privacy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dither.cli.common import DataDir, Json, error_terminal, escape, print_event, terminal
from dither.errors import SpecError

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI


# reason: each parameter is an option of the command
def web(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than on a loopback address, visitors need a token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    reports: Annotated[Path, typer.Option(help="Folder with reports of dither reproduce.")] = Path("reproduced"),
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Ledger to read budgets from (default: yours).")
    ] = None,
    data_dir: DataDir = None,
    own_data: Annotated[
        bool, typer.Option("--own-data", help="Open the tables that runs name, to compute cohorts and ε by round.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the address.")] = False,
) -> None:
    """Show runs, plans and privacy in a browser. Nothing is sent to any other host."""
    if not folder.is_dir():
        raise SpecError(f"no folder {str(folder)!r}; give the folder of your runs, or make a run with: dither run")
    try:
        import fastapi  # noqa: F401
        import plotly  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as missing:
        raise SpecError(f"dither web needs {missing.name}; install it with: pip install 'dither[web]'") from None
    from dither.accounting.ledger.runs import Ledger
    from dither.web.app import create_app
    from dither.web.guard import is_loopback, new_token

    token = None if is_loopback(host) else new_token()
    app = create_app(
        folder,
        reports_folder=reports,
        token=token,
        ledger=ledger or Ledger.default_path(),
        data_dir=str(data_dir) if data_dir else None,
        own_data=own_data,
    )
    listener, address = _listen(host, port)
    address += f"?token={token}" if token else ""
    with suppress(KeyboardInterrupt):  # the usual way to stop it, so not a failure
        if as_json:
            print_event("serving", folder=str(folder), address=address, token=token)
        else:
            typer.echo(address if quiet else f"runs of {folder}: {address}")
        if token and not quiet:
            error_terminal().print(
                f"[yellow]anyone with this address can see the page[/]; the connection is not encrypted. "
                f"Without --host {escape(host)} only this machine can reach it.",
                soft_wrap=True,
            )
        if not as_json and not quiet:
            terminal().print("stop with Ctrl-C", style="dim")
        _serve(app, listener, address if open_browser else "")
    _exit_at_once()


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and its address: a taken port is one line, and port 0 becomes the real one."""
    import socket

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        raise SpecError(f"cannot listen on {host}:{port} ({error.strerror}); give another --port") from None
    listener.listen(128)
    name = f"[{host.strip('[]')}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # noqa: S104
        name = socket.gethostname()
    return listener, f"http://{name}:{listener.getsockname()[1]}/"


def _serve(app: FastAPI, listener: socket.socket, browser_address: str) -> None:
    """Serve until Ctrl-C, and open a browser where an address is given."""
    import threading

    import uvicorn

    threading.Thread(target=app.state.warm, daemon=True).start()
    if browser_address:
        import webbrowser

        threading.Timer(0.5, webbrowser.open, [browser_address]).start()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


def _exit_at_once() -> None:
    """Nothing is left to write, and a computation in a thread must neither delay the end nor abort inside JAX."""
    import os
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
