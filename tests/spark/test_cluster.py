"""A cluster of both: a standalone Spark with two workers, three NATS servers, and streams that all three of them have.

An executor is killed at a known moment: a task on it stops where it is, tells the process that it runs in, and waits
for its end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import nats
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from aviso_workers.errors import NotFoundError
from aviso_workers.server import NatsServer
from aviso_workers.spark import register
from tests.presence import present
from tests.spark.jvms import quick_jvm
from tests.spark.place import Place
from tests.stories.processes import cluster, until_jetstream
from tests.waits import PATIENCE_SECONDS

QUERY_SECONDS = 3 * PATIENCE_SECONDS
"""A query whose executor is killed waits until Spark has noticed and started another one."""
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": quick_jvm(),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
    "spark.sql.session.timeZone": "UTC",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
    "spark.task.maxFailures": "1",  # so that nothing else runs a task again
}
COUNT = 20_000
PAYLOAD_CHARACTERS = 2000
"""So that a task has more to pass on than fits into all buffers on the way: about 10 MB."""
MASTER = re.compile(r"Starting Spark master at (spark://\S+)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a standalone master that has two workers with a core each."""
    directory = tmp_path_factory.mktemp("standalone")
    ports = ("--port", "0", "--webui-port", "0")
    with ExitStack() as running:

        def start(name: str, kind: str, *arguments: str, host: str = "127.0.0.1") -> Path:
            log = directory / f"{name}.log"
            environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_JAVA_OPTS": quick_jvm()}
            with log.open("wb") as stderr:
                process = subprocess.Popen(
                    [SPARK_CLASS, f"org.apache.spark.deploy.{kind}", "--host", host, *ports, *arguments],
                    env=environment,
                    stdout=stderr,
                    stderr=stderr,
                )
            running.enter_context(process)
            running.callback(process.terminate)
            return log

        log = start("master", "master.Master")
        wait_until(lambda: MASTER.search(log.read_text()) is not None, log.read_text)
        url = MASTER.findall(log.read_text())[0]
        for name, host in (("one", "127.0.0.1"), ("other", "localhost")):  # of one task, a host gets one attempt
            work = ("--cores", "1", "--memory", "1g", "--work-dir", str(directory / name))
            start(name, "worker.Worker", *work, url, host=host)
        yield url


