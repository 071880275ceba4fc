"""Which notifications the windows of an agent have counted, of those that no state of a key lists any more.

A state lists the newest few hundred of its key, whatever happens. What it leaves out is settled, as the progress says,
or has a bit on a page: so a notification that stays unsettled for long costs one bit for each message that its stream
stores meanwhile, and no write grows. `handler` asks here about what is older than what its state lists.

The order keeps it exact whoever is killed in between: a page is written before a state leaves out what is on it, and
the progress before a page is removed. So it is read the other way round: the state, then the page, then the progress;
the latter two from the server, because a copy may be older than the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal

import anyio
import msgspec

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.backends import Backend
from aviso_workers.declare import windows
from aviso_workers.declare.windows import CountedPage, KeyState, SettledUpTo
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import ConflictError, UndecodableError
from aviso_workers.jetstream.key_value import Entry
from aviso_workers.jetstream.sequences import by_page, page_of
from aviso_workers.state import window_records
from aviso_workers.state.window_records import PAGES, PROGRESS

__all__ = ["CountedPages", "newest_stream"]


class CountedPages:
    """The pages of one agent, in the bucket of its windows."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, stream: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._stream = stream
        self._lock = anyio.Lock()
        """So that the calls of one worker do not get in each other's way."""

    async def find(
        self, state: KeyState[Any], sequence: int, stored: float, *, retried: bool
    ) -> Literal["counted", "missed"] | None:
        """Return what became of a notification that the state does not list: `missed` is as in `KeyState`, None: not
        counted.

        `retried`: it is a dead letter that is tried again, which was settled without being counted.
        """
        if not windows.is_older(state, sequence, stored):
            return None
        entry = await self._bucket.get(f"{PAGES}{page_of(sequence)}")
        page = _page(entry) if entry else None
        if page is not None and page.has(sequence, stored):
            return "missed" if page.has_missed(sequence) else "counted"
        settled = window_records.read_progress(await self._bucket.get(PROGRESS)).settled
        return "counted" if not retried and settled.covers(sequence, stored) else None

    async def shortened(self, state: KeyState[Any], settled: SettledUpTo) -> KeyState[Any]:
        """Return the state, which lists fewer than `windows.LISTED` as counted; the others are on pages then."""
        if len(state.counted) < windows.LISTED:
            return state
        state = windows.prune(state, settled)
        if len(state.counted) < windows.LISTED:
            return state
        async with self._lock:
            created = await self._created()
            # What is older than the stream is of one that was deleted; it goes when as much of this one is settled.
            gone = {sequence: stored for sequence, stored in windows.oldest(state).items() if stored >= created}
            for number, counted in by_page(gone.items()).items():
                await self._write(number, counted, state.missed.keys() & counted.keys(), created)
        return windows.leave_out(state, gone)

    async def remove_settled(self, entries: Iterable[Entry], settled: SettledUpTo) -> None:
        """Remove the pages among these entries of the bucket on which everything is settled, as the progress says."""
        for entry, number, page in _pages(entries):
            if page.is_settled(number, settled):
                with suppress(ConflictError):  # written meanwhile: the next time
                    await self._bucket.delete(entry.key, revision=entry.revision)

    async def _write(self, number: int, counted: dict[int, float], missed: Iterable[int], created: float) -> None:
        while True:
            entry = await self._bucket.get(f"{PAGES}{number}")
            page = _page(entry) if entry else None
            if page is not None and page.created > created:
                return  # the stream was deleted meanwhile, so that these do not come again
            if page is None or page.created < created:
                page = CountedPage(created=created)
            changed = page.plus(counted, missed)
            if changed == page:
                return
            try:
                await self._bucket.put(
                    f"{PAGES}{number}", msgspec.json.encode(changed), revision=entry.revision if entry else 0
                )
            except ConflictError:
                continue  # another worker's went through first
            return

    async def _created(self) -> float:
        created = (await self._backend.stream_info(self._stream)).created
        return created.timestamp() if created else windows.NEVER


def newest_stream(entries: Iterable[Entry]) -> float:
    """Return when the stream was created of which the newest pages among these entries are."""
    return max((page.created for _, _, page in _pages(entries)), default=windows.NEVER)


def _number(entry: Entry) -> int | None:
    """Return the number of the page that an entry is; None where it is none."""
    if not entry.key.startswith(PAGES):
        return None
    try:
        return read_number(entry.key.removeprefix(PAGES))
    except UndecodableError:
        return None


def _page(entry: Entry) -> CountedPage:
    """Return the page that an entry stores. Raises `UndecodableError`."""
    return read_json(entry.value, CountedPage)


def _pages(entries: Iterable[Entry]) -> Iterator[tuple[Entry, int, CountedPage]]:
    """Yield the pages among the entries that can be read. Who counts on one that cannot, fails, and is heard."""
    for entry in entries:
        number = _number(entry)
        if number is not None:
            with suppress(UndecodableError):
                yield entry, number, _page(entry)
