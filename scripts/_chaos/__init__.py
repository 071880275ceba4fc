"""What shows that workers can be left running: `scripts/chaos`, `outage`, `backlog`, `replays` of much; and `kills`.

`agents` is the app that the worker processes run, `deployment` starts them and asks them how they are. `chaos` kills,
pauses and restarts what runs and then counts; `outage` takes the server away for long and measures; `kills` ends
operators' commands before they have ended themselves. It, `backlog` and `replays` run on the servers or clusters of
`clusters`. `spark_kills` kills drivers, executors and servers while `spark_driver` does Spark's work, in processes that
`spark_processes` starts and finds; with `bridge_kills` it also kills the agent that follows Spark's event logs.
"""
