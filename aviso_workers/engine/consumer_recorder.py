"""Creates an agent's durable consumers, and records how far each has come (`state.consumer_records`).

A consumer that is missing is created again and begins after what was recorded as settled, or after what this worker has
last seen settled where there is no record any more.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import structs

from aviso_workers.backends import Backend, ConsumerInfo
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.declare.agents import Policy, durable_name
from aviso_workers.errors import (
    BackendError,
    NotFoundError,
    UnavailableError,
)
from aviso_workers.events import ConsumerEdited, ConsumerNotRecorded, ConsumerResumed, Events
from aviso_workers.jetstream import identities, specs
from aviso_workers.jetstream.identities import Identity
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.state import consumer_records
from aviso_workers.state.consumer_records import ConsumerRecord

__all__ = ["ConsumerRecorder", "attempt_seconds", "longest_seconds"]

RENEW_SECONDS = 300.0
"""A record is written again after so long, also where nothing is new: the bucket may have been deleted."""
MAX_ATTEMPTS = 20
"""So many attempts are waited for where the policy sets no limit."""


class ConsumerRecorder:
    """Creates one durable consumer of an agent, as one worker does, and records how far it has come."""

    def __init__(
        self,
        backend: Backend,
        provisioner: Provisioner,
        *,
        app: str,
        agent: str,
        stream: str,
        longest_seconds: float,
        attempt_seconds: float | None = None,
        events: Events,
    ) -> None:
        self._backend = backend
        self._provisioner = provisioner
        self._agent = agent
        self._stream = stream
        self._consumer = durable_name(app, agent)
        self._key = consumer_records.key_of(app, agent, stream)
        self._longest_seconds = longest_seconds
        self._attempt_seconds = attempt_seconds
        self._events = events
        self._created: datetime | None = None
        """When the stream was created; None before it could be read."""
        self._end = 0
        """The last sequence of the stream when its record was read."""
        self._known: Identity | None = None
        """Which consumer was recorded last."""
        self._last: ConsumerRecord | None = None
        self._seen: int | None = None
        """The ack floor of the consumer when this worker last read it; None where it has read none of this stream, or
        an operator has removed it on purpose."""
        self._removed_for: Literal["lost", "filter", "max_deliver"] = "lost"
        """Why this worker has removed the consumer; "lost" where it has not."""
        self._reported = False
        """Whether it was stated that the record cannot be written."""

    async def found(self) -> ConsumerInfo | None:
        """Return the consumer; None where there is none. Raises `BackendError`."""
        try:
            return await self._backend.consumer_info(self._stream, self._consumer)
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
        self._events.emit(
            ConsumerEdited(
                agent=self._agent,
                stream=self._stream,
                consumer=self._consumer,
                differences=(f"max_deliver: {found.config.max_deliver} -> unlimited",),
            )
        )
        return True

    async def remove(self, *, why: Literal["filter", "max_deliver"] = "filter") -> None:
        """Remove the consumer, because it may have withheld notifications; `ensure` creates it again, and it begins
        after what is recorded. Raises `BackendError`.
        """
        self._removed_for = why
        with suppress(NotFoundError):
            await self._backend.delete_consumer(self._stream, self._consumer)

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
        recorded = self._last is not None
        if found is None and settled is not None:
            found = await self.found()  # another worker may have created it since, and it is recorded only after that
        if settled is not None:  # also where it is found: it may be deleted before it is brought in line
            wanted = specs.beginning_after(wanted, settled)
        elif wanted.deliver_policy == "new":
            # A cluster begins such a consumer where the stream ends when the consumer's first leader is elected, which
            # may be seconds later.
            wanted = specs.beginning_after(wanted, (await self._backend.stream_info(self._stream)).last_sequence)
        info = await self._provisioner.ensure_consumer(self._stream, wanted)
        if found is None and settled is not None:
            self._events.emit(
                ConsumerResumed(
                    agent=self._agent,
                    stream=self._stream,
                    consumer=info.name,
                    sequence=settled + 1,
                    recorded=recorded,
                    why=self._removed_for,
                )
            )
        self._removed_for = "lost"
        return info

    async def is_known(self) -> bool:
        """Return whether there was a consumer before, or an operator has removed it. Raises `BackendError`."""
        return self._seen is not None or await consumer_records.read(self._backend, self._key) is not None

    async def refresh(self) -> None:
        """Ask for the consumer, and record what is new about it. Raises `BackendError` where it does not answer."""
        found = await self._backend.consumer_info(self._stream, self._consumer)
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
            if self._last is None or not found.goes_on(self._known) or consumer.settled < self._last.ack_floor:
                await self._read()  # it was reset, or the stream is another one than before
            self._known, self._seen = found, consumer.settled
            await self._store(consumer)
        except BackendError as error:
            if not self._reported:
                self._reported = True
                self._events.emit(ConsumerNotRecorded(agent=self._agent, bucket=consumer_records.BUCKET, error=error))
        else:
            self._reported = False

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
                f"consumer {self._consumer} of stream {self._stream} does not exist, and whether there was one before "
                f"is not known, because bucket {consumer_records.BUCKET} cannot be read: {error}"
            ) from error
        # A stream whose server lost its end, as without power, stores other notifications under the sequences it had.
        settled = self._last.ack_floor if self._last else self._seen
        return None if settled is None else min(settled, self._end)

    async def _read(self) -> None:
        """Read the record, and where the stream ends. A record of another stream of that name, or of a consumer that an
        operator has removed, counts for nothing.
        """
        info = await self._backend.stream_info(self._stream)
        created = info.created or info.time
        record = await consumer_records.read(self._backend, self._key)
        if created != self._created or (record and record.removed):
            self._seen = None
        self._created, self._last = created, record if record and record.holds_for(created) else None
        self._end = info.last_sequence

    async def _store(self, consumer: ConsumerInfo) -> None:
        record, last = self._of(consumer), self._last
        if (
            last is None
            or structs.replace(record, time=last.time) != last
            or (record.time - last.time).total_seconds() >= RENEW_SECONDS
        ):
            await (await consumer_records.bucket(self._backend)).put(self._key, msgspec.json.encode(record))
            self._last = record

    def _of(self, consumer: ConsumerInfo) -> ConsumerRecord:
        assert self._created is not None
        has_work = (consumer.num_pending or consumer.num_ack_pending) and not consumer.paused
        # Only `move` takes the record back: whoever else took the consumer back had it handle again what was settled.
        recorded = self._last.ack_floor if self._last and self._last.ack_floor <= self._end else 0
        ack_floor = max(consumer.settled, recorded)
        stands = self._last is not None and self._last.ack_floor == ack_floor
        before = self._last.unfinished_since if self._last and stands else None
        return ConsumerRecord(
            stream_created=self._created,
            ack_floor=ack_floor,
            filter_subjects=tuple(consumer.config.filters),
            time=consumer.time,
            unfinished_since=(before or consumer.time) if has_work else None,
            longest_seconds=self._longest_seconds,
            attempt_seconds=self._attempt_seconds,
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
