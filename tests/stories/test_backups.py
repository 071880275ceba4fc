"""A process that backs up again and again: through an outage of the server, beside a second one, until SIGTERM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.ops import backups
from tests.ops.backups.test_encryption import Key
from tests.stories.processes import MAIN, Server, until
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio


class Scheduled:
    """The command at work, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.process = process
        self._log_file = log_file

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.log.splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] == event]

    async def until_logged(self, event: str, *, times: int) -> dict[str, Any]:
        await until(lambda: len(self.logged(event)) >= times, what=lambda: self.log)
        return self.logged(event)[-1]


@contextmanager
def scheduled(config: Path, directory: Path, name: str, *what: str | Path) -> Iterator[Scheduled]:
    every = ("--every", "1s", "--full-every", "1h", "--keep", "2")
    command = ["backup", "create", *(what or ("mars",)), "--to", directory, *every]
    log_file = directory.with_name(f"{name}.log")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *command, "--config", config], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Scheduled(process, log_file)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_backups_are_made_through_an_outage_until_sigterm(
    server: Server, publish: Callable[..., Any], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(server.url, retry_attempts=1)
    await publish(range(3))
    kept = tmp_path / "kept"
    with scheduled(config, kept, "first") as first:
        made = await first.until_logged("backup.made", times=2)
        assert (made["stream"], made["messages"]) == ("MARS", 3)
        assert first.logged("backup.made")[0]["full_because"] == "there is no earlier backup"
        server.kill()
        failed = await first.until_logged("backup.failed", times=1)
        assert (failed["newest_age_seconds"] >= 0, failed["newest"] is not None) == (True, True)
        before = len(first.logged("backup.made"))
        server.start()
        await publish(range(3, 5))
        await first.until_logged("backup.made", times=before + 1)
        with scheduled(config, kept, "second") as second:
            await second.until_logged("backup.schedule_started", times=1)
            await first.until_logged("backup.made", times=len(first.logged("backup.made")) + 2)
            assert second.process.poll() is None, second.log
            second.process.send_signal(signal.SIGTERM)
            assert second.process.wait(PATIENCE_SECONDS) == 0, second.log
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE_SECONDS) == 0, first.log
    found = backups.find(kept)
    chain = backups.chain(found[-1])
    assert found == chain, "the full one is there as long as an increment needs it"
    contents = backups.verify(found[-1])
    assert contents is not None
    assert contents.messages == 5
    assert not [path.name for path in (kept / "MARS").iterdir() if path.name.startswith(".")], "nothing unfinished"


async def test_all_streams_are_an_encrypted_set_each_time(
    server: Server, publish: Callable[..., Any], write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, kept, key = write_config(server.url), tmp_path / "kept", Key(tmp_path / "key.txt")
    await publish(range(3))
    encrypted = ("--encrypt-to", key.public, "--identity", key.file)
    with scheduled(config, kept, "sets", "--all", *encrypted) as sets:
        await sets.until_logged("backup.set_made", times=1)
        await publish(range(3, 5))
        made = await sets.until_logged("backup.set_made", times=len(sets.logged("backup.set_made")) + 2)
        sets.process.send_signal(signal.SIGTERM)
        assert sets.process.wait(PATIENCE_SECONDS) == 0, sets.log
    assert sets.logged("backup.failed") == []
    assert Path(made["file"]) in backups.sets_in(kept)
    for member in backups.members(backups.load_set(Path(made["file"]))):
        assert member.encrypted
        contents = backups.verify(member, identities=key.identities)
        assert contents is not None
        assert contents.messages == (5 if member.stream == "MARS" else 0)
