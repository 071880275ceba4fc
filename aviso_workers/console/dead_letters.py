"""Dead letters of the console: those that the fields of a filter select, listed and acted on; and their causes.

A cause has the dead letters of one agent that failed in the same way, and what their notifications have in common. Of
the values of a field, so many are remembered, and of the others that there are more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any
from urllib.parse import quote, urlencode

import anyio
from msgspec import Struct, field, structs

from aviso_workers.aviso import schema, topics
from aviso_workers.aviso.codec import LEFT_OUT
from aviso_workers.aviso.literals import counted
from aviso_workers.aviso.positions import parse_moment
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console.jobs import CameTo, Job, ReadAgain
from aviso_workers.errors import (
    BackendError,
    InvalidPositionError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    UndecodableError,
    describe,
)
from aviso_workers.events import Events
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.jetstream.subjects import matcher
from aviso_workers.ops import agent_inventory, aviso_admin, health, inventory
from aviso_workers.ops.audit import Audit, Operator
from aviso_workers.ops.dead_letters import NO_LINE, Group, Selection, StoredDeadLetters, grouped, portions
from aviso_workers.ops.inventory import Denials, asked, noted
from aviso_workers.state import dead_letter_records, own_streams, worker_records
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId
from aviso_workers.state.own_streams import DEAD_LETTERS
from aviso_workers.state.worker_records import AppWorkers

FILTERS = ("app", "agent", "reason", "stream", "notifications", "error", "line", "since", "until", "sequence")
"""The fields of a filter."""
MAX_DIGITS = 20
"""Fewer than a sequence can have, or a time in nanoseconds."""
SHOWN, MOST_LISTED = 20, 1000
"""Of the newest, how many a part of the list shows, and how many are listed."""
DAY = timedelta(days=1)
LOOK_SECONDS = 1.0
"""How long it is read at most, for one look at jobs, what has become a dead letter again."""
ELECTION_SECONDS, AGAIN_SECONDS = 30.0, 1.0
"""For how long, and how often, a job tries again where a server does not answer: another one takes over by then."""
BY_AGENT = attrgetter("app", "agent")
MAX_FAILURES = 100
"""After so many portions of a job that fail, it gives up."""
MOST_VALUES, MOST_NAMED = 1000, 3
"""How many values of a field are counted, and how many are named."""
MOST_DIGITS = 18
BARS = 22
TOLD = {
    "attempts_exhausted": "failed for {}{}, in all attempts",
    "rejected": "rejected {}{}",
    "skipped": "failed for {}{}, until somebody decided to skip",
    "undecodable": "could not read {}{}",
    "worker_died": "ended its worker while it handled {}{}",
}
"""By reason, what an agent did."""


class Values(Struct, kw_only=True):
    """The values of one field."""

    count: int = 0
    """How many dead letters have the field."""
    seen: set[str] = field(default_factory=set)
    has_more: bool = False
    """Whether there are others than those that were `seen`."""

    def add(self, value: str) -> None:
        self.count += 1
        if len(self.seen) < MOST_VALUES:
            self.seen.add(value)
        self.has_more = self.has_more or value not in self.seen

    @property
    def single(self) -> str:
        """The value that all have; empty where they differ."""
        return min(self.seen) if len(self.seen) == 1 and not self.has_more else ""

    @property
    def many(self) -> str:
        return f"{'more than ' if self.has_more else ''}{len(self.seen):,} values"

    @property
    def text(self) -> str:
        are_numbers = all(each.isascii() and each.isdecimal() and len(each) < MOST_DIGITS for each in self.seen)
        if self.has_more:
            return self.many
        if are_numbers and len(self.seen) > 1:
            return f"{min(self.seen, key=int)} to {max(self.seen, key=int)}"
        return ", ".join(sorted(self.seen)) if len(self.seen) <= MOST_NAMED else self.many


class Cause(Struct, kw_only=True):
    """Dead letters of one cause."""

    group: Group
    error: str = ""
    """The text of the first one's error."""
    differs: bool = False
    """Whether the texts of their errors differ."""
    attempts: Values = field(default_factory=Values)
    identifier: dict[str, Values] = field(default_factory=dict)
    minutes: Counter[int] = field(default_factory=Counter)
    """How many became dead letters in each minute since 1970."""

    def add(self, dead_letter: DeadLetter, identifier: Mapping[str, str]) -> None:
        self.error = self.error or dead_letter.error
        self.differs = self.differs or dead_letter.error != self.error
        self.attempts.add(str(dead_letter.attempts))
        self.minutes[int(dead_letter.time.timestamp()) // 60] += 1
        for name, value in identifier.items():
            self.identifier.setdefault(name, Values()).add(value)

    @property
    def bars(self) -> list[float]:
        """How many there were from the first to the last, in parts of the same length: of the largest part, 1.0. Empty
        where that takes less than `BARS` minutes.
        """
        first, last = min(self.minutes), max(self.minutes)
        if last - first < BARS:
            return []
        parts = [0] * BARS
        for minute, count in self.minutes.items():
            parts[(minute - first) * BARS // (last - first + 1)] += count
        return [part / max(parts) for part in parts]

    @property
    def filters(self) -> dict[str, str]:
        """The filter that selects them."""
        group = self.group
        found = {"app": group.app, "agent": group.agent, "reason": group.reason, "error": group.kind}
        return {name: text for name, text in found.items() if text} | {"line": group.at or NO_LINE}

    @property
    def common(self) -> str:
        """What their notifications have in common, such as `class=od date=20261128, step 0 to 240`."""
        same = " ".join(f"{name}={each.single}" for name, each in self.identifier.items() if each.single)
        others = (f"{name} {each.text}" for name, each in self.identifier.items() if not each.single)
        return ", ".join(filter(None, (same, *others)))

    def told(self, what: str) -> str:
        """Return what the agent did with them, which are called so."""
        at, did = f" at {self.group.at}" if self.group.at else "", TOLD.get(self.group.reason)
        return did.format(what, at) if did else f"gave up {what} ({self.group.reason}){at}"


class Causes:
    """The causes of dead letters. Identifiers are read out of the subjects of the event types of `config`."""

    def __init__(self, config: Config) -> None:
        topics_ = (schema.topic_of(name, each) for name, each in config.notification_schema.items())
        self._fields = {topic.base: topic.key_order for topic in topics_}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._found: dict[int, Cause] = {}
        """By the identity of the group."""

    def add(self, dead_letter: DeadLetter) -> None:
        """Add a dead letter, the oldest of all first, to its cause."""
        group = grouped(self._groups, dead_letter)
        self._found.setdefault(id(group), Cause(group=group)).add(dead_letter, self.identifier(dead_letter))

    def identifier(self, dead_letter: DeadLetter) -> dict[str, str]:
        """Return the identifier of its notification; empty where the subject is none of a known event type."""
        try:
            base, *values = topics.decode_subject(dead_letter.original.subject)
        except UndecodableError:
            return {}
        names = self._fields.get(base, ())
        if len(names) != len(values):
            return {}
        return {name: value for name, value in zip(names, values, strict=True) if value not in LEFT_OUT}

    def largest_first(self) -> list[Cause]:
        return sorted(self._found.values(), key=lambda each: -each.group.count)


class SelectedLetters(Struct, kw_only=True):
    """What a filter selects."""

    kept: int | None = None
    """Dead letters that there are, selected or not; None where our user may not ask for them."""
    denied: str = ""
    """What the server denies our user, so that not all of them are here."""
    count: int = 0
    """Dead letters that are selected."""
    of_day: int = 0
    """Those of the last day."""
    last: int = 0
    """The time of the newest, in nanoseconds."""
    causes: list[Cause] = []
    """All of them, by their causes, the largest one first."""
    newest: list[DeadLetter] = []
    """Some of them, the newest first, without their bodies."""


class DeadLetterLists:
    """Lists dead letters for all who ask, one filter after another. Who asks for the same meanwhile gets the same."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._reading = anyio.Lock()
        self._newest: tuple[Mapping[str, str], float, SelectedLetters] | None = None
        """The filter, when it began to be read, and what was found."""

    async def of(self, fields: Mapping[str, str], config: Config, *, now: datetime) -> SelectedLetters:
        """Return what a filter selects. `config` has the known event types, and `now` is by the server's clock. Raises
        `InvalidPositionError` for a date or a sequence that is none, what `aviso_admin.filters_of` raises, and
        `BackendError`.
        """
        chosen, asked_at = {name: fields.get(name, "") for name in FILTERS}, anyio.current_time()
        async with self._reading:
            if self._newest is None or self._newest[0] != chosen or self._newest[1] < asked_at:
                began = anyio.current_time()
                self._newest = (chosen, began, await _listed(self._admin, chosen, config, now - DAY))
            return self._newest[2]


async def _listed(admin: Admin, fields: Mapping[str, str], config: Config, yesterday: datetime) -> SelectedLetters:
    stored, causes = StoredDeadLetters(admin, events=Events()), Causes(config)
    found, denied, wanted, matches = SelectedLetters(), Denials(), _selection(fields), _matcher(fields, config)
    with noted(denied, "dead letters"):
        found.kept = await stored.count()
        async for dead_letter in _selected(stored, wanted, matches):
            found.count += 1
            found.of_day += dead_letter.time >= yesterday
            found.last = max(found.last, dead_letter.stored.timestamp_ns)
            causes.add(dead_letter)
            bare = structs.replace(dead_letter.original, data=b"")
            found.newest.append(structs.replace(dead_letter, original=bare, stored=bare))
            if len(found.newest) >= 2 * MOST_LISTED:
                found.newest = _newest(found.newest)
    found.newest = _newest(found.newest)
    found.denied = denied.text()
    found.causes = causes.largest_first()
    return found


def _newest(dead_letters: list[DeadLetter]) -> list[DeadLetter]:
    return sorted(dead_letters, key=lambda each: each.time, reverse=True)[:MOST_LISTED]


async def get(admin: Admin, app: str, sequence: int) -> DeadLetter:
    """Return the dead letter of an app that has this sequence. Raises `NotFoundError`, `BackendError`."""
    return await StoredDeadLetters(admin, events=Events()).get(sequence, app)


class Chosen(Struct, kw_only=True):
    """The dead letters that an action is to be carried out on."""

    created: dict[str, datetime | None]
    """By app, when the stream of its dead letters was created."""
    times: dict[LetterId, int]
    """When each was stored, in nanoseconds."""
    notifications: dict[str, tuple[int, int]]
    """By stream, the first and the last sequence of their notifications."""
    causes: list[Cause]

    @property
    def agents(self) -> list[str]:
        return sorted({f"{each.group.app}/{each.group.agent}" for each in self.causes})


async def selected(admin: Admin, fields: Mapping[str, str], config: Config, *, until_ns: int | None) -> Chosen:
    """Return the dead letters that a filter selects, up to the time `until_ns` in nanoseconds. Raises as
    `DeadLetterLists.of` does.
    """
    stored, causes = StoredDeadLetters(admin, events=Events()), Causes(config)
    wanted, matches = _selection(fields), _matcher(fields, config)
    times: dict[LetterId, int] = {}
    notifications: dict[str, tuple[int, int]] = {}
    async for each in _selected(stored, wanted, matches):
        if until_ns is None or each.stored.timestamp_ns <= until_ns:
            times[each.id] = each.stored.timestamp_ns
            causes.add(each)
            sequence = each.original.sequence
            first, last = notifications.get(each.stream, (sequence, sequence))
            notifications[each.stream] = (min(first, sequence), max(last, sequence))
    apps = sorted({app for app, _ in times})
    infos = {app: await inventory.existing(admin.stream_info(own_streams.of_app(DEAD_LETTERS, app))) for app in apps}
    created = {app: info.created if info else None for app, info in infos.items()}
    return Chosen(created=created, times=times, notifications=notifications, causes=causes.largest_first())


async def hindrances(admin: Admin, chosen: Chosen) -> list[str]:
    """Return in sentences what keeps dead letters waiting that are handed back, or lets them fail again. Raises
    `BackendError`.
    """
    denied, found = Denials(), list[str]()
    consumers = await asked(denied, "retries", agent_inventory.retries(admin), {})
    for agent, consumer in sorted(consumers.items()):
        if consumer.paused and "/".join(agent) in chosen.agents:
            found.append(f"{'/'.join(agent)} is paused: they wait until somebody resumes it.")
    for app in chosen.created:
        workers = await asked(denied, "workers", worker_records.of_app(admin, app), AppWorkers())
        running = health.by_version(workers)
        if len(running) > 1:
            runs = " and ".join(f"{code} on {counted(len(of_it), 'worker')}" for code, of_it in sorted(running.items()))
            found.append(f"{app} runs {runs}: some may come to the version with which they failed.")
    if said := denied.text():
        found.append(f"Whether their agents are paused, or run several versions, is {said}.")
    return found


def told(chosen: Chosen, fields: Mapping[str, str]) -> str:
    """Return what a filter selects, such as `3 dead letters of field/index (reason rejected) are`."""
    count, agents = len(chosen.times), chosen.agents
    are_named = len(agents) <= MOST_NAMED
    by = [f"{name} {text}" for name, text in fields.items() if not are_named or name not in ("app", "agent")]
    of = ", ".join(agents) if are_named else f"{len(agents)} agents"
    chosen_by = f" ({', '.join(by)})" if by else ""
    return f"{counted(count, 'dead letter')} of {of}{chosen_by} {'are' if count > 1 else 'is'}"


def which(chosen: Chosen) -> list[str]:
    """Return in sentences which notifications they are of."""
    of = [
        f"{stream}@{first} to @{last}" if first < last else f"{stream}@{first}"
        for stream, (first, last) in chosen.notifications.items()
    ]
    common = f", {chosen.causes[0].common}" if len(chosen.causes) == 1 and chosen.causes[0].common else ""
    return [f"{'It is' if len(chosen.times) == 1 else 'They are'} of {', '.join(of)}{common}."]


def address(fields: Mapping[str, str]) -> str:
    """Return the address of the page of what a filter selects."""
    if {"app", "sequence"} <= fields.keys():
        return f"/dead-letters/{quote(fields['app'], safe='')}/{quote(fields['sequence'])}"
    return f"/dead-letters?{urlencode(fields)}" if fields else "/dead-letters"


async def act(admin: Admin, audit: Audit, job: Job) -> None:
    """Drop or retry exactly the dead letters of the job, at most `job.rate` of them a second. What fails is noted in
    the job, and the others go on; where no server answers, it is tried again.

    Raises `BackendError` where too much fails, and `NotFoundError` where the stream was deleted or made again.
    """
    operator = Operator(f"{job.who}, console", audit)
    stored = StoredDeadLetters(admin, events=Events(), operator=operator)
    do = partial(StoredDeadLetters.retry if job.hands_back else StoredDeadLetters.drop, stored)
    done, failing_since = -1, 0.0

    while job.left:
        in_time = job.done > done or anyio.current_time() - failing_since < ELECTION_SECONDS
        patient = in_time and not job.failures
        try:
            for app in job.created:
                await _stream_of(admin, job, app)
            chosen = _selected(stored, Selection(chosen=frozenset(job.left)))
            async with aclosing(chosen), aclosing(portions(chosen, rate=job.rate)) as found:
                async for portion in found:
                    for app in {each.app for each in portion}:
                        await _stream_of(admin, job, app)
                    # Apart by agent: one that cannot be handed back holds up those of no other agent.
                    with anyio.CancelScope(shield=True):  # a portion that has begun is finished, and counted
                        for _, of_agent in groupby(sorted(portion, key=BY_AGENT), key=BY_AGENT):
                            await _act_on([*of_agent], do, job, patient=patient)
            return
        except (UnavailableError, OutcomeUnknownError) as error:
            if not patient:
                raise
            if job.done > done:
                done, failing_since = job.done, anyio.current_time()
            job.asked_again, job.away = True, f"it is tried again, since {describe(error)}"
        await anyio.sleep(AGAIN_SECONDS)


async def came_to(admin: Admin, *jobs: Job) -> dict[int, CameTo]:
    """Return what has become of the dead letters that jobs have handed back, by the job's number."""
    jobs, found = tuple(job for job in jobs if job.agents and job.hands_back), dict[int, CameTo]()
    if not jobs:
        return found
    try:  # before the dead letters: one that fails meanwhile is counted as one that waits, and not as handled
        waiting, why = {agent: each.lag for agent, each in (await agent_inventory.retries(admin)).items()}, ""
    except BackendError as error:
        waiting, why = {}, describe(error)
    with anyio.move_on_after(LOOK_SECONDS):
        for job in jobs:
            found[job.number] = await _came_to(admin, job, waiting, why)
    late = f"the server has not told it within {LOOK_SECONDS:g} s"
    return {job.number: found.get(job.number) or job.came_to_so_far(0, why or late) for job in jobs}


async def _came_to(admin: Admin, job: Job, waiting: Mapping[tuple[str, str], int], why: str) -> CameTo:
    try:
        async with job.looking:
            for app in job.created:
                await _look(admin, job, app)
    except NotFoundError as error:
        why = why or str(error)
    except BackendError as error:
        why = why or describe(error)
    if missing := sorted("/".join(agent) for agent in job.agents - waiting.keys()):
        why = why or f"{', '.join(missing)} has no consumer of what is handed back"
    return job.came_to_so_far(sum(waiting.get(agent, 0) for agent in job.agents), why)


async def _look(admin: Admin, job: Job, app: str) -> None:
    """Read what has become a dead letter again of one app: only what has come since it was read last, unless some were
    erased meanwhile. Raises `BackendError`, and `NotFoundError` as `_stream_of` does.
    """
    info, read = await _stream_of(admin, job, app), job.read.setdefault(app, ReadAgain())
    if not read.to or info.last_sequence - read.seen[0] != info.messages - read.seen[1]:
        read.failed, read.to = 0, max(sequence for of, sequence in job.letters if of == app)
    read.seen = (info.last_sequence, info.messages)
    handed_back = {str(sequence) for of, sequence in job.letters - job.left if of == app}
    subjects = [dead_letter_records.subject_of(of, agent) for of, agent in sorted(job.agents) if of == app]
    if read.to < info.last_sequence and subjects:
        start, last = read.to + 1, info.last_sequence
        reading = admin.read(info.name, filter_subjects=subjects, start_sequence=start, last_sequence=last)
        async with aclosing(reading):
            async for message in reading:
                read.to = message.sequence
                retried = (message.headers or {}).get(dead_letter_records.RETRIED, "")
                read.failed += retried.partition(".")[0] in handed_back
                read.most = max(read.most, read.failed)
        read.to = info.last_sequence


async def _stream_of(admin: Admin, job: Job, app: str) -> StreamInfo:
    """Return the stream of an app's dead letters of a job. Raises `NotFoundError` where it was deleted or made
    again.
    """
    stream = own_streams.of_app(DEAD_LETTERS, app)
    info = await inventory.existing(admin.stream_info(stream))
    if info is None or info.created != job.created[app]:
        raise NotFoundError(f"the stream {stream} was deleted or made again since")
    return info


async def _act_on(
    dead_letters: list[DeadLetter], do: Callable[..., Awaitable[None]], job: Job, *, patient: bool
) -> None:
    try:
        await do(*dead_letters, note=job.note)
    except BackendError as error:
        may_pass = patient and isinstance(error, UnavailableError | OutcomeUnknownError)
        if may_pass or len(job.failures) >= MAX_FAILURES:
            raise
        job.failures.append(f"{dead_letters[0].sequence} to {dead_letters[-1].sequence}: {describe(error)}")


async def _selected(
    stored: StoredDeadLetters, wanted: Selection, matches: Callable[[str], object] = bool
) -> AsyncGenerator[DeadLetter, None]:
    """Yield the selected dead letters of which the subject of the notification matches."""
    async with aclosing(stored.select(wanted)) as dead_letters:
        async for dead_letter in dead_letters:
            await anyio.lowlevel.checkpoint()  # other pages are made meanwhile
            if matches(dead_letter.original.subject):
                yield dead_letter


def _matcher(fields: Mapping[str, str], config: Config) -> Callable[[str], object]:
    """Return what says whether the subject of a notification is one of those that the filter asks for. Raises what
    `aviso_admin.filters_of` raises.
    """
    asked = fields.get("notifications", "").strip()
    return matcher(aviso_admin.filters_of(config, asked)) if asked else bool


def given(fields: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return those of the fields that are filled in."""
    return {name: text for name in names if (text := fields.get(name, "").strip())}


def _selection(fields: Mapping[str, str]) -> Selection:
    wanted: dict[str, Any] = {**given(fields, "app", "agent", "reason", "stream", "error", "line")}
    for name, text in given(fields, "since", "until").items():
        wanted[name] = parse_moment(text, name=name, now=datetime.now(UTC))
    for text in given(fields, "sequence").values():
        if (sequence := whole_number(text)) is None:
            raise InvalidPositionError(f"sequence: {text!r} is not the number of a dead letter")
        wanted["sequences"] = frozenset({sequence})
    return Selection(**wanted)


def whole_number(text: str) -> int | None:
    """Return the number that a text is; None where it is none that a sequence or a time in nanoseconds can be."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None
