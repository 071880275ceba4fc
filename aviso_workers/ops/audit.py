"""The record of what operators do: kept in a stream before it is done, and again with what came of it.

What is erased is recorded once, before it is: where it is still there, it was not erased.
"""

from __future__ import annotations

import getpass
import socket
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from functools import partial

import anyio
import structlog
from msgspec import Struct, field, structs

from aviso_workers.aviso.codec import Message, store_time
from aviso_workers.backends import Admin
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, DeniedError, RefusedError, describe
from aviso_workers.events import Events
from aviso_workers.jetstream.info import StreamInfo
from aviso_workers.ops import inventory
from aviso_workers.state import audit_records
from aviso_workers.state.audit_records import (
    ACTIONS,
    MAX_RANGES,
    PURGED,
    Affected,
    AuditRecord,
    Deed,
    Erased,
    RecordedAction,
)
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import AUDIT

TIMEOUT_SECONDS = 10.0
END_SECONDS, AGAIN_SECONDS = 30.0, 1.0
"""For how long, and how often, it is tried to store the end of an action: a server has a successor by then."""
Agent = tuple[str, str]
"""Its app and its name."""
MOST_READ = 10_000
"""Records that are read for one look; each action has two."""
log = structlog.get_logger("aviso_workers.console")


class ActionResult(Struct, kw_only=True):
    """What comes of an action; whoever carries it out sets it."""

    text: str = ""
    state: audit_records.State = "done"
    affected: tuple[Affected, ...] = ()
    sequence: int = 0
    """Of the record of its begin."""


class Period(Struct, frozen=True, kw_only=True):
    """The actions that began in a time, as far as they are recorded."""

    actions: list[RecordedAction] = []
    """The newest first."""
    is_cut: bool = False
    """Whether there are older ones of this time, which were not read."""
    before: datetime | None = None
    """When the last one before this time began or ended; None where there is none."""
    first: datetime | None = None
    """When the first record was stored that is kept; None where there is none."""


class AffectedLetters:
    """The dead letters that an action has handed back or erased so far."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        """By agent and stream, the sequences of a notification and of its dead letter."""

    def note(self, dead_letter: DeadLetter) -> None:
        of = f"{dead_letter.app}/{dead_letter.agent}"
        self._found[of, dead_letter.stream].append((dead_letter.original.sequence, dead_letter.sequence))

    def records(self, how: str) -> tuple[Affected, ...]:
        """Return them as a record has them; `how` says what was done to them."""
        found, left = list[Affected](), MAX_RANGES
        for (of, stream), pairs in sorted(self._found.items()):
            ranges, letters = ([*inventory.ranges(sorted(set(each)))] for each in zip(*pairs, strict=True))
            more = sum(last - first + 1 for first, last in ranges[left:])
            kept, of_them = tuple(ranges[:left]), tuple(letters[:left])
            found.append(Affected(how=how, of=of, stream=stream, ranges=kept, letters=of_them, more=more))
            left -= max(len(kept), len(of_them))
        return tuple(found)


def this_user() -> str:
    """Return the user and the host of this process."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _why_not_recorded(error: BackendError) -> str:
    why = inventory.denial_text(error) if isinstance(error, DeniedError) else str(error)
    return f"not recorded in the audit: {why}"


class Records(Struct, kw_only=True):
    """What is recorded of a notification."""

    erased: dict[Agent, Erased] = {}
    """How its last dead letters were erased."""
    deeds: dict[Agent, list[Deed]] = field(default_factory=lambda: defaultdict(list))
    """Actions that affected it, in order of time."""
    purged: dict[str, Deed] = {}
    """The last purge of each stream since it was stored."""
    first: datetime | None = None
    """When the oldest record was stored; None where there is none."""
    is_whole: bool = False
    """Whether all that was recorded is kept."""


