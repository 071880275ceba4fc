"""What happens to notifications. The engine knows the contract of the backends and never a backend by name."""
