"""A worker's resources, opened once, in the order in which they need each other, and closed in the opposite one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aviso_workers import resources
from aviso_workers.errors import AvisoWorkersError, ResourceError
from aviso_workers.resources import Resource

__all__ = ["opened"]


@asynccontextmanager
async def opened(declared: Sequence[Resource], app: Any) -> AsyncIterator[Mapping[type, Any]]:
    """What they give, by type; the app is there too. Raises `ResourceError` where one cannot be opened."""
    values: dict[type, Any] = {type(app): app}
    async with AsyncExitStack() as stack:
        for resource in resources.in_order(declared):
            given = {name: values[wanted] for name, wanted in resource.needs.items()}
            try:
                opening = asynccontextmanager(resource.function)(**given)
                values[resource.gives] = await stack.enter_async_context(opening)
            except AvisoWorkersError:
                raise
            except Exception as error:
                raise ResourceError(
                    f"resource {resource.name!r} cannot be opened: {type(error).__name__}: {error}"
                ) from error
        yield values