async def of_notification(admin: Admin, stream: str, sequence: int, *, since: datetime) -> Records:
    """Return what is recorded of a notification, which was stored at `since` or later. Raises `BackendError`."""
    found, begun = Records(), dict[int, datetime]()
    if (info := await inventory.existing(admin.stream_info(AUDIT))) is None:
        return found
    found.first, found.is_whole = info.first_time, info.first_sequence == 1
    subjects = (audit_records.erasures_of("*", "*"), ACTIONS)
    reading = admin.read(AUDIT, filter_subjects=subjects, start_time=since, last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for message in reading:
            time = store_time(message)
            if message.subject != ACTIONS:
                if (one := audit_records.erased(message, stream, sequence)) is not None:
                    found.erased[audit_records.agent_of(message.subject)] = one
            elif (record := audit_records.read(message)) is not None:
                begun[message.sequence] = time
                for each in record.affected:
                    deed = audit_records.deed(record, each.how, time, begun.get(record.begun or 0, time))
                    if each.how.startswith(PURGED):
                        found.purged[each.stream] = deed
                    elif each.of and each.has(stream, sequence):
                        app, _, agent = each.of.partition("/")
                        found.deeds[app, agent].append(deed)
    return found


async def removal(admin: Admin, stream: str, sequence: int, *, since: datetime) -> Deed | None:
    """Return which action, at `since` or later, was the last that removed a message from its stream. Raises
    `BackendError`.
    """
    if (info := await inventory.existing(admin.stream_info(AUDIT))) is None:
        return None
    found: Deed | None = None
    async with aclosing(await _newest(admin, info, MOST_READ)) as reading:
        async for message in reading:
            time = store_time(message)
            if time < since or (record := audit_records.read(message)) is None:
                continue
            for each in record.affected:
                if not each.of and each.has(stream, sequence):
                    found = audit_records.deed(record, each.how, time, time)
    return found


async def _newest(admin: Admin, info: StreamInfo, count: int) -> AsyncGenerator[Message, None]:
    """Return the reading of so many of the newest records, and of some before them."""
    first = await inventory.start_of_newest(admin, AUDIT, info, (ACTIONS,), count)
    return admin.read(AUDIT, filter_subjects=(ACTIONS,), start_sequence=first, last_sequence=info.last_sequence)


class Audit:
    """The records of actions on a server."""

    def __init__(self, admin: Admin, config: Config, *, warn: Callable[[str], None] | None = None) -> None:
        """`warn` is for commands: it is told what cannot be recorded, and the action goes on."""
        self._admin = admin
        self._warn = warn
        self._spec = audit_records.stream_spec(config)
        self._streams = Provisioner(admin, management="reconcile", events=Events(), removes_replicas=False)

    @asynccontextmanager
    async def recorded(
        self, who: str, action: str, of: str, selection: Mapping[str, str] | None = None
    ) -> AsyncIterator[ActionResult]:
        """Record that an action begins, and, behind the block, what came of it.

        Raises `BackendError` where the begin cannot be stored, and nobody is warned: then the block is not entered, and
        nothing was done. An end that cannot be stored is logged only.
        """
        by_command, chosen = self._warn is not None, dict(selection or {})
        begun = AuditRecord(who=who, by_command=by_command, action=action, of=of, selection=chosen, state="begun")
        result, patience = ActionResult(), END_SECONDS
        try:
            result.sequence = await self._store(audit_records.message_of(begun))
        except BackendError as error:
            if self._warn is None:
                raise
            self._warn(f"{_why_not_recorded(error)}; it is done all the same")
        if not result.sequence:
            yield result
            return
        try:
            yield result
        except anyio.get_cancelled_exc_class():
            result.state, patience = "stopped", 0.0  # the console may end
            raise
        except BaseException as error:
            result.state, result.text = "failed", "; ".join(filter(None, (result.text, describe(error))))
            raise
        finally:
            if self._warn is None:
                log.info("console.acted", who=who, action=action, of=of, selection=chosen, state=result.state)
            ended = {"state": result.state, "result": result.text, "affected": result.affected}
            end = structs.replace(begun, begun=result.sequence, **ended)
            with anyio.CancelScope(shield=True):  # also where the console ends meanwhile
                try:
                    await self._store(audit_records.message_of(end), until=anyio.current_time() + patience)
                except BackendError as error:
                    if self._warn is not None:
                        self._warn(f"what came of it: {_why_not_recorded(error)}")
                    else:
                        log.warning("console.end_not_recorded", action=action, error=describe(error))

    async def erases(self, by: str, dead_letters: Sequence[DeadLetter]) -> None:
        """Record that dead letters are about to be erased. Raises `BackendError`: then they are not to be."""
        for message in audit_records.erasures(by, dead_letters):
            await self._store(message)

    async def newest(self, count: int) -> list[RecordedAction]:
        """Return about so many of the newest actions, the newest first. Raises `BackendError`."""
        info = await inventory.existing(self._admin.stream_info(AUDIT))
        if info is None:
            return []  # it is made with the first action
        async with aclosing(await _newest(self._admin, info, 2 * count)) as reading:
            return audit_records.joined([message async for message in reading], since=info.first_sequence)[:count]

    async def period(self, since: datetime, until: datetime) -> Period:
        """Return the actions that began at `since` or later, and before `until`: of many, the newest. Raises
        `BackendError`.
        """
        info = await inventory.existing(self._admin.stream_info(AUDIT))
        if info is None:
            return Period()
        count = partial(self._admin.count, AUDIT, filter_subjects=(ACTIONS,))
        newer, later = await count(start_time=since), await count(start_time=until)
        reading = await _newest(self._admin, info, min(newer, later + MOST_READ) + 1)  # and the one before
        found, running, before, last = list[Message](), set[int](), None, 0
        async with aclosing(reading):
            async for message in reading:
                time, record = store_time(message), audit_records.read(message)
                if time < since:
                    before = time
                elif time < until:
                    last = message.sequence
                elif not running or message.sequence > last + MOST_READ:
                    break
                if record is not None and (since <= time < until or record.begun in running):
                    found.append(message)
                    running.add(message.sequence) if record.begun is None else running.discard(record.begun)
        return Period(
            actions=audit_records.joined(found, since=info.first_sequence),
            is_cut=newer - later > MOST_READ,
            before=before,
            first=info.first_time,
        )

    async def _store(self, message: Message, *, until: float = 0.0) -> int:
        """Store a record, and try again where no server answers, until this time. Raises `BackendError`."""
        message_id, tried = uuid.uuid4().hex, 0
        while True:
            try:
                await self._streams.ensure(self._spec)
                ack = await self._admin.publish(
                    message, message_id=message_id, stream=AUDIT, timeout_seconds=TIMEOUT_SECONDS
                )
                return ack.sequence
            except BackendError as error:
                self._streams.forget(AUDIT)  # it may have been deleted: it is looked at, and made, once more
                last = tried and (isinstance(error, RefusedError) or anyio.current_time() > until)
                if last or isinstance(error, DeniedError):
                    raise
            await anyio.sleep(AGAIN_SECONDS if tried else 0)
            tried += 1


class Operator(Struct, frozen=True):
    """Who acts on a server, and where that is recorded."""

    name: str
    audit: Audit
