"""What we note in the metadata of streams and consumers, for whoever looks at them next.

A consumer's says where it was declared to begin, how often it was reset, and which versions of an agent read it; a
stream's, that it is fenced or not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from aviso_workers.jetstream import specs, subjects
from aviso_workers.jetstream.info import ConsumerConfig
from aviso_workers.jetstream.specs import ConsumerSpec

__all__ = [
    "FENCED",
    "OF_SET",
    "START",
    "UNFINISHED",
    "Version",
    "after_reset",
    "is_of_agent",
    "is_of_set",
    "is_unfinished",
    "noted_versions",
    "resets_of",
    "shared",
    "starting",
    "version_of",
]

START = "aviso-workers-start"
RESETS = "aviso-workers-resets"
VERSIONS = "aviso-workers-versions"
"""The metadata of a durable consumer that says which versions of an agent read it: see `noted_versions`."""
ACK_WAIT = "ack_wait="
"""What the name of a version in the metadata begins with, before its nanoseconds and its filter subjects."""
LONGEST_ACK_WAIT = 2**63 - 1
"""In nanoseconds: a server counts them in 64 bits."""
MOST_HEARD = 2**32
"""More often than a version is heard of while it lives."""
MOST_NOTED = 200
"""Words of all versions that are noted in one consumer. A version has up to nine; to unite many takes long."""
MOST_DIGITS = 19
"""As many as a number of 64 bits has."""
FENCED = "aviso-workers-fenced"
"""The metadata of a stream that was fenced when its mirror was promoted: which subjects it had."""
UNFINISHED = "aviso-workers-unfinished"
"""The metadata of a stream that is not whole, because a restore of it is under way or was killed."""
OF_SET = "of set "
"""What the metadata's value has where a set of streams is restored as one; the set's id follows."""


class Version(Struct, frozen=True, order=True):
    """What one version of an agent wants of the consumer that it shares with others."""

    filter_subjects: tuple[str, ...]
    """Sorted; none means everything."""
    ack_wait: int
    """Nanoseconds."""


def is_of_agent(consumer_config: ConsumerConfig) -> bool:
    """Return whether a worker made the consumer: then attempts, delays and dead letters are the worker's business."""
    return START in consumer_config.metadata


def is_unfinished(stream_config: Mapping[str, Any]) -> bool:
    """Return whether a restore of the stream is under way, or was killed."""
    return UNFINISHED in (stream_config.get("metadata") or {})


def is_of_set(stream_config: Mapping[str, Any]) -> bool:
    """Return whether it is unfinished because a restore of a set of backups is under way, or was killed."""
    return OF_SET in (stream_config.get("metadata") or {}).get(UNFINISHED, "")


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
    with suppress(ValueError):
        return _digits((consumer.get("metadata") or {}).get(RESETS, ""))
    return 0


def version_of(spec: ConsumerSpec) -> Version:
    """Return the version of an agent whose consumer would be that, if there were no other."""
    return Version(tuple(sorted(spec.filter_subjects)), spec.ack_wait)


def noted_versions(consumer: Mapping[str, Any]) -> dict[Version, int]:
    """Return each version of an agent that reads the consumer, as a server reports that, and how often it was heard of.

    A consumer that no version has noted itself in is taken for that of one version, whose fields it has; so is one in
    which somebody else has noted what cannot be read.
    """
    ack_wait = int(consumer.get("ack_wait") or 0)
    noted = (consumer.get("metadata") or {}).get(VERSIONS)
    with suppress(ValueError):
        if noted:
            heard = msgspec.json.decode(noted, type=dict[str, Annotated[int, Meta(ge=0, le=MOST_HEARD)]])
            if sum(len(name.split()) for name in heard) <= MOST_NOTED:
                return {_version_named(name, ack_wait): number for name, number in heard.items()}
    return {Version(tuple(sorted(ConsumerConfig(consumer).filters)), ack_wait): 0}


def shared(spec: ConsumerSpec, versions: Mapping[Version, int]) -> ConsumerSpec:
    """Return the consumer with these versions noted.

    Its filter lets through what any of them wants, and its `ack_wait` is the longest: so each of them says often enough
    what it is still working on.
    """
    noted = msgspec.json.encode({_name_of(version): heard for version, heard in sorted(versions.items())}).decode()
    filters = [version.filter_subjects for version in versions]
    everything = not all(filters)
    return structs.replace(
        specs.with_ack_wait(spec, max((version.ack_wait for version in versions), default=spec.ack_wait)),
        filter_subjects=() if everything else subjects.union(chain.from_iterable(filters)),
        metadata={**(spec.metadata or {}), VERSIONS: noted},
    )


def _name_of(version: Version) -> str:
    return " ".join((f"{ACK_WAIT}{version.ack_wait}", *version.filter_subjects))


def _version_named(name: str, ack_wait: int) -> Version:
    """Workers of before noted the filter subjects alone: then it is that of the consumer. Raises ValueError where it is
    the name of no version.
    """
    filters = name.split()
    if filters and filters[0].startswith(ACK_WAIT):
        ack_wait = _digits(filters.pop(0).removeprefix(ACK_WAIT))
    if not 0 < ack_wait <= LONGEST_ACK_WAIT:
        raise ValueError(f"no consumer has an ack_wait of {ack_wait} ns")
    for each in filters:
        if not each.isprintable() or "" in each.split("."):
            raise ValueError(f"{each!r} is not a filter subject")
    return Version(tuple(filters), ack_wait)


def _digits(text: str) -> int:
    """Return a text's number. Raises ValueError for what is not a number, or a longer one than any of ours."""
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise ValueError("no number of ours")
    return int(text)
