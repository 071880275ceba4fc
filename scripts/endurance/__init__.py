"""What shows that a worker can be left running: `scripts/chaos`, `outage` and `backlog`; and `replays` of much.

`agents` is the app that the worker processes run, `deployment` starts them and asks them how they are. `chaos` kills,
pauses and restarts what runs and then counts; `outage` takes the server away for long and measures. `backlog` and
`replays` run on the servers or clusters of `clusters`.
"""
