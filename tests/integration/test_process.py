"""Tests spawning, signalling, adopting and reaping real processes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import proc, process, reaper
from tests.support.programs import argv, end_marked, is_alive, number_in
from tests.support.waiting import until

SH = "/bin/sh"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Provide an environment with a variable that identifies this test's processes.

    Processes that remain after the test are killed.
    """
    yield {"PATH": "/bin:/usr/bin", "TEST_OF": str(tmp_path)}
    end_marked("TEST_OF", str(tmp_path))


def shell(script: str) -> list[str]:
    return [SH, "-c", script]


async def test_process_exit_code_is_reported_to_all_waiters(env: dict[str, str]) -> None:
    child = process.spawn(shell("exit 7"), env=env)

    assert await child.wait() == 7
    assert await child.wait() == 7
    unwaited = process.spawn(shell("exit 0"), env=env)
    await until(lambda: proc.stat(unwaited.pid) is None)


async def test_exited_processes_free_their_descriptors(env: dict[str, str]) -> None:
    """When a process is released, its former descriptor must not be closed if a later process has the same number."""
    before = _descriptors()
    children = [process.spawn(shell("exit 0"), env=env) for _ in range(10)]
    released = process.spawn(["/bin/sleep", "600"], env=env)
    released.release()
    children.append(process.spawn(shell("exit 7"), env=env))
    codes = await asyncio.wait_for(asyncio.gather(*(child.wait() for child in children)), 30)

    assert codes == [*[0] * 10, 7]
    assert _descriptors() == before
    assert process.send(released.identity, signal.SIGKILL)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("arguments", "options", "text", "number"),
    [
        ([SH], {"cwd": "/no/dir"}, "cannot run /bin/sh with /no/dir: No such file or directory", errno.ENOENT),
        ([SH, "nul\0"], {}, "cannot run /bin/sh: embedded null byte", None),
    ],
)
async def test_failed_spawn_names_the_program_and_the_reason(
    arguments: list[str], options: dict[str, str], text: str, number: int | None
) -> None:
    with pytest.raises(HostError) as caught:
        process.spawn(arguments, env={}, **options)  # type: ignore[arg-type]

    assert str(caught.value) == text
    assert caught.value.errno == number


@pytest.mark.parametrize(
    ("text", "mode", "why", "number"),
    [
        (None, 0, "No such file or directory", errno.ENOENT),
        (None, 0o755, "Permission denied", errno.EACCES),  # with a mode but no content, the path is a directory
        ("#!/bin/sh\n", 0o644, "Permission denied", errno.EACCES),
        ("#!/no/such/interpreter -e\n", 0o755, "the interpreter that it names is missing", errno.ENOENT),
        ("#!\t/no/such/interpreter\n", 0o755, "the interpreter that it names is missing", errno.ENOENT),
        ("echo no first line\n", 0o755, "Exec format error", errno.ENOEXEC),
    ],
)
async def test_spawning_a_non_executable_file_fails_immediately(
    env: dict[str, str], tmp_path: Path, text: str | None, mode: int, why: str, number: int
) -> None:
    program = tmp_path / "program"
    if text is not None:
        program.write_text(text)
        program.chmod(mode)
    elif mode:
        program.mkdir()
    with pytest.raises(HostError, match=f"^cannot run {program}: {why}$") as caught:
        process.spawn([str(program)], env=env)
    assert caught.value.errno == number


