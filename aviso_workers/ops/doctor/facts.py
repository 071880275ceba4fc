"""Facts: everything that the doctor asks the servers, once, before any check.

`doctor.examine` calls `gather`; the checks are pure functions of the `Facts`. What could not be asked is in `unknown`
with the reason, and a check that needs it says so. Nothing is changed: the app under examination is not connected, so
that none of its tables, streams and consumers is made.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
from msgspec import Struct, structs

from aviso_workers.aviso import codec
from aviso_workers.backends import Admin
from aviso_workers.config import Config, streams
from aviso_workers.config.streams import event_streams
from aviso_workers.declare.agents import Agent
from aviso_workers.errors import (
    BackendError,
    DeniedError,
    NotFoundError,
    ServerProcessError,
    UnavailableError,
    UndecodableError,
)
from aviso_workers.jetstream import plans
from aviso_workers.jetstream.info import AccountInfo, ConsumerInfo, StreamInfo
from aviso_workers.jetstream.plans import Plan, Stored
from aviso_workers.jetstream.specs import StreamSpec
from aviso_workers.ops import agent_inventory, backups, inventory, snapshots
from aviso_workers.ops.agent_inventory import Recorded, RunAlone
from aviso_workers.ops.backups import Backup
from aviso_workers.ops.doctor import monitoring_port, replicas
from aviso_workers.ops.doctor.monitoring_port import Advisory, ConnectedServer, Monitored
from aviso_workers.ops.doctor.replicas import Groups, Looks
from aviso_workers.ops.health import AllWorkers, Unknown
from aviso_workers.ops.inventory import Denials, existing
from aviso_workers.ops.mirrors import Link, Mirrors
from aviso_workers.ops.snapshots import ServerSnapshot
from aviso_workers.task_groups import asked_of_each

T = TypeVar("T")

Need = Literal["account", "agents", "backups", "consumers", "dead_letters", "monitoring", "records", "streams"]
"""A kind of facts that a check can need, and that may be missing."""

EVENTS = "$JS.EVENT."
ANSWER_SECONDS = 4.0
"""How long is waited for answers to requests that run side by side: a server that hangs is reported within 10 s."""
UNREACHABLE_SECONDS = 1.0
"""How long is waited for the account's answer, where the servers did not answer a request for streams."""
LISTING_SECONDS = 30.0
"""How long is waited for listings of streams and consumers, of which there may be a hundred thousand. A cluster waits
for 4 s for those whose server is down before it lists the others."""
MAX_LATER, LATER_SECONDS = 3, 1.0
"""How many more samples are taken where replicas seem to be behind, and the time before each: a replica of a busy
stream is behind for moments."""
MAX_ADVISORY_BYTES = 32 << 20
"""Of all advisories of an examination: any client may publish on their subjects."""


class Scope(Struct, frozen=True, kw_only=True):
    """The scope of an examination: which agents, monitoring ports and backups, and for how long."""

    agents: tuple[Agent[Any, Any], ...] | None = None
    """The agents of the app that is examined; None where it is not known."""
    app: str = ""
    monitors: tuple[str, ...] = ()
    """URLs of monitoring ports; where there is none, that of the section `server`."""
    production: bool = False
    seconds: float = 5.0
    """Between the two samples, which rates are made of; advisories are received meanwhile."""
    backups: Path | None = None
    """A directory with backups of streams."""


class Sample(Struct, frozen=True, kw_only=True):
    """The answers of JetStream's API at one time."""

    streams: Mapping[str, StreamInfo] = {}
    unavailable: frozenset[str] = frozenset()
    """Streams that are known by name, and for which no server answers, as without a leader."""
    consumers: Mapping[tuple[str, str], ConsumerInfo] = {}
    """By stream and name."""
    names: Mapping[str, frozenset[str]] = {}
    """By stream, the names of all its consumers, also of those that do not answer; a stream that was not asked is
    missing."""
    account: AccountInfo = AccountInfo()

    @property
    def groups(self) -> Groups:
        """The servers that keep each stream and each consumer."""
        of_streams = {(name, ""): stream.cluster for name, stream in self.streams.items()}
        return of_streams | {key: consumer.cluster for key, consumer in self.consumers.items()}


