"""What agents can have beside the plain path of a notification, each in a room of its own that knows no other.

A feature is declared in `declare/`, and what it stores is in `state/`; what it does is here. The engine knows none of
them: `sessions` puts them together.
"""
