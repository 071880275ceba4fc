"""What an older version has stored, and whether this one takes it up.

`app` is an app with every kind of stored state. `recording`, run with an older version, lets it work and writes down
all that it left on its server: `python -m tests.state.recording FILE`. The test puts that on a server again, message by
message, and lets the app of this version go on.
"""
