"""The spans of an app whose configuration asks for traces, and their context in the headers of what it publishes. On
either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from aviso_workers import (
    App,
    Batch,
    Batching,
    GivenUp,
    Notification,
    Notify,
    Reject,
    RetryPolicy,
    Slots,
    Stream,
    Window,
    Windowing,
)
from aviso_workers.backends import Message
from aviso_workers.errors import InvalidNotificationError
from aviso_workers.telemetry import metrics as telemetry_metrics
from aviso_workers.telemetry.metrics import Metrics
from aviso_workers.testing import harness
from tests import spans as spans_of_process
from tests.contract.settings import app_config, mars
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

VARIABLE = "AVISO_WORKERS_WORKERS__TRACES__"
PROMPT = RetryPolicy(first=0.05, factor=1, attempts=3, jitter=0)
EXPORTER = spans_of_process.exporter()
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SOUND = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(f"{VARIABLE}ENABLED", "true")
    EXPORTER.clear()
    yield
    EXPORTER.clear()


def spans(name: str = "") -> list[ReadableSpan]:
    """The spans that have ended, in that order; those of one name, if one is given."""
    return [span for span in EXPORTER.get_finished_spans() if name in ("", span.name)]


def one(name: str) -> ReadableSpan:
    [found] = spans(name)
    return found


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = present(span.context)
    return context.trace_id, context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def attributes(span: ReadableSpan, *names: str) -> list[Any]:
    return [present(span.attributes).get(name) for name in names]


def traces() -> set[int]:
    return {ids(span)[0] for span in spans()}


def carried(notification: Notification[Any]) -> tuple[int, int]:
    """The trace and the span that a notification carries."""
    _, trace_id, span_id, _ = notification.headers["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


def plain(a: object, **stated: Any) -> Notify:
    return Notify("plain", {"a": a, "b": "x"}, **stated)


async def test_what_an_agent_returns_goes_on_in_the_trace_of_what_it_handles(app: App, url: str | None) -> None:
    @app.agent("mars")
    async def first(notification: Notification[Any]) -> Notify:
        return plain("returned")

    @app.agent("plain")
    async def second(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        receipt = await app.notify("mars", mars(), {"secret": "payload"})
        await t.settle()
        [returned] = [found async for found in app.replay("plain")]
    names = ["publish mars", "process mars", "publish plain", "process plain"]
    publish, process, publish_returned, process_returned = map(one, names)
    assert len(spans()) == 4
    assert len(traces()) == 1
    assert parent(publish) is None
    assert [parent(span) for span in (process, publish_returned, process_returned)] == [
        ids(publish),
        ids(process),
        ids(publish_returned),
    ]
    assert (links(process), links(process_returned)) == ([ids(publish)], [ids(publish_returned)])
    assert carried(returned) == ids(publish_returned)
    assert [publish.kind, process.kind] == [trace.SpanKind.PRODUCER, trace.SpanKind.CONSUMER]
    shared = {
        "messaging.system": "nats",
        "messaging.destination.name": "mars",
        "messaging.destination.template": "mars.{class}.{expver}.{domain}.{date}.{time}.{stream}.{step}",
        "messaging.message.id": f"mars@{receipt.sequence}",
    }
    assert publish.attributes == {
        **shared,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
    }
    assert process.attributes == {
        **shared,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "first",
        "aviso.attempt": 1,
    }


async def test_each_attempt_has_a_span_and_what_it_published_again_keeps_its_id(app: App, url: str | None) -> None:
    @app.agent("mars", retry=PROMPT)
    async def failing(notification: Notification[Any]) -> AsyncIterator[Notify]:
        yield plain("yielded")
        if notification.attempt < 3:
            raise ValueError("a secret of the handler")

    async with harness(app, server=url) as t:
        await app.notify("mars", mars(), {})
        await t.settle()
        assert len([found async for found in app.replay("plain")]) == 1
    attempts = spans("process mars")
    assert [attributes(span, "aviso.attempt", "error.type") for span in attempts] == [
        [1, "ValueError"],
        [2, "ValueError"],
        [3, None],
    ]
    assert [span.status.status_code.name for span in attempts] == ["ERROR", "ERROR", "UNSET"]
    assert len(traces()) == 1
    assert "secret" not in "".join(span.to_json() for span in spans())


async def test_a_dead_letter_and_its_retry_keep_the_trace(app: App, url: str | None) -> None:
    broken = True

    @app.agent("mars")
    async def failing(notification: Notification[Any]) -> None:
        if broken:
            raise Reject("not today")

    @failing.on_dead_letter
    async def compensate(given_up: GivenUp[Any]) -> Notify:
        return plain("undone")

    async with harness(app, server=url) as t:
        await app.notify("mars", mars(), {})
        await t.settle()
        broken = False
        await t.retry_dead_letters()
        await t.settle()
        assert t.outcomes("failing") == ["dead_lettered", "acked"]
    reasons = [attributes(span, "error.type", "aviso.dead_letter.reason") for span in spans("process mars")]
    assert reasons == [["aviso_workers.declare.verdicts.Reject", None], [None, "rejected"], [None, None]]
    assert {parent(span) for span in spans("process mars")} == {ids(one("publish mars"))}
    assert parent(one("publish plain")) == ids(spans("process mars")[1])


async def test_an_output_that_is_not_valid_says_why(app: App, url: str | None) -> None:
    @app.agent("plain")
    async def index(notification: Notification[Any]) -> Notify:
        return plain(1, headers={"Nats-Reserved": "1"})

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"})
        await t.settle()
    failed, process = spans("publish plain")[-1], one("process plain")
    expected = ["aviso_workers.errors.InvalidNotificationError"]
    assert (attributes(failed, "error.type"), attributes(process, "error.type")) == (expected, expected)


async def test_what_is_delivered_later_keeps_the_trace(app: App, url: str | None) -> None:
    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"}, due=1)
        await t.advance(2)
        await t.settle()
        assert t.outcomes("index") == ["acked"]
    assert parent(one("process plain")) == ids(one("publish plain"))


async def test_a_batch_has_one_span_with_a_link_to_each_and_no_parent(app: App, url: str | None) -> None:
    @app.agent("plain", batch=Batching(size=3, within=60))
    async def index(batch: Batch[Any]) -> Notify:
        return Notify("mars", mars(), {})

    with trace.get_tracer("program").start_as_current_span("program"):
        async with harness(app, server=url) as t:
            for number in range(3):
                await app.notify("plain", {"a": number, "b": "x"})
            await t.settle()
    process, published = one("process plain"), spans("publish plain")
    assert sorted(links(process)) == sorted(map(ids, published))
    assert attributes(process, "messaging.batch.message_count", "messaging.message.id") == [3, None]
    assert parent(process) is None
    assert parent(one("publish mars")) == ids(process)


async def test_many_that_are_published_at_once_share_one_span(app: App, url: str | None) -> None:
    async with harness(app, server=url):
        assert await app.notify_many(plain(number) for number in range(3)) == 3
        await app.notify_together([plain("together"), plain("both")])
        await app.notify_many([plain("mixed"), Notify("mars", mars(), {})])
        with pytest.raises(InvalidNotificationError):
            await app.notify_many([plain("sent"), Notify("plain", {"a": 1})])
        stored = {found.identifier["a"]: carried(found) async for found in app.replay("plain")}
    many, together, mixed, failed = spans()
    assert [span.name for span in spans()] == ["publish plain", "publish plain", "publish", "publish plain"]
    count = "messaging.batch.message_count"
    assert attributes(many, count, "messaging.destination.name") == [3, "plain"]
    assert attributes(together, count, "messaging.destination.name") == [2, "plain"]
    assert attributes(mixed, count, "messaging.destination.name") == [2, None]
    assert attributes(failed, "error.type") == ["aviso_workers.errors.InvalidIdentifierError"]
    assert {stored[str(number)] for number in range(3)} == {ids(many)}
    assert {stored["together"], stored["both"]} == {ids(together)}
    assert stored["mixed"] == ids(mixed)


async def test_the_largest_notification_has_room_for_the_context(app: App, url: str | None) -> None:
    async with harness(app, server=url):
        state = trace.TraceState([(f"k{number}", "v" * 250) for number in range(30)])
        ids_given, sampled = (int(TRACE, 16), int(SPAN, 16)), trace.TraceFlags(1)
        context = trace.SpanContext(*ids_given, is_remote=True, trace_flags=sampled, trace_state=state)
        with trace.use_span(trace.NonRecordingSpan(context)):
            await app.notify("plain", {"a": 1, "b": "x"}, b"1" * app.session.publisher.most_bytes)
        [stored] = [found async for found in app.replay("plain", decode=bytes)]
    assert carried(stored) == ids(one("publish plain"))
    assert "tracestate" not in stored.headers


async def test_what_cannot_be_published_says_why(app: App, url: str | None) -> None:
    async with harness(app, server=url):
        for wanted in ("no-such-type", ["unhashable"], None):
            with pytest.raises(InvalidNotificationError):
                await app.notify(wanted, {})  # type: ignore[arg-type]
    assert [span.name for span in spans()] == ["publish"] * 3
    assert attributes(spans()[0], "error.type") == ["aviso_workers.errors.UnknownEventTypeError"]


async def test_the_context_that_an_author_gives_is_kept_and_that_of_the_program_is_the_parent(
    app: App, url: str | None
) -> None:
    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"}, headers={"traceparent": SOUND})
        await t.settle()
        with trace.get_tracer("web").start_as_current_span("request") as request:
            await app.notify("mars", mars(), {})
    given = int(TRACE, 16), int(SPAN, 16)
    linking, inside = one("publish plain"), one("publish mars")
    assert (links(linking), parent(one("process plain"))) == ([given], given)
    context = request.get_span_context()
    assert (links(inside), parent(inside)) == ([], (context.trace_id, context.span_id))


ODD: list[Mapping[str, str]] = [
    {},
    {"traceparent": ""},
    {"traceparent": "é" * 55},
    {"traceparent": SOUND + "0" * 60_000},
    {"traceparent": SOUND.replace("00-", "ff-", 1)},
    {"traceparent": SOUND + "-more"},
    {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
    {"traceparent": SOUND.upper()},
    {"tracestate": "a=1"},
]
STATED: list[Mapping[str, str]] = [
    {"Traceparent": SOUND, "Tracestate": "a=1"},
    {"traceparent": SOUND, "tracestate": "congo=t61rcWkgMzE,1@rojo=a b"},
]
READ: list[Mapping[str, str]] = [
    {"traceparent": SOUND},
    {"traceparent": SOUND.replace("00-", "7a-", 1) + "-more"},
    {"traceparent": SOUND, "tracestate": "é=1"},
    {"traceparent": SOUND, "tracestate": "a=" + "1" * 60_000},
    {"traceparent": SOUND, "tracestate": ",".join(f"k{number}={'v' * 250}" for number in range(32))},
    {"traceparent": SOUND, "tracestate": "== ,;, no state"},
    {"traceparent": SOUND, "tracestate": ",".join(f"k{number}=1" for number in range(33))},
    {"traceparent": SOUND, "tracestate": "a=1,a=2"},
    *STATED,
]


@pytest.mark.parametrize("headers", [*ODD, *READ], ids=range(len(ODD + READ)))
async def test_what_others_write_into_the_headers_does_no_harm(
    app: App, url: str | None, headers: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """As a worker without traces does, which writes none, or somebody who forges them. Nobody can flood the log."""

    @app.agent("plain")
    async def index(notification: Notification[Any]) -> Notify:
        return Notify("mars", mars(), {})

    async with harness(app, server=url) as t:
        await app.session.publisher.notify(plain("before"))
        await t.settle()
        EXPORTER.clear()
        message = Message(subject="plain.a.b", data=b"null", headers=headers or None)
        await app.session.backend.publish(message, message_id="x", stream="PLAIN", timeout_seconds=PATIENCE_SECONDS)
        await t.settle()
        assert t.outcomes("index") == ["acked", "acked"]
        returned = [found async for found in app.replay("mars")][-1]
    read = (int(TRACE, 16), int(SPAN, 16)) if headers in READ else None
    process = one("process plain")
    assert (parent(process), links(process)) == (read, [read] if read else [])
    assert carried(returned)[0] == ids(process)[0]
    sound_state = headers.get("tracestate", headers.get("Tracestate")) if headers in STATED else None
    assert returned.headers.get("tracestate") == sound_state
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_worker_without_traces_hands_on_none(
    kind: str, nats_url: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version of the app does, beside one that has them."""
    monkeypatch.setenv(f"{VARIABLE}ENABLED", "false")
    app = App("contract", config=app_config(kind, nats_url))

    @app.agent("plain")
    async def index(notification: Notification[Any]) -> Notify:
        return Notify("mars", mars(), {})

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"}, headers={"traceparent": SOUND})
        await t.settle()
        [returned] = [found async for found in app.replay("mars")]
    assert "traceparent" not in returned.headers
    assert spans() == []


