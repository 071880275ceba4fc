"""What users do from the console: shown first, done when it is confirmed, and recorded."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from msgspec import structs

from aviso_workers import Ack, App, Reject
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.console import actions, dead_letters, jobs
from aviso_workers.errors import OutcomeUnknownError, UnavailableError
from aviso_workers.ops import audit
from aviso_workers.state import orders, own_streams, timer_requests, worker_records
from aviso_workers.state.own_streams import AUDIT
from aviso_workers.state.timer_requests import Run
from aviso_workers.state.worker_records import AppWorkers
from aviso_workers.testing import Harness
from tests.console.conftest import Served, confirm, confirmed, filled_in, hidden_fields, publish, served, shown, text_of
from tests.ops import health_facts
from tests.waits import PATIENCE_SECONDS

DEAD_LETTERS = own_streams.of_app(own_streams.DEAD_LETTERS, "field-index")
RETRIES = own_streams.of_app(own_streams.RETRIES, "field-index")

pytestmark = pytest.mark.anyio

FAILS = {"app": "field-index", "agent": "fails"}
BLOCKS = {"app": "field-index", "agent": "blocks"}
INDEX = {"app": "field-index", "agent": "index"}
REPORT = {"app": "field-index", "timer": "report"}


async def test_nothing_is_done_before_it_is_confirmed(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        asked = await client.post("/actions/pause-agent", data={**INDEX, "for": "2h"})
    assert "All workers of field-index/index get no notifications for 2h." in text_of(asked.text)
    assert not (await console.admin.consumer_info("MARS", "field-index__index")).paused
    assert AUDIT not in await console.admin.stream_names()


@pytest.mark.slow
async def test_an_agent_is_paused_and_resumed(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        done = await confirmed(client, "pause-agent", **INDEX, **{"for": "2h"})
        assert (done.status_code, done.headers["location"]) == (303, "/agents/field-index/index")
        assert (await console.admin.consumer_info("MARS", "field-index__index")).paused
        await shown(
            client, "/agents/field-index/index", "paused", "by anna, console until", "anna Pause agent : paused until"
        )
        await confirmed(client, "resume-agent", **INDEX)
        assert not (await console.admin.consumer_info("MARS", "field-index__index")).paused
        page = await shown(client, "/audit", "All 2 actions since")
    assert "anna Pause agent field-index/index for 2h “a test” paused until" in page


@pytest.mark.parametrize(
    ("action", "fields", "said"),
    [
        ("pause-agent", {**INDEX, "for": "soon"}, "for how long: "),
        ("pause-agent", {**INDEX, "for": "0s"}, "0s would pause nothing"),
        ("pause-agent", {"app": "other", "agent": "index"}, "no agent index of app other"),
        ("reset-agent", INDEX, "say where the agent is to go on"),
        ("reset-agent", {**INDEX, "to": "4711"}, "an agent cannot go on at 4711"),
        ("retry-notifications", BLOCKS, "blocks of field-index retries nothing"),
        ("retry-dead-letters", {"rate": "many"}, "no dead letter matches"),
        ("stop-job", {"number": "4"}, "no job 4"),
    ],
)
async def test_what_cannot_be_done_is_said_and_not_recorded(
    console: Served, app: App, running: Harness, action: str, fields: dict[str, str], said: str
) -> None:
    await publish(app, 1)
    async with console.client() as client:
        answer = await client.post(f"/actions/{action}", data=fields)
    assert answer.status_code in (400, 404)
    assert said in text_of(answer.text)
    assert AUDIT not in await console.admin.stream_names()


@pytest.mark.slow
async def test_an_agent_is_reset(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1, 2)
    await running.settle()
    async with console.client() as client:
        asked = await client.post("/actions/reset-agent", data={**INDEX, "to": "all"})
        assert "2 notifications that it has been given before would be given again." in text_of(asked.text)
        await client.post("/actions/reset-agent", data=hidden_fields(asked.text, "reset-agent"))
        await shown(client, "/audit", "Reset agent", "it goes on at 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "why", "said"),
    [
        ("2", "duplicates", "You have typed 2, and 3 would be lost. Nothing was done: type 3 if you mean it."),
        ("", "duplicates", "You have typed no number, and 3 would be lost."),
        ("3", " ", "Nothing was done: say why, for the audit."),
    ],
)
async def test_what_is_erased_is_erased_with_its_number_and_a_reason_only(
    console: Served, app: App, running: Harness, typed: str, why: str, said: str
) -> None:
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "3 dead letters,")
        asked = await client.post("/actions/drop-dead-letters", data={"agent": "fails"})
        assert "Erase 3 dead letters for good?" in text_of(asked.text)
        form = {**hidden_fields(asked.text, "drop-dead-letters"), "number": typed, "why": why}
        again = await client.post("/actions/drop-dead-letters", data=form)
        assert (again.status_code, said in text_of(again.text)) == (200, True), text_of(again.text)
        assert (f'value="{why}"' in again.text) is bool(why), "what was filled in stays"
        assert AUDIT not in await console.admin.stream_names()
        done = await client.post("/actions/drop-dead-letters", data={**form, "number": "3", "why": "duplicates"})
        assert done.headers["location"] == "/jobs/1"
        await shown(client, "/jobs/1", "3 of 3 erased.", "“duplicates”")
        told = "anna, console erased dead letter 1 of field-index/fails, “duplicates”"
        await shown(client, "/notification?name=mars@1", told)
        (action,) = await audit.Audit(console.admin, console.config).newest(1)
    assert action.record.selection["why"] == "duplicates"


@pytest.mark.slow
async def test_the_number_is_typed_where_many_are_passed_over(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MANY", 2)
    await publish(app, 1)
    await confirmed_pause(console)
    await publish(app, 1, 1, 1)
    async with console.client() as client:
        asked = await client.post("/actions/reset-agent", data={**INDEX, "to": "new"})
        assert "Type 3 to go on" in text_of(asked.text)
        refused = await client.post("/actions/reset-agent", data=hidden_fields(asked.text, "reset-agent"))
        assert "You have typed no number, and 3 would be lost." in text_of(refused.text)
        assert (await confirm(client, "reset-agent", asked)).status_code == 303


async def confirmed_pause(console: Served) -> None:
    async with console.client() as client:
        assert (await confirmed(client, "pause-agent", **INDEX)).status_code == 303


@pytest.mark.slow
async def test_a_retry_says_that_the_agent_is_paused_and_that_two_versions_run(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def of_app(admin: Admin, app: str) -> AppWorkers:
        found = [structs.replace(health_facts.worker(name), code=code) for name, code in versions.items()]
        return AppWorkers(living=tuple(found))

    versions = {"a": "1.0", "b": "1.0", "c": "1.1"}
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        asked = await client.post("/actions/retry-dead-letters", data={"agent": "fails"})
        assert "Retry 1 dead letter?" in text_of(asked.text)
        assert "is paused" not in asked.text
        await confirmed(client, "pause-agent", app="field-index", agent="fails")
        monkeypatch.setattr(worker_records, "of_app", of_app)
        again = text_of((await confirm(client, "retry-dead-letters", asked)).text)
    assert "Something has changed since you were asked." in again
    assert "field-index/fails is paused: they wait until somebody resumes it." in again
    assert "field-index runs 1.0 on 2 workers and 1.1 on 1 worker: some may come to the version" in again


@pytest.mark.slow
async def test_what_has_changed_since_it_was_shown_is_asked_again(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1)
    await running.settle()
    async with console.client() as client:
        asked = await client.post("/actions/reset-agent", data={**INDEX, "to": "all"})
        await publish(app, 2)
        await running.settle()
        again = await client.post("/actions/reset-agent", data=hidden_fields(asked.text, "reset-agent"))
    assert again.status_code == 200
    assert "Something has changed since you were asked." in text_of(again.text)
    assert AUDIT not in await console.admin.stream_names()


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(500, marks=pytest.mark.slow)])
async def test_all_dead_letters_of_a_filter_are_retried_as_a_job(
    console: Served, app: App, running: Harness, count: int
) -> None:
    (fails,) = [agent for agent in app.agents if agent.name == "fails"]
    fails.on_error(ValueError)(lambda error: Reject(str(error)))  # an answer, which is not paced as failures are
    await publish(app, *[3] * count)
    async with console.client() as client:
        await shown(client, "/dead-letters?agent=fails&error=no+such", f"{count} dead letters,")
        done = await confirmed(client, "retry-dead-letters", agent="fails", error="no such")
        assert done.headers["location"] == "/jobs/1"
        page = await shown(client, "/jobs/1", f"{count} of {count} handed back.")
        assert "chosen by agent fails, error no such most per second all at once" in page
        await shown(client, "/dead-letters", f"{count} dead letters,")
        await shown(client, "/audit", "Retry dead letters", f"{count} of {count} handed back")
        again = f"0 of {count} are handled; {count} became dead letters again"
        await shown(client, "/jobs/1", f"{again}. {count} of {count} handed back.")
        await shown(client, "/dead-letters", f"Retry of {count} anna", f"failed again {again}")


@pytest.mark.slow
async def test_a_job_says_that_all_are_handled(console: Served, app: App, running: Harness) -> None:
    (fails,) = [agent for agent in app.agents if agent.name == "fails"]
    mended = False
    fails.on_error(ValueError)(lambda error: Ack() if mended else Reject(str(error)))
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters?agent=fails", "3 dead letters,")
        mended = True
        await confirmed(client, "retry-dead-letters", agent="fails")
        await shown(
            client, "/jobs/1", "3 of 3 are handled. 3 of 3 handed back.", "handled 3 dead letters again 0 wait 0"
        )
        await shown(client, "/dead-letters", "done 3 of 3 are handled")
        handled = await shown(client, "/notification?name=mars@1", "handled field-index/fails Handed back at ")
    assert " by anna, console, and settled since" in handled


@pytest.mark.slow
async def test_a_job_does_not_count_as_handled_what_was_a_dead_letter_again(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters?agent=fails", "2 dead letters,")
        await confirmed(client, "retry-dead-letters", agent="fails")
        await shown(client, "/jobs/1", "0 of 2 are handled; 2 became dead letters again")
        await confirmed(client, "drop-dead-letters", agent="fails")
        await shown(client, "/dead-letters", "There are none.", "done 2 of 2 erased")
        await shown(client, "/jobs/1", "0 of 2 are handled; 2 became dead letters again")


@pytest.mark.slow
async def test_what_waits_for_a_paused_agent_is_not_handled(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters?agent=fails", "1 dead letter,")
        await confirmed(client, "pause-agent", app="field-index", agent="fails")
        await confirmed(client, "retry-dead-letters", agent="fails")
        said = "0 of 1 are handled; 1 waits for its agent. 1 of 1 handed back. This page says when none waits any more."
        await shown(client, "/jobs/1", said)
        await shown(client, "/dead-letters", "waits 0 of 1 are handled; 1 waits for its agent")


@pytest.mark.slow
async def test_what_was_erased_from_the_console_says_by_whom(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        await confirmed(client, "drop-dead-letters", agent="fails")
        erased = await shown(client, "/notification?name=mars@1", "erased field-index/fails Its dead letter 1 was ")
    assert " by anna, console" in erased


@pytest.mark.slow
async def test_those_that_came_after_it_was_shown_are_left_alone(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        asked = await client.post("/actions/drop-dead-letters", data={"agent": "fails"})
        await publish(app, 3)
        await shown(client, "/dead-letters", "2 dead letters,")
        await confirm(client, "drop-dead-letters", asked)
        await shown(client, "/jobs/1", "Erasure of 1", "1 of 1 erased.")
        await shown(client, "/dead-letters", "1 dead letter,")


@pytest.mark.slow
async def test_one_dead_letter_is_erased_from_its_page(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "2 dead letters,")
        page = await client.get("/dead-letters/field-index/1")
        asked = await client.post("/actions/drop-dead-letters", data=hidden_fields(page.text, "drop-dead-letters"))
        assert (
            "1 dead letter of field-index/fails (sequence 1) is erased. Nobody can bring back or retry what is erased."
            in text_of(asked.text)
        )
        await confirm(client, "drop-dead-letters", asked)
        await shown(client, "/jobs/1", "Erasure of 1", "1 of 1 erased.")
        await shown(client, "/dead-letters", "1 dead letter,")
        assert (await client.get("/dead-letters/field-index/2")).status_code == 200


@pytest.mark.slow
async def test_a_job_is_stopped(console: Served, app: App, running: Harness) -> None:
    await publish(app, *[3] * 5)
    async with console.client() as client:
        await shown(client, "/dead-letters", "5 dead letters,")
        await confirmed(client, "retry-dead-letters", agent="fails", rate="0.001")
        await shown(client, "/jobs/1", "1 of 5 are handed back so far.")
        await confirmed(client, "stop-job", number="1")
        await shown(
            client,
            "/jobs/1",
            "Stopped: 1 of 5 handed back; 4 are not",
            "Not handed back Dead letters field-index/2 , field-index/3",
        )
        await shown(client, "/audit", "stopped 1 of 5 handed back; 4 are not")


@pytest.mark.slow
async def test_retried_notifications_are_decided_about(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 4)
    async with console.client() as client:
        await shown(client, "/agents/field-index/blocks", "at MARS@1 (key od), 1 waits behind it: KeyError")
        answer = await confirmed(client, "retry-notifications", **BLOCKS, sequence="1")
        assert answer.status_code == 303
        await shown(client, "/audit", "Retry notifications", "MARS@1: failed again: KeyError")
        asked = await client.post("/actions/skip-notifications", data={**BLOCKS, "sequence": "1"})
        said = text_of(asked.text)
        assert "1 notification (MARS@1) that field-index/blocks retries becomes a dead letter." in said
        assert "1 notification waits behind, by their ordering key, and will run without them." in said
        await client.post("/actions/skip-notifications", data=hidden_fields(asked.text, "skip-notifications"))
        await shown(client, "/audit", "Skip notifications", "MARS@1: skipped: it is a dead letter now")
        page = await shown(client, "/agents/field-index/blocks", "blocks idle", "Nothing is retried.")
    assert "SkippedError" not in page, "what somebody decides is no failure"


@pytest.mark.slow
async def test_a_timer_is_paused_and_resumed(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await shown(client, "/timers", "field-index/report")
        await confirmed(client, "pause-timer", **REPORT, why="the archive is down")
        await shown(client, "/timers", "by anna, console: the archive is down")
        await confirmed(client, "resume-timer", **REPORT)
        await shown(client, "/timers", without="paused until")


@pytest.mark.slow
async def test_a_worker_runs_a_timer_now(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await shown(client, "/timers", "field-index/report", "Run now")
        await confirmed(client, "run-timer", **REPORT)
        await shown(client, "/timers", "asked for by anna", f":{os.getpid()}, done in 0.0 s")
        await shown(client, "/audit", "anna Run timer field-index/report")
    assert len(running.ticks("report")) == 1


async def test_a_run_that_nobody_takes_says_so(console: Served, app: App, running: Harness) -> None:
    bucket = await orders.bucket(console.admin, "field-index")
    async with console.client() as client:
        await shown(client, "/timers", "field-index/report")
        late = Run(asked=await bucket.time() - timedelta(seconds=70), by="anna")
        await bucket.put(timer_requests.runs_key("field-index"), msgspec.json.encode({"report": late}))
        await shown(
            client, "/timers", "asked for by anna 1 min ago", "no worker has taken it within 60 s, and none will"
        )


@pytest.mark.slow
async def test_the_configuration_is_applied_to_a_stream_that_differs(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 1)
    info = await console.admin.stream_info("MARS")
    await console.admin.update_stream({**info.config, "max_msgs_per_subject": 7})
    async with console.client() as client:
        await shown(client, "/streams", "Not as configured", "MARS : max_msgs_per_subject: 7 -&gt;")
        await confirmed(client, "apply-streams")
        await shown(client, "/streams", without="Not as configured")
        await shown(client, "/audit", "anna Apply streams streams streams MARS,")
    assert (await console.admin.stream_info("MARS")).config.max_msgs_per_subject == 1


async def test_a_sealed_stream_is_told(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1)
    admin = console.admin.administration()
    config = (await admin.api("STREAM.INFO.MARS"))["config"]
    await admin.api("STREAM.UPDATE.MARS", {**config, "sealed": True})
    async with console.client() as client:
        said = "sealed: it takes no publish any more"
        await shown(client, "/streams", said, "a sealed stream takes no publish any more, and cannot be opened")
        await shown(client, "/", said, "1 stream has trouble")


async def test_an_action_that_cannot_be_recorded_is_not_done(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await confirmed(client, "pause-timer", **REPORT)  # makes the stream
        await console.admin.administration().api(f"STREAM.UPDATE.{AUDIT}", await sealed(console))
        answer = await confirmed(client, "pause-agent", **INDEX)
    assert answer.status_code == 503
    assert not (await console.admin.consumer_info("MARS", "field-index__index")).paused


async def sealed(console: Served) -> object:
    info = await console.admin.stream_info(AUDIT)
    seal = {"sealed": True, "deny_delete": True, "deny_purge": True, "allow_rollup_hdrs": False}
    return {**info.answer["config"], **seal}


async def test_an_audit_stream_that_was_deleted_is_made_again(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await confirmed(client, "pause-timer", **REPORT)
        await console.admin.delete_stream(AUDIT)
        done = await confirmed(client, "pause-agent", **INDEX)
        assert done.status_code == 303
        await shown(client, "/audit", "All 1 action since", "anna Pause agent")
        await shown(client, "/audit?who=bert", "None of the 1 action since")


async def test_a_reset_that_is_sent_twice_is_done_once(console: Served, app: App, running: Harness) -> None:
    await publish(app, 1, 2)
    await running.settle()
    async with console.client() as client:
        asked = await client.post("/actions/reset-agent", data={**INDEX, "to": "1"})
        form = hidden_fields(asked.text, "reset-agent")
        answers = [await client.post("/actions/reset-agent", data=form) for _ in range(2)]
        await running.settle()
        actions = await audit.Audit(console.admin, console.config).newest(10)
        too_long = await client.post("/actions/pause-agent", data={**INDEX, "confirmed": "x"})
        pause = {**hidden_fields(too_long.text, "pause-agent"), "why": "x" * 501}
        too_long = await client.post("/actions/pause-agent", data=pause)
    assert [answer.headers.get("location") for answer in answers] == 2 * ["/agents/field-index/index"]
    assert [action.record.action for action in actions] == ["reset-agent"]
    assert "Nothing was done: the reason has 501 characters. Say it in 500 at most." in text_of(too_long.text)


@pytest.mark.slow
async def test_a_form_that_is_sent_twice_begins_one_job(console: Served, app: App, running: Harness) -> None:
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "3 dead letters,")
        asked = await client.post("/actions/retry-dead-letters", data={"agent": "fails", "rate": "0.001"})
        form = {**hidden_fields(asked.text, "retry-dead-letters"), "rate": "0.001"}  # and no reason
        answers = [await client.post("/actions/retry-dead-letters", data=form) for _ in range(2)]
        await shown(client, "/jobs/1", "1 of 3")
        answers.append(await client.post("/actions/retry-dead-letters", data=form))
        assert [answer.headers.get("location") for answer in answers] == 3 * ["/jobs/1"]
        await confirmed(client, "stop-job", number="1")
        assert (await client.get("/jobs/2")).status_code == 404


@pytest.mark.slow
async def test_of_two_jobs_on_the_same_dead_letters_each_counts_its_own(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, *[3] * 40)
    async with console.client() as client, served(console.config) as other, other.client() as of_other:
        await shown(client, "/dead-letters", "40 dead letters,")
        asked = await client.post("/actions/drop-dead-letters", data={"agent": "fails"})
        form = hidden_fields(asked.text, "drop-dead-letters") | filled_in(asked.text)
        async with anyio.create_task_group() as confirming:
            for each in (client, of_other):
                confirming.start_soon(partial(each.post, "/actions/drop-dead-letters", data=form))
        pages = [await shown(each, "/jobs/1", " of 40 erased", without="it goes on") for each in (client, of_other)]
    counts = [int(re.findall(r"result (\d+) of 40 erased", page)[0]) for page in pages]
    assert sum(counts) == 40, pages


@pytest.mark.parametrize("timer", [{"app": "field-index", "timer": "other"}, {"app": "", "timer": ""}])
async def test_a_timer_that_nobody_has_recorded_is_not_paused(
    console: Served, app: App, running: Harness, timer: dict[str, str]
) -> None:
    async with console.client() as client:
        answer = await client.post("/actions/pause-timer", data=timer)
    assert (answer.status_code, "no worker has recorded a timer" in text_of(answer.text)) == (404, True)


@pytest.mark.parametrize("agent", [{"app": "a\0b", "agent": "c"}, {"app": "a", "agent": "\n.*"}])
async def test_what_is_no_name_is_refused_at_once(console: Served, agent: dict[str, str]) -> None:
    async with console.client() as client:
        answer = await client.post("/actions/pause-agent", data=agent)
    assert (answer.status_code, "use 1 to 64 letters" in text_of(answer.text)) == (400, True)


async def test_an_action_whose_end_is_missing_is_seen(console: Served, app: App, running: Harness) -> None:
    async with console.client() as client:
        await confirmed(client, "pause-timer", **REPORT)
        await shown(client, "/audit", "All 1 action since")
        await console.admin.delete_message(AUDIT, 2)  # as where the console was killed before it could store it
        await shown(client, "/audit", "no end is recorded")


@pytest.mark.slow
async def test_a_job_tells_what_has_failed_again_and_reads_only_what_is_new(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []

    def read(stream: str, *, start_sequence: int = 1, **given: Any) -> AsyncGenerator[Message, None]:
        if stream == DEAD_LETTERS and start_sequence > 1:
            starts.append(start_sequence)
        return reading(stream, start_sequence=start_sequence, **given)

    reading = console.admin.read
    monkeypatch.setattr(console.admin, "read", read)
    monkeypatch.setattr(dead_letters, "LOOK_SECONDS", PATIENCE_SECONDS)
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters?agent=fails", "3 dead letters,")
        await confirmed(client, "retry-dead-letters", agent="fails")
        await shown(client, "/jobs/1", "0 of 3 are handled; 3 became dead letters again. 3 of 3 handed back.")
        starts.clear()
        await publish(app, 3)
        await shown(client, "/dead-letters", "4 dead letters,")
        for _ in range(3):
            await shown(client, "/jobs/1", "3 became dead letters again")
        assert starts == [7]  # the new one, once
        await console.admin.delete_message(DEAD_LETTERS, 5)
        await shown(client, "/jobs/1", "0 of 3 are handled; 3 became dead letters again")
        assert starts == [7, 4]  # those behind the ones that were retried
        await console.admin.delete_stream(DEAD_LETTERS)
        await shown(
            client, "/jobs/1", f"It is not known how many of 3 are handled: the stream {DEAD_LETTERS} was deleted"
        )


@pytest.mark.slow
async def test_a_job_goes_on_where_another_server_has_taken_over(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [
        UnavailableError("its leader is being elected"),
        OutcomeUnknownError("the acknowledgement is missing; it may be stored"),
    ]

    async def publish_many(*given: Any, **named: Any) -> Any:
        results = await publishing(*given, **named)
        return [failures.pop(), *results[1:]] if failures else results  # the first one is stored all the same

    publishing = console.admin.publish_many
    monkeypatch.setattr(dead_letters, "AGAIN_SECONDS", 0.05)
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "3 dead letters,")
        monkeypatch.setattr(console.admin, "publish_many", publish_many)
        await confirmed(client, "retry-dead-letters", agent="fails")
        await shown(client, "/jobs/1", "0 of 3 are handled; 3 became dead letters again. 3 of 3 handed back.")
        assert not failures
        await shown(client, "/dead-letters", "3 dead letters,")  # each was handed back once


@pytest.mark.slow
async def test_a_job_leaves_alone_what_has_its_sequences_in_a_stream_that_was_made_again(
    console: Served, app: App, running: Harness
) -> None:
    await publish(app, 3, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "3 dead letters,")
        await confirmed(client, "drop-dead-letters", agent="fails", rate="0.5")
        await shown(client, "/jobs/1", "1 of 3")
        await console.admin.delete_stream(DEAD_LETTERS)
        await publish(app, 3, 3, 3)
        await shown(
            client, "/jobs/1", "1 of 3 erased; 2 are not, as far as is known", "was deleted or made again since"
        )
        await shown(client, "/audit", "failed 1 of 3 erased; 2 are not")
        await shown(client, "/dead-letters", "3 dead letters,")


@pytest.mark.slow
async def test_the_same_is_done_again_in_a_stream_that_was_made_again(
    console: Served, app: App, running: Harness
) -> None:
    async with console.client() as client:
        for number in (1, 2):
            await publish(app, 3)
            await shown(client, "/dead-letters", "1 dead letter,")
            await confirmed(client, "drop-dead-letters", agent="fails")
            await shown(client, f"/jobs/{number}", "1 of 1 erased")
            await console.admin.delete_stream(DEAD_LETTERS)


@pytest.mark.slow
async def test_a_job_with_which_the_console_ends_blames_nobody(config: Config, app: App, running: Harness) -> None:
    await publish(app, 3, 3)
    async with served(config) as console, console.client() as client:
        await shown(client, "/dead-letters", "2 dead letters,")
        await confirmed(client, "drop-dead-letters", agent="fails", rate="0.001")
        await shown(client, "/jobs/1", "1 of 2")
    async with served(config) as console, console.client() as client:
        await shown(client, "/audit", "stopped 1 of 2 erased; 1 are not, as far as is known")


@pytest.mark.slow
async def test_of_windows_a_job_says_that_it_is_not_known_what_failed_again(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "is_window", lambda _: True)
    await publish(app, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "1 dead letter,")
        await confirmed(client, "retry-dead-letters", agent="fails")
        await shown(client, "/jobs/1", "0 of 1 are handled; of 1 windows it is not known. 1 of 1 handed back.")


@pytest.mark.slow
async def test_a_job_gives_up_where_no_server_takes_over(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def delete_message(*_: Any, **__: Any) -> None:
        raise OutcomeUnknownError("no answer in time")

    monkeypatch.setattr(dead_letters, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(dead_letters, "ELECTION_SECONDS", 2.0)
    monkeypatch.setattr(console.admin, "delete_message", delete_message)
    await publish(app, 3, 3)
    async with console.client() as client:
        await shown(client, "/dead-letters", "2 dead letters,")
        await confirmed(client, "drop-dead-letters", agent="fails")
        await shown(client, "/jobs/1", "0 of 2 erased; 2 are not, as far as is known; 1 to 2: OutcomeUnknownError")


async def test_an_action_that_was_broken_off_does_not_say_that_nothing_was_done(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause_consumer(stream: str, *given: Any, **named: Any) -> Any:
        if stream == RETRIES:
            raise OutcomeUnknownError("no answer in time")
        return await pausing(stream, *given, **named)

    pausing = console.admin.pause_consumer
    monkeypatch.setattr(console.admin, "pause_consumer", pause_consumer)
    async with console.client() as client:
        answer = await confirmed(client, "pause-agent", **INDEX)
        said = text_of(answer.text)
        assert answer.status_code == 503
        assert "no answer in time. It had begun: look whether all of it, a part or nothing is done" in said
        assert "Nothing was done." not in said
        await shown(client, "/audit", "failed BrokenOffError: OutcomeUnknownError: no answer in time")


@pytest.mark.slow
async def test_an_end_is_recorded_when_a_server_answers_again(
    console: Served, app: App, running: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []

    async def publish_one(message: Message, *, message_id: str, stream: str, timeout_seconds: float) -> Any:
        if stream == AUDIT:
            stored.append(message_id)
            if 1 < len(stored) < 5:
                raise OutcomeUnknownError("no answer in time")
        return await publishing(message, message_id=message_id, stream=stream, timeout_seconds=timeout_seconds)

    publishing = console.admin.publish
    monkeypatch.setattr(console.admin, "publish", publish_one)
    monkeypatch.setattr(audit, "AGAIN_SECONDS", 0.05)
    async with console.client() as client:
        await confirmed(client, "pause-timer", **REPORT)
        await shown(client, "/audit", "All 1 action since", "paused until it is resumed")
    assert len(set(stored)) == 2, "each record has one message id"
