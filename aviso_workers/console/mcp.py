"""The Model Context Protocol: what the pages show, for programs that ask on behalf of a language model.

Streamable HTTP without sessions and streams: each POST has one message of JSON-RPC 2.0, and its answer is JSON. Served
are revision 2026-07-28, in which each request tells its revision, and those before it, which begin with `initialize`. A
tool is a page, and changes nothing: what it returns are the values of the page.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.console import dead_letters, pages
from aviso_workers.console.overview import AgentView
from aviso_workers.console.pages import Page, Question
from aviso_workers.console.shown import body
from aviso_workers.errors import AvisoWorkersError, BackendError, describe
from aviso_workers.version import __version__

PATH = "/mcp"
MODERN, LEGACY = "2026-07-28", ("2025-11-25", "2025-06-18")
REVISION = "io.modelcontextprotocol/protocolVersion"
NO_JSON, NO_REQUEST, NO_METHOD = -32700, -32600, -32601
WRONG_PARAMETERS, HEADERS_DIFFER, NO_REVISION = -32602, -32020, -32022
MAX_ITEMS = (200, 50, 10)
"""Of a list; fewer where the result would have too many characters."""
MAX_CHARACTERS = 400_000
"""Where a result has more, whoever asks is told to ask for less."""
NOT_SHOWN = {"overview", "config", "jobs", "State", "stored", "answer", "seen"}
"""What only templates need, with the whole configuration, and where the values that a page shows come from."""
COUNTS = ("in_flight", "at_once", "retrying", "handled_rate", "catches_up_seconds", "dead_letters_of_a_day")
"""What lists show of an agent beside its row."""
MAX_WHY = 500
"""Characters of why an agent is in its state, and of what else is so: 200 agents fit into a result."""

Make = Callable[[Question], Awaitable[Page]]
Ask = Callable[[Make, dict[str, str]], Awaitable[Page]]
"""Makes a page of these fields for the user whose request it is. Raises `AvisoWorkersError`."""

TOOLS: dict[str, tuple[Make, tuple[str, ...], tuple[str, ...]]] = {
    **{make.__name__: (make, (), ()) for make in (pages.now, pages.timers, pages.spark, pages.apps, pages.doctor)},
    "agents": (pages.agents, (), ("q", "app", "state", "order", "show")),
    "agent": (pages.agent, ("app", "agent"), ()),
    "app": (pages.app, ("app",), ()),
    "dead_letters": (pages.all_dead_letters, (), dead_letters.FILTERS),
    "dead_letter": (pages.dead_letter, ("app", "sequence"), ()),
    "notification": (pages.notification, ("name",), ()),
    "streams": (pages.streams, (), ("all",)),
    "audit": (pages.audit, (), ("since", "until", "who", "action", "of")),
}
"""The page of each tool, the fields that it needs, and those that it takes besides."""


class _Call(Struct, frozen=True):
    """A request, or a notification, which has no id."""

    jsonrpc: Literal["2.0"]
    method: str
    id: str | int | UnsetType = UNSET
    params: dict[str, Any] = {}


class _RefusedError(Exception):
    """It has the code, the message and the data of an error of JSON-RPC."""


async def answered(message: bytes, headers: Mapping[str, str], ask: Ask, *, payloads: bool) -> tuple[int, bytes]:
    """Return the status and the body of the answer to a message of somebody who may see `payloads`."""
    whose: dict[str, Any] = {}
    try:
        call = msgspec.json.decode(message, type=_Call)
        if call.id is UNSET:
            return 202, b""
        whose = {"id": call.id}
        _check_revision(call, headers)
        status, answer = 200, {"result": await _result(call, ask, payloads=payloads)}
    except UNREADABLE_JSON as error:
        code = NO_REQUEST if isinstance(error, msgspec.ValidationError | RecursionError) else NO_JSON
        status, answer = 400, {"error": {"code": code, "message": f"this is no request of JSON-RPC 2.0: {error}"}}
    except _RefusedError as refused:
        status = 404 if refused.args[0] == NO_METHOD else 400
        answer = {"error": dict(zip(("code", "message", "data"), refused.args, strict=False))}
    return status, msgspec.json.encode({"jsonrpc": "2.0", **whose, **answer})


def _check_revision(call: _Call, headers: Mapping[str, str]) -> None:
    """Raise `_RefusedError` for a revision that is not known, and where headers and message differ."""
    meta, header = call.params.get("_meta"), headers.get("mcp-protocol-version")
    revision = meta.get(REVISION) if isinstance(meta, dict) else None
    if revision is None and header in (None, *LEGACY):
        return
    name = call.params.get("name") if call.method == "tools/call" else headers.get("mcp-name")
    if [revision, call.method, name] != [header, headers.get("mcp-method"), headers.get("mcp-name")]:
        raise _RefusedError(HEADERS_DIFFER, "MCP-Protocol-Version, Mcp-Method or Mcp-Name differ from the message")
    if revision != MODERN:
        supported = {"supported": (MODERN, *LEGACY), "requested": revision}
        raise _RefusedError(NO_REVISION, "this revision of the protocol is not known", supported)


async def _result(call: _Call, ask: Ask, *, payloads: bool) -> dict[str, Any]:
    complete = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "aviso-workers", "version": __version__}}
    match call.method:
        case "initialize":
            wanted = call.params.get("protocolVersion")
            return {"protocolVersion": wanted if wanted in LEGACY else LEGACY[0], **about}
        case "server/discover":
            return {"supportedVersions": (MODERN, *LEGACY), **about, **complete}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": [_tool(name) for name in TOOLS], **complete}
        case "tools/call":
            text, failed = await _called(call.params, ask, payloads=payloads)
            return {"content": [{"type": "text", "text": text}], "isError": failed, "resultType": "complete"}
    raise _RefusedError(NO_METHOD, f"{call.method} is not known here")


def _tool(name: str) -> dict[str, Any]:
    make, needs, takes = TOOLS[name]
    fields = {field: {"type": ["string", "integer"]} for field in (*needs, *takes)}
    schema = {"type": "object", "properties": fields, "required": needs, "additionalProperties": False}
    only_reads = {"readOnlyHint": True, "openWorldHint": False}
    return {"name": name, "description": make.__doc__, "inputSchema": schema, "annotations": only_reads}


async def _called(params: Mapping[str, Any], ask: Ask, *, payloads: bool) -> tuple[str, bool]:
    """Return what a tool says, and whether that is an error. Raises `_RefusedError` where there is no such tool."""
    name, given = params.get("name"), params.get("arguments") or {}
    if name not in [*TOOLS]:  # it may be anything
        raise _RefusedError(WRONG_PARAMETERS, f"there is no tool {name!r}")
    make, needs, takes = TOOLS[name]
    if not isinstance(given, dict) or not {*needs} <= given.keys() <= {*needs, *takes}:
        return f"{name} needs {', '.join(needs) or 'nothing'}, and takes {', '.join(takes) or 'nothing'} besides", True
    try:
        page = await ask(make, {field: str(value) for field, value in given.items()})
    except AvisoWorkersError as error:
        return describe(error) if isinstance(error, BackendError) else str(error), True
    for most in MAX_ITEMS:
        text = msgspec.json.encode(_fields(page.values, _Shown(payloads, most)), enc_hook=str).decode()
        if len(text) <= MAX_CHARACTERS:
            return text, page.status >= 400
    return f"the result has {len(text)} characters, more than {MAX_CHARACTERS}: ask for less", True


class _Shown(Struct, frozen=True):
    """What is shown of a page."""

    payloads: bool
    most: int
    """The most items of a list."""


def _plain(value: Any, shown: _Shown) -> Any:
    match value:
        case AgentView():
            return _fields(_listed(value), shown)
        case Struct():
            properties = [name for name, member in vars(type(value)).items() if isinstance(member, property)]
            return _fields({name: getattr(value, name) for name in (*value.__struct_fields__, *properties)}, shown)
        case Mapping():
            return {str(key): _plain(each, shown) for key, each in value.items()}
        case list() | tuple():
            more = [f"and {len(value) - shown.most} more: ask for less"] if len(value) > shown.most else []
            return [*(_plain(each, shown) for each in value[: shown.most]), *more]
        case bytes():
            return body(value) if shown.payloads else f"{len(value)} bytes; you have no right to see payloads"
    return value.name if isinstance(value, Enum) else value


def _listed(view: AgentView) -> dict[str, Any]:
    """Return what lists show of an agent. What its state is judged from has thousands of characters."""
    row, is_counted = view.row, view.facts.is_counted
    return {
        **structs.asdict(row),
        **{name: getattr(view, name) for name in COUNTS if is_counted},
        "lag": view.facts.lag if is_counted else None,
        "why": row.why[:MAX_WHY],
        "also": "; ".join(row.also)[:MAX_WHY],
        "workers": len(view.workers),
        "unfinished_since": view.unfinished_since,
    }


def _fields(values: Mapping[str, Any], shown: _Shown) -> dict[str, Any]:
    """Return plain data of what a page shows, without what is empty."""
    found = {name: _plain(value, shown) for name, value in values.items() if name not in NOT_SHOWN}
    return {name: value for name, value in found.items() if value not in (None, "")}
