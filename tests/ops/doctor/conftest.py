"""What the tests of the doctor share: servers that are broken on purpose, and what the doctor says of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import create_task_group
from msgspec import Struct, structs

from aviso_workers import App, config
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.errors import UnavailableError
from aviso_workers.ops.doctor import Scope, State, facts, judgements
from aviso_workers.ops.doctor.checks import CHECKS
from aviso_workers.ops.doctor.facts import Facts
from aviso_workers.ops.doctor.judgements import Finding, Result
from aviso_workers.server import NatsServer
from tests.waits import PATIENCE_SECONDS

MONITORED = "http: 127.0.0.1:-1\n"
SECOND = 10**9

Written = Callable[..., Config]


class Seen(Struct, frozen=True):
    """What the doctor says of the facts."""

    facts: Facts
    results: Mapping[str, Result]
    """By code."""

    def __repr__(self) -> str:
        return f"Seen({self.wrong})"

    def state(self, code: str) -> State:
        return self.results[code].state

    def findings(self, code: str) -> dict[str, Finding]:
        """By where it is."""
        return {finding.where: finding for finding in self.results[code].findings}

    def found(self, code: str) -> dict[str, str]:
        """What was found that is a WARN or a FAIL, by where."""
        bad = (State.WARN, State.FAIL)
        return {where: each.found for where, each in self.findings(code).items() if each.state in bad}

    @property
    def wrong(self) -> dict[str, State]:
        """The checks that do not pass."""
        return {code: result.state for code, result in self.results.items() if result.state is not State.PASS}


def changed(facts: Facts, **changes: Any) -> Facts:
    """Return the facts with others; some are of what workers have recorded, such as the time of the server."""
    names = {"now": "time", "records": "consumers", "failures": "failures", "pauses": "pauses"}
    told = {names[name]: changes.pop(name) for name in names if name in changes}
    return structs.replace(facts, recorded=structs.replace(facts.recorded, **told), **changes)


def judged(found: Facts) -> Seen:
    return Seen(found, {result.check.code: result for result in judgements.judge(CHECKS, found)})


async def gathered(loaded: Config, **scope: Any) -> Facts:
    """The facts; between the samples there is little time, unless `seconds` says otherwise."""
    async with App("the-doctor", config=loaded) as app:
        return await facts.gather(app.session.admin, app.config, Scope(**{"seconds": 0.2, **scope}))


def examined(loaded: Config, **scope: Any) -> Seen:
    return judged(anyio.run(lambda: gathered(loaded, **scope)))


def write(
    path: Path,
    url: str,
    *,
    event_types: tuple[str, ...] = ("mars",),
    streams: Mapping[str, Any] | None = None,
    **jetstream: Any,
) -> Config:
    """A configuration with these event types and these declared streams, on that server."""
    identifier = {"class": {"type": "StringHandler", "required": True}}
    schema = {
        name: {
            "topic": {"base": name, "key_order": ["class"]},
            "identifier": identifier,
            "storage_policy": {"allow_duplicates": True},
        }
        for name in event_types
    }
    backend = {"nats_url": url, "max_reconnect_attempts": 0, **jetstream}
    document = {
        "notification_backend": {"kind": "jetstream", "jetstream": backend},
        "notification_schema": schema,
        "streams": streams or {},
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return config.load(path, environ={})


@contextmanager
def served(directory: Path, extra: str = MONITORED) -> Iterator[tuple[NatsServer, str]]:
    """A server and the URL of its monitoring port."""
    with NatsServer.start(store_dir=directory, config=extra) as server:
        line = next(line for line in server.log.splitlines() if "Starting http monitor" in line)
        yield server, f"http://{line.split()[-1]}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


async def create(administration: Administration, subject: str, request: dict[str, Any]) -> None:
    """Make a stream or a consumer. A young cluster does not always answer; to create the same again is not an error."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            with suppress(UnavailableError):
                await administration.api(subject, request)
                return


async def add_stream(administration: Administration, name: str, **config: Any) -> None:
    """A stream of `<name>.>`, unless its configuration says otherwise."""
    wanted = {"name": name, "subjects": [f"{name}.>"], **config}
    await create(
        administration, f"STREAM.CREATE.{name}", {key: value for key, value in wanted.items() if value is not None}
    )


async def add_consumer(administration: Administration, stream: str, name: str, **config: Any) -> None:
    """A durable pull consumer with explicit acknowledgements, unless its configuration says otherwise."""
    wanted = {"name": name, "durable_name": name, "ack_policy": "explicit", **config}
    request = {"stream_name": stream, "config": wanted}
    await create(administration, f"CONSUMER.CREATE.{stream}.{name}", request)


async def publish(administration: Administration, stream: str, count: int, *, size: int = 1, key: str = "") -> None:
    """So many messages, stored. In a cluster, it takes a moment until every server knows of a new stream's subjects."""
    for i in range(count):
        with anyio.fail_after(PATIENCE_SECONDS):
            while True:
                with suppress(UnavailableError):
                    await administration.request(f"{stream}.{key or i}", b"x" * size)
                    break
                await anyio.sleep(0.1)


async def pull(administration: Administration, stream: str, consumer: str, count: int, **request: Any) -> list[str]:
    """Be given so many messages; returns where to acknowledge them."""
    inbox, given = administration.new_inbox(), list[str]()
    async with administration.listen(inbox) as heard:
        with anyio.fail_after(PATIENCE_SECONDS):
            while len(given) < count:
                asked = json.dumps({"batch": count - len(given), "expires": 20 * SECOND, **request}).encode()
                administration.send(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", asked, reply=inbox)
                while len(given) < count and (reply := (await heard.receive()).reply):
                    given.append(reply)
                if len(given) < count:
                    await anyio.sleep(0.1)  # it was a status: the consumer has no leader yet
    return given


@asynccontextmanager
async def between_samples(administration: Administration, deed: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do it when the doctor who comes within the block has taken the first sample, whose last question is for INFO."""
    async with administration.listen("$JS.EVENT.ADVISORY.API") as heard, create_task_group() as waiting:

        async def wait() -> None:
            with anyio.fail_after(PATIENCE_SECONDS):
                while json.loads((await heard.receive()).data)["subject"] != "$JS.API.INFO":
                    pass
            await deed()

        waiting.start_soon(wait)
        yield
