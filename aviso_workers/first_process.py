"""The command as the first process of a container, where nothing below it hears signals for it.

The kernel drops a signal to such a process that has no handler for it, and all imports of the command take a good part
of a second. So this module is imported before any other of the package, and needs almost nothing.
"""

import os
import signal
import sys

COMMAND = "aviso-workers"
FIRST_PROCESS = 1


def end_on_sigterm() -> None:
    """Let SIGTERM end the first process of a container before it hears signals, as it ends any other process."""
    if os.getpid() == FIRST_PROCESS:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


if [os.path.basename(each) for each in sys.argv[:1]] == [COMMAND]:
    end_on_sigterm()