class Facts(Struct, frozen=True, kw_only=True):
    """The facts that checks judge. Streams and consumers are those of the account that we connect to."""

    scope: Scope
    config: Config
    server: ConnectedServer
    before: Sample
    after: Sample
    elapsed_seconds: float
    """Between the two."""
    later: tuple[Sample, ...] = ()
    """Further samples, where replicas seemed to be behind in both."""
    plans: Mapping[str, Plan]
    """The plans for configured streams, by their place in the configuration: `event type mars` or `streams.ORDERS`."""
    advisories: tuple[Advisory, ...]
    """Advisories and metrics that were received between the samples."""
    backups: Mapping[str, Backup]
    """The newest of each stream."""
    unknown: Mapping[Need, str]
    denied: Mapping[Need, str]
    """The facts that the server denies to our user, in its words."""
    server_certificate: bytes | None = None
    """The certificate of the server that we are connected to, in DER form; None without TLS."""
    shares_inbox: bool = False
    """Whether our user has a name, and hears answers where other users can hear them too."""
    dead_letters: Mapping[tuple[str, str], int] = {}
    """Dead letters that are kept, by app and agent."""
    recorded: Recorded
    """What workers have recorded, and what operators have ordered of timers; empty where that is not known."""
    run_alone: Sequence[RunAlone] = ()
    """Notifications that are run alone, because a worker process ended while they ran."""
    due: Mapping[str, int] = {}
    """Delayed notifications that are due and not stored yet, by the stream that they are for."""
    monitored: tuple[Monitored, ...]
    unreachable: Mapping[str, str]
    """Monitoring ports that were named and do not answer, with the reason."""
    looks: Looks | None
    """The states of the servers' own replicas; None where the server does not tell which account is ours."""
    links: Sequence[Link] = ()
    """Streams that follow others, or did until they were promoted, and their origins as far as these answer."""
    is_strict: bool | None = None
    """Whether JetStream's API refuses requests with unknown fields; None where that is not known."""
    oldest_pending: Mapping[tuple[str, str], datetime] = {}
    """As `snapshots.oldest_pending` returns it."""
    workers: AllWorkers = {}
    """By app, as far as they have recorded themselves."""

    @property
    def now(self) -> datetime:
        """By the server's clock where that is known, as the times of records are."""
        return self.recorded.time

    @property
    def streams(self) -> Mapping[str, StreamInfo]:
        return self.after.streams

    @property
    def consumers(self) -> Mapping[tuple[str, str], ConsumerInfo]:
        return self.after.consumers

    def lacks(self, stream: str, consumer: str) -> bool:
        """Return whether it is known that a stream has no such consumer."""
        return (stream, consumer) not in self.consumers and consumer not in self.after.names.get(stream, {consumer})

    def snapshot(self, sample: Sample, at: float) -> ServerSnapshot:
        """Return a sample, taken at `at`, with what workers have recorded, as all reports are made of it."""
        silent = [f"{stream} > {name}" for stream, names in sample.names.items() for name in names]
        known = {f"{stream} > {name}" for stream, name in sample.consumers}
        return ServerSnapshot(
            at=at,
            streams=dict(sample.streams),
            unavailable=[*sample.unavailable, *(each for each in silent if each not in known)],
            consumers=dict(sample.consumers),
            oldest_pending=self.oldest_pending,
            recorded=self.recorded,
            workers=self.workers,
            denied=Denials(),
        )

    @property
    def without_leader(self) -> frozenset[str]:
        """The streams for which no server answered in both samples. One that was just deleted is missing from one of
        the two listings.
        """
        return self.before.unavailable & self.after.unavailable

    @property
    def all_run(self) -> bool:
        """Whether every server of the cluster answers on its monitoring port, and none has turned JetStream off."""
        is_unknown = self.unreachable or "monitoring" in self.unknown
        return not (is_unknown or any(one.cannot_write for one in self.monitored))

    @property
    def configured_streams(self) -> Mapping[str, StreamInfo]:
        """The existing streams that the configuration describes, by name."""
        names = [plan.stream for plan in self.plans.values()]
        return {name: self.streams[name] for name in names if name in self.streams}

    @property
    def recorded_streams(self) -> frozenset[str]:
        """The streams of event types that only workers of some app have recorded. They record what they like, so it is
        no reason to stop a server.
        """
        of_events = event_streams(self.config.notification_schema)
        return frozenset(stream for stream, name in of_events.items() if name in self.config.recorded)

    @property
    def event_streams(self) -> Mapping[str, StreamInfo]:
        """The existing streams of event types, by name."""
        of_events = event_streams(self.config.notification_schema)
        return {name: stream for name, stream in self.configured_streams.items() if name in of_events}


