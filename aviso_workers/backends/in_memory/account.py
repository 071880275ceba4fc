"""All streams of one in-memory backend, and the rules between them: names, subjects, topics.

Pure but for the clock. What `NotFoundError` and `RefusedError` carry are JetStream's codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import msgspec

from aviso_workers import config
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Outgoing, PubAck
from aviso_workers.backends.in_memory.stream import Durable, InMemoryStream, complete, header_size, total_of, ttl_of
from aviso_workers.clocks import EPOCH, Clock
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import error_codes, identities, specs, subjects
from aviso_workers.jetstream.specs import ConsumerSpec, StreamSpec

MAX_PAYLOAD = 1024 * 1024
"""A nats-server's own default."""
MAX_HEADERS = 65_535
"""JetStream's, which cannot be changed."""
SCHEDULE = "Nats-Schedule"
TARGET = "Nats-Schedule-Target"
PRODUCED_BY = "Nats-Scheduler"
AT = "@at "


class InMemoryAccount:
    def __init__(self, settings: config.InMemory, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._streams: dict[str, InMemoryStream] = {}
        self._last_ns = 0
        self._created_ns: dict[str, int] = {}
        """By name, when the stream was made, or the one that was deleted."""

    def names(self) -> list[str]:
        return list(self._streams)

    def stream(self, name: str) -> InMemoryStream:
        """Return the stream as it is now. Raises `NotFoundError`."""
        stream = self._streams.get(name)
        if stream is None:
            raise NotFoundError(f"stream {name}: not found", code=error_codes.STREAM_NOT_FOUND)
        stream.expire(self._clock.time_ns())
        return stream

    def delete(self, name: str) -> None:
        """Remove the stream and all it holds. Raises `NotFoundError`."""
        stream = self.stream(name)
        del self._streams[name]
        stream.changed()

    def durable(self, stream: str, name: str) -> Durable:
        """Return a durable consumer. Raises `NotFoundError`."""
        durable = self.stream(stream).durables.get(name)
        if durable is None:
            raise NotFoundError(f"consumer {name} of stream {stream}: not found", code=error_codes.CONSUMER_NOT_FOUND)
        return durable

    def create(self, spec: StreamSpec) -> InMemoryStream:
        """Return the new stream, or the one that was created with the same configuration."""
        wanted = complete(specs.stated(spec))
        found = self._streams.get(spec.name)
        if found is None:
            self._refuse_overlap(wanted)
            # No two streams of a name are made at the same time, so that one can be told from the one before it.
            created_ns, history = self._created_now(spec.name), self._settings.max_history_per_topic
            self._streams[spec.name] = InMemoryStream(wanted, history=history, created_ns=created_ns)
        elif found.config != wanted:
            raise RefusedError(
                f"stream {spec.name}: in use with a different configuration", code=error_codes.STREAM_NAME_IN_USE
            )
        return self.stream(spec.name)

    def update(self, config: Mapping[str, Any]) -> InMemoryStream:
        stream = self.stream(config["name"])
        wanted = complete(config)
        self._refuse_overlap(wanted)
        if wanted["storage"] != stream.config["storage"]:
            raise RefusedError(
                f"stream {config['name']}: its storage cannot be changed", code=error_codes.INVALID_STREAM_CONFIG
            )
        stream.configure(wanted)
        return stream

    def ensure_durable(self, stream: str, spec: ConsumerSpec) -> Durable:
        found = self.stream(stream)
        durable = found.durables.get(spec.durable_name)
        if durable is None:
            created_ns = self._created_now(f"{stream}.{spec.durable_name}")
            durable = Durable(
                identities.marked(spec, None), found.messages, last_sequence=found.last_sequence, created_ns=created_ns
            )
            found.durables[spec.durable_name] = durable
        else:
            durable.update(identities.marked(spec, durable.info(now_ns=self.now_ns)))
        return durable

    def _created_now(self, name: str) -> int:
        """Return the time at which a stream or consumer is created: never that of one of the same name before it."""
        self._created_ns[name] = max(self._clock.time_ns(), self._created_ns.get(name, 0) + 1000)
        return self._created_ns[name]

    def publish(self, outgoing: Outgoing) -> PubAck:
        """Store a message where its subject belongs, if that is `stream`."""
        taker, whole = self._accepted(outgoing)
        sequence, duplicate = self._store(taker, whole, outgoing)
        counts = taker.config.get("allow_msg_counter") and not duplicate
        total = total_of(taker.newest(whole.subject)) if counts else None
        return PubAck(stream=outgoing.stream, sequence=sequence, duplicate=duplicate, total=total)

    def publish_together(self, outgoing: Sequence[Outgoing]) -> PubAck:
        """Store all of them or none."""
        accepted = [self._accepted(each) for each in outgoing]
        stream, taker = outgoing[0].stream, accepted[0][0]
        taker.expire(self._clock.time_ns())
        if any(taker.knows(each.message_id) for each in outgoing):
            return PubAck(stream=stream, sequence=0, duplicate=True)
        taker.refuse_when_full([whole for _, whole in accepted])
        for each, (_, whole) in zip(outgoing, accepted, strict=True):
            sequence, _ = self._store(taker, whole, each)
        return PubAck(stream=stream, sequence=sequence)

    def _store(self, taker: InMemoryStream, whole: Message, outgoing: Outgoing) -> tuple[int, bool]:
        sequence, duplicate = self.store(taker, whole, message_id=outgoing.message_id)
        if (ttl_ns := ttl_of(whole)) is not None and (stored := taker.messages.get(sequence)) is not None:
            over, over_ns = self._clock.monotonic() + ttl_ns / 1e9, stored.timestamp_ns + ttl_ns
            # The store times of messages differ by a nanosecond where they are stored at the same moment.
            self._clock.call_at(over, lambda: taker.forget_expired(max(over_ns, self._clock.time_ns())))
        if (due_ns := _scheduled_ns(whole)) is not None and not duplicate:
            due = self._clock.monotonic() + (due_ns - self._clock.time_ns()) / 1e9
            self._clock.call_at(due, lambda: self._store_due(taker, whole, sequence))
        return sequence, duplicate

    def _store_due(self, taker: InMemoryStream, schedule: Message, sequence: int) -> None:
        """Store what a schedule produces, unless the schedule or its stream was removed or replaced meanwhile."""
        newest = taker.newest(schedule.subject)
        if newest is None or newest.sequence != sequence or self._streams.get(taker.config["name"]) is not taker:
            return
        taker.delete(sequence)
        self.store(taker, _produced(schedule))

    def _accepted(self, outgoing: Outgoing) -> tuple[InMemoryStream, Message]:
        """Return the stream that takes the message, and the message with the headers that a server adds. Raises
        `RefusedError`, and `UnavailableError` where no stream takes its subject.
        """
        message, stream = outgoing.message, outgoing.stream
        if why := subjects.why_refused(message.subject):
            raise RefusedError(f"publish: {why}")
        taker = next((found for found in self._streams.values() if found.takes(message.subject)), None)
        if taker is None:
            raise UnavailableError(f"publish {message.subject}: no stream takes this subject")
        if taker.config["name"] != stream:
            raise _refused(message, f"it does not belong to stream {stream}", error_codes.WRONG_STREAM)
        headers = message.headers or {}
        if ttl_of(message) is not None and not taker.config.get("allow_msg_ttl"):
            problem = f"stream {stream} does not take it, switch on its allow_msg_ttl"
            raise _refused(message, problem, error_codes.TTL_OFF)
        _refuse_schedule(message, taker)
        if "Nats-Rollup" in headers and not taker.config.get("allow_rollup_hdrs"):
            raise _refused(message, "rollup is not permitted", error_codes.ROLLUP_NOT_PERMITTED)
        # A server stores these two beside the publisher's headers.
        headers = {**headers, "Nats-Msg-Id": outgoing.message_id, "Nats-Expected-Stream": stream}
        whole = msgspec.structs.replace(message, headers=headers)
        if header_size(whole) > MAX_HEADERS:
            problem = f"its headers are larger than {MAX_HEADERS} bytes"
            raise _refused(message, problem, error_codes.HEADERS_TOO_LARGE)
        if header_size(whole) + len(whole.data) > MAX_PAYLOAD:
            raise _refused(message, f"headers and body are larger than {MAX_PAYLOAD} bytes")
        return taker, whole

    @property
    def now_ns(self) -> int:
        """The time of day; nothing was stored later."""
        return max(self._clock.time_ns(), self._last_ns)

    def store(self, stream: InMemoryStream, message: Message, *, message_id: str | None = None) -> tuple[int, bool]:
        # No two messages have the same time, so that one of two topics is always the older.
        self._last_ns = max(self._clock.time_ns(), self._last_ns + 1)
        stored = stream.store(message, message_id=message_id, now_ns=self._last_ns)
        self._evict_topics()
        return stored

    def _evict_topics(self) -> None:
        streams = [stream for stream in self._streams.values() if stream.keeps_topics and stream.subjects]
        while sum(len(stream.subjects) for stream in streams) > self._settings.max_topics:
            min(streams, key=lambda stream: stream.stalest_ns).evict_topic()

    def _refuse_overlap(self, wanted: Mapping[str, Any]) -> None:
        others = {name: other.config["subjects"] for name, other in self._streams.items() if name != wanted["name"]}
        for (name, taken), subject in product(others.items(), wanted["subjects"]):
            if any(subjects.overlap(subject, each) for each in taken):
                problem = f"stream {wanted['name']}: {subject} overlaps with stream {name}"
                raise RefusedError(problem, code=error_codes.SUBJECTS_OVERLAP)


def _refused(message: Message, problem: str, code: int | None = None) -> RefusedError:
    return RefusedError(f"publish {message.subject}: {problem}", code=code)


def _scheduled_ns(message: Message) -> int | None:
    """Return when a message is due, nanoseconds since 1970 UTC; None for a message that is not a schedule.

    By a message schedule (NATS ADR-51), a stream keeps a message until it is due, and then stores it as another. Of a
    server's schedules there is `@at`, which comes once.

    Raises `RefusedError`.
    """
    if (schedule := _headers(message).get(SCHEDULE)) is None:
        return None
    try:
        time = datetime.fromisoformat(schedule.removeprefix(AT))
    except ValueError:
        time = None
    if not schedule.startswith(AT) or time is None or time.tzinfo is None:
        raise _refused(message, f"in memory there is no schedule {schedule!r}", error_codes.INVALID_SCHEDULE)
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def _refuse_schedule(message: Message, taker: InMemoryStream) -> None:
    """Raise `RefusedError` for a schedule that the stream does not take, and for what only a schedule produces."""
    if PRODUCED_BY in _headers(message) and taker.config.get("allow_msg_schedules"):
        problem = "it says itself that a schedule has produced it"
        raise _refused(message, problem, error_codes.SAYS_IT_WAS_SCHEDULED)
    if _scheduled_ns(message) is None:
        return
    if not taker.config.get("allow_msg_schedules"):
        problem = f"stream {taker.config['name']} does not take it, switch on its allow_msg_schedules"
        raise _refused(message, problem, error_codes.SCHEDULES_OFF)
    target = _headers(message).get(TARGET, "")
    if target == message.subject or {"*", ">", ""} & set(target.split(".")) or not taker.takes(target):
        raise _refused(message, f"its schedule cannot lead to {target!r}", error_codes.INVALID_SCHEDULE_TARGET)


def _produced(schedule: Message) -> Message:
    """Return what is stored when it is due."""
    headers = _headers(schedule)
    kept = {name: value for name, value in headers.items() if not name.startswith("Nats-")}
    said = {PRODUCED_BY: schedule.subject, "Nats-Schedule-Next": "purge"}
    return Message(subject=headers[TARGET], data=schedule.data, headers={**kept, **said})


def _headers(message: Message) -> Mapping[str, str]:
    return message.headers or {}
