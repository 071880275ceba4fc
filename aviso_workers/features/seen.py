"""Whether a message of a stream was seen before: looked up in a list, and in pages, which are entries of a bucket.

Windows and tables keep here which notifications they have counted or applied, so that one that is handled again counts
once. A list has the newest few, whatever happens, and each of the older ones costs one bit of a page: no write grows.

The order keeps it exact whoever is killed in between: a page is written before a list leaves out what is on it. So they
are read the other way round: the list, and then the page from the server, because a copy may be older than the list.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_json
from aviso_workers.backends import Backend
from aviso_workers.declare import seen
from aviso_workers.declare.seen import NEVER, SeenList, SeenPage, Stored
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import ConflictError, NotFoundError, OutcomeUnknownError


class SeenPages(Struct, frozen=True, kw_only=True):
    """The pages to which lists leave their older messages."""

    bucket: RetryingKeyValue
    backend: Backend
    prefix: str
    """How the names of pages begin."""
    stream: str
    listed: int
    """A list of so many messages is shortened."""
    ttl_seconds: float | None = None
    """When the bucket forgets a page after it was written, or a message was found on it; None: never."""

    async def find(self, listed: SeenList, message: Stored) -> bool | None:
        """Return whether a message that was seen has a mark; None where neither the list nor a page has it."""
        if message in listed.newest:
            return message in listed.marked
        if not listed.may_have_left_out(message):
            return None
        number = seen.page_of(message[0])
        page, _ = await self._read(number)
        found = page.find(message)
        if found is not None and self.ttl_seconds is not None:
            await self._write(number, [message], created=NEVER, always=True)
        return found

    async def shortened(self, listed: SeenList) -> SeenList:
        """Return the list with room for one more message, after writing what it leaves out to pages."""
        if len(listed.newest) < self.listed:
            return listed
        created = await _created(self.backend, self.stream)
        gone = listed.oldest()
        for number in {seen.page_of(sequence) for sequence, _ in gone}:
            messages = [each for each in gone if seen.page_of(each[0]) == number]
            await self._write(number, messages, created=created, marked=listed.marked)
        return listed.without(gone)

    async def _read(self, number: int) -> tuple[SeenPage, int]:
        entry = await self.bucket.newest(f"{self.prefix}{number}")
        page = read_json(entry.value, SeenPage) if entry and not entry.deleted else SeenPage(())
        return page, entry.revision if entry else 0

    async def _write(
        self,
        number: int,
        messages: Collection[Stored],
        *,
        created: float,
        marked: Collection[Stored] = (),
        always: bool = False,
    ) -> None:
        """Add messages to a page; `always` writes it also where it has them."""
        while True:
            page, revision = await self._read(number)
            changed = page.plus(messages, created=created, marked=marked)
            if changed == page and not always:
                return
            key, value = f"{self.prefix}{number}", msgspec.json.encode(changed)
            try:
                await self.bucket.put(key, value, revision=revision, ttl_seconds=self.ttl_seconds)
            except (ConflictError, OutcomeUnknownError):
                continue  # another worker wrote the page first
            return


async def _created(backend: Backend, stream: str) -> float:
    """Return when a stream was created, in seconds since 1970; `NEVER` where there is none."""
    try:
        created = (await backend.stream_info(stream)).created
    except NotFoundError:
        return NEVER
    return created.timestamp() if created else NEVER
