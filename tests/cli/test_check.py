"""`aviso-workers check`: every mistake at once. And what it takes for an app."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from aviso_workers.cli import targets
from tests.cli.conftest import Ran

Run = Callable[..., Ran]

HEAD = """
import msgspec
from aviso_workers import App, Notification, Router

app = App("checked", config="unreachable.yaml")
"""


@pytest.fixture
def write_module(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """`write_module(text)`: the name of a new module below the test's directory."""

    def write_module(text: str) -> str:
        name = f"checked_{request.node.name.partition('[')[0]}"
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        return name

    return write_module


@pytest.mark.usefixtures("unreachable")
def test_an_app_without_mistakes_is_counted(run: Run, write_module: Callable[[str], str]) -> None:
    module = write_module("""
@app.agent("mars")
async def index(notification: Notification) -> None: ...

@app.agent("mars", name="again")
async def index_again(notification: Notification) -> None: ...

@app.task
async def tail(app: App) -> None: ...
""")
    assert run("check", f"{module}:app") == Ran(code=0, out="checked: 2 agents, 1 task, no mistakes\n", err="")
    assert run("check", module).code == 0


@pytest.mark.usefixtures("unreachable")
def test_an_app_with_nothing_to_run_is_told_of(run: Run, write_module: Callable[[str], str]) -> None:
    ran = run("check", f"{write_module('')}:app")
    assert (ran.code, ran.out) == (0, "checked: nothing to run, no mistakes\n")
    assert ran.err == (
        "warning: app 'checked' declares no agent, timer or task, so that a worker of it does nothing; include the "
        "routers that declare them\n"
    )


@pytest.mark.parametrize(("decided", "told"), [(None, True), (False, False), (True, False)])
def test_an_agent_on_a_stream_of_one_notification_per_subject_is_told_of(
    run: Run, unreachable: Path, write_module: Callable[[str], str], decided: bool | None, told: bool
) -> None:
    document = json.loads(unreachable.read_text())
    document["notification_schema"]["mars"]["storage_policy"] = {} if decided is None else {"allow_duplicates": decided}
    unreachable.write_text(json.dumps(document))
    module = write_module("""
@app.agent("mars")
async def index(notification: Notification) -> None: ...
""")
    ran = run("check", f"{module}:app", "--config", unreachable)
    assert (ran.code, "agent 'index': the stream of 'mars' keeps one notification per subject" in ran.err) == (0, told)
    assert ("notification_schema.mars.storage_policy.allow_duplicates" in ran.err) is told


@pytest.mark.usefixtures("unreachable")
def test_every_mistake_of_an_app_is_told_at_once(run: Run, write_module: Callable[[str], str]) -> None:
    module = write_module("""
class Settings(msgspec.Struct):
    directory: str

router = Router("other", settings=Settings)
app.include(router)

@app.agent("marsh")
async def first(notification: Notification) -> None: ...

@app.agent("mars", where={"stop": 6})
async def second(notification: Notification) -> None: ...

@app.agent("mars", where={"step": {"gte": 5000}})
async def third(notification: Notification) -> None: ...
""")
    ran = run("check", module)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.removeprefix("aviso-workers: ").splitlines() == [
        "agent 'first': unknown event type 'marsh'; event types: mars; did you mean 'mars'?",
        "agent 'second': where: mars: identifier field 'stop' is unknown; did you mean 'step'?",
        "agent 'third': where: mars: identifier field 'step' must be within [0, 1000], not 5000",
        "workers.agents.other: Object missing required field `directory` (unreachable.yaml:1)",
    ]


