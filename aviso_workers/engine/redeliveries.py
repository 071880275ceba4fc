"""The way of a delivery to its handler where it is not its notification's first, or has no body here.

A notification whose handler ends its process (a crash in a library, memory used up) takes along whatever the process
held, and the server delivers all of it again. How often it was delivered does not tell it from what was given back by
workers that stop, or by those of another version. So what came back without a failure begins after a record of that. A
record that is still there when the notification comes again says that the process ended while it ran. It may have been
this one: it is run alone (`flow.Isolation`), and recorded as such. Where its process ends again, it was this one. That
is a failure like any other: it counts as an attempt. What never began is run, and counts as nothing.

A message whose body the server has left out, because somebody has edited the consumer (`headers_only`), is read from
its stream.

A notification about which a person has decided (`decisions`) is run or skipped whatever else is known of it.
"""

from __future__ import annotations

from functools import partial

import anyio
from msgspec import Struct, field

from aviso_workers.aviso.codec import lacks_body
from aviso_workers.backends import Backend, Delivery
from aviso_workers.declare import verdicts
from aviso_workers.declare.verdicts import Failure, Nak, PriorRecord
from aviso_workers.engine import acknowledging
from aviso_workers.engine.acknowledging import Settler
from aviso_workers.engine.dispatch import ASKED, BEHIND, GATE
from aviso_workers.engine.flow import Isolation
from aviso_workers.errors import BackendError, DeliveriesExhaustedError, NotFoundError, SkippedError, WorkerDiedError
from aviso_workers.events import NotReadAgain, ReadAgain

READS_AT_ONCE = 8
READ_AGAIN_SECONDS = 1.0
"""How long a message waits that could not be read."""
QUIET_SECONDS = 15.0
"""Longer than a read that fails takes, and the wait after it: where none has failed for so long, there was none."""
SAME_TIME_NS = 1000
"""A message that is read again has its time in microseconds."""


