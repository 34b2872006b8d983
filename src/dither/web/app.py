"""The addresses of the page: HTML, JSON and server-sent events. All of them only read."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from dither.errors import DitherError, SpecError
from dither.experiment.folder import to_json
from dither.types import __version__
from dither.web.files import MAX_DEPTH, SafeFolder, number, read_json, read_metrics, section, text_of
from dither.web.guard import SANDBOX, Guard
from dither.web.index import LedgerReader, Row, RunIndex, Watcher
from dither.web.run_page import DOWNLOADS, PageRefusal, check_computable, details, odds

PAGES = {"/": ("Runs", "runs"), "/run": ("Run", "run"), "/plan": ("Plan", "plan"),
         "/noise": ("What the noise does", "noise"), "/reports": ("Reproduce", "reports")}  # fmt: skip
_MAX_ANSWERS = 200
_STATIC = files("dither.web").joinpath("static")


# reason: each parameter is an option of `dither web`
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
    """The page over a folder of runs. Every request needs the `token`; without one, only loopback hosts are
    answered. `own_data` lets the page open the tables that specs name."""
    # FastAPI's documentation pages would load scripts from elsewhere: off.
    app = FastAPI(title="Dither", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    access = DataAccess(data_dir, own_data)
    state = _State(SafeFolder(folder), SafeFolder(reports_folder), LedgerReader(ledger), access, poll_seconds)
    app.add_middleware(Guard, token=token)
    app.mount("/static", StaticFiles(directory=str(_STATIC)), name="static")
    for path, (title, script) in PAGES.items():
        app.add_api_route(path, _page(title, script), methods=["GET"], response_class=HTMLResponse)
    _run_routes(app, state)
    _plan_routes(app)
    _report_routes(app, state)

    @app.get("/plotly.min.js")
    async def plotly() -> Response:
        script = files("plotly").joinpath("package_data", "plotly.min.js")
        day = {"Cache-Control": "private, max-age=86400"}
        return FileResponse(str(script), media_type="text/javascript", headers=day)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return FileResponse(str(_STATIC.joinpath("icon.svg")), media_type="image/svg+xml")

    app.state.warm = state.warm
    return app


class DataAccess(NamedTuple):
    """Which records the page may open: data sets that are in `data_dir`, and with `own_data` the user's tables."""

    data_dir: str | None = None
    own_data: bool = False


class _State:
    """What the addresses share."""

    def __init__(
        self,
        folder: SafeFolder,
        reports: SafeFolder,
        ledger: LedgerReader,
        access: DataAccess,
        poll_seconds: float,
    ) -> None:
        self.folder, self.reports, self.ledger, self.access = folder, reports, ledger, access
        self.index = RunIndex(folder)
        self.watcher = Watcher(self.index, poll_seconds, self.public)
        self.answers = AnswerCache()

    def warm(self) -> None:
        """Do what would make the first visitor wait: read the runs, then import what plans need."""
        self.index.refresh()
        from dither.web import plan_page

        plan_page.answer(plan_page.PlanRequest())

    def public(self, row: Row) -> Row:
        """A row as the page gets it: with the remaining budget, without the path of the ledger."""
        shown = {key: value for key, value in row.items() if key != "ledger"}
        return {**shown, "budget": self.ledger.left(row["ledger"])}

    def row(self, run: str) -> Row:
        """A run's row; an id that is not a run of the folder is not found, whatever it looks like."""
        row = self.index.row(run)
        if row is None:
            self.index.refresh()
            row = self.index.row(run)
        if row is None:
            raise HTTPException(404, "no such run")
        return row


