"""Starts and controls keepers: small processes, each of which runs one program and remains the ancestor of all
processes that the program starts.

``keeper.c`` describes the program and its protocol. A keeper is a child subreaper, so the kernel knows which processes
belong to its program: all of the keeper's descendants. A keeper survives the agent. The next agent finds the keeper's
socket in a directory that only root (or the agent's user) can enter, and learns whether and how the program has exited.

All functions must be called on the event loop's thread, except those whose docstrings say that they block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import logging
import math
import os
import pwd
import re
import resource
import secrets
import signal
import socket
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent_shim.core.errors import HostError
from agent_shim.host import clock, files, proc, process
from agent_shim.host.descriptors import closing
from agent_shim.host.process import Process

logger = logging.getLogger(__name__)

PROGRAM: Final = Path(__file__).with_name("keeper")
"""The executable, which ``hatch_build.py`` compiles from ``keeper.c``."""
_ADOPTED_SLOT: Final = 1
"""Slot in which a keeper records the exit of the process that was adopted last, even while no agent is running."""
_ASKED_SLOT: Final = 16
"""Slot for the request with which the agent asks how a process exited. Earlier versions used the slots from 1
upwards.
"""
START_TIMEOUT_S: Final = 30.0
"""Timeout for executing a program, whose file may be on a dead file server."""
ANSWER_TIMEOUT_S: Final = 10.0
KILL_TIMEOUT_S: Final = 10.0
"""How long to wait until all killed processes have exited. A process that is stuck in the kernel takes longer."""
RECONNECT_PAUSE_S: Final = 1.0
"""If a keeper disconnects again within this time after a reconnection, the agent gives up on it."""
_PACKET_BYTES: Final = 4096
_NAME: Final = re.compile(r"[^@]+@(?P<ticks>[0-9a-f]+)-[0-9a-f]{8}")
"""Matches the name of a keeper's socket: the quoted label, ``@``, the time just before the keeper's start in ticks
since boot, and a random number.
"""
_NOT_EXECUTABLE: Final = 8
"""``MFD_NOEXEC_SEAL`` of ``linux/memfd.h`` (since Linux 6.3). The sysctl ``vm.memfd_noexec`` may require it."""


class User(msgspec.Struct, frozen=True):
    """A program's user and group, where None means the agent's own. If ``uid`` is set, the program has no supplementary
    groups.
    """

    uid: int | None = None
    gid: int | None = None


class Program(msgspec.Struct, frozen=True):
    """A program to run, with its environment, working directory, standard streams, user and limits."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    stdin: int | None = None
    """Descriptors of the standard streams. None means ``/dev/null``."""
    stdout: int | None = None
    stderr: int | None = None
    user: User = User()
    nice: int = 0
    limits: Mapping[int, tuple[int, int]] = {}
    """Soft and hard limit by resource, which is a constant of the module ``resource`` (``RLIMIT_NOFILE``). -1 means
    unlimited.
    """


class Exit(msgspec.Struct, frozen=True):
    """How and when a process exited."""

    pid: int
    status: int
    """Exit code, or 128+N after signal N."""
    at: float
    """When the process exited, in seconds since boot as returned by ``clock.boot_time``."""


class StartFailure(msgspec.Struct, frozen=True):
    """The step at which preparing or executing a program failed."""

    step: str
    errno: int


class KeeperState(msgspec.Struct, frozen=True):
    """The state that a keeper reports. A field that is missing from the report has its default value."""

    keeper: int
    """Pid of the keeper."""
    program: int
    """Pid of the program, even after it has exited."""
    version: int = 1
    phase: str = "running"
    """``starting`` until the program is executed, then ``running`` (even after it has exited), or ``failed`` if it was
    not executed.
    """
    failed: StartFailure | None = None
    exits: Mapping[int, Exit] = {}
    """How the program (slot 0) and the watched processes exited, by slot."""
    reaped: int = 0
    """Number of children that the keeper has reaped, including inherited ones."""
    is_killing: bool = False
    """True once the keeper has been asked to kill its descendants."""
    is_childless: bool = False
    """True once all of the keeper's descendants have exited. It never becomes False again."""


def user(name: str | None, group: str | None) -> User:
    """Look up a program's user and group, given as names or numbers. If the agent is not root, the program keeps the
    agent's user and group.

    As in monit (spawn.c), the user's primary and supplementary groups are not used. Without ``group``, the program
    keeps the agent's group. Raises ``HostError`` "there is no user X".
    """
    if (name is None and group is None) or os.geteuid() != 0:
        return User()
    uid = gid = None
    try:
        if name is not None:
            uid = int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise HostError(f"there is no user {name}") from None
    try:
        if group is not None:
            gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise HostError(f"there is no group {group}") from None
    return User(uid, gid)


