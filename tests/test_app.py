"""The app: what authors declare, and what they call. How it behaves on a backend is in tests/contract."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
from msgspec import Struct

from aviso_workers import App, Batch, Notification, Notify, Router, Slots
from aviso_workers.backends.in_memory.consumer import InMemoryConnection
from aviso_workers.errors import (
    ConfigError,
    DeclarationError,
    InvalidIdentifierError,
    InvalidNotificationError,
    UnavailableError,
    UnknownEventTypeError,
)
from aviso_workers.events import ConnectionChanged, Settled
from tests.waits import PATIENCE_SECONDS

IN_MEMORY = """
notification_backend:
  kind: in_memory
notification_schema:
  mars:
    topic: {base: mars, key_order: [class, step]}
    identifier:
      class: {type: StringHandler, required: true}
      step: {type: IntHandler, required: true}
workers:
  agents:
    archive:
      directory: /archive
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def app(write: Callable[[str], Path]) -> App:
    return App("tests", config=write(IN_MEMORY))


class Step(Struct):
    step: int


class Day(Struct):
    step: date
    date: date


class Archive(Struct):
    directory: str
    days: int = 7


def router_of(name: str = "archive", settings: type[Struct] | None = None) -> Router:
    router = Router(name, settings=settings)

    @router.agent("mars")
    async def archive(notification: Notification[Any]) -> None: ...

    @router.task
    async def tidy(app: App) -> None: ...

    return router


def made_in(directory: Path, config: str) -> App:
    """The app of a Python file in a directory."""
    (directory / "mine.py").write_text(f"from aviso_workers import App\napp = App('mine', config={config!r})\n")
    app = runpy.run_path(str(directory / "mine.py"))["app"]
    assert isinstance(app, App)
    return app


