"""Dead letters of the console: those that the fields of a filter select, listed and acted on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import attrgetter

import anyio
from msgspec import Struct

from aviso_workers.aviso.positions import parse_moment
from aviso_workers.backends import Admin
from aviso_workers.console.jobs import Job, ReadAgain
from aviso_workers.errors import (
    BackendError,
    InvalidPositionError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
    describe,
)
from aviso_workers.events import Events
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops import agent_inventory, inventory
from aviso_workers.ops.audit import Audit, Operator
from aviso_workers.ops.dead_letters import Group, Selection, StoredDeadLetters, grouped, portions
from aviso_workers.ops.denials import Denials, noted
from aviso_workers.state import dead_letter_records, own_streams
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId
from aviso_workers.state.own_streams import DEAD_LETTERS

FILTERS = ("app", "agent", "reason", "stream", "error", "line", "since", "until", "sequence")
"""The fields of a filter."""
MAX_DIGITS = 20
"""Fewer than a sequence can have, or a time in nanoseconds."""
SHOWN = 20
LOOK_SECONDS = 1.0
"""How long it is read at most, for one look at a job, what has become a dead letter again."""
ELECTION_SECONDS, AGAIN_SECONDS = 30.0, 1.0
"""For how long, and how often, a job tries again where a server does not answer: another one takes over by then."""
BY_AGENT = attrgetter("app", "agent")
MAX_FAILURES = 100
"""After so many portions of a job that fail, it gives up."""


class SelectedLetters(Struct, kw_only=True):
    """What a filter selects."""

    kept: int | None = None
    """Dead letters that there are, selected or not; None where our user may not ask for them."""
    denied: str = ""
    """What the server denies our user, so that not all of them are here."""
    count: int = 0
    """Dead letters that are selected."""
    groups: list[Group] = []
    """All of them, the largest group first."""
    newest: list[DeadLetter] = []
    """Some of them, the newest first."""


class DeadLetterLists:
    """Lists dead letters for all who ask, one filter after another. Who asks for the same meanwhile gets the same."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._reading = anyio.Lock()
        self._newest: tuple[Mapping[str, str], float, SelectedLetters] | None = None
        """The filter, when it began to be read, and what was found."""

    async def of(self, fields: Mapping[str, str]) -> SelectedLetters:
        """Return what a filter selects. Raises `InvalidPositionError` for a date or a sequence that is none, and
        `BackendError`.
        """
        chosen, asked = {name: fields.get(name, "") for name in FILTERS}, anyio.current_time()
        async with self._reading:
            if self._newest is None or self._newest[0] != chosen or self._newest[1] < asked:
                began = anyio.current_time()
                self._newest = (chosen, began, await _listed(self._admin, chosen))
            return self._newest[2]


async def _listed(admin: Admin, fields: Mapping[str, str]) -> SelectedLetters:
    stored = StoredDeadLetters(admin, events=Events())
    found, denied, wanted = SelectedLetters(), Denials(), _selection(fields)
    groups: dict[tuple[str, ...], Group] = {}
    with noted(denied, "dead letters"):
        found.kept = await stored.count()
        async for dead_letter in _selected(stored, wanted):
            found.count += 1
            grouped(groups, dead_letter)
            found.newest.append(dead_letter)
            if len(found.newest) >= 2 * SHOWN:
                found.newest = _newest(found.newest)
    found.newest = _newest(found.newest)
    found.denied = denied.text()
    found.groups = sorted(groups.values(), key=lambda group: -group.count)
    return found


def _newest(dead_letters: list[DeadLetter]) -> list[DeadLetter]:
    return sorted(dead_letters, key=lambda each: each.time, reverse=True)[:SHOWN]


async def get(admin: Admin, app: str, sequence: int) -> DeadLetter:
    """Return the dead letter of an app that has this sequence. Raises `NotFoundError`, `BackendError`."""
    return await StoredDeadLetters(admin, events=Events()).get(sequence, app)


