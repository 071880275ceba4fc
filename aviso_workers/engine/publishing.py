"""One notification on its way to its stream: checked, encoded, sent, and tried again until it is acknowledged.

Every publish carries a message id, so that trying again after a lost acknowledgement cannot store it twice. Waiting
between attempts happens here and nowhere below.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import anyio

from aviso_workers import codec, schema, streams
from aviso_workers.backends import Backend, PubAck
from aviso_workers.codec import Message
from aviso_workers.config import Config
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.errors import (
    BackendError,
    InvalidPayloadError,
    OutcomeUnknownError,
    UnavailableError,
    UnknownEventTypeError,
)
from aviso_workers.events import Events, Published
from aviso_workers.notifications import Notify, Receipt
from aviso_workers.streams import StreamSpec

__all__ = ["Publisher", "encode"]

ACK_TIMEOUT_SECONDS = 5.0
"""How long one attempt waits for its acknowledgement."""
LONGEST_DELAY_SECONDS = 1.0
"""Attempts do not get rarer than this: an election ends within seconds, and nobody should wait much longer than it."""
WINDOW = 256
"""Publishes under way at once when many are to be stored."""
HEADER_ALLOWANCE = 512
"""Bytes of a message that our own headers may take."""


def encode(config: Config, wanted: Notify) -> Message:
    """The message that a notification is on the wire. Raises `InvalidNotificationError`."""
    event_type = config.notification_schema.get(wanted.event_type)
    if event_type is None:
        raise UnknownEventTypeError(wanted.event_type, config.notification_schema)
    identifier = schema.canonical_identifier(wanted.event_type, event_type, wanted.identifier)
    return codec.encode(wanted.event_type, event_type, identifier, wanted.payload)


class Publisher:
    """Publishes the notifications of one configuration through one backend."""

    def __init__(self, backend: Backend, *, config: Config, provisioner: Provisioner, events: Events) -> None:
        self._backend = backend
        self._config = config
        self._settings = config.notification_backend.jetstream
        self._provisioner = provisioner
        self._events = events

    async def notify(self, wanted: Notify) -> Receipt:
        """Store one notification and return the receipt.

        Raises `InvalidNotificationError` before anything is sent, `RefusedError` where trying again would not help,
        and when `publish_deadline_seconds` are over `UnavailableError`, or `OutcomeUnknownError` if any of the
        attempts may have stored it.
        """
        message = encode(self._config, wanted)
        size = len(message.data) + sum(len(key) + len(value) for key, value in (message.headers or {}).items())
        if size + HEADER_ALLOWANCE > self._backend.max_payload:
            raise InvalidPayloadError(
                f"{wanted.event_type}: the notification has {size} bytes, the server takes {self._backend.max_payload}"
            )
        spec = streams.event_stream(
            wanted.event_type, self._config.notification_schema[wanted.event_type], self._config
        )
        ack = await self._until_acknowledged(wanted.event_type, message, spec, wanted.message_id or uuid.uuid4().hex)
        return Receipt(stream=ack.stream, sequence=ack.sequence, duplicate=ack.duplicate)

    async def notify_many(self, wanted: Iterable[Notify]) -> int:
        """Store all of them, some at a time, and return how many there were.

        They are taken from the iterable as they can be sent; their order in the stream may differ slightly. Raises
        as `notify` does, at the first that fails; what was sent before may be stored.
        """
        taking, count = iter(wanted), 0
        failure: Exception | None = None

        async def take() -> None:
            nonlocal count, failure
            try:
                for notification in taking:
                    await self.notify(notification)
                    count += 1
            except Exception as error:  # ours, or whatever the iterable raises
                failure = failure or error  # raised below, outside of the group, so that it arrives as itself
                sending.cancel_scope.cancel()

        async with anyio.create_task_group() as sending:
            for _ in range(WINDOW):
                sending.start_soon(take)
        if failure is not None:
            raise failure
        return count

    async def _until_acknowledged(self, event_type: str, message: Message, spec: StreamSpec, message_id: str) -> PubAck:
        clock = self._backend.clock
        deadline = clock.monotonic() + self._settings.publish_deadline_seconds
        attempt = 1
        outcome: type[BackendError] = UnavailableError
        while True:
            try:
                await self._provisioner.ensure(spec)
                ack = await self._backend.publish(
                    message, message_id=message_id, stream=spec.name, timeout_seconds=ACK_TIMEOUT_SECONDS
                )
            except (UnavailableError, OutcomeUnknownError) as error:
                if isinstance(error, OutcomeUnknownError):
                    outcome = OutcomeUnknownError
                else:
                    self._provisioner.forget(spec.name)
                delay = self._delay_seconds(attempt)
                in_time = clock.monotonic() + delay < deadline
                if not in_time and attempt >= self._settings.publish_retry_attempts:
                    self._emit(event_type, "failed", attempt)
                    raise outcome(f"{error}; given up after {attempt} attempts", code=error.code) from error
                await clock.sleep(delay)
                attempt += 1
            except BackendError:
                self._emit(event_type, "failed", attempt)
                raise
            else:
                self._emit(event_type, "duplicate" if ack.duplicate else "stored", attempt)
                return ack

    def _delay_seconds(self, attempt: int) -> float:
        base = self._settings.publish_retry_base_delay_ms / 1000
        return float(min(max(LONGEST_DELAY_SECONDS, base), base * 2 ** min(attempt - 1, 32)))

    def _emit(self, event_type: str, outcome: Any, attempts: int) -> None:
        self._events.emit(Published(event_type=event_type, outcome=outcome, attempts=attempts))
