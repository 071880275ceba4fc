"""The outputs that an agent's function returns or yields, published before that from which it comes is settled.

The call forms use it. A publish that fails is a failure of the handling, as if the function had raised it. A
notification that is not valid was certainly made by the handler, so that trying again cannot help. The same holds for
a returned value that is no notification (`declare.outputs`). Either all that is returned is published, or nothing.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from aviso_workers.aviso.notifications import Notify
from aviso_workers.declare import outputs, verdicts
from aviso_workers.declare.agents import Agent
from aviso_workers.declare.verdicts import FinalError
from aviso_workers.engine.idempotency import IdempotencyKeys
from aviso_workers.engine.publisher import Publisher
from aviso_workers.errors import InvalidNotificationError


class Outputs:
    """The outputs of one agent."""

    def __init__(self, agent: Agent[Any, Any], *, app: str, stream: str, publisher: Publisher) -> None:
        self._agent = agent
        self._app = app
        self._stream = stream
        self._publisher = publisher

    def keys(self) -> IdempotencyKeys:
        """Return the idempotency keys of what one task of the agent publishes."""
        return IdempotencyKeys(app=self._app, agent=self._agent.name, stream=self._stream)

    async def publish(self, output: object) -> None:
        """Publish one output. Raises `FinalError` for an invalid notification and for what is none, what a lazy output
        raises, else as `Publisher.notify` does."""
        several = () if isinstance(output, Notify) else tuple(outputs.notifications(output))
        try:
            if isinstance(output, Notify):
                await self._publisher.notify(output)
            elif several:
                await self._publisher.notify_many(several)
        except InvalidNotificationError as error:
            raise FinalError(error, reason="invalid_notification") from error

    async def run(self, argument: Any, **given: Any) -> None:
        """Run the agent's async generator: what it yields is stored when it goes on. Raises as `publish` does, and an
        exception that it yields."""
        async with aclosing(self._agent.function(argument, **given)) as yielded:
            async for output in yielded:
                if failure := verdicts.failure_returned(output):
                    raise failure.error
                await self.publish(output)
