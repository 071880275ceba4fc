"""A stream and its limits: what it takes, what it drops for it, what it refuses. And the state of its consumers.

Pure: `Account` gives it the time, `consumer` and readers watch it. The rules are JetStream's; where two
of its limits meet (a full stream with `discard: new`, and a message that replaces an older one of its
subject), they are what a nats-server was seen to do.

The stream tells each `Durable` of every message that comes and goes, `consumer` takes messages from it and tells it
what became of them. Who gets them, and when, is decided there. The rules are JetStream's for explicit acks; `now` is
always the clock's `monotonic`, in seconds.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso import topics
from aviso_workers.aviso.codec import MARKER_HEADER, SIZE_HEADER, Message, store_time
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import ConsumerInfo, StreamInfo
from aviso_workers.errors import ConflictError, FullError, NotFoundError, RefusedError
from aviso_workers.jetstream import error_codes, metadata, plans
from aviso_workers.jetstream.fields import DEFAULT_DUPLICATE_WINDOW, STREAM
from aviso_workers.jetstream.info import ConsumerConfig, StreamConfig
from aviso_workers.jetstream.plans import UPDATABLE
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.jetstream.subjects import pattern

DEFAULTS = {name: field.zero for name, field in STREAM.items() if field.zero not in (None, [])}
MESSAGE_OVERHEAD = 16
TTL = re.compile(r"(?P<number>[0-9]+)(?P<unit>ms|s|m|h|)")
TTL_UNITS = {"ms": 10**6, "s": 10**9, "": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
POLICIES = ("all", "new", "by_start_sequence", "by_start_time")


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stream's configuration as a server reports it. Raises `RefusedError` where one would not take it."""
    name, max_age = config["name"], config.get("max_age") or math.inf
    defaults = {**DEFAULTS, "duplicate_window": min(DEFAULT_DUPLICATE_WINDOW, max_age)}
    # Nought and nothing mean the default.
    whole = {**config, **{field: config.get(field) or value for field, value in defaults.items()}}
    whole["subjects"] = list(config["subjects"])
    if whole["retention"] != "limits":
        raise RefusedError(
            f"stream {name}: in memory there is retention limits, found {whole['retention']}",
            code=error_codes.INVALID_STREAM_CONFIG,
        )
    if whole["duplicate_window"] > max_age:
        raise RefusedError(
            f"stream {name}: duplicate_window is longer than max_age", code=error_codes.INVALID_STREAM_CONFIG
        )
    return whole


