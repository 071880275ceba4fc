"""Logs, metrics and the status port of an app that runs."""