class TestDeclaring:
    def test_reads_no_file_until_it_is_asked_to(self) -> None:
        app = App("tests", config="nowhere.yaml")
        with pytest.raises(ConfigError, match="is not a file"):
            _ = app.config

    def test_looks_for_a_file_beside_its_own_as_well(
        self, tmp_path: Path, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere, beside = tmp_path / "elsewhere", write(IN_MEMORY)
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        app, missing = made_in(tmp_path, "config.yaml"), made_in(tmp_path, "nowhere.yaml")
        assert app.config.sources == (str(beside),)
        with pytest.raises(ConfigError) as raised:
            _ = missing.config
        assert raised.value.mistakes == (
            f"configuration: 'nowhere.yaml' is not a file in {elsewhere} or in {tmp_path}",
        )
        missing.configure("config.yaml")  # as by --config, which is for the current directory
        assert missing.mistakes() == [f"configuration: 'config.yaml' is not a file in {elsewhere}"]
        (elsewhere / "config.yaml").write_text(IN_MEMORY + "  drain_timeout_seconds: 5\n")
        assert made_in(tmp_path, "config.yaml").config.workers.drain_timeout_seconds == 5

    def test_takes_no_configuration_but_a_file_or_a_loaded_one(self, app: App) -> None:
        other: Any = {"notification_backend": {"kind": "in_memory"}}
        for give in (lambda: App("tests", config=other), lambda: app.configure(other)):
            with pytest.raises(DeclarationError, match="config= must be the path of a file or a loaded Config"):
                give()

    def test_takes_another_configuration_in_its_place(self, app: App, write: Callable[[str], Path]) -> None:
        assert app.config.workers.drain_timeout_seconds == 30
        app.configure(write(IN_MEMORY + "  drain_timeout_seconds: 5\n"))
        assert app.config.workers.drain_timeout_seconds == 5

    def test_includes_the_agents_and_tasks_of_a_router(self, app: App) -> None:
        app.include(router_of())
        assert [agent.name for agent in app.agents] == ["archive"]
        assert [task.name for task in app.tasks] == ["tidy"]

    def test_includes_no_router_twice(self, app: App) -> None:
        app.include(router_of())
        with pytest.raises(DeclarationError, match="agent 'archive' is declared twice in 'tests'"):
            app.include(router_of("another"))

    @pytest.mark.parametrize("name", ["", "a.b", "a b"])
    def test_has_a_name_that_a_consumer_can_carry(self, name: str) -> None:
        with pytest.raises(DeclarationError, match="use 1 to 64 letters"):
            App(name)


class TestSettings:
    def test_are_the_routers_section(self, app: App) -> None:
        assert app.settings(router_of(settings=Archive)) == Archive(directory="/archive", days=7)

    def test_are_defaults_where_there_is_no_section(self, app: App) -> None:
        class Optional(Struct):
            days: int = 7

        assert app.settings(router_of("another", Optional)) == Optional(days=7)

    def test_are_plain_where_the_router_declares_nothing(self, app: App) -> None:
        assert app.settings(router_of()) == {"directory": "/archive"}

    @pytest.mark.parametrize(
        ("section", "complaint"),
        [
            ("{}", ": Object missing required field `directory`"),
            ("{directory: 5}", ".directory: Expected `str`, got `int`"),
            ("{directory: a, days: 1.5}", ".days: Expected `int`, got `float`"),
            ("{directroy: a}", ".directroy: unknown key; did you mean 'directory'?"),
            ("{directory: a, more: 1}", ".more: unknown key; known are days, directory"),
        ],
    )
    def test_that_are_wrong_name_file_line_and_key(
        self, write: Callable[[str], Path], section: str, complaint: str
    ) -> None:
        path = write(IN_MEMORY.replace("\n      directory: /archive", f" {section}"))
        app = App("tests", config=path)
        with pytest.raises(ConfigError) as raised:
            app.settings(router_of(settings=Archive))
        (mistake,) = raised.value.mistakes
        assert mistake == f"workers.agents.archive{complaint} ({path}:12)"


class TestSettingsOfAnApp:
    def test_are_the_section_of_its_name(self, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        app = App("archive", config=write(IN_MEMORY), settings=Archive)
        assert app.settings() == app.settings(app) == Archive(directory="/archive", days=7)
        monkeypatch.setenv("AVISO_WORKERS_WORKERS__AGENTS__ARCHIVE__DAYS", "1")
        app.configure(write(IN_MEMORY))
        assert app.settings().days == 1

    def test_are_plain_where_the_app_declares_nothing(self, write: Callable[[str], Path]) -> None:
        assert App("archive", config=write(IN_MEMORY)).settings() == {"directory": "/archive"}

    def test_that_are_wrong_are_mistakes(self, write: Callable[[str], Path]) -> None:
        path = write(IN_MEMORY.replace("directory: /archive", "directory: 5"))
        assert App("archive", config=path, settings=Archive).mistakes() == [
            f"workers.agents.archive.directory: Expected `str`, got `int` ({path}:13)"
        ]

    def test_need_a_name_of_their_own(self, write: Callable[[str], Path]) -> None:
        app = App("archive", config=write(IN_MEMORY), settings=Archive)
        with pytest.raises(DeclarationError, match="'archive' and the app of that name both have their settings under"):
            app.include(router_of("archive", Archive))

    def test_are_a_struct(self) -> None:
        with pytest.raises(DeclarationError, match=r"app 'archive': settings= must be a msgspec Struct, found .*dict"):
            App("archive", settings=dict)


class TestSettingsInCode:
    def test_are_what_a_router_is_included_with(self, app: App) -> None:
        router = router_of("tape", Archive)
        app.include(router, config={"directory": "/tape"})
        assert app.settings(router) == Archive(directory="/tape", days=7)
        assert app.mistakes() == []

    def test_give_way_to_the_file_key_by_key(self, app: App) -> None:
        router = router_of(settings=Archive)
        app.include(router, config={"directory": "/tape", "days": 30})
        assert app.settings(router) == Archive(directory="/archive", days=30)

    @pytest.mark.parametrize("name", ["tape", "tape-archive"])
    def test_give_way_to_the_environment(
        self, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        variable = f"AVISO_WORKERS_WORKERS__AGENTS__{name.upper().replace('-', '_')}__DAYS"
        monkeypatch.setenv(variable, "1")
        app = App("tests", config=write(IN_MEMORY))
        router = router_of(name, Archive)
        app.include(router, config={"directory": "/tape", "days": 30})
        assert app.settings(router) == Archive(directory="/tape", days=1)

    def test_are_plain_where_the_router_declares_nothing(self, app: App) -> None:
        router = router_of()
        app.include(router, config={"days": 30})
        assert app.settings(router) == {"directory": "/archive", "days": 30}

    @pytest.mark.parametrize(
        ("given", "mistake"),
        [
            ({}, ": Object missing required field `directory` (config= of router 'tape')"),
            ({"directory": 5}, ".directory: Expected `str`, got `int` (config= of router 'tape')"),
            (
                {"directroy": "a"},
                ".directroy: unknown key; did you mean 'directory'? (config= of router 'tape')",
            ),
        ],
    )
    def test_that_are_wrong_are_told_with_where_they_are_from(
        self, app: App, given: dict[str, Any], mistake: str
    ) -> None:
        app.include(router_of("tape", Archive), config=given)
        assert app.mistakes() == [f"workers.agents.tape{mistake}"]

    def test_are_given_once(self, app: App) -> None:
        app.include(Router("tape"), config={"directory": "/tape"})
        with pytest.raises(DeclarationError, match="router 'tape' has its settings already: give config= once"):
            app.include(Router("tape"), config={"directory": "/disk"})


class TestMistakes:
    def test_are_none_where_all_is_well(self, app: App) -> None:
        app.include(router_of(settings=Archive))
        assert app.mistakes() == []

    def test_are_all_there(self, app: App) -> None:
        class Needy(Struct):
            needed: str

        app.include(router_of("needy", Needy))

        @app.agent("marsh")
        async def one(notification: Notification[Any]) -> None: ...

        @app.agent("mars", where={"stop": 1})
        async def two(notification: Notification[Any]) -> None: ...

        found = app.mistakes()
        assert [mistake.partition(": ")[0] for mistake in found[:2]] == ["agent 'one'", "agent 'two'"]
        assert found[2].startswith("workers.agents.needy: Object missing required field `needed`")
        assert len(found) == 3

    @pytest.mark.parametrize(
        ("field", "hint"), [("clas", "did you mean 'class'?"), ("levelist", "it has: class, step")]
    )
    def test_of_an_order_are_told_with_what_there_is(self, app: App, field: str, hint: str) -> None:
        @app.agent("mars", order_by=("step", field), where={"stop": 1})
        async def one(notification: Notification[Any]) -> None: ...

        of_filter, of_order = app.mistakes()
        assert of_filter.startswith("agent 'one': where: mars: identifier field 'stop' is unknown")
        assert of_order == f"agent 'one': order_by: {field!r} is not part of the topic; {hint}"

    def test_of_the_key_of_a_limit_are_told_with_what_there_is(self, app: App) -> None:
        @app.agent("mars", limits=[Slots(1, by=["clas"])])
        async def one(notification: Notification[Any]) -> None: ...

        (mistake,) = app.mistakes()
        assert mistake == "agent 'one': Slots: by: 'clas' is not part of the topic; did you mean 'class'?"

    def test_of_the_types_of_keys_are_told_for_each_agent(self, app: App) -> None:
        @app.agent("mars")
        async def fits(notification: Notification[Any, Step]) -> None: ...

        @app.agent("mars")
        async def misfits(batch: Batch[Any, Day]) -> None: ...

        assert app.mistakes() == [
            "agent 'misfits': Day: mars: identifier field 'step' can be read as str, int, float, Decimal (IntHandler), "
            "or as a Literal or Enum of its values",
            "agent 'misfits': Day: mars: identifier field 'date' is unknown; there are: class, step",
        ]

    def test_of_the_configuration_are_told_and_not_raised(self) -> None:
        (mistake,) = App("tests", config="nowhere.yaml").mistakes()
        assert "nowhere.yaml" in mistake


def test_a_notification_is_checked_without_a_connection(app: App) -> None:
    app.check(Notify("mars", {"class": "od", "step": 6}))
    with pytest.raises(UnknownEventTypeError):
        app.check(Notify("marsh", {}))
    with pytest.raises(InvalidIdentifierError, match="'step' is missing"):
        app.check(Notify("mars", {"class": "od"}))


@pytest.mark.anyio
class TestConnected:
    async def test_it_must_be(self, app: App) -> None:
        complaint = "app 'tests' is not connected: use it inside `async with app:`"
        with pytest.raises(DeclarationError, match=complaint):
            await app.notify("mars", {"class": "od", "step": 6})
        with pytest.raises(DeclarationError, match=complaint):
            await anext(app.watch("mars"))
        assert app.runs == {}

    async def test_it_is_once_and_may_be_again(self, app: App) -> None:
        changes: list[Any] = []
        app.events.listen(changes.append)
        async with app:
            with pytest.raises(DeclarationError, match="app 'tests' is connected already"):
                await app.__aenter__()
            assert (await app.notify("mars", {"class": "od", "step": 6})).sequence == 1
        async with app:
            await app.notify("mars", {"class": "od", "step": 6})
        connected = [event.connected for event in changes if isinstance(event, ConnectionChanged)]
        assert connected == [True, True]  # leaving is not a loss

    async def test_it_works_until_it_is_told_to_stop(self, app: App) -> None:
        stop = anyio.Event()
        tasks_ended: list[str] = []

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            await app.notify("mars", {"class": "rd", "step": 6}, message_id="once")
            if notification.identifier["class"] == "rd":
                stop.set()

        @app.task
        async def tail(app: App) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                tasks_ended.append("tail")

        settled: list[Settled] = []
        app.events.listen(lambda event: settled.append(event) if isinstance(event, Settled) else None)
        with anyio.fail_after(PATIENCE_SECONDS):
            async with app:
                await app.notify("mars", {"class": "od", "step": 6})
                await app._work(stop)
        assert [event.outcome for event in settled] == ["acked", "acked"]
        assert tasks_ended == ["tail"]

    async def test_its_work_ends_with_the_error_when_the_connection_is_lost_for_good(
        self, app: App, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        working = anyio.Event()

        async def failed(self: InMemoryConnection) -> NoReturn:
            await working.wait()
            raise UnavailableError("lost for good")

        monkeypatch.setattr(InMemoryConnection, "failed", failed)

        @app.agent("mars")
        async def index(notification: Notification[Any]) -> None:
            working.set()
            await anyio.sleep_forever()

        with anyio.fail_after(PATIENCE_SECONDS):
            async with app:
                await app.notify("mars", {"class": "od", "step": 6})
                with pytest.raises(UnavailableError, match="lost for good"):
                    await app._work(anyio.Event())

    async def test_an_error_inside_leaves_as_itself(self, app: App) -> None:
        with pytest.raises(KeyError, match="mine"):
            async with app:
                raise KeyError("mine")


@pytest.mark.parametrize("name", ["field__index", "index_"])
def test_an_app_cannot_have_a_name_that_runs_into_those_of_its_agents(name: str) -> None:
    with pytest.raises(DeclarationError, match=f"app name '{name}': leave out '__'"):
        App(name)


@pytest.mark.parametrize("identifier", [None, "class=od", [("class", "od")]])
def test_an_identifier_that_is_not_a_mapping_is_invalid(app: App, identifier: Any) -> None:
    with pytest.raises(
        InvalidNotificationError, match=r"mars: the identifier must be a mapping of fields, as in .*, found (None|'|\[)"
    ):
        app.check(Notify("mars", identifier))


@pytest.mark.anyio
async def test_a_filter_of_a_watch_or_replay_that_is_not_a_mapping_is_refused(app: App) -> None:
    where: Any = "class=od"
    async with app:
        for reading in (app.watch("mars", where), app.replay("mars", where)):
            with pytest.raises(DeclarationError, match=r"where= must be a mapping of identifier fields.*'class=od'"):
                await anext(reading)