class InMemoryStream:
    """`history` is how many messages per subject an Aviso stream that limits them keeps at least."""

    def __init__(self, config: dict[str, Any], *, history: int, created_ns: int) -> None:
        self.messages: OrderedDict[int, Message] = OrderedDict()
        self.subjects: OrderedDict[str, deque[int]] = OrderedDict()
        """The sequences of each subject; the subject whose newest message is oldest comes first."""
        self.durables: dict[str, Durable] = {}
        self.watchers: set[Callable[[], None]] = set()
        """Called after every change."""
        self.last_sequence = 0
        self._history = history
        self._created = datetime.fromtimestamp(created_ns // 1000 / 1e6, UTC)
        self._bytes = 0
        self._ends: list[tuple[int, int]] = []
        """A heap of messages with a TTL: the time of its end, in nanoseconds since 1970, and the sequence."""
        self._message_ids: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.configure(config)

    def info(self, *, now_ns: int) -> StreamInfo:
        return StreamInfo(
            config=StreamConfig(self.config),
            time=datetime.fromtimestamp(now_ns // 1000 / 1e6, UTC),
            messages=len(self.messages),
            bytes=self._bytes,
            subjects=len(self.subjects),
            consumers=len(self.durables),
            first_sequence=self.first_sequence,
            first_time=store_time(self._first()) if self.messages else None,
            last_sequence=self.last_sequence,
            created=self._created,
        )

    @property
    def first_sequence(self) -> int:
        return next(iter(self.messages), self.last_sequence and self.last_sequence + 1)

    @property
    def stalest_ns(self) -> int:
        """When the newest message of the first of `subjects` was stored."""
        return self.messages[next(iter(self.subjects.values()))[-1]].timestamp_ns

    def takes(self, subject: str) -> bool:
        return self._bound.fullmatch(subject) is not None

    def configure(self, config: dict[str, Any]) -> None:
        """Replace the configuration, at once and for what is stored as well."""
        self.config = config
        self.keeps_topics = config["max_msgs_per_subject"] > 0 and _is_aviso(config)
        """Whether it is an Aviso stream with a limit per topic: what in_memory's own settings are about."""
        self._bound = pattern(config["subjects"])
        for sequences in tuple(self.subjects.values()):
            self._enforce_subject_limit(sequences)
        self._enforce_limits()
        self.changed()

    def store(self, message: Message, *, message_id: str | None, now_ns: int) -> tuple[int, bool]:
        """Returns the sequence, and whether it is that of an earlier message of the same id."""
        self.expire(now_ns)
        self._refuse_surprise(message)
        if message_id is not None and self.knows(message_id):
            sequence, _ = self._message_ids[message_id]
            return sequence, True
        if self.config.get("allow_msg_counter"):
            message = self._counted(message)
        self.refuse_when_full([message])
        sequence = self._append(message, now_ns)
        if message_id is not None:
            self._message_ids[message_id] = (sequence, now_ns)
        self.changed()
        return sequence, False

    def forget_expired(self, now_ns: int) -> None:
        """Remove the messages that are too old, and wake those who watch the stream."""
        self.expire(now_ns)
        self.changed()

    def knows(self, message_id: str) -> bool:
        """Return whether a message of this id is remembered."""
        return message_id in self._message_ids

    def delete(self, sequence: int) -> None:
        if sequence not in self.messages:
            raise NotFoundError(
                f"stream {self.config['name']}: no message {sequence}", code=error_codes.MESSAGE_NOT_DELETED
            )
        self._remove(sequence)
        self.changed()

    def purge(self, subject: str = "") -> int:
        """Remove everything, or all of a subject; message ids are remembered and sequences go on, as in JetStream."""
        going = tuple(self.subjects.get(subject, ()) if subject else self.messages)
        for sequence in going:
            self._remove(sequence)
        self.changed()
        return len(going)

    def expire(self, now_ns: int) -> None:
        """Drop what is too old: messages beyond max_age or their own TTL, message ids beyond the duplicate window."""
        max_age = self.config["max_age"] or math.inf
        while self._ends and self._ends[0][0] <= now_ns:
            self._end(*heapq.heappop(self._ends))
        while self.messages and now_ns - self._first().timestamp_ns >= max_age:
            self._remove(self._first().sequence)
        while self._message_ids:
            message_id, (_, stored_ns) = next(iter(self._message_ids.items()))
            if now_ns - stored_ns < self.config["duplicate_window"]:
                return
            del self._message_ids[message_id]

    def evict_topic(self) -> None:
        """Drop the subject whose newest message is oldest."""
        self.purge(next(iter(self.subjects)))

    def newest(self, subject: str) -> Message | None:
        sequences = self.subjects.get(subject)
        return self.messages[sequences[-1]] if sequences else None

    def next_message(self, sequence: int, wanted: re.Pattern[str]) -> Message | None:
        """Return the first message from `sequence` on whose subject is wanted."""
        for position in range(max(sequence, self.first_sequence), self.last_sequence + 1):
            message = self.messages.get(position)
            if message is not None and wanted.fullmatch(message.subject):
                return message
        return None

    def _append(self, message: Message, now_ns: int) -> int:
        self.last_sequence += 1
        headers = message.headers or {}
        if headers.get("Nats-Rollup") == "sub" or "Nats-Schedule" in headers:
            for sequence in tuple(self.subjects.get(message.subject, ())):
                self._remove(sequence)
        if (ttl_ns := ttl_of(message)) is not None:
            heapq.heappush(self._ends, (now_ns + ttl_ns, self.last_sequence))
        self._add(msgspec.structs.replace(message, sequence=self.last_sequence, timestamp_ns=now_ns))
        return self.last_sequence

    def _end(self, now_ns: int, sequence: int) -> None:
        """Remove a message whose ttl is over; store a delete marker, as a server does, for a subject's newest one."""
        if (message := self.messages.get(sequence)) is None:
            return
        marker_ns = self.config.get("subject_delete_marker_ttl") or 0
        newest = self.subjects[message.subject][-1] == sequence
        self._remove(sequence)
        if newest and marker_ns and MARKER_HEADER not in (message.headers or {}):
            headers = {MARKER_HEADER: "MaxAge", "Nats-TTL": f"{marker_ns // 1_000_000}ms", "Nats-Rollup": "sub"}
            self._append(Message(subject=message.subject, data=b"", headers=headers), now_ns)

    def _refuse_surprise(self, message: Message) -> None:
        expected = (message.headers or {}).get("Nats-Expected-Last-Subject-Sequence")
        newest = self.newest(message.subject)
        found = newest.sequence if newest else 0
        if expected is not None and int(expected) != found:
            raise ConflictError(
                f"stream {self.config['name']}: wrong last sequence: {found}", code=error_codes.WRONG_LAST_SEQUENCE
            )

    def _counted(self, message: Message) -> Message:
        increment = (message.headers or {}).get("Nats-Incr")
        if increment is None:
            raise RefusedError(
                f"stream {self.config['name']}: message counter increment is missing",
                code=error_codes.COUNTER_INCREMENT_MISSING,
            )
        total = total_of(self.newest(message.subject)) + int(increment)
        return msgspec.structs.replace(message, data=msgspec.json.encode({"val": str(total)}))

    def _limit(self, name: str) -> float:
        return self.config[name] if self.config[name] > 0 else math.inf

    @property
    def _subject_limit(self) -> float:
        limit = self._limit("max_msgs_per_subject")
        return max(limit, self._history) if self.keeps_topics else limit

    def refuse_when_full(self, messages: Sequence[Message]) -> None:
        """Raise `FullError` where there is no room for all of them."""
        if self.config["discard"] != "new":
            return
        # A message that replaces one of its own subject needs no more room than that one leaves.
        leaving: list[Message] = []
        for subject, count in Counter(message.subject for message in messages).items():
            held = self.subjects.get(subject, ())
            too_many = max(0, len(held) + count - self._subject_limit)
            leaving += [self.messages[sequence] for position, sequence in enumerate(held) if position < too_many]
        excess = {
            "messages": len(self.messages) - len(leaving) + len(messages) - self._limit("max_msgs"),
            "bytes": self._bytes - sum(map(_size, leaving)) + sum(map(_size, messages)) - self._limit("max_bytes"),
        }
        for what, beyond in excess.items():
            if beyond > 0:
                problem = f"stream {self.config['name']} is full: maximum {what} exceeded"
                raise FullError(problem, code=error_codes.STREAM_FULL)

    def _add(self, message: Message) -> None:
        self.messages[message.sequence] = message
        self._bytes += _size(message)
        sequences = self.subjects.setdefault(message.subject, deque())
        sequences.append(message.sequence)
        self.subjects.move_to_end(message.subject)
        for durable in self.durables.values():
            durable.offer(message)
        self._enforce_subject_limit(sequences)
        self._enforce_limits()

    def _remove(self, sequence: int) -> None:
        message = self.messages.pop(sequence)
        self._bytes -= _size(message)
        self.subjects[message.subject].remove(sequence)
        if not self.subjects[message.subject]:
            del self.subjects[message.subject]
        for durable in self.durables.values():
            durable.forget(sequence)

    def _enforce_subject_limit(self, sequences: deque[int]) -> None:
        while len(sequences) > self._subject_limit:
            self._remove(sequences[0])

    def _enforce_limits(self) -> None:
        if self.config["discard"] == "new":
            return
        while len(self.messages) > self._limit("max_msgs") or self._bytes > self._limit("max_bytes"):
            self._remove(self._first().sequence)

    def _first(self) -> Message:
        return next(iter(self.messages.values()))

    def changed(self) -> None:
        """Wake those who watch the stream."""
        for watch in tuple(self.watchers):
            watch()


class Outstanding(Struct):
    """A message that was delivered and not settled."""

    deadline: float
    num_delivered: int = 1


class Durable:
    """The state of one durable consumer: which messages wait, which are out, which are due again.

    `messages` is the stream's own mapping of what it holds, in sequence order.
    """

    def __init__(
        self, spec: ConsumerSpec, messages: Mapping[int, Message], *, last_sequence: int, created_ns: int = 0
    ) -> None:
        if spec.ack_policy != "explicit" or spec.deliver_policy not in POLICIES:
            raise RefusedError(
                f"consumer {spec.durable_name}: in memory there are ack_policy explicit and deliver_policy "
                f"{', '.join(POLICIES)}, found {spec.ack_policy} and {spec.deliver_policy}",
                code=error_codes.CONSUMER_NOT_CREATED,
            )
        self.config: dict[str, Any] = {"name": spec.durable_name}
        self._messages = messages
        self._cursor = _start(spec, messages, last_sequence) - 1
        self._deliveries = 0
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._outstanding: dict[int, Outstanding] = {}
        self._due: OrderedDict[int, None] = OrderedDict()
        self._created_ns = created_ns
        self.last_delivered_ns = 0
        self.last_settled_ns = 0
        self.pinned_ns = 0
        self.readers = 0
        self.paused_until: datetime | None = None
        self._configure(msgspec.to_builtins(spec))

    def info(self, *, now_ns: int) -> ConsumerInfo:
        return ConsumerInfo(
            name=self.config["name"],
            config=ConsumerConfig(self.config),
            time=datetime.fromtimestamp(now_ns // 1000 / 1e6, UTC),
            num_pending=self.num_pending,
            num_ack_pending=len(self._outstanding),
            num_waiting=self.readers,
            num_redelivered=sum(1 for message in self._outstanding.values() if message.num_delivered > 1),
            deliveries=self._deliveries,
            position=self._cursor,
            ack_floor=min(self._outstanding) - 1 if self._outstanding else self._cursor,
            last_delivered=_time(self.last_delivered_ns),
            last_settled=_time(self.last_settled_ns),
            created=_time(self._created_ns),
            paused_until=self.paused_until,
            pinned_since=_time(self.pinned_ns),
        )

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    def update(self, spec: ConsumerSpec) -> None:
        """Take over what can be updated; the rest stays as it was created."""
        differences = plans.consumer_differences(spec, self.config)
        self._configure({each.field: each.wanted for each in differences if each.field in UPDATABLE})

    def reset(self, sequence: int) -> None:
        """Go on at `sequence`, and know nothing of what was delivered before."""
        self._cursor = sequence - 1
        self._deliveries = 0
        self._outstanding.clear()
        self._due.clear()
        self.last_delivered_ns = self.last_settled_ns = 0
        begins = {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}  # as a server's, which is recreated
        earlier = sequence < (self.config.get("opt_start_seq") or 1)
        self._configure({"metadata": metadata.after_reset(self.config.get("metadata"))} | (begins if earlier else {}))

    def offer(self, message: Message) -> None:
        """Note a message that the stream has stored, to be delivered where the filter takes it."""
        if message.sequence > self._cursor and self._wanted.fullmatch(message.subject):
            self._waiting[message.sequence] = None

    def forget(self, sequence: int) -> None:
        """Leave out a message that the stream does not hold any more: it is not delivered, nor redelivered."""
        self._waiting.pop(sequence, None)
        self.settle(sequence)

    def take(self, now: float) -> tuple[Message, int] | None:
        """Return the next message to deliver, and how often it was delivered, this time included; None where there is
        none.
        """
        if self.paused_until is not None:
            return None
        while self._due:
            sequence, _ = self._due.popitem(last=False)
            outstanding = self._outstanding[sequence]
            if outstanding.num_delivered < self.config["max_deliver"] or self.config["max_deliver"] < 1:
                outstanding.num_delivered += 1
                self._deliveries += 1
                outstanding.deadline = now + self.ack_wait_seconds
                return self._delivered(sequence), outstanding.num_delivered
            del self._outstanding[sequence]
        if not self._waiting or len(self._outstanding) >= self.config["max_ack_pending"] > 0:
            return None
        self._cursor, _ = self._waiting.popitem(last=False)
        self._deliveries += 1
        self._outstanding[self._cursor] = Outstanding(deadline=now + self.ack_wait_seconds)
        return self._delivered(self._cursor), 1

    def _delivered(self, sequence: int) -> Message:
        """Return a message as it is delivered: with `headers_only`, it has the size of its body in place of it."""
        message = self._messages[sequence]
        if not self.config["headers_only"]:
            return message
        headers = {**(message.headers or {}), SIZE_HEADER: str(len(message.data))}
        return structs.replace(message, data=b"", headers=headers)

    def settle(self, sequence: int) -> None:
        """Forget a message that was acked or terminated, by whichever of its deliveries."""
        self._outstanding.pop(sequence, None)
        self._due.pop(sequence, None)

    def give_back(self, sequence: int, *, not_before: float, now: float) -> None:
        if sequence not in self._outstanding:
            return
        self._outstanding[sequence].deadline = not_before
        self._due.pop(sequence, None)
        if not_before <= now:
            self._due[sequence] = None

    def in_progress(self, sequence: int, now: float) -> None:
        if sequence in self._outstanding:
            self._outstanding[sequence].deadline = now + self.ack_wait_seconds

    def collect_overdue(self, now: float) -> float | None:
        """Make due what was not settled in time; returns when to look again, None where nothing is out."""
        deadlines = {sequence: message.deadline for sequence, message in self._outstanding.items()}
        overdue = sorted(sequence for sequence, deadline in deadlines.items() if deadline <= now)
        self._due.update(dict.fromkeys(overdue))
        return min((deadline for deadline in deadlines.values() if deadline > now), default=None)

    @property
    def ack_wait_seconds(self) -> float:
        return float(self.config["ack_wait"] / SECOND)

    def _configure(self, stated: Mapping[str, Any]) -> None:
        filters: Sequence[str] = {**self.config, **stated}["filter_subjects"]
        # As a server sees it: one lies within another. Two that only cross are taken.
        if any(pattern([wide]).fullmatch(narrow) for wide, narrow in permutations(filters, 2)):
            raise RefusedError(
                f"consumer {self.config['name']}: its filters {', '.join(filters)} overlap",
                code=error_codes.FILTERS_OVERLAP,
            )
        self.config |= {**stated, "filter_subjects": list(filters)}
        self._wanted = pattern(filters)
        self._waiting = OrderedDict.fromkeys(
            sequence
            for sequence, message in self._messages.items()
            if sequence > self._cursor and self._wanted.fullmatch(message.subject)
        )


def ttl_of(message: Message) -> int | None:
    """Return how long it is to be kept, in nanoseconds, where it says so.

    Raises `RefusedError` where it is not understood.
    """
    if (ttl := (message.headers or {}).get("Nats-TTL")) is None:
        return None
    if not (found := TTL.fullmatch(ttl)):
        raise RefusedError(f"publish {message.subject}: invalid per-message TTL {ttl!r}", code=error_codes.INVALID_TTL)
    return int(found["number"]) * TTL_UNITS[found["unit"]]


def total_of(message: Message | None) -> int:
    """Return what a counter's subject stands at, after its newest message."""
    return int(msgspec.json.decode(message.data)["val"]) if message else 0


def header_size(message: Message) -> int:
    """Return the bytes of the headers, as they go over the wire."""
    if not message.headers:
        return 0
    lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in message.headers.items())
    return len("NATS/1.0\r\n\r\n") + lines


def _size(message: Message) -> int:
    """Return the bytes that count against max_bytes, as a server counts them for storage memory."""
    return MESSAGE_OVERHEAD + len(message.subject.encode()) + header_size(message) + len(message.data)


def _is_aviso(config: Mapping[str, Any]) -> bool:
    base = "".join(config["subjects"]).removesuffix(".>")
    return (config["subjects"], config["name"]) == ([topics.binding(base)], base.upper())


def _start(spec: ConsumerSpec, messages: Mapping[int, Message], last_sequence: int) -> int:
    """Return the first sequence that is delivered."""
    match spec.deliver_policy:
        case "new":
            return last_sequence + 1
        case "by_start_sequence":
            return int(spec.opt_start_seq or 1)
        case "by_start_time":
            begin = datetime.fromisoformat(str(spec.opt_start_time))
            return next((each.sequence for each in messages.values() if store_time(each) >= begin), last_sequence + 1)
        case _:
            return 1


def _time(ns: int) -> datetime | None:
    return datetime.fromtimestamp(ns / 1e9, UTC) if ns else None
