"""What tells of an app that runs: logs, metrics and the status port."""
