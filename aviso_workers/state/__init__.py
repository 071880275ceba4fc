"""Everything that an app stores beside its notifications: the names of streams and buckets, keys, and records.

Each module is one kind of state: its names, its record types, and how a record is read and written. The engine and the
tools of operators use them; nothing here knows of either. docs/state.md lists all of it.
"""
