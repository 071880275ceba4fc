"""The inventory of a server: streams of the account, their gaps and messages, consumers, limits and use.

Called by `streams ls|info|gaps|get`, `consumers ls|show` and `report account`. Whole answers are handed on in
JetStream's own JSON, so that nothing newer than this code is lost. Nothing is changed here; what changes something is
in `maintenance`, and what concerns the configuration in `stream_policy`. What the server denies our user of a report is
noted in `Denials`: the rest is shown, and each place says the same of what is missing.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Generic, TypeVar

from msgspec import Struct, json

from aviso_workers.aviso import literals
from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin, Management
from aviso_workers.errors import DeniedError, NotFoundError, RefusedError, UnavailableError, describe
from aviso_workers.jetstream import answers, error_codes, info
from aviso_workers.jetstream.info import ConsumerInfo, StreamInfo
from aviso_workers.task_groups import task_group

ASK_AGAIN_SECONDS = 1.0
SPAN = 1000
"""Messages that are read to find the newest ones; the server counts where these begin."""
DETAILS_SECONDS = 60.0
"""A stream may have millions of gaps, and a server lists each."""
Answer = TypeVar("Answer")
OWN_NAME = re.compile(r"(?<=\.CONSUMER\.MSG\.NEXT\.)([^.]+)\..+")
"""In the subject of a pull: the consumer, which a reader makes for itself."""
NOT_KNOWN = "not known, since "
NO_ANSWERS = "violation for subscription to"


class Denials:
    """What was denied while a report was made, by the part of the report and the subject; and what nobody answered."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self.away: set[tuple[str, str]] = set()
        """The same of what no server has answered, with the error."""

    def subjects(self, *parts: str) -> list[str]:
        """Return the subjects that were denied of these parts; without any, of all."""
        return sorted({subject for part, subject in self.found if not parts or part in parts})

    def text(self, *parts: str) -> str:
        """Return in a sentence without its full stop what was denied of these parts, and the cure; else nothing."""
        return f"{NOT_KNOWN}{reason}" if (reason := self.reason(*parts)) else ""

    def reason(self, *parts: str) -> str:
        """Return the same as the end of a sentence, without that it is not known."""
        away = sorted({error for part, error in self.away if not parts or part in parts})
        subjects = self.subjects(*parts)
        return "; ".join([*([_reason(subjects)] if subjects else []), *away])


def denial_text(error: DeniedError) -> str:
    """Return the same sentence of one error."""
    return str(error) if NO_ANSWERS in str(error) else f"{NOT_KNOWN}{_reason([_subject(error)])}"


def _reason(subjects: list[str]) -> str:
    cure = "give it the role operator (`aviso-workers server render --role operator`)"
    return f"the server denies our user {', '.join(subjects)}: {cure}"


def _subject(error: DeniedError) -> str:
    return OWN_NAME.sub(r"\1.*", str(error).partition(": ")[0])


@contextmanager
def noted(denied: Denials | None, part: str, *, away: bool = False) -> Iterator[None]:
    """Note what the server denies within the block, which ends there; and, if `away`, what no server answers. It is
    raised where nobody notes it, and where no answer can be heard: each request would be waited for in vain.
    """
    try:
        yield
    except DeniedError as error:
        if denied is None or NO_ANSWERS in str(error):
            raise
        denied.found.add((part, _subject(error)))
    except UnavailableError as error:
        if denied is None or not away:
            raise
        denied.away.add((part, describe(error)))


async def asked(
    denied: Denials | None, part: str, request: Awaitable[Answer], otherwise: Answer, *, away: bool = False
) -> Answer:
    """Return the answer to a request, or what is said `otherwise` where the server denies it, or no server answers;
    which is `noted`."""
    with noted(denied, part, away=away):
        return await request
    return otherwise


class Gaps(Struct, frozen=True, kw_only=True):
    """The sequences between a stream's first and last that are not there any more."""

    first: int
    last: int
    messages: int
    deleted: int
    ranges: list[tuple[int, int]]
    """First and last of each gap."""
    lost: int
    """Messages that the server could not read when it started: their blocks are damaged."""


class StoredMessage(Struct, frozen=True, kw_only=True):
    stream: str
    sequence: int
    time: str
    """RFC 3339."""
    subject: str
    headers: dict[str, str]
    data: bytes


class ResourceUse(Struct, frozen=True, kw_only=True):
    """The use of one resource of an account; a `limit` of -1 is none."""

    what: str
    used: int
    limit: int


