"""Sends each notification to a web server, as POST with an idempotency key, until the server has answered that."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from aviso_workers import App, Notification, Reject, RetryPolicy, Router

app = App("webhooks", config="aviso.yaml")

FOR_NOW = (408, 425, 429)
"""Answers that mean: try again later. So do all from 500 on."""


class Settings(msgspec.Struct, frozen=True):
    """Under `workers.agents.webhook`."""

    url: str
    timeout_seconds: float = 10


router = Router("webhook", settings=Settings)
server = router.dependency("server", unavailable=[httpx.TransportError])


@router.resource
def settings(app: App) -> Settings:
    found: Settings = app.settings(router)
    return found


@router.resource
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=settings.timeout_seconds) as client:
        yield client


@router.agent("field", concurrency=8, retry=RetryPolicy(max="5m", attempts=300), depends_on=server)
async def post(notification: Notification[dict[str, Any]], client: httpx.AsyncClient, settings: Settings) -> None:
    key = f"{notification.id}@{notification.time.isoformat()}"  # the same whenever this notification is sent
    body = {"identifier": dict(notification.identifier), "payload": notification.payload}
    answer = await client.post(settings.url, json=body, headers={"Idempotency-Key": key})
    if answer.is_success:
        return
    if not answer.is_server_error and answer.status_code not in FOR_NOW:
        raise Reject(f"the server answered {answer.status_code}: {answer.text[:200]}")
    answer.raise_for_status()


app.include(router)
