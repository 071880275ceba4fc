"""The story of one notification: what has become of it at each agent of its stream, as far as it can be proved.

A server says up to where a consumer has settled everything, and not what became of a single message. So that position
is held against what else is kept: the dead letters, the copies of those that were handed back, the records of those
that were erased, and what workers have recorded of their retries. Each of them has a time, and the last one counts.
What our user may not read makes the word `unknown` where it could tell another end.

Called by `report notification` and the console, whose MCP says the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta

import anyio
from msgspec import Struct

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.literals import time_text
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import AvisoWorkersError, NotFoundError
from aviso_workers.events import Events
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops import audit, aviso_admin, inventory
from aviso_workers.ops.agent_control import end_text
from aviso_workers.ops.agent_report import AgentHealth
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.ops.denials import Denials, asked, noted
from aviso_workers.ops.health import UNKNOWN, AgentFacts
from aviso_workers.ops.inventory import StoredMessage
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.state import asyncapi, dead_letter_records, own_streams
from aviso_workers.state.audit_records import Erased
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import RETRIES

MAX_SCANNED = 3000
"""Messages among which outputs are looked for."""
SCAN_SECONDS = 1.0
ERASURES = "erasures"
Agent = tuple[str, str]
"""Its app and its name."""
SKEW = timedelta(seconds=1)
"""The servers that store a notification and its outputs may have different clocks."""
PROVED = ("handled", "counted", "settled")
"""The ends of which another one could be true where something may not be read."""


class HandedBack(Struct, frozen=True, kw_only=True):
    """A dead letter that was handed back to its agent."""

    sequence: int
    """Of its copy in the retries."""
    time: datetime
    letter: str
    """The message id of the copy, which names the dead letter."""
    by: str
    """Who has handed it back; empty where that is not recorded."""

    @property
    def text(self) -> str:
        return f"handed back at {time_text(self.time)}" + (f" by {self.by}" if self.by else "")


class Kept(Struct, frozen=True, kw_only=True):
    """What is kept of a notification and one agent beside its stream. Of several, the last one."""

    dead: DeadLetter | None = None
    back: HandedBack | None = None
    erased: Erased | None = None


class Fate(Struct, frozen=True, kw_only=True):
    """What has become of the notification at one agent."""

    app: str
    agent: str
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


class Story(Struct, frozen=True, kw_only=True):
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


async def of(
    admin: Admin, config: Config, name: str, agents: Collection[AgentHealth], snapshot: ServerSnapshot
) -> Story:
    """Return the story of the notification `<event type>@<sequence>`. `agents` are all, as the `snapshot` shows them;
    `config` has the event types that workers have recorded.

    Raises what `aviso_admin.find` raises; where it is not stored any more, the text says what is known of why.
    """
    try:
        message = await aviso_admin.find(admin, config, name)
    except NotFoundError as error:
        if error.code != error_codes.NO_MESSAGE:
            raise
        raise NotFoundError(f"{name}: {await _why_absent(admin, config, name)}", code=error.code) from error
    event_type = event_streams(config.notification_schema)[message.stream]
    reader = NotificationReader(event_type, config.notification_schema[event_type])
    identifier, unreadable = dict[str, str](), ""
    try:
        found = reader.notification(
            Message(subject=message.subject, data=message.data, headers=message.headers, sequence=message.sequence)
        )
        identifier = dict(found.identifier) if found else {}
    except AvisoWorkersError as error:
        unreadable = str(error)
    readers = [each for each in agents if each.facts.stream == message.stream]
    topic = schema.topic_of(event_type, config.notification_schema[event_type])
    fates, denied = [], Denials()
    kept = await _kept(admin, readers, message, denied)
    for each in readers:
        facts = each.facts
        declared = snapshot.recorded.apps.get(facts.app)
        policy = declared.policies.get(facts.agent, {}) if declared else {}
        of_agent = kept.get((facts.app, facts.agent), Kept())
        state, why = fate(each, message, of_agent, topic=topic, policy=policy)
        if state in PROVED and (said := denied.text(facts.app, ERASURES)):
            state, why = UNKNOWN, f"{why}; whether it is a dead letter is {said}"
        fates.append(Fate(app=facts.app, agent=facts.agent, state=state, why=why))
    outputs, unsure = await _outputs(admin, message, agents, readers)
    return Story(
        message=message,
        event_type=event_type,
        identifier=identifier,
        unreadable=unreadable,
        origin=_origin(message.headers, agents),
        fates=fates,
        outputs=outputs,
        unsure=unsure,
        denied=snapshot.denied.text("records", f"agents of {message.stream}"),
    )


async def _why_absent(admin: Admin, config: Config, name: str) -> str:
    stream, sequence = aviso_admin.position(config, name)
    info = await admin.stream_info(stream)
    if sequence > info.last_sequence:
        return f"the stream {stream} ends at {info.last_sequence}, and has never stored it"
    if sequence < info.first_sequence:
        return (
            f"it is not stored any more: the stream {stream} begins at {info.first_sequence}, and what was before that "
            "has expired, made room, or was purged or deleted"
        )
    most = info.config.max_msgs_per_subject
    replaced = f", or has made room for newer ones, since the stream keeps {most} of each subject" if most > 0 else ""
    return f"it is not stored any more: it was deleted or erased, has expired{replaced}"


async def _kept(
    admin: Admin, readers: Collection[AgentHealth], message: StoredMessage, denied: Denials
) -> dict[Agent, Kept]:
    """Return what is kept of the notification, by agent. What is denied is noted, by app and as `ERASURES`."""
    erasures = audit.erased(admin, message.stream, message.sequence, since=_since(message))
    erased = await asked(denied, ERASURES, erasures, {})
    dead, back = dict[Agent, DeadLetter](), dict[Agent, HandedBack]()
    for app in sorted({each.facts.app for each in readers}):
        back |= await asked(denied, app, _handed_back(admin, app, message), {})
        if any(each.facts.dead_letters != 0 for each in readers if each.facts.app == app):
            dead |= await asked(denied, app, _dead_letters(admin, app, message), {})
    return {of: Kept(dead=dead.get(of), back=back.get(of), erased=erased.get(of)) for of in {*dead, *back, *erased}}


async def _dead_letters(admin: Admin, app: str, message: StoredMessage) -> dict[Agent, DeadLetter]:
    """Return the last dead letter of the notification, by agent of an app. Raises `BackendError`."""
    wanted = Selection(app=app, stream=message.stream, since=_since(message))
    async with aclosing(StoredDeadLetters(admin, events=Events()).select(wanted)) as found:
        return {(app, each.agent): each async for each in found if each.original.sequence == message.sequence}


async def _handed_back(admin: Admin, app: str, message: StoredMessage) -> dict[Agent, HandedBack]:
    """Return when the notification was last handed back as a dead letter, by agent of an app, within the time for which
    copies are kept. Raises `BackendError`.
    """
    retries, back = own_streams.of_app(RETRIES, app), dict[Agent, HandedBack]()
    if (info := await inventory.existing(admin.stream_info(retries))) is None or not info.messages:
        return back
    reading = admin.read(retries, filter_subjects=(), start_time=_since(message), last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for copy in reading:
            original, stream = dead_letter_records.unwrap(copy)
            if (stream, original.sequence) == (message.stream, message.sequence):
                headers = copy.headers or {}
                letter, by = (headers.get(name, "") for name in (dead_letter_records.RETRIED, dead_letter_records.BY))
                of = (app, copy.subject.rpartition(".")[2])
                back[of] = HandedBack(sequence=copy.sequence, time=store_time(copy), letter=letter, by=by)
    return back


def fate(
    health: AgentHealth, message: StoredMessage, kept: Kept, *, topic: schema.Topic, policy: Mapping[str, str]
) -> tuple[str, str]:
    """Return what has become of a notification at one agent, in a word or two, and why that is known. It is pure.
    `policy` is the agent's, as its app has declared it; empty where that is not known.
    """
    facts, dead, back, erased = health.facts, kept.dead, kept.back, kept.erased
    if dead is not None and (back is None or back.letter != dead_letter_records.retry_id(dead)):
        again = "again, " if back is not None and dead.time > back.time else ""
        return "dead letter", f"{again}{dead.sequence}: {dead.reason} after {dead.attempts} attempts: {dead.error}"
    if erased is not None and (back is None or erased.time > back.time):
        return "erased", f"its dead letter {erased.sequence} was erased at {time_text(erased.time)} by {erased.by}"
    if facts.consumer is None:
        is_unknown = health.judgement.state == UNKNOWN
        return UNKNOWN if is_unknown else "not handled", _text(health)
    filters = facts.consumer.config.filters
    if filters and not matcher(filters)(message.subject):
        return "not for it", f"it reads {', '.join(filters)}"
    for each in facts.retrying:
        if each.sequence == message.sequence:
            said = f"{back.text}; " if back is not None else ""
            if not each.attempt:
                return "away", f"{said}what the agent needs is away: {each.error}; no attempt is used"
            return "blocked" if each.blocked else "retrying", f"{said}failed {each.attempt} times: {each.error}"
    if back is not None:
        return _after_handing_back(health, back)
    return _by_position(health, message, topic=topic, policy=policy)


def _after_handing_back(health: AgentHealth, back: HandedBack) -> tuple[str, str]:
    """Return what the consumer of the retries says of a copy, of which no dead letter is kept."""
    retries = health.facts.retries
    if not isinstance(retries, ConsumerInfo):
        return "handed back", f"{back.text}; whether it was handled since is not known: nothing reads the retries"
    if back.sequence <= retries.settled:
        return "handled", f"{back.text}, and settled since; it has not become a dead letter again"
    if back.sequence <= retries.position:
        return "handed back", f"{back.text}, and delivered; it is not settled yet, as far as is known"
    if retries.paused_until is not None:
        return "handed back", f"{back.text}, and waits: its agent is paused until {end_text(retries.paused_until)}"
    return "handed back", f"{back.text}, and waits: {retries.num_pending} retries wait; {_text(health)}"


def _by_position(
    health: AgentHealth, message: StoredMessage, *, topic: schema.Topic, policy: Mapping[str, str]
) -> tuple[str, str]:
    """Return what the position of the consumer says."""
    facts = health.facts
    events = facts.consumer
    assert events is not None
    if message.sequence > events.position:
        return "waits", f"it has come to {events.position}, {events.num_pending} wait; {_text(health)}"
    if message.sequence > events.settled:
        return _in_flight(facts, events, message, topic=topic, policy=policy)
    until = f"everything up to {events.settled} is settled"
    if message.sequence < (begin := events.config.start_sequence):
        return "settled", f"its consumer begins at {begin}: it was handled before, or passed over when that was made"
    if "window" in policy:
        return "counted", f"{until}: it counts in the windows of the agent ({policy['window']})"
    return "handled", f"{until}, no dead letter of it is kept, and none was erased"


def _in_flight(
    facts: AgentFacts, events: ConsumerInfo, message: StoredMessage, *, topic: schema.Topic, policy: Mapping[str, str]
) -> tuple[str, str]:
    fields = [field for field in policy.get("order by", "").split(", ") if field in topic.key_order]
    key = ".".join(topics.key_of(topic, fields)(message.subject)) if fields else ""
    for each in facts.retrying:
        if key and each.key == key and each.sequence < message.sequence:
            does = "at which the agent is blocked" if each.blocked else "which is tried again"
            return "waits behind", f"{each.stream}@{each.sequence} of the same key, {key}, {does}: {each.error}"
    return (
        "in flight, or settled",
        f"it was delivered; everything up to {events.settled} is settled, and of what was delivered since then "
        f"{events.num_ack_pending} are not",
    )


def _text(health: AgentHealth) -> str:
    return f"the agent is {health.judgement.text}"


def _since(message: StoredMessage) -> datetime:
    return datetime.fromisoformat(message.time) - SKEW


async def _outputs(
    admin: Admin,
    message: StoredMessage,
    agents: Collection[AgentHealth],
    readers: Collection[AgentHealth],
) -> tuple[list[tuple[str, tuple[str, str] | None, str]], list[str]]:
    """Return `outputs` and `unsure` of the story: the streams are read that the code of the agents names."""
    denied, apps = Denials(), sorted({each.facts.app for each in readers})
    stored = {app: await asked(denied, app, asyncapi.stored(admin, app), None) for app in apps}
    documents = {app: found or {} for app, found in stored.items()}
    sent = [
        sends for each in readers for sends in asyncapi.send_operations(documents[each.facts.app], each.facts.agent)
    ]
    unknown = [] if denied.text() else [app for app, found in documents.items() if "operations" not in found]
    unsure = [f"What the agents of {app} publish is not recorded." for app in unknown]
    cause, looked_at = f"{message.stream}@{message.sequence}", 0
    outputs: list[tuple[str, tuple[str, str] | None, str]] = []
    trace_id = _origin(message.headers, agents).trace_id
    with anyio.move_on_after(SCAN_SECONDS) as scan:
        bases = {each["channel"]["$ref"].rpartition("/")[2] for each in sent}
        for base in sorted(base for base in bases if not schema.base_problem(base)):
            stream = topics.stream_name(base)
            with noted(denied, "outputs"):
                if (info := await inventory.existing(admin.stream_info(stream))) is None:
                    continue
                of_base = admin.read(
                    stream, filter_subjects=(f"{base}.>",), start_time=_since(message), last_sequence=info.last_sequence
                )
                async with aclosing(of_base):
                    async for each in of_base:
                        origin, name = _origin(each.headers or {}, agents), f"{stream}@{each.sequence}"
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


def _origin(given: Mapping[str, str], agents: Collection[AgentHealth]) -> PublishedBy:
    """Return where a notification comes from: our message ids begin with who has published it, and of what it was made
    (`engine.idempotency`, `spark.job_events`).
    """
    headers = {name.lower(): value for name, value in given.items()}
    parent = headers.get("traceparent", "").split("-")
    trace_id = parent[1] if len(parent) == 4 and len(parent[1]) == 32 else ""
    message_id = headers.get("nats-msg-id", "")
    if message_id.startswith("spark:") and len(parts := message_id.split(":")) > 2:
        return PublishedBy(publisher=f"the Spark application {parts[1]}/{parts[2]}", trace_id=trace_id)
    for each in agents:
        facts = each.facts
        begin = f"{facts.app}.{facts.agent}.{facts.stream}."
        if message_id.startswith(begin):
            sequence = message_id.removeprefix(begin).partition(".")[0]
            cause = f"{facts.stream}@{sequence}" if sequence.isdecimal() else ""
            of = (facts.app, facts.agent)
            return PublishedBy(publisher="/".join(of), agent=of, cause=cause, trace_id=trace_id)
    return PublishedBy(trace_id=trace_id)
