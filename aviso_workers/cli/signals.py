"""Work that a signal ends: `notify --file` and `backup create --every`."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskStatus

from aviso_workers.errors import AvisoWorkersError


async def until_signal(work: Callable[[], Awaitable[None]]) -> int:
    """Do the work, and cancel it at SIGTERM or SIGINT; return the number of the signal that came, or 0.

    Raises the `AvisoWorkersError` that the work raises, as itself and in no group.
    """
    signalled = 0
    failure: AvisoWorkersError | None = None

    async def listen(*, task_status: TaskStatus[None]) -> None:
        nonlocal signalled
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            signalled = await anext(signals)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        await tasks.start(listen)  # before the work does or says anything
        try:
            await work()
        except AvisoWorkersError as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return signalled
