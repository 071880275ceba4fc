"""scripts/init_nats.sh and scripts/smoke_test.py, as the document's "Local Test Setup" and "Smoke Test" have them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from aviso_workers import App, Notify, config
from aviso_workers.errors import BackendError
from aviso_workers.server.processes import free_ports
from tests.waits import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parents[2] / "scripts"
EXPECTATIONS = {
    "JETSTREAM_POLICY_STREAM_NAME": "POLYGON",
    "EXPECT_MAX_MESSAGES": "500000",
    "EXPECT_MAX_BYTES": "2147483648",
    "EXPECT_MAX_MESSAGES_PER_SUBJECT": "1",
    "EXPECT_COMPRESSION": "None",
}


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AVISO", "NATS_"))}
    return subprocess.run(
        [str(part) for part in command],
        env={**env, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """What tells init_nats.sh to start a server of the test's own."""
    port, http_port = free_ports(2)
    return {
        "DOCKER_HOST": "tcp://127.0.0.1:1",  # where no engine answers
        "CONFIG_DIR": str(tmp_path / "nats"),
        "CONTAINER_NAME": f"test-{os.getpid()}",
        "NATS_PORT": str(port),
        "NATS_HTTP_PORT": str(http_port),
        "COLUMNS": "20",  # as a narrow terminal says, by which ps would cut command lines
    }


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def server(environ: dict[str, str]) -> Iterator[dict[str, str]]:
    """What started the local server, as environment."""
    started = run(SCRIPTS / "init_nats.sh", **environ)
    try:
        assert started.returncode == 0, started.stderr
        yield environ
    finally:
        stopped = run(SCRIPTS / "init_nats.sh", "stop", **environ)
        assert stopped.returncode == 0, stopped.stderr
        assert not listens(int(environ["NATS_PORT"])), "the server has ended"
    assert run(SCRIPTS / "init_nats.sh", "stop", **environ).returncode == 0, "stopping twice does no harm"


def smoke(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, SCRIPTS / "smoke_test.py", *arguments, **environ)


@pytest.fixture
def configured(server: dict[str, str], tmp_path: Path) -> Installation:
    """An installation on the server that init_nats.sh started, whose streams are those of its own configuration."""
    installation = Installation(tmp_path / "installation.yaml", f"nats://localhost:{server['NATS_PORT']}")
    installation.configure(max_messages=500000, max_bytes=2147483648)
    installation.apply()
    return installation


class Installation:
    """A configuration file with the event types of smoke_test.yaml, and the streams on its server."""

    def __init__(self, file: Path, url: str) -> None:
        self.url = url
        self.environ = {"AVISO_WORKERS_CONFIG_FILE": str(file)}
        self._file = file

    def configure(self, **limits: int) -> None:
        document = yaml.safe_load((SCRIPTS / "smoke_test.yaml").read_text())
        document["notification_backend"] = {"kind": "jetstream", "jetstream": {"nats_url": self.url, **limits}}
        self._file.write_text(json.dumps(document))

    def apply(self) -> None:
        applied = run(Path(sys.executable).with_name("aviso-workers"), "streams", "apply", **self.environ)
        assert applied.returncode == 0, applied.stderr

    def streams(self, **environ: str) -> list[str]:
        """Their names, asked for with these credentials."""

        async def ask() -> list[str]:
            async with App("test", config=config.load(self._file, environ=environ)) as app:
                return await app.session.admin.stream_names()

        return anyio.run(ask)

    def states(self) -> dict[str, Any]:
        """The configuration and the number of messages of each stream."""

        async def ask() -> dict[str, Any]:
            async with App("test", config=self._file) as app:
                backend = app.session.backend
                found = {name: await backend.stream_info(name) for name in ("MARS", "POLYGON", "DISS")}
                return {name: (info.config, info.messages) for name, info in found.items()}

        return anyio.run(ask)

    def publish(self, count: int) -> None:
        async def publish() -> None:
            async with App("test", config=self._file) as app:
                identifier = {"date": "20250706", "time": "1200", "polygon": "(0,0,0,1,1,1,0,0)"}
                dates = [f"2025{month:02}{day:02}" for month in range(1, 9) for day in range(1, 26)]
                await app.notify_many(
                    Notify("test_polygon", {**identifier, "date": date}, {}) for date in dates[:count]
                )

        anyio.run(publish)


