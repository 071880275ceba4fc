"""Traces: spans of OpenTelemetry around what is published and handled, and their context in the headers of messages.

It follows OpenTelemetry's semantic conventions for messaging, and W3C Trace Context for `traceparent` and `tracestate`.
An app has it where the configuration says `workers.traces.enabled`; no other app loads this module.

The context of a `publish` span stands in the headers of what it publishes, which retries, dead letters and delayed
delivery keep. A `process` span has it as its parent, and a link to it. A message id never depends on a trace: a handler
that is run again publishes under the ids of the run before. What others have written into these headers is read where
it is sound, and left out otherwise. No span has a subject, a payload or the text of an exception.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from msgspec import structs
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aviso_workers.aviso import schema
from aviso_workers.aviso.codec import Message
from aviso_workers.aviso.notifications import Notification, Notify, Receipt
from aviso_workers.backends import Backend
from aviso_workers.config import Config
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.batches import Batch, Stream
from aviso_workers.declare.verdicts import Failure, FinalError, OtherVersionError
from aviso_workers.engine.acknowledging import OnDeadLetter
from aviso_workers.engine.flow import Flow
from aviso_workers.engine.handlers import Guard, Step
from aviso_workers.engine.publisher import Publisher
from aviso_workers.events import Events, Sampled, Settled
from aviso_workers.version import __version__

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
TEMPLATE = "messaging.destination.template"
MESSAGE_ID = "messaging.message.id"
MESSAGE_COUNT = "messaging.batch.message_count"
GROUP = "messaging.consumer.group.name"
ERROR_TYPE = "error.type"
ATTEMPT = "aviso.attempt"
DEAD_LETTER = "aviso.dead_letter.reason"
TYPES = {"publish": "send", "process": "process", "ack": "settle", "nak": "settle", "term": "settle"}
"""The names of attributes and operations, here and nowhere else: the conventions are still changing some of them. Those
that begin with `aviso.` are ours."""
SETTLEMENTS = {"acked": "ack", "retried": "nak", "dead_lettered": "term"}

PARENT, STATE = "traceparent", "tracestate"
LONGEST_HEADER = 512
"""Characters of a header that are read. W3C asks for no more to be handed on."""
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = rf"{_KEY}=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]"
MEMBERS = re.compile(rf"{_MEMBER}(?:[ \t]*,[ \t]*{_MEMBER}){{0,31}}")
"""The state that is read. Of each other one, OpenTelemetry would log a warning, and publishers could flood the log."""
MAX_PROCESSED = 10_000
"""Calls of which the span is remembered until they are settled."""
PROPAGATOR = TraceContextTextMapPropagator()


class Spans:
    """The spans of one app."""

    def __init__(self, config: Config) -> None:
        self._event_types = config.notification_schema
        self._settings = config.workers.traces
        self._tracer = trace.get_tracer("aviso_workers", __version__)
        self._destinations: dict[str, dict[str, str]] = {}
        """By event type, the attributes of its destination."""
        self._processed: dict[tuple[str, int], SpanContext] = {}
        """By agent and sequence, the span of each call that is not settled. Empty unless settlements are heard."""
        self._events: Events | None = None
        """Where settlements are heard."""

    def hearing(self, events: Events) -> AbstractContextManager[None]:
        """While the block runs, make a span of each settlement where the configuration says so, and state which span is
        of a call that took so long, where somebody listens, as the metrics do.
        """
        if not self._settings.settle and not events.listeners(Sampled):
            return nullcontext()
        self._events = events
        return events.heard_by(self._settled, Settled)

    def publisher(self, backend: Backend, **given: Any) -> TracedPublisher:
        """Return a publisher that makes these spans. `given` is as for `Publisher`."""
        return TracedPublisher(self, backend, **given)

    def guard(self, agent: Agent[Any, Any], inner: Guard | None) -> Guard | None:
        """Return what makes a call of the agent in a span, inside of which `inner` makes it, if there is one.

        A function of a Stream is not called for each notification, and has no span.
        """
        if agent.form is Stream:
            return inner

        async def call(step: Step, flow: Flow, argument: Any) -> Failure | None:
            with self._processing(agent, argument) as span:
                failure = await (step(argument) if inner is None else inner(step, flow, argument))
                if failure is not None:
                    _fail(span, failure.error)
                return failure

        return call

    def dead_letters(self, agent: Agent[Any, Any], call: OnDeadLetter) -> OnDeadLetter:
        """Return what calls the agent's function of `on_dead_letter` in a span."""

        async def traced(message: Message, reason: str, **given: Any) -> None:
            found = _creation(message.headers)
            attributes = {GROUP: agent.name, DEAD_LETTER: reason}
            with self._received(agent.event_type, [found] if found else [], attributes, alone=True):
                await call(message, reason, **given)

        return traced

    @contextmanager
    def publishing(self, event_types: Collection[str], links: Sequence[SpanContext] = ()) -> Iterator[Span]:
        """Make a span of a publish. `event_types` may be filled inside of the block, as they are read."""
        known = len(event_types)
        with self._span("publish", SpanKind.PRODUCER, event_types, links) as span:
            try:
                yield span
            finally:
                if not known and len(event_types) == 1:
                    attributes = self._destination(*event_types)
                    span.update_name(f"publish {attributes.get(DESTINATION, '')}".rstrip())
                    span.set_attributes(attributes)

    @contextmanager
    def _processing(self, agent: Agent[Any, Any], argument: Any) -> Iterator[Span]:
        attributes: dict[str, str | int] = {GROUP: agent.name}
        handled: Sequence[Notification[Any]] = ()
        match argument:
            case Notification():
                handled = (argument,)
                attributes |= {MESSAGE_ID: argument.id, ATTEMPT: argument.attempt}
            case Batch():
                handled = argument.notifications
                attributes[MESSAGE_COUNT] = len(handled)
        links = [found for each in handled if (found := _creation(each.headers))]
        with self._received(agent.event_type, links, attributes, alone=isinstance(argument, Notification)) as span:
            if self._events is not None and (self._settings.settle or span.get_span_context().trace_flags.sampled):
                for each in handled:
                    self._processed[agent.name, each.sequence] = span.get_span_context()
                while len(self._processed) > MAX_PROCESSED:
                    del self._processed[next(iter(self._processed))]
            yield span

    def _received(
        self, event_type: str, links: Sequence[SpanContext], attributes: Mapping[str, str | int], *, alone: bool
    ) -> AbstractContextManager[Span]:
        """Return a span of what was received: `alone`, its creation is its parent, unless the configuration says not
        to."""
        parent = Context()  # and not that of the program that the app runs inside of
        if alone and links and self._settings.process == "child":
            parent = trace.set_span_in_context(trace.NonRecordingSpan(links[0]), parent)
        return self._span("process", SpanKind.CONSUMER, (event_type,), links, attributes, parent)

    @contextmanager
    def _span(
        self,
        operation: str,
        kind: SpanKind,
        event_types: Collection[str],
        links: Sequence[SpanContext],
        attributes: Mapping[str, str | int] | None = None,
        context: Context | None = None,
    ) -> Iterator[Span]:
        found = self._destination(*event_types) if len(event_types) == 1 else {}
        span = self._tracer.start_span(
            f"{operation} {found.get(DESTINATION, '')}".rstrip(),
            context,
            kind,
            {SYSTEM: "nats", OPERATION: operation, OPERATION_TYPE: TYPES[operation], **found, **(attributes or {})},
            [Link(each) for each in links],
        )
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                _fail(span, error)
                raise

    def _destination(self, event_type: str) -> dict[str, str]:
        found = self._destinations.get(event_type)
        if found is None:
            if event_type not in self._event_types:
                return {}
            place = schema.topic_of(event_type, self._event_types[event_type])
            template = ".".join([place.base, *(f"{{{field}}}" for field in place.key_order)])
            found = self._destinations[event_type] = {DESTINATION: place.base, TEMPLATE: template}
        return found

    def _settled(self, event: Settled) -> None:
        processed = self._processed.pop((event.agent, event.sequence), None)
        if processed is None:  # no call was made for it
            return
        if self._events is not None and processed.trace_flags.sampled:
            trace_id, span_id = trace.format_trace_id(processed.trace_id), trace.format_span_id(processed.span_id)
            self._events.emit(Sampled(agent=event.agent, seconds=event.seconds, trace_id=trace_id, span_id=span_id))
        if not self._settings.settle:
            return
        parent = trace.set_span_in_context(trace.NonRecordingSpan(processed), Context())
        attributes = {GROUP: event.agent, MESSAGE_ID: event.notification}
        operation = SETTLEMENTS[event.outcome]
        with self._span(operation, SpanKind.CLIENT, (event.event_type,), (), attributes, parent):
            pass


