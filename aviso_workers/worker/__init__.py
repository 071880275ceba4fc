"""One worker process, and a fleet of them: wiring, status port, metrics and logs."""
