"""A worker's resources, opened once, in the order in which they need each other, and closed in the opposite one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aviso_workers.declare import resources
from aviso_workers.declare.resources import Resource
from aviso_workers.declare.verdicts import Failure
from aviso_workers.engine import calls
from aviso_workers.errors import AvisoWorkersError, ResourceError, describe


@asynccontextmanager
async def opened(
    declared: Sequence[Resource], app: Any, *, instead: Mapping[Any, Any] | None = None
) -> AsyncIterator[Mapping[Any, Any]]:
    """Return what they give, by type; the app is there too. `instead` has values of types that are not opened then.

    Raises `ResourceError` where one cannot be opened.
    """
    values: dict[Any, Any] = dict.fromkeys(type(app).__mro__, app) | dict(instead or {})
    async with AsyncExitStack() as stack:
        for resource in resources.opened_by_workers(declared):
            if resource.gives in values:
                continue
            given = {name: values[wanted] for name, wanted in resource.needs.items()}
            opening = asynccontextmanager(resource.function)(**given)
            opened = await calls.attempt(stack.enter_async_context, opening)
            if isinstance(opened, Failure):
                raise _cannot_be_opened(resource, opened.error) from opened.error
            values[resource.gives] = opened
        yield values


def _cannot_be_opened(resource: Resource, error: BaseException) -> AvisoWorkersError:
    if isinstance(error, AvisoWorkersError):
        return error
    return ResourceError(f"resource {resource.name!r} cannot be opened: {describe(error)}")
