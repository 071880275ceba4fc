"""One notification on its way to its stream: checked, encoded, sent, and tried again until it is acknowledged.

Every publish carries a message id, so that trying again after a lost acknowledgement cannot store it twice. Waiting
between attempts happens here and nowhere below.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from functools import partial
from typing import NoReturn, TypeVar

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso import literals, payloads
from aviso_workers.aviso.codec import Message, NotificationWriter, with_headers
from aviso_workers.aviso.notifications import Notify, Receipt
from aviso_workers.backends import Backend, Outgoing, OutgoingChunk, PubAck
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config, streams
from aviso_workers.declare import around
from aviso_workers.declare.around import Changing
from aviso_workers.declare.retry import Backoff, Tries
from aviso_workers.engine import key_orders, singletons
from aviso_workers.errors import (
    BackendError,
    ConflictError,
    FullError,
    InvalidNotificationError,
    InvalidPayloadError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from aviso_workers.events import Events, Published, PublishOutcome
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.state import delayed_messages

C = TypeVar("C")

ACK_TIMEOUT_SECONDS = 5.0
"""How long one attempt waits for its acknowledgement."""
LONGEST_DELAY_SECONDS = 1.0
"""Attempts do not get rarer than this: an election ends within seconds, and nobody should wait much longer than it."""
MAY_PASS = (UnavailableError, OutcomeUnknownError, FullError)
"""Errors that the next attempt may cure. A full stream may have room again: publishers wait for it."""
CHUNK = 500
"""Notifications that are sent together when many are to be stored."""
CHUNK_BYTES = 1024 * 1024
CHUNKS_UNDER_WAY = 3
MAX_TOGETHER = 1000
"""A server's own limit of an atomic batch."""
HEADER_ALLOWANCE = 12 * 1024
"""Bytes that headers may take, also those of the dead letter that it may become, with its subject and an error."""
DIGEST_BYTES = 12
OF_DEAD_LETTERS = "=on_dead_letter"
"""Follows the agent's name in what tables remember of the updates of its function of `on_dead_letter`."""


def encode(config: Config, wanted: Notify) -> Message:
    """Return the message that a notification is on the wire. Raises `InvalidNotificationError`."""
    _require_sound(wanted)
    declared = config.event_type(wanted.event_type)
    if delayed_messages.is_later(wanted):
        delayed_messages.due_of(wanted, now=datetime.now(UTC))
    if wanted.ttl is not None:
        _whole_seconds(wanted.event_type, wanted.ttl)
    message = NotificationWriter(wanted.event_type, declared).message(wanted.identifier, wanted.payload)
    return with_headers(wanted.event_type, message, wanted.headers) if wanted.headers else message


def _require_sound(wanted: Notify) -> None:
    """Raise `InvalidNotificationError` for what is no notification, and as `_require_printable` does."""
    if not isinstance(wanted, Notify):
        raise InvalidNotificationError(
            f"a notification to be published must be a Notify(event_type, identifier, payload), found {wanted!r:.100}"
        )
    if not isinstance(wanted.event_type, str):
        raise InvalidNotificationError(
            f"the event type of a notification must be text, found {wanted.event_type!r:.100}"
        )
    _require_printable(wanted.event_type, wanted.message_id)


def _require_printable(event_type: str, message_id: str | None) -> None:
    """Raise `InvalidNotificationError` for a message id that a header would carry as another one."""
    if message_id and not (
        isinstance(message_id, str) and message_id.isprintable() and message_id == message_id.strip()
    ):
        raise InvalidNotificationError(
            f"{event_type}: message id {message_id!r:.100}: it must be printable text without spaces at its ends"
        )


def size_of(data: bytes, headers: Mapping[str, str] | None) -> int:
    """Return how many bytes the payload and the headers of a message have."""
    return len(data) + sum(len(key) + len(value) for key, value in headers.items()) if headers else len(data)


