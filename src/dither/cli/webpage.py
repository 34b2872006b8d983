"""dither web: a page to look at runs, plans and privacy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dither.cli.options import DataDir, Json
from dither.cli.printing import error_terminal, escape, print_event, terminal
from dither.errors import SpecError


def web(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but a loopback one asks visitors for a token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    reports: Annotated[Path, typer.Option(help="Folder with reports of dither reproduce.")] = Path("reproduced"),
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="Ledger to read budgets from (default: the user's).")
    ] = None,
    data_dir: DataDir = None,
    own_data: Annotated[
        bool,
        typer.Option("--own-data", help="Open the tables that runs name, for cohorts and ε by round."),
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the address alone.")] = False,
) -> None:
    """Look at runs, plans and privacy in a browser. Nothing is sent to any other host."""
    if not folder.is_dir():
        raise SpecError(f"no folder {str(folder)!r}; give the folder of your runs, or make one with: dither run")
    try:
        import fastapi  # noqa: F401
        import plotly  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as missing:
        raise SpecError(f"dither web needs {missing.name}; install it with: pip install 'dither[web]'") from None
    import os
    import socket
    import sys
    import threading

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
    # Bound here, so that a taken port is one line and the printed address is the real one.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        raise SpecError(f"cannot listen on {host}:{port} ({error.strerror}); give another --port") from None
    listener.listen(128)
    shown = f"[{host.strip('[]')}]" if ":" in host else host
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else shown  # noqa: S104
    address = f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    with suppress(KeyboardInterrupt):  # the way to end it, so it is no failure
        if as_json:
            print_event("serving", folder=str(folder), address=address, token=token)
        else:
            typer.echo(address if quiet else f"runs of {folder}: {address}")
        if token and not quiet:
            error_terminal().print(
                f"[yellow]others can reach this page with that address[/]; it is not encrypted. "
                f"Without --host {escape(host)} only this machine can.",
                soft_wrap=True,
            )
        if not as_json and not quiet:
            terminal().print("stop with Ctrl-C", style="dim")
        threading.Thread(target=app.state.warm, daemon=True).start()
        if open_browser:
            import webbrowser

            threading.Timer(0.5, webbrowser.open, [address]).start()
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
    # Nothing is left to be written, and what is still computed in a thread must not hold up the end, nor abort it
    # from inside JAX.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(web)
