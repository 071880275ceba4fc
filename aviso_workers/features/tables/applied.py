"""The notifications for which a table's keys were updated with `once=`, so that each updates a key once.

The entry of a key lists them in a header beside the value, so that one write stores both: of each agent the newest few.
An older notification has a bit on a page, which is an entry for each key, agent and page of sequences of the agent's
stream; the bucket forgets it `KEPT_SECONDS` after it was written last. A page is written before the header
leaves out the notifications that are on it, and read after the header. So a worker may be killed at any moment.

That a consumer has settled a notification does not allow to forget it, as it does in `windows.counted`: a handler may
fail after its update, and the dead letter may be handed back weeks later.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct, structs

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend
from aviso_workers.declare.tables import PAGES
from aviso_workers.engine import idempotency
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import ConflictError, DeclarationError, NotFoundError, OutcomeUnknownError
from aviso_workers.jetstream.sequences import by_page, has_bit, page_of, with_bits
from aviso_workers.state.dead_letter_records import RETRIED

__all__ = ["KEPT_SECONDS", "AppliedNotifications"]

DAY_SECONDS = 86400.0
KEPT_SECONDS = 31 * DAY_SECONDS
CERTAIN_SECONDS = 30 * DAY_SECONDS
"""The page of a notification is certainly kept until its dead letter is as old as this; clocks may differ by a day."""
LISTED = 64
"""A header lists at most so many notifications of an agent; when it is full, the older half is moved to pages."""
MAX_STREAMS = 8
"""A page keeps the bits of at most so many streams that had the name one after another."""
DIGEST_BYTES = 16
NEVER = -(2**53)
"""Before every time."""


class AppliedOfAgent(Struct, frozen=True, omit_defaults=True):
    """The notifications of one agent, in the header of a key. Times are those at which notifications were stored."""

    newest: tuple[tuple[int, float], ...] = ()
    """Sequence and time of each: a stream that is deleted and recreated counts its sequences from 1 again."""
    left_out: tuple[int, float] = (0, NEVER)
    """The greatest sequence and the greatest time of those that are not in `newest` any more."""

    def may_have_left_out(self, sequence: int, time: float) -> bool:
        """Return whether this notification may have been moved to a page."""
        greatest, latest = self.left_out
        return sequence <= greatest and time <= latest


class AppliedHeader(Struct, frozen=True):
    """The header of a key."""

    generation: str
    """Made where the key has no header, as after a `put`. Its pages carry it, so that older pages are not read."""
    agents: dict[str, AppliedOfAgent]
    """By name."""


class AppliedBits(Struct, frozen=True):
    """The sequences of one page (`jetstream.sequences`) for which an update was applied."""

    created: float
    """When the stream was created whose sequences these are. `NEVER` for notifications that are older than their
    stream, such as those of a stream that was restored, or of a promoted mirror."""
    latest: float = NEVER
    """When the last of these notifications was stored."""
    compressed: bytes = b""
    """The bits, compressed by zlib."""

    def has(self, sequence: int, time: float) -> bool:
        """Return whether the update was applied for the notification of this sequence and store time."""
        return self.created <= time <= self.latest and has_bit(self._bits(), sequence)

    def plus(self, notifications: Mapping[int, float]) -> AppliedBits:
        """Return these with the bits of other notifications set as well."""
        latest = max([self.latest, *notifications.values()])
        return structs.replace(self, latest=latest, compressed=zlib.compress(with_bits(self._bits(), notifications)))

    def _bits(self) -> bytes:
        return zlib.decompress(self.compressed) if self.compressed else b""


class AppliedPage(Struct, frozen=True):
    """The bits of the same sequences in each stream that has had the name, the newest first.

    Those of an earlier stream are kept because its notifications may come again: from a backup, a promoted mirror, or a
    dead letter.
    """

    streams: tuple[AppliedBits, ...] = ()

    def has(self, sequence: int, time: float) -> bool:
        """Return whether the update was applied for the notification of this sequence and store time."""
        return any(bits.has(sequence, time) for bits in self.streams)

    def plus(self, notifications: Mapping[int, float], *, created: float) -> AppliedPage:
        """Return the page with the bits of these notifications set as well; `created` is when the stream was."""
        streams = {bits.created: bits for bits in self.streams}
        stored_by: defaultdict[float, dict[int, float]] = defaultdict(dict)
        for sequence, time in notifications.items():
            when = max((each for each in (*streams, created) if each <= time), default=NEVER)
            stored_by[when][sequence] = time
        streams |= {when: streams.get(when, AppliedBits(when)).plus(stored) for when, stored in stored_by.items()}
        return AppliedPage(tuple(streams[each] for each in sorted(streams, reverse=True)[:MAX_STREAMS]))


class AppliedNotifications:
    """Remembers for which notifications the keys of one table were updated; see `declare.tables.Applied`."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, table: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._table = table

    @contextmanager
    def once(self, key: str, notification: Notification[Any]) -> Iterator[None]:
        """Let the update of a key for this notification be made within the block.

        Raises `DeclarationError` where it is not the notification that an agent handles now, or where the same call has
        updated the key for it before: a second update could not be told from a repeat of the first.
        """
        if not isinstance(notification, Notification):
            raise DeclarationError(
                f"table {self._table!r}: once= takes the notification that an agent handles now, found "
                f"{notification!r:.100}"
            )
        handling = idempotency.handling()
        if handling is None or not handling.handles(notification.sequence, notification.topic):
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
        """Return the header that the key has after the update for this notification.

        None where the update was applied before. Raises `OutcomeUnknownError` where it is not known any more whether it
        was.
        """
        handling = idempotency.handling()
        assert handling is not None, "only within `once`"
        known = read_json(header.encode(), AppliedHeader) if header else AppliedHeader(secrets.token_hex(4), {})
        listed = known.agents.get(handling.agent, AppliedOfAgent())
        this = (notification.sequence, notification.time.timestamp())
        if this in listed.newest:
            return None
        digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()
        prefix = f"{PAGES}{handling.agent}.{digest}.{known.generation}."
        pages = _Pages(self._bucket, self._backend, prefix=prefix, stream=handling.stream)
        if listed.may_have_left_out(*this):
            if await pages.has(*this):
                return None
            self._require_known(notification)
        listed = await pages.shortened(listed)
        listed = structs.replace(listed, newest=(*listed.newest, this))
        return msgspec.json.encode(AppliedHeader(known.generation, {**known.agents, handling.agent: listed})).decode()

    def _require_known(self, notification: Notification[Any]) -> None:
        """Raise `OutcomeUnknownError` where the bucket may have forgotten the page of this notification."""
        retried = notification.headers.get(RETRIED, "")
        if not retried:
            return  # a redelivery comes long before a page is forgotten
        dead_lettered = read_number(retried.rpartition(".")[2]) / 1e9
        if self._backend.clock.time_ns() / 1e9 - dead_lettered > CERTAIN_SECONDS:
            raise OutcomeUnknownError(
                f"table {self._table!r}: whether the update for {notification.id} was applied before it became a dead "
                f"letter is known for {CERTAIN_SECONDS / DAY_SECONDS:.0f} days. Look at the value, and drop the dead "
                "letter"
            )


