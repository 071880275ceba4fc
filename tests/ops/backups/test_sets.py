"""All streams of an account backed up as a set under load, and restored as one, on real servers."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from aviso_workers import App, Notification, Tick, Window, Windowing
from aviso_workers.backends import Admin, ConsumerInfo, StreamInfo, open_backend
from aviso_workers.config import load
from aviso_workers.errors import AvisoWorkersError, BackupError, DeclarationError, NotFoundError, UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.metadata import UNFINISHED
from aviso_workers.ops import backups
from aviso_workers.ops.backups import Backup, schedules, sets
from aviso_workers.server import NatsServer
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

PER_SECOND = 150
BEFORE, MEANWHILE = 300, 1500
"""Notifications that are published before the set is begun, and at most while it is made."""
BEGIN = datetime(2026, 11, 20, tzinfo=UTC)
LAST = -1
"""The number of the notification that closes all windows."""


def happened(notification: Notification[Any]) -> datetime:
    number = notification.payload["n"]
    return BEGIN + (timedelta(days=1) if number == LAST else timedelta(seconds=number / 50))


def collect(numbers: list[int], notification: Notification[Any]) -> list[int]:
    return [*numbers, notification.payload["n"]]


class Site:
    """An app whose agents keep a table, a counter and windows, on a server."""

    def __init__(self, config: Path) -> None:
        self.app = App("field", config=config)
        self.handled: list[int] = []
        self.rows = self.app.table("rows", int)
        self.done = self.app.table("done", list[int])
        self.count = self.app.counter("count")
        windowing: Windowing[list[int], dict[str, int]] = Windowing(
            size="1s", fold=collect, initial=[], time=happened, lateness="1s"
        )

        @self.app.agent("mars", concurrency=8)
        async def index(notification: Notification[dict[str, int]]) -> None:
            number = notification.payload["n"]
            await self.rows.put(f"n{number}", number)
            await self.count.add("all", 1)
            self.handled.append(number)

        @self.app.agent("mars", window=windowing)
        async def volume(window: Window[list[int]]) -> None:
            await self.done.put(f"w{window.start:%d%H%M%S}", sorted(window.value))

    @asynccontextmanager
    async def worker(self) -> Any:
        stop = anyio.Event()

        async def work() -> None:
            await self.app.session.work(self.app, stop, agents=self.app.agents)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            yield
            stop.set()

    async def publish(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            await self.app.notify("mars", {"class": "od", "step": number % 1000}, {"n": number})
            await anyio.sleep(1 / PER_SECOND)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not await holds():  # noqa: ASYNC110 - a server says nothing when it is so
                await anyio.sleep(0.05)

    async def settled(self) -> bool:
        infos = [await self.app.session.consumer_info(agent) for agent in self.app.agents]
        return all(not info.num_pending and not info.num_ack_pending for info in infos)

    async def counted(self) -> list[int]:
        """Return the numbers that all windows have, of those that are done."""
        return sorted(number for numbers in (await self.done.items()).values() for number in present(numbers))

    async def create_set(self, to: Path) -> backups.MadeSet:
        async def back_up(stream: str, earlier: Any) -> Backup:
            return await backups.create(self.app.session.admin, stream, to, earlier=earlier)

        return await backups.create_set(self.app.session.admin, to, back_up, encrypted=False)

    async def restore(self, to: Path, watch: Any = lambda backup: nullcontext(lambda size: None)) -> Any:
        return await backups.restore_set(self.app.session.admin, backups.load_set(to), watch=watch)

    async def delete_all(self) -> None:
        for stream in await self.app.session.admin.stream_names():
            await self.app.session.admin.delete_stream(stream)


@pytest.fixture
def site(nats_server: NatsServer, write_config: Callable[..., Path]) -> Site:
    return Site(write_config(nats_server.url))


@pytest.mark.slow
async def test_what_is_restored_under_load_repeats_and_never_skips(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    async with site.app:
        async with site.worker():
            await site.publish(0, BEFORE)
            async with anyio.create_task_group() as publishing:
                publishing.start_soon(site.publish, BEFORE, MEANWHILE)
                made = await site.create_set(tmp_path)
                publishing.cancel_scope.cancel()
        assert made.failures == []
        await site.delete_all()
    after = Site(write_config(nats_server.url))
    async with after.app:
        restored = await after.restore(tmp_path)
        goes_on = {each.consumer: each for stream in restored for each in stream.consumers}["field__index"]
        backend = after.app.session.backend
        last = (await backend.stream_info("MARS")).last_sequence
        stored = [message async for message in backend.read("MARS", filter_subjects=(), last_sequence=last)]
        numbers = [json.loads(message.data)["n"] for message in stored]
        assert numbers == sorted(numbers)
        assert len(numbers) > BEFORE, "something was published while the set was made"
        await backend.purge_stream("KV_field__leases")  # otherwise a worker waits until the one of a dead one is over
        async with after.worker():
            await after.app.notify("mars", {"class": "od", "step": 1}, {"n": LAST})

            async def all_closed() -> bool:
                return set(numbers) <= {*await after.counted()}

            await after.until(after.settled)
            await after.until(all_closed)
        rows = list((await after.rows.items()).values())
        assert sorted(present(number) for number in rows if number != LAST) == numbers, "none is missing, none is more"
        assert await after.counted() == numbers, "each is in its window once"
        assert await after.count.get("all") >= len(numbers)
        assert goes_on.again is not None
        assert len(after.handled) - 1 == goes_on.again + goes_on.new
        repeated = len(numbers) - goes_on.new
        assert await after.count.get("all") <= len(numbers) + 1 + min(repeated, goes_on.again + 8)


TWO_ACCOUNTS = """
accounts {
    A: {jetstream: enabled, users: [{user: a, password: x}]}
    B: {jetstream: enabled, users: [{user: b, password: x}]}
}
"""


async def test_what_waits_to_be_delivered_is_delivered_in_another_account(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    with NatsServer.start(store_dir=tmp_path / "jetstream", config=TWO_ACCOUNTS) as server:
        here = Site(write_config(server.url, user="a", password="x"))
        async with here.app:
            await here.app.notify("mars", {"class": "od", "step": 1}, {"n": 1}, due=2.0)
            assert (await here.create_set(tmp_path / "kept")).failures == []
        there = Site(write_config(server.url, user="b", password="x", name="there.yaml"))
        async with there.app:
            await there.restore(tmp_path / "kept")
            assert await messages(there) == {"MARS": 0, "aviso_workers_schedule__MARS": 1}

            async def delivered() -> bool:
                return there.handled == [1]

            async with there.worker():
                await there.until(delivered)
                await there.until(there.settled)
            found = await messages(there)
            assert (found["MARS"], found["aviso_workers_schedule__MARS"]) == (1, 0)


def ticking(config: Path) -> tuple[App, list[datetime]]:
    """An app whose leader runs a tick every second, and makes up for those that were missed."""
    app, ran = App("field", config=config), list[datetime]()

    @app.every("1s", singleton=True, catch_up=True)
    async def note(tick: Tick) -> None:
        ran.append(tick.time)

    return app, ran


@asynccontextmanager
async def working(app: App) -> Any:
    stop = anyio.Event()

    async def work() -> None:
        await app.session.work(app, stop, agents=())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        yield
        stop.set()


async def until_ran(ran: list[datetime], count: int) -> None:
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(ran) < count:  # noqa: ASYNC110 - a timer says nothing when it has run
            await anyio.sleep(0.02)


@pytest.mark.slow
async def test_no_tick_that_the_set_knows_is_run_again_and_none_is_skipped(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(nats_server.url, name="ticking.yaml")
    first, before = ticking(config)
    async with site.app, first:
        async with working(first):
            await until_ran(before, 2)
            known = [*before]
            assert (await site.create_set(tmp_path)).failures == []
            meanwhile = len(before)
            await until_ran(before, meanwhile + 1)
        await site.delete_all()
        await site.restore(tmp_path)
        await site.app.session.backend.purge_stream(
            "KV_field__leases"
        )  # otherwise the next leader waits until it is over
    second, after = ticking(config)
    async with second, working(second):
        await until_ran(after, 4)
    assert not {*known} & {*after}, "they were claimed when the set was made"
    assert {*after} & {*before[meanwhile:]}, "these were not, and are run again"
    every = sorted({*before, *after})
    assert every == [every[0] + timedelta(seconds=number) for number in range(len(every))], "none is skipped"
    assert after == sorted({*after}), "each once, in order"


def config_of(**fields: Any) -> dict[str, Any]:
    return {"retention": "limits", **fields}


def test_sources_are_taken_before_what_they_move_to() -> None:
    names = (
        *(
            "MARS",
            "KV_field__windows__volume",
            "KV_field__table__rows",
            "aviso_workers_dead_letters__field",
            "aviso_workers_retries__field",
        ),
        *("aviso_workers_schedule__MARS", "KV_field__timers", "KV_field__leases", "KV_field__orders"),
    )
    configs = {name: config_of() for name in names}
    configs["COPY"] = config_of(mirror={"name": "MARS"})
    configs["ROWS_ELSEWHERE"] = config_of(sources=[{"name": "KV_field__table__rows"}])
    configs["FAR"] = config_of(mirror={"name": "MARS", "external": {"api": "$JS.far.API"}})
    assert sets.order(configs) == [
        *(
            "KV_field__leases",
            "KV_field__orders",
            "KV_field__timers",
            "KV_field__windows__volume",
            "ROWS_ELSEWHERE",
            "KV_field__table__rows",
        ),
        *(
            "aviso_workers_dead_letters__field",
            "aviso_workers_retries__field",
            "aviso_workers_schedule__MARS",
            "COPY",
            "FAR",
            "MARS",
        ),
    ]


def test_streams_between_which_things_move_both_ways_are_taken_twice() -> None:
    letters = "aviso_workers_dead_letters__field"
    configs = {"JOBS": config_of(retention="workqueue"), letters: config_of(), "MARS": config_of()}
    assert sets.twice(configs) == ["JOBS"]
    windows = configs | {"KV_field__windows__volume": config_of()}
    assert sets.twice(windows) == ["JOBS", letters]


def test_streams_that_are_sources_of_one_another_are_refused() -> None:
    configs = {"A": config_of(sources=[{"name": "B"}]), "B": config_of(sources=[{"name": "A"}])}
    with pytest.raises(BackupError, match="are sources of one another"):
        sets.order(configs)


async def make_small_set(site: Site, to: Path) -> dict[str, Any]:
    """A set of three streams; return how many messages each has."""
    await site.rows.put("a", 1)
    await site.count.add("all", 5)
    for number in range(3):
        await site.app.notify("mars", {"class": "od", "step": number}, {"n": number})
    assert (await site.create_set(to)).failures == []
    return await messages(site)


async def messages(site: Site) -> dict[str, Any]:
    backend = site.app.session.admin
    return {name: (await backend.stream_info(name)).messages for name in await backend.stream_names()}


class StoppedError(Exception):
    """The process ends here."""


async def test_a_set_that_is_not_whole_keeps_workers_out_and_is_gone_on_with(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "STANDSTILL_SECONDS", 0.1)
    async with site.app:
        there = await make_small_set(site, tmp_path)
        await site.delete_all()
        begun: list[str] = []

        def interrupt(backup: Backup) -> Any:
            begun.append(backup.stream)
            if len(begun) == 3:
                raise StoppedError
            return nullcontext(lambda size: None)

        with pytest.raises(StoppedError):
            await site.restore(tmp_path, watch=interrupt)
        site.app.session.provisioner.forget("MARS")
        for use in (site.app.session.replayer("mars", {}), site.app.session.backend.key_value("field__table__rows")):
            with pytest.raises(UnavailableError, match="is being restored"):
                await use
        with pytest.raises(
            BackupError, match=r"MARS belongs to a set that is not completely restored: run `backup restore --all`"
        ):
            await backups.restore(site.app.session.admin, backups.find(tmp_path / "MARS")[0])
        await site.restore(tmp_path)
        assert await messages(site) == there
        assert (await site.rows.get("a"), await site.count.get("all")) == (1, 5)
        with pytest.raises(BackupError, match="MARS exist, so nothing is restored"):
            await site.restore(tmp_path)


KILLED = """
import os, signal, sys
from contextlib import nullcontext
from pathlib import Path
import anyio
from aviso_workers import App
from aviso_workers.ops import backups

