"""A publisher who points the acknowledgements of his own messages at the answers of others.

No permission of nats-server looks at the reply subject of a message. With the roles that we print nobody else hears
where an answer goes, and who hears it all the same, as with older permissions, can make nothing succeed by it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import nats
import pytest
from nats.aio.msg import Msg

from aviso_workers import App, Notification
from aviso_workers.config.nats_server import Permissions, Subjects
from aviso_workers.errors import BackendError
from aviso_workers.events import Event, PermissionDenied
from aviso_workers.ops import permissions
from aviso_workers.server import NatsServer
from tests.conftest import write_mars_config
from tests.security.test_roles import EVERYTHING, NOWHERE, denied, user
from tests.waits import PATIENCE_SECONDS, flushed

pytestmark = pytest.mark.anyio

VICTIM = {"user": "victim", "password": "victim", "stream_management": "observe", "publish_retry_attempts": 1}
OLDER = Subjects(allow=("_INBOX.>",))
"""What our roles allowed every user to hear."""
REFUSED = re.compile(rb'MSG (_INBOX\S+) 1 \d+\r\n{"error"')
"""An answer to the victim, as the attacker hears it."""
TRIES = 40
HEARD = 20
"""So many answers the attacker hears, if it hears any: under load fewer than there are tries."""


def of_publisher(path: Path, name: str) -> Permissions:
    config = App("any", config=write_mars_config(path, NOWHERE, **VICTIM)).config
    return permissions.of_publisher(config, user=name)


def of_attacker(heard: Subjects) -> Permissions:
    """The rights of a publisher of another base."""
    return Permissions(publish=Subjects(allow=("other.>", "$JS.API.STREAM.INFO.OTHER")), subscribe=heard)


@asynccontextmanager
async def server(tmp_path: Path, *users: str) -> AsyncGenerator[NatsServer, None]:
    """A server with a full stream MARS and a stream OTHER."""
    accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{', '.join((EVERYTHING, *users))}] }} }}\n"
    with NatsServer.start(store_dir=tmp_path / "store", config=accounts) as server:
        client = await nats.connect(server.url, user="everything", password="everything")
        for name, limits in (("MARS", {"max_msgs": 1, "discard": "new"}), ("OTHER", {})):
            stream = {"name": name, "subjects": [f"{name.lower()}.>"], **limits}
            await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(stream).encode())
        await client.request("mars.first", b"{}")
        await client.close()
        yield server


class Attacker(threading.Thread):
    """Hears answers of others, and has its own acknowledgements sent to those that come next, on and on."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.heard = 0
        self._newest: dict[bytes, int] = {}
        self._stopped = threading.Event()
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_SECONDS)
        login = {"user": "attacker", "pass": "attacker", "verbose": False, "headers": True, "no_responders": True}
        self._socket.sendall(b"CONNECT %b\r\nSUB _INBOX.> 1\r\nPING\r\n" % json.dumps(login).encode())
        while b"PONG" not in self._socket.recv(65_536):
            pass
        self._socket.setblocking(False)

    def run(self) -> None:
        while not self._stopped.is_set():
            with suppress(BlockingIOError):
                for subject in REFUSED.findall(self._socket.recv(1 << 20)):
                    self.heard += 1
                    inbox, _, number = subject.rpartition(b".")
                    if number.isdigit():
                        self._newest[inbox] = max(self._newest.get(inbox, 0), int(number))
            nexts = [b"%b.%d" % (inbox, number + 1 + n) for inbox, number in self._newest.items() for n in range(3)]
            with suppress(BlockingIOError):
                self._socket.send(b"".join(b"PUB other.forged %b 2\r\n{}\r\n" % each for each in nexts))

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._socket.close()


@contextmanager
def attacking(server: NatsServer) -> Iterator[Attacker]:
    attacker = Attacker(server.url)
    attacker.start()
    try:
        yield attacker
    finally:
        attacker.stop()


@pytest.mark.parametrize("heard", [OLDER, Subjects(allow=("_INBOX_attacker.>",))], ids=["older roles", "our roles"])
async def test_what_a_full_stream_refuses_is_never_a_success(tmp_path: Path, heard: Subjects) -> None:
    """With a stream that is full, every success is a forged one."""
    victim = of_publisher(tmp_path / "role.yaml", "victim")
    if heard is OLDER:
        victim = Permissions(publish=victim.publish, subscribe=OLDER)
    async with server(tmp_path, user("victim", victim), user("attacker", of_attacker(heard))) as running:
        config = write_mars_config(tmp_path / "c.yaml", running.url, publish_deadline_seconds=0.01, **VICTIM)
        with attacking(running) as attacker:
            async with App("victim", config=config) as app:
                for step in count():
                    with pytest.raises(BackendError):
                        await app.notify("mars", {"class": "od", "step": step})
                    if step + 1 >= TRIES and (heard is not OLDER or attacker.heard >= HEARD):
                        break
        assert (attacker.heard > 0) is (heard is OLDER), "whether the attacker heard where answers go"


