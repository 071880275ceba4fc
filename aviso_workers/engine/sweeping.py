"""Notifications whose worker died on their last delivery.

No worker is left to store the dead letter: the server gives up and says so by an advisory, which is lost where nobody
listens. So the advisories are kept in a stream. Each app reads all of them, acks those of other apps, and stores a dead
letter for each of its own. It knows its own by the name of the durable consumer, `<app>__<agent>`, and not by the
agents that it has: an older worker beside a newer one, or one that runs some of the agents, stores the dead letters of
agents that it does not know, and what a retired agent left behind is kept as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal

from msgspec import Meta, Struct

from aviso_workers.agents import NAME, durable_name
from aviso_workers.backends import Backend
from aviso_workers.codec import Message, is_marker, read_json
from aviso_workers.config import Config, streams
from aviso_workers.engine import parts
from aviso_workers.engine.dead_lettering import RETRIES, DeadLetters, unwrap
from aviso_workers.engine.ordering import Line
from aviso_workers.engine.replaying import message_at
from aviso_workers.errors import BackendError, NotFoundError, UndecodableError
from aviso_workers.events import Events, Settled, Unreadable
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.fields import DAY
from aviso_workers.jetstream.specs import StreamSpec

__all__ = ["ADVISORIES", "STREAM", "SUBJECT", "Sweep", "advisories_spec"]

STREAM = "aviso_workers_advisories"
SUBJECT = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
ADVISORIES = f"{SUBJECT}.>"
"""Always the whole of them: a filter that depends on the agents of one worker would hide those of another."""
KEPT_DAYS = 7
AGAIN_SECONDS = 10.0
REASON = "max_deliveries"


class _Advisory(Struct, frozen=True):
    stream: str
    consumer: str
    stream_seq: Annotated[int, Meta(ge=1)]
    deliveries: Annotated[int, Meta(ge=1)]


class Sweep:
    """A call form (see `pulling.Form`) of no author's: its notifications are advisories."""

    def __init__(
        self,
        backend: Backend,
        *,
        line: Line,
        app: str,
        event_types: Mapping[str, str],
        dead_letters: DeadLetters,
        events: Events,
    ) -> None:
        self._backend = backend
        self._line = line
        self._prefix = durable_name(app, "")
        self._event_types = event_types
        """By agent, as far as this worker knows them."""
        self._dead_letters = dead_letters
        self._events = events

    async def work(self) -> None:
        while (delivery := await self._line.take()) is not None:
            try:
                await self._sweep(read_json(delivery.message.data, _Advisory))
            except BackendError:
                delivery.nak(delay_seconds=AGAIN_SECONDS)
            except UndecodableError as error:
                delivery.term("no advisory")
                self._events.emit(Unreadable(stream=STREAM, sequence=delivery.message.sequence, error=error))
            else:
                delivery.ack()
            self._line.done(delivery)

    async def _sweep(self, advisory: _Advisory) -> None:
        if not advisory.consumer.startswith(self._prefix):
            return  # another app's
        stream, agent = advisory.stream, advisory.consumer.removeprefix(self._prefix)
        if not (specs.is_name(stream) and NAME.fullmatch(agent)):  # both become part of subjects
            raise UndecodableError(f"no consumer {advisory.consumer!r} of a stream {stream!r}")
        try:
            message = await message_at(self._backend, stream, advisory.stream_seq)
        except NotFoundError:
            return  # the stream itself is gone, and the notification with it
        if message is None or is_marker(message):
            return  # replaced or deleted meanwhile, or never a notification
        if stream == RETRIES:
            with suppress(UndecodableError):  # it becomes a dead letter without its first part
                message = await parts.whole(self._backend, RETRIES, message)
            message, stream = unwrap(message)
        deliveries = advisory.deliveries
        try:
            await self._dead_letters.bury(
                message, agent=agent, stream=stream, reason=REASON, attempts=deliveries, error=None
            )
        except BackendError as error:
            self._state(
                agent, message, stream, "retried", reason="dead_letter_failed", deliveries=deliveries, error=error
            )
            raise
        self._state(agent, message, stream, "dead_lettered", reason=REASON, deliveries=deliveries, error=None)

    def _state(
        self,
        agent: str,
        message: Message,
        stream: str,
        outcome: Literal["retried", "dead_lettered"],
        *,
        reason: str,
        deliveries: int,
        error: Exception | None,
    ) -> None:
        self._events.emit(
            Settled(
                agent=agent,
                event_type=self._event_types.get(agent, stream),
                sequence=message.sequence,
                outcome=outcome,
                reason=reason,
                seconds=0.0,
                waited_seconds=0.0,
                stored_to_settled_seconds=(self._backend.clock.time_ns() - message.timestamp_ns) / 1e9,
                num_delivered=deliveries,
                error=error,
            )
        )


def advisories_spec(config: Config) -> StreamSpec:
    """The stream of the advisories."""
    return streams.own_stream(STREAM, ADVISORIES, config, max_age=KEPT_DAYS * DAY)
