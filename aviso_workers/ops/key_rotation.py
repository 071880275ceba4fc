"""Rotation of the encryption key of servers that `server start` runs: their streams are moved to new stores.

Called by `server rotate-key`, for servers that are stopped. nats-server loses data where it re-encrypts a store
(`server.store`), so two sets of servers are started on ports that no client knows: one on the stores as they are, with
the key that they have, and one on empty stores beside them, with the encryption of the configuration. Every stream of
every account is copied and compared, both sets are stopped, and the new stores take the places of the old ones
(`server.store`). The old ones stay on the disk under another name.

A command that is killed before that leaves the old stores as they were; what was begun beside them is removed the next
time.

A stream is read from one server and restored on the other at the same time, and what is in it touches no disk on the
way. It is then read back, and everything in it is compared with what was sent: messages with their sequences and times,
consumers with their positions and configurations, the stream's own configuration. Until it is compared a stream keeps
its messages without end, so that none is too old on one side only. A mirror is copied before its origin, so that
nothing comes to it meanwhile. A stream in which time alone changes something (messages with a life of their own,
schedules) is copied again, a few times.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, cast

import anyio
import anyio.to_thread
from msgspec import Struct, structs

from aviso_workers.backends import Admin, open_backend
from aviso_workers.config import Config, JetStream, NotificationBackend, Secret, Server, ServerUrls
from aviso_workers.config.nats_server import Account, Cipher, Cluster, Encryption, Monitoring, User
from aviso_workers.errors import BackendError, BackupError, NotFoundError, ServerProcessError, UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.ops import mirrors
from aviso_workers.ops.backups import Contents, Drill, archive, read_back
from aviso_workers.ops.backups.chains import read_contents
from aviso_workers.ops.backups.s2 import MalformedError, Pieces
from aviso_workers.ops.mirrors import StreamPlace
from aviso_workers.server import Tell, processes, profiles, store
from aviso_workers.server.processes import Node
from aviso_workers.server.store import GLOBAL_ACCOUNT, Asset, Replacement

NEW, PREVIOUS = "jetstream.new", "jetstream.previous"
"""Directories beside a store: the one that is filled, and the start of the name of the one that was replaced."""
USER = "aviso-workers-rotate-key"
TRIES = 3
CHUNKS_AHEAD = 16
CHUNK_BYTES = 2**19
LEADERS_SECONDS = 60.0
ELECTION_SECONDS = 4.0
CONSUMERS_SECONDS = 10.0
"""A cluster makes a stream's consumers, and elects their leaders, a moment after the stream."""
REPLICAS_SECONDS = 600.0
POLL_SECONDS = 0.1
UNTIL_COMPARED = {"max_age": 0, "sealed": False}
OF_SERVERS = "_nats."
"""The start of the metadata that servers add."""


class Moved(Struct, frozen=True, kw_only=True):
    stream: str
    messages: int
    on_disk: bool
    """Whether it is stored in files."""
    consumers: tuple[str, ...]
    """The consumers that do not end by themselves."""
    consumers_on_disk: tuple[str, ...]
    delivered_again: Mapping[str, int]
    """Deliveries that are repeated, by consumer: a cluster sends the ack floor, and not what was acked above it."""


async def move_all(source: Admin, target: Admin, tell: Callable[[str], None]) -> list[Moved]:
    """Copy every stream of an account, and return the compared copies. `tell` is called with a line for each.

    Raises `BackupError` where a copy is not what the stream is, and `BackendError`.
    """
    configs = await _configs(source)
    if unfinished := [name for name, config in configs.items() if metadata.is_unfinished(config)]:
        raise BackupError(f"{', '.join(unfinished)}: a restore was interrupted; repeat the restore first")
    moved = []
    for name in sorted(configs, key=lambda name: (-_mirrors_above(name, configs), name)):
        done = await _moved_stream(source, target, name)
        tell(f"{name}: {done.messages} messages and {len(done.consumers)} consumers copied and compared")
        for consumer, count in done.delivered_again.items():
            tell(f"{name}: consumer {consumer} goes on at its ack floor: up to {count} messages are delivered again")
        moved.append(done)
    return moved


