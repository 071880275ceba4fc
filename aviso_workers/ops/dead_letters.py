"""Operations on dead letters: list them, hand them back to the agents that failed, or delete them.

Called by the commands `dead-letters ...`. A dead letter is handed back by a copy to the retries, where only its agent
reads, and is deleted when the copy is acknowledged. The copy's message id is made of the dead letter's sequence and
time, so that a retry that was broken off in between can be repeated. Many are handed back at a time (`portions`): their
copies are published together, and when the server has acknowledged them, the dead letters are deleted, many at once.
`engine.dead_letter_store` stores them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from aviso_workers.backends import Admin, Outgoing, PubAck
from aviso_workers.declare import agents
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UndecodableError
from aviso_workers.events import Events, Skipped
from aviso_workers.ops import agent_inventory, inventory
from aviso_workers.ops.audit import Operator
from aviso_workers.state import dead_letter_records, own_streams, window_records
from aviso_workers.state.dead_letter_records import DeadLetter, LetterId
from aviso_workers.state.own_streams import DEAD_LETTERS, RETRIES

TIMEOUT_SECONDS = 10.0
PORTION = 500
"""Dead letters that are retried or dropped at a time, at most."""
PORTION_BYTES = 8 * 2**20
"""The most bytes that their bodies may take in memory; a single one may take more."""
DELETES_AT_ONCE, ERASURES_AT_ONCE = 64, 4
"""Requests to delete a message, and to overwrite it as well, that are under way at the same time. A server writes the
file of a message anew for each of the latter, and answers nobody else until those that it has are done.
"""
NO_LINE = "none"


def _nothing(_dead_letter: DeadLetter) -> None:
    pass


class Selection(Struct, frozen=True, kw_only=True):
    """A selection of dead letters: those to which all stated conditions apply."""

    chosen: frozenset[LetterId] = frozenset()
    sequences: frozenset[int] = frozenset()
    """Those of one app, or of all apps."""
    app: str | None = None
    agent: str | None = None
    reason: str | None = None
    stream: str | None = None
    """The stream of the original, in any case."""
    since: datetime | None = None
    """Dead-lettered at this time or later."""
    until: datetime | None = None
    """Dead-lettered at this time or before."""
    error: str | None = None
    """A part of the error's text, in any case."""
    line: str | None = None
    """The file and the line that raised the error, such as `fields.py:12`; `NO_LINE` where none is known."""

    def takes(self, dead_letter: DeadLetter) -> bool:
        return all(
            (
                not self.chosen or dead_letter.id in self.chosen,
                not self.sequences or dead_letter.sequence in self.sequences,
                self.app is None or dead_letter.app == self.app,
                self.agent is None or dead_letter.agent == self.agent,
                self.reason is None or dead_letter.reason == self.reason,
                self.stream is None or dead_letter.stream.lower() == self.stream.lower(),
                self.since is None or dead_letter.time >= self.since,
                self.until is None or dead_letter.time <= self.until,
                self.error is None or self.error.lower() in dead_letter.error.lower(),
                self.line is None or self.line == (line_of(dead_letter) or NO_LINE),
            )
        )


class Group(Struct, kw_only=True):
    """Dead letters of one agent that failed in the same way: with the same reason and class of error, at the same
    line.
    """

    app: str
    agent: str
    reason: str
    kind: str
    """The class of the error, such as `ValueError`; empty where there is none."""
    at: str
    """The file and the line that raised it, such as `fields.py:12`; empty where that is not known."""
    count: int = 0
    first: datetime
    """When the oldest was dead-lettered."""
    newest: DeadLetter

    @property
    def last(self) -> datetime:
        """When the newest was dead-lettered."""
        return self.newest.time


def line_of(dead_letter: DeadLetter) -> str:
    """Return the file and the line that raised the error, such as `fields.py:12`; empty where that is not known."""
    return dead_letter.traceback.rpartition(" > ")[2].partition(" ")[0]


def grouped(groups: dict[tuple[str, ...], Group], dead_letter: DeadLetter) -> Group:
    """Add a dead letter, the oldest of all first, to those that failed in the same way, and return these."""
    kind, at = dead_letter.error.partition(":")[0], line_of(dead_letter)
    of = (dead_letter.app, dead_letter.agent, dead_letter.reason, kind, at)
    group = groups.get(of)
    if group is None:
        groups[of] = group = Group(
            app=of[0], agent=of[1], reason=of[2], kind=kind, at=at, first=dead_letter.time, newest=dead_letter
        )
    group.count += 1
    group.newest = dead_letter
    return group


