"""The dead letters: looked through, handed back to the agents that failed, dropped.

Called by the commands `dead-letters ...`. A letter is handed back by a copy to the retries, where only its agent reads;
it leaves the dead letters when the copy is acknowledged. The copy's message id is the letter's, so that a retry that
was broken off in between can be repeated. Many are handed back at a time (`portions`): their copies are published
together, and when the server has acknowledged them, the letters are deleted, many at once. What makes and buries
letters is `engine.dead_letter_store`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from typing import Any

import anyio
import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin, Outgoing, PubAck
from aviso_workers.config import Config
from aviso_workers.declare import agents
from aviso_workers.engine import dead_letter_store, parts
from aviso_workers.engine.dead_letter_store import RETRIES, STREAM, DeadLetter
from aviso_workers.engine.handlers import windowed
from aviso_workers.engine.provisioning import Provisioner
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UndecodableError
from aviso_workers.events import Events, Skipped

__all__ = ["DeadLetter", "DeadLetterOffice", "Selection", "document", "portions"]

TIMEOUT_SECONDS = 10.0
PORTION = 500
"""Dead letters that are retried or dropped at a time, at most."""
PORTION_BYTES = 8 * 2**20
"""What their bodies may take in memory; a single one may take more."""
DELETES_AT_ONCE = 64
"""Requests to delete a message that are under way at the same time."""


def _nothing() -> None:
    pass


class Selection(Struct, frozen=True, kw_only=True):
    """Which dead letters: those of which all that is said is true."""

    sequences: frozenset[int] = frozenset()
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
    """What the error contains, in any case."""

    def takes(self, letter: DeadLetter) -> bool:
        return all(
            (
                not self.sequences or letter.sequence in self.sequences,
                self.app is None or letter.app == self.app,
                self.agent is None or letter.agent == self.agent,
                self.reason is None or letter.reason == self.reason,
                self.stream is None or letter.stream.lower() == self.stream.lower(),
                self.since is None or letter.time >= self.since,
                self.until is None or letter.time <= self.until,
                self.error is None or self.error.lower() in letter.error.lower(),
            )
        )


class DeadLetterOffice:
    """Every method raises `BackendError`."""

    def __init__(self, admin: Admin, config: Config, *, events: Events) -> None:
        self._config = config
        self._events = events
        self._own_streams = Provisioner(admin, management="reconcile", events=events, removes_replicas=False)
        self._admin = admin
        self._readers: set[tuple[str, str]] = set()
        """Apps and agents that are known to read the retries."""

    async def letters(self, wanted: Selection) -> AsyncGenerator[DeadLetter, None]:
        """Those that are there now, the oldest first. What is no dead letter is left out and stated (`Skipped`)."""
        try:
            last = (await self._admin.stream_info(STREAM)).last_sequence
        except NotFoundError:
            return  # made with the first letter
        reading = self._admin.read(
            STREAM,
            filter_subjects=(),
            start_sequence=min(wanted.sequences, default=1),
            last_sequence=min(last, max(wanted.sequences, default=last)),
        )
        async with aclosing(reading):
            async for message in reading:
                if parts.is_first_part(message):
                    continue
                try:
                    letter = DeadLetter.read(await parts.whole(self._admin, STREAM, message))
                except UndecodableError as error:
                    self._events.emit(Skipped(event_type=STREAM, sequence=message.sequence, error=error))
                    continue
                if wanted.takes(letter):
                    yield letter

    async def letter(self, sequence: int) -> DeadLetter:
        """Raises `NotFoundError`."""
        async with aclosing(self.letters(Selection(sequences=frozenset({sequence})))) as letters:
            async for letter in letters:
                return letter
        raise NotFoundError(f"no dead letter {sequence}")

    async def retry(self, *letters: DeadLetter, note: Callable[[], None] = _nothing) -> None:
        """Hand the letters to the agents that failed, which see them as if they were new; `note` is called for each.

        Raises `RefusedError`, with nothing done, where no worker of one of these agents has ever been there to take
        its letter. Where a copy cannot be stored, its letter stays, those whose copies are stored leave, and the error
        is raised.
        """
        for letter in letters:
            await self._require_reader(letter)
        failures: list[BackendError] = []
        copied = await self._copy([letter for letter in letters if not _is_window(letter)], failures)
        copied += await self._put_back([letter for letter in letters if _is_window(letter)], failures)
        # The copy is in the retries: that the letter's own bytes stay on disk for a while as well changes nothing.
        await self._delete(copied, note, overwrite=False)
        if failures:
            raise failures[0]

    async def drop(self, *letters: DeadLetter, note: Callable[[], None] = _nothing) -> None:
        """Erase the letters; `note` is called for each."""
        await self._delete(letters, note, overwrite=True)

    async def _copy(self, letters: Sequence[DeadLetter], failures: list[BackendError]) -> list[DeadLetter]:
        """Copy the letters to the retries; return those whose copies are stored, and note why others are not."""
        copies = [(letter, *dead_letter_store.retry_of(letter)) for letter in letters]
        max_payload = self._admin.connection.max_payload
        small = [copy for copy in copies if parts.fits(copy[1], max_payload=max_payload)]
        outgoing = [Outgoing(message, message_id, RETRIES) for _, message, message_id in small]
        results = await self._admin.publish_many(outgoing, timeout_seconds=TIMEOUT_SECONDS) if outgoing else []
        failures += [result for result in results if isinstance(result, BackendError)]
        copied = [letter for (letter, *_), result in zip(small, results, strict=True) if isinstance(result, PubAck)]
        for letter, message, message_id in copies:
            if parts.fits(message, max_payload=max_payload):
                continue
            try:
                await parts.store(message, message_id, self._publish, max_payload=max_payload)
            except BackendError as error:
                failures.append(error)
            else:
                copied.append(letter)
        return copied

    async def _put_back(self, letters: Sequence[DeadLetter], failures: list[BackendError]) -> list[DeadLetter]:
        """Put the windows of these letters back to those that are not done; return the letters of which that went well,
        and note why it did not of others.
        """
        done = []
        for letter in letters:
            try:
                await windowed.put_back(self._admin, letter.original, app=letter.app, agent=letter.agent)
            except UndecodableError as error:
                failures.append(RefusedError(f"dead letter {letter.sequence} is of no window: {error}"))
            except BackendError as error:
                failures.append(error)
            else:
                done.append(letter)
        return done

    async def _publish(self, message: Message, message_id: str) -> PubAck:
        return await self._admin.publish(
            message, message_id=message_id, stream=RETRIES, timeout_seconds=TIMEOUT_SECONDS
        )

    async def _delete(self, letters: Sequence[DeadLetter], note: Callable[[], None], *, overwrite: bool) -> None:
        left = iter(letters)
        failures: list[BackendError] = []

        async def delete_some() -> None:
            for letter in left:
                try:
                    for sequence in filter(None, (letter.sequence, parts.first_part_of(letter.stored))):
                        with suppress(NotFoundError):  # somebody else was faster
                            await self._admin.delete_message(STREAM, sequence, overwrite=overwrite)
                except BackendError as error:
                    failures.append(error)
                    return
                note()

        async with anyio.create_task_group() as deleting:
            for _ in letters[:DELETES_AT_ONCE]:
                deleting.start_soon(delete_some)
        if failures:
            raise failures[0]

    async def _require_reader(self, letter: DeadLetter) -> None:
        """Or else the letter would wait where nobody reads, and be forgotten there."""
        if (letter.app, letter.agent) in self._readers:
            return
        await self._own_streams.ensure(dead_letter_store.retries_spec(self._config))
        try:
            await self._admin.consumer_info(RETRIES, agents.durable_name(letter.app, letter.agent))
        except NotFoundError as error:
            raise RefusedError(
                f"agent {letter.agent} of app {letter.app} does not read what is tried again: "
                "start a worker of it first; its letters stay where they are"
            ) from error
        self._readers.add((letter.app, letter.agent))


def _is_window(letter: DeadLetter) -> bool:
    return windowed.is_window(letter.stream, app=letter.app, agent=letter.agent)


async def portions(letters: AsyncIterator[DeadLetter]) -> AsyncGenerator[list[DeadLetter], None]:
    """The letters in lists, as many in each as can be retried or dropped at a time."""
    portion: list[DeadLetter] = []
    size = 0
    async for letter in letters:
        portion.append(letter)
        size += len(letter.stored.data)
        if len(portion) >= PORTION or size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def document(letter: DeadLetter) -> dict[str, Any]:
    """All of a letter as JSON can carry it; the body is base64, because it may be no text."""
    fields = msgspec.structs.asdict(letter)
    del fields["stored"]
    converted: dict[str, Any] = msgspec.to_builtins(fields)
    return converted
