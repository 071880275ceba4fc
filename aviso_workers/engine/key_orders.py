"""How the subjects of a stream have the values of an identifier, compared with what the stream says.

A subject has values and no names: `mars.od.6` is `class=od step=6` or, with another `key_order`, `class=6 step=od`. And
a value has the spelling of its field's rule: who asks for `20260101`, by a DateHandler, passes over `2026-01-01`, which
was stored without one. So a stream says in its metadata with which order and which rules it is read. It gets that from
who creates it, or updates it next, and only who may update the stream can change it (`ops.stream_policy`). A worker
whose event type has others does not read the stream, and publishes nothing to it: its notifications would be handled as
other ones, and acked, or passed over.
"""

from __future__ import annotations

from functools import partial

from aviso_workers.aviso.schema import EventType
from aviso_workers.backends import Backend
from aviso_workers.config.streams import read_as
from aviso_workers.declare.verdicts import ReadOtherwiseError
from aviso_workers.jetstream import specs
from aviso_workers.jetstream.specs import KEY_ORDER, KEY_RULES

TELLS = {KEY_ORDER: ("key_order", "read as other ones"), KEY_RULES: ("rules", "passed over")}
"""By the metadata of a stream, what it says, and what would become of notifications with another one."""


async def require_same(backend: Backend, stream: str, event_type: str, declared: EventType) -> None:
    """Compare the order and the rules with which a stream is read with those of an event type. Of a stream that says
    none, as one that an aviso-server has created, nothing is compared.

    Raises `ReadOtherwiseError` for others, `BackendError`.
    """
    noted, wanted = (await backend.stream_info(stream)).config.metadata, read_as(event_type, declared)
    for key in specs.read_otherwise(noted, wanted):
        has, becomes = TELLS[key]
        raise ReadOtherwiseError(
            f"event type {event_type} has {has} {wanted[key].replace(',', ', ')}, and stream {stream} is read with "
            f"{noted[key].replace(',', ', ')}: its notifications would be {becomes}. Take the former {has} back, or "
            "give the event type another topic.base; with the same base, stop all programs that publish to it or "
            "read it, purge the stream and what is delayed for it, drop its dead letters, and run `aviso-workers "
            "streams apply`",
            require=partial(require_same, backend, stream, event_type, declared),
        )
