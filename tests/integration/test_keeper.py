"""Tests keepers with real processes. A keeper starts a program, kills all of its descendants on request, and accepts a
connection from the next agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import hatch_build
from agent_shim.core.errors import HostError
from agent_shim.host import blocking, clock, keeper, proc
from agent_shim.host.keeper import Keeper, Program
from tests.support.source import ROOT

HIDDEN = "(setsid sh -c 'exec env -i sleep 1000' &)"
"""A shell command that leaves a daemon in a new session, without an environment or a living parent."""


OPTIONS = """
const char *__asan_default_options(void) { return "detect_leaks=0:log_path=%s"; }
const char *__ubsan_default_options(void) { return "log_path=%s"; }
"""
"""C source that sets sanitizer options.

The options are compiled in, because a keeper has no environment variables. Reports go to files, because its stderr
belongs to the program. Leak detection is off, because it would need ptrace.
"""


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a keeper with sanitizers, and return its path.

    The keeper reports undefined behaviour and invalid memory accesses in files in the same directory.
    """
    directory = tmp_path_factory.mktemp("sanitized")
    (directory / "options.c").write_text(OPTIONS.replace("%s", str(directory / "finding")))
    sources = [ROOT / f"{hatch_build.KEEPER}.c", directory / "options.c"]
    flags = [*hatch_build.KEEPER_FLAGS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no compiler with sanitizers")
    subprocess.run([compiler, *flags, "-o", directory / "keeper", *sources], check=True)
    return directory / "keeper"


@pytest.fixture(params=["plain", "sanitized"], autouse=True)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test with the normal and with the sanitized keeper. Fail if a sanitizer has written a report."""
    if request.param == "plain":
        yield
        return
    program: Path = request.getfixturevalue("sanitized")
    monkeypatch.setattr(keeper, "PROGRAM", program)
    yield
    assert [path.read_text() for path in program.parent.glob("finding*")] == []


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "keepers"
    yield directory
    for path in directory.iterdir() if directory.exists() else []:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, contextlib.suppress(OSError):
            connection.connect(str(path))
            connection.send(b"release")
            connection.send(b"kill")


def shell(script: str) -> Program:
    return Program(["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]})


async def until_below(kept: Keeper, count: int) -> list[proc.Stat]:
    """Wait until the keeper has ``count`` descendants, and return them."""
    while len(found := kept.processes()) != count:
        await asyncio.sleep(0.01)
    return found


async def end(kept: Keeper) -> None:
    assert await kept.end(0)
    kept.release()


async def test_keeper_kills_a_daemon_in_its_own_session_with_an_empty_environment(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "hidden", shell(HIDDEN))
    assert (await kept.wait()).status == 0
    (daemon,) = await until_below(kept, 1)

    assert proc.nearest(daemon.identity, [kept.pid]) == kept.pid
    assert await kept.end(grace=60)

    assert not kept.state.is_killing
    assert proc.stat(daemon.pid) is None
    kept.release()


@pytest.mark.root
@pytest.mark.parametrize(
    ("user", "group", "ids"),
    [("daemon", None, "1 0 0"), ("daemon", "sys", "1 3 3"), ("4711", "4712", "4711 4712 4712"), ("0", None, "0 0 0")],
)
async def test_keeper_runs_its_program_as_the_requested_user_and_group(
    sockets: Path, tmp_path: Path, user: str, group: str | None, ids: str
) -> None:
    program = msgspec.structs.replace(shell("echo $(id -u) $(id -g) $(id -G)"), user=keeper.user(user, group))
    before = os.getgroups()
    os.setgroups([4, 27])
    try:
        with (tmp_path / "out").open("w") as out:
            kept = await keeper.spawn(sockets, "web", msgspec.structs.replace(program, stdout=out.fileno()))
        assert (await kept.wait()).status == 0
    finally:
        os.setgroups(before)
    kept.release()

    assert (tmp_path / "out").read_text().split() == ids.split()


@pytest.mark.root
@pytest.mark.parametrize("number", ["4294967295", "4294967296"])
async def test_programs_do_not_run_as_root_if_their_user_or_group_is_out_of_range(sockets: Path, number: str) -> None:
    """The kernel interprets 4294967295 (-1) as "keep the current user", and 4294967296 would be truncated to 0."""
    for user, step in (keeper.User(uid=int(number)), "its user"), (keeper.User(gid=int(number)), "its group"):
        with pytest.raises(HostError, match=f"cannot run /bin/true: {step}: Invalid argument"):
            await keeper.spawn(sockets, "web", Program(["/bin/true"], {}, user=user))


def test_unknown_user_is_an_error_only_for_an_agent_with_root_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent without root privileges runs all programs as its own user, so it does not look up the configured
    user.
    """
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(HostError, match="there is no user nosuch"):
        keeper.user("nosuch", None)
    with pytest.raises(HostError, match="there is no user ²"):
        keeper.user("²", None)
    with pytest.raises(HostError, match="there is no group nosuch"):
        keeper.user("root", "nosuch")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert keeper.user("nosuch", "nosuch") == keeper.User()


async def test_keeper_kills_processes_that_ignore_sigterm(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "stubborn", shell("trap '' TERM; echo; sleep 1000 & while :; do wait; done"))
    await until_below(kept, 2)

    assert await kept.end(grace=0.2)

    assert kept.state.is_killing
    assert kept.program_exit == keeper.Exit(kept.state.program, 128 + signal.SIGKILL, kept.state.exits[0].at)
    kept.release()


@pytest.mark.attack("a job makes its keeper its tracer (PTRACE_TRACEME), so that it cannot be stopped")
async def test_program_that_is_traced_by_its_keeper_counts_as_running_until_it_is_killed(sockets: Path) -> None:
    """A program needs no privileges to make its parent its tracer. The keeper then also gets a status whenever
    a signal stops the program.
    """
    script = "import ctypes, signal; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0)); signal.raise_signal(signal.SIGUSR1)"
    kept = await keeper.spawn(sockets, "traced", Program([sys.executable, "-c", script], {}))
    program = kept.state.program
    while (stat := proc.stat(program)) is not None and stat.state != "t":
        await asyncio.sleep(0.01)
    if stat is None:
        pytest.skip("ptrace is not permitted")

    await kept.request("state")
    assert (await kept.request("state")).exits == {}
    assert await kept.end(0)

    assert kept.program_exit is not None
    assert kept.program_exit.status == 128 + signal.SIGKILL
    kept.release()


@pytest.mark.attack("a job makes its keeper its tracer (PTRACE_TRACEME), so that it cannot be stopped")
async def test_program_with_a_thread_that_is_traced_by_its_keeper_can_be_killed(sockets: Path) -> None:
    """The kernel reports that the program has exited only after the keeper has reaped the thread."""
    script = (
        "import ctypes, os, threading, time\n"
        "trace = ctypes.CDLL(None).ptrace\n"
        "threading.Thread(target=lambda: (trace(0, 0, 0, 0) and os._exit(1), time.sleep(1000))).start()"
    )
    kept = await keeper.spawn(sockets, "traced", Program([sys.executable, "-c", script], {}))

    def is_traced() -> bool:
        threads = Path(f"/proc/{kept.state.program}/task").iterdir()
        return any(f"TracerPid:\t{kept.pid}\n" in (each / "status").read_text() for each in threads)

    with contextlib.suppress(FileNotFoundError):
        while not is_traced():
            await asyncio.sleep(0.01)
    if kept.program_exit is not None:
        pytest.skip("ptrace is not permitted")

    assert await kept.end(0)

    kept.release()


async def test_next_agent_finds_keepers_and_missed_exit_statuses(sockets: Path) -> None:
    first = await keeper.spawn(sockets, "a/b c", shell("sleep 1000 & exec sleep 1000"))
    program = first.state.program
    (other,) = [each for each in await until_below(first, 2) if each.pid != program]
    adopted = first.adopt(other.pid)
    assert adopted is not None
    await first.request("state")
    adopted.release()
    first.close()
    os.kill(other.pid, signal.SIGUSR1)
    os.kill(program, signal.SIGTERM)

    (second,), _ = await keeper.find(sockets)

    assert (second.label, second.pid) == ("a/b c", first.pid)
    assert (await second.wait()).status == 128 + signal.SIGTERM
    assert await second.is_childless_within(60)
    missed = second.exit_of(other.identity)
    assert missed is not None
    assert missed.status == 128 + signal.SIGUSR1
    assert missed.at <= clock.boot_time()
    await end(second)
    assert await keeper.find(sockets) == ([], {})


async def test_keeper_does_not_report_the_exit_of_an_earlier_process_with_the_same_pid(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "reuse", shell("sleep 0 & wait; exec sleep 1000"))
    program = kept.state.program
    await kept.kill()
    ended = await kept.wait()

    assert await kept.status_of((program, clock.boot_ticks() + 100)) is None
    assert await kept.status_of((program, 0)) == ended.status
    await end(kept)


async def test_exit_statuses_of_processes_that_exit_together_are_reported(sockets: Path, tmp_path: Path) -> None:
    """One job script may start the daemons of several services, and then they all have the same keeper."""
    go = tmp_path / "go"
    daemon = f"while [ ! -e {go} ]; do sleep 0.01; done; exit $0"
    kept = await keeper.spawn(sockets, "together", shell(f"for code in 3 4 5; do sh -c '{daemon}' $code & done"))
    await kept.wait()
    daemons = [each for each in kept.processes() if each.parent == kept.pid]
    go.touch()
    await kept.until(lambda: kept.state.is_childless)

    statuses = await asyncio.gather(*(kept.status_of(each.identity) for each in daemons))
    assert sorted(map(str, statuses)) == ["3", "4", "5"]
    kept.release()


async def test_exit_status_is_known_if_the_keeper_is_released_right_after_reporting_it(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "released", shell("exec sleep 1000"))
    program = proc.stat(kept.state.program)
    assert program is not None
    kept.on_change = lambda: kept.release() if kept.state.is_childless else None
    status = asyncio.ensure_future(kept.status_of(program.identity))
    await asyncio.sleep(0)
    os.kill(program.pid, signal.SIGKILL)

    assert await status == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (Program(["/nowhere/x"], {}), "cannot run /nowhere/x: No such file or directory"),
        (Program([__file__], {}), f"cannot run {__file__}: Permission denied"),
        (Program(["/bin/true"], {}, cwd="/nowhere"), "cannot run /bin/true with /nowhere: No such file or directory"),
        (
            Program(["/bin/true"], {}, limits={resource.RLIMIT_NOFILE: (9, 8)}),
            "cannot run /bin/true: limit: Invalid argument",
        ),
        (
            Program(["/bin/true", "a\0exec=/bin/false"], {}),
            "cannot run /bin/true: an argument or variable contains a NUL",
        ),
    ],
    ids=["missing", "not executable", "directory", "limit", "NUL"],
)
async def test_failed_keeper_start_names_the_step(sockets: Path, program: Program, text: str) -> None:
    with pytest.raises(HostError) as caught:
        await keeper.spawn(sockets, "failing", program)

    assert str(caught.value) == text
    assert list(sockets.iterdir()) == []


