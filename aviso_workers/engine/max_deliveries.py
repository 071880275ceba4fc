"""Notifications whose worker died on their last delivery.

No worker is left to store the dead letter: the server delivers it no more and says so by an advisory, which is lost
where nobody listens. So the advisories are kept in a stream. Each app reads all of them, acks those of other
apps, and stores a dead letter for each of its own. It knows its own by the name of the durable consumer,
`<app>__<agent>`, and not by the agents that it has: an older worker beside a newer one, or one that runs some of the
agents, stores the dead letters of agents that it does not know, and what a retired agent left behind is kept as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from msgspec import Meta, Struct

from aviso_workers.aviso.codec import is_marker, read_json
from aviso_workers.backends import Backend, Delivery
from aviso_workers.config import Config, streams
from aviso_workers.declare import agents
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import Ack, Nak, Settlement
from aviso_workers.engine import acknowledging, internal, parts
from aviso_workers.engine.acknowledging import Exceeded
from aviso_workers.engine.dead_letter_store import RETRIES, DeadLetterStore, unwrap
from aviso_workers.engine.feeds import Feed
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.engine.replay import message_at
from aviso_workers.engine.subscription import Subscription, consumer_spec
from aviso_workers.errors import BackendError, NotFoundError, UndecodableError
from aviso_workers.events import Events
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.fields import DAY
from aviso_workers.jetstream.specs import StreamSpec

__all__ = ["ADVISORIES", "NAME", "STREAM", "SUBJECT", "advisories_spec", "subscription"]

STREAM = "aviso_workers_advisories"
SUBJECT = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
ADVISORIES = f"{SUBJECT}.>"
"""Always the whole of them: a filter that depends on the agents of one worker would hide those of another."""
NAME = "dead-letter-sweep"
ACK_WAIT_SECONDS = 60.0
PREFETCH = 16
KEPT_DAYS = 7
AGAIN_SECONDS = 10.0


class _Advisory(Struct, frozen=True):
    stream: str
    consumer: str
    stream_seq: Annotated[int, Meta(ge=1)]
    deliveries: Annotated[int, Meta(ge=1)]


def subscription(
    known: Iterable[Agent[Any, Any]],
    *,
    backend: Backend,
    app: str,
    config: Config,
    own_streams: Provisioner,
    dead_letters: DeadLetterStore,
    events: Events,
) -> Subscription:
    """Return the subscription that stores the dead letters of notifications that exceeded `max_deliver`.

    `known` are the app's agents in this worker.
    """
    event_types = {agent.name: agent.event_type for agent in known}
    exceeded = _MaxDeliveries(backend, app=app, event_types=event_types, dead_letters=dead_letters, events=events)
    consumer = consumer_spec(agents.durable_name(app, NAME), (ADVISORIES,), ACK_WAIT_SECONDS)
    return internal.subscription(
        NAME,
        exceeded.handle,
        Feed(stream=advisories_spec(config), consumer=consumer, provisioner=own_streams),
        workers=1,
        prefetch=PREFETCH,
        unreadable_reason="no advisory",
        clock=backend.clock,
        events=events,
    )


class _MaxDeliveries:
    """Handles advisories: stores the dead letters of notifications that exceeded `max_deliver`."""

    def __init__(
        self,
        backend: Backend,
        *,
        app: str,
        event_types: Mapping[str, str],
        dead_letters: DeadLetterStore,
        events: Events,
    ) -> None:
        self._backend = backend
        self._prefix = agents.durable_name(app, "")
        self._event_types = event_types
        """By agent, as far as this worker knows them."""
        self._dead_letters = dead_letters
        self._events = events

    async def handle(self, delivery: Delivery) -> Settlement:
        """Return how the advisory is settled. Raises `UndecodableError`."""
        advisory = read_json(delivery.message.data, _Advisory)
        try:
            exceeded = await self._find(advisory)
        except BackendError:
            return Nak(AGAIN_SECONDS)
        stored = exceeded is None or await acknowledging.dead_letter_exceeded(
            exceeded, self._dead_letters, clock=self._backend.clock, events=self._events
        )
        return Ack() if stored else Nak(AGAIN_SECONDS)

    async def _find(self, advisory: _Advisory) -> Exceeded | None:
        """Return the notification that an advisory is about; None where it is another app's, or gone."""
        if not advisory.consumer.startswith(self._prefix):
            return None
        stream, agent = advisory.stream, advisory.consumer.removeprefix(self._prefix)
        if not (specs.is_name(stream) and agents.NAME.fullmatch(agent)):  # both become part of subjects
            raise UndecodableError(f"no consumer {advisory.consumer!r} of a stream {stream!r}")
        try:
            message = await message_at(self._backend, stream, advisory.stream_seq)
        except NotFoundError:
            return None  # the stream itself is gone, and the notification with it
        if message is None or is_marker(message):
            return None  # replaced or deleted meanwhile, or never a notification
        if stream == RETRIES:
            with suppress(UndecodableError):  # it becomes a dead letter without its first part
                message = await parts.whole(self._backend, RETRIES, message)
            message, stream = unwrap(message)
        return Exceeded(
            agent=agent,
            event_type=self._event_types.get(agent, stream),
            stream=stream,
            message=message,
            deliveries=advisory.deliveries,
        )


def advisories_spec(config: Config) -> StreamSpec:
    """Return the stream of the advisories."""
    return streams.own_stream(STREAM, ADVISORIES, config, max_age=KEPT_DAYS * DAY)
