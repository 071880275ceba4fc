"""An agent that was renamed, or moved to another app, is not taken for a new one, and does not handle its stream again,
on either backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from aviso_workers import Agent, App, Notification, Router
from aviso_workers.backends.in_memory import InMemoryBackend
from aviso_workers.backends.jetstream import JetStreamBackend
from aviso_workers.errors import DeclarationError, DeniedError, NotFoundError, RefusedError
from aviso_workers.events import AgentDisturbed, AgentMoved, AgentStarted, FunctionsDiffer
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_control, agent_inventory
from aviso_workers.state import consumer_records, known_agents, own_streams
from aviso_workers.state.known_agents import KnownAgents
from aviso_workers.testing import Harness, harness
from tests.contract.settings import mars
from tests.waits import PATIENCE_SECONDS

RETRIES = own_streams.of_app(own_streams.RETRIES, "contract")

pytestmark = pytest.mark.anyio


class Deployment:
    """An app whose code changes: each of its workers is given the agents that its code has."""

    def __init__(self, t: Harness) -> None:
        self.t = t
        self.handled: list[tuple[str, str]] = []
        """Agent and step."""
        self.disturbed: list[AgentDisturbed] = []
        self.functions: list[FunctionsDiffer] = []
        t.app.events.listen(self.disturbed.append, AgentDisturbed)
        t.app.events.listen(self.functions.append, FunctionsDiffer)

    def agent(self, name: str, **options: Any) -> Agent[Any, Any]:
        async def handle(notification: Notification[Any]) -> None:
            self.handled.append((name, notification.identifier["step"]))

        return Router("deployed").agent("mars", name=name, **options)(handle)

    @asynccontextmanager
    async def worker(self, agent: Agent[Any, Any], *others: str) -> AsyncIterator[None]:
        """A worker that runs the agent, of code that declares others beside it, until the block is left."""
        session, stop = self.t.app.session, anyio.Event()
        known = KnownAgents(session.backend, app="contract", declared={agent.name, *others})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run_agent, agent, stop, known)
            yield
            stop.set()

    async def run(self, agent: Agent[Any, Any], *others: str) -> None:
        """Run a worker until the agent has handled everything."""
        started = anyio.Event()
        with self.t.app.events.heard_by(lambda event: started.set() if event.stream == "MARS" else None, AgentStarted):
            async with self.worker(agent, *others):
                with anyio.fail_after(PATIENCE_SECONDS):
                    await started.wait()
                    while (info := await self.t.app.session.consumer_info(agent)).num_pending or info.num_ack_pending:
                        await self.t.advance(0.05)

    async def refusal(self, agent: Agent[Any, Any], *others: str) -> str:
        """Run a worker until the agent says why it does not begin."""
        self.disturbed.clear()
        async with self.worker(agent, *others):
            with anyio.fail_after(PATIENCE_SECONDS):
                while not any(event.stream == "MARS" for event in self.disturbed):
                    await self.t.advance(0.05)
        return next(str(event.error) for event in self.disturbed if event.stream == "MARS")

    async def publish(self, *steps: int) -> None:
        for step in steps:
            await self.t.notify("mars", mars(step=step), {})

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """A worker of the agent `index`, which asks for notifications until the block is left."""
        async with self.worker(self.agent("index")):
            with anyio.fail_after(PATIENCE_SECONDS):
                while not (await self.t.app.session.admin.consumer_info("MARS", "contract__index")).num_waiting:
                    await self.t.advance(0.05)
            yield

    @asynccontextmanager
    async def other_app(self, name: str, agent: str, **options: Any) -> AsyncIterator[OtherApp]:
        """A worker of another app, which runs an agent of this name until the block is left."""
        app, stop, begun = OtherApp(name), anyio.Event(), anyio.Event()

        async def handle(notification: Notification[Any]) -> None:
            app.handled.append(notification.identifier["step"])

        handle.__qualname__ = options.pop("function", "") or handle.__qualname__
        app.agent("mars", name=agent, **options)(handle)
        app.events.listen(app.hear, AgentDisturbed)
        app.configure(self.t.app.config, opening=self.t.app._opening)
        async with app, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(app._work, stop, begun=begun))
            await self.until(begun.is_set)
            yield app
            stop.set()

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(PATIENCE_SECONDS):
            while not condition():
                await self.t.advance(0.05)


class OtherApp(App):
    """An app, what its agent has handled, and why the agent does not begin."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.handled: list[str] = []
        self.told: list[str] = []

    def hear(self, event: AgentDisturbed) -> None:
        if event.stream == "MARS":
            self.told.append(str(event.error))


