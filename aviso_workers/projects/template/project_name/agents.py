"""The app: an event type, one agent, and the type of the payload that it takes."""

from __future__ import annotations

import msgspec
import structlog
from aviso_workers import App, Notification, Reject

app = App("project_name", config="aviso.yaml")
app.event_type(
    "mars",
    key=["class", "date", "step"],
    identifier={
        "date": {"type": "DateHandler", "canonical_format": "%Y%m%d", "required": True},
        "step": {"type": "IntHandler", "range": [0, 360], "required": True},
    },
    payload={"required": True},
)
log = structlog.get_logger()


class Field(msgspec.Struct, frozen=True):
    """The payload: where the data of a field lies, and how many bytes it has."""

    location: str
    size: int


@app.agent("mars", where={"class": "od"}, concurrency=4)
async def index_field(notification: Notification[Field]) -> None:
    """Index one field.

    What raises is tried again, and a worker that dies has its notifications handled by another one: write this function
    so that it can run twice for one notification without harm.
    """
    field = notification.payload
    if field.size == 0:
        raise Reject("an empty field")
    log.info("field.indexed", step=notification.identifier["step"], location=field.location)
