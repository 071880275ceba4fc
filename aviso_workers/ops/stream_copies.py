"""Copies of a stream on another server, cluster or account, compared with the original, and such that follow it.

Called by the command `streams copy`. A copy is a backup that is restored elsewhere: messages keep their sequences and
times, consumers their positions. While it is not whole, the copy is fenced (see `mirrors`), so that no client publishes
into it: a message that is stored in it under a sequence of its own could not be joined with one that the original
stores under the same sequence. It gets the subjects of the original when it was compared, and when the original stores
no more, or has stored nothing since.

With `--follow`, after a copy or where one was interrupted, it follows its original until that stores no more, and then
takes its place. What the original has stored since is appended to the copy, each message under its own sequence: a
publish says which sequence must be the last one before it, and a server refuses it otherwise. So a message that is
published again, after a command was killed, is stored once. Sequences that the original does not have any more are
filled and emptied again. The copy is fenced meanwhile, and takes messages under another subject, which a transform of
the server's turns into their own.

When the original is fenced and nothing is missing, all messages of both are compared, what the original has deleted
since is deleted in the copy, its consumers are brought to where those of the original have come, and it takes
publishes. Appended messages have the time at which they were appended: only a restore keeps times.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import anyio
from msgspec import Struct, structs

from aviso_workers.backends import Admin, Message, Outgoing
from aviso_workers.errors import (
    BackendError,
    BackupError,
    ConflictError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from aviso_workers.jetstream import metadata
from aviso_workers.jetstream.answers import MESSAGE_ID
from aviso_workers.jetstream.info import StreamConfig, StreamInfo
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import backups, inventory, mirrors
from aviso_workers.ops.backups import Drill, Progress, Restored
from aviso_workers.ops.backups.restoration import taken
from aviso_workers.ops.mirrors import COPY_OF, NOWHERE, StreamPlace

BATCH = 500
"""Messages that are appended at a time."""
POLL_SECONDS = 1.0
"""How often is looked whether the original has stored more."""
PROGRESS_SECONDS = 5.0
"""How often is reported how far it is, while the original stores more and more."""
PUBLISH_SECONDS = 30.0
MAX_TRIES = 10
"""How often in a row appending may fail before the error is raised."""
FILLER = "aviso_workers_filler"
"""The last part of the subject of what is stored for a sequence that the original does not have."""
HOW_TO_STORE = ("Nats-Expected-", "Nats-Batch-")
"""The prefixes of headers that said how a message was to be stored."""
LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
SCHEDULE = "allow_msg_schedules"
UNFIT = ("mirror", "sources", "subject_transform", "republish", "allow_msg_counter", SCHEDULE)
"""Settings of a stream whose messages cannot be appended as they are."""
AT_WORK = ("sources", "republish", "subject_transform")
"""Settings that a copy does not have before it is whole."""
OFF = {"allow_atomic": False, "allow_batched": False, "deny_delete": False, "deny_purge": False, "sealed": False}
NO_LIMITS = {"discard": "old", "discard_new_per_subject": False, "max_bytes": -1, "max_msgs": -1, "max_msg_size": -1}
"""How a copy is configured before it is whole, so that it can be appended to: see `follow`. Limits of age and
of messages per subject stay, as they say what becomes of single messages."""
OF_THE_COPY = ("storage", "num_replicas", "placement")
"""Settings that may be otherwise than in the original."""


class Copied(Struct, frozen=True, kw_only=True):
    """The result of copying a stream: the copy, its comparison with the original, and what was stored meanwhile."""

    restored: Restored
    compared: Drill
    meanwhile: int
    """Messages that were stored in the original since, and are not in the copy."""
    subjects: tuple[str, ...]
    """The subjects of the copy now; none where it is fenced, or was made under another name."""
    original_is_fenced: bool

    @property
    def whole(self) -> bool:
        """Whether the copy has everything that the original had when it was compared."""
        return not (self.compared.differences or self.meanwhile)


async def copy(
    source: Admin,
    target: Admin,
    stream: str,
    *,
    name: str | None = None,
    storage: str | None = None,
    replicas: int | None = None,
    keep_fenced: bool = False,
    progress: Progress,
) -> Copied:
    """Copy a stream from where one app is connected to where another one is; see `backups.restore` for the rest.

    With `keep_fenced` it takes publishes only where the original takes none, for `follow` to go on. It needs
    space for the stream in the directory for temporary files. Inside of both apps' `async with`. Raises `BackupError`
    and `BackendError`; then there is no stream under the final name, or one that takes no publishes.
    """
    await target.administration().require_readable(name or stream)
    original = await source.stream_info(stream)
    is_moved = name in (None, stream)
    found = await inventory.existing(target.stream_info(stream)) if is_moved else None
    # One whose restore was interrupted is replaced.
    if found and COPY_OF in found.config.metadata and not metadata.is_unfinished(found.config):
        raise BackupError(f"{stream} on the target is an unfinished copy: continue it with --follow, or delete it")
    with tempfile.TemporaryDirectory(prefix="aviso-workers-copy-") as directory:
        backup = await backups.create(source, stream, Path(directory), progress=progress)
        before = await anyio.to_thread.run_sync(backups.verify, backup)
        if before is None:
            raise BackupError(f"{stream} is on a nats-server before 2.15, whose archive cannot be read to compare")
        if is_moved and (other := await taken(target, subjects_of(backup.config), besides=(stream,))):
            raise BackupError(f"{other} of {stream}: delete that stream first")
        restored = await backups.restore(
            target,
            backup,
            name=name,
            config=_held_back(backup.config, created=original.created_text) if is_moved else None,
            storage=storage,
            replicas=replicas,
            progress=progress,
        )
    compared = Drill(backup=before, restored=await backups.read_back(target, restored.stream))
    now = await source.stream_info(stream)
    if now.created_text != original.created_text:
        raise BackupError(f"{stream} was deleted and recreated while it was copied: the copy is of what it was before")
    copied = Copied(
        restored=restored,
        compared=compared,
        meanwhile=now.last_sequence - before.state.last_sequence,
        subjects=(),
        original_is_fenced=is_fenced(now.config),
    )
    if not (is_moved and copied.whole) or (keep_fenced and not copied.original_is_fenced):
        return copied
    return structs.replace(copied, subjects=await release(target, stream, now.config))


async def release(target: Admin, stream: str, original: Mapping[str, Any]) -> tuple[str, ...]:
    """Give a copy the configuration and the subjects of its original, and return the subjects.

    Raises `BackendError`.
    """
    copy_config = (await target.stream_info(stream)).config
    subjects = subjects_of(original)
    config = {key: value for key, value in original.items() if key not in OF_THE_COPY}
    config |= {key: copy_config[key] for key in OF_THE_COPY if key in copy_config}
    config["metadata"] = {
        key: value for key, value in StreamConfig(original).metadata.items() if key not in (FENCED, COPY_OF)
    }
    if subjects:
        config["subjects"] = list(subjects)
    await target.update_stream(config)
    return subjects


def subjects_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subjects of a stream; of a fenced one, those that it had before."""
    return tuple(StreamConfig(config).metadata[FENCED].split() if is_fenced(config) else StreamConfig(config).subjects)


