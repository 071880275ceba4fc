"""The programs of docs/embedding.md, as they stand there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
import yaml
from fastapi.exceptions import FastAPIError

from aviso_workers import App
from aviso_workers.server import NatsServer
from tests.documented import EVENT_TYPE
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

KERNEL = """
import asyncio, json, sys
from IPython.core.interactiveshell import InteractiveShell

async def run(cells):  # as a notebook's kernel does: on a loop that goes on between them
    shell = InteractiveShell.instance()
    for source in cells:
        (await shell.run_cell_async(source, transformed_cell=shell.transform_cell(source))).raise_error()

asyncio.run(run(json.load(sys.stdin)))
"""
DOCS = Path(__file__).parents[1] / "docs"


def programs(title: str) -> list[str]:
    """The Python of one section of the page."""
    (section,) = (part for part in (DOCS / "embedding.md").read_text().split("\n## ") if part.startswith(title))
    return [block.partition("\n```")[0] for block in section.split("```python\n")[1:]]


def executed(program: str) -> dict[str, Any]:
    """The names that a program defines."""
    found: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "embedding.md", "exec"), found)
    return found


@pytest.fixture
def config(tmp_path: Path, nats_server: NatsServer) -> Path:
    """The tutorial's file, with a server of the test's own."""
    text = (DOCS / "tutorial.md").read_text().partition("```yaml\n")[2].partition("```")[0] + EVENT_TYPE
    document = yaml.safe_load(text)
    document["notification_backend"]["jetstream"]["nats_url"] = nats_server.url
    path = tmp_path / "aviso.yaml"
    path.write_text(json.dumps(document))
    return path


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def test_an_asyncio_program(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs("In an asyncio program")
    found = executed(program)
    found["app"].configure(config)
    said = ""

    def is_indexed() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "indexed 12" in said

    with anyio.fail_after(PATIENCE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found["main"])
            await until(is_indexed)
            tasks.cancel_scope.cancel()


async def test_a_fastapi_application(config: Path) -> None:
    found = executed(programs("Run inside FastAPI")[0])
    app: App = found["app"]
    app.configure(config)
    api = found["api"]
    transport = httpx.ASGITransport(api)
    with anyio.fail_after(PATIENCE_SECONDS):
        async with (
            api.router.lifespan_context(api),
            httpx.AsyncClient(transport=transport, base_url="http://api") as client,
        ):
            field = {"location": "/data"}
            assert (await client.post("/fields/2026-11-20/6", json=field)).json() == {"sequence": 1}
            assert (await client.post("/fields-from-a-thread/2026-11-20/12")).json() == {"sequence": 2}
            await until(lambda: len(found["indexed"]) == 2)
            assert (await client.post("/fields/2026-11-20/18", json=field)).json() == {"sequence": 3}
            assert [one.payload async for one in app.replay("mars", from_id=1)] == [field, None, field]
            refused = await client.post("/fields/2026-11-20/6", json={"location": 6})
            assert (refused.status_code, refused.json()["detail"][:27]) == (422, "Expected `str`, got `int` -")
    assert found["indexed"][:2] == ["6", "12"]
    assert app.runs == {}


def test_fastapi_takes_no_struct_itself() -> None:
    found = executed(programs("Run inside FastAPI")[0])

    def put(field: Any) -> None: ...

    put.__annotations__["field"] = found["Field"]
    with pytest.raises(FastAPIError, match="Invalid args for response field"):
        found["api"].put("/")(put)


@pytest.mark.slow
def test_a_notebook(config: Path, tmp_path: Path) -> None:
    begin, declare, run, *in_a_task = programs("In a notebook")
    meanwhile = "await app.notify('mars', {'class': 'od', 'date': '2026-11-20', 'step': 18})"
    until_it_came = "while steps != ['12', '18']:\n    await asyncio.sleep(0.01)"
    until_it_began = "while not app.runs:\n    await asyncio.sleep(0.01)\nawait asyncio.sleep(0)"
    cells = [begin, declare, run, declare, in_a_task[0], until_it_began, meanwhile, until_it_came, in_a_task[1]]
    ran = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps([*cells, "assert working.cancelled() and not app.runs"]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_script(config: Path, tmp_path: Path) -> None:
    script = programs("Publish without an event loop")[0]
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_SECONDS
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")


def test_a_view(config: Path, nats_server: NatsServer) -> None:
    """Of Django, of whose names the test has as much as the view needs."""
    view = programs("Publish without an event loop")[1]
    committed: list[Callable[[], object]] = []

    class Field:
        objects: Any
        pk = 7

        def __init__(self, step: str) -> None:
            self.step = step

        def identifier(self) -> dict[str, str]:
            return {"class": "od", "date": "2026-11-20", "step": self.step}

    Field.objects = SimpleNamespace(create=Field)
    app = App("fields", config=config)
    found: dict[str, Any] = {
        "app": app,
        "Field": Field,
        "HttpRequest": SimpleNamespace,
        "HttpResponse": SimpleNamespace,
        "transaction": SimpleNamespace(on_commit=committed.append),
    }
    exec(compile(view, "embedding.md", "exec"), found)
    assert found["upload"](SimpleNamespace(POST={"step": "12"})).status == 201

    async def stored() -> list[str]:
        async with App("outside", config=config) as reading:
            return [notification.identifier["step"] async for notification in reading.replay("mars")]

    (publish,) = committed
    publish()
    publish()  # a repeat, which is stored once
    assert anyio.run(stored) == ["12"]