def test_every_mistake_of_a_configuration_is_told_at_once(
    run: Run, write_module: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("""
notification_backend:
  kind: jetstreem
notification_schema:
  mars:
    topic: {base: mars, key_order: [class]}
    identifier:
      class: {type: StringHandler}
workers:
  statsu: {}
""")
    ran = run("check", write_module(""), "--config", "wrong.yaml")
    assert (ran.code, ran.out) == (2, "")
    mistakes = ran.err.removeprefix("aviso-workers: ").splitlines()
    assert [mistake.split(": ")[:2] for mistake in mistakes] == [
        ["wrong.yaml:3", "notification_backend.kind"],
        ["wrong.yaml:8", "notification_schema.mars.identifier.class.required is missing"],
        ["wrong.yaml:10", "workers"],
    ], ran.err


def test_mistakes_of_the_configuration_hide_none_of_the_app(
    run: Run, write_module: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("""
notification_backend:
  kind: in_memory
notification_schema:
  mars:
    topic: {base: mars, key_order: [class]}
    identifier:
      class: {type: StringHandler, required: true}
  broken:
    identifier:
      class: {type: StringHandler}
workers:
  statsu: {}
  agents: {other: {direktory: x}}
""")
    module = write_module("""
class Settings(msgspec.Struct):
    directory: str = ""

router = Router("other", settings=Settings)
app.include(router)

@app.agent("marsh")
async def first(notification: Notification) -> None: ...

@app.agent("mars", where={"stop": 6})
async def second(notification: Notification) -> None: ...

@app.agent("broken", where={"whatever": 6})
async def third(notification: Notification) -> None: ...
""")
    ran = run("check", module, "--config", "wrong.yaml")
    assert (ran.code, ran.out) == (2, "")
    told = ran.err.removeprefix("aviso-workers: ").splitlines()
    assert [line.partition(";")[0] for line in told] == [
        "wrong.yaml:11: notification_schema.broken.identifier.class.required is missing",
        "wrong.yaml:13: workers: unknown field(s): statsu",
        "agent 'first': unknown event type 'marsh'",
        "agent 'second': where: mars: identifier field 'stop' is unknown",
        "workers.agents.other.direktory: unknown key",
    ]


@pytest.mark.usefixtures("unreachable")
def test_a_declaration_that_is_refused_is_told_in_a_sentence(run: Run, write_module: Callable[[str], str]) -> None:
    module = write_module("""
@app.agent("mars")
async def index() -> None: ...
""")
    ran = run("check", module)
    assert ran.code == 2
    line, _, problem = ran.err.partition(": agent ")
    assert re.fullmatch(rf"aviso-workers: .*{module.partition(':')[0]}\.py:\d+", line), "the author's line"
    assert problem.startswith("'index': must be a function whose first argument")


@pytest.mark.usefixtures("unreachable")
def test_what_is_installed_is_found_by_its_name(run: Run, unreachable: Path) -> None:
    ran = run("check", "--agent", "spark-events", "--config", unreachable)
    assert ran.code == 2
    assert "workers.agents.spark-events: " in ran.err
    assert "event_log_dirs" in ran.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "say what to run: MODULE:APP, or --agent NAME"),
        (("nowhere:app", "--agent", "spark-events"), "say what to run: MODULE:APP, or --agent NAME"),
        (("nowhere:app",), "no module 'nowhere' here or installed; say MODULE:APP"),
        (("nowhere.at.all",), "no module 'nowhere.at.all' here or installed; say MODULE:APP"),
        (("checked/app.py",), "'checked/app.py' names no module; say MODULE:APP, e.g. mine.agents:app"),
        ((":app",), "':app' names no module; say MODULE:APP, e.g. mine.agents:app"),
        (("json:dumps",), "'json' has no App named 'dumps'; it has: none"),
        (("json",), "'json' has no App named 'app'; it has: none"),
        (("--agent", "nothing"), "no agent 'nothing' is installed; there are: observer, spark-events"),
    ],
)
def test_what_names_no_app_is_refused(run: Run, arguments: tuple[str, ...], complaint: str) -> None:
    assert run("check", *arguments) == Ran(code=2, out="", err=f"aviso-workers: {complaint}\n")


def test_the_apps_that_a_module_has_are_named(run: Run, write_module: Callable[[str], str]) -> None:
    module = write_module("application = App('fields')\n")
    complaint = f"aviso-workers: '{module}' has no App named 'fields'; it has: app, application\n"
    assert run("check", f"{module}:fields") == Ran(code=2, out="", err=complaint)