async def gather(admin: Admin, config: Config, scope: Scope) -> Facts:
    """Gather all facts about the servers, the streams and the agents.

    Raises `RefusedError` where the backend is not a server, `UnavailableError` where the connection is lost.
    """
    requests = _Requests(admin)
    server = await monitoring_port.connected_server(admin)
    before = after = Sample()
    elapsed = scope.seconds
    async with _advisories(admin) as advisories:
        sampled = time.monotonic()
        before = after = await requests.sample()
        if "streams" not in requests.unknown:
            await anyio.sleep(scope.seconds)
            elapsed = time.monotonic() - sampled
            after = await requests.sample(before)
    later: list[Sample] = []
    while len(later) < MAX_LATER and replicas.is_doubtful([each.groups for each in (before, after, *later)]):
        await anyio.sleep(LATER_SECONDS)
        later.append(await requests.sample(before))
    once = await _asked_once(admin, config, requests, after, server, scope)
    unknown = requests.unknown
    if scope.agents is None:
        unknown["agents"] = "the agents are not known: give --app MODULE:APP"
    if scope.backups is None:
        unknown["backups"] = "the directory of backups is not known: give --backups DIRECTORY"
    return Facts(
        **once,
        scope=scope,
        config=config,
        server=server,
        before=before,
        after=after,
        elapsed_seconds=elapsed,
        later=tuple(later),
        plans=_plans(config, after.streams),
        advisories=tuple(advisories),
        backups=await anyio.to_thread.run_sync(_backups, scope.backups) if scope.backups else {},
        unknown=unknown,
        denied=requests.denied,
        server_certificate=admin.administration().server_certificate,
        shares_inbox=admin.administration().shares_inbox,
    )


async def _asked_once(
    admin: Admin, config: Config, requests: _Requests, after: Sample, server: ConnectedServer, scope: Scope
) -> dict[str, Any]:
    """Return the facts that are requested once, and not with each sample, by the name of the field of `Facts`. Requests
    run side by side, so that missing answers are waited for together.
    """
    ask = requests.ask
    wanted: dict[str, Callable[[], Awaitable[Any]]] = {
        "dead_letters": lambda: ask("dead_letters", lambda: agent_inventory.dead_letters(admin)),
        "recorded": lambda: ask("records", requests.recorded),
        "oldest_pending": lambda: ask("streams", lambda: snapshots.oldest_pending(admin, after.consumers)),
        "workers": lambda: ask("records", lambda: snapshots.workers(admin, denied=Denials())),
        "run_alone": lambda: ask("records", lambda: agent_inventory.run_alone(admin, after.streams)),
        "due": lambda: ask("streams", lambda: agent_inventory.due(admin, after.streams)),
        "links": lambda: ask("streams", lambda: Mirrors(admin).links(after.streams.values())),
        "of_monitors": lambda: requests.monitored(config, scope, server),
        "is_strict": lambda: monitoring_port.is_strict(admin),
    }
    found = await asked_of_each(wanted, lambda name: wanted[name]())
    why_unknown = requests.unknown.get("records", "").removeprefix(inventory.NOT_KNOWN)  # the end of a sentence
    nothing = Recorded(time=datetime.now(UTC), consumers={}, functions={}, failures={}, pauses={}, runs={})
    known = {name: each for name, each in found.items() if each is not None}
    return {"recorded": nothing, "workers": Unknown(why_unknown), **known.pop("of_monitors"), **known}


