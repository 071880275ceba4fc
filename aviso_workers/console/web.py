"""The web application: takes a request, asks whose it is, and answers with a page; and uvicorn, which serves it on a
socket of its own or on what a fleet hands over.

Every answer has a policy that lets a browser run only our own scripts, which carry the nonce of that answer (Content
Security Policy, level 3), and load nothing from elsewhere. A page is whole without scripts; with them it is rendered
again on the server after each snapshot and sent as an event stream (HTML, "Server-sent events").
"""

from __future__ import annotations

import asyncio
import inspect
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode

import anyio
import structlog
import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from aviso_workers.aviso.literals import printable_lines
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console import mcp, overview, shown
from aviso_workers.console.access import Access, ForbiddenError, Visitor
from aviso_workers.console.actions import ACTIONS, Actions, BrokenOffError, Confirmation
from aviso_workers.console.overview import Watcher
from aviso_workers.console.pages import PAGES, Page, Question
from aviso_workers.errors import (
    AvisoWorkersError,
    BackendError,
    DeniedError,
    NotFoundError,
    ServerProcessError,
    UnavailableError,
    describe,
)
from aviso_workers.ops import inventory
from aviso_workers.telemetry.status import PATHS, TURN_SECONDS, FailedLogins
from aviso_workers.version import __version__

MAX_FORM_BYTES = 64 * 1024
FORM_SECONDS = 10.0
MAX_LIVE = 200
"""Pages that are kept up to date at the same time."""
MAX_LIVE_EACH = 100
"""Of one user."""
PAGE_SECONDS = 40.0
"""How long a page may be made: the doctor asks the servers for many things."""
MCP_SECONDS = 10.0
"""How long a tool may take."""
WRITE_SECONDS = 10.0
"""How long somebody may take to receive a part of a page."""
UNCHANGED_SECONDS = 15.0
"""After so long without a change, a comment shows that the console is there."""
OWN_ADDRESS = re.compile(r'( (?:href|src|action|hx-sse:connect)=")/')
"""What of a page has one of our addresses. What others have written has no quotation marks there."""
LIVE = "live"
TIMES, EXACT = "times", "exact"
"""The field of an address, and the cookie, by which a reader has chosen exact times."""
HANDED_OVER = "handed_over"
"""A key of the state of connections that the status port of a fleet has accepted."""
ENDS_SECONDS = 3
HEAD_SECONDS = 10.0
"""How long somebody may take to send the head of a request."""
MAX_WAITING = 100
"""Connections that have not sent a head: the oldest one goes for a new one, and the others are left to requests."""
MAX_REQUESTS = 500
"""Requests at the same time, of which up to 200 are pages that are kept up to date."""

log = structlog.get_logger("aviso_workers.console")


def application(watcher: Watcher, actions: Actions, access: Access) -> ASGIApp:
    """Return the console as an ASGI application."""
    views = _Views(watcher, actions, path=(path := actions.config.workers.console.path))
    app = Starlette(
        routes=[
            *(Route(path, views.of_page(make), methods=["GET"]) for path, make in PAGES.items()),
            *(Route(f"/actions/{name}", views.of_action(name), methods=["POST"]) for name in ACTIONS),
            Route(mcp.PATH, views.of_mcp, methods=["POST"]),
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
        ],
        exception_handlers={HTTPException: views.failed, AvisoWorkersError: views.failed, Exception: views.failed},
    )
    return _Guard(app, access, path)


