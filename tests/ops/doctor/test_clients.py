"""Our own side: settings, credentials, backups, and what agents leave behind."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from aviso_workers import App, Notification, Notify, RetryPolicy, Stream
from aviso_workers.aviso.literals import Duration
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.declare import outputs
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.ops.doctor import State
from aviso_workers.state import dead_letter_records, own_streams
from tests.ops.doctor.conftest import (
    SECOND,
    Seen,
    add_consumer,
    add_stream,
    examined,
    judged,
    publish,
    served,
    write,
)

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")

patient = App("patient")
LONG = RetryPolicy(first=60, factor=2, max=600, attempts=4, jitter=0)

OURS = {"aviso-workers-start": "all"}


@patient.agent("mars", retry=LONG)
async def derive(notification: Notification[Any]) -> list[Notify]:
    return []


@patient.agent("mars", retry=LONG)
async def follow(stream: Stream[Any]):  # type: ignore[no-untyped-def]
    yield None


@patient.agent("mars", retry=LONG)
async def index(notification: Notification[Any]) -> None: ...


@patient.agent("mars", retry=RetryPolicy(attempts=2), timeout=10)
async def soon(notification: Notification[Any]) -> Notify | None: ...


async def leave_behind(server: Administration) -> None:
    """Three event streams, a dead letter, and an agent whose consumer has a `max_deliver`."""
    await add_stream(server, "MARS", subjects=["mars.>"], duplicate_window=120 * SECOND)
    await add_stream(server, "SHORT", subjects=["short.>"], duplicate_window=10 * SECOND)
    await add_stream(server, "LONG", subjects=["long.>"], duplicate_window=3600 * SECOND)
    await add_stream(server, DEAD_LETTERS, subjects=[f"{dead_letter_records.SUBJECT}.>"])
    await server.request(f"{dead_letter_records.SUBJECT}.field.index", b"{}")
    await publish(server, "mars", 1)
    await add_consumer(server, "MARS", "field__index", max_deliver=1, metadata=OURS)


@pytest.fixture(scope="module")
def left(directory: Path) -> Iterator[Seen]:
    async def leave(loaded: Config) -> None:
        async with App("leaving", config=loaded) as app:
            await leave_behind(app.session.admin.administration())

    with served(directory) as (server, monitor):
        loaded = write(directory / "config.yaml", server.url, event_types=("mars", "short", "long"))
        anyio.run(leave, loaded)
        yield examined(loaded, monitors=(monitor,), agents=tuple(patient.agents), app="patient")


def test_a_window_that_ends_before_what_is_tried_again(left: Seen) -> None:
    (wrong,) = [finding for finding in left.results["JS009"].findings if finding.stream == "MARS"]
    assert wrong.found == "duplicate_window 2m, and agent derive retries for up to 420 s"
    assert "streams.MARS.duplicate_window: 10m" in wrong.cure
    assert left.state("JS009") is State.WARN
    short = [finding.found for finding in left.results["JS009"].findings if finding.stream == "SHORT"]
    assert "duplicate_window 10s, publish_deadline_seconds 30" in short
    assert "duplicate_window 10s, and agent soon retries for up to 21 s" in short
    assert "LONG" not in left.findings("JS009")


def test_the_cure_of_a_short_window_cures_it(left: Seen) -> None:
    """By hand, but for the streams: an agent that outlasts an outage, and one stream that it publishes to."""
    app = App("lasting")

    @app.agent("mars", retry=RetryPolicy(max=30, attempts=1000))
    async def derive(notification: Notification[Any]) -> Notify:
        return Notify("short", notification.identifier)

    scope = structs.replace(left.facts.scope, agents=(derive,), app="lasting")
    facts = structs.replace(left.facts, scope=scope)
    (short, *_) = [one for one in judged(facts).results["JS009"].findings if "derive" in one.found]
    assert short.stream == "SHORT", "it publishes to no other stream"
    window = re.search(r"streams.SHORT.duplicate_window: (\w+)", short.cure)
    assert window
    longer = Duration.parse(window[1]) * SECOND

    def with_window(window: int, **config: Any) -> Seen:
        stream = left.facts.streams["SHORT"]
        changed = StreamConfig({**stream.config, "duplicate_window": window, **config})
        streams = {**left.facts.streams, "SHORT": structs.replace(stream, config=changed)}
        return judged(structs.replace(facts, after=structs.replace(facts.after, streams=streams)))

    assert with_window(longer).state("JS009") is State.PASS
    refused = with_window(120 * SECOND, max_age=3600 * SECOND).findings("JS009")["SHORT"].cure
    assert "A window of 10h cannot be set, because SHORT has a shorter max_age." in refused


def test_which_agents_publish_is_what_they_say() -> None:
    assert [agent.name for agent in patient.agents if outputs.publishes(agent)] == ["derive", "soon"]


def test_an_app_that_is_not_named_is_not_passed(left: Seen) -> None:
    unnamed = structs.replace(left.facts, unknown={**left.facts.unknown, "agents": "which?"}, scope=no_agents(left))
    assert judged(unnamed).state("JS032") is State.SKIP


def no_agents(left: Seen) -> Any:
    return structs.replace(left.facts.scope, agents=None)


def test_dead_letters(left: Seen) -> None:
    (dead_letters,) = left.results["JS057"].findings
    assert dead_letters.found == "1 dead letters"
    assert dead_letters.cure.startswith("`aviso-workers dead-letters ls --app field --agent index`")


def test_an_agent_whose_deliveries_are_limited(left: Seen) -> None:
    assert left.found("JS059") == {"MARS > field__index": "max_deliver 1"}


def test_without_either_there_is_nothing_to_say(left: Seen) -> None:
    """By hand: that a server has none shows in test_stories."""
    after = structs.replace(left.facts.after, consumers={})
    clean = judged(structs.replace(left.facts, dead_letters={}, after=after))
    assert (clean.state("JS057"), clean.state("JS059")) == (State.PASS, State.PASS)


def back_up(directory: Path, stream: str, *, age: timedelta = timedelta()) -> Path:
    """The files of a backup of a nats-server 2.15, as the nats CLI lays them out."""
    (directory / stream).mkdir(parents=True)
    description = directory / stream / "backup.json"
    counts = dict.fromkeys(("messages", "bytes", "first_seq", "last_seq", "consumer_count"), 0)
    state = {**counts, "first_ts": "0001-01-01T00:00:00Z", "last_ts": "0001-01-01T00:00:00Z"}
    description.write_text(json.dumps({"config": {"name": stream}, "state": state}))
    (directory / stream / "stream.arc.s2").write_bytes(b"...")
    made = time.time() - age.total_seconds()
    os.utime(description, (made, made))
    return directory / stream


def test_backups(left: Seen, tmp_path: Path) -> None:
    assert left.state("JS046") is State.SKIP
    assert left.results["JS046"].findings[0].found == "the directory of backups is not known: give --backups DIRECTORY"
    old = back_up(tmp_path / "old", "MARS", age=timedelta(days=3))
    back_up(tmp_path / "new", "LONG")
    (tmp_path / "broken-off").mkdir()
    (tmp_path / "broken-off" / "backup.json").write_text('{"config": {"name": "SHORT"}, "state": {}}')
    seen = examined(left.facts.config, backups=tmp_path)
    assert seen.found("JS046") == {"MARS": f"{old} is 3 days old", "SHORT": f"no backup in {tmp_path}"}
    for stream in ("MARS", "SHORT"):
        back_up(tmp_path / "now", stream)
    seen = examined(left.facts.config, backups=tmp_path)
    assert seen.state("JS046") is State.PASS
    older = structs.replace(seen.facts, server=structs.replace(seen.facts.server, ver="2.14.3"))  # none is here
    assert (
        judged(older)
        .found("JS046")["MARS"]
        .endswith("was made by nats-server 2.15 or newer, which 2.14.3 cannot restore")
    )


def configured(left: Seen, **jetstream: Any) -> Config:
    backend = left.facts.config.notification_backend
    changed = structs.replace(backend, jetstream=structs.replace(backend.jetstream, **jetstream))
    given = {f"notification_backend.jetstream.{key}": "config.yaml:1" for key in jetstream}
    return structs.replace(left.facts.config, notification_backend=changed, origins=given)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"enable_auto_reconnect": False}, ["false"]),
        ({"max_reconnect_attempts": 3, "reconnect_delay_ms": 1000}, ["workers give up after 3 s"]),
        ({"publish_deadline_seconds": 5.0}, ["5 s"]),
    ],
)
def test_workers_that_give_up_during_an_election(left: Seen, settings: dict[str, Any], found: list[str]) -> None:
    seen = examined(configured(left, **settings))
    assert [finding.found for finding in seen.results["JS048"].findings] == found


def test_a_connection_that_anybody_can_use_and_read(left: Seen, tmp_path: Path) -> None:
    """By hand, but for the server: no address but the loopback is there to connect to."""
    in_production = structs.replace(left.facts, scope=structs.replace(left.facts.scope, production=True))

    def found(url: str, *, shares_inbox: bool = False, **settings: Any) -> list[str]:
        loaded = write(tmp_path / "config.yaml", url, **settings)
        judgement = judged(structs.replace(in_production, config=loaded, shares_inbox=shares_inbox))
        return [finding.found for finding in judgement.results["JS047"].findings]

    assert found("nats://127.0.0.1:4222") == ["nats://127.0.0.1:4222 without a user"]
    assert found("nats://n1.example.org:4222", user="alice", password="hush") == [
        "nats://n1.example.org:4222 without TLS"
    ]
    assert found("nats://alice:hush@n1.example.org:4222") == ["nats://***@n1.example.org:4222 without TLS"]
    (tmp_path / "worker.nk").write_text("a seed")
    assert found("tls://n1.example.org:4222", nkey_seed_file=str(tmp_path / "worker.nk")) == []
    assert found("tls://alice:hush@n1.example.org:4222", shares_inbox=True) == [
        "answers go to _INBOX, where other users of the account hear them"
    ]


def credentials(path: Path, **claims: int) -> str:
    """A .creds file, as far as anybody reads it who does not know the account's key."""
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {"sub": "U...", **claims}, {}]
    jwt = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    path.write_text(f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n")
    return str(path)


def test_credentials_that_expire(left: Seen, tmp_path: Path) -> None:
    """By hand, but for the file: user JWTs need an operator."""

    def judgement(file: str) -> tuple[State, list[str]]:
        seen = judged(structs.replace(left.facts, config=configured(left, credentials_file=file)))
        return seen.state("JS060"), [finding.found for finding in seen.results["JS060"].findings]

    def expiring_in(**delta: int) -> str:
        expires = datetime.now(UTC) + timedelta(**delta)
        return credentials(tmp_path / "worker.creds", exp=int(expires.timestamp()))

    assert left.state("JS060") is State.PASS
    assert judgement(credentials(tmp_path / "worker.creds"))[0] is State.PASS
    assert judgement(expiring_in(days=90))[0] is State.PASS
    assert judgement(expiring_in(days=3))[0] is State.WARN
    assert judgement(expiring_in(days=-1))[0] is State.FAIL
    (tmp_path / "other").write_text("nothing of that kind")
    assert judgement(str(tmp_path / "other")) == (
        State.SKIP,
        [f"{tmp_path / 'other'} has no readable user JWT"],
    )
