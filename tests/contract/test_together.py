"""Notifications that are stored together or not at all, on either backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from nats.aio.client import Client, ServerVersion

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.backends import Admin, Message, Outgoing
from aviso_workers.errors import InvalidNotificationError, RefusedError
from aviso_workers.testing import harness
from tests.contract.conftest import Create, Stored
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ATOMIC_IS_OFF = 10174


@pytest.fixture
def declared(kind: str, nats_url: str) -> App:
    return App("contract", config=app_config(kind, nats_url))


@pytest.fixture
async def app(declared: App) -> AsyncGenerator[App, None]:
    async with declared:
        yield declared


def plain(a: str | int, payload: Any = None) -> Notify:
    return Notify("plain", {"a": a, "b": "x"}, payload)


def outgoing(*subjects: str) -> list[Outgoing]:
    return [Outgoing(Message(subject=subject, data=b"null"), subject, "MARS") for subject in subjects]


class TestBackend:
    async def test_all_are_stored_in_their_order(self, backend: Admin, create: Create, stored: Stored) -> None:
        await create()
        ack = await backend.publish_together(outgoing("mars.3", "mars.1", "mars.2"), timeout_seconds=PATIENCE_SECONDS)
        assert (ack.stream, ack.sequence, ack.duplicate) == ("MARS", 3, False)
        assert [message.subject for message in await stored()] == ["mars.3", "mars.1", "mars.2"]

    async def test_of_one_subject_the_last_stays(self, backend: Admin, create: Create, stored: Stored) -> None:
        await create(max_msgs_per_subject=1)
        twice = [Outgoing(Message(subject="mars.1", data=data), data.decode(), "MARS") for data in (b"1", b"2")]
        await backend.publish_together(twice, timeout_seconds=PATIENCE_SECONDS)
        assert [message.data for message in await stored()] == [b"2"]

    async def test_again_they_are_duplicates(self, backend: Admin, create: Create, stored: Stored) -> None:
        await create()
        for duplicate in (False, True):
            ack = await backend.publish_together(outgoing("mars.1", "mars.2"), timeout_seconds=PATIENCE_SECONDS)
            assert ack.duplicate == duplicate
        assert len(await stored()) == 2

    async def test_where_one_cannot_be_stored_none_is(self, backend: Admin, create: Create, stored: Stored) -> None:
        await create(discard="new", max_msgs=2)
        with pytest.raises(RefusedError):
            await backend.publish_together(outgoing("mars.1", "mars.2", "mars.3"), timeout_seconds=PATIENCE_SECONDS)
        assert await stored() == []

    async def test_one_that_is_too_large_is_refused_before_any_is_sent(
        self, backend: Admin, create: Create, stored: Stored
    ) -> None:
        await create()
        large = Outgoing(Message(subject="mars.2", data=b"x" * 2_000_000), "large", "MARS")
        with pytest.raises(RefusedError):
            await backend.publish_together(
                [*outgoing("mars.1"), large, *outgoing("mars.3")], timeout_seconds=PATIENCE_SECONDS
            )
        assert await stored() == []


async def test_all_are_stored(app: App) -> None:
    receipt = await app.notify_together([plain(1), plain(2), plain(3)])
    assert (receipt.stream, receipt.sequence, receipt.duplicate) == ("PLAIN", 3, False)
    assert [one.identifier["a"] async for one in app.replay("plain")] == ["1", "2", "3"]


async def test_under_one_message_id_all_of_them_are_stored_once(app: App) -> None:
    for duplicate in (False, True):
        receipt = await app.notify_together([plain(1), plain(2)], message_id="mine")
        assert receipt.duplicate == duplicate
    ids = [one.headers["Nats-Msg-Id"] async for one in app.replay("plain")]
    assert [message_id.rpartition(".")[0] for message_id in ids] == ["mine.1", "mine.2"]


async def test_ids_that_others_have_given_do_not_keep_them_out(app: App) -> None:
    """Also those of others that were stored together."""
    for a, message_id in enumerate(("mine", "mine.1", "mine.2"), 5):
        await app.notify("plain", {"a": a, "b": "x"}, message_id=message_id)
    assert not (await app.notify_together([plain(1), plain(2)], message_id="mine")).duplicate
    assert not (await app.notify_together([plain(3), plain(4)], message_id="mine.1")).duplicate
    assert [one.identifier["a"] async for one in app.replay("plain")] == ["5", "6", "7", "1", "2", "3", "4"]


@pytest.mark.needs_server(2, 12)
async def test_a_handler_that_is_run_again_stores_them_once(declared: App, nats_url: str) -> None:
    tries: list[bool] = []

    @declared.agent("mars", retry=RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0))
    async def derive(notification: Notification[Any]) -> None:
        receipt = await declared.notify_together([plain(1), plain(2)])
        tries.append(receipt.duplicate)
        await declared.notify_together([plain(1), plain(len(tries) + 2)])
        if len(tries) == 1:
            raise ConnectionError

    async with harness(declared, server=nats_url or None) as t:
        await t.notify("mars", mars(), {})
        await t.settle()
        assert tries == [False, True]
        assert [one.identifier["a"] for one in t.published[1:]] == ["1", "2", "1", "3", "1", "4"]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ([], "from 1 to 1000 notifications of one stream can be stored together, found 0 of none"),
        ([plain(1)] * 1001, "found 1001 of PLAIN"),
        ([plain(1), Notify("mars", mars(), {})], "found 2 of MARS and PLAIN"),
        ([Notify("plain", {"a": 1, "b": "x"}, message_id="mine")], "give it to all and not to one"),
        ([plain(1), Notify("plain", {"a": 1})], "identifier field 'b'"),
    ],
)
async def test_what_cannot_be_one_is_refused_before_anything_is_sent(
    app: App, wanted: list[Notify], problem: str
) -> None:
    await app.notify_many([plain(0)])
    with pytest.raises(InvalidNotificationError, match=problem):
        await app.notify_together(wanted)
    assert [one.identifier["a"] async for one in app.replay("plain")] == ["0"]


@pytest.mark.needs_server(2, 12)
async def test_a_stream_of_others_that_does_not_take_them_is_named(app: App, kind: str) -> None:
    if kind == "in_memory":
        pytest.skip("in memory every stream takes them")
    await app.notify_many([plain(0)])
    backend = app.session.backend
    config = (await backend.stream_info("PLAIN")).config
    assert config["allow_atomic"], "a stream that we create takes them"
    await backend.update_stream({**config, "allow_atomic": False})
    with pytest.raises(RefusedError, match="stream PLAIN does not take it, switch on its allow_atomic") as no:
        await app.notify_together([plain(1), plain(2)])
    assert no.value.code == ATOMIC_IS_OFF
    assert [one.identifier["a"] async for one in app.replay("plain")] == ["0"]


async def test_an_older_server_is_named(app: App, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "in_memory":
        pytest.skip("there is no server")
    await app.notify_many([plain(0)])
    monkeypatch.setattr(Client, "connected_server_version", property(lambda _: ServerVersion("2.11.4")))
    with pytest.raises(RefusedError, match=r"nats-server 2.12 or newer is needed; this one is 2.11"):
        await app.notify_together([plain(1), plain(2)])
    assert [one.identifier["a"] async for one in app.replay("plain")] == ["0"]