class _Guard:
    """Asks whose a request is before anything else sees it, and adds the headers that protect a page."""

    def __init__(self, app: ASGIApp, access: Access, path: str) -> None:
        self._app = app
        self._access = access
        self._path = path
        self._failed = FailedLogins("console.login_failed")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._path and f"{scope['path']}/".startswith(f"{self._path}/"):  # a proxy may also have left it out
            scope = {**scope, "path": scope["path"][len(self._path) :] or "/"}
        request, nonce = HTTPConnection(scope), secrets.token_urlsafe(16)
        address = request.client.host if request.client is not None else ""
        slowed = self._failed.refusal(address)
        visitor = None if slowed else self._access.visitor(request)
        scope.setdefault("state", {}).update(visitor=visitor, nonce=nonce)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_headers(scope["path"], nonce)]
            await send(message)

        if slowed:
            refused: Response | None = PlainTextResponse(slowed, 429, headers={"retry-after": "10"})
        else:
            if visitor is None and request.headers.get("authorization"):
                with self._failed.slowed(address) as seconds:
                    await anyio.sleep(seconds)
            refused = self._refusal(request, visitor)
        await (refused or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: HTTPConnection, visitor: Visitor | None) -> Response | None:
        """Return the answer to a request that goes no further."""
        path, method = request.scope["path"], request.scope["method"]
        if path.encode() in PATHS and hasattr(request.state, HANDED_OVER):
            text = f"{path} is answered on a connection of its own: ask again.\n"
            return PlainTextResponse(text, 421, headers={"connection": "close"})
        if not self._access.is_host(request.headers.get("host", "")):
            return PlainTextResponse("This console is not known by that host name: see workers.console.names.\n", 421)
        if visitor is None:
            asks = {"www-authenticate": 'Basic realm="aviso-workers", charset="UTF-8"'}
            return PlainTextResponse("Who are you? Give your name and your token.\n", 401, headers=asks)
        if method not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("Only GET and POST are known here.\n", 405)
        if method == "POST" and not self._access.is_own_page(request, only_reads=path == mcp.PATH):
            log.warning("console.foreign_page", who=visitor.name, path=path)
            return PlainTextResponse("This request comes from no page of this console.\n", 403)
        if not visitor.may("read"):
            return PlainTextResponse(f"{visitor.name} has no right to read.\n", 403)
        return None


def _headers(path: str, nonce: str) -> list[tuple[bytes, bytes]]:
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",  # with `no-referrer`, browsers hide the origin of our own forms
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "max-age=3600" if path.startswith("/static/") else "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]


