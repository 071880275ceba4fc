"""An aviso-server and workers on one nats-server, with one and the same configuration file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec import Struct

from aviso_workers import App, Notification, Reject
from aviso_workers.errors import InvalidPositionError, NotFoundError
from aviso_workers.state import own_streams
from tests import coming_from
from tests.interop import conversations, programs
from tests.interop.aviso_server import AvisoServer
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "beside")

pytestmark = pytest.mark.anyio

BASE_URL = "http://aviso.example"
"""As the configuration file has it."""
SQUARE = "(52.5,13.4,52.6,13.4,52.6,13.5,52.5,13.5,52.5,13.4)"
LONGEST_LINE = 10_000
LISTENERS = """
listeners:
  - name: fields
    event: mars
    identifiers: {class: od, date: "20261120", stream: oper}
    triggers:
      - {type: log, path: log.ndjson}
      - type: command
        command: echo {{ notification.identifier.step }} {{ notification.payload.location }} >> indexed
"""
LISTEN = """
import json, sys, pyaviso

client = pyaviso.AvisoClient(base_url=sys.argv[1], auth=pyaviso.Anonymous(), state_store=pyaviso.MemoryStore())
listening = client.listen("mars", filter={"class": "od", "date": "20261120", "stream": "a.b"}, start_from=0)
for _, notification in zip(range(int(sys.argv[2])), listening):
    print(json.dumps(notification.as_dict()), flush=True)
