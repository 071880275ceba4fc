"""The main job, end to end and on real processes: what `scripts/demo` shows.

`generating` writes the notifications, `agents` is the app whose worker indexes them, `completeness` is the Spark job,
and `__main__` conducts.
"""