class _Live(StreamingResponse):
    """A stream of events whose reader has to take each of them in time. It counts among those of its user."""

    def __init__(self, events: AsyncIterator[str], open_pages: Counter[str], user: str) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._open, self._user = open_pages, user
        self._open[user] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open[self._user] -= 1

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(WRITE_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            log.info("console.slow_reader")


class _Views:
    """Makes answers of pages and actions."""

    def __init__(self, watcher: Watcher, actions: Actions, *, path: str) -> None:
        self._watcher = watcher
        self._path = path
        """Under which a proxy serves the pages."""
        self._actions = actions
        self._live = Counter[str]()
        """Pages that are kept up to date, by user."""
        self._templates = Environment(
            loader=PackageLoader("aviso_workers.console"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_spelled,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= dict(inspect.getmembers(shown, inspect.isfunction))
        self._templates.filters |= {"sparkline": overview.sparkline, "spoken": overview.spoken}
        self._templates.globals["version"] = __version__

    def of_page(self, make: Callable[[Question], Awaitable[Page]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            question = self._question(request)
            page = await _in_time(make(question))
            if not page.template:
                return JSONResponse(page.values, headers={"content-disposition": f"attachment; filename={page.title}"})
            if question.asked(LIVE) == "stream" and page.live and request.method == "GET":
                return self._stream(request, page, lambda: make(question))
            answered = HTMLResponse(self._whole(request, page), page.status)
            if TIMES in request.query_params:
                answered.set_cookie(TIMES, EXACT if _is_exact(request) else "ago", httponly=True, samesite="strict")
            return answered

        return answer

    def of_action(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            visitor, form = _visitor(request), await _form(request)
            action = ACTIONS[name]
            try:
                visitor.require(action.right)
                done = await self._actions.carry_out(action, visitor, form)
            except ForbiddenError as error:
                log.warning("console.forbidden", who=visitor.name, action=name)
                raise HTTPException(403, str(error)) from error
            if isinstance(done, Confirmation):
                values = {"asked": done, "action": action, "plan": done.plan}
                page = Page("confirm.html", done.plan.asks or f"{action.title}?", values)
                return HTMLResponse(self._whole(request, page))
            return RedirectResponse(self._path + done, 303)

        return answer

    async def of_mcp(self, request: Request) -> Response:
        async def ask(make: Callable[[Question], Awaitable[Page]], fields: dict[str, str]) -> Page:
            question = structs.replace(self._question(request), path=fields, query=fields)
            return await _in_time(make(question), MCP_SECONDS)

        body = await _body(request, "application/json")
        status, answer = await mcp.answered(body, request.headers, ask, payloads=_visitor(request).may("payload"))
        return Response(answer, status, media_type="application/json" if answer else None)

    async def failed(self, request: Request, error: Exception) -> Response:
        status, text = _said(error)
        values = {"text": text, "begun": isinstance(error, BrokenOffError)}
        return HTMLResponse(self._whole(request, Page("error.html", "Not shown", values, status=status)), status)

    def _question(self, request: Request) -> Question:
        return Question(
            watcher=self._watcher,
            actions=self._actions,
            path={name: str(value) for name, value in request.path_params.items()},
            query=dict(request.query_params),
        )

    def _context(self, request: Request, page: Page) -> dict[str, Any]:
        query = dict(request.query_params)
        live = query.pop(LIVE, "")
        query.pop(TIMES, "")
        return {
            **page.values,
            "page": page,
            "visitor": _visitor(request),
            "nonce": request.state.nonce,
            "path": request.url.path,
            "exact": _is_exact(request),
            "query": query,
            "is_live": page.live and live != "off",
            "address": lambda **changed: _address(request.url.path, query, live, changed),
        }

    def _whole(self, request: Request, page: Page) -> str:
        return self._addressed(self._templates.get_template(page.template).render(self._context(request, page)))

    def _addressed(self, html: str) -> str:
        """Return a page whose addresses begin with the path under which it is served."""
        return OWN_ADDRESS.sub(rf"\1{self._path}/", html) if self._path else html

    def _part(self, request: Request, page: Page) -> str:
        """Return what of a page is kept up to date."""
        template = self._templates.get_template(page.template)
        context = template.new_context(self._context(request, page))
        return self._addressed("".join(template.blocks["live"](context)))

    def _stream(self, request: Request, page: Page, make: Callable[[], Awaitable[Page]]) -> Response:
        """Return the page, and then the page as `make` makes it again and again."""
        user = _visitor(request).name
        if self._live[user] >= MAX_LIVE_EACH or self._live.total() >= MAX_LIVE:
            return PlainTextResponse(f"{self._live[user]} live pages are open already.\n", 503)

        async def events() -> AsyncIterator[str]:
            shown, now = "", self._part(request, page)
            while not self._watcher.closed:
                yield _event(now) if now != shown else ":\n\n"
                shown = now
                with anyio.move_on_after(UNCHANGED_SECONDS):
                    await self._watcher.changed()
                try:
                    now = self._part(request, await _in_time(make()))
                except (AvisoWorkersError, HTTPException) as error:
                    now = self._part(request, Page("error.html", "Not shown", {"text": _said(error)[1]}))

        return _Live(events(), self._live, user)


def _spelled(value: Any) -> Any:
    """Return a text with what could reorder or hide others of its line spelled out."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


async def _in_time(making: Awaitable[Page], seconds: float = PAGE_SECONDS) -> Page:
    """Return the page. Raises `UnavailableError` where the server takes too long."""
    try:
        with anyio.fail_after(seconds):
            return await making
    except TimeoutError as error:
        raise UnavailableError(f"the server has not answered within {seconds:g} s") from error


def _event(html: str) -> str:
    return "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"


def _is_exact(request: Request) -> bool:
    return request.query_params.get(TIMES, request.cookies.get(TIMES)) == EXACT


def _visitor(request: Request) -> Visitor:
    visitor = request.state.visitor
    assert isinstance(visitor, Visitor)
    return visitor


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises as `_body` does."""
    body = await _body(request, "application/x-www-form-urlencoded")
    return dict(parse_qsl(body.decode(errors="replace")))


async def _body(request: Request, content_type: str) -> bytes:
    """Return the body of a request. Raises `HTTPException` for another type, a large one and one that does not come."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != content_type:
        raise HTTPException(415, f"{request.url.path} takes {content_type}")
    body = b""
    with anyio.move_on_after(FORM_SECONDS) as taking:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                raise HTTPException(413, f"{request.url.path} takes at most {MAX_FORM_BYTES} bytes")
    if taking.cancelled_caught:
        raise HTTPException(408, f"the body has not come within {FORM_SECONDS:g} s")
    return body


def _address(path: str, query: dict[str, str], live: str, changed: dict[str, Any]) -> str:
    """Return the address of a page with other filters; an empty one is left out."""
    kept = {**query, **({LIVE: live} if live == "off" else {}), **changed}
    text = urlencode({name: value for name, value in kept.items() if value not in ("", None)})
    return f"{path}?{text}" if text else path


def _said(error: Exception) -> tuple[int, str]:
    """Return the status and the text that tell somebody of an error."""
    match error:
        case HTTPException():
            return error.status_code, error.detail
        case NotFoundError():
            return 404, str(error)
        case DeniedError():
            return 503, inventory.denial_text(error)
        case BackendError():
            return 503, describe(error)
        case AvisoWorkersError():
            return 400, str(error)
    return 500, f"this is a mistake of the console, and its log has it: {type(error).__name__}"


class _Connection(H11Protocol):
    """A connection that is closed where the head of a request does not come in time: it counts among all requests."""

    _late: asyncio.TimerHandle | None = None
    _waiting: ClassVar[dict[_Connection, None]] = {}
    """Those of the process that have not sent a head, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        else:
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait_for_head(self) -> None:
        if self._late is not None:
            return
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        self._waiting[self] = None
        if len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            oldest._wait_no_more()
            oldest.transport.close()

    def _wait_no_more(self) -> None:
        self._waiting.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever calls `serve` hears them


async def serve(
    admin: Admin, config: Config, *, on_listening: Callable[[str], None], line: socket.socket | None = None
) -> None:
    """Serve the console until it is cancelled; `on_listening` is told its address.

    With a `line` to a fleet it listens nowhere: it takes the connections that come by it, until the fleet is gone.

    Raises `ConfigError` where it must not be served, `ServerProcessError` where the port is taken.
    """
    access, settings = Access(config), config.workers.console
    listening = [_listen(settings.host, settings.port)] if line is None else []
    watcher = Watcher(admin, config)
    async with anyio.create_task_group() as tasks:
        app = application(watcher, Actions(admin, config, tasks), access)
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                http=_Connection,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_REQUESTS,
                timeout_graceful_shutdown=ENDS_SECONDS,
            )
        )
        ended = anyio.Event()

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=listening)
            ended.set()

        tasks.start_soon(watcher.run)
        tasks.start_soon(run)
        try:
            if line is None:
                host, port = listening[0].getsockname()[:2]
                on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
                await ended.wait()
            else:
                await _take(line, server)
        finally:
            watcher.close()
            server.should_exit = True
            tasks.cancel_scope.cancel()


async def _take(line: socket.socket, server: _Server) -> None:
    """Take the connections that the fleet hands over, until it is gone."""
    loop = asyncio.get_running_loop()
    connection = partial(_Connection, server.config, server.server_state, {HANDED_OVER: True})
    line.setblocking(False)
    with line:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_turns, line)
            said = b"+"
            with suppress(ConnectionError):
                while said:
                    await anyio.wait_readable(line)
                    said, handed, _, _ = socket.recv_fds(line, 1, 1)
                    for descriptor in handed:
                        with suppress(OSError):  # it may have been reset meanwhile
                            await loop.connect_accepted_socket(connection, socket.socket(fileno=descriptor))
            tasks.cancel_scope.cancel()


async def _tell_turns(line: socket.socket) -> None:
    """Tell the fleet again and again that the event loop turns; the first time, that connections are taken."""
    while True:
        with suppress(OSError):  # the fleet is gone, or reads nothing now
            line.send(b"\n")
        await anyio.sleep(TURN_SECONDS)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServerProcessError(
            f"the console cannot listen on {host}:{port}: {error.strerror}; choose another workers.console.port, or "
            "say --port"
        ) from error
