"""A consumer of an agent that somebody edits by hand: nothing is handled without its body, on either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification, RetryPolicy
from aviso_workers.backends import Admin, Backend, Message
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.engine import shared_filters
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.errors import DeniedError, RefusedError
from aviso_workers.events import AgentDisturbed, ConsumerEdited, ConsumerResumed, NotReadAgain, ReadAgain
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.state import delayed_messages, own_streams
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000


class Handled(list[tuple[str, Any]]):
    """Step and payload of each call."""

    fails = False


@pytest.fixture
def calls() -> Handled:
    return Handled()


@pytest.fixture(params=[(), ("class",)], ids=["unordered", "ordered"])
async def worker(
    app: App, url: str | None, calls: Handled, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Harness]:
    monkeypatch.setattr(shared_filters, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(shared_filters, "CHECK_AGAIN_SECONDS", 0.1)

    @app.agent("mars", order_by=request.param, retry=RetryPolicy(attempts=2, first=0.01, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        calls.append((notification.identifier["step"], notification.payload))
        if calls.fails:
            raise ValueError("as asked for")

    async with harness(app, server=url) as t:
        yield t


async def edit(backend: Backend, stream: str, consumer: str, **edited: Any) -> None:
    found = await backend.consumer_info(stream, consumer)
    spec = ConsumerSpec(
        durable_name=consumer,
        filter_subjects=tuple(found.config.filters),
        ack_wait=found.config.ack_wait,
        max_ack_pending=found.config.max_ack_pending,
    )
    await backend.ensure_consumer(stream, structs.replace(spec, **edited))
    now = (await backend.consumer_info(stream, consumer)).config
    assert {name: now[name] for name in edited} == edited


async def test_a_body_that_the_server_leaves_out_is_read_from_the_stream(worker: Harness, calls: Handled) -> None:
    edited: list[ConsumerEdited] = []
    worker.app.events.listen(edited.append, ConsumerEdited)
    backend = worker.app.session.backend
    await edit(backend, "MARS", "contract__index", headers_only=True)
    for step in range(3):
        await worker.notify("mars", mars(step=step), {"n": step})
    await worker.settle()
    assert sorted(calls) == [("0", {"n": 0}), ("1", {"n": 1}), ("2", {"n": 2})]
    with anyio.fail_after(PATIENCE_SECONDS):
        while not edited:
            await worker.advance(0.1)
    assert edited[0].consumer == "contract__index"
    assert edited[0].differences == ("headers_only: true -> false",)
    assert not (await backend.consumer_info("MARS", "contract__index")).config.get("headers_only")


async def denied(backend: Admin, stream: str, sequence: int = 0, **_: Any) -> Message | None:
    """The backends' `message` where the user has no right to it."""
    raise RefusedError(f"$JS.API.STREAM.MSG.GET.{stream}: permissions violation")


