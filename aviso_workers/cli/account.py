"""`account info`: what the account uses of JetStream."""

from __future__ import annotations

import typer

from aviso_workers.cli.output import print_table
from aviso_workers.cli.targets import ConfigOption, Opened, connected
from aviso_workers.ops import inventory

__all__ = ["account"]

account = typer.Typer(help="Show the account's limits, and what it uses.", no_args_is_help=True)


@account.command("info")
def account_info(config: ConfigOption = None) -> None:
    """Show what the account uses of JetStream, and of how much.

    Example: aviso-workers account info
    """

    async def run(server: Opened) -> None:
        print_table(
            ("what", "used", "limit"),
            [
                (use.what, str(use.used), "none" if use.limit < 0 else str(use.limit))
                for use in await inventory.account(server.admin)
            ],
        )

    connected(config, run)
