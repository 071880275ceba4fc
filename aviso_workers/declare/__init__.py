"""Declarations of authors, and the answers of their handlers: agents, timers, tables, windows, retry policies."""
