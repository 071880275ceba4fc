"""A console whose user lacks a right: each page shows what it may read, and names the subject that is denied."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import anyio
import pytest
from msgspec import Struct

from aviso_workers import App, Notification
from aviso_workers.backends.jetstream.connection import NatsConnection
from aviso_workers.config import Config, load
from aviso_workers.server import NatsServer
from aviso_workers.state import dead_letter_records
from aviso_workers.testing import harness
from tests.console.conftest import USERS, Served, confirmed, publish, served, shown, text_of, with_console
from tests.contract.settings import app_config
from tests.waits import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

AGENT, LETTERS, LETTER, TRAIL = (
    "/agents/field-index/blocks",
    "/dead-letters",
    "/dead-letters/field-index/1",
    "/notification?name=mars@1",
)
DEAD = "aviso_workers_dead_letters__field-index"
SHOWN = {
    "/": "field-index/blocks",
    "/agents": "field-index/blocks",
    AGENT: "Agents / field-index blocks",
    LETTERS: "no such field",
    LETTER: "attempts_exhausted",
    TRAIL: "/data/3",
    "/timers": "field-index/report",
    "/streams": "aviso_workers_retries__field-index",
    "/spark": "Nothing is known of Spark",
    "/apps": "blocks, report",
    "/apps/field-index": "Last deploys",
    "/doctor": "checks passed",
    "/audit": "Pause timer",
    "/settings": "notification_backend",
}
"""What each page shows, if that may be read."""


class Lack(Struct, frozen=True):
    """A subject that is denied, below the prefix of JetStream's API."""

    subject: str
    named: tuple[str, ...]
    """The pages that name it."""
    lost: tuple[str, ...] = ()
    """The pages that have nothing else to show."""


OVERVIEW = ("/", "/agents", AGENT)
OF_ORDERS = (*OVERVIEW, TRAIL, "/timers", "/apps", "/doctor")
OF_RECORDS = (*OF_ORDERS, "/apps/field-index")
RECORDS = ("/timers", "/apps", "/apps/field-index")
LACKS = {
    "streams": [
        Lack("STREAM.LIST", (*OVERVIEW, "/streams", "/doctor"), ("/streams",)),
        Lack("STREAM.NAMES", (*OVERVIEW, LETTERS, "/streams", "/doctor"), (*RECORDS, LETTERS)),
        Lack("STREAM.INFO.MARS", ()),
        Lack("STREAM.MSG.GET.MARS", (TRAIL,), (TRAIL,)),
        Lack("INFO", ("/doctor",)),
    ],
    "consumers": [
        Lack("CONSUMER.LIST.*", (*OVERVIEW, "/streams", TRAIL, "/doctor")),
        Lack("CONSUMER.LIST.MARS", (*OVERVIEW, "/streams", TRAIL, "/doctor")),
        Lack("CONSUMER.LIST.aviso_workers_retries__field-index", (*OVERVIEW, "/streams", "/doctor")),
        Lack("CONSUMER.NAMES.*", (*OVERVIEW, "/streams", "/doctor")),
        Lack("CONSUMER.DELETE.>", ()),
        Lack("CONSUMER.INFO.>", ()),  # where nothing has come for a while
    ],
    "records": [
        Lack("STREAM.INFO.KV_field-index__state", OF_RECORDS, RECORDS),
        Lack("CONSUMER.CREATE.KV_field-index__state", OF_RECORDS, RECORDS),
        Lack("CONSUMER.MSG.NEXT.KV_field-index__state.*", OF_RECORDS, RECORDS),
        Lack("STREAM.MSG.GET.KV_field-index__state", (TRAIL, "/apps/field-index")),
    ],
    "orders": [
        Lack("STREAM.INFO.KV_field-index__orders", OF_ORDERS),
        Lack("CONSUMER.CREATE.KV_field-index__orders", OF_ORDERS),
        Lack("CONSUMER.MSG.NEXT.KV_field-index__orders.*", OF_ORDERS),
        Lack("STREAM.MSG.GET.KV_field-index__orders", ()),  # the worker asks for it
    ],
    "workers": [
        Lack("STREAM.INFO.KV_field-index__live", OVERVIEW),
        Lack("CONSUMER.CREATE.KV_field-index__live", OVERVIEW),
        Lack("CONSUMER.MSG.NEXT.KV_field-index__live.*", OVERVIEW),
    ],
    "failures": [
        Lack("STREAM.INFO.KV_field-index__failures", ("/doctor",)),
        Lack("STREAM.MSG.GET.KV_field-index__failures", ()),  # only where a notification runs alone
    ],
    "dead letters": [
        Lack(
            f"STREAM.INFO.{DEAD}",
            (*OVERVIEW, LETTERS, LETTER, TRAIL, "/doctor"),
            (LETTERS, LETTER),
        ),
        Lack(
            f"CONSUMER.CREATE.{DEAD}",
            (*OVERVIEW, LETTERS, LETTER, TRAIL),
            (LETTERS, LETTER),
        ),
        Lack(f"CONSUMER.MSG.NEXT.{DEAD}.*", (LETTERS, LETTER, TRAIL), (LETTERS, LETTER)),
        Lack(f"STREAM.MSG.GET.{DEAD}", ()),
    ],
    "timers and actions": [
        *(
            Lack(f"{what}.KV_field-index__{bucket}", ("/timers",))
            for bucket, whats in {
                "leases": ("STREAM.INFO", "STREAM.MSG.GET"),
                "timers": ("STREAM.INFO", "CONSUMER.CREATE", "CONSUMER.MSG.NEXT"),
            }.items()
            for what in whats
        ),
        Lack("STREAM.INFO.aviso_workers_audit", (AGENT, "/audit"), ("/audit",)),
        Lack("CONSUMER.CREATE.aviso_workers_audit", (AGENT, "/audit"), ("/audit",)),
        Lack("CONSUMER.MSG.NEXT.aviso_workers_audit", (AGENT, "/audit"), ("/audit",)),
        Lack("STREAM.MSG.GET.aviso_workers_audit", ()),  # where nothing of an agent was erased
    ],
}
ALL = [lack for lacks in LACKS.values() for lack in lacks]