async def test_the_span_of_handling_may_be_the_root_of_a_trace(
    kind: str, nats_url: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{VARIABLE}PROCESS", "root")
    app = App("contract", config=app_config(kind, nats_url))

    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None: ...

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"})
        await t.settle()
    process = one("process plain")
    assert (parent(process), links(process)) == (None, [ids(one("publish plain"))])
    assert len(traces()) == 2


async def test_settlements_have_spans_if_they_are_asked_for(
    kind: str, nats_url: str, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{VARIABLE}SETTLE", "true")
    app = App("contract", config=app_config(kind, nats_url))

    @app.agent("plain", retry=RetryPolicy(first=0.05, attempts=2, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        if notification.payload == "bad" or (notification.payload == "once" and notification.attempt == 1):
            raise ValueError(notification.payload)

    async with harness(app, server=url) as t:
        for payload in ("good", "once", "bad"):
            await app.notify("plain", {"a": payload, "b": "x"}, payload)
            await t.settle()
    settled = [span for span in spans() if span.name.split()[0] in ("ack", "nak", "term")]
    assert [span.name for span in settled] == ["ack plain", "nak plain", "ack plain", "nak plain", "term plain"]
    assert [parent(span) for span in settled] == [ids(span) for span in spans("process plain")]
    assert {span.kind for span in settled} == {trace.SpanKind.CLIENT}


async def test_whatever_guards_the_calls_is_inside_of_the_span(app: App, url: str | None) -> None:
    @app.agent("plain", singleton=True)
    async def singleton(notification: Notification[Any]) -> Notify:
        return Notify("mars", mars(step="1"), {})

    @app.agent("plain", limits=[Slots(1)], timeout=60)
    def limited(notification: Notification[Any]) -> Notify:
        app.sync(app.notify, "mars", mars(step="3"), {})
        return Notify("mars", mars(step="2"), {})

    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": 1, "b": "x"})
        await t.settle()
    assert len(spans("publish mars")) == 3
    assert {parent(span) for span in spans("publish mars")} == {ids(span) for span in spans("process plain")}
    assert len(spans("process plain")) == 2
    assert len(traces()) == 1


async def test_a_window_begins_a_trace_and_a_stream_has_no_span(app: App, url: str | None) -> None:
    def happened(notification: Notification[int]) -> datetime:
        return datetime(2026, 11, 20, notification.payload, tzinfo=UTC)

    def count(value: int, _: Notification[int]) -> int:
        return value + 1

    @app.agent("plain", window=Windowing(size="1h", time=happened, fold=count, initial=0))
    async def counted(window: Window[int]) -> Notify:
        return Notify("mars", mars(), {})

    @app.agent("plain")
    async def loop(stream: Stream[Any]) -> None:
        async for _ in stream:
            pass

    async with harness(app, server=url) as t:
        for hour in (6, 8):
            await app.notify("plain", {"a": hour, "b": "x"}, hour)
        await t.settle()
        assert t.outcomes("loop") == ["acked", "acked"]
    process = one("process plain")
    assert (parent(process), links(process)) == (None, [])
    assert parent(one("publish mars")) == ids(process)


OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"


def exemplars(metrics: Metrics) -> dict[str, tuple[str, str]]:
    """The trace and the span of each exemplar of the durations, by its bucket."""
    body, _ = metrics.answer(OPEN_METRICS)
    families = text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    samples = [one for family in families for one in family.samples]
    return {
        f"{one.name} {one.labels['le']}": (one.exemplar.labels["trace_id"], one.exemplar.labels["span_id"])
        for one in samples
        if one.exemplar
    }


@pytest.mark.parametrize("settle", ["false", "true"])
async def test_durations_carry_the_spans_of_their_calls(
    app: App, url: str | None, settle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{VARIABLE}SETTLE", settle)

    @app.agent("plain", retry=PROMPT)
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["a"] == "bad":
            raise ValueError("no such field")

    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    app.events.listen(metrics.observe, *telemetry_metrics.OBSERVED)
    async with harness(app, server=url) as t:
        for a in ("good", "bad", "good"):
            await app.notify("plain", {"a": a, "b": "x"})
        await t.settle()
        found = exemplars(metrics)
    processed = {(f"{trace_id:032x}", f"{span_id:016x}") for trace_id, span_id in map(ids, spans("process plain"))}
    assert len(processed) == 5
    assert found
    assert {*found.values()} <= processed
    assert {name.split()[0] for name in found} == {"aviso_worker_handler_seconds_bucket"}


async def test_a_span_that_is_not_sampled_is_no_exemplar(app: App, url: str | None) -> None:
    @app.agent("plain")
    async def index(notification: Notification[Any]) -> None: ...

    metrics = Metrics(app, ready=lambda: True, loop_lag_seconds=lambda: 0.0)
    app.events.listen(metrics.observe, *telemetry_metrics.OBSERVED)
    async with harness(app, server=url) as t:
        await app.notify("plain", {"a": "a", "b": "x"}, headers={"traceparent": SOUND.removesuffix("1") + "0"})
        await t.settle()
    assert (exemplars(metrics), spans("process plain")) == ({}, [])
