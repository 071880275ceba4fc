"""One nats-server or several in the background, on the loopback, for development and tests.

The commands `server start|stop|reload|status` call here. Every node has a directory of its own below one that the
commands agree on: its nats-server.conf, its log, and a record of its ports. The node inherits an open file on that
record with a lock on it, and holds the lock until it ends, however it ends: whether a node runs is asked of the lock,
and a process id that belongs to another process by now is never signalled.

Production servers run under the site's own supervisor, with a file that `nats_conf` wrote.
"""

from __future__ import annotations

import atexit
import fcntl
import http.client
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct, structs

from aviso_workers import http_answers
from aviso_workers.config import Config, Server
from aviso_workers.config.nats_server import LOOPBACK, Cluster
from aviso_workers.errors import ServerProcessError
from aviso_workers.server import (
    STANDSTILL_SECONDS,
    Tell,
    find_binary,
    last_error,
    nats_conf,
    processor_seconds,
    profiles,
    start_tied,
    store,
    tell_nobody,
    wait_while_it_works,
)
from aviso_workers.server.store import Asset

DIRECTORY = Path(".aviso-workers/server")
"""Where commands run servers unless they are told another directory: below the current one."""
PID_SECONDS = 30.0
STOP_SECONDS = 10.0
RACE_SECONDS = 1.0
LOCK = "lock"
MOVING = "moving"
"""The directory, below that of servers, for those that `server rotate-key` runs itself."""
ANSWER_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 << 20
UNRECOVERABLE = "could not be recovered"
"""The words of a server about a stream on its disk that it cannot read, with another key for example."""
PORTS = range(15_000, 32_000)
PORT_KEYS = {
    "port": "server.port",
    "monitoring_port": "server.monitoring.port",
    "cluster_port": "server.cluster.port",
    "leaf_port": "server.leafnodes.port",
}
"""By port of a node, the key that chooses it."""
CURE = (
    "Check its encryption key, its accounts and its log before a program creates its streams again, which destroys "
    "their data:"
)
HEALTH = "Healthcheck failed"

_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}
"""The children of this process: a parent has to ask for the end of its children, else they stay as zombies."""
_RESERVED: list[socket.socket] = []
"""The ports that this process was given, which are bound until it ends."""


