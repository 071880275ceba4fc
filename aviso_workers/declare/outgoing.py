"""Functions that authors declare to see what their app is about to publish, and to change it.

Pure. `engine.publisher` asks them before anything of a notification is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aviso_workers.aviso.notifications import Notify
from aviso_workers.errors import InvalidNotificationError, describe

Changing = Callable[[Notify], Notify | None]
"""A function of `outgoing`; None leaves the notification as it is."""


def changed(functions: Iterable[Changing], wanted: Notify) -> Notify:
    """Return what the functions make of a notification, one after the other. What is no `Notify` is left as it is.

    Raises `InvalidNotificationError` where a function raises, or returns something else.
    """
    for function in functions if isinstance(wanted, Notify) else ():
        who = f"{wanted.event_type}: {getattr(function, '__name__', function)}, a function of outgoing,"
        try:
            returned: object = function(wanted)
        except Exception as error:
            raise InvalidNotificationError(f"{who} raised {describe(error)}") from error
        if isinstance(returned, Notify):
            wanted = returned
        elif returned is not None:
            raise InvalidNotificationError(f"{who} returned {returned!r:.100}: return a Notify, or None to leave it")
    return wanted