class StoredDeadLetters:
    """The dead letters that a server stores. Every method raises `BackendError`."""

    def __init__(self, admin: Admin, *, events: Events, operator: Operator | None = None) -> None:
        """`operator` is who acts on them, which is recorded; None where nobody does, or nothing is recorded."""
        self._events = events
        self._operator = operator
        self._admin = admin
        self._readers: set[tuple[str, str]] = set()
        """Apps and agents that are known to read the retries."""

    async def select(self, wanted: Selection) -> AsyncGenerator[DeadLetter, None]:
        """Yield the selected dead letters, one app after another, the oldest of an app first. A message that is not a
        dead letter is reported as `Skipped`. Raises `DeclarationError` where an app is wanted of a name that
        none can have.
        """
        apps = {app for app, _ in wanted.chosen}
        if not apps:
            named = {agents.check_name("app", wanted.app)} if wanted.app else None
            apps = named or {*await own_streams.apps_with(self._admin, DEAD_LETTERS)}
        for app in sorted(apps):
            async with aclosing(self._select_of(app, wanted)) as dead_letters:
                async for dead_letter in dead_letters:
                    yield dead_letter

    async def _select_of(self, app: str, wanted: Selection) -> AsyncGenerator[DeadLetter, None]:
        stream = own_streams.of_app(DEAD_LETTERS, app)
        if not (info := await inventory.existing(self._admin.stream_info(stream))):
            return  # made with the first dead letter
        sequences = wanted.sequences | {sequence for of, sequence in wanted.chosen if of == app}
        last = info.last_sequence
        reading = self._admin.read(
            stream,
            filter_subjects=(),
            start_sequence=min(sequences, default=1),
            last_sequence=min(last, max(sequences, default=last)),
        )
        async with aclosing(reading):
            async for message in reading:
                try:
                    dead_letter = DeadLetter.read(message, app)
                except UndecodableError as error:
                    self._events.emit(Skipped(event_type=stream, sequence=message.sequence, error=error))
                    continue
                if wanted.takes(dead_letter):
                    yield dead_letter

    async def get(self, sequence: int, app: str | None = None) -> DeadLetter:
        """Return the dead letter of this sequence, of one app. Raises `NotFoundError`, and `RefusedError` where no app
        is named and several have one.
        """
        wanted = Selection(sequences=frozenset({sequence}), app=app)
        async with aclosing(self.select(wanted)) as dead_letters:
            found = [dead_letter async for dead_letter in dead_letters]
        if not found:
            raise NotFoundError(f"no dead letter {sequence}" + (f" of app {app}" if app else ""))
        require_one_app({each.app for each in found})
        return found[0]

    async def count(self) -> int:
        """Return how many dead letters are kept."""
        return sum((await agent_inventory.dead_letters(self._admin)).values())

    async def retry(self, *dead_letters: DeadLetter, note: Callable[[DeadLetter], None] = _nothing) -> None:
        """Hand dead letters back to the agents that failed, as if they were new notifications; `note` is called for
        each that is, and is not among the dead letters any more. It is not called for one that somebody else has
        retried or dropped meanwhile. One that is retried and dropped at the same time is handed back.

        Where no worker of an agent has ever been there to take its dead letters, or a copy cannot be stored, these dead
        letters stay, the others are handed back, and the error is raised: `RefusedError` in the first case.
        `BackendError` is also raised where some were handed back and cannot be deleted.
        """
        failures: list[BackendError] = []
        for app, agent in sorted({(each.app, each.agent) for each in dead_letters}):
            try:
                await self._require_reader(app, agent)
            except RefusedError as error:
                failures.append(error)
        taken = [each for each in dead_letters if (each.app, each.agent) in self._readers]
        copied = await self._copy([dead_letter for dead_letter in taken if not is_window(dead_letter)], failures)
        copied += await self._put_back([dead_letter for dead_letter in taken if is_window(dead_letter)], failures)
        # The copy is in the retries: that the dead letter's own bytes stay on disk for a while as well changes nothing.
        try:
            await self._delete(copied, note, overwrite=False)
        except BackendError as error:
            raise type(error)(
                "they are handed back, and some are still among the dead letters, because these cannot be deleted: "
                f"{error}. Within an hour, `retry` hands none of them back twice",
                code=error.code,
            ) from error
        if failures:
            raise failures[0]

    async def drop(self, *dead_letters: DeadLetter, note: Callable[[DeadLetter], None] = _nothing) -> None:
        """Erase the dead letters, which is recorded first; `note` is called for each that nobody else has retried or
        dropped meanwhile.
        """
        if self._operator is not None and dead_letters:
            await self._operator.audit.erases(self._operator.name, dead_letters)
        await self._delete(dead_letters, note, overwrite=True)

    async def _copy(self, dead_letters: Sequence[DeadLetter], failures: list[BackendError]) -> list[DeadLetter]:
        """Copy dead letters to the retries, return those whose copies are stored, and add the errors of the others to
        `failures`.
        """
        by = self._operator.name if self._operator is not None else ""
        copies = [dead_letter_records.retry_of(dead_letter, by) for dead_letter in dead_letters]
        outgoing = [Outgoing(message, message_id, stream) for message, message_id, stream in copies]
        results = await self._admin.publish_many(outgoing, timeout_seconds=TIMEOUT_SECONDS) if outgoing else []
        failures += [result for result in results if isinstance(result, BackendError)]
        return [
            dead_letter for dead_letter, result in zip(dead_letters, results, strict=True) if isinstance(result, PubAck)
        ]

    async def _put_back(self, dead_letters: Sequence[DeadLetter], failures: list[BackendError]) -> list[DeadLetter]:
        """Put the windows of dead letters back to those that are not done, and return the dead letters for which that
        succeeded.

        The errors of the others are added to `failures`.
        """
        done = []
        for dead_letter in dead_letters:
            try:
                await window_records.put_back(
                    self._admin, dead_letter.original, app=dead_letter.app, agent=dead_letter.agent
                )
            except UndecodableError as error:
                failures.append(RefusedError(f"dead letter {dead_letter.sequence} is of no window: {error}"))
            except BackendError as error:
                failures.append(error)
            else:
                done.append(dead_letter)
        return done

    async def _delete(
        self, dead_letters: Sequence[DeadLetter], note: Callable[[DeadLetter], None], *, overwrite: bool
    ) -> None:
        left = iter(dead_letters)
        failures: list[BackendError] = []

        async def delete_some() -> None:
            for dead_letter in left:
                stream = own_streams.of_app(DEAD_LETTERS, dead_letter.app)
                try:
                    await self._admin.delete_message(stream, dead_letter.sequence, overwrite=overwrite)
                except NotFoundError:
                    continue  # somebody else was faster
                except BackendError as error:
                    failures.append(error)
                    return
                note(dead_letter)

        async with anyio.create_task_group() as deleting:
            for _ in dead_letters[: ERASURES_AT_ONCE if overwrite else DELETES_AT_ONCE]:
                deleting.start_soon(delete_some)
        if failures:
            raise failures[0]

    async def _require_reader(self, app: str, agent: str) -> None:
        """Raise `RefusedError` unless the agent has a consumer of the retries: else its dead letters would wait there
        for ever.
        """
        if (app, agent) in self._readers:
            return
        retries = own_streams.of_app(RETRIES, app)
        if not await inventory.existing(self._admin.consumer_info(retries, agents.durable_name(app, agent))):
            raise RefusedError(
                f"agent {agent} of app {app} has no consumer for retries: start a worker of the app first. The dead "
                "letters are unchanged"
            )
        self._readers.add((app, agent))


