"""What a notification costs, in instructions of the processor: a count that hardly moves with the load of the machine.

`callgrind` counts a process, `contestants` says which processes are counted, and `budget` holds what they may cost.
"""