begun = []


def watch(backup):
    begun.append(backup)
    if len(begun) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return nullcontext(lambda size: None)


async def restore():
    async with App("killed", config=sys.argv[1]) as app:
        await backups.restore_set(app.session.admin, backups.load_set(Path(sys.argv[2])), watch=watch)


anyio.run(restore)
"""


@pytest.mark.slow
async def test_a_set_is_gone_on_with_after_a_kill(
    site: Site,
    nats_server: NatsServer,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sets, "STANDSTILL_SECONDS", 0.1)
    async with site.app:
        there = await make_small_set(site, tmp_path)
        await site.delete_all()
        config = write_config(nats_server.url, name="killed.yaml")
        killed = await anyio.run_process([sys.executable, "-c", KILLED, str(config), str(tmp_path)], check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        infos = [await site.app.session.backend.stream_info(name) for name in there]
        assert all(metadata.is_unfinished(info.config) for info in infos), "no worker can use any of them"
        await site.restore(tmp_path)
        assert await messages(site) == there
        with pytest.raises(BackupError, match=r"exist, so nothing is restored .all streams of the set"):
            await site.restore(tmp_path)


async def test_what_a_killed_restore_had_asked_for_is_taken_over_though_a_server_makes_it_late(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "STANDSTILL_SECONDS", 0.1)
    async with site.app:
        there = await make_small_set(site, tmp_path)
        await site.delete_all()
        backend = site.app.session.admin
        stream_info, looks = type(backend).stream_info, list[str]()

        async def late(self: Any, stream: str, **options: Any) -> StreamInfo:
            looks.append(stream)
            if looks.count(stream) == 1 and stream == "MARS":
                with pytest.raises(NotFoundError):
                    await stream_info(self, stream)
                begun = {
                    "name": stream,
                    "subjects": ["begun"],
                    "metadata": {UNFINISHED: "by one who was killed"},
                }
                await backend.administration().api(f"STREAM.CREATE.{stream}", begun)
                raise NotFoundError("stream not found")
            return await stream_info(self, stream, **options)

        monkeypatch.setattr(type(backend), "stream_info", late)
        await site.restore(tmp_path)
        assert await messages(site) == there


@asynccontextmanager
async def scheduled(
    config: Path,
    to: Path,
    failing: set[str],
    *,
    every_seconds: float = 0.2,
    error: type[AvisoWorkersError] = BackupError,
) -> Any:
    """Back up all streams again and again, but for those that fail; give the events."""

    async def make(admin: Admin, stream: str, earlier: Any) -> backups.NewBackup:
        if stream in failing:
            raise error(f"{stream} cannot be read")
        return await backups.create_next(admin, stream, to, full_every_seconds=3600.0, earlier=earlier)

    schedule = backups.BackupSchedule(
        names=(), to=to, every_seconds=every_seconds, keep=backups.Keep(2), encrypted=False
    )
    with capture_logs() as events:
        async with anyio.create_task_group() as tasks:
            loaded = load(config)
            tasks.start_soon(backups.keep_backing_up, schedule, loaded, lambda: open_backend(loaded), make)
            yield events
            tasks.cancel_scope.cancel()


async def logged(events: list[Any], event: str, times: int) -> list[Any]:
    with anyio.fail_after(PATIENCE_SECONDS):
        while len(found := [each for each in events if each["event"] == event]) < times:  # noqa: ASYNC110 - nothing tells of a new entry
            await anyio.sleep(0.02)
    return found


async def test_a_schedule_of_all_streams_makes_sets(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, to = write_config(nats_server.url, name="schedule.yaml"), tmp_path / "kept"
    async with site.app:
        await site.rows.put("a", 1)
        for number in range(3):
            await site.app.notify("mars", {"class": "od", "step": number}, {"n": number})
        async with scheduled(config, to, failing=set(), every_seconds=0.01) as events:  # each takes longer
            made = await logged(events, "backup.set_made", times=4)
        assert {each["streams"] for each in made} == {2}
        newest = backups.load_set(to)
        assert [each.previous is not None for each in backups.members(newest)] == [True, True], "they are increments"
        await site.delete_all()
        await site.restore(to)
        assert await messages(site) == {"KV_field__table__rows": 1, "MARS": 3}


async def test_a_schedule_says_why_there_is_no_set_and_removes_nothing(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config, to = write_config(nats_server.url, name="schedule.yaml"), tmp_path / "kept"
    async with site.app:
        await site.rows.put("a", 1)
        await site.app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        failing: set[str] = set()
        async with scheduled(config, to, failing) as events:
            await logged(events, "backup.set_made", times=1)
            failing.add("MARS")
            failed = await logged(events, "backup.failed", times=4)
            removed = [each["directory"] for each in events if each["event"] == "backup.removed"]
            failing.clear()
            at = len([each for each in events if each["event"] == "backup.set_made"])
            await logged(events, "backup.set_made", times=at + 1)
        assert {each["error"] for each in failed} == {"no set was made: MARS cannot be read"}
        assert failed[0]["newest"] is not None, "a set, also where a stream has a newer backup"
        ages = [each["newest_age_seconds"] for each in failed]
        assert ages == sorted(ages), "of the set"
        assert removed == []
        assert len(backups.unfinished_sets(to)) <= 1, "the schedule may have been ended while one was made"


async def test_attempts_that_leave_backups_and_no_set_are_made_less_and_less_often(
    site: Site,
    nats_server: NatsServer,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "AGAIN_SECONDS", 0.05)
    config = write_config(nats_server.url, name="schedule.yaml")
    async with site.app:
        await site.rows.put("a", 1)
        await site.app.notify("mars", {"class": "od", "step": 1}, {"n": 1})
        async with scheduled(config, tmp_path, {"MARS"}, every_seconds=0.3) as events:
            failed = await logged(events, "backup.failed", times=5)
        assert [each["again_in_seconds"] for each in failed[:5]] == [0.05, 0.1, 0.2, 0.3, 0.3]
        none_made = {"MARS", "KV_field__table__rows"}
        async with scheduled(config, tmp_path, none_made, every_seconds=0.3) as events:
            failed = await logged(events, "backup.failed", times=3)
        assert {each["again_in_seconds"] for each in failed} == {0.05}, "they take no room"


async def test_a_schedule_of_sets_ends_where_another_attempt_cannot_help(
    site: Site, nats_server: NatsServer, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(nats_server.url, name="schedule.yaml")
    async with site.app:
        await site.rows.put("a", 1)
        with pytest.raises(BaseExceptionGroup) as raised, anyio.fail_after(PATIENCE_SECONDS):
            async with scheduled(config, tmp_path, {"KV_field__table__rows"}, error=DeclarationError):
                await anyio.sleep_forever()
        assert raised.group_contains(DeclarationError, match="cannot be read")


async def test_an_account_without_streams_is_no_set(site: Site, tmp_path: Path) -> None:
    async with site.app:
        with pytest.raises(BackupError, match="has no streams"):
            await site.create_set(tmp_path)
        assert backups.sets_in(tmp_path) == []


async def test_a_consumer_that_the_server_does_not_list_yet_is_taken_back(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.app:
        backend = site.app.session.admin
        await make_small_set(site, tmp_path / "before")
        config = {"durable_name": "slow", "ack_policy": "all"}
        await backend.administration().api("CONSUMER.CREATE.MARS.slow", {"stream_name": "MARS", "config": config})

        async def back_up(stream: str, earlier: Any) -> Backup:
            if stream == "MARS":
                await backend.reset_consumer("MARS", "slow", sequence=4)
            return await backups.create(site.app.session.admin, stream, tmp_path, earlier=earlier)

        assert (await backups.create_set(site.app.session.admin, tmp_path, back_up, encrypted=False)).failures == []
        await site.delete_all()
        reset, asked = type(backend).reset_consumer, list[str]()

        async def none_listed(self: Any, stream: str) -> list[ConsumerInfo]:
            return []

        async def soon(self: Any, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
            asked.append(consumer)
            if len(asked) == 1:
                raise NotFoundError("consumer not found")
            return await reset(self, stream, consumer, sequence=sequence)

        monkeypatch.setattr(sets._SetRestoration, "_consumers", none_listed)
        monkeypatch.setattr(type(backend), "reset_consumer", soon)
        await site.restore(tmp_path)
        assert asked == ["slow", "slow"]
        assert (await backend.consumer_info("MARS", "slow")).ack_floor == 0, "it had settled nothing before the set"


async def test_a_leader_that_changes_while_the_set_is_made_costs_no_set(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request of the set is refused once, as during an election."""
    monkeypatch.setattr(sets, "AGAIN_SECONDS", 0)
    async with site.app:
        await make_small_set(site, tmp_path / "before")
        refused = set[str]()

        def refuse_first(request: str) -> None:
            if request not in refused:
                refused.add(request)
                raise UnavailableError(f"{request}: no leader")

        def refusing(name: str) -> Any:
            real = getattr(type(site.app.session.admin), name)

            async def asked(self: Any, *arguments: Any, **options: Any) -> Any:
                refuse_first(f"{name} {arguments}")
                return await real(self, *arguments, **options)

            return asked

        async def back_up(stream: str, earlier: Any) -> Backup:
            refuse_first(f"snapshot {stream}")
            return await backups.create(site.app.session.admin, stream, tmp_path, earlier=earlier)

        for name in ("stream_names", "consumers"):
            monkeypatch.setattr(type(site.app.session.admin), name, refusing(name))
        made = await backups.create_set(site.app.session.admin, tmp_path, back_up, encrypted=False)
    assert (made.failures, made.file is not None) == ([], True)
    assert {"stream_names ()", "consumers ('MARS',)", "snapshot MARS"} <= refused


