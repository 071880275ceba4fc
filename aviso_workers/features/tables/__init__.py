"""Tables and counters at work."""