def denied_by(lack: Lack) -> str:
    """The subject that its user is denied."""
    ending = ".*" if ".MSG.NEXT." in lack.subject and not lack.subject.endswith("*") else ""
    return f"$JS.API.{lack.subject}{ending}"


@pytest.fixture
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with one user who may do everything, and one for each right that is lacking."""
    users: list[dict[str, object]] = [{"user": "everything", "password": "x"}]
    for number, lack in enumerate(ALL):
        permissions = {"publish": {"deny": [denied_by(lack)]}}
        users.append({"user": f"user{number}", "password": "x", "permissions": permissions})
    settings = f"authorization: {json.dumps({'users': users})}\n"
    with NatsServer.start(store_dir=tmp_path_factory.mktemp("jetstream"), config=settings) as server:
        yield server


def url_of(server: NatsServer, user: str = "everything") -> str:
    return server.url.replace("//", f"//{user}:x@")


def config_of(server: NatsServer, lack: Lack | None = None) -> Config:
    user = "everything" if lack is None else f"user{ALL.index(lack)}"
    return with_console(load(app_config("jetstream", url_of(server, user))), users=USERS)


@pytest.fixture
def config(nats_server: NatsServer) -> Config:
    return config_of(nats_server)


async def pages(console: Served) -> dict[str, tuple[int, str]]:
    """The status and the text of each page."""
    async with console.client() as client:
        answers = {path: await client.get(path) for path in SHOWN}
    return {path: (answer.status_code, text_of(answer.text)) for path, answer in answers.items()}


async def prepare(config: Config, app: App) -> None:
    """Have a dead letter, an agent that is blocked, and an action."""
    await publish(app, 3, 4)
    async with served(config) as console, console.client() as client:
        await shown(client, "/", "1 agent needs you")
        await shown(client, LETTERS, "1 dead letter,")
        await confirmed(client, "pause-timer", app="field-index", timer="report")


@pytest.mark.slow
@pytest.mark.parametrize(
    "lacks",
    [
        pytest.param(lacks, id=of, marks=() if of in ("records", "dead letters") else pytest.mark.slow)
        for of, lacks in LACKS.items()
    ],
)
async def test_each_page_shows_what_it_may_and_names_what_is_denied(
    nats_server: NatsServer, config: Config, app: App, lacks: list[Lack]
) -> None:
    wrong: list[str] = []
    few = anyio.CapacityLimiter(3)

    async def look(lack: Lack) -> None:
        async with few, served(config_of(nats_server, lack)) as console:
            with anyio.move_on_after(PATIENCE_SECONDS):  # beside load, a server may not answer in time at first
                while problems(lack, await pages(console)):
                    pass
                return
            wrong.extend(problems(lack, await pages(console)))

    async with harness(app, server=url_of(nats_server)):
        await prepare(config, app)
        async with anyio.create_task_group() as looking:
            for lack in lacks:
                looking.start_soon(look, lack)
    assert wrong == []


def problems(lack: Lack, found: Mapping[str, tuple[int, str]]) -> list[str]:
    """What pages say, that lack something and do not say so as they should."""
    wrong: list[str] = []
    begin = f"the server denies our user .*{re.escape(denied_by(lack).rstrip('*>').rstrip('.'))}"
    for path, (status, text) in found.items():
        names = re.search(rf"{begin}.*give it the role operator", text) is not None
        answers = status == 200 or (status == 503 and path in lack.lost)
        if not answers or names < (path in lack.named) or (SHOWN[path] in text) is (path in lack.lost):
            wrong.append(f"{lack.subject}: {path}: {status} {text}")
    if "/" in lack.named and "othing is known of" not in found["/"][1]:
        wrong.append(f"{lack.subject}: the sentence of Now: {found['/'][1]}")
    return wrong


@pytest.mark.slow
async def test_each_subject_that_a_page_asks_for_is_denied_above(
    nats_server: NatsServer, config: Config, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_each: defaultdict[int, set[str]] = defaultdict(set)
    """By connection: that of the app's worker asks too."""
    api, post = NatsConnection.api, NatsConnection.post

    async def api_noted(self: NatsConnection, subject: str, *given: object, **named: object) -> object:
        of_each[id(self)].add(subject)
        return await api(self, subject, *given, **named)  # type: ignore[arg-type]

    def post_noted(self: NatsConnection, subject: str, *given: object, **named: object) -> None:
        of_each[id(self)].add(subject)
        post(self, subject, *given, **named)  # type: ignore[arg-type]

    async with harness(app, server=url_of(nats_server)), served(config) as console:
        await prepare(config, app)
        monkeypatch.setattr(NatsConnection, "api", api_noted)
        monkeypatch.setattr(NatsConnection, "post", post_noted)
        assert {status for status, _ in (await pages(console)).values()} == {200}
        monkeypatch.undo()
    (asked,) = [each for each in of_each.values() if "STREAM.LIST" in each]
    known = [re.escape(lack.subject).replace(r"\*", "[^.]+").replace(">", ".+") for lack in ALL]
    unknown = [each for each in asked if not any(re.fullmatch(rf"{one}(\.[^.]+)?", each) for one in known)]
    # Of the streams that nothing is special about, the same is asked as of those above.
    others = re.compile(r"STREAM\.INFO\.(aviso_workers_schedule__[A-Z]+|aviso_workers_retries__field-index|AREA|PLAIN)")
    left = [each for each in unknown if not others.fullmatch(each)]
    assert left == [], "\n".join(left)


@pytest.mark.parametrize(
    ("lack", "state"),
    [
        (LACKS["streams"][0], "unknown"),
        (LACKS["consumers"][0], "unknown"),
        (LACKS["consumers"][2], "unknown"),
        (LACKS["records"][0], "unknown"),
        (LACKS["workers"][0], "unknown"),
        (LACKS["dead letters"][0], "idle"),
    ],
)
async def test_what_cannot_be_known_is_not_told_as_well(nats_server: NatsServer, lack: Lack, state: str) -> None:
    app = App("field-index", config=config_of(nats_server))

    @app.agent("mars")
    async def index(notification: Notification) -> None: ...

    async with harness(app, server=url_of(nats_server)) as t:
        await publish(app, 1)
        await t.settle()
        await app.session.backend.create_stream(dead_letter_records.stream_spec(app.name, app.config))
        async with served(config_of(nats_server, lack)) as console, console.client() as client:
            now = await shown(client, "/", "othing is known of what $JS.API.")
            agents = await shown(client, "/agents", f"{state} field-index/index MARS")
    assert "Nothing needs you" not in now
    assert ("1 agent needs you" in now) is (state == "unknown")
    assert "not known, since the server denies our user" in agents.lower()
