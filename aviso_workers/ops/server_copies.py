"""Copies of all streams of a server on another, empty one, while neither has clients, and their comparison.

Called by `key_rotation`. A stream is read from one server and restored on the other at the same time, and what is in it
touches no disk on the way. It is then read back, and everything in it is compared with what was sent: messages with
their sequences and times, consumers with their positions and configurations, the stream's own configuration.

Until it is compared a stream keeps its messages without end, so that none is too old on one side only. A mirror is
copied before its origin, so that nothing comes to it meanwhile. A stream in which time alone changes something
(messages with a life of their own, schedules) is copied again, a few times.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from queue import Queue
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct, structs

from aviso_workers.backends import Admin
from aviso_workers.errors import BackendError, BackupError, NotFoundError, UnavailableError
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.info import StreamConfig
from aviso_workers.ops import consumer_positions
from aviso_workers.ops.backups import Contents, Drill, archive, read_back
from aviso_workers.ops.backups.s2 import MalformedError, Pieces
from aviso_workers.ops.backups.verification import read_contents
from aviso_workers.ops.consumer_positions import StreamPlace

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
        done = await _move(source, target, name)
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


async def _move(source: Admin, target: Admin, stream: str) -> Moved:
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
    listed, unavailable = await consumer_positions.consumers(StreamPlace(streams=admin, stream=stream))
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
    listed, unavailable = await consumer_positions.consumers(StreamPlace(streams=admin, stream=stream))
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