class _Requests:
    """Requests to the servers, which record in `unknown` why a fact is missing."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.unknown: dict[Need, str] = {}
        self.denied: dict[Need, str] = {}

    async def ask(self, need: Need, request: Callable[[], Awaitable[T]], *, within: float = ANSWER_SECONDS) -> T | None:
        if need in self.unknown:
            return None  # asked before, and waited for
        try:
            with anyio.fail_after(within):
                return await request()
        except TimeoutError:
            self.unknown[need] = f"no answer within {within:g} s"
        except BackendError as error:
            self.unknown[need] = str(error)
            if isinstance(error, DeniedError):
                self.unknown[need] = self.denied[need] = inventory.denial_text(error)
        return None

    async def recorded(self) -> Recorded:
        """Return what workers have recorded. What the server denies of it is in `unknown`."""
        found = await agent_inventory.recorded(self._admin, denied=(denied := Denials()))
        if text := denied.text():
            self.unknown["records"] = self.denied["records"] = text
        return found

    async def sample(self, before: Sample | None = None) -> Sample:
        """Return a sample. Where one `before` has unavailable streams, each of the others is asked for by its name: a
        listing would wait for those again.
        """
        away = before.unavailable if before else frozenset[str]()
        listings: dict[str, Callable[[], Awaitable[Any]]] = {"names": self._admin.stream_names}
        if not away:
            listings["streams"] = self._admin.streams
        answers = await self._all("streams", listings, lambda kind: listings[kind]())
        names, listed = answers["names"] or (), answers.get("streams") or ()
        may_list = "streams" not in self.denied
        if away:
            by_name = await self._all("streams", [name for name in names if name not in away], self._stream)
            listed = filter(None, by_name.values())
        found: dict[str, StreamInfo] = {stream.name: stream for stream in listed}
        consumed = [name for name, stream in found.items() if stream.consumers]
        # A stream that was deleted meanwhile has none.
        consumers = await self._all("consumers", consumed, lambda name: existing(self._admin.consumers(name)))
        named = await self._all("consumers", found, lambda name: self._consumer_names(found[name]))
        within = UNREACHABLE_SECONDS if "streams" in self.unknown else ANSWER_SECONDS
        account = await self.ask("account", self._admin.administration().account, within=within) or AccountInfo()
        return Sample(
            streams=found,
            unavailable=frozenset(names) - found.keys() if may_list else frozenset(),
            consumers={(each.stream, each.name): each for answer in consumers.values() for each in answer or ()},
            names={stream: names for stream, names in named.items() if names is not None},
            account=account,
        )

    async def _all(
        self, need: Need, names: Iterable[str], request: Callable[[str], Awaitable[T]]
    ) -> dict[str, T | None]:
        """Return the answers to a request for each name; None where there is no answer."""
        return await asked_of_each(names, lambda name: self.ask(need, partial(request, name), within=LISTING_SECONDS))

    async def _stream(self, name: str) -> StreamInfo | None:
        with suppress(NotFoundError, UnavailableError):  # deleted meanwhile, or lost meanwhile
            return await self._admin.stream_info(name)
        return None

    async def _consumer_names(self, stream: StreamInfo) -> frozenset[str]:
        names = await existing(self._admin.consumer_names(stream.name)) if stream.consumers else None
        return frozenset(names or ())

    async def monitored(self, config: Config, scope: Scope, of: ConnectedServer) -> dict[str, Any]:
        """Return what monitoring ports tell, by the name of the field of `Facts`."""
        named, urls = bool(scope.monitors), monitoring_port.urls(config, scope.monitors)
        found: list[Monitored] = []
        unreachable: dict[str, str] = {}

        async def inspect(url: str) -> Monitored | None:
            try:
                return await anyio.to_thread.run_sync(monitoring_port.inspect, url, abandon_on_cancel=True)
            except ServerProcessError as error:
                unreachable[url] = str(error)
                return None

        for url, one in (await asked_of_each(urls, inspect)).items():
            if one is None:
                continue
            is_assumed = named and not of.id  # the server that we are connected to did not say which one it is
            if not (is_assumed or one.is_of(of)):
                unreachable[url] = (
                    f"{url} is the monitoring port of {one.name}, which does not belong to {of.cluster or of.name}"
                )
            elif one.varz.server_id not in {known.varz.server_id for known in found}:
                found.append(one)
        missing = _members(found, of) - {one.name for one in found}
        if missing:
            cure = "" if named and len(unreachable) >= len(missing) else ": give --monitor URL for each server"
            self.unknown["monitoring"] = "; ".join(
                [*unreachable.values(), f"no monitoring port of {', '.join(sorted(missing))} answers{cure}"]
            )
        monitors = {one.name: one.url for one in found}
        looks = await replicas.look_twice(monitors, of.account) if of.account else None
        return {"monitored": tuple(found), "unreachable": unreachable if named else {}, "looks": looks}


@asynccontextmanager
async def _advisories(admin: Admin) -> AsyncIterator[list[Advisory]]:
    """Collect the advisories and metrics of the servers while the block runs. The list is complete when it has
    ended.
    """
    received: list[Advisory] = []
    async with AsyncExitStack() as stack:
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                listening = admin.administration().listen(f"{EVENTS}>", max_bytes=MAX_ADVISORY_BYTES)
                messages = await stack.enter_async_context(listening)
        except TimeoutError as error:
            raise UnavailableError(f"the server does not answer within {ANSWER_SECONDS:g} s") from error
        yield received
        while messages.statistics().current_buffer_used:
            one = messages.receive_nowait()
            with suppress(UndecodableError):  # any client may publish on these subjects
                advisory = codec.read_json(one.data, Advisory)
                received.append(structs.replace(advisory, kind=one.subject.removeprefix(EVENTS)))


def _members(found: Sequence[Monitored], of: ConnectedServer) -> set[str]:
    """Return the names of all servers of the cluster that are known."""
    members = {of.name} if of.id or not found else set[str]()
    for one in found:
        members |= {one.name, *one.routes, *(one.varz.jetstream.meta.members if one.varz.jetstream.meta else ())}
    return members


def _plans(config: Config, found: Mapping[str, StreamInfo]) -> dict[str, Plan]:
    event_types = config.notification_schema.items()
    wanted = {f"event type {name}": streams.event_stream(name, each, config) for name, each in event_types}
    wanted |= {f"streams.{spec.name}": spec for spec in streams.declared(config)}
    return {by: _plan(spec, found.get(spec.name)) for by, spec in wanted.items()}


def _plan(spec: StreamSpec, found: StreamInfo | None) -> Plan:
    if found is None:
        return plans.plan(spec, None, Stored())
    stored = Stored(messages=found.messages, bytes=found.bytes, subjects=found.subjects, consumers=found.consumers)
    return plans.plan(spec, found.config, stored)


def _backups(directory: Path) -> dict[str, Backup]:
    """Return the newest backup of each stream that can be restored from what is there.

    A backup with a time in the future is left out: its age is not known.
    """
    now = datetime.now(UTC)
    return {backup.stream: backup for backup in backups.restorable(directory) if backup.made <= now}
