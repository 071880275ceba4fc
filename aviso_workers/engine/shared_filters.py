"""The filter and the `ack_wait` of a durable consumer while workers of several versions of an agent read it.

This is so in a deploy. A `where` that was changed makes another version of the agent, and all of them read one
consumer. While their filters are equal, that filter is the consumer's. While they differ, the consumer lets through
everything of the event type, and each worker leaves to the others what its own version does not want.

No notification is hidden from a version that reads, whatever happens at the same time:

* Each worker registers its version by compare-and-set (`versions`) before it reads. It does not know whether another
  version is older or newer, and removes none but one whose workers have said nothing for `GONE_SECONDS`.
* JetStream has no conditional update of a consumer, so the last update wins. All updates that widen the filter are
  equal. One that narrows it is announced in the registry, and made when only one version is registered; then the
  registered versions are read again. Until then nobody records how far the consumer has come: the update may be late,
  and another one may widen the filter again before anybody sees what it has hidden.
* Where the consumer lacks what a version wants that is registered and reads, such as after an update that was late, or
  an edit by hand, or somebody has given it a `max_deliver`, the consumer is removed. It is created again and begins
  after what was recorded as settled. That is recorded only after the filter was found to be complete: some
  notifications are handled twice then, and none is missed.

A worker that is given what its version does not want asks which versions there are. It gives the notification back with
a delay where another version wants it: this is not a failure, and the agent never sees it. Else it acks it. A version
that is new begins with what is stored after the consumer lets it through.

The `ack_wait` of the consumer is the longest that one of its versions wants, so that each of them reports often enough
what it holds. What the server really has is read each time: where somebody has made it shorter, the worker reports
as often as that needs, sets it right, and says so. Its `max_ack_pending` is the largest as well.

A server filters by subjects only. What an agent leaves out of its own subjects, such as all numbers beyond a range, it
acks whatever other versions want: see `acknowledging.Settler.ack_unmatched`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import anyio
from msgspec import Struct, structs

from aviso_workers import clocks
from aviso_workers.aviso.literals import SECOND
from aviso_workers.backends import ConsumerInfo, Delivery
from aviso_workers.declare.verdicts import Ack
from aviso_workers.engine import acknowledging
from aviso_workers.engine.consumer_recorder import ConsumerRecorder
from aviso_workers.errors import BackendError, UnavailableError
from aviso_workers.events import (
    AckWaitDiffers,
    AgentMoved,
    ConsumerEdited,
    ConsumerNotRecorded,
    FilterHides,
    FiltersDiffer,
    FunctionsDiffer,
)
from aviso_workers.jetstream import identities, metadata, plans, specs, subjects
from aviso_workers.jetstream.metadata import Version
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.state import versions
from aviso_workers.state.consumer_records import BUCKET
from aviso_workers.state.known_agents import KnownAgents
from aviso_workers.state.versions import Registered, Versions

CHECK_SECONDS = 30.0
"""How often a worker looks at the consumer and the versions."""
CHECK_AGAIN_SECONDS = 1.0
"""How soon it does so where it has just opened the consumer and there are several versions."""
GONE_SECONDS = 300.0
"""A version without a heartbeat for so long has no worker. This is longer than a network is usually interrupted: what
only workers want that are cut off for longer is not delivered to them."""
LAST_RECORD_SECONDS = 2.0

ALIKE = ("headers_only", "max_deliver", "backoff", "max_batch", "max_bytes", "max_expires")
"""The fields of the consumer that all versions want alike, and without which an agent misses bodies, attempts or
messages."""

Filters = tuple[str, ...]
"""Filter subjects; none means everything."""


class SharedFilter(Struct, eq=False, dict=True):
    """The consumer of one worker's agent; `consumer` states what its own version wants."""

    consumer: ConsumerSpec
    everything: Filters
    """The filter of all notifications of the event type."""
    registry: Versions
    recorder: ConsumerRecorder
    retries: ConsumerRecorder
    on_ack_wait: Callable[[float], None]
    """Called with the seconds within which the worker has to report what it holds."""
    function: str = ""
    """The name of the agent's function."""
    known_agents: KnownAgents | None = None
    """Beside these, a new agent begins only where it is not a renamed one, or the author `states_start`."""
    states_start: bool = False

    def __post_init__(self) -> None:
        self.everything = tuple(sorted(self.everything))
        self._own = metadata.version_of(self.consumer, self.function)
        self._wants = subjects.matcher(self._own.filter_subjects)
        self._in_effect = self._own.ack_wait
        """The `ack_wait` that the server has."""
        self._granted = self.consumer.max_ack_pending
        """The `max_ack_pending` that the server has given; an account may allow less than what is wanted."""
        self._others: dict[Filters, Callable[[str], object]] = {}
        """The other filters, and what of a subject they want."""
        self._other_functions: tuple[str, ...] = ()
        """The functions of the other versions."""
        self._heard: dict[tuple[Version, int], float] = {}
        """Since when each version has said that it lives, and how often by then."""
        self._narrowings: dict[int, float] = {}
        """Since when each `narrowing` is known."""
        self._checked_at = 0.0
        self._limited = anyio.Event()
        self._check_soon = anyio.Event()
        self._undecided: list[Delivery] = []
        """Deliveries that this version does not want, until it is known whether another one does."""
        self._decide_soon = anyio.Event()

    @property
    def wants_everything(self) -> bool:
        """Whether this version wants all notifications of the event type."""
        return self._own.filter_subjects == self.everything

    async def ensure(self) -> ConsumerInfo:
        """Create the consumer, or bring it in line so that it lets through what this version wants.

        One that was deleted is recreated, and begins after what it had settled as far as that was recorded. Raises
        `UnavailableError` where that cannot be known, `RefusedError` where the agent may be a renamed one, and as
        `Backend.ensure_consumer` does.
        """
        found = await self.recorder.found()
        if found is None and self.known_agents and not self.states_start and not await self.recorder.is_known():
            await self.known_agents.require_new(self.recorder.agent, self.recorder.stream, self._own)
        known = await self._register(found)
        if known is not None and len(known[1]) > 1:
            found = await self.recorder.found()  # another version may have narrowed it before this one was registered
        if known is None:
            registered = versions.including((), self._own)
            info = await self.recorder.ensure(self._shared(registered), found)
        else:
            info, registered = await self._ensure_beside(found, *known)
        await self._record(info, registered)
        if self.known_agents:
            for stream in await self.known_agents.note(
                self.recorder.agent, self.recorder.stream, self._own.filter_subjects
            ):
                await self._report_moved(stream)
        self._granted = info.config.max_ack_pending
        self._limited = anyio.Event()
        self._follow(info)
        self._note(registered)
        if len(registered) > 1:
            self._check_soon.set()
        return info

    async def ensure_retries(self, consumer: ConsumerSpec) -> ConsumerInfo:
        """Create the consumer of what is tried again, or bring it in line, with the `ack_wait` of the shared one.

        Raises as `ensure` does.
        """
        longest = self._own.ack_wait
        with suppress(BackendError):
            longest = max([longest, *(each.version.ack_wait for each in await self.registry.read())])
        wanted = specs.with_ack_wait(consumer, longest)
        info = await self.retries.ensure(wanted, await self.retries.found())
        await self.retries.record(info)
        return info

    def leaves(self, delivery: Delivery) -> bool:
        """Return whether this version does not want a delivery. It is settled soon: given back where another version
        wants it, acked where none does.
        """
        if self._wants(delivery.message.subject):
            return False
        self._undecided.append(delivery)
        self._decide_soon.set()
        return True

    async def until_limited(self) -> None:
        """Wait until the consumer has a `max_deliver` and cannot be removed: what reads it would lose notifications."""
        await self._limited.wait()

    async def keep_in_line(self) -> None:
        """Look at the consumer and the versions again and again, and settle what this version leaves."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_checking)
            tasks.start_soon(self._keep_deciding)

    async def record_last(self) -> None:
        """Record how far the consumer has come when the worker stops, where the server answers soon."""
        with clocks.move_on_after(self.recorder.backend.clock, LAST_RECORD_SECONDS), suppress(BackendError):
            found = await self.recorder.backend.consumer_info(self.recorder.stream, self.consumer.durable_name)
            await self._record(found, await self.registry.read())
            await self.retries.refresh()

    async def _record(self, found: ConsumerInfo, registered: Sequence[Registered]) -> None:
        """Record how far the consumer has come, unless it may have hidden something since it was recorded before."""
        if not self._hides(found, registered) and not any(each.narrowing for each in registered):
            await self.recorder.record(found)

    async def _ensure_beside(
        self, found: ConsumerInfo | None, before: tuple[Registered, ...], registered: tuple[Registered, ...]
    ) -> tuple[ConsumerInfo, tuple[Registered, ...]]:
        """Create the consumer, or bring it in line, so that it lets through what each registered version wants."""
        removed = found is not None and await self._removed(found, [each for each in before if each.reads])
        while True:
            found = None if removed else found
            wanted, announced = await self._announced(self._shared(registered), found)
            changes = found is None or not identities.is_as_wanted(wanted, found)
            info = await self.recorder.ensure(wanted, found)
            if not changes:
                break
            removed, registered = await self._updated(info, announced=announced)
            if not removed:
                break
        await self._note_reading(registered)
        return info, registered

    async def _announced(self, wanted: ConsumerSpec, found: ConsumerInfo | None) -> tuple[ConsumerSpec, int]:
        """Return the consumer that is wanted, and the number under which it was announced that its filter gets
        narrower, or 0. Where another version is registered by now, or another worker of this one narrows it, the filter
        stays as it is.
        """
        filters = found and (tuple(sorted(found.config.filters)) or self.everything)
        if not filters or subjects.within(filters, wanted.filter_subjects):
            return wanted, 0
        number = 1 + secrets.randbelow(versions.MAX_HEARD)

        def announce(known: tuple[Registered, ...]) -> tuple[Registered, ...]:
            known = versions.including(known, self._own)
            may = len(known) == 1 and not known[0].narrowing
            return (structs.replace(known[0], narrowing=number),) if may else known

        _, registered = await self.registry.change(announce)
        if any(each.narrowing == number for each in registered):
            return wanted, number
        return structs.replace(wanted, filter_subjects=filters), 0

    async def _updated(self, found: ConsumerInfo, *, announced: int) -> tuple[bool, tuple[Registered, ...]]:
        """Return whether the consumer was removed because this worker's update has hidden something, and the versions
        that are registered after it.
        """
        registered = versions.including(await self.registry.read(), self._own)
        removed = await self._removed(found, registered, own_update=True)
        if announced:
            _, registered = await self.registry.change(lambda known: versions.without_narrowing(known, {announced}))
        return removed, registered

    async def _report_moved(self, before: str) -> None:
        """State what the agent has left in another stream that it has read before."""
        with suppress(BackendError):  # the consumer there was removed
            left = await self.recorder.backend.consumer_info(before, self.consumer.durable_name)
            is_read = bool(left.num_waiting or left.num_ack_pending)
            self.recorder.emit(AgentMoved, before=before, left=left.lag, is_read=is_read)

    async def _register(
        self, found: ConsumerInfo | None
    ) -> tuple[tuple[Registered, ...], tuple[Registered, ...]] | None:
        """Register this version, and return those from before and from now.

        Return None where that is not possible, and the consumer has the filter of this version alone, or does not
        exist. Raises `UnavailableError` where it has another one.
        """

        def register(known: tuple[Registered, ...]) -> tuple[Registered, ...]:
            if not known and found is not None:  # created by somebody who registers no versions
                known = tuple(Registered(version=each, reads=True) for each in metadata.noted_versions(found.config))
            if [each.version for each in known] == [self._own]:
                return known  # nobody is there who could take it for gone
            return versions.with_heartbeat(known, self._own)

        try:
            return await self.registry.change(register)
        except BackendError as error:
            if found is not None and tuple(sorted(found.config.filters)) != self._own.filter_subjects:
                raise UnavailableError(
                    f"the version of agent {self.recorder.agent} cannot be registered in bucket {BUCKET}, and "
                    f"without that its consumer {self.consumer.durable_name} could hide notifications from it: {error}"
                ) from error
            self.recorder.events.emit(ConsumerNotRecorded(agent=self.recorder.agent, bucket=BUCKET, error=error))
            return None

    async def _note_reading(self, registered: Sequence[Registered]) -> None:
        """Register that the consumer lets through from now on what this version wants."""
        if any(each.version == self._own and each.reads for each in registered):
            return

        def note(known: tuple[Registered, ...]) -> tuple[Registered, ...]:
            return tuple(
                structs.replace(each, reads=True) if each.version == self._own else each
                for each in versions.including(known, self._own)
            )

        with suppress(BackendError):  # the next check does it
            await self.registry.change(note)

    def _shared(self, registered: Iterable[Registered]) -> ConsumerSpec:
        return metadata.shared(self.consumer, (each.version for each in registered), everything=self.everything)

    def _hides(self, consumer: ConsumerInfo, registered: Sequence[Registered]) -> bool:
        """Return whether the consumer's filter hides something that one of these versions wants.

        A consumer that lets through everything of the event type hides nothing, whatever its versions have noted.
        """
        filters = consumer.config.filters
        if subjects.within(self.everything, filters):
            return False
        return not all(subjects.within(each.version.filter_subjects, filters) for each in registered)

    async def _removed(
        self, found: ConsumerInfo, registered: Sequence[Registered], *, own_update: bool = False
    ) -> bool:
        """Remove the consumer where its filter hides something that one of these versions wants, and return whether it
        does.

        What an `own_update` has hidden stays hidden where somebody has widened the filter since. What was found before
        the versions were read may have been widened by the newest of them, before it read.
        """
        if not self._hides(found, registered):
            return False
        now = found if own_update else await self.recorder.found()
        if now is None or not self._hides(now, registered):
            return False
        await self._remove(now, registered)
        return True

    async def _remove(self, found: ConsumerInfo, registered: Sequence[Registered]) -> None:
        """Remove the consumer, whose filter may hide something: all workers open it again, and it begins after what is
        recorded.
        """
        wanted = self._shared(registered).filter_subjects
        self.recorder.emit(FilterHides, found=tuple(found.config.filters), wanted=wanted)
        await self.recorder.remove()

    async def _removed_limited(self, found: ConsumerInfo) -> bool:
        """Remove the consumer where somebody has given it a `max_deliver`, and return whether it has one: a paused one
        stays until it is resumed.
        """
        try:
            removed = await self.recorder.remove_limited(found)
        except BackendError:
            self._limited.set()
            raise
        return removed or (found.paused and found.config.max_deliver > 0)

    async def _keep_checking(self) -> None:
        while True:
            with clocks.move_on_after(self.recorder.backend.clock, CHECK_SECONDS):
                await self._check_soon.wait()
            await self.recorder.backend.clock.sleep(CHECK_AGAIN_SECONDS)
            self._check_soon = anyio.Event()
            with suppress(BackendError):
                await self._check()
            with suppress(BackendError):
                await self.retries.refresh()

    async def _check(self) -> None:
        found = await self.recorder.backend.consumer_info(self.recorder.stream, self.consumer.durable_name)
        self._follow(found)
        before, registered = await self.registry.change(self._still_there)
        if await self._removed_limited(found) or await self._removed(found, [each for each in before if each.reads]):
            return
        if await self._end_abandoned(registered, found):
            return
        wanted, announced = await self._announced(specs.beginning_after(self._shared(registered), found.settled), found)
        edited = _edited(wanted, found)
        if edited or not _is_in_line(wanted, found) or found.config.max_ack_pending < self._granted:
            found = await self.recorder.backend.ensure_consumer(self.recorder.stream, wanted)
            self._follow(found)
            if edited:
                self.recorder.emit(ConsumerEdited, differences=edited)
            removed, registered = await self._updated(found, announced=announced)
            if removed:
                return
        if not self._hides(found, registered):
            await self._note_reading(registered)
        await self._record(found, registered)
        self._note(registered)

    async def _end_abandoned(self, registered: Sequence[Registered], found: ConsumerInfo) -> bool:
        """End what a worker has announced that said nothing more for `GONE_SECONDS`, and return whether there was any:
        where there are other versions, its update may have hidden something from them, so the consumer is removed.
        """
        now = self.recorder.backend.clock.monotonic()
        abandoned = {number for number, since in self._narrowings.items() if now - since >= GONE_SECONDS}
        if not abandoned:
            return False
        if len(registered) > 1:
            await self._remove(found, registered)
        await self.registry.change(lambda known: versions.without_narrowing(known, abandoned))
        return True

    def _still_there(self, known: tuple[Registered, ...]) -> tuple[Registered, ...]:
        """Return the versions that live, this one among them, and count up its number where there are several."""
        now = self.recorder.backend.clock.monotonic()
        if now - self._checked_at > 2 * CHECK_SECONDS + CHECK_AGAIN_SECONDS:
            self._heard.clear()  # without an answer for so long, the others may have been cut off as well
            self._narrowings.clear()
        self._checked_at = now
        heard = {(each.version, each.heard) for each in known}
        self._heard = {each: self._heard.get(each, now) for each in heard}
        narrowings = {each.narrowing for each in known} - {0}
        self._narrowings = {number: self._narrowings.get(number, now) for number in narrowings}
        living = tuple(
            each
            for each in versions.including(known, self._own)
            if each.version == self._own or each.narrowing or now - self._heard[each.version, each.heard] < GONE_SECONDS
        )
        own = [since for (version, _), since in self._heard.items() if version == self._own]
        if own and (len(living) == 1 or now - own[0] < CHECK_SECONDS):
            return living
        return versions.with_heartbeat(living, self._own)

    async def _keep_deciding(self) -> None:
        while True:
            await self._decide_soon.wait()
            self._decide_soon = anyio.Event()
            await self._decide()

    async def _decide(self) -> None:
        """Settle what this version leaves, by the versions that are registered after it came."""
        undecided, self._undecided = self._undecided, []
        try:
            self._note(await self.registry.read())
        except BackendError:
            for delivery in undecided:
                acknowledging.leave_to_others(delivery)
            return
        for delivery in undecided:
            if any(wants(delivery.message.subject) for wants in self._others.values()):
                acknowledging.leave_to_others(delivery)
            else:
                acknowledging.settle(delivery, Ack())

    def _note(self, registered: Sequence[Registered]) -> None:
        functions = tuple(sorted({each.version.function for each in registered} - {self._own.function, ""}))
        if self._own.function and functions != self._other_functions:
            self._other_functions = functions
            self.recorder.emit(FunctionsDiffer, own=self._own.function, others=functions)
        before = self._others.keys()
        others = {each.version.filter_subjects for each in registered} - {self._own.filter_subjects}
        if others == before:
            return
        self._others = {filters: subjects.matcher(filters) for filters in sorted(others)}
        own, gone = self._own.filter_subjects, tuple(before - others)
        self.recorder.emit(FiltersDiffer, own=own, others=tuple(self._others), gone=gone)

    def _follow(self, consumer: ConsumerInfo) -> None:
        """Let the worker report what it holds often enough for the `ack_wait` that the server has now."""
        ack_wait = consumer.config.ack_wait
        if ack_wait == self._in_effect:
            return
        self._in_effect = ack_wait
        own_seconds, in_effect_seconds = self._own.ack_wait / SECOND, ack_wait / SECOND
        self.on_ack_wait(min(own_seconds, in_effect_seconds))
        self.recorder.emit(AckWaitDiffers, own_seconds=own_seconds, in_effect_seconds=in_effect_seconds)


def _edited(wanted: ConsumerSpec, found: ConsumerInfo) -> tuple[str, ...]:
    """Return what of the consumer is not as wanted that all versions of an agent want alike."""
    differences = plans.consumer_differences(wanted, found.config)
    return tuple(str(each) for each in differences if each.field in ALIKE)


def _is_in_line(wanted: ConsumerSpec, found: ConsumerInfo) -> bool:
    filters = tuple(sorted(found.config.filters))
    return filters == wanted.filter_subjects and found.config.ack_wait == wanted.ack_wait
