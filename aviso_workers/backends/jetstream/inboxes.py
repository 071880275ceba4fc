"""The subjects to which servers send their answers to us.

No permission of nats-server looks at the reply subject of a message. So a user can have the acknowledgements of his own
messages sent to any subject, also to the one on which somebody else waits for an answer. Ours are therefore below a
prefix of the user's own, to which no other user may subscribe, and nobody can guess one from those before.

`Requests` are those with one answer each. `NatsConnection` is the only caller.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import nats.errors

from aviso_workers import config
from aviso_workers._fast import Arrival
from aviso_workers.backends.jetstream.wire import Interest, Listener, Wire, status
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


IsAnswer = Callable[[bytes], bool]
"""Returns whether a body answers a request."""


class Answer(NamedTuple):
    """The answer to a request."""

    subject: bytes
    reply: bytes
    headers: bytes
    data: bytes


def denies(said: str, subject: str) -> bool:
    """Return whether a server denies a subject with these words, which have no upper case: it quotes it as Go does."""
    quoted = subject.lower().replace("\\", "\\\\").replace('"', '\\"')
    return said.partition('"')[2].rpartition('"')[0] == quoted


class Requests:
    """The requests of a connection, whose answers come to an `inbox`. `open` that before use."""

    def __init__(self, wire: Wire, *, on_foreign: Callable[[str, bytes], None]) -> None:
        """`on_foreign` is called with the subject of a request and what came that does not answer it."""
        self.inbox = Inbox(self._on_answers)
        self._wire = wire
        self._on_foreign = on_foreign
        self._waiting: dict[bytes, tuple[asyncio.Future[Arrival], str, IsAnswer]] = {}
        """By the subject on which the answer comes."""

    async def ask(
        self, subject: str, body: bytes, *, timeout_seconds: float, is_answer: IsAnswer = lambda _: True
    ) -> Answer:
        """Return the answer to a request.

        Raises TimeoutError, or nats-py's `NoRespondersError` where the server says that nobody answers.
        """
        reply = next(self.inbox.replies)
        answered: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answered, subject, is_answer
        try:
            self._wire.send(subject.encode(), body, reply=reply)
            async with asyncio.timeout(timeout_seconds):
                answer = await answered
        finally:
            del self._waiting[reply]
        if not answer[3] and status(answer[2])[0] == "503":
            raise nats.errors.NoRespondersError
        return Answer(*answer)

    def end_denied(self, said: str) -> None:
        """End with a TimeoutError the requests whose subject the server denies with these words: nobody answers. Where
        two subjects differ in case only, it is not known which of them, and both are waited for.
        """
        denied = [found for found in self._waiting.values() if denies(said, found[1])]
        if len({subject for _, subject, _ in denied}) == 1:
            for answered, _, _ in denied:
                if not answered.done():
                    answered.set_exception(TimeoutError(said))

    def _on_answers(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            subject, _, headers, data = arrival
            if not (found := self._waiting.get(subject)):
                continue
            answered, asked, is_answer = found
            if not (is_answer(data) or (headers and status(headers)[0] == "503")):
                self._on_foreign(asked, data)
            elif not answered.done():
                answered.set_result(arrival)
