"""Creates an agent's durable consumers, and records how far each has come (`state.consumer_records`).

A consumer that is missing is created again and begins after what was recorded as settled, or after what this worker has
last seen settled where there is no record any more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Struct, structs

from aviso_workers.backends import Backend, ConsumerInfo
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.declare.agents import Policy, durable_name
from aviso_workers.errors import (
    BackendError,
    NotFoundError,
    UnavailableError,
)
from aviso_workers.events import ConsumerEdited, ConsumerNotRecorded, ConsumerResumed, ConsumerTakenBack, Event, Events
from aviso_workers.jetstream import identities, specs
from aviso_workers.jetstream.identities import Identity
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.state import consumer_records
from aviso_workers.state.consumer_records import ConsumerRecord

RENEW_SECONDS = 300.0
"""A record is written again after so long, also where nothing is new: the bucket may have been deleted."""
MAX_ATTEMPTS = 20
"""So many attempts are waited for where the policy sets no limit."""


class ConsumerRecorder(Struct, eq=False):
    """Creates one durable consumer of an agent, as one worker does, and records how far it has come."""

    backend: Backend
    provisioner: Provisioner
    app: str
    agent: str
    stream: str
    longest_seconds: float
    events: Events
    attempt_seconds: float | None = None
    created: datetime | None = None
    """When the stream was created; None before it could be read."""
    end: int = 0
    """The last sequence of the stream when its record was read."""
    known: Identity | None = None
    """Which consumer was recorded last."""
    last: ConsumerRecord | None = None
    seen: int | None = None
    """The ack floor of the consumer when this worker last read it; None where it has read none of this stream, or
    an operator has removed it on purpose."""
    removed_for: Literal["lost", "filter", "max_deliver"] = "lost"
    """Why this worker has removed the consumer; "lost" where it has not."""
    reported: bool = False
    """Whether it was stated that the record cannot be written."""
    looks_behind: int = 0
    """How many looks in a row have found less settled than is recorded."""

    @property
    def consumer(self) -> str:
        return durable_name(self.app, self.agent)

    @property
    def key(self) -> str:
        return consumer_records.key_of(self.app, self.agent, self.stream)

    def emit(self, kind: Callable[..., Event], **fields: object) -> None:
        """State a fact about the consumer."""
        self.events.emit(kind(agent=self.agent, stream=self.stream, consumer=self.consumer, **fields))

    async def found(self) -> ConsumerInfo | None:
        """Return the consumer; None where there is none. Raises `BackendError`."""
        try:
            return await self.backend.consumer_info(self.stream, self.consumer)
        except NotFoundError:
            return None

    async def remove_limited(self, found: ConsumerInfo) -> bool:
        """Remove a consumer to which somebody has given a `max_deliver`, and return whether it was removed. The server
        may have given notifications up, so they are delivered again: what was settled since the last record, too. A
        paused one stays, because it would not be paused any more, and is given nothing. Raises `BackendError`.
        """
        if found.config.max_deliver <= 0 or found.paused or not await self.is_known():
            return False
        await self.remove(why="max_deliver")
        self.emit(ConsumerEdited, differences=(f"max_deliver: {found.config.max_deliver} -> unlimited",))
        return True

    async def remove(self, *, why: Literal["filter", "max_deliver"] = "filter") -> None:
        """Remove the consumer, because it may have withheld notifications; `ensure` creates it again, and it begins
        after what is recorded. Raises `BackendError`.
        """
        self.removed_for = why
        with suppress(NotFoundError):
            await self.backend.delete_consumer(self.stream, self.consumer)

    async def ensure(self, wanted: ConsumerSpec, found: ConsumerInfo | None) -> ConsumerInfo:
        """Bring the consumer that was `found` in line, or create it; where there was one before, after what it settled.

        What it has come to is not recorded yet: that is for the caller to do. Raises `UnavailableError` where it is not
        known whether there was one, and as `Backend.ensure_consumer` does.
        """
        if found is not None and identities.is_as_wanted(wanted, found):
            return found
        if found is not None and await self.remove_limited(found):
            found = None
        elif found is not None and found.paused and found.config.max_deliver > 0:
            return found  # until it is resumed
        settled = await self._settled() if found is None else found.settled
        recorded = self.last is not None
        if found is None and settled is not None:
            found = await self.found()  # another worker may have created it since, and it is recorded only after that
        if settled is not None:  # also where it is found: it may be deleted before it is brought in line
            wanted = specs.beginning_after(wanted, settled)
        elif wanted.deliver_policy == "new":
            # A cluster begins such a consumer where the stream ends when the consumer's first leader is elected, which
            # may be seconds later.
            wanted = specs.beginning_after(wanted, (await self.backend.stream_info(self.stream)).last_sequence)
        info = await self.provisioner.ensure_consumer(self.stream, wanted)
        if found is None and settled is not None:
            self.emit(ConsumerResumed, sequence=settled + 1, recorded=recorded, why=self.removed_for)
        self.removed_for = "lost"
        return info

    async def is_known(self) -> bool:
        """Return whether there was a consumer before, or an operator has removed it. Raises `BackendError`."""
        return self.seen is not None or await consumer_records.read(self.backend, self.key) is not None

    async def refresh(self) -> None:
        """Ask for the consumer, and record what is new about it. Raises `BackendError` where it does not answer."""
        found = await self.backend.consumer_info(self.stream, self.consumer)
        if not await self.remove_limited(found):
            await self.record(found)

    async def record(self, consumer: ConsumerInfo) -> None:
        """Store what is new about the consumer. Where that fails, it is stated once. With a `max_deliver`, a position
        says nothing: the server may have given up what is before it.
        """
        if consumer.config.max_deliver > 0:
            return
        found = identities.of(consumer)
        try:
            if self.last is None or not found.goes_on(self.known) or consumer.settled < self.last.ack_floor:
                await self._read()  # it was reset, or the stream is another one than before
            self.known, self.seen = found, consumer.settled
            self._compare(consumer)
            await self._store(consumer)
        except BackendError as error:
            if not self.reported:
                self.reported = True
                self.events.emit(
                    ConsumerNotRecorded(agent=self.agent, bucket=consumer_records.bucket_of(self.app), error=error)
                )
        else:
            self.reported = False

    def _compare(self, consumer: ConsumerInfo) -> None:
        """State that less is settled than is recorded, once two looks have found so: an operator's reset is recorded a
        moment after it is done.
        """
        recorded = min(self.last.ack_floor, self.end) if self.last else 0
        self.looks_behind = self.looks_behind + 1 if consumer.settled < recorded else 0
        if self.looks_behind == 2:
            self.emit(ConsumerTakenBack, recorded=recorded, settled=consumer.settled)

    async def _settled(self) -> int | None:
        """Return up to where everything is settled, as recorded, or as this worker has last seen where there is no
        record any more; None where no consumer of this stream is known.
        """
        try:
            await self._read()
        except NotFoundError:
            raise  # the stream is gone too: it is recreated first
        except BackendError as error:
            raise UnavailableError(
                f"consumer {self.consumer} of stream {self.stream} does not exist, and whether there was one before "
                f"is not known, because bucket {consumer_records.bucket_of(self.app)} cannot be read: {error}"
            ) from error
        # A stream whose server lost its end, as without power, stores other notifications under the sequences it had.
        settled = self.last.ack_floor if self.last else self.seen
        return None if settled is None else min(settled, self.end)

    async def _read(self) -> None:
        """Read the record, and where the stream ends. A record of another stream of that name, or of a consumer that an
        operator has removed, counts for nothing.
        """
        info = await self.backend.stream_info(self.stream)
        created = info.created or info.time
        record = await consumer_records.read(self.backend, self.key)
        if created != self.created or (record and record.removed):
            self.seen = None
        self.created, self.last = created, record if record and record.holds_for(created) else None
        self.end = info.last_sequence

    async def _store(self, consumer: ConsumerInfo) -> None:
        record, last = self._of(consumer), self.last
        if (
            last is None
            or structs.replace(record, time=last.time) != last
            or (record.time - last.time).total_seconds() >= RENEW_SECONDS
        ):
            await (await consumer_records.bucket(self.backend, self.app)).put(self.key, msgspec.json.encode(record))
            self.last = record

    def _of(self, consumer: ConsumerInfo) -> ConsumerRecord:
        assert self.created is not None
        has_work = (consumer.num_pending or consumer.num_ack_pending) and not consumer.paused
        # Only `move` takes the record back: whoever else took the consumer back had it handle again what was settled.
        recorded = self.last.ack_floor if self.last and self.last.ack_floor <= self.end else 0
        ack_floor = max(consumer.settled, recorded)
        stands = self.last is not None and self.last.ack_floor == ack_floor
        before = self.last.unfinished_since if self.last and stands else None
        return ConsumerRecord(
            stream_created=self.created,
            ack_floor=ack_floor,
            filter_subjects=tuple(consumer.config.filters),
            time=consumer.time,
            unfinished_since=(before or consumer.time) if has_work else None,
            longest_seconds=self.longest_seconds,
            attempt_seconds=self.attempt_seconds,
        )


def longest_seconds(policy: Policy) -> float:
    """Return how long an agent of this policy may leave a notification unfinished: all its attempts, and the waits
    between them, and what `ack_wait` and limits add. A call without a `timeout` is not known to end: it
    may take `consumer_records.STUCK_SECONDS`.
    """
    retry = policy.retry
    attempts = min(retry.attempts or MAX_ATTEMPTS, MAX_ATTEMPTS)
    waits = sum(min(retry.max, retry.first * retry.factor**n) * (1 + retry.jitter) for n in range(attempts - 1))
    calls = attempts * (policy.timeout or 0.0)
    return max(consumer_records.STUCK_SECONDS, 2 * policy.ack_wait) + waits + calls + policy.interval_seconds


def attempt_seconds(policy: Policy) -> float:
    """Return how long an agent of this policy may neither ask for messages nor settle one while all that it may run
    runs.
    """
    least = max(consumer_records.STUCK_SECONDS, 2 * policy.ack_wait)
    return least + (policy.timeout or 0.0) + policy.interval_seconds
