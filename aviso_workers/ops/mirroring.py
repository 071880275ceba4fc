"""Mirrors and sources: whether they follow, and what it takes to let a mirror take its origin's place.

Called by the commands `mirror ...` and by `failing_over`. A mirror is judged by when it last heard of its origin,
because its lag stays at nought when the origin is gone. Before a mirror is promoted its origin is fenced: it keeps what
it has and gives up its subjects, so that it takes no publish any more, now or when it comes back; for two streams that
both take publishes are two histories which nobody can join again. Who reconciles streams leaves a fenced one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from msgspec import Struct

from aviso_workers.app import App
from aviso_workers.backends import Administration
from aviso_workers.errors import NotFoundError, RefusedError, UnavailableError
from aviso_workers.streams import FENCED

__all__ = ["STALE_SECONDS", "Fenced", "Link", "Mirrors", "Promotion", "fence", "unfence"]

STALE_SECONDS = 30.0
"""A mirror that has heard nothing for so long is not following: an idle origin is heard of every few seconds."""
PROMOTED = "aviso-workers-promoted-from"
"""The metadata of a promoted mirror: the API and the name of its origin."""
NOWHERE = "aviso_workers.fenced"
"""The subject that a fenced stream has, followed by its name: a stream cannot be without one."""
ASK_AGAIN_SECONDS = 0.05
ORIGIN_SECONDS = 2.0


class Link(Struct, frozen=True, kw_only=True):
    """How a stream follows another one."""

    stream: str
    origin: str
    relation: str
    """`mirror`, `source`, or `promoted`: it was a mirror."""
    api: str
    """The prefix of the API where the origin is; empty where it is in the same account."""
    lag: int = 0
    """Messages that are still to come, as far as the stream knows."""
    active_seconds: float | None = None
    """Since it last heard of the origin; None: never."""
    trouble: str = ""
    """Why it cannot be relied on; empty where it can."""


class Fenced(Struct, frozen=True, kw_only=True):
    """What a fenced stream was."""

    subjects: tuple[str, ...]
    """What it took."""
    last_sequence: int
    """Nothing comes after it."""


class Promotion(Struct, frozen=True, kw_only=True):
    """What became of a mirror that took its origin's place."""

    stream: str
    subjects: tuple[str, ...]
    last_sequence: int
    gap: int | None
    """Messages that were still to come when the origin was fenced, and came; None where it was lost: nobody knows."""
    seconds: float
    """From the fence, or from the beginning, until the mirror took publishes."""


