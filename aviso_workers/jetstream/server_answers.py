"""What a server answers, where it is stored as a message: acknowledgements, the progress of fast batches, API answers.

No permission of nats-server looks at the reply subject of a publish. So whoever may publish to one stream can have the
server store its acknowledgement in any other stream or bucket of the account. What is stored this way has no headers,
and its body is a server's. All that this package publishes has headers (`Nats-Msg-Id`).
"""

from __future__ import annotations

from typing import Any

from aviso_workers.aviso.codec import Message, read_json
from aviso_workers.errors import UndecodableError

__all__ = ["is_stored_by_reply", "why_foreign"]

BEGINNINGS = (b'{"stream":', b'{"error":', b'{"type":')
"""How the body of each answer begins; `engine.handlers.one` has them too."""
API = "io.nats.jetstream.api."
"""How the types begin that JetStream's API answers with."""
OF_ACK = frozenset({"stream", "seq", "domain", "duplicate", "val", "batch", "count", "error"})
OF_PROGRESS = frozenset({"type", "seq", "msgs", "last_seq", "error"})
PROGRESS = ("ack", "gap", "err")
SOURCE = "Nats-Stream-Source"
"""The header that a server adds to what one stream has from another."""


def why_foreign(message: Message) -> str:
    """Return why it is known that aviso-workers has not published a message; empty where that is not known."""
    if is_stored_by_reply(message):
        return (
            "it has no headers and is the answer of a server, which somebody has had stored here by a publish with the "
            f"reply subject {message.subject}"
        )
    return "it has no headers, so aviso-workers has not published it" if _lacks_headers(message) else ""


def is_stored_by_reply(message: Message) -> bool:
    """Return whether the message looks like an answer that a server has stored because of a reply subject.

    It may be genuine in a stream that others publish to.
    """
    return _lacks_headers(message) and _is_answer(message.data)


def _lacks_headers(message: Message) -> bool:
    """Return whether whoever published the message gave it no headers."""
    return not message.headers or message.headers.keys() <= {SOURCE}


def _is_answer(data: bytes) -> bool:
    if not data.startswith(BEGINNINGS):
        return False
    try:
        answer = read_json(data, dict[str, Any])
    except UndecodableError:
        return False
    if (kind := answer.get("type")) is not None:
        return str(kind).startswith(API) or (kind in PROGRESS and "seq" in answer and answer.keys() <= OF_PROGRESS)
    return answer.keys() <= OF_ACK and ({"stream", "seq"} <= answer.keys() or isinstance(answer.get("error"), dict))
