"""`aviso-workers notify`: one notification, or a file of them, or nothing at all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aviso_workers.server import NatsServer
from tests.cli.conftest import Ran
from tests.conftest import Start, WriteConfig

Run = Callable[..., Ran]


@pytest.fixture
def payloads(run: Run, config: Path) -> Callable[[], list[Any]]:
    """`payloads()`: of what is stored."""

    def payloads() -> list[Any]:
        replayed = run("replay", "mars", "--config", config)
        assert replayed.code == 0, replayed.err
        return [json.loads(line)["data"]["payload"] for line in replayed.lines]

    return payloads


def test_a_notification_is_stored_and_its_id_is_told(run: Run, config: Path) -> None:
    ran = run("notify", "mars", "class=od", "step=06", "--config", config)
    assert ran == Ran(code=0, out="mars@1 stored in MARS\n", err="")
    (line,) = run("replay", "mars", "--config", config).lines
    assert json.loads(line)["data"] == {"identifier": {"class": "od", "step": "6"}, "payload": None}


@pytest.mark.parametrize("command", ["notify mars class=od step=6", "replay mars", "streams ls", "doctor"])
def test_what_only_this_process_would_see_is_refused(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "memory.yaml").write_text("notification_backend: {kind: in_memory}")
    ran = run(*command.split(), "--config", "memory.yaml")
    assert (ran.code, ran.out) == (2, "")
    assert "in_memory is the memory of one process" in ran.err


def test_a_payload_may_be_given_in_three_ways(
    run: Run, config: Path, tmp_path: Path, payloads: Callable[[], list[Any]]
) -> None:
    (tmp_path / "payload.json").write_bytes('{"from": "grüße"}'.encode())
    for payload in ('{"from": "here"}', "@payload.json", "-"):
        assert (
            run(
                "notify",
                "mars",
                "class=od",
                "step=6",
                "--payload",
                payload,
                "--config",
                config,
                stdin=b'{"from": "stdin"}',
            ).code
            == 0
        )
    assert payloads() == [{"from": "here"}, {"from": "grüße"}, {"from": "stdin"}]


def test_it_may_be_delivered_later(run: Run, config: Path, payloads: Callable[[], list[Any]]) -> None:
    for later in (("--after", "2h"), ("--at", "2126-11-20T06:00:00Z")):
        ran = run("notify", "mars", "class=od", "step=6", *later, "--config", config)
        assert re.fullmatch(r"mars [0-9a-f]+ waits until 2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\dZ\n", ran.out), ran
    past = run("notify", "mars", "class=od", "step=6", "--at", "2020-11-20T06:00:00Z", "--config", config)
    assert past.out == "mars@1 stored in MARS\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "say what to publish: EVENT key=value... [--payload ...], or --file FILE"),
        (("mars", "--file", "lines.jsonl"), "say what to publish"),
        (("--file", "lines.jsonl", "--payload", "{}"), "say what to publish"),
        (("--file", "lines.jsonl", "--after", "10m"), "say what to publish"),
        (("mars", "class=od", "step=6", "--after", "10"), "--after: duration must include a unit suffix"),
        (("mars", "class=od", "step=6", "--at", "noon"), "--at must be a date with a time such as"),
        (
            ("mars", "class=od", "step=6", "--at", "2030-01-01T00:00:00Z", "--after", "1h"),
            "say --at or --after, and not both",
        ),
        (("mars", "class"), "'class' is not key=value"),
        (("mars", "=od"), "'=od' is not key=value"),
        (("mars", "class=od", "class=rd"), "'class' is given twice"),
        (("marsh", "class=od"), "unknown event type 'marsh'; event types: mars; did you mean 'mars'?"),
        (("mars", "class=od"), "mars: identifier field 'step' is missing"),
        (("mars", "class=od", "step=x"), "mars: identifier field 'step' must be a whole number"),
        (
            ("mars", "class=od", "step=6", "--payload", "{'a': 1}"),
            "--payload is not JSON: object keys must be strings (byte 1): ",
        ),
        (("mars", "class=od", "step=6", "--payload", "@nowhere"), "cannot read the payload from nowhere: No such file"),
        (("mars", "class=od", "step=6", "--payload", "-"), "--payload, from standard input, is not JSON: "),
        (("mars", "class=od", "step=6", "--payload", "[" * 100_000), "--payload is not JSON: "),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_connected(
    run: Run, unreachable: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    ran = run("notify", *arguments, "--config", unreachable, stdin=b"\xff\xfe")
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert ran.err.startswith(f"aviso-workers: {complaint}"), ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("command", [("notify", "mars", "class=od", "step=6"), ("config", "show"), ("streams", "ls")])
def test_standard_output_that_cannot_be_written_is_told(
    config: Path, run: Run, payloads: Callable[[], list[Any]], command: tuple[str, ...]
) -> None:
    run("notify", "mars", "class=od", "step=0", "--config", config)
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "aviso_workers", *command, "--config", config],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    complaint = "aviso-workers: cannot write to standard output: No space left on device; what was done before, is done"
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, complaint)
    if command[0] == "notify":
        assert ran.stderr.startswith("mars@2 stored in MARS\n")
        assert len(payloads()) == 2


def test_a_server_that_is_not_there_is_named(run: Run, unreachable: Path) -> None:
    ran = run("notify", "mars", "class=od", "step=6", "--config", unreachable)
    assert ran.code == 1
    assert ran.err.startswith("aviso-workers: no NATS server at nats://127.0.0.1:")
    assert ran.err.endswith("; start one, for example by `aviso-workers server start`, or correct nats_url\n")


class TestAFile:
    @pytest.fixture
    def write_lines(self, tmp_path: Path) -> Callable[..., Path]:
        def write_lines(*lines: Any) -> Path:
            path = tmp_path / "lines.jsonl"
            path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
            return path

        return write_lines

    @staticmethod
    def line(step: int | str, **more: Any) -> dict[str, Any]:
        return {"event": "mars", "identifier": {"class": "od", "step": step}, **more}

    def test_is_stored_whole(
        self, run: Run, config: Path, write_lines: Callable[..., Path], payloads: Callable[[], list[Any]]
    ) -> None:
        path = write_lines(*(self.line(step, payload={"n": step}) for step in range(500)), "", "  ")
        ran = run("notify", "--file", path, "--config", config)
        assert (ran.code, ran.out) == (0, "500 notifications stored\n"), ran.err
        assert "500/500" in ran.err
        assert sorted(payload["n"] for payload in payloads()) == list(range(500))

    def test_sent_again_with_ids_is_stored_once(
        self, run: Run, config: Path, write_lines: Callable[..., Path], payloads: Callable[[], list[Any]]
    ) -> None:
        path = write_lines(*(self.line(step, id=f"id-{step}") for step in range(10)))
        assert run("notify", "--file", path, "--config", config).out == "10 notifications stored\n"
        again = run("notify", "--file", path, "--config", config)
        assert again.out == "0 notifications stored, 10 known already by their ids\n"
        assert len(payloads()) == 10

    def test_with_a_notification_that_is_too_large_is_not_sent_at_all(
        self, run: Run, config: Path, write_lines: Callable[..., Path], payloads: Callable[[], list[Any]]
    ) -> None:
        path = write_lines(self.line(0), self.line(12, payload="x" * (2 << 20)), self.line(18))
        ran = run("notify", "--file", path, "--config", config)
        assert (ran.code, ran.out) == (2, "")
        assert f"{path}:2: mars: the notification has 20971" in ran.err, ran.err
        assert run("replay", "mars", "--config", config).code == 1, "there is no stream"

    def test_that_ends_in_the_middle_says_how_much_may_be_stored(
        self, run: Run, nats_server: NatsServer, write_config: WriteConfig, write_lines: Callable[..., Path]
    ) -> None:
        """The progress bar counts what was begun, which is more than what is stored."""
        full = {"max_messages": 2, "discard_policy": "new", "publish_deadline_seconds": 0.5}
        config = write_config(nats_server.url, **full)
        ran = run("notify", "--file", write_lines(*map(self.line, range(4))), "--config", config)
        assert (ran.code, ran.out) == (1, ""), ran
        told = re.search("of 4 notifications the first (.) were begun, and any of these may be stored", ran.err)
        assert told, ran.err
        assert len(run("replay", "mars", "--config", config).lines) == 2 <= int(told[1])

    @pytest.mark.slow
    def test_that_is_told_to_end_in_the_middle_says_how_much_may_be_stored(
        self, start: Start, nats_server: NatsServer, write_config: WriteConfig, write_lines: Callable[..., Path]
    ) -> None:
        config = write_config(nats_server.url, max_messages=2, discard_policy="new", publish_deadline_seconds=600)
        watch = start("watch", "mars", "--from-id", "1", "--config", config)
        notify = start("notify", "--file", write_lines(*map(self.line, range(4))), "--config", config)
        watch.lines(2)  # the others wait for room
        assert notify.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert re.search("of 4 notifications the first . were begun, and any of these may be stored", notify.told[-1])

    def test_without_a_line_is_told(self, run: Run, config: Path, write_lines: Callable[..., Path]) -> None:
        ran = run("notify", "--file", write_lines("", " "), "--config", config)
        assert (ran.code, ran.out, "lines.jsonl has no notifications\n" in ran.err) == (
            0,
            "0 notifications stored\n",
            True,
        ), ran

    @pytest.mark.parametrize(
        ("bad", "complaint"),
        [
            ({"event": "mars", "identifier": {"class": "od"}}, "identifier field 'step' is missing"),
            ({"event": "marsh", "identifier": {}}, "unknown event type 'marsh'"),
            ({"event": "mars"}, "missing required field `identifier`"),
            ({"event": "mars", "identifier": {}, "playload": 1}, "unknown field `playload`"),
            ("{", "Input data was truncated"),
            ('{"event": "mars", "identifier": {"class": "od", "step": 6}, "payload": NaN}', "invalid character"),
        ],
    )
    def test_with_a_mistake_is_not_sent_at_all(
        self, run: Run, unreachable: Path, write_lines: Callable[..., Path], bad: Any, complaint: str
    ) -> None:
        path = write_lines(self.line(0), self.line(6), bad, self.line(12))
        ran = run("notify", "--file", path, "--config", unreachable)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"aviso-workers: {path}:3: "), ran.err
        assert complaint in ran.err

    def test_with_an_id_for_two_contents_is_not_sent_at_all(
        self, run: Run, unreachable: Path, write_lines: Callable[..., Path]
    ) -> None:
        path = write_lines(self.line(6, id="a"), self.line("006", id="a"), self.line(12, id="a"))
        ran = run("notify", "--file", path, "--config", unreachable)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"aviso-workers: {path}:3: its id 'a' is that of line 1, which says something else")

    def test_that_is_not_there_is_named(self, run: Run, unreachable: Path) -> None:
        ran = run("notify", "--file", "nowhere.jsonl", "--config", unreachable)
        assert (ran.code, ran.err) == (2, "aviso-workers: cannot read nowhere.jsonl: No such file or directory\n")

    def test_may_be_a_pipe(
        self, start: Start, config: Path, write_lines: Callable[..., Path], payloads: Callable[[], list[Any]]
    ) -> None:
        path = write_lines(*(self.line(step, payload={"n": step}) for step in range(3)))
        os.mkfifo(path.with_name("pipe"))
        notify = start("notify", "--file", "pipe", "--config", config)
        path.with_name("pipe").write_bytes(path.read_bytes())  # waits for its reader
        assert notify.end() == 0
        assert [payload["n"] for payload in payloads()] == [0, 1, 2]

    def test_of_standard_input_is_named_so(self, run: Run, unreachable: Path) -> None:
        ran = run("notify", "--file", "-", "--config", unreachable, stdin=b"\n{\n")
        assert (ran.code, ran.err.startswith("aviso-workers: standard input:2: Input data was trunc")) == (2, True), ran


class TestCloudEvents:
    """What `replay` prints is what `notify` takes."""

    def test_that_are_replayed_are_published_into_another_stream(
        self, run: Run, config: Path, write_config: WriteConfig, tmp_path: Path
    ) -> None:
        for step, payload in enumerate(['{"a": [1, "b"]}', "null", '"text"']):
            assert run("notify", "mars", "class=od", f"step={step}", "--payload", payload, "-c", config).code == 0
        replayed = run("replay", "mars", "--config", config).out
        with NatsServer.start(store_dir=tmp_path / "other", port=0) as other:
            there = write_config(other.url, name="other.yaml")
            for said in ("3 notifications stored\n", "0 notifications stored, 3 known already by their ids\n"):
                copied = run("notify", "--file", "-", "--config", there, stdin=replayed.encode())
                assert (copied.code, copied.out) == (0, said), copied
            again = run("replay", "mars", "--config", there).out
        assert [json.loads(line)["data"] for line in again.splitlines()] == [
            json.loads(line)["data"] for line in replayed.splitlines()
        ]

    def test_with_one_id_for_two_contents_are_both_stored(
        self, run: Run, config: Path, payloads: Callable[[], list[Any]]
    ) -> None:
        """As two streams give them, of which one was deleted and recreated."""
        event = {"specversion": "1.0", "id": "mars@1", "source": "http://localhost", "type": "int.ecmwf.aviso.mars"}
        lines = [
            json.dumps({**event, "data": {"identifier": {"class": "od", "step": "1"}, "payload": n}}) for n in (1, 2)
        ]
        ran = run("notify", "--file", "-", "--config", config, stdin="\n".join(lines).encode())
        assert (ran.code, payloads()) == (0, [1, 2]), ran

    def test_in_two_spellings_are_stored_once(
        self, run: Run, nats_server: NatsServer, tmp_path: Path, write_config: WriteConfig
    ) -> None:
        config = write_config(nats_server.url)
        event = {"specversion": "1.0", "id": "mars@1", "source": "a", "type": "int.ecmwf.aviso.mars", "time": "1"}
        lines = [{**event, "data": {"identifier": {"class": "od", "step": step}}} for step in ("6", "006", 6)]
        lines.append({**lines[0], "source": "b"})
        text = "\n".join(map(json.dumps, lines)).encode()
        assert run("notify", "--file", "-", "--config", config, stdin=text).code == 0
        assert len(run("replay", "mars", "--config", config).lines) == 1

    @pytest.mark.parametrize(
        ("data", "complaint"),
        [
            ({"identifier": {}, "paylod": 1}, "Object contains unknown field `paylod`"),
            ({"identifier": {}, "payload": 1, "payload_base64": "AA=="}, "its data has a payload and a payload_base64"),
        ],
    )
    def test_whose_payload_would_be_lost_are_refused(
        self, run: Run, unreachable: Path, data: dict[str, Any], complaint: str
    ) -> None:
        event = {"specversion": "1.0", "id": "1", "source": "x", "type": "int.ecmwf.aviso.mars", "data": data}
        ran = run("notify", "--file", "-", "--config", unreachable, stdin=json.dumps(event).encode())
        assert (ran.code, complaint in ran.err) == (2, True), ran

    def test_may_be_payloads_themselves(self, run: Run, config: Path, payloads: Callable[[], list[Any]]) -> None:
        line = {"event": "mars", "identifier": {"class": "od", "step": 1}, "payload": {"specversion": "1.0"}}
        assert run("notify", "--file", "-", "--config", config, stdin=json.dumps(line).encode()).code == 0
        assert payloads() == [{"specversion": "1.0"}]

    def test_of_another_type_are_refused(self, run: Run, unreachable: Path) -> None:
        event = {
            "specversion": "1.0",
            "id": "1",
            "source": "x",
            "type": "com.example.order",
            "data": {"identifier": {}},
        }
        ran = run(
            "notify",
            "--file",
            "-",
            "--config",
            unreachable,
            stdin=json.dumps({**event, "data": {"identifier": {}}}).encode(),
        )
        complaint = "standard input:1: its type must begin with 'int.ecmwf.aviso.', found 'com.example.order'"
        assert (ran.code, ran.err) == (2, f"aviso-workers: {complaint}\n")