def is_fenced(config: Mapping[str, Any]) -> bool:
    return FENCED in StreamConfig(config).metadata


def _held_back(config: Mapping[str, Any], *, created: str) -> dict[str, Any]:
    """Return the configuration with which a copy takes no publishes until it is whole; `created` is the original's."""
    held = {key: value for key, value in config.items() if key not in AT_WORK}
    subjects = subjects_of(config)
    if not subjects:
        return held
    metadata = {**StreamConfig(config).metadata, FENCED: " ".join(subjects), COPY_OF: created}
    held["subject_delete_marker_ttl"] = 0  # else it would store markers of its own
    return held | OFF | NO_LIMITS | {"subjects": [f"{NOWHERE}.{StreamConfig(config).name}"], "metadata": metadata}


class Followed(Struct, frozen=True, kw_only=True):
    """The result of following an original to its end: what was appended and deleted in the copy."""

    stream: str
    messages: int
    """All that both have."""
    appended: int
    """How many of these this run has appended."""
    deleted: int
    """Messages that the original had deleted since it was copied, and that were deleted in the copy."""
    last_sequence: int
    subjects: tuple[str, ...]
    consumers: int


async def is_begun(source: Admin, target: Admin, stream: str) -> bool:
    """Return whether there is an unfinished copy of this stream. Raises `BackupError` where it is a copy of another
    stream.
    """
    found = await inventory.existing(target.stream_info(stream))
    copy_of = found.config.metadata.get(COPY_OF) if found else None
    if found is None or copy_of is None or metadata.is_unfinished(found.config):
        return False  # a restore that was interrupted is replaced, and anything else refused, by a copy
    original = await source.stream_info(stream)
    if copy_of != original.created_text:
        raise BackupError(
            f"{stream} there is a copy of a stream that was created at {copy_of}, and this one was created at "
            f"{original.created_text}: delete that copy to begin again"
        )
    return True


