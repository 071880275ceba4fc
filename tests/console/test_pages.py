"""What the pages show: what needs somebody, and why."""

from __future__ import annotations

import html
import os
import re
import signal
import socket
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from msgspec import structs

from aviso_workers import App, Notification, Notify, RetryPolicy
from aviso_workers.backends import Admin, Backend
from aviso_workers.config import Config
from aviso_workers.console import dead_letters, web
from aviso_workers.console import shown as shown_values
from aviso_workers.console.pages import PAGES
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.jetstream.specs import ConsumerSpec
from aviso_workers.ops import agent_control, timer_control
from aviso_workers.server import NatsServer
from aviso_workers.sessions import worker_recorder
from aviso_workers.state import consumer_records, declarations, worker_records
from aviso_workers.state.worker_records import AppWorkers, AtWork, WorkerRecord
from aviso_workers.testing import Harness, harness
from aviso_workers.version import __version__
from tests.agent_looks import looked
from tests.console.conftest import READER, Served, confirmed, publish, served, shown, text_of
from tests.contract.settings import mars
from tests.ops import health_facts
from tests.waits import PATIENCE_SECONDS, stand_still

pytestmark = pytest.mark.anyio

PLAIN = [path for path in PAGES if "{" not in path]


@pytest.mark.slow
@pytest.mark.parametrize("path", PLAIN)
async def test_a_page_of_an_empty_server_says_that_there_is_nothing(console: Served, path: str) -> None:
    async with console.client() as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert "Traceback" not in answer.text


@pytest.mark.slow
async def test_nothing_needs_you_where_all_is_well(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1, 2)
    await running.settle()
    async with console.client() as client:
        page = await shown(client, "/", "Nothing needs you.")
    assert "Needs you" not in page


@pytest.mark.slow
async def test_what_needs_somebody_comes_first_with_its_reason(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1, 2, 3, 4)
    async with console.client() as client:
        page = await shown(
            client,
            "/",
            "1 agent needs you, 1 agent is in trouble that may pass",
            "at MARS@3 (key od), 1 waits behind it: Key",
        )
        everything = await shown(client, "/agents", "3 of 3 agents.")
    assert page.index("field-index/blocks") < page.index("field-index/fails"), "the worst is the first"
    assert "field-index/index" not in page, "only what is not well"
    assert "field-index/index" in everything
    assert "ValueError: no such field &lt;b&gt;3&lt;/b&gt;" in page, "what an author's error says is text, and no HTML"


@pytest.mark.slow
async def test_filters_and_order_stand_in_the_address(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3)
    async with console.client() as client:
        page = await shown(client, "/agents?state=blocked&q=field&order=lag", "1 of 3 agents.")
        assert "field-index/blocks" in page
        none = await shown(client, "/agents?q=nothing", "0 of 3 agents.")
    assert "No agent matches." in none


@pytest.mark.slow
async def test_an_agent_shows_its_policy_and_what_waits(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 4, 5)
    async with console.client() as client:
        behind = "2 wait behind it, by the key od : MARS@2 , MARS@3 ."
        page = await shown(client, "/agents/field-index/blocks", "at MARS@1", "Skip …", behind)
        unknown = await client.get("/agents/field-index/other")
    assert "order by class" in page
    assert "everything up to sequence 0 is settled" in page
    assert unknown.status_code == 404
    assert "no agent other of app field-index" in text_of(unknown.text)


@pytest.mark.slow
async def test_dead_letters_are_counted_over_what_is_listed(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 3, 3, 4)
    async with console.client() as client:
        page = await shown(client, "/dead-letters", "3 dead letters,")
        other = await shown(client, "/dead-letters?agent=index", "0 of 3 dead letters")
        await shown(client, "/agents?q=fails", "3 (3 of 24 h)")
        await shown(client, "/dead-letters?notifications=mars+step%3D3", "3 dead letters,")
        await shown(client, "/dead-letters?notifications=mars+step%3D4", "0 of 3 dead letters")
        asked = await client.post("/actions/retry-dead-letters", data={"notifications": "mars step=3"})
        wrong = await client.get("/dead-letters?notifications=mars+nothing%3D4")
        no_app = [await client.get(path) for path in ("/dead-letters?app=a+b", "/dead-letters/a.b/1")]
        mistaken = await client.get("/dead-letters?since=noon")
        not_a_number = await client.get("/dead-letters?sequence=1.5")
    assert "all of the last day, by 1 cause" in page
    assert "3 ValueError: no such field &lt;b&gt;3&lt;/b&gt; field-index/fails failed for them at conftest.py:" in page
    assert "No dead letter matches." in other
    assert "3 dead letters of field-index/fails (notifications mars step=3) are handed back" in text_of(asked.text)
    assert wrong.status_code == 400
    assert [answer.status_code for answer in no_app] == [400, 400]
    assert mistaken.status_code == 400
    assert "since" in text_of(mistaken.text)
    assert "is not the number of a dead letter" in text_of(not_a_number.text)


