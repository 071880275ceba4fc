"""The Model Context Protocol of the console, asked by a client of others and message by message."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import msgspec
import pytest
from msgspec import structs

from aviso_workers import App
from aviso_workers.config import Config
from aviso_workers.console import mcp, overview, web
from aviso_workers.ops import agent_report
from aviso_workers.ops.agent_report import AgentHealth
from aviso_workers.ops.health import judge
from aviso_workers.server import NatsServer
from aviso_workers.testing import Harness
from tests.console.conftest import OPERATOR, READER, USERS, Served, publish, served, shown, with_console
from tests.ops.health_facts import consumer, facts, failure, retried, worker
from tests.waits import stand_still

if TYPE_CHECKING:
    from mcp import Client

pytestmark = pytest.mark.anyio

PAGES_WAIT_SECONDS, MCP_SECONDS = overview.PATIENCE_SECONDS, web.MCP_SECONDS

ARGUMENTS: dict[str, dict[str, Any]] = {
    "now": {},
    "agents": {"state": "blocked"},
    "agent": {"app": "field-index", "agent": "blocks"},
    "app": {"app": "field-index"},
    "dead_letters": {"agent": "fails"},
    "dead_letter": {"app": "field-index", "sequence": 1},
    "notification": {"name": "mars@2"},
    "timers": {},
    "streams": {"all": "yes"},
    "spark": {},
    "apps": {},
    "doctor": {},
    "audit": {},
}
SECRET = "/data/of-step-3"
MODERN = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/list"}


async def said(client: Client, tool: str) -> Any:
    """What a tool says, read from its JSON."""
    (content,) = (result := await client.call_tool(tool, ARGUMENTS[tool])).content
    assert content.type == "text"
    assert not result.is_error, content.text
    return msgspec.json.decode(content.text)


async def told(console: Served, user: tuple[str, str], *, mode: Any = "auto") -> dict[str, Any]:
    """What all tools say to a client of this user."""
    from mcp import Client  # which takes a second, and all processes of the tests import this module
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(headers=bearer(user), trust_env=False) as http,
        Client(streamable_http_client(f"{console.url}/mcp", http_client=http), mode=mode) as client,
    ):
        assert client.protocol_version == {"auto": "2026-07-28", "legacy": "2025-11-25"}[mode]
        listed = await client.list_tools()
        assert sorted(tool.name for tool in listed.tools) == sorted(ARGUMENTS)
        assert all(tool.description and tool.annotations and tool.annotations.read_only_hint for tool in listed.tools)
        return {tool: await said(client, tool) for tool in ARGUMENTS}


def bearer(user: tuple[str, str]) -> dict[str, str]:
    return {"authorization": f"Bearer {user[1]}"}


async def post(console: Served, content: Any, headers: Mapping[str, str] = {}) -> httpx.Response:
    """The answer to one message of the operator, or of who these headers name."""
    body = content if isinstance(content, bytes) else msgspec.json.encode({"jsonrpc": "2.0", "id": 7, **content})
    given = {"content-type": "application/json", **bearer(OPERATOR), **headers}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{console.url}/mcp", content=body, headers=given)


async def called(console: Served, tool: str, **arguments: Any) -> tuple[str, bool]:
    """What a tool says, and whether as an error."""
    params = {"name": tool, "arguments": arguments}
    result = (await post(console, {"method": "tools/call", "params": params})).json()["result"]
    return result["content"][0]["text"], result["isError"]


async def prepared(console: Served, app: App) -> None:
    """Have a dead letter and an agent that is blocked."""
    await publish(app, 1, 3, payload={"path": SECRET})
    async with console.client() as browser:
        await shown(browser, "/dead-letters", "1 dead letter,")
        await shown(browser, "/agents/field-index/blocks", "Blocked for", "at MARS@")
        await shown(browser, "/", "1 dead letter of the last day waits")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_reads_what_the_pages_show(console: Served, app: App, running: Harness, mode: str) -> None:
    await prepared(console, app)
    found = await told(console, OPERATOR, mode=mode)
    assert "1 dead letter of the last day waits" in found["now"]["sentence"]
    (blocks,) = found["agents"]["agents"]
    assert (blocks["agent"], blocks["state"], blocks["lag"]) == ("blocks", "blocked", 1)
    assert found["agent"]["retrying"][0]["error"] == "KeyError: 'step 3'"
    assert found["dead_letters"]["found"]["count"] == 1
    assert found["dead_letter"]["found"]["error"] == "ValueError: no such field <b>3</b>"
    assert SECRET in found["dead_letter"]["found"]["original"]["data"]
    assert SECRET in found["notification"]["story"]["message"]["data"]
    assert found["notification"]["story"]["sentence"].startswith("Not handled by field-index/fails: it is dead")
    assert found["notification"]["story"]["events"][0]["told"] == "published it"
    fates = {fate["agent"]: fate["state"] for fate in found["notification"]["story"]["fates"]}
    assert fates == {"fails": "dead letter", "index": "handled", "blocks": "blocked"}
    assert found["timers"]["timers"][0]["timer"] == "report"
    assert "MARS" in [row["stream"] for row in found["streams"]["streams"]]
    assert found["spark"]["runs"] == []
    assert found["apps"]["apps"][0][0] == "field-index"
    assert {"PASS", "WARN"} <= {result["state"] for result in found["doctor"]["report"]["results"]}
    assert found["audit"]["actions"] == []


@pytest.mark.slow
async def test_a_user_without_the_right_gets_no_payload_and_nobody_a_secret(
    console: Served, app: App, running: Harness
) -> None:
    await prepared(console, app)
    text = msgspec.json.encode(await told(console, READER)).decode()
    assert SECRET not in text
    assert "bytes; you have no right to see payloads" in text
    everything = text + msgspec.json.encode(await told(console, OPERATOR)).decode()
    assert OPERATOR[1] not in everything
    assert READER[1] not in everything


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("agent", {"app": "field-index", "agent": "nobody"}, "no agent nobody of app field-index reads one of"),
        ("agent", {"app": "field-index"}, "agent needs app, agent, and takes nothing besides"),
        ("agents", {"nme": "x"}, "agents needs nothing, and takes q, app, state, order, show besides"),
        ("dead_letter", {"app": "field-index", "sequence": "many"}, "'many' is no number"),
        ("dead_letters", {"since": "noon"}, "since"),
    ],
)
async def test_what_a_tool_cannot_show_it_says_as_an_error(
    console: Served, running: Harness, tool: str, arguments: dict[str, Any], text: str
) -> None:
    found, is_error = await called(console, tool, **arguments)
    assert (text in found, is_error) == (True, True), found


async def test_a_result_that_is_too_large_says_so(
    console: Served, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "MAX_CHARACTERS", 10)
    text, is_error = await called(console, "streams")
    assert (text.endswith("characters, more than 10: ask for less"), is_error) == (True, True)


async def test_the_agents_in_trouble_of_a_large_deployment_fit_into_a_result(
    console: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has what servers and workers say of it: answers of some kilobytes, and a hundred notifications retried."""
    error = f"ValueError: {'no such field ' * 30}"
    waiting = tuple(retried(sequence, attempt=6, attempts=None, blocked=True, error=error) for sequence in range(100))
    events = consumer(num_pending=30, num_ack_pending=2, ack_floor=0, answer={"config": {"description": "x" * 4000}})
    known = facts(events=events, failure=failure(retrying=waiting), workers=tuple(worker(f"w{n}") for n in range(20)))

    async def of_server(*_: Any) -> list[AgentHealth]:
        many = [structs.replace(known, app=f"app-{number}") for number in range(300)]
        return [AgentHealth(facts=each, judgement=judge(each), seconds=2.0) for each in many]

    monkeypatch.setattr(agent_report, "of_server", of_server)
    for tool, listed in {"now": "troubled", "agents": "agents"}.items():
        text, is_error = await called(console, tool)
        assert not is_error, text
        *agents, more = msgspec.json.decode(text)[listed]
        assert (len(agents), more) == (200, "and 100 more: ask for less")
        found = {name: agents[7][name] for name in ("agent", "state", "needs", "pending", "ack_pending", "workers")}
        wanted = {"agent": "index", "state": "blocked", "needs": True, "pending": 30, "ack_pending": 2, "workers": 20}
        assert found == wanted
        assert "at MARS@1 and 98 more: ValueError: no such field" in agents[7]["why"]
        assert f"agents retry {agents[7]['app']}/index" in agents[7]["cure"]


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, -32700),
        (b"\xff", {}, 400, -32700),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "\xff"}', {}, 400, -32700),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": ' + b'{"a":' * 10_000, {}, 400, -32600),
        (b"[]", {}, 400, -32600),
        (b'{"jsonrpc": "1.0", "method": "ping", "id": 1}', {}, 400, -32600),
        ({"id": None, "method": "ping"}, {}, 400, -32600),
        ({"method": "prompts/list"}, {}, 404, -32601),
        ({"method": "tools/call", "params": {"name": "reset"}}, {}, 400, -32602),
        ({"method": "tools/call", "params": {"name": ["now"]}}, {}, 400, -32602),
        ({"method": "ping"}, {"mcp-protocol-version": "1999-01-01"}, 400, -32020),
        ({"method": "tools/list"}, MODERN, 400, -32020),
        ({"method": "tools/list", "params": {"_meta": {mcp.REVISION: "2026-07-28"}}}, {}, 400, -32020),
        (
            {"method": "tools/list", "params": {"_meta": {mcp.REVISION: "2099-01-01"}}},
            {**MODERN, "mcp-protocol-version": "2099-01-01"},
            400,
            -32022,
        ),
    ],
)
async def test_a_message_that_is_none_is_refused_as_the_protocol_says(
    console: Served, content: Any, headers: dict[str, str], status: int, code: int
) -> None:
    answer = await post(console, content, headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


async def test_a_notification_and_a_ping_are_answered(console: Served) -> None:
    noted = await post(console, b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    assert (noted.status_code, noted.content) == (202, b"")
    assert (await post(console, {"method": "ping"})).json() == {"jsonrpc": "2.0", "id": 7, "result": {}}
    asked = {"method": "initialize", "params": {"protocolVersion": "2024-11-05"}}
    assert (await post(console, asked)).json()["result"]["protocolVersion"] == "2025-11-25"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer other"}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"content-type": "text/plain"}, 415),
        ({}, 200),
    ],
)
async def test_it_has_the_rules_of_the_pages(console: Served, headers: dict[str, str], status: int) -> None:
    assert (await post(console, {"method": "ping"}, headers)).status_code == status


