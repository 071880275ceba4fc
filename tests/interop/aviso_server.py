"""A real aviso-server as a process, for tests that put ours beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from _demo.children import is_ready
from aviso_workers.server import start_tied
from aviso_workers.server.processes import free_ports
from tests.interop import programs
from tests.waits import PATIENCE_SECONDS


class AvisoServer:
    """A running aviso-server with one configuration file. Leaving the `with` block ends it.

    The file is used as it is: only the address comes from the environment, and `environ` can add to that.
    """

    def __init__(
        self, version: str, *, config: Path, directory: Path, port: int, environ: Mapping[str, str] | None = None
    ) -> None:
        self.version = version
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = directory / f"aviso-server-{version}-{port}.log"
        self._program = programs.aviso_server(version)
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))},
            "AVISOSERVER_CONFIG_FILE": str(config),
            "AVISOSERVER_APPLICATION__HOST": "127.0.0.1",
            "AVISOSERVER_APPLICATION__PORT": str(port),
            **(environ or {}),
        }
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has logged so far, also before a restart."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and return when it answers that it is healthy. Fails with its log where it ends instead."""
        with self.log_file.open("ab") as log:
            self._process = start_tied(
                [self._program],
                cwd=self._directory,
                env=self._environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_healthy():
            assert self.is_running, f"aviso-server {self.version} ended at once:\n{self.log}"
            assert time.monotonic() < deadline, f"aviso-server {self.version} is not healthy:\n{self.log}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it in order, by force where that takes longer than ten seconds."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> AvisoServer:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return the status and the text of an answer that ends."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def notify(self, event_type: str, identifier: Mapping[str, Any], payload: Any = None) -> tuple[int, str]:
        """Post a notification; return the status and the text of the answer."""
        body = {"event_type": event_type, "identifier": dict(identifier), "payload": payload}
        return self.request("POST", "/api/v1/notification", body)

    def _is_healthy(self) -> bool:
        return is_ready(f"{self.url}/health")


@contextmanager
def running(
    version: str, *, config: Path, directory: Path, environ: Mapping[str, str] | None = None
) -> Iterator[AvisoServer]:
    """Run an aviso-server on a free port, which stays its own when it is restarted."""
    (port,) = free_ports(1)
    with AvisoServer(version, config=config, directory=directory, port=port, environ=environ) as server:
        yield server
