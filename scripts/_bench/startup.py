"""Startup: what an import takes in a fresh process, and a worker until it is ready."""

from __future__ import annotations

import subprocess
import sys

from _bench.ground import Cores, Ground, grounded
from _bench.rivals import Rivals
from _bench.rounds import Figures, Say, Size

TIMES = 5
IMPORT = "import time; began = time.perf_counter(); from aviso_workers import App; print(time.perf_counter() - began)"


def start_up(cores: Cores, rivals: Rivals, size: Size, say: Say) -> Figures:
    say("startup")
    with grounded(cores) as ground:
        ground.fill(1)
        return {
            "startup.import.seconds": [_import_seconds(cores) for _ in range(TIMES)],
            "startup.worker.seconds": [_ready_seconds(ground) for _ in range(TIMES)],
        }


def _import_seconds(cores: Cores) -> float:
    with cores.for_measured():
        told = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return float(told.stdout)


def _ready_seconds(ground: Ground) -> float:
    with ground.worker("startup", "notifications", counts=[1]) as (_, seconds):
        return seconds
