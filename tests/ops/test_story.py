"""The story of a notification in each of its lives, on a real server."""

from __future__ import annotations

import sys
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import msgspec
import pytest

from aviso_workers import App, Notification, Notify, RetryPolicy, Unavailable, Window, Windowing
from aviso_workers.aviso.literals import time_text
from aviso_workers.aviso.positions import Position
from aviso_workers.errors import DeniedError, NotFoundError
from aviso_workers.events import Events
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import agent_control, agent_report, audit, aviso_admin, maintenance, snapshots, story
from aviso_workers.ops.agent_control import AgentConsumer
from aviso_workers.ops.audit import AffectedLetters, Audit, Operator
from aviso_workers.ops.dead_letters import Selection, StoredDeadLetters
from aviso_workers.ops.story import Story
from aviso_workers.server import NatsServer
from aviso_workers.state import own_streams
from aviso_workers.state.audit_records import RETURNED
from aviso_workers.state.own_streams import AUDIT, DEAD_LETTERS, RETRIES
from tests.contract.settings import app_config, mars
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

ANNA = "anna@desk"


class Broken:
    """Whether the handlers fail."""

    now = True


@pytest.fixture
def app(nats_server: NatsServer) -> App:
    return App("field", config=app_config("jetstream", nats_server.url))


async def told(app: App, name: str) -> Story:
    """The story of a notification."""
    admin = app.session.admin
    before, now = await snapshots.take(admin), await snapshots.take(admin)
    agents = await agent_report.of_server(admin, app.config, now, before)
    return await story.of(admin, app.config, name, agents, now)


async def fates(app: App, name: str) -> dict[str, tuple[str, str]]:
    """What has become of a notification, by agent."""
    found = (await told(app, name)).fates
    return {each.agent: (each.state, ": ".join(filter(None, (each.why, each.error)))) for each in found}


async def reported(app: App, server: NatsServer, name: str) -> tuple[list[str], Any]:
    """The lines of `report notification`, and its JSON."""
    config = str(app_config("jetstream", server.url))
    command = [sys.executable, "-m", "aviso_workers", "report", "notification", name, "--config", config]
    text, document = [(await anyio.run_process([*command, *more])).stdout.decode() for more in ([], ["--json"])]
    return text.splitlines(), msgspec.json.decode(document)


def happened(of: Story) -> list[tuple[str, str]]:
    """Whose each event is, and what they did; checked to be in order of time, with what it waits for at the end."""
    known = [each.time for each in of.events if each.time is not None]
    assert known == sorted(known)
    assert [each.time for each in of.events][: len(known)] == known
    return [(each.whose, each.told) for each in of.events]


async def until(app: App, name: str, agent: str, state: str) -> str:
    """Why it is so, once a notification has come to this state at an agent."""
    found: dict[str, tuple[str, str]] = {}
    try:
        with anyio.fail_after(PATIENCE_SECONDS):
            while (found := await fates(app, name)).get(agent, ("", ""))[0] != state:  # noqa: ASYNC110
                await anyio.sleep(0.1)  # no server announces it
    except TimeoutError:
        pytest.fail(f"{name} has not come to {state} at {agent}: {found}")
    return found[agent][1]


async def publish(app: App, *steps: int) -> None:
    await app.notify_many(Notify("mars", mars(step=step, expver=f"{step:04}"), {}) for step in steps)


async def letters(app: App, *, erase: bool = False) -> None:
    """Hand all dead letters back, or erase them, as Anna does."""
    admin = app.session.admin
    stored = StoredDeadLetters(admin, events=Events(), operator=Operator(ANNA, Audit(admin, app.config)))
    async with aclosing(stored.select(Selection())) as found:
        chosen = [each async for each in found]
    assert chosen
    await (stored.drop if erase else stored.retry)(*chosen)


