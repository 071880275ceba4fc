"""What commands do, recorded in the audit as the actions of the console are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aviso_workers.cli.output import echo
from aviso_workers.cli.targets import OpenedServer
from aviso_workers.ops import audit
from aviso_workers.ops.audit import ActionResult, Audit


@asynccontextmanager
async def recorded(server: OpenedServer, action: str, of: str, **selection: object) -> AsyncIterator[ActionResult]:
    """Record, for the block, what a command does to what, and print what has come of it. Arguments without a value are
    left out. Where nothing can be recorded, standard error says so, and the command goes on.
    """
    given = {name: str(value) for name, value in selection.items() if value not in (None, "", 0)}
    records = Audit(server.admin, server.config, warn=lambda text: echo(text, err=True))
    async with records.recorded(audit.this_user(), action, of, given) as result:
        try:
            yield result
        finally:
            if result.text:
                echo(result.text, err=result.state == "failed")
