"""`aviso-workers watch` and `replay`: CloudEvents, one JSON document a line."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from aviso_workers import App, Notify
from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.conftest import Start, WriteConfig
from tests.presence import present
from tests.waits import PATIENCE_SECONDS

Run = Callable[..., Ran]


@pytest.fixture
def publish(run: Run, config: Path) -> Callable[..., None]:
    def publish(*steps: int) -> None:
        for step in steps:
            assert run("notify", "mars", "class=od", f"step={step}", "--payload", "{}", "--config", config).code == 0

    return publish


def ids(lines: list[str]) -> list[str]:
    return [json.loads(line)["id"] for line in lines]


class TestReplay:
    def test_prints_the_cloud_event_of_an_aviso_server(
        self, run: Run, config: Path, publish: Callable[..., None]
    ) -> None:
        publish(6)
        (line,) = run("replay", "mars", "--config", config).lines
        event: dict[str, Any] = json.loads(line)
        time = event.pop("time")
        assert event == {
            "specversion": "1.0",
            "id": "mars@1",
            "source": "http://localhost",
            "type": "int.ecmwf.aviso.mars",
            "datacontenttype": "application/json",
            "dataschema": "http://localhost/schema/mars",
            "data": {"identifier": {"class": "od", "step": "6"}, "payload": {}},
        }
        assert time.endswith("Z")
        assert ids(run("replay", "mars", "--from-date", time, "--to-date", time, "--config", config).lines) == [
            "mars@1"
        ]

    def test_prints_a_body_that_is_no_text_as_base64(self, run: Run, config: Path) -> None:
        async def publish() -> None:
            async with App("tests", config=config) as app:
                await app.notify("mars", {"class": "od", "step": 6}, b"\x08\x96\x01\xff")
                await app.notify("mars", {"class": "od", "step": 7}, b"plain text")

        anyio.run(publish)
        raw, text = (json.loads(line)["data"] for line in run("replay", "mars", "--config", config).lines)
        assert raw == {"identifier": {"class": "od", "step": "6"}, "payload_base64": "CJYB/w=="}
        assert text == {"identifier": {"class": "od", "step": "7"}, "payload": "plain text"}

    def test_prints_polygons_as_arrays_where_that_is_asked_for(
        self, run: Run, nats_server: NatsServer, write_config: WriteConfig, tmp_path: Path
    ) -> None:
        config = write_config(nats_server.url)
        document = json.loads(config.read_text())
        document["notification_schema"]["area"] = {
            "topic": {"base": "area", "key_order": ["name"]},
            "identifier": {
                "name": {"type": "StringHandler", "required": True},
                "polygon": {"type": "PolygonHandler", "required": True},
            },
        }
        config.write_text(json.dumps(document))
        square = "(0,0,0,1,1,1,0,0)"
        assert run("notify", "area", "name=a", f"polygon={square}", "--payload", "{}", "--config", config).code == 0
        for options, expected in (
            ((), square),
            (("--spatial-arrays",), [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]),
        ):
            (line,) = run("replay", "area", *options, "--config", config).lines
            assert json.loads(line)["data"]["identifier"] == {"name": "a", "polygon": expected}

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ((), [1, 2, 3, 4]),
            (("--from-id", "3"), [3, 4]),
            (("--to-id", "2"), [1, 2]),
            (("--from-id", "2", "--to-id", "3"), [2, 3]),
            (("step=6",), [2]),
            (('step=["0", "12"]',), [1, 3]),
            (('step={"gte": 12}', "class=od"), [3, 4]),
        ],
    )
    def test_prints_what_was_asked_for(
        self, run: Run, config: Path, publish: Callable[..., None], arguments: tuple[str, ...], expected: list[int]
    ) -> None:
        publish(0, 6, 12, 18)
        ran = run("replay", "mars", *arguments, "--config", config)
        assert (ran.code, ran.err) == (0, "")
        assert ids(ran.lines) == [f"mars@{sequence}" for sequence in expected]

    @pytest.mark.parametrize(
        "arguments",
        [("--to-date", "2000-01-01T00:00:00Z"), ("step=7",), ("step=7", "--last", "2")],
    )
    def test_says_that_nothing_matches(
        self, run: Run, config: Path, publish: Callable[..., None], arguments: tuple[str, ...]
    ) -> None:
        publish(0, 6)
        assert run("replay", "mars", *arguments, "--config", config) == Ran(0, "", "no notifications match\n")

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("marsh",), "unknown event type 'marsh'; event types: mars; did you mean 'mars'?"),
            (("mars", "stop=6"), "identifier field 'stop' is unknown; did you mean 'step'?"),
            (("mars", "step"), "'step' is not key=value"),
            (("mars", "step=[6"), "the value of step is not JSON: "),
            (("mars", "class=od,step=6"), "put spaces between them: class=od step=6; or"),
            (("mars", "class=od,step=6"), """give it as JSON: class=["od,step=6"]"""),
            (("mars", "--from-id", "x"), "--from-id must be a sequence number, found 'x'"),
            (("mars", "--from-date", "2026-11-20"), "--from-date must be a date with a time"),
            (("mars", "--to-id", "x"), "--to-id must be a sequence number, found 'x'"),
            (("mars", "--from-id", "1", "--from-date", "1740509903"), "cannot specify both --from-id and --from-date"),
            (("mars", "--to-id", "1", "--to-date", "1740509903"), "cannot specify both --to-id and --to-date"),
            (("mars", "--from-id", "3", "--to-id", "1"), "--to-id 1 is before --from-id 3"),
            (
                ("mars", "--from-date", "2026-11-20T06:00:00Z", "--to-date", "2026-11-19T06:00:00Z"),
                "--to-date is before --from-date",
            ),
        ],
    )
    def test_says_what_cannot_be_asked_for(
        self, run: Run, config: Path, arguments: tuple[str, ...], complaint: str
    ) -> None:
        ran = run("replay", *arguments, "--config", config)
        assert (ran.code, ran.out) == (2, ""), ran.err
        assert complaint in ran.err
        assert ran.err.count("\n") == 1

    def test_counts_what_is_left_out_after_ten_lines(
        self, run: Run, nats_server: NatsServer, write_config: Callable[..., Path]
    ) -> None:
        """Notifications of a schema that had one field less."""
        config = write_config(nats_server.url)

        async def publish() -> None:
            async with App("before", config=config) as app:
                await app.notify_many(Notify("mars", {"class": "od", "step": step}) for step in range(24))

        anyio.run(publish)
        document = json.loads(config.read_text())
        document["notification_schema"]["mars"]["topic"]["key_order"].append("number")
        document["notification_schema"]["mars"]["identifier"]["number"] = {"type": "IntHandler", "required": True}
        config.write_text(json.dumps(document))
        assert run("notify", "mars", "class=od", "step=0", "number=1", "--config", config).code == 0
        ran = run("replay", "mars", "--config", config)
        assert (ran.code, ids(ran.lines)) == (1, ["mars@25"])
        *first, more, last = ran.err.splitlines()
        assert [line.partition(" is left out: ")[0] for line in first] == [f"mars@{i}" for i in range(1, 11)]
        assert more == "more is left out, which is counted until the end"
        assert last == "14 more were left out (24 in all)"


def test_the_last_ones_of_a_filter_are_replayed(run: Run, config: Path, publish: Callable[..., None]) -> None:
    publish(0, 6, 12, 18)
    command = ("replay", "mars", 'step={"lt": 18}', "--config", config, "--last")
    two = run(*command, "2")
    assert ids(two.lines) == ["mars@2", "mars@3"], two
    assert ids(run(*command, "9").lines) == ["mars@1", "mars@2", "mars@3"]
    assert run(*command, "0").code == 2


@pytest.fixture
def of_two(config: Path) -> Path:
    """A configuration that has a second event type, which has no key `step`."""
    document = json.loads(config.read_text())
    document["notification_schema"]["orders"] = {
        "topic": {"base": "orders", "key_order": ["class"]},
        "identifier": {"class": {"type": "StringHandler", "required": True}},
    }
    config.write_text(json.dumps(document))
    return config


class TestAllEventTypes:
    def test_are_replayed_one_after_the_other(self, run: Run, of_two: Path, publish: Callable[..., None]) -> None:
        publish(0, 6)
        ran = run("replay", "--config", of_two)
        assert (ran.code, ids(ran.lines)) == (1, ["mars@1", "mars@2"])
        assert ran.err.startswith("orders is not read: stream ORDERS does not exist: nothing was ever published, ")
        assert run("notify", "orders", "class=od", "--config", of_two).code == 0
        publish(12)
        ran = run("replay", "class=od", "--config", of_two)
        assert (ran.code, ids(ran.lines), ran.err) == (0, ["mars@1", "mars@2", "mars@3", "orders@1"], "")
        assert ids(run("replay", "--last", "2", "--config", of_two).lines) == ["orders@1", "mars@3"], "by their times"

    def test_without_any_stream_are_an_error(self, run: Run, of_two: Path) -> None:
        ran = run("replay", "--config", of_two)
        assert (ran.code, ran.out, "or it cannot read the stream" in ran.err) == (1, "", True), ran

    def test_lack_keys_of_a_filter(self, run: Run, of_two: Path, publish: Callable[..., None]) -> None:
        publish(0, 6)
        assert run("notify", "orders", "class=od", "--config", of_two).code == 0
        ran = run("replay", "step=6", "class=od", "--config", of_two)
        assert (ids(ran.lines), ran.err) == (["mars@2"], "orders is left out: it lacks a key of the filter\n")
        ran = run("replay", "stop=6", "--config", of_two)
        assert (ran.code, ran.out) == (2, "")
        assert "no event type of the configuration has all of the keys stop" in ran.err

    def test_have_no_ids_in_common(self, run: Run, of_two: Path) -> None:
        for command, option in (("replay", "--to-id"), ("watch", "--from-id")):
            ran = run(command, option, "1", "--config", of_two)
            assert (ran.code, f"{option}: an id is of one event type" in ran.err) == (2, True), ran

    @pytest.mark.slow
    def test_are_watched_at_once(self, run: Run, start: Start, of_two: Path, publish: Callable[..., None]) -> None:
        publish(0)
        watch = start("watch", "class=od", "--from-date", "2026-11-20T06:00:00Z", "--config", of_two)
        assert ids(watch.lines(1)) == ["mars@1"]
        assert run("notify", "orders", "class=od", "--config", of_two).code == 0
        assert ids(watch.lines(1)) == ["orders@1"]
        publish(6)
        assert ids(watch.lines(1)) == ["mars@2"]
        assert watch.end(signal.SIGINT) == 130

    def test_end_with_the_error_of_one(self, run: Run, of_two: Path) -> None:
        document = json.loads(of_two.read_text())
        document["notification_schema"]["orders"]["identifier"]["class"] = {"type": "EnumHandler", "values": ["rd"]}
        of_two.write_text(json.dumps(document))
        ran = run("watch", "class=od", "--config", of_two)
        assert (ran.code, "orders" in ran.err or "'class'" in ran.err) == (2, True), ran


def test_a_terminal_gets_a_table(run: Run, config: Path, publish: Callable[..., None]) -> None:
    publish(6)
    command = (sys.executable, "-m", "aviso_workers.cli", "replay", "mars", "--config", str(config))
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=theirs, check=True, timeout=PATIENCE_SECONDS)
    os.close(theirs)
    names, row, *_ = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    assert names.split() == ["ID", "STORED", "IDENTIFIER", "PAYLOAD"]
    assert re.fullmatch(r"mars@1  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  class=od step=6  {}", row), row


class TestWatch:
    def test_prints_what_was_and_what_comes_until_ctrl_c(
        self, start: Start, config: Path, publish: Callable[..., None]
    ) -> None:
        publish(0, 6, 12)
        watch = start("watch", "mars", "--from-id", "2", "--config", config)
        assert ids(watch.lines(2)) == ["mars@2", "mars@3"]
        publish(18)
        assert ids(watch.lines(1)) == ["mars@4"]
        assert watch.end(signal.SIGINT) == 130
        assert watch.told == []

    @pytest.mark.slow
    def test_goes_on_in_a_stream_that_was_made_again_and_says_so(
        self, start: Start, config: Path, publish: Callable[..., None], run: Run
    ) -> None:
        publish(0, 6, 12)
        watch = start("watch", "mars", "--from-id", "1", "--config", config)
        assert ids(watch.lines(3)) == ["mars@1", "mars@2", "mars@3"]
        assert run("streams", "rm", "MARS", "--yes", "--config", config).code == 0
        publish(18, 24)
        assert ids(watch.lines(2)) == ["mars@1", "mars@2"]
        assert watch.end(signal.SIGINT) == 130
        assert "stream MARS was deleted and recreated" in watch.told[-1]

    def test_ends_quietly_when_nobody_reads_any_more(
        self, start: Start, config: Path, publish: Callable[..., None]
    ) -> None:
        publish(0)
        watch = start("watch", "mars", "--from-id", "1", "--config", config)
        assert ids(watch.lines(1)) == ["mars@1"]
        present(watch.process.stdout).close()
        publish(6)
        assert watch.process.wait(PATIENCE_SECONDS) == 1
        assert present(watch.process.stderr).read() == ""

    @pytest.mark.slow
    def test_says_when_the_server_dies_and_when_it_is_back(
        self, start: Start, write_config: WriteConfig, run: Run, free_port: int, tmp_path: Path
    ) -> None:
        config = write_config(f"nats://127.0.0.1:{free_port}")
        with NatsServer.start(store_dir=tmp_path / "store", port=free_port) as server:
            assert run("notify", "mars", "class=od", "step=0", "--config", config).code == 0
            watch = start("watch", "mars", "--from-id", "1", "--config", config)
            assert ids(watch.lines(1)) == ["mars@1"]
            server.kill()
            assert present(watch.process.stderr).readline().startswith("the connection was lost, and is tried again: ")
        with NatsServer.start(store_dir=tmp_path / "store", port=free_port):
            assert present(watch.process.stderr).readline() == "connected again\n"
            assert run("notify", "mars", "class=od", "step=6", "--config", config).code == 0
            assert ids(watch.lines(1)) == ["mars@2"]
            assert watch.end(signal.SIGINT) == 130

    def test_says_when_the_connection_is_lost_for_good(
        self, start: Start, nats_server: NatsServer, write_config: WriteConfig, run: Run
    ) -> None:
        config = write_config(nats_server.url, max_reconnect_attempts=1)
        assert run("notify", "mars", "class=od", "step=0", "--config", config).code == 0
        watch = start("watch", "mars", "--from-id", "1", "--config", config)
        watch.lines(1)
        nats_server.kill()
        assert watch.end() == 1
        lost, told = watch.told
        assert lost.startswith("the connection was lost, and is tried again: ")
        assert told.startswith(f"aviso-workers: the connection to {nats_server.url} is lost for good: ")