@pytest.mark.slow
async def test_what_is_handled_waits_and_is_not_for_an_agent(app: App) -> None:
    async with App("publisher", config=app.config) as publisher:
        await publish(publisher, 1)

    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    @app.agent("mars", where={"class": "rd"})
    async def research(notification: Notification[Any]) -> None: ...

    @app.agent("mars", start="new")
    async def alert(notification: Notification[Any]) -> None: ...

    async with app.running():
        assert "no dead letter of it is kept" in await until(app, "mars@1", "index", "handled")
        assert "it reads mars.rd." in await until(app, "mars@1", "research", "not for it")
        assert (await until(app, "mars@1", "alert", "settled")).startswith(
            "it is older than the agent's consumer, which begins at 2: "
        )
        found = await told(app, "mars@1")
        assert found.sentence.startswith("Handled or passed over by field/alert: it is older than ")
        assert (found.also, found.tone) == ("Handled at field/index.", ""), "no green where something is not known"
        assert happened(found) == [("a publisher", "published it")]
        await agent_control.pause(app.session.admin, AgentConsumer(app="field", agent="index", stream="MARS"))
        await publish(app, 2)
        assert "the agent is paused: until it is resumed" in await until(app, "mars@2", "index", "waits")
        await until(app, "mars@2", "alert", "handled")
        found = await told(app, "mars@2")
        assert found.sentence.startswith("Waits at field/index: it has come to 1, 1 wait; the agent is paused")
        assert (found.also, found.tone, found.fates[1].cure) == ("Handled at field/alert.", "warn", "resume")
        assert happened(found)[-1] == ("field/index", "waits to be delivered")


async def test_what_all_agents_have_handled_is_said_in_a_sentence(app: App) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    @app.agent("mars")
    async def plots(notification: Notification[Any]) -> None: ...

    @app.agent("mars", where={"class": "rd"})
    async def research(notification: Notification[Any]) -> None: ...

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "handled")
        await until(app, "mars@1", "plots", "handled")
        found = await told(app, "mars@1")
        assert (found.sentence, found.also, found.tone) == ("Handled by all 2 agents that read it.", "", "good")


@pytest.mark.slow
async def test_what_is_blocked_and_what_waits_behind_it(app: App) -> None:
    @app.agent("mars", order_by=["class"], retry=RetryPolicy(first=0.02, attempts=None))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async with app.running():
        await publish(app, 1, 2)
        assert "ValueError: no such field" in await until(app, "mars@1", "index", "blocked")
        behind = await until(app, "mars@2", "index", "waits behind")
        assert behind == "MARS@1 of the same key, od, at which the agent is blocked: ValueError: no such field"
        found = await told(app, "mars@2")
        said = "Waits at field/index behind MARS@1 of the same key, od, at which the agent is blocked."
        assert (found.sentence, found.tone, found.fates[0].cure) == (said, "warn", "decide")
        assert happened(found) == [("a publisher", "published it"), ("field/index", "waits behind one of its key")]


async def test_what_is_tried_again(app: App) -> None:
    @app.agent("mars", retry=RetryPolicy(first=60, attempts=3, jitter=0))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async with app.running():
        await publish(app, 1)
        why = await until(app, "mars@1", "index", "retrying")
        assert why.startswith("has failed 1 time, and is tried again at 20")
        assert why.endswith("Z: ValueError: no such field")


async def test_what_waits_for_what_is_away(app: App) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None:
        raise Unavailable("the archive is maintained")

    async with app.running():
        await publish(app, 1)
        why = await until(app, "mars@1", "index", "away")
        assert why == "what the agent needs is away, and no attempt is used: Unavailable: the archive is maintained"


@pytest.mark.slow
async def test_a_dead_letter_is_handed_back_and_handled_or_dead_again(app: App, nats_server: NatsServer) -> None:
    broken = Broken()

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if broken.now:
            raise ValueError("no such field")

    agent = AgentConsumer(app="field", agent="index", stream="MARS")
    async with app.running():
        await publish(app, 1)
        first = await until(app, "mars@1", "index", "dead letter")
        assert first == "dead letter 1, attempts_exhausted after 1 attempt: ValueError: no such field"
        found = await told(app, "mars@1")
        assert found.sentence == f"Not handled by field/index: it is {first.partition(':')[0]}."
        assert (found.tone, found.events[-1].dead_letter) == ("bad", ("field", 1))
        await letters(app)
        assert (await until(app, "mars@1", "index", "dead letter")).startswith("dead letter 2 again, ")
        await agent_control.pause(app.session.admin, agent)
        await letters(app)
        waits = await until(app, "mars@1", "index", "handed back")
        assert f" by {ANNA}, and waits: its agent is paused until it is resumed" in waits
        broken.now = False
        await agent_control.resume(app.session.admin, agent)
        handled = await until(app, "mars@1", "index", "handled")
        assert handled.endswith(f" by {ANNA}, and settled since; it has not become a dead letter again")
        found = await told(app, "mars@1")
        assert (found.sentence, found.tone) == ("Handled by field/index, which alone reads it.", "good")
        assert happened(found) == [
            ("a publisher", "published it"),
            ("field/index", "made it dead letter 1: attempts_exhausted after 1 attempt"),
            (ANNA, "handed dead letter 1 back to field/index"),
            ("field/index", "made it dead letter 2: attempts_exhausted after 1 attempt"),
            (ANNA, "handed dead letter 2 back to field/index"),
        ]
        assert [each.dead_letter for each in found.events] == [None] * 5, "none of them is kept any more"
        lines, document = await reported(app, nats_server, "mars@1")
        assert lines[1] == document["sentence"] == found.sentence
        assert [(each["whose"], each["told"]) for each in document["events"]] == happened(found)
        assert document["events"][1]["error"] == "ValueError: no such field"
        assert [line.split()[1:5] for line in lines if "handed dead letter 2" in line] == [
            [ANNA, "handed", "dead", "letter"]
        ]


