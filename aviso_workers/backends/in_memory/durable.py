"""The state of one durable consumer of a stream: which messages wait, which are out, which are due again.

Pure: the stream tells it of every message that comes and goes, `consumer` takes messages from it and tells
it what became of them. Who gets them, and when, is decided there. The rules are JetStream's for explicit
acks; `now` is always the clock's `monotonic`, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.codec import SIZE_HEADER, Message, store_time
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import ConsumerInfo
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream import error_codes, metadata, plans
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.plans import UPDATABLE
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.jetstream.subjects import pattern

POLICIES = ("all", "new", "by_start_sequence", "by_start_time")


class Outstanding(Struct):
    """A message that was delivered and not settled."""

    deadline: float
    num_delivered: int = 1


class Durable:
    """A consumer over `messages`, the stream's own mapping of what it holds, in sequence order."""

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
        """Return the next message to deliver and how often that makes, now in the hands of the caller."""
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
        """Acked or terminated. It does not matter by which of several deliveries."""
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