@pytest.mark.attack("a job tricks root into writing a script's output through a symlink or a hard link")
async def test_process_output_is_appended_only_to_regular_files_without_hard_links(
    env: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        await process.spawn(shell("echo out; echo err >&2"), env=env, stdout=log, stderr=log).wait()
    assert log.read_text() == "out\nerr\n" * 2
    assert log.stat().st_mode & 0o777 == 0o640

    os.mkfifo(tmp_path / "lonely")
    os.mkfifo(tmp_path / "read")
    reader = os.open(tmp_path / "read", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "victim").touch()
    (tmp_path / "second").hardlink_to(tmp_path / "victim")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    reasons = dict.fromkeys(("lonely", "read", "link"), "not a regular file") | {"second": "a second hard link"}
    for name, why in reasons.items():
        with pytest.raises(HostError, match=rf"cannot run /bin/sh with .*/{name}: .*{why}"):
            process.spawn(shell("echo x"), env=env, stdout=tmp_path / name)
    assert (tmp_path / "victim").read_bytes() == b""
    os.close(reader)


async def test_spawned_process_has_the_requested_context(env: dict[str, str], tmp_path: Path) -> None:
    script = "pwd; umask; cat | wc -c; ps -o pgid=,sid= -p $$; tr '\\0' '\\n' </proc/$$/environ"
    out = tmp_path / "out"
    env |= {"no.name-of-a-shell": "1"}
    child = process.spawn(shell(script), env=env, cwd=tmp_path, stdout=out)
    assert await child.wait() == 0
    where, umask, size, ps, *variables = out.read_text().splitlines()

    assert (where, umask, size.strip()) == (str(tmp_path), "0022", "0")
    assert ps.split() == [str(child.pid), str(child.pid)]
    assert variables == [f"{name}={value}" for name, value in env.items()]


RAISED = """
import asyncio, os, resource, subprocess, sys
from pathlib import Path
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from agent_shim.host import keeper, process
async def main():
    process.raise_file_limit()
    print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard - 1, hard), flush=True)
    show = ["/bin/sh", "-c", f"test $(ulimit -Hn) = {hard} && ulimit -Sn"]
    kept = await keeper.spawn(Path(sys.argv[1]), "web", keeper.Program(show, {"PATH": "/bin"}, stdout=1))
    await kept.wait()
    kept.release()
    held = ["/bin/sh", "-c", f"read line; {show[-1]}"]
    reading, writing = os.pipe()
    child = process.spawn(held, env={"PATH": "/bin"}, stdin=reading, stdout=1)
    os.write(writing, b"now\\n")
    await child.wait()
    subprocess.run(["prlimit", f"--pid={os.getpid()}", f"--nofile=200:{hard}"], check=True)
    await process.spawn(["/bin/sh", "-c", "ulimit -Sn"], env={"PATH": "/bin"}, stdout=1).wait()
asyncio.run(main())
"""


def test_spawned_process_gets_the_original_limit_on_open_files(tmp_path: Path) -> None:
    """Programs that use ``select`` fail with more than 1024 open files, so they must not inherit the limit that the
    agent has raised for itself.
    """
    done = subprocess.run(
        [sys.executable, "-c", RAISED, str(tmp_path / "keepers")], capture_output=True, text=True, check=True
    )

    assert done.stdout == "True\n100\n100\n200\n", "what prlimit sets is that of the jobs"


@pytest.mark.parametrize("given", [{}, {"LC_CTYPE": "C"}, {"LANG": "C"}, {"LC_CTYPE": "C.UTF-8"}])
def test_scripts_inherit_the_locale_with_which_the_agent_was_started(given: dict[str, str]) -> None:
    """Python changes LC_CTYPE in its own environment if the locale is C."""
    code = "import os; from agent_shim.host import process; print(process.script_environment(os.environ))"
    ran = subprocess.run([sys.executable, "-c", code], env=given, stdout=subprocess.PIPE, check=True, text=True)

    assert ast.literal_eval(ran.stdout) == given


def test_spawn_without_a_free_descriptor_reports_the_reason() -> None:
    program = """
import asyncio, resource
from pathlib import Path
from agent_shim.core.errors import HostError
from agent_shim.host import command, keeper
async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    for work in (command.run("/bin/true"), keeper.spawn(Path.cwd() / "none", "web", keeper.Program(["/bin/true"], {}))):
        try:
            await work
        except HostError as exc:
            print(exc)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        "cannot make a file in memory: Too many open files",
        f"cannot run /bin/true: cannot make a socket in {Path.cwd()}/none: Too many open files",
    ]


@pytest.mark.attack("a job joins the process group of another script, a worker or sshd")
async def test_process_cannot_join_the_process_group_of_a_spawned_program(env: dict[str, str], tmp_path: Path) -> None:
    """If it could join, a process that an earlier script left behind could receive the signals that the agent sends to
    a root script's process group.
    """
    victim = process.spawn(["/bin/sleep", "600"], env=env)
    joining = f"import os; os.setpgid(0, {victim.pid})"
    attacker = process.spawn([sys.executable, "-S", "-c", joining], env=env, stderr=tmp_path / "errors")

    assert await attacker.wait() == 1
    assert "PermissionError" in (tmp_path / "errors").read_text()
    await victim.terminate(1)


SPAWNING = """
import asyncio, sys
from agent_shim.host import process
async def main():
    child = process.spawn(["/bin/sh", "-c", "exec 3<>/dev/tty && echo pushed >&3"], env={}, stderr=2)
    print("code", await child.wait())
asyncio.run(main())
"""


@pytest.mark.attack("a job reads the agent's terminal or types into it")
def test_spawned_process_cannot_access_the_terminal_of_the_agent() -> None:
    """With access to the terminal, the process could read the operator's input and type commands."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SPAWNING])
    said = b""
    with contextlib.suppress(OSError):  # reading fails with EIO once the other side is closed
        while chunk := os.read(terminal, 4096):
            said += chunk
    os.close(terminal)

    assert os.waitpid(pid, 0)[1] == 0
    assert b"code 0" not in said
    assert b"code " in said
    assert b"pushed\r\n" not in said


@pytest.mark.parametrize(
    ("program", "grace", "code", "said"),
    [("say_signals.sh", 5, 0, "TERM\n"), ("ignore_term.sh", 0.05, 137, "")],
    ids=["asks", "kills a deaf one after the grace"],
)
async def test_terminate_sends_sigterm_before_sigkill(
    env: dict[str, str], tmp_path: Path, program: str, grace: float, code: int, said: str
) -> None:
    log, pidfile = tmp_path / "log", tmp_path / "pid"
    log.touch()
    words = (log, pidfile) if said else (pidfile,)
    child = process.spawn(argv(program, *words), env=env)
    await until(lambda: number_in(pidfile))

    assert await child.terminate(grace) == code
    assert log.read_text() == said


async def test_terminate_kills_the_rest_of_the_group_when_its_leader_exits(env: dict[str, str], tmp_path: Path) -> None:
    """The remaining process ignores SIGTERM, and the grace period is a minute."""
    pidfile = tmp_path / "pid"
    leader = process.spawn(shell(f"sh {argv('ignore_term.sh')[-1]} {pidfile} & exec sleep 600"), env=env)
    member = await until(lambda: number_in(pidfile))

    assert await leader.terminate(60) == 128 + signal.SIGTERM
    await until(lambda: not is_alive(member))


async def test_cancelled_terminate_kills_the_process(env: dict[str, str], tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    child = process.spawn(argv("ignore_term.sh", pidfile), env=env)
    await until(lambda: number_in(pidfile))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.terminate(60)

    assert await child.wait() == 137


async def test_process_group_is_signalled_only_until_its_leader_is_reaped(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the leader has been reaped, another process could have its pid."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *each: sent.append(each))
    child = process.spawn(shell("exit 0"), env=env)
    while child.is_alive:
        time.sleep(0.001)  # noqa: ASYNC251 - the loop must not reap it

    child.send_group(signal.SIGTERM)
    await child.wait()
    child.send_group(signal.SIGTERM)
    assert sent.count((child.pid, signal.SIGTERM)) == 1


@pytest.mark.attack("a job exits so that its process id is reused between the check and the signal")
async def test_signal_never_reaches_another_process_with_the_same_pid(env: dict[str, str]) -> None:
    child = process.spawn(["/bin/sleep", "600"], env=env)

    assert not process.reap(child.pid)
    assert process.is_spawned(child.identity)
    assert not process.send((child.pid, child.start_ticks + 1), signal.SIGKILL)
    assert not process.send((child.pid, child.start_ticks - 1), signal.SIGKILL)
    assert is_alive(child.pid)
    assert process.send((child.pid, child.start_ticks), signal.SIGKILL)
    assert await child.wait() == 128 + signal.SIGKILL
    assert not process.is_spawned(child.identity)
    assert not child.is_alive
    assert child.send(signal.SIGKILL) is False
    child.send_group(signal.SIGKILL)


@pytest.mark.parametrize("how", ["signal", "terminate"])
async def test_terminating_an_adopted_process_spares_its_group(env: dict[str, str], tmp_path: Path, how: str) -> None:
    """The adopted process is a member of a process group that another process leads."""
    pidfile = tmp_path / "pid"
    leader = process.spawn(shell(f"sh {argv('ignore_term.sh')[-1]} {pidfile} & exec sleep 600"), env=env)
    member = process.adopt(await until(lambda: number_in(pidfile)))
    assert member is not None

    if how == "signal":
        member.send_group(signal.SIGKILL)
    else:
        await member.terminate(0.05)

    await until(lambda: not member.is_alive)
    assert leader.is_alive
    await leader.terminate(1)


async def test_adoption_returns_none_unless_the_process_is_alive(env: dict[str, str]) -> None:
    child = process.spawn(shell("exec sleep 600"), env=env)
    again = process.adopt(child.pid, child.start_ticks)

    assert again is not None
    assert process.adopt(child.pid, child.start_ticks - 1) is None
    child.send(signal.SIGKILL)
    # Wait without await, so that the event loop cannot reap the dead process yet.
    while not (stat := proc.stat(child.pid)) or stat.is_alive:
        pass
    assert stat.state == "Z"
    assert process.adopt(child.pid) is None
    assert await again.wait() == 137
    assert await child.wait() == 137
    assert process.adopt(child.pid) is None


async def test_exit_status_of_an_adopted_process_is_known_on_kernel_6_15_and_later(
    env: dict[str, str], tmp_path: Path
) -> None:
    """Older kernels report an exit status only for children."""
    pidfile = tmp_path / "pid"
    script = f"sh -c 'echo $$ >{pidfile}; while [ ! -e {pidfile}.go ]; do sleep 0.01; done; exit 5' & wait"
    parent = process.spawn(shell(script), env=env)
    adopted = process.adopt(await until(lambda: number_in(pidfile)))
    assert adopted is not None
    Path(f"{pidfile}.go").touch()

    assert await adopted.wait() in ((5,) if _kernel() >= (6, 15) else (None,))
    assert not adopted.is_alive
    await parent.wait()


def _kernel() -> tuple[int, int]:
    major, minor, *_ = os.uname().release.split(".")
    return int(major), int(minor)


async def test_reaper_loses_no_child_exit_status(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The SIGCHLD handler may reap a child before the code that waits for the child reads its status."""
    # Simulate a kernel that does not report a process's status after it has been reaped.
    monkeypatch.setattr(fcntl, "ioctl", Mock(side_effect=OSError))
    with reaper.reaping():
        children = [process.spawn(shell(f"exit {number}"), env=env) for number in range(40)]
        codes = await asyncio.gather(*(child.wait() for child in children))

    assert codes == list(range(40))


async def test_orphan_is_reparented_to_the_agent_and_reaped(env: dict[str, str], tmp_path: Path) -> None:
    """As the new parent, the agent can read the exit status of a double-forked daemon."""
    pidfile = tmp_path / "pid"
    with reaper.reaping():
        assert await process.spawn(argv("fork_twice.py", pidfile), env=env).wait() == 0
        daemon = process.adopt(await until(lambda: number_in(pidfile)))
        assert daemon is not None
        # Wait until the intermediate process has exited, which it does only after the pidfile has been written.
        await until(lambda: daemon.pid in proc.children(proc.table()).get(os.getpid(), ()))
        daemon.send(signal.SIGUSR1)

        assert await daemon.wait() == 128 + signal.SIGUSR1
        assert proc.stat(daemon.pid) is None


async def test_processes_are_managed_without_pidfd(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On old kernels or with a strict seccomp profile, the agent uses start times and polling instead of pidfds."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    pidfile = tmp_path / "pid"
    child = process.spawn(shell("exit 7"), env=env)
    stubborn = process.spawn(argv("ignore_term.sh", pidfile), env=env)
    await until(lambda: number_in(pidfile))
    adopted = process.adopt(stubborn.pid, stubborn.start_ticks)
    assert adopted is not None

    assert await child.wait() == 7
    assert process.adopt(stubborn.pid, stubborn.start_ticks - 1) is None
    assert process.send((stubborn.pid, stubborn.start_ticks - 1), signal.SIGKILL) is False
    assert await stubborn.terminate(0.05) == 137
    assert await adopted.wait() == 137
    assert adopted.send(signal.SIGKILL) is False


def test_spawned_process_does_not_inherit_ignored_signals(tmp_path: Path) -> None:
    """The agent may have been started by a program such as nohup that makes it ignore or block signals. A job that
    inherited these settings could not be interrupted.
    """
    program = """
import os, signal, subprocess
from agent_shim.host import process
process.default_signals()
os.kill(os.getpid(), signal.SIGINT)  # ours stays ignored
print(subprocess.run(["/bin/grep", "^Sig[BI]", "/proc/self/status"], capture_output=True, text=True).stdout)
"""
    shell_line = 'trap "" INT QUIT HUP; exec "$0" -c "$1"'
    starter = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.argv[1], sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", starter, SH, "-c", shell_line, sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
    )

    _, blocked, _, ignored = done.stdout.split()
    # Exclude two internal signals of the C library. Since Python 3.13, subprocess uses posix_spawn, whose child ignores
    # them.
    of_libc = 1 << 31 | 1 << 32 if sys.version_info >= (3, 13) else 0
    assert (int(blocked, 16), int(ignored, 16) & ~of_libc) == (0, 0)
