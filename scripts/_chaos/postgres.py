"""A PostgreSQL of our own, in a directory of its own and on a Unix socket there, so that nobody else can be reached."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psycopg
from msgspec import Struct

from _demo.children import ShortfallError

USER = "postgres"
READY_SECONDS, STOP_SECONDS, SHORT_SECONDS = 60.0, 10.0, 0.05
UNPRIVILEGED = (
    *("--reuid=nobody", "--regid=nogroup", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
)
"""PostgreSQL refuses to run as root. As another user it may lack the right to read what is in root's directories."""
QUICK = ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "shared_buffers=16MB", "-c", "jit=off")
"""It is killed with its machine only, and then it is not needed any more."""


class Postgres(Struct, frozen=True):
    """A server that runs, and the directory of its socket."""

    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables by which clients find it."""
        return {"PGHOST": str(self.directory), "PGUSER": USER, "PGDATABASE": USER}

    @property
    def conninfo(self) -> str:
        """Return the same as a connection string."""
        return f"host={self.directory} user={USER} dbname={USER}"


@contextmanager
def running() -> Iterator[Postgres]:
    """Run a new server; leaving the block ends it and removes what it stored.

    Raises `ShortfallError` where PostgreSQL is not installed or does not start.
    """
    # A socket's path has at most 107 characters, which the directories of tests use up.
    with tempfile.TemporaryDirectory(prefix="aviso-workers-postgres-", dir="/tmp") as made:
        directory = Path(made)
        data, log_file = directory / "data", directory / "log"
        if os.geteuid() == 0:
            shutil.chown(directory, "nobody", "nogroup")
        with log_file.open("wb") as log:
            _check(log_file, _run("initdb", f"--pgdata={data}", f"--username={USER}", *_new(), log=log).wait())
            process = _run("postgres", "-D", str(data), *_places(directory), *QUICK, log=log)
        try:
            postgres = Postgres(directory, process)
            _wait_until_ready(postgres, data, log_file)
            yield postgres
        finally:
            _end(process)


def _new() -> Sequence[str]:
    return ("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions")


def _places(directory: Path) -> Sequence[str]:
    return ("-c", "listen_addresses=", "-c", f"unix_socket_directories={directory}")


def _run(program: str, *arguments: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if not (found := shutil.which(program, path=places)):
        raise ShortfallError(f"{program} is not installed: run scripts/setup as root on Debian, or install postgresql")
    drop = UNPRIVILEGED if os.geteuid() == 0 else ()
    command = ["setpriv", *drop, "--pdeathsig=KILL", found, *arguments]  # who is killed leaves no server behind
    return subprocess.Popen(
        command, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _wait_until_ready(postgres: Postgres, data: Path, log_file: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if (code := postgres.process.poll()) is not None:
            _check(log_file, code or 1)
        try:
            with psycopg.connect(postgres.conninfo) as connection:
                (found,) = connection.execute("show data_directory").fetchone() or ("",)
        except psycopg.OperationalError as error:
            if time.monotonic() > deadline:
                raise ShortfallError(f"PostgreSQL is not ready: {error}\n{log_file.read_text()}") from error
            time.sleep(SHORT_SECONDS)
            continue
        if found != str(data):
            raise ShortfallError(f"the server in {postgres.directory} is another one: its data is in {found}")
        return


def _check(log_file: Path, code: int) -> None:
    if code:
        raise ShortfallError(f"PostgreSQL ended with exit code {code}\n{log_file.read_text(errors='replace')}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGQUIT)  # at once, whether clients are connected or not
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
