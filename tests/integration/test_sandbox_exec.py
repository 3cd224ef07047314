"""Tests the steps that the sandbox performs right before it executes the program. The program itself reports their
effects.

The steps run in a child process, so they do not affect the test process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_shim.core.errors import HostError
from agent_shim.host import capabilities, process, sandbox, sandbox_exec

UNPRIVILEGED_UID = 65534


def order(**members: Any) -> sandbox_exec.ExecSpec:
    """Return the spec of a program that prints what the kernel reports about it."""
    return sandbox.exec_spec(**{"argv": ["/bin/cat", "/proc/self/status", "/proc/self/limits"], **members})


def in_memory(wanted: sandbox_exec.ExecSpec) -> int:
    """Write the spec to an in-memory file, and return its descriptor."""
    descriptor = os.memfd_create("spec")
    os.write(descriptor, json.dumps(wanted).encode() + b"\n")
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def run(tmp_path: Path, wanted: sandbox_exec.ExecSpec) -> tuple[int | None, dict[str, str]]:
    """Run the program that the spec describes. Return its exit code and the values it printed, keyed by field name."""
    descriptor = in_memory(wanted)
    out = tmp_path / "out"
    status = await process.spawn([*sandbox.launcher(), "0"], env={}, stdin=descriptor, stdout=out, stderr=out).wait()
    os.close(descriptor)
    lines = [
        line.partition(":") if ":" in line else (line[:25].strip(), "", line[25:])
        for line in out.read_text().splitlines()
    ]
    return status, {name: value.strip() for name, _, value in lines}


@pytest.mark.attack("a bpm process gains capabilities, or keeps the agent's groups or descriptors")
async def test_sandboxed_program_has_default_signals_and_no_capabilities(tmp_path: Path) -> None:
    status, found = await run(tmp_path, order())

    # valid_signals() excludes the two signals that the C library reserves, which stay ignored in a child.
    ignored = {each for each in signal.valid_signals() if int(found["SigIgn"], 16) >> (each - 1) & 1}
    assert (status, found["NoNewPrivs"], ignored) == (0, "1", set())
    assert {found[f"Cap{name}"].strip("0") for name in ("Inh", "Prm", "Eff", "Amb")} == {""}


@pytest.mark.attack("a bpm process gains capabilities, or keeps the agent's groups or descriptors")
@pytest.mark.root
async def test_sandboxed_user_has_no_groups_and_only_requested_capabilities(tmp_path: Path) -> None:
    wanted = capabilities.privileges().effective & {"NET_BIND_SERVICE"}
    numbers = [capabilities.NAMES.index(name) for name in wanted]
    before = os.getgroups()
    os.setgroups([0, 4, 20])
    try:
        status, found = await run(tmp_path, order(uid=UNPRIVILEGED_UID, gid=UNPRIVILEGED_UID, capabilities=numbers))
    finally:
        os.setgroups(before)

    assert status == 0
    assert found["Uid"].split() == [str(UNPRIVILEGED_UID)] * 4
    assert found["Gid"].split() == [str(UNPRIVILEGED_UID)] * 4
    assert found["Groups"] == ""
    for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
        assert capabilities.names(found[f"Cap{name}"]) == wanted, name


async def test_privileged_sandbox_keeps_its_capabilities(tmp_path: Path) -> None:
    """Processes with ``unsafe.privileged`` in bpm.yml run in a privileged sandbox."""
    _, found = await run(tmp_path, order(keeps_privileges=True))

    assert found["NoNewPrivs"] == str(int(capabilities.privileges().no_new_privs))
    assert capabilities.names(found["CapEff"]) == capabilities.privileges().effective


async def test_sandbox_limits_are_capped_at_the_hard_limit(tmp_path: Path) -> None:
    _, found = await run(tmp_path, order(limits={"RLIMIT_NOFILE": 77, "RLIMIT_CORE": 4096}))
    assert found["Max open files"].split()[:2] == ["77", "77"]
    assert found["Max core file size"].split()[:2] == ["4096", "4096"]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beyond = 1 << 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        _, found = await run(tmp_path, order(limits={"RLIMIT_NOFILE": beyond}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["agent-shim"] == f"RLIMIT_NOFILE is {hard}, the hard limit, instead of {beyond}"
    assert found["Max open files"].split()[:2] == [str(hard), str(hard)]


@pytest.mark.parametrize("number", [0, 3])
async def test_sandboxed_program_does_not_inherit_the_descriptor_of_its_spec(tmp_path: Path, number: int) -> None:
    """The descriptor from which the spec was read must be closed, because the spec contains the program's
    restrictions.
    """
    out = tmp_path / "out"
    descriptor = in_memory(order(argv=["/bin/sh", "-c", "readlink /proc/$$/fd/*"], env={"PATH": "/bin"}))
    redirected = "0</dev/null" if number else ""
    argv = ["/bin/sh", "-c", f'exec {number}<&0; exec "$@" {redirected}', "sh", *sandbox.launcher(), str(number)]
    await process.spawn(argv, env={}, stdin=descriptor, stdout=out, stderr=out).wait()
    os.close(descriptor)

    assert str(out) in out.read_text()
    assert "memfd:spec" not in out.read_text()


async def test_sandbox_error_names_a_program_that_cannot_run(tmp_path: Path) -> None:
    status, found = await run(tmp_path, order(argv=["/nothing"]))

    assert status == sandbox_exec.FAILED
    assert found["agent-shim"].startswith("cannot run /nothing:")


async def plainly(argv: Sequence[str], stdin: int) -> process.Process:
    return process.spawn(argv, env={}, stdin=stdin)


async def test_sandboxed_program_does_not_run_if_its_pid_cannot_be_recorded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    wanted = order(argv=["/bin/sh", "-c", f"echo >{marker}"])
    with pytest.raises(ValueError, match="full"):
        async with sandbox.prepared(wanted, plainly) as running:
            raise ValueError("the disk is full")

    assert await running.wait() == sandbox_exec.FAILED
    assert not marker.exists()


async def test_sandbox_setup_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounting a volume blocks if its file server does not respond."""
    started = []

    async def held(_: Sequence[str], stdin: int) -> process.Process:
        started.append(process.spawn(["/bin/sleep", "600"], env={}, stdin=stdin))
        return started[0]

    monkeypatch.setattr(sandbox, "PREPARE_TIMEOUT_S", 0.1)

    with pytest.raises(HostError, match="cannot isolate it: no answer within 0.1 seconds"):
        async with sandbox.prepared(order(namespaces=["mnt"]), held):
            pass

    assert await started[0].wait() == 128 + signal.SIGKILL


