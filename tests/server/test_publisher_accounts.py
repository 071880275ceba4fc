"""Accounts of publishers: real commands of their users, an agent in the account with the streams, and mistakes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notification, Notify
from aviso_workers import config as settings
from aviso_workers.config import Config
from aviso_workers.errors import ConfigError, DeniedError
from aviso_workers.server import nats_conf, processes, profiles
from aviso_workers.server.processes import Node
from aviso_workers.state import delayed_messages
from tests.cli.conftest import Run, run
from tests.commands import Command
from tests.conftest import write_mars_config
from tests.documented import texts
from tests.server.conftest import Start, start
from tests.waits import PATIENCE_SECONDS

__all__ = ["run", "start"]

pytestmark = pytest.mark.anyio

PORTS: dict[str, Any] = {"port": 0, "monitoring": {"port": 0}, "cluster": {"port": 0}}
ACCOUNTS: dict[str, Any] = {
    "workers": {"users": {"worker": {"password": "worker"}}},
    "mars_centre": {"publishes": ["mars"], "users": {"centre": {"password": "centre"}}},
    "later_centre": {"publishes": ["mars"], "delays": True, "users": {"later": {"password": "later"}}},
    "extra_centre": {"publishes": ["mars_extra"], "users": {"extra": {"password": "extra"}}},
}


def write(path: Path, url: str = "", *, server: dict[str, Any] | None = None, **jetstream: Any) -> Path:
    """A configuration with the event types mars and mars_extra."""
    document = json.loads(write_mars_config(path, url or "nats://127.0.0.1:1", **jetstream).read_text())
    mars = document["notification_schema"]["mars"]
    document["notification_schema"]["mars_extra"] = {**mars, "topic": {**mars["topic"], "base": "mars_extra"}}
    path.write_text(json.dumps({**document, "server": server or {}}))
    return path


def load(tmp_path: Path, accounts: dict[str, Any], **others: Any) -> Config:
    path = write(tmp_path / "server.yaml", server={**PORTS, "accounts": accounts}, **others)
    return settings.load(path, environ={})


def of_user(tmp_path: Path, node: Node, user: str, **jetstream: Any) -> Path:
    """The configuration of one user, whose password is its name."""
    login: dict[str, Any] = {"user": user, "password": user, "inbox_prefix": f"_INBOX_{user}"}
    return write(tmp_path / f"{user}.yaml", node.url, **login, **jetstream)


class Handled(list[tuple[str, int]]):
    """The event types and steps of notifications that agents have handled."""

    def __init__(self) -> None:
        self._changed = anyio.Event()

    def note(self, notification: Notification) -> None:
        self.append((notification.event_type, int(str(notification.identifier["step"]))))
        self._changed.set()

    async def until(self, wanted: set[tuple[str, int]]) -> None:
        """Return when these were handled, and no other ones."""
        while {*self} != wanted:
            await self._changed.wait()
            self._changed = anyio.Event()


@asynccontextmanager
async def handling(config: Path) -> AsyncGenerator[Handled, None]:
    """What agents of both event types handle while the block runs."""
    app = App("field", config=config)
    handled = Handled()

    @app.agent("mars")
    async def mars(notification: Notification) -> None:
        handled.note(notification)

    @app.agent("mars_extra")
    async def mars_extra(notification: Notification) -> None:
        handled.note(notification)

    stop = anyio.Event()
    async with app, anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        with anyio.fail_after(PATIENCE_SECONDS):
            for stream in ("MARS", "MARS_EXTRA", delayed_messages.stream_of("MARS")):  # which the worker creates
                while stream not in await app.session.admin.stream_names():
                    await app.session.backend.clock.sleep(0.05)
            yield handled
        stop.set()


async def command(directory: Path, *arguments: str | Path) -> tuple[int, str]:
    """The exit code of a command, and what it says on standard error."""
    started = Command(*arguments, directory=directory)
    code = await anyio.to_thread.run_sync(started.end)
    return code, "".join(started.told)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_publishers_of_an_account_reach_agents_and_nothing_else(start: Start, tmp_path: Path, nodes: int) -> None:
    running = start(load(tmp_path, ACCOUNTS), nodes=nodes)
    centre, later, extra = (
        of_user(tmp_path, running[-1], user, stream_management="observe") for user in ("centre", "later", "extra")
    )
    lines = [{"event": "mars", "identifier": {"class": "od", "step": step}} for step in range(1, 101)]
    (tmp_path / "many.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    async with handling(of_user(tmp_path, running[0], "worker", replicas=nodes)) as handled:
        assert (await command(tmp_path, "notify", "mars", "class=od", "step=0", "-c", centre))[0] == 0
        assert (await command(tmp_path, "notify", "--file", "many.jsonl", "-c", centre))[0] == 0
        assert (await command(tmp_path, "notify", "mars_extra", "class=od", "step=0", "-c", extra))[0] == 0
        assert (await command(tmp_path, "notify", "mars", "class=od", "step=101", "--after", "1s", "-c", later))[0] == 0
        async with App("centre", config=centre) as app:
            await app.notify_together([Notify("mars", {"class": "od", "step": step}) for step in (102, 103)])

        code, said = await command(tmp_path, "notify", "mars_extra", "class=od", "step=1", "-c", centre)
        assert (code, "permissions violation" in said, "MARS_EXTRA" in said) == (1, True, True)
        code, said = await command(tmp_path, "notify", "mars", "class=od", "step=0", "--after", "1s", "-c", centre)
        assert (code, "permissions violation" in said, "aviso_workers_schedule__MARS" in said) == (1, True, True)
        code, said = await command(tmp_path, "watch", "mars", "-c", centre)
        assert (code, "permissions violation" in said) == (1, True)

        wanted = {("mars", step) for step in range(104)} | {("mars_extra", 0)}
        await handled.until(wanted)
    assert len(handled) == len(wanted)


async def test_a_publisher_of_an_account_cancels_what_it_delays_where_the_account_delays(
    start: Start, tmp_path: Path
) -> None:
    (node,) = start(load(tmp_path, ACCOUNTS))
    async with handling(of_user(tmp_path, node, "worker")):
        async with App("later", config=of_user(tmp_path, node, "later", stream_management="observe")) as app:
            await app.notify("mars", {"class": "od", "step": 1}, due="1h", message_id="one")
            assert await app.cancel("mars", "one")
        async with App("centre", config=of_user(tmp_path, node, "centre", stream_management="observe")) as app:
            with pytest.raises(DeniedError, match="aviso_workers_schedule__MARS"):
                await app.notify("mars", {"class": "od", "step": 1}, due="1h")


async def test_two_accounts_with_streams_have_publishers_of_their_own(start: Start, tmp_path: Path) -> None:
    second = {"users": {"second": {"password": "second"}}}
    publishers = {"publishes": ["mars"], "publishes_to": "second", "users": {"centre": {"password": "centre"}}}
    (node,) = start(load(tmp_path, {"workers": ACCOUNTS["workers"], "second": second, "mars_centre": publishers}))
    async with handling(of_user(tmp_path, node, "second")) as handled:
        app = App("centre", config=of_user(tmp_path, node, "centre", stream_management="observe"))
        async with app:
            await app.notify("mars", {"class": "od", "step": 1})
        await handled.until({("mars", 1)})


@pytest.mark.parametrize("prefix", ["$JS.API", "$JS.hub.API"])
async def test_publishers_ask_by_the_subjects_of_the_domain_or_by_the_usual_ones(
    start: Start, tmp_path: Path, prefix: str
) -> None:
    server = {**PORTS, "accounts": ACCOUNTS, "jetstream": {"domain": "hub"}}
    loaded = settings.load(write(tmp_path / "server.yaml", server=server, domain="hub"), environ={})
    (node,) = start(loaded)
    domain = None if prefix == "$JS.API" else "hub"
    async with handling(of_user(tmp_path, node, "worker")) as handled:
        config = of_user(tmp_path, node, "centre", stream_management="observe", domain=domain)
        async with App("centre", config=config) as app:
            await app.notify("mars", {"class": "od", "step": 1})
        await handled.until({("mars", 1)})


@pytest.mark.parametrize(
    ("accounts", "mistake"),
    [
        (
            {"workers": {}, "centre": {"publishes": ["mars", "mrs"]}},
            "server.accounts.centre.publishes[1] names no event type of notification_schema: mars, mars_extra",
        ),
        (
            {"workers": {}, "centre": {"publishes": ["mars"], "jetstream": {"max_streams": 3}}},
            "server.accounts.centre.jetstream must not be combined with publishes: the streams are in another account",
        ),
        (
            {"centre": {"publishes": ["mars"]}, "PLAIN": {"jetstream": {"enabled": False}}},
            "server.accounts.centre.publishes_to must name an account with JetStream: there is none",
        ),
        (
            {"east": {}, "west": {}, "centre": {"publishes": ["mars"]}},
            "server.accounts.centre.publishes_to must name an account with JetStream: say which of east, west has the "
            "streams",
        ),
        (
            {"east": {}, "centre": {"publishes": ["mars"], "publishes_to": "est"}},
            "server.accounts.centre.publishes_to names no account of server.accounts with JetStream: east",
        ),
        (
            {"workers": {"delays": True}},
            "server.accounts.workers.delays needs publishes: the event types that the users of the account publish",
        ),
    ],
)
def test_a_mistake_names_the_key_and_the_cure(tmp_path: Path, accounts: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as refused:
        profiles.choose(load(tmp_path, accounts), profile="development")
    (said,) = refused.value.mistakes
    assert said.endswith(mistake)
    assert said.startswith(f"{tmp_path / 'server.yaml'}:")


def test_the_documented_accounts_are_rendered(tmp_path: Path) -> None:
    section = texts("docs/server.md", "yaml")[1]
    path = write(tmp_path / "aviso.yaml")
    document = json.loads(path.read_text())
    del document["server"]
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in document.items()) + section)
    users = ("workers", "worker"), ("workers", "operator"), ("mars_centre", "mars"), ("mars_centre", "backup")
    environ = {
        f"AVISO_WORKERS_SERVER__ACCOUNTS__{account}__USERS__{user}__PASSWORD".upper(): "p" for account, user in users
    }
    server, _ = profiles.choose(settings.load(path, environ=environ), profile="development")
    assert 'service: "mars.>"' in nats_conf.accounts(server)


def test_a_stream_that_is_a_mirror_takes_no_publishes(tmp_path: Path) -> None:
    path = write(tmp_path / "server.yaml", server={"accounts": {"workers": {}, "centre": {"publishes": ["mars"]}}})
    mirror = {"MARS": {"mirror": {"name": "ORIGIN"}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "streams": mirror}))
    with pytest.raises(ConfigError, match=r"publishes\[0\] names an event type whose stream is a mirror"):
        profiles.choose(settings.load(path, environ={}), profile="development")


def test_permissions_of_a_user_that_are_configured_stay(tmp_path: Path) -> None:
    own = {"publish": {"allow": ["mars.od.>"]}}
    users = {"narrow": {"password": "p", "permissions": own}, "usual": {"password": "p"}}
    server, _ = profiles.choose(
        load(tmp_path, {"workers": {}, "centre": {"publishes": ["mars"], "users": users}}), profile="development"
    )
    permissions = {name: user.permissions for name, user in server.accounts["centre"].users.items()}
    assert permissions["narrow"].publish.allow == ("mars.od.>",)
    assert permissions["usual"].publish.allow == ("mars.>", "aviso_workers.api.STREAM.INFO.MARS")
    assert permissions["usual"].subscribe.allow == ("_INBOX_usual.>",)


def test_the_role_publisher_shows_its_account_for_a_file_that_is_written_by_hand(tmp_path: Path, run: Run) -> None:
    ran = run("server", "render", "--role", "publisher", "--config", write(tmp_path / "config.yaml"))
    shown = "".join(f"{line[2:]}\n" for line in ran.lines if line.startswith("# "))
    text = shown[shown.index("accounts {") :]
    assert 'service: "mars_extra.>"' in text
    (tmp_path / "by-hand.conf").write_text(text)
    lines = tuple((line, "") for line in text.splitlines())
    nats_conf.write(nats_conf.Rendered(lines=lines, secrets=()), tmp_path / "checked.conf", origins={})


def test_streams_get_another_key_beside_accounts_of_publishers(tmp_path: Path, run: Run) -> None:
    def configure(**jetstream: Any) -> tuple[str | Path, ...]:
        section = {**PORTS, "jetstream": jetstream, "accounts": ACCOUNTS}
        return "--config", write(tmp_path / "server.yaml", server=section), "--directory", tmp_path / "servers"

    (tmp_path / "key").write_text("the first key")
    try:
        assert run("server", "start", *configure()).code == 0
        processes.stop(tmp_path / "servers")
        encrypted = configure(encryption={"key_file": str(tmp_path / "key")})
        moved = run("server", "rotate-key", *encrypted)
        assert moved.code == 0, moved
    finally:
        processes.stop(tmp_path / "servers")
