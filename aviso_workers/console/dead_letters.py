"""Dead letters of the console: those that the fields of a filter select, listed and acted on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import attrgetter

import anyio
from msgspec import Struct

from aviso_workers.aviso.positions import parse_date
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console.jobs import Job
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
from aviso_workers.ops.dead_letters import DeadLetter, Group, Selection, StoredDeadLetters, grouped, portions
from aviso_workers.ops.denials import Denials, noted
from aviso_workers.state import dead_letter_records
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

__all__ = [
    "FILTERS",
    "DeadLetterLists",
    "SelectedLetters",
    "act",
    "failed_again",
    "get",
    "of_notification",
    "selected",
    "whole_number",
]

FILTERS = ("app", "agent", "reason", "stream", "error", "line", "since", "until", "sequence")
"""The fields of a filter."""
MAX_DIGITS = 19
"""Fewer than a sequence can have."""
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

    async def of(self, config: Config, fields: Mapping[str, str]) -> SelectedLetters:
        """Return what a filter selects. Raises `InvalidPositionError` for a date or a sequence that is none, and
        `BackendError`.
        """
        chosen, asked = {name: fields.get(name, "") for name in FILTERS}, anyio.current_time()
        async with self._reading:
            if self._newest is None or self._newest[0] != chosen or self._newest[1] < asked:
                began = anyio.current_time()
                self._newest = (chosen, began, await _listed(self._admin, config, chosen))
            return self._newest[2]


async def _listed(admin: Admin, config: Config, fields: Mapping[str, str]) -> SelectedLetters:
    stored = StoredDeadLetters(admin, config, events=Events())
    found, denied, wanted = SelectedLetters(), Denials(), _selection(fields)
    groups: dict[tuple[str, ...], Group] = {}
    with noted(denied, "dead letters"):
        found.kept = await stored.count()
        async for dead_letter in _selected(stored, wanted):
            found.count += 1
            grouped(groups, dead_letter)
            found.newest = [dead_letter, *found.newest[: SHOWN - 1]]
    found.denied = denied.text()
    found.groups = sorted(groups.values(), key=lambda group: -group.count)
    return found


async def get(admin: Admin, config: Config, sequence: int) -> DeadLetter:
    """Return the dead letter of this sequence. Raises `NotFoundError`, `BackendError`."""
    return await StoredDeadLetters(admin, config, events=Events()).get(sequence)


async def of_notification(admin: Admin, config: Config, stream: str, sequence: int) -> dict[tuple[str, str], str]:
    """Return what the dead letters of one notification say, by app and agent. Raises `BackendError`."""
    stored = StoredDeadLetters(admin, config, events=Events())
    return {
        (each.app, each.agent): f"{each.sequence}: {each.reason} after {each.attempts} attempts: {each.error}"
        async for each in _selected(stored, Selection(stream=stream))
        if each.original.sequence == sequence
    }


async def selected(
    admin: Admin, config: Config, fields: Mapping[str, str], *, last: int | None
) -> tuple[datetime | None, list[int]]:
    """Return when the stream was created, and the sequences of what a filter selects, up to `last`. Raises as
    `DeadLetterLists.of` does.
    """
    info = await inventory.existing(admin.stream_info(DEAD_LETTERS))
    stored = StoredDeadLetters(admin, config, events=Events())
    found = [each.sequence async for each in _selected(stored, _selection(fields))]
    return info.created if info else None, [sequence for sequence in found if last is None or sequence <= last]


async def act(admin: Admin, config: Config, job: Job) -> None:
    """Drop or retry exactly the dead letters of the job, at most `job.rate` of them a second. What fails is noted in
    the job, and the others go on; where no server answers, it is tried again.

    Raises `BackendError` where too much fails, and `NotFoundError` where the stream was deleted or made again.
    """
    stored = StoredDeadLetters(admin, config, events=Events())
    do = partial(StoredDeadLetters.retry if job.hands_back else StoredDeadLetters.drop, stored)
    done, failing_since = -1, 0.0

    def is_patient() -> bool:
        in_time = job.done > done or anyio.current_time() - failing_since < ELECTION_SECONDS
        return in_time and not job.failures

    while job.left:
        try:
            await _stream_of(admin, job)
            chosen = _selected(stored, Selection(sequences=frozenset(job.left)))
            async with aclosing(chosen), aclosing(portions(chosen, rate=job.rate)) as found:
                async for portion in found:
                    await _stream_of(admin, job)
                    # Apart by agent: one that cannot be handed back holds up those of no other agent.
                    for _, of_agent in groupby(sorted(portion, key=BY_AGENT), key=BY_AGENT):
                        await _act_on([*of_agent], do, job, patient=is_patient())
            return
        except (UnavailableError, OutcomeUnknownError):
            if not is_patient():
                raise
            if job.done > done:
                done, failing_since = job.done, anyio.current_time()
            job.asked_again = True
        await anyio.sleep(AGAIN_SECONDS)


async def failed_again(admin: Admin, job: Job) -> str:
    """Return in words how many of those that a job has handed back are dead letters again by now."""
    why, waiting = f"the server has not told the rest within {LOOK_SECONDS:g} s", 0
    try:
        with anyio.move_on_after(LOOK_SECONDS):
            async with job.looking:
                await _look(admin, job)
            why = ""
            consumers = await agent_inventory.agents(admin, RETRIES)
            waiting = sum(consumers[agent].lag for agent in job.agents if agent in consumers)
    except NotFoundError as error:
        why = str(error)
    except BackendError as error:
        why = describe(error)
    said = (
        f"{job.failed_again} are dead letters again",
        f"and it is not known whether more are: {why}" if why else "",
        f"of {job.windows} windows it is not known" if job.windows else "",
        f"their agents have {waiting} retries to finish" if waiting else "",
    )
    return "; ".join(filter(None, said))


async def _look(admin: Admin, job: Job) -> None:
    """Read what has become a dead letter again: only what has come since it was read last, unless some were erased
    meanwhile. Raises `BackendError`, and `NotFoundError` as `_stream_of` does.
    """
    info = await _stream_of(admin, job)
    if not job.read_to or info.last_sequence - job.seen[0] != info.messages - job.seen[1]:
        job.failed_again, job.read_to = 0, max(job.sequences)
    job.seen = (info.last_sequence, info.messages)
    handed_back = {str(sequence) for sequence in job.sequences - job.left}
    subjects = [dead_letter_records.subject_of(app, agent) for app, agent in sorted(job.agents)]
    if job.read_to < info.last_sequence:
        start, last = job.read_to + 1, info.last_sequence
        reading = admin.read(DEAD_LETTERS, filter_subjects=subjects, start_sequence=start, last_sequence=last)
        async with aclosing(reading):
            async for message in reading:
                job.read_to = message.sequence
                retried = (message.headers or {}).get(dead_letter_records.RETRIED, "")
                job.failed_again += retried.partition(".")[0] in handed_back
        job.read_to = info.last_sequence


async def _stream_of(admin: Admin, job: Job) -> StreamInfo:
    """Return the stream of a job's dead letters. Raises `NotFoundError` where it was deleted or made again."""
    info = await inventory.existing(admin.stream_info(DEAD_LETTERS))
    if info is None or info.created != job.created:
        raise NotFoundError(f"the stream {DEAD_LETTERS} was deleted or made again since")
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
    return Selection(
        sequences=frozenset({_sequence(given["sequence"])}) if "sequence" in given else frozenset(),
        app=given.get("app"),
        agent=given.get("agent"),
        reason=given.get("reason"),
        stream=given.get("stream"),
        error=given.get("error"),
        line=given.get("line"),
        since=parse_date(given["since"], name="since") if "since" in given else None,
        until=parse_date(given["until"], name="until") if "until" in given else None,
    )


def _sequence(text: str) -> int:
    if (sequence := whole_number(text)) is None:
        raise InvalidPositionError(f"sequence: {text!r} is not the number of a dead letter")
    return sequence


def whole_number(text: str) -> int | None:
    """Return the number that a text is; None where it is none that a sequence can be."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None
