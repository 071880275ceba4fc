"""Counts the instructions that a notification costs, and fails where they are 3 % above those that are committed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import islice
from pathlib import Path

from _cost import budget
from _cost.budget import FILE, LIMIT, LIMITS, PROJECT, Cost
from _cost.callgrind import Runner
from _cost.contestants import OURS, RIVALS, filled, process

Table = dict[str, float]
FUNCTIONS_SHOWN = 8
COUNTED_AGAIN = 2
SAME = {
    "agent": "callback",
    "agent_pure": "callback",
    "batch": "callback",
    "batch_pure": "callback",
    "notify": "publish",
    "notify_many": "publish_many",
    "replay": "ordered_callback",
}
"""Which of nats-py does the same as ours."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    wanted = asked.what or [*OURS, *(RIVALS if asked.rivals else ())]
    ours = [name for name in wanted if name in OURS]
    with tempfile.TemporaryDirectory(prefix="aviso-workers-cost-") as name, filled(Path(name)) as environment:
        runner = Runner(PROJECT, environment, Path(name))
        found = _all(_counted, runner, wanted)
        _compare_rivals(found)
        if asked.write:
            calls = _all(_calls, runner, ours)
            budget.store({each: _cost(found[each], calls[each]) for each in ours})
            return 0
        committed = budget.load().get(budget.build())
        if committed is None:
            revision, tree = _base(Path(name))
            print(f"no costs are committed for {budget.build()}: those of {revision} are counted")
            base = Runner(tree, environment, Path(name))
            counted, calls = _all(_counted, base, ours), _all(_calls, base, ours)
            committed = {each: _cost(counted[each], calls[each]) for each in ours}
        dear = [each for each in ours if not _within(runner, each, found[each], committed.get(each))]
        return int(bool(dear))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/cost", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"of {', '.join([*OURS, *RIVALS])} (default: all of ours)")
    parser.add_argument("--rivals", action="store_true", help="count nats-py as well")
    parser.add_argument("--write", action="store_true", help=f"write the costs of this build of Python to {FILE.name}")
    return parser


def _counted(runner: Runner, name: str) -> Table:
    functions = runner.instructions(process(name))
    print(f"{name:18} {sum(functions.values()):15,.0f} instructions", flush=True)
    return functions


def _calls(runner: Runner, name: str) -> Table:
    return runner.calls(process(name))


def _all(function: Callable[[Runner, str], Table], runner: Runner, names: Sequence[str]) -> dict[str, Table]:
    """Return what the function returns for each name. As counts do not depend on load, each core is used."""
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        return dict(zip(names, cores.map(lambda name: function(runner, name), names), strict=True))


def _cost(functions: Table, calls: Table) -> Cost:
    return Cost(sum(functions.values()), functions, calls)


def _base(directory: Path) -> tuple[str, Path]:
    """Return the last commit that changed the committed costs, and the code that they are of."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(("git", "-C", str(PROJECT), *arguments), check=True, capture_output=True).stdout

    revision = git("log", "-1", "--format=%h", "--", str(FILE)).decode().strip()
    tree = directory / "base"
    with tarfile.open(fileobj=BytesIO(git("archive", revision))) as members:
        members.extractall(tree, filter="data")
    subprocess.run((sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"), cwd=tree, check=True)
    return revision, tree


def _compare_rivals(found: Mapping[str, Mapping[str, float]]) -> None:
    for name, rival in SAME.items():
        if name in found and rival in found:
            print(f"{name} / {rival} of nats-py: {sum(found[name].values()) / sum(found[rival].values()):.2f}")


def _within(runner: Runner, name: str, functions: Table, committed: Cost | None) -> bool:
    """Return whether a cost is as committed, and print by how much it differs and what has grown.

    One that is above the limit is counted again, as a busy machine moves it now and then.
    """
    if committed is None:
        print(f"{name}: no cost is committed: run scripts/cost {name} --write")
        return False
    limit = LIMITS.get(name, LIMIT)
    for _ in range(COUNTED_AGAIN):
        if budget.dearer(sum(functions.values()), committed) <= limit:
            break
        functions = min(functions, _counted(runner, name), key=lambda each: sum(each.values()))
    share = budget.dearer(sum(functions.values()), committed)
    print(f"{name}: {share:+.1%} against {committed.instructions:,.0f}")
    if share <= limit:
        return True
    print(f"{name} is more than {limit:.0%} dearer than committed. Instructions that grew, by function:")
    for function, before, now in islice(budget.grown(functions, committed.functions), FUNCTIONS_SHOWN):
        print(f"  {function:50} {before:12,.0f} -> {now:,.0f}")
    print("Python functions that are called more often:")
    for function, before, now in islice(budget.grown(_calls(runner, name), committed.calls), FUNCTIONS_SHOWN):
        print(f"  {function:60} {before:.3f} -> {now:.3f}")
    return False


if __name__ == "__main__":
    sys.exit(main())
