"""The harness that authors test their agents with, on either backend."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from typing_extensions import get_protocol_members

from aviso_workers import (
    Ack,
    App,
    Batch,
    Batching,
    Notification,
    Notify,
    Reject,
    Retry,
    RetryPolicy,
    Router,
    Stream,
    Tick,
    config,
)
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin, ConsumerInfo, Outgoing
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import (
    AvisoWorkersError,
    BackendError,
    ConfigError,
    DeclarationError,
    OutcomeUnknownError,
    UnavailableError,
)
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from aviso_workers.testing import READING, Harness, harness
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "tested")

pytestmark = pytest.mark.anyio

OWN_VERBS = {"create_stream", "key_value", "publish", "publish_many", "publish_together"}
"""The verbs that the harness takes part in, each of which is refused when it is called."""
MESSAGE = Message(subject="mars.od.1", data=b"")
CONFIG = """
notification_backend:
  kind: jetstream
  jetstream: {nats_url: "nats://127.0.0.1:1", max_reconnect_attempts: 1, reconnect_delay_ms: 50}
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, step]}
    identifier:
      class: {type: StringHandler, required: true}
      step: {type: IntHandler, required: true}
    storage_policy: {allow_duplicates: true}
  derived:
    topic: {base: derived, key_order: [class, step]}
    identifier:
      class: {type: StringHandler, required: true}
      step: {type: IntHandler, required: true}
    storage_policy: {allow_duplicates: true}
"""
HOUR = datetime(2026, 1, 1, tzinfo=UTC)
SOON = RetryPolicy(first=0.1, factor=2, attempts=3, jitter=0)


class Field(msgspec.Struct, frozen=True):
    location: str


@pytest.fixture(params=["in_memory", "jetstream"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """The URL of a server of the test's own, or None."""
    if request.param == "in_memory":
        yield None
        return
    with NatsServer.start(store_dir=tmp_path / "jetstream") as running:
        yield running.url


@pytest.fixture
def app(tmp_path: Path) -> App:
    path = tmp_path / "aviso.yaml"
    path.write_text(CONFIG)
    return App("tested", config=path)


@pytest.fixture
def told() -> list[str]:
    """What the agents saw, in order."""
    return []


@pytest.fixture
def seen() -> list[int]:
    """The steps that the agents were given, in order."""
    return []


def step_of(notification: Notification[Any]) -> int:
    return int(notification.identifier["step"])


async def notify(t: Harness, *steps: int, payload: Any = None, kind: str = "od") -> None:
    for step in steps:
        await t.notify("mars", {"class": kind, "step": step}, payload)


class TestCallForms:
    """Whatever form a function has, what it was given is settled when `settle` returns."""

    def coroutine(self, app: App, seen: list[int]) -> None:
        @app.agent("mars", concurrency=3)
        async def agent(notification: Notification[Field]) -> None:
            await anyio.sleep(0.01)  # as code does that asks a database: real time, for which `settle` waits
            seen.append(step_of(notification))

    def thread(self, app: App, seen: list[int]) -> None:
        loop = threading.get_ident()

        @app.agent("mars", concurrency=3)
        def agent(notification: Notification[Field]) -> None:
            assert threading.get_ident() != loop
            time.sleep(0.01)
            seen.append(step_of(notification))

    def batch(self, app: App, seen: list[int]) -> None:
        @app.agent("mars", batch=Batching(size=3, within=0.2))
        async def agent(batch: Batch[Field]) -> None:
            assert len(batch) <= 3
            seen.extend(map(step_of, batch))

    def batch_in_thread(self, app: App, seen: list[int]) -> None:
        @app.agent("mars", batch=Batching(size=3, within=0.2))
        def agent(batch: Batch[Field]) -> None:
            seen.extend(map(step_of, batch))

    def stream(self, app: App, seen: list[int]) -> None:
        @app.agent("mars")
        async def agent(stream: Stream[Field]) -> None:
            async for notification in stream:
                await anyio.sleep(0.01)
                seen.append(step_of(notification))

    def stream_of_lists(self, app: App, seen: list[int]) -> None:
        @app.agent("mars")
        async def agent(stream: Stream[Field]) -> None:
            async for taken in stream.take(3, 0.2):
                seen.extend(map(step_of, taken))

    @pytest.mark.parametrize("form", ["coroutine", "thread", "batch", "batch_in_thread", "stream", "stream_of_lists"])
    async def test_are_settled(self, app: App, server: str | None, seen: list[int], form: str) -> None:
        getattr(self, form)(app, seen)
        async with harness(app, server=server) as t:
            await notify(t, 1, 2, 3, 4, 5, payload={"location": "/here"})
            await notify(t, 6, payload={"size": 6})
            await t.settle()
            await notify(t, 7, payload={"location": "/here"})
            await t.settle()
        assert sorted(seen) == [1, 2, 3, 4, 5, 7]
        assert sorted(t.outcomes("agent")) == ["acked"] * 6 + ["dead_lettered"]
        (dead_letter,) = t.dead_letters
        assert (dead_letter.reason, dead_letter.original.subject) == ("undecodable", "mars.od.6")

    @pytest.mark.parametrize("form", ["coroutine", "thread", "batch", "stream"])
    async def test_fail_as_they_are_told_to(self, app: App, server: str | None, seen: list[int], form: str) -> None:
        getattr(self, form)(app, seen)
        (agent,) = app.agents
        agent.policy = msgspec.structs.replace(agent.policy, retry=SOON)
        async with harness(app, server=server) as t:
            t.fail("agent", ConnectionError("no database"), times=2)
            await notify(t, 1, payload={"location": "/here"})
            await t.settle()
        assert seen == [1]
        assert t.outcomes(agent) == ["retried", "retried", "acked"]
        assert [str(fact.error) for fact in t.settled(agent)] == ["no database", "no database", "None"]