async def _configs(admin: Admin) -> dict[str, StreamConfig]:
    """Return the configurations of all streams, once each has elected its leader. Raises `BackupError`."""
    configs: dict[str, StreamConfig] = {}

    async def are_all_listed() -> bool:
        configs.update({each.name: each.config for each in await admin.streams()})
        return configs.keys() >= set(await admin.stream_names())

    if not await _until(are_all_listed, seconds=LEADERS_SECONDS):
        missing = set(await admin.stream_names()) - configs.keys()
        raise BackupError(f"{', '.join(sorted(missing))}: no server answers for it")
    return configs


def _mirrors_above(name: str, configs: Mapping[str, StreamConfig]) -> int:
    """Return the length of the chain of mirrors from a stream up to one that mirrors no other stream here."""
    above = 0
    while above < len(configs) and (mirror := configs[name].mirror) and mirror.name in configs:
        name, above = mirror.name, above + 1
    return above


async def _moved_stream(source: Admin, target: Admin, stream: str) -> Moved:
    differences: list[str] = []
    for left in reversed(range(TRIES)):
        try:
            if left < TRIES - 1:
                with suppress(NotFoundError):
                    await target.delete_stream(stream)
            config, sent = await _transfer(source, target, stream)
            differences = await _differences(source, target, stream, sent)
            if not differences:
                return await _completed(source, target, config, sent)
        except BackendError:  # as where a consumer has no leader yet, which no snapshot can be taken of
            if not left:
                raise
            await anyio.sleep(ELECTION_SECONDS)
    raise BackupError(f"{stream} differs on the new server: {'; '.join(differences)}")


async def _completed(source: Admin, target: Admin, config: StreamConfig, sent: Contents) -> Moved:
    """Give a copy whose contents are right the settings of its stream, and return it once its replicas are current."""
    stream, wanted = config.name, _comparable(config)
    if _comparable((await target.stream_info(stream)).config) != wanted:
        await target.update_stream(config)
    if (found := _comparable((await target.stream_info(stream)).config)) != wanted:
        changed = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        raise BackupError(f"{stream} has other settings on the new server: {', '.join(changed)}")
    if not await _until(lambda: _are_current(target, stream), seconds=REPLICAS_SECONDS):
        raise BackupError(f"{stream}: a replica on the new servers is not current after {REPLICAS_SECONDS:.0f} s")
    consumers = await _consumers(target, stream)
    return Moved(
        stream=stream,
        messages=sent.messages,
        on_disk=config.storage == "file",
        consumers=tuple(consumers),
        consumers_on_disk=tuple(name for name, each in consumers.items() if not each.get("mem_storage")),
        delivered_again=await _delivered_again(source, stream, sent),
    )


async def _delivered_again(source: Admin, stream: str, sent: Contents) -> dict[str, int]:
    delivered = {each.name: each.deliveries for each in await source.consumers(stream)}
    positions = {name: state.deliveries for name, state in sent.consumers.items()}
    return {name: count - positions[name] for name, count in delivered.items() if count > positions.get(name, count)}


async def _until(condition: Callable[[], Awaitable[bool]], *, seconds: float) -> bool:
    """Wait until a condition is true, and return whether it became so in time. A cluster that does not answer, as while
    it elects its leaders, is asked again.
    """
    deadline = anyio.current_time() + seconds
    while anyio.current_time() <= deadline:
        with suppress(UnavailableError):
            if await condition():
                return True
        await anyio.sleep(POLL_SECONDS)
    return False


async def _has_consumers(admin: Admin, stream: str, names: Set[str]) -> bool:
    return names <= (await _consumers(admin, stream)).keys()


