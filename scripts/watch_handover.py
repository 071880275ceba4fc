#!/usr/bin/env python3
"""Does a watch that goes from history to live miss or double anything? The long form of a test.

Round after round: notifications are published, and at a random moment a watch begins at the first of them. It must
see every one, once, in order. Starts a nats-server of its own; exits 0 only if every round holds.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import anyio

from aviso_workers import App, Notify, config
from aviso_workers.ops import aviso_admin
from aviso_workers.server import NatsServer

EVENT = "mars"
PER_FIELD = 1000


def notifications(count: int) -> Iterator[Notify]:
    for number in range(count):
        fields = {"class": "od", "expver": number // PER_FIELD + 1, "domain": "g", "date": "20261120", "time": "00"}
        yield Notify(EVENT, {**fields, "stream": "oper", "step": number % PER_FIELD}, {"n": number})


async def play_round(app: App, count: int, after: int) -> list[str]:
    """Return what is wrong with a watch that begins when `after` notifications are stored; empty if nothing is."""
    first = (await app.session.backend.stream_info("MARS")).last_sequence + 1
    begin = anyio.Event()
    seen: list[int] = []

    def told() -> Iterator[Notify]:
        for number, notification in enumerate(notifications(count)):
            if number == after:
                begin.set()
            yield notification

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app.notify_many, told())
        await begin.wait()
        async with aclosing(app.watch(EVENT, from_id=first)) as watching:
            async for notification in watching:
                seen.append(notification.sequence)
                if notification.sequence >= first + count - 1:
                    break
    expected = list(range(first, first + count))
    problems = []
    if missing := len(set(expected) - set(seen)):
        problems.append(f"{missing} missing")
    if doubled := len(seen) - len(set(seen)):
        problems.append(f"{doubled} doubled")
    if seen != sorted(seen):
        problems.append("out of order")
    return problems


async def play(url: str, *, count: int, rounds: int, seed: int) -> int:
    dice = random.Random(seed)
    over = {"AVISO_WORKERS_NOTIFICATION_BACKEND__JETSTREAM__NATS_URL": url}
    loaded = config.load(Path(__file__).with_name("smoke_test.yaml"), environ={**os.environ, **over})
    bad = 0
    async with App("watch-handover", config=loaded) as app:
        await app.notify_many(notifications(1))
        for number in range(1, rounds + 1):
            await aviso_admin.wipe(app.session.admin, ["MARS"])
            after, started = dice.randrange(count), time.monotonic()
            problems = await play_round(app, count, after)
            bad += bool(problems)
            took = time.monotonic() - started
            print(
                f"round {number}: {count} published, watched from {after} on, {took:.1f} s: "
                f"{', '.join(problems) or 'none missing, none doubled'}",
                flush=True,
            )
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notifications", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as store, NatsServer.start(store_dir=Path(store)) as server:

        async def run() -> int:
            return await play(server.url, count=arguments.notifications, rounds=arguments.rounds, seed=arguments.seed)

        return 1 if anyio.run(run) else 0


if __name__ == "__main__":
    sys.exit(main())