async def test_keeper_starts_a_program_with_the_requested_context(sockets: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    script = (
        "import os, resource, signal, sys\n"
        "print([int(each) for each in os.listdir('/proc/self/fd')][:-1], os.getcwd(), os.getsid(0) == os.getpid(),\n"
        " oct(os.umask(0)), os.nice(0), resource.getrlimit(resource.RLIMIT_FSIZE), os.environ['A'] == 'x=' * 50000,\n"
        " signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM).name, len(sys.argv[1]))\n"
    )
    env = {"A": "x=" * 50000}
    argv = [sys.executable, "-S", "-c", script, "y" * 100_000]
    nice = os.nice(0) + 1
    with shown.open("w") as output:
        limits = {resource.RLIMIT_FSIZE: (1 << 40, -1)}
        program = Program(argv, env, str(tmp_path), stdout=output.fileno(), nice=1, limits=limits)
        kept = await keeper.spawn(sockets, "asked", program)
    assert (await kept.wait()).status == 0

    assert shown.read_text() == f"[0, 1, 2] {tmp_path} True 0o22 {nice} ({1 << 40}, -1) True set() SIG_DFL 100000\n"
    await end(kept)


async def test_keeper_can_be_stopped_when_no_thread_can_be_started(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop must work even if jobs have used up the container's process limit."""
    asyncio.get_running_loop().set_default_executor(blocking.pool(2))
    kept = await keeper.spawn(sockets, "storm", shell("exec sleep 1000"))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert await kept.end(grace=60)

    assert not kept.state.is_killing
    kept.release()


async def test_keeper_label_may_contain_any_bytes(sockets: Path) -> None:
    """Service names in a monit file may be encoded in Latin-1."""
    kept = await keeper.spawn(sockets, os.fsdecode(b"caf\xe9"), shell("exec sleep 1000"))

    assert os.fsencode(kept.label) == b"caf\xe9"
    await end(kept)


async def test_failed_keeper_leaves_no_socket(sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next agent would assume that a remaining socket belongs to a killed keeper."""
    failing = tmp_path / "keeper"
    failing.write_text("#!/bin/sh\nexit 24\n")
    failing.chmod(0o755)
    monkeypatch.setattr(keeper, "PROGRAM", failing)

    with pytest.raises(HostError, match="its keeper ended: Too many open files"):
        await keeper.spawn(sockets, "failing", shell("exit 0"))

    assert list(sockets.iterdir()) == []


async def test_keeper_start_without_free_descriptors_leaves_no_socket(sockets: Path) -> None:
    """The start is tried with zero, one, two and more free descriptors so that it fails once at every step."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
    taken, kept = [os.open("/dev/null", os.O_RDONLY)], None
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        while kept is None:
            with contextlib.suppress(HostError):
                kept = await keeper.spawn(sockets, "short", shell("exec sleep 1000"))
            os.close(taken.pop())
            assert kept is not None or list(sockets.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)

    await end(kept)


async def test_keeper_is_released_even_if_abandoning_it_is_cancelled(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "abandoned", shell("exec sleep 1000"))
    os.kill(kept.pid, signal.SIGSTOP)
    abandoning = asyncio.ensure_future(kept.abandon())
    await asyncio.wait({abandoning}, timeout=0.1)
    abandoning.cancel()
    await asyncio.wait({abandoning})
    os.kill(kept.pid, signal.SIGCONT)

    while proc.stat(kept.pid) is not None:
        await asyncio.sleep(0.01)
    assert list(sockets.iterdir()) == []


async def test_kill_succeeds_if_the_keeper_is_released_before_it_answers(sockets: Path) -> None:
    """If the last descendant exits while the kill request is in progress, the supervisor releases the keeper before the
    keeper answers.
    """
    kept = await keeper.spawn(sockets, "gone", shell("exec sleep 1000"))
    kept.on_change = lambda: kept.release() if kept.state.is_childless else None
    os.kill(kept.state.program, signal.SIGKILL)
    while proc.stat(kept.state.program) is not None:  # do not await, so that the keeper's report stays unread
        time.sleep(0.001)  # noqa: ASYNC251

    await kept.kill()

    assert kept.is_released


async def test_killed_keeper_is_reported_as_lost(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "lost", shell("exec sleep 1000"))
    program = kept.state.program
    os.kill(kept.pid, signal.SIGKILL)

    with pytest.raises(HostError, match="cannot follow the processes of lost: their keeper was killed"):
        await kept.wait()

    assert kept.is_lost
    os.kill(program, signal.SIGKILL)


async def test_keeper_rejects_unknown_requests_and_keeps_the_connection(sockets: Path) -> None:
    kept = await keeper.spawn(sockets, "older", shell("exec sleep 1000"))

    with pytest.raises(HostError, match="it refuses the request"):
        await kept.request("a request of a later version")

    assert (await kept.request("state")).phase == "running"
    await end(kept)


def test_unknown_fields_in_a_keeper_state_are_skipped() -> None:
    kind, state = keeper.parse("state version=9 keeper=1 program=2 new=3 exit=0:2:256:5000:more childless=1")

    assert kind == "state"
    assert state == keeper.KeeperState(1, 2, 9, exits={0: keeper.Exit(2, 1, 5.0)}, is_childless=True)


@pytest.mark.parametrize("sig", [signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGUSR1, signal.SIGTERM])
async def test_keeper_with_children_ignores_signals(sockets: Path, sig: signal.Signals) -> None:
    kept = await keeper.spawn(sockets, "deaf", shell("exec sleep 1000"))
    os.kill(kept.pid, sig)

    assert not (await kept.request("state")).is_childless
    await end(kept)


async def test_keeper_records_exits_even_if_its_parent_ignores_sigchld(sockets: Path) -> None:
    """If the keeper ignored the signal too, the kernel would reap its children and reuse their pids."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        kept = await keeper.spawn(sockets, "ignored", shell("exit 3"))
    finally:
        signal.signal(signal.SIGCHLD, before)

    async with asyncio.timeout(60):
        assert (await kept.wait()).status == 3
    await end(kept)


async def test_keeper_without_children_exits_on_sigterm(sockets: Path) -> None:
    """A keeper gets SIGTERM when the machine shuts down. No agent will connect to the keeper after that."""
    kept = await keeper.spawn(sockets, "shutdown", shell("exit 0"))
    assert await kept.is_childless_within(60)
    os.kill(kept.pid, signal.SIGTERM)

    while proc.stat(kept.pid) is not None:
        await asyncio.sleep(0.01)
    assert not kept.is_lost


async def test_last_report_of_a_keeper_with_unread_requests_arrives(sockets: Path) -> None:
    """If a keeper closes a connection with unread requests, the kernel resets the connection, which could discard
    the report.
    """
    kept = await keeper.spawn(sockets, "shutdown", shell("exec sleep 1000"))
    os.kill(kept.pid, signal.SIGSTOP)
    os.kill(kept.pid, signal.SIGTERM)
    os.kill(kept.state.program, signal.SIGKILL)
    while (stat := proc.stat(kept.state.program)) is not None and stat.is_alive:
        await asyncio.sleep(0.01)
    requests = [asyncio.ensure_future(kept.request("state")) for _ in range(3)]
    await asyncio.sleep(0)
    os.kill(kept.pid, signal.SIGCONT)

    await asyncio.wait(requests)

    assert (await kept.wait()).status == 128 + signal.SIGKILL
    assert (kept.state.is_childless, kept.is_lost) == (True, False)


async def test_all_requests_from_an_agent_are_read_before_the_next_agent_is_served(sockets: Path) -> None:
    """If the keeper skipped requests, a release request could be lost, and the keeper would never exit."""
    kept = await keeper.spawn(sockets, "next", shell("exit 0"))
    pid = kept.pid
    assert await kept.is_childless_within(60)
    (path,) = sockets.iterdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        os.kill(pid, signal.SIGSTOP)
        while (stopped := proc.stat(pid)) is None or stopped.state != "T":
            await asyncio.sleep(0.01)
        connection.connect(str(path))
        asking = asyncio.ensure_future(kept.request("state"))
        await asyncio.sleep(0)
        kept.release()
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait({asking})

        while proc.stat(pid) is not None:
            await asyncio.sleep(0.01)


async def test_keeper_can_be_released_without_reading_its_answers(sockets: Path) -> None:
    """Unread answers must not keep the keeper from processing the release, or it would never exit."""
    kept = await keeper.spawn(sockets, "unread", shell("exit 0"))
    pid = kept.pid
    kept.close()
    (path,) = sockets.iterdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        for _ in range(10):
            connection.send(b"state")
        connection.send(b"release")

    while proc.stat(pid) is not None:
        await asyncio.sleep(0.01)


async def test_agent_that_never_reads_does_not_block_the_keeper(sockets: Path) -> None:
    first = await keeper.spawn(sockets, "slow", shell("exec sleep 1000"))
    first.close()
    (path,) = sockets.iterdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        with contextlib.suppress(ConnectionError):  # raised when the keeper closes the connection
            while True:
                connection.send(b"state")

    (second,), _ = await keeper.find(sockets)
    await end(second)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return a copy of ``content`` in which some bytes are changed, removed, repeated or inserted."""
    made = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(made) + 1)
        end = min(len(made), start + chance.choice([0, 1, 1, 2, 8, 40]))
        made[start:end] = chance.choice(
            [b"", b"\0", b"=", b"?", b"-1", b"99999999999999999999", bytes(made[start:end]) * 3, chance.randbytes(3)]
        )
    return bytes(made)


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_specs_and_requests_do_not_break_the_keeper(
    sockets: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the agent writes specs and requests, so this protects against bugs in the agent, not against attacks."""
    chance = random.Random(seed)
    program = Program(["/bin/true", "a"], {"A": "b"}, nice=1, limits={resource.RLIMIT_CORE: (0, 0)})
    requests = [b"watch 1 99 0", b"state", b"watch 16 -5 7", b"kill"]

    def damaged(instructions: Iterator[str]) -> int:
        whole = b"".join(os.fsencode(each) + b"\0" for each in instructions)
        spec = os.memfd_create("spec")
        os.write(spec, mutated(whole, chance))
        return spec

    monkeypatch.setattr(keeper, "spec_file", damaged)
    for _ in range(15):
        try:
            kept = await keeper.spawn(sockets, "fuzz", program)
        except HostError:
            continue
        for _ in range(30):
            with contextlib.suppress(HostError):
                await kept.request(mutated(chance.choice(requests), chance).decode("latin-1") or "x")
        assert (await kept.request("state")).version == 1
        await end(kept)
