from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Struct

from aviso_workers import cli
from aviso_workers.server import NatsServer


class Ran(Struct, frozen=True):
    """What became of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """`run("notify", "mars", "step=6", stdin=b"...")`: the command, in this process and the directory of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds to it

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["aviso-workers", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Ran(code=int(ended.value.code or 0), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def config(nats_server: NatsServer, write_config: Callable[..., Path]) -> Path:
    return write_config(nats_server.url)


@pytest.fixture
def unreachable(free_port: int, write_config: Callable[..., Path]) -> Path:
    """A configuration whose server is not there: whoever tries to connect fails."""
    return write_config(f"nats://127.0.0.1:{free_port}", name="unreachable.yaml", retry_attempts=1)
