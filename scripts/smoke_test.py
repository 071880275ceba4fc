#!/usr/bin/env python3
"""Publishes, watches, replays and looks at the effective stream policy: does this installation do its job?

Environment (defaults): BACKEND (in_memory), NATS_URL (nats://localhost:4222), TIMEOUT_SECONDS (8),
JETSTREAM_POLICY_STREAM_NAME (POLYGON), and, each checked only where it is set, EXPECT_MAX_MESSAGES, EXPECT_MAX_BYTES,
EXPECT_MAX_MESSAGES_PER_SUBJECT, EXPECT_COMPRESSION (None or s2). AVISO_WORKERS_CONFIG_FILE names a configuration of
your own; it must know the event types of smoke_test.yaml.

Prints a line a check; exits 0 only if all hold. It publishes to the streams of these event types.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio

from aviso_workers import App, AvisoWorkersError, Notification, Receipt
from aviso_workers import config as configuration

BACKEND = os.environ.get("BACKEND", "in_memory")
NATS_URL = os.environ.get("NATS_URL", "nats://localhost:4222")
TIMEOUT_SECONDS = float(os.environ.get("TIMEOUT_SECONDS", "8"))
POLICY_STREAM = os.environ.get("JETSTREAM_POLICY_STREAM_NAME", "POLYGON")
EXPECTATIONS = {
    "EXPECT_MAX_MESSAGES": "max_msgs",
    "EXPECT_MAX_BYTES": "max_bytes",
    "EXPECT_MAX_MESSAGES_PER_SUBJECT": "max_msgs_per_subject",
    "EXPECT_COMPRESSION": "compression",
}
SQUARE = "(52.5,13.4,52.6,13.4,52.6,13.6,52.5,13.6,52.5,13.4)"
INSIDE, ELSEWHERE = "52.55,13.5", "10,10"


class CheckFailedError(Exception):
    """A check does not hold; its text says what was there instead."""


class CheckSkippedError(Exception):
    """A check does not apply here."""


def mars(**values: Any) -> dict[str, Any]:
    fields = {"class": "od", "expver": "1", "domain": "g", "date": "20250706", "time": "1200"}
    return {**fields, "stream": "smoke", "step": 1, **values}


async def publishing_is_acknowledged(app: App) -> None:
    receipt = await app.notify("mars", mars(), {"location": "here"})
    expect(receipt.sequence > 0, f"sequence {receipt.sequence}")


async def a_watch_sees_what_comes_and_not_what_was(app: App) -> None:
    target = f"t-{uuid.uuid4().hex[:8]}"
    before = await app.notify("mars", mars(stream=target, step=1), {"n": 1})
    notification = await first(app.watch("mars", {"stream": target}), after=lambda: publish_until_seen(app, target))
    expect(notification.sequence > before.sequence, f"{notification.id} came, {before.sequence} was there before")


async def a_watch_goes_from_history_to_live(app: App) -> None:
    target = f"t-{uuid.uuid4().hex[:8]}"
    old = await app.notify("mars", mars(stream=target, step=1), {"n": 1})
    steps: list[str] = []
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with aclosing(app.watch("mars", {"stream": target}, from_id=old.sequence)) as notifications:
            async for notification in notifications:
                steps.append(notification.identifier["step"])
                if len(steps) == 1:
                    await app.notify("mars", mars(stream=target, step=2), {"n": 2})
                if len(steps) == 2:
                    break
    expect(steps == ["1", "2"], f"steps {steps}")


async def a_replay_starts_at_an_id(app: App) -> None:
    one, two = [await app.notify("mars", mars(stream="by-id", step=step), {}) for step in (1, 2)]
    found = await sequences(app.replay("mars", {"stream": "by-id"}, from_id=two.sequence))
    expect(found == [two.sequence], f"{found} from {two.sequence} on; {one.sequence} was before")


async def a_replay_starts_at_a_date(app: App) -> None:
    await app.notify("mars", mars(stream="by-date", step=1), {})
    await anyio.sleep(1.1)  # a margin above a second, so that the date between them can be written in seconds
    between = datetime.now(UTC) - timedelta(milliseconds=500)
    newer = await app.notify("mars", mars(stream="by-date", step=2), {})
    found = await sequences(app.replay("mars", {"stream": "by-date"}, from_date=between.isoformat()))
    expect(found == [newer.sequence], f"{found} from {between} on, expected {newer.sequence}")


async def an_id_and_a_date_exclude_each_other(app: App) -> None:
    try:
        await sequences(app.replay("mars", from_id=1, from_date="2025-01-01T00:00:00Z"))
    except AvisoWorkersError:
        return
    raise CheckFailedError("both were taken")


async def a_reserved_character_is_carried(app: App) -> None:
    receipt = await app.notify("mars", mars(stream="a.b*c>d%e"), {})
    (found,) = [n async for n in app.replay("mars", {"stream": "a.b*c>d%e"}, from_id=receipt.sequence)]
    expect(found.identifier["stream"] == "a.b*c>d%e", f"{found.identifier['stream']!r} on {found.topic}")


async def a_number_can_be_constrained(app: App) -> None:
    for step in (3, 4, 5):
        await app.notify("mars", mars(stream="by-step", step=step), {})
    found = [n.identifier["step"] async for n in app.replay("mars", {"stream": "by-step", "step": {"gte": 4}})]
    expect(found == ["4", "5"], f"steps {found} at 4 and above")


async def a_value_can_be_one_of_several(app: App) -> None:
    for domain in ("g", "a", "b"):
        await app.notify("mars", mars(stream="by-domain", domain=domain), {})
    where = {"stream": "by-domain", "domain": {"in": ["g", "a"]}}
    found = sorted([n.identifier["domain"] async for n in app.replay("mars", where)])
    expect(found == ["a", "g"], f"domains {found} of g and a")


async def a_point_finds_the_polygons_around_it(app: App) -> None:
    date = (datetime(2000, 1, 1, tzinfo=UTC) + timedelta(days=uuid.uuid4().int % 9000)).strftime("%Y%m%d")
    receipt = await app.notify("test_polygon", {"date": date, "time": "1200", "polygon": SQUARE}, {})
    for point, expected in ((INSIDE, [receipt.sequence]), (ELSEWHERE, [])):
        found = await sequences(app.replay("test_polygon", {"date": date, "point": point}))
        expect(found == expected, f"{found} around {point}, expected {expected}")


async def the_stream_policy_is_in_effect(app: App) -> None:
    wanted = {field: os.environ[name] for name, field in EXPECTATIONS.items() if name in os.environ}
    if app.session.backend.kind != "jetstream":
        raise CheckSkippedError("the backend keeps no stream policy")
    if not wanted:
        raise CheckSkippedError("no EXPECT_* is set")
    config = (await app.session.backend.stream_info(POLICY_STREAM)).config
    for field, expected in wanted.items():
        found = str(config.get(field, "none"))
        expect(found.lower() == expected.lower(), f"{POLICY_STREAM} has {field} {found}, expected {expected}")


CHECKS: tuple[Callable[[App], Awaitable[None]], ...] = (
    publishing_is_acknowledged,
    a_watch_sees_what_comes_and_not_what_was,
    a_watch_goes_from_history_to_live,
    a_replay_starts_at_an_id,
    a_replay_starts_at_a_date,
    an_id_and_a_date_exclude_each_other,
    a_reserved_character_is_carried,
    a_number_can_be_constrained,
    a_value_can_be_one_of_several,
    a_point_finds_the_polygons_around_it,
    the_stream_policy_is_in_effect,
)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


async def sequences(notifications: AsyncIterator[Notification[Any]]) -> list[int]:
    with anyio.fail_after(TIMEOUT_SECONDS):
        return [notification.sequence async for notification in notifications]


async def publish_until_seen(app: App, target: str) -> Receipt:
    """A watch does not say when it has begun: publish until it shows something."""
    step = 2
    while True:
        await app.notify("mars", mars(stream=target, step=step), {"n": step})
        step += 1
        await anyio.sleep(0.1)


async def first(notifications: Any, *, after: Callable[[], Awaitable[object]]) -> Notification[Any]:
    with anyio.fail_after(TIMEOUT_SECONDS):
        async with anyio.create_task_group() as tasks, aclosing(notifications):
            tasks.start_soon(after)
            found: Notification[Any] = await anext(notifications)
            tasks.cancel_scope.cancel()
    return found


def smoke_config() -> configuration.Config:
    file = os.environ.get("AVISO_WORKERS_CONFIG_FILE", Path(__file__).with_name("smoke_test.yaml"))
    over = {
        "AVISO_WORKERS_NOTIFICATION_BACKEND__KIND": BACKEND,
        "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": NATS_URL,
        "AVISO_WORKERS_NOTIFICATION_BACKEND__IN_MEMORY__MAX_HISTORY_PER_TOPIC": "100",
    }
    return configuration.load(file, environ={**os.environ, **over})


async def main() -> int:
    failures = 0
    async with App("smoke-test", config=smoke_config()) as app:
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            try:
                await check(app)
            except CheckSkippedError as reason:
                print(f"skip  {name}: {reason}")
            except (CheckFailedError, AvisoWorkersError, TimeoutError) as error:
                failures += 1
                print(f"FAIL  {name}: {error or 'nothing came in time'}")
            else:
                print(f"ok    {name}")
    print(f"{len(CHECKS) - failures} of {len(CHECKS)} checks without a failure on {BACKEND}")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(anyio.run(main))
    except AvisoWorkersError as error:
        sys.exit(f"smoke_test.py: {error}")
