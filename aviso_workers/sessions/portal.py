"""An event loop for callers that have none: `App.sync` in threads, views and scripts.

One thread of the process runs it, from the first call until the interpreter ends; there is a session on it for each app
that calls, opened at its first call and again after its connection was lost for good. A process that is forked has none
of its parent's threads: it gets a thread and sessions of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from aviso_workers import event_loops
from aviso_workers.sessions.session import Session

Opening = Callable[[], AbstractAsyncContextManager[Session]]


class Portal:
    """The thread, its loop, and the sessions on it."""

    def __init__(self) -> None:
        running: Future[tuple[BlockingPortal, TaskGroup]] = Future()
        self._thread = threading.Thread(target=_run_loop, args=(running,), name="aviso-workers-portal", daemon=True)
        self._thread.start()
        self.blocking, self._sessions = running.result()
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Session]] = {}

    def session(self, of: Hashable, opening: Opening) -> Session:
        """Return the session of this caller, from any thread; the first one opens it. Raises as opening it does."""
        with self._lock:
            opened, first = self._open.get(of), False
            if opened is None:
                opened = self._open[of] = Future()
                first = True
        if first:  # without the lock, which the loop may wait for
            event_loops.call(self.blocking, self._start, of, opening, opened)
        return opened.result()

    async def _start(self, *arguments: Any) -> None:
        self._sessions.start_soon(self._keep_open, *arguments)

    def close(self) -> None:
        """Return when what is under way is finished, and all connections are closed."""
        with suppress(RuntimeError):  # it is closed
            self.blocking.call(self.blocking.stop)
        self._thread.join()

    async def _keep_open(self, of: Hashable, opening: Opening, opened: Future[Session]) -> None:
        """Keep a session open until the loop ends, or its connection is lost for good: the next call opens another."""
        try:
            async with opening() as session:
                opened.set_result(session)
                try:
                    await session.backend.connection.failed()
                finally:  # before it is closed, so that nobody publishes over it meanwhile
                    self._forget(of)
        except Exception as error:  # for the threads that wait for it, as itself
            if not opened.done():
                self._forget(of)
                opened.set_exception(error)

    def _forget(self, of: Hashable) -> None:
        with self._lock:
            del self._open[of]


def _run_loop(running: Future[tuple[BlockingPortal, TaskGroup]]) -> None:
    try:
        anyio.run(_work, running)
    except BaseException as error:
        if running.done():
            raise
        running.set_exception(error)  # no loop could be made


async def _work(running: Future[tuple[BlockingPortal, TaskGroup]]) -> None:
    async with anyio.create_task_group() as sessions:
        async with BlockingPortal() as portal:  # at its end, the calls that are under way are waited for
            running.set_result((portal, sessions))
            await portal.sleep_until_stopped()
        sessions.cancel_scope.cancel()


_lock = threading.Lock()
_portal: Portal | None = None
_inherited: list[Portal | None] = []
"""Of parent processes. To forget one would close its loop, which would stop the parent's."""


def of_process() -> Portal:
    """Return the portal of this process, opened at the first call."""
    global _portal
    with _lock:
        if _portal is None:
            if not _inherited:
                os.register_at_fork(after_in_child=_forget)
                atexit.register(_close)
            _portal = Portal()
        return _portal


def _forget() -> None:
    global _lock, _portal
    _inherited.append(_portal)
    _lock, _portal = threading.Lock(), None


def _close() -> None:
    if _portal is not None:
        _portal.close()
