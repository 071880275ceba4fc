"""What operators do: look at streams, bring them in line, empty them. Called by commands and scripts."""
