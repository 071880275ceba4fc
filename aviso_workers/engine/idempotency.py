"""The message ids (idempotency keys) of what is published while something else is handled: they follow from that.

The call forms say what they handle, `publisher` asks for ids. A handler that is run again, because it failed or its
worker died, publishes the same under the same ids, and the stream's duplicate window stores it once. The content is
part of an id: what differs from the run before is another notification and never taken for a repeat, for one too many
does less harm than one that is lost. So is the time of what is handled, because a stream that is recreated counts from
1 again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextvars import ContextVar, Token

from aviso_workers.aviso.codec import Message

DIGEST_BYTES = 12


class IdempotencyKeys:
    """The notifications of one call of an agent; those that it publishes in the `with` block get ids made from these.

    An agent has as many as it makes calls at a time, each around the calls of one task.
    """

    def __init__(self, *, app: str, agent: str, stream: str) -> None:
        self.agent = agent
        self.stream = stream
        self.updates: set[tuple[str, str, int]] = set()
        """The table and key of each update that was made once in this call, and the sequence of its notification."""
        self._prefix = f"{app}.{agent}.{stream}"
        self._handled: tuple[Message, ...] = ()
        self._ids: _Ids | None = None
        self._token: Token[IdempotencyKeys | None]

    def __enter__(self) -> IdempotencyKeys:
        self._token = _KEYS.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _KEYS.reset(self._token)

    def begin(self, *handled: Message) -> None:
        """Begin with these messages: they are handled from now on, and nothing has been published for them yet."""
        self._handled = handled
        self._ids = None
        self.updates.clear()

    def also(self, message: Message) -> None:
        """Add one more message to those that are handled."""
        self._handled = (*self._handled, message)
        self._ids = None

    def handles(self, sequence: int, subject: str) -> bool:
        """Return whether the message of this sequence and subject is handled now."""
        return any(each.sequence == sequence and each.subject == subject for each in self._handled)

    def begin_with(self, place: str, *, of: str) -> None:
        """Begin as `begin` does for what is not a message, as a window: `place` is its start, `of` its end and key."""
        self._ids = _Ids(f"{self._prefix}.{place}", f"{place} {of}")

    def message_id(self, message: Message, *, when: str) -> str | None:
        """Return the message id of what is published while notifications are handled; None while none is."""
        if self._ids is None:
            if not self._handled:
                return None
            root = "".join(f"{each.sequence}@{each.timestamp_ns} " for each in self._handled)
            self._ids = _Ids(f"{self._prefix}.{self._handled[0].sequence}", root)
        return self._ids.next(message, when)


class _Ids:
    """The message ids of one handling. `root` is all of what is handled, `prefix` tells people of it."""

    def __init__(self, prefix: str, root: str) -> None:
        self._prefix = prefix
        self._root = hashlib.blake2b(root.encode(), digest_size=DIGEST_BYTES)
        self._counts: Counter[bytes] = Counter()

    def next(self, message: Message, when: str) -> str:
        digest = self._root.copy()
        digest.update(f"{message.subject} {message.headers} {when}".encode())
        digest.update(message.data)
        content = digest.digest()
        self._counts[content] += 1
        return f"{self._prefix}.{content.hex()}.{self._counts[content]}"


def id_together(message_id: str, number: int) -> str:
    """Return the id of one of the messages that are stored together under `message_id`; numbers count from 1.

    A stream takes all of them as stored before where it knows one of their ids. So it has a digest that no author gives
    to a message by chance, as he might give `job.1` beside `job`.
    """
    digest = hashlib.blake2b(f"{message_id} {number}".encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{message_id}.{number}.{digest}"


_KEYS: ContextVar[IdempotencyKeys | None] = ContextVar("keys", default=None)


def handling() -> IdempotencyKeys | None:
    """Return the keys of the call of an agent that this code is in; None where it is in none."""
    return _KEYS.get()


def message_id(message: Message, *, when: str = "") -> str | None:
    """Return the id of a message that is published now; None where that is in no handler.

    `when` it is to be delivered, in the handler's own words, is part of its content.
    """
    keys = _KEYS.get()
    return keys.message_id(message, when=when) if keys is not None else None