class _Pages:
    """The pages of one key and agent; `prefix` is what their names begin with."""

    def __init__(self, bucket: RetryingKeyValue, backend: Backend, *, prefix: str, stream: str) -> None:
        self._bucket = bucket
        self._backend = backend
        self._prefix = prefix
        self._stream = stream

    async def has(self, sequence: int, time: float) -> bool:
        """Return whether a notification is on its page; if it is, the page is kept for `KEPT_SECONDS` from now."""
        number = page_of(sequence)
        page, _ = await self._read(number)
        if not page.has(sequence, time):
            return False
        await self._write(number, {sequence: time}, created=NEVER, always=True)
        return True

    async def shortened(self, listed: AppliedOfAgent) -> AppliedOfAgent:
        """Return the header's list with room for one more notification, after writing what it leaves out to pages."""
        if len(listed.newest) < LISTED:
            return listed
        created = await _created(self._backend, self._stream)
        in_order = sorted(listed.newest)
        gone, left = in_order[: LISTED // 2], in_order[LISTED // 2 :]
        for number, notifications in by_page(gone).items():
            await self._write(number, notifications, created=created)
        sequence, time = listed.left_out
        return AppliedOfAgent(
            newest=tuple(left),
            left_out=(max([sequence, *(each for each, _ in gone)]), max([time, *(each for _, each in gone)])),
        )

    async def _read(self, number: int) -> tuple[AppliedPage, int]:
        entry = await self._bucket.newest(f"{self._prefix}{number}")
        if entry is None:
            return AppliedPage(), 0
        return AppliedPage() if entry.deleted else read_json(entry.value, AppliedPage), entry.revision

    async def _write(
        self, number: int, notifications: Mapping[int, float], *, created: float, always: bool = False
    ) -> None:
        """Add notifications to a page; `always` writes it also where it has them."""
        while True:
            page, revision = await self._read(number)
            changed = page.plus(notifications, created=created)
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
                continue  # another worker wrote the page first
            return


async def _created(backend: Backend, stream: str) -> float:
    """Return when a stream was created, in seconds since 1970; `NEVER` where there is none."""
    try:
        created = (await backend.stream_info(stream)).created
    except NotFoundError:
        return NEVER
    return created.timestamp() if created else NEVER
