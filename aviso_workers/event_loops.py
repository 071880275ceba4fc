"""Calls between threads and event loops: a method that has to be awaited is refused where nothing can await it, and a
thread without an event loop calls it on another thread's.

`App`, its tables and its counters use it. A plain `def` calls what has to be awaited by `App.sync`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, cast

from anyio.from_thread import BlockingPortal

from aviso_workers.errors import DeclarationError, OutcomeUnknownError, UnavailableError

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any] | AsyncGenerator[Any, None]])


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, which a call that blocks would stop; None where none runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def awaited(method: M) -> M:
    """Return an async method, also one that yields, that raises `DeclarationError` at its call where no event loop runs
    in this thread.

    There, as in a plain `def`, nobody has awaited it, and with `asyncio.run` it would wait for an answer that comes to
    another event loop.
    """

    @functools.wraps(method)
    def checked(self: object, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any] | AsyncGenerator[Any, None]:
        if running_loop() is None:
            cure = "make it `async def`, and loop over this there"
            if inspect.iscoroutinefunction(method):
                cure = f"call it by `app.sync(....{method.__name__}, ...)`, or make it `async def`, and await this"
            raise DeclarationError(
                f"{method.__qualname__} has to be awaited in the event loop of the app, and none runs in this thread, "
                f"as in a plain `def`: {cure}"
            )
        return method(self, *args, **kwargs)

    return cast(M, checked)


def old_word(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that is not there; it says what replaces the forms for a plain `def`."""
    kind = type(owner).__name__
    if name.endswith("_sync") and hasattr(type(owner), name.removesuffix("_sync")):
        return AttributeError(f"{kind}.{name} is gone: say app.sync(....{name.removesuffix('_sync')}, ...)")
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def call(portal: BlockingPortal, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a function on the portal's event loop, with the context variables of this thread, and return its result.

    Raises what it raises, `UnavailableError` where the portal is closed, `OutcomeUnknownError` where its loop ends
    before the answer comes.
    """
    try:
        answer: Future[T] = portal.start_task_soon(function, *arguments)
    except RuntimeError as error:
        raise UnavailableError(f"the event loop of the app has ended: {error}") from error
    try:
        return answer.result()
    except CancelledError as error:
        raise OutcomeUnknownError("the event loop of the app ended before the answer came") from error
