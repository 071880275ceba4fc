"""Windows: notifications counted by key and time, and the author's function run for each window that is over."""
