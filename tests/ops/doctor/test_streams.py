"""Streams that are broken each in one way, beside one of which the same holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from msgspec import structs

from aviso_workers import App
from aviso_workers.backends import Administration
from aviso_workers.config import Config
from aviso_workers.jetstream.info import Lost, SourceInfo
from aviso_workers.jetstream.metadata import FENCED, SET_MARK, UNFINISHED
from aviso_workers.ops.doctor import State
from aviso_workers.ops.mirrors import PROMOTED
from aviso_workers.state import dead_letter_records, own_streams
from aviso_workers.state.consumer_records import ConsumerRecord
from tests.ops.doctor.conftest import (
    SECOND,
    Seen,
    add_consumer,
    add_stream,
    changed,
    examined,
    judged,
    publish,
    served,
    write,
)
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field")

DAY = 86_400 * SECOND


async def break_streams(loaded: Config) -> None:
    async with App("breaking", config=loaded) as app:
        server = app.session.admin.administration()
        await add_stream(server, "UNLIMITED")
        await add_stream(server, "LIMITED", max_bytes=10**6, max_age=DAY)
        await add_stream(server, "FEW", max_msgs=10)
        await add_stream(server, DEAD_LETTERS, subjects=[f"{dead_letter_records.SUBJECT}.>"])
        await add_stream(
            server, "KV_state__table__index", subjects=["$KV.state__table__index.>"], max_msgs_per_subject=1
        )
        await add_stream(server, "MEMORY", storage="memory", max_age=DAY)
        for name, count in {"FULL": 100, "FILLING": 85, "ROOMY": 10, "ROLLING": 100}.items():
            discard = "old" if name == "ROLLING" else "new"
            await add_stream(server, name, max_msgs=100, discard=discard)
            await publish(server, name, count)
        await add_stream(server, "HEAVY", max_bytes=10_000, discard="new")
        await publish(server, "HEAVY", 1, size=9_700)
        await add_stream(server, "HALF", metadata={UNFINISHED: "true"})
        await add_stream(server, "HALF_OF_SET", metadata={UNFINISHED: f"whole, {SET_MARK}0123"})
        await add_stream(server, "UNHEARD", retention="interest")
        await add_stream(server, "HEARD", retention="interest")
        await add_consumer(server, "HEARD", "reader")
        await add_stream(server, "CRITICAL", metadata={"critical": "true"}, deny_delete=True)
        await add_stream(server, "GUARDED", metadata={"critical": "true"}, deny_delete=True, deny_purge=True)
        await add_stream(server, "KEPT_PEOPLE", metadata={"pii": "true"}, deny_delete=True)
        await add_stream(server, "PEOPLE", metadata={"pii": "true"})
        await add_gaps(server)
        await add_stream(server, "mirrored", subjects=None, mirror={"name": "LIMITED"})
        far = {"name": "FAR", "external": {"api": "$JS.nowhere.API"}}
        await add_stream(server, "ORPHAN", subjects=None, sources=[far])
        await add_stream(server, "MARS", subjects=["mars.>"], max_msgs=7)
        await add_stream(server, "DECLARED", max_msgs=6)
        await add_stream(server, "DISSEMINATION", subjects=["dissemination.>"], max_msgs=1000)
        await add_stream(server, "TAKER", subjects=["taken.*"])
        await add_stream(server, "PROMOTED", metadata={PROMOTED: "$JS.API LIMITED 0"})
        await add_stream(server, "FORMER", metadata={FENCED: "former.>"})
        await add_stream(server, "FOLLOWER", metadata={PROMOTED: "$JS.API FORMER 0"})
        await add_mirror_of_another_history(server)


async def add_mirror_of_another_history(server: Administration) -> None:
    await add_stream(server, "REPLACED")
    await add_stream(server, "OLDER", subjects=None, mirror={"name": "REPLACED"})
    await publish(server, "REPLACED", 3)
    with anyio.fail_after(PATIENCE_SECONDS):
        while (await server.api("STREAM.INFO.OLDER"))["state"]["last_seq"] < 3:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    await server.api("STREAM.DELETE.REPLACED")
    await add_stream(server, "REPLACED")
    await publish(server, "REPLACED", 3)


async def add_gaps(server: Administration) -> None:
    await add_stream(server, "GAPPY")
    await publish(server, "GAPPY", 5)
    await server.api("STREAM.MSG.DELETE.GAPPY", {"seq": 3})
    await add_stream(server, "WHOLE")
    await publish(server, "WHOLE", 5)
    await server.api("STREAM.MSG.DELETE.WHOLE", {"seq": 1})
    await add_stream(server, "EVICTING", max_msgs_per_subject=1)
    await publish(server, "EVICTING", 5, key="same")
    await add_stream(server, "HELD_OPEN", max_msgs_per_subject=1, allow_batched=True)
    await publish(server, "HELD_OPEN", 1, key="old")
    for _ in range(10_100):
        server.send("HELD_OPEN.new", b"")
    await publish(server, "HELD_OPEN", 1, key="new")


@pytest.fixture(scope="module")
def broken(directory: Path) -> Iterator[Seen]:
    with served(directory) as (server, monitor):
        event_types = ("mars", "dissemination", "taken")
        declared = {name: {"subjects": [f"{name}.>"], "max_msgs": 5} for name in ("DECLARED", "NOT_MADE")}
        loaded = write(
            directory / "config.yaml", server.url, event_types=event_types, streams=declared, max_messages=1000
        )
        anyio.run(break_streams, loaded)
        yield examined(loaded, monitors=(monitor,), production=True)


@pytest.mark.covers("001-33", "002-79")
def test_a_stream_without_a_limit_of_bytes(broken: Seen) -> None:
    found = broken.found("JS001")
    assert found["UNLIMITED"] == "no max_bytes, 0 bytes stored"
    assert not {"LIMITED", "KV_state__table__index"} & found.keys()
    cures = {where: finding.cure for where, finding in broken.findings("JS001").items()}
    assert cures["UNLIMITED"] == (
        "Set streams.UNLIMITED.max_bytes in the configuration, then run `aviso-workers streams apply`."
    )
    assert cures["MARS"].startswith("Set notification_backend.jetstream.max_bytes, or the event type's ")
    assert "workers.dead_letters.max_bytes" in cures[DEAD_LETTERS]


def test_a_stream_that_forgets_nothing(broken: Seen) -> None:
    found = broken.found("JS002")
    assert found["UNLIMITED"] == "neither max_age nor max_msgs"
    assert not {"LIMITED", "FEW", "KV_state__table__index", DEAD_LETTERS} & found.keys()


@pytest.mark.covers("001-34", "002-80")
def test_a_stream_of_one_copy(broken: Seen) -> None:
    assert broken.found("JS003")["LIMITED"] == "num_replicas 1"  # three copies: test_cluster
    cures = {where: finding.cure for where, finding in broken.findings("JS003").items()}
    assert cures["LIMITED"].startswith("Set streams.LIMITED.num_replicas: 3")
    assert cures[DEAD_LETTERS].endswith(f"start a worker that uses {DEAD_LETTERS} (`aviso-workers worker MODULE:APP`).")
    assert (
        "uses KV_state__table__index (`aviso-workers worker MODULE:APP`). If no worker uses it"
        in cures["KV_state__table__index"]
    )


@pytest.mark.covers("001-35", "002-78")
def test_a_stream_in_memory(broken: Seen) -> None:
    assert broken.found("JS005") == {"MEMORY": "storage memory"}


@pytest.mark.covers("001-30", "004-40")
def test_a_stream_that_takes_nothing_more(broken: Seen) -> None:
    assert broken.found("JS006") == {
        "FULL": "100% of max_msgs 100 used",
        "FILLING": "85% of max_msgs 100 used",
        "HEAVY": "97% of max_bytes 10000 used",
    }
    states = {where: finding.state for where, finding in broken.findings("JS006").items()}
    assert states == {"FULL": State.FAIL, "HEAVY": State.FAIL, "FILLING": State.WARN}


def test_interest_of_nobody(broken: Seen) -> None:
    assert broken.found("JS008") == {"UNHEARD": "retention interest and no consumer"}


def test_a_critical_stream_that_can_be_emptied(broken: Seen) -> None:
    assert broken.found("JS010") == {"CRITICAL": "critical=true without deny_purge"}


def test_personal_data_that_cannot_be_erased(broken: Seen) -> None:
    assert broken.found("JS011") == {"KEPT_PEOPLE": "pii=true with deny_delete"}


def test_personal_data_in_plain_text(broken: Seen) -> None:
    (server,) = broken.facts.monitored
    found = f"pii=true, in plain text on the disk of {server.name}"
    assert broken.found("JS055") == {"KEPT_PEOPLE": found, "PEOPLE": found}


def test_a_stream_that_is_not_as_configured(broken: Seen) -> None:
    assert broken.found("JS013") == {
        "MARS": "event type mars: max_msgs: 7 -> 1000",
        "DECLARED": "streams.DECLARED: max_msgs: 6 -> 5",
    }


def test_a_stream_whose_storage_is_not_as_configured(broken: Seen) -> None:
    config = broken.facts.config.notification_backend
    memory = structs.replace(config, jetstream=structs.replace(config.jetstream, storage_type="memory"))
    other = examined(structs.replace(broken.facts.config, notification_backend=memory))
    assert other.findings("JS013")["DISSEMINATION"].state is State.FAIL
    assert "storage: file -> memory" in other.found("JS013")["DISSEMINATION"]


def test_an_event_type_whose_subjects_are_anothers(broken: Seen) -> None:
    assert broken.found("JS014") == {"TAKER": "has the subjects taken.*, which belong to event type taken"}


def test_a_configured_stream_that_was_not_created_yet_is_no_finding(broken: Seen) -> None:
    assert {"TAKEN", "NOT_MADE"} <= {plan.stream for plan in broken.facts.plans.values() if not plan.exists}
    assert broken.state("JS042") is State.PASS


def test_a_stream_that_an_agent_has_read_is_missing(broken: Seen) -> None:
    """By hand: the record of a worker. test_servers has streams that a server cannot read."""
    record = ConsumerRecord(
        stream_created=broken.facts.now, ack_floor=17, filter_subjects=("taken.>",), time=broken.facts.now
    )
    seen = judged(changed(broken.facts, records={("TAKEN", "field__index"): record}))
    assert seen.state("JS042") is State.FAIL
    assert seen.found("JS042") == {
        "TAKEN": "the stream of event type taken does not exist, and field__index has read it up to sequence 17"
    }
    removed = structs.replace(record, removed=True)
    assert judged(changed(broken.facts, records={("TAKEN", "field__index"): removed})).found("JS042") == {}
    unknown = judged(structs.replace(broken.facts, unknown={"records": "denied"}))
    assert unknown.state("JS042") is State.SKIP


def test_gaps(broken: Seen) -> None:
    assert broken.found("JS015") == {
        "GAPPY": "1 messages are missing between the first and the last",
        "HELD_OPEN": "10100 gaps between 2 messages",
    }


def test_a_promoted_mirror_whose_origin_lives_on(broken: Seen) -> None:
    assert broken.found("JS020").keys() == {"LIMITED"}
    assert broken.found("JS020")["LIMITED"].startswith("LIMITED is back and takes publishes")
    assert "`aviso-workers mirror fence LIMITED`" in broken.findings("JS020")["LIMITED"].cure


def test_an_origin_that_cannot_be_reached(broken: Seen) -> None:
    assert broken.found("JS019") == {"ORPHAN": "FAR was never reached"}
    assert "mirrored" in broken.facts.streams


def test_a_mirror_whose_origin_was_made_again(broken: Seen) -> None:
    assert broken.found("JS068").keys() == {"OLDER"}
    assert broken.found("JS068")["OLDER"].startswith("the origin REPLACED was recreated or restored from a")


def test_what_a_killed_restore_leaves(broken: Seen) -> None:
    assert broken.found("JS070").keys() == {"HALF", "HALF_OF_SET"}
    assert "backup restore --all" in broken.findings("JS070")["HALF_OF_SET"].cure


@pytest.mark.covers("001-31")
@pytest.mark.parametrize(
    ("origin", "found"),
    [
        (SourceInfo(name="LIMITED", active=40 * SECOND), "last contact with LIMITED 40 s ago"),
        (SourceInfo(name="LIMITED", active=0, error={"description": "no"}), "LIMITED: no"),
        (SourceInfo(name="LIMITED", active=0, lag=500), "500 behind LIMITED, and"),
    ],
)
def test_an_origin_that_was_lost_or_is_too_fast(broken: Seen, origin: SourceInfo, found: str) -> None:
    """By hand: a server says so after half a minute, or where it is slower than the test."""
    mirror = structs.replace(broken.facts.streams["mirrored"], mirror=origin)
    after = structs.replace(broken.facts.after, streams={**broken.facts.streams, "mirrored": mirror})
    assert judged(structs.replace(broken.facts, after=after)).found("JS019")["mirrored"].startswith(found)


def test_what_is_lost_on_the_disk(broken: Seen) -> None:
    """By hand: nats-server 2.15.0 shows damage as gaps, see test_damage."""
    assert broken.state("JS016") is State.PASS
    stream = broken.facts.streams["WHOLE"]
    lost = structs.replace(stream, lost=Lost(msgs=(4, 5), bytes=80))
    after = structs.replace(broken.facts.after, streams={"WHOLE": lost})
    assert judged(structs.replace(broken.facts, after=after)).found("JS016") == {"WHOLE": "2 messages, 80 bytes lost"}


def test_what_is_for_production_is_not_judged_elsewhere(broken: Seen) -> None:
    for_development = structs.replace(broken.facts.scope, production=False)
    seen = judged(structs.replace(broken.facts, scope=for_development))
    skipped = [code for code, result in seen.results.items() if result.check.production]
    assert {seen.state(code) for code in skipped} == {State.SKIP}
    assert [finding.found for finding in seen.results["JS003"].findings] == ["checked only with --production"]
