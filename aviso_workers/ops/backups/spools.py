"""Spools: archives that are collected on the disk while a backup is made, and removed with the command.

Called by `completion`. A spool is a file without a name in the directory of the backups, where there is space for a
stream. The disk may keep its blocks, so where the backup is to be encrypted the spool is as well: to a key that is
made for it, and that exists in the memory of this process only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from aviso_workers.ops.backups import encryption
from aviso_workers.ops.backups.s2 import Readable
from aviso_workers.ops.backups.storage import explained, make_directory


class Spool:
    """An archive that is written once and read as often as needed, also by several readers at once."""

    def __init__(self, file: IO[bytes], key: encryption.OwnKey | None) -> None:
        self._file = file
        self._key = key

    def write(self, pieces: Iterable[bytes]) -> None:
        """Write the archive. Raises what the pieces raise, and OSError."""
        if self._key:
            encryption.encrypt(pieces, self._file.write, [self._key.public])
        else:
            self._file.writelines(pieces)
        self._file.flush()

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        """Open the archive from its beginning. Reading raises `MalformedError` where the file has changed, OSError."""
        if not self._key:
            yield _SpoolReader(self._file)
            return
        with encryption.decrypted(_SpoolReader(self._file), self._key.identities) as plain:
            yield plain


class _SpoolReader:
    """A reader of a file from its beginning, with a position of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.name = "a temporary file"
        self._number = file.fileno()
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        data = os.pread(self._number, size, self._at)
        self._at += len(data)
        return data


@contextmanager
def spool(beside: Path, *, encrypted: bool) -> Iterator[Spool]:
    """Make an empty spool in a directory. Raises `BackupError` where the directory cannot be written to."""
    with explained(f"cannot write to {beside}"):
        make_directory(beside)
        with tempfile.TemporaryFile(dir=beside) as file:
            yield Spool(file, encryption.OwnKey() if encrypted else None)
