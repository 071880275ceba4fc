"""`delete`: deletes one notification."""

from __future__ import annotations

from aviso_workers.cli.options import YES, argument, confirm
from aviso_workers.cli.output import print_table, recorded
from aviso_workers.cli.targets import OpenedServer, on_server
from aviso_workers.ops import aviso_admin
from aviso_workers.state.audit_records import Affected


@on_server
async def delete(
    server: OpenedServer,
    notification: str = argument("EVENT@SEQUENCE", "Event type and sequence of the notification, e.g. mars@4711."),
    yes: bool = YES,
) -> None:
    """Delete one notification, after showing which one it is. `erase` also finds its copies.

    Example: aviso-workers delete mars@4711
    """
    found = await aviso_admin.find(server.admin, server.config, notification)
    print_table(
        ("stream", "sequence", "subject", "stored"), [(found.stream, str(found.sequence), found.subject, found.time)]
    )
    confirm(yes, to="delete it")
    async with recorded(server, "delete-notification", notification) as result:
        await aviso_admin.delete(server.admin, server.config, notification)
        result.text, of_it = f"{notification} deleted", ((found.sequence, found.sequence),)
        result.affected = (Affected(how="deleted", stream=found.stream, ranges=of_it),)
