"""Agents that react to notifications."""
