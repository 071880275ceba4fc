"""What may be stored is told as such, whatever becomes of a later attempt: an acknowledgement is lost, and the stream
is fenced before the next attempt. On either backend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aviso_workers import App, Counter, Notification, Notify, RetryPolicy, Table
from aviso_workers.backends import Admin, OutgoingChunk
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import OutcomeUnknownError
from aviso_workers.ops import mirrors
from aviso_workers.state import delayed_messages, own_streams
from aviso_workers.testing import harness
from tests.contract.settings import app_config, mars

COUNTERS = own_streams.of_app(own_streams.COUNTERS, "contract")

pytestmark = pytest.mark.anyio

DELAYED = delayed_messages.stream_of("PLAIN")

LoseTheAnswer = Callable[[App, str], None]
COUNT = 12
"""Enough for a fast batch."""


def plain(a: int, **stated: Any) -> Notify:
    return Notify("plain", {"a": a, "b": "x"}, **stated)


def chunk() -> OutgoingChunk:
    return OutgoingChunk(
        subjects=[f"plain.{a}.x" for a in range(COUNT)],
        data=[b"null"] * COUNT,
        headers=[None] * COUNT,
        message_ids=[f"row-{a}" for a in range(COUNT)],
    )


@pytest.fixture
def app(kind: str, nats_url: str) -> App:
    return App("contract", config=app_config(kind, nats_url, publish_deadline_seconds=1))


@pytest.fixture
def seen(app: App) -> Table[int | None]:
    return app.table("seen", int)


@pytest.fixture
def hits(app: App) -> Counter:
    return app.counter("hits")


@pytest.fixture
def lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> LoseTheAnswer:
    """`lose_the_answer(app, "PLAIN")`: that of the next publish, after which the stream is fenced."""

    def lose(app: App, stream: str) -> None:
        left = [stream]

        def losing(publish: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def publish_unanswered(backend: Admin, *arguments: Any, **stated: Any) -> Any:
                if not left:
                    return await publish(backend, *arguments, **stated)
                left.clear()
                await publish(backend, *arguments, **stated)
                await mirrors.fence(backend, stream)
                lost = OutcomeUnknownError("the acknowledgement was lost")
                if publish.__name__ == "publish_many":
                    return [lost] * len(arguments[0])
                raise lost

            return publish_unanswered

        for kind in (InMemoryBackend, JetStreamBackend):
            for name in ("publish", "publish_many", "publish_chunk", "publish_together"):
                monkeypatch.setattr(kind, name, losing(getattr(kind, name)))

    return lose


@pytest.mark.parametrize(
    ("stream", "messages", "publish"),
    [
        ("PLAIN", 1, lambda app, *_: app.notify("plain", {"a": 1, "b": "x"})),
        ("PLAIN", COUNT, lambda app, *_: app.notify_many(map(plain, range(COUNT)))),
        ("PLAIN", 2, lambda app, *_: app.notify_together([plain(1), plain(2)])),
        ("PLAIN", COUNT, lambda app, *_: app.session.publisher.store_chunk("plain", chunk())),
        ("PLAIN", COUNT, lambda app, *_: app.session.publisher.store_answered("plain", chunk())),
        (DELAYED, 1, lambda app, *_: app.session.publisher.notify(plain(1, due=3600))),
        (COUNTERS, 1, lambda app, seen, hits: hits.add("od")),
        ("KV_contract__table__seen", 1, lambda app, seen, hits: seen.put("od", 1)),
        ("KV_contract__table__seen", 1, lambda app, seen, hits: seen.update("od", lambda _: 1)),
        ("KV_contract__table__seen", 1, lambda app, seen, hits: seen.delete("od")),
    ],
    ids=[
        *("notify", "notify_many", "notify_together", "store_chunk", "store_answered", "delayed", "counter"),
        *("table_put", "table_update", "table_delete"),
    ],
)
@pytest.mark.needs_server(2, 12)
async def test_a_refusal_after_a_lost_acknowledgement_says_that_it_may_be_stored(
    app: App,
    seen: Table[int | None],
    hits: Counter,
    lose_the_answer: LoseTheAnswer,
    stream: str,
    messages: int,
    publish: Callable[[App, Table[int | None], Counter], Awaitable[object]],
) -> None:
    async with app:
        await app.notify_many([plain(0), plain(0, due=3600)])
        await hits.add("rd")
        await seen.put("rd", 1)
        admin = app.session.admin
        before = (await admin.stream_info(stream)).last_sequence
        lose_the_answer(app, stream)
        with pytest.raises(OutcomeUnknownError, match="the answer to an earlier attempt was lost"):
            await publish(app, seen, hits)
        assert (await admin.stream_info(stream)).last_sequence == before + messages


async def test_an_output_that_may_be_stored_is_told_as_such(
    app: App, url: str | None, lose_the_answer: LoseTheAnswer
) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def derive(notification: Notification[Any]) -> Notify:
        step = int(notification.identifier["step"])
        if step:
            lose_the_answer(app, "PLAIN")
        return plain(step)

    async with harness(app, server=url) as t:
        await t.notify("mars", mars(step=0), {})
        await t.settle()
        await t.notify("mars", mars(step=1), {})
        await t.settle()
        _, settled = t.settled(derive)
        assert isinstance(settled.error, OutcomeUnknownError)
        assert (await app.session.admin.stream_info("PLAIN")).messages == 2
