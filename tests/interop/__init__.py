"""Ours beside the real programs. `scripts/interop` installs them and runs these tests."""