def require_one_app(apps: Collection[str]) -> None:
    """Raise `RefusedError` where dead letters that were asked for by their sequences are of several apps."""
    if len(apps) > 1:
        raise RefusedError(f"apps {', '.join(sorted(apps))} have dead letters of these sequences: name the app")


def is_window(dead_letter: DeadLetter) -> bool:
    """Return whether it is a window, which is put back to those that are not done."""
    return window_records.is_window(dead_letter.stream, app=dead_letter.app, agent=dead_letter.agent)


async def portions(
    dead_letters: AsyncIterator[DeadLetter], *, rate: float | None = None
) -> AsyncGenerator[list[DeadLetter], None]:
    """Yield the dead letters in lists of as many as are retried or dropped at a time, at most `rate` a second."""
    most = max(1, min(int(rate or PORTION), PORTION))
    portion: list[DeadLetter] = []
    began, count, size = anyio.current_time(), 0, 0
    async for dead_letter in dead_letters:
        if len(portion) >= most or size >= PORTION_BYTES:
            yield portion
            count += len(portion)
            portion, size = [], 0
            if rate:
                await anyio.sleep_until(began + count / rate)
        portion.append(dead_letter)
        size += len(dead_letter.original.data)
    if portion:
        yield portion


def document(dead_letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as a JSON document; the body is base64, because it may be no text."""
    fields = msgspec.structs.asdict(dead_letter)
    del fields["stored"]
    converted: dict[str, Any] = msgspec.to_builtins(fields)
    return converted
