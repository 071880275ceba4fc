#!/usr/bin/env python3
"""Publish, watch and replay on this installation, and compare a stream's policy with what is expected.

The configuration is that of this installation: AVISO_WORKERS_CONFIG_FILE, else AVISOSERVER_CONFIG_FILE, else the files
of aviso-server; smoke_test.yaml where there is none. It must have the event types `mars`, `dissemination` and
`test_polygon` of aviso-server's example. Streams are used as they are: none is created and none is changed.

Environment, where a variable that is empty counts as not set: BACKEND (in_memory or jetstream) and NATS_URL in place of
what the configuration says, TIMEOUT_SECONDS (8), JETSTREAM_POLICY_STREAM_NAME (POLYGON), SMOKE_VERBOSE (true is -v),
and what the policy of that stream is compared with: EXPECT_MAX_MESSAGES, EXPECT_MAX_BYTES,
EXPECT_MAX_MESSAGES_PER_SUBJECT, EXPECT_COMPRESSION (s2 or true, none or false).

Prints a line for each check, and exits 0 only if none has failed. A few notifications are published to the streams of
these event types: agents that read them will get them, and a stream that is full gives up its oldest for them.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct, structs

from aviso_workers import App, AvisoWorkersError, Notification, Receipt
from aviso_workers import config as configuration
from aviso_workers.errors import ConfigError, NotFoundError

FALLBACK = Path(__file__).with_name("smoke_test.yaml")
CONFIG_FILES = ("AVISO_WORKERS_CONFIG_FILE", "AVISOSERVER_CONFIG_FILE")
EXPECTED_LIMITS = {
    "EXPECT_MAX_MESSAGES": "max_msgs",
    "EXPECT_MAX_BYTES": "max_bytes",
    "EXPECT_MAX_MESSAGES_PER_SUBJECT": "max_msgs_per_subject",
}
COMPRESSIONS = {"s2": "s2", "true": "s2", "none": "none", "false": "none"}
SQUARE = "(52.5,13.4,52.6,13.4,52.6,13.6,52.5,13.6,52.5,13.4)"
INSIDE, ELSEWHERE = "52.55,13.5", "10,10"


class Settings(Struct, frozen=True, kw_only=True):
    """What the environment and the command line say."""

    timeout_seconds: float
    policy_stream: str
    expected_policy: Mapping[str, str]
    """By the field of the stream's configuration."""
    verbose: bool


class CheckFailedError(Exception):
    """A check does not hold; its text says what was there instead."""


class CheckSkippedError(Exception):
    """A check does not apply here."""


class Installation:
    """The app under test: it publishes and reads, and says so with -v."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.settings = settings
        self._app = app

    def say(self, text: str) -> None:
        if self.settings.verbose:
            print(f"      {text}")

    async def publish(self, event_type: str, identifier: Mapping[str, Any], payload: Any) -> Receipt:
        with anyio.fail_after(self.settings.timeout_seconds):
            receipt = await self._app.notify(event_type, identifier, payload)
        self.say(f"published {event_type}@{receipt.sequence}: {dict(identifier)}")
        return receipt

    async def publish_mars(self, **identifier: Any) -> Receipt:
        fields = {"class": "od", "expver": "1", "domain": "g", "date": "20250706", "time": "1200", "step": 1}
        return await self.publish("mars", {**fields, **identifier}, "a smoke test's")

    async def publish_dissemination(self, **identifier: Any) -> Receipt:
        fields = {"destination": "FOO", "class": "od", "expver": "1", "domain": "g", "date": "20250706", "time": "1200"}
        return await self.publish("dissemination", {**fields, "stream": "enfo", "step": 1, **identifier}, {})

    async def publish_polygon(self, date: str, time: str = "1200") -> Receipt:
        return await self.publish("test_polygon", {"date": date, "time": time, "polygon": SQUARE}, {})

    async def replay(self, event_type: str, where: Mapping[str, Any], **between: Any) -> list[Notification[Any]]:
        with anyio.fail_after(self.settings.timeout_seconds):
            found = [notification async for notification in self._app.replay(event_type, where, **between)]
        self.say(f"replayed {len(found)} of {event_type} where {where}: {[each.id for each in found]}")
        return found

    def watch(self, event_type: str, where: Mapping[str, Any], **start: Any) -> AsyncGenerator[Notification[Any], None]:
        return self._app.watch(event_type, where, **start)

    async def policy(self, stream: str) -> Mapping[str, Any]:
        """Return the stream's configuration as the server has it. Raises `NotFoundError`."""
        backend = self._app.session.backend
        if self._app.config.notification_backend.kind != "jetstream":
            raise CheckSkippedError("the backend keeps no stream policy")
        config = (await backend.stream_info(stream)).config
        self.say(f"{stream} has {dict(config)}")
        return config


