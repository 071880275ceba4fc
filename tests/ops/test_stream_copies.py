"""From one server to another that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aviso_workers import App
from aviso_workers.backends import Admin
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran, run  # noqa: F401
from tests.conftest import Start

Run = Callable[..., Ran]


@pytest.fixture
def target_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.start(store_dir=tmp_path / "target") as server:
        yield server


@pytest.fixture
def target(target_server: NatsServer, write_config: Callable[..., Path]) -> Path:
    return write_config(target_server.url, name="target.yaml")


@pytest.fixture
def source(run: Run, nats_server: NatsServer, write_config: Callable[..., Path]) -> Path:  # noqa: F811
    config = write_config(nats_server.url, name="source.yaml")
    for step in range(5):
        assert run("notify", "mars", "class=od", f"step={step}", "-c", config).code == 0
    assert run("delete", "mars@3", "--yes", "-c", config).code == 0
    return config


def test_a_copy_has_the_sequences_of_the_original(run: Run, source: Path, target: Path) -> None:  # noqa: F811
    ran = run("streams", "copy", "MARS", "--to-config", target, "-c", source)
    assert (ran.code, ran.lines) == (
        0,
        ["MARS: 4 messages and 0 consumers copied and compared", "MARS takes mars.> there"],
    ), ran.err
    assert "MARS takes them here as well" in ran.err
    assert run("replay", "mars", "-c", target).out == run("replay", "mars", "-c", source).out


def test_a_stream_that_is_there_already_is_left_alone(run: Run, source: Path, target: Path) -> None:  # noqa: F811
    assert run("notify", "mars", "class=rd", "step=1", "-c", target).code == 0
    ran = run("streams", "copy", "MARS", "--to-config", target, "-c", source)
    assert (ran.code, "stream MARS exists, with 1 messages" in ran.err) == (1, True)
    assert len(run("replay", "mars", "-c", target).lines) == 1


def test_a_copy_beside_the_original_has_another_name(run: Run, source: Path) -> None:  # noqa: F811
    ran = run("streams", "copy", "MARS", "--to-config", source, "--as", "MARS_BEFORE", "-c", source)
    assert (ran.code, ran.out) == (0, "MARS_BEFORE: 4 messages and 0 consumers copied and compared\n"), ran.err


def test_a_name_that_no_stream_can_have_is_refused_first(run: Run, source: Path, target: Path) -> None:  # noqa: F811
    ran = run("streams", "copy", "MARS", "--to-config", target, "--as", "mars.before", "-c", source)
    assert (ran.code, "'mars.before' is not a name of a stream" in ran.err, ran.out) == (1, True, ""), ran


def test_the_copy_of_a_fenced_stream_takes_publishes_in_its_place(run: Run, source: Path, target: Path) -> None:  # noqa: F811
    assert run("mirror", "fence", "MARS", "--yes", "-c", source).code == 0
    ran = run("streams", "copy", "MARS", "--to-config", target, "-c", source)
    assert (ran.code, ran.lines[-1]) == (0, "MARS takes mars.> there"), ran.err
    notify = ("notify", "mars", "class=od", "step=9")
    assert run(*notify, "-c", target).out.startswith("mars@6")
    refused = run(*notify, "-c", source)
    assert (refused.code, "MARS is fenced" in refused.err) == (1, True)
    assert run("streams", "plan", "-c", target).code == 0


def test_a_copy_that_lacks_what_was_stored_meanwhile_says_what_is_next(
    run: Run,  # noqa: F811
    source: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = backups.create

    async def publishing_behind(admin: Admin, *arguments: Any, **options: Any) -> Backup:
        backup = await create(admin, *arguments, **options)
        async with App("publisher", config=source) as app:
            await app.notify("mars", {"class": "od", "step": 7})
        return backup

    copy = ("streams", "copy", "MARS", "--to-config", target, "-c", source)
    with monkeypatch.context() as patched:
        patched.setattr(backups, "create", publishing_behind)
        ran = run(*copy)
    assert ran.code == 3
    [last] = ran.err.splitlines()
    assert last.startswith(
        "MARS has moved on: 1 messages were stored meanwhile and are not in the copy, which takes no"
    )
    assert "MARS is fenced" in run("notify", "mars", "class=od", "step=8", "-c", target).err
    assert run("mirror", "fence", "MARS", "--yes", "-c", source).code == 0
    followed = run(*copy, "--follow")
    assert (followed.code, followed.lines[-1]) == (0, "MARS takes mars.> there"), followed.err
    assert "5 messages up to 6" in followed.out
    assert run("notify", "mars", "class=od", "step=8", "-c", target).out.startswith("mars@7")


@pytest.mark.slow
def test_a_copy_that_follows_waits_while_its_server_is_away(
    run: Run,  # noqa: F811
    start: Start,
    source: Path,
    target: Path,
    target_server: NatsServer,
) -> None:
    following = start("streams", "copy", "MARS", "--to-config", target, "--follow", "-c", source)
    assert following.lines(1) == ["MARS: 4 messages and 0 consumers copied and compared\n"]
    target_server.stop()
    following.until_told("waiting: ")
    assert run("notify", "mars", "class=od", "step=9", "-c", source).code == 0
    with NatsServer.start(store_dir=target_server.store_dir, port=target_server.port):
        assert run("mirror", "fence", "MARS", "--yes", "-c", source).code == 0
        assert following.end() == 0
        assert len(run("replay", "mars", "-c", target).lines) == 5


def test_a_copy_under_another_name_does_not_follow(run: Run, source: Path, target: Path) -> None:  # noqa: F811
    ran = run("streams", "copy", "MARS", "--to-config", target, "--as", "OTHER", "--follow", "-c", source)
    assert (ran.code, "--as" in ran.err) == (1, True)