@pytest.mark.parametrize(("inherited", "own"), [("-500", 0), ("0", 0), ("300", 300)])
def test_sandboxed_job_does_not_inherit_oom_protection_from_the_agent(tmp_path: Path, inherited: str, own: int) -> None:
    """A negative OOM score becomes 0. A positive score makes the kernel kill the job first, so it is kept."""
    score = tmp_path / "oom_score_adj"
    score.write_text(inherited)
    sandbox_exec.reset_oom_score(str(score))

    # In this ordinary file, the new value is appended to the old one, because it is written after the read. In a kernel
    # file, it would replace the old value.
    assert int(score.read_text().removeprefix(inherited) or inherited) == own


@pytest.mark.root
@pytest.mark.parametrize(
    ("members", "step"),
    [
        (
            {"uid": UNPRIVILEGED_UID, "gid": UNPRIVILEGED_UID, "cwd": "/nothing"},
            "enter its directory: /nothing: No such file or directory",
        ),
        (
            {"uid": 2**32 - 2, "gid": UNPRIVILEGED_UID, "argv": ["/nothing"]},
            "execute: /nothing: No such file or directory",
        ),
        ({"cgroups": ["/nothing"]}, "join a cgroup: /nothing/cgroup.procs: No such file or directory"),
        ({"argv": ["/etc/passwd"], "has_init": True}, "execute: /etc/passwd: Permission denied"),
    ],
)
async def test_sandbox_error_names_the_step_that_failed(tmp_path: Path, members: dict[str, Any], step: str) -> None:
    status, found = await run(tmp_path, order(**members))

    program = members.get("argv", ["/bin/cat"])[0]
    assert status == sandbox_exec.FAILED
    assert found["agent-shim"] == f"cannot run {program}: {step}"


