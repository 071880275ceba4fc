"""Makes situations one after the other, compares what is seen with what is expected, and carries out the cures."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct, structs
from rich.console import Console

from _demo.children import ShortfallError
from _incidents import cluster
from _incidents.cluster import Cluster
from _incidents.operator import HEALTHY, Look
from _incidents.scene import WAIT_SECONDS, Scene
from aviso_workers.errors import AvisoWorkersError

ALERT_LOOK_SECONDS = 0.2

Made = Callable[[Scene], Iterator[None]]
"""Makes the situation, yields while the operator looks, and carries out the cure."""


class Expected(Struct, frozen=True, kw_only=True):
    """What an operator shall see."""

    state: str = "idle|working"
    """A regular expression for the whole state of `agents ls`."""
    fails: frozenset[str] = frozenset()
    warns: frozenset[str] = frozenset()
    readyz: str = "200 ok"
    """A regular expression for the status and the first line."""
    livez: str = "200 ok"
    alerts: frozenset[str] = frozenset()
    passing: frozenset[str] = frozenset()
    """Codes and alerts that may be there or not, because they come and go while the situation lasts."""
    mends_itself: bool = False
    """Whether a worker mends it so soon that the codes of the doctor are gone before an alert fires."""


class Situation(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    made: Made
    expected: Expected
    cure: str
    """As the page says it."""
    attempts: int | None
    patience: float
    window: str
    retires: bool
    """Whether the cure removes the app, so that nothing is left to look at."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What was seen of a situation."""

    situation: Situation
    look: Look
    in_passing: frozenset[str]
    """Alerts that fired before or after and are not expected."""
    published: int
    handled: int
    again: int
    """How many notifications were handled more than once."""
    doctors_words: str
    seen_seconds: float
    cured_seconds: float


class _Alerts:
    """All alerts that fire while the block lasts, also those that are soon over."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.seen: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(ALERT_LOOK_SECONDS):
                self.seen |= self._scene.firing()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def conduct(chosen: Sequence[Situation], console: Console) -> Iterator[Outcome]:
    """Make the situations one after the other, and yield what was seen of each that was as expected; how another one
    differs is printed. It has left the servers in whatever state, so the next one begins on new ones.
    """
    remaining = list(chosen)
    while remaining:
        with (
            tempfile.TemporaryDirectory(prefix="aviso-workers-incidents-") as directory,
            cluster.running(Path(directory)) as servers,
        ):
            while remaining:
                situation = remaining.pop(0)
                try:
                    outcome = make(situation, Path(directory), servers)
                except (ShortfallError, AvisoWorkersError) as error:
                    console.print(f"{situation.name}: fell short: {error}")
                    break
                console.print(_summary(outcome))
                yield outcome


def _summary(outcome: Outcome) -> str:
    passing = f"; in passing: {', '.join(sorted(outcome.in_passing))}" if outcome.in_passing else ""
    return (
        f"{outcome.situation.name}: as expected after {outcome.seen_seconds:.0f} s, quiet "
        f"{outcome.cured_seconds:.0f} s after the cure; {outcome.published} published, {outcome.handled} handled, "
        f"{outcome.again} more than once{passing}"
    )


def make(situation: Situation, directory: Path, servers: Cluster, *, alerts: bool = True) -> Outcome:
    """Make one situation and cure it; without `alerts`, no Prometheus is asked, which takes half the time. Raises
    `ShortfallError` where what is seen is not as expected.
    """
    if not alerts:
        expected = structs.replace(situation.expected, alerts=frozenset())
        situation = structs.replace(situation, expected=expected)
    scene = Scene(
        situation.name,
        directory / situation.name,
        servers,
        attempts=situation.attempts,
        patience=situation.patience,
        window=situation.window,
        alerts=alerts,
    )
    with scene:
        deeds = situation.made(scene)
        told = _Alerts(scene)
        scene.start()
        if alerts:
            _until_quiet(scene, what="before it begins")
        with told.watched():
            began = time.monotonic()
            next(deeds)
            look = _until_as_expected(scene, situation.expected, told)
            seen = time.monotonic()
            words = scene.operator.doctors_words()
            next(deeds, None)
            if not situation.retires:
                scene.wait_until_handled()
            _until_quiet(scene, what="after the cure", retired=situation.retires)
            cured = time.monotonic()
        handled = scene.handled()
        if not situation.retires:
            _clear_up(scene)
    expected = situation.expected
    return Outcome(
        situation=situation,
        look=structs.replace(look, alerts=expected.alerts),
        in_passing=frozenset(told.seen - expected.alerts),
        published=len(scene.published),
        handled=len(handled.keys() & scene.published),
        again=sum(times > 1 for times in handled.values()),
        doctors_words=words,
        seen_seconds=seen - began,
        cured_seconds=cured - seen,
    )


def _until_as_expected(scene: Scene, expected: Expected, alerts: _Alerts) -> Look:
    deadline, known = time.monotonic() + WAIT_SECONDS, dict[str, str]()
    while True:
        look = scene.operator.look(scene.name, scene.worker, scene.exporter)
        if expected.mends_itself:
            known |= look.doctor
            look = structs.replace(look, doctor=known)
        firing = scene.firing()
        differences = list(_differences(look, expected, firing, alerts.seen))
        if not differences:
            differences = scene.differing()
        if not differences:
            return look
        if time.monotonic() > deadline:
            said = [scene.operator.doctors_words(), scene.last_words()]
            raise ShortfallError("\n".join(["not as expected", *differences, *said]))


def _differences(look: Look, expected: Expected, firing: set[str], seen: set[str]) -> Iterator[str]:
    """Yield how what is seen differs from what is expected."""
    texts = {
        "agents ls": (look.state, expected.state),
        "/readyz": (look.readyz, expected.readyz),
        "/livez": (look.livez, expected.livez),
    }
    for what, (found, wanted) in texts.items():
        if not re.fullmatch(wanted, found):
            yield f"  {what} says {found!r}, expected {wanted!r}"
    sets = {"FAIL": (look.fails, expected.fails), "WARN": (look.warns, expected.warns)}
    for what, (codes, known) in sets.items():
        if codes - expected.passing != known:
            yield f"  {what} {_listed(codes)}, expected {_listed(known)}"
    if missing := expected.alerts - seen:
        yield f"  alerts that did not fire: {_listed(missing)}"
    if surplus := firing - expected.alerts - expected.passing:
        yield f"  alerts that fire and are not expected: {_listed(surplus)}"


def _until_quiet(scene: Scene, *, what: str, retired: bool = False) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        look = scene.operator.look(scene.name, scene.worker, scene.exporter)
        firing = scene.firing()
        is_well = look.state in HEALTHY and look.readyz == look.livez == "200 ok"
        if (is_well or (retired and look.state == "no agents")) and not look.doctor and not firing:
            return
        if time.monotonic() > deadline:
            raise ShortfallError(
                f"not quiet {what}: {look}, alerts {_listed(firing)}\n"
                f"{scene.operator.doctors_words()}\n{scene.last_words()}"
            )


def _clear_up(scene: Scene) -> None:
    """Remove what the next situation would see of this one."""
    scene.stop_workers()
    scene.operator.must("agents", "rm", scene.name, "--workers-stopped", "--yes")
    with suppress(ShortfallError):
        scene.operator.must("streams", "rm", scene.stream, "--yes")


def _listed(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
