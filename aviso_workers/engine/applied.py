"""Which notifications the updates of a table were applied for, so that each of them is applied once to a key.

The entry of a key tells it in a header beside the value, so that one write stores both: of each agent the newest few
notifications. What the header leaves out has a bit on a page: an entry for each key, agent and `PAGE_SEQUENCES`
sequences of the agent's stream, which the bucket forgets `KEPT_SECONDS` after it was written last. A page is written
before a header leaves out what is on it, and read after the header. So it does not matter where a worker is killed.

How far a consumer has settled its stream does not help here, as it does in `handlers.counted`: a handler may fail after
its update, and its dead letter be handed back weeks later.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend
from aviso_workers.declare.tables import PAGES
from aviso_workers.engine import idempotency
from aviso_workers.engine.dead_letter_store import RETRIED
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import ConflictError, DeclarationError, NotFoundError, OutcomeUnknownError

__all__ = ["KEPT_SECONDS", "AppliedNotifications"]

DAY_SECONDS = 86400.0
KEPT_SECONDS = 31 * DAY_SECONDS
CERTAIN_SECONDS = 30 * DAY_SECONDS
"""A dead letter that is older may be of a notification whose page is forgotten; clocks may differ by a day."""
LISTED = 64
"""So many notifications of an agent a header may list; then the older half of them is left out."""
PAGE_SEQUENCES = 16_384
DIGEST_BYTES = 16
NEVER = -(2**53)
"""Before every time."""


class Listed(Struct, frozen=True, omit_defaults=True):
    """What the header of a key tells of one agent. Times are those at which notifications were stored."""

    newest: tuple[tuple[int, float], ...] = ()
    """Sequence and time of each: a stream that is made anew has the same sequences."""
    left_out: tuple[int, float] = (0, NEVER)
    """The greatest sequence and the greatest time of those that are not in `newest` any more."""

    def may_have_left_out(self, sequence: int, time: float) -> bool:
        """Return whether this notification may be on a page."""
        greatest, latest = self.left_out
        return sequence <= greatest and time <= latest


class Page(Struct, frozen=True):
    """For which of `PAGE_SEQUENCES` sequences an update was applied: a bit each, the first one lowest."""

    created: float
    """When the stream was created whose sequences these are."""
    latest: float = NEVER
    """When the last of them was stored."""
    compressed: bytes = b""

    def has(self, sequence: int, time: float) -> bool:
        """Return whether the update was applied for the notification of this sequence and store time."""
        byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
        bits = self._bits()
        return self.created <= time <= self.latest and byte < len(bits) and bool(bits[byte] >> bit & 1)

    def plus(self, notifications: Iterable[tuple[int, float]]) -> Page:
        """Return the page with these as well."""
        bits, latest = bytearray(self._bits().ljust(PAGE_SEQUENCES // 8, b"\0")), self.latest
        for sequence, time in notifications:
            byte, bit = divmod(sequence % PAGE_SEQUENCES, 8)
            bits[byte] |= 1 << bit
            latest = max(latest, time)
        return structs.replace(self, latest=latest, compressed=zlib.compress(bytes(bits).rstrip(b"\0")))

    def _bits(self) -> bytes:
        return zlib.decompress(self.compressed) if self.compressed else b""


class AppliedNotifications:
    """What was applied to the keys of one table; see `declare.tables.Applied`."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, table: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._table = table

    @contextmanager
    def once(self, key: str, notification: Notification[Any]) -> Iterator[None]:
        """Make the one update of a key for this notification within the block.

        Raises `DeclarationError` where it is not what an agent handles now, or it has updated the key before in the
        same call: nobody could tell its second update from a repeat of the first.
        """
        handling = idempotency.handling()
        if handling is None or not handling.handles(notification.sequence):
            raise DeclarationError(
                f"table {self._table!r}: once= takes the notification that an agent handles now, found "
                f"{notification.id}: call update in the agent's function, and in tests let the harness run it"
            )
        update = (self._table, key, notification.sequence)
        if update in handling.updates:
            raise DeclarationError(
                f"table {self._table!r}, key {key!r}: updated before with once={notification.id}, in the same call: "
                "let one function make the whole change"
            )
        handling.updates.add(update)
        try:
            yield
        except BaseException:
            handling.updates.discard(update)
            raise

    async def added(self, key: str, header: str, notification: Notification[Any]) -> str | None:
        """Return the header of a key when the update for this notification is applied; None where it was before.

        Raises `OutcomeUnknownError` where that is not known any more.
        """
        handling = idempotency.handling()
        assert handling is not None, "only within `once`"
        known = read_json(header.encode(), dict[str, Listed]) if header else {}
        listed = known.get(handling.agent, Listed())
        this = (notification.sequence, notification.time.timestamp())
        if this in listed.newest:
            return None
        pages = _Pages(self._bucket, self._backend, key=key, agent=handling.agent, stream=handling.stream)
        if listed.may_have_left_out(*this):
            if await pages.has(*this):
                return None
            await self._require_known(notification, stream=handling.stream)
        listed = await pages.shortened(listed)
        known[handling.agent] = structs.replace(listed, newest=(*listed.newest, this))
        return msgspec.json.encode(known).decode()

    async def _require_known(self, notification: Notification[Any], *, stream: str) -> None:
        """Raise `OutcomeUnknownError` where the page may be gone on which the notification was."""
        retried = notification.headers.get(RETRIED, "")
        if not retried:
            return  # a redelivery follows soon
        dead_lettered = read_number(retried.rpartition(".")[2]) / 1e9
        is_old = self._backend.clock.time_ns() / 1e9 - dead_lettered > CERTAIN_SECONDS
        if is_old or notification.time.timestamp() < await _created(self._backend, stream):
            raise OutcomeUnknownError(
                f"table {self._table!r}: whether the update for {notification.id} was applied before it became a dead "
                f"letter is known for {CERTAIN_SECONDS / DAY_SECONDS:.0f} days, and while its stream is not made anew. "
                "Look at the value, and drop the dead letter"
            )