@pytest.mark.root
async def test_sandbox_error_names_a_user_to_which_it_cannot_switch(tmp_path: Path) -> None:
    """The container may lack CAP_SETUID and CAP_SETGID."""
    descriptor = in_memory(order(uid=UNPRIVILEGED_UID, gid=UNPRIVILEGED_UID))
    without = ["/usr/bin/setpriv", "--bounding-set=-setuid,-setgid"]
    out = tmp_path / "out"
    argv = [*without, *sandbox.launcher(), "0"]
    status = await process.spawn(argv, env={}, stdin=descriptor, stdout=out, stderr=out).wait()
    os.close(descriptor)

    assert status == sandbox_exec.FAILED
    assert "cannot run /bin/cat: become user 65534: Operation not permitted" in out.read_text()


LISTENING = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("listens: yes")
try:
    open("/proc/self/comm", "rb")
except PermissionError:
    print("reads: no")
"""


@pytest.mark.skipif(not sandbox_exec.landlock_version(), reason="the kernel has no Landlock")
async def test_sandbox_file_rules_do_not_restrict_the_network(tmp_path: Path) -> None:
    binds = [sandbox.bind_mount(each, run=True) for each in ("/usr", "/lib", "/lib64", "/bin", "/etc", sys.base_prefix)]
    argv = [os.path.realpath(sys.executable), "-I", "-S", "-c", LISTENING]
    status, found = await run(tmp_path, order(argv=argv, binds=binds))

    assert (status, found) == (0, {"listens": "yes", "reads": "no"})


MOVING = """
for each in one two; do mkdir $each; done
echo content >one/file && mv one/file two/file && ln two/file one/file && : >two/file && rm -r one two
echo moved: $?
"""


@pytest.mark.skipif(not sandbox_exec.landlock_version(), reason="the kernel has no Landlock")
async def test_sandboxed_program_can_move_and_truncate_files_in_its_volume(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    system = [sandbox.bind_mount(each, run=True) for each in ("/usr", "/lib", "/lib64", "/bin", "/etc")]
    places = [*system, sandbox.bind_mount(str(shown), write=True)]
    argv = ["/bin/sh", "-c", MOVING]
    status, found = await run(tmp_path, order(argv=argv, env={"PATH": "/bin"}, cwd=str(shown), binds=places))

    assert (status, found) == (0, {"moved": "0"})


def directory(path: Path, mode: int, owner: int = 0) -> Path:
    """Create the directory ``path`` with ``mode`` and ``owner``."""
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)])
async def test_sandbox_init_passes_on_the_exit_code_of_its_program(tmp_path: Path, script: str, code: int) -> None:
    script = f"(sleep 0.01 &); echo parent: $(cat /proc/$PPID/comm); {script}"
    status, found = await run(
        tmp_path, order(argv=["/bin/sh", "-c", script], env={"PATH": "/bin"}, has_init=True, inits=[])
    )

    assert (status, "python" in found["parent"]) == (code, True)


async def test_sandbox_uses_the_first_executable_init(tmp_path: Path) -> None:
    """The program is passed to the init after ``--`` so that the init does not take the program's options for its
    own.
    """
    (tmp_path / "text").write_text("")
    for name in ("first", "second"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name}: $*\n")
        (tmp_path / name).chmod(0o755)
    inits = [str(tmp_path / name) for name in ("none", "text", "first", "second")]
    status, found = await run(tmp_path, order(argv=["/bin/echo", "-n"], has_init=True, inits=inits))

    assert (status, found) == (0, {"first": "-- /bin/echo -n"})
