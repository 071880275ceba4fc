"""What a notification may cost: the counts that are committed, by the build of Python that they hold for."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("costs.json")
LIMIT = 0.03
"""By how much a cost may be above the committed one."""
LIMITS = {"failing": 0.1, "batch": 0.06, "batch_pure": 0.06, "ordered": 0.06}
"""Others, by name: it varies how many answers to what became dead letters come at a time, and how large batches are."""
MAX_FUNCTIONS = 40
"""Of each table, so many are committed: the largest ones."""
FEATURES = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "rdrand", "sse4_2"}
"""Of processors: those by which libraries choose their functions under valgrind."""


class Cost(Struct, frozen=True):
    """What one notification costs, or one process as a whole."""

    instructions: float
    functions: dict[str, float]
    """Of these instructions, those of each function of the interpreter."""
    calls: dict[str, float]
    """How often each Python function is called."""


Costs = dict[str, Cost]


def build() -> str:
    """Return a name of what counts depend on beside the code of the package: Python, its libraries, valgrind and the
    kind of processor.
    """
    library = Path(sysconfig.get_config_var("LIBDIR") or "") / (sysconfig.get_config_var("LDLIBRARY") or "")
    digest = hashlib.sha256()
    for part in (Path(sys.executable).resolve(), library):
        digest.update(part.read_bytes() if part.is_file() else b"")
    for text in (sys.version, *platform.libc_ver(), _valgrind(), *sorted(_features()), *sorted(_packages())):
        digest.update(text.encode() + b"\0")
    return (
        f"{platform.python_implementation()} {platform.python_version()} {platform.machine()} {digest.hexdigest()[:12]}"
    )


def _valgrind() -> str:
    return subprocess.run(("valgrind", "--version"), check=True, capture_output=True, text=True).stdout.strip()


def _features() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return FEATURES & set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


def _packages() -> set[str]:
    """Return the packages that a worker needs, each with its version: a tool of developers changes no cost."""
    found: set[str] = set()
    waiting = [Requirement("aviso-workers")]
    while waiting:
        wanted = waiting.pop()
        for text in metadata.requires(wanted.name) or ():
            needed = Requirement(text)
            extras = ({"extra": extra} for extra in ("", *wanted.extras))
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                name = f"{needed.name}=={metadata.version(needed.name)}"
                waiting += [] if name in found else [needed]
                found.add(name)
    return found


def load() -> dict[str, Costs]:
    """Return the committed costs, by build."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Costs]) if FILE.exists() else {}


def store(costs: Mapping[str, Cost]) -> None:
    """Write these costs of this build into the file that is committed, and keep those of other builds."""
    builds = load()
    kept = builds.get(build(), {}) | {name: _largest(cost) for name, cost in costs.items()}
    builds[build()] = dict(sorted(kept.items()))
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(builds.items()))), indent=1) + b"\n")


def _largest(cost: Cost) -> Cost:
    def cut(table: Mapping[str, float], digits: int | None) -> dict[str, float]:
        largest = sorted(table, key=lambda name: (-table[name], name))[:MAX_FUNCTIONS]
        return {name: round(table[name], digits) for name in largest}

    return Cost(round(cost.instructions), cut(cost.functions, None), cut(cost.calls, 3))


def dearer(instructions: float, committed: Cost) -> float:
    """Return by which share a count is above the committed one; below 0 where it is less."""
    return instructions / committed.instructions - 1


def grown(found: Mapping[str, float], committed: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield what has grown of a table, the most grown first: name, committed, found.

    What is not committed is smaller than all that is, or new; it counts from the smallest one.
    """
    least = min(committed.values(), default=0)
    growth = {name: number - committed.get(name, least) for name, number in found.items()}
    for name in sorted(growth, key=lambda name: -growth[name]):
        if growth[name] > 0:
            yield name, committed.get(name, 0), found[name]
