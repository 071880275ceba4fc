"""The notifications for which a table's keys were updated with `once=`, so that each updates a key once.

The entry of a key lists them in a header beside the value, so that one write stores both: of each agent the newest few.
Older ones are on pages of each key and agent (`features.seen`), which the bucket forgets `KEPT_SECONDS` after they were
written last.

That a consumer has settled a notification does not allow to forget it, as it does for windows: a handler may fail after
its update, and the dead letter may be handed back weeks later.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import read_json, read_number
from aviso_workers.aviso.notifications import Notification
from aviso_workers.backends import Backend
from aviso_workers.declare.seen import SeenList
from aviso_workers.declare.tables import PAGES
from aviso_workers.engine import idempotency
from aviso_workers.engine.key_value import RetryingKeyValue
from aviso_workers.errors import DeclarationError, OutcomeUnknownError
from aviso_workers.features.seen import SeenPages
from aviso_workers.state.dead_letter_records import RETRIED

DAY_SECONDS = 86400.0
KEPT_SECONDS = 31 * DAY_SECONDS
CERTAIN_SECONDS = 30 * DAY_SECONDS
"""The page of a notification is certainly kept until its dead letter is as old as this; clocks may differ by a day."""
LISTED = 64
"""A header lists at most so many notifications of an agent; when it is full, the older half is moved to pages."""
DIGEST_BYTES = 16


class AppliedHeader(Struct, frozen=True):
    """The header of a key."""

    generation: str
    """Made where the key has no header, as after a `put`. Its pages carry it, so that older pages are not read."""
    agents: dict[str, SeenList]
    """By name."""


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
        listed = known.agents.get(handling.agent, SeenList())
        this = (notification.sequence, notification.time.timestamp())
        digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).hexdigest()
        prefix = f"{PAGES}{handling.agent}.{digest}.{known.generation}."
        pages = SeenPages(
            bucket=self._bucket,
            backend=self._backend,
            prefix=prefix,
            stream=handling.stream,
            listed=LISTED,
            ttl_seconds=KEPT_SECONDS,
        )
        if await pages.find(listed, this) is not None:
            return None
        if listed.may_have_left_out(this):
            self._require_known(notification)
        listed = (await pages.shortened(listed)).plus(this)
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