class AnswerCache:
    """What takes seconds: computed one at a time in the background, and kept by key.

    Equal questions wait for one answer. A failure is not kept: its cause may be fixed meanwhile.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dither-web")
        self._answers: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._lock = threading.RLock()  # a question may be done before the lock is released

    async def ask(self, key: Hashable, question: Callable[[], Any]) -> Any:
        """The answer to a question, computed unless it is kept."""
        with self._lock:
            future = self._answers.get(key)
            if future is None:
                future = self._answers[key] = self._pool.submit(question)
                future.add_done_callback(lambda done: self._forget_failure(key, done))
                while len(self._answers) > _MAX_ANSWERS:
                    self._answers.popitem(last=False)
        # A page that is closed meanwhile must not cancel what another one waits for.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _forget_failure(self, key: Hashable, done: Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                self._answers.pop(key, None)


# HTML and JSON


def _page(title: str, script: str) -> Callable[[], Any]:
    async def page() -> HTMLResponse:
        return HTMLResponse(_html(title, script))

    return page


@lru_cache(maxsize=16)
def _html(title: str, script: str) -> str:
    """The HTML around a page's script. Nothing of a run is in it."""
    text = _STATIC.joinpath("page.html").read_text(encoding="utf-8")
    for name, value in (("TITLE", title), ("SCRIPT", script), ("VERSION", __version__)):
        text = text.replace(f"@{name}@", escape(value))
    preloads = (f'<link rel="modulepreload" href="/static/{name}">' for name in _imports(f"{script}.js"))
    text = text.replace("@MODULES@", "\n".join(preloads))
    for _, each in PAGES.values():
        text = text.replace(f"@CURRENT-{each}@", 'aria-current="page"' if each == script else "")
    return text


def _imports(script: str) -> list[str]:
    """What a script imports, and what that imports: fetched all at once instead of one after the other."""
    names: list[str] = []
    waiting = [script]
    while waiting:
        text = _STATIC.joinpath(waiting.pop()).read_text(encoding="utf-8")
        imported = re.findall(r'^import .* from "\./([\w.]+)";$', text, re.MULTILINE)
        new = [name for name in imported if name not in names]
        names += new
        waiting += new
    return names


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


async def _answered(question: Awaitable[Any]) -> Response:
    """An answer, or the line of a `DitherError`. A refusal is no error of the browser's: it gets the reason."""
    try:
        return _json(await question)
    except PageRefusal as reason:
        return _json({"refused": str(reason)})
    except DitherError as error:
        return _json({"error": str(error)}, 422)


# Runs


def _run_routes(app: FastAPI, state: _State) -> None:
    def all_runs() -> dict[str, Any]:
        state.index.refresh()
        position = state.index.position  # before the rows: what changes in between is sent again, never lost
        rows = [state.public(row) for row in state.index.rows()]
        return {"folder": str(state.folder.root), "position": position, "rows": rows}

    def one_run(run: str) -> dict[str, Any]:
        row, position = state.row(run), state.index.position
        return {**details(state.folder, state.public(row)), "position": position}

    @app.get("/api/runs")
    async def runs() -> Response:
        return _json(await run_in_threadpool(all_runs))

    @app.get("/api/run")
    async def run(id: str) -> Response:
        return _json(await run_in_threadpool(one_run, id))

    @app.get("/api/file")
    async def file(id: str, name: str) -> Response:
        row = await run_in_threadpool(state.row, id)
        path = state.folder.file(row["id"], name) if name in DOWNLOADS else None
        if path is None:
            raise HTTPException(404, "no such file")
        kind = "image/png" if name.endswith(".png") else "application/octet-stream"
        return FileResponse(path, media_type=kind, filename=f"{Path(row['name']).name}-{name}")

    for what in ("analysis", "epsilon", "bound"):
        app.add_api_route(f"/api/{what}", _computed(state, what), methods=["GET"])

    @app.get("/api/events")
    async def events(request: Request, since: str = "") -> Response:
        position = request.headers.get("last-event-id", since)
        return StreamingResponse(state.watcher.events(position), media_type="text/event-stream")


