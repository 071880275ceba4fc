"""Which answer of JetStream's API belongs to which request.

A server sends an answer to the reply subject of a message, and no permission looks at that. So what comes there may
answer somebody else's message: it counts if it is of the kind of the request and names what the request is about.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

__all__ = ["API", "belongs_to", "described"]

API = "io.nats.jetstream.api.v1."
"""How the `type` of each answer begins."""
KINDS = {
    "INFO": "account_info",
    "STREAM.PEER.REMOVE": "stream_remove_peer",
    "CONSUMER.DURABLE.CREATE": "consumer_create",
}
"""By a request, what its answer is called. All others are called as their request."""
LONGER = ("MSG", "LEADER", "PEER", "DURABLE")
"""Second words of requests that have three."""


class _Named(Struct):
    name: str = ""


class _Answer(Struct):
    type: str = ""
    stream: str = ""
    """Of an acknowledgement of a message."""
    config: _Named | None = None
    stream_name: str = ""
    name: str = ""


_decode = msgspec.json.Decoder(_Answer).decode


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
