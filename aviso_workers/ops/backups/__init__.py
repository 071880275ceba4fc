"""Backups of streams: create, prune, verify, restore, drill and merge them, and cleanse them of erased messages.

Called by the commands `backup ...`, and by scheduled code of your own. `storage` has them on disk, in the layout of the
nats CLI; `archive` and `s2` read their archives, `chains` stores unchanged messages once for several of them,
`encryption` encrypts them to public keys, and `sets` says which belong together. How a server sends and
receives snapshots is the backend's business.
"""

from __future__ import annotations

from aviso_workers.ops.backups.archive import Takes
from aviso_workers.ops.backups.chains import Contents, chain, newest, restorable, size, verify
from aviso_workers.ops.backups.cleansing import (
    CleansePlan,
    Forgotten,
    cleanse,
    forget,
    of_identifier,
    of_subject,
    one_of_each_chain,
    plan_cleanse,
)
from aviso_workers.ops.backups.completion import Spool
from aviso_workers.ops.backups.creation import Making, NewBackup, create, create_each, create_next, named_streams
from aviso_workers.ops.backups.encryption import Identities, read_recipients
from aviso_workers.ops.backups.restoration import Drill, Restored, drill, merge, read_back, restore
from aviso_workers.ops.backups.schedules import BackupSchedule, Keep, Pruned, keep_backing_up, prune, prune_by_server
from aviso_workers.ops.backups.sets import (
    BackupSet,
    GoesOn,
    MadeSet,
    RestoredStream,
    create_set,
    load_set,
    members,
    restore_set,
)
from aviso_workers.ops.backups.sets import find as sets_in
from aviso_workers.ops.backups.sets import unfinished as unfinished_sets
from aviso_workers.ops.backups.storage import Backup, BackupRecord, Progress, find, load, places

__all__ = [
    "Backup",
    "BackupRecord",
    "BackupSchedule",
    "BackupSet",
    "CleansePlan",
    "Contents",
    "Drill",
    "Forgotten",
    "GoesOn",
    "Identities",
    "Keep",
    "MadeSet",
    "Making",
    "NewBackup",
    "Progress",
    "Pruned",
    "Restored",
    "RestoredStream",
    "Spool",
    "Takes",
    "chain",
    "cleanse",
    "create",
    "create_each",
    "create_next",
    "create_set",
    "drill",
    "find",
    "forget",
    "keep_backing_up",
    "load",
    "load_set",
    "members",
    "merge",
    "named_streams",
    "newest",
    "of_identifier",
    "of_subject",
    "one_of_each_chain",
    "places",
    "plan_cleanse",
    "prune",
    "prune_by_server",
    "read_back",
    "read_recipients",
    "restorable",
    "restore",
    "restore_set",
    "sets_in",
    "size",
    "unfinished_sets",
    "verify",
]