def _require_fit(config: StreamConfig) -> None:
    """Raise `BackupError` where messages of such a stream cannot be appended to a copy one by one."""
    if config.retention != "limits":
        raise BackupError(f"{config.name} has retention {config.retention}: fence it, and copy it as a whole")
    if found := [field for field in UNFIT if config.get(field)]:
        raise BackupError(f"{config.name} has {', '.join(found)}: fence it, and copy it as a whole")


async def follow(source: Admin, target: Admin, stream: str, *, on_progress: Callable[[int, int], None]) -> Followed:
    """Append missing messages until the original is fenced and none is missing; then let the copy take its place.

    `on_progress` is called now and then with the number of appended messages, and the last sequence of the original.
    Inside of both apps' `async with`. Raises `BackupError` where the two are not the same, and `BackendError`; it can
    be begun again then.
    """
    following = _FollowingCopy(source, target, stream)
    await following.open()
    original = await following.original()
    _require_fit(original.config)
    reported = -PROGRESS_SECONDS
    while True:
        last = original.last_sequence
        if await following.catch_up(last) and anyio.current_time() >= reported + PROGRESS_SECONDS:
            reported = anyio.current_time()
            on_progress(following.appended, last)
        now = await following.original()
        # A message that was under way when it was fenced may be stored a moment later, so its end is read twice.
        if is_fenced(original.config) and now.last_sequence == last:
            return await following.finish(now.config, last)
        if now.last_sequence == last:
            await anyio.sleep(POLL_SECONDS)
            now = await following.original()
        original = now


