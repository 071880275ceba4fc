"""Who may see and do what: users, tokens, a proxy, and requests that pages of others send."""

from __future__ import annotations

import base64
import re
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace

import anyio
import httpx
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from aviso_workers import App
from aviso_workers.config import Config, load
from aviso_workers.config.secrets import Secret
from aviso_workers.config.settings import Console, ConsoleProxy, ConsoleUser
from aviso_workers.console import web
from aviso_workers.console.access import Access
from aviso_workers.console.actions import ACTIONS
from aviso_workers.console.web import MAX_REQUESTS
from aviso_workers.errors import ConfigError
from aviso_workers.state.own_streams import AUDIT
from aviso_workers.telemetry import status as status_port
from aviso_workers.telemetry.status import MAX_FAILED
from aviso_workers.testing import Harness
from tests.console.conftest import (
    OPERATOR,
    READER,
    USERS,
    Served,
    confirmed,
    hidden_fields,
    publish,
    served,
    shown,
    text_of,
    with_console,
)
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

LOCAL = "nats://127.0.0.1:4222"
FIELDS = {"app": "field-index", "agent": "index", "timer": "report", "to": "all", "number": "1"}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    ("user", "status"),
    [
        (OPERATOR, 200),
        (READER, 200),
        (None, 401),
        ((OPERATOR[0], READER[1]), 401),
        ((OPERATOR[0], ""), 401),
        (("", OPERATOR[1]), 401),
        (("somebody", OPERATOR[1]), 401),
    ],
)
async def test_a_page_is_for_users_with_their_own_token(
    console: Served, user: tuple[str, str] | None, status: int
) -> None:
    async with console.client(user) as client:
        answer = await client.get("/settings")
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {OPERATOR[1]}", 200),
        (f"bearer {OPERATOR[1]}", 200),
        ("Bearer", 401),
        ("Bearer other", 401),
        (f"Token {OPERATOR[1]}", 401),
        ("Basic !!!", 401),
        ("Basic " + base64.b64encode(b"\xff\xfe:x").decode(), 401),
    ],
)
async def test_a_program_shows_a_bearer_token(console: Served, header: str, status: int) -> None:
    async with console.client(None, authorization=header) as client:
        assert (await client.get("/settings")).status_code == status


@pytest.mark.slow
async def test_every_answer_lets_a_browser_run_our_own_scripts_only(console: Served) -> None:
    async with console.client() as client, console.client(None) as stranger:
        answers = [await client.get(path) for path in ("/", "/settings", "/nowhere", "/static/console.css")]
        answers.append(await stranger.get("/"))
    policies = [answer.headers["content-security-policy"] for answer in answers]
    assert all("default-src 'none'; script-src 'nonce-" in policy for policy in policies)
    assert len(set(policies)) == len(policies), "each answer has a nonce of its own"
    assert {answer.headers["x-content-type-options"] for answer in answers} == {"nosniff"}
    assert [answer.headers["cache-control"] for answer in answers[:2]] == ["no-store", "no-store"]


async def test_a_user_without_the_right_does_nothing(console: Served, app: App, running: Harness) -> None:
    async with console.client(READER) as client:
        answers = {name: await client.post(f"/actions/{name}", data=FIELDS) for name in ACTIONS}
    assert answers.pop("stop-job").status_code == 404, "there is no job that could be stopped"
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(answers, 403)
    for name, answer in answers.items():
        assert f"rolf has no right to {ACTIONS[name].right}" in text_of(answer.text)
    assert AUDIT not in await console.admin.stream_names()


@pytest.mark.slow
async def test_a_job_is_stopped_by_those_only_who_could_have_begun_it(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 3, 3)
    async with console.client() as client, console.client(READER) as reader:
        await shown(client, "/dead-letters", "2 dead letters,")
        await confirmed(client, "retry-dead-letters", agent="fails", rate="0.001")
        refused = await reader.post("/actions/stop-job", data={"number": "1"})
        assert "Stop …" in await shown(client, "/jobs/1", "1 of 2 are handed back so far")
        assert "Stop …" not in await shown(reader, "/jobs/1", "1 of 2 are handed back so far")
        await confirmed(client, "stop-job", number="1")
        await shown(client, "/jobs/1", "Stopped: 1 of 2 handed back")
    assert (refused.status_code, "rolf has no right to retry" in text_of(refused.text)) == (403, True)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", None])
async def test_a_page_of_others_does_nothing(console: Served, running: Harness, site: str | None) -> None:
    headers = {} if site is None else {"sec-fetch-site": site}
    async with httpx.AsyncClient(base_url=console.url, auth=OPERATOR, headers=headers, trust_env=False) as client:
        answer = await client.post("/actions/pause-agent", data=FIELDS)
    assert (answer.status_code, answer.text) == (403, "This request comes from no page of this console.\n")


