"""The addresses of the page: HTML shells, JSON, server-sent events. All of them only read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from dither.errors import DitherError, SpecError
from dither.experiment.folder import to_json
from dither.types import __version__
from dither.web import reports, words
from dither.web.budgets import Budgets
from dither.web.computing import Computer, NotComputed
from dither.web.details import DOWNLOADS, by_a_federation, details, repeated
from dither.web.folders import Folder
from dither.web.guard import SANDBOX, Guard
from dither.web.index import Index, Row, number, read_metrics
from dither.web.live import Watcher

PAGES = {"/": ("Runs", "runs"), "/run": ("Run", "run"), "/plan": ("Plan", "plan"),
         "/noise": ("What the noise does", "noise"), "/reports": ("Reproduce", "reports")}  # fmt: skip
_YEAR = {"Cache-Control": "private, max-age=86400"}


def create_app(
    folder: str | Path,
    *,
    reports_folder: str | Path = "reproduced",
    token: str | None = None,
    ledger: str | Path | None = None,
    data_dir: str | None = None,
    own_data: bool = False,
    poll_seconds: float = 1.0,
) -> FastAPI:
    """The page over a folder of runs. `token` is asked of every request; None answers loopback hosts alone.
    `own_data` lets it open the tables that specs name."""
    # Its documentation pages would load scripts from elsewhere: off.
    app = FastAPI(title="Dither", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    state = _State(Folder(folder), Folder(reports_folder), Budgets(ledger), data_dir, own_data, poll_seconds)
    app.add_middleware(Guard, token=token)
    app.mount("/static", StaticFiles(directory=str(files("dither.web").joinpath("static"))), name="static")
    for path, (title, script) in PAGES.items():
        app.add_api_route(path, _shell(title, script), methods=["GET"], response_class=HTMLResponse)
    _run_routes(app, state)
    _plan_routes(app)
    _report_routes(app, state)

    @app.get("/plotly.min.js")
    async def plotly() -> Response:
        return FileResponse(plotly_script(), media_type="text/javascript", headers=_YEAR)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return FileResponse(str(files("dither.web").joinpath("static", "icon.svg")), media_type="image/svg+xml")

    app.state.warm = state.warm
    return app


class _State:
    """What the addresses share."""

    def __init__(
        self,
        folder: Folder,
        reported: Folder,
        budgets: Budgets,
        data_dir: str | None,
        own_data: bool,
        poll_seconds: float,
    ) -> None:
        self.folder, self.reported, self.budgets = folder, reported, budgets
        self.data_dir, self.own_data = data_dir, own_data
        self.index = Index(folder)
        self.watcher = Watcher(self.index, poll_seconds, self.public)
        self.computer = Computer()

    def warm(self) -> None:
        """What would make the first visitor wait: read the runs, then import what plans need (JAX)."""
        self.index.refresh()
        from dither.web import plans

        plans.answer(plans.Wish())

    def public(self, row: Row) -> Row:
        """A row as the page gets it: what is left of the budget in place of where the ledger lies."""
        shown = {key: value for key, value in row.items() if key != "ledger"}
        return {**shown, "budget": self.budgets.left(row["ledger"])}

    def row(self, run: str) -> Row:
        """A run's row; an id that is no run of the folder is not found, whatever it looks like."""
        row = self.index.row(run)
        if row is None:
            self.index.refresh()
            row = self.index.row(run)
        if row is None:
            raise HTTPException(404, "no such run")
        return row


def _shell(title: str, script: str) -> Callable[[], Any]:
    async def page() -> HTMLResponse:
        return HTMLResponse(shell(title, script))

    return page


@lru_cache(maxsize=16)
def shell(title: str, script: str) -> str:
    """The HTML around a page's script. Nothing of a run is in it."""
    text = files("dither.web").joinpath("static", "page.html").read_text(encoding="utf-8")
    for name, value in (("TITLE", title), ("SCRIPT", script), ("VERSION", __version__)):
        text = text.replace(f"@{name}@", escape(value))
    ahead = (f'<link rel="modulepreload" href="/static/{name}">' for name in modules(f"{script}.js"))
    text = text.replace("@MODULES@", "\n".join(ahead))
    for _, (_, each) in PAGES.items():
        text = text.replace(f"@CURRENT-{each}@", 'aria-current="page"' if each == script else "")
    return text


def modules(script: str) -> list[str]:
    """What a script imports, and what that imports: fetched all at once instead of one after the other."""
    found: list[str] = []
    left = [script]
    while left:
        text = files("dither.web").joinpath("static", left.pop()).read_text(encoding="utf-8")
        imported = re.findall(r'^import .* from "\./([\w.]+)";$', text, re.MULTILINE)
        fresh = [name for name in imported if name not in found]
        found += fresh
        left += fresh
    return found


@lru_cache(maxsize=1)
def plotly_script() -> str:
    """Plotly's own script, as the package ships it."""
    return str(files("plotly").joinpath("package_data", "plotly.min.js"))


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _answered(question: Any) -> Response:
    """An answer, or an error raised on purpose as one line. What the page does not compute is no error of the
    browser's: it gets the reason."""
    try:
        return _json(await question)
    except NotComputed as reason:
        return _json({"refused": str(reason)})
    except DitherError as error:
        return Response(to_json({"error": str(error)}), status_code=422, media_type="application/json")


# Runs