class Node(Struct, frozen=True, kw_only=True):
    """A nats-server, single or in a cluster. Its ports are on 127.0.0.1."""

    name: str
    directory: Path
    port: int
    monitoring_port: int
    cluster_port: int
    leaf_port: int

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id, as the server wrote it. Raises ValueError or OSError where it has not done so."""
        return int((self.directory / "nats-server.pid").read_text())

    @property
    def log(self) -> str:
        """The log of the server since it was started."""
        file = self.directory / "nats-server.log"
        return file.read_text(errors="replace") if file.exists() else ""


class NodeState(Struct, frozen=True, kw_only=True):
    """The state of a node. `health` is `ok`, or what is wrong."""

    node: Node
    pid: int | None
    health: str


def start(
    config: Config,
    *,
    directory: Path,
    nodes: int = 1,
    detached: bool = True,
    tell: Tell = tell_nobody,
    in_stores: Mapping[str, Path] | None = None,
) -> tuple[Node, ...]:
    """Start the nodes that do not run, and wait until all of them are healthy and serve all that is in their stores.

    They outlive this process if they are `detached`; else the kernel ends them with it, on Linux. `tell` is called
    with a line every few seconds for as long as it takes. `in_stores` has each node's store_dir by its name, where that
    is not what the configuration says.

    Raises ServerProcessError where a store would be converted to another encryption, where one ends, or does not serve
    what is in its store: those that were started are ended again, without force. It is raised too where one does
    nothing for two minutes, and that one still runs; and where the disk is full or cannot be written. Raises
    ConfigError where nats-server refuses its configuration.
    """
    server, choices = profiles.choose(config, profile="development")
    try:
        with alone(directory):
            for each in store.finish_swap(directory):
                before = f"{each.previous} the one before"
                tell(f"{each.place} is the new store, {before}: `server rotate-key` was interrupted")
            places = in_stores or stores(server, directory=directory, nodes=nodes)
            return _start(config, server, choices, places, directory=directory, detached=detached, tell=tell)
    except OSError as error:
        raise ServerProcessError(
            f"no server is started, because {error.filename or directory} cannot be written: {error.strerror}"
        ) from error


def _start(
    config: Config,
    server: Server,
    choices: tuple[profiles.Choice, ...],
    places: Mapping[str, Path],
    *,
    directory: Path,
    detached: bool,
    tell: Tell,
) -> tuple[Node, ...]:
    found = recorded(directory)
    running = [node for node in found if is_running(node)]
    wanted = list(places)
    if running and sorted(node.name for node in found) != sorted(wanted):
        names = ", ".join(node.name for node in running)
        raise ServerProcessError(f"{names} in {directory}: stop what runs there before you start something else")
    planned = found if running else _planned(server, wanted, directory)
    for node in found:
        if node not in planned:
            _forget(node)
    missing = [node for node in planned if node not in running]
    for node in missing:
        _require_same_encryption(server, store.within(places[node.name]))
        _write(config, server, node, peers=planned, choices=choices, place=places[node.name])
    stored = {node.name: store.on_disk(store.within(places[node.name])) for node in missing}
    with ExitStack() as undo:
        for node in missing:
            _spawn(node, place=places[node.name], detached=detached)
            undo.callback(_end_in_order, node)
        is_ready = wait_while_it_works(
            lambda: all(tuple(map(_is_healthy, planned))),  # all are asked: one may have ended
            progress=lambda: tuple(map(_progress, planned)),
            tell=lambda taken: tell(_waited_for(planned, taken)),
        )
        if is_ready:
            for node in missing:
                _require_all_served(node, stored[node.name], is_alone=len(planned) == 1)
        undo.pop_all()
    if not is_ready:
        raise ServerProcessError(_stands_still(planned))
    return tuple(planned)


def reload(config: Config, *, directory: Path) -> tuple[Node, ...]:
    """Have the running nodes reload the configuration, and return them.

    Raises ServerProcessError where none runs, or one says that it cannot take over a change, and ConfigError where
    nats-server refuses the configuration; then no node was signalled.
    """
    server, choices = profiles.choose(config, profile="development")
    planned = recorded(directory)
    running = [node for node in planned if is_running(node)]
    if not running:
        raise ServerProcessError(f"no nats-server runs in {directory}: start one")
    if [node.name for node in planned] != _names(server, len(planned)) or not _has_ports(server, planned):
        raise ServerProcessError("names and ports of what runs do not follow the configuration: stop it, and start it")
    places = stores(server, directory=directory, nodes=len(planned))
    for node in running:
        _write(config, server, node, peers=planned, choices=choices, place=places[node.name])
    for node in running:
        _reload(node)
    return tuple(running)


def stop(directory: Path, *, lame_duck: bool = False) -> tuple[Node, ...]:
    """End the nodes that run, remove the records of all, and return those that ran; their stores stay.

    With `lame_duck`, each hands its streams to the others and tells its clients to leave, one node after the other,
    as long as the configuration gives them; without, it is done within 10 s, by force if need be.
    """
    planned = recorded(directory)
    running = [node for node in planned if is_running(node)]
    if lame_duck:
        for node in running:
            _end([node], number=signal.SIGUSR2, within=math.inf)
    else:
        _end(running, number=signal.SIGTERM, within=STOP_SECONDS)
    for node in planned:
        _forget(node)
    return tuple(running)


def states(directory: Path) -> tuple[NodeState, ...]:
    """Return the state of every node that was started in a directory and not stopped, in the order of their names."""
    return tuple(_state(node) for node in recorded(directory))


def stores(server: Server, *, directory: Path, nodes: int) -> dict[str, Path]:
    """Return the store_dir of each node by its name, as the configuration has it."""
    names = _names(server, nodes)
    configured = server.jetstream.store_dir
    if configured is None:
        return {name: directory.absolute() / name / "jetstream" for name in names}
    place = Path(configured).absolute()
    return {name: place / name for name in names} if nodes > 1 else {names[0]: place}


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory of servers for the block. Raises ServerProcessError where another process has it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServerProcessError(
                f"servers in {directory} are being started, or moved, by another command"
            ) from error
        moving = [node for side in ("old", "new") for node in recorded(directory / MOVING / side) if is_running(node)]
        if moving and not eventually(lambda: not any(map(is_running, moving)), STOP_SECONDS):
            raise ServerProcessError(f"the streams of {directory} are being moved: wait for `server rotate-key`")
        yield


def recorded(directory: Path) -> list[Node]:
    """Return the nodes that were started in a directory and not stopped, whether they run or not."""
    records = map(_decoded, directory.glob("*/node.json"))
    return sorted((node for node in records if node), key=lambda node: (len(node.name), node.name))  # 10 after 9


def is_running(node: Node) -> bool:
    """Return whether the process of a node runs: it holds a lock as long as it does."""
    try:
        with suppress(FileNotFoundError), (node.directory / "node.json").open("rb") as record:
            fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def ask(node: Node, path: str) -> dict[str, Any]:
    """Return the node's answer on its monitoring port for a path such as /varz.

    Raises ServerProcessError where it does not.
    """
    try:
        answer: dict[str, Any] = json.loads(_answer(node, path))
    except ValueError as error:
        raise ServerProcessError(f"no JSON from http://{LOOPBACK}:{node.monitoring_port}{path}") from error
    return answer


def unserved(node: Node) -> str:
    """Return a sentence on streams and consumers in the node's store that it does not serve; empty where there are
    none.

    Raises ServerProcessError where the node does not answer.
    """
    return store.unserved(lambda: _answer(node, store.SERVED))


def served(node: Node) -> frozenset[Asset]:
    """Return the streams and consumers that a node serves. Raises ServerProcessError where it does not answer."""
    return store.served(_answer(node, store.SERVED)).assets


def _answer(node: Node, path: str) -> bytes:
    url = f"http://{LOOPBACK}:{node.monitoring_port}{path}"
    try:
        return http_answers.read(
            url,
            seconds=ANSWER_SECONDS,
            silent_seconds=ANSWER_SECONDS,
            max_bytes=MAX_ANSWER_BYTES,
            near=True,
            failures=True,
        )
    except (OSError, http.client.HTTPException) as error:
        raise ServerProcessError(f"no answer from {url}") from error


def _names(server: Server, nodes: int) -> list[str]:
    return [server.server_name] if nodes == 1 else [f"{server.server_name}-{i}" for i in range(1, nodes + 1)]


def in_use(port: int, key: str) -> str:
    """Return what to say of a port that somebody listens on, which the configuration's key chooses."""
    return f"port {port} on {LOOPBACK} is in use: stop what listens there, or choose another in {key}"