async def test_failed_logins_are_logged_and_slowed(console: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, waiting, answered, codes = list[float](), anyio.Semaphore(0), anyio.Event(), list[int]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        waiting.release()
        await answered.wait()

    monkeypatch.setattr(web, "anyio", SimpleNamespace(**{**vars(anyio), "sleep": sleep}))
    async with console.client(None, **bearer("a-guess")) as client, console.client() as user:

        async def guess() -> None:
            codes.append((await client.get("/settings")).status_code)

        with capture_logs() as logged:
            with anyio.fail_after(PATIENCE_SECONDS):
                async with anyio.create_task_group() as guessing:
                    for _ in range(MAX_FAILED):
                        guessing.start_soon(guess)
                        await waiting.acquire()
                    for _ in range(MAX_FAILED):
                        await guess()
                    assert codes == [429] * MAX_FAILED
                    answered.set()
        assert waits == [(n + 1) * status_port.FAILED_SECONDS for n in range(MAX_FAILED)]
        assert codes == [429] * MAX_FAILED + [401] * MAX_FAILED
        assert (await user.get("/settings")).status_code == 200
    told = [line for line in logged if line["event"] == "console.login_failed"]
    assert [line["address"] for line in told] == ["127.0.0.1"] * MAX_FAILED
    assert "a-guess" not in str(told)


async def test_a_browser_that_asks_first_without_a_token_is_not_slowed(console: Served) -> None:
    with capture_logs() as logged:
        async with console.client(None) as client:
            assert [(await client.get("/settings")).status_code for _ in range(2 * MAX_FAILED)] == [
                401
            ] * 2 * MAX_FAILED
    assert logged == []


@pytest.mark.slow
async def test_connections_that_send_no_head_leave_room_for_others(console: Served) -> None:
    async with AsyncExitStack() as held, console.client() as client:
        port = int(console.url.rpartition(":")[2])
        half = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(MAX_REQUESTS + 10)]
        for each in half:
            held.push_async_callback(anyio.aclose_forcefully, each)
            with suppress(anyio.BrokenResourceError):  # those before have been closed for it
                await each.send(b"GET /settings HTTP/1.1\r\nHost:")
        assert (await client.get("/settings")).status_code == 200


@pytest.mark.parametrize("token", ["set-it-in-the-environment", "guess", "fifteen-letters"])
def test_others_are_not_let_in_by_a_token_that_can_be_guessed(config: Config, token: str) -> None:
    users = {"anna": ConsoleUser(token=Secret("a-long-and-random-token")), "rolf": ConsoleUser(token=Secret(token))}
    with pytest.raises(ConfigError, match=r"users\.rolf\.token: 0\.0\.0\.0 can be reached by others") as refused:
        Access(with_console(config, users=users, host="0.0.0.0"))
    assert token not in str(refused.value)
    Access(with_console(config, users=users))


@pytest.mark.parametrize(("origin", "status"), [("http://console.example", 403), ("null", 403), ("", 200)])
async def test_a_browser_that_says_no_site_says_its_origin(
    console: Served, app: App, running: Harness, origin: str, status: int
) -> None:
    headers = {"origin": origin or console.url}
    async with httpx.AsyncClient(base_url=console.url, auth=OPERATOR, headers=headers, trust_env=False) as client:
        answer = await client.post("/actions/pause-agent", data=FIELDS)
    assert answer.status_code == status


def test_two_users_with_one_token_are_refused(config: Config) -> None:
    user = config.workers.console.users[OPERATOR[0]]
    with pytest.raises(ConfigError, match="two users have the same token"):
        Access(with_console(config, users={"anna": user, "bob": user}))


@pytest.mark.slow
async def test_a_program_with_a_token_comes_from_no_page(console: Served, running: Harness) -> None:
    async with httpx.AsyncClient(base_url=console.url, headers=bearer(OPERATOR[1]), trust_env=False) as client:
        answer = await client.post("/actions/pause-agent", data=FIELDS)
        forged = await client.post("/actions/pause-agent", data=FIELDS, headers={"sec-fetch-site": "cross-site"})
    assert (answer.status_code, forged.status_code) == (200, 403)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:9465", 200),
        ("[::1]:80", 200),
        ("console.example", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1]evil.example", 421),
        ("LocalHost:80", 200),
        ("", 421),
    ],
)
async def test_only_known_host_names_reach_it(config: Config, host: str, status: int) -> None:
    named = structs.replace(config.workers.console, names=("console.example",))
    async with (
        served(with_console(config, users=named.users, names=named.names)) as console,
        console.client() as client,
    ):
        assert (await client.get("/settings", headers={"host": host})).status_code == status


