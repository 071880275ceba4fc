"""Mirrors and sources: whether they keep up with their origins, and fences of streams.

Called by the commands `mirror ...`, by `promotion` and by `doctor`. A mirror is judged by its last contact with its
origin, because its lag stays at nought when the origin is gone, and by whether both have the same history (see
`mirror_histories`). A fenced stream keeps its messages, and a placeholder takes the place of its subjects, so that it
takes no publish, also after a restart: where a mirror and its former origin both took publishes, the same sequences
would hold different messages, and the streams could not be merged.
Reconciliation leaves a fenced stream alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import anyio
from msgspec import Struct, field, structs

from aviso_workers.aviso.literals import quoted
from aviso_workers.backends import Admin, Management
from aviso_workers.errors import BackendError, NotFoundError, RefusedError, UnavailableError
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.info import SourceInfo, StreamInfo
from aviso_workers.jetstream.metadata import FENCED
from aviso_workers.ops import mirror_histories

STALE_SECONDS = specs.STALE_SECONDS
"""A mirror without contact for so long is not following: an idle origin sends a heartbeat every few seconds."""
PROMOTED = "aviso-workers-promoted-from"
"""The metadata of a promoted mirror: the API and the name of its origin, and the last sequence that it mirrored."""
COPY_OF = "aviso-workers-copy-of"
"""The metadata of an unfinished copy (see `stream_copies`): when its original was created."""
NOWHERE = "aviso_workers.fenced"
"""The placeholder that a fenced stream has as its subject, followed by its name: a stream without subjects takes what
is published under its name."""
ORIGIN_SECONDS = 2.0


class Link(Struct, frozen=True, kw_only=True):
    """The relation of a stream to its origin, and how far it keeps up."""

    stream: str
    origin: str
    relation: str
    """`mirror`, `source`, or `promoted`: it was a mirror."""
    api: str
    """The prefix of the API where the origin is; empty where it is in the same account."""
    whole: bool = True
    """Whether a mirror has no filter, subject transform or start, so that it holds all of its origin, unchanged."""
    lag: int = 0
    """Messages that are still to come, as far as the stream knows."""
    active_seconds: float | None = None
    """Seconds since its last contact with the origin; None: never."""
    trouble: str = ""
    """Why it cannot be relied on; empty where it can."""
    divergence: str = field(default="", name="other_history")
    """Why the messages of a mirror and of its origin differ; empty where they are equal or could not be compared. It is
    part of `trouble` as well, and is called `other_history` in JSON."""
    equal: int | None = None
    """Messages of a mirror that were compared with those of its origin and are the same; None where none could be."""


class Fenced(Struct, frozen=True, kw_only=True):
    """The result of fencing a stream: the subjects that it took, and its last sequence."""

    subjects: tuple[str, ...]
    last_sequence: int
    """Nothing comes after it."""
    already_fenced: bool


class Mirrors:
    """The mirrors and sources of the account. Works inside of `async with app:`. Every method raises `BackendError`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def links(self, streams: Iterable[StreamInfo] | None = None) -> list[Link]:
        """Return the links of all `streams`, or these, that follow another one, or did until they were promoted."""
        streams = await self._admin.streams() if streams is None else streams
        links = [link for stream in streams for link in _links(stream)]

        async def judge(index: int) -> None:
            try:
                links[index] = await self._judged(links[index])
            except BackendError as error:
                trouble = links[index].trouble or f"{links[index].origin} cannot be read: {error}"
                links[index] = structs.replace(links[index], trouble=trouble)

        async with anyio.create_task_group() as tasks:  # those whose origins do not answer are waited for side by side
            for index in range(len(links)):
                tasks.start_soon(judge, index)
        return links

    async def _judged(self, link: Link) -> Link:
        """Return the link after a comparison with its origin, where that answers."""
        try:
            if link.relation == "mirror" and link.whole:
                return await self._compared(link)
            if link.relation == "promoted":
                return await self._promoted(link)
        except UnavailableError:
            pass  # the time since the last contact shows it
        except NotFoundError:
            if link.relation == "mirror":
                return structs.replace(link, trouble=link.trouble or f"{link.origin} does not exist any more")
        return link

    async def _compared(self, link: Link) -> Link:
        comparison = await mirror_histories.compare(
            self._admin, link.stream, link.origin, api=link.api, timeout_seconds=ORIGIN_SECONDS
        )
        return structs.replace(
            link,
            trouble="; ".join(filter(None, (comparison.trouble, link.trouble))),
            divergence=comparison.trouble,
            equal=comparison.equal,
        )

    async def _promoted(self, link: Link) -> Link:
        config = (await self._admin.at(link.api).stream_info(link.origin, timeout_seconds=ORIGIN_SECONDS)).config
        if FENCED in config.metadata or config.mirror:
            return link
        fence = f"`aviso-workers mirror fence {quoted(link.origin)} --api {quoted(link.api)}`"
        return structs.replace(
            link,
            trouble=f"{link.origin} is back and takes publishes, although a mirror has replaced it: run {fence}",
        )


