"""Our notes in the metadata of streams and consumers, for whoever looks at them next.

A consumer's says where it was declared to begin, how often it was reset, and which versions of an agent read it; a
stream's, that it is fenced or not whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers.jetstream import specs
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.specs import ConsumerSpec

START = "aviso-workers-start"
RESETS = "aviso-workers-resets"
VERSIONS = "aviso-workers-versions"
"""The metadata of a durable consumer that says which versions of an agent read it: see `noted_versions`."""
LONGEST_ACK_WAIT = 2**63 - 1
"""In nanoseconds: a server counts them in 64 bits."""
MAX_FUNCTION = 500
"""Characters of the name of a function."""
MAX_NOTED = 200
"""Filter subjects of all versions that are noted in one place. A version has up to nine."""
FilterSubject = Annotated[str, Meta(pattern=r"^[^\s.]+(\.[^\s.]+)*$")]
"""A subject of one or more tokens."""
MAX_DIGITS = 19
"""As many as a number of 64 bits has."""
FENCED = "aviso-workers-fenced"
"""The metadata of a stream that was fenced when its mirror was promoted: which subjects it had."""
UNFINISHED = "aviso-workers-unfinished"
"""The metadata of a stream that is not whole, because a restore of it is under way or was killed."""
SET_MARK = "of set "
"""The part of the metadata's value where a set of streams is restored as one; the set's id follows."""


class Version(Struct, frozen=True, order=True):
    """The settings that one version of an agent wants of the consumer that it shares with others."""

    filter_subjects: tuple[FilterSubject, ...]
    """Sorted; none means everything."""
    ack_wait: Annotated[int, Meta(gt=0, le=LONGEST_ACK_WAIT)]
    """Nanoseconds."""
    function: Annotated[str, Meta(max_length=MAX_FUNCTION)] = ""
    """Module and qualified name of the agent's function."""


NotedVersions = Annotated[tuple[Version, ...], Meta(max_length=MAX_NOTED)]


def is_of_agent(consumer_config: ConsumerConfig) -> bool:
    """Return whether a worker made the consumer: then attempts, delays and dead letters are the worker's business."""
    return START in consumer_config.metadata


def is_unfinished(stream_config: Mapping[str, Any]) -> bool:
    """Return whether a restore of the stream is under way, or was killed."""
    return UNFINISHED in (stream_config.get("metadata") or {})


def is_of_set(stream_config: Mapping[str, Any]) -> bool:
    """Return whether it is unfinished because a restore of a set of backups is under way, or was killed."""
    return SET_MARK in (stream_config.get("metadata") or {}).get(UNFINISHED, "")


def starting(start: str) -> dict[str, Any]:
    """Return the fields of a consumer that begins there, which `positions.parse_start` has read.

    The start is kept in the metadata as well: what a consumer was made with says nothing any more once it was reset.
    """
    fields: dict[str, Any] = {"metadata": {START: start}}
    if start in ("all", "new"):
        return fields | {"deliver_policy": start}
    if start.isdigit():
        return fields | {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, int(start))}
    return fields | {"deliver_policy": "by_start_time", "opt_start_time": start}


def after_reset(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the metadata of a consumer that is taken to another place: any start may be declared from now on, and
    workers see that they are to forget what they have handled.
    """
    return {**(metadata or {}), START: "", RESETS: str(resets_of({"metadata": metadata}) + 1)}


def resets_of(consumer: Mapping[str, Any]) -> int:
    """Return how often a consumer, as a server reports it, was taken to another place."""
    noted = (consumer.get("metadata") or {}).get(RESETS, "")
    return int(noted) if noted.isdecimal() and len(noted) <= MAX_DIGITS else 0


def version_of(spec: ConsumerSpec, function: str = "") -> Version:
    """Return the version of an agent whose consumer would be that, if there were no other."""
    return Version(tuple(sorted(spec.filter_subjects)), spec.ack_wait, function[:MAX_FUNCTION])


def noted_versions(consumer: Mapping[str, Any]) -> tuple[Version, ...]:
    """Return the versions of an agent that read the consumer, as a server reports that.

    A consumer that no version has noted itself in is taken for that of one version, whose fields it has; so is one in
    which somebody else has noted what cannot be read.
    """
    noted = (consumer.get("metadata") or {}).get(VERSIONS)
    with suppress(ValueError):
        if noted:
            found = msgspec.json.decode(noted, type=NotedVersions)
            if found and sum(len(version.filter_subjects) for version in found) <= MAX_NOTED:
                return found
    return (Version(tuple(sorted(ConsumerConfig(consumer).filters)), int(consumer.get("ack_wait") or 0)),)


def shared(spec: ConsumerSpec, versions: Iterable[Version], *, everything: tuple[str, ...]) -> ConsumerSpec:
    """Return the consumer as these versions share it, with the versions noted.

    Its filter is that of the versions, or `everything` where they differ. Its `ack_wait` is the longest: so each of
    them reports often enough what it is still working on.
    """
    known = sorted({*versions})
    return structs.replace(
        specs.with_ack_wait(spec, max((version.ack_wait for version in known), default=spec.ack_wait)),
        filter_subjects=shared_filters(known, everything=everything),
        metadata={**(spec.metadata or {}), VERSIONS: msgspec.json.encode(known).decode()},
    )


def shared_filters(versions: Iterable[Version], *, everything: tuple[str, ...]) -> tuple[str, ...]:
    """Return the filter subjects of the consumer that these versions share: `everything` where they differ.

    JetStream has no conditional update of a consumer: of two updates at once, each of which adds what its own version
    wants, the later one would undo the other. All updates to `everything` are the same.
    """
    filters = {version.filter_subjects for version in versions}
    return filters.pop() if len(filters) == 1 else everything
