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
from typing import TYPE_CHECKING, Any, TypeVar, cast

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


class Awaited:
    """What has methods that are awaited; who asks for one with `_sync` behind its name is told of `App.sync`."""

    if not TYPE_CHECKING:  # else every mistyped name would be right for a checker

        def __getattr__(self, name):
            method = name.removesuffix("_sync")
            if method != name and hasattr(type(self), method):
                raise AttributeError(f"{type(self).__name__}.{name} is gone: say app.sync(....{method}, ...)")
            return object.__getattribute__(self, name)  # raises as Python does, also the error of a property


def call(portal: BlockingPortal, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    """Run a function on the portal's event loop, with the context variables of this thread, and return its result.

    Raises what it raises, also a `SystemExit`, which does not end the portal; `UnavailableError` where the portal is
    closed, `OutcomeUnknownError` where its loop ends before the answer comes.
    """

    async def ended() -> tuple[T | None, BaseException | None]:
        try:
            return await function(*arguments), None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, cancelled_from_within(error)
        except BaseException as error:
            return None, error

    try:
        answer: Future[tuple[T | None, BaseException | None]] = portal.start_task_soon(ended)
    except RuntimeError as error:
        raise UnavailableError(f"the event loop of the app has ended: {error}") from error
    try:
        returned, failure = answer.result()
    except CancelledError as error:
        raise OutcomeUnknownError("the event loop of the app ended before the answer came") from error
    if failure is not None:
        raise failure
    return cast(T, returned)


def cancelled_from_within(error: BaseException) -> Exception:
    """Return the failure of code that was cancelled by what it awaits, and not from outside."""
    failure = RuntimeError("cancelled from within: something that it awaited was cancelled")
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)
