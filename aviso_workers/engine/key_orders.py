"""In which order the subjects of a stream have the values of an identifier, compared with what the stream says.

A subject has values and no names: `mars.od.6` is `class=od step=6` or, with another `key_order`, `class=6 step=od`. So
a stream says in its metadata with which order it is read. It gets that from who creates it, or updates it next, and
only who may update the stream can change it (`ops.stream_policy`). A worker whose event type has another order does not
read the stream, and publishes nothing to it: each of its notifications would be handled as another one, and acked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aviso_workers.backends import Backend
from aviso_workers.errors import RefusedError
from aviso_workers.jetstream.specs import KEY_ORDER


class ReadOtherwiseError(RefusedError):
    """A stream is read otherwise than the configuration of this worker says, so nothing is published to it here. It is
    no failure of what is handled: the agent that publishes stands until `require` returns.
    """

    def __init__(self, message: str, *, require: Callable[[], Awaitable[None]]) -> None:
        self.require = require
        """Compares again. Raises as `require_same` does."""
        super().__init__(message)


async def require_same(backend: Backend, stream: str, event_type: str, key_order: tuple[str, ...]) -> None:
    """Compare the order with which a stream is read with that of an event type. Of a stream that says none, as one that
    an aviso-server has created, nothing is compared.

    Raises `ReadOtherwiseError` for another order, `BackendError`.
    """
    noted = (await backend.stream_info(stream)).config.metadata.get(KEY_ORDER, "")
    if noted and noted != ",".join(key_order):
        raise ReadOtherwiseError(
            f"event type {event_type} has key_order {', '.join(key_order)}, and stream {stream} is read with "
            f"{noted.replace(',', ', ')}: its notifications would be read as other ones. Take the former key_order "
            "back, or give the event type another topic.base; with the same base, stop all programs that publish to it "
            "or read it, purge the stream and what is delayed for it, drop its dead letters, and run `aviso-workers "
            "streams apply`",
            require=partial(require_same, backend, stream, event_type, key_order),
        )
