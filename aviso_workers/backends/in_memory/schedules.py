"""Message schedules (NATS ADR-51): a stream keeps a message until it is due, and then stores it as another.

`Account` keeps the time; the rules are here. Of a server's schedules there is `@at`, which comes once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from aviso_workers.aviso.codec import Message
from aviso_workers.backends.in_memory.stream import InMemoryStream
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream import error_codes

SCHEDULE = "Nats-Schedule"
TARGET = "Nats-Schedule-Target"
PRODUCED_BY = "Nats-Scheduler"
AT = "@at "
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def due_ns(message: Message) -> int | None:
    """Return when it is due, nanoseconds since 1970 UTC; None for a message that is not a schedule.

    Raises `RefusedError`.
    """
    if (schedule := _headers(message).get(SCHEDULE)) is None:
        return None
    try:
        time = datetime.fromisoformat(schedule.removeprefix(AT))
    except ValueError:
        time = None
    if not schedule.startswith(AT) or time is None or time.tzinfo is None:
        raise RefusedError(
            f"publish {message.subject}: in memory there is no schedule {schedule!r}", code=error_codes.INVALID_SCHEDULE
        )
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def refuse(message: Message, taker: InMemoryStream) -> None:
    """Raise `RefusedError` for a schedule that the stream does not take, and for what only a schedule produces."""
    if PRODUCED_BY in _headers(message) and taker.config.get("allow_msg_schedules"):
        raise RefusedError(
            f"publish {message.subject}: it says itself that a schedule has produced it",
            code=error_codes.SAYS_IT_WAS_SCHEDULED,
        )
    if due_ns(message) is None:
        return
    if not taker.config.get("allow_msg_schedules"):
        raise RefusedError(
            f"publish {message.subject}: stream {taker.config['name']} does not take it, "
            "switch on its allow_msg_schedules",
            code=error_codes.SCHEDULES_OFF,
        )
    target = _headers(message).get(TARGET, "")
    if target == message.subject or {"*", ">", ""} & set(target.split(".")) or not taker.takes(target):
        raise RefusedError(
            f"publish {message.subject}: its schedule cannot lead to {target!r}",
            code=error_codes.INVALID_SCHEDULE_TARGET,
        )


def produced(schedule: Message) -> Message:
    """Return what is stored when it is due."""
    headers = _headers(schedule)
    kept = {name: value for name, value in headers.items() if not name.startswith("Nats-")}
    said = {PRODUCED_BY: schedule.subject, "Nats-Schedule-Next": "purge"}
    return Message(subject=headers[TARGET], data=schedule.data, headers={**kept, **said})


def _headers(message: Message) -> Mapping[str, str]:
    return message.headers or {}