class Keeper:
    """A connection to one keeper."""

    def __init__(self, directory: Path, name: str, connection: socket.socket) -> None:
        self.name: Final = name
        """Name of the keeper's socket."""
        self.label: Final = label_of(name)
        """Label of the program's owner, for example a service or a job's scripts."""
        self.state = KeeperState(0, 0)
        """The keeper's latest report."""
        self.since = clock.boot_ticks()
        """Start tick of the keeper or, while that is unknown, a later tick."""
        self.parent = 0
        """Pid of the keeper's parent, which would inherit the keeper's processes, or 0 if unknown."""
        self.is_lost = False
        """True if the keeper was killed or keeps disconnecting although it was not released and had descendants."""
        self.on_change: Callable[[], None] | None = None
        """Called after each report, and when the keeper is lost."""
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._reconnected_at = -math.inf
        self.is_released = False
        """True if the keeper was asked to exit once it has no descendants, and the connection is closed."""
        self._changed = asyncio.Event()
        self._answers: deque[asyncio.Future[KeeperState]] = deque()
        """Futures of the pending requests, oldest first."""
        self._attach(connection)

    def __repr__(self) -> str:
        return f"<Keeper {self.state.keeper} of {self.label}>"

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Pid of the keeper. All its descendants belong to ``label``."""
        return self.state.keeper

    @property
    def program_exit(self) -> Exit | None:
        """How the program exited, or None while it is running or if it was never executed."""
        return None if self.state.failed else self.state.exits.get(0)  # the program has slot 0

    def exit_of(self, identity: tuple[int, int]) -> Exit | None:
        """Return how the program or a watched process exited, or None if the keeper has not reported its exit."""
        return _exit_in(self.state, identity)

    async def status_of(self, identity: tuple[int, int]) -> int | None:
        """Return the status of a process that has exited, or None if its own parent has reaped it or the keeper is
        lost.

        Wait for the keeper to reap the process if it is the keeper's child, but not if another process has to reap it.
        """
        ended = self.exit_of(identity)
        awaits_keeper = True
        while awaits_keeper and ended is None and not self.is_lost:
            zombie = proc.stat(identity[0])
            awaits_keeper = zombie is not None and zombie.identity == identity and zombie.parent == self.pid
            if awaits_keeper:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(process.POLL_S):
                        await self._changed.wait()
            # If the keeper has reaped the process, the answer says how it exited. A later answer might not, because the
            # slot is reused for other processes.
            try:
                ended = _exit_in(await self.request(_watch(_ASKED_SLOT, identity)), identity)
            except HostError:
                # The request fails if the keeper has been released, which happens as soon as it reports that it has no
                # children. That report already contains the exit.
                ended = self.exit_of(identity)
        return None if ended is None else ended.status

    def adopt(self, pid: int, start_ticks: int | None = None) -> Process | None:
        """Watch a descendant. Return None if it is gone, is a zombie, or did not start at ``start_ticks``."""
        adopted = process.adopt(pid, start_ticks, self)
        if adopted is not None and pid != self.state.program:  # the program's exit is always recorded
            with contextlib.suppress(HostError):  # if this fails, the exit status may be unknown later
                self._send(_watch(_ADOPTED_SLOT, adopted.identity))
        return adopted

    async def program_process(self) -> Process:
        """Return the program's process. If it has already exited, its start time is unknown, so the keeper's start time
        is used instead.
        """
        running = None if self.program_exit else process.adopt(self.state.program, None, self)
        if running is not None and proc.nearest(running.identity, (self.pid,)) == self.pid:
            return running
        if running is not None:  # the program's pid now belongs to another process
            running.release()
        with contextlib.suppress(HostError):
            await self.wait()
        ended = self.program_exit
        return process.ended((self.state.program, self.since), None if ended is None else ended.status, self)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so`` returns True, which is checked after each report. Raises ``HostError`` once the
        connection to the keeper is lost.
        """
        while not is_so():
            if self.is_lost:
                raise HostError(f"cannot follow the processes of {self.label}: their keeper was killed")
            await self._changed.wait()

    async def wait(self) -> Exit:
        """Wait until the program has exited. Raises ``HostError`` once the connection to the keeper is lost."""
        await self.until(lambda: self.program_exit is not None)
        assert self.program_exit is not None
        return self.program_exit

    async def is_childless_within(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all descendants have exited. Return True if they have. Raises ``HostError`` once
        the keeper is lost.
        """
        # Do not use asyncio.timeout, because the calling task may be in the middle of a cancellation. Before Python
        # 3.11.3, the timeout never expires in such a task.
        waiting = asyncio.ensure_future(self.until(lambda: self.state.is_childless))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=seconds)
        finally:
            waiting.cancel()
        for finished in done:
            finished.result()  # raises the HostError from ``until``, if any
        return self.state.is_childless

    def processes(self) -> list[proc.Stat]:
        """Return the keeper's living descendants. This method blocks."""
        if not self.pid:  # the keeper has not reported yet
            return []
        return [descendant for descendant in proc.below(self.pid).values() if descendant.is_alive]

    # --- actions ------------------------------------------------------------------------------------------------------

    async def send_all(self, number: signal.Signals) -> list[proc.Stat]:
        """Send a signal once to each current descendant. Return those processes."""

        def send() -> list[proc.Stat]:
            return [descendant for descendant in self.processes() if process.send(descendant.identity, number)]

        return await asyncio.to_thread(send)  # use a pool thread, because jobs may have exhausted the thread limit

    async def kill(self) -> None:
        """Tell the keeper to kill all its descendants, without waiting until they have exited (see
        ``is_childless_within``).
        """
        try:
            await self.request("kill")
        except HostError:
            # The last descendant may have exited before the request arrived. In that case, the supervisor has
            # released the keeper, so the keeper no longer answers.
            if not self.state.is_childless:
                raise

    async def end(self, grace: float) -> bool:
        """Send SIGTERM to all descendants, then SIGKILL after ``grace`` seconds, or only SIGKILL if ``grace`` is 0.
        Return False if some survive SIGKILL.

        ``state.is_killing`` says whether SIGKILL was needed. Raises ``HostError`` if the keeper is lost.
        """
        if grace > 0 and not self.state.is_childless:
            await self.send_all(signal.SIGTERM)
        if not await self.is_childless_within(grace):
            await self.kill()
        return await self.is_childless_within(KILL_TIMEOUT_S)

    async def abandon(self) -> None:
        """Kill all descendants and release the keeper. This is used when nobody is waiting for the program any more."""
        try:
            with contextlib.suppress(HostError):  # the keeper is lost, so there is nothing to control any more
                await self.end(0)
        finally:
            self.release()

    def release(self) -> None:
        """Disconnect, and let the keeper exit as soon as all its descendants have exited. The exit statuses that the
        keeper has recorded are then lost.
        """
        self.is_released = True
        with contextlib.suppress(OSError):
            self._connection.send(b"release")
        with contextlib.suppress(OSError):
            (self._directory / self.name).unlink()
        self.close()

    def close(self) -> None:
        """Disconnect, which fails all pending requests. The keeper keeps running."""
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()
        self._fail()

    async def request(self, text: str) -> KeeperState:
        """Send a request and return the state in the answer. Raises ``HostError`` if this fails or the keeper rejects
        the request.
        """
        return await self._answer(self._send(text))

    def _send(self, text: str) -> asyncio.Future[KeeperState]:
        """Send a request and return a future for the answer. The keeper answers requests in order."""
        try:
            self._connection.send(text.encode())
        except OSError as exc:
            raise files.failed(f"ask the keeper of {self.label}", exc) from exc
        answer: asyncio.Future[KeeperState] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # no warning if nobody awaits it
        self._answers.append(answer)
        return answer

    async def _answer(self, answer: asyncio.Future[KeeperState]) -> KeeperState:
        """Wait for the answer to a request. Raises ``HostError`` after a timeout."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise HostError(f"cannot ask the keeper of {self.label}: it does not answer") from None

    # --- the connection -----------------------------------------------------------------------------------------------

    def _attach(self, connection: socket.socket) -> None:
        """Start reading from a new connection."""
        self._connection = connection
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def _read(self) -> None:
        """Read the packets that have arrived."""
        while True:
            try:
                packet = self._connection.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the keeper exited without reading all requests, but its last reports can still be read
            except OSError:
                packet = b""
            if not packet:
                self._disconnected()
                return
            self._take(packet.decode(errors="replace"))

    def _take(self, packet: str) -> None:
        """Store the state that a packet contains. If the packet is an answer, pass it to the oldest pending request."""
        kind, self.state = parse(packet)
        if kind != "state" and self._answers:
            answer = self._answers.popleft()
            if answer.done():  # the caller no longer waits
                pass
            elif kind == "ok":
                answer.set_result(self.state)
            else:
                answer.set_exception(HostError(f"cannot ask the keeper of {self.label}: it refuses the request"))
        self._wake()

    def _disconnected(self) -> None:
        """Reconnect unless the keeper was released. If reconnecting fails and the keeper had descendants, it counts as
        lost.
        """
        self.close()
        if not self.is_released and not self._reconnect():
            # A keeper without children is not lost. It has exited because of SIGTERM, for example when the machine
            # shuts down, and its last report is complete. The socket of a killed keeper is not removed, so that the
            # next agent notices the loss too.
            self.is_lost = not self.state.is_childless
            if not self.is_lost:
                with contextlib.suppress(OSError):
                    (self._directory / self.name).unlink()
            self._wake()

    def _reconnect(self) -> bool:
        """Reconnect, because another client may have connected to the keeper, which serves only the latest client.
        Return False if the keeper has exited or disconnects repeatedly. A keeper may exit once it is childless.
        """
        now = self._loop.time()
        if self.state.is_childless or now - self._reconnected_at < RECONNECT_PAUSE_S:
            return False
        self._reconnected_at = now
        try:
            self._attach(_connect(self._directory / self.name))
        except OSError:
            return False
        logger.warning("the keeper of %s has served another client; connected again", self.label)
        return True

    def _wake(self) -> None:
        """Wake every task that waits for a change, and call ``on_change``."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self.on_change is not None:
            self.on_change()

    def _fail(self) -> None:
        """Fail all pending requests, because the connection is closed."""
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(HostError(f"cannot ask the keeper of {self.label}: the connection is closed"))


# --- starting and finding ---------------------------------------------------------------------------------------------


async def spawn(
    directory: Path, label: str, program: Program, on_created: Callable[[Keeper], None] = lambda _: None
) -> Keeper:
    """Start a program as the child of a new keeper, and return once its ``execve`` has succeeded. ``directory``
    contains the sockets of all keepers.

    ``on_created`` is called with the keeper before the program starts, so that the caller can tell which keeper the
    program's processes belong to.

    Raises ``HostError`` "cannot run PROGRAM: why" if the ``execve`` fails. In that case the keeper is released, unless
    it was killed or the ``execve`` hangs in the kernel.
    """
    what = f"run {program.argv[0]}"
    with contextlib.ExitStack() as opened, files.attempting(what):
        with files.attempting(f"make a socket in {directory}"):
            name, listener, connection = _bind(directory, label)
        opened.callback(listener.close)
        try:
            spec = opened.enter_context(closing(spec_file(_spec(program))))
            inherited = [listener.fileno(), spec]
            child = process.spawn(
                ["keeper", *map(str, inherited)],
                env={},
                executable=PROGRAM,
                stdin=program.stdin,
                stdout=program.stdout,
                stderr=program.stderr,
                inherited=inherited,
            )
        except BaseException:
            # The keeper may be running already, because the spawn can fail after the fork if no descriptor is free.
            with contextlib.suppress(OSError):
                connection.send(b"kill")
                connection.send(b"release")
            connection.close()
            (directory / name).unlink()
            raise
    keeper = Keeper(directory, name, connection)
    keeper.since, keeper.parent = child.start_ticks, os.getpid()
    keeper.state = KeeperState(child.pid, 0, phase="starting")
    on_created(keeper)
    try:
        # Do not use wait_for, which may swallow a cancellation before Python 3.12.
        async with asyncio.timeout(START_TIMEOUT_S):
            await keeper.until(lambda: keeper.state.phase != "starting")
    except TimeoutError:
        with contextlib.suppress(OSError):
            keeper._connection.send(b"kill")  # noqa: SLF001 - one module
        raise HostError(f"cannot {what}: its file cannot be read in {START_TIMEOUT_S:.0f} s") from None
    except HostError:
        code = None
        with contextlib.suppress(TimeoutError):  # the keeper keeps running if another client has connected to it
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                code = await child.wait()
        # If the keeper cannot start, it exits before running the program, with the error number as its status.
        if code is not None and code < 128:
            keeper.release()
            keeper.is_lost = False  # no process was started, so there can be no orphans
        why = "its keeper does not answer" if code is None else f"its keeper ended: {os.strerror(code)}"
        raise HostError(f"cannot {what}: {why}") from None
    except asyncio.CancelledError:
        await keeper.abandon()
        raise
    if keeper.state.failed is not None:
        keeper.release()
        raise _cannot_run(program, keeper.state.failed)
    return keeper


async def find(directory: Path) -> tuple[list[Keeper], dict[str, int]]:
    """Connect to the keepers of an earlier agent and return them. The ``pid`` of a keeper that does not answer is 0.

    Also return a dictionary of the keepers that cannot be reached or have exited without being released. It maps their
    socket names to their start ticks.
    """
    keepers = []
    ended: dict[str, int] = {}
    for name in _names(directory):
        try:
            keeper = Keeper(directory, name, _connect(directory / name))
        except FileNotFoundError:
            continue
        except OSError as exc:
            if exc.errno != errno.ECONNREFUSED:
                logger.error("cannot connect to the keeper %s: %s", name, exc)
            ended[name] = _start_of(name)
            continue
        keepers.append(keeper)

    async def await_report(keeper: Keeper) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await keeper.until(lambda: keeper.pid > 0)
        except TimeoutError:
            logger.error("cannot use the keeper %s: it does not answer", keeper.name)
        except HostError:  # the keeper has exited, or serves another client
            keepers.remove(keeper)
            ended[keeper.name] = _start_of(keeper.name)
        else:
            if stat := proc.stat(keeper.pid):
                keeper.since, keeper.parent = stat.start_ticks, stat.parent

    await asyncio.gather(*map(await_report, keepers))
    return keepers, ended


def living(directory: Path) -> list[KeeperState]:
    """Return the states of the keepers that still have descendants. This function blocks for at most a second per
    keeper.

    This call disconnects a running agent from its keepers, because a keeper serves only the latest client.
    """
    states = []
    for name in _names(directory):
        with contextlib.suppress(OSError), _connect(directory / name) as connection:
            connection.settimeout(1.0)
            state = parse(connection.recv(_PACKET_BYTES).decode(errors="replace"))[1]
            if not state.is_childless:
                states.append(state)
    return states


def release_all(directory: Path) -> None:
    """Let every keeper exit as soon as it has no descendants, and remove the directory. This function blocks."""
    for name in _names(directory):
        with contextlib.suppress(OSError), _connect(directory / name) as connection:
            connection.send(b"release")
    files.remove_tree(directory)


def parse(packet: str) -> tuple[str, KeeperState]:
    """Parse a packet from a keeper. Return its kind (``state``, ``ok`` or ``error``) and the state. Unknown words are
    skipped.
    """
    kind, *words = packet.split(" ")
    state: dict[str, object] = {"keeper": 0, "program": 0}
    exits: dict[int, Exit] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("version", "keeper", "program", "reaped"):
            state[key] = int(value)
        elif key in ("killing", "childless"):
            state[f"is_{key}"] = value != "0"
        elif key == "phase":
            state[key] = value
        elif key == "failed":
            step, _, number = value.partition(":")
            state[key] = StartFailure(step, int(number))
        elif key == "exit":
            slot, pid, status, at_ms = map(int, value.split(":")[:4])  # other versions may append more numbers
            code = os.waitstatus_to_exitcode(status)
            exits[slot] = Exit(pid, code if code >= 0 else 128 - code, at_ms / 1000)
    return kind, KeeperState(exits=exits, **state)  # type: ignore[arg-type]


def label_of(name: str) -> str:
    """Return the label encoded in a socket's name."""
    return os.fsdecode(urllib.parse.unquote_to_bytes(name.rpartition("@")[0]))


def _start_of(name: str) -> int:
    """Return the clock tick in a socket's name. All of the keeper's processes started at that tick or later."""
    named = _NAME.fullmatch(name)
    assert named is not None
    return int(named["ticks"], 16)


def _exit_in(state: KeeperState, identity: tuple[int, int]) -> Exit | None:
    """Return how the program or a watched process exited. Return None if ``state`` does not contain its exit."""
    pid, start_ticks = identity
    for ended in state.exits.values():
        # An exit before this start time is that of an earlier process with the same pid.
        if ended.pid == pid and ended.at >= start_ticks / clock.TICKS:
            return ended
    return None


def _watch(slot: int, identity: tuple[int, int]) -> str:
    """Return the request that tells a keeper to record a process's exit in ``slot``."""
    pid, start_ticks = identity
    return f"watch {slot} {pid} {start_ticks * 1000 // clock.TICKS}"  # the start time in milliseconds


def _bind(directory: Path, label: str) -> tuple[str, socket.socket, socket.socket]:
    """Create a listening socket in the directory. Return its name, the socket, and a connection to it.

    The socket is bound to a short name relative to a descriptor, because its path may be too long for a socket address.
    It is renamed once it is listening, so that ``find`` does not see it earlier.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = f"{clock.boot_ticks():x}-{secrets.token_hex(4)}"
    name = f"{urllib.parse.quote(os.fsencode(label), safe='')}@{token}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with closing(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
            listener.bind(f"/proc/self/fd/{parent}/@{token}")
            os.chmod(f"@{token}", 0o600, dir_fd=parent)
            listener.setblocking(False)
            listener.listen()
            os.rename(f"@{token}", name, src_dir_fd=parent, dst_dir_fd=parent)
        return name, listener, _connect(directory / name)
    except BaseException:
        listener.close()
        for socket_name in (f"@{token}", name):
            with contextlib.suppress(OSError):
                (directory / socket_name).unlink()
        raise


def _names(directory: Path) -> list[str]:
    """Return the names of all keeper sockets in the directory."""
    try:
        return sorted(path.name for path in directory.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def _connect(path: Path) -> socket.socket:
    """Connect to a keeper's socket. The socket is addressed through a descriptor, because its path may be too long."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        with closing(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as path_fd:
            connection.connect(f"/proc/self/fd/{path_fd}")
    except BaseException:
        connection.close()
        raise
    return connection


def _spec(program: Program) -> Iterator[str]:
    """Yield the instructions for executing a program, in the order in which the keeper's child follows them."""
    limits = dict(program.limits)
    if resource.RLIMIT_NOFILE not in limits and (file_limits := process.file_limits_of_children()):
        limits[resource.RLIMIT_NOFILE] = file_limits
    # C represents Python's -1 (unlimited) as an unsigned number.
    yield from (f"limit={number}:{soft % 2**64}:{hard % 2**64}" for number, (soft, hard) in limits.items())
    if program.nice:
        yield f"nice={os.nice(0) + program.nice}"  # ``nice`` is relative to the agent's value
    yield f"cwd={program.cwd}"
    if program.user.uid is not None:
        yield "groups="  # remove all supplementary groups
    if program.user.gid is not None:
        yield f"gid={program.user.gid}"
    if program.user.uid is not None:
        yield f"uid={program.user.uid}"
    yield f"exec={_path(program)}"
    yield from (f"arg={argument}" for argument in program.argv)
    yield from (f"env={name}={value}" for name, value in program.env.items())


def _path(program: Program) -> str:
    """Return the file to execute. A name without a slash is searched for in the program's PATH."""
    import shutil

    name = program.argv[0]
    return name if "/" in name else shutil.which(name, path=program.env.get("PATH", os.defpath)) or name


def spec_file(instructions: Iterator[str]) -> int:
    """Return a descriptor of an in-memory file with the instructions for ``keeper.c``."""
    strings = [os.fsencode(instruction) for instruction in instructions]
    if any(b"\0" in string for string in strings):  # the text after a NUL would be read as another instruction
        raise OSError(errno.EINVAL, "an argument or variable contains a NUL")
    content = b"".join(string + b"\0" for string in strings)
    try:
        spec = os.memfd_create("spec", os.MFD_CLOEXEC | _NOT_EXECUTABLE)
    except OSError:  # the kernel is too old for the flag
        spec = os.memfd_create("spec", os.MFD_CLOEXEC)
    with open(spec, "wb", closefd=False) as file:
        file.write(content)
    return spec


_ARGUMENT: Final = {"cwd": "its directory", "uid": "its user", "gid": "its group", "groups": "its groups"}


def _cannot_run(program: Program, failure: StartFailure) -> HostError:
    """Return an error that says which step failed and why."""
    name, why = program.argv[0], os.strerror(failure.errno)
    if failure.step == "exec":
        if failure.errno == errno.ENOENT and os.path.exists(_path(program)):  # noqa: PTH110 - the path is a str
            why = "the interpreter that it names is missing"
        error = HostError(f"cannot run {name}: {why}")
    elif failure.step == "cwd":
        error = HostError(f"cannot run {name} with {program.cwd}: {why}")
    else:
        error = HostError(f"cannot run {name}: {_ARGUMENT.get(failure.step, failure.step)}: {why}")
    error.errno = failure.errno
    return error