def _ports(server: Server) -> dict[str, int]:
    """Return the configured ports of the first node, as in `PORT_KEYS`; the next node's are one higher."""
    cluster_port = server.cluster.port if server.cluster else 0
    leaf_port = (server.leafnodes.port if server.leafnodes else None) or 0
    return dict(zip(PORT_KEYS, (server.port, server.monitoring.port, cluster_port, leaf_port), strict=True))


def _has_ports(server: Server, nodes: list[Node]) -> bool:
    wanted = _ports(server).items()
    return all(port in (0, getattr(node, name) - i) for i, node in enumerate(nodes) for name, port in wanted)


def _planned(server: Server, names: list[str], directory: Path) -> list[Node]:
    free = iter(free_ports(len(names) * len(_ports(server))))
    nodes = []
    for i, name in enumerate(names):
        configured = {of: port + i if port else 0 for of, port in _ports(server).items()}
        for of, port in configured.items():
            if port and not is_free(port):
                raise ServerProcessError(in_use(port, PORT_KEYS[of]))
        ports = {of: port or next(free) for of, port in configured.items()}
        nodes.append(Node(name=name, directory=directory.absolute() / name, **ports))
    return nodes


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, outside of the range from which the kernel takes those of connections.

    On Linux no other process is given them by this function for as long as this process lives, even while the server
    that was to have them is down.
    """
    return list(islice(filter(_reserve, random.sample(PORTS, len(PORTS))), count))


@atexit.register
def _release_ports() -> None:
    while _RESERVED:
        _RESERVED.pop().close()


def _reserve(port: int) -> bool:
    """Bind a port that nobody else has bound, and return whether that was possible.

    Linux lets a server listen on it nevertheless, because both sockets have SO_REUSEADDR; elsewhere it is let go.
    """
    with ExitStack() as undo:
        reserved = undo.enter_context(socket.socket())
        try:
            reserved.bind((LOOPBACK, port))
        except OSError:
            return False
        if sys.platform == "linux":
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _RESERVED.append(reserved)
            undo.pop_all()
    return True


def is_free(port: int, *, host: str = LOOPBACK) -> bool:
    """Return whether somebody could listen on that port now."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def _settings(server: Server, node: Node, *, peers: list[Node], place: Path) -> Server:
    """Return the configuration of one node, with the settings that differ between nodes on one machine."""
    is_alone = len(peers) == 1
    unique, tags = server.jetstream.unique_tag, server.server_tags
    if unique and not is_alone:
        number = peers.index(node) + 1
        tags = tuple(f"{unique}{number}" if tag.startswith(unique) else tag for tag in tags)
    leaf_nodes = server.leafnodes
    if leaf_nodes and leaf_nodes.port is not None:
        leaf_nodes = structs.replace(leaf_nodes, host=LOOPBACK, port=node.leaf_port)
    routes = tuple(f"{LOOPBACK}:{peer.cluster_port}" for peer in peers)
    cluster = structs.replace(server.cluster or Cluster(), host=LOOPBACK, port=node.cluster_port, routes=routes)
    return structs.replace(
        server,
        server_name=node.name,
        server_tags=tags,
        host=LOOPBACK,
        port=node.port,
        monitoring=structs.replace(server.monitoring, host=LOOPBACK, port=node.monitoring_port),
        jetstream=structs.replace(server.jetstream, store_dir=str(place)),
        cluster=None if is_alone else cluster,
        gateways=None,  # one cluster alone would wait for the others, because all share one JetStream
        leafnodes=leaf_nodes,
    )


