"""The generators that are opened around one call of an agent or one tick of a timer: those of `@app.around`, and the
resources of scope `call`.

Each is an async generator that yields once. An exception that ends the call is raised at the `yield` of each, from the
innermost to the outermost. A function of `@app.around` may catch it and end; then the call has succeeded for all that
is outside of it. A resource may not decide that: the exception goes on also where a resource catches it, because the
notification would be acked, and so lost, when a resource rolls back and forgets to raise the exception again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any

from aviso_workers.declare.around import Around
from aviso_workers.declare.resources import Needing, Resource


@asynccontextmanager
async def opened(needing: Needing, called_with: Mapping[type, Any]) -> AsyncIterator[dict[str, Any]]:
    """Open what is around a call of an agent or timer, and yield the values of its function's further arguments.

    `called_with` has the function's first argument by its form, such as `Notification`; it is empty for a timer.
    """
    values: dict[Any, Any] = dict(called_with)
    async with AsyncExitStack() as stack:
        for each in needing.around:
            given = {name: values[wanted] for name, wanted in each.needs.items()}
            values[each.gives] = await stack.enter_async_context(Opened(each, given))
        yield {name: values[wanted] for name, wanted in needing.needs.items()}


class Opened:
    """A context manager that runs one of these generators up to its `yield`, and after the block to its end.

    Raises RuntimeError where it does not yield exactly once.
    """

    def __init__(self, resource: Resource, given: Mapping[str, Any]) -> None:
        self._resource = resource
        self._generator: Any = resource.function(**given)

    async def __aenter__(self) -> Any:
        try:
            return await anext(self._generator)
        except StopAsyncIteration:
            raise self._not_once("it did not yield") from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            await (anext(self._generator) if error is None else self._generator.athrow(error))
        except StopAsyncIteration:
            return error is not None and isinstance(self._resource, Around)
        except BaseException as raised:
            # A StopAsyncIteration that leaves a generator is turned into a RuntimeError with it as the cause.
            if raised is error or (isinstance(error, StopAsyncIteration) and raised.__cause__ is error):
                error.__traceback__ = traceback
                return False
            raise
        await self._generator.aclose()
        raise self._not_once("it yielded twice")

    def _not_once(self, found: str) -> RuntimeError:
        return RuntimeError(f"{self._resource.label} has to yield once: {found}")