class _Pages:
    """The pages of one key and agent."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, key: str, agent: str, stream: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._stream = stream
        digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()
        self._prefix = f"{PAGES}{agent}.{digest}."

    async def has(self, sequence: int, time: float) -> bool:
        """Return whether a notification is on its page, which is kept as long as a new one then."""
        number = sequence // PAGE_SEQUENCES
        page, _ = await self._read(number)
        if page is None or not page.has(sequence, time):
            return False
        await self._write(number, [(sequence, time)], page.created, always=True)
        return True

    async def shortened(self, listed: Listed) -> Listed:
        """Return what a header tells with room for one more; what it leaves out is on pages then."""
        if len(listed.newest) < LISTED:
            return listed
        created = await _created(self._backend, self._stream)
        in_order = sorted(listed.newest)
        gone, left = in_order[: LISTED // 2], in_order[LISTED // 2 :]
        for number, notifications in _by_page(gone, created).items():
            await self._write(number, notifications, created)
        sequence, time = listed.left_out
        return Listed(
            newest=tuple(left),
            left_out=(max([sequence, *(each for each, _ in gone)]), max([time, *(each for _, each in gone)])),
        )

    async def _read(self, number: int) -> tuple[Page | None, int]:
        entry = await self._bucket.newest(f"{self._prefix}{number}")
        if entry is None:
            return None, 0
        return None if entry.deleted else read_json(entry.value, Page), entry.revision

    async def _write(
        self, number: int, notifications: Iterable[tuple[int, float]], created: float, *, always: bool = False
    ) -> None:
        """Add notifications to a page; `always` writes it also where it has them."""
        while True:
            page, revision = await self._read(number)
            if page is not None and page.created > created:
                return  # the stream was made anew meanwhile, so that these do not come again
            if page is None or page.created < created:
                page = Page(created)
            changed = page.plus(notifications)
            if changed == page and not always:
                return
            try:
                await self._bucket.put(
                    f"{self._prefix}{number}",
                    msgspec.json.encode(changed),
                    revision=revision,
                    ttl_seconds=KEPT_SECONDS,
                )
            except (ConflictError, OutcomeUnknownError):
                continue  # another worker's went through first
            return


async def _created(backend: Backend, stream: str) -> float:
    """Return when a stream was created; before every time where there is none."""
    try:
        created = (await backend.stream_info(stream)).created
    except NotFoundError:
        return NEVER
    return created.timestamp() if created else NEVER


def _by_page(notifications: Iterable[tuple[int, float]], created: float) -> dict[int, list[tuple[int, float]]]:
    """Return the notifications of a stream that was created then, by the number of their page."""
    found: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for sequence, time in notifications:
        if time >= created:
            found[sequence // PAGE_SEQUENCES].append((sequence, time))
    return found
