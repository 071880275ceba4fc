"""How agents are, from two looks, as commands take them."""

from __future__ import annotations

from aviso_workers.backends import Admin
from aviso_workers.config import Config
from aviso_workers.ops import agent_report, snapshots
from aviso_workers.ops.agent_report import AgentHealth, Key


async def looked(admin: Admin, config: Config, *, code: tuple[Key, ...] = ()) -> list[AgentHealth]:
    """Return how all agents are; `code` are agents whose code is at hand."""
    before = await snapshots.take(admin)
    return await agent_report.of_server(admin, config, await snapshots.take(admin), before, code=code)