class Mirrors:
    """Works inside of `async with app:`. Every method raises `BackendError`."""

    def __init__(self, app: App) -> None:
        self._backend = app.session.backend
        self._server = self._backend.administration()

    async def links(self) -> list[Link]:
        """All streams of the account that follow another one, or did until they were promoted."""
        found: list[Link] = []
        for stream in await self._server.pages("STREAM.LIST", "streams"):
            name = stream["config"]["name"]
            if mirror := stream.get("mirror"):
                found.append(_link(name, "mirror", mirror))
            found += [_link(name, "source", source) for source in stream.get("sources") or ()]
            if promoted := (stream["config"].get("metadata") or {}).get(PROMOTED):
                found.append(await self._promoted(name, promoted))
        return found

    async def promote(
        self,
        stream: str,
        *,
        subjects: tuple[str, ...] = (),
        origin_is_lost: bool = False,
        patience_seconds: float = 30.0,
    ) -> Promotion:
        """Let a mirror take its origin's place, with its subjects: the origin is fenced, the mirror catches up.

        Where the origin does not answer it cannot be fenced: that is refused, unless it is said to be lost, and then
        the `subjects` have to be named. Raises `RefusedError` where the stream is no whole mirror, or does not
        catch up in time; then the origin is as it was.
        """
        self._backend.require_server(2, 12, to="promote a mirror")
        info = await self._server.api(f"STREAM.INFO.{stream}")
        mirror = _whole_mirror(info)
        origin, api = mirror["name"], (mirror.get("external") or {}).get("api", "")
        began = anyio.current_time()
        gap: int | None = None
        try:
            fenced = await fence(self._server, origin, api=api)
        except UnavailableError as error:
            if not origin_is_lost:
                raise RefusedError(
                    f"{origin}, the origin of {stream}, cannot be fenced: {error}. It would take publishes when it "
                    "comes back. Where it is lost, say --origin-is-lost, and fence it (`aviso-workers mirror fence`) "
                    "before it is joined again"
                ) from error
            if not subjects:
                raise RefusedError(f"the subjects of {origin} cannot be asked for: name them by --subject") from error
        else:
            subjects = subjects or fenced.subjects
            gap = await self._catch_up(stream, origin, api=api, until=fenced.last_sequence, within=patience_seconds)
        config = {**info["config"], "subjects": list(subjects)}
        del config["mirror"]
        config["metadata"] = {**(config.get("metadata") or {}), PROMOTED: f"{api or self._server.api_prefix} {origin}"}
        try:
            answer = await self._server.api(f"STREAM.UPDATE.{stream}", config)
        except RefusedError:
            if gap is not None:
                await unfence(self._server, origin, api=api)
            raise
        return Promotion(
            stream=stream,
            subjects=subjects,
            last_sequence=answer["state"]["last_seq"],
            gap=gap,
            seconds=anyio.current_time() - began,
        )

    async def _catch_up(self, stream: str, origin: str, *, api: str, until: int, within: float) -> int:
        """How many messages were missing; returns when they have come. Raises `RefusedError`, without the fence."""
        missing: int | None = None
        with anyio.move_on_after(within):
            while True:
                last = int((await self._server.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"])
                missing = until - last if missing is None else missing
                if last >= until:
                    return missing
                await anyio.sleep(ASK_AGAIN_SECONDS)
        await unfence(self._server, origin, api=api)
        raise RefusedError(
            f"{stream} did not catch up with {origin} within {within:g} s: {missing} messages were missing at first; "
            f"{origin} takes publishes again"
        )

    async def _promoted(self, stream: str, promoted: str) -> Link:
        api, _, origin = promoted.partition(" ")
        link = Link(stream=stream, origin=origin, relation="promoted", api=api)
        try:
            found = await self._server.api(f"STREAM.INFO.{origin}", prefix=api, timeout_seconds=ORIGIN_SECONDS)
        except (UnavailableError, NotFoundError):
            return link
        if FENCED in (found["config"].get("metadata") or {}):
            return link
        trouble = f"{origin} is back and takes publishes: `aviso-workers mirror fence {origin} --api '{api}'`"
        return Link(stream=stream, origin=origin, relation="promoted", api=api, trouble=trouble)


async def fence(server: Administration, stream: str, *, api: str = "") -> Fenced:
    """Take a stream's subjects away, and note them in its metadata; one that is fenced already stays as it is.

    Raises `BackendError`.
    """
    info = await server.api(f"STREAM.INFO.{stream}", prefix=api, timeout_seconds=ORIGIN_SECONDS)
    config = info["config"]
    metadata = config.get("metadata") or {}
    if FENCED not in metadata:
        if not config.get("subjects"):
            raise RefusedError(f"{stream} has no subjects of its own, so there is nothing to fence")
        metadata = {**metadata, FENCED: " ".join(config["subjects"])}
        config = {**config, "subjects": [f"{NOWHERE}.{stream}"], "metadata": metadata}
        info = await server.api(f"STREAM.UPDATE.{stream}", config, prefix=api)
    return Fenced(subjects=tuple(metadata[FENCED].split()), last_sequence=info["state"]["last_seq"])


async def unfence(server: Administration, stream: str, *, api: str = "") -> tuple[str, ...]:
    """Give a fenced stream its subjects back, and return them. Raises `RefusedError` where it is not fenced."""
    config = (await server.api(f"STREAM.INFO.{stream}", prefix=api))["config"]
    metadata = dict(config.get("metadata") or {})
    if FENCED not in metadata:
        raise RefusedError(f"{stream} is not fenced")
    subjects = metadata.pop(FENCED).split()
    await server.api(f"STREAM.UPDATE.{stream}", {**config, "subjects": subjects, "metadata": metadata}, prefix=api)
    return tuple(subjects)


def _whole_mirror(info: Mapping[str, Any]) -> Mapping[str, Any]:
    config = info["config"]
    mirror: Mapping[str, Any] | None = config.get("mirror")
    if mirror is None:
        raise RefusedError(f"{config['name']} is no mirror")
    for field in ("filter_subject", "subject_transforms", "opt_start_seq", "opt_start_time"):
        if mirror.get(field):
            raise RefusedError(f"{config['name']} is no whole mirror: it has {field}, so it cannot take its place")
    return mirror


def _link(stream: str, relation: str, found: Mapping[str, Any]) -> Link:
    active = found.get("active", -1)
    active_seconds = active / 1e9 if active >= 0 else None
    trouble = (found.get("error") or {}).get("description", "")
    if active_seconds is None:
        trouble = trouble or "it has never heard of its origin"
    elif active_seconds > STALE_SECONDS:
        trouble = trouble or f"it has heard nothing for {active_seconds:.0f} s, whatever its lag says"
    return Link(
        stream=stream,
        origin=found["name"],
        relation=relation,
        api=(found.get("external") or {}).get("api", ""),
        lag=found.get("lag", 0),
        active_seconds=active_seconds,
        trouble=trouble,
    )
