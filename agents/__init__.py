"""Routers that come with aviso-workers, written with its public names only.

Each is an entry point of the group `aviso_workers.agents`, so that `aviso-workers worker --agent NAME` finds it.
"""