"""


class Field(Struct):
    location: str
    sizes: list[float] = []


class Arrivals:
    """Notifications as they come, in order."""

    def __init__(self) -> None:
        self.notifications: list[Notification[Field]] = []
        self._more = anyio.Event()

    @property
    def ids(self) -> list[str]:
        return [notification.id for notification in self.notifications]

    @property
    def steps(self) -> list[str]:
        return [notification.identifier["step"] for notification in self.notifications]

    def add(self, notification: Notification[Field]) -> None:
        self.notifications.append(notification)
        self._more.set()

    async def until_count(self, count: int) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(self.notifications) < count:
                self._more = anyio.Event()
                await self._more.wait()


def collected_by(app: App, **where: Any) -> Arrivals:
    """What an agent of the app is given."""
    arrivals = Arrivals()

    @app.agent("mars", where=where)
    async def collect(notification: Notification[Field]) -> None:
        arrivals.add(notification)

    return arrivals


@asynccontextmanager
async def watched_by(app: App) -> AsyncIterator[Arrivals]:
    """What a watch of ours sees from the first notification on, while it is open."""
    arrivals = Arrivals()

    async def watch() -> None:
        async for notification in app.watch("mars", from_id=1):
            arrivals.add(notification)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        yield arrivals
        tasks.cancel_scope.cancel()


def mars(**values: Any) -> dict[str, Any]:
    fields = {
        "class": "od",
        "expver": "1",
        "domain": "G",
        "date": "2026-11-20",
        "time": "12",
        "stream": "a.b",
        "step": 1,
    }
    return {**fields, **values}


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    """Run the agents of an open app, and stop them in order at the end."""
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app._work, stop)
        yield
        stop.set()


def post(server: AvisoServer, steps: Sequence[int]) -> None:
    for step in steps:
        status, answer = server.notify("mars", mars(step=step), {"location": f"/data/{step}"})
        assert status == 200, answer


def without_time(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "time"}


def to_microseconds(event: Mapping[str, Any]) -> datetime:
    whole, _, fraction = event["time"].removesuffix("Z").removesuffix("+00:00").partition(".")
    return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}+00:00")


async def test_what_is_posted_reaches_agents(server: AvisoServer, aviso_config: Path) -> None:
    async with App("beside", config=aviso_config) as app:
        collected = collected_by(app, **{"class": "od", "stream": "a.b", "step": {"between": [10, 20]}})
        async with working(app):
            await to_thread.run_sync(post, server, [1, 10, 20, 21])
            await collected.until_count(2)

    theirs = conversations.replay(server, "mars", mars(step={"between": [10, 20]}), from_id="1")
    ours = collected.notifications
    assert [notification.payload for notification in ours] == [Field("/data/10"), Field("/data/20")]
    assert [notification.id for notification in ours] == ["mars@2", "mars@3"]
    assert [notification.identifier for notification in ours] == [event["data"]["identifier"] for event in theirs]
    assert [notification.time for notification in ours] == [to_microseconds(event) for event in theirs]


async def test_what_we_publish_reaches_its_watch_and_its_replay(server: AvisoServer, aviso_config: Path) -> None:
    async with App("beside", config=aviso_config) as app:
        await app.notify("mars", mars(step=1), {"location": "/data/é", "sizes": [1.0, 2.5]})
        watching = partial(conversations.watch, server, "mars", mars(step={"gte": 2}))
        with await to_thread.run_sync(watching) as live:
            for step in (1, 2, 3):
                await app.notify("mars", mars(step=step), {"location": "/data/é", "sizes": [1.0, 2.5]})
            watched = await to_thread.run_sync(live.until_count, 2)
        replayed = conversations.replay(server, "mars", mars(step={"gte": 1}), from_id="1")
        ours = [notification async for notification in app.replay("mars")]

    expected = [notification.cloud_event(BASE_URL) for notification in ours]
    assert list(map(without_time, replayed)) == list(map(without_time, expected))
    assert list(map(to_microseconds, replayed)) == [notification.time for notification in ours]
    assert watched == replayed[2:]


async def test_polygons_reach_both_sides_as_each_shows_them(server: AvisoServer, aviso_config: Path) -> None:
    place = {"number": 1, "kind": "air", "count": 1, "level": 1, "polygon": SQUARE}
    assert server.notify("area", place)[0] == 200
    async with App("beside", config=aviso_config) as app:
        await app.notify("area", {**place, "number": 2})
        ours = [notification async for notification in app.replay("area")]
    arrays = server.version != "0.7.1"
    shown = [notification.cloud_event(BASE_URL, spatial_arrays=arrays)["data"] for notification in ours]

    assert [event["data"] for event in conversations.replay(server, "area", {}, from_id="1")] == shown


def pyaviso_command(*arguments: str | Path) -> list[str]:
    """The command line of pyaviso."""
    python = programs.pyaviso()
    return [str(python), str(python.with_name("aviso")), *map(str, arguments)]


async def test_what_we_publish_reaches_a_listener_of_pyaviso(
    server: AvisoServer, aviso_config: Path, tmp_path: Path
) -> None:
    command = [str(programs.pyaviso()), "-c", LISTEN, server.url, "3"]
    async with App("beside", config=aviso_config) as app:
        await app.notify("mars", mars(step=1), {"location": "/data/1"})
        async with await anyio.open_process(command, cwd=tmp_path) as listener:
            assert listener.stdout is not None
            lines = BufferedByteReceiveStream(listener.stdout)
            with anyio.fail_after(PATIENCE_SECONDS):
                heard = [await lines.receive_until(b"\n", LONGEST_LINE)]
                await app.notify("mars", mars(step=2), {"location": "/data/2"})
                await app.notify("mars", mars(step=3, stream="other"), {"location": "/data/3"})
                await app.notify("mars", mars(step=4), {"location": "/data/4"})
                heard += [await lines.receive_until(b"\n", LONGEST_LINE) for _ in range(2)]

    told = [json.loads(line) for line in heard]
    assert [(one["sequence"], one["payload"]) for one in told] == [
        (1, {"location": "/data/1"}),
        (2, {"location": "/data/2"}),
        (4, {"location": "/data/4"}),
    ]
    assert told[0]["identifier"] == {
        **dict(zip(("class", "expver", "domain"), ("od", "0001", "g"), strict=True)),
        **dict(zip(("date", "time", "stream", "step"), ("20261120", "1200", "a.b", "1"), strict=True)),
    }


async def test_the_command_line_of_pyaviso_runs_its_triggers_for_what_we_publish(
    server: AvisoServer, aviso_config: Path, tmp_path: Path
) -> None:
    listeners = tmp_path / "listeners.yaml"
    listeners.write_text(LISTENERS)
    command = pyaviso_command("listen", "--no-state-store", "--from", "0", "--base-url", server.url, listeners)
    async with App("beside", config=aviso_config) as app:
        for step, stream in ((1, "oper"), (2, "wave"), (3, "oper")):
            await app.notify("mars", mars(step=step, stream=stream), {"location": f"/data/{step}"})
        logged, indexed, said = tmp_path / "log.ndjson", tmp_path / "indexed", tmp_path / "said"
        with said.open("wb") as output:
            listener = await anyio.open_process(command, cwd=tmp_path, stdout=output, stderr=output)
        async with listener:
            with anyio.fail_after(PATIENCE_SECONDS):
                while not indexed.exists() or len(indexed.read_text().splitlines()) < 2:
                    assert listener.returncode is None, said.read_text()
                    await app.session.backend.clock.sleep(0.05)
            listener.terminate()
    assert indexed.read_text().splitlines() == ["1 /data/1", "3 /data/3"]
    assert len(logged.read_text().splitlines()) == 2


async def test_what_the_command_line_of_pyaviso_publishes_is_handled(
    server: AvisoServer, aviso_config: Path, tmp_path: Path
) -> None:
    fields = [f"--identifier={name}={value}" for name, value in mars(step=7).items()]
    told = "event=mars,data=" + json.dumps({"location": "/data/7"})
    command = pyaviso_command("notify", "--base-url", server.url, *fields, told)
    async with App("beside", config=aviso_config) as app:
        collected = collected_by(app)
        async with working(app):
            done = await anyio.run_process(command, cwd=tmp_path, check=False)
            assert done.returncode == 0, done.stderr
            await collected.until_count(1)
    assert collected.steps == ["7"]


async def test_the_applications_of_coming_from_pyaviso_are_given_the_same(
    server: AvisoServer, aviso_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = coming_from.applications(coming_from.PYAVISO)
    found: dict[str, Any] = {"__name__": "pyaviso"}
    exec(compile(ours, "pyaviso.md", "exec"), found)
    app: App = found["app"]
    app.configure(aviso_config)
    command = [str(programs.pyaviso()), "-c", theirs.replace("http://127.0.0.1:8000", server.url)]
    async with app, working(app), await anyio.open_process(command, cwd=tmp_path) as listener:
        for step, stream in ((1, "oper"), (2, "wave"), (3, "oper")):
            await app.notify("mars", mars(step=step, stream=stream), {"location": f"/data/{step}"})
        assert listener.stdout is not None
        lines = BufferedByteReceiveStream(listener.stdout)
        with anyio.fail_after(PATIENCE_SECONDS):
            heard = [await lines.receive_until(b"\n", LONGEST_LINE) for _ in range(2)]
            while found["catalogue"].keys() != {"1", "3"}:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        listener.terminate()
    assert heard == [b"1 /data/1", b"3 /data/3"]
    assert capsys.readouterr().out.splitlines() == ["1 /data/1", "3 /data/3"]


async def test_positions_mean_the_same_to_both(server: AvisoServer, aviso_config: Path) -> None:
    wanted = mars(step={"gte": 0})
    async with App("beside", config=aviso_config) as app:
        for step in range(6):
            await app.notify("mars", mars(step=step), {"location": "/"})
            await to_thread.run_sync(post, server, [100 + step])
        stored = [notification async for notification in app.replay("mars")]
        tick = timedelta(microseconds=1)
        dates = [one.time + shift for one in stored for shift in (-tick, tick)] + [stored[-1].time + timedelta(hours=1)]
        spelled = [
            *map(datetime.isoformat, dates),
            *(date.isoformat(" ") for date in dates[:2]),
            *(date.replace(tzinfo=None).isoformat() for date in dates[:2]),
            *(str(int(date.timestamp() * 1000)) for date in dates),
            *(str(int(date.timestamp())) for date in dates[:2]),
            "0",
            "5000000000",
        ]
        positions: list[dict[str, Any]] = [{"from_id": str(number)} for number in range(len(stored) + 2)]
        positions += [{"from_date": date} for date in spelled]
        if server.version != "0.7.1":
            positions += [{"from_id": "2", "to_id": str(number)} for number in (2, 5, 12, 20)]
            positions += [{"from_id": "2", "to_date": date.isoformat()} for date in dates[4:]]
        for position in positions:
            ours = [notification.id async for notification in app.replay("mars", **position)]
            theirs = [event["id"] for event in conversations.replay(server, "mars", wanted, **position)]
            assert ours == theirs, position

        positions = [{"from_id": "4"}, {"from_date": dates[9].isoformat()}]
        for position in positions:
            watching = partial(conversations.watch, server, "mars", wanted, **position)
            with await to_thread.run_sync(watching) as live:
                expected = len([one async for one in app.replay("mars", **position)]) + 1
                await app.notify("mars", mars(step=200), {"location": "/"})
                await to_thread.run_sync(live.until_count, expected)
                theirs = without_repeats(live.ids, server)
            assert await first_ids(app, expected, **position) == theirs


def without_repeats(ids: list[str], server: AvisoServer) -> list[str]:
    """Return the ids, once each of 0.7.1, which sometimes sends one twice that is published while a watch changes from
    history to live."""
    return list(dict.fromkeys(ids)) if server.version == "0.7.1" else ids


async def first_ids(app: App, count: int, **position: Any) -> list[str]:
    """Return the ids of the first notifications of our watch."""
    found: list[str] = []
    with anyio.fail_after(PATIENCE_SECONDS):
        async for notification in app.watch("mars", **position):
            found.append(notification.id)
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("position", ["-1", "2026-02-25", "not-a-date", " ", "2026-02-30T00:00:00Z"])
async def test_both_refuse_a_date_that_is_none(server: AvisoServer, aviso_config: Path, position: str) -> None:
    async with App("beside", config=aviso_config) as app:
        await app.notify("mars", mars(), {"location": "/"})
        body = {"event_type": "mars", "identifier": mars(), "from_date": position}
        assert server.request("POST", "/api/v1/replay", body)[0] == 400
        with pytest.raises(InvalidPositionError, match="from_date"):
            [each async for each in app.replay("mars", from_date=position)]


async def test_what_its_admin_deletes_is_seen_by_nobody(server: AvisoServer, aviso_config: Path) -> None:
    await to_thread.run_sync(post, server, [1, 2, 3])
    assert server.request("DELETE", "/api/v1/admin/notification/mars@2")[0] == 200
    assert server.request("DELETE", "/api/v1/admin/notification/mars@2")[0] == 500, "its documentation says 404"

    async with App("beside", config=aviso_config) as app:
        collected = collected_by(app)
        async with working(app):
            await collected.until_count(2)
        assert await first_ids(app, 2, from_id=1) == ["mars@1", "mars@3"]
    assert collected.steps == ["1", "3"]


@pytest.mark.parametrize("what", ["stream", "all"])
async def test_what_comes_after_its_wipe_reaches_watches_and_agents(
    server: AvisoServer, aviso_config: Path, what: str
) -> None:
    async with App("beside", config=aviso_config) as app:
        collected = collected_by(app)
        async with working(app):
            await to_thread.run_sync(post, server, [1, 2])
            await collected.until_count(2)
            body = {"stream_name": "MARS"} if what == "stream" else None
            async with watched_by(app) as watched:
                await watched.until_count(2)
                status, _ = await to_thread.run_sync(server.request, "DELETE", f"/api/v1/admin/wipe/{what}", body)
                assert status == 200
                assert [each async for each in app.replay("mars")] == []
                await to_thread.run_sync(post, server, [3, 4, 5, 6])
                await collected.until_count(6)
                await watched.until_count(6)
            assert await first_ids(app, 4, from_id=1) == [f"mars@{sequence}" for sequence in (3, 4, 5, 6)]
    assert watched.ids == [f"mars@{sequence}" for sequence in range(1, 7)]
    assert collected.steps == ["1", "2", "3", "4", "5", "6"]


async def test_its_wipe_of_all_empties_our_own_streams_in_0_7_1_only(
    server: AvisoServer, aviso_config: Path, aviso_server_version: str
) -> None:
    """As docs/aviso.md says."""
    async with App("beside", config=aviso_config) as app:

        @app.agent("mars")
        async def reject(notification: Notification) -> Reject:
            return Reject("as a test wants it")

        backend = app.session.backend
        async with working(app):
            await to_thread.run_sync(post, server, [1])
            with anyio.fail_after(PATIENCE_SECONDS):
                while (
                    DEAD_LETTERS not in await app.session.admin.stream_names()
                    or not (await backend.stream_info(DEAD_LETTERS)).messages
                ):
                    await backend.clock.sleep(0.05)
        status, _ = await to_thread.run_sync(server.request, "DELETE", "/api/v1/admin/wipe/all", None)
        assert status == 200
        assert (await backend.stream_info("MARS")).messages == 0
        assert (await backend.stream_info(DEAD_LETTERS)).messages == (0 if aviso_server_version == "0.7.1" else 1)


async def test_each_side_restarted_in_the_middle_loses_nothing(server: AvisoServer, aviso_config: Path) -> None:
    handled: list[str] = []
    for life, steps in enumerate((range(10), range(10, 20), range(20, 30))):
        async with App("beside", config=aviso_config) as app:
            collected = collected_by(app)
            async with working(app):
                await to_thread.run_sync(post, server, steps[:3])
                await to_thread.run_sync(server.kill if life % 2 else server.stop)
                for step in steps[3:5]:
                    await app.notify("mars", mars(step=step), {"location": f"/data/{step}"})
                await to_thread.run_sync(server.start)
                await to_thread.run_sync(post, server, steps[5:7])
                await collected.until_count(7)
            handled += collected.steps
        await to_thread.run_sync(post, server, steps[7:])  # while no worker runs
        handled_later = steps[7:]
        async with App("beside", config=aviso_config) as app:
            collected = collected_by(app)
            async with working(app):
                await collected.until_count(len(handled_later))
            handled += collected.steps

    replayed = conversations.replay(server, "mars", mars(step={"gte": 0}), from_id="1")
    assert handled == [str(step) for step in range(30)]
    assert [event["data"]["identifier"]["step"] for event in replayed] == handled


async def test_a_watch_that_is_resumed_after_a_restart_has_each_notification_once(
    server: AvisoServer, aviso_config: Path
) -> None:
    seen: list[str] = []
    async with App("beside", config=aviso_config) as app:
        for life in range(3):
            await app.notify("mars", mars(step=3 * life), {"location": "/"})
            position = {"from_id": str(len(seen) + 1)}
            watching = partial(conversations.watch, server, "mars", mars(step={"gte": 0}), **position)
            with await to_thread.run_sync(watching) as live:
                last = await app.notify("mars", mars(step=3 * life + 1), {"location": "/"})
                await to_thread.run_sync(live.until, lambda events, last=last: f"mars@{last.sequence}" in events.ids)
                await to_thread.run_sync(server.kill)
                await to_thread.run_sync(live.until_end)
                seen += without_repeats(live.ids, server)
            await app.notify("mars", mars(step=3 * life + 2), {"location": "/"})
            await to_thread.run_sync(server.start)
        replayed = [event["id"] for event in conversations.replay(server, "mars", mars(step={"gte": 0}), from_id="1")]

    assert seen == [f"mars@{sequence}" for sequence in range(1, 9)]
    assert replayed == [*seen, "mars@9"]


async def test_a_stream_that_is_missing_is_said_to_be(server: AvisoServer, aviso_config: Path) -> None:
    """An aviso-server makes the stream that a replay asks for; we say that there is none."""
    async with App("beside", config=aviso_config) as app:
        with pytest.raises(NotFoundError):
            [each async for each in app.replay("mars")]
        assert conversations.replay(server, "mars", mars(), from_id="1") == []
        assert [each async for each in app.replay("mars")] == []
