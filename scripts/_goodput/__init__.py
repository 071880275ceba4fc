"""What pacing costs and saves: the rate at which what can succeed is handled, in virtual time.

`simulation` runs the engine's rules (`dispatch`, `pace`, `flow`, `outages`) in a worker and with a server that are
models; `cases` says which calls fail, and what is promised of them; `__main__` prints the table.
"""
