"""A duration is a number of seconds, a text such as `30s`, or a timedelta, wherever an author gives one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aviso_workers import App, Batch, Batching, Notification, Notify, Retry, RetryPolicy, Stream, Windowing
from aviso_workers.aviso import literals
from aviso_workers.declare import timers
from aviso_workers.engine import publisher
from aviso_workers.errors import DeclarationError, InvalidNotificationError
from aviso_workers.state import delayed_messages

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOTIFICATION: Notification[None] = Notification(event_type="mars", identifier={}, payload=None, sequence=7)


def windowing(**stated: Any) -> Windowing[int]:
    return Windowing(fold=lambda value, _: value + 1, initial=0, **{"size": "1d", **stated})


async def handler(notification: Notification[Any]) -> None: ...


def policy(**stated: Any) -> Any:
    return App("tests").agent("mars", **stated)(handler).policy


def of_a_batch(after: Any) -> Any:
    batch = Batch([NOTIFICATION])
    batch.retry(NOTIFICATION, after=after)
    return batch.outcomes[7]


TAKEN: dict[str, Callable[[Any], float | None]] = {
    "RetryPolicy(first=)": lambda given: RetryPolicy(first=given).first,
    "RetryPolicy(max=)": lambda given: RetryPolicy(max=given).max,
    "Batching(within=)": lambda given: Batching(within=given).within,
    "Windowing(size=)": lambda given: windowing(size=given).size_seconds,
    "Windowing(every=)": lambda given: windowing(every=given).every_seconds,
    "Windowing(lateness=)": lambda given: windowing(lateness=given).lateness_seconds,
    "Windowing(idle=)": lambda given: windowing(idle=given).idle_seconds,
    "agent(ack_wait=)": lambda given: policy(ack_wait=given).ack_wait,
    "agent(timeout=)": lambda given: policy(timeout=given).timeout,
    "every": lambda given: timers.every(given).interval,
    "Retry": lambda given: Retry(given).after,
    "Batch.retry(after=)": lambda given: of_a_batch(given).after,
    "Notify(ttl=)": lambda given: publisher._whole_seconds("mars", Notify("mars", {}, ttl=given).ttl),
    "Notify(due=)": lambda given: (
        delayed_messages.due_of(Notify("mars", {}, due=given), now=NOON) - NOON
    ).total_seconds(),
    "Table.put(ttl=)": lambda given: App("tests").table("t", int)._ttl_seconds(given),
}
"""The seconds of each duration that an author gives, as they are used."""


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("given", [90, 90.0, "90s", timedelta(minutes=1, seconds=30)], ids=repr)
def test_all_spellings_mean_the_same(taken: Callable[[Any], float | None], given: Any) -> None:
    assert taken(given) == 90


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("given", ["90", "soon", True, float("nan"), [90]], ids=repr)
def test_what_is_no_duration_is_refused(taken: Callable[[Any], float | None], given: Any) -> None:
    with pytest.raises((DeclarationError, InvalidNotificationError, ValueError), match=re.escape(str(given))):
        taken(given)


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("given", [-1, timedelta(seconds=-1)], ids=repr)
def test_what_is_below_nothing_is_refused(taken: Callable[[Any], float | None], given: Any) -> None:
    if taken is TAKEN["Table.put(ttl=)"]:
        pytest.skip("its bucket refuses less than a second")
    with pytest.raises((DeclarationError, InvalidNotificationError, ValueError), match=r"from 0|from 1|above 0|longer"):
        taken(given)


@pytest.mark.parametrize(
    ("given", "seconds"), [(0.5, 0.5), (timedelta(milliseconds=1), 0.001), ("2w", 1_209_600), (0, 0), (-3, -3)]
)
def test_the_seconds_of_a_duration(given: object, seconds: float) -> None:
    assert literals.seconds_of(given) == seconds


def test_whole_seconds_are_whole_numbers() -> None:
    assert [type(literals.seconds_of(given)) for given in (2.0, "2s", timedelta(seconds=2))] == [int] * 3


@pytest.mark.parametrize("given", ["1", "", "0.5s", "1h30m", None, b"1s", 10**400, object()])
def test_what_is_none_raises(given: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        literals.seconds_of(given)


@pytest.mark.anyio
@pytest.mark.parametrize("given", [2, "2s", timedelta(seconds=2)], ids=repr)
async def test_a_stream_takes_within_any_of_them(given: Any) -> None:
    asked: list[float | None] = []

    class Source:
        async def next(self, *, within_seconds: float | None = None) -> Notification[None] | None:
            asked.append(within_seconds)
            return NOTIFICATION if len(asked) < 3 else None

        async def settle(self) -> None: ...

    taken: AsyncIterator[Any] = Stream(Source()).take(2, within=given)
    assert await anext(taken) == [NOTIFICATION, NOTIFICATION]
    assert asked == [None, 2]
    with pytest.raises(DeclarationError, match="within must be a duration from 0 seconds"):
        await anext(Stream(Source()).group_by(lambda one: one.sequence, within=-1))