async def test_a_server_that_stays_away_costs_the_set(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(sets, "ELECTION_SECONDS", -1)
    async with site.app:
        await make_small_set(site, tmp_path / "before")

        async def back_up(stream: str, earlier: Any) -> Backup:
            raise UnavailableError(f"{stream}: no leader")

        made = await backups.create_set(site.app.session.admin, tmp_path, back_up, encrypted=False)
    assert (made.file, "MARS: no leader" in map(str, made.failures)) == (None, True)


async def test_a_consumer_that_cannot_be_taken_back_ends_the_restore(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "CONSUMER_SECONDS", 0.2)
    async with site.app:
        backend = site.app.session.admin
        await make_small_set(site, tmp_path / "before")
        config = {"durable_name": "slow", "ack_policy": "explicit"}
        await backend.administration().api("CONSUMER.CREATE.MARS.slow", {"stream_name": "MARS", "config": config})
        assert (await site.create_set(tmp_path)).failures == []
        await site.delete_all()

        async def never(self: Any, stream: str, consumer: str, *, sequence: int) -> ConsumerInfo:
            raise UnavailableError("no answer in time")

        monkeypatch.setattr(type(backend), "reset_consumer", never)
        with pytest.raises(BackupError, match="consumer slow of MARS cannot be reset to 1: no answer in time"):
            await site.restore(tmp_path)
        assert metadata.is_unfinished((await backend.stream_info("MARS")).config), "no worker uses it"


async def test_a_set_is_refused_before_anything_is_touched(site: Site, tmp_path: Path) -> None:
    async with site.app:
        await make_small_set(site, tmp_path)
        await site.delete_all()
        archive = backups.find(tmp_path, stream="KV_field__table__rows")[0].archive
        data = archive.read_bytes()
        archive.write_bytes(data[:-1])
        with pytest.raises(BackupError, match=r"KV_field__table__rows/.* is damaged"):
            await site.restore(tmp_path)
        archive.write_bytes(data)
        archive.parent.rename(tmp_path / "elsewhere")
        with pytest.raises(BackupError, match=r"is not whole: .*KV_field__table__rows"):
            await site.restore(tmp_path)
        (tmp_path / "elsewhere").rename(archive.parent)
        await site.app.session.backend.key_value("field__table__rows")
        with pytest.raises(BackupError, match="KV_field__table__rows exist, so nothing is restored"):
            await site.restore(tmp_path)
        assert await site.app.session.admin.stream_names() == ["KV_field__table__rows"]


async def test_a_set_that_was_not_finished_is_named_and_none(site: Site, tmp_path: Path) -> None:
    async with site.app:
        await site.rows.put("a", 1)
        (tmp_path / "KV_field__table__rows").touch()
        made = await site.create_set(tmp_path)
        assert (made.file, len(made.failures)) == (None, 1)
        with pytest.raises(BackupError, match=r"no finished set of backups.*was not finished, and is none"):
            backups.load_set(tmp_path)
        assert len(backups.unfinished_sets(tmp_path)) == 1
        (tmp_path / "KV_field__table__rows").unlink()
        first = await site.create_set(tmp_path)
        assert (backups.unfinished_sets(tmp_path), backups.sets_in(tmp_path)) == ([], [first.file])
        await backups.create(site.app.session.admin, "KV_field__table__rows", tmp_path)
        assert backups.prune(tmp_path, "KV_field__table__rows", backups.Keep(newest=1)).removed == [], (
            "the newest set needs it"
        )
        second = await site.create_set(tmp_path)
        assert len(backups.prune(tmp_path, "KV_field__table__rows", backups.Keep(newest=1)).removed) == 2
        assert backups.sets_in(tmp_path) == [second.file]


async def test_the_newest_set_is_not_known_where_one_has_a_time_in_the_future(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.app:
        await site.rows.put("a", 1)
        made = await site.create_set(tmp_path)
    assert made.file is not None
    monkeypatch.setattr(sets, "SKEW", -timedelta(days=1))  # as if it had been made with a clock that was ahead
    with pytest.raises(BackupError, match=r"set-.* has a time in the future, .*: name the file of a set"):
        backups.load_set(tmp_path)
    assert backups.load_set(made.file).file == made.file