@pytest.fixture
async def deployment(app: App, nats_url: str) -> AsyncIterator[Deployment]:
    async with harness(app, server=nats_url or None) as t:
        deployment = Deployment(t)
        await deployment.publish(0, 1)
        await deployment.run(deployment.agent("index"))
        assert deployment.handled == [("index", "0"), ("index", "1")]
        deployment.handled.clear()
        yield deployment


async def test_an_agent_that_may_be_a_renamed_one_does_not_begin(deployment: Deployment) -> None:
    refusal = await deployment.refusal(deployment.agent("index_field"))
    assert "agent index_field has never run, and agent index, which the code does not declare any more" in refusal
    assert "settled stream MARS with the same filter up to sequence 2" in refusal
    assert "name='index'" in refusal
    assert "`aviso-workers agents rename contract/index index_field`" in refusal
    assert "`aviso-workers agents rm contract/index`" in refusal
    assert deployment.handled == []


async def test_it_goes_on_under_its_former_name(deployment: Deployment) -> None:
    await deployment.refusal(deployment.agent("index_field"))
    await deployment.publish(2)
    await deployment.run(deployment.agent("index"))
    assert deployment.handled == [("index", "2")]


@pytest.mark.parametrize(("start", "steps"), [("new", []), ("all", ["0", "1", "2"]), (3, ["2"])])
async def test_it_begins_where_its_author_says(deployment: Deployment, start: str | int, steps: list[str]) -> None:
    await deployment.publish(2)
    await deployment.run(deployment.agent("index_field", start=start))
    assert deployment.handled == [("index_field", step) for step in steps]


async def test_it_begins_beside_an_agent_that_the_code_still_declares(deployment: Deployment) -> None:
    await deployment.run(deployment.agent("archive"), "index")
    assert deployment.handled == [("archive", "0"), ("archive", "1")]


async def test_it_begins_where_the_other_agent_had_another_filter(deployment: Deployment) -> None:
    await deployment.run(deployment.agent("archive", where={"class": "od"}))
    assert deployment.handled == [("archive", "0"), ("archive", "1")]