@pytest.mark.slow
def test_the_smoke_test_holds_in_memory() -> None:
    result = smoke()
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_the_smoke_test_holds_on_the_server_that_init_nats_starts(configured: Installation) -> None:
    for _ in range(2):  # what the first run has published does not disturb the second
        result = smoke(**configured.environ, **EXPECTATIONS)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "skip" not in result.stdout


@pytest.mark.slow
def test_one_wrong_expectation_fails_the_smoke_test(configured: Installation) -> None:
    for name in (name for name in EXPECTATIONS if name.startswith("EXPECT_")):
        wrong = "s2" if name == "EXPECT_COMPRESSION" else "5"
        result = smoke(**configured.environ, **{**EXPECTATIONS, name: wrong})
        assert result.returncode == 1, f"{name}: {result.stdout}{result.stderr}"
        assert f"expected {wrong}" in result.stdout, name


@pytest.mark.slow
def test_the_smoke_test_changes_no_stream_and_removes_nothing(configured: Installation) -> None:
    configured.publish(200)
    before = configured.states()
    configured.configure(max_messages=100000, max_bytes=1000000)  # what the streams are not like
    result = smoke(**configured.environ, **{**EXPECTATIONS, "EXPECT_MAX_MESSAGES": "100000"})
    assert result.returncode == 1, result.stdout + result.stderr
    assert "POLYGON has max_msgs 500000, expected 100000" in result.stdout
    after = configured.states()
    assert {name: state[0] for name, state in after.items()} == {name: state[0] for name, state in before.items()}
    assert after["POLYGON"][1] > before["POLYGON"][1]


@pytest.mark.slow
def test_the_smoke_test_does_not_verify_limits_of_its_own(configured: Installation) -> None:
    """It has no limits: where the installation's file is not named, the streams stay as they are all the same."""
    configured.configure(max_messages=1000)
    configured.apply()
    result = smoke(BACKEND="jetstream", NATS_URL=configured.url, **EXPECTATIONS)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "POLYGON has max_msgs 1000, expected 500000" in result.stdout


@pytest.mark.slow
def test_a_missing_stream_is_named_and_not_made(server: dict[str, str], tmp_path: Path) -> None:
    installation = Installation(tmp_path / "installation.yaml", f"nats://localhost:{server['NATS_PORT']}")
    installation.configure()
    for _ in range(2):
        result = smoke(**installation.environ, **EXPECTATIONS)
        assert result.returncode == 1, result.stdout + result.stderr
        assert "skip  the stream policy is in effect: stream POLYGON does not exist" in result.stdout
        assert "`aviso-workers streams apply` creates them: stream MARS does not exist" in result.stdout


@pytest.mark.slow
def test_compression_is_expected_in_any_of_its_spellings(configured: Installation) -> None:
    codes = {
        spelling: smoke(**configured.environ, EXPECT_COMPRESSION=spelling).returncode
        for spelling in ("None", "false", "", "true", "S2")
    }
    assert codes == {"None": 0, "false": 0, "": 0, "true": 1, "S2": 1}


@pytest.mark.slow
def test_an_empty_variable_counts_as_not_set() -> None:
    names = ("BACKEND", "NATS_URL", "TIMEOUT_SECONDS", "AVISO_WORKERS_CONFIG_FILE", *EXPECTATIONS)
    result = smoke(**dict.fromkeys(names, ""))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("TIMEOUT_SECONDS", "soon", "TIMEOUT_SECONDS must be a number of seconds above 0, not 'soon'"),
        ("TIMEOUT_SECONDS", "0", "TIMEOUT_SECONDS must be a number of seconds above 0, not '0'"),
        ("EXPECT_COMPRESSION", "zip", "EXPECT_COMPRESSION must be s2, true, none or false, not 'zip'"),
        ("BACKEND", "kafka", "Unknown notification_backend kind: kafka"),
    ],
)
@pytest.mark.slow
def test_a_variable_that_makes_no_sense_is_named_without_a_traceback(name: str, value: str, told: str) -> None:
    result = smoke(**{name: value})
    assert result.returncode == 1
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_verbose_says_what_was_published_and_found() -> None:
    result = smoke("-v")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "published mars@1: {'class': 'od'" in result.stdout
    assert "configuration: " in result.stdout
    assert "published" not in smoke().stdout


def test_a_port_in_use_is_named(server: dict[str, str]) -> None:
    again = run(SCRIPTS / "init_nats.sh", **{**server, "CONFIG_DIR": server["CONFIG_DIR"] + "-2"})
    assert again.returncode == 1
    assert f"port {server['NATS_PORT']} is in use" in again.stderr


