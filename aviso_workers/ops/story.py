"""The story of one notification: what has become of it at each agent of its stream, as far as it can be proved, and
what happened, in order of time.

A server says up to where a consumer has settled everything, and not what became of a single message. So that position
is held against what else is kept: the dead letters, the copies of those that were handed back, the records of those
that were erased, and what workers have recorded of their retries. Each of them has a time, and the last one counts.
What our user may not read makes the word `unknown` where it could tell another end.

Called by `report notification` and the console, whose MCP says the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import Message, NotificationReader, store_time
from aviso_workers.aviso.literals import counted, rfc3339, time_text
from aviso_workers.backends import Admin, ConsumerInfo
from aviso_workers.config import Config
from aviso_workers.config.streams import event_streams
from aviso_workers.errors import AvisoWorkersError, NotFoundError, UndecodableError
from aviso_workers.events import Events
from aviso_workers.jetstream import error_codes
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops import audit, aviso_admin, inventory
from aviso_workers.ops.agent_control import end_text
from aviso_workers.ops.agent_report import AgentHealth
from aviso_workers.ops.audit import Agent, Records
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.ops.health import UNKNOWN, AgentFacts
from aviso_workers.ops.inventory import Denials, StoredMessage, asked, noted
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.state import asyncapi, dead_letter_records, own_streams
from aviso_workers.state.audit_records import ERASED, GIVEN_AGAIN, PASSED_OVER, RETURNED, Deed, Erased
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId
from aviso_workers.state.failure_records import Retrying
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

ONCE = timedelta(minutes=2)
"""A notification that fails again within this time of its dead letter gets no other one: the duplicate window."""
MAX_SCANNED = 3000
"""Messages among which outputs are looked for."""
SCAN_SECONDS = 1.0
ERASURES = "erasures"
HANDLED = "handled"
SKEW = timedelta(seconds=1)
"""The servers that store a notification and its outputs may have different clocks."""
PROVED = (HANDLED, "counted", "settled")
"""The states that are not certain where our user may not read what is kept of dead letters."""
STATES = {
    "dead letter": ("bad", "Not handled by {}: it is ", ""),
    "not handled": ("bad", "Not handled by {}: ", ""),
    UNKNOWN: ("bad", "It is not known what has become of it at {}: ", ""),
    "blocked": ("warn", "Not handled yet by {}: it ", "waits for somebody to decide"),
    "away": ("warn", "Not handled yet by {}: ", "waits until what it needs is there again"),
    "retrying": ("warn", "Not handled yet by {}: it ", "waits for its next attempt"),
    RETURNED: ("warn", "Not handled yet by {}: ", "waits for its retry"),
    "waits behind": ("warn", "Waits at {} behind ", "waits behind one of its key"),
    "waits": ("warn", "Waits at {}: ", "waits to be delivered"),
    "delayed": ("warn", "Not given to {} yet: ", "waits until it is due"),
    "never given": ("gone", "Never given to {}: ", ""),
    ERASED: ("gone", "Never handled by {}: ", ""),
    PASSED_OVER: ("gone", "Passed over by {}: ", ""),
    "settled": ("", "Handled or passed over by {}: ", ""),
    "in flight, or settled": ("good", "Delivered to {}: ", ""),
    "counted": ("good", "Counted by {}: ", ""),
    HANDLED: ("good", "Handled by {}: ", ""),
    "not for it": ("", "", ""),
}
"""What a notification can be at an agent, the worst first. Of each: the tone, which says who must act (`bad`: somebody;
`warn`: it waits; `good`: it moves or is handled; `gone`: it was erased), how the sentence of the story begins, and what
the notification waits for, if for something."""


class HandedBack(Struct, frozen=True, kw_only=True):
    """A dead letter that was handed back to its agent."""

    sequence: int
    """Of its copy in the retries."""
    time: datetime
    dead: DeadLetter
    """The dead letter that it was."""
    by: str
    """Who has handed it back; empty where that is not recorded."""

    @property
    def text(self) -> str:
        return f"handed back at {time_text(self.time)}" + (f" by {self.by}" if self.by else "")


class Kept(Struct, frozen=True, kw_only=True):
    """What is kept of a notification and one agent beside its stream."""

    dead: DeadLetter | None = None
    """The last one."""
    returns: tuple[HandedBack, ...] = ()
    """In order of time."""
    erased: Erased | None = None
    """The last one."""
    deeds: tuple[Deed, ...] = ()
    """Actions that have affected it, in order of time."""
    unproved: str = ""
    """Why it may have been a dead letter that is not kept any more; empty where it was none."""

    @property
    def reset(self) -> Deed | None:
        """The last reset of its agent that passed it over, or gave it again."""
        return self._last(PASSED_OVER, GIVEN_AGAIN)

    @property
    def returned(self) -> Deed | None:
        """The last action that has handed it back, unless a reset has given it again since."""
        returned = self._last(RETURNED)
        return None if returned is not None and self._is_of_before(returned.time) else returned

    @property
    def letter(self) -> DeadLetter | None:
        """The dead letter that it is: none that was handed back, and none of before a reset."""
        dead = self.dead
        is_one = dead is not None and (self.back is None or self.back.dead.id != dead.id)
        return dead if dead is not None and is_one and not self._is_of_before(dead.time) else None

    @property
    def erasure(self) -> Erased | None:
        """How it was erased, if that is the last that has happened to it."""
        erased, back = self.erased, self.back
        if erased is None or self._is_of_before(erased.time):
            return None
        is_last = back is None or (erased.time > back.time and erased.sequence != back.dead.sequence)
        return erased if is_last else None

    def _is_of_before(self, time: datetime) -> bool:
        """Return whether a reset has given it again since."""
        return self.reset is not None and self.reset.how == GIVEN_AGAIN and time + ONCE < self.reset.begun

    def _last(self, *how: str) -> Deed | None:
        return next((each for each in reversed(self.deeds) if each.how in how), None)

    def why(self, how: str, time: datetime) -> str:
        """Return the reason that somebody gave for what was done at this time, quoted, behind a comma; empty where none
        is recorded. It is recorded when the action has ended.
        """
        deeds = (each.why for each in self.deeds if each.how == how and each.time >= time)
        return f", “{why}”" if (why := next(deeds, "")) else ""

    @property
    def back(self) -> HandedBack | None:
        return self.returns[-1] if self.returns else None


class Fate(Struct, frozen=True, kw_only=True):
    """What has become of the notification at one agent."""

    app: str
    agent: str
    state: str
    """One of `STATES`."""
    why: str
    """How that is known, in words that go on a sentence."""
    error: str = ""
    dead_letter: int = 0
    """The sequence of the dead letter that it is; else 0."""
    cure: Literal["", "decide", "resume"] = ""
    """What the agent needs, so that the notification goes on."""

    @property
    def name(self) -> str:
        return f"{self.app}/{self.agent}"

    @property
    def tone(self) -> str:
        return STATES[self.state][0]


class Told(Struct, frozen=True, kw_only=True):
    """Something that happened to a notification."""

    time: datetime | None
    """None: that is how it is now."""
    whose: str
    """The agent or the person."""
    told: str
    """What they did, in words that go on a sentence that they begin."""
    error: str = ""
    tone: str = ""
    dead_letter: LetterId | None = None
    """The dead letter that it tells of, where that is still kept."""


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

    name: str
    """Such as `MARS@4711`."""
    absent: str
    """Why it is not stored any more; empty where it is."""
    message: StoredMessage
    event_type: str
    identifier: dict[str, str]
    """Empty where the subject is none of the event type."""
    unreadable: str
    """Why it cannot be read; empty where it can."""
    origin: PublishedBy
    sentence: str
    """What has become of it where it is worst."""
    also: str
    """What has become of it at the other agents, in a sentence; empty where that is the same."""
    tone: str
    """That of the sentence."""
    fates: list[Fate]
    events: list[Told]
    """All that is known to have happened, in order of time."""
    unsure: list[str]
    """Why agents may have published more while they handled it, in sentences."""
    denied: str
    """What the server denies our user, so that there may be more agents."""


async def of(
    admin: Admin, config: Config, name: str, agents: Collection[AgentHealth], snapshot: ServerSnapshot
) -> Story:
    """Return the story of the notification `<event type>@<sequence>`, or of one that waits to be stored later, as
    `aviso_admin.find_delayed` takes it. `agents` are all, as the `snapshot` shows them; `config` has the event types
    that workers have recorded.

    Raises what `aviso_admin.find` raises. Where it is not stored any more, its story is told as far as its dead letter
    has it; else the text of the error says what is known of why.
    """
    later = await aviso_admin.find_delayed(admin, config, name)
    message, absent = (later.message, "") if later else await _found(admin, config, name, agents)
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
    kept = {} if later else await _kept(admin, readers, message, denied)
    for each in readers:
        facts = each.facts
        declared = snapshot.recorded.apps.get(facts.app)
        policy = declared.policies.get(facts.agent, {}) if declared else {}
        of_agent = kept.get((facts.app, facts.agent), Kept())
        one = fate(each, message, of_agent, topic=topic, policy=policy)
        if later and one.state != "not for it":
            why = f"it is stored in {message.stream} at {time_text(later.due)}, and not before"
            one = structs.replace(one, state="delayed", why=why, cure="")
        if absent and one.state in ("waits", "waits behind"):  # a consumer passes over what is not stored any more
            one = structs.replace(one, state="never given", why=absent, error="", cure="")
        elif absent and one.state in ("counted", HANDLED) and of_agent.back is None:
            one = structs.replace(one, state="settled", why=f"{one.why}; or it was passed over: {absent}")
        if one.state in PROVED and (said := denied.text(facts.app, ERASURES)):
            one = structs.replace(one, state=UNKNOWN, why=f"{one.why}; whether it is a dead letter is {said}")
        fates.append(one)
    origin = _origin(message.headers, agents)
    outputs, unsure = ([], []) if later else await _outputs(admin, message, agents, readers)
    unlisted = snapshot.denied.text("records", f"agents of {message.stream}")
    sentence, also, tone = _sentence(message.stream, fates, complete=not unlisted)
    return Story(
        name=later.name if later else f"{message.stream}@{message.sequence}",
        absent=absent,
        message=message,
        event_type=event_type,
        identifier=identifier,
        unreadable=unreadable,
        origin=origin,
        sentence=sentence,
        also=also,
        tone=tone,
        fates=fates,
        events=[*_events(message, origin, kept, outputs), *_now(fates)],
        unsure=unsure,
        denied=unlisted,
    )


def _sentence(stream: str, fates: Sequence[Fate], *, complete: bool) -> tuple[str, str, str]:
    """Return `sentence`, `also` and `tone` of a story. Unless the fates are `complete`, another agent may have it."""
    by_state = {state: [each for each in fates if each.state == state] for state in STATES}
    not_for_it = by_state.pop("not for it")
    (state, worst), *others = [(state, found) for state, found in by_state.items() if found] or [("", [])]
    if not worst and not complete:
        return "It is not known which agents read it.", "", "bad"
    if not worst:
        nobody = (
            f"None of the {len(not_for_it)} agents that read {stream} reads it" if not_for_it else "No agent reads it"
        )
        return f"{nobody}.", "", ""
    tone, begin, _ = STATES[state]
    sentence, also = begin.format(_who(worst)) + worst[0].why, "; ".join(f"{name} at {_who(at)}" for name, at in others)
    if state == HANDLED:
        all_of = f"all {len(worst)} agents that read it" if len(worst) > 1 else f"{worst[0].name}, which alone reads it"
        sentence = f"Handled by {all_of}" if complete else f"Handled by {_who(worst)}; other agents are not known"
    return f"{sentence}.", also and f"{also[0].upper()}{also[1:]}.", tone if complete or tone != "good" else ""


def _who(fates: Sequence[Fate]) -> str:
    return fates[0].name + (f" and {len(fates) - 1} more" if len(fates) > 1 else "")


def _events(
    message: StoredMessage, origin: PublishedBy, kept: Mapping[Agent, Kept], outputs: Sequence[Told]
) -> list[Told]:
    """Return what happened to a notification, in order of time."""
    cause = f" while it handled {origin.cause}" if origin.cause else ""
    stored = datetime.fromisoformat(message.time)
    found = [Told(time=stored, whose=origin.publisher or "a publisher", told=f"published it{cause}"), *outputs]
    for (app, agent), of_agent in kept.items():
        name = f"{app}/{agent}"
        last = of_agent.dead
        letters = {each.id: each for each in (*(back.dead for back in of_agent.returns), last) if each is not None}
        for dead in letters.values():
            link = dead.id if last is not None and dead.id == last.id else None
            told = f"made it dead letter {dead.sequence}: {dead.reason} after {counted(dead.attempts, 'attempt')}"
            found.append(Told(time=dead.time, whose=name, told=told, error=dead.error, tone="bad", dead_letter=link))
        for each in of_agent.returns:
            told = f"handed dead letter {each.dead.sequence} back to {name}{of_agent.why(RETURNED, each.time)}"
            found.append(Told(time=each.time, whose=each.by or "somebody", told=told))
        if (erased := of_agent.erased) is not None:
            # It is recorded before it is done.
            did = "would have erased" if last is not None and last.sequence == erased.sequence else "erased"
            told = f"{did} dead letter {erased.sequence} of {name}{of_agent.why(ERASED, erased.time)}"
            found.append(Told(time=erased.time, whose=erased.by, told=told, tone="gone"))
        if (reset := of_agent.reset) is not None:
            past = "past it" if reset.how == PASSED_OVER else "to before it"
            told = f"reset {name} {past}{of_agent.why(reset.how, reset.time)}"
            found.append(Told(time=reset.begun, whose=reset.by, told=told))
    return sorted(found, key=lambda each: each.time or stored)


def _now(fates: Collection[Fate]) -> Iterator[Told]:
    """Yield what the notification waits for."""
    for state, (tone, _, told) in STATES.items():
        if told and (found := [each for each in fates if each.state == state]):
            yield Told(time=None, whose=_who(found), told=told, tone=tone)


async def _found(admin: Admin, config: Config, name: str, agents: Collection[AgentHealth]) -> tuple[StoredMessage, str]:
    """Return a notification by its name and, where it is a dead letter only, why it is not stored any more. Raises
    `NotFoundError` where it is neither.
    """
    try:
        return await aviso_admin.find(admin, config, name), ""
    except NotFoundError as error:
        if error.code != error_codes.NO_MESSAGE:
            raise
        stream, sequence = aviso_admin.position(config, name)
        info = await admin.stream_info(stream)
        message = await _of_dead_letter(admin, info, sequence, agents)
        why = await _why_absent(admin, info, sequence, subject=message.subject if message else "")
        if message is None:
            raise NotFoundError(f"{name}: {why}", code=error.code) from error
        return message, why


async def _of_dead_letter(
    admin: Admin, info: StreamInfo, sequence: int, agents: Collection[AgentHealth]
) -> StoredMessage | None:
    """Return a notification as one of its dead letters has it, within the time of a look; None where none is found."""
    apps = sorted({each.facts.app for each in agents if each.facts.stream == info.name and each.facts.dead_letters})
    with anyio.move_on_after(SCAN_SECONDS):
        for app in apps:
            wanted = Selection(app=app, stream=info.name, since=info.created)
            async with aclosing(StoredDeadLetters(admin, events=Events()).select(wanted)) as found:
                async for each in found:
                    if each.original.sequence == sequence:
                        return inventory.read(info.name, each.original)
    return None


async def _why_absent(admin: Admin, info: StreamInfo, sequence: int, *, subject: str) -> str:
    """Return why a notification is not stored. `subject` is empty where that is not known."""
    stream, most = info.name, info.config.max_msgs_per_subject
    if sequence > info.last_sequence:
        return f"the stream {stream} ends at {info.last_sequence}, and has never stored it"
    removal = audit.removal(admin, stream, sequence, since=info.created or info.time)
    if (deed := await asked(Denials(), "actions", removal, None)) is not None:
        return f"it is not stored any more: {deed.how} by {deed.by} at {time_text(deed.time)}"
    newer = await admin.message(stream, last_by_subject=subject) if subject and most > 0 else None
    if newer is not None and newer.sequence > sequence:
        return f"{stream}@{newer.sequence}, a newer one of its subject, has taken its place: the stream keeps {most}"
    if sequence < info.first_sequence:
        return (
            f"it is not stored any more: the stream {stream} begins at {info.first_sequence}, and what was before that "
            "has expired, made room, or was purged or deleted"
        )
    replaced = f", or has made room for newer ones, since the stream keeps {most} of each subject" if most > 0 else ""
    return f"it is not stored any more: it was deleted or erased, has expired{replaced}"


async def _kept(
    admin: Admin, readers: Collection[AgentHealth], message: StoredMessage, denied: Denials
) -> dict[Agent, Kept]:
    """Return what is kept of the notification, by agent. What is denied is noted, by app and as `ERASURES`."""
    recorded = audit.of_notification(admin, message.stream, message.sequence, since=_since(message))
    records = await asked(denied, ERASURES, recorded, Records(), away=True)
    dead, back, unproved = dict[Agent, DeadLetter](), dict[Agent, tuple[HandedBack, ...]](), dict[str, str]()
    for app in sorted({each.facts.app for each in readers}):
        back |= await asked(denied, app, _handed_back(admin, app, message), {}, away=True)
        if not denied.text(ERASURES):
            unproved[app] = await asked(denied, app, _unproved(admin, app, records, _since(message)), "", away=True)
        if any(each.facts.dead_letters != 0 for each in readers if each.facts.app == app):
            dead |= await asked(denied, app, _dead_letters(admin, app, message), {}, away=True)
    return {
        of: Kept(
            dead=dead.get(of),
            returns=back.get(of, ()),
            erased=records.erased.get(of),
            deeds=tuple(records.deeds.get(of, ())),
            unproved=unproved.get(of[0], ""),
        )
        for of in sorted({(each.facts.app, each.facts.agent) for each in readers})
    }


async def _unproved(admin: Admin, app: str, records: Records, since: datetime) -> str:
    """Return `unproved` of all notifications since then. Raises `BackendError`."""
    stream = own_streams.of_app(DEAD_LETTERS, app)
    if (deed := records.purged.get(stream)) is not None:
        return f"{deed.by} purged dead letters of {app} at {time_text(deed.time)}, of which it may have been one"
    info = await inventory.existing(admin.stream_info(stream))
    reaches_back = records.first is not None and (records.is_whole or records.first <= since)
    if reaches_back or info is None or info.messages == info.last_sequence:
        return ""
    begin = f"begins at {time_text(records.first)}" if records.first else "is not there any more"
    return f"dead letters of {app} were removed, of which it may have been one, and the record of that {begin}"


async def _dead_letters(admin: Admin, app: str, message: StoredMessage) -> dict[Agent, DeadLetter]:
    """Return the last dead letter of the notification, by agent of an app. Raises `BackendError`."""
    wanted = Selection(app=app, stream=message.stream, since=_since(message))
    async with aclosing(StoredDeadLetters(admin, events=Events()).select(wanted)) as found:
        return {(app, each.agent): each async for each in found if _is_of(each, message)}


def _is_of(dead: DeadLetter, message: StoredMessage) -> bool:
    """Return whether it is a dead letter of the notification, and not of one with its sequence of a stream before."""
    same = (dead.stream, dead.original.sequence, dead.original.subject)
    return same == (message.stream, message.sequence, message.subject) and (
        rfc3339(dead.original.timestamp_ns) == message.time
    )


async def _handed_back(admin: Admin, app: str, message: StoredMessage) -> dict[Agent, tuple[HandedBack, ...]]:
    """Return when the notification was handed back as a dead letter, by agent of an app, within the time for which
    copies are kept. Raises `BackendError`.
    """
    retries, back = own_streams.of_app(RETRIES, app), dict[Agent, tuple[HandedBack, ...]]()
    if (info := await inventory.existing(admin.stream_info(retries))) is None or not info.messages:
        return back
    reading = admin.read(retries, filter_subjects=(), start_time=_since(message), last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for copy in reading:
            with suppress(UndecodableError):  # what nobody of us has written
                dead, by = dead_letter_records.handed_back(copy, app)
                if _is_of(dead, message):
                    one = HandedBack(sequence=copy.sequence, time=store_time(copy), dead=dead, by=by)
                    back[app, dead.agent] = (*back.get((app, dead.agent), ()), one)
    return back


def fate(
    health: AgentHealth, message: StoredMessage, kept: Kept, *, topic: schema.Topic, policy: Mapping[str, str]
) -> Fate:
    """Return what has become of a notification at one agent. It is pure. `policy` is the agent's, as its app has
    declared it; empty where that is not known.
    """
    facts, back = health.facts, kept.back
    told = partial(Fate, app=facts.app, agent=facts.agent)
    if (dead := kept.letter) is not None:
        again = " again" if back is not None and dead.time > back.time else ""
        why = f"dead letter {dead.sequence}{again}, {dead.reason} after {counted(dead.attempts, 'attempt')}"
        return told(state="dead letter", why=why, error=dead.error, dead_letter=dead.sequence)
    if (erased := kept.erasure) is not None:
        why = f"its dead letter {erased.sequence} was erased at {time_text(erased.time)} by {erased.by}"
        return told(state=ERASED, why=why)
    if facts.consumer is None:
        is_unknown = health.judgement.state == UNKNOWN
        return told(state=UNKNOWN if is_unknown else "not handled", why=_text(health))
    filters = facts.consumer.config.filters
    if filters and not matcher(filters)(message.subject):
        return told(state="not for it", why=f"it reads {', '.join(filters)}")
    for each in facts.retrying:
        if each.sequence == message.sequence:
            state, why = _retried(each)
            why = f"{back.text}; {why}" if back is not None else why
            return told(state=state, why=why, error=each.error, cure="decide" if each.blocked else "")
    paused = any(each.paused for each in facts.consumers)
    if back is not None:
        state, why = _after_handing_back(health, back)
        return told(state=state, why=why, cure="resume" if paused and state != HANDLED else "")
    assert facts.consumer is not None
    if facts.consumer.settled < message.sequence <= facts.consumer.position and (
        before := _blocker(facts, message, topic=topic, policy=policy)
    ):
        does = "at which the agent is blocked" if before.blocked else "which is tried again"
        why = f"{before.stream}@{before.sequence} of the same key, {before.key}, {does}"
        return told(state="waits behind", why=why, error=before.error, cure="decide" if before.blocked else "")
    state, why = _by_position(health, facts.consumer, message, policy, kept)
    return told(state=state, why=why, cure="resume" if paused and state == "waits" else "")


def _retried(retrying: Retrying) -> tuple[str, str]:
    if not retrying.attempt:
        return "away", "what the agent needs is away, and no attempt is used"
    failed = f"has failed {counted(retrying.attempt, 'time')}"
    if retrying.blocked:
        return "blocked", f"{failed}, and the agent is blocked at it"
    return "retrying", f"{failed}, and is tried again at {time_text(retrying.again_at)}"


def _after_handing_back(health: AgentHealth, back: HandedBack) -> tuple[str, str]:
    """Return what the consumer of the retries says of a copy, of which no dead letter is kept."""
    retries = health.facts.retries
    if not isinstance(retries, ConsumerInfo):
        return RETURNED, f"{back.text}; whether it was handled since is not known: nothing reads the retries"
    if back.sequence <= retries.settled:
        return HANDLED, f"{back.text}, and settled since; it has not become a dead letter again"
    if back.sequence <= retries.position:
        return RETURNED, f"{back.text}, and delivered; it is not settled yet, as far as is known"
    if retries.paused_until is not None:
        return RETURNED, f"{back.text}, and waits: its agent is paused until {end_text(retries.paused_until)}"
    return RETURNED, f"{back.text}, and waits: {retries.num_pending} retries wait; {_text(health)}"


def _by_position(
    health: AgentHealth, events: ConsumerInfo, message: StoredMessage, policy: Mapping[str, str], kept: Kept
) -> tuple[str, str]:
    """Return what the position of the consumer says, and who has moved it."""
    reset, returned = kept.reset, kept.returned
    if message.sequence > events.position:
        return "waits", f"it has come to {events.position}, {events.num_pending} wait; {_text(health)}"
    until = f"everything up to {events.settled} is settled"
    if message.sequence > events.settled:
        since = f"of what was delivered since then {events.num_ack_pending} are not"
        return "in flight, or settled", f"{until}, and {since}"
    if reset is not None and reset.how == PASSED_OVER:
        by = f"by {reset.by} at {time_text(reset.time)}"
        return PASSED_OVER, f"its consumer was reset past it {by}, when it was not known to be settled"
    if message.sequence < (begin := events.config.start_sequence):
        return (
            "settled",
            f"it is older than the agent's consumer, which begins at {begin}: it was handled before, or passed over",
        )
    if "window" in policy:
        return "counted", f"{until}: it counts in the windows of the agent ({policy['window']})"
    if returned is not None:
        by = f"by {returned.by} at {time_text(returned.time)}"
        return "settled", f"{until}; it was handed back {by}, and what became of it since is not kept any more"
    if kept.unproved and kept.dead is None:
        return "settled", f"{until}, and no dead letter of it is kept; {kept.unproved}"
    if reset is not None and reset.how == GIVEN_AGAIN:
        of_before = f"; dead letter {kept.dead.sequence} is of the time before" if kept.dead is not None else ""
        return HANDLED, f"{until}, since {reset.by} reset the agent to before it at {time_text(reset.begun)}{of_before}"
    return HANDLED, f"{until}, no dead letter of it is kept, and none was erased"


def _blocker(
    facts: AgentFacts, message: StoredMessage, *, topic: schema.Topic, policy: Mapping[str, str]
) -> Retrying | None:
    """Return the notification that has to be done first, since it has the same ordering key; None where none is
    retried.
    """
    fields = [field for field in policy.get("order by", "").split(", ") if field in topic.key_order]
    key = ".".join(topics.key_of(topic, fields)(message.subject)) if fields else ""
    before = [each for each in facts.retrying if key and each.key == key and each.sequence < message.sequence]
    return before[0] if before else None


def _text(health: AgentHealth) -> str:
    return f"the agent is {health.judgement.text}"


def _since(message: StoredMessage) -> datetime:
    return datetime.fromisoformat(message.time) - SKEW


async def _outputs(
    admin: Admin,
    message: StoredMessage,
    agents: Collection[AgentHealth],
    readers: Collection[AgentHealth],
) -> tuple[list[Told], list[str]]:
    """Return what agents published while they handled a notification, and `unsure` of its story: the streams are read
    that the code of the agents names.
    """
    denied, apps = Denials(), sorted({each.facts.app for each in readers})
    stored = {app: await asked(denied, app, asyncapi.stored(admin, app), None) for app in apps}
    documents = {app: found or {} for app, found in stored.items()}
    sent = [
        sends for each in readers for sends in asyncapi.send_operations(documents[each.facts.app], each.facts.agent)
    ]
    unknown = [] if denied.text() else [app for app, found in documents.items() if "operations" not in found]
    unsure = [f"What the agents of {app} publish is not recorded." for app in unknown]
    cause, looked_at = f"{message.stream}@{message.sequence}", 0
    outputs = list[Told]()
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
                            how = "while it handled it" if origin.agent else "in the same trace"
                            told = f"published {name} {how}: {each.subject}"
                            outputs.append(Told(time=store_time(each), whose=origin.publisher or "somebody", told=told))
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
    (`engine.publisher`, `spark.job_events`).
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