class _FollowingCopy:
    """A copy of a stream to which the original's new messages are appended."""

    def __init__(self, source: Admin, target: Admin, stream: str) -> None:
        self.appended = 0
        self._source = source
        self._target = target
        self._stream = stream
        self._copy_of = ""
        self._without_id: set[int] = set()
        """Sequences of messages whose id the copy has seen under another sequence."""

    async def open(self) -> None:
        """Configure the copy so that it takes appended messages."""
        config = await self._unfinished()
        self._copy_of = config.metadata[COPY_OF]
        subject = f"{NOWHERE}.{self._stream}.>"
        transform = {"src": subject, "dest": ">"}
        await self._target.update_stream(config | {"subjects": [subject], "subject_transform": transform})

    async def original(self) -> StreamInfo:
        """Return the info of the original. Raises `BackupError` where that was deleted and recreated."""
        found = await self._source.stream_info(self._stream)
        if found.created_text != self._copy_of:
            raise BackupError(
                f"{self._stream} was deleted and recreated at {found.created_text}: the copy there is of the one of "
                f"{self._copy_of} and stays as it is"
            )
        return found

    async def catch_up(self, last: int) -> bool:
        """Append the messages up to this sequence of the original, and return whether any was missing."""
        failures, before = 0, await self._last()
        while (at := await self._last()) < last:
            known = len(self._without_id)
            try:
                await self._append_after(at, last)
                failures = 0
            except (UnavailableError, OutcomeUnknownError, ConflictError):
                if len(self._without_id) > known or await self._last() > at:
                    failures = 0  # what is to be done is known, or some of it is there
                    continue
                failures += 1
                if failures == MAX_TRIES:
                    raise
                await anyio.sleep(POLL_SECONDS)
        if at > last and at > (await self.original()).last_sequence:
            raise BackupError(f"{self._stream} ends at {last}, and its copy at {at}: it is a copy of something else")
        return before < last

    async def finish(self, original: StreamConfig, last: int) -> Followed:
        """Compare both streams, and let the copy take publishes."""
        await self._remove_fillers()
        messages, deleted = await self._compare(last)
        await self._unfinished()
        source, target = (StreamPlace(streams=admin, stream=self._stream) for admin in (self._source, self._target))
        consumers = await mirrors.bring_consumers_on(source, target)
        subjects = await release(self._target, self._stream, original)
        return Followed(
            stream=self._stream,
            messages=messages,
            appended=self.appended,
            deleted=deleted,
            last_sequence=last,
            subjects=subjects,
            consumers=consumers,
        )

    async def _unfinished(self) -> StreamConfig:
        """Return the configuration of the copy. Raises `BackupError` where it takes publishes already, as when another
        command that follows has ended: its consumers are in use then.
        """
        config = (await self._target.stream_info(self._stream)).config
        if COPY_OF not in config.metadata:
            raise BackupError(f"{self._stream}: the copy has taken its place already, by another command")
        return config

    async def _append_after(self, at: int, last: int) -> None:
        first = (await self.original()).first_sequence
        if first > at + 1:  # the original has deleted all that the copy has
            await self._target.purge_stream(self._stream, before=first)
            return
        missing = self._missing(at, last)
        async with aclosing(missing):
            outgoing: list[Outgoing] = []
            async for each in missing:
                outgoing.append(each)
                if len(outgoing) == BATCH:
                    await self._store(outgoing)
                    outgoing = []
            await self._store(outgoing)

    async def _missing(self, at: int, last: int) -> AsyncGenerator[Outgoing, None]:
        """Yield the message to store under each sequence: the original's, or a filler."""
        reading = inventory.messages_between(self._source, self._stream, after=at, last=last)
        async with aclosing(reading):
            async for message in reading:
                for sequence in range(at + 1, message.sequence):
                    yield self._filler(sequence)
                yield self._copy(message)
                at = message.sequence
        for sequence in range(at + 1, last + 1):  # the newest ones are not there any more
            yield self._filler(sequence)

    async def _store(self, outgoing: Sequence[Outgoing]) -> None:
        if not outgoing:
            return
        answers = await self._target.publish_many(outgoing, timeout_seconds=PUBLISH_SECONDS)
        for each, answer in zip(outgoing, answers, strict=True):
            if isinstance(answer, BackendError):
                raise answer
            if answer.duplicate:
                self._without_id.add(_sequence(each))
                raise OutcomeUnknownError(f"{self._stream}: message {_sequence(each)} has the id of another message")
            self.appended += not _is_filler(each)
        if any(map(_is_filler, outgoing)):
            await self._remove_fillers()

    async def _remove_fillers(self) -> None:
        await self._target.purge_stream(self._stream, subject=FILLER)

    def _copy(self, message: Message) -> Outgoing:
        headers = _own_headers(message.headers)
        message_id = "" if message.sequence in self._without_id else (message.headers or {}).get(MESSAGE_ID, "")
        copied = Message(
            subject=f"{NOWHERE}.{self._stream}.{message.subject}",
            data=message.data,
            headers=headers | {LAST_SEQUENCE: str(message.sequence - 1)},
        )
        return Outgoing(copied, message_id, self._stream)

    def _filler(self, sequence: int) -> Outgoing:
        headers = {LAST_SEQUENCE: str(sequence - 1)}
        filler = Message(subject=f"{NOWHERE}.{self._stream}.{FILLER}", data=b"", headers=headers)
        return Outgoing(filler, "", self._stream)

    async def _last(self) -> int:
        return (await self._target.stream_info(self._stream)).last_sequence

    async def _compare(self, last: int) -> tuple[int, int]:
        """Return how many messages both streams have, and how many were deleted in the copy. Raises `BackupError`."""
        messages = deleted = 0
        ours = inventory.messages_between(self._source, self._stream, after=0, last=last)
        theirs = inventory.messages_between(self._target, self._stream, after=0, last=last)
        async with aclosing(ours), aclosing(theirs):
            async for original, found in inventory.side_by_side(ours, theirs):
                if original is None and found is not None:
                    with suppress(NotFoundError):  # another command that follows was faster
                        await self._target.delete_message(self._stream, found.sequence)
                    deleted += 1
                elif original is not None and await self._differs(original, found):
                    raise BackupError(
                        f"{self._stream}: message {original.sequence} is not in the copy as it is in the original"
                    )
                else:
                    messages += 1
        return messages, deleted

    async def _differs(self, original: Message, found: Message | None) -> bool:
        if found is not None:
            return _content(original) != _content(found)
        # It may have become too old, in the copy and then in the original.
        return await self._source.message(self._stream, original.sequence) is not None


def _content(message: Message) -> tuple[str, bytes, dict[str, str]]:
    return message.subject, message.data, _own_headers(message.headers)


def _own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers without those that say how the message was to be stored."""
    own = (headers or {}).items()
    return {key: value for key, value in own if not key.startswith(HOW_TO_STORE) and key != MESSAGE_ID}


def _is_filler(outgoing: Outgoing) -> bool:
    return outgoing.message.subject.endswith(FILLER)


def _sequence(outgoing: Outgoing) -> int:
    return int((outgoing.message.headers or {})[LAST_SEQUENCE]) + 1