def too_large(event_type: str, size: int, *, most: int) -> InvalidPayloadError:
    """Return the error of a notification that has more bytes than its server takes."""
    return InvalidPayloadError(
        f"{event_type}: the notification has {size} bytes, the server takes {most} and its headers"
    )


class _Prepared(Struct, gc=False):
    """A notification that is ready to be sent."""

    event_type: str
    spec: StreamSpec
    outgoing: Outgoing
    later: Notify | None = None
    """The notification with its time of delivery, until it is known whether it has to wait."""
    schedule: Outgoing | None = None
    """The message that is sent in its place, if it has to wait."""
    due: datetime | None = None
    answer: PubAck | ConflictError | None = None
    """The acknowledgement, or where that is asked for, the refusal because it expects another state of the stream."""
    in_doubt: bool = False
    """Whether it may be stored: neither a refusal nor a missing connection at a later attempt says that it is not."""


class Publisher:
    """Publishes the notifications of one configuration through one backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        config: Config,
        provisioner: Provisioner,
        own_streams: Provisioner,
        events: Events,
    ) -> None:
        self.outgoings: Sequence[Changing] = ()
        """The functions of the app that change what is published."""
        self._backend = backend
        self._config = config
        self._settings = config.notification_backend.jetstream
        self.patience_seconds = self._settings.publish_deadline_seconds
        base_seconds = self._settings.publish_retry_base_delay_ms / 1000
        longest_seconds = max(LONGEST_DELAY_SECONDS, base_seconds)
        self._backoff = Backoff(first=base_seconds, factor=2.0, max=longest_seconds, jitter=0.0)
        self._provisioner = provisioner
        self._own_streams = own_streams
        self._events = events
        self._writers: dict[str, tuple[NotificationWriter, StreamSpec]] = {}
        """By event type, and its stream."""
        self._orders: set[str] | None = None
        """The streams whose key order was compared; None where none is."""
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def compare_key_orders(self) -> None:
        """Publish from now on only to streams that are read with the key order of the configuration: see `key_orders`.
        This needs the rights of a worker. Other notifications are refused.
        """
        self._orders = self._orders or set()

    async def notify(self, wanted: Notify) -> Receipt:
        """Store one notification, or have it wait until it is due, and return the receipt.

        Raises `InvalidNotificationError` before anything is sent, `RefusedError` where trying again would not help,
        and `UnavailableError` when `publish_deadline_seconds` are over; in place of both `OutcomeUnknownError` if any
        of the attempts may have stored it.
        """
        prepared = self._prepare(wanted)
        await self._store([prepared])
        return _receipt(prepared)

    async def notify_together(self, wanted: Iterable[Notify], *, message_id: str | None) -> Receipt:
        """Store all of them, in this order, or none; the receipt is that of the last. Raises as `notify` does."""
        chunk = self._as_one(list(wanted), message_id=message_id)
        await self._store(chunk, together=True)
        return _receipt(chunk[-1])

    async def notify_many(self, wanted: Iterable[Notify], *, answered: bool = False) -> int:
        """Store all of them, some at a time, and return how many there were.

        With `answered`, the server answers for each, so that `Published` states each one whose id the stream knew.

        They are taken from the iterable as they can be sent; their order in the stream may differ where one is tried
        again. Raises as `notify` does, at the first that fails; what was sent before may be stored.
        """
        return await self._store_all(_chunks(map(self._prepare, wanted)), partial(self._store, answered=answered))

    async def store_chunk(self, event_type: str, chunk: OutgoingChunk) -> int:
        """Store notifications of one event type that are messages already, each with its id, as `notify_many` does."""
        _, spec = self._writers.get(event_type) or self._writer(event_type)
        return await self._store_all(_parts(chunk), partial(self._store_part, event_type, spec))

    async def store_answered(self, event_type: str, chunk: OutgoingChunk) -> list[PubAck | ConflictError]:
        """Store as `store_chunk` does, and return the acknowledgement of each, with its sequence and whether the stream
        had stored a message of its id before; or its refusal, where it expects another state of the stream."""
        _, spec = self._writers.get(event_type) or self._writer(event_type)
        prepared = [self._ready(event_type, spec, each.message, each.message_id) for each in chunk.each(spec.name)]
        await self._store_all(_chunks(prepared), partial(self._store, answered=True))
        return [each.answer for each in prepared if each.answer is not None]

    async def _store_part(self, event_type: str, spec: StreamSpec, part: OutgoingChunk) -> int:
        """Store as many as possible without an answer for each, the others as any notifications."""
        stored, in_doubt = 0, False
        if max(map(len, part.data)) <= self.most_bytes:
            try:
                await self._ensure(event_type, spec)
                stored = await self._backend.publish_chunk(spec.name, part, timeout_seconds=ACK_TIMEOUT_SECONDS)
            except BackendError as error:  # `_store` meets it too, and decides
                in_doubt = isinstance(error, OutcomeUnknownError)
        if stored:
            self._emit(event_type, "stored", 1, count=stored)
        if stored < len(part):
            left = part.part(stored, len(part)).each(spec.name)
            prepared = [self._ready(event_type, spec, each.message, each.message_id) for each in left]
            for each in prepared:
                each.in_doubt = in_doubt
            await self._store(prepared)
        return len(part)

    async def _store_all(self, chunks: Iterable[C], store_one: Callable[[C], Awaitable[int]]) -> int:
        """Publish some at a time, and return how many notifications there were."""
        count = 0
        failure: Exception | None = None
        capacity = anyio.Semaphore(CHUNKS_UNDER_WAY)

        async def store(chunk: C) -> None:
            nonlocal count, failure
            try:
                stored = await store_one(chunk)
                count += stored
            except Exception as error:
                failure = failure or error  # raised below, outside of the group, so that it arrives as itself
                sending.cancel_scope.cancel()
            capacity.release()

        async with anyio.create_task_group() as sending:
            try:
                for chunk in chunks:
                    await capacity.acquire()
                    sending.start_soon(store, chunk)
            except Exception as error:  # one that is not valid, or whatever the iterable raises
                failure = error
        if failure is not None:
            raise failure
        return count

    def _prepare(self, wanted: Notify) -> _Prepared:
        """Return a notification ready to be published. Raises as `_checked` does."""
        if self.outgoings:
            wanted = self._changed(wanted)
        spec, message = self._checked(wanted)
        if delayed_messages.is_later(wanted):
            return self._prepare_later(wanted, spec, message)
        return self._ready(wanted.event_type, spec, message, wanted.message_id or self._message_id(message))

    def _changed(self, given: Notify) -> Notify:
        """Return what the functions of `outgoing` make of a notification. Raises `InvalidNotificationError`."""
        wanted = around.changed_by(self.outgoings, given)
        if wanted is given or wanted.message_id:
            return wanted
        return structs.replace(wanted, message_id=given.message_id or _given_id([given]))

    def _prepare_later(self, wanted: Notify, spec: StreamSpec, message: Message) -> _Prepared:
        """Return a notification that `_schedule` is to look at. Raises as `_checked` does."""
        delayed_messages.due_of(wanted, now=datetime.now(UTC))
        delayed_messages.require_server(self._backend)
        message_id = wanted.message_id or self._message_id(message, when=f"{wanted.due}")
        return structs.replace(self._ready(wanted.event_type, spec, message, message_id), later=wanted)

    async def _schedule(self, later: Sequence[_Prepared]) -> None:
        """Have notifications that are not due yet sent as schedules. What counts is the time of the server that keeps
        the schedules, not ours. Raises `BackendError`.
        """
        times = {stream: await self._time_of(stream) for stream in {prepared.spec.name for prepared in later}}
        for prepared in later:
            assert prepared.later is not None
            now = times[prepared.spec.name]
            due = delayed_messages.due_of(prepared.later, now=now)
            prepared.later = None
            if due > now:
                prepared.due = due
                prepared.schedule = delayed_messages.schedule(
                    prepared.outgoing, due, event_type=prepared.event_type, message_id=self._new_message_id()
                )

    async def _time_of(self, stream: str) -> datetime:
        """Return the time of the server that will say when something is due that waits for this stream."""
        schedules = delayed_messages.stream_spec(stream, self._config)
        await self._own_streams.ensure(schedules)
        try:
            return (await self._backend.stream_info(schedules.name)).time
        except NotFoundError:  # it was deleted since
            self._own_streams.forget(schedules.name)
            await self._own_streams.ensure(schedules)
            return (await self._backend.stream_info(schedules.name)).time

    def _message_id(self, message: Message, *, when: str = "") -> str:
        return message_id(message, when=when) or self._new_message_id()

    def _new_message_id(self) -> str:
        return f"{self._nonce}{next(self._numbers):x}"

    def _checked(self, wanted: Notify) -> tuple[StreamSpec, Message]:
        """Return the stream and message of a valid notification.

        Raises `InvalidNotificationError`, `TakenOverError`, `RefusedError` where the server is too old for a ttl.
        """
        singletons.check()
        try:
            if wanted.message_id:
                _require_printable(wanted.event_type, wanted.message_id)
            writer, spec = self._writers.get(wanted.event_type) or self._writer(wanted.event_type)
        except (AttributeError, TypeError):  # here, so that a sound one is not looked at twice
            _require_sound(wanted)
            raise
        message = writer.message(wanted.identifier, wanted.payload)
        if wanted.headers:
            message = with_headers(wanted.event_type, message, wanted.headers)
        if wanted.ttl is None:
            return spec, message
        ttl = _whole_seconds(wanted.event_type, wanted.ttl)
        self._backend.connection.require_server(2, 11, to="publish with a ttl")
        headers = {**(message.headers or {}), "Nats-TTL": f"{ttl}s"}
        return spec, structs.replace(message, headers=headers)

    def _ready(self, event_type: str, spec: StreamSpec, message: Message, message_id: str) -> _Prepared:
        """Return a notification whose id is made: headers that are added here, as those of a trace, change no id."""
        size = size_of(message.data, message.headers)
        if size > self.most_bytes:
            raise too_large(event_type, size, most=self.most_bytes)
        return _Prepared(event_type, spec, Outgoing(message, message_id, spec.name))

    @property
    def most_bytes(self) -> int:
        """The most bytes that payload and headers of a notification may take."""
        max_payload = self._backend.connection.max_payload
        return max_payload - min(HEADER_ALLOWANCE, max_payload // 2)

    def _as_one(self, wanted: Sequence[Notify], *, message_id: str | None) -> list[_Prepared]:
        """Notifications under ids that belong to all of them. Raises `InvalidNotificationError`."""
        for each in wanted:
            _require_sound(each)
        if self.outgoings:
            message_id = message_id or _given_id(wanted)
            wanted = [around.changed_by(self.outgoings, each) for each in wanted]
        if any(each.message_id is not None for each in wanted):
            raise InvalidNotificationError(
                "what is stored together has one message_id, so give it to all and not to one"
            )
        if any(map(delayed_messages.is_later, wanted)):
            raise InvalidNotificationError(
                "what is stored together is stored now: publish one by one what is to be delivered later"
            )
        checked = [self._checked(each) for each in wanted]
        names = sorted({spec.name for spec, _ in checked})
        if len(names) != 1 or len(checked) > MAX_TOGETHER:
            raise InvalidNotificationError(
                f"from 1 to {MAX_TOGETHER} notifications of one stream can be stored together, "
                f"found {len(checked)} of {' and '.join(names) or 'none'}"
            )
        _require_printable(checked[0][0].name, message_id)
        one = message_id or self._message_id(_whole([message for _, message in checked]))
        return [
            self._ready(each.event_type, spec, message, id_together(one, number))
            for number, (each, (spec, message)) in enumerate(zip(wanted, checked, strict=True), 1)
        ]

    def _writer(self, event_type: str) -> tuple[NotificationWriter, StreamSpec]:
        declared = self._config.event_type(event_type)
        made = NotificationWriter(event_type, declared), streams.event_stream(event_type, declared, self._config)
        self._writers[event_type] = made
        return made

    async def _store(self, chunk: Sequence[_Prepared], *, together: bool = False, answered: bool = False) -> int:
        """Try until each has its answer, or too much time is over, and return how many there are.

        With `answered`, the refusal of a message that expects another state of the stream is an answer; it is raised
        otherwise.
        """
        clock = self._backend.clock
        tries = Tries(
            self._backoff,
            until=clock.monotonic() + self._settings.publish_deadline_seconds,
            least=self._settings.publish_retry_attempts,
        )
        left = list(chunk)
        while True:
            attempt = tries.failed + 1
            stored: Counter[tuple[str, PublishOutcome]] = Counter()
            tried, left = left, []
            results = await self._attempt(tried, together=together, answered=answered)
            for prepared, result in zip(tried, results, strict=True):
                if isinstance(result, PubAck):
                    prepared.answer = result
                    stored[prepared.event_type, _outcome(prepared, result)] += 1
                elif answered and isinstance(result, ConflictError):
                    prepared.answer = result
                elif isinstance(result, MAY_PASS):
                    left.append(prepared)
                    error = result
                    prepared.in_doubt = prepared.in_doubt or isinstance(result, OutcomeUnknownError)
                else:
                    self._fail(prepared, result, attempt)
            for (event_type, outcome), count in stored.items():
                self._emit(event_type, outcome, attempt, count=count)
            if not left:
                return len(chunk)
            delay = tries.next_wait(clock.monotonic())
            if delay is None:
                raise self._given_up(left, error, attempt) from error
            await clock.sleep(delay)

    def _fail(self, prepared: _Prepared, error: BackendError, attempt: int) -> NoReturn:
        """State that a notification failed for good, and raise why."""
        self._emit(prepared.event_type, "failed", attempt)
        if prepared.in_doubt:
            raise OutcomeUnknownError.after(error) from error
        raise error

    def _given_up(self, left: list[_Prepared], error: BackendError, attempt: int) -> BackendError:
        """State that these failed, and return the error of what was tried as often as it may be."""
        for prepared in left:
            self._emit(prepared.event_type, "failed", attempt)
        failure = type(error)(f"{error}; tried {attempt} times", code=error.code)
        if any(prepared.in_doubt for prepared in left) and not isinstance(error, OutcomeUnknownError):
            return OutcomeUnknownError.after(failure)
        return failure

    async def _attempt(
        self, chunk: Sequence[_Prepared], *, together: bool, answered: bool
    ) -> Sequence[PubAck | BackendError]:
        specs = {prepared.event_type: prepared.spec for prepared in chunk}
        try:
            for event_type, spec in specs.items():
                await self._ensure(event_type, spec)
            if later := [prepared for prepared in chunk if prepared.later]:
                await self._schedule(later)
            for stream in {prepared.spec.name for prepared in chunk if prepared.schedule}:
                await self._own_streams.ensure(delayed_messages.stream_spec(stream, self._config))
        except BackendError as error:
            return [error] * len(chunk)
        outgoing = [prepared.schedule or prepared.outgoing for prepared in chunk]
        if together:
            try:
                ack = await self._backend.publish_together(outgoing, timeout_seconds=ACK_TIMEOUT_SECONDS)
                results: Sequence[PubAck | BackendError] = [ack] * len(chunk)
            except BackendError as error:
                results = [error] * len(chunk)
        else:
            results = await self._backend.publish_many(outgoing, timeout_seconds=ACK_TIMEOUT_SECONDS, answered=answered)
        for prepared, result in zip(chunk, results, strict=True):
            if isinstance(result, UnavailableError):
                self._provisioner.forget(prepared.spec.name)
                self._own_streams.forget(delayed_messages.stream_of(prepared.spec.name))
        return results

    async def _ensure(self, event_type: str, spec: StreamSpec) -> None:
        await self._provisioner.ensure(spec)
        if self._orders is None or spec.name in self._orders:
            return
        with suppress(NotFoundError):  # the stream was deleted since
            declared = self._config.notification_schema[event_type]
            await key_orders.require_same(self._backend, spec.name, event_type, declared)
            self._orders.add(spec.name)

    def _emit(self, event_type: str, outcome: PublishOutcome, attempts: int, *, count: int = 1) -> None:
        self._events.emit(Published(event_type=event_type, outcome=outcome, attempts=attempts, count=count))


def _given_id(given: Sequence[Notify]) -> str | None:
    """Return the id of what a handler's code has given to be published, before functions of `outgoing` changed it: what
    they add, such as a trace, may be another one when the handler runs again. None outside of a handler, and for what
    is no JSON."""
    if handling() is None:
        return None
    with suppress(TypeError, ValueError):
        data = payloads.to_json([structs.astuple(each) for each in given])
        return message_id(Message(subject="outgoing", data=data))
    return None


def _whole(messages: Sequence[Message]) -> Message:
    """Return one message whose id stands for the whole batch."""
    subject = " ".join(f"{message.subject} {message.headers} {len(message.data)}" for message in messages)
    return Message(subject=subject, data=b"".join(message.data for message in messages))


def _receipt(prepared: _Prepared) -> Receipt:
    ack, message_id = prepared.answer, prepared.outgoing.message_id
    assert isinstance(ack, PubAck)  # a refusal was raised
    if prepared.due:
        return Receipt(stream=prepared.spec.name, sequence=0, message_id=message_id, due=prepared.due)
    return Receipt(
        id=f"{prepared.event_type}@{ack.sequence}",
        stream=ack.stream,
        sequence=ack.sequence,
        duplicate=ack.duplicate,
        message_id=message_id,
    )


def _outcome(prepared: _Prepared, ack: PubAck) -> PublishOutcome:
    if prepared.schedule:
        return "scheduled"
    return "duplicate" if ack.duplicate else "stored"


def _chunks(prepared: Iterable[_Prepared]) -> Iterator[list[_Prepared]]:
    """Yield the prepared notifications in chunks, each of so many or of so many bytes."""
    chunk: list[_Prepared] = []
    size = 0
    for each in prepared:
        chunk.append(each)
        size += len(each.outgoing.message.data)
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _parts(chunk: OutgoingChunk) -> Iterator[OutgoingChunk]:
    """Yield a chunk in parts of the size that `_chunks` allows."""
    first = size = 0
    for end, data in enumerate(chunk.data, 1):
        size += len(data)
        if end - first == CHUNK or size >= CHUNK_BYTES or end == len(chunk):
            yield chunk.part(first, end)
            first, size = end, 0


def _whole_seconds(event_type: str, ttl: object) -> int:
    with suppress(ValueError):
        if isinstance(seconds := literals.seconds_of(ttl), int) and seconds >= 1:
            return seconds
    raise InvalidNotificationError(
        f'{event_type}: ttl must be a duration of whole seconds from 1, such as 60 or "1m", found {ttl!r:.100}'
    )


class IdempotencyKeys:
    """The notifications of one call of an agent; those that it publishes in the `with` block get ids made from these.

    A handler that is run again, because it failed or its worker died, publishes the same under the same ids, and the
    stream's duplicate window stores it once. The content is part of an id: what differs from the run before is another
    notification and never taken for a repeat, for one too many does less harm than one that is lost. So is the time of
    what is handled, because a stream that is recreated counts from 1 again.

    An agent has as many as it makes calls at a time, each around the calls of one task.
    """

    def __init__(self, *, app: str, agent: str, stream: str) -> None:
        self.agent = agent
        """Under whose name tables remember what is updated once: see `begin_dead_letter`."""
        self.stream = stream
        self.updates: set[tuple[str, str, int]] = set()
        """The table and key of each update that was made once in this call, and the sequence of its notification."""
        self._prefix = f"{app}.{agent}.{stream}"
        self._handled: tuple[Message, ...] = ()
        self._ids: _Ids | None = None
        self._token: Token[IdempotencyKeys | None]

    def __enter__(self) -> IdempotencyKeys:
        self._token = _KEYS.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _KEYS.reset(self._token)

    def begin(self, *handled: Message) -> None:
        """Begin with these messages: they are handled from now on, and nothing has been published for them yet."""
        self._handled = handled
        self._ids = None
        self.updates.clear()

    def also(self, message: Message) -> None:
        """Add one more message to those that are handled."""
        self._handled = (*self._handled, message)
        self._ids = None

    def handles(self, sequence: int, subject: str) -> bool:
        """Return whether the message of this sequence and subject is handled now."""
        return any(each.sequence == sequence and each.subject == subject for each in self._handled)

    def begin_with(self, place: str, *, of: str) -> None:
        """Begin as `begin` does for what is not a message, as a window: `place` is its start, `of` its end and key."""
        self._ids = _Ids(f"{self._prefix}.{place}", f"{place} {of}")

    def begin_dead_letter(self, message: Message, *, of_window: bool) -> None:
        """Begin with what has become a dead letter, once. Its ids and updates are none of those that the agent's own
        function has made for it.
        """
        self._handled = () if of_window else (message,)
        self.agent += OF_DEAD_LETTERS
        of = f"dead letter of {message.subject} {message.timestamp_ns} {message.headers}"  # a retry has another header
        self.begin_with(str(message.sequence), of=of)

    def message_id(self, message: Message, *, when: str) -> str | None:
        """Return the message id of what is published while notifications are handled; None while none is."""
        if self._ids is None:
            if not self._handled:
                return None
            root = "".join(f"{each.sequence}@{each.timestamp_ns} " for each in self._handled)
            self._ids = _Ids(f"{self._prefix}.{self._handled[0].sequence}", root)
        return self._ids.next(message, when)


class _Ids:
    """The message ids of one handling. `root` is all of what is handled, `prefix` tells people of it."""

    def __init__(self, prefix: str, root: str) -> None:
        self._prefix = prefix
        self._root = hashlib.blake2b(root.encode(), digest_size=DIGEST_BYTES)
        self._counts: Counter[bytes] = Counter()

    def next(self, message: Message, when: str) -> str:
        digest = self._root.copy()
        digest.update(f"{message.subject} {message.headers} {when}".encode())
        digest.update(message.data)
        content = digest.digest()
        self._counts[content] += 1
        return f"{self._prefix}.{content.hex()}.{self._counts[content]}"


def id_together(message_id: str, number: int) -> str:
    """Return the id of one of the messages that are stored together under `message_id`; numbers count from 1.

    A stream takes all of them as stored before where it knows one of their ids. So it has a digest that no author gives
    to a message by chance, as he might give `job.1` beside `job`.
    """
    digest = hashlib.blake2b(f"{message_id} {number}".encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{message_id}.{number}.{digest}"


_KEYS: ContextVar[IdempotencyKeys | None] = ContextVar("keys", default=None)


def handling() -> IdempotencyKeys | None:
    """Return the keys of the call of an agent that this code is in; None where it is in none."""
    return _KEYS.get()


def message_id(message: Message, *, when: str = "") -> str | None:
    """Return the id of a message that is published now; None where that is in no handler.

    `when` it is to be delivered, in the handler's own words, is part of its content.
    """
    keys = _KEYS.get()
    return keys.message_id(message, when=when) if keys is not None else None