async def the_stream_policy_is_in_effect(installation: Installation) -> None:
    """The first check, so that it sees the stream as it was before anything was published."""
    settings = installation.settings
    if not settings.expected_policy:
        raise CheckSkippedError("no EXPECT_* is set")
    try:
        policy = await installation.policy(settings.policy_stream)
    except NotFoundError as error:
        raise CheckSkippedError(f"stream {settings.policy_stream} does not exist") from error
    found = {field: str(policy.get(field) or "none") for field in settings.expected_policy}
    wrong = [
        f"{field} {found[field]}, expected {expected}"
        for field, expected in settings.expected_policy.items()
        if found[field] != expected
    ]
    expect(not wrong, f"{settings.policy_stream} has {' and '.join(wrong)}")


async def publishing_is_acknowledged(installation: Installation) -> None:
    receipt = await installation.publish_mars(stream="smoke")
    expect(receipt.sequence > 0, f"sequence {receipt.sequence}")


async def a_watch_sees_what_comes_and_not_what_was(installation: Installation) -> None:
    date = unique_date()
    before = await installation.publish_polygon(date)
    found: list[Notification[Any]] = []

    async def publish_until_seen() -> None:
        """A watch does not say when it has begun: publish until it shows something."""
        while not found:
            await installation.publish_polygon(date, "1300")
            await anyio.sleep(0.1)

    async def watch() -> None:
        where = {"date": date, "polygon": SQUARE}
        async with aclosing(installation.watch("test_polygon", where)) as watched:
            found.append(await anext(watched))

    with anyio.fail_after(installation.settings.timeout_seconds):
        await run_together(watch, publish_until_seen)
    expect(found[0].sequence > before.sequence, f"{found[0].id} came, {before.sequence} was there before")


async def a_watch_goes_from_history_to_live(installation: Installation) -> None:
    target = unique("target.v1")
    await installation.publish_dissemination(target=target, step=1)
    between = await a_date_between()
    await installation.publish_dissemination(target=target, step=2)
    steps: list[str] = []
    with anyio.fail_after(installation.settings.timeout_seconds):
        async with aclosing(
            installation.watch("dissemination", {"target": target}, from_date=between)
        ) as notifications:
            async for notification in notifications:
                steps.append(notification.identifier["step"])
                if len(steps) == 2:
                    break
                await installation.publish_dissemination(target=target, step=3)
    expect(steps == ["2", "3"], f"steps {steps}, expected 2, which was stored after {between}, and 3, which was live")


async def a_replay_starts_at_an_id(installation: Installation) -> None:
    date = unique_date()
    one, two = [await installation.publish_polygon(date, time) for time in ("1200", "1300")]
    found = [each.sequence for each in await installation.replay("test_polygon", {"date": date}, from_id=two.sequence)]
    expect(found == [two.sequence], f"{found} from {two.sequence} on; {one.sequence} was before")


async def a_replay_starts_at_a_date(installation: Installation) -> None:
    date = unique_date()
    await installation.publish_polygon(date)
    between = await a_date_between()
    newer = await installation.publish_polygon(date, "1300")
    found = [each.sequence for each in await installation.replay("test_polygon", {"date": date}, from_date=between)]
    expect(found == [newer.sequence], f"{found} from {between} on, expected {newer.sequence}")


async def an_id_and_a_date_exclude_each_other(installation: Installation) -> None:
    try:
        await installation.replay("mars", {}, from_id=1, from_date="2025-01-01T00:00:00Z")
    except AvisoWorkersError:
        return
    raise CheckFailedError("both were taken")


async def a_reserved_character_is_carried(installation: Installation) -> None:
    stream = f"{unique('a.b*c')}>d%e"
    receipt = await installation.publish_mars(stream=stream)
    found = await installation.replay("mars", {"stream": stream}, from_id=receipt.sequence)
    expect(
        [each.identifier["stream"] for each in found] == [stream],
        f"{[(each.identifier['stream'], each.topic) for each in found]}, expected {stream!r}",
    )


async def a_number_can_be_constrained(installation: Installation) -> None:
    stream = unique("step")
    for step in (3, 4, 5):
        await installation.publish_mars(stream=stream, step=step)
    found = await installation.replay("mars", {"stream": stream, "step": {"gte": 4}})
    steps = [each.identifier["step"] for each in found]
    expect(steps == ["4", "5"], f"steps {steps} at 4 and above")


async def a_value_can_be_one_of_several(installation: Installation) -> None:
    stream = unique("domain")
    for domain in ("g", "a", "z"):
        await installation.publish_mars(stream=stream, domain=domain)
    found = await installation.replay("mars", {"stream": stream, "domain": {"in": ["g", "a"]}})
    domains = sorted(each.identifier["domain"] for each in found)
    expect(domains == ["a", "g"], f"domains {domains} of g and a")


async def a_point_finds_the_polygons_around_it(installation: Installation) -> None:
    date = unique_date()
    receipt = await installation.publish_polygon(date)
    for point, expected in ((INSIDE, [receipt.sequence]), (ELSEWHERE, [])):
        where = {"date": date, "point": point}
        found = await installation.replay("test_polygon", where, from_id=receipt.sequence)
        expect([each.sequence for each in found] == expected, f"{found} around {point}, expected {expected}")


