"""The versions of an agent whose workers read one durable consumer, registered in a bucket by compare-and-set.

A version is what one program wants of the consumer: its filter and its `ack_wait`. Each worker registers its own
before it reads (`shared_filters`), and says again and again that it lives, by counting up the number of its version.
A version whose number has not changed for `GONE_SECONDS`, by the clock of the worker that looks, has no worker any
more, and is taken out.

All changes are conditional, so none is lost, whoever makes one at the same time: JetStream's consumers know no such
condition, and so they are not where the versions are noted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Annotated

from msgspec import Meta, Struct, structs

from aviso_workers.backends import Backend, KeyValue
from aviso_workers.errors import NotFoundError
from aviso_workers.jetstream import key_value
from aviso_workers.jetstream.key_value import Entry, record_of
from aviso_workers.jetstream.metadata import MAX_NOTED, Version
from aviso_workers.state import consumer_records

MAX_HEARD = 2**32
"""More often than a version says that it lives."""


class Registered(Struct, frozen=True, kw_only=True):
    """A version, and what its workers have said of themselves."""

    version: Version
    heard: Annotated[int, Meta(ge=0, le=MAX_HEARD)] = 0
    """Counted up when its workers say that they live. It begins with any number: else a version that comes back would
    have the number of its former workers, which others have not seen change for long."""
    reads: bool = False
    """Whether the consumer has let through what it wants since it was registered."""
    narrowing: Annotated[int, Meta(ge=0, le=MAX_HEARD)] = 0
    """Any number from before one of its workers narrows the consumer's filter until it knows what that has hidden; else
    0. How far the consumer has come is not recorded meanwhile."""


class Versions:
    """The registered versions of one agent on one stream."""

    def __init__(self, backend: Backend, *, app: str, agent: str, stream: str) -> None:
        self._backend = backend
        self._app = app
        self._key = consumer_records.versions_key(app, agent, stream)
        self._bucket: KeyValue | None = None
        self._last: tuple[Registered, ...] = ()
        """What was read or written last. It counts while a foreign value is in its place: a version that is taken for
        gone is given nothing any more."""

    async def read(self) -> tuple[Registered, ...]:
        """Return the registered versions. Raises `BackendError`."""
        try:
            newest = await (await self._opened()).newest(self._key)
            return self._read(None if newest is None or (newest.deleted and not newest.foreign) else newest)
        except NotFoundError:
            self._bucket = None  # it was deleted
            return ()

    async def change(
        self, change: Callable[[tuple[Registered, ...]], Iterable[Registered]]
    ) -> tuple[tuple[Registered, ...], tuple[Registered, ...]]:
        """Change the versions, and return those from before and from now. Raises `BackendError`.

        `change` is called again with what is registered then, where somebody else has changed it meanwhile.
        """

        def changed(known: tuple[Registered, ...]) -> tuple[Registered, ...]:
            return tuple(sorted(change(known), key=lambda each: each.version))

        try:
            before, self._last = await key_value.compare_and_set(
                await self._opened(), self._key, read=self._read, change=changed
            )
        except NotFoundError:
            self._bucket = None  # it was deleted
            raise
        return before, self._last

    def _read(self, entry: Entry | None) -> tuple[Registered, ...]:
        if entry is None or not entry.foreign:
            self._last = _read(entry)
        return self._last

    async def _opened(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await consumer_records.bucket(self._backend, self._app)
        return self._bucket


def including(versions: Iterable[Registered], own: Version) -> tuple[Registered, ...]:
    """Return the versions, and this one where it is not among them."""
    known = tuple(versions)
    if any(each.version == own for each in known):
        return known
    return (*known, Registered(version=own, heard=secrets.randbelow(MAX_HEARD)))


def with_heartbeat(versions: Iterable[Registered], own: Version) -> tuple[Registered, ...]:
    """Return the versions, this one among them, which says once more that it lives."""
    return tuple(
        structs.replace(each, heard=(each.heard + 1) % MAX_HEARD) if each.version == own else each
        for each in including(versions, own)
    )


def without_narrowing(versions: Iterable[Registered], ended: Collection[int]) -> tuple[Registered, ...]:
    """Return the versions without a `narrowing` of these numbers."""
    return tuple(structs.replace(each, narrowing=0) if each.narrowing in ended else each for each in versions)


def parsed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], tuple[Registered, ...]]:
    """Return the registered versions among the entries of the bucket, by app, agent and stream."""
    found = [(entry.key.split("/"), _read(entry)) for entry in entries if entry.key.endswith("/versions")]
    return {(key[0], key[1], key[2]): versions for key, versions in found if versions and len(key) == 4}


def _read(entry: Entry | None) -> tuple[Registered, ...]:
    """Return the versions of an entry; none where they cannot be read, or are more than agents have."""
    found = record_of(entry, tuple[Registered, ...]) or ()
    return found if sum(1 + len(each.version.filter_subjects) for each in found) <= MAX_NOTED else ()
