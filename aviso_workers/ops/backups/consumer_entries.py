"""The consumers that a backup holds: their names, and how far they had come.

Called by what restores. A cluster makes the consumers of a restored stream one after the other and elects a leader for
each, and lists those only that have one. So which there must be is known from the backup alone.
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

__all__ = ["StoredConsumer", "read"]


class _Config(Struct, frozen=True):
    durable_name: str = ""
    inactive_threshold: int = 0


class _Delivered(Struct, frozen=True):
    stream_seq: int


class _State(Struct, frozen=True):
    """JetStream's state of a consumer, as far as it is needed here."""

    delivered: _Delivered
    pending: dict[str, Any] | None = None


class StoredConsumer(Struct, frozen=True):
    """A consumer in a backup."""

    config: _Config
    state: _State

    @property
    def is_durable(self) -> bool:
        """Whether it outlives its readers."""
        return bool(self.config.durable_name)

    @property
    def lasts(self) -> bool:
        """Whether it is there for as long as nobody deletes it."""
        return self.is_durable and not self.config.inactive_threshold


def read(backup: Backup, identities: Identities | None) -> Mapping[str, StoredConsumer]:
    """Return the consumers in a backup by name; of a server before 2.15, whose archive cannot be read here, none.

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