Check = Callable[[Installation], Awaitable[None]]
CHECKS: tuple[Check, ...] = (
    the_stream_policy_is_in_effect,
    publishing_is_acknowledged,
    a_watch_sees_what_comes_and_not_what_was,
    a_watch_goes_from_history_to_live,
    a_replay_starts_at_an_id,
    a_replay_starts_at_a_date,
    an_id_and_a_date_exclude_each_other,
    a_reserved_character_is_carried,
    a_number_can_be_constrained,
    a_value_can_be_one_of_several,
    a_point_finds_the_polygons_around_it,
)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


async def run_together(*functions: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run all of them at the same time. Raises the first error of any as it is, not in a group."""
    try:
        async with anyio.create_task_group() as tasks:
            for function in functions:
                tasks.start_soon(function)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def unique(name: str) -> str:
    """Return an identifier value that no other run has used, so that a run finds only its own notifications."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def unique_date() -> str:
    """Return a date that hardly any other run has used, for event types that have no other value of their own."""
    return (datetime(2000, 1, 1, tzinfo=UTC) + timedelta(days=uuid.uuid4().int % 9000)).strftime("%Y%m%d")


async def a_date_between() -> datetime:
    """Return a time after all that was published so far, and before all that will be."""
    await anyio.sleep(1.1)  # a margin above a second, so that the date can be written in seconds
    return datetime.now(UTC) - timedelta(milliseconds=500)


def read_settings(environ: Mapping[str, str], *, verbose: bool) -> Settings:
    """Return what the variables say. Raises `ConfigError`."""
    expected = {field: environ[name].strip() for name, field in EXPECTED_LIMITS.items() if name in environ}
    if compression := environ.get("EXPECT_COMPRESSION"):
        if compression.strip().lower() not in COMPRESSIONS:
            raise ConfigError([f"EXPECT_COMPRESSION must be s2, true, none or false, not {compression!r}"])
        expected["compression"] = COMPRESSIONS[compression.strip().lower()]
    return Settings(
        timeout_seconds=seconds(environ.get("TIMEOUT_SECONDS", "8")),
        policy_stream=environ.get("JETSTREAM_POLICY_STREAM_NAME", "POLYGON"),
        expected_policy=expected,
        verbose=verbose or environ.get("SMOKE_VERBOSE", "").lower() in ("true", "1", "yes"),
    )


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ConfigError([f"TIMEOUT_SECONDS must be a number of seconds above 0, not {text!r}"])
    return number


def read_config(environ: Mapping[str, str]) -> configuration.Config:
    """Return the installation's configuration, with which no stream is changed. Raises `ConfigError`."""
    over = {
        f"AVISO_WORKERS_NOTIFICATION_BACKEND__{key}": environ[name]
        for name, key in (("BACKEND", "KIND"), ("NATS_URL", "JETSTREAM__NATS_URL"))
        if name in environ
    }
    named = any(name in environ for name in CONFIG_FILES)
    found = named or any(place.is_file() for place in configuration.places(environ))
    config = configuration.load(None if found else FALLBACK, environ={**environ, **over})
    backend = config.notification_backend
    if backend.kind != "jetstream":
        return config
    observing = structs.replace(backend.jetstream, stream_management="observe")
    return structs.replace(config, notification_backend=structs.replace(backend, jetstream=observing))


async def main(settings: Settings, config: configuration.Config) -> int:
    async with AsyncExitStack() as opened:
        try:
            app = await opened.enter_async_context(App("smoke-test", config=config))
        except AvisoWorkersError as error:
            for check in CHECKS:
                report("FAIL", check, str(error))
            failures = len(CHECKS)
        else:
            failures = await failed_checks(Installation(app, settings), config)
    print(f"{len(CHECKS) - failures} of {len(CHECKS)} checks without a failure on {config.notification_backend.kind}")
    return 1 if failures else 0


async def failed_checks(installation: Installation, config: configuration.Config) -> int:
    """Run all checks, with a line for each, and return how many failed."""
    backend = config.notification_backend
    installation.say(f"configuration: {', '.join(config.sources)}")
    if backend.kind == "jetstream":
        installation.say(f"server: {', '.join(backend.jetstream.masked_servers)}")
    failures = 0
    for check in CHECKS:
        try:
            await check(installation)
        except CheckSkippedError as reason:
            report("skip", check, str(reason))
        except NotFoundError as error:
            failures += 1
            report("FAIL", check, f"no stream is created here, `aviso-workers streams apply` creates them: {error}")
        except (CheckFailedError, AvisoWorkersError, TimeoutError) as error:
            failures += 1
            report("FAIL", check, str(error) or "nothing came in time")
        else:
            report("ok", check)
    return failures


def report(verdict: str, check: Check, reason: str = "") -> None:
    print(f"{verdict:<4}  {check.__name__.replace('_', ' ')}" + (f": {reason}" if reason else ""))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is published and what is found")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    given = {name: value for name, value in os.environ.items() if value.strip()}
    try:
        sys.exit(anyio.run(main, read_settings(given, verbose=arguments.verbose), read_config(given)))
    except AvisoWorkersError as error:
        sys.exit(f"smoke_test.py: {error}")
