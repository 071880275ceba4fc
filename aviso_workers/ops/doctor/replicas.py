"""The replicas of streams and consumers that do not help when the next server is lost, as the leaders report them.

A replica of a stream with many publishes is behind its leader for moments, and current again before anybody looks. So
only what is wrong in every sample counts, and `facts` takes some more where that would be a matter of chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aviso_workers.aviso.literals import SECOND
from aviso_workers.jetstream.info import Cluster
from aviso_workers.jetstream.specs import FAR_BEHIND, INACTIVE_SECONDS

Groups = Mapping[tuple[str, str], Cluster]
"""The servers that keep each stream and each consumer, by stream and consumer; the consumer of a stream is empty."""
CERTAIN = ("it has no leader", "is offline")
"""Nobody has to look at these once more."""


def wrong_in_all(samples: Sequence[Groups]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each stream and consumer that has no leader, or a replica that does not help, in all samples; and what is
    wrong with it in the last one.
    """
    *earlier, last = samples
    for key, group in last.items():
        wrong = dict(_wrong_with(group))
        for sample in earlier:
            before = dict(_wrong_with(sample.get(key, Cluster())))
            wrong = {server: found for server, found in wrong.items() if server in before}
        yield from ((key, found) for found in wrong.values())


def is_doubtful(samples: Sequence[Groups]) -> bool:
    """Return whether replicas seem to be behind in all samples, and nothing worse is wrong."""
    found = [text for _, text in wrong_in_all(samples)]
    return bool(found) and not any(text.endswith(CERTAIN) for text in found)


def _wrong_with(group: Cluster) -> Iterator[tuple[str, str]]:
    """Yield each server whose replica does not help, and why; an empty name where the leader is missing."""
    if group.name and not group.leader:
        yield "", "it has no leader"
    for replica in group.followers:
        if replica.offline:
            yield replica.name, f"{replica.name} is offline"
        elif not replica.current:
            yield replica.name, f"{replica.name} is not current"
        elif replica.active > INACTIVE_SECONDS * SECOND:
            yield replica.name, f"{replica.name} was last active {replica.active / SECOND:.0f} s ago"
        elif replica.lag > FAR_BEHIND:
            yield replica.name, f"{replica.name} is {replica.lag} entries behind"
