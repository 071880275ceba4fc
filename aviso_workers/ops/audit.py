"""The record of what operators do: kept in a stream before it is done, and again with what came of it.

What is erased is recorded once, before it is: where it is still there, it was not erased.
"""

from __future__ import annotations

import getpass
import socket
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime

import anyio
import structlog
from msgspec import Struct, structs

from aviso_workers.aviso.codec import Message
from aviso_workers.backends import Admin
from aviso_workers.backends.provisioning import Provisioner
from aviso_workers.config import Config
from aviso_workers.errors import BackendError, DeniedError, RefusedError, describe
from aviso_workers.events import Events
from aviso_workers.ops import inventory
from aviso_workers.state import audit_records
from aviso_workers.state.audit_records import AuditRecord, Erased, RecordedAction
from aviso_workers.state.dead_letter_records import DeadLetter
from aviso_workers.state.own_streams import AUDIT

TIMEOUT_SECONDS = 10.0
END_SECONDS, AGAIN_SECONDS = 30.0, 1.0
"""For how long, and how often, it is tried to store the end of an action: a server has a successor by then."""
log = structlog.get_logger("aviso_workers.console")


class ActionResult(Struct, kw_only=True):
    """What comes of an action; whoever carries it out sets it."""

    text: str = ""
    state: audit_records.State = "done"
    sequence: int = 0
    """Of the record of its begin."""


def this_user() -> str:
    """Return the user and the host of this process."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user without a name, as in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


async def erased(admin: Admin, stream: str, sequence: int, *, since: datetime) -> dict[tuple[str, str], Erased]:
    """Return how the last dead letters of a notification, which was stored at `since` or later, were erased, by app and
    agent. Raises `BackendError`.
    """
    found: dict[tuple[str, str], Erased] = {}
    if (info := await inventory.existing(admin.stream_info(AUDIT))) is None:
        return found
    subjects = (audit_records.erasures_of("*", "*"),)
    reading = admin.read(AUDIT, filter_subjects=subjects, start_time=since, last_sequence=info.last_sequence)
    async with aclosing(reading):
        async for message in reading:
            if (one := audit_records.erased(message, stream, sequence)) is not None:
                found[audit_records.agent_of(message.subject)] = one
    return found


class Audit:
    """The records of actions on a server."""

    def __init__(self, admin: Admin, config: Config) -> None:
        self._admin = admin
        self._spec = audit_records.stream_spec(config)
        self._streams = Provisioner(admin, management="reconcile", events=Events(), removes_replicas=False)

    @asynccontextmanager
    async def recorded(
        self, who: str, action: str, of: str, selection: Mapping[str, str] | None = None
    ) -> AsyncIterator[ActionResult]:
        """Record that an action begins, and, behind the block, what came of it.

        Raises `BackendError` where the begin cannot be stored: then the block is not entered, and nothing was done. An
        end that cannot be stored is logged only.
        """
        begun = AuditRecord(who=who, action=action, of=of, selection=dict(selection or {}), state="begun")
        result, patience = ActionResult(sequence=await self._store(audit_records.message_of(begun))), END_SECONDS
        try:
            yield result
        except anyio.get_cancelled_exc_class():
            result.state, patience = "stopped", 0.0  # the console may end
            raise
        except BaseException as error:
            result.state, result.text = "failed", "; ".join(filter(None, (result.text, describe(error))))
            raise
        finally:
            log.info(
                "console.acted", who=who, action=action, of=of, selection=dict(begun.selection), state=result.state
            )
            end = structs.replace(begun, state=result.state, result=result.text, begun=result.sequence)
            with anyio.CancelScope(shield=True):  # also where the console ends meanwhile
                try:
                    await self._store(audit_records.message_of(end), until=anyio.current_time() + patience)
                except BackendError as error:
                    log.warning("console.end_not_recorded", action=action, error=describe(error))

    async def erases(self, by: str, dead_letters: Sequence[DeadLetter]) -> None:
        """Record that dead letters are about to be erased. Raises `BackendError`: then they are not to be."""
        for message in audit_records.erasures(by, dead_letters):
            await self._store(message)

    async def newest(self, count: int) -> list[RecordedAction]:
        """Return about so many of the newest actions, the newest first. Raises `BackendError`."""
        info = await inventory.existing(self._admin.stream_info(AUDIT))
        if info is None:
            return []  # it is made with the first action
        first = await inventory.start_of_newest(self._admin, AUDIT, info, (audit_records.ACTIONS,), 2 * count)
        reading = self._admin.read(
            AUDIT, filter_subjects=(audit_records.ACTIONS,), start_sequence=first, last_sequence=info.last_sequence
        )
        async with aclosing(reading):
            return audit_records.joined([message async for message in reading])[:count]

    async def _store(self, message: Message, *, until: float = 0.0) -> int:
        """Store a record, and try again where no server answers, until this time. Raises `BackendError`."""
        message_id, tried = uuid.uuid4().hex, 0
        while True:
            try:
                return await self._publish(message, message_id)
            except BackendError as error:
                self._streams.forget(AUDIT)  # it may have been deleted: it is looked at, and made, once more
                last = tried and (isinstance(error, RefusedError) or anyio.current_time() > until)
                if last or isinstance(error, DeniedError):
                    raise
            await anyio.sleep(AGAIN_SECONDS if tried else 0)
            tried += 1

    async def _publish(self, message: Message, message_id: str) -> int:
        await self._streams.ensure(self._spec)
        ack = await self._admin.publish(message, message_id=message_id, stream=AUDIT, timeout_seconds=TIMEOUT_SECONDS)
        return ack.sequence


class Operator(Struct, frozen=True):
    """Who acts on a server, and where that is recorded."""

    name: str
    audit: Audit