class TestFailures:
    async def test_end_in_dead_letters(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            if step_of(notification) == 2:
                raise ValueError("an empty field")
            if step_of(notification) == 3:
                raise Reject("no such field")

        async with harness(app, server=server) as t:
            await notify(t, 1, 2, 3)
            await t.settle()
        assert sorted(t.outcomes(index)) == ["acked", "dead_lettered", "dead_lettered", "retried", "retried"]
        dead_letters = {
            dead_letter.original.subject: (dead_letter.reason, dead_letter.attempts, dead_letter.error)
            for dead_letter in t.dead_letters
        }
        assert dead_letters == {
            "mars.od.2": ("attempts_exhausted", 3, "ValueError: an empty field"),
            "mars.od.3": ("rejected", 1, "Reject: no such field"),
        }

    async def test_keep_the_order_of_a_lane_and_no_other(self, app: App, server: str | None, seen: list[int]) -> None:
        ended: list[tuple[str, int]] = []

        @app.agent("mars", order_by=("class",), concurrency=2, retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            if notification.identifier["class"] == "od" and step_of(notification) == 1:
                seen.append(1)
                if len(seen) < 3:
                    raise ConnectionError("no database")
            ended.append((notification.identifier["class"], step_of(notification)))

        async with harness(app, server=server) as t:
            await notify(t, 1, 2, 3, kind="od")
            await notify(t, 1, 2, 3, kind="rd")
            await t.settle()
        assert ended == [("rd", 1), ("rd", 2), ("rd", 3), ("od", 1), ("od", 2), ("od", 3)]

    async def test_are_what_a_classifier_makes_of_them(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=SOON)
        def index(notification: Notification[Any]) -> None:
            raise KeyError("known already")

        @index.on_error(KeyError)
        def all_the_same(error: Exception) -> Ack:
            return Ack()

        @index.on_error(ConnectionError)
        def at_once(error: Exception) -> Retry:
            return Retry(after=0)

        async with harness(app, server=server) as t:
            t.fail(index, ConnectionError())
            await notify(t, 1)
            await t.settle()
        assert t.outcomes(index) == ["retried", "acked"]


class TestPublishing:
    async def test_is_seen_in_canonical_form(self, app: App, server: str | None) -> None:
        @app.agent("mars")
        async def derive(notification: Notification[Any]) -> None:
            await app.notify("derived", {**notification.identifier, "step": f"0{step_of(notification)}"}, "derived")

        @app.agent("derived")
        async def follow(notification: Notification[str]) -> None: ...

        async with harness(app, server=server) as t:
            await notify(t, 1, payload="given")
            await t.settle()
            assert [one.payload async for one in app.replay("derived")] == ["derived"]
        assert [(one.event_type, one.identifier, one.payload) for one in t.published] == [
            ("mars", {"class": "od", "step": "1"}, "given"),
            ("derived", {"class": "od", "step": "1"}, "derived"),
        ]
        assert t.outcomes(follow) == ["acked"]


class TestWorkers:
    async def test_that_crash_give_nothing_back(self, app: App, server: str | None) -> None:
        began: list[float] = []
        running = anyio.Event()

        @app.agent("mars", ack_wait=1.0)
        async def index(notification: Notification[Any]) -> None:
            began.append(t.clock.monotonic())
            if notification.num_delivered == 1:
                running.set()
                await anyio.sleep_forever()

        async with harness(app, server=server) as t:
            await notify(t, 1)
            await running.wait()
            await t.crash()
            await t.settle()
        assert t.outcomes(index) == ["acked"]  # what the dead one did is not known
        assert [fact.num_delivered for fact in t.settled(index)] == [2]
        assert began[1] - began[0] >= 0.9, "it came back before ack_wait was over"

    async def test_that_crash_write_nothing_more_by_any_verb(self, app: App, server: str | None) -> None:
        """A verb of the backend that is new is refused until it is known as one that reads."""
        verbs = get_protocol_members(Admin)
        async with harness(app, server=server) as t:
            crashed = t._workers[0].session.backend
            bucket = await crashed.key_value("counts")
            await t.crash()
            assert verbs > READING
            assert [verb for verb in READING if not hasattr(crashed, verb)] == []
            for verb in [*verbs - READING - OWN_VERBS, "write_in_a_new_way"]:
                with pytest.raises(UnavailableError):
                    getattr(crashed, verb)
            for write in (
                lambda: crashed.publish(MESSAGE, message_id="", stream="MARS", timeout_seconds=1.0),
                lambda: crashed.publish_together([Outgoing(MESSAGE, "", "MARS")], timeout_seconds=1.0),
                lambda: crashed.create_stream(StreamSpec(name="MADE", subjects=("made.>",))),
                lambda: crashed.key_value("made"),
                lambda: bucket.put("key", b""),
            ):
                with pytest.raises(UnavailableError):
                    await write()
            (refused,) = await crashed.publish_many([Outgoing(MESSAGE, "", "MARS")], timeout_seconds=1.0)
            assert isinstance(refused, UnavailableError)

    async def test_that_stop_finish_what_they_have_begun(self, app: App, server: str | None, seen: list[int]) -> None:
        running = anyio.Event()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            running.set()
            await anyio.sleep(0.05)
            seen.append(step_of(notification))

        async with harness(app, server=server, workers=2) as t:
            await notify(t, 1)
            await running.wait()
            await t.stop()
            assert t.outcomes(index) == ["acked"]
            await notify(t, 2)
            with pytest.raises(AssertionError, match=r"index: MARS: 1 waiting.*no worker runs"):
                await t.settle(within_seconds=0.2)
            await t.start()
            await t.settle()
        assert seen == [1, 2]

    async def test_share_the_work(self, app: App, server: str | None) -> None:
        together = anyio.Event()
        running: set[int] = set()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            running.add(step_of(notification))
            if len(running) == 2:
                together.set()
            await together.wait()

        async with harness(app, server=server, workers=2) as t:
            await notify(t, 1, 2, 3, 4)  # one worker holds two of them at most
            await t.settle()
        assert t.outcomes(index) == ["acked"] * 4

    @pytest.mark.parametrize("cached", [False, True])
    async def test_know_nothing_of_each_others_turns(self, app: App, server: str | None, cached: bool) -> None:
        """To keep the last sequence, and leave older ones out, counts once in one worker and loses counts in two."""
        counted = app.table("counted", Counted, default=Counted(), cached=cached)

        @app.agent("mars")
        async def count(notification: Notification[Any]) -> None:
            def add(before: Counted) -> Counted:
                if notification.sequence <= before.last:
                    return before
                return Counted(count=before.count + 1, last=notification.sequence)

            await counted.update("all", add)

        counts = []
        for workers in (1, 2):
            async with harness(app, server=server, workers=workers) as t:
                await notify(t, *range(100))
                await t.settle()
                assert t.outcomes(count) == ["acked"] * 100
                counts.append((await counted.get("all")).count)
        assert counts[0] == 100
        assert counts[1] < 100

    async def test_lose_no_count_that_is_made_once_for_each_notification(self, app: App, server: str | None) -> None:
        counts = app.table("counts", int, default=0)

        @app.agent("mars", concurrency=4, ack_wait=2.0)
        async def count(notification: Notification[Any]) -> None:
            await counts.update("all", lambda count: count + 1, once=notification)

        async with harness(app, server=server, workers=2) as t:
            await notify(t, *range(50))
            await t.crash()
            await t.settle()
            assert await counts.get("all") == 50

    async def test_have_copies_of_tables_of_their_own(self, app: App, server: str | None) -> None:
        names = app.table("names", str, cached=True)
        copies: set[object] = set()
        both = anyio.Event()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            copies.add(names._bucket)
            if len(copies) == 2:
                both.set()
            await both.wait()
            await names.put("od", "operational")

        async with harness(app, server=server, workers=2) as t:
            await notify(t, 1, 2, 3)
            await t.settle()
            assert names._bucket not in copies
            assert await names.get("od") == "operational"


class Counted(msgspec.Struct, frozen=True):
    count: int = 0
    last: int = 0


class Client:
    def __init__(self, name: str) -> None:
        self.name = name


class TestResources:
    async def test_that_a_test_gives_are_in_place_of_those_that_are_opened(
        self, app: App, server: str | None, told: list[str]
    ) -> None:
        @app.resource
        async def client() -> AsyncIterator[Client]:
            raise AssertionError("it is opened")
            yield Client("real")

        @app.resource
        def label(client: Client) -> str:
            return f"label of {client.name}"

        @app.agent("mars")
        async def index(notification: Notification, client: Client, label: str) -> None:
            told.append(f"{client.name}, {label}")

        async with harness(app, server=server, resources={Client: Client("fake")}) as t:
            await notify(t, 1)
            await t.settle()
        assert told == ["fake, label of fake"]

    async def test_of_a_type_that_no_resource_gives_are_refused(self, app: App) -> None:
        with pytest.raises(DeclarationError, match="harness: no resource of app 'tested' gives Client"):
            harness(app, resources={Client: Client("fake")})


async def test_an_agent_of_a_router_with_a_prefix_is_found_by_itself(app: App, server: str | None) -> None:
    router = Router("theirs")

    @router.agent("mars")
    async def index(notification: Notification) -> None: ...

    app.include(router, prefix="our")
    async with harness(app, server=server) as t:
        await notify(t, 1)
        await t.settle()
        assert t.outcomes(index) == t.outcomes("our_index") == ["acked"]


async def test_agents_and_timers_of_a_router_with_a_prefix_are_told_from_others_of_the_same_function(app: App) -> None:
    router = Router("theirs")

    async def index(notification: Notification) -> None: ...

    async def look() -> None: ...

    agents = [router.agent(event_type, name=f"of_{event_type}")(index) for event_type in ("mars", "derived")]
    timers = [router.every(interval, name=f"every_{interval}", singleton=False)(look) for interval in ("5m", "10m")]
    app.include(router, prefix="our")
    async with harness(app) as t:
        await notify(t, 1)
        await t.advance(600)
        assert [t.outcomes(agent) for agent in agents] == [["acked"], []]
        assert [len(t.ticks(timer)) for timer in timers] == [2, 1]
        with pytest.raises(
            ValueError, match="no agent 'index' in app 'tested', which has: our_of_mars, our_of_derived"
        ):
            t.outcomes("index")
        with pytest.raises(ValueError, match="no timer 'look' in app 'tested', which has: our_every_5m, our_every_10m"):
            t.ticks("look")
        with pytest.raises(ValueError, match="no agent of a Window 'our_of_mars' in app 'tested', which has: none"):
            t.windows("our_of_mars")


async def test_an_agent_of_a_router_that_is_included_twice_is_named_with_its_prefix(app: App) -> None:
    router = Router("theirs")

    @router.agent("mars")
    async def index(notification: Notification) -> None: ...

    app.include(router, prefix="our")
    app.include(router, prefix="your")
    async with harness(app) as t:
        await notify(t, 1)
        await t.settle()
        assert t.outcomes("our_index") == t.outcomes("your_index") == ["acked"]
        with pytest.raises(ValueError, match="no agent 'index' in app 'tested', which has: our_index, your_index"):
            t.outcomes(index)


class TestUnsettled:
    async def test_is_told_with_its_reason(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=RetryPolicy(first=3000))
        async def index(notification: Notification[Any]) -> None:
            raise RuntimeError("no table")

        async with harness(app, server=server) as t:
            await notify(t, 1)
            with pytest.raises(AssertionError) as raised:
                await t.settle(within_seconds=1)
        assert str(raised.value) == (
            "not settled within 1 s:\n  index: MARS: 0 waiting, 1 delivered and not settled; "
            "the last one was retried (RuntimeError: no table)"
        )

    @pytest.mark.slow
    async def test_a_delayed_notification_is_told_with_its_reason(self, app: App, server: str | None) -> None:
        @app.agent("mars")
        async def remind(notification: Notification[Any]) -> Notify:
            return Notify("mars", {**notification.identifier, "step": 2}, ttl=60, due=0.1)

        async with harness(app, server=server) as t:
            await notify(t, 1)
            await t.advance(2)
            with pytest.raises(AssertionError) as raised:
                await t.settle(within_seconds=3)
        assert (
            "\n  delayed notifications: aviso_workers_schedule__MARS: 0 waiting, 1 delivered and not settled; one of "
            "stream MARS cannot be stored yet: publish mars.od.2: "
            "stream MARS does not take it, switch on its allow_msg_ttl"
        ) in str(raised.value)

    async def test_an_agent_that_was_declared_too_late_is_told(self, app: App) -> None:
        async with harness(app) as t:

            @app.agent("mars")
            async def index(notification: Notification[Any]) -> None: ...

            await notify(t, 1)
            with pytest.raises(AssertionError, match="declared after they had started: declare it before"):
                await t.settle(within_seconds=1)

    async def test_no_time_at_all_is_a_look(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            raise ConnectionError("no database")

        async with harness(app, server=server) as t:
            await notify(t, 1)
            with pytest.raises(AssertionError, match="not settled within 0 s"):
                await t.settle(within_seconds=0)

    async def test_an_agent_that_is_not_there_is_named_with_those_that_are(self, app: App) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app) as t:
            with pytest.raises(ValueError, match="no agent 'indx' in app 'tested', which has: index"):
                t.outcomes("indx")


class TestErrors:
    async def test_of_the_test_leave_as_they_are(self, app: App, server: str | None) -> None:
        with pytest.raises(KeyError, match="mine"):
            async with harness(app, server=server):
                raise KeyError("mine")

    async def test_of_the_declarations_are_told_before_anything_runs(self, app: App, server: str | None) -> None:
        @app.agent("marsh")
        async def index(notification: Notification[Any]) -> None: ...

        with pytest.raises(ConfigError, match=r"agent 'index': .*'marsh'"):
            async with harness(app, server=server):
                pytest.fail("it began")

    async def test_that_end_a_worker_end_the_test(self, app: App, nats_server: NatsServer) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async def lose_the_server() -> None:
            async with harness(app, server=nats_server.url):
                nats_server.stop()
                await anyio.sleep_forever()

        with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(BackendError):
            await lose_the_server()

    async def test_leave_the_app_as_it_was(self, app: App, server: str | None) -> None:
        before = app.config
        async with harness(app, server=server):
            assert app.config is not before
        assert app.config is before
        async with harness(app, server=server):
            pass  # once more


class TestInVirtualTime:
    @pytest.mark.slow
    async def test_retries_wait_as_the_policy_says(self, app: App) -> None:
        tried: list[float] = []

        @app.agent("mars", retry=RetryPolicy(first=60, factor=10, max=3600, attempts=4, jitter=0))
        async def index(notification: Notification[Any]) -> None:
            tried.append(t.clock.monotonic())
            raise RuntimeError("no table")

        async with harness(app) as t:
            await notify(t, 1)
            await t.settle(within_seconds=5000)
        assert tried == [tried[0] + seconds for seconds in (0, 60, 660, 4260)]

    async def test_it_stands_still_where_no_code_runs(self, app: App) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app) as t:
            await notify(t, 1)
            await t.settle()
            await anyio.sleep(0.02)
            assert t.clock.monotonic() == 0

    @pytest.mark.parametrize("in_thread", [False, True])
    async def test_code_that_takes_longer_than_its_timeout_has_failed(
        self, app: App, server: str | None, in_thread: bool
    ) -> None:
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep(0.5)

        def index_in_thread(notification: Notification[Any]) -> None:
            time.sleep(0.5)

        agent: Any = app.agent("mars", timeout=0.05, retry=RetryPolicy(attempts=1))(
            index_in_thread if in_thread else index
        )
        async with harness(app, server=server) as t:
            await notify(t, 1)
            await t.settle()
        assert t.outcomes(agent) == ["dead_lettered"]
        assert [each.error for each in t.dead_letters] == ["TimeoutError: not done within 0.05 s"]

    async def test_so_it_has_while_the_test_waits_for_something_else(self, app: App, server: str | None) -> None:
        ended = anyio.Event()

        @app.agent("mars", timeout=0.05, retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        async with harness(app, server=server) as t:
            await notify(t, 1)
            with anyio.fail_after(PATIENCE_SECONDS):
                await ended.wait()
            await t.settle()
            assert t.outcomes(index) == ["dead_lettered"]

    async def test_code_that_is_done_before_its_timeout_has_not_failed(self, app: App, server: str | None) -> None:
        @app.agent("mars", timeout=LONG_SECONDS, retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None:
            await anyio.sleep(0.05)

        async with harness(app, server=server) as t:
            await notify(t, 1, 2)
            await t.settle()
        assert t.outcomes(index) == ["acked", "acked"]

    async def test_what_is_around_code_has_twice_its_timeout(self, app: App, server: str | None) -> None:
        @app.resource(scope="call")
        async def client() -> AsyncIterator[Client]:
            await anyio.sleep(LONG_SECONDS)
            yield Client("")

        @app.agent("mars", timeout=0.05, retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any], client: Client) -> None: ...

        async with harness(app, server=server) as t:
            await notify(t, 1)
            await t.settle()
        assert [each.error for each in t.dead_letters] == ["TimeoutError: not done within 0.1 s"]

    async def test_it_begins_now_so_that_what_code_computes_from_now_is_due_in_time(self, app: App) -> None:
        @app.agent("mars")
        async def remind(notification: Notification[Any]) -> Notify:
            return Notify("derived", notification.identifier, due=datetime.now(UTC) + timedelta(minutes=5))

        @app.agent("derived")
        async def reminded(notification: Notification[Any]) -> None: ...

        async with harness(app) as t:
            await notify(t, 1)
            await t.settle()
            await t.advance(299)
            await t.settle()
            assert t.outcomes(reminded) == []
            await t.advance(2)
            await t.settle()
            assert t.outcomes(reminded) == ["acked"]

    async def test_it_begins_where_the_test_says(self, app: App, seen: list[int]) -> None:
        start = datetime(2026, 3, 29, 1, 59, 59, 500_000, tzinfo=timezone(timedelta(hours=1)))

        @app.cron("0 * * * *", singleton=False)
        async def look(tick: Tick) -> None: ...

        async with harness(app, start=start) as t:
            assert datetime.fromtimestamp(t.clock.time_ns() / 1e9, UTC) == start
            receipt = await t.notify("mars", {"class": "od", "step": 1})
            (stored,) = [each async for each in app.replay("mars")]
            assert (stored.sequence, stored.time) == (receipt.sequence, start)
            await t.advance(1)
            assert [fact.time for fact in t.ticks(look)] == [datetime(2026, 3, 29, 1, tzinfo=UTC)]

    async def test_a_start_needs_a_time_zone(self, app: App) -> None:
        with pytest.raises(DeclarationError, match="has no time zone: add one, as in tzinfo=UTC"):
            harness(app, start=datetime(2026, 1, 1))

    async def test_passes_while_the_test_itself_waits_for_it(self, app: App) -> None:
        async with harness(app) as t:
            with anyio.fail_after(PATIENCE_SECONDS):
                await t.clock.sleep(LONG_SECONDS)
            assert t.clock.monotonic() >= LONG_SECONDS
            t.disconnect()
            with anyio.fail_after(PATIENCE_SECONDS), pytest.raises(UnavailableError):
                await notify(t, 1)

    async def test_passes_as_far_as_the_test_moves_it_although_a_watch_waits_for_it_too(self, app: App) -> None:
        @app.every("1s", singleton=False)
        async def look() -> None: ...

        shown = anyio.Event()

        async def watch() -> None:
            async for _ in app.watch("mars"):  # whose stream does not exist, so that it asks again each second
                shown.set()

        async with harness(app) as t, anyio.create_task_group() as watching:
            watching.start_soon(watch)
            await t.advance(0)
            began = t.clock.monotonic()
            await t.advance(60)
            assert t.clock.monotonic() - began == pytest.approx(60, abs=0.001)
            await notify(t, 1)
            with anyio.fail_after(PATIENCE_SECONDS):
                await shown.wait()
            watching.cancel_scope.cancel()

    async def test_a_plain_function_that_takes_it_runs_on_and_is_not_called_again_meanwhile(self, app: App) -> None:
        begun: list[float] = []

        @app.agent("mars", timeout=10, concurrency=3, retry=RetryPolicy(first=5, attempts=2, jitter=0))
        def index(notification: Notification[Any]) -> None:
            begun.append(t.clock.monotonic())
            anyio.from_thread.run(t.clock.sleep, 60)

        async with harness(app, workers=2) as t:
            await notify(t, 1)
            await t.settle()
        assert [time - begun[0] for time in begun] == [0, pytest.approx(65, abs=1)]  # with what it takes really
        assert t.outcomes(index) == ["retried", "dead_lettered"]
        assert isinstance(t.settled(index)[0].error, TimeoutError)

    async def test_what_is_around_a_plain_function_stays_open_until_that_has_ended(self, app: App) -> None:
        ended: list[tuple[str, float]] = []

        @app.around
        async def measure(notification: Notification[Any]) -> AsyncIterator[None]:
            try:
                yield
            except TimeoutError:
                ended.append(("around", t.clock.monotonic()))
                raise

        @app.agent("mars", timeout=10, retry=RetryPolicy(attempts=1))
        def index(notification: Notification[Any]) -> None:
            anyio.from_thread.run(t.clock.sleep, 60)
            ended.append(("function", t.clock.monotonic()))

        async with harness(app) as t:
            await notify(t, 1)
            await t.settle()
        assert [name for name, _ in ended] == ["function", "around"]
        assert ended[0][1] == pytest.approx(ended[1][1], abs=1)
        assert t.outcomes(index) == ["dead_lettered"]

    @pytest.mark.slow
    async def test_the_backend_is_not_asked_while_a_worker_holds_what_it_was_given(
        self, app: App, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A heartbeat falls due hundreds of times meanwhile, and the harness would ask after each."""

        @app.agent("mars")
        async def agent(notification: Notification[Any]) -> None:
            await app.session.backend.clock.sleep(3000)

        asked: list[str] = []
        """By the harness: workers do it for their records, with connections of their own."""
        consumer_info = InMemoryBackend.consumer_info

        async def noted(backend: InMemoryBackend, stream: str, consumer: str) -> ConsumerInfo:
            if backend is t._watch:
                asked.append(consumer)
            return await consumer_info(backend, stream, consumer)

        async with harness(app) as t:
            await notify(t, 1)
            monkeypatch.setattr(InMemoryBackend, "consumer_info", noted)
            await t.settle()
            assert t.outcomes(agent) == ["acked"]
        assert len(asked) < 20

    async def test_a_timeout_is_over_when_the_test_lets_time_pass(self, app: App) -> None:
        running = anyio.Event()

        @app.agent("mars", timeout=60, retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None:
            running.set()
            await anyio.sleep_forever()

        async with harness(app) as t:
            await notify(t, 1)
            await running.wait()
            await t.advance(59)
            assert t.outcomes(index) == []
            await t.advance(2)
            await t.settle()
        assert [dead_letter.error for dead_letter in t.dead_letters] == ["TimeoutError: not done within 60 s"]

    async def test_a_stop_takes_as_much_as_it_needs(self, app: App, seen: list[int]) -> None:
        @app.agent("mars", concurrency=2)
        async def index(notification: Notification[Any]) -> None:
            await t.clock.sleep(10 * step_of(notification))
            seen.append(step_of(notification))

        async with harness(app) as t:
            await notify(t, 1, 2)
            await t.advance(0)  # both are taken
            with anyio.fail_after(PATIENCE_SECONDS):
                await t.stop()
        assert seen == [1, 2]

    async def test_a_lost_connection_is_found_again(self, app: App) -> None:
        lost = anyio.Event()

        @app.agent("mars")
        async def derive(notification: Notification[Any]) -> None:
            if notification.num_delivered == 1:
                t.disconnect()
                lost.set()
            await app.notify("derived", notification.identifier)

        @app.task
        async def reconnect() -> None:
            await lost.wait()
            await t.clock.sleep(5)
            t.reconnect()

        async with harness(app) as t:
            await notify(t, 1)
            await t.settle()
        assert [one.event_type for one in t.published] == ["mars", "derived"]

    async def test_a_worker_without_connection_loses_nothing(self, app: App, seen: list[int]) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            seen.append(step_of(notification))

        async with harness(app) as t:
            t.disconnect(0)
            await notify(t, 1)
            with pytest.raises(AssertionError, match=r"index: MARS: 1 waiting.*; the connection was taken away"):
                await t.settle(within_seconds=60)
            assert seen == []
            t.reconnect()
            await t.settle()
            assert seen == [1]
            t.disconnect()
            with pytest.raises(UnavailableError):
                await notify_in_time(t)

    async def test_the_connection_to_a_server_stays(self, app: App, nats_server: NatsServer) -> None:
        async with harness(app, server=nats_server.url) as t:
            with pytest.raises(AvisoWorkersError, match="stop the server instead"):
                t.disconnect()


async def notify_in_time(t: Harness) -> None:
    """A publish that fails when its deadline is over, which the test must let pass."""
    failure: list[Exception] = []

    async def try_to() -> None:
        try:
            await notify(t, 1)
        except UnavailableError as error:
            failure.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(try_to)
        await t.advance(120)
    raise failure[0]


class TestOnAServer:
    @pytest.mark.slow
    async def test_nothing_stays(self, app: App, nats_server: NatsServer, seen: list[int]) -> None:
        @app.agent("mars", retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            seen.append(step_of(notification))

        for step in range(5):
            async with harness(app, server=nats_server.url) as t:
                t.fail(index, ConnectionError())
                await notify(t, step)
                await t.settle()
                assert t.outcomes(index) == ["retried", "acked"]
        assert seen == [0, 1, 2, 3, 4]
        async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_server.url))) as backend:
            assert await backend.stream_names() == []

    async def test_what_others_make_meanwhile_stays(self, app: App, nats_server: NatsServer) -> None:
        async with JetStreamBackend(config.JetStream(nats_url=config.ServerUrls(nats_server.url))) as other:
            async with harness(app, server=nats_server.url) as t:
                await notify(t, 1)
                await app.key_value("mine")
                await other.create_stream(StreamSpec(name="THEIRS", subjects=("theirs.>",)))
                assert set(await other.stream_names()) >= {"KV_mine", "MARS", "THEIRS"}
            assert await other.stream_names() == ["THEIRS"]

    async def test_one_that_has_the_apps_streams_is_refused(self, app: App, nats_server: NatsServer) -> None:
        async with harness(app, server=nats_server.url) as t:
            await notify(t, 1)
            with pytest.raises(AvisoWorkersError, match=r"has the streams MARS.* already: a test makes and removes"):
                async with harness(App("other", config=app.config), server=nats_server.url):
                    pytest.fail("it began")
            assert [one.topic async for one in app.replay("mars")] == ["mars.od.1"]


class TestTimersAndTables:
    @pytest.mark.slow
    async def test_a_timer_runs_when_its_time_comes(self, app: App) -> None:
        looks = app.table("looks", int, default=0)

        @app.every("5m", singleton=True)
        async def look(tick: Tick) -> None:
            await looks.update("all", lambda count: count + 1)
            await app.notify("mars", {"class": "od", "step": tick.time.minute})

        async with harness(app, workers=3, start=HOUR) as t:
            await t.advance(15 * 60)
            assert [fact.time.minute for fact in t.ticks(look)] == [5, 10, 15]
            assert [fact.error for fact in t.ticks(look)] == [None] * 3
            assert [int(each.identifier["step"]) for each in t.published] == [5, 10, 15]
            assert await looks.get("all") == 3

    async def test_a_leader_that_crashes_is_followed(self, app: App) -> None:
        @app.every("30s", singleton=True)
        async def look() -> None: ...

        async with harness(app, workers=2, start=HOUR) as t:
            await t.advance(40)
            await t.crash(0)
            await t.crash(0)
            await t.advance(60)
            assert [fact.time.timestamp() % 3600 for fact in t.ticks(look)] == [30, 60, 90]

    async def test_timers_do_not_keep_agents_from_settling(self, app: App, server: str | None, seen: list[int]) -> None:
        counts = app.table("counts", int, default=0, cached=True)
        sizes = app.counter("sizes")

        @app.every("1s", singleton=True)
        async def look() -> None: ...

        @app.agent("mars", concurrency=4, retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            await counts.update("all", lambda count: count + 1)
            await sizes.add("all", 2, message_id=notification.id)

        async with harness(app, server=server, workers=2) as t:
            await notify(t, *range(20))
            await t.settle()
            await t.advance(1.5)
            assert await counts.get("all") == 20
            assert await sizes.get("all") == 40
            assert t.ticks(look)

    async def test_a_value_is_forgotten_after_its_ttl(self, app: App, server: str | None) -> None:
        names = app.table("names", str, cached=True)
        async with harness(app, server=server) as t:
            await names.put("od", "operational", ttl=1)
            assert await names.get("od") == "operational"
            await t.advance(2.5)
            assert await names.get("od") is None
            assert await names.items() == {}


async def test_a_dead_letter_whose_first_acknowledgement_was_lost_is_listed_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = InMemoryBackend.publish
    lost: list[str] = []

    async def lose_the_first(self: InMemoryBackend, message: Any, **stated: Any) -> Any:
        ack = await publish(self, message, **stated)
        if ack.stream == "aviso_workers_dead_letters__tested" and not lost:
            lost.append(ack.stream)
            raise OutcomeUnknownError("no acknowledgement came")
        return ack

    @app.agent("mars", retry=SOON)
    async def index(notification: Notification[Any]) -> None:
        raise Reject("no such field")

    monkeypatch.setattr(InMemoryBackend, "publish", lose_the_first)
    async with harness(app) as t:
        await app.notify("mars", {"class": "od", "step": 1})
        await t.settle()

        assert lost == ["aviso_workers_dead_letters__tested"]
        assert [dead_letter.reason for dead_letter in t.dead_letters] == ["rejected"]


class TestStarting:
    async def test_agents_read_when_the_block_begins(self, app: App, server: str | None) -> None:
        @app.agent("mars", start="new")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server, workers=2) as t:
            await notify(t, 1)
            await t.settle()
            assert t.outcomes(index) == ["acked"]

    async def test_a_worker_that_does_not_exist_is_named(self, app: App) -> None:
        async with harness(app, workers=2) as t:
            with pytest.raises(ValueError, match="there is no worker 2: 2 run, counted from 0"):
                await t.crash(2)
            with pytest.raises(ValueError, match="there is no worker -3: 2 run"):
                t.disconnect(-3)


class TestDeadLetters:
    async def test_are_handed_back_and_tried_anew(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            t.fail(index, RuntimeError("no table"), times=2)
            await notify(t, 1, 2)
            await t.settle()
            first, second = t.dead_letters
            assert await t.retry_dead_letters() == [first, second]
            assert t.dead_letters == []
            await t.settle()
            assert t.outcomes(index) == ["dead_lettered", "dead_lettered", "acked", "acked"]
            assert await stored(t, DEAD_LETTERS) == 0

    async def test_those_that_the_test_chooses_are_handed_back(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            t.fail(index, RuntimeError("no table"), times=2)
            await notify(t, 1, 2)
            await t.settle()
            first, second = t.dead_letters
            await t.retry_dead_letters(second)
            await t.settle()
            assert t.dead_letters == [first]
            assert t.settled(index)[-1].outcome == "acked"
            assert await stored(t, DEAD_LETTERS) == 1
            with pytest.raises(ValueError, match="is not the sequence of one of the dead letters"):
                await t.retry_dead_letters(second)

    async def test_fail_again_where_the_cause_is_there_still(self, app: App, server: str | None) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            raise Reject("too old")

        async with harness(app, server=server) as t:
            await notify(t, 1)
            await t.settle()
            (before,) = t.dead_letters
            await t.retry_dead_letters()
            await t.settle()
            (after,) = t.dead_letters
            assert (after.original.data, after.sequence > before.sequence) == (before.original.data, True)

    async def test_none_are_handed_back_where_there_are_none(self, app: App, server: str | None) -> None:
        async with harness(app, server=server) as t:
            assert await t.retry_dead_letters() == []


class TestPaused:
    @pytest.mark.slow
    async def test_an_agent_is_given_nothing_until_it_is_resumed(self, app: App, server: str | None) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        @app.agent("mars")
        async def other(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            await t.pause(index)
            await notify(t, 1)
            await t.settle()
            assert (t.outcomes(index), t.outcomes(other)) == ([], ["acked"])
            await t.resume("index")
            await t.settle()
            assert t.outcomes(index) == ["acked"]

    @pytest.mark.slow
    async def test_neither_are_its_retries_nor_after_a_deploy(self, app: App, server: str | None) -> None:
        @app.agent("mars", retry=RetryPolicy(attempts=1))
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            t.fail(index, RuntimeError("no table"))
            await notify(t, 1)
            await t.settle()
            await t.pause(index)
            await t.retry_dead_letters()
            await t.stop()
            await t.start()
            await t.settle()
            assert t.outcomes(index) == ["dead_lettered"]
            await t.resume(index)
            await t.settle()
            assert t.outcomes(index) == ["dead_lettered", "acked"]

    async def test_for_some_seconds_it_goes_on_by_itself(self, app: App, server: str | None) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            began = t.clock.monotonic()
            await t.pause(index, seconds=0.5)
            await notify(t, 1)
            await t.settle()
            assert t.outcomes(index) == ["acked"]
            assert round(t.clock.monotonic() - began, 3) >= 0.5

    async def test_is_none_that_does_not_exist(self, app: App) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app) as t:
            with pytest.raises(ValueError, match="no agent 'indices' in app 'tested', which has: index"):
                await t.pause("indices")

    async def test_is_none_that_was_never_at_work(self, app: App) -> None:
        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, workers=0) as t:
            with pytest.raises(AssertionError, match="agent index was never at work"):
                await t.pause(index)


class TestMistakesOfATest:
    """What a test gives the harness by mistake is refused by name."""

    @pytest.mark.parametrize("time", [-1, "soon", "10 minutes", None, True, timedelta(seconds=-5)])
    async def test_a_time(self, app: App, time: Any) -> None:
        index = TestVersions.agent_of(app, [], says="index")
        async with harness(app) as t:
            with pytest.raises(ValueError, match=r"^advance: "):
                await t.advance(time)
            if time is not None:
                with pytest.raises(ValueError, match=r"^pause: "):
                    await t.pause(index, seconds=time)
            with pytest.raises(ValueError, match=r"^pause takes a time above 0 seconds"):
                await t.pause(index, seconds=0)

    @pytest.mark.parametrize("time", [60, "1m", timedelta(minutes=1)])
    async def test_a_time_in_any_spelling_is_none(self, app: App, time: Any) -> None:
        async with harness(app) as t:
            began = t.clock.monotonic()
            await t.advance(time)
            assert t.clock.monotonic() - began == pytest.approx(60, abs=5)

    async def test_an_error_that_is_not_an_exception(self, app: App) -> None:
        index = TestVersions.agent_of(app, [], says="index")
        async with harness(app) as t:
            t.fail(index, ConnectionError("away"))
            with pytest.raises(TypeError, match="fail takes an exception such as ConnectionError"):
                t.fail(index, "away")  # type: ignore[arg-type]

    async def test_a_version_of_another_app(self, app: App) -> None:
        async with harness(app) as t:
            with pytest.raises(
                DeclarationError, match=r"another version of the app 'tested', .* found the app 'other'"
            ):
                await t.deploy(App("other", config=app.config))


class TestVersions:
    """A second version of the code, after the first or beside it."""

    @pytest.fixture
    def new(self, app: App) -> App:
        return App("tested", config=app.config)

    @staticmethod
    def agent_of(app: App, told: list[str], *, says: str) -> Any:
        @app.agent("mars", retry=SOON)
        async def index(notification: Notification[Any]) -> None:
            told.append(f"{says} {step_of(notification)}")

        return index

    async def test_the_new_one_goes_on_where_the_old_one_has_stopped(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        old_index, new_index = (self.agent_of(each, told, says=name) for each, name in ((app, "old"), (new, "new")))
        async with harness(app, server=server, workers=2) as t:
            await notify(t, 1)
            await t.settle()
            await t.stop()
            await notify(t, 2)
            await t.deploy(new)
            assert t.app is new
            await t.settle()
            await notify(t, 3)
            await t.settle()
            assert sorted(told) == ["new 2", "new 3", "old 1"]
            assert t.outcomes(old_index) == t.outcomes(new_index) == ["acked"] * 3

    async def test_what_the_old_one_has_begun_is_finished_first(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        begun = anyio.Event()

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            begun.set()
            await anyio.sleep(0.1)
            told.append("old")

        self.agent_of(new, told, says="new")
        async with harness(app, server=server) as t:
            await notify(t, 1)
            await begun.wait()
            await t.deploy(new)
            assert told == ["old"]
            await t.settle()
            assert (t.outcomes(index), told) == (["acked"], ["old"])

    async def test_both_work_side_by_side_until_the_old_one_is_replaced(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        for each, name in ((app, "old"), (new, "new")):
            self.agent_of(each, told, says=name)
        async with harness(app, server=server) as t:
            await t.deploy(new, beside=True)
            for step in range(200):
                await notify(t, step)
            await t.settle()
            assert {text.partition(" ")[0] for text in told} == {"old", "new"}
            assert sorted(int(text.partition(" ")[2]) for text in told) == list(range(200))
            told.clear()
            await t.deploy(new)
            await notify(t, *range(20))
            await t.settle()
            assert sorted(told) == sorted(f"new {step}" for step in range(20))

    async def test_the_old_one_comes_back(self, app: App, new: App, server: str | None, told: list[str]) -> None:
        for each, name in ((app, "old"), (new, "new")):
            self.agent_of(each, told, says=name)
        async with harness(app, server=server) as t:
            await t.deploy(new)
            await t.deploy(app)
            await notify(t, 1)
            await t.settle()
            assert told == ["old 1"]

    async def test_a_crash_and_a_start_bring_the_version_back(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        for each, name in ((app, "old"), (new, "new")):
            self.agent_of(each, told, says=name)
        async with harness(app, server=server) as t:
            await t.deploy(new, beside=True)
            await t.crash(0)  # the old one
            await t.stop()
            await t.start()
            await notify(t, 1)
            await t.settle()
            assert told == ["new 1"]

    async def test_an_agent_that_the_new_one_does_not_have_is_not_waited_for(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        self.agent_of(app, told, says="old")

        @new.agent("mars")
        async def count(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            await t.deploy(new)
            await notify(t, 1)
            await t.settle()
            assert (t.outcomes("index"), t.outcomes(count)) == ([], ["acked"])

    async def test_the_new_one_brings_event_types_tables_and_resources(
        self, app: App, server: str | None, told: list[str]
    ) -> None:
        self.agent_of(app, told, says="old")
        new = App("tested", config=app.config)
        new.event_type("alert", key=["id"], storage_policy={"allow_duplicates": True})
        alerts = new.table("alerts", int, default=0)

        @new.resource
        async def client() -> AsyncIterator[Client]:
            yield Client("real")

        @new.agent("alert")
        async def alert(notification: Notification[Any], client: Client) -> None:
            await alerts.update(client.name, lambda count: count + 1)

        async with harness(app, server=server) as t:
            await t.deploy(new)
            await t.notify("alert", {"id": 1})
            await t.settle()
            assert t.outcomes(alert) == ["acked"]
            assert await alerts.get("real") == 1
            assert [one.event_type for one in t.published] == ["alert"]

    async def test_both_may_include_the_same_router(self, app: App, new: App, server: str | None) -> None:
        router = Router("shared")
        counts = router.table("counts", int, default=0)

        @router.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            await counts.update("all", lambda count: count + 1)

        app.include(router)
        new.include(router)
        async with harness(app, server=server) as t:
            await notify(t, 1)
            await t.settle()
            await t.deploy(new, beside=True)
            assert await counts.get("all") == 1
            await notify(t, 2)
            await t.settle()
            assert await counts.get("all") == 2
            assert t.outcomes(index) == ["acked", "acked"]

    async def test_one_with_mistakes_is_refused_and_the_old_one_goes_on(
        self, app: App, new: App, server: str | None, told: list[str]
    ) -> None:
        self.agent_of(app, told, says="old")

        @new.agent("marsh")
        async def index(notification: Notification[Any]) -> None: ...

        async with harness(app, server=server) as t:
            with pytest.raises(ConfigError, match="'marsh'"):
                await t.deploy(new)
            await notify(t, 1)
            await t.settle()
            assert told == ["old 1"]

    async def test_is_left_as_it_was(self, app: App, new: App, server: str | None) -> None:
        before = new.config
        async with harness(app, server=server) as t:
            await t.deploy(new)
            assert new.config is not before
        assert new.config is before
        with pytest.raises(DeclarationError, match="is not connected"):
            new.session  # noqa: B018 - asking raises


async def stored(t: Harness, stream: str) -> int:
    return (await t.app.session.admin.stream_info(stream)).messages


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of which one has no default."""

    url: str


async def test_settings_that_the_test_gives_need_not_be_configured() -> None:
    app, stored = App("given", settings=Given), list[str]()
    app.event_type("thing", key=["n"])

    @app.resource
    def settings() -> Given:
        return app.settings()

    @app.agent("thing")
    async def store(notification: Notification[Any], settings: Given) -> None:
        stored.append(settings.url)

    async with harness(app, resources={Given: Given(url="fake")}) as t:
        await t.notify("thing", {"n": 1})
        await t.settle()
    assert stored == ["fake"]
    assert "url" in "".join(app.mistakes()), "and elsewhere it is missed"