async def test_a_body_that_may_not_be_read_is_waited_for_and_that_is_said(
    worker: Harness, calls: Handled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has left its stream meanwhile is not handled."""
    facts: list[NotReadAgain] = []
    ended: list[ReadAgain] = []
    worker.app.events.listen(facts.append, NotReadAgain)
    worker.app.events.listen(ended.append, ReadAgain)
    backend = worker.app.session.backend
    await edit(backend, "MARS", "contract__index", headers_only=True)
    with monkeypatch.context() as denying:
        for each in (InMemoryBackend, JetStreamBackend):
            denying.setattr(each, "message", denied)
        for step in range(3):
            await worker.notify("mars", mars(step=step), {"n": step})
        with anyio.fail_after(PATIENCE_SECONDS):
            while not facts:
                await worker.advance(0.1)
        await worker.advance(3.0)
    assert [(fact.agent, fact.stream) for fact in facts] == [("index", "MARS")], "once"
    assert (calls, ended) == ([], [])
    await backend.delete_message("MARS", 2)
    await worker.settle()
    assert ended == [ReadAgain(agent="index", stream="MARS")]
    assert sorted(calls) == [("0", {"n": 0}), ("2", {"n": 2})]


async def test_a_worker_that_starts_sets_it_right(worker: Harness, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = worker.app.session.backend
    await edit(backend, "MARS", "contract__index", headers_only=True)
    monkeypatch.setattr(shared_filters, "CHECK_SECONDS", 1000.0)
    await worker.stop()
    await worker.start()
    assert not (await backend.consumer_info("MARS", "contract__index")).config.get("headers_only")


@pytest.mark.parametrize("stream", ["MARS", RETRIES])
async def test_what_the_server_gave_up_for_a_max_deliver_is_delivered_again(
    worker: Harness, calls: Handled, stream: str
) -> None:
    """Nobody is told of what it gives up: so the consumer goes on after what was settled before."""
    edited: list[ConsumerEdited] = []
    resumed: list[ConsumerResumed] = []
    worker.app.events.listen(edited.append, ConsumerEdited)
    worker.app.events.listen(resumed.append, ConsumerResumed)
    backend = worker.app.session.backend
    calls.fails = True
    if stream == RETRIES:
        await worker.notify("mars", mars(step=0), {"n": 0})
        await worker.settle()
    await edit(backend, stream, "contract__index", max_deliver=1)
    calls.clear()
    if stream == RETRIES:
        await retry_dead_letters(worker)
    else:
        await worker.notify("mars", mars(step=0), {"n": 0})
    with anyio.fail_after(PATIENCE_SECONDS):
        while not calls:
            await worker.advance(0.01)  # it fails once, and the server gives it up
        calls.fails = False
        while len(calls) < 2 or not (edited and resumed):
            await worker.advance(0.1)
    await worker.settle()
    assert all(call == ("0", {"n": 0}) for call in calls), calls
    assert [(each.stream, each.differences) for each in edited] == [(stream, ("max_deliver: 1 -> unlimited",))]
    assert {(each.stream, each.why) for each in resumed} == {(stream, "max_deliver")}
    assert (await backend.consumer_info(stream, "contract__index")).config["max_deliver"] == -1


async def retry_dead_letters(worker: Harness) -> None:
    """Try them again, also where the worker has removed the consumer of the retries and not yet made it anew."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                await worker.retry_dead_letters()
                return
            except RefusedError:
                await worker.advance(0.1)


async def test_a_worker_that_starts_begins_before_what_the_server_gave_up(worker: Harness, calls: Handled) -> None:
    backend = worker.app.session.backend
    await worker.notify("mars", mars(step=0), {"n": 0})
    await worker.settle()
    await worker.stop()
    await edit(backend, "MARS", "contract__index", max_deliver=1, ack_wait=SECOND // 10)
    await worker.app.notify("mars", mars(step=1), {"n": 1})
    taken: list[Any] = []
    async with backend.consume("MARS", "contract__index", deliver=taken.extend, capacity=lambda: 10 - len(taken)):
        with anyio.fail_after(PATIENCE_SECONDS):
            while not taken or (await backend.consumer_info("MARS", "contract__index")).num_ack_pending:
                await worker.advance(0.05)  # nobody settles it
    await worker.start()
    await worker.settle()
    assert calls == [("0", {"n": 0}), ("1", {"n": 1})]


@pytest.mark.slow
async def test_a_paused_consumer_with_a_max_deliver_stays_paused(worker: Harness, calls: Handled) -> None:
    resumed: list[ConsumerResumed] = []
    worker.app.events.listen(resumed.append, ConsumerResumed)
    backend = worker.app.session.admin
    await backend.pause_consumer("MARS", "contract__index", until=datetime.now(UTC) + timedelta(days=1))
    await edit(backend, "MARS", "contract__index", max_deliver=1)
    await worker.notify("mars", mars(step=0), {"n": 0})
    await worker.advance(2.0)  # several checks
    await worker.stop()
    await worker.start()
    await worker.advance(2.0)
    assert (await backend.consumer_info("MARS", "contract__index")).paused
    assert calls == []
    await backend.pause_consumer("MARS", "contract__index", until=None)
    with anyio.fail_after(PATIENCE_SECONDS):
        while not resumed:
            await worker.advance(0.1)
    await worker.settle()
    assert calls[0] == ("0", {"n": 0})


async def test_a_consumer_with_a_max_deliver_that_may_not_be_removed_is_not_read(
    worker: Harness, calls: Handled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose notifications."""
    backend = worker.app.session.backend
    disturbed: list[AgentDisturbed] = []
    worker.app.events.listen(disturbed.append, AgentDisturbed)

    async def deny(*_: Any, **__: Any) -> None:
        raise DeniedError("$JS.API.CONSUMER.DELETE.MARS.contract__index")

    with monkeypatch.context() as patched:
        patched.setattr(ConsumerRecorder, "remove", deny)
        await edit(backend, "MARS", "contract__index", max_deliver=1)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not disturbed:
                await worker.advance(0.1)
        await worker.notify("mars", mars(step=0), {"n": 0})
        await worker.advance(1.0)
        assert calls == []
    assert "CONSUMER.DELETE" in str(disturbed[0].error)
    await worker.settle()
    assert calls == [("0", {"n": 0})]


LIMITS = [
    {"max_bytes": 100},
    {"max_batch": 1},
    {"max_expires": SECOND},
    {"backoff": [SECOND, 2 * SECOND]},
]


@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: next(iter(limits)))
async def test_what_limits_requests_and_replaces_ack_wait_is_removed(
    worker: Harness, calls: Handled, limits: dict[str, Any]
) -> None:
    edited: list[ConsumerEdited] = []
    worker.app.events.listen(edited.append, ConsumerEdited)
    backend = worker.app.session.backend
    wanted = (await backend.consumer_info("MARS", "contract__index")).config
    await edit(backend, "MARS", "contract__index", **limits)
    with anyio.fail_after(PATIENCE_SECONDS):
        while not edited:
            await worker.advance(0.1)
    now = (await backend.consumer_info("MARS", "contract__index")).config
    assert [now.get(name) or None for name in limits] in ([None], [-1]), "no limit"
    assert now.ack_wait == wanted.ack_wait
    await worker.notify("mars", mars(step=0), {"text": "x" * 200})
    await worker.settle()
    assert len(calls) == 1


async def test_a_dead_letter_is_tried_again_with_its_body(worker: Harness, calls: Handled) -> None:
    calls.fails = True
    await worker.notify("mars", mars(step=0), {"n": 0})
    await worker.settle()
    calls.fails = False
    calls.clear()
    await edit(worker.app.session.backend, RETRIES, "contract__index", headers_only=True)
    await worker.retry_dead_letters()
    await worker.settle()
    assert calls == [("0", {"n": 0})]


async def test_a_delayed_notification_is_delivered_with_its_body(worker: Harness, calls: Handled) -> None:
    backend = worker.app.session.backend
    await worker.app.notify("mars", mars(step=0), {"n": 0}, due=1)
    await edit(backend, delayed_messages.stream_of("MARS"), delayed_messages.DURABLE, headers_only=True)
    with anyio.fail_after(PATIENCE_SECONDS):
        while not calls:
            await worker.advance(0.5)
    assert calls == [("0", {"n": 0})]