def _write(
    config: Config,
    server: Server,
    node: Node,
    *,
    peers: list[Node],
    choices: tuple[profiles.Choice, ...],
    place: Path,
) -> None:
    run = {"pid_file": str(node.directory / "nats-server.pid")}
    settings = _settings(server, node, peers=peers, place=place)
    rendered = nats_conf.render(settings, origins=config.origins, choices=choices, run=run)
    nats_conf.write(rendered, node.directory / "nats-server.conf", origins=config.origins)


def _spawn(node: Node, *, place: Path, detached: bool) -> None:
    with ExitStack() as opened:
        store_lock = _locked_store(node, place)
        opened.callback(os.close, store_lock)
        record = opened.enter_context(_locked_record(node))
        (node.directory / "nats-server.pid").unlink(missing_ok=True)  # of one that was killed
        log = opened.enter_context((node.directory / "nats-server.log").open("wb"))
        start = subprocess.Popen if detached else start_tied
        process = start(
            [find_binary(), "-c", str(node.directory / "nats-server.conf")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[record.fileno(), store_lock],  # the locks are the node's from here on
        )
    _CHILDREN[process.pid] = process


def _locked_store(node: Node, place: Path) -> int:
    """Return a locked descriptor of a store. Raises ServerProcessError where another server of ours uses it, which
    nats-server does not check.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)  # the server cannot use it either, and says why

    if not _locks(lock):
        os.close(lock)
        raise ServerProcessError(
            f"{node.name}: a server that was started in another directory uses the store {place}: stop it there"
        )
    return lock


def _locked_record(node: Node) -> IO[bytes]:
    record = (node.directory / "node.json").open("ab")
    if not _locks(record.fileno()):  # `is_running` of another process has it for a moment
        record.close()
        raise ServerProcessError(f"{node.name} in {node.directory} was started by another command just now")
    record.truncate(0)
    record.write(msgspec.json.encode(node, enc_hook=str))
    record.flush()
    return record


def _locks(descriptor: int) -> bool:
    """Lock a file, and return whether that was possible within `RACE_SECONDS`."""

    def locked() -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    return eventually(locked, RACE_SECONDS)


def _forget(node: Node) -> None:
    for name in ("node.json", "nats-server.pid", "nats-server.conf"):
        (node.directory / name).unlink(missing_ok=True)


def _decoded(file: Path) -> Node | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Node, dec_hook=lambda type_, text: type_(text))
    except (OSError, msgspec.MsgspecError):
        return None  # begun and never started


def _require_same_encryption(server: Server, directory: Path) -> None:
    encryption = server.jetstream.encryption
    others = sorted(store.ciphers(directory) - {encryption.cipher}) if encryption else []
    for cipher in others:
        found = f"encrypted with {cipher}" if cipher else "not encrypted"
        raise ServerProcessError(
            f"{directory} is {found}, and nats-server loses consumers and streams when it re-encrypts a store: "
            "configure it as it is, or move its streams with `aviso-workers server rotate-key`"
        )


def _require_all_served(node: Node, before: frozenset[Asset], *, is_alone: bool) -> None:
    """Raise ServerProcessError where a node does not serve everything in its store, or has removed something from
    it.
    """
    problem = unserved(node)
    # A server of a cluster removes what was deleted while it was down.
    erased = {asset for asset in before - served(node) if not asset.consumer} if is_alone else set[Asset]()
    if not problem and erased:
        problem = store.describe(erased, of=before)
    if problem:
        raise ServerProcessError(f"nats-server {node.name}: {problem}. {CURE} {last_error(node.log)}")


def _progress(node: Node) -> tuple[int, int]:
    """Return numbers that change while a node works at getting ready."""
    lines = sum(HEALTH not in line for line in node.log.splitlines())  # it logs when it is asked
    with suppress(OSError, ValueError):
        return lines, processor_seconds(node.pid)
    return lines, 0


def _waited_for(nodes: list[Node], taken: str) -> str:
    late = _unready(nodes)
    return f"{late.name} is starting, for {taken} so far: {_last_line(late.log)}"


def _last_line(log: str) -> str:
    return next(reversed(log.splitlines()), "it has logged nothing")


def _stands_still(nodes: list[Node]) -> str:
    late = _unready(nodes)
    return (
        f"nats-server {late.name} is not ready, and has done nothing for {STANDSTILL_SECONDS:.0f} s: "
        f"{_health(late)}: {last_error(late.log)}. It still runs: see {late.directory / 'nats-server.log'} and "
        "`aviso-workers server status`, or end it with `aviso-workers server stop`"
    )


def _unready(nodes: list[Node]) -> Node:
    return next((node for node in nodes if _health(node) != "ok"), nodes[0])


def _is_healthy(node: Node) -> bool:
    """Return whether a node is healthy. Raises ServerProcessError where it never will be."""
    if not is_running(node):
        raise ServerProcessError(f"nats-server {node.name} ended at once: {last_error(node.log)}")
    health = _health(node)
    if UNRECOVERABLE in health:
        raise ServerProcessError(f"nats-server {node.name}: {health}. {CURE} {last_error(node.log)}")
    return health == "ok"


def _state(node: Node) -> NodeState:
    if not is_running(node):
        return NodeState(node=node, pid=None, health=f"ended by itself; its log ends with: {_last_line(node.log)}")
    try:
        pid = node.pid
    except (OSError, ValueError):
        return NodeState(node=node, pid=None, health="starting")
    health = _health(node)
    return NodeState(node=node, pid=pid, health=unserved(node) or health if health == "ok" else health)


def _health(node: Node) -> str:
    try:
        found = ask(node, "/varz")
        if (found.get("server_name"), found.get("port")) != (node.name, node.port):
            return f"port {node.monitoring_port} is another server's"
        answer = ask(node, "/healthz")
    except ServerProcessError as error:
        return str(error)
    return "ok" if answer.get("status") == "ok" else str(answer.get("error", "unhealthy"))


def _reload(node: Node) -> None:
    def loaded_at() -> Any:
        return ask(node, "/varz")["config_load_time"]

    before, logged = loaded_at(), len(node.log)
    os.kill(node.pid, signal.SIGHUP)
    said = "[ERR] Failed to reload server configuration: "

    def taken() -> bool:
        if said in (new := node.log[logged:]):
            raise ServerProcessError(f"{node.name} did not take it over: {new.partition(said)[2].splitlines()[0]}")
        return bool(loaded_at() != before)

    if not eventually(taken, STOP_SECONDS):
        raise ServerProcessError(f"{node.name} did not say within {STOP_SECONDS:.0f} s that it took it over")


def _end_in_order(node: Node) -> None:
    """Signal a node that was started, and remove its record when it has ended; it is never killed while it reads its
    store.
    """
    _signal(node, signal.SIGTERM)
    if eventually(lambda: not is_running(node), STOP_SECONDS):
        _forget(node)
    _reap()


def _end(nodes: Iterable[Node], *, number: signal.Signals, within: float) -> None:
    """Signal the nodes, and kill those that are still there after `within` seconds."""
    nodes = list(nodes)
    for node in nodes:
        _signal(node, number)
    if not eventually(lambda: not any(map(is_running, nodes)), within):
        for node in nodes:
            _signal(node, signal.SIGKILL)
        if not eventually(lambda: not any(map(is_running, nodes)), STOP_SECONDS):
            names = ", ".join(node.name for node in nodes if is_running(node))
            raise ServerProcessError(f"{names} did not end, although killed")
    _reap()


def _reap() -> None:
    for pid, child in list(_CHILDREN.items()):
        if child.poll() is not None:
            del _CHILDREN[pid]


def _signal(node: Node, number: signal.Signals) -> None:
    def known() -> bool:
        with suppress(OSError, ValueError):
            return bool(node.pid)
        return False

    if is_running(node) and eventually(lambda: known() or not is_running(node), PID_SECONDS) and is_running(node):
        with suppress(ProcessLookupError):
            os.kill(node.pid, number)


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true, and return whether it became so in time. It is checked 50 times a second."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
