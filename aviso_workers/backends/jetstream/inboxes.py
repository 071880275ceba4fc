"""The subjects to which servers send their answers to us.

No permission of nats-server looks at the reply subject of a message. So a user can have the acknowledgements of his own
messages sent to any subject, also to the one on which somebody else waits for an answer. Ours are therefore below a
prefix of the user's own, to which no other user may subscribe, and nobody can guess one from those before.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from aviso_workers import config
from aviso_workers.backends.jetstream.wire import Interest, Listener, Wire
from aviso_workers.jetstream import subjects

SHARED = "_INBOX"
"""The prefix of all clients that are told of no other one."""
TOKEN_CHARACTERS = 12
"""Of the end of a reply subject: 72 random bits."""
TOKENS_AT_ONCE = 256
"""Random characters are had from the operating system, which is dear for each alone."""


def prefix(settings: config.JetStream, user: str) -> str:
    """Return the prefix of a user's answers: the one of the configuration, else the user's own. An empty user has the
    one that all share.
    """
    return settings.inbox_prefix or (subjects.inbox_prefix(user) if user else SHARED)


def new_inbox(prefix: str) -> str:
    """Return a subject below the prefix that nobody can guess."""
    return f"{prefix}.{secrets.token_urlsafe(16)}"


class Inbox:
    """The subject of answers to one listener. It is another one when the prefix of the connection changes.

    `ending` is what follows the subject in the subscription: empty, or `.*` for answers below it.
    """

    interest: Interest
    replies: Iterator[bytes]
    """Subjects below it without end. Nobody can guess one, even from all those before."""

    def __init__(self, listener: Listener, *, ending: str = ".*") -> None:
        self._listener = listener
        self._ending = ending
        self.subject = ""

    async def open(self, wire: Wire, prefix: str) -> None:
        """Listen below the prefix."""
        self.subject = new_inbox(prefix)
        self.replies = _reply_subjects(self.subject)
        self.interest = await wire.listen(f"{self.subject}{self._ending}", self._listener)


def _reply_subjects(inbox: str) -> Iterator[bytes]:
    beginning = inbox.encode()
    while True:
        characters = secrets.token_urlsafe(TOKENS_AT_ONCE * TOKEN_CHARACTERS * 3 // 4).encode()
        for at in range(0, len(characters), TOKEN_CHARACTERS):
            yield b"%b.%b" % (beginning, characters[at : at + TOKEN_CHARACTERS])
