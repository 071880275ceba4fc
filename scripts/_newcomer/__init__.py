"""What somebody does who has never seen the project, from its wheel. `scripts/newcomer` runs it."""
