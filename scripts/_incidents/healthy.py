"""Looks again and again at a busy cluster in which nothing is wrong: whatever is reported then is a mistake."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from _incidents import cluster
from _incidents.operator import Look
from _incidents.scene import Scene

NAME = "healthy"
PER_SECOND = 100
HELD_FOR_A_DAY = {"AvisoDoctorWarns"}
"""A warning of the doctor, such as JS058 of an agent that is behind, has to last for a day before its alert fires."""


def conduct(looks: int, console: Console) -> int:
    """Take that many looks, print what is wrong in each, and return in how many something is."""
    with (
        tempfile.TemporaryDirectory(prefix="aviso-workers-healthy-") as directory,
        cluster.running(Path(directory)) as servers,
        Scene(
            NAME,
            Path(directory) / NAME,
            servers,
            attempts=6,
            window="6s",
            alerts=True,
            target="_incidents.fleet:app",
        ) as scene,
    ):
        workers = [scene.start(), scene.start("second")]
        over = scene.publish_steadily(per_second=PER_SECOND)
        scene.operator.look(NAME, scene.worker, scene.exporter)  # Prometheus knows what the doctor says from now on
        scene.wait("an alert fires from the beginning", lambda: not scene.firing())
        wrong = 0
        for number in range(1, looks + 1):
            look = scene.operator.look(NAME, scene.worker, scene.exporter)
            found = _wrong(look, scene.firing() - HELD_FOR_A_DAY) + scene.differing()
            found += [f"{each.child.name}: not ready: {each.ask('/readyz')}" for each in workers if not each.is_ready()]
            warns = f"; WARN {', '.join(sorted(look.warns))}" if look.warns else ""
            console.print(f"look {number}: {'; '.join(found) or 'nothing wrong'}{warns}")
            if found:
                wrong += 1
                console.print(scene.operator.doctors_words())
        over.set()
        console.print(f"{len(scene.published)} published; something wrong in {wrong} of {looks} looks")
        return wrong


def _wrong(look: Look, firing: set[str]) -> list[str]:
    return [
        *([f"agents ls: {look.state}"] if look.needs else []),
        *(f"doctor: FAIL {code}" for code in sorted(look.fails)),
        *(f"alert: {alert}" for alert in sorted(firing)),
    ]
