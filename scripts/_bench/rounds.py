"""Contestants that do the same, each a process that tells its marks, run in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct

from _bench.ground import Ground, Mark

Figures = dict[str, list[float]]
"""What was measured, one value per repetition, by `<benchmark>.<contestant>.<measure>`."""
Say = Callable[[str], None]

RUN_SECONDS = 300.0
MARKS = 200
"""How often each process of a fleet tells how far it is."""


class Size(Struct, frozen=True, kw_only=True):
    """How much is measured."""

    repetitions: int
    scale: float
    """1 is as the targets say."""

    def count(self, whole: int) -> int:
        return max(1000, round(whole * self.scale))


class Contestant(Struct, frozen=True, kw_only=True):
    """A way of doing it."""

    name: str
    count: int
    """How many notifications it is measured with: slow ones with fewer."""
    command: Sequence[str | Path] = ()
    app: str = ""
    """Instead of a command: an app as `Ground.worker` takes it, run by `aviso-workers worker`."""

    processes: int = 1
    """Of the worker; each has a core."""
    acks: bool = False
    """Whether the server must have the acks of all that was counted."""

    def run(self, ground: Ground) -> Mark:
        with ExitStack() as stack:
            if self.processes > 1:
                return self._run_fleet(stack, ground)
            if self.app:
                child, _ = stack.enter_context(ground.worker(self.name, self.app, counts=[self.count]))
            else:
                child = stack.enter_context(ground.process(self.name, self.command, counts=[self.count]))
            (mark,) = ground.marks(child, 1, within_seconds=RUN_SECONDS)
            if self.acks:
                ground.check_acked(child, self.count)
            return mark

    def _run_fleet(self, stack: ExitStack, ground: Ground) -> Mark:
        """Nobody knows beforehand who gets how many, so all tell often."""
        step = max(1, self.count // MARKS)
        counts = range(step, self.count, step)
        child, _ = stack.enter_context(ground.worker(self.name, self.app, counts=counts, processes=self.processes))
        mark = ground.joint_mark(child, self.count - self.processes * step, within_seconds=RUN_SECONDS)
        ground.check_acked(child, self.count)
        return mark


def compete(ground: Ground, benchmark: str, contestants: Sequence[Contestant], size: Size, say: Say) -> Figures:
    """Return all of them, again and again, each time beginning with another, so that what disturbs the machine hits
    all.
    """
    figures: Figures = {}
    for repetition in range(size.repetitions):
        first = repetition % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            say(f"{benchmark}: {contestant.name}, {repetition + 1} of {size.repetitions}")
            for measure, value in _measures(contestant.run(ground)).items():
                figures.setdefault(f"{benchmark}.{contestant.name}.{measure}", []).append(value)
    return figures


def _measures(mark: Mark) -> Mapping[str, float]:
    found = {"per_second": mark.mark / mark.seconds, "cpu_us": mark.cpu_seconds / mark.mark * 1e6}
    return found if mark.peak_mib is None else found | {"peak_mib": mark.peak_mib}
