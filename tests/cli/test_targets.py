"""How commands connect to what the configuration names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import app as apps
from aviso_workers import cli
from aviso_workers.cli import targets
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from tests.cli.conftest import Run


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which a command has tried to connect, which fails."""
    configs: list[Config] = []

    @asynccontextmanager
    async def fail(config: Config, **_: Any) -> AsyncIterator[None]:
        configs.append(config)
        raise UnavailableError("no server")
        yield

    monkeypatch.setattr(targets, "open_backend", fail)
    monkeypatch.setattr(apps, "open_backend", fail)
    cli._load.cache_clear()
    return configs


@pytest.mark.parametrize("command", ["streams ls", "notify mars class=od step=1", "replay mars"])
@pytest.mark.parametrize(("set_to", "expected"), [(None, 10), (45, 45)])
def test_an_attempt_to_connect_takes_ten_seconds_unless_configured(
    run: Run, write_config: Any, tried: list[Config], command: str, set_to: int | None, expected: int
) -> None:
    settings = {} if set_to is None else {"timeout_seconds": set_to}
    config: Path = write_config("nats://127.0.0.1:4", **settings)
    assert run(*command.split(), "--config", config).err == "aviso-workers: no server\n"
    assert [each.notification_backend.jetstream.timeout_seconds for each in tried] == [expected]


def test_what_a_module_prints_is_not_in_the_output_of_a_command(run: Run, config: Path, tmp_path: Path) -> None:
    """As in `replay --app mine:app | notify --file -`, where a line of the author's would be taken for a document."""
    name = f"chatty_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "import structlog\nfrom aviso_workers import App\n"
        f"app = App('chatty', config={str(config)!r})\nprint('printed')\nstructlog.get_logger().warning('logged')\n"
    )
    assert run("notify", "mars", "class=od", "step=6", "--app", f"{name}:app").code == 0
    ran = run("replay", "mars", "--app", f"{name}:app")
    assert (ran.code, [line[:1] for line in ran.lines]) == (0, ["{"]), ran


@pytest.mark.parametrize(
    "command",
    [
        *("streams info mars", "streams gaps mars", "streams get mars 1", "streams purge mars", "streams seal mars"),
        *("streams rm mars", "streams step-down mars", "streams remove-peer mars n1", "streams copy mars --to-config"),
        *("consumers ls mars", "consumers show mars x", "consumers rm mars x", "consumers unpin mars x g"),
        *("mirror fence mars --yes", "mirror unfence mars --yes", "mirror promote mars --yes"),
        "mirror recover mars",
    ],
)
def test_a_command_that_takes_a_stream_suggests_that_of_an_event_type(run: Run, config: Path, command: str) -> None:
    assert run("notify", "mars", "class=od", "step=6", "--config", config).code == 0
    words = command.split()
    ran = run(*words, *([config] if words[-1] == "--to-config" else ()), "--config", config)
    assert (ran.code, ran.out) == (1, ""), ran
    assert ran.err.endswith("; did you mean MARS, the stream of the event type mars?\n"), ran


def test_nothing_is_suggested_where_the_stream_itself_is_missing(run: Run, config: Path) -> None:
    for stream in ("MARS", "other"):
        ran = run("streams", "info", stream, "--config", config)
        assert (ran.code, "did you mean" in ran.err) == (1, False), ran
