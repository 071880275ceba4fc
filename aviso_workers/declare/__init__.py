"""What authors declare, and what their handlers can say: agents, timers, tables, windows, retry policies."""
