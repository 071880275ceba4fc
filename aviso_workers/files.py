"""Files that nobody but their owner can read, and that are on the disk when it is said that they are.

Called by `ops.backups`, `ops.erasure`, `server.store` and the pipelines of `spark`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def create_file(path: Path) -> IO[bytes]:
    """Open a new file to be written, which nobody but its owner can read. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def sync(file: IO[bytes]) -> None:
    """Have the disk store what was written. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Have the disk store which files a directory has. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
