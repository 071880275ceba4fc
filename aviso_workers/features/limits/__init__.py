"""Limits that all workers of an app keep together: rates, and places of calls that run at once."""
