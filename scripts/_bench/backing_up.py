"""Backups: a stream is backed up, verified and restored, beside a plain copy of the server's files that hold it.

All rates are of the stream: its messages, and its bytes as the server counts them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from _bench.filling import STREAM
from _bench.ground import Cores, Ground, grounded
from _bench.rivals import Rivals
from _bench.rounds import Figures, Say, Size
from aviso_workers.ops import backups

COUNT = 1_000_000
MIB = 1024 * 1024


def back_up(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    count = size.count(COUNT)
    figures: Figures = {}
    with grounded(cores) as ground, tempfile.TemporaryDirectory(prefix="aviso-workers-bench-") as directory:
        say(f"backup: storing {count:,} notifications")
        ground.fill(count)
        for repetition in range(size.repetitions):
            say(f"backup: {repetition + 1} of {size.repetitions}")
            anyio.run(_round, ground, Path(directory), figures)
    return figures


async def _round(ground: Ground, directory: Path, figures: Figures) -> None:
    async with ground.app("backup") as app:
        info = await app.session.backend.stream_info(STREAM)

        @contextmanager
        def measured(contestant: str) -> Iterator[None]:
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
            for measure, amount in (("per_second", info.messages), ("mib_per_second", info.bytes / MIB)):
                figures.setdefault(f"backup.{contestant}.{measure}", []).append(amount / seconds)

        with measured("copy"):
            await anyio.to_thread.run_sync(_copy, ground.store, directory / "copy")
        with measured("create"):
            made = await backups.create(app.session.admin, STREAM, directory)
        with measured("verify"):
            await anyio.to_thread.run_sync(backups.verify, made)
        await app.session.admin.delete_stream(STREAM)
        with measured("restore"):
            await backups.restore(app.session.admin, made)
    figures.setdefault("backup.create.archive_mib", []).append(made.size / MIB)
    shutil.rmtree(directory / "copy")
    shutil.rmtree(made.directory)


def _copy(source: Path, target: Path) -> None:
    """Until it is on the disk, as a backup is."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
