"""Erasure of notifications for good, as data protection asks for it, wherever a server keeps them and their copies.

Called by the command `erase`; `backup cleanse` goes by the same rules and by the record that an erasure leaves.
`copies` says which messages are copies of what is to be erased, and which tables, windows and counters may hold
something of it; `erase` searches, erases, and records what was done.
"""

from __future__ import annotations

from aviso_workers.ops.erasure.copies import Suspect
from aviso_workers.ops.erasure.erase import (
    ELSEWHERE,
    INDEX_WITHIN,
    Eraser,
    ErasureRecord,
    FoundMessages,
    Survey,
    Unreached,
)

__all__ = ["ELSEWHERE", "INDEX_WITHIN", "Eraser", "ErasureRecord", "FoundMessages", "Survey", "Suspect", "Unreached"]
