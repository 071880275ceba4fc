"""scripts/init_nats.sh and scripts/smoke_test.py, as the document's "Local Test Setup" and "Smoke Test" have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ports

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
        [str(part) for part in command], env={**env, **environ}, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What tells init_nats.sh to start a server of the test's own."""
    with ports.held(2) as (port, http_port):
        yield {
            "SKIP_DOCKER": "true",
            "CONFIG_DIR": str(tmp_path / "nats"),
            "CONTAINER_NAME": f"test-{os.getpid()}",
            "NATS_PORT": str(port),
            "NATS_HTTP_PORT": str(http_port),
        }


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
    assert run(SCRIPTS / "init_nats.sh", "stop", **environ).returncode == 0, "stopping twice does no harm"


def smoke(**environ: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, SCRIPTS / "smoke_test.py", **environ)


def test_the_smoke_test_holds_in_memory() -> None:
    result = smoke()
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_smoke_test_holds_on_the_server_that_init_nats_starts(server: dict[str, str]) -> None:
    url = f"nats://localhost:{server['NATS_PORT']}"
    result = smoke(BACKEND="jetstream", NATS_URL=url, **EXPECTATIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skip" not in result.stdout


@pytest.mark.parametrize("name", [name for name in EXPECTATIONS if name.startswith("EXPECT_")])
def test_one_wrong_expectation_fails_the_smoke_test(server: dict[str, str], name: str) -> None:
    wrong = "s2" if name == "EXPECT_COMPRESSION" else "5"
    url = f"nats://localhost:{server['NATS_PORT']}"
    result = smoke(BACKEND="jetstream", NATS_URL=url, **{**EXPECTATIONS, name: wrong})
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"expected {wrong}" in result.stdout


def test_a_port_in_use_is_named(server: dict[str, str]) -> None:
    again = run(SCRIPTS / "init_nats.sh", **{**server, "CONFIG_DIR": server["CONFIG_DIR"] + "-2"})
    assert again.returncode == 1
    assert f"port {server['NATS_PORT']} is in use" in again.stderr


def test_a_token_is_made_and_needed_and_not_shown(environ: dict[str, str], tmp_path: Path) -> None:
    started = run(SCRIPTS / "init_nats.sh", **environ, ENABLE_AUTH="true")
    try:
        assert started.returncode == 0, started.stderr
        config = (tmp_path / "nats" / "nats-server.conf").read_text()
        token = config.split('token: "')[1].split('"')[0]
        assert token not in started.stdout + started.stderr
        url = f"nats://localhost:{environ['NATS_PORT']}"
        refused = smoke(BACKEND="jetstream", NATS_URL=url)
        assert refused.returncode == 1
        assert "refused the credentials" in refused.stderr
        assert smoke(BACKEND="jetstream", NATS_URL=url, NATS_TOKEN=token).returncode == 0
    finally:
        run(SCRIPTS / "init_nats.sh", "stop", **environ)


def test_a_watch_from_history_to_live_misses_and_doubles_nothing() -> None:
    result = run(sys.executable, SCRIPTS / "watch_handover.py", "--notifications", "3000", "--rounds", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("none missing, none doubled") == 3