@pytest.mark.slow
async def test_dead_letters_are_erased_on_the_page_of_one_cause_only(
    console: Served, app: App, nats_server: NatsServer
) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def breaks(notification: Notification[Any]) -> None:
        raise OSError("no disk")

    async with harness(app, server=nats_server.url), console.client() as client:
        await publish(app, 3, 3)
        page = await shown(client, "/dead-letters", "4 dead letters, all of the last day, by 2 causes", "Retry all …")
        assert "Erase" not in page
        links = re.findall(r'<a class="button" href="([^"]*)">Look', (await client.get("/dead-letters")).text)
        causes = [text_of((await client.get(html.unescape(link))).text) for link in links]
        (cause,) = [text for text in causes if "OSError: no disk" in text]
        other = await shown(client, "/dead-letters?agent=breaks", "By cause", "2 of 4 dead letters, all")
        assert "Erase" not in other
    assert "Retry 2 … Erase 2 …" in cause
    assert (
        "of 4: app field-index ✕ agent breaks ✕ reason attempts_exhausted ✕ error OSError ✕ line test_pages.py:"
        in cause
    )
    assert "field-index/breaks failed for 2 notifications at test_pages.py:" in cause
    assert "class od (all) expver " in cause
    assert ", 2 values domain g (all) date 20261120 (all)" in cause


async def test_the_newest_dead_letters_are_shown_in_parts(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "SHOWN", 2)
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        page = await shown(client, "/dead-letters", "3 dead letters,", "The newest 1 to 2 of 3", "1 to 2 of 3 Next")
        assert "MARS@1 od" not in page
        await shown(client, "/dead-letters?page=2", "The newest 3 to 3 of 3", "MARS@1 od", "Before 3 to 3 of 3")


async def test_a_payload_is_for_those_who_may_see_it(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, payload={"secret": "of the payload"})
    async with console.client() as client, console.client(READER) as reader:
        await shown(client, "/dead-letters", "1 dead letter,")
        for path in ("/dead-letters/field-index/1", "/notification?name=mars@1"):
            assert "of the payload" in text_of((await client.get(path)).text)
            hidden = text_of((await reader.get(path)).text)
            assert "of the payload" not in hidden
            assert "You have no right to see payloads." in hidden


