"""The demo: what it publishes, that it ends well, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from _demo import children
from _demo.generating import make_slice
from aviso_workers import App, Notify
from tests.waits import PATIENCE_SECONDS

PROJECT = Path(__file__).parents[2]
FILLED = {
    "": "agent needs you",
    "agents": "tour/cut_regions",
    "agents?state=blocked": "tour/copy_to_archive",
    "agents/tour/draw_map": "the projection does not converge",
    "agents/tour/copy_to_archive": "the archive takes no wave ensembles from us",
    "dead-letters": "the field has no values",
    "jobs/1": "Retry of ",
    "notification?name=mars@1": "main-job/index_field",
    "timers": "shown by the demo",
    "streams": "REGION",
    "spark": "completeness",
    "apps": "_demo.tour",
    "doctor": "JS",
    "audit": "Pause timer",
    "settings": "notification_backend.jetstream.nats_url",
}
"""What pages of the console say, by their addresses."""


def test_slice_is_large_and_every_notification_in_it_is_another_one() -> None:
    lines = make_slice().lines

    assert len(lines) >= 20_000
    assert len({tuple(line["identifier"].items()) for line in lines}) == len(lines)
    assert len({line["id"] for line in lines}) == len(lines)


def test_slice_is_the_schedule_without_what_is_left_out() -> None:
    made = make_slice()
    wanted = {
        (*cycle.key, step)
        for cycle in made.schedule
        for step in cycle.steps
        if step not in made.left_out.get(cycle.key, ())
    }

    assert {tuple(line["identifier"].values()) for line in made.lines} == wanted
    assert all(made.left_out.values()), made.left_out


@pytest.mark.slow
def test_slice_is_that_of_its_seed() -> None:
    assert make_slice(7) == make_slice(7)
    assert make_slice(7) != make_slice(8)


def test_some_notifications_stumble_but_few() -> None:
    made = make_slice()

    assert 0 < made.stumbling < len(made.lines) / 100


def test_slice_is_made_of_notifications_that_the_configuration_knows() -> None:
    app = App("demo", config=PROJECT / "config" / "dev.yaml")

    for line in make_slice(experiments=1).lines:
        app.check(Notify(line["event"], line["identifier"], line["payload"], message_id=line["id"]))


class Demo:
    """A demo that is running; its files are in `directory`."""

    def __init__(self, directory: Path, environment: dict[str, str], *arguments: str) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "_demo", *arguments],
            env=os.environ | {"PYTHONPATH": str(PROJECT / "scripts"), "TMPDIR": str(directory)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if line.startswith(word):
                return line
            said.append(line)
        pytest.fail(f"the demo ended before it said {word!r}:\n{''.join(said)}")

    def wait(self, *, within_seconds: float) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=within_seconds)
        return self.process.returncode, output

    def left_behind(self) -> list[str]:
        """Files, and processes that have the directory in their environment."""
        files = [path.name for path in self.directory.glob("*aviso*")]
        return files + running_with(str(self.directory))


def running_with(word: str) -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word.encode() in environment.read_bytes():
                found.append(environment.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[list[Demo]]:
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        demo.process.terminate()
        demo.process.communicate(timeout=PATIENCE_SECONDS)


def start(demos: list[Demo], directory: Path, *arguments: str, **environment: str) -> Demo:
    demos.append(Demo(directory, environment, *arguments))
    return demos[-1]


@pytest.mark.slow
def test_demo_ends_well_and_leaves_nothing_behind(start_demo: list[Demo], tmp_path: Path) -> None:
    demo = start(start_demo, tmp_path)

    code, output = demo.wait(within_seconds=6 * PATIENCE_SECONDS)

    assert code == 0, output
    assert "all as it should be" in output
    assert demo.left_behind() == []


@pytest.mark.slow
def test_kept_demo_fills_each_page_of_the_console(start_demo: list[Demo], tmp_path: Path) -> None:
    demo = start(start_demo, tmp_path, "--keep")
    url = demo.wait_for("  console").split()[1]
    demo.wait_for("the app tour fails in several ways now")

    for address, says in FILLED.items():
        deadline = time.monotonic() + PATIENCE_SECONDS
        while says not in (page := page_of(url, address)):
            assert time.monotonic() < deadline, f"{address} does not say {says!r}:\n{page}"
            time.sleep(0.5)

    demo.process.send_signal(signal.SIGINT)
    code, output = demo.wait(within_seconds=PATIENCE_SECONDS)
    assert code == 0, output
    assert running_with(str(tmp_path)) == []


def page_of(url: str, address: str) -> str:
    with urlopen(f"{url}{address}", timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_leaves_nothing_behind(
    start_demo: list[Demo], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    demo = start(start_demo, tmp_path)
    demo.wait_for("generate")

    demo.process.send_signal(number)
    found, output = demo.wait(within_seconds=PATIENCE_SECONDS)

    assert found == code, output
    assert demo.left_behind() == []


def test_interruption_while_a_process_is_started_ends_that_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), signal.SIGHUP)
        return started[-1]

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    popen, before = subprocess.Popen, signal.signal(signal.SIGHUP, interrupt)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            children.running("sleeper", ["sleep", "600"], log_dir=tmp_path, environment=os.environ),
        ):
            pytest.fail("it is not interrupted")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [process.poll() for process in started] == [-signal.SIGTERM]


@pytest.mark.slow
def test_step_that_fails_is_named_and_leaves_nothing_behind(start_demo: list[Demo], tmp_path: Path) -> None:
    demo = start(start_demo, tmp_path, JAVA_HOME="/nowhere")

    code, output = demo.wait(within_seconds=PATIENCE_SECONDS)

    assert code == 1, output
    assert "fell short: spark-job ended with exit code" in output
    assert "/nowhere/bin/java" in output
    assert demo.left_behind() == []