async def fence(streams: Management, stream: str) -> Fenced:
    """Fence a stream: take its subjects away, and keep them in its metadata. A fenced stream stays as it is.

    Raises `BackendError`.
    """
    found = await streams.stream_info(stream, timeout_seconds=ORIGIN_SECONDS)
    metadata, subjects = found.config.metadata, found.config.subjects
    already_fenced = FENCED in metadata
    if not already_fenced:
        if not subjects:
            raise RefusedError(f"{stream} has no subjects of its own, so there is nothing to fence")
        metadata = {**metadata, FENCED: " ".join(subjects)}
        config = {**found.config, "subjects": [f"{NOWHERE}.{stream}"], "metadata": metadata}
        found = await streams.update_stream(config)
    return Fenced(
        subjects=tuple(metadata[FENCED].split()), last_sequence=found.last_sequence, already_fenced=already_fenced
    )


async def unfence(streams: Management, stream: str) -> tuple[str, ...]:
    """Give a fenced stream its subjects back, also an unfinished copy, and return them.

    Raises `RefusedError` where it is not fenced.
    """
    config = (await streams.stream_info(stream)).config
    metadata = dict(config.metadata)
    if FENCED not in metadata:
        raise RefusedError(f"{stream} is not fenced")
    subjects = metadata.pop(FENCED).split()
    if metadata.pop(COPY_OF, None):
        config.pop("subject_transform", None)  # which `following_copies` used to append to it
    await streams.update_stream({**config, "subjects": subjects, "metadata": metadata})
    return tuple(subjects)


def _links(stream: StreamInfo) -> Iterator[Link]:
    if stream.mirror:
        declared = stream.config.mirror
        whole = declared is None or not declared.left_out
        yield structs.replace(_link(stream.name, "mirror", stream.mirror), whole=whole)
    for source in stream.sources:
        yield _link(stream.name, "source", source)
    metadata = stream.config.metadata
    if (promoted := metadata.get(PROMOTED)) and FENCED not in metadata:  # fenced, it replaces nothing any more
        api, origin, _ = promoted.split(" ")
        yield Link(stream=stream.name, origin=origin, relation="promoted", api=api)


def _link(stream: str, relation: str, found: SourceInfo) -> Link:
    active_seconds = found.active / 1e9 if found.active >= 0 else None
    trouble = found.trouble
    if active_seconds is None:
        trouble = trouble or "it has never contacted its origin"
    elif active_seconds > STALE_SECONDS:
        trouble = trouble or f"last contact with its origin {active_seconds:.0f} s ago, so its lag is not known"
    return Link(
        stream=stream,
        origin=found.name,
        relation=relation,
        api=found.api,
        lag=found.lag,
        active_seconds=active_seconds,
        trouble=trouble,
    )
