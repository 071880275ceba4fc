"""Backups of streams: made, kept, verified, restored, drilled, and rid of what must be forgotten.

Called by the commands `backup ...`, and by scheduled code of your own. `storing` has them on disk, in the layout of the
nats CLI, `archive` and `s2` read what is in them; how a server gives and takes them is the backend's business.
"""

from __future__ import annotations

from aviso_workers.ops.backups.cleansing import Cleansing, Takes, cleanse, of_identifier, of_subject, plan_cleanse
from aviso_workers.ops.backups.creating import Keep, Pruned, create, named_streams, prune
from aviso_workers.ops.backups.restoring import Drill, Restored, drill, read_back, restore
from aviso_workers.ops.backups.storing import Backup, Progress, Record, find, load, newest, places
from aviso_workers.ops.backups.verifying import Contents, verify

__all__ = [
    "Backup",
    "Cleansing",
    "Contents",
    "Drill",
    "Keep",
    "Progress",
    "Pruned",
    "Record",
    "Restored",
    "Takes",
    "cleanse",
    "create",
    "drill",
    "find",
    "load",
    "named_streams",
    "newest",
    "of_identifier",
    "of_subject",
    "places",
    "plan_cleanse",
    "prune",
    "read_back",
    "restore",
    "verify",
]