async def test_it_begins_when_the_other_agent_is_removed(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    await admin.delete_consumer("MARS", "contract__index")  # as `agents rm` does
    await consumer_records.remove(admin, app="contract", agent="index", stream="MARS")
    await deployment.run(deployment.agent("index_field"))
    assert deployment.handled == [("index_field", "0"), ("index_field", "1")]


async def test_it_goes_on_where_the_other_agent_was_when_that_is_renamed(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    await deployment.publish(2)
    plan = await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)
    await agent_control.rename(admin, plan)
    await agent_control.rename(admin, plan)  # as after a first attempt that was killed
    await deployment.run(deployment.agent("index_field"))
    assert deployment.handled == [("index_field", "2")]
    with pytest.raises(NotFoundError):
        await admin.consumer_info("MARS", "contract__index")


async def test_it_does_not_begin_where_the_rename_had_a_wrong_name(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    plan = await agent_control.plan_rename(admin, "contract", "index", "indx_field", workers_stopped=True)
    await agent_control.rename(admin, plan)
    refusal = await deployment.refusal(deployment.agent("index_field"))
    assert "`aviso-workers agents rename contract/indx_field index_field`" in refusal
    plan = await agent_control.plan_rename(admin, "contract", "indx_field", "index_field", workers_stopped=True)
    await agent_control.rename(admin, plan)
    await deployment.publish(2)
    await deployment.run(deployment.agent("index_field"))
    assert deployment.handled == [("index_field", "2")]


async def test_a_rename_that_was_broken_off_can_be_repeated(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    plan = await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(consumer_records, "remove", broken_off)
        with pytest.raises(KeyboardInterrupt):
            await agent_control.rename(admin, plan)
    again = await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)
    assert again.records == plan.records
    await agent_control.rename(admin, again)
    await deployment.publish(2)
    await deployment.run(deployment.agent("index_field"))
    assert deployment.handled == [("index_field", "2")]


async def test_a_rename_keeps_the_position_of_an_agent_that_has_run(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    await deployment.run(deployment.agent("archive"), "index")
    for stream in ("MARS", RETRIES):
        await admin.delete_consumer(stream, "contract__archive")
        await admin.delete_consumer(stream, "contract__index")
    with pytest.raises(RefusedError, match=r"archive of app contract has run.* up to sequence 2.*agents rm"):
        await agent_control.plan_rename(admin, "contract", "index", "archive", workers_stopped=True)
    with pytest.raises(DeclarationError, match="agent index has that name already"):
        await agent_control.plan_rename(admin, "contract", "index", "index", workers_stopped=True)


async def test_a_paused_agent_is_not_renamed(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    index = agent_control.AgentConsumer(app="contract", agent="index", stream="MARS")
    await agent_control.pause(admin, index)
    with pytest.raises(RefusedError, match="`aviso-workers agents resume contract/index`"):
        await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)


async def test_an_agent_whose_first_notification_is_unfinished_has_run(deployment: Deployment) -> None:
    begun, never = anyio.Event(), anyio.Event()

    async def handle(notification: Notification[Any]) -> None:
        if notification.identifier["step"] == "0":
            await never.wait()
        deployment.handled.append(("slow", notification.identifier["step"]))
        begun.set()

    slow = Router("deployed").agent("mars", name="slow", concurrency=2)(handle)
    async with deployment.worker(slow, "index"):
        with anyio.fail_after(PATIENCE_SECONDS):
            await begun.wait()
            admin = deployment.t.app.session.admin
            while (await admin.consumer_info("MARS", "contract__slow")).num_ack_pending != 1:
                await deployment.t.advance(0.05)
        refusal = await deployment.refusal(deployment.agent("slow_field"), "index")
        assert "agent slow, which the code does not declare any more, has been given notifications" in refusal
        never.set()


async def test_a_rename_says_what_is_handled_again(deployment: Deployment) -> None:
    held: list[Any] = []

    async def hold(notification: Notification[Any]) -> None:
        if notification.identifier["step"] != "0":
            return
        held.append(notification)
        await anyio.sleep_forever()

    admin = deployment.t.app.session.admin
    async with anyio.create_task_group() as tasks:
        session = deployment.t.app.session
        holding = Router("deployed").agent("mars", name="holding", concurrency=2)(hold)
        known = KnownAgents(session.backend, app="contract", declared={"holding", "index"})
        tasks.start_soon(session.run_agent, holding, anyio.Event(), known)
        with anyio.fail_after(PATIENCE_SECONDS):
            while not held or (await admin.consumer_info("MARS", "contract__holding")).num_ack_pending != 1:
                await deployment.t.advance(0.05)
        tasks.cancel_scope.cancel()
    with anyio.fail_after(PATIENCE_SECONDS):
        while (await admin.consumer_info("MARS", "contract__holding")).num_waiting:
            await deployment.t.advance(0.05)
    plan = await agent_control.plan_rename(admin, "contract", "holding", "kept", workers_stopped=True)
    assert (plan.unsettled, plan.again) == (1, 1)


async def broken_off(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


async def test_a_rename_follows_the_refusal_of_the_new_name(deployment: Deployment) -> None:
    await deployment.refusal(deployment.agent("index_field"))
    admin = deployment.t.app.session.admin
    plan = await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)
    assert list(plan.records) == ["MARS"]
    await agent_control.rename(admin, plan)
    await deployment.publish(2)
    await deployment.run(deployment.agent("index_field"))
    assert deployment.handled == [("index_field", "2")]


async def test_an_agent_that_works_is_not_renamed(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    with pytest.raises(RefusedError, match=r"active .* say --workers-stopped"):
        await agent_control.plan_rename(admin, "contract", "index", "index_field")
    await deployment.run(deployment.agent("index_field"), "index")
    with pytest.raises(RefusedError, match="agent index_field of app contract has run"):
        await agent_control.plan_rename(admin, "contract", "index", "index_field", workers_stopped=True)
    with pytest.raises(NotFoundError, match="no worker of app contract has recorded an agent indx"):
        await agent_control.plan_rename(admin, "contract", "indx", "index_field")


async def test_an_agent_whose_event_type_gets_another_base_says_what_it_leaves(app: App, nats_url: str) -> None:
    moved: list[AgentMoved] = []
    old, new = App("moved"), App("moved")
    for version, base in ((old, "before"), (new, "after")):
        version.event_type("job", base=base, key=["id"])
        version.agent("job", name="index")(handles_nothing)
        version.events.listen(moved.append, AgentMoved)
    async with harness(old, server=nats_url or None) as t:
        await t.notify("job", {"id": "1"})
        await t.settle()
        await t.stop()
        await t.notify("job", {"id": "2"})
        await t.deploy(new)
        await t.settle()
    assert [(event.before, event.stream, event.left) for event in moved] == [("BEFORE", "AFTER", 1)]


async def handles_nothing(notification: Notification[Any]) -> None: ...


async def test_an_agent_that_another_program_runs_on_another_stream_is_not_said_to_be_left(
    app: App, nats_url: str
) -> None:
    """Two teams have given their apps one name: the consumer on the other stream is the other team's."""
    moved: list[AgentMoved] = []
    ours, theirs = App("teams"), App("teams")
    for team, base in ((theirs, "before"), (ours, "after")):
        team.event_type("job", base=base, key=["id"])
        team.agent("job", name="index")(handles_nothing)
    ours.events.listen(moved.append, AgentMoved)
    async with harness(theirs, server=nats_url or None) as t:
        await t.notify("job", {"id": "1"})
        await t.settle()
        await t.deploy(ours, beside=True)
        await t.settle()
    (told,) = moved
    (line,) = told.lines()
    assert told.before == "BEFORE"
    assert "if another program reads it, give its app or agent another name" in str(line.fields["cure"])
    assert "consumers rm" not in str(line.fields["cure"])


SAME_NAME, SAME_FUNCTION = {"agent": "index"}, {"agent": "kept", "function": "Deployment.agent.<locals>.handle"}


@pytest.mark.parametrize("alike", [SAME_NAME, SAME_FUNCTION], ids=["its name", "its function"])
async def test_an_agent_that_another_app_had_does_not_begin(deployment: Deployment, alike: dict[str, str]) -> None:
    name = alike["agent"]
    async with deployment.other_app("other", **alike) as other:
        await deployment.until(lambda: other.told)
        assert f"agent {name} of app other has never run, and agent index of app contract, on which nobody works" in (
            refusal := other.told[0]
        )
        assert "has settled stream MARS with the same filter up to sequence 2" in refusal
        assert f"`aviso-workers agents rename contract/index other/{name}`" in refusal
        assert "agents rm" not in refusal
    assert other.handled == []


@pytest.mark.parametrize(
    "unlike",
    [
        pytest.param({"agent": "kept"}, id="another name and function"),
        pytest.param({"agent": "index", "where": {"class": "xx"}}, id="another filter"),
        pytest.param({"agent": "index", "start": "all"}, id="a start that its author says"),
    ],
)
async def test_an_agent_of_another_app_begins_where_it_is_another_one(
    deployment: Deployment, unlike: dict[str, Any]
) -> None:
    async with deployment.other_app("other", **unlike) as other:
        await deployment.publish(2)
        await deployment.until(lambda: "where" in unlike or len(other.handled) == 3)
        assert other.told == []


async def test_two_apps_at_work_read_one_stream_from_its_beginning(deployment: Deployment) -> None:
    async with deployment.at_work(), deployment.other_app("other", **SAME_NAME) as other:
        await deployment.until(lambda: len(other.handled) == 2)
        assert other.told == []


@pytest.mark.parametrize("sure_seconds", [0.0, 30.0])
async def test_an_agent_that_was_refused_does_not_begin_when_the_old_app_is_started_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, sure_seconds: float
) -> None:
    """As an operator does who goes back to the old version. It begins where somebody worked on it after all."""
    monkeypatch.setattr(known_agents, "SURE_SECONDS", sure_seconds)
    async with deployment.other_app("other", **SAME_NAME) as other:
        await deployment.until(lambda: other.told)
        async with deployment.at_work():
            before = len(other.told)
            await deployment.until(lambda: len(other.told) > before + 1 or len(other.handled) == 2)
    assert other.handled == ([] if sure_seconds == 0 else ["0", "1"])


async def test_a_worker_that_may_not_list_consumers_begins(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(*_: Any) -> None:
        raise DeniedError("$JS.API.CONSUMER.LIST.MARS: permissions violation")

    for backend in (InMemoryBackend, JetStreamBackend):
        monkeypatch.setattr(backend, "consumers", denied)
    async with deployment.other_app("other", **SAME_NAME) as other:
        await deployment.until(lambda: len(other.handled) == 2)
        assert other.told == []


async def test_an_agent_goes_on_in_the_app_to_which_it_is_renamed(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    await deployment.publish(2)
    with pytest.raises(DeclarationError, match="no app has the name 'other_'"):
        await agent_control.plan_rename(admin, "contract", "index", "kept", to_app="other_")
    async with deployment.other_app("other", **SAME_FUNCTION) as other:
        await deployment.until(lambda: other.told)
        plan = await agent_control.plan_rename(admin, "contract", "index", "kept", to_app="other", workers_stopped=True)
        assert not plan.to_is_new
        await agent_control.rename(admin, plan)
        await deployment.until(lambda: other.handled == ["2"])
    with pytest.raises(NotFoundError):
        await admin.consumer_info("MARS", "contract__index")


async def test_a_wrong_name_in_a_rename_to_another_app_is_said(deployment: Deployment) -> None:
    admin = deployment.t.app.session.admin
    plan = await agent_control.plan_rename(admin, "contract", "index", "indx", to_app="other", workers_stopped=True)
    assert plan.to_is_new
    await agent_control.rename(admin, plan)
    async with deployment.other_app("other", **SAME_NAME) as other:
        await deployment.until(lambda: other.told)
        assert "`aviso-workers agents rename other/indx index`" in other.told[0]


async def test_a_program_that_shares_the_name_of_an_app_is_not_told_to_remove_what_is_at_work(
    deployment: Deployment,
) -> None:
    async with deployment.at_work():
        refusal = await deployment.refusal(deployment.agent("archive"))
    assert "or give this app another name, if another program runs that one" in refusal
    assert "agents rm" not in refusal


async def test_two_programs_that_share_an_agent_say_so(deployment: Deployment) -> None:
    router = Router("other")

    @router.agent("mars", name="index")
    async def of_another_program(notification: Notification[Any]) -> None: ...

    async with deployment.worker(deployment.agent("index")), deployment.worker(of_another_program):
        with anyio.fail_after(PATIENCE_SECONDS):
            while not deployment.functions:
                await deployment.t.advance(0.05)
    told = {(name_of(event.own), *map(name_of, event.others)) for event in deployment.functions}
    assert told <= {("of_another_program", "handle"), ("handle", "of_another_program")}
    (functions,) = (await agent_inventory.recorded(deployment.t.app.session.admin)).functions.values()
    assert [name_of(each) for each in functions] == ["handle", "of_another_program"]


async def test_a_consumer_that_another_program_has_created_is_no_second_program(deployment: Deployment) -> None:
    """Its version has no function: such a program registers none."""
    admin = deployment.t.app.session.admin
    wanted = ConsumerSpec(
        durable_name="contract__archive", filter_subjects=(), ack_wait=1_000_000_000, max_ack_pending=10
    )
    await admin.ensure_consumer("MARS", wanted)
    await deployment.run(deployment.agent("archive"), "index")
    assert (await agent_inventory.recorded(admin)).functions == {}


def name_of(function: str) -> str:
    return function.rpartition(".")[2]