async def test_a_proxy_names_the_user(config: Config) -> None:
    proxy = ConsoleProxy(
        header="X-Forwarded-User", addresses=("127.0.0.1",), rights={"anna": ("read", "pause"), "*": ("read",)}
    )
    async with served(with_console(config, proxy=proxy)) as console:
        said = {}
        for name in ("anna", "bob", ""):
            async with console.client(None, **{"x-forwarded-user": name}) as client:
                answer = await client.get("/settings")
                said[name] = text_of(answer.text).rpartition("Secrets")[2].partition("Times in UTC")[0]
                assert answer.status_code == (200 if name else 401)
    assert said["anna"].endswith("anna, may pause, read ")
    assert said["bob"].endswith("bob, may read ")


@pytest.mark.slow
@pytest.mark.parametrize("stripped", [True, False])
async def test_a_proxy_serves_it_under_a_path(config: Config, app: App, running: Harness, stripped: bool) -> None:
    """Proxies leave the path out of what they forward, or do not."""
    async with served(with_console(config, users=USERS, path="/aviso")) as console, console.client() as client:
        begin = "" if stripped else "/aviso"
        await shown(client, f"{begin}/", "Nothing needs you.")
        page = (await client.get(f"{begin}/agents/field-index/index")).text
        addresses = re.findall(r'(?:href|src|action|connect)="([^"#]+)"', page)
        assert [each for each in addresses if not each.startswith("/aviso/")] == []
        assert {"/aviso/", "/aviso/static/console.css", "/aviso/actions/pause-agent"} <= {*addresses}
        asked = await client.post(f"{begin}/actions/pause-agent", data=FIELDS)
        form = hidden_fields(asked.text, "pause-agent", path="/aviso")
        done = await client.post(f"{begin}/actions/pause-agent", data=form)
        assert (done.status_code, done.headers["location"]) == (303, "/aviso/agents/field-index/index")
        async with client.stream("GET", f"{begin}/agents?live=stream") as live:
            assert 'href="/aviso/agents/field-index/index"' in await anext(live.aiter_text())
        assert (await client.get("/aviso")).status_code == 200
        assert (await client.get("/avisos")).status_code == 404


async def test_a_header_that_comes_twice_names_nobody(config: Config) -> None:
    """A proxy may add its own behind that of the client."""
    proxy = ConsoleProxy(header="X-Forwarded-User", addresses=("127.0.0.1",), rights={"*": ("read",)})
    async with served(with_console(config, proxy=proxy)) as console, console.client(None) as client:
        twice = [("x-forwarded-user", "anna"), ("x-forwarded-user", "rolf")]
        assert (await client.get("/settings", headers=twice)).status_code == 401


async def test_another_address_is_no_proxy(config: Config) -> None:
    proxy = ConsoleProxy(header="X-Forwarded-User", addresses=("192.0.2.1",), rights={"*": ("read",)})
    async with (
        served(with_console(config, proxy=proxy)) as console,
        console.client(None, **{"x-forwarded-user": "anna"}) as client,
    ):
        assert (await client.get("/settings")).status_code == 401


async def test_without_users_everybody_on_this_machine_has_all_rights(config: Config) -> None:
    async with served(with_console(config)) as console, console.client(None) as client:
        page = text_of((await client.get("/settings")).text)
    assert "somebody on this machine, may apply, drop, pause, payload, read, reset, retry, run" in page


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "console.example"])
def test_without_users_nobody_else_is_let_in(host: str) -> None:
    with pytest.raises(ConfigError, match="everybody would have all rights; configure users or a proxy"):
        Access(with_console(load(app_config("jetstream", LOCAL)), host=host))


async def test_no_page_shows_a_token(console: Served) -> None:
    async with console.client() as client:
        page = (await client.get("/settings?q=console")).text
    assert "workers.console" in page
    assert OPERATOR[1] not in page
    assert OPERATOR[1] not in repr(Console(users=console.config.workers.console.users))


async def test_an_action_takes_a_form_of_bounded_size(console: Served) -> None:
    async with console.client() as client:
        large = await client.post("/actions/pause-agent", data={"app": "x" * 100_000})
        other = await client.post("/actions/pause-agent", json={"app": "field-index"})
        read = await client.get("/actions/pause-agent")
    assert (large.status_code, other.status_code, read.status_code) == (413, 415, 405)
