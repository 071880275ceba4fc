"""One nats-server and the processes around it, in a work directory of their own and on free loopback ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from _demo.children import Child, ShortfallError, free_port, is_ready, running, wait_until
from _demo.generating import Slice
from _demo.index import Index
from aviso_workers.server import NatsServer

PROJECT = Path(__file__).parents[2]
CONFIG = PROJECT / "config" / "dev.yaml"
COMMANDS = Path(sys.executable).parent
SPARK_HOME = Path(sysconfig.get_path("purelib")) / "pyspark"
READY_SECONDS = 120.0
REPLAY_SECONDS = 120.0

# Starts sooner and takes less memory than Java's defaults, which are made for long-lived processes.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What the index agent's worker says of itself at `/metrics`."""

    acked: int
    retries: int
    dead_letters: int
    lag: int


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process and its status port."""

    child: Child
    url: str

    def is_ready(self) -> bool:
        return is_ready(f"{self.url}/readyz")

    def numbers(self) -> Numbers:
        with urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        totals = Counter[str]()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("agent") == "index_field":
                    totals[f"{sample.name} {sample.labels.get('outcome', '')}".strip()] += int(sample.value)
        return Numbers(
            acked=totals["aviso_worker_notifications_total acked"],
            retries=totals["aviso_worker_retries_total"],
            dead_letters=totals["aviso_worker_notifications_total dead_lettered"],
            lag=totals["aviso_worker_pending"] + totals["aviso_worker_ack_pending"],
        )


class Deployment:
    """Where everything is, and how its processes are started."""

    def __init__(self, directory: Path, nats_url: str) -> None:
        self.nats_url = nats_url
        self.notifications_file = directory / "notifications.jsonl"
        self.schedule_file = directory / "schedule.jsonl"
        self.output_dir = directory / "output"
        self.log_dir = directory / "logs"
        self.event_log_dir = directory / "spark-events"
        for made in (self.log_dir, self.event_log_dir):
            made.mkdir()
        self._index_file = directory / "index.sqlite"
        self.index = Index(self._index_file)

    def write(self, wanted: Slice) -> None:
        """The notifications and the schedule, as JSON lines."""
        encoder = msgspec.json.Encoder()
        self.notifications_file.write_bytes(encoder.encode_lines(wanted.lines))
        self.schedule_file.write_bytes(encoder.encode_lines(wanted.schedule))

    def index_worker(self) -> AbstractContextManager[Worker]:
        return self._worker("index", "_demo.agents:app")

    def spark_events_worker(self) -> AbstractContextManager[Worker]:
        return self._worker("spark-events", "--agent", "spark-events")

    def tour_worker(self) -> AbstractContextManager[Worker]:
        return self._worker("tour", "_demo.tour:app")

    @contextmanager
    def prometheus(self, *workers: Worker) -> Iterator[str]:
        """A Prometheus that asks the workers while the block runs, and its address; an empty one where the program is
        not installed.
        """
        if (program := shutil.which("prometheus")) is None:
            yield ""
            return
        directory, address = self.log_dir.parent / "prometheus", f"127.0.0.1:{free_port()}"
        directory.mkdir()
        targets = [{"targets": [urlsplit(worker.url).netloc for worker in workers]}]
        scrape = {"job_name": "aviso-workers", "scrape_interval": "5s", "static_configs": targets}
        config = directory / "prometheus.json"
        config.write_bytes(msgspec.json.encode({"scrape_configs": [scrape]}))  # JSON is YAML
        command: list[str | Path] = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
        ]
        with running("prometheus", command, log_dir=self.log_dir, environment=self.environment):
            yield f"http://{address}"

    @contextmanager
    def console(self) -> Iterator[str]:
        """The console of the server while the block runs; its address."""
        with self._command("console", "console", "--port", "0") as child:
            said = re.compile(r"^console: (\S+)$", re.MULTILINE)
            wait_until(
                lambda: said.search(child.log_file.read_text()) is not None,
                lambda: "the console does not start",
                within_seconds=READY_SECONDS,
                alive=[child],
            )
            found = said.search(child.log_file.read_text())
            assert found
            yield found[1]

    def notify(self) -> AbstractContextManager[Child]:
        """Publishes the notifications file, and ends."""
        return self._command("notify", "notify", "--file", self.notifications_file)

    def stored(self, notify: Child) -> int:
        """Return how many notifications it says that are stored."""
        outcome = r"^(\d+) notifications stored(?:, (\d+) known already by their ids)?$"  # known: from its own retries
        said = re.search(outcome, notify.log_file.read_text(), re.MULTILINE)
        if said is None:
            raise ShortfallError(f"notify does not say how many it has stored\n{notify.last_words()}")
        return int(said[1]) + int(said[2] or 0)

    def spark_job(self) -> AbstractContextManager[Child]:
        """Archives the index and says what is missing, and ends."""
        settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": self.event_log_dir.as_uri(),
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }
        command: list[str | Path] = [
            SPARK_HOME / "bin" / "spark-submit",
            *("--master", "local[2]"),
            *("--driver-java-options", JAVA_OPTIONS),
            *(word for key, value in settings.items() for word in ("--conf", f"{key}={value}")),
            Path(__file__).with_name("completeness.py"),
            *("--index", self._index_file),
            *("--schedule", self.schedule_file),
            *("--output", self.output_dir),
        ]
        return running("spark-job", command, log_dir=self.log_dir, environment=self.environment)

    def spark_events(self) -> Counter[str]:
        """Return how many events of each kind the `spark_job` stream holds, such as `job end`."""
        command: list[str | Path] = [COMMANDS / "aviso-workers", "replay", "spark_job", "--config", CONFIG]
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=REPLAY_SECONDS
        )
        if done.returncode != 0:
            raise ShortfallError(f"replay ended with exit code {done.returncode}: {done.stderr.decode()}")
        identifiers = (json.loads(line)["data"]["identifier"] for line in done.stdout.splitlines())
        return Counter(f"{identifier['kind']} {identifier['event']}" for identifier in identifiers)

    @property
    def environment(self) -> dict[str, str]:
        """Of every process: nothing that the caller has set for another aviso-workers or Spark."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AVISO", "NATS_", "SPARK_", "PYSPARK_"))
        }
        return kept | {
            "PYTHONPATH": str(PROJECT / "scripts"),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            # Spark's own search for its home fails where the path of the virtual environment has spaces.
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": self.nats_url,
            "AVISO_WORKERS_WORKERS__AGENTS__INDEX__FILE": str(self._index_file),
            "AVISO_WORKERS_WORKERS__AGENTS__SPARK_EVENTS__EVENT_LOG_DIRS": json.dumps([str(self.event_log_dir)]),
        }

    @contextmanager
    def _worker(self, name: str, *target: str) -> Iterator[Worker]:
        port = free_port()
        with self._command(name, "worker", *target, "--status-port", str(port)) as child:
            worker = Worker(child=child, url=f"http://127.0.0.1:{port}")
            wait_until(
                worker.is_ready,
                lambda: f"the {name} worker is not ready: {child.last_words()}",
                within_seconds=READY_SECONDS,
                alive=[child],
            )
            yield worker

    def _command(self, name: str, *arguments: str | Path) -> AbstractContextManager[Child]:
        command: list[str | Path] = [COMMANDS / "aviso-workers", *arguments, "--config", CONFIG]
        return running(name, command, log_dir=self.log_dir, environment=self.environment)


@contextmanager
def deployed(directory: Path) -> Iterator[Deployment]:
    """A nats-server that keeps its streams in the directory, and what can be started around it."""
    with NatsServer.start(store_dir=directory / "nats") as server:
        yield Deployment(directory, server.url)