def _run_routes(app: FastAPI, state: _State) -> None:
    def everything() -> dict[str, Any]:
        state.index.refresh()
        position = state.index.position  # before the rows: what changes in between is told again, never lost
        rows = [state.public(row) for row in state.index.rows()]
        return {"folder": str(state.folder.root), "position": position, "rows": rows}

    @app.get("/api/runs")
    async def runs() -> Response:
        return _json(await run_in_threadpool(everything))

    @app.get("/api/run")
    async def run(id: str) -> Response:
        def found() -> dict[str, Any]:
            row, position = state.row(id), state.index.position
            return {**details(state.folder, state.public(row)), "position": position}

        return _json(await run_in_threadpool(found))

    @app.get("/api/file")
    async def file(id: str, name: str) -> Response:
        row = await run_in_threadpool(state.row, id)
        path = state.folder.file(row["id"], name) if name in DOWNLOADS else None
        if path is None:
            raise HTTPException(404, "no such file")
        kind = "image/png" if name.endswith(".png") else "application/octet-stream"
        return FileResponse(path, media_type=kind, filename=f"{Path(row['name']).name}-{name}")

    @app.get("/api/analysis")
    async def analysis(id: str) -> Response:
        return await _computed(state, id, "analysis")

    @app.get("/api/epsilon")
    async def epsilon(id: str) -> Response:
        return await _computed(state, id, "epsilon")

    @app.get("/api/bound")
    async def bound(id: str) -> Response:
        return await _computed(state, id, "bound")

    @app.get("/api/events")
    async def events(request: Request, since: str = "") -> Response:
        known = request.headers.get("last-event-id", since)
        return StreamingResponse(state.watcher.events(known), media_type="text/event-stream")


async def _computed(state: _State, run: str, what: str) -> Response:
    row = await run_in_threadpool(state.row, run)
    text = state.folder.text(row["id"], "spec.toml") or ""

    def question() -> dict[str, Any]:
        from dither.web import analysis  # JAX is imported when it is needed first

        if by_a_federation(state.folder, row["id"]):
            raise NotComputed(
                "a real federation made this run: its spec does not say who held how many records and who was "
                "missing; the proven ε of its summary counts them"
            )
        if what != "bound" and repeated(state.folder, row["id"]):
            raise NotComputed(
                "rounds of this run were made again with fresh noise after a stop: `dither account` with this "
                "folder counts them, as the proven ε of its summary does"
            )
        experiment = analysis.cached_task(text, row["name"], state.data_dir, state.own_data)
        rounds = [int(number(line["round"]) or 0) for line in read_metrics(state.folder, row["id"])]
        if what == "bound":
            return analysis.bound(experiment)
        if what == "epsilon":
            return analysis.epsilon_by_round(experiment, rounds)
        return analysis.analysis(experiment, rounds)

    # The bound follows from the spec alone; the rest grows with the rounds made.
    key = (what, text) if what == "bound" else (what, row["id"], text, row["round"])
    return await _answered(state.computer.ask(key, question))


# Plans


def _plan_routes(app: FastAPI) -> None:
    computer = Computer()

    def asked(request: Request, what: str) -> Callable[[], Any]:
        given = dict(request.query_params)

        def question() -> Any:
            from dither.web import plans

            wish = plans.wish(given)
            return {"plan": plans.answer, "curve": plans.curve, "bound": plans.bound}[what](wish)

        return question

    @app.get("/api/plan")
    async def plan(request: Request) -> Response:
        return await _answered(run_in_threadpool(asked(request, "plan")))

    @app.get("/api/plan/curve")
    async def curve(request: Request) -> Response:
        return await _answered(computer.ask(("curve", str(request.query_params)), asked(request, "curve")))

    @app.get("/api/plan/bound")
    async def bound(request: Request) -> Response:
        return await _answered(computer.ask(("bound", str(request.query_params)), asked(request, "bound")))

    @app.get("/api/plan/limits")
    async def limits() -> Response:
        def known() -> dict[str, Any]:
            from dither.web import plans

            return {"limits": plans.LIMITS, "methods": plans.METHODS, "defaults": plans.Wish()._asdict()}

        return _json(await run_in_threadpool(known))

    @app.get("/api/noise")
    async def noise(multiplier: float, clients: int, delta: float) -> Response:
        return await _answered(run_in_threadpool(one_release, multiplier, clients, delta))


def one_release(multiplier: float, clients: int, delta: float) -> dict[str, Any]:
    """Exact ε of one Gaussian release (R1), and of the average of equally noisy honest clients."""
    from dither import accounting

    if not (0.01 <= multiplier <= 1000 and 1 <= clients <= 10_000 and 1e-12 <= delta <= 0.1):
        raise SpecError(f"multiplier={multiplier:g}, clients={clients}, delta={delta:g} are out of range")
    upload = accounting.gaussian_epsilon(1 / multiplier, delta)
    average = accounting.gaussian_epsilon(1 / (multiplier * math.sqrt(clients)), delta)
    return {
        "upload": upload,
        "average": average,
        "upload_words": words.odds(upload),
        "average_words": words.odds(average),
    }


# Reports


def _report_routes(app: FastAPI, state: _State) -> None:
    @app.get("/api/reports")
    async def listed() -> Response:
        found = await run_in_threadpool(reports.listed, state.reported)
        return _json({"folder": str(state.reported.root), "reports": found})

    @app.get("/report/{name:path}")
    async def report(name: str) -> Response:
        text = await run_in_threadpool(reports.page, state.reported, name)
        if text is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(text, headers={"Content-Security-Policy": SANDBOX})