def _computed(state: _State, what: str) -> Callable[[str], Any]:
    """The address of something that the accountant computes for a run."""

    def compute(row: Row, spec: str) -> dict[str, Any]:
        from dither.web import analysis  # JAX is imported when it is needed first

        check_computable(state.folder, row["id"], epsilon=what != "bound")
        experiment = analysis.cached_experiment(spec, row["name"], *state.access)
        if what == "bound":
            return analysis.bound(experiment)
        rounds = [int(number(line["round"]) or 0) for line in read_metrics(state.folder, row["id"])]
        return (analysis.analysis if what == "analysis" else analysis.epsilon_by_round)(experiment, rounds)

    async def route(id: str) -> Response:
        row = await run_in_threadpool(state.row, id)
        spec = state.folder.text(row["id"], "spec.toml") or ""
        # The bound follows from the spec alone; the rest grows with the rounds made.
        key = (what, spec) if what == "bound" else (what, row["id"], spec, row["round"])
        return await _answered(state.answers.ask(key, lambda: compute(row, spec)))

    return route


# Plans


def _plan_routes(app: FastAPI) -> None:
    answers = AnswerCache()

    def compute(what: str, request: Request) -> Any:
        from dither.web import plan_page

        return getattr(plan_page, what)(plan_page.parse(request.query_params))

    @app.get("/api/plan")
    async def plan(request: Request) -> Response:
        return await _answered(run_in_threadpool(compute, "answer", request))

    @app.get("/api/plan/{what}")
    async def more(what: Literal["curve", "bound", "limits"], request: Request) -> Response:
        key = (what, str(request.query_params))
        return await _answered(answers.ask(key, lambda: compute(what, request)))

    @app.get("/api/noise")
    async def noise(multiplier: float, clients: int, delta: float) -> Response:
        return await _answered(run_in_threadpool(one_release, multiplier, clients, delta))


def one_release(multiplier: float, clients: int, delta: float) -> dict[str, Any]:
    """Exact ε of one Gaussian release (R1), and of the average of equally noisy honest clients."""
    from dither import accounting

    if not (0.01 <= multiplier <= 1000 and 1 <= clients <= 10_000 and 1e-12 <= delta <= 0.1):
        raise SpecError(
            f"multiplier={multiplier:g}, clients={clients}, delta={delta:g}: multiplier must be from 0.01 to "
            "1000, clients from 1 to 10000, delta from 1e-12 to 0.1"
        )
    upload = accounting.gaussian_epsilon(1 / multiplier, delta)
    average = accounting.gaussian_epsilon(1 / (multiplier * math.sqrt(clients)), delta)
    return {"upload": upload, "average": average, "upload_odds": odds(upload), "average_odds": odds(average)}


# Reports of `dither reproduce`: HTML pages, shown in a frame that can do nothing


def _report_routes(app: FastAPI, state: _State) -> None:
    @app.get("/api/reports")
    async def listed() -> Response:
        reports = await run_in_threadpool(_list_reports, state.reports)
        return _json({"folder": str(state.reports.root), "reports": reports})

    @app.get("/report/{name:path}")
    async def report(name: str) -> Response:
        text = None
        if name.endswith(".html"):
            text = await run_in_threadpool(state.reports.text, *name.split("/"))
        if text is None:
            raise HTTPException(404, "no such report")
        return HTMLResponse(text, headers={"Content-Security-Policy": SANDBOX})


def _list_reports(folder: SafeFolder) -> list[dict[str, Any]]:
    """Every HTML page of the folder, newest first, with what a report.json beside it says."""
    reports = []
    for path in folder.root.rglob("*.html") if folder.root.is_dir() else ():
        parts = path.relative_to(folder.root).parts
        inside = folder.file(*parts)
        if len(parts) > MAX_DEPTH or inside is None or any(part.startswith(".") for part in parts):
            continue
        beside = read_json(folder, "/".join(parts[:-1]), "report.json")
        figures = beside.get("figures")
        reports.append(
            {
                "name": "/".join(parts),
                "time": inside.stat().st_mtime,
                "scale": text_of(beside.get("scale", "")),
                "figures": len(figures) if isinstance(figures, list) else None,
                "command": text_of(section(beside, "made").get("command", "")),
            }
        )
    return sorted(reports, key=lambda report: (-report["time"], report["name"]))
