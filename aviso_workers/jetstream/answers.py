"""Answers of servers: to which request one belongs, and which stored message is one.

A server sends an answer to the reply subject of a message, and no permission looks at that. So what comes to us there
may answer somebody else's message: it counts if it is of the kind of the request and names what the request is about.
And whoever may publish to one stream can have the server store its acknowledgement in any other stream or bucket of the
account. What is stored this way has no headers, and its body is a server's; or it is the status of a request for
messages, with headers of the server alone. All that this package publishes has headers (`Nats-Msg-Id`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from aviso_workers.aviso.codec import Message, read_json
from aviso_workers.errors import UndecodableError

API = "io.nats.jetstream.api.v1."
"""How the `type` of each answer begins."""
KINDS = {
    "INFO": "account_info",
    "STREAM.PEER.REMOVE": "stream_remove_peer",
    "CONSUMER.DURABLE.CREATE": "consumer_create",
}
"""By request, the name of its answer. The answers to all other requests are named like the request."""
LONGER = ("MSG", "LEADER", "PEER", "DURABLE")
"""Second words of requests that have three."""
BEGINNINGS = (b'{"stream":', b'{"error":', b'{"type":')
"""How the body of each answer begins."""
ACK_FIELDS = frozenset({"stream", "seq", "domain", "duplicate", "val", "batch", "count", "error"})
PROGRESS_FIELDS = frozenset({"type", "seq", "msgs", "last_seq", "error"})
PROGRESS = ("ack", "gap", "err")
MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
SOURCE = "Nats-Stream-Source"
"""The header that a server adds to what one stream has from another."""
OF_STATUS = frozenset(
    {
        *("Nats-Pending-Messages", "Nats-Pending-Bytes", "Nats-Last-Consumer", "Nats-Last-Stream"),
        *("Nats-Consumer-Stalled", "Nats-Pin-Id", "Status", "Description"),
    }
)
"""The headers of the status of a request for messages."""
OF_SERVER = OF_STATUS | {SOURCE}
"""The headers that a message may have although whoever published it gave it none."""


class _NamedConfig(Struct):
    name: str = ""


class _ApiAnswer(Struct):
    type: str = ""
    stream: str = ""
    """Of an acknowledgement of a message."""
    config: _NamedConfig | None = None
    stream_name: str = ""
    name: str = ""


_decode = msgspec.json.Decoder(_ApiAnswer).decode


def belongs_to(request: str, answer: bytes) -> bool:
    """Return whether a body is what JetStream's API answers to a request, given as its subject after `$JS.API.`."""
    try:
        found = _decode(answer)
    except msgspec.MsgspecError:
        return False
    words = request.split(".")
    length = 3 if words[1:2] and words[1] in LONGER else 2
    verb, names = ".".join(words[:length]), words[length:]
    if found.type != f"{API}{KINDS.get(verb, verb.lower().replace('.', '_'))}_response":
        return False
    stream, consumer = (
        (found.stream_name, found.name) if found.stream_name else (found.config and found.config.name, "")
    )
    return all(told == asked for told, asked in zip((stream, consumer), names, strict=False) if told)


def described(body: bytes) -> str:
    """Return what a body says of itself, such as `an acknowledgement of stream MARS`."""
    try:
        found = _decode(body)
    except msgspec.MsgspecError:
        return f"a message of {len(body)} bytes"
    return f"an acknowledgement of stream {found.stream}" if found.stream else f"an answer of type {found.type or '-'}"


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
    if message.headers and message.headers.keys() <= OF_STATUS:
        return not message.data
    return message.data.startswith(BEGINNINGS) and _lacks_headers(message) and _is_answer(message.data)


def _lacks_headers(message: Message) -> bool:
    """Return whether whoever published the message gave it no headers."""
    return not message.headers or message.headers.keys() <= OF_SERVER


def _is_answer(data: bytes) -> bool:
    try:
        answer = read_json(data, dict[str, Any])
    except UndecodableError:
        return False
    if (kind := answer.get("type")) is not None:
        return str(kind).startswith(API) or (kind in PROGRESS and "seq" in answer and answer.keys() <= PROGRESS_FIELDS)
    return answer.keys() <= ACK_FIELDS and ({"stream", "seq"} <= answer.keys() or isinstance(answer.get("error"), dict))