@pytest.mark.usefixtures("unreachable")
def test_an_installed_agent_that_lacks_a_package_says_what_to_install(
    run: Run, write_module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write_module('raise ImportError("this needs a package: pip install it")\n')
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("lacking", f"{module}:router", targets.ENTRY_POINTS)
    monkeypatch.setattr(targets, "_installed", lambda: {"lacking": entry})
    told = "the agent 'lacking' cannot be imported: ImportError: this needs a package: pip install it"
    assert run("check", "--agent", "lacking") == Ran(code=2, out="", err=f"aviso-workers: {told}\n")


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("import checked_a_module", "import checked_a_module", "No module named 'checked_a_module'"),
        ('@app.agent("mars", concurency=4)\nasync def f(n): ...', '@app.agent("mars", concurency=4)', "'concurency'"),
        ("1 / 0", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_module_raises_is_told_with_the_line_of_its_author_and_no_other(
    run: Run, write_module: Callable[[str], str], code: str, line: str, error: str
) -> None:
    module = write_module(f"{code}\n")
    ran = run("check", module)
    assert (ran.code, ran.out) == (2, "")
    said = ran.err.splitlines()
    assert said[0] == f"aviso-workers: {module.partition(':')[0]!r} cannot be imported:"
    assert (said[1].startswith("  File "), said[2].strip(), error in said[-1]) == (True, line, True), ran.err
    assert ran.err.count("  File ") == 1, ran.err


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("retry=5", "retry= takes a RetryPolicy, found 5"),
        ('concurrency="4"', "concurrency= takes a whole number, found '4'"),
        ('timeout="10"', "timeout=: duration must include a unit suffix"),
    ],
)
def test_what_a_decorator_does_not_take_is_told_at_its_line(
    run: Run, write_module: Callable[[str], str], given: str, problem: str
) -> None:
    ran = run("check", write_module(f'@app.agent("mars", {given})\nasync def f(n: Notification) -> None: ...\n'))
    assert (ran.code, problem in ran.err, ".py:" in ran.err) == (2, True, True), ran.err


@pytest.mark.usefixtures("unreachable")
def test_an_annotation_that_would_fail_each_call_is_a_mistake(run: Run, write_module: Callable[[str], str]) -> None:
    module = write_module("""
from aviso_workers import Notify, Reject, Retry

@app.agent("mars")
async def counts(notification: Notification) -> int | None:
    return 1

@app.agent("mars")
async def lists(notification: Notification) -> list[dict[str, str]]:
    return []

@app.agent("mars")
async def derives(notification: Notification) -> list[Notify] | Notify | None: ...

@app.agent("mars")
async def decides(notification: Notification) -> Retry | Reject | None: ...

@app.agent("mars")
async def says_nothing(notification: Notification): ...
""")
    ran = run("check", f"{module}:app")
    assert ran.code != 0
    told = [line for line in ran.err.splitlines() if "its annotation says" in line]
    assert [line.partition(", which fails")[0].partition("agent ")[2] for line in told] == [
        "'counts': its annotation says that it returns int",
        "'lists': its annotation says that it returns list[dict[str, str]]",
    ]


@pytest.mark.usefixtures("unreachable")
def test_an_agent_that_publishes_an_event_type_that_there_is_not_is_a_mistake(
    run: Run, write_module: Callable[[str], str]
) -> None:
    module = write_module("""
from aviso_workers import Notify

@app.agent("mars")
async def derives(notification: Notification) -> Notify:
    if notification.sequence > 1:
        return Notify("mars", notification.identifier)
    return Notify("dervied", notification.identifier)

@derives.on_dead_letter
async def take_back(given_up):
    return Notify("taken_bakc", given_up.notification.identifier)
""")
    ran = run("check", f"{module}:app")
    assert ran.code == 2
    assert "agent 'derives': it publishes " in ran.err
    assert "dervied" in ran.err
    assert "taken_bakc" in ran.err


def test_a_module_that_exits_while_it_is_imported_is_a_mistake(run: Run, write_module: Callable[[str], str]) -> None:
    """It was checked with exit code 0, and a worker of it ended as if it had been stopped."""
    module = write_module("raise SystemExit(0)\n")
    for command in ("check", "worker"):
        ran = run(command, module)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.endswith("exits while it is imported, with SystemExit: 0; no app can be taken from it\n")