async def test_nobody_else_may_hear_answers_to_a_user(tmp_path: Path) -> None:
    mine, theirs = (of_publisher(tmp_path / f"{name}.yaml", name) for name in ("mars", "other"))
    async with server(tmp_path, user("mars", mine), user("other", theirs)) as running:
        assert mine.subscribe.allow == ("_INBOX_mars.>",)
        for subject in ("_INBOX_mars.>", "_INBOX.>", ">", "*.>"):
            assert await denied(running, "other", subscribe=subject), subject


async def test_a_user_whose_permissions_are_older_is_answered_where_they_allow_it(tmp_path: Path) -> None:
    publishing = of_publisher(tmp_path / "role.yaml", "victim").publish
    for name, heard in (("older", OLDER), ("newer", Subjects(allow=("_INBOX_victim.>",)))):
        rights = user("victim", Permissions(publish=publishing, subscribe=heard))
        (directory := tmp_path / name).mkdir()
        async with server(directory, rights) as running:
            config = write_mars_config(directory / "c.yaml", running.url, **VICTIM)
            async with App("victim", config=config) as app:
                assert app.session.admin.administration().shares_inbox is (heard is OLDER)
                assert (await app.session.backend.stream_info("MARS")).messages == 1
            violations = [line for line in running.log.splitlines() if "Violation" in line]
            assert len(violations) == (heard is OLDER)  # it tries its own prefix first


async def test_a_worker_goes_on_when_an_acknowledgement_comes_to_its_pulls(tmp_path: Path) -> None:
    """It was ended as a subscription that the server refuses. Here it hears the answers where all can."""
    handled = anyio.Event()
    foreign: list[Any] = []
    async with server(tmp_path, user("attacker", of_attacker(OLDER))) as running:
        path = write_mars_config(
            tmp_path / "c.yaml", running.url, user="everything", password="everything", inbox_prefix="_INBOX"
        )
        app = App("victim", config=path)

        @app.agent("mars")
        async def index(notification: Notification) -> None:
            handled.set()

        app.events.listen(lambda event: foreign.append(event) if type(event).__name__ == "ForeignAnswer" else None)
        client = await nats.connect(running.url, user="everything", password="everything")
        pulls: list[str] = []

        async def hear(message: Msg) -> None:
            pulls.append(message.reply)

        await client.subscribe("$JS.API.CONSUMER.MSG.NEXT.MARS.>", cb=hear)
        await flushed(client)
        stop = anyio.Event()
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app, anyio.create_task_group() as tasks:
                tasks.start_soon(app._work, stop)
                while not pulls:
                    await app.session.backend.clock.sleep(0.01)
                attacker = await nats.connect(running.url, user="attacker", password="attacker")
                for _ in range(3):
                    await attacker.publish("other.forged", b"{}", reply=pulls[0])
                await flushed(attacker)
                while len(foreign) < 3:
                    await app.session.backend.clock.sleep(0.01)
                await client.request("$JS.API.STREAM.PURGE.MARS")
                handled = anyio.Event()
                await app.notify("mars", {"class": "od", "step": 1})
                await handled.wait()
                stop.set()
                await attacker.close()
        await client.close()
    assert [event.times for event in foreign] == [1, 2, 3]
    assert foreign[0].answer.endswith("an acknowledgement of stream OTHER came as its answer")


@pytest.mark.parametrize("first", ["older", "newer"])
async def test_permissions_may_change_their_prefix_while_a_worker_runs(
    tmp_path: Path, free_port: int, first: str
) -> None:
    """The server is started again with the others, as it is for a new configuration."""
    heard = {"older": OLDER, "newer": Subjects(allow=("_INBOX_worker.>",))}
    everything = Subjects(allow=(">",))
    handled: list[int] = []
    path = write_mars_config(tmp_path / "c.yaml", f"nats://127.0.0.1:{free_port}", user="worker", password="worker")
    app = App("victim", config=path)

    @app.agent("mars")
    async def index(notification: Notification) -> None:
        handled.append(int(notification.identifier["step"]))
        if len(handled) in changed:
            changed[len(handled)].set()

    changed = {number: anyio.Event() for number in (1, 2)}
    heard_events: list[Event] = []
    app.events.listen(heard_events.append)

    def started(which: str) -> AbstractContextManager[NatsServer]:
        rights = user("worker", Permissions(publish=everything, subscribe=heard[which]))
        accounts = f"accounts: {{ DATA: {{ jetstream: enabled, users: [{rights}] }} }}\n"
        return NatsServer.start(store_dir=tmp_path / "store", config=accounts, port=free_port)

    second = "newer" if first == "older" else "older"
    async with AsyncExitStack() as stack:
        with started(first):
            await stack.enter_async_context(app)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(app._work, anyio.Event())
            await app.notify("mars", {"class": "od", "step": 1})
            with anyio.fail_after(PATIENCE_SECONDS):
                await changed[1].wait()
            assert app.session.admin.administration().shares_inbox is (first == "older")
        with started(second):
            with anyio.fail_after(PATIENCE_SECONDS):
                await app.notify("mars", {"class": "od", "step": 2})
                await changed[2].wait()
            assert app.session.admin.administration().shares_inbox is (second == "older")
            tasks.cancel_scope.cancel()
            await stack.aclose()
    assert handled[-1] == 2
    assert [event for event in heard_events if isinstance(event, PermissionDenied)] == []
