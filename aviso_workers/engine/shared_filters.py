"""The filter and the `ack_wait` of a durable consumer while workers of several versions of an agent read it.

This is so in a deploy.

A `where` that was changed makes another version of the agent, and all of them read one consumer. Its filter is the
union of what its versions want, and its metadata names them. A worker that opens the consumer only adds its own
version: it cannot know whether another one, newer or older than itself, still runs. While there are several versions,
the workers of each count up a number in the metadata, as a heartbeat. A version whose number has not changed for
`GONE_SECONDS`, by the clock of the worker that reads it, is taken out, and the filter with it.

So a worker is also given what lies outside its own filter. It gives that back with a delay until it comes to a worker
that wants it: this is not a failure, and the agent never sees it. It acks it only where it knows that no other version
wants it, because it has read the consumer since the notification was stored. A version that is widened later
begins with what is stored from then on.

The `ack_wait` of the consumer is the longest that one of its versions wants, so that each of them reports often enough
what it holds. What the server really has is read each time: where somebody has made it shorter, the worker reports
as often as that needs, sets it right, and says so.

Its `max_ack_pending` is the largest as well: where a worker of another version has started with a smaller one, it is
set again.

A server filters by subjects only. What an agent leaves out of its own subjects, such as all numbers beyond a range, it
acks whatever other versions want: see `acknowledging.Settler.ack_unmatched`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import anyio
from msgspec import Struct

from aviso_workers import clocks
from aviso_workers.backends import Backend, ConsumerInfo, Delivery
from aviso_workers.declare.retry import Backoff
from aviso_workers.declare.verdicts import Ack, Nak, Settlement
from aviso_workers.engine.consumer_records import ConsumerRecorder
from aviso_workers.errors import BackendError
from aviso_workers.events import AckWaitDiffers, Events, FiltersDiffer
from aviso_workers.jetstream import metadata, specs, subjects
from aviso_workers.jetstream.fields import SECOND
from aviso_workers.jetstream.metadata import Version
from aviso_workers.jetstream.specs import ConsumerSpec

__all__ = ["SharedFilter"]

CHECK_SECONDS = 30.0
"""How often a worker reads which versions there are."""
CHECK_AGAIN_SECONDS = 1.0
"""How soon it does so where it has just opened the consumer, or was given what it does not want."""
GONE_SECONDS = 300.0
"""A version without a heartbeat for so long has no worker. This is longer than a network is usually interrupted: what
only workers want that are cut off for longer is not delivered to them."""
LAST_RECORD_SECONDS = 2.0
GIVEN_BACK = Backoff(first=0.1, factor=2.0, max=5.0, jitter=0.0)
"""When what is given back comes again, by how often it was delivered."""

Filters = tuple[str, ...]
"""Filter subjects; none means everything."""


class _Seen(Struct, frozen=True):
    """The number of a version, and since when it is that one."""

    number: int
    since: float


class SharedFilter:
    """What one worker knows of the versions of its agent; `consumer` states what its own version wants."""

    def __init__(
        self,
        consumer: ConsumerSpec,
        *,
        agent: str,
        stream: str,
        backend: Backend,
        recorder: ConsumerRecorder,
        retries: ConsumerRecorder,
        events: Events,
        on_ack_wait: Callable[[float], None],
    ) -> None:
        """`on_ack_wait` is called with the seconds within which the worker has to report what it holds."""
        self.consumer = consumer
        self._agent = agent
        self._stream = stream
        self._backend = backend
        self._recorder = recorder
        self._retries = retries
        self._events = events
        self._on_ack_wait = on_ack_wait
        self._own = metadata.version_of(consumer)
        self._wants = subjects.matcher(self._own.filter_subjects)
        self._in_effect = self._own.ack_wait
        """The `ack_wait` that the server has."""
        self._granted = consumer.max_ack_pending
        """The `max_ack_pending` that the server has given; an account may allow less than what is wanted."""
        self._others: dict[Filters, Callable[[str], object]] = {}
        """The other filters, and what of a subject they want."""
        self._seen: dict[Version, _Seen] = {}
        self._given_back = 0
        """The newest sequence that was given back."""
        self._known_up_to = 0
        """Up to this sequence, notifications were stored before the consumer was read last."""
        self._checked_at = 0.0
        self._reported = False
        """Whether it was reported that what no version wants any more is acked."""
        self._check_soon = anyio.Event()

    async def ensure(self) -> ConsumerInfo:
        """Create the consumer, or bring it in line so that this version is among those that it serves.

        One that was deleted is recreated, and begins after what it had settled as far as that was recorded. Raises
        `UnavailableError` where that cannot be known, and as `Backend.ensure_consumer` does.
        """
        found = await self._recorder.found()
        versions = self._versions(found)
        self._given_back = self._known_up_to = 0  # the stream may be another one now, and count from 1 again
        info = await self._recorder.ensure(metadata.shared(self.consumer, versions), found)
        self._granted = info.config.max_ack_pending
        self._follow(info)
        self._note(versions)
        if len(versions) > 1:
            self._check_soon.set()  # two that open it at once may have overwritten each other
        return info

    async def ensure_retries(self, consumer: ConsumerSpec) -> ConsumerInfo:
        """Create the consumer of what is tried again, or bring it in line, with the `ack_wait` of the shared one.

        Raises as `ensure` does.
        """
        longest = max(version.ack_wait for version in self._versions(await self._recorder.found()))
        wanted = specs.with_ack_wait(consumer, longest)
        return await self._retries.ensure(wanted, await self._retries.found())

    def _versions(self, found: ConsumerInfo | None) -> dict[Version, int]:
        """Return those that are noted in the consumer, and this one."""
        return {self._own: 0} | (metadata.noted_versions(found.config) if found else {})

    def leaves(self, delivery: Delivery) -> Settlement | None:
        """Return how a delivery is settled that this version does not want; None for one that it wants.

        It is given back to the other versions, or acked where none of them wants it.
        """
        if self._wants(delivery.message.subject):
            return None
        message = delivery.message
        known = message.sequence <= self._known_up_to
        if known and not any(wants(message.subject) for wants in self._others.values()):
            if not self._reported:
                self._state(gone=())
            return Ack()
        if not known:
            self._given_back = max(self._given_back, message.sequence)
            self._check_soon.set()
        return Nak(GIVEN_BACK.delay_seconds(delivery.num_delivered))

    async def keep(self) -> None:
        """Read which versions there are, again and again, and take out those that are gone."""
        while True:
            with clocks.move_on_after(self._backend.clock, CHECK_SECONDS):
                await self._check_soon.wait()
            await self._backend.clock.sleep(CHECK_AGAIN_SECONDS)
            self._check_soon = anyio.Event()
            await self._check()

    async def record_last(self) -> None:
        """Record how far the consumer has come when the worker stops, where the server answers soon."""
        with clocks.move_on_after(self._backend.clock, LAST_RECORD_SECONDS), suppress(BackendError):
            await self._recorder.refresh()
            await self._retries.refresh()

    async def _check(self) -> None:
        stored_before = self._given_back
        try:
            found = await self._backend.consumer_info(self._stream, self.consumer.durable_name)
            self._follow(found)
            noted = metadata.noted_versions(found.config)
            versions = self._still_there(noted)
            wanted = specs.beginning_after(metadata.shared(self.consumer, versions), found.ack_floor)
            if versions != noted or not _is_as(wanted, found) or found.config.max_ack_pending < self._granted:
                self._follow(await self._backend.ensure_consumer(self._stream, wanted))
        except BackendError:
            return
        self._note(versions)
        self._known_up_to = max(self._known_up_to, stored_before)
        await self._recorder.record(found)
        with suppress(BackendError):
            await self._retries.refresh()

    def _still_there(self, noted: Mapping[Version, int]) -> dict[Version, int]:
        """Return the versions that live, this one among them, and count up its number where there are several."""
        now = self._backend.clock.monotonic()
        if now - self._checked_at > 2 * CHECK_SECONDS + CHECK_AGAIN_SECONDS:
            self._seen.clear()  # without an answer for so long, the others may have been cut off as well
        self._checked_at = now
        self._seen = {version: self._last_seen(version, number, now) for version, number in noted.items()}
        versions = {
            version: number
            for version, number in noted.items()
            if version == self._own or now - self._seen[version].since < GONE_SECONDS
        }
        own = self._seen.get(self._own)
        if own is None:
            versions[self._own] = 0  # another worker's update overwrote ours, or has taken us for gone
        elif len(versions) > 1 and now - own.since >= CHECK_SECONDS:
            versions[self._own] += 1
        return versions

    def _last_seen(self, version: Version, number: int, now: float) -> _Seen:
        before = self._seen.get(version)
        return before if before is not None and before.number == number else _Seen(number, now)

    def _note(self, versions: Mapping[Version, int]) -> None:
        before = self._others.keys()
        others = {version.filter_subjects for version in versions} - {self._own.filter_subjects}
        self._others = {filters: subjects.matcher(filters) for filters in sorted(others)}
        if self._others.keys() != before:
            self._state(gone=tuple(before - self._others.keys()))

    def _follow(self, consumer: ConsumerInfo) -> None:
        """Let the worker report what it holds often enough for the `ack_wait` that the server has now."""
        ack_wait = consumer.config.ack_wait
        if ack_wait == self._in_effect:
            return
        self._in_effect = ack_wait
        own_seconds, in_effect_seconds = self._own.ack_wait / SECOND, ack_wait / SECOND
        self._on_ack_wait(min(own_seconds, in_effect_seconds))
        self._events.emit(
            AckWaitDiffers(
                agent=self._agent,
                stream=self._stream,
                consumer=self.consumer.durable_name,
                own_seconds=own_seconds,
                in_effect_seconds=in_effect_seconds,
            )
        )

    def _state(self, *, gone: tuple[Filters, ...]) -> None:
        self._reported = not self._others
        self._events.emit(
            FiltersDiffer(
                agent=self._agent,
                stream=self._stream,
                consumer=self.consumer.durable_name,
                own=self._own.filter_subjects,
                others=tuple(self._others),
                gone=gone,
            )
        )


def _is_as(wanted: ConsumerSpec, found: ConsumerInfo) -> bool:
    filters = tuple(sorted(found.config.filters))
    return filters == wanted.filter_subjects and found.config.ack_wait == wanted.ack_wait
