"""What a worker does when its server, its consumer or its wire fails: it makes progress, or it is not ready and says
why, or it exits. Never does it stop consuming in silence."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import nats
import pytest

from tests.stories.conftest import Publish, RunWorker
from tests.stories.processes import Proxy, Record, Server, Worker, cluster, until, until_jetstream
from tests.waits import LONG_SECONDS, PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

STREAM, CONSUMER = "MARS", "stories__work"


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


async def goes_on(
    worker: Worker, publish: Publish, record: Record, number: int, *, times: int = 1, **over: Any
) -> None:
    """It is ready, and what is published now is done, by each of so many apps."""
    await worker.ready()
    await publish([number], **over)
    await until(lambda: record.numbers("done")[number] == times, what=lambda: f"{record.acts}\n{worker.log}")


class TestTheServer:
    @pytest.mark.slow
    @pytest.mark.covers("003-05")
    async def test_that_restarts_is_waited_for(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        worker = run_worker()
        await goes_on(worker, publish, record, 1)
        await publish([2], seconds=2.0)
        await until(lambda: record.of("begun", 2), what=lambda: worker.log)

        server.stop()
        await worker.unready("not connected")
        server.start()

        await goes_on(worker, publish, record, 3)
        await until(lambda: record.of("done", 2), what=lambda: record.acts)
        assert record.numbers("begun") == {1: 1, 2: 1, 3: 1}
        assert not worker.logged("agent.disturbed")

    @pytest.mark.slow
    async def test_that_crashes_is_waited_for(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        worker = run_worker()
        await goes_on(worker, publish, record, 1)

        server.kill()
        await worker.unready("not connected")
        server.start()

        await goes_on(worker, publish, record, 2)

    @pytest.mark.slow
    async def test_that_is_gone_for_longer_than_we_may_try_ends_the_worker(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        worker = run_worker(settings={"notification_backend.jetstream.max_reconnect_attempts": 3})
        await goes_on(worker, publish, record, 1)

        server.stop()

        assert await worker.ended() == 1
        assert "is lost for good: [Errno 111] Connect call failed" in worker.log
        server.start()

    @pytest.mark.slow
    async def test_that_is_silent_is_left_and_found_again(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server, proxy: Proxy
    ) -> None:
        direct, behind_proxy = run_worker(), run_worker(url=proxy.url, app="other")
        for worker in (direct, behind_proxy):
            await worker.ready()
        # More than the buffers on the way take: it is still to be sent when the connection is dropped.
        await publish([1], seconds=1.0, sends=30)
        await until(lambda: len(record.of("begun", 1)) == 2, what=lambda: record.acts)

        proxy.fall_silent()
        server.send(signal.SIGSTOP)
        for worker in (direct, behind_proxy):
            await worker.unready("not connected: the server is silent")
        server.send(signal.SIGCONT)
        proxy.cut()
        proxy.speak()

        await goes_on(direct, publish, record, 2, times=2)
        await goes_on(behind_proxy, publish, record, 3, times=2)

    async def test_that_does_not_take_our_password_for_a_while_is_waited_for(
        self, tmp_path: Path, record: Record, publish: Publish, run_worker: RunWorker
    ) -> None:
        users = (
            'authorization {{ users: [ {{ user: worker, password: "{}" }}, {{ user: other, password: other }} ] }}\n'
        )
        with Server(tmp_path / "guarded", config=users.format("first")) as guarded:
            settings = {
                "notification_backend.jetstream.user": "worker",
                "notification_backend.jetstream.password": "first",
            }
            worker = run_worker(url=guarded.url, settings=settings)
            await worker.ready()

            guarded.reload('"first"', '"second"')

            await worker.unready("uthorization")
            assert "first" not in worker.log
            guarded.reload('"second"', '"first"')
            await worker.ready()

    @pytest.mark.slow
    async def test_that_comes_back_with_another_password_is_told_as_the_reason(
        self, tmp_path: Path, run_worker: RunWorker
    ) -> None:
        users = 'authorization {{ user: worker, password: "{}" }}\n'
        with Server(tmp_path / "guarded", config=users.format("first")) as guarded:
            settings = {
                "notification_backend.jetstream.user": "worker",
                "notification_backend.jetstream.password": "first",
            }
            worker = run_worker(url=guarded.url, settings=settings)
            await worker.ready()

            guarded.stop()
            guarded.config = users.format("second")
            guarded.start()

            await worker.unready("not connected: nats: 'Authorization Violation'")

    async def test_that_denies_us_to_ask_for_messages_makes_no_ready_worker(
        self, tmp_path: Path, run_worker: RunWorker
    ) -> None:
        users = (
            "authorization { users: [ { user: worker, password: secret, "
            'permissions: { publish: { deny: "$JS.API.CONSUMER.MSG.NEXT.MARS.>" } } } ] }\n'
        )
        with Server(tmp_path / "guarded", config=users) as guarded:
            settings = {
                "notification_backend.jetstream.user": "worker",
                "notification_backend.jetstream.password": "secret",
            }
            worker = run_worker(url=guarded.url, settings=settings)

            await worker.unready("permissions violation for publish to")
            assert [entry["stream"] for entry in worker.logged("agent.started")].count(STREAM) == 0

    async def test_that_denies_us_to_acknowledge_is_told_before_anything_is_handled(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        users = (
            "authorization { users: [ { user: publisher, password: secret }, { user: worker, password: secret, "
            'permissions: { publish: { deny: "$JS.ACK.>" } } } ] }\n'
        )
        with Server(tmp_path / "guarded", config=users) as guarded:
            await publish([1], url=guarded.url.replace("nats://", "nats://publisher:secret@"))
            settings = {
                "notification_backend.jetstream.user": "worker",
                "notification_backend.jetstream.password": "secret",
            }
            worker = run_worker(url=guarded.url, settings=settings)

            await worker.unready('permissions violation for publish to "$js.ack.mars.')
            assert [entry["stream"] for entry in worker.logged("agent.started")].count(STREAM) == 0
            assert record.acts == []

    @pytest.mark.slow
    async def test_that_takes_the_right_to_acknowledge_away_makes_the_worker_unready(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        users = (
            "authorization {{ users: [ {{ user: publisher, password: secret }}, {{ user: worker, password: secret, "
            'permissions: {{ publish: {{ allow: [">"], deny: [{}] }} }} }} ] }}\n'
        )
        with Server(tmp_path / "guarded", config=users.format("")) as guarded:
            url = guarded.url.replace("nats://", "nats://publisher:secret@")
            settings = {
                "notification_backend.jetstream.user": "worker",
                "notification_backend.jetstream.password": "secret",
            }
            worker = run_worker(url=guarded.url, settings=settings)
            await goes_on(worker, publish, record, 1, url=url)

            guarded.stop()
            guarded.config = users.format('"$JS.ACK.>"')
            guarded.start()
            await publish([2], url=url)

            await worker.unready('permissions violation for publish to "$js.ack.mars.')

    @pytest.mark.slow
    async def test_that_ends_the_connection_with_an_error_is_found_again(
        self, run_worker: RunWorker, publish: Publish, record: Record, proxy: Proxy
    ) -> None:
        worker = run_worker(url=proxy.url)
        await goes_on(worker, publish, record, 1)

        proxy.say(b"-ERR 'Unknown Protocol Operation'\r\n")

        await until(lambda: worker.logged("connection.down"), what=lambda: worker.log)
        assert "nats: unknown protocol operation" in worker.log
        await goes_on(worker, publish, record, 2)

    @pytest.mark.slow
    async def test_that_cuts_us_off_for_slow_reading_is_found_again(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        with (
            Server(tmp_path / "strict", config='write_deadline: "200ms"\n') as strict,
            Proxy(strict.port) as proxy,
        ):
            worker = run_worker(url=proxy.url, app="lanes")  # it asks for more than the buffers on the way take
            await worker.ready()
            numbers = range(30)

            proxy.fall_silent()
            await publish(numbers, url=strict.url, filler="x" * 900_000)
            await until(lambda: "Slow Consumer" in strict.log, what=lambda: strict.log)
            proxy.speak()

            await until(
                lambda: set(record.numbers("done")) == set(numbers), what=lambda: f"{record.acts}\n{worker.log}"
            )
            assert worker.logged("connection.down")
            await goes_on(worker, publish, record, 30, url=strict.url)

    @pytest.mark.slow
    async def test_that_is_to_shut_down_is_used_until_it_does_where_there_is_no_other(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        config = 'lame_duck_grace_period: "1s"\nlame_duck_duration: "30s"\n'
        with Server(tmp_path / "lame", config=config) as lame:
            worker = run_worker(url=lame.url)
            await goes_on(worker, publish, record, 1, url=lame.url)
            await publish([2], url=lame.url, seconds=0.5)
            await until(lambda: record.of("begun", 2), what=lambda: worker.log)

            lame.send(signal.SIGUSR2)
            await until(lambda: record.of("done", 2), what=lambda: worker.log)
            assert len(worker.logged("connection.up")) == 1
            await lame.ended()
            await worker.unready("not connected")
            lame.start()

            await goes_on(worker, publish, record, 3, url=lame.url)


class TestTheConsumer:
    async def test_that_is_deleted_is_made_anew(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        worker = run_worker()
        await goes_on(worker, publish, record, 1)

        client = await nats.connect(server.url)
        await client.jetstream().delete_consumer(STREAM, CONSUMER)
        await client.close()

        await until(lambda: "was deleted" in worker.log, what=lambda: worker.log)
        await worker.ready()
        await publish([2])
        await until(lambda: record.of("done", 2), what=lambda: worker.log)

    @pytest.mark.slow
    async def test_whose_stream_is_made_anew_is_made_anew_and_nothing_of_the_new_stream_is_lost(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        worker = run_worker()
        await worker.ready()
        await publish([1], seconds=1.5)
        await until(lambda: record.of("begun", 1), what=lambda: worker.log)

        client = await nats.connect(server.url)
        await client.jetstream().delete_stream(STREAM)
        await client.close()
        # It has the sequence of the one that runs: what runs must not settle it.
        await publish([2], seconds=1.5)

        await until(lambda: record.of("begun", 2), what=lambda: worker.log)
        await until(lambda: record.of("done", 1), what=lambda: worker.log)
        worker.kill()
        other = run_worker()
        await goes_on(other, publish, record, 3)
        await until(lambda: record.of("done", 2), what=lambda: f"{record.acts}")

    @pytest.mark.slow
    async def test_that_limits_requests_is_asked_for_no_more(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        await publish(range(1, 21))
        client = await nats.connect(server.url)
        limits = {"max_batch": 2, "max_expires": 1_000_000_000, "max_bytes": 100_000}
        await client.request(
            f"$JS.API.CONSUMER.CREATE.{STREAM}.{CONSUMER}",
            nats_json(stream_name=STREAM, config={"durable_name": CONSUMER, "ack_policy": "explicit", **limits}),
        )
        await client.close()

        worker = run_worker(ack_wait_seconds=LONG_SECONDS)
        await worker.ready()
        await until(lambda: len(record.numbers("done")) == 20, what=lambda: worker.log)
        await anyio.sleep(2.5)
        await goes_on(worker, publish, record, 21)
        assert not worker.logged("agent.disturbed")

    async def test_for_whose_next_message_its_limit_is_too_small_loses_the_limit(
        self, run_worker: RunWorker, publish: Publish, record: Record, server: Server
    ) -> None:
        await publish([1], filler="x" * 50_000)
        client = await nats.connect(server.url)
        config = {"durable_name": CONSUMER, "ack_policy": "explicit", "max_bytes": 10_000}
        await client.request(
            f"$JS.API.CONSUMER.CREATE.{STREAM}.{CONSUMER}", nats_json(stream_name=STREAM, config=config)
        )
        await client.close()

        worker = run_worker()

        await goes_on(worker, publish, record, 2)
        assert not worker.logged("agent.disturbed")


class TestTheLeader:
    @pytest.mark.covers("003-05", "002-39")
    @pytest.mark.slow
    async def test_that_changes_or_dies_is_followed(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        with cluster(tmp_path) as nodes:
            urls = ",".join(node.url for node in nodes)
            settings = {"notification_backend.jetstream.replicas": 3}
            client = await nats.connect(nodes[0].url)
            await until_jetstream(client)
            worker = run_worker(url=urls, settings=settings)
            await goes_on(worker, publish, record, 1, url=urls)

            answer = await client.request(
                f"$JS.API.CONSUMER.LEADER.STEPDOWN.{STREAM}.{CONSUMER}", timeout=PATIENCE_SECONDS
            )
            assert b"error" not in answer.data
            await goes_on(worker, publish, record, 2, url=urls)
            answer = await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}", timeout=PATIENCE_SECONDS)
            assert b"error" not in answer.data
            await goes_on(worker, publish, record, 3, url=urls)

            assert record.numbers("begun") == {1: 1, 2: 1, 3: 1}

            info = await client.jetstream().consumer_info(STREAM, CONSUMER)
            assert info.cluster is not None
            leader = next(node for node in nodes if node.name == info.cluster.leader)
            await client.close()
            leader.kill()
            await goes_on(worker, publish, record, 4, url=urls)

    @pytest.mark.slow
    async def test_that_is_to_shut_down_is_left_at_once_for_another(
        self, tmp_path: Path, run_worker: RunWorker, publish: Publish, record: Record
    ) -> None:
        with cluster(tmp_path) as nodes:
            client = await nats.connect(nodes[1].url)
            await until_jetstream(client)
            worker = run_worker(url=nodes[0].url, settings={"notification_backend.jetstream.replicas": 3})
            urls = nodes[1].url
            await goes_on(worker, publish, record, 1, url=urls)

            nodes[0].process.send_signal(signal.SIGUSR2)
            await until(lambda: len(worker.logged("connection.up")) == 2, what=lambda: worker.log)

            assert worker.logged("connection.down")[0]["reason"] == "the server is shutting down"
            assert nodes[0].process.poll() is None
            await goes_on(worker, publish, record, 2, url=urls)
            await client.close()


def nats_json(**request: object) -> bytes:
    return msgspec.json.encode(request)