async def test_what_could_hide_or_reorder_text_is_spelled_out(console: Served, app: App, running: Harness) -> None:
    await app.notify("mars", mars(step=3), b'{"path": "\\ud800 \\u202e"}')
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        for path in ("/dead-letters/field-index/1", "/notification?name=mars@1"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "\u202e" not in answer.text
            assert "\\ud800 \\u202e" in answer.text


@pytest.mark.slow
async def test_the_doctor_says_once_why_checks_are_not_examined(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        answer = await client.get("/doctor")
    assert "<code>aviso-workers dead-letters ls --app field-index --agent fails</code>" in answer.text
    page = text_of(answer.text)
    assert page.count("checked only with --production") == 1
    assert "the agents are not known: give --app MODULE:APP: JS" in page


@pytest.mark.parametrize("path", ["/dead-letters", "/doctor", "/settings"])
async def test_only_a_live_page_is_streamed(console: Served, path: str) -> None:
    async with console.client() as client:
        answer = await client.get(f"{path}?live=stream")
        head = await client.head("/?live=stream")
    assert answer.headers["content-type"].startswith("text/html")
    assert head.headers["content-type"].startswith("text/html")


@pytest.mark.slow
async def test_dead_letters_need_somebody_although_their_agent_is_idle(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/", "1 dead letter of the last day waits")


@pytest.mark.slow
async def test_a_notification_says_what_became_of_it_at_each_agent(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 4)
    async with console.client() as client:
        await shown(client, "/notification?name=mars@1", "blocked field-index/blocks")
        page = await shown(client, "/notification?name=mars@1", "dead letter field-index/fails Dead letter 1, ")
        behind = await shown(
            client, "/notification?name=mars@2", "Waits at field-index/blocks behind MARS@1 of the same key, "
        )
        missing = await client.get("/notification?name=mars@77")
        may = (await client.get("/notification?name=mars@1")).text
    async with console.client(READER) as client:
        may_not = (await client.get("/notification?name=mars@1")).text
    assert re.findall(r'action="/actions/([^"]*)"|>(Decide …)<', may) == [
        ("", "Decide …"),
        ("retry-dead-letters", ""),
        ("drop-dead-letters", ""),
    ]
    assert re.findall(r'action="/actions/([^"]*)"|>(Decide …)<', may_not) == []
    assert "published it" in may_not
    assert "handled field-index/index Everything up to 2 is settled" in page
    assert "blocked field-index/blocks Has failed " in page
    assert "step=3" in page, "its identifier"
    assert "handled field-index/fails" in behind
    assert missing.status_code == 404


@pytest.mark.slow
async def test_a_notification_says_where_it_comes_from(console: Served, app: App, running: Harness) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await app.notify("mars", mars(step=1), {}, headers={"traceparent": parent})
    by_agent = Notify("mars", mars(step=2), {}, message_id="field-index.index.MARS.1.0123456789abcdef")
    of_spark = Notify("mars", mars(step=4), {}, message_id="spark:local:app-20261120:0:job.end:3")
    await app.notify_many([by_agent, of_spark])
    async with console.client() as client:
        await shown(client, "/notification?name=mars@1", "trace 4bf92f3577b34da6a3ce929d0e0e4736")
        made = await shown(client, "/notification?name=mars@2", "field-index/index published it while it handled")
        await shown(client, "/notification?name=mars@3", "the Spark application local/app-20261120 published it")
    assert "MARS@1" in made


@pytest.mark.slow
async def test_an_agent_that_has_finished_what_failed_is_nobodys_alarm(
    console: Served, nats_server: NatsServer
) -> None:
    app = App("stumbling", config=console.config)

    @app.agent("mars", retry=RetryPolicy(first=0.1))
    async def stumbles(notification: Notification[Any]) -> None:
        if notification.num_delivered == 1:
            raise ValueError("at first")

    async with harness(app, server=nats_server.url) as t, console.client() as client:
        await publish(app, 1)
        await t.settle()
        await shown(client, "/agents/stumbling/stumbles", "Agents / stumbling stumbles idle")
        await shown(client, "/", "Nothing needs you.")


@pytest.mark.slow
async def test_what_has_failed_once_and_waits_is_among_what_is_tried_again(
    console: Served, nats_server: NatsServer
) -> None:
    app = App("stumbling", config=console.config)

    @app.agent("mars", retry=RetryPolicy(first=3600))
    async def stumbles(notification: Notification[Any]) -> None:
        raise ValueError("at first")

    async with harness(app, server=nats_server.url), console.client() as client:
        await publish(app, 1, 2, 3)
        await shown(client, "/agents", "1 of 1 agents.", "3 are tried again", " 3 0 1 ")


@pytest.mark.slow
async def test_a_paused_agent_is_nobodys_alarm(console: Served, app: App, running: Harness) -> None:
    target = agent_control.declared(app, console.config, "index")
    await agent_control.pause(console.admin, target, seconds=3600)
    await publish(app, 1)
    async with console.client() as client:
        page = await shown(client, "/", "Worth knowing paused field-index/index MARS", "until", "1 lag Resume …")
    assert "Nothing needs you." in page


@pytest.mark.slow
async def test_workers_are_listed_with_what_they_handle(
    console: Served, app: App, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_recorder, "WRITE_SECONDS", 1.0)
    begun, forever = anyio.Event(), anyio.Event()

    @app.agent("mars", concurrency=3)
    async def waits(notification: Notification[Any]) -> None:
        begun.set()
        await forever.wait()

    here = f"{socket.gethostname()}:{os.getpid()}"
    async with harness(app, server=nats_server.url, workers=2), console.client() as client:
        await publish(app, 1)
        await begun.wait()
        states = (f"{here} ready ", f" {__version__} ", " MB 1 of 3 ", " MB 0 of 3 ")
        page = await shown(client, "/agents/field-index/waits", *states)
        assert "standby" not in page
        await shown(client, "/agents?q=waits", "working field-index/waits MARS 1 1 of 6 ")
        forever.set()
        await shown(client, "/agents?q=waits", "idle field-index/waits MARS 0 0 of 6 ")


@pytest.mark.slow
async def test_the_page_of_an_app_lists_its_workers_also_where_it_has_no_agent(
    console: Served, running: Harness, nats_server: NatsServer
) -> None:
    tasks = App("only-tasks", config=console.config)

    @tasks.task
    async def look() -> None:
        await anyio.sleep_forever()

    head = "Workers worker state version aviso-workers started memory in flight heard of"
    here = f"{head} {socket.gethostname()}:{os.getpid()} ready"
    async with tasks.running(), console.client() as client:
        assert re.search(r" [kM]B – ", await shown(client, "/apps/only-tasks", here))
        await shown(client, "/apps/field-index", here, "B 0 of 3 ")
        await shown(client, "/apps", "0 0 1 1 look", "3 1 0 1 index, fails, blocks, report")


async def test_workers_that_are_lost_and_two_versions_are_shown(
    console: Served, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)

    def worker(name: str, code: str, said: timedelta) -> WorkerRecord:
        found = health_facts.worker(name)
        return structs.replace(found, code=code, said=now - said, started=now - timedelta(hours=2), key=f"h.1.{name}")

    none = timedelta(0)
    gone = worker("w3", "v1", timedelta(hours=1))
    workers = AppWorkers(living=(worker("w1", "v1", none), worker("w2", "v2", none)), lost=(gone,))

    async def of_app(admin: Admin, app: str) -> AppWorkers:
        return workers

    monkeypatch.setattr(worker_records, "of_app", of_app)
    versions, lost = "2 versions run: v1 on w1, v2 on w2", "killed or cut off within 30 s after "
    async with console.client() as client:
        said = ("several versions field-index/all workers", versions, "lost field-index/worker w3", lost)
        await shown(client, "/", "2 workers and apps need you", "Needs you", *said)
        await shown(client, "/apps", f"several versions field-index {__version__}", f" 2 {versions}")
        page = await shown(client, "/apps/field-index", f"Several versions: {versions}. Finish", "host:1 w1 ready v1")
        assert re.search(rf"host:1 w3 lost v1 .*{lost}\S+, on host", page)


@pytest.mark.slow
async def test_ages_are_by_the_servers_clock(
    console: Served, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = timedelta(hours=1)

    async def of_another_clock(backend: Backend, app: str) -> datetime:
        return datetime.now(UTC) + apart

    monkeypatch.setattr(consumer_records, "time", of_another_clock)
    bucket = await consumer_records.bucket(console.admin, "field-index")
    await timer_control.pause(console.admin, "field-index", "report", until=await bucket.time() + 2 * apart)
    async with console.client() as client:
        page = await shown(client, "/agents/field-index/index", f"{socket.gethostname()}:{os.getpid()}", "1.0 h ago")
        assert "has not answered for" not in page, "no clock says that"
        await shown(client, "/timers", "Paused until")
        apart = timedelta(hours=3)
        await shown(client, "/timers", "field-index/report", without="Paused until")


@pytest.mark.slow
async def test_of_a_singleton_it_is_shown_which_worker_works(
    console: Served, app: App, nats_server: NatsServer
) -> None:
    @app.agent("mars", singleton=True)
    async def alone(notification: Notification[Any]) -> None:
        pass

    async with harness(app, server=nats_server.url, workers=2), console.client() as client:
        await shown(client, "/agents/field-index/alone", "0 of 1 standby", without="works 0")
        await publish(app, 1)
        page = await shown(client, "/agents/field-index/alone", "0 of 1 works", "0 of 1 standby")
        assert (page.count("of 1 works"), page.count("of 1 standby")) == (1, 1)


@pytest.mark.slow
async def test_a_worker_that_has_not_recorded_itself_is_missed(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await shown(client, "/agents/field-index/index", f"{socket.gethostname()}:{os.getpid()}")
        await console.admin.purge_stream("KV_field-index__live", subject=">")
        await shown(client, "/agents/field-index/index", "None is recorded, although somebody asks")
        await shown(
            client, "/agents?q=/index", "unknown field-index/index", "it seems idle", "none of them has recorded itself"
        )


@pytest.mark.slow
async def test_the_last_deploys_are_shown_with_what_changed(console: Served, app: App, running: Harness) -> None:
    other = App("field-index", config=console.config)

    @other.agent("mars", concurrency=7)
    async def index(notification: Notification[Any]) -> None:
        pass

    async with console.client() as client:
        await shown(client, "/apps/field-index", "the first start that was recorded")
        await running.deploy(other)
        change = "agent index: concurrency: 1 -&gt; 7; agent fails removed"
        await shown(client, "/agents/field-index/index", "Last deploys of field-index", change)
        page = await shown(client, "/apps/field-index", "Last deploys", change)
    assert page.index(change) < page.index("the first start that was recorded"), "the newest comes first"


@pytest.mark.parametrize(
    ("cure", "page"),
    [
        ("Run `aviso-workers agents resume field/index`.", "/agents/field/index"),
        ("`aviso-workers agents retry field/index --all` tries it.", "/agents/field/index"),
        ("`aviso-workers streams apply`, with `--app MODULE:APP`", "/streams"),
        ("`aviso-workers dead-letters drop --app field`", "/dead-letters"),
        ("`aviso-workers timers run MODULE:APP tidy`", "/timers"),
        ("`aviso-workers agents rm field/index`", ""),
        ("`aviso-workers agents show APP`, `nats stream rm x`, `&lt;`", ""),
    ],
)
def test_a_command_of_a_cure_links_the_page_that_does_it(cure: str, page: str) -> None:
    found = re.findall(r'<a href="([^"]*)"><code>', shown_values.commands(cure))
    assert found == ([page] if page else [])


@pytest.mark.slow
async def test_a_lost_consumer_needs_somebody(console: Served, app: App, nats_server: NatsServer) -> None:
    async with console.client() as client:
        async with app.running():
            await publish(app, 1)
            await shown(client, "/notification?name=mars@1", "handled field-index/index")
        await console.admin.delete_consumer("MARS", "field-index__index")
        await shown(
            client, "/", "a worker makes it again, after sequence 1; the last one of MARS is 1", "consumer gone"
        )


@pytest.mark.slow
async def test_an_agent_without_a_worker_is_at_rest_while_nothing_waits(console: Served, app: App) -> None:
    async with app.running():
        await publish(app, 1)
        async with console.client() as client:
            await shown(client, "/agents", "idle field-index/index MARS")
    async with console.client() as client:
        await shown(client, "/agents", "at rest", "no worker runs, and nothing waits")


@pytest.mark.slow
async def test_dead_letters_that_were_handed_back_wait_for_a_worker(console: Served, app: App) -> None:
    async with app.running():
        await publish(app, 3)
        async with console.client() as client:
            await shown(client, "/dead-letters", "1 dead letter,")
    async with console.client() as client:
        await confirmed(client, "retry-dead-letters")
        await shown(client, "/", "no worker field-index/fails MARS", "1 wait, and no worker runs")


async def test_the_first_look_says_what_is_wrong(app: App, config: Config) -> None:
    async with app.running():  # its agents read when it begins
        pass
    async with app:
        await publish(app, 1, 2)
    async with served(config) as console, console.client() as client:
        page = text_of((await client.get("/")).text)
    assert "2 wait, and no worker runs" in page
    assert "Nothing needs you." not in page


async def test_an_agent_that_has_never_started_is_listed(console: Served, app: App, running: Harness) -> None:
    declared = (await declarations.stored(console.admin))["field-index"]
    refused = structs.replace(declared, agents={**declared.agents, "refused": "mars"})
    bucket = await consumer_records.bucket(console.admin, "field-index")
    await bucket.put(f"field-index/{declarations.END}", msgspec.json.encode(refused))
    async with console.client() as client:
        await shown(
            client, "/agents", "never started field-index/refused MARS", "no worker has ever created its consumer"
        )


async def test_live_pages_end_with_the_console(config: Config) -> None:
    async with AsyncExitStack() as left, AsyncExitStack() as serving:
        console = await serving.enter_async_context(served(config))
        client = await left.enter_async_context(console.client())
        answer = await left.enter_async_context(client.stream("GET", "/agents?live=stream"))
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data:")
        await serving.aclose()
        async for _ in lines:  # it ends as a whole answer does, and is not cut off
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made_again", "why"),
    [(False, "its stream MARS is gone; it was settled up to"), (True, "its stream was made again")],
)
async def test_an_agent_whose_stream_is_gone_needs_somebody(
    console: Served, app: App, made_again: bool, why: str
) -> None:
    async with app.running():
        await publish(app, 1)
        async with console.client() as client:
            await shown(client, "/agents", "idle field-index/index MARS")
    await console.admin.delete_stream("MARS")
    async with app:
        if made_again:
            await publish(app, 2)
    async with console.client() as client:
        page = await shown(client, "/", " gone", why)
    assert "Nothing needs you." not in page


async def test_a_user_may_open_so_many_live_pages(console: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_LIVE_EACH", 1)
    async with console.client() as client, console.client(READER) as reader:
        async with client.stream("GET", "/?live=stream") as first:
            assert first.status_code == 200
            assert (await client.get("/?live=stream")).status_code == 503
            async with reader.stream("GET", "/?live=stream") as of_another:
                assert of_another.status_code == 200
        await until_live(client)


async def until_live(client: httpx.AsyncClient) -> None:
    """Wait until a live page can be opened: the server learns at its next event that one was closed."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while True:
            async with client.stream("GET", "/?live=stream") as answer:
                if answer.status_code == 200:
                    return
            await anyio.sleep(0.1)


async def test_a_request_whose_head_does_not_come_is_given_up(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEAD_SECONDS", 0.2)
    async with served(config) as console:
        port = int(console.url.rpartition(":")[2])
        with anyio.fail_after(PATIENCE_SECONDS):
            async with await anyio.connect_tcp("127.0.0.1", port) as half:
                await half.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
                with pytest.raises(anyio.EndOfStream):
                    await half.receive()
        async with console.client() as client:
            assert (await client.get("/settings")).status_code == 200
            assert (await client.get("/settings")).status_code == 200


@pytest.mark.parametrize("sequence", ["99999999999999999999", "9" * 5000, "-1", "x", "\u0661"])
async def test_what_is_no_sequence_is_not_found(console: Served, sequence: str) -> None:
    async with console.client() as client:
        assert (await client.get(f"/dead-letters/field-index/{sequence}")).status_code == 404
        stop = await client.post("/actions/stop-job", data={"number": sequence})
    assert stop.status_code == 404


async def test_a_stream_that_will_refuse_what_is_new_needs_somebody(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 1, 2)
    info = await console.admin.stream_info("MARS")
    await console.admin.update_stream({**info.config, "discard": "new", "max_msgs": 2})
    async with console.client() as client:
        await shown(client, "/", "1 stream has trouble", "trouble MARS 100% of its limit is used")


async def test_timers_and_apps_are_those_that_workers_have_recorded(
    console: Served, app: App, running: Harness
) -> None:
    async with console.client() as client:
        timers = await shown(client, "/timers", "field-index/report every 3600s")
        apps = await shown(client, "/apps", "field-index", "index, fails, blocks, report")
    assert "ok" in timers
    assert "mars" in apps


@pytest.mark.slow
async def test_a_frozen_server_is_said_and_what_was_known_is_shown_with_its_time(
    console: Served, app: App, running: Harness, nats_server: NatsServer
) -> None:
    await publish(app, 1)
    async with console.client() as client:
        await shown(client, "/agents", "3 of 3 agents.")
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            page = await shown(client, "/agents", "The server does not answer")
            assert "3 of 3 agents." in page
            now = await shown(client, "/", "Nothing is known of how it is now.")
            assert "Nothing needs you." not in now
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        await shown(client, "/agents", without="The server does not answer")


@pytest.mark.slow
async def test_an_agent_whose_stream_no_server_answers_for_is_unknown(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster of three, where the only server that has the stream is down."""
    all_streams, info, consumers = console.admin.streams, console.admin.stream_info, console.admin.consumers

    async def others() -> list[StreamInfo]:
        return [each for each in await all_streams() if each.name != "MARS"]

    async def info_of_others(stream: str, **options: Any) -> StreamInfo:
        if stream == "MARS":
            raise UnavailableError("STREAM.INFO.MARS: no answer in time")
        return await info(stream, **options)

    async def unanswered(stream: str) -> list[ConsumerInfo]:
        if stream == "MARS":
            raise UnavailableError("STREAM.INFO.MARS: no answer in time")
        return await consumers(stream)

    async with console.client() as client:
        await shown(client, "/agents", "3 of 3 agents.")
        monkeypatch.setattr(console.admin, "streams", others)
        monkeypatch.setattr(console.admin, "stream_info", info_of_others)
        monkeypatch.setattr(console.admin, "consumers", unanswered)
        page = await shown(
            client, "/", "3 agents need you, 1 stream or consumer is away", "MARS not known, since no server answers"
        )
        assert "does not answer" not in page
        await shown(client, "/agents", "3 of 3 agents.", "unknown field-index/index MARS")
    report = await looked(console.admin, console.config)
    assert [each.facts.agent for each in report if each.judgement.state == "unknown"] == ["blocks", "fails", "index"]


@pytest.mark.slow
async def test_a_console_of_a_server_that_is_away_says_so(console: Served, nats_server: NatsServer) -> None:
    stand_still(nats_server)
    try:
        async with console.client() as client:
            with anyio.fail_after(PATIENCE_SECONDS):
                answer = await client.get("/")
        assert answer.status_code == 503
        assert "The server does not answer" in text_of(answer.text)
    finally:
        nats_server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
async def test_a_live_page_is_rendered_again_when_something_changes(
    console: Served, app: App, running: Harness
) -> None:
    async with console.client() as client:
        await shown(client, "/agents", "3 of 3 agents.")
        seen = ""
        with anyio.fail_after(PATIENCE_SECONDS):
            async with client.stream("GET", "/agents?live=stream") as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    seen += line.removeprefix("data: ")
                    if "blocked" not in seen and "</table>" in seen:
                        await publish(app, 3)
                        seen = ""
                    if "blocked" in seen and "</table>" in seen:
                        break


@pytest.mark.slow
async def test_of_each_app_the_first_rows_are_shown_and_the_others_are_counted(
    console: Served, app: App, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.agent("mars", retry=RetryPolicy(attempts=1))
    async def breaks(notification: Notification[Any]) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(shown_values, "MOST_ROWS", 1)
    spec = ConsumerSpec(durable_name="other__agent", filter_subjects=(), ack_wait=30_000_000_000, max_ack_pending=1000)
    async with harness(app, server=nats_server.url, workers=2), console.client() as client:
        await console.admin.ensure_consumer("MARS", spec)
        await publish(app, 3)
        page = await shown(client, "/", "And 1 more of field-index: aviso-workers agents ls field-index lists all.")
        assert "other/agent" in page
        await shown(
            client,
            "/dead-letters",
            "And 1 more of field-index: aviso-workers dead-letters ls --each --app field-index lists all.",
        )
        await shown(client, "/apps/field-index", "And 1 more: nats kv ls field-index__live lists all.")


async def test_a_snapshot_looks_at_each_worker_once_however_many_agents_there_are(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = looks = 0

    class Handled(dict[str, AtWork]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

        def get(self, *agent: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().get(*agent)

    of_app = worker_records.of_app

    async def counted(admin: Admin, app: str) -> AppWorkers:
        nonlocal snapshots
        snapshots += 1
        living = (await of_app(admin, app)).living
        return AppWorkers(tuple(structs.replace(each, agents=Handled(each.agents)) for each in living))

    monkeypatch.setattr(worker_records, "of_app", counted)
    async with console.client() as client:
        await shown(
            client,
            "/agents?q=index",
            f"{len(app.agents)} of {len(app.agents)} agents.",
            "idle field-index/index MARS 0 0 of ",
        )
    assert 0 < looks <= 2 * snapshots, "at each snapshot, and once more as the one before"


@pytest.mark.slow
async def test_a_thousand_agents_are_shown_in_parts(console: Served, app: App, running: Harness) -> None:
    own = len(app.agents)
    for number in range(1000 - own):
        spec = ConsumerSpec(
            durable_name=f"many__agent{number}", filter_subjects=(), ack_wait=30_000_000_000, max_ack_pending=1000
        )
        await console.admin.ensure_consumer("MARS", spec)
    async with console.client() as client:
        page = await shown(client, "/agents?order=agent", "1,000 of 1,000 agents.", "1 to 100 of 1,000 Next")
        assert 'href="/agents?order=agent&amp;page=2"' in (await client.get("/agents?order=agent")).text
        pages = [text_of((await client.get(f"/agents?order=agent&page={number}")).text) for number in range(2, 11)]
        assert "Before 901 to 1,000 of 1,000" in text_of((await client.get("/agents?page=77")).text)
    found = re.findall(r"many/agent\d+", " ".join([page, *pages]))
    assert len(found) == len({*found}) == 1000 - own