async def test_it_takes_posts_of_bounded_size_only(console: Served) -> None:
    async with console.client() as client:
        assert (await client.get("/mcp")).status_code == 405
    assert (await post(console, b" " * 100_000)).status_code == 413


async def test_without_users_a_program_on_this_machine_asks_and_a_foreign_page_does_not(config: Config) -> None:
    async with served(with_console(config)) as console:
        assert (await post(console, {"method": "ping"}, {"authorization": ""})).status_code == 200
        foreign = {"authorization": "", "origin": "http://evil.example"}
        assert (await post(console, {"method": "ping"}, foreign)).status_code == 403


async def test_a_user_without_the_right_to_read_asks_nothing(config: Config) -> None:
    users = {**USERS, READER[0]: type(USERS[READER[0]])(token=USERS[READER[0]].token, rights=("pause",))}
    async with served(with_console(config, users=users)) as console:
        assert (await post(console, {"method": "tools/list"}, bearer(READER))).status_code == 403


@pytest.mark.slow
async def test_it_says_in_time_that_the_server_does_not_answer(
    console: Served, running: Harness, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PAGES_WAIT_SECONDS < MCP_SECONDS <= 10
    assert (await called(console, "dead_letters"))[1] is False
    monkeypatch.setattr(web, "MCP_SECONDS", 0.5)
    stand_still(nats_server)
    try:
        text, is_error = await called(console, "dead_letters")
    finally:
        os.kill(nats_server.process.pid, signal.SIGCONT)
    assert (text, is_error) == ("UnavailableError: the server has not answered within 0.5 s", True)