async def _are_current(admin: Admin, stream: str) -> bool:
    """Return whether all replicas of a stream and of its consumers are current, as JetStream reports them; a single
    server has none.
    """
    listed, unavailable = await mirrors.consumers_of(StreamPlace(streams=admin, stream=stream))
    found = await admin.stream_info(stream)
    groups = (found.cluster, *(each.cluster for each in listed))
    return not unavailable and all(each.current and not each.lag for group in groups for each in group.followers)


async def _transfer(source: Admin, target: Admin, stream: str) -> tuple[StreamConfig, Contents]:
    """Restore a stream on the target while the source sends it, and return its configuration and the contents that were
    sent.
    """
    async with (
        source.administration().snapshot(stream) as snapshot,
        aclosing(snapshot.chunks) as chunks,
        _ArchiveParser.running(in_memory=snapshot.config.storage == "memory") as parser,
    ):
        rest = b""

        async def read(size: int) -> bytes:
            """Return the next bytes, at most `size` of them; none at the end."""
            nonlocal rest
            while not rest:
                if (chunk := await anext(chunks, None)) is None:
                    return b""
                rest = chunk
            data, rest = rest[:size], rest[size:]
            await parser.add(data)
            return data

        await target.administration().restore(dict(snapshot.config) | UNTIL_COMPARED, snapshot.state, read=read)
        sent = await parser.contents()
    may_lose = snapshot.config.max_age or snapshot.config.allow_msg_ttl
    if sent.missing and not may_lose:
        raise BackupError(f"{stream} has {snapshot.state.messages} messages, of which {sent.missing} were not sent")
    return snapshot.config, sent


async def _differences(source: Admin, target: Admin, stream: str, sent: Contents) -> list[str]:
    """Return sentences on how the target differs from the contents that were sent; ephemeral consumers may be gone."""
    lasting = await _consumers(source, stream)
    await _until(lambda: _has_consumers(target, stream, lasting.keys()), seconds=CONSUMERS_SECONDS)
    there = await _consumers(target, stream)
    drill = Drill(
        backup=_with_consumers(sent, lasting), restored=_with_consumers(await read_back(target, stream), there)
    )
    found = drill.differences
    if sent.state.last_sequence != drill.restored.state.last_sequence:
        found.append(f"its last sequence is {drill.restored.state.last_sequence}, and was {sent.state.last_sequence}")
    return found + [
        f"consumer {name}: not configured as it was" for name in lasting if there.get(name) != lasting[name]
    ]


def _with_consumers(contents: Contents, names: Mapping[str, Any]) -> Contents:
    kept = {name: state for name, state in contents.consumers.items() if name in names}
    return structs.replace(contents, consumers=kept)


async def _consumers(admin: Admin, stream: str) -> dict[str, Mapping[str, Any]]:
    """Return the configurations of the durable consumers and others without an inactive_threshold, by name.

    Raises `BackupError` where no server answers for one.
    """
    listed, unavailable = await mirrors.consumers_of(StreamPlace(streams=admin, stream=stream))
    if unavailable:
        raise BackupError(f"{stream}: no server answers for its consumers {', '.join(unavailable)}")
    return {each.name: _comparable(each.config) for each in listed if not each.config.inactive_threshold}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in StreamConfig(config).metadata.items() if not key.startswith(OF_SERVERS)}
    return {**config, "metadata": metadata}


class _ArchiveParser:
    """A parser of an archive, which runs in a thread while the archive passes."""

    def __init__(self, *, in_memory: bool) -> None:
        self._in_memory = in_memory
        self._chunks = Queue[bytes](CHUNKS_AHEAD)
        self._arriving = iter(self._chunks.get, b"")
        self._thread = ThreadPoolExecutor(1)
        self._contents = self._thread.submit(self._run)

    @classmethod
    @asynccontextmanager
    async def running(cls, *, in_memory: bool) -> AsyncIterator[_ArchiveParser]:
        parser = cls(in_memory=in_memory)
        try:
            yield parser
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(parser._end)

    async def add(self, data: bytes) -> None:
        """Pass more bytes of the archive to the thread; none at its end."""
        await anyio.to_thread.run_sync(self._chunks.put, data)

    async def contents(self) -> Contents:
        """End the archive, and return its contents. Raises `BackupError` where it is malformed."""
        await self.add(b"")
        try:
            return await anyio.to_thread.run_sync(self._contents.result)
        except MalformedError as error:
            raise BackupError(f"what the server sent is malformed: {error}") from error

    def _run(self) -> Contents:
        try:
            return read_contents(archive.entries(Pieces(self._arriving)), in_memory=self._in_memory)
        finally:
            for _ in self._arriving:  # so that `add` does not wait for ever
                pass

    def _end(self) -> None:
        if not self._contents.done():
            self._chunks.put(b"")
        self._thread.shutdown()


