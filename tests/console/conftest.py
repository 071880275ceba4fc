"""A console on a real nats-server, and an app whose agents work, fail, are blocked and wait."""

from __future__ import annotations

import html as html_text
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import anyio
import httpx
import pytest
from msgspec import Struct, structs

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.backends import Admin, open_backend
from aviso_workers.config import Config, load
from aviso_workers.config.secrets import Secret
from aviso_workers.config.settings import Console, ConsoleUser
from aviso_workers.console import overview, web
from aviso_workers.console.web import serve
from aviso_workers.server import NatsServer
from aviso_workers.telemetry import status
from aviso_workers.testing import Harness, harness
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

OPERATOR = ("anna", "an-operators-token")
READER = ("rolf", "a-readers-token")
USERS = {
    OPERATOR[0]: ConsoleUser(
        token=Secret(OPERATOR[1]), rights=("read", "payload", "pause", "run", "reset", "retry", "drop", "apply")
    ),
    READER[0]: ConsoleUser(token=Secret(READER[1])),
}
NUMBERS = itertools.count(1)
FORM = {"content-type": "application/x-www-form-urlencoded"}
OWN_PAGE = {"sec-fetch-site": "same-origin"}


class Served(Struct, frozen=True):
    """A console that is served."""

    url: str
    config: Config
    admin: Admin

    def client(self, user: tuple[str, str] | None = OPERATOR, **headers: str) -> httpx.AsyncClient:
        """A browser of a user, on a page of the console."""
        return httpx.AsyncClient(
            base_url=self.url, auth=user, headers={**OWN_PAGE, **headers}, timeout=PATIENCE_SECONDS, trust_env=False
        )


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[Served]:
    """Serve a console on a free port while the block runs."""
    console = structs.replace(config.workers.console, port=0)
    config = structs.replace(config, workers=structs.replace(config.workers, console=console))
    found: list[str] = []
    listening = anyio.Event()

    def on_listening(url: str) -> None:
        found.append(url)
        listening.set()

    async with open_backend(config) as admin, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: serve(admin, config, on_listening=on_listening))
        with anyio.fail_after(PATIENCE_SECONDS):
            await listening.wait()
        yield Served(found[0].rstrip("/"), config, admin)
        tasks.cancel_scope.cancel()


def with_console(config: Config, **settings: Any) -> Config:
    return structs.replace(config, workers=structs.replace(config.workers, console=Console(**settings)))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "EVERY_SECONDS", 0.3)
    monkeypatch.setattr(status, "FAILED_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def _waits_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "PATIENCE_SECONDS", PATIENCE_SECONDS / 2)
    monkeypatch.setattr(web, "MCP_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(web, "PAGE_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def config(nats_server: NatsServer) -> Config:
    return with_console(load(app_config("jetstream", nats_server.url)), users=USERS)


@pytest.fixture
async def console(config: Config) -> AsyncIterator[Served]:
    async with served(config) as console:
        yield console


@pytest.fixture
def app(config: Config) -> App:
    """An app whose agent `fails` fails for step 3, and whose agent `blocks` is blocked at it."""
    app = App("field-index", config=config)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        pass

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def fails(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "3":
            raise ValueError("no such field <b>3</b>")

    @app.agent("mars", order_by=["class"], retry=RetryPolicy(first=0.02, attempts=None))
    async def blocks(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "3":
            raise KeyError("step 3")

    @app.every("1h", singleton=True)
    async def report() -> None:
        pass

    return app


@pytest.fixture
async def running(app: App, nats_server: NatsServer) -> AsyncIterator[Harness]:
    async with harness(app, server=nats_server.url) as t:
        yield t


async def publish(app: App, *steps: int, payload: Any = None) -> None:
    """Publish notifications of these steps, each with a subject of its own."""
    await app.notify_many(
        Notify("mars", mars(step=step, expver=f"{next(NUMBERS):04}"), payload or {"path": f"/data/{step}"})
        for step in steps
    )


async def shown(client: httpx.AsyncClient, path: str, *texts: str, without: str | None = None) -> str:
    """The page, once it has all of these texts and lacks the other one."""
    page = ""
    try:
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                page = text_of((await client.get(path)).text)
                if all(text in page for text in texts) and (without is None or without not in page):
                    return page
                await anyio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"{path} has not shown {texts} (without {without!r}), but:\n{page}")


def text_of(html: str) -> str:
    """What a page shows of its HTML, without tags and repeated blanks."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


async def confirmed(client: httpx.AsyncClient, action: str, **fields: str) -> httpx.Response:
    """Do an action as somebody does who confirms what is shown; the answer to the confirmation."""
    asked = await client.post(f"/actions/{action}", content=urlencode(fields), headers=FORM)
    assert asked.status_code == 200, text_of(asked.text)
    return await confirm(client, action, asked)


async def confirm(client: httpx.AsyncClient, action: str, asked: httpx.Response) -> httpx.Response:
    """Confirm what was asked; the answer."""
    return await client.post(f"/actions/{action}", data=hidden_fields(asked.text, action) | filled_in(asked.text))


def hidden_fields(html: str, action: str, *, path: str = "") -> dict[str, str]:
    """The fields of the form of an action."""
    (form,) = re.findall(rf'<form [^>]*action="{path}/actions/{action}".*?</form>', html, re.DOTALL)
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', form)
    return {name: html_text.unescape(value) for name, value in found}


def filled_in(html: str) -> dict[str, str]:
    """What somebody fills in who confirms: a reason, and the number where it is asked for; the others as they stand."""
    number = re.search(r"Type ([\d,]+) to", html)
    why, rate = (re.search(rf'name="{name}"[^>]* value="([^"]+)"', html) for name in ("why", "rate"))
    found = {"number": number, "rate": rate, "why": why}
    return {"why": "a test"} | {
        name: html_text.unescape(match[1]) for name, match in found.items() if match is not None
    }
