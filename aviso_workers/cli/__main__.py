"""`python -m aviso_workers.cli`: the command by its module, as a fleet starts its processes."""

from aviso_workers.cli import main

main()
