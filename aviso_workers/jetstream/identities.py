"""Which consumer of a name it is: the one that is known, or one that was made in its place.

`created` alone does not say that. Where a consumer was updated after its server had restarted, nats-server 2.15 says
after the next restart that it was created when that server had started. (It does so of no stream: there `created` is
enough.) So a consumer that we create or update has a mark of ours in its metadata. An update by others, or by a version
that does not know the mark, keeps it or removes it, and then `created` is all that is known.

Here too are the names of the consumers by which a stream is read without acks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from msgspec import UNSET, Struct, structs

from aviso_workers.jetstream import metadata, plans
from aviso_workers.jetstream.info import ConsumerInfo
from aviso_workers.jetstream.specs import OURS, SCHEDULES, ConsumerSpec

MARK = "aviso-workers-id"
"""The metadata of a consumer that says which one of its name it is."""
SPARK = "aviso_workers_spark"
"""The owner of the readers of Spark's drivers and tasks."""
READERS = 16
"""How many readers of a stream an app may have at once, those of all its workers together."""
READERS_OF_SPARK = 64
"""The same for all queries of Spark: each task that reads has one."""


class Identity(Struct, frozen=True):
    """The facts by which a consumer is recognised."""

    created: str
    mark: str
    """As noted in the consumer, or `created` where nothing is noted."""
    deliveries: int
    resets: int
    """How often an operator has taken it to another place."""

    def is_same(self, known: Identity | None) -> bool:
        """Return whether it is the consumer that was `known` before as that.

        A mark proves nothing of a consumer that has delivered less than before and was not reset: somebody made it as a
        copy.
        """
        if known is None or self.created == known.created:
            return known is not None
        named_alike = not {self.mark, self.created}.isdisjoint({known.mark, known.created})
        return named_alike and (self.deliveries >= known.deliveries or self.resets > known.resets)

    def goes_on(self, known: Identity | None) -> bool:
        """Return whether it is the `known` consumer, and nobody has taken it to another place since."""
        return self.is_same(known) and known is not None and self.resets == known.resets


def of(consumer: ConsumerInfo) -> Identity:
    """Return the identity of a consumer, as a server reports it."""
    created = str(consumer.created)
    mark = consumer.config.metadata.get(MARK, created)
    return Identity(created, mark, consumer.deliveries, metadata.resets_of(consumer.config))


def marked(spec: ConsumerSpec, found: ConsumerInfo | None) -> ConsumerSpec:
    """Return the consumer with its mark: a new one where it is to be created, else that of the one that was found. One
    without a mark gets the same mark from all workers, which may update it at the same time.
    """
    noted = {} if spec.metadata is UNSET else spec.metadata
    return structs.replace(spec, metadata={**noted, MARK: of(found).mark} if found else newly_marked(noted))


def is_as_wanted(spec: ConsumerSpec, found: ConsumerInfo) -> bool:
    """Return whether a consumer has nothing to update: it is as wanted, and has its mark."""
    return not plans.consumer_differences(marked(spec, found), found.config)


def newly_marked(noted: Mapping[str, str] | None) -> dict[str, str]:
    """Return the metadata of a consumer that is to be created in the place of another one."""
    return {**(noted or {}), MARK: secrets.token_hex(8)}


def reader_names(owner: str, stream: str) -> tuple[str, ...]:
    """Return the names of consumers by which an owner may read a stream without acks; none where it may use any.

    A server's permissions bind whole names. So readers of a stream that several apps share have the names of a pool,
    which belongs to one app: nobody else may pull from them, change or delete them. `backends.jetstream.readers` takes
    a name that is free, and `ops.permissions` gives the right to each. Who reads as an operator, who may do everything,
    and who reads a stream of the own app uses names at random.

    The names contain no `__`, as those of agents' consumers do. An app's name is followed by the number alone, so no
    two apps have one name.
    """
    of_state = f"KV_{owner}__"
    is_shared = stream.startswith(SCHEDULES) if stream.startswith(OURS) else not stream.startswith(of_state)
    if not owner or not is_shared:
        return ()
    return tuple(f"{owner}-r{number}" for number in range(READERS_OF_SPARK if owner == SPARK else READERS))