class TracedPublisher(Publisher):
    """A publisher each of whose publishes has a span, whose context the messages carry."""

    def __init__(self, traces: Spans, backend: Backend, **given: Any) -> None:
        super().__init__(backend, **given)
        self._traces = traces
        self._last: tuple[SpanContext, Mapping[str, str]] = (trace.INVALID_SPAN_CONTEXT, {})
        """The context that was written last, and its headers: many that are published together have the same."""

    async def notify(self, wanted: Notify) -> Receipt:
        given = _creation(getattr(wanted, "headers", None))
        with self._traces.publishing(_event_types([wanted]), [given] if given else []) as span:
            receipt = await super().notify(wanted)
            if receipt.id:
                span.set_attribute(MESSAGE_ID, receipt.id)
            return receipt

    async def notify_together(self, wanted: Iterable[Notify], *, message_id: str | None) -> Receipt:
        all_of_them = list(wanted)
        with self._traces.publishing(_event_types(all_of_them)) as span:
            span.set_attribute(MESSAGE_COUNT, len(all_of_them))
            return await super().notify_together(all_of_them, message_id=message_id)

    async def notify_many(self, wanted: Iterable[Notify], *, answered: bool = False) -> int:
        event_types: set[str] = set()

        def noted() -> Iterator[Notify]:
            for each in wanted:
                event_types.update(_event_types([each]))
                yield each

        with self._traces.publishing(event_types) as span:
            count = await super().notify_many(noted(), answered=answered)
            span.set_attribute(MESSAGE_COUNT, count)
            return count

    def _ready(self, event_type: str, spec: Any, message: Message, message_id: str) -> Any:
        """Add the context of the span, unless the author has given one: after the id is made and the size is checked,
        which leaves room for it."""
        prepared = super()._ready(event_type, spec, message, message_id)
        headers = message.headers or {}
        if not _header(headers, PARENT) and (carried := self._carried()):
            message = structs.replace(message, headers={**headers, **carried})
            prepared.outgoing = structs.replace(prepared.outgoing, message=message)
        return prepared

    def _carried(self) -> Mapping[str, str]:
        context = trace.get_current_span().get_span_context()
        if context is not self._last[0]:
            carried: dict[str, str] = {}
            PROPAGATOR.inject(carried)
            if len(carried.get(STATE, "")) > LONGEST_HEADER:
                del carried[STATE]
            self._last = context, carried
        return self._last[1]


def _event_types(wanted: Iterable[object]) -> set[str]:
    """Return the event types of what is to be published, which nobody has looked at yet."""
    return {found for each in wanted if isinstance(found := getattr(each, "event_type", None), str)}


def _creation(headers: object) -> SpanContext | None:
    """Return the context in which a message was made; None where its headers say none that is sound."""
    if not (headers and isinstance(headers, Mapping)):
        return None
    carrier = {PARENT: _header(headers, PARENT)}
    if MEMBERS.fullmatch(state := _header(headers, STATE)):
        carrier[STATE] = state
    context = trace.get_current_span(PROPAGATOR.extract(carrier, Context())).get_span_context()
    return context if context.is_valid else None


def _header(headers: Mapping[str, object], name: str) -> str:
    """Return a header, which programs in Go spell with a capital letter; empty for what is missing or odd."""
    value = headers.get(name) or headers.get(name.capitalize()) or ""
    return value if isinstance(value, str) and value.isascii() and len(value) <= LONGEST_HEADER else ""


def _fail(span: Span, error: BaseException) -> None:
    kind = type(error.error if isinstance(error, FinalError | OtherVersionError) else error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    span.set_attribute(ERROR_TYPE, name)
    span.set_status(StatusCode.ERROR)
