"""What a notification costs: what `scripts/bench` measures, and how it is told. See docs/performance.md.

`ground` starts a server and the measured processes, `rounds` lets contestants take turns, `tally` counts within them.
`consuming`, `publishing`, `replaying`, `latency`, `memory`, `startup`, `spark` and `backing_up` are the benchmarks;
`targets` is what is aimed at. The processes are `agents` (a worker's), `bare_loop`, `bulk_publisher`, `history_reader`,
and the `rivals`; what `spark` is compared to is `raw_source`.
"""
