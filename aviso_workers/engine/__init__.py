"""The path of notifications in a worker. The engine knows the contract of the backends and never a backend by name."""