class _User(Struct, frozen=True):
    """The user of an account with which its streams are moved."""

    account: str
    name: str | None = None
    password: Secret | None = None


def rotate(config: Config, *, previous_key_file: Path | None, directory: Path, nodes: int, tell: Tell) -> list[Path]:
    """Move the streams of stopped servers to stores with the encryption of the configuration, and start them. Return
    the stores as they were, which only the operator removes.

    `previous_key_file` has the key of the stores as they are; None where they are not encrypted. `tell` is called with
    a line for each stream, and while servers start. Where an earlier call was killed after it had decided for the new
    stores, that is finished and nothing is moved.

    Raises ServerProcessError where the servers run, a store is missing, or a server does not serve all that is in its
    store, `BackupError` and `BackendError` where a stream cannot be copied as it is, and ConfigError. The stores are as
    they were then.
    """
    server, _ = profiles.choose(config, profile="development")
    with processes.alone(directory):
        replaced = store.finish_swap(directory)
        if not replaced:
            stores = processes.stores(server, directory=directory, nodes=nodes)
            _require_stopped(directory, stores)
            store.begin_swap(
                directory, _move(config, server, stores, previous_key_file, directory=directory, tell=tell)
            )
            replaced = store.finish_swap(directory)
    for each in replaced:
        tell(f"{each.place} is the new store, {each.previous} the one before")
    processes.start(config, directory=directory, nodes=nodes, tell=tell)
    return [each.previous for each in replaced]


def _require_stopped(directory: Path, stores: Mapping[str, Path]) -> None:
    if names := [node.name for node in processes.recorded(directory) if processes.is_running(node)]:
        raise ServerProcessError(
            f"{', '.join(names)} in {directory}: stop workers and publishers, then the servers "
            "(`aviso-workers server stop`), so that nothing is stored while streams are moved"
        )
    for name, place in stores.items():
        if not store.within(place).is_dir():
            raise ServerProcessError(
                f"{name} has no store in {place}: say --directory and --nodes as for `server start`"
            )


def _move(
    config: Config,
    server: Server,
    stores: Mapping[str, Path],
    previous_key_file: Path | None,
    *,
    directory: Path,
    tell: Tell,
) -> list[Replacement]:
    """Fill new stores beside the old ones, and return how they are to be put in place."""
    work = directory / processes.MOVING
    new_stores = {name: place / NEW for name, place in stores.items()}
    _clear(work, new_stores)
    previous = _previous_encryption(stores.values(), previous_key_file)
    users = _users(server)
    apart = partial(_apart, config, server, users, tell=tell)
    try:
        with (
            apart(previous, stores=stores, directory=work / "old") as old,
            apart(server.jetstream.encryption, stores=new_stores, directory=work / "new") as new,
        ):
            moved = anyio.run(_move_accounts, old, new, users, tell)
        found = frozenset[Asset]().union(*(store.on_disk(store.within(place)) for place in new_stores.values()))
        if missing := moved - found:
            raise BackupError(f"the new stores lack what was copied: {store.describe(missing, of=moved)}")
    except BaseException:
        _clear(work, new_stores)
        raise
    shutil.rmtree(work)
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"  # two of one second must not meet
    return [
        Replacement(place=store.within(place), new=store.within(place / NEW), previous=place / f"{PREVIOUS}-{stamp}")
        for place in stores.values()
    ]


