"""The module behind `python -m aviso_workers.cli`, with which a fleet starts its processes."""

from aviso_workers.cli import main

main()
