"""The consumers in a backup: their names, configurations and positions.

Called by `restoration` and `set_restore`. A cluster makes the consumers of a restored stream one after the other and
elects a leader for each, and lists those only that have one. So which there must be is known from the backup alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import UNREADABLE_JSON
from aviso_workers.errors import BackupError
from aviso_workers.ops.backups import archive, chains
from aviso_workers.ops.backups.encryption import Identities
from aviso_workers.ops.backups.storage import Backup


class _ConsumerConfig(Struct, frozen=True):
    durable_name: str = ""
    inactive_threshold: int = 0


class _Delivered(Struct, frozen=True):
    stream_seq: int


class _State(Struct, frozen=True):
    """A consumer's state as JetStream has it, as far as it is needed here."""

    delivered: _Delivered
    pending: dict[str, Any] | None = None


class StoredConsumer(Struct, frozen=True):
    """A consumer as its backup has it: its configuration and its state."""

    config: _ConsumerConfig
    state: _State

    @property
    def is_durable(self) -> bool:
        """Whether the consumer is durable, so that it outlives its readers."""
        return bool(self.config.durable_name)

    @property
    def lasts(self) -> bool:
        """Whether the consumer stays until it is deleted."""
        return self.is_durable and not self.config.inactive_threshold


def read(backup: Backup, identities: Identities | None) -> Mapping[str, StoredConsumer]:
    """Return the consumers in a backup by name; none for the archive of a server before 2.15, which cannot be read
    here.

    Raises `BackupError`.
    """
    found: dict[str, StoredConsumer] = {}
    if not backup.of_entries:
        return found
    with chains.opened_entries(backup, identities) as entries:
        for entry in entries:
            if entry.sequence:
                break
            if entry.name.startswith(archive.CONSUMERS):
                name = entry.name.removeprefix(archive.CONSUMERS).decode()
                try:
                    found[name] = msgspec.json.decode(entry.body, type=StoredConsumer)
                except UNREADABLE_JSON as error:
                    raise BackupError(f"{backup.archive} is damaged: consumer {name}: {error}") from error
    return found