def _clear(work: Path, new_stores: Mapping[str, Path]) -> None:
    for side in ("old", "new"):
        processes.stop(work / side)
    for place in new_stores.values():
        shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)


def _previous_encryption(stores: Iterable[Path], key_file: Path | None) -> Encryption | None:
    """Return the encryption of the stores, None where they are not encrypted.

    Raises ServerProcessError where they are not all alike, or the key is not given.
    """
    found = {cipher for place in stores for cipher in store.ciphers(store.within(place))}
    if len(found) > 1:
        named = ", ".join(cipher or "no encryption" for cipher in sorted(found))
        raise ServerProcessError(f"the stores hold streams with {named}: a server would convert some of them")
    cipher = next(iter(found), "")
    if cipher and key_file is None:
        raise ServerProcessError(
            f"the stores are encrypted with {cipher}: name the file of their key, --previous-key-file"
        )
    if key_file is not None and not cipher:
        raise ServerProcessError("the stores are not encrypted, or empty: leave out --previous-key-file")
    return Encryption(cipher=cast("Cipher", cipher), key_file=str(key_file)) if cipher else None


def _users(server: Server) -> list[_User]:
    """Return a user for each account with JetStream; of a server without accounts, one without a name."""
    if not server.accounts:
        return [_User(GLOBAL_ACCOUNT)]
    named = [name for name, each in server.accounts.items() if each.jetstream.enabled and name != server.system_account]
    return [_User(name, f"{USER}-{i}", Secret(secrets.token_urlsafe())) for i, name in enumerate(named)]


@contextmanager
def _apart(
    config: Config,
    server: Server,
    users: Sequence[_User],
    encryption: Encryption | None,
    *,
    stores: Mapping[str, Path],
    directory: Path,
    tell: Tell,
) -> Iterator[tuple[Node, ...]]:
    """Run servers on these stores, on random ports, which only these users may connect to, and stop them at the end."""
    accounts = {
        user.account: Account(
            jetstream=server.accounts[user.account].jetstream, users={user.name: User(password=user.password)}
        )
        for user in users
        if user.name
    }
    others = {name: structs.replace(each, users={}) for name, each in server.accounts.items() if name not in accounts}
    apart = structs.replace(
        server,
        port=0,
        monitoring=Monitoring(port=0),
        max_connections=None,
        max_subscriptions=None,
        tls=None,
        accounts=accounts | others,
        cluster=structs.replace(server.cluster or Cluster(), port=0, tls=None),
        gateways=None,
        leafnodes=None,
        jetstream=structs.replace(server.jetstream, encryption=encryption),
    )
    nodes = processes.start(
        structs.replace(config, server=apart),
        directory=directory,
        nodes=len(stores),
        detached=False,
        tell=tell,
        in_stores=stores,
    )
    try:
        yield nodes
    finally:
        processes.stop(directory)


async def _move_accounts(
    old: Sequence[Node], new: Sequence[Node], users: Sequence[_User], tell: Tell
) -> frozenset[Asset]:
    """Copy the streams of all accounts, and return what has to be on the disk of the new servers."""
    moved = set[Asset]()
    for user in users:
        async with _opened(old, user) as source, _opened(new, user) as target:
            done = await move_all(source, target, tell)
        for each in done:
            if each.on_disk:
                moved.add(Asset(user.account, each.stream))
                moved |= {Asset(user.account, each.stream, consumer) for consumer in each.consumers_on_disk}
    return frozenset(moved)


def _opened(nodes: Sequence[Node], user: _User) -> AbstractAsyncContextManager[Admin]:
    urls = ServerUrls(*(node.url for node in nodes))
    settings = JetStream(nats_url=urls, user=user.name, password=user.password)
    backend = NotificationBackend(kind="jetstream", jetstream=settings)
    return open_backend(Config(notification_backend=backend))