class Redeliveries(Struct, eq=False, kw_only=True):
    """Lets the redelivered notifications of one agent run, alone where they may end their process."""

    backend: Backend
    settler: Settler
    isolation: Isolation
    reads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(READS_AT_ONCE))
    reported: bool = False
    """Whether it was stated that a message cannot be read."""
    failed_at: float = 0.0
    """When a message could not be read the last time."""

    async def work(self) -> None:
        """Take from the flow what was delivered again or has no body, until the flow is closed."""
        async with anyio.create_task_group() as tasks:
            while (delivery := await self.settler.flow.take_redelivered()) is not None:
                if not self._admit_known(delivery):
                    tasks.start_soon(self._decide, delivery)

    async def end(self) -> None:
        """Remove the records of handlers that began and were cancelled, now that none runs any more."""
        self.settler.call_back()
        await self.settler.failures.clear_all()

    def _admit_known(self, delivery: Delivery) -> bool:
        """Let it run where that can be said at once, as of most that have failed: a task for each would cost more."""
        record = delivery.record or self.settler.failures.recall(delivery)
        if record is None or lacks_body(delivery.message):
            return False
        delivery.record = record
        known = verdicts.before_handling(
            record, num_delivered=delivery.num_delivered, retry=self.settler.agent.policy.retry
        )
        if known != "run" or self.settler.decisions.pending(delivery) is not None:
            return False
        self._run(delivery, record)
        return True

    def _run(self, delivery: Delivery, record: PriorRecord | None, *, at_once: bool = False) -> None:
        if at_once or record is None or not self.settler.postpone(delivery, record):
            self.settler.flow.admit(delivery, tried=record is not None and record.tried, at_once=at_once)

    async def _decide(self, delivery: Delivery) -> None:
        if lacks_body(delivery.message) and not await self._read(delivery):
            return
        record = delivery.record
        if record is None and delivery.num_delivered > 1:
            record = await self.settler.failures.read(delivery)
            await self.settler.decisions.read(delivery)
        if delivery.place != ASKED:
            return  # an earlier one of its key came meanwhile, or it was given back
        delivery.record = record
        if record is None:
            self._run(delivery, record)
            return
        decision = self.settler.decisions.pending(delivery)
        if decision is not None and decision.decides == "skip":
            skipped = SkippedError(record.failures, decision.last_error, by=decision.by)
            await self._fail(delivery, Failure(skipped, final="skipped"))
            return
        known = verdicts.before_handling(
            record, num_delivered=delivery.num_delivered, retry=self.settler.agent.policy.retry
        )
        known = "run" if delivery.num_delivered == 1 else known
        await self._carry_out(known, delivery, record, at_once=decision is not None)

    async def _carry_out(
        self, known: verdicts.Known, delivery: Delivery, record: PriorRecord, *, at_once: bool
    ) -> None:
        """Run the handler of a delivery, or settle the delivery without that, as `verdicts.before_handling` says."""
        match known:
            case "run":
                self._run(delivery, record, at_once=at_once)
            case "run_recorded":
                delivery.begin = partial(self._begin, delivery, alone=False)
                self.settler.flow.admit(delivery, tried=record.tried, at_once=at_once)
            case "run_alone":
                await self._run_alone(delivery)
            case "worker_died":
                await self._fail(delivery, Failure(WorkerDiedError(record.failures + 1), worker_died=True))
            case "max_deliveries":
                exhausted = DeliveriesExhaustedError(delivery.num_delivered)
                await self._fail(delivery, Failure(exhausted, final="max_deliveries"))

    async def _read(self, delivery: Delivery) -> bool:
        """Read the message of a delivery again, and return whether it could be read."""
        try:
            async with self.reads:
                message = await self.backend.message(self.settler.stream, delivery.message.sequence)
        except NotFoundError:
            message = None
        except BackendError as error:
            self._note_unread(delivery, error)
            if self.settler.flow.dispatch.start(delivery):
                self.settler.flow.retry_later(delivery, after_seconds=READ_AGAIN_SECONDS)
            return False
        self._note_readable()
        if message is None or abs(message.timestamp_ns - delivery.message.timestamp_ns) > SAME_TIME_NS:
            acknowledging.settle(delivery, Nak())  # it has left the stream: a server delivers no such message again
            self.settler.flow.finish(delivery)
            return False
        if self.settler.flow.holds(delivery):
            self.settler.flow.replace(delivery, message)
        return True

    def _note_unread(self, delivery: Delivery, error: BackendError) -> None:
        """State, once, why what waits does not begin."""
        self.failed_at = self.settler.clock.monotonic()
        self.settler.clock.call_at(self.failed_at + QUIET_SECONDS, self._end_if_quiet)
        if self.reported:
            return
        self.reported = True
        sequence = delivery.message.sequence
        self.settler.events.emit(
            NotReadAgain(agent=self.settler.agent.name, stream=self.settler.stream, sequence=sequence, error=error)
        )

    def _end_if_quiet(self) -> None:
        """Report that messages can be read again, once none failed for a while: it may have left with its stream."""
        if self.settler.clock.monotonic() >= self.failed_at + QUIET_SECONDS:
            self._note_readable()

    def _note_readable(self) -> None:
        if self.reported:
            self.reported = False
            self.settler.events.emit(ReadAgain(agent=self.settler.agent.name, stream=self.settler.stream))

    async def _run_alone(self, delivery: Delivery) -> None:
        if self.settler.flow.put_off(delivery):
            return
        async with self.isolation.of(delivery):
            if self.settler.flow.closed or delivery.place != ASKED or self.settler.flow.put_off(delivery):
                return
            delivery.begin = partial(self._begin, delivery, alone=True)
            self.settler.flow.admit(delivery, tried=True, alone=True)
            try:
                await self.isolation.ended()
            finally:
                if delivery.place not in (BEHIND, GATE):
                    async with self.settler.shield.hold():  # before it is given back, or it would count as a failure
                        await self.settler.failures.clear(delivery)

    async def _begin(self, delivery: Delivery, *, alone: bool) -> None:
        async with self.settler.shield.hold():  # a worker that is cancelled here would lose the delivery that it takes
            await self.settler.failures.begin(delivery, alone=alone)

    async def _fail(self, delivery: Delivery, failure: Failure) -> None:
        if not self.settler.flow.dispatch.start(delivery):
            return
        await self.settler.settle(delivery, failure, started=self.settler.clock.monotonic())
