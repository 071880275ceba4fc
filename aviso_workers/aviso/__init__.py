"""Aviso's contract, pure: event types and identifiers, topics, notifications, their wire format, positions."""