T = TypeVar("T", StreamInfo, ConsumerInfo)


class Listing(Struct, Generic[T], frozen=True, kw_only=True):
    """A listing of streams or consumers. A cluster leaves out those for which no server answers, as where the only
    server that has them is down.
    """

    found: list[T]
    """By name."""
    unavailable: list[str]
    """The names of those that were left out."""


async def existing(request: Awaitable[Answer]) -> Answer | None:
    """Return the answer to a request; None where the stream or the consumer that it is about does not exist."""
    try:
        return await request
    except NotFoundError:
        return None


async def streams(admin: Admin, *, denied: Denials | None = None) -> Listing[StreamInfo]:
    """Return all streams of the account. Raises `BackendError`; with `denied`, what the server denies is noted there as
    `streams`, and left out.
    """
    return await _listed(admin.stream_names, admin.streams, admin.stream_info, denied=denied, part="streams")


async def gaps(admin: Admin, stream: str) -> Gaps:
    """Return the gaps of a stream. Raises `NotFoundError`."""
    found = await admin.stream_info(stream, deleted_details=True, timeout_seconds=DETAILS_SECONDS)
    return Gaps(
        first=found.first_sequence,
        last=found.last_sequence,
        messages=found.messages,
        deleted=found.deleted,
        ranges=list(ranges(found.deleted_sequences)),
        lost=len((found.lost and found.lost.msgs) or ()),
    )


def messages_before(found: Gaps, sequence: int) -> int:
    """Return how many messages a stream has below a sequence."""
    end = min(sequence, found.last + 1)
    missing = sum(min(last + 1, end) - first for first, last in found.ranges if first < end)
    return max(0, end - found.first - missing) if found.messages else 0


async def count(admin: Admin, stream: str, subject: str) -> int:
    """Return how many messages match a subject, without a consumer, of which a work queue takes no more. Raises
    `NotFoundError`.
    """
    return sum((await admin.subject_counts(stream, subject=subject)).values())


async def start_of_newest(admin: Admin, stream: str, of: StreamInfo, filter_subjects: Sequence[str], count: int) -> int:
    """Return a sequence from which on a stream has so many messages of these subjects, or all that it has, and not many
    others before them: the server counts. Raises `BackendError`.
    """
    begin, end = of.first_sequence, of.last_sequence + 1
    while end - begin > SPAN:  # at least so many begin here, and fewer there
        middle = (begin + end) // 2
        if await admin.count(stream, filter_subjects=filter_subjects, start_sequence=middle) >= count:
            begin = middle
        else:
            end = middle
    return begin


async def message(
    admin: Admin, stream: str, *, sequence: int | None = None, subject: str | None = None
) -> StoredMessage:
    """Return the message of a sequence, or the last one of a subject, from the stream's leader.

    Raises `NotFoundError`.
    """
    found = await admin.message(stream, sequence or 0, last_by_subject=subject or "")
    if found is None:
        raise NotFoundError(f"stream {stream} has no message {subject or sequence}", code=error_codes.NO_MESSAGE)
    return read(stream, found)


def read(stream: str, message: Message) -> StoredMessage:
    """Return a message of a stream as commands and pages show it."""
    return StoredMessage(
        stream=stream,
        sequence=message.sequence,
        time=literals.rfc3339(message.timestamp_ns),
        subject=message.subject,
        headers=dict(message.headers or {}),
        data=message.data,
    )


async def direct_message(
    admin: Admin, stream: str, *, sequence: int | None = None, subject: str | None = None
) -> StoredMessage:
    """Return the message of a sequence, or the last one of a subject, from any replica, which may not have the newest
    yet.

    Raises `NotFoundError`, and `RefusedError` where the stream's `allow_direct` is off.
    """
    if not (await admin.stream_info(stream)).config.allow_direct:
        raise RefusedError(f"stream {stream} has no direct get: set allow_direct, or read from its leader")
    base = f"{admin.api_prefix}.DIRECT.GET.{stream}"
    asked = (base, json.encode({"seq": sequence})) if subject is None else (f"{base}.{subject}", b"")
    answer = await admin.administration().request(*asked)
    headers = dict(answer.headers)
    if answer.status:
        raise NotFoundError(f"{stream}: {answer.description or 'no such message'}", code=error_codes.NO_MESSAGE)
    if headers.pop("Nats-Stream", "") != stream:
        raise UnavailableError(f"{stream}: {answers.described(answer.data)} came as the answer to a direct get")
    return StoredMessage(
        stream=stream,
        sequence=int(headers.pop("Nats-Sequence")),
        time=headers.pop("Nats-Time-Stamp"),
        subject=headers.pop("Nats-Subject"),
        headers=headers,
        data=answer.data,
    )


