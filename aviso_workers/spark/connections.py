"""The backend for code that does not run in an event loop, as Spark calls it: on the driver and in tasks.

The loop runs in a thread of its own, so that the server is answered while Spark is busy with what was read.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import lru_cache, partial
from os.path import exists
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark import SparkFiles

from aviso_workers import config
from aviso_workers.backends import Backend, open_backend
from aviso_workers.config import Config
from aviso_workers.config.environment import WORKERS_FILE
from aviso_workers.declare.retry import Backoff, Tries
from aviso_workers.errors import UnavailableError
from aviso_workers.jetstream import identities

COLLECT_AFTER = 100_000
AGAIN = Backoff(first=0.5, factor=1.0, jitter=0.0)
"""When a server that was away is asked again."""
T = TypeVar("T")


class BlockingConnection:
    """An open backend, with a method to call it from code that has no event loop."""

    def __init__(self, portal: BlockingPortal, backend: Backend) -> None:
        self.backend = backend
        self._portal = portal

    def call(self, what: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        return self._portal.call(partial(what, *arguments, **named))


@contextmanager
def connected(settings: Config, *, patience_seconds: float = 0) -> Iterator[BlockingConnection]:
    """Open a backend for the block, and retry for `patience_seconds` while no server answers. Raises as `open_backend`
    does.
    """
    with (
        _seldom_collecting(),
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_opened(settings, patience_seconds)) as backend,
    ):
        yield BlockingConnection(portal, backend)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Let Python collect garbage less often in the block, where thousands of messages are held at a time."""
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@asynccontextmanager
async def _opened(settings: Config, patience_seconds: float) -> AsyncIterator[Backend]:
    left = tries(patience_seconds, now=anyio.current_time())
    async with AsyncExitStack() as stack:  # here and not by the caller, because a backend belongs to its loop
        backend: Backend | None = None
        while backend is None:
            try:
                backend = await stack.enter_async_context(open_backend(settings, owner=identities.SPARK))
            except UnavailableError:
                if (wait := left.next_wait(anyio.current_time())) is None:
                    raise
                await anyio.sleep(wait)
        yield backend


def tries(patience_seconds: float, *, now: float) -> Tries:
    """Return the retries of a call to a server that may be away for some seconds. The last begins when that time is
    over.
    """
    return Tries(AGAIN, until=now + patience_seconds + AGAIN.first)


def load_config(path: str | None) -> Config:
    """Load the configuration as this process sees it: a file here, or one that was given to spark-submit with
    `--files`.

    It is read once, until its file changes: Spark uses a process for many tasks, some of a tenth of a second. Unless it
    says how often, a lost connection is tried again without end: how long a row may take, and how long a reading waits,
    are what ends a task. Raises `ConfigError`.
    """
    named = path or os.environ.get(WORKERS_FILE)
    if named is not None and not exists(named) and exists(brought := _path_of(named)):
        named = brought
    return _load(named, os.stat(named).st_mtime_ns if named is not None and exists(named) else 0)


def _path_of(name: str) -> str:
    """Return where Spark has put a file that was given with `--files`; the name itself where no session is open yet."""
    try:
        return SparkFiles.get(name)
    except AssertionError:
        return name


@lru_cache(maxsize=1)
def _load(path: str | None, changed_ns: int) -> Config:
    return config.load(path)
