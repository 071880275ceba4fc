"""The ordering keys of an agent with `order_by`: which delivery of each key is next, and how many wait behind it.

The deliveries of a key are handled strictly in order of sequence: the later ones wait until the first is done, also
while the first waits to be tried again. It waits here and not on the server, which would deliver the later ones
meanwhile.

A server delivers in the order of the stream, so a key that fails or is slow brings more and more deliveries that have
to wait before anything of other keys comes. `surplus` says how many belong to such keys, and `flow` asks for more
in their place.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable
from typing import Literal

from aviso_workers.backends import Delivery

__all__ = ["OrderingKeys", "sequence_of"]

KEY_PREFETCH = 64
"""How many deliveries of an ordering key count as prefetched. Where its head waits for a retry, none do."""

Place = Literal["next", "behind", "surplus"]
"""Of a delivery that has come: it may begin, it waits for others of its key, or it waits and does not count as
prefetched."""


class _Queue(deque[Delivery]):
    """The deliveries of one key that are held, in order of sequence. Only the head may begin."""

    stopped = False
    """Whether the head cannot begin, because it waits for its retry."""
    surplus = 0
    """How many of them count as surplus."""


class OrderingKeys:
    """The busy keys of one agent, each with its head and what waits behind it. `key` returns the key of a subject."""

    def __init__(self, key: Callable[[str], Hashable]) -> None:
        self._key = key
        self._queues: dict[Hashable, _Queue] = {}
        self.surplus = 0
        """How many waiting deliveries do not count as prefetched: all of a key whose head cannot begin, and of any
        other key those beyond the first `KEY_PREFETCH`."""

    def text_of(self, subject: str) -> str:
        """Return the key of a subject as text."""
        key = self._key(subject)
        return ".".join(map(str, key)) if isinstance(key, tuple) else str(key)

    def behind(self, subject: str, sequence: int) -> int:
        """Return how many deliveries wait until the one of this subject and sequence, the first of its key, is done."""
        queue = self._queues.get(self._key(subject))
        return len(queue) - 1 if queue and queue[0].message.sequence == sequence else 0

    def is_next(self, delivery: Delivery) -> bool:
        """Return whether nothing of its key comes before a delivery."""
        queue = self._queues.get(self._key(delivery.message.subject))
        return queue is not None and queue[0] is delivery

    def enter(self, delivery: Delivery, *, recall: Callable[[Delivery], bool]) -> Place:
        """Queue a delivery by its sequence. `recall` keeps another one from beginning and returns whether it could."""
        key = self._key(delivery.message.subject)
        queue = self._queues.get(key)
        if queue is None:
            self._queues[key] = _Queue((delivery,))
            return "next"
        sequence, head = delivery.message.sequence, queue[0]
        if sequence > queue[-1].message.sequence:
            queue.append(delivery)
        elif sequence > head.message.sequence or queue.stopped or not recall(head):
            queue.insert(bisect(queue, sequence, lo=1, key=sequence_of), delivery)
        else:
            queue.appendleft(delivery)
            self._count(queue)
            return "next"
        if queue.stopped or len(queue) > KEY_PREFETCH:
            self._count(queue)
            return "surplus"
        return "behind"

    def leave(self, delivery: Delivery) -> Delivery | None:
        """Remove the first delivery of a key, and return the next one; None where there is none, or this one is not the
        first, as after it was given back.
        """
        key = self._key(delivery.message.subject)
        queue = self._queues.get(key)
        if queue is None or queue[0] is not delivery:
            return None
        queue.popleft()
        if queue.surplus:
            queue.stopped = False
            self._count(queue)
        if queue:
            return queue[0]
        del self._queues[key]
        return None

    def stop(self, delivery: Delivery, *, stopped: bool) -> None:
        """Note whether the first delivery of a key cannot begin, because it waits for its retry."""
        queue = self._queues.get(self._key(delivery.message.subject))
        if queue is not None and queue[0] is delivery and queue.stopped is not stopped:
            queue.stopped = stopped
            self._count(queue)

    def drop_unheld(self, held: Callable[[Delivery], bool]) -> None:
        """Remove all that are not held any more."""
        for key, queue in tuple(self._queues.items()):
            kept = [delivery for delivery in queue if held(delivery)]
            queue.clear()
            queue.extend(kept)
            self._count(queue)
            if not queue:
                del self._queues[key]

    def _count(self, queue: _Queue) -> None:
        surplus = len(queue) if queue.stopped else max(0, len(queue) - KEY_PREFETCH)
        self.surplus += surplus - queue.surplus
        queue.surplus = surplus


def sequence_of(delivery: Delivery) -> int:
    return delivery.message.sequence
