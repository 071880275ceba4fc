"""What belongs to an app belongs to it alone: no other app reads it, writes it or changes it, whatever it asks."""

from __future__ import annotations

from collections.abc import Iterator

import nats.errors
import pytest

from aviso_workers.state import dead_letter_records, delayed_messages
from tests.documented import PROJECT
from tests.security import apart
from tests.security.apart import USERS, Site
from tests.security.test_roles import working
from tests.waits import PATIENCE_SECONDS, flushed

ERASING = {"Nats-Rollup": "all"}
pytestmark = pytest.mark.anyio

SITES = [
    pytest.param({}, id="one account"),
    pytest.param({"publishers_apart": True}, id="as rendered", marks=pytest.mark.slow),
    pytest.param({"nodes": 3}, id="three servers", marks=pytest.mark.slow),
]
FOREIGN = {"a": 686, "bridge": 928, "publisher": 1009, "spark": 1009}
"""How many requests there are about what belongs to others, for each user."""
OPERATORS = {"a": 211, "bridge": 95, "publisher": 56, "spark": 58}
"""How many requests there are that operators alone may make about what the user works with."""


@pytest.fixture(scope="module", params=SITES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with apart.started(tmp_path_factory.mktemp("apart"), **request.param) as found:
        yield found


@pytest.mark.slow
def test_workers_have_done_all_that_they_do_and_nothing_was_denied(site: Site) -> None:
    assert site.violations_of_workers == []


@pytest.mark.parametrize("user", USERS)
async def test_each_request_about_what_belongs_to_others_is_denied(site: Site, user: str) -> None:
    wanted = apart.foreign(site, user)
    theirs = {spec.name for spec in site.own("b")} | {"OTHER", "KV_a__orders"}
    before = await site.state(theirs)

    assert sorted({*wanted} - {*await apart.denied(site, user, wanted)}) == []
    assert await site.state(theirs) == before
    assert len(site.violations) >= len(wanted), "the log says so too"
    if site.serves_newer:
        assert len(wanted) == FOREIGN[user]


@pytest.mark.parametrize("user", USERS)
async def test_each_request_that_operators_alone_may_make_is_denied(site: Site, user: str) -> None:
    wanted = apart.operators_only(site, user)
    before = await site.state({"MARS", apart.DELAYED})

    assert sorted({*wanted} - {*await apart.denied(site, user, wanted)}) == []
    assert await site.state({"MARS", apart.DELAYED}) == before
    if site.serves_newer:
        assert len(wanted) == OPERATORS[user]


@pytest.mark.parametrize("user", USERS)
async def test_nobody_hears_what_others_publish_or_are_answered(site: Site, user: str) -> None:
    subjects = sorted(
        {subject for spec in site.own("b") for subject in spec.subjects or ()}
        | {">", "*.>", "other.>", "mars.>", "$JS.>", "$KV.>", "aviso_workers.>", "_INBOX.>", "_INBOX_b.>", "$SYS.>"}
    )
    assert sorted({*subjects} - {*await apart.denied_to_hear(site, user, subjects)}) == []


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
async def test_nobody_reads_what_one_app_alone_has(site: Site, user: str) -> None:
    """What the app `b` has of `other`: notifications, delayed ones, dead letters, retries, tables, windows, records and
    orders.
    """
    assert await apart.secrets_heard_by(site, user) == {}


async def test_who_may_read_it_hears_all_of_it_by_the_same_requests(site: Site) -> None:
    kinds = ["dead_letters__b", "retries__b", "KV_b__state", "KV_b__orders", "KV_b__table__newest", "OTHER"]
    kinds += ["KV_b__windows__daily-other", *(["schedule__OTHER"] if site.serves_newer else [])]
    heard = await apart.secrets_heard_by(site, "everything", expected=kinds)
    assert [kind for kind in kinds if not any(stream.endswith(kind) for stream in heard)] == []


async def test_no_message_erases_the_others_of_a_bucket(site: Site) -> None:
    """A server stores what it delivers to a reply subject with its headers. Only streams of delayed notifications allow
    a message that replaces all others.
    """
    own = {spec.name for spec in site.own("a") if spec.name.startswith("KV_")}
    theirs = {spec.name for spec in site.own("b") if spec.name.startswith("KV_")}
    before = await site.state(theirs)
    assert {each["config"]["allow_rollup_hdrs"] for each in before.values()} == {False}
    async with site.connected("a") as client:
        for bucket in sorted(own - {"KV_a__orders"}):
            subject = f"$KV.{bucket.removeprefix('KV_')}.key"
            answer = await client.request(subject, b"", timeout=PATIENCE_SECONDS, headers=ERASING)
            assert "rollup not permitted" in answer.data.decode()
        if site.serves_newer:
            delayed, waits = delayed_messages.stream_of("MARS"), delayed_messages.waiting("MARS", "erasing")
            await client.request(waits, b"", timeout=PATIENCE_SECONDS, headers=ERASING)
            config = {"name": "a-r0", "filter_subject": waits, "ack_policy": "none", "mem_storage": True}
            for bucket in sorted(theirs):
                body = {"stream_name": delayed, "config": config, "action": "create"}
                assert "config" in await apart.ask(client, f"CONSUMER.CREATE.{delayed}.a-r0", **body)
                reply = f"$KV.{bucket.removeprefix('KV_')}.key"
                await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{delayed}.a-r0", b'{"batch": 1}', reply=reply)
                await flushed(client)  # the server has taken the request before it hears of the next one
                await apart.ask(client, f"CONSUMER.DELETE.{delayed}.a-r0")
    assert await site.state(theirs) == before


@pytest.mark.slow
async def test_no_id_that_another_app_has_used_makes_a_dead_letter_a_duplicate(site: Site) -> None:
    """Another app of the stream knows the ids of dead letters before there are any: they follow from what failed."""
    async with site.app("b") as app, site.operator() as operator:
        await site.retry(operator, "b")  # what earlier tests have left
        sequence, stored_at = await apart.fail(app, "mars", 7)
        async with site.connected("a") as client:
            for agent in ("index-mars", "daily-mars", "x"):
                headers = {"Nats-Msg-Id": f"b.{agent}.MARS.{sequence}.{stored_at}."}
                own = dead_letter_records.subject_of("a", agent)
                await client.request(own, b"{}", timeout=PATIENCE_SECONDS, headers=headers)
                foreign = dead_letter_records.subject_of("b", agent)
                with pytest.raises(nats.errors.TimeoutError):
                    await client.request(foreign, b"{}", timeout=0.2, headers=headers)
        async with (worker := site.app("b")), working(worker):
            await apart.until(lambda: site.has_failed(operator, "b", 7, bases=["mars"]))
        [found] = [each for each in await site.letters(operator, "b") if each.original.subject == "mars.od.7"]
        assert (found.app, found.agent, (found.stored.headers or {})["Aviso-Sequence"]) == (
            "b",
            "index-mars",
            str(sequence),
        )


def test_the_page_says_how_many_requests_are_denied() -> None:
    said = f"{FOREIGN['a']} requests of another app's worker, up to {max(FOREIGN.values()):,} of the other roles"
    assert said in (PROJECT / "docs/security/apps.md").read_text()
