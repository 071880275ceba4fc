"""A function that loops over its notifications, as a Faust agent does.

A notification is settled when the loop asks for the next one. An exception concerns those that were handed out and
not settled; they are judged like any other failure, and the function is started again with the next notification.
"""

from __future__ import annotations

from typing import Any

from aviso_workers import clocks
from aviso_workers.agents import Agent
from aviso_workers.backends import Delivery
from aviso_workers.clocks import Clock
from aviso_workers.codec import NotificationReader
from aviso_workers.engine.handling import caller
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.originating import Origin
from aviso_workers.engine.pacing import Pace
from aviso_workers.engine.returning import Outputs
from aviso_workers.engine.settling import Settler
from aviso_workers.errors import UndecodableError
from aviso_workers.notifications import Notification, Stream

__all__ = ["AsStream"]


class AsStream:
    """Runs `async def agent(stream: Stream[T])`."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        *,
        line: Line,
        reader: NotificationReader,
        outputs: Outputs,
        settler: Settler,
        clock: Clock,
    ) -> None:
        self._call = caller(agent, clock, outputs=outputs)
        self._line = line
        self._reader = reader
        self._outputs = outputs
        self._settler = settler
        self._clock = clock
        self._pace = Pace(clock, per_second=agent.policy.rate_limit)

    async def work(self) -> None:
        """See `pulling.Form`. The function is run again and again, each time when there is something for it."""
        origin = self._outputs.origin()
        while (delivery := await self._line.take()) is not None:
            source = _Source(
                delivery,
                origin=origin,
                line=self._line,
                reader=self._reader,
                settler=self._settler,
                clock=self._clock,
                pace=self._pace,
            )
            outcome: object = None
            try:
                await self._outputs.publish(await self._call(Stream(source)))
            except Exception as raised:
                outcome = raised
            await source.end(outcome)


class _Source:
    """What one run of the function takes from the line, beginning with a delivery that was taken already."""

    def __init__(
        self,
        first: Delivery,
        *,
        origin: Origin,
        line: Line,
        reader: NotificationReader,
        settler: Settler,
        clock: Clock,
        pace: Pace,
    ) -> None:
        self._next_up: Delivery | None = first
        """Taken from the line, and not handed out yet."""
        self._origin = origin
        self._line = line
        self._reader = reader
        self._settler = settler
        self._clock = clock
        self._pace = pace
        self._handed_out: list[tuple[Delivery, float]] = []

    async def next(self, *, within_seconds: float | None = None) -> Notification[Any] | None:
        """The next notification; None when the line is closed, or nothing came in time.

        The time counts from when the first was handed out of those that are not settled.
        """
        if within_seconds is None:
            return await self._next()
        now = self._clock.monotonic()
        begun = self._handed_out[0][1] if self._handed_out else now
        with clocks.move_on_after(self._clock, max(0.0, begun + within_seconds - now)):
            return await self._next()
        return None

    async def settle(self) -> None:
        """What was handed out is done."""
        await self._settle(None)

    async def end(self, outcome: object) -> None:
        """The function has returned, or raised: that concerns what it was given, or the first if it took nothing."""
        await self._settle(outcome)
        if self._next_up is not None:
            nothing_taken = outcome or RuntimeError("the function returned and has asked for no notification")
            await self._settler.settle(self._next_up, nothing_taken, started=self._clock.monotonic())

    async def _settle(self, outcome: object) -> None:
        handed_out, self._handed_out = self._handed_out, []
        self._origin.begin()
        for delivery, started in handed_out:
            await self._settler.settle(delivery, outcome, started=started)

    async def _next(self) -> Notification[Any] | None:
        while (delivery := self._next_up or await self._line.take()) is not None:
            self._next_up = delivery
            started = self._clock.monotonic()
            try:
                notification = self._reader.notification(delivery.message, num_delivered=delivery.num_delivered)
            except UndecodableError as error:
                self._next_up = None
                await self._settler.settle(delivery, error, started=started)
                continue
            if notification is None:
                self._next_up = None
                self._settler.pass_over(delivery)
                continue
            await self._pace.wait()
            self._next_up = None
            self._handed_out.append((delivery, self._clock.monotonic()))
            self._origin.also(delivery.message)
            return notification
        return None