@pytest.fixture(scope="module")
def spark(
    start_spark: Callable[..., SparkSession], master: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    spark = start_spark(tmp_path_factory.mktemp("logs"), {"spark.master": master, **SETTINGS})
    spark.sparkContext.setLogLevel("OFF")  # of executors that are to die
    register(spark)
    yield spark
    spark.stop()


@pytest.fixture
def speculating(
    spark: SparkSession, start_spark: Callable[..., SparkSession], master: str, place: Place
) -> Iterator[Place]:
    """The place of an application that soon runs a task again beside the first attempt. `spark` is no more."""
    spark.stop()
    other = start_spark(place.directory / "logs", {"spark.master": master, **SETTINGS, **SPECULATION})
    other.sparkContext.setLogLevel("OFF")  # of attempts that come too late
    register(other)
    place.use(other)
    yield place
    other.stop()


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Iterator[Place]:
    with cluster(tmp_path) as nodes:
        anyio.run(_elected, nodes)
        place = Place(spark, nodes[0], tmp_path)
        place.with_url(",".join(node.url for node in nodes), replicas=3)
        yield place


def test_what_an_executor_was_reading_when_it_was_killed_is_read_once(place: Place) -> None:
    place.write(notifications(place))
    assert place.do("stream_info", "MARS").config["num_replicas"] == 3
    halt = Halt(place, after_rows=1000)
    counting = halt.first_task_of(place.read(numPartitions=1)).agg(F.count("*"), F.count_distinct("sequence"))

    with halt.killing(once=lambda: bool(place.do("consumers", "MARS"))):  # which a task removes when it has read all
        counted = counting.first()

    assert tuple(present(counted)) == (COUNT, COUNT)


def test_what_an_executor_was_writing_when_it_was_killed_is_stored_once(place: Place) -> None:
    halt = Halt(place, after_rows=COUNT // 4)

    with halt.killing(once=lambda: COUNT // 2 < stored(place) < COUNT):  # more than the other task has to write
        place.write(halt.first_task_of(notifications(place)))

    assert place.do("stream_info", "MARS").config["num_replicas"] == 3
    assert sorted(int(notification.identifier["step"]) for notification in place.stored()) == list(range(COUNT))


def test_what_an_executor_was_copying_for_a_streaming_query_when_it_was_killed_is_stored_once(place: Place) -> None:
    place.write(notifications(place))
    halt = Halt(place, after_rows=COUNT // 4)

    with halt.killing(once=lambda: COUNT // 2 < stored(place, "COPY") < COUNT):
        copy(place, halt)

    assert sorted(int(copy.identifier["step"]) for copy in place.stored("copy")) == list(range(COUNT))


def test_what_speculation_does_a_second_time_is_stored_once(speculating: Place) -> None:  # the last here: see its place
    for event in ("mars", "copy"):
        halt = Halt(speculating, after_rows=COUNT // 4, name=event)

        if event == "mars":
            speculating.write(halt.first_task_of(notifications(speculating)))
        else:
            copy(speculating, halt)

        assert halt.stopped
        assert sorted(int(each.identifier["step"]) for each in speculating.stored(event)) == list(range(COUNT))


def copy(place: Place, halt: Halt) -> None:
    """Copy all notifications by a streaming query, of which the first task stops."""
    copied = halt.first_task_of(place.read_stream(startingOffsets="earliest", numPartitions=2))
    writer = copied.select("identifier", "payload").writeStream.format("aviso").trigger(availableNow=True)
    writer = writer.options(config=str(place.config), event="copy", checkpointLocation=str(place.directory / "offsets"))
    assert writer.start().awaitTermination(int(QUERY_SECONDS))


class Halt:
    """Stops the first task of a query, at its first attempt, in the middle of its rows."""

    def __init__(self, place: Place, *, after_rows: int, name: str = "query") -> None:
        self._told = place.directory / f"halted-{name}"
        self._after_rows = after_rows

    @property
    def stopped(self) -> bool:
        return self._told.exists()

    def first_task_of(self, frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(_halting(str(self._told), self._after_rows), frame.schema)

    @contextmanager
    def killing(self, *, once: Callable[[], bool]) -> Iterator[None]:
        """Kill the executor of the task that stopped, as soon as that is so; meanwhile the query is run."""
        with ThreadPoolExecutor(1) as executor:
            killed = executor.submit(self._kill, once)
            yield
            killed.result()

    def _kill(self, once: Callable[[], bool]) -> None:
        wait_until(lambda: self.stopped, lambda: "no task stopped")
        wait_until(once, lambda: "a task stopped, and it is not so")
        os.kill(int(self._told.read_text()), signal.SIGKILL)


def _halting(told: str, after_rows: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function that travels by value, because executors have no tests."""

    def halting(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import time
        from pathlib import Path

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        is_first = context.partitionId() == 0 and context.attemptNumber() == 0
        rows = 0
        for batch in batches:
            yield batch
            rows += len(batch)
            if is_first and rows >= after_rows:
                daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
                partly = Path(f"{told}.partly")
                partly.write_text(daemon.rpartition(") ")[2].split()[1])  # whose parent is the executor
                partly.rename(told)
                time.sleep(300)
                raise AssertionError("nobody killed this executor")

    return halting


def notifications(place: Place) -> DataFrame:
    """Rows in two partitions."""
    return place.rows(COUNT).withColumn(
        "payload", F.to_json(F.struct(F.lit("x" * PAYLOAD_CHARACTERS).alias("location")))
    )


def stored(place: Place, stream: str = "MARS") -> int:
    try:
        return int(place.do("stream_info", stream).messages)
    except NotFoundError:
        return 0


def wait_until(is_so: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what()}"
        time.sleep(0.05)


async def _elected(nodes: list[NatsServer]) -> None:
    client = await nats.connect(nodes[0].url)
    await until_jetstream(client)
    await client.close()