async def consumers(streams: Management, stream: str, *, denied: Denials | None = None) -> Listing[ConsumerInfo]:
    """Return all consumers of a stream. Raises `NotFoundError`; `denied` is as for `streams`."""
    names, infos = partial(streams.consumer_names, stream), partial(streams.consumers, stream)
    return await _listed(names, infos, partial(streams.consumer_info, stream), denied=denied, part="consumers")


async def _listed(
    names: Callable[[], Awaitable[list[str]]],
    infos: Callable[[], Awaitable[list[T]]],
    info_of: Callable[..., Awaitable[T]],
    *,
    denied: Denials | None,
    part: str,
) -> Listing[T]:
    """Return what has these names and infos. What has a name only is asked for by that: it may have been made or
    removed between the two requests, as the consumers of other commands are. A server has waited for it before it
    listed the others, so the answer is not waited for as long once more.
    """
    found: dict[str, T] = {}
    unavailable: list[str] = []

    async def ask_for(name: str) -> None:
        try:
            with noted(denied, part):
                found[name] = await info_of(name, timeout_seconds=ASK_AGAIN_SECONDS)
        except NotFoundError:
            pass  # removed meanwhile
        except UnavailableError:
            unavailable.append(name)

    named: list[str] = await asked(denied, part, names(), [])
    with noted(denied, part):
        found |= {each.name: each for each in await infos()}
        async with task_group() as tasks:
            for name in {*named} - found.keys():
                tasks.start_soon(ask_for, name)
    return Listing(found=[found[name] for name in sorted(found)], unavailable=sorted(unavailable))


async def account(admin: Admin) -> list[ResourceUse]:
    """Return the use of JetStream by the account, or by each of its tiers where it has some. Raises `BackendError`."""
    found = await admin.administration().account()
    uses = list(_uses(found, of="")) if not found.tiers else []
    for tier, inside in (found.tiers or {}).items():
        uses += _uses(inside, of=f" of {tier}")
    return [
        *uses,
        ResourceUse(what="requests to the API", used=found.api.total, limit=-1),
        ResourceUse(what="of which failed", used=found.api.errors, limit=-1),
    ]


def _uses(found: info.Use, *, of: str) -> Iterator[ResourceUse]:
    for what, used, limit in (
        ("bytes in memory", "memory", "max_memory"),
        ("bytes on disk", "storage", "max_storage"),
        ("bytes reserved in memory", "reserved_memory", "max_memory"),
        ("bytes reserved on disk", "reserved_storage", "max_storage"),
        ("streams", "streams", "max_streams"),
        ("consumers; the limit is for each stream", "consumers", "max_consumers"),
    ):
        yield ResourceUse(what=f"{what}{of}", used=getattr(found, used), limit=getattr(found.limits, limit))


def ranges(sequences: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of ascending sequences, each as its first and its last one."""
    first = last = -1
    for sequence in sequences:
        if sequence != last + 1:
            if last > 0:
                yield first, last
            first = sequence
        last = sequence
    if last > 0:
        yield first, last


async def messages_between(admin: Admin, stream: str, *, after: int, last: int) -> AsyncGenerator[Message, None]:
    """Yield the messages of a stream between two sequences; none where the stream is known to end before."""
    if after >= last:
        return
    reading = admin.read(stream, filter_subjects=(), start_sequence=after + 1, last_sequence=last)
    async with aclosing(reading):
        async for message in reading:
            yield message


async def side_by_side(
    ours: AsyncIterator[Message], theirs: AsyncIterator[Message]
) -> AsyncIterator[tuple[Message | None, Message | None]]:
    """Yield the messages of two streams in pairs by sequence, with None where one of them has no such message."""
    one, other = await anext(ours, None), await anext(theirs, None)
    while one or other:
        if other is None or (one is not None and one.sequence < other.sequence):
            yield one, None
            one = await anext(ours, None)
        elif one is None or other.sequence < one.sequence:
            yield None, other
            other = await anext(theirs, None)
        else:
            yield one, other
            one, other = await anext(ours, None), await anext(theirs, None)
