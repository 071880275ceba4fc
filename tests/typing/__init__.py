"""Code as authors write it, for type checkers: a signature is a promise, and these hold it.

`mypy` checks these modules with all other tests. What `assert_type` says is what an author's editor shows.
"""