async def selected(
    admin: Admin, fields: Mapping[str, str], *, until_ns: int | None
) -> tuple[dict[str, datetime | None], dict[LetterId, int]]:
    """Return when the streams of the apps were created, and of the dead letters that a filter selects the times in
    nanoseconds, up to `until_ns`. Raises as `DeadLetterLists.of` does.
    """
    stored = StoredDeadLetters(admin, events=Events())
    found = {each.id: each.stored.timestamp_ns async for each in _selected(stored, _selection(fields))}
    found = {key: time_ns for key, time_ns in found.items() if until_ns is None or time_ns <= until_ns}
    apps = sorted({app for app, _ in found})
    infos = {app: await inventory.existing(admin.stream_info(own_streams.of_app(DEAD_LETTERS, app))) for app in apps}
    return {app: info.created if info else None for app, info in infos.items()}, found


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
        except (UnavailableError, OutcomeUnknownError):
            if not patient:
                raise
            if job.done > done:
                done, failing_since = job.done, anyio.current_time()
            job.asked_again = True
        await anyio.sleep(AGAIN_SECONDS)


async def failed_again(admin: Admin, job: Job) -> str:
    """Return in words how many of those that a job has handed back are dead letters again by now, and how many are
    handled.
    """
    why, waiting, settled = f"the server has not told the rest within {LOOK_SECONDS:g} s", 0, False
    try:
        with anyio.move_on_after(LOOK_SECONDS):
            async with job.looking:
                for app in job.created:
                    await _look(admin, job, app)
            why = ""
            consumers = await agent_inventory.retries(admin)
            waiting = sum(consumers[agent].lag for agent in job.agents if agent in consumers)
            settled = not waiting and job.agents <= consumers.keys()
    except NotFoundError as error:
        why = str(error)
    except BackendError as error:
        why = describe(error)
    handled = job.done - job.failed_again - job.windows
    said = (
        f"{job.failed_again} are dead letters again",
        f"{handled} of {job.done} are handled" if settled else "",
        f"and it is not known whether more are: {why}" if why else "",
        f"of {job.windows} windows it is not known" if job.windows else "",
        f"their agents have {waiting} retries to finish" if waiting else "",
    )
    return "; ".join(filter(None, said))


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
        if patient and isinstance(error, UnavailableError | OutcomeUnknownError):
            raise
        if len(job.failures) >= MAX_FAILURES:
            raise
        job.failures.append(f"{dead_letters[0].sequence} to {dead_letters[-1].sequence}: {describe(error)}")


async def _selected(stored: StoredDeadLetters, wanted: Selection) -> AsyncGenerator[DeadLetter, None]:
    async with aclosing(stored.select(wanted)) as dead_letters:
        async for dead_letter in dead_letters:
            await anyio.lowlevel.checkpoint()  # other pages are made meanwhile
            yield dead_letter


def _selection(fields: Mapping[str, str]) -> Selection:
    given = {name: fields[name].strip() for name in FILTERS if fields.get(name, "").strip()}
    since, until = (
        parse_moment(given[name], name=name, now=datetime.now(UTC)) if name in given else None
        for name in ("since", "until")
    )
    return Selection(
        sequences=frozenset({_sequence(given["sequence"])}) if "sequence" in given else frozenset(),
        app=given.get("app"),
        agent=given.get("agent"),
        reason=given.get("reason"),
        stream=given.get("stream"),
        error=given.get("error"),
        line=given.get("line"),
        since=since,
        until=until,
    )


def _sequence(text: str) -> int:
    if (sequence := whole_number(text)) is None:
        raise InvalidPositionError(f"sequence: {text!r} is not the number of a dead letter")
    return sequence


def whole_number(text: str) -> int | None:
    """Return the number that a text is; None where it is none that a sequence or a time in nanoseconds can be."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None