async def test_a_dead_letter_that_was_erased_is_not_handled(app: App) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "1":
            raise ValueError("no such field")

    async with app.running():
        await publish(app, 1, 2)
        await until(app, "mars@1", "index", "dead letter")
        await letters(app, erase=True)
        assert "its dead letter 1 was erased at 20" in await until(app, "mars@1", "index", "erased")
        found = await told(app, "mars@1")
        assert found.sentence.startswith("Never handled by field/index: its dead letter 1 was erased at 20")
        assert found.sentence.endswith(f" by {ANNA}.")
        assert (found.tone, happened(found)[-1]) == ("gone", (ANNA, "erased dead letter 1 of field/index"))
        await until(app, "mars@2", "index", "handled")


async def test_a_dead_letter_of_a_stream_that_was_made_again_is_of_no_new_notification(app: App) -> None:
    broken = Broken()

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if broken.now:
            raise ValueError("no such field")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        broken.now = False
        await app.session.admin.delete_stream("MARS")
        await publish(app, 1)
        await until(app, "mars@1", "index", "handled")
        assert happened(await told(app, "mars@1")) == [("a publisher", "published it")]


async def test_a_dead_letter_whose_erasing_cannot_be_recorded_stays(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async def refused(*_: object) -> None:
        raise NotFoundError("the stream of the audit is not to be had")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        monkeypatch.setattr(audit.Audit, "erases", refused)
        with pytest.raises(NotFoundError):
            await letters(app, erase=True)
        await until(app, "mars@1", "index", "dead letter")


async def test_a_dead_letter_that_could_not_be_erased_is_not_told_as_erased(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async def denied(*_: object, **__: object) -> None:
        raise DeniedError("STREAM.MSG.DELETE.aviso_workers_dead_letters__field: permissions violation")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        monkeypatch.setattr(app.session.admin, "delete_message", denied)
        with pytest.raises(DeniedError):
            await letters(app, erase=True)
        found = await told(app, "mars@1")
        assert happened(found)[-1] == (ANNA, "would have erased dead letter 1 of field/index")
        assert found.fates[0].state == "dead letter"


async def test_one_that_was_handed_back_but_not_deleted_is_handled_whoever_erases_its_dead_letter(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken()

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if broken.now:
            raise ValueError("no such field")

    async def denied(*_: object, **__: object) -> None:
        raise DeniedError("STREAM.MSG.DELETE.aviso_workers_dead_letters__field: permissions violation")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        broken.now = False
        with monkeypatch.context() as patched:
            patched.setattr(app.session.admin, "delete_message", denied)
            with pytest.raises(DeniedError, match="they are handed back"):
                await letters(app)
        await until(app, "mars@1", "index", "handled")
        await letters(app, erase=True)
        assert await until(app, "mars@1", "index", "handled")


@pytest.mark.parametrize("of", [DEAD_LETTERS, AUDIT])
async def test_what_may_have_been_a_dead_letter_that_is_not_kept_is_not_said_to_be_handled(app: App, of: str) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "1":
            raise ValueError("no such field")

    async with app.running():
        admin, stream = app.session.admin, own_streams.of_app(DEAD_LETTERS, "field")
        await publish(app, 1, 2)
        await until(app, "mars@1", "index", "dead letter")
        if of == AUDIT:
            await letters(app, erase=True)
            await admin.delete_stream(AUDIT)
            said = "dead letters of field were removed, of which it may have been one, and the record of that is not"
        else:
            plan = await maintenance.plan_purge(admin, stream)
            async with Audit(admin, app.config, warn=pytest.fail).recorded(ANNA, "purge-stream", stream) as result:
                await maintenance.purge(admin, plan)
                result.affected = await maintenance.purged(admin, plan)
            said = f"{ANNA}, by command purged dead letters of field at 20"
        for name in ("mars@1", "mars@2"):
            assert said in await until(app, name, "index", "settled")


async def test_a_record_that_may_not_be_read_is_not_said_to_be_gone(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async def denied(*_: object, **__: object) -> None:
        raise DeniedError("STREAM.INFO.aviso_workers_audit: permissions violation")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        await letters(app, erase=True)
        monkeypatch.setattr(audit, "of_notification", denied)
        why = await until(app, "mars@1", "index", "unknown")
        assert "the server denies our user STREAM.INFO.aviso_workers_audit" in why
        assert "is not there any more" not in why


async def test_a_stream_of_another_name_hides_no_dead_letters(app: App) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    async with app.running():
        await app.session.admin.create_stream(
            StreamSpec(name=own_streams.of_app(DEAD_LETTERS, "\u00e9t\u00e9"), subjects=("odd",))
        )
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        await letters(app)


async def test_one_that_was_handed_back_and_whose_copy_is_gone_is_not_said_to_be_handled(app: App) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    agent = AgentConsumer(app="field", agent="index", stream="MARS")
    async with app.running():
        admin = app.session.admin
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        await agent_control.pause(admin, agent)
        await handed_back_and_purged(app)
        why = await until(app, "mars@1", "index", "settled")
        assert f"it was handed back by {ANNA}, by command at 20" in why


@pytest.mark.slow
async def test_what_waits_to_be_stored_later_is_found_by_its_values_and_named_by_its_message_id(
    app: App, nats_server: NatsServer
) -> None:
    @app.agent("mars")
    async def index(notification: Notification[Any]) -> None: ...

    @app.agent("mars", where={"class": "rd"})
    async def research(notification: Notification[Any]) -> None: ...

    async with app.running():
        due = datetime.now(UTC) + timedelta(hours=2)
        await app.notify("mars", mars(step=6), {}, due=due, message_id="forecast 6")
        await app.notify("mars", mars(step=7), {}, due=due, message_id="forecast 7")
        search = await aviso_admin.search(app.session.admin, app.config, "mars step=6")
        (waits,) = search.delayed
        assert (search.count, search.unsure, waits.name, waits.due) == (0, "", "MARS@delayed:forecast 6", due)
        why = await until(app, waits.name, "index", "delayed")
        assert why == f"it is stored in MARS at {time_text(due)}, and not before"
        found = await told(app, "mars@delayed:forecast 6")
        assert (found.sentence, found.tone) == (f"Not given to field/index yet: {why}.", "warn")
        assert (found.identifier["step"], found.fates[1].state) == ("6", "not for it")
        lines, document = await reported(app, nats_server, waits.name)
        assert (lines[1], document["name"]) == (found.sentence, waits.name)
        assert happened(found) == [("a publisher", "published it"), ("field/index", "waits until it is due")]
        with pytest.raises(NotFoundError, match="it was stored, was cancelled, or was never published"):
            await told(app, "mars@delayed:forecast 8")


@pytest.mark.slow
async def test_one_that_a_newer_one_of_its_subject_has_replaced_says_which(app: App, nats_server: NatsServer) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        raise ValueError("no such field")

    @app.agent("mars")
    async def plots(notification: Notification[Any]) -> None: ...

    @app.agent("mars")
    async def archive(notification: Notification[Any]) -> None: ...

    async with app.running():
        await agent_control.pause(app.session.admin, AgentConsumer(app="field", agent="archive", stream="MARS"))
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        await until(app, "mars@1", "plots", "handled")
        await publish(app, 1)
        replaced = "MARS@2, a newer one of its subject, has taken its place: the stream keeps 1"
        assert await until(app, "mars@1", "archive", "never given") == replaced
        assert (await fates(app, "mars@1"))["plots"][0] == "settled", "it may have been passed over"
        found = await told(app, "mars@1")
        assert (found.absent, found.identifier["step"]) == (replaced, "1"), "as its dead letter has it"
        assert (await reported(app, nats_server, "mars@1"))[1]["absent"] == replaced
        assert found.sentence.startswith("Not handled by field/index: it is dead letter 1, ")


async def test_what_counts_in_a_window(app: App) -> None:
    hourly = Windowing[int, Any](
        size="1h", fold=lambda total, _: total + 1, initial=0, time=lambda _: datetime.now(UTC)
    )

    @app.agent("mars", window=hourly)
    async def count(window: Window[int]) -> None: ...

    async with app.running():
        await publish(app, 1)
        assert "it counts in the windows of the agent" in await until(app, "mars@1", "count", "counted")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mars@1", "the stream MARS begins at 2, and what was before that has expired, made room, or was purged"),
        ("mars@3", "it was deleted or erased, has expired, or has made room for newer ones, since the stream keeps 1"),
        ("mars@9", "the stream MARS ends at 4, and has never stored it"),
    ],
)
async def test_what_is_not_stored_says_why_as_far_as_that_is_known(app: App, name: str, why: str) -> None:
    async with app:
        await publish(app, 1, 2, 3, 3)  # the last one replaces the one before, of its subject
        await app.session.admin.purge_stream("MARS", subject=(await told(app, "mars@1")).message.subject)
        with pytest.raises(NotFoundError) as raised:
            await fates(app, name)
    assert why in str(raised.value)


@pytest.mark.slow
async def test_what_an_agent_was_reset_past_is_passed_over(app: App) -> None:
    @app.agent("mars", concurrency=1)
    async def index(notification: Notification[Any]) -> None: ...

    agent = AgentConsumer(app="field", agent="index", stream="MARS")
    async with app.running():
        admin = app.session.admin
        await publish(app, 1)
        await until(app, "mars@1", "index", "handled")
        await agent_control.pause(admin, agent)
        await publish(app, 2, 3)
        await reset(app, agent, to=4)
        passed = await until(app, "mars@2", "index", "passed over")
        assert passed.startswith(f"its consumer was reset past it by {ANNA}, by command at 20")
        assert (await fates(app, "mars@1"))["index"][0] == "handled", "it was settled before"
        assert (f"{ANNA}, by command", "reset field/index past it") in happened(await told(app, "mars@2"))
        await reset(app, agent, to=2)
        await agent_control.resume(admin, agent)
        await until(app, "mars@3", "index", "handled")


async def handed_back_and_purged(app: App) -> None:
    """Hand dead letter 1 back, as a command records it, and remove its copy."""
    admin, affected = app.session.admin, AffectedLetters()
    affected.note(await StoredDeadLetters(admin, events=Events()).get(1, "field"))
    async with Audit(admin, app.config, warn=pytest.fail).recorded(ANNA, "retry", "dead letters") as result:
        await letters(app)
        result.affected = affected.records(RETURNED)
    await admin.purge_stream(own_streams.of_app(RETRIES, "field"))


async def test_what_a_reset_has_given_again_is_handled_although_its_dead_letter_is_kept(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken()

    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def index(notification: Notification[Any]) -> None:
        if broken.now:
            raise ValueError("no such field")

    async with app.running():
        await publish(app, 1)
        await until(app, "mars@1", "index", "dead letter")
        broken.now = False
        await reset(app, AgentConsumer(app="field", agent="index", stream="MARS"), to=1)
        with monkeypatch.context() as patched:
            patched.setattr(story, "ONCE", timedelta(0))
            why = await until(app, "mars@1", "index", "handled")
        assert why.endswith("; dead letter 1 is of the time before")
        assert happened(await told(app, "mars@1"))[-1] == (f"{ANNA}, by command", "reset field/index to before it")
        await until(app, "mars@1", "index", "dead letter")  # which so soon after it may be of the time since
        await agent_control.pause(app.session.admin, AgentConsumer(app="field", agent="index", stream="MARS"))
        await handed_back_and_purged(app)
        monkeypatch.setattr(story, "ONCE", timedelta(0))
        assert "it was handed back by" in await until(app, "mars@1", "index", "settled"), "after the reset"


async def reset(app: App, agent: AgentConsumer, *, to: int) -> None:
    admin = app.session.admin
    plan = await agent_control.plan_reset(admin, agent, Position(sequence=to))
    async with Audit(admin, app.config, warn=pytest.fail).recorded(ANNA, "reset-agent", agent.name) as result:
        await agent_control.reset(admin, plan)
        result.affected = plan.affected


async def test_what_was_purged_says_by_whom(app: App) -> None:
    async with app:
        admin = app.session.admin
        await publish(app, 1, 2)
        plan = await maintenance.plan_purge(admin, "MARS", before=2)
        async with Audit(admin, app.config, warn=pytest.fail).recorded(ANNA, "purge-stream", "MARS") as result:
            await maintenance.purge(admin, plan)
            result.affected = await maintenance.purged(admin, plan)
        with pytest.raises(NotFoundError, match=f"it is not stored any more: purged by {ANNA}, by command at 20"):
            await fates(app, "mars@1")
        assert (await told(app, "mars@2")).message.sequence == 2
