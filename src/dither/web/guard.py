"""Who may ask, and what an answer may do in a browser.

A random token is required: it is part of the printed address, and a cookie afterwards. So neither another user of
this machine can read the page, nor a web site that points its own name here. Without a token (a page inside
another program), only requests that name a loopback host are answered. Every answer forbids outside hosts and
inline scripts.
"""

from __future__ import annotations

import ipaddress
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dither.accounting.ledger.store import state_folder
from dither.experiment.folder import write_bytes

COOKIE = "dither-web"
# Plotly writes style attributes; a style can load nothing, as every source but this server is forbidden.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'self'"
)
# A report may show its own styles and pictures, nothing else: no script, no form, no request.
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
}


def new_token() -> str:
    """192 random bits for an address."""
    return secrets.token_urlsafe(24)


def kept_token() -> str:
    """This user's token for pages on this machine: an open page goes on after a restart."""
    path = state_folder("web") / "token"
    if not path.is_file():
        write_bytes(path, new_token().encode("ascii"), private=True)
    return path.read_text(encoding="ascii")


def is_loopback(host: str) -> bool:
    """True for localhost, 127.0.0.0/8 and ::1."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """The outermost layer: refuses strangers, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets here

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self.app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self.token is None:
            if is_loopback(request.url.hostname or ""):
                return None
            return PlainTextResponse("this page answers on a loopback address only\n", status_code=403)
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            # Out of the address bar and the history, into a cookie that no script can read.
            rest = request.url.remove_query_params("token")
            target = "/" + rest.path.lstrip("/\\") + (f"?{rest.query}" if rest.query else "")
            welcome = RedirectResponse(target, status_code=303)
            welcome.set_cookie(COOKIE, given, httponly=True, samesite="strict", path="/")
            return welcome
        if self._is_token(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse("open the address that `dither web` printed: it holds a token\n", status_code=401)

    def _is_token(self, given: str) -> bool:
        return self.token is not None and secrets.compare_digest(given.encode(), self.token.encode())