@pytest.mark.slow
def test_a_token_is_made_and_needed_and_not_shown(environ: dict[str, str], tmp_path: Path) -> None:
    started = run(SCRIPTS / "init_nats.sh", **environ, ENABLE_AUTH="true")
    try:
        assert started.returncode == 0, started.stderr
        written = (tmp_path / "nats" / "nats-server.conf").read_text()
        token = written.split('token: "')[1].split('"')[0]
        assert token not in started.stdout + started.stderr
        url = f"nats://localhost:{environ['NATS_PORT']}"
        refused = smoke(BACKEND="jetstream", NATS_URL=url)
        assert refused.returncode == 1
        assert "FAIL  publishing is acknowledged" in refused.stdout
        assert "refused the credentials" in refused.stdout
        installation = Installation(tmp_path / "installation.yaml", url)
        installation.configure()
        installation.environ["NATS_TOKEN"] = token
        installation.apply()
        assert smoke(**installation.environ).returncode == 0
    finally:
        run(SCRIPTS / "init_nats.sh", "stop", **environ)


@pytest.mark.parametrize("token", ['a"b', "a\\b", 'x" } debug: true #', "$HOME {}%'"])
def test_a_token_is_taken_as_it_is(environ: dict[str, str], tmp_path: Path, token: str) -> None:
    started = run(SCRIPTS / "init_nats.sh", **environ, ENABLE_AUTH="true", TOKEN=token)
    try:
        assert started.returncode == 0, started.stderr
        url = f"nats://localhost:{environ['NATS_PORT']}"
        installation = Installation(tmp_path / "installation.yaml", url)
        installation.configure()
        assert installation.streams(NATS_TOKEN=token) == []
        with pytest.raises(BackendError, match="refused the credentials"):
            installation.streams(NATS_TOKEN="another")
    finally:
        run(SCRIPTS / "init_nats.sh", "stop", **environ)


@pytest.mark.parametrize("token", ["a\nb", "a\tb", "$2a$10$abcdefghijklmnopqrstuv"])
def test_a_token_that_no_server_reads_as_it_is_is_refused(environ: dict[str, str], token: str) -> None:
    started = run(SCRIPTS / "init_nats.sh", **environ, ENABLE_AUTH="true", TOKEN=token)
    assert started.returncode == 1
    assert "init_nats.sh: TOKEN must" in started.stderr
    assert token not in started.stderr


def test_a_process_id_that_was_given_to_somebody_else_is_left_alone(environ: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        try:
            directory = tmp_path / "nats"
            directory.mkdir()
            (directory / "nats-server.pid").write_text(f"{stranger.pid}\n")
            assert run(SCRIPTS / "init_nats.sh", "stop", **environ).returncode == 0
            assert stranger.poll() is None
            (directory / "nats-server.pid").write_text(f"{stranger.pid}\n")
            started = run(SCRIPTS / "init_nats.sh", **environ)
            assert started.returncode == 0, started.stderr
            assert stranger.poll() is None
        finally:
            run(SCRIPTS / "init_nats.sh", "stop", **environ)
            stranger.kill()


@pytest.mark.slow
def test_a_server_that_ends_at_once_is_told_with_its_reason(environ: dict[str, str]) -> None:
    started = run(SCRIPTS / "init_nats.sh", **environ, MAX_STORAGE="plenty")
    assert started.returncode == 1
    assert "the server ended at once: " in started.stderr, "not that it did not get ready within ten seconds"
    assert "max_file_store" in started.stderr or "plenty" in started.stderr


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_without_docker_the_configuration_is_written_and_nothing_started(
    environ: dict[str, str], tmp_path: Path, value: str
) -> None:
    """As upstream's script does where SKIP_DOCKER is set."""
    ran = run(SCRIPTS / "init_nats.sh", **environ, SKIP_DOCKER=value)
    assert ran.returncode == 0, ran.stderr
    config_file = tmp_path / "nats" / "nats-server.conf"
    assert f"nats-server -c {config_file}" in ran.stdout
    assert f'listen: "127.0.0.1:{environ["NATS_PORT"]}"' in config_file.read_text()
    assert not (tmp_path / "nats" / "nats-server.pid").exists()


@pytest.mark.slow
def test_a_watch_from_history_to_live_misses_and_doubles_nothing() -> None:
    result = run(sys.executable, SCRIPTS / "watch_handover.py", "--notifications", "3000", "--rounds", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("none missing, none doubled") == 3
