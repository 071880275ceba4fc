"""One worker process, and a fleet of them."""
