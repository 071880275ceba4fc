"""What has become of one notification: in the stream, and at each agent that reads it, as far as it can be known.

A server says up to where a consumer has settled everything, and not what has become of a single message behind that. So
what workers have recorded is held against it: dead letters, what is retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.notifications import parse_pairs
from aviso_workers.aviso.schema import parse_where
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.console import dead_letters
from aviso_workers.console.overview import AgentView, Overview
from aviso_workers.errors import AvisoWorkersError, InvalidNotificationError
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops import aviso_admin, inventory
from aviso_workers.ops.denials import Denials, asked, noted
from aviso_workers.ops.inventory import StoredMessage
from aviso_workers.state import asyncapi

MAX_SCANNED = 3000
"""Messages among which outputs are looked for."""
SCAN_SECONDS = 1.0
SKEW = timedelta(seconds=1)
"""The servers that store a notification and its outputs may have different clocks."""
SHOWN = 20
SPAN = 1000
"""Messages that are read to find the newest ones; the server counts where these begin."""


class Fate(Struct, frozen=True, kw_only=True):
    """What has become of the notification at one agent."""

    view: AgentView
    state: str
    """In a word or two."""
    why: str


class PublishedBy(Struct, frozen=True, kw_only=True):
    """Where a notification comes from, as far as its headers say."""

    publisher: str = ""
    """The agent or the Spark application that has published it."""
    agent: tuple[str, str] | None = None
    """Its app and its name, where it is an agent that is known."""
    cause: str = ""
    """The notification while whose handling it was published, such as `MARS@4711`."""
    trace_id: str = ""
    """Its trace, where it carries one."""


class Trail(Struct, frozen=True, kw_only=True):
    """A notification and what has become of it."""

    message: StoredMessage
    event_type: str
    identifier: dict[str, str]
    """Empty where the subject is none of the event type."""
    unreadable: str
    """Why it cannot be read; empty where it can."""
    origin: PublishedBy
    fates: list[Fate]
    outputs: list[tuple[str, tuple[str, str] | None, str]]
    """What agents published while they handled it: name such as `MARS@4712`, app and name of the agent, subject. The
    agent is None of what is found by its trace alone, in which another notification may have led to it."""
    unsure: list[str]
    """Why there may be more of these, in sentences."""
    denied: str
    """What the server denies our user, so that there may be more agents."""


async def trail(admin: Admin, overview: Overview, name: str) -> Trail:
    """Return what has become of the notification `<event type>@<sequence>`.

    Raises what `aviso_admin.find` raises.
    """
    message = await aviso_admin.find(admin, overview.config, name)
    event_type = event_streams(overview.config.notification_schema)[message.stream]
    reader = NotificationReader(event_type, overview.config.notification_schema[event_type])
    identifier, unreadable = dict[str, str](), ""
    try:
        found = reader.notification(
            Message(subject=message.subject, data=message.data, headers=message.headers, sequence=message.sequence)
        )
        identifier = dict(found.identifier) if found else {}
    except AvisoWorkersError as error:
        unreadable = str(error)
    readers = [view for view in overview.agents if view.progress.stream == message.stream]
    dead: dict[tuple[str, str], str] = {}
    denied = Denials()
    if any(view.progress.dead_letters != 0 for view in readers):
        dead_ones = dead_letters.of_notification(admin, message.stream, message.sequence)
        dead = await asked(denied, "dead letters", dead_ones, {})
    fates = [_fate(view, message, dead, denied.text()) for view in readers]
    agents = [(view.progress.app, view.progress.agent) for view in readers]
    outputs, unsure = await _outputs(admin, overview, message, agents)
    return Trail(
        message=message,
        event_type=event_type,
        identifier=identifier,
        unreadable=unreadable,
        origin=_origin(message.headers, overview),
        fates=fates,
        outputs=outputs,
        unsure=unsure,
        denied=overview.snapshot.denied.text("records", f"agents of {message.stream}"),
    )


async def _outputs(
    admin: Admin, overview: Overview, message: StoredMessage, readers: Collection[tuple[str, str]]
) -> tuple[list[tuple[str, tuple[str, str] | None, str]], list[str]]:
    """Return `outputs` and `unsure` of the trail: the streams are read that the code of the agents names."""
    denied, apps = Denials(), sorted({app for app, _ in readers})
    stored = {app: await asked(denied, app, asyncapi.stored(admin, app), None) for app in apps}
    documents = {app: found or {} for app, found in stored.items()}
    sent = [each for app, agent in readers for each in asyncapi.send_operations(documents[app], agent)]
    unknown = [] if denied.text() else [app for app, found in documents.items() if "operations" not in found]
    unsure = [f"What the agents of {app} publish is not recorded." for app in unknown]
    cause, looked_at = f"{message.stream}@{message.sequence}", 0
    outputs: list[tuple[str, tuple[str, str] | None, str]] = []
    trace_id = _origin(message.headers, overview).trace_id
    since = datetime.fromisoformat(message.time) - SKEW
    with anyio.move_on_after(SCAN_SECONDS) as scan:
        bases = {each["channel"]["$ref"].rpartition("/")[2] for each in sent}
        for base in sorted(base for base in bases if not schema.base_problem(base)):
            stream = topics.stream_name(base)
            with noted(denied, "outputs"):
                if (info := await inventory.existing(admin.stream_info(stream))) is None:
                    continue
                of_base = admin.read(
                    stream, filter_subjects=(f"{base}.>",), start_time=since, last_sequence=info.last_sequence
                )
                async with aclosing(of_base):
                    async for each in of_base:
                        origin, name = _origin(each.headers or {}, overview), f"{stream}@{each.sequence}"
                        of_trace = trace_id and origin.trace_id == trace_id and not origin.publisher and name != cause
                        if (origin.agent and origin.cause == cause) or of_trace:
                            outputs.append((name, origin.agent, each.subject))
                        looked_at += 1
                        if looked_at == MAX_SCANNED:
                            scan.cancel()
                            await anyio.sleep_forever()  # it ends here
    if said := denied.text():
        unsure.append(f"What else was published is {said}.")
    if scan.cancelled_caught:
        unsure.append(f"{looked_at:,} notifications since then were looked at, and there may be more.")
    return outputs, unsure


def _fate(view: AgentView, message: StoredMessage, dead: dict[tuple[str, str], str], denied: str) -> Fate:
    """Return what has become of it at one agent; `denied` is why it is not known which are dead letters."""
    progress = view.progress
    if (why := dead.get((progress.app, progress.agent))) is not None:
        return Fate(view=view, state="dead letter", why=why)
    if progress.consumer is None:
        return Fate(view=view, state="unknown" if view.state == "unknown" else "not handled", why=view.why)
    filters = progress.consumer.config.filters
    if filters and not matcher(filters)(message.subject):
        return Fate(view=view, state="not for it", why=f"it reads {', '.join(filters)}")
    for retrying in progress.retrying:
        if retrying.sequence == message.sequence:
            state = "blocked" if retrying.blocked else "retrying"
            return Fate(view=view, state=state, why=f"failed {retrying.attempt} times: {retrying.error}")
    found = _by_position(view, message.sequence)
    if denied and found.state == "settled":
        return structs.replace(found, state="unknown", why=f"{found.why}; whether it is a dead letter is {denied}")
    return found


def _origin(given: Mapping[str, str], overview: Overview) -> PublishedBy:
    """Return where a notification comes from: our message ids begin with who has published it, and of what it was made
    (`engine.idempotency`, `spark.job_events`).
    """
    headers = {name.lower(): value for name, value in given.items()}
    parent = headers.get("traceparent", "").split("-")
    trace_id = parent[1] if len(parent) == 4 and len(parent[1]) == 32 else ""
    message_id = headers.get("nats-msg-id", "")
    if message_id.startswith("spark:") and len(parts := message_id.split(":")) > 2:
        return PublishedBy(publisher=f"the Spark application {parts[1]}/{parts[2]}", trace_id=trace_id)
    for view in overview.agents:
        progress = view.progress
        begin = f"{progress.app}.{progress.agent}.{progress.stream}."
        if message_id.startswith(begin):
            sequence = message_id.removeprefix(begin).partition(".")[0]
            cause = f"{progress.stream}@{sequence}" if sequence.isdecimal() else ""
            of = (progress.app, progress.agent)
            return PublishedBy(publisher="/".join(of), agent=of, cause=cause, trace_id=trace_id)
    return PublishedBy(trace_id=trace_id)


def _by_position(view: AgentView, sequence: int) -> Fate:
    """Return what the positions of the consumer say."""
    events = view.progress.consumer
    assert events is not None
    if sequence <= events.settled:
        return Fate(view=view, state="settled", why=f"everything up to {events.settled} is settled")
    if sequence > events.position:
        why = f"it has come to {events.position}, {events.num_pending} wait" + (f"; {view.why}" if view.why else "")
        return Fate(view=view, state="waits", why=why)
    return Fate(
        view=view,
        state="in flight, or settled",
        why=(
            f"it was delivered; everything up to {events.settled} is settled, and of what was delivered since then "
            f"{events.num_ack_pending} are not"
        ),
    )


class FoundNotification(Struct, frozen=True, kw_only=True):
    name: str
    """Such as `MARS@4711`."""
    time: datetime
    """When it was stored."""
    subject: str


class Search(Struct, frozen=True, kw_only=True):
    """What has the values."""

    count: int
    """How many are stored."""
    newest: list[FoundNotification]
    """Some of them, the newest first."""


async def search(admin: Admin, config: Config, asked: str) -> Search:
    """Return the notifications of an event type and values of its identifier, such as `mars class=od step=12`.

    Raises `UnknownEventTypeError`, `InvalidNotificationError` where the values are none of it, and `BackendError`.
    """
    event_type, *pairs = asked.split()
    event_type = aviso_admin.event_type_of(config, event_type)
    where = parse_where(event_type, config.notification_schema[event_type], parse_pairs(pairs))
    if where.place is not None:
        raise InvalidNotificationError("the console looks for the keys of a topic: `aviso-workers replay` finds places")
    filters = topics.filter_subjects(where)
    stream = aviso_admin.stream_of(config, event_type)
    info = await admin.stream_info(stream)
    begin, end = info.first_sequence, info.last_sequence + 1
    while end - begin > SPAN:  # at least so many as are shown begin here, and fewer there
        middle = (begin + end) // 2
        if await admin.count(stream, filter_subjects=filters, start_sequence=middle) >= SHOWN:
            begin = middle
        else:
            end = middle
    newest = deque[FoundNotification](maxlen=SHOWN)
    last = (await admin.stream_info(stream)).last_sequence  # those that have come meanwhile were counted too
    messages = admin.read(stream, filter_subjects=filters, start_sequence=begin, last_sequence=last)
    async with aclosing(messages):
        async for each in messages:
            name = f"{stream}@{each.sequence}"
            newest.append(FoundNotification(name=name, time=store_time(each), subject=each.subject))
    count = await admin.count(stream, filter_subjects=filters)
    return Search(count=count, newest=[*reversed(newest)])
