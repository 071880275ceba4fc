from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from typing import Any, cast

import anyio
import pytest

from aviso_workers import config
from aviso_workers.backends import Administration
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.backends.jetstream import admin as module
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.backends.jetstream.management import JetStreamManagement
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS, PROMPT_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
async def backend(nats_server: NatsServer) -> AsyncGenerator[JetStreamBackend, None]:
    async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_server.url))) as backend:
        yield backend


@pytest.fixture
def administration(backend: JetStreamBackend) -> Administration:
    return backend.administration()


@pytest.mark.covers("002-68", "003-06")
async def test_a_request_is_answered_in_jetstreams_own_json(administration: Administration) -> None:
    created = await administration.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"], "max_bytes": 10})
    assert created["config"]["max_bytes"] == 10
    with pytest.raises(NotFoundError, match=r"STREAM\.INFO\.NONE.*10059"):
        await administration.api("STREAM.INFO.NONE")


@pytest.mark.covers("002-57")
async def test_a_listing_is_read_to_its_last_page(backend: JetStreamBackend) -> None:
    names = {f"S{number}" for number in range(300)}  # a server lists 256 at a time
    for name in names:
        await backend.add_stream({"name": name, "storage": "memory"})
    assert {stream.name for stream in await backend.streams()} == set(await backend.stream_names()) == names


async def test_nobody_listens_without_end_to_a_server_that_has_gone(
    administration: Administration, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "API_TIMEOUT_SECONDS", 0.1)
    nats_server.kill()

    with anyio.fail_after(PROMPT_SECONDS), pytest.raises(UnavailableError, match=r"listen to \$JS\.EVENT"):
        async with administration.listen("$JS.EVENT.>"):
            pass


@pytest.mark.covers("003-06")
async def test_what_a_server_says_unasked_is_heard(administration: Administration) -> None:
    async with administration.listen("$JS.EVENT.ADVISORY.STREAM.>") as advisories:
        await administration.api("STREAM.CREATE.MARS", {"name": "MARS"})
        with anyio.fail_after(PATIENCE_SECONDS):
            advisory = json.loads((await advisories.receive()).data)
    assert (advisory["type"], advisory.get("stream"), advisory.get("action")) == (
        "io.nats.jetstream.advisory.v1.stream_action",
        "MARS",
        "create",
    )


@pytest.mark.covers("002-61")
async def test_an_answer_may_come_in_several_messages(administration: Administration) -> None:
    await administration.api("STREAM.CREATE.MARS", {"name": "MARS", "subjects": ["mars.>"], "allow_direct": True})
    for step in range(3):
        await administration.request(f"mars.{step}", b"here")
    inbox = administration.new_inbox()
    async with administration.listen(inbox) as answers:
        administration.send("$JS.API.DIRECT.GET.MARS", json.dumps({"seq": 1, "batch": 3}).encode(), reply=inbox)
        with anyio.fail_after(PATIENCE_SECONDS):
            heard = [await answers.receive() for _ in range(4)]
    assert [(each.headers.get("Nats-Subject"), each.data) for each in heard[:3]] == [
        (f"mars.{step}", b"here") for step in range(3)
    ]
    assert (heard[3].status, heard[3].description) == ("204", "EOB")


async def test_the_server_says_its_version(administration: Administration) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", administration.server_version), administration.server_version


async def test_nobody_to_ask_is_said(administration: Administration) -> None:
    with pytest.raises(UnavailableError, match="nobody answers"):
        await administration.request("nobody.here")


async def test_there_is_nothing_to_administer_in_memory() -> None:
    with pytest.raises(RefusedError, match="in-memory backend has no server"):
        InMemoryBackend(config.InMemory()).administration()


async def test_nobody_unpins_a_reader_in_memory() -> None:
    with pytest.raises(RefusedError, match="in-memory backend has no server"):
        await InMemoryBackend(config.InMemory()).unpin_consumer("MARS", "index", group="workers")


class ListingConnection:
    """A connection to a server whose answers to a listing are these, one after another."""

    @property
    def management(self) -> JetStreamManagement:
        return JetStreamManagement(cast(NatsConnection, self))

    def __init__(self, *answers: tuple[int, list[str]]) -> None:
        self._answers = list(answers)
        self.offsets: list[int] = []

    async def api(
        self, subject: str, request: dict[str, Any], *, prefix: str, timeout_seconds: float
    ) -> dict[str, Any]:
        self.offsets.append(request["offset"])
        total, names = self._answers.pop(0)
        return {"total": total, "limit": 2, "streams": names, "state": {"subjects": dict.fromkeys(names, 1)}}


async def test_a_listing_that_changes_while_it_is_read_is_begun_again() -> None:
    # Without the first one, the second page begins one entry later than it should.
    changing = ListingConnection((4, ["a", "b"]), (3, ["d"]), (3, ["b", "c"]), (3, ["d"]))
    assert await changing.management.stream_names() == ["b", "c", "d"]
    assert changing.offsets == [0, 2, 0, 2]


async def test_subjects_are_counted_whole_or_not_at_all() -> None:
    assert await ListingConnection((3, ["a", "b"]), (3, ["c"])).management.subject_counts("MARS") == {
        "a": 1,
        "b": 1,
        "c": 1,
    }
    with pytest.raises(UnavailableError, match="2 of its 3 subjects were listed"):
        await ListingConnection((3, ["a", "b"]), (3, [])).management.subject_counts("MARS")
